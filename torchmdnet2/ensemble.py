"""Ensemble: several potentials of the same quantity, their mean and their spread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .neighbors import NeighborList, neighbor_list
from .potential import Potential, Result
from .system import System

__all__ = ["Ensemble", "EnsembleResult"]


@dataclass(eq=False)
class EnsembleResult(Result):
    """The mean over the members, and their sample standard deviation (n − 1 in the denominator).

    Attributes:
        energy_std: [B] eV.
        forces_std: [N, 3] eV/Å; None when forces were not asked for.
        stress_std: [B, 3, 3] eV/Å³; None when the stress was not asked for.
    """

    energy_std: Tensor | None = None
    forces_std: Tensor | None = None
    stress_std: Tensor | None = None


class Ensemble(nn.Module):
    """Mean and spread of several potentials, in the order given.

    The mean of the forces is the gradient of the mean energy, so that dynamics with it conserves energy.

    Args:
        potentials: at least two, since one has no spread.

    Raises:
        ValueError: fewer than two potentials, or on different devices; there is no element that all know.
    """

    def __init__(self, potentials: Iterable[Potential]):
        super().__init__()
        members = list(potentials)
        if len(members) < 2:
            raise ValueError(f"an ensemble needs at least two potentials to have a spread, got {len(members)}")
        if len({p.device for p in members}) > 1:
            raise ValueError("the potentials of an ensemble must be on one device")
        self.elements = sorted(set.intersection(*(set(p.elements) for p in members)))
        if not self.elements:
            raise ValueError("there is no element that all potentials of the ensemble know")
        self.potentials = nn.ModuleList(members)

    @classmethod
    def load(
        cls,
        paths: Sequence[str | os.PathLike],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Ensemble:
        """An ensemble of model files, in the order given; see `torchmdnet2.load`."""
        from .checkpoint import load

        return cls(load(path, device, dtype) for path in paths)

    @property
    def members(self) -> list[Potential]:
        """The potentials, in the order given."""
        return list(self.potentials)  # type: ignore[arg-type]

    @property
    def cutoff(self) -> float:
        """The largest cutoff of the members' neighbor lists, Å."""
        return max(p.cutoff for p in self.members)

    def forward(self, system: System, forces: bool = True, stress: bool = False) -> EnsembleResult:
        """Mean and spread of energy, forces and stress of a batch of structures; charges and properties are means.

        Args, Raises: as Potential.
        """
        lists: dict[float, NeighborList] = {}
        results = []
        for potential in self.members:
            if potential.cutoff not in lists:
                lists[potential.cutoff] = neighbor_list(system, potential.cutoff)
            results.append(potential(system, forces=forces, stress=stress, neighbors=lists[potential.cutoff]))
        energy, energy_std = _statistics([r.energy for r in results])
        mean_forces, forces_std = _statistics([r.forces for r in results])
        mean_stress, stress_std = _statistics([r.stress for r in results])
        shared = set.intersection(*(set(r.properties) for r in results))
        properties = {name: _statistics([r.properties[name] for r in results])[0] for name in sorted(shared)}
        assert energy is not None
        return EnsembleResult(
            energy=energy,
            forces=mean_forces,
            stress=mean_stress,
            atom_energies=_statistics([r.atom_energies for r in results])[0],
            charges=_statistics([r.charges for r in results])[0],
            properties={name: value for name, value in properties.items() if value is not None},
            energy_std=energy_std,
            forces_std=forces_std,
            stress_std=stress_std,
        )


def _statistics(values: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    """Mean and sample standard deviation; None where a member gives none."""
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return None, None
    stacked = torch.stack(given)
    return stacked.mean(0), stacked.std(0)
