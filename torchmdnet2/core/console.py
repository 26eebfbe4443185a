"""A console whose reader may leave early, as in `torchmdnet2 md … | head`."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from rich.console import Console

__all__ = ["SteadyConsole", "silence"]


class SteadyConsole(Console):
    """A console that stops printing when its reader has left, so that the computation goes on and writes its files.

    rich ends the process with exit code 1, in its older versions with a BrokenPipeError.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


def silence(stream: Any) -> None:
    """Discard what is still to be written to a stream, also what Python's last flush would write."""
    with suppress(OSError, ValueError):  # no file, as within notebooks
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
