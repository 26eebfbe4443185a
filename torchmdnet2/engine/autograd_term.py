"""Padded structures, so that a model can be replayed on tensors whose sizes never change.

A padded structure ends with two dummy atoms in a separate structure, twice the cutoff apart. Unused list entries
connect these two, so that they do not affect real atoms in any model. Models that vanish at the
cutoff give no interaction between the dummy atoms either.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels.interfaces import Atoms, Edges, Term, TermLaunch, TermSums, TermWithRoom
from ..neighbors import NeighborList
from ..neighbors.pairs import pair_list
from ..potential.derivatives import gradients_of, with_leaves
from ..potential.graph import sum_over_systems
from ..potential.prior import Prior
from ..priors.coulomb.coulomb import Electrostatics
from ..priors.coulomb.ewald import EwaldPlan, with_plans
from ..system import System
from .graph import ForbidHostSync

__all__ = [
    "AutogradTerm", "CpuAutogradTerm", "EwaldPlans", "PaddedList", "autograd_unsupported_reason", "evaluate_alone",
    "pad_list", "pad_system",
]  # fmt: skip


SPARE_ATOMS = 2


@dataclass(eq=False)
class PaddedList(NeighborList):
    """The pairs of a padded structure; its vectors are computed without copying values to the host."""

    def vectors(self, system: System) -> Tensor:
        receiver, sender = self.edge_index
        vectors = system.pos.index_select(0, sender) - system.pos.index_select(0, receiver)
        cell = system.cell.index_select(0, system.batch.index_select(0, receiver))
        return vectors + (self.shift.to(system.dtype)[:, :, None] * cell).sum(1)


def pad_list(row_ptr: Tensor, receiver: Tensor, sender: Tensor, shift: Tensor, cutoff: float) -> PaddedList:
    """Return a list that is padded to C edges.

    Args:
        row_ptr: [N + 1].
        receiver, sender: [C], shift: [C, 3]; anything beyond row_ptr[N].
        cutoff: Å.
    """
    capacity, last = receiver.shape[0], row_ptr.shape[0] - 1
    taken = torch.arange(capacity, device=receiver.device) < row_ptr[-1]
    edges = torch.stack([torch.where(taken, receiver, last), torch.where(taken, sender, last + 1)])
    rows = torch.cat([row_ptr, row_ptr.new_full((SPARE_ATOMS,), capacity)])
    return PaddedList(edges, torch.where(taken[:, None], shift, 0), rows, cutoff)


def pad_system(system: System, reach: float, element: int) -> System:
    """Add a structure of two atoms in vacuum.

    Args:
        system: N atoms in B structures.
        reach: Å, the largest cutoff of the padded lists.
        element: atomic number of the two.
    """
    far = system.pos.new_zeros(SPARE_ATOMS, 3)
    far[1, 0] = 2 * reach
    spare = System(z=torch.full((SPARE_ATOMS,), element, device=system.device), pos=far)
    return System.concatenate([system, spare])


# --- The plans of all Ewald sums of a potential or prior, for a step that a CUDA graph holds ---

_ROOM = 0.05
"""Strain of the cells up to which a plan can be used."""


class EwaldPlans:
    """Makes the plans of lattice sums for a composition, and again for cells that are too large for them.

    Args:
        module: the module with sums by "ewald" or "pme".
    """

    def __init__(self, module: nn.Module):
        found = (m for m in module.modules() if isinstance(m, Electrostatics))
        self._sums = [m for m in found if m.method in ("ewald", "pme")]
        self._plans: dict[int, EwaldPlan] = {}
        self._system: System | None = None

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which the sums are computed with these plans."""
        return with_plans(self._plans)

    def set_composition(self, system: System) -> bool:
        """Make plans for a batch of structures and its cells, unless atoms and periodicity are unchanged.

        Args:
            system: as in the sums.

        Returns:
            Whether the plans have changed.

        Raises:
            ValueError: a structure is periodic in some directions only.
        """
        known = self._system
        if not self._sums or (
            known is not None and torch.equal(known.batch, system.batch) and torch.equal(known.pbc, system.pbc)
        ):
            return False
        self._system = System(**{name: value.detach().clone() for name, value in vars(system).items()})
        # meshes of the cells themselves: energies are those of the Potential
        self._plans = {id(sums): sums.plan(self._system, room=_ROOM) for sums in self._sums}
        return True

    @property
    def lacking(self) -> Tensor | None:
        """[1] bool: a cell was too large for a plan since `clear`; None without plans."""
        if not self._plans:
            return None
        return torch.stack([plan.lacking for plan in self._plans.values()]).any(0)

    def grow(self) -> bool:
        """Replace plans for the first cells that did not fit. Waits for the device.

        Returns:
            Whether a plan was replaced.
        """
        changed = False
        for sums in self._sums:
            plan = self._plans.get(id(sums))
            if plan is not None and bool(plan.lacking):
                assert self._system is not None
                wanted = self._system.replace(cell=plan.unfit.to(self._system.dtype))
                self._plans[id(sums)] = sums.plan(wanted, room=_ROOM, mesh_room=_ROOM)
                changed = True
        return changed

    def clear(self) -> None:
        """Clear the record of cells that did not fit."""
        for plan in self._plans.values():
            plan.lacking.zero_()
            plan.unfit.zero_()


# --- A prior without kernels beside a network on kernels: autograd of the prior alone ---

_NO_LIST = 1.0  # Å, how far apart the two atoms of a padded structure are, where no list is needed


def autograd_unsupported_reason(prior: Prior) -> str:
    """Return "" if autograd can evaluate the prior within a step, else the reason."""
    name = type(prior).__name__
    if prior.cutoff is not None and not 0 < prior.cutoff < float("inf"):
        return f"there are no fused kernels for {name}, which needs all pairs"
    return ""


