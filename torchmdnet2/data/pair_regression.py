"""Do energies, forces and stress of any frames belong together? A fitted pair potential tells, without similar frames.

A sum of smooth functions of the distance, one for each pair of elements, is fitted to the forces alone, as a Bayesian
linear regression (MacKay, Neural Comput. 4, 415 (1992)). It predicts energies and stresses with a covariance. What the
forces leave open, such as the value of a function beyond a gap in the distances, has a large variance and says
nothing. The labels are then compared with `factor` times the prediction, by the likelihood of the factor: 1 where
signs and units are right, however different the frames are from each other.

Shapes: B frames, N atoms of all of them, E directed edges, P pairs of elements, K functions, C = P·K columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..neighbors import neighbor_list
from .dataset import Dataset, Sample
from .statistics import Statistics

__all__ = ["Factor", "Regression", "regression"]

_CUTOFF = 5.0  # Å
_CENTRES = 0.7 * 1.15 ** np.arange(15)  # Å
_WIDTH = 0.14  # of the logarithm of the distance
_PAIRS = 40  # of elements, the most frequent ones
_FRAMES, _NUMBERS = 300, 12_000_000  # frames, and numbers of the design matrix, at most
_STRESSES = 100  # frames
_LEAST = 20  # frames
_EXPLAINED = 0.5  # of the variance of the forces, at least

_FACTORS = np.logspace(-7, 7, 141)
_NOISE = np.logspace(-6, 0.3, 30)  # of the mean square of the labels
_INFLATION = np.logspace(0, 6, 11)  # of the covariance: forces that are not of pairs are no white noise

ORDERS = {"": (0, 1, 2), "xx yy zz xy yz zx, as VASP's": (1, 2, 0), "xx yy zz zx xy yz": (2, 0, 1)}
"""Another order of six numbers -> which of the components yz, zx, xy, as they are read, each of these is in it."""


@dataclass(frozen=True)
class Factor:
    """By what the labels differ from the prediction.

    Attributes:
        value: of the largest likelihood.
        gain: logarithm of that likelihood over the one without any relation.
        positive: over the one of the best factor above 0.
        near: over the one of the best factor from 0.4 to 2.5.
        close: over the one of the best factor from 0.67 to 1.5.
    """

    value: float
    gain: float
    positive: float
    near: float
    close: float


@dataclass(frozen=True, eq=False)
class Regression:
    """A pair potential fitted to the forces of some frames.

    Attributes:
        frames: how many.
        explained: share of the variance of the forces.
        energy: factor of the energies.
        per_atom: the same, where the energies are taken for energies per atom.
        stress: order of the components -> factor of the stresses; empty without them.
    """

    frames: int
    explained: float
    energy: Factor
    per_atom: Factor
    stress: dict[str, Factor]


def regression(dataset: Dataset, frames: np.ndarray, found: Statistics) -> Regression | None:
    """Fit a pair potential to the forces of up to 300 frames and compare energies and stresses with it.

    Args:
        dataset: the data set.
        frames: [S] indices.
        found: statistics of these frames.

    Returns:
        None where there are fewer than 20 frames with energies and forces of several atoms, or where a pair potential
        describes less than half of the forces.
    """
    usable = np.flatnonzero(~np.isnan(found.energies) & (found.sizes > 1) & (found.force_count == 3 * found.sizes))
    if len(usable) < _LEAST:
        return None
    pairs = min(_PAIRS, len(found.elements) * (len(found.elements) + 1) // 2)
    atoms = _NUMBERS / (3 * pairs * len(_CENTRES))
    most = int(min(_FRAMES, max(_LEAST, atoms / found.sizes[usable].mean())))
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(most, len(usable))).astype(int))]
    batch = dataset.batch(np.asarray(frames)[chosen])
    design = _Design(batch)
    forces = batch.labels["forces"].double().numpy().reshape(-1)
    if not forces.any() or not design.scale.any():
        return None
    mean, spread, explained = _fitted(design.forces, forces)
    if explained < _EXPLAINED:
        return None
    counts = found.counts[chosen]
    sizes = counts.sum(1)
    weight = 1 / np.sqrt(sizes)  # errors of energies are taken to grow with the root of the number of atoms
    free = _complement(_controls(batch, counts) * weight[:, None])
    if free.shape[1] < _LEAST // 2:
        return None
    predicted = free.T @ (design.energies * weight[:, None])
    energies = batch.labels["energy"].numpy() * weight
    energy, per_atom = (_factor(free.T @ e, predicted @ mean, predicted @ spread) for e in (energies, energies * sizes))
    return Regression(len(chosen), explained, energy, per_atom, _of_stresses(batch, design, mean, spread))


class _Design:
    """What functions of unit coefficient give, scaled to forces of the same mean square.

    Attributes:
        energies: [B, C] eV.
        forces: [3 N, C] eV/Å.
        scale: [C]
    """

    def __init__(self, batch: Sample):
        system = batch.system
        neighbors = neighbor_list(system, _CUTOFF)
        vectors = neighbors.vectors(system).detach().double()
        receiver, sender = neighbors.edge_index
        one, two = system.z[receiver], system.z[sender]
        kinds, pair, often = torch.unique(
            torch.minimum(one, two) * 128 + torch.maximum(one, two), return_inverse=True, return_counts=True
        )
        rank = torch.empty_like(often)
        rank[often.argsort(descending=True, stable=True)] = torch.arange(len(kinds))
        pair = rank[pair]
        kept = pair < _PAIRS
        self._pair, self._receiver, self._vectors = pair[kept], receiver[kept], vectors[kept]
        self._owner = system.batch[self._receiver]
        self._count = min(len(kinds), _PAIRS)
        distance = self._vectors.norm(dim=1)
        values, slopes = _functions(distance)
        self._pull = slopes / distance[:, None]  # [E, K], of the vector to the sender
        rows = [
            self._summed(self._receiver, self._vectors[:, i, None] * self._pull, system.num_atoms) for i in range(3)
        ]
        forces = np.stack(rows, 1).reshape(3 * system.num_atoms, -1)
        self.scale = np.sqrt(np.square(forces).mean(0))
        self._unit = np.where(self.scale > 1e-6 * self.scale.max(initial=0.0), self.scale, np.inf)  # images of an atom
        self.forces = forces / self._unit
        self.energies = 0.5 * self._summed(self._owner, values, system.num_systems) / self._unit

    def virials(self, one: int, two: int, num_systems: int) -> np.ndarray:
        """One component of stress times volume, [B, C] eV."""
        values = self._vectors[:, one, None] * self._vectors[:, two, None] * self._pull
        return 0.5 * self._summed(self._owner, values, num_systems) / self._unit

    def _summed(self, place: Tensor, values: Tensor, size: int) -> np.ndarray:
        table = values.new_zeros(size * self._count, values.shape[1])
        return table.index_add_(0, place * self._count + self._pair, values).view(size, -1).numpy()


def _functions(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Gaussians of the logarithm of the distance that end at the cutoff, and their slopes: [E, K], [E, K] 1/Å."""
    far = (distance.log()[:, None] - torch.from_numpy(np.log(_CENTRES))) / _WIDTH
    bell, ratio = torch.exp(-0.5 * far**2), (distance / _CUTOFF)[:, None]
    end = (1 - ratio**2) ** 3
    return bell * end, bell * (-far / _WIDTH / distance[:, None] * end - 6 * ratio / _CUTOFF * (1 - ratio**2) ** 2)


