"""Ligands in periodic boxes with OpenMM and openmm-ml: the energy in vacuum, and molecules that stay whole."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

openmm = pytest.importorskip("openmm")
from isolated_cases import CELLS, acetate, acetate_in_water, bonds_of, charged_potential, wrapped  # noqa: E402
from openmm import app, unit  # noqa: E402
from openmm_cases import KJ_MOL, context_of, evaluate, system_of, topology_of  # noqa: E402

from torchmdnet2 import Potential, System, load  # noqa: E402
from torchmdnet2.adapters import openmm as adapter  # noqa: E402
from torchmdnet2.adapters.openmm import add_force, bonds_force, create_force  # noqa: E402
from torchmdnet2.checkpoint import save  # noqa: E402
from torchmdnet2.errors import BadData, StructureWarning  # noqa: E402

SEVEN = list(range(7))
NM = unit.nanometer


def in_vacuum(atoms: Atoms):
    """Energy in kJ/mol and forces in kJ/mol/nm of an anion."""
    found = charged_potential()(System.from_ase(atoms).replace(charge=[-1.0]))
    return float(found.energy.detach()) * KJ_MOL, found.forces.numpy() * KJ_MOL * 10


@pytest.fixture(scope="module")
def charged_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("charged") / "charged.tmn"
    save(charged_potential(), path)
    return path


@pytest.fixture(scope="module")
def solvated():
    """Topology, positions in nm, the force field's system."""
    topology, positions, field = acetate_in_water(box=18.0)
    return topology, positions, field.createSystem(topology, app.PME, 0.8 * NM, constraints=app.HBonds)


def mixed(path, solvated, **options):
    openmmml = pytest.importorskip("openmmml")
    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory

    openmmml.MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    topology, _, system = solvated
    given = {"device": "cpu", **options}
    return openmmml.MLPotential("torchmdnet2", modelPath=str(path)).createMixedSystem(topology, system, SEVEN, **given)


def ml_energy(context, system) -> float:
    """Of the PythonForce alone; its group is 7."""
    (force,) = [force for force in system.getForces() if isinstance(force, openmm.PythonForce)]
    force.setForceGroup(7)
    context.reinitialize(preserveState=True)
    return context.getState(getEnergy=True, groups={7}).getPotentialEnergy()._value


# --- the force -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["Reference", "CPU"])
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_part_of_a_box_has_the_energy_in_vacuum(cell, platform, caplog):
    """In whatever order and images; the log says so in one line."""
    order = [9, 3, 2, 4, 8, 5, 7]
    energy, forces = in_vacuum(acetate())
    for seed in range(4):
        atoms = wrapped(acetate(), cell, seed)
        both = Atoms("Ar10", np.zeros((10, 3)), cell=cell, pbc=True)
        both.numbers[order], both.positions[order] = atoms.numbers, atoms.positions
        system = system_of(both)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torchmdnet2"):
            add_force(system, charged_potential(), topology_of(both), order, charge=-1)
        assert [r.message.partition(":")[0] for r in caplog.records] == [
            "the model evaluates 7 of 10 atoms as an isolated molecule"
        ]
        found, pulls = evaluate(context_of(system, both, platform))
        assert found == pytest.approx(energy, rel=1e-9 if platform == "Reference" else 1e-6)
        np.testing.assert_allclose(pulls[order], forces, atol=1e-8 if platform == "Reference" else 0.1)
        assert system.usesPeriodicBoundaryConditions()


def test_a_whole_system_is_isolated_on_demand(charged_file):
    atoms = wrapped(acetate(), CELLS["cube"], 2)
    vacuum = in_vacuum(acetate())[0]
    cell = System.from_ase(atoms).replace(charge=torch.tensor([-1.0]).double())
    for alone in ({"periodic": False}, {"isolated": True}):
        with pytest.raises(ValueError, match="coulomb='dsf' has no effect"):
            add_force(system_of(atoms), charged_file, topology_of(atoms), charge=-1, coulomb="dsf", **alone)
    for coulomb in ("pme", "dsf"):
        system = system_of(atoms)
        with pytest.warns(StructureWarning, match="background") if coulomb == "pme" else nullcontext():
            add_force(system, charged_file, topology_of(atoms), charge=-1, coulomb=coulomb)
            expected = float(load(charged_file, coulomb=coulomb)(cell).energy) * KJ_MOL
        back = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
        for each in (system, back):
            assert evaluate(context_of(each, atoms))[0] == pytest.approx(expected, rel=1e-7)
        assert abs(expected - vacuum) > 1
    system = system_of(atoms)
    add_force(system, charged_file, topology_of(atoms), charge=-1, isolated=True)
    back = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
    for each in (system, back):
        assert evaluate(context_of(each, atoms))[0] == pytest.approx(in_vacuum(acetate())[0], rel=1e-9)


