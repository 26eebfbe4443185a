"""`torchmdnet2 bench`: it times what it says, stops in time, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, benchmark
from torchmdnet2.benchmark import Timing, standard_potential, time_steps, timed, water_box
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main

ROOT = Path(__file__).resolve().parents[1]
MODEL = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0, "max_z": 16}


def make(elements: list[int]) -> Potential:
    return Potential.from_config({"model": MODEL, "elements": elements}).eval()


@pytest.fixture
def potential():
    return make([1, 8])


def test_a_box_is_water():
    system = water_box(3)
    assert system.num_atoms == 81 and torch.bincount(system.z)[[1, 8]].tolist() == [54, 27]
    grams = 27 * 18.015 / 0.602214  # per mol and Å³ -> g/cm³
    assert grams / float(torch.linalg.det(system.cell[0])) == pytest.approx(1.0, abs=0.01)
    oxygen, hydrogen = system.pos[0::3], system.pos[1::3]
    assert torch.allclose((hydrogen - oxygen).norm(dim=1), torch.tensor(0.9572), atol=1e-4)
    assert torch.equal(water_box(3).pos, system.pos)


def test_the_standard_model_is_always_the_same():
    state = torch.get_rng_state()
    one, other = standard_potential(), standard_potential()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_milliseconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("torchmdnet2.benchmark.time.perf_counter", lambda: clock[0])

    def step():
        clock[0] += 0.01

    found = timed(step, "cpu")
    assert found["ms"] == pytest.approx(10.0) and found["low"] <= found["ms"] <= found["high"]


def test_values_and_files(tmp_path, potential, capsys, drawn):
    save(potential, tmp_path / "m.tmn")
    command = ["bench", tmp_path / "m.tmn", "--sides", "2,1", "--device", "cpu", "--output", tmp_path / "times"]
    assert main([*map(str, command)]) == 0
    out = capsys.readouterr().out
    assert "systems: water in periodic boxes" in out and f"model: {tmp_path / 'm.tmn'}" in out and "memory" not in out
    found = json.loads((tmp_path / "times.json").read_text())
    assert [t["atoms"] for t in found["timings"]] == [3, 24]
    assert all(0 < t["lowest"] <= t["ms"] <= t["highest"] for t in found["timings"])
    for t in found["timings"]:
        assert t["ns_per_day"] == pytest.approx(0.5e-6 * 86400e3 / t["ms"])
    evaluator = Evaluator(potential)
    evaluator(water_box(1))
    assert found["path"].splitlines()[0] == evaluator.report().splitlines()[0]
    assert found["surroundings"]["versions"]["torch"] and "times.json" in out and found["stopped"] == ""


def test_stops_in_time(potential, tmp_path):
    save(potential, tmp_path / "m.tmn")
    seen = []
    found = time_steps(str(tmp_path / "m.tmn"), sides=(2, 1), seconds=0.0, report=seen.append)
    assert [t.atoms for t in found.timings] == [3] == [t.atoms for t in seen]
    assert found.stopped == "24 atoms would exceed the time limit of 0 s"


@pytest.mark.parametrize("part", ["prior", "head"])
def test_boxes_and_droplets_of_models_with_sums_over_all_pairs(tmp_path, capsys, part):
    head = {"name": "scalar_coulomb", "q_weights": [1.0] * 8}
    config = {"model": {**MODEL, "name": "tensornet2", "q_dim": 4}, "head": head, "elements": [1, 8]}
    if part == "prior":
        charges = {"H": 0.4, "O": -0.8}
        priors = [{"name": "coulomb", "charges": charges, "method": "all_pairs"}]
        config = {"model": MODEL, "elements": [1, 8], "priors": priors}
    save(Potential.from_config(config).eval(), tmp_path / "m.tmn")
    for vacuum in (False, True):
        found = time_steps(str(tmp_path / "m.tmn"), sides=(1, 2), vacuum=vacuum)
        assert [t.atoms for t in found.timings] == [3, 24] and found.periodic != vacuum
    assert main(["bench", str(tmp_path / "m.tmn"), "--sides", "1", "--device", "cpu"]) == 0
    assert "systems: water in periodic boxes" in capsys.readouterr().out
    assert main(["bench", str(tmp_path / "m.tmn"), "--sides", "1", "--device", "cpu", "--vacuum"]) == 0
    assert "systems: droplets of water in vacuum" in capsys.readouterr().out


def test_a_precision_without_kernels_is_an_error(capsys):
    assert main(["bench", "organic-small", "--sides", "2", "--device", "cpu", "--precision", "mixed"]) == 1
    assert "--precision mixed: there are kernels for a GPU only" in capsys.readouterr().err


def test_compilation_takes_none_of_the_time(potential, tmp_path, monkeypatch):
    """The first box takes 100 s, a step of 24 atoms 1 s: 81 atoms fit into 60 s, 192 atoms do not."""
    save(potential, tmp_path / "m.tmn")
    clock = [0.0]

    def time_box(evaluator, system):
        clock[0] += 100.0
        return Timing(system.num_atoms, 1e3 * system.num_atoms / 24, 0.0, 0.0, 0.0, None)

    monkeypatch.setattr("torchmdnet2.benchmark.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("torchmdnet2.benchmark._time_box", time_box)
    found = time_steps(str(tmp_path / "m.tmn"), sides=(2, 3, 4), seconds=60.0)
    assert [t.atoms for t in found.timings] == [24, 81]
    assert found.stopped == "192 atoms would exceed the time limit of 60 s"


@pytest.mark.parametrize("sides", ["", "2,x", "0"])
def test_bad_sides(sides, capsys):
    assert main(["bench", "--sides", sides]) == 2
    assert "--sides: must be whole numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seconds", "0"], "--seconds: must be a positive number, got 0"),
        (["--output", "none/times"], "--output: there is no folder none"),
        (["--level", "PBE"], "--level has no effect: no model is given"),
    ],
)
def test_options_of_bench_that_cannot_be(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_model_that_does_not_know_water(tmp_path, capsys):
    save(make([6, 8]), tmp_path / "m.tmn")
    assert main(["bench", str(tmp_path / "m.tmn"), "--sides", "1"]) == 1
    assert "this model does not know H" in capsys.readouterr().err


GRAPHS = {"name": "graph_network", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0}


@pytest.mark.parametrize("sizes", [(2,), (9, 30)])
def test_warm_evaluates_structures_of_these_sizes(tmp_path, sizes, monkeypatch):
    """A molecule, a box and a box with stress, each twice, since the second call captures a graph."""
    save(Potential.from_config({"model": GRAPHS, "elements": [1, 8]}), tmp_path / "m.tmn")
    seen = []

    def called(self, system, stress):
        seen.append((system.num_atoms, bool(system.pbc.all()), stress))
        return call(self, system, stress=stress)

    call = benchmark.Evaluator.__call__
    monkeypatch.setattr(benchmark.Evaluator, "__call__", called)
    assert benchmark.warm(str(tmp_path / "m.tmn"), "cpu", sizes)
    kinds = [(False, False), (True, False), (True, True)]
    assert seen == [(size, *kind) for size in sizes for kind in kinds for _ in range(2)]


def test_warm_says_nothing_of_its_own_structures(tmp_path, recwarn):
    """Their compositions, charges and numbers of electrons are not those of a user."""
    charges = {"name": "coulomb", "charges": {"H": 0.3, "O": -0.4}}
    config = {"model": GRAPHS, "elements": [1, 8], "priors": [charges], "closed_shell": True}
    potential = Potential.from_config({**config, "compositions": [{"1": 2, "8": 1}]})
    save(potential, tmp_path / "m.tmn")
    assert benchmark.warm(str(tmp_path / "m.tmn"), "cpu", (9,))
    assert not [str(warning.message) for warning in recwarn]


FIRST = """
from torchmdnet2 import load
from torchmdnet2.benchmark import water_box

potential = load("organic")
potential(water_box(2).replace(cell=None, pbc=None).to(dtype=float))
potential(water_box(3), stress=True)
"""


@pytest.mark.slow
def test_after_warm_neither_a_molecule_nor_a_box_compiles(tmp_path):
    pytest.importorskip("numba", reason="the kernels of a CPU need it")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    kept = []
    for command in (["-m", "torchmdnet2", "warm", "organic", "--device", "cpu", "--atoms", "22"], ["-c", FIRST]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        kept.append({file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*")})
    assert len(kept[0]) > 20 and kept[1] == kept[0] and not done.stderr
