"""TorchMD-Net's hyper-parameters, translated into the configuration of a Potential."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import BadCheckpoint
from ..units import factor

__all__ = ["ABSENT", "ARGUMENTS", "COMMON", "MODELS", "NO_EFFECT", "channel_weights", "model_config"]

MODELS = {
    "tensornet": "tensornet",
    "tensornet2": "tensornet2",
    "tensornetv2_alt": "tensornet2",  # AceFF-2
    "tensornet-nqe": "tensornet2",  # AceFF-2
    "equivariant-transformer": "equivariant_transformer",
    "transformer": "transformer",
    "graph-network": "graph_network",
}
"""Their names of models → ours."""

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
# what their constructors took where an old checkpoint does not say
ABSENT = {"q_dim": 0, "vector_cutoff": False, "equivariance_invariance_group": "O(3)"}

_READ_HERE = {
    "model", "output_model", "output_mlp_num_layers", "reduce_op", "atom_filter", "prior_model", "prior_args", "charge",
    "spin", "box_vecs", "remove_ref_energy", "standardize", "q_weights", "repulsion", "coulomb_cutoff",
    "coulomb_epsilon_solvent", "precision", "derivative", "check_errors",
}  # fmt: skip

NO_EFFECT = {
    # neighbor lists: ours have no limits to set
    "max_num_neighbors", "static_shapes", "coulomb_max_num_neighbors", "coulomb_neighbor_strategy",
    # training
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
    """The configuration of a Potential, without its priors.

    Args:
        args: their hyper-parameters.
        mean, std: their standardisation.
        skew_sign: of TensorNet's antisymmetric part.
        energy_unit: in which the model gives energies.
        ignore: names of hyper-parameters that may be left out of account.
        decisions: sentences are added.

    Raises:
        BadCheckpoint: something has no equivalent, or is not known.
    """
    theirs = args.get("model")
    if theirs not in MODELS:
        raise BadCheckpoint(f"the model '{theirs}' is not known; known: {', '.join(MODELS)}")
    name = MODELS[theirs]
    known = {*COMMON, *_READ_HERE, *NO_EFFECT, *ignore, *(k for table in ARGUMENTS.values() for k in table)}
    unknown = sorted(key for key in set(args) - known if args[key] is not None)  # None: not set
    if unknown:
        raise BadCheckpoint(
            f"the hyper-parameters {', '.join(unknown)} are not known, and could change the model's results; if they "
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
                f"SO(3): the antisymmetric part has sign {skew_sign:+d}, as in the version that trained it"
            )
    if name == "tensornet2" and model["q_dim"]:
        model["exact_charge"] = False
        decisions.append("the charges sum to the total charge up to 1e-6 of the correction, as they did in training")
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
        decisions.append(f"energies are in {energy_unit}, positions in Å: the checkpoint does not say, you do")
        if (std, mean) != (1.0, 0.0):
            decisions.append(f"atomic energies are scaled by {std:.9g}, and {mean:.9g} is added to each structure")
        if energy_unit != "eV" and (args.get("repulsion") or config["head"]["name"] == "scalar_coulomb"):
            raise BadCheckpoint(
                "the repulsion and the Coulomb energy of this model are in eV: energy_unit must be 'eV'"
            )
    if (args.get("atom_filter") or -1) > -1:
        config["atom_filter"] = int(args["atom_filter"])
        decisions.append(f"atoms up to Z = {config['atom_filter']} have no energy of their own")
    _remarks(args, decisions)
    return config


def _head(args: Mapping[str, Any], name: str, mean: float, std: float, decisions: list[str]) -> dict[str, Any]:
    """The entries "head" and "properties" of the configuration."""
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
        decisions.append("its force jumps a little at the cutoff, as trained: switch_width of the head makes it smooth")
        head |= {"method": "reaction_field", "coulomb_cutoff": cutoff, "dielectric": dielectric, "switch_width": 0.0}
        return {"head": head}
    if output in ("DipoleMoment", "VectorOutput"):
        if mean != 0:
            raise BadCheckpoint(
                f"the model adds its mean {mean:.6g} to each component of a vector, so that its results depend on the "
                "orientation of the molecule; there is no right equivalent"
            )
        decisions.append("a vector is given; TorchMD-Net's DipoleMoment is its length")
        if output == "VectorOutput":
            return {"head": None, "properties": [{"name": "vector", "activation": activation, "scale": std}]}
        dipole = {"name": "dipole", "activation": activation, "equivariant": equivariant, "scale": std}
        return {"head": None, "properties": [dipole]}
    if output == "ElectronicSpatialExtent":
        extent = {"name": "spatial_extent", "activation": activation, "scale": std, "shift": mean}
        return {"head": None, "properties": [extent]}
    raise BadCheckpoint(f"the output model '{output}' is not known")


def channel_weights(stages: Sequence[Any], q_dim: int) -> list[float]:
    """Their weights, a number or a list of q_dim numbers for each stage, as one list of all channels."""
    weights: list[float] = []
    for stage in stages:
        weights += map(float, stage if isinstance(stage, list | tuple) else [stage] * q_dim)
    return weights


def _refuse_wrong_reductions(args: Mapping[str, Any], name: str) -> None:
    reduce_op = args.get("reduce_op", "add")
    if reduce_op not in ("add", "sum"):
        raise BadCheckpoint(
            f"reduce_op is '{reduce_op}': TorchMD-Net computes it with one atom of value zero too many (its mean is "
            "the sum divided by n + 1), so the trained model is not that of any right reduction; train it anew"
        )
    if name == "graph_network" and args.get("aggr", "add") not in ("add", "sum"):
        raise BadCheckpoint(
            f"aggr is '{args['aggr']}': TorchMD-Net computes it with a message of zero too many; train the model anew"
        )


def _remarks(args: Mapping[str, Any], decisions: list[str]) -> None:
    if args.get("box_vecs") is not None:
        decisions.append("the fixed box of the training (box_vecs) is not carried: give each structure its cell")
    if args.get("spin"):
        decisions.append("spin was passed in training, and TorchMD-Net ignored it: the model does not know it")
    if MODELS[args["model"]] in ("tensornet", "tensornet2") and not args.get("charge"):
        decisions.append("no total charges were passed in training: results for charged structures are extrapolated")
