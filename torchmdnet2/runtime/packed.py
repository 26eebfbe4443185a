"""Weights of a frozen TensorNet packed for kernels on few atoms (kernels/few.py).

Shapes: F channels, K inputs and N outputs of a map.
"""

from __future__ import annotations

from torch import Tensor

from .frozen import FrozenTensorNet

__all__ = ["PackedWeights", "pack"]


def pack(w: Tensor) -> Tensor:
    """[.., K, N] → [.., K/4, N, 4]."""
    return w.reshape(*w.shape[:-2], w.shape[-2] // 4, 4, w.shape[-1]).transpose(-1, -2).contiguous()


class PackedWeights:
    """The matrices of `FrozenTensorNet` as `pack` gives them; pairs are forward and transposed.

    The first one after a layer norm is γ ⊙ W.
    """

    def __init__(self, w: FrozenTensorNet):
        def pair(forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return pack(forward), pack(transposed)

        def after_norm(gamma: Tensor, forward: Tensor, transposed: Tensor) -> tuple[Tensor, Tensor]:
            return pack((gamma.double()[:, None] * forward.double()).float()), pack(transposed)

        self.embedding_mix = pair(w.embedding_mix, w.embedding_mix_t)
        self.mix_in = [pair(*maps) for maps in w.mix_in]
        self.mix_out = [pair(*maps) for maps in w.mix_out]
        self.gate_hidden = after_norm(w.gate_norm[0], w.gate[0], w.gate_t[0])
        self.gate = pair(w.gate[2], w.gate_t[1])
        self.readout_hidden = after_norm(w.out_norm[0], w.readout[0], w.readout_t[0])
        self.readout = pack(w.readout[2])
