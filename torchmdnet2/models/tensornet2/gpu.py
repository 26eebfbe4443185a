"""TensorNet2 on the GPU: block shapes by system size, and the network on kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.devices import SideStream
from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, ChargeNetwork, Edges
from ..tensornet.charged import part_size
from ..tensornet.gpu import Block, Buffers, FusedTensorNet, MessageTile, Tiles
from . import triton_charges as charges
from . import triton_kernels as filters
from . import triton_kernels as message
from .weights import FrozenTensorNet2, SplitMatrix

__all__ = ["ChargeBuffers", "FilterTiles", "FusedTensorNet2"]


@dataclass(frozen=True)
class FilterTiles(Tiles):
    """Tiles of TensorNet, and of the kernels that only TensorNet2 has.

    Args:
        chunk: slots whose filters are held at a time, see triton_kernels.py. The filters of one chunk are kept for the
            backward pass, those of several are computed again.
        kept: most slots that are one chunk in any case.
        layer: products of the filters' layers.
        first: slots of a program of the first layer, and warps.
        first_gradient: of its gradient, whose columns are all channels.
        filter_message, filter_gradient: of the messages and their gradients.
        charge_layer: atoms × channels × depth of the sum at a time of a layer of the networks of charges; 1 atom: on
            CUDA cores, all of the sum at once.
        predict: the same of what follows them, of all channels, and of the gradient of their second layer.
        predict_gradient: the same of their first layer's gradient.
    """

    chunk: int = 131072
    kept: int = 131072
    layer: Block = Block(128, 128, 32, 8, 3)
    first: tuple[int, int] = (16, 4)
    first_gradient: Block = Block(64, 128, 64, 4, 2)
    filter_message: MessageTile = MessageTile(1, 2, 32, 1)
    filter_gradient: MessageTile = MessageTile(16, 1, 32, 16)
    charge_layer: Block = Block(16, 64, 64, 4)
    predict: Block = Block(16, 128, 32, 8)
    predict_gradient: Block = Block(16, 32, 32, 4)

    @classmethod
    def for_gpu(cls, num_atoms: int, channels: int) -> FilterTiles:
        """Return shapes for N atoms and F channels."""
        tiles = cls(**vars(Tiles.for_atoms(num_atoms, channels, words=False)))
        if num_atoms <= 512:
            tiles = replace(
                tiles, layer=Block(64, 64, 32, 4, 4), first_gradient=Block(32, 128, 32, 4, 3),
                charge_layer=Block(16, 32, 64, 4), predict=Block(16, 128, 128, 8),
                filter_message=MessageTile(1, 4, 32, 4), filter_gradient=MessageTile(1, 8, 32, 4),
            )  # fmt: skip
        if num_atoms <= 112 and channels <= 128:
            tiles = replace(
                tiles, layer=Block(64, 32, 64, 4, 3), first_gradient=Block(16, 128, 64, 4, 3),
                charge_layer=Block(1, 16, 128, 4), predict_gradient=Block(1, 16, 128, 4), predict=Block(1, 128, 128, 8),
                first=(8, 4),
            )  # fmt: skip
        elif num_atoms > 4000:
            tiles = replace(
                tiles, charge_layer=Block(16, 128, 32, 8),
                filter_message=MessageTile(4, 1, min(channels, 128), 4),
                filter_gradient=MessageTile(1, 1, min(channels, 128), 1),
            )  # fmt: skip
        elif num_atoms > 1500:
            tiles = replace(tiles, filter_gradient=MessageTile(1, 2, min(channels, 64), 1))
        if channels > 128:  # sums are as wide as the channels, and more would not fit into shared memory
            tiles = replace(tiles, predict=cls.predict, first_gradient=Block(32, channels, 32, 8, 3))

        def within(block: Block) -> Block:
            return replace(block, cols=min(block.cols, channels), depth=min(block.depth, channels))

        names = "layer", "first_gradient", "charge_layer", "predict", "predict_gradient"
        fitting: dict[str, Any] = {name: within(getattr(tiles, name)) for name in names}
        return replace(tiles, **fitting, chunk=tiles.chunk * 128 // max(channels, 128))


# --- TensorNet2 energy, forces and charges by fused kernels: hand-written backward pass, no autograd, no allocation ---
#
# TensorNet's kernels are used where the mathematics is the same. TensorNet2 has further kernels for the prediction of
# charges (triton_charges.py) and for the filters, which depend on charges (triton_kernels.py). Filters are computed for
# a chunk of the edges at a time, and, where there are several chunks, again in the backward pass.

_MOST_PROGRAMS = 8192  # of rows, where there are several chunks

_KEPT_SHARE = 0.25
"""Largest share of the GPU's memory for filters that are kept. Of all memory, not of what is free: a system then takes
the same path on each start."""


@dataclass(eq=False)
class ChargeBuffers(Buffers):
    """Buffers of TensorNet and, for the charges, of stages k = 0 … L and of a chunk of slots.

    Attributes:
        in_hidden, out_hidden: [N, F], predicted [N, 2Q], sums [N, 2Q] float64, moments [N, 4], by_charge [N, 2F]: of
            each stage.
        first, hidden, last: of a chunk; gradients replace them. If all slots are one chunk, each layer has its
            second_slope and last.
    """

    ones: Tensor
    receiver: Tensor
    reverse: Tensor
    envelope: Tensor
    envelope_slope: Tensor
    in_hidden: list[Tensor]
    out_hidden: list[Tensor]
    predicted: list[Tensor]
    sums: list[Tensor]
    moments: list[Tensor]
    by_charge: list[Tensor]
    slope_sums: Tensor
    charge_slope: Tensor
    pair_slope: Tensor
    charges: Tensor
    charges64: Tensor
    first_activity: Tensor
    second_activity: Tensor
    second_slope: list[Tensor]
    last: list[Tensor]
    last_gradient: Tensor


class FusedTensorNet2(ChargeNetwork, FusedTensorNet):
    """Runs a frozen TensorNet2 over CSR rows. Arguments as of FusedTensorNet."""

    weights: FrozenTensorNet2
    sole_readers = ()  # gradients of the charges are added to dD and the one of mix(X⁰); P is written by other kernels

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return the total charge itself."""
        return charge

    def launch_shapes(self, num_atoms: int) -> FilterTiles:
        return replace(FilterTiles.for_gpu(num_atoms, self.weights.channels), kept=self._most_kept)

    @cached_property
    def _most_kept(self) -> int:
        """The most slots whose filters are kept for the backward pass."""
        f = self.weights.channels
        most = min(2**30 // (3 * f), 2**22 - 128)  # places are 32-bit numbers; programs side by side are 65,535
        if self.device.type != "cuda":
            return most
        slot_bytes = 4 * f * (6 + 5 * self.weights.num_layers)
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return min(most, int(_KEPT_SHARE * memory) // slot_bytes)

    def allocate(self, num_atoms: int, capacity: int, shapes: FilterTiles) -> ChargeBuffers:  # type: ignore[override]
        w = self.weights
        n, f, q, layers = max(num_atoms, 1), w.channels, w.charge_channels, w.num_layers
        capacity = max(capacity, 1)
        most = -(-(n + capacity) // 128) * 128
        chunks = 1 if most <= shapes.kept else -(-most // shapes.chunk)
        slots = -(-most // (128 * chunks)) * 128  # chunks of one size
        base = vars(super().allocate(num_atoms, capacity, shapes))
        slices = f // shapes.filter_gradient.channels

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=w.device)

        def stages(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [new(*shape, dtype=dtype) for _ in range(layers + 1)]

        def filters_of(width: int) -> list[Tensor]:
            """Return the filters of each layer; all share one place if they are not kept."""
            return [new(slots, width) for _ in range(layers)] if chunks == 1 else [new(slots, width)] * layers

        # the gradients of the charges need what these would take the place of
        base |= {"g": new(n, 9, f), "dd": new(n, 9, f), "dgate": new(n, 3 * f)}
        base["slope"] = new(layers * (slices + 1), capacity)
        return ChargeBuffers(
            **base, ones=torch.ones(n, dtype=torch.float32, device=w.device), receiver=new(capacity).int(),
            reverse=new(capacity).int(), envelope=new(capacity), envelope_slope=new(capacity), in_hidden=stages(n, f),
            out_hidden=stages(n, f), predicted=stages(n, 2 * q), sums=stages(n, 2 * q, dtype=torch.float64),
            moments=stages(n, 4), by_charge=stages(n, 2 * f)[:layers], slope_sums=new(n, q, dtype=torch.float64),
            charge_slope=new(n, q), pair_slope=new(n + capacity, 2 * q), charges=new(n),
            charges64=new(n, dtype=torch.float64),
            first_activity=new(2, slots, f, dtype=torch.float16), second_slope=filters_of(2 * f),
            second_activity=new(2, slots, 2 * f, dtype=torch.float16), last=filters_of(3 * f),
            last_gradient=new(2, slots, 3 * f, dtype=torch.float16),
        )  # fmt: skip

    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        given, layers = (buffers, shapes, atoms, edges), self.weights.num_layers
        self._embed(*given)
        filters.edge_kernel[(len(atoms.z),)](
            *edges[:3], buffers.receiver, buffers.reverse, buffers.envelope, buffers.envelope_slope,
            1 / self.weights.cutoff, BE=32, num_warps=1, **self._options(shapes),
        )  # fmt: skip
        self._predict_charges(*given, 0)
        for k in range(layers):
            self._mix(*given, k)
            self._pass_messages(*given, k)
            self._update(*given, k)
            if k + 1 < layers or self.charges_read:
                self._predict_charges(*given, k + 1)
        if not self.charges_read:
            with self._side.beside():
                self._predict_charges(buffers, replace(shapes, overlap=0), atoms, edges, layers)
        self._read_out(*given)

    @cached_property
    def _side(self) -> SideStream:
        return SideStream(self.device)

    def charges(self, buffers: Any) -> tuple[Tensor, Tensor]:
        return buffers.charges, buffers.charges64

    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        given = buffers, shapes, atoms, edges
        layers = self.weights.num_layers
        self._read_out_gradient(*given)
        if charge_slope is not None:
            self._charge_gradient(*given, layers, charge_slope)
        for k in reversed(range(layers)):
            self._product_gradient(*given, k)
            self._message_gradient(*given, k)
            self._mix_gradient(*given, k)
            self._charge_gradient(*given, k, None)
        self._embedding_gradient(*given)
        if not self.charges_read:
            self._side.wait()
            shapes = replace(shapes, overlap=0)  # the next launch waits for both streams
        self._forces(buffers, shapes, atoms, edges, with_virial)

    # --- charges -------------------------------------------------------------------------------------------------

    def _factor(self, b: Any, atoms: Atoms) -> Tensor:
        """Return ones: the total charge acts through the predicted ones alone, not in the products."""
        return b.ones

    def _charge_constants(self, shapes: FilterTiles, num_atoms: int, given: bool) -> dict[str, Any]:
        w, block = self.weights, shapes.predict
        return {
            "F": w.channels, "C": w.charge_channels, "K": w.q_dim, "GIVEN": given, "EXACT": w.exact_charge,
            "PART": part_size(num_atoms), "BM": block.rows, "BK": block.depth, "PREC": self.precision,
            "num_warps": block.warps, "num_stages": block.stages, **self._options(shapes),
        }  # fmt: skip

    def _charge_layer(self, shapes: FilterTiles) -> dict[str, Any]:
        block = shapes.charge_layer
        return {
            "F": self.weights.channels, "BM": block.rows, "BK": block.depth, "PREC": self.precision,
            "num_warps": block.warps, "num_stages": block.stages, **self._options(shapes),
        }  # fmt: skip

    def _predict_charges(self, b: Any, shapes: FilterTiles, atoms: Atoms, edges: Edges, stage: int) -> None:
        w, n, last = self.weights, len(atoms.z), stage == self.weights.num_layers
        net = w.charge_networks[stage]
        rows = -(-n // shapes.charge_layer.rows)
        options = self._charge_layer(shapes)
        charges.charge_hidden_kernel[rows, w.channels // shapes.charge_layer.cols](
            b.x[stage], b.inverse[0 if last else stage], *net[:4], b.in_hidden[stage], b.moments[stage], n, w.norm_eps,
            NORMALISED=not last, BN=shapes.charge_layer.cols, **options,
        )  # fmt: skip
        charges.charge_layer_kernel[rows, w.channels // shapes.charge_layer.cols](
            b.in_hidden[stage], *net[4:6], b.out_hidden[stage], n, N=w.channels, BN=shapes.charge_layer.cols, **options
        )  # fmt: skip
        charges.charge_layer_kernel[rows, 1](
            b.out_hidden[stage], *net[6:8], b.predicted[stage], n, N=2 * w.charge_channels, BN=2 * w.charge_channels,
            **options,
        )  # fmt: skip
        charges.charge_sums_kernel[self._parts(atoms)](
            atoms.ptr, b.predicted[stage], b.sums[stage], C=w.charge_channels, EXACT=w.exact_charge, PART=part_size(n),
            BM=128, num_warps=8, **self._options(shapes),
        )  # fmt: skip
        charges.equilibrate_kernel[(-(-n // shapes.predict.rows),)](
            atoms.batch, atoms.ptr, atoms.charge_input, b.predicted[stage], b.sums[stage],
            w.filters[0 if last else stage].charges, b.by_charge[0 if last else stage], b.charges, b.charges64, n,
            **self._charge_constants(shapes, n, last),
        )  # fmt: skip

    def _charge_gradient(
        self, b: Any, shapes: FilterTiles, atoms: Atoms, edges: Edges, stage: int, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        """Compute the gradients that the charges of a stage had: those of the pairs of the layer, or those given."""
        w, n, last = self.weights, len(atoms.z), charge_slope is not None
        net, common = w.charge_networks[stage], self._charge_constants(shapes, n, last)
        if charge_slope is None:
            charges.pair_slope_kernel[(n,)](
                edges.row_ptr, b.reverse, b.pair_slope, b.charge_slope, n, C=w.charge_channels, BE=16,
                REVERSED=not self._kept(b, atoms, edges), num_warps=1, **self._options(shapes),
            )  # fmt: skip
        slope = b.charge_slope if charge_slope is None else charge_slope
        charges.slope_sums_kernel[self._parts(atoms)](
            atoms.ptr, b.predicted[stage], slope, 1 / self.unit, b.slope_sums, C=w.charge_channels, K=w.q_dim,
            GIVEN=last, EXACT=w.exact_charge, PART=part_size(n), BM=128, num_warps=8, **self._options(shapes),
        )  # fmt: skip
        charges.predict_gradient_kernel[(-(-n // shapes.predict.rows),)](
            atoms.batch, atoms.ptr, atoms.charge_input, b.predicted[stage], b.sums[stage], b.slope_sums, slope,
            1 / self.unit, b.in_hidden[stage], b.out_hidden[stage], net.second_t, net.third_t, net.first_gamma,
            net.first_offset, b.moments[stage], n, **common,
        )  # fmt: skip
        block = shapes.predict_gradient
        charges.add_gradient_kernel[-(-n // block.rows), w.channels // block.cols](
            b.x[stage], b.inverse[0 if last else stage], b.in_hidden[stage], net.first_t, net.gamma, b.moments[stage],
            b.d[stage - 1], b.g, b.dd, b.mixed, b.gate, b.dgate, n, F=w.channels, NORMALISED=not last,
            FIRST=stage == 0, BM=block.rows, BN=block.cols, BK=block.depth, PREC=self.precision, num_warps=block.warps,
            num_stages=block.stages, **self._options(shapes),
        )  # fmt: skip

    def _parts(self, atoms: Atoms) -> tuple[int, int]:
        """Return the number of structures, and the number of parts that the largest can have."""
        return atoms.ptr.shape[0] - 1, -(-len(atoms.z) // part_size(len(atoms.z)))

    # --- messages ------------------------------------------------------------------------------------------------

    def _chunks(self, b: Any, atoms: Atoms, edges: Edges) -> Iterator[tuple[int, int, int]]:
        """Yield number of atoms, first slot and number of slots of each chunk."""
        slots, n = b.first_activity.shape[1], len(atoms.z)
        for first in range(0, n + edges.sender.shape[0], slots):
            yield n, first, slots

    def _rows(self, b: Any, atoms: Atoms, edges: Edges, tile: MessageTile) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and constants of a message kernel."""
        n = len(atoms.z)
        programs = -(-n // tile.atoms)
        if not self._kept(b, atoms, edges):
            programs = min(programs, _MOST_PROGRAMS)
        constants = {
            "F": self.weights.channels, "BR": tile.atoms, "BE": tile.edges, "BF": tile.channels,
            "num_warps": tile.warps,
        }  # fmt: skip
        return (programs, self.weights.channels // tile.channels), constants

    def _layer(
        self, b: Any, shapes: FilterTiles, edges: Edges, chunk: tuple[int, int, int], mode: str, a: Tensor,
        w: SplitMatrix, out: Tensor, bias: Tensor, factor: Tensor | None = None, slope: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch one layer of the filters, or its gradient."""
        block = shapes.layer
        grid = w.parts.shape[2] // block.cols, -(-chunk[2] // block.rows)
        filters.layer_kernel[grid](
            a, *w, bias, bias if factor is None else factor, out, bias if slope is None else slope, edges.row_ptr,
            *chunk, K=w.parts.shape[1], N=w.parts.shape[2], MODE=mode, WITH_SLOPE=slope is not None,
            BM=block.rows, BN=block.cols, BK=block.depth, num_warps=block.warps, num_stages=block.stages,
            **self._options(shapes),
        )  # fmt: skip

    def _kept(self, b: Any, atoms: Atoms, edges: Edges) -> bool:
        """Return whether the filters are kept for the backward pass: all slots are one chunk."""
        return len(atoms.z) + edges.sender.shape[0] <= b.first_activity.shape[1]

    def _filter(
        self, b: Any, shapes: FilterTiles, edges: Edges, chunk: tuple[int, int, int], k: int, backward: bool,
        last: Tensor, slope: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute what the last activation of the filters acts on; backward: of reversed slots. slope: of the
        second."""
        w = self.weights
        net = w.filters[k]
        rows, warps = shapes.first
        filters.first_layer_kernel[(chunk[2] // rows,)](
            edges.row_ptr, b.receiver, edges.sender, b.segment, w.layer_tables[k], b.by_charge[k],
            b.first_activity, *chunk, F=w.channels, REVERSED=backward, BM=rows, num_warps=warps,
            **self._options(shapes),
        )  # fmt: skip
        self._layer(b, shapes, edges, chunk, "hidden", b.first_activity, net.second, b.second_activity,
                    net.second_bias, slope=slope)  # fmt: skip
        self._layer(b, shapes, edges, chunk, "last", b.second_activity, net.third, last, net.third_bias)

    def _pass_messages(self, b: Any, shapes: Any, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, len(atoms.z)
        grid, constants = self._rows(b, atoms, edges, shapes.filter_message)
        kept = self._kept(b, atoms, edges)
        slope = b.second_slope[k] if kept else None
        for chunk in self._chunks(b, atoms, edges):
            self._filter(b, shapes, edges, chunk, k, False, b.last[k], slope)
            message.message_kernel[grid](
                edges.row_ptr, b.receiver, edges.sender, b.envelope, b.last[k], b.y[k], b.m[k], b.dm, *chunk,
                O3=w.is_o3, ALONE=kept, **constants, **self._options(shapes),
            )  # fmt: skip
        if not kept:
            tile = shapes.filter_message
            message.product_kernel[-(-n // 4), w.channels // tile.channels](
                b.y[k], b.m[k], b.dm, n, F=w.channels, BM=4, BF=tile.channels, O3=w.is_o3, num_warps=tile.warps,
                **self._options(shapes),
            )  # fmt: skip

    def _message_gradient(self, b: Any, shapes: Any, atoms: Atoms, edges: Edges, k: int) -> None:
        w, net, capacity = self.weights, self.weights.filters[k], edges.sender.shape[0]
        grid, constants = self._rows(b, atoms, edges, shapes.filter_gradient)
        slices = w.channels // shapes.filter_gradient.channels
        slope = b.slope[k * (slices + 1) :]
        kept = self._kept(b, atoms, edges)
        for chunk in self._chunks(b, atoms, edges):
            if not kept:
                self._filter(b, shapes, edges, chunk, k, True, b.last[k], b.second_slope[k])
            message.message_backward_kernel[grid](
                edges.row_ptr, b.receiver, edges.sender, b.reverse, b.envelope, b.envelope_slope, b.last[k], b.y[k],
                b.dm, b.m[k], b.last_gradient, slope, capacity, *chunk, KEPT=kept,
                LANES=shapes.filter_gradient.lanes, **constants, **self._options(shapes),
            )  # fmt: skip
            # each gradient overwrites its quantity
            hidden = b.second_activity
            self._layer(b, shapes, edges, chunk, "gradient", b.last_gradient, net.third_t, hidden, net.third_bias,
                        factor=b.second_slope[k])  # fmt: skip
            self._first_gradient(b, shapes, edges, chunk, k, slope[slices], not kept)

    def _first_gradient(
        self, b: Any, shapes: FilterTiles, edges: Edges, chunk: tuple[int, int, int], k: int, slope: Tensor,
        backward: bool,
    ) -> None:  # fmt: skip
        w, net = self.weights, self.weights.filters[k]
        read = edges.row_ptr, b.receiver, edges.sender, b.segment, w.layer_tables[k], b.by_charge[k]
        block = shapes.first_gradient
        filters.first_gradient_kernel[(-(-chunk[2] // block.rows),)](
            b.second_activity, *net.second_t, *read, *net.charges_t, slope, b.pair_slope, *chunk, F=w.channels,
            C=w.charge_channels, REVERSED=backward, BM=block.rows, BK=block.depth, num_warps=block.warps,
            num_stages=block.stages, **self._options(shapes),
        )  # fmt: skip

    def _options(self, shapes: FilterTiles) -> dict[str, Any]:
        return {**FUSED_ARITHMETIC, **self.launch_options(shapes)}
