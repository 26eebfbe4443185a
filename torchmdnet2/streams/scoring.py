"""Energies, forces, charges and novelty of many structures, which are kept as arrays.

A structure is an ase.Atoms only while its record is parsed. A thousand structures then are a few arrays, which are sent
quickly to other processes and to the device.

Shapes: B structures of a block, N atoms of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.stated import cell_of, charge_and_spin
from ..data.extxyz import extxyz_frames
from ..ensemble import EnsembleResult
from ..md.guard import close_atoms
from ..potential.potential import Result
from ..system import System
from .batches import BatchCapacity, BatchOptions, Worker, in_parts, novelty_of, opened, parts, reason, refusals
from .records import WRITERS, Outcome, Record, Results, csv_row, xyz_entries

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Block", "Scorer"]

_FIELDS = "number", "name", "molfile", "smiles", "error", "ready"  # of a record that is parsed
_TOGETHER = 1024  # number of structures whose elements and charges are checked at once


@dataclass(eq=False)
class Block(Results):
    """The structures of some records as arrays, and their results.

    Attributes:
        columns: fields of the records without their structures, as lists, since the process that computes only passes
            them on.
        errors: for each record, lines that say why structures have no result.
        owners: [B] position of the record of each structure.
        infos: for each structure, its entries that are single values.
        numbers: [N] atomic numbers; positions: [N, 3] Å.
        firsts: [B + 1] first atom of each structure.
        cell: [B, 3, 3] Å; pbc: [B, 3]; charge: [B] e; spin: [B] multiplicity.
        found: name of a property -> values of the structures, [B].
        forces: [N, 3] eV/Å; charges: [N] e, None if the model has none.
        done: [B] True for structures with a result.
        flaws: [B] the reason why no potential can evaluate a structure, such as atoms that overlap; else "".
        close: [B] words about atoms of a structure that are nearer than any bond; else "".
    """

    columns: dict[str, list[Any]]
    errors: list[list[str]]
    owners: list[int]
    infos: list[dict[str, Any]]
    numbers: NDArray
    positions: NDArray
    firsts: NDArray
    cell: NDArray
    pbc: NDArray
    charge: NDArray
    spin: NDArray
    found: dict[str, NDArray]
    forces: NDArray
    charges: NDArray | None
    done: NDArray
    flaws: list[str]
    close: list[str]

    @classmethod
    def of(cls, records: list[Record]) -> Block:
        """Return the structures of records; structures that no model can evaluate become errors."""
        errors = [[record.error] if record.error else [] for record in records]
        owners, infos, kept, states = [], [], [], []
        for k, record in enumerate(records):
            starts, record.starts = record.starts, []
            for atoms, state in zip(starts, opened(starts, _state), strict=True):
                if isinstance(state, Exception):
                    errors[k].append(reason(state))
                    continue
                states.append(state)
                owners.append(k)
                stated = {
                    name: value for name, value in zip(("charge", "spin"), state[2:], strict=True) if value is not None
                }
                # also where the charge of each atom states it, which is not written
                infos.append(stated | {name: value for name, value in atoms.info.items() if np.ndim(value) == 0})
                kept.append(atoms)
        sizes, size = [len(atoms) for atoms in kept], len(kept)
        cells, periodic, totals, spins = zip(*states, strict=True) if states else ((),) * 4
        block = cls(
            {name: [getattr(record, name) for record in records] for name in _FIELDS}, errors, owners, infos,
            numbers=np.concatenate([np.zeros(0, np.int64), *(atoms.numbers for atoms in kept)]),
            positions=np.concatenate([np.zeros((0, 3)), *(atoms.positions for atoms in kept)]),
            firsts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            cell=np.array(cells).reshape(size, 3, 3), pbc=np.array(periodic, bool).reshape(size, 3),
            charge=np.array([total or 0 for total in totals], np.float64),
            spin=np.array([spin or 0 for spin in spins], np.int64),
            found={}, forces=np.zeros((sum(sizes), 3)), charges=None, done=np.zeros(size, bool),
            flaws=[], close=[],
        )  # fmt: skip
        found = in_parts(lambda part: close_atoms(block.system(part).validate()), range(size))
        block.flaws = [reason(words) if isinstance(words, Exception) else "" for words in found]
        block.close = ["" if isinstance(words, Exception) else words for words in found]
        return block

    def __len__(self) -> int:
        return len(self.owners)

    @cached_property
    def records(self) -> list[Record]:
        """The records, without their structures."""
        return [Record(**dict(zip(_FIELDS, row, strict=True))) for row in zip(*self.columns.values(), strict=True)]

    @property
    def sizes(self) -> NDArray:
        """Number of atoms of each structure, [B]."""
        return np.diff(self.firsts)

    def _atoms(self, chosen: Sequence[int]) -> NDArray:
        """Return the indices of the atoms of structures."""
        mask = np.zeros(len(self), bool)
        mask[chosen] = True
        return np.repeat(mask, self.sizes)

    def system(self, chosen: Sequence[int]) -> System:
        """Return structures, given in ascending order, as one batch on the CPU in float64."""
        atoms, sizes = self._atoms(chosen), self.sizes[chosen]
        arrays = (self.numbers[atoms], self.positions[atoms], np.repeat(np.arange(len(chosen)), sizes),
                  self.cell[chosen], self.pbc[chosen], self.charge[chosen], self.spin[chosen])  # fmt: skip
        return System(*map(torch.from_numpy, arrays))

    def take(self, chosen: Sequence[int], result: Result) -> None:
        """Store the results of structures, given in ascending order; an energy that is not finite is an error."""
        atoms, count = self._atoms(chosen), len(chosen)

        def array(value: torch.Tensor, size: int) -> NDArray:
            return value[:size].detach().double().cpu().numpy()

        size = int(atoms.sum())
        assert result.forces is not None
        self.forces[atoms] = array(result.forces, size)
        self.keep("energy", chosen, array(result.energy, count))
        if result.charges is not None:
            if self.charges is None:
                self.charges = np.zeros(len(self.numbers))
            self.charges[atoms] = array(result.charges, size)
        if isinstance(result, EnsembleResult) and result.energy_std is not None and result.forces_std is not None:
            self.keep("energy_std", chosen, array(result.energy_std, count))
            spread = np.linalg.norm(array(result.forces_std, size), axis=1)
            firsts = np.concatenate([[0], np.cumsum(self.sizes[chosen])[:-1]]).astype(np.int64)
            self.keep("force_std", chosen, np.maximum.reduceat(spread, firsts))
        finite = np.isfinite(self.found["energy"][chosen])
        for k, good in zip(chosen, finite.tolist(), strict=True):
            if good:
                self.done[k] = True
            else:
                self.fail(k, "its energy is not finite")

    def keep(self, name: str, chosen: Sequence[int], values: NDArray) -> None:
        """Store a property of structures."""
        self.found.setdefault(name, np.full(len(self), np.nan))[chosen] = values

    def usable(self, check: Callable[[System, Sequence[Record]], Any]) -> list[int]:
        """Return the structures without flaws that a check of them and their records accepts; the others become errors
        of these records."""

        def run(part: Sequence[int]) -> None:
            check(self.system(part), [self.records[self.owners[k]] for k in part])

        refused = refusals(range(len(self)), run, _TOGETHER)
        errors = [reason(error) if error else flaw for error, flaw in zip(refused, self.flaws, strict=True)]
        for k, error in enumerate(errors):
            if error:
                self.fail(k, error)
        return [k for k, error in enumerate(errors) if not error]

    def fail(self, structure: int, error: str) -> None:
        """Note why a structure has no result."""
        self.errors[self.owners[structure]].append(error)

    def _properties(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each structure that has a result, with its properties as a whole."""
        chosen = np.flatnonzero(self.done)
        if not len(chosen):
            return
        norms = np.linalg.norm(self.forces, axis=1)
        largest = np.maximum.reduceat(norms, self.firsts[:-1])  # every structure has atoms
        values = {"energy": self.found["energy"], "largest_force": largest, **self.found}
        columns = [(name, value.tolist()) for name, value in values.items()]
        for k in chosen.tolist():
            yield k, {**self.infos[k], **{name: column[k] for name, column in columns}}

    def outcomes(self) -> list[Outcome]:
        from ase import Atoms

        found = [Outcome(record, errors=errors) for record, errors in zip(self.records, self.errors, strict=True)]
        for k in self._near():
            found[self.owners[k]].near.append(self.close[k])
        for k, properties in self._properties():
            part = slice(self.firsts[k], self.firsts[k + 1])
            atoms = Atoms(
                numbers=self.numbers[part], positions=self.positions[part], cell=self.cell[k], pbc=self.pbc[k],
                info=properties,
            )  # fmt: skip
            atoms.arrays["forces"] = self.forces[part]
            if self.charges is not None:
                atoms.arrays["charges"] = self.charges[part]
            found[self.owners[k]].structures.append(atoms)
        return found

    def failures(self) -> list[tuple[Record, list[str]]]:
        return [(record, errors) for record, errors in zip(self.records, self.errors, strict=True) if errors]

    def count(self) -> tuple[int, int, int]:
        return len(self.errors), int(self.done.sum()), 0

    def _near(self) -> list[int]:
        return [k for k, words in enumerate(self.close) if words and self.done[k]]

    def near(self) -> list[str]:
        return [f"{self.records[self.owners[k]]}: {self.close[k]}" for k in self._near()]

    def text(self, suffix: str) -> str:
        if suffix == ".csv":
            return "".join(self.rows())
        return "".join(map(WRITERS[suffix], self.outcomes()) if suffix == ".sdf" else self._xyz())

    def _named(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield as `_properties`, with the number and the name of the record."""
        for k, properties in self._properties():
            record = self.records[self.owners[k]]
            name = {"name": record.name} if record.name else {}
            yield k, {"record": record.number, **properties, **name}

    def rows(self) -> list[str]:
        found = []
        for k, properties in self._named():
            properties["formula"] = _formula(self.numbers[self.firsts[k] : self.firsts[k + 1]].tobytes())
            found.append(csv_row(properties))
        return found

    def _xyz(self) -> Iterator[str]:
        """Yield frames of extended XYZ."""
        chosen = np.flatnonzero(self.done)
        atoms = self._atoms(chosen)  # type: ignore[arg-type]
        found = {"positions": self.positions, "forces": self.forces, "charges": self.charges}
        arrays = {name: value[atoms] for name, value in found.items() if value is not None}
        return extxyz_frames(
            self.numbers[atoms], self.sizes[chosen], self.cell[chosen], self.pbc[chosen], arrays,
            (xyz_entries(properties) for _, properties in self._named()),
        )  # fmt: skip


def _state(atoms: Atoms) -> tuple[Any, ...]:
    return *cell_of(atoms), *charge_and_spin(atoms)


@lru_cache(maxsize=4096)
def _formula(numbers: bytes) -> str:
    from ase.symbols import Symbols

    return Symbols(np.frombuffer(numbers, np.int64)).get_chemical_formula()


class Scorer(Worker[BatchOptions]):
    """Computes energies, forces and charges of blocks of records."""

    def __call__(self, records: Sequence[Record]) -> list[Outcome]:
        return self.score(Block.of(list(records))).outcomes()

    def score(self, block: Block) -> Block:
        """Return a block with its results."""
        usable = block.usable(self.check)
        if not usable:
            return block
        sizes = block.sizes[usable]
        most = None if self.potential.device.type == "cpu" else BatchCapacity.of_block(int(sizes.sum()))
        capacity = self.capacity(int(sizes.max()), most)

        def evaluate(part: Sequence[int]) -> None:
            block.take(part, self.evaluator(capacity.fill(block.system(part).to(capacity.device))))

        for part in parts(usable, sizes.tolist(), capacity.fits):
            for k, failed in zip(part, refusals(part, evaluate, len(part)), strict=True):
                if failed is not None:
                    block.fail(k, reason(failed))
        rated = np.flatnonzero(block.done).tolist()
        novelty = novelty_of(self.rated, rated, block.sizes[rated].tolist(), block.system)
        if novelty is not None:
            block.keep("novelty", rated, novelty)
        return block
