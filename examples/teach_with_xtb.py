"""Learn the difference between few expensive labels and GFN2-xTB, and add it to GFN2-xTB labels of many frames.

    python examples/label_with_xtb.py train.xyz cheap.xyz --frames 20000 --temperatures 300,450,600 --processes 4
    python examples/teach_with_xtb.py difference train.xyz difference.xyz
    torchmdnet2 train difference.yaml --members 4
    python examples/teach_with_xtb.py add cheap.xyz taught.xyz runs/difference/ensemble.json
    torchmdnet2 train student.yaml

The difference is smoother than the energy, so few labels are enough (Δ-learning: Ramakrishnan,
doi:10.1021/acs.jctc.5b00099). The student learns the sum of both from many frames, and runs without xTB. Frames on
which the members of the ensemble disagree are left out. Needs tblite (pip install tblite).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2.adapters.ase import CommitteeCalculator


def plus(atoms: Atoms, energy: float, forces: np.ndarray) -> Atoms:
    """A copy of the structure with these values, in eV and eV/Å ([N, 3]), added to its labels."""
    frame = atoms.copy()
    energy, forces = energy + atoms.get_potential_energy(), forces + atoms.get_forces()
    frame.calc = SinglePointCalculator(frame, energy=energy, forces=forces)
    return frame


def less_xtb(atoms: Atoms) -> Atoms:
    """A copy of the structure with its labels minus those of GFN2-xTB."""
    from tblite.ase import TBLite

    cheap = atoms.copy()
    cheap.calc = TBLite(method="GFN2-xTB", verbosity=0, accuracy=0.01, charge=atoms.info.get("charge", 0))
    return plus(atoms, -cheap.get_potential_energy(), -cheap.get_forces())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["difference", "add"])
    parser.add_argument("files", nargs="+", help="frames, extxyz file to write; for add: ensemble.json or models")
    parser.add_argument("--largest-spread", type=float, default=0.1, help="eV/Å, of any component (%(default)s)")
    options = parser.parse_args()
    given, (output, *teachers) = read(options.files[0], ":"), options.files[1:]
    if options.do == "difference":
        frames = [less_xtb(atoms) for atoms in given]
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        committee = CommitteeCalculator(teachers[0] if len(teachers) == 1 else teachers, device)
        found = zip(given, committee.evaluate(given, batch_size=256), strict=True)
        trusted = ((a, more) for a, more in found if np.abs(more["forces_std"]).max() <= options.largest_spread)
        frames = [plus(atoms, more["energy"], more["forces"]) for atoms, more in trusted]
    write(output, frames, format="extxyz")
    print(f"{output}: {len(frames)} of {len(given)} frames")
