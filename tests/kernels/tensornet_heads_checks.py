"""TensorNet with heads of other properties on its kernels, in Triton's interpreter. Run by test_tensornet_heads.py."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch
from kernels.tensornet2_gpu_checks import CELL, FIELD, TINY, system

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.engine.step import GraphedStep, StaticInputs
from torchmdnet2.models.tensornet import charged
from torchmdnet2.models.tensornet.gpu import Block
from torchmdnet2.potential.graph import PropertyHead, pool

assert os.environ["TRITON_INTERPRET"] == "1"
CHARGES, DIPOLE = {"name": "charges"}, {"name": "dipole", "scale": 0.7}
EXTENT = {"name": "spatial_extent", "shift": 3.0}
GAP = {"name": "scalar_property", "property": "gap", "reduce": "mean", "num_hidden_layers": 1}
SHIFTS = {"name": "scalar_property", "property": "shielding", "per": "atom", "activation": "tanh"}
ALL_PAIRS = {"name": "coulomb", "charges": "predicted", "method": "all_pairs"}
NAMES = {"tensornet": {}, "tensornet2": {"q_dim": 4}}


def make(properties, priors=(), name="tensornet", **changes) -> Potential:
    torch.manual_seed(5)
    sizes = {"hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0, "max_z": 10, **NAMES[name], **changes}
    given = {"model": {"name": name, **sizes}, "properties": properties, "priors": list(priors)}
    potential = Potential.from_config({**given, "elements": [1, 6, 7, 8]}).eval()
    potential.allow_untrained_charge = True
    with torch.no_grad():
        for p in potential.parameters():
            p.add_(0.05 * torch.randn_like(p))
        for p in potential.properties.parameters():  # charges that differ
            p.add_(0.5 * torch.randn_like(p))
    return potential


def assert_same(found, model, atoms, stress=False):
    """As the Potential in float64: at most twice the error of eager float32, and 1e-6 of the largest."""
    expected = copy.deepcopy(model).double()(atoms.to(dtype=torch.float64), stress=stress)
    eager = model(atoms.to(dtype=torch.float32), stress=stress)
    assert list(found.properties) == list(expected.properties)
    results = [{**vars(r), **r.properties} for r in (found, expected, eager)]
    names = {"energy", "atom_energies", "forces", *expected.properties, *(["stress"] if stress else [])}
    for name in names | ({"charges"} if expected.charges is not None else set()):
        ours, truth, theirs = (r[name].double() for r in results)
        bound = 2 * float((theirs - truth).abs().max()) + 1e-6 * max(1.0, float(truth.abs().max()))
        torch.testing.assert_close(ours, truth, rtol=0, atol=bound, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_charges_that_a_prior_reads(name):
    """Energies, forces and stress of the coupling dE/dq · dq/dx; the same bits twice."""
    model = make([CHARGES], [FIELD], name)
    evaluator, atoms = Evaluator(model), system(4, CELL, 1.0)
    found = evaluator(atoms, stress=True)
    assert evaluator.fused
    assert_same(found, model, atoms, True)
    # the coupling is no small part of the forces
    alone = copy.deepcopy(model)
    alone.priors = torch.nn.ModuleList()
    assert float((model(atoms).forces - alone(atoms).forces).abs().max()) > 0.05
    torch.testing.assert_close(found.charges.sum(), torch.tensor(1.0).double(), rtol=0, atol=1e-12)
    again = evaluator(atoms, stress=True)
    for what in ("forces", "atom_energies", "charges", "stress"):
        assert torch.equal(getattr(again, what), getattr(found, what)), what


@pytest.mark.parametrize("properties", [[CHARGES, DIPOLE, EXTENT, GAP, SHIFTS], [DIPOLE]], ids=["many", "one"])
def test_heads_do_not_take_energies_off_the_kernels(properties):
    """Also where nothing reads the charges; other positions are other properties."""
    model = make(properties)
    atoms = System.concatenate([system(3, None, 1.0), system(1, None, 0.0), system(2, None, -2.0)])
    evaluator = Evaluator(model)
    for one in (atoms, atoms.replace(pos=1.1 * atoms.pos, z=atoms.z.flip(0))):
        assert_same(evaluator(one), model, one)
    assert evaluator.fused
    with pytest.raises(ValueError, match="structure 0 is periodic"):
        evaluator(system(3, CELL, 0.0))


def test_spatial_order_and_parts(monkeypatch):
    """Charges and features belong to atoms, not to rows; sums over structures of several parts."""
    monkeypatch.setattr(charged, "_PARTS", (2, 2))
    model = make([CHARGES, SHIFTS], [FIELD])
    atoms = System.concatenate([system(5, CELL, 1.0), system(2, TINY, 0.0), system(3, CELL, -2.0, 1)])
    fused = FusedModel(model, "native")
    shapes = replace(fused.net.launch_shapes(10), readout=Block(1, 32, 32, 4))  # on CUDA cores
    step = fused.step(10, 3, torch.float64, True, sort=True, parts=2, shapes=shapes)
    inputs, graphed = StaticInputs(fused, step), GraphedStep(step)
    inputs.load(atoms)
    graphed.make_room()
    graphed.run()
    assert graphed.status()[0] == 0 and not torch.equal(step.order.order, torch.arange(10))
    found = step.results()
    found.properties = step.properties(found.charges)
    assert_same(found, model, atoms, True)


def test_molecules_by_all_pairs():
    model = make([CHARGES], [ALL_PAIRS])
    atoms = System.concatenate([system(4, None, 1.0), system(2, None, 0.0)])
    assert_same(Evaluator(model)(atoms), model, atoms)


@pytest.mark.parametrize("coulomb", ["pme", "dsf"])
def test_lattice_sums_of_a_model_of_molecules(coulomb):
    """Both on kernels, beside those of the network."""
    model = make([CHARGES], [{**ALL_PAIRS, "damping": "exp", "damping_upper": 3.0}])
    model.coulomb = coulomb
    evaluator, cell = Evaluator(model), system(4, CELL, 1.0)
    assert_same(evaluator(cell, stress=True), model, cell, True)
    report = evaluator.report()
    assert "  fused" in report and "priors by autograd" not in report
    parts = [system(3, None, 1.0), cell]
    mixed, alone = evaluator(System.concatenate(parts)), [evaluator(part) for part in parts]
    for name in ("energy", "forces", "atom_energies", "charges"):
        assert torch.equal(getattr(mixed, name), torch.cat([getattr(result, name) for result in alone])), name


@pytest.mark.parametrize("properties", [[CHARGES], [SHIFTS, CHARGES, DIPOLE]], ids=["charges", "more"])
def test_bound_steps_give_all_that_calls_give(properties):
    """By the charges that the kernels leave in the results, and heads on the features of the last replay."""
    evaluator, atoms = Evaluator(make(properties, [ALL_PAIRS])), system(4, None, 1.0)
    evaluator(atoms)
    (held,) = [graphed.step for graphed, _ in evaluator._active.steps.values()]
    bound = evaluator.bind(atoms)
    assert bound.pos is held.pos and not evaluator._active.steps, "one set of buffers"
    for scale in (1.0, 1.1):
        moved = atoms.replace(pos=scale * atoms.pos)
        bound.pos.copy_(moved.pos)
        bound.replay()
        expected, found = evaluator(moved), bound.fetch()
        names = dict.fromkeys([*(p.get("property", p["name"]) for p in properties), "dipole"])  # of charges at last
        assert list(found.properties) == list(expected.properties) == list(names)
        for name, value in expected.properties.items():
            assert torch.equal(found.properties[name], value), name
            assert torch.equal(bound.properties()[name], value), name
        assert torch.equal(found.charges, expected.charges) and torch.equal(bound.charges, expected.charges)
    bound.pos[1] = float("nan")
    bound.replay()
    assert bound.charges.isnan().all()
    with pytest.raises(ValueError, match="atom 1"):
        bound.fetch()


def test_tiny_energies_beside_charges():
    """The gradient of the charges has the right size in half precision, whatever the scale of the energy."""
    model = make([CHARGES], [FIELD])
    model.energy_scale = 1e-9
    atoms = system(4, CELL, 0.0)
    assert_same(Evaluator(model)(atoms), model, atoms)


class Neighbors(PropertyHead):
    """A user's head, which reads edges."""

    property, per = "neighbors", "system"

    def forward(self, features, graph):
        ones = torch.ones_like(graph.distances, dtype=torch.float64)
        zeros = torch.zeros(graph.num_atoms, dtype=torch.float64)
        return pool(zeros.index_add(0, graph.receiver, ones) * features.x[:, 0].double(), graph)


