"""The OpenMM force and the openmm-ml plug-in: bars R11, R27."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

openmm = pytest.importorskip("openmm")
from openmm import app, unit  # noqa: E402

from torchmdnet2 import System  # noqa: E402
from torchmdnet2.adapters.ase import TorchMDNet2Calculator  # noqa: E402
from torchmdnet2.adapters.openmm import create_force  # noqa: E402
from torchmdnet2.checkpoint import save  # noqa: E402
from torchmdnet2.errors import BadCheckpoint, BadData, UnknownElement  # noqa: E402

KJ_MOL = 1.602176634e-19 * 6.02214076e23 / 1000  # kJ/mol per eV: the SI's own numbers
ROOT = Path(__file__).parents[2]


def topology_of(atoms: Atoms) -> app.Topology:
    topology = app.Topology()
    residue = topology.addResidue("MOL", topology.addChain())
    for k, number in enumerate(atoms.numbers):
        topology.addAtom(f"A{k}", app.Element.getByAtomicNumber(int(number)), residue)
    if atoms.pbc.any():
        topology.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    return topology


def system_of(atoms: Atoms) -> openmm.System:
    system = openmm.System()
    for mass in atoms.get_masses():
        system.addParticle(mass)
    if atoms.pbc.any():
        system.setDefaultPeriodicBoxVectors(*(atoms.cell.array / 10))
    return system


def context_of(system, atoms: Atoms, platform="Reference", timestep=0.0005):
    integrator = openmm.VerletIntegrator(timestep)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
    context.setPositions(atoms.positions / 10)
    return context


def evaluate(context):
    """Energy in kJ/mol, forces in kJ/mol/nm."""
    state = context.getState(getEnergy=True, getForces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    return energy, state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer)


def ml_system(model, atoms: Atoms, subset=None, **options):
    system = system_of(atoms)
    system.addForce(create_force(model, topology_of(atoms), subset, **options))
    return system


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def boxed(kind: str) -> Atoms:
    """Ethanol so near its periodic images that they act on it."""
    atoms = ethanol()
    atoms.set_cell({"orthorhombic": [5.0, 5.5, 6.0], "triclinic": [[6, 0, 0], [1.5, 5.5, 0], [-1.0, 2.0, 5.0]]}[kind])
    atoms.pbc = True
    return atoms


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vacuum", "orthorhombic", "triclinic"])
@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_equals_potential_and_ase(potential, model_file, kind, platform):
    """Bar R27; atoms far outside of the box too."""
    atoms = ethanol() if kind == "vacuum" else boxed(kind)
    if kind != "vacuum":
        atoms.positions[3] += 2 * atoms.cell[0] - atoms.cell[2]
        alone = atoms.copy()
        alone.pbc = False
        alone.positions[3] -= 2 * atoms.cell[0] - atoms.cell[2]
        difference = potential(System.from_ase(atoms)).energy - potential(System.from_ase(alone)).energy
        assert abs(float(difference.detach())) > 1e-3  # the images matter
    energy, forces = evaluate(context_of(ml_system(model_file, atoms), atoms, platform))
    expected = potential(System.from_ase(atoms))
    calc = TorchMDNet2Calculator(model_file)
    tolerance = 1e-9 if platform == "Reference" else 1e-5  # the CPU platform has positions in float32
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=tolerance)
    assert energy == pytest.approx(calc.get_property("energy", atoms) * KJ_MOL, rel=tolerance)
    scale = np.abs(forces).max()
    np.testing.assert_allclose(forces, calc.get_property("forces", atoms) * KJ_MOL * 10, atol=tolerance * scale)
    assert scale > 10


def test_float32_network(potential, model_file):
    energy, forces = evaluate(context_of(ml_system(model_file, ethanol(), dtype=torch.float32), ethanol()))
    expected = potential(System.from_ase(ethanol()))
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=1e-5)
    np.testing.assert_allclose(forces, expected.forces.numpy() * KJ_MOL * 10, atol=1e-5 * np.abs(forces).max())


@pytest.mark.parametrize("kind", ["vacuum", "triclinic"])
def test_subset(potential, model_file, kind):
    """The model sees the chosen atoms only, in the order given."""
    atoms = (ethanol() if kind == "vacuum" else boxed(kind)) + Atoms("Ar2", [[1, 1, 1], [2, 2, 2]])
    order = [4, 0, 1, 2, 5, 3]
    system = ml_system(model_file, atoms, order)  # argon is unknown to the model, and need not be known
    energy, forces = evaluate(context_of(system, atoms))
    expected = potential(System.from_ase(atoms[order]))
    assert energy == pytest.approx(float(expected.energy.detach()) * KJ_MOL, rel=1e-9)
    np.testing.assert_allclose(forces[order], expected.forces.numpy() * KJ_MOL * 10, atol=1e-7)
    rest = sorted(set(range(len(atoms))) - set(order))
    assert not forces[rest].any()


@pytest.mark.parametrize("kind", ["vacuum", "triclinic"])
def test_forces_are_the_gradient_of_the_energy(model_file, kind):
    """Finite differences through OpenMM; nothing in OpenMM checks that."""
    atoms = ethanol() if kind == "vacuum" else boxed(kind)
    context = context_of(ml_system(model_file, atoms), atoms)
    _, forces = evaluate(context)
    pos, step = atoms.positions / 10, 1e-5
    for atom, axis in [(0, 0), (2, 1), (5, 2), (8, 0)]:
        energies = []
        for sign in (1, -1):
            moved = pos.copy()
            moved[atom, axis] += sign * step
            context.setPositions(moved)
            energies.append(evaluate(context)[0])
        assert forces[atom, axis] == pytest.approx((energies[1] - energies[0]) / (2 * step), abs=1e-4)


def test_box_changes_are_seen(potential, model_file):
    """As a Monte Carlo barostat makes them."""
    atoms = boxed("triclinic")
    context = context_of(ml_system(model_file, atoms), atoms)
    before, _ = evaluate(context)
    atoms.set_cell(atoms.cell.array * 1.05)
    context.setPeriodicBoxVectors(*(atoms.cell.array / 10))
    energy, _ = evaluate(context)
    expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
    assert energy == pytest.approx(expected, rel=1e-9) and energy != pytest.approx(before, rel=1e-4)


def test_charge(potential, model_file):
    system = System.from_ase(ethanol()).replace(charge=torch.tensor([1.0], dtype=torch.float64))
    energy, _ = evaluate(context_of(ml_system(model_file, ethanol(), charge=1), ethanol()))
    assert energy == pytest.approx(float(potential(system).energy.detach()) * KJ_MOL, rel=1e-9)
    with pytest.raises(ValueError, match="whole number"):
        ml_system(model_file, ethanol(), charge=0.5)


def test_units_are_codata():
    from torchmdnet2 import units

    assert 1 / units.KJ_MOL == pytest.approx(KJ_MOL, rel=1e-12) == pytest.approx(96.48533212331, rel=1e-12)
    assert units.factor("length", "nm") == 10


# --- OpenMM's machinery ------------------------------------------------------------------------------------------


def test_minimiser(model_file):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms)
    before, _ = evaluate(context)
    openmm.LocalEnergyMinimizer.minimize(context, tolerance=50, maxIterations=20)
    after, forces = evaluate(context)
    assert after < before and np.isfinite(forces).all()


@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_constant_energy(model_file, platform):
    """Energies and forces belong together over a trajectory, with OpenMM's masses and times."""
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms), atoms, platform, timestep=0.0002)
    context.setVelocitiesToTemperature(100, 1)
    totals, potentials = [], []
    for _ in range(20):
        context.getIntegrator().step(2)
        state = context.getState(getEnergy=True)
        energies = [state.getPotentialEnergy(), state.getKineticEnergy()]
        potential, kinetic = (e.value_in_unit(unit.kilojoule_per_mole) for e in energies)
        totals.append(potential + kinetic)
        potentials.append(potential)
    assert np.ptp(potentials) > 1
    assert np.ptp(totals) < 0.02 * np.ptp(potentials)


