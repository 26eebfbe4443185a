"""Coulomb by particle-mesh Ewald on the GPU: preparation, launches and kernels.

The kernel of pair priors sums short-range pairs, and molecules of a batch, in float32; the mesh is float64. The
reference is ewald.py.

The kernels spread charges to the mesh, multiply by the influence function, and interpolate the potential and its
gradient at the atoms. Charges on the mesh are summed as integers: such sums do not depend on the order, so that equal
inputs give results that are equal to the bit. One atom adds to p³ points. The rows of a tile are the p² pairs (k_x,
k_y), its columns k_z; P is p or the next power of two, ROWS is p² or the next power of two.

The mesh depends on charges and positions alone, and its kernels are many and small. So it is computed on a separate
stream, in parallel to the sums over pairs.

Shapes: N atoms, B structures, M = M_1 × M_2 × M_3 mesh points, p spline order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.devices import SideStream
from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, TermLaunch, TermSums, TermWithRoom
from ...system import System
from ...units import COULOMB
from ..pair_kernels.gpu import PairTerm
from ..pair_kernels.parameters import ewald_parameters
from ..pair_kernels.triton_kernels import put
from .coulomb import Coulomb
from .ewald import mesh_sizes, order_and_spacing, require_all_or_none, spline_moduli

__all__ = [
    "BLOCK",
    "MAX_CHARGE",
    "ParticleMeshTerm",
    "gather_kernel",
    "influence_kernel",
    "note_kernel",
    "spline_table",
    "spread_kernel",
]


_ROOM = 0.05
"""Strain of the cells up to which a mesh from `grow` fits."""


def spline_table(order: int) -> list[list[float]]:
    """Return c [p, p] with M_p(t + k) = Σ_j c_jk (t − ½)^j for t in [0, 1), for the splines of ewald.py."""
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


class _Potential(NamedTuple):
    """Results of the mesh of one structure: potential [M] e/Å, and parts of the virial from `influence_kernel`."""

    potential: Tensor
    parts: Tensor
    programs: int


class _Held:
    """The buffers of a step.

    Attributes:
        charges: [N] float64 e, fixed charges of the atoms.
        meshes: one for each periodic structure; limit: [3B] Å, the longest lattice vectors for which they are accurate.
        molecules: with molecules in the batch: [N] float32, 1 for atoms of periodic structures, else 0; and structures
            [N], [B + 2] for a sum over all pairs without the periodic ones.
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
    """Coulomb energy with the method "pme".

    Args:
        prior: a prior with the method "pme".
        device: CUDA, or the CPU under Triton's interpreter.
    """

    allocates = rehearses = True

    def __init__(self, prior: Coulomb, device: torch.device):
        self.prior, self.device = prior, device
        self.cutoff, self.uses_charges = prior.energy.cutoff, prior.uses_charges
        pairs = ewald_parameters(prior)
        self._short, self._molecules = (PairTerm(parameters, device) for parameters in pairs)
        # rounded to float32 for the kernel of pairs; the energy does not depend on α if all parts use the same value
        self._alpha = torch.tensor(prior.energy.alpha, dtype=torch.float32).item()
        self.order, self.spacing = order_and_spacing(prior.energy.accuracy, prior.energy.alpha)
        self._padded = triton.next_power_of_2(self.order)
        splines = {"ORDER": self.order, "P": self._padded, "ROWS": triton.next_power_of_2(self.order**2)}
        self._splines = {**splines, **FUSED_ARITHMETIC}
        self._side = SideStream(device, priority=-1)
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
        # meshes of the cells themselves, so that energies are equal to those of the Potential
        self._plan(buffers, system.cell.detach().double())
        return True

    def _plan(self, held: _Held, cell: Tensor) -> None:
        """Make meshes for cells [B, 3, 3] in Å."""
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
            batch = torch.where(
                periodic[system.batch], len(cell), system.batch
            ).int()  # one more structure, without atoms
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

    def begin(self, buffers: _Held, atoms: Atoms, with_virial: bool) -> tuple[Tensor, list[_Potential]]:
        """Return the charges [N] and the results of the meshes."""
        with self._side.beside():
            if self.uses_charges:
                assert atoms.charges is not None
                charges = atoms.charges[: atoms.num_rows]
            else:
                charges = buffers.charges if atoms.order is None else buffers.charges.index_select(0, atoms.order)
            if buffers.meshes:
                assert atoms.cell is not None
                note_kernel[(1,)](
                    atoms.cell, buffers.limit, len(atoms.cell) * 3, buffers.lacking, buffers.unfit, BLOCK=256,
                    enable_fp_fusion=False,
                )  # fmt: skip
            found = [self._potential(mesh, charges, atoms, with_virial) for mesh in buffers.meshes]
        return charges, found

    def run(self, buffers: _Held, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        charges, found = launch.begun or self.begin(buffers, atoms, launch.with_virial)
        if not self.uses_charges:
            self._side.wait()  # the sums over pairs need the charges
            sums = sums._replace(charge_slope=None)
        launch = launch._replace(options={"PDL": 0})  # PyTorch launches kernels in between
        single = charges.float()
        if buffers.molecules is None:
            self._short.run(None, atoms._replace(charges=single), edges, sums, launch)
        else:
            in_cell, batch, ptr = buffers.molecules
            self._short.run(None, atoms._replace(charges=single * in_cell), edges, sums, launch)
            others = atoms._replace(charges=single, batch=batch, ptr=ptr)
            # the sums hold the pairs of the cells now: add those of molecules; atoms of cells have empty rows here
            self._molecules.run(None, others, None, sums, launch._replace(first=False, first_slope=False))
        self._side.wait()
        for mesh, potential in zip(buffers.meshes, found, strict=True):
            self._gather(mesh, potential, charges, atoms, sums, launch.with_virial)

    def _potential(self, mesh: _Mesh, charges: Tensor, atoms: Atoms, virial: bool) -> _Potential:
        """Return the potential on the mesh of one structure."""
        assert atoms.cell is not None
        sizes, cell = mesh.sizes, atoms.cell[mesh.b]
        fixed = torch.zeros(sizes, dtype=torch.int64, device=self.device)
        spread_kernel[(mesh.num_atoms,)](
            atoms.pos, charges, cell, self._table, fixed, mesh.first, *sizes, **self._splines
        )
        # with a leading dimension PyTorch transforms all three dimensions in one plan
        transform = torch.fft.rfftn(fixed.double()[None], dim=(1, 2, 3)).contiguous()
        programs = triton.cdiv(transform.numel(), BLOCK)
        parts = torch.empty(programs if virial else 1, 6, dtype=torch.float64, device=self.device)
        influence_kernel[(programs,)](
            torch.view_as_real(transform), mesh.moduli, cell, parts, *sizes, ALPHA=self._alpha, VIRIAL=virial,
            BLOCK=BLOCK, **FUSED_ARITHMETIC,
        )  # fmt: skip
        potential = torch.fft.irfftn(transform, s=sizes, dim=(1, 2, 3), norm="forward").contiguous()
        return _Potential(potential, parts, programs)

    def _gather(
        self, mesh: _Mesh, found: _Potential, charges: Tensor, atoms: Atoms, sums: TermSums, virial: bool
    ) -> None:  # fmt: skip
        """Add energies, forces, virial and dE/dq of one structure, without its short-range pairs."""
        assert atoms.cell is not None
        slope = sums.forces if sums.charge_slope is None else sums.charge_slope
        gather_kernel[(mesh.num_atoms,)](
            atoms.pos, charges, atoms.cell[mesh.b], self._table, *found, sums.energy, sums.forces, sums.virial, slope,
            mesh.first, *mesh.sizes, ALPHA=self._alpha, STRENGTH=COULOMB, VIRIAL=virial,
            SLOPE=sums.charge_slope is not None, BLOCK=256, **self._splines,
        )  # fmt: skip


FIXED_POINT = 2.0**48
"""Charges on the mesh are multiples of 2⁻⁴⁸ = 3.6e-15 e. The error of a product of charge and weight is at most half of
that, and a mesh point gets some hundreds of products. The error is then 1e-13 e, and 1e-12 eV in the energy of a unit
charge, while the mesh has a relative error of 1e-11 at best. A point overflows above 2⁶³⁻⁴⁸ = 32,768 e. All of its
charges lie within p/2 points, which is a few Å, with weights up to 0.3 (p = 4); matter has tens of e there."""
MAX_CHARGE = 1024.0
"""e, largest charge of an atom; a larger one is a failed prediction, gets the energy NaN and is not put on the mesh."""
BLOCK = 1024  # mesh points of a program of `influence_kernel`

_FIXED = tl.constexpr(FIXED_POINT)
_MAX_CHARGE = tl.constexpr(MAX_CHARGE)
_PI = tl.constexpr(3.141592653589793)


@triton.jit
def reciprocal(cell):
    """Return the columns u, v, w of the inverse of a cell [3, 3], and the volume."""
    ax, ay, az = tl.load(cell).to(tl.float64), tl.load(cell + 1).to(tl.float64), tl.load(cell + 2).to(tl.float64)
    bx, by, bz = tl.load(cell + 3).to(tl.float64), tl.load(cell + 4).to(tl.float64), tl.load(cell + 5).to(tl.float64)
    cx, cy, cz = tl.load(cell + 6).to(tl.float64), tl.load(cell + 7).to(tl.float64), tl.load(cell + 8).to(tl.float64)
    ux, uy, uz = by * cz - bz * cy, bz * cx - bx * cz, bx * cy - by * cx
    vx, vy, vz = cy * az - cz * ay, cz * ax - cx * az, cx * ay - cy * ax
    wx, wy, wz = ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx
    det = ax * ux + ay * uy + az * uz
    f = 1.0 / det
    return ux * f, uy * f, uz * f, vx * f, vy * f, vz * f, wx * f, wy * f, wz * f, tl.abs(det)


@triton.jit
def place(x, y, z, u, v, w, points):
    """Return the mesh point below an atom along one lattice vector, the rest t in [0, 1), and if both are valid."""
    at = (x * u + y * v + z * w) * points
    ok = tl.abs(at) < 1e12
    at = tl.where(ok, at, 0.0)
    below = tl.floor(at)
    first = below.to(tl.int64) % points
    return tl.where(first < 0, first + points, first), at - below, ok


@triton.jit
def spline(table, k, t, ORDER: tl.constexpr, P: tl.constexpr):
    """M_p(t + k) and its slope by Horner's rule in t − ½; 0 for k ≥ p. table: `spline_table`."""
    s = t - 0.5
    value = tl.load(table + (ORDER - 1) * P + k)
    slope = tl.zeros_like(value)
    for n in tl.static_range(1, ORDER):
        slope = slope * s + value
        value = value * s + tl.load(table + (ORDER - 1 - n) * P + k)
    return value, slope


@triton.jit
def wrap(index, points):
    return tl.where(index < 0, index + points, index)


@triton.jit
def stencil(pos, i, cell, table, n0, n1, n2, ORDER: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Return the mesh points [ROWS, P] of atom i, which of them count, and weights and slopes by row and column.

    The last value says whether the position is valid.
    """
    x, y, z = tl.load(pos + i * 3), tl.load(pos + i * 3 + 1), tl.load(pos + i * 3 + 2)
    x, y, z = x.to(tl.float64), y.to(tl.float64), z.to(tl.float64)
    ux, uy, uz, vx, vy, vz, wx, wy, wz, _ = reciprocal(cell)
    a, s, ok0 = place(x, y, z, ux, uy, uz, n0)
    b, t, ok1 = place(x, y, z, vx, vy, vz, n1)
    c, r, ok2 = place(x, y, z, wx, wy, wz, n2)
    row, column = tl.arange(0, ROWS), tl.arange(0, P)
    kx, ky = tl.minimum(row // ORDER, ORDER - 1), row % ORDER
    fx, dx = spline(table, kx, s, ORDER, P)
    fy, dy = spline(table, ky, t, ORDER, P)
    fz, dz = spline(table, column, r, ORDER, P)
    rows = (wrap(a - kx, n0) * n1 + wrap(b - ky, n1)) * n2
    points = rows[:, None] + wrap(c - column, n2)[None, :]
    use = (row < ORDER * ORDER)[:, None] & (column < ORDER)[None, :]
    return points, use, fx, fy, fz, dx, dy, dz, ok0 & ok1 & ok2


@triton.jit(do_not_specialize=["first", "n0", "n1", "n2"])
def spread_kernel(
    pos, charge, cell, table, mesh, first, n0, n1, n2, ORDER: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Program i: atom first + i adds its charge to mesh [M] int64, in units of 1/FIXED_POINT."""
    i = (first + tl.program_id(0)).to(tl.int64)
    q = tl.load(charge + i).to(tl.float64)
    points, use, fx, fy, fz, _, _, _, ok = stencil(pos, i, cell, table, n0, n1, n2, ORDER, P, ROWS)
    usable = ok & (tl.abs(q) < _MAX_CHARGE)
    share = tl.where(usable, q, 0.0) * _FIXED * (fx * fy)[:, None] * fz[None, :]
    # lanes of padding name points too; `use` keeps them out
    tl.atomic_add(mesh + points, tl.floor(share + 0.5).to(tl.int64), use, sem="relaxed")


@triton.jit(do_not_specialize=["n0", "n1", "n2"])
def influence_kernel(
    transform, moduli, cell, parts, n0, n1, n2, ALPHA: tl.constexpr, VIRIAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Program p: BLOCK points of the transform S [M_1, M_2, M_3/2 + 1] of the charges become G S.

    G(k) = 4π/V exp(−k²/4α²)/k² |b(k)|²; G(0) = −π/(V α²), which is the neutralising background. Its energy
    ½ G |S|² changes with the strain by −δ + 2 (1/k² + 1/4α²) k ⊗ k times itself, the second term not of k = 0.

    Args:
        transform: complex numbers as pairs, of the mesh in units of 1/FIXED_POINT; the result is not in such units.
        moduli: [M_1 + M_2 + M_3] |b|² along each lattice vector.
        parts: [P, 6] the sums of xx, yy, zz, yz, xz, xy over the points of each program (VIRIAL).
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    half = n2 // 2 + 1
    use = m < n0 * half * n1
    m = tl.where(use, m, 0)
    c = m % half
    b = (m // half) % n1
    a = m // (half * n1)
    ux, uy, uz, vx, vy, vz, wx, wy, wz, volume = reciprocal(cell)
    fa = tl.where(2 * a < n0, a, a - n0).to(tl.float64) * (2 * _PI)
    fb = tl.where(2 * b < n1, b, b - n1).to(tl.float64) * (2 * _PI)
    fc = c.to(tl.float64) * (2 * _PI)
    kx, ky, kz = fa * ux + fb * vx + fc * wx, fa * uy + fb * vy + fc * wy, fa * uz + fb * vz + fc * wz
    zero = m == 0
    inverse = 1.0 / tl.where(zero, 1.0, kx * kx + ky * ky + kz * kz)
    width = 1.0 / (4.0 * ALPHA * ALPHA)
    b2 = tl.load(moduli + a) * tl.load(moduli + n0 + b) * tl.load(moduli + n0 + n1 + c)
    strength = 4 * _PI * tl.exp(-(kx * kx + ky * ky + kz * kz) * width) * inverse * b2
    strength = tl.where(zero, inverse * (-4 * _PI * width), strength) / volume  # a number alone would be float32
    re, im = tl.load(transform + 2 * m), tl.load(transform + 2 * m + 1)
    scaled = strength / _FIXED
    # in place: this program alone has these points
    tl.store(transform + 2 * m, re * scaled, use)
    tl.store(transform + 2 * m + 1, im * scaled, use)
    if VIRIAL:
        # points inside of the half mesh stand for two waves
        both = tl.where((c == 0) | (2 * c == n2), 0.5, 1.0)
        re, im = re / _FIXED, im / _FIXED
        energy = tl.where(use, both * strength * (re * re + im * im), 0.0)
        along = tl.where(zero, 0.0, 2.0 * (inverse + width)) * energy
        out = parts + tl.program_id(0) * 6
        tl.store(out, tl.sum(along * kx * kx - energy, 0))
        tl.store(out + 1, tl.sum(along * ky * ky - energy, 0))
        tl.store(out + 2, tl.sum(along * kz * kz - energy, 0))
        tl.store(out + 3, tl.sum(along * ky * kz, 0))
        tl.store(out + 4, tl.sum(along * kx * kz, 0))
        tl.store(out + 5, tl.sum(along * kx * ky, 0))


@triton.jit
def put_virial(parts, num_parts, virial, STRENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add the sums of `influence_kernel` to a row [9]."""
    row = tl.arange(0, BLOCK)
    xx = tl.zeros([BLOCK], tl.float64)
    yy, zz, yz, xz, xy = xx, xx, xx, xx, xx
    # in a fixed order and in float64, by one program
    for start in range(0, num_parts, BLOCK):
        use = start + row < num_parts
        at = parts + (start + row) * 6
        xx += tl.load(at, use, other=0.0)
        yy += tl.load(at + 1, use, other=0.0)
        zz += tl.load(at + 2, use, other=0.0)
        yz += tl.load(at + 3, use, other=0.0)
        xz += tl.load(at + 4, use, other=0.0)
        xy += tl.load(at + 5, use, other=0.0)
    syz, sxz, sxy = tl.sum(yz, 0) * STRENGTH, tl.sum(xz, 0) * STRENGTH, tl.sum(xy, 0) * STRENGTH
    put(virial, (tl.sum(xx, 0) * STRENGTH).to(tl.float32), False)
    put(virial + 1, sxy.to(tl.float32), False)
    put(virial + 2, sxz.to(tl.float32), False)
    put(virial + 3, sxy.to(tl.float32), False)
    put(virial + 4, (tl.sum(yy, 0) * STRENGTH).to(tl.float32), False)
    put(virial + 5, syz.to(tl.float32), False)
    put(virial + 6, sxz.to(tl.float32), False)
    put(virial + 7, syz.to(tl.float32), False)
    put(virial + 8, (tl.sum(zz, 0) * STRENGTH).to(tl.float32), False)


@triton.jit(do_not_specialize=["num_parts", "first", "n0", "n1", "n2"])
def gather_kernel(
    pos, charge, cell, table, potential, parts, num_parts, energy, forces, virial, slope, first, n0, n1, n2,
    ALPHA: tl.constexpr, STRENGTH: tl.constexpr, VIRIAL: tl.constexpr, SLOPE: tl.constexpr, ORDER: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: energy, force and dE/dq of atom first + i are added to the sums; the first one adds the virial.

    With the potential φ of the smooth charges on the mesh: E = ½ q (φ − 2α/√π q). The sum over the atoms is symmetric
    in their charges: its gradient is q ∇φ, and by the charge φ − 2α/√π q.

    Args:
        potential: [M] e/Å. STRENGTH: eV Å/e². slope: [N] float32, added to if SLOPE. Others: as `TermSums`.
    """
    i = (first + tl.program_id(0)).to(tl.int64)
    q = tl.load(charge + i).to(tl.float64)
    points, use, fx, fy, fz, dx, dy, dz, ok = stencil(pos, i, cell, table, n0, n1, n2, ORDER, P, ROWS)
    phi = tl.load(potential + points, use, other=0.0)
    along, along_slope = tl.sum(phi * fz[None, :], 1), tl.sum(phi * dz[None, :], 1)
    value = tl.sum(along * fx * fy, 0)
    ga, gb, gc = tl.sum(along * dx * fy, 0), tl.sum(along * fx * dy, 0), tl.sum(along_slope * fx * fy, 0)
    # from slopes per mesh point to those per lattice vector; the columns of the inverse cell make them Cartesian
    ga, gb, gc = ga * n0, gb * n1, gc * n2
    ux, uy, uz, vx, vy, vz, wx, wy, wz, _ = reciprocal(cell)
    value -= 2.0 * ALPHA / 1.772453850905516 * q
    usable = ok & (tl.abs(q) < _MAX_CHARGE)
    # `spread_kernel` has left this charge out, so that potentials of the others stay finite
    put(energy + i, tl.where(usable, 0.5 * STRENGTH * q * value, float("nan")), False)
    factor = -STRENGTH * q
    put(forces + i * 3, (factor * (ga * ux + gb * vx + gc * wx)).to(tl.float32), False)
    put(forces + i * 3 + 1, (factor * (ga * uy + gb * vy + gc * wy)).to(tl.float32), False)
    put(forces + i * 3 + 2, (factor * (ga * uz + gb * vz + gc * wz)).to(tl.float32), False)
    if SLOPE:
        put(slope + i, (STRENGTH * value).to(tl.float32), False)
    if VIRIAL:
        if tl.program_id(0) == 0:
            put_virial(parts, num_parts, virial + i * 9, STRENGTH, BLOCK)


@triton.jit(do_not_specialize=["num_vectors"])
def note_kernel(cell, limit, num_vectors, lacking, unfit, BLOCK: tl.constexpr):
    """One program: are lattice vectors longer than the meshes were made for?

    Args:
        cell: [3B, 3] Å. limit: [3B] Å float64. num_vectors: 3B.
        lacking: [1] int32, becomes 1 when one is, and all cells are finite; unfit: [3B, 3] float64, the first such
            cells. What is not finite is refused for that.
    """
    lane = tl.arange(0, BLOCK)
    longer, broken = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_vectors, BLOCK):
        k = start + lane
        use = k < num_vectors
        x = tl.load(cell + k * 3, use, other=0.0).to(tl.float64)
        y = tl.load(cell + k * 3 + 1, use, other=0.0).to(tl.float64)
        z = tl.load(cell + k * 3 + 2, use, other=0.0).to(tl.float64)
        square = x * x + y * y + z * z
        most = tl.load(limit + k, use, other=float("inf"))
        longer += (square > most * most).to(tl.int32)
        broken += 1 - (square < float("inf")).to(tl.int32)
    if (tl.sum(longer, 0) > 0) & (tl.sum(broken, 0) == 0) & (tl.load(lacking) == 0):
        for start in range(0, num_vectors * 3, BLOCK):
            k = start + lane
            tl.store(unfit + k, tl.load(cell + k, k < num_vectors * 3).to(tl.float64), k < num_vectors * 3)
        tl.store(lacking, 1)
