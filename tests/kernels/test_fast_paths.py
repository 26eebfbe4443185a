"""A second fused model needs no file of the package: one is registered here, and the Evaluator takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreter import needs_triton, run_checks
from kernels.toy import Springs, ToyCpu, potential, scalar_head

from torchmdnet2 import Evaluator, System
from torchmdnet2.priors import Coulomb


def atoms(periodic):
    random = torch.Generator().manual_seed(1)
    cell = 5 * torch.eye(3) if periodic else None
    return System(z=torch.tensor([1, 6, 8, 8, 1]), pos=5 * torch.rand(5, 3, generator=random).double(), cell=cell)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("priors", [(), (Springs(),)], ids=["network", "and a prior"])
def test_on_the_cpu(priors, periodic):
    pytest.importorskip("numba")
    model, runs, system = potential(priors), ToyCpu.runs, atoms(periodic)
    evaluator = Evaluator(model)
    found, expected = evaluator(system, stress=periodic), model(system, stress=periodic)
    for name in ("energy", "atom_energies", "forces", "stress"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)
    assert "compiled Toy kernels" in evaluator.report() and ToyCpu.runs > runs


def test_what_is_not_covered_says_so():
    assert "no toy kernels for the head ScalarHead" in Evaluator(potential(head=scalar_head())).report()
    report = Evaluator(potential([Coulomb({"H": 0.1, "O": -0.2}, "ewald")])).report()
    assert "compiled Toy kernels" in report and "by autograd: Coulomb" in report


@needs_triton
def test_on_the_gpu():
    run_checks(Path(__file__).with_name("toy_checks.py"))
