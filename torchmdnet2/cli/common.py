"""What several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["Command", "add_device", "device_name", "make_console", "read_structures"]

Command = Callable[..., argparse.ArgumentParser]
"""Makes the parser of a command: name, function that runs it, one line of help."""


def add_device(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    told = dtype or "as stored"
    parser.add_argument("--dtype", default=dtype, help=f"float32 or float64, of the network (default: {told})")


def make_console() -> Console:
    from rich.console import Console

    return Console()


def device_name(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_structures(path: str, every: bool) -> Atoms | list[Atoms]:
    """What ASE reads from a file, or from file@index.

    Args:
        path: of the file.
        every: without an index, all structures instead of the last.

    Raises:
        FileNotFoundError: there is no such file.
        BadData: ASE cannot read it.
    """
    from ase.io import read

    from ..errors import BadData

    if not Path(path.partition("@")[0]).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return read(path, ":" if every and "@" not in path else None)
    except Exception as error:  # ASE's readers raise whatever they meet
        what = "structures" if every else "a structure"
        raise BadData(f"{path}: cannot be read as {what}: {str(error) or type(error).__name__}") from error
