"""One structure held for loops on the compiled kernels of the CPU: what cannot change is not looked at again.

Shapes: N atoms in B structures of n atoms each, E directed edges.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..models.base import sum_over_systems
from ..neighbors.cpu import neighbor_list_vesin
from ..potential import Result
from ..system import System
from .cpu_model import CpuModel
from .reference import ReferenceBoundStep

__all__ = ["CpuBoundStep"]

_DENSE = 256
"""Atoms of a structure without cell up to which all pairs are looked at, which is faster than a search."""


class CpuBoundStep(ReferenceBoundStep):
    """On the CPU's compiled kernels, as `CpuModel` to the last bit.

    Args:
        model: the prepared potential.
        system, stress: as for Evaluator.bind.
    """

    def __init__(self, model: CpuModel, system: System, stress: bool):
        super().__init__(model, system, stress)
        potential, system = model.potential, self._system
        self._net, self._cutoff = model.net, potential.cutoff
        self._factor = (1 + 0.1 * system.charge.double())[system.batch].float()
        self._neutral = (system.charge == 0)[system.batch]
        self._isolated = model.isolated[system.z] if potential.subtract_isolated else None
        # fused models have reference energies only, which do not depend on positions
        self._reference = potential.prior_energies(system).detach()
        self._shift = potential.energy_shift
        sizes = torch.bincount(system.batch, minlength=system.num_systems)
        sorted_batch = torch.arange(system.num_systems).repeat_interleave(sizes)
        same = bool((sizes == sizes[0]).all()) and bool((system.batch == sorted_batch).all())
        self._dense = same and int(sizes[0]) <= _DENSE and not bool(system.pbc.any())
        self._other = ~np.eye(int(sizes[0]) if self._dense else 1, dtype=bool)

    def _compute(self) -> Result:
        if self.stress is not None:
            return super()._compute()
        system = self._system
        if not bool(torch.isfinite(self.pos).all()) or not bool(torch.isfinite(self.cell).all()):
            system.validate()  # names the atom
        row_ptr, sender, vectors = self._pairs() if self._dense else self._search()
        out = self._net.run(system.z, row_ptr, sender, vectors, self._factor)
        energies = out.energy.double()
        if self._isolated is not None:
            alone = (torch.diff(row_ptr) == 0) & self._neutral
            energies = torch.where(alone, 0.0, energies - self._isolated)
        energies = energies + self._reference
        energy = sum_over_systems(energies, system.batch, system.num_systems) + self._shift
        assert out.forces is not None
        return Result(energy, out.forces.to(system.dtype), None, energies)

    def _pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row pointers [N + 1], senders [E] and vectors [E, 3] from all pairs."""
        n = self._other.shape[0]
        pos = self.pos.numpy().reshape(-1, n, 3)
        vectors = pos[:, None] - pos[:, :, None]
        near = (np.einsum("bijk,bijk->bij", vectors, vectors) < self._cutoff**2) & self._other
        structure, _, sender = near.nonzero()
        row_ptr = np.zeros(pos.shape[0] * n + 1, dtype=np.int64)
        near.sum(2).ravel().cumsum(out=row_ptr[1:])
        return torch.from_numpy(row_ptr), torch.from_numpy(structure * n + sender), torch.from_numpy(vectors[near])

    def _search(self) -> tuple[Tensor, Tensor, Tensor]:
        found = neighbor_list_vesin(self._system, self._cutoff)
        return found.row_ptr, found.edge_index[1], found.vectors(self._system)
