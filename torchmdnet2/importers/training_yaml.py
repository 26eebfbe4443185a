"""Translation of TorchMD-Net's hyper-parameters and training YAML into configurations of this package."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import BadCheckpoint, BadConfig
from ..units import factor

__all__ = [
    "ABSENT", "ARGUMENTS", "COMMON", "MODELS", "NO_EFFECT", "channel_weights", "config_from_torchmd_net",
    "convert_yaml", "model_config",
]  # fmt: skip


MODELS = {
    "tensornet": "tensornet",
    "tensornet2": "tensornet2",
    "tensornetv2_alt": "tensornet2",  # AceFF-2
    "tensornet-nqe": "tensornet2",  # AceFF-2
    "equivariant-transformer": "equivariant_transformer",
    "transformer": "transformer",
    "graph-network": "graph_network",
}
"""TorchMD-Net's names of models, and ours."""

COMMON = {
    "embedding_dimension": "hidden_channels",
    "num_layers": "num_layers",
    "num_rbf": "num_rbf",
    "rbf_type": "rbf_type",
    "trainable_rbf": "trainable_rbf",
    "activation": "activation",
    "cutoff_lower": "cutoff_lower",
    "cutoff_upper": "cutoff",
    "max_z": "max_z",
}
_ATTENTION = {
    "attn_activation": "attn_activation",
    "neighbor_embedding": "neighbor_embedding",
    "num_heads": "num_heads",
    "distance_influence": "distance_influence",
}
ARGUMENTS = {
    "tensornet": {"equivariance_invariance_group": "group"},
    "tensornet2": {"equivariance_invariance_group": "group", "q_dim": "q_dim"},
    "equivariant_transformer": {**_ATTENTION, "vector_cutoff": "vector_cutoff"},
    "transformer": _ATTENTION,
    "graph_network": {"neighbor_embedding": "neighbor_embedding", "aggr": "aggregation"},
}
# defaults of TorchMD-Net's constructors, for arguments that an old checkpoint does not store
ABSENT = {"q_dim": 0, "vector_cutoff": False, "equivariance_invariance_group": "O(3)"}

_READ_HERE = {
    "model", "output_model", "output_mlp_num_layers", "reduce_op", "atom_filter", "prior_model", "prior_args", "charge",
    "spin", "box_vecs", "remove_ref_energy", "standardize", "q_weights", "repulsion", "coulomb_cutoff",
    "coulomb_epsilon_solvent", "precision", "derivative", "check_errors",
}  # fmt: skip

NO_EFFECT = {
    # of neighbor lists: the lists of this package have no limits to set
    "max_num_neighbors", "static_shapes", "coulomb_max_num_neighbors", "coulomb_neighbor_strategy",
    # of the training
    "load_model", "conf", "num_epochs", "batch_size", "inference_batch_size", "lr", "lr_patience", "lr_metric",
    "lr_min", "lr_factor", "lr_warmup_steps", "early_stopping_patience", "early_stopping_monitor", "reset_trainer",
    "weight_decay", "ema_alpha_y", "ema_alpha_neg_dy", "ema_alpha_dy", "ngpus", "num_nodes", "log_dir", "splits",
    "train_size", "val_size", "test_size", "test_interval", "save_interval", "seed", "num_workers", "redirect",
    "gradient_clipping", "checkpoint_monitor", "load_weights", "dataset", "dataset_root", "dataset_arg", "coord_files",
    "embed_files", "energy_files", "force_files", "dataset_preload_limit", "y_weight", "neg_dy_weight", "energy_weight",
    "force_weight", "train_loss", "train_loss_arg", "wandb_use", "wandb_name", "wandb_project", "wandb_resume_from_id",
    "tensorboard_use", "accelerator", "distributed_backend", "amp_backend", "atomref_trainable", "early_stopping",
}  # fmt: skip


