"""ASE and OpenMM on the GPU: what the CPU gives in float64, also when everything changes between calls. Bars R26 (ASE),
R27 (OpenMM), R8, R11, R16, R17, R29."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2 import Potential, System
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CONFIG = {
    "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 16, "cutoff": 4.0},
    "elements": [1, 6, 8],
    "energy_scale": 5.0,
}
ENERGY, FORCE, STRESS = 2e-5, 2e-5, 2e-6  # eV per atom, eV/Å, eV/Å³: float32 against float64


@pytest.fixture(scope="module")
def potential():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Potential.from_config(CONFIG).eval()


@pytest.fixture(scope="module")
def exact(potential):
    return copy.deepcopy(potential).double()


@pytest.fixture
def calc(potential):
    return TorchMDNet2Calculator(potential, device="cuda")


def crystal() -> Atoms:
    atoms = bulk("CO", "zincblende", a=4.4) * (3, 2, 2)
    atoms.rattle(0.1, seed=3)
    return atoms


def assert_right(calc, exact, atoms: Atoms, stress: bool = False, charge: int = 0) -> None:
    system = System.from_ase(atoms).replace(charge=torch.tensor([float(charge)], dtype=torch.float64))
    expected = exact(system, stress=stress)
    assert calc.get_property("energy", atoms) == pytest.approx(float(expected.energy), abs=ENERGY * len(atoms))
    np.testing.assert_allclose(calc.get_property("forces", atoms), expected.forces.numpy(), atol=FORCE)
    if stress:
        found = calc.get_property("stress", atoms)
        np.testing.assert_allclose(found, expected.stress[0].numpy().ravel()[[0, 4, 8, 5, 2, 1]], atol=STRESS)


def test_moving_atoms_and_cells(calc, exact):
    """R16 and R26: every step is right, those on the static buffers too; stress in between."""
    atoms = crystal()
    assert_right(calc, exact, atoms)
    rng = np.random.default_rng(0)
    for step in range(12):
        atoms.rattle(0.03, rng=rng)
        if step % 3 == 2:
            atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.02 * rng.normal(size=(3, 3))), scale_atoms=True)
        assert_right(calc, exact, atoms, stress=step % 4 > 1)
    assert calc._evaluate._steps[False] is not None  # it did run on static buffers


def test_results_are_fresh_arrays(calc):
    """R26."""
    atoms = crystal()
    kept = []
    for step in range(4):
        atoms.rattle(0.05, seed=step)
        forces = calc.get_property("forces", atoms)
        kept.append((forces, forces.copy(), calc.results["forces"]))
    for forces, then, held in kept:
        assert np.array_equal(forces, then) and np.array_equal(held, then)


def test_other_structures_and_charges_in_between(calc, exact):
    """R16 and R26: never the numbers of another molecule, charge, element or pbc."""
    ethanol, water = molecule("CH3CH2OH"), molecule("H2O")
    for step in range(3):
        for atoms, charge in ((ethanol, 0), (ethanol, 1), (water, 0), (ethanol, 1), (ethanol, 1), (ethanol, 1)):
            atoms.rattle(0.02, seed=step)
            atoms.info["charge"] = charge
            assert_right(calc, exact, atoms, charge=charge)
        ethanol.numbers[3] = 1 if ethanol.numbers[3] != 1 else 6
    slab = crystal()
    for pbc in ((True, True, False), (True, True, False), (True, True, False), (False, True, True), True, True, False):
        slab.pbc = pbc
        slab.rattle(0.01, seed=1)
        assert_right(calc, exact, slab)


def test_more_edges_than_there_is_room_for(calc, exact):
    """R8."""
    atoms = crystal()
    atoms.pbc = False
    compact = atoms.positions.copy()
    atoms.positions *= 4
    for _ in range(3):
        atoms.rattle(0.01, seed=1)
        assert_right(calc, exact, atoms)
    atoms.positions[:] = compact
    assert_right(calc, exact, atoms)


def test_bad_positions_are_named_and_forgotten(calc, exact):
    """R11."""
    atoms = crystal()
    for _ in range(3):
        atoms.rattle(0.01, seed=1)
        calc.get_property("forces", atoms)
    good = atoms.positions[5, 1]
    for bad in (np.nan, np.inf):
        atoms.positions[5, 1] = bad
        with pytest.raises(ValueError, match="atom 5"):
            calc.get_property("forces", atoms)
        assert calc.results == {}
        atoms.positions[5, 1] = good
        assert_right(calc, exact, atoms)


def test_copies_pickles_threads_streams(potential, exact):
    """R17, R26 and R29: 8 threads, each on a stream of its own, equal one after the other to the bit."""
    calc = TorchMDNet2Calculator(potential, device="cuda")
    frames = [crystal() for _ in range(16)]
    for k, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=k)
    for other in (copy.copy(calc), copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):
        for atoms in frames[:3]:
            assert_right(other, exact, atoms)
    expected = [calc.get_property("forces", atoms) for atoms in frames]

    def work(atoms):
        with torch.cuda.stream(torch.cuda.Stream()):
            return calc.get_property("forces", atoms)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, frames * 3))
    for ours, theirs in zip(found, expected * 3, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0)


def test_committee_and_batches(potential, exact):
    """R5 and R26: equal members have no spread, a list of structures gives what each alone does."""
    calc = CommitteeCalculator([potential, potential], device="cuda")
    frames = [crystal(), molecule("CH3CH2OH"), crystal()]
    for atoms in frames:
        assert_right(calc, exact, atoms)
        assert calc.get_property("forces_std", atoms).max() == 0
    for results, atoms in zip(calc.evaluate(frames), frames, strict=True):
        np.testing.assert_allclose(results["forces"], exact(System.from_ase(atoms)).forces.numpy(), atol=FORCE)


def test_models_with_charges():
    """R26 for models that do not run on the static buffers: charges and dipole at every step."""
    config = {**CONFIG, "properties": [{"name": "charges"}, {"name": "dipole"}]}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = Potential.from_config(config).double().eval()
    calc, atoms = TorchMDNet2Calculator(made, device="cuda"), molecule("CH3CH2OH")
    for seed in range(4):
        atoms.rattle(0.05, seed=seed)
        expected = made(System.from_ase(atoms))
        np.testing.assert_allclose(calc.get_property("charges", atoms), expected.charges.numpy(), atol=1e-9)
        np.testing.assert_allclose(calc.get_property("dipole", atoms), expected.properties["dipole"][0], atol=1e-9)
        np.testing.assert_allclose(calc.get_property("forces", atoms), expected.forces.numpy(), atol=1e-9)


def test_double_precision_is_exact(potential, exact):
    """R15 in float64."""
    calc = TorchMDNet2Calculator(potential, device="cuda", dtype=torch.float64)
    atoms = crystal()
    np.testing.assert_allclose(
        calc.get_property("forces", atoms), exact(System.from_ase(atoms)).forces.numpy(), atol=1e-10
    )


def openmm_platform(name: str, way: str = ""):
    """A platform of OpenMM, after `share_context()` ("shared"), or with the plugin ("plugin single", "mixed", …)."""
    openmm = pytest.importorskip("openmm")
    from torchmdnet2.adapters import openmm as adapter

    names = [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]
    if name not in names:
        pytest.skip(f"OpenMM has no {name} platform here")
    if way.startswith("plugin"):
        if not Path(os.environ.get("TORCHMDNET2_OPENMM_PLUGIN") or adapter._cached_plugin()).is_file():
            pytest.skip("the plugin for OpenMM is not built")
        adapter.use_plugin()
    elif way:
        adapter.share_context()
    return openmm.Platform.getPlatformByName(name), {"Precision": way.split()[1]} if " " in way else {}


@pytest.fixture
def without_plugin(monkeypatch):
    """Forces do not load the plugin by themselves. Once it is loaded it stays: its tests come last."""
    monkeypatch.setenv("TORCHMDNET2_OPENMM_PLUGIN", "")


@pytest.mark.parametrize("platform", ["CUDA", "CPU", "Reference", "CUDA shared"])
def test_openmm(potential, exact, platform, without_plugin):
    """R17 and R27: the numbers of the CPU over a run; with OpenMM's CUDA platform too, where streams could race."""
    run_openmm(potential, exact, *openmm_platform(*platform.split(" ", 1)))


