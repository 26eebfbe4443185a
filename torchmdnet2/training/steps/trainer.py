"""The training loop: learning rate, weight average, early stopping, epochs, and the state that is saved."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...core.files import atomic_write
from ...data.labels import LEVEL
from ...errors import BadCheckpoint
from ...neighbors.pairs import PairLists
from ...potential.potential import Potential, Result
from ...system import System
from ..config.config import TrainingConfig
from ..config.sections import LossConfig
from .batches import Batch, Frames, Loader, measured_batches, training_batches
from .loss import ErrorSums, frame_weights, penalty_sums, residuals, total_loss
from .optimizers import Update, make_optimizer, rates_of

__all__ = [
    "BestEpoch", "Hooks", "Interrupted", "LearningRate", "Properties", "Trainer", "TrainingDiverged",
    "catch_signals", "load_state", "optimizer_tensors", "predict", "restore_optimizer", "save_state", "select",
    "with_volume",
]  # fmt: skip


_FORMAT, _VERSION = "torchmdnet2-training-state", 2
_REMEDY = "; remove the file to start again, or choose another output.folder"


def save_state(path: str | os.PathLike, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and plain data to one file; a crash leaves the old file or the new one, never a part.

    Args:
        path: usually state.safetensors in the run's folder.
        tensors: on any device.
        state: plain data; floating-point numbers are restored exactly.
    """
    from safetensors.torch import save

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(state)
    header = {"format": _FORMAT, "format_version": str(_VERSION), "state": text, "sha256": _digest(plain, text)}
    atomic_write(path, save(plain, metadata=header))


def load_state(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `save_state`.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: damaged, or not a training state that this version reads.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such training state")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if header.get("format") != _FORMAT or header.get("format_version") != str(_VERSION):
            raise BadCheckpoint(f"{path}: not a training state that this version of torchmdnet2 reads")
        tensors = load(Path(path).read_bytes())
        if _digest(tensors, header["state"]) != header["sha256"]:
            raise BadCheckpoint(f"{path}: the checksum does not match: the training state is damaged{_REMEDY}")
        return tensors, json.loads(header["state"])
    except (SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path}: the training state is damaged: {error}{_REMEDY}") from error


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """Return the SHA-256 of the numbers, their names, types and shapes, and of the text."""
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter, as "index.name" -> tensor."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, items in state.items() for name, value in items.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the tensors of `optimizer_tensors` in their precision (`load_state_dict` would round to the weights')."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)]
        optimizer.state.setdefault(parameter, {})[name] = value.to(parameter.device)


def load_exactly(module: nn.Module, tensors: dict[str, Tensor], path: str | os.PathLike) -> None:
    """Load weights, naming the file when they do not fit."""
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise BadCheckpoint(f"{path}: the training state belongs to another model: {error}") from error


# --- Ctrl-C and SIGTERM (of a batch system) stop a training after the current step, with its state saved ---

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the training to stop.

    Args:
        number: of the signal.
        text: the message.
    """

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:  # of a process that trains a member of a committee
        return type(self), (self.exit_code - 128, str(self))


@contextmanager
def catch_signals() -> Iterator[Callable[[], int | None]]:
    """Record the first SIGINT or SIGTERM within the block; a second one raises KeyboardInterrupt at once.

    Yields:
        A function that returns the number of the signal, or None before one. Outside the main thread, where Python
        has no signals, always None.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


# --- Learning rate, weight average and early stopping ---


