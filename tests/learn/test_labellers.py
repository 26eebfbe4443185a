"""Labellers, the processes that run them, and what becomes of frames that cannot be labelled."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ase.build import molecule
from learn_world import MORSE, labelled, water_like
from tiny import tiny_potential

from torchmdnet2 import load
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadConfig, MissingBackend
from torchmdnet2.learn import LABELLERS
from torchmdnet2.learn.config import LabelsConfig
from torchmdnet2.learn.labellers import LabellingFailed, Labels, make_labeller
from torchmdnet2.learn.labelling import _fault, label_frames
from torchmdnet2.learn.selection import labels_of, read_frames
from torchmdnet2.potentials import find_model

MORSE_LABELLER = {"name": "ase", "calculator": "morse", "level_of_theory": "Morse", "arguments": MORSE}

PROGRAM = """
import re, sys, time
number, head, *atoms = open(sys.argv[1]).read().splitlines()
info = dict(re.findall(r"(\\w+)=([\\w.+-]+)", head))
kind = info.get("kind", "good")
if kind == "slow":
    time.sleep(60)
if kind == "fails":
    sys.exit("it does not converge")
if kind == "silent":
    sys.exit(0)
force = float(info.get("charge", 0))
forces = [[force] * 3 for _ in atoms]
if kind == "hot":
    forces[0][0] = 60.0
if kind == "nonfinite":
    forces[0][0] = float("nan")
rows = [" ".join([*atom.split()[:4], *map(str, f)]) for atom, f in zip(atoms, forces)]
if kind == "other":
    rows.reverse()
properties = 'Properties=species:S:1:pos:R:3:forces:R:3 pbc="F F F"'
with open(sys.argv[2], "w") as file:
    print(number, f"{properties} energy={float(number)}", *rows, sep="\\n", file=file)
