"""Which potentials the fused kernels cover, on the GPU and on the CPU."""

from __future__ import annotations

import torch
from torch import nn

from ..fused.tensornet.weights import why_not_fused
from ..models.heads import ScalarHead
from ..potential import Potential
from ..priors.atomref import Atomref

__all__ = ["why_not"]

_CAPABILITY = (8, 0)  # the first with TF32 matrix units


def why_not(potential: Potential) -> str:
    """ "" when fused steps can evaluate this potential, else the reason."""
    device, head = potential.device, potential.head
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the fused kernels need a GPU of compute capability 8.0 (Ampere, 2020) or later"
    if head is None:
        return "the model predicts no energy"
    reason = why_not_fused(potential.representation, potential.dtype)
    if reason:
        return reason
    if type(head) is not ScalarHead:
        return f"there are no fused kernels for the head {type(head).__name__}"
    layers = list(head.output_network.layers)
    if len(layers) != 3 or not isinstance(layers[1], nn.SiLU):
        return "the fused kernels have heads of one hidden layer with silu only"
    if head.reduce != "sum":
        return "the fused kernels sum energies over the atoms, this head takes their mean"
    others = [type(prior).__name__ for prior in potential.priors if type(prior) is not Atomref]
    if others:
        return f"there are no fused kernels for {', '.join(others)}"
    if len(potential.properties):
        return "the fused kernels have no heads of other properties"
    if potential.atom_filter >= 0:
        return "the fused kernels have no atom filter"
    return ""
