"""The dynamics of a round: replicas run with the members in turn, and the committee judges their frames."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..ensemble import Ensemble
from ..md.guard import Bonds
from ..md.integrators import State
from ..md.options import MDOptions
from ..md.output import TableRow
from ..md.stability import ReplicaBatch, ReplicaProgress, ReplicaRun, alike, checked_start
from ..system import System
from .config import DynamicsConfig
from .selection import Trajectory

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["explore", "force_spread"]

_ATOMS = 4096  # of a batch that the committee evaluates


class _Sampled(ReplicaRun):
    """A replica that keeps frames at equal intervals.

    Args:
        number, index, start, bonds, options: as for ReplicaRun.
        member: that runs it.
        interval: steps between two kept frames.
    """

    def __init__(
        self, number: int, index: int, start: Atoms, bonds: Bonds, options: MDOptions, member: int, interval: int
    ):
        super().__init__(number, index, start, bonds, options)
        self.member, self.interval = member, interval
        self.kept: dict[int, NDArray[np.float64]] = {}

    def look(self, state: State, row: TableRow | None = None) -> None:
        super().look(state, row)
        if self.result.whole and state.step % self.interval == 0:
            self.kept[state.step] = state.pos.numpy().copy()

    def trajectory(self, committee: Ensemble) -> Trajectory:
        """Its frames, with the last ones before it broke, and the spread of the committee in each."""
        result, ps = self.result, 1e-3 * self.options.timestep
        frames = dict(self.kept)
        for atoms in result.frames:
            frames.setdefault(round(atoms.info["time_ps"] / ps), atoms.positions)
        steps = sorted(frames)
        pos = np.stack([frames[step] for step in steps]) if steps else np.zeros((0, len(self.start), 3))
        return Trajectory(
            temperature=result.temperature,
            replica=result.replica,
            member=self.member,
            start=result.frame,
            broken_at=result.broken_at,
            reason=result.reason,
            time=np.array(steps) * ps,
            pos=pos,
            regular=np.array([step in self.kept for step in steps], dtype=bool),
            spread=force_spread(committee, self.system, pos),
        )


def explore(
    committee: Ensemble,
    starts: Sequence[Atoms],
    temperature: float,
    config: DynamicsConfig,
    seed: int,
    console: Console | None = None,
) -> list[Trajectory]:
    """Run Langevin dynamics of all replicas at one temperature, as `check_stability` does.

    Args:
        committee: its members run the replicas: replica k runs with member k modulo their number.
        starts: structures, from which starts are taken evenly; bonds have their mean length over them.
        temperature: K.
        config: time, replicas and so on.
        seed: replica k has seed + k.
        console: where progress is shown; None is silent.

    Raises:
        UnknownElement, UntrainedCharge: a start is not one for these models.
        Unphysical: atoms overlap in a start.
    """
    members = committee.members
    steps = round(1000 * config.time / config.timestep)
    options = MDOptions(steps, config.timestep, "nvt", temperature, config.friction, seed, config.replicas)
    chosen = [k * len(starts) // config.replicas for k in range(config.replicas)]
    checked = {k: checked_start(starts[k], k, members[0], None, None) for k in dict.fromkeys(chosen)}
    bonds = {k: Bonds(System.from_ase(atoms), alike(atoms, starts)) for k, atoms in checked.items()}
    look = ReplicaRun(0, 0, checked[0], copy.copy(bonds[0]), replace(options, replicas=1)).every
    interval = max(1, round(1000 * config.every / config.timestep / look)) * look
    groups: dict[tuple, list[_Sampled]] = {}
    for k, index in enumerate(chosen):
        run = _Sampled(k, index, checked[index], copy.copy(bonds[index]), options, k % len(members), interval)
        groups.setdefault((run.member, *run.kind), []).append(run)
    everyone = sorted((run for group in groups.values() for run in group), key=lambda run: run.result.replica)
    with torch.inference_mode(False), ReplicaProgress(console, options, everyone) as progress:
        for (member, *_), group in groups.items():
            ReplicaBatch(members[member], list(group), progress.update).run()
    return [run.trajectory(committee) for run in everyone]


def force_spread(committee: Ensemble, system: System, pos: NDArray[np.float64]) -> NDArray[np.float64]:
    """[K] eV/Å, the standard deviation of the members' forces on the atom where it is largest.

    Args:
        committee: of the models.
        system: one structure of n atoms.
        pos: [K, n, 3] Å.
    """
    n, found = system.num_atoms, [np.zeros(0)]
    size = max(1, _ATOMS // n)
    for first in range(0, len(pos), size):
        part = torch.as_tensor(pos[first : first + size])
        batch = System.concatenate([system] * len(part)).replace(pos=part.reshape(-1, 3))
        std = committee(batch.to(committee.members[0].device)).forces_std
        assert std is not None
        found.append(std.double().norm(dim=1).view(len(part), n).amax(1).cpu().numpy())
    return np.concatenate(found)
