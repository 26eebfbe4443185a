"""Block shapes of the fused kernels by system size, as measured on one NVIDIA H200 (docs/performance.md).

Few atoms need parallelism within an atom (slices of channels, edges side by side, one atom per program in the
products); many atoms need reuse of what is loaded (atoms side by side, matrix units).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

__all__ = ["Block", "Tiles", "Walk"]


class Walk(NamedTuple):
    """Of a message kernel: atoms × edges of an atom × channels at a time, and warps."""

    atoms: int
    edges: int
    channels: int
    warps: int


class Block(NamedTuple):
    """Of a product kernel: rows × columns of the result, depth of the sum at a time, warps, pipeline stages.

    rows = 1 does without the matrix units, which need 16.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Tiles:
    """One shape for each kernel; see the classes in `torchmdnet2.kernels`.

    Args:
        overlap: launch each kernel while the one before still runs (kernels/launch.py).
    """

    overlap: bool = False

    embedding: Walk = Walk(1, 1, 64, 1)
    interaction: Walk = Walk(16, 1, 32, 16)
    message_backward: Walk = Walk(4, 1, 32, 4)
    embedding_backward: Walk = Walk(1, 2, 64, 1)
    hidden: Block = Block(32, 64, 64, 4, 2)
    gate: Block = Block(64, 64, 32, 4, 1)
    gate_backward: Block = Block(32, 64, 32, 4, 3)
    readout_hidden: Block = Block(16, 64, 64, 4, 1)
    readout: Block = Block(16, 64, 64, 4, 1)
    readout_gradient: Block = Block(16, 64, 32, 4, 3)
    embedding_mix: Block = Block(16, 64, 16, 4, 3)
    mix: Block = Block(16, 64, 16, 4, 3)
    update: Block = Block(16, 64, 32, 4, 3)
    gradient_product: Block = Block(16, 32, 32, 4, 2)
    gradient_mix: Block = Block(16, 64, 32, 4, 3)
    gradient_embedding: Block = Block(16, 64, 32, 4, 3)

    @classmethod
    def for_atoms(cls, num_atoms: int, channels: int) -> Tiles:
        """Shapes for N atoms and F channels."""
        tiles = next((shapes for most, shapes in _BY_SIZE if num_atoms <= most), cls())
        limited: dict[str, Any] = {}
        for name, shape in vars(tiles).items():
            if isinstance(shape, bool):
                continue
            if isinstance(shape, Walk):
                limited[name] = shape._replace(channels=min(shape.channels, channels))
            else:
                # F/2 columns are the fewest that a kernel writes, F the shortest sum
                limited[name] = shape._replace(cols=min(shape.cols, channels), depth=min(shape.depth, channels))
        return replace(tiles, **limited)


_TENS = Tiles(
    overlap=True,
    embedding=Walk(1, 16, 16, 4),
    interaction=Walk(1, 8, 32, 4),
    message_backward=Walk(1, 16, 16, 4),
    embedding_backward=Walk(1, 32, 16, 8),
    hidden=Block(16, 32, 128, 4, 1),
    gate=Block(1, 32, 64, 8, 1),
    gate_backward=Block(1, 32, 64, 8, 1),
    readout_hidden=Block(1, 32, 128, 8, 1),
    readout=Block(1, 32, 32, 4, 1),
    readout_gradient=Block(1, 32, 32, 8, 1),
    embedding_mix=Block(1, 32, 32, 4, 1),
    mix=Block(1, 32, 64, 4, 1),
    update=Block(1, 32, 64, 4, 1),
    gradient_product=Block(1, 32, 32, 4, 1),
    gradient_mix=Block(1, 32, 32, 4, 1),
    gradient_embedding=Block(1, 32, 64, 4, 1),
)
_HUNDREDS = Tiles(
    overlap=True,
    embedding=Walk(1, 8, 32, 4),
    interaction=Walk(1, 8, 32, 4),
    message_backward=Walk(1, 8, 32, 4),
    embedding_backward=Walk(1, 16, 16, 4),
    hidden=Block(16, 32, 128, 4, 1),
    gate=Block(16, 32, 64, 4, 3),
    gate_backward=Block(16, 32, 64, 4, 3),
    readout_hidden=Block(1, 64, 32, 4, 1),
    readout=Block(1, 64, 32, 4, 1),
    readout_gradient=Block(1, 32, 16, 2, 1),
    embedding_mix=Block(1, 32, 16, 1, 1),
    mix=Block(1, 32, 64, 4, 1),
    update=Block(1, 32, 16, 1, 1),
    gradient_product=Block(1, 32, 16, 1, 1),
    gradient_mix=Block(1, 32, 16, 1, 1),
    gradient_embedding=Block(1, 32, 16, 1, 1),
)
_THOUSAND = Tiles(
    overlap=True,
    embedding=Walk(1, 2, 64, 1),
    interaction=Walk(16, 1, 32, 16),
    message_backward=Walk(16, 1, 32, 16),
    embedding_backward=Walk(1, 2, 64, 1),
    hidden=Block(32, 64, 64, 4, 2),
    gate=Block(16, 64, 64, 4, 1),
    gate_backward=Block(16, 64, 32, 4, 3),
    readout_hidden=Block(16, 64, 64, 4, 1),
    readout=Block(16, 64, 64, 4, 1),
    readout_gradient=Block(16, 32, 32, 4, 3),
    embedding_mix=Block(16, 64, 16, 4, 3),
    mix=Block(16, 64, 16, 4, 3),
    update=Block(16, 16, 32, 1, 3),
    gradient_product=Block(16, 32, 32, 4, 2),
    gradient_mix=Block(16, 16, 32, 1, 3),
    gradient_embedding=Block(16, 64, 32, 4, 3),
)
_BY_SIZE = ((64, _TENS), (512, _HUNDREDS), (1500, _THOUSAND))