def test_models_with_a_cutoff_see_images_unless_isolated(potential, caplog):
    """As before; a part of them may be isolated as well."""
    atoms = wrapped(acetate(), np.eye(3) * 8.2, 0)
    energies = []
    for options in ({}, {"isolated": True}):
        system = system_of(atoms)
        add_force(system, potential, topology_of(atoms), SEVEN, **options)
        energies.append(evaluate(context_of(system, atoms))[0])
    (alone, periodic) = (float(potential(System.from_ase(a)).energy.detach()) * KJ_MOL for a in (acetate(), atoms))
    assert energies == pytest.approx([periodic, alone], rel=1e-9)


COULOMB = {"name": "coulomb", "charges": {"H": 0.4, "O": -0.8}}
BELOW = {"model": charged_potential().config["model"], "elements": [1, 8], "priors": [COULOMB]}


@pytest.mark.parametrize(
    ("priors", "expected"),
    [
        ([COULOMB], True),
        ([{"name": "d3", "elements": [1, 8], "a1": 0.5, "a2": 3.0, "s8": 0.4, "cutoff": None}], True),
        ([{"name": "baseline", "potential": BELOW}], True),
        ([{**COULOMB, "method": "reaction_field", "cutoff": 4.0}], False),
        ([{**COULOMB, "method": "pme", "cutoff": 4.0}], False),
        ([], False),
    ],
)
def test_parts_are_isolated_where_a_sum_has_no_end(priors, expected, caplog):
    """Exactly the models that have another sum in periodic structures."""
    potential = Potential.from_config({**BELOW, "priors": priors}).eval()
    water = wrapped(molecule("H2O"), np.eye(3) * 12.0, 1)
    assert (potential.in_cells() is not potential) is expected
    create_force(potential, topology_of(water), range(3))
    assert bool(caplog.records) is expected


def test_a_part_longer_than_half_of_the_box_is_refused(charged_file):
    atoms = wrapped(acetate(), np.eye(3) * 6.0, 0)
    system = system_of(atoms)
    add_force(system, charged_file, topology_of(atoms), SEVEN, charge=-1)
    with pytest.raises(openmm.OpenMMException, match=r"charged\.tmn.*longer than half of the shortest width.*3\.00 Å"):
        evaluate(context_of(system, atoms))


def test_a_part_that_becomes_too_long_during_a_simulation(charged_file):
    """Each evaluation looks at the positions and the box as they are then."""
    atoms = acetate()
    atoms.set_cell(np.eye(3) * 9.0)
    atoms.pbc = True
    system = system_of(atoms)
    add_force(system, charged_file, topology_of(atoms), SEVEN, charge=-1)
    context = context_of(system, atoms)
    before, _ = evaluate(context)
    context.setPositions(1.8 * atoms.positions / 10)
    with pytest.raises(openmm.OpenMMException, match=r"longer than half of the shortest width.*4\.50 Å"):
        evaluate(context)
    context.setPositions(atoms.positions / 10)
    context.setPeriodicBoxVectors(*np.eye(3) * 0.6)
    with pytest.raises(openmm.OpenMMException, match=r"longer than half of the shortest width.*3\.00 Å"):
        evaluate(context)
    context.setPeriodicBoxVectors(*np.eye(3) * 0.9)
    assert evaluate(context)[0] == before


def test_molecules_of_openmm():
    """By the bonds of the topology; a residue without any in a part is one molecule."""
    two = acetate() + acetate()
    bonded, bare = topology_of(two), app.Topology()
    atoms = list(bonded.atoms())
    for k in (0, 7):
        for i, j in bonds_of(acetate()):
            bonded.addBond(atoms[i + k], atoms[j + k])
    chain = bare.addChain()
    for k in range(2):
        residue = bare.addResidue("ACT", chain)
        for number in acetate().numbers:
            bare.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
    first, second = tuple(range(7)), tuple(range(7, 14))
    for topology, part, expected in [
        (bonded, None, {first, second}),
        (bonded, range(7), {first, *((i,) for i in second)}),
        (bare, range(14), {first, second}),
        (bare, [1, 3, 5, 8, 9], {(1, 3, 5), (8, 9), *((i,) for i in (0, 2, 4, 6, 7, 10, 11, 12, 13))}),
        (bare, None, {(i,) for i in range(14)}),
    ]:
        system = system_of(two)
        system.addForce(bonds_force(topology, part))
        context = context_of(system, two)
        assert set(map(tuple, context.getMolecules())) == expected
        assert evaluate(context)[0] == 0 and not evaluate(context)[1].any()


