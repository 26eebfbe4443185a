"""Run under mpiexec: cases that test_lammps.py asks for, results to a file.

python lammps_worker.py MODEL OUTPUT case case …

On the GPUs of the host, one after the other, where the environment has LAMMPS_DEVICE=cuda.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from lammps_cases import CASES, CONSTANT_PRESSURE, GAS, lammps_of
from mpi4py import MPI

from torchmdnet2 import load
from torchmdnet2.adapters.lammps import attach

torch.set_num_threads(1)
DEVICE = os.environ.get("LAMMPS_DEVICE", "cpu")
if DEVICE == "cuda":
    DEVICE = f"cuda:{MPI.COMM_WORLD.rank % torch.cuda.device_count()}"


def gathered(lmp: Any) -> dict[str, Any]:
    """Positions and forces by identifier, numbers of LAMMPS, per-atom sums."""
    n = lmp.get_natoms()

    facts = {"pos": np.array(lmp.gather_atoms("x", 1, 3)).reshape(n, 3)}
    facts["forces"] = np.array(lmp.gather_atoms("f", 1, 3)).reshape(n, 3)
    for name in ("pe", "etotal", "press", "pxx", "pyy", "pzz", "pxy", "pxz", "pyz", "vol", "step", "temp"):
        facts[name] = lmp.get_thermo(name)
    return facts


def single_point(lmp: Any, case: dict[str, Any], model: Any) -> dict[str, Any]:
    attached = attach(lmp, model, case["elements"], case.get("charge", 0.0), DEVICE)
    lmp.commands_list(["compute energies all pe/atom", "compute virials all stress/atom NULL virial"])
    lmp.commands_list(
        ["compute sums all reduce sum c_energies c_virials[1] c_virials[4]", "fix keep all ave/time 1 1 1 c_sums[*]"]
    )
    lmp.command("run 0")
    facts = gathered(lmp)
    sizes = MPI.COMM_WORLD.allgather(attached.domain.num_local)
    sums = [lmp.extract_fix("keep", 0, 1, k) for k in range(3)]
    return {**facts, "sums": np.array(sums), "sizes": np.array(sizes), "report": attached.report()}


def moved(lmp: Any, case: dict[str, Any], model: Any) -> dict[str, Any]:
    """A trajectory: last positions, energies on the way, and how many atoms changed their process."""
    attach(lmp, model, case["elements"], device=DEVICE)
    lmp.commands_list(case["commands"])
    energies, owners, exchanged = [], None, 0
    for _ in range(case["parts"]):
        lmp.command(f"run {case['steps']}")
        energies.append(lmp.get_thermo("etotal") / lmp.get_natoms())
        ids = lmp.numpy.extract_atom("id").ravel()[: lmp.extract_setting("nlocal")]
        here = set(ids.tolist())
        exchanged += MPI.COMM_WORLD.allreduce(0 if owners is None else len(here - owners))
        owners = here
    image = np.array(lmp.gather_atoms("image", 0, 3)).reshape(-1, 3)
    return {**gathered(lmp), "energies": np.array(energies), "exchanged": exchanged, "image": image}


def main(model_file: str, output: str, *names: str) -> None:
    found: dict[str, Any] = {}
    model = load(model_file)
    for name in names:
        case = {**CASES, **GAS, **CONSTANT_PRESSURE}[name]
        lmp = lammps_of(case)
        facts = (moved if "commands" in case else single_point)(lmp, case, model)
        found.update({f"{name}/{key}": value for key, value in facts.items()})
        lmp.close()
    if MPI.COMM_WORLD.rank == 0:
        np.savez(output, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
