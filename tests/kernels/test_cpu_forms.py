"""The training kernels of the CPU (numba) against plain PyTorch to the second derivative, in float64."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("numba")
from kernels import forms_checks as checks

from torchmdnet2.kernels import forms_cpu, forms_embedding, forms_node, forms_pair

M, F = checks.M, checks.F
CASES = ["inner", "norms", "scale", "product", "message", "embedding", "silu", "normalise", "add square"]


def run(name: str) -> None:
    numbers, graph, q = checks.numbers, checks.pairs(), torch.rand(M, dtype=torch.float64)
    rows = graph.num_pairs + 1
    tensors, filters = [numbers(9, M, F), numbers(9, M, F)], numbers(rows, 3, F)
    scale, square = forms_node.Scale(False), forms_node.Product(q / 2, "O(3)", False)
    norms = forms_node.Inner(False).norms
    fast, plain, slots = {
        "inner": (forms_cpu.Inner(True), forms_node.Inner(False), tensors),
        "norms": (forms_cpu.Inner(True).norms, norms, tensors[:1]),
        "scale": (forms_cpu.Scale(True), scale, [tensors[0], numbers(3, M, F)]),
        "product": (forms_cpu.Product(q, "O(3)", True), forms_node.Product(q, "O(3)", False), tensors),
        "message": (forms_cpu.Message(graph, True), forms_pair.Message(graph, False), [filters, tensors[0]]),
        "embedding": (
            forms_cpu.Embedding(graph, True),
            forms_embedding.Embedding(graph, False),
            [filters, numbers(rows, 9), numbers(M, 2 * F)],
        ),
        "silu": (forms_cpu.silu, torch.nn.functional.silu, [numbers(M, F)]),
        "normalise": (
            forms_cpu.normalise,
            lambda x: scale(x, (1 / (norms(x).sum(0) + 1)).expand(3, M, F)),
            tensors[:1],
        ),
        "add square": (
            lambda x, d: forms_cpu.add_square(x, d, q),
            lambda x, d: x + d + square(d, d),
            tensors,
        ),
    }[name]
    checks.report(name, fast, plain, slots)


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_plain_pytorch(name, capsys):
    torch.manual_seed(0)
    run(name)
    found = json.loads(capsys.readouterr().out)
    assert max(found["value"], found["first"], found["second"]) < 1e-13, found
