"""Acetylacetone, 3BPA and ethanol: few frames of one flexible molecule, with test frames far from those of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import BadData
from ..ase_formats import ExtxyzReader
from ..reader import Chunk
from .base import DownloadFile, Published, one_of, register

__all__ = ["BOTNet"]

_COMMIT = "4a5ea06c3f514f24164428823ba1f5e2d2233b58"  # what it holds can never change
_URL = f"https://raw.githubusercontent.com/davkovacs/BOTNet-datasets/{_COMMIT}"


@dataclass(frozen=True)
class _Molecule:
    """One of the three: its folder and files there, and what its frames are."""

    folder: str
    level_of_theory: str
    subsets: tuple[str, ...]  # the first one is for training
    formulas: tuple[Mapping[int, int], ...]  # of the frames: atomic number -> atoms
    isolated: Mapping[int, float]  # atomic number -> eV; from the file of isolated atoms in the folder


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
        subsets: names of the files to take, without ".xyz"; None: the frames for training, train_300K or train.
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
        """All three have a file train_300K.xyz or train.xyz: what is in it says whose it is."""
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
