"""Morse potentials between pairs of elements, fitted to labels before a training.

Shapes: E directed edges, T elements that have parameters, M rows of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..registry import PRIORS
from ..system import System
from .base import Prior, atomic_number
from .pairs import pair_distances, sum_pairs, taper

__all__ = ["PairMorse", "pair_of", "pair_table"]


def pair_of(name: str, max_z: int = 128) -> tuple[int, int]:
    """(1, 6) of "C-H" and of "1-6" (as in JSON).

    Raises:
        ValueError: it does not name two elements.
    """
    ends = str(name).split("-")
    if len(ends) != 2:
        raise ValueError(f"'{name}' is not a pair of elements: write it as C-H")
    first, second = sorted(atomic_number(end, max_z) for end in ends)
    return first, second


@PRIORS.register("pair_morse")
class PairMorse(Prior):
    """C(d) · (r x² − q x) with x = exp(−a (d − R)), for each pair of elements with its own r ≥ 0 and q ≥ 0.

    R is the sum of the covalent radii (B. Cordero et al., Dalton Trans. 2832 (2008)). The taper C goes from 1 at
    R + start to 0 at R + end, with two continuous derivatives, so that bonds are stretched and compressed as by a Morse
    potential, and pairs further apart feel nothing. Each pair has one minimum at most, and is repulsive within it.

    Source: P. Morse, Phys. Rev. 34, 57 (1929), Eq. 4.

    Args:
        parameters: pair of elements, as "C-H" → [r, q] in eV; none for pairs that are not listed. In a training
            configuration also "fit": to the forces of the training frames, see docs/priors.md.
        decay: a in 1/Å.
        start, end: Å beyond R, where the taper begins and ends.

    Raises:
        ValueError: a key is not a pair of elements, a value is not [r, q] with r, q ≥ 0, or a length is out of range.
    """

    table: Tensor
    place: Tensor
    radii: Tensor

    def __init__(
        self,
        parameters: Mapping[str, Sequence[float]] | None = None,
        decay: float = 2.2,
        start: float = 0.1,
        end: float = 1.1,
    ):
        super().__init__()
        from ase.data import covalent_radii

        if not decay > 0 or not 0 <= start < end:
            raise ValueError(f"decay must be positive and 0 ≤ start < end, got {decay}, {start} and {end}")
        pairs = {pair_of(name): [float(v) for v in values] for name, values in (parameters or {}).items()}
        for (a, b), values in pairs.items():
            if len(values) != 2 or not all(0 <= v < math.inf for v in values):
                raise ValueError(f"parameters of {a}-{b} must be [r, q], not negative, got {values}")
        self.decay, self.start, self.end = float(decay), float(start), float(end)
        radii = torch.zeros(128, dtype=torch.float64)
        radii[: len(covalent_radii)] = torch.tensor(covalent_radii, dtype=torch.float64)
        self.register_buffer("radii", radii)
        place, table = pair_table(pairs, 2)
        self.register_buffer("place", place)
        self.register_buffer("table", table)
        self.cutoff: float = max((float(radii[a] + radii[b]) for a, b in pairs), default=0.0) + self.end

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        d = pair_distances(system, neighbors)
        receiver, sender = neighbors.edge_index
        z, other = system.z[receiver], system.z[sender]
        r, q = self.table[self.place[z] + self.place[other]].unbind(1)
        beyond = d - (self.radii[z] + self.radii[other])
        x = torch.exp(-self.decay * beyond)
        pair = taper(beyond, self.start, self.end) * (r * x - q) * x
        return sum_pairs(pair, neighbors, system.num_atoms)


def pair_table(pairs: Mapping[tuple[int, int], Sequence[float]], count: int) -> tuple[Tensor, Tensor]:
    """Numbers by pair of elements, for kernels that know sums over the two atoms only.

    Args:
        pairs: atomic numbers → values.
        count: of the values of each pair.

    Returns:
        place [128] by atomic number, and table [M, count] float64: the values of a pair are in the row that is the sum
        of both places, zeros for pairs without values.
    """
    elements = sorted({z for pair in pairs for z in pair})
    numbers = _distinct_sums(len(elements) + 1)
    place = torch.full((128,), numbers[-1], dtype=torch.long)  # of elements without parameters
    place[elements] = torch.tensor(numbers[:-1], dtype=torch.long)
    table = torch.zeros(2 * numbers[-1] + 2, count, dtype=torch.float64)
    for (a, b), values in pairs.items():
        table[place[a] + place[b]] = torch.tensor([*values], dtype=torch.float64)
    return place, table


def _distinct_sums(count: int) -> list[int]:
    """The first numbers 0, 1, 3, 7, 12, … of which each two have another sum (Mian and Chowla, less one)."""
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
