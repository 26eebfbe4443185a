"""Adapters change nothing global (bar R28), and threads may share what they hold (bar R29)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from test_safety import STATE, run

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save

NEEDS_OPENMM = pytest.mark.skipif(find_spec("openmm") is None, reason="openmm is not installed")

HOSTS = {
    "ase": """
    torch.set_num_threads(1)  # fewer than there are, so that a change would show
    import ase.build, ase.calculators.calculator, ase.stress
    before = state()
    from torchmdnet2.adapters.ase import TorchMDNet2Calculator
    from torchmdnet2.adapters.ase import CommitteeCalculator
    imported = state()
    atoms = ase.build.molecule("CH3CH2OH")
    atoms.center(3.0)
    for calc in (TorchMDNet2Calculator(MODEL, dtype="float32"), CommitteeCalculator([MODEL, MODEL])):
        atoms.calc = calc
        atoms.get_forces(), atoms.get_stress(), list(calc.evaluate([atoms, atoms]))
        atoms.positions[0, 0] = np.nan
        try:
            atoms.get_forces()
        except ValueError:
            atoms.positions[0, 0] = 1.0
    """,
    "openmm": """
    torch.set_num_threads(1)
    import openmm, openmm.app, openmm.unit
    before = state()
    from torchmdnet2.adapters.openmm import create_force
    imported = state()
    topology, system = openmm.app.Topology(), openmm.System()
    residue = topology.addResidue("MOL", topology.addChain())
    for symbol in ("O", "H", "H"):
        topology.addAtom(symbol, openmm.app.Element.getBySymbol(symbol), residue)
        system.addParticle(1.0)
    system.addForce(create_force(MODEL, topology, dtype="float32"))
    context = openmm.Context(system, openmm.VerletIntegrator(1e-4), openmm.Platform.getPlatformByName("CPU"))
    context.setPositions(np.array([[0, 0, 0], [0.096, 0, 0], [-0.024, 0.093, 0]]))
    context.getIntegrator().step(3)
    openmm.LocalEnergyMinimizer.minimize(context, maxIterations=3)
    """,
}


@pytest.mark.parametrize("host", ["ase", pytest.param("openmm", marks=NEEDS_OPENMM)])
def test_r28_no_global_effects(potential, tmp_path, host):
    """With a model that runs on compiled kernels."""
    config = {**potential.config, "model": {**potential.config["model"], "hidden_channels": 32}}
    with torch.random.fork_rng(devices=[]):
        save(Potential.from_config(config), tmp_path / "model.tmn")
    code = STATE + HOSTS[host].replace("MODEL", repr(str(tmp_path / "model.tmn")))
    seen = run(code + "\n    print(json.dumps([before, imported, state()]))\n")
    assert seen[0] == seen[1] == seen[2]


@NEEDS_OPENMM
@pytest.mark.parametrize("shared", ["force", "potential"])
def test_r29_eight_threads_through_openmm(potential, shared):
    """Contexts of one System, or of Systems with one Potential, give what they give one after another."""
    from openmm_cases import boxed, context_of, evaluate, ml_system

    frames = []
    for k in range(8):
        atoms = boxed("triclinic")
        atoms.rattle(0.05, seed=k)
        frames.append(atoms)
    one = ml_system(potential, frames[0])
    expected = [evaluate(context_of(one, atoms)) for atoms in frames]

    def work(atoms):
        return evaluate(context_of(one if shared == "force" else ml_system(potential, atoms), atoms))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, frames * 2))
    for (energy, forces), (e, f) in zip(found, expected * 2, strict=True):
        assert energy == e and np.array_equal(forces, f)
