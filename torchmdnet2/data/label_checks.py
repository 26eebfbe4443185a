"""Checks of labels before training: frames that stand out, and energies, forces and stress that do not agree.

A few frames that stand out are errors: a wrong unit, a calculation without convergence, a damaged file. Many are a part
of the data and are not reported. The checks use medians, which single wrong labels do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii

from ..neighbors import neighbor_list
from .dataset import Dataset, Sample
from .pair_regression import Design, LinearFit, columns_of
from .statistics import Statistics

__all__ = [
    "Agreement", "Usual", "Zeros", "agreement", "bond_scale", "fit_columns", "net_force", "resolution", "shifted",
    "spread_out", "stress_agreement", "stress_size", "turned", "zeros",
]  # fmt: skip


if TYPE_CHECKING:
    from .statistics import Statistics


_LEAST_USUAL = 8  # frames from which the usual values can be estimated
_FORCES = (6.0, math.log(5.0))  # limit in robust standard deviations of log(rms), and its least value
_ENERGIES = (10.0, 0.5)  # the same of energies per atom, eV
_FEW = 0.01  # of the frames, and at least three of them


@dataclass(frozen=True, eq=False)
class Usual:
    """The usual labels of some frames, to which other frames are compared.

    Attributes:
        found: statistics of these frames.
    """

    found: Statistics

    def forces(self, other: Statistics) -> np.ndarray:
        """Return the positions of frames whose rms force is far above the median, worst first.

        Args:
            other: statistics of the frames to check; `found` checks the frames themselves.
        """
        size = _log_rms(self.found)
        size = size[np.isfinite(size)]
        if len(size) < _LEAST_USUAL:
            return np.zeros(0, dtype=np.int64)
        excess = np.nan_to_num(_log_rms(other) - np.median(size), nan=-np.inf)
        return _few(excess, _limit(size, *_FORCES))

    def energies(self, other: Statistics) -> np.ndarray:
        """Return the positions of frames whose energy per atom, minus references, is far from the median."""
        if self._references is None:
            return np.zeros(0, dtype=np.int64)
        own, rest = (_per_atom(each, self._references) for each in (self.found, other))
        own = own[~np.isnan(own)]
        return _few(np.nan_to_num(np.abs(rest - np.median(own)), nan=-np.inf), _limit(own, *_ENERGIES))

    @cached_property
    def median_force(self) -> float:
        """Return the median of the frames' rms force components, eV/Å."""
        size = _log_rms(self.found)
        return math.exp(float(np.median(size[np.isfinite(size)])))

    @cached_property
    def force_rms(self) -> float | None:
        """Return the rms force component without frames that stand out, eV/Å; None without forces."""
        square, count = self.found.force_square, self.found.force_count
        kept = np.ones(len(count), dtype=bool)
        kept[self.forces(self.found)] = False
        number = int(count[kept].sum())
        return math.sqrt(float(square[kept].sum()) / number) if number else None

    @cached_property
    def _references(self) -> dict[int, float] | None:
        """Return element -> eV by three least-squares fits, each without the frames that stood out before."""
        found = self.found
        chosen = ~np.isnan(found.energies) & (found.sizes > 1)
        for _ in range(3):
            if chosen.sum() < _LEAST_USUAL:
                return None
            counts = found.counts[chosen].astype(np.float64)
            solution = np.linalg.lstsq(counts, found.energies[chosen], rcond=None)[0]
            references = dict(zip(found.elements, solution.tolist(), strict=True))
            rest = _per_atom(found, references)
            own = rest[chosen]
            chosen &= np.abs(rest - np.median(own)) <= _limit(own, *_ENERGIES)
        return references


