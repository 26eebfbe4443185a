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
        kept: most slots of a system whose filters are kept for the backward pass.
        layer: products of the filters' layers.
        first: slots of a program of the first layer, and warps.
        first_gradient: slots of a program of its gradient, depth of the product in it, and warps.
        filter_message, filter_gradient: of the messages and their gradients.
        charge_layer: atoms × channels × depth of the sum at a time of a layer of the networks of charges.
        predict: the same of what follows them, of all channels, and of the gradient of their second layer.
        predict_gradient: of their first layer's gradient: atoms, and as many channels as the sum is deep.
    """

    chunk: int = 131072
    kept: int = 131072
    layer: Block = Block(64, 128, 32, 4, 3)
    first: tuple[int, int] = (16, 4)
    first_gradient: tuple[int, int, int] = (32, 64, 8)
    filter_message: MessageTile = MessageTile(16, 1, 32, 16)
    filter_gradient: MessageTile = MessageTile(16, 1, 32, 16)
    charge_layer: Block = Block(16, 64, 32, 4)
    predict: Block = Block(16, 128, 32, 8)
    predict_gradient: Block = Block(16, 32, 32, 4)

    @classmethod
    def for_gpu(cls, num_atoms: int, channels: int) -> FilterTiles:
        """Shapes for N atoms and F channels."""
        tiles = cls(**vars(Tiles.for_atoms(num_atoms, channels)))
        layer, message, gradient = tiles.layer, tiles.filter_message, tiles.filter_gradient
        charge_layer, predict, first_gradient = tiles.charge_layer, tiles.predict, tiles.first_gradient
        if num_atoms <= 512:
            layer, message, gradient = Block(64, 64, 64, 4, 3), _FEW, _FEW
            charge_layer, predict, first_gradient = Block(16, 32, 64, 4), Block(16, 128, 128, 8), (16, 128, 8)
        elif num_atoms > 4000:
            gradient = MessageTile(1, 4, 32, 1)
            charge_layer = Block(16, 128, 32, 8)

        def within(block: Block) -> Block:
            return replace(block, cols=min(block.cols, channels), depth=min(block.depth, channels))

        # sums are as wide as the channels, and more would not fit into shared memory
        wide = channels > 128
        return replace(
            tiles,
            layer=within(layer),
            charge_layer=within(charge_layer),
            predict=tiles.predict if wide else within(predict),
            filter_message=message,
            filter_gradient=gradient,
            first_gradient=(32, 32, 8)
            if wide
            else (first_gradient[0], min(first_gradient[1], 2 * channels), first_gradient[2]),
            chunk=tiles.chunk * 128 // max(channels, 128),
        )


_FEW = MessageTile(1, 4, 32, 4)
