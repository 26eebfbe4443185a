"""Packed training on labels of heads of properties, and with priors that read the network's charges, against the plain
loop, in float64 on the CPU."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from ase.stress import full_3x3_to_voigt_6_stress

from torchmdnet2.errors import BadConfig
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.potential.graph import sum_over_systems
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state, pack_steps
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.loop import further_labels, pack_part, pack_trainer
from torchmdnet2.training.steps.network import uncapturable_reason
from torchmdnet2.training.steps.packed_frames import Capacity
from torchmdnet2.training.steps.trainer import Hooks

from .conftest import make_frames

KEYS = {
    "energy": "energy",
    "forces": "forces",
    "dipole": "mu",
    "charges": "q",
    "properties": {"gap": "gap", "shift": "shift", "spatial_extent": "r2"},
}
HEADS = [
    {"name": "dipole"},
    {"name": "charges"},
    {"name": "scalar_property", "property": "gap", "scale": "fit", "shift": "fit"},
    {"name": "scalar_property", "property": "shift", "per": "atom"},
    {"name": "spatial_extent", "scale": "fit"},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Molecules, some of them ions; some labels are absent."""
    rng = np.random.default_rng(3)
    frames = make_frames(20)
    for k, atoms in enumerate(frames):
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.positions += 5.0 + k
        atoms.info["charge"] = float(k % 3 - 1)
        charges = rng.normal(0, 0.3, len(atoms))
        charges += (atoms.info["charge"] - charges.sum()) / len(atoms)
        atoms.calc = SinglePointCalculator(atoms, **results)
        atoms.info["mu"], atoms.info["r2"] = rng.normal(size=3), float(rng.random())
        atoms.info["norm"] = float(rng.random())
        atoms.arrays["q"], atoms.arrays["shift"] = charges, rng.random(len(atoms))
        if k % 4:
            atoms.info["gap"] = float(rng.random())
    path = tmp_path_factory.mktemp("packed") / "labelled.xyz"
    write(path, frames, format="extxyz")
    return path


def raw_of(raw_config, file, keys, **parts):
    raw = copy.deepcopy(raw_config)
    raw["data"] = {"train": str(file), "keys": keys, "split": {"validation": 4, "test": 0}}
    raw["training"] |= {"precision": "float64", "max_epochs": 2}
    for name, part in parts.items():
        raw[name] = {**raw.get(name, {}), **part} if isinstance(part, dict) else part
    return raw


def made(raw, packing):
    config = parse_config(raw)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        if packing:
            assert pack_trainer(trainer) is None
    return trainer