@pytest.mark.parametrize("subset", [None, [0, 1, 2]])
def test_xml_round_trip_holds_no_weights(model_file, subset):
    atoms = boxed("triclinic")
    system = ml_system(model_file, atoms, subset, charge=1, dtype="float64")
    xml = openmm.XmlSerializer.serialize(system)
    # 2 hexadecimal digits per byte of the pickle
    assert len(xml) < 8000 < model_file.stat().st_size
    back = openmm.XmlSerializer.deserialize(xml)
    assert back.usesPeriodicBoundaryConditions()
    first, second = (evaluate(context_of(s, atoms)) for s in (system, back))
    assert first[0] == second[0] and np.array_equal(first[1], second[1])
    assert openmm.XmlSerializer.serialize(back) == xml


def test_pickle_is_plain_data(model_file):
    from torchmdnet2.adapters.model import open_model
    from torchmdnet2.adapters.openmm import TorchMDNet2Energy

    potential, source = open_model(model_file)
    options = {"numbers": (1, 8), "particles": None, "periodic": False, "charge": 0, "spin": 0}
    call = TorchMDNet2Energy(source, {**options, "device": "cpu", "dtype": "float64"}, potential)
    data = pickle.dumps(call)
    assert len(data) < 1000 and str(model_file).encode() in data and source.sha256.encode() in data
    assert b"torch\n" not in data and b"numpy" not in data and b"Potential" not in data


