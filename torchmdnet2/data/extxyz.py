"""Fast reader of extended XYZ. It gives the results of ase.io in a third of the time, with one frame in memory.

Format: https://github.com/libAtoms/extxyz. ASE parses the comment lines.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ..core.files import require_plain
from ..core.stated import Statement, may_be_cell
from ..errors import StructureWarning

if TYPE_CHECKING:
    from ase import Atoms

__all__ = [
    "BOM", "ISOTOPES", "STRUCTURE", "Frame", "cut_xyz", "extxyz_frames", "is_count", "numbers_of", "raw_frames",
    "read_extxyz", "real", "structure_of",
]  # fmt: skip

STRUCTURE = frozenset({"numbers", "positions", "momenta", "tags", "masses", "initial_charges", "initial_magmoms"})
"""Arrays that ASE keeps for the atoms and that are not labels."""

BOM = "\ufeff"
"""The byte order mark that some editors put before a text."""

ISOTOPES = {"D": 1, "T": 1}
"""Symbol -> atomic number, for symbols that are not elements."""

_PLAIN = "species:S:1:pos:R:3"
_NAMES = {
    "species": "symbols",
    "pos": "positions",
    "Z": "numbers",
    "charge": "charges",
}  # names in a file -> names in ASE
_KNOWN = {"lattice": "Lattice", "properties": "Properties", "pbc": "pbc"}
_KEY, _QUOTED = re.compile(r"(?<!\S)([^\s=]+)\s*="), re.compile(r'"[^"]*"|\'[^\']*\'|\{[^}]*\}|\[[^]]*\]')
_TENSOR = re.compile(r"(?<!\S)(stress|virial)(?=\s*=)")  # names that ASE refuses without nine numbers
_NESTED = re.compile(r"""("[^"]*"|'[^']*')|(?<==)(\[\s*\[[^"']*?\]\s*\])""")
_COLON = re.compile(r"(?<!\S)(charge|mult|multiplicity|spin)\s*:\s*([+-]?\d+)[;,]?(?!\S)", re.I)
_EQUAL = re.compile(r"^(\d+)\s+\1(?!\S)")  # two equal numbers, charge and multiplicity, of which ASE keeps one
_MARK = "\0"
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f]")  # separate words for some readers only
_LINES = 1024  # lines of atoms whose numbers are read at once, so that arrays stay in the cache
_TRUTH = {"T": True, "True": True, "F": False, "False": False}


def real(word: str) -> float:
    """Return a number, also one as Fortran writes it (1.0D-03)."""
    try:
        return float(word)
    except ValueError:
        if _FORTRAN.fullmatch(word) is None:
            raise
        return float(word.lower().replace("d", "e"))


_FORTRAN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[dD][+-]?\d+")
_READ: dict[str, Callable[[str], Any]] = {"R": real, "I": int, "L": _TRUTH.__getitem__, "S": str}


_Raw: TypeAlias = tuple[str, list[str], int, list[str]]


class Frame(NamedTuple):
    """One structure and its entries, unchanged from the file.

    Attributes:
        numbers: [N] atomic numbers.
        positions: [N, 3] positions in the file's unit of length.
        cell: [3, 3] lattice vectors as rows, in the same unit; zeros without a cell.
        pbc: [3] booleans.
        entries: name -> value, of the structure and of its atoms.
        stated: initial charges and magnetic moments of the atoms, [N]; their sums state charge and spin.
        charge, spin: total charge and multiplicity that other parts of the file state.
        bonds: whether the format has bonds, which show missing hydrogens.
    """

    numbers: np.ndarray
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    entries: dict[str, Any]
    stated: dict[str, np.ndarray] = {}  # noqa: RUF012 (never written to)
    charge: Sequence[Statement] = ()
    spin: Sequence[Statement] = ()
    bonds: bool = False


def read_extxyz(
    source: str | IO[bytes], read: Callable[[float], None] | None = None, begin: int = 0
) -> Iterator[Frame | Exception]:
    """Yield the frames of a file, also a compressed one (.gz, .bz2, .xz). Empty lines between frames are skipped.

    A frame that cannot be read is yielded as its error: EOFError, ValueError or KeyError. The message does not name the
    file.

    Args:
        source: path of the file, or a text of whole frames as an open file.
        read: called after each frame with the part of the file that has been read, 0 to 1; not for compressed files.
        begin: number of bytes, of the decompressed file, before the first frame that is wanted.

    Raises:
        OSError: the file is damaged.
    """
    if isinstance(source, str):
        require_plain(source)
    elif not begin:
        text = source.read()
        end = 0
        for frame, first, last in _equal_frames(text):
            yield from [frame] if frame is not None else _by_lines(io.BytesIO(text[first:last]))
            end = last
        source = io.BytesIO(text[end:])
    yield from _by_lines(source, read, begin)


