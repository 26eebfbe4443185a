"""Structures from files and SMILES, with the charge and spin that they state."""

from __future__ import annotations

import io
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..core.files import require_plain
from ..core.stated import Statement, agreed, no_cell, of_atoms, statements, whole_number
from ..core.stated_words import WarnedInfo, stated_units
from ..errors import BadData, MissingBackend, StructureWarning
from .extxyz import BOM, ISOTOPES, Frame, raw_frames, structure_of
from .hdf5 import HDF5Dataset
from .program_texts import (
    MASSES,
    jobs_of,
    length_factor,
    level_of,
    program_statements,
    read_molecules,
    reason,
    same_level,
    states_more,
)  # fmt: skip
from .reader import FORMATS, Format, LoadedDataset, find_format, format_of, has_format, make_readers
from .structure_warnings import (
    TITLES,
    warn_of_disorder,
    warn_of_guesses,
    warn_of_hydrogens,
    warn_of_oxidation,
    warn_of_placeholder,
    warn_of_titles,
    warn_of_unstated,
)

__all__ = [
    "Beside", "Found", "database_rows", "files_beside", "from_smiles", "open_found", "open_structures",
    "read_structures", "reason", "structure_of_molfile", "structure_of_xyz",
]  # fmt: skip


if TYPE_CHECKING:
    from ase import Atoms


def from_smiles(smiles: str, seed: int = 0) -> Atoms:
    """Return a conformer with hydrogens, from distance geometry (ETKDG version 3) and relaxed with MMFF94.

    `info["charge"]` is the formal charge, `info["spin"]` the multiplicity 2S+1 of unpaired electrons. Molecules with
    elements that MMFF94 does not know are not relaxed.

    Args:
        smiles: SMILES of one molecule.
        seed: seed of the distance geometry; equal seeds give equal conformers.

    Raises:
        MissingBackend: RDKit is not installed.
        BadData: the text is not a SMILES, has several molecules, or no conformer is found.

    Source: S. Riniker, G. Landrum, J. Chem. Inf. Model. 55, 2562 (2015); T. Halgren, J. Comput. Chem. 17, 490 (1996).
    """
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem import AllChem, Descriptors
    except ImportError as error:
        raise MissingBackend("SMILES need RDKit: pip install 'torchmdnet2[smiles]'") from error
    from ase import Atoms

    chem: Any = Chem
    with rdBase.BlockLogs():  # our messages replace RDKit's
        molecule = chem.MolFromSmiles(smiles)
        if molecule is None:
            raise BadData(f"'{smiles}' is not a SMILES that RDKit can read")
        if not molecule.GetNumAtoms() or len(chem.GetMolFrags(molecule)) > 1:
            raise BadData(f"'{smiles}': the SMILES must be of one molecule, without '.'; give a structure file instead")
        charge, radicals = chem.GetFormalCharge(molecule), Descriptors.NumRadicalElectrons(molecule)
        molecule = chem.AddHs(molecule)
        options = AllChem.ETKDGv3()
        options.randomSeed = seed
        if AllChem.EmbedMolecule(molecule, options) < 0:
            options.useRandomCoords = True  # for large rings and cages
            if AllChem.EmbedMolecule(molecule, options) < 0:
                raise BadData(f"'{smiles}': RDKit finds no conformer; give a structure file instead")
        if AllChem.MMFFHasAllMoleculeParams(molecule):
            AllChem.MMFFOptimizeMolecule(molecule, maxIters=2000)
    atoms = Atoms(
        [atom.GetAtomicNum() for atom in molecule.GetAtoms()], molecule.GetConformer().GetPositions(),
        info={"smiles": smiles, "charge": charge},
    )  # fmt: skip
    if radicals:
        atoms.info["spin"] = radicals + 1
    return atoms


# --- Structures from files ---
#
# ASE reads coordinates. This part adds what its readers leave out: formal charges and further molecules of SDF and
# molfiles, charges of atoms in PDB files, charge and multiplicity in texts of quantum-chemistry programs, units of
# length in the header of extended XYZ.

_PDB_REMARK = re.compile(
    r"^REMARK[ \t\d]*(?:(?:total|net|overall|formal|molecular|system)[ \t_]+)*"
    r"charge[ \t]*[:=]?[ \t]*([+-]?\d+)[ \t\r]*$",
    re.I | re.M,
)
_PDB_CHARGE = re.compile(r"(\d)([+-])|([+-])(\d)|([+-])")


