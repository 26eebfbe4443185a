"""What only some trainings need of their frames: labels of property heads, positions, and lists for priors that read
the network's charges.

The energies of such priors change with the weights, so they cannot be taken from the labels; they are evaluated and
differentiated in every step.

Shapes: B frames in a batch, N atoms that it has room for, E edges that a list has room for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...data.labels import LABELS
from ...neighbors import NeighborList
from ...runtime.padded import PaddedList
from ...system import System
from .frame_rows import Gathered, Rows

__all__ = ["EdgeRows", "Further", "FurtherPart", "FurtherTables"]

_FAR = 10.0
"""Å between the images of the atom that takes the unused edges, for lists that reach any distance."""


@dataclass(eq=False)
class EdgeRows:
    """The directed edges of some frames, B of them with E edges.

    Attributes:
        rows: [E, 5] int32: receiver and sender within the frame, and the shift.
        count: [B] edges of each frame.
    """

    rows: np.ndarray
    count: np.ndarray

    @classmethod
    def of_list(cls, edges: NeighborList, batch: np.ndarray, num_frames: int) -> EdgeRows:
        """The edges of a list; batch: [N] number of the frame of each atom, ascending."""
        start = np.searchsorted(batch, np.arange(num_frames))[batch]
        ends, shift = edges.edge_index.numpy(), edges.shift.numpy()
        rows = np.concatenate([ends - start[ends[0]], shift.T]).T.astype(np.int32)
        return cls(rows, np.bincount(batch[ends[0]], minlength=num_frames))

    @classmethod
    def of_all_pairs(cls, sizes: np.ndarray) -> EdgeRows:
        """All pairs of each molecule, as `priors.pairs.all_pairs`; sizes: [B] its atoms."""
        return cls(np.concatenate([_pairs_within(n) for n in sizes.tolist()]), sizes * (sizes - 1))


@lru_cache(maxsize=64)
def _pairs_within(atoms: int) -> np.ndarray:
    """Rows of `EdgeRows` for all pairs of a molecule."""
    ends = np.argwhere(~np.eye(atoms, dtype=bool))
    return np.concatenate([ends, np.zeros((len(ends), 3))], 1).astype(np.int32)


@dataclass(eq=False)
class FurtherPart:
    """Of some frames, B of them with N atoms.

    Attributes:
        batch: [N] number of the frame of each atom, ascending.
        labels: name -> [N, …] or [B, …] as in `data.labels`; NaN where absent.
        pos: [N, 3], cell: [B, 3, 3] Å, pbc: [B, 3].
        lists: cutoff in Å -> directed edges within it.
    """

    batch: np.ndarray
    labels: dict[str, np.ndarray]
    pos: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    lists: dict[float, EdgeRows]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes on a device, without what each frame has."""
        rows = [self.pos, *self.labels.values()]
        return sum(8 * x.size for x in rows) + sum(each.rows.nbytes for each in self.lists.values())


@dataclass(eq=False)
class Further:
    """Of a batch; B + 1 structures, the last being the room that is not needed.

    Attributes:
        labels: name -> [N, …] or [B + 1, …] float64; NaN where absent.
        pos: [N, 3], cell: [B + 1, 3, 3] Å float64, pbc: [B + 1, 3].
        lists: cutoff in Å -> edges of `with_spare_atom`.
    """

    labels: dict[str, Tensor]
    pos: Tensor
    cell: Tensor
    pbc: Tensor
    lists: dict[float, NeighborList]

    def system(self, z: Tensor, structure: Tensor, charge: Tensor) -> System:
        """The frames, and further atoms at the origin of structures of their own.

        Args:
            z, structure: [N or more].
            charge: [B + 1 or more], one for each structure.
        """
        atoms, structures = len(z) - len(self.pos), len(charge) - len(self.cell)
        return System(
            z=z,
            pos=torch.cat([self.pos, self.pos.new_zeros(atoms, 3)]),
            batch=structure,
            cell=torch.cat([self.cell, self.cell.new_zeros(structures, 3, 3)]),
            pbc=torch.cat([self.pbc, self.pbc.new_zeros(structures, 3)]),
            charge=charge,
            spin=torch.zeros_like(charge, dtype=torch.long),
        )

    def with_spare_atom(self, z: Tensor, structure: Tensor, charge: Tensor) -> System:
        """The frames, and one atom in a structure of its own, whose image far away takes the unused edges of the lists.

        Args:
            z, structure: [N].
            charge: [B + 1].
        """
        last = structure.new_full((1,), len(self.cell))
        system = self.system(
            torch.cat([z, z[:1]]), torch.cat([structure, last]), torch.cat([charge, charge.new_zeros(1)])
        )
        reach = max((c for c in self.lists if math.isfinite(c)), default=_FAR)
        spare = 2 * reach * torch.eye(3, dtype=self.cell.dtype, device=self.cell.device)
        return system.replace(cell=torch.cat([self.cell, spare[None]]))


