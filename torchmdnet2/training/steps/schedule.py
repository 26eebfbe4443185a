"""Learning rate, weight average and early stopping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..config.config import TrainingConfig

__all__ = ["BestEpoch", "LearningRate", "update_average"]


class LearningRate:
    """Linear warm-up, then cosine decay, plateau reductions, or a constant.

    Args:
        config: lr, lr_schedule and their parameters.
        total_steps: steps of the whole training, where cosine reaches lr_min.

    Attributes:
        time: share of the time of `max_minutes` that is over, 0 to 1; cosine follows it where it is ahead of the steps.
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
        """Learning rate of step 0, 1, …"""
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
        """How much of the weights after step 0, 1, … goes into their average.

        Exponential: 1 − min(ema_decay, (1 + step)/(10 + step)), so that the first steps, far from the solution, are
        forgotten soon. In the stage of equal weights: 1, 1/2, 1/3, …
        """
        if self.config.swa is not None and step >= self.swa_step:
            return 1 / (step - self.swa_step + 1)
        return 1 - min(self.config.ema_decay, (1 + step) / (10 + step))

    def end_of_epoch(self, loss: float) -> None:
        """Tell the validation loss; plateau reduces after `lr_patience` epochs without improvement."""
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
    """Which epoch was the best so far, and whether to stop.

    Args:
        patience: epochs without improvement after which to stop; None: never.
    """

    def __init__(self, patience: int | None):
        self.patience = patience
        self.loss, self.epoch, self.waited = math.inf, -1, 0

    def end_of_epoch(self, epoch: int, loss: float) -> bool:
        """True when this epoch is the best one."""
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


@torch.no_grad()
def update_average(average: nn.Module, current: nn.Module, share: float) -> None:
    """Move the averaged weights towards the current ones: average ← (1 − share)·average + share·current.

    Args:
        average, current: modules with the same parameters.
        share: see `LearningRate.average_share`; 1 copies the current weights.
    """
    for a, c in zip(average.parameters(), current.parameters(), strict=True):
        a.lerp_(c, share)
