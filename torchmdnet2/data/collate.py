"""Several samples as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..system import System
from .dataset import LABELS, Sample, label_names

__all__ = ["collate"]


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
