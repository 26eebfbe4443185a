"""ANI-1x, ANI-2x and COMP6: conformations of organic molecules, from HDF5 files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.files import damage_is_bad_data, opened_hdf5
from ...errors import BadData
from ...units import HARTREE
from ..reader import Chunk
from .base import DownloadFile, Published, frames, one_of, register, unpacked

if TYPE_CHECKING:
    import h5py

__all__ = ["COMP6", "ANI1x", "ANI2x"]

_SYMBOLS = {b"H": 1, b"C": 6, b"N": 7, b"O": 8}
_CHUNK_ATOMS = 65_536

# energies of the elements in hartree: the authors' linear fits, from sae_linfit.dat of the released potentials
_ANI1X = {1: -0.60095298, 6: -38.08316124, 7: -54.7077577, 8: -75.19446356}
_ANI1CCX = {1: -0.5991501324919538, 6: -38.03750806057356, 7: -54.67448347695333, 8: -75.16043537275567}
_ANI2X = {
    1: -0.5978583943827134,
    6: -38.08933878049795,
    7: -54.711968298621066,
    8: -75.19106774742086,
    9: -99.80348506781634,
    16: -398.1577125334925,
    17: -460.1681939421027,
}


def _in_ev(energies: dict[int, float]) -> dict[int, float]:
    return {z: energy * HARTREE for z, energy in energies.items()}


@register("ani1x")
class ANI1x(Published):
    """J. S. Smith et al., Sci. Data 7, 134 (2020): 5 million conformations of H, C, N, O.

    Energies in hartree, forces in hartree/Å, converted. Reference energies: the authors' linear fit.

    Args:
        energy: "wb97x", with forces, or "ccsd(t)", the half million frames of ANI-1ccx, without forces.
    """

    citation = "https://doi.org/10.1038/s41597-020-0473-z"
    licence = "CC0"

    def __init__(self, energy: str = "wb97x"):
        self.energy = one_of(energy, ("wb97x", "ccsd(t)"), "ani1x: energy")
        dft = energy == "wb97x"
        self.level_of_theory = "ωB97X/6-31G*" if dft else "CCSD(T)*/CBS"
        self.labels = ("energy", "forces") if dft else ("energy",)
        self.reference_energies = _in_ev(_ANI1X if dft else _ANI1CCX)
        self.sources = [
            DownloadFile(
                "https://springernature.figshare.com/ndownloader/files/18112775",
                "ani1x-release.h5",
                sha256="fe0ba06198ee72cf1003deebab2652097f6ab518337784dc811fa7da0c3bf5ac",
            )
        ]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        with _opened(files[0]) as file:
            for name, group in file.items():
                where = f"{files[0]}, group '{name}'"
                energy = _double(group["wb97x_dz.energy" if self.energy == "wb97x" else "ccsd(t)_cbs.energy"])
                there = ~np.isnan(energy)
                if (
                    not there.all()
                ):  # one frame in ten has coupled cluster: number these alone, so that chunks stay runs
                    where += f" (the {there.sum()} with this energy)"
                labels = {"energy": energy[there] * HARTREE}
                if self.energy == "wb97x":
                    labels["forces"] = _double(group["wb97x_dz.forces"])[there] * HARTREE
                yield from _parts(where, group["atomic_numbers"][()], group["coordinates"][()][there], labels)


@register("ani2x")
class ANI2x(Published):
    """C. Devereux et al., J. Chem. Theory Comput. 16, 4192 (2020): 9 million conformations, with F, S and Cl.

    ωB97X/6-31G(d). Energies in hartree, forces in hartree/Å, converted. Reference energies: the authors' linear fit.
    """

    citation = "https://doi.org/10.1021/acs.jctc.0c00121"
    licence = "CC-BY-4.0"
    level_of_theory = "ωB97X/6-31G(d)"
    reference_energies = _in_ev(_ANI2X)

    def __init__(self) -> None:
        self.sources = [
            DownloadFile(
                "https://zenodo.org/records/10108942/files/ANI-2x-wB97X-631Gd.tar.gz",
                "ANI-2x-wB97X-631Gd.tar.gz",
                md5="cb1d9effb3d07fc1cc6ced7cd0b1e1f2",
                instead=("ANI-2x-wB97X-631Gd.h5",),
            )
        ]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        return _by_size(files[0])


_COMP6_FILES = {
    "ANI-MD": ["ani_md_bench.h5"],
    "DrugBank": ["drugbank_testset.h5"],
    "GDB07to09": ["gdb11_07_test500.h5", "gdb11_08_test500.h5", "gdb11_09_test500.h5"],
    "GDB10to13": ["gdb11_10_test500.h5", "gdb11_11_test500.h5", "gdb13_12_test1000.h5", "gdb13_13_test1000.h5"],
    "Tripeptides": ["tripeptide_full.h5"],
    "s66x8": ["s66x8_wb97x6-31gd.h5"],
}


@register("comp6")
class COMP6(Published):
    """The benchmark of J. S. Smith et al., J. Chem. Phys. 148, 241733 (2018), and its extension for ANI-2x.

    Energies in hartree, forces in hartree/Å, converted. The files of version 1 hold gradients under the name of
    forces; their sign is changed. Reference energies: those of ANI-1x and ANI-2x.

    Args:
        version: "1" (ωB97X/6-31G*, H, C, N, O) or "2" (ωB97X/6-31G(d), also F, S, Cl).
        subsets: subsets of version 1: "ANI-MD", "DrugBank", "GDB07to09", "GDB10to13", "Tripeptides", "s66x8"; None
            takes all.
    """

    citation = "https://doi.org/10.1063/1.5023802"
    level_of_theory = "ωB97X/6-31G(d)"

    def __init__(self, version: str = "1", subsets: Sequence[str] | None = None):
        self.version = one_of(version, ("1", "2"), "comp6: version")
        self.reference_energies = _in_ev(_ANI1X if version == "1" else _ANI2X)
        if version == "2":
            if subsets is not None:
                raise BadData("comp6: version 2 has no subsets")
            url = "https://zenodo.org/records/10126157/files/COMP6v2_wB97X-631Gd.tar.gz"
            md5, name = "0a417148966022e72f54c135d8f3d4e7", "COMP6v2_wB97X-631Gd"
            self.sources = [DownloadFile(url, f"{name}.tar.gz", md5=md5, instead=(f"{name}.h5",))]
            return
        chosen = [one_of(subset, tuple(_COMP6_FILES), "comp6: subsets") for subset in subsets or _COMP6_FILES]
        base = "https://raw.githubusercontent.com/isayev/COMP6/master/COMP6v1"
        self.sources = [
            DownloadFile(f"{base}/{subset}/{file}", file) for subset in chosen for file in _COMP6_FILES[subset]
        ]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        if self.version == "2":
            yield from _by_size(files[0])
            return
        for path in files:
            with _opened(path) as file:
                for top in file.values():
                    for name, group in top.items():
                        z = np.array([_SYMBOLS[bytes(symbol)] for symbol in group["species"][()]])
                        pos, energy = group["coordinates"][()], _double(group["energies"]) * HARTREE
                        labels = {"energy": energy, "forces": -_double(group["forces"]) * HARTREE}
                        yield from _parts(f"{path}, molecule '{name}'", z, pos, labels)


def _double(dataset: h5py.Dataset, part: slice | tuple[()] = ()) -> np.ndarray:
    """Return numbers in float64, so that the conversion of units does not round them again to float32."""
    return np.asarray(dataset[part], dtype=np.float64)


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    with damage_is_bad_data(str(path), "it is damaged, or not a file of this data set"), opened_hdf5(path) as file:
        yield file


def _by_size(path: Path) -> Iterator[Chunk]:
    """Read files with one group per number of atoms: species [S, N], coordinates, energies, forces."""
    with _h5_of(path) as content, _opened(content) as file:
        for name, group in file.items():
            step = max(1, _CHUNK_ATOMS // group["species"].shape[1])
            for first in range(0, len(group["species"]), step):
                part = slice(first, first + step)
                labels = {
                    "energy": _double(group["energies"], part) * HARTREE,
                    "forces": _double(group["forces"], part) * HARTREE,
                }
                where = f"{path}, group '{name}'"
                yield frames(where, first, group["species"][part], group["coordinates"][part], labels)


def _parts(where: str, z: np.ndarray, pos: np.ndarray, labels: dict[str, np.ndarray]) -> Iterator[Chunk]:
    """Yield frames of a molecule, a bounded number at a time."""
    step = max(1, _CHUNK_ATOMS // max(1, len(z)))
    for first in range(0, len(pos), step):
        part = slice(first, first + step)
        yield frames(where, first, z, pos[part], {name: value[part] for name, value in labels.items()})


def _h5_of(path: Path) -> AbstractContextManager[Path]:
    """Return the .h5 file of an archive, or the file itself."""
    return nullcontext(path) if path.suffix == ".h5" else unpacked(path, ".h5")
