"""Errors of a potential, or of an ensemble, on labelled frames: a stream of blocks of frames over devices.

Reading, neighbor search, network and writing overlap, and few blocks are in memory at a time. A frame that cannot be
read or evaluated is a line of the failures and does not end the run.
"""

from __future__ import annotations

import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint import load
from ..core.devices import devices_of
from ..core.files import claimed
from ..core.pipeline import Journal, Stages, Work, helpers_for, left_text, through
from ..data import Dataset, Sample
from ..data.dataset import select
from ..data.reader import InMemoryDataset, Reader
from ..data.splits import in_order
from ..engine.check import for_any_composition
from ..ensemble import EnsembleResult, combine
from ..errors import BadConfig, BadData
from ..evaluator import Evaluator
from ..potential.potential import Potential, Result
from ..potential.refusals import rename
from ..system import System
from ..training.config.sections import LossConfig
from ..training.reporting.evaluation import Predictions, Spread
from ..training.steps.loss import ErrorSums, residuals
from ..training.steps.trainer import Properties, with_volume
from .batches import BatchCapacity, parts, refusals, without_rest

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console

__all__ = ["Evaluated", "Evaluation", "FrameSource", "evaluate_stream", "files_of", "members_of"]

_FIRST = 1000  # frames that are read before it is an error that none has a label
_BLOCK = {"cpu": 128, "cuda": 2048}  # least number of frames that are computed, written and repeated together
_BATCH = 32  # number of frames of a batch on a CPU
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
        first: number of frames before the block.
        fraction: part of the files up to the end of the block, 0 to 1; 0 if it is not known.
    """

    parts: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
    names: list[str]
    failures: list[str]
    first: int = 0
    fraction: float = 0.0

    @classmethod
    def of(
        cls, samples: Iterable[Sample], names: list[str], failures: list[str], first: int, fraction: float
    ) -> FrameBlock:
        parts = [
            (
                {name: getattr(sample.system, name).numpy() for name in _ARRAYS},
                {name: value.numpy() for name, value in sample.labels.items()},
            )
            for sample in samples
        ]
        return cls(parts, names, failures, first, fraction)

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

    def stride(self, most: int) -> int:
        """Return the number of atoms or structures of which the spread of one is kept, so that about `most` are."""
        before = self.first * self.num_atoms // max(1, len(self))  # if all frames are as large as these
        return 1 << (before // most).bit_length()

    def __len__(self) -> int:
        return len(self.names)


class FrameSource:
    """Frames in order, in blocks.

    Args:
        samples: runs of frames with their names, and the part of the files that has been read, 0 to 1; 0 if unknown.
        failures: the list to which reading adds lines about frames that cannot be read.
        check: checks that the frames that have been read have labels; its argument is whether these are all.

    Attributes:
        refused: whether the data lack labels, so that a run cannot be continued.
    """

    def __init__(
        self,
        samples: Iterable[tuple[Sample, list[str], float]],
        failures: list[str],
        check: Callable[[bool], None] = lambda _: None,
    ):
        self._samples, self._failures, self._check = samples, failures, check
        self.refused = False

    @classmethod
    def of_readers(cls, readers: Sequence[Reader], check: Callable[[bool], None]) -> FrameSource:
        """Return the frames of files, which are read once.

        Args:
            readers: readers of the files.
            check: checks labels. It is called after the first thousand frames of a single file, and at the end.
        """
        failures: list[str] = []

        def samples() -> Iterator[tuple[Sample, list[str], float]]:
            read, looked = 0, len(readers) > 1
            for k, reader in enumerate(readers):
                reader.leave_out = failures.append
                known, before = reader.num_frames, read  # 0 if a format does not tell it
                for chunk in reader.chunks():
                    read += len(chunk.names)
                    if read > _FIRST and not looked:
                        looked = True
                        source.check(False)
                    part = (read - before) / known if known else reader.fraction
                    yield chunk.sample, chunk.names, (k + part) / len(readers) if part else 0.0
            source.check(True)

        source = cls(samples(), failures, check)
        return source

    @classmethod
    def of_dataset(cls, dataset: Dataset, chosen: Sequence[int], size: int = 256) -> FrameSource:
        """Return chosen frames of a data set, `size` of them at a time."""
        ends = [min(first + size, len(chosen)) for first in range(0, len(chosen), size)]
        pieces = ((chosen[first:end], end) for first, end in zip([0, *ends], ends, strict=False))
        samples = ((dataset.batch(part), [dataset.name(k) for k in part], end / len(chosen)) for part, end in pieces)
        return cls(samples, [])

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

    def blocks(self, size: int, done: int, unread: int) -> Iterator[FrameBlock]:
        """Yield blocks of `size` frames; the last may be shorter, and those of large structures.

        Args:
            size: number of frames.
            done: number of frames to skip.
            unread: number of failures to skip.
        """
        kept: list[Sample] = []
        names: list[str] = []
        held, before = 0, done  # number of atoms in the block, number of frames before it

        def block(fraction: float) -> FrameBlock:
            nonlocal kept, names, held, unread, before
            skipped = min(unread, len(self._failures))
            failures, unread = self._failures[skipped:], unread - skipped
            self._failures.clear()
            made = FrameBlock.of(kept, names, failures, before, fraction)
            before += len(names)
            kept, names, held = [], [], 0
            return made

        part = 0.0
        for sample, own, part in self._samples:
            first = min(done, len(own))
            done -= first
            ends = [0, *np.cumsum(sample.system.atom_counts.numpy())]  # number of atoms up to each frame
            while first < len(own):
                fits = bisect_right(ends, ends[first] + _LARGEST - held) - 1
                last = min(first + size - len(names), max(fits, first + (not names)))
                if last > first:
                    kept.append(sample if last - first == len(own) else select(sample, np.arange(first, last)))
                    names += own[first:last]
                    held += ends[last] - ends[first]
                if last < len(own) or len(names) == size:
                    yield block(part)
                first = last
        if names or self._failures:
            yield block(part)


@dataclass
class EvaluatedBlock:
    """The result of a block.

    Attributes:
        read: number of its frames.
        unread: number of frames before its end that could not be read.
        failures: lines about frames that could not be read or evaluated.
        fraction: as of `FrameBlock`.
        frames: number of frames that were evaluated.
        periodic: whether one of them is periodic.
        sums: `ErrorSums.sums` of the model, or of the mean and each member, as plain data.
        spread: `Spread.rows`.
        predictions: those of each batch; then `text`, as extended XYZ.
    """

    read: int
    unread: int
    failures: list[str]
    fraction: float
    frames: int = 0
    periodic: bool = False
    sums: list[dict[str, list]] = field(default_factory=list)
    spread: list[tuple[str, str, int, list, list]] = field(default_factory=list)
    predictions: list[Predictions] = field(default_factory=list)
    text: str = ""

    def written(self) -> EvaluatedBlock:
        """Return the block with its predictions as text."""
        return replace(self, predictions=[], text="".join(found.text() for found in self.predictions))


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
        most: number of atoms of which the spread is kept as a whole; of more, that of a random sample.
    """

    models: tuple[str, ...]
    opening: Mapping[str, Any]
    properties: Properties
    batch_size: int | None
    units: Mapping[str, Any]
    predictions: bool
    most: int = 2**17

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
        found = EvaluatedBlock(len(block), len(block.failures), list(block.failures), block.fraction)
        if not len(block):
            return found
        data, units, device = block.dataset(), self._options.units, self._members[0].device
        several = len(self._members) > 1
        sums = [ErrorSums(LossConfig(), device, units) for _ in range(1 + several * len(self._members))]
        spread = Spread()

        def add(chosen: Sequence[int]) -> None:
            """Add the errors of some frames, or raise an error before anything is added."""
            for some, sample, results in self._evaluated(data, chosen):
                labels, system = sample.labels, sample.system
                mean = combine(results) if several else results[0]
                errors = residuals(mean, labels)
                sums[0].add(errors, system)
                for own, result in zip(sums[1:], results, strict=several):
                    own.add(residuals(result, labels), system)
                if isinstance(mean, EnsembleResult):
                    spread.add_errors(errors, mean, system, units)
                if self._options.predictions:
                    names = [block.names[k] for k in some]
                    found.predictions.append(Predictions.of(sample, mean, self._members[0].outputs, names))
                found.frames += len(some)
                found.periodic |= bool(system.pbc.any())

        for batch in self._batches(data):
            for k, error in zip(batch, refusals(batch, add, len(batch)), strict=True):
                if error is not None:
                    name, words = block.names[k], " ".join(str(error).split()) or type(error).__name__
                    found.failures.append(words if words.startswith(name) else f"{name}: {words}")
        found.sums = [_plain(own) for own in sums] if found.frames else []
        found.spread = spread.rows(block.stride(self._options.most), zlib.crc32(block.names[0].encode()))
        return found

    def _batches(self, data: InMemoryDataset) -> Iterable[Sequence[int]]:
        """Return the frames of each batch."""
        size, sizes = self._options.batch_size, data.sizes()
        if not self._on_gpu or (self._exact and size is not None):
            return in_order(len(data), size or _BATCH)
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
            ValueError: a frame is refused, or its energy is not finite.
        """
        sample = data.batch(chosen).to(self._members[0].device)
        try:
            for member in self._members:
                member.check(sample.system)
            results = self._predicted(sample)
            if not all(bool(result.energy.isfinite().all()) for result in results):
                raise ValueError("its energy is not finite")
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


def _plain(sums: ErrorSums) -> dict[str, list]:
    return {name: value.tolist() for name, value in sums.sums.items() if not name.startswith("loss_")}


class Evaluated:
    """The result of a stream.

    Args:
        units: as of `Evaluation`.

    Attributes:
        read, frames, failed: number of frames that could be read, that were evaluated, and that failed.
        periodic: whether one of them is periodic.
        failures: lines about the first ones that failed.
        sums: errors of the model, or of the mean and each member.
        spread: of the members.
    """

    _KEPT = ("read", "unread", "frames", "failed", "periodic", "failures")
    _FIRST = 10

    def __init__(self, units: Mapping[str, Any]):
        self.read = self.unread = self.frames = self.failed = 0
        self.periodic, self.failures = False, list[str]()
        self.sums: list[ErrorSums] = []
        self.spread = Spread()
        self._units = units

    def add(self, block: EvaluatedBlock) -> None:
        """Add a block, without its spread and text."""
        for name in ("read", "unread", "frames"):
            setattr(self, name, getattr(self, name) + getattr(block, name))
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
        if kept["sums"]:
            self._add_sums(kept["sums"])

    def words(self, seconds: float, before: int, part: float) -> str:
        """Return a line with counts, the rate and the time left.

        Args:
            seconds: time of this run.
            before: number of frames from an earlier run.
            part: part of the frames of this run that has been read, 0 to 1; 0 if it is not known.
        """
        text = f"{self.read} frames, {(self.read - before) / max(seconds, 1e-9):.3g} frames/s"
        if 0 < part < 1:
            text += left_text(seconds * (1 - part) / part)
        return text + (f", {self.failed} failed" if self.failed else "")


def _unchanged(block: FrameBlock) -> FrameBlock:
    return block


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
    least, size = _BLOCK["cpu" if devices[0] == "cpu" else "cuda"], evaluation.batch_size or _BATCH
    size *= -(-least // size)
    stages = Stages(_unchanged, evaluation, EvaluatedBlock.written)
    helpers = helpers_for(devices, dask) if evaluation.predictions else 0

    def run() -> Iterator[EvaluatedBlock]:
        began, before, skipped = time.monotonic(), found.read, 0.0
        blocks = source.blocks(size, found.read, found.unread)
        with nullcontext() if console is None else console.status("") as shown:
            for block in through(blocks, stages, devices, __name__, helpers, dask=dask):
                found.add(block)
                yield block
                if shown is not None:
                    skipped = skipped or (block.fraction if before else 0.0)
                    part = (block.fraction - skipped) / (1 - skipped or 1)
                    shown.update(found.words(time.monotonic() - began, before, part))

    if output is None:
        for block in run():
            found.spread.add_rows(block.spread)
    else:
        files = files_of(output)
        _, failed, spread = files
        with claimed(*files):
            journal, finished = Journal(output, files, job), False
            if journal.kept:
                found.resume(journal.kept)
                if console is not None:
                    console.print(f"{output}: continues after {found.read} frames", highlight=False, soft_wrap=True)
            try:
                for block in run():
                    texts = ["".join(f"{line}\n" for line in lines)
                             for lines in (block.failures, map(json.dumps, block.spread))]  # fmt: skip
                    journal.commit(block.read, block.text, *texts, kept=found.kept())
                finished = True
            finally:
                journal.close(finished, continues=not source.refused)
            with open(spread, encoding="utf-8") as file:
                found.spread.add_rows(map(json.loads, file))
            for path in (spread, *([] if found.failed else [failed])):
                path.unlink()
    if not found.frames:
        raise BadData(f"none of {found.failed} frames could be evaluated; the first: {found.failures[0]}")
    return found
