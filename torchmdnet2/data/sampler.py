"""Which frames make up the batches of an epoch: a function of (seed, epoch) alone, so a run can be resumed exactly.

Batches have a number of frames, or as many as fit into a budget of atoms or edges. Those of one epoch differ little in
cost: frames are taken in random order a window of batches at a time, and the frames of a window are dealt out, the
largest first, each to the batch that has least. Every frame comes once per epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import torch

from ..errors import BadData

__all__ = ["epoch_batches", "epoch_order", "in_order"]

_WINDOW = 32  # batches


def epoch_order(num_frames: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of one epoch as positions 0 … num_frames − 1, a function of the arguments alone.

    Batches differ in size by at most one frame, so that none has a much noisier gradient than the others.
    """
    order = _shuffled(num_frames, seed, epoch)
    return [part.tolist() for part in np.array_split(order, -(-num_frames // batch_size))]


def in_order(num_frames: int, batch_size: int) -> list[list[int]]:
    """Batches of consecutive positions."""
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
    """Batches of one epoch as positions 0 … len(atoms) − 1.

    Args:
        atoms: [frames] number of atoms of each.
        edges: [frames] number of edges of each.
        seed, epoch: of the random order.
        batch_size: frames of a batch, if it is given: batches differ in size by at most one frame.
        max_atoms, max_edges: otherwise, what a batch has at most; one of them or both.
        name: position -> what to call the frame, for messages.

    Returns:
        One list of positions for each step.

    Raises:
        BadData: a frame alone is larger than the budget; names it.
        ValueError: neither a batch size nor a budget is given, or both are.
    """
    if (batch_size is None) == (max_atoms is None and max_edges is None):
        raise ValueError("give batch_size, or else max_atoms or max_edges")
    order = _shuffled(len(atoms), seed, epoch)
    if batch_size is not None:
        cost = np.asarray(edges, dtype=np.float64)
        return _of_size(order, cost, batch_size)
    return _within_budget(order, _share(atoms, edges, max_atoms, max_edges, name))


def _shuffled(num_frames: int, seed: int, epoch: int) -> np.ndarray:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_frames, generator=generator).numpy()


def _of_size(order: np.ndarray, cost: np.ndarray, batch_size: int) -> list[list[int]]:
    """Batches of equal numbers of frames, up to one, and similar cost."""
    batches: list[list[int]] = []
    parts = np.array_split(order, -(-len(order) // batch_size))
    for first in range(0, len(parts), _WINDOW):
        window = parts[first : first + _WINDOW]
        frames, width = np.concatenate(window), len(window)
        frames = frames[np.argsort(-cost[frames], kind="stable")]
        rows = -(-len(frames) // width)
        load, dealt = np.zeros(width), np.full((rows, width), -1, dtype=np.int64)
        for row in range(rows):  # each batch gets one frame of each row: the largest where least is so far
            chosen = frames[row * width : (row + 1) * width]
            to = np.argsort(load, kind="stable")[: len(chosen)]
            dealt[row, to] = chosen
            load[to] += cost[chosen]
        batches += [column[column >= 0].tolist() for column in dealt.T]
    return batches


def _share(
    atoms: np.ndarray, edges: np.ndarray, max_atoms: int | None, max_edges: int | None, name: Callable[[int], str]
) -> np.ndarray:
    """The part of a batch's budget that each frame needs, [frames]."""
    share = np.zeros(len(atoms))
    for values, most, what in ((atoms, max_atoms, "atoms"), (edges, max_edges, "edges")):
        if most is not None:
            share = np.maximum(share, np.asarray(values) / most)
            large = np.flatnonzero(np.asarray(values) > most)
            if len(large):
                frame = int(large[np.argmax(np.asarray(values)[large])])
                raise BadData(
                    f"{name(frame)}: it has {int(values[frame])} {what}, and a batch may have {most} at most; raise "
                    f"max_{what}, or leave out {'this frame' if len(large) == 1 else f'{len(large)} such frames'}"
                )
    return share


def _within_budget(order: np.ndarray, share: np.ndarray) -> list[list[int]]:
    """As few batches as possible, about, whose shares are at most 1 and similar."""
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
    """Frames dealt out to a number of batches, the largest first, each where least is; and the largest batch's cost."""
    frames = frames[np.argsort(-cost[frames], kind="stable")]
    dealt: list[list[int]] = [[] for _ in range(number)]
    heap = [(0.0, k) for k in range(number)]
    for frame, own in zip(frames.tolist(), cost[frames].tolist(), strict=True):
        load, k = heap[0]
        dealt[k].append(frame)
        heapq.heapreplace(heap, (load + own, k))
    return dealt, max(heap)[0]
