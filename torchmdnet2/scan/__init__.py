"""Scans of a potential along bonds, torsions and close contacts, which find wrong walls, minima and jumps."""

from .report import ScanReport
from .scan import scan_molecule
from .surfaces import CalculatorSurface, Curve, Finding, ModelSurface, Samples, Surface

__all__ = [
    "CalculatorSurface",
    "Curve",
    "Finding",
    "ModelSurface",
    "Samples",
    "ScanReport",
    "Surface",
    "scan_molecule",
]
