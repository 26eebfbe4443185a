"""Random frames, and batches of them by the kernel and by PyTorch: shared by the interpreter's checks and the GPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchmdnet2 import System
from torchmdnet2.models.tensornet.training_pairs import Pairs
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.training.steps.packed_frames import Capacity, PackedBatch, PackedFrames, Part

CUTOFF = 3.5
ELEMENTS = [1, 6, 8, 17]


def random_frames(rng: np.random.Generator, dtype: torch.dtype, stress: bool, device: str, largest: int):
    """Two parts of seven frames: single atoms, molecules, periodic ones with several images of each pair; one frame of
    the largest number of atoms. Some labels are absent."""
    parts = []
    for most in (largest, 6):
        systems = []
        for k, num in enumerate([most, 1, *rng.integers(1, most + 1, 5)]):
            cell = (8 * num + 40.0) ** (1 / 3) * (
                torch.eye(3).double() + 0.1 * torch.from_numpy(rng.normal(size=(3, 3)))
            )
            pos = torch.from_numpy(rng.random((num, 3))) @ cell
            z = torch.from_numpy(rng.choice(ELEMENTS, num))
            systems.append(System(z=z, pos=pos, cell=cell if k % 3 == 2 else None, charge=float(k % 2)))
        whole = System.concatenate([s if s.pbc.any() else s.replace(cell=_far(s), pbc=s.pbc) for s in systems])
        neighbors = neighbor_list(whole, CUTOFF)
        volume = [float(s.volume[0]) if s.pbc.any() else 0.0 for s in systems]
        labels = [rng.normal(size=shape) for shape in ((7,), (whole.num_atoms, 3), (7, 3, 3))]
        labels[0][3], labels[1][:4], labels[2][2] = np.nan, np.nan, np.nan
        vectors = neighbors.vectors(whole).numpy()
        charge = whole.charge.numpy()
        parts.append(Part(whole.z.numpy(), whole.batch.numpy(), charge, np.array(volume), neighbors, vectors, *labels))
    return PackedFrames(parts, ELEMENTS, CUTOFF, torch.device(device), dtype, stress)


def _far(system: System) -> Tensor:
    return system.cell + 100 * torch.eye(3, dtype=torch.float64)


def random_batches(rng: np.random.Generator, store: PackedFrames, most: int) -> Iterator[tuple[list[int], Capacity]]:
    """Batches with frames missing anywhere, with frames twice, full ones and empty ones, in rooms that fit or not."""
    for slots, share, extra in ((1, 1.0, 0), (5, 0.7, 3), (17, 0.3, 100), (3, 0.0, 40), (most, 0.5, 1)):
        chosen = np.where(rng.random(slots) < share, rng.integers(0, len(store), slots), -1)
        if slots == most:
            chosen[-2] = 0  # sizes that a sum over slots meets late do count
        need = store.size(chosen[chosen >= 0])
        yield chosen.tolist(), Capacity(slots, need.atoms + extra, need.pairs + 2 * extra)


def tensors(batch: PackedBatch | Pairs) -> Iterator[tuple[str, Tensor | None]]:
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Pairs):
            yield from tensors(value)
        else:
            yield field.name, value


def assert_same(found: PackedBatch, expected: PackedBatch) -> None:
    """To the bit, NaN being equal to itself."""
    for (name, one), (_, other) in zip(tensors(found), tensors(expected), strict=True):
        if one is None or other is None:
            assert one is other, name
        else:
            assert one.dtype == other.dtype and one.shape == other.shape, name
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
