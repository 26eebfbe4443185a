"""Frames as rows of flat tables on the device, from which batches of fixed sizes are gathered.

Shapes: B frames in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...core.triton_launch import tl, triton
from ...data.labels import LABELS
from ...engine.autograd_term import PaddedList
from ...kernels.pair_ops import Pairs
from ...neighbors import NeighborList
from ...neighbors.neighbor_list import upper_half
from ...system import System

__all__ = [
    "Capacity",
    "EdgeRows",
    "Further",
    "FurtherPart",
    "FurtherTables",
    "Gathered",
    "PackedBatch",
    "PackedFrames",
    "Part",
    "Rows",
    "gather_frames",
    "pairs_of",
]


class Rows:
    """Finds the rows of each frame in a flat table; the frame after the last has none."""

    def __init__(self, sizes: np.ndarray, device: torch.device):
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        self.sizes = torch.from_numpy(np.append(sizes, 0)).to(device)
        self.offsets = torch.from_numpy(offsets).to(device)
        self.total = int(offsets[-1])

    def gather(self, frame: Tensor, capacity: int) -> Gathered:
        """Return rows of B frames, one after the other, in buffers of fixed size.

        Args:
            frame: [B + 1]; the last entry is the frame after the last, which gets the padding.
            capacity: the size of the buffers, at least what the frames need.
        """
        after = self.sizes[frame].cumsum(0)
        ptr = torch.cat([after.new_zeros(1), after[:-1], after.new_full((1,), capacity)])
        row = torch.arange(capacity, device=frame.device)
        owner = torch.searchsorted(after[:-1], row, right=True)
        source = (row + (self.offsets[frame] - ptr[:-1])[owner]).clamp(max=self.total)
        return Gathered(ptr, owner, owner < frame.shape[0] - 1, source)


@dataclass(eq=False)
class Gathered:
    """The rows of a table that a batch takes: those of its frames, then unused ones up to the capacity C.

    Attributes:
        ptr: [B + 2] first row of each frame, first unused row, and the end.
        owner: [C] number of the frame that each row belongs to, B for unused rows.
        used: [C] whether a row belongs to a frame.
        source: [C] index of each row in the table; the last row for unused ones.
    """

    ptr: Tensor
    owner: Tensor
    used: Tensor
    source: Tensor


# --- What only some trainings need of their frames: labels of property heads, positions, and lists for priors that
# read the network's charges ---
#
# The energies of such priors change with the weights, so they cannot be taken from the labels; they are evaluated and
# differentiated in every step.

_FAR = 10.0
"""Å between the images of the atom that takes the unused edges; larger than the cutoff of any list."""


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
        """Return the edges of a list; batch: [N] number of the frame of each atom, ascending."""
        start = np.searchsorted(batch, np.arange(num_frames))[batch]
        ends, shift = edges.edge_index.numpy(), edges.shift.numpy()
        rows = np.concatenate([ends - start[ends[0]], shift.T]).T.astype(np.int32)
        return cls(rows, np.bincount(batch[ends[0]], minlength=num_frames))

    @classmethod
    def of_all_pairs(cls, sizes: np.ndarray) -> EdgeRows:
        """Return all pairs of each molecule, as `priors.pairs.all_pairs`; sizes: [B] its atoms."""
        return cls(np.concatenate([_pairs_within(n) for n in sizes.tolist()]), sizes * (sizes - 1))


@lru_cache(maxsize=64)
def _pairs_within(atoms: int) -> np.ndarray:
    """Return the rows of `EdgeRows` for all pairs of a molecule."""
    ends = np.argwhere(~np.eye(atoms, dtype=bool))
    return np.concatenate([ends, np.zeros((len(ends), 3))], 1).astype(np.int32)


@dataclass(eq=False)
class FurtherPart:
    """Data of some frames for property heads and priors that read charges: B frames with N atoms.

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
        """Memory on a device, without that of each frame."""
        rows = [self.pos, *self.labels.values()]
        return sum(8 * x.size for x in rows) + sum(each.rows.nbytes for each in self.lists.values())