def _by_lines(
    source: str | IO[bytes], read: Callable[[float], None] | None = None, begin: int = 0
) -> Iterator[Frame | Exception]:
    for raw in _raw_frames(source, read, begin):
        try:
            if isinstance(raw, ValueError):
                raise raw
            yield _frame(*raw)
        except (EOFError, ValueError, KeyError, TypeError, IndexError) as error:
            yield error


def raw_frames(path: str) -> Iterator[_Raw]:
    """Yield the unparsed parts of each frame: comment line, lines of atoms, number of atoms, lattice vectors of ADF.

    Raises:
        OSError, ValueError: the file is damaged, or no number of atoms stands where a frame begins.
    """
    for raw in _raw_frames(path):
        if isinstance(raw, ValueError):
            raise raw
        yield raw


def _raw_frames(
    source: str | IO[bytes], read: Callable[[float], None] | None = None, begin: int = 0
) -> Iterator[_Raw | ValueError]:
    """Yield frames as `raw_frames`; where no number of atoms stands, the error, and then the frame of the next number.

    A number alone among the lines of atoms begins the next frame: this one lacks lines.
    """
    from ase.io.formats import open_with_compression

    opened = open_with_compression(source, "rb") if isinstance(source, str) else source
    with io.TextIOWrapper(opened, encoding="utf-8", errors="replace") as file:
        bytes_of_file = 0
        if isinstance(source, str) and isinstance(file.buffer, io.BufferedReader):
            bytes_of_file = os.path.getsize(source)
        if begin:
            file.buffer.seek(begin)
        ahead: list[str] = []  # lines that were taken for atoms

        def take(count: int) -> list[str]:
            if not ahead:
                return list(islice(file, count))
            found = ahead[:count]
            del ahead[:count]
            return found + list(islice(file, count - len(found)))

        def line() -> str:
            return ahead.pop(0) if ahead else next(file, "")

        def tell() -> None:
            if read is not None and bytes_of_file:
                read(file.buffer.tell() / bytes_of_file)

        head = line().removeprefix(BOM)
        while head:
            if head.strip():
                try:
                    size = _size(head)
                except ValueError as error:
                    yield error
                    head = line()  # this one may have digits too, as ² or 5,000 of them
                    while head and not head.strip().isdigit():
                        head = line()
                    tell()
                    continue
                comment = line()
                lines = take(size)
                if any(map(str.isdigit, map(str.strip, lines))):
                    begins = next(k for k, text in enumerate(lines) if text.strip().isdigit())
                    ahead[:0] = lines[begins:]
                head = line()
                vectors = []  # ADF writes them in separate lines
                while head.lstrip().startswith("VEC"):
                    vectors.append(head)
                    head = line()
                yield comment.strip(), lines, size, vectors
                tell()
            else:
                head = line()


def is_count(text: str | bytes) -> bool:
    """Return whether a text is a number of atoms, of at most nine digits."""
    return len(text) < 10 and text.isascii() and text.isdigit()


def cut_xyz(text: bytes) -> tuple[list[int], bool]:
    """Find whole frames at the beginning of a text without looking at each line.

    Such a frame is followed by another one, and each of its lines of atoms begins with a letter or has a decimal point.

    Returns:
        Where the frames end; True if something else follows, for which the lines must be read one by one.
    """
    codes = np.frombuffer(text, np.uint8)
    begins = np.concatenate([[0], np.flatnonzero(codes == ord("\n")) + 1])
    end = int(begins[-1])
    if b"\r" in text and text.count(b"\r", 0, end) != text.count(b"\r\n", 0, end):
        return [], True
    pointless = _without_point(text, codes, begins)
    found, line = _equal_sizes(text, codes, begins, pointless)
    starts, other = begins[line:].tolist(), [*(pointless[pointless >= line] - line).tolist(), len(begins)]
    whole, line = len(starts) - 1, 0

    def word(line: int) -> bytes:
        return text[starts[line] : starts[line + 1]].strip()

    head = word(0).removeprefix(BOM.encode()) if whole else b""  # only the first text of a file begins with a mark
    while True:
        while not head:
            line += 1
            if line >= whole:
                return found, False
            head = word(line)
        if not is_count(head):
            return found, True
        first, last = line + 2, line + 2 + int(head)
        if other[bisect_left(other, first)] < min(last, whole):
            return found, True
        if last >= whole:
            return found, False
        line, head = last, word(last)
        if head and not head.isdigit():
            return found, True
        found.append(starts[last])


