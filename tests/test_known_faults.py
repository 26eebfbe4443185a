"""Wrong answers that other packages have given, one test each. W numbers are those of the project's list of faults."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from tiny import ELEMENTS, REFERENCES, chiral, ethanol, silicon, tiny_potential

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.errors import BadData, UnknownElement
from torchmdnet2.neighbors import neighbor_list

POTENTIAL = tiny_potential()


def test_every_fault_has_a_test():
    """W1 … W20, each in the file of the part that it concerns, in a test that carries its number."""
    sources = [path.read_text() for path in Path(__file__).parent.rglob("test_*.py")]
    numbers = {int(number) for source in sources for number in re.findall(r"def test_w(\d+)_", source)}
    assert numbers >= set(range(1, 21))


def energy(potential, atoms) -> float:
    return float(potential(System.from_ase(atoms), forces=False).energy)


def test_w1_so3_skew_sign_is_the_mirror_image():
    """The sign of the antisymmetric part is a stated choice: for SO(3), −1 gives the energy of the mirror image."""
    atoms, mirror = chiral(), chiral()
    mirror.positions *= -1
    for kind, handed in (("so3", True), ("o3", False)):
        paper = tiny_potential(kind)
        model = {**paper.config["model"], "skew_sign": -1}
        flipped = Potential.from_config({**paper.config, "model": model}).double().eval()
        flipped.load_state_dict(paper.state_dict())
        assert energy(flipped, mirror) == pytest.approx(energy(paper, atoms), abs=1e-9)
        assert (abs(energy(paper, mirror) - energy(paper, atoms)) > 1e-5) == handed


@pytest.mark.parametrize("model", [{"name": "tensornet"}, {"name": "tensornet2", "q_dim": 2}])
def test_w3_training_gradients_read_no_uninitialised_memory(model):
    """The gradient of a loss of energies and forces by every weight: finite differences, with memory full of NaN.

    One structure has no edges and one atom is alone, as padding would be.
    """
    size = {"hidden_channels": 6, "num_layers": 1, "num_rbf": 4, "cutoff": 4.5, "max_z": 20}
    potential = tiny_potential(model={**size, **model})
    batch = System.from_ase([molecule("H2O"), Atoms("SiO", positions=[[0, 0, 0], [30, 0, 0]]), Atoms("C")])

    def loss() -> torch.Tensor:
        poison = [
            torch.full((n,), float("nan"), dtype=torch.float64) for n in (8, 64, 512, 4096, 32768) for _ in "abcd"
        ]
        del poison
        result = potential(batch, create_graph=True)
        return (0.1 * result.energy - result.energy.detach().round() / 10).square().sum() + result.forces.square().sum()

    parameters = dict(potential.named_parameters())
    first, second = (torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True) for _ in range(2))
    random = torch.Generator().manual_seed(0)
    for (name, parameter), gradient, again in zip(parameters.items(), first, second, strict=True):
        if gradient is None:
            assert "charge_predicts" in name  # the last charges, which nothing reads
            continue
        assert torch.isfinite(gradient).all() and torch.equal(gradient, again), name
        direction = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        values = []
        for step in (2e-6, -2e-6):
            with torch.no_grad():
                parameter += step * direction
            values.append(loss().item())
            with torch.no_grad():
                parameter -= step * direction
        expected = float((gradient * direction).sum())
        assert (values[0] - values[1]) / 4e-6 == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_w4_cell_smaller_than_two_cutoffs():
    """fcc copper with one atom per cell equals its 4×4×4 supercell."""
    potential = tiny_potential(elements=[*ELEMENTS, 13], priors=[])
    one, many = bulk("Al", a=4.05), bulk("Al", a=4.05) * (4, 4, 4)
    assert energy(potential, one) == pytest.approx(energy(potential, many) / 64, abs=1e-8)


@pytest.mark.parametrize("kind", ["o3", "so3"])
def test_w5_rotated_cell(kind):
    """A crystal rotated as a whole, so that its cell is no longer lower-triangular."""
    potential = tiny_potential(kind)
    atoms = silicon()
    rotated = atoms.copy()
    rotated.rotate(30, "z", rotate_cell=True)
    rotated.rotate(50, (1, 2, 3), rotate_cell=True)
    assert energy(potential, rotated) == pytest.approx(energy(potential, atoms), abs=1e-8)


@pytest.mark.parametrize("third", ["vacuum", "zero", "narrow"])
def test_w6_partial_pbc(third):
    """A slab does not see an image of itself along its normal, whatever stands in the third lattice vector."""
    potential = tiny_potential(elements=[*ELEMENTS, 13], priors=[])
    slab = fcc111("Al", (1, 1, 3), a=4.05, vacuum=20.0, periodic=False)
    slab.pbc = (True, True, False)
    reference = slab.copy()
    reference.pbc = True  # 40 Å of vacuum
    cell = slab.cell.array.copy()
    cell[2] = {"vacuum": cell[2], "zero": 0 * cell[2], "narrow": cell[2] / 20}[third]
    slab.set_cell(cell)
    assert energy(potential, slab) == pytest.approx(energy(potential, reference), abs=1e-9)
    slab.set_cell(reference.cell.array / [[1], [1], [6]])
    periodic = slab.copy()
    periodic.pbc = True
    assert abs(energy(potential, periodic) - energy(potential, slab)) > 1e-3, "the test must see a difference"


def test_w7_each_structure_has_its_own_cell():
    potential = tiny_potential()
    frames = [silicon(), bulk("Si", a=5.6) * (2, 1, 1), silicon()]
    frames[2].set_cell(silicon().cell.array * 1.7)
    batch = potential(System.from_ase(frames), stress=True)
    for b, atoms in enumerate(frames):
        single = potential(System.from_ase(atoms), stress=True)
        assert batch.energy[b] == pytest.approx(float(single.energy), abs=1e-9)
        assert (batch.stress[b] - single.stress[0]).abs().max() < 1e-10


def test_w10_fast_path_has_the_energy_of_every_size():
    """Bar R15: the absolute energy of one molecule, for every number of atoms, on the path that the Evaluator takes."""
    model = {"name": "tensornet", "hidden_channels": 32, "num_rbf": 8, "cutoff": 3.5, "max_z": 20, "num_layers": 1}
    single = tiny_potential(dtype=torch.float32, model=model, priors=[], noise=0.05)
    exact = tiny_potential(model=model, priors=[], noise=0.05)
    fast = Evaluator(single)
    rng = np.random.default_rng(0)
    grid = 1.3 * np.stack(np.meshgrid(*[np.arange(5)] * 3), -1).reshape(-1, 3)
    for num in [*range(1, 10), 15, 16, 17, 33, 65]:
        z = torch.tensor(rng.choice(ELEMENTS, num))
        system = System(z=z, pos=torch.tensor(grid[:num] + rng.uniform(-0.2, 0.2, (num, 3))))
        expected, found = exact(system), fast(system)
        scale = float((exact.isolated_energies().detach()[z].abs() + expected.atom_energies.abs()).sum())
        assert abs(float(found.energy - expected.energy)) <= 1e-6 * scale, num
        assert float((found.forces - expected.forces).abs().max()) <= 1e-4, num


def test_w11_low_precision_is_finite():
    """bfloat16 autocast turned energies into NaN silently."""
    potential = tiny_potential(dtype=torch.float32)
    system = System.from_ase(ethanol())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = potential(system)
    assert torch.isfinite(result.energy).all() and torch.isfinite(result.forces).all()
    exact = tiny_potential()(system)
    assert abs(float(result.energy - exact.energy)) < 0.5, "references must not be rounded to bfloat16"


def test_w12_stress_in_a_narrow_cell():
    """The strain derivative counts the images, and the energy is differentiable in the cell."""
    potential = tiny_potential()
    system = System.from_ase(silicon())
    virial = potential(system, stress=True).stress[0] * system.volume
    cell, pos = system.cell.clone().requires_grad_(), system.pos.clone().requires_grad_()
    value = potential(system.replace(cell=cell, pos=pos), forces=False, create_graph=True).energy.sum()
    by_cell, by_pos = torch.autograd.grad(value, (cell, pos))
    assert (cell[0].T @ by_cell[0] + pos.T @ by_pos - virial).abs().max() < 1e-9
    step, moved = 1e-5, []
    for sign in (1, -1):
        stretched = system.cell.clone()
        stretched[0, 1, 2] += sign * step
        moved.append(float(potential(system.replace(cell=stretched)).energy))
    assert float(by_cell[0, 1, 2]) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)
    assert abs(float(by_cell[0, 1, 2])) > 1e-3


@pytest.mark.parametrize("kind", ["o3", "gauss"])
def test_w13_float64_is_float64(kind):
    """Constants are not made in float32: radial functions have exact centres, casting changes nothing."""
    potential = tiny_potential(kind)
    basis = potential.representation.distance_expansion
    num, cutoff = 8, 4.5
    if kind == "gauss":
        assert np.array_equal(basis.offset, torch.linspace(0, cutoff, num, dtype=torch.float64))
    else:
        assert np.abs(np.linspace(np.exp(-cutoff), 1.0, num) - basis.means.numpy()).max() < 1e-15
        assert np.abs((2 / num * (1 - np.exp(-cutoff))) ** -2 - basis.betas.numpy()).max() < 1e-13
    before = {name: buffer.clone() for name, buffer in potential.named_buffers()}
    potential.float().double()
    for name, buffer in potential.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_w14_energy_is_continuous_at_the_cutoff():
    potential = tiny_potential()
    inside, outside = (energy(potential, Atoms("OH", positions=[[0, 0, 0], [4.5 + x, 0, 0]])) for x in (-1e-6, 1e-6))
    assert abs(inside - outside) < 1e-9


def test_w16_calculator_counts_all_neighbors():
    """The calculator has no limit of its own: atoms with more than 100 neighbors have the potential's energy."""
    from torchmdnet2.adapters.ase import TorchMDNet2Calculator

    rng = np.random.default_rng(1)
    atoms = Atoms(rng.choice(["H", "C", "O"], 160), positions=rng.uniform(0, 6, (160, 3)))
    assert int(torch.diff(neighbor_list(System.from_ase(atoms), 4.5).row_ptr).max()) > 100
    atoms.calc = TorchMDNet2Calculator(tiny_potential())
    assert atoms.get_potential_energy() == pytest.approx(energy(POTENTIAL, atoms), abs=1e-6)


