"""AIMNet2 energies, forces and charges on the CPU, in numba kernels.

The kernels are those of triton_kernels.py: radial functions, sums over neighbors, matrix products and their gradients.
Threads divide the atoms, in products also the columns. Each number is computed by one thread in one order, so that
results do not depend on the number of threads.

Shapes: N atoms in B structures, E directed edges, A features, R radial functions, H combinations, F = A·R.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...core.compiling_cpu import INNER, compiled, kernel
from ...kernels.interfaces import Array, Atoms, CpuBuffers, CpuNetwork, Edges
from ...kernels.numba_products import (
    LANES,
    PANELS,
    VECTOR,
    WIDE,
    adds_products,
    call,
    exp,
    load,
    panels,
    repeat,
    store,
    total,
    zeros,
)
from .weights import FrozenAIMNet2, Layer

__all__ = ["CpuAIMNet2", "convolve", "convolve_gradient", "find_edges", "multiply", "spread_gradient"]


_EPSILON = 1e-6


class _Layer(NamedTuple):
    """y = x W + b, GELU where `activated`. Panels of W [K, N] and of its transpose, b [1, N] and zeros [1, K]."""

    weight: Array
    transposed: Array
    bias: Array
    zeros: Array
    activated: bool


class _Part(NamedTuple):
    """Values that the neighbors send in a pass.

    Attributes:
        channels: C; size: C·R or more, so that vectors fit.
        combine: [C, R, H], and spread: [C, H, R], the last of them padded.
    """

    channels: int
    size: int
    combine: Array
    spread: Array

    @classmethod
    def of(cls, combine: Array) -> _Part:
        """Make it from the weights [C, R, H] that combine the radial functions."""
        channels, num_rbf, _ = combine.shape
        size = (channels - 1) * num_rbf + max(num_rbf, VECTOR)
        return cls(channels, -(-size // VECTOR) * VECTOR, _pad(combine), _pad(combine.transpose(0, 2, 1)))


def _pad(values: Array) -> Array:
    """Return the values with zeros added, so that the last axis is a multiple of VECTOR."""
    return np.pad(values, ((0, 0), (0, 0), (0, -values.shape[2] % VECTOR)))


class _Stage(NamedTuple):
    """Equilibrated charges: q, their weights f, [N]; Σ (f² + ε) and what the charges lack over it, [B]; float64."""

    charges: Array
    f: Array
    total: Array
    lacking: Array


class CpuAIMNet2(CpuNetwork):
    """Runs a frozen AIMNet2 over CSR rows on the CPU.

    From the second pass on, the charge is one more channel: its R values are all q. A pass reads the C·R values of an
    atom, the C·R sums over its neighbors and the C·H squares. The first layer reads the values of the first pass, which
    are those of the element, from a table of its results.
    """

    def __init__(self, weights: FrozenAIMNet2):
        self.weights = weights
        w = weights
        combine = np.concatenate([w.combine.numpy(), w.combine_charges.numpy()[None]])
        self._parts = [_Part.of(combine[: w.channels]), _Part.of(combine)]
        self._shifts = np.tile(w.shifts.double().numpy(), max(VECTOR // w.num_rbf, 1))
        self._embedding = np.pad(w.embedding.numpy(), ((0, 0), (0, self._parts[0].size - w.features)))
        self._passes = [
            [_layer(layer, None if j else self._read(k > 0)) for j, layer in enumerate(layers)]
            for k, layers in enumerate(w.passes)
        ]
        first = w.passes[0][0]
        own = w.embedding.double() @ first.weight[: w.features].double()
        self._first = (own + first.bias).float().numpy()
        self._head = [_layer(layer) for layer in w.head]
        self._energy = tuple(part.numpy() for part in w.energy)
        self._network_work = sum(layer.weight.numel() for layers in (*w.passes, w.head) for layer in layers) // 256

    def _read(self, charged: bool) -> Array:
        """Return the index, in the first layer of frozen weights, of each number that a pass reads; −1: none."""
        w, part = self.weights, self._parts[charged]
        f, r, h = w.features, w.num_rbf, w.num_vectors
        place = 2 * f + w.channels * h
        values, sums, squares = np.arange(f), np.arange(f, 2 * f), np.arange(2 * f, place)
        if charged:
            values = np.append(values, place)
            sums = np.concatenate([sums, place + 1 + np.arange(r)])
            squares = np.concatenate([squares, place + 1 + r + np.arange(h)])

        def padded(places: Array) -> Array:
            return np.pad(places, (0, part.size - len(places)), constant_values=-1)

        return np.concatenate([padded(values) if charged else values[:0], squares, padded(sums)])

    def work(self, atoms: Atoms, edges: Edges) -> tuple[int, int]:
        n, w = len(atoms.z), self.weights
        return n * self._network_work + 8 * len(w.passes) * w.features * int(edges.row_ptr[-1]) // 100, n

    def predict(self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        w, n, found = self.weights, len(atoms.z), int(edges.row_ptr[-1])
        size = w.features
        radial, slope = (np.empty((found, len(self._shifts)), np.float32) for _ in range(2))
        direction = np.empty((found, 4), np.float32)
        find_edges(n, edges.row_ptr, edges.vectors, self._shifts, w.eta, w.cutoff, radial, slope, direction)
        listed = edges.row_ptr, edges.sender, radial
        inputs, vectors, slopes, stages = [self._input(n, 0)], list[Array](), list[list[Array]](), list[_Stage]()
        sent = [self._embedding[atoms.z]]
        for k, layers in enumerate(self._passes):
            x, part = inputs[k], self._parts[k > 0]
            vectors.append(np.empty((n, 3, part.channels, part.combine.shape[2]), np.float32))
            at = part.size if k else 0
            convolve(n, *listed, direction, part.combine, w.num_vectors, part.size, sent[k], at, x, vectors[-1])
            out, found_slopes = _forward(layers, x, None if k else self._first[np.resize(atoms.z, len(x))])
            slopes.append(found_slopes)
            if k < len(w.passes) - 1:
                inputs.append(self._input(n, k + 1))
                sent.append(inputs[-1])
                stages.append(_Stage(*np.zeros((2, n)), *np.zeros((2, len(atoms.total_charge)))))
                before = stages[max(k - 1, 0)].charges
                given = atoms.batch, atoms.total_charge, w.exact_charge
                advance(out, sent[k], before, size, w.num_rbf, *given, *stages[-1], inputs[-1])
        buffers.charges = stages[-1].charges
        buffers.features = out[:n, : w.hidden_channels].copy() if self.keeps_features else None
        y, head_slopes = _forward(self._head, out)
        weight, bias = self._energy
        buffers.energy = y[:n] @ weight + bias
        buffers.state = (*listed, slope, direction), sent, vectors, slopes, stages, head_slopes

    def differentiate(
        self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool,
        charge_slope: Array | None,
    ) -> None:  # fmt: skip
        w, n = self.weights, len(atoms.z)
        size = w.features
        listed, sent, vectors, slopes, stages, head_slopes = buffers.state
        buffers.forces, buffers.virial = np.zeros((n, 3)), np.zeros((n, 9))
        g = _backward(self._head, self._energy[0] * head_slopes[-1], head_slopes)
        dq = np.zeros(n) if charge_slope is None else charge_slope.astype(np.float64)
        for k in reversed(range(len(w.passes))):
            by_output = g
            if self._passes[k][-1].activated:
                g = by_output * slopes[k][-1]
            dx, part = _backward(self._passes[k], g, slopes[k]), self._parts[k > 0]
            spread = np.empty((n, part.size // VECTOR, 5, VECTOR), np.float32)
            at = part.size if k else 0
            spread_gradient(n, sent[k], dx, at, vectors[k], part.spread, w.num_rbf, part.size, spread)
            convolve_gradient(n, *listed, spread, dx, buffers.forces, buffers.virial)
            if k == 0:  # no values are in its dx: features of an element have no gradient
                break
            g = np.zeros((len(dx), self._passes[k - 1][-1].bias.shape[1]), np.float32)
            kept = size if k < len(w.passes) - 1 else 0
            stage = stages[k - 1][1:]
            retreat(dx, by_output, kept, dq, size, w.num_rbf, atoms.batch, w.exact_charge, *stage, g)

    def _input(self, n: int, k: int) -> Array:
        """Return zeros for the numbers that a pass reads of n atoms."""
        return np.zeros((-(-n // ROWS) * ROWS, self._passes[k][0].zeros.shape[1]), np.float32)


def _layer(layer: Layer, read: Array | None = None) -> _Layer:
    """Return a layer in panels; `read`: its inputs in another order, see `CpuAIMNet2._read`."""
    weight = layer.weight.numpy()
    if read is not None:
        weight = np.where(read[:, None] < 0, ZERO, weight[read])
    whole = np.pad(weight, ((0, -len(weight) % COLUMNS), (0, 0)))
    zeros = np.zeros((1, len(whole)), np.float32)
    return _Layer(panels(weight), panels(whole.T), layer.bias.numpy()[None], zeros, layer.activated)


def _multiply(x: Array, weight: Array, bias: Array, slope: Array, kind: int) -> Array:
    y = np.empty((len(x), bias.shape[1]), np.float32)
    chunks = -(-len(x) // CHUNK)
    multiply(chunks * bias.shape[1] // COLUMNS, x, weight, bias, y, y if kind == LINEAR else slope, kind, chunks)
    return y


def _forward(layers: list[_Layer], x: Array, start: Array | None = None) -> tuple[Array, list[Array]]:
    """Return the output of a network and the slopes of its activations; none for a layer without activation.

    `start`, [N, K], takes the place of the first layer's b.
    """
    slopes = []
    for layer in layers:
        bias = layer.bias if start is None else start
        slope = np.empty((len(x), bias.shape[1]) if layer.activated else (0, 0), np.float32)
        x, start = _multiply(x, layer.weight, bias, slope, GELU if layer.activated else LINEAR), None
        slopes.append(slope)
    return x, slopes


def _backward(layers: list[_Layer], g: Array, slopes: list[Array]) -> Array:
    """Return the gradient of a network's input, from the gradient before its last activation."""
    for k in reversed(range(len(layers))):
        layer = layers[k]
        g = _multiply(g, layer.transposed, layer.zeros, slopes[k - 1] if k else g, SLOPE if k else LINEAR)
    return g


