"""Every model learns: energies and forces of a known potential, in float32 as users train, within seconds."""

from __future__ import annotations

import pytest
import torch
from variants import ELEMENTS

from torchmdnet2 import Potential, System
from torchmdnet2.priors import ZBL
from torchmdnet2.testing import without_network

SIZE = {"hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": 3.5, "max_z": 20}
MODELS = {
    "tensornet2": ({"q_dim": 2}, {"name": "scalar_coulomb", "q_weights": [1.0, 1.0, 1.0, 1.0]}),
    "equivariant_transformer": ({"num_heads": 4, "num_layers": 2}, {"name": "equivariant_scalar"}),
    "transformer": ({"num_heads": 4}, {"name": "scalar"}),
    "graph_network": ({}, {"name": "scalar"}),
}


def frames(num: int) -> System:
    """Five atoms each, at least 0.9 Å apart."""
    random = torch.Generator().manual_seed(5)
    corners = torch.tensor([[0, 0, 0], [1.3, 0, 0], [0, 1.3, 0], [0, 0, 1.3], [1.3, 1.3, 1.3]])
    pos = corners + 0.4 * (torch.rand(num, 5, 3, generator=random) - 0.5)
    batch = torch.arange(num).repeat_interleave(5)
    return System(z=torch.tensor([6, 1, 8, 1, 14]).repeat(num), pos=pos.flatten(0, 1), batch=batch)


@pytest.mark.parametrize("name", MODELS)
def test_learns(name):
    arguments, head = MODELS[name]
    system = frames(6)
    target = without_network([ZBL(3.0, scale=0.1)], ELEMENTS)(system, create_graph=False)
    scale = float(target.forces.std())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = {"model": {"name": name, **SIZE, **arguments}, "head": head, "energy_scale": scale}
        potential = Potential.from_config({**config, "elements": ELEMENTS}).train()
    optimizer = torch.optim.AdamW(potential.parameters(), lr=5e-3)
    losses = []
    for _ in range(50):
        result = potential(system)
        loss = ((result.forces - target.forces) ** 2).mean() + ((result.energy - target.energy) ** 2).mean() / 25
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(potential.parameters(), 10.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.15 * losses[0], f"{losses[0]:.3g} → {losses[-1]:.3g}"
