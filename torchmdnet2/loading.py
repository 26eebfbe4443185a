"""load: a potential from its file, whose calls are as fast as those of an Evaluator."""

from __future__ import annotations

import copy
import operator
import os
from itertools import chain
from typing import Any

import torch
from torch import nn

from . import checkpoint
from .core.processes import ProcessLock
from .evaluator import Evaluator
from .potential.potential import Potential, Result
from .system import System

__all__ = ["FastCalls", "load"]


def load(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
) -> Potential:
    """Read a potential from a model file, in evaluation mode.

    Its calls run on an Evaluator: by fused kernels or in CUDA graphs, where these support the model. They run by
    autograd, as `potential.reference(system)` always does, in training mode, where results are differentiated, with
    `neighbors` that are given, and with hooks on the layers. In-place changes of weights are noticed (optimizers,
    `load_state_dict`, `.to(device)`), and so are replaced parameters, heads and priors; changes through `.data`, which
    PyTorch does not count, are not.

    Args:
        path: a .tmn file, or the name of a potential (`torchmdnet2 models`).
        device: where the weights go.
        dtype: floating-point type of the network, float32 or float64; None keeps the stored one.
        allow_untrained_charge: evaluate total charges that the model was not trained on, with a warning, which are
            refused otherwise.

    Raises:
        FileNotFoundError: there is no such file, nor a potential of this name.
        BadCheckpoint: the file is damaged, was written by a newer version, or is not a model file.
        ValueError: the device or dtype cannot be used.
    """
    potential = checkpoint.load(path, device, dtype, allow_untrained_charge)
    potential.fast_calls = FastCalls()
    return potential


class FastCalls:
    """Calls of one potential on an Evaluator, which is made when it is first needed. Thread-safe.

    Copies and pickles begin anew: they belong to the copy of the potential.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._evaluator: Evaluator | None = None
        self._tables: list[dict[str, Any]] = []  # what the potential is made of, table by table
        self._hooks: list[dict[int, Any]] = []
        self._parts: list[Any] = []

    def __call__(self, potential: Potential, system: System, forces: bool, stress: bool) -> Result | None:
        """As the Evaluator; None where the potential itself must be called.

        Args:
            potential: in evaluation mode; always the same one.
            system: N atoms in B structures.
            forces, stress: whether to compute them.
        """
        with self._lock:
            if self._evaluator is None or not self._holds(self._parts):
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
            tables = [table for table in (module._parameters, module._buffers) if table]
            self._tables += [*tables, *([module._modules] if module._modules or isinstance(module, containers) else [])]
            if module is not potential:
                self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._parts = list(chain.from_iterable(map(dict.values, self._tables)))
        # not of the potential itself: a circle of references would keep the memory of both after their last use
        part = copy.copy(potential)
        part.fast_calls = None
        self._evaluator = Evaluator(part)

    def _holds(self, parts: list[Any]) -> bool:
        """Whether no parameter, buffer or module was replaced, added or removed."""
        found = list(chain.from_iterable(map(dict.values, self._tables)))
        return len(found) == len(parts) and all(map(operator.is_, found, parts))

    def __deepcopy__(self, memo: dict[int, Any]) -> FastCalls:
        return FastCalls()

    def __reduce__(self) -> tuple[Any, ...]:
        return FastCalls, ()
