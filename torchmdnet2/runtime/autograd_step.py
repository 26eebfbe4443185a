"""Any potential as a step over static buffers: neighbor search, network, autograd, priors, sums, stress.

The counterpart of step.py for models without fused kernels. One launch enqueues what the Potential would do, on lists
with room to spare (padded.py), without looking at any value: so it can be captured in a CUDA graph.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..neighbors.triton_search import NOT_FINITE, OVERFLOW, TOO_THIN, TritonNeighborSearch
from ..potential import Potential, Result
from ..priors.pairs import PairLists, all_pairs
from ..system import System
from . import graphs
from .padded import PaddedList, cut, pad_list, pad_system
from .step import NO_VOLUME, RESULT_NOT_FINITE, Outputs

__all__ = ["AutogradStep"]

_UNUSABLE = NOT_FINITE | OVERFLOW | TOO_THIN


class AutogradStep:
    """Energy, forces and stress of N atoms in B structures by autograd, without waits for the device.

    Args:
        potential: in evaluation mode, on a CUDA device (the CPU under Triton's interpreter).
        isolated: `potential.isolated_energies()`; None where they are not subtracted.
        cutoffs: Å of the lists that the potential asks for, its own first.
        system: what is held at first; its batch must ascend.
        stress: compute the stress.

    Attributes:
        pos [N, 3], cell [B, 3, 3]: inputs.
        out: results; `extra`: charges and properties, by name.
        searches: by cutoff; for an infinite one there is the list `pairs` of the composition.
        stale: the composition has changed in such a way that a graph captured before must not be replayed.
    """

    order = None  # atoms stay as they are

    def __init__(
        self, potential: Potential, isolated: Tensor | None, cutoffs: list[float], system: System, stress: bool
    ):
        self.potential, self.isolated, self.stress = potential, isolated, stress
        N, B = self.num_atoms, self.num_systems = system.num_atoms, system.num_systems
        self.dtype, self.device = system.dtype, system.device
        finite = [cutoff for cutoff in cutoffs if math.isfinite(cutoff)]
        held = pad_system(system, max(finite), potential.elements[0])
        self._system = System(**{name: value.detach().clone() for name, value in vars(held).items()})
        self.pos, self.cell, self.pbc = self._system.pos[:N], self._system.cell[:B], self._system.pbc[:B]
        self.out = Outputs.allocate(N, B, self.dtype, stress, self.device)
        self.extra: dict[str, Tensor] = {}
        self.most = torch.zeros(len(finite), dtype=torch.int64, device=self.device)
        self.searches = {cutoff: self._search(cutoff, 16, "auto", False) for cutoff in finite}
        self.pairs: PaddedList | None = None
        self._all_pairs = len(finite) < len(cutoffs)
        self.pool_bytes = 0  # of the graph, once there is one
        self.stale = False
        self.set_composition(system)

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def search(self) -> TritonNeighborSearch:
        """The one with the potential's cutoff."""
        return self.searches[self.potential.cutoff]

    @property
    def capacity(self) -> int:
        """C, room for directed edges of the network."""
        return self.search.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and of the graph's memory."""
        tensors = [v for search in self.searches.values() for v in vars(search).values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) + self.out.packed.numel() + self.pool_bytes

    def make_room(self) -> int:
        """Set the capacities to what the positions in place need. Waits for the device. Returns the flags."""
        flags = 0
        for search in self.searches.values():
            flags |= self._count(search)
        return flags

    def grow(self) -> None:
        """Room for the most edges that were found since `clear`."""
        for search, needed in zip(self.searches.values(), self.most.tolist(), strict=True):
            if needed > search.capacity:
                search.set_capacity(graphs.ladder(needed))

    def search_pairs(self) -> None:
        """Take the searches that know cells thinner than the cutoff."""
        self.searches = {c: self._search(c, s.capacity, "pairs", True) for c, s in self.searches.items()}
        for search in self.searches.values():
            search.set_batch(self._system.batch[: self.num_atoms])

    def _search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        search = TritonNeighborSearch(
            self.num_atoms, self.num_systems, cutoff, capacity, self.device, dtype=torch.float32, method=method,
            thin=thin, receiver=True, shift=True, vectors=False,
        )  # fmt: skip
        # the sticky flag of all searches lies in the results, so that one copy brings all
        search.flag = self.out.status.view(torch.int32)[:1]
        return search

    def _count(self, search: TritonNeighborSearch) -> int:
        self.clear()
        search.count(self.pos, self.cell, self.pbc)
        flags, needed = int(search.flag), int(search.needed)
        self.clear()
        if not flags & ~OVERFLOW and (needed > search.capacity or search.capacity == 16):
            search.set_capacity(graphs.ladder(needed))
        return flags & ~OVERFLOW

    # --- inputs ----------------------------------------------------------------------------------------------------

    def set_composition(self, system: System) -> None:
        """Take over all but positions and cell."""
        N, B = self.num_atoms, self.num_systems
        for name in ("z", "batch"):
            getattr(self._system, name)[:N].copy_(getattr(system, name))
        for name in ("charge", "spin", "pbc"):
            getattr(self._system, name)[:B].copy_(getattr(system, name))
        for search in self.searches.values():
            search.set_batch(system.batch)
        if not self._all_pairs:
            return
        found = all_pairs(system)
        pairs = pad_list(found.row_ptr, found.edge_index[0], found.edge_index[1], found.shift, math.inf)
        if self.pairs is None or self.pairs.num_edges != pairs.num_edges:
            self.pairs, self.stale = pairs, True
            return
        for name in ("edge_index", "shift", "row_ptr"):
            getattr(self.pairs, name).copy_(getattr(pairs, name))

    # --- launches --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the flags."""
        self.out.status.zero_()
        self.most.zero_()

    def launch(self) -> None:
        """The whole step, on the current stream."""
        lists: dict[float, Any] = {} if self.pairs is None else {math.inf: self.pairs}
        for cutoff, search in self.searches.items():
            search(self.pos, self.cell, self.pbc)
            assert search.receiver is not None and search.shift is not None
            lists[cutoff] = pad_list(search.row_ptr, search.receiver, search.sender, search.shift, cutoff)
        found = self.potential.compute(
            self._system, PairLists(self._system, lists), True, self.stress, isolated=self.isolated
        )
        with torch.no_grad():
            self._store(cut(found, self.num_atoms, self.num_systems))

    def _store(self, result: Result) -> None:
        out, flags = self.out, self.out.status[:1]
        torch.maximum(self.most, torch.cat([s.needed for s in self.searches.values()]), out=self.most)
        out.status[1:].copy_(self.most[:1])
        unusable = (flags & _UNUSABLE) != 0
        assert result.forces is not None and result.atom_energies is not None
        broken = ~(result.energy.isfinite().all() & result.forces.isfinite().all()) & ~unusable
        flags |= broken.long() * RESULT_NOT_FINITE
        if self.stress:
            flags |= (self._system.volume[: self.num_systems] == 0).any().long() * NO_VOLUME
        results = {**vars(out), **self.extra}
        for name, value in _tensors(result).items():
            if name not in results:
                self.extra[name] = results[name] = torch.zeros_like(value)
            results[name].copy_(torch.where(unusable, math.nan, value) if value.is_floating_point() else value)

    def results(self) -> Result:
        """A copy of the results."""
        out = Outputs.view(self.out.packed.clone(), self.num_atoms, self.num_systems, self.dtype, self.stress)
        extra = {name: value.clone() for name, value in self.extra.items()}
        charges = extra.pop("charges", None)
        stress = None if out.stress is None else out.stress.to(self.dtype)
        names = {name.removeprefix("property "): value for name, value in extra.items()}
        return Result(out.energy, out.forces, stress, out.atom_energies, charges, names)


def _tensors(result: Result) -> dict[str, Tensor]:
    """What there is, by name."""
    found = {name: value for name, value in vars(result).items() if isinstance(value, Tensor)}
    return found | {f"property {name}": value for name, value in result.properties.items()}