# --- openmm-ml -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolate", [False, True])
def test_anion_in_water(charged_file, solvated, interpolate):
    """The charge is that of the force field; energies do not change where molecules are wrapped."""
    _, positions, _ = solvated
    system = mixed(charged_file, solvated, interpolate=interpolate)
    where = Atoms(f"H{len(positions)}", positions * 10)
    context = context_of(system, where)
    assert tuple(SEVEN) in context.getMolecules()
    for seed, offset in enumerate(([0, 0, 0], [1.3, 0.4, -5.1])):  # the mesh of PME does not move with the atoms
        context.setPositions(positions + offset)
        before, forces = evaluate(context)
        state = context.getState(getPositions=True, enforcePeriodicBox=True)
        whole = state.getPositions(asNumpy=True).value_in_unit(NM)
        np.testing.assert_allclose(whole[:7] - whole[0], positions[:7] - positions[0], atol=1e-9)
        torn = positions + offset
        torn[:7] += 1.8 * np.random.default_rng(seed).integers(-1, 2, (7, 3))
        assert seed == 0 or np.abs(whole - positions - offset).max() > 1
        for moved in (whole, torn):
            context.setPositions(moved)
            after, pulls = evaluate(context)
            assert after == pytest.approx(before, rel=1e-9)
            np.testing.assert_allclose(pulls, forces, atol=1e-8 * np.abs(forces).max())
    if not interpolate:
        assert ml_energy(context, system) == pytest.approx(in_vacuum(acetate())[0], rel=1e-9)


def test_box_of_the_force_field_alone(charged_file, solvated):
    """The topology has none, as after a conversion; the ligand is made whole all the same."""
    topology, positions, _ = solvated
    box = topology.getPeriodicBoxVectors()
    topology.setPeriodicBoxVectors(None)
    try:
        systems = [mixed(charged_file, solvated, interpolate=choice) for choice in (False, True)]
    finally:
        topology.setPeriodicBoxVectors(box)
    where = Atoms(f"H{len(positions)}", positions * 10)
    contexts = [context_of(system, where) for system in systems]
    before = [evaluate(context)[0] for context in contexts]
    where.positions[2] += [18.0, -36.0, 0.0]
    for context, energy in zip(contexts, before, strict=True):
        context.setPositions(where.positions / 10)
        assert evaluate(context)[0] == pytest.approx(energy, rel=1e-9)


def test_reporters_barostat_and_checkpoint(charged_file, solvated, tmp_path):
    """A short run at constant pressure: frames of a reporter that wraps have the energies of the run, molecules are
    whole in them, and a checkpoint goes on as the run did."""
    topology, positions, _ = solvated
    system = mixed(charged_file, solvated)
    system.addForce(openmm.MonteCarloBarostat(1 * unit.bar, 300 * unit.kelvin, 2))
    integrator = openmm.LangevinMiddleIntegrator(300, 1.0, 0.0005)
    integrator.setRandomNumberSeed(1)
    simulation = app.Simulation(topology, system, integrator, openmm.Platform.getPlatformByName("Reference"))
    simulation.context.setPositions(positions + np.array([0.8, 0.9, 0.3]))  # the ligand is near a corner
    simulation.minimizeEnergy(maxIterations=2)
    volumes, energies = set(), []
    bonds = np.array(bonds_of(acetate()))
    simulation.reporters.append(app.DCDReporter(str(tmp_path / "run.dcd"), 2, enforcePeriodicBox=True))
    simulation.reporters.append(app.PDBReporter(str(tmp_path / "run.pdb"), 2, enforcePeriodicBox=True))
    for k in range(5):
        simulation.step(2)
        state = simulation.context.getState(getEnergy=True, getPositions=True, enforcePeriodicBox=True)
        volumes.add(round(state.getPeriodicBoxVolume()._value, 9))
        where = state.getPositions(asNumpy=True).value_in_unit(NM)
        assert np.linalg.norm(where[bonds[:, 0]] - where[bonds[:, 1]], axis=1).max() < 0.2
        energies.append(state.getPotentialEnergy()._value)
        if k == 2:
            simulation.saveCheckpoint(str(tmp_path / "run.chk"))
            simulation.context.setPositions(where)  # as a program does that goes on from what it wrote
            assert evaluate(simulation.context)[0] == pytest.approx(energies[-1], rel=1e-6)
            simulation.loadCheckpoint(str(tmp_path / "run.chk"))
    assert len(volumes) > 1
    last = simulation.context.getState(getPositions=True).getPositions(asNumpy=True)._value
    simulation.loadCheckpoint(str(tmp_path / "run.chk"))
    assert evaluate(simulation.context)[0] == pytest.approx(energies[2], rel=1e-9)
    simulation.reporters.clear()  # closes the files
    for frame in range(5):
        written = app.PDBFile(str(tmp_path / "run.pdb")).getPositions(asNumpy=True, frame=frame).value_in_unit(NM)
        assert np.linalg.norm(written[bonds[:, 0]] - written[bonds[:, 1]], axis=1).max() < 0.2
    simulation.step(4)
    again = simulation.context.getState(getPositions=True).getPositions(asNumpy=True)._value
    np.testing.assert_allclose(again, last, atol=1e-9)