class Found(NamedTuple):
    """A structure from a file, unchanged; the charge and spin that the file states; whether its format has bonds."""

    atoms: Atoms
    charge: Sequence[Statement] = ()
    spin: Sequence[Statement] = ()
    bonds: bool = False


def read_structures(path: str | PathLike, index: int | slice | None = None, format: str | None = None) -> list[Atoms]:
    """Read the structures of a file in Å, with the stated charge and spin in `info["charge"]` and `info["spin"]`.

    Use it instead of `ase.io.read`, which leaves out the formal charges of an SDF, all of its molecules but the first,
    and the charge in the log of a quantum-chemistry program.

    Args:
        path: a file of any format that ASE or `open_dataset` reads, formats of plug-ins too; text may begin with a byte
            order mark.
        index: a number or a slice; None reads all structures.
        format: name of the format, as for `open_dataset`; with None the file's name and content decide.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: the file is damaged, or states charges, multiplicities or elements that differ; or there is no such
            format.
        IndexError: the file has no structure with this number.
    """
    found = open_structures(path, format)
    return [found[k] for k in range(len(found))[index]] if isinstance(index, slice) else (
        [found[index]] if index is not None else [found[k] for k in range(len(found))]
    )  # fmt: skip


def open_structures(path: str | PathLike, format: str | None = None) -> Sequence[Atoms]:
    """Open the structures of a file as a sequence; XYZ, trajectories of ASE and HDF5 are parsed frame by frame."""
    name = str(path)
    chosen = find_format(format) or (format_of(name) if has_format(name) else None)
    if chosen is not None and chosen.name not in _FOUND and chosen.reader is not FORMATS["ase"]:
        return _OfDataset(name, chosen)
    return _Completed(name, open_found(name, None if format in (None, "auto", "ase") else format.removeprefix("ase/")))


_FOUND = ("extxyz", "traj", "db")
"""Formats that `open_found` reads, besides that of ASE: structures keep all that the file says of them."""


def open_found(path: str | PathLike, format: str | None = None) -> Sequence[Found]:
    """Read structures in the units of the file, with its statements; arguments and errors as in `read_structures`."""
    import ase.io.formats

    name = str(path)
    require_plain(name)
    with _in_words(name):
        format = format or ase.io.formats.filetype(name)
    if format in ("extxyz", "xyz"):
        return _Xyz(name)
    found = _opened(name, format)
    beside = Beside(name if format in _OF_XTB else None)
    return [beside.added_to(one, one.atoms.numbers) for one in found] if beside else found


def _opened(name: str, format: str) -> Sequence[Found]:
    if format == "traj":
        return _Trajectory(name)
    if format in ("db", "json"):
        with _in_words(name):
            return list(database_rows(name, format))
    with _in_words(name):
        text = _text_of(name, format) if format in _READERS or format in TITLES or states_more(format) else ""
    if format in _READERS:
        with _named(name):
            return _READERS[format](text, f"{name}: ")
    if len(jobs := jobs_of(format, text)) > 1:
        with _named(name):
            return _of_jobs(format, jobs)
    with _named(name):
        stated, by = program_statements(format, text), length_factor(format, text)
    found = _by_ase(name, format)
    for atoms in found if by != 1 else ():
        atoms.set_cell(atoms.cell.array * by)
        atoms.set_positions(atoms.positions * by, apply_constraint=False)
    warn_of_titles(format, text, stated, found[0].numbers, f"{name}: ")
    return [Found(atoms, stated["charge"], stated["spin"]) for atoms in found]


def _by_ase(source: Any, format: str) -> list[Atoms]:
    import ase.io

    path = source if isinstance(source, str) else ""
    if path and format in _OF_TYPES and not re.search(_OF_TYPES[format][0], _text(path), re.M):
        raise BadData(f"{path}: the file states no elements: {_OF_TYPES[format][1]}")
    if path and format in _TIDIED:
        with _named(path):
            source = io.StringIO(_TIDIED[format](_text(path)))
    elif path and _begins_with_mark(path):
        source = io.StringIO(_text(path))
    with _in_words(path, f" (as the format {format} of ase.io)" if format in ase.io.formats.ioformats else ""):
        more = {"store_tags": True} if format == "cif" else {}
        found = list(ase.io.iread(source, index=":", format=format, do_not_split_by_at_sign=True, **more))
    if not found or not all(map(len, found)):
        raise BadData(
            f"{path}{': ' if path else ''}ase.io finds no atoms in it, read as the format {format}. If the file has "
            "another format, such as an input of Q-Chem, convert it to XYZ or SDF"
        )
    if format in ("gromacs", "gromos"):
        warn_of_guesses(f"{path}: ", {name: symbol for atoms in found for name, symbol in _guessed_of(atoms)})
    for atoms in found if format == "cif" else ():
        warn_of_oxidation(path, atoms)
    return found


