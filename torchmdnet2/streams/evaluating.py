"""Errors of a potential, or of an ensemble, on labelled frames: a stream of blocks of frames over devices.

Reading, neighbor search, network and writing overlap, and few blocks are in memory at a time. A frame that cannot be
read or evaluated is a line of the failures and does not end the run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..checkpoint import load
from ..core.devices import devices_of
from ..core.files import claimed
from ..core.pipeline import Journal, Stages, Work, helpers_for, left_text, rate_text, through
from ..data import Dataset, Sample
from ..data.dataset import select
from ..data.reader import Chunk, InMemoryDataset, Reader
from ..data.splits import in_order
from ..engine.check import for_any_composition
from ..errors import BadConfig, BadData
from ..evaluator import Evaluator
from ..potential.potential import Potential, Result
from ..potential.refusals import rename
from ..system import System
from ..training.config.sections import LossConfig
from ..training.reporting.evaluation import MemberErrors, Predictions, Spread
from ..training.steps.loss import ErrorSums
from ..training.steps.trainer import Properties, with_volume
from .batches import BatchCapacity, parts, refusals, without_rest

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console

__all__ = ["Evaluated", "Evaluation", "FrameSource", "evaluate_stream", "files_of", "members_of"]

_BYTES, _MANY = 2**22, 2**12  # bytes and number of frames from which on processes help
_ALL = 2**17  # atoms of which the spread is kept as a whole; of more, that of a random sample
_AT_ONCE = 256  # frames of a data set that are read at once
_FIRST = 1000  # frames that are read before it is an error that none has a label
_BLOCK = {"cpu": 128, "cuda": 2048}  # least number of frames that are computed, written and repeated together
_AT_MOST = {True: 200, False: 2000}  # number of atoms of a batch on a CPU, with autograd in float64 and with kernels
_EXACT = 8192  # number of atoms of a batch on a GPU that plain PyTorch evaluates
_LARGEST = 2**18  # atoms; blocks end when they have as many, so that large structures need no more memory
_ARRAYS = tuple(f.name for f in fields(System))


@dataclass
class FrameBlock:
    """Frames that are computed together. They are arrays, since tensors would be sent as a shared file each.

    Attributes:
        parts: of each run of frames with the same labels, the arrays of its structures and those of its labels.
        names: names of all frames.
        failures: lines about frames before the end of the block that could not be read.
        place: where the block ends: number of a file, and of its frames so far, with those that could not be read.
        fraction: part of the files up to the end of the block, 0 to 1; 0 if it is not known.
        reader: the reader of a `FramePart`.
    """

    parts: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
    names: list[str]
    failures: list[str]
    place: tuple[int, int] = (0, 0)
    fraction: float = 0.0
    reader: Reader | None = None

    @classmethod
    def of(cls, samples: Iterable[Sample], names: list[str], failures: list[str], *more: Any) -> FrameBlock:
        parts = [
            (
                {name: getattr(sample.system, name).numpy() for name in _ARRAYS},
                {name: value.numpy() for name, value in sample.labels.items()},
            )
            for sample in samples
        ]
        return cls(parts, names, failures, *more)

    def read(self) -> FrameBlock:
        """Return the block, which has been read; see `FramePart`."""
        return self

    def dataset(self) -> InMemoryDataset:
        samples = [
            Sample(
                System(**{name: torch.from_numpy(value) for name, value in system.items()}),
                {name: torch.from_numpy(value) for name, value in labels.items()},
            )
            for system, labels in self.parts
        ]
        return InMemoryDataset.packed(samples, self.names)

    @property
    def num_atoms(self) -> int:
        """Number of atoms of all frames."""
        return sum(len(system["z"]) for system, _ in self.parts)

    def __len__(self) -> int:
        return len(self.names)


class _Frames(NamedTuple):
    """Some frames as they are read.

    Attributes:
        failures: lines about frames before them that could not be read.
        sample: the frames; None if there are only failures.
        names: their names.
        end: number of frames of the file up to their end, with those that could not be read.
    """

    failures: list[str]
    sample: Sample | None
    names: list[str]
    end: int


def _read(reader: Reader, lines: list[str], skip: int) -> Iterator[_Frames]:
    """Yield the frames of a reader.

    Args:
        reader: the reader.
        lines: the list to which it adds lines about frames that cannot be read.
        skip: number of frames of the file that are left out, with those that could not be read.
    """
    end = reader.first

    def failures() -> list[str]:
        nonlocal end
        found = lines[max(0, skip - end) :]
        end += len(lines)
        lines.clear()
        return found

    for chunk in reader.chunks():
        before, names = failures(), chunk.names
        left, end = min(len(names), max(0, skip - end)), end + len(names)
        sample = chunk.sample if not left else select(chunk.sample, np.arange(left, len(names)))
        yield _Frames(before, sample if names[left:] else None, names[left:], end)
    yield _Frames(failures(), None, [], end)


@dataclass
class FramePart:
    """Frames of one file that a process reads and computes together.

    Attributes:
        reader: the part.
        skip: as of `_read`.
        file: number of the file.
        fraction: as of `FrameBlock`.
    """

    reader: Reader
    skip: int
    file: int
    fraction: float

    def read(self) -> FrameBlock:
        found = [*_read(self.reader, self.reader.left_out, self.skip)]
        samples = [run.sample for run in found if run.sample is not None]
        names, failures = (
            [name for run in found for name in run.names],
            [line for run in found for line in run.failures],
        )
        return FrameBlock.of(samples, names, failures, (self.file, found[-1].end), self.fraction, self.reader)


class _Chosen(Reader):
    """Reads chosen frames of a data set."""

    def __init__(self, dataset: Dataset, chosen: Sequence[int]):
        self._dataset, self._chosen, self.num_frames, self.files = dataset, chosen, len(chosen), []

    def chunks(self) -> Iterator[Chunk]:
        for first in range(0, len(self._chosen), _AT_ONCE):
            part = self._chosen[first : first + _AT_ONCE]
            yield _NamedChunk(self._dataset.batch(part), "", first, [self._dataset.name(k) for k in part])


@dataclass(eq=False)
class _NamedChunk(Chunk):
    given: list[str]

    @property
    def names(self) -> list[str]:
        return self.given


class FrameSource:
    """Frames in order, in blocks.

    Args:
        readers: readers of the files, which are read once.
        check: checks that the frames that have been read have labels; its argument is whether these are all.

    Attributes:
        refused: whether the data lack labels, so that a run cannot be continued.
    """

    def __init__(self, readers: Sequence[Reader], check: Callable[[bool], None] = lambda _: None):
        self._readers, self._check = readers, check
        # of each block that is not taken yet, the readers of what it holds, and the readers of their files
        self._under_way: deque[list[tuple[Reader, Reader]]] = deque()
        self._looked = len(readers) > 1
        self.refused = False

    @property
    def size(self) -> int:
        """Number of bytes of all files."""
        return sum(os.path.getsize(file) for reader in self._readers for file in reader.files)

    @property
    def takes_long(self) -> bool:
        """Whether other processes, which take seconds to start, should help."""
        return self.size > _BYTES or sum(reader.num_frames for reader in self._readers) > _MANY

    @classmethod
    def of_dataset(cls, dataset: Dataset, chosen: Sequence[int]) -> FrameSource:
        """Return chosen frames of a data set."""
        return cls([_Chosen(dataset, chosen)])

    def blocks(self, size: int, place: tuple[int, int]) -> Iterator[FrameBlock | FramePart]:
        """Yield blocks of `size` frames; the last of a file may be shorter, and those of large structures.

        Args:
            size: number of frames.
            place: where they begin, as of `FrameBlock`.
        """
        kept, names, failures, held = list[Sample](), list[str](), list[str](), 0  # number of atoms
        complete: list[tuple[Reader, Reader]] = []

        def block(end: int) -> FrameBlock:
            nonlocal kept, names, failures, held, complete
            made = FrameBlock.of(kept, names, failures, (file, end), fraction)
            self._under_way.append(complete)
            kept, names, failures, complete, held = [], [], [], [], 0
            return made

        file, fraction, end = 0, 0.0, 0
        for file, reader in enumerate(self._readers):
            skip = 0 if file > place[0] else place[1] if file == place[0] else sys.maxsize
            lines: list[str] = []
            reader.leave_out = lines.append
            known = reader.num_frames  # 0 if a format does not tell it
            for part in reader.parts(size):
                if part.portable and not part.last:
                    if names or failures:
                        yield block(part.first)
                    self._under_way.append([(reader, part)])
                    yield FramePart(part, skip, file, self._fraction(file, part.fraction))
                    continue
                for more, sample, own, end in _read(part, part.left_out if part.portable else lines, skip):
                    failures += more
                    fraction = self._fraction(file, end / known if known else 1.0 if part.portable else reader.fraction)
                    if sample is None:
                        continue
                    first, atoms = 0, [0, *np.cumsum(sample.system.atom_counts.numpy())]  # up to each frame
                    while first < len(own):
                        fits = bisect_right(atoms, atoms[first] + _LARGEST - held) - 1
                        last = min(first + size - len(names), max(fits, first + (not names)))
                        if last > first:
                            kept.append(sample if last - first == len(own) else select(sample, np.arange(first, last)))
                            names += own[first:last]
                            held += atoms[last] - atoms[first]
                        if last < len(own) or len(names) == size:
                            yield block(end - len(own) + last)
                        first = last
                complete.append((reader, part))
        yield block(end)

    def _fraction(self, file: int, own: float) -> float:
        return (file + own) / len(self._readers) if own else 0.0

    def take(self, found: EvaluatedBlock) -> None:
        """Note what was read for a block; blocks are taken in order.

        Raises:
            BadConfig, BadData: the data lack labels.
        """
        for reader, part in self._under_way.popleft():
            reader.absorb(found.reader or part)
        if not self._looked and self._readers[0].num_frames > _FIRST:
            self._looked = True
            self.check(False)

    def check(self, whole: bool) -> None:
        """Check that the frames so far have labels.

        Args:
            whole: whether these are all.
        """
        try:
            self._check(whole)
        except (BadConfig, BadData):
            self.refused = True
            raise


@dataclass
class EvaluatedBlock:
    """The result of a block.

    Attributes:
        read, atoms: number of its frames, and of their atoms.
        failures: lines about frames that could not be read or evaluated.
        place, fraction, reader: as of `FrameBlock`.
        frames: number of frames that were evaluated.
        periodic: whether one of them is periodic.
        sums: `ErrorSums.sums` of the model, or of the mean and each member, as plain data.
        spread: `Spread.rows`, all of them.
        predictions: those of each batch; then `text`, as extended XYZ.
    """

    read: int
    atoms: int
    failures: list[str]
    place: tuple[int, int]
    fraction: float
    reader: Reader | None
    frames: int = 0
    periodic: bool = False
    sums: list[dict[str, list]] = field(default_factory=list)
    spread: list[tuple[str, str, int, np.ndarray, np.ndarray]] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    text: bytes = b""

    def written(self) -> EvaluatedBlock:
        """Return the block with its predictions as text."""
        return replace(self, predictions=[], text="".join(found.text() for found in self.predictions).encode())


def members_of(models: Sequence[str], **opening: Any) -> list[Potential]:
    """Return the members of an ensemble, or the one model. The arguments `opening` are those of `load`."""
    potentials = [load(model, **opening) for model in models]
    return list(potentials[0].members) if len(potentials) == 1 else potentials


@dataclass(frozen=True)
class Evaluation:
    """What is computed of each frame. Each process calls it with its device and gets the function for blocks.

    Attributes:
        models: files or names of the model, or of the members of an ensemble.
        opening: arguments of `load` other than the device.
        properties: what is predicted besides the energy.
        batch_size: number of frames of a batch; None chooses it for the device.
        units: the section `data.units` as plain data, for the units of further labels.
        predictions: whether the predictions are written.
    """

    models: tuple[str, ...]
    opening: Mapping[str, Any]
    properties: Properties
    batch_size: int | None
    units: Mapping[str, Any]
    predictions: bool

    def __call__(self, device: str) -> Work:
        (device,) = devices_of(device)  # a worker of a cluster gets the given name
        return _BlockEvaluator(self, members_of(self.models, device=device, **self.opening))


class _BlockEvaluator:
    """Evaluates blocks of frames on a device."""

    def __init__(self, options: Evaluation, members: list[Potential]):
        self._options, self._members = options, members
        # frames are checked, and the atoms that fill batches are not frames
        self._evaluators = [Evaluator(for_any_composition(member)) for member in members]
        self._on_gpu, self._exact = members[0].device.type != "cpu", members[0].dtype == torch.float64
        self._capacity: BatchCapacity | None = None

    def __call__(self, block: FrameBlock) -> EvaluatedBlock:
        found = EvaluatedBlock(
            len(block), block.num_atoms, list(block.failures), block.place, block.fraction, block.reader
        )
        if not len(block):
            return found
        data, units, device = block.dataset(), self._options.units, self._members[0].device
        errors = MemberErrors(len(self._members), device, units)

        def add(chosen: Sequence[int]) -> None:
            """Add the errors of some frames, or raise an error before anything is added."""
            for some, sample, results in self._evaluated(data, chosen):
                mean = errors.add(results, sample)
                if self._options.predictions:
                    names = [block.names[k] for k in some]
                    found.predictions.append(Predictions.of(sample, mean, self._members[0].outputs, names))
                found.frames += len(some)
                found.periodic |= bool(sample.system.pbc.any())

        for batch in self._batches(data):
            for k, error in zip(batch, refusals(batch, add, len(batch)), strict=True):
                if error is not None:
                    name, words = block.names[k], " ".join(str(error).split()) or type(error).__name__
                    found.failures.append(words if words.startswith(name) else f"{name}: {words}")
        found.failures = _by_frame(found.failures, block.names)
        found.sums = [_plain(own) for own in errors.sums] if found.frames else []
        found.spread = errors.spread.rows(1, 0)
        return found

    def _batches(self, data: InMemoryDataset) -> Iterable[Sequence[int]]:
        """Return the frames of each batch."""
        size, sizes = self._options.batch_size, data.sizes()
        if size is not None and (self._exact or not self._on_gpu):
            return in_order(len(data), size)
        if not self._on_gpu:  # larger batches leave the caches of a core
            return parts(range(len(data)), sizes.tolist(), lambda atoms, _: atoms <= _AT_MOST[self._exact])
        largest, atoms = int(sizes.max()), _EXACT if self._exact else BatchCapacity.of_block(int(sizes.sum()))
        if self._capacity is None or self._capacity.atoms <= largest:
            self._capacity = BatchCapacity(self._members[0], largest, atoms, padded=not self._exact)
        capacity = self._capacity

        def fits(atoms: int, count: int) -> bool:
            return count <= (size or count) and capacity.fits(atoms, count)

        return parts(range(len(data)), sizes.tolist(), fits)

    def _evaluated(
        self, data: InMemoryDataset, chosen: Sequence[int]
    ) -> list[tuple[Sequence[int], Sample, list[Result]]]:
        """Return some frames and the results of each member for them, in parts if the memory of a GPU is too small.

        Raises:
            ValueError: a frame is refused, or its energy or a force is not finite.
        """
        sample = data.batch(chosen).to(self._members[0].device)
        try:
            for member in self._members:
                member.check(sample.system)
            results = self._predicted(sample)
            for name in ("energy", "forces"):
                values = [getattr(result, name) for result in results]
                if not all(value is None or bool(value.isfinite().all()) for value in values):
                    raise ValueError(f"its {name} {'is' if name == 'energy' else 'are'} not finite")
            return [(chosen, sample, results)]
        except torch.cuda.OutOfMemoryError:
            if len(chosen) == 1:
                raise
        except ValueError as error:
            if len(chosen) == 1:
                rename(error, data.name(chosen[0]))
            raise
        del sample
        torch.cuda.empty_cache()  # after the exception, which holds tensors
        middle = len(chosen) // 2
        return [*self._evaluated(data, chosen[:middle]), *self._evaluated(data, chosen[middle:])]

    def _predicted(self, sample: Sample) -> list[Result]:
        """Return the results of each member: by the kernels of the Evaluator where these compute what labels need."""
        system, properties = sample.system, self._options.properties
        stress, periodic = properties.stress and "stress" in sample.labels, system.pbc.any(1)
        if self._exact or (stress and not bool(periodic.all())):
            given = with_volume(system) if stress else system
            return [member.reference(given, properties.forces, stress) for member in self._members]
        filled, capacity = system, self._capacity
        if capacity is not None and capacity.fits(system.num_atoms, system.num_systems) and not bool(periodic.any()):
            filled = capacity.fill(system)
        results = [evaluator(filled, properties.forces, stress) for evaluator in self._evaluators]
        return [without_rest(result, system, member.outputs) if filled is not system else result
                for member, result in zip(self._members, results, strict=True)]  # fmt: skip


def _by_frame(lines: list[str], names: Iterable[str]) -> list[str]:
    """Return lines about frames in the order of the frames, whether they failed when they were read or later."""
    if len(lines) < 2:
        return lines
    places: dict[str, int] = {}

    def key(line: str) -> tuple[int, int]:
        where, _, rest = line.partition(", frame ")
        number = re.match(r"\d+", rest)
        return places.setdefault(where, len(places)), int(number[0]) if number else 0

    for name in names:
        key(name)
    return sorted(lines, key=key)


def _plain(sums: ErrorSums) -> dict[str, list]:
    return {name: value.tolist() for name, value in sums.sums.items() if not name.startswith("loss_")}


class Evaluated:
    """The result of a stream.

    Args:
        units: as of `Evaluation`.

    Attributes:
        read, frames, failed: number of frames that could be read, that were evaluated, and that failed.
        atoms: number of atoms of those that could be read.
        place: as of `FrameBlock`.
        periodic: whether one of them is periodic.
        failures: lines about the first ones that failed.
        sums: errors of the model, or of the mean and each member.
        spread: of the members.
    """

    _KEPT = ("read", "atoms", "frames", "failed", "place", "periodic", "failures")
    _FIRST = 10

    def __init__(self, units: Mapping[str, Any]):
        self.read = self.atoms = self.frames = self.failed = 0
        self.place, self.periodic, self.failures = (0, 0), False, list[str]()
        self.sums: list[ErrorSums] = []
        self.spread = Spread()
        self._units = units

    def add(self, block: EvaluatedBlock) -> None:
        """Add a block without its text, and thin out its spread."""
        spread = Spread()
        spread.add_rows(block.spread)
        block.spread = spread.rows(1 << (self.atoms // _ALL).bit_length(), self.read)
        for name in ("read", "atoms", "frames"):
            setattr(self, name, getattr(self, name) + getattr(block, name))
        self.place = block.place
        self.failed += len(block.failures)
        self.periodic |= block.periodic
        self.failures += block.failures[: self._FIRST - len(self.failures)]
        if block.sums:
            self._add_sums(block.sums)

    def _add_sums(self, found: Sequence[Mapping[str, list]]) -> None:
        self.sums = self.sums or [ErrorSums(LossConfig(), units=self._units) for _ in found]
        for own, sums in zip(self.sums, found, strict=True):
            own.add_sums({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})

    def kept(self) -> dict[str, Any]:
        """Return all but the spread as plain data."""
        return {**{name: getattr(self, name) for name in self._KEPT}, "sums": [_plain(own) for own in self.sums]}

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Continue from what `kept` returned."""
        for name in self._KEPT:
            setattr(self, name, kept[name])
        self.place = tuple(kept["place"])
        if kept["sums"]:
            self._add_sums(kept["sums"])

    def words(self, seconds: float, before: int, part: float) -> str:
        """Return a line with counts, the rate and the time left.

        Args:
            seconds: time of this run.
            before: number of frames from an earlier run.
            part: part of the frames of this run that has been read, 0 to 1; 0 if it is not known.
        """
        text = f"{self.read} frames, {rate_text(self.read - before, seconds)} frames/s"
        if 0 < part < 1:
            text += left_text(seconds * (1 - part) / part)
        return text + (f", {self.failed} failed" if self.failed else "")


