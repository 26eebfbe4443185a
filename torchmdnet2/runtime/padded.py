"""Structures with spare room, so that a model can be replayed on tensors whose sizes never change.

A padded structure ends with two dummy atoms in a structure of their own, twice the cutoff apart. Unused list entries
connect these two, so real atoms are unaffected, whatever the model does with its edges. Models that vanish at the
cutoff give no interaction between the dummy atoms either.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..neighbors import NeighborList
from ..output import RESULTS, Output
from ..potential import Result
from ..system import System

__all__ = ["PaddedList", "pad_list", "pad_system", "unpad"]

SPARE_ATOMS = 2


@dataclass(eq=False)
class PaddedList(NeighborList):
    """The pairs of a padded structure; its vectors are computed without copying values to the host."""

    def vectors(self, system: System) -> Tensor:
        receiver, sender = self.edge_index
        vectors = system.pos.index_select(0, sender) - system.pos.index_select(0, receiver)
        cell = system.cell.index_select(0, system.batch.index_select(0, receiver))
        return vectors + (self.shift.to(system.dtype)[:, :, None] * cell).sum(1)


def pad_list(row_ptr: Tensor, receiver: Tensor, sender: Tensor, shift: Tensor, cutoff: float) -> PaddedList:
    """A list with room for C edges.

    Args:
        row_ptr: [N + 1].
        receiver, sender: [C], shift: [C, 3]; anything beyond row_ptr[N].
        cutoff: Å.
    """
    capacity, last = receiver.shape[0], row_ptr.shape[0] - 1
    taken = torch.arange(capacity, device=receiver.device) < row_ptr[-1]
    edges = torch.stack([torch.where(taken, receiver, last), torch.where(taken, sender, last + 1)])
    rows = torch.cat([row_ptr, row_ptr.new_full((SPARE_ATOMS,), capacity)])
    return PaddedList(edges, torch.where(taken[:, None], shift, 0), rows, cutoff)


def pad_system(system: System, reach: float, element: int) -> System:
    """A structure more, of two atoms in vacuum.

    Args:
        system: N atoms in B structures.
        reach: Å, the largest cutoff of the lists that are padded.
        element: atomic number of the two.
    """
    far = system.pos.new_zeros(SPARE_ATOMS, 3)
    far[1, 0] = 2 * reach
    spare = System(z=torch.full((SPARE_ATOMS,), element, device=system.device), pos=far)
    return System.concatenate([system, spare])


def unpad(result: Result, outputs: Mapping[str, Output], num_atoms: int, num_systems: int) -> Result:
    """What belongs to the N atoms and B structures that were padded.

    Args:
        result: of a padded structure.
        outputs: of the potential.
        num_atoms, num_systems: N and B.
    """

    def piece(value: Tensor, output: Output) -> Tensor:
        return value[: num_atoms if output.per_atom else num_systems]

    found = {name: piece(value, RESULTS[name]) for name, value in vars(result).items() if isinstance(value, Tensor)}
    properties = {name: piece(value, outputs[name]) for name, value in result.properties.items()}
    return Result(**found, properties=properties)
