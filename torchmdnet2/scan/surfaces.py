"""Surfaces that a scan evaluates, the scanned curves, and the display of progress."""

from __future__ import annotations

import copy
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase import Atoms
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..adapters.model import open_model
from ..core.devices import device_of, dtype_of
from ..ensemble import Ensemble, EnsembleResult
from ..errors import BadConfig, MissingBackend
from ..evaluator import Evaluator
from ..potential.potential import Potential
from ..potentials import is_name
from ..system import System
from .paths import Array, ScanPath

__all__ = [
    "CalculatorSurface", "Curve", "Finding", "Minimum", "ModelSurface", "Samples", "ScanProgress", "Surface",
    "minima", "open_reference",
]  # fmt: skip


_EVERY = 10.0  # s between lines


class ScanProgress:
    """Shows the number of computed structures and the time left: a bar in a terminal, lines elsewhere.

    Args:
        console: console for the display; None shows nothing.
    """

    def __init__(self, console: Console | None):
        self.console = console
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f} structures, left"), TimeRemainingColumn(),
                console=console, transient=True,
            )  # fmt: skip
        self.begin("", 0)

    def __enter__(self) -> ScanProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, stage: str, total: int) -> None:
        """Begin a stage.

        Args:
            stage: name of the stage.
            total: number of structures in it.
        """
        self._stage, self._total, self._done = stage, total, 0
        self._started = self._reported = time.perf_counter()
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            if total:
                self._bar.add_task(stage, total=total)
        elif total:
            self._print(f"{stage}: {total} structures")

    def advance(self, structures: int) -> None:
        """Add a number of computed structures."""
        self._done += structures
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=self._done)
            return
        clock = time.perf_counter()
        if self._done < self._total and clock - self._reported > _EVERY:
            self._reported = clock
            left = (clock - self._started) / self._done * (self._total - self._done)
            self._print(f"{self._stage}: {self._done} of {self._total} structures, {left:.0f} s left")

    def _print(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)


# --- Surfaces: a model, an ensemble, or a calculator of ASE as reference ---

if TYPE_CHECKING:
    from ase.calculators.calculator import Calculator


_ATOMS = 4000  # largest number of atoms in a batch
Request = tuple[ScanPath, Array]
Models = str | os.PathLike | Potential | Ensemble | Sequence[str | os.PathLike]


@dataclass(frozen=True)
class Samples:
    """Energies and forces at points of a path.

    Attributes:
        values: [n] values of the coordinate, Å or rad.
        energy: [n] eV; NaN where the calculation failed.
        force: [n] −dE/d(coordinate), from the forces on the atoms, eV/Å or eV/rad.
        spread: [n] eV, standard deviation of an ensemble's members; None without members.
    """

    values: Array
    energy: Array
    force: Array
    spread: Array | None = None


class Surface(ABC):
    """A potential-energy surface.

    Attributes:
        name: name for reports.
        precise: True if forces are computed in float64.
    """

    name: str
    precise: bool

    @abstractmethod
    def __call__(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Samples]:
        """Compute energies and forces along paths.

        Args:
            requests: paths, and the values [n] of their coordinates.
            progress: function that is called repeatedly with the number of points computed since the last call.
        """

    def check(self, system: System) -> None:  # noqa: B027 (most have nothing to refuse)
        """Raise an error for a structure that cannot be computed, such as one whose charge would be ignored."""


