"""Time steps of a model on this machine: energy and forces of water boxes of growing size, by the Evaluator.

The sizes and the default model are those of docs/performance.md, so that tables of different machines can be
compared.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .checkpoint import load
from .core.devices import wait_for
from .core.files import atomic_write
from .core.html_page import figure_png, missing_plots
from .diagnostics import surroundings
from .engine.check import for_any_composition
from .errors import BadData, StructureWarning
from .evaluator import Evaluator, Precision
from .potential.potential import Potential
from .system import System

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SIDES", "Benchmark", "Timing", "standard_potential", "time_steps", "timed", "warm", "water_box"]

SIDES = (2, 4, 7, 15, 32)
"""Molecules along each side of the boxes: 24, 192, 1,029, 10,125 and 98,304 atoms."""

STANDARD_MODEL = {
    "name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0, "max_z": 128,
}  # fmt: skip
_TIMESTEP = 0.5  # fs
_LEAST_STEPS = 9  # that `timed` takes of a box


@dataclass(frozen=True)
class Timing:
    """Times of steps of one size.

    Attributes:
        atoms: number of atoms.
        ms: milliseconds of a step: neighbor search, energy and forces; the median of five groups.
        lowest: of the fastest group.
        highest: of the slowest group.
        ns_per_day: simulated with time steps of 0.5 fs, if only the step takes time.
        memory_GB: largest memory on the GPU; None on a CPU.
    """

    atoms: int
    ms: float
    lowest: float
    highest: float
    ns_per_day: float
    memory_GB: float | None


@dataclass(frozen=True)
class Benchmark:
    """Times of one model on one device.

    Attributes:
        model: its file or name; "standard" for the model of docs/performance.md with random weights.
        device: its name.
        path: the path at the largest size, as in `Evaluator.report()`.
        periodic: boxes were timed; False: droplets.
        timings: by size.
        stopped: why larger systems were not timed; "" if all were.
        surroundings: versions and devices.
    """

    model: str
    device: str
    path: str
    periodic: bool
    timings: Sequence[Timing]
    stopped: str
    surroundings: dict[str, Any]

    def write(self, prefix: Path) -> list[Path]:
        """Write the values as JSON and, if matplotlib is installed, a plot; returns the files.

        Earlier files of these names are kept as FILE.old.
        """
        import json

        written = [prefix.with_name(prefix.name + ".json")]
        atomic_write(written[0], json.dumps(asdict(self), indent=2) + "\n", keep=True)
        if not missing_plots():
            written.append(prefix.with_name(prefix.name + ".png"))
            atomic_write(written[1], figure_png(self._draw, (5.5, 4)), keep=True)
        return written

    def _draw(self, figure: Figure) -> None:
        axes = figure.subplots()
        axes.loglog([t.atoms for t in self.timings], [t.ms for t in self.timings], "o-")
        water = "periodic" if self.periodic else "droplets"
        axes.set(xlabel=f"atoms (water, {water})", ylabel="ms per step", title=f"{self.model} on {self.device}")
        axes.grid(alpha=0.4, which="both")


def time_steps(
    model: str | None = None,
    device: str = "cpu",
    sides: Sequence[int] = SIDES,
    seconds: float = 60.0,
    report: Callable[[Timing], None] = lambda timing: None,
    level: str | None = None,
    precision: Precision = "native",
    vacuum: bool = False,
) -> Benchmark:
    """Time periodic boxes of water, or droplets in vacuum, the smallest first.

    Args:
        model: .tmn file or the name of a potential; None: the model of docs/performance.md with random weights.
        device: where it runs.
        sides: molecules along each side of the boxes.
        seconds: time for the boxes after the first one, which also compiles kernels. A box that is expected to take
            longer is left out.
        report: function that is called with each result.
        level: level of theory, of a model that was trained on several; None: its default.
        precision: of the `Evaluator`.
        vacuum: time droplets.

    Raises:
        BadData: the model does not know H and O.
        ValueError: there are no kernels of this precision.
    """
    potential = standard_potential().to(device) if model is None else load(model, device, level=level)
    missing = [symbol for z, symbol in ((1, "H"), (8, "O")) if potential.elements and z not in potential.elements]
    if missing:
        raise BadData(f"{model}: the benchmark needs water, and this model does not know {' and '.join(missing)}")
    evaluator, start = Evaluator(potential, precision=precision), 0.0
    all_pairs = vacuum and math.inf in _cutoffs(potential)
    timings: list[Timing] = []
    stopped, path = "", ""
    for side in sorted(sides):
        atoms = 3 * side**3
        if timings:
            expected = _LEAST_STEPS * timings[-1].ms * 1e-3 * (atoms / timings[-1].atoms) ** (2 if all_pairs else 1)
            if time.perf_counter() - start + expected > seconds:
                stopped = f"{atoms:,d} atoms would exceed the time limit of {seconds:g} s"
                break
        try:
            system = water_box(side).replace(cell=None, pbc=None) if vacuum else water_box(side)
            timings.append(_time_box(evaluator, system.to(device)))
            start = start or time.perf_counter()
        except torch.OutOfMemoryError:
            stopped = f"{atoms:,d} atoms do not fit into the memory of the GPU"
            break
        path = evaluator.report()
        report(timings[-1])
    names = surroundings()
    where = names["devices"].get("cuda:0" if device == "cuda" else device, device)
    return Benchmark(model or "standard", where, path, not vacuum, timings, stopped, names)


def warm(model: str, device: str = "cpu", sizes: Sequence[int] = (22,), level: str | None = None) -> str:
    """Compile the kernels that a model needs on this machine for structures of these sizes, and keep them on disk.

    These are the kernels of energy and forces of a molecule and of a periodic box, and of the stress of the box.

    Args:
        model: .tmn file or the name of a potential.
        device: where it will run.
        sizes: numbers of atoms; on a GPU kernels differ between sizes.
        level: level of theory, of a model that was trained on several; None: its default.

    Returns:
        The path that runs, see `Evaluator.report`.
    """
    potential = for_any_composition(load(model, device, level=level))
    evaluator = Evaluator(potential)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StructureWarning)  # of structures that nobody gave
        for size in sizes:
            for periodic, stress in ((False, False), (True, False), (True, True)):
                system = _lattice(potential, size, periodic).to(device)
                for _ in range(2):  # the second call captures a graph
                    evaluator(system, stress=stress)
    return evaluator.report()


def _lattice(potential: Potential, num_atoms: int, periodic: bool) -> System:
    """Return atoms 2.5 Å apart, a molecule or a periodic box: of the elements of water in a box, and of those of a
    protein in a molecule, as far as the model knows them, since kernels differ between numbers of elements."""
    wanted = (8, 1) if periodic else (8, 1, 6, 7, 16)
    known = [z for z in wanted if not potential.elements or z in potential.elements] or potential.elements[:1]
    side = math.ceil(num_atoms ** (1 / 3))
    axis = torch.arange(side, dtype=torch.float64)
    pos = 2.5 * torch.cartesian_prod(axis, axis, axis)[:num_atoms]
    pos = pos + 0.1 * torch.randn(pos.shape, dtype=pos.dtype, generator=torch.Generator().manual_seed(0))
    cell = (2.5 if periodic else 0.0) * side * torch.eye(3, dtype=torch.float64)
    return System(z=torch.tensor(known).repeat(num_atoms)[:num_atoms], pos=pos, cell=cell)


def _cutoffs(potential: Potential) -> list[float | None]:
    """Return cutoffs of the sums over pairs that are added to the network, Å."""
    cutoffs = [prior.cutoff for prior in potential.priors]
    return cutoffs + ([] if potential.head is None else [potential.head.pair_cutoff])


def standard_potential() -> Potential:
    """Return the model of docs/performance.md with random weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        potential = Potential.from_config({"model": STANDARD_MODEL})
    return potential.eval().requires_grad_(False)


