"""Which representations and priors have a fast path, and what all steps on kernels share: terms, lists, offsets.

A model of the package has its fast path in its folder and one line here; a plug-in calls `register_fast_path`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.interfaces import FastPath, MemberPath, PathWithHeads, PriorPath, Term
from ..models.aimnet2 import AIMNet2Path
from ..models.aimnet2.model import AIMNet2
from ..models.matgl_tensornet import MatglPath
from ..models.matgl_tensornet.model import MatglTensorNet
from ..models.message_passing import MessagePath
from ..models.message_passing.model import EquivariantTransformer, GraphNetwork, Transformer
from ..models.tensornet import TensorNetPath
from ..models.tensornet.model import TensorNet
from ..models.tensornet2 import TensorNet2Path
from ..models.tensornet2.model import TensorNet2
from ..potential.potential import Potential
from ..potential.prior import Prior
from ..priors import D2, D3, ZBL, Coulomb, PairPotential
from ..priors.coulomb import CoulombPath
from ..priors.coulomb.coulomb import Electrostatics
from ..priors.pair_kernels import PairPriorPath
from ..registry import count_others
from ..system import System
from .autograd_term import AutogradTerm, CpuAutogradTerm, autograd_unsupported_reason

__all__ = [
    "HeldTerm", "Offsets", "constant_energies", "describe_cells", "describe_priors", "exact_isolated_energies",
    "fast_path", "kernels_of", "list_cutoffs", "prior_path", "register_fast_path", "register_prior_path", "terms_of",
    "unsupported_reason",
]  # fmt: skip


_PATHS: dict[type[nn.Module], FastPath] = {
    AIMNet2: AIMNet2Path(),
    TensorNet: TensorNetPath(),
    TensorNet2: TensorNet2Path(),
    MatglTensorNet: MatglPath(),
    EquivariantTransformer: MessagePath(),
    Transformer: MessagePath(),
    GraphNetwork: MessagePath(),
}
_PRIOR_PATHS: dict[type[nn.Module], PriorPath] = {
    **dict.fromkeys((ZBL, PairPotential, D2, D3), PairPriorPath()),
    Coulomb: CoulombPath(),
}


def register_fast_path(representation: type[nn.Module], path: FastPath) -> None:
    """Evaluate and train representations of this class on `path`. Subclasses do not inherit it."""
    _PATHS[representation] = path
    count_others(representation, path)


def register_prior_path(prior: type[nn.Module], path: PriorPath) -> None:
    """Evaluate priors of this class on `path`. Subclasses do not inherit it."""
    _PRIOR_PATHS[prior] = path
    count_others(prior, path)


def fast_path(representation: nn.Module) -> FastPath | None:
    """Return the fast path for a representation, None if there is none."""
    return _PATHS.get(type(representation))


def prior_path(prior: nn.Module) -> PriorPath | None:
    """Return the fast path for a prior, None if there is none."""
    return _PRIOR_PATHS.get(type(prior))


# --- Which potentials the fast paths cover, on the GPU and on the CPU ---

_LONGER = 3.0
"""Factor by which a term may have more edges to test, in exchange for one search less."""


def unsupported_reason(potential: Potential, compiled: bool = False) -> str:
    """Return "" if fused kernels can evaluate this potential on its device, else the reason.

    Args:
        potential: with its present heads and priors.
        compiled: by kernels of the CPU, not of the GPU.
    """
    device, head, representation = potential.device, potential.head, potential.representation
    if head is None:
        return "the model predicts no energy"
    path = fast_path(representation)
    if path is None:
        return f"there are no fused kernels for {type(representation).__name__}"
    if compiled and not path.on_cpu:
        return f"there are no compiled kernels for {type(representation).__name__}"
    reason = path.unsupported_reason(representation, head, device)
    if reason:
        return reason
    if getattr(head, "reduce", "sum") != "sum":
        return "the fused kernels sum energies over the atoms, this head takes their mean"
    predicts_charges = path.predicts_charges or "charges" in potential.properties
    for prior in potential.priors:
        # on a CPU, autograd of a prior alone can do all that the prior can
        prior_reason = "" if prior.constant or compiled else _prior_reason(prior, device)
        if prior_reason:
            return prior_reason
        if prior.uses_charges and not predicts_charges:
            return f"the fused kernels predict no charges, which {type(prior).__name__} needs"
    for other in potential.properties.values():
        reason = "the fused kernels have no heads of other properties"
        if isinstance(path, PathWithHeads):
            reason = path.unsupported_property(other)
        if reason:
            return reason
    if potential.others and not compiled and not isinstance(path, MemberPath):
        return f"there are no fused kernels for several members of {type(representation).__name__}"
    if potential.others and potential.subtract_isolated:
        return "the energies of isolated atoms differ from member to member"
    if potential.atom_filter >= 0:
        return "the fused kernels have no atom filter"
    return ""


def _prior_reason(prior: Prior, device: torch.device) -> str:
    return "" if kernels_of(prior, device) is not None else autograd_unsupported_reason(prior)


def kernels_of(prior: Prior, device: torch.device) -> PriorPath | None:
    """Return the fast path of a prior; None if it has none, or none for its options."""
    path = prior_path(prior)
    return None if path is None or path.unsupported_reason(prior, device) else path


def describe_priors(potential: Potential) -> list[str]:
    """Return how priors that depend on positions are evaluated with a network on kernels, in words."""
    listed = [prior for prior in potential.priors if not prior.constant]
    paths = [kernels_of(prior, potential.device) for prior in listed]
    kernels = [type(prior).__name__ for prior, path in zip(listed, paths, strict=True) if path is not None]
    others = [type(prior).__name__ for prior, path in zip(listed, paths, strict=True) if path is None]
    lines = [f"  priors on kernels: {', '.join(kernels)}"] if kernels else []
    return lines + ([f"  priors by autograd: {', '.join(others)}"] if others else [])


def describe_cells(potential: Potential) -> str:
    """Return how a potential of `Potential.in_cells` sums over the images of periodic cells, in words."""
    sums = {
        f"Coulomb energy by {m.method.upper()}, {m.cutoff:g} Å" + (" in real space" if m.method == "pme" else "")
        for m in potential.modules()
        if isinstance(m, Electrostatics)
    }
    sums |= {f"dispersion to {p.cutoff:g} Å" for p in potential.modules() if isinstance(p, D3)}
    return ", ".join(sorted(sums))


# --- What steps share ---


def terms_of(potential: Potential, compiled: bool) -> list[Term]:
    """Return the priors that depend on positions, for steps on kernels of a GPU, or on compiled ones of the CPU."""
    found: list[Term] = []
    for prior in potential.priors:
        path = kernels_of(prior, potential.device)
        if path is not None:
            gpu = not compiled
            term = path.gpu(prior, potential.device, potential.elements) if gpu else path.cpu(prior, potential.elements)
        elif prior.constant:
            continue
        else:
            term = CpuAutogradTerm(prior) if compiled else AutogradTerm(prior, potential.elements[0])
        term.name = type(prior).__name__
        found.append(term)
    return found


class HeldTerm:
    """A term of a step with its buffers, for N atoms.

    Attributes:
        list_cutoff: Å, of the shortest list that reaches the cutoff of the term; None if it needs none.
    """

    def __init__(self, term: Term, cutoffs: Sequence[float], num_atoms: int):
        self.term, self.buffers = term, term.allocate(num_atoms)
        self.list_cutoff: float | None
        if term.by_autograd:
            self.list_cutoff = float(term.cutoff) if term.cutoff > 0 else None
        else:
            self.list_cutoff = min((c for c in cutoffs if c >= term.cutoff), default=None)


def constant_energies(potential: Potential, system: System) -> Tensor:
    """Return energies of the priors that depend on the elements only, [N] eV float64; the mean over the members."""
    if potential.others:
        return torch.stack([constant_energies(member, system) for member in potential.members]).mean(0)
    total = torch.zeros(system.num_atoms, dtype=torch.float64, device=potential.device)
    for prior in potential.priors:
        if prior.constant:
            total = total + prior(system, None).detach()
    return total


def exact_isolated_energies(potential: Potential) -> Tensor:
    """Return energies of isolated atoms by the network in eV, [max_z] float64, computed in float64."""
    exact = copy.deepcopy(potential).cpu().double()
    with torch.no_grad():
        return (exact.isolated_energies() * potential.energy_scale).to(potential.device)


class Offsets:
    """Energies that are subtracted from and added to the energies of atoms that kernels give.

    Args:
        potential: whose networks they are of.
        isolated: of `exact_isolated_energies`.
        system: N atoms; positions do not matter.
        neutral: [N] or for all, whether an atom without neighbors is as those whose energies are subtracted.
        numpy: for arrays, not tensors.
    """

    def __init__(self, potential: Potential, isolated: Tensor, system: System, neutral: Any, numpy: bool):
        terms = [isolated[system.z], *(constant_energies(member, system) for member in potential.members)]
        first, *constant = [term.numpy() for term in terms] if numpy else terms
        self._isolated: Any = first if potential.subtract_isolated else None
        self._constant: list[Any] = constant
        self._neutral = neutral

    def add(self, energies: Any, row_ptr: Any, member: int = 0) -> None:
        """Complete energies [N] of a member in eV, float64; row_ptr: [N + 1] of the network's list."""
        if self._isolated is not None:
            energies -= self._isolated
            # equal up to rounding for an atom alone: make it exact
            energies[(row_ptr[1:] == row_ptr[:-1]) & self._neutral] = 0
        energies += self._constant[member]


def list_cutoffs(network: float, terms: Sequence[float], exact: Sequence[float] = ()) -> list[float]:
    """Return the cutoffs in Å of the lists that a network and terms share, that of the network first.

    A term uses a list that reaches further than its cutoff, unless a separate list costs less.

    Args:
        network: cutoff of the network.
        terms: those of terms.
        exact: cutoffs of terms that need a list of exactly this cutoff.
    """
    chosen: list[float] = []
    for cutoff in sorted({c for c in terms if network < c < math.inf}, reverse=True):
        if not chosen or chosen[-1] ** 3 > _LONGER * cutoff**3:
            chosen.append(cutoff)
    return [network, *chosen, *sorted({c for c in exact if c not in (network, *chosen)})]
