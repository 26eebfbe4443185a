"""Faults of the labels of all frames, some frames or atoms are named, and right labels are left alone."""

import numpy as np
import pytest
import torch
from crystals import crystals

from torchmdnet2.data import InMemoryDataset, Sample, pair_regression, statistics
from torchmdnet2.data.pair_regression import PLAIN, UNITS, regression
from torchmdnet2.system import System


@pytest.fixture(scope="module")
def right():
    return crystals(40)


def found(samples):
    data = InMemoryDataset(samples)
    return regression(data, np.arange(len(data)), statistics(data))


def changed(samples, label, change):
    """Samples with `change(k, label, all labels)` for a label."""
    everything = [sample.labels[label] for sample in samples]
    return [
        Sample(sample.system, {**sample.labels, label: change(k, sample.labels[label], everything)})
        for k, sample in enumerate(samples)
    ]


def every(number, undo):
    return lambda k, label, _: undo(label) if k % number == 2 else label


def next_of_its_size(k, forces, everything):
    later = [*everything[k + 1 :], *everything[:k]]
    return next(each for each in later if each.shape == forces.shape)


def test_right_labels_have_no_fault(right):
    result = found(right)
    assert result.forces is None and result.energies is None
    assert all("frame" not in name or f.gain < result.stress[PLAIN].gain - 30 for name, f in result.stress.items())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda k, f, _: f[:, [1, 0, 2]], "have x and y exchanged"),
        (lambda k, f, _: f[:, [2, 1, 0]], "have x and z exchanged"),
        (lambda k, f, _: f[:, [1, 2, 0]], "have the axes in the order y, z, x"),
        (lambda k, f, _: f * torch.tensor([1.0, -1, 1]), "have the wrong sign of y"),
        (next_of_its_size, "belong to the frame after"),
    ],
)
def test_a_fault_of_the_forces_of_all_frames(right, change, name):
    fault = found(changed(right, "forces", change)).forces
    assert fault.name == name and fault.having.mean() > 0.9  # the first or last frame of a file has no other
    if "frame" not in name:
        forces = torch.cat([sample.labels["forces"] for sample in right]).numpy()
        assert np.abs(fault.labels - forces).max() < 1e-12


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (every(3, torch.neg), "have the sign opposite to that of the others"),
        (every(4, lambda f: 1.8897 * f), "are 1.89 times the others"),
        (every(4, lambda f: f / 51.422), "are 1/51.4 of the others"),
        (every(5, lambda f: f[:, [0, 2, 1]]), "have y and z exchanged"),
        (lambda k, f, _: f * torch.where(torch.arange(len(f)) % 4 == 1, -1, 1)[:, None], "of the other atoms"),
    ],
)
def test_a_fault_of_the_forces_of_some(right, change, name):
    fault = found(changed(right, "forces", change)).forces
    assert name in fault.name and 0.15 < fault.having.mean() < 0.4


def test_forces_that_pairs_do_not_describe_have_no_wrong_sign(right):
    """As those of atoms far from equilibrium: some fit better with the other sign by chance."""
    generator = torch.Generator().manual_seed(1)

    def many_body(k, forces, _):
        other = 2 * forces.std() * torch.randn(forces.shape, generator=generator, dtype=forces.dtype)
        return torch.where(torch.arange(len(forces))[:, None] % 4 == 1, forces + other, forces)

    result = found(changed(right, "forces", many_body))
    assert result.forces is None and 0.4 < result.explained < 0.6


@pytest.mark.parametrize("factor", [1 / 27.211, 23.06, -1.0])
def test_a_fault_of_the_energies_of_some(right, factor):
    wrong = changed(right, "energy", every(4, lambda energy: factor * energy))
    fault = found(wrong).energies
    undo = UNITS[fault.name]
    assert abs(float(undo(np.array([factor]))[0]) - 1) < 0.01
    assert set(np.flatnonzero(fault.having)) <= set(range(2, 40, 4)) and fault.having.sum() > 5