def _of_jobs(format: str, jobs: Sequence[str]) -> list[Found]:
    """Read an output of several jobs, which must be of one molecule and one method.

    Raises:
        BadData: they are not; names the jobs.
    """
    found, facts = [], []
    for k, job in enumerate(jobs, 1):
        with _named(f"job {k} of {len(jobs)}"):
            stated, frames = program_statements(format, job), _by_ase(io.StringIO(job), format)
            found += [Found(atoms, stated["charge"], stated["spin"]) for atoms in frames]
            charge, spin = (agreed(stated[name], name) for name in ("charge", "spin"))
            facts.append((frames[-1].get_chemical_formula(), charge, spin, level_of(job)))
    molecules = {(formula, charge, spin) for formula, charge, spin, _ in facts}
    levels = [level for *_, level in facts]
    if len(molecules) > 1 or not all(same_level(one, other) for one, other in combinations(levels, 2)):
        what = "molecules or states" if len(molecules) > 1 else "methods"
        raise BadData(
            f"it has {len(jobs)} jobs (--Link1--, or a later step or task) of different {what}: "
            + "; ".join(f"job {k} is {formula}, charge {_shown(charge)}, multiplicity {_shown(spin)}"
                        + f", {_words_of(level)}" * any(level.values())
                        for k, (formula, charge, spin, level) in enumerate(facts, 1))
            + ". Their frames do not belong together: split it into a file for each job, and read the one that you mean"
        )  # fmt: skip
    return found


def _words_of(level: Mapping[str, str]) -> str:
    model = [level.get("route") or level["method"], level["basis"]]
    return " ".join(filter(None, ["/".join(filter(None, model)), *(level[a] for a in level if a not in _MODEL)]))


_MODEL = ("route", "method", "basis")


def _shown(number: int | None) -> str:
    return "not given" if number is None else str(number)


def _guessed_of(atoms: Atoms) -> list[tuple[str, str]]:
    """Correct elements in a GRO file, where ASE takes CL for C and the ion NA for N; return names and elements.

    An ion has the name of its residue. Names that are not elements, such as MW, are virtual sites.
    """
    from ase.data import atomic_numbers

    names = [str(name) for name in atoms.arrays.get("atomtypes", ())]
    for k, (name, residue) in enumerate(zip(names, atoms.arrays.get("residuenames", ()), strict=False)):
        two = name.strip("0123456789+-").capitalize()
        if two in ("Cl", "Br") or (name == residue and two in atomic_numbers):
            atoms.symbols[k] = two
        elif name[:1] not in atomic_numbers:
            atoms.symbols[k] = "X"
    return list(zip(names, atoms.symbols, strict=False))


_OF_TYPES = {
    "lammps-dump-text": (
        r"^ITEM: ATOMS.* (element|mass)\b", "write the dump with the column element (dump_modify … element)"
    ),
    "lammps-data": (r"^\s*(Masses|Atom Type Labels)\b", "the section Masses is needed"),
}  # fmt: skip
"""Formats with numbered types of atoms, which ASE reads as elements -> pattern that states elements, remedy."""


def _of_whole_sections(text: str) -> str:
    """Refuse a restart file of CP2K that ends within a section, in which ASE's reader would search forever."""
    names = re.findall(r"(?m)^[ \t]*&(\w+)", text)
    if "SUBSYS" not in names or 2 * sum(name.startswith("END") for name in names) < len(names):
        raise BadData("it has no section &SUBSYS, or ends within a section (a line &END is missing)")
    return text


