"""The step in a periodic box of water beside the step of the same droplet, kernel by kernel, of several trees in turns.

    python scripts/step_in_cells.py [--trees OLD .] [--model organic] [--sides 7,15] [--rounds 2] [--output FILE]

Each tree is a folder with its own package torchmdnet2. Processes that compile all kernels run first, side by side. Then
the trees take turns: ms of a replay of the bound step (smallest and median of groups), microseconds of each kernel, and
whether 200 replays give the same bits. Kernels of several streams run at the same time, so that their sum may exceed
the step. Forces of the trees are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

PARTS = {
    "search": r"search_|cell_geometry|(wrap|place|order)_atoms|bin_starts|count_cells|finish_(cells|pairs)|row_",
    "D3": r"coordination|dispersion",
    "pairs": r"^pair_kernel",
    "mesh": r"spread_kernel|influence_kernel|gather_kernel|note_kernel|fft|FFT",
    "sums": r"finish_kernel",
    "PyTorch": r"at::|Memset|Memcpy",
    "network": r"",
}
KINDS = {"droplet": (False, False), "pme": (True, False), "pme, stress": (True, True)}
GROUPS, REPLAYS, PROFILED = 12, 20, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", default=["."], metavar="FOLDER")
    parser.add_argument("--model", default="organic")
    parser.add_argument("--sides", default="7,15", help="molecules along each side (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="all rows as JSON")
    parser.add_argument("--child", choices=("warm", "time"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for side in map(int, options.sides.split(",")):
            for kind in KINDS:
                print(json.dumps(measured(options, side, kind)), flush=True)
        return
    began, rows = time.time(), []
    first = [started(options, tree, "warm") for tree in options.trees]
    for process in first:
        process.communicate()
    print(f"# compiled after {time.time() - began:.0f} s", flush=True)
    for turn in range(options.rounds):
        for tree in options.trees:
            for line in filter(
                lambda text: text[:1] == "{", started(options, tree, "time").communicate()[0].splitlines()
            ):
                rows.append({"tree": tree, "round": turn, **json.loads(line)})
                print(described(rows[-1], kernels=turn == 0), flush=True)
                if options.output:
                    options.output.write_text(json.dumps(rows))
    print(f"\n# {time.time() - began:.0f} s; smallest ms of a step")
    summary(rows, options.trees)


def started(options: argparse.Namespace, tree: str, task: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", task, "--model", options.model, "--sides", options.sides]
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
    return subprocess.Popen(
        [*command, "--device", options.device], env=environment, stdout=subprocess.PIPE, text=True, cwd=tree
    )


def measured(options: argparse.Namespace, side: int, kind: str) -> dict[str, Any]:
    import torch

    from torchmdnet2 import Evaluator, load
    from torchmdnet2.benchmark import water_box

    periodic, stress = KINDS[kind]
    system = water_box(side) if periodic else water_box(side).replace(cell=None, pbc=None)
    bound = Evaluator(load(options.model, options.device)).bind(system.to(options.device), stress=stress)
    known = {"atoms": system.num_atoms, "kind": kind}
    if options.child == "warm":
        return known
    bound.replay()
    forces = bound.forces.clone()
    same = True
    for _ in range(200 if options.device != "cpu" else 2):
        bound.replay()
        same &= torch.equal(forces, bound.forces)
    each = [timed(bound.replay) for _ in range(GROUPS)]
    found = {"ms": min(each), "median_ms": statistics.median(each), "same_bits": same, "checked": bound.check()}
    found |= {"energy": float(bound.energy.sum()), "forces": forces.double().cpu()[:64].flatten().tolist()}
    return {**known, **found, "kernels": kernels(bound.replay)}


def timed(run: Any) -> float:
    """ms of a replay, in a row of them."""
    wait()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        run()
    wait()
    return 1e3 * (time.perf_counter() - began) / REPLAYS


def wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels(run: Any) -> dict[str, list[float]]:
    """Microseconds of each kernel of a step, by name, in the sequence of the step; nothing without a GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            run()
        wait()
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
    spans = defaultdict(list)
    for event in sorted(events, key=lambda e: e.time_range.start):
        spans[event.name].append(event.time_range.elapsed_us())
    found = {}
    for name, each in spans.items():
        every = max(1, len(each) // PROFILED)
        found[name] = [statistics.median(each[k::every]) for k in range(every)]
    return found


def part_of(name: str) -> str:
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def described(row: dict[str, Any], kernels: bool) -> str:
    sums: dict[str, float] = defaultdict(float)
    for name, spans in row["kernels"].items():
        sums[part_of(name)] += sum(spans)
    lines = [f"{row['tree']:12} {row['atoms']:6} {row['kind']:12} {row['ms']:.4f} ms (median {row['median_ms']:.4f}), "
             f"same bits: {row['same_bits']}, check: {row['checked']}"]  # fmt: skip
    lines.append("    " + ", ".join(f"{part} {sums[part]:.1f}" for part in PARTS) + " µs")
    if kernels:
        for name, spans in row["kernels"].items():
            if part_of(name) != "network":
                lines.append(f"      {part_of(name):8} {name[:60]:60} " + " + ".join(f"{span:.1f}" for span in spans))
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]], trees: list[str]) -> None:
    for atoms in dict.fromkeys(row["atoms"] for row in rows):
        for kind in KINDS:
            words = [f"{atoms:6} {kind:12}"]
            alike = [row for row in rows if (row["atoms"], row["kind"]) == (atoms, kind)]
            if {row["tree"] for row in alike} != {*trees}:
                print(*words, "not all trees have given a time")
                continue
            droplets = [row for row in rows if (row["atoms"], row["kind"]) == (atoms, "droplet")]
            for tree in trees:
                ms, beside = (min(row["ms"] for row in some if row["tree"] == tree) for some in (alike, droplets))
                words.append(f"{tree}: {ms:.4f} ms, {ms / beside:.3f} x droplet")
            forces = [row["forces"] for row in alike]
            most = max(abs(a - b) for other in forces for a, b in zip(forces[0], other, strict=True))
            energies = [row["energy"] for row in alike]
            words.append(f"forces differ by {most:.1e} eV/Å, energies by {max(energies) - min(energies):.1e} eV")
            print("; ".join(words))


if __name__ == "__main__":
    main()
