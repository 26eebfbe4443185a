"""Parameters of a prior for kernels: one description for GPU and CPU.

Shapes: N atoms, T elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...potential.prior import Prior
from ...system import System
from ...units import COULOMB
from ..coulomb.coulomb import DSF_ALPHA, Coulomb
from ..dispersion import D2, D3
from ..pair_potential import PairPotential
from ..zbl import ZBL

__all__ = ["D3Parameters", "PairParameters", "describe", "ewald_parameters", "unsupported_reason"]


_NO_TAPER = 1e30, 0.0
_DAMPINGS = {"none": 0, "exp": 1, "cosine": 2}


@dataclass(frozen=True, eq=False)
class PairParameters:
    """E = ½ strength Σ_i Σ_j A_i A_j g(d_ij, b_i + b_j, c_i + c_j) − strength · alone · Σ_i A_i².

    Attributes:
        prior: the prior.
        cutoff: distance in Å from which pairs do not count; infinity for all pairs of molecules.
        radial: name of g (triton_kernels.py, cpu.py); mode, constants: its last arguments, six numbers and
            tables (float64).
        strength: factor in eV.
        source: source of A: fixed by "element" or by "atom", or "predicted" by the network.
        table: [128, 1 … 3] float64, A, b, c by atomic number, if they depend on the element.
        alone: constant of an atom without neighbors, 1/Å.
    """

    prior: Prior
    cutoff: float
    radial: str
    mode: int
    constants: tuple[Any, Any, Any, Any, Any, Any]
    strength: float
    source: Literal["element", "atom", "predicted"]
    table: Tensor | None
    alone: float = 0.0

    def numbers_of(self, system: System) -> Tensor:
        """Return A of each atom, [N, 1] float64, if it is fixed by atom."""
        assert isinstance(self.prior, Coulomb)
        return self.prior.fixed_charges(system)[:, None]


@dataclass(frozen=True, eq=False)
class D3Parameters:
    """Parameters of D3(BJ).

    Attributes:
        prior: the prior.
        cutoff, start, inverse: Å, and 1/Å, of the taper.
        elements: [128, 4] float64 by atomic number: covalent radius in Å, (3 Q²)^¼ so that the product of two is
            √(C8/C6) in Å, index of the element, largest coordination number.
        reference: [T, 8] float64, coordination numbers; very large for missing references.
        c6: [T, T, 8, 8] float64, eV Å⁶.
    """

    prior: D3
    cutoff: float
    start: float
    inverse: float
    elements: Tensor
    reference: Tensor
    c6: Tensor


def unsupported_reason(prior: Prior) -> str:
    """Return "" if there are kernels for this prior, else the reason."""
    if type(prior) not in _KNOWN:
        return f"there are no fused kernels for {type(prior).__name__}"
    if isinstance(prior, Coulomb) and prior.energy.method in ("ewald", "pme"):
        return f"there are no fused kernels for Coulomb with method '{prior.energy.method}'"
    return ""


def describe(prior: Prior, elements: Iterable[int]) -> PairParameters | D3Parameters:
    """Return the current parameters of a prior, on the CPU.

    Args:
        prior: a prior for which `unsupported_reason` returns "".
        elements: atomic numbers that can occur.
    """
    return _KNOWN[type(prior)](prior, list(elements))


def _taper(cutoff: float, width: float) -> tuple[float, float]:
    """Return start in Å and inverse width in 1/Å of a taper; without a width the energy ends at the cutoff."""
    return (cutoff - width, 1 / width) if width > 0 else _NO_TAPER


def _zbl(prior: ZBL, elements: list[int]) -> PairParameters:
    z = torch.arange(128, dtype=torch.float64)
    radii = prior.radii.double().cpu()
    covalent = prior.envelope == "covalent"
    # bonds between elements that cannot occur need no list
    cutoff = 2 * float(radii[elements].max()) if covalent else prior.cutoff
    return PairParameters(
        prior, min(cutoff, prior.cutoff), "zbl", int(covalent), (prior.cutoff, 0.0, 0.0, 0.0, 0.0, 0.0),
        COULOMB * prior.scale, "element", torch.stack([z, z**prior.power / prior.length, radii], 1),
    )  # fmt: skip


def _pair_potential(prior: PairPotential, elements: list[int]) -> PairParameters:
    ones = torch.ones(128, dtype=torch.float64)
    table = torch.stack([ones, prior.place.double().cpu()], 1)
    constants = (prior.table.double().cpu(), prior.cutoff, 0.0, 0.0, 0.0, 0.0)
    return PairParameters(prior, prior.cutoff, "pair_potential", 0, constants, 1.0, "element", table)


def _d2(prior: D2, elements: list[int]) -> PairParameters:
    table = torch.ones(128, 2, dtype=torch.float64)
    known = len(prior.c6)
    table[:known, 0], table[:known, 1] = prior.c6.double().cpu().sqrt(), prior.radii.double().cpu()
    constants = (*_taper(prior.cutoff, prior.switch_width), 0.0, 0.0, 0.0, 0.0)
    return PairParameters(prior, prior.cutoff, "d2", 0, constants, -prior.s6, "element", table)


def ewald_parameters(prior: Coulomb) -> tuple[PairParameters, PairParameters]:
    """Return the parameters of short-range pairs of Ewald summation, and of all pairs of molecules.

    The charges are given like predicted ones.
    """
    e, damping = prior.energy, _damping(prior)
    mode, short = _DAMPINGS[e.damping], (*damping, e.alpha, 0.0, 0.0, 0.0)
    molecules = (*damping, 0.0, 0.0, 0.0, 0.0)
    return (
        PairParameters(prior, e.cutoff, "ewald", mode, short, COULOMB, "predicted", None),
        PairParameters(prior, math.inf, "all_pairs", mode, molecules, COULOMB, "predicted", None),
    )


def _damping(prior: Coulomb) -> tuple[float, float]:
    e = prior.energy
    return e.damping_lower, 1 / (e.damping_upper - e.damping_lower if e.damping == "cosine" else e.damping_upper)


def _coulomb(prior: Coulomb, elements: list[int]) -> PairParameters:
    e, damping = prior.energy, _damping(prior)
    table = prior.table.double().cpu()[:, None] if prior.source == "element" else None
    alone = 0.0
    if e.method == "all_pairs":
        name, constants = "all_pairs", (*damping, 0.0, 0.0, 0.0, 0.0)
    elif e.method == "dsf":
        name, constants, alone = "shifted_force", (*damping, DSF_ALPHA, *e.at_cutoff, e.cutoff), e.alone
    else:
        name, constants = "reaction_field", (*damping, *_taper(e.cutoff, e.switch_width), e.reaction, e.shift)
    source: Any = prior.source
    mode = _DAMPINGS[e.damping]
    return PairParameters(prior, e.cutoff, name, mode, constants, COULOMB, source, table, alone)


def _d3(prior: D3, elements: list[int]) -> D3Parameters:
    index, kinds = prior.index.cpu(), len(prior.elements)
    table = torch.zeros(128, 4, dtype=torch.float64)
    known = index >= 0
    table[known, 0] = prior.radii.double().cpu()[index[known]]
    table[known, 1] = 3**0.25 * prior.moments.double().cpu()[index[known]].sqrt()
    table[known, 2] = index[known].double()
    table[known, 3] = prior.largest_coordination().cpu()[index[known]]
    reference, c6 = torch.full((kinds, 8), 1e3).double(), torch.zeros(kinds, kinds, 8, 8).double()
    reference[:, :7], c6[:, :, :7, :7] = prior.reference_coordination().cpu(), prior.c6.double().cpu()
    start, inverse = _taper(prior.cutoff, prior.switch_width)
    return D3Parameters(prior, prior.cutoff, start, inverse, table, reference, c6)


_KNOWN: dict[type[Prior], Callable[[Any, list[int]], PairParameters | D3Parameters]] = {
    ZBL: _zbl,
    PairPotential: _pair_potential,
    D2: _d2,
    Coulomb: _coulomb,
    D3: _d3,
}
