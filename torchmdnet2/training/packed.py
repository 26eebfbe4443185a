"""A whole training set on the device, and batches that are gathered from it there.

Positions of a data set do not change, so that what a step needs of a frame is fixed: elements, labels, and the
vectors between neighbors. All of it is kept on the device in flat tensors; a batch is made by the device from frame
numbers alone, at a fixed size, so that a CUDA graph can hold it.

Shapes: B frames in a batch, N atoms and P pairs that it has room for, K elements, S = B + 1 + K structures, M = N + K
atoms. The last K atoms stand alone, one of each element, for the energies ε⁰ of isolated atoms; room that is not
needed belongs to structure B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.forms_pair import Pairs
from ..neighbors import NeighborList

__all__ = ["Capacity", "PackedBatch", "PackedFrames", "pairs_of"]


def pairs_of(neighbors: NeighborList) -> tuple[np.ndarray, np.ndarray]:
    """Each unordered pair of a full list once.

    Args:
        neighbors: E directed edges, both directions of each.

    Returns:
        (edges [P], pair [E]): the edges that stand for the pairs, and of each edge its pair p, or −p − 1 when the
        edge runs against it.
    """
    receiver, sender = neighbors.edge_index.numpy()
    shift = neighbors.shift.numpy()
    s0, s1, s2 = shift.T
    upper = (s0 > 0) | ((s0 == 0) & ((s1 > 0) | ((s1 == 0) & (s2 > 0))))
    forward = (receiver < sender) | ((receiver == sender) & upper)
    ahead, back = np.flatnonzero(forward), np.flatnonzero(~forward)
    if len(ahead) != len(back):
        raise ValueError("the neighbor list does not hold both directions of each edge")
    # the k-th edge in one order is the reverse of the k-th in the other
    ahead = ahead[np.lexsort((s2[ahead], s1[ahead], s0[ahead], sender[ahead], receiver[ahead]))]
    back = back[np.lexsort((-s2[back], -s1[back], -s0[back], receiver[back], sender[back]))]
    pair = np.empty(len(receiver), np.int64)
    pair[ahead] = np.arange(len(ahead))
    pair[back] = -np.arange(len(back)) - 1
    return ahead, pair


@dataclass(frozen=True)
class Capacity:
    """What a batch has room for: frames B, atoms N and pairs P."""

    frames: int
    atoms: int
    pairs: int

    def __le__(self, other: Capacity) -> bool:
        return self.frames <= other.frames and self.atoms <= other.atoms and self.pairs <= other.pairs


@dataclass(eq=False)
class PackedBatch:
    """A batch at fixed size; see the module for the order of atoms and structures.

    Attributes:
        z: [M] atomic numbers, element: [M] their places in the list of elements.
        structure: [M] structure of each atom.
        pairs: pairs and rows of edges, and r: [P, 3] the vector of each pair in Å.
        pair_structure: [P] structure of each pair.
        atom_ptr, pair_ptr: [B + 2] first atom and pair of each frame, and of the room that is not needed.
        charge: [S] total charges in e.
        volume: [B + 1] Å³, 1 for molecules.
        energy: [B + 1] eV float64, forces: [N, 3] eV/Å, stress: [B + 1, 3, 3] eV/Å³ or None: labels less what does
            not depend on the network; NaN where absent or where there is no frame.
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


@dataclass(eq=False)
class Frame:
    """What is kept of one frame: its part of the flat tensors, and its labels less the baseline."""

    z: np.ndarray
    charge: float
    volume: float
    neighbors: NeighborList
    vectors: np.ndarray
    energy: float
    forces: np.ndarray
    stress: np.ndarray


