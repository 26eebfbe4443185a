"""Graph network, Transformer and Equivariant Transformer on the GPU.

The messages of a layer are one differentiable operation on kernels, whose backward pass adds to the forces. PyTorch and
its autograd compute all operations of single atoms.

Shapes: N atoms, C capacity for edges, F channels, K knots, P filters.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, Network
from ...potential.graph import Features
from ..heads import EquivariantScalarHead
from ..tensornet.weights import Filters, FilterTable, fit_tables
from .kernels import message_backward_kernel, message_kernel, place_kernel

__all__ = [
    "Buffers", "EquivariantTransformerNetwork", "GraphNetworkNetwork", "LaunchShapes", "Messages", "Pass",
    "TransformerNetwork",
]  # fmt: skip


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
        energy [N], forces [N, 3], virial [N, 9]: results, see `Buffers`.
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
        """Return zeros."""

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
        """Return x [N, F] and w [N, 3, F] (empty without vectors) from qkv [N, W] and w [N, 3, F]."""
        return _Apply.apply(self, run, run.anchor, qkv.contiguous(), qkv if w is None else w.contiguous())

    def options(self, qkv: Tensor, shapes: LaunchShapes) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and constants of a launch."""
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
        # without vectors the kernel writes no gradient of w: any pointer will do
        dw_in = torch.empty_like(w) if op.vectors else dqkv
        grid, constants = op.options(qkv, run.shapes)
        # layers come one after the other on one stream, so that they can add to the same sums
        message_backward_kernel[grid](
            edges.row_ptr, edges.sender, b.knot, b.offset, b.unit, b.inverse, edges.vectors, op.table, qkv, w, dx, dw,
            dqkv, dw_in, b.pull, b.virials, qkv.shape[0], BE=run.shapes.edges_backward, VIRIAL=run.with_virial,
            **constants,
        )  # fmt: skip
        return None, None, None, dqkv, dw_in if op.vectors else None


# --- The three models with messages on kernels; operations of single atoms are PyTorch's ---

_SMALL = 512  # atoms; below, a group of heads for each program, so that the device is filled


