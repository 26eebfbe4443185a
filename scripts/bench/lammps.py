"""Time a step of LAMMPS with a model on water, on one process or on many.

    python -m scripts.bench lammps --atoms 3000 --processes 1,2 --threads 1

Starts itself under mpiexec once for each number of processes, with the same random TensorNet and the same box of water
at constant energy. Prints JSON: median ms of a step; mean ms of its parts (time of a process in the model,
and of it in new domains, lists of edges and evaluations; the rest of the step is LAMMPS); atoms and ghosts
of the largest domain, edges, the speed-up over the first number of processes, memory of a GPU; for one process also the
Evaluator's step on the same atoms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from .harness import again, save_rows, shared

MARK = "RESULT "


def water(num_atoms: int):
    from ase import Atoms
    from ase.build import molecule
    from scipy.spatial.transform import Rotation

    count = max(1, round(num_atoms / 3))
    side = int(np.ceil(count ** (1 / 3)))
    spacing = (count * 29.9) ** (1 / 3) / side
    one = molecule("H2O")
    turns = Rotation.random(count, np.random.default_rng(0)).as_matrix()
    places = np.indices((side, side, side)).reshape(3, -1).T[:count, None] * spacing
    pos = (places + one.positions @ turns).reshape(-1, 3)
    box = Atoms(np.tile(one.numbers, count), positions=pos, cell=np.eye(3) * side * spacing, pbc=True)
    box.wrap()
    return box


def model(channels: int, dtype: str):
    import torch

    from torchmdnet2 import Potential

    torch.manual_seed(0)
    config = {"name": "tensornet", "hidden_channels": channels, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0}
    potential = Potential.from_config({"model": config, "elements": [1, 8], "energy_scale": 0.01})
    return potential.to(getattr(torch, dtype)).eval()


class Watch:
    """Measures the seconds that methods of objects take."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def watch(self, owner: object, method: str, name: str) -> None:
        run = getattr(owner, method)
        self.seconds[name] = 0.0

        def timed(*given):
            start = time.perf_counter()
            found = run(*given)
            self.seconds[name] += time.perf_counter() - start
            return found

        setattr(owner, method, timed)


def worker(options: argparse.Namespace) -> None:
    from mpi4py import MPI  # isort: skip
    import lammps
    import torch

    from torchmdnet2 import Evaluator, System
    from torchmdnet2.adapters.lammps import attach, local_process

    torch.set_num_threads(options.threads)
    comm, box, potential = MPI.COMM_WORLD, water(options.atoms), model(options.channels, options.dtype)
    place = local_process()[0]
    device = f"cuda:{place % torch.cuda.device_count()}" if options.device == "cuda" else "cpu"
    lmp = lammps.lammps(cmdargs=["-screen", "none", "-log", "none"], comm=comm)
    a, b, c = box.cell.lengths()
    lmp.commands_list([
        "units metal", "atom_style atomic", f"region box block 0 {a} 0 {b} 0 {c}", "create_box 2 box", "mass 1 1.008",
        "mass 2 15.999", "neighbor 1.0 bin",
    ])  # fmt: skip
    types = [{"H": 1, "O": 2}[s] for s in box.get_chemical_symbols()]
    lmp.create_atoms(len(box), list(range(1, len(box) + 1)), types, box.positions.ravel().tolist())
    attached = attach(lmp, potential, ["H", "O"], device=device)
    lmp.commands_list(["velocity all create 300 1 loop geom", "timestep 0.0005", "fix move all nve", "run 5"])
    times, watch = [], Watch()
    for owner, method, name in (
        (attached, "_compute", "model"), (attached, "_take_atoms", "new domains"),
        (attached.domain, "_list", "lists"), (attached.domain, "_evaluate", "evaluations"),
    ):  # fmt: skip
        watch.watch(owner, method, name)
    calls = attached.calls
    for _ in range(options.groups):
        comm.Barrier()
        start = time.perf_counter()
        lmp.command(f"run {options.steps} post no")
        comm.Barrier()
        # a run starts with a separate evaluation
        times.append((time.perf_counter() - start) / (options.steps + 1) * 1e3)
    ghosts, calls = attached._exchange.num_ghosts, attached.calls - calls
    facts = {
        "processes": comm.size, "threads": options.threads, "atoms": len(box), "path": attached.report(),
        "step_ms": statistics.median(times), "parts_ms": times,
        "local_atoms": comm.allreduce(attached.domain.num_local, MPI.MAX), "ghosts": comm.allreduce(ghosts, MPI.MAX),
        "edges": comm.allreduce(attached.domain.num_edges, MPI.MAX),
        "mean_parts_ms": {name: total / calls * 1e3 for name, total in watch.seconds.items()},
    }  # fmt: skip
    if options.device == "cuda":
        facts["memory_gb"] = comm.allreduce(torch.cuda.max_memory_allocated(device) / 1e9, MPI.MAX)
    if comm.size == 1 and not options.alone:
        evaluator, system = Evaluator(potential.to(device)), System.from_ase(box).to(device)
        evaluator(system), evaluator(system)
        alone = []
        for _ in range(options.groups):
            start = time.perf_counter()
            for _ in range(options.steps):
                evaluator(system).energy.item()
            alone.append((time.perf_counter() - start) / options.steps * 1e3)
        facts["evaluator_ms"] = statistics.median(alone)
    if comm.rank == 0:
        print(MARK + json.dumps(facts), flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--atoms", type=int, default=3000)
    parser.add_argument("--weak", action="store_true", help="--atoms are those of each process")
    parser.add_argument("--processes", default="1,2")
    shared(parser, device="cpu", threads=1, channels=64, output=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--groups", type=int, default=5, help="of --steps steps; the median counts")
    parser.add_argument("--alone", action="store_true", help="do not time the Evaluator")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.worker:
        worker(options)
        return
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    mpiexec = os.environ.get("MPIEXEC") or beside or shutil.which("mpiexec")
    results = []
    for processes in map(int, options.processes.split(",")):
        atoms = options.atoms * (processes if options.weak else 1)
        keep = ("threads", "channels", "dtype", "device", "steps", "groups")
        arguments = [word for name in keep for word in (f"--{name}", str(getattr(options, name)))]
        arguments += ["--alone"] * options.alone
        command = [mpiexec, "-n", str(processes), *again("lammps", "--worker", "--atoms", atoms, *arguments)]
        environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "OMP_NUM_THREADS": str(options.threads)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
        results.append(json.loads(line.removeprefix(MARK)))
        work = results[-1]["atoms"] / results[0]["atoms"]
        results[-1]["speed_up"] = results[0]["step_ms"] / results[-1]["step_ms"] * work
        print(json.dumps(results[-1]), flush=True)
    save_rows(options.output, results)
