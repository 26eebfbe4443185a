"""Import of TensorNet potentials of matgl.

matgl keeps a model as a folder: `model.json` describes the model, `state.pt` holds its tensors. `model.pt`, a pickle
that repeats `model.json`, is not read. Nothing in the files is executed: the tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.source_files import read_tensor_file, reorder_rows
from ...errors import BadCheckpoint
from ...potential.potential import SYMBOLS, Potential

__all__ = ["convert_matgl", "import_matgl", "is_matgl"]

_MODULES = {
    "matgl.models._tensornet_pyg": "neighbor",
    "matgl.models._tensornet_dgl": "own",
}
"""Module of the class in matgl: the backend of the training, and whether messages carry tensors of neighbor or atom."""
_REQUIRED = {
    "rbf_type": "SphericalBessel", "use_smooth": True, "readout_type": "weighted_atom", "task_type": "regression",
    "is_intensive": False, "ntargets": 1, "include_state": False, "field": "node_feat", "ntypes_state": None,
    "dim_state_feats": None, "dim_state_embedding": 0,
}  # fmt: skip
"""Arguments with a single value that this package can reproduce; matgl uses the same value for a missing argument."""
_USED = {"element_types", "units", "nblocks", "max_n", "cutoff", "activation_type", "equivariance_invariance_group"}
_NO_EFFECT = {"num_rbf", "max_l", "width", "dtype", "niters_set2set", "nlayers_set2set"}
_GATED = re.compile(r"^final_layer\.gated\.(layers|gates)\.(\d)\.(weight|bias)$")
_UNUSED = re.compile(r"^(bond_expansion\.rbf\.cutoff|tensor_embedding\.emb3\.(weight|bias))$")


def is_matgl(path: str | os.PathLike) -> bool:
    """Return whether the path is a folder with a model of matgl, or the model.json in it."""
    path = Path(path)
    return path.is_dir() or path.name == "model.json"


def import_matgl(path: str | os.PathLike) -> Potential:
    """Convert a TensorNet of matgl into a potential with the same energies, forces and stress.

    `potential.metadata["import"]` holds the origin and the decisions made in the conversion, as for other imports.

    Args:
        path: a folder with `model.json` and `state.pt`, or the `model.json` in it.

    Returns:
        A potential in eV and Å.

    Raises:
        FileNotFoundError: one of the two files is missing.
        BadCheckpoint: the files cannot be read safely, do not describe a TensorNet of matgl, or contain something that
            has no equivalent in this package.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    for name in ("model.json", "state.pt"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder}: not the folder of a matgl model: the file {name} is missing")
    try:
        content = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{folder / 'model.json'}: not JSON: {error}") from error
    state = read_tensor_file(folder / "state.pt")
    try:
        potential = convert_matgl(content, state)
    except BadCheckpoint:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: model.json and state.pt are not those of a TensorNet: {error}") from error
    facts = potential.metadata["import"]
    facts["source"] = folder.resolve().name
    facts["checksum"] = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    return potential


