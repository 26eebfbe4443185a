"""Samples kept in memory, packed into a few large tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .check import check_sample
from .collate import collate, select
from .dataset import Dataset, checked_index
from .labels import label_names
from .reader import Reader
from .sample import Sample

__all__ = ["InMemoryDataset", "LoadedDataset"]


class InMemoryDataset(Dataset):
    """A data set made of given samples.

    They are packed into one tensor per quantity: small, quick to send to a worker, and shared by forked ones.

    Args:
        samples: each one structure, in the package's units.
        names: for messages; default "frame k".

    Raises:
        BadData: a sample does not pass `check_sample`.
        ValueError: names and samples differ in number.
    """

    def __init__(self, samples: Sequence[Sample], names: Sequence[str] | None = None):
        if names is not None and len(names) != len(samples):
            raise ValueError(f"there are {len(samples)} samples and {len(names)} names")
        names = list(names) if names is not None else [f"frame {k}" for k in range(len(samples))]
        checked = [
            check_sample(sample, where).to(dtype=torch.float64) for sample, where in zip(samples, names, strict=True)
        ]
        self._pack(checked, names)

    def _pack(self, parts: Sequence[Sample], names: list[str]) -> None:
        """Keep checked samples; each may be several structures with the same labels."""
        self._names = names
        self._all = collate(parts) if parts else None
        sizes = [part.system.num_systems for part in parts]
        self._present = {
            name: np.repeat([name in part.labels for part in parts], sizes)
            for name in label_names(*(part.labels for part in parts))
        }
        if self._all is not None:
            counts = self._all.system.atom_counts.numpy()
            self._starts = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        return self.batch([checked_index(index, len(self))])

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        assert self._all is not None  # there is at least one sample
        frames = np.asarray(indices, dtype=np.int64)
        labels = {name: self._all.labels[name] for name, has in self._present.items() if has[frames].any()}
        return select(Sample(self._all.system, labels), frames, self._starts)

    def sizes(self) -> np.ndarray:
        return np.diff(self._starts) if len(self) else np.zeros(0, dtype=np.int64)

    def name(self, index: int) -> str:
        return self._names[checked_index(index, len(self))]


class LoadedDataset(InMemoryDataset):
    """All frames of a reader, read once and kept.

    Args:
        reader: the source.
        require_keys: False where another file may have the keys that were asked for.

    Attributes:
        asked, counts, available, doubts, kinds, stated: as the reader's.

    Raises:
        BadData: a frame cannot be read or used; a key is in no frame.
    """

    def __init__(self, reader: Reader, require_keys: bool = True):
        self.path = reader.path
        parts, names = [], []
        for chunk in reader.chunks():
            parts.append(chunk.sample)
            names += [f"{chunk.where}, frame {chunk.first + k}" for k in range(chunk.sample.system.num_systems)]
        self.asked, self.counts, self.available = reader.asked, reader.counts, reader.available
        self.kinds, self.stated, self.doubts = reader.kinds, reader.stated, list(reader.doubts)
        if require_keys:
            reader.require_keys()
        self._pack(parts, names)
        self._summary = reader.summary()

    def summary(self) -> str:
        return self._summary
