"""The arrays that the CPU kernels of TensorNet write, in memory that is used again.

Shapes: N rows, E directed edges, F channels, L layers, K heads.
"""

from __future__ import annotations

import math

import numpy as np

from ..cpu_interfaces import Array

__all__ = ["BufferPool", "CpuBuffers"]

Shape = tuple[int, ...]


class CpuBuffers:
    """Arrays for a number of rows and edges, with any contents; lists have one array for each layer."""

    z: Array
    q: Array
    knot: Array
    offset: Array
    unit: Array
    length: Array
    slope: Array
    gradient: Array
    hidden: Array
    gate: Array
    x0: Array
    mixed: Array
    g: Array
    dy: Array
    readout: Array
    out: Array
    out_slope: Array
    x: list[Array]
    inverse: list[Array]
    y: list[Array]
    m: list[Array]
    d: list[Array]
    dm: list[Array]


class BufferPool:
    """Buffers for the run at hand, in memory that grows when more is needed, and is used again otherwise."""

    buffers: type[CpuBuffers] = CpuBuffers
    integers = frozenset(("z", "knot"))
    doubles: frozenset[str] = frozenset()
    listed = frozenset(("x", "inverse", "y", "m", "d", "dm"))

    def __init__(self, channels: int, layers: int, heads: int):
        self.channels, self.layers, self.heads = channels, layers, heads
        self._memory: dict[str, Array] = {}
        self._rows, self._edges, self._current = (-1, -1), -1, self.buffers()

    def __call__(self, rows: int, edges: int, ghosts: int = 0) -> CpuBuffers:
        """Buffers for so many rows and edges; z, y and dm have rows of ghosts besides."""
        if (rows, ghosts) != self._rows or edges > self._edges:
            self._rows, self._edges = (rows, ghosts), edges + edges // 8
            self._current = self._allocate(rows, self._edges, ghosts)
        return self._current

    def _shapes(self, rows: int, edges: int, ghosts: int) -> dict[str, Shape]:
        f, layers = self.channels, self.layers
        return {
            "z": (rows + ghosts,),
            "q": (rows,),
            **dict.fromkeys(("knot", "offset", "length", "slope"), (edges,)),
            **dict.fromkeys(("unit", "gradient"), (edges, 3)),
            "hidden": (rows, 2 * f),
            "gate": (rows, 3 * f),
            **dict.fromkeys(("x0", "mixed", "g", "dy"), (rows, 9 * f)),
            "readout": (rows, f),
            **dict.fromkeys(("out", "out_slope"), (rows, self.heads)),
            "x": (layers + 1, rows, 9 * f),
            "inverse": (layers + 1, rows, f),
            **dict.fromkeys(("m", "d"), (layers, rows, 9 * f)),
            **dict.fromkeys(("y", "dm"), (layers, rows + ghosts, 9 * f)),
        }

    def _allocate(self, rows: int, edges: int, ghosts: int) -> CpuBuffers:
        buffers = self.buffers()
        for name, shape in self._shapes(rows, edges, ghosts).items():
            size = math.prod(shape)
            memory = self._memory.get(name)
            if memory is None or memory.size < size:
                wide = np.int64 if name in self.integers else np.float64
                memory = np.empty(size, wide if name in self.integers | self.doubles else np.float32)
                self._memory[name] = memory
            array = memory[:size].reshape(shape)
            setattr(buffers, name, list(array) if name in self.listed else array)
        return buffers