class _Network(Network):
    """A representation with its head.

    Args:
        representation, head: copied.
        energy_scale: eV per unit of the head.
        device: CUDA (the CPU under Triton's interpreter).

    Attributes:
        model, head: the copies.
    """

    def __init__(self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device):
        self.device, self.energy_scale = device, energy_scale
        self.model: Any = copy.deepcopy(representation).eval().requires_grad_(False)
        self.head: Any = copy.deepcopy(head).eval().requires_grad_(False)
        exact: Any = copy.deepcopy(self.model).cpu().double()
        filters = self._filters(exact)
        embedding = exact.neighbor_embedding
        if embedding is not None:
            filters.append(partial(_times_cutoff, exact, embedding.distance_proj))
        with torch.no_grad():
            self.table, segments = fit_tables(exact.cutoff, [(f, False) for f in filters])
            self.knots = self.table.distances().float().to(device)
            tables = [table.float().contiguous().to(device) for table in segments]
        size = self._head_size()
        self.neighbors = Messages(tables.pop(), size, False) if embedding is not None else None
        self.messages = [Messages(table, size, self._own) for table in tables]

    allocates = True
    _own = True

    @abstractmethod
    def _filters(self, exact: Any) -> list[Filters]:
        """Radial filters of each layer, [K] → [K, P, F]."""

    @abstractmethod
    def _head_size(self) -> int:
        """Return the number of channels of a head."""

    @abstractmethod
    def _features(self, run: Pass, x: Tensor) -> Features:
        """Return features from those of the elements, x [N, F]."""

    def launch_shapes(self, num_atoms: int) -> LaunchShapes:
        return LaunchShapes(1, 8, 4, 1) if num_atoms < _SMALL else LaunchShapes(8, 4, 2, 4)

    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> Buffers:
        size = self._head_size()
        heads = self.model.hidden_channels // size
        return Buffers.allocate(num_atoms, capacity, heads // min(shapes.heads, heads), self.device)

    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        run = Pass.begin(buffers, shapes, edges, with_virial, self.table, self.knots)
        with torch.enable_grad():
            x = self.model.embedding(atoms.z)
            embedding = self.model.neighbor_embedding
            if embedding is not None and self.neighbors is not None:
                sums, _ = self.neighbors(run, embedding.embedding(atoms.z))
                x = embedding.combine(torch.cat([x, sums], 1))
            features = self._features(run, x)
            energy = self._energies(features) * self.energy_scale
            # what it gives lies in the buffers
            torch.autograd.grad(energy.sum(), run.anchor, allow_unused=True)
        buffers.energy.copy_(energy.detach())
        # over groups of heads, which different programs hold
        torch.sum(buffers.pull, 0, out=buffers.forces)
        if with_virial:
            torch.sum(buffers.virials, 0, out=buffers.virial)

    def _energies(self, features: Features) -> Tensor:
        """Return the energies [N] in the head's unit."""
        network = self.head.output_network
        return network(features)[0] if isinstance(self.head, EquivariantScalarHead) else network(features.x).squeeze(1)


def _cut(exact: Any, d: Tensor) -> Tensor:
    """Return the cutoff function, [K, 1]."""
    return exact.envelope(d)[:, None]


def _times_cutoff(exact: Any, network: nn.Module, d: Tensor) -> Tensor:
    """Return a network of the radial basis times the cutoff function, [K, 1, F]."""
    return (network(exact.distance_expansion(d)) * _cut(exact, d))[:, None]


def _side_by_side(linears: Sequence[nn.Linear], order: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of several linear maps of the same input as one, with their outputs in the given order."""
    weights = [m.weight if o is None else m.weight[o] for m, o in zip(linears, order, strict=True)]
    biases = [m.bias if o is None or m.bias is None else m.bias[o] for m, o in zip(linears, order, strict=True)]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class GraphNetworkNetwork(_Network):
    """The graph network with the aggregation "add"."""

    _own = False

    def _filters(self, exact: Any) -> list[Filters]:
        return [partial(_times_cutoff, exact, block.mlp) for block in exact.interactions]

    def _head_size(self) -> int:
        return min(16, self.model.hidden_channels)

    def _features(self, run: Pass, x: Tensor) -> Features:
        for block, messages in zip(self.model.interactions, self.messages, strict=True):
            sums, _ = messages(run, block.conv.lin1(x))
            x = x + block.lin(block.act(block.conv.lin2(sums)))
        return Features(x)


class TransformerNetwork(_Network):
    """The Transformer."""

    def __init__(self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device):
        super().__init__(representation, head, energy_scale, device)
        layers = self.model.attention_layers
        self.qkv = [_side_by_side((m.q_proj, m.k_proj, m.v_proj), (None, None, self._value_order())) for m in layers]

    def _value_order(self) -> Tensor | None:
        """Return the places of the values of all heads for each part of them; None if there is one part."""
        return None

    def _filters(self, exact: Any) -> list[Filters]:
        return [partial(self._layer_filters, exact, layer) for layer in exact.attention_layers]

    def _layer_filters(self, exact: Any, layer: Any, d: Tensor) -> Tensor:
        """Return filters [K, 2, F]: keys, and values times the cutoff function."""
        keys, values = self._projections(exact, layer, d, 1)
        return torch.stack([keys, values[:, 0] * _cut(exact, d)], 1)

    def _projections(self, exact: Any, layer: Any, d: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Return factors of the keys [K, F] and of the values [K, parts, F]."""
        rbf = exact.distance_expansion(d)
        ones = torch.ones(d.shape[0], parts * exact.hidden_channels, dtype=d.dtype) + 0 * d[:, None]
        keys = ones[:, : exact.hidden_channels] if layer.dk_proj is None else layer.act(layer.dk_proj(rbf))
        values = ones if layer.dv_proj is None else layer.act(layer.dv_proj(rbf))
        order = self._value_order()
        return keys, (values if order is None else values[:, order.cpu()]).unflatten(1, (parts, -1))

    def _head_size(self) -> int:
        return self.model.hidden_channels // self.model.attention_layers[0].num_heads

    def _features(self, run: Pass, x: Tensor) -> Features:
        for layer, messages, qkv in zip(self.model.attention_layers, self.messages, self.qkv, strict=True):
            sums, _ = messages(run, functional.linear(layer.layernorm(x), *qkv))
            x = x + layer.o_proj(sums)
        return Features(self.model.out_norm(x))


class EquivariantTransformerNetwork(TransformerNetwork):
    """The Equivariant Transformer."""

    def _value_order(self) -> Tensor:
        heads = self.model.attention_layers[0].num_heads
        places = torch.arange(3 * self.model.hidden_channels, device=self.device)
        return places.view(heads, 3, -1).transpose(0, 1).flatten()  # each head has its three parts together

    def _layer_filters(self, exact: Any, layer: Any, d: Tensor) -> Tensor:
        """Return filters [K, 4, F]: keys, and the three parts of the values."""
        keys, values = self._projections(exact, layer, d, 3)
        cut = _cut(exact, d)
        # without `vector_cutoff` the attention alone goes to zero
        vectors = values[:, 1:] * cut[:, None] if layer.vector_cutoff else values[:, 1:]
        return torch.cat([keys[:, None], values[:, :1] * cut[:, None], vectors], 1)

    def _features(self, run: Pass, x: Tensor) -> Features:
        w = x.new_zeros(x.shape[0], 3, x.shape[1])
        for layer, messages, qkv in zip(self.model.attention_layers, self.messages, self.qkv, strict=True):
            sums, vectors = messages(run, functional.linear(layer.layernorm(x), *qkv), w)
            o1, o2, o3 = layer.o_proj(sums).chunk(3, 1)
            w1, w2, w3 = layer.vec_proj(w).chunk(3, 2)
            x = x + (w1 * w2).sum(1) * o2 + o3
            w = w + w3 * o1[:, None] + vectors
        return Features(self.model.out_norm(x), w)
