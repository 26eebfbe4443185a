"""Which replicas break, when and why; and that the others do not notice."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read, write
from rich.console import Console
from tiny import tiny_potential

from torchmdnet2 import System
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.cli.md import _print
from torchmdnet2.errors import BadConfig, BadData, StructureWarning
from torchmdnet2.md import ReplicaOutcome, StabilityReport, Unphysical, check_stability
from torchmdnet2.md import stability as replicas
from torchmdnet2.md.guard import Bonds
from torchmdnet2.md.integrators import HostEngine
from torchmdnet2.md.options import MDOptions
from torchmdnet2.md.stability import ReplicaBatch, ReplicaRun, run_replicas

H2 = Atoms("H2", [[0, 0, 0], [0, 0, 0.74]])
OH = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]])


class Morse:
    """In place of a bound step: diatomic molecules, H2 with a bond of 4.7 eV, OH with one of 0.02 eV.

    Args:
        scale: of all forces.
        hole: Å; a longer bond of OH has a NaN for energy.
        spread: and so have all the others.
        drop: eV, by which the energy of H2 with a bond longer than 0.745 Å is too low; its forces do not tell.
    """

    compiled = False

    def __init__(self, system, scale, hole, spread, drop):
        self.pos, self.hole, self.spread, self.drop = system.pos.clone(), hole, spread, drop
        self.strong = (system.z.view(-1, 2) == 1).all(1)
        self.depth, self.length = scale * torch.where(self.strong, 4.7, 0.02), torch.where(self.strong, 0.74, 0.97)
        self.energy, self.forces = torch.zeros(len(self.strong), dtype=torch.float64), torch.zeros_like(self.pos)
        self.full = False
        self.replay()

    def replay(self):
        vector = self.pos[1::2] - self.pos[::2]
        r = vector.norm(dim=1)
        decay = torch.exp(-1.9 * (r - self.length))
        bad = ~self.strong & (r > self.hole) | r.isnan()
        if bool(bad.any()) and self.spread:
            bad[:] = True
        self.energy.copy_(self.depth * (1 - decay) ** 2 - self.drop * (self.strong & (r > 0.745)))
        self.energy.masked_fill_(bad, math.nan)
        slope = (3.8 * self.depth * (1 - decay) * decay / r).masked_fill(bad, math.nan)
        self.forces[::2] = slope[:, None] * vector
        self.forces[1::2] = -self.forces[::2]

    def check(self):
        full, self.full = self.full, False
        return not full


@pytest.fixture
def bonded(monkeypatch):
    """Every engine of a check gets a Morse step; what is returned sets its arguments."""
    options = SimpleNamespace(scale=1.0, hole=math.inf, spread=False, drop=0.0, engine=HostEngine)

    def make(potential, system, dynamics, interval):
        return options.engine(Morse(system, options.scale, options.hole, options.spread, options.drop), dynamics)

    monkeypatch.setattr(replicas, "make_engine", make)
    return options


def survivors(report):
    return [run.replica for run in report.runs if run.whole]


def test_a_strong_bond_survives(potential, bonded):
    report = check_stability(potential, [H2], (300, 600), time=0.1, replicas=3, seed=5)
    assert report.survived and not report.frames and report.time == pytest.approx(0.1)
    assert [run.seed for run in report.runs] == [5, 6, 7] * 2
    cold, hot = report.summaries
    assert (cold.temperature, cold.replicas, cold.survivors) == (300, 3, 3)
    assert cold.first_break is cold.median_break is None and cold.transfers == cold.jumps == hot.jumps == 0
    assert 0.01 < cold.deviation < hot.deviation < 0.5
    assert 0 < cold.mean_temperature < hot.mean_temperature < 1200


def test_a_jump_of_the_conserved_energy_is_told(potential, bonded):
    """A hole that is not deep enough to break a replica."""
    bonded.drop = 0.2
    report = check_stability(potential, [H2], [600], time=0.1, replicas=3)
    assert report.survived and report.summaries[0].jumps == 3
    assert all(0 < run.jumped_at <= 0.1 for run in report.runs)


def test_atoms_nearer_than_any_bond_at_the_start_are_warned_of(potential, bonded):
    """In a model without a repulsive prior, which may attract them."""
    near = Atoms("H2", [[0, 0, 0], [0, 0, 0.49]])
    with pytest.warns(StructureWarning, match=r"frame 1: atom 0 \(H\) and .* this model has no repulsive prior"):
        check_stability(potential, [H2, near], [1], time=0.01, replicas=2)


def test_a_weak_bond_breaks(potential, bonded):
    """The frames before the break are kept, without labels that would be the model's own."""
    labelled = OH.copy()
    labelled.info.update(charge=0, energy=3.0)
    report = check_stability(potential, [labelled], [600], time=0.3, replicas=3)
    assert not survivors(report)
    (summary,) = report.summaries
    times = sorted(run.broken_at for run in report.runs)
    assert summary.first_break == times[0] > 0 and summary.median_break == times[1]
    for run in report.runs:
        assert "bond of atom 0 (O) and atom 1 (H)" in run.reason and "usually 0.97" in run.reason
        assert 0 < run.deviation < 0.5
        assert run.broken_at * 100 == pytest.approx(round(run.broken_at * 100))  # looked at every 10 fs
        assert 1 <= len(run.frames) <= 5
        before = [run.broken_at - frame.info["time_ps"] for frame in run.frames]
        np.testing.assert_allclose(before, 0.01 * np.arange(len(before), 0, -1), atol=1e-9)
        for frame in run.frames:
            assert abs(frame.get_distance(0, 1) - 0.97) <= run.deviation + 1e-12
            assert frame.calc is None and "energy" not in frame.info and frame.info["charge"] == 0
    alone = check_stability(potential, [OH], [600], time=0.3, replicas=1, seed=1).runs[0]
    assert (alone.broken_at, alone.reason) == (report.runs[1].broken_at, report.runs[1].reason)


