"""A trained model on the compiled kernels conserves the energy in LAMMPS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import read

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
pytest.importorskip("numba")
from lammps_cases import ROOT, mpiexec

from torchmdnet2 import Potential, System
from torchmdnet2.checkpoint import save

SCRIPT = """
units metal
atom_style atomic
read_data start.data
velocity all create 300 7 loop geom
timestep 0.0002
fix move all nve
thermo 25
thermo_style custom step time temp pe etotal
thermo_modify format float %20.12f
run 5100
"""


def trained() -> Potential:
    """Fitted to forces on ethanol, for a minute."""
    frames = read(ROOT / "examples" / "data" / "ethanol_gfn2.xyz", ":120")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 16, "cutoff": 4.0}
        potential = Potential.from_config({"model": config, "elements": [1, 6, 8], "energy_scale": 2.0})
        optimizer = torch.optim.Adam(potential.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        forces = torch.tensor(np.array([f.get_forces() for f in frames]), dtype=torch.float32)
        for _ in range(400):
            chosen = torch.randperm(len(frames))[:8]
            result = potential.train()(System.from_ase([frames[k] for k in chosen]))
            loss = (result.forces.float() - forces[chosen].flatten(0, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    assert float(loss.detach()) < 0.1 * float(forces.square().mean())
    return potential.eval()


@pytest.mark.long
def test_drift_on_two_processes(tmp_path, monkeypatch):
    """1 ps of four molecules in float32: at most 1e-5 eV per atom and ps."""
    monkeypatch.chdir(tmp_path)
    save(trained(), "model.tmn")
    one = read(ROOT / "examples" / "data" / "ethanol_gfn2.xyz", "0")
    box = Atoms(cell=[14, 14, 7], pbc=True)
    for place in ((2, 2, 3), (9, 2, 3), (2, 9, 3), (9, 9, 3)):
        other = one.copy()
        other.positions += np.array(place) - other.positions.mean(0)
        box += other
    box.write("start.data", format="lammps-data", specorder=["H", "C", "O"], masses=True)
    Path("in.script").write_text(SCRIPT)
    command = ["-m", "torchmdnet2", "lammps", "model.tmn", "in.script", "--elements", "H,C,O"]
    done = mpiexec(2, *command, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiled TensorNet kernels" in done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    table = np.array([[float(x) for x in row] for row in rows if len(row) == 5])
    time, temperature, total = table[:, 1], table[:, 2], table[:, 4] / len(box)
    assert len(table) == 205 and temperature.min() > 30
    drift = np.polyfit(time, total, 1)[0]
    assert abs(drift) <= 1e-5, f"{drift:.2g} eV/atom/ps"
    assert np.ptp(total) <= 1e-4
