"""A potential prepared for fused steps: network and terms with their weights, constants, the check of the first use.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..fused.fast_path import GpuTerm
from ..fused.heads import PathWithHeads
from ..fused.registry import fast_path
from ..fused.triton_compiling import compile_side_by_side
from ..potential import Potential, Result
from ..system import System
from .autograd_term import AutogradTerm
from .check import BOUNDS, extract_checked, reference, require_close, require_properties, require_result
from .coverage import constant_energies, kernels_of
from .fused_step import FusedStep
from .graphed_step import GraphedStep
from .property_heads import PropertyHeads
from .static_inputs import StaticInputs

__all__ = ["FusedModel"]


class FusedModel:
    """Weights and constants of a potential as they are now.

    Args:
        potential: one that `coverage.unsupported_reason` finds nothing against; on a CUDA device (or under Triton's
            interpreter).
        precision: "native" or "tf32".
    """

    def __init__(self, potential: Potential, precision: str):
        path = fast_path(potential.representation)
        assert potential.head is not None and path is not None
        self.potential, self.precision = potential, precision
        device = potential.device
        self.net = path.gpu(potential.representation, potential.head, potential.energy_scale, device, precision)
        if "charges" in potential.properties:
            assert isinstance(path, PathWithHeads)
            self.net = path.with_charges(self.net, potential.properties["charges"])
        self.heads = PropertyHeads(potential)
        self.terms = _terms(potential)
        # in float64, so that only the error of the atom itself remains
        exact = copy.deepcopy(potential).cpu().double()
        self.isolated = (exact.isolated_energies() * potential.energy_scale).to(device)
        self._checked: set[tuple[Any, ...]] = set()

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """A step that holds a system and has room for its edges; see `StepModel`."""
        step = self.step(system.num_atoms, system.num_systems, system.dtype, stress)
        graphed, inputs = self._loaded(step, system)
        path = (system.dtype, stress, *step.path.values())
        if path not in self._checked:
            with step.without_buffers():  # the reference takes up to a GB of its own
                self._check(step, system)
            self._checked.add(path)
        return graphed, inputs

    def _loaded(self, step: FusedStep, system: System) -> tuple[GraphedStep, StaticInputs]:
        inputs = StaticInputs(self, step)
        inputs.load(system)
        _compile(step)
        graphed = GraphedStep(step)
        graphed.make_room()
        return graphed, inputs

    def load(self, step: FusedStep, system: System) -> None:
        """Take over all but positions and cell."""
        charge = system.charge.to(self.potential.dtype)
        constant = constant_energies(self.potential, system)
        step.set_composition(system, charge, self.isolated[system.z], constant)

    def step(self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, **options: Any) -> FusedStep:
        """A step for N atoms in B structures; options as those of `FusedStep`."""
        return FusedStep(
            self.net, num_atoms, num_systems, self.potential.cutoff, dtype, stress, terms=self.terms,
            subtract=self.potential.subtract_isolated, energy_shift=self.potential.energy_shift,
            local=self.potential.representation.local, heads=self.heads, **options,
        )  # fmt: skip

    def _check(self, step: FusedStep, system: System) -> None:
        """Run the kernels that a step runs, on its own structure or on a cluster of it, and compare.

        Raises:
            RuntimeError: energies, forces or stress differ from the reference.
        """
        potential, system = extract_checked(self.potential, system, step.stress)
        model = copy.copy(self)
        model.potential, model.terms = potential, _terms(potential)
        # a step of its own: it may be one that other results are read from
        own = model.step(system.num_atoms, system.num_systems, step.dtype, step.stress, **step.path)
        model._loaded(own, system)
        own.launch()
        model._compare(own, reference(potential, system, step.stress), system)

    def _compare(self, step: FusedStep, expected: Result, system: System) -> None:
        out = step.out
        network = out.atom_energies - step.reference
        scale = float((network.abs() + step.isolated.abs()).max())
        virial: Tensor | None = None
        if out.stress is not None:
            virial = out.stress * system.volume.double()[:, None, None]
        found = Result(out.energy, out.forces, None, out.atom_energies)
        require_result(found, virial, expected, self.potential, system, self.precision, scale)
        if out.charges is not None and expected.charges is not None:
            bound = BOUNDS[self.precision][0] * max(1.0, float(expected.charges.abs().max()))
            require_close("charge of an atom, e", out.charges, expected.charges, bound)
        require_properties(step.properties(out.charges), expected, self.potential, system, self.precision)


def _compile(step: FusedStep) -> None:
    """Compile all kernels of a step side by side; those that are left out are compiled when they are launched."""

    def launch() -> None:
        with step._on_device():
            for search in step.searches.values():
                search.count(step.pos, step.cell, step.pbc)
            step.launch()

    if step.device.type == "cuda" and not step.measures_graph:  # else PyTorch reads what kernels write
        compile_side_by_side(launch)


def _terms(potential: Potential) -> list[GpuTerm]:
    """The priors that depend on positions."""
    found: list[GpuTerm] = []
    for prior in potential.priors:
        path = kernels_of(prior, potential.device)
        if path is not None:
            found.append(path.gpu(prior, potential.device, potential.elements))
        elif not prior.constant:
            found.append(AutogradTerm(prior, potential.elements[0]))
        else:
            continue
        found[-1].name = type(prior).__name__
    return found
