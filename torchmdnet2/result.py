"""What a potential gives. Shapes: N atoms, B structures."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Result"]


@dataclass(eq=False)
class Result:
    """What a potential gives.

    Attributes:
        energy: [B] eV, float64.
        forces: [N, 3] eV/Å, −dE/dpos; None when not asked for.
        stress: [B, 3, 3] eV/Å³, (1/V) dE/dε, symmetric, tensile positive; None when not asked for.
        atom_energies: [N] eV, float64, priors included; their sum is the energy.
        charges: [N] partial charges in e; None where the model has none.
        properties: what the property heads predict, by name: [B, …] of each structure or [N, …] of each atom.
    """

    energy: Tensor
    forces: Tensor | None = None
    stress: Tensor | None = None
    atom_energies: Tensor | None = None
    charges: Tensor | None = None
    properties: dict[str, Tensor] = field(default_factory=dict)
