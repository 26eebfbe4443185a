"""Optimisers by name. Each keeps its state in tensors, so that a training resumes to the same bits.

Parameters come in groups, each with `weight_decay` and `lr_scale`, a factor of the learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...registry import Registry
from .muon import Beta, Muon, Small

__all__ = [
    "DEFAULT_OPTIMIZER",
    "OPTIMIZERS",
    "AdamW",
    "Muon",
    "depths",
    "make_optimizer",
    "parameter_groups",
]

OPTIMIZERS: Registry = Registry("optimizer")
DEFAULT_OPTIMIZER = "muon"  # half the error of AdamW after as many steps: docs/training.md, "Optimizers"


@OPTIMIZERS.register("adamw")
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter, ICLR 2019).

    Args:
        params: groups of parameters.
        beta1: decay of the mean of the gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the latter.
        amsgrad: divide by the largest mean of squares so far.
    """

    def __init__(self, params: Any, beta1: Beta = 0.9, beta2: Beta = 0.999, eps: Small = 1e-8, amsgrad: bool = False):
        super().__init__(params, betas=(beta1, beta2), eps=eps, amsgrad=amsgrad, fused=True)


OPTIMIZERS.register("muon")(Muon)


# --- groups ----------------------------------------------------------------------------------------------------------


def depths(model: nn.Module) -> dict[str, int]:
    """How deep each parameter of a potential is: 0 embeddings, 1 … L the layers, L + 1 the read-out and the priors.

    What comes before the first layer of the representation counts as embedding, what comes after the last as read-out.
    """
    names = [name for name, _ in model.named_parameters()]
    layer = {name: re.match(r"representation\.\w+\.(\d+)\.", name) for name in names}
    layers = [name for name in names if layer[name] and "tensor_embedding" not in name]
    last = max((int(match[1]) + 1 for name in layers if (match := layer[name])), default=0)
    found, seen = {}, False
    for name in names:
        match = layer[name] if name in layers else None
        seen = seen or match is not None
        if match:
            found[name] = int(match[1]) + 1
        else:
            early = name.startswith("representation.") and ("embedding" in name or not seen)
            found[name] = 0 if early else last + 1
    return found


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_decay: float = 1.0, matrices: bool = False
) -> list[dict[str, Any]]:
    """Trainable parameters in groups for an optimizer.

    Args:
        model: a potential.
        weight_decay: of tensors with two or more dimensions only.
        lr_decay: the rate of what is d levels below the read-out is multiplied by lr_decay**d.
        matrices: put weight matrices, without embeddings, in groups of their own, marked "matrices".
    """
    deep = depths(model)
    top = max(deep.values(), default=0)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim >= 2
            matrix = matrices and parameter.ndim == 2 and id(parameter) not in tables and min(parameter.shape) > 1
            groups.setdefault((not decayed, not matrix, lr_decay ** (top - deep[name])), []).append(parameter)
    made = []
    for (plain, no_matrix, scale), parameters in groups.items():
        group = {"params": parameters, "weight_decay": 0.0 if plain else weight_decay, "lr_scale": scale}
        made.append({**group, "matrices": True} if not no_matrix else group)
    if not made:
        raise ValueError("every parameter is frozen: there is nothing to train")
    return made


def make_optimizer(
    model: nn.Module, settings: Mapping[str, Any], weight_decay: float = 0.0, lr_decay: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer of a potential's trainable parameters.

    Args:
        model: a potential.
        settings: {"name": …, arguments} as in the configuration.
        weight_decay, lr_decay: see `parameter_groups`.
    """
    arguments = dict(settings)
    cls = OPTIMIZERS[arguments.pop("name")]
    return cls(parameter_groups(model, weight_decay, lr_decay, matrices=cls is Muon), **arguments)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate, times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
