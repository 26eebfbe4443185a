"""Time a step through ASE and OpenMM, compare it with the Evaluator alone on one GPU, and show where the time goes.

    python -m scripts.bench adapters --systems FOLDER_OF_PDB_FILES [--minutes 5] [--output FILE]

Each row is one system. "bound" is a step that stays on the device, and "call" is `evaluator(system)`; "copies" brings
positions in and results out without a step; "hand-over" is what the host does without a model (OpenMM: a step with a
PythonForce that returns zeros). "openmm CUDA shared" has one CUDA context for OpenMM and PyTorch; "springs" too, with
multiple time steps: 4 inner steps by springs in a step of the model. "openmm CUDA plugin" has the plugin of
`build_plugin()`. With OpenMM, the largest difference of the forces from those of the Evaluator at the same positions is
in eV/Å. TorchMD-Net's ASE calculator runs with the same weights where it is installed, eager and compiled. Each program
runs in a separate process. Weights are random and atoms hardly move in a step. The speed in ns/day is that of a time
step of 1 fs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.verlet import VelocityVerlet

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator

from .harness import Row, attempt, over, run_parts, shared
from .systems import MODEL, once, read_pdb, sides, synchronize, timed, water_box

TINY = 1e-4  # fs, so that a network of random weights does not tear the structure apart
PARTS = (
    "evaluator",
    "ase",
    "torchmd-net eager",
    "torchmd-net compiled",
    "openmm CUDA",
    "openmm CUDA shared",
    "openmm CUDA springs",
    "openmm CUDA plugin",
    "openmm Reference",
    "openmm CPU",
)


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
    host = bound.pos.cpu()
    host = host.pin_memory() if bound.pos.is_cuda else host

    def there_and_back() -> None:
        bound.pos.copy_(host, non_blocking=True)
        bound.fetch()

    def step() -> None:
        bound.replay()
        synchronize()

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
    """Milliseconds of an integrator's step: with the model, with a force of zeros, and inside our callable.

    Args:
        platform: its name; "CUDA shared", "CUDA springs" and "CUDA plugin" see above.
    """
    import openmm
    from openmm import app, unit

    from torchmdnet2.adapters.openmm import DirectCalls, TorchMDNet2Energy, create_force, share_context, use_plugin
    from torchmdnet2.md.springs import add_springs
    from torchmdnet2.units import KJ_MOL

    platform, _, way = platform.partition(" ")
    if way == "plugin":
        use_plugin(platform)
    else:
        os.environ["TORCHMDNET2_OPENMM_PLUGIN"] = ""
        if way:
            share_context()
    topology = app.Topology()
    residue = topology.addResidue("ALL", topology.addChain())
    for number in atoms.numbers:
        topology.addAtom("X", app.Element.getByAtomicNumber(int(number)), residue)
    if atoms.pbc.any():
        topology.setPeriodicBoxVectors(atoms.cell.array * unit.angstrom)
    inside, calls = [0.0], [0]
    kind, name = (DirectCalls, "_evaluate") if way == "plugin" else (TorchMDNet2Energy, "__call__")
    evaluate = getattr(kind, name)

    def watched(*given: Any) -> Any:
        began = time.perf_counter()
        result = evaluate(*given)
        inside[0] += time.perf_counter() - began
        calls[0] += 1
        return result

    nothing = np.zeros((len(atoms), 3))

    def run(force: Any) -> tuple[float, np.ndarray, np.ndarray]:
        system = openmm.System()
        for _ in atoms:
            system.addParticle(1e6)
        if atoms.pbc.any():
            system.setDefaultPeriodicBoxVectors(*(atoms.cell.array / 10))
        system.addForce(force)
        integrator = openmm.VerletIntegrator(TINY * unit.femtosecond)
        if way == "springs":
            add_springs(system, potential, topology, atoms.positions / 10, device=str(potential.device))
            integrator = openmm.MTSIntegrator(TINY * unit.femtosecond, [(0, 1), (1, 4)])
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
        milliseconds = (time.perf_counter() - began) / steps * 1e3
        inside[0] /= steps / 1e3
        state = context.getState(getPositions=True, getForces=True)
        forces = state.getForces(asNumpy=True)._value * (KJ_MOL / 10)
        return milliseconds, state.getPositions(asNumpy=True)._value * 10, forces

    zeros, _, _ = run(openmm.PythonForce(lambda state: (0.0, nothing)))
    setattr(kind, name, watched)
    try:
        total, pos, forces = run(create_force(potential, topology, device=str(potential.device)))
    finally:
        setattr(kind, name, evaluate)
    if not calls[0]:
        raise RuntimeError("the model was not evaluated in this way")
    there = atoms.copy()
    there.positions = pos
    exact = Evaluator(potential)(System.from_ase(there).to(potential.device)).forces
    off = float(np.abs(forces - exact.cpu().numpy()).max())
    return {"step": total, "in the callable": inside[0], "hand-over": zeros, "forces off": off}


def bench_peer(potential: Potential, system: System, atoms: Atoms, compiled: bool) -> Row:
    """TorchMD-Net's ASE calculator on a checkpoint of the same weights."""
    from torchmdnet.calculators import TMDNETCalculator

    from torchmdnet2.importers.torchmd_net import export_checkpoint
    from torchmdnet2.neighbors import neighbor_list

    atoms = atoms.copy()
    atoms.info["charge"] = 0  # it insists
    neighbors = int(torch.diff(neighbor_list(system, potential.cutoff).row_ptr).max()) + 2
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/peer.ckpt"
        export_checkpoint(potential, path)
        calc = TMDNETCalculator(path, device=str(potential.device), compile=compiled, max_num_neighbors=neighbors)
        return bench_ase(calc, atoms)


