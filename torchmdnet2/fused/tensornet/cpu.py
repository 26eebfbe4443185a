"""TensorNet energy and forces on the CPU: numba kernels over CSR rows, forward and hand-written backward, no autograd.

The counterpart of tensornet.py (GPU): same prepared weights, same equations, in fewer and larger kernels.

Shapes: N atoms, E directed edges, F channels, L layers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...exchange import Exchange
from ..fast_path import Array, CpuNetwork, CpuOutputs
from ..numba_pool import run_on_threads
from ..thread_tuner import ThreadChoice, amount_of_work
from .numba.node import ROWS
from .numba.steps import forces, kernels
from .weights import FrozenTensorNet

__all__ = ["CpuTensorNet"]


class CpuTensorNet(CpuNetwork):
    """Runs a frozen TensorNet over CSR rows on the CPU, on one thread or on as many as PyTorch uses. Thread-safe.

    Args:
        weights: the prepared model, on the CPU.
    """

    def __init__(self, weights: FrozenTensorNet):
        w = weights
        self.channels, self.num_layers = w.channels, w.num_layers
        self.kernels = kernels(w.channels, w.is_o3, w.log_norm)
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
        self._rooms = _Rooms(f, w.num_layers)
        self._threads = ThreadChoice()

    def charge_input(self, charge: Tensor) -> Tensor:
        """The factor of the interaction products."""
        return 1 + 0.1 * charge

    def run(
        self, z: Array, row_ptr: Array, sender: Array, vectors: Array, charge_input: Array, with_forces: bool = True
    ) -> CpuOutputs:
        atoms, edges = len(z), int(row_ptr[-1])
        work = amount_of_work(atoms, edges, self.channels, self.num_layers)

        def run() -> CpuOutputs:
            energy, gradient = self._run(z, row_ptr, sender, vectors, charge_input, with_forces, edges, None)
            if gradient is None:
                return CpuOutputs(energy, None, None)
            force, virial = np.empty((atoms, 3), np.float32), np.empty((atoms, 9), np.float32)
            forces(row_ptr, sender, vectors, gradient, force, virial)
            return CpuOutputs(energy, force, virial)

        return run_on_threads(run, self._threads, work, -(-atoms // ROWS), with_forces)

    def run_domain(
        self, z: Array, row_ptr: Array, sender: Array, vectors: Array, charge_input: Array, exchange: Exchange
    ) -> tuple[Array, Array]:
        atoms, edges = len(row_ptr) - 1, int(row_ptr[-1])
        work = amount_of_work(atoms, edges, self.channels, self.num_layers)

        def run() -> tuple[Array, Array]:
            energy, gradient = self._run(z, row_ptr, sender, vectors, charge_input, True, edges, exchange)
            assert gradient is not None
            return energy, gradient

        return run_on_threads(run, self._threads, work, max(1, -(-atoms // ROWS)), True)

    def _run(
        self, z: Array, row_ptr: Array, sender: Array, vec: Array, charge_factor: Array, with_forces: bool, edges: int,
        exchange: Exchange | None,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Energies of the atoms with rows, and dE/dvec of the edges. Rows of ghosts follow the padded ones."""
        n, layers, k = len(row_ptr) - 1, self.num_layers, self.kernels
        rows = -(-n // ROWS) * ROWS
        r = self._rooms(rows, edges, len(z) - n)
        r.z[:n], r.z[n:rows], r.z[rows:], r.q[:n], r.q[n:] = z[:n], 0, z[n:], charge_factor, 1
        if exchange is not None:
            sender = np.where(sender < n, sender, sender + (rows - n))

        def send(field: Array) -> None:
            if exchange is not None:
                field[rows:] = exchange.forward(torch.from_numpy(field[:n])).numpy()

        energy = np.empty(len(r.q), np.float32)
        elements = self.z_receiver, self.z_sender

        k.embedding(
            n, row_ptr, sender, vec, r.z, self.knots, self.decay, self.scale, self.embedding_table,
            self.embedding_self, *elements, *self.gate_norm, *self.gate, self.embedding_mix[0], self.mix_in[0][0],
            r.knot, r.offset, r.unit, r.length, r.x0, r.hidden, r.gate, r.mixed, r.x[0], r.inverse[0], r.y[0],
        )  # fmt: skip
        for i in range(layers):
            send(r.y[i])
            after = min(i + 1, layers - 1)
            k.interaction(
                n, row_ptr, sender, r.knot, r.offset, self.layer_tables[i], self.layer_self[i], r.q,
                self.mix_out[i][0], self.mix_in[after][0], i + 1 == layers, r.x[i], r.y[i], r.m[i], r.d[i],
                r.x[i + 1], r.inverse[i + 1], r.y[after],
            )  # fmt: skip
        k.readout(
            *self.out_norm, *self.readout, *self.readout_t, self.mix_out[-1][1], r.q, r.x[-1], r.d[-1], r.y[-1],
            r.m[-1], energy, r.g, r.dm[-1], r.dy,
        )  # fmt: skip
        if not with_forces:
            return energy[:n], None
        r.slope[:edges] = 0
        for i in reversed(range(layers)):
            send(r.dm[i])
            before = max(i - 1, 0)
            k.message_backward(
                n, row_ptr, sender, r.knot, r.offset, self.layer_tables[i], self.layer_self[i], r.q,
                self.mix_in[i][1], self.mix_out[before][1], i == 0, r.x[i], r.inverse[i], r.y[i], r.dm[i], r.dy,
                r.slope, r.g, r.d[before], r.y[before], r.m[before], r.dm[before],
            )  # fmt: skip
        k.embedding_backward(
            n, row_ptr, sender, r.z, r.knot, r.offset, r.unit, r.length, self.embedding_table, *elements,
            self.gate_norm[0], self.gate_norm[2], *self.gate_t, self.embedding_mix[1], r.x0, r.hidden, r.gate,
            r.mixed, r.g, r.slope, r.gradient,
        )  # fmt: skip
        return energy[:n], r.gradient


class _Room:
    """Arrays for a number of rows and edges, with any contents; lists have one array for each layer."""

    z: Array
    q: Array
    knot: Array
    offset: Array
    unit: Array
    length: Array
    slope: Array
    gradient: Array
    hidden: Array
    gate: Array
    x0: Array
    mixed: Array
    g: Array
    dy: Array
    x: list[Array]
    inverse: list[Array]
    y: list[Array]
    m: list[Array]
    d: list[Array]
    dm: list[Array]


class _Rooms:
    """The room for the run at hand, in memory that grows when more is needed, and is used again otherwise."""

    def __init__(self, channels: int, layers: int):
        self.channels, self.layers = channels, layers
        self._memory: dict[str, Array] = {}
        self._rows, self._edges, self._room = (-1, -1), -1, _Room()

    def __call__(self, rows: int, edges: int, ghosts: int) -> _Room:
        if (rows, ghosts) != self._rows or edges > self._edges:
            self._rows, self._edges = (rows, ghosts), edges + edges // 8
            self._room = self._furnish(rows, self._edges, ghosts)
        return self._room

    def _furnish(self, rows: int, edges: int, ghosts: int) -> _Room:
        f, layers, room = self.channels, self.layers, _Room()
        shapes: dict[str, tuple[int, ...]] = {
            "z": (rows + ghosts,),
            "q": (rows,),
            **dict.fromkeys(("knot", "offset", "length", "slope"), (edges,)),
            **dict.fromkeys(("unit", "gradient"), (edges, 3)),
            "hidden": (rows, 2 * f),
            "gate": (rows, 3 * f),
            **dict.fromkeys(("x0", "mixed", "g", "dy"), (rows, 9 * f)),
            "x": (layers + 1, rows, 9 * f),
            "inverse": (layers + 1, rows, f),
            **dict.fromkeys(("m", "d"), (layers, rows, 9 * f)),
            **dict.fromkeys(("y", "dm"), (layers, rows + ghosts, 9 * f)),
        }
        for name, shape in shapes.items():
            size = math.prod(shape)
            memory = self._memory.get(name)
            if memory is None or memory.size < size:
                memory = np.empty(size, np.int64 if name in ("z", "knot") else np.float32)
                self._memory[name] = memory
            array = memory[:size].reshape(shape)
            setattr(room, name, list(array) if name in ("x", "inverse", "y", "m", "d", "dm") else array)
        return room
