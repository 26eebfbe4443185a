"""A charge or spin that a user gives is used where none is stated, and is an error beside another that is stated.

One table over all entry points that take one; each is `stated.confirmed` below.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import _parser, main
from torchmdnet2.core.stated import Statement, charge_and_spin, confirmed
from torchmdnet2.errors import BadData, StructureWarning
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.stability import checked_start
from torchmdnet2.scan.scan import _molecule

POSITIONS = np.array([[0, 0, 0], [1.15, 0, 0], [-0.6, 1.0, 0]])  # C, O, O


@pytest.fixture(scope="module")
def potential():
    """Knows C and O, of every charge here."""
    config = {
        "model": {"name": "tensornet2", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "q_dim": 4},
        "elements": [6, 8],
        "total_charges": [-2, 0],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Potential.from_config(config).double().eval()


@pytest.fixture(scope="module")
def model_file(potential, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.tmn"
    save(potential, path)
    return str(path)


def carbonite(stated):
    return Atoms("CO2", POSITIONS, info={} if stated is None else {"charge": stated})


def by_ase(potential, model_file, stated, given, folder):
    atoms = carbonite(stated)
    atoms.calc = TorchMDNet2Calculator(potential, charge=given)
    atoms.get_potential_energy()
    return atoms.calc.atoms.info.get("charge", 0)


def by_ase_later(potential, model_file, stated, given, folder):
    atoms = carbonite(stated)
    atoms.calc = CommitteeCalculator([potential, potential])
    atoms.calc.set(charge=given)
    atoms.get_potential_energy()
    return atoms.calc.atoms.info.get("charge", 0)


def by_ase_batch(potential, model_file, stated, given, folder):
    calc = TorchMDNet2Calculator(potential, charge=given)
    (found,) = calc.evaluate([carbonite(stated)])
    (same,) = TorchMDNet2Calculator(potential).evaluate([carbonite(-2)])
    return -2 if found["energy"] == same["energy"] else 0


def topology(stated, blank=None):
    """A charge of -2 on the oxygens; `blank` where there is none, as PDB files have it."""
    app = pytest.importorskip("openmm.app")
    made = app.Topology()
    residue = made.addResidue("CO2", made.addChain())
    charges = [None] * 3 if stated is None else [blank, *([stated // 2] * 2)]
    for symbol, charge in zip("COO", charges, strict=True):
        made.addAtom(symbol, app.Element.getBySymbol(symbol), residue, formalCharge=charge)
    return made


def by_openmm(potential, model_file, stated, given, folder, blank=0):
    openmm = pytest.importorskip("openmm")
    from torchmdnet2.adapters.openmm import add_force

    system = openmm.System()
    for mass in (12, 16, 16):
        system.addParticle(mass)
    add_force(system, model_file, topology(stated, blank), charge=given, dtype="float64")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(POSITIONS / 10)
    energy = context.getState(getEnergy=True).getPotentialEnergy()._value
    ion = float(potential(System(z=[6, 8, 8], pos=torch.tensor(POSITIONS), charge=-2)).energy) * 96.48533212331
    return -2 if abs(energy - ion) < 1e-5 else 0


def by_openmm_from_pdb(*args):
    with pytest.warns(StructureWarning) if args[2:4] == (-2, None) else nullcontext():
        return by_openmm(*args, blank=None)


def by_openmmml(potential, model_file, stated, given, folder):
    openmmml = pytest.importorskip("openmmml")
    made = openmmml.MLPotential("torchmdnet2", modelPath=model_file)
    made.createSystem(topology(stated, 0), charge=given, device="cpu")
    return -2 if -2 in (stated, given) else 0  # the energy: by_openmm


def by_run_md(potential, model_file, stated, given, folder):
    options = MDOptions(steps=1, every=1, output=str(folder / "r"))
    run_md(potential, carbonite(stated), options, charge=given)
    return read(folder / "r.xyz", 0).info.get("charge", 0)


def by_command(potential, model_file, stated, given, folder):
    write(folder / "a.xyz", carbonite(stated))
    arguments = ["md", model_file, str(folder / "a.xyz"), "--steps", "1", "--output", str(folder / "r")]
    code = main([*arguments, "--device", "cpu", *([] if given is None else ["--charge", str(given)])])
    if code:
        raise BadData(str(code))
    return read(folder / "r.xyz", 0).info.get("charge", 0)


def by_stability(potential, model_file, stated, given, folder):
    return checked_start(carbonite(stated), 0, potential, given, None).info.get("charge", 0)


def by_scan(potential, model_file, stated, given, folder):
    return int(_molecule(carbonite(stated), given, None).charge[0])


WAYS = [by_ase, by_ase_later, by_ase_batch, by_openmm, by_openmm_from_pdb, by_openmmml, by_run_md, by_command,
        by_stability, by_scan]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_charge_that_is_given(potential, model_file, tmp_path, capsys, way):
    for stated, given, expected in [(-2, -2, -2), (None, -2, -2), (-2, None, -2), (None, None, 0), (None, 0, 0)]:
        assert way(potential, model_file, stated, given, tmp_path) == expected, (stated, given)
        capsys.readouterr()
    for stated, given in [(-2, 0), (0, -2)]:
        if stated == 0 and way is by_openmm_from_pdb:
            continue  # zeros for some atoms and blanks for the others state nothing
        with pytest.raises(ValueError) as caught:
            way(potential, model_file, stated, given, tmp_path)
        message = str(caught.value) + capsys.readouterr().err
        for words in (f"total charge is {stated} by ", f"={given} is given: give ", "leave it out"):
            assert words in message, message


def test_the_charge_of_commands_is_a_whole_number(capsys):
    for command in (["scan", "m.tmn", "a.xyz"], ["md", "m.tmn", "a.xyz", "--output", "r"]):
        options = _parser().parse_args([*command, "--charge", "-2.0"])
        assert options.charge == -2 and isinstance(options.charge, int)
        with pytest.raises(SystemExit):
            _parser().parse_args([*command, "--charge", "0.5"])
        assert "charge must be a whole number, got 0.5" in capsys.readouterr().err


def test_a_spin_that_is_given():
    atoms = Atoms("O", info={"multiplicity": 3})
    assert charge_and_spin(atoms, spin=3) == charge_and_spin(atoms, spin=0) == charge_and_spin(atoms) == (None, 3)
    with pytest.raises(BadData, match=r"spin multiplicity is 3 by .*multiplicity.*, but spin=1 is given"):
        charge_and_spin(atoms, spin=1)


def test_charges_among_results_state_nothing(potential):
    """They are those of another calculator, and of another state where the user says so."""
    atoms = carbonite(None)
    atoms.calc = SinglePointCalculator(atoms, energy=0.0, charges=np.array([0.5, -0.25, -0.25]))
    assert charge_and_spin(atoms, -2) == (-2, None)
    atoms.calc = TorchMDNet2Calculator(potential, charge=-2)
    atoms.get_potential_energy()
    assert atoms.calc.atoms.info["charge"] == -2


def test_what_is_given_must_be_a_whole_number():
    with pytest.raises(BadData, match=r"charge must be a whole number, got 0\.5"):
        confirmed((), "charge", 0.5)
    with pytest.raises(BadData, match=r"is 1 by the file, but charge=2 is given.*or mend the file"):
        confirmed([Statement(1, "the file")], "charge", 2, remedy="mend the file")


def test_a_calculator_of_a_labeller_with_a_fixed_charge(tmp_path):
    from torchmdnet2.learn.labellers import AseLabeller, LabellingFailed

    for key, given, words in [("charge", 0, "-2 by the frame, but .*=0 is given"), (None, -2, "charge_argument")]:
        labeller = AseLabeller("emt", "none", {"charge": given}, charge_argument=key)
        with pytest.raises(LabellingFailed, match=words):
            labeller(carbonite(-2), tmp_path)
    with pytest.raises(LabellingFailed, match=r"0 by the frame, but .*=-2 is given"):
        AseLabeller("emt", "none", {"charge": -2})(carbonite(0), tmp_path)
