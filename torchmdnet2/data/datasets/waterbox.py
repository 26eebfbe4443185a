"""WaterBox: periodic boxes of 64 water molecules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..ase_formats import ExtxyzReader
from ..reader import Chunk
from .base import DownloadFile, Published, register

__all__ = ["WaterBox"]


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
