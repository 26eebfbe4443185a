"""Samples kept in memory, packed into a few large tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..system import System
from .check import check_sample
from .collate import collate
from .dataset import LABELS, Dataset, Sample, checked_index, label_names

__all__ = ["InMemoryDataset"]


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
        self._names = list(names) if names is not None else [f"frame {k}" for k in range(len(samples))]
        checked = [
            check_sample(sample, where).to(dtype=torch.float64)
            for sample, where in zip(samples, self._names, strict=True)
        ]
        self._all = collate(checked) if checked else None
        self._present = [frozenset(sample.labels) for sample in checked]
        sizes = torch.tensor([0, *(sample.system.num_atoms for sample in checked)])
        self._starts: list[int] = sizes.cumsum(0).tolist()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        index = checked_index(index, len(self))
        assert self._all is not None  # there is at least one sample
        whole, atoms = self._all.system, slice(self._starts[index], self._starts[index + 1])
        one = slice(index, index + 1)
        # copies: a view would take the whole tensor along when a worker sends it, and could be written to
        system = System(
            z=whole.z[atoms].clone(),
            pos=whole.pos[atoms].clone(),
            cell=whole.cell[one].clone(),
            pbc=whole.pbc[one].clone(),
            charge=whole.charge[one].clone(),
            spin=whole.spin[one].clone(),
        )
        labels = {
            name: self._all.labels[name][atoms if LABELS[name].per_atom else one].clone()
            for name in label_names(self._present[index])
        }
        return Sample(system, labels)

    def name(self, index: int) -> str:
        return self._names[checked_index(index, len(self))]
