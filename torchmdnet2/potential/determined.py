"""Compositions whose reference energies the data determine, where they do not determine those of each element.

One composition gives one sum of reference energies; how it divides among the elements is then a choice. Energies of
structures whose composition is a combination of those of the data do not depend on this choice, all others do.

Shapes: K elements, S compositions, B structures.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import UndeterminedEnergyWarning
from ..system import System
from .refusals import SYMBOLS

__all__ = ["Determined", "formula"]


_ROUNDING = 1e-8
_SHOWN = 4


class Determined:
    """Compositions, and all combinations of them.

    Args:
        compositions: for each composition, atomic number -> number of atoms; keys may be text, as in JSON.

    Attributes:
        compositions: the given compositions.
        elements: atomic numbers in them.
    """

    def __init__(self, compositions: Iterable[Mapping[int | str, int]]):
        self.compositions = [{int(z): int(n) for z, n in c.items()} for c in compositions]
        self.elements = sorted({z for c in self.compositions for z in c})
        table = np.array([[c.get(z, 0) for z in self.elements] for c in self.compositions], dtype=np.float64)
        shape = (len(self.compositions), len(self.elements))
        _, values, directions = np.linalg.svd(table.reshape(shape), full_matrices=False)
        self._directions = directions[values > _ROUNDING * max([*values, 1.0])]
        self._warned: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Determined) and self.compositions == other.compositions

    def __hash__(self) -> int:
        return hash(str(self.compositions))

    def __repr__(self) -> str:
        return f"Determined({self.stored()})"

    def stored(self) -> list[dict[str, int]]:
        """Return the compositions as stored in a model file."""
        return [{str(z): n for z, n in sorted(c.items())} for c in self.compositions]

    def covers(self, counts: NDArray, elements: Sequence[int]) -> NDArray[np.bool_]:
        """Return which compositions are combinations of these, [S].

        Args:
            counts: [S, K] atoms of each element.
            elements: [K] atomic numbers.
        """
        table = np.zeros((len(counts), len(self.elements)))
        strange = np.zeros(len(counts), dtype=bool)
        for column, z in enumerate(elements):
            if z in self.elements:
                table[:, self.elements.index(z)] = counts[:, column]
            else:
                strange |= counts[:, column] > 0
        rest = table - table @ self._directions.T @ self._directions
        return ~strange & (np.abs(rest).max(1, initial=0.0) <= 100 * _ROUNDING * table.max(1, initial=1.0))

    def single(self, elements: Iterable[int]) -> list[int]:
        """Return the elements whose energies are determined one by one."""
        return [z for z in elements if self.covers(np.ones((1, 1)), [z])[0]]

    def words(self) -> str:
        """Return the compositions as formulas."""
        more = f" and {len(self.compositions) - _SHOWN} more" if len(self.compositions) > _SHOWN else ""
        return ", ".join(map(formula, self.compositions[:_SHOWN])) + more

    def sentence(self, elements: Iterable[int]) -> str:
        """Return the sentence for logs and model cards.

        Args:
            elements: elements of the model.
        """
        if not self.compositions:
            return (
                "the training frames have no energies, so that no reference energy is determined; the model warns of "
                "total energies, which mean nothing, unlike differences at one composition"
            )
        chosen = list(elements)
        alone = self.single(chosen)
        names = ", ".join(SYMBOLS[z] for z in chosen if z not in alone)
        return (
            f"the training frames do not determine the reference energies of {names}, only those of {self.words()} and "
            "of combinations; the model warns of other compositions, whose total energies mean nothing"
        )

    def warn(self, system: System, atom_filter: int = -1, names: Sequence[object] = ()) -> None:
        """Warn of structures with other compositions, once for each composition.

        Args:
            system: B structures.
            atom_filter: elements up to this one have no energy.
            names: of the structures, for the warning; none: their numbers.
        """
        z, batch = system.z.detach().cpu().numpy(), system.batch.detach().cpu().numpy()
        elements, kinds = np.unique(z, return_inverse=True)
        counts = np.zeros((system.num_systems, len(elements)), dtype=np.int64)
        np.add.at(counts, (batch, kinds), 1)
        self.warn_of(counts, elements, atom_filter, stacklevel=5, names=names)

    def warn_of(
        self,
        counts: NDArray,
        elements: NDArray,
        atom_filter: int = -1,
        stacklevel: int = 2,
        names: Sequence[object] = (),
    ) -> None:
        """Warn of other compositions, as `warn`.

        Args:
            counts: [B, K] atoms of each element; changed.
            elements: [K] atomic numbers.
            atom_filter: as for `warn`.
            stacklevel: stack level of the warning.
            names: as for `warn`.
        """
        counts[:, elements <= atom_filter] = 0
        outside = np.flatnonzero(~self.covers(counts, elements.tolist()))
        found = {formula(dict(zip(elements.tolist(), counts[k].tolist(), strict=True))): int(k) for k in outside[::-1]}
        new = {name: k for name, k in found.items() if name not in self._warned}
        self._warned |= set(new)
        if new:
            first = min(new, key=lambda name: new[name])
            where = names[new[first]] if names else f"structure {new[first]}"
            more = f" (and {len(new) - 1} other compositions)" if len(new) > 1 else ""
            only = f", only those of {self.words()} and of combinations" if self.compositions else ""
            warnings.warn(
                f"{where} is {first}{more}: the training frames of the model do not determine the "
                f"reference energy of that composition{only}. Its total energy means nothing; forces, and "
                "energy differences at one composition, do not depend on it",
                UndeterminedEnergyWarning,
                stacklevel=stacklevel,
            )

    @classmethod
    def of(cls, counts: NDArray, elements: Sequence[int]) -> Determined:
        """Return the combinations of many compositions, from the fewest that are enough, small ones first.

        Args:
            counts: [S, K] atoms of each element.
            elements: [K] atomic numbers.
        """
        rows = np.unique(np.asarray(counts, dtype=np.int64), axis=0)
        rows = rows[rows.any(1)]
        rows = np.unique(
            rows // np.gcd.reduce(rows, axis=1, keepdims=True), axis=0
        )  # H4C2 determines the same energies as H2C
        rows = rows[np.argsort(rows.sum(1), kind="stable")]
        rank = int(np.linalg.matrix_rank(rows)) if len(rows) else 0
        chosen: list[int] = []
        directions = np.zeros((0, len(elements)))
        for k, row in enumerate(rows.astype(np.float64)):
            if len(chosen) == rank:
                break
            unit = row / np.linalg.norm(row)
            rest = unit - directions.T @ (directions @ unit)
            if np.linalg.norm(rest) > _ROUNDING:
                rest -= directions.T @ (directions @ rest)
                directions = np.vstack([directions, rest / np.linalg.norm(rest)])
                chosen.append(k)
        return cls([{z: int(n) for z, n in zip(elements, rows[k], strict=True) if n} for k in chosen])


def formula(composition: Mapping[int, int]) -> str:
    """Return a formula in Hill's order: carbon, hydrogen, the others by symbol."""
    counts = {SYMBOLS[z]: n for z, n in composition.items() if n}
    first = [symbol for symbol in ("C", "H") if "C" in counts and symbol in counts]
    order = [*first, *sorted(symbol for symbol in counts if symbol not in first)]
    return "".join(symbol + (str(counts[symbol]) if counts[symbol] != 1 else "") for symbol in order)
