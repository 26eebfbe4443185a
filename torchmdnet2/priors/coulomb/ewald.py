"""Long-range part of Ewald sums: by plane waves or a particle mesh, with sizes that are fixed in advance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.devices import total_memory
from ...neighbors.neighbor_list import safe_norm
from ...neighbors.pairs import MIN_DISTANCE, all_pairs, sum_pairs
from ...system import System

__all__ = [
    "EwaldPlan", "EwaldSum", "Mesh", "active_plan", "inverse", "mesh_potential", "mesh_sizes", "order_and_spacing",
    "require_all_or_none", "spline_moduli", "volume", "with_plans",
]  # fmt: skip

_POINT_BYTES = 80  # of memory for a point of a mesh, with the check at the first use
_LARGE_MESH = 2**32  # bytes


def inverse(cell: Tensor) -> Tensor:
    """Return the inverse of a cell [3, 3], whose columns are the reciprocal lattice vectors (without 2π).

    Unlike torch.linalg.inv it does not wait for a GPU.
    """
    a, b, c = cell.unbind(0)
    columns = [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
    return torch.stack(columns, 1) / (a * columns[0]).sum()


def volume(cell: Tensor) -> Tensor:
    """Return the volume of a cell [3, 3], right- or left-handed, without waiting for a GPU."""
    a, b, c = cell.unbind(0)
    return (a * torch.linalg.cross(b, c)).sum().abs()


# --- Smooth particle-mesh Ewald: the reciprocal part of an Ewald sum by fast Fourier transform, O(N log N) ---
#
# Source: U. Essmann et al., J. Chem. Phys. 103, 8577 (1995), Eqs. 3.6–4.7.


class Mesh(NamedTuple):
    """Sizes M_1, M_2, M_3 of a mesh, on the host and as [3] int64 on the device, and |b|² on half the mesh."""

    sizes: tuple[int, ...]
    numbers: Tensor
    moduli: Tensor

    @classmethod
    def of(cls, sizes: list[int], order: int, device: torch.device) -> Mesh:
        x, y, z = (spline_moduli(size, order, device) for size in sizes)
        moduli = x[:, None, None] * y[:, None] * z[: sizes[2] // 2 + 1]
        return cls(tuple(sizes), torch.tensor(sizes, device=device), moduli)


def order_and_spacing(accuracy: float, alpha: float) -> tuple[int, float]:
    """Return spline order p and mesh spacing h in Å for an accuracy relative to the self potential, about α.

    The error of the splines is below 0.05 (α h)^p (measured on random charges, p = 6 … 16). It is made four times
    smaller than requested, since forces have a larger error. The order grows with the number of digits, so that the
    work on atoms (p³ each) and on mesh points (1/h³ in total) stays balanced.
    """
    digits = round(-math.log10(accuracy))
    order = min(max(2 * (1 + digits // 2), 4), 16)
    return order, (5 * accuracy) ** (1 / order) / alpha


def mesh_potential(pos: Tensor, cell: Tensor, q: Tensor, alpha: float, order: int, mesh: Mesh) -> Tensor:
    """Return the potential of the smooth charges at the atoms, with the self potential: Σ_k of an Ewald sum.

    Up to the error of the mesh, energies are invariant under translation, and forces add up to zero.

    Args:
        pos: [N, 3] Å, float64.
        cell: [3, 3] Å, rows.
        q: [N, C] e.
        alpha: Ewald parameter, 1/Å.
        order: p, even.
        mesh: the mesh, whose spacing along the lattice vectors is at most the one of `order_and_spacing`.

    Returns:
        [N, C] e/Å, differentiable in positions, cell and charges.
    """
    sizes = mesh.sizes
    points, weights = _spread(pos @ inverse(cell), mesh, order)

    # spread the charges, transform, multiply by the influence function, transform back, interpolate
    on_mesh = q.new_zeros(math.prod(sizes), q.shape[1])
    on_mesh = on_mesh.index_add(0, points.flatten(), (weights[:, :, None] * q[:, None]).flatten(0, 1))
    transform = torch.fft.rfftn(on_mesh.unflatten(0, sizes), dim=(0, 1, 2))
    influence = _influence(cell, alpha, mesh)
    potential = torch.fft.irfftn(transform * influence[..., None], s=sizes, dim=(0, 1, 2)) * math.prod(sizes)
    at_points = potential.flatten(0, 2).index_select(0, points.flatten()).unflatten(0, points.shape)
    return (at_points * weights[:, :, None]).sum(1)


def mesh_sizes(cell: Tensor, order: int, spacing: float) -> list[int]:
    """Return M_1, M_2, M_3 for a cell [3, 3] in Å, with points at most `spacing` apart along the lattice vectors.

    Lattice vectors count, not distances of planes, since the phase of a wave k changes by k·a_i along a_i in any cell.

    Raises:
        ValueError: the mesh cannot fit into the memory, even if nothing else is there.
    """
    lengths = cell.detach().norm(dim=1).tolist()
    sizes = [_even_composite(max(order, math.ceil(length / spacing))) for length in lengths]
    needed = _POINT_BYTES * math.prod(sizes)
    if needed > _LARGE_MESH and needed > total_memory(cell.device):
        raise ValueError(
            f"the lattice vectors are {', '.join(f'{length:.5g}' for length in lengths)} Å long, and a mesh for "
            f"particle-mesh Ewald sums takes {needed / 1e9:.3g} GB, more than '{cell.device}' has: give a "
            "molecule in vacuum no cell, others a smaller one, or load the model with coulomb='dsf'"
        )
    return sizes


def _spread(fractional: Tensor, mesh: Mesh, order: int) -> tuple[Tensor, Tensor]:
    """Return the mesh points [N, p³] of each atom, and its spline weights there."""
    sizes, u = mesh.sizes, fractional * mesh.numbers
    first = torch.floor(u.detach())
    weights = _spline(u - first, order)  # [N, 3, p]: weight of the point first − k
    offset = torch.arange(order, device=u.device)
    index = (first.long()[:, :, None] - offset) % mesh.numbers[:, None]
    x, y, z = index.unbind(1)
    points = (x[:, :, None, None] * sizes[1] + y[:, None, :, None]) * sizes[2] + z[:, None, None, :]
    wx, wy, wz = weights.unbind(1)
    products = wx[:, :, None, None] * wy[:, None, :, None] * wz[:, None, None, :]
    return points.flatten(1), products.flatten(1)


def _spline(t: Tensor, order: int) -> Tensor:
    """Return cardinal B-splines M_p(t + k), k = 0 … p − 1, for t in [0, 1), [..., p] (Eq. 4.1)."""
    values = torch.stack([t, 1 - t], -1)  # M_2(t), M_2(t + 1)
    t = t[..., None]
    for n in range(3, order + 1):
        k = torch.arange(n, device=t.device)
        below = torch.nn.functional.pad(values, (1, 1))  # M_{n−1} at t + k − 1, k = 0 … n
        values = ((t + k) * below[..., 1:] + (n - t - k) * below[..., :-1]) / (n - 1)
    return values


def _influence(cell: Tensor, alpha: float, mesh: Mesh) -> Tensor:
    """Return 4π/V exp(−k²/4α²)/k² |b(k)|² on the half mesh of a real transform, [M_1, M_2, M_3/2 + 1]; 0 at k = 0."""
    sizes, device = mesh.sizes, cell.device
    n = [torch.fft.fftfreq(m, 1 / m, dtype=torch.float64, device=device) for m in sizes[:2]]
    n.append(torch.fft.rfftfreq(sizes[2], 1 / sizes[2], dtype=torch.float64, device=device))
    index = torch.stack(torch.meshgrid(*n, indexing="ij"), -1)
    k = 2 * math.pi * index @ inverse(cell).T
    k2 = (k * k).sum(-1)
    zero = k2 == 0
    k2 = torch.where(zero, 1.0, k2)
    strength = torch.where(zero, 0.0, torch.exp(-k2 / (4 * alpha * alpha)) / k2)
    return 4 * math.pi / volume(cell) * (strength * mesh.moduli)


def spline_moduli(size: int, order: int, device: torch.device) -> Tensor:
    """Return |b(n)|² = 1/|Σ_k M_p(k + 1) exp(2πi n k/M)|², [M] (Eq. 4.4)."""
    at_integers = _spline(torch.zeros(1, dtype=torch.float64, device=device), order)[0, 1:]  # M_p(1) … M_p(p − 1)
    n = torch.arange(size, dtype=torch.float64, device=device)
    phase = 2 * math.pi * n[:, None] * torch.arange(order - 1, device=device) / size
    total = (at_integers * torch.cos(phase)).sum(1) ** 2 + (at_integers * torch.sin(phase)).sum(1) ** 2
    return 1 / total


def _even_composite(size: int) -> int:
    """Return the next even number without prime factors above 7, for fast transforms."""
    while True:
        rest = size
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and size % 2 == 0:
            return size
        size += 1


# --- Ewald sums over a batch with sizes that are fixed in advance ---
#
# The number of waves or mesh points depends on the cell, which is known on the GPU only. A plan fixes these numbers, so
# that a sum never waits for the GPU and can be part of a CUDA graph. The plan holds for other cells as long as they
# fit; it records cells that do not.

_active: ContextVar[Mapping[int, EwaldPlan] | None] = ContextVar("_active", default=None)


@contextmanager
def with_plans(plans: Mapping[int, EwaldPlan]) -> Iterator[None]:
    """Use these plans, by the `id` of the module, for Ewald sums within the block."""
    before = _active.set(plans)
    try:
        yield
    finally:
        _active.reset(before)


def active_plan(module: Any) -> EwaldPlan | None:
    """Return the plan for a module within `with_plans`."""
    plans = _active.get()
    return None if plans is None else plans.get(id(module))


def require_all_or_none(system: System) -> Tensor:
    """Return which structures are periodic, [B] bool.

    Raises:
        ValueError: a structure is periodic in some directions only.
    """
    periodic = system.pbc.all(1)
    mixed = system.pbc.any(1) & ~periodic
    if bool(mixed.any()):
        raise ValueError(
            f"structure {int(mixed.nonzero()[0, 0])} is periodic in one or two directions only; Ewald summation needs "
            "all three (put enough vacuum between the layers) or none"
        )
    return periodic


class EwaldSum(NamedTuple):
    """Parameters of an Ewald sum.

    Attributes:
        mesh: True for a particle mesh, False for plane waves.
        alpha: Ewald parameter, 1/Å.
        k_max: largest wave vector, 1/Å.
        accuracy: relative accuracy of the mesh.
        factor: function that returns the damping f(d) of distances [E], for molecules.
    """

    mesh: bool
    alpha: float
    k_max: float
    accuracy: float
    factor: Callable[[Tensor], Tensor]


class EwaldPlan:
    """Sizes for a batch of structures with these atoms, periodicity and cells.

    Args:
        sums: parameters of the sum.
        system: N atoms in B structures; positions and charges have no effect.
        room: strain up to which other cells fit, for waves.
        mesh_room: the same for a mesh. Above 0, the mesh differs from the one of the cells themselves, and energies
            differ within the accuracy.

    Attributes:
        periodic: [B] bool, which structures are periodic.
        lacking: [1] bool, True if a cell did not fit since the plan was made, so that results are not accurate.
        unfit: [B, 3, 3] Å, the first cells that did not fit, else zeros.

    Raises:
        ValueError: a structure is periodic in some directions only.
    """

    def __init__(self, sums: EwaldSum, system: System, room: float = 0.0, mesh_room: float = 0.0):
        self.sums, self.periodic = sums, require_all_or_none(system)
        self._notes = room > 0 or mesh_room > 0
        self.lacking = torch.zeros(1, dtype=torch.bool, device=system.device)
        self.unfit = torch.zeros_like(system.cell, dtype=torch.float64)
        self._parts: list[_Part] = []
        for b, periodic in enumerate(self.periodic.tolist()):
            atoms = (system.batch == b).nonzero()[:, 0]
            cell = system.cell[b].detach().double()
            if atoms.numel() == 0:
                continue
            if not periodic:
                self._parts.append(_Molecule(sums, b, atoms, system))
            elif sums.mesh:
                self._parts.append(_OnMesh(sums, b, atoms, cell * (1 + mesh_room)))
            else:
                self._parts.append(_Waves(sums, b, atoms, cell, room))

    def energies(self, system: System, q: Tensor) -> Tensor:
        """Return long-range, self and background energies of atoms in cells, and all Coulomb energies in molecules.

        Args:
            system: the structures of the plan, with any positions and cells.
            q: [N, C] e, float64.

        Returns:
            [N] e²/Å, float64.
        """
        if self._notes:
            self._note(system)
        total = torch.zeros(system.num_atoms, dtype=torch.float64, device=system.device)
        for part in self._parts:
            pos, charges = system.pos.index_select(0, part.atoms).double(), q.index_select(0, part.atoms)
            total = total.index_add(0, part.atoms, part.energies(pos, system.cell[part.b].double(), charges))
        return total

    @torch.no_grad()
    def _note(self, system: System) -> None:
        """Store the first cells that do not fit."""
        cell = system.cell.detach().double()
        fit = [part.fits(cell[part.b]) for part in self._parts]
        if not fit:
            return
        # cells that are not finite do not count: they are refused elsewhere
        lacking = (~torch.stack(fit).all() & cell.isfinite().all()).reshape(1)
        self.unfit.copy_(torch.where(lacking & ~self.lacking, cell, self.unfit))
        self.lacking |= lacking


class _Part(ABC):
    """One structure of the batch.

    Attributes:
        b: its number.
        atoms: [n] its atoms.
    """

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor):
        self.sums, self.b, self.atoms = sums, b, atoms

    @abstractmethod
    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        """Return energies [n] e²/Å for positions [n, 3], a cell [3, 3] and charges [n, C], all float64."""

    @abstractmethod
    def fits(self, cell: Tensor) -> Tensor:
        """[] bool."""


class _Molecule(_Part):
    """A molecule: the sum over all pairs."""

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, system: System):
        super().__init__(sums, b, atoms)
        self._pairs = all_pairs(System(z=system.z[atoms], pos=system.pos[atoms].detach()))

    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        receiver, sender = self._pairs.edge_index
        d = safe_norm(pos.index_select(0, sender) - pos.index_select(0, receiver)).clamp(min=MIN_DISTANCE)
        products = (q.index_select(0, receiver) * q.index_select(0, sender)).sum(1)
        return sum_pairs(products * self.sums.factor(d) / d, self._pairs, len(pos))

    def fits(self, cell: Tensor) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=cell.device)


class _Periodic(_Part):
    def energies(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        alpha = self.sums.alpha
        background = math.pi / (volume(cell) * alpha * alpha) * q.sum(0)
        potential = self._potential(pos, cell, q)
        return (q * (potential - 2 * alpha / math.sqrt(math.pi) * q - background)).sum(1) / 2

    @abstractmethod
    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        """Return the potential of the smooth charges at the atoms, [n, C] e/Å."""


class _OnMesh(_Periodic):
    """A mesh of fixed size, whose spacing must not exceed what the accuracy allows."""

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, cell: Tensor):
        super().__init__(sums, b, atoms)
        self._order, self._spacing = order_and_spacing(sums.accuracy, sums.alpha)
        self._mesh = Mesh.of(mesh_sizes(cell, self._order, self._spacing), self._order, cell.device)

    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        return mesh_potential(pos, cell, q, self.sums.alpha, self._order, self._mesh)

    def fits(self, cell: Tensor) -> Tensor:
        return ~(cell.norm(dim=1) > self._mesh.numbers * (self._spacing * (1 + 1e-9))).any()


class _Waves(_Periodic):
    """Plane waves of one half of space with |k| ≤ k_max, selected from a longer list that is fixed for a cell A₀.

    The wave n of a cell A has k = 2π A⁻¹ n. It is in the list of A₀ because |A₀⁻¹ n| ≤ ‖A₀⁻¹ A‖ |A⁻¹ n|.
    """

    def __init__(self, sums: EwaldSum, b: int, atoms: Tensor, cell: Tensor, room: float):
        super().__init__(sums, b, atoms)
        self._inverse, self._room = inverse(cell), room
        k_max = sums.k_max * (1 + room)
        reach = (k_max * cell.norm(dim=1) / (2 * math.pi)).floor().long().tolist()
        index = torch.cartesian_prod(*[torch.arange(-n, n + 1, device=cell.device) for n in reach])
        n0, n1, n2 = index.unbind(1)
        half = (n0 > 0) | ((n0 == 0) & ((n1 > 0) | ((n1 == 0) & (n2 > 0))))
        index = index[half].double()
        self._index = index[self._waves(index, cell).norm(dim=1) <= k_max]

    @staticmethod
    def _waves(index: Tensor, cell: Tensor) -> Tensor:
        return 2 * math.pi * index @ inverse(cell).T

    def _potential(self, pos: Tensor, cell: Tensor, q: Tensor) -> Tensor:
        k = self._waves(self._index, cell)
        k2 = (k * k).sum(1)
        # waves of one half of space count twice, for both halves
        strength = 8 * math.pi / volume(cell) * torch.exp(-k2 / (4 * self.sums.alpha**2)) / k2
        strength = torch.where(k2.detach() <= self.sums.k_max**2 * (1 + 1e-12), strength, 0.0)
        phase = pos @ k.T
        cos, sin = torch.cos(phase), torch.sin(phase)
        return cos @ (strength[:, None] * (cos.T @ q)) + sin @ (strength[:, None] * (sin.T @ q))

    def fits(self, cell: Tensor) -> Tensor:
        strain = (self._inverse @ cell).abs()
        # the norm is at most √(‖·‖₁ ‖·‖∞)
        return ~(strain.sum(0).amax() * strain.sum(1).amax() > (1 + self._room) ** 2 + 1e-12)
