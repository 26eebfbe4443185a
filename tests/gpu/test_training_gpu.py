"""Training on a GPU: kernels to the second derivative, and steps replayed from CUDA graphs, against the CPU."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
import torch
from training.batch_gather_cases import assert_same, random_batches, random_frames
from training.conftest import make_frames
from training.loss_kernel_cases import CASES, check
from training.packed_step_cases import CASES as STEPS
from training.packed_step_cases import check_same, outcome
from training.test_packed import CUTOFF, objective, packed, structures
from training.test_packed_properties import COULOMB, HEADS, KEYS, MODELS, file, made, raw_of  # noqa: F401

from torchmdnet2 import Potential
from torchmdnet2.engine.graph import CudaGraph, GraphMemory
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, own_torch_state
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.network import PackedNetwork
from torchmdnet2.training.steps.packed_frames import Capacity
from torchmdnet2.training.steps.trainer import Hooks, TrainingDiverged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("group", ["O(3)", "SO(3)"])
@pytest.mark.parametrize("basis", ["expnorm", "gauss"])
def test_kernels_to_the_second_derivative(group, basis):
    torch.manual_seed(0)
    model = {"name": "tensornet", "hidden_channels": 48, "num_rbf": 12, "cutoff": CUTOFF, "group": group}
    potential = Potential.from_config({"model": {**model, "rbf_type": basis}, "elements": [1, 6, 8]}).double().train()
    chosen = [2, 0, 3, 1]
    found = []
    for device in ("cpu", "cuda"):
        potential = potential.to(device)
        store = packed(structures(), device)
        need = store.size(chosen)
        capacity = Capacity(5, need.atoms + 4, need.pairs + 9)
        batch = store.batch(torch.tensor([*chosen, -1], device=device), capacity)
        result = PackedNetwork(potential, 3, True, True, use_kernels=device == "cuda")(batch)
        target = objective(result.energy[:4], result.forces[: need.atoms], result.stress[:1])
        gradients = torch.autograd.grad(target, list(potential.parameters()), allow_unused=True)
        outputs = [result.energy[:4], result.forces[: need.atoms], result.stress[:1], *gradients]
        found.append([None if t is None else t.detach().cpu() for t in outputs])
    for one, other in zip(*found, strict=True):
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", STEPS)
def test_loss_and_gradients_by_kernels(name):
    check_same(outcome(STEPS[name], "cuda", True, 48), outcome(STEPS[name], "cpu", False, 48))


def raw_for(file, tmp_path, device, name, **parts):  # noqa: F811
    small = {"hidden_channels": 16, "num_layers": 2, "num_rbf": 6, "cutoff": 3.0, "max_z": 10}
    raw = {"model": {**small, "name": name}, "output": {"folder": str(tmp_path / device), "report": False}}
    raw["training"] = {"batch_size": 5, "lr": 2e-3, "warmup_steps": 4, "device": device}
    return raw_of(raw, file, KEYS, properties=HEADS, **parts)


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_of_all_models_with_properties_and_predicted_charges(file, tmp_path, name):  # noqa: F811
    """Energies, forces, all heads of properties, and a prior that reads the charges, against the plain loop in float64.

    The weights of a plain loop on a CPU and of captured steps on a GPU differ by rounding that grows with the steps.
    """
    priors = [{"name": "atomref", "energies": "fit"}, COULOMB, {"name": "zbl", "cutoff": 2.5}]
    plain = made(raw_for(file, tmp_path, "cpu", name, priors=priors), False)
    replayed = made(raw_for(file, tmp_path, "cuda", name, priors=priors), True)
    for each in (plain, replayed):
        each.run(Hooks())
    assert replayed.packed.step.captures > 0
    for a, b in zip(plain.history, replayed.history, strict=True):
        assert set(a) == set(b)
        for key in set(a) - {"seconds"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6, nan_ok=True), key
    for a, b in zip(plain.average.parameters(), replayed.average.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-7)


@pytest.mark.parametrize("aggregation", ["mean", "softmax", "max"])
def test_captured_steps_of_aggregations(file, tmp_path, aggregation):  # noqa: F811
    model = {"aggregation": aggregation}
    plain, replayed = (
        made(raw_for(file, tmp_path, device, "graph_network", model=model), device == "cuda")
        for device in ("cpu", "cuda")
    )
    for each in (plain, replayed):
        each.run(Hooks())
    assert replayed.history[-1]["train_loss"] == pytest.approx(plain.history[-1]["train_loss"], rel=1e-6)


def test_what_looks_at_values_is_not_captured(file, tmp_path):  # noqa: F811
    raw = raw_for(file, tmp_path, "cuda", "tensornet2")
    raw["priors"] = [{**COULOMB, "damping": "none", "method": "ewald", "cutoff": 5.0}]
    assert "'require_all_or_none'" in pack_trainer(made(raw, False))


def test_tensornet2_gives_the_same_bits(file, tmp_path):  # noqa: F811
    runs = [made(raw_for(file, tmp_path, "cuda", "tensornet2", training={"precision": "float32"}), True) for _ in "ab"]
    for each in runs:
        each.run(Hooks())
    for a, b in zip(runs[0].average.parameters(), runs[1].average.parameters(), strict=True):
        assert torch.equal(a, b)


def trainer(tmp_path, device, packing, **changes):
    from ase.io import write

    path = tmp_path / "morse.xyz"
    write(path, make_frames(32), format="extxyz")
    settings = {"batch_size": 5, "max_epochs": 3, "lr": 2e-3, "warmup_steps": 5, "precision": "float64", **changes}
    config = parse_config(
        {
            "data": {"train": str(path), "split": {"validation": 6, "test": 6}},
            "model": {"hidden_channels": 16, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
            "training": {"device": device, **settings},
        }
    )
    with own_torch_state(config):
        made = make_trainer(make_setup(config), tmp_path / f"state-{device}")
        if packing:
            assert pack_trainer(made) is None
    return made


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_replayed_training_equals_the_plain_loop_on_the_cpu(tmp_path, optimizer):
    settings = {"optimizer": {"name": optimizer}}
    plain, replayed = trainer(tmp_path, "cpu", False, **settings), trainer(tmp_path, "cuda", True, **settings)
    for each in (plain, replayed):
        each.run(Hooks())
    assert replayed.packed.step.captures > 0
    for a, b in zip(plain.history, replayed.history, strict=True):
        for key in set(a) - {"seconds"}:
            assert b[key] == pytest.approx(a[key], rel=1e-6), key
    for a, b in zip(plain.average.parameters(), replayed.average.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=1e-7)


def test_the_same_run_gives_the_same_bits(tmp_path):
    runs = [trainer(tmp_path, "cuda", True, precision="float32") for _ in range(2)]
    for each in runs:
        each.run(Hooks())
    for a, b in zip(runs[0].average.parameters(), runs[1].average.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_gives_the_same_bits(tmp_path, optimizer):
    settings = {"precision": "float32", "optimizer": {"name": optimizer}}
    whole = trainer(tmp_path, "cuda", True, **settings)
    whole.run(Hooks())
    first = trainer(tmp_path, "cuda", True, **settings)
    first.train_epoch(Hooks())
    first.end_epoch(Hooks())
    second = trainer(tmp_path, "cuda", False, **settings)
    second.restore(second.state_path)
    assert pack_trainer(second) is None
    second.run(Hooks())
    for a, b in zip(whole.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(a, b)


def test_graphs_share_their_memory():
    """Smaller ones find room in the memory of the largest, and each computes as before."""
    device, total = torch.device("cuda", torch.cuda.current_device()), torch.zeros((), device="cuda")
    sizes, reserved = [2**26, 2**25, 3 * 2**24, 2**24], []

    def work(size):
        x = torch.ones(size, device=device)
        total.copy_((2 * x + x).sum())

    memory, graphs = GraphMemory(device), []
    for size in sizes:
        graphs.append(CudaGraph.record(partial(work, size), device, memory=memory))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[0] + 2**22 < reserved[0] + 4 * sizes[-1]
    for k in (0, 3, 1, 2, 0):
        graphs[k].replay()
        assert total.item() == 3 * sizes[k]


def test_a_step_that_is_not_finite_changes_no_weight(tmp_path):
    made = trainer(tmp_path, "cuda", True)
    made.packed.step.store._r[0] = float("inf")
    with pytest.raises(TrainingDiverged, match="not finite"):
        made.train_epoch(Hooks())
        made.end_epoch(Hooks())
    assert all(torch.isfinite(p).all() for p in made.potential.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stress", [False, True])
def test_one_kernel_gathers_what_pytorch_does(dtype, stress):
    """To the bit, launched and replayed from a graph, with all that is not written seen as NaN."""
    rng = np.random.default_rng(1)
    store = random_frames(rng, dtype, stress, "cuda", largest=60)
    for chosen, capacity in random_batches(rng, store, most=600):
        index = torch.tensor(chosen, device="cuda")
        expected = store.reference_batch(index, capacity)
        torch.use_deterministic_algorithms(True)
        try:
            found = store.kernel_batch(index, capacity)
        finally:
            torch.use_deterministic_algorithms(False)
        assert_same(found, expected)
        assert_same(store.batch(index, capacity), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = store.batch(index, capacity)
        index.copy_(index.flip(0))
        graph.replay()
        assert_same(replayed, store.reference_batch(index, capacity))


@pytest.mark.parametrize("case", CASES)
def test_errors_loss_and_gradients_by_kernels(case):
    check("cuda", **CASES[case])
