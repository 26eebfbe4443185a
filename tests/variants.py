"""One tiny random potential per model, beside TensorNet's in tiny.py."""

from __future__ import annotations

from typing import Any

import torch

from torchmdnet2 import Potential

ELEMENTS = [1, 6, 8, 14]
_SIZE = {"hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
_ATTENTION = {"num_heads": 4, **_SIZE}
_CHANNELS = [1.0] * 4 + [0.5] * 4 + [2.0] * 4

VARIANTS: dict[str, dict[str, Any]] = {
    "tensornet2": {"model": {"name": "tensornet2", "q_dim": 4, **_SIZE}},
    "tensornet2_so3_gauss": {
        "model": {"name": "tensornet2", "q_dim": 3, "group": "SO(3)", "rbf_type": "gauss", **_SIZE, "num_layers": 1}
    },
    "tensornet2_reaction_field": {
        "model": {"name": "tensornet2", "q_dim": 4, **_SIZE},
        "head": {
            "name": "scalar_coulomb", "q_weights": _CHANNELS, "method": "reaction_field", "coulomb_cutoff": 6.0,
        },
    },
    "tensornet2_all_pairs": {
        "model": {"name": "tensornet2", "q_dim": 4, **_SIZE},
        "head": {"name": "scalar_coulomb", "q_weights": _CHANNELS},
    },
    "tensornet2_ewald": {
        "model": {"name": "tensornet2", "q_dim": 4, **_SIZE},
        "head": {"name": "scalar_coulomb", "q_weights": _CHANNELS, "method": "ewald", "coulomb_cutoff": 6.0},
    },
    "aimnet2": {
        "model": {
            "name": "aimnet2", "channels": 3, "num_rbf": 6, "num_vectors": 4, "hidden_channels": 16, "num_layers": 3,
            "widths": [20, 12], "cutoff": 4.5, "max_z": 20,
        },
        "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": 1},
    },
    "equivariant_transformer": {
        "model": {"name": "equivariant_transformer", **_ATTENTION}, "head": {"name": "equivariant_scalar"},
    },
    "equivariant_transformer_plain": {
        "model": {
            "name": "equivariant_transformer", "distance_influence": "none", "neighbor_embedding": False,
            "rbf_type": "gauss", "activation": "ssp", "attn_activation": "tanh", **_ATTENTION,
        },
    },
    "transformer": {"model": {"name": "transformer", **_ATTENTION}},
    "transformer_values": {"model": {"name": "transformer", "distance_influence": "values", **_ATTENTION}},
    "graph_network": {"model": {"name": "graph_network", **_SIZE}},
    "matgl_tensornet": {
        "model": {"name": "matgl_tensornet", **_SIZE, "num_rbf": 3}, "head": {"name": "gated_scalar"},
    },
    "graph_network_mean": {"model": {"name": "graph_network", "aggregation": "mean", **_SIZE}},
    "graph_network_softmax": {"model": {"name": "graph_network", "aggregation": "softmax", **_SIZE}},
}  # fmt: skip


def variant(kind: str, noise: float = 0.2, seed: int = 0, **config: Any) -> Potential:
    """A float64 potential whose parameters, biases and normalisations included, are all random."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        potential = Potential.from_config({"elements": ELEMENTS, **VARIANTS[kind], **config}).double()
        with torch.no_grad():
            for parameter in potential.parameters():
                parameter += noise * torch.randn_like(parameter)
    potential.allow_untrained_charge = True  # most do not use the charge
    return potential.eval()