def test_charges_of_the_force_field(charged_file, solvated):
    """Taken where nothing else states the total charge; another one that is given is kept, with a warning."""
    _, positions, _ = solvated
    where = Atoms(f"H{len(positions)}", positions * 10)
    energies = []
    for charge in (None, -1):
        system = mixed(charged_file, solvated, charge=charge)
        energies.append(ml_energy(context_of(system, where, "CPU"), system))
    assert energies[0] == energies[1]
    with pytest.warns(
        StructureWarning, match="sum to -1 e over the atoms of the model, but the given charge=0 is used"
    ):
        system = mixed(charged_file, solvated, charge=0)
    assert ml_energy(context_of(system, where, "CPU"), system) != pytest.approx(energies[0], rel=1e-6)


@pytest.mark.parametrize("total", [-1, -1.0003, -0.98, -1.03, -1.5, -0.3])
def test_charges_of_the_force_field_that_sum_to_no_whole_number(charged_file, solvated, monkeypatch, caplog, total):
    """A small rounding is taken as such, with a line in the log; else the charge must be given."""
    topology, positions, system = solvated
    system, taken = copy.deepcopy(system), []
    confirmed = adapter.confirmed
    monkeypatch.setattr(adapter, "confirmed", lambda *a, **b: taken.append(confirmed(*a, **b)) or taken[-1])
    (nonbonded,) = [force for force in system.getForces() if isinstance(force, openmm.NonbondedForce)]
    for k in SEVEN:
        _, *others = nonbonded.getParticleParameters(k)
        nonbonded.setParticleParameters(k, total / 7, *others)
    solvated = topology, positions, system
    if abs(total + 1) > 0.025:
        with pytest.raises(BadData, match=rf"sum to {total:g} e over the atoms .* not a whole number: .* charge="):
            mixed(charged_file, solvated)
        mixed(charged_file, solvated, charge=-1)
        return
    mixed(charged_file, solvated)
    assert taken == [-1]
    assert (f"sum to {total:.4g} e over the atoms of the model: the total charge is -1" in caplog.text) == (total != -1)


@pytest.mark.parametrize(
    ("formal", "given", "found"),
    [
        ([0, -1, 0, 0, 0, 0, 0], None, -1),
        ([None, -1, None, None, None, None, None], None, -1),
        ([0, None, None, None, None, None, None], None, -1),  # states nothing
        ([0] * 7, None, "is 0 by the formal charges of the topology, of 7 atoms and -1 by the charges of the f"),
        ([None, 1, None, None, None, None, None], None, "is 1 by .* of 1 atoms and -1 by .*give charge=1"),
        ([0] * 7, 0, 0),
        ([0] * 7, -1, "is 0 by the formal charges .*, but charge=-1 is given"),
    ],
)
def test_formal_charges_beside_the_force_field(charged_file, solvated, monkeypatch, formal, given, found):
    """Two statements that differ are an error that names both, unless a charge is given."""
    pytest.importorskip("openmmml")
    topology, positions, system = solvated
    topology, taken = copy.deepcopy(topology), []
    for atom, charge in zip(topology.atoms(), formal, strict=False):
        atom.formalCharge = charge
    confirmed = adapter.confirmed
    monkeypatch.setattr(adapter, "confirmed", lambda *a, **b: taken.append(confirmed(*a, **b)) or taken[-1])
    if isinstance(found, str):
        with pytest.raises(BadData, match=found):
            mixed(charged_file, (topology, positions, system), charge=given)
        return
    with pytest.warns(StructureWarning, match="sum to -1 e .* given charge=0 is used") if given == 0 else nullcontext():
        mixed(charged_file, (topology, positions, system), charge=given)
    assert taken == [found]