@pytest.mark.parametrize("precision", ["single", "mixed", "double"])
def test_openmm_plugin(potential, exact, precision):
    """Positions and forces by their addresses, with the same bars as through the host."""
    given = openmm_platform("CUDA", f"plugin {precision}")
    from torchmdnet2.adapters import openmm as adapter

    context = run_openmm(potential, exact, *given, atol=1e-4 if precision == "single" else FORCE)
    assert len(adapter._DIRECT) == 1
    (calls,) = adapter._DIRECT.values()
    assert calls._bound is not None and calls._bound.pos.is_cuda
    del context, calls
    gc.collect()
    assert not adapter._DIRECT


def run_openmm(potential, exact, platform, properties, atol=1e-4):
    """Compare energies and forces over a run; return the Context."""
    import openmm
    from openmm import app, unit

    from torchmdnet2.adapters.openmm import create_force
    from torchmdnet2.units import KJ_MOL

    atoms = crystal()
    topology, system = app.Topology(), openmm.System()
    residue = topology.addResidue("MOL", topology.addChain())
    for number in atoms.numbers:
        topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
        system.addParticle(12.0)
    # OpenMM wants its boxes in reduced form
    box = app.internal.unitcell.reducePeriodicBoxVectors(atoms.cell.standard_form()[0].array * 0.1 * unit.nanometer)
    topology.setPeriodicBoxVectors(box)
    system.setDefaultPeriodicBoxVectors(*box)
    turned = atoms.cell.scaled_positions(atoms.positions) @ atoms.cell.standard_form()[0].array
    system.addForce(create_force(potential, topology, device="cuda"))
    if properties:
        system.addForce(openmm.MonteCarloBarostat(1.0, 300, 4))
    context = openmm.Context(system, openmm.VerletIntegrator(1e-3), platform, properties)
    context.setPositions(turned / 10)
    context.setVelocitiesToTemperature(300, 1)
    for _ in range(10):
        context.getIntegrator().step(3)
        state = context.getState(getPositions=True, getEnergy=True, getForces=True)
        atoms.positions = state.getPositions(asNumpy=True).value_in_unit(unit.angstrom)
        atoms.cell = state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.angstrom)
        expected = exact(System.from_ase(atoms))
        energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole) * KJ_MOL
        forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.nanometer) * KJ_MOL / 10
        assert energy == pytest.approx(float(expected.energy), abs=ENERGY * len(atoms))
        # OpenMM's CUDA and CPU platforms hold positions in float32
        np.testing.assert_allclose(forces, expected.forces.numpy(), atol=atol)
    return context


