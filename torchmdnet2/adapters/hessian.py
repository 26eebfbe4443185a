"""Second derivatives of the energy, as vibrations, transition states and free energies need them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..potential import Potential
from ..system import System

__all__ = ["hessian"]


def hessian(potential: Potential, system: System) -> Tensor:
    """∂²E/∂pos∂pos of one structure, exact, by differentiating the forces: 3N backward passes, O(N²) time and memory.

    Args:
        potential: any; its precision is that of the result, and float64 is worth its time here.
        system: N atoms.

    Returns:
        [3N, 3N] eV/Å², float64, symmetric; atoms whose forces depend on nothing have zeros.

    Raises:
        ValueError, UnknownElement: as the Potential; ValueError for several structures.
    """
    if system.num_systems != 1:
        raise ValueError(f"a Hessian is that of one structure, and these are {system.num_systems}")
    with torch.inference_mode(False), torch.enable_grad():
        pos = system.pos.detach().clone().requires_grad_()
        forces = potential.reference(system.replace(pos=pos), create_graph=True).forces
        assert forces is not None
        rows = []
        for force in forces.flatten():
            row = None
            if force.requires_grad:
                (row,) = torch.autograd.grad(force, pos, retain_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(pos).flatten() if row is None else -row.flatten())
    found = torch.stack(rows).double() if rows else pos.new_zeros(0, 0).double()
    return (found + found.T) / 2
