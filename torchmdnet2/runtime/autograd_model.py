"""A potential without fused kernels, prepared to be captured: what it asks for, its first check, its graphs.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..potential import Potential, Result
from ..priors.pairs import PairLists
from ..system import System
from .autograd_step import AutogradStep
from .check import BOUNDS, within
from .graphs import GraphedStep, refuse
from .model import Source, require_sorted
from .step import TOO_THIN, Outputs
from .sync_guard import NotCapturable, NoWaits

__all__ = ["AutogradModel", "GraphedAutograd"]

_BOUNDS = {torch.float32: BOUNDS["float32"], torch.float64: (1e-9, 1e-9)}
"""Largest differences of an atom's energy and of a force to the potential's, each times the largest where that is above
1. Sums over edges by atomic additions are rounded otherwise from run to run."""


class GraphedAutograd(GraphedStep):
    """An autograd step that runs as one CUDA graph once it is captured, else as launches.

    Args:
        step: its capacities and capture are managed here.
        scale: eV, the largest energy that the network gives an atom.
    """

    step: AutogradStep  # type: ignore[assignment]

    def __init__(self, step: AutogradStep, scale: float):
        super().__init__(step)  # type: ignore[arg-type]
        self.scale = scale

    def make_room(self) -> None:
        flags = self.step.make_room()
        if flags & TOO_THIN and self._uses_cells():
            self.step.search_pairs()
            flags = self.step.make_room()
        self._graph = None
        refuse(flags)

    def grow(self, needed: int) -> None:
        self._graph = None
        self.step.grow()

    def run(self) -> None:
        if self.step.stale:
            self._graph, self.step.stale = None, False
        super().run()

    def results(self) -> Result:
        return self.step.results()

    def _uses_cells(self) -> bool:
        return any(search.method == "cells" for search in self.step.searches.values())

    def _capture(self) -> None:
        step, device = self.step, self.step.device
        step.launch()  # what is made once (tables, the results' memory) is made outside of the capture
        self._graph, step.pool_bytes = None, 0
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        try:
            super()._capture()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NotCapturable(f"the capture failed: {str(error).splitlines()[0]}") from error
        step.pool_bytes = max(0, torch.cuda.memory_reserved(device) - before)

    def _agrees(self, before: Tensor) -> bool:
        step = self.step
        first = Outputs.view(before, step.num_atoms, step.num_systems, step.dtype, step.stress)
        if not torch.equal(first.status, step.out.status):
            return False
        if bool(first.status[0]):  # results that cannot be used
            return True
        try:
            self.compare(first)
        except RuntimeError:
            return False
        return True

    def compare(self, expected: Result | Outputs) -> None:
        """Raise RuntimeError unless the results are those expected, up to rounding."""
        out = self.step.out
        energy, force = _BOUNDS[self.step.potential.dtype]
        assert expected.atom_energies is not None and expected.forces is not None
        within("energy of an atom, eV", out.atom_energies, expected.atom_energies, energy * self.scale)
        within("energy of a structure, eV", out.energy, expected.energy, energy * self.scale * self.step.num_atoms)
        largest = max(1.0, float(expected.forces.abs().max()))
        within("force, eV/Å", out.forces, expected.forces, force * largest)


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

    def build(self, system: System, stress: bool) -> tuple[GraphedAutograd, Source]:
        """A step that holds a system, whose first results are those of the potential.

        Raises:
            UnsortedBatch: the batch does not ascend.
            ValueError, UnknownElement: as the potential.
            NotCapturable: the potential waits for the device, or does not give the same with room to spare.
        """
        require_sorted(system)
        potential = self.potential
        # also makes what is made only once
        expected = potential(system, stress=stress, create_graph=False)
        assert expected.atom_energies is not None
        network = expected.atom_energies - potential.prior_energies(system, charges=expected.charges)
        asked = PairLists(system)
        potential.compute(system, asked, forces=False, stress=False)
        try:
            step = AutogradStep(potential, self.isolated, list(asked.known), system, stress)
            source = Source(self, step)
            source.load(system)
            graphed = GraphedAutograd(step, max(1.0, float(network.abs().max())))
            graphed.make_room()
            with NoWaits():
                step.launch()
            graphed.compare(expected)
        except (torch.cuda.OutOfMemoryError, NotCapturable):
            raise
        except RuntimeError as error:
            raise NotCapturable(str(error)) from error
        return graphed, source

    def load(self, step: AutogradStep, system: System) -> None:
        """Take over all but positions and cell."""
        step.set_composition(system)
