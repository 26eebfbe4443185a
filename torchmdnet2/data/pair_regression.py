"""Check that energies, forces and stress belong together, by a fitted pair potential; needs no similar frames.

A sum of smooth functions of the distance, one for each pair of elements, is fitted to the forces alone, as a Bayesian
linear regression (MacKay, Neural Comput. 4, 415 (1992)). It predicts energies and stresses with a covariance. What the
forces leave open, such as the value of a function beyond a gap in the distances, has a large variance and says
nothing. The labels are then compared with `factor` times the prediction, by the likelihood of the factor: 1 where
signs and units are right, however different the frames are from each other.

Shapes: B frames, N atoms of all of them, E directed edges, P pairs of elements, K functions, C = P·K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from ..neighbors import neighbor_list
from .dataset import Dataset, Sample
from .hypotheses import Fault, LinearFit, Solution, energy_fault, force_fault
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

EVIDENCE = 8.0  # logarithm of the ratio of likelihoods

_FACTORS = np.logspace(-7, 7, 141)
_NOISE = np.logspace(-6, 0.3, 30)  # of the mean square of the labels
_INFLATION = np.logspace(0, 6, 11)  # of the covariance: forces that are not of pairs are no white noise

ORDERS = {
    " ".join(["xx yy zz", *(("yz", "zx", "xy")[i] for i in written)]): tuple(written.index(i) for i in range(3))
    for written in permutations(range(3))
}
"""Order of six numbers -> the position of each of yz, zx, xy, as read, in it."""

PLAIN, VASP = "xx yy zz yz zx xy", "xx yy zz xy yz zx"


@dataclass(frozen=True)
class Factor:
    """The factor between labels and prediction.

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

    def beats(self, other: Factor) -> bool:
        """True if labels with this factor, which is about 1, are clearly right and the others are not."""
        return self.gain - other.gain > EVIDENCE and 0.5 < self.value < 2


@dataclass(frozen=True, eq=False)
class Regression:
    """A pair potential fitted to the forces of some frames.

    Attributes:
        frames: their places among those given, [B].
        explained: share of the variance of the forces, without their fault.
        size: rms of the force components, eV/Å.
        forces, energies: what may have been done to these labels.
        energy: factor of the energies, both labels without their fault; None where the forces are not described.
        per_atom: the same, where the energies are taken for energies per atom.
        stress: order of the components -> factor of the stresses; empty without them.
    """

    frames: np.ndarray
    explained: float
    size: float
    forces: Fault | None
    energies: Fault | None = None
    energy: Factor | None = None
    per_atom: Factor | None = None
    stress: dict[str, Factor] = field(default_factory=dict)


def regression(dataset: Dataset, frames: np.ndarray, found: Statistics) -> Regression | None:
    """Fit a pair potential to the forces of up to 300 frames and compare energies and stresses with it.

    Args:
        dataset: the data set.
        frames: [S] indices.
        found: statistics of these frames.

    Returns:
        None where there are fewer than 20 frames with energies and forces of several atoms.
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
    fit = LinearFit(design.forces)
    owner = batch.system.batch.numpy()
    moved = _moved(dataset, np.asarray(frames)[chosen])
    fault = force_fault(fit, forces.reshape(-1, 3), owner, moved["forces"])
    solution = fit(forces if fault is None else fault.labels.reshape(-1))
    size = float(np.sqrt(np.mean(forces**2)))
    if solution.explained < _EXPLAINED:
        return Regression(chosen, solution.explained, size, None)
    counts = found.counts[chosen]
    sizes = counts.sum(1)
    weight = 1 / np.sqrt(sizes)  # errors of energies are taken to grow with the root of the number of atoms
    free = _complement(_controls(batch, counts) * weight[:, None])
    if free.shape[1] < _LEAST // 2:
        return Regression(chosen, solution.explained, size, fault)
    predicted = free.T @ (design.energies * weight[:, None])
    values = batch.labels["energy"].numpy()
    columns = predicted @ np.concatenate([solution.mean[:, None], solution.spread], 1)
    others = {name: each * weight for name, each in moved["energy"].items()}
    mean, spread = predicted @ solution.mean, predicted @ solution.spread
    energy, per_atom = (_factor(free.T @ each, mean, spread) for each in (values * weight, values * weight * sizes))
    wrong = None if per_atom.beats(energy) else energy_fault(_Free(columns, free), values * weight, others)
    if wrong is not None:
        energy = _factor(free.T @ wrong.labels, mean, spread)
    stress = _of_stresses(batch, moved["stress"], design, solution.mean, solution.spread)
    return Regression(chosen, solution.explained, size, fault, wrong, energy, per_atom, stress)


class _Free:
    """Fit columns [m, C] to the part of labels [B] in the span of `free` [B, m]; the rest is not constrained."""

    def __init__(self, columns: np.ndarray, free: np.ndarray):
        self._fit, self._free = LinearFit(columns), free

    def __call__(self, labels: np.ndarray) -> Solution:
        found = self._fit(self._free.T @ labels)
        return replace(found, predicted=labels - self._free @ (self._free.T @ labels - found.predicted))


def _moved(dataset: Dataset, indices: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return label -> fault -> labels of the frames, if those of the file were moved by one frame.

    Forces are taken to be moved among frames of the same number of atoms.
    """
    sizes = dataset.sizes()
    alike = np.argsort(sizes, kind="stable")
    place = np.empty_like(alike)
    place[alike] = np.arange(len(alike))
    result: dict[str, dict[str, np.ndarray]] = {"forces": {}, "energy": {}, "stress": {}}
    for word, step in (("before", 1), ("after", -1)):
        next_alike = alike[np.clip(place[indices] + step, 0, len(alike) - 1)]
        next_alike = np.where(sizes[next_alike] == sizes[indices], next_alike, indices)
        plain = dataset.batch(np.clip(indices + step, 0, len(sizes) - 1)).labels
        for name, labels in {**plain, "forces": dataset.batch(next_alike).labels.get("forces")}.items():
            if name in result and labels is not None and bool(torch.isfinite(labels).all()):
                result[name][f"belong to the frame {word}"] = labels.double().numpy()
    return result