def _without_point(text: bytes, codes: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the lines that neither begin with a letter nor have a decimal point: one may be a number of atoms."""
    lines = np.flatnonzero((codes[begins[:-1]] | 32) - ord("a") >= 26)
    if 4 * len(lines) > len(begins):  # lines of atoms begin with spaces
        return lines[~np.logical_or.reduceat(codes[: begins[-1]] == ord("."), begins[:-1])[lines]]
    places = zip(begins[lines].tolist(), begins[lines + 1].tolist(), strict=True)
    return lines[[text.find(b".", first, last) < 0 for first, last in places]]


def _equal_sizes(text: bytes, codes: np.ndarray, begins: np.ndarray, pointless: np.ndarray) -> tuple[list[int], int]:
    """Find the frames before the first one with another number of atoms, for `cut_xyz`: where they end, and the line
    after them. Many files have no other frames."""
    head = text[: begins[1]] if len(begins) > 1 else b""
    if not is_count(head.strip()):
        return [], 0
    lines = 2 + int(head)
    heads = begins[::lines]
    heads = heads[heads + len(head) <= begins[-1]]
    equal = (codes[heads[:, None] + np.arange(len(head))] == [*head]).all(1)
    among_atoms = pointless[pointless % lines > 1]
    count = min([len(equal) - 1, *(np.flatnonzero(~equal)[:1] - 1), *(among_atoms[:1] // lines)])
    return begins[lines : lines * count + 1 : lines].tolist(), lines * count


def _tidied(comment: str) -> str:
    """Return a comment line in which words such as `charge: -2; mult: 1`, and the cell of i-PI, are entries."""
    if cell := _IPI.match(comment):
        comment = _of_ipi(cell[1], cell[2].split(), comment[cell.end() :])
    return _COLON.sub(r"\1=\2", _EQUAL.sub(r"\1 +\1", comment))


_IPI = re.compile(r"#?\s*CELL[(\[{](\w+)[)\]}]:\s*([-+\d.eE\s]*)")
_NAMED = re.compile(r"(\w+)\{(\w+)\}")  # positions{angstrom}


def _of_ipi(kind: str, numbers: list[str], rest: str) -> str:
    """Return a comment line of i-PI as one of extended XYZ: CELL(abcABC): a b c α β γ … positions{UNIT} cell{UNIT}.

    Raises:
        ValueError: the cell has another form or no unit, or the values are not positions.
    """
    from ase.geometry import cellpar_to_cell

    units = {name: unit.replace("atomic_unit", "bohr") for name, unit in _NAMED.findall(rest)}
    cell, name = units.pop("cell", None), next(iter(units), None)
    if name is not None and name not in ("positions", "x_centroid"):
        raise ValueError(f"the comment line states a trajectory of {name}, not of positions")
    if kind != "abcABC" or len(numbers) != 6 or cell is None or name is None:
        raise ValueError(
            f'the cell CELL({kind}) is not read: write it as Lattice="ax ay az bx by bz cx cy cz", and units as '
            "pos_unit=… and cell_unit=…, or leave it out for a molecule"
        )
    vectors = " ".join(repr(x) for x in cellpar_to_cell([float(number) for number in numbers]).ravel().tolist())
    more = re.sub(r"(\w+):\s*(\d+)", r"\1=\2", _NAMED.sub("", rest)).replace("Traj:", "")
    return f'Lattice="{vectors}" pos_unit={units[name]} cell_unit={cell} {more.strip()}'


def _size(line: str) -> int:
    try:
        size = int(line)
    except ValueError:
        size = -1
    if size < 0:
        raise ValueError(f"a number of atoms is expected where a frame begins, not '{line.strip()[:40]}'{_few(line)}")
    return size


def _few(line: str) -> str:
    words = line.split()
    if len(words) < 4 or not words[0].isalpha():
        return ""
    where = "are the first two lines of this one (number, comment) there?"
    return f": is the number of atoms of the frame before right, and {where}"


class _Head(NamedTuple):
    """A parsed comment line.

    Attributes:
        info: its entries. A stress or virial without nine numbers is unchanged.
        refused: the reason why the cell that it seems to state is refused, if there is no other; "": none.
        doubt: a warning of free text that may state a cell; "": none.
    """

    info: dict[str, Any]
    refused: str
    doubt: str


def _head(comment: str) -> _Head:
    """Parse a comment line.

    Lines that differ in the numbers of entries alone, as `energy=-1.5`, are parsed once, since that takes as long as
    all atoms of a molecule.
    """
    numbers: dict[str, np.number] = {}

    def digit(found: re.Match[str]) -> str:
        quoted, name, sign, whole, part, exponent = found.groups()
        if quoted:
            return quoted
        word = sign + whole + part + exponent
        numbers[name] = np.float64(word) if part or exponent else np.int_(word)
        return f"{name}={sign}{'0.5' if part else 5}{exponent}"

    head = _parsed(comment if _UNUSUAL.search(comment) else _NUMBER.sub(digit, comment))
    if any(type(head.info.get(name)) is not type(number) for name, number in numbers.items()):  # part of another entry
        head, numbers = _parsed(comment), {}
    return head._replace(info={key: _copied(value) for key, value in head.info.items()} | numbers)


_NUMBER = re.compile(r'("[^"]*")|(?<!\S)([^\s="]+)=([+-]?)([0-9]{1,15})((?:\.[0-9]+)?)((?:[eE][+-]?[0-9]{1,2})?)(?!\S)')
_UNUSUAL = re.compile(r"[\\'{\[]")  # other quotes


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list) and all(type(one) is bool for one in value):
        return [*value]
    return deepcopy(value) if isinstance(value, list | dict) else value


@lru_cache(maxsize=64)
def _parsed(comment: str) -> _Head:
    """Parse as `_head`, with one result for equal lines, since many frames of a file may have the same one."""
    from ase.io.extxyz import key_val_str_to_dict

    comment = _tidied(comment)
    quoted = _NESTED.sub(lambda found: found[1] or f'"{found[2]}"', comment)
    found = key_val_str_to_dict(_TENSOR.sub(_MARK + r"\1", quoted)) if comment else {}
    for key in [key for key in found if key.startswith(_MARK)]:
        value = found.pop(key)
        found[key[1:]] = value.reshape(3, 3, order="F") if getattr(value, "shape", ()) == (9,) else value
    if found:
        _check_keys(comment)
    info = {key: _plain(value.replace(_MARK, "")) if isinstance(value, str) else value for key, value in found.items()}
    return _Head(info, *_cells_in(info, comment))


def _check_keys(comment: str) -> None:
    _check_names(_KEY.findall(_QUOTED.sub("", comment)))


def _plain(text: str) -> Any:
    """Return numbers as Fortran writes them (-1.0D+02) as numbers, and other text unchanged."""
    words = text.split()
    if not words or not all(_FORTRAN.fullmatch(word) for word in words):
        return text
    return real(text) if len(words) == 1 else np.array([real(word) for word in words])


class _Column(NamedTuple):
    name: str
    kind: str  # R, I, S, L
    first: int
    width: int


@lru_cache(maxsize=64)
def _columns(properties: str) -> tuple[_Column, ...]:
    """Parse Properties, the columns of the lines of atoms: name:kind:count:name:kind:count…"""
    fields, found, first = properties.split(":"), [], 0
    if len(fields) % 3 or any(kind not in _READ or not n.isdigit() for kind, n in zip(fields[1::3], fields[2::3])):  # noqa: B905
        raise ValueError(f"Properties={properties} is not a list of NAME:KIND:COLUMNS with the kinds R, I, S, L")
    for name, kind, count in zip(fields[::3], fields[1::3], map(int, fields[2::3]), strict=True):
        found.append(_Column(_NAMES.get(name, name), kind, first, count))
        first += count
    _check_names([column.name for column in found])
    return tuple(found)


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that are given twice, and spellings that would have no effect."""
    for k, name in enumerate(names):
        if name in names[:k]:
            raise ValueError(f"'{name}' is given twice")
        if name != (known := _KNOWN.get(name.lower(), name)):
            raise ValueError(f"'{name}' must be written {known}")


_CELL = re.compile(
    r"(?<!\w)(?:unit[ _]?cell|cell|lattice|box|pbc)[\s:=({\[]+(?:\d+\.?\d*[\s,]+){2,8}\d+\.?\d*|"
    r"(?<!\w)a\s*=\s*[\d.]+\W+b\s*=\s*[\d.]+\W+c\s*=\s*[\d.]+",
    re.IGNORECASE,
)
"""A cell in free text: `cell: 8 8 8 90 90 90`, `unitcell {8 8 8}`, `a=8 b=8 c=8`."""


def _cells_in(info: Mapping[str, Any], comment: str) -> tuple[str, str]:
    """Return why a cell under another name than Lattice is refused, since it would have no effect, and a warning of one
    in free text; "" if there is none."""
    refused = next((
        f"'{name}' is not read as a cell: write it as Lattice=\"ax ay az bx by bz cx cy cz\", or leave it out for a "
        "molecule"
        for name, value in info.items() if may_be_cell(name, info.__getitem__) and np.size(value) <= 9
    ), "")  # fmt: skip
    found = _CELL.search(comment)
    if found is None:
        return refused, ""
    name = re.split(r"\W*\d", found[0])[0]  # without numbers, which may differ in each frame
    return refused, (
        f"'{name} …' in a comment line is not read: if it is a cell, write it as Lattice=\"ax ay az bx by bz cx cy cz\""
    )


def _frame(
    comment: str, lines: Sequence[str], size: int, vectors: Sequence[str], together: _Together | None = None
) -> Frame:
    """Parse a frame.

    Args:
        comment, lines, size, vectors: as of `raw_frames`.
        together: the values of its lines, which are not given then.

    Raises:
        _ByLines: the values are not those of its columns.
        EOFError, ValueError, KeyError, TypeError, IndexError: it is damaged.
    """
    if len(lines) < size and together is None:
        raise EOFError(
            f"the file was cut off: it ends after {len(lines)} of {size} atoms, or the number of atoms where the frame "
            "begins is too large"
        )
    if vectors:
        comment = _tidied(comment)
        _check_keys(comment)
    info, refused, doubt = _Head({"comment": comment}, "", "") if vectors else _head(comment)
    properties = info.pop("Properties", None)
    if together is not None:
        arrays = together.columns(properties)
    else:
        rows = [line.split() for line in lines]
        if properties is None:
            properties = _WITH_CHARGES if not vectors and _fifth(rows) else _PLAIN
        columns = _columns(str(properties))
        width = columns[-1].first + columns[-1].width
        if min(map(len, rows), default=width) < width:
            k = next(k for k, row in enumerate(rows) if len(row) < width)
            many = f": is the number of atoms, {size}, too large?" if len(rows[k]) < 2 else ""
            raise ValueError(f"atom {k} has {len(rows[k])} of its {width} columns{many}")
        arrays = {column.name: _values(rows, column) for column in columns}
        if lines and not lines[-1].endswith("\n"):
            _check_last(rows)
    symbols, numbers, positions = arrays.get("symbols"), arrays.get("numbers"), arrays.get("positions")
    if numbers is None:
        numbers = _numbers(symbols)
    elif symbols is not None:
        other = np.flatnonzero(_numbers(symbols) != numbers)
        if len(other):
            k = int(other[0])
            raise ValueError(f"atom {k} is {symbols[k]} by its species, but Z = {numbers[k]} by its atomic number")
    if numbers.dtype.kind != "i" or numbers.shape != (size,):
        raise ValueError("atomic numbers must be whole (Z:I:1)")
    if positions is None or positions.shape != (size, 3):
        raise ValueError("Properties has no positions (pos:R:3)")
    lattice, periodic = info.pop("Lattice", None), info.pop("pbc", None)
    if lattice is None and refused:
        raise ValueError(refused)
    if lattice is None and doubt:
        warnings.warn(doubt, StructureWarning, stacklevel=3)
    if vectors:
        lattice = np.array([line.split()[1:] for line in vectors], dtype=float).T
    cell: np.ndarray = np.zeros((3, 3))
    if lattice is not None:
        cell[: lattice.shape[1]] = lattice.T
    if periodic is None:
        periodic = lattice is not None and np.arange(3) < lattice.shape[1]
    pbc = np.asarray(periodic)
    if pbc.dtype.kind not in "bi" or pbc.shape not in ((), (3,)):
        raise ValueError(f'pbc must be three of T and F, as in pbc="T T F", not {periodic}')
    entries = {name: values for name, values in arrays.items() if name not in STRUCTURE and name != "symbols"}
    stated = {name: values for name, values in arrays.items() if name in ("initial_charges", "initial_magmoms")}
    pbc = pbc.astype(bool) if pbc.shape else np.full(3, pbc.item(), dtype=bool)
    return Frame(numbers, positions, cell, pbc, {**entries, **info}, stated)


def structure_of(comment: str, lines: Sequence[str], size: int, vectors: Sequence[str]) -> tuple[Atoms, dict[int, str]]:
    """Return a raw frame as ASE reads it, with D and T as H, and the atoms that were D or T.

    Raises:
        EOFError, ValueError: the frame is damaged, or states two elements for one atom.
    """
    from ase import Atoms
    from ase.io import read
    from ase.io.extxyz import set_calc_and_arrays

    frame, comment = _frame(comment, lines, size, vectors), _tidied(comment)
    properties = re.search(r"(?<!\S)Properties=(\S+)", comment)
    columns = _columns(properties[1].strip("\"'") if properties else _PLAIN)
    species = next((column for column in columns if column.name == "symbols"), None)
    isotopes: dict[int, str] = {}
    shown = list(lines)
    for k in np.flatnonzero(frame.numbers == 1).tolist() if species is not None else ():
        assert species is not None
        words = lines[k].split()
        if words[species.first].capitalize() in ISOTOPES:
            isotopes[k] = words[species.first].capitalize()
            words[species.first] = "H"
            shown[k] = " ".join(words) + "\n"
    if not properties and _FIFTH in frame.entries:
        columns = _columns(_WITH_CHARGES)
    labels = [column for column in columns if column.name not in ("symbols", "numbers", "positions")]
    if not vectors and all(c.kind == "R" and c.name not in (*STRUCTURE, "move_mask") for c in labels):
        names = {column.name for column in labels}
        info = {name: value for name, value in frame.entries.items() if name not in names}
        atoms = Atoms(
            numbers=frame.numbers, positions=frame.positions, cell=frame.cell if frame.cell.any() else None,
            pbc=frame.pbc, info=info,
        )  # fmt: skip
        set_calc_and_arrays(atoms, {name: frame.entries[name] for name in names})
        return atoms, isotopes
    text = "".join(
        [f"{size}\n", f"{comment}\n", *shown, *([] if not shown or shown[-1].endswith("\n") else ["\n"]), *vectors]
    )
    return read(io.StringIO(text), format="extxyz"), isotopes  # type: ignore[return-value]


_FIFTH = "column_5_charges"
_WITH_CHARGES = f"{_PLAIN}:{_FIFTH}:R:1"
_MOST = 20  # charge of a structure


def _fifth(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a fifth column without a name looks like charges: their sum is whole and not 0.

    Whole numbers of one sign may be flags or types.
    """
    if not rows or len(rows[0]) != 5 or any(len(row) != 5 for row in rows):
        return False
    try:
        values = np.array([real(row[4]) for row in rows])
    except ValueError:
        return False
    if not np.isfinite(values).all() or not ((values < 0).any() or (values % 1).any()):
        return False
    return abs(values.sum() - round(values.sum())) < 0.01 and 0 < abs(round(values.sum())) <= _MOST


def _check_last(rows: Sequence[Sequence[str]]) -> None:
    """Refuse a file that was cut off within its last number, which then has fewer decimals than all others."""
    *others, last = (len(word.partition(".")[2]) for row in rows for word in row if "." in word or word is row[-1])
    if len(set(others)) == 1 and last < others[0]:
        raise EOFError(f"the file was cut off: its last number, {rows[-1][-1]}, is shorter than all others")


class _ByLines(Exception):
    """A frame must be read line by line."""


class _Together(NamedTuple):
    """The values of the lines of a frame, each a symbol and C real numbers.

    Attributes:
        numbers: [N] atomic numbers.
        values: [N, C].
    """

    numbers: np.ndarray
    values: np.ndarray

    def columns(self, properties: Any) -> dict[str, np.ndarray]:
        """Return the columns as `_values` does, and atomic numbers instead of symbols.

        Raises:
            _ByLines: they are other columns.
        """
        species, *others = _columns(_PLAIN if properties is None else str(properties))
        width = 1 + sum(column.width for column in others)
        reals = all(column.kind == "R" and column.name != "numbers" for column in others)
        if species != ("symbols", "S", 0, 1) or not reals or width != 1 + self.values.shape[1]:
            raise _ByLines
        found = {"numbers": self.numbers}
        for name, _, first, count in others:
            found[name] = self.values[:, first - 1] if count == 1 else self.values[:, first - 1 : first - 1 + count]
        return found


def _equal_frames(text: bytes) -> Iterator[tuple[Frame | None, int, int]]:
    """Yield the frames before the first one with another number of atoms, and where each begins and ends; None instead
    of a frame that must be read line by line.

    The numbers of all frames are read at once, if they have a fixed number of decimals, as most programs write them.
    """
    codes = np.frombuffer(text, np.uint8)
    begins = np.concatenate([[0], np.flatnonzero(codes == ord("\n")) + 1])
    ends, lines = _equal_sizes(text, codes, begins, _without_point(text, codes, begins))
    if lines <= 2 * len(ends) or _CONTROL.search(text):
        return
    rows, until = begins[:lines].reshape(len(ends), -1), begins[1 : lines + 1].reshape(len(ends), -1)
    size = rows.shape[1] - 2
    step = max(1, _LINES // size)
    for start in range(0, len(ends), step):
        some, begin = slice(start, start + step), rows[start, 0]
        part = codes[begin : until[some][-1, -1]]
        usable, numbers, values = _numbers_at(part, rows[some, 2:] - begin, until[some, 2:] - begin)
        for k, (first, comment, atoms) in enumerate(rows[some, :3].tolist()):
            frame = None
            with suppress(_ByLines, EOFError, ValueError, KeyError, TypeError, IndexError):
                if usable[k]:
                    head = text[comment:atoms].decode(errors="replace").strip()
                    frame = _frame(head, (), size, (), _Together(numbers[k], values[k]))
            yield frame, first, ends[start + k]


def _numbers_at(codes: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of F frames of N lines which can be read here, [F]; atomic numbers [F, N]; and real numbers [F, N, C].

    Such lines are a symbol and C numbers without exponents, all with as many decimals as the first. A number is a whole
    number of less than 15 digits divided by a power of ten, which is rounded as `float` does it.

    Args:
        codes: the text.
        begins, ends: [F, N] where the lines begin and end.
    """
    points, blank = np.flatnonzero(codes == ord(".")), codes <= ord(" ")
    words = np.flatnonzero(blank[:-1] & ~blank[1:]) + 1
    before, until = np.searchsorted(points, begins), np.searchsorted(points, ends)
    count = int(until[0, 0] - before[0, 0])
    decimals = int(np.argmax(blank[points[before[0, 0]] :])) - 1 if count else 0
    if not 0 < decimals < 11:
        return np.zeros(len(begins), bool), np.zeros(begins.shape, np.int64), np.zeros((*begins.shape, 0))
    each = np.searchsorted(words, ends) - np.searchsorted(words, begins)
    usable = ((until - before == count) & (each == count + 1)).all(1)
    at = points[np.minimum(before[:, :, None] + np.arange(count), len(points) - 1)]

    codes = np.append(codes, np.full(decimals + 1, ord("\n"), np.uint8))
    whole, right = np.zeros(at.shape), codes[at + decimals + 1] <= ord(" ")
    for k in range(decimals):
        digit = codes[at + k + 1] - ord("0")
        right &= digit < 10
        whole = 10 * whole + digit
    digits, more = np.zeros(at.shape, np.int64), np.ones(at.shape, bool)
    for k in range(4):
        digit = codes[at - k - 1] - ord("0")
        more &= digit < 10
        whole += np.where(more, digit * 10.0 ** (decimals + k), 0.0)
        digits += more
    sign = codes[at - digits - 1] == ord("-")
    right &= (digits > 0) & (codes[at - digits - 1 - sign] <= ord(" "))
    values = np.where(sign, -whole, whole) / 10.0**decimals

    one, two, three = (codes[begins + k] for k in range(3))
    short = two <= ord(" ")
    symbols = one.astype(np.int64) << 8 | np.where(short, ord(" "), two)
    table = np.zeros(1 << 16, np.int64)
    for symbol in np.unique(symbols).tolist():
        with suppress(ValueError):  # no element, which is reported when the frame is read by lines
            table[symbol] = 1 + numbers_of([symbol.to_bytes(2, "big").decode("latin-1").strip()])[0]
    numbers = table[symbols] - 1
    usable &= right.all((1, 2)) & ((short | (three <= ord(" "))) & (numbers >= 0)).all(1)
    return usable, numbers, values


def _values(rows: Sequence[Sequence[str]], column: _Column) -> np.ndarray:
    """Return a column [N], or several columns [N, count]."""
    part, end = column.first, column.first + column.width
    read = _READ[column.kind]
    if column.kind == "R" and rows:
        words = [word for row in rows for word in row[part:end]]
        try:
            numbers = np.array([*map(float, words)])
        except ValueError:  # as Fortran writes them
            numbers = np.array([*map(real, words)])
        return numbers if column.width == 1 else numbers.reshape(len(rows), column.width)
    if column.width == 1:
        return np.array([read(row[part]) for row in rows])
    return np.array([list(map(read, row[part:end])) for row in rows]).reshape(len(rows), column.width)


def _numbers(symbols: np.ndarray | None) -> np.ndarray:
    if symbols is None:
        raise ValueError("Properties has neither elements (species:S:1) nor atomic numbers (Z:I:1)")
    if symbols.ndim != 1:
        return numbers_of(symbols.tolist())
    return _numbers_of(tuple(symbols.tolist())).copy()


@lru_cache(maxsize=64)
def _numbers_of(symbols: tuple[str, ...]) -> np.ndarray:
    """Return as `numbers_of`, with one array for equal symbols."""
    return numbers_of(symbols)


def numbers_of(symbols: Sequence[str]) -> np.ndarray:
    """Return the atomic numbers [N] of symbols in upper or lower case; D and T are hydrogen.

    Raises:
        ValueError: a symbol is not an element.
    """
    known = _known()
    names = [str(symbol).capitalize() for symbol in symbols]
    unknown = next((k for k, name in enumerate(names) if name not in known), None)
    if unknown is not None:
        remedy = ""
        if str(symbols[unknown]).isdigit():
            remedy = "; a column of atomic numbers needs Properties=Z:I:1:pos:R:3 in the comment line"
        elif str(symbols[unknown])[:1].isalpha():
            remedy = "; write the symbol of the element alone, as O, not O1, OW or O1-"
        raise ValueError(f"atom {unknown}: there is no element '{symbols[unknown]}'{remedy}")
    return np.array([known[name] for name in names], dtype=np.int64)


@lru_cache(maxsize=1)
def _known() -> dict[str, int]:
    from ase.data import atomic_numbers

    return {**atomic_numbers, **ISOTOPES}


def extxyz_frames(
    numbers: np.ndarray,
    sizes: np.ndarray,
    cell: np.ndarray,
    pbc: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    infos: Iterable[Mapping[str, Any]],
) -> Iterator[str]:
    """Yield the texts of structures, as ASE writes them.

    Args:
        numbers: [N] atomic numbers of all structures.
        sizes: [B] number of atoms of each structure.
        cell: [B, 3, 3] lattice vectors as rows, in Å; pbc: [B, 3].
        arrays: name -> floating-point numbers [N] or [N, columns]; first "positions" [N, 3] in Å.
        infos: the entries of each structure.
    """
    from ase.io.extxyz import PROPERTY_NAME_MAP, key_val_dict_to_str

    columns = {
        PROPERTY_NAME_MAP.get(name, name): value.reshape(len(numbers), int(np.prod(value.shape[1:])))
        for name, value in arrays.items()
    }
    names = ":".join(["species:S:1", *(f"{name}:R:{value.shape[1]}" for name, value in columns.items())])
    values = np.concatenate([*columns.values()], 1)
    lines = _lines(numbers, values)
    first = 0
    for k, info in enumerate(infos):
        last = first + int(sizes[k])
        lattice = f'Lattice="{" ".join(map(str, cell[k].ravel()))}" ' if cell[k].any() else ""
        head = f"{lattice}Properties={names} {key_val_dict_to_str({**info, 'pbc': pbc[k]})}"
        yield f"{sizes[k]}\n{head}\n{lines(first, last)}"
        first = last


def _lines(numbers: np.ndarray, values: np.ndarray) -> Callable[[int, int], str]:
    """Return a function that returns the lines of atoms `first` … `last` − 1: the symbol, and each value as %16.8f.

    Formatting all values together, digits from tables, takes a sixth of the time of Python's formatting.
    """
    # the nearest multiple of 1e-8: 1e8 has 19 bits, so that its products with both halves of a value are exact
    with np.errstate(all="ignore"):  # large numbers, and those that are not finite, take the slow way
        high = values.astype(np.float32).astype(np.float64)
        high, low = high * 1e8, (values - high) * 1e8
        whole = np.rint(high + low)
        sign = np.sign((high - whole) + low)
        whole += sign * ((sign * (high - whole) - 0.5) + sign * low > 0)  # where the sum was rounded to a half
    if not (np.abs(whole) < _TABLE * 1e8).all():
        line = "%-2s" + " %16.8f" * values.shape[1] + "\n"
        symbols = _symbols()[0]
        return lambda first, last: "".join(
            line % (symbols[z], *row)
            for z, row in zip(numbers[first:last].tolist(), values[first:last].tolist(), strict=True)
        )
    digits = np.abs(whole).astype(np.int64)
    before, after = np.divmod(digits, 10**8)
    text = np.empty((len(numbers), 3 + 17 * values.shape[1]), np.uint8)
    text[:, :2], text[:, -1] = _symbols()[1][numbers], ord("\n")
    columns = text[:, 2:-1].reshape(len(numbers), values.shape[1], 17)
    fours, signed = _tables()
    columns[:, :, 0], columns[:, :, 8] = ord(" "), ord(".")
    columns[:, :, 1:8] = signed[np.signbit(values).astype(np.int64), before]
    columns[:, :, 9:13], columns[:, :, 13:] = fours[after // 10**4], fours[after % 10**4]
    return lambda first, last: text[first:last].tobytes().decode()


_TABLE = 10**4


@lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits of 0 … 9999 [10⁴, 4], and as seven characters these numbers and their negatives [2, 10⁴, 7]."""
    fours = "".join(f"{k:04d}" for k in range(_TABLE))
    signed = "".join(f"{sign + str(k):>7}" for sign in ("", "-") for k in range(_TABLE))
    return (np.frombuffer(fours.encode(), np.uint8).reshape(-1, 4),
            np.frombuffer(signed.encode(), np.uint8).reshape(2, -1, 7))  # fmt: skip


@lru_cache(maxsize=1)
def _symbols() -> tuple[list[str], np.ndarray]:
    """Return the symbols of the elements, and their two characters [Z, 2]."""
    from ase.data import chemical_symbols

    text = "".join(f"{symbol:<2}" for symbol in chemical_symbols)
    return chemical_symbols, np.frombuffer(text.encode(), np.uint8).reshape(-1, 2)
