"""Structures with what a potential predicts for them, as ase.Atoms, and as extended XYZ."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from ...data import LABELS
from ...ensemble import EnsembleResult
from ...output import Output
from ...potential import Result
from ..config.labels import property_of
from ..steps.batches import Batch

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["predicted_frames", "write_frames"]


def predicted_frames(batch: Batch, result: Result, outputs: Mapping[str, Output], names: list[str]) -> list[Atoms]:
    """Each structure of a batch, predictions in its calculator, labels in `info` and `arrays` as "reference_…".

    Of an ensemble the spread too: `energy_std` (eV) and `forces_std` [N, 3] (eV/Å).

    Args:
        batch: B structures with the labels that there are.
        result: the predictions for them.
        outputs: of the potential.
        names: [B] kept in `info` as "frame".
    """
    from ase.calculators.singlepoint import SinglePointCalculator

    system = batch.sample.system.to("cpu")
    labels = {name: value.double().cpu() for name, value in batch.sample.labels.items()}
    per_atom = {"forces": result.forces, "charges": result.charges}
    frames = []
    for k, atoms in enumerate(system.to_ase()):
        rows = (system.batch == k).cpu()
        values: dict[str, Any] = {"energy": float(result.energy[k])}
        for name, value in per_atom.items():
            if value is not None:
                values[name] = value.detach().double().cpu()[rows].numpy()
        if result.stress is not None and float(system.volume[k]) > 0:
            values["stress"] = result.stress[k].detach().double().cpu().numpy()[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        for name, value in result.properties.items():
            if name in values:  # charges, of their head
                continue
            value = value.detach().double().cpu()
            if name == "dipole":
                if not bool(system.pbc[k].any()):  # that of charges is NaN there
                    values["dipole"] = value[k].numpy()
            elif outputs[name].per_atom:
                atoms.arrays[name] = value[rows].numpy()
            else:
                atoms.info[name] = value[k].numpy() if value.ndim > 1 else float(value[k])
        if isinstance(result, EnsembleResult) and result.energy_std is not None:
            atoms.info["energy_std"] = float(result.energy_std[k])
            if result.forces_std is not None:
                atoms.arrays["forces_std"] = result.forces_std.double().cpu()[rows].numpy()
        atoms.info["frame"] = names[k]
        for name, value in labels.items():
            key = f"reference_{property_of(name)}"
            if LABELS[name].per_atom:
                atoms.arrays[key] = value[rows].numpy()
            elif not bool(value[k].isnan().all()):
                atoms.info[key] = value[k].numpy() if value.ndim > 1 else float(value[k])
        atoms.calc = SinglePointCalculator(atoms, **values)
        frames.append(atoms)
    return frames


def write_frames(file: BinaryIO, frames: list[Atoms]) -> None:
    """Append structures of `predicted_frames` as extended XYZ."""
    from ase.io import write

    text = io.StringIO()
    write(text, frames, format="extxyz")
    file.write(text.getvalue().encode())