def _log_rms(found: Statistics) -> np.ndarray:
    """Return the logarithm of the rms force component of each frame, [S]; −inf or NaN where it has none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 0.5 * np.log(found.force_square / found.force_count)


def _per_atom(found: Statistics, references: dict[int, float]) -> np.ndarray:
    """Return (energy − references) / atoms of each frame, [S] eV; NaN for single atoms and without an energy."""
    alone = found.counts @ np.array([references.get(z, 0.0) for z in found.elements])
    return np.where(found.sizes > 1, (found.energies - alone) / found.sizes, np.nan)


def _limit(values: np.ndarray, deviations: float, least: float) -> float:
    """Return the distance from the median that is still usual."""
    width = 1.4826 * float(np.median(np.abs(values - np.median(values))))  # the standard deviation of a Gaussian
    return max(deviations * width, least)


def _few(excess: np.ndarray, limit: float) -> np.ndarray:
    """Return the positions above the limit, worst first; none if there are many."""
    beyond = np.flatnonzero(excess > limit)
    if len(beyond) > max(3, _FEW * len(excess)):
        beyond = beyond[:0]
    return beyond[np.argsort(-excess[beyond], kind="stable")]


# --- Consistency checks: forces and stress must be derivatives of the energies. They find wrong signs and units ---

_COMPARED, _COORDINATES = 250, 2_000_000  # largest numbers of frames and of coordinates
_LEAST = 8  # frames
_NEAR = 0.35  # Å per atom, between two frames that are compared; 0.1 to 0.3 in dynamics of a molecule at 300 K
_STRAIN = 0.15  # largest component of the strain between two cells that are compared
_EXACT = {"forces": 0.85, "stresses": 0.94}  # correct labels have correlations above 0.93 and 0.9
_LEAST_SCATTERED, _SCATTERED = 20, 0.7  # number of pairs, and their correlation, for energies with noise
_EXPLAINED, _MATRIX = 0.5, 8_000_000  # share of the variance of the forces that pairs explain; size of the matrix


_TORQUE, _TORQUE_PER_ATOM = 0.03, 0.01
"""Torque over the size of r × F, and eV/Å: 0.0016 and 0.0007 at most in right labels on coarse grids."""
_FEWEST_TURNED = 4


@dataclass(frozen=True)
class Agreement:
    """Agreement of energy changes with the work of the forces, in pairs of similar frames.

    Attributes:
        slope: slope of the energy changes over the work −∫F·dr; about 1 if the labels belong together.
        correlation: correlation of the two.
        what: name of the compared labels, in the plural.
        pairs: number of pairs that were compared.
        sizes: rms of the changes and of the work, eV.
    """

    slope: float
    correlation: float
    what: str = "forces"
    pairs: int = 0
    sizes: tuple[float, float] = (0.0, 0.0)

    @property
    def fault(self) -> str | None:
        """Return a sentence on what is wrong; None if nothing is, or if the frames cannot show it."""
        if self.correlation < -0.5:
            wrong = "have the wrong sign for the energies: are they gradients, or do they follow another convention?"
            return f"{self.what} {wrong}"
        # between close frames the slope is exact, and distinguishes bohr from Å
        most = (1.45 if self.what == "forces" else 1.6) if self.correlation > _EXACT[self.what] else 4.0
        if self.correlation > 0.5 and not 1 / most < self.slope < most:
            times = f"{self.slope:.3g} times those that follow from the {self.what}"
            return f"changes of the energy are {times}: are the units right?"
        if self.what == "forces" and self.pairs >= _LEAST_SCATTERED and self.correlation < _SCATTERED:
            changes, work = self.sizes
            return (
                f"energies differ by {changes:.2g} eV where the forces make it {work:.2g} eV, and not correlated: are "
                "all of one method, one electronic state, converged, and of these structures?"
            )
        return None


def agreement(dataset: Dataset, frames: np.ndarray, found: Statistics) -> Agreement | None:
    """Compare energies and forces of frames of one molecule or crystal.

    By the trapezoidal rule, E₂ − E₁ ≈ −(F₁ + F₂)·(r₂ − r₁)/2 for similar structures; exact where the energy is
    quadratic. Molecules are turned onto each other first (Kabsch, Acta Cryst. A 32, 922 (1976)). A pair potential is
    fitted to the forces, so that the rule is for the rest alone: of right labels the slope is then within 0.8 and 1.1.

    Args:
        dataset: the data set.
        frames: [S] indices; up to 250 frames of the most frequent composition are compared.
        found: statistics of these frames.

    Returns:
        The agreement; None if too few frames of one composition have both labels.
    """
    batch, atoms, chosen = _similar(dataset, frames, found)
    if batch is None or "forces" not in batch.labels:
        return None
    z = batch.system.z.numpy().reshape(-1, atoms)
    pos = batch.system.pos.numpy().reshape(-1, atoms, 3)
    forces = batch.labels["forces"].numpy().reshape(-1, atoms, 3)
    cell = batch.system.cell.numpy()
    state = np.stack([batch.system.charge.numpy(), batch.system.spin.numpy()], 1)
    same = (z == z[0]).all(1) & np.isfinite(forces).all((1, 2)) & (cell == cell[0]).all((1, 2))
    same &= (state == state[same.argmax()]).all(1)
    if same.sum() < _LEAST:
        return None
    periodic = bool(batch.system.pbc.any())
    known, energies = _of_pairs(dataset, np.asarray(frames)[chosen[same]], forces[same])
    values = np.stack([batch.labels["energy"].double().numpy()[same], energies], 1)
    work, change = _pairs(pos[same], forces[same] - known, values, cell[0] if periodic else None)
    return _compared(work + change[:, 1], change[:, 0])


def _of_pairs(dataset: Dataset, frames: np.ndarray, forces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return forces [n, N, 3] and energies [n] of a pair potential fitted to the forces; 0 where it is not like them.

    Args:
        dataset: the data set.
        frames: [n] indices.
        forces: [n, N, 3] eV/Å.
    """
    none = np.zeros_like(forces), np.zeros(len(forces))
    kinds = len(np.unique(dataset.batch(frames[:1]).system.z.numpy()))
    if forces.size * columns_of(kinds) > _MATRIX:
        return none
    design = Design(dataset.batch(frames).system)
    if not design.scale.any():
        return none
    solution = LinearFit(design.forces)(forces.reshape(-1))
    if solution.explained < _EXPLAINED:
        return none
    return solution.predicted.reshape(forces.shape), design.energies @ solution.mean