def test_several_ligands(charged_file):
    """One part: they interact through the model. Two parts: each is alone, and the force field couples them."""
    openmmml = pytest.importorskip("openmmml")
    topology, positions, field = acetate_in_water(box=21.0, copies=2)
    mm = field.createSystem(topology, app.PME, 0.8 * NM)
    potential = openmmml.MLPotential("torchmdnet2", modelPath=str(charged_file))
    together = potential.createMixedSystem(topology, mm, range(14), device="cpu")
    one = potential.createMixedSystem(topology, mm, range(7), device="cpu")
    apart = potential.createMixedSystem(topology, one, range(7, 14), device="cpu")
    where = Atoms(f"H{len(positions)}", positions * 10)
    where.positions[9:12] -= [21.0, 0, 42.0]
    pair = acetate() + acetate()
    pair.positions[7:] += [5.0, 0, 0]
    both = charged_potential()(System.from_ase(pair).replace(charge=[-2.0]))
    for system, expected in ((together, float(both.energy.detach()) * KJ_MOL), (apart, 2 * in_vacuum(acetate())[0])):
        context = context_of(system, where, "Reference")
        assert {tuple(range(7)), tuple(range(7, 14))} <= set(context.getMolecules())
        for force in system.getForces():
            force.setForceGroup(7 if isinstance(force, openmm.PythonForce) else 0)
        context.reinitialize(preserveState=True)
        found = context.getState(getEnergy=True, groups={7}).getPotentialEnergy()._value
        assert found == pytest.approx(expected, rel=1e-6)


def test_shipped_potential(solvated):
    """`organic-small` of the anion in water, before and after all of its atoms are wrapped."""
    from torchmdnet2 import load

    _, positions, _ = solvated
    system = mixed("organic-small", solvated, precision="double")
    where = Atoms(f"H{len(positions)}", positions * 10)
    context = context_of(system, where)
    alone = load("organic-small").double()(System.from_ase(acetate()).replace(charge=[-1.0]))
    expected = float(alone.energy.detach()) * KJ_MOL
    assert ml_energy(context, system) == pytest.approx(expected, rel=1e-9)
    where.positions[:7] += np.random.default_rng(0).integers(-1, 2, (7, 3)) * 18.0
    context.setPositions(where.positions / 10)
    assert ml_energy(context, system) == pytest.approx(expected, rel=1e-9)


def test_link_atoms(charged_file, solvated):
    """A part that is cut out of a molecule is capped by openmm-ml; it is whole with its cap, and has its distance."""
    openmmml = pytest.importorskip("openmmml")
    topology, positions, mm = solvated
    potential = openmmml.MLPotential("torchmdnet2", modelPath=str(charged_file))
    lengths = [(3, 0, 0.115 * NM)]
    made = potential.createMixedSystem(
        topology, mm, [3, 4, 5, 6], charge=0, device="cpu", returnInfo=True, linkAtomDistances=lengths
    )
    where = Atoms(f"H{len(positions) + 1}", np.concatenate([positions, [[0, 0, 0]]]) * 10)
    system, cap = made["system"], len(positions)
    context = context_of(system, where)
    context.computeVirtualSites()
    placed = context.getState(getPositions=True).getPositions(asNumpy=True)._value
    assert np.linalg.norm(placed[cap] - placed[3]) == pytest.approx(0.115, rel=1e-6)
    methane = Atoms("CH4", placed[[3, 4, 5, 6, cap]] * 10)
    expected = float(charged_potential()(System.from_ase(methane)).energy.detach()) * KJ_MOL
    assert ml_energy(context, system) == pytest.approx(expected, rel=1e-9)
    placed[4] += [1.8, 0, -3.6]
    context.setPositions(placed)
    assert ml_energy(context, system) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(TypeError, match=r"unknown argument 'linkAtomDistance'.*linkAtomDistances"):
        potential.createMixedSystem(topology, mm, [3, 4, 5, 6], charge=0, device="cpu", linkAtomDistance=lengths)
