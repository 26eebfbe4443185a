"""Time every installed neighbor search on boxes of water, 24 to 1,000,000 atoms: one table, one plot, one JSON file.

    python -m scripts.bench neighbors --output docs/bench/neighbors.json --plot docs/bench/neighbors.png
    python -m scripts.bench neighbors --redraw docs/bench/neighbors.json --plot docs/bench/neighbors.png

A number is the median of nine repetitions, in µs: "graph" of replays of a captured CUDA graph, "eager" of the whole
call as a user makes it. On the CPU it is processor time of one thread, the least of many rounds in which the searches
take turns: other programs on the machine can only add to it. nvalchemi and torchmd-net are timed if they are
installed. Each program runs in a separate process; the last table compares the fastest of each with ours.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from torchmdnet2 import System
from torchmdnet2.neighbors import neighbor_list

from .harness import Row, attempt, over, run_parts, say, shared

CUTOFF = 5.0
SPACING = 3.104  # Å between molecules: the density of water
SIDES = (2, 3, 5, 7, 10, 15, 22, 32, 46, 70)  # molecules along an edge
ROOM = 96  # neighbors per atom that the fixed-capacity searches have room for; the mean is 54
NVALCHEMI = {"naive": "naive", "cells": "cell_list", "tiles": "cluster_tile"}
CAPTURES = ("captured", "compiled and captured")  # a capture that fails takes its process with it
PARTS = (
    "triton",
    "torchmd-net",
    "nvalchemi",
    *(f"nvalchemi {kind} {capture}" for kind in NVALCHEMI for capture in CAPTURES),
    "CPU",
)
GOALS = {1029: 30, 10125: 80, 98304: 300}  # µs in a graph on one NVIDIA H200


def water_box(side: int, device: str) -> System:
    """side³ water molecules on a shaken lattice, turned at random, numbered molecule by molecule; float32."""
    rng = np.random.default_rng(side)
    lattice = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) * SPACING
    oxygen = lattice + rng.uniform(-0.3, 0.3, lattice.shape)
    bonds = rng.normal(size=(2, len(oxygen), 3))
    bonds *= 0.96 / np.linalg.norm(bonds, axis=-1, keepdims=True)
    pos = np.stack([oxygen, oxygen + bonds[0], oxygen + bonds[1]], 1).reshape(-1, 3)
    return System(
        z=torch.tensor([8, 1, 1] * len(oxygen)),
        pos=torch.tensor(pos, dtype=torch.float32),
        cell=torch.eye(3) * (SPACING * side),
    ).to(device)


def timed(call: Callable[[], object], sync: Callable[[], None]) -> float:
    """Median time of a call in µs, from nine repetitions of at least 3 ms each."""
    call()
    sync()
    start = time.perf_counter()
    call()
    sync()
    once = time.perf_counter() - start
    number = max(1, min(100, math.ceil(3e-3 / max(once, 1e-7))))
    times = []
    for _ in range(9 if once < 0.5 else 3):
        sync()
        start = time.perf_counter()
        for _ in range(number):
            call()
        sync()
        times.append((time.perf_counter() - start) / number * 1e6)
    return statistics.median(times)


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Processor time of each call in µs: the least of 5 to 60 rounds, each of at least 3 ms for every call."""
    number, best = {}, {}
    for name, call in calls.items():
        call()
        number[name] = max(1, math.ceil(3000 / max(processor_time(call, 1), 1)))
        best[name] = math.inf
    began = time.perf_counter()
    for k in range(60):
        for name, call in calls.items():
            call()  # the one before has left its own things in the caches
            best[name] = min(best[name], processor_time(call, number[name]))
        if k >= 4 and time.perf_counter() - began > 8:
            break
    return best


def processor_time(call: Callable[[], object], number: int) -> float:
    """µs per call."""
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number * 1e6


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """The call as one replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ours(system: System, method: str) -> Callable[[], object]:
    """Our search as in a captured graph: receivers' rows, senders and displacement vectors."""
    from torchmdnet2.neighbors.triton_search import TritonNeighborSearch

    search = TritonNeighborSearch(
        system.num_atoms, 1, CUTOFF, min(ROOM * system.num_atoms, 2**31 - 1), "cuda", method=method
    )
    given = system.pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous()

    def call():
        search(*given)

    call()
    if int(search.flag) != 0:
        raise RuntimeError(f"flag {int(search.flag)}")
    return call