def model_config(
    args: Mapping[str, Any],
    mean: float,
    std: float,
    skew_sign: int,
    energy_unit: str,
    ignore: Collection[str],
    decisions: list[str],
) -> dict[str, Any]:
    """Return the configuration of a Potential, without its priors.

    Args:
        args: TorchMD-Net's hyper-parameters.
        mean, std: the standardisation of the training, in the model's energy unit.
        skew_sign: sign of TensorNet's antisymmetric part, +1 or −1.
        energy_unit: unit of the model's energies.
        ignore: names of unknown hyper-parameters that do not change the results.
        decisions: list to which sentences are added.

    Raises:
        BadCheckpoint: a hyper-parameter is unknown, or has no equivalent in this package; or `ignore` names one that
            is not unknown.
    """
    theirs = args.get("model")
    if theirs not in MODELS:
        raise BadCheckpoint(f"the model '{theirs}' is unknown; known: {', '.join(MODELS)}")
    name = MODELS[theirs]
    known = {*COMMON, *_READ_HERE, *NO_EFFECT, *(k for table in ARGUMENTS.values() for k in table)}
    others = {key for key in set(args) - known if args[key] is not None}  # None: not set
    if idle := sorted(set(ignore) - others):
        raise BadCheckpoint(
            f"ignore: {', '.join(idle)} has no effect: the checkpoint sets no unknown hyper-parameter of this name"
        )
    if unknown := sorted(others - set(ignore)):
        raise BadCheckpoint(
            f"the hyper-parameters {', '.join(unknown)} are unknown, and could change the model's results; if they "
            "do not, pass ignore=[…] with their names"
        )
    if theirs != name.replace("_", "-"):
        decisions.append(f"the model '{theirs}' is '{name}' here")
    model: dict[str, Any] = {"name": name}
    for key, ours in {**COMMON, **ARGUMENTS[name]}.items():
        if key not in args and key not in ABSENT:
            raise BadCheckpoint(f"the hyper-parameter '{key}' is missing")
        model[ours] = args.get(key, ABSENT.get(key))
    _refuse_wrong_reductions(args, name)
    if name in ("tensornet", "tensornet2"):
        model["skew_sign"] = skew_sign
        if model["group"] == "SO(3)":
            decisions.append(
                f"SO(3): the antisymmetric part has sign {skew_sign:+d}, as in the version of the training"
            )
    if name == "tensornet2" and model["q_dim"]:
        model["exact_charge"] = False
        decisions.append("the charges sum to the total charge up to 1e-6 of the correction, as in the training")
    if name == "equivariant_transformer" and not model["vector_cutoff"]:
        if model["cutoff_lower"] > 0:
            raise BadCheckpoint(
                "without vector_cutoff, only TorchMD-Net's neighbor list leaves out the vectors of pairs below "
                "cutoff_lower; there is no equivalent"
            )
        decisions.append(
            "vector_cutoff is off, as trained: the energy jumps when a pair crosses the cutoff; do not run dynamics"
        )

    config: dict[str, Any] = {"model": model, "subtract_isolated": False}
    config.update(_head(args, name, mean, std, decisions))
    if config["head"] is not None:
        unit = factor("energy", energy_unit)
        config["energy_scale"], config["energy_shift"] = std * unit, mean * unit
        decisions.append(f"energies are in {energy_unit} and positions in Å: the checkpoint does not state units")
        if (std, mean) != (1.0, 0.0):
            decisions.append(f"atomic energies are scaled by {std:.9g}, and {mean:.9g} is added to each structure")
        if energy_unit != "eV" and (args.get("repulsion") or config["head"]["name"] == "scalar_coulomb"):
            raise BadCheckpoint(
                "the repulsion and the Coulomb energy of this model are in eV: energy_unit must be 'eV'"
            )
    if (args.get("atom_filter") or -1) > -1:
        config["atom_filter"] = int(args["atom_filter"])
        decisions.append(f"atoms up to Z = {config['atom_filter']} have no energy")
    _remarks(args, decisions)
    return config


