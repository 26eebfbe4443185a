"""Declarations of the quantities that the parts of a model predict: name, shape and unit.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["CHARGES", "RESULTS", "SPREADS", "Output"]


@dataclass(frozen=True)
class Output:
    """A quantity that is predicted.

    Attributes:
        name: name in `Result.properties`.
        per: "atom" or "system", which has one value.
        shape: shape of a value: () for a number, (3,) for a vector.
        unit: unit such as "e·Å"; "" for a plain number or an unknown unit.
    """

    name: str
    per: Literal["atom", "system"]
    shape: tuple[int, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        if self.per not in ("atom", "system"):
            raise ValueError(f"per must be 'system' or 'atom', got '{self.per}'")
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def per_atom(self) -> bool:
        return self.per == "atom"

    def size(self, num_atoms: int, num_systems: int = 1) -> tuple[int, ...]:
        """Return the shape for N atoms in B structures."""
        return (num_atoms if self.per_atom else num_systems, *self.shape)

    def __str__(self) -> str:
        return f"[{', '.join(['N' if self.per_atom else 'B', *map(str, self.shape)])}]"


CHARGES = Output("charges", "atom", (), "e")
"""Partial charges."""

RESULTS: Mapping[str, Output] = {
    output.name: output
    for output in (
        Output("energy", "system", (), "eV"),
        Output("forces", "atom", (3,), "eV/Å"),
        Output("stress", "system", (3, 3), "eV/Å³"),
        Output("atom_energies", "atom", (), "eV"),
        CHARGES,
    )
}
"""The fields of a Result, by name."""

SPREADS: Mapping[str, Output] = {
    output.name: output
    for output in (Output("energy_std", "system", (), "eV"), Output("forces_std", "atom", (3,), "eV/Å"))
}
"""Further properties of a potential with several members: sample standard deviations over the members."""
