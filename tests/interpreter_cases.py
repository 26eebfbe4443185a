"""Run by test_quick_interpreter.py in a process of its own: a kernel in the interpreter as it is, then sped up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from quick_interpreter import speed_up


@triton.jit
def twice_and(a, b):
    return 2 * a + b


@triton.jit
def two_sums(a, i, b, j):
    return a * 0.75 + b, i * 3 + j


@triton.jit
def kernel(x_ptr, n_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    at = rows * N + columns
    x, n = tl.load(x_ptr + at, at < M * N - 3, other=0.5), tl.load(n_ptr + at)
    tl.store(out_ptr + at, tl.associative_scan(x, 0, twice_and))
    tl.store(out_ptr + M * N + at, tl.associative_scan(x, 1, twice_and, reverse=True))
    a, i = tl.reduce((x, n), 1, two_sums, keep_dims=True)
    tl.store(out_ptr + 2 * M * N + at, x * a + i)
    b, j = tl.reduce((x, n), 0, two_sums)
    tl.store(out_ptr + 3 * M * N + at, tl.where(x > 0, b[None, :], j[None, :] // 2))
    total = tl.reduce(x, None, twice_and)
    tl.store(out_ptr + 4 * M * N + tl.arange(0, N), total + tl.exp(tl.sum(x, 0)) + tl.max(tl.cast(n, tl.int64), 0))
    wrapped = (n * 2147483647).to(tl.uint32) >> 3
    tl.store(
        out_ptr + 5 * M * N + at, tl.dot(x, tl.trans(x)).to(tl.float16).to(tl.float32) + tl.sum(wrapped, 1)[:, None]
    )


def outputs(size: int) -> torch.Tensor:
    torch.manual_seed(0)
    x, n = torch.randn(size, size), torch.randint(-9, 9, (size, size), dtype=torch.int32)
    out = torch.full((6 * size * size,), 7.0)
    kernel[(1,)](x, n, out, size, size)
    return out


before = [outputs(4), outputs(1)]
speed_up()
assert all(
    torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(before, [outputs(4), outputs(1)], strict=True)
)