class ModelSurface(Surface):
    """The surface of a model or an ensemble.

    Args:
        models: a .tmn file, the name of a potential, or a Potential; an ensemble, its ensemble.json, or a list of
            files or names.
        device, dtype, allow_untrained_charge, level: as for `torchmdnet2.load`.

    Raises:
        FileNotFoundError, BadCheckpoint, ValueError: as `torchmdnet2.load` and `Ensemble`.
    """

    def __init__(
        self,
        models: Models,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = torch.float32,
        allow_untrained_charge: bool = False,
        level: str | None = None,
    ):
        listed = [models] if isinstance(models, str | os.PathLike | Potential | Ensemble) else list(models)
        self.name = ", ".join("a model in memory" if isinstance(m, Potential | Ensemble) else str(m) for m in listed)
        only = listed[0] if len(listed) == 1 else None
        self._evaluate: Evaluator | Ensemble
        if isinstance(only, Ensemble):
            self._evaluate = only if level is None else Ensemble(member.at_level(level) for member in only.members)
        elif only is None or str(only).endswith(".json"):
            files: Any = listed if only is None else only
            self._evaluate = Ensemble.load(
                files, device_of(device), dtype_of(dtype), allow_untrained_charge, level=level
            )
        else:
            self._evaluate = Evaluator(open_model(only, device, dtype, allow_untrained_charge, level=level)[0])

    @property
    def members(self) -> list[Potential]:
        """The models of an ensemble, or the only one."""
        found = self._evaluate
        return list(found.members) if isinstance(found, Ensemble) else [found.potential]

    @property
    def precise(self) -> bool:  # type: ignore[override]
        return all(member.dtype == torch.float64 for member in self.members)

    def in_float64(self) -> ModelSurface:
        """Return the same surface in float64, which is slower but precise; the surface itself if it is in float64."""
        if self.precise:
            return self
        exact = copy.copy(self)
        doubled = [copy.deepcopy(member).double() for member in self.members]
        exact._evaluate = Ensemble(doubled) if isinstance(self._evaluate, Ensemble) else Evaluator(doubled[0])
        return exact

    @property
    def cutoff(self) -> float:
        """Largest cutoff of all members and their priors in Å, without priors that have none or an infinite one."""
        priors = [prior.cutoff for member in self.members for prior in member.priors]
        found = [*(member.cutoff for member in self.members), *(c for c in priors if c is not None)]
        return max(c for c in found if math.isfinite(c))

    def check(self, system: System) -> None:
        """Raise an error for a structure that a member refuses (`Potential.check`)."""
        for member in self.members:
            member.check(system.to(member.device))

    def __call__(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Samples]:
        systems = [system for path, values in requests for system in path.systems(values)]
        tangents = np.concatenate([path.tangents(values).reshape(-1, 3) for path, values in requests])
        energies, forces, spreads = [], [], []
        for part in _parts(systems):
            batch = System.concatenate(part).to(self.members[0].device)
            result = self._evaluate(batch, forces=True)
            assert result.forces is not None
            along, tangents = tangents[: batch.num_atoms], tangents[batch.num_atoms :]
            projected = (result.forces.double().cpu() * torch.from_numpy(along)).sum(1)
            total = torch.zeros(batch.num_systems, dtype=torch.float64).index_add(0, batch.batch.cpu(), projected)
            energies.append(result.energy.cpu().numpy())
            forces.append(total.numpy())
            spread = result.properties.get("energy_std")
            if isinstance(result, EnsembleResult):
                spread = result.energy_std
            if spread is not None:
                spreads.append(spread.cpu().numpy())
            if progress is not None:
                progress(batch.num_systems)
        columns = [np.concatenate(energies), np.concatenate(forces)]
        columns += [np.concatenate(spreads)] if spreads else []
        found, first = [], 0
        for _, values in requests:
            found.append(Samples(values, *(column[first : first + len(values)] for column in columns)))
            first += len(values)
        return found


class CalculatorSurface(Surface):
    """The surface of a calculator of ASE, which computes one structure after the other.

    Args:
        name: name for reports.
        make: function that returns a calculator for a total charge and a multiplicity 2S+1 (0: not given).
    """

    precise = True

    def __init__(self, name: str, make: Callable[[int, int], Calculator]):
        self.name, self._make = name, make

    def check(self, system: System) -> None:
        self._make(int(system.charge[0]), int(system.spin[0]))

    def __call__(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Samples]:
        found = []
        for path, values in requests:
            system = path.system
            atoms = Atoms(system.z.numpy(), path.origin)
            atoms.calc = self._make(int(system.charge[0]), int(system.spin[0]))
            energy, force = np.full((2, len(values)), math.nan)
            frames = zip(path.positions(values), path.tangents(values), strict=True)
            for k, (positions, tangent) in enumerate(frames):
                atoms.positions = positions
                try:
                    energy[k], force[k] = atoms.get_potential_energy(), float((atoms.get_forces() * tangent).sum())
                except Exception:  # a calculation that does not converge is a gap in the curve
                    atoms.calc = self._make(int(system.charge[0]), int(system.spin[0]))
                if progress is not None:
                    progress(1)
            found.append(Samples(values, energy, force))
        return found


