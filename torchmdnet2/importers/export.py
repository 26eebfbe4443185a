"""Export of a potential as a checkpoint for TorchMD-Net 3.x, if an exact equivalent exists."""

from __future__ import annotations

import io
import os
import re
from typing import Any

import torch
from torch import Tensor

from ..core.files import atomic_write
from ..potential.potential import Potential
from ..priors import ZBL, Atomref
from .training_yaml import ABSENT, ARGUMENTS, COMMON

__all__ = ["export_checkpoint", "export_state"]

_MODELS = {
    "tensornet": "tensornet",
    "tensornet2": "tensornet2",
    "equivariant_transformer": "equivariant-transformer",
    "transformer": "transformer",
    "graph_network": "graph-network",
}
_OUTPUTS = {
    "scalar": "Scalar",
    "equivariant_scalar": "Scalar",
    "scalar_coulomb": "ScalarPlusWeightedCoulomb",
    "dipole": "DipoleMoment",
    "spatial_extent": "ElectronicSpatialExtent",
}


def export_checkpoint(potential: Potential, path: str | os.PathLike) -> None:
    """Write a checkpoint for `torchmdnet.models.model.load_model` of TorchMD-Net 3.x.

    Energies in vacuum and in the cells that it supports are the same, in eV. A file that is there already is kept as
    ….old.

    Raises:
        ValueError: there is no exact equivalent; says of what.
    """
    args, state = export_state(potential)
    buffer = io.BytesIO()
    state_dict = {f"model.{name}": value for name, value in state.items()}
    torch.save({"hyper_parameters": args, "state_dict": state_dict, "epoch": 0, "global_step": 0}, buffer)
    atomic_write(path, buffer.getvalue(), keep=True)


