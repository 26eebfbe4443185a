"""A potential prepared for fused steps: what is covered, weights, constants, inputs.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..fused.tensornet.gpu import FusedTensorNet
from ..fused.tensornet.weights import FrozenTensorNet
from ..potential import Potential
from ..system import System
from .covered import why_not
from .step import FusedStep

if TYPE_CHECKING:
    from .autograd_model import AutogradModel
    from .autograd_step import AutogradStep
    from .graphs import GraphedStep

__all__ = ["FusedModel", "Source", "UnsortedBatch", "require_sorted", "why_not"]

_COMPOSITION = ("z", "batch", "charge", "spin", "pbc")
_PRODUCTS = {"float32": "tf32x3", "tf32": "tf32"}


class UnsortedBatch(Exception):
    """The atoms of a structure do not lie together."""


def require_sorted(system: System) -> None:
    """Raise UnsortedBatch unless the batch ascends."""
    if system.num_systems > 1 and not bool((system.batch[1:] >= system.batch[:-1]).all()):
        raise UnsortedBatch


class FusedModel:
    """Weights and constants of a potential as they are now.

    Args:
        potential: one that `why_not` finds nothing against; on a CUDA device (or under Triton's interpreter).
        precision: "float32" or "tf32".
    """

    def __init__(self, potential: Potential, precision: str):
        assert potential.head is not None
        self.potential, self.precision = potential, precision
        weights = FrozenTensorNet(potential.representation, potential.head, potential.energy_scale, potential.device)  # type: ignore[arg-type]
        self.net = FusedTensorNet(weights, precision=_PRODUCTS[precision])
        # in float64, so that only the error of the atom itself remains
        exact = copy.deepcopy(potential).cpu().double()
        self.isolated = (exact.isolated_energies() * potential.energy_scale).to(potential.device)
        self._checked: set[tuple[Any, ...]] = set()

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, Source]:
        """A step that holds a system and has room for its edges; its kernels are checked on their first use.

        Raises:
            UnsortedBatch: the batch is not ascending.
            ValueError, UnknownElement: as the Potential.
            RuntimeError: the results are not those of the potential.
        """
        from .check import check_path
        from .graphs import GraphedStep

        step = self.step(system.num_atoms, system.num_systems, system.dtype, stress)
        source = Source(self, step)
        source.load(system)
        graphed = GraphedStep(step)
        graphed.make_room()
        path = (system.dtype, stress, *step.path.values())
        if path not in self._checked:
            check_path(self, step, system)
            self._checked.add(path)
        return graphed, source

    def load(self, step: FusedStep, system: System) -> None:
        """Take over all but positions and cell."""
        reference = self.potential.prior_energies(system)
        charge = system.charge.to(self.potential.dtype)
        step.set_composition(system.z, system.batch, charge, self.isolated[system.z], reference)
        step.pbc.copy_(system.pbc)

    def step(self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, **options: Any) -> FusedStep:
        """A step for N atoms in B structures; options as those of `FusedStep`."""
        return FusedStep(
            self.net, num_atoms, num_systems, self.potential.cutoff, dtype, stress,
            subtract=self.potential.subtract_isolated, energy_shift=self.potential.energy_shift, **options,
        )  # fmt: skip


class Source:
    """Copies systems into a step, and what it need not copy or check again.

    The tensors of the last system are kept: as long as the same objects come in the same version, nothing was
    changed. In-place changes behind PyTorch's back (`.data`, NumPy views) are not seen.
    """

    def __init__(self, model: FusedModel | AutogradModel, step: FusedStep | AutogradStep):
        self.model, self.step = model, step
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._held: list[Tensor] | None = None

    def load(self, system: System) -> None:
        """Copy what is new; nothing here waits for the device while the composition stays.

        Raises:
            UnsortedBatch: the batch is not ascending.
            ValueError, UnknownElement: as the Potential.
        """
        if not all(self._is_seen(system, name) for name in _COMPOSITION):
            if not self._holds(system):
                self._load_composition(system)
            for name in _COMPOSITION:
                self._see(system, name)
        if not self._is_seen(system, "cell"):
            self.step.cell.copy_(system.cell)
            self._see(system, "cell")
        self.step.pos.copy_(system.pos)

    def _load_composition(self, system: System) -> None:
        self._seen.clear()
        self._held = None
        self.model.potential.check(system)
        require_sorted(system)
        self.model.load(self.step, system)  # type: ignore[arg-type]
        self._held = [getattr(system, name).clone() for name in _COMPOSITION]

    def _holds(self, system: System) -> bool:
        """Whether other tensors hold what was loaded before. Waits for the device, once."""
        if self._held is None:
            return False
        same = [(held == getattr(system, name)).all() for held, name in zip(self._held, _COMPOSITION, strict=True)]
        return bool(torch.stack(same).all())

    def _is_seen(self, system: System, name: str) -> bool:
        tensor: Tensor = getattr(system, name)
        if name not in self._seen or tensor.is_inference():
            return False
        seen, version = self._seen[name]
        return tensor is seen and tensor._version == version

    def _see(self, system: System, name: str) -> None:
        tensor = getattr(system, name)
        if not tensor.is_inference():  # such tensors do not count their changes
            self._seen[name] = tensor, tensor._version
