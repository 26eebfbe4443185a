"""Block shapes of the fused kernels by system size, as measured on one NVIDIA H200 (docs/performance.md).

Few atoms need parallelism within an atom: slices of channels, several edges at once, one atom per program in the
products. Many atoms need reuse of what is loaded: several atoms at once, Tensor Cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Block", "MessageTile", "Tiles", "part_size"]

_PARTS = 512, 4096  # of up to 16,384 atoms and of more


def part_size(num_atoms: int) -> int:
    """Atoms of a structure that one program sums over, of charges and the like."""
    return _PARTS[num_atoms > 16384]


@dataclass(frozen=True)
class MessageTile:
    """Of a message kernel: atoms × edges of an atom × channels at a time, and number of warps."""

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

    rows = 1, 2 or 4: on CUDA cores (cuda_core_products.py); split is the number of columns of a thread, 1 or 2.
    rows = 8: on Tensor Cores in split fp16 (split_fp16_products.py), with split · cols/16 warps, for all kernels but
    `readout`; split is the number of parts of the sum that are computed side by side, and above 1 the whole sum is
    taken at once. rows = 16 or more: on Tensor Cores with FusedTensorNet.precision, split is 1.

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
    """

    overlap: int = 1

    embedding: MessageTile = MessageTile(1, 2, 64, 1)
    interaction: MessageTile = MessageTile(16, 1, 32, 16)
    message_backward: MessageTile = MessageTile(1, 1, 32, 1)
    embedding_backward: MessageTile = MessageTile(1, 2, 64, 1)
    # sums of 32 by themselves here, in the gate and the read-out: Tensor Cores round towards zero, energies shift
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
    if shape.rows == 8:  # Tensor Cores take sixteen numbers of a sum in half precision
        split = min(split, channels // 16)
        warps = max(1, split * cols // 16)
    return replace(shape, cols=cols, depth=min(shape.depth, channels), warps=warps, split=split)


_CUDA_CORES = Block(1, 16, 128, 4, 1, 2)
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
    mix=_CUDA_CORES,
    update=_CUDA_CORES,
    gradient_product=_CUDA_CORES,
    gradient_mix=_CUDA_CORES,
    gradient_embedding=_CUDA_CORES,
)
_SPLIT = Block(8, 16, 32, 4, 1, 4)
_WIDE_SPLIT = Block(8, 32, 32, 8, 1, 4)
_HUNDREDS = Tiles(
    overlap=2,
    embedding=MessageTile(1, 8, 32, 4),
    interaction=MessageTile(1, 8, 32, 2),
    message_backward=MessageTile(1, 8, 32, 2),
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
    message_backward=MessageTile(16, 1, 32, 16),
    embedding_backward=MessageTile(1, 2, 64, 1),
    hidden=_WIDE_SPLIT,
    gate_backward=_SPLIT,
    readout_hidden=_WIDE_SPLIT,
    readout_gradient=_WIDE_SPLIT,
    embedding_mix=Block(16, 64, 16, 4, 3),
    mix=_WIDE_SPLIT,
    update=_WIDE_SPLIT,
    gradient_product=_WIDE_SPLIT,
    gradient_mix=_WIDE_SPLIT,
    gradient_embedding=_WIDE_SPLIT,
)
_THOUSANDS = Tiles(
    interaction=MessageTile(1, 4, 32, 1),
    embedding_backward=MessageTile(1, 2, 64, 1),
    hidden=_WIDE_SPLIT,
    readout_hidden=_WIDE_SPLIT,
    readout_gradient=_WIDE_SPLIT,
    embedding_mix=Block(16, 64, 32, 4, 2),
    mix=_WIDE_SPLIT,
    update=_WIDE_SPLIT,
    gradient_product=_WIDE_SPLIT,
    gradient_mix=_WIDE_SPLIT,
    gradient_embedding=_WIDE_SPLIT,
)
_BY_SIZE = ((112, _TENS), (512, _HUNDREDS), (1500, _THOUSAND), (4000, _THOUSANDS))
