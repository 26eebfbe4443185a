"""Random numbers as a function of seed, step and atom."""

from __future__ import annotations

import math

import numpy as np
import torch

from torchmdnet2.md.integrators import normal, philox


def words(*values):
    return [torch.tensor(v) for v in values]


def test_philox_known_answers():
    """The vectors that its authors publish with it (Random123, kat_vectors)."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    known = {
        (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (ones,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for given, expected in known.items():
        assert tuple(map(int, philox(words(*given[:4]), *words(*given[4:])))) == expected


def test_numbers_do_not_depend_on_what_is_asked_for_with_them():
    seeds, steps = torch.tensor([3, 2**55 + 1, -1]), torch.tensor([0, 7, 2**33 + 7])
    all_of_them = normal(seeds, steps, 11)
    assert all_of_them.shape == (3, 3, 11, 3) and all_of_them.dtype == torch.float64
    for b in range(3):
        for s in range(3):
            assert torch.equal(normal(seeds[b : b + 1], steps[s : s + 1], 6)[0, 0], all_of_them[s, b, :6])
    flat = all_of_them.flatten()
    assert len(flat.unique()) == len(flat)


def test_normal_and_independent():
    x = normal(torch.tensor([1, 2]), torch.arange(250), 400).numpy()
    n = x.size
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / n)
    pairs = [
        (x[..., 0], x[..., 1]), (x[..., 0], x[..., 2]), (x[..., 1], x[..., 2]), (x[:, 0], x[:, 1]), (x[1:], x[:-1]),
        (x[:, :, 1:], x[:, :, :-1]),
    ]  # fmt: skip
    for a, b in pairs:
        for f in (np.asarray, np.square):
            assert abs(np.corrcoef(f(a).ravel(), f(b).ravel())[0, 1]) < 4 / math.sqrt(a.size)
    assert 4 < np.abs(x).max() < 6.7
