"""Several potentials as one ASE calculator: their mean, and how much they disagree."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from ..potential import Potential
from .ase import TorchMDNet2Calculator

__all__ = ["CommitteeCalculator"]


class CommitteeCalculator(Calculator):
    """Mean of several potentials, as TorchMDNet2Calculator gives it for one, and their spread.

    The spread is the sample standard deviation over the members (divided by members − 1): `energy_std` (eV),
    `energies_std` [N] (eV), `forces_std` [N, 3] (eV/Å) and `stress_std` (eV/Å³, Voigt order), by
    `calc.get_property(name, atoms)`. Members trained from different random weights on the same data disagree where
    the data says little; a small spread does not prove a small error.

    Args:
        models: at least two, each a path or a Potential.
        device, dtype, charge, spin: of all members, as for TorchMDNet2Calculator.

    Raises:
        ValueError: fewer than two models; others as TorchMDNet2Calculator.
    """

    def __init__(
        self,
        models: Sequence[str | os.PathLike | Potential],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        charge: int | None = None,
        spin: int | None = None,
    ):
        if isinstance(models, str | os.PathLike | Potential) or len(models) < 2:
            raise ValueError("a committee needs at least two models: give a list of them")
        self._set_up([TorchMDNet2Calculator(model, device, dtype, charge, spin) for model in models])

    def _set_up(self, members: list[TorchMDNet2Calculator]) -> None:
        super().__init__()
        self.members = members
        self._lock = threading.RLock()
        common = [p for p in members[0].implemented_properties if all(p in m.implemented_properties for m in members)]
        self.implemented_properties = [*common, *(f"{p}_std" for p in common if p != "free_energy")]

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """As ASE's; several threads take turns."""
        with self._lock:
            return super().get_property(name, atoms, allow_calculation)

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation, charge and spin included."""
        return self.members[0].check_state(atoms, tol)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Fill `results`; errors as TorchMDNet2Calculator.calculate."""
        with self._lock:
            super().calculate(atoms, properties, system_changes)
            self.results = {}
            asked = [name.removesuffix("_std") for name in properties or []]
            for member in self.members:
                member.calculate(self.atoms, asked, system_changes)
            results: dict[str, Any] = {}
            for name in self.members[0].results:
                if name in self.implemented_properties and all(name in member.results for member in self.members):
                    values = np.stack([member.results[name] for member in self.members])
                    results[name] = values.mean(0) if values.ndim > 1 else float(values.mean())
                    if name != "free_energy":
                        spread = values.std(0, ddof=1)
                        results[f"{name}_std"] = spread if values.ndim > 1 else float(spread)
            self.results = results

    def reset(self) -> None:
        """Forget the last result."""
        super().reset()
        for member in self.members:
            member.reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.members,)


def _rebuild(members: list[TorchMDNet2Calculator]) -> CommitteeCalculator:
    made = CommitteeCalculator.__new__(CommitteeCalculator)
    made._set_up(members)
    return made