def _of_all_atoms(text: str, line: int) -> str:
    """Refuse a file with fewer lines of atoms than its header states, which ASE's reader does not notice."""
    lines = text.rstrip().splitlines()
    words = lines[line].split() if len(lines) > line else []
    count = int(words[0]) if words and words[0].isdigit() else 0
    if len(lines) < count + 2:
        raise BadData(f"it was cut off: it ends after {max(0, len(lines) - 2)} of its {count} atoms")
    return text


def _of_whole_groups(text: str) -> str:
    """Refuse a file of Turbomole that ends within $coord, which ASE's reader does not notice."""
    if re.search(r"(?im)^[ \t]*\$coord(?:.*\n(?![ \t]*\$))*.*\Z", text):
        raise BadData("it was cut off: it ends within $coord (a line $end is missing)")
    return text


_TIDIED: dict[str, Callable[[str], str]] = {
    "cp2k-restart": _of_whole_sections,
    "gen": partial(_of_all_atoms, line=0),
    "gromacs": partial(_of_all_atoms, line=1),
    "turbomole": _of_whole_groups,
    "nwchem-in": lambda text: re.sub(r"(?im)^([ \t]*end[ \t\r]*)$", r"\1\n", text),
    "gaussian-in": lambda text: re.sub(r"(?m)^([ \t]*[+-]?\d+)[ \t]*,[ \t]*(\d+[ \t\r]*)$", r"\1 \2", text),
}
"""Formats -> function that adapts a text for the reader in ASE, or refuses one that is cut off."""


@contextmanager
def _in_words(where: str, more: str = "") -> Iterator[None]:
    """Turn any error of another package's reader into a BadData that names the file."""
    try:
        yield
    except (BadData, MissingBackend, OSError):
        raise
    except Exception as error:
        raise BadData(f"{where}{': ' if where else ''}cannot be read as a structure: {reason(error)}{more}") from error


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn errors about a text into errors that name its file."""
    try:
        yield
    except BadData as error:
        raise BadData(f"{where}: {error}") from error


def _begins_with_mark(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(3) == BOM.encode()


def _text(path: str) -> str:
    from ase.io.formats import open_with_compression

    with open_with_compression(path, "rb") as file:
        return file.read().decode("utf-8-sig", errors="replace")


def _text_of(path: str, format: str) -> str:
    """Return the text of a file, followed by that of the input of its program beside it."""
    more = files_beside(path, _INPUTS[format]) if format in _INPUTS else []
    return "\n".join(map(_text, [path, *more]))


_INPUTS = {
    "turbomole": "control", "turbomole-gradient": "control", "aims": "control.in", "gen": "dftb_in.hsd",
    "castep-cell": "*.param", "vasp": "INCAR",
}  # fmt: skip
"""Formats of files with structures only -> name of the input, which states charge and multiplicity; * is the file's."""


_XTB = (".CHRG", ".UHF")
"""Files of xtb in the folder of its input: total charge, and number of unpaired electrons."""

_OF_XTB = ("turbomole", "gen", "vasp", "sdf", "mol", "proteindatabank")
"""Formats that xtb reads, besides XYZ."""


def files_beside(path: str, *names: str) -> list[str]:
    """Return the inputs of programs that may state more about the structures in a file; by default of any program."""
    inputs = [
        Path(path).with_name(name.replace("*", Path(path).stem))
        for name in names or (*sorted({*_INPUTS.values()}), *_XTB)
    ]
    return [str(file) for file in inputs if file.name != Path(path).name and file.is_file()]


_T = TypeVar("_T", Found, Frame)


