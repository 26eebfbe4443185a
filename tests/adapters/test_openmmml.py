"""The openmm-ml plug-in (bar R27)."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms

openmm = pytest.importorskip("openmm")
from openmm import app, unit  # noqa: E402
from openmm_cases import KJ_MOL, boxed, context_of, ethanol, evaluate, topology_of  # noqa: E402

from torchmdnet2 import Potential, System  # noqa: E402
from torchmdnet2.checkpoint import save  # noqa: E402

ROOT = Path(__file__).parents[2]


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
    with pytest.raises(TypeError, match="unknown argument 'spin', did you mean 'multiplicity'"):
        ml_potential.createSystem(topology_of(ethanol()), spin=3)  # its name elsewhere; it was ignored
    for name, words in [
        ("periodic", "where the topology or the System has a box"),
        ("nonbondedMethod", "known: charge"),
        ("forceGroup", "call setForceGroup"),
    ]:
        with pytest.raises(TypeError, match=f"unknown argument '{name}'.*{words}"):
            ml_potential.createSystem(topology_of(ethanol()), **{name: False})
    with pytest.raises(ValueError, match="modelPath"):
        openmmml.MLPotential("torchmdnet2")
    with pytest.raises(ValueError, match="model_path"):
        openmmml.MLPotential("torchmdnet2", modelPath=model_file, model_path="x")
    with pytest.raises(ValueError, match="float32 or float64"):
        ml_potential.createSystem(topology_of(ethanol()), precision="half")
    with pytest.raises(ValueError, match="precision='mixed': there are kernels for a GPU only"):
        ml_potential.createSystem(topology_of(ethanol()), precision="mixed", device="cpu")
    assert ml_potential._impl.getMLLongRange() is False


@pytest.mark.parametrize("method", ["ewald", "pme", "reaction_field"])
def test_plugin_says_whether_images_are_summed_over(method, tmp_path):
    pytest.importorskip("openmmml")
    from torchmdnet2.adapters.openmmml import TorchMDNet2Impl

    charges = {"name": "coulomb", "charges": {"H": 0.4, "O": -0.8}, "method": method, "cutoff": 4.0}
    model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0}
    base = {"model": model, "priors": [charges], "elements": [1, 8]}
    above = {"model": model, "priors": [{"name": "baseline", "potential": base}], "elements": [1, 8]}
    neither = {"model": model, "head": None, "priors": None, "elements": [1, 8]}
    for config, expected in ((base, method != "reaction_field"), (above, method != "reaction_field"), (neither, False)):
        save(Potential.from_config(config), tmp_path / "model.tmn")
        assert TorchMDNet2Impl(tmp_path / "model.tmn").getMLLongRange() is expected


def test_imported_before_openmm_ml(plugin_folder):
    """openmm-ml then asks for the factory while the module is still being imported."""
    pytest.importorskip("openmmml")
    code = (
        "import torchmdnet2.adapters.openmmml as ours\n"
        "from openmmml import MLPotential\n"
        "assert isinstance(MLPotential('torchmdnet2', modelPath='x.tmn')._impl, ours.TorchMDNet2Impl)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(plugin_folder), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


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