ROWS = 12 if WIDE else 6
"""Atoms of a product at a time, whose sums fill the registers."""

COLUMNS = 2 * LANES
"""Columns of a product at a time."""

CHUNK = 24
"""Atoms that share a panel of weights while it is in the cache."""

TERMS = 256
"""Terms of a sum at a time: sums of sums have smaller errors."""

LINEAR, GELU, SLOPE = 0, 1, 2
"""What follows a product: nothing, the activation, or a factor, the slope of an activation."""

_add_products = adds_products(ROWS, PANELS, ahead=True)
ZERO, ONE, TWO, HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)


FAR = np.float32(40)  # exp(−40) = 4e-18


@kernel
def find_edges(begin, stop, row_ptr, vec, shifts, eta, cutoff, radial, slope, direction):
    """Write, for each edge, radial functions and their slopes [E, R], and direction with 1/d [E, 4]."""
    steepness = np.float32(eta)
    for i in range(begin, stop):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
            d = math.sqrt(x * x + y * y + z * z)
            inverse = 1 / d if d > 0 else 0.0
            half = 0.5 * math.pi * max(1 - d / cutoff, 0.0)
            sine, cosine = math.sin(half), math.cos(half)
            envelope, envelope_slope = np.float32(sine * sine), np.float32(-math.pi / cutoff * sine * cosine)
            for r in range(radial.shape[1]):
                away = np.float32(d - shifts[r])
                power = steepness * away * away
                # functions far from d would be subnormal in float32, which makes what reads them several times slower
                bell = exp(-power) if power < FAR else ZERO
                radial[e, r] = bell * envelope
                slope[e, r] = bell * (envelope_slope - TWO * steepness * away * envelope)
            direction[e, 0], direction[e, 1], direction[e, 2] = x * inverse, y * inverse, z * inverse
            direction[e, 3] = inverse


