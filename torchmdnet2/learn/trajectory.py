"""What the dynamics of a round leave behind: positions of each replica, the spread of the committee, and its end."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files import atomic_write

__all__ = ["Trajectory", "read_trajectories", "write_trajectories"]

_PLAIN = ("temperature", "replica", "member", "start", "broken_at", "reason")


@dataclass(eq=False)
class Trajectory:
    """K frames of one replica of n atoms, all from before it broke.

    Attributes:
        temperature: K, of the bath.
        replica, member, start: its number, the model that ran it, and the frame that it started from.
        broken_at: ps; None if it stayed whole.
        reason: why it broke.
        time: [K] ps, ascending.
        pos: [K, n, 3] Å, not wrapped into the cell.
        regular: [K] whether a frame is one of those at equal intervals; the others are the last before a break.
        spread: [K] eV/Å, standard deviation of the members' forces on the atom where it is largest.
    """

    temperature: float
    replica: int
    member: int
    start: int
    broken_at: float | None
    reason: str
    time: NDArray[np.float64]
    pos: NDArray[np.float64]
    regular: NDArray[np.bool_]
    spread: NDArray[np.float64]

    @property
    def whole(self) -> bool:
        return self.broken_at is None


def write_trajectories(path: Path, runs: Sequence[Trajectory]) -> None:
    """All replicas at one temperature as .npz; a reader sees all of it or nothing."""
    arrays: dict[str, Any] = {
        f"{name}_{k}": value for k, run in enumerate(runs) for name, value in _arrays(run).items()
    }
    facts = [{name: value for name, value in vars(run).items() if name in _PLAIN} for run in runs]
    buffer = io.BytesIO()
    np.savez(buffer, facts=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8), **arrays)
    atomic_write(path, buffer.getvalue())


def read_trajectories(path: Path) -> list[Trajectory]:
    """What `write_trajectories` wrote, to the bit."""
    with np.load(path, allow_pickle=False) as file:
        facts = json.loads(file["facts"].tobytes())
        names = ("time", "pos", "regular", "spread")
        return [Trajectory(**own, **{name: file[f"{name}_{k}"] for name in names}) for k, own in enumerate(facts)]


def _arrays(run: Trajectory) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(run).items() if name not in _PLAIN}
