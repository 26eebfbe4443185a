"""Cells of small molecular crystals by the command `relax --cell`, beside experiment: docs/dev/crystals.md.

python scripts/organic/crystals.py FOLDER [MODEL ...]

Each structure is checked by its density and its shortest distances before it is used. Positions of atoms are where the
relaxation begins; only cells are compared.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.io import read, write
from ase.spacegroup import crystal

from torchmdnet2.cli import main


class Measured(NamedTuple):
    """A crystal.

    Attributes:
        spacegroup: its number.
        cell: a, b, c in Å, α, β, γ in degrees.
        symbols, positions: of the atoms that symmetry does not make, fractional.
        density: g/cm³, of cell and formula.
        source: citation, and temperature.
    """

    spacegroup: int
    cell: tuple[float, ...]
    symbols: str
    positions: list[tuple[float, float, float]]
    density: float
    source: str


CRYSTALS = {
    "urea": Measured(
        113, (5.565, 5.565, 4.684, 90, 90, 90), "CONHH",
        [(0, 0.5, 0.3260), (0, 0.5, 0.5953), (0.1459, 0.6459, 0.1766), (0.2575, 0.7575, 0.2827),
         (0.1441, 0.6441, -0.0380)],
        1.375, "Swaminathan, Craven, McMullan, Acta Cryst. B 40, 300 (1984), 12 K",
    ),
    "carbon dioxide": Measured(
        205, (5.624, 5.624, 5.624, 90, 90, 90), "CO", [(0, 0, 0), (0.1185, 0.1185, 0.1185)],
        1.643, "Simon, Peters, Acta Cryst. B 36, 2750 (1980), 150 K",
    ),
    "ammonia": Measured(
        198, (5.048, 5.048, 5.048, 90, 90, 90), "NH", [(0.2107, 0.2107, 0.2107), (0.3690, 0.2671, 0.1159)],
        0.879, "Hewat, Riekel, Acta Cryst. A 35, 569 (1979), ND3, 2 K",
    ),
    "hydrogen cyanide": Measured(
        107, (4.63, 4.63, 4.34, 90, 90, 90), "CNH", [(0, 0, 0), (0, 0, 0.267), (0, 0, -0.246)],
        0.965, "Dulmage, Lipscomb, Acta Cryst. 4, 330 (1951), 223 K",
    ),
    "benzene": Measured(
        61, (7.39, 9.42, 6.81, 90, 90, 90), "CCCHHH",
        [(-0.0569, 0.1387, -0.0054), (-0.1335, 0.0460, 0.1264), (0.0774, 0.0925, -0.1295),
         (-0.0976, 0.2447, -0.0177), (-0.2409, 0.0794, 0.2218), (0.1371, 0.1631, -0.2312)],
        1.094, "Bacon, Curry, Wilson, Proc. R. Soc. A 279, 98 (1964), 138 K",
    ),
    "hexamine": Measured(
        217, (7.021, 7.021, 7.021, 90, 90, 90), "CNH",
        [(0.238, 0, 0), (0.1218, 0.1218, 0.1218), (0.088, 0.088, -0.327)],
        1.345, "Becka, Cruickshank, Proc. R. Soc. A 273, 435 (1963), 298 K",
    ),
    "triazine": Measured(
        167, (9.647, 9.647, 7.281, 90, 90, 120), "CNH", [(0.1346, 0, 0.25), (-0.1425, 0, 0.25), (0.2466, 0, 0.25)],
        1.376, "Coppens, Science 158, 1577 (1967), 298 K; atoms from the free molecule",
    ),
    "ice XI": Measured(
        36, (4.465, 7.858, 7.292, 90, 90, 90), "OOHHH",
        [(0, 0.6646, 0.0631), (0.5, 0.8255, -0.0631), (0, 0.6636, 0.1963), (0, 0.5363, 0.0183),
         (0.6766, 0.7748, -0.0183)],
        0.935, "Line, Whitworth, J. Chem. Phys. 104, 10008 (1996), 5 K; atoms approximate",
    ),
    "naphthalene": Measured(
        14, (8.658, 6.003, 8.235, 90, 122.92, 90), "CCCCCHHHH",
        [(0.3251, -0.0186, 0.0856), (0.2200, -0.1588, 0.1148), (0.0351, -0.1025, 0.0472), (-0.0784, -0.2471, 0.0749),
         (-0.2541, -0.1869, 0.0116), (0.4644, -0.0703, 0.1394), (0.2824, -0.3125, 0.1905), (-0.0300, -0.4065, 0.1457),
         (-0.3354, -0.2997, 0.0379)],
        1.183, "Abrahams, Robertson, White, Acta Cryst. 2, 233 (1949), 298 K; P2_1/a with a and c exchanged; "
        "hydrogens from bisectors",
    ),
    "adamantane": Measured(
        114, (6.60, 6.60, 8.81, 90, 90, 90), "CCCHHHH",
        [(0.0298, 0.1882, 0.1009), (0.218, 0.1584, 0.0), (0.0, 0.0, 0.2018),
         (0.0511, 0.3226, 0.173), (0.3529, 0.1406, 0.0701), (0.2428, 0.2921, -0.0701), (-0.1308, 0.0207, 0.2758)],
        1.179, "Donohue, Goodman, Acta Cryst. 22, 352 (1967), 188 K; atoms of the free molecule, turned by 9°",
    ),
}  # fmt: skip


def build(name: str) -> Atoms:
    """The crystal, checked.

    Raises:
        ValueError: its density is not the stated one, or atoms are nearer than bonds allow.
    """
    it = CRYSTALS[name]
    atoms = crystal(list(it.symbols), it.positions, spacegroup=it.spacegroup, cellpar=it.cell)
    atoms = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True, info={"name": name.replace(" ", "-")})
    density = atoms.get_masses().sum() / atoms.get_volume() * 1.66054
    if abs(density / it.density - 1) > 0.01:
        raise ValueError(f"{name}: a density of {density:.3f} g/cm³, and {it.density} is expected")
    distances = atoms.get_all_distances(mic=True) + 9 * np.eye(len(atoms))
    radii = covalent_radii[atoms.numbers]
    ratio = distances / (radii[:, None] + radii)
    if ratio.min() < 0.75:
        raise ValueError(f"{name}: atoms at {distances.min():.2f} Å, {ratio.min():.2f} times the sum of their radii")
    return atoms


if __name__ == "__main__":
    folder, models = Path(sys.argv[1]), sys.argv[2:] or ["organic", "organic-small"]
    folder.mkdir(parents=True, exist_ok=True)
    measured = [build(name) for name in CRYSTALS]
    write(folder / "measured.xyz", measured)
    print("| crystal | model | a | b | c, Å | volume, Å³ | volume, % | converged |\n|---|---|---|---|---|---|---|---|")
    for model in models:
        output = folder / f"{model}.xyz"
        main(["relax", model, str(folder / "measured.xyz"), str(output), "--cell", "--fmax", "0.02", "--steps", "500"])
        for atoms, start in zip(read(output, ":"), measured, strict=True):
            edges = " | ".join(f"{edge:.3f}" for edge in atoms.cell.lengths())
            change = 100 * (atoms.get_volume() / start.get_volume() - 1)
            print(f"| {start.info['name']} | {model} | {edges} | {atoms.get_volume():.1f} | {change:+.1f} | "
                  f"{atoms.info['converged']} |")  # fmt: skip
