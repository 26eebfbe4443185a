"""Refusals on a real GPU, on every path and without waiting: untrained charges, two atoms at the same place."""

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
    potential = variant("graph_network_mean").float()
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
        with pytest.raises(UntrainedCharge, match="structure 0 has the total charge 1"):
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


@pytest.mark.parametrize("make", [fused, captured])
@pytest.mark.parametrize("graphs", [True, False])
def test_two_atoms_at_the_same_place(make, graphs):
    """R12: named in the first structure of a path and in any later one, of a batch, under replay; near ones are not."""

    def pair(distance: float) -> System:
        second = water().replace(pos=water().pos + 20)
        second.pos[2] = second.pos[1] + torch.tensor([0, distance, 0], device="cuda")
        return System.concatenate([water(), second])

    words = "atom 4 and atom 5 are at the same place"
    potential = make().to("cuda")
    with pytest.raises(ValueError, match=words):
        Evaluator(potential, graphs=graphs)(pair(0.0))
    evaluator, good = Evaluator(potential, graphs=graphs), pair(0.5)
    expected = [evaluator(good).energy for _ in range(3)][-1]
    step = evaluator.bind(good)
    step.replay()
    for distance in (0.0, 5e-4):
        with pytest.raises(ValueError, match=words):
            evaluator(pair(distance))
        step.pos.copy_(pair(distance).pos)
        step.replay()
        assert bool(step.energy.isnan().all())
        with pytest.raises(ValueError, match=words):
            step.check()
        step.pos.copy_(good.pos)
        step.replay()
        torch.testing.assert_close(step.fetch().energy, expected.cpu(), rtol=0, atol=1e-5)
    torch.testing.assert_close(evaluator(good).energy, expected, rtol=0, atol=1e-5)
    assert bool(evaluator(pair(0.01)).energy.isfinite().all())


@pytest.mark.parametrize("num_atoms", [30, 400, 3000])
def test_two_atoms_at_the_same_place_in_each_search(num_atoms):
    """R12: the search in one kernel, all pairs, cell lists."""
    side = round(num_atoms ** (1 / 3)) + 1
    grid = 2.0 * torch.cartesian_prod(*[torch.arange(side)] * 3)[:num_atoms]
    made = System(z=torch.ones(num_atoms, dtype=torch.long), pos=grid, cell=2.0 * side * torch.eye(3)).to("cuda")
    evaluator = Evaluator(fused().to("cuda"))
    evaluator(made)
    wrong = made.replace(pos=made.pos.clone())
    wrong.pos[num_atoms - 1] = wrong.pos[3] + made.cell[0, 0] + 5e-4
    for _ in range(2):
        with pytest.raises(ValueError, match=f"atom 3 and atom {num_atoms - 1} are at the same place"):
            evaluator(wrong)
    assert bool(evaluator(made).energy.isfinite().all())
