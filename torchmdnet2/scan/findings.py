"""Checks of a curve: one function for each kind of fault, listed in CHECKS.

Shapes: n points of a path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .paths import Array, ScanPath
from .surfaces import WELL, Curve, Finding, ModelSurface, Samples, ScanProgress, minima, zero

__all__ = ["CHECKS", "COMPARED", "KINDS", "SHARED", "compare", "find_faults", "find_jumps"]


REPULSIVE = 0.8
"""Bonds and contacts repel below this multiple of the bond's length, or of the sum of the covalent radii."""

NEAREST_WELL = 0.65
"""Å beyond the sum of the covalent radii; rigid closed-shell molecules have no minimum at smaller distances, not even
with strong hydrogen bonds."""

HOLE = {"bond": 0.1, "torsion": 1.0, "contact": 1.0}
"""eV by which the energy may be below the zero of the curve: the well of a bond, the given structure for a torsion,
separate molecules for a contact. Rotamers and hydrogen bonds are not deeper."""

DEPTH = {"bond": 0.05, "torsion": 0.02, "contact": 0.1}
"""eV; shallower minima do not count."""

MOST_ROTAMERS = 6
FLAT = 0.05
"""eV/Å; smaller forces do not count as a wall."""

COMPARED = {"bond": {0.7: 0.5, 1.5: 0.4}, "torsion": {}, "contact": {1.0: 0.5}}
"""Multiple of the usual value -> largest relative difference between the energies of model and reference there."""

SHARED = ("wall", "hole", "extra minimum")
"""Kinds of findings that do not count if the reference has them too."""

_COMPARABLE = 0.1  # eV; smaller energies are not compared
_WRONG_STEPS = 0.1  # least part of a curve where energies and forces disagree; less may be single jumps
_ROUNDING = 1e-4  # eV


def find_faults(path: ScanPath, samples: Samples) -> list[Finding]:
    """Return all findings on one curve, except jumps and comparisons."""
    return [finding for check in CHECKS for finding in check(path, samples)]


def compare(curve: Curve) -> Iterator[Finding]:
    """Yield differences from the reference, in energies at the multiples in COMPARED."""
    if curve.reference is None:
        return
    for multiple, part in COMPARED[curve.path.kind].items():
        ours, theirs = curve.at(multiple), curve.at(multiple, curve.reference)
        if theirs > _COMPARABLE and abs(ours - theirs) > part * theirs:
            text = f"{ours:.2f} eV at {multiple:g}×, but the reference has {theirs:.2f}"
            yield Finding("reference", multiple * curve.path.usual, abs(ours / theirs - 1), text)


