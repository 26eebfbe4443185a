"""The training set of MACE-OFF23: neutral molecules of SPICE 1 and others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..ase_formats import ExtxyzReader
from ..reader import Chunk
from .archive import unpacked
from .base import DownloadFile, Published, register, without_strong_forces

__all__ = ["MACEOFF"]

_NAME = "train_large_neut_no_bad_clean"


@register("maceoff")
class MACEOFF(Published):
    """D. P. Kovács et al., J. Am. Chem. Soc. 147, 17598 (2025), arXiv:2312.15211.

    About 950,000 frames of H, C, N, O, F, P, S, Cl, Br, I at ωB97M-D3(BJ)/def2-TZVPPD, as extended XYZ in eV and
    eV/Å. Reference energies: fit them.

    Args:
        max_force: leave out frames with a longer force on some atom, eV/Å; None: none.
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
