"""System: one or several atomic structures in one batch.

Shapes: N atoms of all structures together, B structures.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .core.stated import cell_of, charge_and_spin
from .errors import BadData

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["System", "is_transformed", "outside_transforms"]

outside_transforms = torch._C._DisableFuncTorch
"""A context without the transforms of `torch.func`, for tensors that are kept between calls, which could not be used
outside of the transform, and for those that NumPy reads."""


@dataclass(eq=False)
class System:
    """A batch of structures, each with positions, cell, charge and spin.

    Only `z` and `pos` are needed: the default is one neutral molecule in vacuum.

    Args:
        z: atomic numbers, [N] integers.
        pos: positions in Å, [N, 3]; atoms may lie anywhere, also outside the cell.
        batch: index of the structure that each atom belongs to, [N] integers in 0…B−1 (default: all 0).
        cell: lattice vectors in Å as rows, [B, 3, 3] or [3, 3]; zeros where not periodic (default: zeros).
        pbc: periodic along each lattice vector, [B, 3] or [3] booleans
            (default: along the non-zero lattice vectors).
        charge: total charge in e, [B] or a number (default: 0).
        spin: spin multiplicity 2S+1, [B] or a number (default: 0, meaning not given).

    Raises:
        ValueError: shapes do not fit together. Values are checked by `validate()`.
    """

    z: Tensor
    pos: Tensor
    batch: Tensor = None  # type: ignore[assignment]
    cell: Tensor = None  # type: ignore[assignment]
    pbc: Tensor = None  # type: ignore[assignment]
    charge: Tensor = None  # type: ignore[assignment]
    spin: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        pos = _real(_as_tensor(self.pos), "pos")
        if not pos.is_floating_point():
            pos = pos.to(torch.get_default_dtype())
        device, dtype = pos.device, pos.dtype
        try:
            z = torch.as_tensor(self.z, device=device)
        except (TypeError, ValueError):
            raise ValueError(
                f"z must be integers (atomic numbers), got {self.z!r:.60}; symbols are read by "
                "System.from_ase(ase.Atoms(symbols, positions))"
            ) from None
        if z.is_floating_point() or z.is_complex() or z.dtype == torch.bool:
            raise ValueError(f"z must be integers (atomic numbers), got {z.dtype}")
        if z.ndim != 1 or pos.shape != (z.shape[0], 3):
            raise ValueError(f"z must be [N] and pos [N, 3], got {tuple(z.shape)} and {tuple(pos.shape)}")
        self.z, self.pos = z.long(), pos

        num = self._count_systems(device)
        if self.batch is None:
            self.batch = torch.zeros_like(self.z)
        else:
            self.batch = _whole(torch.as_tensor(self.batch, device=device), "batch").long()
        if self.batch.shape != self.z.shape:
            raise ValueError(f"batch must be [N] = {tuple(self.z.shape)}, got {tuple(self.batch.shape)}")

        given_cell = self.cell is not None
        cell = pos.new_zeros(num, 3, 3)
        if given_cell:
            cell = _real(torch.as_tensor(self.cell, device=device), "cell").to(dtype)
        if cell.shape == (3, 3):
            cell = cell.expand(num, 3, 3)
        if self.pbc is None:
            pbc = (cell != 0).any(-1) if given_cell else torch.zeros(num, 3, dtype=torch.bool, device=device)
        else:
            pbc = torch.as_tensor(self.pbc, device=device).bool()
            pbc = pbc.expand(num, 3) if pbc.shape in ((), (3,)) else pbc
        self.cell, self.pbc = cell, pbc
        self.charge = _per_system(self.charge, num, dtype, device, "charge")
        self.spin = _per_system(self.spin, num, torch.long, device, "spin")
        for name, shape in (("cell", (num, 3, 3)), ("pbc", (num, 3))):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(getattr(self, name).shape)}")

    def _count_systems(self, device: torch.device) -> int:
        """Return B, from another argument if possible: reading the batch would stall a GPU."""
        if self.batch is None:
            return 1
        sized: list[tuple[Any, int]] = [(self.cell, 3), (self.pbc, 2), (self.charge, 1), (self.spin, 1)]
        for value, ndim in sized:
            if value is not None and _as_tensor(value).ndim == ndim:
                return len(value)
        batch = _as_tensor(self.batch)
        return int(batch.max()) + 1 if batch.numel() else 0

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def num_atoms(self) -> int:
        """N, atoms of all structures together."""
        return self.z.shape[0]

    @property
    def num_systems(self) -> int:
        """B, structures in the batch."""
        return self.cell.shape[0]

    @property
    def atom_counts(self) -> Tensor:
        """[B] int64, number of atoms of each structure; computed without waiting for the device."""
        zeros = torch.zeros(self.num_systems, dtype=torch.long, device=self.device)
        return zeros.index_add(0, self.batch, torch.ones_like(self.batch))

    @property
    def volume(self) -> Tensor:
        """Cell volumes in Å³, [B]; 0 where a lattice vector is zero."""
        a, b, c = self.cell.unbind(1)
        return (a * torch.linalg.cross(b, c)).sum(1).abs()  # torch.linalg.det would wait for a GPU

    @property
    def device(self) -> torch.device:
        return self.pos.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pos.dtype

    # --- conversions ---------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> System:
        """Return the same structures on another device or in another floating-point type (tensors shared where
        possible).

        Args:
            device: None keeps it.
            dtype: of positions and cells; None keeps it.
        """
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        if dtype is not None:
            for name in ("pos", "cell", "charge"):
                moved[name] = moved[name].to(dtype)
        return System(**moved)

    def replace(self, **changes: Any) -> System:
        """Return a copy with some fields replaced; the others are shared."""
        return replace(self, **changes)

    def at(self, pos: Tensor) -> System:
        """Return the same structures at other positions, without the checks of `replace`, which take longer than a
        small step.

        Args:
            pos: [N, 3] Å, of the present type and device.
        """
        found = object.__new__(type(self))  # copy.copy takes five times as long
        vars(found).update(vars(self), pos=pos)
        return found

    def detach(self) -> System:
        """Return the same structures without derivatives, as searches and checks read them.

        Tensors share their memory. Those that `torch.func` has wrapped are unwrapped.

        Raises:
            ValueError: within `torch.vmap` over structures, which have no common list of neighbors.
        """
        if not is_transformed() and not any(t.requires_grad for t in (self.pos, self.cell, self.charge)):
            return self
        found = copy.copy(self)
        vars(found).update({name: _plain(name, value) for name, value in vars(self).items()})
        return found

    @classmethod
    def from_ase(
        cls,
        atoms: Atoms | Sequence[Atoms],
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        charge: int | None = None,
        spin: int | None = None,
    ) -> System:
        """Return structures from ASE, with the total charge and multiplicity that they state, else 0.

        Statements are entries of `atoms.info` ("charge", "total_charge", …; "spin", "multiplicity", …), and sums of the
        initial charges and, of molecules, of the initial magnetic moments (see `stated.statements`). A cell of
        1 × 1 × 1 Å, which PDB files have if there is no cell, is refused.

        Args:
            atoms: one ase.Atoms or a sequence of them; they are not changed.
            dtype: floating-point type of positions and cells.
            device: where the tensors go.
            charge: total charge of each structure, e, which must agree with what it states; None: as it states.
            spin: multiplicity of each, likewise.

        Raises:
            BadData: a structure has no atoms, or the dummy cell of a PDB file; a charge or spin is not a whole number,
                or two statements, or a statement and what is given, differ; positions are not in Å by an entry of
                `info`.
            TypeError: something else is given.
        """
        import numpy as np

        several = isinstance(atoms, Iterable) and not hasattr(atoms, "get_positions")
        frames: list[Any] = list(atoms) if several else [atoms]
        for frame in frames:
            if not hasattr(frame, "get_positions"):
                kind = type(atoms if isinstance(atoms, str) else frame).__name__
                raise TypeError(
                    f"System.from_ase takes ase.Atoms or a list of them, got {kind}; ase.io.read reads files"
                )
        sizes = [len(a) for a in frames]
        pos = np.concatenate([a.get_positions() for a in frames]) if frames else np.zeros((0, 3))
        z = np.concatenate([a.get_atomic_numbers() for a in frames]) if frames else np.zeros(0, dtype=int)
        if 0 in sizes and several:
            raise BadData(f"structure {sizes.index(0)} of the list has no atoms: remove it")
        cells = [cell_of(a) for a in frames]
        cell = np.array([cell for cell, _ in cells]).reshape(-1, 3, 3)
        pbc = np.array([pbc for _, pbc in cells]).reshape(-1, 3)
        states = [charge_and_spin(a, charge, spin) for a in frames]
        return cls(
            z=torch.as_tensor(z, dtype=torch.long, device=device),
            pos=torch.as_tensor(pos, dtype=dtype, device=device),
            batch=torch.as_tensor(np.repeat(np.arange(len(frames)), sizes), dtype=torch.long, device=device),
            cell=torch.as_tensor(cell, dtype=dtype, device=device),
            pbc=torch.as_tensor(pbc, device=device),
            charge=torch.tensor([charge or 0 for charge, _ in states], dtype=dtype, device=device),
            spin=torch.tensor([spin or 0 for _, spin in states], dtype=torch.long, device=device),
        )

    def to_ase(self) -> list[Atoms]:
        """Return one ase.Atoms per structure, charge and spin in `info` where they are not 0."""
        from ase import Atoms

        frames = []
        for b in range(self.num_systems):
            mask = self.batch == b
            given = {"charge": float(self.charge[b]), "spin": int(self.spin[b])}
            info = {key: int(value) if value == int(value) else value for key, value in given.items() if value}
            frames.append(
                Atoms(
                    numbers=self.z[mask].cpu().numpy(),
                    positions=self.pos[mask].detach().cpu().double().numpy(),
                    cell=self.cell[b].detach().cpu().double().numpy(),
                    pbc=self.pbc[b].cpu().numpy(),
                    info=info,
                )
            )
        return frames

    @classmethod
    def concatenate(cls, systems: Sequence[System]) -> System:
        """Return one batch that holds the structures of several, in order.

        Args:
            systems: at least one; any sizes and compositions.

        Raises:
            ValueError: no system is given.
        """
        if not systems:
            raise ValueError("System.concatenate needs at least one system")
        joined = {f.name: torch.cat([getattr(s, f.name) for s in systems]) for f in fields(cls) if f.name != "batch"}
        batches, first = [], 0
        for s in systems:
            batches.append(s.batch + first)
            first += s.num_systems
        return cls(batch=torch.cat(batches), **joined)

    def select(self, chosen: Tensor) -> System:
        """Return some of the structures, in order.

        Args:
            chosen: [B] bool.
        """
        atoms = chosen[self.batch].nonzero()[:, 0]
        structures = chosen.nonzero()[:, 0]
        number = chosen.long().cumsum(0) - 1
        each = (value[structures] for value in (self.cell, self.pbc, self.charge, self.spin))
        return System(self.z[atoms], self.pos[atoms], number[self.batch[atoms]], *each)

    def split(self) -> list[System]:
        """Return each structure as a batch of one; tensors share their memory.

        The batch must ascend: atoms of a structure lie together.
        """
        counts = self.atom_counts.tolist()
        zeros, found = torch.zeros_like(self.batch), []
        for k, (z, pos, batch) in enumerate(
            zip(self.z.split(counts), self.pos.split(counts), zeros.split(counts), strict=True)
        ):
            one = copy.copy(self)
            each = {name: getattr(self, name)[k : k + 1] for name in ("cell", "pbc", "charge", "spin")}
            vars(one).update(z=z, pos=pos, batch=batch, **each)
            found.append(one)
        return found

    # --- checks --------------------------------------------------------------------------------------------------

    def validate(self) -> System:
        """Check the values: finite numbers, batch indices in range, usable cells. Waits for the device.

        Fields that were assigned to are checked for their shape too.

        Returns:
            self.

        Raises:
            ValueError: names the first atom or structure at fault.
        """
        n, b = self.num_atoms, len(self.pbc)
        shapes = {"pos": (n, 3), "batch": (n,), "cell": (b, 3, 3), "pbc": (b, 3), "charge": (b,), "spin": (b,)}
        for name, shape in shapes.items():
            given = tuple(getattr(self, name).shape)
            if given != shape:
                raise ValueError(f"{name} must have shape {shape}, and {given} was assigned")
        _first(~torch.isfinite(self.pos).all(1), "atom {}: its position is not finite (NaN or infinite)")
        _first(~torch.isfinite(self.cell).all(2).all(1), "structure {}: its cell is not finite (NaN or infinite)")
        _first(~torch.isfinite(self.charge), "structure {}: its charge is not finite (NaN or infinite)")
        _first((self.batch < 0) | (self.batch >= self.num_systems), "atom {}: its batch index is out of range")
        _first(self.spin < 0, "structure {}: its spin multiplicity is negative")
        zero = (self.cell == 0).all(2) & self.pbc
        remedy = "give the cell or set pbc=False (in an extended XYZ file pbc='F F F')"
        _first(zero.any(1), f"structure {{}}: periodic along a lattice vector that is zero; {remedy}")
        flat = self._periodic_volume() < _FLATTEST
        _first(flat & ~zero.any(1), "structure {}: its periodic lattice vectors are linearly dependent")
        return self

    @property
    def electrons(self) -> Tensor:
        """Number of electrons of each structure, [B], in float64."""
        charge = self.charge.detach().double()
        return torch.zeros_like(charge).index_add_(0, self.batch, self.z.to(charge.dtype)) - charge

    def _periodic_volume(self) -> Tensor:
        """Return the volume of the unit parallelepiped of the periodic directions, [B]; 1 for orthogonal vectors."""
        cell = self.cell.double()  # 16 bits have no determinants
        unit = cell / cell.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        gram = unit @ unit.transpose(1, 2)
        both = self.pbc[:, :, None] & self.pbc[:, None, :]
        eye = torch.eye(3, dtype=gram.dtype, device=self.device).expand_as(gram)
        return torch.linalg.det(torch.where(both, gram, eye)).clamp(min=0).sqrt()


_FLATTEST = 1e-3  # of flatter cells each atom has thousands of images within a cutoff, and no crystal is so flat


def _as_tensor(value: Any) -> Tensor:
    """Return the value as a tensor. A tensor stays: `torch.as_tensor` would move it to torch's default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def is_transformed() -> bool:
    """Return whether the caller is within a transform of `torch.func`, or in forward mode."""
    return torch._C._functorch.get_interpreter_stack() is not None or forward_ad._current_level >= 0


