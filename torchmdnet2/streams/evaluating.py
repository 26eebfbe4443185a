"""Errors of a potential, or of an ensemble, on labelled frames: a stream of blocks of frames over devices.

Reading, neighbor search, network and writing overlap, and few blocks are in memory at a time. A frame that cannot be
read or evaluated is a line of the failures and does not end the run.
"""

from __future__ import annotations

import io
import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint import load
from ..core.devices import devices_of
from ..core.files import claimed
from ..core.pipeline import Journal, Work, devices_pool, in_order, left_text
from ..data import Dataset, Sample
from ..data.dataset import select
from ..data.labels import LEVEL
from ..data.reader import InMemoryDataset, Reader
from ..ensemble import Ensemble
from ..errors import BadConfig, BadData
from ..evaluator import Evaluator
from ..potential.potential import Potential, Result
from ..system import System
from ..training.config.sections import LossConfig
from ..training.reporting.evaluation import (
    Spread,
    evaluate,
    evaluate_ensemble,
    predict_with_dipole,
    predicted_frames,
    write_frames,
)
from ..training.steps.batches import Batch, Frames
from ..training.steps.loss import ErrorSums
from ..training.steps.trainer import Properties
from .batches import refusals

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console

__all__ = ["Evaluated", "Evaluation", "FrameSource", "evaluate_stream", "files_of", "members_of"]

_ALL = 2**17  # atoms of which the spread is kept as a whole; of more, that of a random sample
_FIRST = 1000  # frames that are read before it is an error that none has a label
_BLOCK = {"cpu": 128, "cuda": 2048}  # least number of frames that are computed, written and repeated together
_LARGEST = 2**18  # atoms; blocks end when they have as many, so that large structures need no more memory
_ARRAYS = tuple(f.name for f in fields(System))


@dataclass
class FrameBlock:
    """Frames that are computed together. They are arrays, since tensors would be sent as a shared file each.

    Attributes:
        parts: of each run of frames with the same labels, the arrays of its structures and those of its labels.
        names: names of all frames.
        failures: lines about frames before the end of the block that could not be read.
        stride: the spread of one in so many atoms or structures is kept.
    """

    parts: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
    names: list[str]
    failures: list[str]
    stride: int = 1

    @classmethod
    def of(cls, samples: Iterable[Sample], names: list[str], failures: list[str], stride: int) -> FrameBlock:
        parts = [
            (
                {name: getattr(sample.system, name).numpy() for name in _ARRAYS},
                {name: value.numpy() for name, value in sample.labels.items()},
            )
            for sample in samples
        ]
        return cls(parts, names, failures, stride)

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


