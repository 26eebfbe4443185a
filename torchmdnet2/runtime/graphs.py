"""Steps that are replayed: capture in a CUDA graph, room for more edges when they are needed.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import NeighborOverflow
from ..potential import Result
from .capture import captured
from .step import NOT_FINITE, OVERFLOW, TOO_THIN, FusedStep, Outputs, ladder

__all__ = ["GraphedStep", "refuse"]


class GraphedStep:
    """A fused step that runs as one CUDA graph once it is captured, else as launches.

    Args:
        step: its capacity and capture are managed here.

    Attributes:
        captured: whether `run` replays a graph.
        captures: how often one was captured.
    """

    def __init__(self, step: FusedStep):
        self.step = step
        self.captures = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wanted = False
        self._pinned: Tensor | None = None
        if step.device.type == "cuda":
            self._pinned = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def make_room(self) -> None:
        """Set the capacity to what the positions in place need. Waits for the device.

        Raises:
            ValueError: a position or cell is not finite, or a cell is too thin to be searched.
        """
        flag, needed = self.step.count()
        if flag & TOO_THIN and self._uses_cells():
            self.step.search_pairs()
            self._graph = None
            flag, needed = self.step.count()
        refuse(flag)
        if needed > self.step.capacity or self.step.capacity == 16:
            self.grow(needed)

    def grow(self, needed: int) -> None:
        """At least `needed` edges; the graph, if there was one, is captured anew at the next `run`.

        Raises:
            NeighborOverflow: more than 2^31 − 1 edges.
        """
        capacity = ladder(needed)
        if capacity >= 2**31:
            raise NeighborOverflow(needed, 2**31 - 1)
        self._graph = None
        self.step.set_capacity(max(capacity, self.step.capacity))

    def _uses_cells(self) -> bool:
        return self.step.search.method == "cells"

    def capture(self) -> None:
        """Replay a graph from now on (on a CUDA device)."""
        self._wanted = self.step.device.type == "cuda"

    def run(self) -> None:
        """One step on the current stream."""
        if self._wanted and self._graph is None:
            self._capture()
        if self._graph is None:
            self.step.launch()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        step = self.step
        with torch.cuda.device(step.device):
            # outside of the capture first: kernels are compiled and loaded, which must not happen inside
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step.launch()
            torch.cuda.current_stream().wait_stream(side)
            before = step.out.packed.clone()
            graph = torch.cuda.CUDAGraph()
            with captured(graph, side):
                step.launch()
            graph.replay()
            if not self._agrees(before):
                raise RuntimeError(
                    "a replayed CUDA graph gives other numbers than the launches it was made of: please report this, "
                    "and use Evaluator(…, graphs=False) meanwhile"
                )
            self._graph = graph
            self.captures += 1

    def _agrees(self, before: Tensor) -> bool:
        """Whether a replay gave what launches gave. They are deterministic: to the last bit."""
        return torch.equal(before, self.step.out.packed)

    def results(self) -> Result:
        """A copy of the results."""
        step = self.step
        out = Outputs.view(step.out.packed.clone(), step.num_atoms, step.num_systems, step.dtype, step.stress)
        stress = None if out.stress is None else out.stress.to(step.dtype)
        return Result(out.energy, out.forces, stress, out.atom_energies)

    def status(self) -> tuple[int, int]:
        """Flags and the largest number of edges since the last `clear`; waits until all launched work is done."""
        status = self.step.out.status
        if self._pinned is not None:
            self._pinned.copy_(status, non_blocking=True)
            torch.cuda.current_stream(self.step.device).synchronize()
            status = self._pinned
        flag, needed = status.tolist()
        return flag & 0xFFFFFFFF, needed

    def recover(self, flag: int, needed: int) -> bool:
        """After flags: True when the same positions can be computed again now, False when they are at fault."""
        # after an overflow positions may have become NaN by integration: the overflow came first
        if flag & OVERFLOW:
            self.grow(needed)
            self.step.clear()
            return True
        if flag & TOO_THIN and not flag & NOT_FINITE and self._uses_cells():
            self.step.search_pairs()
            self._graph = None
            self.step.clear()
            return True
        self.step.clear()
        return False


def refuse(flag: int) -> None:
    """Raise ValueError for flags that no capacity can mend."""
    if flag & NOT_FINITE:
        raise ValueError("a position or a cell is not finite or too large, or a periodic cell has no volume")
    if flag & TOO_THIN:
        raise ValueError("a periodic cell is too thin to be searched: more than 30 images to a side")
