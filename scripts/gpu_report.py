"""Run everything that needs a GPU, the most important first, so that a cut at any moment leaves results.

    python scripts/gpu_report.py OUTPUT [--only tests,memcheck,...] [--minutes 30] [--systems FOLDER] [--data FOLDER]

Each stage has a time limit, writes its log into the folder OUTPUT while it runs and, at the end, an entry of
report.json: exit code, seconds, the last lines. --systems holds PDB files (scripts/bench/systems.py names them), --data
a folder per set of labelled frames (see scripts/bench/accuracy.py). With TorchMD-Net and nvalchemi on the path the
benchmarks time them too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SANITIZED = ("search", "step", "step_tf32", "priors", "heads", "tensornet2", "aimnet2", "training", "md")


@dataclass
class Stage:
    """Commands that run at the same time.

    Attributes:
        name: of the stage.
        seconds: time limit; the commands are then asked to stop, and killed a little later.
        commands: name of the log -> command, as for a shell.
        environment: variables that are added to those of this process.
        shown: lines at the end of each log that are printed and kept.
    """

    name: str
    seconds: float
    commands: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    shown: int = 30


def stages(out: Path, systems: Path | None, data: Path | None) -> list[Stage]:
    """The stages, in the order of importance."""
    python = shlex.quote(sys.executable)
    tests = f"{python} -m pytest tests/gpu -v -rfE -n 6 --dist worksteal --timeout 150 --tb short -p no:cacheprovider"
    tests += f" --durations 15 --junit-xml {out}/tests.xml"
    pdb = f"--systems {systems}" if systems else ""
    found = [Stage("tests", 330, {"tests": tests}, {"OMP_NUM_THREADS": "2"}, 40)]
    for tool in ("memcheck", "racecheck"):
        # PyTorch's own kernels would take most of the time
        watched = f"compute-sanitizer --tool {tool} --kernel-name-exclude kns=at6native --error-exitcode 9"
        sanitizer = f"{watched} {python} scripts/gpu_sanitize.py"
        cases = {f"{tool}_{case}": f"{sanitizer} {case}" for case in SANITIZED}
        found.append(Stage(tool, 100, cases, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, 5))

    def bench(name: str, seconds: float, options: str, output: str = "{}.json") -> None:
        command = f"{python} -m scripts.bench {name} {options} --output {out / output.format(name)}"
        found.append(Stage(name, seconds + 30, {name: f"{command} --minutes {seconds / 60:.2f}"}))

    bench("inference", 300, f"{pdb} --plot {out}/inference.png")
    acac, bpa = (f"{data}/{name}/train_300K.xyz" for name in ("acac", "3bpa"))
    if data:
        bench("training", 200, f"{acac} {bpa}")
    bench("adapters", 150, pdb)
    bench("neighbors", 150, f"--plot {out}/neighbors.png")
    bench("md", 90, pdb)
    if data:
        bench("devices", 150, acac)
        bench("accuracy", 540, f"--data {data} --frames 450,150,50", output="{}")
    return found


def run(stage: Stage, out: Path, seconds: float) -> list[dict]:
    """Run one stage; returns its entry of report.json."""
    began, rows = time.time(), []
    processes: dict[str, subprocess.Popen] = {}
    for name, command in stage.commands.items():
        with (out / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(
                shlex.split(command), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
            )  # fmt: skip
    for name, process in processes.items():
        late = False
        # asked first, so that pytest and the benchmarks can say what they have
        for patience, number in (
            (began + seconds - time.time(), signal.SIGINT),
            (25, signal.SIGTERM),
            (5, signal.SIGKILL),
        ):
            try:
                process.wait(max(0.5, patience))
                break
            except subprocess.TimeoutExpired:
                late = True
                os.killpg(process.pid, number)  # with the processes that it started
        code = process.wait()
        last = (out / f"{name}.log").read_text(errors="replace").splitlines()[-stage.shown :]
        row = {"stage": name, "exit": code, "seconds": round(time.time() - began, 1), "stopped": late}
        print(f"\n=== {name}: exit {code}, {row['seconds']} s{', stopped' if late else ''}")
        print("\n".join(line[:240] for line in last), flush=True)
        rows.append({**row, "command": stage.commands[name], "last": last})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="stages, in this order (default: all)")
    parser.add_argument("--minutes", type=float, default=45, help="for everything")
    parser.add_argument("--systems", type=Path, help="folder of PDB files")
    parser.add_argument("--data", type=Path, help="folder of labelled frames, a folder per set")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    options = parser.parse_args()
    out = options.output.resolve()
    given = [path.resolve() if path else None for path in (options.systems, options.data)]
    chosen = stages(out, *given)
    if options.only:
        names = options.only.split(",")
        chosen = [stage for name in names for stage in chosen if stage.name == name]
    if options.list or not chosen:
        print("\n".join(f"{s.name:<12} {s.seconds:5.0f} s  {c}" for s in chosen for c in s.commands.values()))
        return not chosen
    out.mkdir(parents=True, exist_ok=True)
    end, rows = time.time() + 60 * options.minutes, []
    for stage in chosen:
        left = end - time.time()
        if left < 10:
            print(f"\n=== {stage.name}: no time was left")
            continue
        missing = {c.split()[0] for c in stage.commands.values() if not shutil.which(c.split()[0])}
        if missing:
            print(f"\n=== {stage.name}: {', '.join(missing)} is not on the path")
            continue
        rows += run(stage, out, min(stage.seconds, left))
        (out / "report.json").write_text(json.dumps(rows, indent=1))
    print("\n" + "\n".join(f"{r['stage']:<20} exit {r['exit']} {r['seconds']:7.1f} s" for r in rows))
    return any(r["exit"] for r in rows)


if __name__ == "__main__":
    sys.exit(main())
