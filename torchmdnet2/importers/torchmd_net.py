"""Import of TorchMD-Net's checkpoints, and export of potentials as such checkpoints."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.files import atomic_write
from ..core.source_files import Layout, prove_layout, read_tensor_file, reorder_rows
from ..errors import BadCheckpoint
from ..models.aimnet2.importer import is_package_model
from ..potential.potential import Potential
from ..priors import ZBL, Atomref
from ..units import factor
from .training_yaml import ABSENT, ARGUMENTS, COMMON, MODELS, model_config

__all__ = [
    "convert", "export_checkpoint", "export_state", "import_checkpoint", "modern_names", "our_names",
    "prior_configs", "read_checkpoint", "strip_prefix", "without_filter",
]  # fmt: skip


_RENAMED_IN_2 = (
    (re.compile(r"^(output_model\.output_network)\.(\d+)\.(weight|bias)$"), r"\1.layers.\2.\3"),
    (re.compile(r"\.update_net\.(\d+)\."), r".update_net.layers.\1."),
)
# constants that the modules of this package compute
_CONSTANTS = re.compile(r"(^|\.)distance\.box$|^output_model\.(atomic_mass|mass)$|^representation_model\.repulsion\.")
_DUPLICATE = re.compile(r"^(representation_model\.interactions\.\d+)\.conv\.net\.(.+)$")
_ATOM_FILTER = re.compile(r"^representation_model\.model\.")


def strip_prefix(state: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the tensors of a state_dict under names without the leading "model.".

    Raises:
        BadCheckpoint: an entry is not a tensor, or is not finite.
    """
    result = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise BadCheckpoint(f"'{name}' in the state_dict is not a tensor")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise BadCheckpoint(f"'{name}' holds values that are not finite")
        result[str(name).removeprefix("model.")] = value
    return result


