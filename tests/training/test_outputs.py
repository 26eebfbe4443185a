"""What parts of a model declare is all that a training, ASE and written predictions know of them; plug-ins too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from ase import Atoms
from ase.io import read, write
from torch import nn
from warm import warm_python

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.models.heads import ScalarHead
from torchmdnet2.potential.graph import Features, PropertyHead, Representation, pool
from torchmdnet2.potential.output import CHARGES, Output
from torchmdnet2.registry import HEADS, REPRESENTATIONS
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.config.sections import predicted_shapes
from torchmdnet2.training.run.setup import make_setup

BUILT: list[str] = []


class Plain(Representation):
    """Without an argument `cutoff` or `max_z`."""

    cutoff, max_z = 3.0, 20

    def __init__(self, width: int = 8):
        super().__init__()
        BUILT.append("network")
        self.hidden_channels, self.embedding = width, nn.Embedding(20, width)
        self.weight = nn.Linear(1, width)

    def forward(self, graph):
        x = self.embedding(graph.z)
        pair = torch.exp(-graph.distances[:, None]) * (1 - (graph.distances[:, None] / self.cutoff) ** 2) ** 2
        return Features(x.index_add(0, graph.receiver, self.weight(pair) * pair))


class Shift(PropertyHead):
    """A number of each atom; `scale` may be fitted."""

    property, per, unit = "shift", "atom", "ppm"
    reads_edges = False

    def __init__(self, hidden_channels: int, scale: float = 1.0):
        super().__init__()
        BUILT.append("head")
        self.scale, self.linear = scale, nn.Linear(hidden_channels, 1)

    def forward(self, features, graph):
        return self.scale * self.linear(features.x).squeeze(1).double()


@pytest.fixture(autouse=True)
def plugins(monkeypatch):
    monkeypatch.setitem(REPRESENTATIONS._classes, "plain", Plain)
    monkeypatch.setitem(HEADS._classes, "shift", Shift)
    BUILT.clear()


@pytest.fixture
def frames(tmp_path):
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(12):
        pos = torch.tensor([[0.0, 0, 0], [1.0, 0, 0], [-0.3, 0.9, 0]]) + 0.1 * torch.randn(3, 3, generator=random)
        atoms = Atoms("OHH", pos.numpy())
        atoms.info["energy"] = float(pos.square().sum()) - 76.0
        atoms.arrays["shift"] = 5 * pos[:, 0].numpy() + 30
        made.append(atoms)
    write(tmp_path / "frames.xyz", made, format="extxyz")
    return tmp_path / "frames.xyz"


def raw(frames, **changes):
    keys = {"energy": "energy", "forces": None, "properties": {"shift": "shift"}}
    training = {"max_epochs": 2, "batch_size": 4, "seed": 7, "device": "cpu"}
    given = {
        "data": {"train": str(frames), "keys": keys},
        "model": {"name": "plain", "width": 6},
        "properties": [{"name": "shift", "scale": "fit"}],
        "training": training,
        "output": {"folder": str(frames.parent / "run")},
    }
    return {**given, **changes}


def test_a_plug_in_without_a_cutoff_trains(frames, capsys):
    from torchmdnet2.training.run.run import run_training

    best = run_training(parse_config(raw(frames)))
    assert best.is_file() and "cutoff 3.0" in capsys.readouterr().out


def test_the_network_is_built_once(frames):
    config = parse_config(raw(frames))
    setup = make_setup(config)
    assert BUILT == ["network", "head"]
    head = setup.potential.properties["shift"]
    assert head.scale > 1.2, "what was fitted is in the head that was built before"
    assert setup.potential.config["properties"][0]["scale"] == head.scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        alone = Potential.from_config(setup.potential.config)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, setup.potential.state_dict()[name].to(value.dtype)), name
    again = make_setup(config).potential
    assert again.representation is not setup.potential.representation, "a second training has weights of its own"
    for name, value in again.state_dict().items():
        assert torch.equal(value, setup.potential.state_dict()[name]), name


def test_priors_that_are_subtracted_build_no_other_network(frames):
    zbl = [{"name": "atomref"}, {"name": "zbl", "cutoff": 3.0}]
    make_setup(parse_config(raw(frames, priors=zbl)))
    assert BUILT == ["network", "head"]


def test_another_seed_is_another_network(frames):
    config = parse_config(raw(frames))
    other = config.model_copy(update={"training": config.training.model_copy(update={"seed": 8})})
    one, two = make_setup(config).potential, make_setup(other).potential
    assert not torch.equal(one.representation.embedding.weight, two.representation.embedding.weight)
    assert config == parse_config(raw(frames)), "what was built is no part of it"


def test_shapes_of_labels():
    heads = [{"name": "vector", "per": "atom"}, {"name": "dipole"}, {"name": "spatial_extent"}]
    potential = Potential.from_config({"model": {"name": "equivariant_transformer"}, "properties": heads})
    assert predicted_shapes(potential) == {"vector": "atom_vector", "dipole": "vector", "spatial_extent": "scalar"}
    assert potential.outputs["spatial_extent"] == Output("spatial_extent", "system", (), "Å²")
    latent = Potential.from_config({"model": {"name": "tensornet2", "q_dim": 2}})
    assert predicted_shapes(latent) == {"charges": "atom_scalar"} and latent.outputs == {"charges": CHARGES}
    assert Potential.from_config({"model": {"name": "tensornet2", "q_dim": 0}}).outputs == {}


def evaluated(head, sizes=(3, 2)):
    representation = Plain()
    potential = Potential(representation, ScalarHead(8), properties=[head]).eval()
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pos = torch.arange(3 * len(batch)).reshape(-1, 3).double()
    return potential(System(z=torch.ones_like(batch), pos=pos, batch=batch))


@pytest.mark.parametrize("wrong", [{"per": "system"}, {"shape": (3,)}, {"per": "atom", "shape": (1,)}])
def test_what_is_not_as_declared_is_refused(wrong):
    assert evaluated(Shift(8)).properties["shift"].shape == (5,)
    head = Shift(8)
    for name, value in wrong.items():
        setattr(head, name, value)
    with pytest.raises(ValueError, match="the head Shift declares 'shift' as"):
        evaluated(head)


class Quadrupole(PropertyHead):
    property, shape = "quadrupole", (6,)

    def forward(self, features, graph):
        return pool(features.x[:, :6].double(), graph)


def test_any_shape_can_be_predicted():
    assert evaluated(Quadrupole()).properties["quadrupole"].shape == (2, 6)
    potential = Potential(Plain(), ScalarHead(8), properties=[Quadrupole()])
    assert predicted_shapes(potential) == {}, "no label has this shape"


class Charged(Plain):
    outputs: tuple = ()

    def forward(self, graph):
        features = super().forward(graph)
        features.charges = features.x[:, None, :1].double()
        return features


def test_charges_are_declared():
    system = System(z=torch.ones(2, dtype=torch.long), pos=torch.eye(3)[:2].double())
    model = Charged()
    with pytest.raises(ValueError, match=r"Charged predicts charges that it does not declare: set outputs"):
        Potential(model, ScalarHead(8)).eval()(system)
    model.outputs = (CHARGES,)
    potential = Potential(model, ScalarHead(8)).eval()
    assert potential(system).charges.shape == (2,)
    assert "charges" in TorchMDNet2Calculator(potential).implemented_properties
    plain = Plain()
    plain.outputs = (CHARGES,)
    with pytest.raises(ValueError, match="Plain declares charges but predicts none"):
        Potential(plain, ScalarHead(8)).eval()(system)


def test_names_of_ase_need_no_evaluation(monkeypatch):
    monkeypatch.setattr(Potential, "compute", None)
    dipole = Potential.from_config({"model": {"name": "tensornet"}, "properties": [{"name": "dipole"}]})
    names = TorchMDNet2Calculator(dipole).implemented_properties
    assert "dipole" in names and "charges" not in names


def test_heads_and_representations_that_do_not_fit():
    for part in ({"head": {"name": "equivariant_scalar"}}, {"properties": [{"name": "dipole", "equivariant": True}]}):
        with pytest.raises(ValueError, match="this head needs vector features, which GraphNetwork does not give"):
            Potential.from_config({"model": {"name": "graph_network"}, **part})


def test_predictions_for_single_atoms_are_written_as_declared(tmp_path):
    """One atom in each structure: as many atoms as structures."""
    from torchmdnet2.checkpoint import save

    shift = {"name": "scalar_property", "property": "shift", "per": "atom"}
    gap = {"name": "scalar_property", "property": "gap"}
    model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 0, "num_rbf": 4}
    save(Potential.from_config({"model": model, "properties": [shift, gap], "elements": [1]}), tmp_path / "m.tmn")
    write(tmp_path / "atoms.xyz", [Atoms("H"), Atoms("H")], format="extxyz")
    command = ["evaluate", "m.tmn", "atoms.xyz", "--unlabelled", "--output", "out.xyz", "--devices", "cpu"]
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [warm_python(), "-m", "torchmdnet2", *command], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for atoms in read(tmp_path / "out.xyz", ":"):
        assert atoms.arrays["shift"].shape == (1,) and isinstance(float(atoms.info["gap"]), float)
        assert "shift" not in atoms.info and "gap" not in atoms.arrays
