"""Run by test_training_ops.py in a process of its own, in Triton's interpreter: prints JSON, a line a case."""

from __future__ import annotations

import json

import torch

from torchmdnet2.kernels.pair_ops import Pairs, PairSum, SegmentSum
from torchmdnet2.models.layers import CosineCutoff, radial_basis, safe_divide
from torchmdnet2.models.tensornet.model import TensorEmbedding
from torchmdnet2.models.tensornet.training import _kernel_basis
from torchmdnet2.models.tensornet.training_atoms import (
    Inner,
    Mix,
    Product,
    Scale,
    add_square,
    enveloped,
    normalise,
    silu,
)
from torchmdnet2.models.tensornet.training_pairs import Embedding, Message, PairGeometry
from torchmdnet2.models.tensornet.training_radial import Interpolation, Stencil, lagrange
from torchmdnet2.models.tensornet2 import training_edges as edge_ops
from torchmdnet2.neighbors.neighbor_list import safe_norm

M, F, PADDING = 7, 6, 3


def pairs() -> Pairs:
    """Nine pairs of the first six atoms, one of them an atom and its own image; the seventh atom has none."""
    chosen = [(0, 1), (2, 0), (1, 2), (3, 3), (4, 0), (1, 4), (5, 2), (3, 1), (4, 5)]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(M)]
    for p, (a, b) in enumerate(chosen):
        rows[a].append((b, p))
        rows[b].append((a, -p - 1))
    ptr = [0]
    for row in rows:
        ptr.append(ptr[-1] + len(row))
    edges = [edge for row in rows for edge in sorted(row)]

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    fill = [0] * PADDING
    return Pairs(
        integers([a for a, _ in chosen] + fill),
        integers([b for _, b in chosen] + fill),
        integers([len(chosen)]),
        integers(ptr),
        integers([j for j, _ in edges] + fill),
        integers([p for _, p in edges] + fill),
    )


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def report(name: str, fast, plain, slots: list[torch.Tensor]) -> None:  # type: ignore[no-untyped-def]
    """Largest difference of the value, of the gradients, and of the gradients of a function of the gradients."""
    found = []
    for function in (fast, plain):
        generator = torch.Generator().manual_seed(1)
        value = function(*slots)
        weights = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        first = torch.autograd.grad((value * weights + value**2).sum(), slots, create_graph=True)
        target = sum(
            (g**2 * torch.randn(g.shape, dtype=g.dtype, generator=generator)).sum() / (1 + g.detach().abs().max()) ** 2
            for g in first
        )
        found.append([[value], first, torch.autograd.grad(target, slots, allow_unused=True)])
    orders = []
    for a, b in zip(*found, strict=True):
        scale = max(float(y.abs().max()) for y in b if y is not None) + 1
        orders.append(max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if y is not None) / scale)
    print(json.dumps({"name": name, "value": orders[0], "first": orders[1], "second": orders[2]}))


def forms(name: str, slots: list[torch.Tensor], cls: type, *arguments: object) -> None:
    report(name, cls(*arguments, True), cls(*arguments, False), slots)


def interpolation() -> None:
    """14 rows: both ends among their first knots, one knot many times, rows 11 and 12 padding with weights of 0."""
    first = torch.tensor([0, 5, 5, 3, 5, 5, 14, 5, 5, 5, 0, 14, 14, 9], dtype=torch.int32)
    count, real = torch.tensor([11], dtype=torch.int32), torch.ones(14, 1, dtype=torch.float64)
    real[11:13] = 0
    fast, plain = (Interpolation(first, 20, count, use_kernels) for use_kernels in (True, False))
    slots = [numbers(20, F), numbers(14, 6)]
    report("interpolation", lambda t, w: fast(t, w * real), lambda t, w: plain(t, w * real), slots)


