"""What several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Command", "add_device", "device_name", "make_console"]

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
