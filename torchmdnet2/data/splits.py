"""Splits into training, validation and test frames: lists of indices, stored in a JSON file.

The file has an entry per subset: {"train": {"files": […], "fingerprint": "…", "indices": […]}, …}.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import BadData
from .dataset import Dataset

__all__ = [
    "SUBSETS", "epoch_batches", "epoch_order", "fingerprint", "group_batches", "in_order", "make_splits", "read_splits",
    "splits_entry",
]  # fmt: skip


SUBSETS = ("train", "validation", "test")

_FINGERPRINT_FRAMES = 256


def make_splits(
    num_frames: int,
    train: int | float | None,
    validation: int | float | None,
    test: int | float | None,
    seed: int = 0,
    groups: np.ndarray | None = None,
) -> dict[str, list[int]]:
    """Divide frames at random; the result depends on the arguments only.

    Args:
        num_frames: number of frames.
        train: number of frames (int), fraction of all (float, rounded down), or None for the rest.
        validation: likewise; at most one of the three is None.
        test: likewise.
        seed: seed of the random order.
        groups: [num_frames] number of the group of each frame. A group is in one subset, whose size is the nearest
            possible; if there are too few groups for that, frames are divided as without. None: there are no groups.

    Returns:
        Subset -> indices, ascending; no frame is in two subsets. If three fractions add up to 1, frames lost by
        rounding go to train.

    Raises:
        ValueError: a size is negative or a fraction above 1, two sizes are None, nothing is left for training, or the
            sizes exceed the number of frames.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    rest = [name for name, size in sizes.items() if size is None]
    if len(rest) > 1:
        raise ValueError(f"only one of the sizes can be None (the rest), got {' and '.join(rest)}")
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
        raise ValueError(f"no frame of {num_frames} is left to train on with {asked}: leave some to train")
    ends = np.cumsum([counts[name] for name in sizes])
    whole = None if groups is None else _of_whole_groups(groups, ends, seed)
    order, ends = (np.random.default_rng(seed).permutation(num_frames), ends) if whole is None else whole
    return {name: np.sort(part).tolist() for name, part in zip(sizes, np.split(order, ends), strict=False)}


