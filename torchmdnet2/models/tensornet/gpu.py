"""TensorNet on the GPU: block shapes of the kernels by system size, and the network on kernels.

The shapes were measured on one NVIDIA H200 (docs/performance.md). Few atoms need parallelism within an atom: slices of
channels, several edges at once, one atom per program in the products. Many atoms need reuse of loaded data: several
atoms at once, Tensor Cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, FeatureNetwork
from . import triton_atoms as node
from . import triton_atoms as scalar
from . import triton_edges as force
from . import triton_edges as message
from .weights import (
    FUNCTIONS,
    HALVES_BELOW,
    FrozenTensorNet,
    HalfWeights,
    PackedWeights,
    ScalarNetwork,
    SplitWeights,
    pack,
    pack_halves,
)

__all__ = ["MOST_ELEMENTS", "Block", "Buffers", "FusedTensorNet", "MessageTile", "Tiles", "power_of_two"]


_HALVES = "fp16x3", "words"  # products whose weights are in halves
_OF_LAYERS = "mix", "update", "gradient_product", "gradient_mix"


@dataclass(frozen=True)
class MessageTile:
    """Tile of a message kernel: atoms × edges of an atom × channels at a time, and number of warps."""

    atoms: int
    edges: int
    channels: int
    warps: int

    @property
    def lanes(self) -> int:
        """Threads that share an edge."""
        return max(1, min(32, self.channels, 32 * self.warps // (self.atoms * self.edges)))


@dataclass(frozen=True)
class Block:
    """Block of a product kernel: rows × columns of the result, depth of the sum at a time, warps, stages, split.

    rows = 1, 2 or 4: on CUDA cores; split is the number of columns of a thread, 1 or 2.
    rows = 8: on Tensor Cores in split fp16, with split · cols/16 warps, for all kernels but
    `readout`; split is the number of parts of the sum that are computed side by side, and above 1 the whole sum is
    taken at once. rows = 16 or more: on Tensor Cores, split is 1.

    Raises:
        ValueError: split is above 1 with 16 rows or more.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        if self.rows >= 16 and self.split > 1:
            raise ValueError(f"{self}: from 16 rows on sums are not split, give split=1 or 8 rows")

    @property
    def at_once(self) -> bool:
        """Whether the kernel takes the whole sum at once."""
        return self.rows < 8 or self.split > 1


@dataclass(frozen=True)
class Tiles:
    """One shape for each kernel; see the classes above.

    Args:
        overlap: 0, 1 or 2: how early each kernel is launched (triton_launch.py).
        elements: all that there are, for the embedding by elements (triton_edges.py); () for the one by edges.
    """

    overlap: int = 1
    elements: tuple[int, ...] = ()

    embedding: MessageTile = MessageTile(1, 2, 64, 1)
    interaction: MessageTile = MessageTile(16, 1, 32, 16)
    message_backward: MessageTile = MessageTile(4, 2, 32, 4)
    embedding_backward: MessageTile = MessageTile(1, 2, 64, 1)
    forces: MessageTile = MessageTile(1, 64, 1, 1)  # without channels
    hidden: Block = Block(16, 64, 32, 4, 3)
    gate: Block = Block(64, 64, 32, 4, 3)
    gate_backward: Block = Block(64, 32, 32, 4, 3)
    readout_hidden: Block = Block(16, 64, 64, 4, 1)
    readout: Block = Block(16, 64, 32, 4, 3)
    readout_gradient: Block = Block(16, 64, 32, 4, 3)
    embedding_mix: Block = Block(16, 64, 32, 4, 3)
    mix: Block = Block(16, 128, 16, 4, 3)
    update: Block = Block(16, 64, 64, 4, 2)
    gradient_product: Block = Block(16, 64, 32, 4, 3)
    gradient_mix: Block = Block(16, 64, 32, 4, 3)
    gradient_embedding: Block = Block(16, 64, 32, 4, 3)
    # of the embedding by elements: channels are radial functions, and the sum of the product is over all of them; the
    # sums are those of one atom in a program
    element_sums: MessageTile = MessageTile(1, 2, FUNCTIONS, 1)
    element_edges: MessageTile = MessageTile(1, 4, FUNCTIONS, 1)
    element_product: Block = Block(16, 64, FUNCTIONS, 4)
    element_gradient: Block = Block(16, FUNCTIONS, 32, 2, 3)

    @classmethod
    def for_atoms(cls, num_atoms: int, channels: int, mixed: bool = False, words: bool = True) -> Tiles:
        """Return shapes for N atoms and F channels, in float32 or in mixed precision.

        words: fields can be in words (`Buffers`).
        """
        tiles = next((shapes for most, shapes in _BY_SIZE if num_atoms <= most), cls())
        if tiles is _THOUSANDS and not words:
            tiles = replace(tiles, **_EIGHT_ROWS)
        if mixed:
            tiles = replace(tiles, **next((shapes for most, shapes in _MIXED if num_atoms <= most), _MIXED_MANY))
        limited: dict[str, Any] = {}
        for name, shape in vars(tiles).items():
            if isinstance(shape, int | tuple):
                continue
            if isinstance(shape, MessageTile):
                limited[name] = replace(shape, channels=min(shape.channels, channels))
            else:
                limited[name] = _limit(shape, channels)
        if tiles.readout.at_once and channels > 128:  # takes all columns
            limited["readout"] = _limit(cls.readout, channels)
        return replace(tiles, **limited)