def _head(args: Mapping[str, Any], name: str, mean: float, std: float, decisions: list[str]) -> dict[str, Any]:
    """Return the entries "head" and "properties" of the configuration."""
    output = str(args.get("output_model", "Scalar"))
    output = output.removeprefix("Equivariant")
    equivariant = name == "equivariant_transformer"
    activation = args["activation"]
    if output == "Scalar":
        if equivariant:
            return {"head": {"name": "equivariant_scalar", "activation": activation}}
        return {"head": {"name": "scalar", "activation": activation}}
    if output == "ScalarPlusWeightedCoulomb":
        weights = channel_weights(args["q_weights"], int(args["q_dim"]))
        cutoff = args.get("coulomb_cutoff")
        head: dict[str, Any] = {"name": "scalar_coulomb", "activation": activation, "q_weights": weights}
        head["num_hidden_layers"] = int(args.get("output_mlp_num_layers") or 0)
        if cutoff is None:
            decisions.append(
                "Coulomb energy over all pairs, for molecules; set method to 'ewald' for periodic structures"
            )
            return {"head": {**head, "method": "all_pairs"}}
        dielectric = float(args.get("coulomb_epsilon_solvent") or 78.3)
        decisions.append(f"Coulomb energy by the reaction field, cutoff {cutoff} Å, dielectric constant {dielectric}")
        decisions.append(
            "the Coulomb force jumps a little at the cutoff, as trained: switch_width of the head makes it smooth"
        )
        head |= {"method": "reaction_field", "coulomb_cutoff": cutoff, "dielectric": dielectric, "switch_width": 0.0}
        return {"head": head}
    if output in ("DipoleMoment", "VectorOutput"):
        if mean != 0:
            raise BadCheckpoint(
                f"the model adds its mean {mean:.6g} to each component of a vector, so that its results depend on the "
                "orientation of the molecule; this cannot be reproduced"
            )
        decisions.append("the head gives the vector; TorchMD-Net's DipoleMoment is its length")
        if output == "VectorOutput":
            return {"head": None, "properties": [{"name": "vector", "activation": activation, "scale": std}]}
        dipole = {"name": "dipole", "activation": activation, "equivariant": equivariant, "scale": std}
        return {"head": None, "properties": [dipole]}
    if output == "ElectronicSpatialExtent":
        extent = {"name": "spatial_extent", "activation": activation, "scale": std, "shift": mean}
        return {"head": None, "properties": [extent]}
    raise BadCheckpoint(f"the output model '{output}' is unknown")


def channel_weights(stages: Sequence[Any], q_dim: int) -> list[float]:
    """Return TorchMD-Net's weights, a number or a list of q_dim numbers for each stage, as one list of all channels."""
    weights: list[float] = []
    for stage in stages:
        weights += map(float, stage if isinstance(stage, list | tuple) else [stage] * q_dim)
    return weights


def _refuse_wrong_reductions(args: Mapping[str, Any], name: str) -> None:
    reduce_op = args.get("reduce_op", "add")
    if reduce_op not in ("add", "sum"):
        raise BadCheckpoint(
            f"reduce_op is '{reduce_op}': TorchMD-Net computes it with one atom of value zero too many (its mean is "
            "the sum divided by n + 1), so no correct reduction reproduces the trained model; train it anew"
        )
    if name == "graph_network" and args.get("aggr", "add") not in ("add", "sum"):
        raise BadCheckpoint(
            f"aggr is '{args['aggr']}': TorchMD-Net computes it with a message of zero too many; train the model anew"
        )


def _remarks(args: Mapping[str, Any], decisions: list[str]) -> None:
    if args.get("box_vecs") is not None:
        decisions.append(
            "the fixed box of the training (box_vecs) is not stored in the model: give each structure its cell"
        )
    if args.get("spin"):
        decisions.append("spin was passed in training, but TorchMD-Net ignored it: the model does not depend on it")
    if MODELS[args["model"]] in ("tensornet", "tensornet2") and not args.get("charge"):
        decisions.append("no total charges were passed in training: results for charged structures are extrapolated")


# --- TorchMD-Net's training YAML as a configuration of `torchmdnet2 train` ---

