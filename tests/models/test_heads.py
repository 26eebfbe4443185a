"""Heads: reductions, properties, filters; dipoles turn with the molecule and charges add up."""

from __future__ import annotations

import math

import pytest
import torch
from variants import ELEMENTS, variant

from torchmdnet2 import Potential, System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.models import Features
from torchmdnet2.models.heads import VectorNetwork
from torchmdnet2.potential.output import Output
from torchmdnet2.testing import SYSTEM_CHECKS, check_potential, example_systems

SYSTEMS = example_systems(ELEMENTS, 4.5)
MOLECULE, ION = SYSTEMS["molecule"], SYSTEMS["ion"]
ALL = [
    {"name": "charges"},
    {"name": "dipole", "equivariant": True, "scale": 0.7},
    {"name": "spatial_extent", "scale": 1.3, "shift": 0.4},
    {"name": "vector"},
    {"name": "vector", "per": "atom", "property": "moments"},
    {"name": "scalar_property", "property": "gap", "reduce": "mean", "shift": 2.0},
    {"name": "scalar_property", "property": "shifts", "per": "atom"},
]


def rotation() -> torch.Tensor:
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    return turn * torch.linalg.det(turn)


@pytest.fixture(scope="module")
def potential() -> Potential:
    return variant("equivariant_transformer", properties=ALL)


def test_shapes_and_symmetry(potential):
    """Properties turn with the molecule, do not move with it, and are those of each structure in a batch."""
    before = potential(MOLECULE).properties
    assert set(before) == {"charges", "dipole", "spatial_extent", "vector", "moments", "gap", "shifts"}
    q = rotation()
    after = potential(MOLECULE.replace(pos=MOLECULE.pos @ q + 5.0)).properties
    both = potential(System.concatenate([ION, MOLECULE])).properties
    for name, value in before.items():
        vector = value.shape[-1] == 3 and value.ndim == 2
        assert torch.allclose(after[name], value @ q if vector else value, rtol=0, atol=1e-9), name
        assert float(value.abs().max()) > 1e-3, name
        assert torch.allclose(both[name][-value.shape[0] :], value, rtol=0, atol=1e-10), name


def test_charges_add_up(potential):
    batch = System.concatenate([ION, MOLECULE])
    result = potential(batch)
    assert torch.equal(result.charges, result.properties["charges"])
    total = torch.zeros(2, dtype=torch.float64).index_add(0, batch.batch, result.charges)
    assert float((total - batch.charge).abs().max()) <= 1e-10


def test_dipole_of_known_charges():
    """The dipole is Σ c (r − r_com): against a sum with the masses written out."""
    potential = variant("transformer", properties=[{"name": "dipole"}])
    system = MOLECULE
    result = potential(system)
    masses = torch.tensor([{1: 1.008, 6: 12.011, 8: 15.999, 14: 28.085}[int(z)] for z in system.z])
    centre = (masses[:, None] * system.pos).sum(0) / masses.sum()
    from torchmdnet2.models import Graph
    from torchmdnet2.neighbors import neighbor_list

    graph = Graph.build(system, neighbor_list(system, 4.5), torch.float64)
    weights = potential.properties["dipole"].output_network(potential.representation(graph).x)[:, 0]
    expected = (weights[:, None] * (system.pos - centre)).sum(0)
    assert torch.allclose(result.properties["dipole"][0], expected, rtol=1e-6)


def test_dipole_of_a_cell_is_refused():
    potential = variant("transformer", properties=[{"name": "dipole"}])
    with pytest.raises(ValueError, match="depend on the choice"):
        potential(SYSTEMS["cubic cell"])


def test_vectors_need_a_model_with_vectors():
    with pytest.raises(ValueError, match="equivariant_transformer"):
        variant("transformer", properties=[{"name": "vector"}])(MOLECULE)


@pytest.mark.parametrize("name", ["scalar", "equivariant_scalar"])
def test_w2_mean_is_the_mean(name):
    """W2: the mean over n atoms is the sum divided by n, not by n + 1."""
    kind = {"scalar": "graph_network", "equivariant_scalar": "equivariant_transformer"}[name]
    total, mean = (
        variant(kind, head={"name": name, "reduce": reduce}, subtract_isolated=False) for reduce in ("sum", "mean")
    )
    batch = System.concatenate([ION, SYSTEMS["tiny cell"]])
    size = torch.tensor([6, 2])
    assert torch.allclose(mean(batch).energy, total(batch).energy / size, rtol=1e-12)
    for check in SYSTEM_CHECKS.values():
        check(mean, MOLECULE)


def test_mean_of_energies_relative_to_the_isolated_atoms():
    """With isolated atoms subtracted, the energy is the mean over the atoms of what it would be the sum of."""
    total, mean = (variant("graph_network", head={"name": "scalar", "reduce": reduce}) for reduce in ("sum", "mean"))
    assert torch.allclose(mean(ION).energy, total(ION).energy / 6, rtol=1e-12)


