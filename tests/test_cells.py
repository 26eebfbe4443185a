"""Models that sum over all pairs of a molecule, in periodic cells: lattice sums, batches of molecules and cells."""

from __future__ import annotations

import math
import warnings
from functools import cache

import numpy as np
import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import StructureWarning
from torchmdnet2.priors import Coulomb
from torchmdnet2.units import COULOMB

ELEMENTS = [1, 6, 8]
D3 = {"name": "d3", "elements": ELEMENTS, "a1": 0.4, "a2": 4.8, "s8": 1.2, "cutoff": None, "variant": "aimnet2"}
SUM = {"name": "coulomb", "charges": "predicted"}
SMALL = {"hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0}
CONFIGS = {
    "charges of a head": {
        "model": {"name": "tensornet", **SMALL},
        "properties": [{"name": "charges"}],
        "priors": [{**SUM, "damping": "exp"}, D3],
    },
    "charges that are shared out": {
        "model": {"name": "tensornet2", **SMALL, "q_dim": 4},
        "priors": [{**SUM, "damping": "cosine", "damping_lower": 1.0}],
    },
    "channels of charges": {
        "model": {"name": "tensornet2", **SMALL, "q_dim": 4},
        "head": {"name": "scalar_coulomb", "q_weights": [1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0]},
    },
    "fixed charges": {
        "model": {"name": "tensornet", **SMALL},
        "priors": [{"name": "coulomb", "charges": {"H": 0.3, "C": -0.2, "O": -0.4}}],
    },
}
CHARGED = list(CONFIGS)[:3]


@cache
def model(kind: str, coulomb: str = "pme") -> Potential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        potential = Potential.from_config({**CONFIGS[kind], "elements": ELEMENTS})
        if potential.properties:  # charges of tenths of e
            list(potential.properties["charges"].parameters())[-2].data.mul_(20)
    potential.coulomb = coulomb
    return potential.double().eval()


def atoms(number: int, cell: np.ndarray | None, seed: int, charge: float = 0.0, pbc=None) -> System:
    """Atoms at least 1 Å apart, also from images."""
    rng, found = np.random.default_rng(seed), np.zeros((0, 3))
    box = np.eye(3) * 4.0 if cell is None else cell
    images = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3) @ box
    while len(found) < number:
        new = rng.uniform(0, 1, 3) @ box
        near = np.linalg.norm(found[:, None] - new + images, axis=-1)
        if near.size == 0 or near.min() > 1.0:
            found = np.vstack([found, new])
    z = torch.tensor(rng.choice(ELEMENTS, number))
    given = {} if cell is None else {"cell": torch.from_numpy(cell), "pbc": pbc}
    return System(z, torch.from_numpy(found), charge=charge, **given)


CUBE, SKEW = np.eye(3) * 4.2, np.array([[4.1, 0, 0], [1.3, 4.4, 0], [-0.9, 1.7, 5.0]])


# --- Against other sums ---


def ewald(system: System, q: torch.Tensor, factor, alpha: float = 0.9, reach: int = 5, waves: int = 9) -> torch.Tensor:
    """e²/Å, by the formula: images out to `reach` cells, waves out to `waves` along each reciprocal vector."""
    cell, volume = system.cell[0], system.volume[0]
    shifts = torch.cartesian_prod(*[torch.arange(-reach, reach + 1, dtype=torch.float64)] * 3) @ cell
    d = (system.pos[:, None, None] - system.pos[None, :, None] + shifts).square().sum(-1)
    d = torch.where(d > 1e-12, d, 1e12).sqrt()
    pairs = q[:, None, None] * q[None, :, None] * (torch.erfc(alpha * d) - 1 + factor(d)) / d
    n = torch.cartesian_prod(*[torch.arange(-waves, waves + 1, dtype=torch.float64)] * 3)
    k = 2 * math.pi * n[n.abs().sum(1) > 0] @ torch.linalg.inv(cell).T
    k2 = k.square().sum(1)
    density = (q * torch.exp(1j * (system.pos @ k.T).T)).sum(1).abs().square()
    far = 2 * math.pi / volume * (torch.exp(-k2 / (4 * alpha**2)) / k2 * density).sum()
    alone = alpha / math.sqrt(math.pi) * q.square().sum() + math.pi / (2 * volume * alpha**2) * q.sum() ** 2
    return pairs.sum() / 2 + far - alone


