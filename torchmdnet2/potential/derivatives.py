"""Energies as functions of positions, strain or edge vectors, and their derivatives by autograd."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..system import System, is_transformed

__all__ = [
    "energy_and_gradients", "gradients_of", "is_differentiated", "not_compiled", "outside_modes", "stress_of",
    "with_leaves",
]  # fmt: skip


def outside_modes(device: torch.device) -> AbstractContextManager[Any]:
    """Leave inference mode, whose tensors have no gradients, and autocast, which would round to 16 bits."""
    outside = torch.inference_mode(False)
    return _without_autocast(outside, device.type) if torch.is_autocast_enabled(device.type) else outside


@contextmanager
def _without_autocast(outside: AbstractContextManager[Any], kind: str) -> Iterator[None]:
    with outside, torch.autocast(kind, enabled=False):
        yield


def is_differentiated(system: System) -> bool:
    """Return whether the caller differentiates results of a system, so that they must keep their graph.

    This is so if positions, cells or charges require a gradient, within a transform of `torch.func`, and in forward
    mode.
    """
    if is_transformed():
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in (system.pos, system.cell, system.charge))


def energy_and_gradients(
    function: Callable[[System], tuple[Tensor, Any]], system: System, forces: bool, stress: bool, create_graph: bool
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Return energies of structures and their first derivatives, which the caller may differentiate further.

    Args:
        function: System -> energies [B], and further results: tensors, or lists and dictionaries of tensors.
        system: N atoms in B structures.
        forces: compute derivatives with respect to positions.
        stress: compute derivatives with respect to a strain.
        create_graph: keep the graph.

    Returns:
        Energies [B], the further results, and the requested ones of dE/d"pos" [N, 3] and dE/d"strain" [B, 3, 3].
    """
    if not is_transformed() or not (forces or stress):
        moved, leaves = with_leaves(system, forces, stress)
        energy, rest = function(moved)
        return energy, rest, gradients_of(energy, leaves, create_graph)

    def of_leaves(leaves: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Any]]:
        moved = system.replace(pos=leaves["pos"]) if forces else system
        energy, rest = function(_strained(moved, leaves["strain"]) if stress else moved)
        return energy.sum(), (energy, rest)

    # within transforms of torch.func, torch.autograd.grad with new leaves does not work
    leaves = {"pos": system.pos} if forces else {}
    if stress:
        leaves["strain"] = system.pos.new_zeros(system.num_systems, 3, 3)
    total, pull, (energy, rest) = torch.func.vjp(of_leaves, leaves, has_aux=True)  # type: ignore[misc]
    return energy, rest, pull(torch.ones_like(total))[0]


def with_leaves(system: System, forces: bool, stress: bool) -> tuple[System, dict[str, Tensor]]:
    """Return structures as functions of positions and of a symmetric strain, for derivatives of an energy.

    Args:
        system: N atoms in B structures.
        forces, stress: the derivatives that will be taken.

    Returns:
        The structures, and the leaves: "pos" [N, 3] for forces, "strain" [B, 3, 3], zero, for the stress.
    """
    leaves: dict[str, Tensor] = {}
    pos, cell = system.pos, system.cell
    if pos.is_inference():
        pos, cell = pos.clone(), cell.clone()
        system = System(
            z=system.z.clone(), pos=pos, batch=system.batch.clone(), cell=cell, pbc=system.pbc.clone(),
            charge=system.charge.clone(), spin=system.spin.clone(),
        )  # fmt: skip
    if forces:
        pos = leaves["pos"] = pos if pos.requires_grad else pos.detach().requires_grad_()
    system = system.replace(pos=pos, cell=cell)
    if stress:
        strain = leaves["strain"] = pos.new_zeros(system.num_systems, 3, 3).requires_grad_()
        system = _strained(system, strain)
    return system, leaves


def _strained(system: System, strain: Tensor) -> System:
    """Return structures under the symmetric part of a strain [B, 3, 3]."""
    symmetric = (strain + strain.transpose(1, 2)) / 2
    pos = system.pos + torch.einsum("ni,nij->nj", system.pos, symmetric[system.batch])
    return system.replace(pos=pos, cell=system.cell + system.cell @ symmetric)


def gradients_of(energy: Tensor, leaves: dict[str, Tensor], create_graph: bool) -> dict[str, Tensor]:
    """Return the gradients of energies [B] with respect to the leaves; zeros for leaves without influence."""
    if not leaves or not energy.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(energy.sum(), list(leaves.values()), create_graph=create_graph, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }


def stress_of(virial: Tensor, volume: Tensor) -> Tensor:
    """Return the symmetric stress [B, 3, 3] in eV/Å³ from a virial dE/dε [B, 3, 3] in eV and volumes [B] in Å³."""
    return (virial + virial.transpose(1, 2)) / (2 * volume[:, None, None])


# --- Functions that torch.compile must not compile ---

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_REASON = (
    "torch.compile has no effect on a potential, whose number of edges changes from call to call; "
    "torchmdnet2.Evaluator runs it on compiled kernels"
)


def not_compiled(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function so that torch.compile runs it uncompiled, with a warning, and compiles the code around it."""

    @functools.wraps(function)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return _as_it_is(function, args, kwargs)
        return function(*args, **kwargs)

    return wrapped


def _as_it_is(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    warnings.warn(_REASON, stacklevel=2)
    # a decorator at module level would import the compiler in every program, which takes a second
    return torch.compiler.disable(function, reason=_REASON)(*args, **kwargs)