def stress_agreement(dataset: Dataset, frames: np.ndarray, found: Statistics) -> Agreement | None:
    """Compare energies and stress of one crystal in different cells; arguments as in `agreement`.

    E₂ − E₁ ≈ −(F₁ + F₂)·Δr/2 + (V₁σ₁ + V₂σ₂):ε/2, where ε is the strain from one cell to the other, and Δr the rest of
    the displacements. Tensile stress is positive.
    """
    batch, atoms, _ = _similar(dataset, frames, found)
    if batch is None or not {"forces", "stress"} <= batch.labels.keys() or not bool(batch.system.pbc.all()):
        return None
    z, pos, forces = (x.numpy().reshape(-1, atoms, *x.shape[1:])
                      for x in (batch.system.z, batch.system.pos, batch.labels["forces"]))  # fmt: skip
    cell, energy = batch.system.cell.numpy(), batch.labels["energy"].numpy()
    virial = batch.labels["stress"].numpy() * batch.system.volume.numpy()[:, None, None]
    same = (z == z[0]).all(1) & np.isfinite(forces).all((1, 2)) & np.isfinite(virial).all((1, 2))
    if same.sum() < _LEAST:
        return None
    pos, forces, cell, energy, virial = (x[same] for x in (pos, forces, cell, energy, virial))
    one, two = np.triu_indices(len(pos), 1)
    deformed = np.linalg.inv(cell[one]) @ cell[two]
    strain = (deformed @ deformed.transpose(0, 2, 1) - np.eye(3)) / 2  # Green-Lagrange strain: 0 for a rotation
    step = pos[two] - pos[one] @ deformed
    step -= np.round(step @ np.linalg.inv(cell[two])) @ cell[two]
    step -= step.mean(1, keepdims=True)
    size = np.where(np.abs(strain).max((1, 2)) < _STRAIN, np.square(step).sum((1, 2)), np.inf)
    near = np.argsort(size, kind="stable")[: len(pos)]
    near = near[np.isfinite(size[near])]
    one, two, strain, step = one[near], two[near], strain[near], step[near]
    work = 0.5 * ((virial[one] + virial[two]) * strain).sum((1, 2))
    change = energy[two] - energy[one] + 0.5 * ((forces[one] + forces[two]) * step).sum((1, 2))
    result = _compared(work, change)
    return None if result is None else replace(result, what="stresses")


