"""Structures and priors that the kernels of pair priors are tested on, GPU and CPU alike."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmdnet2 import System
from torchmdnet2.kernels.interfaces import Atoms, Edges, Term, TermLaunch, TermSums
from torchmdnet2.neighbors import NeighborList
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.potential.prior import Prior
from torchmdnet2.priors import D2, D3, ZBL, Coulomb, PairPotential

ELEMENTS = [1, 6, 8]
CHARGES = {"H": 0.4, "C": -0.15, "O": -0.8}
PBE0 = {"s8": 1.2177, "a1": 0.4145, "a2": 4.8593}
NUMBERS = [0.3, -0.7, 0.9]
PAIRS = {
    "C-H": [0.5, 0, 2, 0.3, 0, 1, 0, 2.5],
    "O-H": [0, 1.5, 0, 4, 0.4, 0, 2, 0],
    "C-C": [3, 0.7, 0, 6, 1.2, 0, 0, 0],
    "O-O": [0, 0, 1, 9, 0, 0, 3, 0.2],
}


def priors() -> dict[str, Prior]:
    """By name; each with a cutoff of 4 to 5 Å, or of all pairs."""
    field: dict[str, Any] = {"method": "reaction_field", "cutoff": 4.5}
    return {
        "zbl": ZBL(cutoff=4.0),
        "zbl covalent": ZBL(envelope="covalent", screening="refitted", scale=0.7),
        "zbl within radii": ZBL(envelope="covalent", scale=2.0, radii={"H": 0.8, "O": 1.3}),  # carbon is a point
        "pair potential": PairPotential(PAIRS),
        "d2": D2(cutoff=4.5, s6=0.75, switch_width=1.5),
        "d2 abrupt": D2(cutoff=4.5, switch_width=0.0),
        "d3": D3(ELEMENTS, **PBE0, cutoff=5.0, switch_width=1.0),
        "d3 of aimnet2": D3(ELEMENTS, **PBE0, cutoff=5.0, switch_width=1.0, variant="aimnet2"),
        "d3, all pairs": D3(ELEMENTS, **PBE0, cutoff=None, variant="aimnet2"),
        "reaction field": Coulomb(CHARGES, **field),
        "reaction field, damped": Coulomb(CHARGES, **field, damping="exp", damping_upper=4.0, dielectric=78.0),
        "reaction field, cosine": Coulomb(
            CHARGES, **field, damping="cosine", damping_lower=0.5, damping_upper=3.0, switch_width=0.0
        ),
        "reaction field, by atom": Coulomb(NUMBERS, **field),
        "reaction field, predicted": Coulomb("predicted", **field),
        "shifted force": Coulomb(CHARGES, "dsf", cutoff=4.5),
        "shifted force, damped": Coulomb("predicted", "dsf", cutoff=4.5, damping="exp", damping_upper=4.0),
        "all pairs": Coulomb(CHARGES),
        "all pairs, damped": Coulomb("predicted", damping="exp", damping_upper=3.0),
    }


def mesh_priors() -> dict[str, Coulomb]:
    """Particle-mesh sums by name, with a cutoff of 3 Å."""
    return {
        "by element": Coulomb(CHARGES, "pme", 3.0, accuracy=1e-4),
        "by atom, order 8": Coulomb(NUMBERS, "pme", 3.0, accuracy=1e-6),
        "predicted, damped": Coulomb("predicted", "pme", 3.0, "exp", damping_upper=2.5, accuracy=1e-4),
        "cosine": Coulomb(CHARGES, "pme", 3.0, "cosine", 0.5, 2.0, accuracy=1e-4),
    }


def mesh_batch() -> System:
    """A molecule between two cells."""
    return System.concatenate([system(3, 1, 3.0), system(3, 2, 4.0, False), system(3, 3, 2.6)])


def system(num_atoms: int, seed: int, edge: float, cell: bool = True, dtype: torch.dtype = torch.float64) -> System:
    """Random atoms, not closer than 0.7 Å, in a triclinic cell or without.

    Positions and cells are multiples of 2⁻¹⁴ Å, so that vectors between atoms are exact in float32, and what differs
    from float64 is the error of the kernels.
    """
    random = torch.Generator().manual_seed(seed)
    lattice = edge * torch.tensor([[1.0, 0, 0], [0.2, 1.1, 0], [-0.1, 0.3, 0.9]], dtype=torch.float64)
    lattice = (lattice * 2**14).round() / 2**14
    pos = torch.zeros(0, 3, dtype=torch.float64)
    while len(pos) < num_atoms:
        new = torch.rand(1, 3, generator=random, dtype=torch.float64) @ lattice
        if not len(pos) or float((pos - new).norm(dim=1).min()) > 0.7:
            pos = torch.cat([pos, new])
    pos = (pos * 2**14).round() / 2**14
    z = torch.tensor(ELEMENTS)[torch.randint(0, 3, (num_atoms,), generator=random)]
    return System(z=z, pos=pos.to(dtype), cell=lattice[None].to(dtype) if cell else None)


def closed_shell(num_atoms: int, seed: int, edge: float) -> System:
    """`system` with the charge 0 or 1, so that the number of electrons is even."""
    atoms = system(num_atoms, seed, edge)
    return atoms.replace(charge=(atoms.z.sum() % 2)[None].to(atoms.charge))


def systems(prior: Prior) -> dict[str, System]:
    """By name, those that this prior can do."""
    n = len(NUMBERS)
    molecules = [system(n, 1, 3.0, False), system(n, 2, 30.0, False), system(n, 3, 4.0, False)]
    close = system(n, 4, 3.0, False)
    close.pos[1] = close.pos[0] + 2**-12  # closer than MIN_DISTANCE
    close.pos[2] = close.pos[0] + torch.tensor([0.0, 0.3125, 0.0], dtype=torch.float64)
    found = {"molecules, one without edges": System.concatenate(molecules), "atoms on top of each other": close}
    if math.isfinite(prior.cutoff or 0.0):
        # at 2.6 Å: atoms see several images of others, and of themselves
        cells = [system(n, 5, 6.0), system(n, 6, 2.6), system(n, 7, 9.0)]
        found |= {"cells": System.concatenate(cells), "float32": system(n, 8, 5.0, dtype=torch.float32)}
    return found


def charges_of(prior: Prior, atoms: System) -> Tensor | None:
    """Charges for priors that take the network's, differentiable."""
    if not prior.uses_charges:
        return None
    return torch.linspace(-0.9, 1.1, atoms.num_atoms, dtype=torch.float64).requires_grad_()


