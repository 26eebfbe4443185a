"""Results of a step on static memory.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..potential import Result

__all__ = ["Outputs"]


@dataclass(eq=False)
class Outputs:
    """Results as views of one piece of memory, so that one copy saves them all.

    Attributes:
        packed: [bytes] uint8.
        status: [2] int64: flags of the steps since `clear`, and the largest number of edges that one of them needed.
        energy [B] float64 and stress [B, 3, 3] float64, atom_energies [N] float64, forces [N, 3] as the positions,
            charges [N] float64; stress and charges None where there are none.
    """

    packed: Tensor
    status: Tensor
    energy: Tensor
    stress: Tensor | None
    atom_energies: Tensor
    forces: Tensor
    charges: Tensor | None

    @classmethod
    def allocate(
        cls, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, charges: bool, device: torch.device
    ) -> Outputs:
        """Zeros."""
        layout = _Layout(num_atoms, num_systems, dtype, stress, charges)
        return layout.view(torch.zeros(sum(layout.sizes), dtype=torch.uint8, device=device))

    def on(self, packed: Tensor) -> Outputs:
        """The same fields of other memory, which holds a copy of `packed`."""
        layout = _Layout(
            len(self.forces), len(self.energy), self.forces.dtype, self.stress is not None, self.charges is not None
        )
        return layout.view(packed)

    def result(self) -> Result:
        """These tensors; the stress in the type of the positions."""
        stress = None if self.stress is None else self.stress.to(self.forces.dtype)
        return Result(self.energy, self.forces, stress, self.atom_energies, self.charges)


class _Layout(NamedTuple):
    num_atoms: int
    num_systems: int
    dtype: torch.dtype
    stress: bool
    charges: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each field, multiples of 16: what Triton specialises on must not change with N."""
        n, b = self.num_atoms, self.num_systems
        raw = [16, 8 * b, 72 * b * self.stress, 8 * n, 3 * n * self.dtype.itemsize, 8 * n * self.charges]
        return [-(-size // 16) * 16 for size in raw]

    def view(self, packed: Tensor) -> Outputs:
        n, b = self.num_atoms, self.num_systems
        pieces = packed.split(self.sizes)

        def field(piece: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
            return piece.view(dtype)[: torch.Size(shape).numel()].view(shape)

        return Outputs(
            packed=packed,
            status=field(pieces[0], torch.int64, 2),
            energy=field(pieces[1], torch.float64, b),
            stress=field(pieces[2], torch.float64, b, 3, 3) if self.stress else None,
            atom_energies=field(pieces[3], torch.float64, n),
            forces=field(pieces[4], self.dtype, n, 3),
            charges=field(pieces[5], torch.float64, n) if self.charges else None,
        )
