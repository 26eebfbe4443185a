"""Training on packed frames against the plain loop, on the CPU; tests/gpu has the same with kernels and graphs."""

from __future__ import annotations

import copy
import json
import subprocess
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.io import write
from warm import warm_python

from torchmdnet2 import Potential, System
from torchmdnet2.models.tensornet.training import PairTensorNet
from torchmdnet2.models.tensornet.training_atoms import Mix
from torchmdnet2.models.tensornet.training_radial import Stencil
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.steps import loop
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.network import PackedNetwork
from torchmdnet2.training.steps.packed_frames import Capacity, PackedFrames, Part, pairs_of
from torchmdnet2.training.steps.trainer import Hooks, TrainingDiverged

from .conftest import make_frames

CUTOFF = 4.5
MODELS = ["tensornet", "tensornet2", "equivariant_transformer", "transformer", "graph_network"]


def structures() -> list[System]:
    """Four structures: a molecule, an ion, a small periodic cell with several images of each pair, and an atom."""
    rng = np.random.default_rng(0)
    systems = []
    for num, charge, periodic in ((5, 0.0, False), (3, 1.0, False), (6, 0.0, True), (1, 0.0, False)):
        pos = torch.from_numpy(rng.normal(size=(num, 3)) * 2)
        z = torch.from_numpy(rng.choice([1, 6, 8], num))
        cell = 4 * torch.eye(3, dtype=torch.float64) + 0.3 * torch.from_numpy(rng.normal(size=(3, 3)))
        systems.append(System(z=z, pos=pos, cell=cell if periodic else None, charge=charge))
    return systems


def packed(systems: list[System], device: str = "cpu") -> PackedFrames:
    frames = []
    for system in systems:
        neighbors = neighbor_list(system, CUTOFF)
        num = system.num_atoms
        frames.append(
            Part(
                z=system.z.numpy(),
                batch=system.batch.numpy(),
                charge=system.charge.numpy(),
                volume=system.volume.numpy(),
                neighbors=neighbors,
                vectors=neighbors.vectors(system).numpy(),
                energy=np.zeros(1),
                forces=np.zeros((num, 3)),
                stress=np.zeros((1, 3, 3)),
            )
        )
    return PackedFrames(frames, [1, 6, 8], CUTOFF, torch.device(device), torch.float64, stress=True)


def objective(energy, forces, stress):
    weights = torch.cos(torch.arange(forces.numel(), dtype=forces.dtype, device=forces.device)).view_as(forces)
    return (energy**2).sum() + (forces**2 * weights).sum() + 10 * (stress**2).sum()


@pytest.mark.parametrize(
    ("name", "kernels", "options"),
    [
        *((name, False, {}) for name in MODELS),
        ("tensornet", True, {}),
        ("tensornet", True, {"norm": "log"}),
        ("tensornet", True, {"tensor_norm": "root", "linear_readout": True}),
        ("tensornet", False, {"tensor_norm": "root", "linear_readout": True}),
        ("tensornet", True, {"group": "SO(3)", "activation": "tanh", "trainable_rbf": True}),
        ("tensornet2", True, {"q_dim": 3}),
        ("tensornet2", True, {"exact_charge": False, "group": "SO(3)", "activation": "tanh", "rbf_type": "bessel"}),
        ("tensornet2", True, {"q_dim": 0}),
        *(("graph_network", False, {"aggregation": how}) for how in ("mean", "softmax", "max")),
    ],
)
def test_energies_forces_stress_and_gradients(name, kernels, options):
    """The packed network against the potential, in float64: energies to 1e-12 eV, gradients to 1e-9 of their size."""
    torch.manual_seed(0)
    model = {"name": name, "hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": CUTOFF, **options}
    potential = Potential.from_config({"model": model, "elements": [1, 6, 8]}).double().train()
    for weight in getattr(potential.representation, "linear_readout", ()):  # zero at first
        torch.nn.init.normal_(weight)
    potential.allow_untrained_charge = True  # models that do not use it: here it only has to be the same
    systems, chosen = structures(), [2, 0, 3, 1]
    store = packed(systems)
    need = store.size(chosen)
    capacity = Capacity(5, need.atoms + 4, need.pairs + 9)
    batch = store.batch(torch.tensor([*chosen, -1]), capacity)
    result = PackedNetwork(potential, 3, True, True, use_kernels=kernels)(batch)

    eye = torch.eye(3, dtype=torch.float64)
    ordered = [systems[k] for k in chosen]
    whole = System.concatenate([s if s.pbc.any() else s.replace(cell=s.cell + eye, pbc=s.pbc) for s in ordered])
    potential.allow_untrained_charge = True  # most of these models do not use it
    expected = potential(whole, stress=True, create_graph=True)
    num = whole.num_atoms
    torch.testing.assert_close(result.energy[:4], expected.energy, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.forces[:num], expected.forces, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.stress[:1], expected.stress[:1], rtol=0, atol=1e-13)
    assert result.forces[num:].abs().max() == 0

    parameters = list(potential.parameters())
    found = objective(result.energy[:4], result.forces[:num], result.stress[:1])
    wanted = objective(expected.energy, expected.forces, expected.stress[:1])
    for one, other in zip(
        torch.autograd.grad(found, parameters, allow_unused=True),
        torch.autograd.grad(wanted, parameters, allow_unused=True),
        strict=True,
    ):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_filters_interpolated_between_knots(monkeypatch):
    """As with a filter of each pair: energies to 1e-7 eV, forces to 1e-5 eV/Å, gradients to 1e-5 of theirs."""
    torch.manual_seed(0)
    model = {"name": "tensornet", "hidden_channels": 16, "num_layers": 2, "num_rbf": 8, "cutoff": CUTOFF}
    potential = Potential.from_config({"model": model, "elements": [1, 6, 8]}).double()
    store = packed(structures())
    need = store.size([0, 1, 2, 3])
    batch = store.batch(torch.tensor([0, 1, 2, 3]), need)
    found = []
    for stencil in (None, Stencil(16 * 8 + 1, CUTOFF / (16 * 8))):
        monkeypatch.setattr(PairTensorNet, "_stencil", lambda *_, stencil=stencil: stencil)
        result = PackedNetwork(potential, 3, True, True, use_kernels=False)(batch)
        loss = objective(result.energy, result.forces, result.stress)
        gradients = torch.autograd.grad(loss, list(potential.parameters())[:-1], allow_unused=True)
        found.append((result, [g for g in gradients if g is not None]))
    (fast, of_fast), (plain, of_plain) = found[1], found[0]
    torch.testing.assert_close(fast.energy, plain.energy, rtol=0, atol=1e-7)
    torch.testing.assert_close(fast.forces, plain.forces, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast.stress, plain.stress, rtol=0, atol=1e-6)
    for one, other in zip(of_fast, of_plain, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())
    assert not torch.equal(fast.forces, plain.forces)


