"""Time a step through ASE and OpenMM beside the Evaluator alone, on one GPU, and where the time goes.

    python scripts/bench_adapters.py --systems FOLDER_OF_PDB_FILES [--output FILE]

Each row is one system. "bound" is a step that stays on the device, and "call" is `evaluator(system)`; "copies" brings
positions in and results out without a step; "hand-over" is what the host does without a model (OpenMM: a step with a
PythonForce that returns zeros). TorchMD-Net's ASE calculator runs with the same weights where it is installed.
Random weights: atoms move by next to nothing in a step, so that the speed in ns/day is that of a time step of 1 fs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet
from bench_inference import MODEL, once, read_pdb, timed, water_box

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator

TINY = 1e-4  # fs, so that a network of random weights does not tear the structure apart


def moving(pos: np.ndarray) -> Callable[[], np.ndarray]:
    """Other positions at each call, near the given ones."""
    rng = np.random.default_rng(0)
    places = [pos + 1e-3 * rng.normal(size=pos.shape) for _ in range(8)]
    count = 0

    def next_one() -> np.ndarray:
        nonlocal count
        count += 1
        return places[count % len(places)]

    return next_one


def bench_evaluator(potential: Potential, system: System) -> dict[str, float]:
    """Milliseconds of a bound step, of a call, and of the copies around a step."""
    evaluator = Evaluator(potential)
    bound = evaluator.bind(system)
    host = bound.pos.cpu().pin_memory()

    def there_and_back() -> None:
        bound.pos.copy_(host, non_blocking=True)
        bound.fetch()

    def step() -> None:
        bound.replay()
        torch.cuda.current_stream().synchronize()

    places = [system.replace(pos=system.pos + 1e-3 * k) for k in range(8)]
    count = [0]

    def call() -> None:
        count[0] += 1
        evaluator(places[count[0] % 8])

    return {
        "bound": timed(bound.replay)["ms"],
        "bound + wait": timed(step)["ms"],
        "call": timed(call)["ms"],
        "copies": timed(there_and_back)["ms"],
    }


def bench_ase(calc: Any, atoms: Atoms) -> dict[str, float]:
    """Milliseconds of get_forces at new positions, and of a step of velocity Verlet."""
    atoms = atoms.copy()
    atoms.calc = calc
    place = moving(atoms.positions.copy())

    def forces() -> None:
        atoms.positions[:] = place()
        atoms.get_forces()

    _, first = once(forces)
    once(forces)
    alone = timed(forces)["ms"]
    atoms.set_momenta(np.zeros((len(atoms), 3)))
    dynamics = VelocityVerlet(atoms, timestep=TINY * units.fs)
    dynamics.run(3)
    step = timed(lambda: dynamics.run(1), seconds=0.2)["ms"]
    steps = max(20, min(2000, int(600 / step)))
    began = time.perf_counter()
    dynamics.run(steps)
    step = (time.perf_counter() - began) / steps * 1e3
    return {"calculator": alone, "verlet": step, "first s": first}


def bench_openmm(potential: Potential, atoms: Atoms, platform: str) -> dict[str, float]:
    """Milliseconds of an integrator's step: with the model, with a force of zeros, and inside our callable."""
    import openmm
    from openmm import app, unit

    from torchmdnet2.adapters.openmm import TorchMDNet2Energy, create_force

    topology = app.Topology()
    residue = topology.addResidue("ALL", topology.addChain())
    for number in atoms.numbers:
        topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
    if atoms.pbc.any():
        topology.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    inside = [0.0]
    evaluate = TorchMDNet2Energy.__call__

    def watched(self: Any, state: Any) -> Any:
        began = time.perf_counter()
        result = evaluate(self, state)
        inside[0] += time.perf_counter() - began
        return result

    class Zeros:
        def __call__(self, state: Any) -> Any:
            state.getPositions(asNumpy=True)
            return 0.0, np.zeros((len(atoms), 3))

    def run(force: Any) -> float:
        system = openmm.System()
        for _ in atoms:
            system.addParticle(1e6)
        if atoms.pbc.any():
            system.setDefaultPeriodicBoxVectors(*(atoms.cell.array / 10))
        system.addForce(force)
        integrator = openmm.VerletIntegrator(TINY * unit.femtosecond)
        context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName(platform))
        context.setPositions(atoms.positions / 10)
        integrator.step(5)
        inside[0] = 0.0
        began = time.perf_counter()
        integrator.step(20)
        steps = max(20, min(2000, int(20 * 0.6 / (time.perf_counter() - began))))
        inside[0] = 0.0
        began = time.perf_counter()
        integrator.step(steps)
        context.getState(getPositions=True)
        inside[0] /= steps / 1e3
        return (time.perf_counter() - began) / steps * 1e3

    zeros = run(openmm.PythonForce(Zeros()))
    TorchMDNet2Energy.__call__ = watched  # type: ignore[method-assign]
    try:
        total = run(create_force(potential, topology, device="cuda"))
    finally:
        TorchMDNet2Energy.__call__ = evaluate  # type: ignore[method-assign]
    return {"step": total, "in the callable": inside[0], "hand-over": zeros}


