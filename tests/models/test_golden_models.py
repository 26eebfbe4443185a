"""Energies, forces and properties of TorchMD-Net 3.1.0 in float64, from ../shared/golden.

Bars, relative to the largest value: 1e-12 where nothing limits agreement; 2e-7 where TorchMD-Net's own float32
constants do (its kernels for TensorNet and TensorNet2 hold 1/3 in single precision).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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


def golden(folder: Path, name: str):
    """Hyper-parameters, their tensors, and inputs and outputs of a golden file."""
    from safetensors.torch import load_file

    path = folder / "golden" / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    args = json.loads(path.with_suffix(".json").read_text())
    tensors = load_file(path)
    state = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    charged = args.pop("passes_total_charge")
    mean, _ = args.pop("mean"), args.pop("std")
    return args, state, tensors, charged, mean


def error(ours, theirs) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_golden(shared, name):
    args, state, data, charged, mean = golden(shared, name)
    vectors = args["output_model"] == "DipoleMoment"
    if vectors:
        # they add the mean to each component of the dipole, which is refused; added below
        state["mean"] = torch.zeros_like(state["mean"])
    potential = convert(args, state)
    assert potential.dtype == torch.float64
    charge = data["in/q"] if charged else None
    result = potential(System(z=data["in/z"], pos=data["in/pos"], batch=data["in/batch"], charge=charge))
    theirs = data["out/y"].flatten()
    if vectors:
        assert error((result.properties["dipole"] + mean).norm(dim=1), theirs) <= CASES[name]
        return
    if args["output_model"] == "ElectronicSpatialExtent":
        assert error(result.properties["spatial_extent"], theirs) <= CASES[name]
        return
    assert error(result.energy, theirs) <= CASES[name]
    assert error(result.forces, data["out/forces"]) <= CASES[name]
    if "in/pbc_z" in data:
        charge = charge[:1] if charged else None
        cell = System(z=data["in/pbc_z"], pos=data["in/pbc_pos"], cell=data["in/pbc_box"], charge=charge)
        result = potential(cell)
        assert error(result.energy, data["out/pbc_y"].flatten()) <= CASES[name]
        assert error(result.forces, data["out/pbc_forces"]) <= CASES[name]


def test_every_file_is_used(shared):
    """Here, for TensorNet in its own file, and with the Lightning checkpoints."""
    tensornet = {f"tensornet_{kind}" for kind in ("o3", "so3", "charge", "gauss_1l")}
    lightning = {"lightning_3x_tensornet", "lightning_3x_equivariant_transformer"}
    assert {path.stem for path in (shared / "golden").glob("*.safetensors")} <= {*CASES, *tensornet, *lightning}


def test_a_mean_added_to_a_vector_is_refused(shared):
    args, state, *_ = golden(shared, "et_dipole")
    with pytest.raises(ValueError, match="orientation"):
        convert(args, state)


def test_masses_are_those_of_the_golden_file(shared):
    from ase.data import atomic_masses

    state = golden(shared, "et_dipole")[1]
    theirs = state["output_model.atomic_mass"][1:]
    assert torch.allclose(theirs, torch.tensor(atomic_masses[1:119]), rtol=1e-12)