def test_a_head_that_reads_edges():
    model, atoms = make([DIPOLE]), system(4, None, 0.0)
    model.properties["neighbors"] = Neighbors()
    evaluator = Evaluator(model)
    assert_same(evaluator(atoms), model, atoms)
    assert evaluator.fused
    other = make([], name="tensornet2")
    other.properties["neighbors"] = Neighbors()
    assert "the head Neighbors" in Evaluator(other).report()


def test_heads_that_are_not_covered():
    deep = make([{**CHARGES, "num_hidden_layers": 2}])
    assert "heads of one hidden layer" in Evaluator(deep).report()


@pytest.mark.parametrize("what", ["gradient", "charges", "property"])
def test_wrong_numbers_are_refused(what, monkeypatch):
    """Bar: the first use is compared with the Potential in float64, charges and properties too."""
    model, atoms = make([CHARGES, DIPOLE], [ALL_PAIRS]), system(4, None, 1.0)
    network = charged.ChargedTensorNet
    if what == "gradient":
        differentiate = network.differentiate

        def wrong(self, buffers, shapes, at, edges, virial, slope):
            differentiate(self, buffers, shapes, at, edges, virial, 1.01 * slope)

        monkeypatch.setattr(network, "differentiate", wrong)
    elif what == "charges":
        equal = FusedModel.step

        def step(self, *args, **options):
            made = equal(self, *args, **options)
            finish = made._finish
            made._finish = lambda: (finish(), made.out.charges.add_(1e-3))
            return made

        monkeypatch.setattr(FusedModel, "step", step)
    else:
        features = network.features
        monkeypatch.setattr(network, "features", lambda self, buffers: 1.01 * features(self, buffers))
    words = {"gradient": "force", "charges": "charge of an atom", "property": "property 'dipole'"}[what]
    with pytest.raises(RuntimeError, match=f"does not agree with the reference in float64: {words}"):
        Evaluator(model)(atoms)
