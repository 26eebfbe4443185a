"""run_md as a whole: energies against ASE, files, exact restarts, refusals."""

from __future__ import annotations

import copy
import io
import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixBondLength
from ase.io import read, write
from ase.md.verlet import VelocityVerlet
from rich.console import Console

from torchmdnet2 import Potential
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.engine.bound import ReferenceBoundStep
from torchmdnet2.errors import BadCheckpoint, BadConfig, BadData
from torchmdnet2.md import MDOptions, Unphysical, run_md
from torchmdnet2.md.integrators import HostEngine
from torchmdnet2.md.output import Drift, TableRow
from torchmdnet2.md.run import Simulation
from torchmdnet2.md.setup import repartition
from torchmdnet2.md.trajectory import Recorder


def options(tmp_path, steps=20, name="run", **more):
    return MDOptions(steps=steps, output=str(tmp_path / name), **more)


# --- physics -----------------------------------------------------------------------------------------------------


def test_same_trajectory_as_ase(potential, water, tmp_path):
    """Positions, velocities, energies after 20 steps of ASE's velocity Verlet from the same start."""
    result = run_md(potential, water, options(tmp_path, every=1, seed=3))
    frames = read(tmp_path / "run.xyz", ":")
    assert len(frames) == 21 and [f.info["step"] for f in frames] == list(range(21))
    atoms = frames[0].copy()
    atoms.set_masses(water.get_masses())
    run_md(potential, water, options(tmp_path, steps=0, name="first.traj", seed=3))
    atoms.set_momenta(read(tmp_path / "first.traj").get_momenta())  # all digits
    atoms.calc = TorchMDNet2Calculator(potential)
    VelocityVerlet(atoms, 0.5 * units.fs).run(20)
    np.testing.assert_allclose(result.atoms.positions, atoms.positions, atol=1e-7)  # ASE has the constants of 2014
    np.testing.assert_allclose(result.atoms.get_momenta(), atoms.get_momenta(), atol=1e-6)
    assert result.rows[-1].potential_eV == pytest.approx(atoms.get_potential_energy(), abs=1e-8)
    assert result.rows[-1].kinetic_eV == pytest.approx(atoms.get_kinetic_energy(), abs=1e-6)
    assert np.abs(result.atoms.positions - water.positions).max() > 0.05


def test_energy_is_conserved_and_second_order(potential, water, tmp_path):
    spread = []
    for k, timestep in enumerate((0.5, 0.25)):
        o = options(tmp_path, steps=int(30 / timestep), name=str(k), timestep=timestep, every=1, temperature=200)
        result = run_md(potential, water, o)
        spread.append(np.std([row.conserved_eV for row in result.rows]))
        assert np.ptp([row.potential_eV for row in result.rows]) > 20 * spread[-1]  # there is something to conserve
    assert math.log2(spread[0] / spread[1]) == pytest.approx(2, abs=0.3)


def test_no_momentum_and_the_temperature_asked_for(potential, tmp_path):
    atoms = Atoms("H200", [[4 * x, 4 * y, 4 * z] for x, y, z in itertools.product(range(5), range(5), range(8))])
    result = run_md(potential, atoms, options(tmp_path, steps=1, temperature=500))
    assert result.rows[0].temperature_K == pytest.approx(500, rel=0.15)
    assert np.abs(result.atoms.get_momenta().sum(0)).max() < 1e-9


def test_langevin_reaches_the_bath(potential, water, tmp_path):
    o = options(tmp_path, steps=200, timestep=1.0, ensemble="nvt", friction=200.0, temperature=150, every=2)
    result = run_md(potential, water, o)
    assert np.mean([row.temperature_K for row in result.rows[20:]]) == pytest.approx(150, rel=0.4)
    assert np.ptp([r.conserved_eV for r in result.rows]) < 0.1 * np.ptp([r.kinetic_eV for r in result.rows])


def test_periodic_triclinic(potential, tmp_path):
    atoms = molecule("H2O", cell=[[4, 0, 0], [1, 4, 0], [0, 1, 4]], pbc=True)
    result = run_md(potential, atoms, options(tmp_path))
    final = result.atoms
    energy, forces = final.get_potential_energy(), final.get_forces()
    final.calc = TorchMDNet2Calculator(potential)
    assert final.pbc.all() and final.get_potential_energy() == pytest.approx(energy, abs=1e-10)
    np.testing.assert_allclose(final.get_forces(), forces, atol=1e-10)


