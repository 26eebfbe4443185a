"""AIMNet2 energies, forces and charges on the CPU, in numba kernels.

The kernels are those of triton_kernels.py: radial functions, sums over neighbors, matrix products and their gradients.
Threads divide the atoms, in products also the columns. Each number is computed by one thread in one order, so that
results do not depend on the number of threads.

Shapes: N atoms in B structures, E directed edges, A features, R radial functions, H combinations, F = A·R.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from ...kernels.compiling_cpu import INNER, kernel, run_on_threads
from ...kernels.interfaces import Array, CpuAtoms, CpuChargeNetwork, CpuOutputs, CpuRows, ReadCharges
from ...kernels.thread_tuner import ThreadChoice
from ..tensornet.numba_kernels import (
    LANES,
    PANELS,
    adds_products,
    call,
    exp,
    load,
    panels,
    repeat,
    store,
    total,
    zeros,
)  # fmt: skip
from .weights import FrozenAIMNet2, Layer

__all__ = ["CpuAIMNet2", "convolve", "convolve_gradient", "find_edges", "multiply", "spread_gradient"]


_EPSILON = 1e-6


class _Layer(NamedTuple):
    """y = x W + b, GELU where `activated`. Panels of W [K, N] and of its transpose, b [N] and zeros [K]."""

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
        size = (channels - 1) * num_rbf + max(num_rbf, LANES)
        return cls(channels, -(-size // LANES) * LANES, _pad(combine), _pad(combine.transpose(0, 2, 1)))


def _pad(values: Array) -> Array:
    """Return the values with zeros added, so that the last axis is a multiple of LANES."""
    return np.pad(values, ((0, 0), (0, 0), (0, -values.shape[2] % LANES)))


class _Stage(NamedTuple):
    """Equilibrated charges: u = f² + ε and f, [N]; Σ u and what the charges lack over it, [B]; float64."""

    u: Array
    f: Array
    total: Array
    lacking: Array


class CpuAIMNet2(CpuChargeNetwork):
    """Runs a frozen AIMNet2 over CSR rows on the CPU.

    From the second pass on, the charge is one more channel: its R values are all q. A pass reads the C·R values of an
    atom, the C·R sums over its neighbors and the C·H squares.
    """

    def __init__(self, weights: FrozenAIMNet2):
        self.weights, self._threads = weights, ThreadChoice()
        w = weights
        combine = np.concatenate([w.combine.numpy(), w.combine_charges.numpy()[None]])
        self._parts = [_Part.of(combine[: w.channels]), _Part.of(combine)]
        self._shifts = np.tile(w.shifts.double().numpy(), max(LANES // w.num_rbf, 1))
        self._embedding = w.embedding.numpy()
        self._passes = [
            [_layer(layer, None if j else self._read(self._parts[k > 0])) for j, layer in enumerate(layers)]
            for k, layers in enumerate(w.passes)
        ]
        self._head = [_layer(layer) for layer in w.head]
        self._energy = tuple(part.numpy() for part in w.energy)
        self._network_work = sum(layer.weight.numel() for layers in (*w.passes, w.head) for layer in layers) // 256

    def _read(self, part: _Part) -> Array:
        """Return the index, in the first layer of frozen weights, of each number that a pass reads; −1: none."""
        w = self.weights
        f, r, h = w.features, w.num_rbf, w.num_vectors
        place = 2 * f + w.channels * h
        values, sums, squares = np.arange(f), np.arange(f, 2 * f), np.arange(2 * f, place)
        if part.channels > w.channels:
            values = np.append(values, place)
            sums = np.concatenate([sums, place + 1 + np.arange(r)])
            squares = np.concatenate([squares, place + 1 + r + np.arange(h)])

        def padded(places: Array, size: int) -> Array:
            return np.pad(places, (0, size - len(places)), constant_values=-1)

        read = np.concatenate([padded(values, part.size), squares, padded(sums, part.size)])
        return padded(read, -(-len(read) // COLUMNS) * COLUMNS)

    def run(
        self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True, read: ReadCharges | None = None
    ) -> CpuOutputs:  # fmt: skip
        n, w = len(atoms.z), self.weights
        work = n * self._network_work + 8 * len(w.passes) * w.features * int(rows.row_ptr[-1]) // 100
        return run_on_threads(lambda: self._run(atoms, rows, with_forces, read), self._threads, work, n, with_forces)

    def _run(self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool, read: ReadCharges | None) -> CpuOutputs:
        w, n, found = self.weights, len(atoms.z), int(rows.row_ptr[-1])
        size = w.features
        radial, slope = (np.empty((found, len(self._shifts)), np.float32) for _ in range(2))
        direction = np.empty((found, 4), np.float32)
        find_edges(n, rows.row_ptr, rows.vectors, self._shifts, w.eta, w.cutoff, radial, slope, direction)
        edges = rows.row_ptr, rows.sender, radial
        values, charges = self._embedding[atoms.z], None
        inputs, vectors, slopes, stages = list[Array](), list[Array](), list[list[Array]](), list[_Stage]()
        for k, layers in enumerate(self._passes):
            x = np.zeros((-(-n // ROWS) * ROWS, len(layers[0].zeros)), np.float32)
            x[:n, :size] = values
            if charges is not None:
                x[:n, size : size + w.num_rbf] = charges[:, None]
            part = self._parts[k > 0]
            vectors.append(np.empty((n, 3, part.channels, part.combine.shape[2]), np.float32))
            convolve(n, *edges, direction, part.combine, w.num_vectors, part.size, x, vectors[-1])
            inputs.append(x)
            out, found_slopes = _forward(layers, x)
            slopes.append(found_slopes)
            if k < len(w.passes) - 1:
                values = values + out[:n, :size]
                q64 = out[:n, size].astype(np.float64)
                charges, stage = self._equilibrate(q64 if charges is None else q64 + charges, out[:n, size + 1], atoms)
                stages.append(stage)
        features = out[:n, : w.hidden_channels].copy() if self.keeps_features else None
        y, head_slopes = _forward(self._head, out)
        weight, bias = self._energy
        energy = y[:n] @ weight + bias
        assert charges is not None
        by_charge = read(charges) if read is not None else None
        if not with_forces:
            return CpuOutputs(energy, None, None, charges, features)

        forces, virial = np.zeros((n, 3)), np.zeros((n, 9))
        g = _backward(self._head, weight * head_slopes[-1], head_slopes)
        dq = np.zeros(n) if by_charge is None else by_charge.astype(np.float64)
        da: Array | float = 0.0
        for k in reversed(range(len(w.passes))):
            if self._passes[k][-1].activated:
                g = g * slopes[k][-1]
            dx, part = _backward(self._passes[k], g, slopes[k]), self._parts[k > 0]
            gradient = np.empty((n, 4, part.size), np.float32)
            spread_gradient(n, dx, vectors[k], part.spread, w.num_rbf, part.size, gradient)
            convolve_gradient(n, *edges, slope, direction, inputs[k], gradient, dx, forces, virial)
            if k == 0:
                break
            da = da + dx[:n, :size]
            dq = dq + dx[:n, size : size + w.num_rbf].sum(1, dtype=np.float64)
            dq, df = self._equilibrate_gradient(dq, stages[k - 1], atoms)
            g = np.zeros((len(dx), len(self._passes[k - 1][-1].bias)), np.float32)
            g[:n, :size], g[:n, size], g[:n, size + 1] = da, dq, df
        return CpuOutputs(energy, forces, virial, charges, features)

    def _equilibrate(self, charges: Array, weights: Array, atoms: CpuAtoms) -> tuple[Array, _Stage]:
        f, size = weights.astype(np.float64), len(atoms.total_charge)
        exact = self.weights.exact_charge
        u = f * f + (_EPSILON if exact else 0.0)
        total = np.bincount(atoms.batch, u, size) + (0.0 if exact else _EPSILON)
        lacking = (atoms.total_charge - np.bincount(atoms.batch, charges, size)) / np.maximum(total, 1e-300)
        return charges + u * lacking[atoms.batch], _Stage(u, f, total, lacking)

    def _equilibrate_gradient(self, dq: Array, stage: _Stage, atoms: CpuAtoms) -> tuple[Array, Array]:
        """Return the gradients of the charges before equilibration and of their weights f."""
        mean = np.bincount(atoms.batch, dq * stage.u, len(stage.total)) / np.maximum(stage.total, 1e-300)
        own = dq - mean[atoms.batch]
        return own, 2 * stage.f * stage.lacking[atoms.batch] * own


def _layer(layer: Layer, read: Array | None = None) -> _Layer:
    """Return a layer in panels; `read`: its inputs in another order, see `CpuAIMNet2._read`."""
    weight = layer.weight.numpy()
    if read is not None:
        weight = np.where(read[:, None] < 0, ZERO, weight[read])
    return _Layer(
        panels(weight), panels(weight.T), layer.bias.numpy(), np.zeros(len(weight), np.float32), layer.activated
    )


def _multiply(x: Array, weight: Array, bias: Array, slope: Array, kind: int) -> Array:
    y = np.empty((len(x), len(bias)), np.float32)
    chunks = -(-len(x) // CHUNK)
    multiply(chunks * len(bias) // COLUMNS, x, weight, bias, y, y if kind == LINEAR else slope, kind, chunks)
    return y


def _forward(layers: list[_Layer], x: Array) -> tuple[Array, list[Array]]:
    """Return the output of a network and the slopes of its activations; none for a layer without activation."""
    slopes = []
    for layer in layers:
        slope = np.empty((len(x), len(layer.bias)) if layer.activated else (0, 0), np.float32)
        x = _multiply(x, layer.weight, layer.bias, slope, GELU if layer.activated else LINEAR)
        slopes.append(slope)
    return x, slopes


def _backward(layers: list[_Layer], g: Array, slopes: list[Array]) -> Array:
    """Return the gradient of a network's input, from the gradient before its last activation."""
    for k in reversed(range(len(layers))):
        layer = layers[k]
        g = _multiply(g, layer.transposed, layer.zeros, slopes[k - 1] if k else g, SLOPE if k else LINEAR)
    return g