@pytest.mark.parametrize("spin", [3, 4])
def test_w17_spin_is_not_ignored(spin):
    """A model that does not know spin refuses a high-spin state instead of answering with another one."""
    system = System.from_ase(ethanol())
    with pytest.raises(ValueError, match="structure 0 has spin multiplicity"):
        tiny_potential()(system.replace(spin=torch.tensor([spin])))


@pytest.mark.parametrize("number", [*range(-1, 131)])
def test_w18_unknown_element(number):
    """Bar R14: every atomic number from −1 to 130."""
    system = System(z=torch.tensor([8, 1, number]), pos=torch.eye(3, dtype=torch.float64))
    if number in ELEMENTS:
        assert torch.isfinite(POTENTIAL(system).energy).all()
    else:
        with pytest.raises(UnknownElement, match=r"atom 2 is .*knows only H, C, O, Si"):
            POTENTIAL(system)


def test_all_neighbors_are_counted():
    """radius_graph keeps 32 neighbors by default; an atom among 200 here has many more."""
    rng = np.random.default_rng(0)
    system = System(z=torch.ones(200, dtype=torch.long), pos=torch.tensor(rng.uniform(0, 8, (200, 3))))
    edges = neighbor_list(system, 4.5)
    assert int(torch.diff(edges.row_ptr).max()) > 100
    pairs = edges.edge_index.T.tolist()
    assert set(map(tuple, pairs)) == {(j, i) for i, j in pairs}


