"""Base class and registry of data formats.

A reader reads its files once, in order, with a bounded number of frames in memory. A format is a class derived from
`Reader` (or from `FrameReader`, which needs one method) and registered under a name:

    @register_format("mine")
    class Mine(FrameReader):
        extensions = ("mine",)

        def frames(self):
            yield Frame(numbers, positions, cell, pbc, {"energy": energy, "forces": forces})

A format with variants stands for the formats of a library: "dpdata/deepmd/npy" is the variant "deepmd/npy" of "dpdata".
For formats of ase.io the name alone is enough.
"""

from __future__ import annotations

import glob as _glob
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ..errors import BadData
from ..registry import FORMATS, OF_PLUGINS, did_you_mean
from ..system import System
from .check import check_batch, check_sample
from .dataset import Dataset, Sample, checked_index, collate, select
from .labels import Names, label_names, missing_key

__all__ = [
    "FORMATS",
    "Chunk",
    "Format",
    "FrameRow",
    "InMemoryDataset",
    "LoadedDataset",
    "Reader",
    "data_files",
    "files_in",
    "find_format",
    "first_words",
    "format_of",
    "has_format",
    "make_readers",
    "register_format",
    "stacked",
]


@dataclass(eq=False)
class Chunk:
    """A run of consecutive frames of a source.

    Attributes:
        sample: B structures, in the package's units, float64 and checked; all of them have the same labels.
        where: name of their source, such as "train.xyz" or "train.h5, group 'a'".
        first: number of the first frame in the source; frame k of the chunk is called f"{where}, frame {first + k}".
    """

    sample: Sample
    where: str
    first: int

    @property
    def names(self) -> list[str]:
        """Names of the frames, for messages."""
        return [f"{self.where}, frame {self.first + k}" for k in range(self.sample.system.num_systems)]


