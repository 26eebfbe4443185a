"""The search in bins of the CPU's compiled kernels finds the pairs of the neighbor list."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from cells import generated_atoms

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.errors import StructureWarning
from torchmdnet2.neighbors import neighbor_list

numba = pytest.importorskip("numba")
CUTOFF = 4.0


def search_of(system, cutoff):
    from torchmdnet2.neighbors.compiled import CellSearch

    return CellSearch(cutoff, system)


def rows_in_order(row_ptr, sender, vectors):
    """Receivers, senders and vectors, sorted by them; numbers that differ by rounding only count as equal."""
    edges = row_ptr[-1]
    receiver = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
    sender, vectors = sender[:edges], vectors[:edges]
    order = np.lexsort((*np.round(vectors.T, 3), sender, receiver))
    return receiver[order], sender[order], vectors[order]


def require_same(search, system, cutoff):
    expected = neighbor_list(system, cutoff)
    vectors = expected.vectors(system).float().numpy()
    right = rows_in_order(expected.row_ptr.numpy(), expected.edge_index[1].numpy(), vectors)
    found = rows_in_order(search.row_ptr, search.sender, search.vectors)
    assert np.array_equal(found[0], right[0]) and np.array_equal(found[1], right[1])
    np.testing.assert_allclose(found[2], right[2], rtol=0, atol=2e-6)


@pytest.mark.parametrize("cutoff", [CUTOFF, 2.25 * CUTOFF])
def test_pairs_of_500_cells(cutoff):
    """One batch: also structures beside each other, of all periodicities."""
    frames = [generated_atoms(seed, CUTOFF) for seed in range(500)]
    for first in range(0, 500, 100):
        system = System.from_ase(frames[first : first + 100])
        search = search_of(system, cutoff)
        assert search.find_in_bins(system)
        require_same(search, system, cutoff)


def test_other_positions_and_cells_and_unordered_batches():
    frames = [bulk("Cu", cubic=True) * (3, 3, 3), bulk("Si"), Atoms("H"), Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]])]
    system = System.from_ase(frames)
    mixed = torch.randperm(system.num_atoms, generator=torch.Generator().manual_seed(0))
    system = system.replace(z=system.z[mixed], pos=system.pos[mixed] + 0.05 * torch.sin(mixed.double())[:, None],
                            batch=system.batch[mixed])  # fmt: skip
    search = search_of(system, 6.0)
    for scale in (1.0, 0.8, 1.1):
        other = system.replace(pos=system.pos * scale, cell=system.cell * scale)
        assert search.find_in_bins(other)
        require_same(search, other, 6.0)


def test_each_pair_is_there_in_both_directions():
    """Also where distances equal the cutoff up to rounding; the vectors are opposite."""
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True) * (3, 3, 3)
    atoms.positions += [0.1234, 7.77, -33.3]
    for cutoff in (5.6, 2.8 * 3**0.5):
        system = System.from_ase(atoms)
        search = search_of(system, cutoff)
        assert search.find_in_bins(system)
        receiver, sender, vectors = rows_in_order(search.row_ptr, search.sender, search.vectors)
        forth = {(i, j, *v) for i, j, v in zip(receiver, sender, vectors.tolist(), strict=True)}
        assert forth == {(j, i, -x, -y, -z) for i, j, x, y, z in forth} and len(forth) == len(sender)


def test_rows_do_not_depend_on_the_number_of_threads():
    system = System.from_ase(bulk("Cu", cubic=True) * (5, 4, 4))
    found = []
    for threads in {1, numba.config.NUMBA_NUM_THREADS}:
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        search = search_of(system, 7.0)
        search.find_in_bins(system)
        numba.set_num_threads(before)
        edges = search.row_ptr[-1]
        found.append((search.row_ptr, search.sender[:edges], search.vectors[:edges]))
    for one, other in zip(found[0], found[-1], strict=True):
        assert np.array_equal(one, other)


def spread():
    """A solid in vacuum and an atom far away: bins of use would be too many."""
    atoms = bulk("Cu", cubic=True) * (7, 6, 6)
    atoms.pbc, atoms.cell = False, None
    return atoms + Atoms("Cu", positions=[[4000.0, 3000.0, 2000.0]])


def thin():
    return Atoms("Cu", cell=[6.0, 6.0, 0.11], pbc=True)


@pytest.mark.parametrize("atoms", [spread(), thin()], ids=["spread", "thin"])
def test_what_bins_are_not_for_is_left_to_the_neighbor_list(atoms):
    system = System.from_ase(atoms)
    search = search_of(system, 6.0)
    assert not search.find_in_bins(system)
    search.find(system)
    require_same(search, system, 6.0)


def test_terms_of_long_cutoffs_are_evaluated_on_it(monkeypatch):
    """Energies and forces are those of the Potential, and no list but the network's is made."""
    from kernels.toy import potential

    from torchmdnet2.neighbors import compiled
    from torchmdnet2.priors import D2

    model = potential([D2(cutoff=9.0)])
    system = System.from_ase([generated_atoms(seed, CUTOFF) for seed in (8, 16, 23)])
    system = system.replace(z=torch.tensor([1, 6, 8]).repeat(system.num_atoms)[: system.num_atoms])
    expected = model(system)
    evaluator = Evaluator(model)
    evaluator(system)  # checked
    cutoffs = []

    def spy(system, cutoff):
        cutoffs.append(cutoff)
        return neighbor_list(system, cutoff)

    monkeypatch.setattr(compiled, "neighbor_list", spy)
    found = evaluator(system)
    assert cutoffs == [model.cutoff]
    largest = float(expected.forces.abs().max())
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.forces, expected.forces, rtol=0, atol=1e-5 * max(1.0, largest))


def test_each_new_structure_in_nm_gets_a_warning():
    """Also after one of the same composition; the same structure at other positions is not looked at again."""
    pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], dtype=torch.float64)
    potential = load("organic-small")
    potential(System(z=torch.tensor([8, 1, 1]), pos=pos))
    for _ in range(2):
        with pytest.warns(StructureWarning, match="multiply positions and cell by 10"):
            potential(System(z=torch.tensor([8, 1, 1]), pos=pos / 10))
