"""Choice of the kernels for the prior `coulomb`: those of sums over pairs, or of particle-mesh Ewald."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...kernels.interfaces import Term
from ..pair_kernels import PairPriorPath
from .coulomb import Coulomb

__all__ = ["CoulombPath"]


class CoulombPath(PairPriorPath):
    """Kernels of pair priors for all pairs, reaction field and damped shifted force; those of particle-mesh Ewald."""

    def unsupported_reason(self, prior: nn.Module, device: torch.device) -> str:
        return "" if _on_mesh(prior) else super().unsupported_reason(prior, device)

    def gpu(self, prior: nn.Module, device: torch.device, elements: Sequence[int]) -> Term:
        if not _on_mesh(prior):
            return super().gpu(prior, device, elements)
        from .gpu import ParticleMeshTerm

        return ParticleMeshTerm(prior, device)  # type: ignore[arg-type]

    def cpu(self, prior: nn.Module, elements: Sequence[int]) -> Term:
        if not _on_mesh(prior):
            return super().cpu(prior, elements)
        from .cpu import CpuParticleMeshTerm

        return CpuParticleMeshTerm(prior)  # type: ignore[arg-type]


def _on_mesh(prior: nn.Module) -> bool:
    return isinstance(prior, Coulomb) and prior.energy.method == "pme"