def _fitted(design: np.ndarray, labels: np.ndarray, rounds: int = 30) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean of the coefficients [C], a root of their covariance [C, C], and the share of the variance explained.

    Noise and prior variance are those of the largest evidence.
    """
    size, square = len(labels), float(labels @ labels)
    values, vectors = np.linalg.eigh(design.T @ design)
    values = np.maximum(values, 0.0)
    moment = vectors.T @ (design.T @ labels)
    noise = square / size
    prior = noise / max(values.mean() / size, 1e-300)
    for _ in range(rounds):
        precision = values / noise + 1 / prior
        mean = moment / noise / precision
        known = float((values / noise / precision).sum())
        left = square - 2 * mean @ moment + (values * mean**2).sum()
        prior = float(mean @ mean) / max(known, 1e-9)
        noise = max(float(left), 1e-4 * square) / max(size - known, 1.0)
    precision = values / noise + 1 / prior
    return vectors @ (moment / noise / precision), vectors / np.sqrt(precision), 1 - noise * size / square


def _controls(batch: Sample, counts: np.ndarray) -> np.ndarray:
    """What energies may depend on besides the distances of atoms, [B, ·]: composition, volume, charge and spin."""
    system = batch.system
    sizes = counts.sum(1).astype(np.float64)
    kinds, kind = np.unique(counts, axis=0, return_inverse=True)
    several = 5 * len(kinds) <= len(counts)  # frames of each composition: isomers apart, its energy needs no model
    columns = [np.eye(len(kinds))[kind.reshape(-1)] if several else counts.astype(np.float64)]
    periodic = system.pbc.all(1).numpy() & (system.volume.numpy() > 0)
    if periodic.any():  # the energy of the surrounding electrons of a metal
        density = np.zeros(len(sizes))
        density[periodic] = np.log(system.volume.numpy()[periodic] / sizes[periodic])
        density[periodic] -= density[periodic].mean()
        if density.std() > 1e-6:
            density /= density.std()
            columns += [counts * density[:, None], (sizes * density**2)[:, None]]
    states = np.stack([system.charge.numpy(), system.spin.numpy()], 1)
    kinds, state = np.unique(states, axis=0, return_inverse=True)
    if 1 < len(kinds) <= 10:
        columns.append(np.eye(len(kinds))[state.reshape(-1)])
    return np.concatenate(columns, 1)


def _complement(columns: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what is orthogonal to the columns, [B, ·]."""
    left, values, _ = np.linalg.svd(columns, full_matrices=True)
    return left[:, int((values > 1e-9 * values[0]).sum()) :]


