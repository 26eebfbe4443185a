"""Optimisers, averages and schedules: against plain calculations, and resumed to the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import TrainingConfig, parse_config
from torchmdnet2.training.config.sections import LossConfig, LossScheduleConfig
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.steps.optimizers import OPTIMIZERS, Muon, Stacks, newton_schulz, parameter_groups
from torchmdnet2.training.steps.trainer import LearningRate, load_state

from .test_resume import weights_hash

pytestmark = pytest.mark.usefixtures("without_notes")


def quadratic(seed=0):
    """A badly conditioned least-squares problem with its solution."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -1, 8, dtype=torch.float64)
    matrix = torch.randn(60, 8, generator=generator, dtype=torch.float64) * scale
    right = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return matrix, matrix @ right


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_they_solve_least_squares(name):
    matrix, target = quadratic()
    weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([{"params": [weight], "weight_decay": 0.0, "matrices": name == "muon"}])

    def loss(w):
        return (matrix @ w - target).square().mean()

    for step in range(600):
        rate = 0.05 * (1 - step / 600)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (step + 1) / 20) * rate
        optimizer.zero_grad()
        loss(weight).backward()
        optimizer.step()
    assert loss(weight.detach()).item() < 1e-2 * target.square().mean().item()


def test_muon_equals_its_definition():
    """Two matrices of one shape and a vector, with weight decay; rates as numbers and as tensors."""
    torch.manual_seed(3)
    shapes = [(4, 6), (4, 6), (6, 3)]
    made = [[torch.randn(shape, dtype=torch.float64) for shape in [*shapes, (5,)]] for _ in range(2)]
    weights, start = [nn.Parameter(value.clone()) for value in made[0]], made[0]
    groups = [
        {"params": weights[:3], "matrices": True, "weight_decay": 0.1},
        {"params": weights[3:], "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, momentum=0.9, beta1=0.8, beta2=0.95)
    momenta = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    expected = [value.clone() for value in start]
    mean = square = torch.zeros(5, dtype=torch.float64)
    for step, lr in enumerate([0.1, torch.tensor(0.05, dtype=torch.float64)], 1):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for weight, gradient in zip(weights, made[1], strict=True):
            weight.grad = gradient * step
        optimizer.step()
        for k in range(3):
            gradient = made[1][k] * step
            momenta[k] = 0.9 * momenta[k] + 0.1 * gradient
            update = newton_schulz(0.1 * gradient + 0.9 * momenta[k]) * 0.2 * max(shapes[k]) ** 0.5
            expected[k] = expected[k] * (1 - lr * 0.1) - lr * update
        gradient = made[1][3] * step
        mean, square = 0.8 * mean + 0.2 * gradient, 0.95 * square + 0.05 * gradient**2
        change = mean / (1 - 0.8**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        expected[3] = expected[3] - lr * change
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (3, 16, 4)])
def test_newton_schulz_makes_singular_values_one(shape):
    generator = torch.Generator().manual_seed(1)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(shape, generator=generator, dtype=torch.float64)))
    assert float(values.min()) > 0.5 and float(values.max()) < 1.3


