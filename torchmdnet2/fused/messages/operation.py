"""The messages of a layer as one differentiable operation; its backward pass adds to the forces.

Shapes: N atoms, C room for edges, F channels, K knots, P filters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...triton_launch import FUSED_ARITHMETIC
from ..fast_path import Edges
from ..tensornet.weights import FilterTable
from .kernels import message_backward_kernel, message_kernel, place_kernel

__all__ = ["Buffers", "LaunchShapes", "Messages", "Pass"]

_BLOCK = 256


class LaunchShapes(NamedTuple):
    """Heads and edges of a tile of the forward and of the backward kernel, and warps of a program."""

    heads: int
    edges: int
    edges_backward: int
    warps: int


@dataclass(eq=False)
class Buffers:
    """Static memory of a network for N atoms and C edges.

    Attributes:
        energy [N], forces [N, 3], virial [N, 9]: results, see `GpuBuffers`.
        knot [C] int32, offset [C], unit [C, 3], inverse [C]: of each edge, see `place_kernel`.
        pull [slices, N, 3], virials [slices, N, 9]: what the backward kernels add to.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor
    knot: Tensor
    offset: Tensor
    unit: Tensor
    inverse: Tensor
    pull: Tensor
    virials: Tensor

    @classmethod
    def allocate(cls, num_atoms: int, capacity: int, slices: int, device: torch.device) -> Buffers:
        """Zeros."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n, edges = num_atoms, capacity
        return cls(
            new(n), new(n, 3), new(n, 9), new(edges, dtype=torch.int32), new(edges), new(edges, 3), new(edges),
            new(slices, n, 3), new(slices, n, 9),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values())


@dataclass(eq=False)
class Pass:
    """One evaluation: edges in their places, and where gradients go.

    Attributes:
        anchor: [1], requires a gradient: autograd then walks through all layers back to it.
    """

    buffers: Buffers
    shapes: LaunchShapes
    edges: Edges
    with_virial: bool
    anchor: Tensor

    @classmethod
    def begin(
        cls, buffers: Buffers, shapes: LaunchShapes, edges: Edges, with_virial: bool, table: FilterTable, knots: Tensor
    ) -> Pass:
        """Find the edges' places in the tables and set the sums to zero."""
        num_atoms, b = edges.row_ptr.shape[0] - 1, buffers
        place_kernel[(triton.cdiv(b.knot.shape[0], _BLOCK),)](
            edges.row_ptr, edges.vectors, knots, b.knot, b.offset, b.unit, b.inverse, num_atoms, table.decay,
            table.scale, KNOTS=table.num_knots, BLOCK=_BLOCK, **FUSED_ARITHMETIC,
        )  # fmt: skip
        b.pull.zero_()
        if with_virial:
            b.virials.zero_()
        anchor = torch.zeros(1, device=b.pull.device, requires_grad=True)
        return cls(buffers, shapes, edges, with_virial, anchor)


class Messages:
    """The messages of one layer.

    Args:
        table: [K, 4, P, F], see kernels.py.
        head_size: channels of a head.
        own: atoms send a message to themselves.
    """

    def __init__(self, table: Tensor, head_size: int, own: bool):
        self.table, self.head_size, self.own = table, head_size, own
        self.parts, self.channels = table.shape[2:]
        self.attention, self.vectors = self.parts > 1, self.parts == 4

    def __call__(self, run: Pass, qkv: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [N, F] and w [N, 3, F] (empty without vectors) from qkv [N, W] and w [N, 3, F]."""
        return _Apply.apply(self, run, run.anchor, qkv.contiguous(), qkv if w is None else w.contiguous())

    def options(self, qkv: Tensor, shapes: LaunchShapes) -> tuple[tuple[int, int], dict[str, Any]]:
        """Grid and constants of a launch."""
        heads = min(shapes.heads, self.channels // self.head_size)
        return (qkv.shape[0], self.channels // (heads * self.head_size)), {
            "F": self.channels, "D": self.head_size, "P": self.parts, "W": qkv.shape[1], "BH": heads, "OWN": self.own,
            "ATTENTION": self.attention, "VECTORS": self.vectors, "num_warps": shapes.warps, **FUSED_ARITHMETIC,
        }  # fmt: skip


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Messages, run: Pass, anchor: Tensor, qkv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        num_atoms = qkv.shape[0]
        x = qkv.new_empty(num_atoms, op.channels)
        w_out = qkv.new_empty(num_atoms if op.vectors else 0, 3, op.channels)
        b, edges = run.buffers, run.edges
        grid, constants = op.options(qkv, run.shapes)
        message_kernel[grid](
            edges.row_ptr, edges.sender, b.knot, b.offset, b.unit, op.table, qkv, w, x, w_out, num_atoms,
            BE=run.shapes.edges, **constants,
        )  # fmt: skip
        ctx.op, ctx.run = op, run
        ctx.save_for_backward(qkv, w)
        return x, w_out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        op, run, (qkv, w) = ctx.op, ctx.run, ctx.saved_tensors
        dx, dw = (g.contiguous() for g in gradients)
        b, edges = run.buffers, run.edges
        dqkv = torch.empty_like(qkv)
        dw_in = torch.empty_like(w) if op.vectors else dqkv
        grid, constants = op.options(qkv, run.shapes)
        message_backward_kernel[grid](
            edges.row_ptr, edges.sender, b.knot, b.offset, b.unit, b.inverse, edges.vectors, op.table, qkv, w, dx, dw,
            dqkv, dw_in, b.pull, b.virials, qkv.shape[0], BE=run.shapes.edges_backward, VIRIAL=run.with_virial,
            **constants,
        )  # fmt: skip
        return None, None, None, dqkv, dw_in if op.vectors else None
