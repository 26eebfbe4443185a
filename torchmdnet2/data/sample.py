"""Samples: structures with labels.

Shapes: N atoms of all structures together, B structures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..system import System

__all__ = ["Sample"]


@dataclass(eq=False)
class Sample:
    """One structure, or a batch of them, with its labels.

    Args:
        system: B structures; from a data set B = 1 and positions are float64.
        labels: name -> values in the package's units: energy [B] eV, forces [N, 3] eV/Å, stress [B, 3, 3] eV/Å³
            (tensile positive), dipole [B, 3] e·Å, charges [N] e, and further ones named by their shape, as in
            "scalar:gap" [B] (see `labels.SHAPES`). A label that is not known is absent, or NaN.
    """

    system: System
    labels: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sample:
        """The same on another device or in another floating-point type; energies stay in float64.

        A total energy of −10⁴ eV has an error of 10⁻³ eV in float32, which is as large as what is to be learned.

        Args:
            device: None keeps it.
            dtype: of positions, cells and labels other than energies; None keeps it.
        """
        labels = {
            name: value.to(device=device, dtype=None if name == "energy" else dtype)
            for name, value in self.labels.items()
        }
        return Sample(self.system.to(device, dtype), labels)
