"""Random numbers that are a function of seed, step and atom: nothing to store, the same on every device.

Philox 4x32-10: J. K. Salmon et al., SC '11 (2011), doi:10.1145/2063384.2063405; normal numbers by Box and Muller,
Ann. Math. Stat. 29, 610 (1958). Shapes: B replicas of n atoms, S steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["normal", "philox"]

_MASK = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)


def normal(seeds: Tensor, steps: Tensor, num_atoms: int) -> Tensor:
    """Independent standard normal numbers, [S, B, n, 3] float64.

    The counter of an atom's numbers is (atom within its replica, low and high half of the step, 0), their key is the
    replica's seed.

    Args:
        seeds: [B] int64.
        steps: [S] int64.
        num_atoms: n.
    """
    atom = torch.arange(num_atoms, device=seeds.device)
    counter = [atom, (steps & _MASK)[:, None, None], (steps >> 32)[:, None, None], torch.zeros_like(atom)]
    words = philox(counter, (seeds & _MASK)[None, :, None], ((seeds >> 32) & _MASK)[None, :, None])
    a, b, c, d = (w.double() for w in words)
    first, second = ((-2 * torch.log((u + 1) * 2.0**-32)).sqrt() for u in (a, c))
    angle, other = (u * (2 * math.pi * 2.0**-32) for u in (b, d))
    return torch.stack([first * torch.cos(angle), first * torch.sin(angle), second * torch.cos(other)], -1)


def philox(counter: list[Tensor], key_low: Tensor, key_high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of 32 bits for each counter (four words) and key (two); all int64 that broadcast."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        k0, k1 = (key_low + i * _KEY[0]) & _MASK, (key_high + i * _KEY[1]) & _MASK
        low, high = c0 * _ROUND[0], c2 * _ROUND[1]  # modulo 2⁶⁴, as two's complement
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0, high & _MASK, ((low >> 32) & _MASK) ^ c3 ^ k1, low & _MASK
        )  # fmt: skip
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1, c2, c3
