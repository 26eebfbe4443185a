"""Springs on bonds and angles, fitted to a potential's forces: the inner potential of multiple time steps.

They take over nearly all of the fast forces and cost next to nothing; the rest changes slowly. Averages do not depend
on the fit, which only decides how long the outer time step can be.

The energy of a bond is a function of its length, that of an angle a function of the scalar product of its two bonds,
which needs no root and is smooth at straight angles. Springs between the ends of angles would stretch the bonds, too,
and take over only a quarter of the bending force of water.

Shapes: N atoms in B replicas of n atoms each, P bonds and Q angles of a replica in T kinds, M bonds and A angles of an
atom at most.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ase.data import atomic_masses
from torch import Tensor

from ..adapters.arrays import Structure
from ..adapters.isolated import made_whole
from ..adapters.model import open_model
from ..core.stated import whole_number
from ..engine.bound import BoundStep
from ..errors import BadData
from ..evaluator import Evaluator
from ..neighbors import neighbor_list
from ..potential.potential import Potential, Result
from ..system import System
from ..units import KJ_MOL, factor
from .guard import Bonds

if TYPE_CHECKING:
    import openmm
    from openmm.app import Topology

__all__ = ["SpringStep", "Springs", "add_springs"]

ORDER = 4
"""Terms of the derivative of a bond's energy: 1, x, x², x³, with x the length minus the mean length."""
OF_ANGLE = 2
"""Terms of the derivative of an angle's energy: 1 and x, with x the scalar product minus its mean."""

_WIDTH = 0.04  # Å, of the random displacements of the fit
REACH = 0.25
"""Å by which a length may differ from the usual one before the force becomes constant."""
_FRAMES, _ATOMS = 16, 1000  # of a fit at least: bonds of a kind that is there once need as many frames