def _limit(shape: Block, channels: int) -> Block:
    """Return the block for fewer or more channels than it was measured with."""
    # F/2 columns are the fewest that a kernel writes, F the shortest sum
    cols, split, warps = min(shape.cols, channels), shape.split, shape.warps
    if shape.at_once and channels > 128:  # as many weights in the registers as for 128 channels
        cols = max(cols * 128 // channels, 16 if shape.rows == 8 else 4)
    if shape.rows == 8:  # Tensor Cores take sixteen numbers of a sum in half precision
        split = min(split, channels // 16)
        warps = max(1, split * cols // 16)
    return replace(shape, cols=cols, depth=min(shape.depth, channels), warps=warps, split=split)


_CUDA_CORES = Block(1, 16, 128, 4, 1, 2)
_TENS = Tiles(
    overlap=2,
    embedding=MessageTile(1, 16, 16, 2),
    interaction=MessageTile(1, 8, 32, 4),
    message_backward=MessageTile(1, 8, 32, 4),
    embedding_backward=MessageTile(1, 32, 32, 8),
    hidden=Block(1, 16, 128, 4),
    gate_backward=Block(1, 16, 128, 4),
    readout_hidden=Block(1, 8, 128, 4),
    readout=Block(1, 64, 128, 4),
    readout_gradient=Block(1, 16, 128, 4),
    embedding_mix=Block(1, 8, 128, 2),
    mix=_CUDA_CORES,
    update=_CUDA_CORES,
    gradient_product=_CUDA_CORES,
    gradient_mix=_CUDA_CORES,
    gradient_embedding=_CUDA_CORES,
)
# no row has more than 31 edges but by images
_FEW = replace(_TENS, forces=MessageTile(1, 32, 1, 1), embedding_backward=MessageTile(1, 32, 64, 8))
_SPLIT = Block(8, 16, 32, 4, 1, 4)
_WIDE_SPLIT = Block(8, 32, 32, 8, 1, 4)
_HUNDREDS = Tiles(
    overlap=2,
    embedding=MessageTile(1, 8, 32, 2),
    interaction=MessageTile(1, 8, 32, 4),
    message_backward=MessageTile(1, 4, 32, 2),
    embedding_backward=MessageTile(1, 16, 32, 4),
    hidden=_WIDE_SPLIT,
    gate_backward=_SPLIT,
    readout_hidden=_WIDE_SPLIT,
    readout=Block(1, 64, 128, 4),
    readout_gradient=_WIDE_SPLIT,
    embedding_mix=_SPLIT,
    mix=_WIDE_SPLIT,
    update=_SPLIT,
    gradient_product=_SPLIT,
    gradient_mix=_SPLIT,
    gradient_embedding=_WIDE_SPLIT,
)
_THOUSAND = Tiles(
    interaction=MessageTile(16, 2, 32, 16),
    message_backward=MessageTile(16, 2, 32, 16),
    embedding_backward=MessageTile(1, 2, 64, 1),
    hidden=_WIDE_SPLIT,
    gate_backward=_SPLIT,
    readout_hidden=_WIDE_SPLIT,
    readout_gradient=_WIDE_SPLIT,
    gate=Block(16, 64, 32, 4, 3),
    embedding_mix=Block(16, 64, 32, 4, 3),
    mix=Block(16, 64, 32, 4, 3),
    update=_WIDE_SPLIT,
    gradient_product=_WIDE_SPLIT,
    gradient_mix=_WIDE_SPLIT,
    gradient_embedding=_WIDE_SPLIT,
    element_sums=MessageTile(1, 8, FUNCTIONS, 1),
    element_edges=MessageTile(1, 8, FUNCTIONS, 1),
)
_THOUSANDS = Tiles(
    interaction=MessageTile(8, 2, 32, 8),
    message_backward=MessageTile(1, 2, 32, 1),
    embedding_backward=MessageTile(1, 2, 64, 1),
    readout_hidden=_WIDE_SPLIT,
    readout_gradient=_WIDE_SPLIT,
    embedding_mix=Block(16, 32, 32, 2, 2),
    mix=Block(16, 64, 32, 4, 2),
    gradient_product=Block(16, 32, 32, 4, 3),
    gradient_mix=Block(16, 32, 32, 4, 3),
    gradient_embedding=_WIDE_SPLIT,
    element_product=Block(16, 32, FUNCTIONS, 2),
)
_BY_ELEMENTS_FROM = 1000
"""Fewest atoms of the embedding by elements."""
MOST_ELEMENTS = 5
"""Most elements of it, with 100 channels or more."""
_PRODUCT_REGISTERS = 168
"""Of a thread of their product, so that three programs of 128 threads fit on a multiprocessor."""
_BY_SIZE = ((32, _FEW), (112, _TENS), (512, _HUNDREDS), (1500, _THOUSAND), (4000, _THOUSANDS))
# where each program splits the numbers that it reads, eight rows are faster
_EIGHT_ROWS: dict[str, Any] = {"update": _WIDE_SPLIT, "gradient_product": _WIDE_SPLIT, "gradient_mix": _WIDE_SPLIT}

# In mixed precision a thread of a message kernel takes two channels or more: what a warp reads at once is then as many
# bytes of fields as of tables in float32
_SHARED = MessageTile(16, 1, 64, 16)
_FLAT, _DEEP, _DEEP_HALF = Block(16, 64, 32, 4, 3), Block(16, 64, 64, 4, 2), Block(16, 32, 64, 4, 2)
_MIXED: tuple[tuple[int, dict[str, Any]], ...] = (
    (512, {}),
    (1500, {"interaction": _SHARED, "message_backward": _SHARED, "mix": _FLAT, "update": _FLAT,
            "gradient_product": _DEEP_HALF, "gradient_mix": _FLAT}),
    (4000, {"interaction": MessageTile(4, 4, 32, 4), "message_backward": MessageTile(1, 2, 32, 1),
            "mix": Block(16, 64, 32, 4, 2), "update": _DEEP, "gradient_product": _DEEP_HALF,
            "gradient_mix": _DEEP_HALF}),
)  # fmt: skip
_MIXED_MANY: dict[str, Any] = {
    "interaction": _SHARED, "message_backward": MessageTile(4, 1, 64, 4), "mix": _FLAT, "update": _DEEP,
    "gradient_product": _FLAT, "gradient_mix": _DEEP,
}  # fmt: skip


# --- TensorNet energy and forces by fused kernels: forward, hand-written backward, no autograd, no allocation ---
#
# The order of the kernels is the order of the paper's equations (model.py), then backwards. Every buffer
# is allocated once; a step only launches kernels on the current stream, so that it can be captured in a CUDA graph.


@dataclass(eq=False)
class Buffers:
    """Static tensors of one size. Fields are [N, 9, F] float32; in mixed precision y, m, d, dd, dm are float16.

    Some gradients take the place of what they are the gradient of, or of what is read for the last time by the program
    that writes them: g that of the last x, dd of the last d, dgate of gate, dhidden of active, and dY of each m. dX⁰
    replaces mix(X⁰) in mixed. What only a product reads is in words of two halves (triton_algebra.py) where that has
    16 rows or more and precision "fp16x3": P, dD, and the gradient of mix(X⁰). In the embedding by elements the sums S
    are in mixed before that, and the gradient of S is in x0 after it. dm holds P/(‖P‖²+1) in the forward pass.
    """

    x0: Tensor
    norm: Tensor
    hidden: Tensor
    active: Tensor
    gate: Tensor
    dgate: Tensor
    dhidden: Tensor
    norms: Tensor
    readout: Tensor
    readout_active: Tensor
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
    segment: Tensor
    present: Tensor
    slope: Tensor
    edge_slope: Tensor
    edge_turn: Tensor
    energy: Tensor
    forces: Tensor
    virial: Tensor

    @property
    def nbytes(self) -> int:
        sizes: dict[int, int] = {}
        for value in vars(self).values():
            for t in value if isinstance(value, list) else [value]:
                sizes[t.data_ptr()] = t.numel() * t.element_size()
        return sum(sizes.values())


class FusedTensorNet(FeatureNetwork):
    """Runs a frozen TensorNet over CSR rows.

    Args:
        weights: the prepared model. Where they are for mixed precision, what the interactions pass between kernels is
            in half precision, and so are the factors of their products; sums and all else are in float32.
        precision: "tf32x3" (as accurate as float32; where the weights fit, in halves instead of TF32), "tf32" or
            "ieee".

    Attributes:
        field_precision: of products of the embedding and the scalar networks, "fp16x3" where weights are in halves
            (triton_products.py); layer_precision: of products of the interactions.
        sole_readers: products whose field, P, dD or the gradient of mix(X⁰), nothing else reads.
        unit: unit of energies and their gradients in eV, a power of two. It keeps gradients near 1 for any scale of
            the energy, since numbers in half precision (triton_products.py) have a limited range.
    """

    _linear: Tensor | None = None
    sole_readers: tuple[str, ...] = ("update", "gradient_product", "gradient_embedding")

    def __init__(self, weights: FrozenTensorNet, precision: str = "tf32x3"):
        self.weights, self.precision, self.device = weights, precision, weights.device
        self.packed = PackedWeights(weights)
        self.set_unit(power_of_two(self._largest()))
        device = weights.device
        self.can_overlap = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
        self._mix_in, self._mix_out = weights.mix_in, weights.mix_out
        self.field_precision = "fp16x3" if precision == "tf32x3" and weights.fit_halves else precision
        self.layer_precision = "fp16" if weights.mixed else self.field_precision
        if weights.mixed:
            self._mix_in, self._mix_out = ([(w.half(), t.half()) for w, t in m] for m in (self._mix_in, self._mix_out))

    def _largest(self) -> float:
        """Return an estimate of the size of the gradients."""
        w = self.weights
        linear = 0.0 if w.linear is None else float(w.linear.abs().max())
        return max(float(w.readout[4].abs().max()), linear)

    def set_unit(self, unit: float) -> None:
        """Compute in another unit, a power of two."""
        w, self.unit = self.weights, unit
        w2, b2, w3, b3 = w.readout[2:]
        self._energy = ScalarNetwork(w2, pack(w2), b2, w3 / unit, b3 / unit, w.readout_t[1])
        self._linear = None if w.linear is None else w.linear / unit

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return the factor of the interaction products."""
        return 1 + 0.1 * charge

    def launch_shapes(self, num_atoms: int) -> Tiles:
        words = bool(self.sole_readers) and self.field_precision == "fp16x3"
        return Tiles.for_atoms(num_atoms, self.weights.channels, self.weights.mixed, words)

    def shapes_for(self, num_atoms: int, z: Tensor) -> Tiles:
        tiles = self.launch_shapes(num_atoms)
        most = min(MOST_ELEMENTS, self.weights.channels // 20)
        if num_atoms < _BY_ELEMENTS_FROM or not most or not self.weights.embedding_by_elements:
            return tiles
        elements = tuple(z.unique().tolist())
        return replace(tiles, elements=elements) if len(elements) <= most else tiles

    def allocate(self, num_atoms: int, capacity: int, shapes: Tiles, num_ghosts: int | None = None) -> Buffers:
        w, tiles = self.weights, shapes
        f, layers = w.channels, w.num_layers
        if any(isinstance(shape, Block) and shape.rows == 8 for shape in vars(tiles).values()):
            _ = self._split  # a step launches and does nothing else
        if self.field_precision == "fp16x3":
            _ = self._halves
        _ = tiles.elements and (self._element_maps, w.places_of(tiles.elements))
        n = max(num_atoms, 1)
        rows = num_atoms + (num_ghosts or 0)
        capacity = max(capacity, 1)  # a multiple of 16 keeps rows of the edge arrays aligned

        kept = torch.float16 if w.mixed else torch.float32

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=w.device)

        def field() -> Tensor:
            return new(n, 9, f, dtype=kept)

        def sent() -> Tensor:  # what senders are read from
            return new(max(rows, 1), 9, f, dtype=kept)

        # rows of edge gradients: one for each slice of channels, since slices are in different programs
        slices = 1 if tiles.elements else f // tiles.embedding_backward.channels
        wide = max(f, FUNCTIONS * len(tiles.elements))  # of the sums of all elements
        back = f // tiles.message_backward.channels
        x, d, gate, active = new(layers + 1, n, 9, f), [field() for _ in range(layers)], new(n, 3 * f), new(n, 2 * f)
        return Buffers(
            x0=new(n, 9, wide), norm=new(n, f), hidden=new(n, 2 * f), active=active, gate=gate, dgate=gate,
            dhidden=active, norms=new(n, 3 * f), readout=new(n, f), readout_active=new(n, f), dreadout=new(n, f),
            mixed=new(n, 9, wide), x=list(x), inverse=list(new(layers, n, f)),
            y=[sent() for _ in range(layers)], m=[field() for _ in range(layers)], d=d, g=x[-1], dd=d[-1], dm=sent(),
            segment=new(capacity, dtype=torch.int64), present=new(n, dtype=torch.int32),
            slope=new(layers * back, capacity), edge_slope=new(slices, capacity),
            edge_turn=new(slices, capacity, 3), energy=new(n), virial=new(n, 9),
            forces=new(n, 3) if num_ghosts is None else new(rows, 3).long(),
        )  # fmt: skip

    def run(self, buffers: Buffers, shapes: Tiles, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        self.predict(buffers, shapes, atoms, edges)
        self.differentiate(buffers, shapes, atoms, edges, with_virial, None)

    def features(self, buffers: Any) -> Tensor:
        return buffers.readout_active

    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        """Compute energies, features, and the gradient in what the features are silu of."""
        given = buffers, shapes, atoms, edges
        self._embed(*given)
        for k in range(self.weights.num_layers):
            self._mix(*given, k)
            atoms.send(buffers.y[k])
            self._pass_messages(*given, k)
            self._update(*given, k)
        self._read_out(*given)

    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        """Compute forces from that gradient; there are no charges."""
        given = buffers, shapes, atoms, edges
        self._read_out_gradient(*given)
        for k in reversed(range(self.weights.num_layers)):
            # dM of all atoms and ghosts comes before dY of any atom, which sums dM of its neighbors; `_mix_gradient`
            # goes on to dX and dD of the layer before
            self._product_gradient(*given, k)
            self._clear_rim(buffers, atoms, k)
            atoms.send(buffers.dm)
            self._message_gradient(*given, k)
            self._mix_gradient(*given, k)
        self._embedding_gradient(*given)
        self._forces(*given, with_virial)

    # --- rows of a block: fewer with every layer, and with every layer of the gradient more --------------------------

    def _senders(self, atoms: Atoms, k: int) -> int:
        """Return the number of rows whose features layer k reads."""
        return atoms.within(self.weights.num_layers - k)

    def _receivers(self, atoms: Atoms, k: int) -> int:
        """Return the number of rows whose features layer k changes."""
        return atoms.within(self.weights.num_layers - k - 1)

    def _clear_rim(self, b: Buffers, atoms: Atoms, k: int) -> None:
        """Zero the gradients of rows that layer k reads, or that neighbors of these have, and does not change."""
        if atoms.shells is None:
            return
        inner, outer = self._receivers(atoms, k), self._senders(atoms, k)
        # these rows get no messages in layer k, but their neighbors read dM of them
        b.dm[inner:].zero_()
        # X of these rows is read by layer k and not changed: no dY through the product yet, and no dX
        for field in (b.m[k], b.g):
            field[inner:outer].zero_()
        if k + 1 == self.weights.num_layers:
            b.slope.zero_()  # also of edges of the rows that only lower layers read

    # --- forward -------------------------------------------------------------------------------------------------

    def _factor(self, b: Buffers, atoms: Atoms) -> Tensor:
        """Return the factor of the interaction products, 1 + 0.1 × charge, [N]."""
        return atoms.charge_input

    def _embed(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        w, n = self.weights, atoms.num_rows
        f = w.channels
        if tiles.elements:
            self._embed_by_elements(b, tiles, atoms, edges)
        else:
            grid, walk = self._message(n, tiles, tiles.embedding)
            message.embedding_kernel[grid](
                *edges[:3], w.knots, b.segment, atoms.z, w.embedding_table, w.z_receiver, w.z_sender,
                w.embedding_self, b.x0, b.norm, n, w.table.decay, w.table.scale, LOG=w.log_norm, **walk,
            )  # fmt: skip
        gamma, beta, eps = w.gate_norm
        w1, b1, w2, b2 = w.gate
        grid, block = self._product(n, 2 * f, tiles, "hidden")
        packed = self._packed(block)
        scalar.hidden_kernel[grid](
            b.norm, gamma, beta, _pick(block, w1, packed.gate_hidden[0]), b1, w.gate_sums[1], b.hidden, b.active, n,
            eps, LOG=w.log_norm, **block,
        )  # fmt: skip
        if not tiles.embedding_mix.at_once:
            grid, block = self._product(n, 3 * f, tiles, "gate")
            packed = self._packed(block)
            scalar.gate_kernel[grid](b.active, _pick(block, w2, packed.gate[0]), b2, b.gate, n, **block)
        grid, block = self._product(n, f, tiles, "embedding_mix")
        packed = self._packed(block)
        node.embedding_mix_kernel[grid](
            b.x0, _pick(block, w.embedding_mix, packed.embedding_mix[0]), b.active, _pick(block, w2, packed.gate[0]),
            b2, b.gate, b.mixed, b.x[0], b.inverse[0], n, **block,
        )  # fmt: skip

    def _mix(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, self._senders(atoms, k)
        grid, block = self._product(n, w.channels, tiles, "mix")
        packed = self._packed(block)
        node.mix_kernel[grid](b.x[k], _pick(block, self._mix_in[k][0], packed.mix_in[k][0]), b.y[k], n, **block)

    def _pass_messages(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, self._receivers(atoms, k)
        # dm is free during the forward pass: it carries the normalised products
        grid, walk = self._message(n, tiles, tiles.interaction)
        message.interaction_kernel[grid](
            edges.row_ptr, edges.sender, b.segment, w.layer_tables[k], w.layer_self[k], b.y[k],
            self._factor(b, atoms), b.m[k], b.dm, n, O3=w.is_o3, WORDS=self._in_words(tiles, "update"), **walk,
        )  # fmt: skip

    def _update(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, self._receivers(atoms, k)
        last = k + 1 == w.num_layers
        grid, block = self._product(n, w.channels, tiles, "update")
        packed = self._packed(block)
        node.update_kernel[grid](
            b.dm, _pick(block, self._mix_out[k][0], packed.mix_out[k][0]), b.x[k], self._factor(b, atoms), b.d[k],
            b.x[k + 1], b.inverse[0] if last else b.inverse[k + 1], b.norms, n, LAST=last, LOG=w.log_norm,
            **block,
        )  # fmt: skip

    def _read_out(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        w, n = self.weights, atoms.within(0)
        f = w.channels
        gamma, beta, eps = w.out_norm
        w1, b1 = w.readout[:2]
        grid, block = self._product(n, f, tiles, "readout_hidden")
        packed = self._packed(block)
        scalar.readout_hidden_kernel[grid](
            b.norms, gamma, beta, _pick(block, w1, packed.readout_hidden[0]), b1, w.readout_sums[1], b.readout,
            b.readout_active, n, eps, LOG=w.log_norm, **block,
        )  # fmt: skip
        self._energies(b, tiles, n)
        if self._linear is not None:
            scalar.linear_energy_kernel[(-(-n // 16),)](
                b.x[0], b.inverse[0], self._linear, b.energy, n, b.x[0].shape[0], LAYERS=w.num_layers, F=f, BM=16,
                num_warps=4, **FUSED_ARITHMETIC, **self.launch_options(tiles),
            )  # fmt: skip

    def _energies(self, b: Any, tiles: Any, num_atoms: int) -> None:
        """Compute energies, and their gradient in what the features are silu of."""
        # both at once: the networks end here, and the gradient begins
        self.read_out(b, tiles, num_atoms, self._energy, b.energy, b.dreadout)

    def read_out(
        self, b: Any, tiles: Any, num_atoms: int, net: ScalarNetwork, values: Tensor, gradient: Tensor
    ) -> None:  # fmt: skip
        """Compute values [N] of a network of the features, and their gradient [N, F] in what the features are silu
        of."""
        f = self.weights.channels
        grid, block = self._product(num_atoms, f, tiles, "readout")
        del block["BN"]
        scalar.readout_kernel[grid[:1]](
            b.readout, b.readout_active, _pick(block, net.first, net.packed), net.first_bias, net.last, net.last_bias,
            net.first_t, values, gradient, num_atoms, H=f // 2, **block,
        )  # fmt: skip

    # --- backward ------------------------------------------------------------------------------------------------

    def _read_out_gradient(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        w, n = self.weights, atoms.within(0)
        grid, block = self._product(n, w.channels, tiles, "readout_gradient")
        packed = self._packed(block)
        scalar.readout_gradient_kernel[grid](
            b.dreadout, b.readout, b.norms, _pick(block, w.readout_t[0], packed.readout_hidden[1]), w.out_norm[0],
            *w.readout_sums, b.x[-1], b.d[-1], self._factor(b, atoms), b.g, b.dd, n, w.out_norm[2], LOG=w.log_norm,
            WORDS=self._in_words(tiles, "gradient_product"), **self._linear_slope(w.num_layers), **block,
        )  # fmt: skip

    def _product_gradient(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, self._receivers(atoms, k)
        grid, block = self._product(n, w.channels, tiles, "gradient_product")
        packed = self._packed(block)
        node.gradient_product_kernel[grid](
            b.dd, _pick(block, self._mix_out[k][1], packed.mix_out[k][1]), b.y[k], b.m[k], self._factor(b, atoms), b.dm,
            b.m[k], n, O3=w.is_o3, **block,
        )  # fmt: skip

    def _message_gradient(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n, capacity = self.weights, self._senders(atoms, k), edges.sender.shape[0]
        slices = w.channels // tiles.message_backward.channels
        grid, walk = self._message(n, tiles, tiles.message_backward)
        # m holds dY, to which this adds
        message.message_backward_kernel[grid](
            edges.row_ptr, edges.sender, b.segment, w.layer_tables[k], w.layer_self[k], b.y[k], b.dm, b.m[k],
            b.slope[k * slices :], capacity, n, LANES=tiles.message_backward.lanes, **walk,
        )  # fmt: skip

    def _mix_gradient(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, k: int) -> None:
        w, n = self.weights, self._senders(atoms, k)
        grid, block = self._product(n, w.channels, tiles, "gradient_mix")
        packed = self._packed(block)
        reader = "gradient_product" if k else "gradient_embedding"
        node.gradient_mix_kernel[grid](
            b.m[k], _pick(block, self._mix_in[k][1], packed.mix_in[k][1]), b.g, b.x[k], b.inverse[k], b.d[k - 1],
            self._factor(b, atoms), b.g, b.dd if k else self._of_embedding(b), b.mixed, b.gate, b.dgate, n,
            atoms.within(0), FIRST=k == 0, WORDS=self._in_words(tiles, reader), **self._linear_slope(k), **block,
        )  # fmt: skip

    def _of_embedding(self, b: Any) -> Tensor:
        """Return where the gradient of mix(X⁰) goes, which must be float32."""
        # g is free: the kernel that writes this is the last one to read it, tile by tile
        return b.g if self.weights.mixed else b.dd

    def _embedding_gradient(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        w, n, capacity = self.weights, atoms.num_rows, edges.sender.shape[0]
        f = w.channels
        grid, block = self._product(n, 2 * f, tiles, "gate_backward")
        w2t = _pick(block, w.gate_t[1], self._packed(block).gate[1])
        # of the gate first: dX⁰ is the sum of both ways back, by mix(X⁰) and by the norms that the gate reads
        scalar.gate_backward_kernel[grid](b.dgate, b.hidden, w2t, b.dhidden, n, **block)
        grid, block = self._product(n, f, tiles, "gradient_embedding")
        packed = self._packed(block)
        node.gradient_embedding_kernel[grid](
            self._of_embedding(b), _pick(block, w.embedding_mix_t, packed.embedding_mix[1]), b.x0, b.dhidden, b.hidden,
            b.norm, _pick(block, w.gate_t[0], packed.gate_hidden[1]), w.gate_norm[0], *w.gate_sums, b.mixed, n,
            w.gate_norm[2], LOG=w.log_norm, **block,
        )  # fmt: skip
        if tiles.elements:
            self._edge_gradient_by_elements(b, tiles, atoms, edges)
            return
        grid, walk = self._message(n, tiles, tiles.embedding_backward)
        message.embedding_backward_kernel[grid](
            edges.row_ptr, edges.vectors, b.segment, atoms.z, w.embedding_table, w.z_receiver, w.z_sender, b.mixed,
            b.edge_slope, b.edge_turn, capacity, n, LANES=tiles.embedding_backward.lanes, **walk,
        )  # fmt: skip

    # --- the embedding by elements --------------------------------------------------------------------------------

    @cached_property
    def _element_maps(self) -> tuple[Tensor, Tensor, str]:
        """V and Vᵀ as the kernels take them, and the precision of their products."""
        assert self.weights.embedding_by_elements is not None
        _, maps, maps_t = self.weights.embedding_by_elements
        if self.field_precision == "fp16x3" and float(maps.abs().max()) < HALVES_BELOW:
            return pack_halves(maps), pack_halves(maps_t), self.field_precision
        return maps, maps_t, self.precision

    def _by_elements(self, tiles: Tiles, shape: Any) -> dict[str, Any]:
        """Return the constants that the kernels of the embedding by elements share."""
        return {"R": FUNCTIONS, "num_warps": shape.warps, **FUSED_ARITHMETIC, **self.launch_options(tiles)}

    def _embed_by_elements(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        """Compute X⁰ and its norms; the sums S lie where mix(X⁰) will."""
        w, n = self.weights, atoms.num_rows
        assert w.embedding_by_elements is not None
        table = w.embedding_by_elements[0]
        maps, _, precision = self._element_maps
        place, elements = w.places_of(tiles.elements)
        walk, block = tiles.element_sums, tiles.element_product
        # the gradients of the edges come later
        message.element_sums_kernel[(n,)](
            *edges[:3], w.knots, b.segment, b.edge_slope.view(torch.int32), atoms.z, place, table, b.mixed,
            b.present, w.table.decay, w.table.scale, KNOTS=w.table.num_knots, B=len(elements),
            P=1 << (len(elements) - 1).bit_length(), BE=walk.edges, **self._by_elements(tiles, walk),
        )  # fmt: skip
        message.element_product_kernel[-(-n // block.rows), w.channels // block.cols](
            b.mixed, b.present, maps, atoms.z, elements, w.z_receiver, w.z_sender, w.embedding_self, b.x0, b.norm, n,
            F=w.channels, B=len(elements), BM=block.rows, BN=block.cols, LOG=w.log_norm, PREC=precision,
            maxnreg=_PRODUCT_REGISTERS, **self._by_elements(tiles, block),
        )  # fmt: skip

    def _edge_gradient_by_elements(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        """Compute the gradient of the edges from dX⁰; that of S lies where X⁰ was."""
        w, n = self.weights, atoms.num_rows
        assert w.embedding_by_elements is not None
        table = w.embedding_by_elements[0]
        _, maps_t, precision = self._element_maps
        _, elements = w.places_of(tiles.elements)
        walk, block = tiles.element_edges, tiles.element_gradient
        # X⁰ was read for the last time for dX⁰
        message.element_gradient_kernel[(-(-n // block.rows) * len(elements),)](
            b.mixed, b.present, maps_t, atoms.z, elements, w.z_receiver, w.z_sender, b.x0, n, F=w.channels,
            B=len(elements), BM=block.rows, BK=block.depth, PREC=precision, num_stages=block.stages,
            **self._by_elements(tiles, block),
        )  # fmt: skip
        message.element_edges_kernel[(-(-n // walk.atoms),)](
            edges.row_ptr, edges.vectors, b.segment, table, b.x0, b.edge_slope, b.edge_turn, n, B=len(elements),
            BR=walk.atoms, BE=walk.edges, LANES=walk.lanes, **self._by_elements(tiles, walk),
        )  # fmt: skip

    def _forces(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges, with_virial: bool) -> None:
        capacity = edges.sender.shape[0]
        if atoms.exchange is not None or atoms.shells is not None:
            self._domain_forces(b, tiles, atoms, edges)
            return
        force.force_kernel[(atoms.num_rows,)](
            *edges[:3], b.slope, b.edge_slope, b.edge_turn, capacity, b.forces, b.virial,
            SLICES=b.edge_slope.shape[0], MESSAGES=b.slope.shape[0], BE=tiles.forces.edges,
            VIRIAL=with_virial, num_warps=tiles.forces.warps, **FUSED_ARITHMETIC, **self.launch_options(tiles),
        )  # fmt: skip

    def _domain_forces(self, b: Buffers, tiles: Tiles, atoms: Atoms, edges: Edges) -> None:
        """Compute forces, also those that ghosts get from the local atoms."""
        b.forces.zero_()
        force.domain_force_kernel[(atoms.num_rows,)](
            *edges[:3], b.slope, b.edge_slope, b.edge_turn, edges.sender.shape[0], b.forces, b.virial,
            SLICES=b.edge_slope.shape[0], MESSAGES=b.slope.shape[0], BE=32, num_warps=1, **FUSED_ARITHMETIC,
            **self.launch_options(tiles),
        )  # fmt: skip

    def _linear_slope(self, stage: int) -> dict[str, Any]:
        """Return the slope of the linear read-out in the isotropic part of X after the embedding (0) or a layer."""
        linear = self._linear
        return {"linear": self.weights.knots if linear is None else linear[stage], "LINEAR": linear is not None}

    # --- what kernels are launched with --------------------------------------------------------------------------

    def _precision(self, name: str) -> str:
        """Return the precision of a product, by its name in `Tiles`, for factors in float32."""
        if name == "readout":
            return self.precision
        return self.layer_precision if name in _OF_LAYERS else self.field_precision

    def _in_words(self, tiles: Tiles, reader: str) -> bool:
        """Return whether the field that this product reads is written in words (`in_words`, triton_algebra.py)."""
        if reader not in self.sole_readers or self._precision(reader) != "fp16x3":
            return False
        return bool(getattr(tiles, reader).rows >= 16)

    @cached_property
    def _split(self) -> SplitWeights:
        return SplitWeights(self.weights)

    @cached_property
    def _halves(self) -> HalfWeights:
        return HalfWeights(self.weights)

    def _packed(self, block: dict[str, Any]) -> PackedWeights | SplitWeights | HalfWeights:
        """Return the packed weights for kernels of these blocks."""
        if block["PREC"] in _HALVES and block["BM"] >= 16:
            return self._halves
        return self._split if block["BM"] == 8 else self.packed

    def _message(self, n: int, tiles: Tiles, walk: MessageTile) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and constants of a message kernel."""
        f = self.weights.channels
        constants = {
            "F": f, "KNOTS": self.weights.table.num_knots, "BR": walk.atoms, "BE": walk.edges, "BF": walk.channels,
            "num_warps": walk.warps, **FUSED_ARITHMETIC, **self.launch_options(tiles),
        }  # fmt: skip
        return (-(-n // walk.atoms), f // walk.channels), constants

    def _product(self, n: int, columns: int, tiles: Tiles, name: str) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return grid and constants of a product kernel, by its name in `Tiles`, with this many columns in all."""
        block: Block = getattr(tiles, name)
        precision, depth = "words" if self._in_words(tiles, name) else self._precision(name), block.depth
        if precision == "tf32x3" and block.rows >= 16:
            depth = min(depth, 32)  # Tensor Cores round sums towards zero, and longer ones shift energies
        constants = {
            "F": self.weights.channels, "BM": block.rows, "BN": block.cols, "BK": depth, "KS": block.split,
            "PREC": precision, "num_warps": block.warps, "num_stages": block.stages,
            **FUSED_ARITHMETIC, **self.launch_options(tiles),
        }  # fmt: skip
        return (-(-n // block.rows), columns // block.cols), constants

    def launch_options(self, shapes: Tiles) -> dict[str, Any]:
        return {"PDL": shapes.overlap, "launch_pdl": True} if shapes.overlap and self.can_overlap else {"PDL": 0}


def power_of_two(largest: float) -> float:
    """Return the power of two nearest to a number; 1 if there is none."""
    return 2.0 ** round(math.log2(largest)) if 0 < largest < math.inf else 1.0


def _pick(block: dict[str, Any], plain: Tensor, packed: Tensor) -> Tensor:
    """Return the weights in the layout that kernels of these blocks take (triton_atoms.py)."""
    return packed if block["BM"] < 16 or block["PREC"] in _HALVES else plain
