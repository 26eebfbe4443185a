"""Pair priors on the GPU: what is prepared of a prior, and how its kernels are launched.

A term is made for a prior as it is now. `allocate` makes what a step of N atoms needs, `launch` only launches kernels
on the current stream, so that it can be captured in a CUDA graph.

Shapes: N atoms, B structures, C edge capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...priors.base import Prior
from ...priors.pairs import require_molecules
from ...system import System
from ...triton_launch import FUSED_ARITHMETIC
from .parameters import D3Parameters, PairParameters, describe
from .triton import radial
from .triton.d3 import coordination_force_kernel, coordination_kernel, dispersion_kernel
from .triton.frame import pair_kernel

__all__ = ["Atoms", "D3Term", "Edges", "PairTerm", "Sums", "make_term"]

_FEW_ATOMS = 4096  # up to so many, four warps share the row of an atom; above, one has it to itself


@dataclass(eq=False)
class Atoms:
    """The atoms of a step in the order in which kernels see them ("by place").

    Attributes:
        z [N] int32, pos [N, 3] float32 or float64, batch [N] int32 ascending.
        ptr: [B + 1] int32, the first place of each structure.
        order: [N] the atom that stands at each place; None where none was moved.
        charges: [N] float32 e, predicted by the network, by place.
    """

    z: Tensor
    pos: Tensor
    batch: Tensor
    ptr: Tensor
    order: Tensor | None = None
    charges: Tensor | None = None


@dataclass(eq=False)
class Edges:
    """The directed pairs within a cutoff in Å: row_ptr [N + 1] int32, sender [C] int32, vectors [C, 3] float32."""

    cutoff: float
    row_ptr: Tensor
    sender: Tensor
    vectors: Tensor


@dataclass(eq=False)
class Sums:
    """What the terms add up to, by place: the first that is launched after `begin` writes, the others add.

    Attributes:
        energy [N] float64 eV, forces [N, 3] float32 eV/Å, virial [N, 9] float32 eV of the rows.
        charge_slope: [N] float32 eV/e, dE/dq of predicted charges; None without.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor
    charge_slope: Tensor | None = None
    _empty: bool = True
    _no_slope: bool = True

    @classmethod
    def allocate(cls, num_atoms: int, device: torch.device, charges: bool = False) -> Sums:
        """Zeros."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slope = new(num_atoms) if charges else None
        return cls(new(num_atoms, dtype=torch.float64), new(num_atoms, 3), new(num_atoms, 9), slope)

    def begin(self) -> None:
        """Before the first launch of a step."""
        self._empty = self._no_slope = True

    def is_first(self) -> bool:
        """Whether a term has to write. True once."""
        first, self._empty = self._empty, False
        return first

    def is_first_slope(self) -> bool:
        """Whether a term has to write `charge_slope`. True once."""
        first, self._no_slope = self._no_slope, False
        return first

    @property
    def nbytes(self) -> int:
        tensors = [t for t in vars(self).values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def make_term(prior: Prior, elements: Iterable[int], device: torch.device) -> PairTerm | D3Term:
    """The kernels of a prior.

    Args:
        prior: one that `parameters.unsupported_reason` finds nothing against.
        elements: atomic numbers that can occur.
    """
    parameters = describe(prior, elements)
    if isinstance(parameters, D3Parameters):
        return D3Term(parameters, device)
    return PairTerm(parameters, device)


class PairTerm:
    """A sum over pairs of one function of the distance.

    Attributes:
        cutoff: Å of the edges that `launch` needs, or further; infinity for none.
        uses_charges: `launch` needs the charges of the network, and adds to `Sums.charge_slope`.
    """

    def __init__(self, parameters: PairParameters, device: torch.device):
        self.parameters, self.device = parameters, device
        self.cutoff, self.uses_charges = parameters.cutoff, parameters.source == "predicted"
        self._table = None if parameters.table is None else parameters.table.float().contiguous().to(device)
        self._radial = getattr(radial, parameters.radial)

    def allocate(self, num_atoms: int) -> Tensor | None:
        """[N, 1] numbers of the atoms, where they are not by element."""
        if self.parameters.source != "atom":
            return None
        return torch.zeros(num_atoms, 1, dtype=torch.float32, device=self.device)

    def set_composition(self, buffers: Tensor | None, system: System) -> None:
        """Take over elements and structures.

        Raises:
            ValueError: a structure is periodic, and all pairs are summed.
        """
        if math.isinf(self.cutoff):
            require_molecules(system)
        if buffers is not None:
            buffers.copy_(self.parameters.numbers_of(system))

    def launch(
        self, buffers: Tensor | None, atoms: Atoms, edges: Edges | None, sums: Sums, virial: bool,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """Add to the sums.

        Args:
            buffers: from `allocate`.
            edges: within `cutoff` or further; None for all pairs.
            virial: add to the virial.
            options: of the launch, PDL among them (fused/launch.py).
        """
        p = self.parameters
        tables = {"element": self._table, "atom": buffers, "predicted": atoms.charges}
        keys = {"element": atoms.z, "atom": atoms.order, "predicted": None}
        key, table = keys[p.source], tables[p.source]
        assert table is not None
        n = len(atoms.z)
        listed = edges is not None
        any_ints = atoms.z
        # rows of the term's own list end where it ends, to the last bit
        own = edges is None or edges.cutoff <= self.cutoff
        slope = sums.charge_slope if self.uses_charges else None
        mode = 0 if slope is None else 1 if sums.is_first_slope() else 2
        pair_kernel[(n,)](
            edges.row_ptr if edges else any_ints, edges.sender if edges else any_ints,
            edges.vectors if edges else sums.forces, atoms.pos, atoms.batch, atoms.ptr,
            any_ints if key is None else key, table, sums.energy, sums.forces, sums.virial,
            sums.forces if slope is None else slope, p.strength, math.inf if own else self.cutoff, *p.constants,
            RADIAL=self._radial, MODE=p.mode, COLUMNS=1 if table.ndim == 1 else table.shape[1], KEYED=key is not None,
            LISTED=listed, FIRST=sums.is_first(), VIRIAL=virial, SLOPE=mode, **_shape(n), **options,
        )  # fmt: skip


class D3Term:
    """D3(BJ): three passes."""

    uses_charges = False

    def __init__(self, parameters: D3Parameters, device: torch.device):
        self.parameters, self.device = parameters, device
        self.cutoff = parameters.cutoff

        def table(values: Tensor) -> Tensor:
            return values.float().contiguous().to(device)

        self._elements, self._reference = table(parameters.elements), table(parameters.reference)
        self._c6 = table(parameters.c6)
        self._types = len(parameters.reference)

    def allocate(self, num_atoms: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [N, 8], mixed coefficients [N, T, 2, 8] and dE/dCN [N]."""
        shapes = (num_atoms, 8), (num_atoms, self._types, 2, 8), (num_atoms,)
        weights, mixed, slope = (torch.zeros(s, dtype=torch.float32, device=self.device) for s in shapes)
        return weights, mixed, slope

    def set_composition(self, buffers: tuple[Tensor, Tensor, Tensor], system: System) -> None:
        """Nothing depends on it."""

    def launch(
        self, buffers: tuple[Tensor, Tensor, Tensor], atoms: Atoms, edges: Edges, sums: Sums, virial: bool,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        """As `PairTerm.launch`."""
        p, n = self.parameters, len(atoms.z)
        weights, mixed, by_coordination = buffers
        rows = edges.row_ptr, edges.sender, edges.vectors, atoms.z, self._elements
        limits = math.inf if edges.cutoff <= self.cutoff else self.cutoff, p.start, p.inverse
        options = {**_shape(n), **options}
        coordination_kernel[(n,)](
            *rows, self._reference, self._c6, weights, mixed, self._types, *limits, BT=4 if self._types <= 4 else 16,
            **options,
        )  # fmt: skip
        dispersion_kernel[(n,)](
            *rows, weights, mixed, sums.energy, sums.forces, sums.virial, by_coordination, self._types, *limits,
            p.prior.s6, p.prior.s8, p.prior.a1, p.prior.a2, FIRST=sums.is_first(), VIRIAL=virial, **options,
        )  # fmt: skip
        coordination_force_kernel[(n,)](
            *rows, by_coordination, sums.forces, sums.virial, *limits, VIRIAL=virial, **options
        )


def _shape(num_atoms: int) -> dict[str, Any]:
    """Edges of a row at once, and warps that share them."""
    few = num_atoms <= _FEW_ATOMS
    return {"BE": 128 if few else 64, "num_warps": 4 if few else 1, **FUSED_ARITHMETIC}