@compiled(error_model="numpy")
def advance(out, sent, before, size, num_rbf, batch, total_charge, exact, charges, f, total, lacking, following):
    """From the output [N, size + 2] of a pass, and what it sent: charges, and what the following pass sends.

    The stage charges, f, total, lacking is zeros at first. `before`: charges of the stage before, or the same zeros.
    """
    n, own = len(batch), _EPSILON if exact else 0.0
    total[:] = _EPSILON - own
    for i in range(n):
        f[i] = out[i, size + 1]
        total[batch[i]] += f[i] * f[i] + own
        lacking[batch[i]] += np.float64(out[i, size]) + before[i]
    for b in range(len(total)):
        lacking[b] = (total_charge[b] - lacking[b]) / max(total[b], 1e-300)
    for i in range(n):
        charges[i] = np.float64(out[i, size]) + before[i] + (f[i] * f[i] + own) * lacking[batch[i]]
        for c in range(size):
            following[i, c] = sent[i, c] + out[i, c]
        for r in range(num_rbf):
            following[i, size + r] = charges[i]


@compiled(error_model="numpy")
def retreat(dx, by_output, kept, dq, size, num_rbf, batch, exact, f, total, lacking, g):
    """The gradient g of a pass's output, and dq of its charges, from dx of what the following pass reads.

    The features go on beside that pass: the first `kept` columns of the gradient of its own output are theirs too.
    """
    n, own = len(batch), _EPSILON if exact else 0.0
    mean = np.zeros(len(total))
    for i in range(n):
        for r in range(num_rbf):
            dq[i] += dx[i, size + r]
        mean[batch[i]] += dq[i] * (f[i] * f[i] + own)
    for i in range(n):
        b = batch[i]
        dq[i] -= mean[b] / max(total[b], 1e-300)
        for c in range(size):
            g[i, c] = dx[i, c]
        for c in range(kept):
            g[i, c] += by_output[i, c]
        g[i, size], g[i, size + 1] = dq[i], 2 * f[i] * lacking[b] * dq[i]