def _not_finite(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    bad = ~(np.isfinite(samples.energy) & np.isfinite(samples.force))
    if bad.any():
        value = float(samples.values[bad][0])
        yield Finding("not finite", value, float(bad.sum()), f"{bad.sum()} points are not finite, first at "
                      f"{path.shown(value)}")  # fmt: skip


def _wall(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    if path.kind == "torsion":
        return
    near = samples.values < (REPULSIVE - 1e-6) * path.usual
    soft = near & (samples.force < FLAT)
    if soft.any():
        size = -float(samples.force[soft].min())
        outer = float(samples.values[soft].max())
        ends = np.flatnonzero(np.diff(soft, prepend=False, append=False)).reshape(-1, 2)
        where = " and ".join(_interval(path, samples.values, first, end - 1) for first, end in ends.tolist())
        words = f"attracts {where}, by up to {size:.2g} eV/Å"
        yield Finding("wall", outer, size, words if size > 0 else f"does not repel {where}")


def _interval(path: ScanPath, values: Array, first: int, last: int) -> str:
    """Return the words for a part of a curve; one that starts at the curve's first point has no lower end."""
    if first == 0:
        return f"below {path.shown(values[last])}"
    if first == last:
        return f"at {path.shown(values[last])}"
    return f"between {path.shown(values[first])} and {path.shown(values[last])}"


def _hole(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    x = samples.values / path.usual
    base = float(samples.energy[0]) if path.kind == "torsion" else zero(path, samples)
    outside = np.ones(len(x), dtype=bool) if path.kind != "bond" else (x < WELL[0]) | (x > WELL[1])
    energy = np.where(outside & np.isfinite(samples.energy), samples.energy - base, np.inf)
    worst = int(np.argmin(energy))
    if energy[worst] < -HOLE[path.kind]:
        value = float(samples.values[worst])
        text = f"hole of {-energy[worst]:.2f} eV at {path.shown(value)}"
        yield Finding("hole", value, float(-energy[worst]), text)


def _extra_minimum(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    x, last = samples.values / path.usual, len(samples.values) - 1
    found = minima(samples.energy, DEPTH[path.kind])
    if path.kind == "torsion":
        inner = [m for m in found if 0 < m.index < last]
        if len(inner) > MOST_ROTAMERS:
            text = f"{len(inner)} minima in a full turn"
            yield Finding("extra minimum", float(samples.values[inner[0].index]), float(len(inner)), text)
        return
    if path.kind == "bond":
        outer = [m for m in found if x[m.index] >= REPULSIVE]  # minima at smaller distances are reported as attraction
        own = min(outer, key=lambda m: _from_well(x, samples.energy, m.index), default=None)
        extra = [m for m in outer if m is not own]
    else:
        wells = [m for m in found if 0 < m.index < last]
        good = [m for m in wells if samples.values[m.index] >= path.usual + NEAREST_WELL]
        own = min(good, key=lambda m: samples.energy[m.index], default=None)
        extra = [m for m in wells if m is not own and x[m.index] >= REPULSIVE]
    for minimum in extra:
        value = float(samples.values[minimum.index])
        depth = minimum.depth if np.isfinite(minimum.depth) else zero(path, samples) - samples.energy[minimum.index]
        what = "energy falls again by" if minimum.index == last else "minimum of"
        text = f"{what} {abs(depth):.2f} eV at {path.shown(value)}"
        yield Finding("extra minimum", value, float(abs(depth)), text)


def _from_well(x: Array, energy: Array, index: int) -> tuple[bool, float]:
    """Return a sorting key for candidates of the bond's minimum: those within its well first, then by energy."""
    return not WELL[0] <= x[index] <= WELL[1], float(energy[index])


def _not_conservative(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    """Find forces that are not the gradient of the energy.

    The error of the trapezoidal rule over a step h is h/12 times the second difference of the force there.
    """
    h = np.diff(samples.values)
    off = np.abs(np.diff(samples.energy) + h * (samples.force[1:] + samples.force[:-1]) / 2)
    bend = np.pad(np.abs(np.diff(samples.force, 2)), 2, mode="edge")
    around = np.maximum.reduce([bend[k : k + len(h)] for k in range(4)])
    wrong = off > _ROUNDING + 3 * h / 12 * around
    if wrong.mean() > _WRONG_STEPS:
        worst = int(np.argmax(np.where(wrong, off / h, 0)))
        value, size = float(samples.values[worst]), float(off[worst] / h[worst])
        unit = "eV/rad" if path.kind == "torsion" else "eV/Å"
        text = f"forces are not the gradient of the energy: {size:.2g} {unit} off at {path.shown(value)}"
        yield Finding("not conservative", value, size, text)


CHECKS: tuple[Callable[[ScanPath, Samples], Iterator[Finding]], ...] = (
    _not_finite,
    _wall,
    _hole,
    _extra_minimum,
    _not_conservative,
)


# --- Jumps of the energy, the force and its slope along a path ---
#
# As two neighboring points move together, their difference vanishes on a smooth function, but stays at a jump. So
# intervals with large differences are refined again and again. A jump that is found in float32 is checked in float64,
# since it may be rounding.

KINDS = {"energy jump": (1e-4, "eV"), "force jump": (2e-3, "eV/Å"), "curvature jump": (1.0, "eV/Å²")}
"""Kind of jump -> least size of a finding. Curvature jumps are measured in float64 only."""

_POINTS = 17  # number of points of an interval in one round
_SPACING = 2e-6  # Å or rad, spacing of points at which refinement ends
_NEIGHBORS = 7  # number of differences with which one is compared
_FORCE_PLACES, _ENERGY_PLACES = 3, 1  # number of places in a curve that are refined
_DELTA = 2e-5  # Å or rad, step of the slopes on both sides; a smooth function hardly bends within it
_BENDS = _DELTA * np.array([-2, -1, -0.5, 0.5, 1, 2])
_APART = 1e-2  # Å or rad; jumps of one kind at smaller distances count as one


@dataclass(eq=False)
class _Place:
    """An interval that may hold a jump.

    Attributes:
        curve: the curve of the interval.
        of_energy: True if the energy has a large difference there, False if the force has.
        low, high: ends of the interval.
        samples: samples of the last round.
    """

    curve: Curve
    of_energy: bool
    low: float
    high: float
    samples: Samples | None = None

    def __post_init__(self) -> None:
        self._whole = self.low, self.high

    def afresh(self) -> _Place:
        """Return the interval before any refinement."""
        return _Place(self.curve, self.of_energy, *self._whole)

    @property
    def is_open(self) -> bool:
        """Whether the spacing of its points is still too large."""
        return (self.high - self.low) / _POINTS > _SPACING

    @property
    def rounds(self) -> int:
        """Number of rounds of refinement."""
        each = (_POINTS - 1) / 3
        return max(0, math.ceil(math.log((self.high - self.low) / (_POINTS * _SPACING), each)))

    def points(self) -> Array:
        return np.linspace(self.low, self.high, _POINTS)

    def narrow(self, samples: Samples) -> None:
        """Keep the part around the largest difference."""
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
        """Return the jumps of energy (eV) and force (eV/Å) in the last round."""
        assert self.samples is not None
        energy = float(np.abs(_mismatch(self.samples)).max())
        return energy, float(np.abs(np.diff(self.samples.force, 2)).max())


def find_jumps(surface: ModelSurface, curves: Sequence[Curve], progress: ScanProgress) -> None:
    """Find jumps in curves, and add them to the curves' `findings` and `jumps`.

    Args:
        surface: the surface of the curves. It is evaluated at some hundred further points of each curve that has
            intervals to refine.
        curves: the curves; the samples of their model are checked.
        progress: display of progress, which counts these points.
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
    """Return the refined places and the sizes of their jumps, without places where a value is not finite."""
    progress.begin(stage, sum(place.rounds * _POINTS + len(_BENDS) * surface.precise for place in places))
    open_places = [place for place in places if place.is_open]
    while open_places:
        found = surface([(place.curve.path, place.points()) for place in open_places], progress.advance)
        for place, samples in zip(open_places, found, strict=True):
            if np.isfinite(samples.energy).all() and np.isfinite(samples.force).all():
                place.narrow(samples)
            else:  # another check reports values that are not finite
                places.remove(place)
        open_places = [place for place in places if place.is_open]
    bends = _bends(surface, places, progress) if surface.precise and places else [0.0] * len(places)
    sizes = []
    for place, bend in zip(places, bends, strict=True):
        energy, force = place.steps()
        sizes.append(dict(zip(KINDS, (energy, force, 0.0 if force > KINDS["force jump"][0] else bend), strict=True)))
    return list(zip(places, sizes, strict=True))


def _places(curve: Curve) -> list[_Place]:
    """Return intervals with differences so large that a jump of reportable size is possible."""
    samples = curve.model
    x, h = samples.values, float(samples.values[1] - samples.values[0])
    least = min(KINDS["force jump"][0] / 2, KINDS["curvature jump"][0] * h / 4)
    bends = _peaks(_standing_out(np.diff(samples.force, 2), _NEIGHBORS), _FORCE_PLACES, least)
    steps = _peaks(_standing_out(_mismatch(samples), _NEIGHBORS), _ENERGY_PLACES, KINDS["energy jump"][0] / 2)
    centers = [(False, x[k + 1]) for k in bends] + [(True, (x[k] + x[k + 1]) / 2) for k in steps]
    return [_Place(curve, of_energy, float(c - 1.5 * h), float(c + 1.5 * h)) for of_energy, c in centers]


def _peaks(score: Array, count: int, least: float) -> list[int]:
    """Return the highest points, at least two points apart."""
    chosen: list[int] = []
    for k in np.argsort(-score).tolist():
        if len(chosen) == count or not score[k] > least:
            break
        if all(abs(k - other) > 2 for other in chosen):
            chosen.append(k)
    return chosen


def _mismatch(samples: Samples) -> Array:
    """Return the differences between energy changes and the work of the forces (trapezoidal rule), [n − 1] eV."""
    return np.diff(samples.energy) + np.diff(samples.values) * (samples.force[1:] + samples.force[:-1]) / 2


def _standing_out(differences: Array, neighbors: int) -> Array:
    """Return |difference − median of it and its neighbors|; 0 where a value is not finite."""
    half = min(neighbors, len(differences)) // 2
    padded = np.pad(differences, half, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    return np.nan_to_num(np.abs(differences - np.median(windows, axis=1)), nan=0.0, posinf=0.0)


def _bends(surface: ModelSurface, places: Sequence[_Place], progress: ScanProgress) -> list[float]:
    """Return jumps of the slope of the force, eV/Å²: differences of one-sided slopes, extrapolated to zero step."""
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
