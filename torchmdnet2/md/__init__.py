"""Molecular dynamics: constant energy and Langevin, on the device, with replicas, plots and exact restarts."""

from __future__ import annotations

from .guard import Unphysical
from .options import MDOptions
from .run import MDResult, Replica, run_md

__all__ = ["MDOptions", "MDResult", "Replica", "Unphysical", "run_md"]
