"""Structures with room to spare give what they give without, for every model, and without looking at values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from variants import ELEMENTS, VARIANTS, variant

from torchmdnet2 import Potential, System
from torchmdnet2.engine.autograd_term import PaddedList, pad_list, pad_system
from torchmdnet2.engine.graph import ForbidHostSync, HostSync
from torchmdnet2.models import Features, Representation
from torchmdnet2.neighbors import NeighborList
from torchmdnet2.neighbors.pairs import PairLists
from torchmdnet2.testing import example_systems

SYSTEMS = example_systems(ELEMENTS, 4.5)
PROPERTIES = [{"name": "charges"}, {"name": "scalar_property", "property": "gap", "reduce": "mean"}]
PRIORS = [
    {"name": "atomref", "energies": {"1": -13.6, "6": -1029.0}},
    {"name": "zbl", "cutoff": 4.0},
    {"name": "d2", "cutoff": 6.0},
    {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": "reaction_field", "cutoff": 5.0},
]
MODELS = [kind for kind in VARIANTS if "ewald" not in kind and "pme" not in kind]


def pad(neighbors: NeighborList, room: int) -> PaddedList:
    """Room for more edges, filled with anything."""
    room = 0 if math.isinf(neighbors.cutoff) else room
    num = neighbors.row_ptr.shape[0] - 1

    def extend(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values, torch.randint(0, num, (room, *values.shape[1:]))])

    receiver, sender = neighbors.edge_index
    return pad_list(neighbors.row_ptr, extend(receiver), extend(sender), extend(neighbors.shift), neighbors.cutoff)


def evaluate(potential: Potential, system: System, stress: bool, room: int):
    lists = PairLists(system)
    potential.compute(system, lists, False, False)
    padded = pad_system(system, max(c for c in lists.known if math.isfinite(c)), potential.elements[0])
    known = {cutoff: pad(neighbors, room) for cutoff, neighbors in lists.known.items()}
    isolated = potential.isolated_energies().detach()
    with ForbidHostSync():
        result = potential.compute(padded, PairLists(padded, known), True, stress, isolated=isolated)
    return result.first(system.num_atoms, system.num_systems, potential.outputs)


def assert_same(result, expected):
    for name in ("energy", "forces", "stress", "atom_energies", "charges"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    assert expected.properties.keys() - result.properties.keys() <= {"dipole"}  # of charges, added to what users get
    for name in result.properties:
        theirs = expected.properties[name]
        torch.testing.assert_close(result.properties[name], theirs, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_room_changes_nothing(kind):
    molecules = kind.endswith("all_pairs")
    potential = variant(kind, properties=PROPERTIES, priors=PRIORS, atom_filter=1)
    names = ["molecule", "ion"] if molecules else ["triclinic cell", "tiny cell"]
    system = System.concatenate([SYSTEMS[name] for name in names])
    assert_same(evaluate(potential, system, not molecules, 50), potential(system, stress=not molecules))


@pytest.mark.parametrize(
    "model",
    [
        {"name": "tensornet", "hidden_channels": 8, "num_rbf": 8, "activation": "tanh", "cutoff_lower": 0.5},
        {"name": "equivariant_transformer", "hidden_channels": 8, "num_heads": 2, "vector_cutoff": False},
    ],
)
def test_models_that_do_not_vanish_at_the_cutoff(model):
    potential = Potential.from_config({"model": {**model, "max_z": 20}, "elements": ELEMENTS}).double().eval()
    for name in ("tiny cell", "slab"):
        assert_same(evaluate(potential, SYSTEMS[name], False, 20), potential(SYSTEMS[name]))


def test_charges_by_atom_and_dipoles():
    heads = [
        {"name": "dipole", "equivariant": True},
        {"name": "spatial_extent"},
        {"name": "vector", "per": "atom"},
    ]
    priors = [{"name": "coulomb", "charges": [0.1, -0.2, 0.3, -0.1, 0.2, -0.3], "damping": "exp"}]
    potential = variant("equivariant_transformer", properties=heads, priors=priors)
    system = System.concatenate([SYSTEMS["molecule"], SYSTEMS["ion"]])
    assert_same(evaluate(potential, system, False, 30), potential(system))


def test_no_edges_and_a_single_atom():
    potential = variant("transformer")
    system = System(z=torch.tensor([8]), pos=torch.zeros(1, 3, dtype=torch.float64))
    assert_same(evaluate(potential, system, False, 16), potential(system))


class Looking(Representation):
    """Looks at a distance on the host."""

    hidden_channels, cutoff, max_z = 4, 4.0, 10

    def __init__(self, how: str):
        super().__init__()
        self.how, self.embedding = how, nn.Embedding(10, 4)

    def forward(self, graph):
        x, d = self.embedding(graph.z), graph.distances
        if self.how == "item":
            x = x * (2 if float(d.detach().sum()) > 0 else 1)
        elif self.how == "mask":
            x = x + d[d < 3].sum()
        elif self.how == "count":
            x = x + torch.bincount(graph.receiver).sum()
        elif self.how == "constant":
            x = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return Features(x)


@pytest.mark.parametrize("how", ["item", "mask", "count", "constant"])
def test_models_that_look_at_values_are_found(how):
    from torchmdnet2.models.heads import ScalarHead

    potential = Potential(Looking(how), ScalarHead(4)).eval()
    with pytest.raises(HostSync, match=r"forward' \(test_padded.py\) copies tensor values"):
        evaluate(
            potential, SYSTEMS["molecule"].to(dtype=torch.float32).replace(z=torch.ones(6, dtype=torch.long)), False, 8
        )