ROWS = 6
"""Atoms of a product at a time."""

COLUMNS = 2 * LANES
"""Columns of a product at a time."""

CHUNK = 24
"""Atoms that share a panel of weights while it is in the cache."""

LINEAR, GELU, SLOPE = 0, 1, 2
"""What follows a product: nothing, the activation, or a factor, the slope of an activation."""

_add_products = adds_products(ROWS, PANELS)
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)


FAR = 40.0  # exp(−40) = 4e-18


@kernel
def find_edges(begin, stop, row_ptr, vec, shifts, eta, cutoff, radial, slope, direction):
    """Write, for each edge, radial functions and their slopes [E, R], and direction with 1/d [E, 4]."""
    for i in range(begin, stop):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            x, y, z = np.float64(vec[e, 0]), np.float64(vec[e, 1]), np.float64(vec[e, 2])
            d = math.sqrt(x * x + y * y + z * z)
            inverse = 1 / d if d > 0 else 0.0
            half = 0.5 * math.pi * max(1 - d / cutoff, 0.0)
            envelope = math.sin(half) ** 2
            envelope_slope = -math.pi / cutoff * math.sin(half) * math.cos(half)
            for r in range(radial.shape[1]):
                away = d - shifts[r]
                power = eta * away * away
                # functions far from d would be subnormal in float32, which makes what reads them several times slower
                bell = math.exp(-power) if power < FAR else 0.0
                radial[e, r] = bell * envelope
                slope[e, r] = bell * (envelope_slope - 2 * eta * away * envelope)
            direction[e, 0], direction[e, 1], direction[e, 2] = x * inverse, y * inverse, z * inverse
            direction[e, 3] = inverse


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


