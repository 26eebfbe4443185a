"""TensorNet2: charges, sizes, the Coulomb head."""

from __future__ import annotations

import math

import pytest
import torch
from variants import ELEMENTS, variant

from torchmdnet2 import Potential, System
from torchmdnet2.testing import example_systems
from torchmdnet2.units import COULOMB

SYSTEMS = example_systems(ELEMENTS, 4.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["tensornet2", "tensornet2_so3_gauss", "graph_network"])
def test_total_charge_is_conserved(kind, dtype):
    """Every channel of every stage, and the partial charges, sum to the total charge to 1e-10 e; so do heads."""
    potential = variant(kind, properties=[{"name": "charges"}] if kind == "graph_network" else []).to(dtype)
    batch = System.concatenate([SYSTEMS["ion"], SYSTEMS["molecule"], SYSTEMS["triclinic cell"]])
    charges = potential(batch).charges
    assert charges.dtype == torch.float64
    total = torch.zeros(3, dtype=torch.float64).index_add(0, batch.batch, charges)
    assert float((total - batch.charge).abs().max()) <= 1e-10
    assert float(charges.std()) > 0.01
    if kind == "graph_network":
        return
    from torchmdnet2.models import Graph
    from torchmdnet2.neighbors import neighbor_list

    latent = potential.representation(Graph.build(batch, neighbor_list(batch, potential.cutoff), dtype)).charges
    sums = torch.zeros(3, *latent.shape[1:], dtype=torch.float64).index_add(0, batch.batch, latent)
    assert float((sums - batch.charge[:, None, None]).abs().max()) <= 1e-10


def test_the_imported_form_loses_a_little_charge():
    """exact_charge=False is TorchMD-Net's formula, whose sum is off by up to 1e-6 of the correction."""
    potential = variant("tensornet2")
    for module in potential.modules():
        if hasattr(module, "exact"):
            module.exact = False
    lost = float(potential(SYSTEMS["ion"]).charges.sum() + 2)
    assert 1e-10 < abs(lost) < 1e-4


def test_charge_changes_the_energy():
    potential = variant("tensornet2")
    neutral, ion = SYSTEMS["molecule"], SYSTEMS["ion"]
    assert abs(float(potential(neutral).energy - potential(ion).energy)) > 1e-3


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "tensornet2", "q_dim": 16, "max_z": 128}, 681_153),
        ({"name": "tensornet", "max_z": 128}, 535_681),
        ({"name": "tensornet", "max_z": 100}, 532_097),
    ],
)
def test_parameters_of_the_published_sizes(model, expected):
    """One layer, 128 channels, 32 radial functions."""
    config = {"hidden_channels": 128, "num_layers": 1, "num_rbf": 32, **model}
    assert sum(p.numel() for p in Potential.from_config({"model": config}).parameters()) == expected


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("q_dim", [0, 3])
def test_smallest_sizes(layers, q_dim):
    model = {"name": "tensornet2", "hidden_channels": 8, "num_layers": layers, "num_rbf": 4, "q_dim": q_dim}
    result = Potential.from_config({"model": model})(SYSTEMS["molecule"])
    assert torch.isfinite(result.forces).all()
    assert (result.charges is None) == (q_dim == 0)


def test_without_charges_it_is_tensornet():
    size = {"hidden_channels": 8, "num_layers": 2, "num_rbf": 4, "max_z": 20}
    two = Potential.from_config({"model": {"name": "tensornet2", "q_dim": 0, **size}}).double()
    one = Potential.from_config({"model": {"name": "tensornet", **size}}).double()
    one.load_state_dict(two.state_dict())
    assert torch.equal(one(SYSTEMS["molecule"]).forces, two(SYSTEMS["molecule"]).forces)


def reaction_field(d: float, cutoff: float, dielectric: float) -> float:
    """1/d + k d² − c, taken smoothly to zero over the last Å."""
    ratio = (dielectric - 1) / (2 * dielectric + 1)
    t = min(max(d - cutoff + 1, 0), 1)
    return (1 / d + ratio * d * d / cutoff**3 - (1 + ratio) / cutoff) * (1 - 10 * t**3 + 15 * t**4 - 6 * t**5)


def coulomb_energy(potential: Potential, system: System, weights: list[float], kernel) -> float:
    """The Coulomb energy of the latent charges, pair by pair, in plain Python."""
    from torchmdnet2.models import Graph
    from torchmdnet2.neighbors import neighbor_list

    graph = Graph.build(system, neighbor_list(system, potential.cutoff), torch.float64)
    q = potential.representation(graph).charges.flatten(1).tolist()
    pos, energy = system.pos.tolist(), 0.0
    for i in range(len(q)):
        for j in range(i):
            d = math.dist(pos[i], pos[j])
            t = min(d / 4.6, 1 - 1e-6)
            damped = 1 - math.exp(1 - 1 / (1 - t * t))
            energy += sum(w * a * b for w, a, b in zip(weights, q[i], q[j], strict=True)) * damped * kernel(d)
    return COULOMB * energy / sum(weights)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("tensornet2_all_pairs", lambda d: 1 / d),
        ("tensornet2_ewald", lambda d: 1 / d),
        ("tensornet2_reaction_field", lambda d: reaction_field(d, 6.0, 78.3)),
    ],
)
def test_coulomb_head_against_a_plain_sum(kind, kernel):
    potential = variant(kind, subtract_isolated=False)
    plain = variant("tensornet2", subtract_isolated=False)
    state = {k: v for k, v in potential.state_dict().items() if k in plain.state_dict()}
    plain.load_state_dict(state)
    system = SYSTEMS["ion"].replace(pos=1.7 * SYSTEMS["ion"].pos)
    weights = potential.head.qweights.tolist()
    expected = coulomb_energy(potential, system, weights, kernel)
    assert abs(expected) > 1e-3
    assert float(potential(system).energy - plain(system).energy) == pytest.approx(expected, rel=1e-10)


def test_w15_pairs_follow_the_atoms():
    """W15: the list of pairs is made in each call; it is not that of the first call."""
    potential = variant("tensornet2_all_pairs")
    first = potential(SYSTEMS["molecule"]).energy
    more = System.concatenate([SYSTEMS["molecule"], SYSTEMS["ion"]])
    again = potential(more).energy
    assert torch.allclose(again[0], first[0], rtol=0, atol=1e-10)
    assert torch.equal(potential(SYSTEMS["molecule"]).energy, first)


def test_all_pairs_are_per_structure():
    """No square over the batch: pairs grow with the number of structures, not with its square."""
    from torchmdnet2.neighbors.pairs import all_pairs

    system = SYSTEMS["molecule"]
    pairs = all_pairs(System.concatenate([system] * 7))
    assert pairs.num_edges == 7 * 6 * 5
    receiver, sender = pairs.edge_index
    assert torch.equal(receiver // 6, sender // 6)
    assert torch.equal(torch.bincount(receiver), torch.diff(pairs.row_ptr))
    mixed = system.replace(
        batch=torch.tensor([0, 1, 0, 1, 1, 0]), cell=torch.zeros(2, 3, 3), pbc=torch.zeros(2, 3, dtype=torch.bool),
        charge=torch.zeros(2), spin=torch.zeros(2, dtype=torch.long),
    )  # fmt: skip
    edges = set(map(tuple, all_pairs(mixed).edge_index.T.tolist()))
    assert edges == {(i, j) for i in range(6) for j in range(6) if i != j and mixed.batch[i] == mixed.batch[j]}
