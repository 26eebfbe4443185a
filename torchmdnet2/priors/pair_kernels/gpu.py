"""Pair priors on the GPU: preparation and launches.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, Term, TermLaunch, TermSums
from ...neighbors.pairs import require_molecules
from ...potential.prior import Prior
from ...system import System
from . import triton_kernels as radial
from .parameters import D3Parameters, PairParameters, describe
from .triton_kernels import coordination_force_kernel, coordination_kernel, dispersion_kernel, pair_kernel

__all__ = ["D3Term", "PairTerm", "make_term"]


_FEW_ATOMS = 4096  # up to this number of atoms, four warps share the row of an atom; above, each row has one warp


def make_term(prior: Prior, elements: Iterable[int], device: torch.device) -> PairTerm | D3Term:
    """Return the kernels of a prior with its current parameters.

    Args:
        prior: a prior for which `parameters.unsupported_reason` returns "".
        elements: atomic numbers that can occur.
    """
    parameters = describe(prior, elements)
    if isinstance(parameters, D3Parameters):
        return D3Term(parameters, device)
    return PairTerm(parameters, device)


class _PairTerm(Term):
    def launch_shapes(self, num_atoms: int) -> tuple[int, int]:
        """Return the number of edges of a row in one pass, and the number of warps that share them."""
        return (128, 4) if num_atoms <= _FEW_ATOMS else (64, 1)


class PairTerm(_PairTerm):
    """A sum over pairs of one function of the distance. Buffers: [N, 1] numbers of the atoms, unless by element."""

    def __init__(self, parameters: PairParameters, device: torch.device):
        self.parameters, self.device = parameters, device
        self.cutoff, self.uses_charges = parameters.cutoff, parameters.source == "predicted"
        self.of_edges = parameters.source == "element" and math.isfinite(parameters.cutoff)
        self._table = None if parameters.table is None else parameters.table.float().contiguous().to(device)
        self._radial = getattr(radial, parameters.radial)
        self._constants = [
            c.float().contiguous().to(device) if isinstance(c, Tensor) else c for c in parameters.constants
        ]

    def allocate(self, num_atoms: int) -> Tensor | None:
        if self.parameters.source != "atom":
            return None
        return torch.zeros(num_atoms, 1, dtype=torch.float32, device=self.device)

    def set_composition(self, buffers: Tensor | None, system: System) -> None:
        if math.isinf(self.cutoff):
            require_molecules(system)
        if buffers is not None:
            buffers.copy_(self.parameters.numbers_of(system))

    def run(
        self, buffers: Tensor | None, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch
    ) -> None:  # fmt: skip
        p, n = self.parameters, atoms.num_rows
        tables = {"element": self._table, "atom": buffers, "predicted": atoms.charges}
        keys = {"element": atoms.z, "atom": atoms.order, "predicted": None}
        key, table = keys[p.source], tables[p.source]
        assert table is not None
        # rows of the term's list end exactly at its cutoff
        own = edges is None or edges.cutoff <= self.cutoff
        slope = sums.charge_slope if self.uses_charges else None
        ints, reals = atoms.z, sums.forces  # where nothing is read or written
        pair_kernel[(n,)](
            *((ints, ints, reals) if edges is None else (edges.row_ptr, edges.sender, edges.vectors)),
            atoms.pos, atoms.batch, atoms.ptr, ints if key is None else key, table, sums.energy, sums.forces,
            sums.virial, reals if slope is None else slope, p.strength, p.alone,
            math.inf if own else self.cutoff,
            *self._constants,
            RADIAL=self._radial, MODE=p.mode, COLUMNS=1 if table.ndim == 1 else table.shape[1], KEYED=key is not None,
            LISTED=edges is not None, FIRST=launch.first, VIRIAL=launch.with_virial,
            SLOPE=0 if slope is None else 1 if launch.first_slope else 2, **_options(launch),
        )  # fmt: skip


class D3Term(_PairTerm):
    """D3(BJ): three passes. Buffers: weights [N, 8], mixed coefficients [N, T, 2, 8] and dE/dCN [N], with ghosts."""

    def __init__(self, parameters: D3Parameters, device: torch.device):
        self.parameters, self.device, self.cutoff = parameters, device, parameters.cutoff

        def table(values: Tensor) -> Tensor:
            return values.float().contiguous().to(device)

        self._elements, self._reference = table(parameters.elements), table(parameters.reference)
        self._c6 = table(parameters.c6)
        self._types = len(parameters.reference)

    def allocate(self, num_atoms: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes = (num_atoms, 8), (num_atoms, self._types, 2, 8), (num_atoms,)
        weights, mixed, slope = (torch.zeros(s, dtype=torch.float32, device=self.device) for s in shapes)
        return weights, mixed, slope

    def set_composition(self, buffers: Any, system: System) -> None:
        if math.isinf(self.cutoff):
            require_molecules(system)

    def run(
        self, buffers: tuple[Tensor, Tensor, Tensor], atoms: Atoms, edges: Edges | None, sums: TermSums,
        launch: TermLaunch,
    ) -> None:  # fmt: skip
        p, n, virial = self.parameters, atoms.num_rows, launch.with_virial
        weights, mixed, by_coordination = buffers
        ints, reals = atoms.z, sums.forces  # where nothing is read
        rows = (
            *((ints, ints, reals) if edges is None else (edges.row_ptr, edges.sender, edges.vectors)),
            atoms.pos, atoms.batch, atoms.ptr, atoms.z, self._elements,
        )  # fmt: skip
        own = edges is None or edges.cutoff <= self.cutoff
        limits = math.inf if own else self.cutoff, p.start, p.inverse
        options = {"LISTED": edges is not None, **_options(launch)}
        coordination_kernel[(n,)](
            *rows, self._reference, self._c6, weights, mixed, self._types, *limits, BT=4 if self._types <= 4 else 16,
            **options,
        )  # fmt: skip
        atoms.send(weights)
        dispersion_kernel[(n,)](
            *rows, weights, mixed, sums.energy, sums.forces, sums.virial, by_coordination, self._types, *limits,
            p.prior.s6, p.prior.s8, p.prior.a1, p.prior.a2, FIRST=launch.first, VIRIAL=virial, **options,
        )  # fmt: skip
        atoms.send(by_coordination)
        coordination_force_kernel[(n,)](
            *rows, by_coordination, sums.forces, sums.virial, *limits, VIRIAL=virial, **options
        )


def _options(launch: TermLaunch) -> dict[str, Any]:
    block, warps = launch.shapes
    return {"BE": block, "num_warps": warps, **FUSED_ARITHMETIC, **launch.options}