@pytest.mark.parametrize("label", ["energy", "stress"])
@pytest.mark.parametrize("step", [1, -1])
def test_labels_of_another_frame(right, label, step):
    wrong = changed(right, label, lambda k, _, everything: everything[(k + step) % len(everything)])
    result = found(wrong)
    name = f"belong to the frame {'after' if step == 1 else 'before'}"
    if label == "energy":
        assert result.energies.name == name
    else:
        assert max(result.stress, key=lambda key: result.stress[key].gain) == name


def test_forces_of_any_other_structure_are_not_described(right):
    rng = np.random.default_rng(0)
    wrong = changed(right, "forces", lambda k, f, _: f[rng.permutation(len(f))] @ torch.tensor(
        np.linalg.qr(rng.normal(size=(3, 3)))[0]))  # fmt: skip
    result = found(wrong)
    assert result.explained < 0.3 and result.energy is None


# --- cells ---


def in_cells(samples, **change):
    """Samples whose structures have other cells or periodicity."""
    return [
        Sample(s.system.replace(**{name: new(getattr(s.system, name)) for name, new in change.items()}), s.labels)
        for s in samples
    ]


CELLS = {
    "with lattice vectors about 0.83 times as long": {"cell": lambda cell: 1.2 * cell},
    "with lattice vectors about 1.11 times as long": {"cell": lambda cell: 0.9 * cell},
    "with lattice vectors about 1.89 times as long": {"cell": lambda cell: cell / 1.8897},
    "with the transposed cell": {"cell": lambda cell: cell.transpose(1, 2)},
    "with periodicity along all lattice vectors": {"pbc": lambda pbc: pbc & torch.tensor([True, True, False])},
}


@pytest.mark.parametrize("words", CELLS)
def test_a_wrong_cell_is_named(right, words):
    turn = torch.linalg.qr(torch.tensor([[1.0, 0.3, -0.5], [0.2, 1, 0.7], [0.4, -0.6, 1]], dtype=torch.float64))[0]
    turned = []  # cells of cubic crystals along the axes are nearly symmetric
    for s in right:
        system = s.system.replace(pos=s.system.pos @ turn, cell=s.system.cell @ turn)
        turned.append(Sample(system, {**s.labels, "forces": s.labels["forces"] @ turn}))
    assert found(turned).cell is None
    assert found(in_cells(turned, **CELLS[words])).cell == words


def test_cells_without_room_are_not_tried(right, monkeypatch):
    """A dummy cell would have thousands of images; dependent vectors have no cell."""
    cells = torch.eye(3).double(), torch.tensor([[4.0, 0, 0], [8, 0, 0], [0, 0, 4]]).double()
    tried, search = [], pair_regression.Design
    monkeypatch.setattr(pair_regression, "Design", lambda system: tried.append(system) or search(system))
    for cell in cells:
        without = [Sample(s.system, {name: s.labels[name] for name in ("energy", "forces")}) for s in right]
        open_ones = in_cells(without, cell=lambda given, cell=cell: cell.expand_as(given), pbc=torch.zeros_like)
        assert found(open_ones).cell is None
    assert len(tried) == 4 and not any(bool(system.pbc.any()) for system in tried)


def test_a_cell_of_something_else_is_named():
    """Clusters with the cell of the crystal."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    random, samples = np.random.default_rng(0), []
    for _ in range(25):
        atoms = bulk("Cu", cubic=True, a=3.75) * (2, 2, 1)
        atoms.positions += random.normal(0, 0.06, atoms.positions.shape)
        atoms.pbc = False
        atoms.calc = EMT()
        labels = {"energy": [atoms.get_potential_energy()], "forces": atoms.get_forces()}
        cell = random.normal(3.75, 0.05) * np.diag([2.0, 2, 1])
        system = System.from_ase(atoms).replace(cell=torch.tensor(cell))
        samples.append(Sample(system, {name: torch.tensor(value) for name, value in labels.items()}))
    assert found(samples).cell is None
    assert found(in_cells(samples, pbc=lambda pbc: ~pbc)).cell == "without a cell"
