"""Rows of ghost atoms, which are copies of atoms of other domains or of periodic images, from the atoms' owners.

A domain has n local atoms and, after them, g ghosts: N = n + g. What neighbors read of an atom is computed where it is
local, and its copies get it by an exchange; what the copies' readers add to its gradient goes back the other way.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["CopyExchange", "DomainExchange", "Exchange", "with_ghosts"]


class Exchange(Protocol):
    """Copies rows of atoms to their ghosts, and sums gradients of ghosts. All domains take part in each call, in the
    same order, also those without atoms.

    Attributes:
        num_local: n.
        num_ghosts: g.
    """

    num_local: int
    num_ghosts: int

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows of the atoms that the ghosts are copies of, [g, …], from rows of the local atoms [n, …]."""

    def reverse(self, rows: Tensor) -> Tensor:
        """Return sums over all copies of each local atom, [n, …], from rows of the ghosts [g, …]."""


class DomainExchange(Exchange, Protocol):
    """An exchange that can follow a step which sorts its local atoms."""

    def reordered(self, place: Tensor) -> DomainExchange:
        """Return the exchange for local atoms in another order: atom i has row place[i], [n] integers on the device of
        the rows.

        Nothing is exchanged by this; the order of the ghosts stays.
        """


class CopyExchange:
    """The exchange of a single domain, whose ghosts are all periodic images of its local atoms.

    Args:
        num_local: n.
        owner: [g] integers, the local atom that each ghost is a copy of.
    """

    def __init__(self, num_local: int, owner: Tensor):
        self.num_local, self.num_ghosts, self._owner = num_local, owner.shape[0], owner.long()

    def forward(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self._owner)

    def reverse(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(self.num_local, *rows.shape[1:]).index_add(0, self._owner, rows)

    def reordered(self, place: Tensor) -> CopyExchange:
        return CopyExchange(self.num_local, place[self._owner.to(place.device)])


def with_ghosts(rows: Tensor, exchange: Exchange | None) -> Tensor:
    """Return rows of all atoms [N, …] from those of the local ones [n, …], differentiable once; None: no ghosts."""
    return rows if exchange is None else _WithGhosts.apply(rows, exchange)


class _WithGhosts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return torch.cat([rows, exchange.forward(rows)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        n = ctx.exchange.num_local
        return gradient[:n] + ctx.exchange.reverse(gradient[n:].contiguous()), None
