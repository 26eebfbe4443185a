"""Steps in blocks on a real GPU, beside whole steps; tests/engine/block_checks.py compares with float64."""

from __future__ import annotations

import pytest
import torch

from torchmdnet2 import Evaluator, Potential
from torchmdnet2.benchmark import water_box

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def potential():
    torch.manual_seed(1)
    model = {"name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 4.5}
    priors = [{"name": "zbl", "cutoff": 4.0}, {"name": "d2", "cutoff": 9.0}]
    return Potential.from_config({"model": model, "priors": priors}).eval().to("cuda")


def assert_close(found, expected, forces):
    """eV, eV/Å and eV/Å³: sums in another order."""
    assert float((found.atom_energies - expected.atom_energies).abs().max()) < forces
    assert float((found.energy - expected.energy).abs()) < 1e-6 * len(found.forces)
    assert float((found.forces - expected.forces).abs().max()) < forces
    if expected.stress is not None:
        assert float((found.stress - expected.stress).abs().max()) < 1e-6


@pytest.mark.parametrize(("precision", "forces"), [("native", 1e-5), ("mixed", 1e-4)])
def test_water_is_as_in_one_step(potential, precision, forces):
    system = water_box(24).to("cuda")
    expected = Evaluator(potential, precision)(system, stress=True)
    evaluator = Evaluator(potential, precision, block_atoms=30_000)
    found = evaluator(system, stress=True)
    assert " blocks of up to " in evaluator.report()
    assert_close(found, expected, forces)
    again = evaluator(system, stress=True)
    assert torch.equal(again.forces, found.forces) and torch.equal(again.stress, found.stress)


def test_a_bound_step_follows_atoms_and_cell(potential):
    system = water_box(20).to("cuda")
    bound = Evaluator(potential, block_atoms=22_000).bind(system, stress=True)
    for scale in (1.02, 0.93):  # fewer neighbors, and more atoms than fit into a block
        moved = system.replace(pos=system.pos * scale, cell=system.cell * scale)
        bound.pos.copy_(moved.pos)
        bound.cell.copy_(moved.cell)
        bound.replay()
        assert bound.check()
        expected = Evaluator(potential)(moved, stress=True)
        assert float((bound.forces - expected.forces).abs().max()) < 1e-5 * max(1.0, float(expected.forces.abs().max()))
        assert float((bound.stress - expected.stress).abs().max()) < 1e-5


def test_what_does_not_fit_into_the_memory(potential):
    system = water_box(32).to("cuda")
    expected = Evaluator(potential)(system)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((5e9 + torch.cuda.memory_reserved()) / total)
    try:
        evaluator = Evaluator(potential)
        found = evaluator(system)
        assert " blocks of up to " in evaluator.report()
        assert_close(found, expected, 1e-5)
        bound = evaluator.bind(system)
        bound.replay()
        assert bound.check() and torch.equal(bound.forces, found.forces)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
