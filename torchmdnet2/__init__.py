"""torchmdnet2: neural-network potentials: training from YAML, fast simulation with ASE, OpenMM, LAMMPS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import registry
from .version import __version__

__all__ = ["Evaluator", "Potential", "System", "__version__", "load", "relax", "score"]

if TYPE_CHECKING:
    from .evaluator import Evaluator, load
    from .potential.potential import Potential
    from .streams import relax, score
    from .system import System

_HOME = {
    "load": "evaluator", "relax": "streams.run", "score": "streams.run", "Evaluator": "evaluator",
    "Potential": "potential.potential", "System": "system",
}  # fmt: skip


def _register_builtin() -> None:
    from . import models, priors  # noqa: F401  (each registers its classes)
    from .potential import baseline  # noqa: F401


registry.provide(_register_builtin)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
