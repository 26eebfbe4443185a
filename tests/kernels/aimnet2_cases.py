"""Structures and models that the kernels of AIMNet2 are tested on, GPU and CPU alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ase.build import molecule

from torchmdnet2 import Potential, System

COULOMB = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
FIELD = {**COULOMB, "method": "reaction_field", "cutoff": 5.0}
D3 = {"name": "d3", "elements": [1, 6, 7, 8], "s8": 0.4, "a1": 0.5, "a2": 3.0, "cutoff": None, "variant": "aimnet2"}
SIZES = {"channels": 4, "num_rbf": 8, "num_vectors": 3, "hidden_channels": 16, "widths": [20, 12], "cutoff": 4.0}


def make(
    priors: tuple[dict[str, Any], ...] = (), hidden: int = 1, others: int = 0, isolated: bool = True, **changes: Any
) -> Potential:
    """With `others`, further members, whose elements have other energies."""
    shifts = [{"name": "atomref", "energies": {"H": -13.0 - k, "C": -1036.0, "O": 0.5 * k - 2044}} for k in range(4)]
    torch.manual_seed(3)
    potential = Potential.from_config(
        {
            "model": {"name": "aimnet2", **SIZES, "max_z": 10, **changes},
            "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": hidden},
            "priors": [*(shifts[:1] if others else []), *priors],
            "elements": [1, 6, 7, 8] if not others else [1, 6, 8],
            "others": [{"priors": [shift]} for shift in shifts[1 : 1 + others]],
            "subtract_isolated": isolated,
        }
    ).eval()
    with torch.no_grad():
        for parameter in potential.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return potential


def structure(name: str, charge: float, cell: list | None = None) -> System:
    atoms = molecule(name)
    atoms.rattle(0.05, seed=2)
    if cell is not None:
        atoms.set_cell(cell)
        atoms.pbc = True
    atoms.set_initial_magnetic_moments(None)
    return System.from_ase(atoms).replace(charge=torch.tensor([charge], dtype=torch.float64))


CELL = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
CASES = {
    "three passes": (make(), structure("CH3OH", 0.0)),
    "two passes, charges as published": (make(num_layers=2, exact_charge=False), structure("H2O", -1.0)),
    "four passes, another width, two hidden layers of the head": (
        make(num_layers=4, num_vectors=5, widths=[70], hidden=2), structure("H2O", 1.0),
    ),
    "terms of all pairs": (make((COULOMB, D3)), structure("CH3OH", 1.0)),
    "a cell": (make((FIELD,)), structure("H2O", 0.0, CELL)),
    "one atom": (make(), structure("O", 0.0)),
    "four members, terms of all pairs": (make((COULOMB, D3), others=3, isolated=False), structure("H2O", 1.0)),
    "three members in a cell": (make((FIELD,), others=2, isolated=False), structure("H2O", 0.0, CELL)),
    "two members, two structures": (
        make(others=1, isolated=False), System.concatenate([structure("H2O", 0.0), structure("CH", -1.0)]),
    ),
}  # fmt: skip


def assert_same(found, model: Potential, atoms: System, stress: bool) -> None:
    exact = copy.deepcopy(model).double().reference(atoms, stress=stress)
    torch.testing.assert_close(found.energy, exact.energy, rtol=1e-6, atol=1e-6)
    bound = 1e-6 * max(1.0, float(exact.forces.abs().max()))
    torch.testing.assert_close(found.forces, exact.forces, rtol=0, atol=bound)
    torch.testing.assert_close(found.charges, exact.charges, rtol=0, atol=1e-6)
    if model.others:
        each = [member.reference(atoms) for member in copy.deepcopy(model).double().members]
        energy, forces = (torch.stack([getattr(one, name) for one in each]) for name in ("energy", "forces"))
        torch.testing.assert_close(exact.energy, energy.mean(0))
        torch.testing.assert_close(exact.forces, forces.mean(0))
        assert float(energy.std(0).min()) > 0.1 and float(forces.std(0).max()) > 0.01
        spread = found.properties
        torch.testing.assert_close(spread["energy_std"], energy.std(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(spread["forces_std"], forces.std(0).to(spread["forces_std"]), rtol=0, atol=bound)
    if stress:
        torch.testing.assert_close(found.stress, exact.stress, rtol=2e-5, atol=1e-7)


def batch() -> tuple[Potential, System]:
    """Structures of several charges and sizes, with an energy of the predicted charges."""
    return make((COULOMB,)), System.concatenate(
        [structure("H2O", 1.0), structure("O", 0.0), structure("NH", -1.0), structure("H2CO", 0.0)]
    )