def test_xml_with_a_replaced_or_missing_file(potential, tmp_path):
    path = tmp_path / "model.tmn"
    save(potential, path)
    xml = openmm.XmlSerializer.serialize(ml_system(path, ethanol()))
    save(potential, path, metadata={"trained": "again"})
    with pytest.raises(openmm.OpenMMException, match=r"model\.tmn.*BadCheckpoint.*was replaced"):
        evaluate(context_of(openmm.XmlSerializer.deserialize(xml), ethanol()))
    path.unlink()
    with pytest.raises(openmm.OpenMMException, match="no such model file"):
        evaluate(context_of(openmm.XmlSerializer.deserialize(xml), ethanol()))


def test_model_in_memory(potential):
    system = ml_system(potential, ethanol())
    expected = float(potential(System.from_ase(ethanol())).energy.detach()) * KJ_MOL
    assert evaluate(context_of(system, ethanol()))[0] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(openmm.OpenMMException, match="serialize"):
        openmm.XmlSerializer.serialize(system)


def test_two_molecules_in_one_process(potential, model_file):
    contexts = [(context_of(ml_system(model_file, a), a), a) for a in (ethanol(), molecule("H2O"), boxed("triclinic"))]
    for context, atoms in contexts * 2:
        expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
        assert evaluate(context)[0] == pytest.approx(expected, rel=1e-9)


# --- refusals ----------------------------------------------------------------------------------------------------


def test_bad_input(model_file, tmp_path):
    with pytest.raises(UnknownElement, match=r"atom 9 is Ar.*H, C, O"):
        ml_system(model_file, ethanol() + Atoms("Ar"))
    for subset, words in ([[0, 99], "99"], [[1, 1], "twice"], [[], "no atoms"], [[-1], "-1"]):
        with pytest.raises(BadData, match=words):
            ml_system(model_file, ethanol(), subset)
    topology = topology_of(ethanol())
    topology.addAtom("EP", None, next(topology.residues()))
    with pytest.raises(BadData, match=r"atom 9 \(EP\) has no element"):
        create_force(model_file, topology)
    create_force(model_file, topology, range(9))
    with pytest.raises(FileNotFoundError):
        create_force(tmp_path / "none.tmn", topology_of(ethanol()))
    (tmp_path / "junk.tmn").write_bytes(b"junk")
    with pytest.raises(BadCheckpoint):
        create_force(tmp_path / "junk.tmn", topology_of(ethanol()))


@pytest.mark.parametrize("subset, particle", [(None, 4), ([8, 4, 0], 4)])
def test_positions_that_are_not_finite(model_file, subset, particle):
    atoms = ethanol()
    context = context_of(ml_system(model_file, atoms, subset), atoms)
    atoms.positions[particle, 2] = np.nan
    context.setPositions(atoms.positions / 10)
    with pytest.raises(openmm.OpenMMException, match=f"tiny.tmn.*particle {particle} .*not finite"):
        evaluate(context)


def test_results_that_are_not_finite(potential):
    broken = copy.deepcopy(potential)
    broken.energy_scale = float("inf")
    with pytest.raises(openmm.OpenMMException, match=r"particle 0 .C. is not finite"):
        evaluate(context_of(ml_system(broken, ethanol()), ethanol()))


# --- openmm-ml ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ml_potential(model_file):
    """MLPotential, with the plug-in registered also where this package is not installed."""
    openmmml = pytest.importorskip("openmmml")
    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory

    if "torchmdnet2" not in openmmml.MLPotential._implFactories:
        openmmml.MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    return openmmml.MLPotential("torchmdnet2", modelPath=str(model_file))