class _Design:
    """Return the labels that functions with unit coefficients give, scaled to forces of the same mean square.

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
        """Return one component of stress times volume, [B, C] eV."""
        values = self._vectors[:, one, None] * self._vectors[:, two, None] * self._pull
        return 0.5 * self._summed(self._owner, values, num_systems) / self._unit

    def _summed(self, place: Tensor, values: Tensor, size: int) -> np.ndarray:
        table = values.new_zeros(size * self._count, values.shape[1])
        return table.index_add_(0, place * self._count + self._pair, values).view(size, -1).numpy()


def _functions(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gaussians of the logarithm of the distance, zero at the cutoff, and their slopes: [E, K], [E, K] 1/Å."""
    far = (distance.log()[:, None] - torch.from_numpy(np.log(_CENTRES))) / _WIDTH
    bell, ratio = torch.exp(-0.5 * far**2), (distance / _CUTOFF)[:, None]
    end = (1 - ratio**2) ** 3
    return bell * end, bell * (-far / _WIDTH / distance[:, None] * end - 6 * ratio / _CUTOFF * (1 - ratio**2) ** 2)


def _controls(batch: Sample, counts: np.ndarray) -> np.ndarray:
    """Return what energies may depend on besides distances, [B, ·]: composition, volume, charge and spin."""
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
    """Return an orthonormal basis of the space orthogonal to the columns [B, ·]."""
    left, values, _ = np.linalg.svd(columns, full_matrices=True)
    return left[:, int((values > 1e-9 * values[0]).sum()) :]


def _of_stresses(
    batch: Sample, moved: dict[str, np.ndarray], design: _Design, mean: np.ndarray, spread: np.ndarray
) -> dict[str, Factor]:
    """Return order of the components, or fault -> factor. The pressure of metals, not one of pairs, is left out."""
    if "stress" not in batch.labels:
        return {}
    system = batch.system
    stress = batch.labels["stress"].double().numpy()
    known = np.isfinite(stress).all((1, 2)) & system.pbc.all(1).numpy() & stress.any((1, 2))
    rows = np.flatnonzero(known)[:: max(1, -(-int(known.sum()) // _STRESSES))]
    if len(rows) < _LEAST // 2:
        return {}
    weight = 1 / np.sqrt(system.atom_counts.numpy()[rows].astype(np.float64))
    volumes = (system.volume.numpy()[rows] * weight)[:, None, None]
    parts = {ij: design.virials(*ij, system.num_systems)[rows] * weight[:, None]
             for ij in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))}  # fmt: skip
    straight = [parts[0, 0] - parts[1, 1], parts[1, 1] - parts[2, 2]]
    predicted = np.concatenate([*straight, parts[1, 2], parts[0, 2], parts[0, 1]])

    def compared(stress: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
        label = stress[rows] * volumes
        shear = label[:, 1, 2], label[:, 0, 2], label[:, 0, 1]
        straight = label[:, 0, 0] - label[:, 1, 1], label[:, 1, 1] - label[:, 2, 2]
        return np.concatenate([*straight, *(shear[i] for i in order)])

    labels = {name: compared(stress, order) for name, order in ORDERS.items()}
    labels |= {name: compared(each, ORDERS[PLAIN]) for name, each in moved.items()}
    related = {name: abs(float(each @ (predicted @ mean))) for name, each in labels.items()}
    chosen = {PLAIN, *sorted(related, key=lambda name: related[name])[-2:]} if labels[PLAIN].any() else ()
    return {name: _factor(labels[name], predicted @ mean, predicted @ spread) for name in chosen}


def _factor(labels: np.ndarray, predicted: np.ndarray, spread: np.ndarray) -> Factor:
    """Return the likeliest factor: labels ~ N(factor · predicted, factor² · inflation · spread spreadᵀ + noise).

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