def test_charge_enters_and_is_kept(potential, water, tmp_path):
    plain = run_md(potential, water, options(tmp_path, steps=2))
    charged = run_md(potential, water, options(tmp_path, steps=2), charge=1)
    water.info["charge"] = 1
    same = run_md(potential, water, options(tmp_path, steps=2))
    assert charged.rows == same.rows != plain.rows
    assert read(tmp_path / "run.xyz").info["charge"] == 1


def test_fixed_atoms(potential, water, tmp_path):
    water.set_constraint(FixAtoms([0]))
    result = run_md(potential, water, options(tmp_path))
    assert np.array_equal(result.atoms.positions[0], water.positions[0])
    assert not np.array_equal(result.atoms.positions[1], water.positions[1])
    water.set_constraint(FixBondLength(0, 1))
    with pytest.raises(BadData, match="FixBondLength"):
        run_md(potential, water, options(tmp_path))


def test_velocities_of_the_start_structure(potential, water, tmp_path):
    momenta = np.array([[0.1, 0, 0], [-0.1, 0.2, 0], [0, -0.2, 0]])
    water.set_momenta(momenta)
    run_md(potential, water, options(tmp_path, steps=0))
    np.testing.assert_allclose(read(tmp_path / "run.xyz").get_momenta(), momenta, atol=1e-8)
    run_md(potential, water, options(tmp_path, steps=0, temperature=300))
    assert not np.allclose(read(tmp_path / "run.xyz").get_momenta(), momenta, atol=1e-3)


def test_minimize(potential, water, tmp_path):
    before = water.copy()
    result = run_md(potential, water, options(tmp_path, steps=0, minimize=True, temperature=0))
    assert np.linalg.norm(result.atoms.get_forces(), axis=1).max() < 0.05
    assert water == before


def test_seed_decides(potential, water, tmp_path):
    rows = [
        run_md(potential, water, options(tmp_path, ensemble="nvt", seed=seed)).rows[-1].conserved_eV
        for seed in (1, 1, 2)
    ]
    assert rows[0] == rows[1] != rows[2]


def test_constant_pressure(potential, tmp_path):
    """Frames have the cell, and the model's energy, forces and stress in it; a dilute gas presses with N kT/V."""
    atoms = Atoms("H27", [[4 * x, 4 * y, 4 * z] for x, y, z in itertools.product(range(3), repeat=3)], pbc=True)
    atoms.set_cell([[12, 0, 0], [1, 12, 0], [0, 1, 12]])
    paths = tuple(str(tmp_path / name) for name in ("run.xyz", "run.traj"))
    o = options(tmp_path, 60, ensemble="npt", pressure=3000, barostat_time=0.02, every=20, trajectories=paths)
    result = run_md(potential, atoms, o)
    volumes = [row.volume_A3 for row in result.rows]
    assert volumes[0] == pytest.approx(12**3) and volumes[-1] < 0.97 * volumes[0]
    first = result.rows[0]
    assert first.density_g_cm3 == pytest.approx(27 * 1.008 / 0.602214 / 12**3, rel=1e-5)
    stress = read(paths[1], "0").get_stress()[:3].mean() / units.bar
    assert first.pressure_bar + stress == pytest.approx(2 / 3 * first.kinetic_eV / 12**3 / units.bar, rel=1e-6)
    table = np.genfromtxt(tmp_path / "run.csv", delimiter=",", names=True)
    assert table["pressure_bar"].tolist() == [row.pressure_bar for row in result.rows]
    for frame, other, volume in zip(read(paths[1], ":"), read(paths[0], ":"), volumes, strict=True):
        assert frame.get_volume() == pytest.approx(volume)
        np.testing.assert_allclose(other.cell, frame.cell, atol=1e-6)
        energy, stress = frame.get_potential_energy(), frame.get_stress()
        frame.calc = TorchMDNet2Calculator(potential)
        assert frame.get_potential_energy() == pytest.approx(energy, abs=1e-10)
        np.testing.assert_allclose(frame.get_stress(), stress, atol=1e-10)


