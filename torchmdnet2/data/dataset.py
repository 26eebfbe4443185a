"""Data sets: samples by index, subsets and concatenations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import numpy as np

from .collate import collate, select
from .frame_facts import FrameFacts, read_facts
from .sample import Sample

__all__ = ["ConcatDataset", "Dataset", "Subset"]


class Dataset(ABC):
    """Samples by index; all in the package's units, in float64.

    Attributes:
        kinds: words that the source has as the kind of a frame, where they are known (see `kinds.py`).
    """

    kinds: Collection[str] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, counted from the end where negative.

        Raises:
            IndexError: there is no such sample.
            BadData: the file is damaged, or holds values that cannot be used.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a sample comes from, for messages: "train.xyz, frame 12".

        Args:
            index: of the sample, from 0.
        """

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        """Samples in the order given, as one batch; at least one.

        The result is that of `collate`; data sets that keep their frames packed are much faster.

        Args:
            indices: of the samples, from 0.
        """
        return collate([self[int(i)] for i in indices])

    def sizes(self) -> np.ndarray:
        """Number of atoms of every sample, [len(self)]."""
        return np.array([self[i].system.num_atoms for i in range(len(self))], dtype=np.int64)

    def facts_of(self, frames: np.ndarray) -> FrameFacts:
        """What some frames, [S], contribute to `statistics`.

        Args:
            frames: indices of the frames, [S].

        Raises:
            BadData: a frame cannot be used.
        """
        return read_facts(self.batch, frames)

    def summary(self) -> str:
        """What is in the data set and what is not, in words."""
        return f"{len(self)} frames"

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


class Subset(Dataset):
    """Some samples of a data set, in a given order.

    Args:
        dataset: the whole.
        indices: which of its samples.

    Raises:
        IndexError: an index is outside 0 … len(dataset) − 1.
    """

    def __init__(self, dataset: Dataset, indices: Sequence[int]):
        self.dataset, self.indices, self.kinds = dataset, [int(i) for i in indices], dataset.kinds
        for i in self.indices:
            if not 0 <= i < len(dataset):
                raise IndexError(f"frame {i} is outside the data set's {len(dataset)} frames")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.dataset[self.indices[index]]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        return self.dataset.batch([self.indices[int(i)] for i in indices])

    def sizes(self) -> np.ndarray:
        return self.dataset.sizes()[self.indices]

    def name(self, index: int) -> str:
        return self.dataset.name(self.indices[index])


class ConcatDataset(Dataset):
    """Several data sets one after the other."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.datasets = list(datasets)
        self._ends = list(accumulate(len(dataset) for dataset in self.datasets))
        self.kinds = set().union(*(dataset.kinds for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, index: int) -> tuple[Dataset, int]:
        index = checked_index(index, len(self))
        part = bisect_right(self._ends, index)
        return self.datasets[part], index - (self._ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> Sample:
        dataset, inner = self._locate(index)
        return dataset[inner]

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        chosen = np.asarray(indices, dtype=np.int64)
        part = np.searchsorted(self._ends, chosen, side="right")
        starts = np.array([0, *self._ends])
        order = np.argsort(part, kind="stable")
        batches = [
            self.datasets[k].batch(chosen[order[part[order] == k]] - starts[k]) for k in np.unique(part).tolist()
        ]
        return batches[0] if len(batches) == 1 else select(collate(batches), np.argsort(order))

    def sizes(self) -> np.ndarray:
        return np.concatenate([dataset.sizes() for dataset in self.datasets])

    def name(self, index: int) -> str:
        dataset, inner = self._locate(index)
        return dataset.name(inner)

    def summary(self) -> str:
        return "\n".join(dataset.summary() for dataset in self.datasets)


def checked_index(index: int, length: int) -> int:
    """The index counted from the start.

    Raises:
        IndexError: it is outside −length … length − 1.
    """
    if not -length <= index < length:
        raise IndexError(f"frame {index} is outside the data set's {length} frames")
    return int(index) % length
