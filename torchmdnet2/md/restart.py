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
    differing = [name for name, value in expected.items() if facts.get(name) != value]
    if differing:
        words = "; ".join(_difference(name, facts.get(name), expected[name]) for name in differing)
        raise BadConfig(
            f"{path} is of another simulation: {words}. A restart continues the same one: give the same model, "
            "structure and options, or start without --restart"
        )
    return state, facts


_WORDS = {
    "timestep": "the time step",
    "ensemble": "the ensemble",
    "temperature": "the temperature",
    "friction": "the friction",
    "seed": "the seed",
    "replicas": "the number of replicas",
    "dtype": "the precision (--dtype)",
    "device": "the kind of device",
    "cell": "the cell",
    "pbc": "the periodicity (pbc)",
    "fixed atoms": "the list of fixed atoms",
    "charge": "the total charge",
    "spin": "the multiplicity 2S+1",
}
_UNITS = {"timestep": " fs", "temperature": " K", "friction": " per ps", "cell": " Å", "charge": " e"}
_UNSHOWN = {
    "model": "its model has other weights",
    "elements": "its atoms are others, or in another order",
    "masses": "its atoms have other masses",
}
"""What is known by a checksum only."""


def _difference(name: str, before: Any, now: Any) -> str:
    """What differs, in words."""
    if name in _UNSHOWN:
        return _UNSHOWN[name]
    return f"{_WORDS.get(name, name)} was {_shown(name, before)} there and is {_shown(name, now)} here"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not given"
    if value == []:
        return "none"
    return str(value).removeprefix("torch.") + _UNITS.get(name, "")


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