class PackedFrames:
    """Frames as flat tensors on a device.

    Args:
        frames: at least one.
        elements: K atomic numbers, sorted; those of the frames are among them.
        cutoff: Å; room that is not needed is filled with pairs beyond it.
        device: where the tensors are.
        dtype: floating-point type of vectors and force labels.
        stress: keep stress labels.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        elements: Sequence[int],
        cutoff: float,
        device: torch.device,
        dtype: torch.dtype,
        stress: bool = False,
    ):
        self.elements, self.cutoff, self.device, self.dtype = list(elements), cutoff, device, dtype
        self.table = torch.tensor(self.elements, device=device)
        first, second, rows, senders, pairs, vectors = [], [], [], [], [], []
        for frame in frames:
            receiver, sender = frame.neighbors.edge_index.numpy()
            ahead, pair = pairs_of(frame.neighbors)
            first.append(receiver[ahead])
            second.append(sender[ahead])
            vectors.append(frame.vectors[ahead])
            rows.append(np.diff(frame.neighbors.row_ptr.numpy()))
            senders.append(sender)
            pairs.append(pair)
        self.num_atoms = np.array([len(f.z) for f in frames])
        self.num_pairs = np.array([len(f) for f in first])
        self._atoms, self._pairs, self._edges = (
            self._offsets(n) for n in (self.num_atoms, self.num_pairs, 2 * self.num_pairs)
        )
        self._z = self._flat([f.z for f in frames], torch.int64)
        self._element = torch.searchsorted(self.table, self._z)
        self._first, self._second = self._flat(first, torch.int32), self._flat(second, torch.int32)
        self._r = self._flat(vectors, dtype)
        self._rows = self._flat(rows, torch.int64)
        self._sender, self._pair = self._flat(senders, torch.int32), self._flat(pairs, torch.int32)
        self._energy = torch.tensor([f.energy for f in frames], dtype=torch.float64, device=device)
        self._forces = self._flat([f.forces for f in frames], dtype)
        self._stress = self._flat([f.stress[None] for f in frames], dtype) if stress else None
        self._charge = torch.tensor([f.charge for f in frames], dtype=dtype, device=device)
        self._volume = torch.tensor([f.volume or 1.0 for f in frames], dtype=dtype, device=device)

    def _flat(self, parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device, dtype)

    def _offsets(self, sizes: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])).to(self.device)

    def __len__(self) -> int:
        return len(self.num_atoms)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))

    def size(self, chosen: Sequence[int]) -> Capacity:
        """The room that a batch of these frames needs."""
        index = list(chosen)
        return Capacity(len(index), int(self.num_atoms[index].sum()), int(self.num_pairs[index].sum()))

    def batch(self, chosen: Tensor, room: Capacity) -> PackedBatch:
        """Gather a batch; nothing is read back from the device.

        Args:
            chosen: [B] frame numbers on the device; −1: no frame.
            room: at least what they need; B frames.
        """
        missing = chosen < 0
        frame = chosen.clamp(min=0)
        atoms = _Gather(self._atoms, frame, missing, room.atoms)
        pairs = _Gather(self._pairs, frame, missing, room.pairs)
        edges = _Gather(self._edges, frame, missing, 2 * room.pairs)
        alone, frames = len(self.elements), room.frames
        count = torch.arange(alone, device=self.device)

        structure = torch.cat([atoms.owner, frames + 1 + count])
        element = torch.cat([atoms.take(self._element, 0), count])
        start = atoms.ptr.to(torch.int32)
        at = start[pairs.owner]
        first = torch.where(pairs.used, pairs.take(self._first, 0) + at, 0)
        second = torch.where(pairs.used, pairs.take(self._second, 0) + at, 0)
        r = torch.where(pairs.used[:, None], pairs.take(self._r, 0), self._beyond())
        rows = torch.cat([atoms.take(self._rows, 0), count.new_zeros(alone)])
        row_ptr = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).to(torch.int32)
        sender = edges.take(self._sender, 0) + start[edges.owner]
        own = edges.take(self._pair, 0)
        offset = pairs.ptr.to(torch.int32)[edges.owner]
        pair = torch.where(own < 0, own - offset, own + offset)
        nan = float("nan")
        no_frame, frame = torch.cat([missing, missing.new_ones(1)]), torch.cat([frame, frame.new_zeros(1)])
        return PackedBatch(
            z=self.table[element],
            element=element,
            structure=structure,
            pairs=Pairs(first, second, pairs.ptr[-1:].to(torch.int32), row_ptr, sender, pair),
            r=r,
            pair_structure=pairs.owner,
            atom_ptr=torch.cat([start, start.new_full((1,), room.atoms)]),
            pair_ptr=torch.cat([pairs.ptr, pairs.ptr.new_full((1,), room.pairs)]).to(torch.int32),
            charge=torch.cat([self._charge[frame].masked_fill(no_frame, 0), self._charge.new_zeros(alone)]),
            volume=self._volume[frame].masked_fill(no_frame, 1),
            energy=self._energy[frame].masked_fill(no_frame, nan),
            forces=atoms.take(self._forces, nan),
            stress=None if self._stress is None else self._stress[frame].masked_fill(no_frame[:, None, None], nan),
        )

    def _beyond(self) -> Tensor:
        """A vector longer than the cutoff, where every filter is zero."""
        return torch.full((3,), 2 * self.cutoff, dtype=self.dtype, device=self.device)


class _Gather:
    """Rows of chosen frames, one after the other, in a room of fixed size.

    Attributes:
        ptr: [B + 1] first row of each frame in the room.
        owner: [room] number of the frame that each row belongs to, B for rows without a use.
        used: [room] whether a row belongs to a frame.
    """

    def __init__(self, offsets: Tensor, frame: Tensor, missing: Tensor, room: int):
        start = offsets[frame]
        sizes = (offsets[frame + 1] - start).masked_fill(missing, 0)
        total = sizes.cumsum(0)
        self.ptr = torch.cat([total.new_zeros(1), total])
        row = torch.arange(room, device=frame.device)
        self.owner = torch.searchsorted(total, row, right=True)
        self.used = self.owner < frame.shape[0]
        inside = self.owner.clamp(max=frame.shape[0] - 1)
        self._source = torch.where(self.used, start[inside] + row - self.ptr[inside], 0)

    def take(self, rows: Tensor, fill: float) -> Tensor:
        """Rows of a flat tensor; `fill` where there is no use."""
        if rows.shape[0] == 0:  # frames without a single pair
            return rows.new_full((self._source.shape[0], *rows.shape[1:]), fill)
        taken = rows[self._source]
        return torch.where(self.used.reshape(-1, *[1] * (rows.ndim - 1)), taken, fill)
