"""Algebra of 3×3 tensors on nine components, channel by channel, in plain PyTorch.

models/tensornet.py uses it, and it is the specification of the fused kernels. A field of 3×3 tensors
is kept as its nine irreducible components X [N, 9, F]:

    0      isotropic part            I = tr X / 3
    1…3    antisymmetric part        A01, A02, A12 (upper triangle)
    4…8    symmetric traceless part  S00, S01, S02, S11, S12 (S22 = −S00 − S11)

Shapes: N atoms, F features.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..system import outside_transforms

__all__ = ["compose", "decompose", "matmul", "part_inner", "part_norms", "per_component", "scale_parts", "tensor_norm"]


def compose(x: Tensor) -> Tensor:
    """Nine components [N, 9, F] → full tensors [N, 3, 3, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    rows = [i + s00, s01 + a01, s02 + a02, s01 - a01, i + s11, s12 + a12, s02 - a02, s12 - a12, i - s00 - s11]
    return torch.stack(rows, 1).unflatten(1, (3, 3))


def decompose(t: Tensor) -> Tensor:
    """Full tensors [N, 3, 3, F] → nine components [N, 9, F]."""
    # unbind once: the gradient of each t[:, i, j] would fill a whole tensor of zeros
    t00, t01, t02, t10, t11, t12, t20, t21, t22 = t.flatten(1, 2).unbind(1)
    trace = (t00 + t11 + t22) / 3
    return torch.stack(
        [
            trace,
            (t01 - t10) / 2,
            (t02 - t20) / 2,
            (t12 - t21) / 2,
            t00 - trace,
            (t01 + t10) / 2,
            (t02 + t20) / 2,
            t11 - trace,
            (t12 + t21) / 2,
        ],
        1,
    )


def part_inner(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Frobenius inner products of the three parts of X and Y [N, 9, F], each [N, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    j, b01, b02, b12, t00, t01, t02, t11, t12 = y.unbind(1)
    inner_a = 2 * (a01 * b01 + a02 * b02 + a12 * b12)
    diagonal = 2 * (s00 * t00 + s11 * t11) + s00 * t11 + s11 * t00
    return 3 * i * j, inner_a, diagonal + 2 * (s01 * t01 + s02 * t02 + s12 * t12)


def part_norms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared Frobenius norms of the three parts of X [N, 9, F]: ‖I‖², ‖A‖², ‖S‖², each [N, F]."""
    i, a01, a02, a12, s00, s01, s02, s11, s12 = x.unbind(1)
    norm_a = 2 * (a01 * a01 + a02 * a02 + a12 * a12)
    norm_s = 2 * (s00 * s00 + s11 * s11 + s00 * s11 + s01 * s01 + s02 * s02 + s12 * s12)
    return 3 * i * i, norm_a, norm_s


def tensor_norm(x: Tensor) -> Tensor:
    """‖X‖² of X [N, 9, F]: [N, F]."""
    norm_i, norm_a, norm_s = part_norms(x)
    return norm_i + norm_a + norm_s


def scale_parts(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply I, A, S of [N, 9, F] by factors [N, 3, F]."""
    return x * per_component(factors)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Products of full tensors, channel by channel: [N, 3, 3, F] × [N, 3, 3, F]."""
    return (x[:, :, :, None] * y[:, None]).sum(2)


def per_component(parts: Tensor) -> Tensor:
    """[N, 3, F] (I, A, S) → [N, 9, F]."""
    # one gather: the second derivative of torch.stack would fill nine whole tensors of zeros
    return parts.index_select(1, _part_of_component(parts.device))


@lru_cache
def _part_of_component(device: torch.device) -> Tensor:
    """The part (I, A, S) that each of the nine components belongs to, made once per device."""
    with torch.inference_mode(False), outside_transforms():
        return torch.tensor([0, 1, 1, 1, 2, 2, 2, 2, 2], device=device)
