"""Time `torchmdnet2 md`, compare it with a step of the Evaluator, and measure the drift of a trained model.

    python -m scripts.bench md --systems FOLDER [--model FILE --start FILE] [--minutes 5] [--output FILE]
    python -m scripts.bench md --systems FOLDER --device cpu --parts systems --water "" --channels 32 --layers 1

"step" is a step of the Evaluator without an integrator (`Evaluator.bind`, float64 positions as in dynamics); the others
are whole runs of `run_md` with everything it writes. The timed model is untrained and its forces are tiny: cold
atoms hardly move, and a step takes as long as with any other weights. On the CPU times are processor
time on one thread, and the bare step is timed after every block of steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ase.io import read
from rich.console import Console

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.bound import BoundStep
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.integrators import State
from torchmdnet2.md.output import TableRow
from torchmdnet2.md.run import Simulation

from .harness import ROOT, attempt, over, run_parts, say, shared
from .systems import MODEL, read_pdb, sides, timed, water_box

PDB = ("alanine_dipeptide", "chignolin")
ETHANOL = ROOT / "examples/data/ethanol_gfn2.xyz"
COLD = 1e-4  # K
PARTS = ("systems", "drift", "replicas")


class TimedSimulation(Simulation):
    """Times as many bare steps after every block of steps, so that other work on the machine slows both.

    Attributes:
        blocks, bare: processor time in s; that of blocks includes writing of files.
    """

    def run_beside(self, bound: BoundStep) -> None:
        self.bound, self.blocks, self.bare = bound, 0.0, 0.0
        self.run()

    def _advance(self) -> None:
        self.since, self.known = time.process_time(), self.state.step
        super()._advance()

    def _keep(self, state: State, rows: list[TableRow]) -> None:
        super()._keep(state, rows)
        now = time.process_time()
        self.blocks += now - self.since
        for _ in range(state.step - self.known):
            self.bound.replay()
        self.since, self.known = time.process_time(), state.step
        self.bare += self.since - now


def bench_cpu(potential: Potential, name: str, system: System, options: argparse.Namespace) -> None:
    """As `bench`, for a shared machine."""
    known = {"system": name, "atoms": system.num_atoms}
    bound = Evaluator(potential).bind(system.to(dtype=torch.float64), stress=False)
    atoms = system.to(dtype=torch.float64).to_ase()[0]
    for count in (3, 5):
        began = time.process_time()
        for _ in range(count):
            bound.replay()
        step = (time.process_time() - began) / count
    steps = max(2 * options.every, round(options.seconds / step / options.every) * options.every)

    def dynamics(ensemble: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            setup = MDOptions(
                steps, timestep=1.0, ensemble=ensemble, temperature=COLD, every=options.every, output=f"{folder}/md"
            )
            simulation = TimedSimulation((potential, None), atoms, setup, None, None, None)
            simulation.run_beside(bound)
        ms, step = (seconds / steps * 1e3 for seconds in (simulation.blocks, simulation.bare))
        return {"ms": ms, "ratio": ms / step, "step_ms": step, "ns_per_day": 86400 * 1e-3 / ms, "steps": steps}

    for ensemble in ("nve", "nvt"):
        attempt({**known, "run": ensemble}, lambda ensemble=ensemble: dynamics(ensemble))


def bench(potential: Potential, name: str, system: System, options: argparse.Namespace) -> None:
    """Rows of one system: the bare step, constant energy, Langevin."""
    known = {"system": name, "atoms": system.num_atoms}
    bound = Evaluator(potential).bind(system.to(options.device, torch.float64))
    step = timed(bound.replay)["ms"]
    bound.check()
    del bound
    say(**known, run="step", ms=step)
    atoms = system.to(dtype=torch.float64).to_ase()[0]
    every = options.every
    steps = max(2 * every, round(options.seconds / step * 1e3 / every) * every)

    def dynamics(ensemble: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            setup = MDOptions(
                steps, timestep=1.0, ensemble=ensemble, temperature=COLD, every=every, output=f"{folder}/md"
            )
            began = time.perf_counter()
            result = run_md(potential, atoms, setup, device=options.device)
            whole = time.perf_counter() - began
        ms = 86400 * 1e-6 * 1e3 / result.ns_per_day
        found = {"ms": ms, "ratio": ms / step, "ns_per_day": result.ns_per_day, "steps": steps}
        return {**found, "with_start_s": whole}

    for ensemble in ("nve", "nvt", *(["npt"] if bool(system.pbc.all()) else [])):
        attempt({**known, "run": ensemble}, lambda ensemble=ensemble: dynamics(ensemble))


def bench_replicas(potential: Potential, system: System, count: int, every: int) -> dict[str, Any]:
    """Many copies in one batch."""
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


def drift(options: argparse.Namespace, ensemble: str, timestep: float) -> dict[str, Any]:
    """Constant energy or Langevin dynamics of a trained model at 300 K."""
    atoms = read(options.start, 0)
    with tempfile.TemporaryDirectory() as folder:
        setup = MDOptions(
            round(options.time * 1000 / timestep),
            timestep=timestep,
            ensemble=ensemble,
            temperature=300.0,
            every=100,
            output=f"{folder}/md",
            minimize=True,
        )
        result = run_md(options.model, atoms, setup, device=options.device, console=Console(width=150))
    mean = sum(row.temperature_K for row in result.rows) / len(result.rows)
    found = {
        "atoms": len(atoms),
        "ms": 86400 * 1e-6 * timestep * 1e3 / result.ns_per_day,
        "ns_per_day": result.ns_per_day,
    }
    return {**found, "drift": result.drift, "temperature": mean, "ps": options.time}


def line(r: dict[str, Any]) -> str:
    """A run as readable text."""
    start = f"{r.get('system', ''):<22} {r.get('atoms', 0):>7} {r.get('run', ''):<12}"
    if "ms" not in r:
        return f"{start} {r.get('error', '')}"
    ratio = f"{r['ratio']:.3f}" if "ratio" in r else ""
    beside = f"  step {r['step_ms']:.4f}" if "step_ms" in r else ""
    speed = f"{r['ns_per_day']:.4g}" if "ns_per_day" in r else ""
    more = f"  drift {r['drift']:+.1e} eV/atom/ps, {r['temperature']:.0f} K" if "drift" in r else ""
    return f"{start} {r['ms']:>9.4f} {ratio:>7} {speed:>8}{more}{beside}"


def run_part(options: argparse.Namespace) -> None:
    """Rows of one part."""
    if options.part == "drift":
        if options.model:
            for ensemble, timestep in (("nve", 0.5), ("nve", 1.0), ("nvt", 0.5)):
                known = {"system": Path(options.start).name, "run": f"{ensemble}, {timestep:g} fs"}
                if not over(options):
                    attempt(known, lambda e=ensemble, dt=timestep: drift(options, e, dt))
        return
    systems = {n: read_pdb(options.systems / f"{n}.pdb") for n in PDB} if options.systems else {}
    for side in sides(options.water):
        systems[f"water {3 * side**3}"] = water_box(side)
    on_cpu = options.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
        systems = {"ethanol": System.from_ase(read(ETHANOL, 0)), **systems}
    torch.manual_seed(1)
    model = {**MODEL, "hidden_channels": options.channels, "num_layers": options.layers}
    potential = Potential.from_config({"model": model, "energy_scale": 1e-9}).eval().requires_grad_(False)
    potential = potential.to(options.device, getattr(torch, options.dtype))
    if options.part == "replicas":
        attempt({}, lambda: bench_replicas(potential, next(iter(systems.values())), options.replicas, options.every))
        return
    for name, system in systems.items():
        if not over(options):
            (bench_cpu if on_cpu else bench)(potential, name, system, options)


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, device="cuda", systems=None, water="7,15", channels=MODEL["hidden_channels"])
    shared(parser, minutes=5.0, output=None, parts=PARTS)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each timed run")
    parser.add_argument("--every", type=int, default=100, help="steps between frames")
    parser.add_argument("--replicas", type=int, default=256, help="of the smallest system")
    parser.add_argument("--model", help="trained .tmn file, whose drift is measured")
    parser.add_argument("--start", help="structure for it")
    parser.add_argument("--time", type=float, default=10.0, help="ps for the drift")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="of the timed model")
    parser.add_argument("--layers", type=int, default=MODEL["num_layers"], help="of the timed model")


def main(options: argparse.Namespace) -> None:
    if options.part:
        run_part(options)
        return
    model = {**MODEL, "hidden_channels": options.channels, "num_layers": options.layers, "dtype": options.dtype}
    rows = run_parts(options, {"model": model}, line)
    print(f"\n{'system':<22} {'atoms':>7} {'run':<12} {'ms/step':>9} {'/ step':>7} {'ns/day':>8}")
    print("\n".join(line(row) for row in rows))