@njit(inline="always", **INNER)
def normal_below(x):
    """Φ(x), the normal distribution, and its density φ(x), in float32, so that it is vectorised.

    ½ + x·P(x²) up to 1.5; beyond that Φ(−|x|) = exp(−x²/2)·t·P(t) with t = 1 / (1 + 0.3 |x|). Each P is fitted.
    """
    square = x * x
    bell = exp(-HALF * square)
    t = ONE / (ONE + np.float32(0.3) * abs(x))
    far = np.float32(0.0209515925)
    far = np.float32(0.14260369) + t * (np.float32(-0.109697146) + t * far)
    far = np.float32(0.109354521) + t * (np.float32(-0.00769644954) + t * far)
    far = np.float32(0.120156871) + t * (np.float32(0.104547545) + t * far)
    far = np.float32(0.119660975) + t * far
    near = np.float32(3.8504793e-07)
    near = np.float32(0.000113909924) + square * (np.float32(-8.54034052e-06) + square * near)
    near = np.float32(0.00997297488) + square * (np.float32(-0.00118597433) + square * near)
    near = np.float32(0.398942278) + square * (np.float32(-0.0664902848) + square * near)
    tail = bell * t * far
    beyond = ONE - tail if x > ZERO else tail
    return (HALF + x * near if square < np.float32(2.25) else beyond), np.float32(0.3989422804014327) * bell


@call
def activate(x, slope):
    """GELU, x Φ(x), of a row in place, and its slope."""
    for c in range(COLUMNS):
        value = x[c]
        below, density = normal_below(value)
        slope[c] = below + value * density
        x[c] = value * below


@call
def activate_rows(y, slope, at, first):
    """`activate` of COLUMNS columns of ROWS rows. A kernel would count the references of each row."""
    for r in range(at, at + ROWS):
        activate(y[r, first : first + COLUMNS], slope[r, first : first + COLUMNS])


