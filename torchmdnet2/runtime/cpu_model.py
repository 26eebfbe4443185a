"""A potential prepared for the CPU: neighbor search, compiled network, priors, sums; called like the Potential.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..models.base import sum_over_systems
from ..neighbors import neighbor_list
from ..potential import Potential, Result, require_stress
from ..system import System
from .check import BOUNDS, CHECKED_ATOMS, cluster, reference, within
from .cpu_tensornet import CpuTensorNet
from .frozen import FrozenTensorNet

__all__ = ["CpuModel"]


class CpuModel:
    """Weights and constants of a potential as they are now. Thread-safe.

    The first call is checked against the potential in float64.

    Args:
        potential: on the CPU, float32; one that `covered.why_not` finds nothing against.
    """

    def __init__(self, potential: Potential):
        assert potential.head is not None
        self.potential = potential
        weights = FrozenTensorNet(potential.representation, potential.head, potential.energy_scale, "cpu")  # type: ignore[arg-type]
        self.net = CpuTensorNet(weights)
        # in float64, so that only the error of the atom itself remains
        exact = copy.deepcopy(potential).double()
        with torch.no_grad():
            self.isolated = exact.isolated_energies() * potential.energy_scale
        self._checked = False

    @torch.no_grad()
    def __call__(
        self, system: System, forces: bool = True, stress: bool = False, create_graph: bool | None = False
    ) -> Result:
        """Energy, forces and stress of a batch of structures: as the Potential, without a graph.

        Raises:
            ValueError, UnknownElement: as the Potential.
            RuntimeError: the first use did not agree with the reference.
        """
        potential = self.potential
        potential.check_elements(system.z)
        potential._check_spin(system)
        if stress:
            require_stress(system)
        if not self._checked:
            self._check(system)
            self._checked = True
        result, virial = self._evaluate(system, forces or stress)
        if stress and virial is not None:
            result.stress = (virial / system.volume.detach().double()[:, None, None]).to(system.dtype)
        if not forces:
            result.forces = None
        return result

    def _evaluate(self, system: System, gradient: bool) -> tuple[Result, Tensor | None]:
        """Result, and the symmetric virials [B, 3, 3] (eV, float64)."""
        potential, batch = self.potential, system.batch
        neighbors = neighbor_list(system, potential.cutoff)
        factor = (1 + 0.1 * system.charge.double())[batch].float()
        out = self.net.run(
            system.z, neighbors.row_ptr, neighbors.edge_index[1], neighbors.vectors(system), factor, gradient
        )
        energies = out.energy.double()
        if potential.subtract_isolated:
            alone = (torch.diff(neighbors.row_ptr) == 0) & (system.charge == 0)[batch]
            energies = torch.where(alone, 0.0, energies - self.isolated[system.z])
        energies = energies + potential.prior_energies(system, neighbors).detach()
        energy = sum_over_systems(energies, batch, system.num_systems) + potential.energy_shift
        result = Result(energy, atom_energies=energies)
        if out.forces is None or out.virial is None:
            return result, None
        result.forces = out.forces.to(system.dtype)
        virial = sum_over_systems(out.virial, batch, system.num_systems).reshape(-1, 3, 3)
        return result, (virial + virial.transpose(1, 2)) / 2

    def _check(self, system: System) -> None:
        """Compare with the potential in float64, on this structure or on a cluster from it."""
        if system.num_atoms > CHECKED_ATOMS:
            system = cluster(system, CHECKED_ATOMS // 2, False)
        periodic = bool((system.volume > 0).all())
        exact = reference(self.potential, system, periodic)
        ours, virial = self._evaluate(system, True)
        assert ours.atom_energies is not None and exact.atom_energies is not None
        assert ours.forces is not None and exact.forces is not None and virial is not None
        energy_bound, force_bound = BOUNDS["float32"]
        network = exact.atom_energies - self.potential.prior_energies(system).detach()
        scale = max(1.0, float((network.abs() + self.isolated[system.z].abs()).max()))
        within("energy of an atom, eV", ours.atom_energies, exact.atom_energies, energy_bound * scale)
        within("energy of a structure, eV", ours.energy, exact.energy, energy_bound * scale * system.num_atoms)
        scale = max(1.0, float(exact.forces.abs().max()))
        within("force, eV/Å", ours.forces.double(), exact.forces, force_bound * scale)
        if exact.stress is not None:
            expected = exact.stress * system.volume.double()[:, None, None]
            bound = force_bound * max(scale * system.num_atoms, float(expected.abs().max()))
            within("virial, eV", virial, expected, bound)
