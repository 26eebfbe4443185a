"""Results of a step on static memory.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Outputs"]


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
