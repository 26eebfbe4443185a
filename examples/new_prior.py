"""Write a prior, check it, add it to a model, save it and run it. See docs/extending.md.

python examples/new_prior.py molecule.xyz
"""

from __future__ import annotations

import argparse

import torch
from ase.io import read

from torchmdnet2 import Potential
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.priors import Prior
from torchmdnet2.registry import PRIORS
from torchmdnet2.testing import check_prior


@PRIORS.register("buckingham_repulsion")
class BuckinghamRepulsion(Prior):
    """A exp(−d/ρ) between all pairs, smoothly zero at the cutoff: keeps atoms apart.

    Args:
        strength: A, eV.
        length: ρ, Å.
        cutoff: Å.
    """

    def __init__(self, strength: float = 500.0, length: float = 0.2, cutoff: float = 3.0):
        super().__init__()
        self.strength, self.length, self.cutoff = strength, length, cutoff

    def forward(self, system, neighbors):
        """Energies of the atoms, [N] eV; forces and stress follow by differentiation."""
        d = neighbors.distances(system).double()  # [E] Å
        pair = self.strength * torch.exp(-d / self.length) * (1 - (d / self.cutoff) ** 2) ** 3
        # each pair is listed twice
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("structure")
parser.add_argument("--output", default="with_prior.tmn")
options = parser.parse_args()

check_prior(BuckinghamRepulsion())  # symmetries, derivatives, cells, batches
model = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 16}
potential = Potential.from_config({"model": model, "priors": [{"name": "buckingham_repulsion", "length": 0.25}]})
save(potential, options.output)  # to load this file, the prior must be registered
atoms = read(options.structure)
for scale in (1.0, 0.8, 0.6):
    closer = atoms.copy()
    closer.positions *= scale
    closer.calc = TorchMDNet2Calculator(options.output)
    largest = abs(closer.get_forces()).max()
    print(f"distances × {scale}: {closer.get_potential_energy():10.4f} eV, forces up to {largest:.3f} eV/Å")
