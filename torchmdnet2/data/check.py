"""Checks of every sample before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..core.stated import LARGEST, ROUNDING, whole_number
from ..errors import BadData
from ..registry import did_you_mean
from ..system import System
from .dataset import Sample, select
from .labels import LABELS

__all__ = ["check_batch", "check_sample"]

_MAX_Z = 118
_SHORTEST = 0.1  # Å, of a lattice vector


def check_sample(sample: Sample, where: str) -> Sample:
    """Check one structure and its labels.

    Args:
        sample: one structure (B = 1).
        where: its name, for messages: "train.xyz, frame 12".

    Returns:
        The sample, with charges rounded to whole numbers.

    Raises:
        BadData: no atoms; an atomic number outside 1 … 118; a position or cell that is not finite; a lattice vector
            below 0.1 Å; a cell of 1 × 1 × 1 Å; a charge or spin that is not a whole number, or above 10,000; a label
            with an unknown name or a wrong shape, or an infinite one (NaN means no label); a stress of a structure
            without volume, or one that is not symmetric.
    """
    system, labels = sample.system, sample.labels
    if system.num_systems != 1 or system.num_atoms == 0:
        raise BadData(f"{where}: there must be one structure with at least one atom")
    bad = (system.z < 1) | (system.z > _MAX_Z)
    if bool(bad.any()):
        atom = _first(bad)
        raise BadData(f"{where}: the atomic number of atom {atom} is {int(system.z[atom])}, not one of 1 … {_MAX_Z}")
    try:
        system.validate()
    except ValueError as error:
        raise BadData(f"{where}: {error}") from error
    if bool(_short(system).any()):
        raise BadData(f"{where}: a lattice vector is shorter than {_SHORTEST} Å; is the unit of length right?")
    if bool(_placeholder(system).any()):
        raise BadData(
            f"{where}: the cell of 1 × 1 × 1 Å is a placeholder, which PDB files have if there is no cell: leave the "
            "cell of molecules out"
        )
    for name in ("charge", "spin"):
        whole_number(float(getattr(system, name)[0]), name, where)
    for name, value in labels.items():
        _check_label(name, value, system, where)
    return _rounded(sample)


def check_batch(batch: Sample, where: str, first: int = 0) -> Sample:
    """Check several structures at once, which is much faster.

    Args:
        batch: B structures, atoms in order.
        where: name of their source, for messages.
        first: number of the first structure; structure k is called f"{where}, frame {first + k}".

    Raises:
        BadData: the error of `check_sample` for the first structure that does not pass.
    """
    if not _passes(batch):
        for k in range(batch.system.num_systems):
            check_sample(select(batch, np.array([k])), f"{where}, frame {first + k}")
    return _rounded(batch)


def _rounded(sample: Sample) -> Sample:
    charge = sample.system.charge
    if bool((charge == charge.round()).all()):
        return sample
    return replace(sample, system=sample.system.replace(charge=charge.round()))


def _passes(batch: Sample) -> bool:
    """Return True if all structures pass a fast check. False may be a false alarm, which `check_sample` decides."""
    system = batch.system
    if not bool((system.atom_counts > 0).all()):
        return False
    try:
        system.validate()
    except ValueError:
        return False
    fine = [
        system.z.min() >= 1,
        system.z.max() <= _MAX_Z,
        ((system.charge - system.charge.round()).abs() <= ROUNDING).all(),
        system.charge.abs().max() <= LARGEST,
        system.spin.max() <= LARGEST,
        ~_short(system).any(),
        ~_placeholder(system).any(),
    ]
    for name, value in batch.labels.items():
        if name not in LABELS or tuple(value.shape) != LABELS[name].of(system):
            return False
        fine.append(~torch.isinf(value).any())
        if name == "stress":
            fine.append(~(_skew(value) | (system.volume == 0) & ~torch.isnan(value).flatten(1).all(1)).any())
    return all(map(bool, fine))


def _check_label(name: str, value: Tensor, system: System, where: str) -> None:
    if name not in LABELS:
        raise BadData(f"{where}: unknown label '{name}'{did_you_mean(name, LABELS) or '.'} Known: {', '.join(LABELS)}")
    shape = LABELS[name]
    if tuple(value.shape) != shape.of(system):
        raise BadData(
            f"{where}: {name} has the shape {tuple(value.shape)}, but {system.num_atoms} atoms need {shape.of(system)}"
        )
    infinite = torch.isinf(value)
    if bool(infinite.any()):
        place = f" of atom {_first(infinite)}" if shape.per_atom else ""
        raise BadData(f"{where}: {name}{place} is infinite; write NaN where there is no label")
    if name == "stress" and not bool(torch.isnan(value).all()):
        if float(system.volume[0]) == 0:
            raise BadData(f"{where}: the frame has a stress but no cell")
        if bool(_skew(value).any()):
            raise BadData(f"{where}: the stress is not symmetric")


def _short(system: System) -> Tensor:
    """Return which lattice vectors are too short to be real, [B, 3]."""
    return system.pbc & (system.cell.norm(dim=2) < _SHORTEST)


def _placeholder(system: System) -> Tensor:
    """Return which cells are the cube that `core.stated.no_cell` finds, [B]."""
    away = (system.cell - torch.eye(3, dtype=system.cell.dtype)).abs().amax((1, 2))
    return system.pbc.all(1) & (away < 1e-3)


def _skew(stress: Tensor) -> Tensor:
    """Return which stresses [B, 3, 3] are not symmetric, [B]."""
    size, skew = (x.abs().nan_to_num().flatten(1).amax(1) for x in (stress, stress - stress.transpose(1, 2)))
    return skew > 1e-3 * size


def _first(bad: Tensor) -> int:
    return int(bad.nonzero()[0, 0])
