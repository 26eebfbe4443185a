"""Graph network, Transformer and Equivariant Transformer on the GPU.

The messages of a layer are one differentiable operation on kernels, whose backward pass adds to the forces. PyTorch and
its autograd compute all operations of single atoms.

Shapes: N atoms, C capacity for edges, F channels, K knots, P filters.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, Edges, Network
from ...potential.graph import Features
from ..heads import EquivariantScalarHead
from ..tensornet.weights import Filters, FilterTable, fit_tables

__all__ = [
    "Buffers", "EquivariantTransformerNetwork", "GraphNetworkNetwork", "LaunchShapes", "Messages", "Pass",
    "TransformerNetwork",
]  # fmt: skip


# --- Messages with tabulated radial filters over CSR rows, and their gradients. Triton kernels ---
#
# There is one program for each receiver and group of heads. It reads the edges of its row a few at a time, sums in
# registers and writes once. There are no atomics and no tensors of the size edges × channels, and results are
# reproducible. The list has both directions of each pair. So gradients of senders are sums over rows too, and a row
# finds the whole force of each of its pairs.
#
# Three kinds of messages share the kernels, chosen by ATTENTION and VECTORS:
#
#     graph network   x_i = Σ_j f0 v_j
#     Transformer     x_i = Σ_j a_ij f1 v_j,  a_ij = silu(Σ_head q_i k_j f0)
#     Equivariant T.  x_i = Σ_j a_ij f1 v0_j,  w_i = Σ_j [f2 v1_j w_j + f3 v2_j u_ij]
#
# f are the radial filters, from a table [knots, 4, P, F] of cubics in the distance from the knot. With OWN an atom also
# sends a message to itself, at distance 0 with u = 0.
#
# Shapes: N atoms, E edges (capacity), F channels = heads × D. Node arrays "qkv" [N, W] hold q, k, v0, v1, v2 side by
# side (v alone without ATTENTION); w is [N, 3, F]. Tiles are [BE edges, BH heads, D].


@triton.jit
def place_kernel(row_ptr, vectors, knots, knot, offset, unit, inverse, num_atoms, decay, scale, KNOTS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Each edge's place in the tables (the knot below, the distance from it), its unit vector and 1/d."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = e < tl.load(row_ptr + num_atoms)
    x = tl.load(vectors + e * 3, mask, other=1.0)
    y = tl.load(vectors + e * 3 + 1, mask, other=0.0)
    z = tl.load(vectors + e * 3 + 2, mask, other=0.0)
    square = x * x + y * y + z * z
    one_over = tl.where(square > 0.0, 1.0 / tl.sqrt(tl.where(square > 0.0, square, 1.0)), 0.0)
    d = tl.sqrt(square)
    k = (scale * (1.0 - tl.exp(-decay * d))).to(tl.int32)
    k = tl.minimum(tl.maximum(k, 0), KNOTS - 2)
    tl.store(knot + e, k, mask)
    tl.store(offset + e, d - tl.load(knots + k), mask)  # exact in float32: the tables cost no accuracy
    tl.store(unit + e * 3, x * one_over, mask)
    tl.store(unit + e * 3 + 1, y * one_over, mask)
    tl.store(unit + e * 3 + 2, z * one_over, mask)
    tl.store(inverse + e, one_over, mask)


@triton.jit
def cubic(table, part: tl.constexpr, t, mask, P: tl.constexpr, F: tl.constexpr):
    """Value of one radial filter at table + knot·4PF + channel; 0 where masked."""
    c0 = tl.load(table + part * F, mask, other=0.0)
    c1 = tl.load(table + (P + part) * F, mask, other=0.0)
    c2 = tl.load(table + (2 * P + part) * F, mask, other=0.0)
    c3 = tl.load(table + (3 * P + part) * F, mask, other=0.0)
    return c0 + t * (c1 + t * (c2 + t * c3))


@triton.jit
def cubic_and_slope(table, part: tl.constexpr, t, mask, P: tl.constexpr, F: tl.constexpr):
    """Value and derivative by the distance of one radial filter; 0 where masked."""
    c0 = tl.load(table + part * F, mask, other=0.0)
    c1 = tl.load(table + (P + part) * F, mask, other=0.0)
    c2 = tl.load(table + (2 * P + part) * F, mask, other=0.0)
    c3 = tl.load(table + (3 * P + part) * F, mask, other=0.0)
    return c0 + t * (c1 + t * (c2 + t * c3)), c1 + t * (2.0 * c2 + 3.0 * t * c3)


@triton.jit
def over_head(x):
    """Sum over the channels of each head, for each of its channels: [BE, BH, D] → [BE, BH, 1]."""
    return tl.expand_dims(tl.sum(x, 2), 2)


@triton.jit
def over_channels(x):
    """[BE, BH, D] → [BE]."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_slope(x):
    s = 1.0 / (1.0 + tl.exp(-x))
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def edges_of_row(row, e, start, end, sender, knot, offset, OWN: tl.constexpr):
    """Sender, knot, distance from it, whether to count it, and whether it is an edge of the list, of edges e [BE].

    With OWN the atom itself stands before its first edge. Lanes beyond the row name the atom itself, masked.
    """
    listed = e < end
    if OWN:
        listed = listed & (e >= start)
    j = tl.load(sender + e, listed, other=0)
    j = tl.where(listed, j, row).to(tl.int64)
    k = tl.load(knot + e, listed, other=0)
    t = tl.load(offset + e, listed, other=0.0)
    return j[:, None, None], k[:, None, None].to(tl.int64), t[:, None, None], (e < end)[:, None, None], listed


