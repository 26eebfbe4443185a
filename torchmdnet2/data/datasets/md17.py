"""MD17, rMD17 and MD22: molecular dynamics of single molecules."""

from __future__ import annotations

import io
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadData
from ...units import KCAL_MOL
from ..reader import Chunk
from .base import DownloadFile, Published, frames, one_of, register

__all__ = ["MD17", "MD22", "RMD17"]

_GDML = "http://www.quantum-machine.org/gdml/data/npz"
_CHUNK_ATOMS = 65_536

_MD17 = {
    "aspirin": "md17_aspirin.npz",
    "azobenzene": "azobenzene_dft.npz",
    "benzene": "md17_benzene2017.npz",
    "ethanol": "md17_ethanol.npz",
    "malonaldehyde": "md17_malonaldehyde.npz",
    "naphthalene": "md17_naphthalene.npz",
    "paracetamol": "paracetamol_dft.npz",
    "salicylic_acid": "md17_salicylic.npz",
    "toluene": "md17_toluene.npz",
    "uracil": "md17_uracil.npz",
    "benzene_fhi-aims": "benzene2018_dft.npz",
    "aspirin_ccsd": "aspirin_ccsd.zip",
    "benzene_ccsd_t": "benzene_ccsd_t.zip",
    "ethanol_ccsd_t": "ethanol_ccsd_t.zip",
    "malonaldehyde_ccsd_t": "malonaldehyde_ccsd_t.zip",
    "toluene_ccsd_t": "toluene_ccsd_t.zip",
}
_RMD17 = {
    "aspirin": "aspirin",
    "azobenzene": "azobenzene",
    "benzene": "benzene",
    "ethanol": "ethanol",
    "malonaldehyde": "malonaldehyde",
    "naphthalene": "naphthalene",
    "paracetamol": "paracetamol",
    "salicylic_acid": "salicylic",
    "toluene": "toluene",
    "uracil": "uracil",
}
_MD22 = {
    "AT-AT": "md22_AT-AT.npz",
    "AT-AT-CG-CG": "md22_AT-AT-CG-CG.npz",
    "Ac-Ala3-NHMe": "md22_Ac-Ala3-NHMe.npz",
    "DHA": "md22_DHA.npz",
    "buckyball-catcher": "md22_buckyball-catcher.npz",
    "dw-nanotube": "md22_dw_nanotube.npz",
    "stachyose": "md22_stachyose.npz",
}


@register("md17")
class MD17(Published):
    """S. Chmiela et al., Sci. Adv. 3, e1603015 (2017); CCSD and CCSD(T): Nat. Commun. 9, 3887 (2018).

    Energies in kcal/mol, forces in kcal/mol/Å, converted. Reference energies: none are published; fit them (of a
    single molecule, only their sum means anything).

    Args:
        molecule: name such as "aspirin", "benzene_fhi-aims" or "toluene_ccsd_t"; with coupled cluster the training
            frames come first.
    """

    citation = "https://doi.org/10.1126/sciadv.1603015"

    def __init__(self, molecule: str):
        file = _MD17[one_of(molecule, tuple(_MD17), "md17: molecule")]
        self.level_of_theory = "CCSD(T)" if "ccsd_t" in file else "CCSD" if "ccsd" in file else "PBE+vdW-TS"
        self.sources = [DownloadFile(f"{_GDML}/{file}", file)]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        if files[0].suffix == ".zip":
            return _zipped(files[0])
        return _of_npz(files[0], str(files[0]))


@register("rmd17")
class RMD17(Published):
    """A. S. Christensen, O. A. von Lilienfeld, Mach. Learn.: Sci. Technol. 1, 045018 (2020).

    PBE/def2-SVP with tight convergence; 100,000 frames of each molecule, of which the authors advise to train on
    1,000 at most. Energies in kcal/mol, forces in kcal/mol/Å, converted. Reference energies: none are published.

    Args:
        molecule: name such as "aspirin".
    """

    citation = "https://doi.org/10.1088/2632-2153/abba6f"
    licence = "CC0"
    level_of_theory = "PBE/def2-SVP"

    def __init__(self, molecule: str):
        self.file = f"rmd17_{_RMD17[one_of(molecule, tuple(_RMD17), 'rmd17: molecule')]}.npz"
        self.sources = [
            DownloadFile(
                "https://figshare.com/ndownloader/files/23950376",
                "rmd17.tar.bz2",
                sha256="cddeea2ec2c4b22a9de16a9a65a3eeedac5b29da9c99c20bbff0153912bf922b",
                instead=(self.file,),
            )
        ]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        path = files[0]
        if path.suffix == ".npz":
            yield from _of_npz(path, str(path))
            return
        where = f"{path}, {self.file}"
        try:
            with tarfile.open(path, "r|*") as archive, tempfile.TemporaryFile() as copy:
                for member in archive:
                    if Path(member.name).name == self.file and member.isfile():
                        content = archive.extractfile(member)
                        assert content is not None
                        while block := content.read(2**20):
                            copy.write(block)
                        copy.seek(0)
                        yield from _of_npz(copy, where)
                        return
        except (tarfile.TarError, EOFError, OSError) as error:
            raise BadData(f"{path}: it is damaged: {error}") from error
        raise BadData(f"{path}: the archive has no {self.file}")


@register("md22")
class MD22(Published):
    """S. Chmiela et al., Sci. Adv. 9, eadf0873 (2023): molecules of 42 to 370 atoms.

    PBE+MBD. Energies in kcal/mol, forces in kcal/mol/Å, converted. Reference energies: none are published.

    Args:
        molecule: name such as "Ac-Ala3-NHMe" or "buckyball-catcher".
    """

    citation = "https://doi.org/10.1126/sciadv.adf0873"
    level_of_theory = "PBE+MBD"

    def __init__(self, molecule: str):
        file = _MD22[one_of(molecule, tuple(_MD22), "md22: molecule")]
        self.sources = [DownloadFile(f"{_GDML}/{file}", file)]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        return _of_npz(files[0], str(files[0]))


def _zipped(path: Path) -> Iterator[Chunk]:
    """Read archives of NAME-train.npz and NAME-test.npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            for kind in ("train", "test"):
                names = [name for name in archive.namelist() if name.endswith(f"-{kind}.npz")]
                if len(names) != 1:
                    raise BadData(f"{path}: the archive must have one file *-{kind}.npz, but it has {len(names)}")
                yield from _of_npz(io.BytesIO(archive.read(names[0])), f"{path}, {names[0]}")
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise BadData(f"{path}: it is damaged: {error}") from error


def _of_npz(file: Any, where: str) -> Iterator[Chunk]:
    """Yield frames of an npz file of any of the three data sets, with either set of names, in kcal/mol and Å."""
    try:
        with np.load(file, allow_pickle=False) as content:
            new = "coords" in content
            names = ("nuclear_charges", "coords", "energies", "forces") if new else ("z", "R", "E", "F")
            z, pos, energy, forces = (content[name] for name in names)
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadData(f"{where}: it is damaged, or not a file of MD17: {error}") from error
    if len(energy) != len(pos) or len(forces) != len(pos):
        raise BadData(f"{where}: {len(pos)} positions, {len(energy)} energies and {len(forces)} forces")
    known = {"energy": energy, "forces": forces}
    step = max(1, _CHUNK_ATOMS // max(1, len(z)))
    for first in range(0, len(pos), step):
        part = slice(first, first + step)
        labels = {name: values[part].astype(np.float64) * KCAL_MOL for name, values in known.items()}
        yield frames(where, first, z, pos[part], labels)
