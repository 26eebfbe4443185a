"""Every model with every kind of prior added: what is promised of each holds of their sum, periodic and not."""

from __future__ import annotations

import pytest
import torch
from variants import variant

from torchmdnet2 import System
from torchmdnet2.testing import check_potential, example_systems

MODELS = ["tensornet", "tensornet2", "equivariant_transformer", "transformer", "graph_network"]
TENSORNET = {"name": "tensornet", "hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
PRIORS = [
    {"name": "atomref", "energies": {1: -13.6, 6: -1030.0, 8: -2040.0}, "max_z": 20},
    {"name": "zbl", "cutoff": 4.0},
    {"name": "d2", "cutoff": 6.0},
    {"name": "coulomb", "charges": {1: 0.3, 6: -0.2, 8: -0.5}, "method": "reaction_field", "cutoff": 6.0},
]
SYSTEMS = example_systems((1, 6, 8), 4.5)


def potential(kind: str):
    model = {"model": TENSORNET} if kind == "tensornet" else {}
    return variant("graph_network" if model else kind, priors=PRIORS, elements=[1, 6, 8], **model)


@pytest.mark.parametrize("structure", ["molecule", "triclinic cell"])
@pytest.mark.parametrize("kind", MODELS)
def test_conformance(kind, structure):
    check_potential(potential(kind), [SYSTEMS[structure]])


@pytest.mark.parametrize("kind", MODELS)
def test_primitive_cell_is_supercell(kind):
    """Bar R7."""
    one = SYSTEMS["triclinic cell"]
    # TensorNet takes the total charge of a structure as it is: only neutral cells are the same as their supercells
    one = one.replace(charge=0 * one.charge)
    shift = one.cell[0, 0]
    two = System(
        z=one.z.repeat(2),
        pos=torch.cat([one.pos, one.pos + shift]),
        cell=one.cell * torch.tensor([2.0, 1, 1], dtype=torch.float64)[:, None],
    )
    model = potential(kind)
    small, large = model(one), model(two)
    assert abs(float(large.energy - 2 * small.energy)) / two.num_atoms <= 1e-8
    assert torch.allclose(large.forces, small.forces.repeat(2, 1), rtol=0, atol=1e-7)
