"""Bars R1, R2, R4, R5, R7, R9, R11, R12, R13, R14 for TensorNet, structure by structure."""

from __future__ import annotations

import pytest
import torch
from tiny import ELEMENTS, MODELS, tiny_potential

from torchmdnet2 import System
from torchmdnet2.neighbors.pairs import PairLists
from torchmdnet2.testing import POTENTIAL_CHECKS, SYSTEM_CHECKS, check_potential, example_systems

POTENTIALS = {kind: tiny_potential(kind) for kind in MODELS}
SYSTEMS = example_systems(ELEMENTS, POTENTIALS["o3"].cutoff)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", ["o3", "so3"])
@pytest.mark.parametrize("check", SYSTEM_CHECKS)
def test_structure(check, kind, system):
    SYSTEM_CHECKS[check](POTENTIALS[kind], SYSTEMS[system])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("check", POTENTIAL_CHECKS)
def test_potential(check, kind):
    POTENTIAL_CHECKS[check](POTENTIALS[kind])


def test_gauss_and_a_lower_cutoff():
    check_potential(tiny_potential("gauss"), [SYSTEMS["molecule"], SYSTEMS["tiny cell"]])


@pytest.mark.parametrize("kind", MODELS)
def test_force_change_across_the_cutoff(kind):
    """Bar R9 to the letter, slope included: 1e-6 eV/Å from 1e-5 Å inside to 1e-5 Å outside, weights as initialised."""
    potential = tiny_potential(kind, noise=0.0)
    inside, outside = (
        potential(System(z=torch.tensor([8, 1]), pos=torch.tensor([[0.0, 0, 0], [4.5 + x, 0, 0]]).double())).forces
        for x in (-1e-5, 1e-5)
    )
    assert 0 < float((inside - outside).abs().max()) <= 1e-6


def test_forces_are_large_enough_to_be_tested():
    for potential in POTENTIALS.values():
        assert float(potential(SYSTEMS["molecule"]).forces.abs().max()) > 0.05


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("distance", [0.0, 1e-30, 1e-20, 1e-15, 1e-10, 1e-5])
def test_coincident_atoms_in_float32(kind, distance):
    """Bar R12 in single precision, where squares underflow early; without the check of a call, which refuses them."""
    potential = tiny_potential(kind, torch.float32)
    pos = torch.tensor([[0.0, 0, 0], [distance, 0, 0], [0.3, 1.2, 0]])
    system = System(z=torch.tensor([6, 8, 1]), pos=pos)
    result = potential.compute(system, PairLists(system), forces=True, stress=False)
    assert torch.isfinite(result.energy).all() and torch.isfinite(result.forces).all()
