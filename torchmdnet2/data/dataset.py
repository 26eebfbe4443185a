"""Data sets: samples by index, batches of samples, and the columns of numbers that caches are made of.

A column `name` consists of the file name.bin, the little-endian numbers of its rows, and the file name.crc, the CRC-32
of every 64 KiB. A block is checked when it is first read, so that opening is fast and damage is never taken for data.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..errors import BadData
from ..system import System
from .labels import LABELS, label_names

__all__ = [
    "BLOCK", "Column", "ColumnWriter", "ConcatDataset", "Dataset", "FrameFacts", "Sample", "Subset", "collate",
    "expand", "read_facts", "select", "structure_keys",
]  # fmt: skip


BLOCK = 2**16
"""Bytes under one checksum."""

_REMEDY = "Delete the folder; it will be made again"


def expand(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the indices of several ranges, one after the other: [2, 7], [3, 1] -> [2, 3, 4, 7].

    Args:
        first: [B] first index of each range.
        count: [B] length of each range.
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - count), count) + np.arange(total)


class ColumnWriter:
    """Appends rows to a column.

    Args:
        folder: folder for name.bin and name.crc.
        name: name of the column.
        dtype: type of its numbers, which are written little-endian.
        row: shape of a row.
    """

    def __init__(self, folder: Path, name: str, dtype: str, row: tuple[int, ...] = ()):
        self.folder, self.name, self.dtype, self.row = folder, name, np.dtype(dtype).newbyteorder("<"), tuple(row)
        self.rows = 0
        self._file: BinaryIO = open(folder / f"{name}.bin", "wb")
        self._sums: list[int] = []
        self._sum = self._filled = 0

    def append(self, rows: np.ndarray) -> None:
        """Add rows, [n, *row]."""
        rows = np.ascontiguousarray(rows, dtype=self.dtype)
        if rows.shape[1:] != self.row:
            raise ValueError(f"column {self.name}: rows have the shape {rows.shape[1:]}, not {self.row}")
        self.rows += len(rows)
        data = memoryview(rows.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._file.write(data)
        while len(data):
            part, data = data[: BLOCK - self._filled], data[BLOCK - self._filled :]
            self._sum = zlib.crc32(part, self._sum)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._sums.append(self._sum)
                self._sum = self._filled = 0

    def fill(self, rows: int, value: float = np.nan) -> None:
        """Append rows of one value until the column has a number of rows."""
        while self.rows < rows:
            self.append(np.full((min(rows - self.rows, 65_536), *self.row), value, dtype=self.dtype))

    def finish(self) -> dict[str, Any]:
        """Flush to disk and return what `Column` needs to read the file, as plain data."""
        if self._filled:
            self._sums.append(self._sum)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        sums = np.array(self._sums, dtype="<u4").tobytes()
        with open(self.folder / f"{self.name}.crc", "wb") as file:
            file.write(sums)
            file.flush()
            os.fsync(file.fileno())
        return {
            "dtype": self.dtype.str,
            "row": list(self.row),
            "rows": self.rows,
            "crc_sha256": hashlib.sha256(sums).hexdigest(),
        }

    def close(self) -> None:
        self._file.close()


class Column:
    """Reads rows of a column through a memory map.

    Args:
        folder: folder of its files.
        name: name of the column.
        facts: the return value of `ColumnWriter.finish`.

    Raises:
        BadData: a file is missing, a length has changed, or the checksums themselves are damaged.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any]):
        self.path = folder / f"{name}.bin"
        dtype, row, rows = np.dtype(facts["dtype"]), tuple(facts["row"]), int(facts["rows"])
        self._row_bytes = dtype.itemsize * int(np.prod(row, dtype=np.int64))
        size = rows * self._row_bytes
        try:
            sums = (folder / f"{name}.crc").read_bytes()
            found = self.path.stat().st_size
        except OSError as error:
            raise BadData(f"{self.path}: this part of the cache cannot be read: {error}. {_REMEDY}") from error
        if found != size:
            raise BadData(
                f"{self.path}: the cache is damaged: this file has {found} bytes instead of {size}. {_REMEDY}"
            )
        if hashlib.sha256(sums).hexdigest() != facts["crc_sha256"]:
            raise BadData(f"{folder / name}.crc: the checksums are damaged. {_REMEDY}")
        self._sums = np.frombuffer(sums, dtype="<u4")
        self._checked = np.zeros(len(self._sums), dtype=bool)
        if size:
            self._bytes = np.asarray(np.memmap(self.path, dtype=np.uint8, mode="r"))
        else:  # an empty file cannot be mapped
            self._bytes = np.zeros(0, dtype=np.uint8)
        self._rows: np.ndarray = self._bytes.view(dtype).reshape(rows, *row)

        self._made_of = (folder, name, dict(facts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file name only: another process maps the file again."""
        return Column, self._made_of

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return len(self._bytes)

    def all(self) -> np.ndarray:
        """Return all rows, checked; a view of the file."""
        self.check(np.zeros(1, dtype=np.int64), np.array([len(self)]))
        return self._rows

    def rows(self, index: np.ndarray) -> np.ndarray:
        """Return single rows, [len(index), *row]."""
        self.check(index, np.ones_like(index))
        return self._rows.take(index, axis=0)

    def ranges(self, first: np.ndarray, count: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
        """Return the rows of several ranges, one after the other, [sum(count), *row].

        Args:
            first, count: [B] as for `expand`.
            index: `expand(first, count)`, if it is known already.
        """
        self.check(first, count)
        return self._rows.take(expand(first, count) if index is None else index, axis=0)

    def check(self, first: np.ndarray, count: np.ndarray) -> None:
        """Raise BadData if one of the rows is damaged; each block is checked once."""
        if not count.all():
            first, count = first[count > 0], count[count > 0]
        low = first * self._row_bytes // BLOCK
        high = ((first + count) * self._row_bytes - 1) // BLOCK
        if len(low) and int((high - low).max()) > 1:
            blocks = np.unique(expand(low, high - low + 1))
        else:
            blocks = np.concatenate([low, high])
        new = blocks[~self._checked[blocks]]
        for block in np.unique(new).tolist() if len(new) else ():
            part = memoryview(self._bytes[block * BLOCK : (block + 1) * BLOCK])  # type: ignore[arg-type]
            if zlib.crc32(part) != int(self._sums[block]):
                raise BadData(
                    f"{self.path}: the cache is damaged between bytes {block * BLOCK} and "
                    f"{min((block + 1) * BLOCK, self.nbytes)}. {_REMEDY}"
                )
            self._checked[block] = True


# --- Samples: structures with labels ---


@dataclass(eq=False)
class Sample:
    """One structure, or a batch of them, with its labels.

    Args:
        system: B structures; from a data set B = 1 and positions are float64.
        labels: name -> values in the package's units: energy [B] eV, forces [N, 3] eV/Å, stress [B, 3, 3] eV/Å³
            (tensile positive), dipole [B, 3] e·Å, charges [N] e, and further ones named by their shape, such as
            "scalar:gap" [B] (see `labels.SHAPES`). A missing label is absent or NaN.
    """

    system: System
    labels: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sample:
        """Return a copy on a device or in a floating-point type; energies stay in float64.

        In float32 a total energy of −10⁴ eV would have an error of 10⁻³ eV, as large as errors of a good model.

        Args:
            device: device of the copy; None keeps it.
            dtype: type of positions, cells and labels other than energies; None keeps it.
        """
        labels = {
            name: value.to(device=device, dtype=None if name == "energy" else dtype)
            for name, value in self.labels.items()
        }
        return Sample(self.system.to(device, dtype), labels)


# --- Joining samples to a batch, and selecting structures of a batch ---


def collate(samples: Sequence[Sample]) -> Sample:
    """Join samples, in order, into one batch.

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
    """Return some structures of a batch, in the given order.

    Args:
        batch: B structures whose atoms follow each other.
        frames: indices of structures, each any number of times.
        starts: [B + 1] first atom of each structure; None computes it.

    Returns:
        The chosen structures, with copies of all numbers.
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


# --- Contributions of single frames to the statistics of a data set, computed in one pass ---

_CHUNK = 1024  # frames at a time
_RESOLUTION = 1e-5  # Å
_ODD = [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F]


@dataclass(frozen=True, eq=False)
class FrameFacts:
    """Facts of single frames from which the statistics of any choice of frames follow.

    Attributes:
        elements: [K] atomic numbers, ascending.
        counts: [S, K] atoms of each element.
        labelled: label -> [S] whether the frame has it, at least in part.
        energies: [S] eV, NaN where a frame has none.
        charges, spins: [S] total charge in e, and multiplicity.
        force_square, force_count: [S] sum of the squared force components, eV²/Å², and their number.
        keys: [S] numbers that are equal for equal structures; see `structure_keys`.
    """

    elements: np.ndarray
    counts: np.ndarray
    labelled: dict[str, np.ndarray]
    energies: np.ndarray
    charges: np.ndarray
    spins: np.ndarray
    force_square: np.ndarray
    force_count: np.ndarray
    keys: np.ndarray

    def of(self, frames: np.ndarray) -> FrameFacts:
        """Return the facts of some frames, in the given order, without elements and labels that none of them has."""
        counts = self.counts[frames]
        there = counts.any(0)
        labelled = {name: has[frames] for name, has in self.labelled.items()}
        rest = {name: getattr(self, name)[frames]
                for name in ("energies", "charges", "spins", "force_square", "force_count", "keys")}  # fmt: skip
        return FrameFacts(
            self.elements[there], counts[:, there], {n: has for n, has in labelled.items() if has.any()}, **rest
        )

    @classmethod
    def joined(cls, parts: Sequence[FrameFacts]) -> FrameFacts:
        """Join the facts of several groups of frames, one after the other."""
        elements = np.unique(np.concatenate([part.elements for part in parts]))
        sizes = [len(part.energies) for part in parts]
        counts = np.zeros((sum(sizes), len(elements)), dtype=np.int32)
        ends = np.cumsum(sizes)
        for part, end, size in zip(parts, ends, sizes, strict=True):
            counts[end - size : end, np.searchsorted(elements, part.elements)] = part.counts
        names = dict.fromkeys(name for part in parts for name in part.labelled)
        labelled = {
            name: np.concatenate(
                [part.labelled.get(name, np.zeros(n, dtype=bool)) for part, n in zip(parts, sizes, strict=True)]
            )
            for name in names
        }
        rest = {name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("energies", "charges", "spins", "force_square", "force_count", "keys")}  # fmt: skip
        return cls(elements, counts, labelled, **rest)


def read_facts(read: Callable[[np.ndarray], Sample], frames: np.ndarray) -> FrameFacts:
    """Compute the facts of frames.

    Args:
        read: function that returns frames as one batch, such as `Dataset.batch`.
        frames: [S] indices, at least one.

    Raises:
        BadData: a frame cannot be used.
    """
    return FrameFacts.joined([_facts(read(frames[first : first + _CHUNK])) for first in range(0, len(frames), _CHUNK)])


def _facts(batch: Sample) -> FrameFacts:
    system, labels = batch.system, batch.labels
    owner, count = system.batch.numpy(), system.num_systems
    table = np.bincount(owner * 256 + system.z.numpy(), minlength=count * 256).reshape(count, 256)
    present = np.flatnonzero(table.any(0))
    labelled = {}
    for name, value in labels.items():
        there = ~torch.isnan(value).reshape(len(value), -1).all(1).numpy()
        labelled[name] = np.bincount(owner[there], minlength=count) > 0 if LABELS[name].per_atom else there
    square: np.ndarray = np.zeros(count)
    number: np.ndarray = np.zeros(count, dtype=np.int64)
    if "forces" in labels:
        forces = labels["forces"].numpy()
        known = ~np.isnan(forces)
        square = np.bincount(owner, weights=np.square(np.where(known, forces, 0.0)).sum(1), minlength=count)
        number = np.bincount(owner, weights=known.sum(1), minlength=count).astype(np.int64)
    return FrameFacts(
        present,
        table[:, present].astype(np.int32),
        labelled,
        labels["energy"].numpy() if "energy" in labels else np.full(count, np.nan),
        system.charge.numpy().astype(np.int32),
        system.spin.numpy().astype(np.int32),
        square,
        number,
        structure_keys(batch),
    )


def structure_keys(batch: Sample) -> np.ndarray:
    """Return a number per structure; equal for equal elements, positions (to 1e-5 Å), cell, charge and spin.

    Two different structures have the same number with a probability of 2⁻⁶⁴. Equal structures whose positions round
    differently at 1e-5 Å count as different.

    Returns:
        [B] uint64.
    """
    system = batch.system
    owner = system.batch.numpy()
    sizes = np.bincount(owner, minlength=system.num_systems)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows = np.column_stack([_whole(system.pos.numpy()), system.z.numpy(), place])
    atoms = _mixed(rows)
    ends = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(atoms)])  # sums and differences are modulo 2⁶⁴
    last = np.cumsum(sizes)
    sums = ends[last] - ends[last - sizes]
    cells = _whole(system.cell.numpy().reshape(-1, 9))
    whole = np.column_stack([system.charge.numpy().astype(np.int64), system.spin.numpy(), system.pbc.numpy()])
    return _mixed(np.column_stack([sums.view(np.int64), cells, whole]))


def _whole(lengths: np.ndarray) -> np.ndarray:
    return np.rint(lengths * (1 / _RESOLUTION)).astype(np.int64)


def _mixed(rows: np.ndarray) -> np.ndarray:
    """Return a hash of each row of integers, [n]."""
    found = np.zeros(len(rows), dtype=np.uint64)
    for k, column in enumerate(rows.T):
        found = (found ^ column.astype(np.int64).view(np.uint64)) * np.uint64(_ODD[k % len(_ODD)])
        found ^= found >> np.uint64(29)
    return found


# --- Data sets: samples by index, subsets and concatenations ---


class Dataset(ABC):
    """A sequence of samples, in the package's units and in float64.

    Attributes:
        kinds: words by which the source names kinds of frames, if known (see `labels.py`).
    """

    kinds: Collection[str] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`; negative indices count from the end.

        Raises:
            IndexError: the data set has no such sample.
            BadData: the file is damaged, or holds values that cannot be used.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample for messages, such as "train.xyz, frame 12".

        Args:
            index: index of the sample, from 0.
        """

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        """Return samples in the given order as one batch.

        The result is the one of `collate`; data sets with packed frames are much faster.

        Args:
            indices: indices of the samples, from 0; at least one.
        """
        return collate([self[int(i)] for i in indices])

    def sizes(self) -> np.ndarray:
        """Return the number of atoms of each sample, [len(self)]."""
        return np.array([self[i].system.num_atoms for i in range(len(self))], dtype=np.int64)

    def facts_of(self, frames: np.ndarray) -> FrameFacts:
        """Return what some frames [S] contribute to `statistics`.

        Args:
            frames: indices of the frames, [S].

        Raises:
            BadData: a frame cannot be used.
        """
        return read_facts(self.batch, frames)

    def summary(self) -> str:
        """Return a sentence on what the data set contains and lacks."""
        return f"{len(self)} frames"

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))


