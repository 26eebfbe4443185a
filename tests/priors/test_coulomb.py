"""Coulomb energies against Madelung constants, plain sums and finite differences."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.geometry import cellpar_to_cell

from torchmdnet2 import Potential, System
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.priors import Coulomb
from torchmdnet2.priors.coulomb.coulomb import Electrostatics
from torchmdnet2.testing import check_prior, example_systems, without_network
from torchmdnet2.units import COULOMB

SYSTEMS = example_systems((1, 6, 8), 5.0)
CHARGES = {1: 0.4, 6: -0.1, 8: -0.7}
PERIODIC = ("cubic cell", "triclinic cell", "left-handed cell", "tiny cell")


def energy(prior: Coulomb, system: System) -> float:
    prior.check(system)
    return float(prior(system, pair_list(system, prior.cutoff)).sum())


MADELUNG = {
    "NaCl": (("rocksalt", 5.6), 1.747564594633182, 0.5),
    "CsCl": (("cesiumchloride", 4.1), 1.762674773070992, math.sqrt(3) / 2),
    "ZnS": (("zincblende", 5.4), 1.638055053388789, math.sqrt(3) / 4),
}


@pytest.mark.parametrize(("method", "cutoff", "bar"), [("ewald", 5.0, 1e-8), ("ewald", 9.0, 1e-8), ("pme", 9.0, 1e-8)])
@pytest.mark.parametrize("crystal", MADELUNG)
def test_madelung_constants(crystal, method, cutoff, bar):
    """Energy per ion pair −M k_e/d of unit charges, to 1e-6 and better; the constants are those of the literature."""
    (structure, a), constant, nearest = MADELUNG[crystal]
    atoms = bulk(crystal, structure, a=a)
    cation, anion = atoms.numbers
    prior = Coulomb({int(cation): 1.0, int(anion): -1.0}, method, cutoff)
    found = -energy(prior, System.from_ase(atoms)) * nearest * a / COULOMB
    assert found == pytest.approx(constant, rel=bar)


def test_ewald_does_not_depend_on_its_cutoff():
    """The split between real and reciprocal space is free: also for charged and narrow cells, energy and forces."""
    for name in PERIODIC:
        system = SYSTEMS[name]
        results = []
        for cutoff in (4.0, 7.0):
            pos = system.pos.clone().requires_grad_()
            moving = system.replace(pos=pos)
            prior = Coulomb(CHARGES, "ewald", cutoff, accuracy=1e-12)
            total = prior(moving, pair_list(moving, cutoff)).sum()
            results.append((total.item(), torch.autograd.grad(total, pos)[0]))
        (e1, f1), (e2, f2) = results
        assert e1 == pytest.approx(e2, abs=1e-8), name
        assert torch.allclose(f1, f2, rtol=0, atol=1e-7), name


@pytest.mark.parametrize("accuracy", [1e-4, 1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize("name", PERIODIC)
def test_particle_mesh_is_ewald(name, accuracy):
    """Energy and forces of the mesh agree with the sum of plane waves to the accuracy asked for."""
    results = []
    for method in ("ewald", "pme"):
        pos = SYSTEMS[name].pos.clone().requires_grad_()
        moving = SYSTEMS[name].replace(pos=pos)
        prior = Coulomb(CHARGES, method, 6.0, accuracy=accuracy if method == "pme" else 1e-12)
        total = prior(moving, pair_list(moving, 6.0)).sum()
        results.append((total.item(), torch.autograd.grad(total, pos)[0]))
    (e1, f1), (e2, f2) = results
    assert e2 == pytest.approx(e1, rel=5 * accuracy)
    assert float((f1 - f2).abs().max() / f1.abs().max()) < 20 * accuracy


@pytest.mark.parametrize("name", ["molecule", *PERIODIC])
def test_conformance_of_the_mesh(name):
    """Forces and stress are exact derivatives; batches and order do not matter."""
    from torchmdnet2 import testing as checks

    potential = without_network([Coulomb(CHARGES, "pme", 6.0, accuracy=1e-6)], (1, 6, 8))
    checks.forces_are_gradients(potential, SYSTEMS[name])
    checks.stress_is_strain_derivative(potential, SYSTEMS[name])
    checks.batch_equals_singles(potential, SYSTEMS[name])
    checks.order_does_not_matter(potential, SYSTEMS[name])


def test_symmetries_of_a_fine_mesh():
    """With the accuracy turned up, the mesh passes the checks that a coarse one does not; derivatives: see above."""
    from torchmdnet2 import testing as checks

    potential = without_network([Coulomb(CHARGES, "pme", 5.0, accuracy=1e-11)], (1, 6, 8)).eval()
    for name in ("triclinic cell", "tiny cell"):
        checks.translation_changes_nothing(potential, SYSTEMS[name])
        checks.rotation_changes_nothing(potential, SYSTEMS[name])
        checks.supercell_changes_nothing(potential, SYSTEMS[name])
    checks.smooth_at_the_cutoff(potential)


def test_mesh_in_cells_of_every_shape():
    """Narrow, wide, skew and left-handed cells, atoms anywhere: Ewald's energy to 1e-8 eV/atom, forces to 1e-7 eV/Å."""
    rng = np.random.default_rng(0)
    lengths, angles = rng.uniform(1.5, 12, (300, 3)), rng.uniform(15, 165, (300, 3))
    shapes = [(d, a) for d, a in zip(lengths, angles, strict=True) if a.sum() < 350 and 2 * a.max() < a.sum() - 10]
    for k, (d, a) in enumerate(shapes[:15]):
        cell = torch.tensor(cellpar_to_cell([*d, *a])) * (-1) ** k
        num = 2 + k % 5
        system = System(
            z=torch.tensor(rng.choice([1, 6, 8], num)), pos=torch.tensor(rng.uniform(-10, 10, (num, 3))), cell=cell
        )
        exact, mesh = (
            without_network([Coulomb(CHARGES, method, 5.0, accuracy=accuracy)], (1, 6, 8)).eval()(system, stress=True)
            for method, accuracy in (("ewald", 1e-13), ("pme", 1e-10))
        )
        assert float((mesh.energy - exact.energy).abs()) / num <= 1e-8, (d, a)
        assert float((mesh.forces - exact.forces).abs().max()) <= 1e-7, (d, a)
        assert float((mesh.stress - exact.stress).abs().max()) <= 1e-7, (d, a)


