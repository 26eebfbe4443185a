"""Checks that stop a simulation: overlapping atoms, forces, temperature or energy beyond their limits.

All checks read states on the host, which an engine copied there; the device does not wait for them.
Shapes: N atoms in B replicas of n atoms each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray
from torch import Tensor

from ..checkpoint import read_header
from ..errors import StructureWarning
from ..neighbors import neighbor_list
from ..potential.potential import SYMBOLS, Potential
from ..system import System
from ..units import AMU_A3
from .integrators import BAR, AtomConstants, State, volume_of
from .output import TableRow

__all__ = [
    "BONDED", "DEVIATION", "Bonds", "Guard", "Limits", "NonFiniteState", "Unphysical", "check_overlaps", "close_atoms",
    "closest_pair", "remedy_of_close_atoms",
]  # fmt: skip


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
        volume: largest factor by which the volume of a cell may grow or shrink.
    """

    force: float = 200.0
    temperature: float = 5000.0
    energy: float = 0.5
    volume: float = 10.0

    @classmethod
    def for_temperature(cls, temperature: float) -> Limits:
        return cls(temperature=max(cls.temperature, 10 * temperature))

    def violation(self, temperature: float, force: float, energy_error: float) -> str | None:
        """Return the limit that is exceeded, in words, or None.

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

    def volume_violation(self, volume: float, first: float) -> str | None:
        """Return why a volume in Å³ is outside the limit, as `violation`; None if it is within."""
        if volume > self.volume * first or volume * self.volume < first:
            return f"the volume of the cell is {volume:.3g} Å³ and was {first:.3g} Å³ (limit {self.volume:g} times)"
        return None


class Guard:
    """Turns states into rows of the table, and raises an error for unphysical ones.

    Args:
        system: N atoms in B replicas, on the CPU.
        atoms: on the CPU.
        timestep: fs.
        limits: when to stop.
        first_conserved: [B] eV, conserved energies that later ones are compared with; None: those of the first
            state that is checked.
        potential: that moves the atoms, for one warning of atoms that it may not keep apart.
    """

    def __init__(
        self,
        system: System,
        atoms: AtomConstants,
        timestep: float,
        limits: Limits,
        first_conserved: Sequence[float] | None = None,
        potential: Potential | None = None,
    ):
        self._unwarned = () if potential is None else (potential,)
        self.system, self.atoms, self.timestep, self.limits = system, atoms, timestep, limits
        self.first_conserved = None if first_conserved is None else list(first_conserved)

    def __call__(self, state: State) -> list[TableRow]:
        """Return the rows of a state, one for each replica.

        Raises:
            NonFiniteState: a number is NaN or infinite.
            Unphysical: a limit is exceeded or atoms overlap; names the atoms.
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
            if state.cell is not None and wrong is None:
                wrong = self.limits.volume_violation(row.volume_A3, float(self.system.volume[b]))
            if not all(map(math.isfinite, known)):
                raise NonFiniteState(f"energy, forces or velocities are not finite; {self._worst_atom(state, size, b)}")
            if wrong is not None:
                raise Unphysical(f"{wrong}; {self._worst_atom(state, size, b)}")
        if check_overlaps(self.at(state), self._unwarned):
            self._unwarned = ()
        return rows

    def at(self, state: State) -> System:
        """Return the structures of a state."""
        return self.system.replace(pos=state.pos, cell=self.system.cell if state.cell is None else state.cell)

    def rows(self, state: State) -> list[TableRow]:
        """Return the rows of a state, without checks."""
        kinetic = self.atoms.kinetic_energy(state.vel).tolist()
        potential, heat = state.energy.tolist(), state.heat.sum(1).tolist()
        rows = [
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
        if state.cell is None or state.stress is None:
            return rows
        volumes = volume_of(state.cell)
        inner = state.stress.double().diagonal(dim1=1, dim2=2).sum(1) / 3
        mass = float(self.atoms.masses.sum()) / len(rows) * AMU_A3
        return [
            row._replace(volume_A3=v, density_g_cm3=mass / v, pressure_bar=(2 * k / (3 * v) - s) / BAR)
            for row, v, k, s in zip(rows, volumes.tolist(), kinetic, inner.tolist(), strict=True)
        ]

    def _worst_atom(self, state: State, size: Tensor, replica: int) -> str:
        n = self.atoms.num_atoms
        own = slice(replica * n, (replica + 1) * n)
        worst = int(torch.nan_to_num(size[own], nan=math.inf).argmax()) + replica * n
        words = f"the largest force is on {_name(self.system, worst)}"
        system = self.at(state)
        if bool(torch.isfinite(system.pos).all()):
            pair = closest_pair(system)
            if pair is not None:
                _, i, j, distance = pair
                words += f", the closest pair is {_name(system, i)} and {_name(system, j)} at {distance:.2f} Å"
        return words


class _Pairs(NamedTuple):
    """Pairs, [P] each: distance over the sum of the covalent radii, both atoms, distance in Å."""

    ratio: Tensor
    i: Tensor
    j: Tensor
    distance: Tensor


def _pairs(system: System) -> _Pairs:
    """Return all pairs, periodic images included, within the sum of their covalent radii, both (i, j) and (j, i)."""
    radii = torch.as_tensor(covalent_radii, dtype=torch.float64, device=system.device)[system.z]
    num, batch, counts = system.num_systems, system.batch, system.atom_counts
    n = int(counts.max())
    if num * n * n <= _DENSE and not bool(system.pbc.any()) and bool((batch[1:] >= batch[:-1]).all()):
        atoms = torch.arange(len(batch), device=system.device)
        place = batch * n + atoms - (counts.cumsum(0) - counts)[batch]
        pos, radii, atom = (
            value.new_zeros(num * n, *value.shape[1:]).index_copy_(0, place, value).view(num, n, *value.shape[1:])
            for value in (system.pos, radii, atoms)
        )
        distance = torch.cdist(pos, pos, compute_mode="donot_use_mm_for_euclid_dist")
        there = (radii[:, :, None] > 0) & (radii[:, None] > 0)
        ratio = torch.where(there, distance / (radii[:, :, None] + radii[:, None]), math.inf)
        ratio.diagonal(dim1=1, dim2=2).fill_(math.inf)
        b, i, j = (ratio < 1).nonzero(as_tuple=True)
        return _Pairs(ratio[b, i, j], atom[b, i], atom[b, j], distance[b, i, j])
    edges = neighbor_list(system, 2 * float(radii.max()))
    distance = edges.distances(system).detach()
    i, j = edges.edge_index
    ratio = distance / (radii[i] + radii[j])
    near = ratio < 1
    return _Pairs(ratio[near], i[near], j[near], distance[near])


def closest_pair(system: System) -> tuple[float, int, int, float] | None:
    """Return the pair that overlaps most: (distance over sum of covalent radii, atom, atom, distance in Å).

    None when no pair, periodic images included, is within the sum of its radii.
    """
    found = _pairs(system) if system.num_atoms else None
    if found is None or not len(found.ratio):
        return None
    k = int(found.ratio.argmin())
    return float(found.ratio[k]), int(found.i[k]), int(found.j[k]), float(found.distance[k])


def close_atoms(system: System, kind: str = "") -> list[str]:
    """Return words about the pair of each structure that is nearer than any bond of such elements; "" if there is none.

    Args:
        system: B structures.
        kind: what messages call one of several structures; "" if they do not name it.

    Raises:
        Unphysical: two atoms of a structure overlap; names them.
    """
    words = [""] * system.num_systems
    if not system.num_atoms:
        return words
    found = _pairs(system)
    limits = _CLOSE.to(system.device)[system.z]
    near = found.ratio < torch.minimum(limits[found.i], limits[found.j])
    for k in sorted(near.nonzero()[:, 0].tolist(), key=found.ratio.tolist().__getitem__):
        i, j, ratio, distance = int(found.i[k]), int(found.j[k]), float(found.ratio[k]), float(found.distance[k])
        image = " (its periodic image: the cell is too small)" if i == j else ""
        pair = f"{_name(system, i, kind)} and {_name(system, j, kind)}{image} are {distance:.3f} Å apart"
        if ratio < OVERLAP:
            raise Unphysical(f"{pair}: they overlap (positions are in Å)")
        b = int(system.batch[i])
        words[b] = words[b] or f"{pair}, {ratio:.2f} times the sum of their covalent radii"
    return words


def remedy_of_close_atoms(potentials: Iterable[Potential]) -> str:
    """Return what to do where `close_atoms` finds a pair; "" if all potentials have a repulsive prior.

    `aimnet2` has none: it attracts O…O below 0.65 and H…H below 0.79 of the sum of the covalent radii.
    """
    soft = [p for p in potentials if not any(prior.repels for prior in p.priors)]
    if not soft:
        return ""
    known = {z for p in soft for z in p.elements} <= set(read_header("organic")["config"]["elements"])
    return (
        "this model has no repulsive prior, and may attract such atoms; move them apart, or take a model that has one "
        f"({'organic' if known else 'zbl or pair_potential'})"
    )


def check_overlaps(
    system: System, potentials: Iterable[Potential] = (), kind: str = "replica", where: str = ""
) -> bool:
    """Refuse a structure in which two atoms overlap.

    Args:
        system: B structures.
        potentials: that compute it. Where one of them has no repulsive prior, a pair nearer than any bond is warned of.
        kind: what messages call one of several structures.
        where: the structure, for the warning, as "frame 3".

    Returns:
        Whether there was a warning.

    Raises:
        Unphysical: names the pair.
    """
    words = next(filter(None, close_atoms(system, kind)), "")
    remedy = remedy_of_close_atoms(potentials) if words else ""
    if remedy:
        warnings.warn(f"{where}{': ' if where else ''}{words}: {remedy}", StructureWarning, stacklevel=3)
    return bool(remedy)


def _name(system: System, atom: int, kind: str = "replica") -> str:
    """Return "atom 4 (H)", and of several structures which one, unless they have no `kind`."""
    replica = int(system.batch[atom])
    name = f"atom {atom - int((system.batch < replica).sum())} ({SYMBOLS[int(system.z[atom])]})"
    return f"{name} of {kind} {replica}" if kind and system.num_systems > 1 else name


# --- Bonds of a structure, and whether dynamics has changed them ---
#
# The measure is that of X. Fu et al., "Forces are not enough", Trans. Mach. Learn. Res. 2023 (arXiv:2210.07237): a
# simulation of a molecule is no longer stable once a bond is 0.5 Å longer or shorter than it usually is. Two additions:
# a new bond counts as well, and a proton that goes over a hydrogen bond does not, since in the enol of acetylacetone,
# in acids and in water it does so at room temperature.

if TYPE_CHECKING:
    from ase import Atoms


BONDED = 1.25
"""Atoms nearer than this many sums of their covalent radii are bonded."""

DEVIATION = 0.5
"""Å by which a bond may be longer or shorter than usual."""

NONMETALS = (1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 32, 33, 34, 35, 52, 53)
"""Elements whose bonds are checked. Metal atoms change their neighbors in normal dynamics."""

_CLOSE = torch.tensor([0.8 if z == 1 else 0.7 if z in NONMETALS else 0.55 for z in range(len(covalent_radii))]).double()
"""Part of the sum of the covalent radii below which there is no bond, the least of both elements. V₂ has 0.58, Cr₂
0.60, U=O 0.67; among nonmetals N₂ has 0.77, H₂ 1.19."""

_DENSE_BONDS = 20_000  # pairs up to which computing all distances is faster than a neighbor search

ACCEPTORS = (7, 8, 9, 16, 17)
"""Elements (N, O, F, S, Cl) between which a proton may be transferred."""


class _Bond(NamedTuple):
    """A possible bond: both atoms, the three shifts of the second, and its length in Å."""

    key: tuple[int, ...]
    usual: float


class Bonds:
    """The bonds of a structure, to notice when one breaks or forms. All are arrays, which other processes get quickly.

    Args:
        start: one structure, on the CPU. Its bonds are watched, in periodic structures between fixed images of the
            atoms: positions must not be wrapped into the cell.
        frames: of the same atoms in the same order. The usual length of a bond is its mean over the frames in which
            the atoms are bonded, or its length at the start if there is none.

    Attributes:
        pairs: [P, 2] atoms.
        shift: [P, 3] cells between the second atom and its image that is bonded.
        usual: [P] Å.
        deviation: Å, the largest that was accepted, without bonds of protons that another atom could hold as well.
        transfers: number of protons that moved to another atom.
    """

    def __init__(self, start: System, frames: Sequence[Atoms] = ()):
        self._z, self._cell, self._pbc = start.z.numpy(), start.cell[0].numpy(), start.pbc[0].numpy()
        self._periodic = bool(self._pbc.any())
        self._radii = np.where(np.isin(self._z, NONMETALS), covalent_radii[self._z], 0.0)
        self.pairs, self.shift, self.usual = self._within(start.pos.numpy(), np.arange(len(self._z)), BONDED)
        self._heavy = np.flatnonzero((self._radii > 0) & (self._z > 1))
        self.deviation, self.transfers = 0.0, 0
        self._apart = self._pairs_apart()
        self._learn(frames)

    def __call__(self, pos: Tensor) -> None:
        """Compare positions with the bonds.

        Args:
            pos: [n, 3] Å, finite.

        Raises:
            Unphysical: a bond is too long or too short, or there is a new one; names the atoms.
        """
        x = pos.numpy()
        length = self.lengths(x)
        off = np.abs(length - self.usual)
        # nothing to do, as nearly always, if no bond is as far off as one was before
        if off.max(initial=0.0) > self.deviation:
            shared = self._shared(x)
            for k in np.flatnonzero(off > DEVIATION)[::-1].tolist():  # backwards, because bonds are removed
                if k not in shared or length[k] < self.usual[k]:
                    i, j = map(self._name, self.pairs[k])
                    raise Unphysical(f"the bond of {i} and {j} is {length[k]:.2f} Å long (usually {self.usual[k]:.2f})")
                self._hand_over(k, shared[k])
            off[list(shared)] = 0.0
        if self._near(x):
            self._refuse_new(x)
        self.deviation = max(self.deviation, float(off.max(initial=0.0)))

    def lengths(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the lengths of the bonds, [P] Å, at positions [n, 3] Å."""
        i, j = self.pairs.T
        vectors = x[j] - x[i]
        if self._periodic:
            vectors = vectors + self.shift @ self._cell
        return np.linalg.norm(vectors, axis=1)

    def _learn(self, frames: Sequence[Atoms]) -> None:
        """Set the usual lengths from frames that may have other cells and may be wrapped: minimum images."""
        from ase.geometry import find_mic

        i, j = self.pairs.T
        limit = BONDED * (self._radii[i] + self._radii[j])
        total, count = np.zeros(len(i)), np.zeros(len(i))
        for atoms in frames:
            vectors = atoms.positions[j] - atoms.positions[i]
            d = find_mic(vectors, atoms.cell, atoms.pbc)[1] if len(i) else np.zeros(0)
            total += np.where(d < limit, d, 0.0)
            count += d < limit
        self.usual = np.where(count > 0, total / np.maximum(count, 1), self.usual)

    def _within(
        self, x: NDArray[np.float64], among: NDArray[np.int64], part: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return pairs [P, 2], their shifts [P, 3] and distances [P], below that part of the sum of the radii."""
        radii = self._radii[among]
        cutoff = 2 * part * float(radii.max(initial=0.0))
        if not cutoff:
            return np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int64), np.zeros(0)
        z, pos, cell, pbc = map(torch.from_numpy, (self._z[among], x[among], self._cell, self._pbc))
        system = System(z=z, pos=pos, cell=cell, pbc=pbc)
        edges = neighbor_list(system, cutoff, half=True)
        d = edges.distances(system).numpy()
        i, j = edges.edge_index.numpy()
        near = (d < part * (radii[i] + radii[j])) & (radii[i] > 0) & (radii[j] > 0)
        return among[np.stack([i, j], 1)[near]], edges.shift.numpy()[near], d[near]

    def _pairs_apart(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Return heavy atoms that are not bonded, [Q, 2], and the squares of their least distances; None where a
        neighbor search is needed. Unlike bonds of protons, those of heavy atoms do not change (see `_refuse_new`)."""
        i, j = np.triu_indices(len(self._heavy), 1)
        if self._periodic or len(i) > _DENSE_BONDS:
            return None
        pairs = self._heavy[np.stack([i, j], 1)]
        known = {tuple(sorted(pair)) for pair in self.pairs.tolist()}
        pairs = pairs[[tuple(pair) not in known for pair in pairs.tolist()]]
        return pairs, self._radii[pairs].sum(1) ** 2

    def _near(self, x: NDArray[np.float64]) -> bool:
        """Return whether heavy atoms may have formed a bond; a fast test."""
        if self._apart is None:
            return True
        pairs, limits = self._apart
        vectors = x[pairs[:, 0]] - x[pairs[:, 1]]
        return bool((np.einsum("qk,qk->q", vectors, vectors) < limits * (1 + 1e-12)).any())

    def _refuse_new(self, x: NDArray[np.float64]) -> None:
        """Refuse new bonds: atoms nearer than the sum of their radii that were not bonded. Hydrogen is left out: it
        loses the old bond when it forms a new one, and may be near to both atoms meanwhile."""
        pairs, shift, d = self._within(x, self._heavy, 1.0)
        known = self._keys()
        for p, s, distance in zip(pairs.tolist(), shift.tolist(), d, strict=True):
            if (*p, *s) not in known:
                i, j = map(self._name, p)
                raise Unphysical(f"{i} and {j}, which were not bonded, are {distance:.2f} Å apart: a new bond")

    def _shared(self, x: NDArray[np.float64]) -> dict[int, _Bond]:
        """Return bonds of protons that another atom can hold as well, each with the shortest bond to such an atom."""
        z = self._z[self.pairs]
        protic = np.flatnonzero((z == 1).any(1) & np.isin(z, ACCEPTORS).any(1))
        if not len(protic):
            return {}
        protons = np.where(z[protic, 0] == 1, *self.pairs[protic].T)
        among = np.union1d(np.flatnonzero(np.isin(self._z, ACCEPTORS)), protons)
        reach = 1 + DEVIATION / (covalent_radii[1] + covalent_radii[list(ACCEPTORS)].min())
        pairs, shift, d = self._within(x, among, reach)
        sums = self._radii[pairs].sum(1)
        held = (d < sums + DEVIATION) & ((self._z[pairs] == 1).sum(1) == 1)
        near: dict[int, list[tuple[float, _Bond]]] = {}
        for p, s, distance, usual in zip(pairs[held], shift[held], d[held], sums[held], strict=True):
            near.setdefault(int(p[self._z[p] == 1][0]), []).append((distance, _Bond((*p, *s), usual)))
        found = {}
        for k, h in zip(protic.tolist(), protons.tolist(), strict=True):
            own = (*self.pairs[k], *self.shift[k])
            others = [(distance, bond) for distance, bond in near.get(h, ()) if bond.key != own]
            if others:
                found[k] = min(others)[1]
        return found

    def _hand_over(self, k: int, bond: _Bond) -> None:
        """Replace bond k by another bond, or nothing where the proton had two."""
        rest = np.arange(len(self.pairs)) != k
        self.pairs, self.shift, self.usual = self.pairs[rest], self.shift[rest], self.usual[rest]
        if bond.key not in self._keys():
            self.pairs = np.concatenate([self.pairs, [bond.key[:2]]])
            self.shift = np.concatenate([self.shift, [bond.key[2:]]])
            self.usual = np.append(self.usual, bond.usual)
            self.transfers += 1

    def _keys(self) -> set[tuple[int, ...]]:
        return {(*p, *s) for p, s in zip(self.pairs.tolist(), self.shift.tolist(), strict=True)}

    def _name(self, atom: int) -> str:
        return f"atom {atom} ({SYMBOLS[self._z[atom]]})"