@kernel
def multiply(begin, stop, x, w, bias, y, slope, kind, chunks):
    """Y = X W + b [N, K], with w the panels of W; then GELU, of which `slope` gets the slope, or a factor `slope`.

    b is of all atoms, [1, K], or of each of them. Each pass computes COLUMNS columns of one of the chunks of rows, and
    fetches the next panels meanwhile.
    """
    K, inputs, outputs, blocks = w.shape[1], x.shape[1], y.shape[1], len(x) // ROWS
    groups = outputs // COLUMNS
    for item in range(begin, stop):
        chunk, first = item // groups, item % groups * COLUMNS
        start, end = blocks * chunk // chunks, blocks * (chunk + 1) // chunks
        step = LANES * PANELS // (end - start)
        at_next = (first + COLUMNS) * K
        for block in range(start, end):
            at = block * ROWS
            for r in range(at, at + ROWS):
                own = bias[r if len(bias) > 1 else 0]
                for c in range(first, first + COLUMNS):
                    y[r, c] = own[c]
            for c in range(first, first + COLUMNS, LANES * PANELS):
                for k in range(0, K, TERMS):
                    terms, i, o = min(K - k, TERMS), at * inputs + k, at * outputs + c
                    _add_products(
                        x, i, inputs, w, c * K + k * LANES, y, o, outputs, terms, K * LANES, at_next, step
                    )  # fmt: skip
                    at_next += step * terms
            if kind == GELU:
                activate_rows(y, slope, at, first)
            elif kind == SLOPE:
                for r in range(at, at + ROWS):
                    for c in range(first, first + COLUMNS):
                        y[r, c] *= slope[r, c]


@kernel
def convolve(begin, stop, row_ptr, sender, radial, direction, combine, num_vectors, size, values, at, x, vectors):
    """Write squares [N, C·H] and sums [N, size] of the first `size` columns of the values into x from column `at` on.

    The squares are |V|² of V [N, 3, C, H]; see model.py.
    """
    channels, num_rbf, padded = combine.shape
    K, width, row, num_squares = x.shape[1], radial.shape[1], values.shape[1], channels * num_vectors
    m = np.empty(4 * size, np.float32)
    for i in range(begin, stop):
        for c in range(0, size, VECTOR):
            g, m0, mx, my, mz = c & (width - 1), zeros(), zeros(), zeros(), zeros()
            for e in range(row_ptr[i], row_ptr[i + 1]):
                sent = load(values, sender[e] * row + c) * load(radial, e * width + g)
                m0 = m0 + sent
                mx = mx + sent * repeat(direction, 4 * e)
                my = my + sent * repeat(direction, 4 * e + 1)
                mz = mz + sent * repeat(direction, 4 * e + 2)
            store(m, c, m0)
            store(m, size + c, mx)
            store(m, 2 * size + c, my)
            store(m, 3 * size + c, mz)
        for a in range(channels):
            for h in range(0, padded, VECTOR):
                vx, vy, vz = zeros(), zeros(), zeros()
                for r in range(a * num_rbf, (a + 1) * num_rbf):
                    weight = load(combine, r * padded + h)
                    vx = vx + weight * repeat(m, size + r)
                    vy = vy + weight * repeat(m, 2 * size + r)
                    vz = vz + weight * repeat(m, 3 * size + r)
                v = (3 * i * channels + a) * padded + h
                store(vectors, v, vx)
                store(vectors, v + channels * padded, vy)
                store(vectors, v + 2 * channels * padded, vz)
                # lanes beyond the channel are zero, and are written over by what comes after it
                store(x, i * K + at + a * num_vectors + h, vx * vx + vy * vy + vz * vz)
        for c in range(0, size, VECTOR):
            store(x, i * K + at + num_squares + c, load(m, c))


