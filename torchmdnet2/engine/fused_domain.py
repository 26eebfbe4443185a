"""A domain on the fused kernels of the GPU: rows of the local atoms, ghosts as senders.

Local atoms are sorted along a space-filling curve, so that atoms that are near in space are near in memory.

Shapes: n local atoms, N with the copies after them, M rows of local atoms and ghosts, E directed edges.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.interfaces import FIXED_POINT, Atoms, Buffers, Edges, TermLaunch, TermSums
from ..neighbors.neighbor_list import SAME_PLACE, with_room
from ..neighbors.triton_search import SkinList
from ..potential.potential import Potential
from ..system import System
from .domain import SKIN, Domain, DomainValues, check_on_cluster, voigt
from .fused_step import FusedModel, SpatialOrder
from .select import HeldTerm, Offsets, list_cutoffs

__all__ = ["FusedDomain"]


class FusedDomain(Domain):
    """Evaluates a domain on Triton kernels, in float32 or in mixed precision.

    The first use of each set of launch shapes is checked against the potential in float64.

    Args:
        potential: on a CUDA device (or under Triton's interpreter), in float32; one that
            `backends.fused_reason` is "".
        charge: total charge in e of the whole structure.
        precision: "native" or "mixed".
    """

    def __init__(self, potential: Potential, charge: float, precision: str = "native"):
        super().__init__(potential, charge)
        self.device = potential.device
        self._model = FusedModel(potential, precision)
        self._net: Any = self._model.net
        self._factor = float(self._net.charge_input(torch.full((1,), charge, dtype=torch.float64)))
        self._checked: set[Any] = set()
        self._checking: Any = None  # launch shapes that are not to be chosen by the number of atoms
        self._start()

    def _start(self) -> None:
        """Initialise without memory for atoms."""
        cutoffs = list_cutoffs(self.potential.cutoff, [term.cutoff for term in self._model.terms])
        self._cutoffs = cutoffs
        self._lists = [SkinList(cutoff, SKIN, SAME_PLACE, self.device) for cutoff in cutoffs]
        self._buffers: Buffers | None = None
        self._room: tuple[Any, ...] = ()
        self._host: list[Tensor] = []
        self._order: Tensor | None = None
        self._given = self._listed_from = torch.zeros(0, 3, dtype=torch.float64, device=self.device)

    def __call__(self, pos: NDArray[np.float64]) -> DomainValues:
        # Triton launches on the current device
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            return super().__call__(pos)

    def _prepare(self) -> None:
        self._order = None
        # exchanges lie between the kernels
        self._shapes = self._checking or replace(self._net.launch_shapes(self.num_local), overlap=0)

    def _must_list(self, pos: NDArray[np.float64]) -> bool:
        self._given = self._upload(pos)
        if self._order is None:
            self._take_order(self._given)
        elif self.num_local:
            moved = (self._given - self._listed_from).square().sum(1)
            if float(moved[: self.num_local].amax().sqrt() + moved.amax().sqrt()) <= SKIN:
                return False
        else:
            return False
        self._listed_from = self._given
        return True

    def _upload(self, pos: NDArray[np.float64]) -> Tensor:
        if self.device.type == "cpu":
            return torch.from_numpy(pos.copy())
        staged = self._staging(0, pos.size).view(pos.shape)
        staged.numpy()[:] = pos
        return staged.to(self.device, non_blocking=True)

    def _staging(self, place: int, size: int) -> Tensor:
        """Return memory for float64 numbers that the GPU reads and writes directly."""
        while place >= len(self._host):
            self._host.append(torch.empty(0, dtype=torch.float64))
        if len(self._host[place]) < size:
            self._host[place] = torch.empty(with_room(size), dtype=torch.float64, pin_memory=True)
        return self._host[place][:size]

    def _take_order(self, pos: Tensor) -> None:
        """Sort the local atoms and all their data."""
        n, device = self.num_local, self.device
        place = torch.arange(n, device=device)
        order = place.clone()
        if n:
            zero = torch.zeros(n, dtype=torch.int32, device=device)
            curve = SpatialOrder(n, 1, pos[:n].contiguous(), zero)
            curve(zero, pos.new_zeros(1, 3, 3), torch.zeros(1, 3, dtype=torch.bool, device=device))
            order = curve.order
            place[order] = torch.arange(n, device=device)
        self._order = torch.cat([order, torch.arange(n, len(pos), device=device)])
        row = torch.from_numpy(self._row_of).to(device)[self._order]
        here = row < n
        row[here] = place[row[here]]
        self._row = row.int()
        z = torch.from_numpy(self.numbers).to(device)
        self._take_elements(torch.cat([z[:n][order], z[n:]]))
        self._placed_exchange = self._exchange.reordered(place)

    def _take_elements(self, z: Tensor) -> None:
        """Set the atomic numbers [M] of the rows."""
        n, device, potential = self.num_local, self.device, self.potential
        potential.check_elements(z)
        everyone = System(z=z, pos=torch.zeros(len(z), 3, dtype=torch.float64, device=device))
        local = System(z=z[:n], pos=everyone.pos[:n])
        for prior in potential.priors:
            prior.check(everyone)
        self._rows_z = z.int()
        self._offsets = Offsets(potential, self._model.isolated, local, self.charge == 0, numpy=False)
        self._factors = torch.full((n,), self._factor, device=device)
        self._batch = torch.zeros(n, dtype=torch.int32, device=device)
        self._ptr = torch.tensor([0, n], dtype=torch.int32, device=device)
        self._sums: TermSums | None = None
        if self._model.terms:
            energy = torch.zeros(n, dtype=torch.float64, device=device)
            self._sums = TermSums(energy, torch.zeros(n, 3, device=device), torch.zeros(n, 9, device=device))
        self._terms = [HeldTerm(term, self._cutoffs, len(z)) for term in self._model.terms]
        for held in self._terms:
            held.term.set_composition(held.buffers, everyone)

    def _list(self, pos: NDArray[np.float64]) -> None:
        assert self._order is not None
        where = self._given.index_select(0, self._order)
        before = self._lists[0].capacity
        for rows in self._lists:
            rows.list_anew(where, self.num_local, self._row)
        self._make_room(self._lists[0].capacity != before)

    def _make_room(self, other_edges: bool) -> None:
        """Allocate buffers of the network, unless those that are there are large enough."""
        n, rows = self.num_local, self.num_local + self._exchange.num_ghosts
        fits = bool(self._room) and not other_edges and self._room[0] == self._shapes
        if fits and n <= self._room[1] and rows <= self._room[2]:
            return
        self._buffers = None  # the old ones are freed before the new ones are made
        size, total = with_room(n), with_room(rows)
        self._room = self._shapes, size, max(size, total)
        self._buffers = self._net.allocate(size, self._lists[0].capacity, self._shapes, self._room[2] - size)

    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        if self.num_local and self._shapes not in self._checked:
            self._check(pos)
            self._checked.add(self._shapes)
        assert self._order is not None
        b = self._buffers
        where = self._given.index_select(0, self._order)
        for rows in self._lists:
            rows.select(where)
        lists = {r.cutoff: Edges(r.row_ptr, r.sender, r.vectors, r.cutoff) for r in self._lists}
        edges = lists[self._cutoffs[0]]
        atoms = Atoms(
            self._rows_z, self._factors, self._batch, self._ptr, where, exchange=self._placed_exchange
        )  # fmt: skip
        self._net.run(b, self._shapes, atoms, edges, True)
        for k, held in enumerate(self._terms):
            assert self._sums is not None and held.list_cutoff is not None
            launch = TermLaunch(k == 0, True, True, held.term.launch_shapes(self.num_local), {"PDL": 0})
            held.term.run(held.buffers, atoms, lists[held.list_cutoff], self._sums, launch)
        return self._download(*self._finished(b, edges))

    def _finished(self, b: Any, edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
        """Return energies [n], forces [n, 3] and virials [n, 6] in float64, in the order of the rows."""
        n, unit, ghosts = self.num_local, self._net.unit, self._exchange.num_ghosts
        energies = b.energy[:n].double() * unit
        self._offsets.add(energies, edges.row_ptr)
        forces = b.forces[:n] + self._placed_exchange.reverse(b.forces[n : n + ghosts])
        forces, virial = forces.double() * (unit / FIXED_POINT), b.virial[:n].double() * unit
        if self._sums is not None:
            energies, forces, virial = (
                energies + self._sums.energy, forces + self._sums.forces, virial + self._sums.virial
            )  # fmt: skip
        return energies, forces, voigt(virial)

    def _download(self, energies: Tensor, forces: Tensor, virial: Tensor) -> DomainValues:
        """Copy results to the host, by atom instead of by row; waits for the device."""
        n = self.num_local
        assert self._order is not None
        order = self._order[:n]
        given = [energies[:, None], forces, virial]
        by_atom = torch.cat([torch.empty_like(field).index_copy_(0, order, field).reshape(-1) for field in given])
        first = self._lists[0]
        state = torch.stack([first.row_ptr[-1], first.wrong[0], by_atom.isfinite().all().int()]).double()
        packed = torch.cat([by_atom, state])
        if self.device.type == "cuda":
            host = self._staging(1, len(packed))
            host.copy_(packed, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            packed = host
        values = packed.numpy()
        self.num_edges, self._finite = int(values[10 * n]), bool(values[10 * n + 2])
        if values[10 * n + 1]:
            pair = self._lists[0].wrong_pair()
            assert pair is not None
            raise self._coincident(*(int(self._order[k]) for k in pair))
        return DomainValues(values[:n], values[n : 4 * n].reshape(n, 3), values[4 * n : 10 * n].reshape(n, 6))

    def _is_finite(self, values: DomainValues) -> bool:
        return self._finite

    def _check(self, pos: NDArray[np.float64]) -> None:
        """Compare the kernels with the potential in float64, on a cluster of local atoms."""
        other = copy.copy(self)
        other._start()
        other._checking, other._checked = self._shapes, {self._shapes}
        isolated = self._model.isolated.cpu()
        check_on_cluster(other, self.numbers[: self.num_local], pos, isolated, self._model.precision)

    def atoms_that_fit(self) -> int | None:
        if self.device.type != "cuda" or not self.num_local:
            return None
        n, net = self.num_local, self._net
        rows, edges = n + self._exchange.num_ghosts, max(1, self._lists[0].num_listed)
        fields = 4 * net.weights.num_layers + 8
        row_bytes = 4 * net.weights.channels * 9 * fields
        needed = row_bytes * rows + 120 * edges
        return int(torch.cuda.get_device_properties(self.device).total_memory * 0.9 / needed * n)

    def describe(self) -> str:
        kind = type(self.potential.representation).__name__
        arithmetic = "float32" if self._model.precision == "native" else "mixed precision"
        return f"fused {kind} kernels (Triton), {arithmetic}, on {self.device}"
