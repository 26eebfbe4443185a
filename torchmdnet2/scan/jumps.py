"""Jumps of the energy, the force and its slope along a path, told from steep but smooth places by refinement.

A difference between neighboring points that is due to a jump stays when the points move together; that of a smooth
function vanishes. Where the differences of a curve stand out, the interval is therefore divided again and again. What
looks like a jump in float32 is looked at once more in float64, as it may be rounding.

Shapes: n points of a path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .curve import Curve, Finding
from .paths import Array
from .progress import ScanProgress
from .surfaces import ModelSurface, Samples

__all__ = ["KINDS", "find_jumps"]

KINDS = {"energy jump": (1e-4, "eV"), "force jump": (2e-3, "eV/Å"), "curvature jump": (1.0, "eV/Å²")}
"""What is a finding from which size on. Curvature jumps are measured in float64 only."""

_POINTS = 17  # of an interval in one round
_SPACING = 2e-6  # Å or rad, where refinement ends
_NEIGHBORS = 7  # points that a difference is compared with
_FORCE_PLACES, _ENERGY_PLACES = 3, 1  # of a curve that are refined
_DELTA = 2e-5  # Å or rad, of the slopes on both sides; so small that no smooth bend is as sharp
_BENDS = _DELTA * np.array([-2, -1, -0.5, 0.5, 1, 2])
_APART = 1e-2  # Å or rad; nearer jumps of one kind are one


@dataclass(eq=False)
class _Place:
    """An interval that may hold a jump.

    Attributes:
        curve: which one it is of.
        of_energy: whether it stands out in the energy, else in the force.
        low, high: its ends.
        samples: of the last round.
    """

    curve: Curve
    of_energy: bool
    low: float
    high: float
    samples: Samples | None = None

    def __post_init__(self) -> None:
        self._whole = self.low, self.high

    def afresh(self) -> _Place:
        """As it was at first."""
        return _Place(self.curve, self.of_energy, *self._whole)

    @property
    def is_open(self) -> bool:
        """Whether its points are not near enough yet."""
        return (self.high - self.low) / _POINTS > _SPACING

    @property
    def rounds(self) -> int:
        """How often it will be narrowed."""
        each = (_POINTS - 1) / 3
        return max(0, math.ceil(math.log((self.high - self.low) / (_POINTS * _SPACING), each)))

    def points(self) -> Array:
        return np.linspace(self.low, self.high, _POINTS)

    def narrow(self, samples: Samples) -> None:
        """Keep what is around the difference that stands out most."""
        self.samples = samples
        x = samples.values
        h = float(x[1] - x[0])
        if self.of_energy:
            middle = x[:-1] + h / 2
            score = _standing_out(_mismatch(samples), len(x))
        else:
            middle, score = x[1:-1], _standing_out(np.diff(samples.force, 2), len(x))
        center = float(middle[int(np.argmax(score))])
        self.low, self.high = center - 1.5 * h, center + 1.5 * h

    def steps(self) -> tuple[float, float]:
        """Jumps of energy (eV) and force (eV/Å) in the last round."""
        assert self.samples is not None
        energy = float(np.abs(_mismatch(self.samples)).max())
        return energy, float(np.abs(np.diff(self.samples.force, 2)).max())


def find_jumps(surface: ModelSurface, curves: Sequence[Curve], progress: ScanProgress) -> None:
    """Look for jumps in curves, and add them to their findings and `jumps`.

    Args:
        surface: what gave the curves; evaluated at some hundred further points of each curve that has places to look
            at.
        curves: their model's samples are looked at.
        progress: is told of these points.
    """
    found = _measured(surface, [place for curve in curves for place in _places(curve)], "jumps", progress)
    if not surface.precise:
        suspected = [place for place, sizes in found if any(sizes[kind] > limit for kind, (limit, _) in KINDS.items())]
        found = [(place, sizes) for place, sizes in found if place not in suspected]
        if suspected:
            again = [place.afresh() for place in suspected]
            found += _measured(surface.in_float64(), again, "jumps, in float64", progress)
    for place, sizes in found:
        _tell(place, sizes)


def _measured(
    surface: ModelSurface, places: list[_Place], stage: str, progress: ScanProgress
) -> list[tuple[_Place, dict[str, float]]]:
    """The places, narrowed, and the size of each kind of jump there; without those where something is not finite."""
    progress.begin(stage, sum(place.rounds * _POINTS + len(_BENDS) * surface.precise for place in places))
    open_places = [place for place in places if place.is_open]
    while open_places:
        found = surface([(place.curve.path, place.points()) for place in open_places], progress.advance)
        for place, samples in zip(open_places, found, strict=True):
            if np.isfinite(samples.energy).all() and np.isfinite(samples.force).all():
                place.narrow(samples)
            else:  # told by another check
                places.remove(place)
        open_places = [place for place in places if place.is_open]
    bends = _bends(surface, places, progress) if surface.precise and places else [0.0] * len(places)
    sizes = []
    for place, bend in zip(places, bends, strict=True):
        energy, force = place.steps()
        sizes.append(dict(zip(KINDS, (energy, force, 0.0 if force > KINDS["force jump"][0] else bend), strict=True)))
    return list(zip(places, sizes, strict=True))


def _places(curve: Curve) -> list[_Place]:
    """Where differences stand out by so much that there may be a jump large enough to be told."""
    samples = curve.model
    x, h = samples.values, float(samples.values[1] - samples.values[0])
    least = min(KINDS["force jump"][0] / 2, KINDS["curvature jump"][0] * h / 4)
    bends = _peaks(_standing_out(np.diff(samples.force, 2), _NEIGHBORS), _FORCE_PLACES, least)
    steps = _peaks(_standing_out(_mismatch(samples), _NEIGHBORS), _ENERGY_PLACES, KINDS["energy jump"][0] / 2)
    centers = [(False, x[k + 1]) for k in bends] + [(True, (x[k] + x[k + 1]) / 2) for k in steps]
    return [_Place(curve, of_energy, float(c - 1.5 * h), float(c + 1.5 * h)) for of_energy, c in centers]


def _peaks(score: Array, count: int, least: float) -> list[int]:
    """The highest points, at least two apart."""
    chosen: list[int] = []
    for k in np.argsort(-score).tolist():
        if len(chosen) == count or not score[k] > least:
            break
        if all(abs(k - other) > 2 for other in chosen):
            chosen.append(k)
    return chosen


def _mismatch(samples: Samples) -> Array:
    """[n − 1] eV by which the energy changes otherwise than the forces say (trapezoidal rule)."""
    return np.diff(samples.energy) + np.diff(samples.values) * (samples.force[1:] + samples.force[:-1]) / 2


def _standing_out(differences: Array, neighbors: int) -> Array:
    """|difference − median of it and its neighbors|; 0 where a value is not finite."""
    half = min(neighbors, len(differences)) // 2
    padded = np.pad(differences, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.nan_to_num(np.abs(differences - np.median(windows, axis=1)), nan=0.0, posinf=0.0)


def _bends(surface: ModelSurface, places: Sequence[_Place], progress: ScanProgress) -> list[float]:
    """Jumps of the slope of the force, eV/Å²: the difference of the one-sided slopes, extrapolated to no distance."""
    requests = [(place.curve.path, (place.low + place.high) / 2 + _BENDS) for place in places]
    bends = []
    for samples in surface(requests, progress.advance):
        f = samples.force
        wide = (f[5] - f[4] - f[1] + f[0]) / _DELTA
        narrow = (f[4] - f[3] - f[2] + f[1]) / (_DELTA / 2)
        bends.append(abs(float(2 * narrow - wide)))
    return bends


def _tell(place: _Place, sizes: dict[str, float]) -> None:
    curve, value = place.curve, (place.low + place.high) / 2
    for kind, size in sizes.items():
        limit, unit = KINDS[kind]
        curve.jumps[kind] = max(curve.jumps.get(kind, 0.0), size)
        if size > limit:
            unit = unit.replace("Å", "rad") if curve.path.kind == "torsion" else unit
            known = [f for f in curve.findings if f.kind == kind and abs(f.value - value) < _APART]
            if not known:
                text = f"{kind} of {size:.2g} {unit} at {curve.path.shown(value)}"
                curve.findings.append(Finding(kind, value, size, text))
