"""AIMNet2 energies, forces and charges on the CPU: numba kernels at the edges, PyTorch's matrix products at the atoms.

Shapes: N atoms in B structures, E directed edges, A features, R radial functions, H combinations, F = A·R.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.interfaces import Array, CpuAtoms, CpuChargeNetwork, CpuOutputs, CpuRows, ReadCharges
from ...kernels.numba_pool import run_on_threads
from ...kernels.thread_tuner import ThreadChoice
from .numba_kernels import convolve, convolve_gradient, find_edges, gelu, spread_gradient
from .weights import FrozenAIMNet2, Layer

__all__ = ["CpuAIMNet2"]

_EPSILON = 1e-6


class _Sums(NamedTuple):
    """Of one pass: values [N, F] and the vectors [N, 3, A·H] of their sums, of features or of charges."""

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
        """Adds to by_values, forces and virial from dx, the gradient in sums and squares."""
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
        """The gradients in the charges before and in their weights f."""
        mean = np.bincount(atoms.batch, dq * stage.u, len(stage.total)) / np.maximum(stage.total, 1e-300)
        own = dq - mean[atoms.batch]
        return own, 2 * stage.f * stage.lacking[atoms.batch] * own


def _forward(layers: list[Layer], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Of a network: what it gives, and the slopes of its activations; 1 where there is none."""
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
    """The gradient in what a network reads, from that before its last activation."""
    for k in reversed(range(len(layers))):
        g = g @ layers[k].transposed
        if k > 0:
            g.mul_(slopes[k - 1])
    return g
