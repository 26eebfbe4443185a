"""A process that labels frames: it gets (number, frame, folder) through a pipe and gives back (number, labels, error).

Nothing heavy is imported before the number of threads is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["serve"]


def serve(pipe: Connection, section: Mapping[str, Any], threads: int) -> None:
    """Label frames until the other end of the pipe is closed.

    Args:
        pipe: to the pool.
        section: name and arguments of the labeller.
        threads: of each calculation.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)  # of this process, before the libraries are loaded that read them
    if hasattr(os, "setsid"):
        os.setsid()  # with the programs that it starts, a group that can be ended together
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the pool has gone
        while True:
            number, atoms, folder = pipe.recv()
            pipe.send((number, *_attempt(section, atoms, folder)))


_made: dict[str, Any] = {}


def _attempt(section: Mapping[str, Any], atoms: Any, folder: str) -> tuple[Any, str | None]:
    """Labels and None, or None and why there are none."""
    here = Path.cwd()
    os.chdir(folder)
    with open("output.log", "wb") as log:  # what programs print belongs to the frame, not to the console
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    try:
        if "labeller" not in _made:
            from .labellers import make_labeller

            os.chdir(here)  # files of the configuration are relative to it
            _made["labeller"] = make_labeller(section)
            os.chdir(folder)
        labels = _made["labeller"](atoms, Path(folder))
        return (float(labels.energy), labels.forces), None
    except Exception as error:  # a labeller may fail in any way; the frame is kept aside
        words = " ".join(str(error).split())
        kind = type(error).__name__
        return None, words if kind == "LabellingFailed" else f"{kind}: {words}" if words else kind
    finally:
        os.chdir(here)
