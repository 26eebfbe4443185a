"""Makes, or checks, the golden outputs of TorchMD-Net that are kept beside this file.

    pip install torchmd-net==3.1.0
    python tests/golden/torchmd_net/make.py FOLDER           # NAME.json and NAME.safetensors of each model
    python tests/golden/torchmd_net/make.py FOLDER --check   # those that are there: computed again, largest differences

Needs torchmd-net and no torchmdnet2. Runs on a CPU in float64. The Lightning checkpoints are not made here: they come
from TorchMD-Net's own training command; `--check` computes their outputs too. README.md describes all of the files.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

COMMON = {
    "activation": "silu", "aggr": "add", "atom_filter": -1, "attn_activation": "silu", "box_vecs": None,
    "cutoff_lower": 0.0, "cutoff_upper": 4.5, "derivative": True, "distance_influence": "both",
    "embedding_dimension": 16, "equivariance_invariance_group": "O(3)", "max_num_neighbors": 64, "max_z": 10,
    "neighbor_embedding": True, "num_heads": 4, "num_layers": 2, "num_rbf": 8, "output_model": "Scalar",
    "precision": 64, "prior_model": None, "rbf_type": "expnorm", "reduce_op": "add", "static_shapes": False,
    "trainable_rbf": False, "vector_cutoff": False, "mean": -0.7, "std": 1.3, "passes_total_charge": False,
}  # fmt: skip
TENSORNET, TENSORNET2, ET = {"model": "tensornet"}, {"model": "tensornet2"}, {"model": "equivariant-transformer"}
COULOMB = {"output_model": "ScalarPlusWeightedCoulomb", "q_dim": 4, "q_weights": [1.0, 0.5, 2.0]}
CHARGED = {"passes_total_charge": True}
PROPERTY = {"derivative": False}
MODELS = {
    "tensornet_o3": TENSORNET,
    "tensornet_so3": {**TENSORNET, "equivariance_invariance_group": "SO(3)"},
    "tensornet_charge": {**TENSORNET, **CHARGED, "charge": True},
    "tensornet_gauss_1l": {**TENSORNET, "num_layers": 1, "rbf_type": "gauss", "activation": "tanh"},
    "tensornet_dipole": {**TENSORNET, **PROPERTY, "output_model": "DipoleMoment"},
    "tensornet_ese": {**TENSORNET, **PROPERTY, "output_model": "ElectronicSpatialExtent"},
    "tensornet2": {**TENSORNET2, **CHARGED, "q_dim": 4},
    "tensornet2_coulomb": {**TENSORNET2, **CHARGED, **COULOMB},
    "tensornet2_coulomb_cut": {**TENSORNET2, **CHARGED, **COULOMB, "coulomb_cutoff": 7.0, "repulsion": True},
    "et": ET,
    "et_vector_cutoff": {**ET, "distance_influence": "keys", "vector_cutoff": True},
    "et_dipole": {**ET, **PROPERTY, "output_model": "DipoleMoment"},
    "transformer": {"model": "transformer"},
    "graph_network": {"model": "graph-network"},
}
PERIODIC = ("tensornet_o3", "tensornet_so3", "tensornet2", "et", "et_vector_cutoff", "transformer", "graph_network")
CHECKPOINTS = ("lightning_3x_tensornet", "lightning_3x_equivariant_transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compute again what is there, write nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(MODELS):
        path = options.folder / f"{name}.safetensors"
        if options.check:
            stored = load_file(path)
            model = create(json.loads(path.with_suffix(".json").read_text()))
            model.load_state_dict({key.removeprefix("model/"): v for key, v in stored.items() if "model/" in key})
            again = outputs(name, model, {key: v for key, v in stored.items() if key.startswith("in/")})
            print(name, largest_difference(again, stored))
            continue
        args = {**COMMON, **MODELS[name]}
        path.with_suffix(".json").write_text(json.dumps(args, indent=1, sort_keys=True) + "\n")
        model = randomized(create(args), seed=number)
        given = inputs(periodic=name in PERIODIC)
        weights = {f"model/{key}": compact(value) for key, value in model.state_dict().items()}
        save_file({**weights, **given, **outputs(name, model, given)}, path)
        print(name, f"{path.stat().st_size / 1e3:.0f} kB")
    for name in CHECKPOINTS if options.check else ():
        stored = load_file(options.folder / f"{name}.safetensors")
        print(name, largest_difference(of_checkpoint(options.folder / f"{name}.ckpt", stored), stored))


def create(args: dict) -> torch.nn.Module:
    """TorchMD-Net's model; mean and std are those of the training data."""
    from torchmdnet.models.model import create_model

    args = copy.deepcopy(args)
    args.pop("passes_total_charge")
    mean, std = (torch.tensor(args.pop(key), dtype=torch.float64) for key in ("mean", "std"))
    return create_model(args, mean=mean, std=std).double().eval()