@pytest.mark.parametrize("cell", [CUBE, SKEW], ids=["cube", "skew"])
@pytest.mark.parametrize("damping", ["none", "exp", "cosine"])
def test_pme_against_a_plain_ewald_sum(cell, damping):
    """Cells smaller than the cutoff; neutral and charged."""
    prior = Coulomb("predicted", damping=damping)
    there = prior.in_cells("pme")
    assert prior.energy.method == "all_pairs" and there.energy.method == "pme" and there.cutoff == 10.0
    for total in (0.0, 1.0):
        system = atoms(8, cell, 1)
        q = torch.linspace(-0.5, 0.5, 8, dtype=torch.float64) + total / 8
        system.pos.requires_grad_()
        found = there(system, pairs(system, there.cutoff), q).sum()
        expected = COULOMB * ewald(system, q, prior.energy.factor)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        forces, wanted = (torch.autograd.grad(e, system.pos)[0] for e in (found, expected))
        assert (forces - wanted).abs().max() < 1e-6 * wanted.abs().max()


def pairs(system: System, cutoff: float):
    from torchmdnet2.neighbors import neighbor_list

    return neighbor_list(system.detach(), cutoff)


def test_pme_against_growing_clusters():
    """Tetrahedra without dipole and quadrupole: the energy of one among all others within a sphere converges fast."""
    corners = np.array([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) * 0.63
    charges, side = np.array([-0.8, 0.2, 0.2, 0.2, 0.2]), 4.0
    factor = Coulomb("predicted", damping="exp").energy.factor
    system = System(torch.tensor([6, 1, 1, 1, 1]), torch.from_numpy(corners), cell=torch.eye(3) * side)
    prior = Coulomb("predicted", damping="exp").in_cells("pme")
    expected = float(prior(system, pairs(system, prior.cutoff), torch.from_numpy(charges)).sum())
    # of images, which is what the cell adds
    own = torch.from_numpy(np.linalg.norm(corners[:, None] - corners, axis=-1)[np.triu_indices(5, 1)])
    products = torch.from_numpy((charges[:, None] * charges)[np.triu_indices(5, 1)])
    inside = float(COULOMB * (products * factor(own) / own).sum())
    differences = []
    for radius in (16.0, 32.0, 64.0):
        axis = np.arange(-round(radius / side), round(radius / side) + 1)
        centers = np.stack(np.meshgrid(axis, axis, axis), -1).reshape(-1, 3) * side
        size = np.linalg.norm(centers, axis=1)
        centers = centers[(size > 0) & (size <= radius)]
        total = 0.0
        for i, p in enumerate(corners):
            for j, r in enumerate(corners):
                d = torch.from_numpy(np.linalg.norm(centers + r - p, axis=1))
                total += charges[i] * charges[j] * float((factor(d) / d).sum())
        differences.append(abs(inside + COULOMB * total / 2 - expected))
    assert differences[-1] < 1e-6 * abs(expected) and differences[-1] < 1e-4 * abs(expected - inside), differences


def test_damped_shifted_force_is_near_the_ewald_sum():
    """Rock salt, its ions displaced."""
    from ase.build import bulk

    salt = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat(2)
    salt.rattle(0.2, seed=0)
    system = System.from_ase(salt)
    q = torch.where(system.z == 11, 0.8, -0.8).double()
    sums = {name: Coulomb("predicted", damping="exp").in_cells(name) for name in ("pme", "dsf")}
    system.pos.requires_grad_()
    energies = {name: s(system, pairs(system, s.cutoff), q).sum() for name, s in sums.items()}
    forces = {name: torch.autograd.grad(energy, system.pos)[0] for name, energy in energies.items()}
    assert abs(energies["dsf"] / energies["pme"] - 1).detach() < 1e-3
    assert (forces["dsf"] - forces["pme"]).abs().max() < 0.02 * forces["pme"].abs().max()


def test_damped_shifted_force_ends_smoothly():
    prior = Coulomb([1.0, -1.0], "dsf", cutoff=6.0)

    def slope(d: float) -> tuple[float, float]:
        system = System(torch.tensor([1, 1]), torch.tensor([[0.0, 0, 0], [d, 0, 0]]).double())
        system.pos.requires_grad_()
        energy = prior(system, pairs(system, 6.5)).sum()
        return float(energy), float(torch.autograd.grad(energy, system.pos)[0][1, 0])

    (inside, pull), (outside, none) = slope(6.0 - 1e-7), slope(6.0 + 1e-7)
    assert inside == pytest.approx(outside, abs=1e-9) and none == 0 and abs(pull) < 1e-6
    assert abs(slope(3.0)[1]) > 0.1


# --- Potentials ---


@pytest.mark.parametrize("coulomb", ["pme", "dsf"])
@pytest.mark.parametrize("kind", CHARGED)
@pytest.mark.filterwarnings("ignore::torchmdnet2.errors.StructureWarning")
def test_forces_and_stress_are_derivatives(kind, coulomb):
    """Of charges that move with the atoms too; neutral and charged, in cells smaller than every cutoff."""
    potential = model(kind, coulomb)
    for cell, charge in ((CUBE, 1.0), (SKEW, 0.0)):
        system = atoms(5, cell, 3, charge)
        found = potential(system, stress=True)
        assert found.charges is not None and float(found.charges.sum()) == pytest.approx(charge, abs=1e-9)
        rng = np.random.default_rng(0)
        move = torch.from_numpy(rng.normal(size=(5, 3)))
        strain = torch.from_numpy(rng.normal(size=(3, 3)))
        strain = (strain + strain.T) / 2

        def energy(step: float, s=system, move=move) -> float:
            return float(potential(s.replace(pos=s.pos + step * move), forces=False).energy)

        def strained(step: float, s=system, strain=strain) -> float:
            grow = torch.eye(3, dtype=torch.float64) + step * strain
            return float(potential(s.replace(pos=s.pos @ grow, cell=s.cell @ grow), forces=False).energy)

        slope, virial = -float((found.forces * move).sum()), float((found.stress[0] * strain).sum() * system.volume[0])
        largest = float(found.forces.norm()), float(found.stress.norm() * system.volume[0])
        assert _difference(energy) == pytest.approx(slope, abs=1e-6 * largest[0])
        assert _difference(strained) == pytest.approx(virial, abs=1e-6 * largest[1])


def _difference(energy) -> float:
    """By steps of 5e-4 and twice that, with an error of the fourth order."""
    h = 5e-4
    near, far = ((energy(k * h) - energy(-k * h)) / (2 * k * h) for k in (1, 2))
    return (4 * near - far) / 3


@pytest.mark.parametrize("coulomb", ["pme", "dsf"])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_supercells(kind, coulomb):
    potential, system = model(kind, coulomb), atoms(6, SKEW, 5)
    system = system.replace(z=torch.tensor([1, 1, 1, 8, 8, 6])) if kind == "fixed charges" else system
    [cell] = system.to_ase()
    double = System.from_ase(cell.repeat((2, 1, 2)))
    one, four = potential(system, stress=True), potential(double, stress=True)
    assert float(four.energy) == pytest.approx(4 * float(one.energy), rel=1e-8)
    assert (four.forces[:6] - one.forces).abs().max() < 1e-6
    assert (four.stress - one.stress).abs().max() < 1e-7


@pytest.mark.parametrize("kind", CHARGED)
def test_a_structure_that_becomes_periodic_in_place(kind):
    potential, system = model(kind), atoms(6, CUBE, 2, pbc=[False] * 3)
    evaluator = Evaluator(potential)
    molecule = evaluator(system).energy
    for periodic in (True, False, True):
        system.pbc.fill_(periodic)
        found, expected = evaluator(system).energy, Evaluator(potential)(system).energy
        assert float((found - expected).abs()) < 1e-9 and (float((found - molecule).abs()) > 1e-6) == periodic
    with torch.inference_mode():
        system = system.replace(pbc=system.pbc.clone())
        for periodic in (False, True):
            system.pbc.fill_(periodic)
            assert (float((evaluator(system).energy - molecule).abs()) > 1e-6) == periodic


@pytest.mark.parametrize("kind", CHARGED)
def test_batches_of_molecules_and_cells(kind):
    """The same as one by one, whatever the order of the atoms, by autograd and in an Evaluator."""
    potential = model(kind)
    parts = [atoms(5, None, 1), atoms(4, CUBE, 2), atoms(3, None, 3, -1.0), atoms(6, SKEW, 4)]
    batch = System.concatenate(parts)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    mixed = batch.replace(z=batch.z[order], pos=batch.pos[order], batch=batch.batch[order])
    alone = [potential.reference(part) for part in parts]
    for evaluate in (potential, Evaluator(potential)):
        found, shuffled = evaluate(batch), evaluate(mixed)
        for result, places in ((found, slice(None)), (shuffled, order)):
            for name in ("forces", "atom_energies", "charges"):
                wanted = torch.cat([getattr(r, name) for r in alone])[places]
                torch.testing.assert_close(getattr(result, name), wanted, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(result.energy, torch.cat([r.energy for r in alone]), rtol=1e-12, atol=1e-9)
        assert result.properties["dipole"].isnan().any(1).tolist() == [False, True, False, True]
    assert float(potential.prior_energies(batch, charges=found.charges).sum()) == pytest.approx(
        sum(float(potential.prior_energies(p, charges=r.charges).sum()) for p, r in zip(parts, alone, strict=True))
    )
    with pytest.raises(ValueError, match="a batch of molecules and cells is evaluated in two steps: give one kind"):
        Evaluator(potential).report(batch)
    bound = Evaluator(potential).bind(batch)
    bound.replay()
    assert bound.check() and (bound.forces - found.forces).abs().max() < 1e-9
    batch.pos.requires_grad_()
    energy = Evaluator(potential)(batch).energy.sum()
    assert (torch.autograd.grad(energy, batch.pos)[0] + found.forces).abs().max() < 1e-9


@pytest.mark.parametrize("coulomb", ["pme", "dsf"])
def test_compiled_kernels_agree(coulomb, monkeypatch):
    pytest.importorskip("numba")
    exact = model("charges of a head", coulomb)
    potential = Potential.from_config({**CONFIGS["charges of a head"], "elements": ELEMENTS}).eval()
    potential.load_state_dict(exact.state_dict())
    potential.coulomb = coulomb
    evaluator, molecule, cell = Evaluator(potential), atoms(5, None, 1), atoms(7, SKEW, 2)
    before = evaluator(molecule)
    expected, found = exact(cell, stress=True), evaluator(cell, stress=True)
    again = evaluator(molecule)
    assert torch.equal(again.energy, before.energy) and torch.equal(again.forces, before.forces)
    assert float(found.energy - expected.energy) == pytest.approx(0, abs=2e-4)
    # charges of 5 e give forces of 41 eV/Å, whose last digits in float32 differ between processors
    rounding = 4e-6 * float(expected.forces.abs().max())
    assert (found.forces - expected.forces).abs().max() < rounding
    assert (found.stress - expected.stress).abs().max() < 1e-5
    report = evaluator.report(cell)
    assert "priors on kernels: Coulomb" in report and "by autograd" not in report
    assert "compiled TensorNet kernels" in report and "Coulomb" in report and f"by {coulomb.upper()}" in report
    bound = evaluator.bind(cell, stress=True)
    bound.cell.mul_(1.02)
    bound.pos.mul_(1.02)
    bound.replay()
    moved = exact(cell.replace(pos=cell.pos * 1.02, cell=cell.cell * 1.02), stress=True)
    assert bound.check() and bound.compiled
    assert (bound.forces - moved.forces).abs().max() < rounding
    assert (bound.stress - moved.stress).abs().max() < 1e-5


def test_aimnet2_in_ase():
    """On kernels, the Coulomb energy too; a box that only just holds a molecule."""
    pytest.importorskip("numba")
    from ase.build import molecule

    from torchmdnet2.adapters.ase import TorchMDNet2Calculator

    atoms = molecule("H2O", cell=np.eye(3) * 4.0, pbc=True)
    potential = load("aimnet2", dtype=torch.float64)
    expected = potential.reference(System.from_ase(atoms), stress=True)
    atoms.calc = TorchMDNet2Calculator("aimnet2")
    assert atoms.get_potential_energy() == pytest.approx(float(expected.energy), abs=1e-3)
    np.testing.assert_allclose(atoms.get_forces(), expected.forces, atol=1e-4)
    np.testing.assert_allclose(atoms.get_stress(voigt=False), expected.stress[0], atol=1e-5)


def test_options_and_refusals(tmp_path):
    potential = model("charges of a head")
    cell = atoms(6, CUBE, 2)
    save(potential, tmp_path / "m.tmn")
    for name in ("pme", "dsf"):
        loaded = load(tmp_path / "m.tmn", coulomb=name)
        expected = model("charges of a head", name)(cell)
        assert float(loaded(cell).energy) == pytest.approx(float(expected.energy), abs=1e-9)
    assert abs(loaded(cell).energy - potential(cell).energy) > 1e-4
    with pytest.raises(ValueError, match=r"coulomb must be 'pme'.*'dsf'"):
        load(tmp_path / "m.tmn", coulomb="ewald")
    with pytest.raises(ValueError, match=r"structure 1 is periodic in one or two directions only.*vacuum"):
        potential(System.concatenate([cell, atoms(6, CUBE, 2, pbc=[True, True, False])]))
    with pytest.warns(StructureWarning, match=r"structure 1 is a periodic cell of charge -1.*uniform background"):
        potential(System.concatenate([cell, atoms(6, CUBE, 2, -1.0)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        potential(System.concatenate([cell, atoms(6, None, 2, -1.0)]))
    with pytest.raises(ValueError, match="train on liquids or crystals"):
        Potential.from_config(CONFIGS["fixed charges"])(atoms(6, CUBE, 2))  # in training mode
