"""TensorNet reproduces the outputs of TorchMD-Net 3.1 (float64), weights loaded name by name."""

from __future__ import annotations

import pytest
from torchmd_net_files import Golden, read_golden

from torchmdnet2 import Potential, System
from torchmdnet2.models import TensorNet

TOLERANCE = 1e-6  # in the model's own unit; TorchMD-Net's float32 constants limit the agreement to about 1e-7


def golden(name: str) -> tuple[Potential, Golden]:
    """Our potential with their weights, and their numbers."""
    found = read_golden(name)
    given = found.given
    model = {
        "name": "tensornet",
        "hidden_channels": given["embedding_dimension"],
        "cutoff_lower": given["cutoff_lower"],
        "cutoff": given["cutoff_upper"],
        "group": given["equivariance_invariance_group"],
        "skew_sign": -1,
        **{key: given[key] for key in ("num_layers", "num_rbf", "rbf_type", "activation", "max_z")},
    }
    potential = Potential.from_config(
        {
            "model": model,
            "head": {"activation": given["activation"]},
            "energy_scale": given["std"],
            "energy_shift": given["mean"],
            "subtract_isolated": False,
        }
    )
    renamed = {
        key.replace("representation_model", "representation").replace("output_model", "head"): value
        for key, value in found.state.items()
    }
    for theirs in ("mean", "std", "representation.distance.box"):
        renamed.pop(theirs, None)
    potential.double().load_state_dict(renamed, strict=True)
    return potential.eval(), found


@pytest.mark.parametrize("name", ["tensornet_o3", "tensornet_so3", "tensornet_charge", "tensornet_gauss_1l"])
def test_molecules(name):
    potential, found = golden(name)
    result = potential(found.system)
    assert (result.energy - found.data["out/y"].flatten()).abs().max() <= TOLERANCE
    assert (result.forces - found.data["out/forces"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["tensornet_o3", "tensornet_so3"])
def test_periodic(name):
    potential, found = golden(name)
    t = found.data
    result = potential(System(z=t["in/pbc_z"], pos=t["in/pbc_pos"], cell=t["in/pbc_box"]))
    assert (result.energy - t["out/pbc_y"].flatten()).abs().max() <= TOLERANCE
    assert (result.forces - t["out/pbc_forces"]).abs().max() <= TOLERANCE


def test_number_of_parameters():
    """The published count of the one-layer model with 128 channels and 32 radial functions."""
    potential = Potential.from_config({"model": {"name": "tensornet", "num_layers": 1}})
    assert sum(p.numel() for p in potential.parameters()) == 535_681
    assert isinstance(potential.representation, TensorNet)
