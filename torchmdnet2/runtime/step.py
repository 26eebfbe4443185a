"""A step over static buffers: what a graph holds, whatever model it computes.

Shapes: N atoms, B structures, C room for directed edges.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..errors import NeighborOverflow
from ..neighbors.triton_search import COINCIDENT, NOT_FINITE, OVERFLOW, TOO_THIN, TritonNeighborSearch
from ..potential import Result
from .outputs import Outputs
from .timings import Part

__all__ = ["COINCIDENT", "NOT_FINITE", "OVERFLOW", "TOO_THIN", "Step", "next_capacity"]

_MOST_EDGES = 2**31 - 1
FEWEST_EDGES = 16
"""Room of a search that has not been asked what it needs."""


def next_capacity(edges: int) -> int:
    """Room for this many edges: one of a series of multiples of 16, each about 1.19 times the one before.

    Small structures get more room above what they need, since the number of their edges changes more.
    """
    wanted, capacity = edges + edges // 32 + 64, 128
    while capacity < wanted:
        capacity = -(-(capacity * 19) // (16 * 16)) * 16
    return capacity


class Step(ABC):
    """Energy, forces and stress of N atoms in B structures, as launches on the current stream.

    Write to `pos` and `cell`, `launch()`, read `out`. `launch()` never waits for the device, so that a CUDA graph can
    hold it. Flags gather in `out.status` until `clear()`; while one of the neighbor search's bits is set, all results
    are NaN.

    Args:
        num_atoms, num_systems: N and B.
        dtype: of the positions, float32 or float64.
        stress: compute the stress.
        charges: the potential predicts charges.
        device: CUDA, or the CPU under Triton's interpreter.

    Attributes:
        pos [N, 3], cell [B, 3, 3], pbc [B, 3]: inputs.
        out: results.
        searches: a neighbor search for each distinct cutoff, that of the network first.
        version: a graph that was captured before it last changed must not be replayed any more.
        order: spatial order of the atoms, None where they stay as they are.
        measures_graph: count the memory of a graph in `nbytes`.
    """

    pos: Tensor
    cell: Tensor
    pbc: Tensor
    searches: dict[float, TritonNeighborSearch]
    order: Any = None
    measures_graph = False

    def __init__(
        self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, charges: bool, device: torch.device
    ):
        self.num_atoms, self.num_systems = num_atoms, num_systems
        self.dtype, self.stress, self.device = dtype, stress, device
        self.out = Outputs.allocate(num_atoms, num_systems, dtype, stress, charges, device)
        self.version = 0
        self.graph_bytes = 0

    # --- launches ------------------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """The whole step, on the current stream."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """What `launch` does in parts, each of which can be repeated by itself; results mean nothing then."""

    def results(self) -> Result:
        """A copy of the results, but for the properties."""
        return self.out.on(self.out.packed.clone()).result()

    @abstractmethod
    def properties(self, charges: Tensor | None) -> dict[str, Tensor]:
        """Properties by name, in fresh memory: what heads give for the last step's features.

        Args:
            charges: [N] e, a copy of those of `out`, which is taken where a head gives them.
        """

    def replay_agrees(self, launched: Tensor) -> bool:
        """Whether the results in place, of a graph, are those of the launches that it was made of: to the last bit.

        Args:
            launched: a copy of `out.packed`.
        """
        return torch.equal(launched, self.out.packed)

    def clear(self) -> None:
        """Forget the flags, and the numbers of edges."""
        self.out.status.zero_()
        for most in self._most[1:]:
            most.zero_()

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def search(self) -> TritonNeighborSearch:
        """That of the network."""
        return next(iter(self.searches.values()))

    @property
    def capacity(self) -> int:
        """C, room for directed edges of the network."""
        return self.search.capacity

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the large buffers."""

    def make_room(self) -> int:
        """Set the capacities to what the positions in place need. Waits for the device.

        Returns:
            The flags of the searches: not 0 where no capacity is enough.
        """
        flags = 0
        with self._on_device():
            pos = self._searched_positions()
            for search, most in zip(self.searches.values(), self._most, strict=True):
                self.clear()
                search.count(pos, self.cell, self.pbc)
                flag = int(search.flag) & ~OVERFLOW
                if not flag and (int(search.needed) > search.capacity or search.capacity == FEWEST_EDGES):
                    most.copy_(search.needed)
                    self._grow(search, most)
                flags |= flag
            self.clear()
        return flags

    def grow(self) -> None:
        """Room for the most edges that were found since `clear`.

        Raises:
            NeighborOverflow: more than 2^31 − 1 edges.
        """
        for search, most in zip(self.searches.values(), self._most, strict=True):
            if int(most) > search.capacity:
                self._grow(search, most)

    def _grow(self, search: TritonNeighborSearch, most: Tensor) -> None:
        capacity = next_capacity(int(most))
        if capacity > _MOST_EDGES:
            raise NeighborOverflow(int(most), _MOST_EDGES)
        self._resize(search, max(capacity, search.capacity))
        self.version += 1

    def search_thin_cells(self) -> bool:
        """Take the searches that know cells thinner than the cutoff. Returns whether there were others before."""
        if all(search.method != "cells" for search in self.searches.values()):
            return False
        self._make_searches({cutoff: search.capacity for cutoff, search in self.searches.items()}, "pairs", True)
        self.version += 1
        return True

    def _make_searches(self, capacities: dict[float, int], method: str, thin: bool) -> None:
        """Searches by cutoff, whose flags lie in the results, so that one copy brings all."""
        self.searches = {c: self._new_search(c, capacity, method, thin) for c, capacity in capacities.items()}
        for search in self.searches.values():
            search.flag = self.out.status.view(torch.int32)[:1]
        others = len(self.searches) - 1
        # edges that the searches other than the network's found, and the most that each search found since `clear`
        shape = 2, others, 2  # every second number, so that each is aligned
        self._needed_by_others, self._most_of_others = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._most = [self.out.status[1:], *self._most_of_others[:, :1]]
        for search, needed in zip(list(self.searches.values())[1:], self._needed_by_others[:, :1], strict=True):
            search.needed = needed

    @abstractmethod
    def _new_search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        """A search that knows the batch."""

    def _resize(self, search: TritonNeighborSearch, capacity: int) -> None:
        """Other edge buffers."""
        search.set_capacity(capacity)

    def _searched_positions(self) -> Tensor:
        """Positions in the order in which the searches see them."""
        return self.pos

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
