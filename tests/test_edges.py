"""Edges of a host program: domains with ghost atoms add up to the structure."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchmdnet2 import Potential, System
from torchmdnet2.engine.domain import evaluate_edges
from torchmdnet2.errors import UnknownElement
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.priors import Prior

CUTOFF = 2.5
CELLS = {
    "orthorhombic": [[6.0, 0, 0], [0, 5.0, 0], [0, 0, 5.5]],
    "triclinic": [[6.0, 0, 0], [1.5, 5.0, 0], [-0.7, 0.9, 5.5]],
}
PRIORS = [
    {"name": "zbl", "cutoff": 2.0},
    {"name": "d2", "cutoff": 4.0},
    {"name": "atomref", "energies": {"8": -2041.3}},
]


def make(model="tensornet", priors=(), layers=1, arguments=(), **changes):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = {
            "name": model,
            "num_layers": layers,
            "num_rbf": 6,
            "hidden_channels": 8,
            "cutoff": CUTOFF,
            "max_z": 10,
        }
        config.update(arguments)
        return Potential.from_config({"model": config, "priors": list(priors), **changes}).double().eval()


def crystal(cell, num_atoms=12):
    random = torch.Generator().manual_seed(4)
    cell = torch.tensor(cell, dtype=torch.float64)
    z = torch.tensor([1, 6, 8])[torch.randint(0, 3, (num_atoms,), generator=random)]
    return System(z=z, pos=torch.rand(num_atoms, 3, generator=random, dtype=torch.float64) @ cell, cell=cell)


def domains(system, number, shell, cutoff):
    """Slabs along the first axis, each with its local atoms, and as ghosts all copies of atoms within `shell`.

    Yields:
        (owner, edge_index, vectors, num_local): owner [N] is the atom that each local atom or ghost is a copy of.
    """
    fraction = torch.linalg.solve(system.cell[0].T, system.pos.T).T[:, 0]
    slab = (fraction * number).long().clamp(0, number - 1)
    shifts = torch.tensor(list(itertools.product(range(-4, 5), repeat=3)))
    copies = system.pos[None] + (shifts.double() @ system.cell[0])[:, None]
    own = (shifts == 0).all(1)
    for k in range(number):
        local = (slab == k).nonzero()[:, 0]
        if not len(local):
            yield local, torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 3).double(), 0
            continue
        near = torch.cdist(copies.flatten(0, 1), system.pos[local]).amin(1).unflatten(0, copies.shape[:2]) < shell
        near[own.nonzero()[0, 0], local] = False
        image, ghost = near.nonzero(as_tuple=True)
        pos = torch.cat([system.pos[local], copies[image, ghost]])
        edges = neighbor_list(System(z=torch.ones(len(pos)).long(), pos=pos), cutoff)
        vectors = pos[edges.edge_index[1]] - pos[edges.edge_index[0]]
        order = torch.randperm(edges.num_edges, generator=torch.Generator().manual_seed(k))
        yield torch.cat([local, ghost]), edges.edge_index[:, order], vectors[order], len(local)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("model", "layers", "priors", "charge"),
    [("tensornet", 1, (), 1.0), ("tensornet", 1, PRIORS, 0.0), ("graph_network", 2, (), 0.0)],
)
def test_domains_add_up_to_the_structure(cell, model, layers, priors, charge):
    potential, system = (
        make(model, priors, layers),
        crystal(CELLS[cell]).replace(charge=torch.tensor([charge]).double()),
    )
    expected = potential(system, stress=True)
    reach = 4.0 if priors else CUTOFF
    shell = max(reach, (layers + 1) * CUTOFF) + 1e-9  # the embedding reads neighbors too
    energies = torch.zeros(system.num_atoms, dtype=torch.float64)
    forces, virial = torch.zeros_like(system.pos), torch.zeros(3, 3, dtype=torch.float64)
    for owner, edge_index, vectors, num_local in domains(system, 3, shell, reach):
        found = evaluate_edges(potential, system.z[owner], edge_index, vectors, num_local, charge, cutoff=reach)
        energies[owner[:num_local]] = found.atom_energies
        forces.index_add_(0, owner, found.forces)
        virial += found.virial
        torch.testing.assert_close(found.virial, vectors.T @ found.edge_gradients)
    torch.testing.assert_close(energies, expected.atom_energies, rtol=0, atol=1e-10)
    torch.testing.assert_close(forces, expected.forces, rtol=0, atol=1e-10)
    stress = (virial + virial.T) / 2 / system.volume
    torch.testing.assert_close(stress, expected.stress[0], rtol=0, atol=1e-10)


def test_too_small_a_shell_is_wrong():
    """What the previous test would not notice if ghosts beyond one cutoff did not matter."""
    potential, system = make(), crystal(CELLS["triclinic"])
    expected = potential(system).atom_energies
    for owner, edge_index, vectors, num_local in domains(system, 3, CUTOFF, CUTOFF):
        found = evaluate_edges(potential, system.z[owner], edge_index, vectors, num_local)
        if num_local and not torch.allclose(found.atom_energies, expected[owner[:num_local]], rtol=0, atol=1e-10):
            return
    raise AssertionError("energies did not depend on the shell")


def test_gradients_are_those_of_the_energy():
    potential, system = make(), crystal(CELLS["triclinic"])
    owner, edge_index, vectors, num_local = next(domains(system, 3, 2 * CUTOFF, CUTOFF))
    found = evaluate_edges(potential, system.z[owner], edge_index, vectors, num_local)
    edge = int(found.edge_gradients.abs().sum(1).argmax())
    step = torch.zeros_like(vectors)
    step[edge, 1] = 1e-5
    one, other = vectors + step, vectors - step
    up, down = (evaluate_edges(potential, system.z[owner], edge_index, v, num_local).energy for v in (one, other))
    assert float((up - down) / 2e-5) == pytest.approx(float(found.edge_gradients[edge, 1]), rel=1e-6)


CHARGES = {"1": 0.1, "6": 0.0, "8": -0.1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "tensornet2", "arguments": {"q_dim": 2}}, "distributes the charge of the whole structure"),
        ({"head": {"name": "scalar", "reduce": "mean"}}, "takes a mean over the structure"),
        ({"priors": [{"name": "coulomb", "charges": CHARGES}]}, "sums over all pairs"),
        (
            {"priors": [{"name": "coulomb", "charges": CHARGES, "method": "ewald", "cutoff": 2.0}]},
            "reads positions|whole",
        ),
        ({"priors": [{"name": "d2", "cutoff": 6.0}]}, "needs them up to 6.0 Å: give cutoff"),
    ],
)
def test_what_needs_the_whole_structure_is_refused(given, words):
    system = crystal(CELLS["triclinic"])
    owner, edge_index, vectors, num_local = next(domains(system, 3, 2 * CUTOFF, CUTOFF))
    with pytest.raises(ValueError, match=words):
        evaluate_edges(make(**given), system.z[owner], edge_index, vectors, num_local)


class Field(Prior):
    """A field along z, which no edge knows of."""

    def forward(self, system, neighbors):
        return system.pos[:, 2].double()


def test_priors_of_positions_and_potentials_of_whole_structures_are_refused():
    system = crystal(CELLS["triclinic"])
    owner, edge_index, vectors, num_local = next(domains(system, 3, 2 * CUTOFF, CUTOFF))
    given = system.z[owner], edge_index, vectors, num_local
    potential = make()
    potential.priors.append(Field())
    with pytest.raises(ValueError, match="a prior reads positions, which a host's edges do not have"):
        evaluate_edges(potential, *given)
    shifted = {**make().config, "energy_shift": 1.0}
    with pytest.raises(ValueError, match="a prior is a potential with an energy_shift of the whole structure"):
        evaluate_edges(make(priors=[{"name": "baseline", "potential": shifted}]), *given)


def test_bad_input_is_named():
    potential, z = make(elements=[1, 8]), torch.tensor([1, 8, 1])
    edges, vectors = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1.0, 0, 0], [-1, 0, 0]]).double()
    with pytest.raises(UnknownElement, match="atom 1 is C"):
        evaluate_edges(potential, torch.tensor([1, 6, 1]), edges, vectors, 2)
    with pytest.raises(ValueError, match="edge 1: its vector is not finite"):
        evaluate_edges(potential, z, edges, vectors * torch.tensor([[1.0], [torch.inf]]), 2)
    with pytest.raises(ValueError, match=r"edge 0: its atoms \[0, 1\] are at the same place"):
        evaluate_edges(potential, z, edges, 0 * vectors, 2)
    with pytest.raises(ValueError, match="num_local is 4"):
        evaluate_edges(potential, z, edges, vectors, 4)
    with pytest.raises(ValueError, match="names an atom"):
        evaluate_edges(potential, z, edges + 2, vectors, 2)
    with pytest.raises(ValueError, match=r"vectors \[E, 3\]"):
        evaluate_edges(potential, z, edges, vectors[:1], 2)
