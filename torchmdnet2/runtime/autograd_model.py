"""A potential without fused kernels, prepared to be captured: what it asks for, its first check.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..potential import Potential
from ..priors.pairs import PairLists
from ..system import System
from .autograd_step import AutogradStep
from .graphed_step import GraphedStep
from .static_inputs import StaticInputs, require_sorted
from .sync_guard import ForbidHostSync, NotCapturable

__all__ = ["AutogradModel"]


class AutogradModel:
    """Constants of a potential as they are now.

    Args:
        potential: in evaluation mode, on a CUDA device (or the CPU under Triton's interpreter).
    """

    def __init__(self, potential: Potential):
        self.potential = potential
        self.isolated: Tensor | None = None
        if potential.head is not None and potential.subtract_isolated:
            self.isolated = potential.isolated_energies().detach()

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """A step that holds a system, whose first results are those of the potential; see `StepModel`.

        Raises:
            NotCapturable: the potential waits for the device, or does not give the same with room to spare.
        """
        require_sorted(system)
        potential = self.potential
        # also makes what is made only once
        expected = potential.reference(system, stress=stress, create_graph=False)
        assert expected.atom_energies is not None
        network = expected.atom_energies - potential.prior_energies(system, charges=expected.charges)
        asked = PairLists(system)
        potential.compute(system, asked, forces=False, stress=False)
        try:
            scale = max(1.0, float(network.abs().max()))
            step = AutogradStep(potential, self.isolated, list(asked.known), system, stress, scale)
            inputs = StaticInputs(self, step)
            inputs.load(system)
            graphed = GraphedStep(step)
            graphed.make_room()
            with ForbidHostSync():
                step.launch()
            step.require_close(expected)
        except (torch.cuda.OutOfMemoryError, NotCapturable):
            raise
        except RuntimeError as error:
            raise NotCapturable(str(error)) from error
        return graphed, inputs

    def load(self, step: AutogradStep, system: System) -> None:
        """Take over all but positions and cell."""
        step.set_composition(system)
