"""What gives the energies of a scan: a model, an ensemble, or a calculator of ASE as reference.

Shapes: N atoms, n points of a path.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase import Atoms

from ..adapters.model import open_model
from ..devices import device_of, dtype_of
from ..ensemble import Ensemble, EnsembleResult
from ..errors import BadConfig, MissingBackend
from ..evaluator import Evaluator
from ..potential import Potential
from ..potentials import is_name
from ..system import System
from .paths import Array, ScanPath

if TYPE_CHECKING:
    from ase.calculators.calculator import Calculator

__all__ = ["CalculatorSurface", "ModelSurface", "Samples", "Surface", "open_reference"]

_ATOMS = 4000  # of a batch
Request = tuple[ScanPath, Array]
Models = str | os.PathLike | Potential | Ensemble | Sequence[str | os.PathLike]


@dataclass(frozen=True)
class Samples:
    """Points of a path.

    Attributes:
        values: [n] the coordinate, Å or rad.
        energy: [n] eV; NaN where there is none.
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
        name: for people.
        precise: whether forces are computed in float64.
    """

    name: str
    precise: bool

    @abstractmethod
    def __call__(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Samples]:
        """Energies and forces along paths.

        Args:
            requests: paths, and the values [n] of their coordinates.
            progress: is told how many points were computed, now and then.
        """


class ModelSurface(Surface):
    """A model or an ensemble.

    Args:
        models: a .tmn file, the name of a potential, or a Potential; an ensemble, its ensemble.json, or a list of
            files or names.
        device, dtype, allow_untrained_charge: as of `torchmdnet2.load`.

    Raises:
        FileNotFoundError, BadCheckpoint, ValueError: as `torchmdnet2.load` and `Ensemble`.
    """

    def __init__(
        self,
        models: Models,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = torch.float32,
        allow_untrained_charge: bool = False,
    ):
        listed = [models] if isinstance(models, str | os.PathLike | Potential | Ensemble) else list(models)
        self.name = ", ".join("a model in memory" if isinstance(m, Potential | Ensemble) else str(m) for m in listed)
        only = listed[0] if len(listed) == 1 else None
        self._evaluate: Evaluator | Ensemble
        if isinstance(only, Ensemble):
            self._evaluate = only
        elif only is None or str(only).endswith(".json"):
            files: Any = listed if only is None else only
            self._evaluate = Ensemble.load(files, device_of(device), dtype_of(dtype), allow_untrained_charge)
        else:
            self._evaluate = Evaluator(open_model(only, device, dtype, allow_untrained_charge)[0])

    @property
    def members(self) -> list[Potential]:
        """The models of an ensemble, or the only one."""
        found = self._evaluate
        return list(found.members) if isinstance(found, Ensemble) else [found.potential]

    @property
    def precise(self) -> bool:  # type: ignore[override]
        return all(member.dtype == torch.float64 for member in self.members)

    def in_float64(self) -> ModelSurface:
        """The same surface in float64: slower, and without rounding. Itself where it is that already."""
        if self.precise:
            return self
        exact = copy.copy(self)
        doubled = [copy.deepcopy(member).double() for member in self.members]
        exact._evaluate = Ensemble(doubled) if isinstance(self._evaluate, Ensemble) else Evaluator(doubled[0])
        return exact

    @property
    def cutoff(self) -> float:
        """The largest of all members and their priors, Å; some priors have none, or an infinite one."""
        priors = [prior.cutoff for member in self.members for prior in member.priors]
        found = [*(member.cutoff for member in self.members), *(c for c in priors if c is not None)]
        return max(c for c in found if math.isfinite(c))

    def check(self, system: System) -> None:
        """Raise what the members refuse (`Potential.check`)."""
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
            if isinstance(result, EnsembleResult) and result.energy_std is not None:
                spreads.append(result.energy_std.cpu().numpy())
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
    """A calculator of ASE, one structure after the other.

    Args:
        name: for people.
        make: a calculator for a total charge and a multiplicity 2S+1 (0: not given).
    """

    precise = True

    def __init__(self, name: str, make: Callable[[int, int], Calculator]):
        self.name, self._make = name, make

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
    """A reference by its name: "gfn2-xtb", "gfn1-xtb", a model as of ModelSurface, or a calculator of ASE.

    Raises:
        BadConfig: there is no such reference.
        MissingBackend: what it needs is not installed.
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
            "name of a potential (`torchmdnet2 models`) or of a calculator of ASE, as emt"
        )
    try:
        kind = get_calculator_class(known)
    except ImportError as error:
        raise MissingBackend(f"--reference {name}: {error.name} is not installed") from error
    return CalculatorSurface(known, lambda charge, spin: kind())


_XTB = {"gfn1-xtb": "GFN1-xTB", "gfn2-xtb": "GFN2-xTB"}


def _xtb(method: str) -> Callable[[int, int], Calculator]:
    try:
        from tblite.ase import TBLite
    except ImportError as error:
        raise MissingBackend(f"--reference {method}: tblite is not installed (pip install tblite)") from error
    return lambda charge, spin: TBLite(method=method, verbosity=0, charge=charge, multiplicity=spin or None)


def _parts(systems: Iterable[System]) -> Iterator[list[System]]:
    """Batches of a few thousand atoms."""
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