class Reader(ABC):
    """Base class of a data format: reads one file, or files that belong together.

    `register_format` gives it a name. The class is called with a path, `keys` and `units` (see `open_dataset`), and
    with the variant if the format has variants.

    Attributes:
        extensions: extensions of files that have this format unless another one is given.
        folders: True if a path may be a folder.
        path: the file or folder, for messages.
        files: all files that are read.
        asked: label -> its name in the file, for labels that must be in at least one frame.
        keys: label -> its name in the file, for all labels that are read if present.
        counts: label -> number of frames so far that have it.
        available: names of all labels so far.
        stated: charge, spin and units that frames state by entries outside `keys`: name -> the statement.
        doubts: sentences on entries that put the labels in doubt (see `ase_formats.Doubts`).
        kinds: words so far that name kinds of frames, at most 1,000.
        num_frames: number of frames so far.
        fraction: part of the files that has been read, 0 to 1; 0 if it is not known.
        leave_out: function that gets a line about each frame that cannot be used, which is then left out. With None it
            is an error, as it always is where the reader cannot find the next frame.
        first, last: number of the first frame that it reads, and whether it reads all further ones: see `parts`.
        portable: whether this is one of several `parts` that holds the text of its frames, so that another process can
            read it.
        left_out: lines about the frames that a part left out.
    """

    extensions: ClassVar[tuple[str, ...]] = ()
    folders: ClassVar[bool] = False
    path: str
    files: list[str]
    asked: dict[str, str]
    keys: dict[str, str]
    counts: Counter[str]
    available: set[str]
    stated: dict[str, str] = {}  # noqa: RUF012 (readers have their own)
    doubts: Iterable[str] = ()
    kinds: Collection[str] = ()
    num_frames: int = 0
    fraction: float = 0.0
    leave_out: Callable[[str], None] | None = None
    first: int = 0
    last: bool = True
    portable: bool = False
    left_out: list[str]

    @classmethod
    def variants(cls) -> Collection[str]:
        """Return the variants of the format, such as "deepmd/npy" in "dpdata/deepmd/npy"; none by default."""
        return ()

    @classmethod
    def require(cls, variant: str | None) -> None:
        """Check, before a file is read, that this format can be read.

        Raises:
            MissingBackend: a required package is not installed.
            BadData: the format has no such variant.
        """
        if variant is not None and variant not in (variants := cls.variants()):
            name = next(name for name in FORMATS if FORMATS[name] is cls)
            if not variants:
                raise BadData(f"unknown data format '{name}/{variant}': {name} has no variants")
            hint = did_you_mean(variant, variants) or "."
            raise BadData(f"unknown data format '{name}/{variant}'{hint} {name} reads {', '.join(sorted(variants))}")

    @classmethod
    def guess(cls, path: str) -> str:
        """Return the name of this format, for an error message, if the file or folder looks like one; else ""."""
        return ""

    @classmethod
    def readers(cls, paths: Sequence[str], keys: Names, units: Names, variant: str | None) -> list[Reader]:
        """Return the readers of some paths: one for each path, unless files belong together."""
        more = {} if variant is None else {"variant": variant}
        return [cls(path, keys, units, **more) for path in paths]  # type: ignore[call-arg]

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Names) -> list[str]:
        """Return all files that are read for these paths."""
        return [file for path in paths for file in files_in(path)]

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield all frames in order.

        Raises:
            BadData: a frame is damaged or cannot be used; the message names it.
        """

    def parts(self, size: int) -> Iterator[Reader]:
        """Yield readers that together read the frames of this one, for other processes; this one if it has no parts.

        Chunks, names of frames and lines for `leave_out` of the parts, in order, are those of this reader, but a chunk
        also ends with its part; where a broken frame is an error, it may be that of an earlier frame. Each part is read
        once, with `chunks`, after which it holds no text, and then given to `absorb`, in order. A part that is not
        `portable` reads its file itself; it may be large, and should be read in this process:

            for part in reader.parts(1024):
                for chunk in part.chunks():  # in any process to which the part is sent, and which sends it back
                    ...
                reader.absorb(part)

        Args:
            size: number of frames of a part; parts of large frames have fewer.

        Raises:
            BadData: the file is compressed and not called so, or text in UTF-16.
        """
        yield self

    def absorb(self, part: Reader) -> None:
        """Take over what reading a part has found: all attributes are those of having read its frames here.

        Lines about frames that were left out are given to `leave_out`, which is set before `parts` is called. A part
        that was read in another process has given its warnings there; one about the file as a whole is given here, with
        the last part.
        """
        assert part is self  # which has no parts

    def usable(self, sample: Sample, where: str, first: int) -> Iterator[Chunk]:
        """Yield frames as one checked chunk, or those of them that can be used as chunks of one: see `leave_out`.

        Args:
            sample: structures with the same labels.
            where, first: as of `Chunk`.

        Raises:
            BadData: a frame cannot be used.
        """

        def part(number: int, count: int) -> Sample:
            whole = count == sample.system.num_systems
            return sample if whole else select(sample, np.arange(number - first, number - first + count))

        return self.usable_parts(part, where, first, sample.system.num_systems)

    def usable_parts(self, part: Callable[[int, int], Sample], where: str, first: int, count: int) -> Iterator[Chunk]:
        """Yield frames as `usable`, of a source that is read by parts.

        Args:
            part: function that returns some frames, from the number of the first and how many.
            where, first: as of `Chunk`.
            count: number of frames.

        Raises:
            BadData: a frame cannot be read or used.
        """
        try:
            chunk = Chunk(check_batch(part(first, count), where, first), where, first)
        except BadData as error:
            if self.leave_out is None:
                raise
            if count == 1:
                self.leave_out(str(error))
            for number in range(first, first + count) if count > 1 else ():
                yield from self.usable_parts(part, where, number, 1)
        else:
            yield chunk

    def require_keys(self) -> None:
        """Raise BadData if a given key is in no frame that was read."""
        for name, key in self.asked.items():
            if not self.counts[name]:
                raise missing_key(name, key, self.available, self.path)

    def unread(self) -> set[str]:
        """Return the names of labels in the file that are not read."""
        return self.available - set(self.keys.values())

    def summary(self) -> str:
        """Return a sentence on what the file contains and lacks."""
        size = f"{self.num_frames} frames"
        return describe(self.path, size, self.keys, self.counts, self.asked, self.unread()) + self._as_stated()

    def _as_stated(self) -> str:
        used = ", ".join(f"{name} by {source}" for name, source in self.stated.items())
        return f"; as it states: {used}" if used else ""


def files_in(path: str) -> list[str]:
    """Return the file, or all files below the folder, sorted."""
    return sorted(str(file) for file in Path(path).rglob("*") if file.is_file()) if Path(path).is_dir() else [path]


def describe(
    path: str, size: str, keys: Iterable[str], counts: Mapping[str, int], asked: Iterable[str], unread: Iterable[str]
) -> str:
    """Return a sentence on a data set: its size, the number of frames with each label, entries that are not read."""
    found = [f"{name} in {counts[name]}" for name in keys if counts[name] or name in asked]
    text, rest = f"{path}: {size}; {', '.join(found) or 'no labels'}", sorted(unread)
    return f"{text}; not read: {', '.join(rest)}" if rest else text


class FrameRow(NamedTuple):
    """One structure and its labels in their shapes (B = 1) and the package's units, not checked yet."""

    z: np.ndarray  # [N]
    pos: np.ndarray  # [N, 3]
    cell: np.ndarray  # [3, 3]
    pbc: np.ndarray  # [3]
    charge: int
    spin: int
    labels: dict[str, np.ndarray]


