"""Options of TensorNet on a GPU: `norm: log` on the fused kernels (R15), and all of them in packed training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from training.test_packed import CUTOFF, objective, packed, structures

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.training.steps.network import PackedNetwork
from torchmdnet2.training.steps.packed_frames import Capacity

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def potential(**options):
    model = {"name": "tensornet", "num_rbf": 12, "cutoff": CUTOFF, "max_z": 10, **options}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = Potential.from_config({"model": model, "elements": [1, 6, 8], "energy_scale": 5.0})
        with torch.no_grad():
            for parameter in result.parameters():
                # of more channels less: random weights soon make a network that float32 cannot follow
                parameter += 0.2 * 32 / model["hidden_channels"] * torch.randn_like(parameter)
    return result


def atoms(n, cell):
    """On a distorted lattice: no two close, at the density of organic matter."""
    rng, side = np.random.default_rng(n), round(np.ceil(n ** (1 / 3)))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n]
    pos = torch.tensor(2.1 * grid + rng.uniform(-0.5, 0.5, (n, 3)), dtype=torch.float32)
    box = (2.1 * side + 0.3) * torch.eye(3) if cell else None
    return System(z=torch.tensor([1, 6, 8])[torch.from_numpy(rng.integers(0, 3, n))], pos=pos, cell=box).to("cuda")


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("channels", [32, 128])
@pytest.mark.parametrize("n", [1, 2, 9, 21, 64, 129, 600, 2000])  # every shape of the kernels
def test_logarithms_and_linear_readout_on_the_fused_kernels(n, channels, linear):
    model = potential(norm="log", linear_readout=linear, hidden_channels=channels).eval().cuda()
    exact, system = copy.deepcopy(model).double(), atoms(n, n % 3 == 0)
    stress = bool(system.pbc.any())
    evaluator = Evaluator(model, graphs=True)
    found, expected = evaluator(system, stress=stress), exact(system.to(dtype=torch.float64), stress=stress)
    assert "fused" in evaluator.report()
    # sums cancel: of the size of what is summed up, as in tests/kernels/test_tensornet_cpu.py
    size = max(float(n), float(expected.atom_energies.abs().sum()))
    torch.testing.assert_close(found.energy, expected.energy, rtol=0, atol=1e-6 * size)
    largest = float(expected.forces.abs().max())
    assert n == 1 or largest > 1e-3  # there is something to compare
    assert float((found.forces.double() - expected.forces).abs().max()) <= 1e-4 * largest
    if stress:
        bound = 1e-5 * max(float(expected.stress.abs().max()), 1e-2)
        assert float((found.stress.double() - expected.stress).abs().max()) <= bound


@pytest.mark.parametrize(
    "options", [{"norm": "log"}, {"tensor_norm": "root"}, {"linear_readout": True}], ids=["log", "root", "linear"]
)
def test_packed_training_to_the_second_derivative(options):
    model = potential(hidden_channels=48, **options).double().train()
    chosen, found = [2, 0, 3, 1], []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        store = packed(structures(), device)
        need = store.size(chosen)
        batch = store.batch(torch.tensor([*chosen, -1], device=device), Capacity(5, need.atoms + 4, need.pairs + 9))
        result = PackedNetwork(model, 3, True, True, use_kernels=device == "cuda")(batch)
        target = objective(result.energy[:4], result.forces[: need.atoms], result.stress[:1])
        gradients = torch.autograd.grad(target, list(model.parameters()), allow_unused=True)
        found.append([None if g is None else g.detach().cpu() for g in (target, *gradients)])
    for one, other in zip(*found, strict=True):
        if one is not None:
            # positions changed by their rounding change the gradients of "root" by 5e-9 of an entry
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11 * max(1.0, float(one.abs().max())))


def test_options_without_kernels_are_captured():
    model = potential(hidden_channels=32, tensor_norm="root").eval().cuda()
    evaluator, system = Evaluator(model, graphs=True), atoms(21, True)
    expected = copy.deepcopy(model).double()(system.to(dtype=torch.float64)).forces
    ours, eager = (
        float((forces.double() - expected).abs().max()) for forces in (evaluator(system).forces, model(system).forces)
    )
    assert ours <= 2 * eager + 1e-6 * float(expected.abs().max())
    assert "tensor_norm 'square' only" in evaluator.report()
