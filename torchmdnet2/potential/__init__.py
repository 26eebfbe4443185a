"""Potentials: energies, forces and stress of structures; priors, refusals, novelty, domains."""

from .potential import Potential, Result

__all__ = ["Potential", "Result"]