@dataclass(eq=False)
class Further:
    """Data of a batch for property heads and priors that read charges: B + 1 structures, the last being the padding.

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
        """Return the frames, and further atoms at the origin of separate structures.

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
        """Return the frames, and one atom in a separate structure, whose image far away takes the unused edges of the
        lists.

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
        """Return rows of numbers in float64, and a last one that is filled with `last`."""
        table = np.concatenate([*rows, np.full((1, *rows[0].shape[1:]), last)])
        return torch.from_numpy(table.astype(np.float64)).to(self.device)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        tables = [*self._labels.values(), self._pos, self._cell, self._pbc, *(x.table for x in self._lists.values())]
        return sum(t.numel() * t.element_size() for t in tables)

    def edges(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Return the number of edges that a batch of these frames needs in each list."""
        return tuple(int(each.num_edges[list(chosen)].sum()) for each in self._lists.values())

    def batch(self, frame: Tensor, num_atoms: int, edges: Sequence[int]) -> Further:
        """Gather a batch; nothing is read back from the device.

        Args:
            frame: [B + 1] frame numbers; the one after the last has no rows.
            num_atoms: N.
            edges: capacity of each list.
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
                cutoff: each.batch(cutoff, frame, atoms, num_atoms, capacity)
                for (cutoff, each), capacity in zip(self._lists.items(), edges, strict=True)
            },
        )


class _List:
    """One neighbor list of all frames; a row of `table` is receiver and sender within the frame, and the shift."""

    def __init__(self, parts: Sequence[FurtherPart], cutoff: float, device: torch.device):
        found = [part.lists[cutoff] for part in parts]
        self.num_edges = np.concatenate([each.count for each in found])
        self.rows = Rows(self.num_edges, device)
        last = torch.tensor([[0, 0, 1, 0, 0]], dtype=torch.int32, device=device)
        self.table = torch.cat([*(torch.from_numpy(each.rows).to(device) for each in found), last])

    def batch(self, cutoff: float, frame: Tensor, atoms: Gathered, num_atoms: int, capacity: int) -> PaddedList:
        """Return the edges of a batch; unused ones, from the table's last row, join atom N to its next image."""
        edges = self.rows.gather(frame, capacity)
        row = self.table.index_select(0, edges.source).long()
        first = atoms.ptr.index_select(0, edges.owner)[:, None]
        ends = torch.where(edges.used[:, None], row[:, :2] + first, num_atoms)
        row_ptr = torch.searchsorted(ends[:, 0].contiguous(), torch.arange(num_atoms + 2, device=row.device))
        return PaddedList(ends.T, row[:, 2:], row_ptr, cutoff)


# --- A whole training set on the device, and batches that are gathered from it there ---
#
# Positions of a data set do not change, so that what a step needs of a frame is fixed: elements, labels, and the
# vectors between neighbors. All of it is kept on the device in flat tensors; a batch is made by the device from frame
# numbers alone, at a fixed size, so that a CUDA graph can hold it.

_COPIED = ("r", "charge", "volume", "energy", "forces", "stress")
"""Entries of a batch that are copied from its frames."""


def pairs_of(neighbors: NeighborList) -> tuple[np.ndarray, np.ndarray]:
    """Return each unordered pair of a full list once.

    Args:
        neighbors: E directed edges, both directions of each, sorted by receiver, sender and shift.

    Returns:
        (edges [P], pair [E]): the edges that stand for the pairs, in their order, and of each edge its pair p, or
        −p − 1 when the edge runs against it.
    """
    receiver, sender = neighbors.edge_index.numpy()
    shift = neighbors.shift.numpy()
    s0, s1, s2 = shift.T
    forward = upper_half(neighbors.edge_index[0], neighbors.edge_index[1], neighbors.shift).numpy()
    ahead, back = np.flatnonzero(forward), np.flatnonzero(~forward)
    if len(ahead) != len(back):
        raise ValueError("the neighbor list does not hold both directions of each edge")
    # the k-th edge in one order is the reverse of the k-th in the other
    keys = (receiver[back], sender[back])
    back = back[np.lexsort((-s2[back], -s1[back], -s0[back], *keys) if shift.any() else keys)]
    pair = np.empty(len(receiver), np.int64)
    pair[ahead] = np.arange(len(ahead))
    pair[back] = -np.arange(len(back)) - 1
    return ahead, pair


@dataclass(frozen=True)
class Capacity:
    """The size of a batch's buffers: frames B, atoms N and pairs P, and edges of the lists of `FurtherTables`."""

    frames: int
    atoms: int
    pairs: int
    edges: tuple[int, ...] = ()

    def joined(self, other: Capacity) -> Capacity:
        """Return the capacity that is enough for both."""
        atoms, pairs = max(self.atoms, other.atoms), max(self.pairs, other.pairs)
        return Capacity(max(self.frames, other.frames), atoms, pairs, tuple(map(max, self.edges, other.edges)))


