"""Time energy and forces of TensorNet on the CPU: the Evaluator, the Potential and, when it is installed, TorchMD-Net.

    python scripts/bench_cpu.py [--systems FOLDER] [--threads 2] [--repeats 7] [--no-potential]

FOLDER holds alanine_dipeptide.pdb and chignolin.pdb; the water box of 1,029 atoms is made here. Each step is whole:
neighbor search, energy, forces. The programs take turns, so that what else runs on the machine meets all of them.
Errors are the largest of any force component against the Potential in float64.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_inference import MODEL, read_pdb, water_box

from torchmdnet2 import Evaluator, Potential, System


def peer(atoms: System) -> Callable[[], Any] | None:
    """A step of TorchMD-Net with random weights of the same shapes, eager; None when it is not installed."""
    try:
        from torchmdnet.models.model import create_model
    except ImportError as error:
        print(f"TorchMD-Net is left out: {error}")
        return None
    neighbors = int(torch.diff(_neighbors(atoms).row_ptr).max()) + 2
    model = create_model(
        {
            "activation": "silu", "aggr": "add", "cutoff_lower": 0.0, "cutoff_upper": MODEL["cutoff"],
            "derivative": False, "embedding_dimension": MODEL["hidden_channels"],
            "equivariance_invariance_group": "O(3)", "max_num_neighbors": neighbors, "max_z": 128,
            "model": "tensornet", "num_layers": MODEL["num_layers"], "num_rbf": MODEL["num_rbf"],
            "output_model": "Scalar", "precision": 32, "prior_model": None, "rbf_type": "expnorm", "reduce_op": "add",
            "trainable_rbf": False, "box_vecs": None, "charge": False, "spin": False, "static_shapes": False,
            "prior_args": None, "atom_filter": -1, "q_dim": 16, "output_mlp_num_layers": 0, "dropout": 0.0,
            "vector_cutoff": False, "check_errors": False,
        }
    ).eval()  # fmt: skip
    for p in model.parameters():
        p.requires_grad_(False)
    box = atoms.cell[0] if bool(atoms.pbc.any()) else None

    def step() -> Any:
        pos = atoms.pos.clone().requires_grad_(True)
        energy, _ = model(atoms.z, pos, atoms.batch, box=box)
        return torch.autograd.grad(energy.sum(), pos)

    return step


def _neighbors(atoms: System) -> Any:
    from torchmdnet2.neighbors import neighbor_list

    return neighbor_list(atoms, float(MODEL["cutoff"]))  # type: ignore[arg-type]


def milliseconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=Path, default=Path("systems"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-potential", action="store_true", help="leave out the Potential, which is slow")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    potential = Potential.from_config({"model": MODEL}).eval()
    evaluator = Evaluator(potential)
    files = [options.systems / f"{name}.pdb" for name in ("alanine_dipeptide", "chignolin")]
    systems = {file.stem: read_pdb(file) for file in files if file.exists()}
    systems["water"] = water_box(7)

    print("system, atoms: program, first call s, median ms, minimum ms")
    for name, atoms in systems.items():
        steps: dict[str, Callable[[], Any] | None] = {"Evaluator": lambda atoms=atoms: evaluator(atoms)}  # type: ignore[misc]
        if not options.no_potential:
            steps["Potential"] = lambda atoms=atoms: potential(atoms)  # type: ignore[misc]
        steps["TorchMD-Net"] = peer(atoms)
        known = {program: step for program, step in steps.items() if step is not None}
        first = {program: milliseconds(step) / 1e3 for program, step in known.items()}
        times: dict[str, list[float]] = {program: [] for program in known}
        for _ in range(options.repeats):
            for program, step in known.items():
                step()  # with its own data in the cache
                times[program].append(milliseconds(step))
        for program, values in times.items():
            row = f"{first[program]:.1f}, {statistics.median(values):.1f}, {min(values):.1f}"
            print(f"{name}, {atoms.num_atoms}: {program}, {row}", flush=True)
        if "TorchMD-Net" in times:
            median, least = (f(times["TorchMD-Net"]) / f(times["Evaluator"]) for f in (statistics.median, min))
            print(f"  TorchMD-Net / Evaluator: {median:.1f} by medians, {least:.1f} by minima")
        exact = copy.deepcopy(potential).double()(atoms.to(dtype=torch.float64))
        for program, model in (("Evaluator", evaluator), ("Potential", potential)):
            result = model(atoms)
            force = float((result.forces.double() - exact.forces).abs().max())
            energy = float((result.energy - exact.energy).abs() / exact.energy.abs())
            size = float(exact.forces.abs().max())
            print(f"  {program}: force error {force:.1e} of {size:.2g} eV/Å, energy {energy:.1e}")
    print(evaluator.report())


if __name__ == "__main__":
    main()
