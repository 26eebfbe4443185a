"""Ensembles: mean and spread of several potentials, and the file that lists them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import read_header
from .core.files import atomic_write
from .engine.bound import BoundStep
from .errors import BadCheckpoint
from .evaluator import Evaluator
from .potential.output import RESULTS
from .potential.potential import Potential, Result, statistics
from .system import System

__all__ = [
    "Ensemble", "EnsembleBoundStep", "EnsembleResult", "combine", "model_files", "read_ensemble", "write_ensemble",
]  # fmt: skip


_FORMAT = "torchmdnet2 ensemble 1"


def write_ensemble(models: Sequence[str | os.PathLike], path: str | os.PathLike) -> Path:
    """List model files, with their checksums, in a JSON file that `Ensemble.load` reads.

    Args:
        models: .tmn files in the file's folder or below.
        path: usually ensemble.json.
    """
    path = Path(path)
    members = [
        {"file": Path(os.path.relpath(model, path.parent)).as_posix(), "sha256": read_header(model)["sha256"]}
        for model in models
    ]
    atomic_write(path, json.dumps({"format": _FORMAT, "members": members}, indent=1) + "\n")
    return path


def read_ensemble(path: str | os.PathLike) -> list[Path]:
    """Return the model files that an ensemble.json lists.

    Raises:
        FileNotFoundError: the file or a model is not there.
        BadCheckpoint: it is no such file, or a model is not the listed one.
    """
    path = Path(path)
    if path.suffix == ".tmn":
        raise BadCheckpoint(f"{path}: a single model has no spread: give a list of models, or an ensemble.json")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such ensemble file; `torchmdnet2 train --members` writes ensemble.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if content["format"] != _FORMAT:
            raise BadCheckpoint(f"{path}: not an ensemble file that this version of torchmdnet2 reads")
        listed = [(path.parent / str(member["file"]), str(member["sha256"])) for member in content["members"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        words = "not an ensemble file, as `torchmdnet2 train --members` writes (ensemble.json)"
        raise BadCheckpoint(f"{path}: {words}") from error
    for model, sha256 in listed:
        if read_header(model)["sha256"] != sha256:
            raise BadCheckpoint(f"{model}: not the model that {path} lists: its checksum differs")
    return [model for model, _ in listed]


def model_files(model: str | os.PathLike) -> list[str]:
    """Return the files or names that a model stands for: those of an ensemble.json, or those with commas between.

    Raises:
        FileNotFoundError, BadCheckpoint: as `read_ensemble`.
    """
    if str(model).endswith(".json"):
        return [str(file) for file in read_ensemble(model)]
    return [str(model)] if Path(model).is_file() else str(model).split(",")


# --- Ensemble: several potentials of the same quantity, their mean and their spread ---


@dataclass(eq=False)
class EnsembleResult(Result):
    """The mean over the members, and their sample standard deviation (n − 1 in the denominator).

    Attributes:
        energy_std: [B] eV.
        forces_std: [N, 3] eV/Å; None if forces were not requested.
        stress_std: [B, 3, 3] eV/Å³; None if the stress was not requested.
        atom_energies_std: [N] eV.
        charges_std: [N] e; None if a member has none.
        properties_std: of the properties that all members predict.
    """

    energy_std: Tensor | None = None
    forces_std: Tensor | None = None
    stress_std: Tensor | None = None
    atom_energies_std: Tensor | None = None
    charges_std: Tensor | None = None
    properties_std: dict[str, Tensor] = field(default_factory=dict)


class Ensemble:
    """Mean and spread of several potentials, in the order given; each runs on its Evaluator. Thread-safe.

    The mean of the forces is the gradient of the mean energy, so that dynamics with it conserves energy.

    It warns if the members' metadata state different levels of theory.

    Args:
        potentials: at least two, since one has no spread; they are set to evaluation mode.

    Raises:
        ValueError: fewer than two potentials, different devices, or no common element.
    """

    def __init__(self, potentials: Iterable[Potential]):
        self.members = list(potentials)
        if len(self.members) < 2:
            raise ValueError(f"an ensemble needs at least two potentials to have a spread, got {len(self.members)}")
        if len({p.device for p in self.members}) > 1:
            raise ValueError("the potentials of an ensemble must be on one device")
        levels = sorted({level for p in self.members if (level := p.level_of_theory) is not None})
        if len(levels) > 1:
            warnings.warn(
                f"the potentials of an ensemble were trained on labels of {' and '.join(levels)}: their mean is of no "
                "level of theory, and their spread holds the difference of the levels",
                stacklevel=2,
            )
        self.elements = sorted(set.intersection(*(set(p.elements) for p in self.members)))
        if not self.elements:
            raise ValueError("there is no element that all potentials of the ensemble know")
        self._evaluators = [Evaluator(p) for p in self.members]

    @classmethod
    def load(
        cls,
        paths: Sequence[str | os.PathLike] | str | os.PathLike,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        allow_untrained_charge: bool = False,
        coulomb: str = "pme",
        level: str | None = None,
    ) -> Ensemble:
        """Return an ensemble of model files, in the given order, or of a training's ensemble.json; see
        `torchmdnet2.load`.

        Args:
            paths: model files, or one ensemble.json.
            device: as for `torchmdnet2.load`.
            dtype: as for `torchmdnet2.load`.
            allow_untrained_charge: as for `torchmdnet2.load`.
            coulomb: as for `torchmdnet2.load`.
            level: as for `torchmdnet2.load`.

        Raises:
            BadCheckpoint: a file is damaged, or not the one that was trained.
        """
        from .checkpoint import load

        if isinstance(paths, str | os.PathLike):
            paths = read_ensemble(paths)
        elif not isinstance(paths, Iterable) or isinstance(paths, bytes):
            raise TypeError(f"an ensemble is a list of model files or an ensemble.json, got {type(paths).__name__}")
        return cls(load(path, device, dtype, allow_untrained_charge, coulomb, level) for path in paths)

    @property
    def cutoff(self) -> float:
        """The largest cutoff of the members' neighbor lists, Å."""
        return max(p.cutoff for p in self.members)

    def __call__(self, system: System, forces: bool = True, stress: bool = False) -> EnsembleResult:
        """Return mean and spread of energy, forces, stress, charges and properties of a batch of structures.

        Args, Raises: as Evaluator.
        """
        return combine([evaluate(system, forces=forces, stress=stress) for evaluate in self._evaluators])

    def bind(self, system: System, stress: bool = False) -> EnsembleBoundStep:
        """Hold a structure on the device, for loops; see Evaluator.bind.

        Args:
            system: the structure, or a batch.
            stress: compute the stress in every step.
        """
        return EnsembleBoundStep([evaluator.bind(system, stress) for evaluator in self._evaluators])


