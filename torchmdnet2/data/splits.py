"""Which frames train, which validate, which test: as lists of indices, kept in a JSON file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadData
from ..files import atomic_write
from .dataset import Dataset

__all__ = ["Splits", "fingerprint", "make_splits"]

_FORMAT = "torchmdnet2 splits 1"
_FINGERPRINT_FRAMES = 256


@dataclass
class Splits:
    """Indices of frames; none is in two parts.

    Attributes:
        train: frames to train on.
        val: frames to choose the best weights with.
        test: frames for the final errors.
    """

    train: list[int]
    val: list[int]
    test: list[int]

    def save(self, path: str | PathLike, dataset: Dataset) -> None:
        """Write them as JSON, together with the length and the fingerprint of their data set."""
        content = {"format": _FORMAT, "num_frames": len(dataset), "fingerprint": fingerprint(dataset), **asdict(self)}
        atomic_write(path, json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | PathLike, dataset: Dataset) -> Splits:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: no such file.
            BadData: it is not such a file, was made for another data set, or a frame is in it twice.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path}: this is not a file of splits: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise BadData(f"{path}: this is not a file of splits: its format is not '{_FORMAT}'")
        if content.get("num_frames") != len(dataset):
            raise BadData(
                f"{path}: these splits were made for {content.get('num_frames')} frames, not for {len(dataset)}"
            )
        if content.get("fingerprint") != fingerprint(dataset):
            raise BadData(f"{path}: these splits were made for other frames: the structures differ")
        parts = [_indices(content.get(name), name, len(dataset), str(path)) for name in ("train", "val", "test")]
        together = [index for part in parts for index in part]
        if len(set(together)) != len(together):
            twice = next(index for index in together if together.count(index) > 1)
            raise BadData(f"{path}: frame {twice} is in the splits twice")
        return cls(*parts)


def make_splits(
    num_frames: int,
    train_size: int | float | None,
    val_size: int | float | None,
    test_size: int | float | None,
    seed: int = 0,
) -> Splits:
    """Divide frames at random; a function of the arguments alone.

    Args:
        num_frames: how many there are.
        train_size: number of frames (int), fraction of all (float, rounded down), or None for the rest.
        val_size: the same; at most one of the three is None.
        test_size: the same.
        seed: of the random order.

    Returns:
        The splits, indices ascending. Where three fractions add up to 1, frames lost by rounding go to train.

    Raises:
        ValueError: a size is negative or a fraction above 1, two are None, nothing is left for training, or more
            frames are asked for than there are.
    """
    sizes = {"train_size": train_size, "val_size": val_size, "test_size": test_size}
    rest = [name for name, size in sizes.items() if size is None]
    if len(rest) > 1:
        raise ValueError(f"only one of the sizes can be the rest (None), got {' and '.join(rest)}")
    counts = {name: _count(size, name, num_frames) for name, size in sizes.items() if size is not None}
    left = num_frames - sum(counts.values())
    if left < 0:
        asked = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise ValueError(f"{num_frames} frames are not enough for {asked}")
    fractions = [size for size in sizes.values() if isinstance(size, float)]
    if rest:
        counts[rest[0]] = left
    elif len(fractions) == 3 and abs(sum(fractions) - 1) < 1e-9:
        counts["train_size"] += left
    if counts["train_size"] < 1:
        raise ValueError(f"no frame is left to train on: train_size = {train_size} of {num_frames} frames")
    order = np.random.default_rng(seed).permutation(num_frames)
    ends = np.cumsum([counts[name] for name in sizes])
    train, val, test = (sorted(part.tolist()) for part in np.split(order, ends)[:3])
    return Splits(train, val, test)


def fingerprint(dataset: Dataset) -> str:
    """sha256 of the structures of up to 256 frames, evenly spread: cheap, and enough to tell two files apart."""
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _FINGERPRINT_FRAMES)).astype(int))
    digest = hashlib.sha256(str(len(dataset)).encode())
    for index in chosen.tolist():
        system = dataset[index].system
        for part in (system.z, system.pos, system.cell):
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


def _indices(value: Any, name: str, num_frames: int, path: str) -> list[int]:
    good = isinstance(value, list) and all(type(i) is int and 0 <= i < num_frames for i in value)
    if not good:
        raise BadData(f"{path}: {name} must be a list of frames between 0 and {num_frames - 1}")
    return value
