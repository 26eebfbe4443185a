"""AIMNet2 on fused kernels: R15 (the Potential in float64), R8, R16, R19. Its twin without a GPU:
tests/kernels/test_aimnet2_gpu.py."""

from __future__ import annotations

import copy

import pytest
import torch
from test_evaluator_gpu import no_waiting, random_atoms
from test_tensornet2_gpu import assert_same

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.benchmark import water_box
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.models.aimnet2.gpu import FusedAIMNet2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ION = torch.tensor([1.0])
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 6.0, "damping": "exp"}
MODELS = {
    "as published": {},
    "four passes, charges as published": {"num_layers": 4, "exact_charge": False},
    "other sizes": {"num_layers": 2, "channels": 8, "num_vectors": 5, "widths": [70], "hidden_channels": 48},
}


def make(**changes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Potential.from_config(
            {
                "model": {"name": "aimnet2", "max_z": 10, **changes},
                "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": 1},
                "priors": [FIELD],
                "elements": [1, 6, 7, 8],
            }
        ).eval().to("cuda")  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n", "cell"), [(1, False), (22, False), *((n, True) for n in (166, 1029, 2100, 4200))])
def test_energies_forces_charges_stress(name, n, cell):
    """R15, in each of the launch shapes; replayed twice: the same bits (R19)."""
    potential = make(**MODELS[name])
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(n, seed=n, cell=cell, charge=ION)
    found = evaluator(system, stress=cell)
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
    assert_same(potential, found, system, cell, energy=2e-5)  # 1e-8 of each of 2,100 atoms
    again = evaluator(system, stress=cell)
    for what in ("forces", "atom_energies", "charges"):
        assert torch.equal(getattr(found, what), getattr(again, what)), what


def test_the_shipped_potential_and_batches():
    """Terms of all pairs; other compositions and charges in the same buffers."""
    potential = load("aimnet2", "cuda")
    potential.allow_untrained_charge = True
    batch = System.concatenate([random_atoms(n, seed=n, charge=(n % 3 - 1) * ION) for n in (40, 7, 1, 90)])
    evaluator = Evaluator(potential, graphs=True)
    for system in (batch, batch.replace(pos=1.02 * batch.pos), batch.replace(z=batch.z.flip(0)), batch):
        assert_same(potential, evaluator(system), system)
    assert evaluator.fused


@pytest.mark.parametrize("shapes_of", [1029, 5000])
def test_products_in_halves(shapes_of, monkeypatch):
    """As accurate as float32; replayed, the same bits."""
    shapes = FusedAIMNet2.launch_shapes
    assert FusedModel(load("aimnet2", "cuda"), "native").net.launch_shapes(shapes_of).halves
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda self, num_atoms: shapes(self, shapes_of))
    potential, box = load("aimnet2", "cuda"), water_box(7)
    system = System(z=box.z, pos=box.pos).to("cuda")
    exact = copy.deepcopy(potential).double().reference(system.to(dtype=torch.float64))
    evaluator = Evaluator(potential, graphs=True)
    found = evaluator(system)
    assert "replayed as one CUDA graph" in evaluator.report()
    assert float((found.forces - exact.forces).abs().max()) <= 3e-5
    assert float((found.charges - exact.charges).abs().max()) <= 1e-5
    assert torch.equal(found.forces, evaluator(system).forces)


@pytest.mark.parametrize("n", [22, 166, 1029])
def test_members_side_by_side(n):
    """R15, R19: energies, forces and charges are the means of the members, and the spread is theirs; one graph."""
    torch.manual_seed(0)
    several = Potential.from_config(
        {
            "model": {"name": "aimnet2", "max_z": 10},
            "head": {"name": "scalar", "activation": "gelu", "num_hidden_layers": 1},
            "priors": [{"name": "atomref", "energies": {"H": -13.0, "O": -2044.0}}, FIELD],
            "others": [{"priors": [{"name": "atomref", "energies": {"H": -13.5, "O": -2044.0 - k}}]} for k in (1, 2)],
            "elements": [1, 8],
            "subtract_isolated": False,
        }
    ).eval().to("cuda")  # fmt: skip
    system = random_atoms(n, seed=n, charge=ION)
    system = system.replace(z=torch.where(system.z == 1, 1, 8))
    evaluator = Evaluator(several, graphs=True)
    found = evaluator(system)
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
    assert_same(several, found, system, energy=2e-5)
    exact = system.to(dtype=torch.float64)
    each = [member.reference(exact) for member in copy.deepcopy(several).double().members]
    energy, forces = (torch.stack([getattr(one, name) for one in each]) for name in ("energy", "forces"))
    torch.testing.assert_close(found.properties["energy_std"].double(), energy.std(0), rtol=1e-6, atol=2e-5 * n)
    torch.testing.assert_close(found.properties["forces_std"].double(), forces.std(0), rtol=0, atol=1e-4)
    assert torch.equal(found.forces, evaluator(system).forces)


def test_a_bound_step_overflows_and_does_not_wait():
    """R8 and R16."""
    potential, system = make(), random_atoms(60, seed=4)
    bound = Evaluator(potential).bind(system.replace(pos=8 * system.pos))
    bound.pos.copy_(system.pos)
    bound.replay()
    while not bound.check():
        assert bound.forces.isnan().all()
        bound.replay()
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(5):
            bound.replay()
    assert bound.check()
    expected = copy.deepcopy(potential).double()(system.to(dtype=torch.float64))
    torch.testing.assert_close(bound.energy, expected.energy, rtol=1e-6, atol=1e-5)
