"""Structures whose atoms stay while positions and cell change, on the compiled kernels of the CPU.

What cannot change is looked at once, and little here is PyTorch: one of its calls costs as much as the forces of an
atom.

Shapes: N atoms in B structures, E directed edges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..fused.tensornet.cpu import Array
from ..neighbors import neighbor_list
from ..refusals import SAME_PLACE, coincident, refuse_coincident
from ..system import System
from .cpu_pairs import all_pairs

if TYPE_CHECKING:
    from .cpu_model import CpuModel

__all__ = ["Composition", "Values"]

_DENSE = 512
"""Atoms of a structure without cell up to which all pairs are looked at, which is faster than a search."""


class Values(NamedTuple):
    """Of one evaluation, in fresh memory; forces and virial are None when they were not asked for.

    Attributes:
        energy: [B] eV, energies: [N] eV, both float64.
        forces: [N, 3] eV/Å, virial: [N, 9] eV of the rows, both float32.
    """

    energy: Array
    energies: Array
    forces: Array | None
    virial: Array | None


class Composition:
    """Elements, charges and periodicity of a batch of structures. Not locked.

    Args:
        model: the prepared potential.
        system: N atoms in B structures; copied, positions and cell do not matter.

    Raises:
        ValueError, UnknownElement, UntrainedCharge: as the Potential.
    """

    def __init__(self, model: CpuModel, system: System):
        potential = model.potential
        potential.check(system)
        self._known = tuple(t.clone() for t in _composition(system))
        self._dtype = system.dtype
        self._net, self._cutoff, self._shift = model.net, potential.cutoff, potential.energy_shift
        self._z, self._batch, self._structures = self._known[0].numpy(), self._known[1].numpy(), system.num_systems
        charge = system.charge.detach()
        self._factor = (1 + 0.1 * charge.double())[system.batch].float().numpy()
        self._neutral = (charge == 0)[system.batch].numpy()
        self._isolated = model.isolated[system.z].numpy() if potential.subtract_isolated else None
        # potentials that come here have reference energies only, which do not depend on positions
        self._reference = potential.prior_energies(system).detach().numpy()
        sizes = np.bincount(self._batch, minlength=system.num_systems)
        same = bool((sizes == sizes[0]).all()) and bool((np.diff(self._batch) >= 0).all())
        self._dense = same and int(sizes[0]) <= _DENSE and not bool(system.pbc.any())
        self._row_ptr = np.zeros(system.num_atoms + 1, np.int64)
        self._sender, self._vectors = np.empty(0, np.int64), np.empty((0, 3), np.float32)

    def holds(self, system: System) -> bool:
        """Whether a system differs in positions and cell at most."""
        if system.dtype != self._dtype or system.num_systems != self._structures or len(system.pos) != len(self._z):
            return False
        return all(map(torch.equal, self._known, _composition(system)))

    def __call__(self, system: System, forces: bool) -> Values:
        """Evaluate other positions and another cell.

        Args:
            system: one that `holds` is true of.

        Raises:
            ValueError: a position or the cell is not usable.
        """
        row_ptr, sender, vectors = self._pairs(system) if self._dense else self._search(system)
        out = self._net.run(self._z, row_ptr, sender, vectors, self._factor, forces)
        energies = out.energy.astype(np.float64)
        if self._isolated is not None:
            energies -= self._isolated
            energies[(row_ptr[1:] == row_ptr[:-1]) & self._neutral] = 0
        energies += self._reference
        energy = np.bincount(self._batch, energies, self._structures) + self._shift
        return Values(energy, energies, out.forces, out.virial)

    def _pairs(self, system: System) -> tuple[Array, Array, Array]:
        """Row pointers [N + 1], senders [≥ E] and vectors [≥ E, 3] from all pairs."""
        pos = system.pos.detach().numpy().reshape(self._structures, -1, 3)
        if not np.isfinite(system.cell.detach().numpy()).all():
            system.validate()
        while True:
            found = all_pairs(pos, self._cutoff, self._row_ptr, self._sender, self._vectors, SAME_PLACE)
            if found < 0:
                system.validate()  # names the atom
                raise coincident(neighbor_list(system, self._cutoff), system)
            if found <= len(self._sender):
                return self._row_ptr, self._sender, self._vectors
            room = found + found // 8
            self._sender, self._vectors = np.empty(room, np.int64), np.empty((room, 3), np.float32)

    def _search(self, system: System) -> tuple[Array, Array, Array]:
        found = neighbor_list(system, self._cutoff)
        refuse_coincident(found, system)
        vectors = found.vectors(system).detach().float().contiguous()
        return found.row_ptr.numpy(), found.edge_index[1].numpy(), vectors.numpy()


def _composition(system: System) -> tuple[Tensor, ...]:
    return system.z, system.batch, system.pbc, system.charge.detach(), system.spin
