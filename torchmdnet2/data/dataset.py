"""Samples (structures with labels) and the data sets that hold them.

Shapes: N atoms of all structures together, B structures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..system import System

if TYPE_CHECKING:
    from .frame_facts import FrameFacts

__all__ = ["LABELS", "SHAPES", "ConcatDataset", "Dataset", "LabelShape", "Sample", "Subset", "label_names"]


class LabelShape(NamedTuple):
    """Shape of a label: one row per atom or one per structure, and the shape of a row."""

    per_atom: bool
    row: tuple[int, ...]

    def of(self, system: System) -> tuple[int, ...]:
        """The label's shape for these structures."""
        return self.shape(system.num_atoms, system.num_systems)

    def shape(self, num_atoms: int, num_systems: int = 1) -> tuple[int, ...]:
        """The same by their numbers."""
        return (num_atoms if self.per_atom else num_systems, *self.row)


SHAPES = {
    "scalar": LabelShape(False, ()),
    "vector": LabelShape(False, (3,)),
    "tensor": LabelShape(False, (3, 3)),
    "atom_scalar": LabelShape(True, ()),
    "atom_vector": LabelShape(True, (3,)),
    "atom_tensor": LabelShape(True, (3, 3)),
}
"""shape of a property -> its LabelShape."""


class Labels(dict[str, LabelShape]):
    """Label name -> shape. Further labels say their shape themselves: "scalar:gap", "atom_scalar:shift"."""

    def __missing__(self, name: str) -> LabelShape:
        shape, _, rest = name.partition(":")
        if not rest or shape not in SHAPES:
            raise KeyError(name)
        return SHAPES[shape]

    def __contains__(self, name: object) -> bool:
        shape, _, rest = str(name).partition(":")
        return super().__contains__(name) or (bool(rest) and shape in SHAPES)


LABELS = Labels(
    energy=LabelShape(False, ()),
    forces=LabelShape(True, (3,)),
    stress=LabelShape(False, (3, 3)),
    dipole=LabelShape(False, (3,)),
    charges=LabelShape(True, ()),
)
"""label name -> its shape: energy eV, forces eV/Å, stress eV/Å³ (tensile positive), dipole e·Å, charges e."""


def label_names(*names: Iterable[str]) -> list[str]:
    """All given label names once: those of LABELS in its order, then the further ones, sorted."""
    found = set().union(*names)
    return [name for name in LABELS if name in found] + sorted(found - LABELS.keys())


@dataclass(eq=False)
class Sample:
    """One structure, or a batch of them, with its labels.

    Args:
        system: B structures; from a data set B = 1 and positions are float64.
        labels: name -> values in the package's units: energy [B] eV, forces [N, 3] eV/Å, stress [B, 3, 3] eV/Å³
            (tensile positive), dipole [B, 3] e·Å, charges [N] e, and further ones named by their shape, as in
            "scalar:gap" [B] (see `SHAPES`). A label that is not known is absent, or NaN.
    """

    system: System
    labels: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sample:
        """The same on another device or in another floating-point type; energies stay in float64.

        A total energy of −10⁴ eV has an error of 10⁻³ eV in float32, which is as large as what is to be learned.
        """
        labels = {
            name: value.to(device=device, dtype=None if name == "energy" else dtype)
            for name, value in self.labels.items()
        }
        return Sample(self.system.to(device, dtype), labels)


class Dataset(ABC):
    """Samples by index; all in the package's units, in float64."""

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
        """Where a sample comes from, for messages: "train.xyz, frame 12"."""

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        """Samples in the order given, as one batch; at least one.

        The result is that of `collate`; data sets that keep their frames packed are much faster.
        """
        from .collate import collate

        return collate([self[int(i)] for i in indices])

    def sizes(self) -> np.ndarray:
        """Number of atoms of every sample, [len(self)]."""
        return np.array([self[i].system.num_atoms for i in range(len(self))], dtype=np.int64)

    def facts_of(self, frames: np.ndarray) -> FrameFacts:
        """What some frames, [S], contribute to `statistics`.

        Raises:
            BadData: a frame cannot be used.
        """
        from .frame_facts import read_facts

        return read_facts(self, frames)

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
        self.dataset, self.indices = dataset, [int(i) for i in indices]
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
        from .collate import collate, select

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