class LearningRate:
    """Linear warm-up, then cosine decay, plateau reductions, or a constant.

    Args:
        config: lr, lr_schedule and their parameters.
        total_steps: steps of the whole training, where cosine reaches lr_min.

    Attributes:
        time: share of the time of `max_minutes` that is over, 0 to 1; cosine follows it if it is ahead of the steps.
    """

    def __init__(self, config: TrainingConfig, total_steps: int):
        self.config, self.total_steps = config, total_steps
        steps_per_epoch = total_steps // config.max_epochs
        # first step of the stage that weights are averaged equally in
        self.swa_step = (
            total_steps if config.swa is None else config.swa.first_epoch(config.max_epochs) * steps_per_epoch
        )
        self.time = 0.0
        self.factor = 1.0  # of plateau
        self.best = math.inf
        self.bad_epochs = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of step 0, 1, …"""
        c = self.config
        if c.swa is not None and c.swa.lr is not None and step >= self.swa_step:
            return c.swa.lr
        warm = min(1.0, (step + 1) / c.warmup_steps) if c.warmup_steps else 1.0
        if c.lr_schedule == "cosine":
            span = max(1, self.total_steps - c.warmup_steps)
            progress = min(1.0, max(0.0, (step - c.warmup_steps) / span, self.time))
            return warm * (c.lr_min + (c.lr - c.lr_min) * (1 + math.cos(math.pi * progress)) / 2)
        if c.lr_schedule == "plateau":
            return warm * max(c.lr_min, c.lr * self.factor)
        return warm * c.lr

    def average_share(self, step: int) -> float:
        """Return the share of the weights after step 0, 1, … in their average.

        Exponential: 1 − min(ema_decay, (1 + step)/(10 + step)), so that the first steps, far from the solution, soon
        count little. In the stage of equal weights: 1, 1/2, 1/3, …
        """
        if self.config.swa is not None and step >= self.swa_step:
            return 1 / (step - self.swa_step + 1)
        return 1 - min(self.config.ema_decay, (1 + step) / (10 + step))

    def end_of_epoch(self, loss: float) -> None:
        """Report the validation loss; plateau reduces after `lr_patience` epochs without improvement."""
        if loss < self.best:
            self.best, self.bad_epochs = loss, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.config.lr_patience:
            self.factor *= self.config.lr_factor
            self.bad_epochs = 0

    def state(self) -> dict[str, Any]:
        return {"factor": self.factor, "best": self.best, "bad_epochs": self.bad_epochs, "time": self.time}

    def restore(self, state: dict[str, Any]) -> None:
        self.factor, self.best, self.bad_epochs = state["factor"], state["best"], state["bad_epochs"]
        self.time = state.get("time", 0.0)


class BestEpoch:
    """Remembers the best epoch, and says when to stop.

    Args:
        patience: epochs without improvement after which to stop; None: never.
    """

    def __init__(self, patience: int | None):
        self.patience = patience
        self.loss, self.epoch, self.waited = math.inf, -1, 0

    def end_of_epoch(self, epoch: int, loss: float) -> bool:
        """Return True if this epoch is the best one."""
        if loss < self.loss:
            self.loss, self.epoch, self.waited = loss, epoch, 0
            return True
        self.waited += 1
        return False

    @property
    def stop(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        return {"loss": self.loss, "epoch": self.epoch, "waited": self.waited}

    def restore(self, state: dict[str, Any]) -> None:
        self.loss, self.epoch, self.waited = state["loss"], state["epoch"], state["waited"]


# --- The training loop ---
#
# One epoch: every training frame once, in an order that depends on (seed, epoch) alone; then the validation frames with
# the averaged weights. On a CPU the same configuration gives the same weights, bit for bit, also when it is interrupted
# anywhere and resumed.


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is not finite; the message names the frames."""


@dataclass(frozen=True)
class Properties:
    """Properties that are computed besides the energy."""

    forces: bool = True
    stress: bool = False


@dataclass
class Hooks:
    """Callbacks of the training loop.

    Attributes:
        step: after each step, with the trainer and the loss.
        epoch: after each epoch, with the trainer and its row of metrics.
        best: when an epoch was the best so far.
        save: before the state is saved; what belongs to it must be on the disk first.
        stop: after each step and each epoch; the number of the signal to stop, or None to continue.
        time: after each step; the share of `max_minutes` that is over, or None if there is no new value.
    """

    step: Callable[[Trainer, float], None] = field(default=lambda trainer, loss: None)
    epoch: Callable[[Trainer, dict[str, Any]], None] = field(default=lambda trainer, row: None)
    best: Callable[[Trainer], None] = field(default=lambda trainer: None)
    save: Callable[[Trainer], None] = field(default=lambda trainer: None)
    stop: Callable[[], int | None] = field(default=lambda: None)
    time: Callable[[], float | None] = field(default=lambda: None)


class PackedSteps(Protocol):
    """Steps and validation by a faster method than `Trainer.step`; `loop.PackedLoop` is one.

    Attributes:
        check_every: steps between two calls of `check`.
        num_bytes: memory of the frames on the device.
    """

    check_every: int

    @property
    def num_bytes(self) -> int: ...

    def steps(self, order: Sequence[Sequence[int]]) -> Iterator[float]: ...

    def check(self) -> None: ...

    def validate(self, positions: Sequence[Sequence[int]]) -> ErrorSums: ...

    def forget_graphs(self) -> None: ...


