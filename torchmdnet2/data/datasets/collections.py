"""BOTNet's acetylacetone, 3BPA and ethanol, the training set of MACE-OFF23, SPICE and WaterBox."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BadData
from ..ase_formats import ExtxyzReader
from ..hdf5 import Group, HDF5Dataset
from ..reader import Chunk
from .base import DownloadFile, Published, one_of, register, unpacked, without_strong_forces

__all__ = ["MACEOFF", "SPICE", "BOTNet", "WaterBox"]


_COMMIT = "4a5ea06c3f514f24164428823ba1f5e2d2233b58"  # a commit, whose content cannot change
_URL = f"https://raw.githubusercontent.com/davkovacs/BOTNet-datasets/{_COMMIT}"


@dataclass(frozen=True)
class _Molecule:
    """One of the three data sets: its folder, its files and their subsets."""

    folder: str
    level_of_theory: str
    subsets: tuple[str, ...]  # the first one is for training
    formulas: tuple[Mapping[int, int], ...]  # compositions of frames: atomic number -> number of atoms
    isolated: Mapping[int, float]  # atomic number -> eV, from the folder's file of isolated atoms


_MOLECULES = {
    "acac": _Molecule(
        "dataset_acac",
        "PBE+D3/def2-SVP (ORCA 5.0, UHF)",
        ("train_300K", "train_600K", "test_MD_300K", "test_MD_600K", "test_H_transfer", "test_dihedral"),
        ({1: 8, 6: 5, 8: 2},),
        {1: -13.568422178253735, 6: -1026.8538996116154, 8: -2037.796869412825},
    ),
    "3bpa": _Molecule(
        "dataset_3BPA",
        "ωB97X/6-31G(d) (ORCA)",
        ("train_300K", "train_mixedT", "test_300K", "test_600K", "test_1200K"),
        ({1: 12, 6: 12, 7: 2, 8: 1},),
        {1: -13.587222780835477, 6: -1029.4889999855063, 7: -1484.9814568572233, 8: -2041.9816003861047},
    ),
    "ethanol": _Molecule(
        "dataset_ethanol",
        "PBE/def2-SVP (ORCA 4.2)",
        (
            *("train", "train_eth_meth", "test_MD", "test_eth_meth", "test_H_removal"),
            *("test_norm_mode_874", "test_norm_mode_3005"),
        ),
        ({1: 6, 6: 2, 8: 1}, {1: 4, 6: 1, 8: 1}),  # methanol too
        {1: -13.568422383046626, 6: -1025.2770951782686, 8: -2035.5709809589698},
    ),
}


@register("botnet")
class BOTNet(Published):
    """I. Batatia, S. Batzner, D. P. Kovács et al., arXiv:2205.06643; 3BPA first in J. Chem. Theory Comput. 17, 7696.

    One molecule at a time, from molecular dynamics at the temperature in the subset's name: acetylacetone ("acac",
    15 atoms), 3-(benzyloxy)pyridin-2-amine ("3bpa", 27 atoms), ethanol (9 atoms, geometries of rMD17; with methanol
    in train_eth_meth and test_eth_meth). Extended XYZ in eV and eV/Å; the cells of 50 Å that the files state are not
    periodic. Left out: the dimers of ethanol's folder and the dihedral scans of 3BPA's. Reference energies: those of
    isolated atoms, as published.

    Args:
        molecule: "acac", "3bpa" or "ethanol".
        subsets: names of files, without ".xyz"; None takes the training frames, train_300K or train.
    """

    citation = "https://doi.org/10.48550/arXiv.2205.06643"
    licence = "MIT"

    def __init__(self, molecule: str, subsets: Sequence[str] | None = None):
        self.molecule = one_of(molecule, tuple(_MOLECULES), "botnet: molecule")
        known = _MOLECULES[molecule]
        self.level_of_theory, self.reference_energies = known.level_of_theory, known.isolated
        self.subset_names = known.subsets
        self.subsets = (known.subsets[0],) if subsets is None else tuple(subsets)
        if not self.subsets:
            raise BadData("botnet: subsets: name at least one")
        self.sources = []
        for name in self.subsets:
            file = f"{one_of(name, known.subsets, f'botnet: subsets of {molecule}')}.xyz"
            instead = (f"{molecule}/{file}", file)
            self.sources.append(
                DownloadFile(f"{_URL}/{known.folder}/{file}", f"{known.folder}/{file}", instead=instead)
            )

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        for path in files:
            reader = ExtxyzReader(path, {"energy": "energy", "forces": "forces"})
            for chunk in reader.chunks():
                self._check_molecule(chunk)
                yield chunk
            reader.require_keys()

    def _check_molecule(self, chunk: Chunk) -> None:
        """Check the molecule: files of all three have the same names."""
        system = chunk.sample.system
        counts = torch.zeros(system.num_systems, 119, dtype=torch.long)
        counts.index_put_((system.batch, system.z), torch.ones_like(system.z), accumulate=True)
        right = torch.zeros(len(counts), dtype=torch.bool)
        for formula in _MOLECULES[self.molecule].formulas:
            expected = torch.zeros(119, dtype=torch.long)
            expected[list(formula)] = torch.tensor(list(formula.values()))
            right |= (counts == expected).all(dim=1)
        if not right.all():
            frame = chunk.first + int((~right).int().argmax())
            raise BadData(
                f"{chunk.where}, frame {frame}: its atoms are not those of {self.molecule}; another molecule?"
            )


# --- The training set of MACE-OFF23: neutral molecules of SPICE 1 and others ---

_NAME = "train_large_neut_no_bad_clean"


@register("maceoff")
class MACEOFF(Published):
    """D. P. Kovács et al., J. Am. Chem. Soc. 147, 17598 (2025), arXiv:2312.15211.

    About 950,000 frames of H, C, N, O, F, P, S, Cl, Br, I at ωB97M-D3(BJ)/def2-TZVPPD, as extended XYZ in eV and
    eV/Å. Reference energies: fit them.

    Args:
        max_force: leave out frames in which the force on an atom is larger, in eV/Å; None keeps all frames.
    """

    citation = "https://doi.org/10.17863/CAM.107498"
    level_of_theory = "ωB97M-D3(BJ)/def2-TZVPPD"

    def __init__(self, max_force: float | None = None):
        self.max_force = max_force
        url = "https://api.repository.cam.ac.uk/server/api/core/bitstreams/b185b5ab-91cf-489a-9302-63bfac42824a/content"
        self.sources = [DownloadFile(url, f"{_NAME}.tar.gz", instead=(f"{_NAME}.xyz", f"{_NAME}.xyz.gz"))]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        path = files[0]
        if not path.name.endswith(".tar.gz"):
            yield from self._read(path, str(path))
            return
        with unpacked(path, ".xyz") as target:
            yield from self._read(target, str(path))

    def _read(self, path: Path, where: str) -> Iterator[Chunk]:
        reader = ExtxyzReader(path, {"energy": "energy", "forces": "forces"})
        for chunk in without_strong_forces(reader.chunks(), self.max_force):
            yield Chunk(chunk.sample, where, chunk.first)
        reader.require_keys()


# --- SPICE: drug-like molecules, peptides, dimers, ions, for biomolecular simulation ---

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
    forces and, if present, MBIS charges. The total charge is the sum of the formal charges in the SMILES.
    Reference energies: of total energies, fit them; formation energies are relative to isolated atoms or ions already.

    Args:
        version: "1.0" … "1.1.4", "2.0.1".
        subsets: names of subsets, such as "SPICE Dipeptides Single Points Dataset v1.3"; None takes all.
        energy: "total" or "formation".
        max_force: leave out frames in which the force on an atom is larger, in eV/Å; None keeps all frames.
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
    """The groups of some subsets, without a few of version 1 whose positions have a wrong shape."""

    def __init__(self, path: Path, energy: str, subsets: Sequence[str] | None):
        self._subsets, self.seen = subsets, set[str]()
        keys = {"energy": "energy" if energy == "total" else "formation_energy", "forces": "forces"}
        try:
            super().__init__(path, {**keys, "charges": "charges"}, require_keys=False)
        finally:
            unknown = sorted(set(subsets or ()) - self.seen) if self.seen else []
            if unknown:
                one_of(unknown[0], sorted(self.seen), f"{path}: subsets")

    def _scan(self, name: str, group: Any, attributes: Mapping[str, Any]) -> Iterator[Group]:
        if self._subsets is not None:
            value = group["subset"][0]
            subset = value.decode() if isinstance(value, bytes) else str(value)
            self.seen.add(subset)
            if subset not in self._subsets:
                return
        if group["conformations"].ndim == 3:
            yield from super()._scan(name, group, attributes)


# --- WaterBox: periodic boxes of 64 water molecules ---


@register("waterbox")
class WaterBox(Published):
    """B. Cheng, E. A. Engel, J. Behler, C. Dellago, M. Ceriotti, PNAS 116, 1110 (2019): 1,593 frames.

    revPBE0-D3. The file is extended XYZ written in atomic units: positions and cells in bohr, energies in hartree,
    forces in hartree/bohr (its boxes of 23.5 bohr have the density of water). Converted. Reference energies: none
    are published; fit them.
    """

    citation = "https://doi.org/10.1073/pnas.1815117116"
    level_of_theory = "revPBE0-D3"

    def __init__(self) -> None:
        base = "https://raw.githubusercontent.com/BingqingCheng/ab-initio-thermodynamics-of-water/master/training-set"
        self.sources = [DownloadFile(f"{base}/dataset_1593.xyz", "dataset_1593.xyz")]

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        units = {"energy": "hartree", "length": "bohr"}
        reader = ExtxyzReader(files[0], {"energy": "TotEnergy", "forces": "force"}, units)
        yield from reader.chunks()
        reader.require_keys()
