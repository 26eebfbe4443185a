"""R7 for every prior: a narrow cell, its supercell and other lattice vectors give the same energy per atom."""

from __future__ import annotations

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.checks import without_network
from torchmdnet2.priors import D2, D3, ZBL, Coulomb
from torchmdnet2.testing import example_systems

CHARGES = {1: 0.4, 6: -0.4}
SYSTEM = example_systems((1, 6), 4.5)["tiny cell"]
SYSTEM = SYSTEM.replace(pos=0.7 * SYSTEM.pos, cell=0.7 * SYSTEM.cell)  # close enough for every term to act
PRIORS = {
    "zbl": (lambda: ZBL(4.0), 1e-8),
    "zbl covalent": (lambda: ZBL(envelope="covalent", screening="refitted"), 1e-8),
    "d2": (lambda: D2(8.0), 1e-8),
    "d3": (lambda: D3([1, 6], s8=1.2177, a1=0.4145, a2=4.8593, cutoff=8.0), 1e-8),
    "reaction field": (lambda: Coulomb(CHARGES, "reaction_field", 7.0), 1e-8),
    "ewald": (lambda: Coulomb(CHARGES, "ewald", 6.0, accuracy=1e-11), 1e-8),
    "pme": (lambda: Coulomb(CHARGES, "pme", 6.0, accuracy=1e-7), 1e-5),
}


@pytest.mark.parametrize("name", PRIORS)
def test_primitive_cell_is_supercell(name):
    if name == "d3":
        pytest.importorskip("tad_dftd3")
    make, bar = PRIORS[name]
    potential = without_network([make()], (1, 6)).eval()
    shifts = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0), torch.zeros(1)).double()
    pos = (SYSTEM.pos[None] + (shifts @ SYSTEM.cell[0])[:, None]).flatten(0, 1)
    factors = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    large = System(z=SYSTEM.z.repeat(6), pos=pos, cell=SYSTEM.cell * factors[:, None])
    basis = torch.tensor([[1.0, 1, 0], [0, 1, 0], [-1, 0, 1]], dtype=torch.float64)
    other = SYSTEM.replace(cell=basis @ SYSTEM.cell)
    one = potential(SYSTEM, stress=True)
    assert float(one.forces.abs().max()) > 1e-4 and abs(float(one.energy)) > 1e-2  # there is something to compare
    for system, copies in ((large, 6), (other, 1)):
        result = potential(system, stress=True)
        assert abs(float(result.energy / copies - one.energy)) / 2 <= bar
        assert torch.allclose(result.forces, one.forces.repeat(copies, 1), rtol=0, atol=10 * bar)
        assert torch.allclose(result.stress, one.stress, rtol=0, atol=10 * bar)