def run(potential, frames, seed=0):
    """A batch after 0.1 ps at 600 K, and its runs."""
    options = MDOptions(200, 0.5, "nvt", 600.0, replicas=len(frames), seed=seed)
    runs = [ReplicaRun(k, k, atoms, Bonds(System.from_ase(atoms)), options) for k, atoms in enumerate(frames)]
    batch = ReplicaBatch(potential, runs, lambda step: None)
    batch.run()
    return batch, [run.result for run in runs]


@pytest.mark.parametrize(("hole", "spread", "ahead"), [(math.inf, False, 1), (1.2, False, 0), (1.2, True, 1)])
def test_a_broken_replica_leaves_the_others_alone(potential, bonded, host, hole, spread, ahead):
    """To the last bit here (a network rounds differently in a batch of another size); also when all become NaN."""
    bonded.engine, bonded.hole, bonded.spread = type("Engine", (host,), {"ahead": ahead}), hole, spread
    frames = [H2, OH, H2, OH]
    batch, results = run(potential, frames, seed=4)
    assert [result.whole for result in results] == [True, False, True, False]
    if hole < math.inf:
        assert {results[1].reason, results[3].reason} == {"energy or forces are not finite"}
        for b in (1, 3):
            assert 1.0 < results[b].frames[-1].get_distance(0, 1) < hole
            *looks, last = [round(2000 * frame.info["time_ps"]) for frame in results[b].frames]
            assert last == round(2000 * results[b].broken_at) - 1  # the last good one
            assert looks and looks == list(range(looks[0] - looks[0] % 20, last, 20))
    assert batch.state.step == 200
    for place, k in enumerate((0, 2)):
        alone, _ = run(potential, [H2], seed=4 + k)
        own = slice(2 * place, 2 * place + 2)
        for name in ("pos", "vel", "forces"):
            found, expected = getattr(batch.state, name)[own], getattr(alone.state, name)
            assert torch.equal(found, expected)
    first, second = batch.state.pos.view(2, 2, 3)
    assert float((first - second).abs().max()) > 1e-3


def test_too_little_room_is_no_break(potential, bonded, monkeypatch):
    """Engines give NaN where a neighbor list had no room, and have more of it from then on: steps are repeated."""
    expected, _ = run(potential, [H2, H2])
    advance, short = HostEngine.advance, []

    def wrong(self, steps):
        advance(self, steps)
        if self._state.step in (60, 47) and self._state.step not in short:
            short.append(self._state.step)
            self._state.forces.fill_(math.nan)
            self.step.full = True

    monkeypatch.setattr(HostEngine, "advance", wrong)
    batch, results = run(potential, [H2, H2])
    assert short == [60, 47] and all(result.whole for result in results)
    assert torch.equal(batch.state.pos, expected.state.pos)


