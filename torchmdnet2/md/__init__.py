"""Molecular dynamics: constant energy and Langevin, on tensors, with progress, plots and exact restarts."""

from __future__ import annotations

from .guard import Unphysical
from .options import MDOptions
from .run import MDResult, run_md

__all__ = ["MDOptions", "MDResult", "Unphysical", "run_md"]