def test_mesh_work_grows_with_the_number_of_atoms():
    """N log N: mesh points per volume stay the same, and 27 times the atoms take far less than 27² times as long."""
    from torchmdnet2.priors.coulomb import ewald as mesh

    def sizes(length: float) -> list[int]:
        order, spacing = mesh.order_and_spacing(1e-9, 0.4)
        return mesh.mesh_sizes(length * torch.eye(3, dtype=torch.float64), order, spacing)

    assert math.prod(sizes(120.0)) <= 27 * 1.3 * math.prod(sizes(40.0))

    def seconds(repeat: int) -> float:
        system = System.from_ase(bulk("NaCl", "rocksalt", a=5.6, cubic=True) * (repeat, repeat, repeat))
        prior = Coulomb({11: 1.0, 17: -1.0}, "pme", 6.0, accuracy=1e-6)
        pairs = pair_list(system, 6.0)
        times = []
        for _ in range(3):
            start = time.process_time()
            prior(system, pairs)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(6) < 27 * 5 * seconds(2)


def test_accuracy_means_what_it_says():
    system = SYSTEMS["triclinic cell"]
    exact = energy(Coulomb(CHARGES, "ewald", 6.0, accuracy=1e-14), system)
    for accuracy in (1e-4, 1e-6, 1e-8):
        assert abs(energy(Coulomb(CHARGES, "ewald", 6.0, accuracy=accuracy), system) / exact - 1) < 10 * accuracy


def test_ewald_of_a_neutral_molecule_in_a_growing_cell():
    """The periodic energy tends to that of the molecule alone as the dipoles of the images fade, like 1/L³."""
    molecule = SYSTEMS["molecule"]
    alone = energy(Coulomb(CHARGES, "all_pairs"), molecule)
    errors = []
    for length in (25.0, 50.0):
        cell = System(z=molecule.z, pos=molecule.pos, cell=length * torch.eye(3, dtype=torch.float64))
        charges = torch.tensor([CHARGES[int(z)] for z in molecule.z])
        neutral = (charges - charges.mean()).tolist()
        alone = energy(Coulomb(neutral, "all_pairs"), molecule)
        errors.append(abs(energy(Coulomb(neutral, "ewald", 12.0), cell) - alone))
    assert errors[1] < errors[0] / 7 and errors[1] < 1e-3


@pytest.mark.parametrize("damping", ["none", "exp", "cosine"])
def test_all_pairs_against_a_plain_sum(damping):
    molecule = SYSTEMS["ion"].replace(pos=1.5 * SYSTEMS["ion"].pos)
    prior = Coulomb(CHARGES, "all_pairs", damping=damping, damping_lower=1.0, damping_upper=4.0)
    expected = 0.0
    for i in range(6):
        for j in range(i):
            d = math.dist(molecule.pos[i].tolist(), molecule.pos[j].tolist())
            factor = {
                "none": 1.0,
                "exp": 1 - math.exp(1 - 1 / (1 - min(d / 4, 1 - 1e-6) ** 2)),
                "cosine": 0.5 - 0.5 * math.cos(math.pi * min(max((d - 1) / 3, 0), 1)),
            }[damping]
            expected += COULOMB * CHARGES[int(molecule.z[i])] * CHARGES[int(molecule.z[j])] * factor / d
    assert energy(prior, molecule) == pytest.approx(expected, rel=1e-12)


