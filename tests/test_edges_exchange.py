"""Domains whose ghosts get what the layers read from the atoms' owners: one cutoff of ghosts is enough."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_edges import CUTOFF, crystal
from test_edges import make as make_layers
from tiny import tiny_potential
from torch import nn

from torchmdnet2 import Potential
from torchmdnet2.core.exchange import CopyExchange, with_ghosts
from torchmdnet2.engine.domain import evaluate_edges
from torchmdnet2.potential.graph import Features, Representation

CELLS = {
    "orthorhombic": [[4.0, 0, 0], [0, 2.2, 0], [0, 0, 3.1]],  # narrower than the cutoff: several images of an atom
    "triclinic": [[4.0, 0, 0], [1.2, 3.3, 0], [-0.7, 0.9, 3.6]],
}
PRIORS = [
    {"name": "zbl", "cutoff": 2.0},
    {"name": "d2", "cutoff": 3.5},
    {"name": "atomref", "energies": {"8": -2041.3}},
    {"name": "coulomb", "charges": {"1": 0.2, "8": -0.4}, "method": "reaction_field", "cutoff": 3.0},
]
D3 = {"name": "d3", "elements": [1, 6, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 3.5, "switch_width": 1.0}


def make(model="tensornet", layers=2, priors=(), **arguments):
    return make_layers(model, priors, layers, arguments)


def with_images(system, reach):
    """Atomic numbers of atoms and images within reach, the images' owners, edges of the atoms, their vectors."""
    n = system.num_atoms
    shifts = torch.tensor([s for s in itertools.product(range(-4, 5), repeat=3) if any(s)])
    images = system.pos[None] + (shifts.double() @ system.cell[0])[:, None]
    near = torch.cdist(images.flatten(0, 1), system.pos).amin(1).unflatten(0, images.shape[:2]) < reach
    image, owner = near.nonzero(as_tuple=True)
    pos = torch.cat([system.pos, images[image, owner]])
    vectors = pos[None] - pos[:n, None]
    listed = vectors.norm(dim=2) < reach
    listed[range(n), range(n)] = False
    edges = listed.nonzero().T
    return torch.cat([system.z, system.z[owner]]), owner, edges, vectors[listed]


MODELS = [
    ("tensornet", {"layers": 2}, 1.0),
    ("tensornet", {"layers": 1, "priors": PRIORS}, 0.0),
    ("tensornet", {"layers": 0}, 0.0),
    ("tensornet2", {"q_dim": 0}, 0.0),
    ("matgl_tensornet", {}, 0.0),
    ("matgl_tensornet", {"messages": "own"}, 0.0),
    ("graph_network", {}, 0.0),
    ("graph_network", {"aggregation": "softmax"}, 0.0),
    ("transformer", {"num_heads": 2}, 0.0),
    ("equivariant_transformer", {"num_heads": 2}, 0.0),
]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("model", "arguments", "charge"), MODELS)
def test_images_that_read_from_their_owners_give_the_crystal(cell, model, arguments, charge):
    compare(make(model, **arguments), crystal(CELLS[cell], 7).replace(charge=torch.tensor([charge]).double()))


def test_coordination_numbers_are_exchanged():
    compare(make(layers=1, priors=[D3]), crystal(CELLS["triclinic"], 7))


def test_baseline_is_a_network_of_its_own():
    inner = tiny_potential(elements=[1, 6, 8], priors=[])
    potential = make(layers=1, priors=[{"name": "baseline", "potential": inner.config}])
    compare(potential, crystal(CELLS["triclinic"], 7))


def compare(potential, system):
    expected = potential(system, stress=True)
    reach = max([CUTOFF, *(p.cutoff or 0 for p in potential.priors)])
    z, owner, edges, vectors = with_images(system, reach)
    exchange = CopyExchange(system.num_atoms, owner)
    found = evaluate_edges(
        potential, z, edges, vectors, system.num_atoms, float(system.charge), cutoff=reach, exchange=exchange
    )
    torch.testing.assert_close(found.atom_energies, expected.atom_energies, rtol=0, atol=1e-10)
    forces = found.forces[: system.num_atoms] + exchange.reverse(found.forces[system.num_atoms :])
    torch.testing.assert_close(forces, expected.forces, rtol=0, atol=1e-10)
    stress = (found.virial + found.virial.T) / 2 / system.volume
    torch.testing.assert_close(stress, expected.stress[0], rtol=0, atol=1e-10)
    assert float(expected.forces.abs().max()) > 0.01


def test_a_domain_without_atoms():
    none = torch.zeros(0).long()
    found = evaluate_edges(
        make(), none, none.expand(2, 0), torch.zeros(0, 3).double(), 0, exchange=CopyExchange(0, none)
    )
    assert float(found.energy) == 0 and found.forces.shape == (0, 3)


def test_reverse_is_the_transpose_of_forward():
    random = torch.Generator().manual_seed(1)
    exchange = CopyExchange(3, torch.tensor([2, 0, 2, 2]))
    rows, ghosts = (torch.randn(k, 2, 5, generator=random, dtype=torch.float64) for k in (3, 4))
    assert float((exchange.forward(rows) * ghosts).sum()) == pytest.approx(
        float((rows * exchange.reverse(ghosts)).sum())
    )
    assert torch.autograd.gradcheck(lambda r: with_ghosts(r, exchange), rows.requires_grad_())


class Deaf(Representation):
    """Reads its senders' rows itself."""

    cutoff, hidden_channels, max_z = CUTOFF, 8, 10

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, graph):
        x = self.embedding(graph.z)
        return Features(x.index_add(0, graph.receiver, x.index_select(0, graph.sender)))


def test_what_cannot_be_exchanged_is_refused():
    system = crystal(CELLS["triclinic"], 7)
    z, owner, edges, vectors = with_images(system, CUTOFF)
    potential = make()
    arguments = z, edges, vectors, system.num_atoms
    with pytest.raises(ValueError, match=r"exchange is one of 6 local atoms and \d+ ghosts, not of 7"):
        evaluate_edges(potential, *arguments, exchange=CopyExchange(6, owner % 6))
    with pytest.raises(ValueError, match="the receivers of edges are local atoms"):
        evaluate_edges(potential, z, edges.flip(0), -vectors, system.num_atoms, exchange=CopyExchange(7, owner))
    deaf = Potential(Deaf(), potential.head).double()
    with pytest.raises(ValueError, match=r"Deaf reads no rows of ghosts"):
        evaluate_edges(deaf, *arguments, exchange=CopyExchange(7, owner))
    charges = {"name": "coulomb", "charges": [0.1] * 7, "method": "reaction_field", "cutoff": 2.0}
    with pytest.raises(ValueError, match="charges by atom"):
        evaluate_edges(make(priors=[charges]), *arguments, exchange=CopyExchange(7, owner))
    charges = {"name": "coulomb", "charges": {"1": 0.1}, "method": "pme", "cutoff": 2.0}
    with pytest.raises(ValueError, match=r"'pme' sums over the whole structure.*reaction_field"):
        evaluate_edges(make(priors=[charges]), *arguments, exchange=CopyExchange(7, owner))
