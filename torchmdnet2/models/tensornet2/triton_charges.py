"""Charges of TensorNet2: prediction, equilibration over structures, and the gradients of both. Triton kernels.

c, f = MLP(LN(I, ‖A‖², ‖S‖²));  q = c + u m,  u = f² + ε,  m = (Q − Σc)/U,  U = Σu. Sums over a structure are float64
sums over parts of PART atoms; the sum of a part is in the row of its first atom. Backwards, with T = Σ (dE/dq) u:

    dE/dc = dE/dq − T/U,    dE/df = 2 f m dE/dc.

The gradient of the layer norm is as in tensornet/triton_atoms.py. The charges of the last stage (GIVEN) are not read by
filters: the potential returns their mean over the K channels, and dE/dq is the slope of other energies by this mean.

Shapes: N atoms, B structures, E edges (capacity), F channels, C charge channels, of which K are real.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.triton_launch import after_previous, before_next
from ..tensornet.triton_algebra import add_square_adjoint, load9, store9
from ..tensornet.triton_products import dot, settle, silu, silu_slope

__all__ = [
    "add_gradient_kernel", "charge_hidden_kernel", "charge_layer_kernel", "charge_sums_kernel",
    "equilibrate_kernel", "pair_slope_kernel", "predict_gradient_kernel", "slope_sums_kernel",
]  # fmt: skip


_SOFTENING = tl.constexpr(1e-6)


@triton.jit
def row_times(a, bt):
    """A B [1, N] of one row A [1, K] and Bᵀ [N, K], on CUDA cores."""
    return tl.sum(a * bt, 1)[None, :]


@triton.jit
def times(a, b, PREC: tl.constexpr):
    """A B; of one row on CUDA cores."""
    if a.shape[0] == 1:
        return row_times(a, tl.trans(b))
    else:
        return dot(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32), PREC)


@triton.jit
def tensors(x, inverse, rows, first, m, F: tl.constexpr, BK: tl.constexpr, NORMALISED: tl.constexpr):
    """X [BM, BK] × 9 from channel `first` on; where X/(‖X‖²+1) is kept, inverse [N, F] is 1/(‖X‖²+1)."""
    c = first + tl.arange(0, BK)[None, :]
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(x + rows[:, None].to(tl.int64) * (9 * F) + c, m, F)
    if NORMALISED:
        f = 1.0 / tl.load(inverse + rows[:, None].to(tl.int64) * F + c, m, other=1.0)
        x0, x1, x2, x3, x4 = x0 * f, x1 * f, x2 * f, x3 * f, x4 * f
        x5, x6, x7, x8 = x5 * f, x6 * f, x7 * f, x8 * f
    return x0, x1, x2, x3, x4, x5, x6, x7, x8


@triton.jit
def features(x, inverse, rows, first, m, F: tl.constexpr, BK: tl.constexpr, NORMALISED: tl.constexpr):
    """I, ‖A‖², ‖S‖² [BM, BK] from channel `first` on."""
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = tensors(x, inverse, rows, first, m, F, BK, NORMALISED)
    return features_of(x0, x1, x2, x3, x4, x5, x6, x7, x8)


@triton.jit
def features_of(x0, x1, x2, x3, x4, x5, x6, x7, x8):
    a = 2.0 * (x1 * x1 + x2 * x2 + x3 * x3)
    return x0, a, 2.0 * (x4 * x4 + x7 * x7 + x4 * x7 + x5 * x5 + x6 * x6 + x8 * x8)


@triton.jit
def statistics(x, inverse, rows, m, eps, F: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, NORMALISED: tl.constexpr):
    """Mean and 1/σ of the 3F features: two [BM, 1]."""
    total = tl.zeros([BM, BK], tl.float32)
    for first in range(0, F, BK):
        i, a, s = features(x, inverse, rows, first, m, F, BK, NORMALISED)
        total += i + a + s
    mean = (tl.sum(total, 1) / (3 * F))[:, None]
    total = tl.zeros([BM, BK], tl.float32)
    for first in range(0, F, BK):
        i, a, s = features(x, inverse, rows, first, m, F, BK, NORMALISED)
        total += (i - mean) * (i - mean) + (a - mean) * (a - mean) + (s - mean) * (s - mean)
    return mean, tl.rsqrt(tl.sum(total, 1) / (3 * F) + eps)[:, None]


@triton.jit
def layer(
    a, w, rows, cols, m, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACTIVE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A W for A [., K], of which silu is taken (ACTIVE), and columns of W [K, N]: [BM, BN]."""
    y = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(a + rows[:, None].to(tl.int64) * K + k[None, :], m, other=0.0)
        if ACTIVE:
            x = silu(x)
        y = dot(x, tl.load(w + k[:, None] * N + cols[None, :]), y, PREC)
    return y


