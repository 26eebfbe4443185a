"""A prior without kernels beside a network on kernels: autograd of the prior alone.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from ..derivatives import gradients_of, with_leaves
from ..fused.cpu_interfaces import Array, CpuSums
from ..fused.fast_path import Atoms, Edges, TermLaunch, TermSums
from ..fused.term_with_room import TermWithRoom
from ..models.base import sum_over_systems
from ..neighbors import NeighborList
from ..priors.base import Prior
from ..priors.pairs import pair_list
from ..system import System
from .ewald_plans import EwaldPlans
from .padded import pad_list, pad_system
from .sync_guard import ForbidHostSync

__all__ = ["AutogradTerm", "add_by_autograd", "autograd_unsupported_reason", "evaluate_alone"]

_NO_LIST = 1.0  # Å, how far apart the two atoms of a padded structure are, where no list is needed


def autograd_unsupported_reason(prior: Prior) -> str:
    """ "" when autograd of the prior alone can join a step, else the reason."""
    name = type(prior).__name__
    if prior.cutoff is not None and not 0 < prior.cutoff < float("inf"):
        return f"there are no fused kernels for {name}, which needs all pairs"
    return ""


class _Held:
    """The padded structure of a step, made when the first composition comes, with charges [N + 2] of the network."""

    def __init__(self, prior: Prior):
        self.plans = EwaldPlans(prior)
        self.system: System | None = None
        self.charges: Tensor | None = None
        self.can_be_captured = False  # found out by the first run


class AutogradTerm(TermWithRoom):
    """Autograd of a prior, on the list of its own cutoff.

    Args:
        prior: one that `autograd_unsupported_reason` finds nothing against.
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


def add_by_autograd(prior: Prior, system: System, sums: CpuSums, charges: Array | None = None) -> None:
    """The same on the CPU, with a list of the prior's own; also of one that reads the network's charges [N] e."""
    neighbors = None if prior.cutoff is None else pair_list(system, prior.cutoff)
    read = None if charges is None or not prior.uses_charges else torch.from_numpy(charges)
    energies, gradients = evaluate_alone(prior, system, neighbors, True, read)
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
    """Energies [N], and gradients by position and, if asked, strain; by the charges [N] e, where they are given."""
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
