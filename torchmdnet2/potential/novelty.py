"""Novelty: the distance of an atom's features from those of the training atoms of its element, which finds atoms that
the model does not know.

Along the R leading principal directions of an element the distance is in units of their standard deviations, in all
other directions in units of their mean one: probabilistic principal components (M. Tipping, C. Bishop, J. R. Stat. Soc.
B 61, 611 (1999)). It measures how unusual an atom is, not how wrong its force is.

Shapes: N atoms, F features, M elements, R directions.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import BadData
from ..neighbors import neighbor_list
from ..neighbors.pairs import PairLists
from ..system import System
from .graph import Graph, Representation

__all__ = [
    "INTERVAL", "LARGEST", "Calibration", "NoveltyWarning", "UnknownStructure", "Watch", "atom_features",
    "calibrate", "common_scores", "largest", "rated", "weights_checksum",
]  # fmt: skip


class _Calibrated(Protocol):
    """The part of a Potential that is used here; its module imports this one."""

    calibration: Calibration | None

    @property
    def representation(self) -> Any: ...


_Some = TypeVar("_Some", bound=_Calibrated)


_DIRECTIONS = 32
_LEAST_FRAMES, _LEAST_ATOMS = 20, _DIRECTIONS  # least numbers of validation frames and of training atoms
_FEW = 10  # this number of atoms of an element weighs as much as the mean over all elements in covariances and scales
_ROUNDING = 1e-4  # files hold float32
_TINY = 1e-8  # part of the mean variance; in directions with less, training atoms do not differ


@dataclass(eq=False)
class Calibration:
    """Distribution of the features of training atoms, which gives the novelty of other atoms.

    Attributes:
        elements: atomic numbers of the training atoms.
        mean: [M, F] mean of the features.
        directions: [M, R, F] orthonormal directions with the largest variances.
        variances: [M, R] variances along them.
        rest: [M] mean variance in all other directions.
        limit: [M] distance at which the score is 1.
        facts: plain data for JSON: "weights" (checksum of the representation of the fit), "rate" (expected share of
            false alarms), "train_frames", "validation_frames", "atoms" (number of training atoms by element).
    """

    elements: list[int]
    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: Tensor
    limit: Tensor
    facts: dict[str, Any]

    def __call__(self, representation: Representation, system: System) -> Tensor:
        """Return the scores of the atoms, [N] float64; infinite for elements without training atoms.

        Raises:
            ValueError: the calibration belongs to other weights.
        """
        if not self.fits(representation):
            raise ValueError("the model was calibrated for other weights: run `torchmdnet2 calibrate` again")
        return self.scores(representation, system)

    def scores(self, representation: Representation, system: System) -> Tensor:
        """Return the novelty of each atom, without the check that the calibration belongs to the weights.

        Args:
            representation: the network of the fit.
            system: N atoms of any number of structures.

        Returns:
            [N], float64; infinite for elements that the calibration does not know.
        """
        x = atom_features(representation, system)
        score = torch.full((len(x),), math.inf, dtype=torch.float64, device=x.device)
        for k, element in enumerate(self.elements):
            rows = (system.z == element).nonzero()[:, 0]
            if len(rows):
                score[rows] = self._distance(x[rows], k)
        return score

    def _distance(self, x: Tensor, k: int) -> Tensor:
        """Return the distances of atoms of the k-th element, divided by its limit."""
        mean, directions, variances, rest, limit = (
            value[k].to(x) for value in (self.mean, self.directions, self.variances, self.rest, self.limit)
        )
        apart = x - mean
        along = apart @ directions.T
        beyond = apart - along @ directions
        return ((along.square() / variances).sum(1) + beyond.square().sum(1) / rest).sqrt() / limit

    def fits(self, representation: Representation) -> bool:
        """Return whether the calibration belongs to the weights of a representation.

        Args:
            representation: representation of the potential.
        """
        return weights_checksum(representation) == self.facts["weights"]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a model file, float32."""
        return {name: value.float().cpu().contiguous() for name, value in vars(self).items() if torch.is_tensor(value)}

    def stored_facts(self) -> dict[str, Any]:
        """Return the facts for a model file."""
        return {**self.facts, "elements": self.elements}

    @classmethod
    def stored(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Calibration:
        """Return the calibration of a model file.

        Args:
            tensors: tensors from `tensors`.
            facts: facts from `stored_facts`.

        Raises:
            Exception: of any kind, if the content is not valid.
        """
        known = dict(facts)
        elements = [int(z) for z in known.pop("elements")]
        found = cls(elements, **{name: value.double() for name, value in tensors.items()}, facts=known)
        m, r, f = found.directions.shape
        shapes = {"mean": (m, f), "variances": (m, r), "rest": (m,), "limit": (m,)}
        if len(elements) != m or any(tuple(getattr(found, name).shape) != shape for name, shape in shapes.items()):
            raise ValueError("the tensors of its calibration do not fit each other")
        return found


def calibrate(
    representation: Representation, train: Iterable[System], validation: Iterable[System], rate: float = 0.02
) -> Calibration:
    """Fit a calibration to the features of training atoms.

    The limit follows split conformal prediction: among new structures like the validation frames, a share of `rate` has
    an atom with a score above 1 (V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World, 2005).

    Args:
        representation: trained representation, in evaluation mode.
        train: batches of the training frames.
        validation: batches of similar frames that were not in the training, at least 20 structures.
        rate: rate of false alarms; with n validation frames it cannot be below 1 / (n + 1).

    Raises:
        BadData: there are fewer than 32 training atoms or too few validation frames, or a validation frame has an
            element without training atoms.
        ValueError: the rate is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"the rate of false alarms must be between 0 and 1, got {rate}")
    moments, frames = _Moments(), 0
    for system in train:
        moments.add(atom_features(representation, system).cpu(), system.z.cpu())
        frames += system.num_systems
    if not frames:
        raise BadData("there are no training frames to calibrate with")
    if (atoms := sum(moments.count.values())) < _LEAST_ATOMS:
        raise BadData(
            f"{atoms} atoms in {frames} training frames are too few to calibrate with: give at least {_LEAST_ATOMS}"
        )
    fitted = moments.fit()
    fitted.facts = {"weights": weights_checksum(representation), "train_frames": frames}
    known: list[tuple[Tensor, System]] = []
    for system in validation:
        scores = fitted(representation, system)
        if not bool(scores.isfinite().all()):
            element = int(system.z[int(scores.argmax())])
            raise BadData(f"the validation frames have atoms with Z = {element}, but the training frames have none")
        known.append((scores, system))
    frames = sum(system.num_systems for _, system in known)
    if frames < _LEAST_FRAMES:
        raise BadData(f"{frames} validation frames are too few to calibrate with: give at least {_LEAST_FRAMES}")
    # first bring all elements to one scale, so that no element causes all alarms
    fitted.limit = _typical(fitted.elements, known)
    tops = torch.cat([largest(fitted(representation, system), system) for _, system in known]).cpu().sort().values
    rank = min(math.ceil((frames + 1) * (1 - rate)), frames)
    fitted.limit = fitted.limit * tops[rank - 1] * (1 + _ROUNDING)
    fitted.facts |= {"validation_frames": frames, "rate": 1 - rank / (frames + 1), "atoms": moments.count}
    return fitted


def _typical(elements: list[int], known: list[tuple[Tensor, System]]) -> Tensor:
    """Return the rms distance of the atoms of each element, [M]; for a rare element it is drawn towards the mean."""
    squares = torch.cat([scores.square() for scores, _ in known]).cpu()
    z = torch.cat([system.z for _, system in known]).cpu()
    total = torch.stack([squares[z == element].sum() for element in elements])
    count = torch.stack([(z == element).sum() for element in elements])
    return ((total + _FEW * squares.mean()) / (count + _FEW)).sqrt()


class _Moments:
    """Number, mean and sum of squared deviations of the features by element, batch by batch."""

    def __init__(self) -> None:
        self.count: dict[int, int] = {}
        self._mean: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}

    def add(self, x: Tensor, z: Tensor) -> None:
        for element in map(int, z.unique()):
            own = x[z == element]
            n, mean = len(own), own.mean(0)
            squares = (own - mean).T @ (own - mean)
            before = self.count.get(element, 0)
            if before:  # T. Chan, G. Golub, R. LeVeque, Am. Stat. 37, 242 (1983)
                step = mean - self._mean[element]
                mean = self._mean[element] + step * (n / (n + before))
                squares += self._squares[element] + torch.outer(step, step) * (n * before / (n + before))
            self.count[element], self._mean[element], self._squares[element] = before + n, mean, squares

    def fit(self) -> Calibration:
        """Return a calibration without limits; the covariance of a rare element is drawn towards the mean one."""
        elements = sorted(self.count)
        common = torch.stack(list(self._squares.values())).sum(0) / sum(self.count.values())
        f = len(common)
        r = min(_DIRECTIONS, f // 2)
        covariance = torch.stack([(self._squares[z] + _FEW * common) / (self.count[z] + _FEW) for z in elements])
        values, vectors = torch.linalg.eigh(covariance)  # ascending
        least = _TINY * values.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        values = values.clamp(min=least)
        return Calibration(
            elements,
            mean=torch.stack([self._mean[z] for z in elements]),
            directions=vectors[:, :, f - r :].transpose(1, 2),
            variances=values[:, f - r :],
            rest=values[:, : f - r].mean(1),
            limit=torch.ones(len(elements), dtype=torch.float64, device="cpu"),
            facts={},
        )


def atom_features(representation: Representation, system: System) -> Tensor:
    """Return the features of the atoms, [N, F] float64, without derivatives."""
    with torch.inference_mode(False), torch.no_grad():
        neighbors = neighbor_list(system, representation.cutoff)
        dtype = next(representation.parameters()).dtype
        graph = Graph.build(system, neighbors, dtype, PairLists(system, {representation.cutoff: neighbors}))
        return representation(graph).x.double()


def largest(scores: Tensor, system: System) -> Tensor:
    """Return the largest score of each structure, [B]; 0 for one without atoms."""
    return scores.new_zeros(system.num_systems).scatter_reduce(0, system.batch, scores, "amax")


def rated(potentials: Iterable[_Some]) -> list[_Some]:
    """Return the members of an ensemble whose novelty counts: those with a calibration for their present weights."""
    return [p for p in potentials if p.calibration is not None and p.calibration.fits(p.representation)]


def common_scores(potentials: Sequence[_Calibrated], system: System) -> Tensor:
    """Return the largest novelty of each atom over several potentials, [N] float64.

    Args:
        potentials: at least one potential from `rated`, all on one device.
        system: N atoms that all of them can evaluate; this is not checked.
    """
    found = [p.calibration.scores(p.representation, system) for p in potentials if p.calibration is not None]
    return torch.stack(found).amax(0)


def weights_checksum(representation: Representation) -> str:
    """Return the SHA-256 of the tensors that determine the features, in float32, so that casts do not change it."""
    digest = hashlib.sha256()
    for name, value in sorted(representation.state_dict().items()):
        value = value.float() if value.is_floating_point() else value
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- Warnings of unknown structures in a run, once for each element ---

LARGEST = 5000
"""Largest total number of atoms for which runs compute the novelty. Features come from plain PyTorch, which needs more
memory than a run on kernels may have left."""

INTERVAL = 1000
"""Number of evaluations between two checks in adapters, since a check takes as long as some compiled steps."""

_MEAN_OF = 5


class NoveltyWarning(UserWarning):
    """Warns of atoms that are unlike those of the training."""


class UnknownStructure(RuntimeError):
    """Ends a run at an unknown structure, if the user requests that."""


class Watch:
    """Checks the scores of a run from time to time, and warns.

    One of fifty known frames may have a score above 1 (`Calibration`). So an element is reported only if, in the same
    structure, the mean of the largest scores in the last five checks is above 1. A score of 5 is reported at once, a
    score of 1.2 if it stays.

    Attributes:
        largest: largest score so far; 0 before the first check.
        looks, outside: number of checks, and of those with a score above 1.
        reported: elements with a warning.
    """

    def __init__(self) -> None:
        self.largest, self.looks, self.outside = 0.0, 0, 0
        self.reported: set[int] = set()
        self._last: dict[int, deque[Tensor]] = {}
        self._evaluations = 0

    def due(self, num_atoms: int) -> bool:
        """Count an evaluation of an adapter, and return whether to check it.

        The first one and every `INTERVAL`-th after that are checked, for up to `LARGEST` atoms.
        """
        due = self._evaluations % INTERVAL == 0 and 0 < num_atoms <= LARGEST
        self._evaluations += 1
        return due

    def __call__(
        self,
        scores: Tensor,
        system: System,
        when: str = "",
        names: Sequence[str] = (),
        atom_name: Callable[[int], str] | None = None,
    ) -> None:
        """Check a frame.

        Args:
            scores: [N] novelty from `Potential.novelty`.
            system: the frame, with the same atoms in every call until `restart`.
            when: time for the warning, such as " at 1.2 ps".
            names: names of the structures for the warning; empty for a single one.
            atom_name: function that returns the user's name of an atom; None takes its index in its structure.

        Warns:
            NoveltyWarning: names the atom of the element with the largest score.
        """
        self.largest = max(self.largest, float(scores.max()))
        self.looks += 1
        self.outside += bool((scores > 1).any())
        for element in map(int, system.z.unique()):
            own = torch.where(system.z == element, scores, 0.0)
            tops = own.new_zeros(system.num_systems).scatter_reduce(0, system.batch, own, "amax")
            last = self._last.setdefault(element, deque(maxlen=_MEAN_OF))
            last.append(tops)
            if element not in self.reported and bool((torch.stack(list(last)).mean(0) > 1).any()):
                self.reported.add(element)
                warnings.warn(_words(own, system, when, names, atom_name), NoveltyWarning, stacklevel=2)

    def restart(self) -> None:
        """Prepare for another structure."""
        self._last, self._evaluations = {}, 0

    def summary(self) -> str:
        """Return a sentence on all checks; "" before the first one."""
        if not self.looks:
            return ""
        return f"largest novelty {self.largest:.2f}, above 1 in {self.outside} of {self.looks} checked frames"


def _words(
    scores: Tensor, system: System, when: str, names: Sequence[str], atom_name: Callable[[int], str] | None
) -> str:
    from ase.data import chemical_symbols

    atom = int(scores.argmax())
    structure = int(system.batch[atom])
    where = f"atom {atom - int((system.batch < structure).sum())} ({chemical_symbols[int(system.z[atom])]})"
    if atom_name is not None:
        where = atom_name(atom)
    if names:
        where += f" of {names[structure]}"
    return (
        f"{where}{when} is unlike the atoms that the model was trained on (novelty {float(scores[atom]):.2f}, above 1: "
        "outside): its energy and forces may be wrong"
    )