def reference(prior: Prior, atoms: System) -> dict[str, Tensor]:
    """Energies [N], forces [N, 3], virials [B, 3, 3] and dE/dq [N] (zeros where there are no charges), in float64."""
    strain = torch.zeros(atoms.num_systems, 3, 3, dtype=torch.float64, requires_grad=True)
    pos = atoms.pos.detach().double().clone().requires_grad_()
    turn = torch.eye(3).double() + (strain + strain.transpose(1, 2)) / 2
    moved = atoms.to(dtype=torch.float64).replace(
        pos=torch.einsum("ni,nij->nj", pos, turn[atoms.batch]), cell=atoms.cell.double() @ turn
    )
    charges = charges_of(prior, atoms)
    energies = prior(moved, pair_list(moved.replace(pos=atoms.pos.double()), prior.cutoff or 0.0), charges)
    wanted = [pos, strain] + ([] if charges is None else [charges])
    gradients = torch.autograd.grad(energies.sum(), wanted, allow_unused=True, materialize_grads=True)
    slope = torch.zeros(atoms.num_atoms).double() if charges is None else gradients[2]
    return {"energy": energies.detach(), "forces": -gradients[0], "virial": gradients[1], "slope": slope}


def prepared(term: Term, atoms: System) -> tuple[Term, Any]:
    """A term of the CPU with its buffers for these atoms."""
    buffers = term.allocate(atoms.num_atoms)
    term.set_composition(buffers, atoms)
    return term, buffers


def cpu_sums(
    held: tuple[Term, Any], prior: Prior, atoms: System, found: NeighborList | None, times: int = 1
) -> TermSums:
    """Sums of a term of the CPU that was added so many times."""
    edges = None
    if found is not None:
        vectors = found.vectors(atoms).float().numpy()
        edges = Edges(found.row_ptr.numpy(), found.edge_index[1].numpy().copy(), vectors, found.cutoff)
    charges, n = charges_of(prior, atoms), atoms.num_atoms
    sums, (term, buffers) = TermSums.zeros(n), held
    rows = Atoms(
        atoms.z.numpy(), np.zeros(n, np.float32), atoms.batch.numpy(), None, atoms.pos.numpy(), cell=atoms.cell.numpy(),
        charges=None if charges is None else charges.detach().numpy(),
    )  # fmt: skip
    for _ in range(times):
        term.run(buffers, rows, edges, sums, TermLaunch())
    return sums


def lists(prior: Prior, atoms: System) -> dict[str, NeighborList | None]:
    """The prior's own list and a longer one; None where all pairs are summed."""
    if math.isinf(prior.cutoff or 0.0):
        return {"all": None}
    found: dict[str, NeighborList | None] = {"own": pair_list(atoms, prior.cutoff or 0.0)}
    return found | ({"longer": pair_list(atoms, 6.2)} if atoms.pbc.any() else {})