@dataclass(eq=False)
class PackedBatch:
    """A batch at fixed size; see the module for the order of atoms and structures.

    Attributes:
        z: [M] atomic numbers, element: [M] their places in the list of elements.
        structure: [M] structure of each atom.
        pairs: pairs and rows of edges, and r: [P, 3] the vector of each pair in Å.
        pair_structure: [P] structure of each pair.
        atom_ptr, pair_ptr: [B + 2] first atom and pair of each frame, and of the padding.
        charge: [S] total charges in e.
        volume: [B + 1] Å³, 1 for molecules.
        energy: [B + 1] eV float64, forces: [N, 3] eV/Å, stress: [B + 1, 3, 3] eV/Å³ or None: labels minus the
            priors that the network does not change; NaN where absent or where there is no frame.
        weight: [B + 1] weight of each frame in the loss, float64; None: 1.
        further: what property heads and priors that read charges need; None: nothing.
    """

    z: Tensor
    element: Tensor
    structure: Tensor
    pairs: Pairs
    r: Tensor
    pair_structure: Tensor
    atom_ptr: Tensor
    pair_ptr: Tensor
    charge: Tensor
    volume: Tensor
    energy: Tensor
    forces: Tensor
    stress: Tensor | None
    weight: Tensor | None = None
    further: Further | None = None


@dataclass(eq=False)
class Part:
    """Frames to be packed: B frames with N atoms and E edges in all.

    Attributes:
        z: [N], batch: [N] number of the frame of each atom, ascending.
        charge: [B] e, volume: [B] Å³, 0 for molecules.
        neighbors: the edges of the frames.
        vectors: [E, 3] Å.
        energy: [B] eV, forces: [N, 3] eV/Å, stress: [B, 3, 3] eV/Å³: labels minus the baseline, NaN where absent.
        weight: [B] weight of each frame in the loss; None: 1.
        further: what property heads and priors that read charges need; None: nothing.
        flat: rows of `flatten`; None: not yet made.
    """

    z: np.ndarray
    batch: np.ndarray
    charge: np.ndarray
    volume: np.ndarray
    neighbors: NeighborList
    vectors: np.ndarray
    energy: np.ndarray
    forces: np.ndarray
    stress: np.ndarray
    weight: np.ndarray | None = None
    further: FurtherPart | None = None
    flat: _Flat | None = None

    def flatten(self, elements: Sequence[int]) -> _Flat:
        """Return rows of the tables, made once; elements: as for `PackedFrames`."""
        if self.flat is None:
            self.flat = _flat(self, elements)
        return self.flat


@dataclass(eq=False)
class _Flat:
    """Numbers of atoms and pairs of the frames of a part [B], and their rows; indices are counted within the frame.

    Attributes:
        atom: [N, 2] element, end of the row of edges.
        pair: [P, 2] first and second atom.
        edge: [E, 2] sender; pair p, or −p − 1 when the edge runs against it.
        vectors: [P, 3] Å.
    """

    num_atoms: np.ndarray
    num_pairs: np.ndarray
    atom: np.ndarray
    pair: np.ndarray
    edge: np.ndarray
    vectors: np.ndarray


def _flat(part: Part, elements: Sequence[int]) -> _Flat:
    receiver, sender = part.neighbors.edge_index.numpy()
    chosen, pair = pairs_of(part.neighbors)
    first, second = receiver[chosen], sender[chosen]
    frames = len(part.charge)
    num_atoms, num_pairs = (np.bincount(b, minlength=frames) for b in (part.batch, part.batch[first]))
    first_atom, first_pair = np.cumsum(num_atoms) - num_atoms, np.cumsum(num_pairs) - num_pairs
    # places within the frame; those of pairs have a sign
    start, row_ptr = first_atom[part.batch], part.neighbors.row_ptr.numpy()
    offset = first_pair[part.batch[receiver]]
    return _Flat(
        num_atoms,
        num_pairs,
        _rows(np.searchsorted(elements, part.z), row_ptr[1:] - row_ptr[start]),
        _rows(first - start[first], second - start[first]),
        _rows(sender - start[receiver], np.where(pair < 0, pair + offset, pair - offset)),
        part.vectors[chosen],
    )