class _Held:
    """The padded structure of a step and its charges [N + 2], made with the first composition."""

    def __init__(self, prior: Prior):
        self.plans = EwaldPlans(prior)
        self.system: System | None = None
        self.charges: Tensor | None = None
        self.can_be_captured = False  # found out by the first run


class AutogradTerm(TermWithRoom):
    """A prior without kernels as a term of a fused step: autograd on a list of its cutoff.

    Args:
        prior: one for which `autograd_unsupported_reason` is "".
    """

    by_autograd = allocates = True

    def __init__(self, prior: Prior, element: int):
        self.prior, self.element = prior, element
        self.cutoff = 0.0 if prior.cutoff is None else float(prior.cutoff)
        self.uses_charges = prior.uses_charges

    def allocate(self, num_atoms: int) -> _Held:
        return _Held(self.prior)

    def set_composition(self, buffers: _Held, system: System) -> None:
        padded = self._padded(system)
        if buffers.system is None:
            buffers.system = System(**{name: value.detach().clone() for name, value in vars(padded).items()})
            if self.uses_charges:
                buffers.charges = torch.zeros(padded.num_atoms, dtype=torch.float64, device=padded.device)
        else:
            for name in ("z", "batch", "pbc", "charge", "spin"):
                getattr(buffers.system, name).copy_(getattr(padded, name))

    def _padded(self, system: System) -> System:
        return pad_system(system, self.cutoff or _NO_LIST, self.element)

    def make_room(self, buffers: _Held, system: System) -> bool:
        return buffers.plans.set_composition(self._padded(system))

    def lacking(self, buffers: _Held) -> Tensor | None:
        return buffers.plans.lacking

    def grow(self, buffers: _Held) -> bool:
        return buffers.plans.grow()

    def clear(self, buffers: _Held) -> None:
        buffers.plans.clear()

    def run(self, buffers: _Held, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        held, n = buffers.system, len(atoms.z)
        assert held is not None and atoms.cell is not None and atoms.order is None
        held.pos[:n].copy_(atoms.pos)
        held.cell[: len(atoms.cell)].copy_(atoms.cell)
        if buffers.charges is not None and atoms.charges is not None:
            buffers.charges[:n].copy_(atoms.charges[:n])
        neighbors: NeighborList | None = None
        if self.prior.cutoff is not None:
            assert edges is not None and edges.receiver is not None and edges.shift is not None
            neighbors = pad_list(edges.row_ptr, edges.receiver, edges.sender, edges.shift, edges.cutoff)
        with nullcontext() if buffers.can_be_captured else ForbidHostSync(), buffers.plans.use():
            energies, gradients = evaluate_alone(self.prior, held, neighbors, launch.with_virial, buffers.charges)
        buffers.can_be_captured = True
        if launch.first:
            for value in sums[:3]:
                assert value is not None
                value.zero_()
        sums.energy.add_(energies[:n])
        sums.forces.sub_(gradients["pos"][:n])
        if launch.with_virial:
            # that of a structure goes to its first row
            rows = atoms.ptr[:-1].long().clamp(max=n - 1)
            sums.virial.index_add_(0, rows, gradients["strain"][: len(rows)].reshape(-1, 9).float())
        if self.uses_charges:
            assert sums.charge_slope is not None
            if launch.first_slope:
                sums.charge_slope.zero_()
            sums.charge_slope.add_(gradients["charges"][:n])


class CpuAutogradTerm(Term):
    """A prior without kernels as a term of a step on the CPU: autograd, on a list of its cutoff that it searches."""

    by_autograd = True
    cutoff = 0.0  # of the lists of the step

    def __init__(self, prior: Prior):
        self.prior, self.uses_charges = prior, prior.uses_charges

    def allocate(self, num_atoms: int) -> dict[str, System]:
        return {}

    def set_composition(self, buffers: dict[str, System], system: System) -> None:
        buffers["system"] = system

    def run(
        self, buffers: dict[str, System], atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch
    ) -> None:
        system = buffers["system"].replace(pos=torch.from_numpy(atoms.pos), cell=torch.from_numpy(atoms.cell))
        with torch.inference_mode(False):  # networks of PyTorch's products read charges within that mode
            neighbors = None if self.prior.cutoff is None else pair_list(system, self.prior.cutoff)
            read = torch.from_numpy(atoms.charges) if self.uses_charges else None
        energies, gradients = evaluate_alone(self.prior, system, neighbors, True, read)
        sums.energy[:] += energies.numpy()
        sums.forces[:] -= gradients["pos"].numpy()
        if read is not None:
            sums.charge_slope[:] += gradients["charges"].numpy()
        batch, virials = system.batch.numpy(), gradients["strain"].reshape(-1, 9).numpy()
        there, rows = np.unique(batch, return_index=True)
        sums.virial[rows] += virials[there]


def evaluate_alone(
    prior: Prior, system: System, neighbors: NeighborList | None, stress: bool, charges: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return energies [N] of a prior, and gradients by positions, by strain if requested, and by charges [N] e if
    given."""
    with torch.inference_mode(False), torch.enable_grad():
        moved, leaves = with_leaves(system, True, stress)
        if charges is None:
            energies = prior(moved, neighbors)
        else:
            leaves["charges"] = charges.detach().requires_grad_()
            energies = prior(moved, neighbors, leaves["charges"])
        total = sum_over_systems(energies.double(), moved.batch, moved.num_systems)
        gradients = gradients_of(total, leaves, False)
    if stress:
        strain = gradients["strain"]
        gradients["strain"] = (strain + strain.transpose(1, 2)) / 2
    return energies.detach(), {name: gradient.detach() for name, gradient in gradients.items()}
