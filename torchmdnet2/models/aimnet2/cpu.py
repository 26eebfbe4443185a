"""AIMNet2 energies, forces and charges on the CPU: numba kernels at the edges, PyTorch's matrix products at the atoms.

The kernels are those of triton_kernels.py: radial functions, sums over neighbors and their gradients. Threads divide
the atoms. Each atom writes to its row alone, so that results do not depend on the number of threads. Charges are values
of one further feature, equal for all radial functions.

Shapes: N atoms in B structures, E directed edges, A features, R radial functions, H combinations, F = A·R.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ...kernels.compiling_cpu import INNER, kernel, run_on_threads
from ...kernels.interfaces import Array, CpuAtoms, CpuChargeNetwork, CpuOutputs, CpuRows, ReadCharges
from ...kernels.thread_tuner import ThreadChoice
from ..tensornet.numba_kernels import exp
from .weights import FrozenAIMNet2, Layer

__all__ = ["CpuAIMNet2", "convolve", "convolve_gradient", "find_edges", "gelu", "spread_gradient"]


_EPSILON = 1e-6


class _Sums(NamedTuple):
    """The sums of one pass, of features or of charges: values [N, F], and vectors [N, 3, A·H]."""

    values: Array
    vectors: Array
    combine: Array


class _Stage(NamedTuple):
    """Equilibrated charges: u = f² + ε and f, [N]; Σ u and what the charges lack over it, [B]; float64."""

    u: Array
    f: Array
    total: Array
    lacking: Array


class CpuAIMNet2(CpuChargeNetwork):
    """Runs a frozen AIMNet2 over CSR rows on the CPU."""

    def __init__(self, weights: FrozenAIMNet2):
        self.weights, self._threads = weights, ThreadChoice()
        w = weights
        self._combine, self._combine_charges = w.combine.numpy(), w.combine_charges.numpy()[None]
        self._shifts, self._embedding = w.shifts.double().numpy(), w.embedding.numpy()
        self._network_work = sum(layer.weight.numel() for layers in (*w.passes, w.head) for layer in layers) // 256

    def run(
        self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool = True, read: ReadCharges | None = None
    ) -> CpuOutputs:  # fmt: skip
        n, w = len(atoms.z), self.weights
        work = n * self._network_work + 8 * len(w.passes) * w.features * int(rows.row_ptr[-1]) // 100
        with torch.inference_mode():
            return run_on_threads(
                lambda: self._run(atoms, rows, with_forces, read), self._threads, work, n, with_forces
            )

    def _run(self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool, read: ReadCharges | None) -> CpuOutputs:
        w, n, found = self.weights, len(atoms.z), int(rows.row_ptr[-1])
        size, place = w.features, 2 * w.features + w.channels * w.num_vectors
        radial, slope = (np.empty((found, w.num_rbf), np.float32) for _ in range(2))
        direction = np.empty((found, 4), np.float32)
        find_edges(n, rows.row_ptr, rows.vectors, self._shifts, w.eta, w.cutoff, radial, slope, direction)
        edges = rows.row_ptr, rows.sender, radial
        values, charges = self._embedding[atoms.z], None
        sums: list[list[_Sums]] = []
        slopes, stages = list[list[Tensor]](), list[_Stage]()
        x = torch.empty(0)
        for k, layers in enumerate(w.passes):
            read_by_pass = np.zeros((n, w.width), np.float32)
            read_by_pass[:, :size] = values
            sums.append([self._convolve(edges, direction, values, self._combine, read_by_pass[:, size:place])])
            if charges is not None:
                q = np.repeat(charges.astype(np.float32)[:, None], w.num_rbf, 1)
                read_by_pass[:, place] = q[:, 0]
                end = place + 1 + w.num_rbf + w.num_vectors
                sums[-1].append(
                    self._convolve(edges, direction, q, self._combine_charges, read_by_pass[:, place + 1 : end])
                )
            x, found_slopes = _forward(layers, torch.from_numpy(read_by_pass))
            slopes.append(found_slopes)
            if k < len(w.passes) - 1:
                out = x.numpy()
                values = values + out[:, :size]
                q64 = out[:, size].astype(np.float64)
                charges, stage = self._equilibrate(q64 if charges is None else q64 + charges, out[:, size + 1], atoms)
                stages.append(stage)
        features = x.numpy()[:, : w.hidden_channels].copy() if self.keeps_features else None
        y, head_slopes = _forward(w.head, x)
        weight, bias = w.energy
        energy = (y @ weight + bias).numpy()
        assert charges is not None
        by_charge = read(charges) if read is not None else None
        if not with_forces:
            return CpuOutputs(energy, None, None, charges, features)

        forces, virial = np.zeros((n, 3)), np.zeros((n, 9))
        g = _backward(w.head, weight * head_slopes[-1], head_slopes)
        dq = np.zeros(n) if by_charge is None else by_charge.astype(np.float64)
        da = np.zeros((n, size), np.float32)
        for k in reversed(range(len(w.passes))):
            if w.passes[k][-1].activated:
                g = g * slopes[k][-1]
            dx = _backward(w.passes[k], g, slopes[k]).numpy()
            da = da + dx[:, :size]
            back = edges[0], edges[1], radial, slope, direction
            self._gradient(back, sums[k][0], dx[:, size:place], da, forces, virial)
            if k == 0:
                break
            by_values = np.zeros((n, w.num_rbf), np.float32)
            end = place + 1 + w.num_rbf + w.num_vectors
            self._gradient(back, sums[k][1], dx[:, place + 1 : end], by_values, forces, virial)
            dq = dq + dx[:, place] + by_values.sum(1, dtype=np.float64)
            dq, df = self._equilibrate_gradient(dq, stages[k - 1], atoms)
            change = np.zeros((n, w.passes[k - 1][-1].bias.shape[0]), np.float32)
            change[:, :size], change[:, size], change[:, size + 1] = da, dq, df
            g = torch.from_numpy(change)
        return CpuOutputs(energy, forces, virial, charges, features)

    def _convolve(
        self, edges: tuple[Array, Array, Array], direction: Array, values: Array, combine: Array, out: Array
    ) -> _Sums:  # fmt: skip
        n, size = values.shape
        sums, squares = np.empty((n, size), np.float32), np.empty((n, combine.shape[0] * combine.shape[2]), np.float32)
        vectors = np.empty((n, 3, squares.shape[1]), np.float32)
        convolve(n, *edges, direction, values, combine, sums, squares, vectors)
        out[:, :size], out[:, size:] = sums, squares
        return _Sums(values, vectors, combine)

    def _gradient(
        self, edges: tuple[Array, ...], sums: _Sums, dx: Array, by_values: Array, forces: Array, virial: Array
    ) -> None:  # fmt: skip
        """Add to by_values, forces and virial from dx, the gradient of sums and squares."""
        n, size = sums.values.shape
        gradient = np.empty((n, 4, size), np.float32)
        by_sums, by_squares = np.ascontiguousarray(dx[:, :size]), np.ascontiguousarray(dx[:, size:])
        spread_gradient(n, by_sums, by_squares, sums.vectors, sums.combine, gradient)
        convolve_gradient(n, *edges, sums.values, gradient, by_values, forces, virial)

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


def _forward(layers: list[Layer], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output of a network and the slopes of its activations; 1 for a layer without activation."""
    slopes = []
    for layer in layers:
        h = torch.addmm(layer.bias, x, layer.weight)
        x, slope = h, torch.ones(1)
        if layer.activated:
            slope = torch.empty_like(h)
            gelu(len(h), h.numpy(), slope.numpy())
        slopes.append(slope)
    return x, slopes


