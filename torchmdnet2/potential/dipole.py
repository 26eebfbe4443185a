"""Dipole moments of partial charges, about the centre of mass.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..system import System, outside_transforms
from .graph import sum_over_systems

__all__ = ["centered_positions", "charge_dipole", "molecule_dipole"]


def charge_dipole(charges: Tensor, system: System) -> Tensor:
    """Return the dipole moments of partial charges, Σ_i q_i (r_i − r_com), [B, 3] e·Å, float64, differentiable.

    The dipole of an ion depends on the origin, which is the centre of mass. It is NaN for periodic structures, whose
    dipole is not defined.

    Args:
        charges: [N] e.
        system: N atoms in B structures.
    """
    dipoles = charges.double()[:, None] * centered_positions(system)
    total = sum_over_systems(dipoles, system.batch, system.num_systems)
    return torch.where(system.pbc.any(1)[:, None], torch.nan, total)


def molecule_dipole(charges: np.ndarray, numbers: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the dipole moment of one molecule in NumPy, [3] e·Å, without the cost of a `System` in every step.

    Args:
        charges: [N] e.
        numbers: [N] atomic numbers.
        positions: [N, 3] Å.
    """
    return np.asarray(charges @ (positions - _mass_shares(numbers.tobytes(), numbers.dtype.str) @ positions))


@lru_cache(maxsize=16)
def _mass_shares(numbers: bytes, dtype: str) -> np.ndarray:
    masses = _atomic_masses(torch.device("cpu")).numpy()[np.frombuffer(numbers, dtype)]
    return masses / masses.sum()


def centered_positions(system: System, share: Tensor | None = None) -> Tensor:
    """Return positions relative to the centre of mass, to which atoms contribute a share [N]; None: 1."""
    masses = _atomic_masses(system.device)[system.z]
    if share is not None:
        masses = masses * share
    pos = system.pos.double()
    mass = sum_over_systems(masses, system.batch, system.num_systems).clamp(min=1e-300)
    centre = sum_over_systems(masses[:, None] * pos, system.batch, system.num_systems) / mass[:, None]
    return pos - centre.index_select(0, system.batch)


@lru_cache
def _atomic_masses(device: torch.device) -> Tensor:
    """Return masses by atomic number in amu, made once for each device."""
    from ase.data import atomic_masses

    with torch.inference_mode(False), outside_transforms():
        return torch.as_tensor(atomic_masses, dtype=torch.float64, device=device)