def vesin_alone(system: System) -> Callable[[], object]:
    """vesin through its Python interface: pairs in any order, shifts, distances and vectors."""
    import vesin

    search = vesin.NeighborList(cutoff=CUTOFF, full_list=True)
    pos, cell = system.pos.double().numpy(), system.cell[0].double().numpy()
    return lambda: search.compute(pos, cell, True, quantities="ijSdD")


def nvalchemi(system: System, method: str, prepared: bool = True, compiled: bool = False) -> Callable[[], object]:
    """nvalchemi-toolkit-ops through torch: a neighbor matrix with shifts; no displacement vectors."""
    from nvalchemiops.torch.neighbors import neighbor_list as search
    from nvalchemiops.torch.neighbors import prepare_neighbor_list

    pos, cell, pbc = system.pos, system.cell.contiguous(), system.pbc.contiguous()
    if not prepared:
        return lambda: search(pos, CUTOFF, cell=cell, pbc=pbc, method=method, max_neighbors=ROOM)
    state = prepare_neighbor_list(pos, CUTOFF, cell=cell, pbc=pbc, method=method, max_neighbors=ROOM)

    def call():
        return search(pos, cell=cell, state=state)

    call()
    return torch.compile(call, fullgraph=True) if compiled else call


def torchmd_net(system: System, strategy: str) -> Callable[[], object]:
    """torchmd-net 3.1's OptimizedDistance at fixed size: edges, vectors and distances."""
    from torchmdnet.models.utils import OptimizedDistance

    search = OptimizedDistance(
        0.0, CUTOFF, max_num_pairs=-ROOM, strategy=strategy, box=system.cell[0], return_vecs=True, loop=True,
        include_transpose=True, resize_to_fit=False,
    ).cuda()  # fmt: skip
    batch = torch.zeros(system.num_atoms, dtype=torch.long, device="cuda")
    return lambda: search(system.pos, batch, box=system.cell[0])


def contenders(system: System) -> dict[str, Callable[[], Callable[[], object]]]:
    """name -> function that prepares one timed call."""
    N = system.num_atoms
    known: dict[str, Callable[[], Callable[[], object]]] = {}
    if system.device.type == "cuda":
        if N <= 12_000:
            known["triton pairs, graph"] = lambda: graphed(ours(system, "pairs"))
        known["triton cells, graph"] = lambda: graphed(ours(system, "cells"))
        known["triton, graph"] = lambda: graphed(ours(system, "auto"))
        known["triton, eager"] = lambda: lambda: neighbor_list(system, CUTOFF, backend="triton")
        for kind, method in NVALCHEMI.items():
            if kind == "naive" and N > 40_000:
                continue
            known[f"nvalchemi {kind}, eager"] = lambda m=method: nvalchemi(system, m, prepared=False)
            known[f"nvalchemi {kind} prepared, eager"] = lambda m=method: nvalchemi(system, m)
            for capture in CAPTURES:
                known[f"nvalchemi {kind} {capture}"] = lambda m=method, c=capture: graphed(
                    nvalchemi(system, m, compiled=c.startswith("compiled"))
                )
        for strategy in ("brute", "cell"):
            if strategy == "cell" or N <= 120_000:
                known[f"torchmd-net {strategy}, eager"] = lambda s=strategy: torchmd_net(system, s)
                known[f"torchmd-net {strategy}, graph"] = lambda s=strategy: graphed(torchmd_net(system, s))
    if N <= 110_000:
        on_cpu = system.to("cpu")
        known["vesin alone, CPU"] = lambda: vesin_alone(on_cpu)
        known["ours, CPU"] = lambda: lambda: neighbor_list(on_cpu, CUTOFF)
    if N <= 1_100:
        on_cpu = system.to("cpu")
        known["reference, CPU"] = lambda: lambda: neighbor_list(on_cpu, CUTOFF, backend="reference")
    return known


