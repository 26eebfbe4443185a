"""Entries of a file that put its labels in doubt: an energy that the forces belong to, calculations unconverged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["Doubts"]

_FREE = re.compile(r"(^|_)free_?energy$|(^|_)energy_?free$", re.I)
_CONVERGED = re.compile(r"^((scf|electronic|electrons?|elec|dft|is)_?)?converged$", re.I)
_UNCONVERGED = re.compile(r"^((scf|electronic|electrons?|elec|dft|is)_?)?(not_?|un)converged$", re.I)
_DIFFERENT = 1e-4  # eV


class Doubts:
    """What is seen in the entries of one frame after the other.

    Args:
        path: of the file, for messages.
    """

    def __init__(self, path: str):
        self._path = path
        self._other: dict[tuple[str, str], tuple[float, int]] = {}  # (read, other) -> largest difference, frames
        self._unconverged: dict[str, tuple[int, int]] = {}  # name -> frames, the first of them

    def see(self, entries: Mapping[str, Any], energy: str | None, factor: float, frame: int) -> None:
        """Look at a frame.

        Args:
            entries: name -> value.
            energy: name of the one that is read as the energy, if any.
            factor: from its unit to eV.
            frame: its number.
        """
        for name, value in entries.items():
            said = True if _UNCONVERGED.search(name) else False if _CONVERGED.search(name) else None
            if said is not None and _flag(value) is said:
                count, first = self._unconverged.get(name, (0, frame))
                self._unconverged[name] = count + 1, first
            elif energy is not None and energy in entries and name != energy and _FREE.search(name):
                difference = factor * abs(_number(value) - _number(entries[energy]))
                if difference > _DIFFERENT:
                    most, count = self._other.get((str(energy), name), (0.0, 0))
                    self._other[str(energy), name] = max(most, difference), count + 1

    def __iter__(self) -> Iterator[str]:
        """Sentences."""
        for (read, other), (most, count) in self._other.items():
            yield (
                f"'{read}' is read as the energy from {self._path}, and '{other}' differs from it in {count} frames, "
                f"by up to {most:.3g} eV: forces of a calculation with smearing belong to the free energy. Set "
                f"data.keys.energy: {other}"
            )
        for name, (count, first) in self._unconverged.items():
            yield (
                f"'{name}' says that {count} frames of {self._path} did not converge (the first: frame {first}): leave "
                "them out, or compute them again"
            )


def _flag(value: Any) -> bool | None:
    """What a word or number says; None where it is neither yes nor no."""
    word = str(value).strip().lower()
    return True if word in ("t", "true", "1", "yes") else False if word in ("f", "false", "0", "no") else None


def _number(value: Any) -> float:
    try:
        return float(np.asarray(value, dtype=np.float64).reshape(()))
    except (TypeError, ValueError):
        return float("nan")