def open_reference(name: str, device: str = "cpu", allow_untrained_charge: bool = False) -> Surface:
    """Open a reference by its name: "gfn2-xtb", "gfn1-xtb", a model as for ModelSurface, or a calculator of ASE.

    Raises:
        BadConfig: there is no such reference.
        MissingBackend: a package that it needs is not installed.
        FileNotFoundError, BadCheckpoint: as `torchmdnet2.load`.
    """
    if name.endswith((".tmn", ".json")):
        return ModelSurface(name, device, torch.float64, allow_untrained_charge)
    known = name.lower()
    if is_name(name):
        return ModelSurface(name, device, torch.float64, allow_untrained_charge)
    if known in _XTB:
        return CalculatorSurface(_XTB[known], _xtb(_XTB[known]))
    from ase.calculators.calculator import get_calculator_class, names

    if known not in names:
        raise BadConfig(
            f"--reference: '{name}' is not a reference: give {', '.join(_XTB)}, a .tmn file, an ensemble.json, or the "
            "name of a potential (`torchmdnet2 models`) or of a calculator of ASE, such as emt"
        )
    try:
        kind = get_calculator_class(known)
    except ImportError as error:
        raise MissingBackend(f"--reference {name}: {error.name} is not installed") from error
    return CalculatorSurface(known, partial(_by_name, known, kind))


_ARGUMENTS: dict[str, tuple[str, str | None]] = {
    "cp2k": ("charge", "multiplicity"),
    "gaussian": ("charge", "mult"),
    "mopac": ("charge", None),
    "orca": ("charge", "mult"),
    "psi4": ("charge", "multiplicity"),
    "qchem": ("charge", "multiplicity"),
}
"""Calculator of ASE -> its arguments for the total charge and the multiplicity 2S+1."""


def _by_name(name: str, kind: Callable[..., Calculator], charge: int, spin: int) -> Calculator:
    arguments = _ARGUMENTS.get(name, (None, None))
    given: dict[str, int] = {}
    for quantity, argument, value, usual in (("charge", arguments[0], charge, (0,)),
                                             ("multiplicity", arguments[1], spin, (0, 1))):  # fmt: skip
        if argument is not None and (quantity == "charge" or value):
            given[argument] = value
        elif argument is None and value not in usual:
            raise BadConfig(
                f"--reference: the molecule has the {quantity} {value}, which is not passed to the calculator '{name}' "
                f"of ASE: give {', '.join(_XTB)} or one of {', '.join(_ARGUMENTS)}; in Python, a CalculatorSurface"
            )
    return kind(**given)


_XTB = {"gfn1-xtb": "GFN1-xTB", "gfn2-xtb": "GFN2-xTB"}


def _xtb(method: str) -> Callable[[int, int], Calculator]:
    try:
        from tblite.ase import TBLite
    except ImportError as error:
        raise MissingBackend(f"--reference {method}: tblite is not installed (pip install tblite)") from error
    return lambda charge, spin: TBLite(method=method, verbosity=0, charge=charge, multiplicity=spin or None)


def _parts(systems: Iterable[System]) -> Iterator[list[System]]:
    """Yield batches of a few thousand atoms."""
    part: list[System] = []
    atoms = 0
    for system in systems:
        part.append(system)
        atoms += system.num_atoms
        if atoms >= _ATOMS:
            yield part
            part, atoms = [], 0
    if part:
        yield part


# --- Scanned curves and their minima ---