def systems_of(options: argparse.Namespace) -> dict[str, System]:
    """By name, the smallest first."""
    systems = {f"water {3 * s**3}": water_box(s) for s in sides(options.water)}
    if options.systems:
        systems = {"alanine dipeptide": read_pdb(options.systems / "alanine_dipeptide.pdb"), **systems}
    return systems


def run_part(options: argparse.Namespace) -> None:
    """Rows of one program, over systems."""
    torch.manual_seed(1)
    potential = Potential.from_config({"model": MODEL}).eval().requires_grad_(False).to(options.device)
    program, _, kind = options.part.partition(" ")
    if program == "openmm":
        import openmm

        there = [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]
        if kind.split()[0] not in there:
            raise SystemExit(f"OpenMM has no {kind.split()[0]} platform here, only {', '.join(there)}")
    for name, system in systems_of(options).items():
        system = system.to(options.device, dtype=torch.float64)
        (atoms,) = system.to_ase()
        measure: dict[str, Callable[[], Row]] = {
            "evaluator": lambda s=system: bench_evaluator(potential, s),  # type: ignore[misc]
            "ase": lambda a=atoms: bench_ase(TorchMDNet2Calculator(potential, device=options.device), a),  # type: ignore[misc]
            "openmm": lambda a=atoms: bench_openmm(potential, a, kind),  # type: ignore[misc]
            "torchmd-net": lambda s=system, a=atoms: bench_peer(potential, s, a, kind == "compiled"),  # type: ignore[misc]
        }
        if not over(options):
            attempt({"system": name, "atoms": len(atoms)}, measure[program])


def table(rows: list[Row]) -> str:
    """Print the results by system."""
    lines = []
    for name in dict.fromkeys(r["system"] for r in rows if "system" in r):
        of = {r["part"]: r for r in rows if r.get("system") == name}
        lines.append(f"\n{name}, {next(iter(of.values()))['atoms']} atoms, milliseconds")
        alone, ase = of.get("evaluator", {}), of.get("ase", {})
        if "call" in alone:
            lines.append(
                "  evaluator: " + ", ".join(f"{k} {alone[k]:.4f}" for k in ("bound", "bound + wait", "call", "copies"))
            )
        if "calculator" in ase and "call" in alone:
            ours, call, bound = ase["calculator"], alone["call"], alone["bound"]
            on_call = f"{ours - call:+.4f} ({ours / call:.2f}×) on a call"
            lines.append(f"  ASE calculator: {on_call}, {ours - bound:+.4f} on a bound step")
        lines += [f"  {part}: {line(row)}" for part, row in of.items() if part != "evaluator"]
        peers = [r["calculator"] for part, r in of.items() if part.startswith("torchmd-net") and "calculator" in r]
        if peers and "calculator" in ase:
            lines.append(f"  TorchMD-Net's calculator, the faster, over ours: {min(peers) / ase['calculator']:.1f}×")
    return "\n".join(lines)


def line(row: Row) -> str:
    """A row as readable text."""
    if "calculator" in row:
        values = f"{row['calculator']:.4f}, VelocityVerlet {row['verlet']:.4f}, {speed(row['verlet'])}"
        return f"{values}, first {row['first s']:.1f} s"
    if "step" in row:
        own = f"in the callable {row['in the callable']:.4f}, OpenMM's step and hand-over {row['hand-over']:.4f}"
        return f"{row['step']:.4f}, {speed(row['step'])}: {own}; forces off by {row['forces off']:.1e} eV/Å"
    return row.get("error") or ", ".join(f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float))


def speed(milliseconds: float) -> str:
    """Simulated time per day with steps of 1 fs."""
    return f"{86.4 / milliseconds:.0f} ns/day"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, device="cuda", systems=None, water="7,15", minutes=5.0, output=None, parts=PARTS)


def main(options: argparse.Namespace) -> None:
    if options.part:
        run_part(options)
        return
    rows = run_parts(options, {"model": MODEL}, lambda r: f"{r['part']:<22} {r.get('system', ''):<20} {line(r)}")
    print(table(rows))
