"""Energies as functions of positions, strain or edge vectors, and their derivatives by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .system import System

__all__ = ["gradients_of", "with_leaves"]


def with_leaves(system: System, forces: bool, stress: bool) -> tuple[System, dict[str, Tensor]]:
    """A structure as a function of its positions and of a symmetric strain, for derivatives of an energy.

    Args:
        system: N atoms in B structures.
        forces, stress: which derivatives will be taken.

    Returns:
        The structure, and its leaves: "pos" [N, 3] if forces, "strain" [B, 3, 3], zero, if stress.
    """
    leaves: dict[str, Tensor] = {}
    pos, cell = system.pos, system.cell
    if pos.is_inference():
        pos, cell = pos.clone(), cell.clone()
        system = System(
            z=system.z.clone(), pos=pos, batch=system.batch.clone(), cell=cell, pbc=system.pbc.clone(),
            charge=system.charge.clone(), spin=system.spin.clone(),
        )  # fmt: skip
    if forces:
        pos = leaves["pos"] = pos if pos.requires_grad else pos.detach().requires_grad_()
    if stress:
        strain = leaves["strain"] = pos.new_zeros(system.num_systems, 3, 3).requires_grad_()
        symmetric = (strain + strain.transpose(1, 2)) / 2
        pos = pos + torch.einsum("ni,nij->nj", pos, symmetric[system.batch])
        cell = cell + cell @ symmetric
    return system.replace(pos=pos, cell=cell), leaves


def gradients_of(energy: Tensor, leaves: dict[str, Tensor], create_graph: bool) -> dict[str, Tensor]:
    """The gradients of energies [B] with respect to the leaves; zeros for leaves that they do not depend on."""
    if not leaves or not energy.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(energy.sum(), list(leaves.values()), create_graph=create_graph, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