class FrameSource:
    """Frames in order, in blocks.

    Args:
        samples: runs of frames with their names.
        failures: the list to which reading adds lines about frames that cannot be read.
        total: number of frames, if it is known.
        fraction: function that returns which part of the files has been read, 0 to 1; 0 if it is not known.

    Attributes:
        refused: whether the data lack labels, so that a run cannot be continued.
    """

    def __init__(
        self,
        samples: Iterable[tuple[Sample, list[str]]],
        failures: list[str],
        total: int | None,
        fraction: Callable[[], float] = float,
    ):
        self._samples, self._failures, self.total, self.fraction = samples, failures, total, fraction
        self.refused = False

    @classmethod
    def of_readers(cls, readers: Sequence[Reader], check: Callable[[bool], None]) -> FrameSource:
        """Return the frames of files, which are read once.

        Args:
            readers: readers of the files.
            check: checks that the frames that have been read have labels; its argument is whether these are all. It is
                called after the first thousand frames of a single file, and at the end.
        """
        failures: list[str] = []

        def samples() -> Iterator[tuple[Sample, list[str]]]:
            read, looked = 0, len(readers) > 1
            for reader in readers:
                reader.leave_out = failures.append
                for chunk in reader.chunks():
                    read += len(chunk.names)
                    if read > _FIRST and not looked:
                        looked = True
                        checked(False)
                    yield chunk.sample, chunk.names
            checked(True)

        def checked(whole: bool) -> None:
            try:
                check(whole)
            except (BadConfig, BadData):
                source.refused = True
                raise

        def fraction() -> float:
            return sum(reader.fraction for reader in readers) / len(readers)

        sizes = [reader.num_frames for reader in readers]  # 0 if a format does not tell it
        source = cls(samples(), failures, sum(sizes) if all(sizes) else None, fraction)
        return source

    @classmethod
    def of_dataset(cls, dataset: Dataset, chosen: Sequence[int], size: int = 256) -> FrameSource:
        """Return chosen frames of a data set, `size` of them at a time."""
        parts = (chosen[first : first + size] for first in range(0, len(chosen), size))
        samples = ((dataset.batch(part), [dataset.name(k) for k in part]) for part in parts)
        return cls(samples, [], len(chosen))

    def blocks(self, size: int, done: int, unread: int, atoms: int) -> Iterator[FrameBlock]:
        """Yield blocks of `size` frames; the last may be shorter, and those of large structures.

        Args:
            size: number of frames.
            done: number of frames to skip.
            unread: number of failures to skip.
            atoms: number of atoms of the skipped frames.
        """
        kept: list[Sample] = []
        names: list[str] = []
        held = 0  # number of atoms

        def block() -> FrameBlock:
            nonlocal kept, names, held, unread, atoms
            skipped = min(unread, len(self._failures))
            failures, unread = self._failures[skipped:], unread - skipped
            self._failures.clear()
            stride = 1 << max(0, atoms // _ALL).bit_length()
            made = FrameBlock.of(kept, names, failures, stride)
            atoms += made.num_atoms
            kept, names, held = [], [], 0
            return made

        for sample, own in self._samples:
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
                    yield block()
                first = last
        if names or self._failures:
            yield block()


@dataclass
class EvaluatedBlock:
    """The result of a block.

    Attributes:
        read, atoms: number of its frames, and of their atoms.
        unread: number of frames before its end that could not be read.
        frames: number of frames that were evaluated.
        periodic: whether one of them is periodic.
        sums: `ErrorSums.sums` of the model, or of the mean and each member, as plain data.
        spread: `Spread.rows`.
        text: predictions as extended XYZ.
        failures: lines about frames that could not be read or evaluated.
    """

    read: int
    atoms: int
    unread: int
    failures: list[str]
    frames: int = 0
    periodic: bool = False
    sums: list[list[dict[str, list]]] = field(default_factory=list)
    spread: list[tuple[str, str, int, list, list]] = field(default_factory=list)
    text: str = ""


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
        batch_size: number of frames of a batch.
        units: the section `data.units` as plain data, for the units of further labels.
        predictions: whether the predictions are written.
    """

    models: tuple[str, ...]
    opening: Mapping[str, Any]
    properties: Properties
    batch_size: int
    units: Mapping[str, Any]
    predictions: bool

    def __call__(self, device: str) -> Work:
        (device,) = devices_of(device)  # a worker of a cluster gets the given name
        return _BlockEvaluator(self, members_of(self.models, device=device, **self.opening))


class _BlockEvaluator:
    """Evaluates blocks of frames on a device."""

    def __init__(self, options: Evaluation, members: list[Potential]):
        self._options, self._potential = options, members[0]
        self._ensemble = Ensemble(members) if len(members) > 1 else None
        self._evaluators = {id(member): Evaluator(member) for member in members}

    def __call__(self, block: FrameBlock) -> EvaluatedBlock:
        found = EvaluatedBlock(len(block), block.num_atoms, len(block.failures), list(block.failures))
        if not len(block):
            return found
        frames = Frames(block.dataset(), range(len(block)), (self._ensemble or self._potential).cutoff, cache_bytes=0)
        positions = range(len(block))
        failed = refusals(positions, lambda part: self._add(frames, part, block.stride, found), len(block))
        for name, error in zip(block.names, failed, strict=True):
            if error is not None:
                words = " ".join(str(error).split()) or type(error).__name__
                found.failures.append(words if words.startswith(name) else f"{name}: {words}")
        return found

    def _add(self, frames: Frames, chosen: Sequence[int], stride: int, found: EvaluatedBlock) -> None:
        """Add some frames to the result of their block, or raise an error before anything is added.

        Raises:
            ValueError: a frame is refused, or its energy is not finite.
        """
        some, texts, periodic = frames.of(np.asarray(chosen)), io.BytesIO(), False
        options = self._options

        def each(batch: Batch, result: Result) -> None:
            nonlocal periodic
            if not bool(result.energy.isfinite().all()):
                raise ValueError("its energy is not finite")
            periodic |= bool(batch.sample.system.pbc.any())
            if options.predictions:
                names = [frames.data.name(k) for k in batch.frames]
                write_frames(texts, predicted_frames(batch, result, self._potential.outputs, names))

        size, units, predict = options.batch_size, options.units, self._predict
        if self._ensemble is None:
            sums = [evaluate(self._potential, some, options.properties, size, keep_pairs=False, units=units, each=each,
                             predict=predict).sums]  # fmt: skip
        else:
            together = evaluate_ensemble(
                self._ensemble, some, options.properties, size, units=units, each=each, predict=predict
            )
            sums = together.sums
            found.spread += together.spread.rows(stride, zlib.crc32(frames.data.name(chosen[0]).encode()))
        found.sums.append([_plain(own) for own in sums])
        found.frames += len(some)
        found.periodic |= periodic
        found.text += texts.getvalue().decode()

    def _predict(self, potential: Potential, batch: Batch, properties: Properties) -> Result:
        """Predict by the kernels of the Evaluator, where these compute what the labels need."""
        system, labels = batch.sample.system, batch.sample.labels
        stress = properties.stress and "stress" in labels
        if potential.dtype == torch.float64 or LEVEL in labels or (stress and not bool(system.pbc.any(1).all())):
            return predict_with_dipole(potential, batch, properties)
        return self._evaluators[id(potential)](system, properties.forces, stress)


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

    _KEPT = ("read", "unread", "frames", "failed", "atoms", "periodic", "failures")
    _FIRST = 10

    def __init__(self, units: Mapping[str, Any]):
        self.read = self.unread = self.frames = self.failed = self.atoms = 0
        self.periodic, self.failures = False, list[str]()
        self.sums: list[ErrorSums] = []
        self.spread = Spread()
        self._units = units

    def add(self, block: EvaluatedBlock) -> None:
        """Add a block, without its spread and text."""
        for name in ("read", "unread", "frames", "atoms"):
            setattr(self, name, getattr(self, name) + getattr(block, name))
        self.failed += len(block.failures)
        self.periodic |= block.periodic
        self.failures += block.failures[: self._FIRST - len(self.failures)]
        for sums in block.sums:
            self._add_sums(sums)

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
    size = evaluation.batch_size * -(-_BLOCK["cpu" if devices[0] == "cpu" else "cuda"] // evaluation.batch_size)

    def run() -> Iterator[EvaluatedBlock]:
        began, before, skipped = time.monotonic(), found.read, 0.0
        status = nullcontext() if console is None else console.status("")
        with status as shown, devices_pool(evaluation, devices, dask) as pool:
            for block in in_order(source.blocks(size, found.read, found.unread, found.atoms), pool):
                found.add(block)
                yield block
                if shown is not None:
                    part = found.read / source.total if source.total else source.fraction()
                    skipped = skipped or (part if before else 0.0)
                    shown.update(found.words(time.monotonic() - began, before, (part - skipped) / (1 - skipped or 1)))

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
