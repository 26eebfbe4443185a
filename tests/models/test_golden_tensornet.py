"""TensorNet reproduces the outputs of TorchMD-Net 3.1 (float64), weights loaded name by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from torchmdnet2 import Potential, System
from torchmdnet2.models import TensorNet

TOLERANCE = 1e-6  # in the model's own unit; TorchMD-Net's float32 constants limit the agreement to about 1e-7


def golden(shared, name: str) -> tuple[Potential, dict[str, torch.Tensor], bool]:
    """(our potential with their weights, their tensors, whether the total charge is passed)."""
    given = json.loads((shared / "golden" / f"{name}.json").read_text())
    tensors = load_file(shared / "golden" / f"{name}.safetensors")
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
        name.removeprefix("model/")
        .replace("representation_model", "representation")
        .replace("output_model", "head"): value
        for name, value in tensors.items()
        if name.startswith("model/")
    }
    for theirs in ("mean", "std", "representation.distance.box"):
        renamed.pop(theirs, None)
    potential.double().load_state_dict(renamed, strict=True)
    return potential.eval(), tensors, given["passes_total_charge"]


@pytest.mark.parametrize("name", ["tensornet_o3", "tensornet_so3", "tensornet_charge", "tensornet_gauss_1l"])
def test_molecules(shared, name):
    potential, t, charged = golden(shared, name)
    system = System(
        z=t["in/z"], pos=t["in/pos"].double(), batch=t["in/batch"], charge=t["in/q"].double() if charged else None
    )
    result = potential(system)
    assert (result.energy - t["out/y"].flatten()).abs().max() <= TOLERANCE
    assert (result.forces - t["out/forces"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["tensornet_o3", "tensornet_so3"])
def test_periodic(shared, name):
    potential, t, _ = golden(shared, name)
    result = potential(System(z=t["in/pbc_z"], pos=t["in/pbc_pos"].double(), cell=t["in/pbc_box"].double()))
    assert (result.energy - t["out/pbc_y"].flatten()).abs().max() <= TOLERANCE
    assert (result.forces - t["out/pbc_forces"]).abs().max() <= TOLERANCE


def test_periodic_outputs_exist_where_expected(shared):
    for path in (shared / "golden").glob("tensornet_*.safetensors"):
        assert ("in/pbc_z" in load_file(path)) == (path.stem in ("tensornet_o3", "tensornet_so3"))


def test_number_of_parameters():
    """The published count of the one-layer model with 128 channels and 32 radial functions."""
    potential = Potential.from_config({"model": {"name": "tensornet", "num_layers": 1}})
    assert sum(p.numel() for p in potential.parameters()) == 535_681
    assert isinstance(potential.representation, TensorNet)
