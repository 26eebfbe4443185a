"""A scanned curve, and what is read off it.

Shapes: n points of a path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .paths import Array, ScanPath
from .surfaces import Samples

__all__ = ["Curve", "Finding", "Minimum", "minima"]

WELL = (0.8, 1.25)
"""A bond's minimum is between these multiples of its length: thermal frames and the model's own minimum differ by
less."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a curve.

    Attributes:
        kind: one of `findings.KINDS`.
        value: of the coordinate where it is, Å or rad.
        size: how large it is, in the unit of its kind.
        text: in words.
    """

    kind: str
    value: float
    size: float
    text: str


@dataclass(eq=False)
class Curve:
    """Energies along one path.

    Attributes:
        path: which one.
        model: the model's samples.
        reference: those of the reference, at every fifth point; None without.
        findings: what is wrong.
        excused: what the reference has too.
        jumps: the largest of each kind that was found by refinement (`jumps.KINDS`), in eV, eV/Å and eV/Å²; with rad
            for a torsion.
    """

    path: ScanPath
    model: Samples
    reference: Samples | None = None
    findings: list[Finding] = field(default_factory=list)
    excused: list[Finding] = field(default_factory=list)
    jumps: dict[str, float] = field(default_factory=dict)

    def relative(self, samples: Samples | None = None) -> Array:
        """[n] eV above the zero of the curve, of the model by default.

        That is the minimum of the well of a bond, the lowest point of a torsion, and the farthest point of a contact.
        """
        samples = self.model if samples is None else samples
        return samples.energy - zero(self.path, samples)

    def at(self, multiple: float, samples: Samples | None = None) -> float:
        """Energy (`relative`) at a multiple of the usual value, interpolated; NaN outside the scanned range."""
        samples = self.model if samples is None else samples
        x = samples.values / self.path.usual
        if not x[0] - 1e-9 <= multiple <= x[-1] + 1e-9:
            return float("nan")
        return float(np.interp(multiple, x, self.relative(samples)))


def zero(path: ScanPath, samples: Samples) -> float:
    """The energy that others are compared with, eV; NaN where there is none."""
    energy = samples.energy
    if path.kind == "contact":
        return float(energy[-1])
    if path.kind == "bond":
        x = samples.values / path.usual
        energy = energy[(x >= WELL[0]) & (x <= WELL[1])]
    return float(np.nanmin(energy)) if np.isfinite(energy).any() else float("nan")


@dataclass(frozen=True)
class Minimum:
    """A minimum of a curve.

    Attributes:
        index: of its point.
        depth: eV below the lower one of the two barriers around it (an end of the curve is no barrier).
    """

    index: int
    depth: float


def minima(energy: Array, least: float) -> list[Minimum]:
    """The minima that are at least so deep, the ends of the curve among them, in order.

    Points are flooded from the lowest up; where two basins meet, the higher minimum ends with the depth it has reached
    (persistence). The lowest one of all is always there.

    Args:
        energy: [n] eV; NaN separate basins as infinite walls do.
        least: eV.
    """
    energy = np.where(np.isfinite(energy), energy, np.inf)
    lowest: dict[int, int] = {}  # representative point of a basin -> its minimum
    owner = np.full(len(energy), -1)

    def find(k: int) -> int:
        while owner[k] != k:
            k = int(owner[k])
        return k

    found = []
    for k in np.argsort(energy, kind="stable").tolist():
        if not np.isfinite(energy[k]):
            break
        basins = {find(n) for n in (k - 1, k + 1) if 0 <= n < len(energy) and owner[n] >= 0}
        owner[k] = k
        if not basins:
            lowest[k] = k
            continue
        first, *others = sorted(basins, key=lambda b: energy[lowest[b]])
        owner[k] = first
        for other in others:
            depth = float(energy[k] - energy[lowest[other]])
            if depth >= least:
                found.append(Minimum(lowest[other], depth))
            owner[other] = first
    roots = {find(k) for k in range(len(energy)) if owner[k] >= 0}
    found += [Minimum(lowest[root], float("inf")) for root in roots]
    return sorted(found, key=lambda minimum: minimum.index)
