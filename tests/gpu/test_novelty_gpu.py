"""Novelty on a GPU: the scores of the CPU; md and ASE warn there too. Without a GPU: tests/test_novelty.py."""

from __future__ import annotations

import copy

import pytest
import torch
from ase.build import molecule
from tiny import tiny_potential

from torchmdnet2 import System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.potential.novelty import NoveltyWarning, calibrate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def rattled(count: int, seed: int) -> System:
    frames = [molecule("CH3CH2OH") for _ in range(count)]
    for k, atoms in enumerate(frames):
        atoms.rattle(0.05, seed=1000 * seed + k)
    return System.from_ase(frames)


def test_scores_fitted_and_evaluated_on_a_gpu(tmp_path):
    potential, train, validation = tiny_potential(), rattled(60, 0), rattled(40, 1)
    potential.calibration = calibrate(potential.representation, [train], [validation])
    on_gpu = copy.deepcopy(potential).cuda()
    on_gpu.calibration = calibrate(on_gpu.representation, [train.to("cuda")], [validation.to("cuda")])
    unknown = molecule("CH3OCH3")
    expected = potential.novelty(System.from_ase(unknown))
    for found in (on_gpu, copy.deepcopy(potential).cuda()):
        torch.testing.assert_close(
            found.novelty(System.from_ase(unknown).to("cuda")).cpu(), expected, rtol=1e-5, atol=1e-7
        )
    with pytest.warns(NoveltyWarning):
        calculator = TorchMDNet2Calculator(on_gpu, device="cuda")
        calculator.calculate(unknown)
    assert calculator.results["novelty"] == pytest.approx(expected.numpy(), rel=1e-5)
    with pytest.warns(NoveltyWarning):
        run = run_md(on_gpu, unknown, MDOptions(steps=20, timestep=0.1, output=str(tmp_path / "md")), device="cuda")
    assert run.watch.looks == 2 and run.watch.largest > 1