def _time_box(evaluator: Evaluator, system: System) -> Timing:
    cuda = system.pos.is_cuda
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(system.pos.device)
    bound = evaluator.bind(system)
    found = timed(bound.replay, system.pos.device)
    if not bound.check():
        found = timed(bound.replay, system.pos.device)
    memory = torch.cuda.max_memory_allocated(system.pos.device) / 1e9 if cuda else None
    speed = _TIMESTEP * 1e-6 * 86400e3 / found["ms"]
    return Timing(system.num_atoms, found["ms"], found["low"], found["high"], speed, memory)


def timed(
    step: Callable[[], Any], device: torch.device | str, seconds: float = 0.4, most: int = 300
) -> dict[str, float]:
    """Return milliseconds per step: the median of five groups of steps, and the fastest and slowest group.

    Args:
        step: the function to time; it is called three times before.
        device: where it runs; the timing waits for it.
        seconds: approximate duration of all groups.
        most: largest number of steps.

    Returns:
        "ms", "low" and "high".
    """

    def milliseconds(count: int) -> float:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait_for(device)
        return (time.perf_counter() - start) / count * 1e3

    one = [milliseconds(1) for _ in range(4)][-1]  # the first ones compile
    each = max(1, min(most, int(seconds * 1e3 / max(one, 1e-3))) // 5)
    groups = [milliseconds(each) for _ in range(5)]
    return {"ms": statistics.median(groups), "low": min(groups), "high": max(groups)}


def water_box(side: int, seed: int = 0) -> System:
    """Return side³ water molecules on a cubic lattice in random orientations, at the density of water; periodic.

    Args:
        side: molecules along each side of the box.
        seed: of places and orientations.
    """
    rng = np.random.default_rng(seed)
    spacing = (1 / 0.0334) ** (1 / 3)  # Å, of molecules at 0.0334 per Å³
    place = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) * spacing
    place = place + rng.normal(0, 0.1, place.shape)
    molecule = np.array([[0, 0, 0], [0.9572, 0, 0], [-0.2400, 0.9266, 0]])
    q = rng.normal(size=(len(place), 4))
    a, b, c, d = (q / np.linalg.norm(q, axis=1, keepdims=True)).T
    rows = [
        [1 - 2 * (c * c + d * d), 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), 1 - 2 * (b * b + d * d), 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), 1 - 2 * (b * b + c * c)],
    ]
    rotation = np.moveaxis(np.array(rows), 2, 0)
    pos = (np.einsum("nij,kj->nki", rotation, molecule) + place[:, None]).reshape(-1, 3)
    return System(
        z=torch.tensor([8, 1, 1]).repeat(len(place)),
        pos=torch.tensor(pos, dtype=torch.float32),
        cell=torch.eye(3) * spacing * side,
    )
