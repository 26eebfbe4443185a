"""Times of the parts of fused steps, in Triton's interpreter. Run by test_timings.py."""

from __future__ import annotations

import os

import torch
from engine.test_timings import parts_of
from kernels.pair_prior_cases import CHARGES, system
from kernels.toy import Sum, Toy

from torchmdnet2 import Evaluator, Potential
from torchmdnet2.potential.prior import Prior
from torchmdnet2.priors import D2, ZBL, Coulomb

assert os.environ["TRITON_INTERPRET"] == "1"


class Well(Prior):
    def forward(self, system, neighbors):
        return 0.01 * system.pos.double().square().sum(1)


def test_fused_steps():
    priors = [Well(), D2(cutoff=6.0), ZBL(cutoff=3.5), Coulomb(CHARGES, "reaction_field", cutoff=5.5)]
    evaluator, atoms = Evaluator(Potential(Toy(), Sum(), priors=priors).eval()), system(4, 1, 5.0)
    before = evaluator(atoms, stress=True)
    found = parts_of(evaluator.report(atoms, stress=True))
    names = ["neighbor search to 4 Å", "neighbor search to 6 Å", "network", "D2", "ZBL", "Coulomb", "Well", "sums"]
    assert list(found) == [*names, "whole step"]
    assert found["Well"][0] == "autograd" and found["D2"][0] == "kernels"
    # the buffers that were measured are not those of results
    assert torch.equal(evaluator(atoms, stress=True).forces, before.forces)


def test_captured_autograd():
    torch.manual_seed(0)
    model = {"name": "transformer", "hidden_channels": 12, "num_heads": 2, "num_layers": 1, "num_rbf": 8, "max_z": 10}
    potential = Potential.from_config({"model": {**model, "cutoff": 4.0}, "priors": [{"name": "d2", "cutoff": 6.0}]})
    report = Evaluator(potential.eval()).report(system(4, 1, 5.0))
    assert "autograd in CUDA graphs" in report
    names = ["neighbor search to 4 Å", "neighbor search to 6 Å", "network, priors, sums", "whole step"]
    assert list(parts_of(report)) == names
