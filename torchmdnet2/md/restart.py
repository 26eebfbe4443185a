"""Restart files: the state bit by bit, bound to the model and the physics of the run.

Safetensors with a JSON header and a checksum, written atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import BadCheckpoint, BadConfig
from ..files import atomic_write
from .state import State

__all__ = ["read_restart", "write_restart"]

_FORMAT = "torchmdnet2-md-2"


def write_restart(path: str | os.PathLike, state: State, facts: dict[str, Any]) -> None:
    """Write a restart file.

    Args:
        path: replaced in one piece.
        state: of the simulation. Noise needs none: it is a function of the seed and the step.
        facts: JSON-able: what a continuation must agree with, and how far the output files had got.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in state.tensors().items()}
    told = json.dumps({**facts, "step": state.step}, sort_keys=True)
    atomic_write(path, save(tensors, metadata={"format": _FORMAT, "facts": told, "digest": _digest(tensors, told)}))


def read_restart(path: str | os.PathLike, expected: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    """The state (on the CPU) and the facts of a restart file.

    Args:
        path: of the file.
        expected: facts that must be the same as when it was written.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: it is damaged.
        BadConfig: it belongs to another model, structure or setting.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such restart file; start without --restart")
    blob = Path(path).read_bytes()
    try:
        tensors = load(blob)
        size = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + size])["__metadata__"]
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']}, and this version reads {_FORMAT}")
        if header["digest"] != _digest(tensors, header["facts"]):
            raise ValueError("the checksum does not match")
        facts = json.loads(header["facts"])
        state = State(**tensors, step=facts["step"])
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{path}: not a restart file, or damaged: {error}") from error
    for name, value in expected.items():
        if facts.get(name) != value:
            raise BadConfig(
                f"{path} was written with {name} = {facts.get(name)} and this run has {value}: a restart continues the "
                "same simulation; give the same options, or start without --restart"
            )
    return state, facts


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