def _of_stresses(batch: Sample, design: _Design, mean: np.ndarray, spread: np.ndarray) -> dict[str, Factor]:
    """Order of the components -> factor. The pressure is left out, which is not one of pairs in metals."""
    if "stress" not in batch.labels:
        return {}
    system = batch.system
    stress = batch.labels["stress"].double().numpy()
    known = np.isfinite(stress).all((1, 2)) & system.pbc.all(1).numpy() & stress.any((1, 2))
    rows = np.flatnonzero(known)[:: max(1, -(-int(known.sum()) // _STRESSES))]
    if len(rows) < _LEAST // 2:
        return {}
    weight = 1 / np.sqrt(system.atom_counts.numpy()[rows].astype(np.float64))
    label = stress[rows] * (system.volume.numpy()[rows] * weight)[:, None, None]
    parts = {ij: design.virials(*ij, system.num_systems)[rows] * weight[:, None]
             for ij in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))}  # fmt: skip
    straight = [parts[0, 0] - parts[1, 1], parts[1, 1] - parts[2, 2]]
    predicted = np.concatenate([*straight, parts[1, 2], parts[0, 2], parts[0, 1]])
    diagonal = [label[:, 0, 0] - label[:, 1, 1], label[:, 1, 1] - label[:, 2, 2]]
    shear = label[:, 1, 2], label[:, 0, 2], label[:, 0, 1]
    result = {}
    for name, order in ORDERS.items():
        labels = np.concatenate([*diagonal, *(shear[i] for i in order)])
        if labels.any():
            result[name] = _factor(labels, predicted @ mean, predicted @ spread)
    return result


def _factor(labels: np.ndarray, predicted: np.ndarray, spread: np.ndarray) -> Factor:
    """The factor for which labels ~ N(factor · predicted, factor² · inflation · spread spreadᵀ + noise) is likeliest.

    Noise and inflation are those of the largest likelihood, for each factor.
    """
    size = float(np.sqrt(np.mean(labels**2))) or 1.0
    unit = float(np.sqrt(np.mean(predicted**2))) or 1.0
    vectors, values, _ = np.linalg.svd(spread / unit, full_matrices=True)
    variances = np.zeros(len(labels))
    variances[: len(values)] = values**2
    y, x = vectors.T @ labels / size, vectors.T @ predicted / unit
    inflated, noise = (variances * _INFLATION[:, None])[:, None], _NOISE[:, None]

    def likelihood(factor: float) -> float:
        total = factor**2 * inflated + noise
        return float((-0.5 * (np.log(total) + (y - factor * x) ** 2 / total).sum(-1)).max())

    factors = np.concatenate([np.concatenate([-_FACTORS, _FACTORS]) * (size / unit), np.logspace(-0.4, 0.4, 17)])
    found = np.array([likelihood(f * unit / size) for f in factors])
    best = int(found.argmax())

    def over(chosen: np.ndarray) -> float:
        return float(found[best] - found[chosen].max())

    return Factor(
        value=float(factors[best]),
        gain=float(found[best] - likelihood(0.0)),
        positive=over(factors > 0),
        near=over((factors > 0.4) & (factors < 2.5)),
        close=over((factors > 0.67) & (factors < 1.5)),
    )
