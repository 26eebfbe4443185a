"""Steps that are replayed: capture in a CUDA graph, room for more edges when they are needed.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..potential import Result
from .capture import CudaGraph, ReplayDiffers
from .step import COINCIDENT, NOT_FINITE, OVERFLOW, TOO_THIN, Step

__all__ = ["GraphedStep", "raise_input_flags"]


class GraphedStep:
    """A step that runs as one CUDA graph once it is captured, else as launches.

    Args:
        step: its capacities and capture are managed here.

    Attributes:
        captures: how often a graph was captured.
    """

    def __init__(self, step: Step):
        self.step = step
        self.captures = 0
        self._graph: CudaGraph | None = None
        self._version = -1  # of the step, when the graph was captured
        self._wanted = False
        self._pinned: Tensor | None = None
        if step.device.type == "cuda":
            self._pinned = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)

    @property
    def captured(self) -> bool:
        """Whether `run` replays a graph."""
        return self._graph is not None and self._version == self.step.version

    def make_room(self) -> None:
        """Set the capacities to what the positions in place need. Waits for the device.

        Raises:
            ValueError: a position or cell is not finite, or a cell is too thin to be searched.
        """
        flags = self.step.make_room()
        if flags & TOO_THIN and self.step.search_thin_cells():
            flags = self.step.make_room()
        raise_input_flags(flags)

    def capture(self) -> None:
        """Replay a graph from now on (on a CUDA device)."""
        self._wanted = self.step.device.type == "cuda"

    def run(self) -> None:
        """One step on the current stream.

        Raises:
            NotCapturable: it cannot be captured, or the graph gives other numbers than the launches.
        """
        if self._wanted and not self.captured:
            self._capture()
        if self._graph is None:
            self.step.launch()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        step = self.step
        self._graph, step.graph_bytes = None, 0
        try:
            graph = CudaGraph.record(
                step.launch, step.device, [step.out.packed], agree=lambda launched: step.replay_agrees(launched[0]),
                measure=step.measures_graph,
            )  # fmt: skip
        except ReplayDiffers as error:
            raise ReplayDiffers(f"{error}: please report this, and use Evaluator(…, graphs=False) meanwhile") from None
        self._graph, step.graph_bytes, self._version = graph, graph.nbytes, step.version
        self.captures += 1

    def results(self) -> Result:
        """A copy of the results."""
        return self.step.results()

    def status(self) -> tuple[int, int]:
        """Flags and the largest number of edges since the last `clear`; waits until all launched work is done."""
        status = self.step.out.status
        if self._pinned is not None:
            self._pinned.copy_(status, non_blocking=True)
            torch.cuda.current_stream(self.step.device).synchronize()
            status = self._pinned
        flag, needed = status.tolist()
        return flag & 0xFFFFFFFF, needed

    def recover(self, flag: int) -> bool:
        """After flags: True when the same positions can be computed again now, False when they are at fault."""
        step = self.step
        # after an overflow positions may have become NaN by integration: the overflow came first
        good = False
        if flag & OVERFLOW:
            step.grow()
            good = True
        elif flag & TOO_THIN and not flag & NOT_FINITE:
            good = step.search_thin_cells()
        step.clear()
        return good


def raise_input_flags(flag: int) -> None:
    """Raise ValueError for flags that no capacity can mend."""
    if flag & COINCIDENT:
        raise ValueError("two atoms are at the same place, where energy and forces mean nothing")
    if flag & NOT_FINITE:
        raise ValueError("a position or a cell is not finite or too large, or a periodic cell has no volume")
    if flag & TOO_THIN:
        raise ValueError("a periodic cell is too thin to be searched: more than 30 images to a side")
