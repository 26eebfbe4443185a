"""Refusing and stopping when the physics is off: overlapping atoms, exploding forces, temperature or energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ase.data import covalent_radii

from ..neighbors import neighbor_list
from ..potential import SYMBOLS
from ..system import System

__all__ = ["Limits", "Unphysical", "check_overlaps", "closest_pair", "name_atom"]

OVERLAP = 0.5
"""Atoms closer than this part of the sum of their covalent radii overlap; the shortest bonds are near 1."""


class Unphysical(RuntimeError):
    """A structure or trajectory that no longer means anything."""


@dataclass(frozen=True)
class Limits:
    """When to stop. Ordinary dynamics stays below these by an order of magnitude.

    Attributes:
        force: eV/Å on any atom.
        temperature: K.
        energy: eV/atom that the conserved energy may be off its first value.
    """

    force: float = 200.0
    temperature: float = 5000.0
    energy: float = 0.5

    @classmethod
    def for_temperature(cls, temperature: float) -> Limits:
        return cls(temperature=max(cls.temperature, 10 * temperature))

    def violation(self, energy: float, temperature: float, force: float, energy_error: float) -> str | None:
        """What is wrong, in words, or None.

        Args:
            energy: potential energy, eV.
            temperature: K.
            force: largest force on an atom, eV/Å.
            energy_error: conserved energy against its first value, eV/atom.
        """
        if not all(math.isfinite(v) for v in (energy, temperature, force, energy_error)):
            return "energy, forces or velocities are not finite"
        if force > self.force:
            return f"a force of {force:.3g} eV/Å (limit {self.force:g})"
        if temperature > self.temperature:
            return f"a temperature of {temperature:.3g} K (limit {self.temperature:g})"
        if abs(energy_error) > self.energy:
            return f"the conserved energy is off by {energy_error:.3g} eV/atom (limit {self.energy:g})"
        return None


def closest_pair(system: System) -> tuple[float, int, int, float] | None:
    """The pair that overlaps most: (distance over sum of covalent radii, atom, atom, distance in Å).

    None when no pair, periodic images included, is within the sum of its radii.
    """
    radii = torch.as_tensor(covalent_radii, dtype=torch.float64, device=system.device)[system.z]
    if not radii.numel():
        return None
    edges = neighbor_list(system, float(2 * radii.max()))
    if not edges.num_edges:
        return None
    distance = edges.distances(system).detach()
    i, j = edges.edge_index
    ratio = distance / (radii[i] + radii[j])
    k = int(ratio.argmin())
    if ratio[k] >= 1:
        return None
    return float(ratio[k]), int(i[k]), int(j[k]), float(distance[k])


def check_overlaps(system: System) -> None:
    """Refuse a structure in which two atoms lie in each other.

    Raises:
        Unphysical: names the pair.
    """
    pair = closest_pair(system)
    if pair is not None and pair[0] < OVERLAP:
        _, i, j, distance = pair
        image = " (its periodic image: the cell is too small)" if i == j else ""
        raise Unphysical(
            f"{name_atom(system.z.tolist(), i)} and {name_atom(system.z.tolist(), j)}{image} "
            f"are {distance:.3f} Å apart: they overlap"
        )


def name_atom(z: Sequence[int], atom: int) -> str:
    """ "atom 4 (H)"."""
    return f"atom {atom} ({SYMBOLS[z[atom]]})"
