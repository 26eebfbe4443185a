"""AIMNet2."""

from .model import AIMNet2

__all__ = ["AIMNet2"]