def _plain(name: str, value: Tensor) -> Tensor:
    """Return the numbers of a tensor, without derivatives."""
    found = torch.func.debug_unwrap(value)
    if found.shape != value.shape:
        raise ValueError(
            f"torch.vmap over {name}: structures have different neighbors, so they cannot be mapped; "
            "System.concatenate puts them into one batch, and each has its own energy in the result"
        )
    with outside_transforms():
        return found.detach()


def _real(value: Tensor, name: str) -> Tensor:
    """Return a tensor of real numbers, unchanged: conversion would drop the imaginary part, or count truth values."""
    if value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be real numbers, got {value.dtype}")
    return value


def _whole(value: Tensor, name: str) -> Tensor:
    """Return a tensor of whole numbers, unchanged."""
    if value.is_floating_point() and not bool((value == value.round()).all()):
        raise ValueError(f"{name} must be whole numbers")
    return _real(value, name)


def _per_system(value: Any, num: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    if value is None:
        return torch.zeros(num, dtype=dtype, device=device)
    value = _real(torch.as_tensor(value, device=device), name)
    value = (_whole(value, name) if dtype == torch.long else value).to(dtype)
    if value.ndim == 0:
        value = value.expand(num)
    if value.shape != (num,):
        raise ValueError(f"{name} must have one value per system, shape ({num},), got {tuple(value.shape)}")
    return value


def _first(bad: Tensor, message: str) -> None:
    if bool(bad.any()):
        raise ValueError(message.format(int(bad.nonzero()[0, 0])))