def export_state(potential: Potential) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hyper-parameters and tensors under TorchMD-Net's names; the inverse of `convert`.

    Raises:
        ValueError: there is no exact equivalent; says of what.
    """
    config = potential.config
    model = dict(config.get("model", {}))
    name = model.pop("name", None)
    if name not in _MODELS:
        raise ValueError(f"TorchMD-Net has no model '{name}'")
    if potential.atom_filter >= 0:
        raise ValueError("TorchMD-Net's atom filter cannot be evaluated; there is no equivalent")
    options = {**_defaults(type(potential.representation)), **model}
    args: dict[str, Any] = {"model": _MODELS[name]}
    args |= {theirs: options[ours] for theirs, ours in {**COMMON, **ARGUMENTS[name]}.items()}
    if options.get("q_dim") and options["exact_charge"]:
        raise ValueError("charges are conserved exactly here (exact_charge) and in TorchMD-Net up to 1e-6")
    if options.get("norm", "layer") != "layer":
        raise ValueError(f"TorchMD-Net has layer norms only, not the norm '{options['norm']}'")
    if options.get("tensor_norm", "square") != "square" or options.get("linear_readout"):
        raise ValueError("TorchMD-Net has the tensor_norm 'square' only, and no linear_readout")
    if options.get("rbf_type") == "bessel":
        raise ValueError("TorchMD-Net has no Bessel functions (rbf_type 'bessel')")
    if options.get("aggregation", "add") != "add":
        raise ValueError(f"TorchMD-Net has no right aggregation '{options['aggregation']}' over neighbors")
    if not options.get("vector_cutoff", True) and options["cutoff_lower"] > 0:
        raise ValueError("TorchMD-Net leaves out pairs below cutoff_lower, here vector_cutoff alone would")
    args |= _fixed_arguments(potential)
    source = _own_tensors(potential)

    state: dict[str, Tensor] = {}
    for key, value in source.items():
        if key.startswith("representation."):
            state["representation_model." + key.removeprefix("representation.")] = value
        elif key.startswith(("head.", "properties.")):
            state["output_model." + re.sub(r"^(head|properties\.\w+)\.", "", key)] = value
    for key in [k for k in state if re.search(r"interactions\.\d+\.mlp\.", k)]:
        state[key.replace(".mlp.", ".conv.net.")] = state[key]
    if options.get("group") == "SO(3)" and options["skew_sign"] == 1:
        # the sign of the antisymmetric part, put into the weights that mix it
        key = "representation_model.tensor_embedding.linears_tensor.1.weight"
        state[key] = -state[key]
    state["representation_model.distance.box"] = torch.zeros(3, 3, dtype=potential.dtype)
    args |= _output(potential, state)
    args |= _priors(potential, state)
    return args, state


def _defaults(cls: type) -> dict[str, Any]:
    import inspect

    return {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.default is not p.empty}


def _fixed_arguments(potential: Potential) -> dict[str, Any]:
    """What their constructor asks for and ours does without."""
    arguments = {
        "max_num_neighbors": 128, "static_shapes": False, "box_vecs": None, "atom_filter": -1, "reduce_op": "add",
        "derivative": potential.head is not None, "precision": 64 if potential.dtype == torch.float64 else 32,
        "charge": True, "spin": False, "aggr": "add", "neighbor_embedding": True, "attn_activation": "silu",
        "num_heads": 8, "distance_influence": "both", **{k: v for k, v in ABSENT.items() if k != "q_dim"},
    }  # fmt: skip
    return {key: value for key, value in arguments.items() if key not in ARGUMENTS[potential.config["model"]["name"]]}


def _own_tensors(potential: Potential) -> dict[str, Tensor]:
    """Tensors of the network in its own precision."""
    return {
        key: value.detach().cpu().to(potential.dtype) if value.is_floating_point() else value.detach().cpu()
        for key, value in potential.state_dict().items()
    }


def _output(potential: Potential, state: dict[str, Tensor]) -> dict[str, Any]:
    """Output model, mean and std; adds their buffers to the state."""
    config = potential.config
    heads = [*([] if config.get("head", {}) is None else [{"name": "scalar", **config.get("head", {})}])]
    heads += config.get("properties") or []
    if len(heads) != 1:
        raise ValueError("a checkpoint of TorchMD-Net has one output, this potential has several")
    head = heads[0]
    if head["name"] not in _OUTPUTS or head.get("reduce", "sum") != "sum":
        raise ValueError(f"TorchMD-Net has no equivalent of the head '{head['name']}'")
    vectors = potential.config["model"]["name"] == "equivariant_transformer"
    if head["name"] in ("scalar", "equivariant_scalar", "dipole"):
        own = head["name"] == "equivariant_scalar" or bool(head.get("equivariant"))
        if own != vectors:
            raise ValueError("in TorchMD-Net the Equivariant Transformer has equivariant heads, other models have not")
    if head.get("activation", "silu") != config["model"].get("activation", "silu"):
        raise ValueError("in TorchMD-Net the head has the activation function of the model")
    if head.get("num_hidden_layers") and head["name"] != "scalar_coulomb":
        raise ValueError("TorchMD-Net ignores further layers of this head (output_mlp_num_layers)")
    mean, std = potential.energy_shift, potential.energy_scale
    if potential.head is None:
        mean, std = head.get("shift", 0.0), head.get("scale", 1.0)
    state["mean"], state["std"] = (torch.tensor(v, dtype=potential.dtype) for v in (mean, std))
    args: dict[str, Any] = {"output_model": _OUTPUTS[head["name"]], "output_mlp_num_layers": 0}
    if head["name"] in ("dipole", "spatial_extent"):
        from ase.data import atomic_masses

        masses = torch.tensor([1.0, *atomic_masses[1:119]], dtype=potential.dtype)
        state["output_model.atomic_mass"] = masses
    if head["name"] == "scalar_coulomb":
        if head.get("method", "all_pairs") in ("ewald", "pme"):
            raise ValueError("TorchMD-Net has no Ewald summation")
        q_dim = potential.config["model"].get("q_dim", 16)
        weights = [float(w) for w in head["q_weights"]]
        args["q_weights"] = [weights[i : i + q_dim] for i in range(0, len(weights), q_dim)]
        args["output_mlp_num_layers"] = head.get("num_hidden_layers", 0)
        args["coulomb_cutoff"] = None
        if head.get("method") == "reaction_field":
            if head.get("dielectric", 78.3) != 78.3:
                raise ValueError("TorchMD-Net's reaction field has the dielectric constant 78.3")
            if head.get("switch_width", 1.0) != 0:
                raise ValueError("TorchMD-Net's reaction field is not switched off smoothly (switch_width 0)")
            args["coulomb_cutoff"] = head.get("coulomb_cutoff", 10.0)
            state["output_model.distance.box"] = torch.zeros(3, 3, dtype=potential.dtype)
    return args


def _priors(potential: Potential, state: dict[str, Tensor]) -> dict[str, Any]:
    """Reference energies, with what isolated atoms are subtracted; the repulsion of TensorNet2."""
    args: dict[str, Any] = {"prior_model": None, "prior_args": []}
    table = torch.zeros(potential.representation.max_z, dtype=torch.float64)
    any_reference = False
    for prior in potential.priors:
        if isinstance(prior, Atomref):
            z = torch.arange(table.shape[0])
            values = prior.table.detach()
            table += torch.nn.functional.pad(values.cpu(), (0, max(0, len(z) - len(values))))[: len(z)]
            any_reference = True
        elif isinstance(prior, ZBL) and prior.envelope == "covalent" and prior.power == 0.3:
            if potential.config["model"]["name"] != "tensornet2" or prior.scale != potential.energy_scale:
                raise ValueError("TorchMD-Net has this repulsion inside TensorNet2 only, scaled as the energy is")
            if not torch.equal(prior.radii.cpu(), ZBL(envelope="covalent").radii):
                raise ValueError("TorchMD-Net has this repulsion with covalent radii only, not with `radii`")
            args["repulsion"] = True
            state |= _repulsion(prior, potential)
        else:
            raise ValueError(f"TorchMD-Net has no equivalent of the prior '{prior.registered_name}'")
    if potential.head is not None and potential.subtract_isolated:
        table -= potential.isolated_energies().detach().cpu() * potential.energy_scale
        any_reference = True
    if any_reference:
        column = table.to(potential.dtype)[:, None]
        state["prior_model.0.initial_atomref"] = column
        state["prior_model.0.atomref.weight"] = column.clone()
        args["prior_model"], args["prior_args"] = "Atomref", [{"max_z": table.shape[0], "trainable": False}]
    return args


def _repulsion(prior: ZBL, potential: Potential) -> dict[str, Tensor]:
    """The constants that TensorNet2 stores of its repulsion."""
    size = potential.representation.max_z
    z = torch.arange(size, dtype=torch.float64).clamp(min=1)
    radii = prior.radii.cpu()[:size]
    tables = {"z_pow": z**0.3, "z_outer": z[:, None] * z, "cutoff_ab": radii[:, None] + radii}
    return {f"representation_model.repulsion.{k}": v.to(potential.dtype) for k, v in tables.items()}
