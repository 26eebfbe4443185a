"""The plans of all Ewald sums of a potential or prior, for a step that a CUDA graph holds.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ..priors.electrostatics import Electrostatics
from ..priors.ewald import EwaldPlan, with_plans
from ..system import System

__all__ = ["EwaldPlans"]

_ROOM = 0.05
"""Strain of the cells that a plan has room for."""


class EwaldPlans:
    """Plans that are made when a composition comes, and again for cells that they have no room for.

    Args:
        module: whose sums by "ewald" or "pme" are planned.
    """

    def __init__(self, module: nn.Module):
        found = (m for m in module.modules() if isinstance(m, Electrostatics))
        self._sums = [m for m in found if m.method in ("ewald", "pme")]
        self._plans: dict[int, EwaldPlan] = {}
        self._system: System | None = None

    def use(self) -> AbstractContextManager[None]:
        """A context in which the sums are computed with these plans."""
        return with_plans(self._plans)

    def set_composition(self, system: System) -> bool:
        """Plan for a batch of structures, and their cells, unless their atoms and periodicity are as before.

        Args:
            system: as the sums will get it.

        Returns:
            Whether there are other plans now.

        Raises:
            ValueError: a structure is periodic in some directions only.
        """
        known = self._system
        if not self._sums or (
            known is not None and torch.equal(known.batch, system.batch) and torch.equal(known.pbc, system.pbc)
        ):
            return False
        self._system = System(**{name: value.detach().clone() for name, value in vars(system).items()})
        # meshes of the cells themselves: energies are those of the Potential
        self._plans = {id(sums): sums.plan(self._system, room=_ROOM) for sums in self._sums}
        return True

    @property
    def lacking(self) -> Tensor | None:
        """[1] bool, whether a plan had no room for a cell since `clear`; None where there are no plans."""
        if not self._plans:
            return None
        return torch.stack([plan.lacking for plan in self._plans.values()]).any(0)

    def grow(self) -> bool:
        """Other plans in the place of those without room, for the first cells that did not fit. Waits for the device.

        Returns:
            Whether there are any.
        """
        changed = False
        for sums in self._sums:
            plan = self._plans.get(id(sums))
            if plan is not None and bool(plan.lacking):
                assert self._system is not None
                wanted = self._system.replace(cell=plan.unfit.to(self._system.dtype))
                self._plans[id(sums)] = sums.plan(wanted, room=_ROOM, mesh_room=_ROOM)
                changed = True
        return changed

    def clear(self) -> None:
        """Forget which cells did not fit."""
        for plan in self._plans.values():
            plan.lacking.zero_()
            plan.unfit.zero_()
