"""Files of PyTorch that come from others: tensors and plain data are read, and nothing in them is run."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import BadCheckpoint

__all__ = ["Layout", "prove_layout", "read_tensor_file", "reorder_rows"]


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


# --- Detection of the version of TorchMD-Net that wrote a TensorNet, from the tensors of the checkpoint ---
#
# Version 3 changed two things that no name tells: the order of the rows of some linear layers, (F, 3) before and (3,
# F)
# since, and the sign of the antisymmetric part of the embedding (which only SO(3) models feel).

Layout = Literal["2.x", "3.x"]

_OLD_NAMES = (re.compile(r"^output_model\.output_network\.\d+\.(weight|bias)$"), re.compile(r"\.update_net\.\d+\."))
_EMBEDDING_ROWS = re.compile(r"^representation_model\.tensor_embedding\.linears_scalar\.1\.(weight|bias)$")
_LAYER_ROWS = re.compile(r"^representation_model\.layers\.\d+\.linears_scalar\.2\.(weight|bias)$")


def prove_layout(state: Mapping[str, Tensor], args: Mapping[str, Any], decisions: list[str]) -> Layout:
    """The layout that the evidence in a checkpoint proves.

    Evidence, strongest first: the buffer `distance.box`, which version 3 stores and version 2 does not; names of
    layers from before version 3; the hyper-parameter `check_errors`, which users also carry along in YAML files of
    version 2 and which therefore proves nothing against the buffer.

    Args:
        state: their tensors, without the leading "model.".
        args: their hyper-parameters.
        decisions: a sentence is added.

    Raises:
        BadCheckpoint: the evidence contradicts itself, or there is none.
    """
    box = "representation_model.distance.box" in state
    old_names = any(pattern.search(name) for pattern in _OLD_NAMES for name in state)
    check_errors = "check_errors" in args
    if box and old_names:
        raise BadCheckpoint(
            "the checkpoint holds the buffer distance.box of version 3 and layer names of version 2: it was changed by "
            'hand. Say which it is with layout="2.x" or "3.x", and check an energy that you know'
        )
    if box:
        note = "; the hyper-parameter check_errors was carried along and means nothing" if check_errors else ""
        decisions.append(f"written by TorchMD-Net 3.x: it stores the buffer distance.box{note}; rows are in order")
        return "3.x"
    if old_names or check_errors:
        reason = "old layer names" if old_names else "no buffer distance.box and the hyper-parameter check_errors"
        decisions.append(f"written by TorchMD-Net 2.x ({reason}): rows of the filters are put in the new order")
        return "2.x"
    raise BadCheckpoint(
        "nothing in the checkpoint proves whether TorchMD-Net 2 or 3 wrote it, and the order of the weights depends on "
        'it. Say so with layout="2.x" or "3.x", and check an energy that you know'
    )


def reorder_rows(state: Mapping[str, Tensor], model: str, to: Layout) -> dict[str, Tensor]:
    """The tensors with the rows of TensorNet's gates in the order of version 3 (from 2), or of 2 (from 3).

    Args:
        state: their tensors.
        model: "tensornet": embedding and layers differ; "tensornet2": only the embedding does.
        to: the layout wanted.
    """
    patterns = (_EMBEDDING_ROWS, _LAYER_ROWS) if model == "tensornet" else (_EMBEDDING_ROWS,)
    result = dict(state)
    for name, value in state.items():
        if any(pattern.match(name) for pattern in patterns):
            rows = value.shape[0] // 3
            shape = (rows, 3) if to == "3.x" else (3, rows)
            result[name] = torch.transpose(value.unflatten(0, shape), 0, 1).flatten(0, 1).contiguous()
    return result
