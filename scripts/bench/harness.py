"""What all benchmarks share: options, results, and parts in separate processes.

A part that fails or hangs does not harm the others. A benchmark calls `run_parts`, which starts it again with
`--part NAME` for every part and collects the rows that it prints. Rows are written to disk at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["ROOT", "Row", "again", "attempt", "over", "run_parts", "save_rows", "say", "shared", "table"]

ROOT = Path(__file__).resolve().parents[2]

Row = dict[str, Any]
_MARK = "ROW "  # other programs print to the same stream
_GRACE = 20.0  # seconds that a part may be late, in the middle of a row


OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"help": "where models run (default: %(default)s)"},
    "systems": {"type": Path, "metavar": "FOLDER", "help": "PDB files: alanine_dipeptide.pdb, chignolin.pdb, …"},
    "water": {"metavar": "SIDES", "help": "boxes of water: molecules along each side (default: %(default)s)"},
    "threads": {"type": int, "help": "(default: %(default)s)"},
    "channels": {"type": int, "help": "width of the model (default: %(default)s)"},
    "parts": {"help": "what is run, in this order (default: %(default)s)"},
    "minutes": {"type": float, "help": "for everything (default: %(default)s)"},
    "output": {"type": Path, "metavar": "FILE", "help": "results as JSON"},
    "plot": {"type": Path, "metavar": "FILE", "help": "plot as PNG"},
    "redraw": {"type": Path, "metavar": "FILE", "help": "measure nothing: print and plot these earlier results"},
}


def shared(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add options that benchmarks have in common.

    Args:
        parser: of one benchmark.
        defaults: name in OPTIONS -> its default here. "parts" takes a sequence.
    """
    for name, default in defaults.items():
        default = ",".join(default) if name == "parts" else default
        parser.add_argument(f"--{name}", default=default, **OPTIONS[name])
    if "parts" in defaults:
        parser.add_argument("--part", help=argparse.SUPPRESS)
        parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)


def again(*words: object) -> list[str]:
    """The command that starts a benchmark in a new process.

    Args:
        words: name of the benchmark, options.
    """
    return [sys.executable, "-m", "scripts.bench", *map(str, words)]


def save_rows(path: Path | None, rows: list[Row], known: Row | None = None) -> None:
    """Write results as JSON if a file is wanted, with facts known before and the machine of the times."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**machine(), **(known or {}), "rows": rows}, indent=1, default=str) + "\n")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def over(options: argparse.Namespace) -> bool:
    """Whether the time of this part is over, so that nothing new is started."""
    return time.time() > options.until


def say(**row: Any) -> None:
    """Send a row to the process that started this part."""
    print(_MARK + json.dumps(row), flush=True)


def attempt(known: Row, measure: Callable[[], Row]) -> None:
    """Send the result of a measurement with what is known of it, or the reason why there is none."""
    try:
        say(**known, **measure())
    except Exception as error:  # of any kind: others' programs are measured too
        fatal = "CUDA error" in str(error) and not isinstance(error, torch.cuda.OutOfMemoryError)
        if not isinstance(error, ImportError):
            traceback.print_exc()
        say(**known, error=f"{type(error).__name__}: {error}"[:300])
        if fatal:  # nothing works in this process any more
            sys.exit(3)


def machine() -> Row:
    """The machine that the times belong to."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M:%S")}


def run_parts(
    options: argparse.Namespace, known: Row | None = None, show: Callable[[Row], str] = json.dumps
) -> list[Row]:
    """Rows of all parts, in the order of arrival; each has the part's name under "part".

    A part gets the remaining time, less five seconds for each later part.

    Args:
        options: of the command line, with "parts", "minutes" and "output" of `shared`.
        known: facts that are written with the rows.
        show: gives the text that is printed for a row.
    """
    parts = options.parts.split(",")
    end, rows = time.time() + 60 * options.minutes, []
    for k, part in enumerate(parts):
        until = end - 5.0 * (len(parts) - 1 - k)
        if until < time.time():
            rows.append({"part": part, "error": "no time was left"})
            continue
        began = time.time()
        for row in _rows_of(part, until):
            rows.append({"part": part, **row})
            print(show(rows[-1]), flush=True)
            save_rows(options.output, rows, known)
        print(f"# {part}: {time.time() - began:.0f} s", flush=True)
    return rows


def _rows_of(part: str, until: float) -> Iterator[Row]:
    command = again(*sys.argv[1:], "--part", part, "--until", until)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(max(1.0, until + _GRACE - time.time()), process.kill)
    timer.start()
    last: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                yield json.loads(line.removeprefix(_MARK))
            else:
                last = [*last[-11:], line.rstrip()]
        if process.wait():
            killed = process.returncode == -9
            print("\n".join(last), flush=True)
            yield {"error": "stopped: it took too long" if killed else f"ended with exit code {process.returncode}"}
    finally:
        timer.cancel()
        process.kill()