def test_w2_mean_of_a_property(potential):
    """The same for properties: the gap of atoms without neighbors is their mean."""
    far = System(z=torch.tensor([1, 6]), pos=torch.tensor([[0.0, 0, 0], [50, 0, 0]], dtype=torch.float64))
    single = [System(z=far.z[i : i + 1], pos=far.pos[i : i + 1]) for i in range(2)]
    gaps = [float(potential(s).properties["gap"]) for s in single]
    assert float(potential(far).properties["gap"]) == pytest.approx(sum(gaps) / 2, abs=1e-12)


def aggregate(aggregation: str, messages: list[float], envelope: list[float]) -> list[float]:
    """What atom 0 of four gets from the others, and what the others get."""
    from torchmdnet2.models.message_passing.model import ContinuousFilter
    from torchmdnet2.potential.graph import Graph

    layer = ContinuousFilter(1, 1, aggregation).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
        layer.lin2.bias.zero_()
    graph = Graph.isolated(torch.ones(4, dtype=torch.long), torch.float64)
    graph.receiver, graph.sender = torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3])
    x = torch.tensor([0.0, *messages], dtype=torch.float64)[:, None]
    out = layer(x, graph, torch.ones(3, 1).double(), torch.tensor(envelope, dtype=torch.float64))
    return out[:, 0].tolist()


@pytest.mark.parametrize("aggregation", ["mean", "softmax", "max"])
def test_w2_aggregation_over_neighbors(aggregation):
    """W2: a message that is the same from each of n neighbors is their mean and maximum, also when negative."""
    for value in (-3.0, 3.0):
        assert aggregate(aggregation, [value] * 3, [1.0] * 3) == pytest.approx([value, 0, 0, 0], abs=1e-14)


def test_aggregations_by_hand():
    messages, envelope = [0.3, -1.2, 2.0], [1.0, 0.8, 0.25]
    product = [m * c for m, c in zip(messages, envelope, strict=True)]
    share = [c * math.exp(m) for m, c in zip(messages, envelope, strict=True)]
    expected = {
        "add": sum(product),
        "mean": sum(product) / 2.05,
        "max": 0.5,
        "softmax": sum(s * m for s, m in zip(share, messages, strict=True)) / sum(share),
    }
    for aggregation, value in expected.items():
        assert aggregate(aggregation, messages, envelope)[0] == pytest.approx(value, rel=1e-12), aggregation
    # weights that sum to less than one: the mean of the last neighbors goes to zero with them
    weak = [0.1 * c for c in envelope]
    size = 0.205 + (1 - 0.205) ** 3 / 3
    assert aggregate("mean", messages, weak)[0] == pytest.approx(0.1 * sum(product) / size, rel=1e-12)
    assert aggregate("softmax", messages, weak)[0] == pytest.approx(expected["softmax"] * 0.205 / size, rel=1e-12)
    assert aggregate("softmax", [800.0, -800.0, 1.0], envelope)[0] == pytest.approx(800.0)
    assert all(aggregate(kind, messages, [0.0] * 3)[0] == 0 for kind in expected)


def test_maximum_warns():
    """'max' has kinks: whoever takes it is told, with the smooth form that there is."""
    with pytest.warns(UserWarning, match="take 'softmax'"):
        variant("graph_network", model={"name": "graph_network", "aggregation": "max", "hidden_channels": 8})


def test_properties_without_an_energy():
    """A model of a dipole alone: its energy and forces are those of the priors."""
    config = {"head": {"name": "dipole"}, "priors": [{"name": "atomref", "energies": {1: -1.0, 6: -2.0}}]}
    potential = variant("transformer", **config)
    assert potential.head is None
    result = potential(System(z=torch.tensor([1, 6]), pos=torch.tensor([[0.0, 0, 0], [1, 0, 0]])))
    assert result.energy.tolist() == [-3.0] and float(result.forces.abs().max()) == 0
    assert result.properties["dipole"].shape == (1, 3)
    check_potential(potential, [MOLECULE])


def test_properties_are_trained(potential):
    """Properties keep the graph in training, and are cut from it otherwise."""
    result = potential(MOLECULE, create_graph=True)
    (result.properties["dipole"] ** 2).sum().backward()
    assert potential.properties["dipole"].output_network[0].vec1_proj.weight.grad is not None
    assert not any(p.requires_grad for p in potential(MOLECULE).properties.values())


def test_saved_with_properties(potential, tmp_path):
    save(potential, tmp_path / "model.tmn")
    again = load(tmp_path / "model.tmn")
    for name, value in potential(MOLECULE).properties.items():
        assert torch.equal(again(MOLECULE).properties[name], value), name


