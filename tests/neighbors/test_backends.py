"""Every neighbor backend against ASE and against the reference."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from cells import generated_atoms, generated_pairs

from torchmdnet2 import System
from torchmdnet2.errors import MissingBackend, NeighborOverflow
from torchmdnet2.neighbors import BACKENDS as REGISTRY
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.neighbors import reference as brute_force

BACKENDS = [
    "reference",
    "vesin",
    "auto",
]  # triton: test_triton.py and tests/gpu; torch_cluster, which knows no periodicity: below
CUTOFF = 4.0


def as_set(edges, first_atom=0):
    rows = torch.cat([edges.edge_index.T - first_atom, edges.shift], 1).tolist()
    assert len(rows) == len(set(map(tuple, rows))), "an edge is listed twice"
    return set(map(tuple, rows))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_ase_on_500_cells(backend, dtype):
    """Bar R6."""
    wrong = []
    for seed in range(500):
        atoms, pairs, border = generated_pairs(seed, CUTOFF)
        ours = as_set(neighbor_list(System.from_ase(atoms, dtype=dtype), CUTOFF, backend=backend))
        if (ours ^ pairs) - border:
            wrong.append((seed, len(ours - pairs), len(pairs - ours - border)))
    assert not wrong, f"{len(wrong)} of 500 cells differ (seed, extra, missing): {wrong[:5]}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_equals_singles(backend):
    frames = [generated_atoms(seed, CUTOFF) for seed in range(12)] + [Atoms("H"), molecule("CH3CH2OH")]
    batch = neighbor_list(System.from_ase(frames), CUTOFF, backend=backend)
    first = 0
    for atoms in frames:
        single = neighbor_list(System.from_ase(atoms), CUTOFF, backend=backend)
        lo, hi = int(batch.row_ptr[first]), int(batch.row_ptr[first + len(atoms)])
        assert torch.equal(batch.edge_index[:, lo:hi] - first, single.edge_index)
        assert torch.equal(batch.shift[lo:hi], single.shift)
        first += len(atoms)
    assert batch.row_ptr[-1] == batch.num_edges


@pytest.mark.parametrize("backend", BACKENDS)
def test_sorted_rows(backend):
    edges = neighbor_list(System.from_ase(bulk("Cu") * (2, 2, 2)), 5.0, backend=backend)
    keys = torch.cat([edges.edge_index.T, edges.shift], 1).tolist()
    assert keys == sorted(keys)
    for i in range(8):
        assert (edges.edge_index[0, edges.row_ptr[i] : edges.row_ptr[i + 1]] == i).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_list_is_each_pair_once(backend):
    for seed in range(30):
        system = System.from_ase(generated_atoms(seed, CUTOFF))
        full = as_set(neighbor_list(system, CUTOFF, backend=backend))
        half = as_set(neighbor_list(system, CUTOFF, backend=backend, half=True))
        mirrored = {(j, i, -a, -b, -c) for i, j, a, b, c in half}
        assert not half & mirrored
        assert half | mirrored == full


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_and_their_gradients(backend):
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    atoms.rattle(0.1, seed=1)
    atoms.positions += 20.0
    system = System.from_ase(atoms)
    edges = neighbor_list(system, 5.0, backend=backend)
    assert torch.allclose(edges.distances(system), edges.vectors(system).norm(dim=1))
    assert float(edges.distances(system).max()) < 5.0

    def total(pos, cell):
        return (edges.distances(system.replace(pos=pos, cell=cell)) ** 3).sum()

    pos, cell = system.pos.clone().requires_grad_(), system.cell.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (pos, cell))
    assert torch.autograd.gradgradcheck(total, (pos, cell))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("atoms", [None, Atoms("H"), Atoms("H2", positions=[[0, 0, 0], [9, 0, 0]])])
def test_no_edges(backend, atoms):
    nothing = System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3).double())
    edges = neighbor_list(System.from_ase(atoms) if atoms else nothing, CUTOFF, backend=backend)
    assert edges.edge_index.shape == (2, 0) and edges.shift.shape == (0, 3)
    assert edges.row_ptr.tolist() == [0] * (len(atoms or []) + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_is_an_error_that_says_the_need(backend):
    system = System.from_ase(bulk("Cu"))
    need = neighbor_list(system, 5.0, backend=backend).num_edges
    assert neighbor_list(system, 5.0, backend=backend, capacity=need).num_edges == need
    with pytest.raises(NeighborOverflow, match=str(need)):
        neighbor_list(system, 5.0, backend=backend, capacity=need - 1)


def test_bad_input_is_named():
    water = molecule("H2O")
    good = System.from_ase(water)
    with pytest.raises(ValueError, match="atom 1"):
        pos = good.pos.clone()
        pos[1, 2] = float("nan")
        neighbor_list(good.replace(pos=pos), 4.0)
    with pytest.raises(ValueError, match="positive"):
        neighbor_list(good, -1.0)
    with pytest.raises(ValueError, match="did you mean 'vesin'"):
        neighbor_list(good, 4.0, backend="vesn")
    with pytest.raises(ValueError, match="structure 0"):
        neighbor_list(good.replace(pbc=torch.tensor([[True, True, True]])), 4.0)


def test_no_silent_cap_on_neighbors():
    """torch-cluster's radius_graph keeps 32 neighbors by default; nothing here may."""
    rng = np.random.default_rng(0)
    system = System(z=torch.ones(200, dtype=torch.long), pos=torch.tensor(rng.uniform(0, 8, (200, 3))))
    edges = neighbor_list(system, 5.0)
    distance = torch.cdist(system.pos, system.pos)
    assert edges.num_edges == int((distance < 5.0).sum()) - 200 > 200 * 32


