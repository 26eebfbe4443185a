"""Heads of other properties than the energy, evaluated by PyTorch on features that kernels have computed.

Energies and forces do not depend on them, so they are not part of the step: they run when results are wanted.

Shapes: N atoms, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..neighbors import NeighborList, neighbor_list
from ..neighbors.pairs import PairLists
from ..potential.graph import Features, Graph, PropertyHead
from ..potential.potential import Potential
from ..system import System

__all__ = ["PropertyHeads"]


class PropertyHeads:
    """The heads of a potential except that of the energy.

    Args:
        potential: its weights are read when results are wanted.
    """

    def __init__(self, potential: Potential):
        heads: dict[str, PropertyHead] = dict(potential.properties.items())  # type: ignore[arg-type]
        self._names = list(heads)
        heads.pop("charges", None)  # they are computed in the step
        self._heads = heads
        self._cutoff, self._dtype = potential.cutoff, potential.dtype

    @property
    def read_features(self) -> bool:
        """Whether some heads read features."""
        return bool(self._heads)

    def __call__(self, charges: Tensor | None, features: Tensor | None, system: System | None) -> dict[str, Tensor]:
        """Return properties by name, as `Result.properties`.

        Args:
            charges: [N] those of the head of charges; None without.
            features: [N, F] scalar features of the atoms; None if no head reads them.
            system: N atoms; None if no head reads it.
        """
        found = {} if charges is None else {"charges": charges}
        if not self._heads:
            return {name: found[name] for name in self._names}
        assert features is not None and system is not None
        reads_edges = any(head.reads_edges for head in self._heads.values())
        neighbors = neighbor_list(system, self._cutoff) if reads_edges else _no_edges(system, self._cutoff)
        graph = Graph.build(system, neighbors, self._dtype, PairLists(system))
        for name, head in self._heads.items():
            found[name] = head(Features(features), graph).detach()
        return {name: found[name] for name in self._names}


def _no_edges(system: System, cutoff: float) -> NeighborList:
    """Return an empty list."""
    n, device = system.num_atoms, system.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    return NeighborList(zeros(2, 0), zeros(0, 3), zeros(n + 1), cutoff)
