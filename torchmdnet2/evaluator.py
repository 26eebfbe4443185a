"""Evaluator: repeated evaluation of one potential on the fastest correct path.

This first version has one path: the Potential itself, in evaluation mode and with frozen weights.
"""

from __future__ import annotations

from .potential import Potential, Result
from .system import System

__all__ = ["Evaluator"]


class Evaluator:
    """Evaluates a potential again and again: same inputs and results as the Potential.

    Args:
        potential: the potential; its weights are taken as they are now.
        stress: compute the stress in every call.
    """

    def __init__(self, potential: Potential, stress: bool = False):
        self.potential = potential.eval()
        self.stress = stress

    def __call__(self, system: System, forces: bool = True, stress: bool | None = None) -> Result:
        """Energy [B], forces [N, 3] and, if asked, stress [B, 3, 3] of a batch of structures; see Potential."""
        return self.potential(system, forces=forces, stress=self.stress if stress is None else stress)

    def report(self) -> str:
        """Which path runs and why, in words."""
        return f"reference path (autograd) on {self.potential.device}, {self.potential.dtype}"
