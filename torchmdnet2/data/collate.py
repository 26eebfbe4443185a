"""Joining samples to a batch, and selecting structures of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..system import System
from .columns import expand
from .labels import LABELS, label_names
from .sample import Sample

__all__ = ["collate", "select"]


def collate(samples: Sequence[Sample]) -> Sample:
    """One batch that holds the samples in order.

    Args:
        samples: at least one, each with B ≥ 1 structures.

    Returns:
        The batch. It has every label that one of the samples has, with NaN where a sample does not have it.

    Raises:
        ValueError: no sample is given.
    """
    if not samples:
        raise ValueError("collate needs at least one sample")
    labels = {}
    for name in label_names(*(s.labels for s in samples)):
        known, shape = next(s.labels[name] for s in samples if name in s.labels), LABELS[name]
        labels[name] = torch.cat(
            [s.labels[name] if name in s.labels else known.new_full(shape.of(s.system), torch.nan) for s in samples]
        )
    return Sample(System.concatenate([s.system for s in samples]), labels)


def select(batch: Sample, frames: np.ndarray, starts: np.ndarray | None = None) -> Sample:
    """Some structures of a batch, in the order given.

    Args:
        batch: B structures whose atoms follow each other.
        frames: indices of structures, each any number of times.
        starts: [B + 1] first atom of each structure; computed where it is not given.

    Returns:
        The chosen ones, with copies of all numbers.
    """
    system = batch.system
    if starts is None:
        starts = np.concatenate([[0], system.atom_counts.cumsum(0).numpy()])
    frames = np.asarray(frames, dtype=np.int64)
    first = starts[frames]
    count = starts[frames + 1] - first
    chosen, atoms = torch.from_numpy(frames), torch.from_numpy(expand(first, count))
    structures = System(
        z=system.z[atoms],
        pos=system.pos[atoms],
        batch=torch.from_numpy(np.repeat(np.arange(len(frames)), count)),
        cell=system.cell[chosen],
        pbc=system.pbc[chosen],
        charge=system.charge[chosen],
        spin=system.spin[chosen],
    )
    return Sample(
        structures, {name: value[atoms if LABELS[name].per_atom else chosen] for name, value in batch.labels.items()}
    )