def statistics(system, backend, cutoff=6.0):
    """Sorted distances per atom, as an array [N, neighbors]; all atoms must have the same number."""
    edges = neighbor_list(system, cutoff, backend=backend)
    distances = edges.distances(system)
    rows = [distances[edges.row_ptr[i] : edges.row_ptr[i + 1]].sort().values for i in range(system.num_atoms)]
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_crystal_described_otherwise(backend):
    """Bar R7 in pairs: primitive cell = supercell, rotated cell, other basis of the lattice."""
    for atoms in (bulk("Cu"), bulk("Mg"), bulk("Si")):
        primitive = statistics(System.from_ase(atoms), backend)
        assert primitive.shape[1] > 30

        supercell = statistics(System.from_ase(atoms * (3, 2, 4)), backend)
        assert torch.allclose(supercell, primitive.repeat(24, 1), rtol=0, atol=1e-12)

        turned = atoms.copy()
        turned.rotate(37, (1, 2, -0.5), rotate_cell=True)
        assert torch.allclose(statistics(System.from_ase(turned), backend), primitive, rtol=0, atol=1e-12)

        other = atoms.copy()
        other.set_cell(np.array([[1, 1, 0], [0, 1, -2], [1, 0, 3]]) @ atoms.cell.array)  # determinant 1
        assert torch.allclose(statistics(System.from_ase(other), backend), primitive, rtol=0, atol=1e-12)


def test_no_silent_overflow_in_1000_trials():
    """Bar R8: an error exactly when the capacity is too small, and it states the need."""
    rng = np.random.default_rng(1)
    errors = 0
    for _ in range(1000):
        pos = torch.tensor(rng.uniform(0, 6, (int(rng.integers(2, 12)), 3)))
        system = System(z=torch.ones(len(pos), dtype=torch.long), pos=pos)
        need = int((torch.cdist(pos, pos) < CUTOFF).sum()) - len(pos)
        capacity = max(0, need + int(rng.integers(-3, 4)))
        try:
            assert neighbor_list(system, CUTOFF, capacity=capacity).num_edges == need <= capacity
        except NeighborOverflow as error:
            errors += 1
            assert (error.needed, error.capacity) == (need, capacity) and need > capacity
    assert errors > 300


@pytest.mark.parametrize("backend", ["vesin", "auto"])
def test_shifts_too_wide_for_packed_keys(backend):
    """Atoms a million cells away: receiver, sender and shift do not fit into 63 bits."""
    atoms = bulk("Cu") * (2, 2, 2)
    system = System.from_ase(atoms)
    far = system.pos.clone()
    far[3] += torch.tensor([2.0**20, -(2.0**19), 2.0**20], dtype=far.dtype) @ system.cell[0]
    for half in (False, True):
        ours = neighbor_list(system.replace(pos=far), CUTOFF, backend=backend, half=half)
        reference = neighbor_list(system.replace(pos=far), CUTOFF, backend="reference", half=half)
        assert int(ours.shift.abs().max()) >= 2**20
        assert torch.equal(ours.edge_index, reference.edge_index) and torch.equal(ours.shift, reference.shift)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos": torch.full((1, 3), torch.inf)}, "atom 0"),
        ({"cell": torch.full((1, 3, 3), torch.nan)}, "structure 0: its cell"),
        ({"cell": torch.tensor([[[9.0, 0, 0], [0, 9, 0], [9, 9, 0]]])}, "linearly dependent"),
        ({"charge": torch.tensor([torch.nan])}, "charge"),
        ({"batch": torch.ones(1, dtype=torch.long)}, "atom 0: its batch index"),
    ],
)
def test_a_glance_does_not_hide_what_is_wrong(change, message):
    good = System(z=torch.ones(1, dtype=torch.long), pos=torch.zeros(1, 3), cell=torch.eye(3) * 9)
    with pytest.raises(ValueError, match=message):
        neighbor_list(good.replace(**change), 4.0)