def bench_peer(potential: Potential, system: System, atoms: Atoms, folder: Path) -> dict[str, Any]:
    """TorchMD-Net's own ASE calculator on a checkpoint of the same weights; eager and compiled."""
    from torchmdnet.calculators import TMDNETCalculator

    from torchmdnet2.importers.export import export_checkpoint
    from torchmdnet2.neighbors import neighbor_list

    path = folder / "peer.ckpt"
    export_checkpoint(potential, path)
    atoms = atoms.copy()
    atoms.info["charge"] = 0  # it insists
    neighbors = int(torch.diff(neighbor_list(system, potential.cutoff).row_ptr).max()) + 2
    rows: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        try:
            calc = TMDNETCalculator(str(path), device="cuda", compile=compiled, max_num_neighbors=neighbors)
            rows[name] = bench_ase(calc, atoms)
        except Exception as error:  # of any kind: this is somebody else's program
            rows[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=Path, help="folder with alanine_dipeptide.pdb")
    parser.add_argument("--water", default="7,15", help="molecules along each side")
    parser.add_argument("--platforms", default="CUDA,CPU,Reference")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()

    systems = {f"water {3 * s**3}": water_box(s) for s in (int(s) for s in options.water.split(",") if s)}
    if options.systems:
        systems = {"alanine dipeptide": read_pdb(options.systems / "alanine_dipeptide.pdb"), **systems}
    torch.manual_seed(1)
    potential = Potential.from_config({"model": MODEL}).eval().requires_grad_(False).cuda()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    rows = []
    for name, system in systems.items():
        system = system.to("cuda", dtype=torch.float64)
        (atoms,) = system.to_ase()
        row: dict[str, Any] = {"system": name, "atoms": len(atoms), **bench_evaluator(potential, system)}
        row["ase"] = bench_ase(TorchMDNet2Calculator(potential, device="cuda"), atoms)
        if find_spec("openmm"):
            import openmm

            there = [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]
            for platform in (p for p in options.platforms.split(",") if p in there):
                row[f"openmm {platform}"] = bench_openmm(potential, atoms, platform)
        if find_spec("torchmdnet"):
            row["torchmd-net"] = bench_peer(potential, system, atoms, Path(options.output or ".").parent)
        rows.append(row)
        print(table(row), flush=True)
        if options.output:
            Path(options.output).write_text(json.dumps(rows, indent=1))


def table(row: dict[str, Any]) -> str:
    """What the measurements mean."""
    lines = [f"\n{row['system']}, {row['atoms']} atoms, milliseconds"]
    lines += [f"  {k:<14} {row[k]:.4f}" for k in ("bound", "bound + wait", "call", "copies")]
    ours, call = row["ase"]["calculator"], row["call"]
    lines.append(
        f"  ASE calculator {ours:.4f}: {ours - call:+.4f} ({ours / call:.2f}×) on a call, "
        f"{ours - row['bound']:+.4f} on a bound step; VelocityVerlet {row['ase']['verlet']:.4f}, "
        f"{speed(row['ase']['verlet'])}"
    )
    for name, value in row.items():
        if name.startswith("openmm"):
            inside, zeros = value["in the callable"], value["hand-over"]
            lines.append(
                f"  {name} {value['step']:.4f}, {speed(value['step'])}: in the callable {inside:.4f}, "
                f"OpenMM's own step and hand-over {zeros:.4f}"
            )
        if name == "torchmd-net":
            for mode, found in value.items():
                lines.append(f"  {name} {mode}: {found if isinstance(found, str) else speed(found['verlet'])} {found}")
    return "\n".join(lines)


def speed(milliseconds: float) -> str:
    """Of a step of 1 fs."""
    return f"{86.4 / milliseconds:.0f} ns/day"


if __name__ == "__main__":
    main()
