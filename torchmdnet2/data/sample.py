"""Samples: structures with labels, and the shapes of labels.

Shapes: N atoms of all structures together, B structures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..system import System

__all__ = ["LABELS", "SHAPES", "LabelShape", "Sample", "label_names"]


class LabelShape(NamedTuple):
    """Shape of a label: one row per atom or one per structure, and the shape of a row."""

    per_atom: bool
    row: tuple[int, ...]

    def of(self, system: System) -> tuple[int, ...]:
        """The label's shape for these structures."""
        return self.shape(system.num_atoms, system.num_systems)

    def shape(self, num_atoms: int, num_systems: int = 1) -> tuple[int, ...]:
        """The same by their numbers."""
        return (num_atoms if self.per_atom else num_systems, *self.row)


SHAPES = {
    "scalar": LabelShape(False, ()),
    "vector": LabelShape(False, (3,)),
    "tensor": LabelShape(False, (3, 3)),
    "atom_scalar": LabelShape(True, ()),
    "atom_vector": LabelShape(True, (3,)),
    "atom_tensor": LabelShape(True, (3, 3)),
}
"""shape of a property -> its LabelShape."""


class Labels(dict[str, LabelShape]):
    """Label name -> shape. Further labels say their shape themselves: "scalar:gap", "atom_scalar:shift"."""

    def __missing__(self, name: str) -> LabelShape:
        shape, _, rest = name.partition(":")
        if not rest or shape not in SHAPES:
            raise KeyError(name)
        return SHAPES[shape]

    def __contains__(self, name: object) -> bool:
        shape, _, rest = str(name).partition(":")
        return super().__contains__(name) or (bool(rest) and shape in SHAPES)


LABELS = Labels(
    energy=LabelShape(False, ()),
    forces=LabelShape(True, (3,)),
    stress=LabelShape(False, (3, 3)),
    dipole=LabelShape(False, (3,)),
    charges=LabelShape(True, ()),
)
"""label name -> its shape: energy eV, forces eV/Å, stress eV/Å³ (tensile positive), dipole e·Å, charges e."""


def label_names(*names: Iterable[str]) -> list[str]:
    """All given label names once: those of LABELS in its order, then the further ones, sorted."""
    found = set().union(*names)
    return [name for name in LABELS if name in found] + sorted(found - LABELS.keys())


@dataclass(eq=False)
class Sample:
    """One structure, or a batch of them, with its labels.

    Args:
        system: B structures; from a data set B = 1 and positions are float64.
        labels: name -> values in the package's units: energy [B] eV, forces [N, 3] eV/Å, stress [B, 3, 3] eV/Å³
            (tensile positive), dipole [B, 3] e·Å, charges [N] e, and further ones named by their shape, as in
            "scalar:gap" [B] (see `SHAPES`). A label that is not known is absent, or NaN.
    """

    system: System
    labels: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Sample:
        """The same on another device or in another floating-point type; energies stay in float64.

        A total energy of −10⁴ eV has an error of 10⁻³ eV in float32, which is as large as what is to be learned.
        """
        labels = {
            name: value.to(device=device, dtype=None if name == "energy" else dtype)
            for name, value in self.labels.items()
        }
        return Sample(self.system.to(device, dtype), labels)
