"""A potential prepared for the CPU: neighbor search, compiled network, priors, sums; called like the Potential.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..fused.cpu_interfaces import CpuTerm
from ..fused.heads import PathWithHeads
from ..fused.numba_compiling import compile_side_by_side
from ..fused.registry import fast_path
from ..fused.thread_tuner import ThreadChoice
from ..models.base import sum_over_systems
from ..potential import Potential, Result, require_stress
from ..processes import ProcessLock
from ..system import System
from .check import BOUNDS, extract_checked, reference, require_close, require_properties, require_result
from .coverage import constant_energies, kernels_of
from .cpu_step import CpuStep, Values
from .property_heads import PropertyHeads
from .timings import Stopwatch, Timing

__all__ = ["CpuModel", "stress_of"]


class CpuModel:
    """Weights and constants of a potential as they are now. Thread-safe.

    The first call is checked against the potential in float64.

    Args:
        potential: on the CPU, float32; one that `coverage.unsupported_reason` finds nothing against.
    """

    def __init__(self, potential: Potential):
        path = fast_path(potential.representation)
        assert potential.head is not None and path is not None
        self.potential = potential
        self.net = path.cpu(potential.representation, potential.head, potential.energy_scale)
        self.heads = PropertyHeads(potential)
        if "charges" in potential.properties:
            assert isinstance(path, PathWithHeads)
            self.net = path.cpu_with_charges(self.net, potential.properties["charges"])
        self.net.keeps_features = self.heads.read_features
        self.terms = _terms(potential)
        self._threads = ThreadChoice()
        # in float64, so that only the error of the atom itself remains
        exact = copy.deepcopy(potential).double()
        with torch.no_grad():
            self.isolated = exact.isolated_energies() * potential.energy_scale
        self._lock = ProcessLock()
        self._last: CpuStep | None = None
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
            step = self._step(system)
            if stress:
                require_stress(system)
            if not self._checked:
                self._check(system)
                self._checked = True
            values = step(system, forces or stress)
        return self.result(values, system, forces, stress)

    def result(self, values: Values, system: System, forces: bool, stress: bool) -> Result:
        """What a step has computed, as tensors on its memory.

        Args:
            values: of the step.
            system: whose they are.
            forces, stress: what was asked for.
        """
        result = Result(torch.from_numpy(values.energy), atom_energies=torch.from_numpy(values.energies))
        if values.charges is not None:
            result.charges = torch.from_numpy(values.charges)
        if forces and values.forces is not None:
            result.forces = torch.from_numpy(values.forces).to(system.dtype)
        result.properties = self.properties(values, system)
        if stress:
            result.stress = stress_of(values, system).to(system.dtype)
        return result

    def properties(self, values: Values, system: System) -> dict[str, Tensor]:
        """What heads of properties give for the features and charges of a step."""
        charges, features = (None if v is None else torch.from_numpy(v) for v in (values.charges, values.features))
        return self.heads(charges, features, system)

    def take(self, system: System) -> CpuStep:
        """A step that holds the composition of a system, for the caller alone: the one that was used last, if it is."""
        with self._lock:
            step, self._last = self._step(system), None
        return step

    def step(self, system: System) -> CpuStep:
        """A step that holds the composition of a system."""
        return CpuStep(self.potential, self.net, self.terms, self._threads, self.isolated, system)

    def timings(self, system: System) -> list[Timing]:
        """What the parts of a step with forces take, the whole step last."""
        step, watch = self.step(system), Stopwatch()
        step.watch(watch)
        return watch.measure(lambda: step(system, True))

    def _step(self, system: System) -> CpuStep:
        """That of the system, kept for the next call."""
        if self._last is None or not self._last.holds(system):
            self._last = None
            self._last = self.step(system)
        return self._last

    def _check(self, system: System) -> None:
        """Compare with the potential in float64, on this structure or on a cluster from it."""
        potential, system = extract_checked(self.potential, system, False)
        periodic = bool((system.volume > 0).all())
        model = copy.copy(self)
        model.potential, model.terms = potential, _terms(potential)
        compile_side_by_side(lambda: model.step(system)(system, True))
        expected = reference(potential, system, periodic)
        values = model.step(system)(system, True)
        assert expected.atom_energies is not None and values.forces is not None
        energy, energies, forces = (torch.from_numpy(v) for v in (values.energy, values.energies, values.forces))
        network = expected.atom_energies - constant_energies(self.potential, system)
        scale = float((network.abs() + self.isolated[system.z].abs()).max())
        found = Result(energy, forces, None, energies)
        if values.charges is not None and expected.charges is not None:
            require_close("charge, e", torch.from_numpy(values.charges), expected.charges, BOUNDS["native"][0])
        require_result(found, _virial(values, system), expected, potential, system, "native", scale)
        require_properties(self.properties(values, system), expected, potential, system, "native")


def _terms(potential: Potential) -> list[CpuTerm]:
    """The priors with kernels."""
    found: list[CpuTerm] = []
    for prior in potential.priors:
        path = kernels_of(prior, potential.device, compiled=True)
        if not prior.constant and path is not None:
            found.append(path.cpu(prior, potential.elements))
            found[-1].name = type(prior).__name__
    return found


def stress_of(values: Values, system: System) -> Tensor:
    """The stress [B, 3, 3] in eV/Å³, float64, of structures with a volume."""
    return _virial(values, system) / system.volume.double()[:, None, None]


def _virial(values: Values, system: System) -> Tensor:
    """Symmetric virials [B, 3, 3] in eV, float64."""
    assert values.virial is not None
    virial = sum_over_systems(torch.from_numpy(values.virial), system.batch, system.num_systems).reshape(-1, 3, 3)
    return (virial + virial.transpose(1, 2)) / 2
