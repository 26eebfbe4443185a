"""Screened repulsion of the nuclei at short distance.

Shapes: E directed edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..neighbors.pairs import pair_distances, sum_pairs
from ..potential.prior import Prior, atomic_number
from ..registry import PRIORS
from ..system import System
from ..units import BOHR, COULOMB

__all__ = ["ZBL"]

_AMPLITUDES = (0.1818, 0.5099, 0.2802, 0.02817)
_DECAYS = (3.2, 0.9423, 0.4029, 0.2016)
_POINT = 1e-3  # Å, not 0, since kernels divide by sums of radii


@PRIORS.register("zbl")
class ZBL(Prior):
    """Universal repulsion of Ziegler, Biersack and Littmark: k_e Z_i Z_j / d · φ(d/a) · C(d).

    φ(x) = Σ_k A_k exp(−b_k x); a = 0.8854 a_0 / (Z_i^0.23 + Z_j^0.23).

    Source: J. Ziegler, J. Biersack, U. Littmark, The Stopping and Range of Ions in Matter (1985), Eqs. 2-60, 2-61.

    Args:
        cutoff: distance in Å at which C(d) = ½ (cos(π d/cutoff) + 1) ends (envelope "cosine").
        envelope: "cosine", or "covalent", a polynomial of degree 8 that ends at the sum of the covalent radii
            (B. Cordero et al., Dalton Trans. 2832 (2008)), so that bonded atoms hardly feel the repulsion.
        screening: "universal", or "refitted" with a = 0.4543 a_0 / (Z_i^0.3 + Z_j^0.3), as in TensorNet2 models.
        scale: factor of the energy.
        radii: radii in Å by element, such as {"H": 0.3}, instead of the covalent radii. If their sums are below all
            lengths of bonds, only colliding atoms feel the repulsion. Elements that are not listed count as points.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    radii: Tensor
    repels = True

    def __init__(
        self,
        cutoff: float = 5.0,
        envelope: Literal["cosine", "covalent"] = "cosine",
        screening: Literal["universal", "refitted"] = "universal",
        scale: float = 1.0,
        radii: Mapping[str, float] | None = None,
    ):
        super().__init__()
        if envelope not in ("cosine", "covalent"):
            raise ValueError(f"envelope must be cosine or covalent, got '{envelope}'")
        if screening not in ("universal", "refitted"):
            raise ValueError(f"screening must be universal or refitted, got '{screening}'")
        if radii is not None and envelope != "covalent":
            raise ValueError('radii must be given with the envelope "covalent", which reads them')
        self.register_buffer("radii", _covalent_radii() if radii is None else _listed_radii(radii))
        self.envelope, self.scale = envelope, float(scale)
        self.cutoff: float = 2 * float(self.radii.max()) if envelope == "covalent" else float(cutoff)
        if not 0 < self.cutoff < math.inf:
            raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff}")
        self.length, self.power = (0.8854 * BOHR, 0.23) if screening == "universal" else (0.4543 * BOHR, 0.3)

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        d = pair_distances(system, neighbors)
        receiver, sender = neighbors.edge_index
        z = system.z.double()
        x = d * (z[receiver] ** self.power + z[sender] ** self.power) / self.length
        screening = sum(a * torch.exp(-b * x) for a, b in zip(_AMPLITUDES, _DECAYS, strict=True))
        if self.envelope == "cosine":
            end = torch.cos(math.pi / self.cutoff * d) / 2 + 0.5
        else:
            t = (d / (self.radii[system.z[receiver]] + self.radii[system.z[sender]])).clamp(max=1)
            end = 1 - 28 * t**6 + 48 * t**7 - 21 * t**8
        pair = COULOMB * z[receiver] * z[sender] / d * screening * end
        return self.scale * sum_pairs(pair, neighbors, system.num_atoms)


def _covalent_radii() -> Tensor:
    """Return radii by atomic number, [128] Å."""
    from ase.data import covalent_radii

    radii = torch.full((128,), 0.2, dtype=torch.float64)
    radii[: len(covalent_radii)] = torch.tensor(covalent_radii, dtype=torch.float64)
    return radii


def _listed_radii(given: Mapping[str, float]) -> Tensor:
    """Return radii by atomic number, [128] Å."""
    radii = torch.full((128,), _POINT, dtype=torch.float64)
    for element, radius in given.items():
        if not 0 < radius < math.inf:
            raise ValueError(f"the radius of {element} must be a positive number of Å, got {radius}")
        radii[atomic_number(element)] = radius
    return radii
