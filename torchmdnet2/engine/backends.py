"""Backends: each evaluates a potential by one method. Evaluators and domains use the first one that supports it.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import NeighborOverflow
from ..neighbors.pairs import pair_list
from ..potential.potential import Potential, Result
from ..system import System
from .autograd_term import evaluate_alone
from .bound import BoundStep, ReferenceBoundStep
from .domain import Domain, ReferenceDomain
from .graph import NotCapturable
from .select import describe_priors, fast_path, kernels_of, unsupported_reason
from .timings import WHOLE, Part, Timing, measure

if TYPE_CHECKING:
    from .blocks import BlockModel
    from .cpu_step import CpuModel
    from .step import GraphedStep, StaticInputs, StepModel


__all__ = [
    "Backend", "CapturedAutogradBackend", "CompiledCpuBackend", "Declined", "FusedBackend", "ReferenceBackend",
    "Task", "choose_domain", "compiled_reason", "fused_reason",
]  # fmt: skip


_version = attrgetter("_version")
_options = attrgetter(
    "energy_scale", "energy_shift", "subtract_isolated", "atom_filter", "allow_untrained_charge", "total_charges",
    "closed_shell", "coulomb",
)  # fmt: skip


@dataclass(eq=False)
class Task:
    """The task of an Evaluator: potential, precision, use of graphs.

    Args:
        potential: in evaluation mode.
        precision: "native", "mixed", "tf32" or "float64".
        graphs: capture CUDA graphs, block_atoms: evaluate structures in blocks, see Evaluator.
    """

    potential: Potential
    precision: str
    graphs: bool | Literal["auto"]
    block_atoms: int | None = None

    def __post_init__(self) -> None:
        weights = [*self.potential.parameters(), *self.potential.buffers()]
        self._weights = [w for w in weights if not w.is_inference()]  # such tensors do not count their changes
        self._signature = self._sign()

    @property
    def is_changed(self) -> bool:
        """Whether weights or options have changed in place since this was made."""
        return self._sign() != self._signature

    def _sign(self) -> tuple[Any, ...]:
        first = self._weights[0] if self._weights else None
        place = None if first is None else (first.data_ptr(), first.dtype, first.device)
        return sum(map(_version, self._weights)), place, _options(self.potential)

    @property
    def device(self) -> torch.device:
        """The potential's device."""
        return self.potential.device

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels run on the device; on a CPU only by the interpreter (TRITON_INTERPRET=1)."""
        return self.device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "0") == "1"

    @cached_property
    def model(self) -> Potential:
        """The potential in the wanted precision."""
        if self.precision != "float64" or self.potential.dtype == torch.float64:
            return self.potential
        return copy.deepcopy(self.potential).double().eval()

    def __str__(self) -> str:
        dtype = "float64" if self.precision == "float64" else str(self.potential.dtype).removeprefix("torch.")
        return f"{self.device}, {dtype}"


class Declined(Exception):
    """A backend cannot evaluate this structure, and the next one does; the message says why."""


class Backend(ABC):
    """One way to evaluate a potential, with its current weights.

    Args:
        task: potential and options.

    Attributes:
        reason_prefix: stands before `unsupported_reason` in reports.
        unsupported_reason: "" if it can evaluate the potential, else why not. It may be set later.
    """

    reason_prefix = ""
    unsupported_reason = ""

    def __init__(self, task: Task):
        self.task = task

    @abstractmethod
    def run(self, system: System, forces: bool, stress: bool) -> Result:
        """Compute energy and, if requested, forces and stress of N atoms in B structures.

        Raises:
            Declined: this system is left to another backend.
            ValueError, UnknownElement, RuntimeError: as Evaluator.
        """

    @abstractmethod
    def bind(self, system: System, stress: bool) -> BoundStep:
        """Hold a structure; as `run`."""

    @abstractmethod
    def timings(self, system: System, stress: bool) -> list[Timing]:
        """Return the times of the parts of a step with forces, the whole step last; arguments as for `run`."""

    @abstractmethod
    def describe(self, reasons: str) -> list[str]:
        """Return the lines of the report.

        Args:
            reasons: why earlier backends cannot evaluate the potential.
        """


class ReferenceBackend(Backend):
    """Calls the potential itself, the specification of all others."""

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
        return [f"reference path (autograd) on {self.task}: {reasons}"]


# --- The CPU's compiled kernels as a backend ---


class CompiledCpuBackend(Backend):
    """Evaluates on kernels that numba compiles for the CPU."""

    def __init__(self, task: Task):
        super().__init__(task)
        self.unsupported_reason = self._reason()

    def _reason(self) -> str:
        if self.task.precision == "float64":
            return "precision='float64' was requested"
        reason = unsupported_reason(self.task.potential, compiled=True)
        if reason:
            return reason
        try:
            from . import cpu_step
        except (ImportError, RuntimeError) as error:
            return f"the fused kernels need numba ({error})"
        self._module = cpu_step
        return ""

    @cached_property
    def _model(self) -> CpuModel:
        return self._module.CpuModel(self.task.potential)

    def run(self, system: System, forces: bool, stress: bool) -> Result:
        self._require_usable(system)
        return self._model(system, forces=forces, stress=stress)

    def bind(self, system: System, stress: bool) -> BoundStep:
        self._require_usable(system)
        return self._module.CpuBoundStep(self._model, system, stress)

    def timings(self, system: System, stress: bool) -> list[Timing]:
        self._require_usable(system)
        self._model(system)  # checked on its first use
        return self._model.timings(system)

    def _require_usable(self, system: System) -> None:
        reason = unsupported_system(system) or self._module.lost_by_fork()
        if reason:
            raise Declined(reason)

    def describe(self, reasons: str) -> list[str]:
        number = torch.get_num_threads()
        threads = "1 thread" if number == 1 else f"up to {number} threads, or 1 where that is faster"
        kind = type(self.task.potential.representation).__name__
        lines = [f"compiled {kind} kernels (numba) on {self.task.device}, float32, {threads}"]
        return lines + describe_priors(self.task.potential)


def unsupported_system(system: System) -> str:
    """Return why steps with static buffers cannot hold a system, "" if they can."""
    if system.num_atoms == 0:
        return "the system has no atoms"
    if system.dtype not in (torch.float32, torch.float64):
        return f"the positions are {system.dtype}"
    return ""


# --- Backends on static buffers: fused kernels, and autograd in CUDA graphs ---

KEPT = 8  # sizes of systems whose buffers and graphs are kept
KEPT_MEMORY = 0.25  # of the device's memory, for all that is kept besides the size in use
GRAPHS_UP_TO = 50_000  # atoms; above, launch overhead is negligible
AUTOGRAD_UP_TO = 5_000  # the same for potentials without fused kernels
_Key = tuple[Any, ...]


class _StepBackend(Backend):
    """Evaluates on steps over static buffers, and keeps one for each size, the last used last.

    Attributes:
        steps: by number of atoms and structures, type and stress.
    """

    _may_decline: tuple[type[Exception], ...] = (NotCapturable,)  # such as a prior without kernels

    def __init__(self, task: Task):
        super().__init__(task)
        self.steps: OrderedDict[_Key, tuple[GraphedStep, StaticInputs]] = OrderedDict()
        self.unsupported_reason = self._reason()

    def _reason(self) -> str:
        """Return why the backend cannot evaluate the potential, "" if it can."""
        try:
            from . import step as bound
            from . import step as static_inputs
        except (ImportError, RuntimeError) as error:
            return f"{self._needs} need Triton ({error})"
        self._bound, self._unsorted = bound, static_inputs.UnsortedBatch
        return ""

    _needs: str

    @cached_property
    def _model(self) -> StepModel:
        return self._make_model()

    @abstractmethod
    def _make_model(self) -> StepModel:
        """Prepare the potential with its present weights."""

    def run(self, system: System, forces: bool, stress: bool) -> Result:
        with self._usable(system, stress):
            result = self._run_kept(system, stress)
        result.forces = result.forces if forces else None
        return result

    def bind(self, system: System, stress: bool) -> BoundStep:
        with self._usable(system, stress):
            # what is kept for this size is handed over, so that there are not two sets of buffers
            graphed, inputs = self._take_kept(system, stress) or self._new_step(system, stress)
            if self.task.graphs:
                graphed.capture()
            self._run(graphed, system)
            return self._bound.FusedBoundStep(graphed, inputs, self.task.model, system)

    def timings(self, system: System, stress: bool) -> list[Timing]:
        with self._usable(system, stress):
            step = self._new_step(system, stress)[0].step
            parts = [*step.parts(), Part(WHOLE, "", step.launch)]
            return measure(parts, step.device, replayed=not step.waits)

    @contextmanager
    def _usable(self, system: System, stress: bool) -> Iterator[None]:
        """Enter the block, without gradients, unless a step cannot hold the system; errors that say so decline it."""
        self._require_usable(system)
        try:
            with torch.no_grad():
                yield
        except self._may_decline as error:
            raise self._declined(error, system, stress) from None

    def _require_usable(self, system: System) -> None:
        reason = unsupported_system(system)
        if reason:
            raise Declined(reason)

    def _declined(self, error: Exception, system: System, stress: bool) -> Declined:
        """Return that the potential is left to another backend from now on."""
        self.unsupported_reason = str(error)
        self.__dict__.pop("_model", None)
        self.steps.clear()
        return Declined(str(error))

    def _run_kept(self, system: System, stress: bool) -> Result:
        """Run the kept step for systems of this size, or a new one."""
        key = _key(system, stress)
        known = self._take_kept(system, stress)
        if known is None:
            self._decide_to_build(key, system)
        graphed, inputs = known or self._new_step(system, stress)
        if self._captures(system, known is not None):
            graphed.capture()
        result = self._run(graphed, system)
        self.steps[key] = graphed, inputs
        return result

    def _take_kept(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs] | None:
        """Return the kept step for systems of this size, loaded with the system; None if there is none.

        It is not in the table while it runs: after an error it is not used again.
        """
        known = self.steps.pop(_key(system, stress), None)
        if known is not None:
            try:
                known[1].load(system)
            except self._unsorted:
                raise Declined("the batch is not sorted by structure") from None
        return known

    def _decide_to_build(self, key: _Key, system: System) -> None:
        """Raise Declined if a new size should not get a step."""

    @abstractmethod
    def _captures(self, system: System, again: bool) -> bool:
        """Return whether a step is captured at its first use, or at its second."""

    def _new_step(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a checked step with buffers for a system and its edges."""
        self._drop_oldest()
        model = self._model
        try:
            try:
                return model.build(system, stress)
            except torch.cuda.OutOfMemoryError:
                if not self.steps:
                    raise
                self.steps.clear()
                torch.cuda.empty_cache()
                return model.build(system, stress)
        except self._unsorted:
            raise Declined("the batch is not sorted by structure") from None

    def _drop_oldest(self) -> None:
        """Drop the step that was not used for the longest time."""
        limit = float("inf")
        if self.task.device.type == "cuda":
            limit = KEPT_MEMORY * torch.cuda.get_device_properties(self.task.device).total_memory
        while self.steps and (
            len(self.steps) >= KEPT or sum(graphed.step.nbytes for graphed, _ in self.steps.values()) > limit
        ):
            self.steps.popitem(last=False)

    def _run(self, graphed: GraphedStep, system: System) -> Result:
        """Run until the capacity is large enough for all edges; returns a copy of the results."""
        while True:
            graphed.run()
            result = graphed.results()
            flag, _ = graphed.status()
            if not flag:
                result.properties = graphed.step.properties(result.charges)
                return result
            if not graphed.recover(flag):
                self._bound.raise_input_error(system, flag)

    def _describe_steps(self) -> list[str]:
        return [_describe(graphed) for graphed, _ in self.steps.values()]


