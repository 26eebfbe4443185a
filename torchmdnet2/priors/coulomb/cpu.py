"""Coulomb by particle-mesh Ewald on the CPU: preparation, calls and kernels, in float64. The reference is ewald.py.

The kernels of pair priors sum short-range pairs, and the pairs of molecules in the batch. For the mesh, threads divide
the atoms, or the planes of the mesh: a plane takes the charges of all atoms that reach it, so that results do not
depend on the number of threads.

Shapes: N atoms, n of them in a cell, B structures, M_1 × M_2 × M_3 mesh points, p spline order.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ...core.compiling_cpu import kernel
from ...kernels.interfaces import Array, Atoms, Edges, Term, TermLaunch, TermSums
from ...system import System
from ...units import COULOMB
from ..pair_kernels.cpu import KERNELS, inline, limit, members_of_structures
from ..pair_kernels.parameters import ewald_parameters
from .coulomb import Coulomb
from .ewald import mesh_sizes, order_and_spacing, require_all_or_none, spline_moduli

__all__ = ["CpuParticleMeshTerm"]


class _Held:
    """What the term holds of a composition: fixed charges [N] or None, which atoms are in cells [N], the meshes, and
    the pairs of molecules (`members_of_structures`)."""

    charges: Array | None
    in_cells: Array
    meshes: list[_Mesh]
    of_molecules: tuple[Array, Array, Array]
    key: Array
    table: Array
    unused: Array


class CpuParticleMeshTerm(Term):
    """Coulomb energy with the method "pme".

    Args:
        prior: a prior with the method "pme".
    """

    cost = 20

    def __init__(self, prior: Coulomb):
        self.prior, self.cutoff, self.uses_charges = prior, prior.energy.cutoff, prior.uses_charges
        self._short, self._molecules = ewald_parameters(prior)

    def allocate(self, num_atoms: int) -> _Held:
        return _Held()

    def set_composition(self, buffers: _Held, system: System) -> None:
        """Take over a composition. Raises ValueError where a structure is periodic in some directions only."""
        periodic, prior = require_all_or_none(system), self.prior
        n, batch = system.num_atoms, system.batch.numpy()
        buffers.charges = None if prior.uses_charges else prior.fixed_charges(system).numpy().copy()
        buffers.in_cells = periodic.numpy()[batch].astype(np.float64)
        alpha, (order, spacing) = prior.energy.alpha, order_and_spacing(prior.energy.accuracy, prior.energy.alpha)
        numbers = periodic.nonzero()[:, 0].tolist()
        meshes = [_Mesh(b, np.flatnonzero(batch == b), alpha, order, spacing) for b in numbers]
        buffers.meshes = [mesh for mesh in meshes if len(mesh.atoms)]
        # pairs of molecules: those of an atom in a cell are an empty range
        first, last, members = members_of_structures(system)
        buffers.of_molecules = first, np.where(buffers.in_cells > 0, first, last), members
        buffers.key, buffers.table, buffers.unused = np.arange(n), np.zeros((n, 3)), np.zeros(n)

    def run(self, buffers: _Held, atoms: Atoms, edges: Edges | None, sums: TermSums, launch: TermLaunch) -> None:
        assert edges is not None
        pos, n = np.asarray(atoms.pos, np.float64), atoms.num_rows
        q = atoms.charges if buffers.charges is None else buffers.charges
        slope = sums.charge_slope if buffers.charges is None else buffers.unused
        last = sums.energy, sums.forces, sums.virial, slope
        key, table = buffers.key, buffers.table
        table[:, 0] = q * buffers.in_cells
        short, (lower, inverse) = self._short, self._short.constants[:2]
        # without value and slope at the cutoff a shifted force is (erfc(α d) − 1 + f(d))/d
        constants = lower, inverse, short.constants[2], 0.0, 0.0, short.cutoff
        KERNELS["shifted_force"](
            n, edges.row_ptr, edges.sender, edges.vectors, key, table, short.strength, limit(edges, short.cutoff),
            constants, short.mode, *last,
        )  # fmt: skip
        if not buffers.in_cells.all():
            table[:, 0] = q
            all_pairs = self._molecules
            KERNELS["all_pairs"](
                n, *buffers.of_molecules, pos, key, table, all_pairs.strength, all_pairs.constants, all_pairs.mode,
                *last,
            )  # fmt: skip
        for mesh in buffers.meshes:
            mesh.add(pos, np.asarray(atoms.cell[mesh.b], np.float64), q, *last)


class _Mesh:
    """The mesh of one periodic structure.

    Args:
        b: its number; atoms: [n] its atoms.
        alpha: Ewald parameter, 1/Å; order: p; spacing: the largest one of mesh points, Å.
    """

    def __init__(self, b: int, atoms: Array, alpha: float, order: int, spacing: float):
        self.b, self.atoms = b, atoms
        self._alpha, self._order, self._spacing = alpha, order, spacing
        n = len(atoms)
        self._first, self._weights = np.empty((n, 3), np.int64), np.empty((2, n, 3, order))
        self._sizes: tuple[int, ...] = ()

    def _resize(self, cell: Array) -> None:
        """Take the mesh of the reference for this cell."""
        sizes = tuple(mesh_sizes(torch.from_numpy(cell), self._order, self._spacing))
        if sizes != self._sizes:
            moduli = [spline_moduli(size, self._order, torch.device("cpu")).numpy() for size in sizes]
            self._moduli, self._charge, self._parts = np.concatenate(moduli), np.empty(sizes), np.empty((sizes[0], 6))
            self._sizes = sizes

    def add(self, pos: Array, cell: Array, q: Array, energy: Array, forces: Array, virial: Array, slope: Array) -> None:
        """Add the long-range, self and background energies [N] with their forces, virial and dE/dq.

        Args:
            pos: [N, 3] Å, cell: [3, 3] Å, float64; q: [N] e.
            energy, forces, virial, slope: as `TermSums`.
        """
        self._resize(cell)
        n, sizes, inverse, alpha = len(self.atoms), self._sizes, np.linalg.inv(cell), self._alpha
        volume, total = abs(np.linalg.det(cell)), float(q[self.atoms].sum())
        splines(n, self.atoms, pos, inverse, np.array(sizes), self._first, self._weights)
        spread(sizes[0], self.atoms, q, self._first, self._weights, self._charge)
        waves = torch.view_as_real(torch.fft.rfftn(torch.from_numpy(self._charge)))
        influence(sizes[0], waves.numpy(), inverse, volume, alpha, sizes[2], self._moduli, self._parts)
        potential = torch.fft.irfftn(torch.view_as_complex(waves), s=sizes, norm="forward").numpy()
        background = math.pi / (volume * alpha**2) * total
        own = 2 * alpha / math.sqrt(math.pi)
        gather(
            n, self.atoms, q, inverse, self._first, self._weights, potential, COULOMB, own, background, energy, forces,
            slope,
        )  # fmt: skip
        # that of the structure goes to its first row
        xx, yy, zz, yz, xz, xy = self._parts.sum(0) * (COULOMB / 2)
        xx, yy, zz = np.array([xx, yy, zz]) + COULOMB / 2 * background * total
        virial[self.atoms[0]] += xx, xy, xz, xy, yy, yz, xz, yz, zz


# --- Kernels ---


@kernel
def splines(begin, stop, atoms, pos, inverse, sizes, first, weights):
    """Write, for each atom, its mesh point `first` [n, 3], and the weights of the points first − k with their slopes,
    weights [2, n, 3, p].

    The recursion is that of `ewald._spline`, here in place from the last k on, since each needs k and k − 1.
    """
    order = weights.shape[3]
    for i in range(begin, stop):
        a = atoms[i]
        for axis in range(3):
            u = 0.0
            for b in range(3):
                u += pos[a, b] * inverse[b, axis]
            u *= sizes[axis]
            whole = math.floor(u)
            t = u - whole
            first[i, axis] = int(whole) % sizes[axis]
            w, slope = weights[0, i, axis], weights[1, i, axis]
            w[0], w[1] = t, 1 - t
            for n in range(3, order + 1):
                if n == order:
                    for k in range(n):
                        slope[k] = (w[k] if k < n - 1 else 0.0) - (w[k - 1] if k > 0 else 0.0)
                for k in range(n - 1, -1, -1):
                    here = w[k] if k < n - 1 else 0.0
                    before = w[k - 1] if k > 0 else 0.0
                    w[k] = ((t + k) * here + (n - t - k) * before) / (n - 1)


@inline
def _place(first, k, size):
    """Return the point first − k of a periodic axis, which has at least as many points as a spline."""
    return first - k if first >= k else first - k + size


@kernel
def spread(begin, stop, atoms, q, first, weights, charge):
    """Write the planes of charge [M_1, M_2, M_3]."""
    order = weights.shape[3]
    size, size_y, size_z = charge.shape
    for x in range(begin, stop):
        plane = charge[x]
        plane[:] = 0
        for i in range(len(atoms)):
            k = first[i, 0] - x
            if k < 0:
                k += size
            if k < order:
                amount = q[atoms[i]] * weights[0, i, 0, k]
                for ky in range(order):
                    row, along = plane[_place(first[i, 1], ky, size_y)], amount * weights[0, i, 1, ky]
                    for kz in range(order):
                        row[_place(first[i, 2], kz, size_z)] += along * weights[0, i, 2, kz]


@kernel
def influence(begin, stop, waves, inverse, volume, alpha, size_z, moduli, parts):
    """Multiply planes of the transform by `ewald._influence`; write parts of the virial.

    Args:
        waves: [M_1, M_2, M_3/2 + 1, 2], the transform of the charges, then of the potential.
        moduli: [M_1 + M_2 + M_3].
        parts: [M_1, 6] twice the virial, in e²/Å: Σ |S|² I (2 k_a k_b (1/k² + 1/4α²) − δ_ab) of each plane, xx yy zz yz
            xz xy. Under strain of positions and cell only I changes.
    """
    size, size_y, half = waves.shape[:3]
    for x in range(begin, stop):
        n1 = x if 2 * x < size else x - size
        s0, s1, s2, s3, s4, s5 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for y in range(size_y):
            n2 = y if 2 * y < size_y else y - size_y
            for z in range(half):
                if n1 == 0 and n2 == 0 and z == 0:
                    waves[x, y, z, 0], waves[x, y, z, 1] = 0.0, 0.0
                    continue
                kx = 2 * math.pi * (inverse[0, 0] * n1 + inverse[0, 1] * n2 + inverse[0, 2] * z)
                ky = 2 * math.pi * (inverse[1, 0] * n1 + inverse[1, 1] * n2 + inverse[1, 2] * z)
                kz = 2 * math.pi * (inverse[2, 0] * n1 + inverse[2, 1] * n2 + inverse[2, 2] * z)
                k2 = kx * kx + ky * ky + kz * kz
                strength = 4 * math.pi / volume * math.exp(-k2 / (4 * alpha * alpha)) / k2
                strength *= moduli[x] * moduli[size + y] * moduli[size + size_y + z]
                re, im = waves[x, y, z, 0], waves[x, y, z, 1]
                waves[x, y, z, 0], waves[x, y, z, 1] = re * strength, im * strength
                # waves between the first and the last plane stand for their opposites too
                part = (re * re + im * im) * strength * (1.0 if z == 0 or 2 * z == size_z else 2.0)
                along = 2 * part * (1 / k2 + 1 / (4 * alpha * alpha))
                s0 += along * kx * kx - part
                s1 += along * ky * ky - part
                s2 += along * kz * kz - part
                s3 += along * ky * kz
                s4 += along * kx * kz
                s5 += along * kx * ky
        parts[x, 0], parts[x, 1], parts[x, 2], parts[x, 3], parts[x, 4], parts[x, 5] = s0, s1, s2, s3, s4, s5


@kernel
def gather(begin, stop, atoms, q, inverse, first, weights, potential, strength, own, background, energy, forces, slope):
    """Add energies, forces and dE/dq of atoms from the potential [M_1, M_2, M_3] in e/Å.

    Args:
        strength: of Coulomb's law, eV Å/e².
        own: potential of a unit charge's own smooth charge, 1/Å; background: of the neutralising background, e/Å.
    """
    order = weights.shape[3]
    size_x, size_y, size_z = potential.shape
    for i in range(begin, stop):
        at, gx, gy, gz = 0.0, 0.0, 0.0, 0.0
        for kx in range(order):
            plane = potential[_place(first[i, 0], kx, size_x)]
            at_x, gy_x, gz_x = 0.0, 0.0, 0.0
            for ky in range(order):
                row, at_y, gz_y = plane[_place(first[i, 1], ky, size_y)], 0.0, 0.0
                for kz in range(order):
                    value = row[_place(first[i, 2], kz, size_z)]
                    at_y += weights[0, i, 2, kz] * value
                    gz_y += weights[1, i, 2, kz] * value
                at_x += weights[0, i, 1, ky] * at_y
                gy_x += weights[1, i, 1, ky] * at_y
                gz_x += weights[0, i, 1, ky] * gz_y
            at += weights[0, i, 0, kx] * at_x
            gx += weights[1, i, 0, kx] * at_x
            gy += weights[0, i, 0, kx] * gy_x
            gz += weights[0, i, 0, kx] * gz_x
        a = atoms[i]
        level = strength * (at - own * q[a] - background)
        energy[a] += 0.5 * q[a] * level
        slope[a] += level
        gx, gy, gz, charge = gx * size_x, gy * size_y, gz * size_z, strength * q[a]
        for b in range(3):
            forces[a, b] -= charge * (gx * inverse[b, 0] + gy * inverse[b, 1] + gz * inverse[b, 2])
