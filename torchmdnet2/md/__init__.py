"""Molecular dynamics: constant energy and Langevin, on the device, with replicas, plots and exact restarts;
and whether a model survives it."""

from __future__ import annotations

from .guard import Unphysical
from .options import MDOptions
from .run import MDResult, Replica, run_md
from .stability import check_stability
from .stability_report import ReplicaOutcome, StabilityReport, Summary

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
