"""Files of PyTorch that come from others: tensors and plain data are read, and nothing in them is run."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from ..errors import BadCheckpoint

__all__ = ["read_tensor_file"]


def read_tensor_file(path: str | os.PathLike) -> Any:
    """What is in a file that torch.save wrote. There is no way to read classes or functions from it.

    Raises:
        BadCheckpoint: it is no such file, is damaged, or names code to run.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch, about files that it did not write
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with a file, it is a bad checkpoint; there is no second try
        raise BadCheckpoint(f"{path}: {_reason(path, str(error))}") from error


def _reason(path: str | os.PathLike, words: str) -> str:
    """Without PyTorch's own words: they advise to read the file in a way that runs what is in it."""
    named = re.search(r"GLOBAL ([\w.]+)", words)
    if named:
        return (
            f"not a checkpoint that can be read without running code from it: it names {named[1]}. "
            "A checkpoint holds only tensors and plain data"
        )
    with Path(path).open("rb") as file:
        start = file.read(4)
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        return "not a checkpoint: " + ("the file is empty" if not start else "PyTorch did not write this file")
    return "not a checkpoint that can be read: it is damaged, cut short, or holds more than tensors and plain data"
