"""ensemble.json: the model files of an ensemble, with their checksums."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from .checkpoint import read_header
from .errors import BadCheckpoint
from .files import atomic_write

__all__ = ["read_ensemble", "write_ensemble"]

_FORMAT = "torchmdnet2 ensemble 1"


def write_ensemble(models: Sequence[str | os.PathLike], path: str | os.PathLike) -> Path:
    """List model files, with their checksums, in a JSON file that `Ensemble.load` reads.

    Args:
        models: .tmn files in the file's folder or below.
        path: usually ensemble.json.
    """
    path = Path(path)
    members = [
        {"file": Path(os.path.relpath(model, path.parent)).as_posix(), "sha256": read_header(model)["sha256"]}
        for model in models
    ]
    atomic_write(path, json.dumps({"format": _FORMAT, "members": members}, indent=1) + "\n")
    return path


def read_ensemble(path: str | os.PathLike) -> list[Path]:
    """The model files that an ensemble.json lists.

    Raises:
        FileNotFoundError: it, or a model, is not there.
        BadCheckpoint: not such a file, or a model is not the one that was listed.
    """
    path = Path(path)
    if path.suffix == ".tmn":
        raise BadCheckpoint(f"{path}: a single model has no spread: give a list of models, or an ensemble.json")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ensemble file; `torchmdnet2 train --members` writes ensemble.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if content["format"] != _FORMAT:
            raise BadCheckpoint(f"{path}: not an ensemble file that this version of torchmdnet2 reads")
        listed = [(path.parent / str(member["file"]), str(member["sha256"])) for member in content["members"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        words = "not an ensemble file, as `torchmdnet2 train --members` writes (ensemble.json)"
        raise BadCheckpoint(f"{path}: {words}") from error
    for model, sha256 in listed:
        if read_header(model)["sha256"] != sha256:
            raise BadCheckpoint(f"{model}: not the model that {path} lists: its checksum differs")
    return [model for model, _ in listed]
