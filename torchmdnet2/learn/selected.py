"""From selected frames of trajectories to frames that say where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .selection import Choice
from .trajectory import Trajectory

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["frames_of", "keys_of", "unlabelled"]


def frames_of(choices: Sequence[Choice], starts: Sequence[Atoms], number: int) -> list[Atoms]:
    """The selected frames; `info` holds round, reason, spread (eV/Å), temperature (K), time (ps), replica, start.

    Args:
        choices: what was selected.
        starts: the structures that the replicas started from.
        number: of the round that they will be labelled in.
    """
    frames = []
    for run, k, reason in choices:
        atoms = starts[run.start].copy()
        atoms.calc = None
        atoms.set_positions(run.pos[k], apply_constraint=False)
        kept = {name: atoms.info[name] for name in ("charge", "spin") if name in atoms.info}
        atoms.info = {
            **kept, "round": number, "reason": reason, "spread": float(run.spread[k]),
            "temperature_K": run.temperature, "time_ps": float(run.time[k]), "replica": run.replica,
            "start": run.start,
        }  # fmt: skip
        frames.append(atoms)
    return frames


def keys_of(frames: Iterable[Atoms]) -> set[bytes]:
    """What frames are recognised by: elements and positions, rounded to 10⁻⁶ Å."""
    return {_key(atoms.numbers, atoms.positions) for atoms in frames}


def unlabelled(runs: Sequence[Trajectory], starts: Sequence[Atoms], known: set[bytes]) -> list[Trajectory]:
    """The replicas without the frames that are labelled already, as the starts often are."""
    left = []
    for run in runs:
        numbers = starts[run.start].numbers
        new = np.array([_key(numbers, pos) not in known for pos in run.pos], dtype=bool)
        facts = {name: value for name, value in vars(run).items() if not isinstance(value, np.ndarray)}
        arrays = {name: value[new] for name, value in vars(run).items() if isinstance(value, np.ndarray)}
        left.append(Trajectory(**facts, **arrays))
    return left


def _key(numbers: NDArray[np.int64], pos: NDArray[np.float64]) -> bytes:
    return numbers.astype(np.int64).tobytes() + (np.round(pos, 6) + 0.0).tobytes()  # + 0.0: no negative zeros
