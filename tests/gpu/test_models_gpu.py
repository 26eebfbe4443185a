"""Every model, head and prior gives on the GPU what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch
from variants import ELEMENTS, VARIANTS, variant

from torchmdnet2 import System
from torchmdnet2.testing import example_systems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SYSTEMS = example_systems(ELEMENTS, 4.5)
PRIORS = [
    {"name": "atomref", "energies": {"1": -13.6, "6": -1029.0}},
    {"name": "zbl", "cutoff": 4.0},
    {"name": "zbl", "envelope": "covalent", "screening": "refitted"},
    {"name": "d2", "cutoff": 6.0},
    {"name": "coulomb", "method": "pme", "cutoff": 6.0, "accuracy": 1e-6},
    {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": "ewald", "cutoff": 6.0},
    {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": "reaction_field", "cutoff": 6.0},
]


@pytest.mark.parametrize("kind", VARIANTS)
def test_gpu_is_cpu(kind):
    """Energy, forces, stress, charges and properties in float64."""
    properties = [{"name": "charges"}, {"name": "scalar_property", "property": "gap", "reduce": "mean"}]
    potential = variant(kind, properties=properties, priors=PRIORS, atom_filter=1)
    names = ["molecule", "ion"] if kind.endswith("all_pairs") else ["triclinic cell", "tiny cell", "left-handed cell"]
    system = System.concatenate([SYSTEMS[name] for name in names])
    stress = not kind.endswith("all_pairs")
    expected = potential(system, stress=stress)
    result = potential.cuda()(system.to("cuda"), stress=stress)
    for name in ("energy", "forces", "stress", "charges", "atom_energies"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        if theirs is not None:
            assert ours.device.type == "cuda"
            assert torch.allclose(ours.cpu(), theirs, rtol=1e-9, atol=1e-9), name
    assert torch.allclose(result.properties["gap"].cpu(), expected.properties["gap"], rtol=1e-9)


def test_dipole_on_the_gpu():
    properties = [{"name": "dipole", "equivariant": True}, {"name": "vector"}]
    potential = variant("equivariant_transformer", properties=properties)
    expected = potential(SYSTEMS["molecule"]).properties
    result = potential.cuda()(SYSTEMS["molecule"].to("cuda")).properties
    for name, value in expected.items():
        assert torch.allclose(result[name].cpu(), value, rtol=1e-9, atol=1e-10), name
