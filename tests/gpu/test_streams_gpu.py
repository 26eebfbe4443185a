"""relax and score on GPUs: what a CPU finds, from padded batches of one size. Without a GPU: tests/streams."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.io import write
from learn.learn_world import labelled, raw_config, water_like
from streams.rattled import rattled

import torchmdnet2
from torchmdnet2.engine.graph import CudaGraph
from torchmdnet2.evaluator import Evaluator
from torchmdnet2.learn import parse_learn_config, run_learning
from torchmdnet2.learn.loop import _train
from torchmdnet2.md import check_stability
from torchmdnet2.streams import relaxing
from torchmdnet2.streams.batches import BatchCapacity, BatchOptions
from torchmdnet2.streams.lbfgs import BatchedLBFGS
from torchmdnet2.streams.records import Record
from torchmdnet2.streams.relaxing import Relaxer, RelaxOptions, _Batch
from torchmdnet2.streams.scoring import Scorer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def records():
    """Small molecules, each fifth one broken: unknown element, open shell, overlap."""
    starts = [atoms.copy() for atoms in rattled() * 4]
    for k, break_it in enumerate([
        lambda a: a.numbers.__setitem__(0, 92), lambda a: a.info.update(charge=1),
        lambda a: a.positions.__setitem__(1, a.positions[0]),
    ]):  # fmt: skip
        break_it(starts[5 * k + 2])
    return starts


@pytest.fixture(scope="module")
def models():
    """float64 on the CPU, as stored on the GPU."""
    reference = torchmdnet2.load("organic-small", dtype=torch.float64)
    return reference, torchmdnet2.load("organic-small", device="cuda")


@pytest.mark.parametrize("kind", [Relaxer, Scorer])
def test_results_are_those_of_a_cpu(models, kind):
    if kind is Relaxer:
        options = RelaxOptions(fmax=0.005, atoms=96)  # slots are filled again
    else:
        options = BatchOptions(atoms=96)
    workers = [kind(potential, options) for potential in models]
    found = [worker([Record(k, starts=[a.copy()]) for k, a in enumerate(records())]) for worker in workers]
    assert workers[1].evaluator.fused
    for k, (one, two) in enumerate(zip(*found, strict=True)):
        assert one.errors == two.errors and bool(one.errors) == (k in (2, 7, 12))
        for a, b in zip(one.structures, two.structures, strict=True):
            assert abs(a.info["energy"] - b.info["energy"]) < 2e-4
            assert abs(a.info["novelty"] - b.info["novelty"]) < 0.05
            if kind is Relaxer:
                assert b.info["converged"] and b.info["largest_force"] <= 0.005
            else:
                assert abs(a.arrays["forces"] - b.arrays["forces"]).max() < 2e-3


def test_the_optimizer_is_captured_once_for_each_size(models, monkeypatch):
    """Its graph serves all structures of later batches and blocks."""
    graphs = []
    record = CudaGraph.record
    monkeypatch.setattr(
        relaxing.CudaGraph, "record", lambda *a, **k: (graphs.append(a), record(*a, **k))[1]
    )  # fmt: skip
    relaxer = Relaxer(models[1], RelaxOptions(fmax=0.005, atoms=96))
    for _ in range(2):
        relaxer([Record(k, starts=[atoms.copy()]) for k, atoms in enumerate(rattled() * 4)])
        sizes = [launch for launch, *_ in graphs if getattr(launch, "__name__", "") == "_advance"]
        assert len(sizes) == 1


def test_one_captured_step_serves_all_batches(models, monkeypatch):
    """After the first blocks, blocks of other structures record no graph."""
    worker = Scorer(models[1], BatchOptions(atoms=96))
    worker([Record(k, starts=[a]) for k, a in enumerate(rattled(["CH3CH2OH"] * 8 + ["H2O", "CO2"] * 6))])
    taken: list[object] = []
    before = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "capture_begin", lambda *a, **k: (taken.append(a), before(*a, **k))[1]
    )  # fmt: skip
    worker([Record(k, starts=[a]) for k, a in enumerate(rattled(["CH3CH2OH", "C2H4", "CH3OH"]) * 6)])
    assert not taken


def test_the_optimizer_is_captured_and_the_last_take_smaller_batches(models, monkeypatch):
    """The minima are those of steps that are launched one by one, in batches of one size."""
    starts, shapes = rattled(["CH3CH2OH", "C6H6", "CH3OH"] * 40), set()
    bind = Evaluator.bind
    monkeypatch.setattr(
        Evaluator, "bind", lambda self, system, *a, **k: (shapes.add(len(system.z)), bind(self, system, *a, **k))[1]
    )  # fmt: skip

    def energies():
        outcomes = Relaxer(models[1], RelaxOptions(fmax=0.005, atoms=4096))(
            [Record(k, starts=[atoms.copy()]) for k, atoms in enumerate(starts)]
        )  # fmt: skip
        return torch.tensor([outcome.structures[0].info["energy"] for outcome in outcomes])

    captured = energies()
    assert shapes == {4096, 1024}
    monkeypatch.setattr(_Batch, "_captured", lambda self: self._advance)
    monkeypatch.setattr(BatchCapacity, "smallest", lambda self, *sizes: self)
    torch.testing.assert_close(captured, energies(), rtol=0, atol=2e-4)


def test_optimizer_takes_the_steps_of_a_cpu():
    torch.manual_seed(0)
    batch, wells = torch.tensor([0] * 5 + [1] * 9), torch.randn(14, 3).double() * 2
    radii, curvature = np.array([0.0] * 5 + [0.7] * 9), torch.logspace(0, 2, 42).double().view(14, 3)
    places = []
    for device in ("cpu", "cuda"):
        b, w, c = (value.to(device) for value in (batch, wells, curvature))
        pos, optimizer = w + 0.5, BatchedLBFGS(torch.device(device))
        optimizer.take(np.array([5, 9]), np.full(2, -1), pos, radii)
        for _ in range(20):
            energy = torch.zeros(2, device=device).double().index_add(0, b, (c * (pos - w) ** 2 / 2).sum(1))
            pos = optimizer.advance(pos, -c * (pos - w), energy)
        places.append(pos.cpu())
    torch.testing.assert_close(*places, rtol=0, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("run", [torchmdnet2.score, torchmdnet2.relax])
def test_two_gpus_keep_the_order(run):
    starts = [copy.deepcopy(molecule("H2O")) if k % 3 else molecule("CH4") for k in range(40)]
    found = [run("organic-small", starts, devices=names, block=4) for names in ("cuda:0", "all")]
    for one, two in zip(*found, strict=True):
        assert abs(one.structures[0].info["energy"] - two.structures[0].info["energy"]) < 2e-4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_share_replicas():
    frames = rattled(["CH3CH2OH", "H2O", "C2H4"])
    options = {"temperatures": [300], "time": 0.05, "replicas": 9, "seed": 2}
    one, two = (check_stability("organic-small", frames, devices=d, **options).runs for d in ("cuda:0", "all"))
    assert [(a.replica, a.frame, a.whole) for a in one] == [(k, k // 3, True) for k in range(9)]
    for a, b in zip(one, two, strict=True):
        assert (a.replica, a.frame, a.whole) == (b.replica, b.frame, b.whole)
        assert a.mean_temperature == pytest.approx(b.mean_temperature, rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_learn_trains_a_member_on_the_second_gpu(tmp_path):
    write(tmp_path / "morse.xyz", [labelled(water_like(seed)) for seed in range(8)])
    raw = raw_config(tmp_path / "morse.xyz", tmp_path / "learn")
    del raw["train"]["training"]["device"]
    config = parse_learn_config({**raw, "devices": "cuda:0,cuda:1"})
    data = {"train": str(tmp_path / "morse.xyz"), "split": {"validation": 0.25, "test": 0}}
    training = config.training(True, data, tmp_path / "member", 0)
    before = torch.cuda.memory_stats(0).get("allocation.all.allocated", 0)
    _train("cuda:1", training)
    assert torch.cuda.memory_stats(1)["allocation.all.allocated"] > 0
    assert torch.cuda.memory_stats(0).get("allocation.all.allocated", 0) == before and torch.cuda.current_device() == 0
    assert run_learning(config).rounds