class Trainer:
    """Trains a potential.

    Args:
        potential: on its device; its weights are changed.
        train, validation: frames; without validation frames the training loss decides which epoch is best.
        config: section `training`.
        properties: those that the labels need.
        num_workers: data-loading processes.
        state_path: file of the state; None: it is not saved.
        save_every: seconds between saves; at the end it is saved at once.
        identity: stored with the state, to recognise the run (configuration and data).
    """

    def __init__(
        self,
        potential: Potential,
        train: Frames,
        validation: Frames | None,
        config: TrainingConfig,
        properties: Properties | None = None,
        num_workers: int = 0,
        state_path: str | os.PathLike | None = None,
        save_every: float = 0.0,
        identity: dict[str, Any] | None = None,
    ):
        self.config, self.properties = config, properties or Properties()
        self.potential, self.device = potential.train(), potential.device
        self.average = copy.deepcopy(potential).eval()
        self.train, self.validation = train, validation
        self.train_loader = Loader(train, num_workers)
        self.validation_loader = Loader(validation, num_workers) if validation else None
        self.state_path, self.identity = state_path, identity or {}
        self.save_every, self._saved = save_every, time.monotonic()

        pairs = zip(potential.parameters(), self.average.parameters(), strict=True)
        trained = [(p, average) for p, average in pairs if p.requires_grad]
        self.parameters, self.averaged = [p for p, _ in trained], [average for _, average in trained]
        self.optimizer = make_optimizer(potential, config.optimizer, config.weight_decay, config.layer_lr_decay)

        self.steps_per_epoch = len(training_batches(train, config, 0))  # with a budget, a few more or less later
        self.total_steps = config.max_epochs * self.steps_per_epoch
        self.learning_rate = LearningRate(config, self.total_steps)
        self.best = BestEpoch(config.early_stopping_patience)
        self.epoch, self.position, self.step_count = 0, 0, 0  # position: batches of this epoch that are done
        self.sums = ErrorSums(self.loss, self.device)
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0  # of this epoch, over all its interruptions
        self.packed: PackedSteps | None = None  # see loop.py

    @property
    def loss(self) -> LossConfig:
        """The definition of the loss in this epoch."""
        return self.config.loss.at(self.epoch, self.config.max_epochs)

    @property
    def check_every(self) -> int:
        """Steps between waits for the device, when signals, time and saves are checked."""
        return 1 if self.packed is None else self.packed.check_every

    # --- the loop ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.epoch >= self.config.max_epochs or self.best.stop or self.learning_rate.time >= 1

    def run(self, hooks: Hooks) -> None:
        """Train until `max_epochs`, `max_minutes` or early stopping.

        Raises:
            TrainingDiverged: the loss is not finite; names the frames of the batch.
            Interrupted: `hooks.stop` requested it; the state is saved.
        """
        while not self.finished:
            self.train_epoch(hooks)
            number = self.end_epoch(hooks)
            if number is not None and not self.finished:
                self._interrupt(number)

    def _interrupt(self, number: int) -> NoReturn:
        name = signal.Signals(number).name
        saved = "; its state is saved: continue with --resume auto" if self.state_path is not None else ""
        raise Interrupted(number, f"the training was stopped by {name} after step {self.step_count}{saved}")

    def train_epoch(self, hooks: Hooks) -> None:
        """Do the remaining steps of this epoch."""
        order = training_batches(self.train, self.config, self.epoch)
        start = time.monotonic()
        for loss in self.steps(order[self.position :]):
            self.position += 1
            self.step_count += 1
            hooks.step(self, loss)
            number = hooks.stop()
            if self.position % self.check_every == 0 or number is not None:
                self.seconds, start = self.seconds + time.monotonic() - start, time.monotonic()
                self.save(hooks, at_once=number is not None)
            if number is not None:
                self._interrupt(number)
            if (over := hooks.time()) is not None:
                self.learning_rate.time = min(1.0, over)
            if self.learning_rate.time >= 1:
                break
        self.seconds += time.monotonic() - start

    def steps(self, order: list[list[int]]) -> Iterator[float]:
        """Do a step for each batch; yields its loss, or the latest known one."""
        if self.packed is not None:
            yield from self.packed.steps(order)
        else:
            for parts in self.batches(order):
                yield self.step(*parts)

    def batches(self, order: Sequence[Sequence[int]]) -> Iterator[list[Batch]]:
        """Return training frames on the device, for each batch in parts that are of one level of theory."""
        return self._in_levels(self.train, self.train_loader, order)

    def _in_levels(self, frames: Frames, loader: Loader, order: Sequence[Sequence[int]]) -> Iterator[list[Batch]]:
        parts = [[list(positions)] for positions in order]
        if self.potential.level_names:
            parts = [_divided(positions, frames.levels) for positions in order]
        read = iter(loader([part for batch in parts for part in batch]))
        for batch in parts:
            yield [next(read).to(self.device) for _ in batch]

    def step(self, *parts: Batch) -> float:
        """Take one step of the optimizer; return the loss.

        Args:
            parts: a batch, or its parts by level of theory.
        """
        rates = rates_of(self.optimizer, self.learning_rate.rate(self.step_count))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        value = float(self.backward(*parts))
        if not self.update.clip():
            raise TrainingDiverged(self._blame(parts, value))
        self.update.move(self.learning_rate.average_share(self.step_count))
        return value

    @cached_property
    def update(self) -> Update:
        """The end of an eager step."""
        return Update(self.parameters, self.averaged, self.optimizer, self.config.gradient_clipping)

    def backward(self, *parts: Batch) -> Tensor:
        """Compute the loss of a batch; its gradients become those of the parameters, its errors are added to the
        epoch's.

        Args:
            parts: as for `step`.
        """
        loss_config = self.loss
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        for batch in parts:
            result = predict(self.potential, batch, self.properties, create_graph=True)
            found = residuals(result, batch.sample.labels)
            weights = frame_weights(batch.sample.labels, loss_config)
            for name, (total, count) in penalty_sums(found, batch.sample.system, loss_config, weights).items():
                known = sums.get(name)
                sums[name] = (total, count) if known is None else (known[0] + total, known[1] + count)
            self.sums.add(found, batch.sample.system, weights)
        loss = total_loss(sums, loss_config) if sums else torch.zeros(())
        self.update.store(loss)
        return loss.detach()

    def end_epoch(self, hooks: Hooks) -> int | None:
        """Validate, update the best epoch, save; returns the number of the signal to stop, if any."""
        if self.packed is not None:
            self.packed.check()
        row: dict[str, Any] = {
            "epoch": self.epoch + 1,
            "step": self.step_count,
            "lr": self.learning_rate.rate(self.step_count - 1),
            **self.sums.row("train"),
        }
        watched = row["train_loss"]
        if self.validation is not None:
            errors = self.validate()
            row.update(errors.row("validation"))
            watched = row["validation_loss"]
        row["seconds"] = round(self.seconds, 3)
        self.learning_rate.end_of_epoch(watched)
        row["best"] = self.best.end_of_epoch(self.epoch, watched)
        self.history.append(row)
        self.epoch, self.position, self.seconds = self.epoch + 1, 0, 0.0
        self.sums = ErrorSums(self.loss, self.device)
        if row["best"]:
            hooks.best(self)
        hooks.epoch(self, row)
        number = hooks.stop()
        self.save(hooks, at_once=self.finished or number is not None)
        return number

    def validate(self) -> ErrorSums:
        """Compute errors of the averaged weights on the validation frames."""
        assert self.validation is not None and self.validation_loader is not None
        order = measured_batches(self.validation, self.config)
        if self.packed is not None:
            return self.packed.validate(order)
        sums = ErrorSums(self.config.loss.final, self.device)
        for batch in chain.from_iterable(self._in_levels(self.validation, self.validation_loader, order)):
            result = predict(self.average, batch, self.properties)
            labels = batch.sample.labels
            sums.add(residuals(result, labels), batch.sample.system, frame_weights(labels, sums.loss_config))
        return sums

    def blame(self, positions: Sequence[int], loss: float) -> NoReturn:
        """Raise TrainingDiverged for a batch of these frames."""
        raise TrainingDiverged(self._blame(next(self.batches([positions])), loss))

    def _blame(self, parts: Sequence[Batch], loss: float) -> str:
        """Return which frames of a batch have predictions or labels that are not finite; all of them if none has."""
        chosen: list[int] = []
        for batch in parts:
            result = predict(self.potential, batch, self.properties)
            bad = ~torch.isfinite(result.energy)
            if result.forces is not None:
                rows = (~torch.isfinite(result.forces)).any(1)
                bad = bad.index_put((batch.sample.system.batch[rows],), torch.ones_like(rows[rows]))
            chosen += [index for index, wrong in zip(batch.frames, bad.tolist(), strict=True) if wrong]
        chosen = chosen or [index for batch in parts for index in batch.frames]
        names = "; ".join(self.train.data.name(index) for index in chosen)
        return (
            f"step {self.step_count}, epoch {self.epoch + 1}: the loss ({loss}) or its gradient is not finite in "
            f"{names}. Look for wrong labels there, or lower training.lr"
        )

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, hooks: Hooks, at_once: bool) -> None:
        """Save all that the rest of the training depends on, at once or when it is due."""
        if at_once and self.packed is not None:  # else its steps have just been checked
            self.packed.check()  # of all processes, also those that write nothing
        if self.state_path is None or not (at_once or time.monotonic() - self._saved >= self.save_every):
            return
        hooks.save(self)
        tensors = {f"model.{k}": v for k, v in self.potential.state_dict().items()}
        tensors.update({f"average.{k}": v for k, v in self.average.state_dict().items()})
        tensors.update({f"optimizer.{k}": v for k, v in optimizer_tensors(self.optimizer).items()})
        tensors.update({f"sums.{k}": v for k, v in self.sums.sums.items()})
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "identity": self.identity,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step_count,
            "seconds": self.seconds,
            "learning_rate": self.learning_rate.state(),
            "best": self.best.state(),
            "history": self.history,
        }
        save_state(self.state_path, tensors, state)
        self._saved = time.monotonic()

    def restore(self, path: str | os.PathLike) -> None:
        """Continue from a saved state, as if there had been no interruption.

        Raises:
            BadCheckpoint: the file is damaged or belongs to another model.
        """
        tensors, state = load_state(path)
        load_exactly(self.potential, select(tensors, "model"), path)
        load_exactly(self.average, select(tensors, "average"), path)
        restore_optimizer(self.optimizer, select(tensors, "optimizer"))
        self.epoch, self.position, self.step_count = state["epoch"], state["position"], state["step"]
        self.sums = ErrorSums(self.loss, self.device)
        self.sums.sums = {name: value.to(self.device) for name, value in select(tensors, "sums").items()}
        self.seconds, self.history = state["seconds"], state["history"]
        self.learning_rate.restore(state["learning_rate"])
        self.best.restore(state["best"])
        torch.set_rng_state(tensors["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)


def _divided(positions: Sequence[int], levels: np.ndarray) -> list[list[int]]:
    """Return positions of frames by level, the first level first."""
    found: dict[int, list[int]] = {}
    for position in positions:
        found.setdefault(int(levels[position]), []).append(position)
    return [found[level] for level in sorted(found)]


def predict(potential: Potential, batch: Batch, properties: Properties, create_graph: bool = False) -> Result:
    """Return the energy, and forces and stress where the labels need them, at the level of theory of the batch.

    Structures are not checked: a training may have any charge, and its data were checked before.
    """
    if potential.level_names and LEVEL in batch.sample.labels:
        levels = batch.sample.labels[LEVEL].unique().tolist()
        if len(levels) != 1:
            raise ValueError("a batch holds frames of several levels of theory: evaluate them level by level")
        potential = potential.at_level(potential.level_names[int(levels[0])])
    system = batch.sample.system
    stress = properties.stress and "stress" in batch.sample.labels
    if stress:
        system = with_volume(system)
    lists = PairLists(system, {potential.cutoff: batch.neighbors})
    return potential.compute(system, lists, properties.forces, stress, create_graph)


def with_volume(system: System) -> System:
    """Give molecules a unit cell if a batch also has periodic structures; their stress has no label."""
    flat = (system.volume == 0) & ~system.pbc.any(1)
    eye = torch.eye(3, dtype=system.dtype, device=system.device).expand_as(system.cell)
    return system.replace(cell=torch.where(flat[:, None, None], eye, system.cell))
