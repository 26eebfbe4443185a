"""Names of TorchMD-Net's tensors ↔ ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import BadCheckpoint

__all__ = ["modern_names", "our_names", "strip_prefix", "without_filter"]

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
