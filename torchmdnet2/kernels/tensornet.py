"""TensorNet energy and forces by fused kernels: forward, hand-written backward, no autograd, no allocation.

The order of the kernels is the order of the paper's equations (models/tensornet.py), then backwards. Every buffer
is allocated once; a step only launches kernels on the current stream, so that it can be captured in a CUDA graph.

Shapes: N atoms, C edge capacity, F channels, L layers, S channel slices of the message kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import message, node, scalar
from .frozen import FrozenTensorNet

__all__ = ["Buffers", "FusedTensorNet", "Tiles"]


@dataclass(frozen=True)
class Tiles:
    """Block shapes of the kernels; `for_atoms` has what was measured to be fast.

    Args:
        atoms, edges, channels, warps: of the message kernels, forward: rows and edges of a row at a time.
        back_atoms, back_edges, back_channels, back_warps: of the message kernels, backward.
        rows, cols, depth, mix_warps: of the channel-mixing kernels; rows = 1 does without the matrix units.
        mlp_rows, mlp_cols, mlp_depth, mlp_warps: of the scalar networks.
    """

    atoms: int = 1
    edges: int = 1
    channels: int = 128
    warps: int = 1
    back_atoms: int = 1
    back_edges: int = 1
    back_channels: int = 128
    back_warps: int = 1
    rows: int = 16
    cols: int = 32
    depth: int = 32
    mix_warps: int = 4
    mlp_rows: int = 16
    mlp_cols: int = 64
    mlp_depth: int = 32
    mlp_warps: int = 4

    @classmethod
    def for_atoms(cls, num_atoms: int, channels: int) -> Tiles:
        """Tiles for N atoms and F channels: few atoms need parallelism within an atom, many need none."""
        if num_atoms < 512:
            narrow = min(32, channels)
            return cls(
                edges=8, channels=narrow, warps=4, back_edges=8, back_channels=narrow, back_warps=4,
                rows=1, mlp_rows=1, mlp_cols=32, mlp_depth=min(64, channels),
            )  # fmt: skip
        return cls(channels=channels, back_channels=channels, mlp_cols=min(64, channels))


@dataclass(eq=False)
class Buffers:
    """Static tensors of one size. Fields are [N, 9, F] float32."""

    x0: Tensor
    norm: Tensor
    hidden: Tensor
    gate: Tensor
    dgate: Tensor
    dhidden: Tensor
    norms: Tensor
    readout: Tensor
    dreadout: Tensor
    mixed: Tensor
    x: list[Tensor]
    inverse: list[Tensor]
    y: list[Tensor]
    m: list[Tensor]
    d: list[Tensor]
    g: Tensor
    dd: Tensor
    dm: Tensor
    dy: Tensor
    knot: Tensor
    offset: Tensor
    slope: Tensor
    edge_slope: Tensor
    edge_turn: Tensor
    energy: Tensor
    forces: Tensor
    virial: Tensor

    @property
    def nbytes(self) -> int:
        tensors: list[Any] = []
        for value in vars(self).values():
            tensors += value if isinstance(value, list) else [value]
        return sum(t.numel() * t.element_size() for t in tensors)


class FusedTensorNet:
    """Runs a frozen TensorNet over CSR rows.

    Args:
        weights: the prepared model.
        precision: "tf32x3" (float32-accurate on the matrix units), "tf32" or "ieee".
    """

    def __init__(self, weights: FrozenTensorNet, precision: str = "tf32x3"):
        self.weights, self.precision = weights, precision

    def allocate(self, num_atoms: int, capacity: int, tiles: Tiles | None = None) -> tuple[Buffers, Tiles]:
        """Buffers for N atoms and C edges."""
        w = self.weights
        f, layers = w.channels, w.num_layers
        tiles = tiles or Tiles.for_atoms(num_atoms, f)
        n = max(num_atoms, 1)
        capacity = max(capacity, 1)  # a multiple of 16 keeps rows of the edge arrays aligned

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=w.device)

        def field() -> Tensor:
            return new(n, 9, f)

        slices, back = f // tiles.back_channels, f // tiles.back_channels
        return Buffers(
            x0=field(), norm=new(n, f), hidden=new(n, 2 * f), gate=new(n, 3 * f), dgate=new(n, 3 * f),
            dhidden=new(n, 2 * f), norms=new(n, 3 * f), readout=new(n, f), dreadout=new(n, f),
            mixed=field(), x=[field() for _ in range(layers + 1)], inverse=[new(n, f) for _ in range(layers)],
            y=[field() for _ in range(layers)], m=[field() for _ in range(layers)],
            d=[field() for _ in range(layers)], g=field(), dd=field(), dm=field(), dy=field(),
            knot=new(capacity).int(), offset=new(capacity), slope=new(layers * back, capacity), edge_slope=new(slices, capacity),
            edge_turn=new(slices, capacity, 3), energy=new(n), forces=new(n, 3), virial=new(n, 9),
        ), tiles  # fmt: skip

    def run(
        self, b: Buffers, tiles: Tiles, z: Tensor, row_ptr: Tensor, sender: Tensor, vec: Tensor, charge_factor: Tensor,
        with_virial: bool = False,
    ) -> None:  # fmt: skip
        """Energies (b.energy [N], scaled), forces (b.forces [N, 3]) and, when asked, row virials (b.virial [N, 9]).

        Args:
            b, tiles: from `allocate`.
            z: [N] int32 or int64.
            row_ptr: [N + 1] int32, sender: [C] int32, vec: [C, 3] float32; rows sorted by sender and shift, both
                directions of every pair listed.
            charge_factor: [N] 1 + 0.1 × total charge.
        """
        self.forward(b, tiles, z, row_ptr, sender, vec, charge_factor)
        self.backward(b, tiles, z, row_ptr, sender, vec, charge_factor, with_virial)

    def forward(
        self, b: Buffers, tiles: Tiles, z: Tensor, row_ptr: Tensor, sender: Tensor, vec: Tensor, charge_factor: Tensor
    ) -> None:  # fmt: skip
        w, f, n = self.weights, self.weights.channels, z.shape[0]
        capacity = sender.shape[0]
        per_atom = (-(-n // tiles.atoms), f // tiles.channels)
        walk = {
            "F": f,
            "KNOTS": w.table.num_knots,
            "BR": tiles.atoms,
            "BE": tiles.edges,
            "BF": tiles.channels,
            "num_warps": tiles.warps,
        }
        blocks, mix = self._mix(n, tiles)
        mlp_blocks, mlp = self._mlp(n, tiles)
        columns = tiles.mlp_cols

        message.edge_place_kernel[(-(-capacity // 1024),)](
            row_ptr, vec, w.knots, b.knot, b.offset, n, w.table.decay, w.table.scale, w.table.num_knots - 1, BLOCK=1024
        )
        message.embedding_kernel[per_atom](
            row_ptr, sender, vec, b.knot, b.offset, z, w.embedding_table, w.z_receiver, w.z_sender, w.embedding_self,
            b.x0, b.norm, n, **walk,
        )  # fmt: skip
        gamma, beta, eps = w.gate_norm
        w1, b1, w2, b2 = w.gate
        scalar.hidden_kernel[(mlp_blocks, 2 * f // columns)](b.norm, gamma, beta, w1, b1, b.hidden, n, eps, **mlp)
        scalar.gate_kernel[(mlp_blocks, 3 * f // columns)](b.hidden, w2, b2, b.gate, n, **mlp)
        node.embedding_mix_kernel[blocks](b.x0, w.embedding_mix, b.gate, b.mixed, b.x[0], b.inverse[0], n, **mix)
        for k in range(w.num_layers):
            last = k + 1 == w.num_layers
            node.mix_kernel[blocks](b.x[k], w.mix_in[k][0], b.y[k], n, **mix)
            # dm is free during the forward pass: it carries the normalised products
            message.interaction_kernel[per_atom](
                row_ptr, sender, b.knot, b.offset, w.layer_tables[k], w.layer_self[k], b.y[k], charge_factor, b.m[k],
                b.dm, n, O3=w.is_o3, **walk,
            )  # fmt: skip
            node.update_kernel[blocks](
                b.dm, w.mix_out[k][0], b.x[k], charge_factor, b.d[k], b.x[k + 1],
                b.inverse[0] if last else b.inverse[k + 1], b.norms, n, LAST=last, **mix,
            )  # fmt: skip
        gamma, beta, eps = w.out_norm
        w1, b1, w2, b2, w3, b3 = w.readout
        scalar.readout_hidden_kernel[(mlp_blocks, f // min(columns, f))](
            b.norms, gamma, beta, w1, b1, b.readout, n, eps, **mlp
        )
        head = {**mlp, "H": f // 2}
        head.pop("BN")
        scalar.readout_kernel[(mlp_blocks,)](b.readout, w2, b2, w3, b3, w.readout_t[1], b.energy, b.dreadout, n, **head)

    def backward(
        self, b: Buffers, tiles: Tiles, z: Tensor, row_ptr: Tensor, sender: Tensor, vec: Tensor, charge_factor: Tensor,
        with_virial: bool,
    ) -> None:  # fmt: skip
        w, f, n = self.weights, self.weights.channels, z.shape[0]
        capacity = sender.shape[0]
        slices = f // tiles.back_channels
        per_atom = (-(-n // tiles.back_atoms), slices)
        walk = {
            "F": f, "KNOTS": w.table.num_knots, "BR": tiles.back_atoms, "BE": tiles.back_edges, "BF": tiles.back_channels,
            "num_warps": tiles.back_warps,
        }  # fmt: skip
        blocks, mix = self._mix(n, tiles)
        mlp_blocks, mlp = self._mlp(n, tiles)
        scalar.readout_gradient_kernel[blocks](
            b.dreadout, b.readout, b.norms, w.readout_t[0], w.out_norm[0], *w.readout_sums, b.x[-1], b.d[-1],
            charge_factor, b.g, b.dd, n, w.out_norm[2], **mix,
        )  # fmt: skip
        for k in reversed(range(w.num_layers)):
            node.gradient_product_kernel[blocks](
                b.dd, w.mix_out[k][1], b.y[k], b.m[k], charge_factor, b.dm, b.dy, n, O3=w.is_o3, **mix
            )
            message.message_backward_kernel[per_atom](
                row_ptr, sender, b.knot, b.offset, w.layer_tables[k], w.layer_self[k], b.y[k], b.dm, b.dy,
                b.slope[k * slices :], capacity, n, **walk,
            )  # fmt: skip
            node.gradient_mix_kernel[blocks](
                b.dy, w.mix_in[k][1], b.g, b.x[k], b.inverse[k], b.d[k - 1], charge_factor, b.g, b.dd, b.mixed,
                b.gate, b.dgate, n, FIRST=k == 0, **mix,
            )  # fmt: skip
        scalar.gate_backward_kernel[(mlp_blocks, 2 * f // tiles.mlp_cols)](
            b.dgate, b.hidden, w.gate_t[1], b.dhidden, n, **mlp
        )
        node.gradient_embedding_kernel[blocks](
            b.dd, w.embedding_mix_t, b.x0, b.dhidden, b.hidden, b.norm, w.gate_t[0], w.gate_norm[0], *w.gate_sums,
            b.dy, n, w.gate_norm[2], **mix,
        )  # fmt: skip
        message.embedding_backward_kernel[per_atom](
            row_ptr, sender, vec, b.knot, b.offset, z, w.embedding_table, w.z_receiver, w.z_sender, b.dy, b.edge_slope,
            b.edge_turn, capacity, n, **walk,
        )  # fmt: skip
        message.force_kernel[(n,)](
            row_ptr, sender, vec, b.slope, b.edge_slope, b.edge_turn, capacity,
            b.forces, b.virial, SLICES=slices, MESSAGES=w.num_layers * slices, STEPS=12, BE=32, VIRIAL=with_virial,
            num_warps=1,
        )  # fmt: skip

    def _mix(self, n: int, tiles: Tiles) -> tuple[tuple[int, int], dict[str, Any]]:
        f = self.weights.channels
        grid = (-(-n // tiles.rows), f // tiles.cols)
        constants = {
            "F": f, "BM": tiles.rows, "BN": tiles.cols, "BK": tiles.depth, "PREC": self.precision,
            "num_warps": tiles.mix_warps,
        }  # fmt: skip
        return grid, constants

    def _mlp(self, n: int, tiles: Tiles) -> tuple[int, dict[str, Any]]:
        constants = {
            "F": self.weights.channels, "BM": tiles.mlp_rows, "BN": tiles.mlp_cols, "BK": tiles.mlp_depth,
            "PREC": self.precision, "num_warps": tiles.mlp_warps,
        }  # fmt: skip
        return -(-n // tiles.mlp_rows), constants
