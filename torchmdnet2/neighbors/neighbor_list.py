"""NeighborList: the one result type of every neighbor search.

Shapes: N atoms, E directed edges of all structures in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.exchange import Exchange, with_ghosts
from ..system import System

__all__ = [
    "SAME_PLACE", "NeighborList", "coincident", "refuse_coincident", "row_pointers", "safe_norm", "sort_edges",
    "upper_half", "with_room",
]  # fmt: skip


SAME_PLACE = 1e-3
"""Å. Atoms that are closer lie at the same place: files give positions with three decimals at least."""


@dataclass(eq=False)
class NeighborList:
    """Directed edges within a cutoff, as compressed sparse rows (CSR) by receiver.

    Edge e joins receiver i = edge_index[0, e] to sender j = edge_index[1, e] in the periodic image
    shift[e]: r = pos[j] + shift·cell − pos[i]. Every directed edge is listed (unless `half`), no atom is its own
    neighbor except through a periodic image, and edges are sorted by i, then j, then shift.

    Attributes:
        edge_index: [2, E] integers (receiver, sender).
        shift: [E, 3] integer cell shifts.
        row_ptr: [N + 1] integers; the edges of receiver i are row_ptr[i] … row_ptr[i+1] − 1.
        cutoff: Å.
        half: each unordered pair is listed once instead of twice.
        exchange: where rows of ghost atoms come from, which have no edges and follow the others; None:
            there are no such atoms.
    """

    edge_index: Tensor
    shift: Tensor
    row_ptr: Tensor
    cutoff: float
    half: bool = False
    exchange: Exchange | None = None

    @property
    def num_edges(self) -> int:
        """E, directed edges."""
        return self.edge_index.shape[1]

    @classmethod
    def concatenate(cls, lists: Sequence[NeighborList]) -> NeighborList:
        """Return the list of `System.concatenate(systems)` from the lists of its parts, in the same order.

        Args:
            lists: one for each system, of one cutoff.

        Raises:
            ValueError: no list is given, or they differ in cutoff or in `half`.
        """
        if not lists:
            raise ValueError("NeighborList.concatenate needs at least one list")
        first = lists[0]
        if any((n.cutoff, n.half) != (first.cutoff, first.half) for n in lists):
            raise ValueError("neighbor lists with different cutoffs, or half and full ones, cannot be joined")
        edges, rows, atoms, total = [], [first.row_ptr[:1]], 0, 0
        for part in lists:
            edges.append(part.edge_index + atoms)
            rows.append(part.row_ptr[1:] + total)
            atoms += part.row_ptr.shape[0] - 1
            total += part.num_edges
        shift = torch.cat([part.shift for part in lists])
        return cls(torch.cat(edges, 1), shift, torch.cat(rows), first.cutoff, first.half)

    def to(self, device: torch.device | str) -> NeighborList:
        """Return the same list on another device.

        Args:
            device: where the tensors go.
        """
        return replace(
            self, edge_index=self.edge_index.to(device), shift=self.shift.to(device), row_ptr=self.row_ptr.to(device)
        )

    def complete(self, rows: Tensor) -> Tensor:
        """Return rows of the atoms [N, …] in which those of ghosts, if there are any, are taken from the atoms' owners.

        Args:
            rows: of the local atoms and ghosts, [N, …].
        """
        return rows if self.exchange is None else with_ghosts(rows[: self.exchange.num_local], self.exchange)

    def vectors(self, system: System) -> Tensor:
        """Return edge vectors pos[j] + shift·cell − pos[i] in Å, [E, 3], differentiable in positions and cell.

        Args:
            system: what the list was made for; its positions [N, 3], Å, may have moved.
        """
        receiver, sender = self.edge_index
        vectors = system.pos.index_select(0, sender) - system.pos.index_select(0, receiver)
        if not bool(system.pbc.any()):
            return vectors
        cell = system.cell[0] if system.num_systems == 1 else system.cell[system.batch[receiver]]
        shift = self.shift.to(system.dtype)
        return vectors + (shift @ cell if cell.ndim == 2 else torch.einsum("ei,eij->ej", shift, cell))

    def distances(self, system: System) -> Tensor:
        """Return edge lengths in Å, [E], differentiable; the gradient of a zero distance is zero.

        Args:
            system: what the list was made for; its positions [N, 3], Å, may have moved.
        """
        return safe_norm(self.vectors(system))


def with_room(size: int) -> int:
    """Return the size of buffers that are replaced where it is not enough: a reserve of a thirtieth, and a multiple of
    16, since Triton specialises kernels on that."""
    return -(-(size + size // 32 + 1) // 16) * 16


def safe_norm(vectors: Tensor) -> Tensor:
    """Return the Euclidean norm along the last axis; its gradient at the zero vector is zero instead of NaN."""
    square = (vectors * vectors).sum(-1)
    zero = square == 0
    return torch.where(zero, torch.zeros_like(square), torch.where(zero, torch.ones_like(square), square).sqrt())


def sort_edges(
    receiver: Tensor, sender: Tensor, shift: Tensor, num_atoms: int, cutoff: float, half: bool = False
) -> NeighborList:
    """Sort edges by receiver, sender, shift and compress the rows.

    Args:
        receiver: [E] integers.
        sender: [E] integers.
        shift: [E, 3] integers.
        num_atoms: N.
        cutoff: Å.
        half: keep each unordered pair once: i < j, or i = j with the first non-zero shift positive.
    """
    receiver, sender, shift = receiver.long(), sender.long(), shift.long()
    if half:
        keep = upper_half(receiver, sender, shift)
        receiver, sender, shift = receiver[keep], sender[keep], shift[keep]
    if shift.numel():
        low = shift.amin(0)
        span = shift.amax(0) - low + 1
        s = shift - low
        # pair and shift keys separately: together they can pass 2^63 for stray atoms of a large system
        order = torch.argsort((s[:, 0] * span[1] + s[:, 1]) * span[2] + s[:, 2], stable=True)
        order = order[torch.argsort((receiver * num_atoms + sender)[order], stable=True)]
        receiver, sender, shift = receiver[order], sender[order], shift[order]
    return NeighborList(torch.stack([receiver, sender]), shift, row_pointers(receiver, num_atoms), float(cutoff), half)


def upper_half(receiver: Tensor, sender: Tensor, shift: Tensor) -> Tensor:
    """Return which edges name each pair once, [E]: receiver < sender, or the same atom and a first non-zero shift above
    0."""
    s0, s1, s2 = shift.unbind(1)
    upper = (s0 > 0) | ((s0 == 0) & ((s1 > 0) | ((s1 == 0) & (s2 > 0))))
    return (receiver < sender) | ((receiver == sender) & upper)


def row_pointers(receiver: Tensor, num_atoms: int) -> Tensor:
    """Return where the edges of each atom begin in a list sorted by receiver, [N + 1], of the receivers' type."""
    row_ptr = torch.zeros(num_atoms + 1, dtype=receiver.dtype, device=receiver.device)
    row_ptr[1:] = torch.bincount(receiver, minlength=num_atoms).cumsum(0)
    return row_ptr


def refuse_coincident(neighbors: NeighborList, system: System) -> None:
    """Refuse two atoms at the same place, whose energy and forces mean nothing.

    Raises:
        ValueError: two atoms are at the same place; the message names both.
    """
    system = system.detach()
    vectors = neighbors.vectors(system)
    if bool(((vectors * vectors).sum(1) < SAME_PLACE**2).any()):
        raise coincident(neighbors, system)


def coincident(neighbors: NeighborList, system: System) -> ValueError:
    """Return the error for the closest two atoms of a list, or for an atom and its periodic image."""
    distances = neighbors.distances(system.detach())
    edge = int(distances.argmin())
    i, j = neighbors.edge_index[:, edge].tolist()
    other = "its own periodic image" if i == j else f"atom {j}"
    return ValueError(
        f"atom {i} and {other} are at the same place ({float(distances[edge]):.2g} Å apart), where energy and forces "
        "mean nothing"
    )