class Subset(Dataset):
    """A selection of the samples of a data set, in a given order.

    Args:
        dataset: the data set.
        indices: indices of the selected samples.

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
    """Several data sets, one after the other, as one.

    Args:
        datasets: at least one.
        labels: for each data set the labels that all its structures get, name -> value. A weight multiplies the
            weights that frames already have.
    """

    def __init__(self, datasets: Sequence[Dataset], labels: Sequence[Mapping[str, float]] | None = None):
        self.datasets = list(datasets)
        self.labels = [dict(given) for given in labels or [{}] * len(self.datasets)]
        self._ends = list(accumulate(len(dataset) for dataset in self.datasets))
        self.kinds = set().union(*(dataset.kinds for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, index: int) -> tuple[Dataset, int]:
        index = checked_index(index, len(self))
        part = bisect_right(self._ends, index)
        return self.datasets[part], index - (self._ends[part - 1] if part else 0)

    def __getitem__(self, index: int) -> Sample:
        return self.batch([checked_index(index, len(self))])

    def _part(self, k: int, indices: np.ndarray) -> Sample:
        """Return structures of one data set, with the labels that all of them get."""
        sample = self.datasets[k].batch(indices)
        for name, value in self.labels[k].items():
            row = torch.full((sample.system.num_systems,), value, dtype=torch.float64)
            own = sample.labels.get(name)
            sample.labels[name] = row if own is None else torch.where(torch.isnan(own), row, own * row)
        return sample

    def batch(self, indices: Sequence[int] | np.ndarray) -> Sample:
        chosen = np.asarray(indices, dtype=np.int64)
        part = np.searchsorted(self._ends, chosen, side="right")
        starts = np.array([0, *self._ends])
        order = np.argsort(part, kind="stable")
        batches = [self._part(k, chosen[order[part[order] == k]] - starts[k]) for k in np.unique(part).tolist()]
        return batches[0] if len(batches) == 1 else select(collate(batches), np.argsort(order))

    def sizes(self) -> np.ndarray:
        return np.concatenate([dataset.sizes() for dataset in self.datasets])

    def name(self, index: int) -> str:
        dataset, inner = self._locate(index)
        return dataset.name(inner)

    def summary(self) -> str:
        return "\n".join(dataset.summary() for dataset in self.datasets)


def checked_index(index: int, length: int) -> int:
    """Return the index counted from the start.

    Raises:
        IndexError: it is outside −length … length − 1.
    """
    if not -length <= index < length:
        raise IndexError(f"frame {index} is outside the data set's {length} frames")
    return int(index) % length
