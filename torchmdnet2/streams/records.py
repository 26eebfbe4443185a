"""The records of a file, one after another: a structure each, or the reason why there is none.

A damaged record does not end the reading: SDF, SMILES and XYZ files are split into records before these are parsed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..core.files import opened
from ..data.structures import open_structures, reason, structure_of_molfile, structure_of_xyz
from ..errors import BadData

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["FAULTS", "PROPERTIES", "Record", "RecordFile"]

PROPERTIES = (
    "record", "conformer", "energy", "relative_energy", "largest_force", "steps", "converged", "bonds_changed",
    "novelty", "atom_charges",
)  # fmt: skip
"""Names of results; those of an earlier run are not read."""

FAULTS = (ValueError, EOFError, KeyError, IndexError, RuntimeError)
"""What parsing, checking or evaluating one structure may raise."""


@dataclass
class Record:
    """One record of a stream.

    Attributes:
        number: in the file, from 0 on.
        name: the title of an SDF record, what stands behind a SMILES; "" without one.
        starts: its structures: one, or its conformers; none where there is an `error`.
        molfile: text with its bonds, "" where the format has none.
        smiles: the SMILES that it was read from, else "".
        error: why it cannot be used.
    """

    number: int
    name: str = ""
    starts: list[Atoms] = field(default_factory=list)
    molfile: str = ""
    smiles: str = ""
    error: str = ""

    def __str__(self) -> str:
        return f"record {self.number}" + (f" ({self.name})" if self.name else "")


class RecordFile:
    """A file as a stream of records, read from front to back in constant memory.

    SDF, SMILES (.smi) and XYZ, which may be compressed, are read so; of all other formats that ASE reads, the
    structures are in memory.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str):
        self.path = path
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
        suffixes = [suffix.lower() for suffix in Path(path).suffixes if suffix.lower() not in (".gz", ".bz2", ".xz")]
        self._parse: Callable[[TextIO], Iterator[Record]] | None = _FORMATS.get(suffixes[-1] if suffixes else "")
        self._place: Any = None
        self._size = max(1, Path(path).stat().st_size)

    @property
    def fraction(self) -> float:
        """How much of the file has been read, from 0 to 1; of formats read at once, 0."""
        return min(1.0, self._place.tell() / self._size) if self._place is not None else 0.0

    def __iter__(self) -> Iterator[Record]:
        if self._parse is None:
            return self._at_once()
        return self._read()

    def _read(self) -> Iterator[Record]:
        assert self._parse is not None
        with open(self.path, "rb") as raw, opened(raw, self.path) as file:
            self._place = raw
            for number, record in enumerate(self._parse(io.TextIOWrapper(file, "utf-8-sig", errors="replace"))):
                record.number = number
                yield record
            self._place = None

    def _at_once(self) -> Iterator[Record]:
        found = open_structures(self.path)
        for number in range(len(found)):
            yield _made(Record(number), partial(found.__getitem__, number))


def _made(record: Record, make: Callable[[], Atoms]) -> Record:
    """The record with its structure, or with the reason why there is none."""
    try:
        atoms = make()
        if not len(atoms):
            raise BadData("there are no atoms in it")
        for name in PROPERTIES:
            atoms.info.pop(name, None)
        record.starts = [atoms]
    except FAULTS as error:
        record.error = " ".join(reason(error).removeprefix("it: ").split())
    return record


def _sdf(file: TextIO) -> Iterator[Record]:
    lines: list[str] = []
    for line in file:
        if line.startswith("$$$$"):
            yield _molecule("".join(lines))
            lines = []
        else:
            lines.append(line)
    if any(line.strip() for line in lines):
        yield _molecule("".join(lines))


def _molecule(text: str) -> Record:
    name = text.partition("\n")[0].strip()
    return _made(Record(0, name, molfile=text), partial(structure_of_molfile, text, "it"))


def _smiles(file: TextIO) -> Iterator[Record]:
    """`SMILES name`; its conformers are made later."""
    for line in file:
        if line.strip() and not line.startswith("#"):
            smiles, *rest = line.split(None, 1)
            yield Record(0, rest[0].strip() if rest else smiles, smiles=smiles)


def _xyz(file: TextIO) -> Iterator[Record]:
    head = file.readline()
    while head:
        if not head.strip():
            head = file.readline()
        elif not head.strip().isdigit():
            shown = head.strip()[:40]
            yield Record(0, error=f"a number of atoms is expected where a frame begins, not '{shown}'")
            head = _next_head(file)
        else:
            size, comment = int(head), file.readline()
            lines: list[str] = []
            while len(lines) < size and (head := file.readline()) and not head.strip().isdigit():
                lines.append(head)
            if len(lines) == size:
                head = file.readline()
            vectors = []
            while head.lstrip().startswith("VEC"):
                vectors.append(head)
                head = file.readline()
            if _is_atom(head):
                yield Record(0, error=f"it has more lines than its {size} atoms")
                head = _next_head(file)
            else:
                raw = comment.strip(), lines, size, vectors
                yield _made(Record(0), partial(structure_of_xyz, raw, "it"))


def _next_head(file: TextIO) -> str:
    """The next line that can be the first of a frame; "" at the end."""
    while (line := file.readline()) and not line.strip().isdigit():
        pass
    return line


def _is_atom(line: str) -> bool:
    try:
        return len([float(word) for word in line.split()[1:4]]) == 3
    except ValueError:
        return False


_FORMATS = {".sdf": _sdf, ".mol": _sdf, ".smi": _smiles, ".smiles": _smiles, ".xyz": _xyz, ".extxyz": _xyz}
