"""Splits into training, validation and test frames: lists of indices, stored in a JSON file.

The file has an entry per subset: {"train": {"files": […], "fingerprint": "…", "indices": […]}, …}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadData
from .dataset import Dataset

__all__ = ["SUBSETS", "fingerprint", "make_splits", "read_splits", "splits_entry"]

SUBSETS = ("train", "validation", "test")

_FINGERPRINT_FRAMES = 256


def make_splits(
    num_frames: int,
    train: int | float | None,
    validation: int | float | None,
    test: int | float | None,
    seed: int = 0,
) -> dict[str, list[int]]:
    """Divide frames at random; a function of the arguments alone.

    Args:
        num_frames: how many there are.
        train: number of frames (int), fraction of all (float, rounded down), or None for the rest.
        validation: the same; at most one of the three is None.
        test: the same.
        seed: of the random order.

    Returns:
        Subset -> indices, ascending; no frame is in two of them. Where three fractions add up to 1, frames lost by
        rounding go to train.

    Raises:
        ValueError: a size is negative or a fraction above 1, two are None, nothing is left for training, or more
            frames are asked for than there are.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    rest = [name for name, size in sizes.items() if size is None]
    if len(rest) > 1:
        raise ValueError(f"only one of the sizes can be the rest (None), got {' and '.join(rest)}")
    counts = {name: _count(size, name, num_frames) for name, size in sizes.items() if size is not None}
    left = num_frames - sum(counts.values())
    asked = ", ".join(f"{name} = {'the rest' if size is None else size}" for name, size in sizes.items())
    if left < 0:
        raise ValueError(f"{num_frames} frames are not enough for {asked}")
    fractions = [size for size in sizes.values() if isinstance(size, float)]
    if rest:
        counts[rest[0]] = left
    elif len(fractions) == 3 and abs(sum(fractions) - 1) < 1e-9:
        counts["train"] += left
    if counts["train"] < 1:
        raise ValueError(f"of {num_frames} frames none is left to train on with {asked}: leave some to train")
    order = np.random.default_rng(seed).permutation(num_frames)
    ends = np.cumsum([counts[name] for name in sizes])
    return {name: np.sort(part).tolist() for name, part in zip(sizes, np.split(order, ends), strict=False)}


def splits_entry(dataset: Dataset, indices: Sequence[int], files: Sequence[str]) -> dict[str, Any]:
    """What the file says of a subset.

    Args:
        dataset: that its frames come from.
        indices: of its frames.
        files: that the data set was read from.
    """
    return {"files": list(files), "fingerprint": fingerprint(dataset), "indices": [int(i) for i in indices]}


def read_splits(path: str | PathLike, dataset: Dataset, files: Sequence[str]) -> dict[str, list[int]]:
    """The subsets in a file that were made of this data set, wherever its files are now.

    Args:
        path: the file.
        dataset: the data set.
        files: that it was read from; they decide where an entry has no fingerprint.

    Raises:
        FileNotFoundError: no such file.
        BadData: it is not such a file, has no subset of this data set, or a frame is in it twice (other than
            in training, as drawn by a bootstrap).
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of splits {path}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        entries = {name: (dict(part), list(part["indices"])) for name, part in content.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}: this is not a file of splits, as a training writes (splits.json)") from error
    mine, found = fingerprint(dataset), {}
    for name, (part, indices) in entries.items():
        if name not in SUBSETS:
            raise BadData(f"{path}: unknown subset '{name}'; known: {', '.join(SUBSETS)}")
        if part["fingerprint"] == mine if "fingerprint" in part else part.get("files") == list(files):
            if not all(type(i) is int and 0 <= i < len(dataset) for i in indices):
                raise BadData(f"{path}: {name} must be a list of frames between 0 and {len(dataset) - 1}")
            found[name] = indices
    if not found:
        raise BadData(f"{path}: these splits were made for other frames: neither structures nor files are the same")
    parts = {name: np.asarray(part, dtype=np.int64) for name, part in found.items()}
    if "train" in parts:  # a bootstrap draws some of its frames repeatedly
        parts["train"] = np.unique(parts["train"])
    together = np.concatenate(list(parts.values()))
    frames, times = np.unique(together, return_counts=True)
    if (times > 1).any():
        raise BadData(f"{path}: frame {int(frames[times > 1][0])} is in the splits twice")
    return found


def fingerprint(dataset: Dataset) -> str:
    """sha256 of the structures of up to 256 frames, evenly spread: cheap, and enough to tell two files apart."""
    digest = hashlib.sha256(str(len(dataset)).encode())
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _FINGERPRINT_FRAMES)).astype(int))
    if len(chosen):
        system = dataset.batch(chosen).system
        for part in (system.batch, system.z, system.pos, system.cell):
            digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _count(size: int | float, name: str, num_frames: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise ValueError(f"{name} must be a number of frames, a fraction or None, got {size!r}")
    if isinstance(size, float):
        if not 0 <= size <= 1:
            raise ValueError(f"{name} = {size} is not a fraction between 0 and 1; a number of frames is an integer")
        return int(size * num_frames + 1e-9)
    if size < 0:
        raise ValueError(f"{name} must not be negative, got {size}")
    return size
