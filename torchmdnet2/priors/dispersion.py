"""Dispersion between atoms: Grimme's D2, and D3 with rational damping.

Shapes: E directed edges.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Sequence
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import MissingBackend
from ..neighbors import NeighborList
from ..neighbors.pairs import pair_distances, require_molecules, sum_pairs, taper
from ..potential.cells import CoulombInCells
from ..potential.prior import Prior
from ..potential.refusals import SYMBOLS
from ..potentials import FOLDER
from ..registry import PRIORS
from ..system import System
from ..units import BOHR, HARTREE, KJ_MOL

__all__ = ["D2", "D3"]


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
        s6: scale, such as 0.75 for PBE and 1.05 for B3LYP.
        switch_width: width in Å, before the cutoff, over which the energy goes smoothly to zero; with 0 it jumps.

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
            raise ValueError(f"the prior 'd2' ends at xenon (Z = 54), but there is Z = {int(system.z[unknown][0])}")

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        d = pair_distances(system, neighbors)
        receiver, sender = system.z[neighbors.edge_index]
        c6 = (self.c6[receiver] * self.c6[sender]).sqrt()
        damping = torch.sigmoid(_STEEPNESS * (d / (self.radii[receiver] + self.radii[sender]) - 1))
        pair = -self.s6 * c6 / d**6 * damping * taper(d, self.cutoff - self.switch_width, self.cutoff)
        return sum_pairs(pair, neighbors, system.num_atoms)


# --- Dispersion that depends on the coordination of the atoms: D3 with rational (Becke–Johnson) damping ---

CELL_CUTOFF, CELL_SWITCH_WIDTH = 15.0, 2.0
"""Cutoff in Å in periodic cells, if molecules have a sum over all pairs. docs/priors.md says what is left out."""

_REFERENCES = 7
_REFERENCES_OF_AIMNET2 = 5
_FAR = 1e3
_TABLES = ("c6", "coordination", "radii", "moments")
_COUNTING_STEEPNESS, _WEIGHT_STEEPNESS = 16.0, 4.0


@PRIORS.register("d3")
class D3(Prior):
    """D3(BJ) dispersion of pairs: −½ Σ_{i≠j} [s6 C6/(d⁶ + f⁶) + s8 C8/(d⁸ + f⁸)], f = a1 √(C8/C6) + a2.

    C6_ij is the mean over reference systems a of i and b of j with weights ∝ exp(−4 (CN_i − CN_a)²); C8_ij =
    3 C6_ij Q_i Q_j; CN_i = Σ_j 1/(1 + exp(−16 (R_ij/d − 1))). No three-body term.

    This package has the reference values for the elements of `organic`. For other elements they are read from the
    package `tad-dftd3` when the prior is made. Model files store the values that they need.

    Sources: S. Grimme et al., J. Chem. Phys. 132, 154104 (2010); S. Grimme, S. Ehrlich, L. Goerigk, J. Comput. Chem.
    32, 1456 (2011), Eqs. 4–6.

    Args:
        elements: atomic numbers that can occur.
        s8: published parameter of the density functional. PBE0: 1.2177.
        a1: likewise. PBE0: 0.4145.
        a2: likewise, in bohr. PBE0: 4.8593.
        s6: 1, except for double hybrids.
        cutoff: cutoff in Å; None sums over all pairs of a molecule.
        switch_width: width in Å, before the cutoff, over which the energy goes smoothly to zero.
        variant: "published", or "aimnet2" for the variant in AIMNet2's program. There, CN_i is at most the number of
            the element's reference systems, and elements with fewer than five have further references with CN = −1
            and without dispersion, which reduce C6 at low coordination.

    Raises:
        MissingBackend: on use, if reference values of an element are missing in this package, `tad-dftd3` and the model
            file.
        ValueError: an option is out of range, or an element is not among `elements`.
    """

    c6: Tensor
    coordination: Tensor
    radii: Tensor
    moments: Tensor
    index: Tensor

    def __init__(
        self,
        elements: Sequence[int],
        s8: float,
        a1: float,
        a2: float,
        s6: float = 1.0,
        cutoff: float | None = 20.0,
        switch_width: float = 2.0,
        variant: Literal["published", "aimnet2"] = "published",
    ):
        super().__init__()
        if cutoff is not None and not 0 <= switch_width < cutoff:
            raise ValueError(f"switch_width must be between 0 and the cutoff, got {switch_width} and {cutoff} Å")
        self.elements = sorted({int(z) for z in elements})
        if not self.elements or not 0 < self.elements[0] <= self.elements[-1] < 104:
            raise ValueError(f"elements must be atomic numbers 1 … 103, got {list(elements)}")
        self.cutoff: float = math.inf if cutoff is None else float(cutoff)
        self.switch_width = 0.0 if cutoff is None else float(switch_width)
        if variant not in ("published", "aimnet2"):
            raise ValueError(f"variant must be 'published' or 'aimnet2', got '{variant}'")
        self.variant = variant
        self.s6, self.s8, self.a1, self.a2 = float(s6), float(s8), float(a1), float(a2) * BOHR
        index = torch.full((128,), -1)
        index[self.elements] = torch.arange(len(self.elements))
        self.register_buffer("index", index, persistent=False)
        for name, value in _reference_values(self.elements).items():
            self.register_buffer(name, value)

    def check(self, system: System) -> None:
        """Refuse elements outside `elements`, and periodic structures if the sum is over all pairs.

        Args:
            system: the structure, or a batch.

        Raises:
            ValueError: there is such an element or structure.
            MissingBackend: as for `require_values`.
        """
        self.require_values()
        if math.isinf(self.cutoff):
            require_molecules(system)
        types = self.index[system.z]
        if bool((types < 0).any()):
            raise ValueError(f"the prior 'd3' was made without Z = {int(system.z[types < 0][0])}")

    def in_cells(self, coulomb: CoulombInCells) -> Prior:
        """Return a prior with the cutoff `CELL_CUTOFF`, if this one sums over all pairs; else this one.

        Args:
            coulomb: method for Coulomb sums, which has no effect here.
        """
        if math.isfinite(self.cutoff):
            return self
        part = copy.copy(self)
        part.cutoff, part.switch_width = CELL_CUTOFF, CELL_SWITCH_WIDTH
        return part

    def require_values(self) -> None:
        if self._lacks_values():
            known = _tables_of_organic()[0]
            lacking = ", ".join(SYMBOLS[z] for z in self.elements if z not in known)
            raise MissingBackend(
                f"the prior 'd3' needs reference values of {lacking}: pip install 'torchmdnet2[d3]' (the package "
                "tad-dftd3)"
            )

    def adopt_values(self, other: Prior) -> None:
        if isinstance(other, D3) and self._lacks_values() and set(self.elements) <= set(other.elements):
            for name, value in _rows(other.tables(), other.elements, self.elements).items():
                getattr(self, name).copy_(value)

    def _lacks_values(self) -> bool:
        return bool((self.c6 < 0).any())

    def tables(self) -> dict[str, Tensor]:
        """Return the reference values: "c6" [T, T, 7, 7], "coordination" [T, 7], "radii" [T], "moments" [T]."""
        return {name: getattr(self, name) for name in _TABLES}

    def reference_coordination(self) -> Tensor:
        """Return CN_a of the references, [T, 7] float64; missing references have values so large that they weigh 0."""
        absent = self.coordination < 0
        if self.variant == "aimnet2":
            absent[:, :_REFERENCES_OF_AIMNET2] = False
        return self.coordination.masked_fill(absent, _FAR)

    def largest_coordination(self) -> Tensor:
        """Return the upper limits of CN, [T] float64."""
        if self.variant == "aimnet2":
            return (self.coordination >= 0).sum(1).double()
        return torch.full_like(self.radii, _FAR)

    def forward(self, system: System, neighbors: NeighborList | None, charges: Tensor | None = None) -> Tensor:
        assert neighbors is not None
        types = self.index[system.z]
        receiver, sender = neighbors.edge_index
        d = pair_distances(system, neighbors)
        end = taper(d, self.cutoff - self.switch_width, self.cutoff)

        bond = self.radii[types[receiver]] + self.radii[types[sender]]
        count = torch.sigmoid(_COUNTING_STEEPNESS * (bond / d - 1)) * end
        coordination = neighbors.complete(d.new_zeros(system.num_atoms).index_add(0, receiver, count))
        coordination = coordination.minimum(self.largest_coordination()[types])
        weights = torch.softmax(
            -_WEIGHT_STEEPNESS * (coordination[:, None] - self.reference_coordination()[types]) ** 2, 1
        )

        # mix the receiver's references once for each atom and sender element, so that edges need 7 numbers, not 49
        mixed = torch.einsum("na,ntab->ntb", weights, self.c6[types])
        c6 = (mixed[receiver, types[sender]] * weights[sender]).sum(1)
        ratio = 3 * self.moments[types[receiver]] * self.moments[types[sender]]  # C8/C6
        damping = self.a1 * ratio.sqrt() + self.a2
        pair = -c6 * (self.s6 / (d**6 + damping**6) + self.s8 * ratio / (d**8 + damping**8)) * end
        return sum_pairs(pair, neighbors, system.num_atoms)


def _reference_values(elements: list[int]) -> dict[str, Tensor]:
    """Return the tables of the elements in eV and Å; −1 for elements whose values are not available."""
    known, tables = _tables_of_organic()
    if set(elements) <= set(known):
        return _rows(tables, known, elements)
    num = len(elements)
    try:
        from tad_dftd3 import data, reference
        from tad_mctc.data import radii
    except ImportError:
        empty = {"c6": (num, num, _REFERENCES, _REFERENCES), "coordination": (num, _REFERENCES)}
        shapes: dict[str, tuple[int, ...]] = {**empty, "radii": (num,), "moments": (num,)}
        return {name: torch.full(shape, -1.0, dtype=torch.float64) for name, shape in shapes.items()}
    z = torch.tensor(elements)
    double = torch.float64
    table = reference.Reference(dtype=double)
    return {
        "c6": table.c6[z][:, z].clamp(min=0).to(double) * HARTREE * BOHR**6,
        "coordination": table.cn[z].to(double),
        "radii": radii.COV_D3(dtype=double)[z] * BOHR,
        "moments": data.R4R2(dtype=double)[z] * BOHR,
    }


@functools.cache
def _tables_of_organic() -> tuple[list[int], dict[str, Tensor]]:
    """Return the elements and tables of the shipped potential's prior, so that they need no other package."""
    with safe_open(FOLDER / "organic.tmn", framework="pt", device="cpu") as file:
        priors = json.loads(file.metadata()["config"])["priors"]
        place = next(k for k, prior in enumerate(priors) if prior["name"] == "d3")
        return priors[place]["elements"], {name: file.get_tensor(f"priors.{place}.{name}") for name in _TABLES}


def _rows(tables: dict[str, Tensor], elements: list[int], wanted: list[int]) -> dict[str, Tensor]:
    """Return the tables of some of the elements."""
    rows = torch.tensor([elements.index(z) for z in wanted], device=tables["c6"].device)
    return {name: table[rows][:, rows] if name == "c6" else table[rows] for name, table in tables.items()}
