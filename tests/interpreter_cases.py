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


@triton.jit
def operators(x, y):
    """All operators that are remembered, of two tensors and of numbers on either side; zeros of both signs."""
    total = (x + y) * (x - y) + x * 3 - 3 * x + (x - 1) * (2 - y) + (1 + x) / (y * y + 1) + 0.5 * x - x * 1
    signs = tl.where(x < y, 1, 0) + tl.where(x <= 1, 2, 0) + tl.where(x >= 0.25, 4, 0) + tl.where(x >= y, 8, 0)
    equal = tl.where(x == y, 16, 0) + tl.where((x != 2) & (y == 0), 32, 0) + tl.where((x > y) | (y > 1), 64, 0)
    return total + signs + equal + (x * 0 / -1.0) + (x * -0.0) + (x * 0.0)


@triton.jit
def types_kernel(x_ptr, n_ptr, out_ptr, N: tl.constexpr):
    for turn in range(2):  # the second time with other numbers, for the same types
        at = tl.arange(0, N) + turn
        x, n = tl.load(x_ptr + at), tl.load(n_ptr + at, mask=at > 1, other=-3)
        row, wide = x[:, None] + tl.zeros((1, N), tl.float32), n.to(tl.int64)
        sums = operators(x, n.to(tl.float32)).to(tl.float64) + operators(x.to(tl.float16), n.to(tl.float16))
        sums += operators(x, n) + operators(x.to(tl.float64), 0.75 * x) + operators(n, wide) + operators(wide, wide)
        sums += operators(n.to(tl.uint32), 7 * n.to(tl.uint32)) + operators(n.to(tl.int8), n)
        one = tl.load(x_ptr + 5 + turn)
        sums += tl.sum(operators(row, x[None, :]), 0) + operators(one, one + 1) + (one - x) * (x / one)
        sums += (n & 12) + (n | wide) + (n.to(tl.uint32) & 2147483648)
        sums += tl.load(x_ptr + 2 + wide % 2, at > 0, 2) - tl.load(x_ptr + at, at > 3, 0.5) * 3
        sums += tl.load((n_ptr + 4) - 1 + (-1)) + tl.load(x_ptr)
        signs = tl.where(1 / (x * 0.0) < 0, 1.0, 2.0) + tl.where(1 / (x * -0.0) < 0, 3.0, 6.0)
        tl.store(out_ptr + turn * 2 * N + tl.arange(0, N), sums)
        tl.store(out_ptr + (turn * 2 + 1) * N + tl.arange(0, N), signs)


def outputs(size: int) -> torch.Tensor:
    torch.manual_seed(0)
    x, n = torch.randn(size, size), torch.randint(-9, 9, (size, size), dtype=torch.int32)
    out = torch.full((6 * size * size,), 7.0)
    kernel[(1,)](x, n, out, size, size)
    return out


def of_types(size: int) -> torch.Tensor:
    torch.manual_seed(1)
    x, n = torch.randn(size + 9), torch.randint(-9, 9, (size + 9,), dtype=torch.int32)
    n[n == 0] = 5
    x[0], x[3], x[4], n[size] = 0.0, -0.0, n[4], 0  # the last is read in the second turn only
    out = torch.full((4 * size,), 7.0, dtype=torch.float64)
    types_kernel[(1,)](x, n, out, size)
    return out.nan_to_num(nan=-5.5)  # of zero times infinity


def all_outputs() -> list[torch.Tensor]:
    return [outputs(4), outputs(1), of_types(8), of_types(1), of_types(8)]


before = all_outputs()
speed_up()
for a, b in zip(before, all_outputs(), strict=True):
    assert torch.equal(a, b) and bool(a.isfinite().all()), (a, b)
