"""Times of several trees in turns on one machine: an old commit beside the present one.

    git worktree add ../old OLD_COMMIT
    python scripts/beside.py ../old . --models plain,organic --sides 2,4,7

Each tree is a folder with its own package torchmdnet2, and has a process that keeps all cases ready. The trees take
turns, one case after the other. Printed is the smallest time of a bound step and of a call of an Evaluator for droplets
of water, in ms: processor time on a CPU, where other programs then count little (one thread by default), else the time
until the device has done 20 of them, divided by 20. Kernels are compiled before the first turn, which takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("bound", "call")
PLAIN = {
    "model": {"name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0, "max_z": 10},
    "elements": [1, 8],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="FOLDER")
    parser.add_argument("--models", default="plain,organic,organic-small", help="plain: a TensorNet of F = 128; files")
    parser.add_argument("--sides", default="2,4,7", help="molecules along each side (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn, at least two steps")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [
        (model, int(side), way) for model in options.models.split(",") for side in options.sides.split(",")
        for way in WAYS
    ]  # fmt: skip
    if options.child:
        serve(options, cases)
        return
    processes = [started(tree, options.threads) for tree in options.trees]
    ready = [[json.loads(answer(process)) for _ in cases] for process in processes]
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for case in range(len(cases)):
            for tree in sorted(range(len(processes)), reverse=turn % 2 == 1):
                print(case, file=processes[tree].stdin, flush=True)
                times[tree, case].append(float(answer(processes[tree])))
    print(f"\n| model | way | atoms | {' | '.join(options.trees)} | last / first | median of the turns | eV |")
    print("|---" * (6 + len(processes)) + "|")
    for case, (model, _, way) in enumerate(cases):
        each = [times[tree, case] for tree in range(len(processes))]
        least = [min(values) for values in each]
        ratio = statistics.median(last / first for first, last in zip(each[0], each[-1], strict=True))
        words = [f"{1e3 * value:.3f}" for value in least] + [f"{least[-1] / least[0]:.3f}", f"{ratio:.3f}"]
        differ = ready[-1][case][1] - ready[0][case][1]
        print(f"| {Path(model).stem} | {way} | {ready[0][case][0]} | {' | '.join(words)} | {differ:.0e} |")


def started(tree: str, threads: int) -> subprocess.Popen[str]:
    """Start the process of a tree, with kernels of its own on disk: else one reads what the other has compiled."""
    folder = Path(tree).resolve()
    caches = dict.fromkeys(("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"), str(folder / "runs" / "kernels"))
    numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    environment = {**os.environ, "PYTHONPATH": str(folder), **caches, **numbers}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *sys.argv[1:]]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line that begins with "=", without it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("="):
            return line[1:]
    raise SystemExit("a process has ended, see its message")


def serve(options: argparse.Namespace, cases: list[tuple[str, int, str]]) -> None:
    """Prepare all cases: print atoms and energy of each; then time those whose numbers come in."""
    steps = [prepared(options.device, *case) for case in cases]
    for line in sys.stdin:
        print(f"={timed(steps[int(line)], options.device, options.seconds)}", flush=True)


def prepared(device: str, model: str, side: int, way: str) -> Callable[[], Any]:
    import torch

    from torchmdnet2 import Evaluator, Potential, load
    from torchmdnet2.benchmark import water_box

    torch.manual_seed(0)
    potential = Potential.from_config(PLAIN).eval().to(device) if model == "plain" else load(model, device)
    system = water_box(side).replace(cell=None, pbc=None).to(device)
    evaluator = Evaluator(potential)
    energy = float(evaluator(system).energy.sum())
    print(f"={json.dumps([system.num_atoms, energy])}", flush=True)
    return evaluator.bind(system).replay if way == "bound" else lambda: evaluator(system)


def timed(step: Callable[[], Any], device: str, seconds: float) -> float:
    """Return the smallest time of a step, s; on a GPU that of 20 steps in a row, divided by 20."""
    import torch

    if device == "cpu":
        clock, number, wait = time.process_time, 1, lambda: None
    else:
        clock, number, wait = time.perf_counter, 20, torch.cuda.synchronize
    step()
    end, least, count = time.perf_counter() + seconds, float("inf"), 0
    while count < 2 or time.perf_counter() < end:
        wait()
        began = clock()
        for _ in range(number):
            step()
        wait()
        least, count = min(least, (clock() - began) / number), count + 1
    return least


if __name__ == "__main__":
    main()