def test_a_list_that_lacks_edges_is_refused():
    """Of a smaller cutoff, of one direction, or of another structure; a wider one changes nothing."""
    system = System.from_ase(chiral())
    expected = POTENTIAL(system)
    wider = POTENTIAL(system, neighbors=neighbor_list(system, POTENTIAL.cutoff + 1))
    assert torch.equal(wider.energy, expected.energy)
    torch.testing.assert_close(wider.forces, expected.forces, rtol=0, atol=1e-12)
    cutoff, fewer = POTENTIAL.cutoff, System(z=system.z[1:], pos=system.pos[1:])
    cases = {
        "this list ends at 2.0 Å": neighbor_list(system, 2.0),
        "both directions": neighbor_list(system, cutoff, half=True),
        "a list of 4 atoms, not of 5": neighbor_list(fewer, cutoff),
    }
    for words, edges in cases.items():
        with pytest.raises(ValueError, match=words):
            POTENTIAL(system, neighbors=edges)


def test_not_a_number_is_refused():
    """Bar R11: positions, cell and charge, by name."""
    good = System.from_ase([silicon(), molecule("H2O")])
    places = (("pos", (3, 1), "atom 3"), ("cell", (0, 2, 1), "structure 0"), ("charge", (1,), "structure 1"))
    for name, index, words in places:
        for value in (float("nan"), float("inf"), -float("inf")):
            bad = getattr(good, name).clone()
            bad[index] = value
            with pytest.raises(ValueError, match=words):
                POTENTIAL(good.replace(**{name: bad}))


