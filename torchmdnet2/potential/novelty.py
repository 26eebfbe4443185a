"""The distance of an atom's features from those of the training atoms of its element, and its fit.

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
    """A Potential; its module imports this one."""

    calibration: Calibration | None

    @property
    def representation(self) -> Any: ...


_Some = TypeVar("_Some", bound=_Calibrated)


_DIRECTIONS = 32
_LEAST_FRAMES, _LEAST_ATOMS = 20, _DIRECTIONS  # of validation; of training
_FEW = 10  # atoms of an element count as much as the mean over all elements, for covariances and scales
_ROUNDING = 1e-4  # files hold float32
_TINY = 1e-8  # of the mean variance: directions in which training atoms do not differ at all


@dataclass(eq=False)
class Calibration:
    """What was fitted to the features of the training atoms.

    Attributes:
        elements: atomic numbers of the training atoms.
        mean: [M, F] of the features.
        directions: [M, R, F] orthonormal, of the largest variances.
        variances: [M, R] along them.
        rest: [M] mean variance in all other directions.
        limit: [M] distance at which the score is 1.
        facts: JSON-able: "weights" (checksum of the representation that it was fitted to), "rate" (expected share of
            false alarms), "train_frames", "validation_frames", "atoms" (of the training frames by element).
    """

    elements: list[int]
    mean: Tensor
    directions: Tensor
    variances: Tensor
    rest: Tensor
    limit: Tensor
    facts: dict[str, Any]

    def __call__(self, representation: Representation, system: System) -> Tensor:
        """Scores [N] float64 of the atoms; infinite for elements that were not among the training atoms.

        Raises:
            ValueError: the representation has other weights than those that this was fitted to.
        """
        if not self.fits(representation):
            raise ValueError("the model was calibrated for other weights: run `torchmdnet2 calibrate` again")
        return self.scores(representation, system)

    def scores(self, representation: Representation, system: System) -> Tensor:
        """The novelty of each atom, without the check that the calibration belongs to the weights.

        Args:
            representation: the network that this was fitted to.
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
        """Of atoms of the k-th element, over its limit."""
        mean, directions, variances, rest, limit = (
            value[k].to(x) for value in (self.mean, self.directions, self.variances, self.rest, self.limit)
        )
        apart = x - mean
        along = apart @ directions.T
        beyond = apart - along @ directions
        return ((along.square() / variances).sum(1) + beyond.square().sum(1) / rest).sqrt() / limit

    def fits(self, representation: Representation) -> bool:
        """Whether a representation has the weights that this was fitted to.

        Args:
            representation: of the potential.
        """
        return weights_checksum(representation) == self.facts["weights"]

    def tensors(self) -> dict[str, Tensor]:
        """What a model file holds, float32."""
        return {name: value.float().cpu().contiguous() for name, value in vars(self).items() if torch.is_tensor(value)}

    def stored_facts(self) -> dict[str, Any]:
        """What a model file says beside the tensors."""
        return {**self.facts, "elements": self.elements}

    @classmethod
    def stored(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Calibration:
        """The calibration that a file holds.

        Args:
            tensors: of `tensors`.
            facts: of `stored_facts`.

        Raises:
            Exception: the content is not such; of any kind.
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
    """Fit to the features of training atoms.

    The limit is that of split conformal prediction: of new structures like the validation frames, a share of `rate` has
    an atom with a score above 1 (V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World, 2005).

    Args:
        representation: trained, in evaluation mode.
        train: batches of the training frames.
        validation: batches of frames that the training did not see, of the same kind: at least 20 structures.
        rate: of false alarms; with n validation frames it cannot be below 1 / (n + 1).

    Raises:
        BadData: fewer than 32 training atoms, too few validation frames, or one with an element that no training atom
            has.
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
        raise BadData(f"{atoms} atoms in {frames} training frames are too few to calibrate with: give {_LEAST_ATOMS}")
    fitted = moments.fit()
    fitted.facts = {"weights": weights_checksum(representation), "train_frames": frames}
    known: list[tuple[Tensor, System]] = []
    for system in validation:
        scores = fitted(representation, system)
        if not bool(scores.isfinite().all()):
            element = int(system.z[int(scores.argmax())])
            raise BadData(f"the validation frames have atoms with Z = {element}, and the training frames have none")
        known.append((scores, system))
    frames = sum(system.num_systems for _, system in known)
    if frames < _LEAST_FRAMES:
        raise BadData(f"{frames} validation frames are too few to calibrate with: give at least {_LEAST_FRAMES}")
    # elements on one scale first, so that none of them gives all the alarms
    fitted.limit = _typical(fitted.elements, known)
    tops = torch.cat([largest(fitted(representation, system), system) for _, system in known]).cpu().sort().values
    rank = min(math.ceil((frames + 1) * (1 - rate)), frames)
    fitted.limit = fitted.limit * tops[rank - 1] * (1 + _ROUNDING)
    fitted.facts |= {"validation_frames": frames, "rate": 1 - rank / (frames + 1), "atoms": moments.count}
    return fitted


def _typical(elements: list[int], known: list[tuple[Tensor, System]]) -> Tensor:
    """Root mean square distance [M] of the atoms of each element; of a rare one drawn towards that of all."""
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
        """Without limits; a rare element's covariance is drawn towards that within all elements."""
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
    """[N, F] float64, without derivatives."""
    with torch.inference_mode(False), torch.no_grad():
        neighbors = neighbor_list(system, representation.cutoff)
        dtype = next(representation.parameters()).dtype
        graph = Graph.build(system, neighbors, dtype, PairLists(system, {representation.cutoff: neighbors}))
        return representation(graph).x.double()


def largest(scores: Tensor, system: System) -> Tensor:
    """The largest score of each structure, [B]; 0 for one without atoms."""
    return scores.new_zeros(system.num_systems).scatter_reduce(0, system.batch, scores, "amax")


def rated(potentials: Iterable[_Some]) -> list[_Some]:
    """The potentials of an ensemble whose novelty counts: those that are calibrated, for their present weights."""
    return [p for p in potentials if p.calibration is not None and p.calibration.fits(p.representation)]


def common_scores(potentials: Sequence[_Calibrated], system: System) -> Tensor:
    """The largest novelty that any potential gives each atom, [N] float64.

    Args:
        potentials: at least one, of `rated`, on one device.
        system: N atoms, which all of them can evaluate: it is not checked.
    """
    found = [p.calibration.scores(p.representation, system) for p in potentials if p.calibration is not None]
    return torch.stack(found).amax(0)


def weights_checksum(representation: Representation) -> str:
    """sha256 of what the features depend on, in float32: the same for a model that was cast to another type."""
    digest = hashlib.sha256()
    for name, value in sorted(representation.state_dict().items()):
        value = value.float() if value.is_floating_point() else value
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# --- Warnings about a run that is outside of what its model knows: once for each element ---

LARGEST = 5000
"""Atoms, of all structures together, beyond which runs are not looked at: the features come from the Potential in plain
PyTorch, whose memory a run on kernels may not have."""

INTERVAL = 1000
"""Evaluations between two looks in the programs of others: a look takes as long as some compiled steps."""

_MEAN_OF = 5


class NoveltyWarning(UserWarning):
    """Atoms are unlike those that the model was trained on."""


class UnknownStructure(RuntimeError):
    """A run that was to stop outside of what its model knows."""


class Watch:
    """Looks at the scores of a run now and then.

    A frame in fifty of what the model knows well may have a score above 1 (`Calibration`). Told is therefore an element
    of which, in the same structure, the mean of the largest scores of the last five looks is above 1: a score of 5
    is reported at once, one of 1.2 when it stays.

    Attributes:
        largest: score so far; 0 before the first look.
        looks, outside: how many there were, and in how many a score was above 1.
        reported: elements that were warned about.
    """

    def __init__(self) -> None:
        self.largest, self.looks, self.outside = 0.0, 0, 0
        self.reported: set[int] = set()
        self._last: dict[int, deque[Tensor]] = {}
        self._evaluations = 0

    def due(self, num_atoms: int) -> bool:
        """Count an evaluation in the program of another, and tell whether to look at it: the first, and each
        `INTERVAL`-th from there, of up to `LARGEST` atoms."""
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
        """Look at a frame.

        Args:
            scores: [N] of `Potential.novelty`.
            system: the frame; with the same atoms at every call, unless `restart` comes before.
            when: for the warning, as in " at 1.2 ps".
            names: of the structures, for the warning; empty for a single one.
            atom_name: of the atom of an index, where that of its structure is not what the user knows.

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
        """Another structure comes next."""
        self._last, self._evaluations = {}, 0

    def summary(self) -> str:
        """In words; "" before the first look."""
        if not self.looks:
            return ""
        return f"largest novelty {self.largest:.2f}, above 1 in {self.outside} of {self.looks} frames looked at"


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