class EnsembleBoundStep:
    """Bound steps of several potentials on the same positions.

    Attributes:
        pos [N, 3] Å, cell [B, 3, 3] Å: to be written to in place.
    """

    def __init__(self, steps: Sequence[BoundStep]):
        self._steps = steps
        self.pos, self.cell = steps[0].pos, steps[0].cell

    def replay(self) -> None:
        """Compute all members, without waiting for them."""
        for step in self._steps:
            if step is not self._steps[0]:
                step.pos.copy_(self.pos)
                step.cell.copy_(self.cell)
            step.replay()

    def fetch(self) -> EnsembleResult | None:
        """Return mean and spread on the host; None if the capacity of a member was too small, so that the step must be
        repeated.

        Raises:
            ValueError: a position, the cell or an energy is not finite (names the atom).
        """
        results: list[Result | None] = []
        errors: list[ValueError] = []
        for step in self._steps:  # all of them: an error that is left waits for the next positions
            try:
                results.append(step.fetch())
            except ValueError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        good = [result for result in results if result is not None]
        return combine(good) if len(good) == len(results) else None


def combine(results: Sequence[Result]) -> EnsembleResult:
    """Return mean and spread of the results of at least two potentials for the same structures."""
    with torch.inference_mode(False):  # ordinary tensors, as those of the members
        mean, std = statistics([{name: getattr(r, name) for name in RESULTS} for r in results])
        properties, properties_std = statistics([r.properties for r in results])
    return EnsembleResult(
        **mean,
        properties=properties,
        **{f"{name}_std": value for name, value in std.items()},
        properties_std=properties_std,
    )
