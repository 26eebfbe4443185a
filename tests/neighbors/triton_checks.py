"""Checks of the Triton kernels in Triton's interpreter, on the CPU. Run by test_triton.py in a process of its own:
TRITON_INTERPRET must be set before triton is first imported. The interpreter is slow, so the structures are small; the
same checks at full size run on a GPU (tests/gpu/test_neighbors_gpu.py).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from ase import Atoms
from cells import generated_atoms

from torchmdnet2 import System
from torchmdnet2.errors import NeighborOverflow
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.neighbors.reference import neighbor_list_reference
from torchmdnet2.neighbors.triton_search import (
    COINCIDENT,
    NOT_FINITE,
    OVERFLOW,
    TOO_THIN,
    TritonNeighborSearch,
    neighbor_list_triton,
)

assert os.environ["TRITON_INTERPRET"] == "1"
CUTOFF = 4.0


def assert_same(ours, reference):
    assert torch.equal(ours.row_ptr.long(), reference.row_ptr)
    assert torch.equal(ours.edge_index.long(), reference.edge_index)
    assert torch.equal(ours.shift.long(), reference.shift)


def search_of(system, capacity, method, batch=None, **options):
    search = TritonNeighborSearch(
        system.num_atoms, system.num_systems, CUTOFF, capacity, "cpu", method=method, dtype=system.dtype,
        batch=system.batch if batch is None else batch, receiver=True, shift=True, distances=True, **options,
    )  # fmt: skip
    return search, (system.pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous())


@pytest.mark.parametrize(("dtype", "seeds"), [(torch.float64, range(12)), (torch.float32, range(20, 32))])
def test_pairs_on_a_batch_of_cells(dtype, seeds):
    system = System.from_ase([generated_atoms(seed, CUTOFF) for seed in seeds], dtype=dtype)
    assert_same(neighbor_list_triton(system, CUTOFF, method="pairs"), neighbor_list_reference(system, CUTOFF))


@pytest.mark.parametrize("seed", range(40, 52))
def test_pairs_of_one_cell(seed):
    """The kernel that does everything at once."""
    system = System.from_ase(generated_atoms(seed, CUTOFF), dtype=torch.float32 if seed % 2 else torch.float64)
    assert_same(neighbor_list_triton(system, CUTOFF, method="pairs"), neighbor_list_reference(system, CUTOFF))


@pytest.mark.parametrize("seed", range(0, 64, 8))
@pytest.mark.parametrize("periodic", [True, False])
def test_pairs_of_one_molecule(seed, periodic):
    """Both kernels list the same: the one for all structures, and the one without a lattice."""
    atoms = generated_atoms(seed, CUTOFF)
    assert not atoms.pbc.any()
    system = System.from_ase(atoms, dtype=torch.float32 if seed % 16 else torch.float64)
    reference = neighbor_list_reference(system, CUTOFF)
    search, given = search_of(system, max(reference.num_edges, 1), "pairs", periodic=periodic)
    search(*given)
    assert int(search.flag) == 0 and torch.equal(search.row_ptr.long(), reference.row_ptr)
    num = reference.num_edges
    assert torch.equal(torch.stack([search.receiver, search.sender])[:, :num].long(), reference.edge_index)
    assert torch.equal(search.shift[:num].long(), reference.shift)
    expected = reference.vectors(system)
    assert torch.allclose(search.vectors[:num], expected, rtol=0, atol=1e-5 if system.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(("change", "flag"), [("pbc", TOO_THIN), ("cell", NOT_FINITE), ("pos", NOT_FINITE)])
def test_what_the_search_of_a_molecule_refuses(change, flag):
    system = System(z=torch.ones(3, dtype=torch.long), pos=torch.arange(9.0).reshape(3, 3), cell=9 * torch.eye(3))
    search, (pos, cell, pbc) = search_of(system, 16, "pairs", periodic=False)
    free = torch.zeros_like(pbc)
    search(pos, cell, free)
    assert int(search.flag) == 0 and int(search.needed) == 0  # √27 Å apart
    if change == "pbc":
        search(pos, cell, pbc)
    elif change == "cell":
        search(pos, torch.full_like(cell, torch.nan), free)
    else:
        search(torch.full_like(pos, torch.inf), cell, free)
    assert int(search.flag) & flag


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_a_shell_at_the_cutoff(method):
    """float32 cannot decide; a simple cubic crystal, a = 2 Å."""
    grid = 2 * torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:10]
    system = System(z=torch.ones(10, dtype=torch.long), pos=grid, cell=torch.eye(3) * 6)
    assert_same(neighbor_list_triton(system, CUTOFF, method=method), neighbor_list_reference(system, CUTOFF))


def test_more_candidates_than_bits():
    """What the bits cannot hold is listed by testing again: more than 64 per lane, or more turns than are kept."""
    pos = torch.tensor([[0.0, 0, 0], [0.2, 0.3, 0.4], [0.5, 0.1, 0.9], [0.1, 0.8, 0.3]])
    for side in (0.5, 0.6):  # 4 · 17³ candidates; in the second words of bits: 4 · 14³
        system = System(z=torch.ones(4, dtype=torch.long), pos=pos, cell=torch.eye(3) * side)
        assert_same(neighbor_list_triton(system, CUTOFF, method="pairs"), neighbor_list_reference(system, CUTOFF))
    system = System.from_ase(generated_atoms(14, CUTOFF))
    reference = neighbor_list_reference(system, CUTOFF)
    search, given = search_of(system, reference.num_edges, "cells")
    search._turns = 0
    search(*given)
    assert torch.equal(search.row_ptr.long(), reference.row_ptr)
    assert torch.equal(search.sender.long(), reference.edge_index[1]) and torch.equal(
        search.shift.long(), reference.shift
    )


@pytest.mark.parametrize("seed", [0, 11, 14, 22, 37])
def test_cells(seed):
    system = System.from_ase(generated_atoms(seed, CUTOFF), dtype=torch.float32 if seed % 2 else torch.float64)
    assert_same(neighbor_list_triton(system, CUTOFF, method="cells"), neighbor_list_reference(system, CUTOFF))


@pytest.mark.parametrize("atoms", [20, 70])  # rows shorter and longer than a tile
def test_rows_without_order(atoms):
    """The same edges with their vectors, in any order within a row; the same order each time."""
    rng = np.random.default_rng(atoms)
    system = System(
        z=torch.ones(atoms, dtype=torch.long), pos=torch.tensor(rng.uniform(0, 4, (atoms, 3))), cell=8 * torch.eye(3)
    )
    reference = neighbor_list_reference(system, CUTOFF)
    num = reference.num_edges
    assert int(reference.row_ptr.diff().max()) > (64 if atoms == 70 else 10)
    search, given = search_of(system, num, "cells", ordered=False)
    search(*given)
    sender, vectors = search.sender.clone(), search.vectors.clone()
    assert int(search.flag) == 0 and torch.equal(search.row_ptr.long(), reference.row_ptr)
    keys = [search.shift[:, k].numpy() for k in (2, 1, 0)]
    by_place = np.lexsort([*keys, search.sender.numpy(), search.receiver.numpy()])
    found = torch.stack([search.receiver, search.sender])[:, by_place].long()
    assert torch.equal(found, reference.edge_index)
    assert torch.equal(search.shift[by_place].long(), reference.shift)
    assert torch.allclose(search.vectors[by_place], reference.vectors(system), rtol=0, atol=1e-12)
    search(*given)
    assert torch.equal(search.sender, sender) and torch.equal(search.vectors, vectors)


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_buffers(method):
    """Everything a search writes, for a batch of which one structure is not periodic; then padding."""
    frames = [
        Atoms("H3", cell=[5, 5, 5], pbc=True, positions=[[0, 0, 0], [4.9, 4.9, 0], [2, -12, 2.5]]),
        Atoms("H2", positions=[[9, 0, 0], [9, 0, 3.9999]]),
    ]
    system = System.from_ase(frames)
    search, given = search_of(system, 100, method)
    search(*given)
    reference = neighbor_list_reference(system, CUTOFF)
    num = reference.num_edges
    assert int(search.needed) == num and int(search.flag) == 0
    assert torch.equal(search.row_ptr.long(), reference.row_ptr)
    assert torch.equal(torch.stack([search.receiver, search.sender])[:, :num].long(), reference.edge_index)
    assert torch.equal(search.shift[:num].long(), reference.shift)
    assert torch.allclose(search.vectors[:num], reference.vectors(system), rtol=0, atol=1e-12)
    assert torch.allclose(search.distances[:num], reference.distances(system), rtol=0, atol=1e-12)
    search.set_batch(torch.tensor([0, 0, 0, 1, 2]))  # the last atom is padding now
    search(*given)
    assert int(search.needed) == int(reference.row_ptr[3])
    assert search.row_ptr.tolist() == [*reference.row_ptr[:4].tolist(), *[int(reference.row_ptr[3])] * 2]


def test_half_and_unsorted_batch():
    system = System.from_ase([generated_atoms(seed, CUTOFF) for seed in (11, 13, 40)])
    mixed = torch.randperm(system.num_atoms, generator=torch.Generator().manual_seed(1))
    system = system.replace(z=system.z[mixed], pos=system.pos[mixed], batch=system.batch[mixed])
    for half in (False, True):
        ours = neighbor_list(system, CUTOFF, backend="triton", half=half)
        assert ours.edge_index.dtype == torch.int32
        assert_same(ours, neighbor_list_reference(system, CUTOFF, half=half))


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_flags(method):
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    system = System(z=torch.ones(3, dtype=torch.long), pos=pos)
    search, given = search_of(system, 6, method)
    search(*given)
    assert int(search.flag) == 0 and int(search.needed) == 6
    search.set_capacity(5)
    search(*given)
    assert int(search.flag) == OVERFLOW and int(search.needed) == 6
    assert search.row_ptr.tolist() == [0] * 4, "after an overflow no row may be read"
    search.set_capacity(6)
    search(*given)
    assert int(search.flag) == OVERFLOW, "the flag is sticky"
    for bad in (float("nan"), float("inf"), -1e30):
        search.flag.zero_()
        search(torch.where(pos == 1, bad, pos), *given[1:])
        assert int(search.flag) & NOT_FINITE
    flat = torch.tensor([[[5.0, 0, 0], [0, 5, 0], [5, 5, 0]]])
    thin = torch.tensor([[[5.0, 0, 0], [0, 5, 0], [0, 0, 0.1]]])
    for cell, flag in ((flat, NOT_FINITE), (flat * float("nan"), NOT_FINITE), (thin, TOO_THIN)):
        search.flag.zero_()
        search(pos, cell, torch.ones(1, 3, dtype=torch.bool))
        assert int(search.flag) & flag


@pytest.mark.parametrize("kind", ["single", "batch", "cells"])
@pytest.mark.parametrize("periodic", [False, True])
def test_two_atoms_at_the_same_place(kind, periodic):
    """R12: noted in any structure and through a face of the cell, also at high precision; near atoms are not."""
    for distance, expected in ((9.9e-4, COINCIDENT), (0.0, COINCIDENT), (1.01e-3, 0)):
        pos = torch.tensor([[0.0, 0, 0], [1, 2, 3], [3, 1, 2], [7, 0, distance]], dtype=torch.float64)
        pos[0, 0] = -2.0 if periodic else 7.0  # the same place as 7 Å in a cell of 9 Å
        made = System(z=torch.ones(4, dtype=torch.long), pos=pos, cell=9 * torch.eye(3) if periodic else None)
        far = made.replace(pos=torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 2, 0], [2, 2, 0]], dtype=torch.float64))
        system = made if kind == "single" else System.concatenate([far, made])
        search = TritonNeighborSearch(
            system.num_atoms, system.num_systems, CUTOFF, 100, "cpu", batch=system.batch, dtype=torch.float64,
            method="cells" if kind == "cells" else "pairs", vectors=periodic, distances=not periodic,
        )  # fmt: skip
        given = system.pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous()
        search.count(*given)
        assert int(search.flag) == 0
        search(*given)
        assert int(search.flag) == expected
        if expected:
            search(far.pos.repeat(system.num_systems, 1), *given[1:])
            assert int(search.flag) == expected, "the flag is sticky"


def test_no_silent_overflow():
    """Bar R8 in the small; 1,000 trials run on the GPU."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        pos = torch.tensor(rng.uniform(0, 6, (int(rng.integers(2, 12)), 3)))
        system = System(z=torch.ones(len(pos), dtype=torch.long), pos=pos)
        need = neighbor_list_reference(system, CUTOFF).num_edges
        capacity = max(1, need + int(rng.integers(-3, 4)))
        search, given = search_of(system, capacity, "pairs")
        search(*given)
        assert int(search.needed) == need
        assert bool(int(search.flag) & OVERFLOW) == (need > capacity)
        assert int(search.row_ptr[-1]) == (need if need <= capacity else 0)
    with pytest.raises(NeighborOverflow, match=f"needs {need} "):
        neighbor_list(system, CUTOFF, backend="triton", capacity=need - 1)