def _backward(layers: list[Layer], g: Tensor, slopes: list[Tensor]) -> Tensor:
    """Return the gradient of a network's input, from the gradient before its last activation."""
    for k in reversed(range(len(layers))):
        g = g @ layers[k].transposed
        if k > 0:
            g.mul_(slopes[k - 1])
    return g


ZERO, ONE, TWO, HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)


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
            for r in range(len(shifts)):
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


@kernel
def gelu(begin, stop, h, slope):
    """GELU, x Φ(x), of [N, W] in place, and its slope."""
    for i in range(begin, stop):
        x, out = h[i], slope[i]
        for c in range(len(x)):
            value = x[c]
            below, density = normal_below(value)
            out[c] = below + value * density
            x[c] = value * below


@kernel
def convolve(begin, stop, row_ptr, sender, radial, direction, values, combine, sums, squares, vectors):
    """Sums [N, F] of values [N, F] times radial functions, and |V|², [N, A·H], of V [N, 3, A·H]; see model.py."""
    channels, num_rbf, num_vectors = combine.shape
    size = channels * num_rbf
    for i in range(begin, stop):
        m, g = np.zeros((4, size), np.float32), np.empty(size, np.float32)
        m0, mx, my, mz = m[0], m[1], m[2], m[3]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            ux, uy, uz = direction[e, 0], direction[e, 1], direction[e, 2]
            for a in range(channels):
                for r in range(num_rbf):
                    g[a * num_rbf + r] = radial[e, r]
            row = values[sender[e]]
            for c in range(size):
                t = row[c] * g[c]
                m0[c] += t
                mx[c] += t * ux
                my[c] += t * uy
                mz[c] += t * uz
        v = vectors[i]
        for c in range(size):
            sums[i, c] = m0[c]
        for d in range(3):
            for a in range(channels):
                for h in range(num_vectors):
                    v[d, a * num_vectors + h] = ZERO
                for r in range(num_rbf):
                    number = m[d + 1, a * num_rbf + r]
                    for h in range(num_vectors):
                        v[d, a * num_vectors + h] += number * combine[a, r, h]
        for c in range(channels * num_vectors):
            squares[i, c] = v[0, c] * v[0, c] + v[1, c] * v[1, c] + v[2, c] * v[2, c]


