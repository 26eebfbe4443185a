"""Run by test_loss_kernels.py in a process of its own, by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from torchmdnet2 import Potential
from torchmdnet2.training.config.sections import LossConfig
from torchmdnet2.training.steps import loss_kernels
from torchmdnet2.training.steps.loss_kernels import BatchErrors, Labels, Penalties
from torchmdnet2.training.steps.network import PackedNetwork
from torchmdnet2.training.steps.optimizers import AdamW, Update
from torchmdnet2.training.steps.replay import TrainingPass
from training.loss_kernel_cases import CASES, check, example
from training.test_packed import packed, structures


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_plain_pytorch(case):
    check("cpu", **CASES[case])


def test_more_blocks_than_are_added_at_once(monkeypatch):
    monkeypatch.setattr(loss_kernels, "_MOST_AT_ONCE", 2)
    check("cpu", sizes=[150, 250], dtype=torch.float32)


def by_kernels(result, batch, weights=3, over_processes=None):
    labels = Labels(
        batch.energy, batch.forces, batch.stress, batch.atom_ptr, batch.element, batch.z[len(batch.forces) :]
    )
    table, weights = torch.zeros(128, 3, dtype=torch.float64), torch.ones(weights, dtype=torch.float64)
    predictions = [t.requires_grad_() for t in (result.energy, result.forces, result.stress)]
    penalties = Penalties("mse", "huber", "l1", 0.1, True)
    loss = BatchErrors(labels, penalties, table, weights, over_processes)(*predictions)
    return loss, torch.autograd.grad(loss, predictions), table


def given():
    return example("cpu", torch.float32, [4, 200], [1, 6], True, True, ("energy", "forces", "stress"), 0)


def test_what_is_predicted_without_a_label_does_not_matter():
    result, batch = given()
    absent = batch.forces.isnan().any(1)
    assert 0 < absent[:200].sum() < 200
    expected = by_kernels(*given())
    result.forces[absent], result.energy[-1] = float("nan"), float("inf")
    found = by_kernels(result, batch)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
    for one, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(one, other)


def test_several_processes_with_labels_of_other_properties():
    """The weights of further labels, such as charges, follow those of energies, forces and stress."""
    alone, gradients, table = by_kernels(*given())
    loss, found, sums = by_kernels(*given(), weights=4, over_processes=lambda counts: counts)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12) and torch.equal(sums, table)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)


def test_a_prediction_that_is_not_finite_is_seen():
    result, batch = given()
    present = batch.forces.isfinite().all(1).nonzero()[0]
    result.forces[present] = float("nan")
    loss, (_, forces, _), table = by_kernels(result, batch)
    assert loss.isnan() and forces[present].isnan().all() and forces.isnan().sum() == 3
    assert table[2, 1:].isnan().all() and table[0].isfinite().all()


def test_gradients_of_the_weights():
    """Through forces and stress, as in a training step; float64, to 1e-12 of the largest."""
    torch.manual_seed(0)
    model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 4, "cutoff": 4.5}
    potential = Potential.from_config({"model": model, "elements": [1, 6, 8]}).double()
    parameters = list(potential.parameters())
    store = packed(structures())
    batch = store.batch(torch.tensor([2, 0, 3, -1]), store.size([2, 0, 3]).__class__(4, 20, 100))
    batch.energy[1], batch.forces[4] = float("nan"), float("nan")
    found = []
    for name in ("_by_kernels", "_reference"):
        network = PackedNetwork(potential, 3, True, True, use_kernels=False)
        optimizer = AdamW([{"params": parameters, "lr": 1e-3}])
        work = TrainingPass(network, LossConfig(), Update(parameters, [p.clone() for p in parameters], optimizer, 1.0))
        work._add = getattr(work, name)
        work.warm_up(batch)
        assert not work._table.any()
        work._gradients(batch)
        found.append((work.update.flat.clone(), work._table.clone()))
    (flat, table), (expected, wanted) = found
    torch.testing.assert_close(flat, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    torch.testing.assert_close(table, wanted, rtol=1e-12, atol=0)
