"""AIMNet2 on its kernels in whole steps, in the interpreter of Triton. Run by test_aimnet2_gpu.py."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from aimnet2_cases import CASES, assert_same, batch, make, structure

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.models.aimnet2.gpu import FusedAIMNet2, LaunchShapes

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


# undivided products; divided ones in several steps; products with factors of 17 bits
MANY = LaunchShapes(4, 2, 1, 64, 32, 32, 2, 3)
FEW = LaunchShapes(2, 4, 1, 16, 16, 16, 4, 1, parts=4)
MIXED = LaunchShapes(4, 2, 1, 64, 64, 32, 4, 3, in_parts=True)


@pytest.mark.parametrize("shapes", [MANY, FEW])
def test_other_launch_shapes(shapes, monkeypatch):
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: shapes)
    assert error_of(*CASES["three passes"], "native") <= 5e-8


# eV/Å: three times what rounding the same factors gave with autograd (docs/dev/inference_kernels.md)
BOUNDS = {
    "two passes, charges as published": 1e-6, "terms of all pairs": 3e-5, "a cell": 6.6e-6,
    "two members, two structures": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_mixed_precision(name, monkeypatch):
    model, atoms = CASES[name]
    as_used, native = (Evaluator(model, precision=precision)(atoms) for precision in ("mixed", "native"))
    assert torch.equal(as_used.forces, native.forces), "few atoms are as in float32"
    error = error_of(model, atoms, "native")
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: MIXED)
    assert 3 * error < error_of(model, atoms, "mixed") <= BOUNDS[name], "beyond the bound, or nothing was rounded"


def test_mixed_precision_of_trained_weights(monkeypatch):
    """Three times what rounding with autograd gave, 4.2e-5, where forces are 6.5 eV/Å."""
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: MIXED)
    assert error_of(load("aimnet2"), structure("H2O", 0.0), "mixed") <= 1.2e-4


def test_charges_equilibrated_where_they_are_summed(monkeypatch):
    """Of several structures and members, to the bit as by a kernel between."""
    shapes = LaunchShapes(4, 4, 1, 16, 16, 16, 4, 1, parts=4)
    for model, atoms in (batch(), CASES["two members, two structures"]):
        found = []
        for joined in (False, True):
            monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given, way=joined: shapes._replace(joined=way))
            found.append(Evaluator(model)(atoms))
        assert torch.equal(found[0].charges, found[1].charges) and torch.equal(found[0].forces, found[1].forces)


def error_of(model: Potential, atoms: System, precision: str) -> float:
    """The largest error of a force against float64, eV/Å; charges and energies are checked."""
    stress = bool(atoms.pbc.any())
    evaluator = Evaluator(model, precision=precision)  # type: ignore[arg-type]
    found, exact = evaluator(atoms, stress=stress), copy.deepcopy(model).double().reference(atoms, stress=stress)
    assert evaluator.fused and ("bfloat16" in evaluator.report()) == (precision == "mixed")
    assert float((found.charges - exact.charges).abs().max()) <= 3e-5
    assert float((found.energy - exact.energy).abs().max()) <= 3e-5
    assert not stress or float((found.stress - exact.stress).abs().max()) <= 1e-6
    return float((found.forces - exact.forces).abs().max())


def test_what_the_kernels_do_not_cover_runs_by_autograd():
    for changes, words in (
        ({"activation": "silu"}, "gelu"), ({"channels": 6}, "power of two"), ({"num_layers": 1}, "two passes"),
    ):  # fmt: skip
        assert words in Evaluator(make(**changes)).report()
