"""The frames with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...potential import Potential
from ..steps.batches import Frames, Loader
from ..steps.trainer import Properties, predict
from .evaluation import Evaluation
from .predictions import predicted_frames

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Outlier", "find_outliers", "outlier_frames"]


@dataclass
class Outlier:
    """One frame with large errors.

    Attributes:
        name: where it comes from.
        errors: property -> its rms error; NaN without label.
        atoms: the structure; predictions are in its calculator, labels in `info` and `arrays` as "reference_…".
    """

    name: str
    errors: dict[str, float]
    atoms: Atoms


def find_outliers(
    potential: Potential, frames: Frames, evaluation: Evaluation, properties: Properties, number: int
) -> list[Outlier]:
    """The frames with the largest errors, worst first: by their forces, without these by their energy, or whatever
    else is labelled.

    Args:
        potential: that was evaluated.
        frames: that it was evaluated on.
        evaluation: with errors by frame.
        properties: what to predict.
        number: at most so many.
    """
    table = evaluation.by_frame
    names = [name for name in table if name != "frame"]
    candidates = [name for name in ("forces", "energy_per_atom", *names) if name in table]
    ranked = next((name for name in candidates if np.isfinite(table[name]).any()), None)
    if ranked is None or number == 0:
        return []
    order = np.argsort(-np.nan_to_num(table[ranked], nan=-1.0), kind="stable")[:number]
    found = []
    for position in order.tolist():
        if np.isfinite(table[ranked][position]):
            errors = {name: float(table[name][position]) for name in names}
            index = int(table["frame"][position])
            found.append(Outlier(frames.data.name(index), errors, _atoms(potential, frames, position, properties)))
    return found


def _atoms(potential: Potential, frames: Frames, position: int, properties: Properties) -> Atoms:
    batch = next(iter(Loader(frames)([[position]]))).to(potential.device)
    return predicted_frames(batch, predict(potential, batch, properties), potential.outputs, [frames.name(position)])[0]


def outlier_frames(found: Sequence[Outlier]) -> list[Atoms]:
    """The structures, each with its errors in `info`."""
    for outlier in found:
        outlier.atoms.info.update({f"rms_error_{name}": value for name, value in outlier.errors.items()})
    return [outlier.atoms for outlier in found]
