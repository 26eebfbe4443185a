"""Time energy and forces of TensorNet on one GPU: the Evaluator and, when it is installed, TorchMD-Net.

    python scripts/bench_inference.py [--systems FOLDER] [--modes eager,graph,compile] [--output FILE] [--plot FILE]

Each system is evaluated as a whole step: neighbor search, energy, forces. "replay" is a step without leaving the device
(`Evaluator.bind`); "call" is `evaluator(system)` with its results back in Python. Errors are the largest of any force
component and of the energy against the Potential in float64, up to 3,000 atoms. All paths use the same weights.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchmdnet2 import Evaluator, Potential, System

PDB = ("alanine_dipeptide", "testosterone", "chignolin", "dhfr", "factorIX", "stmv")
WATER = (7, 15, 32, 70)  # molecules along each side: 1,029, 10,125, 98,304 and 1,029,000 atoms
NUMBERS = {"H": 1, "C": 6, "N": 7, "O": 8, "P": 15, "S": 16, "NA": 11, "CL": 17, "MG": 12, "ZN": 30, "K": 19, "CA": 20}
EXACT_UP_TO = 3000
EAGER_UP_TO = 12_000
MODEL = {"name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0, "max_z": 128}


def read_pdb(path: Path) -> System:
    """Elements and positions of a PDB file, in vacuum."""
    z, pos = [], []
    for line in path.read_text().splitlines():
        if line.startswith(("ATOM", "HETATM")):
            element = line[76:78].strip().upper() or line[12:16].strip().lstrip("0123456789")[0].upper()
            z.append(NUMBERS.get(element, 6))
            pos.append([float(line[k : k + 8]) for k in (30, 38, 46)])
    return System(z=torch.tensor(z), pos=torch.tensor(pos, dtype=torch.float32))


def water_box(side: int, seed: int = 0) -> System:
    """side³ molecules on a cubic lattice with random orientations, at the density of water; periodic."""
    rng = np.random.default_rng(seed)
    spacing = (1 / 0.0334) ** (1 / 3)
    place = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) * spacing
    place = place + rng.normal(0, 0.1, place.shape)
    molecule = np.array([[0, 0, 0], [0.9572, 0, 0], [-0.2400, 0.9266, 0]])
    q = rng.normal(size=(len(place), 4))
    a, b, c, d = (q / np.linalg.norm(q, axis=1, keepdims=True)).T
    rows = [
        [1 - 2 * (c * c + d * d), 2 * (b * c - a * d), 2 * (b * d + a * c)],
        [2 * (b * c + a * d), 1 - 2 * (b * b + d * d), 2 * (c * d - a * b)],
        [2 * (b * d - a * c), 2 * (c * d + a * b), 1 - 2 * (b * b + c * c)],
    ]
    rotation = np.moveaxis(np.array(rows), 2, 0)
    pos = (np.einsum("nij,kj->nki", rotation, molecule) + place[:, None]).reshape(-1, 3)
    return System(
        z=torch.tensor([8, 1, 1]).repeat(len(place)),
        pos=torch.tensor(pos, dtype=torch.float32),
        cell=torch.eye(3) * spacing * side,
    )


def timed(step: Callable[[], Any], seconds: float = 0.4, most: int = 300) -> dict[str, float]:
    """Milliseconds per step: the median of five groups, and the fastest and slowest group."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    each = max(1, min(most, int(seconds / max(time.perf_counter() - start, 1e-6))) // 5)
    groups = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        groups.append((time.perf_counter() - start) / each * 1e3)
    return {"ms": statistics.median(groups), "low": min(groups), "high": max(groups)}


