"""A domain on the compiled kernels of the CPU: rows of the local atoms, ghosts as senders.

Shapes: n local atoms, N with the copies after them, M rows of local atoms and ghosts, E directed edges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.compiling_cpu import compiled
from ..kernels.interfaces import CpuRows, CpuSums
from ..kernels.numba_pool import run_on_threads
from ..potential.potential import Potential
from ..potential.refusals import SAME_PLACE
from ..system import System
from .cpu_step import CpuModel
from .domain import SKIN, Domain, DomainValues, check_on_cluster, list_edges, voigt
from .select import constant_energies, list_cutoffs

__all__ = ["CompiledDomain"]


class CompiledDomain(Domain):
    """By the kernels that numba compiles, in float32. The first evaluation is checked against the potential in float64.

    Args:
        potential: on the CPU, in float32; one that `backends.compiled_reason` finds nothing against.
        charge: total charge in e of the whole structure.
    """

    def __init__(self, potential: Potential, charge: float):
        super().__init__(potential, charge)
        self._model = CpuModel(potential)
        self._factor = float(self._model.net.charge_input(torch.full((1,), charge, dtype=torch.float64)))
        cutoffs = list_cutoffs(potential.cutoff, [term.cutoff for term in self._model.terms])
        self._lists = [_Rows(cutoff) for cutoff in cutoffs]
        self._checked = False

    def _prepare(self) -> None:
        num_local = self.num_local
        everyone = torch.from_numpy(self.numbers)
        self.potential.check_elements(everyone)
        somewhere = System(z=everyone, pos=torch.zeros(len(everyone), 3, dtype=torch.float64))
        model = self._model
        local = somewhere.z[:num_local]
        self._isolated = model.isolated[local].numpy() if self.potential.subtract_isolated else np.zeros(num_local)
        self._constant = constant_energies(self.potential, System(z=local, pos=somewhere.pos[:num_local])).numpy()
        for prior in self.potential.priors:
            prior.check(somewhere)
        self._terms = [(term, term.prepare(somewhere)) for term in model.terms]
        self._charges = np.full(num_local, self._factor, dtype=np.float32)

    def _list(self, pos: NDArray[np.float64]) -> None:
        for rows in self._lists:
            rows.list_anew(pos, self.num_local, self._row_of)

    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        if not self._checked and self.num_local:
            self._check(pos)
            self._checked = True
        n = self.num_local
        for rows in self._lists:
            pair = rows.find(pos)
            if pair is not None:
                raise self._coincident(*pair)
        net = self._lists[0].rows
        self.num_edges = int(net.row_ptr[-1])
        energy, gradient = self._model.net.run_domain(
            self.numbers, net.row_ptr, net.sender, net.vectors, self._charges, self._exchange
        )
        forces, virial = np.zeros((len(self.numbers), 3)), np.zeros((n, 9))
        sum_edges(net.row_ptr, net.sender, net.vectors, gradient, forces, virial)
        energies = energy.astype(np.float64) - self._isolated
        if self.charge == 0 and self.potential.subtract_isolated:
            energies[net.row_ptr[1:] == net.row_ptr[:-1]] = 0
        energies += self._constant
        own = self._add_ghost_forces(torch.from_numpy(forces))
        # priors give each atom the whole of its force
        self._add_terms(pos, CpuSums(energies, own, virial, np.zeros(n)))
        return DomainValues(energies, own, voigt(torch.from_numpy(virial)).numpy())

    def _add_terms(self, pos: NDArray[np.float64], sums: CpuSums) -> None:
        for term, prepared in self._terms:
            found = min((r for r in self._lists if r.cutoff >= term.cutoff), key=lambda r: r.cutoff)
            add: Callable = prepared.add
            extra = {"exchange": self._exchange} if term.exchanges else {}

            def run(add: Callable = add, rows: CpuRows = found.rows, extra: dict = extra) -> None:
                add(pos, rows, sums, **extra)

            work = term.cost * int(found.rows.row_ptr[-1])
            run_on_threads(run, self._model._threads[0], work, max(1, self.num_local), True)

    def _check(self, pos: NDArray[np.float64]) -> None:
        """Compare the kernels with the potential in float64, on a cluster of local atoms."""
        other = copy.copy(self)
        other._checked, other._lists = True, [_Rows(rows.cutoff) for rows in self._lists]
        check_on_cluster(other, self.numbers[: self.num_local], pos, self._model.isolated)

    def describe(self) -> str:
        kind = type(self.potential.representation).__name__
        return f"compiled {kind} kernels (numba), float32, on up to {torch.get_num_threads()} threads of cpu"


class _Rows:
    """Edges of the local atoms within a cutoff.

    Attributes:
        cutoff: Å.
        rows: those of the positions last given.
    """

    def __init__(self, cutoff: float):
        self.cutoff = cutoff

    def list_anew(self, pos: NDArray[np.float64], num_local: int, row_of: NDArray[np.integer]) -> None:
        """List edges up to cutoff + SKIN; `row_of` as of `Domain.set_atoms`."""
        edges = list_edges(pos, num_local, self.cutoff + SKIN).numpy()
        self._sender = edges[1].copy()
        self._row = row_of[self._sender]
        self._ptr = np.zeros(num_local + 1, np.int64)
        self._ptr[1:] = np.bincount(edges[0], minlength=num_local).cumsum()
        room = len(self._sender)
        self.rows = CpuRows(
            np.zeros(num_local + 1, np.int64), np.empty(room, np.int64), np.empty((room, 3), np.float32), self.cutoff
        )

    def find(self, pos: NDArray[np.float64]) -> tuple[int, int] | None:
        """Take the listed edges that are within the cutoff; gives two atoms at the same place, if there are."""
        rows = self.rows
        nearest = select_edges(
            self._ptr,
            self._sender,
            self._row,
            pos,
            self.cutoff**2,
            rows.row_ptr,
            rows.sender,
            rows.vectors,
            SAME_PLACE**2,
        )
        if nearest < 0:
            return None
        return int(np.searchsorted(self._ptr, nearest, side="right")) - 1, int(self._sender[nearest])


@compiled(error_model="numpy")
def select_edges(ptr, listed, row, pos, limit, row_ptr, sender, vectors, least):
    """Copy the edges shorter than √limit into compressed rows.

    Args:
        ptr: [n + 1], listed: [≥ E] int64: listed senders of each atom, and their rows [≥ E].
        pos: [N, 3] Å.
        limit, least: Å².
        row_ptr [n + 1], sender [≥ E] int64, vectors [≥ E, 3] float32: filled.

    Returns:
        A listed edge shorter than √least, −1 where there is none.
    """
    found, wrong = 0, -1
    for i in range(len(ptr) - 1):
        row_ptr[i] = found
        px, py, pz = pos[i, 0], pos[i, 1], pos[i, 2]
        for e in range(ptr[i], ptr[i + 1]):
            j = listed[e]
            x, y, z = pos[j, 0] - px, pos[j, 1] - py, pos[j, 2] - pz
            square = x * x + y * y + z * z
            if square < limit:
                if square < least:
                    wrong = e
                sender[found] = row[e]
                vectors[found, 0], vectors[found, 1], vectors[found, 2] = x, y, z
                found += 1
    row_ptr[len(ptr) - 1] = found
    return wrong


@compiled(error_model="numpy")
def sum_edges(row_ptr, sender, vectors, gradient, forces, virial):
    """Add the forces [M, 3] and row virials [n, 9] of dE/dvector [≥ E, 3]: ghosts have no edges."""
    for i in range(len(row_ptr) - 1):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j = sender[e]
            for a in range(3):
                g = gradient[e, a]
                forces[i, a] += g
                forces[j, a] -= g
                for b in range(3):
                    virial[i, 3 * b + a] += vectors[e, b] * g