def files_of(output: Path) -> list[Path]:
    """Return the files that a run writes: predictions, failures, and until its end the spread of the members."""
    return [output, *(output.with_name(output.stem + end) for end in (".failed.txt", ".spread.jsonl"))]


def evaluate_stream(
    evaluation: Evaluation,
    source: FrameSource,
    devices: list[str],
    output: Path | None,
    job: dict[str, Any],
    console: Console | None = None,
    dask: str | Client | None = None,
) -> Evaluated:
    """Evaluate all frames.

    Args:
        evaluation: what is computed.
        source: the frames.
        devices, dask: as of `devices_pool`; see `run.devices_for`.
        output: file for predictions; failures are written beside it, in `OUT.failed.txt`. The same call continues a run
            that was killed, after its last complete block.
        job: plain data that differ for other models, files and options.
        console: where progress is shown; None is silent.

    Raises:
        BadData: no frame could be evaluated.
        BadConfig: as `Journal` and `claimed`.
    """
    found = Evaluated(evaluation.units)
    least, size = _BLOCK["cpu" if devices[0] == "cpu" else "cuda"], evaluation.batch_size or 1
    size *= -(-least // size)
    stages = Stages(methodcaller("read"), evaluation, EvaluatedBlock.written)
    helpers = helpers_for(devices, dask) if source.takes_long else 0
    more: dict[str, Any] = {"dask": dask, "written": output is not None, "size": source.size}

    def run() -> Iterator[EvaluatedBlock]:
        began, before, skipped = time.monotonic(), found.read, 0.0
        blocks = source.blocks(size, found.place)
        with nullcontext() if console is None else console.status("") as shown:
            for block in through(blocks, stages, devices, __name__, helpers, **more):
                source.take(block)
                if not (block.read or block.failures):  # an earlier run wrote it
                    continue
                found.add(block)
                yield block
                if shown is not None:
                    skipped = skipped or (block.fraction if before else 0.0)
                    part = (block.fraction - skipped) / (1 - skipped or 1)
                    shown.update(found.words(time.monotonic() - began, before, part))
        source.check(True)

    if output is None:
        for block in run():
            found.spread.add_rows(block.spread)
    else:
        files = files_of(output)
        _, failed, spread = files
        with claimed(*files):
            journal = Journal(output, files, job)
            if journal.kept:
                found.resume(journal.kept)
                if console is not None:
                    words = f"{output}: continues after {found.read} frames"
                    console.print(words, highlight=False, markup=False, soft_wrap=True)
            with journal.writing("frames", lambda: not source.refused):
                for block in run():
                    spreads = (json.dumps(row, default=np.ndarray.tolist) for row in block.spread)
                    texts = ["".join(f"{line}\n" for line in lines) for lines in (block.failures, spreads)]
                    journal.commit(block.read, block.text, *texts, kept=found.kept())
            with open(spread, encoding="utf-8") as file:
                found.spread.add_rows(map(json.loads, file))
            for path in (spread, *([] if found.failed else [failed])):
                path.unlink()
    if not found.frames:
        raise BadData(f"none of {found.failed} frames could be evaluated; the first: {found.failures[0]}")
    return found
