"""Check whether energies, forces and stress belong together, by a fitted pair potential; needs no similar frames.

A sum of smooth functions of the distance, one for each pair of elements, is fitted to the forces alone, as a Bayesian
linear regression (MacKay, Neural Comput. 4, 415 (1992)). It predicts energies and stresses with a covariance. What the
forces leave open, such as the value of a function beyond a gap in the distances, has a large variance and says
nothing. The labels are then compared with `factor` times the prediction, by the likelihood of the factor: 1 where
signs and units are right, however different the frames are from each other.

Faults are a table of hypotheses, each of which undoes a fault in some frames (or atoms). A linear model is fitted to
these labels, in turn with the choice of the frames, from two starts: no frame and all frames. Correct labels are
described best without a change. A fault of all frames can be found if it concerns axes or the order of frames. A wrong
sign or unit can be found if only some frames have it.

The same is done with the cell: other lengths of the lattice vectors, the transposed cell, other periodicity.

Shapes: B frames, N atoms of all of them, E directed edges, P pairs of elements, K functions, C = P·K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from ..neighbors import neighbor_list
from ..system import System
from .dataset import Dataset, Sample
from .statistics import Statistics

__all__ = [
    "Design", "Factor", "Fault", "LinearFit", "Regression", "Solution", "columns_of", "energy_fault", "force_fault",
    "regression",
]  # fmt: skip


_CUTOFF = 5.0  # Å
_CENTRES = 0.7 * 1.15 ** np.arange(15)  # Å
_WIDTH = 0.14  # width in the logarithm of the distance
_PAIRS = 40  # pairs of elements, the most frequent ones
_FRAMES, _NUMBERS = 300, 12_000_000  # largest numbers of frames and of entries of the design matrix
_STRESSES = 100  # frames
_LEAST = 20  # frames
_EXPLAINED = 0.5  # least share of the variance of the forces

EVIDENCE = 8.0  # logarithm of the ratio of likelihoods

_FACTORS = np.logspace(-7, 7, 141)
_NOISE = np.logspace(-6, 0.3, 30)  # in units of the mean square of the labels
_INFLATION = np.logspace(0, 6, 11)  # factors of the covariance, since forces beyond pairs are not white noise

ORDERS = {
    " ".join(["xx yy zz", *(("yz", "zx", "xy")[i] for i in written)]): tuple(written.index(i) for i in range(3))
    for written in permutations(range(3))
}
"""Order of six numbers -> the position of yz, zx and xy, as read, in it."""

PLAIN, VASP = "xx yy zz yz zx xy", "xx yy zz xy yz zx"


@dataclass(frozen=True)
class Factor:
    """The factor between labels and prediction.

    Attributes:
        value: the factor with the largest likelihood.
        gain: logarithm of the ratio of that likelihood to the one without any relation.
        positive: logarithm of its ratio to the one of the best factor above 0.
        near: the same for the best factor from 0.4 to 2.5.
        close: the same for the best factor from 0.67 to 1.5.
    """

    value: float
    gain: float
    positive: float
    near: float
    close: float

    def beats(self, other: Factor) -> bool:
        """Return True if labels with this factor, which is about 1, are clearly right and the other ones are not."""
        return self.gain - other.gain > EVIDENCE and 0.5 < self.value < 2


@dataclass(frozen=True, eq=False)
class Regression:
    """A pair potential fitted to the forces of some frames.

    Attributes:
        frames: [B] positions of the frames among the given ones.
        explained: explained share of the variance of the forces, after their fault is undone.
        size: rms of the force components, eV/Å.
        forces, energies: faults of these labels that were found.
        energy: factor of the energies, after faults are undone; None if the model does not describe the forces.
        per_atom: the same, if the energies are energies per atom.
        stress: order of the components -> factor of the stresses; empty without stresses.
        freedom: number of independent energies: the number of frames minus what composition, volume and state explain.
        cell: words for another cell, with which the fit is much better; nothing else is compared then.
    """

    frames: np.ndarray
    explained: float
    size: float
    forces: Fault | None
    energies: Fault | None = None
    energy: Factor | None = None
    per_atom: Factor | None = None
    stress: dict[str, Factor] = field(default_factory=dict)
    freedom: int = 0
    cell: str | None = None


def regression(dataset: Dataset, frames: np.ndarray, found: Statistics) -> Regression | None:
    """Fit a pair potential to the forces of up to 300 frames and compare energies and stresses with it.

    Args:
        dataset: the data set.
        frames: [S] indices.
        found: statistics of these frames.

    Returns:
        The fit; None for fewer than 20 frames of several atoms with energies and forces.
    """
    usable = np.flatnonzero(~np.isnan(found.energies) & (found.sizes > 1) & (found.force_count == 3 * found.sizes))
    if len(usable) < _LEAST:
        return None
    atoms = _NUMBERS / (3 * columns_of(len(found.elements)))
    most = int(min(_FRAMES, max(_LEAST, atoms / found.sizes[usable].mean())))
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(most, len(usable))).astype(int))]
    batch = dataset.batch(np.asarray(frames)[chosen])
    design = Design(batch.system)
    forces = batch.labels["forces"].double().numpy().reshape(-1)
    if not forces.any() or not design.scale.any():
        return None
    fit = LinearFit(design.forces)
    explained = fit(forces).explained
    if 1 - explained > _LEFT_SEEN and (cell := _cell_fault(dataset, np.asarray(frames)[chosen], found.sizes[chosen])):
        return Regression(chosen, explained, float(np.sqrt(np.mean(forces**2))), None, cell=cell)
    owner = batch.system.batch.numpy()
    moved = _moved(dataset, np.asarray(frames)[chosen])
    fault = force_fault(fit, forces.reshape(-1, 3), owner, moved["forces"])
    solution = fit(forces if fault is None else fault.labels.reshape(-1))
    size = float(np.sqrt(np.mean(forces**2)))
    if solution.explained < _EXPLAINED:
        return Regression(chosen, solution.explained, size, None)
    counts = found.counts[chosen]
    sizes = counts.sum(1)
    weight = 1 / np.sqrt(sizes)  # errors of energies are assumed to grow with the root of the number of atoms
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
    return Regression(chosen, solution.explained, size, fault, wrong, energy, per_atom, stress, free.shape[1])


def columns_of(elements: int) -> int:
    """Return how many columns a design has, at most, for structures of so many elements."""
    return min(_PAIRS, elements * (elements + 1) // 2) * len(_CENTRES)


class _Free:
    """Fits columns [m, C] to the part of labels [B] in the span of `free` [B, m]; the rest is not constrained."""

    def __init__(self, columns: np.ndarray, free: np.ndarray):
        self._fit, self._free = LinearFit(columns), free

    def __call__(self, labels: np.ndarray) -> Solution:
        found = self._fit(self._free.T @ labels)
        return replace(found, predicted=labels - self._free @ (self._free.T @ labels - found.predicted))


def _moved(dataset: Dataset, indices: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return label -> fault -> labels of the frames, as if the labels in the file were moved by one frame.

    Forces are moved among frames with the same number of atoms.
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


class Design:
    """The labels from functions with unit coefficients, scaled to forces of the same mean square.

    Attributes:
        energies: [B, C] eV.
        forces: [3 N, C] eV/Å.
        scale: [C] scale of each function.
    """

    def __init__(self, system: System):
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
        self._pull = slopes / distance[:, None]  # [E, K], factor of the vector to the sender
        rows = [
            self._summed(self._receiver, self._vectors[:, i, None] * self._pull, system.num_atoms) for i in range(3)
        ]
        forces = np.stack(rows, 1).reshape(3 * system.num_atoms, -1)
        self.scale = np.sqrt(np.square(forces).mean(0))
        self._unit = np.where(
            self.scale > 1e-6 * self.scale.max(initial=0.0), self.scale, np.inf
        )  # a function of an atom's images alone gives no forces
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
    """Return other quantities on which energies may depend, [B, ·]: composition, volume, charge and spin."""
    system = batch.system
    sizes = counts.sum(1).astype(np.float64)
    kinds, kind = np.unique(counts, axis=0, return_inverse=True)
    several = 5 * len(kinds) <= len(
        counts
    )  # with enough frames of each composition, its mean energy is a free parameter
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
    batch: Sample, moved: dict[str, np.ndarray], design: Design, mean: np.ndarray, spread: np.ndarray
) -> dict[str, Factor]:
    """Return order of the components, or fault -> factor. The pressure of metals is left out: pairs do not give it."""
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

    For each factor, noise and inflation maximise the likelihood.
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


_ROUNDS = 12
_SHARE, _LEAST_FAULTY = 0.02, 4  # least share and number of frames or atoms with the fault
_CLEAR = 2.0  # least ratio of a faulty frame's mean square errors, without and with the fault undone
_LEFT = 0.85  # largest ratio of residuals, with and without the fault undone; 0.87 to 1 in correct data
_LEFT_OF_ATOMS = 0.7  # the same where each atom has its own sign; 0.8 by chance in correct data far from equilibrium
_MOST_LEFT = 0.5  # the same for energies; correct ones, moved by one frame, have ratios of 2.4 and more
_CHOICE = 1.25  # factor of what remains where some frames were chosen, which may fit by chance
_DESCRIBED = 0.5  # least explained share of the variance of the forces after the fault is undone
_USUAL = 20.0  # limit in median square errors of energies, three standard deviations; and in errors without a fault

# --- Bayesian linear regression: noise and prior of the largest evidence (MacKay, Neural Comput. 4, 415 (1992)) ---

_EVIDENCE_ROUNDS = 30
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Solution:
    """The fit of C coefficients.

    Attributes:
        mean: [C] coefficients.
        spread: [C, C] a root of their covariance.
        explained: explained share of the mean square of the labels.
        predicted: [n] labels.
    """

    mean: np.ndarray
    spread: np.ndarray
    explained: float
    predicted: np.ndarray


class LinearFit:
    """Fits several sets of labels to one design matrix.

    Args:
        design: [n, C] design matrix.
    """

    def __init__(self, design: np.ndarray):
        self._design = design
        values, self._vectors = np.linalg.eigh(design.T @ design)
        self._values = np.maximum(values, 0.0)

    def __call__(self, labels: np.ndarray) -> Solution:
        """Fit labels [n]."""
        values, vectors = self._values, self._vectors
        size, square = len(labels), max(float(labels @ labels), _TINY)
        moment = vectors.T @ (self._design.T @ labels)
        noise = square / size
        prior = first = noise / max(values.mean() / size, 1e-300)
        for _ in range(_EVIDENCE_ROUNDS):
            precision = values / noise + 1 / prior
            mean = moment / noise / precision
            known = float((values / noise / precision).sum())
            left = square - 2 * mean @ moment + (values * mean**2).sum()
            prior = max(
                float(mean @ mean) / max(known, 1e-9), _TINY * first
            )  # labels without any relation drive it towards 0
            noise = max(float(left), 1e-4 * square) / max(size - known, 1.0)
        precision = values / noise + 1 / prior
        mean = vectors @ (moment / noise / precision)
        return Solution(mean, vectors / np.sqrt(precision), 1 - noise * size / square, self._design @ mean)


# --- cells ---

_LEFT_SEEN = 0.02  # share of the forces from which on a wrong cell is looked for; of large cells, less is left
_CELL_FRAMES, _CELL_ATOMS = 40, 800  # largest numbers
_CELL_BETTER, _CELL_DESCRIBED = 0.5, 0.7  # largest ratio of residuals; least explained share
_IMITATED = 4.0  # factor of what remains with other lengths
_DENSEST = 3.0  # Å³ per atom; diamond has 5.7
_SHORTEST = 1.5  # Å, of lattice vectors
_SCALES = (0.1, 0.5292, *np.geomspace(0.8, 1.25, 24), 1.8897, 10.0)  # units, and cells of other structures


def _cell_fault(dataset: Dataset, frames: np.ndarray, sizes: np.ndarray) -> str | None:
    """Return the words for a cell with which a pair potential describes the forces much better, if there is one."""
    most = int(np.clip(_CELL_ATOMS / sizes.mean(), 1, _CELL_FRAMES))
    batch = dataset.batch(frames[np.unique(np.linspace(0, len(frames) - 1, most).astype(int))])
    system, forces = batch.system, batch.labels["forces"].double().numpy().reshape(-1)
    if not bool(system.cell.any()):
        return None

    def left(system: System) -> float:
        return 1 - LinearFit(Design(system).forces)(forces).explained

    plain = left(system)
    found = {words: left(other) for words, other in _cells(system) if _has_room(other)}
    good = {words: e for words, e in found.items() if e < min(_CELL_BETTER * plain, 1 - _CELL_DESCRIBED)}
    # other lengths may imitate another fault, by atoms that no longer meet their images
    return min(good, key=lambda words: good[words] * (_IMITATED if "times" in words else 1), default=None)


def _cells(system: System) -> Iterator[tuple[str, System]]:
    """Yield words for other cells, and the structures with them."""
    given = system.cell.any(2)
    if bool((given & ~system.pbc).any()):
        yield "with periodicity along all lattice vectors", system.replace(pbc=given)
    if not bool(system.pbc.any()):
        return
    yield "without a cell", system.replace(pbc=torch.zeros_like(system.pbc))
    turned = torch.where(given.all(1)[:, None, None], system.cell.transpose(1, 2), system.cell)
    if not torch.allclose(turned, system.cell, atol=1e-3):
        yield "with the transposed cell", system.replace(cell=turned)
    for scale in _SCALES:
        yield f"with lattice vectors about {scale:.2f} times as long", system.replace(cell=system.cell * scale)


def _has_room(system: System) -> bool:
    """Return whether the atoms fit into their cells; in others, the search would find thousands of images."""
    try:
        system.validate()
    except ValueError:  # lattice vectors are linearly dependent
        return False
    short = (system.cell.norm(dim=2) < _SHORTEST) & system.pbc
    dense = system.pbc.all(1) & (system.volume < _DENSEST * system.atom_counts)
    return not bool(short.any() or dense.any())


# --- faults ---

Undo = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Fault:
    """A fault that describes the labels better than no fault.

    Attributes:
        name: its name in the table, which completes a sentence about the labels.
        having: boolean, which frames (or atoms) have it.
        labels: labels with the fault undone.
        left: remaining mean square error.
    """

    name: str
    having: np.ndarray
    labels: np.ndarray
    left: float


def _axes(*order: int) -> Undo:
    return lambda f: f[:, order]


def _times(*factors: float) -> Undo:
    return lambda f: f * np.array(factors)


FORCES: dict[str, Undo] = {
    "have x and y exchanged": _axes(1, 0, 2),
    "have x and z exchanged": _axes(2, 1, 0),
    "have y and z exchanged": _axes(0, 2, 1),
    "have the axes in the order y, z, x": _axes(2, 0, 1),
    "have the axes in the order z, x, y": _axes(1, 2, 0),
    "have the wrong sign of x": _times(-1, 1, 1),
    "have the wrong sign of y": _times(1, -1, 1),
    "have the wrong sign of z": _times(1, 1, -1),
}
"""Fault of the forces -> how it is undone."""

UNITS: dict[str, Undo] = {
    "have the sign opposite to that of the others": _times(-1),
    "are 1.89 times the others, as if per Å and per bohr were mixed": _times(1 / 1.8897),
    "are 23.06 times the others, as if kcal/mol and eV were mixed": _times(1 / 23.06),
    "are 96.5 times the others, as if kJ/mol and eV were mixed": _times(1 / 96.485),
    "are 13.6 times the others, as if eV and Ry were mixed": _times(1 / 13.606),
    "are 25.7 times the others, as if eV/Å and Ry/bohr were mixed": _times(1 / 25.711),
    "are 27.2 times the others, as if eV and hartree were mixed": _times(1 / 27.211),
    "are 51.4 times the others, as if eV/Å and hartree/bohr were mixed": _times(1 / 51.422),
    "are 1/1.89 of the others, as if per Å and per bohr were mixed": _times(1.8897),
    "are 1/23.06 of the others, as if kcal/mol and eV were mixed": _times(23.06),
    "are 1/96.5 of the others, as if kJ/mol and eV were mixed": _times(96.485),
    "are 1/13.6 of the others, as if eV and Ry were mixed": _times(13.606),
    "are 1/25.7 of the others, as if eV/Å and Ry/bohr were mixed": _times(25.711),
    "are 1/27.2 of the others, as if eV and hartree were mixed": _times(27.211),
    "are 1/51.4 of the others, as if eV/Å and hartree/bohr were mixed": _times(51.422),
}
"""Fault of the labels of some frames -> how it is undone."""


def force_fault(
    fit: Callable[[np.ndarray], Solution], forces: np.ndarray, owner: np.ndarray, others: dict[str, np.ndarray]
) -> Fault | None:
    """Return the fault that describes the forces best, if clearly better than no fault.

    Args:
        fit: fit of a model to flat labels.
        forces: [N, 3] eV/Å.
        owner: [N] frame of each atom, in ascending order.
        others: fault -> the forces of the structures if the file has this fault, [N, 3].
    """
    plain = _Mixture(fit, forces, forces, owner, relative=True)
    if not np.isfinite(plain.left):
        return None
    undone = {name: undo(forces) for name, undo in (FORCES | UNITS).items()} | others
    found = []
    for name, labels in undone.items():
        tried = _Mixture.best(fit, forces, labels, owner, relative=True, most=0.5 if name in UNITS else 1.0)
        if tried is not None and tried.left < min(_LEFT * plain.left, 1 - _DESCRIBED):
            found.append(tried.fault(name))
    tried = _Mixture.best(fit, forces, -forces, np.arange(len(forces)), relative=True, most=0.5)
    least = _LEFT_OF_ATOMS * min([plain.left, *(f.left for f in found)])
    if tried is not None and tried.left < min(least, 1 - _DESCRIBED):
        found.append(tried.fault("have the sign opposite to that of the other atoms"))
    return min(found, key=lambda fault: fault.left, default=None)


def energy_fault(
    fit: Callable[[np.ndarray], Solution], energies: np.ndarray, others: dict[str, np.ndarray]
) -> Fault | None:
    """Return the fault that describes the energies best, if clearly better than no fault.

    Args:
        fit: fit of a model.
        energies: [B] eV, times the weights of the fit.
        others: fault -> the energies of the structures if the file has this fault, [B].
    """
    frames = np.arange(len(energies))
    plain = _Mixture(fit, energies, energies, frames, relative=False)
    found = []
    for name, undo in UNITS.items():
        tried = _Mixture.best(fit, energies, undo(energies), frames, relative=False, most=0.5)
        if tried is not None:
            found.append(tried.fault(name))
    for (
        name,
        labels,
    ) in others.items():  # for all frames together, since for a few frames one of two energies is always nearer
        left = _Mixture(fit, labels, labels, frames, relative=False).left
        found.append(Fault(name, np.full(len(frames), True), labels, left))
    found = [fault for fault in found if fault.left < _MOST_LEFT * plain.left]
    return min(found, key=lambda fault: fault.left * (1 if fault.having.all() else _CHOICE), default=None)


class _Mixture:
    """Labels of which some groups may have a fault.

    Args:
        fit: fit of a model to flat labels.
        labels, undone: labels without a change, and with the fault undone, [n] or [n, 3].
        groups: [n] number of each label's group, in ascending order; a whole group has the fault or not.
        relative: compare errors in units of the labels' size, so that small labels have no advantage.
        start: True if all groups have the fault at the start.
    """

    def __init__(
        self, fit: Callable[[np.ndarray], Solution], labels: np.ndarray, undone: np.ndarray, groups: np.ndarray,
        *, relative: bool, start: bool = False,
    ):  # fmt: skip
        number = int(groups[-1]) + 1
        both = labels.reshape(len(groups), -1), undone.reshape(len(groups), -1)
        size = [np.bincount(groups, np.square(each).sum(1), number) if relative else np.ones(number) for each in both]
        having = np.full(number, start)
        for _ in range(_ROUNDS):
            left = self._fit(fit, both, having, groups, relative)
            again = left[1] * size[0] < left[0] * size[1]
            if (again == having).all():
                break
            having = again
        self.clear = having & (left[0] * size[1] > _CLEAR * left[1] * size[0])
        if not relative:  # energies near zero fit with and without the fault
            left_now = np.where(having, *left[::-1])
            self.clear = having & (left[0] > _USUAL * np.maximum(np.median(left_now), left[1]))
            self._fit(fit, both, self.clear, groups, relative)

    def _fit(
        self, fit: Callable[[np.ndarray], Solution], both: tuple[np.ndarray, np.ndarray], having: np.ndarray,
        groups: np.ndarray, relative: bool,
    ) -> list[np.ndarray]:  # fmt: skip
        """Return the sum of square errors of each group, without the fault and with the fault undone."""
        self.having = having
        self.labels = np.where(having[groups][:, None], both[1], both[0])
        solution = fit(self.labels.reshape(-1))
        predicted = solution.predicted.reshape(self.labels.shape)
        left = [np.bincount(groups, np.square(each - predicted).sum(1), len(having)) for each in both]
        self.left = 1 - solution.explained if relative else float(np.where(having, *left[::-1]).mean())
        return left

    @classmethod
    def best(cls, fit, labels, undone, groups, *, relative: bool, most: float) -> _Mixture | None:  # type: ignore[no-untyped-def]
        """Return the better fit of both starts; None if too few groups have the fault, or more than a share `most`."""
        tried = [cls(fit, labels, undone, groups, relative=relative, start=start) for start in (False, True)]
        tried = [
            t for t in tried if t.clear.sum() >= max(_LEAST_FAULTY, _SHARE * len(t.having)) and t.having.mean() <= most
        ]
        return min(tried, key=lambda t: t.left, default=None)

    def fault(self, name: str) -> Fault:
        return Fault(name, self.having, self.labels.squeeze(), self.left)
