"""Any potential as a step over static buffers: neighbor search, network, autograd, priors, sums, stress.

For models without fused kernels. One launch does the work of the Potential on padded lists (autograd_term.py), and
copies no values to the host: it can be captured in a CUDA graph.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..neighbors.pairs import PairLists, all_pairs
from ..neighbors.triton_search import TritonNeighborSearch
from ..potential.output import SPREADS
from ..potential.potential import Potential, Result
from ..system import System
from .autograd_term import EwaldPlans, PaddedList, pad_list, pad_system
from .check import BOUNDS, require_close
from .finish import BROKEN, NO_VOLUME, RESULT_NOT_FINITE
from .graph import ForbidHostSync, NotCapturable
from .step import FEWEST_EDGES, OVERFLOW, GraphedStep, Outputs, StaticInputs, Step, require_sorted
from .timings import Part

__all__ = ["AutogradModel", "AutogradStep"]


_BOUNDS = {torch.float32: BOUNDS["native"], torch.float64: (1e-9, 1e-9)}
"""Allowed differences of an atom's energy and of a force from the potential's, each relative to the largest value if
that is above 1. Sums over edges by atomic additions are rounded differently from run to run."""


class AutogradStep(Step):
    """Energy, forces and stress of N atoms in B structures by autograd, without waits for the device.

    Args:
        potential: in evaluation mode, on a CUDA device (the CPU under Triton's interpreter).
        isolated: `potential.subtracted_energies()`.
        cutoffs: Å of the lists that the potential needs, that of the network first.
        system: the first structures; their batch must ascend.
        stress: compute the stress.
        scale: eV, the largest energy of an atom by the network.

    Attributes:
        pairs: the list of an infinite cutoff, which depends on the composition only.
    """

    measures_graph = True

    def __init__(
        self,
        potential: Potential,
        isolated: Tensor | None,
        cutoffs: list[float],
        system: System,
        stress: bool,
        scale: float,
    ):
        N, B = system.num_atoms, system.num_systems
        super().__init__(N, B, system.dtype, stress, "charges" in potential.outputs, system.device)
        self.potential, self.isolated, self.scale = potential, isolated, scale
        finite = [cutoff for cutoff in cutoffs if math.isfinite(cutoff)]
        held = pad_system(system, max(finite), potential.elements[0])
        self._system = System(**{name: value.detach().clone() for name, value in vars(held).items()})
        self.pos, self.cell, self.pbc = self._system.pos[:N], self._system.cell[:B], self._system.pbc[:B]
        self._properties: dict[str, Tensor] = {}
        self._make_searches(dict.fromkeys(finite, FEWEST_EDGES), "auto", False)
        self.pairs: PaddedList | None = None
        self._all_pairs = len(finite) < len(cutoffs)
        self._plans = EwaldPlans(potential)
        self.set_composition(system)

    @property
    def nbytes(self) -> int:
        tensors = [v for search in self.searches.values() for v in vars(search).values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) + self.out.packed.numel() + self.graph_bytes

    def _new_search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        return TritonNeighborSearch(
            self.num_atoms, self.num_systems, cutoff, capacity, self.device, batch=self._system.batch[: self.num_atoms],
            dtype=torch.float32, method=method, thin=thin, periodic=self.periodic, receiver=True, shift=True,
            vectors=False, distances=True,  # not read, but the search sees atoms at the same place by them
        )  # fmt: skip

    def grow(self) -> None:
        super().grow()
        self.version += self._plans.grow()

    def clear(self) -> None:
        super().clear()
        self._plans.clear()

    # --- inputs ----------------------------------------------------------------------------------------------------

    def set_composition(self, system: System) -> None:
        """Take over all but positions and cell."""
        N, B = self.num_atoms, self.num_systems
        for name in ("z", "batch"):
            getattr(self._system, name)[:N].copy_(getattr(system, name))
        for name in ("charge", "spin", "pbc"):
            getattr(self._system, name)[:B].copy_(getattr(system, name))
        self.search_periodic(system.pbc)
        for search in self.searches.values():
            search.set_batch(system.batch)
        self.version += self._plans.set_composition(pad_system(system, 1.0, self.potential.elements[0]))
        if not self._all_pairs:
            return
        found = all_pairs(system)
        pairs = pad_list(found.row_ptr, found.edge_index[0], found.edge_index[1], found.shift, math.inf)
        if self.pairs is None or self.pairs.num_edges != pairs.num_edges:
            self.pairs = pairs
            self.version += 1
            return
        for name in ("edge_index", "shift", "row_ptr"):
            getattr(self.pairs, name).copy_(getattr(pairs, name))

    # --- launches --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        for search in self.searches.values():
            search(self.pos, self.cell, self.pbc)
        self._evaluate()

    def _evaluate(self) -> None:
        """Run the step without the searches."""
        lists: dict[float, Any] = {} if self.pairs is None else {math.inf: self.pairs}
        for cutoff, search in self.searches.items():
            assert search.receiver is not None and search.shift is not None
            lists[cutoff] = pad_list(search.row_ptr, search.receiver, search.sender, search.shift, cutoff)
        with self._plans.use():
            found = self.potential.compute(
                self._system, PairLists(self._system, lists), True, self.stress, isolated=self.isolated
            )
        with torch.no_grad():
            self._store(found.first(self.num_atoms, self.num_systems, self.potential.outputs))

    def parts(self) -> list[Part]:
        found = []
        for cutoff, search in self.searches.items():
            run = partial(search, self.pos, self.cell, self.pbc)
            found.append(Part(f"neighbor search to {cutoff:g} Å", "kernels", run))
        return [*found, Part("network, priors, sums", "autograd", self._evaluate)]

    def _store(self, result: Result) -> None:
        out, flags = self.out, self.out.status[:1]
        for search, most in zip(self.searches.values(), self._most, strict=True):
            torch.maximum(most, search.needed, out=most)
        if self._plans.lacking is not None:
            flags |= self._plans.lacking * OVERFLOW
        unusable = (flags & BROKEN) != 0
        assert result.forces is not None and result.atom_energies is not None
        broken = ~(result.energy.isfinite().all() & result.forces.isfinite().all()) & ~unusable
        flags |= broken.long() * RESULT_NOT_FINITE
        if self.stress:
            flags |= (self._system.volume[: self.num_systems] == 0).any().long() * NO_VOLUME
        for name, value in result.properties.items():
            if name not in self._properties and name != "charges":  # which are among the results
                self._properties[name] = torch.zeros_like(value)
        held = {**vars(out), **self._properties}
        for name, value in {**vars(result), **result.properties}.items():
            if isinstance(value, Tensor):
                held[name].copy_(torch.where(unusable, math.nan, value) if value.is_floating_point() else value)

    def replay_agrees(self, launched: Tensor) -> bool:
        first = self.out.on(launched)
        if not torch.equal(first.status, self.out.status):
            return False
        if bool(first.status[0]):  # results that cannot be used
            return True
        try:
            self.require_close(first)
        except RuntimeError:
            return False
        return True

    def require_close(self, expected: Result | Outputs) -> None:
        """Raise RuntimeError unless the results are those expected, up to rounding."""
        out = self.out
        energy, force = _BOUNDS[self.potential.dtype]
        assert expected.atom_energies is not None and expected.forces is not None
        require_close("energy of an atom, eV", out.atom_energies, expected.atom_energies, energy * self.scale)
        total = energy * self.scale * self.num_atoms
        require_close("energy of a structure, eV", out.energy, expected.energy, total)
        largest = max(1.0, float(expected.forces.abs().max()))
        require_close("force, eV/Å", out.forces, expected.forces, force * largest)

    def properties(self, charges: Tensor | None) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self._properties.items()}
        if charges is not None:
            found["charges"] = charges
        spread = SPREADS if self.potential.others else ()
        return {name: found[name] for name in [*self.potential.properties, *spread]}


# --- A potential without fused kernels, prepared to be captured: what it asks for, its first check ---


class AutogradModel:
    """Makes and loads steps by autograd, with the constants of a potential.

    Args:
        potential: in evaluation mode, on a CUDA device (or the CPU under Triton's interpreter).
    """

    def __init__(self, potential: Potential):
        self.potential, self.isolated = potential, potential.subtracted_energies()

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a step that holds a system, whose first results are those of the potential; see `StepModel`.

        Raises:
            NotCapturable: the potential waits for the device, or gives other results on padded lists.
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
