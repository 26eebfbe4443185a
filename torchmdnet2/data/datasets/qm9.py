"""QM9: 134 thousand small molecules at their equilibrium geometries."""

from __future__ import annotations

import csv
import itertools
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...errors import BadData
from ...units import BOHR, HARTREE, factor
from ..dataset import Sample, collate
from ..reader import Chunk
from .base import DownloadFile, Published, frames, one_of, register

__all__ = ["QM9"]

_COLUMNS = ("A", "B", "C", "mu", "alpha", "homo", "lumo", "gap", "r2", "zpve", "U0", "U", "H", "G", "Cv")
_FACTORS = {
    "mu": factor("dipole", "debye"),
    "r2": BOHR**2,
    **dict.fromkeys(("homo", "lumo", "gap", "zpve", "U0", "U", "H", "G"), HARTREE),
}
_ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
_ATOMS = {  # hartree; atomref.txt of the publication
    "U0": (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730),
    "U": (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314),
    "H": (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370),
    "G": (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544),
}
_CSV = {"U0": "u0", "U": "u298", "H": "h298", "G": "g298", "Cv": "cv"}  # their names in gdb9.sdf.csv
_CHUNK = 1000


@register("qm9")
class QM9(Published):
    """R. Ramakrishnan, P. O. Dral, M. Rupp, O. A. von Lilienfeld, Sci. Data 1, 140022 (2014).

    B3LYP/6-31G(2df,p). The energy is U0, or another one of the four; Mulliken charges are in "charges", and all
    properties in further labels, "scalar:gap" and so on: mu in e·Å, alpha in bohr³, homo, lumo, gap, zpve, U0,
    U, H, G in eV, r2 in e·Å², Cv in cal/(mol K), rotational constants A, B, C in GHz. There are no forces.

    The files gdb9.sdf and gdb9.sdf.csv of MoleculeNet serve as well as the original archive; they have no charges.

    Args:
        energy: the energy that becomes the label "energy": "U0", "U" (298.15 K), "H" or "G".
        exclude_uncharacterized: leave out the 3,054 molecules whose geometry failed the consistency check.
    """

    citation = "https://doi.org/10.1038/sdata.2014.22"
    licence = "CC0"
    level_of_theory = "B3LYP/6-31G(2df,p)"
    labels = ("energy", "charges", *(f"scalar:{name}" for name in _COLUMNS))

    def __init__(self, energy: str = "U0", exclude_uncharacterized: bool = True):
        self.energy = one_of(energy, tuple(_ATOMS), "qm9: energy")
        self.exclude_uncharacterized = exclude_uncharacterized
        self.reference_energies = {z: e * HARTREE for z, e in zip(_ELEMENTS.values(), _ATOMS[energy], strict=True)}
        self.sources = [
            DownloadFile(
                "https://springernature.figshare.com/ndownloader/files/3195389",
                "dsgdb9nsd.xyz.tar.bz2",
                sha256="3a63848ac80691bdb8d41834b575afad345b9300d7a2db0c38adb7f6eaa8360c",
                instead=("gdb9.sdf",),
            )
        ]
        if exclude_uncharacterized:
            self.sources.append(
                DownloadFile(
                    "https://springernature.figshare.com/ndownloader/files/3195404",
                    "uncharacterized.txt",
                    sha256="3aa5115d540b356de94791d4a74c3bf1ed91c469ecf52a4f5d7cc0506fe02e24",
                )
            )

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        excluded = _numbers(files[1]) if self.exclude_uncharacterized else set()
        molecules = self._of_sdf(files[0]) if files[0].suffix == ".sdf" else self._of_archive(files[0])
        kept: list[Sample] = []
        count = 0
        for number, chunk in molecules:
            if number in excluded:
                continue
            kept.append(chunk.sample)
            if len(kept) == _CHUNK:
                yield Chunk(collate(kept), str(files[0]), count)
                count, kept = count + len(kept), []
        if kept:
            yield Chunk(collate(kept), str(files[0]), count)

    def _of_archive(self, path: Path) -> Iterator[tuple[int, Chunk]]:
        """Yield number and frame of each molecule of the original archive of .xyz files."""
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    if member.isfile() and member.name.endswith(".xyz"):
                        file = archive.extractfile(member)
                        assert file is not None
                        yield self._molecule(file.read().decode("ascii"), f"{path}, {member.name}")
        except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
            raise BadData(f"{path}: it is damaged: {error}") from error

    def _molecule(self, text: str, where: str) -> tuple[int, Chunk]:
        try:
            lines = text.replace("*^", "e").splitlines()
            size = int(lines[0])
            _, number, *numbers = lines[1].split()
            values = dict(zip(_COLUMNS, map(float, numbers), strict=True))
            rows = [line.split() for line in lines[2 : 2 + size]]
            z = np.array([_ELEMENTS[row[0]] for row in rows])
            table = np.array([row[1:5] for row in rows], dtype=np.float64)
            return int(number), self._frame(where, z, table[:, :3], values, {"charges": table[None, :, 3]})
        except (ValueError, IndexError, KeyError) as error:
            raise BadData(f"{where}: this is not a molecule of QM9: {type(error).__name__}: {error}") from error

    def _of_sdf(self, path: Path) -> Iterator[tuple[int, Chunk]]:
        """Yield number and frame of each molecule of gdb9.sdf, with its properties from gdb9.sdf.csv."""
        table = path.with_name(f"{path.name}.csv")
        try:
            with open(path, encoding="ascii") as molecules, open(table, newline="", encoding="ascii") as properties:
                for row in csv.DictReader(properties):
                    where = f"{path}, {row['mol_id']}"
                    lines = [line.rstrip("\n") for line in itertools.takewhile(lambda s: s[:4] != "$$$$", molecules)]
                    if not lines or lines[0].strip() != row["mol_id"]:
                        raise BadData(f"{where}: the molecule is missing, but {table} has its properties")
                    atoms = [line.split() for line in lines[4 : 4 + int(lines[3][:3])]]
                    z = np.array([_ELEMENTS[atom[3]] for atom in atoms])
                    pos = np.array([atom[:3] for atom in atoms], dtype=np.float64)
                    values = {name: float(row[_CSV.get(name, name)]) for name in _COLUMNS}
                    yield int(row["mol_id"].removeprefix("gdb_")), self._frame(where, z, pos, values, {})
        except BadData:
            raise
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BadData(f"{path}: this file or {table.name} is damaged: {type(error).__name__}: {error}") from error

    def _frame(
        self, where: str, z: np.ndarray, pos: np.ndarray, values: dict[str, float], labels: dict[str, np.ndarray]
    ) -> Chunk:
        own = {name: np.array([value * _FACTORS.get(name, 1.0)]) for name, value in values.items()}
        labels = {"energy": own[self.energy], **labels, **{f"scalar:{name}": value for name, value in own.items()}}
        return frames(where, 0, z, pos[None], labels)


def _numbers(path: Path) -> set[int]:
    """Return the first column of the table of molecules that failed."""
    found = re.findall(r"^[ \t]*(\d+)[ \t]+\S+[ \t]+\S+", path.read_text(encoding="utf-8", errors="replace"), re.M)
    if not found:
        raise BadData(f"{path}: the file has no table of molecules")
    return set(map(int, found))
