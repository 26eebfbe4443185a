"""Evaluator: repeated evaluation of one potential on the fastest correct path.

On a CUDA device TensorNet runs on fused kernels: neighbor search, network, hand-written backward and sums are one step
over static buffers, replayed as one CUDA graph. Other potentials are captured as they are: search, network, autograd
and priors in one graph. On the CPU TensorNet runs on kernels compiled by numba, where that is installed. Everything
else runs on the Potential itself; `report()` says why.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from .potential import Potential, Result
from .refusals import require_potential, require_system
from .system import System

if TYPE_CHECKING:
    from .runtime.autograd_model import AutogradModel
    from .runtime.cpu_model import CpuModel
    from .runtime.graphs import GraphedStep
    from .runtime.model import FusedModel, Source
    from .runtime.reference import BoundStep

__all__ = ["Evaluator"]

Precision = Literal["float32", "tf32", "float64"]

_KEPT = 8  # sizes of systems whose buffers and graphs are kept
_KEPT_MEMORY = 0.25  # of the device's memory, for all that is kept beside the size in use
_GRAPHS_UP_TO = 50_000  # atoms; above, the launches hide behind the kernels
_AUTOGRAD_UP_TO = 5_000  # the same for potentials without fused kernels
_version = attrgetter("_version")
_options = attrgetter("energy_scale", "energy_shift", "subtract_isolated", "atom_filter", "allow_untrained_charge")


class Evaluator:
    """Evaluates a potential again and again: same inputs and results as the Potential. Thread-safe.

    Args:
        potential: the potential, set to evaluation mode. Weights that change later are noticed when they are changed
            in place (optimizers, `load_state_dict`); call `refresh()` after replacing parameters or priors, or
            changing them through `.data`, which PyTorch does not count.
        precision: "float32": the potential's own precision (nothing below float32 anywhere); "tf32": matrix products
            of the fused kernels in TF32; "float64": a float64 copy of the potential.
        graphs: replay steps as CUDA graphs: "auto" from the second call of a size on, up to 50,000 atoms (5,000 for
            potentials without fused kernels; above, the launches hide behind the kernels); True always; False never.
        stress: compute the stress in every call.

    Raises:
        ValueError: an unknown option.
    """

    def __init__(
        self,
        potential: Potential,
        precision: Precision = "float32",
        graphs: bool | Literal["auto"] = "auto",
        stress: bool = False,
    ):
        if precision not in ("float32", "tf32", "float64"):
            raise ValueError(f"precision must be 'float32', 'tf32' or 'float64', got {precision!r}")
        if graphs not in ("auto", True, False):
            raise ValueError(f"graphs must be 'auto', True or False, got {graphs!r}")
        self.potential: Potential = require_potential(potential).eval()
        self.precision, self.graphs, self.stress = precision, graphs, stress
        self._lock = threading.RLock()
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("potential", "precision", "graphs", "stress")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # --- evaluation ----------------------------------------------------------------------------------------------

    def __call__(self, system: System, forces: bool = True, stress: bool | None = None) -> Result:
        """Energy, forces and, if asked, stress of a batch of structures.

        Args:
            system: N atoms in B structures, on the potential's device; never changed.
            forces, stress: what to compute; stress None takes the evaluator's own setting.

        Returns:
            Result of fresh tensors; forces and stress in the floating-point type of `system.pos`.

        Raises:
            ValueError, UnknownElement: as the Potential; ValueError for a system on another device.
            RuntimeError: the first use of a fast path did not agree with the reference.
        """
        stress = self.stress if stress is None else stress
        with self._lock, torch.inference_mode(False):
            model = self._prepare(system)
            if model is not None:
                with self._falling_back(system, stress), torch.no_grad():
                    result = self._replayed(model, system, stress)
                    if result is not None:
                        result.forces = result.forces if forces else None
                        return result
            return self._reference(system)(system, forces=forces, stress=stress, create_graph=False)

    def bind(self, system: System, stress: bool | None = None) -> BoundStep:
        """Hold a structure on the device, for loops that write positions there and read forces there.

        Args:
            system: N atoms in B structures; copied.
            stress: None takes the evaluator's own setting.

        Returns:
            An object with static tensors `pos`, `cell`, `forces`, `energy`, `atom_energies`, `stress`, with
            `replay()` and with `check()`; see `torchmdnet2.runtime.reference`. The first step is computed. It keeps the
            weights of now, and is not locked: one thread at a time.

        Raises:
            As a call.
        """
        stress = self.stress if stress is None else stress
        with self._lock, torch.inference_mode(False):
            model = self._prepare(system)
            if model is not None and (self.graphs is True or self._pays(system)):
                from .runtime.bound import FusedBoundStep

                with self._falling_back(system, stress), torch.no_grad():
                    graphed, _ = self._new_step(model, system, stress)
                    if self.graphs:
                        graphed.capture()
                    self._run(graphed, system)
                    return FusedBoundStep(graphed, model.potential, system)
            reference = self._reference(system)
            if not isinstance(reference, Potential):
                from .runtime.cpu_bound import CpuBoundStep

                return CpuBoundStep(reference, system, stress)
            from .runtime.reference import ReferenceBoundStep

            return ReferenceBoundStep(reference, system, stress)

    def refresh(self) -> None:
        """Take the weights, priors, device and type of the potential as they are now."""
        with self._lock:
            weights = [*self.potential.parameters(), *self.potential.buffers()]
            self._weights = [w for w in weights if not w.is_inference()]  # such tensors do not count their changes
            self._signature = self._sign()
            self._model: FusedModel | AutogradModel | None = None
            self._compiled: CpuModel | None = None
            self._exact: Potential | None = None
            self._steps: OrderedDict[tuple[Any, ...], tuple[GraphedStep, Source]] = OrderedDict()
            self._met: set[tuple[Any, ...]] = set()
            self._too_large: set[tuple[Any, ...]] = set()
            self._on_cpu = self.potential.device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1"
            self._reason = self._why_not_fused()
            self._uncaptured = self._why_not_captured() if self._reason else ""
            self._last = ""

    @property
    def fused(self) -> bool:
        """Whether structures run on the fused GPU kernels."""
        return not (self._reason or self._on_cpu)

    def report(self) -> str:
        """Which path runs and why, its capacities and memory, in words."""
        device, dtype = self.potential.device, str(self.potential.dtype).removeprefix("torch.")
        with self._lock:
            used = f"{device}, {'float64' if self.precision == 'float64' else dtype}"
            no_effect = ", so that precision='tf32' has no effect" if self.precision == "tf32" else ""
            if self._reason and self._uncaptured:
                graph = "" if self._on_cpu else f"; no CUDA graph: {self._uncaptured}"
                return f"reference path (autograd) on {used}: {self._reason}{graph}{no_effect}"
            if self._reason:
                lines = [f"autograd in CUDA graphs on {used}: {self._reason}{no_effect}"]
                return "\n".join(lines + self._describe_steps())
            if self._on_cpu:
                number = torch.get_num_threads()
                threads = "1 thread" if number == 1 else f"up to {number} threads, or 1 where that is faster"
                lines = [f"compiled TensorNet kernels (numba) on {device}, float32, {threads}"]
                lines += ["precision='tf32' has no effect there"] if self.precision == "tf32" else []
                if self._last:
                    lines.append(f"last fell back to the reference path (autograd): {self._last}")
                return "\n".join(lines)
            products = {
                "float32": "float32, matrix products in three TF32 parts",
                "tf32": "float32, matrix products in TF32",
            }
            lines = [f"fused TensorNet kernels on {device}, {products[self.precision]}"]
            return "\n".join(lines + self._describe_steps())

    def _describe_steps(self) -> list[str]:
        lines = [_describe(graphed) for graphed, _ in self._steps.values()]
        return lines + ([f"last fell back to the reference path (autograd): {self._last}"] if self._last else [])

    # --- paths -----------------------------------------------------------------------------------------------------

    def _why_not_fused(self) -> str:
        """ "" when the fused kernels can run, else the reason."""
        if self.precision == "float64":
            return "precision='float64' was asked for"
        if self.potential.device.type not in ("cpu", "cuda"):
            return "the fused kernels need a CPU or a CUDA device"
        from .runtime.covered import why_not

        reason = why_not(self.potential)
        if reason:
            return reason
        try:
            import_module(f".runtime.{'cpu_model' if self._on_cpu else 'model'}", __package__)
        except (ImportError, RuntimeError) as error:
            return f"the fused kernels need {'numba' if self._on_cpu else 'Triton'} ({error})"
        return ""

    def _why_not_captured(self) -> str:
        """ "" when a potential without fused kernels can be tried to be captured, else the reason."""
        if self.potential.device.type != "cuda" and self._on_cpu:
            return "graphs need a CUDA device"
        if not self.graphs:
            return "graphs=False was asked for"
        try:
            import_module(".runtime.autograd_model", __package__)
        except (ImportError, RuntimeError) as error:
            return f"it needs Triton ({error})"
        return ""

    def _sign(self) -> tuple[Any, ...]:
        """Changes when the weights or options do."""
        first = self._weights[0] if self._weights else None
        place = None if first is None else (first.data_ptr(), first.dtype, first.device)
        return sum(map(_version, self._weights)), place, _options(self.potential)

    def _prepare(self, system: System) -> FusedModel | AutogradModel | None:
        """What replays steps of this system, None for the reference path."""
        if self._sign() != self._signature:
            self.refresh()
        if require_system(system).device != self.potential.device:
            raise ValueError(
                f"the system is on '{system.device}' and the potential on '{self.potential.device}': "
                f"give system.to('{self.potential.device}')"
            )
        self._last = ""
        if self._reason and self._uncaptured:
            return None
        if system.num_atoms == 0:
            self._last = "the system has no atoms"
        elif system.dtype not in (torch.float32, torch.float64):
            self._last = f"the positions are {system.dtype}"
        elif self._on_cpu and not self._reason:
            from .fused.tensornet.cpu import lost_by_fork

            self._last = lost_by_fork()
        if self._last or self._on_cpu:
            return None
        if self._model is None:
            if self._reason:
                from .runtime.autograd_model import AutogradModel

                self._model = AutogradModel(self._plain())
            else:
                from .runtime.model import FusedModel

                self._model = FusedModel(self.potential, self.precision)
        return self._model

    def _reference(self, system: System) -> Potential | CpuModel:
        """What is called without CUDA graphs: the compiled model of the CPU, the potential, or its copy in float64."""
        if self._on_cpu and not (self._reason or self._last):
            if self._compiled is None:
                from .runtime.cpu_model import CpuModel

                self._compiled = CpuModel(self.potential)
            return self._compiled
        return self._plain()

    def _plain(self) -> Potential:
        if self.precision != "float64" or self.potential.dtype == torch.float64:
            return self.potential
        if self._exact is None:
            self._exact = copy.deepcopy(self.potential).double().eval()
        return self._exact

    @contextmanager
    def _falling_back(self, system: System, stress: bool) -> Iterator[None]:
        """What cannot be replayed goes on after this, on the reference path."""
        from .runtime.model import UnsortedBatch
        from .runtime.sync_guard import NotCapturable

        try:
            yield
        except UnsortedBatch:
            self._last = "the batch is not sorted by structure"
        except NotCapturable as error:
            self._uncaptured = str(error)
            self._model = None
            self._steps.clear()
        except torch.cuda.OutOfMemoryError:
            if not self._reason:
                raise
            self._last = "there is not enough memory for a graph of this size"
            self._too_large.add(_size(system, stress))

    def _pays(self, system: System) -> bool:
        """Whether a graph is worth its while; fused kernels always are."""
        if not self._reason or system.num_atoms <= _AUTOGRAD_UP_TO:
            return True
        self._last = f"graphs='auto' captures up to {_AUTOGRAD_UP_TO} atoms: above, launches hide behind the kernels"
        return False

    def _replayed(self, model: FusedModel | AutogradModel, system: System, stress: bool) -> Result | None:
        """Results by a step that is kept for systems of this size; None when it should not be made."""
        key = _size(system, stress)
        known = self._steps.pop(key, None)
        if known is not None:
            # not in the table while it runs: after an error it is not used again
            graphed, source = known
            source.load(system)
        elif not self._reason or self._should_build(key, system):
            graphed, source = self._new_step(model, system, stress)
        else:
            return None
        if self.graphs and (self.graphs is True or self._reason or (known and system.num_atoms <= _GRAPHS_UP_TO)):
            graphed.capture()
        result = self._run(graphed, system)
        self._steps[key] = graphed, source
        return result

    def _should_build(self, key: tuple[Any, ...], system: System) -> bool:
        """Whether a size that comes for the first or second time is captured, without fused kernels."""
        if key in self._too_large:
            self._last = "there is not enough memory for a graph of this size"
            return False
        if self.graphs is True:
            return True
        if not self._pays(system):
            return False
        met = key in self._met
        self._met.add(key)
        if not met:
            self._last = "graphs='auto' captures a size when it comes the second time"
        return met

    def _new_step(self, model: FusedModel | AutogradModel, system: System, stress: bool) -> tuple[GraphedStep, Source]:
        """Buffers for a system, loaded and with room for its edges, and checked."""
        self._make_memory(1)
        try:
            return model.build(system, stress)
        except torch.cuda.OutOfMemoryError:
            if not self._steps:
                raise
            self._steps.clear()
            torch.cuda.empty_cache()
            return model.build(system, stress)

    def _make_memory(self, coming: int) -> None:
        """Drop the sizes that were used longest ago."""
        limit = float("inf")
        if self.potential.device.type == "cuda":
            limit = _KEPT_MEMORY * torch.cuda.get_device_properties(self.potential.device).total_memory
        while self._steps and (
            len(self._steps) + coming > _KEPT or sum(g.step.nbytes for g, _ in self._steps.values()) > limit
        ):
            self._steps.popitem(last=False)

    def _run(self, graphed: GraphedStep, system: System) -> Result:
        """Run until there was room for all edges; a copy of the results."""
        from .runtime.bound import explain

        while True:
            graphed.run()
            result = graphed.results()
            flag, needed = graphed.status()
            if not flag:
                return result
            if not graphed.recover(flag, needed):
                explain(system, flag)


def _size(system: System, stress: bool) -> tuple[Any, ...]:
    return system.num_atoms, system.num_systems, system.dtype, stress


def _describe(graphed: GraphedStep) -> str:
    step = graphed.step
    structures = "1 structure" if step.num_systems == 1 else f"{step.num_systems} structures"
    parts = [
        f"  {step.num_atoms} atoms in {structures}, positions {str(step.dtype).removeprefix('torch.')}",
        f"room for {step.capacity} edges ({graphed.status()[1]} used), {step.nbytes / 1e6:.1f} MB",
        "replayed as one CUDA graph" if graphed.captured else "launched kernel by kernel",
    ]
    parts += ["with stress"] if step.stress else []
    parts += ["atoms in spatial order"] if step.order is not None else []
    return ", ".join(parts)