"""


@pytest.fixture
def command(tmp_path):
    script = tmp_path / "label.py"
    script.write_text(PROGRAM)
    words = [sys.executable, str(script), "{input}", "{output}"]
    return {"name": "command", "command": words, "level_of_theory": "test"}


def run(labeller, frames, folder, **options):
    said = []
    folder.mkdir(exist_ok=True)
    label_frames(frames, folder, LabelsConfig(labeller=labeller, **options), said.append)
    return read_frames(folder / "labelled.xyz"), read_frames(folder / "failed.xyz"), said


def kinds(*names):
    frames = []
    for k, name in enumerate(names):
        atoms = water_like(k)
        atoms.info.update(kind=name, round=3)
        frames.append(atoms)
    return frames


def test_a_calculator_of_ase_in_two_processes(tmp_path):
    frames = [water_like(seed) for seed in range(5)]
    found, failed, said = run(MORSE_LABELLER, frames, tmp_path / "round", processes=2)
    assert not failed and not said and len(found) == 5
    for given, frame in zip(frames, found, strict=True):
        expected = labels_of(labelled(given.copy()))
        np.testing.assert_allclose(frame.positions, given.positions, atol=1e-8)
        assert labels_of(frame).energy == pytest.approx(expected.energy, abs=1e-9)
        np.testing.assert_allclose(labels_of(frame).forces, expected.forces, atol=1e-7)
    assert not list((tmp_path / "round" / "labels").iterdir())


def test_what_fails_is_kept_aside_with_the_reason(tmp_path, command):
    names = ("good", "fails", "silent", "hot", "nonfinite", "other")
    found, failed, said = run(command, kinds(*names), tmp_path / "round", processes=2)
    assert [frame.info["kind"] for frame in found] == ["good"] and found[0].info["round"] == 3
    reasons = {frame.info["kind"]: frame.info["error"] for frame in failed}
    assert reasons["fails"].endswith("ended with exit code 1: it does not converge")
    assert "wrote no file output.xyz" in reasons["silent"]
    assert reasons["hot"].startswith("a force of 60.0 eV/Å (labels.max_force: 50)")
    assert reasons["nonfinite"] == "energy or forces are not finite"
    assert "in this order" in reasons["other"]
    assert len(said) == len(failed) == 5 and any("frame 1 was not labelled" in line for line in said)
    assert (tmp_path / "round" / "labels" / "0001" / "stderr.txt").read_text().strip() == "it does not converge"


def test_relative_folders_and_programs(tmp_path, monkeypatch, command):
    """The program runs in the folder of its frame, not where paths of the configuration start."""
    monkeypatch.chdir(tmp_path)
    os.symlink(command["command"].pop(0), "program")
    found, failed, _ = run({**command, "command": ["./program", *command["command"]]}, kinds("good"), Path("round"))
    assert len(found) == 1 and not failed


def test_a_calculation_that_hangs_is_ended_with_its_program(tmp_path, command):
    since = time.monotonic()
    found, failed, _ = run(command, kinds("slow"), tmp_path / "round", timeout=2.0)
    assert time.monotonic() - since < 50
    assert [frame.info["error"] for frame in failed] == ["no result after 2 s"] and not found


def test_a_process_that_dies_costs_its_frame(tmp_path):
    script = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    labeller = {
        "name": "command", "command": [sys.executable, "-c", script, "{output}"], "level_of_theory": "x",
    }  # fmt: skip
    found, failed, _ = run(labeller, kinds("good", "good"), tmp_path / "round")
    assert not found and {f.info["error"] for f in failed} == {"the process ended with exit code -9"}


def test_labels_are_not_computed_twice(tmp_path):
    frames = [water_like(seed) for seed in range(3)]
    folder = tmp_path / "round"
    folder.mkdir()
    rows = [{"frame": 1, "energy": 5.0, "forces": np.ones((3, 3)).tolist()}, {"frame": 2, "error": "why"}]
    (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"frame": 0, "ener')
    found, failed, _ = run(MORSE_LABELLER, frames, folder)
    assert labels_of(found[1]).energy == 5.0 and labels_of(found[0]).energy != 5.0
    assert [frame.info["error"] for frame in failed] == ["why"]
    assert len((folder / "labels.jsonl").read_text().splitlines()) == 3


def test_charge_and_spin(tmp_path, command):
    atoms = water_like(0)
    atoms.info.update(charge=2)
    found, _, _ = run(command, [atoms], tmp_path / "round")
    assert labels_of(found[0]).forces[0, 0] == 2.0
    with pytest.raises(LabellingFailed, match=r"charge of 2; set .*charge_argument"):
        make_labeller(MORSE_LABELLER)(atoms, tmp_path)


def test_a_teacher(tmp_path):
    atoms = molecule("CH3CH2OH")
    potential = tiny_potential()
    save(potential, tmp_path / "teacher.tmn", {"data": {"level_of_theory": "PBE0"}})
    teacher = make_labeller({"name": "teacher", "file": str(tmp_path / "teacher.tmn")})
    teacher.check()
    assert teacher.level_of_theory == "PBE0" and teacher.files == (str(tmp_path / "teacher.tmn"),)
    from torchmdnet2 import System

    expected = potential(System.from_ase(atoms))
    labels = teacher(atoms, tmp_path)
    assert labels.energy == pytest.approx(float(expected.energy), abs=1e-9)
    np.testing.assert_allclose(labels.forces, expected.forces.numpy(), atol=1e-9)


def test_a_teacher_by_name():
    teacher = make_labeller({"name": "teacher", "file": "organic-small"})
    assert teacher.level_of_theory == load("organic-small").level_of_theory
    assert teacher.files == (str(find_model("organic-small")),)
    with pytest.raises(FileNotFoundError, match="did you mean 'organic'"):
        make_labeller({"name": "teacher", "file": "organik"})


def test_what_is_missing_is_said_before_anything_is_computed(tmp_path, monkeypatch):
    with pytest.raises(MissingBackend, match="no program no_such_program"):
        make_labeller({"name": "command", "command": ["no_such_program", "{output}"], "level_of_theory": "x"}).check()
    with pytest.raises(BadConfig, match="ASE has no 'morsse', did you mean 'morse'"):
        make_labeller({**MORSE_LABELLER, "calculator": "morsse"})
    with pytest.raises(BadConfig, match="cannot be made of these arguments"):
        make_labeller({"name": "ase", "calculator": "tersoff", "level_of_theory": "x"}).check()
    monkeypatch.setitem(sys.modules, "asap3", None)
    with pytest.raises(MissingBackend, match=r"the calculator asap cannot be used: .*asap3"):
        make_labeller({"name": "ase", "calculator": "asap", "level_of_theory": "x"}).check()
    with pytest.raises(FileNotFoundError):
        make_labeller({"name": "teacher", "file": str(tmp_path / "none.tmn")})


def test_forces_of_other_atoms_and_a_missing_package(monkeypatch):
    assert _fault(Labels(0.0, np.zeros((2, 3))), 3, None) == "the forces have the shape [2, 3], but there are 3 atoms"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingBackend, match=r"GFN2-xTB needs tblite: pip install tblite"):
        make_labeller({"name": "gfn2-xtb"}).check()


def test_gfn2_xtb(tmp_path):
    """Against the labels of the quickstart, which were made with it."""
    pytest.importorskip("tblite")
    from ase.io import read

    frame = read(Path(__file__).resolve().parents[2] / "examples" / "data" / "ethanol_gfn2.xyz", 0)
    found, _, _ = run({"name": "gfn2-xtb"}, [frame], tmp_path / "round")
    assert labels_of(found[0]).energy == pytest.approx(frame.get_potential_energy(), abs=1e-5)
    np.testing.assert_allclose(labels_of(found[0]).forces, frame.get_forces(), atol=1e-3)


def test_plug_ins_register_labellers(monkeypatch):
    monkeypatch.setattr(LABELLERS, "_classes", dict(LABELLERS._classes))

    @LABELLERS.register("mine")
    class Mine:
        """Mine.

        Args:
            depth: eV.
        """

        def __init__(self, depth: float = 1.0):
            self.depth = depth

    assert make_labeller({"name": "mine", "depth": 2.0}).depth == 2.0
    assert LabelsConfig(labeller={"name": "mine"}).labeller == {"name": "mine", "depth": 1.0}
    assert SimpleNamespace(**LabelsConfig().labeller).name == "gfn2-xtb"
