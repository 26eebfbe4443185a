"""The loss of a packed batch and its gradients, by the kernels of the GPU and in plain PyTorch; shared by the checks in
Triton's interpreter and the tests on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from torchmdnet2 import Potential, System
from torchmdnet2.data import Sample
from torchmdnet2.data.labels import GROUP
from torchmdnet2.models.tensornet.training import PairTensorNet
from torchmdnet2.models.tensornet.training_radial import Stencil
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.training.config.sections import LossConfig
from torchmdnet2.training.steps.batches import Batch
from torchmdnet2.training.steps.loop import pack_part
from torchmdnet2.training.steps.network import PackedNetwork
from torchmdnet2.training.steps.optimizers import AdamW, Update
from torchmdnet2.training.steps.packed_frames import Capacity, PackedFrames
from torchmdnet2.training.steps.replay import TrainingPass

CUTOFF = 3.0
STENCIL = Stencil(25, CUTOFF / 24)
COULOMB = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 2.5}
CASES: dict[str, dict[str, Any]] = {
    "tensornet": {},
    "tensornet with properties": {"properties": [{"name": "dipole"}, {"name": "charges"}], "priors": [COULOMB]},
    "tensornet with relative energies": {"properties": [{"name": "charges"}], "group": True},
    "tensornet with knots": {"knots": True},
    "tensornet2": {"model": {"name": "tensornet2", "q_dim": 2}},
    "tensornet2 with priors": {
        "model": {"name": "tensornet2", "q_dim": 2, "group": "SO(3)", "exact_charge": False, "rbf_type": "gauss"},
        "properties": [{"name": "dipole"}],
        "priors": [COULOMB, FIELD, {"name": "zbl", "cutoff": 2.0}],
    },
    "tensornet2 with a head of pairs": {
        "model": {"name": "tensornet2", "q_dim": 2},
        "head": {"name": "scalar_coulomb", "q_weights": [1.0, 2.0, 0.5, 0.0]},
    },
}
"""name -> parts of the configuration; group: energies relative to the mean of a group are trained; knots: filters are
interpolated, also without kernels."""


def frames() -> Batch:
    """An ion, a molecule and an atom; the last has no labels but its energy."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    corners = 1.3 * torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=torch.float64)
    parts = [([8, 1, 1], 1.0), ([6, 8], 0.0), ([1], 0.0)]
    systems = [System(torch.tensor(z), corners[: len(z)] + 0.1 * numbers(len(z), 3), charge=q) for z, q in parts]
    labels = {"energy": numbers(3), "forces": numbers(6, 3), "dipole": numbers(3, 3), "charges": numbers(6)}
    labels[GROUP] = torch.tensor([7.0, 7.0, torch.nan], dtype=torch.float64)
    labels["forces"][5], labels["dipole"][2], labels["charges"][5] = torch.nan, torch.nan, torch.nan
    whole = System.concatenate(systems)
    return Batch(Sample(whole, labels), neighbor_list(whole, CUTOFF), [0, 1, 2])


def outcome(case: dict[str, Any], device: str, kernels: bool, width: int = 8) -> list[Tensor]:
    """Loss with its gradients, and the sums of errors, in float64."""
    torch.manual_seed(0)
    model = {"name": "tensornet", "hidden_channels": width, "num_layers": 1, "num_rbf": 4, "cutoff": CUTOFF}
    case = dict(case)
    group, knots = case.pop("group", False), case.pop("knots", False)
    config = {**case, "model": {**model, "max_z": 10, **case.get("model", {})}, "elements": [1, 6, 8]}
    potential = Potential.from_config(config).double().to(device).train()
    charges = "charges" in potential.properties or potential.representation.reads_charge
    labels = [*(["dipole"] if "dipole" in potential.properties else []), *(["charges"] if charges else [])]
    labels += [GROUP] if group else []
    kinds = {"charges": "huber"}
    loss = LossConfig(
        energy=3.0, relative_energy=1.5, forces=2.0, dipole=0.7, charges=5.0, kinds=kinds, huber_delta=0.3
    )
    part = pack_part(frames(), potential, False, loss, labels)
    store = PackedFrames([part], potential.elements, CUTOFF, torch.device(device), torch.float64)
    need = store.size([0, 1, 2])
    capacity = Capacity(4, need.atoms + 2, need.pairs + 3, tuple(n + 2 for n in need.edges))
    batch = store.batch(torch.tensor([2, 0, -1, 1], device=device), capacity)
    parameters = list(potential.parameters())
    network = PackedNetwork(potential, 3, True, False, kernels, labels)
    average = [p.detach().clone() for p in parameters]
    update = Update(parameters, average, AdamW([{"params": parameters, "lr": 0.0}]), 1.0)
    work = TrainingPass(network, loss, update)
    with patch.object(PairTensorNet, "_stencil", lambda *_: STENCIL) if knots else nullcontext():
        return gradients(work, batch)


def gradients(work: TrainingPass, batch: Any) -> list[Tensor]:
    work.warm_up(batch)
    assert not work._table.any()
    work._gradients(batch)
    return [work.update.flat.cpu(), *(work._sums[name].cpu() for name in sorted(work._sums))]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """The same to 1e-11 of the largest number of each kind."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11 * float(other.abs().max()))
