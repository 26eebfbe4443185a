"""TensorNet energy and forces on the CPU: numba kernels over CSR rows, forward and hand-written backward, no autograd.

The counterpart of tensornet.py (GPU): same prepared weights, same equations, in fewer and larger kernels.

Shapes: N atoms, E directed edges, F channels, L layers.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.core import config
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.cpu_node import ROWS
from ..kernels.cpu_steps import forces, kernels
from .frozen import FrozenTensorNet

__all__ = ["CpuOutputs", "CpuTensorNet"]

Array = NDArray[Any]

# one thread at a time: numba's own pool, which is used where there is no other, ends the process otherwise
_POOL = threading.Lock()
_MOST_THREADS: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


class CpuOutputs(NamedTuple):
    """Of one run; forces and virial are None when they were not asked for.

    Attributes:
        energy: [N] eV, those of isolated atoms not yet subtracted.
        forces: [N, 3] eV/Å.
        virial: [N, 9] eV, Σ vec ⊗ dE/dvec over the edges of each row.
    """

    energy: Tensor
    forces: Tensor | None
    virial: Tensor | None


class CpuTensorNet:
    """Runs a frozen TensorNet over CSR rows on the CPU, on as many threads as PyTorch uses. Thread-safe.

    Args:
        weights: the prepared model, on the CPU.
    """

    def __init__(self, weights: FrozenTensorNet):
        w = weights
        self.channels, self.num_layers = w.channels, w.num_layers
        self.kernels = kernels(w.channels, w.is_o3)
        self.decay, self.scale = np.float32(w.table.decay), np.float32(w.table.scale)
        self.knots = w.knots.numpy()
        f = w.channels

        def table(t: Tensor) -> Array:
            return t.reshape(t.shape[0], 12 * f).numpy()

        def maps(pair: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
            return pair[0].reshape(3 * f, f).numpy(), pair[1].reshape(3 * f, f).numpy()

        def norm(parts: tuple[Tensor, Tensor, float]) -> tuple[Array, Array, np.float32]:
            return parts[0].numpy(), parts[1].numpy(), np.float32(parts[2])

        self.embedding_table, self.layer_tables = table(w.embedding_table), [table(t) for t in w.layer_tables]
        self.embedding_self, self.layer_self = w.embedding_self.numpy(), [t.flatten().numpy() for t in w.layer_self]
        self.z_receiver, self.z_sender = w.z_receiver.numpy(), w.z_sender.numpy()
        self.embedding_mix = maps((w.embedding_mix, w.embedding_mix_t))
        self.mix_in, self.mix_out = [maps(m) for m in w.mix_in], [maps(m) for m in w.mix_out]
        self.gate_norm, self.out_norm = norm(w.gate_norm), norm(w.out_norm)
        self.gate, self.gate_t = [t.numpy() for t in w.gate], [t.numpy() for t in w.gate_t]
        self.readout, self.readout_t = [t.numpy() for t in w.readout], [t.numpy() for t in w.readout_t]
        self._buffers = _Buffers()

    def run(
        self, z: Tensor, row_ptr: Tensor, sender: Tensor, vec: Tensor, charge_factor: Tensor, with_forces: bool = True
    ) -> CpuOutputs:
        """Energies, and forces with row virials.

        Args:
            z: [N] integers.
            row_ptr: [N + 1], sender: [E] int64; rows sorted by sender and shift, both directions of every pair listed.
            vec: [E, 3] Å from the atom of the row to the sender.
            charge_factor: [N] 1 + 0.1 × total charge.
        """
        with _POOL:
            threads = torch.get_num_threads()
            before = numba.get_num_threads()
            if torch.get_num_threads() != threads:
                # starting numba's pool sets the number of threads of OpenMP, which PyTorch shares
                torch.set_num_threads(threads)
            numba.set_num_threads(max(1, min(threads, _MOST_THREADS)))
            try:
                return self._run(z, row_ptr, sender, vec.float().contiguous().numpy(), charge_factor, with_forces)
            finally:
                numba.set_num_threads(before)

    def _run(
        self, z: Tensor, row_ptr: Tensor, sender: Tensor, vec: Array, charge_factor: Tensor, with_forces: bool
    ) -> CpuOutputs:
        n, layers, k = z.shape[0], self.num_layers, self.kernels
        rows, edges, f = -(-n // ROWS) * ROWS, sender.shape[0], self.channels
        b = self._buffers
        number, q = b("z", rows, dtype=np.int64), b("q", rows)
        number[:n], number[n:], q[:n], q[n:] = z.numpy(), 0, charge_factor.numpy(), 1
        csr = row_ptr.numpy(), sender.numpy()
        knot, offset, unit = b("knot", edges, dtype=np.int64), b("offset", edges), b("unit", edges, 3)
        length, slope, gradient = b("length", edges), b("slope", edges), b("gradient", edges, 3)
        hidden, gate = b("hidden", rows, 2 * f), b("gate", rows, 3 * f)
        x0, mixed, g, dy = (b(name, rows, 9 * f) for name in ("x0", "mixed", "g", "dy"))
        x, inverse = b("x", layers + 1, rows, 9 * f), b("inverse", layers + 1, rows, f)
        y, m, d, dm = (b(name, layers, rows, 9 * f) for name in ("y", "m", "d", "dm"))
        elements = self.z_receiver, self.z_sender

        k.embedding(
            n, *csr, vec, number, self.knots, self.decay, self.scale, self.embedding_table, self.embedding_self,
            *elements, *self.gate_norm, *self.gate, self.embedding_mix[0], self.mix_in[0][0], knot, offset, unit,
            length, x0, hidden, gate, mixed, x[0], inverse[0], y[0],
        )  # fmt: skip
        for i in range(layers):
            after = min(i + 1, layers - 1)
            k.interaction(
                n, *csr, knot, offset, self.layer_tables[i], self.layer_self[i], q, self.mix_out[i][0],
                self.mix_in[after][0], i + 1 == layers, x[i], y[i], m[i], d[i], x[i + 1], inverse[i + 1], y[after],
            )  # fmt: skip
        energy = np.empty(rows, np.float32)
        k.readout(
            *self.out_norm, *self.readout, *self.readout_t, self.mix_out[-1][1], q, x[-1], d[-1], y[-1], m[-1],
            energy, g, dm[-1], dy,
        )  # fmt: skip
        if not with_forces:
            return CpuOutputs(torch.from_numpy(energy[:n]), None, None)
        slope[:] = 0
        for i in reversed(range(layers)):
            before = max(i - 1, 0)
            k.message_backward(
                n, *csr, knot, offset, self.layer_tables[i], self.layer_self[i], q, self.mix_in[i][1],
                self.mix_out[before][1], i == 0, x[i], inverse[i], y[i], dm[i], dy, slope, g, d[before], y[before],
                m[before], dm[before],
            )  # fmt: skip
        k.embedding_backward(
            n, *csr, number, knot, offset, unit, length, self.embedding_table, *elements, self.gate_norm[0],
            self.gate_norm[2], *self.gate_t, self.embedding_mix[1], x0, hidden, gate, mixed, g, slope, gradient,
        )  # fmt: skip
        force, virial = np.empty((n, 3), np.float32), np.empty((n, 9), np.float32)
        forces(*csr, vec, gradient, force, virial)
        return CpuOutputs(*map(torch.from_numpy, (energy[:n], force, virial)))


class _Buffers:
    """Memory by name: it grows when more is needed, and is used again otherwise."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int, dtype: Any = np.float32) -> Array:
        """An array of this shape with any contents."""
        size = math.prod(shape)
        memory = self._memory.get(name)
        if memory is None or memory.size < size:
            memory = self._memory[name] = np.empty(size, dtype)
        return memory[:size].reshape(shape)
