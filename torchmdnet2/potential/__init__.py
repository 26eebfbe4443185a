"""Potentials: energies, forces and stress of structures, with priors, refusals, levels of theory and novelty."""

from .potential import Potential, Result

__all__ = ["Potential", "Result"]
