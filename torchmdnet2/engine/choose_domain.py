"""The fastest way to evaluate a potential on a domain."""

from __future__ import annotations

from ..potential.potential import Potential
from .domain import Domain, ReferenceDomain
from .select import fast_path, kernels_of, unsupported_reason

__all__ = ["choose_domain", "compiled_reason", "fused_reason"]


def choose_domain(potential: Potential, charge: float) -> Domain:
    """A domain without atoms yet, on fused or compiled kernels, or by autograd.

    Args:
        potential: in evaluation mode.
        charge: total charge in e of the whole structure.

    Raises:
        ValueError: a part of the potential needs the whole structure.
        UntrainedCharge: the model does not know the charge.
    """
    if not fused_reason(potential):
        try:
            from .fused_domain import FusedDomain
        except ImportError:  # no triton
            return ReferenceDomain(potential, charge)
        return FusedDomain(potential, charge)
    if not compiled_reason(potential):
        try:
            from .cpu_domain import CompiledDomain
        except (ImportError, RuntimeError):  # no numba, or one that does not start
            return ReferenceDomain(potential, charge)
        return CompiledDomain(potential, charge)
    return ReferenceDomain(potential, charge)


def compiled_reason(potential: Potential) -> str:
    """Why compiled kernels cannot evaluate domains of a potential, "" where they can."""
    if potential.device.type != "cpu":
        return f"the model is on {potential.device}"
    return unsupported_reason(potential, compiled=True) or _reason(potential, compiled=True)


def fused_reason(potential: Potential) -> str:
    """Why the fused kernels of the GPU cannot evaluate domains of a potential, "" where they can."""
    if potential.device.type != "cuda":
        return f"the model is on {potential.device}"
    return unsupported_reason(potential) or _reason(potential)


def _reason(potential: Potential, compiled: bool = False) -> str:
    """Why domains are not for kernels that evaluate the potential elsewhere."""
    path = fast_path(potential.representation)
    if path is None or not path.takes_ghosts:
        return f"the kernels for {type(potential.representation).__name__} take no ghosts"
    if any(kernels_of(p, potential.device, compiled) is None and not p.constant for p in potential.priors):
        return "a prior has no kernels"
    if any(prior.uses_charges for prior in potential.priors):
        return "charges are predicted for whole structures"
    return ""
