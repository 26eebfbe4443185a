"""ASE: calculators for a potential and for a committee, and second derivatives of the energy."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, CalculatorSetupError, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor

from ..core.devices import ProcessLock
from ..core.pipeline import blocks_of
from ..core.stated import cell_of, charge_and_spin, whole_number
from ..ensemble import Ensemble, read_ensemble
from ..evaluator import Evaluator, Precision
from ..potential.novelty import Watch, common_scores, rated
from ..potential.output import SPREADS
from ..potential.potential import Potential, has_dipole
from ..potential.refusals import rename, require_flag
from ..system import System
from ..version import __version__
from .arrays import ArrayEvaluator, NonFiniteResult, Structure
from .isolated import made_whole
from .model import ModelSource, dtype_name, in_memory, open_model

__all__ = ["CommitteeCalculator", "NoStress", "TorchMDNet2Calculator", "hessian"]


def hessian(potential: Potential, system: System) -> Tensor:
    """Compute ∂²E/∂pos∂pos of one structure exactly, by 3N derivatives of the forces; O(N²) time and memory.

    Args:
        potential: any potential. Its precision limits the result: use float64.
        system: one structure of N atoms.

    Returns:
        [3N, 3N] eV/Å², float64, symmetric; zero for atoms whose forces are constant.

    Raises:
        ValueError, UnknownElement: as the Potential; ValueError for several structures.
    """
    if system.num_systems != 1:
        raise ValueError(f"a Hessian needs one structure, got {system.num_systems}")
    with torch.inference_mode(False), torch.enable_grad():
        pos = system.pos.detach().clone().requires_grad_()
        forces = potential.reference(system.replace(pos=pos), create_graph=True).forces
        assert forces is not None
        rows = []
        for force in forces.flatten():
            row = None
            if force.requires_grad:
                (row,) = torch.autograd.grad(force, pos, retain_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(pos).flatten() if row is None else -row.flatten())
    found = torch.stack(rows).double() if rows else pos.new_zeros(0, 0).double()
    return (found + found.T) / 2


# --- ASE calculator: energy, forces, stress, atom energies of any potential of this package ---


class NoStress(PropertyNotImplementedError, ValueError):
    """The stress was requested for a structure whose cell has no volume."""


class TorchMDNet2Calculator(Calculator):
    """ASE calculator: energy (eV), forces (eV/Å), stress (eV/Å³, Voigt xx yy zz yz xz xy, tensile positive).

    It also gives `free_energy` (= energy), `energies` [N] (eV, their sum is the energy) and, if the model has them,
    `charges` [N] (e) and `dipole` (e·Å). If a model has charges but no dipole, molecules get the dipole of the charges
    about the centre of mass.

    Total charge and spin multiplicity are those that the structure states (`atoms.info["charge"]`, `["spin"]` and other
    names, the sums of initial charges and of initial magnetic moments: see `System.from_ase`), else those given here,
    else 0. Values that differ are an error. A result is kept until the structure, its charge or its multiplicity
    changes.

    The stress is computed only on request. Any cell and any combination of periodic directions is allowed. The
    user's Atoms and torch's global settings are never changed; one calculator may be used from several threads.

    A calibrated model (`torchmdnet2 calibrate`) also gives `novelty` [N]; an atom above 1 is unlike those of the
    training. It is computed on request, at the first calculation of a composition, and at every 1000th after that. A
    warning names atoms above 1, once for each element.

    A pickle holds the path and checksum of the model file, not the weights; of a model in memory, the content that
    its file would have.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential (copied: later changes to it have no effect).
        device: "cpu", "cuda", "cuda:1", …
        dtype: floating-point type of the network, torch.float32 or torch.float64; None keeps the stored one.
            Positions, cell and energies are float64 in either case.
        charge: total charge in e of every structure; a structure that states another one is an error. None takes the
            stated one, else 0.
        spin: multiplicity 2S+1, likewise; None or 0: not given.
        allow_untrained_charge: evaluate total charges that the model was not trained on, or does not use, with a
            warning; they are refused otherwise.
        isolated: each structure is one molecule: made whole where it is wrapped into a periodic cell, and evaluated
            without the cell, as in vacuum. It must be shorter than half of the shortest width of the cell, and has no
            stress.
        coulomb: method for Coulomb sums over all pairs in periodic cells, "pme" or "dsf", as for `torchmdnet2.load`;
            None takes "pme", or the method of a given Potential.
        level: level of theory, for a model that was trained on several; None takes its default.
        precision: of the kernels on a GPU, "native" or "mixed" (faster), as for `Evaluator`.

    Raises:
        FileNotFoundError, BadCheckpoint: the model file is missing or damaged.
        ValueError: charge or spin is not a whole number, a flag is not True or False, or the device, dtype or precision
            cannot be used.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies"]  # noqa: RUF012 (ASE's way)
    precision: Precision = "native"  # of a committee too

    def __init__(
        self,
        model: str | os.PathLike | Potential,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        charge: int | None = None,
        spin: int | None = None,
        allow_untrained_charge: bool = False,
        isolated: bool = False,
        coulomb: str | None = None,
        level: str | None = None,
        precision: Precision = "native",
    ):
        self.precision = precision
        self._set_up([open_model(model, device, dtype, allow_untrained_charge, coulomb, level)], charge, spin, isolated)

    def _set_up(
        self, opened: list[tuple[Potential, ModelSource | None]], charge: Any, spin: Any, isolated: bool
    ) -> None:
        self._entered: Structure | None = None
        self.isolated = require_flag(isolated, "isolated")
        super().__init__()
        self.charge = None if charge is None else whole_number(charge, "charge")
        self.spin = whole_number(0 if spin is None else spin, "spin")
        self._potentials, self._sources = [p for p, _ in opened], [source for _, source in opened]
        self._rated = rated(self._potentials)
        self._evaluate = ArrayEvaluator(self._evaluator(), self._potentials[0].device)
        self.implemented_properties = self._names()
        self._lock = ProcessLock()
        self._stress_wanted = False
        self._watch, self._watched = Watch(), b""

    def _evaluator(self) -> Evaluator | Ensemble:
        return Evaluator(self._potentials[0], self.precision)

    def _names(self) -> list[str]:
        """Return properties that this model provides."""
        extra = [_extra_properties(p) for p in self._potentials]
        common = [name for name in extra[0] if all(name in e for e in extra)]
        return [*type(self).implemented_properties, *common, *(["novelty"] if self._rated else [])]

    def _look(self, structure: Structure, asked: bool) -> dict[str, np.ndarray]:
        """Compute the novelty, the largest of all calibrated members, when it is requested or due."""
        if not self._rated:
            return {}
        atoms = structure.numbers.tobytes()
        if atoms != self._watched:
            self._watch.restart()
            self._watched = atoms
        due = self._watch.due(len(structure.numbers))
        if not (asked or due):
            return {}
        system = structure.to_system(self.potential.device)
        scores = common_scores(self._rated, system)
        if due:
            self._watch(scores, system)
        return {"novelty": scores.cpu().numpy()}

    @property
    def potential(self) -> Potential:
        """The calculator's frozen copy of the potential."""
        return self._potentials[0]

    # --- methods that ASE calls ----------------------------------------------------------------------------------

    @property
    def atoms(self) -> Atoms | None:
        """The structure of the last calculation, as a new Atoms object."""
        last = self._entered
        if last is None:
            return None
        info = {name: value for name, value in (("charge", last.charge), ("spin", last.spin)) if value}
        return Atoms(numbers=last.numbers, positions=last.positions, cell=last.cell, pbc=last.pbc, info=info)

    @atoms.setter
    def atoms(self, atoms: Atoms | None) -> None:
        self.reset()  # the results belong to the previous input
        self._entered = None if atoms is None else self._structure(atoms)

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """Return a property for ASE: stored if the input is unchanged, else computed. Arrays are new.

        Args:
            name: name of the property, as in `implemented_properties`.
            atoms: the structure; None takes the last one.
            allow_calculation: compute a property that is not stored; False returns None instead.
        """
        if name not in self.implemented_properties:
            raise PropertyNotImplementedError(
                f"this model does not provide '{name}'; it provides {', '.join(self.implemented_properties)}"
            )
        with self._lock:
            given = None if atoms is None else self._structure(atoms)  # once: it takes a part of a small step
            changes = [] if given is None else self._differences(given)
            if changes:
                self.reset()
            if name not in self.results:
                if not allow_calculation:
                    return None
                if name == "novelty" and self._entered is not None:
                    self.results |= self._look(self._entered, asked=True)
                else:
                    self.calculate(given, [name], changes)
            self._stress_wanted |= name in ("stress", "stress_std")  # it may have come with the forces
            if name not in self.results:
                raise PropertyNotImplementedError(
                    f"a periodic structure has no '{name}': that of point charges depends on the choice of the cell"
                )
            value = self.results[name]
            return value.copy() if isinstance(value, np.ndarray) else value

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Return which inputs differ, in any bit, from the last calculation; "charge" and "spin" as used.

        Args:
            atoms: the structure to compare.
            tol: not used; any change counts.
        """
        return self._differences(self._structure(atoms))

    def _differences(self, structure: Structure) -> list[str]:
        return list(all_changes) if self._entered is None else self._entered.differences(structure)

    def calculate(
        self,
        atoms: Atoms | Structure | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Fill `results` for one structure.

        Args:
            atoms: the structure, as Atoms or as this calculator copies it; None takes the one of the last calculation.
            properties: "stress" adds the stress; energy and forces are always computed.
            system_changes: ignored, everything is computed again.

        Raises:
            ValueError: a position, cell, charge or spin cannot be used (the message names the atom), or a result is
                not finite.
            UnknownElement, UntrainedCharge: the model does not know an element, or the total charge.
            NoStress: the stress is requested, but the structure has no cell with a volume.
        """
        with self._lock:
            given = self._entered if atoms is None else atoms
            structure = given if given is None or isinstance(given, Structure) else self._structure(given)
            if structure is None:
                raise CalculatorSetupError("no structure was given to the calculator: pass one to its method")
            self.reset()
            asked = not {"stress", "stress_std"}.isdisjoint(properties or [])
            # a barostat or cell optimiser asks for forces, then for stress, at every step: do it in one go
            stress = asked or self._stress_wanted
            if stress and not structure.has_volume:
                if asked:
                    if self.isolated:
                        raise NoStress("an isolated molecule has no stress: do not request it, or leave isolated out")
                    raise NoStress(
                        "the stress needs a cell with a volume, and this structure has none: set all three lattice "
                        "vectors (atoms.cell), or do not request the stress"
                    )
                stress = False
            found = self._evaluate(structure, stress)
            self.results = _in_ase_form(found | self._look(structure, "novelty" in (properties or [])))
            self._entered = structure
            self._stress_wanted = asked

    def set(self, **given: Any) -> dict[str, int | None]:
        """Change `charge` or `spin`; return what has changed. A charge of None removes it.

        Raises:
            TypeError: any other name.
            ValueError: not a whole number.
        """
        unknown = sorted(given.keys() - {"charge", "spin"})
        if unknown:
            raise TypeError(f"only charge and spin can be changed, not {', '.join(unknown)}: create a new calculator")
        new = {
            name: None if name == "charge" and value is None else whole_number(value, name)
            for name, value in given.items()
        }
        new = {name: value for name, value in new.items() if value != getattr(self, name)}
        vars(self).update(new)
        return new

    def todict(self, skip_default: bool = True) -> dict[str, Any]:
        """Identify the model in plain data; ASE stores it in databases and trajectories.

        Args:
            skip_default: for ASE, ignored.

        Returns:
            "models", a list with "file" and "sha256" (None for a model in memory), "level_of_theory" (None if it is
            not stated) and "dtype" of each member; "charge", "spin", "isolated" and "torchmdnet2" (the version).
        """
        models = []
        for potential, source in zip(self._potentials, self._sources, strict=True):
            file = {"file": None, "sha256": None} if source is None else {"file": source.path, "sha256": source.sha256}
            level, dtype = potential.level_of_theory, dtype_name(potential.dtype)
            models.append({**file, "level_of_theory": level, "dtype": dtype})
        options = {"charge": self.charge, "spin": self.spin, "isolated": self.isolated}
        return {"models": models, **options, "torchmdnet2": __version__}

    def reset(self) -> None:
        """Discard the last result."""
        self._entered, self.results = None, {}

    def get_hessian(self, atoms: Atoms) -> np.ndarray:
        """Return the exact second derivatives of the energy, [3N, 3N] eV/Å²; for a committee their mean.

        `ase.vibrations.VibrationsData.from_2d(atoms, calc.get_hessian(atoms))` gives frequencies and modes. Use
        dtype=torch.float64, since frequencies are differences of large numbers. Constraints are ignored.

        Args:
            atoms: the structure, N atoms.

        Raises:
            ValueError, UnknownElement: as `calculate`; ValueError if the result is not finite.
        """
        with self._lock:
            system = self._structure(atoms).to_system(self.potential.device).validate()
            mean = torch.stack([hessian(potential, system) for potential in self._potentials]).mean(0)
        if not bool(torch.isfinite(mean).all()):
            raise NonFiniteResult("hessian")
        return mean.cpu().numpy()

    # --- many structures at once ----------------------------------------------------------------------------------

    def evaluate(self, frames: Iterable[Atoms], batch_size: int = 64, stress: bool = False) -> Iterator[dict[str, Any]]:
        """Compute results of many structures in batches; the stored last result stays unchanged.

        Args:
            frames: structures of any size and composition; they are not changed.
            batch_size: number of structures in a batch.
            stress: compute the stress too; NaN for structures without a cell that has a volume.

        Yields:
            For each structure in turn the content that `results` would have.

        Raises:
            ValueError, UnknownElement, UntrainedCharge: as `calculate`; the message names the structure by its place in
                `frames`, from 0. ValueError for a batch size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        first = 0
        for batch in blocks_of(frames, batch_size):
            with self._lock:
                try:
                    found = list(self._evaluate.batch([self._structure(atoms) for atoms in batch], stress))
                except ValueError:
                    self._blame(batch, first, stress)
                    raise
            yield from map(_in_ase_form, found)
            first += len(batch)

    def _blame(self, batch: list[Atoms], first: int, stress: bool) -> None:
        """Raise the error of the first structure that cannot be evaluated alone, with its number in the list."""
        for k, atoms in enumerate(batch):
            try:
                list(self._evaluate.batch([self._structure(atoms)], stress))
            except ValueError as error:
                rename(error, f"frame {first + k}")
                raise

    def _structure(self, atoms: Atoms) -> Structure:
        charge, spin = charge_and_spin(atoms, self.charge, self.spin)
        cell, pbc = cell_of(atoms)
        positions = np.array(atoms.positions, dtype=np.float64)
        if self.isolated:
            positions, cell, pbc = made_whole(positions, cell, pbc), np.zeros((3, 3)), np.zeros(3, dtype=bool)
        return Structure(atoms.numbers.copy(), positions, cell, pbc, charge or 0, spin or 0)

    # --- copies and pickles ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            sources = [s or in_memory(p) for s, p in zip(self._sources, self._potentials, strict=True)]
            return {
                "sources": [vars(source) for source in sources],
                "device": str(self.potential.device),
                "dtypes": [dtype_name(p.dtype) for p in self._potentials],
                "charge": self.charge,
                "spin": self.spin,
                "isolated": self.isolated,
                "precision": self.precision,
                "allow_untrained_charge": self.potential.allow_untrained_charge,
                "coulomb": self.potential.coulomb,
                "entered": None if self._entered is None else vars(self._entered),
                "results": self.results,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        sources = [ModelSource(**source) for source in state["sources"]]
        allow, coulomb = state["allow_untrained_charge"], state.get("coulomb")
        opened = [
            s.open(state["device"], dtype, allow, coulomb) for s, dtype in zip(sources, state["dtypes"], strict=True)
        ]
        kept = [source if source.path else None for source in sources]
        self.precision = state.get("precision", "native")  # pickles of before have none
        self._set_up(list(zip(opened, kept, strict=True)), state["charge"], state["spin"], state["isolated"])
        self._entered = None if state["entered"] is None else Structure(**state["entered"])
        self.results = state["results"]

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchMDNet2Calculator:
        return self.__copy__()

    def __copy__(self) -> TorchMDNet2Calculator:
        other = type(self).__new__(type(self))
        with self._lock:
            # weights are frozen: copies in one process share them
            opened = list(zip(self._potentials, self._sources, strict=True))
            other.precision = self.precision
            other._set_up(opened, self.charge, self.spin, self.isolated)
            other._entered, other.results = self._entered, copy.deepcopy(self.results)
        return other


def _extra_properties(potential: Potential) -> list[str]:
    """Return "charges", "dipole", and the spread of several members, where the model gives them."""
    given = {
        "charges": "charges" in potential.outputs,
        "dipole": has_dipole(potential.outputs),
        **dict.fromkeys(SPREADS, bool(potential.others)),
    }
    return [name for name, is_given in given.items() if is_given]


def _in_ase_form(results: dict[str, Any]) -> dict[str, Any]:
    for name in ("stress", "stress_std"):
        if name in results:
            results[name] = full_3x3_to_voigt_6_stress(results[name])
    return {**results, "free_energy": results["energy"]}


# --- Several potentials as one ASE calculator ---


class CommitteeCalculator(TorchMDNet2Calculator):
    """ASE calculator of an ensemble: the mean of several potentials and their spread, which estimates the error.

    The spread is the sample standard deviation over the members (divided by members − 1). `calc.get_property(name,
    atoms)` gives `energy_std` (eV), `energies_std` [N] (eV), `forces_std` [N, 3] (eV/Å) and `stress_std` (eV/Å³, Voigt
    order). Members trained from different random weights on the same data disagree where the data say little; a small
    spread does not prove a small error.

    Args:
        models: at least two models, each a path or a Potential; or the ensemble.json of a training.
        device: device of all members, as for TorchMDNet2Calculator.
        dtype: likewise.
        charge: likewise.
        spin: likewise.
        allow_untrained_charge: likewise.
        coulomb: likewise.
        level: likewise.
        isolated: likewise.

    Raises:
        ValueError: fewer than two models; others as TorchMDNet2Calculator.
    """

    def __init__(
        self,
        models: Iterable[str | os.PathLike | Potential] | str | os.PathLike,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        charge: int | None = None,
        spin: int | None = None,
        allow_untrained_charge: bool = False,
        isolated: bool = False,
        coulomb: str | None = None,
        level: str | None = None,
    ):
        if isinstance(models, str | os.PathLike) and str(models).endswith(".json"):
            models = read_ensemble(models)
        if isinstance(models, str | os.PathLike | Potential) or len(models := list(models)) < 2:
            raise ValueError("a committee needs at least two models: give a list of them")
        opened = [open_model(model, device, dtype, allow_untrained_charge, coulomb, level) for model in models]
        self._set_up(opened, charge, spin, isolated)

    @property
    def potentials(self) -> list[Potential]:
        """The members, in the given order."""
        return list(self._potentials)

    def _evaluator(self) -> Ensemble:
        return Ensemble(self._potentials)

    def _names(self) -> list[str]:
        common = super()._names()
        return [*common, *(f"{name}_std" for name in common if name not in ("free_energy", "novelty"))]