@kernel
def multiply(begin, stop, x, w, bias, y, slope, kind, chunks):
    """Y = X W + b of [N, K], with w the panels of W; then GELU, of which `slope` gets the slope, or a factor `slope`.

    Each pass computes COLUMNS columns of one of the chunks of rows.
    """
    K, blocks = x.shape[1], len(x) // ROWS
    groups = len(bias) // COLUMNS
    for item in range(begin, stop):
        chunk, first = item // groups, item % groups * COLUMNS
        for block in range(blocks * chunk // chunks, blocks * (chunk + 1) // chunks):
            at = block * ROWS
            for r in range(at, at + ROWS):
                for c in range(first, first + COLUMNS):
                    y[r, c] = bias[c]
            for c in range(first, first + COLUMNS, LANES * PANELS):
                _add_products(x, at * K, K, w, c * K, y, at * y.shape[1] + c, y.shape[1], K)
            if kind == GELU:
                for r in range(at, at + ROWS):
                    activate(y[r, first : first + COLUMNS], slope[r, first : first + COLUMNS])
            elif kind == SLOPE:
                for r in range(at, at + ROWS):
                    for c in range(first, first + COLUMNS):
                        y[r, c] *= slope[r, c]


@kernel
def convolve(begin, stop, row_ptr, sender, radial, direction, combine, num_vectors, size, x, vectors):
    """Write squares [N, C·H] and sums [N, size] of the first `size` columns of x into its next columns.

    The squares are |V|² of V [N, 3, C, H]; see model.py.
    """
    channels, num_rbf, padded = combine.shape
    K, width, num_squares = x.shape[1], radial.shape[1], channels * num_vectors
    m = np.empty(4 * size, np.float32)
    for i in range(begin, stop):
        for c in range(0, size, LANES):
            at, m0, mx, my, mz = c & (width - 1), zeros(), zeros(), zeros(), zeros()
            for e in range(row_ptr[i], row_ptr[i + 1]):
                sent = load(x, sender[e] * K + c) * load(radial, e * width + at)
                m0 = m0 + sent
                mx = mx + sent * repeat(direction, 4 * e)
                my = my + sent * repeat(direction, 4 * e + 1)
                mz = mz + sent * repeat(direction, 4 * e + 2)
            store(m, c, m0)
            store(m, size + c, mx)
            store(m, 2 * size + c, my)
            store(m, 3 * size + c, mz)
        for a in range(channels):
            for h in range(0, padded, LANES):
                vx, vy, vz = zeros(), zeros(), zeros()
                for r in range(a * num_rbf, (a + 1) * num_rbf):
                    weight = load(combine, r * padded + h)
                    vx = vx + weight * repeat(m, size + r)
                    vy = vy + weight * repeat(m, 2 * size + r)
                    vz = vz + weight * repeat(m, 3 * size + r)
                at = (3 * i * channels + a) * padded + h
                store(vectors, at, vx)
                store(vectors, at + channels * padded, vy)
                store(vectors, at + 2 * channels * padded, vz)
                # lanes beyond the channel are zero, and are written over by what comes after it
                store(x, i * K + size + a * num_vectors + h, vx * vx + vy * vy + vz * vz)
        for c in range(0, size, LANES):
            store(x, i * K + size + num_squares + c, load(m, c))


@kernel
def spread_gradient(begin, stop, dx, vectors, combine, num_rbf, size, gradient):
    """Write the gradients [N, 4, size] of the sums with radial functions, and with the three directions.

    This comes before `convolve_gradient`, which reads these gradients of the neighbors.
    """
    channels, num_vectors, width = combine.shape
    K, padded = dx.shape[1], vectors.shape[3]
    by = np.empty(3 * padded, np.float32)
    for i in range(begin, stop):
        for c in range(0, size, LANES):
            store(gradient, 4 * i * size + c, load(dx, i * K + size + channels * num_vectors + c))
        for d in range(1, 4):
            store(gradient, (4 * i + d + 1) * size - LANES, zeros())
        for a in range(channels):
            for h in range(0, padded, LANES):
                half = load(dx, i * K + size + a * num_vectors + h)
                for d in range(3):
                    v = load(vectors, ((3 * i + d) * channels + a) * padded + h)
                    store(by, d * padded + h, (half + half) * v)
            for r in range(0, width, LANES):
                gx, gy, gz = zeros(), zeros(), zeros()
                for h in range(num_vectors):
                    weight = load(combine, (a * num_vectors + h) * width + r)
                    gx = gx + weight * repeat(by, h)
                    gy = gy + weight * repeat(by, padded + h)
                    gz = gz + weight * repeat(by, 2 * padded + h)
                # lanes beyond the channel are zero, and are written over by the next one
                at = (4 * i + 1) * size + a * num_rbf + r
                store(gradient, at, gx)
                store(gradient, at + size, gy)
                store(gradient, at + 2 * size, gz)


@kernel
def convolve_gradient(begin, stop, row_ptr, sender, radial, slope, direction, x, gradient, dx, forces, virial):
    """Add to the gradient of the values, the first columns of dx, and to forces [N, 3] and virials [N, 9], float64."""
    size, K, width = gradient.shape[2], x.shape[1], radial.shape[1]
    for i in range(begin, stop):
        f, v = forces[i], virial[i]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j = sender[e]
            x_here, x_there, here, there = i * K, j * K, 4 * i * size, 4 * j * size
            ux, uy, uz = repeat(direction, 4 * e), repeat(direction, 4 * e + 1), repeat(direction, 4 * e + 2)
            # Atom j adds g·v_j to the sums of i and g·v_j·u to its vectors; i adds g·v_i and −g·v_i·u to those of j.
            # Each row takes the gradient of both, so that it writes its own forces alone; the reverse edge, in row j,
            # has the same pair with the other sign.
            along, px, py, pz = zeros(), zeros(), zeros(), zeros()  # dE/dd at fixed u, dE/du
            for c in range(0, size, LANES):
                g, s = load(radial, e * width + (c & (width - 1))), load(slope, e * width + (c & (width - 1)))
                own, other = load(x, x_here + c), load(x, x_there + c)
                mx, nx = load(gradient, here + size + c), load(gradient, there + size + c)
                my, ny = load(gradient, here + 2 * size + c), load(gradient, there + 2 * size + c)
                mz, nz = load(gradient, here + 3 * size + c), load(gradient, there + 3 * size + c)
                from_own = load(gradient, here + c) + (ux * mx + uy * my + uz * mz)
                from_other = load(gradient, there + c) - (ux * nx + uy * ny + uz * nz)
                store(dx, x_here + c, load(dx, x_here + c) + g * from_other)
                along = along + s * (other * from_own + own * from_other)
                px = px + g * (other * mx - own * nx)
                py = py + g * (other * my - own * ny)
                pz = pz + g * (other * mz - own * nz)
            # with du/dvec = (1 − u uᵀ)/d; vec points from i to j, so that dE/dvec is the force on i
            dx_, dy_, dz_, inverse = direction[e, 0], direction[e, 1], direction[e, 2], direction[e, 3]
            bx, by, bz = total(px) * inverse, total(py) * inverse, total(pz) * inverse
            radially = total(along) - (dx_ * bx + dy_ * by + dz_ * bz)
            gx, gy, gz = radially * dx_ + bx, radially * dy_ + by, radially * dz_ + bz
            f[0] += gx
            f[1] += gy
            f[2] += gz
            if inverse > ZERO:
                half = HALF / inverse  # half of the virial, since row j adds the other half
                rx, ry, rz = dx_ * half, dy_ * half, dz_ * half
                v[0] += gx * rx
                v[1] += gx * ry
                v[2] += gx * rz
                v[3] += gy * rx
                v[4] += gy * ry
                v[5] += gy * rz
                v[6] += gz * rx
                v[7] += gz * ry
                v[8] += gz * rz
