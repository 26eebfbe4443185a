"""Names of TorchMD-Net's tensors ↔ ours."""

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
from ..potential.potential import Potential
from ..priors import ZBL
from ..units import factor
from .source_files import Layout, prove_layout, read_tensor_file, reorder_rows
from .training_yaml import MODELS, model_config

__all__ = [
    "convert", "import_checkpoint", "modern_names", "our_names", "prior_configs", "read_checkpoint", "strip_prefix",
    "without_filter",
]  # fmt: skip


_RENAMED_IN_2 = (
    (re.compile(r"^(output_model\.output_network)\.(\d+)\.(weight|bias)$"), r"\1.layers.\2.\3"),
    (re.compile(r"\.update_net\.(\d+)\."), r".update_net.layers.\1."),
)
# constants that we build ourselves
_CONSTANTS = re.compile(r"(^|\.)distance\.box$|^output_model\.(atomic_mass|mass)$|^representation_model\.repulsion\.")
_DUPLICATE = re.compile(r"^(representation_model\.interactions\.\d+)\.conv\.net\.(.+)$")
_ATOM_FILTER = re.compile(r"^representation_model\.model\.")


def strip_prefix(state: Mapping[str, object]) -> dict[str, Tensor]:
    """Their tensors, without the leading "model.".

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
    """Names of a representation inside an atom filter changed into those without."""
    return {_ATOM_FILTER.sub("representation_model.", name): value for name, value in state.items()}


def modern_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of version 2 changed into those of version 3."""
    result = {}
    for name, value in state.items():
        for pattern, new in _RENAMED_IN_2:
            name = pattern.sub(new, name)
        result[name] = value
    return result


def our_names(state: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """Tensors of the network under our names; priors, constants and duplicates left out.

    Args:
        state: their tensors with names of version 3.
        head: where the output network lies: "head" or "properties.NAME".

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
            raise BadCheckpoint(f"'{name}' in the state_dict is not known")
    return result


# --- TorchMD-Net's priors, translated into ours ---

_ANGSTROM, _JOULE = 1e-10, 1.602176634e-19


def prior_configs(
    args: Mapping[str, Any], state: Mapping[str, Tensor], energy_unit: str, std: float, decisions: list[str]
) -> list[dict[str, Any]]:
    """Configurations of the priors, with the repulsion of TensorNet2 among them.

    Args:
        args: their hyper-parameters.
        state: their tensors.
        energy_unit: in which the model gives energies.
        std: their scale, which multiplies the repulsion too.
        decisions: sentences are added.

    Raises:
        BadCheckpoint: a prior has no right equivalent.
    """
    priors: list[dict[str, Any]] = []
    stored = [key for key in state if key.startswith("representation_model.repulsion.")]
    if bool(stored) != bool(args.get("repulsion")):
        raise BadCheckpoint("the hyper-parameter 'repulsion' and the tensors of the repulsion do not fit together")
    if stored:
        _check_repulsion(state)
        priors.append({"name": "zbl", "envelope": "covalent", "screening": "refitted", "scale": std})
        decisions.append("the repulsion inside TensorNet2 is the prior 'zbl' here")
    names = _names(args)
    details = args.get("prior_args") or [{}] * len(names)
    if isinstance(details, Mapping):
        details = [details]
    if len(details) != len(names):
        raise BadCheckpoint(f"{len(names)} priors, and arguments of {len(details)}")
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
    """The constants that the checkpoint holds must be those of the prior 'zbl'."""
    radii = ZBL(envelope="covalent").radii
    table = state["representation_model.repulsion.cutoff_ab"].double()
    z = torch.arange(1, table.shape[0], dtype=torch.float64)
    powers = state["representation_model.repulsion.z_pow"].double()[1:]
    radii = radii[1 : table.shape[0]]
    sums = radii[:, None] + radii
    if not (torch.allclose(table[1:, 1:], sums, rtol=1e-5) and torch.allclose(powers, z**0.3, rtol=1e-5)):
        raise BadCheckpoint("the repulsion was made with other radii or exponents than those known")


def _names(args: Mapping[str, Any]) -> list[str]:
    """Names of the priors: a name, a list of names, or a list of {name: arguments}."""
    given = args.get("prior_model")
    if given is None:
        # delta learning appends reference energies that are switched on again for use
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
            "trained with the reference energies removed: here they are added, so that energies are totals"
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
            f"{energy_unit}; give the right energy_unit, or it cannot be carried over"
        )
    types = tensors.get("atomic_number", given.get("atomic_number"))
    if types is None or any(int(z) != i for i, z in enumerate(types)):
        raise BadCheckpoint(f"the prior '{name}' renumbers the elements (atomic_number), which cannot be converted")
    decisions.append(f"the prior '{name}' is '{name.lower()}' here; it honours each structure's cell")
    config = {"name": name.lower(), "cutoff": float(given["cutoff_distance"])}
    # their D2 ends abruptly
    return config if name == "ZBL" else {**config, "switch_width": 0.0}


# --- Checkpoints of TorchMD-Net 2.x and 3.x, read safely and turned into potentials; and back ---
#
# Nothing in a checkpoint is executed: it is read with `weights_only=True`, which admits tensors and plain data, and
# there
# is no other way in. What the file does not prove is refused, with the reason.


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
