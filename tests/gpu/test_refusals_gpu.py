"""Charges that a model was not trained on, on a real GPU: refused on every path, and looked at without waiting."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from variants import variant

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.errors import UntrainedCharge, UntrainedChargeWarning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def fused() -> Potential:
    model = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Potential.from_config({"model": model, "elements": [1, 6, 8], "total_charges": [0]}).eval()


def captured() -> Potential:
    """Without fused kernels, and blind to the charge."""
    potential = variant("transformer").float()
    potential.allow_untrained_charge = False
    return potential


def water(charge: float = 0.0) -> System:
    pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    return System(z=torch.tensor([8, 1, 1]), pos=pos, charge=torch.tensor([charge])).to("cuda")


@pytest.mark.parametrize("make", [fused, captured])
@pytest.mark.parametrize("graphs", [True, False])
def test_untrained_charge(make, graphs):
    """Issue 14: in calls and bound steps, after good calls of the same size, which then go on; allowed, as exact."""
    potential = make().to("cuda")
    evaluator = Evaluator(potential, graphs=graphs)
    before = [evaluator(water()) for _ in range(3)][-1]
    for call in (evaluator, evaluator.bind):
        with pytest.raises(UntrainedCharge, match="system 0 has the total charge 1"):
            call(water(1.0))
    torch.testing.assert_close(evaluator(water()).energy, before.energy, rtol=0, atol=1e-5)
    potential.allow_untrained_charge = True
    with pytest.warns(UntrainedChargeWarning):
        ours = evaluator(water(1.0))
        exact = copy.deepcopy(potential).double()(water(1.0).to(dtype=torch.float64))
    torch.testing.assert_close(ours.energy, exact.energy, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [fused, captured])
def test_looking_does_not_wait(make):
    """A replayed bound step and a call with the tensors of before make no synchronising call but the final one."""
    evaluator = Evaluator(make().to("cuda"), graphs=True)
    system = water()
    step = evaluator.bind(system)
    evaluator(system), evaluator(system)
    moved = system.replace(pos=system.pos + 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.replay()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            evaluator(moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in waits if "synchronizing" in str(w.message)]) == 1


def test_two_atoms_at_the_same_place_in_the_first_structure():
    """Named by the first check of a path; later ones are not looked at on a GPU (docs/evaluator.md)."""
    for make in (fused, captured):
        system = water()
        system.pos[2] = system.pos[1]
        with pytest.raises(ValueError, match="atom 1 and atom 2 are at the same place"):
            Evaluator(make().to("cuda"))(system)
