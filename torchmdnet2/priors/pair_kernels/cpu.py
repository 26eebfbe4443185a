"""Pair priors on the CPU: what is prepared of a prior, and how its kernels are called. See gpu.py.

Shapes: N atoms, B structures, E directed edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ...core.exchange import Exchange
from ...kernels.interfaces import Array, CpuRows, CpuSums, CpuTerm, CpuTermOf
from ...neighbors.pairs import require_molecules
from ...potential.prior import Prior
from ...system import System
from .numba_kernels import KERNELS, coordination, coordination_forces, dispersion
from .parameters import D3Parameters, PairParameters, describe

__all__ = ["CpuD3Term", "CpuPairTerm", "make_cpu_term"]


_FAR = 1e100  # Å; infinity is not a number that the kernels can compare with


def make_cpu_term(prior: Prior, elements: Iterable[int]) -> CpuPairTerm | CpuD3Term:
    """The kernels of a prior.

    Args:
        prior: one that `parameters.unsupported_reason` finds nothing against.
        elements: atomic numbers that can occur.
    """
    parameters = describe(prior, elements)
    return CpuD3Term(parameters) if isinstance(parameters, D3Parameters) else CpuPairTerm(parameters)


class CpuPairTerm(CpuTerm):
    """A sum over pairs of one function of the distance."""

    def __init__(self, parameters: PairParameters):
        self.parameters = parameters
        self.cutoff, self.uses_charges = parameters.cutoff, parameters.source == "predicted"

    def prepare(self, system: System) -> CpuPairTermOf:
        return CpuPairTermOf(self.parameters, system)


class CpuPairTermOf(CpuTermOf):
    """A term for structures whose positions and cell alone change."""

    def __init__(self, parameters: PairParameters, system: System):
        self._parameters, n = parameters, system.num_atoms
        by_element = parameters.source == "element"
        self._key = system.z.numpy().copy() if by_element else np.arange(n)
        self._table = np.zeros((128 if by_element else n, 3))
        if parameters.source != "predicted":
            numbers = parameters.table if by_element else parameters.numbers_of(system)
            assert numbers is not None
            self._table[:, : numbers.shape[1]] = numbers.numpy()
        self._unused = np.zeros(n)
        self._constants = tuple(c.numpy() if isinstance(c, Tensor) else c for c in parameters.constants)
        self._all = None if math.isfinite(parameters.cutoff) else _atoms_of_structures(system)

    def add(self, pos: Array, rows: CpuRows | None, sums: CpuSums, charges: Array | None = None) -> None:
        p = self._parameters
        if p.source == "predicted":
            assert charges is not None
            self._table[:, 0] = charges
        slope = sums.charge_slope if p.source == "predicted" else self._unused
        last = sums.energy, sums.forces, sums.virial, slope
        if rows is None:
            assert self._all is not None
            KERNELS[p.radial](
                len(pos), *self._all, pos, self._key, self._table, p.strength, self._constants, p.mode, *last
            )
        else:
            KERNELS[p.radial](
                len(rows.row_ptr) - 1, rows.row_ptr, rows.sender, rows.vectors, self._key, self._table, p.strength,
                _limit(rows, p.cutoff), self._constants, p.mode, *last,
            )  # fmt: skip


class CpuD3Term(CpuTerm):
    """D3(BJ)."""

    cost, exchanges = 35, True

    def __init__(self, parameters: D3Parameters):
        self.parameters, self.cutoff = parameters, parameters.cutoff

    def prepare(self, system: System) -> CpuD3TermOf:
        return CpuD3TermOf(self.parameters, system)


class CpuD3TermOf(CpuTermOf):
    """D3(BJ) for structures whose positions and cell alone change."""

    def __init__(self, parameters: D3Parameters, system: System):
        self._parameters, n = parameters, system.num_atoms

        def array(values: Tensor) -> Array:
            return np.ascontiguousarray(values.numpy())

        self._z = system.z.numpy().copy()
        self._elements, self._reference = array(parameters.elements), array(parameters.reference)
        self._c6 = array(parameters.c6)
        self._none, self._none64 = np.empty((0, 3), np.float32), np.empty((0, 3))
        self._all = None if math.isfinite(parameters.cutoff) else _atoms_of_structures(system)
        self._weights, self._mixed = np.empty((n, 8)), np.empty((n, len(self._reference), 2, 8))
        self._by_coordination = np.empty(n)

    def add(
        self, pos: Array, rows: CpuRows | None, sums: CpuSums, charges: Array | None = None,
        exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        p = self._parameters
        if rows is None:
            assert self._all is not None
            pairs = *self._all, self._none, np.asarray(pos, np.float64), False
        else:
            pairs = rows.row_ptr[:-1], rows.row_ptr[1:], rows.sender, rows.vectors, self._none64, True
        edges = len(pairs[0]), *pairs, self._z, self._elements
        limits = _FAR if rows is None else _limit(rows, p.cutoff), p.start, p.inverse
        coordination(*edges, self._reference, self._c6, *limits, self._weights, self._mixed)
        _send(exchange, self._weights)
        dispersion(
            *edges, self._weights, self._mixed, *limits, p.prior.s6, p.prior.s8, p.prior.a1, p.prior.a2, sums.energy,
            sums.forces, sums.virial, self._by_coordination,
        )  # fmt: skip
        _send(exchange, self._by_coordination)
        coordination_forces(*edges, self._by_coordination, *limits, sums.energy, sums.forces, sums.virial)


def _atoms_of_structures(system: System) -> tuple[Array, Array, Array]:
    """For each atom, where in the list of atoms those of its structure begin and end; the list."""
    require_molecules(system)
    batch = system.batch.numpy()
    end = np.bincount(batch, minlength=system.num_systems).cumsum()
    start = np.concatenate([[0], end[:-1]])
    return start[batch], end[batch], np.argsort(batch, kind="stable")


def _send(exchange: Exchange | None, rows: Array) -> None:
    """Fill the rows of ghosts."""
    if exchange is not None:
        n = exchange.num_local
        rows[n:] = exchange.forward(torch.from_numpy(rows[:n])).numpy()


def _limit(rows: CpuRows, cutoff: float) -> float:
    """Å from which on edges do not count: rows of the term's own list end where it ends, to the last bit."""
    return _FAR if rows.cutoff <= cutoff else cutoff