class Beside:
    """Charge and multiplicity in the files .CHRG and .UHF of xtb beside a file; false if they state nothing.

    A .UHF of 0 states nothing: xtb takes it for the lowest multiplicity.

    Args:
        path: the file with structures; None: there are no such files.

    Attributes:
        charge, spin: statements.

    Raises:
        BadData: they contain no whole number.
    """

    def __init__(self, path: str | None):
        self.path = path
        self.charge: list[Statement] = []
        self.spin: list[Statement] = []
        self._atoms: np.ndarray | None = None
        for file in files_beside(path, *_XTB) if path is not None else ():
            for word in _text(file).split()[:1]:
                name = Path(file).name
                number = whole_number(word, name, file)
                if name == ".CHRG":
                    self.charge.append(Statement(number, "the file .CHRG beside it"))
                elif number:
                    self.spin.append(Statement(number + 1, "the file .UHF beside it"))

    def __bool__(self) -> bool:
        return bool(self.charge or self.spin)

    def added_to(self, found: _T, numbers: np.ndarray) -> _T:
        """Return a structure with these statements among its own.

        Args:
            found: a structure with the attributes `charge` and `spin`.
            numbers: [N] its atomic numbers.

        Raises:
            BadData: it is another molecule than the one before.
        """
        atoms = np.sort(numbers)
        self._atoms = atoms if self._atoms is None else self._atoms
        if not np.array_equal(atoms, self._atoms):
            if not (self.spin or any(one.value for one in self.charge)):
                return found  # neutral, as without the file
            sources = " and ".join(one.source for one in (*self.charge, *self.spin))
            raise BadData(
                f"{self.path}: {sources} is of one molecule, and the structures have different atoms: write charge=… "
                "into each of them, and remove that file"
            )
        return found._replace(charge=[*found.charge, *self.charge], spin=[*found.spin, *self.spin])


class _Completed(Sequence):
    """A sequence of structures, each completed on access."""

    def __init__(self, path: str, found: Sequence[Found]):
        self.path, self.found = path, found
        self._numbers: np.ndarray | None = None  # of the structure before

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: Any) -> Any:
        k = range(len(self))[index]
        where = f"{self.path}, structure {k}" if len(self) > 1 else self.path
        found = self.found[k]
        other = self._numbers is None or not np.array_equal(found.atoms.numbers, self._numbers)
        self._numbers = found.atoms.numbers
        return _completed(found, where, f"{self.path}: ", hydrogens=other)  # of a trajectory, one frame is enough


class _OfDataset(Sequence):
    """A sequence of the structures of a data set, without their labels."""

    def __init__(self, path: str, format: Format):
        require_plain(path)
        (reader,) = make_readers([path], {}, None, [format])
        self.data = reader if isinstance(reader, HDF5Dataset) else LoadedDataset(reader)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return self.data[range(len(self))[index]].system.to_ase()[0]


def database_rows(path: str, kind: str) -> Iterator[Found]:
    """Yield rows of a database of ASE; `info` holds key-value pairs and data, which ase.io.read leaves out."""
    import ase.db

    database, last = ase.db.connect(path, type=kind), 0
    about = database.metadata  # SchNetPack's
    units = {f"{name}_unit": unit for name, unit in (about.get("_property_unit_dict") or {}).items() if unit}
    units |= {"pos_unit": about["_distance_unit"]} if about.get("_distance_unit") else {}
    while rows := list(database.select(f"id>{last}", sort="id", limit=_ROWS)):  # without a limit, ASE fetches all rows
        for row in rows:
            atoms = row.toatoms()
            inner = info if isinstance(info := row.data.get("info"), Mapping) else {}  # Atoms.info
            # read the row's pairs, not its attributes: properties such as charge hide pairs of the same name
            atoms.info = {
                **units,
                **atoms.info,
                **inner,
                **row.data,
                **{key: vars(row)[key] for key in row.key_value_pairs},
            }
            yield Found(atoms)
        last = rows[-1].id


_ROWS = 256  # rows at a time


class _Trajectory(Sequence):
    """A sequence of the frames of a trajectory of ASE; it closes the file when it is deleted."""

    def __init__(self, path: str):
        from ase.io.trajectory import Trajectory

        self.frames: Any = Trajectory(path)
        weakref.finalize(self, self.frames.close)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: Any) -> Any:
        return Found(self.frames[index])


class _Xyz(Sequence):
    """A sequence of the frames of an XYZ file, parsed on access; access in ascending order is fastest."""

    def __init__(self, path: str):
        self.path = path
        with _in_words(path):
            self._count = sum(1 for _ in raw_frames(path))
        self._next, self._raw = 0, raw_frames(path)
        self._beside = Beside(path)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        k = range(self._count)[index]
        if k < self._next:
            self._next, self._raw = 0, raw_frames(self.path)
        raw = next(islice(self._raw, k - self._next, None))
        self._next = k + 1
        found = _of_xyz(raw, f"{self.path}, structure {k}" if self._count > 1 else self.path)
        return self._beside.added_to(found, found.atoms.numbers) if self._beside else found


