"""TensorNet2 energy, forces and charges on the CPU: numba kernels over CSR rows, forward and hand-written backward.

TensorNet's kernels are used where the mathematics is the same. TensorNet2 has further kernels for the prediction of
charges, and for messages, whose filters depend on charges. Charges are equilibrated over structures in float64, see
triton_charges.py:

c, f = MLP(LN(I, ‖A‖², ‖S‖²));  q = c + u m,  u = f² + ε,  m = (Q − Σc)/U,  U = Σu. Backwards, with T = Σ (dE/dq) u:

    dE/dc = dE/dq − T/U,    dE/df = 2 f m dE/dc.

One thread does this in the order of the atoms, since it is a small part of a step.

Shapes: N atoms in B structures, E directed edges, F channels, L layers, C charge channels, of which K are real.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...core.compiling_cpu import compiled, kernel, kernel_family
from ...kernels.interfaces import Array, Atoms, CpuBuffers, Edges
from ...kernels.numba_products import (
    LANES,
    ROWS,
    TILE_ROWS,
    TILES,
    VECTOR,
    call,
    dense,
    dense_block,
    fetch_row,
    inline,
    load,
    panels,
    repeat,
    store,
    tiles,
    total,
)
from ..tensornet.cpu import BufferPool, CpuTensorNet, Fields, Shape, chunks
from ..tensornet.numba_kernels import (
    ONE,
    THREE,
    add,
    ascend,
    descend,
    layer_norm,
    layer_norm_adjoint,
    load9,
    lower_bound,
    mix,
    norm_gradient,
    normalise_adjoint,
    part_norms,
    scale,
    sigmoid,
    silu,
    silu_and_slope,
    silu_slope,
    store9,
)
from .weights import FilterWeights, FrozenTensorNet2

__all__ = [
    "SLOTS",
    "CpuTensorNet2",
    "Float32TensorNet2",
    "Kernels",
    "add_messages",
    "charge_rows",
    "equilibrate",
    "equilibrate_adjoint",
    "first_layer",
    "first_slope",
    "gather_slopes",
    "gradient_layers",
    "kernels",
    "layers",
    "message_adjoints",
    "prepare_edges",
    "whole",
]


_MOST_KEPT = 1 << 27
"""Numbers of the filters' layers that are kept for the gradient, 512 MB; those of further layers are computed again."""


class Float32TensorNet2(FrozenTensorNet2):
    """The weights in float32."""

    _operand = staticmethod(lambda w: w)