def test_damped_ewald_is_ewald_less_the_damped_part():
    system = SYSTEMS["cubic cell"]
    plain, damped = (Coulomb(CHARGES, "ewald", 8.0, damping=d, damping_upper=4.0) for d in ("none", "exp"))
    missing = 0.0
    for d, (i, j) in zip(
        pair_list(system, 8.0).distances(system).tolist(), pair_list(system, 8.0).edge_index.T.tolist(), strict=True
    ):
        t = min(d / 4, 1 - 1e-6)
        qq = CHARGES[int(system.z[i])] * CHARGES[int(system.z[j])]
        missing += 0.5 * COULOMB * qq * math.exp(1 - 1 / (1 - t * t)) / d
    assert energy(plain, system) - energy(damped, system) == pytest.approx(missing, rel=1e-10)


@pytest.mark.parametrize("width", [0.0, 1.0])
@pytest.mark.parametrize("dielectric", [None, 78.3, 2.0])
def test_reaction_field_against_a_plain_sum(dielectric, width):
    ratio = 0.5 if dielectric is None else (dielectric - 1) / (2 * dielectric + 1)
    molecule = SYSTEMS["molecule"]
    prior = Coulomb(CHARGES, "reaction_field", 2.5, dielectric=dielectric, switch_width=width)
    expected = 0.0
    for i in range(6):
        for j in range(i):
            d = math.dist(molecule.pos[i].tolist(), molecule.pos[j].tolist())
            if d < 2.5:
                t = max(0, (d - 2.5 + width) / width) if width else 0
                kernel = 1 / d + ratio * d * d / 2.5**3 - (1 + ratio) / 2.5
                kernel *= 1 - 10 * t**3 + 15 * t**4 - 6 * t**5
                expected += COULOMB * CHARGES[int(molecule.z[i])] * CHARGES[int(molecule.z[j])] * kernel
    assert energy(prior, molecule) == pytest.approx(expected, rel=1e-12)


def pair_force(prior: Coulomb, d: float) -> tuple[float, float]:
    """Energy and force along the line of two unit charges at a distance."""
    pos = torch.tensor([[0.0, 0, 0], [d, 0, 0]], dtype=torch.float64, requires_grad=True)
    system = System(z=torch.tensor([1, 1]), pos=pos)
    total = prior(system, pair_list(system, prior.cutoff)).sum()
    return total.item(), -float(torch.autograd.grad(total, pos)[0][1, 0])


@pytest.mark.parametrize("dielectric", [None, 78.3, 2.0])
def test_r9_reaction_field_at_the_cutoff(dielectric):
    """R9: by default neither energy nor force jumps as a pair crosses the cutoff, whatever the medium."""
    prior = Coulomb({1: 1.0}, "reaction_field", 6.0, dielectric=dielectric)
    forces = [pair_force(prior, 6.0 + x)[1] for x in (-1e-5, 1e-5)]
    assert abs(forces[0] - forces[1]) <= 1e-6 and forces[1] == 0
    start = [pair_force(prior, 5.0 + x) for x in (-1e-7, 1e-7)]
    assert abs(start[0][1] - start[1][1]) <= 1e-6 and abs(start[0][1]) > 1e-3
    # the pure reaction field below the last Å
    plain = Coulomb({1: 1.0}, "reaction_field", 6.0, dielectric=dielectric, switch_width=0.0)
    assert pair_force(prior, 4.9) == pair_force(plain, 4.9)


@pytest.mark.parametrize(("dielectric", "jump"), [(None, 0.0), (78.3, 3 / (2 * 78.3 + 1) / 36)])
def test_plain_reaction_field_at_the_cutoff(dielectric, jump):
    """Without switching, the force jumps by 3 k_e q q/((2ε+1) r_c²), which vanishes for ε = ∞."""
    prior = Coulomb({1: 1.0}, "reaction_field", 6.0, dielectric=dielectric, switch_width=0.0)
    energy, force = pair_force(prior, 6 - 1e-9)
    assert energy == pytest.approx(0, abs=1e-7)
    assert force == pytest.approx(COULOMB * jump, abs=1e-7)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("all_pairs", ("molecule", "ion")),
        ("reaction_field", ("molecule", "triclinic cell", "tiny cell", "slab")),
        ("ewald", ("molecule", "triclinic cell", "left-handed cell", "tiny cell")),
    ],
)
def test_conformance(method, names):
    """Forces, stress, symmetry, batches: the shipped checks."""
    prior = Coulomb(CHARGES, method, 6.0, damping="exp", damping_upper=4.0, accuracy=1e-10)
    check_prior(prior, [SYSTEMS[name] for name in names])