@triton.jit(do_not_specialize=["num_atoms"])
def charge_hidden_kernel(
    x, inverse, gamma, beta, w1, b1, hidden, moments, num_atoms, eps,
    F: tl.constexpr, NORMALISED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """hidden [N, F] = W1 LN(I, ‖A‖², ‖S‖²) + b1, which an activation acts on; moments [N, 4] = mean and 1/σ.

    Of one atom the features are read once, and the weights while the kernel before still runs.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    m = (rows < num_atoms)[:, None]
    row = rows[:, None].to(tl.int64)
    if BM == 1:
        k = tl.arange(0, F)
        w = w1 + k[None, :] * F + cols[:, None]
        wi, wa, ws = tl.load(w), tl.load(w + F * F), tl.load(w + 2 * F * F)
        after_previous(PDL)
        i, a, s = features(x, inverse, rows, 0, m, F, F, NORMALISED)
        mean = (tl.sum(i + a + s, 1) / (3 * F))[:, None]
        i, a, s = i - mean, a - mean, s - mean
        rstd = tl.rsqrt(tl.sum(i * i + a * a + s * s, 1) / (3 * F) + eps)[:, None]
        i = i * rstd * tl.load(gamma + k)[None, :] + tl.load(beta + k)[None, :]
        a = a * rstd * tl.load(gamma + F + k)[None, :] + tl.load(beta + F + k)[None, :]
        s = s * rstd * tl.load(gamma + 2 * F + k)[None, :] + tl.load(beta + 2 * F + k)[None, :]
        h = tl.sum(i * wi + a * wa + s * ws, 1)[None, :]
    else:
        after_previous(PDL)
        mean, rstd = statistics(x, inverse, rows, m, eps, F, BM, BK, NORMALISED)
        h = tl.zeros([BM, BN], tl.float32)
        for first in range(0, F, BK):
            i, a, s = features(x, inverse, rows, first, m, F, BK, NORMALISED)
            k = first + tl.arange(0, BK)
            w = w1 + k[:, None] * F + cols[None, :]
            i = (i - mean) * rstd * tl.load(gamma + k)[None, :] + tl.load(beta + k)[None, :]
            h = dot(i, tl.load(w), h, PREC)
            a = (a - mean) * rstd * tl.load(gamma + F + k)[None, :] + tl.load(beta + F + k)[None, :]
            h = dot(a, tl.load(w + F * F), h, PREC)
            s = (s - mean) * rstd * tl.load(gamma + 2 * F + k)[None, :] + tl.load(beta + 2 * F + k)[None, :]
            h = dot(s, tl.load(w + 2 * F * F), h, PREC)
    if tl.program_id(1) == 0:
        tl.store(moments + row * 4, mean, m)
        tl.store(moments + row * 4 + 1, rstd, m)
    tl.store(hidden + row * F + cols[None, :], h + tl.load(b1 + cols)[None, :], m)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def charge_layer_kernel(
    hidden, w, b, out, num_atoms,
    F: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N_atoms, N] = W silu(hidden) + b."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    m = (rows < num_atoms)[:, None]
    if BM == 1:
        k = tl.arange(0, F)
        of = tl.load(w + k[None, :] * N + cols[:, None])
        after_previous(PDL)
        x = silu(tl.load(hidden + rows[:, None].to(tl.int64) * F + k[None, :], m, other=0.0))
        y = row_times(x, of)
    else:
        after_previous(PDL)
        y = layer(hidden, w, rows, cols, m, F, N, BM, BN, BK, True, PREC)
    tl.store(out + rows[:, None].to(tl.int64) * N + cols[None, :], y + tl.load(b + cols)[None, :], m)
    before_next(PDL)


@triton.jit
def weight_of(f, EXACT: tl.constexpr):
    """u in float64."""
    f = f.to(tl.float64)
    return f * f + _SOFTENING if EXACT else f * f


@triton.jit
def charge_sums_kernel(
    ptr, out, sums, C: tl.constexpr, EXACT: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr
):
    """sums [N, 2C] float64: Σc beside Σu of part p of structure b."""
    after_previous(PDL)
    start = tl.load(ptr + tl.program_id(0)) + tl.program_id(1) * PART
    end = tl.minimum(start + PART, tl.load(ptr + tl.program_id(0) + 1))
    k = tl.arange(0, C)[None, :]
    charge = tl.zeros([BM, C], tl.float64)
    weight = charge
    for first in range(start, end, BM):
        row = (first + tl.arange(0, BM))[:, None]
        m = row < end
        at = out + row.to(tl.int64) * (2 * C) + k
        charge += tl.load(at, m, other=0.0).to(tl.float64)
        weight += tl.where(m, weight_of(tl.load(at + C, m, other=0.0), EXACT), 0.0)
    first = start + tl.zeros([C], tl.int32)
    mask = first < end
    at = sums + first.to(tl.int64) * (2 * C) + tl.arange(0, C)
    tl.store(at, tl.sum(charge, 0), mask)
    tl.store(at + C, tl.sum(weight, 0), mask)
    before_next(PDL)


@triton.jit
def gathered(sums, first, end, ok, offset: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, PART: tl.constexpr):
    """The sums of structures from those of their parts: [BM, C] float64."""
    total = tl.load(
        sums + first[:, None].to(tl.int64) * WIDTH + offset + tl.arange(0, C)[None, :], ok[:, None], other=0.0
    )
    for p in range(PART, tl.max(tl.where(ok, end - first, 0), 0), PART):
        more = (ok & (first + p < end))[:, None]
        at = sums + (first + p)[:, None].to(tl.int64) * WIDTH + offset + tl.arange(0, C)[None, :]
        total += tl.load(at, more, other=0.0)
    return total


@triton.jit
def correction(sums, total_charge, first, end, rows, ok, C: tl.constexpr, EXACT: tl.constexpr, PART: tl.constexpr):
    """m and U [BM, C] float64."""
    charge = gathered(sums, first, end, ok, 0, 2 * C, C, PART)
    weight = gathered(sums, first, end, ok, C, 2 * C, C, PART)
    weight += 0.0 if EXACT else _SOFTENING
    weight = tl.where(ok[:, None], tl.maximum(weight, 1e-300), 1.0)
    total = tl.load(total_charge + rows, ok, other=0.0).to(tl.float64)[:, None]
    return (total - charge) / weight, weight


@triton.jit(do_not_specialize=["num_atoms"])
def equilibrate_kernel(
    batch, ptr, total_charge, out, sums, weights, by_charge, charges, charges64, num_atoms,
    F: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr, EXACT: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Charges q, and q @ weights [C, 2F] into by_charge [N, 2F]. GIVEN: their means into charges [N] and charges64."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    m = ok[:, None]
    b = tl.load(batch + rows, ok, other=0)
    first, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    missing, _total = correction(sums, total_charge, first, end, rows, ok, C, EXACT, PART)
    k = tl.arange(0, C)[None, :]
    at = out + rows[:, None].to(tl.int64) * (2 * C) + k
    u = weight_of(tl.load(at + C, m, other=0.0), EXACT)
    q = tl.load(at, m, other=0.0).to(tl.float64) + u * missing
    if GIVEN:
        mean = tl.sum(tl.where(k < K, q, 0.0), 1) / K
        tl.store(charges64 + rows, mean, ok)
        tl.store(charges + rows, mean.to(tl.float32), ok)
    else:
        q = tl.where(k < K, q, 0.0).to(tl.float32)
        for start in range(0, 2 * F, BK):
            n = start + tl.arange(0, BK)[None, :]
            w = tl.load(weights + tl.arange(0, C)[:, None] * (2 * F) + n)
            y = times(q, w, PREC)
            tl.store(by_charge + rows[:, None].to(tl.int64) * (2 * F) + n, y, m)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def pair_slope_kernel(
    row_ptr, reverse, pair_slope, dq, num_atoms, C: tl.constexpr, BE: tl.constexpr, REVERSED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dE/dq [N, C] from those of the slots (first_gradient_kernel). A slot in the row of i is of the message j → i, so
    that i is its receiver, and the sender of the reverse one; REVERSED: of the message i → j."""
    after_previous(PDL)
    i = tl.program_id(0)
    k = tl.arange(0, C)
    of_row: tl.constexpr = C if REVERSED else 0
    start, end = tl.load(row_ptr + i), tl.load(row_ptr + i + 1)
    total = tl.zeros([BE, C], tl.float32)
    for first in range(start, end, BE):
        e = first + tl.arange(0, BE)
        mask = e < end
        r = tl.load(reverse + e, mask, other=0)
        m = mask[:, None]
        at = pair_slope + (num_atoms + e)[:, None].to(tl.int64) * (2 * C) + of_row + k[None, :]
        total += tl.load(at, m, other=0.0)
        at = pair_slope + (num_atoms + r)[:, None].to(tl.int64) * (2 * C) + (C - of_row) + k[None, :]
        total += tl.load(at, m, other=0.0)
    row = (i + tl.zeros([C], tl.int32)).to(tl.int64)
    own = pair_slope + row * (2 * C) + k
    tl.store(dq + row * C + k, tl.sum(total, 0) + tl.load(own) + tl.load(own + C))
    before_next(PDL)


@triton.jit
def charge_slope(dq, rows, m, scale, C: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr):
    """dE/dq [BM, C] float64."""
    k = tl.arange(0, C)[None, :]
    if GIVEN:
        g = tl.load(dq + rows[:, None], m, other=0.0).to(tl.float64) * (scale / K)
        return tl.where(k < K, g, 0.0)
    else:
        g = tl.load(dq + rows[:, None].to(tl.int64) * C + k, m, other=0.0).to(tl.float64)
        return tl.where(k < K, g, 0.0)


@triton.jit
def slope_sums_kernel(
    ptr, out, dq, scale, sums, C: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr, EXACT: tl.constexpr,
    PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sums [N, C] float64: T of part p of structure b. GIVEN: dq [N], times scale; else dq [N, C]."""
    after_previous(PDL)
    start = tl.load(ptr + tl.program_id(0)) + tl.program_id(1) * PART
    end = tl.minimum(start + PART, tl.load(ptr + tl.program_id(0) + 1))
    k = tl.arange(0, C)
    total = tl.zeros([BM, C], tl.float64)
    for first in range(start, end, BM):
        rows = first + tl.arange(0, BM)
        m = (rows < end)[:, None]
        u = weight_of(tl.load(out + rows[:, None].to(tl.int64) * (2 * C) + C + k[None, :], m, other=0.0), EXACT)
        total += charge_slope(dq, rows, m, scale, C, K, GIVEN) * u
    first = start + tl.zeros([C], tl.int32)
    tl.store(sums + first.to(tl.int64) * C + k, tl.sum(total, 0), first < end)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def predict_gradient_kernel(
    batch, ptr, total_charge, out, sums, slope_sums, dq, scale, h1, h2, w2t, w3t, w1_gamma, w1_offset, moments,
    num_atoms,
    F: tl.constexpr, C: tl.constexpr, K: tl.constexpr, GIVEN: tl.constexpr, EXACT: tl.constexpr, PART: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the first layer's output, before its activation, over h1 [N, F].

    Write the two means for the gradient of the layer norm beside mean and 1/σ in moments [N, 4]: `add_gradient_kernel`
    needs them, since a program there has only some of the channels.
    """
    n = tl.arange(0, F)
    if BM == 1:
        w2 = tl.load(w2t + n[None, :] * F + n[:, None])
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    m = ok[:, None]
    row = rows[:, None].to(tl.int64)
    b = tl.load(batch + rows, ok, other=0)
    first, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    missing, total = correction(sums, total_charge, first, end, rows, ok, C, EXACT, PART)
    gradient = charge_slope(dq, rows, m, scale, C, K, GIVEN)
    gradient -= gathered(slope_sums, first, end, ok, 0, C, C, PART) / total
    k = tl.arange(0, C)
    weight = tl.load(out + row * (2 * C) + C + k[None, :], m, other=0.0).to(tl.float64)
    gradient = tl.where((k < K)[None, :] & m, gradient, 0.0)
    dc, df = gradient.to(tl.float32), (2.0 * weight * missing * gradient).to(tl.float32)
    a = times(dc, tl.load(w3t + k[:, None] * F + n[None, :]), PREC)
    a += times(df, tl.load(w3t + (C + k)[:, None] * F + n[None, :]), PREC)
    at = h2 + row * F + n[None, :]
    a *= silu_slope(tl.load(at, m, other=0.0))
    if BM == 1:
        a = row_times(a, w2)
    elif BK == F:
        a = times(a, tl.load(w2t + n[:, None] * F + n[None, :]), PREC)
    else:
        # each gradient overwrites its quantity
        tl.store(at, a, m)
        tl.debug_barrier()  # the next lines read what other threads have written
        a = layer(h2, w2t, rows, n, m, F, F, BM, F, BK, False, PREC)
    at = h1 + row * F + n[None, :]
    h = tl.load(at, m, other=0.0)
    a *= silu_slope(h)
    sum_g = (tl.sum(a * tl.load(w1_gamma + n)[None, :], 1) / (3 * F))[:, None]
    sum_gn = (tl.sum(a * (h - tl.load(w1_offset + n)[None, :]), 1) / (3 * F))[:, None]
    tl.store(at, a, m)
    tl.store(moments + row * 4 + 2, sum_g, m)
    tl.store(moments + row * 4 + 3, sum_gn, m)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def add_gradient_kernel(
    x, inverse, a1, w1t, gamma, moments, d, g, dd, mixed, gate, dgate, num_atoms,
    F: tl.constexpr, NORMALISED: tl.constexpr, FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PREC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds dE/dX through the charges to the gradients of what X was made of, for BN channels; a1 [N, F] as
    `predict_gradient_kernel` leaves it.

    FIRST: X is of the embedding: to dd [N, 9, F], that of mix(X⁰), and dgate [N, 3F], that of its gate. Else to g,
    that of X itself, and dd, that of D of the layer before.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    m = (rows < num_atoms)[:, None]
    row = rows[:, None].to(tl.int64)
    first = tl.program_id(1) * BN
    c = first + tl.arange(0, BN)
    if BM == 1:
        k = tl.arange(0, F)
        w = w1t + k[None, :] * (3 * F) + c[:, None]
        wi, wa, ws = tl.load(w), tl.load(w + F), tl.load(w + 2 * F)
        after_previous(PDL)
        a = tl.load(a1 + row * F + k[None, :], m, other=0.0)
        gi = settle(row_times(a, wi), BM, BN)
        ga, gs = settle(row_times(a, wa), BM, BN), settle(row_times(a, ws), BM, BN)
    else:
        after_previous(PDL)
        gi = tl.zeros([BM, BN], tl.float32)
        ga, gs = gi, gi
        for start in range(0, F, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(a1 + row * F + k[None, :], m, other=0.0)
            w = w1t + k[:, None] * (3 * F) + c[None, :]
            gi = dot(a, tl.load(w), gi, PREC)
            ga = dot(a, tl.load(w + F), ga, PREC)
            gs = dot(a, tl.load(w + 2 * F), gs, PREC)
    mean, rstd = tl.load(moments + row * 4, m, other=0.0), tl.load(moments + row * 4 + 1, m, other=0.0)
    sum_g, sum_gn = tl.load(moments + row * 4 + 2, m, other=0.0), tl.load(moments + row * 4 + 3, m, other=0.0)
    x0, x1, x2, x3, x4, x5, x6, x7, x8 = tensors(x, inverse, rows, first, m, F, BN, NORMALISED)
    ni, na, ns = features_of(x0, x1, x2, x3, x4, x5, x6, x7, x8)
    gi = (gi * tl.load(gamma + c)[None, :] - sum_g - (ni - mean) * rstd * sum_gn) * rstd
    ga = (ga * tl.load(gamma + F + c)[None, :] - sum_g - (na - mean) * rstd * sum_gn) * rstd
    gs = (gs * tl.load(gamma + 2 * F + c)[None, :] - sum_g - (ns - mean) * rstd * sum_gn) * rstd
    g0, g1, g2, g3 = gi, 4.0 * x1 * ga, 4.0 * x2 * ga, 4.0 * x3 * ga
    g4, g7 = (4.0 * x4 + 2.0 * x7) * gs, (4.0 * x7 + 2.0 * x4) * gs
    g5, g6, g8 = 4.0 * x5 * gs, 4.0 * x6 * gs, 4.0 * x8 * gs
    # all is read before anything is written: a load waits for the stores before it
    at = row * (9 * F) + c[None, :]
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(dd + at, m, F)
    if FIRST:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(mixed + at, m, F)
        place = row * (3 * F) + c[None, :]
        hi, ha = tl.load(gate + place, m, other=0.0), tl.load(gate + place + F, m, other=0.0)
        hs = tl.load(gate + place + 2 * F, m, other=0.0)
        di, da = tl.load(dgate + place, m, other=0.0), tl.load(dgate + place + F, m, other=0.0)
        ds = tl.load(dgate + place + 2 * F, m, other=0.0)
        tl.store(dgate + place, di + silu_slope(hi) * (g0 * x0), m)
        tl.store(dgate + place + F, da + silu_slope(ha) * (g1 * x1 + g2 * x2 + g3 * x3), m)
        ds += silu_slope(hs) * (g4 * x4 + g5 * x5 + g6 * x6 + g7 * x7 + g8 * x8)
        tl.store(dgate + place + 2 * F, ds, m)
        hi, ha, hs = silu(hi), silu(ha), silu(hs)
        g0, g1, g2, g3, g4 = g0 * hi, g1 * ha, g2 * ha, g3 * ha, g4 * hs
        g5, g6, g7, g8 = g5 * hs, g6 * hs, g7 * hs, g8 * hs
    else:
        x0, x1, x2, x3, x4, x5, x6, x7, x8 = load9(d + at, m, F)
        add9_to(g + at, m, F, g0, g1, g2, g3, g4, g5, g6, g7, g8)
        g0, g1, g2, g3, g4, g5, g6, g7, g8 = add_square_adjoint(
            1.0, x0, x1, x2, x3, x4, x5, x6, x7, x8, g0, g1, g2, g3, g4, g5, g6, g7, g8
        )
    store9(dd + at, m, F, y0 + g0, y1 + g1, y2 + g2, y3 + g3, y4 + g4, y5 + g5, y6 + g6, y7 + g7, y8 + g8)
    before_next(PDL)


@triton.jit
def add9_to(at, m, F: tl.constexpr, x0, x1, x2, x3, x4, x5, x6, x7, x8):
    y0, y1, y2, y3, y4, y5, y6, y7, y8 = load9(at, m, F)
    store9(at, m, F, x0 + y0, x1 + y1, x2 + y2, x3 + y3, x4 + y4, x5 + y5, x6 + y6, x7 + y7, x8 + y8)