def structure_of_xyz(raw: tuple[str, list[str], int, list[str]], where: str) -> Atoms:
    """Parse one frame of `raw_frames`.

    Args:
        raw: the frame.
        where: its name, for messages.

    Raises:
        BadData: the frame is damaged, or its statements contradict each other.
    """
    return _completed(_of_xyz(raw, where), where)


def _of_xyz(raw: tuple[str, list[str], int, list[str]], where: str) -> Found:
    with _in_words(where):
        atoms, isotopes = structure_of(*raw)
    _set_isotopes(atoms, isotopes)
    return Found(atoms)


def structure_of_molfile(text: str, where: str = "it", drawn: bool = False) -> Atoms:
    """Return the structure of one molfile, or of one record of an SDF.

    Args:
        text: text of the record.
        where: its name, for messages.
        drawn: True if coordinates are not used: a drawing, and one without hydrogens, will do.

    Raises:
        BadData: the record is damaged, or its statements contradict each other.
    """
    return _completed(_molfile(text, f"{where}: ", drawn)[0], where, hydrogens=not drawn)


def _set_isotopes(atoms: Atoms, isotopes: dict[int, str]) -> None:
    if isotopes and not atoms.has("masses"):
        masses = atoms.get_masses()
        for k, symbol in isotopes.items():
            masses[k] = MASSES[symbol]
        atoms.set_masses(masses)


def _completed(found: Found, where: str, file: str = "", hydrogens: bool = True) -> Atoms:
    """Return the structure in Å, with its stated charge and spin in `info`, and without a dummy cell.

    Results of a calculation in other units than eV and Å are left out, with a warning: `open_dataset` reads them.
    """
    atoms, info = found.atoms, found.atoms.info
    try:
        sizes = {name: unit.size for name, unit in stated_units(info).items()}
    except BadData as error:
        raise BadData(f"{where}: {error}") from None
    if any(abs(size - 1) > 1e-6 for size in sizes.values()):
        if atoms.calc is not None:
            words = ", ".join(dict.fromkeys(unit.source for unit in stated_units(info).values()))
            warnings.warn(
                f"{file}the file states {words}; energies and forces are left out, torchmdnet2.data.open_dataset reads "
                "them",
                StructureWarning,
                stacklevel=4,
            )
            atoms.calc = None
        atoms.set_cell(atoms.cell.array * sizes.get("cell", sizes.get("length", 1.0)))
        atoms.set_positions(atoms.positions * sizes.get("length", 1.0), apply_constraint=False)
        _restate_units(info)
    if no_cell(atoms.cell.array, atoms.pbc):
        warn_of_placeholder(file)
        atoms.set_cell(None)
        atoms.set_pbc(False)
    warn_of_disorder(info.get("occupancy"), where)
    arrays = of_atoms({**info, **(atoms.calc.results if atoms.calc is not None else {}), **atoms.arrays}, len(atoms))
    try:
        known = {name for name, more in (("charge", found.charge), ("spin", found.spin)) if more}
        warned: set[str] = set()
        own = statements(info, arrays, bool(atoms.pbc.any()), "'{}'", known, atoms.numbers, file, warned)
    except BadData as error:
        raise BadData(f"{where}: {error}") from None
    for quantity, more in (("charge", found.charge), ("spin", found.spin)):
        value = agreed([*own[quantity], *more], quantity, f"{where}: ")
        if value is not None:
            info[quantity] = value
    if hydrogens and not found.bonds:
        warn_of_hydrogens(atoms, file)
    if warned:
        atoms.info = WarnedInfo(info)
        atoms.info.doubts = frozenset(warned)
    return atoms


def _restate_units(info: dict[str, Any]) -> None:
    """Remove statements of units of length, since lengths are converted; statements of other units stay."""
    stated = stated_units(info)
    of_lengths = {unit.source for name, unit in stated.items() if name in ("length", "cell")}
    for key in [key for key, value in info.items() if f"{key}={value}" in of_lengths]:
        del info[key]
    for name, unit in stated.items():
        if name not in ("length", "cell") and unit.source in of_lengths:
            info[f"{name}_unit"] = unit.unit


# --- formats ---------------------------------------------------------------------------------------------------------