class CpuTensorNet2(CpuTensorNet):
    """Runs a frozen TensorNet2 over CSR rows on the CPU. As `CpuTensorNet`."""

    def __init__(self, weights: Float32TensorNet2):
        self.charge_channels = weights.charge_channels
        super().__init__(weights)
        w = weights
        self.own = kernels(w.channels, w.charge_channels, w.is_o3)
        self.cutoff, self.q_dim, self.exact_charge = w.cutoff, w.q_dim, w.exact_charge
        self.norm_eps = np.float32(w.norm_eps)
        self.filters = [_filter_arrays(f) for f in w.filters]
        self.charge_networks = [_arrays(c) for c in w.charge_networks]

    def _new_pool(self) -> BufferPool:
        return _BufferPool(self.channels, self.num_layers, len(self.heads_t), self.charge_channels)

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return the total charge itself, which acts through the predicted charges alone."""
        return charge

    def work(self, atoms: Atoms, edges: Edges) -> tuple[int, int]:
        # twice the filters' 16 F² operations, of which a unit is about 2 F
        filters = 16 * self.channels**2 * int(edges.row_ptr[-1]) * self.num_layers // 100
        work, most = super().work(atoms, edges)
        return work + filters, most

    def predict(self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        layers, k = self.num_layers, self.own
        rows, r = self._begin(atoms, edges)
        n = rows.num_atoms
        r.charges[n:], r.gradient_of_charges[n:] = 0, 0
        prepare_edges(n, *rows[1:], edges.vectors, self.cutoff, r.receiver, r.reverse, r.envelope, r.envelope_slope)
        structures = [np.empty((2, len(atoms.total_charge), self.charge_channels)) for _ in range(layers + 1)]
        charges = self._predict(r, atoms, structures, 0)
        for i in range(layers):
            after = min(i + 1, layers - 1)
            charge_rows(len(r.charges), r.charges, self.filters[i].charges, r.by_charge[i])
            k.interaction(
                chunks(r), *rows, r.receiver, r.envelope, r.knot, r.offset, *self._filters(r, i), r.q,
                self.mix_out[i][0], self.mix_in[after][0], i + 1 == layers, buffers.with_forces and r.kept[i] > 0,
                r.x[i], r.y[i], r.m[i], r.d[i], r.x[i + 1], r.inverse[i + 1], r.y[after], r.kept2[i], r.kept3[i],
            )  # fmt: skip
            charges = self._predict(r, atoms, structures, i + 1)
        buffers.energy = self._read_out(r)[:n, 0].copy()
        of_head, buffers.features = self._charges_of_head(r, atoms), self._features(r, n)
        buffers.charges = charges if of_head is None else of_head
        buffers.state = rows, r, structures

    def differentiate(
        self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool,
        charge_slope: Array | None,
    ) -> None:  # fmt: skip
        layers, k, slope = self.num_layers, self.own, charge_slope
        rows, r, structures = buffers.state
        n, found = rows.num_atoms, int(edges.row_ptr[-1])
        self._read_out_backward(r, atoms, slope, False)
        if self.has_charges:
            slope = None  # which has gone into the features
        r.slope[:found] = 0
        if slope is not None:
            r.charge_slope[:n], r.charge_slope[:n, : self.q_dim] = 0, slope[:, None] / self.q_dim
            self._charge_gradient(r, atoms, structures, layers)
        for i in reversed(range(layers)):
            self._update_backward(r, i + 1, slope is not None or i + 1 < layers)
            f = self.filters[i]
            k.message_backward(
                chunks(r), *rows, r.receiver, r.reverse, r.envelope, r.envelope_slope, r.knot, r.offset,
                *self._filters(r, i), f.second_t, f.third_t, f.charges_t, self.mix_in[i][1], r.kept[i] > 0,
                r.kept2[i], r.kept3[i], r.x[i], r.inverse[i], r.y[i], r.dm[i], r.dy, r.slope, r.g, r.own_slope,
                r.pair_slope,
            )  # fmt: skip
            gather_slopes(n, edges.row_ptr, r.reverse, r.own_slope, r.pair_slope, r.charge_slope)
            self._charge_gradient(r, atoms, structures, i)
        self._update_backward(r, 0, True)
        self._embedding_backward(rows, r)
        self._add_up(buffers, rows, r, atoms, edges)

    def _filters(self, r: Any, layer: int) -> tuple[Array, ...]:
        f = self.filters[layer]
        table, own = self.layer_tables[layer], self.layer_self[layer]
        return table, own, r.by_charge[layer], f.second, f.second_bias, f.third, f.third_bias

    def _predict(self, r: Any, atoms: Atoms, structures: list[Array], stage: int) -> Array:
        """Compute charges of a stage into r.charges; return their means over the channels."""
        net = self.charge_networks[stage]
        self.own.predict(
            chunks(r), net.gamma, net.beta, self.norm_eps, net.first, net.first_bias, net.second, net.second_bias,
            net.third, net.third_bias, r.x[stage], r.inverse[stage], r.in_hidden[stage], r.out_hidden[stage],
            r.predicted[stage],
        )  # fmt: skip
        weight, missing = structures[stage]
        return equilibrate(
            r.predicted[stage], atoms.batch, atoms.total_charge, self.exact_charge, self.q_dim, weight, missing,
            r.charges,
        )  # fmt: skip

    def _charge_gradient(self, r: Any, atoms: Atoms, structures: list[Array], stage: int) -> None:
        """Compute the gradient of what the charges of a stage are made of, from r.charge_slope."""
        weight, missing = structures[stage]
        equilibrate_adjoint(
            r.predicted[stage], atoms.batch, self.exact_charge, weight, missing, r.charge_slope, r.gradient_of_charges
        )

    def _update_backward(self, r: Any, stage: int, charged: bool) -> None:
        """Compute the gradient through the charges of a stage, then that of the products of the layer before."""
        net, before = self.charge_networks[stage], max(stage - 1, 0)
        self.own.update_backward(
            chunks(r), net.gamma, self.norm_eps, net.first_t, net.second_t, net.third_t, charged, stage > 0,
            r.gradient_of_charges, r.in_hidden[stage], r.out_hidden[stage], r.x[stage], r.inverse[stage], r.g,
            self.mix_out[before][1], r.q, r.d[before], r.y[before], r.m[before], r.dm[before], r.dy,
        )  # fmt: skip


def _arrays(weights: Any) -> Any:
    """Return the same tuple, of arrays; matrices as panels."""
    return type(weights)(*(panels(t.numpy()) if t.dim() > 1 else t.numpy() for t in weights))


def _filter_arrays(weights: FilterWeights) -> Any:
    """Return the weights of filters as arrays; the matrices of their products as tiles where there are such."""
    stored = tiles if TILES else panels
    names = "second", "second_t", "third", "third_t", "charges_t"
    products = {name: stored(getattr(weights, name).numpy()) for name in names}
    return _arrays(weights)._replace(charges=weights.charges.numpy(), **products)


class _Fields(Fields):
    """Arrays of TensorNet, of the stages of charges, 0 … L, and of the filters of each layer.

    Attributes:
        kept: [L] integers, whether kept2 [≥ E + N, 2F] and kept3 [≥ E + N, 3F] of a layer are large enough: for all
            edges and, after them, the messages of atoms to themselves. They hold the slopes of the second activation,
            and what the third acts on.
    """

    receiver: Array
    reverse: Array
    envelope: Array
    envelope_slope: Array
    pair_slope: Array
    own_slope: Array
    charges: Array
    charge_slope: Array
    gradient_of_charges: Array
    in_hidden: list[Array]
    out_hidden: list[Array]
    predicted: list[Array]
    by_charge: list[Array]
    kept: Array
    kept2: list[Array]
    kept3: list[Array]


class _BufferPool(BufferPool):
    fields = _Fields
    integers = BufferPool.integers | {"receiver", "reverse"}
    doubles = frozenset(("charge_slope",))
    listed = BufferPool.listed | {"in_hidden", "out_hidden", "predicted", "by_charge"}

    def __init__(self, channels: int, layers: int, heads: int, charge_channels: int):
        super().__init__(channels, layers, heads)
        self.charge_channels = charge_channels

    def _shapes(self, rows: int, edges: int, ghosts: int) -> dict[str, Shape]:
        f, c, layers = self.channels, self.charge_channels, self.layers
        return {
            **super()._shapes(rows, edges, ghosts),
            **dict.fromkeys(("receiver", "reverse", "envelope", "envelope_slope"), (edges,)),
            "pair_slope": (edges, c),
            **dict.fromkeys(("own_slope", "charges", "charge_slope"), (rows, c)),
            "gradient_of_charges": (rows, 2 * c),
            **dict.fromkeys(("in_hidden", "out_hidden"), (layers + 1, rows, f)),
            "predicted": (layers + 1, rows, 2 * c),
            "by_charge": (layers, rows, 2 * f),
        }

    def _allocate(self, rows: int, edges: int, ghosts: int) -> Fields:
        fields: Any = super()._allocate(rows, edges, ghosts)
        f = self.channels
        fit = min(self.layers, _MOST_KEPT // max(5 * f * (edges + rows), 1))
        fields.kept = np.arange(self.layers) < fit
        sizes = [edges + rows if kept else 0 for kept in fields.kept]
        fields.kept2 = [np.empty((size, 2 * f), np.float32) for size in sizes]
        fields.kept3 = [np.empty((size, 3 * f), np.float32) for size in sizes]
        return fields


_SOFTENING = 1e-6


@compiled(error_model="numpy")
def equilibrate(predicted, batch, total_charge, exact, real, weight, missing, charges):
    """From `predicted` [N, 2C], c beside f: weight [B, C] U, missing [B, C] m, charges [N, C] q in float32.

    Returns:
        [N] float64 e, the mean of q over the K = `real` channels.
    """
    n, num, channels = len(batch), len(total_charge), charges.shape[1]
    softening = _SOFTENING if exact else 0.0
    for b in range(num):
        for k in range(channels):
            weight[b, k], missing[b, k] = _SOFTENING - softening, total_charge[b]
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            weight[b, k] += f * f + softening
            missing[b, k] -= np.float64(predicted[i, k])
    for b in range(num):
        for k in range(channels):
            weight[b, k] = max(weight[b, k], 1e-300)
            missing[b, k] /= weight[b, k]
    mean = np.zeros(n)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            q = np.float64(predicted[i, k]) + (f * f + softening) * missing[b, k]
            charges[i, k] = q
            if k < real:
                mean[i] += q / real
    return mean


@compiled(error_model="numpy")
def equilibrate_adjoint(predicted, batch, exact, weight, missing, slope, gradient):
    """gradient [N, 2C] float32 of `predicted` from slope = dE/dq [N, C] float64."""
    n, channels = len(batch), slope.shape[1]
    softening = _SOFTENING if exact else 0.0
    sums = np.zeros(weight.shape)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            sums[b, k] += slope[i, k] * (f * f + softening)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            dc = slope[i, k] - sums[b, k] / weight[b, k]
            gradient[i, k] = dc
            gradient[i, channels + k] = 2 * np.float64(predicted[i, channels + k]) * missing[b, k] * dc


# --- The filters of TensorNet2 on the CPU, for SLOTS edges at a time: numba functions ---
#
# A filter is a network F → 2F → 3F on every directed edge. Its first layer is linear in the radial basis and the
# charges: a cubic from a table of the distance, and one row of numbers per atom for the receiver and one for the
# sender.

SLOTS = 2 * TILE_ROWS if TILES else 16
"""Edges at a time: weights are read once for all of them, and results stay in the cache."""

ZERO = np.float32(0)


@call
def first_layer(table, knot, t, by_charge, receiver, sender, h, s, F):
    """Row s of h [., F], of one edge: the cubic of the segment `knot` at t, and the charges' shares of both atoms."""
    for c in range(F):
        cubic = table[knot, c] + t * (table[knot, c + F] + t * (table[knot, c + 2 * F] + t * table[knot, c + 3 * F]))
        h[s, c] = cubic + (by_charge[receiver, c] + by_charge[sender, c + F])