def test_a_restart_takes_the_cell_of_its_file(model_file, tmp_path):
    """Also when it is given its own trajectory, whose last frame has another cell than the first."""
    atoms = molecule("H2O", cell=[4.5, 5, 5], pbc=True)
    atoms.set_momenta([[0.0, 0.0, 0.0]] * 3)
    for name in ("once", "twice"):
        whole = options(tmp_path, 20, name, ensemble="npt", barostat_time=0.05, every=5, hydrogen_mass=2.0)
        parts = [whole] if name == "once" else [replace(whole, steps=10), replace(whole, restart=True)]
        for part in parts:
            start = read(tmp_path / "twice.xyz") if part.restart else atoms
            run_md(model_file, start, part)
    assert (tmp_path / "once.csv").read_bytes() == (tmp_path / "twice.csv").read_bytes()
    assert not np.allclose(read(tmp_path / "once.xyz").cell, atoms.cell, rtol=1e-3)


def test_a_cell_that_collapses_is_told(potential, tmp_path):
    atoms = Atoms("H8", [[9 * x, 9 * y, 9 * z] for x, y, z in itertools.product(range(2), repeat=3)], pbc=True)
    atoms.set_cell([18, 18, 18])
    o = options(tmp_path, 400, ensemble="npt", pressure=1e4, barostat_time=0.02, barostat_compressibility=1e-2)
    with pytest.raises(Unphysical, match=r"the volume of the cell is \d+ Å³ and was 5\.83e\+03 Å³|overlap"):
        run_md(potential, atoms, o)


def test_heavy_hydrogens(potential, tmp_path):
    """Total mass and velocities stay, bonds over cell faces count, frames say the masses."""
    atoms = molecule("H2O", cell=[6, 6, 6], pbc=True)
    atoms.positions += 0.1
    atoms.set_velocities(np.ones((3, 3)) * 0.01 * np.arange(-1, 2)[:, None])
    atoms.wrap()
    start = atoms.copy()
    result = run_md(potential, atoms, options(tmp_path, 0, hydrogen_mass=3.0))
    assert atoms == start
    masses = result.atoms.get_masses()
    assert masses[1:].tolist() == [3.0, 3.0] and masses.sum() == pytest.approx(start.get_masses().sum())
    assert read(tmp_path / "run.xyz").get_masses() == pytest.approx(masses)
    methane = molecule("CH4")
    repartition(methane, 3.0)
    assert methane.get_masses() == pytest.approx([12.011 - 4 * 1.992, 3, 3, 3, 3])
    given, found = start.get_velocities(), result.atoms.get_velocities()
    np.testing.assert_allclose(found - found[0], given - given[0], atol=1e-9)  # seen from another centre of mass


# --- files -------------------------------------------------------------------------------------------------------


def test_files(potential, water, tmp_path, drawn):
    # labels of the start must not be copied into later frames
    water.calc = SinglePointCalculator(water, energy=-999.0)
    water.info["energy_label"] = -999.0
    water.arrays["their_forces"] = np.ones((3, 3))
    both = (str(tmp_path / "a" / "t.traj"), str(tmp_path / "a" / "t.extxyz"))
    result = run_md(potential, water, options(tmp_path, steps=25, every=10, trajectories=both))
    names = {"t.traj", "t.extxyz", "run.csv", "run.png", "run.restart"}
    assert {f.name for f in result.files} == names and all(f.stat().st_size > 100 for f in result.files)
    traj, xyz = (read(path, ":") for path in both)
    assert [f.info["step"] for f in traj] == [f.info["step"] for f in xyz] == [0, 10, 20, 25]
    for a, b in zip(traj, xyz, strict=True):
        np.testing.assert_allclose(a.positions, b.positions, atol=1e-7)
        assert a.get_potential_energy() == pytest.approx(b.get_potential_energy(), abs=1e-7)
        assert "their_forces" not in b.arrays and "energy_label" not in b.info
    table = np.genfromtxt(tmp_path / "run.csv", delimiter=",", names=True)
    assert table["conserved_eV"].tolist() == [row.conserved_eV for row in result.rows]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("output, found", [("x/", "x/md.xyz"), ("x/y", "x/y.xyz"), ("x/y.traj", "x/y.traj")])
def test_output_as_folder_prefix_or_file(potential, water, tmp_path, output, found):
    run_md(potential, water, MDOptions(steps=1, seed=3, output=f"{tmp_path}/{output}"))
    frames = read(tmp_path / found, ":")
    assert [frame.info["step"] for frame in frames] == [0, 1]
    np.testing.assert_allclose(frames[0].positions, water.positions, atol=1e-7)
    assert 1e-4 < abs(frames[1].positions - water.positions).max() < 0.1  # Å, of one step
    folder = (tmp_path / found).parent
    stem, suffixes = Path(found).stem, {Path(found).suffix, ".csv", ".png", ".restart"}
    assert {file.name for file in folder.iterdir()} == {stem + suffix for suffix in suffixes}


