"""Weights of a frozen TensorNet packed for cuda_core_products.py (few atoms) and split_fp16_products.py.

Shapes: F channels, K inputs and N outputs of a map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .weights import FrozenTensorNet

__all__ = ["PackedWeights", "ScalarNetwork", "SplitWeights", "pack", "pack_split"]


def pack(w: Tensor) -> Tensor:
    """[.., K, N] → [.., K/4, N, 4]."""
    return w.reshape(*w.shape[:-2], w.shape[-2] // 4, 4, w.shape[-1]).transpose(-1, -2).contiguous()


class ScalarNetwork(NamedTuple):
    """A network of the features, F → H → 1 with H = F/2.

    Attributes:
        first: [F, H], also as `pack` gives it and transposed; first_bias [H]; last [H], last_bias [].
    """

    first: Tensor
    packed: Tensor
    first_bias: Tensor
    last: Tensor
    last_bias: Tensor
    first_t: Tensor


class _Maps:
    """The matrices of `FrozenTensorNet` but the last of the read-out, forward and transposed, as `form` gives them.

    The first one after a layer norm is γ ⊙ W.
    """

    def __init__(self, w: FrozenTensorNet, form: Callable[[Tensor], Tensor]):
        def pair(forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return form(forward), form(transposed)

        def after_norm(gamma: Tensor, forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return pair((gamma.double()[:, None] * forward.double()).float(), transposed)

        self.embedding_mix = pair(w.embedding_mix, w.embedding_mix_t)
        self.mix_in = [pair(*maps) for maps in w.mix_in]
        self.mix_out = [pair(*maps) for maps in w.mix_out]
        self.gate_hidden = after_norm(w.gate_norm[0], w.gate[0], w.gate_t[0])
        self.gate = pair(w.gate[2], w.gate_t[1])
        self.readout_hidden = after_norm(w.out_norm[0], w.readout[0], w.readout_t[0])


class PackedWeights(_Maps):
    """All matrices, as `pack` gives them."""

    def __init__(self, w: FrozenTensorNet):
        super().__init__(w, pack)


def pack_split(w: Tensor) -> Tensor:
    """[.., K, N] → [.., 2, N/16, K/16, 8, 4, 8] float16, with W = high + low/2048.

    Eight numbers of a thread of Tensor Cores: columns n and n + 8, k, k + 1, k + 2, k + 3 of 16 columns and 16 k.
    """
    k, n = w.shape[-2:]
    w = w.unflatten(-2, (k // 16, 4, 2, 2)).unflatten(-1, (n // 16, 2, 8))  # [.., k/16, 4, 2, 2, n/16, 2, 8]
    order = (-3, -7, -1, -6, -5, -2, -4)
    kept = w.dim() - 7
    w = w.permute(*range(kept), *(i + w.dim() for i in order)).flatten(-3)
    high = w.half()
    if not torch.isfinite(high).all():
        raise ValueError(
            "a weight is not finite or above 65504, the largest number in half precision: use "
            "Evaluator(…, precision='float64')"
        )
    return torch.stack([high, ((w.double() - high.double()) * 2048).half()], kept)


class SplitWeights(_Maps):
    """All matrices but the last of the read-out, as `pack_split` gives them, sums over 3F in three parts."""

    def __init__(self, w: FrozenTensorNet):
        f = w.channels
        super().__init__(w, lambda m: pack_split(m.unflatten(0, (3, f)) if m.shape[0] == 3 * f else m))
