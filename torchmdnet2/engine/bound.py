"""Bound steps, which hold one structure for loops: write positions, replay, read forces.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..neighbors import NeighborList, neighbor_list
from ..neighbors.neighbor_list import refuse_coincident
from ..neighbors.pairs import PairLists
from ..potential.cells import is_mixed
from ..potential.graph import Features, Graph, PropertyHead
from ..potential.potential import Potential, Result, with_dipole
from ..system import System

__all__ = ["BoundStep", "PropertyHeads", "ReferenceBoundStep"]


class BoundStep(ABC):
    """Holds static tensors of one structure (or batch) and a step over them, for loops with many evaluations.

    Attributes:
        pos: [N, 3] Å, cell: [B, 3, 3] Å; to be written to in place.
        forces [N, 3] eV/Å, energy [B] eV, atom_energies [N] eV, stress [B, 3, 3] eV/Å³ or None, charges [N] e or None:
            overwritten by every replay, NaN if they cannot be right. Their memory never changes.
        compiled: whether it runs on the kernels that numba compiles for the CPU.
        waits: `replay` waits for the device, so that no CUDA graph can hold it.
    """

    compiled = False
    waits = False
    pos: Tensor
    cell: Tensor
    forces: Tensor
    energy: Tensor
    atom_energies: Tensor
    stress: Tensor | None
    charges: Tensor | None

    @abstractmethod
    def replay(self) -> None:
        """Compute everything at the present `pos` and `cell`, on the current stream, without waiting unless `waits`."""

    @abstractmethod
    def check(self) -> bool:
        """Return whether all replays since the last check were good. Waits for the device; call it every so many steps.

        Returns:
            True: they were. False: the capacity for edges was too small. It is larger now, but results since the last
            check must not be used (from the first bad one on they are NaN): go back to earlier positions and repeat.

        Raises:
            ValueError: a position, the cell or an energy is not finite (names the atom).
        """

    @abstractmethod
    def fetch(self) -> Result | None:
        """Return `check()` and the results of the last replay, on the host, with one copy and one wait; properties need
        more.

        Returns:
            Result on the CPU, in memory that the next call overwrites; None if `check()` is False.

        Raises:
            ValueError: as `check`.
        """

    @abstractmethod
    def properties(self) -> Mapping[str, Tensor]:
        """Evaluate the heads of properties for the last replay now; return `Result.properties`, on the device."""


class ReferenceBoundStep(BoundStep):
    """A bound step that calls a copy of the potential, or another function with its arguments and fixed weights."""

    def __init__(self, potential: Potential | Callable[..., Result], system: System, stress: bool):
        if isinstance(potential, Potential):  # whose weights may change while the energies of isolated atoms are kept
            potential = copy.deepcopy(potential)
            if bool(system.pbc.any(1).all()):
                potential = potential.in_cells()
        self._potential = potential
        self.pos, self.cell = system.pos.detach().clone(), system.cell.detach().clone()
        self._system = system.replace(pos=self.pos, cell=self.cell)
        self._mixed = is_mixed(system)
        self._error: ValueError | None = None
        call = potential.reference if isinstance(potential, Potential) else potential
        result = call(self._system, stress=stress, create_graph=False)
        assert result.forces is not None and result.atom_energies is not None
        self.forces, self.energy, self.atom_energies = result.forces, result.energy, result.atom_energies
        self.stress, self.charges = result.stress, result.charges
        self._properties: Mapping[str, Tensor] = result.properties
        self._isolated = potential.subtracted_energies() if isinstance(potential, Potential) else None

    def replay(self) -> None:
        if self._error is not None:
            return
        try:
            self._step()
        except ValueError as error:
            self._error = error
            for value in _results(self):
                value.fill_(float("nan"))
            self._properties = {name: torch.full_like(value, float("nan")) for name, value in self._properties.items()}

    def _step(self) -> None:
        """Overwrite the results; a ValueError leaves them unchanged."""
        result = self._compute()
        self._properties = result.properties
        with torch.no_grad():
            for mine, value in zip(_results(self), _results(result), strict=True):
                mine.copy_(value)

    def _compute(self) -> Result:
        potential, system, stress = self._potential, self._system, self.stress is not None
        if not isinstance(potential, Potential):
            return potential(system, stress=stress, create_graph=False)
        if self._mixed and potential.in_cells() is not potential:
            return potential.reference(system, stress=stress, create_graph=False)
        # the composition was checked by the first call, and the positions are by the search
        neighbors = neighbor_list(system, potential.cutoff)
        refuse_coincident(neighbors, system)
        lists = PairLists(system, {potential.cutoff: neighbors})
        return potential.compute(system, lists, True, stress, isolated=self._isolated)

    def check(self) -> bool:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def fetch(self) -> Result | None:
        self.check()
        stress, charges = (None if value is None else value.cpu() for value in (self.stress, self.charges))
        given = {name: value.cpu() for name, value in self._given().items()}
        properties = with_dipole(given, charges, self._system)
        return Result(self.energy.cpu(), self.forces.cpu(), stress, self.atom_energies.cpu(), charges, properties)

    def properties(self) -> Mapping[str, Tensor]:
        return with_dipole(self._given(), self.charges, self._system)

    def _given(self) -> Mapping[str, Tensor]:
        """Return the results of the heads."""
        return self._properties


def _results(of: Result | BoundStep) -> list[Tensor]:
    values = (of.energy, of.forces, of.atom_energies, of.stress, of.charges)
    return [value for value in values if value is not None]


# --- Heads of other properties than the energy, evaluated by PyTorch on features that kernels have computed ---
#
# Energies and forces do not depend on them, so they are not part of the step: they run when results are wanted.


class PropertyHeads:
    """The heads of a potential except that of the energy.

    Args:
        potential: its weights are read when results are wanted.
    """

    def __init__(self, potential: Potential):
        heads: dict[str, PropertyHead] = dict(potential.properties.items())  # type: ignore[arg-type]
        self._names = list(heads)
        heads.pop("charges", None)  # they are computed in the step
        self._heads = heads
        self._cutoff, self._dtype = potential.cutoff, potential.dtype

    @property
    def read_features(self) -> bool:
        """Whether some heads read features."""
        return bool(self._heads)

    def __call__(self, charges: Tensor | None, features: Tensor | None, system: System | None) -> dict[str, Tensor]:
        """Return properties by name, as `Result.properties`.

        Args:
            charges: [N] those of the head of charges; None without.
            features: [N, F] scalar features of the atoms; None if no head reads them.
            system: N atoms; None if no head reads it.
        """
        found = {} if charges is None else {"charges": charges}
        if not self._heads:
            return {name: found[name] for name in self._names}
        assert features is not None and system is not None
        reads_edges = any(head.reads_edges for head in self._heads.values())
        neighbors = neighbor_list(system, self._cutoff) if reads_edges else _no_edges(system, self._cutoff)
        graph = Graph.build(system, neighbors, self._dtype, PairLists(system))
        for name, head in self._heads.items():
            found[name] = head(Features(features), graph).detach()
        return {name: found[name] for name in self._names}


def _no_edges(system: System, cutoff: float) -> NeighborList:
    """Return an empty list."""
    n, device = system.num_atoms, system.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    return NeighborList(zeros(2, 0), zeros(0, 3), zeros(n + 1), cutoff)
