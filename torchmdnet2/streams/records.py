"""Records of input files, and results as text.

A record has a structure, or the reason why it has none. A damaged record does not end the reading, since SDF, SMILES
and XYZ files are split into records before these are parsed. Results are written as SDF with the bonds of the input, as
extended XYZ, or as tables in CSV. The result of each record is a separate text, so that files can grow. HDF5 is made
from extended XYZ at the end.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.files import keep_old, opened, require_plain, runs_of_records
from ..core.pipeline import blocks_of
from ..data.dataset import Sample
from ..data.extxyz import cut_xyz, is_count
from ..data.hdf5 import write_hdf5
from ..data.structures import open_structures, reason, structure_of_molfile, structure_of_xyz
from ..errors import BadConfig, BadData
from ..system import System

if TYPE_CHECKING:
    from ase import Atoms

__all__ = [
    "FAULTS", "PROPERTIES", "WRITERS", "Outcome", "Outcomes", "Part", "Record", "RecordFile", "Results",
    "convert_to_hdf5", "csv_head", "csv_row", "is_hdf5", "require_writable", "xyz_entries",
]  # fmt: skip

_Cut = Callable[[bytes], tuple[list[int], bool]]

PROPERTIES = (
    "record", "conformer", "energy", "relative_energy", "largest_force", "steps", "converged", "bonds_changed",
    "novelty", "energy_std", "force_std", "atom_charges",
)  # fmt: skip
"""Names of results, which are not read from files of an earlier run."""

FAULTS = (ValueError, EOFError, KeyError, IndexError, RuntimeError)
"""Errors that parsing, checking or evaluating a structure may raise."""


@dataclass
class Record:
    """One record of a stream.

    Attributes:
        number: number in the file, from 0.
        name: title of an SDF record, or text after a SMILES; "" without one.
        starts: its structure, or its conformers; empty if there is an `error`.
        molfile: text with its bonds; "" if the format has none.
        smiles: the SMILES of the record, else "".
        error: the reason why it cannot be used.
        parse: function that returns its structure; None after parsing.
        ready: True if the starts are final, with conformers.
    """

    number: int
    name: str = ""
    starts: list[Atoms] = field(default_factory=list)
    molfile: str = ""
    smiles: str = ""
    error: str = ""
    parse: Callable[..., Atoms] | None = None
    ready: bool = False

    def parsed(self) -> Record:
        """Return the record with its structure, or with the reason why it has none."""
        parse, self.parse = self.parse, None
        if parse is not None:
            if self.molfile:
                parse = partial(parse, where=str(self))
            try:
                atoms = parse()
                if not len(atoms):
                    raise BadData("it has no atoms")
                for name in PROPERTIES:
                    atoms.info.pop(name, None)
                self.starts = [atoms]
            except FAULTS as error:
                self.error = " ".join(reason(error).removeprefix("it: ").removeprefix(f"{self}: ").split())
        return self

    def __str__(self) -> str:
        return f"record {self.number}" + (f" ({self.name})" if self.name else "")


@dataclass(repr=False)
class Outcome:
    """The result of a record.

    Attributes:
        record: the record, without its starts.
        structures: the resulting structures, with properties in `info`; empty if all failed.
        errors: a line for each structure that failed.
        near: words about each structure with a result that began with atoms nearer than any bond.
    """

    record: Record
    structures: list[Atoms] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        count = len(self.structures)
        failed = f", {len(self.errors)} failed: {self.errors[0]}" if self.errors else ""
        return f"<Outcome of {self.record}: {count} structure{'s' * (count != 1)}{failed}>"


class Results(ABC):
    """The results of the records of a block, in order."""

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """Return an outcome for each record."""

    @abstractmethod
    def failures(self) -> list[tuple[Record, list[str]]]:
        """Return the records with errors."""

    @abstractmethod
    def count(self) -> tuple[int, int, int]:
        """Return the numbers of records, of structures with a result, and of structures that did not converge."""

    @abstractmethod
    def near(self) -> list[str]:
        """Return a line for each structure with a result that began with atoms nearer than any bond."""

    @abstractmethod
    def text(self, suffix: str) -> str:
        """Return the results as text for a file with this suffix."""

    @abstractmethod
    def rows(self) -> list[str]:
        """Return a line of a table for each structure, with the properties in `csv_head`."""


class Outcomes(Results):
    """Results as structures of ASE."""

    def __init__(self, outcomes: list[Outcome]):
        self._outcomes = outcomes

    def outcomes(self) -> list[Outcome]:
        return self._outcomes

    def failures(self) -> list[tuple[Record, list[str]]]:
        return [(outcome.record, outcome.errors) for outcome in self._outcomes if outcome.errors]

    def count(self) -> tuple[int, int, int]:
        structures = [atoms for outcome in self._outcomes for atoms in outcome.structures]
        unconverged = sum(not atoms.info.get("converged", True) for atoms in structures)
        return len(self._outcomes), len(structures), unconverged

    def near(self) -> list[str]:
        return [f"{outcome.record}: {words}" for outcome in self._outcomes for words in outcome.near]

    def text(self, suffix: str) -> str:
        return "".join(map(WRITERS[suffix], self._outcomes))

    def rows(self) -> list[str]:
        return [row for outcome in self._outcomes for row in csv_rows(outcome)]


@dataclass
class Part:
    """Several records of a file as one text, which another process splits and parses.

    Attributes:
        number: number of the first record in the file.
        text: the text, whole records.
        split: function that splits a text into records.
    """

    number: int
    text: bytes
    split: Callable[[TextIO], Iterator[Record]]

    def __iter__(self) -> Iterator[Record]:
        """Yield the records, which are not parsed."""
        return _numbered(self.split(_decoded(io.BytesIO(self.text))), self.number)


def _decoded(file: Any) -> TextIO:
    return io.TextIOWrapper(file, "utf-8-sig", errors="replace")


def _numbered(records: Iterator[Record], first: int) -> Iterator[Record]:
    for number, record in enumerate(records, first):
        record.number = number
        yield record


class RecordFile:
    """A file as a stream of records, which is read in constant memory.

    This holds for SDF, SMILES (.smi) and XYZ files, compressed or not. Structures of all other formats that
    `read_structures` reads, but HDF5, are kept in memory.

    Args:
        path: the file.

    Raises:
        FileNotFoundError, IsADirectoryError: the file does not exist, or is a folder.
        BadData: it is a pipe, or compressed and not called so, or text in UTF-16.
    """

    def __init__(self, path: str):
        self.path = path
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder: give a file")
        if Path(path).exists() and not Path(path).is_file():
            raise BadData(f"{path} is a pipe or a device, which cannot be read twice, as after a restart: give a file")
        if not Path(path).is_file():
            whole = path.rpartition("@")[0]
            hint = f"; {whole} is read as a whole, without @" if whole and Path(whole).is_file() else ""
            raise FileNotFoundError(f"{path}: no such file{hint}")
        require_plain(path)
        suffixes = [suffix.lower() for suffix in Path(path).suffixes if suffix.lower() not in (".gz", ".bz2", ".xz")]
        suffix = suffixes[-1] if suffixes else ""
        self._split: Callable[[TextIO], Iterator[Record]] | None = _READERS.get(suffix)
        self._cut: _Cut | None = _CUTS.get(suffix)
        self._place: Any = None
        self._taken = 1.0  # part of the text in memory that the blocks so far hold
        self._ended = False
        self.size = max(1, Path(path).stat().st_size)

    @property
    def splits(self) -> bool:
        """Whether records are parsed one by one, apart from the file."""
        return self._split is not None

    @property
    def fraction(self) -> float:
        """Return the part of the file that the blocks so far hold, from 0 to 1; 0 for formats that are read at once."""
        if self._ended:
            return 1.0
        return min(1.0, self._place.tell() / self.size * self._taken) if self._place is not None else 0.0

    def __iter__(self) -> Iterator[Record]:
        return (record.parsed() for block in self.blocks(0, 1024) for record in block)

    def blocks(self, first: int, size: int) -> Iterator[Iterable[Record]]:
        """Yield blocks of records that are not parsed, so that other processes can parse them.

        Args:
            first: number of the first record.
            size: number of records in a block; the last one, one before a damaged record, and one of large records may
                have fewer.

        Raises:
            BadData: the file is compressed and damaged.
        """
        self._ended = False
        try:
            yield from self._blocks(first, size)
            self._ended = True
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise BadData(
                f"{self.path}: it cannot be decompressed ({error}): compress or copy the file again"
            ) from None

    def _blocks(self, first: int, size: int) -> Iterator[Iterable[Record]]:
        if self._split is None:
            yield from blocks_of(islice(self._at_once(), first, None), size)
            return
        with open(self.path, "rb") as raw, opened(raw, self.path) as file:
            self._place = raw
            for run in runs_of_records(file, self._cut, size, first):
                self._taken = run.part
                if not run.last:
                    assert run.text is not None
                    yield Part(run.number, run.text, self._split)
            # line by line: the last block; all records from a damaged one on; a format that is not cut
            if run.text is None:
                file.seek(run.begin)
            with _decoded(file if run.text is None else io.BytesIO(run.text)) as rest:
                records = _numbered(self._split(rest), run.number)
                yield from blocks_of(islice(records, max(0, first - run.number), None), size)
        self._place = None

    def _at_once(self) -> Iterator[Record]:
        found = open_structures(self.path)
        for number in range(len(found)):
            yield Record(number, parse=partial(found.__getitem__, number)).parsed()


def _read_sdf(file: TextIO) -> Iterator[Record]:
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
    return Record(0, name, molfile=text, parse=partial(structure_of_molfile, text))


def _read_smiles(file: TextIO) -> Iterator[Record]:
    """Yield a record for each line `SMILES name`; conformers are made later."""
    for line in file:
        if line.strip() and not line.startswith("#"):
            smiles, *rest = line.split(None, 1)
            yield Record(0, rest[0].strip() if rest else smiles, smiles=smiles)


def _read_xyz(file: TextIO) -> Iterator[Record]:
    parser = _FrameParser()
    head = file.readline()
    while head:
        if not head.strip():
            head = file.readline()
        elif not is_count(head.strip()):
            shown = head.strip()[:40]
            yield Record(0, error=f"a number of atoms is expected where a frame begins, not '{shown}'")
            head = _next_head(file)
        else:
            size, comment, head = int(head), file.readline(), ""
            lines: list[str] = []
            for line in islice(file, size):
                if "." not in line and line.strip().isdigit():  # the next frame: this one is too short
                    head = line
                    break
                lines.append(line)
            if len(lines) == size:
                head = file.readline()
            vectors = []
            while head.lstrip().startswith("VEC"):
                vectors.append(head)
                head = file.readline()
            if _is_atom(head):
                yield Record(0, error=f"it has more lines than {size} atoms need")
                head = _next_head(file)
            else:
                yield Record(0, parse=partial(parser, comment.strip(), "".join(lines), size, vectors))


class _FrameParser:
    """Parses frames of extended XYZ one after the other.

    Frames of one molecule often differ in their positions only. Such a frame is a copy of the last one with other
    positions, which takes a third of the time.
    """

    def __init__(self) -> None:
        self._last: tuple[str, list[str], Atoms] | None = None

    def __call__(self, comment: str, lines: str, size: int, vectors: list[str]) -> Atoms:
        """Return the structure of a frame.

        Args:
            comment: the comment line.
            lines: the lines of atoms.
            size: number of atoms.
            vectors: lines with lattice vectors, as ADF writes them.

        Raises:
            BadData: the frame is damaged, or its statements contradict each other.
        """
        rows = [line.split() for line in lines.split("\n")]
        words = [word for row in rows for word in row]
        # a frame whose last line has no end may be cut off
        whole = all(len(row) == 4 for row in rows[:-1]) and not rows[-1] and len(words) == 4 * size and not vectors
        positions = _positions(words) if whole else None
        if positions is not None and self._last is not None and (comment, words[::4]) == self._last[:2]:
            atoms = self._last[2].copy()
            atoms.positions, atoms.info = positions, deepcopy(atoms.info)
            return atoms
        atoms = structure_of_xyz((comment, lines.splitlines(keepends=True), size, vectors), "it")
        # with units of length or other columns, its positions are not these numbers, unless all are 0
        plain = positions is not None and positions.any() and np.array_equal(atoms.positions, positions)
        if plain and atoms.calc is None:
            self._last = comment, words[::4], atoms.copy()
            self._last[2].info = deepcopy(atoms.info)
        return atoms


def _positions(words: list[str]) -> NDArray | None:
    """Return [N, 3] from the words of lines with an element and three coordinates; None if these are not numbers."""
    try:
        return np.array([list(map(float, words[k::4])) for k in (1, 2, 3)]).T
    except ValueError:
        return None


def _next_head(file: TextIO) -> str:
    """Return the next line that can begin a frame; "" at the end."""
    while (line := file.readline()) and not line.strip().isdigit():
        pass
    return line


def _is_atom(line: str) -> bool:
    try:
        return len([float(word) for word in line.split()[1:4]]) == 3
    except ValueError:
        return False


def _cut_sdf(text: bytes) -> tuple[list[int], bool]:
    """As `cut_xyz`, for records that end with a line of $$$$."""
    found: list[int] = []
    if text.count(b"\r") - text.endswith(b"\r") > text.count(b"\r\n"):
        return found, True
    end = 0
    while True:
        mark = end if text.startswith(b"$$$$", end) else text.find(b"\n$$$$", end)
        end = text.find(b"\n", mark + 1) + 1
        if mark < 0 or not end:
            return found, False
        found.append(end)


_CUTS: dict[str, _Cut] = {".sdf": _cut_sdf, ".xyz": cut_xyz, ".extxyz": cut_xyz}
_READERS = {
    ".sdf": _read_sdf, ".mol": _read_sdf, ".smi": _read_smiles, ".smiles": _read_smiles, ".xyz": _read_xyz,
    ".extxyz": _read_xyz,
}  # fmt: skip


# --- writing ---

Writer = Callable[[Outcome], str]


def require_writable(path: str, has_bonds: bool) -> None:
    """Refuse an output to which results cannot be written.

    Args:
        path: path of the output.
        has_bonds: True if the input has bonds, which an SDF needs.

    Raises:
        BadConfig: the format is unknown, or needs bonds that the input lacks.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".sdf" and not has_bonds:
        raise BadConfig(f"{path}: an SDF needs bonds, but the input has none: write an .xyz file")
    if suffix not in WRITERS:
        raise BadConfig(f"{path}: results can be written to {', '.join(WRITERS)}")