def _of_whole_groups(groups: np.ndarray, ends: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return frames in a random order of their groups, and ends of subsets at the nearest ends of groups; None if a
    subset would lose all its frames."""
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    shuffled = np.random.default_rng(seed).permutation(len(sizes))
    place = np.empty(len(sizes), dtype=np.int64)
    place[shuffled] = np.arange(len(sizes))
    edges = np.concatenate([[0], np.cumsum(sizes[shuffled])])
    moved = edges[np.abs(edges[:, None] - ends).argmin(0)]
    lost = (np.diff(moved, prepend=0) == 0) & (np.diff(ends, prepend=0) > 0)
    return None if lost.any() else (np.argsort(place[number.reshape(-1)], kind="stable"), moved)


def splits_entry(dataset: Dataset, indices: Sequence[int], files: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a subset in the file.

    Args:
        dataset: data set of the frames.
        indices: indices of the frames.
        files: files of the data set.
    """
    return {"files": list(files), "fingerprint": fingerprint(dataset), "indices": [int(i) for i in indices]}


def read_splits(path: str | PathLike, dataset: Dataset, files: Sequence[str]) -> dict[str, list[int]]:
    """Read the subsets of a data set from a file of splits; its data files may have moved.

    Args:
        path: the file of splits.
        dataset: the data set.
        files: files of the data set; they decide if an entry has no fingerprint.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: the file is not a file of splits, has no subset of this data set, or has a frame twice (except in
            training, where a bootstrap draws frames repeatedly).
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file of splits at {path}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        entries = [
            (name, dict(part), list(part["indices"]))
            for name, parts in content.items()
            for part in (parts if isinstance(parts, list) else [parts])  # a list: entries of several data sets
        ]
        if not entries:
            raise ValueError("no subsets")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}: this is not a file of splits (splits.json) from a training") from error
    mine, found = fingerprint(dataset), {}
    entries.sort(
        key=lambda entry: entry[1].get("files") == list(files)
    )  # the same structures at two levels: prefer the entry of these files
    for name, part, indices in entries:
        if name not in SUBSETS:
            raise BadData(f"{path}: unknown subset '{name}'; known: {', '.join(SUBSETS)}")
        if part["fingerprint"] == mine if "fingerprint" in part else part.get("files") == list(files):
            if not all(type(i) is int and 0 <= i < len(dataset) for i in indices):
                raise BadData(f"{path}: {name} must be a list of frames between 0 and {len(dataset) - 1}")
            found[name] = indices
    if not found:
        raise BadData(f"{path}: these splits belong to other frames: neither structures nor files are the same")
    parts = {name: np.asarray(part, dtype=np.int64) for name, part in found.items()}
    if "train" in parts:  # a bootstrap draws some of its frames repeatedly
        parts["train"] = np.unique(parts["train"])
    together = np.concatenate(list(parts.values()))
    frames, times = np.unique(together, return_counts=True)
    if (times > 1).any():
        raise BadData(f"{path}: frame {int(frames[times > 1][0])} is in the splits twice")
    return found


def fingerprint(dataset: Dataset) -> str:
    """Return the SHA-256 of up to 256 evenly spread frames, which is fast and distinguishes two files."""
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


# --- The batches of an epoch, which depend on (seed, epoch) alone, so that a run can be resumed exactly ---
#
# Batches have a fixed number of frames, or as many as fit into a budget of atoms or edges. Every frame comes once in an
# epoch. The batches of an epoch have similar costs: frames are taken in random order, a window of batches at a time,
# and the frames of a window are assigned, the largest first, each to the cheapest batch.

_WINDOW = 32  # batches


def epoch_order(num_frames: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch as positions 0 … num_frames − 1; they depend on the arguments only.

    Batches differ in size by at most one frame, so that none has a much noisier gradient than the others.
    """
    order = _shuffled(num_frames, seed, epoch)
    return [part.tolist() for part in np.array_split(order, -(-num_frames // batch_size))]


def in_order(num_frames: int, batch_size: int) -> list[list[int]]:
    """Return batches of consecutive positions."""
    return [list(range(i, min(i + batch_size, num_frames))) for i in range(0, num_frames, batch_size)]


def epoch_batches(
    atoms: np.ndarray,
    edges: np.ndarray,
    *,
    seed: int,
    epoch: int,
    batch_size: int | None = None,
    max_atoms: int | None = None,
    max_edges: int | None = None,
    name: Callable[[int], str] = "frame {}".format,
) -> list[list[int]]:
    """Return the batches of one epoch as positions 0 … len(atoms) − 1.

    Args:
        atoms: [frames] number of atoms of each frame.
        edges: [frames] number of edges of each frame.
        seed, epoch: these determine the random order.
        batch_size: number of frames in a batch; batches differ in size by at most one frame.
        max_atoms, max_edges: otherwise the largest number of atoms and edges in a batch; one of them or both.
        name: function that returns the name of the frame at a position, for messages.

    Returns:
        One list of positions for each step.

    Raises:
        BadData: a single frame is larger than the budget; the message names it.
        ValueError: neither a batch size nor a budget is given, or both are.
    """
    if (batch_size is None) == (max_atoms is None and max_edges is None):
        raise ValueError("give batch_size, or else max_atoms or max_edges")
    order = _shuffled(len(atoms), seed, epoch)
    if batch_size is not None:
        cost = np.asarray(edges, dtype=np.float64)
        return _of_size(order, cost, batch_size)
    return _within_budget(order, _share(atoms, edges, max_atoms, max_edges, name))


def group_batches(frames: np.ndarray, edges: np.ndarray, *, seed: int, epoch: int, batch_size: int) -> list[list[int]]:
    """Return the batches of one epoch as positions of groups, each of which is in one batch as a whole.

    Batches have similar numbers of edges, as those of `epoch_batches`: few sizes mean few CUDA graphs.

    Args:
        frames: [groups] number of frames of each group, at most batch_size.
        edges: [groups] number of edges of all frames of each group.
        seed, epoch: these determine the random order.
        batch_size: largest number of frames in a batch.
    """
    order = _shuffled(len(frames), seed, epoch)
    window = max(1, int(_WINDOW * batch_size / max(frames.mean(), 1))) if len(frames) else 1
    batches: list[list[int]] = []
    for first in range(0, len(order), window):
        groups = order[first : first + window]
        number = -(-int(frames[groups].sum()) // batch_size)
        while (dealt := _deal_with_room(groups, edges, frames, batch_size, number)) is None:
            number += 1
        batches += [batch for batch in dealt if batch]
    return batches


def _deal_with_room(
    groups: np.ndarray, cost: np.ndarray, frames: np.ndarray, most: int, number: int
) -> list[list[int]] | None:
    """Assign groups, the most expensive first, each to the cheapest batch that has room for its frames; None if there
    is none."""
    dealt: list[list[int]] = [[] for _ in range(number)]
    heap = [(0.0, k) for k in range(number)]
    room = [most] * number
    for group in groups[np.argsort(-cost[groups], kind="stable")].tolist():
        full = []
        while heap and room[heap[0][1]] < frames[group]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, k = heap[0]
        dealt[k].append(group)
        room[k] -= int(frames[group])
        heapq.heapreplace(heap, (load + float(cost[group]), k))
        for entry in full:
            heapq.heappush(heap, entry)
    return dealt


def _shuffled(num_frames: int, seed: int, epoch: int) -> np.ndarray:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_frames, generator=generator).numpy()


def _of_size(order: np.ndarray, cost: np.ndarray, batch_size: int) -> list[list[int]]:
    """Return batches of similar cost whose numbers of frames differ by one at most."""
    batches: list[list[int]] = []
    parts = np.array_split(order, -(-len(order) // batch_size))
    for first in range(0, len(parts), _WINDOW):
        window = parts[first : first + _WINDOW]
        frames, width = np.concatenate(window), len(window)
        frames = frames[np.argsort(-cost[frames], kind="stable")]
        rows = -(-len(frames) // width)
        load, dealt = np.zeros(width), np.full((rows, width), -1, dtype=np.int64)
        for row in range(rows):  # each batch gets one frame of each row; the cheapest batch gets the largest
            chosen = frames[row * width : (row + 1) * width]
            to = np.argsort(load, kind="stable")[: len(chosen)]
            dealt[row, to] = chosen
            load[to] += cost[chosen]
        batches += [column[column >= 0].tolist() for column in dealt.T]
    return batches


def _share(
    atoms: np.ndarray, edges: np.ndarray, max_atoms: int | None, max_edges: int | None, name: Callable[[int], str]
) -> np.ndarray:
    """Return the share of a batch's budget that each frame needs, [frames]."""
    share = np.zeros(len(atoms))
    for values, most, what in ((atoms, max_atoms, "atoms"), (edges, max_edges, "edges")):
        if most is not None:
            share = np.maximum(share, np.asarray(values) / most)
            large = np.flatnonzero(np.asarray(values) > most)
            if len(large):
                frame = int(large[np.argmax(np.asarray(values)[large])])
                raise BadData(
                    f"{name(frame)}: the frame has {int(values[frame])} {what}, but a batch at most {most}; raise "
                    f"max_{what}, or leave out {'this frame' if len(large) == 1 else f'{len(large)} such frames'}"
                )
    return share


def _within_budget(order: np.ndarray, share: np.ndarray) -> list[list[int]]:
    """Return nearly the least number of batches, with similar shares of at most 1."""
    batches: list[list[int]] = []
    window = max(1, int(_WINDOW / max(share.mean(), 1e-12)))
    for first in range(0, len(order), window):
        frames = order[first : first + window]
        number = max(1, int(np.ceil(share[frames].sum() - 1e-9)))
        while True:
            dealt, most = _deal(frames, share, number)
            if most <= 1 + 1e-9:
                break
            number += 1
        batches += [batch for batch in dealt if batch]
    return batches


def _deal(frames: np.ndarray, cost: np.ndarray, number: int) -> tuple[list[list[int]], float]:
    """Assign frames, the largest first, each to the cheapest batch; return batches and their largest cost."""
    frames = frames[np.argsort(-cost[frames], kind="stable")]
    dealt: list[list[int]] = [[] for _ in range(number)]
    heap = [(0.0, k) for k in range(number)]
    for frame, own in zip(frames.tolist(), cost[frames].tolist(), strict=True):
        load, k = heap[0]
        dealt[k].append(frame)
        heapq.heapreplace(heap, (load + own, k))
    return dealt, max(heap)[0]
