"""Small labelled structures, and comparison of samples."""

import numpy as np
import torch

from torchmdnet2 import System
from torchmdnet2.data import Sample

WATER, METHANE = (8, 1, 1), (6, 1, 1, 1, 1)


def make_sample(z=WATER, seed=0, labels=("energy", "forces"), **system) -> Sample:
    """Random numbers in the right shapes; the energy is large, so that float32 would show."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num, stress = len(z), random(1, 3, 3)
    every = {
        "energy": random(1) - 54321.0,
        "forces": random(num, 3),
        "stress": stress + stress.transpose(1, 2),
        "dipole": random(1, 3),
        "charges": random(num),
    }
    structure = System(z=torch.tensor(z), pos=random(num, 3), **system)
    return Sample(structure, {name: every[name] for name in labels})


def make_mixture() -> list[Sample]:
    """Frames of two molecules, charged, periodic, with labels missing here and there."""
    cell = torch.tensor([[[9.0, 0, 0], [1, 8, 0], [0, 2, 7]]], dtype=torch.float64)
    return [
        make_sample(seed=1),
        make_sample(seed=2, labels=("energy",), charge=-1.0, spin=2),
        make_sample(METHANE, 3, ("energy", "forces", "dipole", "charges")),
        make_sample(METHANE, 4, ("energy", "forces", "stress"), cell=cell, pbc=torch.tensor([[True, True, False]])),
        make_sample(METHANE, 5, ("energy", "forces", "stress"), cell=2 * cell),
        make_sample(seed=6, labels=()),
    ]


def same(a: Sample, b: Sample, atol: float = 0.0) -> bool:
    """Equal structures and labels, bit for bit unless a tolerance is given; NaN equals an absent label."""
    if any(not torch.equal(getattr(a.system, f), getattr(b.system, f)) for f in ("z", "pbc", "charge", "spin")):
        return False
    pairs = [(a.system.pos, b.system.pos), (a.system.cell, b.system.cell)]
    for name in a.labels.keys() | b.labels.keys():
        if name in a.labels and name in b.labels:
            pairs.append((a.labels[name], b.labels[name]))
        elif not torch.isnan(a.labels.get(name, b.labels.get(name))).all():
            return False
    return all(
        x.shape == y.shape and x.dtype == y.dtype and np.allclose(x, y, rtol=0, atol=atol, equal_nan=True)
        for x, y in pairs
    )


# an oxalate ion
POSITIONS = [
    [0.77, 0, 0], [-0.77, 0, 0], [1.36, 1.1, 0], [1.36, -1.1, 0], [-1.36, 1.1, 0], [-1.36, -1.1, 0],
]  # fmt: skip
SYMBOLS = ["C", "C", "O", "O", "O", "O"]
LINES = "\n".join(f"{s} {x} {y} {z}" for s, (x, y, z) in zip(SYMBOLS, POSITIONS, strict=True))