def _properties(outcome: Outcome, atoms: Atoms) -> dict[str, Any]:
    """Return the properties of a structure as a whole, after the number and name of its record."""
    name = {"name": outcome.record.name} if outcome.record.name else {}
    return {"record": outcome.record.number, **atoms.info, **name}


def xyz_entries(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties for the comment line of extended XYZ, which is a single line.

    Text loses its line breaks. Left out are empty text, after which ASE reads the next entry as its value, and data of
    the input whose names would be read as parts of the structure or as results.
    """
    one_line = {
        name: " ".join(value.splitlines()) if isinstance(value, str) else value for name, value in properties.items()
    }
    return {
        name: value
        for name, value in one_line.items()
        if name not in _NAMES_OF_XYZ and not (isinstance(value, str) and not value)
    }


_NAMES_OF_XYZ = frozenset(
    ("Lattice", "Properties", "pbc", "forces", "charges", "stress", "virial", "dipole", "magmom", "free_energy")
)


def _write_xyz(outcome: Outcome) -> str:
    from ase.io import write

    text = io.StringIO()
    for atoms in outcome.structures:
        copy = atoms.copy()
        copy.info = xyz_entries(_properties(outcome, atoms))
        write(text, copy, format="extxyz")
    return text.getvalue()


def csv_row(properties: Mapping[str, Any]) -> str:
    """Return a line of a table, with the properties in `csv_head`; a structure without a stated charge has 0."""
    text = io.StringIO()
    known = {"charge": 0, **properties}
    csv.writer(text, lineterminator="\n").writerow([known.get(name, "") for name in _CSV_COLUMNS])
    return text.getvalue()


def csv_rows(outcome: Outcome) -> list[str]:
    """Return a line for each structure."""
    return [
        csv_row({"formula": atoms.get_chemical_formula(), **_properties(outcome, atoms)})
        for atoms in outcome.structures
    ]


def _write_csv(outcome: Outcome) -> str:
    return "".join(csv_rows(outcome))


_CSV_COLUMNS = (
    "record", "name", "conformer", "formula", "charge", "energy", "relative_energy", "largest_force", "steps",
    "converged", "bonds_changed", "novelty", "energy_std", "force_std",
)  # fmt: skip
"""Columns of a table. Units: e, eV, eV/Å."""


def csv_head(path: Path) -> str:
    """Return the first line of a file: the columns of CSV, else ""."""
    return ",".join(_CSV_COLUMNS) + "\n" if path.suffix.lower() == ".csv" else ""


def is_hdf5(path: Path) -> bool:
    """Return whether a file is HDF5. Since HDF5 cannot grow safely, results are extended XYZ until all are there."""
    return path.suffix.lower() in (".h5", ".hdf5")


def convert_to_hdf5(results: Path, path: Path) -> None:
    """Convert results in extended XYZ to a data set with energy, forces, charges, "scalar:record", "scalar:novelty"."""

    def samples() -> Iterator[Sample]:
        for atoms in iread(results, index=":", format="extxyz"):
            found = {**atoms.info, **atoms.calc.results, **atoms.arrays}
            labels = {f"scalar:{name}": [float(atoms.info[name])] for name in PROPERTIES if name in atoms.info}
            labels = {**labels, **{name: found[name] for name in ("forces", "charges") if name in found}}
            labels = {**labels, "energy": [found["energy"]]}
            atoms.calc = None
            tensors = {name: torch.as_tensor(np.asarray(value), dtype=torch.float64) for name, value in labels.items()}
            yield Sample(System.from_ase(atoms), tensors)

    from ase.io import iread

    keep_old(path)
    write_hdf5(path, samples())


def _write_sdf(outcome: Outcome) -> str:
    text = []
    for atoms in outcome.structures:
        block = outcome.record.molfile.partition("M  END")[0]
        text.append(with_positions(block, atoms.positions) + "M  END\n")
        for name, value in _properties(outcome, atoms).items():
            text.append(f"> <{name}>\n{f'{value:.8f}' if isinstance(value, float) else value}\n\n")
        charges = atoms.arrays.get("charges")
        if charges is not None:
            text.append("> <atom_charges>\n" + "\n".join(f"{q:.5f}" for q in charges) + "\n\n")
        text.append("$$$$\n")
    return "".join(text)


def with_positions(block: str, positions: Any) -> str:
    """Return a molfile with other coordinates.

    Args:
        block: V2000 or V3000, up to "M  END".
        positions: [N, 3] Å.
    """
    lines = block.split("\n")
    lines[1] = lines[1][:20].ljust(20) + "3D" + lines[1][22:]
    rows = iter(positions.tolist())
    if "V3000" in lines[3]:
        inside = False
        for k, line in enumerate(lines):
            if line.startswith("M  V30 BEGIN ATOM"):
                inside = True
            elif line.startswith("M  V30 END ATOM"):
                inside = False
            elif inside and not (k and lines[k - 1].rstrip().endswith("-")):
                words = line.split()
                words[4:7] = [f"{x:.6f}" for x in next(rows)]
                lines[k] = "M  V30 " + " ".join(words[2:])
        return "\n".join(lines)
    for k, (x, y, z) in enumerate(rows, start=4):
        line = lines[k]
        lines[k] = f"{x:10.4f}{y:10.4f}{z:10.4f}" + (line[30:] if len(line) > 30 else " " + line.split(None, 3)[3])
    return "\n".join(lines)


WRITERS: dict[str, Writer] = {
    ".sdf": _write_sdf, ".xyz": _write_xyz, ".extxyz": _write_xyz, ".csv": _write_csv, ".h5": _write_xyz,
    ".hdf5": _write_xyz,
}  # fmt: skip
"""Suffix of a file -> function that writes the results of a record."""
