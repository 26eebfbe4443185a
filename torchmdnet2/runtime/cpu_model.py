"""A potential prepared for the CPU: neighbor search, compiled network, priors, sums; called like the Potential.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
import threading

import torch
from torch import Tensor

from ..fused.tensornet.cpu import CpuTensorNet
from ..fused.tensornet.weights import FrozenTensorNet
from ..models.base import sum_over_systems
from ..potential import Potential, Result, require_stress
from ..system import System
from .check import BOUNDS, CHECKED_ATOMS, cluster, reference, within
from .cpu_composition import Composition, Values

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
        self._lock = threading.RLock()
        self._last: Composition | None = None
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
        with self._lock:
            composition = self._composition(system)
            if stress:
                require_stress(system)
            if not self._checked:
                self._check(system)
                self._checked = True
            values = composition(system, forces or stress)
        result = Result(torch.from_numpy(values.energy), atom_energies=torch.from_numpy(values.energies))
        if forces and values.forces is not None:
            result.forces = torch.from_numpy(values.forces).to(system.dtype)
        if stress:
            result.stress = (_virial(values, system) / system.volume.double()[:, None, None]).to(system.dtype)
        return result

    def _composition(self, system: System) -> Composition:
        """That of the system, kept for the next call."""
        if self._last is None or not self._last.holds(system):
            self._last = None
            self._last = Composition(self, system)
        return self._last

    def _check(self, system: System) -> None:
        """Compare with the potential in float64, on this structure or on a cluster from it."""
        if system.num_atoms > CHECKED_ATOMS:
            system = cluster(system, CHECKED_ATOMS // 2, False)
        periodic = bool((system.volume > 0).all())
        exact = reference(self.potential, system, periodic)
        values = Composition(self, system)(system, True)
        assert exact.atom_energies is not None and exact.forces is not None and values.forces is not None
        energy, energies, forces = (torch.from_numpy(v) for v in (values.energy, values.energies, values.forces))
        energy_bound, force_bound = BOUNDS["float32"]
        network = exact.atom_energies - self.potential.prior_energies(system).detach()
        scale = max(1.0, float((network.abs() + self.isolated[system.z].abs()).max()))
        within("energy of an atom, eV", energies, exact.atom_energies, energy_bound * scale)
        within("energy of a structure, eV", energy, exact.energy, energy_bound * scale * system.num_atoms)
        scale = max(1.0, float(exact.forces.abs().max()))
        within("force, eV/Å", forces.double(), exact.forces, force_bound * scale)
        if exact.stress is not None:
            expected = exact.stress * system.volume.double()[:, None, None]
            bound = force_bound * max(scale * system.num_atoms, float(expected.abs().max()))
            within("virial, eV", _virial(values, system), expected, bound)


def _virial(values: Values, system: System) -> Tensor:
    """Symmetric virials [B, 3, 3] in eV, float64."""
    assert values.virial is not None
    virial = sum_over_systems(torch.from_numpy(values.virial), system.batch, system.num_systems).reshape(-1, 3, 3)
    return (virial + virial.transpose(1, 2)) / 2