def radial(kind: str, lower: float) -> None:
    """Pair geometry: values, and gradients with respect to the cotangents (r itself is fixed)."""
    envelope, knots = CosineCutoff(lower, 4.0), Stencil(33, 4.0 / 32) if kind == "knots" else None
    basis = radial_basis("gauss" if knots else kind, lower, 4.0, 5)
    embedding = TensorEmbedding(4, 5, "silu", envelope, 10, 1)
    r = numbers(M, 3)

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.cat([x, x.new_zeros(1, 3)])
        d = safe_norm(x)
        if knots:
            functions = lagrange(d / knots.spacing - knots.first(d)) * envelope(d)[:, None]
        else:
            functions = basis(d)
        return functions, envelope(d), embedding.geometry(-safe_divide(x, d[:, None]))

    found = []
    kernel = PairGeometry(r, knots or _kernel_basis(basis), lower, 4.0, 1)
    if knots:
        assert torch.equal(kernel.first, knots.first(safe_norm(torch.cat([r, r.new_zeros(1, 3)]))))
    for function in (kernel, plain):
        generator = torch.Generator().manual_seed(1)
        values = function(r)
        cotangents = [torch.randn(v.shape, dtype=v.dtype, generator=generator).requires_grad_() for v in values]
        (first,) = torch.autograd.grad(values, r, cotangents, create_graph=True)
        weights = torch.randn(first.shape, dtype=first.dtype, generator=generator)
        found.append([values, [first], torch.autograd.grad((first * weights).sum(), cotangents)])
    orders = [
        max(float((x - y).detach().abs().max() / (1 + y.detach().abs().max())) for x, y in zip(a, b, strict=True))
        for a, b in zip(*found, strict=True)
    ]
    print(json.dumps({"name": f"{kind} from {lower}", "value": orders[0], "first": orders[1], "second": orders[2]}))


def main() -> None:
    torch.manual_seed(0)
    graph, q = pairs(), torch.rand(M, dtype=torch.float64)
    rows = graph.num_pairs + 1
    forms("inner", [numbers(9, M, F), numbers(9, M, F)], Inner)
    report("norms", Inner(True).norms, Inner(False).norms, [numbers(9, M, F)])
    forms("scale", [numbers(9, M, F), numbers(3, M, F)], Scale)
    forms("mix", [numbers(9, M, F), numbers(3, F, F)], Mix)
    forms("product O(3)", [numbers(9, M, F), numbers(9, M, F)], Product, q, "O(3)")
    forms("product SO(3)", [numbers(9, M, F), numbers(9, M, F)], Product, q, "SO(3)")
    forms("pair sum", [numbers(graph.num_pairs, 3)], PairSum, graph)
    forms("message", [numbers(rows, 3, F), numbers(9, M, F)], Message, graph)
    edges = 2 * graph.num_pairs + M
    forms("edge sum", [numbers(rows, F), numbers(M, 2 * F)], edge_ops.EdgeSum, graph)
    forms("edge message", [numbers(edges, 3, F), numbers(9, M, F)], edge_ops.Message, graph)
    forms("embedding", [numbers(rows, 3, F), numbers(rows, 9), numbers(M, 2 * F)], Embedding, graph)
    ptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    forms("segment sum", [numbers(M, 2)], SegmentSum, ptr, torch.tensor([0, 0, 2, 2, 2, 3, 4]))
    report("silu", silu, torch.nn.functional.silu, [numbers(M, F)])
    for activate in (True, False):

        def plain(x: torch.Tensor, e: torch.Tensor, activate: bool = activate) -> torch.Tensor:
            return (torch.nn.functional.silu(x) if activate else x) * e[:, None]

        def fast(x: torch.Tensor, e: torch.Tensor, activate: bool = activate) -> torch.Tensor:
            return enveloped(x, e, activate)

        report(f"enveloped {activate}", fast, plain, [numbers(M, F), numbers(M)])
    interpolation()
    for kind in ("expnorm", "gauss", "knots"):
        for lower in (0.0, 0.5):
            radial(kind, lower)
    scale, inner, square = Scale(False), Inner(False), Product(q / 2, "O(3)", False)
    report(
        "normalise",
        normalise,
        lambda x: scale(x, (1 / (inner.norms(x).sum(0) + 1)).expand(3, M, F)),
        [numbers(9, M, F)],
    )
    report(
        "add square",
        lambda x, d: add_square(x, d, q),
        lambda x, d: x + d + square(d, d),
        [numbers(9, M, F), numbers(9, M, F)],
    )


if __name__ == "__main__":
    main()
