"""Energies, forces and properties of TorchMD-Net 3.1.0 in float64, from tests/golden/torchmd_net.

Bars, relative to the largest value: 1e-12 where nothing limits agreement; 2e-7 where TorchMD-Net's own float32
constants do (its kernels for TensorNet and TensorNet2 hold 1/3 in single precision).
"""

from __future__ import annotations

import pytest
import torch
from torchmd_net_files import FOLDER, read_golden

from torchmdnet2 import System
from torchmdnet2.importers import convert

EXACT, SINGLE = 1e-12, 2e-7
CASES = {
    "et": EXACT,
    "et_vector_cutoff": EXACT,
    "transformer": EXACT,
    "graph_network": EXACT,
    "tensornet2": SINGLE,
    "tensornet2_coulomb": SINGLE,
    "tensornet2_coulomb_cut": SINGLE,
    "et_dipole": EXACT,
    "tensornet_dipole": SINGLE,
    "tensornet_ese": SINGLE,
}


def error(ours, theirs) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    args, state, data, given, system = read_golden(name)
    vectors = args["output_model"] == "DipoleMoment"
    if vectors:
        # they add the mean to each component of the dipole, which is refused; added below
        state["mean"] = torch.zeros_like(state["mean"])
    potential = convert(args, state)
    assert potential.dtype == torch.float64
    result = potential(system)
    theirs = data["out/y"].flatten()
    if vectors:
        assert error((result.properties["dipole"] + given["mean"]).norm(dim=1), theirs) <= CASES[name]
        return
    if args["output_model"] == "ElectronicSpatialExtent":
        assert error(result.properties["spatial_extent"], theirs) <= CASES[name]
        return
    assert error(result.energy, theirs) <= CASES[name]
    assert error(result.forces, data["out/forces"]) <= CASES[name]
    if "in/pbc_z" in data:
        charge = data["in/q"][:1] if given["passes_total_charge"] else None
        cell = System(z=data["in/pbc_z"], pos=data["in/pbc_pos"], cell=data["in/pbc_box"], charge=charge)
        result = potential(cell)
        assert error(result.energy, data["out/pbc_y"].flatten()) <= CASES[name]
        assert error(result.forces, data["out/pbc_forces"]) <= CASES[name]


def test_every_file_is_used():
    """Here, for TensorNet in its own file, and with the Lightning checkpoints."""
    tensornet = {f"tensornet_{kind}" for kind in ("o3", "so3", "charge", "gauss_1l")}
    lightning = {"lightning_3x_tensornet", "lightning_3x_equivariant_transformer"}
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == {*CASES, *tensornet, *lightning}


WITHOUT_EFFECT = {
    # the first layer's vectors are 0; the last vectors that the head makes are for a dipole
    "et": ("attention_layers.0.vec_proj", "head.output_network.1.vec2_proj"),
    "et_vector_cutoff": ("attention_layers.0.vec_proj", "head.output_network.1.vec2_proj"),
    "et_dipole": ("attention_layers.0.vec_proj",),
    "tensornet2": ("charge_predicts.1",),  # the last charges are for a Coulomb energy
}


@pytest.mark.parametrize("name", [*CASES, "tensornet_o3", "tensornet_charge", "tensornet_gauss_1l"])
def test_every_weight_shows_in_the_outputs(name):
    """Outputs that do not depend on a weight would show nothing of what it does."""
    args, state, _, _, system = read_golden(name)
    state["mean"] = torch.zeros_like(state["mean"])
    potential = convert(args, state)
    result = potential(system, forces=False, create_graph=True)
    outputs = [v for v in (result.energy, *result.properties.values()) if v is not None]
    weights = {key: value for key, value in potential.named_parameters() if value.requires_grad}
    gradients = torch.autograd.grad(sum(v.square().sum() for v in outputs), list(weights.values()), allow_unused=True)
    unseen = [k for k, g in zip(weights, gradients, strict=True) if g is None or float(g.abs().max()) < 1e-9]
    assert [key for key in unseen if not any(part in key for part in WITHOUT_EFFECT.get(name, ()))] == []


def test_a_mean_added_to_a_vector_is_refused():
    args, state, *_ = read_golden("et_dipole")
    with pytest.raises(ValueError, match="orientation"):
        convert(args, state)


def test_masses_are_those_of_the_golden_file():
    from ase.data import atomic_masses

    theirs = read_golden("et_dipole").state["output_model.atomic_mass"][1:]
    assert torch.allclose(theirs, torch.tensor(atomic_masses[1:119]), rtol=1e-12)