def test_an_explosion_is_told_by_the_guard(potential, bonded):
    """A start that the model finds impossible is broken from the beginning."""
    bonded.scale = 10.0
    near = Atoms("H2", [[0, 0, 0], [0, 0, 0.32]])
    report = check_stability(potential, [near, H2], [300], time=0.02, replicas=2)
    assert survivors(report) == [1]
    run = report.runs[0]
    assert run.broken_at == 0 and "force" in run.reason and "replica" not in run.reason
    assert len(run.frames) == 1 and np.array_equal(run.frames[0].positions, near.positions)
    with pytest.raises(Unphysical, match=r"frame 1: atom 0 \(H\) and atom 1 \(H\) are 0.200 Å apart"):
        check_stability(potential, [H2, Atoms("H2", [[0, 0, 0], [0, 0, 0.2]])], [300], replicas=2)


def test_a_start_that_is_not_finite(potential, bonded):
    bonded.hole, bonded.spread = 1.0, True
    report = check_stability(potential, [OH, Atoms("OH", [[0, 0, 0], [0, 0, 1.1]]), H2], [1], time=0.01, replicas=3)
    assert survivors(report) == [0, 2]
    assert (report.runs[1].broken_at, report.runs[1].reason) == (0, "energy or forces are not finite")


def test_batches_of_limited_size(potential, bonded, monkeypatch):
    """Many replicas run a part after the other, with the same outcomes."""
    frames = [H2, OH, H2, OH, H2]
    together = check_stability(potential, frames, [300], time=0.1, replicas=5, seed=4)
    sizes = []
    begin = ReplicaBatch.__init__
    monkeypatch.setattr(
        ReplicaBatch, "__init__", lambda self, p, runs, *more: sizes.append(len(runs)) or begin(self, p, runs, *more)
    )
    monkeypatch.setattr("torchmdnet2.md.stability._LARGEST_BATCH", 5)
    parts = check_stability(potential, frames, [300], time=0.1, replicas=5, seed=4)
    assert sizes == [2, 2, 1] and survivors(parts) == survivors(together) == [0, 2, 4]
    for one, other in zip(parts.runs, together.runs, strict=True):
        assert (one.seed, one.broken_at, one.mean_temperature) == (other.seed, other.broken_at, other.mean_temperature)


@pytest.mark.parametrize(
    ("temperatures", "devices", "sizes"),
    [
        (1, 1, [8, 3]), (1, 2, [4, 4, 2, 1]), (2, 2, [8, 3, 8, 3]), (2, 4, [4, 4, 2, 1] * 2),
        (2, 3, [3, 3, 2, 1, 1, 1] * 2), (1, 16, [1] * 11),
    ],
)  # fmt: skip
def test_batches_occupy_all_devices(temperatures, devices, sizes):
    """And are no smaller: a step of a small batch takes nearly as long as one of a large batch."""
    water, bonds = molecule("H2O"), Bonds(System.from_ase(H2))
    runs = [
        ReplicaRun(k, 0, H2 if k < 8 else water, bonds, MDOptions(1, 0.5, "nvt", 300.0 + t, replicas=11))
        for t in range(temperatures)
        for k in range(11)
    ]
    batches = replicas._batches(runs, devices)
    assert [len(batch) for batch in batches] == sizes and [run for batch in batches for run in batch] == runs


