"""Coulomb by particle-mesh Ewald on the GPU: what is prepared, and how its kernels are launched.

Short-range pairs and molecules of a batch are sums over pairs, float32 by the kernel of pair priors; the mesh is
float64. The reference is ewald.py.

Shapes: N atoms, B structures, M = M_1 × M_2 × M_3 mesh points, p spline order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, TermLaunch, TermSums, TermWithRoom
from ...system import System
from ...units import COULOMB
from ..pair_kernels.gpu import PairTerm
from ..pair_kernels.parameters import ewald_parameters
from .coulomb import Coulomb
from .ewald import mesh_sizes, order_and_spacing, require_all_or_none, spline_moduli
from .kernels import BLOCK, gather_kernel, influence_kernel, note_kernel, spread_kernel

__all__ = ["ParticleMeshTerm", "spline_table"]


_ROOM = 0.05
"""Strain of the cells that a mesh made by `grow` has room for."""


def spline_table(order: int) -> list[list[float]]:
    """M_p(t + k) = Σ_j c_jk (t − ½)^j for t in [0, 1): c [p, p], of the splines of ewald.py."""
    half = Fraction(1, 2)
    pieces = [[half, Fraction(1)], [half, Fraction(-1)]]  # M_2
    for n in range(3, order + 1):
        below: list[list[Fraction]] = [[], *pieces, []]  # M_{n−1} at t + k − 1, k = 0 … n
        pieces = [[Fraction(0)] * n for _ in range(n)]
        for k, piece in enumerate(pieces):
            for j, c in enumerate(below[k + 1]):
                piece[j] += (k + half) * c / (n - 1)
                piece[j + 1] += c / (n - 1)
            for j, c in enumerate(below[k]):
                piece[j] += (n - k - half) * c / (n - 1)
                piece[j + 1] -= c / (n - 1)
    return [[float(piece[j]) for piece in pieces] for j in range(order)]


class _Mesh(NamedTuple):
    """One periodic structure.

    Attributes:
        b: its number; first, num_atoms: its rows.
        sizes: M_1, M_2, M_3; moduli: [M_1 + M_2 + M_3] |b|².
    """

    b: int
    first: int
    num_atoms: int
    sizes: tuple[int, ...]
    moduli: Tensor


class _Held:
    """The buffers of a step.

    Attributes:
        charges: [N] float64 e by atom, where they are fixed.
        meshes: one for each periodic structure; limit: [3B] Å, the longest lattice vectors that they are good for.
        molecules: where there are others: 1 for atoms of periodic structures, else 0, [N] float32; and structures
            [N], [B + 2] for a sum over all pairs that leaves the periodic ones out.
        lacking: [1] int32; unfit: [B, 3, 3] Å: see `note_kernel`.
    """

    limit: Tensor
    unfit: Tensor

    def __init__(self, num_atoms: int, device: torch.device):
        self.charges = torch.zeros(num_atoms, dtype=torch.float64, device=device)
        self.lacking = torch.zeros(1, dtype=torch.int32, device=device)
        self.meshes: list[_Mesh] = []
        self.molecules: tuple[Tensor, Tensor, Tensor] | None = None
        self.known: System | None = None


class ParticleMeshTerm(TermWithRoom):
    """Coulomb with method "pme".

    Args:
        prior: by method "pme".
        device: CUDA, or the CPU under Triton's interpreter.
    """

    allocates = True

    def __init__(self, prior: Coulomb, device: torch.device):
        self.prior, self.device = prior, device
        self.cutoff, self.uses_charges = prior.energy.cutoff, prior.uses_charges
        pairs = ewald_parameters(prior)
        self._short, self._molecules = (PairTerm(parameters, device) for parameters in pairs)
        # the kernel of pairs gets it in float32; the energy does not depend on α as long as all parts have the same
        self._alpha = torch.tensor(prior.energy.alpha, dtype=torch.float32).item()
        self.order, self.spacing = order_and_spacing(prior.energy.accuracy, prior.energy.alpha)
        self._padded = triton.next_power_of_2(self.order)
        table = torch.zeros(self.order, self._padded, dtype=torch.float64)
        table[:, : self.order] = torch.tensor(spline_table(self.order), dtype=torch.float64)
        self._table = table.to(device)

    def launch_shapes(self, num_atoms: int) -> tuple[int, int]:
        return self._short.launch_shapes(num_atoms)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def allocate(self, num_atoms: int) -> _Held:
        return _Held(num_atoms, self.device)

    def set_composition(self, buffers: _Held, system: System) -> None:
        require_all_or_none(system)
        if not self.uses_charges:
            buffers.charges.copy_(self.prior.fixed_charges(system))

    def make_room(self, buffers: _Held, system: System) -> bool:
        known = buffers.known
        if known is not None and torch.equal(known.batch, system.batch) and torch.equal(known.pbc, system.pbc):
            return False
        buffers.known = System(**{name: value.detach().clone() for name, value in vars(system).items()})
        buffers.unfit = torch.zeros_like(system.cell, dtype=torch.float64)
        # meshes of the cells themselves: energies are those of the Potential
        self._plan(buffers, system.cell.detach().double())
        return True

    def _plan(self, held: _Held, cell: Tensor) -> None:
        """Meshes for cells [B, 3, 3] in Å."""
        system = held.known
        assert system is not None
        periodic, counts = system.pbc.all(1), system.atom_counts
        held.meshes, first = [], 0
        held.limit = torch.full((len(cell), 3), math.inf, dtype=torch.float64, device=self.device)
        moduli: dict[int, Tensor] = {}
        for b, (count, in_cell) in enumerate(zip(counts.tolist(), periodic.tolist(), strict=True)):
            if in_cell and count:
                sizes = mesh_sizes(cell[b], self.order, self.spacing)
                for size in {*sizes} - {*moduli}:
                    moduli[size] = spline_moduli(size, self.order, self.device)
                of_mesh = torch.cat([moduli[size] for size in sizes])
                held.meshes.append(_Mesh(b, first, count, tuple(sizes), of_mesh))
                held.limit[b] = torch.tensor(sizes, dtype=torch.float64) * (self.spacing * (1 + 1e-9))
            first += count
        held.molecules = None
        if not bool(periodic.all()):
            weights = periodic[system.batch].float()
            batch = torch.where(periodic[system.batch], len(cell), system.batch).int()  # one more, of no atoms
            ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 1), value=0).int()
            ptr[-1] = first
            held.molecules = weights, batch, ptr

    def lacking(self, buffers: _Held) -> Tensor | None:
        return buffers.lacking if buffers.meshes else None

    def grow(self, buffers: _Held) -> bool:
        if not bool(buffers.lacking):
            return False
        self._plan(buffers, buffers.unfit * (1 + _ROOM))
        return True

    def clear(self, buffers: _Held) -> None:
        if buffers.known is not None:
            buffers.lacking.zero_()
            buffers.unfit.zero_()

    # --- launches ------------------------------------------------------------------------------------------------

    def run(self, buffers: _Held, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        assert atoms.cell is not None
        if self.uses_charges:
            assert atoms.charges is not None
            charges = atoms.charges[: atoms.num_rows].double()
        else:
            sums = sums._replace(charge_slope=None)
            charges = buffers.charges if atoms.order is None else buffers.charges.index_select(0, atoms.order)
        launch = launch._replace(options={"PDL": 0})  # launches of PyTorch lie between
        single = charges.float()
        if buffers.molecules is None:
            self._short.run(None, atoms._replace(charges=single), edges, sums, launch)
        else:
            in_cell, batch, ptr = buffers.molecules
            self._short.run(None, atoms._replace(charges=single * in_cell), edges, sums, launch)
            others = atoms._replace(charges=single, batch=batch, ptr=ptr)
            self._molecules.run(None, others, None, sums, launch._replace(first=False, first_slope=False))
        if not buffers.meshes:
            return
        note_kernel[(1,)](
            atoms.cell, buffers.limit, len(atoms.cell) * 3, buffers.lacking, buffers.unfit, BLOCK=256,
            enable_fp_fusion=False,
        )  # fmt: skip
        for mesh in buffers.meshes:
            self._add_mesh(mesh, charges, atoms, sums, launch.with_virial)

    def _add_mesh(self, mesh: _Mesh, charges: Tensor, atoms: Atoms, sums: TermSums, virial: bool) -> None:
        """Energies, forces, virial and dE/dq of one structure: everything but its short-range pairs."""
        assert atoms.cell is not None
        sizes, cell = mesh.sizes, atoms.cell[mesh.b]
        given = atoms.pos, charges, cell, self._table
        splines = {"ORDER": self.order, "P": self._padded, **FUSED_ARITHMETIC}
        fixed = torch.zeros(sizes, dtype=torch.int64, device=self.device)
        spread_kernel[(mesh.num_atoms,)](*given, fixed, mesh.first, *sizes, **splines)
        # a leading dimension, with which PyTorch transforms all three in one plan
        transform = torch.fft.rfftn(fixed.double()[None], dim=(1, 2, 3)).contiguous()
        programs = triton.cdiv(transform.numel(), BLOCK)
        parts = charges.new_empty(programs if virial else 1, 6)
        influence_kernel[(programs,)](
            torch.view_as_real(transform), mesh.moduli, cell, parts, *sizes, ALPHA=self._alpha, VIRIAL=virial,
            BLOCK=BLOCK, **FUSED_ARITHMETIC,
        )  # fmt: skip
        potential = torch.fft.irfftn(transform, s=sizes, dim=(1, 2, 3), norm="forward").contiguous()
        slope = sums.forces if sums.charge_slope is None else sums.charge_slope
        gather_kernel[(mesh.num_atoms,)](
            *given, potential, parts, programs, sums.energy, sums.forces, sums.virial, slope, mesh.first, *sizes,
            ALPHA=self._alpha, STRENGTH=COULOMB, VIRIAL=virial, SLOPE=sums.charge_slope is not None, BLOCK=256,
            **splines,
        )  # fmt: skip
