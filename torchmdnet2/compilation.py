"""torch.compile around what must not be compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["not_compiled"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_REASON = (
    "torch.compile has no effect on a potential, whose number of edges changes from call to call; "
    "torchmdnet2.Evaluator runs it on compiled kernels"
)


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function, which torch.compile runs as it is, with a warning; what is around it is compiled."""

    @functools.wraps(function)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return _as_it_is(function, args, kwargs)
        return function(*args, **kwargs)

    return wrapped


def _as_it_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    warnings.warn(_REASON, stacklevel=2)
    # a decorator at the top would import the compiler in every program, which takes a second
    return torch.compiler.disable(function, reason=_REASON)(*args, **kwargs)