@kernel
def spread_gradient(begin, stop, values, dx, at, vectors, combine, num_rbf, size, spread):
    """Write [N, size/VECTOR, 5, VECTOR]: gradients of the sums with radial functions and with three directions; values.

    This comes before `convolve_gradient`, which reads the rows of the neighbors.
    """
    channels, num_vectors, width = combine.shape
    K, row, padded = dx.shape[1], values.shape[1], vectors.shape[3]
    by, dm = np.empty(3 * padded, np.float32), np.zeros(3 * size, np.float32)
    for i in range(begin, stop):
        for a in range(channels):
            for h in range(0, padded, VECTOR):
                half = load(dx, i * K + at + a * num_vectors + h)
                for d in range(3):
                    v = load(vectors, ((3 * i + d) * channels + a) * padded + h)
                    store(by, d * padded + h, (half + half) * v)
            for r in range(0, width, VECTOR):
                gx, gy, gz = zeros(), zeros(), zeros()
                for h in range(num_vectors):
                    weight = load(combine, (a * num_vectors + h) * width + r)
                    gx = gx + weight * repeat(by, h)
                    gy = gy + weight * repeat(by, padded + h)
                    gz = gz + weight * repeat(by, 2 * padded + h)
                # lanes beyond the channel are zero, and are written over by the next one
                store(dm, a * num_rbf + r, gx)
                store(dm, size + a * num_rbf + r, gy)
                store(dm, 2 * size + a * num_rbf + r, gz)
        for c in range(0, size, VECTOR):
            there = 5 * (i * size + c)
            store(spread, there, load(dx, i * K + at + channels * num_vectors + c))
            store(spread, there + VECTOR, load(dm, c))
            store(spread, there + 2 * VECTOR, load(dm, size + c))
            store(spread, there + 3 * VECTOR, load(dm, 2 * size + c))
            store(spread, there + 4 * VECTOR, load(values, i * row + c))


@kernel
def convolve_gradient(begin, stop, row_ptr, sender, radial, slope, direction, spread, dx, forces, virial):
    """Add to the gradient of the values, the first columns of dx, and to forces [N, 3] and virials [N, 9], float64."""
    size, K, width = spread.shape[1] * VECTOR, dx.shape[1], radial.shape[1]
    for i in range(begin, stop):
        f, v = forces[i], virial[i]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            ux, uy, uz = repeat(direction, 4 * e), repeat(direction, 4 * e + 1), repeat(direction, 4 * e + 2)
            # Atom j adds g·v_j to the sums of i and g·v_j·u to its vectors; i adds g·v_i and −g·v_i·u to those of j.
            # Each row takes the gradient of both, so that it writes its own forces alone; the reverse edge, in row j,
            # has the same pair with the other sign.
            along, px, py, pz = zeros(), zeros(), zeros(), zeros()  # dE/dd at fixed u, dE/du
            for c in range(0, size, VECTOR):
                here, there, at = 5 * (i * size + c), 5 * (sender[e] * size + c), e * width + (c & (width - 1))
                g, s = load(radial, at), load(slope, at)
                mx, nx = load(spread, here + VECTOR), load(spread, there + VECTOR)
                my, ny = load(spread, here + 2 * VECTOR), load(spread, there + 2 * VECTOR)
                mz, nz = load(spread, here + 3 * VECTOR), load(spread, there + 3 * VECTOR)
                own, other = load(spread, here + 4 * VECTOR), load(spread, there + 4 * VECTOR)
                from_own = load(spread, here) + (ux * mx + uy * my + uz * mz)
                from_other = load(spread, there) - (ux * nx + uy * ny + uz * nz)
                store(dx, i * K + c, load(dx, i * K + c) + g * from_other)
                along = along + s * (other * from_own + own * from_other)
                px = px + g * (other * mx - own * nx)
                py = py + g * (other * my - own * ny)
                pz = pz + g * (other * mz - own * nz)
            # with du/dvec = (1 − u uᵀ)/d; vec points from i to j, so that dE/dvec is the force on i
            x, y, z, inverse = direction[e, 0], direction[e, 1], direction[e, 2], direction[e, 3]
            bx, by, bz = total(px) * inverse, total(py) * inverse, total(pz) * inverse
            radially = total(along) - (x * bx + y * by + z * bz)
            gx, gy, gz = radially * x + bx, radially * y + by, radially * z + bz
            f[0] += gx
            f[1] += gy
            f[2] += gz
            if inverse > ZERO:
                half = HALF / inverse  # half of the virial, since row j adds the other half
                rx, ry, rz = x * half, y * half, z * half
                v[0] += gx * rx
                v[1] += gx * ry
                v[2] += gx * rz
                v[3] += gy * rx
                v[4] += gy * ry
                v[5] += gy * rz
                v[6] += gz * rx
                v[7] += gz * ry
                v[8] += gz * rz
