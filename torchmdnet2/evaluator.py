"""Evaluator: repeated evaluation of one potential on the fastest correct path.

The paths are tried in order: on a CUDA device fused kernels (neighbor search, network, hand-written backward and sums
over static buffers, replayed as one CUDA graph), then autograd in a CUDA graph; on the CPU kernels compiled by numba;
finally the Potential itself. `report()` says which one runs, and why.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Callable, ValuesView
from inspect import signature
from itertools import chain
from typing import Any, Literal, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn

from . import checkpoint
from .core.devices import ProcessLock, refuse_forked_gpu
from .engine.backends import (
    Backend,
    CapturedAutogradBackend,
    CompiledCpuBackend,
    Declined,
    FusedBackend,
    ReferenceBackend,
    Task,
)
from .engine.bound import BoundStep
from .engine.select import describe_cells
from .engine.timings import describe_timings
from .potential.cells import Portion, evaluate_portions, is_mixed
from .potential.derivatives import is_differentiated, not_compiled, outside_modes
from .potential.potential import Potential, Result, with_dipole
from .potential.refusals import require_flag, require_potential, require_system
from .system import System

__all__ = ["Evaluator", "FastCalls", "Precision", "load"]


_LOGGER = logging.getLogger(__name__)

Precision = Literal["native", "float32", "mixed", "tf32", "float64"]

_GPU = (FusedBackend, CapturedAutogradBackend, ReferenceBackend)
_CPU = (CompiledCpuBackend, ReferenceBackend)
_Found = TypeVar("_Found")
_LOWER = ("mixed", "tf32")  # of kernels for GPUs only
_NATIVE = "take precision='native'"


class Evaluator:
    """Evaluates a potential many times, by the fastest path: same inputs and results as the Potential. Thread-safe.

    Args:
        potential: the potential, set to evaluation mode. Weights that change later are noticed when they are changed
            in place (optimizers, `load_state_dict`); call `refresh()` after replacing parameters or priors, or
            changing them through `.data`, which PyTorch does not count.
        precision: "native": the precision of the potential (float32 at least; "float32" means the same);
            "mixed": on a GPU, what TensorNet's layers exchange in float16, sums in float32, with expected errors of the
            forces near 1e-4 of the largest; "tf32": on a GPU, matrix products of the kernels in TF32; "float64": a
            float64 copy of the potential.
        graphs: replay steps as CUDA graphs: "auto" from the second call of a size on, up to 50,000 atoms (5,000 for
            potentials without fused kernels; above, launch overhead is negligible); True always; False never.
        stress: compute the stress in every call.
        block_atoms: evaluate each structure on a GPU in blocks of at most so many atoms, their surroundings included;
            batches of several are not divided. None: only a structure that does not fit into the memory.

    Raises:
        ValueError: an unknown option, a flag that is not True or False, or "mixed", "tf32" or `block_atoms` for a
            device or potential that has no such kernels.
    """

    def __init__(
        self,
        potential: Potential,
        precision: Precision = "native",
        graphs: bool | Literal["auto"] = "auto",
        stress: bool = False,
        block_atoms: int | None = None,
    ):
        if precision not in get_args(Precision):
            raise ValueError(f"precision must be 'native', 'float32', 'mixed', 'tf32' or 'float64', got {precision!r}")
        if not (isinstance(graphs, str) and graphs == "auto"):
            graphs = require_flag(graphs, "graphs", "'auto', ")
        if block_atoms is not None:
            whole = hasattr(block_atoms, "__index__") and not isinstance(block_atoms, bool)
            if not whole or operator.index(block_atoms) < 1:
                raise ValueError(f"block_atoms must be a positive number of atoms or None, got {block_atoms!r}")
            block_atoms = operator.index(block_atoms)
        self.potential: Potential = require_potential(potential).eval()
        self.precision: Precision = "native" if precision == "float32" else precision
        self.graphs, self.stress, self.block_atoms = graphs, require_flag(stress, "stress"), block_atoms
        self._lock = ProcessLock()
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("potential", "precision", "graphs", "stress", "block_atoms")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # --- evaluation ----------------------------------------------------------------------------------------------

    @not_compiled
    def __call__(self, system: System, forces: bool = True, stress: bool | None = None) -> Result:
        """Return energy and, if requested, forces and stress of a batch of structures.

        Args:
            system: N atoms in B structures, on the potential's device; never changed.
            forces: whether to compute them.
            stress: whether to compute it; None: the evaluator's setting.

        Returns:
            Result of fresh tensors; forces and stress in the floating-point type of `system.pos`. Where positions,
            cells or charges require a gradient, they are those of the Potential, and can be differentiated.

        Raises:
            ValueError, UnknownElement: as the Potential; ValueError for a system on another device, or one that the
                kernels of "mixed" or "tf32" cannot evaluate.
            RuntimeError: the first use of a fast path did not agree with the reference.
        """
        forces, stress = require_flag(forces, "forces"), self._stress(stress)
        differentiated = is_differentiated(require_system(system))
        system = system if differentiated else system.detach()  # also under torch.no_grad()
        cells = None if differentiated else self._cells_of(system)
        if cells is not None:
            if not is_mixed(system):
                return cells(system, forces, stress)

            def evaluate(portion: Portion) -> Result:
                return (cells if portion.periodic else self)(portion.system, forces, stress)

            self.potential.check(system)  # names structures by their places in the batch
            result: Result = evaluate_portions(system, self.potential.outputs, evaluate)
            result.properties = with_dipole(result.properties, result.charges, system)
            return result
        result = self._first(system, lambda backend: backend.run(system, forces, stress), differentiated)
        result.properties = with_dipole(result.properties, result.charges, system)
        return result

    def bind(self, system: System, stress: bool | None = None) -> BoundStep:
        """Hold a structure on the device, for loops that write positions there and read forces there.

        Args:
            system: N atoms in B structures; copied.
            stress: None: the evaluator's setting.

        Returns:
            An object with static tensors `pos`, `cell`, `forces`, `energy`, `atom_energies`, `stress`, with
            `replay()` and with `check()`; see `torchmdnet2.engine.bound`. The first step is computed. It keeps the
            present weights, and is not locked: one thread at a time.

        Raises:
            ValueError, RuntimeError: as a call.
        """
        stress = self._stress(stress)
        cells = self._cells_of(system)
        if cells is not None and not is_mixed(system):
            return cells.bind(system, stress)
        return self._first(system, lambda backend: backend.bind(system, stress), cells is not None)

    def _stress(self, given: bool | None) -> bool:
        return self.stress if given is None else require_flag(given, "stress")

    def refresh(self) -> None:
        """Take the current weights, priors, device and type of the potential."""
        with self._lock:
            self._task = Task(self.potential, self.precision, self.graphs, self.block_atoms)
            kinds = (FusedBackend,) if self.precision in _LOWER else _GPU if self._task.has_triton else _CPU
            self._backends: list[Backend] = [kind(self._task) for kind in kinds]
            if self.precision in _LOWER and self._backends[0].unsupported_reason:
                raise ValueError(f"precision='{self.precision}': {self._backends[0].unsupported_reason}; {_NATIVE}")
            if self.block_atoms is not None:
                self._require_blocks()
            self._declined: list[str] = []
            summing = self.potential.in_cells()
            self._summing = None if summing is self.potential else summing
            self._cells: Evaluator | None = None
            self._last_pbc: tuple[Tensor | None, int, bool] = None, 0, False

    def _require_blocks(self) -> None:
        """Raise ValueError for a potential that cannot be evaluated in blocks."""
        first = self._backends[0]
        reason = first.blocks_reason if isinstance(first, FusedBackend) else "blocks are evaluated by kernels for a GPU"
        if reason:
            raise ValueError(f"block_atoms={self.block_atoms}: {reason}; take block_atoms=None")

    def _cells_of(self, system: System) -> Evaluator | None:
        """Return the evaluator of periodic structures, if there are some and the model sums over all pairs of
        molecules."""
        if self._summing is None or not self._is_periodic(require_system(system).pbc):
            return None
        with self._lock:
            if self._task.is_changed:
                self.refresh()
            if self._cells is None and self._summing is not None:
                self._cells = Evaluator(self._summing, self.precision, self.graphs, self.stress, self.block_atoms)
                _LOGGER.info("periodic cells: %s", describe_cells(self._summing))
            return self._cells

    def _is_periodic(self, pbc: Tensor) -> bool:
        """Return whether a structure is periodic. It does not wait for a GPU if the last call had the same tensor."""
        seen, version, found = self._last_pbc
        if pbc is not seen or pbc.is_inference() or pbc._version != version:  # inference tensors count no changes
            found = bool(pbc.any())
            self._last_pbc = pbc, 0 if pbc.is_inference() else pbc._version, found
        return found

    def _first(self, system: System, action: Callable[[Backend], _Found], differentiated: bool = False) -> _Found:
        """Return the result of the first backend that accepts the system; of the potential itself if results are
        differentiated."""
        device = self.potential.device
        refuse_forked_gpu(device)
        with self._lock, outside_modes(device):
            if self._task.is_changed:
                self.refresh()
            if require_system(system).device != device:
                raise ValueError(
                    f"the system is on '{system.device}' and the potential on '{device}': give system.to('{device}')"
                )
            self._declined = ["the results are differentiated"] if differentiated else []
            if differentiated and self.precision in _LOWER:
                raise ValueError(f"precision='{self.precision}': the results would be those of autograd; {_NATIVE}")
            for backend in self._backends[-1:] if differentiated else self._backends:
                if not backend.unsupported_reason:
                    try:
                        return action(backend)
                    except Declined as reason:
                        self._declined.append(str(reason))
        # other precisions have the reference
        raise ValueError(f"precision='{self.precision}': {self._declined[-1]}; {_NATIVE}")

    # --- reports -------------------------------------------------------------------------------------------------

    @property
    def _active(self) -> Backend:
        """The backend that evaluates structures, except those that it declines."""
        return next(backend for backend in self._backends if not backend.unsupported_reason)

    @property
    def fused(self) -> bool:
        """Whether structures run on the fused GPU kernels."""
        return isinstance(self._active, FusedBackend)

    def report(self, system: System | None = None, stress: bool | None = None) -> str:
        """Return the path that runs and the reason, its capacities and memory, in words.

        Args:
            system: a structure whose step is timed, with forces: each search, the network and each prior, in ms and as
                a share of the whole step. On a GPU each is replayed separately in a CUDA graph. None: nothing is timed.
            stress: time it with the stress; None: the evaluator's setting.

        Raises:
            ValueError: the structure is refused, as in a call.
        """
        cells = None if system is None else self._cells_of(system)
        if cells is not None:
            if is_mixed(require_system(system)):
                raise ValueError("a batch of molecules and cells is evaluated in two steps: give one kind to time it")
            return f"{cells.report(system, stress)}\nperiodic cells: {describe_cells(cells.potential)}"
        with self._lock:
            times: list[str] = []
            if system is not None:
                wanted = self._stress(stress)
                found = self._first(system, lambda backend: backend.timings(system, wanted))
                times = describe_timings(found, system)
            active = self._active
            skipped = self._backends[: self._backends.index(active)]
            lines = active.describe("; ".join(b.reason_prefix + b.unsupported_reason for b in skipped))
            if self._declined and not isinstance(active, ReferenceBackend):
                lines.append(f"last fell back to the reference path (autograd): {self._declined[0]}")
            if self._summing is not None:
                lines.append(f"periodic cells: {describe_cells(self._summing)}")
            if self._cells is not None:
                lines += [f"  {line}" for line in self._cells.report().splitlines()]
            return "\n".join([*lines, *times])


# --- load: a potential from its file, whose calls are as fast as those of an Evaluator ---


def load(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str = "pme",
    level: str | None = None,
    **other: NoReturn,
) -> Potential:
    """Read a potential from a model file, in evaluation mode.

    Its calls run on an Evaluator: by fused kernels or in CUDA graphs, where these support the model. They run by
    autograd, as `potential.reference(system)` always does, in training mode, if results are differentiated, with given
    `neighbors`, and with hooks on the layers. Changes of weights in place (optimizers,
    `load_state_dict`, `.to(device)`) and replaced parameters, heads and priors are noticed; changes through `.data`,
    which PyTorch does not count, are not.

    Args:
        path: a .tmn file, or the name of a potential (`torchmdnet2 models`).
        device: where the weights go.
        dtype: floating-point type of the network, float32 or float64; None keeps the stored one.
        allow_untrained_charge: evaluate total charges that the model was not trained on, with a warning, which are
            refused otherwise.
        coulomb: how Coulomb energies over all pairs are summed in periodic cells: "pme" (particle-mesh Ewald) or "dsf"
            (damped shifted force: a sum over near pairs, less accurate).
        level: level of theory, of a model that was trained on several (`potential.level_names`); None: its default.
        other: none; arguments of the Evaluator, such as `precision`, are an error that says where they go.

    Raises:
        FileNotFoundError: there is no such file, nor a potential of this name.
        TypeError: an unknown argument.
        BadCheckpoint: the file is damaged, was written by a newer version, or is not a model file.
        ValueError: the device, dtype or `coulomb` cannot be used, `allow_untrained_charge` is not True or False, or the
            model does not have this level.
    """
    given: dict[str, Any] = other
    for name, value in given.items():
        its = name in signature(Evaluator).parameters
        where = f": it is one of Evaluator(load(…), {name}={value!r})" * its
        raise TypeError(f"load has no argument '{name}'{where}")
    potential = checkpoint.load(path, device, dtype, allow_untrained_charge, coulomb, level)
    potential.fast_calls = FastCalls()
    return potential


_END = object()
_ENDS = (_END,)  # where one of two sequences is shorter, its end meets something else


class FastCalls:
    """Runs calls of one potential on an Evaluator, which is made when it is first needed. Thread-safe.

    Copies and pickles start without one: they belong to the copy of the potential.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._evaluator: Evaluator | None = None
        self._tables: list[ValuesView[Any]] = []  # what the potential is made of, table by table
        self._hooks: list[dict[int, Any]] = []
        self._parts: list[Any] = []  # of all tables, `_END` last

    def __call__(self, potential: Potential, system: System, forces: bool, stress: bool) -> Result | None:
        """Evaluate as the Evaluator; return None if the potential itself must be called.

        Args:
            potential: in evaluation mode; always the same one.
            system: N atoms in B structures.
            forces, stress: whether to compute them.
        """
        with self._lock:
            if self._evaluator is None or not self._holds():
                if any(not isinstance(p, nn.Parameter) for p in potential.parameters()):
                    return None  # tensors that stand for weights during one call: torch.func.functional_call
                self._make(potential)
            if any(self._hooks):
                return None  # kernels would not call them
            evaluator = self._evaluator
            assert evaluator is not None
            vars(evaluator.potential).update(vars(potential), fast_calls=None)
        return evaluator(system, forces=forces, stress=stress)

    def _make(self, potential: Potential) -> None:
        containers = (nn.ModuleList, nn.ModuleDict)  # may be empty, and filled later
        self._tables, self._hooks = [], []
        for module in potential.modules():
            tables: list[Any] = [table for table in (module._parameters, module._buffers) if table]
            tables += [module._modules] if module._modules or isinstance(module, containers) else []
            self._tables += map(dict.values, tables)
            if module is not potential:
                self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._parts = [*chain.from_iterable(self._tables), _END]
        # not of the potential itself: a circle of references would keep the memory of both after their last use
        part = copy.copy(potential)
        part.fast_calls = None
        self._evaluator = Evaluator(part)

    def _holds(self) -> bool:
        """Return whether no parameter, buffer or module was replaced, added or removed."""
        return all(map(operator.is_, chain(chain.from_iterable(self._tables), _ENDS), self._parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> FastCalls:
        return FastCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return FastCalls, ()