_RENAMED = {
    "num_epochs": "max_epochs",
    "batch_size": "batch_size",
    "lr": "lr",
    "lr_patience": "lr_patience",
    "lr_factor": "lr_factor",
    "lr_min": "lr_min",
    "lr_warmup_steps": "warmup_steps",
    "early_stopping_patience": "early_stopping_patience",
    "weight_decay": "weight_decay",
    "seed": "seed",
}
# TorchMD-Net's defaults, for options that a file leaves out
_DEFAULTS = {
    "num_epochs": 300, "batch_size": 32, "lr": 1e-4, "lr_patience": 10, "lr_factor": 0.8, "lr_min": 1e-6,
    "lr_warmup_steps": 0, "early_stopping_patience": 30, "weight_decay": 0.0, "seed": 1, "gradient_clipping": 0.0,
    "val_size": 0.05, "test_size": 0.1, "embedding_dimension": 256, "num_layers": 6, "num_rbf": 64,
    "activation": "silu", "attn_activation": "silu", "rbf_type": "expnorm", "trainable_rbf": False,
    "neighbor_embedding": False, "aggr": "add", "distance_influence": "both", "num_heads": 8,
    "equivariance_invariance_group": "O(3)", "cutoff_lower": 0.0, "cutoff_upper": 5.0, "max_z": 100,
}  # fmt: skip
_LOSSES = {"mse_loss": "mse", "l1_loss": "l1", "huber_loss": "huber"}
# these need no counterpart: neighbor lists have no limits, logs are always written, the best weights are always kept
_NOT_NEEDED = {
    "max_num_neighbors", "static_shapes", "num_nodes", "log_dir", "test_interval", "save_interval", "redirect",
    "conf", "reset_trainer", "inference_batch_size", "dataset_preload_limit", "dataset_root", "derivative",
    "wandb_resume_from_id", "ngpus", "charge", "check_errors", "dataset", "dataset_arg", "coord_files", "embed_files",
    "energy_files", "force_files", "coulomb_max_num_neighbors", "coulomb_neighbor_strategy",
}  # fmt: skip
_FILES = ("dataset_root", "dataset_arg", "coord_files", "energy_files")
_PROPERTIES = {"DipoleMoment": ("dipole", "dipole_norm"), "ElectronicSpatialExtent": ("spatial_extent",) * 2}
"""TorchMD-Net's outputs other than energies: our head, and the label for its training."""


def convert_yaml(text: str, source: str = "configuration") -> str:
    """Convert TorchMD-Net's training YAML into ours. Comments at the top say what changes and what to complete.

    Args:
        text: TorchMD-Net's YAML.
        source: name of the text in errors.

    Raises:
        BadConfig: the text is not YAML; and the errors of `config_from_torchmd_net`.
    """
    import yaml

    from ..core.yaml_reader import parse_yaml

    theirs = parse_yaml(text, source)
    if not isinstance(theirs, Mapping):
        raise BadConfig(f"{source}: must be a table of TorchMD-Net's options")
    notes: list[str] = []
    ours = config_from_torchmd_net(theirs, notes)
    head = "".join(f"# {note}\n" for note in ["Converted from TorchMD-Net's options.", *notes])
    return head + "\n" + yaml.safe_dump(ours, sort_keys=False, allow_unicode=True)


