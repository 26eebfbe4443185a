"""Choice of the kernels for pair priors. Triton and numba are imported on use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...kernels.interfaces import PriorPath, Term
from .parameters import unsupported_reason

__all__ = ["PairPriorPath"]


class PairPriorPath(PriorPath):
    """Kernels for ZBL, pairs of elements, D2, D3, and Coulomb by all pairs, reaction field or shifted force."""

    def unsupported_reason(self, prior: nn.Module, device: torch.device) -> str:
        return unsupported_reason(prior)  # type: ignore[arg-type]

    def gpu(self, prior: nn.Module, device: torch.device, elements: Sequence[int]) -> Term:
        from .gpu import make_term

        return make_term(prior, elements, device)  # type: ignore[arg-type]

    def cpu(self, prior: nn.Module, elements: Sequence[int]) -> Term:
        from .cpu import make_cpu_term

        return make_cpu_term(prior, elements)  # type: ignore[arg-type]