def check(raw, rtol=1e-9):
    """Loss and every gradient of the first batch, then fixed steps: weights, metrics of training and validation."""
    plain, fast = made(raw, False), made(raw, True)
    batch = plain.train.batch([0, 3, 1, 5, 2])
    expected = plain.backward(batch)
    work = fast.packed.training
    store = fast.packed.step.store
    work.warm_up(store.batch(torch.tensor([0, 3, 1, 5, 2]), store.size([0, 3, 1, 5, 2])))
    torch.testing.assert_close(work.update.flat[-1], expected, rtol=1e-11, atol=0)
    size = max(float(p.grad.abs().max()) for p in plain.parameters if p.grad is not None)
    for own, other in zip(fast.parameters, plain.parameters, strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(own.grad, wanted, rtol=0, atol=1e-12 * size)
    plain, fast = made(raw, False), made(raw, True)
    for each in (plain, fast):
        each.run(Hooks())
    for a, b in zip(plain.history, fast.history, strict=True):
        assert set(a) == set(b)
        for key in set(a) - {"seconds"}:
            assert b[key] == pytest.approx(a[key], rel=rtol, nan_ok=True), key
    for a, b in zip(plain.average.parameters(), fast.average.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    return plain.history[-1]


def test_properties_beside_energies(raw_config, file):
    loss = {"kinds": {"charges": "l1", "gap": "huber"}, "properties": {"gap": 30.0, "shift": 0}, "dipole": 3.0}
    raw = raw_of(raw_config, file, KEYS, properties=HEADS)
    raw["training"]["loss"] = loss
    row = check(raw)
    assert all(row[f"train_{n}_rmse"] > 0 for n in ("dipole", "charges", "gap", "shift", "spatial_extent", "forces"))


def test_a_schedule_of_their_weights(raw_config, file):
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces", "charges": "q"}, properties=HEADS[1:2])
    raw["training"]["loss"] = {"charges": 0.0, "schedule": {"kind": "step", "start": 1, "charges": 2.0}}
    check(raw)


def test_properties_without_energies(raw_config, file):
    keys = {"energy": None, "forces": None, "properties": {"dipole_norm": "norm", "gap": "gap"}}
    raw = raw_of(raw_config, file, keys, properties=[HEADS[0], HEADS[2]], priors=[])
    raw["head"] = None
    assert "train_energy_rmse" not in check(raw)


TENSORNET2 = {"name": "tensornet2", "q_dim": 3, "num_layers": 2}
COULOMB = {"name": "coulomb", "charges": "predicted", "damping": "exp"}


@pytest.mark.parametrize("labelled", [True, False], ids=["charges", "no charges"])
def test_tensornet2_with_the_coulomb_energy_of_its_charges(raw_config, file, labelled):
    """Its energy and forces depend on the weights: they cannot be taken from the labels, as those of ZBL are."""
    keys = {"energy": "energy", "forces": "forces", **({"charges": "q", "dipole": "mu"} if labelled else {})}
    priors = [{"name": "atomref", "energies": "fit"}, COULOMB, {"name": "zbl", "cutoff": 2.5}]
    properties = HEADS[:1] if labelled else []
    row = check(raw_of(raw_config, file, keys, model=TENSORNET2, priors=priors, properties=properties))
    assert ("train_charges_rmse" in row) == labelled


def test_charges_of_a_head_are_read_by_a_prior(raw_config, file):
    """Two priors that read charges, with lists of different cutoffs; the charges have no labels."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 2.0, "switch_width": 0.5}
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces"}, properties=HEADS[1:2])
    raw["priors"] = [{"name": "atomref", "energies": "fit"}, COULOMB, field]
    check(raw)


def test_the_list_of_a_batch_is_not_searched_again(raw_config, file, monkeypatch):
    """For a prior that ends where the network does, whose energies are subtracted from the labels."""
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces"})
    raw["priors"] = [{"name": "zbl", "cutoff": raw["model"]["cutoff"]}]
    trainer = made(raw, False)
    batch, (zbl,) = trainer.train.batch([0, 1, 2]), trainer.potential.priors
    system = batch.sample.system
    baseline = sum_over_systems(zbl(system, pair_list(system, zbl.cutoff)), system.batch, 3)

    def search(*given):
        raise AssertionError("searched again")

    monkeypatch.setattr("torchmdnet2.neighbors.pairs.pair_list", search)
    part = pack_part(batch, trainer.potential, False, trainer.loss, ())
    expected = batch.sample.labels["energy"] - baseline.detach()
    np.testing.assert_allclose(part.energy, expected.numpy(), rtol=1e-12)
    assert float(baseline.detach().abs().min()) > 1e-3


@pytest.mark.parametrize("method", ["all_pairs", "reaction_field"])
def test_a_head_that_reads_pairs(raw_config, file, method):
    """The Coulomb energy of all latent charges, as TorchMD-Net trains it."""
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces"}, model={**TENSORNET2, "num_layers": 1})
    raw["head"] = {"name": "scalar_coulomb", "q_weights": [1.0] * 6, "method": method}
    if method == "reaction_field":
        raw["head"]["coulomb_cutoff"] = 2.5
    check(raw)
    assert capturable(raw) is None


def test_a_head_that_reads_edges_says_so(raw_config, file):
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces", "charges": "q"}, properties=HEADS[1:2])
    trainer = made(raw, False)
    trainer.potential.properties["charges"].reads_edges = True
    assert pack_trainer(trainer) == "the head ChargesHead, which reads edges"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": {"reduce": "mean"}}, "the head ScalarHead"),
        ({"atom_filter": 1}, "an atom filter"),
        ({"priors": [{"name": "atomref", "trainable": True}]}, "the prior Atomref, which is trained"),
        ({}, r"\d+ GB of frames, and the limit is 0 GB"),
    ],
)
def test_what_cannot_be_captured_is_an_error_where_it_is_asked_for(raw_config, file, monkeypatch, change, words):
    """On a GPU with `cuda_graphs: true`, and on several devices; otherwise a note on a GPU. Here without one."""
    raw = raw_of(raw_config, file, {"energy": "energy", "forces": "forces"}, **change)
    trainer = made(raw, False)
    if "GB" in words:
        monkeypatch.setattr("torchmdnet2.training.steps.loop._CPU_LIMIT", 0)
    with pytest.raises(BadConfig, match=f"several devices cannot be used with {words}; start one process"):
        pack_steps(trainer, SimpleNamespace(size=2))
    monkeypatch.setattr("torchmdnet2.training.steps.loop.find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    for wanted in (True, "auto"):
        trainer.device = torch.device("cuda")
        trainer.config = trainer.config.model_copy(update={"cuda_graphs": wanted})
        if wanted is True:
            with pytest.raises(BadConfig, match=rf"training\.cuda_graphs: cannot be used with {words}; set it to auto"):
                pack_steps(trainer, Devices())
        else:
            assert re.search(f"note: training without CUDA graphs .*{words}", pack_steps(trainer, Devices()))


def test_several_devices_need_captured_steps(raw_config, file):
    trainer = made(raw_of(raw_config, file, {"energy": "energy", "forces": "forces"}), False)
    trainer.config = trainer.config.model_copy(update={"cuda_graphs": False})
    with pytest.raises(BadConfig, match=r"training\.cuda_graphs: several devices need CUDA graphs; set it"):
        pack_steps(trainer, SimpleNamespace(size=2))


@pytest.fixture(scope="module")
def crystals(tmp_path_factory):
    """Small periodic cells of two to four atoms, with stress."""
    rng = np.random.default_rng(5)
    frames = []
    for k in range(12):
        num = 2 + k % 3
        cell = 4.2 * np.eye(3) + rng.normal(0, 0.2, (3, 3))
        corners = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])[:num]
        atoms = Atoms("CHOH"[:num], scaled_positions=corners + rng.normal(0, 0.03, (num, 3)), cell=cell, pbc=True)
        stress = rng.normal(0, 0.01, (3, 3))
        results = {"energy": rng.normal() - 10 * num, "forces": rng.normal(0, 0.5, (num, 3))}
        atoms.calc = SinglePointCalculator(atoms, **results, stress=full_3x3_to_voigt_6_stress(stress + stress.T))
        atoms.info["charge"] = float(k % 2)
        frames.append(atoms)
    path = tmp_path_factory.mktemp("crystals") / "crystals.xyz"
    write(path, frames, format="extxyz")
    return path


@pytest.mark.parametrize("method", ["reaction_field", "ewald"])
def test_stress_of_periodic_frames(raw_config, crystals, method):
    raw = raw_of(raw_config, crystals, {"energy": "energy", "forces": "forces", "stress": "stress"}, model=TENSORNET2)
    raw["priors"] = [{**COULOMB, "damping": "none", "method": method, "cutoff": 5.0}]
    if method == "ewald":
        raw["priors"][0]["accuracy"] = 1e-6
    raw["training"]["loss"] = {"stress": 100.0}
    check(raw)


class Relaunched:
    """In the place of a CUDA graph: launched anew instead of replayed."""

    rooms: ClassVar[list[Capacity]] = []

    def __init__(self, launch):
        self.replay, self.reset = launch, lambda: None

    @classmethod
    def record(cls, launch, device, *, warm_up, memory):
        warm_up()
        cls.rooms.append(launch.args[1])
        return cls(launch)


def test_steps_of_graphs_have_room_for_all_lists(raw_config, file, monkeypatch):
    """What a GPU does: batches with more room than they need, the largest first; eagerly on the CPU."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 2.0, "switch_width": 0.5}
    priors = [{"name": "atomref", "energies": "fit"}, COULOMB, field]
    raw = raw_of(raw_config, file, KEYS, properties=HEADS, priors=priors)
    raw["training"]["max_epochs"] = 1
    plain, padded = made(raw, False), made(raw, True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr("torchmdnet2.training.steps.replay.CudaGraph", Relaunched)
    rounded = lambda needed, step=1.1: needed // 4 * 4 + 4  # noqa: E731
    monkeypatch.setattr("torchmdnet2.training.steps.replay.graph_capacity", rounded)
    monkeypatch.setattr(Relaunched, "rooms", [])
    for each in (padded.packed.step, padded.packed.measure):
        each._cuda = True
    for each in (plain, padded):
        each.run(Hooks())
    graphs = list(padded.packed.step._graphs)
    assert graphs and all(len(capacity.edges) == 2 for capacity in graphs)
    first, *others = Relaunched.rooms[: len(graphs)]
    assert others and set(graphs) == {first, *others} and all(first.joined(capacity) == first for capacity in others)
    for a, b in zip(plain.history, padded.history, strict=True):
        for key in set(a) - {"seconds"}:
            assert b[key] == pytest.approx(a[key], rel=1e-9, nan_ok=True), key
    for a, b in zip(plain.average.parameters(), padded.average.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def capturable(raw):
    trainer = made(raw, False)
    labels = further_labels(trainer.potential, [*trainer.train.batch(range(8)).sample.labels])
    part = pack_part(trainer.train[0], trainer.potential, True, trainer.loss, labels)
    return uncapturable_reason(trainer.potential, part, True, True, labels)


MODELS = ["tensornet", "tensornet2", "equivariant_transformer", "transformer", "graph_network"]


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_all_models_can_be_captured(raw_config, file, name):
    """Nothing in them looks at values on the host, with all heads of properties."""
    raw = raw_of(raw_config, file, KEYS, properties=HEADS, priors=[COULOMB], model={"name": name})
    assert capturable(raw) is None


@pytest.mark.parametrize("aggregation", ["mean", "softmax", "max"])
def test_aggregations_can_be_captured(raw_config, file, aggregation):
    raw = raw_of(raw_config, file, KEYS, properties=HEADS, model={"name": "graph_network", "aggregation": aggregation})
    assert capturable(raw) is None


def test_what_looks_at_values_is_named(raw_config, crystals):
    raw = raw_of(raw_config, crystals, {"energy": "energy", "forces": "forces"}, model=TENSORNET2)
    raw["priors"] = [{**COULOMB, "damping": "none", "method": "ewald", "cutoff": 5.0}]
    assert "no CUDA graph can hold: 'require_all_or_none'" in capturable(raw)
