"""A pair potential with a repulsive wall, which describes bonds and contacts also outside the training data.

Shapes: E directed edges, K exponents, M rows of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..neighbors.pairs import pair_distances, sum_pairs
from ..potential.prior import Prior, atomic_number
from ..registry import PRIORS
from ..system import System

__all__ = ["ATTRACTIVE", "FITTED", "REPULSIVE", "PairPotential", "radial_functions"]

REPULSIVE = (3.2, 4.0, 5.0, 6.5)
"""1/Å. Exponents of the repulsion, around those of Born and Mayer."""

ATTRACTIVE = (1.0, 1.5, 2.0, 2.6)
"""1/Å. Exponents of the attraction, all smaller than those of the repulsion."""

FITTED = ("fit", "repulsion", "heavy_attraction")
"""What `parameters` may be in a training configuration (`training.run.pair_potential_fit`)."""


@PRIORS.register("pair_potential")
class PairPotential(Prior):
    """Σ_pairs [Σ_k A_k exp(−a_k (d − 1 Å)) − Σ_k B_k exp(−b_k (d − 1 Å))] · (1 − d²/cutoff²)³, A and B by elements.

    All A and B are at least 0, and all a_k are larger than all b_k. With any such coefficients, the sum repels up to
    its only minimum and attracts beyond (Descartes' rule of signs); one exponential of each kind makes a Morse bond.
    `parameters: fit` takes the coefficients that fit the forces of the training frames best
    (`training.run.pair_potential_fit`).

    Args:
        parameters: pair of elements, such as "C-H" → [A of the 4 repulsive exponents, B of the 4 attractive ones] in
            eV; pairs that are not listed have no energy. In a training configuration also "fit", "repulsion" (B = 0),
            or "heavy_attraction" (B = 0 for pairs with hydrogen).
        cutoff: cutoff in Å, where the energy ends with two continuous derivatives.

    Raises:
        ValueError: a key is not a pair of elements, a value is not 8 numbers ≥ 0, or the cutoff is out of range.
    """

    table: Tensor
    place: Tensor
    repels = True

    def __init__(self, parameters: Mapping[str, Sequence[float]] | None = None, cutoff: float = 4.0):
        super().__init__()
        self.cutoff: float = float(cutoff)
        if not 0 < self.cutoff < math.inf:
            raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff}")
        count = len(REPULSIVE) + len(ATTRACTIVE)
        pairs = {_pair_of(name): [float(v) for v in values] for name, values in (parameters or {}).items()}
        for (a, b), values in pairs.items():
            if len(values) != count or not all(0 <= v < math.inf for v in values):
                raise ValueError(f"parameters of {a}-{b} must be {count} numbers, not negative, got {values}")
        place, table = _pair_table(pairs, count)
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
    """Return exp(−a_k (d − 1 Å)) (1 − d²/cutoff²)³ for all exponents, [E, K] float64, 0 beyond the cutoff.

    Args:
        distances: [E] Å.
        cutoff: Å.
    """
    exponents = torch.tensor([*REPULSIVE, *ATTRACTIVE], dtype=torch.float64, device=distances.device)
    end = (1 - (distances.double() / cutoff) ** 2).clamp(min=0) ** 3
    return torch.exp(-(distances.double()[:, None] - 1) * exponents) * end[:, None]


def _pair_of(name: str) -> tuple[int, int]:
    """Return the atomic numbers of a pair, such as (1, 6) for "C-H" and, as in JSON, "1-6".

    Raises:
        ValueError: the name is not one of two elements.
    """
    ends = str(name).split("-")
    if len(ends) != 2:
        raise ValueError(f"'{name}' is not a pair of elements: write it as C-H")
    first, second = sorted(atomic_number(end) for end in ends)
    return first, second


def _pair_table(pairs: Mapping[tuple[int, int], Sequence[float]], count: int) -> tuple[Tensor, Tensor]:
    """Return a table of values by pair of elements, for kernels that know only sums over the two atoms.

    Args:
        pairs: atomic numbers → values.
        count: number of values of each pair.

    Returns:
        place [128] by atomic number, and table [M, count] float64: the values of a pair are in the row that is the sum
        of both places, zeros for pairs without values.
    """
    elements = sorted({z for pair in pairs for z in pair})
    numbers = _distinct_sums(len(elements) + 1)
    place = torch.full((128,), numbers[-1], dtype=torch.long)  # for elements without parameters
    place[elements] = torch.tensor(numbers[:-1], dtype=torch.long)
    table = torch.zeros(2 * numbers[-1] + 2, count, dtype=torch.float64)
    for (a, b), values in pairs.items():
        table[place[a] + place[b]] = torch.tensor([*values], dtype=torch.float64)
    return place, table


def _distinct_sums(count: int) -> list[int]:
    """Return the first numbers of 0, 1, 3, 7, 12, …, all pairs of which have different sums (Mian-Chowla, less one)."""
    found: list[int] = []
    sums: set[int] = set()
    number = 0
    while len(found) < count:
        new = {number + other for other in (*found, number)}
        if not new & sums:
            found.append(number)
            sums |= new
        number += 1
    return found