@pytest.mark.parametrize("fill", [False, True])
def test_stacked_matrices_are_as_alone(fill):
    """Tall, wide and square ones, filled up with zeros or not."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(8, 8), (3, 9), (9, 3), (200, 20), (20, 130), (150, 160)]
    matrices = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    stacks = Stacks(matrices, fill)
    assert len(stacks.stacks) == (2 if fill else 5)
    found = stacks.orthogonalised(torch.cat([m.flatten() for m in matrices])).split([m.numel() for m in matrices])
    for values, matrix in zip(found, matrices, strict=True):
        alone = newton_schulz(matrix) * 0.2 * max(matrix.shape) ** 0.5
        torch.testing.assert_close(values.view_as(matrix), alone, rtol=0, atol=1e-12)


def test_groups(raw_config):
    from torchmdnet2.training.config.build_potential import untrained

    potential = untrained(parse_config(raw_config).parts())
    names = {id(p): name for name, p in potential.named_parameters()}
    groups = parameter_groups(potential, 0.3, matrices=True)
    assert sorted(names[id(p)] for g in groups for p in g["params"]) == sorted(names.values())
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert group["weight_decay"] == (0.3 if parameter.ndim >= 2 else 0.0), name
            matrix = parameter.ndim == 2 and not name.endswith("emb.weight") and min(parameter.shape) > 1
            assert group.get("matrices", False) == matrix, name
    assert isinstance(Muon(groups), torch.optim.Optimizer)
    for parameter in potential.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        parameter_groups(potential, 0.0)


CHOICES = {
    "muon": {"optimizer": {"name": "muon"}},
    "swa": {"swa": {"start": 0.5, "lr": 1e-3}, "loss": {"schedule": {"start": 0.5, "energy": 100.0}}},
}


@pytest.mark.parametrize("name", ["swa", pytest.param("muon", marks=pytest.mark.slow)])
def test_training_with_each_resumes_to_the_same_bits(raw_config, tmp_path, name, monkeypatch):
    raw_config["training"].update(max_epochs=4, **CHOICES[name])
    raw_config["output"].update(save_every_seconds=0)
    whole = copy.deepcopy(raw_config)
    run_training(parse_config(whole))
    raw_config["output"]["folder"] = str(tmp_path / "parts")
    config = parse_config(raw_config)
    from torchmdnet2.training.steps import trainer

    steps, save, taken = trainer.Trainer.steps, trainer.Trainer.save, []

    def interrupted(self, order):
        for loss in steps(self, order):
            if len(taken) in (5, 11):  # in the middle of an epoch, two steps after the state was saved
                taken.append(None)
                raise KeyboardInterrupt
            taken.append(self.step_count)
            yield loss

    def each_third(self, hooks, at_once):
        if at_once or self.step_count % 3 == 0:
            save(self, hooks, at_once)

    monkeypatch.setattr(trainer.Trainer, "steps", interrupted)
    monkeypatch.setattr(trainer.Trainer, "save", each_third)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_training(config, resume="auto")
    run_training(config, resume="auto")
    for file in ("best.tmn", "state.safetensors"):
        assert weights_hash(tmp_path / "run" / file) == weights_hash(tmp_path / "parts" / file), file
    rows = [load_state(tmp_path / part / "state.safetensors")[1]["history"] for part in ("run", "parts")]
    for row in rows[0] + rows[1]:
        row.pop("seconds")
    assert rows[0] == rows[1]


def test_swa_rate_and_shares():
    config = TrainingConfig(max_epochs=10, lr=1.0, warmup_steps=0, swa={"start": 0.6, "lr": 0.25})
    rate = LearningRate(config, 50)
    assert rate.swa_step == 30
    assert [rate.rate(s) for s in (30, 49)] == [0.25, 0.25] and rate.rate(29) < 0.6
    assert [rate.average_share(s) for s in (30, 31, 32)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert rate.average_share(29) == pytest.approx(max(1 - 0.99, 1 - 30 / 39))
    assert LearningRate(TrainingConfig(max_epochs=10, swa={"start": 3}), 50).swa_step == 15


def test_average_of_the_last_stage_is_the_plain_mean(raw_config):
    from torchmdnet2.training.run.setup import make_setup
    from torchmdnet2.training.run.start import make_trainer, own_torch_state
    from torchmdnet2.training.steps.trainer import Hooks

    raw_config["training"].update(max_epochs=3, swa={"start": 2}, precision="float64")
    config = parse_config(raw_config)
    seen = []

    def keep(trainer, loss):
        if trainer.epoch >= 2:
            seen.append([p.detach().clone() for p in trainer.potential.parameters()])

    with own_torch_state(config):
        trainer = make_trainer(make_setup(config), None)
        trainer.run(Hooks(step=keep))
    assert len(seen) == trainer.steps_per_epoch
    for k, average in enumerate(trainer.average.parameters()):
        torch.testing.assert_close(average, torch.stack([step[k] for step in seen]).mean(0), rtol=1e-12, atol=1e-14)


def test_scheduled_weights():
    step = LossConfig(energy=1, forces=10, schedule=LossScheduleConfig(start=0.75, energy=100, properties={"gap": 3}))
    assert [step.at(e, 8).energy for e in (0, 5, 6, 7)] == [1, 1, 100, 100]
    assert [step.at(e, 8).forces for e in (0, 7)] == [10, 10]
    assert step.at(7, 8).weight("scalar:gap") == 3 and step.at(0, 8).weight("scalar:gap") == 1
    assert step.final.energy == 100 and step.final.schedule is None
    linear = LossConfig(energy=0, schedule=LossScheduleConfig(kind="linear", start=2, end=6, energy=8, forces=0))
    assert [linear.at(e, 99).energy for e in range(8)] == pytest.approx([0, 0, 0, 2, 4, 6, 8, 8])
    assert [linear.at(e, 99).forces for e in (2, 4, 6)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": {"name": "adam"}}, "training.optimizer: unknown optimizer 'adam', did you mean 'adamw'"),
        ({"optimizer": {"name": "adamw", "beta": 0.9}}, "training.optimizer.beta: unknown key, did you mean 'beta"),
        ({"optimizer": {"name": "muon", "momentum": 1.5}}, "training.optimizer.momentum: should be less than 1"),
        ({"loss": {"schedule": {"kind": "linear", "start": 5, "end": 4}}}, "end (4) must be after start (5)"),
        ({"swa": {"start": 1.5}}, "training.swa.start"),
        ({"swa": {"begin": 1}}, "training.swa.begin: unknown key"),
    ],
)
def test_wrong_choices(training, message):
    with pytest.raises(BadConfig) as caught:
        parse_config({"data": {"train": "a"}, "training": training})
    assert message in str(caught.value)