@pytest.mark.parametrize("precision", ["single", "mixed", "double"])
def test_openmm_plugin_with_a_part_of_a_system(potential, exact, precision):
    """R27 and R11: an isolated molecule, wrapped into the box, among others that OpenMM sorts; then what is refused."""
    platform, properties = openmm_platform("CUDA", f"plugin {precision}")
    import openmm
    from openmm import app

    from torchmdnet2.adapters import openmm as adapter
    from torchmdnet2.units import KJ_MOL

    cell = np.array([[22.0, 0, 0], [5.0, 21.0, 0], [-6.0, 7.0, 20.0]])
    water, ethanol = molecule("H2O"), molecule("CH3CH2OH")
    ethanol.positions += 0.3 - ethanol.positions.mean(0)  # across the faces of the box
    rng = np.random.default_rng(0)
    places = rng.permutation([np.array([i, j, k]) / 4 for i, j, k in np.ndindex(4, 4, 4) if i + j + k])
    molecules = [Atoms(water.symbols, water.positions + place @ cell) for place in places]
    molecules.insert(30, ethanol)
    topology, system = app.Topology(), openmm.System()
    chain, bonds, pairs = topology.addChain(), openmm.HarmonicBondForce(), openmm.NonbondedForce()
    bonds.setUsesPeriodicBoundaryConditions(True)
    pairs.setNonbondedMethod(pairs.CutoffPeriodic)
    pairs.setCutoffDistance(0.7)
    for one in molecules:
        residue, first = topology.addResidue("MOL", chain), system.getNumParticles()
        for number, mass in zip(one.numbers, one.get_masses(), strict=True):
            topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
            pairs.addParticle(0, 0.2, 0.1)
            system.addParticle(50 * mass)  # a random model has large forces
        for k in range(len(one)):
            for j in range(k):
                pairs.addException(first + j, first + k, 0, 1, 0)
            if one is not ethanol and k:
                bonds.addBond(first, first + k, 0.096, 1e5)
    topology.setPeriodicBoxVectors(cell / 10)
    system.setDefaultPeriodicBoxVectors(*(cell / 10))
    system.addForce(bonds)
    system.addForce(pairs)
    system.addForce(openmm.MonteCarloBarostat(1.0, 300, 5))
    part = list(range(98, 89, -1))  # the last atom of ethanol first
    options = {"device": "cuda", "isolated": True, "force_group": 1}
    adapter.add_force(system, potential, topology, part, **options)
    context = openmm.Context(system, openmm.VerletIntegrator(5e-5), platform, properties)
    pos = np.concatenate([one.positions for one in molecules])
    context.setPositions(pos / 10)
    context.setVelocitiesToTemperature(300, 1)

    def compare():
        state = context.getState(getPositions=True, getEnergy=True, getForces=True, groups={1})
        box = state.getPeriodicBoxVectors(asNumpy=True)._value * 10
        alone = Atoms(ethanol.symbols[::-1], state.getPositions(asNumpy=True)._value[part] * 10)
        delta = alone.positions - alone.positions[0]
        alone.positions -= np.round(delta @ np.linalg.inv(box)) @ box
        expected = exact(System.from_ase(alone))
        energy, forces = state.getPotentialEnergy()._value * KJ_MOL, state.getForces(asNumpy=True)._value * KJ_MOL / 10
        assert energy == pytest.approx(float(expected.energy), abs=ENERGY * len(alone))
        atol = 2e-4 if precision == "single" else FORCE
        np.testing.assert_allclose(forces[part], expected.forces.numpy(), atol=atol)
        assert not np.delete(forces, part, 0).any()

    compare()
    for _ in range(10):
        context.getIntegrator().step(60)
        compare()
    assert len(adapter._DIRECT) == 1
    state = context.getState(getPositions=True)
    good = state.getPositions(asNumpy=True)._value
    for shift, words in ((np.nan, r"particle 92 \(.\) is not finite"), (1.1, "longer than half of the shortest width")):
        bad = good.copy()
        bad[92, 0] += shift
        context.setPositions(bad)
        with pytest.raises(openmm.OpenMMException, match=words):
            context.getState(getForces=True, groups={1})
        context.setPositions(good)
        compare()