def config_from_torchmd_net(theirs: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Translate the configuration of a training with TorchMD-Net.

    Args:
        theirs: TorchMD-Net's YAML as plain data; keys may be written with hyphens.
        notes: list to which a sentence is added for each key whose meaning changes, that is fixed in this package, or
            that has no counterpart.

    Returns:
        Our configuration as plain data. The notes say what the user has to complete.

    Raises:
        BadConfig: a key or the model is unknown, or TorchMD-Net computes the requested reduction wrongly.
    """
    theirs = {**_DEFAULTS, **{str(key).replace("-", "_"): value for key, value in theirs.items()}}
    notes = [] if notes is None else notes
    name = theirs.pop("model", "graph-network")
    if not isinstance(name, str):
        raise BadConfig("model: must be the name of a model of TorchMD-Net; is this a configuration of torchmdnet2?")
    if name not in MODELS:
        raise BadConfig(f"model: '{name}' is not a model of TorchMD-Net; known: {', '.join(MODELS)}")
    ours: dict[str, Any] = {"data": _data(theirs, notes), "model": {"name": MODELS[name]}}
    for key, argument in {**COMMON, **ARGUMENTS[MODELS[name]]}.items():
        if key in theirs:
            ours["model"][argument] = theirs.pop(key)
    for arguments in (COMMON, *ARGUMENTS.values()):
        for key in arguments:
            theirs.pop(key, None)  # options of other models
    if MODELS[name] == "equivariant_transformer" and not ours["model"].pop("vector_cutoff", False):
        notes.append("vector_cutoff is on, our default: without it the energy jumps at the cutoff")
    if MODELS[name] == "graph_network":
        aggregation = ours["model"].get("aggregation", "add")
        if aggregation == "max":
            ours["model"]["aggregation"] = "softmax"
            notes.append(
                "aggr: 'softmax' is a maximum whose forces do not jump; TorchMD-Net's 'max' is never below zero"
            )
        elif aggregation != "add":
            notes.append("aggr: 'mean' is weighted by the cutoff function here; TorchMD-Net divides by one too many")
    ours |= _heads(theirs, ours, notes)
    for head in (ours["head"], *ours.get("properties", ())):
        if head is not None:
            head["activation"] = ours["model"]["activation"]
    ours["priors"] = _priors(theirs, notes)
    if ours["head"] is None:
        ours["priors"] = []  # TorchMD-Net drops priors in this case too
    ours["atom_filter"] = theirs.pop("atom_filter", None) or -1
    ours["training"] = _training(theirs, ours["data"].get("keys", {}).get("properties"), notes)
    if (ours["head"] or {}).get("name") == "scalar_coulomb":
        ours["training"]["energy_scale"] = 1.0  # another scale would also multiply this head's Coulomb energy
    output = _output(theirs)
    if output:
        ours["output"] = output
    for key in ("load_model", "load_weights"):
        if theirs.pop(key, None):
            notes.append(
                f"{key}: init: {{file: …}} starts from the weights of a checkpoint of TorchMD-Net, or of a model"
            )
    for key in ("lr_metric", "early_stopping_monitor", "checkpoint_monitor"):
        if str(theirs.pop(key, None) or "val").startswith("train"):
            notes.append(f"{key}: the loss on the validation frames counts, not the one in training")
    if theirs.pop("box_vecs", None) is not None:
        notes.append("box_vecs: each frame has its own cell, in the data file")
    if theirs.pop("spin", False):
        notes.append("spin: TorchMD-Net ignores it, and no model of this package reads it")
    unknown = sorted(set(theirs) - _NOT_NEEDED)
    if unknown:
        raise BadConfig(f"{', '.join(unknown)}: not a known key of TorchMD-Net 3")
    return ours


def _data(theirs: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    found = [f"{key}: {theirs[key]}" for key in _FILES if theirs.get(key)]
    notes.append(
        "data.train: give the data as extended XYZ, HDF5 or an ASE database, with its keys and units; TorchMD-Net's "
        f"was {theirs.get('dataset')} ({', '.join(found) or 'no files named'})"
    )
    data: dict[str, Any] = {"train": "data.xyz"}
    if "num_workers" in theirs:
        data["num_workers"] = theirs.pop("num_workers")
    if not theirs.get("derivative", False):
        data["keys"] = {"forces": None}
        notes.append("data.keys.forces: TorchMD-Net trained on energies alone (derivative is off)")
    split: dict[str, Any] = {}
    for key, ours in (("train_size", "train"), ("val_size", "validation"), ("test_size", "test")):
        if key in theirs:
            split[ours] = theirs.pop(key)
    for key in ("validation", "test"):
        if key in split and split[key] is None:
            split.pop(key)
            notes.append(f"data.split.{key}: TorchMD-Net took the rest; give the number of frames")
    if split:
        data["split"] = split
    if theirs.pop("splits", None):
        notes.append(
            "splits: TorchMD-Net's splits.npz is not read; data.split.file takes the splits.json of one of our runs"
        )
    return data


def _heads(theirs: dict[str, Any], ours: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Set the sections "head" and "properties", and the label of a property in "data"."""
    output = str(theirs.get("output_model", "Scalar")).removeprefix("Equivariant")
    if output not in _PROPERTIES:
        return {"head": _yaml_head(theirs, ours["model"], notes)}
    for key in ("output_model", "output_mlp_num_layers", "reduce_op"):
        theirs.pop(key, None)
    head, label = _PROPERTIES[output]
    notes.append(f"data.keys.properties.{label}: name the label in the data, its unit under data.units.properties")
    notes.append("output_mlp_num_layers has no effect on this output in TorchMD-Net")
    vectors = {"equivariant": True} if ours["model"]["name"] == "equivariant_transformer" and head == "dipole" else {}
    keys = {"energy": None, "forces": None, "properties": {label: label}}
    return {"head": None, "properties": [{"name": head, **vectors}], "data": {**ours["data"], "keys": keys}}


def _output(theirs: dict[str, Any]) -> dict[str, Any]:
    output: dict[str, Any] = {}
    if "log_dir" in theirs:
        output["folder"] = str(theirs.pop("log_dir"))
    if theirs.pop("tensorboard_use", False):
        output["tensorboard"] = True
    wandb = {"project": theirs.pop("wandb_project", None), "name": theirs.pop("wandb_name", None)}
    if theirs.pop("wandb_use", False):
        output["wandb"] = {key: str(value) for key, value in wandb.items() if value is not None}
    return output


def _yaml_head(theirs: dict[str, Any], model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    output = str(theirs.pop("output_model", "Scalar")).removeprefix("Equivariant")
    layers = theirs.pop("output_mlp_num_layers", 0)
    reduce = {"add": "sum", "sum": "sum", "mean": "mean"}.get(str(theirs.pop("reduce_op", "add")))
    if reduce is None:
        raise BadConfig("reduce_op: only 'add' and 'mean' have a meaning for atoms")
    if output == "ScalarPlusWeightedCoulomb":
        weights = channel_weights(theirs.pop("q_weights", None) or [], int(model.get("q_dim", 0)))
        head: dict[str, Any] = {"name": "scalar_coulomb", "num_hidden_layers": layers, "q_weights": weights}
        cutoff, dielectric = theirs.pop("coulomb_cutoff", None), theirs.pop("coulomb_epsilon_solvent", None)
        if cutoff is not None:
            head |= {"method": "reaction_field", "coulomb_cutoff": cutoff, "dielectric": float(dielectric or 78.3)}
            notes.append("head.switch_width: the reaction field ends smoothly; 0 is TorchMD-Net's form")
        return head
    for key in ("q_weights", "coulomb_cutoff", "coulomb_epsilon_solvent"):
        theirs.pop(key, None)
    if output != "Scalar":
        raise BadConfig(
            f"output_model: '{output}' has no counterpart; heads of vectors are trained through `properties`"
        )
    if model["name"] == "equivariant_transformer":
        return {"name": "equivariant_scalar", "reduce": reduce}
    return {"name": "scalar", "reduce": reduce, "num_hidden_layers": layers}


def _priors(theirs: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    given = theirs.pop("prior_model", None) or []
    given = [given] if isinstance(given, str | Mapping) else given
    arguments = theirs.pop("prior_args", None) or [{}] * len(given)
    arguments = [arguments] if isinstance(arguments, Mapping) else arguments
    if given and len(arguments) != len(given):
        raise BadConfig(f"prior_args: has arguments for {len(arguments)} priors, but prior_model names {len(given)}")
    priors: list[dict[str, Any]] = []
    for prior, details in zip(given, arguments, strict=False):
        name = next(iter(prior)) if isinstance(prior, Mapping) else prior
        details = {**(details or {}), **((prior[name] or {}) if isinstance(prior, Mapping) else {})}
        if name in ("Atomref", "LearnableAtomref"):
            trainable = name == "LearnableAtomref" or bool(details.get("trainable", False))
            priors.append({"name": "atomref", "energies": "fit", "trainable": trainable})
        elif name in ("ZBL", "D2"):
            if abs(float(details.get("distance_scale") or 1e-10) * 1e10 - 1) > 1e-4:
                raise BadConfig(
                    f"prior_model: '{name}' is not in Å, so no length in this file is: convert all lengths to Å"
                )
            priors.append({"name": name.lower(), "cutoff": float(details.get("cutoff_distance", 5.0))})
            notes.append(f"priors: the cutoff of '{name.lower()}' is in Å, and scales are not needed")
        elif name == "Coulomb":
            upper = float(details.get("upper_switch_distance", 0.5)) * 10
            lower = float(details.get("lower_switch_distance", 0.0)) * 10
            damping = {"damping": "cosine", "damping_lower": lower, "damping_upper": upper}
            priors.append({"name": "coulomb", "charges": {}, **damping})
            notes.append("priors: give the charges of 'coulomb' by element or by atom; distances were taken as nm")
        else:
            raise BadConfig(f"prior_model: '{name}' is unknown")
    if theirs.pop("repulsion", False):
        priors.append({"name": "zbl", "envelope": "covalent", "screening": "refitted"})
    if theirs.pop("remove_ref_energy", False) and not any(p["name"] == "atomref" for p in priors):
        priors.append({"name": "atomref", "energies": "fit"})
    if theirs.pop("standardize", False):
        notes.append("standardize: reference energies of the elements are fitted instead (prior 'atomref')")
        if not any(p["name"] == "atomref" for p in priors):
            priors.append({"name": "atomref", "energies": "fit"})
    return priors


def _training(theirs: dict[str, Any], properties: Mapping[str, str] | None, notes: list[str]) -> dict[str, Any]:
    training: dict[str, Any] = {"lr_schedule": "plateau", "optimizer": {"name": "adamw"}}
    for key, ours in _RENAMED.items():
        if key in theirs:
            training[ours] = theirs.pop(key)
    for key in ("lr", "lr_min", "lr_factor", "weight_decay"):
        if key in training:
            training[key] = float(training[key])  # YAML 1.1 reads 1e-4 as text
    training["gradient_clipping"] = (
        float(theirs.pop("gradient_clipping") or 0) or None
    )  # TorchMD-Net: 0 switches it off
    precision = str(theirs.pop("precision", 32))
    if precision not in ("32", "64"):
        raise BadConfig(f"precision: '{precision}' does not run in TorchMD-Net either; take 32 or 64")
    training["precision"] = f"float{precision}"
    kind = str(theirs.pop("train_loss", "mse_loss"))
    if kind not in _LOSSES:
        raise BadConfig(f"train_loss: '{kind}' is unknown; known: {', '.join(_LOSSES)}")
    loss: dict[str, Any] = {"kind": _LOSSES[kind]}
    arguments = theirs.pop("train_loss_arg", None) or {}
    if set(arguments) - {"delta"}:
        raise BadConfig(f"train_loss_arg: {', '.join(set(arguments) - {'delta'})} has no counterpart")
    if "delta" in arguments:
        loss["huber_delta"] = float(arguments["delta"])
    y, forces = (float(theirs.pop(key, 1.0)) for key in ("y_weight", "neg_dy_weight"))
    if properties:
        loss["properties"] = dict.fromkeys(properties, y)
    else:
        loss |= {
            "per_atom": False,
            "energy": y,
            "forces": forces if theirs.get("derivative", False) else 0.0,
            "stress": 0.0,
        }
        notes.append("training.loss: energies are compared per structure, as in TorchMD-Net (per_atom: false)")
    training["loss"] = loss
    averages = [theirs.pop(key, 1.0) for key in ("ema_alpha_y", "ema_alpha_neg_dy")]
    if averages != [1.0, 1.0]:
        notes.append(
            "ema_alpha: TorchMD-Net's averages the reported loss; our ema_decay averages the weights of the model"
        )
    return training
