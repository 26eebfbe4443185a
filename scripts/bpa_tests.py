"""Make a test set of 3BPA at 1200 K that is not the published one, to choose settings on.

    python scripts/bpa_tests.py 3bpa/train_300K.xyz DATA/3bpa

Needs `pip install pyscf tblite`; takes about 20 minutes on two cores.

Ten frames of two trajectories of GFN2-xTB at 1200 K, 0.2 ps apart after 0.5 ps. Labels of the level of the published
frames, ωB97X/6-31G(d) (here with density fitting). Energies are shifted by the mean difference from two published
frames of the training; it is printed, and so are the remaining differences.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from acac_tests import hot, shift_of, write_labelled
from ase import Atoms, units
from ase.io import read


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", help="train_300K.xyz")
    parser.add_argument("folder", type=Path, help="where the test set goes")
    options = parser.parse_args()
    published = read(options.published, ":")
    shift = shift_of(published[:2], dft)
    write_labelled(options.folder / "test_own1200K.xyz", hot(published, 1200, 1200, 0.5, 2, 5), dft, shift)
