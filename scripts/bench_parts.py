"""Benchmarks in parts, each in a process of its own: one that fails or hangs costs the others nothing.

A script calls `run_parts`, which starts it again with `--part NAME` for every part and collects what that process says,
a row at a time. Rows are on disk as soon as they are known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Row", "add_options", "attempt", "machine", "over", "run_parts", "say"]

Row = dict[str, Any]
_MARK = "ROW "  # other programs print to the same stream
_GRACE = 20.0  # seconds that a part may be late, in the middle of a row


def add_options(parser: argparse.ArgumentParser, parts: Sequence[str], minutes: float) -> None:
    """The options that every benchmark in parts has."""
    parser.add_argument("--parts", default=",".join(parts), help="what is run, in this order (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=minutes, help="for everything (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file, written after every row")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)


def over(options: argparse.Namespace) -> bool:
    """The time of this part is over: nothing new is begun."""
    return time.time() > options.until


def say(**row: Any) -> None:
    """Tell a row to the process that started this part."""
    print(_MARK + json.dumps(row), flush=True)


def attempt(known: Row, measure: Callable[[], Row]) -> None:
    """Say what a measurement gives beside what is known of it, or why there is nothing."""
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
    """What the times belong to."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M:%S")}


def run_parts(
    options: argparse.Namespace, known: Row | None = None, show: Callable[[Row], str] = json.dumps
) -> list[Row]:
    """Rows of all parts, as they come; each has the part's name under "part".

    A part gets all the time that is left, but for five seconds for each of those after it.

    Args:
        options: of the command line, with those of `add_options`.
        known: written beside the rows.
        show: what is printed of a row.
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
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps({**machine(), **(known or {}), "rows": rows}, indent=1) + "\n")
        print(f"# {part}: {time.time() - began:.0f} s", flush=True)
    return rows


def _rows_of(part: str, until: float) -> Iterator[Row]:
    command = [sys.executable, *sys.argv, "--part", part, "--until", str(until)]
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
