"""Periodic structures in potentials that sum over all pairs of a molecule: other sums in cells, and mixed batches.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from torch import Tensor

from ..system import System
from .output import RESULTS, Output

__all__ = ["CoulombInCells", "Portion", "coulomb_in_cells", "divided", "evaluate_portions", "is_mixed", "require_cells"]


CoulombInCells = Literal["pme", "dsf"]
"""Methods for Coulomb sums over all pairs in periodic cells."""


class _InCells(Protocol):
    """The part of a Potential that is used here; its module imports this one."""

    def in_cells(self, coulomb: CoulombInCells | None = None) -> Any: ...


def coulomb_in_cells(name: str, potential: _InCells | None = None) -> CoulombInCells:
    """Return the name of a sum after a check.

    Args:
        name: name of the sum.
        potential: the potential that will use it, in evaluation mode.

    Raises:
        ValueError: there is no such sum, or it would have no effect on the potential.
    """
    if name not in get_args(CoulombInCells):
        raise ValueError(f"coulomb must be 'pme' (particle-mesh Ewald) or 'dsf' (damped shifted force), got {name!r}")
    if potential is not None and name != "pme" and potential.in_cells("dsf") is potential:
        raise ValueError(
            f"coulomb='{name}' has no effect: this model has no Coulomb energy over all pairs of a molecule, for which "
            "cells need another sum; leave it out"
        )
    return name  # type: ignore[return-value]


def require_cells(coulomb: str | None, pbc: Iterable[Any]) -> None:
    """Refuse a given sum if no structure is periodic.

    Args:
        coulomb: the sum that a user gives; None if none is given.
        pbc: periodic directions of each structure.

    Raises:
        ValueError: the sum would have no effect.
    """
    if coulomb not in (None, "pme") and not any(map(np.any, pbc)):
        raise ValueError(
            f"coulomb='{coulomb}' has no effect: it sums Coulomb energies in periodic cells, but no structure is "
            "periodic; leave it out"
        )


class Portion(NamedTuple):
    """The molecules or the cells of a batch.

    Attributes:
        system: the structures of this kind.
        places: their positions in the batch: of the atoms (True), of the structures (False).
        periodic: True for cells.
    """

    system: System
    places: dict[bool, Tensor]
    periodic: bool


def is_mixed(system: System) -> bool:
    """Return whether a batch has both periodic structures and others."""
    periodic = system.pbc.any(1)
    return bool(periodic.any()) and not bool(periodic.all())


def divided(system: System) -> list[Portion]:
    """Divide a batch into molecules and cells; differentiable."""
    periodic, found = system.pbc.any(1), []
    for kind in (False, True):
        chosen = periodic == kind
        structures, atoms = chosen.nonzero()[:, 0], chosen[system.batch].nonzero()[:, 0]
        found.append(Portion(system.select(chosen), {True: atoms, False: structures}, kind))
    return found


def evaluate_portions(system: System, outputs: Mapping[str, Output], evaluate: Callable[[Portion], Any]) -> Any:
    """Evaluate a batch of molecules and cells, each kind separately, and join the results.

    Args:
        system: N atoms in B structures.
        outputs: outputs of the potential.
        evaluate: function that returns the Result of a portion.
    """
    portions = divided(system)
    results = [evaluate(portion) for portion in portions]

    def join(values: list[Any], output: Output) -> Any:
        if any(value is None for value in values):
            return None
        whole = values[0].new_empty(system.num_atoms if output.per_atom else system.num_systems, *values[0].shape[1:])
        for portion, value in zip(portions, values, strict=True):
            whole = whole.index_copy(0, portion.places[output.per_atom], value.to(whole.dtype))
        return whole

    found = {name: join([getattr(r, name) for r in results], output) for name, output in RESULTS.items()}
    properties = {
        name: join([r.properties[name] for r in results], output)
        for name, output in outputs.items()
        if all(name in r.properties for r in results)
    }
    return type(results[0])(**found, properties=properties)