def test_an_old_trajectory_is_kept_aside(potential, water, tmp_path):
    run_md(potential, water, options(tmp_path, steps=1))
    first = (tmp_path / "run.xyz").read_bytes()
    run_md(potential, water, options(tmp_path, steps=1, seed=9))
    assert (tmp_path / "run.xyz.old").read_bytes() == first != (tmp_path / "run.xyz").read_bytes()


def test_progress_lines(potential, water, tmp_path):
    text = io.StringIO()
    run_md(potential, water, options(tmp_path, steps=50, every=5), console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert len(lines) == 10 and all("ns/day" in s and "drift" in s and " K " in s and "left" in s for s in lines)
    assert "step        50/50" in lines[-1]
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=200)
    run_md(potential, water, options(tmp_path, steps=50, every=5), console=terminal)
    assert "ns/day" in text.getvalue() and "50/50" in text.getvalue()


def test_drift_is_the_linear_fit():
    rng = np.random.default_rng(0)
    time, energy = np.arange(500) * 0.01, rng.normal(size=500) - 1e6
    fit = Drift(4)
    for k in range(500):
        fit.add(TableRow(k, time[k], 0, 0, 0, energy[k]))
    assert fit.slope == pytest.approx(np.polyfit(time, energy, 1)[0] / 4, rel=1e-6)


@pytest.mark.parametrize("ahead", [0, 1])
def test_want_of_room_is_mended(potential, water, tmp_path, monkeypatch, ahead):
    """A step without room for its edges gives NaN until it is enlarged: nothing of that is left in the run."""
    whole = run_md(potential, water, options(tmp_path, 60, "whole", every=10))
    room, count = [0], itertools.count()
    replay, check = ReferenceBoundStep.replay, ReferenceBoundStep.check

    def too_small(self):
        replay(self)
        if next(count) > 17 + 23 * room[0]:
            self.energy.fill_(math.nan)
            self.forces.fill_(math.nan)

    def enlarge(self):
        check(self)
        room[0] += 1
        return False

    monkeypatch.setattr(ReferenceBoundStep, "replay", too_small)
    monkeypatch.setattr(ReferenceBoundStep, "check", lambda self: enlarge(self) if room[0] < 6 else check(self))
    monkeypatch.setattr(HostEngine, "ahead", ahead)
    mended = run_md(potential, water, options(tmp_path, 60, "mended", every=10))
    assert room[0] >= 3 and mended.rows == whole.rows
    assert (tmp_path / "mended.xyz").read_bytes() == (tmp_path / "whole.xyz").read_bytes()


@pytest.mark.parametrize("interval", [1, 7, 25])
def test_what_is_recorded_does_not_change_the_run(potential, water, tmp_path, monkeypatch, interval):
    """Blocks of any length, looked at late: the same bits."""
    whole = run_md(potential, water, options(tmp_path, 40, every=40, ensemble="nvt"))
    monkeypatch.setattr(HostEngine, "ahead", 1)
    other = run_md(potential, water, options(tmp_path, 40, every=interval, ensemble="nvt"))
    assert other.rows[-1] == whole.rows[-1] and np.array_equal(other.atoms.positions, whole.atoms.positions)
    assert [row.step for row in other.rows] == sorted({*range(0, 41, interval), 40})