@pytest.mark.parametrize("name", ["molecule", "triclinic cell"])
def test_predicted_charges_of_a_head(name):
    """Charges of a head feed the prior; forces include their change."""
    from torchmdnet2.testing import SYSTEM_CHECKS

    torch.manual_seed(0)
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_rbf": 6, "cutoff": 4.0, "max_z": 9},
        "properties": [{"name": "charges"}],
        "priors": [{"name": "coulomb", "method": "ewald", "cutoff": 6.0}],
        "elements": [1, 6, 8],
    }
    potential = Potential.from_config(config).double().eval()
    for check in SYSTEM_CHECKS.values():
        check(potential, SYSTEMS[name])
    result = potential(SYSTEMS[name])
    assert float(result.charges.sum() - SYSTEMS[name].charge) == pytest.approx(0, abs=1e-10)
    config["priors"] = []
    assert abs((result.energy - Potential.from_config(config).double()(SYSTEMS[name]).energy).item()) > 1e-4


def test_w8_unit_charges_at_one_angstrom():
    """W8: the energy of two unit charges 1 Å apart is −14.4 eV, not ten times that; a cell is honoured."""
    pair = System(z=torch.tensor([11, 17]), pos=torch.tensor([[0.0, 0, 0], [1, 0, 0]]))
    assert energy(Coulomb({11: 1, 17: -1}), pair) == pytest.approx(-14.3996, abs=1e-4)
    # across the boundary of a cell the pair is as close
    cell = pair.replace(pos=torch.tensor([[0.0, 0, 0], [19, 0, 0]]), cell=20 * torch.eye(3)[None], pbc=~pair.pbc)
    inside = cell.replace(pos=torch.tensor([[0.0, 0, 0], [-1, 0, 0]]))
    prior = Coulomb({11: 1, 17: -1}, "ewald", 8.0)
    assert energy(prior, cell) == pytest.approx(energy(prior, inside), rel=1e-6)
    assert energy(prior, cell) == pytest.approx(-14.3996, rel=1e-2)


def test_mixed_batch_of_cells_and_molecules():
    prior = Coulomb(CHARGES, "ewald", 6.0)
    parts = [SYSTEMS["molecule"], SYSTEMS["triclinic cell"], SYSTEMS["ion"]]
    batch = System.concatenate(parts)
    atoms = prior(batch, pair_list(batch, 6.0))
    together = torch.zeros(3, dtype=torch.float64).index_add(0, batch.batch, atoms)
    for total, part in zip(together.tolist(), parts, strict=True):
        assert total == pytest.approx(energy(prior, part), rel=1e-12)


def test_errors():
    with pytest.raises(ValueError, match="one or two directions"):
        energy(Coulomb(CHARGES, "ewald", 6.0), SYSTEMS["slab"])
    with pytest.raises(ValueError, match="infinitely many terms"):
        energy(Coulomb(CHARGES), SYSTEMS["tiny cell"])
    huge = System(z=torch.tensor([8, 1]), pos=torch.eye(3)[:2], cell=torch.diag(torch.tensor([3000.0, 2000, 900])))
    with pytest.raises(ValueError, match=r"3000, 2000, 900 Å long, .* takes .* GB, more than 'cpu' has: .* no cell"):
        energy(Coulomb([-0.1, 0.1], "pme", 6.0), huge)
    with pytest.raises(ValueError, match="predicts none"):
        energy(Coulomb(), SYSTEMS["molecule"])
    with pytest.raises(ValueError, match="6 atoms"):
        energy(Coulomb([0.1, -0.1]), SYSTEMS["molecule"])
    for options, words in (
        ({"method": "fmm"}, "method must be .*, got 'fmm'"),
        ({"damping": "gauss"}, "damping must be none, exp or cosine, got 'gauss'"),
        ({"damping": "exp", "damping_lower": 5.0}, r"damping must have 0 ≤ lower < upper, got 5\.0 … 4\.6 Å"),
        ({"dielectric": 0.5}, "dielectric constant must be at least 1"),
        ({"accuracy": 1.0}, "accuracy must be between 0 and 0"),
        ({"method": "ewald", "cutoff": 0.0}, "cutoff must be a positive number of Å"),
        ({"method": "reaction_field", "cutoff": 3.0, "switch_width": 3.0}, "switch_width must be between 0 and the"),
        ({"charges": "own"}, "charges must be 'predicted' or numbers, got 'own'"),
    ):
        with pytest.raises(ValueError, match=words):
            Coulomb(**options)
    for nothing in ({}, [], ""):
        with pytest.raises(ValueError, match="empty"):
            Coulomb(nothing)
    with pytest.raises(ValueError, match="beyond the cutoff"):
        Electrostatics("ewald", 3.0, "exp", damping_upper=4.6)
