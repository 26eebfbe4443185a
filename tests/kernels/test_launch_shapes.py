"""Block shapes: what each kernel can take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchmdnet2.models.tensornet.gpu import Block, Tiles
from torchmdnet2.models.tensornet2.gpu import FilterTiles, FusedTensorNet2


def test_no_split_from_16_rows_on():
    assert Block(8, 32, 32, 8, 1, 4).at_once and not Block(16, 64, 32, 4).at_once
    with pytest.raises(ValueError, match=r"rows=16.*split=2.*give split=1 or 8 rows"):
        Block(16, 64, 32, 4, 1, 2)


@pytest.mark.parametrize("channels", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("num_atoms", [1, 32, 33, 112, 113, 512, 513, 1500, 1501, 4000, 4001])
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


@pytest.mark.parametrize(("memory", "layers", "kept"), [(24e9, 1, 1065340), (24e9, 2, 732421), (150e9, 1, 2796202)])
def test_filters_of_tensornet2_fill_a_quarter_of_the_gpu(memory, layers, kept, monkeypatch):
    """With one layer a slot takes 5,632 bytes; places of its 6 F numbers are 32-bit."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    weights = SimpleNamespace(channels=128, num_layers=layers)
    net = SimpleNamespace(weights=weights, device=torch.device("cuda"))
    assert FusedTensorNet2._most_kept.func(net) == kept
    assert kept * 6 * 128 <= 2**31 and kept // 64 <= 65535


@pytest.mark.parametrize("channels", [32, 64, 128, 256])
@pytest.mark.parametrize("num_atoms", [1, 112, 113, 512, 513, 1500, 1501, 4000, 4001, 100_000])
def test_filters_of_tensornet2_fill_blocks(num_atoms, channels):
    tiles = FilterTiles.for_gpu(num_atoms, channels)
    for width in (2 * channels, 3 * channels):
        assert width % tiles.layer.cols == width % tiles.layer.depth == 0
    assert channels % tiles.layer.depth == 0 and (2 * channels) % tiles.first_gradient.depth == 0
    slots = 128  # a chunk is a multiple of so many
    assert slots % tiles.layer.rows == slots % tiles.first_gradient.rows == slots % tiles.first[0] == 0
    assert tiles.layer.rows >= 64  # at most 65,535 blocks one after the other
    for tile in (tiles.filter_message, tiles.filter_gradient):
        assert channels % tile.channels == 0