def test_two_heads_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same property"):
        variant("transformer", properties=[{"name": "charges"}, {"name": "charges"}])
    with pytest.raises(ValueError, match="one energy head"):
        variant("transformer", properties=[{"name": "scalar"}])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"properties": [{"name": "scalar_property", "property": "gap", "per": "bond"}]},
            "per must be 'system' or 'at",
        ),
        ({"head": {"name": "scalar", "reduce": "median"}}, "reduce must be 'sum' or 'mean', got 'median'"),
        ({"head": {"name": "scalar", "activation": "sliu"}}, "unknown activation 'sliu', did you mean 'silu'"),
        ({"head": {"name": "scalar", "num_hidden_layers": -1}}, "num_hidden_layers must be at least 0, got -1"),
    ],
)
def test_arguments_out_of_range(config, words):
    with pytest.raises(ValueError, match=words):
        Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 8}, **config})


def test_heads_that_do_not_fit_the_network():
    with pytest.raises(ValueError, match="per must be 'system' or 'atom', got 'bond'"):
        Output("gap", "bond")
    with pytest.raises(ValueError, match="this head needs vector features: use the model 'equivariant_transformer'"):
        VectorNetwork(8, "silu")(Features(torch.ones(3, 8)))
    potential = variant("tensornet2_all_pairs")
    potential.head.qweights = potential.head.qweights[:-1]
    with pytest.raises(ValueError, match=r"weights for \d+ charge channels \(stages × q_dim\), but the model has \d"):
        potential(MOLECULE)


def test_atom_filter():
    """Hydrogens take part in the messages and have no energy; forces are still the gradient."""
    whole, heavy = variant("graph_network"), variant("graph_network", atom_filter=1)
    a, b = whole(MOLECULE), heavy(MOLECULE)
    hydrogen = MOLECULE.z == 1
    assert (b.atom_energies[hydrogen] == 0).all()
    assert torch.equal(b.atom_energies[~hydrogen], a.atom_energies[~hydrogen])
    assert float(b.forces[hydrogen].abs().max()) > 0.01
    for name in ("molecule", "triclinic cell"):
        for check in SYSTEM_CHECKS.values():
            check(heavy, SYSTEMS[name])


def test_atom_filter_of_properties():
    """Means and centres of mass are those of the atoms that are kept."""
    properties = [{"name": "scalar_property", "property": "gap", "reduce": "mean"}, {"name": "dipole"}]
    potential = variant("transformer", properties=properties, atom_filter=1)
    from torchmdnet2.neighbors import neighbor_list
    from torchmdnet2.potential.graph import Graph, centered_positions, pool

    graph = Graph.build(MOLECULE, neighbor_list(MOLECULE, 4.5), torch.float64)
    graph.readout = MOLECULE.z > 1
    ones = torch.ones(6, dtype=torch.float64)
    assert float(pool(ones, graph)) == float((MOLECULE.z > 1).sum())
    assert float(pool(ones, graph, "mean")) == 1.0
    moved = centered_positions(MOLECULE, graph.readout)[graph.readout]
    masses = torch.tensor([{6: 12.011, 8: 15.999, 14: 28.085}[int(z)] for z in MOLECULE.z[graph.readout]])
    assert torch.allclose((masses[:, None] * moved).sum(0), torch.zeros(3).double(), atol=1e-5)
    assert potential(MOLECULE).properties["gap"].shape == (1,)


def test_w17_spin_is_not_ignored():
    """W17: a spin state that the model does not know is refused; the lowest one is taken for granted."""
    potential = variant("transformer")
    odd = int(MOLECULE.electrons) % 2
    for spin in (0, 1 + odd):
        potential(MOLECULE.replace(spin=torch.tensor([spin])))
    with pytest.raises(ValueError, match=f"structure 0 has spin multiplicity {2 - odd}, which its .* electrons"):
        potential(MOLECULE.replace(spin=torch.tensor([2 - odd])))
    with pytest.raises(ValueError, match="structure 1 has spin multiplicity 3"):
        batch = System.concatenate([MOLECULE, MOLECULE.replace(spin=torch.tensor([3]))])
        potential(batch)


@pytest.mark.parametrize("kind", ["equivariant_transformer", "equivariant_transformer_plain"])
def test_w14_smooth_at_the_cutoff(kind):
    """W14: no jump of the energy when a pair crosses the cutoff, by default; with vector_cutoff off there is one."""
    assert variant(kind).representation.attention_layers[0].vector_cutoff

    def jump(potential: Potential) -> float:
        cluster = [[0.0, 0, 0], [-0.8, 0.6, 0.2], [-0.7, -0.7, 0.4]]
        energies = []
        for x in (-1e-7, 1e-7):
            pos = torch.tensor([*cluster, [4.5 + x, 0, 0]], dtype=torch.float64)
            energies.append(float(potential(System(z=torch.tensor([6, 8, 1, 1]), pos=pos)).energy))
        return abs(energies[1] - energies[0])

    assert jump(variant(kind)) < 1e-9
    rough = variant(kind)
    for layer in rough.representation.attention_layers:
        layer.vector_cutoff = False
    assert jump(rough) > 1e-4
