"""Time `torchmdnet2 md` beside the Evaluator's own step, and measure the drift of a trained model.

    python scripts/bench_md.py [--systems FOLDER] [--water SIDES] [--model FILE --start FILE] [--output FILE]

"step" is a step of the Evaluator without an integrator (`Evaluator.bind`, float64 positions as in dynamics); the others
are whole runs of `run_md` with everything it writes. The timed model is untrained and its forces next to nothing: cold
atoms under it stay where they are, and a step takes as long as with any other weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ase.io import read
from bench_inference import MODEL, read_pdb, timed, water_box
from rich.console import Console

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.md import MDOptions, run_md

PDB = ("alanine_dipeptide", "chignolin")
COLD = 1e-4  # K


def bench(potential: Potential, name: str, system: System, seconds: float, every: int) -> list[dict[str, Any]]:
    """Rows of one system: the bare step, constant energy, Langevin."""
    device = potential.device
    bound = Evaluator(potential, graphs=True).bind(system.to(device, torch.float64))
    step = timed(bound.replay)["ms"]
    bound.check()
    del bound
    rows = [{"system": name, "atoms": system.num_atoms, "run": "step", "ms": step}]
    atoms = system.to(dtype=torch.float64).to_ase()[0]
    steps = max(2 * every, round(seconds / step * 1e3 / every) * every)
    for ensemble in ("nve", "nvt"):
        with tempfile.TemporaryDirectory() as folder:
            options = MDOptions(
                steps, timestep=1.0, ensemble=ensemble, temperature=COLD, every=every, output=f"{folder}/md"
            )
            began = time.perf_counter()
            result = run_md(potential, atoms, options, device=device)
            whole = time.perf_counter() - began
        ms = 86400 * 1e-6 * 1e3 / result.ns_per_day
        rows.append(
            {"system": name, "atoms": system.num_atoms, "run": ensemble, "ms": ms, "ratio": ms / step,
             "ns_per_day": result.ns_per_day, "steps": steps, "with_start_s": whole}
        )  # fmt: skip
    return rows


def bench_replicas(potential: Potential, system: System, count: int, every: int) -> dict[str, Any]:
    """Many copies side by side."""
    atoms = system.to(dtype=torch.float64).to_ase()[0]
    with tempfile.TemporaryDirectory() as folder:
        options = MDOptions(
            10 * every, timestep=1.0, ensemble="nvt", temperature=COLD, every=every, replicas=count,
            output=f"{folder}/md.dcd",
        )  # fmt: skip
        result = run_md(potential, atoms, options, device=potential.device)
    ms = 86400 * 1e-6 * 1e3 / result.ns_per_day
    return {"system": f"{count} x {system.num_atoms} atoms", "atoms": count * system.num_atoms, "run": "nvt", "ms": ms,
            "ns_per_day": result.ns_per_day}  # fmt: skip


def drift(model: str, start: str, device: str, picoseconds: float) -> list[dict[str, Any]]:
    """Constant energy and Langevin dynamics of a trained model at 300 K."""
    atoms = read(start, 0)
    rows = []
    for ensemble, timestep in (("nve", 0.5), ("nve", 1.0), ("nvt", 0.5)):
        with tempfile.TemporaryDirectory() as folder:
            options = MDOptions(
                round(picoseconds * 1000 / timestep),
                timestep=timestep,
                ensemble=ensemble,
                temperature=300.0,
                every=100,
                output=f"{folder}/md",
                minimize=True,
            )
            result = run_md(model, atoms, options, device=device, console=Console(width=150))
        mean = sum(row.temperature_K for row in result.rows) / len(result.rows)
        rows.append(
            {"system": Path(start).name, "atoms": len(atoms), "run": f"{ensemble}, {timestep:g} fs",
             "ms": 86400 * 1e-6 * timestep * 1e3 / result.ns_per_day, "ns_per_day": result.ns_per_day,
             "drift": result.drift, "temperature": mean, "ps": picoseconds}
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line per run."""
    lines = [f"{'system':<22} {'atoms':>7} {'run':<12} {'ms/step':>9} {'/ step':>7} {'ns/day':>8}"]
    for r in rows:
        ratio = f"{r['ratio']:.3f}" if "ratio" in r else ""
        speed = f"{r['ns_per_day']:.4g}" if "ns_per_day" in r else ""
        more = f"  drift {r['drift']:+.1e} eV/atom/ps, {r['temperature']:.0f} K" if "drift" in r else ""
        lines.append(f"{r['system']:<22} {r['atoms']:>7} {r['run']:<12} {r['ms']:>9.4f} {ratio:>7} {speed:>8}{more}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=Path, help="folder of PDB files: " + ", ".join(PDB))
    parser.add_argument("--water", default="7,15", help="molecules along each side")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timed run")
    parser.add_argument("--every", type=int, default=100, help="steps between frames")
    parser.add_argument("--replicas", type=int, default=256, help="of the smallest system; 0 leaves them out")
    parser.add_argument("--model", help="trained .tmn file, whose drift is measured")
    parser.add_argument("--start", help="structure for it")
    parser.add_argument("--time", type=float, default=10.0, help="ps for the drift")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()

    systems = {n: read_pdb(options.systems / f"{n}.pdb") for n in PDB} if options.systems else {}
    for side in (int(s) for s in options.water.split(",") if s):
        systems[f"water {3 * side**3}"] = water_box(side)
    torch.manual_seed(1)
    potential = Potential.from_config({"model": MODEL, "energy_scale": 1e-9}).eval().requires_grad_(False)
    potential = potential.to(options.device)
    rows: list[dict[str, Any]] = []
    for name, system in systems.items():
        rows += bench(potential, name, system, options.seconds, options.every)
        print(table(rows[-3:]), flush=True)
    if options.replicas and systems:
        rows.append(bench_replicas(potential, next(iter(systems.values())), options.replicas, options.every))
    if options.model:
        rows += drift(options.model, options.start, options.device, options.time)
    print(table(rows))
    if options.output:
        Path(options.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
