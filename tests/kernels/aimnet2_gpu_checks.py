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
from torchmdnet2.engine.fused_step import FusedModel
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


# undivided products; divided ones in several steps; products in halves
MANY = LaunchShapes(4, 2, 1, 64, 32, 32, 2, 3)
FEW = LaunchShapes(2, 4, 1, 16, 16, 16, 4, 1, parts=4)
HALVES = LaunchShapes(4, 2, 1, 64, 64, 32, 4, 3, halves=True)


@pytest.mark.parametrize("shapes", [MANY, FEW, HALVES])
def test_other_launch_shapes(shapes, monkeypatch):
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: shapes)
    assert error_of(*CASES["three passes"]) <= 5e-8


@pytest.mark.parametrize("name", ["terms of all pairs", "a cell", "two members, two structures"])
def test_products_in_halves(name, monkeypatch):
    error = error_of(*CASES[name])
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: HALVES)
    assert error_of(*CASES[name]) <= max(2 * error, 1e-7)


def test_products_in_halves_of_trained_weights(monkeypatch):
    """Forces are 6.5 eV/Å."""
    monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given: HALVES)
    assert error_of(load("aimnet2"), structure("H2O", 0.0)) <= 1e-5


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1e3, False)])
def test_large_weights_do_not_go_in_halves(factor, fits):
    model, _ = CASES["three passes"]
    larger = copy.deepcopy(model)
    with torch.no_grad():
        larger.representation.passes[0][0].weight.mul_(factor)
    assert FusedModel(larger, "native").net.launch_shapes(1000).halves == fits


def test_mixed_precision_is_float32():
    model, atoms = CASES["three passes"]
    mixed, native = (Evaluator(model, precision=precision) for precision in ("mixed", "native"))
    assert torch.equal(mixed(atoms).forces, native(atoms).forces) and "as fast" in mixed.report()
    many = [FusedModel(model, precision).net.launch_shapes(1000) for precision in ("mixed", "native")]
    assert many[0] == many[1] and many[0].halves


def test_charges_equilibrated_where_they_are_summed(monkeypatch):
    """Of several structures and members, to the bit as by a kernel between."""
    shapes = LaunchShapes(4, 4, 1, 16, 16, 16, 4, 1, parts=4)
    for model, atoms in (batch(), CASES["two members, two structures"]):
        found = []
        for joined in (False, True):
            monkeypatch.setattr(FusedAIMNet2, "launch_shapes", lambda *given, way=joined: shapes._replace(joined=way))
            found.append(Evaluator(model)(atoms))
        assert torch.equal(found[0].charges, found[1].charges) and torch.equal(found[0].forces, found[1].forces)


def error_of(model: Potential, atoms: System) -> float:
    """The largest error of a force against float64, eV/Å; charges and energies are checked."""
    stress = bool(atoms.pbc.any())
    evaluator = Evaluator(model)
    found, exact = evaluator(atoms, stress=stress), copy.deepcopy(model).double().reference(atoms, stress=stress)
    assert evaluator.fused
    assert float((found.charges - exact.charges).abs().max()) <= 3e-5
    assert float((found.energy - exact.energy).abs().max()) <= 3e-5
    assert not stress or float((found.stress - exact.stress).abs().max()) <= 1e-6
    return float((found.forces - exact.forces).abs().max())


def test_what_the_kernels_do_not_cover_runs_by_autograd():
    for changes, words in (
        ({"activation": "silu"}, "gelu"), ({"channels": 6}, "power of two"), ({"num_layers": 1}, "two passes"),
    ):  # fmt: skip
        assert words in Evaluator(make(**changes)).report()