def test_without_matplotlib(potential, water, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = io.StringIO()
    result = run_md(potential, water, options(tmp_path, 10), console=Console(file=text, width=200))
    assert "no plots: matplotlib" in text.getvalue() and not (tmp_path / "run.png").exists()
    assert {p.suffix for p in result.files} == {".xyz", ".csv", ".restart"}


# --- restarts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ensemble", "more"),
    [
        ("nve", {}),
        ("nvt", {"remove_drift": 4}),
        ("npt", {"barostat": "flexible", "barostat_time": 0.05}),
        ("npt", {"inner_steps": 2, "hydrogen_mass": 2.0}),
        ("nve", {"inner_steps": 2}),
    ],
)
def test_restart_is_bitwise(model_file, water, tmp_path, host, ensemble, more):
    water.cell, water.pbc = [4.5, 5, 5], ensemble == "npt"
    for name, parts in (("once", [20]), ("twice", [10, 20])):
        for k, steps in enumerate(parts):
            paths = tuple(str(tmp_path / f"{name}.{kind}") for kind in ("traj", "xyz"))
            o = options(tmp_path, steps, name, ensemble=ensemble, every=5, restart=k > 0, trajectories=paths, **more)
            run_md(model_file, water, o, inner=model_file if "inner_steps" in more else None)
    for kind in ("csv", "xyz"):
        assert (tmp_path / f"once.{kind}").read_bytes() == (tmp_path / f"twice.{kind}").read_bytes()
    once, twice = (read(tmp_path / f"{name}.traj", ":") for name in ("once", "twice"))
    assert len(once) == len(twice) == 5
    for a, b in zip(once, twice, strict=True):
        assert np.array_equal(a.positions, b.positions) and np.array_equal(a.get_momenta(), b.get_momenta())
        assert np.array_equal(a.cell.array, b.cell.array)
    assert np.array_equal(once[0].cell.array, once[-1].cell.array) == (ensemble != "npt")
    one, two = ((tmp_path / f"{n}.restart").read_bytes().replace(b"twice", b"once") for n in ("once", "twice"))
    assert one[-200:] == two[-200:]


def test_restart_after_the_process_died(model_file, water, tmp_path, monkeypatch):
    """Frames and rows written after the restart file are cut off, and made again."""
    run_md(model_file, water, options(tmp_path, 60, "whole", every=5, ensemble="nvt"))

    class Killed(BaseException):
        pass

    record, save_now = Recorder.add, Simulation._save
    monkeypatch.setattr(Simulation, "_save", lambda self: save_now(self) if self.state.step <= 30 else None)

    def die(self, state, rows):
        record(self, state, rows)
        if state.step == 45:
            self.sync()
            raise Killed

    monkeypatch.setattr(Recorder, "add", die)
    with pytest.raises(Killed):
        run_md(model_file, water, options(tmp_path, 60, "dead", every=5, ensemble="nvt", restart_every=15))
    monkeypatch.undo()
    assert read(tmp_path / "dead.xyz").info["step"] == 45
    run_md(model_file, water, options(tmp_path, 60, "dead", every=5, ensemble="nvt", restart=True))
    for kind in ("csv", "xyz"):
        assert (tmp_path / f"whole.{kind}").read_bytes() == (tmp_path / f"dead.{kind}").read_bytes()


def test_interruption_leaves_a_restart_file(model_file, water, tmp_path, monkeypatch):
    run_md(model_file, water, options(tmp_path, 60, "whole", every=5))
    replay, count = ReferenceBoundStep.replay, itertools.count()

    def interrupted(self):
        if next(count) == 33:
            raise KeyboardInterrupt
        replay(self)

    monkeypatch.setattr(ReferenceBoundStep, "replay", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_md(model_file, water, options(tmp_path, 60, "part", every=5))
    run_md(model_file, water, options(tmp_path, 60, "part", every=5, restart=True))
    assert (tmp_path / "whole.xyz").read_bytes() == (tmp_path / "part.xyz").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestep": 0.4}, "the time step was 0.5 fs there and is 0.4 fs here"),
        ({"temperature": 310.0}, "the temperature was not given there and is 310.0 K here"),
        ({"remove_drift": 7}, "the interval of --remove-drift was not given there and is 7 here"),
        (
            {"ensemble": "nvt"},
            "the ensemble was nve there and is nvt here; the friction was not given there and is 1.0 per ps",
        ),
        (
            {"seed": 5, "replicas": 2},
            "the seed was 0 there and is 5 here; the number of replicas was 1 there and is 2 here",
        ),
    ],
)
def test_restart_refuses_another_simulation(model_file, water, tmp_path, change, words):
    run_md(model_file, water, options(tmp_path))
    with pytest.raises(BadConfig, match=f"is of another simulation: {words}"):
        run_md(model_file, water, options(tmp_path, 40, restart=True, **change))


def test_restart_refuses_another_model_or_molecule(model_file, potential, water, tmp_path):
    run_md(model_file, water, options(tmp_path))
    save(potential, tmp_path / "other.tmn", metadata={"a": 1})
    with pytest.raises(BadConfig, match="another simulation: its model has other weights"):
        run_md(tmp_path / "other.tmn", water, options(tmp_path, 40, restart=True))
    with pytest.raises(
        BadConfig, match="another simulation: it has other atoms, or another order of atoms; its atoms have"
    ):
        run_md(model_file, molecule("H2"), options(tmp_path, 40, restart=True))


