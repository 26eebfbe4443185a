"""Dispersion between atoms: Grimme's D2.

Shapes: E directed edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..registry import PRIORS
from ..system import System
from ..units import KJ_MOL
from .base import Prior
from .pairs import pair_distances, sum_pairs, taper

__all__ = ["D2"]

# Table 1 of S. Grimme, J. Comput. Chem. 27, 1787 (2006), hydrogen to xenon: C6 in J nm⁶/mol, R0 in Å
_C6 = [
    0.14, 0.08,
    1.61, 1.61, 3.13, 1.75, 1.23, 0.70, 0.75, 0.63,
    5.71, 5.71, 10.79, 9.23, 7.84, 5.57, 5.07, 4.61,
    10.8, 10.8, *[10.8] * 10, 16.99, 17.10, 16.37, 12.64, 12.47, 12.01,
    24.67, 24.67, *[24.67] * 10, 37.32, 38.71, 38.44, 31.74, 31.50, 29.99,
]  # fmt: skip
_R0 = [
    1.001, 1.012,
    0.825, 1.408, 1.485, 1.452, 1.397, 1.342, 1.287, 1.243,
    1.144, 1.364, 1.639, 1.716, 1.705, 1.683, 1.639, 1.595,
    1.485, 1.474, *[1.562] * 10, 1.650, 1.727, 1.760, 1.771, 1.749, 1.727,
    1.628, 1.606, *[1.639] * 10, 1.672, 1.804, 1.881, 1.892, 1.892, 1.881,
]  # fmt: skip
_NM6_J_MOL = 1e6 * 1e-3 * KJ_MOL  # J nm⁶/mol in eV Å⁶
_STEEPNESS = 20.0


@PRIORS.register("d2")
class D2(Prior):
    """−s6 Σ_{i<j} C6_ij / d⁶ · 1/(1 + exp(−20 (d/R_ij − 1))), C6_ij = √(C6_i C6_j), R_ij = R_i + R_j; H to Xe.

    Source: S. Grimme, J. Comput. Chem. 27, 1787 (2006), Eqs. 11–13.

    Args:
        cutoff: Å.
        s6: scale: 1 by itself, 0.75 for PBE, 1.05 for B3LYP.
        switch_width: Å over which the energy goes smoothly to zero before the cutoff; 0 ends it abruptly.

    Raises:
        ValueError: an option is out of range; an element is beyond xenon.
    """

    c6: Tensor
    radii: Tensor

    def __init__(self, cutoff: float = 15.0, s6: float = 1.0, switch_width: float = 2.0):
        super().__init__()
        if not 0 <= switch_width < cutoff:
            raise ValueError(f"switch_width must be between 0 and the cutoff, got {switch_width} and {cutoff} Å")
        self.cutoff: float = float(cutoff)
        self.s6, self.switch_width = float(s6), float(switch_width)
        self.register_buffer("c6", torch.tensor([0.0, *_C6], dtype=torch.float64) * _NM6_J_MOL)
        self.register_buffer("radii", torch.tensor([0.0, *_R0], dtype=torch.float64))

    def check(self, system: System) -> None:
        """Refuse elements beyond xenon.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: there are such elements.
        """
        unknown = system.z >= self.c6.shape[0]
        if bool(unknown.any()):
            raise ValueError(f"the prior 'd2' ends at xenon (Z = 54), and there is Z = {int(system.z[unknown][0])}")

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        d = pair_distances(system, neighbors)
        receiver, sender = system.z[neighbors.edge_index]
        c6 = (self.c6[receiver] * self.c6[sender]).sqrt()
        damping = torch.sigmoid(_STEEPNESS * (d / (self.radii[receiver] + self.radii[sender]) - 1))
        pair = -self.s6 * c6 / d**6 * damping * taper(d, self.cutoff - self.switch_width, self.cutoff)
        return sum_pairs(pair, neighbors, system.num_atoms)
