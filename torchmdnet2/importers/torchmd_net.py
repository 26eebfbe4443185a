"""Checkpoints of TorchMD-Net 2.x and 3.x, read safely and turned into potentials; and back.

Nothing in a checkpoint is executed: it is read with `weights_only=True`, which admits tensors and plain data, and there
is no other way in. What the file does not prove is refused, with the reason.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadCheckpoint
from ..potential import Potential
from ..units import factor
from .hyper_parameters import MODELS, model_config
from .layout import Layout, prove_layout, reorder_rows
from .names import modern_names, our_names, strip_prefix, without_filter
from .priors import prior_configs
from .tensor_file import read_tensor_file

__all__ = ["convert", "import_checkpoint", "read_checkpoint"]


def import_checkpoint(
    path: str | os.PathLike,
    energy_unit: str = "eV",
    elements: Iterable[int] | None = None,
    layout: Layout | None = None,
    ignore: Collection[str] = (),
) -> Potential:
    """A potential with the weights of a TorchMD-Net checkpoint, giving the same energies and forces.

    `potential.metadata["import"]` tells where it came from ("source", "sha256") and what was decided on the way
    ("decisions", a list of sentences).

    Args:
        path: a Lightning checkpoint (.ckpt) of TorchMD-Net 2.x or 3.x.
        energy_unit: unit of the energies that the model was trained on; lengths must be in Å.
        elements: atomic numbers that it was trained on; None allows all that it can represent.
        layout: "2.x" or "3.x" for checkpoints that do not prove which version wrote them.
        ignore: hyper-parameters that are not known here and do not change the results.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: it cannot be read safely, is not of TorchMD-Net, or holds something that has no right
            equivalent here.
    """
    args, state = read_checkpoint(path)
    potential = convert(args, state, energy_unit, elements, layout, ignore)
    potential.metadata["import"]["source"] = Path(path).name
    potential.metadata["import"]["checksum"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return potential


def read_checkpoint(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Hyper-parameters and tensors (names without the leading "model.") of a checkpoint.

    Raises:
        FileNotFoundError, BadCheckpoint: as `import_checkpoint`.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    content = read_tensor_file(path)
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
    """A potential from TorchMD-Net's hyper-parameters and tensors, see `import_checkpoint`."""
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
        if layout is None:
            layout = prove_layout(state, args, decisions)
        else:
            decisions.append(f"taken for TorchMD-Net {layout}, as you said")
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
        decisions.append("the checkpoint does not tell its elements: all are allowed; give those it was trained on")
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
    """The tensors must have the sizes that the hyper-parameters claim; looked at before anything is built."""
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
            raise BadCheckpoint(f"the tensors do not fit the hyper-parameters: {what} {found}, {expected} is claimed")


def _check_cutoff(model: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """The radial functions tell the cutoffs that the model was built with: they must be those it claims."""
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