def table(rows: list[dict]) -> str:
    """Markdown: one line per search, one column per size."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    lines = ["| µs | " + " | ".join(f"{row['atoms']:,}" for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in names:
        times = [row["us"].get(name) for row in rows]
        if any(isinstance(t, int | float) for t in times):
            cells = [f"{t:,.1f}" if isinstance(t, int | float) else ("fails" if t else "") for t in times]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Time against atoms, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    for name in dict.fromkeys(name for row in rows for name in row["us"]):
        points = [(r["atoms"], r["us"][name]) for r in rows if isinstance(r["us"].get(name), int | float)]
        if points:
            own = name.startswith("triton")
            axes.loglog(*zip(*points, strict=True), "o-" if own else "x--", lw=2 if own else 1, ms=4, label=name)
    axes.set(xlabel="atoms", ylabel="time of one search / µs", title="water, cutoff 5 Å, float32")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def part_of(name: str) -> str:
    """Name of the process that times a search."""
    return name if name in PARTS else program_of(name)


def program_of(name: str) -> str:
    """The program that a search belongs to."""
    return "CPU" if name.endswith("CPU") else next(part for part in PARTS if name.startswith(part))


def run_part(options: argparse.Namespace) -> None:
    """Times of one program, from the smallest box on."""
    cuda = torch.cuda.is_available()
    sync = torch.cuda.synchronize if cuda else (lambda: None)
    for side in sorted(options.sides):
        system = water_box(side, "cuda" if cuda else "cpu")
        mine = {name: prepare for name, prepare in contenders(system).items() if part_of(name) == options.part}
        if options.part == "CPU":
            torch.set_num_threads(1)
            for name, us in {} if over(options) else in_turns({n: prepare() for n, prepare in mine.items()}).items():
                say(atoms=system.num_atoms, name=name, us=round(us, 2))
            continue
        for name, prepare in mine.items():
            if not over(options):
                known = {"atoms": system.num_atoms, "name": name}
                attempt(known, lambda prepare=prepare: {"us": round(timed(prepare(), sync), 2)})


def by_size(measured: list[Row]) -> list[dict]:
    """One row per size, with the times of all searches; what is not installed is left out."""
    rows: dict[int, dict] = {}
    for row in measured:
        if "name" in row and not row.get("error", "").startswith(("ImportError", "ModuleNotFoundError")):
            of = rows.setdefault(row["atoms"], {"atoms": row["atoms"], "us": {}})
            of["us"][row["name"]] = row.get("us", row.get("error"))
    return [rows[atoms] for atoms in sorted(rows)]


def summary(rows: list[dict]) -> str:
    """The time of our search in a graph, and the fastest one of each other program."""
    lines = []
    for row in rows:
        best: dict[str, tuple[float, str]] = {}
        for name, us in row["us"].items():
            if isinstance(us, int | float):
                best[program_of(name)] = min(best.get(program_of(name), (math.inf, "")), (us, name))
        if "triton" in best:
            ours = best.pop("triton")[0]
            best.pop("CPU", None)
            others = "".join(f"; {name} {us:,.1f} ({us / ours:.1f}×)" for us, name in best.values())
            goal = f" (goal {GOALS[row['atoms']]})" if row["atoms"] in GOALS else ""
            lines.append(f"{row['atoms']:>9,} atoms: {ours:,.1f} µs{goal}{others}")
        vesin = [row["us"].get(name) for name in ("ours, CPU", "vesin alone, CPU")]
        if all(isinstance(us, int | float) for us in vesin):
            lines.append(f"{row['atoms']:>9,} atoms, CPU: {vesin[0] / vesin[1]:.2f} of vesin alone (goal 1.10)")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="molecules along an edge of the box")
    shared(parser, minutes=5.0, output=None, plot=None, redraw=None, parts=PARTS)


def main(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    if options.part:
        run_part(options)
        return
    if options.redraw:
        rows = json.loads(options.redraw.read_text())["rows"]
    else:
        rows = run_parts(options, {"cutoff": CUTOFF})
    rows = rows if rows and "part" not in rows[0] else by_size(rows)
    print(table(rows), summary(rows), sep="\n\n")
    if options.plot:
        plot(rows, options.plot)
