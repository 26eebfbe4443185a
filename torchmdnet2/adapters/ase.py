"""ASE calculator: energy, forces, stress, atom energies of any potential of this package."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress

from ..evaluator import Evaluator
from ..potential import Potential, Result
from ..system import System
from .model import ModelSource, dtype_name, in_memory, open_model

__all__ = ["NoStress", "TorchMDNet2Calculator"]


class NoStress(PropertyNotImplementedError, ValueError):
    """The stress of a structure that has no cell with a volume."""


class TorchMDNet2Calculator(Calculator):
    """Energy (eV), forces (eV/Å), stress (eV/Å³, Voigt order xx yy zz yz xz xy, tensile positive) for ASE.

    Also `free_energy` (= energy), `energies` [N] (eV, their sum is the energy) and, where the model has them,
    `charges` [N] (e) and `dipole` (e·Å). Total charge and spin multiplicity are taken from `atoms.info["charge"]`
    and `["spin"]`, then from the constructor, then 0; a result is kept until one of the two or the structure changes.
    The stress is computed only when it is asked for. Any cell and any combination of periodic directions will do. The
    user's Atoms and torch's global settings are never changed; one calculator may be used from several threads.

    A pickle holds the path and checksum of the model file, not the weights; of a model in memory, the content that
    its file would have.

    Args:
        model: path of a .tmn file, or a Potential (copied: later changes to it have no effect here).
        device: "cpu", "cuda", "cuda:1", …
        dtype: floating-point type of the network, torch.float32 or torch.float64; None keeps the stored one.
            Positions, cell and energies are float64 in either case.
        charge: total charge in e for structures whose `info` has none.
        spin: multiplicity 2S+1 for structures whose `info` has none.

    Raises:
        FileNotFoundError, BadCheckpoint: the model file is missing or damaged.
        ValueError: charge or spin is not a whole number, or the device or dtype cannot be used.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress", "energies"]  # noqa: RUF012 (ASE's way)

    def __init__(
        self,
        model: str | os.PathLike | Potential,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        charge: int | None = None,
        spin: int | None = None,
    ):
        super().__init__()
        potential, source = open_model(model, device, dtype)
        self._set_up(potential, source)
        self.charge = _whole(0 if charge is None else charge, "charge")
        self.spin = _whole(0 if spin is None else spin, "spin")

    def _set_up(self, potential: Potential, source: ModelSource | None) -> None:
        self._source = source
        self._evaluator = Evaluator(potential)
        self.implemented_properties = [*type(self).implemented_properties, *_extra_properties(potential)]
        self._lock = threading.RLock()
        self._entered: tuple[int, int] | None = None
        self._stress_wanted = False
        self._template: tuple[tuple[bytes, bytes, bytes, int, int], System] | None = None

    @property
    def potential(self) -> Potential:
        """The calculator's own copy of the potential, frozen."""
        return self._evaluator.potential

    # --- what ASE calls ------------------------------------------------------------------------------------------

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """ASE's entry: from the cache when nothing that enters has changed, else computed; arrays are fresh."""
        with self._lock:
            return super().get_property(name, atoms, allow_calculation)

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What of the model's input differs, in any bit, from the last calculation; "charge" and "spin" as used."""
        last = self.atoms
        if last is None or self._entered is None:
            return list(all_changes)
        now = self._charge_and_spin(atoms)
        same = {
            "positions": np.array_equal(last.positions, atoms.positions),
            "numbers": np.array_equal(last.numbers, atoms.numbers),
            "cell": np.array_equal(last.cell.array, atoms.cell.array),
            "pbc": np.array_equal(last.pbc, atoms.pbc),
            "charge": now[0] == self._entered[0],
            "spin": now[1] == self._entered[1],
        }
        return [name for name, unchanged in same.items() if not unchanged]

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Fill `results` for one structure.

        Args:
            atoms: the structure; None takes that of the last calculation.
            properties: "stress" among them adds the stress; energy and forces always come.
            system_changes: ignored, everything is computed anew.

        Raises:
            ValueError: a position, cell, charge or spin is not usable (the message names the atom), or the model's
                result is not finite.
            UnknownElement: the model does not know an element.
            NoStress: stress is asked for and there is no cell with a volume.
        """
        with self._lock, torch.inference_mode(False):
            super().calculate(atoms, properties, system_changes)
            assert self.atoms is not None
            self.results, self._entered = {}, None
            asked = "stress" in (properties or [])
            # a barostat or cell optimiser asks for forces, then for stress, at every step: do it in one go
            stress = asked or self._stress_wanted
            if stress and not abs(np.linalg.det(self.atoms.cell.array)) > 0:
                stress = False
                if asked:
                    raise NoStress(
                        "the stress needs a cell with a volume, and this structure has none: set all three lattice "
                        "vectors (atoms.cell), or do not ask for the stress"
                    )
            entered = self._charge_and_spin(self.atoms)
            result = self._evaluator(self._system(self.atoms, *entered), forces=True, stress=stress)
            self.results = _results(result)
            self._entered = entered
            self._stress_wanted = asked

    def reset(self) -> None:
        """Forget the last result."""
        with self._lock:
            super().reset()
            self._entered = None

    # --- many structures at once ----------------------------------------------------------------------------------

    def evaluate(self, frames: Iterable[Atoms], batch_size: int = 64, stress: bool = False) -> Iterator[dict[str, Any]]:
        """Results of many structures, computed in batches; the calculator's own last result is not touched.

        Args:
            frames: structures of any size and composition; they are not changed.
            batch_size: structures at a time.
            stress: compute the stress too; every structure then needs a cell with a volume.

        Yields:
            For each structure in turn what `results` would hold for it.

        Raises:
            ValueError, UnknownElement: as `calculate`; atoms and structures are counted within their batch.
        """
        left = iter(frames)
        while batch := list(islice(left, batch_size)):
            entered = [self._charge_and_spin(atoms) for atoms in batch]
            whole = System.concatenate(
                [self._new_system(atoms, *given) for atoms, given in zip(batch, entered, strict=True)]
            )
            with self._lock, torch.inference_mode(False):
                result = self._evaluator(whole, forces=True, stress=stress)
            yield from _split(result, [len(atoms) for atoms in batch])

    # --- structure ------------------------------------------------------------------------------------------------

    def _charge_and_spin(self, atoms: Atoms) -> tuple[int, int]:
        charge, spin = atoms.info.get("charge", self.charge), atoms.info.get("spin", self.spin)
        return _whole(charge, "charge"), _whole(spin, "spin")

    def _system(self, atoms: Atoms, charge: int, spin: int) -> System:
        """The structure as tensors; only positions are moved to the device when nothing else has changed."""
        key = (atoms.numbers.tobytes(), atoms.cell.array.tobytes(), atoms.pbc.tobytes(), charge, spin)
        if self._template is None or self._template[0] != key:
            self._template = key, self._new_system(atoms, charge, spin)
        system = copy.copy(self._template[1])
        system.pos = torch.tensor(atoms.positions, dtype=torch.float64, device=self.potential.device)
        return system

    def _new_system(self, atoms: Atoms, charge: int, spin: int) -> System:
        device = self.potential.device
        return System(
            z=torch.tensor(atoms.numbers, dtype=torch.long, device=device),
            pos=torch.tensor(atoms.positions, dtype=torch.float64, device=device),
            cell=torch.tensor(atoms.cell.array, dtype=torch.float64, device=device),
            pbc=torch.tensor(atoms.pbc, device=device),
            charge=torch.tensor([charge], dtype=torch.float64, device=device),
            spin=torch.tensor([spin], device=device),
        )

    # --- copies and pickles ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            kept = {"atoms": self.atoms, "results": dict(self.results), "charge": self.charge, "spin": self.spin}
            return {
                **kept,
                "entered": self._entered,
                "source": vars(self._source or in_memory(self.potential)),
                "device": str(self.potential.device),
                "dtype": dtype_name(self.potential.dtype),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = ModelSource(**state["source"])
        potential = source.open(state["device"], state["dtype"])
        self._restore(state, potential, source if source.path else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchMDNet2Calculator:
        return self.__copy__()

    def __copy__(self) -> TorchMDNet2Calculator:
        other = type(self).__new__(type(self))
        with self._lock:
            other._restore({**vars(self), "entered": self._entered}, self.potential, self._source)
        return other

    def _restore(self, state: dict[str, Any], potential: Potential, source: ModelSource | None) -> None:
        Calculator.__init__(self)
        self._set_up(potential, source)  # weights are frozen: copies in one process share them
        self.charge, self.spin = state["charge"], state["spin"]
        self.atoms = None if state["atoms"] is None else state["atoms"].copy()
        self.results = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state["results"].items()}
        self._entered = state["entered"]


def _extra_properties(potential: Potential) -> list[str]:
    """ "charges" and "dipole" where the model gives them: asked of one atom, as nothing declares it."""
    if not potential.elements:
        return []
    z = torch.tensor(potential.elements[:1], device=potential.device)
    alone = System(z=z, pos=torch.zeros(1, 3, dtype=torch.float64, device=potential.device))
    result = potential(alone, forces=False)
    given = {"charges": result.charges is not None, "dipole": "dipole" in result.properties}
    return [name for name, is_given in given.items() if is_given]


def _results(result: Result) -> dict[str, Any]:
    """ASE's names and shapes, as fresh numpy arrays in float64; refuses what is not finite."""
    assert result.forces is not None and result.atom_energies is not None
    energy = float(result.energy[0])
    arrays = {"forces": result.forces, "energies": result.atom_energies}
    if result.charges is not None:
        arrays["charges"] = result.charges
    results: dict[str, Any] = {k: v.detach().to("cpu", torch.float64, copy=True).numpy() for k, v in arrays.items()}
    if result.stress is not None:
        stress = result.stress[0].detach().to("cpu", torch.float64).numpy()
        results["stress"] = full_3x3_to_voigt_6_stress(stress)
    if "dipole" in result.properties:
        results["dipole"] = result.properties["dipole"][0].detach().to("cpu", torch.float64, copy=True).numpy()
    for name, value in results.items():
        if not np.isfinite(value).all():
            bad = np.argwhere(~np.isfinite(value))[0][0]
            where = f" at atom {bad}" if name not in ("stress", "dipole") else ""
            raise ValueError(f"the model's {name} are not finite{where}: the structure is far from anything physical")
    if not np.isfinite(energy):
        raise ValueError("the model's energy is not finite: the structure is far from anything physical")
    results["energy"] = results["free_energy"] = energy
    return results


def _split(result: Result, sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The results of each structure of a batch."""
    assert result.forces is not None and result.atom_energies is not None
    end = 0
    for b, size in enumerate(sizes):
        atoms, end = slice(end, end + size), end + size
        yield _results(
            Result(
                result.energy[b : b + 1],
                forces=result.forces[atoms],
                stress=None if result.stress is None else result.stress[b : b + 1],
                atom_energies=result.atom_energies[atoms],
                charges=None if result.charges is None else result.charges[atoms],
                properties={k: v[b : b + 1] for k, v in result.properties.items() if k == "dipole"},
            )
        )


def _whole(value: Any, name: str) -> int:
    try:
        whole = int(value)
        exact = whole == float(value)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return whole