def test_where_filters_are_interpolated():
    """In large batches on a GPU in float32, with fixed radial functions that begin at 0."""

    def stencil(pairs: int, dtype: torch.dtype = torch.float32, kernels: bool = True, **model) -> Stencil | None:
        model = {"name": "tensornet", "hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": CUTOFF, **model}
        potential = Potential.from_config({"model": model, "elements": [1, 6, 8]})
        network = object.__new__(PairTensorNet)
        network.model, network.triton = potential.representation, kernels
        return network._stencil(torch.zeros(pairs, 3, dtype=dtype))

    enough = 12 * 16 * 8
    assert stencil(enough) == Stencil(16 * 8 + 1, CUTOFF / (16 * 8))
    float64, on_cpu = stencil(enough, torch.float64), stencil(enough, kernels=False)
    lower, trained = stencil(enough, cutoff_lower=0.5), stencil(enough, trainable_rbf=True)
    assert [stencil(enough - 1), float64, on_cpu, lower, trained] == [None] * 5


def test_forces_compute_no_derivatives_of_weights(monkeypatch):
    """Autograd would ask the forms for them; the loss, differentiated afterwards, does get them."""
    asked: list[str] = []
    partial = Mix.partial
    monkeypatch.setattr(Mix, "partial", lambda *a: (asked.append("x w g".split()[a[1]]), partial(*a))[1])
    model = {"name": "tensornet", "hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": CUTOFF}
    potential = Potential.from_config({"model": model, "elements": [1, 6, 8]}).double()
    store = packed(structures()[:1])
    batch = store.batch(torch.tensor([0]), store.size([0]))
    result = PackedNetwork(potential, 3, True, False, use_kernels=True)(batch)
    assert sorted(asked) == ["g"] * 3 + ["x"] * 3
    torch.autograd.grad(result.forces.square().sum(), list(potential.parameters()), allow_unused=True)
    assert asked.count("w") == 6


def test_one_result_at_a_time(raw_config, monkeypatch):
    """Results hold what their derivatives need: two of them would be twice the memory of a step."""
    alive, most = weakref.WeakSet(), []
    call = PackedNetwork.__call__

    def counted(network, batch):
        result = call(network, batch)
        alive.add(result)
        most.append(len(alive))
        return result

    monkeypatch.setattr(PackedNetwork, "__call__", counted)
    with own_torch_state(parse_config(raw_config)):
        trainer = make_trainer(make_setup(parse_config(raw_config)), None)
    assert pack_trainer(trainer) is None
    for _ in trainer.packed.steps([[0, 1], [2, 3]]):
        pass
    trainer.packed.validate([[0, 1]])
    assert most == [1] * 6