def _molfile(text: str, where: str = "", drawn: bool = False) -> list[Found]:
    """Read molfiles and SDF; `drawn` as in `structure_of_molfile`."""
    found, molecules = [], read_molecules(text)
    if not molecules:
        raise BadData("it has no molecules")
    for k, molecule in enumerate(molecules):
        name = f"molecule {k}: " if len(molecules) > 1 else ""
        if not drawn:
            try:
                molecule.require_hydrogens()
            except BadData as error:
                raise BadData(f"{name}{error}") from None
        if not drawn and molecule.flat and not any(z for _, _, z in molecule.positions) and len(molecule.symbols) > 3:
            warnings.warn(
                f"{where}{name}the header of the molfile says 2D: its coordinates are a drawing, not a structure in Å",
                StructureWarning,
                stacklevel=4,
            )
        if len(molecule.unpaired) > 1:
            warnings.warn(
                f"{where}{name}{len(molecule.unpaired)} atoms of the molfile are radicals, and their coupling is "
                "unknown: no multiplicity is read; give it as spin",
                StructureWarning,
                stacklevel=4,
            )
        stated, atoms = molecule.statements(), molecule.to_ase()
        if not drawn:
            warn_of_unstated(molecule, stated["charge"], where + name, atoms.numbers)
        found.append(Found(atoms, stated["charge"], stated["spin"], bonds=True))
    return found


def _pdb(text: str, where: str) -> list[Found]:
    """Read a PDB file by ASE, and add the charges of atoms in columns 79 and 80.

    Elements that are not stated are read from the columns of the names. The first of alternate locations is kept.
    """
    lines, charges, isotopes = [], [{}], [{}]  # type: ignore[var-annotated]
    count, guessed, taken, left_out = 0, {}, {}, 0  # type: ignore[var-annotated]
    for line in text.splitlines():
        if line.startswith(("ATOM  ", "HETATM")):
            if (place := line[16:17]) not in ("", " ") and taken.setdefault(line[17:27], place) != place:
                left_out += 1
                continue
            if not line[76:78].strip():
                line = f"{line[:76].ljust(76)}{_element_of(line[12:16]):>2}{line[78:]}"
                guessed[line[12:16].strip()] = line[76:78].strip()
            match = _PDB_CHARGE.fullmatch(line[78:80].strip())
            if match:
                sign = match[2] or match[3] or match[5]
                charges[-1][count] = int(f"{sign}{match[1] or match[4] or 1}")
            symbol = line[76:78].strip()
            if symbol in ISOTOPES:
                isotopes[-1][count] = symbol
                line = f"{line[:76]} H{line[78:]}"
            count += 1
        elif line.startswith("END"):  # ENDMDL and END end a structure for ASE
            if count or not line.startswith("END "):
                charges.append({})
                isotopes.append({})
            count = 0
        lines.append(line)
    while len(lines) > 1 and lines[-1].strip() == "END" and any(line.startswith("ENDMDL") for line in lines):
        lines.pop()  # ASE would make a structure without atoms of it
    if guessed:
        warn_of_guesses(where, guessed)
    if left_out:
        warnings.warn(
            f"{where}{left_out} atom{'s' * (left_out > 1)} of alternate locations left out: the first location of each "
            "residue is taken",
            StructureWarning,
            stacklevel=4,
        )
    remarks = [Statement(int(match[1]), f"'{match[0].strip()}'") for match in _PDB_REMARK.finditer(text)]
    found = []
    for k, atoms in enumerate(_by_ase(io.StringIO("\n".join(lines) + "\n"), "proteindatabank")):
        own = charges[k] if k < len(charges) else {}
        _set_isotopes(atoms, isotopes[k] if k < len(isotopes) else {})
        if not atoms.cell.array.any():  # CRYST1 with zeros means that there is no cell
            atoms.set_pbc(False)
        stated = [Statement(sum(own.values()), "the charges of its atoms (columns 79 and 80)")] if own else []
        found.append(Found(atoms, [*stated, *remarks], []))
    if found:
        warn_of_titles("proteindatabank", text, {"charge": found[0].charge}, found[0].atoms.numbers, where)
    return found


def _element_of(name: str) -> str:
    """Return the element from an atom's name in columns 13 to 16: the first two columns, except in long names of H."""
    from ase.data import atomic_numbers

    two = name[:2].strip().capitalize()
    if len(name.strip()) == 4 and name[0] == "H":
        return "H"
    return two if two in atomic_numbers else next((letter for letter in name if letter.isalpha()), "X")


_READERS = {"sdf": _molfile, "mol": _molfile, "proteindatabank": _pdb}