def stacked(rows: Sequence[FrameRow]) -> Sample:
    """Join structures with the same labels into one batch."""
    system = System(
        z=torch.from_numpy(np.concatenate([row.z for row in rows]).astype(np.int64)),
        pos=torch.from_numpy(np.concatenate([row.pos for row in rows])),
        batch=torch.from_numpy(np.repeat(np.arange(len(rows)), [len(row.z) for row in rows])),
        cell=torch.from_numpy(np.stack([row.cell for row in rows])),
        pbc=torch.from_numpy(np.stack([row.pbc for row in rows])),
        charge=torch.tensor([row.charge for row in rows], dtype=torch.float64),
        spin=torch.tensor([row.spin for row in rows]),
    )
    labels = {name: torch.from_numpy(np.concatenate([row.labels[name] for row in rows]) if len(rows) > 1
                                     else rows[0].labels[name])
              for name in label_names(rows[0].labels)}  # fmt: skip
    return Sample(system, labels)


# --- Samples kept in memory, packed into a few large tensors ---


class InMemoryDataset(Dataset):
    """A data set of given samples, in memory.

    The samples are packed into one tensor for each quantity. It is small, quickly sent to a worker, and shared with
    forked workers.

    Args:
        samples: samples of one structure each, in the package's units.
        names: names of the samples for messages; default "frame k".

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

    @classmethod
    def packed(cls, parts: Sequence[Sample], names: list[str]) -> InMemoryDataset:
        """Return a data set of checked samples; each may hold several structures with the same labels.

        Args:
            parts: the samples.
            names: names of all structures, for messages.
        """
        made = InMemoryDataset.__new__(InMemoryDataset)
        made._pack(parts, names)
        return made

    def _pack(self, parts: Sequence[Sample], names: list[str]) -> None:
        """Store checked samples; each may hold several structures with the same labels."""
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
        assert self._all is not None  # indices are not empty, so there is a sample
        frames = np.asarray(indices, dtype=np.int64)
        labels = {name: self._all.labels[name] for name, has in self._present.items() if has[frames].any()}
        return select(Sample(self._all.system, labels), frames, self._starts)

    def sizes(self) -> np.ndarray:
        return np.diff(self._starts) if len(self) else np.zeros(0, dtype=np.int64)

    def name(self, index: int) -> str:
        return self._names[checked_index(index, len(self))]


class LoadedDataset(InMemoryDataset):
    """Keeps all frames of a reader in memory, read once.

    Args:
        reader: the reader.
        require_keys: False if another file may have the given keys.

    Attributes:
        asked, counts, available, doubts, kinds, stated: attributes of the reader.

    Raises:
        BadData: a frame cannot be read or used; a key is in no frame.
    """

    def __init__(self, reader: Reader, require_keys: bool = True):
        self.path = reader.path
        parts, names = [], []
        for chunk in reader.chunks():
            parts.append(chunk.sample)
            names += chunk.names
        self.asked, self.counts, self.available = reader.asked, reader.counts, reader.available
        self.kinds, self.stated, self.doubts = reader.kinds, reader.stated, list(reader.doubts)
        if require_keys:
            reader.require_keys()
        self._pack(parts, names)
        self._summary = reader.summary()

    def summary(self) -> str:
        return self._summary


_COMPRESSED = ("gz", "bz2", "xz")


def register_format(name: str) -> Callable[[type[Reader]], type[Reader]]:
    """Class decorator: register a data format under `name`, for `data.format` and `--format`.

    Raises:
        ValueError: another class has this name.
    """
    return FORMATS.register(name)


class Format(NamedTuple):
    """A chosen format.

    Attributes:
        name: the given name.
        reader: class of the format.
        variant: the chosen variant of the class.
    """

    name: str
    reader: type[Reader]
    variant: str | None = None


def find_format(name: str | None) -> Format | None:
    """Return the data format with this name; None for "auto" and None, where the extension of each file decides.

    Raises:
        BadData: the name is unknown; the message suggests the closest one.
        MissingBackend: the package that reads the format is not installed.
    """
    if name is None or name == "auto":
        return None
    head, _, variant = name.partition("/")
    if name in FORMATS:
        found = Format(name, FORMATS[name])
    elif variant and head in FORMATS:
        found = Format(name, FORMATS[head], variant)
    elif name in FORMATS["ase"].variants():
        found = Format(name, FORMATS["ase"], name)
    else:
        known = list(FORMATS)
        hint = did_you_mean(name, [*known, *FORMATS["ase"].variants()]) or "."
        raise BadData(
            f"unknown data format '{name}'{hint} Known: auto, {', '.join(known)}, and those of ase.io; {OF_PLUGINS}"
        )
    found.reader.require(found.variant)
    return found


def format_of(path: str) -> Format:
    """Return the format for a file's extension, before .gz, .bz2 or .xz.

    Raises:
        BadData: the extension does not determine the format.
        MissingBackend: the package that reads the format is not installed.
    """
    extension, known = _extension(path), _extensions()
    if extension not in known:
        raise BadData(
            f"{path}: the extension '.{extension}' does not determine its format{did_you_mean(extension, known) or '.'}"
            f" Known: {', '.join(sorted(known))}; or give the format{_guess(path)}"
        )
    name = known[extension]
    FORMATS[name].require(None)
    return Format(name, FORMATS[name])


def has_format(path: str) -> bool:
    """Return whether `format_of` knows the format of a file by its extension."""
    return _extension(path) in _extensions()


def _extension(path: str) -> str:
    suffixes = [suffix.lstrip(".").lower() for suffix in Path(path).suffixes]
    compressed = suffixes and suffixes[-1] in _COMPRESSED
    return (["", *suffixes])[-2 if compressed else -1]


def _extensions() -> dict[str, str]:
    """Return the formats by extension."""
    return {extension: name for name in reversed(list(FORMATS)) for extension in FORMATS[name].extensions}


def _guess(path: str) -> str:
    """Return the format that a reader or ase.io assumes for a file or folder, as an example for messages."""
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    found = next(filter(None, (FORMATS[name].guess(path) for name in FORMATS)), "")
    if not found and not Path(path).is_dir():
        try:
            found = filetype(path)
        except (UnknownFileTypeError, OSError, UnicodeDecodeError):
            pass
        found = found if found in ioformats else ""
    return f", as in data.format: {found} (--format {found})" if found else " (data.format, --format)"


def first_words(path: str) -> list[str]:
    """Return the words of the first line of a file; none of a folder."""
    if Path(path).is_dir():
        return []
    with open(path, "rb") as file:
        return file.readline(_HEAD).decode(errors="replace").split()


_HEAD = 256  # bytes


def make_readers(paths: Sequence[str], keys: Names, units: Names, formats: Sequence[Format]) -> list[Reader]:
    """Return readers of files, in order, each of the format of its file."""
    made: list[Reader] = []
    for chosen, group in groupby(zip(paths, formats, strict=True), key=lambda pair: pair[1]):
        made += chosen.reader.readers([path for path, _ in group], keys, units, chosen.variant)
    return made


def data_files(paths: Sequence[str | os.PathLike], format: str | None = None) -> list[str]:
    """Return the files that names and patterns match, each once.

    Args:
        paths: names of files, or patterns.
        format: format of the data, if known. In some formats a folder is one set of data.

    Raises:
        FileNotFoundError, BadData: as `open_dataset`.
    """
    files: list[str] = []
    chosen = find_format(format)
    folders = chosen is not None and chosen.reader.folders
    for path in map(str, paths):
        if Path(path).is_file() or (folders and Path(path).is_dir()):
            if not files_in(path):
                raise FileNotFoundError(f"{path} is a folder without files")
            files.append(path)
            continue
        matches = sorted(_glob.glob(path, recursive=True)) if _glob.has_magic(path) else []
        if not matches:
            if Path(path).is_dir():
                raise FileNotFoundError(
                    f"{path} is a folder; name the files in it, as in '{Path(path) / '*.xyz'}', or give the format of "
                    f"the folder{_guess(path)}"
                )
            if Path(path).exists():
                raise BadData(f"{path} is a pipe or a device, which cannot be read several times: give a file")
            folder = Path(path).parent
            there = list(folder.iterdir()) if folder.is_dir() else []
            alike = [p.name for p in there if did_you_mean(Path(path).stem, [p.stem])]  # not by their extensions alone
            near = did_you_mean(Path(path).name, alike)
            raise FileNotFoundError(f"there is no data file {path}{near}")
        files.extend(matches)
    if not files:
        raise FileNotFoundError("no data file is given")
    real = [os.path.realpath(file) for file in files]
    twice = next((file for k, file in enumerate(files) if real[k] in real[:k]), None)
    if twice is not None:
        raise BadData(f"{twice}: the file is named twice; its frames would count double and be in several subsets")
    return files
