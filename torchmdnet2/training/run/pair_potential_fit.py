"""Fit of the prior `pair_potential` to the forces of the training frames, before training.

Shapes: N atoms, E directed edges, P pairs of elements, K functions of the distance.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from ase.data import covalent_radii
from numpy.typing import NDArray
from torch import Tensor

from ...errors import BadConfig
from ...neighbors import neighbor_list
from ...potential import SYMBOLS, Potential
from ...priors.pair_potential import ATTRACTIVE, REPULSIVE, radial_functions
from ...system import System
from ..config.config import Config
from ..steps.batches import Frames
from .references import of_priors

__all__ = ["FITS", "fit_pair_potential", "with_pair_fit"]

_FRAMES = 500  # that are fitted to, evenly spread
_AT_ONCE = 32
_WALL = 0.8  # of the sum of the covalent radii: where every pair repels at least so much


class Fit(NamedTuple):
    """What a pair potential may be.

    Args:
        attracts: of two atomic numbers: whether such atoms may attract each other.
        wall: eV/Å by which every pair repels at 0.8 times the sum of the covalent radii, at least.
        ridge: added to the scaled diagonal of the normal equations; the smallest makes the solution unique.
    """

    attracts: Callable[[int, int], bool]
    wall: float = 10.0
    ridge: float = 1e-9


FITS = {
    "fit": Fit(lambda one, two: True),
    "repulsion": Fit(lambda one, two: False),
    "heavy_attraction": Fit(lambda one, two: min(one, two) > 1, wall=20.0, ridge=1e-3),
}
"""`parameters` of the prior in a training configuration -> what it means."""


def with_pair_fit(config: Config, frames: Frames, elements: Sequence[int]) -> Config:
    """The configuration with numbers in the place of a name of `FITS` as `parameters`.

    Args:
        config: of the run.
        frames: those of training.
        elements: of the training frames.

    Raises:
        BadConfig: there are no forces to fit to.
    """
    if not any(prior["name"] == "pair_potential" and isinstance(prior["parameters"], str) for prior in config.priors):
        return config
    others = of_priors(config, ("atomref", "pair_potential"))
    priors = [
        {
            **prior,
            "parameters": fit_pair_potential(frames, elements, prior["cutoff"], prior["parameters"], others),
        }
        if prior["name"] == "pair_potential" and isinstance(prior["parameters"], str)
        else prior
        for prior in config.priors
    ]
    return config.model_copy(update={"priors": priors})


def fit_pair_potential(
    frames: Frames,
    elements: Sequence[int],
    cutoff: float,
    kind: str = "fit",
    others: Potential | None = None,
) -> dict[str, list[float]]:
    """Coefficients of `PairPotential` by least squares of the forces, all of them at least 0.

    Where the frames say too little (no pair of these elements that close, or attraction alone), the steepest repulsion
    is raised until the pair repels enough at 0.8 times the sum of the covalent radii.

    Args:
        frames: labelled with forces.
        elements: atomic numbers.
        cutoff: Å.
        kind: one of `FITS`.
        others: its priors are subtracted from the forces first.

    Returns:
        "C-H" -> K numbers, eV, of every pair of the elements.
    """
    fit = FITS[kind]
    pairs = list(itertools.combinations_with_replacement(sorted(elements), 2))
    repelling = torch.tensor([not fit.attracts(one, two) for one, two in pairs])
    number = torch.zeros(128, 128, dtype=torch.long)
    for p, (one, two) in enumerate(pairs):
        number[one, two] = number[two, one] = p
    signs = np.array([1.0] * len(REPULSIVE) + [-1.0] * len(ATTRACTIVE))
    size = len(pairs) * len(signs)
    gram, moment = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _FRAMES)).astype(int))
    labelled = 0
    for part in np.array_split(chosen, -(-len(chosen) // _AT_ONCE)):
        sample = frames.data.batch(frames.indices[part])
        if "forces" not in sample.labels:
            continue
        forces = sample.labels["forces"].double()
        if others is not None:
            forces = forces - _forces_of_priors(others, sample.system)
        forces = forces.flatten()
        design = _design(sample.system, number, len(pairs), cutoff)
        design.view(len(design), len(pairs), -1)[:, repelling, len(REPULSIVE) :] = 0
        known = torch.isfinite(forces)
        labelled += int(known.sum())
        gram += design[known].T @ design[known]
        moment += design[known].T @ forces[known]
    if not labelled:
        raise BadConfig("priors: pair_potential.parameters: the fit needs forces, and no training frame has any")
    sign = np.tile(signs, len(pairs))
    found = _nonnegative(sign[:, None] * gram.numpy() * sign, sign * moment.numpy(), fit.ridge)
    return {
        f"{SYMBOLS[one]}-{SYMBOLS[two]}": _with_wall(
            values, float(covalent_radii[one] + covalent_radii[two]), fit.wall
        ).tolist()
        for (one, two), values in zip(pairs, found.reshape(len(pairs), len(signs)), strict=True)
    }


def _forces_of_priors(potential: Potential, system: System) -> Tensor:
    """Of the priors, [N, 3] eV/Å."""
    pos = system.pos.detach().double().requires_grad_()
    with torch.enable_grad():
        energies = potential.prior_energies(system.replace(pos=pos)).sum() + 0 * pos.sum()
        return -torch.autograd.grad(energies, pos)[0]


def _design(system: System, number: Tensor, count: int, cutoff: float) -> Tensor:
    """Forces of the functions of unit coefficient: [3 N, P K]."""
    neighbors = neighbor_list(system, cutoff)
    vectors = neighbors.vectors(system).double()
    d = vectors.norm(dim=1).requires_grad_()
    functions = radial_functions(d, cutoff)
    slopes = [torch.autograd.grad(f.sum(), d, retain_graph=True)[0] for f in functions.unbind(1)]
    pull = (vectors / d.detach()[:, None])[:, :, None] * torch.stack(slopes, 1)[:, None]  # [E, 3, K], on the receiver
    receiver, sender = neighbors.edge_index
    place = receiver * count + number[system.z[receiver], system.z[sender]]
    n, k = system.num_atoms, functions.shape[1]
    table = pull.new_zeros(n * count, 3, k).index_add_(0, place, pull)
    return table.view(n, count, 3, k).transpose(1, 2).reshape(3 * n, count * k)


def _with_wall(values: NDArray[np.float64], radii: float, wall: float) -> NDArray[np.float64]:
    """The same with as much of the steepest repulsion as it needs to repel by `wall` eV/Å at short distance.

    Nearer than that it then repels more, since all repulsive exponents are the larger ones.
    """
    exponents = np.array([*REPULSIVE, *ATTRACTIVE])
    slopes = exponents * np.exp(-exponents * (_WALL * radii - 1))  # of unit coefficients, eV/Å, downhill
    force = values @ (slopes * np.repeat([1, -1], [len(REPULSIVE), len(ATTRACTIVE)]))
    steepest = int(np.argmax(REPULSIVE))
    raised = values.copy()
    raised[steepest] += max(0.0, wall - force) / slopes[steepest]
    return raised


def _nonnegative(gram: NDArray[np.float64], moment: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """x ≥ 0 that minimises ½ x·G x − m·x, G being scaled to a unit diagonal; 0 for columns of zeros."""
    from scipy.optimize import nnls  # ASE needs SciPy

    used = gram.diagonal() > 0
    x = np.zeros(len(moment))
    if used.any():
        scale = np.sqrt(gram.diagonal()[used])
        lower = np.linalg.cholesky(gram[np.ix_(used, used)] / scale[:, None] / scale + ridge * np.eye(len(scale)))
        x[used] = nnls(lower.T, np.linalg.solve(lower, moment[used] / scale), maxiter=100 * len(scale))[0] / scale
    return x
