"""Evaluation of structures given as NumPy arrays, shared by the adapters.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.bound import BoundStep
from ..ensemble import Ensemble, EnsembleBoundStep, EnsembleResult
from ..evaluator import Evaluator
from ..potential.graph import molecule_dipole
from ..potential.output import RESULTS, SPREADS
from ..potential.potential import Result
from ..system import System

__all__ = ["BOUND_UP_TO", "ArrayEvaluator", "NonFiniteResult", "Structure"]

BOUND_UP_TO = 50_000  # atoms; above, the time that a bound step saves is not worth the memory of its buffers
_PER_ATOM = {"energies", *(name for name, output in RESULTS.items() if output.per_atom)}


class NonFiniteResult(ValueError):
    """A result of the model is not finite.

    Args:
        name: name of the result.
        atom: index of the atom; None if the result is not one of atoms.
        known_as: the user's name of that atom.
    """

    def __init__(self, name: str, atom: int | None = None, known_as: str = ""):
        where = "" if atom is None else f" at {known_as or f'atom {atom}'}"
        super().__init__(
            f"the model's '{name}' is not finite{where}: the structure is unphysical (atoms too close or too far "
            "apart?)"
        )
        self.name, self.atom = name, atom


@dataclass(eq=False, frozen=True)
class Structure:
    """A copy of the parts of a structure that enter the model.

    Attributes:
        numbers: [N] atomic numbers.
        positions: [N, 3] Å, float64.
        cell: [3, 3] Å, lattice vectors as rows.
        pbc: [3] booleans.
        charge: total charge in e.
        spin: multiplicity 2S+1; 0 if not given.
    """

    numbers: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    charge: int = 0
    spin: int = 0

    @property
    def composition(self) -> tuple[bytes, bytes, int, int]:
        """Return everything but positions and cell, for comparison."""
        return self.numbers.tobytes(), self.pbc.tobytes(), self.charge, self.spin

    @property
    def has_volume(self) -> bool:
        """True if the cell has a volume, which the stress needs."""
        return abs(float(np.linalg.det(self.cell))) > 0

    def differences(self, other: Structure) -> list[str]:
        """Return the names of entries that differ in any bit."""
        mine, others = vars(self), vars(other)
        return [name for name, value in mine.items() if not _same(value, others[name])]

    def to_system(self, device: torch.device) -> System:
        """Return the structure as tensors on a device; positions and cell in float64."""
        return System(
            z=torch.tensor(self.numbers, dtype=torch.long, device=device),
            pos=torch.tensor(self.positions, dtype=torch.float64, device=device),
            cell=torch.tensor(self.cell, dtype=torch.float64, device=device),
            pbc=torch.tensor(self.pbc, device=device),
            charge=torch.tensor([self.charge], dtype=torch.float64, device=device),
            spin=torch.tensor([self.spin], device=device),
        )


class ArrayEvaluator:
    """Evaluates structures one after another, or in batches. It has no lock: the adapter that owns it needs one.

    From the second evaluation of a composition on, a bound step runs over static buffers, without checks of the
    composition. On a GPU, one copy from pinned memory transfers the positions, one copy returns all results, and the
    host waits once.

    Args:
        evaluator: evaluator of one potential, or an ensemble.
        device: device of the potentials.
    """

    def __init__(self, evaluator: Evaluator | Ensemble, device: torch.device):
        self.evaluator, self.device = evaluator, device
        members = evaluator.members if isinstance(evaluator, Ensemble) else [evaluator.potential]
        self._has_charges, self._has_dipole = (
            all(name in member.outputs for member in members) for name in ("charges", "dipole")
        )
        self._may_bind = True
        self._composition: tuple[bytes, bytes, int, int] | None = None
        self._template: System | None = None
        self._cell = b""
        self._steps: dict[bool, _HostStep | None] = {}  # with and without stress; None: evaluated once

    def __call__(self, structure: Structure, stress: bool = False) -> dict[str, Any]:
        """Return the results of one structure.

        Returns:
            "energy" (float, eV), "forces" [N, 3] (eV/Å), "energies" [N] (eV), "stress" [3, 3] (eV/Å³) if requested,
            "charges" [N] (e) and "dipole" [3] (e·Å) if the model predicts them. A model with charges also gives the
            dipole of structures that are not periodic. An ensemble adds each name with "_std", except for the dipole
            of charges. All arrays are new and float64.

        Raises:
            ValueError, UnknownElement: as the Potential; ValueError if a result is not finite.
        """
        # PyTorch's context takes a part of the step of a small molecule
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            values = self._evaluate(structure, stress)
        return self._complete(_one(values, 0, slice(None)), structure)

    def batch(self, structures: Sequence[Structure], stress: bool = False) -> Iterator[dict[str, Any]]:
        """Evaluate several structures as one batch; return the results of each, as a call does.

        With the stress, structures without a volume are evaluated in a separate batch; their stress is NaN.
        """
        solid = [stress and s.has_volume for s in structures]
        batches = {
            kind: self._batch([s for s, is_solid in zip(structures, solid, strict=True) if is_solid == kind], kind)
            for kind in set(solid)
        }
        for is_solid in solid:
            found = next(batches[is_solid])
            if stress and not is_solid:
                names = ("stress", "stress_std") if "energy_std" in found else ("stress",)
                found |= {name: np.full((3, 3), np.nan) for name in names}
            yield found

    def _batch(self, structures: Sequence[Structure], stress: bool) -> Iterator[dict[str, Any]]:
        with torch.inference_mode(False):
            whole = System.concatenate([s.to_system(self.device) for s in structures])
            values = _to_numpy(self.evaluator(whole, forces=True, stress=stress), self._has_dipole)
        end = 0
        for b, structure in enumerate(structures):
            start, end = end, end + len(structure.numbers)
            found = self._complete(_one(values, b, slice(start, end)), structure)
            yield {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in found.items()}

    def _complete(self, found: dict[str, Any], structure: Structure) -> dict[str, Any]:
        """Add the dipole of the charges to the results; raise NonFiniteResult if a number is not finite."""
        if self._has_charges and not self._has_dipole and not structure.pbc.any():
            found["dipole"] = molecule_dipole(found["charges"], structure.numbers, structure.positions)
        return _finite(found)

    def _evaluate(self, structure: Structure, stress: bool) -> dict[str, np.ndarray]:
        composition = structure.composition
        if composition != self._composition:
            self._composition, self._template, self._steps = composition, structure.to_system(self.device), {}
        if self._may_bind and stress in self._steps:
            step = self._steps.pop(stress)  # not kept when it fails: the next call checks everything
            if step is None:
                step = self._bind(structure, stress)
            if step is not None:
                values = _to_numpy(step(structure), self._has_dipole)
                self._steps[stress] = step
                return values
        result = self.evaluator(self._system(structure), forces=True, stress=stress)
        if len(structure.numbers) <= BOUND_UP_TO:
            self._steps[stress] = None
        return _to_numpy(result, self._has_dipole)

    def _bind(self, structure: Structure, stress: bool) -> _HostStep | None:
        try:
            return _HostStep(self.evaluator.bind(self._system(structure), stress=stress))
        except torch.cuda.OutOfMemoryError:
            self._may_bind = False  # the buffers of the evaluator are enough
            return None

    def _system(self, structure: Structure) -> System:
        """Return the structure as tensors; unchanged parts keep their tensors, which the evaluator need not check."""
        assert self._template is not None
        cell = structure.cell.tobytes()
        if cell != self._cell:
            self._template.cell = torch.from_numpy(structure.cell).to(self.device)[None]
            self._cell = cell
        return self._template.at(torch.from_numpy(structure.positions).to(self.device))


class _HostStep:
    """A bound step with inputs and results in host memory."""

    def __init__(self, bound: BoundStep | EnsembleBoundStep):
        self._bound = bound
        pinned = bound.pos.device.type == "cuda"
        self._pos = torch.zeros_like(bound.pos, device="cpu", pin_memory=pinned)
        self._cell = torch.zeros_like(bound.cell, device="cpu", pin_memory=pinned)
        self._pos_array, self._cell_array = self._pos.numpy(), self._cell.numpy()[0]
        self._entered = b""

    def __call__(self, structure: Structure) -> Result:
        """Return results in memory that the next call overwrites."""
        bound = self._bound
        self._pos_array[...] = structure.positions
        bound.pos.copy_(self._pos, non_blocking=True)
        cell = structure.cell.tobytes()
        if cell != self._entered:
            self._cell_array[...] = structure.cell
            bound.cell.copy_(self._cell, non_blocking=True)
            self._entered = cell
        while True:
            bound.replay()
            result = bound.fetch()
            if result is not None:
                return result


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b


def _to_numpy(result: Result, dipole: bool) -> dict[str, np.ndarray]:
    """Return results under ASE's names, as new float64 arrays; a dipole only if a head predicts it."""
    tensors: dict[str, Tensor | None] = {name: result.properties.get(name) for name in SPREADS}
    tensors |= {
        "forces": result.forces,
        "energies": result.atom_energies,
        "energy": result.energy,
        "stress": result.stress,
        "charges": result.charges,
        "dipole": result.properties.get("dipole") if dipole else None,
    }
    if isinstance(result, EnsembleResult):
        tensors |= {
            "energy_std": result.energy_std,
            "forces_std": result.forces_std,
            "energies_std": result.atom_energies_std,
            "stress_std": result.stress_std,
            "charges_std": result.charges_std,
            "dipole_std": result.properties_std.get("dipole") if dipole else None,
        }
    return {k: np.array(t.numpy(force=True), dtype=np.float64) for k, t in tensors.items() if t is not None}


def _one(values: dict[str, np.ndarray], b: int, atoms: slice) -> dict[str, Any]:
    """Return the results of one structure of a batch."""
    results: dict[str, Any] = {}
    for name, value in values.items():
        if name.removesuffix("_std") in _PER_ATOM:
            results[name] = value[atoms]
        else:
            results[name] = value[b] if value.ndim > 1 else float(value[b])
    return results


def _finite(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results unchanged; raise NonFiniteResult if one is not finite."""
    for name, value in results.items():
        # one product takes less time than to look at each number, in the step of a small molecule
        if not (math.isfinite(np.vdot(value, value)) or np.isfinite(value).all()):
            per_atom = name.removesuffix("_std") in _PER_ATOM
            raise NonFiniteResult(name, int(np.argwhere(~np.isfinite(value))[0][0]) if per_atom else None)
    return results
