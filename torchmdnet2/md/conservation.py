"""A warning where the conserved energy jumps: the limits of guard.py let pass what a hole in a model's energy does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from .output import TableRow

__all__ = ["Conservation", "EnergyJumpWarning", "largest_jump"]

JUMP = 0.02
"""eV/√atom between two looks. Errors of the timestep and rounding move each atom's part independently. The largest in
good dynamics was 0.0013: 18 drug-like molecules for 10 ps at 0.5 fs, and ibuprofen for 2 ps at 1 fs."""

_WHY = "the energy of the model has a hole or a step there, or the timestep is too long; what follows is not valid"


def largest_jump(num_atoms: int) -> float:
    """Change of the conserved energy between two looks that good dynamics stays below, eV.

    Args:
        num_atoms: of a replica.
    """
    return JUMP * num_atoms**0.5


class EnergyJumpWarning(UserWarning):
    """The conserved energy has jumped."""


class Conservation:
    """Compares the conserved energy of each replica with that of the last look, and warns once.

    Args:
        num_atoms: of a replica.
        replicas: how many.
    """

    def __init__(self, num_atoms: int, replicas: int):
        self.limit, self.replicas = largest_jump(num_atoms), replicas
        self._last: list[float] | None = None
        self._told: set[int] = set()

    def __call__(self, rows: Sequence[TableRow]) -> None:
        """Look at the next rows, one for each replica.

        Warns:
            EnergyJumpWarning: says when and by how much.
        """
        now = [row.conserved_eV for row in rows]
        for b, (row, energy, before) in enumerate(zip(rows, now, self._last or now, strict=True)):
            if abs(energy - before) > self.limit and b not in self._told:
                self._told.add(b)
                whose = f" of replica {b}" if self.replicas > 1 else ""
                words = (
                    f"at {row.time_ps:.3f} ps the conserved energy{whose} jumped by {energy - before:+.2f} eV: {_WHY}"
                )
                warnings.warn(words, EnergyJumpWarning, stacklevel=2)
        self._last = now