WELL = (0.8, 1.25)
"""A bond's minimum is between these multiples of its length, since thermal frames and the minimum of the model differ
by less."""


@dataclass(frozen=True)
class Finding:
    """A fault of a curve.

    Attributes:
        kind: one of `findings.KINDS`.
        value: value of the coordinate at the fault, Å or rad.
        size: size of the fault, in the unit of its kind.
        text: description for reports.
    """

    kind: str
    value: float
    size: float
    text: str


@dataclass(eq=False)
class Curve:
    """Energies along one path.

    Attributes:
        path: the path.
        model: samples of the model.
        reference: samples of the reference, at every fifth point; None without a reference.
        findings: faults of the model.
        excused: faults that the reference has too.
        jumps: largest jump of each kind that refinement found (`findings.KINDS`), in eV, eV/Å and eV/Å²; with rad for a
            torsion.
    """

    path: ScanPath
    model: Samples
    reference: Samples | None = None
    findings: list[Finding] = field(default_factory=list)
    excused: list[Finding] = field(default_factory=list)
    jumps: dict[str, float] = field(default_factory=dict)

    def relative(self, samples: Samples | None = None) -> Array:
        """Return energies above the zero of the curve, [n] eV, of the model by default.

        The zero is the minimum of a bond's well, the lowest point of a torsion, or the farthest point of a contact.
        """
        samples = self.model if samples is None else samples
        return samples.energy - zero(self.path, samples)

    def at(self, multiple: float, samples: Samples | None = None) -> float:
        """Return the energy (`relative`) at a multiple of the usual value, interpolated; NaN outside the scan."""
        samples = self.model if samples is None else samples
        x = samples.values / self.path.usual
        if not x[0] - 1e-9 <= multiple <= x[-1] + 1e-9:
            return float("nan")
        return float(np.interp(multiple, x, self.relative(samples)))


def zero(path: ScanPath, samples: Samples) -> float:
    """Return the energy that is the zero of a curve, eV; NaN if there is none."""
    energy = samples.energy
    if path.kind == "contact":
        return float(energy[-1])
    if path.kind == "bond":
        x = samples.values / path.usual
        energy = energy[(x >= WELL[0]) & (x <= WELL[1])]
    return float(np.nanmin(energy)) if np.isfinite(energy).any() else float("nan")


@dataclass(frozen=True)
class Minimum:
    """A minimum of a curve.

    Attributes:
        index: index of its point.
        depth: depth in eV below the lower of the two barriers around it; an end of the curve is not a barrier.
    """

    index: int
    depth: float


def minima(energy: Array, least: float) -> list[Minimum]:
    """Return the minima of at least a given depth in order; ends of the curve may be minima.

    Depth is persistence: points are flooded from the lowest up, and where two basins meet, the higher minimum ends with
    the depth that it has reached. The lowest minimum is always returned.

    Args:
        energy: [n] eV; NaN separates basins like an infinite wall.
        least: least depth in eV.
    """
    energy = np.where(np.isfinite(energy), energy, np.inf)
    lowest: dict[int, int] = {}  # representative point of a basin -> its minimum
    owner = np.full(len(energy), -1)

    def find(k: int) -> int:
        while owner[k] != k:
            k = int(owner[k])
        return k

    found = []
    for k in np.argsort(energy, kind="stable").tolist():
        if not np.isfinite(energy[k]):
            break
        basins = {find(n) for n in (k - 1, k + 1) if 0 <= n < len(energy) and owner[n] >= 0}
        owner[k] = k
        if not basins:
            lowest[k] = k
            continue
        first, *others = sorted(basins, key=lambda b: energy[lowest[b]])
        owner[k] = first
        for other in others:
            depth = float(energy[k] - energy[lowest[other]])
            if depth >= least:
                found.append(Minimum(lowest[other], depth))
            owner[other] = first
    roots = {find(k) for k in range(len(energy)) if owner[k] >= 0}
    found += [Minimum(lowest[root], float("inf")) for root in roots]
    return sorted(found, key=lambda minimum: minimum.index)
