"""Contribution of each frame to the statistics of a data set, computed in one pass, for any choice of frames.

Shapes: S frames, K elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .labels import LABELS
from .sample import Sample

__all__ = ["FrameFacts", "read_facts", "structure_keys"]

_CHUNK = 1024  # frames at a time
_RESOLUTION = 1e-5  # Å
_ODD = [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F]


@dataclass(frozen=True, eq=False)
class FrameFacts:
    """Numbers of each frame.

    Attributes:
        elements: [K] atomic numbers, ascending.
        counts: [S, K] atoms of each element.
        labelled: label -> [S] whether the frame has it, at least in part.
        energies: [S] eV, NaN where a frame has none.
        charges, spins: [S] total charge, e, and spin multiplicity.
        force_square, force_count: [S] sum of the squared force components, eV²/Å², and their number.
        keys: [S] the same for the same structure, see `structure_keys`.
    """

    elements: np.ndarray
    counts: np.ndarray
    labelled: dict[str, np.ndarray]
    energies: np.ndarray
    charges: np.ndarray
    spins: np.ndarray
    force_square: np.ndarray
    force_count: np.ndarray
    keys: np.ndarray

    def of(self, frames: np.ndarray) -> FrameFacts:
        """Those of some frames, in the order given; elements and labels that none of them has are left out."""
        counts = self.counts[frames]
        there = counts.any(0)
        labelled = {name: has[frames] for name, has in self.labelled.items()}
        rest = {name: getattr(self, name)[frames]
                for name in ("energies", "charges", "spins", "force_square", "force_count", "keys")}  # fmt: skip
        return FrameFacts(
            self.elements[there], counts[:, there], {n: has for n, has in labelled.items() if has.any()}, **rest
        )

    @classmethod
    def joined(cls, parts: Sequence[FrameFacts]) -> FrameFacts:
        """Those of several runs of frames, one after the other."""
        elements = np.unique(np.concatenate([part.elements for part in parts]))
        sizes = [len(part.energies) for part in parts]
        counts = np.zeros((sum(sizes), len(elements)), dtype=np.int32)
        ends = np.cumsum(sizes)
        for part, end, size in zip(parts, ends, sizes, strict=True):
            counts[end - size : end, np.searchsorted(elements, part.elements)] = part.counts
        names = dict.fromkeys(name for part in parts for name in part.labelled)
        labelled = {
            name: np.concatenate(
                [part.labelled.get(name, np.zeros(n, dtype=bool)) for part, n in zip(parts, sizes, strict=True)]
            )
            for name in names
        }
        rest = {name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("energies", "charges", "spins", "force_square", "force_count", "keys")}  # fmt: skip
        return cls(elements, counts, labelled, **rest)


def read_facts(read: Callable[[np.ndarray], Sample], frames: np.ndarray) -> FrameFacts:
    """Read them from the frames.

    Args:
        read: the frames of given numbers as one batch: `Dataset.batch`.
        frames: [S] indices, at least one.

    Raises:
        BadData: a frame cannot be used.
    """
    return FrameFacts.joined([_facts(read(frames[first : first + _CHUNK])) for first in range(0, len(frames), _CHUNK)])


def _facts(batch: Sample) -> FrameFacts:
    system, labels = batch.system, batch.labels
    owner, count = system.batch.numpy(), system.num_systems
    table = np.bincount(owner * 256 + system.z.numpy(), minlength=count * 256).reshape(count, 256)
    present = np.flatnonzero(table.any(0))
    labelled = {}
    for name, value in labels.items():
        there = ~torch.isnan(value).reshape(len(value), -1).all(1).numpy()
        labelled[name] = np.bincount(owner[there], minlength=count) > 0 if LABELS[name].per_atom else there
    square: np.ndarray = np.zeros(count)
    number: np.ndarray = np.zeros(count, dtype=np.int64)
    if "forces" in labels:
        forces = labels["forces"].numpy()
        known = ~np.isnan(forces)
        square = np.bincount(owner, weights=np.square(np.where(known, forces, 0.0)).sum(1), minlength=count)
        number = np.bincount(owner, weights=known.sum(1), minlength=count).astype(np.int64)
    return FrameFacts(
        present,
        table[:, present].astype(np.int32),
        labelled,
        labels["energy"].numpy() if "energy" in labels else np.full(count, np.nan),
        system.charge.numpy().astype(np.int32),
        system.spin.numpy().astype(np.int32),
        square,
        number,
        structure_keys(batch),
    )


def structure_keys(batch: Sample) -> np.ndarray:
    """A number for each structure, the same where elements, positions (to 1e-5 Å), cell, charge and spin are the same.

    Different structures have different numbers but for one pair in 2⁶⁴; two that are the same but for rounding at
    the last of these digits are taken for different ones.

    Returns:
        [B] uint64.
    """
    system = batch.system
    owner = system.batch.numpy()
    sizes = np.bincount(owner, minlength=system.num_systems)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows = np.column_stack([_whole(system.pos.numpy()), system.z.numpy(), place])
    atoms = _mixed(rows)
    ends = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(atoms)])  # sums modulo 2⁶⁴, as are differences
    last = np.cumsum(sizes)
    sums = ends[last] - ends[last - sizes]
    cells = _whole(system.cell.numpy().reshape(-1, 9))
    whole = np.column_stack([system.charge.numpy().astype(np.int64), system.spin.numpy(), system.pbc.numpy()])
    return _mixed(np.column_stack([sums.view(np.int64), cells, whole]))


def _whole(lengths: np.ndarray) -> np.ndarray:
    return np.rint(lengths * (1 / _RESOLUTION)).astype(np.int64)


def _mixed(rows: np.ndarray) -> np.ndarray:
    """A well spread number for each row of integers, [n]."""
    found = np.zeros(len(rows), dtype=np.uint64)
    for k, column in enumerate(rows.T):
        found = (found ^ column.astype(np.int64).view(np.uint64)) * np.uint64(_ODD[k % len(_ODD)])
        found ^= found >> np.uint64(29)
    return found