STRUCTURES = {
    "cell": r"the cell was \[.*\] Å there and is \[.*\] Å here",
    "pbc": r"the periodicity \(pbc\) was \[True, True, True\] there and is \[False",
    "masses": "its atoms have other masses",
    "fixed atoms": r"the list of fixed atoms was none there and is \[0\] here",
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_restart_refuses_another_structure(model_file, water, tmp_path, what):
    """None of these is in the restart file: the continuation would go on under other ones without a word."""
    water.cell, water.pbc = [9, 9, 9], [True, True, True]
    run_md(model_file, water, options(tmp_path, steps=20))
    other = water.copy()
    if what == "cell":
        other.cell[2, 2] = 10
    elif what == "pbc":
        other.pbc[0] = False
    elif what == "masses":
        other.set_masses([16, 3, 3])
    else:
        other.set_constraint(FixAtoms([0]))
    with pytest.raises(BadConfig, match=f"is of another simulation: {STRUCTURES[what]}"):
        run_md(model_file, other, options(tmp_path, steps=40, restart=True))
    water.positions += 1  # they are those of the restart file
    assert run_md(model_file, water, options(tmp_path, steps=40, restart=True)).rows[-1].step == 40


def test_restart_refuses_other_trajectory_files(model_file, water, tmp_path):
    run_md(model_file, water, options(tmp_path))
    more = replace(options(tmp_path, 40, restart=True), trajectories=(str(tmp_path / "other.xyz"),))
    with pytest.raises(BadConfig, match=r"run\.restart belongs to the trajectory files run\.xyz"):
        run_md(model_file, water, more)
    assert not (tmp_path / "other.xyz").exists()


def test_restart_of_a_model_in_memory(potential, water, tmp_path):
    """Known by its weights, also when it could not be saved."""
    built = [Potential(potential.representation, potential.head, elements=[1, 8], energy_scale=s) for s in (0.2, 0.2)]
    run_md(built[0], water, options(tmp_path, 10))
    assert run_md(built[1], water, options(tmp_path, 20, restart=True)).rows[-1].step == 20
    changed = copy.deepcopy(built[0])
    with torch.no_grad():
        next(changed.parameters()).mul_(2)
    with pytest.raises(BadConfig, match="model"):
        run_md(changed, water, options(tmp_path, 40, restart=True))


@pytest.mark.parametrize("kind", ["xyz", "traj", "dcd", "csv"])
def test_restart_spares_a_file_of_somebody_else(model_file, water, tmp_path, kind):
    """It was cut where the run's own had ended, if it was longer."""
    paths = {"trajectories": (str(tmp_path / f"run.{kind}"),)} if kind != "csv" else {}
    run_md(model_file, water, options(tmp_path, every=5, **paths))
    file = tmp_path / f"run.{kind}"
    own = file.read_bytes()
    other = molecule("CH3CH2OH")
    if kind == "csv":
        file.write_text("k,a,b,c,d,e\n" + 100 * "1,2,3,4,5,6\n")
    elif kind == "dcd":
        file.write_bytes(own[:4] + bytes(len(own)) + own)
    else:
        write(file, 40 * [other])
    foreign = file.read_bytes()
    assert len(foreign) > len(own)
    with pytest.raises(BadData, match=rf"run\.{kind} is not "):
        run_md(model_file, water, options(tmp_path, 40, every=5, restart=True, **paths))
    assert file.read_bytes() == foreign
    file.write_bytes(own)
    run_md(model_file, water, options(tmp_path, 40, every=5, restart=True, **paths))
    file.unlink()
    if kind != "csv":
        with pytest.raises(BadData, match="is not there or shorter"):
            run_md(model_file, water, options(tmp_path, 60, every=5, restart=True, **paths))


def test_damaged_or_missing_restart_file(model_file, water, tmp_path):
    with pytest.raises(FileNotFoundError, match="without --restart"):
        run_md(model_file, water, options(tmp_path, restart=True))
    run_md(model_file, water, options(tmp_path))
    path = tmp_path / "run.restart"
    blob = path.read_bytes()
    damaged = [blob[:-1], b"", blob[:20], *(_flip(blob, k) for k in range(8, len(blob), len(blob) // 40))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises((BadCheckpoint, BadConfig)):
            run_md(model_file, water, options(tmp_path, 40, restart=True))


def _flip(blob, k):
    return blob[:k] + bytes([blob[k] ^ 1]) + blob[k + 1 :]
