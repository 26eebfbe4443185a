"""The complete state of a training, in one file: tensors and JSON, written atomically, nothing that can execute.

A safetensors file whose header carries `format`, `format_version`, `state` (JSON) and `sha256`, of all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.files import atomic_write
from ...errors import BadCheckpoint

__all__ = [
    "Interrupted", "catch_signals", "load_state", "optimizer_tensors", "restore_optimizer", "save_state", "select",
]  # fmt: skip


_FORMAT, _VERSION = "torchmdnet2-training-state", 2
_REMEDY = "; remove the file to train anew, or choose another output.folder"


def save_state(path: str | os.PathLike, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and plain data to one file; a crash leaves the old file or the new one, never a part.

    Args:
        path: usually state.safetensors in the run's folder.
        tensors: on any device.
        state: JSON-able; floating-point numbers come back exactly.
    """
    from safetensors.torch import save

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(state)
    header = {"format": _FORMAT, "format_version": str(_VERSION), "state": text, "sha256": _digest(plain, text)}
    atomic_write(path, save(plain, metadata=header))


def load_state(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_state` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        BadCheckpoint: damaged, or not a training state that this version reads.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such training state")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if header.get("format") != _FORMAT or header.get("format_version") != str(_VERSION):
            raise BadCheckpoint(f"{path}: not a training state that this version of torchmdnet2 reads")
        tensors = load(Path(path).read_bytes())
        if _digest(tensors, header["state"]) != header["sha256"]:
            raise BadCheckpoint(f"{path}: the checksum does not match: the training state is damaged{_REMEDY}")
        return tensors, json.loads(header["state"])
    except (SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path}: the training state is damaged: {error}{_REMEDY}") from error


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """sha256 of the numbers, their names, types and shapes, and of the text."""
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter, as "index.name" -> tensor."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, items in state.items() for name, value in items.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give back what `optimizer_tensors` took, in its own precision (`load_state_dict` would round to the weights')."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        parameter = parameters[int(index)]
        optimizer.state.setdefault(parameter, {})[name] = value.to(parameter.device)


def load_exactly(module: nn.Module, tensors: dict[str, Tensor], path: str | os.PathLike) -> None:
    """Load weights, naming the file when they do not fit."""
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise BadCheckpoint(f"{path}: the training state belongs to another model: {error}") from error


# --- Ctrl-C and SIGTERM (of a batch system) stop a training after the current step, with its state saved ---

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the training to stop.

    Args:
        number: of the signal.
        text: the message.
    """

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.exit_code = 128 + number


@contextmanager
def catch_signals() -> Iterator[Callable[[], int | None]]:
    """Within the block, the first SIGINT or SIGTERM is recorded; a second one raises KeyboardInterrupt at once.

    Yields:
        A function that gives the number of the signal, None before there was one. Outside the main thread, where
        Python has no signals, always None.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