@kernel
def spread_gradient(begin, stop, by_sums, by_squares, vectors, combine, gradient):
    """Write the gradients [N, 4, F] of the sums with radial functions, and with the three directions.

    This comes before `convolve_gradient`, which reads these gradients of the neighbors.
    """
    channels, num_rbf, num_vectors = combine.shape
    for i in range(begin, stop):
        dm = gradient[i]
        for c in range(channels * num_rbf):
            dm[0, c] = by_sums[i, c]
        for d in range(3):
            for a in range(channels):
                for r in range(num_rbf):
                    total = ZERO
                    for h in range(num_vectors):
                        c = a * num_vectors + h
                        total += combine[a, r, h] * by_squares[i, c] * vectors[i, d, c]
                    dm[d + 1, a * num_rbf + r] = TWO * total


@kernel
def convolve_gradient(
    begin, stop, row_ptr, sender, radial, slope, direction, values, gradient, by_values, forces, virial
):
    """Add to the gradient of the values, by_values [N, F], and to forces [N, 3] and virials [N, 9], float64."""
    size, num_rbf = values.shape[1], radial.shape[1]
    for i in range(begin, stop):
        both, own = np.empty((2, size), np.float32), values[i]
        g, s = both[0], both[1]
        m0, mx, my, mz = gradient[i, 0], gradient[i, 1], gradient[i, 2], gradient[i, 3]
        total, f, v = by_values[i], forces[i], virial[i]
        for e in range(row_ptr[i], row_ptr[i + 1]):
            ux, uy, uz, inverse = direction[e, 0], direction[e, 1], direction[e, 2], direction[e, 3]
            for a in range(size // num_rbf):
                for r in range(num_rbf):
                    g[a * num_rbf + r] = radial[e, r]
                    s[a * num_rbf + r] = slope[e, r]
            j = sender[e]
            other, n = values[j], gradient[j]
            n0, nx, ny, nz = n[0], n[1], n[2], n[3]
            # Atom j adds g·v_j to the sums of i and g·v_j·u to its vectors; i adds g·v_i and −g·v_i·u to those of j.
            # Each row takes the gradient of both, so that it writes its own forces alone; the reverse edge, in row j,
            # has the same pair with the other sign.
            along, px, py, pz = ZERO, ZERO, ZERO, ZERO  # dE/dd at fixed u, dE/du
            for c in range(size):
                from_other = n0[c] - (ux * nx[c] + uy * ny[c] + uz * nz[c])
                from_own = m0[c] + ux * mx[c] + uy * my[c] + uz * mz[c]
                total[c] += g[c] * from_other
                along += s[c] * (other[c] * from_own + own[c] * from_other)
                px += g[c] * (other[c] * mx[c] - own[c] * nx[c])
                py += g[c] * (other[c] * my[c] - own[c] * ny[c])
                pz += g[c] * (other[c] * mz[c] - own[c] * nz[c])
            # with du/dvec = (1 − u uᵀ)/d; vec points from i to j, so that dE/dvec is the force on i
            px, py, pz = px * inverse, py * inverse, pz * inverse
            along -= ux * px + uy * py + uz * pz
            gx, gy, gz = along * ux + px, along * uy + py, along * uz + pz
            f[0] += gx
            f[1] += gy
            f[2] += gz
            if inverse > ZERO:
                half = HALF / inverse  # half of the virial, since row j adds the other half
                x, y, z = ux * half, uy * half, uz * half
                v[0] += gx * x
                v[1] += gx * y
                v[2] += gx * z
                v[3] += gy * x
                v[4] += gy * y
                v[5] += gy * z
                v[6] += gz * x
                v[7] += gz * y
                v[8] += gz * z
