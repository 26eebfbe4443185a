"""Systems copied into the static tensors of a step, and only what is new of them.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..potential import Potential
from ..system import System
from .graphed_step import GraphedStep
from .step import Step

__all__ = ["StaticInputs", "StepModel", "UnsortedBatch", "require_sorted"]

_COMPOSITION = ("z", "batch", "charge", "spin", "pbc")


class UnsortedBatch(Exception):
    """The atoms of a structure do not lie together."""


def require_sorted(system: System) -> None:
    """Raise UnsortedBatch unless the batch ascends."""
    if system.num_systems > 1 and not bool((system.batch[1:] >= system.batch[:-1]).all()):
        raise UnsortedBatch


class StepModel(Protocol):
    """A potential prepared for steps: its weights and constants as they were."""

    potential: Potential

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """A step that holds a system and has room for its edges; checked on the first use of its kernels.

        Raises:
            UnsortedBatch: the batch does not ascend.
            ValueError, UnknownElement: as the Potential.
            RuntimeError: the results are not those of the potential.
        """
        ...

    def load(self, step: Any, system: System) -> None:
        """Take over all but positions and cell."""
        ...


class StaticInputs:
    """Copies systems into a step, and what it need not copy or check again.

    The tensors of the last system are kept: as long as the same objects come in the same version, nothing was
    changed. In-place changes behind PyTorch's back (`.data`, NumPy views) are not seen.
    """

    def __init__(self, model: StepModel, step: Step):
        self.model, self.step = model, step
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._held: list[Tensor] | None = None

    def load(self, system: System) -> None:
        """Copy what is new; nothing here waits for the device while the composition stays.

        Raises:
            UnsortedBatch: the batch is not ascending.
            ValueError, UnknownElement: as the Potential.
        """
        if not all(self._is_seen(system, name) for name in _COMPOSITION):
            if not self._holds(system):
                self._load_composition(system)
            for name in _COMPOSITION:
                self._see(system, name)
        if not self._is_seen(system, "cell"):
            self.step.cell.copy_(system.cell)
            self._see(system, "cell")
        self.step.pos.copy_(system.pos)

    def _load_composition(self, system: System) -> None:
        self._seen.clear()
        self._held = None
        self.model.potential.check(system)
        require_sorted(system)
        self.model.load(self.step, system)
        self._held = [getattr(system, name).clone() for name in _COMPOSITION]

    def _holds(self, system: System) -> bool:
        """Whether other tensors hold what was loaded before. Waits for the device, once."""
        if self._held is None:
            return False
        same = [(held == getattr(system, name)).all() for held, name in zip(self._held, _COMPOSITION, strict=True)]
        return bool(torch.stack(same).all())

    def _is_seen(self, system: System, name: str) -> bool:
        tensor: Tensor = getattr(system, name)
        if name not in self._seen or tensor.is_inference():
            return False
        seen, version = self._seen[name]
        return tensor is seen and tensor._version == version

    def _see(self, system: System, name: str) -> None:
        tensor = getattr(system, name)
        if not tensor.is_inference():  # such tensors do not count their changes
            self._seen[name] = tensor, tensor._version
