"""Labelled crystals of which no two are similar."""

import numpy as np
import torch

from torchmdnet2.data import Sample
from torchmdnet2.system import System


def crystals(count=40, energy=1.0, forces=1.0, stress=1.0, per_atom=False):
    """Copper and gold of any composition in cells of many shapes, with EMT labels."""
    from ase.build import bulk
    from ase.calculators.emt import EMT

    rng, samples = np.random.default_rng(0), []
    for k in range(count):
        atoms = bulk("Cu", cubic=True, a=3.75) * (1, 1, 1 + k % 2)
        atoms.symbols[:] = rng.choice(["Cu", "Au"], len(atoms))
        strain = rng.normal(0, 0.015, (3, 3))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        atoms.positions += rng.normal(0, 0.06, atoms.positions.shape)
        atoms.calc = EMT()
        value = energy * atoms.get_potential_energy() / (len(atoms) if per_atom else 1)
        labels = {
            "energy": torch.tensor([value]),
            "forces": torch.tensor(forces * atoms.get_forces()),
            "stress": torch.tensor(stress * atoms.get_stress(voigt=False))[None],
        }
        samples.append(Sample(System.from_ase(atoms), labels))
    return samples
