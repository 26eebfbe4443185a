"""Warnings about unknown structures in md, ASE and stability: once for each run and element; stops only when asked."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from ase.build import molecule
from ase.io import read, write

from torchmdnet2 import System
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig
from torchmdnet2.md import MDOptions, check_stability, run_md
from torchmdnet2.potential import novelty as watch
from torchmdnet2.potential.novelty import NoveltyWarning, UnknownStructure, calibrate


def rattled(count: int, seed: int, stretch: float = 1.0) -> list:
    made = []
    for k in range(count):
        atoms = molecule("H2O")
        atoms.rattle(0.08, seed=1000 * seed + k)
        atoms.set_distance(0, 1, stretch * atoms.get_distance(0, 1), fix=0)
        made.append(atoms)
    return made


@pytest.fixture(scope="module")
def model(potential, tmp_path_factory):
    """A model that knows water molecules."""
    import copy

    own = copy.deepcopy(potential)
    train, validation = (System.from_ase(rattled(count, seed)) for count, seed in ((200, 0), (99, 1)))
    own.calibration = calibrate(own.representation, [train], [validation], 0.01)
    path = tmp_path_factory.mktemp("model") / "c.tmn"
    save(own, path)
    return path


KNOWN, UNKNOWN = molecule("H2O"), rattled(1, 5, stretch=1.7)[0]


def run(model, atoms, folder, **more):
    return run_md(model, atoms, MDOptions(steps=20, timestep=0.1, every=5, output=str(folder / "md"), **more))


def test_md_warns_once_and_goes_on(model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoveltyWarning)
        known = run(model, KNOWN, tmp_path)
    assert known.watch.looks == 2 and known.watch.largest < 1, "the first and the last frame"
    with pytest.warns(NoveltyWarning, match=r"atom \d \([HO]\) of replica \d at 0.000 ps is unlike") as told:
        unknown = run(model, UNKNOWN, tmp_path, replicas=2)
    count = sum(issubclass(warning.category, NoveltyWarning) for warning in told)  # other packages warn of theirs
    assert count == len(unknown.watch.reported) <= 2 and unknown.watch.largest > 1
    assert unknown.rows[-1].step == 20


def test_md_stops_where_it_is_asked_to(model, potential, tmp_path):
    with pytest.warns(NoveltyWarning), pytest.raises(UnknownStructure, match=r"step 0: stopped.*restart continues"):
        run(model, UNKNOWN, tmp_path, stop_if_unknown=True)
    assert len(read(tmp_path / "md.xyz", ":")) == 1 and (tmp_path / "md.restart").exists()
    with pytest.warns(NoveltyWarning):
        again = run(model, UNKNOWN, tmp_path, restart=True)
    assert again.rows[-1].step == 20 and len(read(tmp_path / "md.xyz", ":")) == 5
    assert run(model, KNOWN, tmp_path, stop_if_unknown=True).rows[-1].step == 20
    (tmp_path / "none").mkdir()
    with pytest.raises(BadConfig, match="not calibrated"):
        run(potential, KNOWN, tmp_path / "none", stop_if_unknown=True)
    assert not list((tmp_path / "none").iterdir())


def test_the_command_tells_on_one_line(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("u.xyz", UNKNOWN)
    steps = ["--steps", "5", "--timestep", "0.1"]
    assert main(["md", str(model), "u.xyz", *steps]) == 0
    shown = capsys.readouterr()
    assert "largest novelty" in shown.out and "above 1 in 2 of 2 checked frames" in shown.out
    assert shown.err.count("is unlike the atoms") in (1, 2) and shown.err.startswith("warning: atom ")
    assert main(["md", str(model), "u.xyz", *steps, "--stop-if-unknown"]) == 1
    assert "torchmdnet2 md: step 0: stopped" in capsys.readouterr().err


def test_without_a_calibration_nothing_changes(potential, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(potential, "p.tmn")
    write("u.xyz", UNKNOWN)
    assert main(["md", "p.tmn", "u.xyz", "--steps", "5"]) == 0
    assert "novelty" not in capsys.readouterr().out
    calculator = TorchMDNet2Calculator(potential)
    calculator.calculate(UNKNOWN)
    assert "novelty" not in calculator.results and "novelty" not in calculator.implemented_properties


def test_ase(model, potential):
    calculator = TorchMDNet2Calculator(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoveltyWarning)
        calculator.calculate(KNOWN)
    known = calculator.results["novelty"]
    assert known.shape == (3,) and (known < 1).all()
    expected = calculator.potential.novelty(System.from_ase(UNKNOWN)).numpy()
    assert calculator.get_property("novelty", UNKNOWN) == pytest.approx(expected)
    calculator.get_property("energy", KNOWN)
    assert "novelty" not in calculator.results, "it is not computed at every step"
    assert calculator.get_property("novelty", KNOWN) == pytest.approx(known)
    with pytest.warns(NoveltyWarning) as told:
        fresh = TorchMDNet2Calculator(model)
        fresh.calculate(UNKNOWN)
        for _ in range(3):
            fresh.calculate(KNOWN)
            fresh.calculate(UNKNOWN)
    assert 1 <= len(told) <= 2
    both = CommitteeCalculator([model, model])
    assert "novelty_std" not in both.implemented_properties
    assert both.get_property("novelty", KNOWN) == pytest.approx(known)


def test_ase_looks_now_and_then(model, monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL", 3)
    calculator, looks = TorchMDNet2Calculator(model), []
    for _ in range(7):
        calculator.calculate(KNOWN)
        looks.append("novelty" in calculator.results)
    assert looks == [True, False, False, True, False, False, True]


def test_large_runs_are_not_looked_at(model, tmp_path, monkeypatch):
    from torchmdnet2.md import run as module
    from torchmdnet2.md import stability as replicas

    for place in (replicas, module):
        monkeypatch.setattr(place, "LARGEST", 5)
    assert run(model, KNOWN, tmp_path).watch.looks == 2
    assert run(model, KNOWN, tmp_path, replicas=2).watch.looks == 0
    with pytest.raises(BadConfig, match="6 atoms, and at most 5"):
        run(model, KNOWN, tmp_path, replicas=2, stop_if_unknown=True)
    monkeypatch.setattr(watch, "LARGEST", 2)
    calculator = TorchMDNet2Calculator(model)
    calculator.calculate(KNOWN)
    assert "novelty" not in calculator.results and len(calculator.get_property("novelty", KNOWN)) == 3


def test_stability(model, potential, tmp_path):
    with pytest.warns(NoveltyWarning, match=r"of replica 1 at 0.000 ps and 300 K is unlike"):
        report = check_stability(model, [KNOWN, UNKNOWN], [300], time=0.01, replicas=2, timestep=0.25)
    first, second = report.runs
    assert first.novelty < 1 < second.novelty == report.summaries[0].novelty
    with pytest.warns(NoveltyWarning, match=r"of replica 0 at 0.000 ps and 300 K is unlike"):  # of another process
        two = check_stability(model, [UNKNOWN], [300], time=0.01, replicas=2, timestep=0.25, devices="cpu,cpu")
    assert two.runs[0].novelty == pytest.approx(second.novelty, rel=1e-6)
    report.write(tmp_path / "s")
    assert json.loads((tmp_path / "s.json").read_text())["runs"][1]["novelty"] == second.novelty
    plain = check_stability(potential, [KNOWN], [300], time=0.01, replicas=1, timestep=0.25)
    assert plain.summaries[0].novelty is None
    torch.testing.assert_close(plain.runs[0].mean_temperature, first.mean_temperature)