def _rows(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, 1).astype(np.int32)


class PackedFrames:
    """Frames as flat tensors on a device, so that a kernel can gather any batch there.

    Args:
        parts: with at least one frame.
        elements: K atomic numbers, sorted; those of the frames are among them.
        cutoff: Å; padding consists of pairs beyond it.
        device: where the tensors are.
        dtype: floating-point type of vectors and force labels.
        stress: keep stress labels.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        elements: Sequence[int],
        cutoff: float,
        device: torch.device,
        dtype: torch.dtype,
        stress: bool = False,
    ):
        self.elements, self.cutoff, self.device, self.dtype = list(elements), cutoff, device, dtype
        self.table = torch.tensor(self.elements, device=device)
        flats, labels, further = [], [], []
        for part in parts:
            further.append(part.further)
            flats.append(part.flatten(self.elements))
            weight = np.ones(len(part.charge)) if part.weight is None else part.weight
            labels.append((part.energy, part.forces, part.stress, part.charge, part.volume, weight))
        energy, forces, tension, charge, volume, weight = map(np.concatenate, zip(*labels, strict=True))
        self.num_atoms = np.concatenate([f.num_atoms for f in flats])
        self.num_pairs = np.concatenate([f.num_pairs for f in flats])
        self._atoms, self._pairs, self._edges = (
            Rows(n, device) for n in (self.num_atoms, self.num_pairs, 2 * self.num_pairs)
        )
        # each table ends with a row for capacity that is not used
        self._atom, self._pair, self._edge = (
            torch.from_numpy(np.concatenate([*rows, np.zeros((1, 2), np.int32)])).to(device)
            for rows in ([f.atom for f in flats], [f.pair for f in flats], [f.edge for f in flats])
        )
        self._r = self._values(np.concatenate([f.vectors for f in flats]), 2 * cutoff)
        self._energy = torch.tensor([*energy, np.nan], dtype=torch.float64, device=device)
        self._forces = self._values(forces, np.nan)
        self._stress = self._values(tension, np.nan) if stress else None
        self._charge = self._values(charge, 0.0)
        plain = bool((weight == 1).all())
        self._weight = None if plain else torch.tensor([*weight, 0.0], dtype=torch.float64, device=device)
        self._volume = self._values(np.where(volume == 0, 1.0, volume), 1.0)
        known = [part for part in further if part is not None]
        self._further = FurtherTables(known, self._atoms, device) if known else None

    def _values(self, rows: np.ndarray, last: float) -> Tensor:
        """Return rows of numbers, and a last one that is filled with `last`."""
        filled = np.concatenate([rows, np.full((1, *rows.shape[1:]), last)])
        return torch.from_numpy(filled).to(self.device, self.dtype)

    def __len__(self) -> int:
        return len(self.num_atoms)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        own = sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))
        return own + (0 if self._further is None else self._further.num_bytes)

    def size(self, chosen: Sequence[int]) -> Capacity:
        """Return the capacity that a batch of these frames needs."""
        index = list(chosen)
        edges = () if self._further is None else self._further.edges(index)
        return Capacity(len(index), int(self.num_atoms[index].sum()), int(self.num_pairs[index].sum()), edges)

    def batch(self, chosen: Tensor, capacity: Capacity) -> PackedBatch:
        """Gather a batch; nothing is read back from the device.

        Args:
            chosen: [B] frame numbers on the device; −1: no frame.
            capacity: a capacity for B frames that is large enough.

        Raises:
            ValueError: the capacity is for another number of frames.
        """
        if len(chosen) != capacity.frames:
            raise ValueError(f"{len(chosen)} frames are chosen, and the capacity is {capacity.frames}: pad with -1")
        gather = self.kernel_batch if self.device.type == "cuda" else self.reference_batch
        batch = gather(chosen, capacity)
        if self._weight is not None:
            batch.weight = self._weight.index_select(0, self._frames(chosen))
        if self._further is not None:
            batch.further = self._further.batch(self._frames(chosen), capacity.atoms, capacity.edges)
        return batch

    def _frames(self, chosen: Tensor) -> Tensor:
        """Return the frames [B + 1] of a batch; absent ones and structure B, the padding, have no rows."""
        last = chosen.new_full((1,), len(self))
        return torch.cat([torch.where(chosen < 0, last, chosen), last])

    def reference_batch(self, chosen: Tensor, capacity: Capacity) -> PackedBatch:
        """Gather `batch` in plain PyTorch."""
        frames, alone = capacity.frames, len(self.elements)
        frame = self._frames(chosen)
        atoms, pairs, edges = (
            rows.gather(frame, size)
            for rows, size in (
                (self._atoms, capacity.atoms),
                (self._pairs, capacity.pairs),
                (self._edges, 2 * capacity.pairs),
            )
        )
        count = torch.arange(alone, device=self.device)
        atom = self._atom[atoms.source]
        element = torch.cat([atom[:, 0], count.to(torch.int32)]).long()
        start, first_edge = atoms.ptr.to(torch.int32), edges.ptr.to(torch.int32)
        row_ptr = torch.cat([start[:1], first_edge[atoms.owner] + atom[:, 1], first_edge[-2].expand(alone)])
        ends = self._pair[pairs.source] + start[pairs.owner, None]
        edge = self._edge[edges.source]
        offset = pairs.ptr.to(torch.int32)[edges.owner]
        pair = torch.where(edge[:, 1] < 0, edge[:, 1] - offset, edge[:, 1] + offset)
        return PackedBatch(
            z=self.table[element],
            element=element,
            structure=torch.cat([atoms.owner, frames + 1 + count]),
            pairs=Pairs(
                first=torch.where(pairs.used, ends[:, 0], 0),
                second=torch.where(pairs.used, ends[:, 1], 0),
                count=pairs.ptr[-2:-1].to(torch.int32),
                row_ptr=row_ptr,
                sender=edge[:, 0] + start[edges.owner],
                pair=pair,
            ),
            r=self._r[pairs.source],
            pair_structure=pairs.owner,
            atom_ptr=start,
            pair_ptr=pairs.ptr.to(torch.int32),
            charge=torch.cat([self._charge[frame], self._charge.new_zeros(alone)]),
            volume=self._volume[frame],
            energy=self._energy[frame],
            forces=self._forces[atoms.source],
            stress=None if self._stress is None else self._stress[frame],
        )

    def kernel_batch(self, chosen: Tensor, capacity: Capacity) -> PackedBatch:
        """Gather `batch` by one kernel."""
        batch = self._unwritten(capacity)
        gather_frames(
            chosen.contiguous(),
            {
                "atom_sizes": self._atoms.sizes,
                "atom_offsets": self._atoms.offsets,
                "pair_sizes": self._pairs.sizes,
                "pair_offsets": self._pairs.offsets,
                "elements": self.table,
                **{name: getattr(self, f"_{name}") for name in ("atom", "pair", "edge", *_COPIED)},
            },
            {
                f"out_{name}": x
                for each in (batch, batch.pairs)
                for name, x in vars(each).items()
                if name not in ("pairs", "weight", "further")
            },
        )
        return batch

    def _unwritten(self, capacity: Capacity) -> PackedBatch:
        """Return a batch whose tensors have no contents yet."""
        frames, atoms, alone = capacity.frames, capacity.atoms + len(self.elements), len(self.elements)

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        def int32(length: int) -> Tensor:
            return empty(length, dtype=torch.int32)

        def int64(length: int) -> Tensor:
            return empty(length, dtype=torch.int64)

        return PackedBatch(
            z=int64(atoms),
            element=int64(atoms),
            structure=int64(atoms),
            pairs=Pairs(
                first=int32(capacity.pairs),
                second=int32(capacity.pairs),
                count=int32(1),
                row_ptr=int32(atoms + 1),
                sender=int32(2 * capacity.pairs),
                pair=int32(2 * capacity.pairs),
            ),
            r=empty(capacity.pairs, 3),
            pair_structure=int64(capacity.pairs),
            atom_ptr=int32(frames + 2),
            pair_ptr=int32(frames + 2),
            charge=empty(frames + 1 + alone),
            volume=empty(frames + 1),
            energy=empty(frames + 1, dtype=torch.float64),
            forces=empty(capacity.atoms, 3),
            stress=None if self._stress is None else empty(frames + 1, 3, 3),
        )


# --- The same by one kernel: the number of launches decides the time of a small training step ---
#
# `PackedFrames.reference_batch` is its specification, to the bit. Shapes: B slots for frames, capacities of N atoms and
# P pairs, K elements, M = N + K atoms. `chosen` has the number of the frame in each slot; −1, or one beyond the last,
# is a frame without rows. Slot B has the padding: it takes its values from the last row of each table.
#
# A program works for one slot. It adds up the sizes of the slots before it, which says where its rows begin, so that no
# program waits for another. Rows of a slot are taken in turns of CHUNK, shared by the programs of the second axis;
# those of slot B, which may be many, also by further programs of the first.


CHUNK = 128
"""Atoms or pairs that a program holds at a time."""
PROGRAMS = 2048
"""Largest number of programs for fewer frames; each adds up sizes again."""


def gather_frames(chosen: Tensor, frames: Mapping[str, Tensor | None], batch: Mapping[str, Tensor | None]) -> None:
    """Write a batch; nothing is read back from the device, and results do not vary from run to run.

    Args:
        chosen: [B] frame numbers, contiguous.
        frames: tables of a data set, by the names of the kernel's arguments before `out_z`; all contiguous.
        batch: tensors to write, by the names of those from `out_z` on.

    stress and out_stress may be None.
    """
    slots = len(chosen)
    num_atoms, num_pairs = (_length(batch[name]) for name in ("out_forces", "out_r"))
    shares = max(1, min(triton.cdiv(num_pairs, CHUNK * max(slots, 1)), PROGRAMS // (slots + 1)))
    fillers = 1 + slots // 8  # the capacity that is not used is about a tenth of all
    _gather[(slots + fillers, shares)](
        chosen,
        **frames,
        **batch,
        B=slots,
        N=num_atoms,
        P=num_pairs,
        K=_length(frames["elements"]),
        num_frames=_length(frames["energy"]) - 1,
        atoms_in_table=_length(frames["atom"]) - 1,
        pairs_in_table=_length(frames["pair"]) - 1,
        CHUNK=CHUNK,
        num_warps=4,
        enable_fp_fusion=False,  # numbers are copied
    )


def _length(x: Tensor | None) -> int:
    assert x is not None
    return x.shape[0]


@triton.jit
def _frame_of(chosen, slot, B, num_frames):
    """Frames of slots; for slots from B on, and for slots without a frame, the one after the last."""
    frame = tl.load(chosen + slot, mask=slot < B, other=-1).to(tl.int64)
    return tl.where((frame < 0) | (frame > num_frames), num_frames, frame)


@triton.jit
def _copy(out, to, x, source, here, WIDTH: tl.constexpr):
    """Rows x[source] to out[to]."""
    for c in tl.static_range(WIDTH):
        value = tl.load(x + source * WIDTH + c, mask=here)
        tl.store(out + to * WIDTH + c, value, mask=here)


@triton.jit
def _lone_atoms(z, element, structure, row_ptr, charge, elements, num_pairs, B, N, K, CHUNK: tl.constexpr):
    """The last atoms and structures: one of each element, without edges."""
    for start in range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        here = k < K
        tl.store(element + N + k, k.to(tl.int64), mask=here)
        _copy(z, N + k, elements, k, here, 1)
        tl.store(structure + N + k, (B + 1 + k).to(tl.int64), mask=here)
        tl.store(row_ptr + N + 1 + k, tl.full((CHUNK,), 0, tl.int32) + 2 * num_pairs.to(tl.int32), mask=here)
        tl.store(charge + B + 1 + k, tl.zeros((CHUNK,), charge.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize=["B", "N", "P", "K", "num_frames", "atoms_in_table", "pairs_in_table"],
)
def _gather(
    chosen,
    # tables
    atom_sizes, atom_offsets, pair_sizes, pair_offsets, elements, atom, pair, edge,
    r, charge, volume, energy, forces, stress,
    # batch
    out_z, out_element, out_structure, out_first, out_second, out_count, out_row_ptr, out_sender, out_pair,
    out_r, out_pair_structure, out_atom_ptr, out_pair_ptr, out_charge, out_volume, out_energy, out_forces, out_stress,
    B, N, P, K, num_frames, atoms_in_table, pairs_in_table, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gather the rows of one slot, or a part of them."""
    slot = tl.minimum(tl.program_id(0), B)
    begin = (tl.program_id(0) - slot) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(1)
    if slot == B:
        step *= tl.num_programs(0) - B

    before = tl.arange(0, 2 * CHUNK)
    atoms_before = tl.zeros((2 * CHUNK,), tl.int64)
    pairs_before = tl.zeros((2 * CHUNK,), tl.int64)
    for k in range(0, slot, 2 * CHUNK):
        other = _frame_of(chosen, k + before, slot, num_frames)  # those from this slot on have no rows here
        atoms_before += tl.load(atom_sizes + other)
        pairs_before += tl.load(pair_sizes + other)
    first_atom, first_pair = tl.sum(atoms_before), tl.sum(pairs_before)

    frame = _frame_of(chosen, slot, B, num_frames)
    num_atoms, num_pairs = tl.load(atom_sizes + frame), tl.load(pair_sizes + frame)
    # no more than the capacity; slot B: all of it
    atoms_left, pairs_left = N - first_atom, P - first_pair
    num_atoms = tl.where(slot < B, tl.minimum(num_atoms, atoms_left), atoms_left)
    num_pairs = tl.where(slot < B, tl.minimum(num_pairs, pairs_left), pairs_left)

    if begin == 0:
        tl.store(out_atom_ptr + slot, first_atom.to(tl.int32))
        tl.store(out_pair_ptr + slot, first_pair.to(tl.int32))
        tl.store(out_charge + slot, tl.load(charge + frame))
        tl.store(out_volume + slot, tl.load(volume + frame))
        tl.store(out_energy + slot, tl.load(energy + frame))
        if stress is not None:
            c = tl.arange(0, 16)
            tl.store(out_stress + slot * 9 + c, tl.load(stress + frame * 9 + c, mask=c < 9), mask=c < 9)
        if slot == 0:
            tl.store(out_row_ptr, 0)
        if slot == B:
            tl.store(out_atom_ptr + B + 1, N)
            tl.store(out_pair_ptr + B + 1, P)
            tl.store(out_count, first_pair.to(tl.int32))
            _lone_atoms(
                out_z, out_element, out_structure, out_row_ptr, out_charge, elements, first_pair, B, N, K, CHUNK
            )

    last = atoms_in_table.to(tl.int64)
    offset = tl.load(atom_offsets + frame)
    for chunk in range(begin, tl.cdiv(num_atoms, CHUNK), step):
        i = chunk * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
        here = i < num_atoms
        to, source = first_atom + i, tl.minimum(offset + i, last)
        element = tl.load(atom + 2 * source, mask=here, other=0).to(tl.int64)
        edges_until = tl.load(atom + 2 * source + 1, mask=here, other=0)
        tl.store(out_element + to, element, mask=here)
        _copy(out_z, to, elements, element, here, 1)
        tl.store(out_structure + to, tl.full((CHUNK,), 0, tl.int64) + slot, mask=here)
        tl.store(out_row_ptr + to + 1, (2 * first_pair + edges_until).to(tl.int32), mask=here)
        _copy(out_forces, to, forces, source, here, 3)

    last = pairs_in_table.to(tl.int64)
    offset = tl.load(pair_offsets + frame)
    for chunk in range(begin, tl.cdiv(num_pairs, CHUNK), step):
        i = chunk * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
        here = i < num_pairs
        to, source = first_pair + i, tl.minimum(offset + i, last)
        used = i < tl.where(slot < B, num_pairs, 0)
        first = tl.load(pair + 2 * source, mask=used, other=0) + first_atom
        second = tl.load(pair + 2 * source + 1, mask=used, other=0) + first_atom
        tl.store(out_first + to, tl.where(used, first, 0).to(tl.int32), mask=here)
        tl.store(out_second + to, tl.where(used, second, 0).to(tl.int32), mask=here)
        tl.store(out_pair_structure + to, tl.full((CHUNK,), 0, tl.int64) + slot, mask=here)
        _copy(out_r, to, r, source, here, 3)
        # two edges for each pair
        i = 2 * chunk * CHUNK + tl.arange(0, 2 * CHUNK).to(tl.int64)
        here = i < 2 * num_pairs
        to, source = 2 * first_pair + i, tl.minimum(2 * offset + i, 2 * last)
        sender = tl.load(edge + 2 * source, mask=here, other=0)
        signed = tl.load(edge + 2 * source + 1, mask=here, other=0)
        tl.store(out_sender + to, (sender + first_atom).to(tl.int32), mask=here)
        signed = tl.where(signed < 0, signed - first_pair, signed + first_pair)
        tl.store(out_pair + to, signed.to(tl.int32), mask=here)
