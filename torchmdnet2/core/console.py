"""A console whose reader may leave early, as in `torchmdnet2 md … | head`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console

__all__ = ["SteadyConsole", "announce", "silence_stdout", "usable_cores"]


class SteadyConsole(Console):
    """Falls silent when nobody reads on: what is computed goes on, and its files are written.

    rich ends the process with exit code 1, in its older versions with a BrokenPipeError.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence_stdout()


def silence_stdout() -> None:
    """Send nowhere what is still to be printed, by Python's last flush as well."""
    with suppress(OSError, ValueError):  # no file, as within notebooks
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


# --- The one line that says that kernels are compiled, so that nobody waits in silence ---
#
# It is a warning of Python's logger "torchmdnet2.kernels", which goes to stderr where a program has set up no
# logging.
# `logging.getLogger("torchmdnet2").setLevel("ERROR")` switches it off.

_LOGGER = logging.getLogger("torchmdnet2.kernels")


def announce(number: int, device: str, seconds: float, folder: str) -> None:
    """Say that so many kernels are compiled now.

    Args:
        number: of kernels.
        device: "CPU" or "GPU".
        seconds: that it takes, about.
        folder: where they are kept; "" where they are not.
    """
    kernels = "1 kernel" if number == 1 else f"{number} kernels"
    kept = f"once: kept in {folder}" if folder else "in every process: there is no folder where they can be kept"
    _LOGGER.warning("compiling %s for the %s, about %d s, %s", kernels, device, max(1, round(seconds)), kept)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