@pytest.fixture(scope="module")
def waters():
    """Topology, positions in Å and force field of 27 water molecules in a box."""
    topology = app.Topology()
    chain = topology.addChain()
    positions = []
    rng = np.random.default_rng(0)
    for k in range(27):
        residue = topology.addResidue("HOH", chain)
        oxygen, *hydrogens = (
            topology.addAtom(name, app.Element.getBySymbol(name[0]), residue) for name in ("O", "H1", "H2")
        )
        for hydrogen in hydrogens:
            topology.addBond(oxygen, hydrogen)
        shape = np.array([[0, 0, 0], [0.9572, 0, 0], [-0.2399872, 0.92663, 0]])
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        positions.append(shape @ turn + 3.2 * np.array([k % 3, k // 3 % 3, k // 9]))
    topology.setPeriodicBoxVectors(np.eye(3) * 0.96)
    return topology, np.concatenate(positions), app.ForceField("tip3p.xml")


def test_plugin_pure(ml_potential, potential):
    atoms = boxed("triclinic")
    system = ml_potential.createSystem(topology_of(atoms), precision="double", device="cpu", removeCMMotion=False)
    expected = float(potential(System.from_ase(atoms)).energy.detach()) * KJ_MOL
    assert evaluate(context_of(system, atoms))[0] == pytest.approx(expected, rel=1e-9)
    charged = ml_potential.createSystem(topology_of(atoms), charge=1, device="cpu")
    assert evaluate(context_of(charged, atoms))[0] != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", [app.NoCutoff, app.PME])
def test_plugin_mixed_system(ml_potential, potential, waters, method):
    """Mechanical embedding: λ = 0 is the force field, λ = 1 the model inside and the force field outside."""
    topology, positions, force_field = waters
    if method is app.NoCutoff:
        topology = copy.deepcopy(topology)
        topology.setPeriodicBoxVectors(None)
    options = {"nonbondedCutoff": 0.45} if method is app.PME else {}
    mm = force_field.createSystem(topology, method, rigidWater=False, constraints=None, **options)
    for force in mm.getForces():
        if isinstance(force, openmm.NonbondedForce):
            force.setUseDispersionCorrection(False)
    # within the cutoff of each other: openmm-ml's λ = 0 has no cutoff for pairs of the ML subset
    subset = [0, 1, 2, 30, 31, 32] if method is app.NoCutoff else [30, 31, 32]
    chosen = {"device": "cpu", "precision": "double"}
    mixed = ml_potential.createMixedSystem(topology, mm, subset, **chosen)
    moving = ml_potential.createMixedSystem(topology, mm, subset, interpolate=True, **chosen)
    where = Atoms("H" * len(positions), positions)
    results = {name: evaluate(context_of(s, where)) for name, s in (("mm", mm), ("mixed", mixed))}
    context = context_of(moving, where)
    for value, name in ((0.0, "mm"), (1.0, "mixed")):
        context.setParameter("lambda_interpolate", value)
        energy, forces = evaluate(context)
        assert energy == pytest.approx(results[name][0], rel=1e-9)
        np.testing.assert_allclose(forces, results[name][1], atol=1e-6 * np.abs(forces).max())
    context.setParameter("lambda_interpolate", 0.3)
    assert evaluate(context)[0] == pytest.approx(0.7 * results["mm"][0] + 0.3 * results["mixed"][0], rel=1e-9)
    assert results["mm"][0] != pytest.approx(results["mixed"][0], rel=1e-4)
    # the model's part is exactly its energy of the subset
    parts = [f for f in mixed.getForces() if isinstance(f, openmm.PythonForce)]
    assert len(parts) == 1
    parts[0].setForceGroup(7)
    found = context_of(mixed, where).getState(getEnergy=True, groups={7}).getPotentialEnergy()
    ml = Atoms("OHH" * (len(subset) // 3), positions[subset], cell=np.eye(3) * 9.6, pbc=method is app.PME)
    expected = float(potential(System.from_ase(ml)).energy.detach()) * KJ_MOL
    assert found.value_in_unit(unit.kilojoule_per_mole) == pytest.approx(expected, rel=1e-9)


def test_plugin_arguments(ml_potential, model_file):
    openmmml = pytest.importorskip("openmmml")
    with pytest.raises(TypeError, match="did you mean 'charge'"):
        ml_potential.createSystem(topology_of(ethanol()), chrage=1)
    with pytest.raises(ValueError, match="modelPath"):
        openmmml.MLPotential("torchmdnet2")
    with pytest.raises(ValueError, match="model_path"):
        openmmml.MLPotential("torchmdnet2", modelPath=model_file, model_path="x")
    with pytest.raises(ValueError, match="float32 or float64"):
        ml_potential.createSystem(topology_of(ethanol()), precision="half")
    assert ml_potential._impl.getMLLongRange() is False


def test_entry_point_and_import_without_torch(plugin_folder):
    """`import openmmml` finds the plug-in, does not import torch, and works when torch cannot be imported."""
    pytest.importorskip("openmmml")
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError('torch is broken here')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "import openmmml\n"
        "potential = openmmml.MLPotential('torchmdnet2', modelPath='x.tmn')\n"
        "assert 'torch' not in sys.modules\n"
        "print(type(potential._impl).__name__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin_folder), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "TorchMDNet2Impl", done.stderr
