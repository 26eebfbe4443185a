"""One step of a fused model: neighbor search, network, energies, sums, stress. Static buffers; launches only.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..fused.finish import MAX_PARTS, NO_VOLUME, RESULT_NOT_FINITE, TERMS, finish_kernel, totals_kernel
from ..fused.tensornet.gpu import FusedTensorNet
from ..fused.tensornet.launch_shapes import Tiles
from ..neighbors.triton_search import NOT_FINITE, OVERFLOW, TOO_THIN, TritonNeighborSearch
from .spatial_order import SORT_FROM, SpatialOrder

__all__ = ["NOT_FINITE", "NO_VOLUME", "OVERFLOW", "RESULT_NOT_FINITE", "TOO_THIN", "FusedStep", "Outputs", "ladder"]

_ATOMS_PER_PART = 2048


def ladder(edges: int) -> int:
    """Capacity for this many edges: the next rung, a multiple of 16, each rung about 1.19 times the one below.

    Small structures get more room above what they need, since the number of their edges changes more.
    """
    wanted, rung = edges + edges // 32 + 64, 128
    while rung < wanted:
        rung = -(-(rung * 19) // (16 * 16)) * 16
    return rung


@dataclass(eq=False)
class Outputs:
    """Results as views of one piece of memory, so that one copy saves them all.

    Attributes:
        packed: [bytes] uint8.
        status: [2] int64: flags of the steps since `clear`, and the largest number of edges that one of them needed.
        energy [B] float64 and stress [B, 3, 3] float64, atom_energies [N] float64, forces [N, 3] as the positions.
    """

    packed: Tensor
    status: Tensor
    energy: Tensor
    stress: Tensor | None
    atom_energies: Tensor
    forces: Tensor

    @classmethod
    def allocate(
        cls, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, device: torch.device
    ) -> Outputs:
        """Zeros."""
        sizes = _sizes(num_atoms, num_systems, dtype, stress)
        return cls.view(
            torch.zeros(sum(sizes), dtype=torch.uint8, device=device), num_atoms, num_systems, dtype, stress
        )

    @classmethod
    def view(cls, packed: Tensor, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool) -> Outputs:
        """The fields of packed memory."""
        pieces = packed.split(_sizes(num_atoms, num_systems, dtype, stress))

        def field(piece: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
            return piece.view(dtype)[: torch.Size(shape).numel()].view(shape)

        return cls(
            packed=packed,
            status=field(pieces[0], torch.int64, 2),
            energy=field(pieces[1], torch.float64, num_systems),
            stress=field(pieces[2], torch.float64, num_systems, 3, 3) if stress else None,
            atom_energies=field(pieces[3], torch.float64, num_atoms),
            forces=field(pieces[4], dtype, num_atoms, 3),
        )


def _sizes(num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool) -> list[int]:
    """Bytes of each field, multiples of 16: what Triton specialises on must not change with N."""
    raw = [16, 8 * num_systems, 72 * num_systems * stress, 8 * num_atoms, 3 * num_atoms * dtype.itemsize]
    return [-(-size // 16) * 16 for size in raw]


class FusedStep:
    """Energy, forces and stress of N atoms in B structures, as launches on the current stream.

    `launch()` allocates nothing (but what a sort inside a graph's own pool takes) and never waits. Write to `pos`
    and `cell`, launch, read `out`. Flags gather in `out.status` until `clear()`; while one of the neighbor search's
    bits is set, all results are NaN.

    Args:
        net: the fused model.
        num_atoms, num_systems: N and B.
        cutoff: Å.
        dtype: of the positions, float32 or float64.
        stress: compute the stress.
        subtract: atoms without edges in neutral structures have no network energy (`isolated` is subtracted).
        energy_shift: eV per structure.
        capacity: C at first; `count()` finds what is needed.
        method, thin: of the neighbor search.
        tiles, sort, parts: block shapes, spatial order, programs per structure in the sums; None chooses by N and B.

    Attributes:
        pos [N, 3], cell [B, 3, 3], pbc [B, 3]: inputs, as are z [N] int32, charge_factor [N] float32, neutral [B]
            int32, isolated and reference [N] float64 eV (set by `set_composition`).
        out: results.
    """

    def __init__(
        self,
        net: FusedTensorNet,
        num_atoms: int,
        num_systems: int,
        cutoff: float,
        dtype: torch.dtype,
        stress: bool,
        *,
        subtract: bool = True,
        energy_shift: float = 0.0,
        capacity: int = 16,
        method: str = "auto",
        thin: bool = False,
        tiles: Tiles | None = None,
        sort: bool | None = None,
        parts: int | None = None,
    ):
        device = net.weights.device
        N, B = num_atoms, num_systems
        self.net, self.num_atoms, self.num_systems, self.cutoff = net, N, B, cutoff
        self.dtype, self.stress, self.device, self.subtract = dtype, stress, device, subtract

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.pos, self.cell, self.pbc = new(N, 3), new(B, 3, 3), new(B, 3, dtype=torch.bool)
        self.z, self.neutral = new(N, dtype=torch.int32), new(B, dtype=torch.int32)
        self.charge_factor = new(N, dtype=torch.float32)
        self.isolated, self.reference = new(N, dtype=torch.float64), new(N, dtype=torch.float64)
        self.shift = torch.full((1,), energy_shift, dtype=torch.float64, device=device)
        self.out = Outputs.allocate(N, B, dtype, stress, device)
        self._tiles = tiles or Tiles.for_atoms(N, net.weights.channels)
        self._num_parts = parts or max(1, min(MAX_PARTS, -(-N // (B * _ATOMS_PER_PART))))
        self._parts = new(B * self._num_parts, TERMS, dtype=torch.float64)
        if sort is None:
            sort = N >= SORT_FROM and N >= SORT_FROM // 4 * B
        self.order = SpatialOrder(N, B, self.pos, self.z) if sort else None
        self._batch = new(N, dtype=torch.int32)
        self._buffers: Any = None
        self._new_search(capacity, method, thin)
        self.set_capacity(capacity)

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """C, room for directed edges."""
        return self.search.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the large buffers."""
        fields = [v for v in vars(self.search).values() if isinstance(v, Tensor)]
        fields += [self.pos, self.isolated, self.reference, self.out.packed]
        order = 0 if self.order is None else self.order.nbytes
        return self._buffers.nbytes + order + sum(t.numel() * t.element_size() for t in fields)

    @property
    def path(self) -> dict[str, Any]:
        """The choices that decide which kernels run; the arguments of another step that runs the same."""
        return {
            "tiles": self._tiles,
            "method": self.search.method,
            "sort": self.order is not None,
            "parts": self._num_parts,
        }

    def set_capacity(self, capacity: int) -> None:
        """Other edge buffers; graphs captured before must not be replayed any more."""
        capacity = -(-capacity // 16) * 16
        self._buffers = None  # free the old before the new: they may fill half of the memory
        if capacity != self.search.capacity:
            self.search.set_capacity(capacity)
        self._buffers, _ = self.net.allocate(self.num_atoms, capacity, self._tiles)

    def search_pairs(self) -> None:
        """Take the search that knows cells thinner than the cutoff."""
        self._new_search(self.capacity, "pairs", True)

    def _new_search(self, capacity: int, method: str, thin: bool) -> None:
        self.search = TritonNeighborSearch(
            self.num_atoms, self.num_systems, self.cutoff, -(-capacity // 16) * 16, self.device,
            batch=self._batch, dtype=torch.float32, method=method, thin=thin,
        )  # fmt: skip
        # the search's sticky flag lies in the results, so that one copy brings all
        self.search.flag = self.out.status.view(torch.int32)[:1]

    # --- inputs ----------------------------------------------------------------------------------------------------

    def set_composition(self, z: Tensor, batch: Tensor, charge: Tensor, isolated: Tensor, reference: Tensor) -> None:
        """What a structure is made of.

        Args:
            z, batch: [N] integers, batch ascending.
            charge: [B] e.
            isolated, reference: [N] float64 eV, see the class.
        """
        self.z.copy_(z)
        self._batch.copy_(batch)
        self.search.set_batch(self._batch)
        self.neutral.copy_(charge.float() == 0)
        self.charge_factor.copy_((1 + 0.1 * charge.double())[batch])
        self.isolated.copy_(isolated)
        self.reference.copy_(reference)

    # --- launches --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget the flags."""
        self.out.status.zero_()

    def count(self) -> tuple[int, int]:
        """Flags and edges of the present positions, without computing more. Waits for the device."""
        with self._on_device():
            self.clear()
            pos = self._place()[0]
            self.search.count(pos, self.cell, self.pbc)
            flag, needed = int(self.search.flag), int(self.search.needed)
            self.clear()
        return flag, needed

    def launch(self) -> None:
        """The whole step, on the current stream."""
        with self._on_device():
            pos, z = self._place()
            search, b = self.search, self._buffers
            assert search.vectors is not None
            search(pos, self.cell, self.pbc)
            self.net.run(
                b, self._tiles, z, search.row_ptr, search.sender, search.vectors, self.charge_factor, self.stress
            )
            self._finish()

    def _place(self) -> tuple[Tensor, Tensor]:
        """Positions and elements in the order in which the kernels see them."""
        if self.order is None:
            return self.pos, self.z
        self.order(self.search.batch, self.cell, self.pbc)
        return self.order.pos, self.order.z

    def _finish(self) -> None:
        out, b, search, parts = self.out, self._buffers, self.search, self._num_parts
        stress = out.energy if out.stress is None else out.stress
        order = self.z if self.order is None else self.order.order
        most = out.status[1:]
        launch = self.net.launch_options(self._tiles)
        wide = self.num_atoms > 256 * self.num_systems * parts
        finish_kernel[(self.num_systems, parts)](
            b.energy, b.forces, b.virial, self.net.unit, search.row_ptr, order, self.isolated, self.reference,
            self.neutral, search.ptr, self.shift, self.cell, search.flag, search.needed, most, out.atom_energies,
            out.forces, out.energy, stress, self._parts,
            SUBTRACT=self.subtract, SORTED=self.order is not None, STRESS=self.stress, SINGLE=parts == 1,
            BLOCK=1024 if wide else 256, num_warps=8 if wide else 4, enable_fp_fusion=False, **launch,
        )  # fmt: skip
        if parts > 1:
            totals_kernel[(self.num_systems,)](
                self._parts, parts, self.shift, self.cell, search.flag, search.needed, most, out.energy, stress,
                STRESS=self.stress, BLOCK=triton.next_power_of_2(MAX_PARTS), enable_fp_fusion=False, **launch,
            )  # fmt: skip

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
