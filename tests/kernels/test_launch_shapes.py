"""Block shapes: what each kernel can take."""

from __future__ import annotations

import pytest

from torchmdnet2.models.tensornet.gpu import Block, Tiles


def test_no_split_from_16_rows_on():
    assert Block(8, 32, 32, 8, 1, 4).at_once and not Block(16, 64, 32, 4).at_once
    with pytest.raises(ValueError, match=r"rows=16.*split=2.*give split=1 or 8 rows"):
        Block(16, 64, 32, 4, 1, 2)


@pytest.mark.parametrize("channels", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("num_atoms", [1, 112, 113, 512, 513, 1500, 1501, 4000, 4001])
def test_shapes_for_all_sizes_fit_the_kernels(num_atoms, channels):
    tiles = Tiles.for_atoms(num_atoms, channels)
    for name, shape in vars(tiles).items():
        if not isinstance(shape, Block):
            continue
        assert channels % shape.cols == 0 and shape.depth <= channels, name
        if shape.rows < 8:  # on CUDA cores
            assert shape.rows in (1, 2, 4) and shape.split in (1, 2), name
        elif shape.rows == 8:  # in split fp16: a warp has 16 columns and at least 16 numbers of a sum
            assert shape.warps * 16 == shape.split * shape.cols and channels >= 16 * shape.split, name
    assert tiles.readout.rows == 1 or tiles.readout.rows >= 16
