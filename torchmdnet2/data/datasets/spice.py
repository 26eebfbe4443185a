"""SPICE: drug-like molecules, peptides, dimers, ions, for biomolecular simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..hdf5 import Group, HDF5Dataset
from ..reader import Chunk
from .base import DownloadFile, Published, one_of, register, without_strong_forces

__all__ = ["SPICE"]

_VERSIONS = {
    "1.0": ("https://github.com/openmm/spice-dataset/releases/download/1.0/SPICE.hdf5", ""),
    "1.1": ("https://github.com/openmm/spice-dataset/releases/download/1.1/SPICE.hdf5", ""),
    "1.1.1": ("https://zenodo.org/record/7258940/files/SPICE-1.1.1.hdf5", "5411e7014c6d18ff07d108c9ad820b53"),
    "1.1.2": ("https://zenodo.org/record/7338495/files/SPICE-1.1.2.hdf5", "a2b5ae2d1f72581040e1cceb20a79a33"),
    "1.1.3": ("https://zenodo.org/record/7606550/files/SPICE-1.1.3.hdf5", "be93706b3bb2b2e327b690b185905856"),
    "1.1.4": ("https://zenodo.org/records/8222043/files/SPICE-1.1.4.hdf5", "f27d4c81da0e37d6547276bf6b4ae6a1"),
    "2.0.1": ("https://zenodo.org/records/10975225/files/SPICE-2.0.1.hdf5", "bfba2224b6540e1390a579569b475510"),
}


@register("spice")
class SPICE(Published):
    """P. Eastman et al., Sci. Data 10, 11 (2023); version 2: J. Chem. Theory Comput. 20, 8583 (2024).

    ωB97M-D3(BJ)/def2-TZVPPD; bohr, hartree and hartree/bohr by the file's own attributes, converted. Labels: energy,
    forces, and MBIS charges where there are. The total charge is the sum of the formal charges in the SMILES.
    Reference energies: of total energies, fit them; formation energies are relative to isolated atoms or ions already.

    Args:
        version: "1.0" … "1.1.4", "2.0.1".
        subsets: names of subsets, as "SPICE Dipeptides Single Points Dataset v1.3"; None: all.
        energy: "total" or "formation".
        max_force: leave out frames with a longer force on some atom, eV/Å; None: none.
    """

    citation = "https://doi.org/10.1038/s41597-022-01882-6"
    licence = "CC0"
    level_of_theory = "ωB97M-D3(BJ)/def2-TZVPPD"
    labels = ("energy", "forces", "charges")

    def __init__(
        self,
        version: str = "2.0.1",
        subsets: Sequence[str] | None = None,
        energy: str = "total",
        max_force: float | None = None,
    ):
        url, md5 = _VERSIONS[one_of(version, tuple(_VERSIONS), "spice: version")]
        self.energy = one_of(energy, ("total", "formation"), "spice: energy")
        self.subsets, self.max_force = None if subsets is None else tuple(subsets), max_force
        self.sources = [DownloadFile(url, f"SPICE-{version}.hdf5", md5=md5, instead=(Path(url).name,))]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        return without_strong_forces(_Subsets(files[0], self.energy, self.subsets).chunks(), self.max_force)


class _Subsets(HDF5Dataset):
    """The groups of some subsets. A few groups of version 1 have positions of a wrong shape, and are left out."""

    def __init__(self, path: Path, energy: str, subsets: Sequence[str] | None):
        self._subsets, self.seen = subsets, set[str]()
        keys = {"energy": "energy" if energy == "total" else "formation_energy", "forces": "forces"}
        try:
            super().__init__(path, {**keys, "charges": "charges"}, require_keys=False)
        finally:
            unknown = sorted(set(subsets or ()) - self.seen) if self.seen else []
            if unknown:
                one_of(unknown[0], sorted(self.seen), f"{path}: subsets")

    def _scan(self, name: str, group: Any) -> Iterator[Group]:
        if self._subsets is not None:
            value = group["subset"][0]
            subset = value.decode() if isinstance(value, bytes) else str(value)
            self.seen.add(subset)
            if subset not in self._subsets:
                return
        if group["conformations"].ndim == 3:
            yield from super()._scan(name, group)
