"""Make a test set of 3BPA at 1200 K that is not the published one, to choose settings on.

    python scripts/bpa_tests.py 3bpa/train_300K.xyz DATA/3bpa

Needs `pip install pyscf tblite`; takes about 20 minutes on two cores.

Ten frames of two trajectories of GFN2-xTB at 1200 K, 0.2 ps apart after 0.5 ps. Labels of the level of the published
frames, ωB97X/6-31G(d) (here with density fitting). Energies are shifted by the mean difference from two published
frames of the training, which is printed, as is what is left of the differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from acac_tests import with_xtb
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

TEMPERATURE, TRAJECTORIES, FRAMES = 1200.0, 2, 5


def dft(atoms: Atoms) -> tuple[float, np.ndarray]:
    """Energy, eV, and forces, eV/Å."""
    from pyscf import gto
    from pyscf.dft import RKS

    places = list(zip(atoms.get_chemical_symbols(), atoms.positions, strict=True))
    field = RKS(gto.M(atom=places, basis="6-31g*", verbose=0), xc="wb97x").density_fit()
    energy, gradient = field.kernel(), field.nuc_grad_method().kernel()
    if not field.converged:
        raise RuntimeError("the self-consistent field did not converge")
    return energy * units.Hartree, -gradient * units.Hartree / units.Bohr


def hot(starts: Sequence[Atoms]) -> list[Atoms]:
    rng, frames = np.random.default_rng(1200), []
    for _ in range(TRAJECTORIES):
        atoms = with_xtb(starts[rng.integers(len(starts))])
        MaxwellBoltzmannDistribution(atoms, temperature_K=TEMPERATURE, rng=rng)
        options = {"temperature_K": TEMPERATURE, "friction": 0.02 / units.fs, "rng": rng, "fixcm": False}
        dynamics = Langevin(atoms, 0.5 * units.fs, **options)
        dynamics.run(1000)
        for _ in range(FRAMES):
            dynamics.run(400)
            frames.append(atoms.copy())
    return frames


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", help="train_300K.xyz")
    parser.add_argument("folder", type=Path, help="where the test set goes")
    options = parser.parse_args()
    published = read(options.published, ":")
    pairs = [(frame, *dft(frame)) for frame in published[:2]]
    differences = np.array([energy - frame.get_potential_energy() for frame, energy, _ in pairs])
    rest = np.sqrt(np.mean([(forces - frame.get_forces()) ** 2 for frame, _, forces in pairs]))
    shift = (
        f"energies: {1e3 * differences.mean():.2f} ± {1e3 * differences.std():.2f} meV, forces: {1e3 * rest:.1f} meV/Å"
    )
    print(shift, flush=True)
    geometries = hot(published)
    for atoms in geometries:
        energy, forces = dft(atoms)
        atoms.calc = SinglePointCalculator(atoms, energy=energy - differences.mean(), forces=forces)
        print(f"{energy:.3f} eV, largest force {np.abs(forces).max():.1f} eV/Å", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder / "test_own1200K.xyz", geometries, format="extxyz")