def test_two_processes_find_what_one_does(tmp_path, monkeypatch):
    """Also replicas that break; the model is found where a process has another folder."""
    save(tiny_potential(energy_scale=0.01), tmp_path / "tiny.tmn")
    monkeypatch.chdir(tmp_path)
    frames, found = [molecule("CH3OH"), molecule("H2O"), H2, molecule("H2O")], []
    for devices in ("cpu", "cpu,cpu"):
        console = Console(file=io.StringIO(), width=300)
        arguments = {"temperatures": [1, 30000], "time": 0.02, "replicas": 7, "seed": 3}
        report = check_stability("tiny.tmn", frames, devices=devices, console=console, **arguments)
        found.append((report, console.file.getvalue().splitlines()))
    (one, told), (two, told_too) = found
    assert sorted(told) == sorted(told_too) and len(told) == len(one.runs) - len(survivors(one)) > 3
    assert survivors(one) == survivors(two) and 0 < len(survivors(one))
    for a, b in zip(one.runs, two.runs, strict=True):
        assert (a.replica, a.frame, a.temperature, a.seed) == (b.replica, b.frame, b.temperature, b.seed)
        assert (a.broken_at, a.transfers, len(a.frames)) == (b.broken_at, b.transfers, len(b.frames))
        assert a.mean_temperature == pytest.approx(b.mean_temperature, rel=1e-6)
        assert a.deviation == pytest.approx(b.deviation, abs=1e-6)
        for x, y in zip(a.frames, b.frames, strict=True):
            np.testing.assert_allclose(x.positions, y.positions, atol=1e-6)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_what_is_found_so_far_is_saved(tmp_path, monkeypatch, devices):
    monkeypatch.setattr(replicas, "_SAVE_S", 0)
    model, saved = tmp_path / "tiny.tmn", []
    save(tiny_potential(energy_scale=0.01), model)
    arguments = {"temperatures": [1, 30000], "time": 0.03, "replicas": 4, "seed": 3, "devices": devices}
    report = check_stability(model, [H2], save=lambda found: saved.append(found.to_dict()), **arguments)
    assert len(saved) > (4 if devices == "cpu" else 1)
    names = [(run.temperature, run.replica) for run in report.runs]
    for before, after in pairwise(saved):
        assert before["time"] == report.time
        assert [(run["temperature"], run["replica"]) for run in before["runs"]] == names
        assert all(a["followed"] <= b["followed"] for a, b in zip(before["runs"], after["runs"], strict=True))
    assert any(0 < sum(run["followed"] for run in found["runs"]) < 0.9 * 8 * report.time for found in saved)
    assert saved[-1] == report.to_dict() and 0 < len(survivors(report)) < 8
    for run in report.runs:
        assert run.followed == pytest.approx(report.time) if run.whole else run.followed < run.broken_at


