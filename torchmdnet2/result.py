"""What a potential gives. Shapes: N atoms, B structures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from .dipole import charge_dipole
from .output import Output
from .system import System

__all__ = ["Result", "has_dipole", "with_dipole"]


@dataclass(eq=False)
class Result:
    """What a potential gives.

    Attributes:
        energy: [B] eV, float64.
        forces: [N, 3] eV/Å, −dE/dpos; None when not asked for.
        stress: [B, 3, 3] eV/Å³, (1/V) dE/dε, symmetric, tensile positive; None when not asked for.
        atom_energies: [N] eV, float64, priors included; their sum is the energy.
        charges: [N] partial charges in e; None where the model has none.
        properties: what the property heads predict, by name: [B, …] of each structure or [N, …] of each atom. Where
            charges are predicted and no dipole moment is, "dipole" [B, 3] e·Å is theirs, about the centre of mass; NaN
            of periodic structures beside molecules.
    """

    energy: Tensor
    forces: Tensor | None = None
    stress: Tensor | None = None
    atom_energies: Tensor | None = None
    charges: Tensor | None = None
    properties: Mapping[str, Tensor] = field(default_factory=dict)


def with_dipole(properties: Mapping[str, Tensor], charges: Tensor | None, system: System) -> Mapping[str, Tensor]:
    """Properties and, where there are charges and no dipole moment, that of the charges (`charge_dipole`).

    It is computed when it is asked for: most callers do not need it.

    Args:
        properties: by name.
        charges: [N] e; None where none are predicted.
        system: whose they are.
    """
    return properties if charges is None or "dipole" in properties else _WithDipole(properties, charges, system)


def has_dipole(outputs: Mapping[str, Output]) -> bool:
    """Whether results have a dipole moment: of a head, or of charges.

    Args:
        outputs: of the potential.
    """
    return not outputs.keys().isdisjoint(("dipole", "charges"))


class _WithDipole(Mapping[str, Tensor]):
    def __init__(self, properties: Mapping[str, Tensor], charges: Tensor, system: System):
        # copies, as both may be written to before it is asked for
        self._known, self._charges = dict(properties), charges.clone()
        self._system = system.replace(pos=system.pos.clone())

    @cached_property
    def _names(self) -> list[str]:
        """A batch of crystals has no dipole."""
        is_molecule = ~self._system.pbc.any(1)
        return [*self._known, *(["dipole"] if bool(is_molecule.any()) else [])]

    def __getitem__(self, name: str) -> Tensor:
        if name == "dipole" and name not in self._known and name in self._names:
            dipole = charge_dipole(self._charges.to(self._system.device), self._system)
            self._known[name] = dipole.to(self._charges.device)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))
