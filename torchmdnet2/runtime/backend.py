"""The ways to evaluate a potential, each a `Backend`; the Evaluator asks them in order. And the last of them.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Literal

import torch

from ..potential import Potential, Result
from ..priors.pairs import pair_list
from ..system import System
from .autograd_term import evaluate_alone
from .reference import BoundStep, ReferenceBoundStep
from .timings import WHOLE, Part, Timing, measure

__all__ = ["Backend", "Declined", "ReferenceBackend", "Task"]

_version = attrgetter("_version")
_options = attrgetter(
    "energy_scale", "energy_shift", "subtract_isolated", "atom_filter", "allow_untrained_charge", "total_charges",
    "closed_shell",
)  # fmt: skip


@dataclass(eq=False)
class Task:
    """What is evaluated, and how.

    Args:
        potential: in evaluation mode.
        precision: "native", "tf32" or "float64".
        graphs: capture CUDA graphs, see Evaluator.
    """

    potential: Potential
    precision: str
    graphs: bool | Literal["auto"]

    def __post_init__(self) -> None:
        weights = [*self.potential.parameters(), *self.potential.buffers()]
        self._weights = [w for w in weights if not w.is_inference()]  # such tensors do not count their changes
        self._signature = self._sign()

    @property
    def is_changed(self) -> bool:
        """Whether weights were changed in place, or options, since this was made."""
        return self._sign() != self._signature

    def _sign(self) -> tuple[Any, ...]:
        first = self._weights[0] if self._weights else None
        place = None if first is None else (first.data_ptr(), first.dtype, first.device)
        return sum(map(_version, self._weights)), place, _options(self.potential)

    @property
    def device(self) -> torch.device:
        """Where the potential is."""
        return self.potential.device

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels run on the device: not on a CPU, but by the interpreter (TRITON_INTERPRET=1)."""
        return self.device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "0") == "1"

    @cached_property
    def model(self) -> Potential:
        """The potential in the precision asked for."""
        if self.precision != "float64" or self.potential.dtype == torch.float64:
            return self.potential
        return copy.deepcopy(self.potential).double().eval()

    def __str__(self) -> str:
        dtype = "float64" if self.precision == "float64" else str(self.potential.dtype).removeprefix("torch.")
        return f"{self.device}, {dtype}"


class Declined(Exception):
    """A backend leaves this structure to the next one; the message says why."""


class Backend(ABC):
    """One way to evaluate a potential, with its weights as they are now.

    Args:
        task: what is evaluated.

    Attributes:
        reason_prefix: stands before `unsupported_reason` in reports.
        unsupported_reason: "" when the potential can be evaluated so, else why not. May become a reason by use.
    """

    reason_prefix = ""
    unsupported_reason = ""

    def __init__(self, task: Task):
        self.task = task

    @abstractmethod
    def run(self, system: System, forces: bool, stress: bool) -> Result:
        """Energy and, if asked, forces and stress of N atoms in B structures.

        Raises:
            Declined: this system is left to another backend.
            ValueError, UnknownElement, RuntimeError: as Evaluator.
        """

    @abstractmethod
    def bind(self, system: System, stress: bool) -> BoundStep:
        """Hold a structure; as `run`."""

    @abstractmethod
    def timings(self, system: System, stress: bool) -> list[Timing]:
        """What the parts of a step with forces take, the whole step last; as `run`."""

    @abstractmethod
    def describe(self, reasons: str) -> list[str]:
        """Lines of the report.

        Args:
            reasons: why the backends before this one do not evaluate the potential.
        """

    def _autograd(self, name: str, reasons: str) -> str:
        no_effect = ", so that precision='tf32' has no effect" if self.task.precision == "tf32" else ""
        return f"{name} on {self.task}: {reasons}{no_effect}"


class ReferenceBackend(Backend):
    """The potential itself."""

    def run(self, system: System, forces: bool, stress: bool) -> Result:
        return self.task.model.reference(system, forces=forces, stress=stress)

    def bind(self, system: System, stress: bool) -> BoundStep:
        return ReferenceBoundStep(self.task.model, system, stress)

    def timings(self, system: System, stress: bool) -> list[Timing]:
        potential, device = self.task.model, self.task.device
        charges = self.run(system, False, False).charges
        parts, searched = [], {potential.cutoff: pair_list(system, potential.cutoff)}
        for prior in potential.priors:
            if not prior.constant and prior.cutoff is not None:
                searched.setdefault(prior.cutoff, pair_list(system, prior.cutoff))
        for cutoff in searched:
            name = f"neighbor search to {cutoff:g} Å" if math.isfinite(cutoff) else "all pairs"
            parts.append(Part(name, "PyTorch or vesin", partial(pair_list, system, cutoff)))
        for prior in potential.priors:
            if not prior.constant:
                pairs = None if prior.cutoff is None else searched[prior.cutoff]
                given = prior, system, pairs, stress, charges if prior.uses_charges else None
                parts.append(Part(type(prior).__name__, "autograd", partial(evaluate_alone, *given)))
        found = measure(parts, device, replayed=False)
        (whole,) = measure([Part(WHOLE, "", partial(self.run, system, True, stress))], device, replayed=False)
        rest = whole.seconds - sum(part.seconds for part in found)
        return [*found, Timing("network, sums (the rest)", "autograd", max(rest, 0.0)), whole]

    def describe(self, reasons: str) -> list[str]:
        return [self._autograd("reference path (autograd)", reasons)]
