"""R7 for every prior: a narrow cell, its supercell, other lattice vectors and a rotated cell give the same energy."""

from __future__ import annotations

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.priors import D2, D3, ZBL, Coulomb, PairPotential
from torchmdnet2.testing import example_systems, without_network

CHARGES = {1: 0.4, 6: -0.4}
PAIR = [0.5, 0, 2, 0, 0, 1, 0, 2.5]
SYSTEM = example_systems((1, 6), 4.5)["tiny cell"]
SYSTEM = SYSTEM.replace(pos=0.7 * SYSTEM.pos, cell=0.7 * SYSTEM.cell)  # close enough for every term to act
PRIORS = {
    "zbl": (lambda: ZBL(4.0), 1e-8),
    "pair potential": (lambda: PairPotential({"C-C": [0, 2, 0, 0, 1, 0, 1, 0], "C-H": PAIR, "H-H": PAIR}), 1e-8),
    "zbl covalent": (lambda: ZBL(envelope="covalent", screening="refitted"), 1e-8),
    "d2": (lambda: D2(8.0), 1e-8),
    "d3": (lambda: D3([1, 6], s8=1.2177, a1=0.4145, a2=4.8593, cutoff=8.0), 1e-8),
    "reaction field": (lambda: Coulomb(CHARGES, "reaction_field", 7.0), 1e-8),
    "ewald": (lambda: Coulomb(CHARGES, "ewald", 6.0), 1e-8),
    "pme": (lambda: Coulomb(CHARGES, "pme", 6.0), 1e-8),
    "pme, coarse": (lambda: Coulomb(CHARGES, "pme", 6.0, accuracy=1e-6), 1e-6),
    "pme, fine": (lambda: Coulomb(CHARGES, "pme", 6.0, accuracy=1e-11), 1e-9),
}


@pytest.mark.parametrize("name", PRIORS)
def test_primitive_cell_is_supercell(name):
    make, bar = PRIORS[name]
    potential = without_network([make()], (1, 6)).eval()
    shifts = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0), torch.zeros(1)).double()
    pos = (SYSTEM.pos[None] + (shifts @ SYSTEM.cell[0])[:, None]).flatten(0, 1)
    factors = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    large = System(z=SYSTEM.z.repeat(6), pos=pos, cell=SYSTEM.cell * factors[:, None])
    basis = torch.tensor([[1.0, 1, 0], [0, 1, 0], [-1, 0, 1]], dtype=torch.float64)
    other = SYSTEM.replace(cell=basis @ SYSTEM.cell)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    rotated = SYSTEM.replace(pos=SYSTEM.pos @ turn + 1.7, cell=SYSTEM.cell @ turn)
    one = potential(SYSTEM, stress=True)
    assert float(one.forces.abs().max()) > 1e-4 and abs(float(one.energy)) > 1e-2  # there is something to compare
    eye = torch.eye(3, dtype=torch.float64)
    for system, copies, q in ((large, 6, eye), (other, 1, eye), (rotated, 1, turn)):
        result = potential(system, stress=True)
        assert abs(float(result.energy / copies - one.energy)) / 2 <= bar
        assert torch.allclose(result.forces, (one.forces @ q).repeat(copies, 1), rtol=0, atol=10 * bar)
        assert torch.allclose(result.stress, q.T @ one.stress @ q, rtol=0, atol=10 * bar)