def test_every_edge_has_a_pair_and_its_reverse():
    neighbors = neighbor_list(structures()[2], CUTOFF)
    edges, pair = pairs_of(neighbors)
    receiver, sender = neighbors.edge_index.numpy()
    shift = neighbors.shift.numpy()
    assert 2 * len(edges) == len(pair)
    for e, p in enumerate(pair):
        ahead = edges[p] if p >= 0 else edges[-p - 1]
        sign = 1 if p >= 0 else -1
        ends = (receiver[ahead], sender[ahead])[::sign]
        assert (receiver[e], sender[e]) == ends
        assert (shift[e] == sign * shift[ahead]).all()


def trained(raw, packing: bool, **changes):
    raw = copy.deepcopy(raw)
    raw["training"].update(changes)
    config = parse_config(raw)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        if packing:
            assert pack_trainer(trainer) is None
        trainer.run(Hooks())
    return trainer


SCHEDULED = {"loss": {"energy": 1, "schedule": {"kind": "linear", "start": 0, "forces": 5}}}
MUON = {"optimizer": {"name": "muon"}, "weight_decay": 0.01, "layer_lr_decay": 0.9}


@pytest.mark.parametrize("change", [{}, SCHEDULED, MUON], ids=["plain", "scheduled", "muon"])
def test_training_equals_the_plain_loop(raw_config, change):
    settings = {"device": "cpu", "precision": "float64", "max_epochs": 3, **change}
    plain, fast = (trained(raw_config, packing, **settings) for packing in (False, True))
    for a, b in zip(plain.history, fast.history, strict=True):
        for key in set(a) - {"seconds"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6), key
    for a, b in zip(plain.average.parameters(), fast.average.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_repeated_frames_are_packed_once(raw_config, tmp_path):
    """A source with a share repeats its frames: training is that of the plain loop, with groups in one batch."""
    for name, frames in (("few", make_frames(4)), ("many", make_frames(12)[4:])):
        for k, atoms in enumerate(frames):
            atoms.info["group"] = k // 2 + 10 * len(name)
        write(tmp_path / f"{name}.xyz", frames, format="extxyz")
    few, many = ({"train": str(tmp_path / f"{name}.xyz"), "level": "one"} for name in ("few", "many"))
    raw_config["data"] = {"sources": [{**few, "share": 0.6}, many], "split": {"validation": 0, "test": 0}}
    raw_config["data"]["keys"] = {"group": "group"}
    settings = {"device": "cpu", "precision": "float64", "max_epochs": 2, "batch_size": 4}
    settings["loss"] = {"energy": 1, "forces": 5, "relative_energy": 2}
    plain, fast = (trained(raw_config, packing, **settings) for packing in (False, True))
    assert len(fast.packed.step.store) == 12 < len(fast.train)
    for a, b in zip(plain.average.parameters(), fast.average.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_batches_without_labels_are_steps_of_gradient_zero(raw_config, tmp_path, optimizer):
    frames = make_frames(8)
    for atoms in frames[::2]:
        atoms.calc = None
    write(tmp_path / "partial.xyz", frames, format="extxyz")
    raw_config["data"] = {"train": str(tmp_path / "partial.xyz"), "split": {"validation": 0, "test": 0}}
    settings = {"device": "cpu", "precision": "float64", "batch_size": 1, "optimizer": {"name": optimizer}}
    plain, fast = (trained(raw_config, packing, **settings) for packing in (False, True))
    for a, b in zip(plain.potential.parameters(), fast.potential.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_gives_the_same_bits(raw_config, tmp_path, optimizer):
    raw_config["training"].update(device="cpu", max_epochs=3, optimizer={"name": optimizer})
    config = parse_config(raw_config)
    with own_torch_state(config):
        whole, first, second = (make_trainer(make_setup(config), tmp_path / "state") for _ in range(3))
        for each in (whole, first):
            assert pack_trainer(each) is None
        whole.run(Hooks())
        first.train_epoch(Hooks())
        first.end_epoch(Hooks())
        second.restore(tmp_path / "state")
        assert pack_trainer(second) is None
        second.run(Hooks())
    assert len(second.history) == 3
    for a, b in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(a, b)


def addresses(work) -> list[int]:
    """Where a training step keeps what lives longer than it: what a graph of the step would read and write."""
    states = [value for state in work.optimizer.state.values() for value in state.values()]
    kept = [
        *work.update.parameters,
        *(p.grad for p in work.update.parameters),
        *work.update.average,
        *states,
        work.status,
    ]
    kept += [*(group["lr"] for group in work.optimizer.param_groups), *work._sums.values(), *work._weights.values()]
    return [tensor.data_ptr() for tensor in kept]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("partial", [False, True], ids=["anew", "from a part of the state"])
def test_a_step_keeps_its_tensors_and_reads_its_rates_from_them(raw_config, optimizer, partial):
    """A graph replays a step on the addresses, and with the plain numbers, of the moment of its capture."""
    raw_config["training"].update(device="cpu", optimizer={"name": optimizer}, swa={"start": 0.5}, weight_decay=0.1)
    config = parse_config(raw_config)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        if partial:  # as from a run in which one parameter had no gradient
            trainer.step(next(iter(trainer.train_loader([[0, 1]]))))
            del trainer.optimizer.state[trainer.parameters[0]]
            first = {p: state["step"].clone() for p, state in trainer.optimizer.state.items() if "step" in state}
        assert pack_trainer(trainer) is None
    work, update, groups = trainer.packed.training, trainer.update, len(trainer.optimizer.param_groups)
    if partial:
        assert len(trainer.optimizer.state) == len(trainer.parameters)
        assert all(torch.equal(trainer.optimizer.state[p]["step"], step) for p, step in first.items())
    work.set_rates([1e-3] * groups, 0.5)
    trainer.packed.step([0, 1, 2])
    before = addresses(work)
    for rates, share in (([2e-3] * groups, 0.25), ([0.0] * groups, 0.0)):
        work.set_rates(rates, share)
        weights, average = ([p.detach().clone() for p in part] for part in (update.parameters, update.average))
        trainer.packed.step([3, 4])
        assert addresses(work) == before
        moved = [not torch.equal(p, q) for p, q in zip(update.parameters, weights, strict=True)]
        assert any(moved) == any(rates)
        assert any(not torch.equal(p, q) for p, q in zip(update.average, average, strict=True)) == (share > 0)


def test_priors_are_taken_from_the_labels(raw_config):
    raw_config["priors"] = [{"name": "atomref", "energies": "fit"}, {"name": "zbl", "cutoff": 2.5}]
    settings = {"device": "cpu", "precision": "float64", "max_epochs": 1}
    plain, fast = (trained(raw_config, packing, **settings) for packing in (False, True))
    assert fast.history[0]["train_loss"] == pytest.approx(plain.history[0]["train_loss"], rel=1e-7)


def test_a_step_that_is_not_finite_changes_no_weight_and_names_the_frames(raw_config):
    raw_config["training"].update(device="cpu", precision="float64", max_epochs=1)
    config = parse_config(raw_config)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        assert pack_trainer(trainer) is None
        trainer.packed.step.store._r[0] = float("inf")
        with pytest.raises(TrainingDiverged, match=r"step .* not finite"):
            trainer.train_epoch(Hooks())
            trainer.end_epoch(Hooks())
    assert all(torch.isfinite(p).all() for p in trainer.potential.parameters())


def test_a_step_that_is_not_finite_stops_a_run_at_the_next_check(raw_config):
    """On a GPU steps are looked at every 25, as docs/training.md says; here every third."""
    raw_config["training"].update(device="cpu", precision="float64", max_epochs=1)
    config, losses = parse_config(raw_config), []
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        assert pack_trainer(trainer) is None
        trainer.packed.check_every = 3
        trainer.packed.step.store._r[:] = float("inf")
        with pytest.raises(TrainingDiverged, match="not finite"):
            losses.extend(trainer.packed.steps([[k] for k in range(9)]))
    assert len(losses) == 2
    page = Path(__file__).parents[2] / "docs" / "training.md"
    assert f"stops the run within {loop._CHECK_EVERY} steps" in page.read_text(encoding="utf-8")


def test_what_cannot_be_packed_says_why(raw_config):
    raw_config["training"].update(device="cpu")
    config = parse_config(raw_config)
    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
    trainer.optimizer = torch.optim.SGD(trainer.parameters)
    assert pack_trainer(trainer) == "the optimizer SGD"
    assert trainer.packed is None


def test_training_without_triton_and_numba(raw_config, tmp_path):
    """Kernels are a matter of speed: without the packages that compile them, trainings run as plain PyTorch."""
    raw_config["training"].update(device="cpu", max_epochs=1)
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    code = f"""
import importlib.util, json, sys
real = importlib.util.find_spec
sys.modules["triton"] = sys.modules["numba"] = None
importlib.util.find_spec = lambda name, *a: None if name in ("triton", "numba") else real(name, *a)
import torchmdnet2.cli
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import Hooks
config = parse_config(json.load(open({str(tmp_path / "config.json")!r})))
with own_torch_state(config):
    trainer = make_trainer(make_setup(config), None)
    assert pack_trainer(trainer) is None
    trainer.run(Hooks())
    trainer.device = type("Device", (), {{"type": "cuda"}})
    assert "pip install 'torchmdnet2[gpu]'" in pack_trainer(trainer)
"""
    subprocess.run([warm_python(), "-c", code], check=True)