def _compared(work: np.ndarray, change: np.ndarray) -> Agreement | None:
    if len(work) < _LEAST or work.std() == 0 or change.std() == 0:
        return None
    slope, correlation = float(work @ change) / float(work @ work), float(np.corrcoef(work, change)[0, 1])
    sizes = float(np.sqrt(np.mean(change**2))), float(np.sqrt(np.mean(work**2)))
    return Agreement(slope, correlation, pairs=len(work), sizes=sizes)


def _similar(dataset: Dataset, frames: np.ndarray, found: Statistics) -> tuple[Sample | None, int, np.ndarray]:
    """Return up to 250 frames with energies of the most frequent composition, as a batch; their atoms; their places."""
    known = np.flatnonzero(~np.isnan(found.energies))
    if len(known) < _LEAST or found.force_rms is None:
        return None, 0, known
    weights = np.random.default_rng(0).normal(size=len(found.elements))
    _, kind, often = np.unique(found.counts[known] @ weights, return_inverse=True, return_counts=True)
    known = known[kind == often.argmax()]
    atoms = int(found.sizes[known[0]])
    most = min(_COMPARED, max(_LEAST, math.isqrt(_COORDINATES // (3 * atoms))))
    chosen = known[np.unique(np.linspace(0, len(known) - 1, min(most, len(known))).astype(int))]
    return dataset.batch(np.asarray(frames)[chosen]), atoms, chosen


def _pairs(
    pos: np.ndarray, forces: np.ndarray, energy: np.ndarray, cell: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return work of the forces and change of the energy in similar pairs, half as many as frames.

    Args:
        pos, forces: [n, N, 3] Å, eV/Å.
        energy: [n, 2] eV.
        cell: [3, 3] Å for a crystal, None for a molecule.
    """
    one, two = np.triu_indices(len(pos), 1)
    if cell is None:
        pos = pos - pos.mean(1, keepdims=True)
        turn = _rotations(pos[two], pos[one])
        step = pos[two] @ turn - pos[one]
        after = forces[two] @ turn
    else:
        step = pos[two] - pos[one]
        step -= np.round(step @ np.linalg.pinv(cell)) @ cell
        step -= step.mean(1, keepdims=True)
        after = forces[two]
    size = np.sqrt(np.square(step).sum((1, 2)) / pos.shape[1])
    near = np.argsort(size, kind="stable")[: max(_LEAST, len(pos) // 2)]
    near = near[size[near] < _NEAR]
    work = -0.5 * ((forces[one[near]] + after[near]) * step[near]).sum((1, 2))
    return work, energy[two[near]] - energy[one[near]]


def _rotations(moved: np.ndarray, fixed: np.ndarray) -> np.ndarray:
    """Return rotations R [n, 3, 3] for which moved @ R is nearest to fixed, both [n, N, 3] about their centres."""
    left, _, right = np.linalg.svd(moved.transpose(0, 2, 1) @ fixed)
    left[:, :, 2] *= np.sign(np.linalg.det(left) * np.linalg.det(right))[:, None]
    return left @ right


# --- Signs of wrong labels: exact zeros, lost digits, stresses and lengths of an impossible size ---

_FRAMES, _ATOMS = 1000, 30_000  # largest numbers of frames and atoms that are checked
_CUTOFF = 4.0  # Å
_UNEVEN = 1e-3  # least sum of vectors to neighbors of an atom whose surroundings are not symmetric
_STRUCTURES, _REPEATED = 8, 3  # structures, and structures of one energy where there are fewer than 8 energies
_SHEAR = (1, 2, 5)  # places of the shear components among nine numbers
_ROUNDS, _FEWEST_SHIFTED = 20, 4
_SHIFT_PER_ATOM, _SHIFT_ABOVE = 1.0, 20.0  # eV; and multiples of the rms of the residuals
_NOBLE = (2, 10, 18, 36, 54, 86)


class Zeros(NamedTuple):
    """Labels that are exactly zero and cannot be right.

    Args:
        looked: number of frames that were checked.
        atoms: number of atoms with zero force in surroundings that are not symmetric.
        frames: positions of frames in which all atoms have zero force.
        axes: x, y or z -> positions of frames in which this component of the forces is zero on all atoms whose
            surroundings are not symmetric along it, while other components are not zero.
        energies: positions of frames of several atoms with zero energy, while other frames have other energies.
        stresses: positions of frames whose stress has nine zeros.
        shears: positions of frames whose stress has only zeros off the diagonal, though the structure is not symmetric.
        same: positions of different structures with the same stress, which is not zero.
    """

    looked: int
    atoms: int
    frames: np.ndarray
    axes: dict[str, np.ndarray]
    energies: np.ndarray
    stresses: np.ndarray
    shears: np.ndarray
    same: np.ndarray


def spread_out(found: Statistics) -> np.ndarray:
    """Return the positions of up to 1,000 evenly spread frames with up to 30,000 atoms in total."""
    most = int(max(1, min(_FRAMES, _ATOMS / found.sizes.mean())))
    return np.unique(np.linspace(0, found.num_frames - 1, min(most, found.num_frames)).astype(int))


def zeros(batch: Sample, found: Statistics, chosen: np.ndarray) -> Zeros:
    """Find labels that are exactly zero.

    Args:
        batch: the frames `chosen`.
        found: statistics of all frames.
        chosen: [B] positions of the frames of the batch among all frames.
    """
    system, none = batch.system, np.zeros(0, dtype=np.int64)
    sizes = system.atom_counts.numpy()
    atoms, frames, stresses, shears, same = 0, none, none, none, none
    axes: dict[str, np.ndarray] = {}
    neighbors = neighbor_list(system, _CUTOFF)
    vectors = neighbors.vectors(system).detach().double()
    distance = vectors.norm(dim=1, keepdim=True)
    if "forces" in batch.labels:
        pull = torch.cat([vectors * torch.exp(-distance), vectors * torch.exp(-2 * distance)], 1)
        uneven = pull.new_zeros(system.num_atoms, 6).index_add_(0, neighbors.edge_index[0], pull).abs()
        idle = ((batch.labels["forces"] == 0).all(1) & (uneven.amax(1) > _UNEVEN)).numpy()
        owner = system.batch.numpy()
        atoms = int(idle.sum())
        some = np.bincount(owner[idle], minlength=len(sizes))
        moved = np.bincount(owner[(batch.labels["forces"] != 0).any(1).numpy()], minlength=len(sizes))
        frames = chosen[(some > 0) & (moved == 0)]
        for k, axis in enumerate("xyz"):
            expected = (uneven[:, [k, k + 3]].amax(1) > _UNEVEN).numpy()
            there = (batch.labels["forces"][:, k] != 0).numpy()
            empty = (np.bincount(owner[expected], minlength=len(sizes)) > 1) & (moved > 0)
            axes[axis] = chosen[empty & (np.bincount(owner[there], minlength=len(sizes)) == 0)]
    if "stress" in batch.labels:
        stress, periodic = batch.labels["stress"].flatten(1).numpy(), system.volume.numpy() > 0
        idle = (stress[:, _SHEAR] == 0).all(1) & periodic
        empty = (stress == 0).all(1) & periodic
        tensor = (vectors[:, :, None] * vectors[:, None] * torch.exp(-distance)[:, :, None]).flatten(1)
        owner_of = system.batch[neighbors.edge_index[0]]
        sheared = tensor.new_zeros(len(sizes), 9).index_add_(0, owner_of, tensor)[:, _SHEAR].abs().amax(1).numpy()
        stresses, shears = chosen[empty], chosen[idle & ~empty & (sheared > _UNEVEN)]
        _, kind, often = np.unique(stress[~empty], axis=0, return_inverse=True, return_counts=True)
        if len(often):
            group = chosen[~empty][kind.reshape(-1) == often.argmax()]
            same = np.sort(group[np.unique(found.keys[group], return_index=True)[1]])
    energies = np.flatnonzero((found.energies == 0) & (found.sizes > 1))
    if not np.nan_to_num(found.energies).any():
        energies = none
    return Zeros(len(chosen), atoms, frames, axes, energies, stresses, shears, same)


def net_force(batch: Sample) -> tuple[float, float] | None:
    """Return how large the sum of the forces of a frame is, where forces of all its atoms are known and none is 0.

    Of the energy of atoms alone it is 0, in cells too.

    Args:
        batch: frames.

    Returns:
        Medians over the frames: |Σ F| / √(Σ |F|²), and |Σ F| per atom in eV/Å; None without such frames.
    """
    if "forces" not in batch.labels:
        return None
    forces, owner = batch.labels["forces"].double(), batch.system.batch
    sizes = batch.system.atom_counts.numpy()
    net = forces.new_zeros(len(sizes), 3).index_add_(0, owner, forces).norm(dim=1).numpy()
    square = forces.new_zeros(len(sizes)).index_add_(0, owner, forces.square().sum(1)).numpy()
    idle = np.bincount(owner[(forces == 0).all(1)].numpy(), minlength=len(sizes))
    used = (sizes > 1) & (idle == 0) & np.isfinite(net)
    if not used.any():
        return None
    return float(np.median(net[used] / np.sqrt(square[used]))), float(np.median(net[used] / sizes[used]))


def turned(batch: Sample, chosen: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Find isolated molecules whose forces have a torque, as forces in another orientation than the positions have.

    The energy of a molecule alone does not change when it is turned, so that Σ (r − c) × F is 0.

    Args:
        batch: frames `chosen`; those in cells, and those with forces that are 0 or unknown, are left out.
        chosen: [B] positions among all frames.

    Returns:
        Positions of the frames with a torque, and the median over them of |Σ (r − c) × F| / √(Σ |r − c|² |F|²); None:
        there are fewer than 2 % and four, or than half of the frames that can be judged.
    """
    if "forces" not in batch.labels:
        return None
    system, forces = batch.system, batch.labels["forces"].double()
    owner, sizes = system.batch, system.atom_counts

    def summed(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(sizes), *values.shape[1:]).index_add_(0, owner, values)

    idle = summed((forces == 0).all(1).double()).numpy()
    radius = system.pos.double() - (summed(system.pos.double()) / sizes[:, None])[owner]
    forces = forces - (summed(forces) / sizes[:, None])[owner]
    torque = summed(torch.linalg.cross(radius, forces)).norm(dim=1).numpy()
    size = np.sqrt(summed(radius.square().sum(1) * forces.square().sum(1)).numpy())
    extent = np.sqrt((summed(radius.square().sum(1)) * sizes).numpy())
    used = (sizes.numpy() > 1) & (idle == 0) & ~system.pbc.any(1).numpy() & np.isfinite(torque) & (size > 0)
    found = used & (torque > _TORQUE * size) & (torque > _TORQUE_PER_ATOM * extent)
    if not found.any() or found.sum() < max(0.02 * used.sum(), min(_FEWEST_TURNED, used.sum() / 2)):
        return None
    return chosen[found], float(np.median(torque[found] / size[found]))


def shifted(batch: Sample, found: Statistics, chosen: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Find frames whose energies are higher than those of the others by one number.

    Energies are compared after a fit to the composition, charge and spin. The number must be 20 times the rms that is
    left, and 1 eV per atom: isomers and phases differ by less.

    Args:
        batch: frames `chosen`.
        found: statistics of all frames.
        chosen: [B] positions in them.

    Returns:
        Their positions, and the number in eV; None: there are none.
    """
    energies, sizes = found.energies[chosen], found.sizes[chosen]
    used = np.flatnonzero(~np.isnan(energies) & (sizes > 1))
    if len(used) < 2 * _STRUCTURES:
        return None
    counts, energies = found.counts[chosen[used]].astype(np.float64), energies[used]
    columns = fit_columns(counts, batch.system.charge.numpy()[used], batch.system.spin.numpy()[used])
    least = max(_FEWEST_SHIFTED, int(0.02 * len(used)))
    high, shift, left = np.zeros(len(used)), 0.0, energies
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(np.concatenate([columns, high[:, None]], 1), energies, rcond=None)[0]
        shift, rest = float(solution[-1]), energies - columns @ solution[:-1]
        left = rest - shift * high
        order = np.argsort(rest, kind="stable")
        gaps = np.diff(rest[order])[least - 1 : len(used) - least]
        above = np.zeros(len(used))
        above[order[least + int(gaps.argmax()) :]] = 1.0
        if (above == high).all():
            break
        high = above
    if shift < max(_SHIFT_PER_ATOM * float(sizes.mean()), _SHIFT_ABOVE * float(np.sqrt(np.mean(left**2)))):
        return None
    return chosen[used[np.flatnonzero(high)]], shift


def fit_columns(counts: np.ndarray, charge: np.ndarray, spin: np.ndarray) -> np.ndarray:
    """Return the columns of a fit of energies to compositions and states: [S, K] numbers of atoms, and a column of ones
    for each pair of charge and spin."""
    kinds, kind = np.unique(np.stack([charge, spin], 1), axis=0, return_inverse=True)
    return np.concatenate([counts, np.eye(len(kinds))[kind.reshape(-1)]], 1)


def resolution(found: Statistics) -> float | None:
    """Return the step in eV that energies are multiples of, if they have lost digits; None otherwise.

    Digits count as lost if the step is above 0.5 meV, and either above a fiftieth of the differences between energies
    of one composition or above 0.3 meV per atom. The step is infinite if all energies are the same.
    """
    known = ~np.isnan(found.energies) & (found.sizes > 1)
    energies = found.energies[known]
    values, structures = np.unique(energies), len(np.unique(found.keys[known]))
    if structures < _STRUCTURES or (len(values) < _STRUCTURES and structures < _REPEATED * len(values)):
        return None
    if len(values) == 1:
        return float("inf")
    above = values - values[0]
    step = float(np.diff(values).min())
    multiples = above / step
    error = np.abs(multiples - np.rint(multiples))
    if step < 5e-4 or multiples[-1] > 1e12 or error.max() > 0.01 + 4 * np.spacing(np.abs(values).max()) / step:
        return None
    references = found.atomref
    left = energies - (found.counts @ np.array([references.get(z, 0.0) for z in found.elements]))[known]
    usual = 1.4826 * float(np.median(np.abs(left - np.median(left))))
    return step if step > min(0.02 * usual, 3e-4 * float(found.sizes.mean())) else None


def stress_size(batch: Sample) -> float | None:
    """Return the median over the frames of the largest stress component, eV/Å³; None without stresses."""
    if "stress" not in batch.labels:
        return None
    largest = batch.labels["stress"].abs().flatten(1).amax(1).numpy()
    largest = largest[np.isfinite(largest) & (largest > 0)]
    return float(np.median(largest)) if len(largest) else None


def bond_scale(batch: Sample) -> float | None:
    """Return the median over atoms of the nearest distance divided by the sum of covalent radii; None without atoms.

    Usual values are 0.9 to 1.2 in molecules, crystals and metals. Noble gases and single atoms are left out.
    """
    system = batch.system
    nearest = neighbor_list(system, 8.0)
    receiver, sender = nearest.edge_index
    bound = ~(torch.isin(system.z[receiver], torch.tensor(_NOBLE)) | torch.isin(system.z[sender], torch.tensor(_NOBLE)))
    receiver, sender = receiver[bound], sender[bound]
    if not len(receiver):
        return None
    radii = torch.from_numpy(covalent_radii)
    ratio = nearest.distances(system).detach().double()[bound] / (radii[system.z[receiver]] + radii[system.z[sender]])
    least = torch.full((system.num_atoms,), torch.inf, dtype=torch.float64)
    least = least.scatter_reduce(0, receiver, ratio, "amin")
    return float(least[torch.isfinite(least)].median())
