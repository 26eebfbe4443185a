"""Molecular dynamics: constant energy and Langevin, on the device, with replicas, plots and exact restarts; and the
check whether a model is stable in it."""

from __future__ import annotations

from .guard import Unphysical
from .options import MDOptions
from .run import MDResult, Replica, run_md
from .stability import ReplicaOutcome, StabilityReport, Summary, check_stability

__all__ = [
    "MDOptions",
    "MDResult",
    "Replica",
    "ReplicaOutcome",
    "StabilityReport",
    "Summary",
    "Unphysical",
    "check_stability",
    "run_md",
]
