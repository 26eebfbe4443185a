"""Streams of structures through a potential: relaxation, and energies with forces."""

from .conformers import Ranking
from .records import Outcome
from .run import relax, score

__all__ = ["Outcome", "Ranking", "relax", "score"]
