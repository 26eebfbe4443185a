"""TensorNet2 on fused kernels: R15 (the Potential in float64), R8, R16, R19. Its twin without a GPU:
tests/kernels/test_tensornet2_kernels.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from test_evaluator_gpu import make, random_atoms

from torchmdnet2 import Evaluator, System

gpu = pytest.importorskip("torchmdnet2.models.tensornet2.gpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ION = torch.tensor([1.0])
SIZES = {"name": "tensornet2", "hidden_channels": 128, "num_rbf": 32, "cutoff": 5.0, "max_z": 10}
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 9.0, "damping": "exp"}
ACEFF = [{"name": "zbl", "envelope": "covalent", "screening": "refitted"}, FIELD]
MODELS = {
    "L = 1": {"model": {**SIZES, "num_layers": 1, "q_dim": 16}},
    "L = 1, zbl, coulomb": {"model": {**SIZES, "num_layers": 1, "q_dim": 16}, "priors": ACEFF},
    "L = 2, coulomb": {"model": {**SIZES, "num_layers": 2, "q_dim": 16}, "priors": [FIELD]},
    "SO(3), F = 64, q_dim 20": {
        "model": {
            **SIZES,
            "num_layers": 2,
            "q_dim": 20,
            "hidden_channels": 64,
            "group": "SO(3)",
            "exact_charge": False,
        },
        "priors": [FIELD],
    },
    "F = 256": {"model": {**SIZES, "num_layers": 1, "q_dim": 4, "hidden_channels": 256}},
}


def assert_same(potential, found, system, stress=False, energy=1e-5):
    """Energies 1e-6, or `energy` eV; charges, forces twice the errors of eager float32 and 1e-6 of the largest."""
    expected = copy.deepcopy(potential).double()(system.to(dtype=torch.float64), stress=stress)
    eager = potential(system.to(dtype=torch.float32))
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=energy)
    torch.testing.assert_close(found.atom_energies, expected.atom_energies, rtol=1e-6, atol=3e-5)
    for name in ("charges", "forces"):
        ours, theirs, truth = (getattr(result, name).double() for result in (found, eager, expected))
        bound = 2 * float((theirs - truth).abs().max()) + 1e-6 * max(1.0, float(truth.abs().max()))
        assert float((ours - truth).abs().max()) <= bound, name
    if stress:
        bound = 1e-5 * max(float(expected.stress.abs().max()), 1e-2)
        assert float((found.stress.double() - expected.stress).abs().max()) <= bound


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n", "cell"), [(1, False), (22, False), (166, True), (1029, True)])
def test_energies_forces_charges_stress(name, n, cell):
    """R15; replayed twice: the same bits (R19)."""
    potential = make(**MODELS[name])
    evaluator = Evaluator(potential, graphs=True)
    system = random_atoms(n, seed=n, cell=cell, charge=ION)
    found = evaluator(system, stress=cell)
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
    assert_same(potential, found, system, cell)
    again = evaluator(system, stress=cell)
    for what in ("forces", "atom_energies", "charges"):
        assert torch.equal(getattr(found, what), getattr(again, what)), what


def test_batches_in_chunks_and_spatial_order():
    """Structures of several charges; chunks that end within rows."""
    from torchmdnet2.engine.fused_step import FusedModel
    from torchmdnet2.engine.step import GraphedStep, StaticInputs

    potential = make(**MODELS["L = 2, coulomb"])
    structures = [random_atoms(n, seed=n, cell=True, charge=(n % 3 - 1) * ION) for n in (40, 7, 1, 90)]
    system = System.concatenate(structures)
    fused = FusedModel(potential, "native")
    shapes = replace(fused.net.launch_shapes(138), chunk=640, kept=0)
    step = fused.step(138, 4, system.dtype, True, sort=True, parts=2, shapes=shapes)
    inputs, graphed = StaticInputs(fused, step), GraphedStep(step)
    inputs.load(system)
    graphed.make_room()
    graphed.capture()
    graphed.run()
    assert graphed.status()[0] == 0
    assert_same(potential, step.results(), system, True)


def test_overflow_under_replay():
    """R8: more edges than there is room for give NaN, then the right numbers."""
    potential = make(**MODELS["L = 1, zbl, coulomb"])
    far = random_atoms(50, seed=1)
    far = far.replace(pos=8 * far.pos)
    bound = Evaluator(potential).bind(far)
    close = far.replace(pos=far.pos / 8)
    bound.pos.copy_(close.pos)
    bound.replay()
    while not bound.check():
        assert bound.forces.isnan().all()
        bound.replay()
    expected = copy.deepcopy(potential).double()(close.to(dtype=torch.float64))
    torch.testing.assert_close(bound.energy, expected.energy, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, gpu._KEPT_SHARE])
def test_memory_of_many_atoms(share, monkeypatch):
    """24,576 atoms of water at L = 1, F = 128: a quarter of 12 GB, the bound for 98,304, and the rest of a chunk; and
    the share of the GPU that filters may fill."""
    monkeypatch.setattr(gpu, "_KEPT_SHARE", share)
    potential = make(**MODELS["L = 1"])
    edge = (24576 / 3 * 29.9) ** (1 / 3)
    random = torch.Generator().manual_seed(0)
    side = round((24576 / 3) ** (1 / 3)) + 1
    grid = torch.cartesian_prod(*[torch.arange(side)] * 3)[: 24576 // 3].double() * (edge / side)
    water = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], dtype=torch.float64)
    pos = (grid[:, None] + water).reshape(-1, 3) + 0.01 * torch.rand(24576, 3, dtype=torch.float64, generator=random)
    cell = edge * torch.eye(3, dtype=torch.float64)[None]
    system = System(z=torch.tensor([8, 1, 1]).repeat(24576 // 3), pos=pos, cell=cell).to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bound = Evaluator(potential).bind(system)
    bound.replay()
    assert bound.check() and bound.forces.isfinite().all()
    kept = share * torch.cuda.get_device_properties("cuda").total_memory
    assert torch.cuda.max_memory_allocated() - before < 3.2e9 + kept