@pytest.mark.skipif(find_spec("torch_cluster") is None, reason="torch-cluster is not installed")
def test_torch_cluster_lists_all_neighbors_of_molecules():
    """Also where an atom has far more neighbors than the 32 that radius_graph keeps by default."""
    rng = np.random.default_rng(2)
    frames = [Atoms(np.ones(n), positions=rng.uniform(0, 7, (n, 3))) for n in (200, 1, 30, 500)]
    for chosen in (frames, frames[:1], frames[1:2]):
        system = System.from_ase(chosen)
        for half in (False, True):
            ours = neighbor_list(system, 5.0, backend="torch_cluster", half=half)
            reference = neighbor_list(system, 5.0, backend="reference", half=half)
            assert torch.equal(ours.edge_index, reference.edge_index)
    edges = neighbor_list(System.from_ase(frames), 5.0, backend="torch_cluster")
    assert int(edges.row_ptr.diff().max()) > 300
    with pytest.raises(ValueError, match="no periodicity"):
        neighbor_list(System.from_ase(bulk("Cu")), 5.0, backend="torch_cluster")


@pytest.mark.parametrize("backend", ["vesin", "auto"])
@pytest.mark.parametrize("distance", [1e3, 1e7])
@pytest.mark.parametrize("pbc", [(False, False, False), (False, False, True), (True, False, True), (True, True, True)])
def test_atoms_far_away(backend, pbc, distance):
    """vesin alone takes minutes for these, or ends the process."""
    generator = torch.Generator().manual_seed(0)
    near = 5 * torch.rand(4, 3, generator=generator, dtype=torch.float64)
    direction = torch.tensor([[0, 0, 0], [1, -0.3, 0.2], [1, 1, -1]], dtype=torch.float64)
    pos = (near + distance * direction[:, None]).reshape(-1, 3)
    cell = torch.tensor([[6.0, 0, 0], [1, 7, 0], [0.5, 2, 8]], dtype=torch.float64)
    for first in (1.0, 0.3 * distance):  # the latter lets most of the cell be empty
        scaled = cell * torch.tensor([first, 1, 1])[:, None]
        system = System(z=torch.ones(12, dtype=torch.long), pos=pos, cell=scaled, pbc=torch.tensor(pbc))
        found, expected = (neighbor_list(system, 4.5, backend=name) for name in (backend, "reference"))
        assert expected.num_edges > 20
        assert torch.equal(found.edge_index, expected.edge_index) and torch.equal(found.shift, expected.shift)


def test_few_atoms_are_searched_without_vesin(monkeypatch):
    """Up to so many distances, and not one more; row by row as the reference."""
    monkeypatch.setitem(REGISTRY._classes, "vesin", lambda *_, **__: "vesin")
    compact = bulk("Cu", cubic=True) * (2, 1, 1)
    compact.rattle(0.1, seed=0)
    compact.positions += 3 * compact.cell.array.sum(0)
    for atoms, images in ((compact, 3 * 5 * 5), (molecule("CH3CH2OH"), 1)):
        system = System.from_ase(atoms)
        monkeypatch.setattr(brute_force, "MAX_DISTANCES", len(atoms) ** 2 * images)
        for half in (False, True):
            ours = neighbor_list(system, CUTOFF, half=half)
            reference = neighbor_list(system, CUTOFF, backend="reference", half=half)
            assert ours.cutoff == CUTOFF and ours.half == half
            for name in ("edge_index", "shift", "row_ptr"):
                found, expected = getattr(ours, name), getattr(reference, name)
                assert found.dtype == torch.long and torch.equal(found, expected)
        monkeypatch.setattr(brute_force, "MAX_DISTANCES", len(atoms) ** 2 * images - 1)
        assert neighbor_list(system, CUTOFF) == "vesin"


def test_without_vesin(monkeypatch):
    """Bar R31: it is no core dependency; without it the list is the same, and a warning says what it costs."""
    monkeypatch.setitem(sys.modules, "vesin", None)
    monkeypatch.setattr(brute_force, "MAX_DISTANCES", 0)
    system = System.from_ase(bulk("Cu", cubic=True))
    with pytest.warns(UserWarning, match=r"vesin is not installed.*pip install 'torchmdnet2\[cpu\]'"):
        found = neighbor_list(system, CUTOFF)
    assert torch.equal(found.edge_index, neighbor_list(system, CUTOFF, backend="reference").edge_index)


def test_a_search_of_another_package(monkeypatch):
    """What a plug-in registers is found by its name, and its missing package named."""
    monkeypatch.setattr(REGISTRY, "_classes", dict(REGISTRY._classes))

    @REGISTRY.register("own")
    def own(system, cutoff, half=False):
        if half:
            import a_package_that_is_not_there  # noqa: F401
        return neighbor_list(system, cutoff, backend="reference", half=half)

    system = System.from_ase(molecule("H2O"))
    found = neighbor_list(system, CUTOFF, backend="own")
    assert torch.equal(found.edge_index, neighbor_list(system, CUTOFF).edge_index)
    with pytest.raises(MissingBackend, match="pip install a_package_that_is_not_there"):
        neighbor_list(system, CUTOFF, backend="own", half=True)
    with pytest.raises(ValueError, match="unknown neighbor backend 'owm', did you mean 'own'"):
        neighbor_list(system, CUTOFF, backend="owm")