class Springs:
    """Springs on bonds and angles, in kinds by elements and neighbors.

    Args:
        start: one structure, on the CPU; its bonds get springs.

    Attributes:
        pairs [P, 2], shift [P, 3] (cells between the second atom and its image), kind [P]: int64, of the bonds.
        triples [Q, 3] (the vertex in the middle), shifts [Q, 2, 3] (cells of the ends), bend [Q]: int64, of the angles.
        usual: [T] Å or Å², the mean of each kind at the start.
        coefficients: [T, ORDER] of the derivative of the energy in powers of (value − usual value): eV/Å, …, those of
            angles from eV/Å² on and OF_ANGLE of them; zeros before `fit`.

    Raises:
        BadData: the structure has no bonds.
    """

    def __init__(self, start: System):
        self.start = start
        bonds = Bonds(start)
        if not len(bonds.pairs):
            raise BadData("inner springs: the structure has no bonds between nonmetals; give a model as inner")
        self.pairs, self.shift = torch.as_tensor(bonds.pairs), torch.as_tensor(bonds.shift).to(torch.int64)
        self.kind, self.triples, self.shifts, self.bend = _kinds_of(start, bonds)
        kinds, (lengths, products) = torch.cat([self.kind, self.bend]), self._values(start.pos, start.cell[0])[:2]
        values = torch.cat([lengths, products])
        counts = torch.bincount(kinds)
        self.usual = torch.zeros(len(counts), dtype=torch.float64).index_add(0, kinds, values) / counts
        self.coefficients = torch.zeros(len(counts), ORDER, dtype=torch.float64)

    @property
    def identity(self) -> str:
        """Checksum of which atoms have springs."""
        parts = self.pairs, self.shift, self.kind, self.triples, self.shifts, self.bend
        return f"springs {hashlib.sha256(b''.join(part.numpy().tobytes() for part in parts)).hexdigest()}"

    def facts(self) -> dict[str, Any]:
        """Return what was fitted, as plain data."""
        return {"usual": self.usual.tolist(), "coefficients": self.coefficients.tolist()}

    def take(self, facts: Mapping[str, Any]) -> None:
        """Take over the result of an earlier fit."""
        self.usual.copy_(torch.tensor(facts["usual"], dtype=torch.float64))
        self.coefficients.copy_(torch.tensor(facts["coefficients"], dtype=torch.float64))

    def fit(self, potential: Potential) -> float:
        """Fit the coefficients by least squares to the forces on randomly displaced atoms.

        Args:
            potential: on any device.

        Returns:
            The part of the forces that remains (ratio of root mean squares, weighted alike).
        """
        start, random = self.start, torch.Generator().manual_seed(0)
        n, cell = start.num_atoms, start.cell[0].double()
        size = self.coefficients.numel()
        left, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        weight = torch.as_tensor(atomic_masses[start.z.numpy()]).rsqrt().repeat_interleave(3)
        evaluator, total = Evaluator(potential), 0.0
        for _ in range(max(_FRAMES, -(-_ATOMS // n))):
            pos = start.pos.double() + _WIDTH * torch.randn(n, 3, generator=random, dtype=torch.float64)
            forces = evaluator(start.replace(pos=pos).to(potential.device)).forces
            assert forces is not None
            forces = weight * forces.double().cpu().flatten()
            design = weight[:, None] * self._design(pos, cell)
            left += design.T @ design
            right += design.T @ forces
            total += float(forces.square().sum())
        small = 1e-6 * left.diagonal().mean() * torch.eye(size, dtype=torch.float64)
        found = torch.linalg.solve(left + small, right)
        self.coefficients.copy_(found.view(-1, ORDER) / REACH ** torch.arange(ORDER))
        rest = total + float(found @ (left @ found - 2 * right))
        return (max(rest, 0.0) / total) ** 0.5

    def _values(self, pos: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return lengths [P] in Å, products [Q] in Å²; vectors of bonds [P, 3] and from each vertex [Q, 2, 3]."""
        pos, cell = pos.double(), cell.double()
        i, j = self.pairs.T
        along = pos[j] - pos[i] + self.shift.double() @ cell
        sides = pos[self.triples[:, [0, 2]]] - pos[self.triples[:, 1:2]] + self.shifts.double() @ cell
        return along.norm(dim=1), sides.prod(1).sum(1), along, sides

    def _design(self, pos: Tensor, cell: Tensor) -> Tensor:
        """Return the forces per coefficient in units of REACH, [3n, T·ORDER]."""
        lengths, products, along, sides = self._values(pos, cell)
        design = torch.zeros(len(pos), 3, self.coefficients.numel(), dtype=torch.float64)
        axis = torch.arange(3)[None, :, None]

        def add(atom: Tensor, direction: Tensor, x: Tensor, kind: Tensor, terms: int) -> None:
            powers = (x / REACH)[:, None] ** torch.arange(terms)
            place = kind[:, None] * ORDER + torch.arange(terms)
            values = direction[:, :, None] * powers[:, None]
            design.index_put_((atom[:, None, None], axis, place[:, None]), values, accumulate=True)

        x = (lengths - self.usual[self.kind]).clamp(-REACH, REACH)
        for atom, sign in ((self.pairs[:, 0], 1.0), (self.pairs[:, 1], -1.0)):
            add(atom, sign * along / lengths[:, None], x, self.kind, ORDER)
        x = products - self.usual[self.bend]
        for atom, direction in zip(self.triples.T, (-sides[:, 1], sides.sum(1), -sides[:, 0]), strict=True):
            add(atom, direction, x, self.bend, OF_ANGLE)
        return design.view(3 * len(pos), -1)


def _kinds_of(start: System, bonds: Bonds) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the kinds of the bonds; triples, shifts and kinds of the angles."""
    z = start.z.tolist()
    near: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in z]
    for (i, j), shift in zip(bonds.pairs.tolist(), bonds.shift.tolist(), strict=True):
        near[i].append((j, tuple(shift)))
        near[j].append((i, tuple(-s for s in shift)))
    around = [(z[i], tuple(sorted(z[j] for j, _ in own))) for i, own in enumerate(near)]
    of_bonds: list[tuple[Any, ...]] = [tuple(sorted((around[i], around[j]))) for i, j in bonds.pairs.tolist()]
    # none between an atom and its own image: a step knows the vertex of an angle by its number
    angles = [
        (i, m, j) for m, own in enumerate(near) for i, j in itertools.combinations(own, 2) if m not in (i[0], j[0])
    ]
    of_angles: list[tuple[Any, ...]] = [
        (around[m], *sorted((around[i], around[j]))) for (i, _), m, (j, _) in angles
    ]  # fmt: skip
    number = {kind: t for t, kind in enumerate([*sorted(set(of_bonds)), *sorted(set(of_angles))])}
    triples = torch.tensor([(i, m, j) for (i, _), m, (j, _) in angles], dtype=torch.int64).view(-1, 3)
    shifts = torch.tensor([(a, b) for (_, a), _, (_, b) in angles], dtype=torch.int64).view(-1, 2, 3)
    kind, bend = (torch.tensor([number[k] for k in kinds], dtype=torch.int64) for kinds in (of_bonds, of_angles))
    return kind, triples, shifts, bend


class SpringStep(BoundStep):
    """The forces of springs in a batch of replicas, for inner steps. They need no energies: none are computed.

    Args:
        springs: of one replica, fitted.
        system: N atoms in B replicas.
        launch: the kernel; None: PyTorch.

    Attributes:
        partner [N, M] int32 (−1: none), shift [N, M, 3] float64, kind [N, M] int32: the bonds of each atom.
        middle, first, second [N, A] int32 (−1: none), shifts [N, A, 2, 3] float64, bend [N, A] int32: the angles of
            each atom, which is their vertex `middle` or their end `first`.
        usual, coefficients: of the springs, on the device.
    """

    def __init__(self, springs: Springs, system: System, launch: Callable[[SpringStep], None] | None = None):
        device, B = system.device, system.num_systems
        n = system.num_atoms // B
        bonds: list[list[tuple[Any, ...]]] = [[] for _ in range(n)]
        rows = zip(springs.pairs.tolist(), springs.shift.tolist(), springs.kind.tolist(), strict=True)
        for (i, j), shift, kind in rows:
            bonds[i].append((j, shift, kind))
            bonds[j].append((i, [-s for s in shift], kind))
        angles: list[list[tuple[Any, ...]]] = [[] for _ in range(n)]
        rows = zip(springs.triples.tolist(), springs.shifts.tolist(), springs.bend.tolist(), strict=True)
        for (i, m, j), (a, b), kind in rows:
            for atom, given in ((i, (m, i, j, [a, b])), (m, (m, i, j, [a, b])), (j, (m, j, i, [b, a]))):
                angles[atom].append((*given, kind))

        def table(rows: list[list[tuple[Any, ...]]], none: tuple[Any, ...]) -> list[Tensor]:
            """Return a tensor on the device for each entry of a row, for all replicas; numbers as int32."""
            most = max(1, *map(len, rows))
            padded = [row + [none] * (most - len(row)) for row in rows]
            columns = zip(*(zip(*row, strict=True) for row in padded), strict=True)
            found = []
            for column, empty in zip(columns, none, strict=True):
                kind = torch.int32 if isinstance(empty, int) else torch.float64
                values = torch.tensor(column, dtype=kind)
                found.append(values.repeat(B, *[1] * (values.dim() - 1)).to(device))
            return found

        def everywhere(atoms: Tensor) -> Tensor:
            """Return the atoms of each replica from those of the first one."""
            ahead = n * torch.arange(B, dtype=torch.int32, device=device).repeat_interleave(n)[:, None]
            return torch.where(atoms < 0, -1, atoms + ahead)

        partner, self.shift, self.kind = table(bonds, (-1, [0] * 3, 0))
        middle, first, second, self.shifts, self.bend = table(angles, (-1, -1, -1, [[0] * 3] * 2, 0))
        self.partner = everywhere(partner)
        self.middle, self.first, self.second = map(everywhere, (middle, first, second))
        self.usual, self.coefficients = springs.usual.to(device), springs.coefficients.to(device)
        self._batch = system.batch
        self.pos, self.cell = system.pos.detach().double().clone(), system.cell.detach().double().clone()
        self.forces = torch.zeros_like(self.pos)
        self.energy = torch.zeros(B, dtype=torch.float64, device=device)
        self.atom_energies = torch.zeros(len(self.pos), dtype=torch.float64, device=device)
        self.stress = self.charges = None
        self.reach = torch.full((1,), REACH, dtype=torch.float64, device=device)
        self.launch = launch
        self.replay()

    @torch.no_grad()
    def replay(self) -> None:
        if self.launch is not None:
            self.launch(self)
            return
        pos, cell = self.pos, self.cell[self._batch]
        none = self.partner < 0
        vectors = pos[self.partner.clamp(min=0)] - pos[:, None] + torch.einsum("nmk,nkc->nmc", self.shift, cell)
        d = vectors.norm(dim=2).masked_fill(none, 1.0)
        x = (d - self.usual[self.kind]).clamp(-REACH, REACH)
        c = self.coefficients[self.kind]
        slope = (c[..., 0] + x * (c[..., 1] + x * (c[..., 2] + x * c[..., 3]))).masked_fill(none, 0.0)
        torch.sum((slope / d)[:, :, None] * vectors, 1, out=self.forces)
        ends = torch.stack([self.first, self.second], 2).clamp(min=0)
        sides = pos[ends] - pos[self.middle.clamp(min=0)][:, :, None]
        sides += torch.einsum("naek,nkc->naec", self.shifts, cell)
        c = self.coefficients[self.bend]
        slope = c[..., 0] + c[..., 1] * (sides.prod(2).sum(2) - self.usual[self.bend])
        vertex = (self.middle == torch.arange(len(pos), device=pos.device)[:, None])[:, :, None]
        direction = torch.where(vertex, sides.sum(2), -sides[:, :, 1])
        self.forces += torch.sum(slope.masked_fill(self.middle < 0, 0.0)[:, :, None] * direction, 1)

    def check(self) -> bool:
        return True

    def fetch(self) -> Result:
        return Result(self.energy.cpu(), self.forces.cpu(), None, self.atom_energies.cpu())

    def properties(self) -> Mapping[str, Tensor]:
        return {}


# --- The same springs as forces of OpenMM ---

_NM = factor("length", "nm")  # Å
_ALL = np.ones(3, dtype=bool)


_NAME = "TorchMDNet2 springs"
_FARTHEST = 3.0  # Å, beyond which there are no bonds
_EXAMPLE = "modeller.positions, or with the unit, as in atoms.positions * openmm.unit.angstrom"


def _lengths(positions: Any, count: int) -> np.ndarray:
    """Return positions [count, 3] in Å from a Quantity or from numbers in nm, or raise BadData."""
    import openmm

    try:
        if openmm.unit.is_quantity(positions):
            positions = positions.value_in_unit(openmm.unit.nanometer)
        positions = [p.value_in_unit(openmm.unit.nanometer) if openmm.unit.is_quantity(p) else p for p in positions]
        pos = np.array(positions, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadData(f"positions: lengths [N, 3] are needed; give {_EXAMPLE} ({error})") from None
    if pos.shape != (count, 3):
        shape = " × ".join(map(str, pos.shape))
        raise BadData(
            f"positions of all {count} atoms of the topology are needed, [{count}, 3], got {shape} numbers; "
            f"give {_EXAMPLE}"
        )
    if not np.isfinite(pos).all():
        raise BadData(f"positions: atom {int(np.argmin(np.isfinite(pos).all(1)))} has one that is not finite")
    return pos * _NM


def add_springs(
    system: openmm.System,
    model: str | os.PathLike | Potential,
    topology: Topology,
    positions: Any,
    atoms: Iterable[int] | None = None,
    periodic: bool | None = None,
    groups: tuple[int, int] = (0, 1),
    charge: int | None = None,
    spin: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    level: str | None = None,
) -> None:
    """Add springs on bonds and angles to a group of fast forces, and subtract them in the group of the model.

    For multiple time steps: `openmm.MTSIntegrator(2 * femtosecond, [(0, 1), (1, 4)])` evaluates the model and minus the
    springs every 2 fs, and the springs, which are forces of OpenMM fitted to those of the model, every 0.5 fs. Their
    sum is zero, so that energies and averages are those of the model.

    Args:
        system, model, topology, atoms, periodic: as for `add_force`, which adds the model itself to the first group.
        positions: [N, 3] of all atoms of the topology, near a minimum: a Quantity, such as `modeller.positions` or
            `atoms.positions * openmm.unit.angstrom`; plain numbers are nm. They define the bonds.
        groups: force group of the model, and that of the springs.
        charge, spin, device, dtype, allow_untrained_charge, level: as for `create_force`.

    Raises:
        BadData: there are no bonds, as where Å are given as plain numbers, the atoms have springs already, the box is
            too small for nearest images, or the positions are not those of the topology, or no lengths; and as
            `add_force`. The System has not been changed then.
        FileNotFoundError, BadCheckpoint, UnknownElement, UntrainedCharge: as `create_force`.
        ValueError: as `create_force`; and the groups are equal.
    """
    import openmm

    from ..adapters import openmm as adapter

    everyone = list(topology.atoms())
    part = None if atoms is None else list(adapter.indices_of(atoms, len(everyone)))
    chosen = list(range(len(everyone))) if part is None else part
    adapter.require_same_atoms(system, topology, part)
    if groups[0] == groups[1]:
        raise ValueError(f"groups: the model and the springs need different force groups, not both {groups[0]}")
    if periodic is None:
        periodic = adapter.has_box(topology) or system.usesPeriodicBoundaryConditions()
    pos = _lengths(positions, len(everyone))[chosen]
    numbers = np.array(adapter.atomic_numbers(everyone, chosen))
    box = np.array([list(v._value) for v in system.getDefaultPeriodicBoxVectors()]) * _NM
    cell, pbc = torch.as_tensor(box * periodic)[None], torch.full((1, 3), bool(periodic))
    # two atoms of a bond may lie at opposite faces
    alone = System(z=torch.as_tensor(numbers), pos=torch.as_tensor(pos), cell=cell, pbc=pbc)
    if len(chosen) > 1 and not neighbor_list(alone, _FARTHEST).num_edges:
        raise BadData(
            f"positions: no two atoms are closer than {_FARTHEST:g} Å, so that there are no bonds for springs; plain "
            f"numbers are nm, so give {_EXAMPLE}"
        )
    in_cell = bool(periodic and part is None)  # springs of a part are fitted in vacuum
    if periodic and not in_cell:
        pos = made_whole(pos, box, _ALL)
    for force in system.getForces():
        if force.getName() == _NAME and isinstance(force, openmm.CustomBondForce):
            if not {*chosen}.isdisjoint(force.getBondParameters(0)[:2]):
                raise BadData("springs: these atoms of the System have springs already")
    total = adapter.total_charge([everyone[i] for i in chosen], charge)
    start = Structure(numbers, pos, box * in_cell, np.full(3, in_cell), total, whole_number(spin, "spin"))
    springs = Springs(start.to_system(torch.device("cpu")))
    ends = pos[springs.triples[:, ::2].numpy()] + springs.shifts.numpy() @ start.cell
    span = np.linalg.norm(np.diff(ends, axis=1), axis=2).max(initial=0.0)
    if periodic and span > 0.4 / np.linalg.norm(np.linalg.inv(box), axis=0).max():
        raise BadData(f"springs: the box must be wider than 2.5 times the span of an angle, {span:.2f} Å")
    springs.fit(open_model(model, device, dtype, allow_untrained_charge, None, level)[0])

    bond = "sign * (area + (d - x) * (c0 + x * (c1 + x * (c2 + x * c3))));"
    bond += "area = x * (c0 + x * (c1 / 2 + x * (c2 / 3 + x * c3 / 4)));"
    bond += f"x = max(-{REACH}, min({REACH}, d)); d = {_NM} * r - usual"
    angle = "sign * x * (c0 + x * c1 / 2); "
    # the scalar product by three distances, which are those of nearest images
    angle += f"x = {_NM**2 / 2} * (distance(p1, p2)^2 + distance(p2, p3)^2 - distance(p1, p3)^2) - usual"
    constants = torch.column_stack([springs.usual, springs.coefficients / KJ_MOL]).tolist()
    for group, sign in zip(groups, (-1, 1), strict=True):
        for force, terms, members, kinds in (
            (openmm.CustomBondForce(bond.replace("sign", str(sign))), ORDER, springs.pairs, springs.kind),
            (
                openmm.CustomCompoundBondForce(3, angle.replace("sign", str(sign))),
                OF_ANGLE,
                springs.triples,
                springs.bend,
            ),
        ):
            for name in ("usual", *(f"c{k}" for k in range(terms))):
                force.addPerBondParameter(name)
            for row, kind in zip(members.tolist(), kinds.tolist(), strict=True):
                particles = [chosen[i] for i in row]
                force.addBond(*(particles if terms == ORDER else [particles]), constants[kind][: terms + 1])
            force.setName(_NAME)
            force.setForceGroup(group)
            force.setUsesPeriodicBoundaryConditions(bool(periodic))
            if force.getNumBonds():
                system.addForce(force)
