"""Streams of structures through a potential: relaxation."""

from .conformers import Ranking
from .relaxing import Outcome
from .run import relax

__all__ = ["Outcome", "Ranking", "relax"]
