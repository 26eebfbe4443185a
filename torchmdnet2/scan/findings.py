"""What a curve must not do: one function for each kind of fault, listed in CHECKS.

Shapes: n points of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .curve import WELL, Curve, Finding, minima, zero
from .paths import Array, ScanPath
from .surfaces import Samples

__all__ = ["CHECKS", "COMPARED", "SHARED", "compare", "find_faults"]

REPULSIVE = 0.8
"""Bonds and contacts repel below this multiple of the bond's length, or of the sum of the covalent radii."""

NEAREST_WELL = 0.65
"""Å beyond the sum of the covalent radii; rigid closed-shell molecules have no minimum nearer than this, strong
hydrogen bonds among them."""

HOLE = {"bond": 0.1, "torsion": 1.0, "contact": 1.0}
"""eV by which the energy may be below the zero of the curve: the well of a bond, the given structure for a torsion,
molecules apart for a contact. Rotamers and hydrogen bonds are not deeper."""

DEPTH = {"bond": 0.05, "torsion": 0.02, "contact": 0.1}
"""eV; shallower minima do not count."""

MOST_ROTAMERS = 6
FLAT = 0.05
"""eV/Å; a wall with smaller forces is none."""

COMPARED = {"bond": {0.7: 0.5, 1.5: 0.4}, "torsion": {}, "contact": {1.0: 0.5}}
"""Multiple of the usual value -> by which part the energy there may differ from the reference's."""

SHARED = ("wall", "hole", "extra minimum")
"""Findings that are none where the reference has them too."""

_COMPARABLE = 0.1  # eV; smaller energies are not compared
_WRONG_STEPS = 0.1  # part of a curve where energies and forces disagree, from which on it is no single jump
_ROUNDING = 1e-4  # eV


def find_faults(path: ScanPath, samples: Samples) -> list[Finding]:
    """All findings on one curve, but for jumps and comparisons."""
    return [finding for check in CHECKS for finding in check(path, samples)]


def compare(curve: Curve) -> Iterator[Finding]:
    """Differences from the reference: energies at the multiples in COMPARED."""
    if curve.reference is None:
        return
    for multiple, part in COMPARED[curve.path.kind].items():
        ours, theirs = curve.at(multiple), curve.at(multiple, curve.reference)
        if theirs > _COMPARABLE and abs(ours - theirs) > part * theirs:
            text = f"{ours:.2f} eV at {multiple:g}×, the reference has {theirs:.2f}"
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
        words = f"attracts below {path.shown(outer)}, by up to {size:.2g} eV/Å"
        yield Finding("wall", outer, size, words if size > 0 else f"does not repel below {path.shown(outer)}")


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
        outer = [m for m in found if x[m.index] >= REPULSIVE]  # nearer ones are told as attraction
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
    """Order of candidates for a bond's own minimum: those within its well, the lowest first."""
    return not WELL[0] <= x[index] <= WELL[1], float(energy[index])


def _not_conservative(path: ScanPath, samples: Samples) -> Iterator[Finding]:
    """Forces that are not the gradient of the energy.

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
        text = f"forces are not the slope of the energy: {size:.2g} {unit} off at {path.shown(value)}"
        yield Finding("not conservative", value, size, text)


CHECKS: tuple[Callable[[ScanPath, Samples], Iterator[Finding]], ...] = (
    _not_finite,
    _wall,
    _hole,
    _extra_minimum,
    _not_conservative,
)
