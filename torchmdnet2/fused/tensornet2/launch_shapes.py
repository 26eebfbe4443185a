"""Block shapes of the kernels of TensorNet2, by system size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..tensornet.launch_shapes import Block, MessageTile, Tiles

__all__ = ["FilterTiles"]


@dataclass(frozen=True)
class FilterTiles(Tiles):
    """Those of TensorNet, and of what TensorNet2 has of its own.

    Args:
        chunk: slots whose filters are held at a time, see triton/filters.py.
        layer: products of the filters' layers.
        first: slots of a program of the first layer, and warps.
        first_gradient: the same for its gradient.
        first_product: rows and depth of the product in the same kernel, and warps; None: two kernels.
        kept: slots whose filters are kept for the backward pass, if there are no more.
        filter_message, filter_gradient: of the messages and their gradients.
        predict: atoms × all channels × depth of the sum at a time of the networks of charges.
        predict_gradient: of their first layer's gradient: atoms, and as many channels as the sum is deep.
    """

    chunk: int = 131072
    layer: Block = Block(128, 128, 64, 8, 3)
    first: tuple[int, int] = (16, 4)
    first_gradient: tuple[int, int] = (32, 4)
    first_product: tuple[int, int, int] | None = (64, 32, 8)
    kept: int = 131072
    filter_message: MessageTile = MessageTile(1, 4, 128, 4)
    filter_gradient: MessageTile = MessageTile(1, 4, 128, 4)
    predict: Block = Block(16, 128, 32, 8)
    predict_gradient: Block = Block(16, 32, 32, 4)

    @classmethod
    def for_gpu(cls, num_atoms: int, channels: int, shared_memory: int) -> FilterTiles:
        """Shapes for N atoms and F channels on a GPU with this many bytes of shared memory for a block."""
        tiles = cls(**vars(Tiles.for_atoms(num_atoms, channels)))
        few = num_atoms <= 512
        layer = tiles.layer
        if few or 4 * layer.stages * layer.depth * (layer.rows + layer.cols) > shared_memory:
            layer = Block(64, 64, 64, 4, 3)
        edges = MessageTile(1, 4, min(32 if few else 128, channels), 4)
        return replace(
            tiles,
            layer=replace(layer, cols=min(layer.cols, channels), depth=min(layer.depth, channels)),
            first_product=tiles.first_product if channels <= 128 else None,
            filter_message=edges,
            filter_gradient=edges,
            chunk=tiles.chunk * 128 // max(channels, 128),
        )