def test_empty_batch_and_empty_structures():
    """Bar R13: no structures; domains without atoms; an empty structure of a user is a mistake, not 0 eV."""
    none = POTENTIAL(System.from_ase([]))
    assert none.energy.shape == (0,) and none.forces.shape == (0, 3)
    one = System.from_ase(ethanol())
    some = POTENTIAL(one.replace(batch=one.batch + 1, **{k: getattr(one, k).repeat_interleave(3, 0)
                                                         for k in ("cell", "pbc", "charge", "spin")}))  # fmt: skip
    assert some.energy[[0, 2]].tolist() == [0.0, 0.0]
    assert float(some.energy[1]) == pytest.approx(energy(POTENTIAL, ethanol()), abs=1e-9)
    for atoms, words in (
        (Atoms(), "the structure has no atoms"),
        ([ethanol(), Atoms()], "structure 1 of the list has"),
    ):
        with pytest.raises(BadData, match=words):
            System.from_ase(atoms)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forces_without_gradient_mode(mode):
    expected = POTENTIAL(System.from_ase(ethanol()))
    with mode():
        result = POTENTIAL(System.from_ase(ethanol()))
    assert torch.equal(result.forces, expected.forces) and torch.equal(result.energy, expected.energy)


def test_references_are_exact():
    """float32 totals: the references are added in float64 whatever the type of the network."""
    potential = tiny_potential(dtype=torch.float32)
    assert energy(potential, Atoms("Si")) == REFERENCES[14]


def test_hessian():
    """Second derivatives with respect to positions exist and are symmetric."""
    system = System.from_ase(molecule("H2O"))

    def total(pos):
        return POTENTIAL(system.replace(pos=pos), forces=False, create_graph=True).energy.sum()

    hessian = torch.autograd.functional.hessian(total, system.pos).reshape(9, 9)
    assert (hessian - hessian.T).abs().max() < 1e-9
    assert hessian.abs().max() > 1e-2
    step = torch.zeros_like(system.pos)
    step[1, 2] = 1e-5
    plus, minus = (POTENTIAL(system.replace(pos=system.pos + s * step)).forces for s in (1, -1))
    assert (hessian[5].view(3, 3) + (plus - minus) / 2e-5).abs().max() < 1e-6
