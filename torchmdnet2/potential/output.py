"""What the parts of a model declare to predict: name, shape and unit of each quantity.

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
        name: as in `Result.properties`.
        per: "atom" or "system", what there is one of.
        shape: of that one: () a number, (3,) a vector.
        unit: as in "e·Å"; "" for a plain number, or where it is not known.
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
        """The whole shape for N atoms in B structures."""
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
"""What a potential of several members gives further: sample standard deviations over them, among the properties."""
