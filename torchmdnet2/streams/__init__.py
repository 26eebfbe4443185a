"""Streams: relaxation, or energies and forces, of very many structures."""

from .conformers import Ranking
from .records import Outcome
from .run import relax, score

__all__ = ["Outcome", "Ranking", "relax", "score"]
