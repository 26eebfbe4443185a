"""Whether a structure is like those that a model was trained on: the distance of its features from theirs."""

from .calibration import Calibration, calibrate
from .watch import LARGEST, NoveltyWarning, UnknownStructure, Watch

__all__ = ["LARGEST", "Calibration", "NoveltyWarning", "UnknownStructure", "Watch", "calibrate"]