@call
def self_layer(own, by_charge, i, h, s, F):
    """Row s of h [., F], of an atom's own message."""
    for c in range(F):
        h[s, c] = own[c] + (by_charge[i, c] + by_charge[i, c + F])


@inline
def whole(slots):
    """The number of rows that products take for so many edges; what those beyond them hold does not matter."""
    return -(-slots // ROWS) * ROWS


@call
def layers(slots, h1, active1, w2, b2, h2, active2, w3, b3, h3, at, parts, F):
    """h3 from h1, and in h2 the slopes of the second activation, both from row `at` on."""
    silu(h1, 0, active1, 0, slots, F)
    dense_block(active1, 0, w2, b2, h2, at, F, 2 * F, whole(slots), parts)
    silu_and_slope(h2, at, active2, 0, slots, 2 * F)
    dense_block(active2, 0, w3, b3, h3, at, 2 * F, 3 * F, whole(slots), parts)


@call
def gradient_layers(slots, g3, w3t, slope2, row, g2, w2t, h1, g1, none, parts, F):
    """g1 [slots, F], the gradient of h1, from g3, that of h3; slope2 has the slopes, in rows `row`."""
    dense_block(g3, 0, w3t, none, g2, 0, 3 * F, 2 * F, whole(slots), parts)
    for s in range(slots):
        o, i = s * 2 * F, row[s] * 2 * F
        for c in range(0, 2 * F, VECTOR):
            store(g2, o + c, load(g2, o + c) * load(slope2, i + c))
    dense_block(g2, 0, w2t, none, g1, 0, 2 * F, F, whole(slots), parts)
    silu_slope(h1, 0, g1, 0, slots, F)


@inline
def end_of_run(receiver, first, stop):
    """The end of the edges from the first one on that have its receiver."""
    end = first + 1
    while end < stop and receiver[end] == receiver[first]:
        end += 1
    return end


@inline
def load3(x, at, F):
    """VECTOR channels of three components."""
    return load(x, at), load(x, at + F), load(x, at + 2 * F)


@inline
def load5(x, at, F):
    """The same of five."""
    return load(x, at), load(x, at + F), load(x, at + 2 * F), load(x, at + 3 * F), load(x, at + 4 * F)


@inline
def store3(x, at, F, x0, x1, x2):
    """Write what `load3` would read."""
    store(x, at, x0)
    store(x, at + F, x1)
    store(x, at + 2 * F, x2)


@inline
def store5(x, at, F, x0, x1, x2, x3, x4):
    """Write what `load5` would read."""
    store3(x, at, F, x0, x1, x2)
    store(x, at + 3 * F, x3)
    store(x, at + 4 * F, x4)


@call
def add_messages(first, stop, other, cut, h, at, f, y, m, i, F):
    """M_i += Σ cut · silu(h) ⊙ Y_j, for slots first … stop with the atoms j = `other`; h has them from row `at` on.

    f [slots, 3F] is scratch. The sums of VECTOR channels stay in registers for all slots.
    """
    silu(h, at + first, f, first, stop - first, 3 * F)
    for s in range(first, stop):
        o, factor = s * 3 * F, repeat(cut, s)
        for c in range(0, 3 * F, VECTOR):
            store(f, o + c, load(f, o + c) * factor)
    for c in range(0, F, VECTOR):
        o = i * 9 * F + c
        m0 = load(m, o)
        m1, m2, m3 = load3(m, o + F, F)
        m4, m5, m6, m7, m8 = load5(m, o + 4 * F, F)
        for s in range(first, stop):
            k, j = s * 3 * F + c, other[s] * 9 * F + c
            g = load(f, k)
            m0 = m0 + g * load(y, j)
            g, (y0, y1, y2) = load(f, k + F), load3(y, j + F, F)
            m1, m2, m3 = m1 + g * y0, m2 + g * y1, m3 + g * y2
            g, (y0, y1, y2, y3, y4) = load(f, k + 2 * F), load5(y, j + 4 * F, F)
            m4, m5, m6, m7, m8 = m4 + g * y0, m5 + g * y1, m6 + g * y2, m7 + g * y3, m8 + g * y4
        store(m, o, m0)
        store3(m, o + F, F, m1, m2, m3)
        store5(m, o + 4 * F, F, m4, m5, m6, m7, m8)


@inline
def through_filter(s, c, row, by_filter, cut, h, g, along, F):
    """Return VECTOR channels of the filter of a slot, from h and its sigmoids in g.

    by_filter is ⟨dM, Y⟩. The gradient of h replaces the sigmoids; that of the cutoff function is added to along
    [slots, VECTOR].
    """
    k = s * 3 * F + c
    factor, sigma = repeat(cut, s), load(g, k)
    active = sigma * load(h, row * 3 * F + c)
    store(along, s * VECTOR, load(along, s * VECTOR) + active * by_filter)
    store(g, k, factor * by_filter * (sigma + active - active * sigma))
    return factor * active


@call
def message_adjoints(first, stop, other, cut, h, row, g, dm, y, dy, i, along, F):
    """Backwards from dM_j, for the slots of `add_messages`: dY_i += filter ⊙ dM_j, g [slots, 3F] the gradient of h.

    h has the slots in rows `row`. The sums of along [slots, VECTOR] are the gradient of `cut`. The parts I, A and S
    come one after another, since the registers of AVX2 do not hold them together.
    """
    for s in range(first, stop):
        sigmoid(h, row[s], g, s, 1, 3 * F)
        for k in range(VECTOR):
            along[s, k] = ZERO
    for c in range(0, F, VECTOR):
        o = i * 9 * F + c
        d0, y0 = load(dy, o), load(y, o)
        for s in range(first, stop):
            x0 = load(dm, other[s] * 9 * F + c)
            f = through_filter(s, c, row[s], x0 * y0, cut, h, g, along, F)
            d0 = d0 + f * x0
        store(dy, o, d0)
        o += F
        (d0, d1, d2), (y0, y1, y2) = load3(dy, o, F), load3(y, o, F)
        for s in range(first, stop):
            x0, x1, x2 = load3(dm, other[s] * 9 * F + F + c, F)
            f = through_filter(s, c + F, row[s], x0 * y0 + x1 * y1 + x2 * y2, cut, h, g, along, F)
            d0, d1, d2 = d0 + f * x0, d1 + f * x1, d2 + f * x2
        store3(dy, o, F, d0, d1, d2)
        o += 3 * F
        (d0, d1, d2, d3, d4), (y0, y1, y2, y3, y4) = load5(dy, o, F), load5(y, o, F)
        for s in range(first, stop):
            x0, x1, x2, x3, x4 = load5(dm, other[s] * 9 * F + 4 * F + c, F)
            dot = x0 * y0 + x1 * y1 + x2 * y2 + x3 * y3 + x4 * y4
            f = through_filter(s, c + 2 * F, row[s], dot, cut, h, g, along, F)
            d0, d1, d2, d3, d4 = d0 + f * x0, d1 + f * x1, d2 + f * x2, d3 + f * x3, d4 + f * x4
        store5(dy, o, F, d0, d1, d2, d3, d4)


@call
def first_slope(table, knot, t, g, s, F):
    """Return the derivative by the distance through the cubic; row s of g [., F] is the gradient of h1."""
    along = ZERO
    for c in range(F):
        second, third = table[knot, c + 2 * F], table[knot, c + 3 * F]
        along += g[s, c] * (table[knot, c + F] + t * ((second + second) + t * (THREE * third)))
    return along


# --- The further kernels of TensorNet2: prediction of charges, messages, and their gradients ---
#
# As in tensornet/cpu.py, threads divide the atoms, ROWS at a time, and each atom writes its rows alone. The gradient of
# messages sums over reverse edges: with g_ji the filter of the message i → j, dY_i = Σ_j g_ji dM_j. The slope of the
# charges of j is written for each edge, and gathered afterwards by the index of the reverse edge, since it belongs to
# the row of j.


class Kernels(NamedTuple):
    """The kernels in the order of a step; the last two follow the layers backwards."""

    predict: Callable
    interaction: Callable
    update_backward: Callable
    message_backward: Callable


@inline
def charge_features(x_row, f_row, out, F):
    """I, ‖A‖², ‖S‖² [3F] of X, of which X/(‖X‖²+1) and 1/(‖X‖²+1) are kept."""
    for c in range(F):
        x9 = scale(ONE / f_row[c], load9(x_row, c, F))
        _i, a, s = part_norms(x9)
        out[c], out[c + F], out[c + 2 * F] = x9[0], a, s


@kernel_family
def kernels(F: int, C: int, o3: bool) -> Kernels:
    """Kernels for F channels and C charge channels. Compiled on first use, and kept in numba's cache on disk.

    What they close over are numbers: numba finds no kernel on disk that closes over a compiled function.
    """

    @kernel
    def predict(begin, stop, gamma, beta, eps, w1, b1, w2, b2, w3, b3, x, inverse, h1, h2, out):
        """What charges are made of, out [N, 2C], from X; h1, h2 [N, F] are what the activations act on."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            features, normed = np.empty(3 * F, np.float32), np.empty((ROWS, 3 * F), np.float32)
            active = np.empty((ROWS, F), np.float32)
            for r in range(ROWS):
                charge_features(x[first + r], inverse[first + r], features, F)
                layer_norm(features, gamma, beta, eps, normed[r], 3 * F)
            dense(normed, 0, w1, b1, h1, first, 3 * F, F)
            silu(h1, first, active, 0, ROWS, F)
            dense(active, 0, w2, b2, h2, first, F, F)
            silu(h2, first, active, 0, ROWS, F)
            dense(active, 0, w3, b3, out, first, F, 2 * C)

    @kernel
    def interaction(
        begin, stop,
        n, row_ptr, sender, receiver, envelope, knot, offset, table, self_first, by_charge, w2, b2, w3, b3,
        charge_factor, w_out, w_next, last, kept, x, y, m, d, x_next, inverse_next, y_next, kept2, kept3,
    ):  # fmt: skip
        """M with filters that depend on the charges, then as TensorNet's. `kept`: what `layers` gives in h2 [E, 2F]
        and h3 [E, 3F] is stored for the gradient."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            h1, a1 = np.empty((SLOTS, F), np.float32), np.zeros((SLOTS, F), np.float32)
            h2, a2 = np.empty((SLOTS, 2 * F), np.float32), np.zeros((SLOTS, 2 * F), np.float32)
            h3, f = np.empty((SLOTS, 3 * F), np.float32), np.empty((SLOTS, 3 * F), np.float32)
            other, own = np.empty(SLOTS, np.int64), np.empty(SLOTS, np.int64)
            cut, parts = np.empty(SLOTS, np.float32), np.empty((3, SLOTS, 3 * F), np.int16)
            m[first : first + ROWS] = ZERO
            start, end = row_ptr[min(first, n)], row_ptr[min(first + ROWS, n)]
            for begin in range(start - ROWS, end, SLOTS):
                slots = min(SLOTS, end - begin)
                for s in range(slots):
                    e = begin + s
                    if e < start:
                        other[s] = own[s] = first + ROWS + e - start
                        cut[s] = ONE
                        self_layer(self_first, by_charge, own[s], h1, s, F)
                        continue
                    other[s], own[s], cut[s] = sender[e], receiver[e], envelope[e]
                    first_layer(table, knot[e], offset[e], by_charge, own[s], other[s], h1, s, F)
                # rows beyond a block that is not full belong to another thread
                in_place = kept and slots == SLOTS and begin >= start
                of2, of3, at = (kept2, kept3, begin) if in_place else (h2, h3, 0)
                layers(slots, h1, a1, w2, b2, of2, a2, w3, b3, of3, at, parts, F)
                if kept and not in_place:
                    for s in range(slots):
                        e = begin + s if begin + s >= start else row_ptr[n] + own[s]
                        for c in range(2 * F):
                            kept2[e, c] = h2[s, c]
                        for c in range(3 * F):
                            kept3[e, c] = h3[s, c]
                s = 0
                while s < slots:
                    s1 = end_of_run(own, s, slots)
                    add_messages(s, s1, other, cut, of3, at, f, y, m, own[s], F)
                    s = s1
            ascend(first, y, m, x, charge_factor, w_out, w_next, last, d, x_next, inverse_next, y_next, F, o3)

    @kernel
    def update_backward(
        begin, stop,
        gamma, eps, w1t, w2t, w3t, charged, descends, gradient, h1, h2, x, inverse, g, w_out_t, charge_factor, d, y, m,
        dm, dy,
    ):  # fmt: skip
        """Add to g, the gradient of X, the part through the charges that X predicts, from the gradient [N, 2C] of c, f.

        Then g is complete, so that, if it `descends`, dM and the product's part of dY of the layer before follow.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            if charged:
                da, db = np.empty((ROWS, F), np.float32), np.empty((ROWS, F), np.float32)
                dnorm, features = np.empty((ROWS, 3 * F), np.float32), np.empty(3 * F, np.float32)
                none = np.zeros(3 * F, np.float32)
                dense(gradient, first, w3t, none, da, 0, 2 * C, F)
                silu_slope(h2, first, da, 0, ROWS, F)
                dense(da, 0, w2t, none, db, 0, F, F)
                silu_slope(h1, first, db, 0, ROWS, F)
                dense(db, 0, w1t, none, dnorm, 0, F, 3 * F)
                for r in range(ROWS):
                    x_row, f_row, f, g_row = x[first + r], inverse[first + r], dnorm[r], g[first + r]
                    charge_features(x_row, f_row, features, F)
                    layer_norm_adjoint(features, gamma, eps, f, 3 * F)
                    for c in range(F):
                        x9 = scale(ONE / f_row[c], load9(x_row, c, F))
                        g9 = add(load9(g_row, c, F), norm_gradient(x9, ZERO, f[c + F], f[c + 2 * F]))
                        store9(g_row, c, F, g9)
                        g_row[c] += f[c]
            if descends:
                descend(first, g, d, w_out_t, y, m, charge_factor, dm, dy, F, o3)

    @kernel
    def message_backward(
        begin, stop,
        n, row_ptr, sender, receiver, reverse, envelope, envelope_slope, knot, offset, table, self_first, by_charge,
        w2, b2, w3, b3, w2t, w3t, charges_t, w_in_t, kept, kept2, kept3, x, inverse, y, dm, dy, slope, g, own_slope,
        pair_slope,
    ):  # fmt: skip
        """Write dY from dM of the neighbors, then g, the gradient of X before this layer, which needs all of dY.

        For dE/dq write own_slope [N, C], and pair_slope [E, C] of the other atom of each edge.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            h1, a1 = np.empty((SLOTS, F), np.float32), np.zeros((SLOTS, F), np.float32)
            h2, a2 = np.empty((SLOTS, 2 * F), np.float32), np.zeros((SLOTS, 2 * F), np.float32)
            h3, g3 = np.empty((SLOTS, 3 * F), np.float32), np.zeros((SLOTS, 3 * F), np.float32)
            none, by_pair = np.zeros(2 * F + 2 * C, np.float32), np.empty((SLOTS, C), np.float32)
            dx, sent = np.empty((ROWS, 9 * F), np.float32), np.zeros((TILE_ROWS, F), np.float32)
            other, own = np.empty(SLOTS, np.int64), np.empty(SLOTS, np.int64)
            cut, parts = np.empty(SLOTS, np.float32), np.empty((3, SLOTS, 3 * F), np.int16)
            along, row = np.empty((SLOTS, VECTOR), np.float32), np.arange(SLOTS)
            own_slope[first : first + ROWS] = ZERO
            start, end = row_ptr[min(first, n)], row_ptr[min(first + ROWS, n)]
            of2, of3 = (kept2, kept3) if kept else (h2, h3)
            for begin in range(start - ROWS, end, SLOTS):
                slots = min(SLOTS, end - begin)
                for s in range(slots):
                    e = begin + s
                    if e < start:
                        other[s] = own[s] = first + ROWS + e - start
                        cut[s] = ONE
                        self_layer(self_first, by_charge, own[s], h1, s, F)
                    else:
                        other[s], own[s], cut[s] = sender[e], receiver[e], envelope[e]
                        first_layer(table, knot[e], offset[e], by_charge, other[s], own[s], h1, s, F)
                    if kept:
                        row[s] = reverse[e] if e >= start else row_ptr[n] + own[s]
                if not kept:
                    layers(slots, h1, a1, w2, b2, h2, a2, w3, b3, h3, 0, parts, F)
                s = 0
                while s < slots:
                    s1 = end_of_run(own, s, slots)
                    message_adjoints(s, s1, other, cut, of3, row, g3, dm, y, dy, own[s], along, F)
                    s = s1
                if kept:  # rows of the next block, which are anywhere, arrive during the products
                    for e in range(begin + slots, min(begin + slots + SLOTS, end)):
                        fetch_row(kept3, reverse[e], 3 * F)
                        fetch_row(kept2, reverse[e], 2 * F)
                gradient_layers(slots, g3, w3t, of2, row, a2, w2t, h1, a1, none, parts, F)
                dense_block(a1, 0, charges_t, none, by_pair, 0, F, C, whole(slots), parts)
                for s in range(slots):
                    e = begin + s
                    i, o = s * F, (own[s] - first) * F
                    for c in range(0, F, VECTOR):
                        store(sent, o + c, load(sent, o + c) + load(a1, i + c))
                    if e < start:
                        for k in range(C):
                            own_slope[own[s], k] = by_pair[s, k]
                        continue
                    by_cut = envelope_slope[e] * total(load(along, s * VECTOR))
                    slope[e] += by_cut + first_slope(table, knot[e], offset[e], a1, s, F)
                    for k in range(C):
                        pair_slope[e, k] = by_pair[s, k]
            dense_block(sent, 0, charges_t[C // LANES :], none, by_pair, 0, F, C, ROWS, parts)
            for r in range(ROWS):
                for k in range(C):
                    own_slope[first + r, k] += by_pair[r, k]
            mix(dy, first, w_in_t, dx, 0, F)
            for r in range(ROWS):
                i = first + r
                g_row, x_row, f_row, dx_row = g[i], x[i], inverse[i], dx[r]
                for c in range(F):
                    g9 = add(load9(dx_row, c, F), load9(g_row, c, F))
                    store9(g_row, c, F, normalise_adjoint(f_row[c], load9(x_row, c, F), g9))

    return Kernels(predict, interaction, update_backward, message_backward)


@kernel
def prepare_edges(begin, stop, row_ptr, sender, vec, cutoff, receiver, reverse, envelope, envelope_slope):
    """Receiver and reverse edge of each edge, the cutoff function and its slope; see `row_force` for the reverse."""
    for i in range(begin, stop):
        first, end = row_ptr[i], row_ptr[i + 1]
        while first < end:
            j, beyond = sender[first], first + 1
            while beyond < end and sender[beyond] == j:
                beyond += 1
            there = lower_bound(sender, row_ptr[j], row_ptr[j + 1], i) + (beyond - 1 - first)
            for e in range(first, beyond):
                x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
                half = 0.5 * math.pi * math.sqrt(x * x + y * y + z * z) / cutoff
                cos = math.cos(half)
                receiver[e], reverse[e], envelope[e] = i, there, cos * cos
                envelope_slope[e] = -math.pi / cutoff * cos * math.sin(half)
                there -= 1
            first = beyond


@kernel
def charge_rows(begin, stop, charges, weights, out):
    """out [N, 2F] = charges [N, C] @ weights [C, 2F]: what they add to the first layer of the filters."""
    for i in range(begin, stop):
        row = out[i]
        row[:] = ZERO
        for k in range(charges.shape[1]):
            q, w = charges[i, k], weights[k]
            for c in range(row.shape[0]):
                row[c] += q * w[c]


@kernel
def gather_slopes(begin, stop, row_ptr, reverse, own_slope, pair_slope, slope):
    """Write slope [N, C] float64, dE/dq, from the slopes of `message_backward`."""
    for i in range(begin, stop):
        row = slope[i]
        for k in range(row.shape[0]):
            row[k] = own_slope[i, k]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            other = pair_slope[reverse[e]]
            for k in range(row.shape[0]):
                row[k] += other[k]
