"""A pair potential with a wall: what a network need not learn of bonds and contacts, and does not know beyond its data.

Shapes: E directed edges, K exponents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..registry import PRIORS
from ..system import System
from .base import Prior
from .pair_morse import pair_of, pair_table
from .pairs import pair_distances, sum_pairs

__all__ = ["ATTRACTIVE", "REPULSIVE", "PairPotential", "radial_functions"]

REPULSIVE = (3.2, 4.0, 5.0, 6.5)
"""1/Å. Exponents of the repulsion, around those of Born and Mayer."""

ATTRACTIVE = (1.0, 1.5, 2.0, 2.6)
"""1/Å. Exponents of the attraction, all smaller than those of the repulsion."""


@PRIORS.register("pair_potential")
class PairPotential(Prior):
    """Σ_pairs [Σ_k A_k exp(−a_k (d − 1 Å)) − Σ_k B_k exp(−b_k (d − 1 Å))] · (1 − d²/cutoff²)³, A and B by elements.

    All A and B are at least 0, and all a_k larger than all b_k. Such a sum of exponentials repels up to its only
    minimum and attracts beyond (Descartes' rule of signs), whatever the coefficients: a Morse bond is the case of one
    of each. `parameters: fit` takes those that fit the forces of the training frames best
    (`training.run.pair_potential_fit`).

    Args:
        parameters: pair of elements, as "C-H" → [A of the 4 repulsive exponents, B of the 4 attractive ones] in eV;
            none for pairs that are not listed. In a training configuration also "fit", or "repulsion" (B = 0).
        cutoff: Å, where the energy ends with two continuous derivatives.

    Raises:
        ValueError: a key is not a pair of elements, a value is not 8 numbers ≥ 0, or the cutoff is out of range.
    """

    table: Tensor
    place: Tensor

    def __init__(self, parameters: Mapping[str, Sequence[float]] | None = None, cutoff: float = 4.0):
        super().__init__()
        self.cutoff: float = float(cutoff)
        if not 0 < self.cutoff < math.inf:
            raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff}")
        count = len(REPULSIVE) + len(ATTRACTIVE)
        pairs = {pair_of(name): [float(v) for v in values] for name, values in (parameters or {}).items()}
        for (a, b), values in pairs.items():
            if len(values) != count or not all(0 <= v < math.inf for v in values):
                raise ValueError(f"parameters of {a}-{b} must be {count} numbers, not negative, got {values}")
        place, table = pair_table(pairs, count)
        self.register_buffer("place", place)
        self.register_buffer("table", table)

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        receiver, sender = neighbors.edge_index
        functions = radial_functions(pair_distances(system, neighbors), self.cutoff)
        numbers = self.table[self.place[system.z[receiver]] + self.place[system.z[sender]]]
        repulsion, attraction = (numbers * functions).split([len(REPULSIVE), len(ATTRACTIVE)], dim=1)
        return sum_pairs(repulsion.sum(1) - attraction.sum(1), neighbors, system.num_atoms)


def radial_functions(distances: Tensor, cutoff: float) -> Tensor:
    """exp(−a_k (d − 1 Å)) (1 − d²/cutoff²)³ of all exponents, [E, K] float64, 0 beyond the cutoff.

    Args:
        distances: [E] Å.
        cutoff: Å.
    """
    exponents = torch.tensor([*REPULSIVE, *ATTRACTIVE], dtype=torch.float64, device=distances.device)
    end = (1 - (distances.double() / cutoff) ** 2).clamp(min=0) ** 3
    return torch.exp(-(distances.double()[:, None] - 1) * exponents) * end[:, None]
