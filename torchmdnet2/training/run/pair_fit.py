"""Fit of the prior "pair_morse" to the forces of the training frames, by constrained linear least squares.

Shapes: N atoms, E directed edges, P pairs of elements.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BadConfig
from ...potential import SYMBOLS, Potential
from ...priors.pair_morse import PairMorse
from ...priors.pairs import pair_list, taper
from ...system import System
from ..config.config import Config
from ..steps.batches import Frames, in_order
from .references import of_priors

__all__ = ["fit_pair_morse", "forces_of_priors", "with_pair_parameters"]

_MOST_FRAMES = 2000
_AT_ONCE = 64
_FLOOR = 0.5  # eV at the sum of the covalent radii: repulsion that every pair has
_EXPECTED = 3.0  # eV, of p₁ and p₂, where one component of force has an error of the rms of all
_WALL = 0.9  # of the shortest distance in the frames: every pair is repulsive from there on


def with_pair_parameters(config: Config, frames: Frames, elements: list[int]) -> tuple[Config, list[str]]:
    """The configuration with numbers in the place of `parameters: fit` of pair_morse, and what was fitted, in words.

    Raises:
        BadConfig: the training frames have no forces.
    """
    priors, notes = [], []
    for prior in config.priors:
        if prior["name"] == "pair_morse" and prior["parameters"] == "fit":
            others = of_priors(config, ("atomref", "pair_morse"))
            options = {k: v for k, v in prior.items() if k not in ("name", "parameters")}
            parameters, note = fit_pair_morse(frames, elements, others, options)
            prior = {**prior, "parameters": parameters}
            notes.append(note)
        priors.append(prior)
    return config.model_copy(update={"priors": priors}), notes


def fit_pair_morse(
    frames: Frames, elements: list[int], others: Potential, options: dict[str, Any]
) -> tuple[dict[str, list[float]], str]:
    """r and q of each pair of elements, and how well they describe the forces, in words.

    r x² − q x = p₁ x² + p₂ (x² − 2 x_w x): the second function has its minimum at the distance w, 0.9 of the shortest
    in the frames, so that with p₁, p₂ ≥ 0 the pair is repulsive within w. p₁ is at least 0.5 eV, the repulsion of pairs
    that the frames say nothing of.

    Args:
        frames: of the training; 2,000 of them, evenly spread, are looked at.
        elements: of the frames.
        others: its priors are subtracted from the forces first.
        options: decay, start and end of `PairMorse`.
    """
    shape = PairMorse(**options)
    names = list(combinations_with_replacement(elements, 2))
    number = torch.zeros(128, 128, dtype=torch.long)
    for k, (a, b) in enumerate(names):
        number[a, b] = number[b, a] = k
    widths = torch.tensor([float(shape.radii[a] + shape.radii[b]) for a, b in names], dtype=torch.float64)
    shape.cutoff = float(widths.max()) + shape.end

    size = 2 * len(names)
    gram, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    square, count = 0.0, 0
    shortest = torch.full((len(names),), torch.inf, dtype=torch.float64)
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), _MOST_FRAMES)).astype(int))
    for part in in_order(len(chosen), _AT_ONCE):
        sample = frames.data.batch(frames.indices[chosen[part]])
        if "forces" not in sample.labels:
            continue
        forces = sample.labels["forces"].double() - forces_of_priors(others, sample.system)
        rows, types, d = _design(shape, sample.system, number)
        shortest.scatter_reduce_(0, types, d, "amin")
        labelled = torch.isfinite(forces)
        columns, values = rows[labelled], forces[labelled]
        gram += columns.T @ columns
        right += columns.T @ values
        square, count = square + float(values @ values), count + len(values)
    if count == 0:
        raise BadConfig(
            "priors: pair_morse with `parameters: fit` needs forces, and no training frame has any; give its parameters"
        )

    wall = _WALL * torch.minimum(shortest, widths + shape.end)
    to_rq = torch.zeros(size, size, dtype=torch.float64)  # (p₁, p₂) of each pair → (r, q)
    for k, x in enumerate(torch.exp(-shape.decay * (wall - widths)).tolist()):
        to_rq[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = torch.tensor([[1.0, 1.0], [0.0, 2 * x]])
    # pairs that are only ever in the end of the taper would get huge numbers: expect some eV, as of a bond
    expected = square / count / _EXPECTED**2 * torch.eye(size, dtype=torch.float64)
    p = _not_negative(to_rq.T @ gram @ to_rq + expected, to_rq.T @ right)
    found = to_rq @ p
    rest = square - 2 * float(found @ right) + float(found @ gram @ found)
    parameters = {f"{a}-{b}": found[2 * k : 2 * k + 2].tolist() for k, (a, b) in enumerate(names)}
    before, after = ((value / count) ** 0.5 for value in (square, max(rest, 0.0)))
    bonded = ", ".join(f"{SYMBOLS[a]}–{SYMBOLS[b]}" for a, b in names if parameters[f"{a}-{b}"][1] > 0) or "none"
    return parameters, (
        f"pair_morse: fitted to the forces of {len(chosen)} training frames, whose rms {before:.3f} eV/Å becomes "
        f"{after:.3f}; pairs with a minimum: {bonded}"
    )


def _not_negative(gram: Tensor, right: Tensor) -> Tensor:
    """The p that minimises pᵀ G p/2 − pᵀ b with p ≥ 0, and p ≥ the floor in even places."""
    from scipy.optimize import nnls  # ASE needs SciPy

    floor = torch.zeros_like(right)
    floor[::2] = _FLOOR
    lower = torch.linalg.cholesky(gram)
    target = torch.linalg.solve_triangular(lower, (right - gram @ floor)[:, None], upper=False)[:, 0]
    return floor + torch.from_numpy(nnls(lower.T.numpy(), target.numpy())[0])


def _design(shape: PairMorse, system: System, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Forces [N, 3, 2P] of r = 1 and of q = 1 of each pair; of the edges within the taper pair [E] and Å [E]."""
    neighbors = pair_list(system, float(shape.cutoff or 0.0))
    vectors = neighbors.vectors(system).double()
    receiver, sender = neighbors.edge_index
    d = vectors.norm(dim=1)
    beyond = (d - shape.radii[system.z[receiver]] - shape.radii[system.z[sender]]).requires_grad_()
    near = beyond < shape.end
    types = number[system.z[receiver], system.z[sender]]
    with torch.enable_grad():
        x = torch.exp(-shape.decay * beyond)
        end = taper(beyond, shape.start, shape.end)
        slopes = [torch.autograd.grad((end * g).sum(), beyond, retain_graph=True)[0] for g in (x * x, -x)]
    unit = vectors / d[:, None]
    pairs = int(number.max()) + 1
    sums = d.new_zeros(system.num_atoms * pairs, 3, 2)
    sums.index_add_(0, receiver * pairs + types, unit[:, :, None] * torch.stack(slopes, 1)[:, None])
    rows = sums.view(system.num_atoms, pairs, 3, 2).transpose(1, 2).flatten(2)
    return rows, types[near], d[near]


def forces_of_priors(potential: Potential, system: System) -> Tensor:
    """Of the priors, [N, 3] eV/Å."""
    pos = system.pos.detach().double().requires_grad_()
    with torch.enable_grad():
        energies = potential.prior_energies(system.replace(pos=pos)).sum() + 0 * pos.sum()
        return -torch.autograd.grad(energies, pos)[0]