def convert_matgl(content: Mapping[str, Any], state: Mapping[str, Tensor]) -> Potential:
    """Return the potential of the content of `model.json` and the tensors of `state.pt`; see `import_matgl`."""
    decisions: list[str] = []
    kwargs = content["kwargs"]
    given = kwargs["model"]
    messages = _messages(content, given, decisions)
    args = dict(given["init_args"])
    for name, wanted in _REQUIRED.items():
        if args.pop(name, wanted) != wanted:
            raise BadCheckpoint(f"{name}: only {wanted!r} has an equivalent here, not {given['init_args'][name]!r}")
    unknown = sorted(set(args) - _USED - _NO_EFFECT)
    if unknown:
        raise BadCheckpoint(f"the arguments {', '.join(unknown)} are unknown, and could change the model's results")
    for name in ("calc_repuls", "calc_magmom"):
        if kwargs.get(name, False):
            raise BadCheckpoint(f"{name} has no equivalent here")
    numbers = [SYMBOLS.index(symbol) for symbol in args["element_types"]]
    if len(set(numbers)) < len(numbers) or 0 in numbers:
        raise BadCheckpoint("element_types lists an element twice, or an unknown element")
    tensors, constants = _tensors(state)
    scale, shift = (float(constants[name]) for name in ("data_std", "data_mean"))
    references = constants["element_refs.property_offset"].double()
    if tuple(references.shape) != (len(numbers),):
        raise BadCheckpoint(f"{tuple(references.shape)} element references for {len(numbers)} elements")
    stored = constants.get("model.bond_expansion.rbf.cutoff")
    if stored is not None and float(stored) != float(args["cutoff"]):
        raise BadCheckpoint(f"the cutoff is {args['cutoff']} Å in model.json and {float(stored)} Å in state.pt")

    model = {
        "name": "matgl_tensornet",
        "hidden_channels": int(args["units"]),
        "num_layers": int(args["nblocks"]),
        "num_rbf": int(args["max_n"]),
        "activation": str(args["activation_type"]),
        "cutoff": float(args["cutoff"]),
        "max_z": max(numbers) + 1,
        "group": args["equivariance_invariance_group"],
        "messages": messages,
    }
    layers = {int(m[1]) for name in tensors if (m := re.match(r"layers\.(\d+)\.", name))}
    shape = tuple(tensors["tensor_embedding.emb.weight"].shape)
    if len(layers) != model["num_layers"] or shape != (len(numbers), model["hidden_channels"]):
        raise BadCheckpoint("the tensors in state.pt do not have the sizes that model.json claims")
    decisions.append("the total charge is not used; isolated atoms have the energies that the network gives")
    decisions.append(f"atomic energies are scaled by {scale:.9g} eV; energies contain the references of the elements")
    if shift:
        decisions.append(f"{shift:.9g} eV is added to each structure")
    energies = {SYMBOLS[z]: energy for z, energy in zip(numbers, references.tolist(), strict=True)}
    potential = Potential.from_config(
        {
            "model": model,
            "head": {"name": "gated_scalar", "activation": model["activation"]},
            "priors": [{"name": "atomref", "energies": energies, "max_z": model["max_z"]}],
            "energy_scale": scale,
            "energy_shift": shift,
            "subtract_isolated": False,
            "elements": sorted(numbers),
        }
    )
    potential.load_state_dict(
        {**_our_tensors(tensors, numbers, model["max_z"]), **_kept(potential, "priors.")}, strict=True
    )
    potential.metadata["import"] = {"from": "matgl", "decisions": decisions}
    return potential.eval()


def _messages(content: Mapping[str, Any], given: Mapping[str, Any], decisions: list[str]) -> str:
    """Return the convention of the messages, "neighbor" or "own"."""
    if content.get("@class") != "Potential" or given.get("@class") != "TensorNet":
        raise BadCheckpoint(
            f"model.json describes a {content.get('@class')} with a {given.get('@class')}; only potentials of matgl "
            "with a TensorNet are read"
        )
    module, version = given.get("@module"), given.get("@model_version")
    if module not in _MODULES or version != 1:
        raise BadCheckpoint(
            f"{module}, version {version}, is not a known TensorNet of matgl; known are "
            f"{' and '.join(_MODULES)}, version 1"
        )
    backend = module.rpartition("_")[2]
    words = {"neighbor": "those of the neighbor", "own": "those of the atom that receives it"}[_MODULES[module]]
    decisions.append(f"the model was trained with the backend {backend.upper()}: the tensors in a message are {words}")
    return _MODULES[module]


def _tensors(state: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the network, without the leading "model.", and the other tensors."""
    if not isinstance(state, Mapping):
        raise BadCheckpoint("state.pt does not hold named tensors")
    network: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise BadCheckpoint(f"'{name}' in state.pt is not a tensor")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadCheckpoint(f"'{name}' in state.pt holds values that are not finite")
        known = name.removeprefix("model.")
        if name != known and not _UNUSED.match(known):
            network[known] = value
        else:
            constants[name] = value
    missing = {"data_std", "data_mean", "element_refs.property_offset"} - set(constants)
    if missing:
        raise BadCheckpoint(f"state.pt has no {', '.join(sorted(missing))}")
    return network, constants


def _our_tensors(tensors: Mapping[str, Tensor], numbers: list[int], max_z: int) -> dict[str, Tensor]:
    """Return the tensors under our names and in our order.

    Rows of the filters are (I, A, S) × F; the receiver comes before the neighbor; elements follow atomic numbers.
    """
    theirs = {f"representation_model.{name}": value for name, value in tensors.items()}
    result = {}
    for name, value in reorder_rows(theirs, "tensornet", to="3.x").items():
        name = name.removeprefix("representation_model.")
        gated = _GATED.match(name)
        if gated:
            part = {"layers": "value", "gates": "gate"}[gated[1]]
            result[f"head.{part}.layers.{gated[2]}.{gated[3]}"] = value
            continue
        if name == "tensor_embedding.emb2.weight":
            neighbor, receiver = value.chunk(2, 1)
            value = torch.cat([receiver, neighbor], 1)
        elif name == "tensor_embedding.emb.weight":
            value = value.new_zeros(max_z, value.shape[1]).index_copy(0, torch.tensor(numbers), value)
        result[f"representation.{name}"] = value
    return result


def _kept(potential: Potential, prefix: str) -> dict[str, Tensor]:
    return {name: value for name, value in potential.state_dict().items() if name.startswith(prefix)}
