"""The Triton neighbor search on a real GPU: bars R6 (right for every cell), R8 (overflow), R16 (replay), R17 (streams),
R19 (determinism). Where a test names no other bar it shows R6 for one size, method or kind of structure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.errors import NeighborOverflow
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.neighbors.reference import neighbor_list_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUTOFF = 4.0


def random_box(num_atoms, seed=0, density=0.1, dtype=torch.float32, skew=0.1, pbc=True):
    """Atoms at random in a slightly triclinic cell, some of them outside it; on the GPU."""
    rng = np.random.default_rng(seed)
    edge = (num_atoms / density) ** (1 / 3)
    cell = edge * (np.eye(3) + skew * rng.uniform(-1, 1, (3, 3)))
    pos = (rng.uniform(0, 1, (num_atoms, 3)) + rng.integers(-2, 3, (num_atoms, 3))) @ cell
    return System(
        z=torch.ones(num_atoms, dtype=torch.long),
        pos=torch.tensor(pos, dtype=dtype),
        cell=torch.tensor(cell, dtype=dtype),
        pbc=torch.full((3,), pbc),
    ).to("cuda")


def same(edges, reference):
    return (
        torch.equal(edges.edge_index.cpu().long(), reference.edge_index.cpu().long())
        and torch.equal(edges.shift.cpu().long(), reference.shift.cpu().long())
        and torch.equal(edges.row_ptr.cpu().long(), reference.row_ptr.cpu().long())
    )


def search_for(system, capacity, method="auto", **options):
    from torchmdnet2.neighbors.triton_search import TritonNeighborSearch

    options = {"receiver": True, "shift": True, "distances": True, "dtype": system.dtype, **options}
    search = TritonNeighborSearch(
        system.num_atoms, system.num_systems, CUTOFF, capacity, "cuda", batch=system.batch, method=method, **options
    )
    return search, (system.pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous())


def assert_matches(search, system):
    """Everything a search wrote, against the reference (on the GPU, in float64) and its differentiable vectors."""
    reference = neighbor_list_reference(system, CUTOFF)
    num = reference.num_edges
    assert int(search.needed) == num and int(search.flag) == 0
    assert torch.equal(search.row_ptr.long(), reference.row_ptr)
    assert torch.equal(search.receiver[:num].long(), reference.edge_index[0])
    assert torch.equal(search.sender[:num].long(), reference.edge_index[1])
    assert torch.equal(search.shift[:num].long(), reference.shift)
    if num == 0:
        return
    exact = reference.vectors(system.to(dtype=torch.float64))
    tight = 3e-7 if search.dtype == torch.float32 else 1e-11  # half an ulp of 4 Å; of positions at some 100 Å
    assert float((search.vectors[:num].double() - exact).abs().max()) < tight
    assert float((search.distances[:num].double() - exact.norm(dim=1)).abs().max()) < tight


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["auto", "cells"])
def test_agrees_with_the_reference_on_500_cells(method, dtype, part):
    """Bar R6; "auto" takes "pairs" for structures as small as these."""
    from cells import generated_atoms

    from torchmdnet2.neighbors.triton_search import neighbor_list_triton

    wrong, searched = [], 0
    for seed in range(part * 125, (part + 1) * 125):
        system = System.from_ase(generated_atoms(seed, CUTOFF), dtype=dtype)
        try:
            ours = neighbor_list_triton(system.to("cuda"), CUTOFF, method=method)
        except ValueError as error:
            assert method == "cells" and "too thin" in str(error)
            continue
        searched += 1
        if not same(ours, neighbor_list_reference(system, CUTOFF)):
            wrong.append(seed)
    assert not wrong
    assert searched == 125 if method == "auto" else searched > 25


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_batch_of_unequal_structures(method):
    frames = [random_box(n, seed=n, pbc=bool(n % 2)) for n in (1300, 2, 777, 640, 3001)]
    system = System.concatenate(frames)
    search, given = search_for(system, 500_000, method)
    search(*given)
    assert_matches(search, system)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["pairs", "cells"])
@pytest.mark.parametrize("pbc", [True, False])
def test_a_larger_box(method, dtype, pbc):
    system = random_box(3000, seed=7, dtype=dtype, pbc=pbc)
    search, given = search_for(system, 200_000, method)
    search(*given)
    assert_matches(search, system)


@pytest.mark.parametrize("pbc", [True, False])
def test_rows_without_order(pbc):
    """The same edges, in an order that repeats; rows shorter than a tile and, in a heap, of hundreds of edges."""
    system = random_box(3000, seed=8, dtype=torch.float64, pbc=pbc)
    system.pos[:500] *= 0.02
    wanted, given = search_for(system, 1_000_000, "cells")
    wanted(*given)
    assert_matches(wanted, system)
    found, _given = search_for(system, 1_000_000, "cells", ordered=False)
    found(*given)
    num = int(wanted.needed)
    assert int(found.flag) == 0 and torch.equal(found.row_ptr, wanted.row_ptr)
    assert int(wanted.row_ptr.diff().max()) > 400
    place = (found.receiver[:num].long() * system.num_atoms + found.sender[:num]) * 4096
    place += ((found.shift[:num].long() + 8) * torch.tensor([256, 16, 1], device="cuda")).sum(1)
    by_place = torch.argsort(place)
    for name in ("sender", "shift", "vectors", "distances"):
        assert torch.equal(getattr(found, name)[:num][by_place], getattr(wanted, name)[:num])
    before = found.sender.clone()
    found(*given)
    assert torch.equal(found.sender, before)


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_far_from_the_origin_and_in_dense_heaps(method):
    """A molecule far away, with 600 atoms inside one cutoff: rows longer than any tile, bins fuller than any tile."""
    rng = np.random.default_rng(3)
    pos = np.concatenate([rng.normal(0, 0.8, (600, 3)), rng.uniform(-60, 60, (900, 3))]) + np.array([3e3, -2e3, 1e2])
    system = System(z=torch.ones(1500, dtype=torch.long), pos=torch.tensor(pos)).to("cuda")
    search, given = search_for(system, 500_000, method)
    search(*given)
    assert int(search.row_ptr.diff().max()) > 500
    assert_matches(search, system)


def test_unsorted_batch_and_half():
    system = System.concatenate([random_box(n, seed=n) for n in (90, 200, 35)])
    mixed = torch.randperm(system.num_atoms, device="cuda")
    system = system.replace(z=system.z[mixed], pos=system.pos[mixed], batch=system.batch[mixed])
    for half in (False, True):
        ours = neighbor_list(system, CUTOFF, backend="triton", half=half)
        assert ours.edge_index.dtype == torch.int32 and ours.edge_index.is_cuda
        assert same(ours, neighbor_list_reference(system, CUTOFF, half=half))


@pytest.mark.parametrize("edge", [16.0, 0.0])
@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_perfect_crystal_with_a_shell_at_the_cutoff(method, edge):
    """Ties: the count and the fill pass must decide alike."""
    grid = torch.cartesian_prod(*[torch.arange(16.0)] * 3)
    system = System(z=torch.ones(4096, dtype=torch.long), pos=grid, cell=torch.eye(3) * edge).to("cuda")
    search, given = search_for(system, 1_100_000, method)  # simple cubic, a = 1 Å: shells at 4 = cutoff
    search(*given)
    assert_matches(search, system)


def test_many_candidates():
    """Rows longer than a tile, and more candidates than a word has bits."""
    for method, n, cutoff in (("cells", 1500, 9.0), ("pairs", 700, 9.0), ("pairs", 40, 25.0)):
        system = random_box(n, seed=n)
        ours = neighbor_list_with(system, cutoff, method)
        assert int(ours.row_ptr.diff().max()) > 300
        assert same(ours, neighbor_list_reference(system, cutoff))


def neighbor_list_with(system, cutoff, method):
    from torchmdnet2.neighbors.triton_search import neighbor_list_triton

    return neighbor_list_triton(system, cutoff, method=method)


def test_small_crystal_with_a_shell_at_the_cutoff():
    grid = torch.cartesian_prod(*[torch.arange(8.0)] * 3)
    for cell in (torch.eye(3) * 8, torch.zeros(3, 3)):
        system = System(z=torch.ones(512, dtype=torch.long), pos=grid, cell=cell).to("cuda")
        search, given = search_for(system, 200_000, "pairs")
        search(*given)
        assert_matches(search, system)


@pytest.mark.parametrize("num_atoms", [1, 2, 22, 166, 263, 264, 265, 1029, 1056, 1057, 2200])
@pytest.mark.parametrize("pbc", [True, False])
def test_one_structure_of_any_size(num_atoms, pbc):
    system = random_box(num_atoms, seed=num_atoms, pbc=pbc)
    search, given = search_for(system, 150 * num_atoms + 200, "pairs")
    for _ in range(3):
        search(*given)
        assert_matches(search, system)


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_graph_replay_follows_moving_atoms_and_cell(method):
    """R16, and R8 for a flag that stays up until it is taken down."""
    system = random_box(2000, seed=1)
    search, (pos, cell, pbc) = search_for(system, 80_000, method)
    search(pos, cell, pbc)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        search(pos, cell, pbc)
    for _ in range(5):
        pos += 0.3 * torch.randn_like(pos)
        cell *= 1.01
        graph.replay()
        assert_matches(search, system.replace(pos=pos, cell=cell))
    # too dense for the capacity: flagged, sticky, and every row is empty
    fine = pos.clone()
    pos *= 0.6
    cell *= 0.6
    graph.replay()
    assert int(search.flag) == 1 and int(search.needed) > search.capacity
    assert int(search.row_ptr.max()) == 0
    pos.copy_(fine)
    cell /= 0.6
    graph.replay()
    assert int(search.flag) == 1, "the flag is sticky"
    search.flag.zero_()
    graph.replay()
    assert_matches(search, system.replace(pos=pos, cell=cell))
    pos[7, 1] = float("nan")
    graph.replay()
    assert int(search.flag) == 2


@pytest.mark.parametrize("method", ["pairs", "cells"])
def test_no_silent_overflow_in_1000_trials(method):
    """Bar R8, under graph replay: capacities around the need; the flag is up exactly when the need is larger."""
    rng = np.random.default_rng(5)
    silent = 0
    for trial in range(20):
        n = int(rng.integers(2, 400))
        system = random_box(n, seed=trial, density=rng.uniform(0.02, 0.2), skew=0.0)
        if method == "cells" and float(system.cell[0].diagonal().min()) < CUTOFF * 1.1:
            system = system.replace(pbc=torch.zeros(1, 3, dtype=torch.bool))
        need = neighbor_list_reference(system, CUTOFF).num_edges
        capacity = max(1, need + int(rng.integers(-5, 6)))
        search, (pos, cell, pbc) = search_for(system, capacity, method)
        search(pos, cell, pbc)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            search(pos, cell, pbc)
        start = pos.clone()
        for _ in range(50):
            pos.copy_(start + 0.2 * torch.randn_like(pos))
            search.flag.zero_()
            graph.replay()
            needed = neighbor_list(system.replace(pos=pos), CUTOFF, backend="triton").num_edges
            overflow = needed > capacity
            silent += int(overflow != bool(int(search.flag) & 1)) + int(int(search.needed) != needed)
            silent += int(int(search.row_ptr.max()) != (0 if overflow else needed))
    assert silent == 0


def test_eager_overflow_is_an_error_in_1000_trials():
    """Bar R8, eager: an exception exactly when the capacity is too small, and it states the need."""
    rng = np.random.default_rng(6)
    for trial in range(1000):
        system = random_box(int(rng.integers(2, 60)), seed=trial, density=rng.uniform(0.02, 0.2))
        edges = neighbor_list(system, CUTOFF, backend="triton")
        capacity = max(0, edges.num_edges + int(rng.integers(-3, 4)))
        if capacity >= edges.num_edges:
            assert neighbor_list(system, CUTOFF, backend="triton", capacity=capacity).num_edges == edges.num_edges
        else:
            with pytest.raises(NeighborOverflow, match=f"needs {edges.num_edges} "):
                neighbor_list(system, CUTOFF, backend="triton", capacity=capacity)


def test_padding_atoms_have_no_neighbors():
    system = random_box(200, seed=2)
    for method in ("pairs", "cells"):
        search, (pos, cell, pbc) = search_for(system, 20_000, method)
        batch = torch.zeros(200, dtype=torch.long, device="cuda")
        batch[150:] = 1  # beyond the only structure
        search.set_batch(batch)
        search(pos, cell, pbc)
        real = neighbor_list_reference(system.replace(z=system.z[:150], pos=pos[:150], batch=None), CUTOFF)
        assert int(search.needed) == real.num_edges
        assert torch.equal(search.row_ptr[:151].long(), real.row_ptr)
        assert bool((search.row_ptr[150:] == real.num_edges).all())


@pytest.mark.parametrize(("method", "num_atoms"), [("pairs", 1000), ("pairs", 5000), ("cells", 5000)])
def test_same_input_same_bits(method, num_atoms):
    """R19."""
    system = random_box(num_atoms, seed=4)
    search, given = search_for(system, 300_000, method)
    search(*given)
    first = [t.clone() for t in (search.row_ptr, search.sender, search.shift, search.vectors, search.distances)]
    for _ in range(10):
        for t in (search.sender, search.shift, search.vectors, search.distances):
            t.fill_(-1)
        search(*given)
        num = int(search.needed)
        for a, b in zip(first, (search.row_ptr, search.sender, search.shift, search.vectors, search.distances)):
            assert torch.equal(a[:num], b[:num])


def test_runs_on_the_current_stream():
    """R17: work queued before on another stream must be seen; positions arrive late there."""
    system = random_box(2000, seed=9)
    search, (pos, cell, pbc) = search_for(system, 100_000)
    search(pos, cell, pbc)
    late = torch.zeros_like(pos)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(pos)
        search(late, cell, pbc)
    stream.synchronize()
    assert_matches(search, system)


def test_auto_takes_the_gpu_and_gradients_flow():
    system = random_box(100, seed=11, dtype=torch.float64)
    edges = neighbor_list(system, CUTOFF)
    assert edges.edge_index.is_cuda and edges.edge_index.dtype == torch.int32
    pos = system.pos.clone().requires_grad_()
    (grad,) = torch.autograd.grad((edges.distances(system.replace(pos=pos)) ** 2).sum(), pos)
    # d/dr of the sum of |d|² is 2 d for one end of each edge and −2 d for the other: by the search of the CPU
    there = system.to("cpu")
    reference = neighbor_list(there, CUTOFF)
    pos = there.pos.clone().requires_grad_()
    (expected,) = torch.autograd.grad((reference.distances(there.replace(pos=pos)) ** 2).sum(), pos)
    assert float(expected.abs().max()) > 1
    assert torch.allclose(grad.cpu(), expected, rtol=1e-10, atol=1e-10)
