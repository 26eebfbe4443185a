"""The start of a run: torch's state, the training loop, the choice of its steps, and what the log says first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import BadConfig
from ...fused.thread_tuner import amount_of_work
from ...processes import usable_threads
from ...version import __version__
from ..config.config import Config
from ..config.labels import property_of
from ..reporting.log import TrainingLog
from ..steps.distributed import Devices
from ..steps.loop import pack_trainer, pays_on_cpu, wants_numba
from ..steps.trainer import Trainer
from .data_notes import data_notes
from .setup import SUBSETS, Setup, device_of

__all__ = ["introduce", "make_trainer", "own_torch_state", "pack_steps", "take_threads"]

_SMALL = 1_000_000
"""Work of a training step that gains at most 15 % by a second thread, in units of `thread_tuner.amount_of_work`
(TensorNet and graph network on 16 idle cores; three times as much work gains up to a third). Where other programs use
the cores, threads wait for each other, and such steps take five to ten times as long."""


@contextmanager
def own_torch_state(config: Config) -> Iterator[None]:
    """Random numbers and the number of threads of this run; torch's own are as before afterwards."""
    threads = torch.get_num_threads()
    device = device_of(config.training.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.training.seed)
        torch.set_num_threads(usable_threads(config.training.num_threads or threads))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def make_trainer(setup: Setup, state_path: Path | None) -> Trainer:
    """The training loop of a setup."""
    config = setup.config
    return Trainer(
        setup.potential,
        setup.frames["train"],
        setup.frames.get("validation"),
        config.training,
        setup.properties,
        num_workers=config.data.num_workers,
        state_path=state_path,
        save_every=config.output.save_every_steps,
        save_after=config.output.save_every_seconds,
        identity={"config": config.to_dict(), "data": setup.digests},
    )


def take_threads(setup: Setup, trainer: Trainer) -> None:
    """One thread for small steps, where the configuration leaves the number open.

    It depends on nothing but the configuration and the data: weights are the same in every run.
    """
    if setup.config.training.num_threads is None and trainer.device.type == "cpu":
        facts, steps = setup.facts, trainer.steps_per_epoch
        network = setup.potential.representation
        layers = max(1, int(getattr(network, "num_layers", setup.config.model.get("num_layers", 1))))
        work = amount_of_work(sum(facts["atoms"]), sum(facts["edges"]), network.hidden_channels, layers) // steps
        if work < _SMALL:
            torch.set_num_threads(1)


def pack_steps(trainer: Trainer, devices: Devices) -> str | None:
    """Steps from packed frames where that can be done and pays, replayed on a GPU; shared among the devices.

    Returns:
        What there is to say of it.

    Raises:
        BadConfig: it was asked for and cannot be.
    """
    wanted = trainer.config.cuda_graphs
    on_gpu, shared = trainer.device.type == "cuda", devices.size > 1
    if wanted is True and not on_gpu:
        raise BadConfig("CUDA graphs need an NVIDIA GPU; set training.cuda_graphs to auto or false")
    if not shared and (not wanted or not (on_gpu or pays_on_cpu(trainer))):
        if wanted and wants_numba(trainer):
            return "note: steps take about half the time with numba: pip install 'torchmdnet2[cpu]'"
        return None
    if shared and not wanted:
        raise BadConfig("training.cuda_graphs: several devices need it; set it to auto or true")
    reason = pack_trainer(trainer, devices)
    if reason is not None and shared:
        raise BadConfig(f"several devices cannot be used with {reason}; start one process, without torchrun")
    if reason is not None and wanted is True:
        raise BadConfig(f"training.cuda_graphs: cannot be used with {reason}; set it to auto or false")
    if reason is not None:
        return f"note: training without CUDA graphs (slower), because of {reason}" if on_gpu else None
    assert trainer.packed is not None
    memory = f"{trainer.packed.num_bytes / 1e6:.0f} MB of frames on each device"
    if shared:
        return f"{devices.size} processes, each with a share of every batch; {memory}"
    if on_gpu:
        return f"steps are replayed from CUDA graphs; {memory}"
    return "steps run on compiled kernels; the first step may wait half a minute for them, once"


def introduce(setup: Setup, trainer: Trainer, log: TrainingLog) -> None:
    """Say what is about to be trained on what."""
    facts = setup.facts
    parameters = sum(p.numel() for p in trainer.parameters)
    counts = ", ".join(f"{len(setup.frames[name])} {name}" for name in SUBSETS if name in setup.frames)
    total = len(setup.frames["train"])
    log.say(f"torchmdnet2 {__version__}, {trainer.device}, {setup.config.training.precision}")
    log.say(f"frames: {counts}")
    for name, labelled in facts["labelled"].items():
        if labelled < total:
            log.say(
                f"note: {total - labelled} of {total} training frames have no {property_of(name)}; they are left out "
                "of that loss"
            )
    for note in setup.notes:
        log.say(note)
    log.say(f"{setup.config.model['name']}: {parameters} parameters, cutoff {setup.potential.cutoff} Å")
    for note in [] if trainer.step_count else data_notes(setup, trainer.total_steps):
        log.say(f"note: {note}")
    if trainer.step_count:
        log.say(f"resumed at epoch {trainer.epoch + 1}, step {trainer.step_count}")
