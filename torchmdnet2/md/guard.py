"""Checks that stop a simulation: overlapping atoms, forces, temperature or energy beyond their limits.

All checks read states on the host, which an engine copied there; the device does not wait for them.
Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ase.data import covalent_radii
from torch import Tensor

from ..neighbors import neighbor_list
from ..potential import SYMBOLS
from ..system import System
from .output import TableRow
from .state import AtomConstants, State

__all__ = ["Guard", "Limits", "NonFiniteState", "Unphysical", "check_overlaps", "closest_pair"]

OVERLAP = 0.5
"""Atoms closer than this part of the sum of their covalent radii overlap; the shortest bonds are near 1."""


_DENSE = 300_000  # number of pairs up to which computing all distances is faster than a neighbor search


class Unphysical(RuntimeError):
    """A structure or trajectory without physical meaning."""


class NonFiniteState(Unphysical):
    """NaN or infinite numbers: an unphysical state, or a step with too small a capacity for edges."""


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a simulation stops. Ordinary dynamics stays below these by an order of magnitude.

    Attributes:
        force: eV/Å on any atom.
        temperature: K.
        energy: eV/atom, largest change of the conserved energy.
    """

    force: float = 200.0
    temperature: float = 5000.0
    energy: float = 0.5

    @classmethod
    def for_temperature(cls, temperature: float) -> Limits:
        return cls(temperature=max(cls.temperature, 10 * temperature))

    def violation(self, temperature: float, force: float, energy_error: float) -> str | None:
        """The limit that is passed, in words, or None.

        Args:
            temperature: K.
            force: largest force on an atom, eV/Å.
            energy_error: conserved energy against its first value, eV/atom.
        """
        if force > self.force:
            return f"a force of {force:.3g} eV/Å (limit {self.force:g})"
        if temperature > self.temperature:
            return f"a temperature of {temperature:.3g} K (limit {self.temperature:g})"
        if abs(energy_error) > self.energy:
            return f"the conserved energy is off by {energy_error:.3g} eV/atom (limit {self.energy:g})"
        return None


class Guard:
    """Turns states into rows of the table, and raises an error for unphysical ones.

    Args:
        system: N atoms in B replicas, on the CPU.
        atoms: on the CPU.
        timestep: fs.
        limits: when to stop.
        first_conserved: [B] conserved energies that later ones are compared with, eV; None takes those of the first
            state that is looked at.
    """

    def __init__(
        self,
        system: System,
        atoms: AtomConstants,
        timestep: float,
        limits: Limits,
        first_conserved: Sequence[float] | None = None,
    ):
        self.system, self.atoms, self.timestep, self.limits = system, atoms, timestep, limits
        self.first_conserved = None if first_conserved is None else list(first_conserved)

    def __call__(self, state: State) -> list[TableRow]:
        """The rows of a state, one for each replica.

        Raises:
            NonFiniteState: a number is NaN or infinite.
            Unphysical: a limit is passed or atoms overlap; names the atoms.
        """
        rows = self.rows(state)
        conserved = [row.conserved_eV for row in rows]
        if self.first_conserved is None:
            self.first_conserved = conserved
        size = state.forces.norm(dim=1)
        largest = size.view(len(rows), -1).amax(1).tolist()  # NaN if any is
        for b, (row, force, first) in enumerate(zip(rows, largest, self.first_conserved, strict=True)):
            known = (row.temperature_K, row.potential_eV, row.conserved_eV, force)
            error = (row.conserved_eV - first) / self.atoms.num_atoms
            wrong = self.limits.violation(row.temperature_K, force, error)
            if not all(map(math.isfinite, known)):
                raise NonFiniteState(f"energy, forces or velocities are not finite; {self._worst_atom(state, size, b)}")
            if wrong is not None:
                raise Unphysical(f"{wrong}; {self._worst_atom(state, size, b)}")
        check_overlaps(self.system.replace(pos=state.pos))
        return rows

    def rows(self, state: State) -> list[TableRow]:
        """The rows of a state, without checks."""
        kinetic = self.atoms.kinetic_energy(state.vel).tolist()
        potential, heat = state.energy.tolist(), state.heat.sum(1).tolist()
        return [
            TableRow(
                step=state.step,
                time_ps=state.step * self.timestep * 1e-3,
                temperature_K=self.atoms.temperature(k),
                potential_eV=p,
                kinetic_eV=k,
                conserved_eV=p + k - q,
            )
            for p, k, q in zip(potential, kinetic, heat, strict=True)
        ]

    def _worst_atom(self, state: State, size: Tensor, replica: int) -> str:
        n = self.atoms.num_atoms
        own = slice(replica * n, (replica + 1) * n)
        worst = int(torch.nan_to_num(size[own], nan=math.inf).argmax()) + replica * n
        words = f"the largest force is on {_name(self.system, worst)}"
        system = self.system.replace(pos=state.pos)
        if bool(torch.isfinite(system.pos).all()):
            pair = closest_pair(system)
            if pair is not None:
                _, i, j, distance = pair
                words += f", the closest pair is {_name(system, i)} and {_name(system, j)} at {distance:.2f} Å"
        return words


def closest_pair(system: System) -> tuple[float, int, int, float] | None:
    """The pair that overlaps most: (distance over sum of covalent radii, atom, atom, distance in Å).

    None when no pair, periodic images included, is within the sum of its radii.
    """
    radii = torch.as_tensor(covalent_radii, dtype=torch.float64, device=system.device)[system.z]
    if not radii.numel():
        return None
    num, n = system.num_systems, system.num_atoms // system.num_systems
    every = torch.arange(num, device=system.device).repeat_interleave(n)
    if num * n * n <= _DENSE and not bool(system.pbc.any()) and torch.equal(system.batch, every):
        pos, radii = system.pos.view(num, n, 3), radii.view(num, n)
        distance = torch.cdist(pos, pos, compute_mode="donot_use_mm_for_euclid_dist")
        ratio = distance / (radii[:, :, None] + radii[:, None])
        ratio.diagonal(dim1=1, dim2=2).fill_(math.inf)
        ratio, distance = ratio.flatten(), distance.flatten()
        k = int(ratio.argmin())
        i, j = k // n, k // (n * n) * n + k % n
    else:
        edges = neighbor_list(system, float(2 * radii.max()))
        if not edges.num_edges:
            return None
        distance = edges.distances(system).detach()
        receiver, sender = edges.edge_index
        ratio = distance / (radii[receiver] + radii[sender])
        k = int(ratio.argmin())
        i, j = int(receiver[k]), int(sender[k])
    return (float(ratio[k]), i, j, float(distance[k])) if ratio[k] < 1 else None


def check_overlaps(system: System) -> None:
    """Refuse a structure in which two atoms lie in each other.

    Raises:
        Unphysical: names the pair.
    """
    pair = closest_pair(system)
    if pair is not None and pair[0] < OVERLAP:
        _, i, j, distance = pair
        image = " (its periodic image: the cell is too small)" if i == j else ""
        raise Unphysical(f"{_name(system, i)} and {_name(system, j)}{image} are {distance:.3f} Å apart: they overlap")


def _name(system: System, atom: int) -> str:
    """ "atom 4 (H)", and of several replicas which one."""
    symbol, replica = SYMBOLS[int(system.z[atom])], int(system.batch[atom])
    if system.num_systems == 1:
        return f"atom {atom} ({symbol})"
    first = int((system.batch < replica).sum())
    return f"atom {atom - first} ({symbol}) of replica {replica}"
