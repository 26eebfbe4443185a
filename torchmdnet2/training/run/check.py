"""`train --check`: run all checks and say what the training will take; nothing is written."""

from __future__ import annotations

import math
import time

import torch

from ...potential import SYMBOLS
from ...units import KB
from ..config.config import Config
from ..config.labels import property_of
from ..reporting.log import TrainingLog
from ..steps.batches import training_batches
from ..steps.distributed import Devices
from ..steps.metrics import UNITS
from ..steps.trainer import Trainer
from .data_notes import closest_pair
from .setup import make_setup, require_usable
from .start import introduce, make_trainer, own_torch_state, pack_steps, take_threads

__all__ = ["run_check"]

_STEPS = 3  # timed ones
_PASSES = 4  # over these steps, at most
_SETTLED = 0.7  # of the time of the pass before: it was no faster


def run_check(config: Config, log: TrainingLog) -> None:
    """Open the data, check the labels, build the model, take a few steps on throw-away weights, report.

    Args:
        config: from `load_config`.
        log: where to report.

    Raises:
        BadConfig, BadData, FileNotFoundError, TrainingDiverged: as the training would.
    """
    with own_torch_state(config):
        setup = make_setup(config)
        require_usable(setup)
        trainer = make_trainer(setup, None)
        take_threads(setup, trainer)
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
        distance, where = closest_pair(setup.frames["train"])
        if where:
            log.say(f"closest atoms: {distance:.3f} Å, in {where}")
        if facts["forces_rms"] is not None:
            log.say(f"rms of the force components: {facts['forces_rms']:.4g} {UNITS['forces']}")
            if not 10 * KB < facts["forces_rms"] < 100:
                log.say("note: that is unusual; are data.units right?")
        packing = pack_steps(trainer, Devices())
        if packing is not None:
            log.say(packing)
        seconds, memory = _measure(trainer)
        epoch = seconds * trainer.steps_per_epoch
        steps = "step" if trainer.steps_per_epoch == 1 else "steps"
        log.say(f"{trainer.steps_per_epoch} {steps} per epoch of {1e3 * seconds:.0f} ms: {_duration(epoch)} per epoch")
        count = config.training.max_epochs
        log.say(f"{count} epoch{'' if count == 1 else 's'}: about {_duration(epoch * count)}")
        log.say(f"memory of a step: about {memory / 2**20:.0f} MiB")
        threads = torch.get_num_threads()
        if trainer.device.type == "cpu" and threads > 1:
            torch.set_num_threads(1)
            alone, _ = _measure(trainer)
            log.say(f"threads: {threads}, {1e3 * seconds:.0f} ms a step; with one {1e3 * alone:.0f} ms")
            if alone < seconds:
                log.say("note: one thread is faster here and now: training.num_threads: 1")
        log.say("the configuration is fine; nothing was written")


def _measure(trainer: Trainer) -> tuple[float, float]:
    """Seconds of one step, and bytes that it needs, on the first batches of the first epoch."""
    order = (training_batches(trainer.train, trainer.config, 0) * (_STEPS + 1))[: _STEPS + 1]
    if trainer.packed is not None:
        _device_memory(trainer.device, reset=True)
        seconds, last = _run(trainer, order), math.inf  # captures graphs, compiles kernels
        for _ in range(_PASSES):  # kernels for another number of threads may be compiled after the first steps
            last, seconds = seconds, _run(trainer, order)
            if seconds > _SETTLED * last:
                break
        seconds = min(last, seconds) / len(order)
        if trainer.device.type == "cuda":
            return seconds, _device_memory(trainer.device)
        return seconds, _activation_bytes(trainer, list(trainer.train_loader(order)))
    batches = [batch.to(trainer.device) for batch in trainer.train_loader(order)]
    memory = _activation_bytes(trainer, batches)
    times = []
    for batch in batches[:_STEPS]:
        start = time.perf_counter()
        trainer.step(batch)  # its float(loss) waits for the device
        times.append(time.perf_counter() - start)
    return min(times), memory


def _run(trainer: Trainer, order: list[list[int]]) -> float:
    """Seconds that these steps take."""
    _wait(trainer.device)
    start = time.perf_counter()
    for _ in trainer.steps(order):
        pass
    _wait(trainer.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_memory(device: torch.device, reset: bool = False) -> float:
    """Most bytes that were in use on a GPU since the last reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return float(torch.cuda.max_memory_allocated(device))


def _activation_bytes(trainer: Trainer, batches: list) -> float:
    """Tensors kept for the gradient of the largest of the batches, or the device's own count."""
    largest = max(batches, key=lambda batch: batch.neighbors.num_edges)
    if trainer.device.type == "cuda":
        _device_memory(trainer.device, reset=True)
        trainer.step(largest)
        return _device_memory(trainer.device)
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
