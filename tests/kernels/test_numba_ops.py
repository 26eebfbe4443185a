"""The training kernels of the CPU (numba) against plain PyTorch to the second derivative, in float64."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("numba")
from kernels import ops_checks as checks

from torchmdnet2.models.tensornet import training_atoms as node_ops
from torchmdnet2.models.tensornet import training_numba as numba_ops
from torchmdnet2.models.tensornet import training_pairs as embedding_op
from torchmdnet2.models.tensornet import training_pairs as pair_ops
from torchmdnet2.models.tensornet2 import training_edges as edge_ops
from torchmdnet2.models.tensornet2 import training_numba as edge_numba_ops

M, F = checks.M, checks.F
CASES = ["inner", "norms", "scale", "product", "message", "embedding", "silu", "normalise", "add square",
         "edge sum", "edge message"]  # fmt: skip


def run(name: str) -> None:
    numbers, graph, q = checks.numbers, checks.pairs(), torch.rand(M, dtype=torch.float64)
    rows = graph.num_pairs + 1
    tensors, filters = [numbers(9, M, F), numbers(9, M, F)], numbers(rows, 3, F)
    scale, square = node_ops.Scale(False), node_ops.Product(q / 2, "O(3)", False)
    norms = node_ops.Inner(False).norms
    fast, plain, slots = {
        "inner": (numba_ops.Inner(True), node_ops.Inner(False), tensors),
        "norms": (numba_ops.Inner(True).norms, norms, tensors[:1]),
        "scale": (numba_ops.Scale(True), scale, [tensors[0], numbers(3, M, F)]),
        "product": (numba_ops.Product(q, "O(3)", True), node_ops.Product(q, "O(3)", False), tensors),
        "edge sum": (
            edge_numba_ops.EdgeSum(graph, True),
            edge_ops.EdgeSum(graph, False),
            [numbers(rows, F), numbers(M, 2 * F)],
        ),
        "edge message": (
            edge_numba_ops.Message(graph, True),
            edge_ops.Message(graph, False),
            [numbers(2 * rows - 2 + M, 3, F), tensors[0]],
        ),
        "message": (numba_ops.Message(graph, True), pair_ops.Message(graph, False), [filters, tensors[0]]),
        "embedding": (
            numba_ops.Embedding(graph, True),
            embedding_op.Embedding(graph, False),
            [filters, numbers(rows, 9), numbers(M, 2 * F)],
        ),
        "silu": (numba_ops.silu, torch.nn.functional.silu, [numbers(M, F)]),
        "normalise": (
            numba_ops.normalise,
            lambda x: scale(x, (1 / (norms(x).sum(0) + 1)).expand(3, M, F)),
            tensors[:1],
        ),
        "add square": (
            lambda x, d: numba_ops.add_square(x, d, q),
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