class FurtherTables:
    """`FurtherPart`s as flat tensors on a device.

    Args:
        parts: of all frames, in their order; all with the same labels and cutoffs.
        atoms: rows of the atoms of each frame.
        device: where the tensors are.
    """

    def __init__(self, parts: Sequence[FurtherPart], atoms: Rows, device: torch.device):
        self.atoms, self.device = atoms, device
        first = parts[0]
        self._labels = {name: self._table([p.labels[name] for p in parts], np.nan) for name in first.labels}
        self._pos = self._table([p.pos for p in parts], 0.0)
        self._cell = self._table([p.cell for p in parts], 0.0)
        self._pbc = self._table([p.pbc for p in parts], 0.0).bool()
        self._lists = {cutoff: _List(parts, cutoff, device) for cutoff in first.lists}

    def _table(self, rows: list[np.ndarray], last: float) -> Tensor:
        """Rows of numbers in float64, and a last one that is filled with `last`."""
        table = np.concatenate([*rows, np.full((1, *rows[0].shape[1:]), last)])
        return torch.from_numpy(table.astype(np.float64)).to(self.device)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        tables = [*self._labels.values(), self._pos, self._cell, self._pbc, *(x.table for x in self._lists.values())]
        return sum(t.numel() * t.element_size() for t in tables)

    def edges(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The room for edges that a batch of these frames needs in each list."""
        return tuple(int(each.num_edges[list(chosen)].sum()) for each in self._lists.values())

    def batch(self, frame: Tensor, num_atoms: int, edges: Sequence[int]) -> Further:
        """Gather a batch; nothing is read back from the device.

        Args:
            frame: [B + 1] frame numbers; the one after the last has no rows.
            num_atoms: N.
            edges: room in each list.
        """
        atoms = self.atoms.gather(frame, num_atoms)
        return Further(
            labels={
                name: table.index_select(0, atoms.source if LABELS[name].per_atom else frame)
                for name, table in self._labels.items()
            },
            pos=self._pos.index_select(0, atoms.source),
            cell=self._cell.index_select(0, frame),
            pbc=self._pbc.index_select(0, frame),
            lists={
                cutoff: each.batch(cutoff, frame, atoms, num_atoms, room)
                for (cutoff, each), room in zip(self._lists.items(), edges, strict=True)
            },
        )


class _List:
    """One list of all frames; a row of `table` is receiver and sender within the frame, and the shift."""

    def __init__(self, parts: Sequence[FurtherPart], cutoff: float, device: torch.device):
        found = [part.lists[cutoff] for part in parts]
        self.num_edges = np.concatenate([each.count for each in found])
        self.rows = Rows(self.num_edges, device)
        last = torch.tensor([[0, 0, 1, 0, 0]], dtype=torch.int32, device=device)
        self.table = torch.cat([*(torch.from_numpy(each.rows).to(device) for each in found), last])

    def batch(self, cutoff: float, frame: Tensor, atoms: Gathered, num_atoms: int, room: int) -> PaddedList:
        """The edges of a batch; unused ones, from the table's last row, join atom N to its next image."""
        edges = self.rows.gather(frame, room)
        row = self.table.index_select(0, edges.source).long()
        first = atoms.ptr.index_select(0, edges.owner)[:, None]
        ends = torch.where(edges.used[:, None], row[:, :2] + first, num_atoms)
        row_ptr = torch.searchsorted(ends[:, 0].contiguous(), torch.arange(num_atoms + 2, device=row.device))
        return PaddedList(ends.T, row[:, 2:], row_ptr, cutoff)
