"""Loss and metrics: masked by absent labels, weighted by counts, per atom."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchmdnet2.potential.potential import Result
from torchmdnet2.system import System
from torchmdnet2.training.config.config import LossConfig, TrainingConfig
from torchmdnet2.training.steps.loss import ErrorSums, penalty_sums, residuals, total_loss
from torchmdnet2.training.steps.optimizers import AdamW, Update
from torchmdnet2.training.steps.trainer import BestEpoch, LearningRate

NAN = float("nan")


def batch(sizes, rng, absent=0.3):
    """Predictions and labels of structures with `sizes` atoms, some labels absent."""
    n, b = sum(sizes), len(sizes)
    system = System(
        z=torch.tensor(rng.choice([1, 6, 8], n)),
        pos=torch.zeros(n, 3),
        batch=torch.repeat_interleave(torch.arange(b), torch.tensor(sizes)),
        charge=torch.zeros(b),
    )
    result = Result(
        energy=torch.tensor(-1e5 + rng.normal(size=b)),
        forces=torch.tensor(rng.normal(size=(n, 3))),
        stress=torch.tensor(rng.normal(size=(b, 3, 3))),
    )
    labels = {
        "energy": torch.tensor(np.where(rng.random(b) < absent, NAN, -1e5 + rng.normal(size=b))),
        "forces": torch.tensor(np.where(rng.random((n, 1)) < absent, NAN, rng.normal(size=(n, 3)))),
        "stress": torch.tensor(np.where(rng.random((b, 1, 1)) < absent, NAN, rng.normal(size=(b, 3, 3)))),
    }
    return system, result, labels


@pytest.mark.parametrize("kind", ["mse", "l1", "huber"])
@pytest.mark.parametrize("per_atom", [True, False])
def test_loss_equals_a_plain_calculation(kind, per_atom):
    rng = np.random.default_rng(1)
    sizes = [3, 1, 7, 4, 2]
    system, result, labels = batch(sizes, rng)
    config = LossConfig(kind=kind, per_atom=per_atom, energy=3.0, forces=0.5, stress=2.0, huber_delta=0.7)

    def scalar(e):
        if kind == "mse":
            return e * e
        return abs(e) if kind == "l1" else (0.5 * e * e if abs(e) < 0.7 else 0.7 * (abs(e) - 0.35))

    expected = 0.0
    for name, weight in (("energy", 3.0), ("forces", 0.5), ("stress", 2.0)):
        terms = []
        for i, (p, t) in enumerate(zip(getattr(result, name).tolist(), labels[name].tolist(), strict=True)):
            for a, c in zip(np.ravel(p), np.ravel(t), strict=True):
                if not math.isnan(c):
                    terms.append(scalar((a - c) / (sizes[i] if name == "energy" and per_atom else 1)))
        expected += weight * sum(terms) / len(terms)
    found = residuals(result, labels)
    loss = total_loss(penalty_sums(found, system, config), config)
    assert float(loss) == pytest.approx(expected, rel=1e-10)
    sums = ErrorSums(config)
    sums.add(found, system)
    assert sums.loss() == pytest.approx(expected, rel=1e-10)


def test_absent_labels_have_no_gradient_and_no_nan():
    rng = np.random.default_rng(2)
    system, result, labels = batch([4, 4], rng, absent=0)
    labels["forces"][:] = NAN
    labels["energy"][0] = NAN
    for tensor in (result.energy, result.forces):
        tensor.requires_grad_()
    config = LossConfig()
    total_loss(penalty_sums(residuals(result, labels), system, config), config).backward()
    assert result.energy.grad[0] == 0 != result.energy.grad[1]
    assert torch.equal(result.forces.grad, torch.zeros(8, 3, dtype=torch.float64))


def test_one_missing_component_makes_a_force_absent():
    _, result, labels = batch([3], np.random.default_rng(0), absent=0)
    labels["forces"][1, 2] = NAN
    assert residuals(result, labels)["forces"].present.tolist() == [[True] * 3, [False] * 3, [True] * 3]


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(ValueError, match="no label to train on"):
        total_loss({}, LossConfig())


def test_metrics_do_not_depend_on_the_batches():
    rng = np.random.default_rng(3)
    parts = [batch(sizes, rng) for sizes in ([3], [5, 2, 8, 1], [4, 4])]
    separate = ErrorSums(LossConfig())
    errors = {"energy": [], "forces": []}
    for system, result, labels in parts:
        separate.add(residuals(result, labels), system)
        for name, found in errors.items():
            found.append((getattr(result, name) - labels[name]).numpy().ravel())
    for name, found in errors.items():
        flat = np.concatenate(found)
        flat = flat[~np.isnan(flat)]
        assert separate.mae(name) == pytest.approx(np.abs(flat).mean(), rel=1e-12)
        assert separate.rmse(name) == pytest.approx(np.sqrt((flat**2).mean()), rel=1e-12)
        assert separate.summary()[name]["count"] == flat.size
    by_element = separate.summary()["forces_by_element"]
    assert set(by_element) == {"H", "C", "O"}
    total = sum(e["mae"] * e["count"] for e in by_element.values())
    assert total / separate.summary()["forces"]["count"] == pytest.approx(separate.mae("forces"))


def test_total_energies_of_a_million_ev_keep_their_differences():
    system, result, labels = batch([10], np.random.default_rng(0), absent=0)
    result.energy = torch.tensor([-1e6 + 1e-4], dtype=torch.float64)
    labels["energy"] = torch.tensor([-1e6], dtype=torch.float64)
    sums = ErrorSums(LossConfig())
    sums.add(residuals(result, labels), system)
    assert sums.mae("energy") == pytest.approx(1e-4, rel=1e-5)


def test_learning_rates():
    cosine = LearningRate(TrainingConfig(lr=1.0, lr_min=0.1, warmup_steps=10, lr_schedule="cosine"), 110)
    assert [cosine.rate(s) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert cosine.rate(60) == pytest.approx(0.55)
    assert cosine.rate(110) == pytest.approx(0.1)
    rates = [cosine.rate(s) for s in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    constant = LearningRate(TrainingConfig(lr=1.0, warmup_steps=0, lr_schedule="constant"), 10)
    assert {constant.rate(s) for s in range(10)} == {1.0}
    config = TrainingConfig(lr=1.0, lr_min=0.3, warmup_steps=0, lr_schedule="plateau", lr_patience=1, lr_factor=0.5)
    plateau = LearningRate(config, 10)
    seen = []
    for loss in (5, 4, 4, 4, 4, 4, 4, 4):
        plateau.end_of_epoch(loss)
        seen.append(plateau.rate(0))
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.3, 0.3, 0.3]
    again = LearningRate(config, 10)
    again.restore(plateau.state())
    assert again.rate(0) == plateau.rate(0)


def test_early_stopping_and_weight_average():
    best = BestEpoch(patience=2)
    assert [best.end_of_epoch(e, loss) for e, loss in enumerate([3.0, 2.0, 2.5, 2.0])] == [True, True, False, False]
    assert best.stop
    assert best.epoch == 1
    average, current = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = average.weight.clone()
    share = LearningRate(TrainingConfig(ema_decay=0.9), 10).average_share
    assert [share(0), share(10**6)] == pytest.approx([0.9, 0.1])
    update = Update([*current.parameters()], [*average.parameters()], AdamW(current.parameters()), None)
    update.optimizer.param_groups[0]["lr"] = 0.0
    update.move(share(10**6))
    torch.testing.assert_close(average.weight, 0.9 * before + 0.1 * current.weight)
    update.move(1.0)
    assert torch.equal(average.weight, current.weight)
