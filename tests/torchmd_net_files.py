"""Models, inputs and outputs of TorchMD-Net 3.1.0, from tests/golden/torchmd_net (README.md there)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from torchmdnet2 import System

FOLDER = Path(__file__).resolve().parent / "golden" / "torchmd_net"


class Golden(NamedTuple):
    """Of one model: its hyper-parameters and tensors as a checkpoint has them, and everything in its files."""

    args: dict  # without the three keys that are only in our files, which are in `given`
    state: dict[str, Tensor]  # float64
    data: dict[str, Tensor]  # in/…, out/…
    given: dict
    system: System  # the two molecules, with their charges if the model takes them


def read_golden(name: str) -> Golden:
    """The golden files of a model; of a Lightning checkpoint only what is in the .safetensors."""
    tensors = load_file(FOLDER / f"{name}.safetensors")
    path = FOLDER / f"{name}.json"
    given = json.loads(path.read_text()) if path.is_file() else {"passes_total_charge": False}
    args = {key: value for key, value in given.items() if key not in ("mean", "std", "passes_total_charge")}
    state = {k.removeprefix("model/"): doubled(v) for k, v in tensors.items() if k.startswith("model/")}
    data = {k: v for k, v in tensors.items() if not k.startswith("model/")}
    charge = data["in/q"] if given["passes_total_charge"] else None
    return Golden(args, state, data, given, System(data["in/z"], data["in/pos"], batch=data["in/batch"], charge=charge))


def doubled(value: Tensor) -> Tensor:
    """What float32 holds exactly is stored so."""
    return value.double() if value.is_floating_point() else value
