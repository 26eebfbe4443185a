"""`train --check`: try everything once and say what the training will take; nothing is written."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from ..potential import SYMBOLS
from ..units import KB
from .batches import training_batches
from .config import Config
from .labels import property_of
from .metrics import UNITS

if TYPE_CHECKING:
    from .log import TrainingLog
    from .trainer import Trainer

__all__ = ["run_check"]

_STEPS = 3  # timed ones


def run_check(config: Config, log: TrainingLog) -> None:
    """Open the data, check the labels, build the model, take a few steps on throw-away weights, report.

    Args:
        config: from `load_config`.
        log: where to report.

    Raises:
        BadConfig, BadData, FileNotFoundError, TrainingDiverged: as the training would.
    """
    from .run import introduce, make_trainer, own_torch_state
    from .setup import make_setup, require_usable

    with own_torch_state(config):
        setup = make_setup(config)
        require_usable(setup)
        trainer = make_trainer(setup, None)
        introduce(setup, trainer, log)
        facts = setup.facts
        total = len(setup.frames["train"])
        counts = [f"{property_of(name)} in {count} of {total}" for name, count in facts["labelled"].items()]
        log.say(f"labels of training frames: {', '.join(counts)}")
        for prior in setup.potential.config["priors"]:
            if prior["name"] == "atomref" and prior["energies"]:
                table = ", ".join(f"{SYMBOLS[int(z)]} {energy:.3f}" for z, energy in prior["energies"].items())
                log.say(f"reference energies (eV): {table}")
        atoms, edges = facts["atoms"], facts["edges"]
        per_atom = sum(edges) / max(1, sum(atoms))
        log.say(f"atoms per frame: {min(atoms)} to {max(atoms)}; neighbors within the cutoff: {per_atom:.1f} per atom")
        if per_atom < 1:
            log.say("note: most atoms have no neighbor; is data.units.length right?")
        if facts["forces_rms"]:
            log.say(f"rms of the force components: {facts['forces_rms']:.4g} {UNITS['forces']}")
            if not 10 * KB < facts["forces_rms"] < 100:
                log.say("note: that is unusual; are data.units right?")
        seconds, memory = _measure(trainer)
        epoch = seconds * trainer.steps_per_epoch
        log.say(f"{trainer.steps_per_epoch} steps per epoch of {1e3 * seconds:.0f} ms: {_duration(epoch)} per epoch")
        log.say(f"{config.training.max_epochs} epochs: about {_duration(epoch * config.training.max_epochs)}")
        log.say(f"memory of a step: about {memory / 2**20:.0f} MiB")
        log.say("the configuration is fine; nothing was written")


def _measure(trainer: Trainer) -> tuple[float, float]:
    """Seconds of one step and bytes of its activations, on the first batches of the first epoch."""
    config = trainer.config
    order = training_batches(trainer.train, config, 0)
    batches = [batch.to(trainer.device) for batch in trainer.train_loader(order[: _STEPS + 1])]
    memory = _activation_bytes(trainer, batches)
    times = []
    for i in range(_STEPS):
        start = time.perf_counter()
        trainer.step(batches[i % len(batches)])  # its float(loss) waits for the device
        times.append(time.perf_counter() - start)
    return min(times), memory


def _activation_bytes(trainer: Trainer, batches: list) -> float:
    """Tensors kept for the gradient of the largest of the batches, or the device's own count."""
    largest = max(batches, key=lambda batch: batch.neighbors.num_edges)
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step(largest)
        return float(torch.cuda.max_memory_allocated(trainer.device))
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(largest)
    return float(sum(seen.values()))


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
