"""Active learning: a loop of dynamics, selection of frames, labels and training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "LABELLERS",
    "SELECTIONS",
    "Choice",
    "Labeller",
    "LabellingFailed",
    "Labels",
    "LearnConfig",
    "LearnResult",
    "Selection",
    "load_learn_config",
    "parse_learn_config",
    "run_learning",
]

if TYPE_CHECKING:
    from .config import LearnConfig, load_learn_config, parse_learn_config
    from .labellers import LABELLERS, Labeller, LabellingFailed, Labels
    from .loop import LearnResult, run_learning
    from .selection import SELECTIONS, Choice, Selection

_HOME = {
    **dict.fromkeys(("LearnConfig", "load_learn_config", "parse_learn_config"), "config"),
    **dict.fromkeys(("LABELLERS", "Labeller", "LabellingFailed", "Labels"), "labellers"),
    **dict.fromkeys(("LearnResult", "run_learning"), "loop"),
    **dict.fromkeys(("SELECTIONS", "Choice", "Selection"), "selection"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that processes that label frames start quickly."""
    if name in _HOME:
        return getattr(import_module(f"torchmdnet2.learn.{_HOME[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