def test_all_outcomes_of_a_batch_are_saved_at_once(tmp_path, monkeypatch):
    """The clock passes a minute with each batch of two processes, and not between its replicas."""
    model, saved, times = tmp_path / "tiny.tmn", [], iter([0.0, *(100.0 * (k // 2) for k in range(2, 40))])
    monkeypatch.setattr(replicas, "clock", lambda: next(times))
    save(tiny_potential(), model)
    arguments = {"temperatures": [1, 2], "time": 0.01, "replicas": 3, "devices": "cpu,cpu"}
    check_stability(model, [H2], save=lambda found: saved.append(found.to_dict()), **arguments)
    ended = [[run["followed"] > 0 for run in found["runs"]] for found in saved]
    assert ended == [[True] * 3 + [False] * 3, [True] * 6]


def test_an_unfinished_check_has_files_of_its_own(model_file, bonded, tmp_path, capsys, monkeypatch):
    """They are left when it is killed, replaced by the next check and removed at its end."""
    monkeypatch.setattr(replicas, "_SAVE_S", 0)
    write(tmp_path / "oh.xyz", [OH])
    arguments = [model_file, tmp_path / "oh.xyz", "--temperatures", "600", "--replicas", 1, "--output", tmp_path / "a"]
    assert stability(capsys, *arguments, "--time", 0.2)[0] == 0
    files = [tmp_path / "a.json", tmp_path / "a_broken.xyz"]
    assert sorted(tmp_path.glob("a*")) == files
    before, unfinished = [path.read_bytes() for path in files], tmp_path / "a_unfinished.json"

    def killed(report, prefix, keep=True):
        real(report, prefix, keep)
        if report.frames:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        real = StabilityReport.write
        patch.setattr(StabilityReport, "write", killed)
        stability(capsys, *arguments, "--time", 0.3)
    assert [path.read_bytes() for path in files] == before
    (run,) = json.loads(unfinished.read_text())["runs"]
    assert 0 < run["followed"] < run["broken_at"] and read(tmp_path / "a_unfinished_broken.xyz", ":")
    assert stability(capsys, *arguments, "--time", 0.01)[0] == 0
    assert sorted(tmp_path.glob("a*")) == [files[0], tmp_path / "a.json.old", tmp_path / "a_broken.xyz.old"]


def test_a_save_that_fails_does_not_end_the_check(model_file, bonded, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(replicas, "_SAVE_S", 0)
    write(tmp_path / "oh.xyz", [OH])
    (tmp_path / "a_unfinished.json").mkdir()
    arguments = [model_file, tmp_path / "oh.xyz", "--temperatures", "1", "--replicas", 1, "--output", tmp_path / "a"]
    code, out, _ = stability(capsys, *arguments, "--time", 0.02)
    assert code == 0 and "was not saved" in out and (tmp_path / "a.json").exists()


def test_the_status_has_a_part_for_each_temperature(potential):
    runs = [
        ReplicaRun(k, 0, H2, Bonds(System.from_ase(H2)), MDOptions(2000, 0.5, "nvt", t, replicas=4))
        for t in (300.0, 600.0)
        for k in range(4)
    ]
    status = replicas._Progress(None, [runs[:2], runs[2:4], runs[4:]])
    assert str(status.__rich__()) == ""
    replicas._record(status.reached, 0, 500, 2)
    assert status.__rich__() == "300 K: 0.12 of 1 ps, 4 of 4 whole"
    replicas._record(status.reached, 1, 1500, 1)
    replicas._record(status.reached, 2, 0, 4)
    assert status.__rich__() == "300 K: 0.50 of 1 ps, 3 of 4 whole; 600 K: 0.00 of 1 ps, 4 of 4 whole"
    for number in (0, 1):
        replicas._record(status.reached, number, 2000, 1)
    assert status.__rich__() == "600 K: 0.00 of 1 ps, 4 of 4 whole"


class Dying(ReplicaRun):
    def potential(self, model):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_an_error_with_a_remedy():
    options = MDOptions(10, 0.5, "nvt", 300.0, replicas=2)
    runs = [Dying(k, 0, H2, Bonds(System.from_ase(H2)), options) for k in range(2)]
    with pytest.raises(RuntimeError, match=r"ended from outside.*; take fewer replicas or fewer devices"):
        list(run_replicas(runs, str, ["cpu", "cpu"], None))


def test_a_seed_for_each_of_many_replicas():
    options = MDOptions(steps=1, temperature=300, seed=7, replicas=10**9)
    assert options.seeds[10**9 - 1] == 10**9 + 6  # not a list


def test_starts_are_spread_and_may_differ(potential):
    """Structures of several sizes and compositions, periodic or not."""
    pair = Atoms("H4", [[0, 0, 0], [0, 0, 0.74], [0, 9, 0], [0, 9, 0.74]])
    cell = Atoms("H2", [[0, 0, 0.2], [0, 0, 7.46]], cell=[8, 8, 8], pbc=True)
    frames = [pair, H2, H2, OH, OH, cell]
    report = check_stability(potential, frames, [300], time=0.003, replicas=4)
    assert [run.frame for run in report.runs] == [0, 1, 3, 4]
    assert [run.formula for run in report.runs] == ["H4", "H2", "HO", "HO"]
    report = check_stability(potential, [cell, pair], [300], time=0.003, replicas=4)
    assert [run.frame for run in report.runs] == [0, 0, 1, 1] and report.survived
    assert all(run.deviation < 0.3 for run in report.runs)


# --- files and the command ---------------------------------------------------------------------------------------


def test_summary():
    def fate(broken_at, **more):
        return ReplicaOutcome(0, 0, "H2", 300.0, 0, broken_at, mean_temperature=290.0, **more)

    report = StabilityReport([fate(0.3), fate(None, transfers=2), fate(0.1, deviation=0.4), fate(0.2)], 1.0)
    (summary,) = report.summaries
    assert (summary.first_break, summary.median_break) == (0.1, 0.2)
    assert (summary.survivors, summary.transfers, summary.deviation) == (1, 2, 0.4)
    report.runs[0].broken_at = None
    assert report.summaries[0].median_break == 0.2  # two of four
    report.runs[3].broken_at = None
    assert report.summaries[0].median_break is None and report.summaries[0].first_break == 0.1


def stability(capsys, *arguments):
    code = main(["stability", *map(str, arguments), "--devices", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(model_file, bonded, tmp_path, capsys):
    frames, prefix = tmp_path / "oh.xyz", tmp_path / "out" / "check"
    write(frames, [OH] * 3)
    arguments = [model_file, frames, "--time", 0.2, "--replicas", 2, "--output", prefix]
    code, out, _ = stability(capsys, *arguments, "--temperatures", "1,600", "--fail")
    assert code == 1 and "600 K, replica 1: broken at 0." in out and "the bond of" in out
    assert "wrote " in out and "check_broken.xyz" in out
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    cold, hot = found["temperatures"]
    assert (cold["survivors"], cold["first_break"], hot["survivors"], hot["replicas"]) == (2, None, 0, 2)
    assert [(r["temperature"], r["replica"], r["frame"]) for r in found["runs"]] == [
        (1, 0, 0), (1, 1, 1), (600, 0, 0), (600, 1, 1)
    ]  # fmt: skip
    assert found["runs"][0]["broken_at"] is None and found["runs"][2]["broken_at"] >= hot["first_break"]
    broken = read(tmp_path / "out" / "check_broken.xyz", ":")
    assert {(f.info["temperature_K"], f.info["replica"]) for f in broken} == {(600, 0), (600, 1)}
    for frame in broken:
        run = found["runs"][2 + frame.info["replica"]]
        assert frame.info["reason"] == run["reason"] and frame.info["broken_at_ps"] == run["broken_at"]
        assert frame.info["time_ps"] < run["broken_at"] and frame.calc is None
    code, out, _ = stability(capsys, *arguments, "--temperatures", "1", "--fail", "--time", 0.01)
    assert code == 0 and not (tmp_path / "out" / "check_broken.xyz").exists()
    code, out, _ = stability(capsys, *arguments, "--temperatures", "600")
    assert code == 0 and "jumps" not in out
    write(frames, [H2] * 3)
    bonded.drop = 0.2
    _, out, _ = stability(capsys, *arguments, "--temperatures", "600")
    assert "jumps" in out


def test_heads_of_the_table_are_whole_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = ReplicaOutcome(0, 0, "HO", 1000.0, 0, jumped_at=3.0, mean_temperature=1000.0, novelty=0.5)
    _print(StabilityReport([run], 1000.0), "title")
    out = capsys.readouterr().out
    assert "…" not in out and "jumps" in out
    assert {"replicas", "whole", "median", "protons", "novelty"} <= set(out.replace("┃", " ").split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--temperatures", "300,hot"], 2, "--temperatures: must be numbers"),
        (["--temperatures", "300,-5"], 2, "temperature: must be a positive number, got -5"),
        (["--time", "0"], 2, "time: must be at least one timestep"),
        (["--timestep", "0"], 2, "time"),
        (["--replicas", "0"], 2, "replicas: must be a whole number, at least 1"),
        (["--output", "frames_in"], 2, "is read by this command and would be written too"),
    ],
)
def test_mistakes(model_file, tmp_path, monkeypatch, capsys, more, code, words):
    monkeypatch.chdir(tmp_path)
    write("frames_in_broken.xyz", molecule("H2O"))
    before = (tmp_path / "frames_in_broken.xyz").read_bytes()
    got, _, err = stability(capsys, model_file, "frames_in_broken.xyz", *more)
    assert got == code and words in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["frames_in_broken.xyz"]
    assert (tmp_path / "frames_in_broken.xyz").read_bytes() == before


def test_unusable_frames(model_file, tmp_path, monkeypatch, capsys, potential):
    monkeypatch.chdir(tmp_path)
    write("methane.xyz", molecule("CH4"))
    (tmp_path / "empty.xyz").write_text("")
    for name, words in (("methane.xyz", "H, O"), ("empty.xyz", "empty.xyz"), ("none.xyz", "no such file")):
        code, _, err = stability(capsys, model_file, name)
        assert code == 1 and words in err and err.count("\n") == 1
    with pytest.raises(BadData, match="no frames"):
        check_stability(potential, [])
    with pytest.raises(BadConfig, match="at least one"):
        check_stability(potential, [H2], [])