def without_filter(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a representation inside an atom filter as if it had no filter."""
    return {_ATOM_FILTER.sub("representation_model.", name): value for name, value in state.items()}


def modern_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors from version 2 to version 3."""
    result = {}
    for name, value in state.items():
        for pattern, new in _RENAMED_IN_2:
            name = pattern.sub(new, name)
        result[name] = value
    return result


def our_names(state: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Return the tensors of the network under our names, without priors, constants and duplicates.

    Args:
        state: TorchMD-Net's tensors with names of version 3.
        head: place of the output network: "head" or "properties.NAME".

    Raises:
        BadCheckpoint: two copies of one weight differ.
    """
    result = {}
    for name, value in state.items():
        if name in ("mean", "std") or name.startswith("prior_model.") or _CONSTANTS.search(name):
            continue
        duplicate = _DUPLICATE.match(name)
        if duplicate:
            original = state.get(f"{duplicate[1]}.mlp.{duplicate[2]}")
            if original is None or not torch.equal(original, value):
                raise BadCheckpoint(f"'{name}' differs from its copy '{duplicate[1]}.mlp.{duplicate[2]}'")
            continue
        if name.startswith("representation_model."):
            result["representation." + name.removeprefix("representation_model.")] = value
        elif name.startswith("output_model."):
            result[f"{head}." + name.removeprefix("output_model.")] = value
        else:
            raise BadCheckpoint(f"'{name}' in the state_dict is unknown")
    return result


# --- Translation of TorchMD-Net's priors ---

_ANGSTROM, _JOULE = 1e-10, 1.602176634e-19


def prior_configs(
    args: Mapping[str, Any], state: Mapping[str, Tensor], energy_unit: str, std: float, decisions: list[str]
) -> list[dict[str, Any]]:
    """Return the configurations of the priors. The repulsion inside TensorNet2 becomes a prior.

    Args:
        args: TorchMD-Net's hyper-parameters.
        state: its tensors.
        energy_unit: unit of the model's energies.
        std: scale of the energies, which multiplies the repulsion too.
        decisions: list to which sentences are added.

    Raises:
        BadCheckpoint: a prior has no equivalent in this package.
    """
    priors: list[dict[str, Any]] = []
    stored = [key for key in state if key.startswith("representation_model.repulsion.")]
    if bool(stored) != bool(args.get("repulsion")):
        raise BadCheckpoint("the hyper-parameter 'repulsion' contradicts the tensors of the repulsion")
    if stored:
        _check_repulsion(state)
        priors.append({"name": "zbl", "envelope": "covalent", "screening": "refitted", "scale": std})
        decisions.append("the repulsion inside TensorNet2 is the prior 'zbl' here")
    names = _names(args)
    details = args.get("prior_args") or [{}] * len(names)
    if isinstance(details, Mapping):
        details = [details]
    if len(details) != len(names):
        raise BadCheckpoint(f"the checkpoint names {len(names)} priors, but has arguments for {len(details)}")
    for k, (name, given) in enumerate(zip(names, details, strict=True)):
        prefix = f"prior_model.{k}." if any(key.startswith("prior_model.0.") for key in state) else "prior_model."
        tensors = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if name in ("Atomref", "LearnableAtomref"):
            priors.append(_atomref(tensors, energy_unit, given, decisions))
        elif name in ("ZBL", "D2"):
            priors.append(_pair_prior(name, tensors, given, energy_unit, decisions))
        else:
            raise BadCheckpoint(
                f"the prior '{name}' cannot be converted"
                + (
                    ": its energies are right only for positions in nm and without a box, and its charges are not in "
                    "the checkpoint; add the prior 'coulomb' with the charges instead, and train anew"
                    if name == "Coulomb"
                    else ""
                )
            )
    found = {int(m[1]) for key in state if (m := re.match(r"prior_model\.(\d+)\.", key))}
    if found - set(range(len(names))):
        raise BadCheckpoint("the state_dict holds priors that the hyper-parameters do not name")
    return priors


def _check_repulsion(state: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose constants differ from those of the prior 'zbl'."""
    radii = ZBL(envelope="covalent").radii
    table = state["representation_model.repulsion.cutoff_ab"].double()
    z = torch.arange(1, table.shape[0], dtype=torch.float64)
    powers = state["representation_model.repulsion.z_pow"].double()[1:]
    radii = radii[1 : table.shape[0]]
    sums = radii[:, None] + radii
    if not (torch.allclose(table[1:, 1:], sums, rtol=1e-5) and torch.allclose(powers, z**0.3, rtol=1e-5)):
        raise BadCheckpoint("the radii or exponents of the repulsion differ from those of the prior 'zbl'")


def _names(args: Mapping[str, Any]) -> list[str]:
    """Return the names of the priors, given as a name, a list of names, or a list of {name: arguments}."""
    given = args.get("prior_model")
    if given is None:
        # delta learning appends reference energies that are off in training and on in use
        given = ["Atomref"] if args.get("remove_ref_energy") and args.get("prior_args") else []
    if isinstance(given, str | Mapping):
        given = [given]
    return [str(next(iter(p))) if isinstance(p, Mapping) else str(p) for p in given]


def _atomref(
    tensors: Mapping[str, Tensor], energy_unit: str, given: Mapping[str, Any], decisions: list[str]
) -> dict[str, Any]:
    if "atomref.weight" not in tensors:
        raise BadCheckpoint("the reference energies (atomref.weight) are missing in the state_dict")
    table = tensors["atomref.weight"].double().flatten() * factor("energy", energy_unit)
    energies = {str(z): float(e) for z, e in enumerate(table) if float(e) != 0}
    decisions.append(f"reference energies of {len(energies)} elements are added to the atoms (prior 'atomref')")
    if given.get("enable") is False:
        decisions.append(
            "the training removed the reference energies: they are added again, so that energies are totals"
        )
    return {"name": "atomref", "energies": energies, "max_z": table.shape[0]}


def _pair_prior(
    name: str, tensors: Mapping[str, Tensor], given: Mapping[str, Any], energy_unit: str, decisions: list[str]
) -> dict[str, Any]:
    length, energy = given.get("distance_scale"), given.get("energy_scale")
    unit = factor("energy", energy_unit) * _JOULE
    if length is None or energy is None or abs(length / _ANGSTROM - 1) > 1e-4 or abs(energy / unit - 1) > 1e-4:
        raise BadCheckpoint(
            f"the prior '{name}' was made for distance_scale {length} m and energy_scale {energy} J, not for Å and "
            f"{energy_unit}; give the right energy_unit, else the prior cannot be converted"
        )
    types = tensors.get("atomic_number", given.get("atomic_number"))
    if types is None or any(int(z) != i for i, z in enumerate(types)):
        raise BadCheckpoint(f"the prior '{name}' renumbers the elements (atomic_number), which cannot be converted")
    decisions.append(f"the prior '{name}' is '{name.lower()}' here; it uses each structure's cell")
    config = {"name": name.lower(), "cutoff": float(given["cutoff_distance"])}
    # TorchMD-Net's D2 jumps at its cutoff
    return config if name == "ZBL" else {**config, "switch_width": 0.0}


# --- Checkpoints of TorchMD-Net 2.x and 3.x ---
#
# Nothing in a checkpoint is executed: it is always read with `weights_only=True`, which allows tensors and plain data
# alone. A file that leaves something open is refused, with the reason.


def import_checkpoint(
    path: str | os.PathLike,
    energy_unit: str = "eV",
    elements: Iterable[int] | None = None,
    layout: Layout | None = None,
    ignore: Collection[str] = (),
) -> Potential:
    """Convert a TorchMD-Net checkpoint into a potential with the same energies and forces.

    `potential.metadata["import"]` holds the origin ("source", "sha256") and the decisions made in the conversion
    ("decisions", a list of sentences).

    Args:
        path: a Lightning checkpoint (.ckpt) of TorchMD-Net 2.x or 3.x.
        energy_unit: unit of the energies in the training; lengths must be in Å.
        elements: atomic numbers of the training; None allows all that the model can represent.
        layout: "2.x" or "3.x", for a checkpoint that does not prove which version wrote it. Another
            one than the checkpoint proves is an error.
        ignore: names of unknown hyper-parameters that do not change the results.

    Raises:
        FileNotFoundError: the file does not exist.
        BadCheckpoint: the file cannot be read safely, is not of TorchMD-Net, or contains something that has no
            equivalent in this package.
    """
    args, state = read_checkpoint(path)
    potential = convert(args, state, energy_unit, elements, layout, ignore)
    potential.metadata["import"]["source"] = Path(path).name
    potential.metadata["import"]["checksum"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return potential


def read_checkpoint(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read hyper-parameters and tensors of a checkpoint; names are without the leading "model.".

    Raises:
        FileNotFoundError, BadCheckpoint: as `import_checkpoint`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    content = read_tensor_file(path)
    if is_package_model(content):
        raise BadCheckpoint(f"{path}: a model of the package aimnet: torchmdnet2 import or import_aimnet2 converts it")
    if not isinstance(content, dict) or not {"hyper_parameters", "state_dict"} <= content.keys():
        raise BadCheckpoint(f"{path}: not a Lightning checkpoint of TorchMD-Net (no hyper_parameters and state_dict)")
    args, state = content["hyper_parameters"], content["state_dict"]
    if not isinstance(args, Mapping) or not isinstance(state, Mapping):
        raise BadCheckpoint(f"{path}: hyper_parameters and state_dict must be dictionaries")
    return dict(args), strip_prefix(state)


def convert(
    args: Mapping[str, Any],
    state: Mapping[str, Tensor],
    energy_unit: str = "eV",
    elements: Iterable[int] | None = None,
    layout: Layout | None = None,
    ignore: Collection[str] = (),
) -> Potential:
    """Return the potential of TorchMD-Net's hyper-parameters and tensors; see `import_checkpoint`."""
    if layout not in (None, "2.x", "3.x"):
        raise ValueError(f"layout must be '2.x' or '3.x', got '{layout}'")
    factor("energy", energy_unit)
    try:
        return _convert(args, state, energy_unit, elements, layout, ignore)
    except BadCheckpoint:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadCheckpoint(f"the hyper-parameters are not those of a model: {error}") from error


def _convert(
    args: Mapping[str, Any],
    state: Mapping[str, Tensor],
    energy_unit: str,
    elements: Iterable[int] | None,
    layout: Layout | None,
    ignore: Collection[str],
) -> Potential:
    decisions: list[str] = []
    state = without_filter(state)
    model = MODELS.get(str(args.get("model")))
    sign = 1
    if model in ("tensornet", "tensornet2"):
        layout = prove_layout(state, args, decisions, layout)
        sign = 1 if layout == "2.x" else -1
    state = modern_names(state)
    if layout == "2.x" and model is not None:
        state = reorder_rows(state, model, to="3.x")
    if model is not None:
        _check_sizes(args, state)
    mean, std = (_number(state, name) for name in ("mean", "std"))
    config = model_config(args, mean, std, sign, energy_unit, ignore, decisions)
    config["priors"] = prior_configs(args, state, energy_unit, std, decisions)
    if elements is not None:
        config["elements"] = sorted({int(z) for z in elements})
    else:
        decisions.append(
            "the checkpoint does not state its elements: all are allowed; give the elements of the training"
        )
    _check_cutoff(config["model"], state)
    potential = Potential.from_config(config)
    names = our_names(state, "head" if config["head"] is not None else f"properties.{config['properties'][0]['name']}")
    if config["model"].get("q_dim") == 0:
        names = {k: v for k, v in names.items() if ".charge_predict" not in k}
    if names["representation.distance_expansion." + _CENTRES[config["model"]["rbf_type"]]].dtype == torch.float64:
        potential = potential.double()
    expected = {k for k in potential.state_dict() if not k.startswith("priors.")}
    wrong = sorted(expected ^ set(names))
    if wrong:
        raise BadCheckpoint(
            f"the tensors do not fit the hyper-parameters: missing or too many are {', '.join(wrong[:5])}"
        )
    try:
        potential.load_state_dict(names, strict=False)
    except RuntimeError as error:
        raise BadCheckpoint(f"the tensors do not fit the hyper-parameters: {error}") from error
    potential.metadata["import"] = {"from": "TorchMD-Net", "decisions": decisions}
    return potential.eval()


_CENTRES = {"expnorm": "means", "gauss": "offset"}


def _number(state: Mapping[str, Tensor], name: str) -> float:
    if name not in state or state[name].numel() != 1:
        raise BadCheckpoint(f"the number '{name}' is missing in the state_dict")
    return float(state[name])


def _check_sizes(args: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose sizes contradict the hyper-parameters, before a model is built."""
    shapes = {name.removeprefix("representation_model."): tuple(value.shape) for name, value in state.items()}
    embedding = shapes.get("tensor_embedding.emb.weight", shapes.get("embedding.weight"))
    layers = {m[1] for name in shapes if (m := re.match(r"(?:layers|attention_layers|interactions)\.(\d+)\.", name))}
    claimed: list[tuple[str, Any, Any]] = [
        ("embedding", embedding, (args.get("max_z"), args.get("embedding_dimension"))),
        ("number of layers", len(layers), args.get("num_layers")),
    ]
    charges = shapes.get("charge_predict_0.q_mlp.layers.4.bias", (0,))
    if MODELS[args["model"]] == "tensornet2":
        claimed.append(("charges", charges, (2 * args.get("q_dim", 0),)))
    if args.get("output_mlp_num_layers") and args.get("output_model") == "ScalarPlusWeightedCoulomb":
        linear = sum(bool(re.match(r"output_model\.output_network\.layers\.\d+\.weight", name)) for name in state)
        claimed.append(("layers of the head", linear, args["output_mlp_num_layers"] + 2))
    for what, found, expected in claimed:
        if found != expected:
            raise BadCheckpoint(
                f"the tensors do not fit the hyper-parameters: {what} is {found}, but {expected} is claimed"
            )


def _check_cutoff(model: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse radial functions that were made for other cutoffs than the hyper-parameters claim."""
    centre = state.get("representation_model.distance_expansion." + _CENTRES.get(str(model["rbf_type"]), "?"))
    if centre is None or centre.numel() != model["num_rbf"]:
        raise BadCheckpoint("the radial functions do not fit rbf_type and num_rbf")
    if model["trainable_rbf"]:
        return
    lower, upper = float(model["cutoff_lower"]), float(model["cutoff"])
    if model["rbf_type"] == "expnorm":
        fits = abs(float(centre[0]) * math.exp(upper - lower) - 1) < 1e-4
    else:
        fits = abs(float(centre[0]) - lower) < 1e-4 and abs(float(centre[-1]) - upper) < 1e-4
    if not fits:
        raise BadCheckpoint(
            f"the radial functions were not made for cutoffs of {lower} and {upper} Å, as the hyper-parameters claim"
        )


# --- Export as a checkpoint for TorchMD-Net 3.x, if an exact equivalent exists ---

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

    Energies are the same, in eV, in vacuum and in the cells that TorchMD-Net supports. An existing file is renamed to
    FILE.old.

    Raises:
        ValueError: a part of the potential has no exact equivalent in TorchMD-Net; the message names it.
    """
    args, state = export_state(potential)
    buffer = io.BytesIO()
    state_dict = {f"model.{name}": value for name, value in state.items()}
    torch.save({"hyper_parameters": args, "state_dict": state_dict, "epoch": 0, "global_step": 0}, buffer)
    atomic_write(path, buffer.getvalue(), keep=True)


def export_state(potential: Potential) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return hyper-parameters and tensors under TorchMD-Net's names; the inverse of `convert`.

    Raises:
        ValueError: a part of the potential has no exact equivalent in TorchMD-Net; the message names it.
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
        raise ValueError("charges are conserved exactly here (exact_charge), but only up to 1e-6 in TorchMD-Net")
    if options.get("norm", "layer") != "layer":
        raise ValueError(f"TorchMD-Net has layer norms only, not the norm '{options['norm']}'")
    if options.get("tensor_norm", "square") != "square" or options.get("linear_readout"):
        raise ValueError("TorchMD-Net has the tensor_norm 'square' only, and no linear_readout")
    if options.get("rbf_type") == "bessel":
        raise ValueError("TorchMD-Net has no Bessel functions (rbf_type 'bessel')")
    if options.get("aggregation", "add") != "add":
        raise ValueError(f"TorchMD-Net computes the aggregation '{options['aggregation']}' over neighbors wrongly")
    if not options.get("vector_cutoff", True) and options["cutoff_lower"] > 0:
        raise ValueError(
            "TorchMD-Net leaves out pairs below cutoff_lower; here they are left out only with vector_cutoff"
        )
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
        # TorchMD-Net has the other sign of the antisymmetric part: the weights that mix it change their sign
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
    """Return arguments that TorchMD-Net's constructor requires and ours does not have."""
    arguments = {
        "max_num_neighbors": 128, "static_shapes": False, "box_vecs": None, "atom_filter": -1, "reduce_op": "add",
        "derivative": potential.head is not None, "precision": 64 if potential.dtype == torch.float64 else 32,
        "charge": True, "spin": False, "aggr": "add", "neighbor_embedding": True, "attn_activation": "silu",
        "num_heads": 8, "distance_influence": "both", **{k: v for k, v in ABSENT.items() if k != "q_dim"},
    }  # fmt: skip
    return {key: value for key, value in arguments.items() if key not in ARGUMENTS[potential.config["model"]["name"]]}


def _own_tensors(potential: Potential) -> dict[str, Tensor]:
    """Return the tensors of the network in the precision of the network."""
    return {
        key: value.detach().cpu().to(potential.dtype) if value.is_floating_point() else value.detach().cpu()
        for key, value in potential.state_dict().items()
    }


def _output(potential: Potential, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return output model, mean and std; add their buffers to the state."""
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
    """Return reference energies, minus the energies of isolated atoms, and the repulsion of TensorNet2."""
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
                raise ValueError("TorchMD-Net has this repulsion only inside TensorNet2, scaled like the energy")
            if not torch.equal(prior.radii.cpu(), ZBL(envelope="covalent").radii):
                raise ValueError("TorchMD-Net has this repulsion only with covalent radii, not with `radii`")
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
    """Return the constants that TorchMD-Net's TensorNet2 stores for its repulsion."""
    size = potential.representation.max_z
    z = torch.arange(size, dtype=torch.float64).clamp(min=1)
    radii = prior.radii.cpu()[:size]
    tables = {"z_pow": z**0.3, "z_outer": z[:, None] * z, "cutoff_ab": radii[:, None] + radii}
    return {f"representation_model.repulsion.{k}": v.to(potential.dtype) for k, v in tables.items()}
