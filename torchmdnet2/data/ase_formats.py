"""Readers of the files that ASE reads: extended XYZ, ase.db, trajectories and the other formats of ase.io.

`AseDataset` reads a file once and keeps its frames in memory, packed. The readers also feed a cache.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ..core.files import require_plain, runs_of_records
from ..core.stated import OF_ATOMS, SUMMED, agreed, no_cell, of_atoms, statements, whole_number
from ..core.stated_words import StatedUnit, stated_units, unit_in_name
from ..errors import BadData, MissingBackend, StructureWarning
from ..units import factor
from .check import check_sample
from .extxyz import STRUCTURE, Frame, cut_xyz, read_extxyz
from .labels import (
    CONFIG_TYPE,
    GROUP,
    LABELS,
    Names,
    checked_keys,
    extra_spin,
    full_tensor,
    gradient_sign,
    kind_code,
    label_factors,
    stress_of,
)
from .reader import Chunk, FrameRow, LoadedDataset, Reader, files_in, find_format, register_format, stacked
from .structure_warnings import warn_of_hydrogens, warn_of_placeholder
from .structures import (
    Beside,
    Found,
    database_rows,
    files_beside,
    open_found,
    reason,
)

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["AseDataset", "AseReader", "ExtxyzReader", "FrameReader"]

_CHUNK = 256  # frames at a time
_MOST_KINDS = 1000
_PART = 2**22  # bytes from which on a part has fewer frames
_R = TypeVar("_R", bound="FrameReader")
_LISTED = re.compile(r"\s*[\[({][-+\d.eE\s,;\[\](){}naNif]*[\])}]\s*")


class FrameReader(Reader):
    """Base class of readers that read one frame at a time; see `AseDataset` and `Reader` for the arguments.

    A format derives from it and defines `frames`. The base class handles keys, units, shapes, charges and checks.

    Attributes:
        default_units: quantity -> unit of the values from `frames`, where the user gives none.
    """

    default_units: ClassVar[Mapping[str, str]] = {"energy": "eV", "length": "angstrom"}

    def __init__(self, path: str | PathLike, keys: Names = None, units: Names = None, variant: str | None = None):
        self.path, self.files = str(path), files_in(str(path))
        self._variant: Any = variant
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no data file {self.path}")
        # charge and spin are read wherever they are stated, unless a key names their place
        self._anywhere = [name for name in ("charge", "spin") if keys is None or name not in keys]
        optional: dict[str, str | None] = {"charge": "charge", "spin": "spin"}
        if keys is None:
            keys, self.asked = {**optional, "energy": "energy", "forces": "forces"}, {}
        else:
            self.asked = checked_keys(keys, self.path)
            keys = {**optional, **keys}
        self.keys = checked_keys(keys, self.path)
        self._units = _given(units)
        self._factors = label_factors({**self.default_units, **self._units}, self.path)
        self._warned = False  # of a placeholder instead of a cell
        self._is_part = False
        self._begin()

    def _begin(self) -> None:
        """Set what reading finds."""
        self.stated, self._doubts = {}, Doubts(self.path)
        self.doubts = self._doubts
        self.available, self.counts = set(), Counter()
        self.kinds: dict[str, None] = {}  # in order of appearance

    def part(self: _R, first: int, last: bool) -> _R:
        """Return a reader of some frames of this one, for `parts`; a format sets what it reads them from.

        Args:
            first: number of the first frame.
            last: whether it reads all further frames.
        """
        made = copy(self)
        made._begin()
        made.first, made.last, made._is_part = first, last, True
        made.left_out = []
        made.leave_out = None if self.leave_out is None else made.left_out.append
        return made

    def absorb(self, part: Reader) -> None:
        if part is self:
            return
        assert isinstance(part, FrameReader)
        self.num_frames = part.num_frames
        if part.portable:
            self.fraction = part.fraction
        self.available |= part.available
        self.counts.update(part.counts)
        self.stated |= part.stated
        self._doubts.absorb(part._doubts)
        for kind in part.kinds:
            self._add_kind(kind)
        if self.leave_out is not None:
            for line in part.left_out:
                self.leave_out(line)
        if part.last:
            self._warn_of_spellings()

    @abstractmethod
    def frames(self) -> Iterator[Frame | Exception]:
        """Yield the frames of `path` in order, in `default_units` unless the user gives others.

        A frame that cannot be read may be yielded as its error if the next ones can be read. Any error other than
        BadData becomes a BadData that names the file and the frame.
        """

    def _frames(self) -> Iterator[Frame | BadData]:
        frame = self.first
        try:
            for content in self.frames():
                yield self._failed(frame, content) if isinstance(content, Exception) else content
                frame += 1
        except (BadData, MissingBackend):
            raise
        except Exception as error:  # readers of other packages raise errors of any kind
            raise self._failed(frame, error) from error
        if frame == 0:
            raise BadData(f"{self.path}: the file has no frames")

    def _failed(self, frame: int, error: Exception) -> BadData:
        if isinstance(error, BadData):
            return error
        found = BadData(f"{self.path}, frame {frame}: it cannot be read: {reason(error)}")
        found.__cause__ = error
        return found

    def chunks(self) -> Iterator[Chunk]:
        self.num_frames = self.first
        kept: list[FrameRow] = []
        for frame in self._frames():
            try:
                if isinstance(frame, BadData):
                    raise frame
                row = self._row(frame, f"{self.path}, frame {self.num_frames}")
            except BadData as error:
                if self.leave_out is None:
                    raise
                yield from self._joined(kept)
                self.leave_out(str(error))
                self.num_frames += 1
                kept = []
                continue
            if not (self.num_frames or frame.bonds or {"energy", "forces"} & row.labels.keys()):
                warn_of_hydrogens(_structure(row), f"{self.path}: ")
            if kept and (len(kept) == _CHUNK or kept[0].labels.keys() != row.labels.keys()):
                yield from self._joined(kept)
                kept = []
            kept.append(row)
            self.num_frames += 1
        yield from self._joined(kept)
        if not self._is_part:
            self._warn_of_spellings()

    def _warn_of_spellings(self) -> None:
        """Warn of labels that are read if present, and are in no frame under their names; others are errors."""
        for name, key in self.keys.items():
            if not self.counts[name] and name not in self.asked:
                for other in sorted(own for own in self.available if own.lower() == key.lower() != own):
                    warnings.warn(
                        f"{self.path}: '{other}' is not read as the {name}, whose name is '{key}': rename it, or give "
                        f"keys={{'{name}': '{other}'}}",
                        StructureWarning,
                        stacklevel=3,
                    )

    def _joined(self, rows: list[FrameRow]) -> Iterator[Chunk]:
        """Yield the last frames."""
        if rows:
            yield from self.usable(stacked(rows), self.path, self.num_frames - len(rows))

    def _row(self, frame: Frame, where: str) -> FrameRow:
        entries = frame.entries
        self.available |= entries.keys()
        found = {name: entries[key] for name, key in self.keys.items() if key in entries}
        self.counts.update(found.keys())
        whole = {"charge": 0, "spin": 0} | self._state(frame, where)
        for name in ("charge", "spin"):
            value = found.pop(name, None)
            if value is not None and name not in self._anywhere:
                whole[name] = whole_number(value, name, where) + (name == "spin") * extra_spin(self.keys[name])
        factors = self._factors_of(entries, found, where)
        length = factors["length"]
        self._doubts.see(entries, self.keys.get("energy"), factors.get("energy", 1.0), self.num_frames)
        cell, pbc = frame.cell * factors.get("cell", length), frame.pbc
        if no_cell(cell, pbc):
            if not self._warned:
                warn_of_placeholder(f"{self.path}: ")
            self._warned = True
            cell, pbc = np.zeros((3, 3)), np.zeros(3, dtype=bool)
        labels = {}
        for name, value in found.items():
            if name in (CONFIG_TYPE, GROUP):
                if name == CONFIG_TYPE:
                    self._add_kind(str(value).strip())
                value = kind_code(value)
            by = factors.get(name, 1.0) * gradient_sign(name, self.keys[name])
            numbers = np.asarray(_array(value, self.keys[name], where) * by)
            if name == "virial":
                name, numbers = "stress", stress_of(numbers, cell, where)
            labels[name] = _shaped(name, numbers, len(frame.numbers))
        positions = _array(frame.positions, "positions", where) * length
        row = FrameRow(frame.numbers, positions, cell, pbc, whole["charge"], whole["spin"], labels)
        if any(value.shape != LABELS[name].shape(len(frame.numbers)) for name, value in labels.items()):
            check_sample(stacked([row]), where)
        return row

    def _add_kind(self, kind: str) -> None:
        if len(self.kinds) < _MOST_KINDS:
            self.kinds[kind] = None

    def _state(self, frame: Frame, where: str) -> dict[str, int]:
        """Return the charge and spin that a frame states by name, or by charges and magnetic moments of its atoms."""
        if not self._anywhere:
            return {}
        entries = frame.entries
        arrays = of_atoms(entries, len(frame.numbers)) | frame.stated
        read = set(self.keys.values())
        other = {key: value for key, value in entries.items() if key not in read or key in ("charge", "spin")}
        # True, a bare word in the comment line, is refused under the name that the file uses
        try:
            further = {"charge": frame.charge, "spin": frame.spin}
            given = {name for name, more in further.items() if more or name not in self._anywhere}
            found = statements(other, arrays, bool(frame.pbc.any()), "'{}'", given, frame.numbers, f"{self.path}: ")
            for name, more in further.items():
                found[name] += more
            values = {name: agreed(found[name], name) for name in self._anywhere}
        except BadData as error:
            raise BadData(f"{where}: {error}; or choose one with keys: {{charge: NAME, spin: NAME}}") from None
        for name, value in values.items():
            if value is not None and self.keys.get(name) not in entries:
                self.counts[name] += 1
                self.stated[name] = found[name][0].source
        return {name: value for name, value in values.items() if value is not None}

    def _factors_of(self, entries: Mapping[str, Any], read: Mapping[str, Any], where: str) -> Mapping[str, float]:
        """Return the factors of labels and lengths. The frame's units are used, and different given units are refused.

        Raises:
            BadData: a stated unit is unknown or differs from `units`, or a unit is stated but not that of the labels
                that depend on it.
        """
        used = {"energy", "length", "cell", *read}
        named = {name: unit for name in read if (unit := unit_in_name(name, self.keys[name]))}
        stated = {**named, **{name: unit for name, unit in stated_units(entries, self.keys).items() if name in used}}
        if not stated:
            return self._factors
        try:
            sizes = {name: unit.size for name, unit in stated.items()}
        except BadData as error:
            raise BadData(f"{where}: {error}") from None
        for name, unit in stated.items():
            kind = {"forces": "force", "virial": "energy", "cell": "length"}.get(name, name)
            given = self._units.get({"virial": "energy", "cell": "length"}.get(name, name))
            if given is not None and not np.isclose(factor(kind, given), sizes[name], rtol=1e-6):
                raise BadData(
                    f"{where}: the file states {unit.source}, but the given unit is {given}: remove the wrong one"
                )
        self._refuse_half(stated, read, where)
        self.stated |= {f"unit of {name}": unit.source for name, unit in stated.items()}
        return {**self._factors, **sizes}

    def _refuse_half(self, stated: Mapping[str, StatedUnit], read: Mapping[str, Any], where: str) -> None:
        """Refuse a stated unit other than eV or Å if others that it is a part of, or its parts, are not given."""
        for base in ("energy", "length"):
            if base in stated and abs(stated[base].size - 1) > 1e-6 and base not in self._units:
                for name in ("forces", "stress", "virial", *(["dipole"] if base == "length" else [])):
                    if name in read and name not in stated and name not in self._units:
                        known = "energy" if name == "virial" else name
                        unit = {"energy": "eV", "dipole": "debye", "stress": "eV/angstrom^3"}.get(known, "eV/angstrom")
                        raise BadData(
                            f"{where}: the file states {stated[base].source}, but no unit of the {name}: give it as in "
                            f"units: {{{known}: {unit}}}"
                        )
        for name in ("forces", "virial"):
            if name in stated and "energy" in read and "energy" not in stated and "energy" not in self._units:
                if abs(stated[name].energy - 1) > 1e-6:
                    raise BadData(
                        f"{where}: the file states {stated[name].source}, but no unit of the energy: give it as in "
                        "units: {energy: eV}"
                    )

    def unread(self) -> set[str]:
        used = self.stated.values()
        return {
            name for name in super().unread()
            if not any(s in (f"'{name}'", f"the sum of {SUMMED.get(name)}") or s.startswith(f"{name}=") for s in used)
        }  # fmt: skip


@register_format("extxyz")
class ExtxyzReader(FrameReader):
    """Reads extended XYZ files, compressed or not."""

    extensions = ("xyz", "extxyz")
    _text: bytes | None = None  # of the frames of a part
    _place = 0  # number of bytes before them in the file
    _whole: Reader | None = None  # the reader that shows how much has been read; None: this one

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Names) -> list[str]:
        return [found for file in super().files_of(paths, keys) for found in (file, *files_beside(file))]

    def parts(self, size: int) -> Iterator[Reader]:
        from ase.io.formats import open_with_compression

        if Beside(self.path):  # all frames are compared with the first one
            yield self
            return
        require_plain(self.path)
        with open_with_compression(self.path, "rb") as file:
            total = os.path.getsize(self.path) if isinstance(file, io.BufferedReader) else 0
            for run in runs_of_records(file, cut_xyz, size, most=_PART):  # type: ignore[arg-type]
                part = self.part(run.number, run.last)
                if run.text is None:
                    part._place, part._whole, part.leave_out = run.begin, self, self.leave_out
                else:
                    part._text, part.portable = run.text, True
                    part.fraction = (run.begin + len(run.text)) / total if total else 0.0
                yield part

    def frames(self) -> Iterator[Frame | Exception]:
        if self._text is not None:
            text, self._text = self._text, b""
            yield from read_extxyz(io.BytesIO(text))
            return
        beside = Beside(self.path)
        for frame in read_extxyz(self.path, partial(setattr, self._whole or self, "fraction"), self._place):
            yield beside.added_to(frame, frame.numbers) if beside and isinstance(frame, Frame) else frame


@register_format("ase")
class AseReader(FrameReader):
    """Reads every other format of ase.io.

    Args:
        path, keys, units: see `AseDataset`.
        variant: name of the format in ase.io; with None the file's name and content decide.
    """

    extensions: ClassVar[tuple[str, ...]] = ("sdf", "mol", "pdb")

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Names) -> list[str]:
        return [found for file in super().files_of(paths, keys) for found in (file, *files_beside(file))]

    @classmethod
    def variants(cls) -> Collection[str]:
        from ase.io.formats import ioformats

        return ioformats.keys()

    def frames(self) -> Iterator[Frame]:
        return map(_frame, open_found(self.path, self._variant))


@register_format("traj")
class TrajReader(AseReader):
    """Reads trajectories of ASE."""

    extensions = ("traj",)

    def frames(self) -> Iterator[Frame]:
        self._variant = "traj"
        return super().frames()


@register_format("db")
class DatabaseReader(FrameReader):
    """Reads databases of ASE with the key-value pairs of their rows, which ase.io.read leaves out."""

    extensions = ("db",)

    def frames(self) -> Iterator[Frame]:
        return map(_frame, database_rows(self.path, "db"))


class AseDataset(LoadedDataset):
    """The frames of one file that ase.io reads, kept in memory.

    Labels are read from `atoms.info`, `atoms.arrays` and the results of the frame's calculator, to which ase.io moves
    entries called energy, forces, stress, dipole or charges; from ase.db also from the key-value pairs and data.

    Args:
        path: the file.
        keys: label -> its name in the file, for "energy", "forces", "stress" (3×3, 9, or 6 numbers in Voigt order;
            tensile positive) or instead "virial" (= −stress·volume), "dipole", "charges", and "charge" and "spin" of
            the frame. None: do not read this label. Each given key must be in at least one frame. Without `keys`,
            "energy" and "forces" are read if present. Without a key for them, charge and spin are read under any of
            their names ("total_charge", "multiplicity", …) and from the sums of initial charges, atomic charges and,
            for molecules, initial magnetic moments. Contradictory statements are an error.
        units: quantity -> unit, for "energy", "length", and "forces", "stress", "dipole" where they do not follow from
            these. The default is eV and Å, as in extended XYZ and ASE. Units that a frame states
            (`energy-unit=hartree`, `forces_unit="hartree/bohr"`, `pos-unit=bohr`) are used; other given units are then
            an error.
        format: as for ase.io.read; with None the file's name and content decide.
        require_keys: False if another file may have the keys.

    Attributes:
        asked: label -> key, for keys that must be in a frame.
        counts: label -> number of frames that have it.
        available: names of all entries in the file.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: the file cannot be read, or a value cannot be used; the message names the file and the frame.
    """

    def __init__(
        self,
        path: str | PathLike,
        keys: Names = None,
        units: Names = None,
        format: str | None = None,
        require_keys: bool = True,
    ):
        by_name = {".xyz": "extxyz", ".extxyz": "extxyz", ".db": "db"}.get(Path(path).suffix, "ase")
        chosen = find_format(format or by_name)
        assert chosen is not None
        super().__init__(chosen.reader.readers([str(path)], keys, units, chosen.variant)[0], require_keys)


def _frame(found: Found) -> Frame:
    atoms = found.atoms
    arrays = {key: value for key, value in atoms.arrays.items() if key in OF_ATOMS}
    pbc = atoms.get_pbc()
    return Frame(
        atoms.get_atomic_numbers(),
        atoms.positions,
        atoms.cell.array,
        pbc,
        _entries(atoms),
        arrays,
        found.charge,
        found.spin,
        found.bonds,
    )


def _structure(row: FrameRow) -> Atoms:
    from ase import Atoms

    return Atoms(row.z, row.pos, cell=row.cell, pbc=row.pbc)


def _entries(atoms: Atoms) -> dict[str, Any]:
    """Return all entries of a frame besides its structure."""
    entries = dict(atoms.calc.results) if atoms.calc is not None else {}
    entries.update({key: value for key, value in atoms.arrays.items() if key not in STRUCTURE})
    return {**entries, **atoms.info}


def _array(value: Any, key: str, where: str) -> np.ndarray:
    if isinstance(value, str) and _LISTED.fullmatch(value):  # a nested list, of Python or C++
        value = re.sub(r"[\[\](){},;]", " ", value).split()
    try:
        if np.asarray(value).dtype.kind != "b":  # such as an entry without a value in extended XYZ
            return np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        pass
    raise BadData(f"{where}: '{key}' is not made of numbers: {str(value)[:60]}")


def _shaped(name: str, value: np.ndarray, num_atoms: int) -> np.ndarray:
    """Return the label in its shape. Values of other shapes stay unchanged; `check_sample` refuses them."""
    if name == "stress" and value.shape == (6,):
        return full_tensor(value)[None]
    shape = LABELS[name].shape(num_atoms)
    if not LABELS[name].per_atom and value.size == prod(shape):
        return value.reshape(shape)
    return value


def _given(units: Names) -> dict[str, str]:
    return {name: unit for name, unit in (units or {}).items() if unit is not None}


# --- Entries that put labels in doubt: another energy to which the forces belong, calculations without convergence ---

_FREE = re.compile(r"(^|_)free_?energy$|(^|_)energy_?free$", re.I)
_CONVERGED = re.compile(r"^((scf|electronic|electrons?|elec|dft|is)_?)?converged$", re.I)
_UNCONVERGED = re.compile(r"^((scf|electronic|electrons?|elec|dft|is)_?)?(not_?|un)converged$", re.I)
_DIFFERENT = 1e-4  # eV


@lru_cache(maxsize=1024)
def _doubtful(name: str) -> tuple[bool | None, bool]:
    """Return the value of an entry that says that a calculation did not converge, and whether it is a free energy."""
    said = True if _UNCONVERGED.search(name) else False if _CONVERGED.search(name) else None
    return said, bool(_FREE.search(name))


class Doubts:
    """Collects doubts about labels from the entries of frames.

    Args:
        path: path of the file, for messages.
    """

    def __init__(self, path: str):
        self._path = path
        self._other: dict[tuple[str, str], tuple[float, int]] = {}  # (read, other) -> largest difference, frames
        self._unconverged: dict[str, tuple[int, int]] = {}  # name -> frames, the first of them

    def see(self, entries: Mapping[str, Any], energy: str | None, factor: float, frame: int) -> None:
        """Inspect the entries of a frame.

        Args:
            entries: name -> value.
            energy: name of the entry that is read as the energy, if any.
            factor: factor from its unit to eV.
            frame: number of the frame.
        """
        for name, value in entries.items():
            said, free = _doubtful(name)
            if said is not None and _flag(value) is said:
                count, first = self._unconverged.get(name, (0, frame))
                self._unconverged[name] = count + 1, first
            elif free and energy is not None and energy in entries and name != energy:
                difference = factor * abs(_number(value) - _number(entries[energy]))
                if difference > _DIFFERENT:
                    most, count = self._other.get((str(energy), name), (0.0, 0))
                    self._other[str(energy), name] = max(most, difference), count + 1

    def absorb(self, later: Doubts) -> None:
        """Take over the doubts about frames that follow."""
        for key, (most, count) in later._other.items():
            before, known = self._other.get(key, (0.0, 0))
            self._other[key] = max(before, most), known + count
        for name, (count, first) in later._unconverged.items():
            known, before = self._unconverged.get(name, (0, first))
            self._unconverged[name] = known + count, before

    def __iter__(self) -> Iterator[str]:
        """Yield the warnings as sentences."""
        for (read, other), (most, count) in self._other.items():
            yield (
                f"'{read}' is read as the energy from {self._path}, and '{other}' differs from it in {count} frames, "
                f"by up to {most:.3g} eV: forces of a calculation with smearing belong to the free energy. Set "
                f"data.keys.energy: {other}"
            )
        for name, (count, first) in self._unconverged.items():
            yield (
                f"'{name}' states that {count} frames of {self._path} did not converge (the first: frame {first}): "
                "leave them out, or compute them again"
            )


def _flag(value: Any) -> bool | None:
    """Return a word or number as True or False; None if it is neither."""
    word = str(value).strip().lower()
    return True if word in ("t", "true", "1", "yes") else False if word in ("f", "false", "0", "no") else None


def _number(value: Any) -> float:
    try:
        return float(np.asarray(value, dtype=np.float64).reshape(()))
    except (TypeError, ValueError):
        return float("nan")
