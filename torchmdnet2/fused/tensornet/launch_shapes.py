"""Block shapes of the fused kernels by system size, as measured on one NVIDIA H200 (docs/performance.md).

Few atoms need parallelism within an atom (slices of channels, edges side by side, one atom per program in the
products); many atoms need reuse of what is loaded (atoms side by side, matrix units).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Block", "MessageTile", "Tiles"]


@dataclass(frozen=True)
class MessageTile:
    """Of a message kernel: atoms × edges of an atom × channels at a time, and warps."""

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
    """Of a product kernel: rows × columns of the result, depth of the sum at a time, warps, pipeline stages, split.

    rows = 1, 2 or 4 do without the matrix units; split is then the number of columns of a thread, 1 or 2
    (cuda_core_products.py). All but `readout` also know 8 rows, float32-accurate in half precision
    (split_fp16_products.py), with
    split · cols/16 warps; split is then the number of parts of the sum that are computed side by side, and above 1 the
    whole sum is taken at once. From 16 rows on numbers are multiplied as FusedTensorNet.precision says, and split is 1.

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
    """One shape for each kernel; see the classes in `torchmdnet2.kernels`.

    Args:
        overlap: 0, 1 or 2: how early each kernel is launched (triton_launch.py).
    """

    overlap: int = 1

    embedding: MessageTile = MessageTile(1, 2, 64, 1)
    interaction: MessageTile = MessageTile(16, 1, 32, 16)
    message_backward: MessageTile = MessageTile(1, 1, 32, 1)
    embedding_backward: MessageTile = MessageTile(1, 2, 64, 1)
    # sums of 32 by themselves here, in the gate and the read-out: the matrix units round towards zero, energies shift
    hidden: Block = Block(32, 64, 32, 4, 1)
    gate: Block = Block(16, 64, 32, 4, 3)
    gate_backward: Block = Block(32, 64, 32, 4, 3)
    readout_hidden: Block = Block(16, 64, 64, 4, 1)
    readout: Block = Block(16, 64, 32, 4, 1)
    readout_gradient: Block = Block(16, 64, 32, 4, 3)
    embedding_mix: Block = Block(16, 64, 16, 4, 3)
    mix: Block = Block(16, 64, 16, 4, 3)
    update: Block = Block(16, 64, 32, 4, 3)
    gradient_product: Block = Block(16, 64, 16, 4, 3)
    gradient_mix: Block = Block(16, 64, 16, 4, 3)
    gradient_embedding: Block = Block(16, 64, 32, 4, 3)

    @classmethod
    def for_atoms(cls, num_atoms: int, channels: int) -> Tiles:
        """Shapes for N atoms and F channels."""
        tiles = next((shapes for most, shapes in _BY_SIZE if num_atoms <= most), cls())
        limited: dict[str, Any] = {}
        for name, shape in vars(tiles).items():
            if isinstance(shape, int):
                continue
            if isinstance(shape, MessageTile):
                limited[name] = replace(shape, channels=min(shape.channels, channels))
            else:
                limited[name] = _limit(shape, channels)
        if tiles.readout.at_once and channels > 128:  # takes all columns
            limited["readout"] = _limit(cls.readout, channels)
        return replace(tiles, **limited)


def _limit(shape: Block, channels: int) -> Block:
    """The block for fewer or more channels than it was measured with."""
    # F/2 columns are the fewest that a kernel writes, F the shortest sum
    cols, split, warps = min(shape.cols, channels), shape.split, shape.warps
    if shape.at_once and channels > 128:  # as many weights in the registers as for 128 channels
        cols = max(cols * 128 // channels, 16 if shape.rows == 8 else 4)
    if shape.rows == 8:  # the matrix units take sixteen numbers of a sum in half precision
        split = min(split, channels // 16)
        warps = max(1, split * cols // 16)
    return replace(shape, cols=cols, depth=min(shape.depth, channels), warps=warps, split=split)


_FEW = Block(1, 16, 128, 4, 1, 2)
_TENS = Tiles(
    overlap=2,
    embedding=MessageTile(1, 16, 16, 2),
    interaction=MessageTile(1, 8, 32, 4),
    message_backward=MessageTile(1, 16, 16, 2),
    embedding_backward=MessageTile(1, 32, 32, 8),
    hidden=Block(1, 16, 128, 4),
    gate_backward=Block(1, 16, 128, 4),
    readout_hidden=Block(1, 8, 128, 4),
    readout=Block(1, 64, 128, 4),
    readout_gradient=Block(1, 16, 128, 4),
    embedding_mix=Block(1, 8, 128, 2),
    mix=_FEW,
    update=_FEW,
    gradient_product=_FEW,
    gradient_mix=_FEW,
    gradient_embedding=_FEW,
)
_HALVES = Block(8, 16, 32, 4, 1, 4)
_WIDE_HALVES = Block(8, 32, 32, 8, 1, 4)
_HUNDREDS = Tiles(
    overlap=2,
    embedding=MessageTile(1, 8, 32, 4),
    interaction=MessageTile(1, 8, 32, 2),
    message_backward=MessageTile(1, 8, 32, 2),
    embedding_backward=MessageTile(1, 16, 32, 4),
    hidden=_WIDE_HALVES,
    gate_backward=_HALVES,
    readout_hidden=_WIDE_HALVES,
    readout=Block(1, 64, 128, 4),
    readout_gradient=_WIDE_HALVES,
    embedding_mix=_HALVES,
    mix=_WIDE_HALVES,
    update=_HALVES,
    gradient_product=_HALVES,
    gradient_mix=_HALVES,
    gradient_embedding=_WIDE_HALVES,
)
_THOUSAND = Tiles(
    message_backward=MessageTile(16, 1, 32, 16),
    embedding_backward=MessageTile(1, 2, 64, 1),
    hidden=_WIDE_HALVES,
    gate_backward=_HALVES,
    readout_hidden=_WIDE_HALVES,
    readout_gradient=_WIDE_HALVES,
    embedding_mix=Block(16, 64, 16, 4, 3),
    mix=_WIDE_HALVES,
    update=_WIDE_HALVES,
    gradient_product=_WIDE_HALVES,
    gradient_mix=_WIDE_HALVES,
    gradient_embedding=_WIDE_HALVES,
)
_THOUSANDS = Tiles(
    interaction=MessageTile(1, 4, 32, 1),
    embedding_backward=MessageTile(1, 2, 64, 1),
    hidden=_WIDE_HALVES,
    readout_hidden=_WIDE_HALVES,
    readout_gradient=_WIDE_HALVES,
    embedding_mix=Block(16, 64, 32, 4, 2),
    mix=_WIDE_HALVES,
    update=_WIDE_HALVES,
    gradient_product=_WIDE_HALVES,
    gradient_mix=_WIDE_HALVES,
    gradient_embedding=_WIDE_HALVES,
)
_BY_SIZE = ((112, _TENS), (512, _HUNDREDS), (1500, _THOUSAND), (4000, _THOUSANDS))