def test_domains_in_mixed_precision(potential, exact):
    """What LAMMPS evaluates, with periodic images as ghosts; the first step is checked."""
    from torchmdnet2.core.exchange import CopyExchange
    from torchmdnet2.engine.backends import choose_domain

    atoms = crystal()
    n, cell = len(atoms), atoms.cell.array
    shifts = np.array([s for s in np.ndindex(5, 5, 5) if s != (2, 2, 2)]) - 2
    images, owner = np.concatenate([atoms.positions + s @ cell for s in shifts]), np.tile(np.arange(n), len(shifts))
    near = np.linalg.norm(images[:, None] - atoms.positions, axis=2).min(1) < 5.0
    ids = np.concatenate([np.arange(n), owner[near]])
    expected, errors = exact(System.from_ase(atoms)).forces.numpy(), {}
    for precision in ("native", "mixed"):
        domain = choose_domain(copy.deepcopy(potential).to("cuda"), 0.0, precision)
        domain.set_atoms(atoms.numbers[ids], ids, n, CopyExchange(n, torch.from_numpy(owner[near])))
        found = domain(np.concatenate([atoms.positions, images[near]]))
        errors[precision] = np.abs(found.forces - expected).max()
    assert errors["native"] <= FORCE and errors["native"] < errors["mixed"] <= 5e-4


def test_mixed_precision_in_ase(potential, exact):
    atoms = crystal()
    found = TorchMDNet2Calculator(potential, device="cuda", precision="mixed").get_property("forces", atoms)
    error = np.abs(found - exact(System.from_ase(atoms)).forces.numpy()).max()
    assert 1e-6 < error <= 5e-4


def test_isolated_molecules(exact):
    """Made whole on the GPU as on the CPU, and with the energy in vacuum in ASE."""
    from torchmdnet2.adapters.isolated import isolate

    alone, cell = molecule("CH3CH2OH"), np.array([[17.0, 0, 0], [6.0, 16.0, 0], [-5.0, 7.0, 16.0]])
    frames = []
    for seed in range(3):
        images = np.random.default_rng(seed).integers(-2, 3, (len(alone), 3))
        frames.append(Atoms(alone.symbols, alone.positions + images @ cell, cell=cell, pbc=True))
    system = System.from_ase([*frames, alone])
    on_gpu, on_cpu = isolate(system.to("cuda")), isolate(system)
    torch.testing.assert_close(on_gpu.pos.cpu(), on_cpu.pos, rtol=0, atol=1e-12)
    assert not on_gpu.pbc.any() and not on_gpu.cell.any()
    calc = TorchMDNet2Calculator(exact, device="cuda", isolated=True)
    expected = float(exact(System.from_ase(alone)).energy)
    for atoms in frames:
        assert calc.get_property("energy", atoms) == pytest.approx(expected, abs=1e-7)
