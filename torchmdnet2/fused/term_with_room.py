"""A term whose sizes depend on cells, which are known on the device only.

Shapes: B structures.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ..system import System
from .fast_path import GpuTerm

__all__ = ["TermWithRoom"]


class TermWithRoom(GpuTerm):
    """A term that chooses sizes beforehand, with room, and flags cells that need more."""

    @abstractmethod
    def make_room(self, buffers: Any, system: System) -> bool:
        """Choose sizes for a composition and its cells [B, 3, 3]; whether `run` launches something else now."""

    @abstractmethod
    def lacking(self, buffers: Any) -> Tensor | None:
        """[1] bool, whether a cell needed more since `clear`: results are not used. None: none ever needs more."""

    @abstractmethod
    def grow(self, buffers: Any) -> bool:
        """Make room for the first cells that needed more; whether `run` launches something else now."""

    @abstractmethod
    def clear(self, buffers: Any) -> None:
        """Forget which cells needed more."""