def randomized(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Noise on every parameter, so that biases, norms and gates, which begin at 0 or 1, show in the outputs.

    The sums are rounded to float32: the files keep them in half the space and without loss.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter.std() if parameter.dim() > 1 else 0.2
            parameter.copy_((parameter + scale * noise).float())
    return model


def compact(value: Tensor) -> Tensor:
    """In float32 where that is exact."""
    exact = value.is_floating_point() and torch.equal(value.float().double(), value.double())
    return (value.float() if exact else value).contiguous()


def inputs(periodic: bool) -> dict[str, Tensor]:
    """Two molecules with total charges, and one cell at least two cutoffs wide in each direction."""
    generator = torch.Generator().manual_seed(99)
    sizes = (9, 6)
    pos = torch.cat([cluster(n, 1.9 * n ** (1 / 3), generator) for n in sizes])
    found = {
        "in/z": torch.tensor([6, 6, 8, 1, 1, 1, 1, 1, 1, 7, 6, 8, 1, 1, 1]),
        "in/pos": pos,
        "in/batch": torch.tensor([0] * sizes[0] + [1] * sizes[1]),
        "in/q": torch.tensor([1.0, -2.0], dtype=torch.float64),
    }
    if periodic:
        box = torch.tensor([[9.6, 0.0, 0.0], [1.7, 9.8, 0.0], [-2.1, 1.3, 10.1]], dtype=torch.float64)
        count = 30
        found["in/pbc_box"] = box
        found["in/pbc_z"] = torch.tensor([1, 6, 7, 8, 1])[torch.arange(count) % 5]
        found["in/pbc_pos"] = in_cell(count, box, generator)
    return found


def cluster(count: int, width: float, generator: torch.Generator) -> Tensor:
    """Points in a cube that are at least 0.9 Å apart, [count, 3]."""
    kept: list[Tensor] = []
    while len(kept) < count:
        point = width * torch.rand(3, generator=generator, dtype=torch.float64)
        if all(float((point - other).norm()) > 0.9 for other in kept):
            kept.append(point)
    return torch.stack(kept)


def in_cell(count: int, box: Tensor, generator: torch.Generator) -> Tensor:
    """Points in a cell, some outside of it by a lattice vector, at least 1 Å from each other's images, [count, 3]."""
    shifts = torch.cartesian_prod(*[torch.arange(-1.0, 2.0, dtype=torch.float64)] * 3) @ box
    kept: list[Tensor] = []
    while len(kept) < count:
        point = torch.rand(3, generator=generator, dtype=torch.float64) @ box
        if all(float((point - other + shifts).norm(dim=1).min()) > 1.0 for other in kept):
            kept.append(point)
    return torch.stack(kept) + (torch.arange(count) % 3 - 1)[:, None] * box[0]


def outputs(name: str, model: torch.nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """y after std and mean, and forces (empty for a property) of the molecules and of the cell."""
    charged = MODELS.get(name, {}).get("passes_total_charge", False)
    charge = {"q": given["in/q"]} if charged else {}
    y, forces = model(given["in/z"], given["in/pos"].clone(), given["in/batch"], **charge)
    found = {"out/y": y.detach(), "out/forces": forces.detach()}
    if "in/pbc_z" in given:
        charge = {"q": given["in/q"][:1]} if charged else {}
        batch = torch.zeros_like(given["in/pbc_z"])
        y, forces = model(given["in/pbc_z"], given["in/pbc_pos"].clone(), batch, box=given["in/pbc_box"], **charge)
        found |= {"out/pbc_y": y.detach(), "out/pbc_forces": forces.detach()}
    return {key: value.contiguous() for key, value in found.items()}


def of_checkpoint(path: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a Lightning checkpoint's float32 weights, in float64."""
    from torchmdnet.models.model import load_model

    model = load_model(str(path), derivative=True).double().eval()
    for module in model.modules():
        if hasattr(module, "dtype"):
            module.dtype = torch.float64
    return outputs(path.stem, model, given)


def largest_difference(ours: dict[str, Tensor], stored: dict[str, Tensor]) -> str:
    differences = {key: float((v - stored[key]).abs().max()) for key, v in ours.items() if v.numel()}
    return "  ".join(f"{key} {difference:.1e}" for key, difference in differences.items())


if __name__ == "__main__":
    main()
