"""Errors, loss and gradients of a batch by the kernels and by plain PyTorch; on a GPU and in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchmdnet2.potential.potential import Result
from torchmdnet2.training.config.sections import LossConfig
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.replay import EvaluationPass

CASES: dict[str, dict[str, Any]] = {
    "energies and forces": {"loss": {"energy": 20.0}, "stress": False},
    "stress, float32, two blocks": {"dtype": torch.float32, "sizes": [15, 100, 0, 1, 30]},
    "l1 and huber": {"loss": {"kinds": {"energy": "huber", "forces": "l1", "stress": "huber"}, "huber_delta": 0.4}},
    "whole energies": {"loss": {"kind": "l1", "kinds": {"forces": "huber"}, "huber_delta": 0.3, "per_atom": False}},
    "forces without a weight": {"loss": {"forces": 0.0}},
    "energies without a weight": {"loss": {"energy": 0.0}},
    "forces alone": {"loss": {"energy": 0.0, "stress": 0.0}, "stress": False},
    "no forces predicted": {"predicted": ("energy", "stress")},
    "no stress predicted": {"predicted": ("energy", "forces"), "dtype": torch.float32},
    "more frames than a block": {"sizes": [1] * 140},
    "a hundred elements": {"elements": list(range(1, 101))},
    "nothing labelled": {"labelled": False},
    "several processes": {"processes": 3},
}
_SIZES = [15, 40, 0, 1, 30]


class Processes(Devices):
    """As if every other process had as many labels."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.size)


def values(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Numbers between −2 and 2 whose differences are exact in any precision."""
    return (torch.randint(-1024, 1025, shape, generator=generator) / 512).to(dtype)


def example(device: str, dtype: torch.dtype, sizes: list[int], elements: list[int], stress: bool, labelled: bool,
            predicted: tuple[str, ...], seed: int) -> tuple[Result, Any]:  # fmt: skip
    """Predictions and what the losses read of a packed batch, with labels absent in part, or of one component."""
    generator = torch.Generator().manual_seed(seed)
    room, frames = sum(sizes) + 7, len(sizes) + 1
    element = torch.randint(0, len(elements), (room,), generator=generator)
    element[sum(sizes) :] = 0
    element = torch.cat([element, torch.arange(len(elements))])
    ends = torch.tensor([0, *sizes, 7]).cumsum(0)
    shapes = {"energy": (frames,), "forces": (room, 3), "stress": (frames, 3, 3)}
    types = {"energy": torch.float64, "forces": dtype, "stress": dtype}
    labels = {name: values(shape, generator, types[name]) for name, shape in shapes.items()}
    for name, label in labels.items():
        label[torch.rand(label.shape, generator=generator) < (0.05 if labelled else 2)] = float("nan")
        label[-7 if name == "forces" else -1 :] = float("nan")
    batch = SimpleNamespace(
        weight=None, further=None,
        z=torch.tensor(elements)[element], element=element, atom_ptr=ends.int(), r=torch.zeros(1),
        structure=torch.repeat_interleave(torch.arange(frames), ends.diff()), **labels,
    )  # fmt: skip
    if not stress:
        batch.stress = None
    predictions = {}
    for name in predicted:
        free, label = values(shapes[name], generator, types[name]), labels[name]
        exact = (torch.rand(free.shape, generator=generator) < 0.05) & label.isfinite()
        predictions[name] = torch.where(exact, label, free)
    result = Result(predictions.pop("energy"))
    vars(result).update(predictions)
    return moved(result, device), moved(batch, device)


def moved(holder: Any, to: str | torch.dtype) -> Any:
    """Its tensors on a device, or in a precision."""
    for name, tensor in vars(holder).items():
        if isinstance(tensor, Tensor) and (isinstance(to, str) or tensor.is_floating_point()):
            setattr(holder, name, tensor.to(to))
    return holder


def outcome(work: EvaluationPass, kernels: bool, result: Result, batch: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and its gradients."""
    predictions = [t.requires_grad_() for t in (result.energy, result.forces, result.stress) if t is not None]
    loss = (work._by_kernels if kernels else work._reference)(result, batch)
    gradients = torch.autograd.grad(3 * loss, predictions, allow_unused=True) if loss.requires_grad else []
    return loss.detach(), list(gradients)


def check(device: str, loss: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64,
          sizes: list[int] = _SIZES, elements: list[int] = [1, 6, 8], stress: bool = True, labelled: bool = True,
          predicted: tuple[str, ...] = ("energy", "forces", "stress"), processes: int = 1) -> None:  # fmt: skip
    """Two batches by kernels in the precision of the case, and by plain PyTorch in float64."""
    network: Any = SimpleNamespace(potential=nn.Linear(1, 1).to(device), use_kernels=True, energies=True, labels=[])
    config = LossConfig(**(loss or {}))
    devices = Processes(0, processes) if processes > 1 else Devices()
    fast, plain = (EvaluationPass(network, config, devices) for _ in range(2))
    for seed in range(2):
        outcomes = []
        for work in (fast, plain):
            given = example(device, dtype, sizes, elements, stress, labelled, predicted, seed)
            if work is plain:
                given = tuple(moved(each, torch.float64) for each in given)
            if seed == 0:
                work._reserve(*given)
            outcomes.append(outcome(work, work is fast, *given))
        (found, gradients), (expected, wanted) = outcomes
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert len(gradients) == len(wanted)
        for one, other in zip(gradients, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                # the nearest number of its precision, but for the rounding of what it is the nearest to
                rounding = torch.finfo(one.dtype).eps
                torch.testing.assert_close(one, other.to(one.dtype), rtol=2 * rounding, atol=0)
                assert bool(other.any()) == labelled
    assert set(fast._sums) == set(plain._sums)
    torch.testing.assert_close(fast._table, plain._table, rtol=1e-12, atol=0)
    assert (float(fast._sums["energy"][0]) > 0) == labelled
    assert {name: value.tolist() for name, value in fast.pop_sums().items()}.keys() == plain.pop_sums().keys()
    assert not fast._table.any()
