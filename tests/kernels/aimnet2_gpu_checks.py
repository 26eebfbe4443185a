"""AIMNet2 on its kernels in whole steps, in the interpreter of Triton. Run by test_aimnet2_gpu.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from aimnet2_cases import CASES, assert_same, batch, make

from torchmdnet2 import Evaluator

assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize("name", CASES)
def test_structures(name):
    model, atoms = CASES[name]
    evaluator, periodic = Evaluator(model), bool(atoms.pbc.any())
    assert_same(evaluator(atoms, stress=periodic), model, atoms, periodic)
    assert evaluator.fused


def test_a_batch():
    """Structures of several charges and sizes: charges are equilibrated in each alone."""
    model, atoms = batch()
    assert_same(Evaluator(model)(atoms), model, atoms, False)


def test_what_the_kernels_do_not_cover_runs_by_autograd():
    for changes, words in (
        ({"activation": "silu"}, "gelu"), ({"channels": 6}, "power of two"), ({"num_layers": 1}, "two passes"),
    ):  # fmt: skip
        assert words in Evaluator(make(**changes)).report()
