"""Pair priors on the CPU: what is prepared of a prior, and how its kernels are called. See gpu.py.

Shapes: N atoms, B structures, E directed edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...priors.base import Prior
from ...priors.pairs import require_molecules
from ...system import System
from .numba.d3 import coordination, coordination_forces, dispersion
from .numba.frame import KERNELS
from .parameters import D3Parameters, PairParameters, describe

__all__ = ["CpuD3Term", "CpuPairTerm", "CpuSums", "Rows", "make_cpu_term"]

Array = NDArray[Any]
_FAR = 1e100  # Å; infinity is not a number that the kernels can compare with


@dataclass(eq=False)
class Rows:
    """The directed pairs within a cutoff in Å: row_ptr [N + 1], sender [≥ E] int64, vectors [≥ E, 3] float32."""

    cutoff: float
    row_ptr: Array
    sender: Array
    vectors: Array


@dataclass(eq=False)
class CpuSums:
    """What the terms add to, float64.

    Attributes:
        energy [N] eV, forces [N, 3] eV/Å, virial [N, 9] eV of the rows.
        charge_slope: [N] eV/e, dE/dq of predicted charges.
    """

    energy: Array
    forces: Array
    virial: Array
    charge_slope: Array

    @classmethod
    def zeros(cls, num_atoms: int) -> CpuSums:
        return cls(np.zeros(num_atoms), np.zeros((num_atoms, 3)), np.zeros((num_atoms, 9)), np.zeros(num_atoms))


def make_cpu_term(prior: Prior, elements: Iterable[int]) -> CpuPairTerm | CpuD3Term:
    """The kernels of a prior.

    Args:
        prior: one that `parameters.unsupported_reason` finds nothing against.
        elements: atomic numbers that can occur.
    """
    parameters = describe(prior, elements)
    return CpuD3Term(parameters) if isinstance(parameters, D3Parameters) else CpuPairTerm(parameters)


class CpuPairTerm:
    """A sum over pairs of one function of the distance.

    Attributes:
        cutoff: Å of the edges that it needs, or further; infinity for none.
        uses_charges: it needs the charges of the network, and adds to `CpuSums.charge_slope`.
    """

    def __init__(self, parameters: PairParameters):
        self.parameters = parameters
        self.cutoff, self.uses_charges = parameters.cutoff, parameters.source == "predicted"

    def prepare(self, system: System) -> CpuPairComposition:
        """What depends on elements and structures.

        Raises:
            ValueError: a structure is periodic, and all pairs are summed.
        """
        return CpuPairComposition(self.parameters, system)


class CpuPairComposition:
    """A term for structures whose positions and cell alone change."""

    def __init__(self, parameters: PairParameters, system: System):
        self._parameters, n = parameters, system.num_atoms
        self._listed = math.isfinite(parameters.cutoff)
        by_element = parameters.source == "element"
        self._key = system.z.numpy().copy() if by_element else np.arange(n)
        self._table = np.zeros((128 if by_element else n, 3))
        if parameters.source != "predicted":
            numbers = parameters.table if by_element else parameters.numbers_of(system)
            assert numbers is not None
            self._table[:, : numbers.shape[1]] = numbers.numpy()
        self._unused = np.zeros(n)
        if not self._listed:
            require_molecules(system)
            self._batch = system.batch.numpy().copy()
            self._members = np.argsort(self._batch, kind="stable")
            self._ptr = np.zeros(system.num_systems + 1, np.int64)
            self._ptr[1:] = np.bincount(self._batch, minlength=system.num_systems).cumsum()

    def add(self, pos: Array, rows: Rows | None, sums: CpuSums, charges: Array | None = None) -> None:
        """Add to the sums.

        Args:
            pos: [N, 3] Å.
            rows: within the cutoff or further; None for all pairs.
            charges: [N] e, predicted by the network.
        """
        p = self._parameters
        if p.source == "predicted":
            assert charges is not None
            self._table[:, 0] = charges
        slope = sums.charge_slope if p.source == "predicted" else self._unused
        last = sums.energy, sums.forces, sums.virial, slope
        if rows is None:
            KERNELS[p.radial](
                self._ptr,
                self._members,
                pos,
                self._batch,
                self._key,
                self._table,
                p.strength,
                p.constants,
                p.mode,
                *last,
            )
        else:
            KERNELS[p.radial](
                rows.row_ptr, rows.sender, rows.vectors, self._key, self._table, p.strength,
                _limit(rows, p.cutoff), p.constants, p.mode, *last,
            )  # fmt: skip


class CpuD3Term:
    """D3(BJ)."""

    uses_charges = False

    def __init__(self, parameters: D3Parameters):
        self.parameters, self.cutoff = parameters, parameters.cutoff

    def prepare(self, system: System) -> CpuD3Composition:
        """What depends on elements and structures."""
        return CpuD3Composition(self.parameters, system)


class CpuD3Composition:
    """D3(BJ) for structures whose positions and cell alone change."""

    def __init__(self, parameters: D3Parameters, system: System):
        self._parameters, n = parameters, system.num_atoms

        def array(values: Tensor) -> Array:
            return np.ascontiguousarray(values.numpy())

        self._z = system.z.numpy().copy()
        self._elements, self._reference = array(parameters.elements), array(parameters.reference)
        self._c6 = array(parameters.c6)
        self._weights, self._mixed = np.empty((n, 8)), np.empty((n, len(self._reference), 2, 8))
        self._by_coordination = np.empty(n)

    def add(self, pos: Array, rows: Rows, sums: CpuSums, charges: Array | None = None) -> None:
        """As `CpuPairComposition.add`."""
        p = self._parameters
        edges = rows.row_ptr, rows.sender, rows.vectors, self._z, self._elements
        limits = _limit(rows, p.cutoff), p.start, p.inverse
        coordination(*edges, self._reference, self._c6, *limits, self._weights, self._mixed)
        dispersion(
            *edges, self._weights, self._mixed, *limits, p.prior.s6, p.prior.s8, p.prior.a1, p.prior.a2, sums.energy,
            sums.forces, sums.virial, self._by_coordination,
        )  # fmt: skip
        coordination_forces(*edges, self._by_coordination, *limits, sums.energy, sums.forces, sums.virial)


def _limit(rows: Rows, cutoff: float) -> float:
    """Å from which on edges do not count: rows of the term's own list end where it ends, to the last bit."""
    return _FAR if rows.cutoff <= cutoff else cutoff