def once(step: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = step()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def errors(energy: torch.Tensor, forces: torch.Tensor, exact: Any) -> dict[str, float]:
    """Largest errors against float64."""
    if exact is None:
        return {}
    difference = float((energy.double().reshape(-1) - exact.energy).abs().max())
    return {
        "force_error": float((forces.double() - exact.forces).abs().max()),
        "energy_error": difference / max(float(exact.energy.abs().max()), 1e-9),
        "largest_force": float(exact.forces.abs().max()),
    }


def bench_ours(evaluator: Evaluator, system: System, exact: Any) -> list[dict[str, Any]]:
    """Rows "replay" and "call"."""
    rows = []
    bound, first = once(lambda: evaluator.bind(system))
    rows.append({"mode": "replay", "first_s": first, **timed(bound.replay)})
    if not bound.check():
        raise RuntimeError("the edges did not fit, which bind should have seen to")
    rows[0].update(errors(bound.energy, bound.forces, exact), peak_GB=torch.cuda.max_memory_allocated() / 1e9)
    del bound
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result, first = once(lambda: evaluator(system))
    _, second = once(lambda: evaluator(system))
    rows.append({"mode": "call", "first_s": first, "second_s": second, **timed(lambda: evaluator(system))})
    rows[1].update(errors(result.energy, result.forces, exact), peak_GB=torch.cuda.max_memory_allocated() / 1e9)
    print(evaluator.report(), flush=True)
    evaluator.refresh()
    return rows


def bench_eager(potential: Potential, system: System, exact: Any) -> list[dict[str, Any]]:
    """Row "potential": the reference path in float32."""
    result, first = once(lambda: potential(system))
    row = {"mode": "potential", "first_s": first, **timed(lambda: potential(system), seconds=0.2)}
    return [{**row, **errors(result.energy, result.forces, exact), "peak_GB": torch.cuda.max_memory_allocated() / 1e9}]


def peer_model(potential: Potential, neighbors: int, graph: bool, static: bool) -> Any:
    """TorchMD-Net's TensorNet with these weights; `neighbors` is the largest number that an atom has."""
    from torchmdnet.models.model import create_model

    from torchmdnet2.importers.export import export_state

    arguments, state = export_state(potential)
    # without the reference energies, which would only cost it time: forces are compared
    arguments |= {
        "prior_model": None, "prior_args": None, "max_num_neighbors": neighbors, "derivative": graph,
        "static_shapes": static, "charge": False, "check_errors": False, "box_vecs": None,
    }  # fmt: skip
    model = create_model(arguments)
    missing = model.load_state_dict({k: v for k, v in state.items() if not k.startswith("prior")}, strict=False)
    absent = sorted(set(missing.missing_keys) & {name for name, _ in model.named_parameters()})
    if absent:
        raise RuntimeError(f"weights that the peer has and we have not: {absent[:4]}")
    return model.cuda().eval().requires_grad_(False)


def bench_peer(potential: Potential, system: System, exact: Any, mode: str) -> list[dict[str, Any]]:
    """Row of one of the peer's modes. Its energy has another zero: only forces are compared."""
    from torchmdnet2.neighbors import neighbor_list

    neighbors = int(torch.diff(neighbor_list(system, potential.cutoff).row_ptr).max()) + 2
    model = peer_model(potential, neighbors, mode == "graph", mode != "eager")
    box = system.cell[0] if bool(system.pbc.any()) else None
    pos = system.pos.clone().requires_grad_(True)
    call = model
    if mode == "compile":
        torch._dynamo.reset()
        call = torch.compile(model, backend="inductor", dynamic=False, fullgraph=False, mode="reduce-overhead")

    def launched() -> torch.Tensor:
        energy, forces = call(system.z, pos, system.batch, box=box)
        return -torch.autograd.grad(energy.sum(), pos)[0] if mode != "graph" else forces

    step, forces = launched, torch.empty(0)
    if mode == "graph":
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(5):
                launched()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                forces = launched()
        step = graph.replay  # type: ignore[assignment]
    given, first = once(step)
    forces = given if mode != "graph" else forces
    row: dict[str, Any] = {"mode": f"torchmd-net {mode}", "first_s": first}
    if exact is not None:
        row["force_error"] = float((forces.detach().double() - exact.forces).abs().max())
    return [{**row, **timed(step), "peak_GB": torch.cuda.max_memory_allocated() / 1e9}]


def table(rows: list[dict[str, Any]]) -> str:
    """One line per system and mode."""
    numbers = "".join(f" {title:>9}" for title in ("ms", "low", "high", "dF eV/Å", "dE/E"))
    lines = [f"{'system':<18} {'atoms':>9} {'mode':<20}{numbers} {'GB':>7} {'first s':>8}"]
    for r in rows:
        name = f"{r['system']:<18} {r['atoms']:>9} {r['mode']:<20}"
        if "error" in r:
            lines.append(f"{name} {r['error'][:100]}")
            continue
        accuracy = "".join(f" {r[k]:>9.1e}" if k in r else f" {'-':>9}" for k in ("force_error", "energy_error"))
        times = "".join(f" {r[k]:>9.4f}" for k in ("ms", "low", "high"))
        lines.append(f"{name}{times}{accuracy} {r['peak_GB']:>7.2f} {r['first_s']:>8.2f}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Milliseconds against atoms, both logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for mode in dict.fromkeys(r["mode"] for r in rows):
        points = sorted((r["atoms"], r["ms"]) for r in rows if r["mode"] == mode and "ms" in r)
        axes.loglog(*zip(*points, strict=True), "o-", label=mode)
    axes.set(xlabel="atoms", ylabel="ms per step (energy and forces)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=Path, help="folder of PDB files")
    parser.add_argument("--water", default=",".join(map(str, WATER)), help="molecules along each side")
    parser.add_argument("--copies", type=int, default=256, help="alanine dipeptides in a batch")
    parser.add_argument("--precision", default="float32,tf32", help="of the Evaluator")
    parser.add_argument("--modes", default="eager,graph,compile", help="of TorchMD-Net, where it is installed")
    parser.add_argument("--eager", action="store_true", help="time the Potential too")
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--plot", help="PNG file")
    options = parser.parse_args()

    systems = {}
    if options.systems:
        systems = {n: read_pdb(options.systems / f"{n}.pdb") for n in PDB if (options.systems / f"{n}.pdb").exists()}
    if "alanine_dipeptide" in systems and options.copies:
        molecule = systems["alanine_dipeptide"]
        systems[f"{options.copies} x alanine"] = System.concatenate([molecule] * options.copies)
    for side in (int(s) for s in options.water.split(",") if s):
        systems[f"water {3 * side**3}"] = water_box(side)
    torch.manual_seed(1)
    potential = Potential.from_config({"model": MODEL}).eval().requires_grad_(False).cuda()
    double = copy.deepcopy(potential).double()
    try:
        import torchmdnet.models.model  # noqa: F401

        peer_modes = [m for m in options.modes.split(",") if m]
    except ImportError:
        peer_modes = []
        print("torchmd-net is not installed: only our own paths are timed")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)

    rows: list[dict[str, Any]] = []
    for name, system in sorted(systems.items(), key=lambda item: item[1].num_atoms):
        system = system.to("cuda")
        exact = double(system.to(dtype=torch.float64)) if system.num_atoms <= EXACT_UP_TO else None
        runs: list[tuple[str, Callable[..., list[dict[str, Any]]], Any]] = [
            (precision, bench_ours, Evaluator(potential, precision=precision))
            for precision in options.precision.split(",")
        ]
        if options.eager and system.num_atoms <= EAGER_UP_TO:
            runs.append(("potential", bench_eager, potential))
        runs += [(mode, functools.partial(bench_peer, mode=mode), potential) for mode in peer_modes]
        for label, run, model in runs:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            try:
                found = run(model, system, exact)
            except (RuntimeError, ValueError) as error:
                found = [{"mode": label, "error": f"{type(error).__name__}: {str(error)[:300]}"}]
            for row in found:
                if label == "tf32" and "ms" in row:
                    row["mode"] += " tf32"
                rows.append({"system": name, "atoms": system.num_atoms, **row})
                print(rows[-1], flush=True)
            if options.output:
                Path(options.output).write_text(json.dumps(rows, indent=1))
    print(table(rows))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
