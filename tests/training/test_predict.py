"""Predictions in a batch: stress beside molecules, and evaluation that does not depend on the batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.potential.potential import Potential
from torchmdnet2.system import System
from torchmdnet2.training.config.config import LossConfig, parse_config
from torchmdnet2.training.reporting import evaluation
from torchmdnet2.training.reporting.evaluation import evaluate
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.steps.batches import Batch
from torchmdnet2.training.steps.loss import penalty_sums, residuals, total_loss
from torchmdnet2.training.steps.trainer import Properties, predict


@pytest.fixture
def potential():
    torch.manual_seed(0)
    model = {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 4.0, "max_z": 20}
    return Potential.from_config({"model": model}).double()


def systems():
    from ase.build import bulk, molecule

    salt = bulk("NaCl", "rocksalt", a=5.6)
    salt.rattle(0.1, seed=0)
    return [System.from_ase(atoms) for atoms in (molecule("H2O"), salt, molecule("CH4"))]


def as_batch(parts, stress):
    system = System.concatenate(parts)
    labels = {"energy": torch.zeros(len(parts), dtype=torch.float64), "stress": stress}
    return Batch(SimpleNamespace(system=system, labels=labels), neighbor_list(system, 4.0), list(range(len(parts))))


def test_stress_of_crystals_beside_molecules(potential):
    parts = systems()
    label = torch.full((3, 3, 3), float("nan"), dtype=torch.float64)
    label[1] = 0.01
    batch = as_batch(parts, label)
    potential.train()
    result = predict(potential, batch, Properties(forces=True, stress=True), create_graph=True)
    alone = potential(parts[1], stress=True)
    torch.testing.assert_close(result.stress[1:2], alone.stress, rtol=1e-9, atol=1e-12)
    config = LossConfig(energy=0, forces=0, stress=1)
    loss = total_loss(penalty_sums(residuals(result, batch.sample.labels), batch.sample.system, config), config)
    expected = (alone.stress - 0.01).square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-15)
    loss.backward()
    gradients = [p.grad for p in potential.parameters() if p.grad is not None]
    assert gradients
    assert all(bool(torch.isfinite(g).all()) for g in gradients)


def test_kept_lists_give_the_same_as_fresh_ones(potential):
    parts = systems()
    batch = as_batch(parts, torch.full((3, 3, 3), float("nan")))
    potential.eval()
    together = predict(potential, batch, Properties(forces=True))
    first = 0
    for index, part in enumerate(parts):
        alone = potential(part)
        torch.testing.assert_close(together.energy[index : index + 1], alone.energy, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.forces[first : first + part.num_atoms], alone.forces, rtol=1e-9, atol=1e-12)
        first += part.num_atoms


def test_batches_too_large_for_the_memory_are_halved(raw_config, monkeypatch):
    """The errors are those of whole batches; a frame alone that does not fit is still an error."""
    setup = make_setup(parse_config(raw_config))
    frames, asked = setup.frames["train"], []

    def limited(potential, batch, properties):
        asked.append(len(batch.frames))
        if len(batch.frames) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return predict(potential, batch, properties)

    monkeypatch.setattr(evaluation, "predict", limited)
    most = 99
    whole = evaluate(setup.potential, frames, setup.properties, batch_size=7)
    most = 3
    halved = evaluate(setup.potential, frames, setup.properties, batch_size=7)
    assert {7, 4, 2} < set(asked)  # 7 = 3 + (2 + 2)
    assert sorted(whole.by_frame["frame"]) == sorted(halved.by_frame["frame"])
    for name in ("energy", "energy_per_atom", "forces"):
        assert halved.errors[name]["count"] == whole.errors[name]["count"] > 0
        assert halved.errors[name]["mae"] == pytest.approx(whole.errors[name]["mae"], rel=1e-6)
    most = 0
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluate(setup.potential, frames, setup.properties)
