"""Make test sets far from the training frames of acetylacetone: hotter frames, a proton transfer and a torsion.

    python scripts/acac_tests.py acac/train_300K.xyz DATA/acac        # pip install pyscf dftd3 tblite; about 15 minutes

Geometries by GFN2-xTB: 24 frames of dynamics at 600 K, 9 of the proton on its way from one oxygen to the other, and 13
of the dihedral angle O=C-C=C from 0 to 180°, relaxed where GFN2-xTB converges. Labels of the level of the published
frames: PBE with D3(BJ), def2-SVP (here with density fitting). Energies are shifted by the mean difference from four
published frames; it is printed, and so are the remaining differences. `python -m scripts.bench extrapolation run …
--data DATA` then measures each model on test_600K.xyz, test_transfer.xyz and test_dihedral.xyz, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixInternals
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.optimize import BFGS, FIRE

Level = Callable[[Atoms], tuple[float, np.ndarray]]  # energy in eV, forces in eV/Å
O_ENOL, O_KETO, PROTON = 3, 5, 11  # atoms of the published frames
DIHEDRAL, BEHIND = (5, 0, 1, 2), (2, 3, 4, 7, 8, 9, 10, 11)  # O=C-C=C, and what turns


def dft(atoms: Atoms) -> tuple[float, np.ndarray]:
    """Energy, eV, and forces, eV/Å."""
    from dftd3.interface import DispersionModel, RationalDampingParam
    from pyscf import gto
    from pyscf.dft import RKS

    places = list(zip(atoms.get_chemical_symbols(), atoms.positions, strict=True))
    field = RKS(gto.M(atom=places, basis="def2-svp", verbose=0), xc="pbe").density_fit(auxbasis="def2-universal-jfit")
    field.conv_tol = 1e-9
    energy, gradient = field.kernel(), field.nuc_grad_method().kernel()
    if not field.converged:
        raise RuntimeError("the self-consistent field did not converge")
    model = DispersionModel(atoms.numbers, atoms.positions / units.Bohr)
    dispersion = model.get_dispersion(RationalDampingParam(method="pbe"), grad=True)
    forces = -(gradient + dispersion["gradient"]) * units.Hartree / units.Bohr
    return (energy + dispersion["energy"]) * units.Hartree, forces


def with_xtb(atoms: Atoms) -> Atoms:
    from tblite.ase import TBLite

    found = Atoms(atoms.symbols, atoms.positions)
    found.calc = TBLite(method="GFN2-xTB", verbosity=0)
    return found


def hot(
    starts: Sequence[Atoms], seed: int, kelvin: float, timestep: float, trajectories: int, frames: int
) -> list[Atoms]:
    """Frames of trajectories of GFN2-xTB, 0.2 ps apart after 0.5 ps; the time step is in fs."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(trajectories):
        atoms = with_xtb(starts[rng.integers(len(starts))])
        MaxwellBoltzmannDistribution(atoms, temperature_K=kelvin, rng=rng)
        options = {"temperature_K": kelvin, "friction": 0.02 / units.fs, "rng": rng, "fixcm": False}
        dynamics = Langevin(atoms, timestep * units.fs, **options)
        dynamics.run(round(500 / timestep))
        for _ in range(frames):
            dynamics.run(round(200 / timestep))
            found.append(atoms.copy())
    return found


def shift_of(published: Sequence[Atoms], dft: Level) -> float:
    """eV between energies of `dft` and those of published frames; printed, with the remaining differences."""
    pairs = [(frame, *dft(frame)) for frame in published]
    differences = np.array([energy - frame.get_potential_energy() for frame, energy, _ in pairs])
    rest = np.sqrt(np.mean([(forces - frame.get_forces()) ** 2 for frame, _, forces in pairs]))
    energies = f"{1e3 * differences.mean():.2f} ± {1e3 * differences.std():.2f} meV"
    print(f"energies: {energies}; forces: {1e3 * rest:.2f} meV/Å", flush=True)
    return float(differences.mean())


def write_labelled(path: Path, geometries: Sequence[Atoms], dft: Level, shift: float) -> None:
    """A test set with labels of `dft`."""
    for atoms in geometries:
        energy, forces = dft(atoms)
        atoms.calc = SinglePointCalculator(atoms, energy=energy - shift, forces=forces)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, geometries, format="extxyz")
    print(f"{path.name}: {len(geometries)} frames", flush=True)


def relaxed(start: Atoms, **constraint) -> Atoms:
    """Relaxed by GFN2-xTB with these internal coordinates fixed; unchanged if that fails."""
    atoms = with_xtb(start)
    atoms.set_constraint(FixInternals(**constraint))
    try:
        FIRE(atoms, logfile=None).run(fmax=0.05, steps=150)
    except Exception as error:  # tblite and FixInternals raise many kinds of errors
        print(f"{constraint}: not relaxed: {error}")
        atoms = start.copy()
    atoms.set_constraint()
    return atoms


def transfer(start: Atoms) -> list[Atoms]:
    """Frames of the proton transfer: the difference of the two O-H distances goes from -0.7 to 0.7 Å."""
    frames = []
    for difference in np.linspace(-0.7, 0.7, 9):
        atoms = start.copy()
        enol, keto, proton = atoms.positions[[O_ENOL, O_KETO, PROTON]]
        line = keto - enol
        aside = proton - enol - line * ((proton - enol) @ line) / (line @ line)
        atoms.positions[PROTON] = enol + line * (0.5 + 0.5 * difference / np.linalg.norm(line)) + 0.25 * aside
        bonds = [[O_ENOL, PROTON, 1.0], [O_KETO, PROTON, -1.0]]
        frames.append(relaxed(atoms, bondcombos=[[difference, bonds]]))
    return frames


def torsion(start: Atoms) -> list[Atoms]:
    frames = []
    for angle in range(0, 181, 15):
        atoms = start.copy()
        atoms.set_dihedral(*DIHEDRAL, angle, indices=BEHIND)
        frames.append(relaxed(atoms, dihedrals_deg=[[angle, DIHEDRAL]]))
    return frames


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", help="train_300K.xyz")
    parser.add_argument("folder", type=Path, help="where the test sets go")
    options = parser.parse_args()
    published = read(options.published, ":")
    shift = shift_of(published[:4], dft)
    minimum = with_xtb(published[0])
    BFGS(minimum, logfile=None).run(fmax=0.01, steps=300)
    sets = {"600K": hot(published, 1000, 600, 1.0, 4, 6), "transfer": transfer(minimum), "dihedral": torsion(minimum)}
    for name, geometries in sets.items():
        write_labelled(options.folder / f"test_{name}.xyz", geometries, dft, shift)
