"""The start of a run: torch's state, the training loop, the choice of its steps, the first lines of the log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from ...core.devices import usable_threads, wait_for
from ...errors import BadConfig
from ...kernels.interfaces import amount_of_work
from ...potential.potential import SYMBOLS
from ...units import KB
from ...version import __version__
from ..config.config import Config
from ..config.sections import property_of
from ..reporting.log import TrainingLog
from ..steps.batches import training_batches
from ..steps.distributed import Devices
from ..steps.loop import pack_trainer, pays_on_cpu, wants_numba
from ..steps.loss import UNITS
from ..steps.trainer import Trainer
from .folder import splits_digest
from .levels import require_one_level
from .notes import closest_pair, data_notes
from .setup import SUBSETS, Setup, device_of, make_setup, naming_frames, require_usable

__all__ = [
    "introduce", "make_trainer", "naming_compilation", "own_torch_state", "pack_steps", "run_check", "take_threads",
]  # fmt: skip


_SMALL = 1_000_000
"""Work of a training step that gains at most 15 % by a second thread, in units of `kernels.interfaces.amount_of_work`
(TensorNet and graph network on 16 idle cores; three times as much work gains up to a third). Where other programs use
the cores, threads wait for each other, and such steps take five to ten times as long."""


@contextmanager
def own_torch_state(config: Config) -> Iterator[None]:
    """Set random numbers and number of threads for this run; torch's are restored afterwards."""
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
    """Return the training loop of a setup."""
    config = setup.config
    return Trainer(
        setup.potential,
        setup.frames["train"],
        setup.frames.get("validation"),
        config.training,
        setup.properties,
        num_workers=config.data.num_workers,
        state_path=state_path,
        save_every=config.output.save_every_seconds,
        identity={"config": config.to_dict(), "data": setup.digests, "splits": splits_digest(setup.splits)},
    )


def take_threads(setup: Setup, trainer: Trainer) -> None:
    """Use one thread for small steps, if the configuration leaves the number open.

    The choice depends only on configuration and data, so that weights are the same in every run.
    """
    if setup.config.training.num_threads is None and trainer.device.type == "cpu":
        facts, steps = setup.facts, trainer.steps_per_epoch
        network = setup.potential.representation
        layers = max(1, int(getattr(network, "num_layers", setup.config.model.get("num_layers", 1))))
        work = amount_of_work(sum(facts["atoms"]), sum(facts["edges"]), network.hidden_channels, layers) // steps
        if work < _SMALL:
            torch.set_num_threads(1)


def pack_steps(trainer: Trainer, devices: Devices) -> str | None:
    """Let steps run on packed frames if that is possible and faster; replayed on a GPU, and shared among the devices.

    Returns:
        A line for the log.

    Raises:
        BadConfig: the configuration asks for it, and it is not possible.
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
        raise BadConfig("training.cuda_graphs: several devices need CUDA graphs; set it to auto or true")
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
    return "steps run on compiled kernels"


@contextmanager
def naming_compilation(trainer: Trainer, log: TrainingLog) -> Iterator[None]:
    """Log that kernels are compiled, before the first one in a block that a CPU's packed steps need and numba has not
    kept."""
    if trainer.packed is None or trainer.device.type != "cpu":
        yield
        return
    from ...core.compiling_cpu import before_compiling  # needs numba

    with before_compiling(lambda: log.say("compiling kernels for the CPU, which may take half a minute, once")):
        yield


def introduce(setup: Setup, trainer: Trainer, log: TrainingLog) -> None:
    """Log data, model and settings at the start."""
    parameters = sum(p.numel() for p in trainer.parameters)
    counts = ", ".join(f"{len(setup.frames[name].once[0])} {name}" for name in SUBSETS if name in setup.frames)
    total = len(setup.frames["train"])
    log.say(f"torchmdnet2 {__version__}, {trainer.device}, {setup.config.training.precision}")
    distinct = len(setup.frames["train"].once[0])
    log.say(f"frames: {counts}{'' if distinct == total else f'; an epoch has {total}, with repetitions'}")
    if setup.config.data.citation != "not stated":
        log.say(f"please cite the data: {setup.config.data.citation}")
    for name, labelled in setup.labelled.items():
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


# --- `train --check`: run all checks and say what the training will take; nothing is written ---

_STEPS = 3  # timed ones
_PASSES = 4  # over these steps, at most
_SETTLED = 0.7  # of the time of the pass before: it was no faster


def run_check(config: Config, log: TrainingLog) -> None:
    """Open the data, check the labels, build the model, take a few steps on weights that are not kept, report.

    Args:
        config: from `load_config`.
        log: where to report.

    Raises:
        BadConfig, BadData, FileNotFoundError, TrainingDiverged: as the training.
    """
    with own_torch_state(config), ExitStack() as held:
        setup = make_setup(config)
        require_usable(setup)
        require_one_level(config, setup.frames, setup.statistics)
        held.enter_context(naming_frames(setup))
        trainer = make_trainer(setup, None)
        take_threads(setup, trainer)
        introduce(setup, trainer, log)
        facts = setup.facts
        total = len(setup.frames["train"])
        counts = [f"{property_of(name)} in {count} of {total}" for name, count in setup.labelled.items()]
        log.say(f"labels of training frames: {', '.join(counts)}")
        for level in setup.potential.level_names or [""]:
            potential = setup.potential.at_level(level) if level else setup.potential
            for prior in potential.config["priors"]:
                if prior["name"] == "atomref" and prior["energies"]:
                    table = ", ".join(f"{SYMBOLS[int(z)]} {energy:.3f}" for z, energy in prior["energies"].items())
                    log.say(f"reference energies{f' of {level}' if level else ''} (eV): {table}")
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
        notes = log.notes  # of the data; those below are about speed
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
                log.say("note: one thread is faster at the moment: training.num_threads: 1")
        but = f", but read the {notes} notes above" if notes > 1 else ", but read the note above" * notes
        log.say(f"the configuration is fine{but}; nothing was written")


def _measure(trainer: Trainer) -> tuple[float, float]:
    """Return the duration in s and memory in bytes of one step, on the first batches of the first epoch."""
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
        return seconds, _activation_bytes(trainer, list(trainer.batches(order)))
    batches = list(trainer.batches(order))
    memory = _activation_bytes(trainer, batches)
    times = []
    for batch in batches[:_STEPS]:
        start = time.perf_counter()
        trainer.step(*batch)  # its float(loss) waits for the device
        times.append(time.perf_counter() - start)
    return min(times), memory


def _run(trainer: Trainer, order: list[list[int]]) -> float:
    """Return the duration of these steps in s."""
    wait_for(trainer.device)
    start = time.perf_counter()
    for _ in trainer.steps(order):
        pass
    wait_for(trainer.device)
    return time.perf_counter() - start


def _device_memory(device: torch.device, reset: bool = False) -> float:
    """Return the largest memory of a GPU in bytes since the last reset; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return float(torch.cuda.max_memory_allocated(device))


def _activation_bytes(trainer: Trainer, batches: list) -> float:
    """Return the bytes of tensors that are kept for the gradient of the largest batch, or of the device's memory."""
    largest = max(batches, key=lambda parts: sum(part.neighbors.num_edges for part in parts))
    if trainer.device.type == "cuda":
        _device_memory(trainer.device, reset=True)
        trainer.step(*largest)
        return _device_memory(trainer.device)
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(*largest)
    return float(sum(seen.values()))


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{math.ceil(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