class FusedBackend(_StepBackend):
    """Evaluates on fused Triton kernels on a GPU; structures that do not fit into its memory in blocks."""

    _needs = "the fused kernels"
    _blocks: BlockModel | None = None

    def _reason(self) -> str:
        if self.task.precision == "float64":
            return "precision='float64' was requested"
        if self.task.device.type not in ("cpu", "cuda"):
            return "the fused kernels need a CPU or a CUDA device"
        if not self.task.has_triton:
            return "there are kernels for a GPU only, and the potential is on a CPU"
        unknown = _unknown_precision(self.task.potential, self.task.precision)
        return unknown or unsupported_reason(self.task.potential) or super()._reason()

    def _make_model(self) -> StepModel:
        from .fused_step import FusedModel

        return FusedModel(self.task.potential, self.task.precision)

    def _captures(self, system: System, again: bool) -> bool:
        return self.task.graphs is True or bool(self.task.graphs and again and system.num_atoms <= GRAPHS_UP_TO)

    @cached_property
    def blocks_reason(self) -> str:
        """Why structures cannot be evaluated in blocks, "" if they can."""
        from .blocks import blocks_unsupported_reason

        return self.unsupported_reason or blocks_unsupported_reason(self.task.potential)

    def _new_step(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        if self.task.block_atoms is not None and system.num_systems == 1:
            return self._in_blocks(self.task.block_atoms).build(system, stress)
        try:
            return super()._new_step(system, stress)
        except (torch.cuda.OutOfMemoryError, NeighborOverflow) as error:
            if system.num_systems > 1:
                raise
            if self.blocks_reason:
                if isinstance(error, NeighborOverflow):
                    raise
                raise torch.cuda.OutOfMemoryError(f"{error}; not evaluated in blocks: {self.blocks_reason}") from None
        return self._largest_blocks(system, stress)

    def _largest_blocks(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a step in blocks as large as fit into the memory."""
        from .blocks import LARGEST_BLOCK, SMALLEST_BLOCK

        size = LARGEST_BLOCK
        while True:
            torch.cuda.empty_cache()
            try:
                return self._beside_free_memory(size, system, stress)
            except torch.cuda.OutOfMemoryError:
                if size < SMALLEST_BLOCK:
                    raise
            size = size * 3 // 4

    def _beside_free_memory(self, size: int, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a step in blocks of a size, beside memory that stays free for sums over the structure and for more
        edges."""
        free = torch.empty(2**30 + 100 * system.num_atoms, dtype=torch.uint8, device=self.task.device)
        built = self._in_blocks(size).build(system, stress)
        del free
        return built

    def _in_blocks(self, size: int) -> BlockModel:
        """Return the model of steps in blocks of at most so many atoms."""
        from .blocks import BlockModel

        if self._blocks is None:
            self._blocks = BlockModel(self.task.potential, self.task.precision, size)
        self._blocks.block_atoms = size
        return self._blocks

    def run(self, system: System, forces: bool, stress: bool) -> Result:
        kept = _key(system, stress) in self.steps
        try:
            return super().run(system, forces, stress)
        except torch.cuda.OutOfMemoryError:
            if not kept:
                raise
        # the edges of a kept step do not fit any more: another is built, in blocks if need be
        torch.cuda.empty_cache()
        return super().run(system, forces, stress)

    def describe(self, reasons: str) -> list[str]:
        representation = self.task.potential.representation
        path = fast_path(representation)
        assert path is not None
        arithmetic = path.arithmetic[self.task.precision]
        line = f"fused {type(representation).__name__} kernels on {self.task.device}, {arithmetic}"
        return [line, *describe_priors(self.task.potential), *self._describe_steps()]


class CapturedAutogradBackend(_StepBackend):
    """Evaluates by autograd of the whole potential in CUDA graphs."""

    reason_prefix = "no CUDA graph: "
    _needs = "graphs"
    _may_decline = (NotCapturable, torch.cuda.OutOfMemoryError)

    def __init__(self, task: Task):
        self._met: set[_Key] = set()
        self._too_large: set[_Key] = set()
        super().__init__(task)

    def _reason(self) -> str:
        if self.task.device.type not in ("cpu", "cuda"):
            return "graphs need a CUDA device"
        return super()._reason() if self.task.graphs else "graphs=False was requested"

    def _make_model(self) -> StepModel:
        from .autograd_step import AutogradModel

        return AutogradModel(self.task.model)

    def _declined(self, error: Exception, system: System, stress: bool) -> Declined:
        if isinstance(error, NotCapturable):
            return super()._declined(error, system, stress)
        self._too_large.add(_key(system, stress))
        return Declined("there is not enough memory for a graph of this size")

    def _captures(self, system: System, again: bool) -> bool:
        return True

    def _decide_to_build(self, key: _Key, system: System) -> None:
        if key in self._too_large:
            raise Declined("there is not enough memory for a graph of this size")
        if self.task.graphs is not True and key not in self._met:
            self._met.add(key)
            raise Declined("graphs='auto' captures a size when it comes the second time")

    def _require_usable(self, system: System) -> None:
        super()._require_usable(system)
        if self.task.graphs is not True and system.num_atoms > AUTOGRAD_UP_TO:
            raise Declined(
                f"CUDA graphs are used up to {AUTOGRAD_UP_TO} atoms (graphs='auto'); above, launch overhead is "
                "negligible"
            )

    def describe(self, reasons: str) -> list[str]:
        return [f"autograd in CUDA graphs on {self.task}: {reasons}", *self._describe_steps()]


def _unknown_precision(potential: Potential, precision: str) -> str:
    """Return that the kernels of a GPU do not have this precision, "" if they have it or there are none."""
    path = fast_path(potential.representation)
    if path is None or precision in path.arithmetic:
        return ""
    return f"there are no kernels of this precision for {type(potential.representation).__name__}"


def _key(system: System, stress: bool) -> _Key:
    return system.num_atoms, system.num_systems, system.dtype, stress


def _describe(graphed: GraphedStep) -> str:
    step = graphed.step
    structures = "1 structure" if step.num_systems == 1 else f"{step.num_systems} structures"
    parts = [
        f"  {step.num_atoms} atoms in {structures}, positions {str(step.dtype).removeprefix('torch.')}",
        f"capacity {step.capacity} edges ({graphed.status()[1]} used), {step.nbytes / 1e6:.1f} MB",
        "replayed as one CUDA graph" if graphed.captured else "launched kernel by kernel",
    ]
    parts += [step.layout] if step.layout else []
    parts += ["with stress"] if step.stress else []
    parts += ["atoms in spatial order"] if step.order is not None else []
    return ", ".join(parts)


# --- The fastest way to evaluate a potential on a domain ---


def choose_domain(potential: Potential, charge: float, precision: str = "native") -> Domain:
    """Return an empty domain on fused or compiled kernels, or by autograd.

    Args:
        potential: in evaluation mode.
        charge: total charge in e of the whole structure.
        precision: "native", or "mixed", as for `Evaluator`.

    Raises:
        ValueError: a part of the potential needs the whole structure, or there are no kernels of this precision.
        UntrainedCharge: the model does not know the charge.
    """
    if precision not in ("native", "mixed"):
        raise ValueError(f"precision must be 'native' or 'mixed', got {precision!r}")
    reason = fused_reason(potential)
    if precision == "mixed" and (reason := reason or _unknown_precision(potential, precision)):
        raise ValueError(f"precision='mixed': {reason}; take precision='native'")
    if not reason:
        try:
            from .fused_domain import FusedDomain
        except ImportError:  # no triton
            return ReferenceDomain(potential, charge)
        return FusedDomain(potential, charge, precision)
    if not compiled_reason(potential):
        try:
            from .cpu_step import CompiledDomain
        except (ImportError, RuntimeError):  # no numba, or one that does not start
            return ReferenceDomain(potential, charge)
        return CompiledDomain(potential, charge)
    return ReferenceDomain(potential, charge)


def compiled_reason(potential: Potential) -> str:
    """Return why compiled kernels cannot evaluate domains of a potential, "" if they can."""
    if potential.device.type != "cpu":
        return f"the model is on {potential.device}"
    return unsupported_reason(potential, compiled=True) or _reason(potential)


def fused_reason(potential: Potential) -> str:
    """Return why the fused kernels of the GPU cannot evaluate domains of a potential, "" if they can."""
    if potential.device.type != "cuda":
        return f"the model is on {potential.device}"
    return unsupported_reason(potential) or _reason(potential)


def _reason(potential: Potential) -> str:
    """Return why kernels that evaluate the potential cannot evaluate its domains."""
    path = fast_path(potential.representation)
    if path is None or not path.takes_ghosts:
        return f"the kernels for {type(potential.representation).__name__} take no ghosts"
    if any(kernels_of(p, potential.device) is None and not p.constant for p in potential.priors):
        return "a prior has no kernels"
    if any(prior.uses_charges for prior in potential.priors):
        return "charges are predicted for whole structures"
    return ""
