"""Where vector features vanish by symmetry, forces do not depend on what rounding leaves of them."""

from __future__ import annotations

import pytest
import torch
from ase.build import bulk, molecule
from variants import variant

from torchmdnet2 import System
from torchmdnet2.models.layers import smooth_length


@pytest.mark.parametrize("name", ["CH4", "CO2"])
def test_float32_gives_the_forces_of_float64(name):
    """Also after moving atoms by 1e-9 Å. In float32 to 5e-4 eV/Å in any order of the atoms, which decides how sums are
    rounded: 2e-6 to 2.3e-4 eV/Å were found, and 0.1 eV/Å with the length itself."""
    potential = variant("equivariant_transformer", head={"name": "equivariant_scalar"}).double()
    atoms = molecule(name)
    exact = potential(System.from_ase(atoms)).forces
    atoms.rattle(1e-9, seed=0)
    moved = potential(System.from_ase(atoms)).forces
    assert float(exact.abs().max()) > 1e-3
    assert float((moved - exact).abs().max()) <= 1e-5
    potential.float()
    for seed in range(20):
        order = torch.randperm(len(atoms), generator=torch.Generator().manual_seed(seed))
        single = potential(System.from_ase(molecule(name)[order.tolist()], dtype=torch.float32)).forces
        assert float((single - exact[order]).abs().max()) <= 5e-4


def test_perfect_crystals_have_no_forces():
    potential = variant("equivariant_transformer", head={"name": "equivariant_scalar"}).double()
    crystal = bulk("C", "diamond", a=3.6) * (2, 1, 1)
    assert float(potential(System.from_ase(crystal)).forces.abs().max()) <= 1e-10


def test_the_length_is_the_length_from_a_thousandth_on():
    direction = torch.tensor([0.36, -0.48, 0.8], dtype=torch.float64)
    for length in (1.001e-3, 0.1, 7.0):
        assert float(smooth_length(length * direction)) == pytest.approx(length, rel=1e-14)
    assert float(smooth_length(0 * direction)) == 0
    for length in (0.0, 1e-12, 5e-4, 1e-3, 0.3):
        v = (length * direction).requires_grad_()
        assert torch.autograd.gradcheck(smooth_length, v, eps=1e-7, atol=1e-5)
        assert torch.autograd.gradgradcheck(smooth_length, v, eps=1e-7, atol=1e-2)
    lengths = [float(smooth_length((1e-3 + x) * direction)) for x in (-1e-9, 1e-9)]
    assert lengths[1] - lengths[0] == pytest.approx(2e-9, rel=1e-5)