@triton.jit(do_not_specialize=["num_atoms"])
def message_kernel(
    row_ptr, sender, knot, offset, unit, table, qkv, w, x_out, w_out, num_atoms,
    F: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
    OWN: tl.constexpr, ATTENTION: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """x [N, F], and with VECTORS w [N, 3, F]."""
    row = tl.program_id(0)
    V: tl.constexpr = 2 * F if ATTENTION else 0
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    c = (head[:, None] * D + tl.arange(0, D)[None, :])[None, :, :]
    start, end = tl.load(row_ptr + row), tl.load(row_ptr + row + 1)
    at = row.to(tl.int64)
    x = tl.zeros([BE, BH, D], tl.float32)
    w0, w1, w2 = x, x, x
    q = x
    if ATTENTION:
        q = tl.load(qkv + at * W + c)
    first = start
    if OWN:
        first = start - 1
    for block in range(first, end, BE):
        e = block + tl.arange(0, BE)
        j, k, t, mask, listed = edges_of_row(row, e, start, end, sender, knot, offset, OWN)
        f = table + k * (4 * P * F) + c
        source = qkv + j * W + c
        if ATTENTION:
            score = over_head(q * tl.load(source + F) * cubic(f, 0, t, mask, P, F))
            x += silu(score) * cubic(f, 1, t, mask, P, F) * tl.load(source + V)
        else:
            x += cubic(f, 0, t, mask, P, F) * tl.load(source + V)
        if VECTORS:
            s1 = cubic(f, 2, t, mask, P, F) * tl.load(source + V + F)
            s2 = cubic(f, 3, t, mask, P, F) * tl.load(source + V + 2 * F)
            of_sender = w + j * (3 * F) + c
            w0 += s1 * tl.load(of_sender) + s2 * tl.load(unit + e * 3, listed, other=0.0)[:, None, None]
            w1 += s1 * tl.load(of_sender + F) + s2 * tl.load(unit + e * 3 + 1, listed, other=0.0)[:, None, None]
            w2 += s1 * tl.load(of_sender + 2 * F) + s2 * tl.load(unit + e * 3 + 2, listed, other=0.0)[:, None, None]
    c = head[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(x_out + at * F + c, tl.sum(x, 0))
    if VECTORS:
        out = w_out + at * (3 * F) + c
        tl.store(out, tl.sum(w0, 0))
        tl.store(out + F, tl.sum(w1, 0))
        tl.store(out + 2 * F, tl.sum(w2, 0))


@triton.jit(do_not_specialize=["num_atoms"])
def message_backward_kernel(
    row_ptr, sender, knot, offset, unit, inverse, vectors, table, qkv, w, dx, dw, dqkv_out, dw_out, pull, virial,
    num_atoms,
    F: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
    OWN: tl.constexpr, ATTENTION: tl.constexpr, VECTORS: tl.constexpr, VIRIAL: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of qkv [N, W] and w [N, 3, F] from those of x and w (dx, dw); adds to forces and virials.

    For each edge, "to" is the message to the atom of the row, "from" the message that it sends. Both are read in one
    pass, since the forces and the gradients of the row's atom need both. `pull` [slices, N, 3] gets the sum of −dE/dr_i
    over the pairs of the row, `virial` [slices, N, 9] half of Σ vec ⊗ dE/dvec over both directions.

    For x_i = Σ_j a_ij f1 v_j, a_ij = silu(s_ij), s_ij = Σ_head q_i k_j f0:

        ds_ij = silu'(s_ij) Σ_head dx_i f1 v_j,
        dq_i = Σ_j ds_ij k_j f0,    dk_i = Σ_j ds_ji q_j f0,    dv_i = Σ_j a_ji f1 dx_j,

    and dE/dd of the pair, `along`, is a_ij dx_i v_j f1' + ds_ij q_i k_j f0' plus the same with i and j exchanged. Each
    of the two rows of a pair computes all of this, and no row waits for another.
    """
    row = tl.program_id(0)
    V: tl.constexpr = 2 * F if ATTENTION else 0
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    c = (head[:, None] * D + tl.arange(0, D)[None, :])[None, :, :]
    start, end = tl.load(row_ptr + row), tl.load(row_ptr + row + 1)
    at = row.to(tl.int64)
    dv0 = tl.zeros([BE, BH, D], tl.float32)
    dq, dk, dv1, dv2, dw0, dw1, dw2 = dv0, dv0, dv0, dv0, dv0, dv0, dv0
    pull0 = tl.zeros([BE], tl.float32)
    pull1, pull2 = pull0, pull0
    v00, v01, v02, v10, v11, v12, v20, v21, v22 = pull0, pull0, pull0, pull0, pull0, pull0, pull0, pull0, pull0

    own = qkv + at * W + c
    dx_i, v0_i = tl.load(dx + at * F + c), tl.load(own + V)
    q_i, k_i, v1_i, v2_i = v0_i, v0_i, v0_i, v0_i
    dw0_i, dw1_i, dw2_i, w0_i, w1_i, w2_i = v0_i, v0_i, v0_i, v0_i, v0_i, v0_i
    if ATTENTION:
        q_i, k_i = tl.load(own), tl.load(own + F)
    if VECTORS:
        v1_i, v2_i = tl.load(own + V + F), tl.load(own + V + 2 * F)
        mine = dw + at * (3 * F) + c
        dw0_i, dw1_i, dw2_i = tl.load(mine), tl.load(mine + F), tl.load(mine + 2 * F)
        mine = w + at * (3 * F) + c
        w0_i, w1_i, w2_i = tl.load(mine), tl.load(mine + F), tl.load(mine + 2 * F)
    first = start
    if OWN:
        # the message to itself is both to and from the atom: q gets the first part, k and v the second; u = 0, no force
        first = start - 1
    for block in range(first, end, BE):
        e = block + tl.arange(0, BE)
        j, k, t, mask, listed = edges_of_row(row, e, start, end, sender, knot, offset, OWN)
        f = table + k * (4 * P * F) + c
        source = qkv + j * W + c
        u0 = tl.load(unit + e * 3, listed, other=0.0)
        u1 = tl.load(unit + e * 3 + 1, listed, other=0.0)
        u2 = tl.load(unit + e * 3 + 2, listed, other=0.0)
        # lanes beyond the row name the atom itself; their filters are 0, so that they add nothing
        dx_j, v0_j = tl.load(dx + j * F + c), tl.load(source + V)
        if ATTENTION:
            q_j, k_j = tl.load(source), tl.load(source + F)
            fk, fk_slope = cubic_and_slope(f, 0, t, mask, P, F)
            fv, fv_slope = cubic_and_slope(f, 1, t, mask, P, F)
            # the message to the atom of the row
            a, slope = silu_and_slope(over_head(q_i * k_j * fk))
            product = dx_i * v0_j
            ds = over_head(product * fv) * slope
            dq += ds * k_j * fk
            along = product * a * fv_slope + ds * q_i * k_j * fk_slope
            # the message that the atom of the row sends
            a, slope = silu_and_slope(over_head(q_j * k_i * fk))
            product = dx_j * v0_i
            ds = over_head(product * fv) * slope
            dk += ds * q_j * fk
            dv0 += dx_j * a * fv
            along += product * a * fv_slope + ds * q_j * k_i * fk_slope
        else:
            fv, fv_slope = cubic_and_slope(f, 0, t, mask, P, F)
            dv0 += dx_j * fv
            along = (dx_i * v0_j + dx_j * v0_i) * fv_slope
        if VECTORS:
            ux, uy, uz = u0[:, None, None], u1[:, None, None], u2[:, None, None]
            gathered = dw + j * (3 * F) + c
            dw0_j, dw1_j, dw2_j = tl.load(gathered), tl.load(gathered + F), tl.load(gathered + 2 * F)
            f1, f1_slope = cubic_and_slope(f, 2, t, mask, P, F)
            v1_j = tl.load(source + V + F)
            gathered = w + j * (3 * F) + c
            # ⟨dw_i, w_j⟩ of the message to the row's atom, ⟨dw_j, w_i⟩ of the one from it
            to_i = dw0_i * tl.load(gathered) + dw1_i * tl.load(gathered + F)
            to_i += dw2_i * tl.load(gathered + 2 * F)
            from_i = dw0_j * w0_i + dw1_j * w1_i + dw2_j * w2_i
            along += f1_slope * (v1_j * to_i + v1_i * from_i)
            dv1 += f1 * from_i
            s1 = f1 * v1_i
            dw0 += s1 * dw0_j
            dw1 += s1 * dw1_j
            dw2 += s1 * dw2_j
            f2, f2_slope = cubic_and_slope(f, 3, t, mask, P, F)
            v2_j = tl.load(source + V + 2 * F)
            to_i = dw0_i * ux + dw1_i * uy + dw2_i * uz
            from_i = -(dw0_j * ux + dw1_j * uy + dw2_j * uz)
            along += f2_slope * (v2_j * to_i + v2_i * from_i)
            dv2 += f2 * from_i
            # gradient of u of the edge, minus that of −u of its reverse
            across0 = over_channels(f2 * (v2_j * dw0_i - v2_i * dw0_j))
            across1 = over_channels(f2 * (v2_j * dw1_i - v2_i * dw1_j))
            across2 = over_channels(f2 * (v2_j * dw2_i - v2_i * dw2_j))
            d_slope = over_channels(along)
            one_over = tl.load(inverse + e, listed, other=0.0)
            # du/dvec = (1 − u uᵀ)/d: of `across`, what lies along u does not turn it
            radial = d_slope - one_over * (across0 * u0 + across1 * u1 + across2 * u2)
            g0 = radial * u0 + one_over * across0
            g1 = radial * u1 + one_over * across1
            g2 = radial * u2 + one_over * across2
        else:
            d_slope = over_channels(along)
            g0, g1, g2 = d_slope * u0, d_slope * u1, d_slope * u2
        # vec = r_j − r_i: −dE/dr_i = dE/dvec
        pull0 += g0
        pull1 += g1
        pull2 += g2
        if VIRIAL:
            # half, since the row of the other atom has the same pair
            r0 = 0.5 * tl.load(vectors + e * 3, listed, other=0.0)
            r1 = 0.5 * tl.load(vectors + e * 3 + 1, listed, other=0.0)
            r2 = 0.5 * tl.load(vectors + e * 3 + 2, listed, other=0.0)
            v00 += r0 * g0
            v01 += r0 * g1
            v02 += r0 * g2
            v10 += r1 * g0
            v11 += r1 * g1
            v12 += r1 * g2
            v20 += r2 * g0
            v21 += r2 * g1
            v22 += r2 * g2
    c = head[:, None] * D + tl.arange(0, D)[None, :]
    out = dqkv_out + at * W + c
    tl.store(out + V, tl.sum(dv0, 0))
    if ATTENTION:
        tl.store(out, tl.sum(dq, 0))
        tl.store(out + F, tl.sum(dk, 0))
    if VECTORS:
        tl.store(out + V + F, tl.sum(dv1, 0))
        tl.store(out + V + 2 * F, tl.sum(dv2, 0))
        out = dw_out + at * (3 * F) + c
        tl.store(out, tl.sum(dw0, 0))
        tl.store(out + F, tl.sum(dw1, 0))
        tl.store(out + 2 * F, tl.sum(dw2, 0))
    # only this program writes here, one layer after the other, so that no atomics are needed
    here = tl.program_id(1).to(tl.int64) * num_atoms + at
    p = pull + here * 3
    tl.store(p, tl.load(p) + tl.sum(pull0, 0))
    tl.store(p + 1, tl.load(p + 1) + tl.sum(pull1, 0))
    tl.store(p + 2, tl.load(p + 2) + tl.sum(pull2, 0))
    if VIRIAL:
        p = virial + here * 9
        tl.store(p, tl.load(p) + tl.sum(v00, 0))
        tl.store(p + 1, tl.load(p + 1) + tl.sum(v01, 0))
        tl.store(p + 2, tl.load(p + 2) + tl.sum(v02, 0))
        tl.store(p + 3, tl.load(p + 3) + tl.sum(v10, 0))
        tl.store(p + 4, tl.load(p + 4) + tl.sum(v11, 0))
        tl.store(p + 5, tl.load(p + 5) + tl.sum(v12, 0))
        tl.store(p + 6, tl.load(p + 6) + tl.sum(v20, 0))
        tl.store(p + 7, tl.load(p + 7) + tl.sum(v21, 0))
        tl.store(p + 8, tl.load(p + 8) + tl.sum(v22, 0))


# --- The messages of a layer as one operation: static memory, launches ---

_BLOCK = 256


class LaunchShapes(NamedTuple):
    """Heads and edges of a tile of the forward and of the backward kernel, and warps of a program."""

    heads: int
    edges: int
    edges_backward: int
    warps: int


@dataclass(eq=False)
class Buffers:
    """Static memory of a network for N atoms and C edges.

    Attributes:
        energy [N], forces [N, 3], virial [N, 9]: results, see `Buffers`.
        knot [C] int32, offset [C], unit [C, 3], inverse [C]: of each edge, see `place_kernel`.
        pull [slices, N, 3], virials [slices, N, 9]: what the backward kernels add to.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor
    knot: Tensor
    offset: Tensor
    unit: Tensor
    inverse: Tensor
    pull: Tensor
    virials: Tensor

    @classmethod
    def allocate(cls, num_atoms: int, capacity: int, slices: int, device: torch.device) -> Buffers:
        """Return zeros."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n, edges = num_atoms, capacity
        return cls(
            new(n), new(n, 3), new(n, 9), new(edges, dtype=torch.int32), new(edges), new(edges, 3), new(edges),
            new(slices, n, 3), new(slices, n, 9),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values())


@dataclass(eq=False)
class Pass:
    """One evaluation: edges in their places, and where gradients go.

    Attributes:
        anchor: [1], requires a gradient: autograd then walks through all layers back to it.
    """

    buffers: Buffers
    shapes: LaunchShapes
    edges: Edges
    with_virial: bool
    anchor: Tensor

    @classmethod
    def begin(
        cls, buffers: Buffers, shapes: LaunchShapes, edges: Edges, with_virial: bool, table: FilterTable, knots: Tensor
    ) -> Pass:
        """Find the edges' places in the tables and set the sums to zero."""
        num_atoms, b = edges.row_ptr.shape[0] - 1, buffers
        place_kernel[(triton.cdiv(b.knot.shape[0], _BLOCK),)](
            edges.row_ptr, edges.vectors, knots, b.knot, b.offset, b.unit, b.inverse, num_atoms, table.decay,
            table.scale, KNOTS=table.num_knots, BLOCK=_BLOCK, **FUSED_ARITHMETIC,
        )  # fmt: skip
        b.pull.zero_()
        if with_virial:
            b.virials.zero_()
        anchor = torch.zeros(1, device=b.pull.device, requires_grad=True)
        return cls(buffers, shapes, edges, with_virial, anchor)


class Messages:
    """The messages of one layer.

    Args:
        table: [K, 4, P, F], see the kernels above.
        head_size: channels of a head.
        own: atoms send a message to themselves.
    """

    def __init__(self, table: Tensor, head_size: int, own: bool):
        self.table, self.head_size, self.own = table, head_size, own
        self.parts, self.channels = table.shape[2:]
        self.attention, self.vectors = self.parts > 1, self.parts == 4

    def __call__(self, run: Pass, qkv: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x [N, F] and w [N, 3, F] (empty without vectors) from qkv [N, W] and w [N, 3, F]."""
        return _Apply.apply(self, run, run.anchor, qkv.contiguous(), qkv if w is None else w.contiguous())

    def options(self, qkv: Tensor, shapes: LaunchShapes) -> tuple[tuple[int, int], dict[str, Any]]:
        """Return the grid and constants of a launch."""
        heads = min(shapes.heads, self.channels // self.head_size)
        return (qkv.shape[0], self.channels // (heads * self.head_size)), {
            "F": self.channels, "D": self.head_size, "P": self.parts, "W": qkv.shape[1], "BH": heads, "OWN": self.own,
            "ATTENTION": self.attention, "VECTORS": self.vectors, "num_warps": shapes.warps, **FUSED_ARITHMETIC,
        }  # fmt: skip


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Messages, run: Pass, anchor: Tensor, qkv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        num_atoms = qkv.shape[0]
        x = qkv.new_empty(num_atoms, op.channels)
        w_out = qkv.new_empty(num_atoms if op.vectors else 0, 3, op.channels)
        b, edges = run.buffers, run.edges
        grid, constants = op.options(qkv, run.shapes)
        message_kernel[grid](
            edges.row_ptr, edges.sender, b.knot, b.offset, b.unit, op.table, qkv, w, x, w_out, num_atoms,
            BE=run.shapes.edges, **constants,
        )  # fmt: skip
        ctx.op, ctx.run = op, run
        ctx.save_for_backward(qkv, w)
        return x, w_out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        op, run, (qkv, w) = ctx.op, ctx.run, ctx.saved_tensors
        dx, dw = (g.contiguous() for g in gradients)
        b, edges = run.buffers, run.edges
        dqkv = torch.empty_like(qkv)
        # without vectors the kernel writes no gradient of w: any pointer will do
        dw_in = torch.empty_like(w) if op.vectors else dqkv
        grid, constants = op.options(qkv, run.shapes)
        # layers come one after the other on one stream, so that they can add to the same sums
        message_backward_kernel[grid](
            edges.row_ptr, edges.sender, b.knot, b.offset, b.unit, b.inverse, edges.vectors, op.table, qkv, w, dx, dw,
            dqkv, dw_in, b.pull, b.virials, qkv.shape[0], BE=run.shapes.edges_backward, VIRIAL=run.with_virial,
            **constants,
        )  # fmt: skip
        return None, None, None, dqkv, dw_in if op.vectors else None


# --- The three models with messages on kernels; operations of single atoms are PyTorch's ---

_SMALL = 512  # atoms; below, a group of heads for each program, so that the device is filled


class _Network(Network):
    """A representation with its head.

    Args:
        representation, head: copied.
        energy_scale: eV per unit of the head.
        device: CUDA (the CPU under Triton's interpreter).

    Attributes:
        model, head: the copies.
    """

    def __init__(self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device):
        self.device, self.energy_scale = device, energy_scale
        self.model: Any = copy.deepcopy(representation).eval().requires_grad_(False)
        self.head: Any = copy.deepcopy(head).eval().requires_grad_(False)
        exact: Any = copy.deepcopy(self.model).cpu().double()
        filters = self._filters(exact)
        embedding = exact.neighbor_embedding
        if embedding is not None:
            filters.append(partial(_times_cutoff, exact, embedding.distance_proj))
        with torch.no_grad():
            self.table, segments = fit_tables(exact.cutoff, [(f, False) for f in filters])
            self.knots = self.table.distances().float().to(device)
            tables = [table.float().contiguous().to(device) for table in segments]
        size = self._head_size()
        self.neighbors = Messages(tables.pop(), size, False) if embedding is not None else None
        self.messages = [Messages(table, size, self._own) for table in tables]

    allocates = True
    _own = True

    @abstractmethod
    def _filters(self, exact: Any) -> list[Filters]:
        """Radial filters of each layer, [K] → [K, P, F]."""

    @abstractmethod
    def _head_size(self) -> int:
        """Return the number of channels of a head."""

    @abstractmethod
    def _features(self, run: Pass, x: Tensor) -> Features:
        """Return features from those of the elements, x [N, F]."""

    def launch_shapes(self, num_atoms: int) -> LaunchShapes:
        return LaunchShapes(1, 8, 4, 1) if num_atoms < _SMALL else LaunchShapes(8, 4, 2, 4)

    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> Buffers:
        size = self._head_size()
        heads = self.model.hidden_channels // size
        return Buffers.allocate(num_atoms, capacity, heads // min(shapes.heads, heads), self.device)

    def run(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool = False) -> None:
        run = Pass.begin(buffers, shapes, edges, with_virial, self.table, self.knots)
        with torch.enable_grad():
            x = self.model.embedding(atoms.z)
            embedding = self.model.neighbor_embedding
            if embedding is not None and self.neighbors is not None:
                sums, _ = self.neighbors(run, embedding.embedding(atoms.z))
                x = embedding.combine(torch.cat([x, sums], 1))
            features = self._features(run, x)
            energy = self._energies(features) * self.energy_scale
            # what it gives lies in the buffers
            torch.autograd.grad(energy.sum(), run.anchor, allow_unused=True)
        buffers.energy.copy_(energy.detach())
        # over groups of heads, which different programs hold
        torch.sum(buffers.pull, 0, out=buffers.forces)
        if with_virial:
            torch.sum(buffers.virials, 0, out=buffers.virial)

    def _energies(self, features: Features) -> Tensor:
        """Return the energies [N] in the head's unit."""
        network = self.head.output_network
        return network(features)[0] if isinstance(self.head, EquivariantScalarHead) else network(features.x).squeeze(1)


def _cut(exact: Any, d: Tensor) -> Tensor:
    """Return the cutoff function, [K, 1]."""
    return exact.envelope(d)[:, None]


def _times_cutoff(exact: Any, network: nn.Module, d: Tensor) -> Tensor:
    """Return a network of the radial basis times the cutoff function, [K, 1, F]."""
    return (network(exact.distance_expansion(d)) * _cut(exact, d))[:, None]


def _side_by_side(linears: Sequence[nn.Linear], order: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of several linear maps of the same input as one, with their outputs in the given order."""
    weights = [m.weight if o is None else m.weight[o] for m, o in zip(linears, order, strict=True)]
    biases = [m.bias if o is None or m.bias is None else m.bias[o] for m, o in zip(linears, order, strict=True)]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class GraphNetworkNetwork(_Network):
    """The graph network with the aggregation "add"."""

    _own = False

    def _filters(self, exact: Any) -> list[Filters]:
        return [partial(_times_cutoff, exact, block.mlp) for block in exact.interactions]

    def _head_size(self) -> int:
        return min(16, self.model.hidden_channels)

    def _features(self, run: Pass, x: Tensor) -> Features:
        for block, messages in zip(self.model.interactions, self.messages, strict=True):
            sums, _ = messages(run, block.conv.lin1(x))
            x = x + block.lin(block.act(block.conv.lin2(sums)))
        return Features(x)


class TransformerNetwork(_Network):
    """The Transformer."""

    def __init__(self, representation: nn.Module, head: nn.Module, energy_scale: float, device: torch.device):
        super().__init__(representation, head, energy_scale, device)
        layers = self.model.attention_layers
        self.qkv = [_side_by_side((m.q_proj, m.k_proj, m.v_proj), (None, None, self._value_order())) for m in layers]

    def _value_order(self) -> Tensor | None:
        """Return the places of the values of all heads for each part of them; None if there is one part."""
        return None

    def _filters(self, exact: Any) -> list[Filters]:
        return [partial(self._layer_filters, exact, layer) for layer in exact.attention_layers]

    def _layer_filters(self, exact: Any, layer: Any, d: Tensor) -> Tensor:
        """Return filters [K, 2, F]: keys, and values times the cutoff function."""
        keys, values = self._projections(exact, layer, d, 1)
        return torch.stack([keys, values[:, 0] * _cut(exact, d)], 1)

    def _projections(self, exact: Any, layer: Any, d: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Return factors of the keys [K, F] and of the values [K, parts, F]."""
        rbf = exact.distance_expansion(d)
        ones = torch.ones(d.shape[0], parts * exact.hidden_channels, dtype=d.dtype) + 0 * d[:, None]
        keys = ones[:, : exact.hidden_channels] if layer.dk_proj is None else layer.act(layer.dk_proj(rbf))
        values = ones if layer.dv_proj is None else layer.act(layer.dv_proj(rbf))
        order = self._value_order()
        return keys, (values if order is None else values[:, order.cpu()]).unflatten(1, (parts, -1))

    def _head_size(self) -> int:
        return self.model.hidden_channels // self.model.attention_layers[0].num_heads

    def _features(self, run: Pass, x: Tensor) -> Features:
        for layer, messages, qkv in zip(self.model.attention_layers, self.messages, self.qkv, strict=True):
            sums, _ = messages(run, functional.linear(layer.layernorm(x), *qkv))
            x = x + layer.o_proj(sums)
        return Features(self.model.out_norm(x))


class EquivariantTransformerNetwork(TransformerNetwork):
    """The Equivariant Transformer."""

    def _value_order(self) -> Tensor:
        heads = self.model.attention_layers[0].num_heads
        places = torch.arange(3 * self.model.hidden_channels, device=self.device)
        return places.view(heads, 3, -1).transpose(0, 1).flatten()  # each head has its three parts together

    def _layer_filters(self, exact: Any, layer: Any, d: Tensor) -> Tensor:
        """Return filters [K, 4, F]: keys, and the three parts of the values."""
        keys, values = self._projections(exact, layer, d, 3)
        cut = _cut(exact, d)
        # without `vector_cutoff` the attention alone goes to zero
        vectors = values[:, 1:] * cut[:, None] if layer.vector_cutoff else values[:, 1:]
        return torch.cat([keys[:, None], values[:, :1] * cut[:, None], vectors], 1)

    def _features(self, run: Pass, x: Tensor) -> Features:
        w = x.new_zeros(x.shape[0], 3, x.shape[1])
        for layer, messages, qkv in zip(self.model.attention_layers, self.messages, self.qkv, strict=True):
            sums, vectors = messages(run, functional.linear(layer.layernorm(x), *qkv), w)
            o1, o2, o3 = layer.o_proj(sums).chunk(3, 1)
            w1, w2, w3 = layer.vec_proj(w).chunk(3, 2)
            x = x + (w1 * w2).sum(1) * o2 + o3
            w = w + w3 * o1[:, None] + vectors
        return Features(self.model.out_norm(x), w)
