"""TensorNet on the CPU: buffers, the network and its kernels.

numba compiles the kernels for a number of channels, forward and hand-written backward, from the functions of
numba_kernels.py. Threads divide the atoms, ROWS at a time. A kernel ends where atoms need results of their neighbors.
Each atom writes its rows alone, and sums have a fixed order, so that results do not depend on the number of threads.

Shapes: N rows (fields padded to a multiple of ROWS), E directed edges, F channels, L layers, K heads, H = F/2. Fields
are [N, 9F] float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...core.compiling_cpu import compiled, kernel, kernel_family
from ...kernels.interfaces import Array, Atoms, CpuBuffers, CpuNetwork, Edges, amount_of_work
from ...kernels.numba_products import ROWS, dense, panels
from .numba_kernels import (
    ONE,
    add,
    ascend,
    descend,
    edge_gradients,
    embed,
    gather,
    gather_adjoint,
    layer_norm,
    layer_norm_adjoint,
    load9,
    log_norm,
    log_norm_adjoint,
    mix,
    norm_gradient,
    normalise_adjoint,
    part_norms,
    place_edges,
    row_force,
    scale_parts,
    sigmoid,
    silu,
    silu_slope,
    squared_norm,
    store9,
    store9_scaled,
)
from .weights import FrozenTensorNet

__all__ = ["BufferPool", "CpuTensorNet", "Fields", "Kernels", "Rows", "forces", "kernels"]


Shape = tuple[int, ...]


class Fields:
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
    readout: Array
    out: Array
    out_slope: Array
    x: list[Array]
    inverse: list[Array]
    y: list[Array]
    m: list[Array]
    d: list[Array]
    dm: list[Array]


class BufferPool:
    """Arrays for the run at hand, in memory that grows when more is needed, and is used again otherwise."""

    fields: type[Fields] = Fields
    integers = frozenset(("z", "knot"))
    doubles: frozenset[str] = frozenset()
    listed = frozenset(("x", "inverse", "y", "m", "d", "dm"))

    def __init__(self, channels: int, layers: int, heads: int):
        self.channels, self.layers, self.heads = channels, layers, heads
        self._memory: dict[str, Array] = {}
        self._rows, self._edges, self._current = (-1, -1), -1, self.fields()

    def __call__(self, rows: int, edges: int, ghosts: int = 0) -> Fields:
        """Return arrays for so many rows and edges; z, y and dm also have rows of ghosts."""
        if (rows, ghosts) != self._rows or edges > self._edges:
            self._rows, self._edges = (rows, ghosts), edges + edges // 8
            self._current = self._allocate(rows, self._edges, ghosts)
        return self._current

    def _shapes(self, rows: int, edges: int, ghosts: int) -> dict[str, Shape]:
        f, layers = self.channels, self.layers
        return {
            "z": (rows + ghosts,),
            "q": (rows,),
            **dict.fromkeys(("knot", "offset", "length", "slope"), (edges,)),
            **dict.fromkeys(("unit", "gradient"), (edges, 3)),
            "hidden": (rows, 2 * f),
            "gate": (rows, 3 * f),
            **dict.fromkeys(("x0", "mixed", "g", "dy"), (rows, 9 * f)),
            "readout": (rows, f),
            **dict.fromkeys(("out", "out_slope"), (rows, self.heads)),
            "x": (layers + 1, rows, 9 * f),
            "inverse": (layers + 1, rows, f),
            **dict.fromkeys(("m", "d"), (layers, rows, 9 * f)),
            **dict.fromkeys(("y", "dm"), (layers, rows + ghosts, 9 * f)),
        }

    def _allocate(self, rows: int, edges: int, ghosts: int) -> Fields:
        fields = self.fields()
        for name, shape in self._shapes(rows, edges, ghosts).items():
            size = math.prod(shape)
            memory = self._memory.get(name)
            if memory is None or memory.size < size:
                wide = np.int64 if name in self.integers else np.float64
                memory = np.empty(size, wide if name in self.integers | self.doubles else np.float32)
                self._memory[name] = memory
            array = memory[:size].reshape(shape)
            setattr(fields, name, list(array) if name in self.listed else array)
        return fields


# --- TensorNet energy, forces and charges on the CPU: numba kernels over CSR rows, forward and backward ---
#
# The counterpart of gpu.py: same prepared weights, same equations, in fewer and larger kernels, without autograd.


class Rows(NamedTuple):
    """First arguments of kernels that read edges: N, row_ptr [N + 1], sender [≥ E]."""

    num_atoms: int
    row_ptr: Array
    sender: Array


class CpuTensorNet(CpuNetwork):
    """Runs a frozen TensorNet over CSR rows on the CPU. Not locked: the arrays are those of all steps.

    Args:
        weights: the prepared model, on the CPU.
    """

    def __init__(self, weights: FrozenTensorNet):
        w = weights
        self.channels, self.num_layers = w.channels, w.num_layers
        self.kernels = kernels(w.channels, w.is_o3, w.log_norm)
        self.decay, self.scale = np.float32(w.table.decay), np.float32(w.table.scale)
        self.knots = w.knots.numpy()

        def table(t: Tensor) -> Array:
            return t.reshape(t.shape[0], -1).numpy()

        def maps(pair: tuple[Tensor, Tensor]) -> tuple[Array, Array]:
            return panels(pair[0].numpy()), panels(pair[1].numpy())

        def norm(parts: tuple[Tensor, Tensor, float]) -> tuple[Array, Array, np.float32]:
            return parts[0].numpy(), parts[1].numpy(), np.float32(parts[2])

        self.embedding_table, self.layer_tables = table(w.embedding_table), [table(t) for t in w.layer_tables]
        self.embedding_self, self.layer_self = w.embedding_self.numpy(), [t.flatten().numpy() for t in w.layer_self]
        self.z_receiver, self.z_sender = w.z_receiver.numpy(), w.z_sender.numpy()
        self.embedding_mix = maps((w.embedding_mix, w.embedding_mix_t))
        self.mix_in, self.mix_out = [maps(m) for m in w.mix_in], [maps(m) for m in w.mix_out]
        self.gate_norm, self.out_norm = norm(w.gate_norm), norm(w.out_norm)
        (w1, b1, w2, b2), (w3, b3) = ([t.numpy() for t in parts] for parts in (w.gate, w.readout[:2]))
        self.gate, self.gate_t = (panels(w1), b1, panels(w2), b2), [panels(t.numpy()) for t in w.gate_t]
        self.readout, self.readout_t = (panels(w3), b3), panels(w.readout_t[0].numpy())
        none = torch.zeros(w.num_layers + 1, w.channels, device="cpu")
        self.has_linear, self.linear = w.linear is not None, (none if w.linear is None else w.linear).numpy()
        self.has_charges = False
        self._set_heads([w.readout[2:]])

    def add_charges(self, head: nn.Module) -> None:
        """Take a head of charges (models/heads.py), instead of those that the network itself may have."""
        network: Any = copy.deepcopy(head).cpu().float()
        first, _silu, last = network.output_network.layers
        self._set_heads([self._energy, (first.weight.T, first.bias, last.weight[0], last.bias)])
        self.has_charges = True

    def _set_heads(self, heads: Sequence[tuple[Tensor, ...]]) -> None:
        """Set K networks F → H → 1 on the features, given as [F, H], [H], [H], [1]; the first is the energy's."""
        self._energy = heads[0]
        w2, b2, w3, b3 = (torch.stack(parts).detach().numpy() for parts in zip(*heads, strict=True))
        self.heads, self.heads_t = (panels(w2), b2, w3, b3[:, 0]), panels(w2.transpose(0, 2, 1))
        self._pool = self._new_pool()

    def _new_pool(self) -> BufferPool:
        return BufferPool(self.channels, self.num_layers, len(self.heads_t))

    def charge_input(self, charge: Tensor) -> Tensor:
        """Return the factor of the interaction products."""
        return 1 + 0.1 * charge

    def work(self, atoms: Atoms, edges: Edges) -> tuple[int, int]:
        n = atoms.num_rows
        return amount_of_work(len(atoms.z), int(edges.row_ptr[-1]), self.channels, self.num_layers), -(-n // ROWS)

    def predict(self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        rows, r = buffers.state = self._begin(atoms, edges)
        buffers.energy, buffers.charges = self._forward(rows, r, atoms)
        buffers.features = self._features(r, rows.num_atoms)

    def differentiate(
        self, buffers: CpuBuffers, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool,
        charge_slope: Array | None,
    ) -> None:  # fmt: skip
        rows, r = buffers.state
        self._backward(rows, r, atoms, charge_slope)
        self._add_up(buffers, rows, r, atoms, edges)

    def _forward(self, edges: Rows, r: Fields, atoms: Atoms) -> tuple[Array, Array | None]:
        """Return energies, and the charges of a head."""
        n, layers = edges.num_atoms, self.num_layers
        r.q[:n] = atoms.charge_input
        for i in range(layers):
            self._send(atoms, r.y[i])
            after = min(i + 1, layers - 1)
            self.kernels.interaction(
                chunks(r), *edges, r.knot, r.offset, self.layer_tables[i], self.layer_self[i], r.q, self.mix_out[i][0],
                self.mix_in[after][0], i + 1 == layers, r.x[i], r.y[i], r.m[i], r.d[i], r.x[i + 1], r.inverse[i + 1],
                r.y[after],
            )  # fmt: skip
        return self._read_out(r)[:n, 0] + self._linear_energies(r, n), self._charges_of_head(r, atoms)

    def _backward(self, edges: Rows, r: Fields, atoms: Atoms, charge_slope: Array | None) -> None:
        """Fill `gradient` of the arrays."""
        # down to dM of the last layer; each kernel then completes a layer and goes down to dM of the one before
        self._read_out_backward(r, atoms, charge_slope, True)
        r.slope[: int(edges.row_ptr[-1])] = 0
        for i in reversed(range(self.num_layers)):
            self._send(atoms, r.dm[i])
            # at the first layer the arguments of the one before are not read
            before = max(i - 1, 0)
            self.kernels.message_backward(
                chunks(r), *edges, r.knot, r.offset, self.layer_tables[i], self.layer_self[i], r.q, self.mix_in[i][1],
                self.linear[i], self.mix_out[before][1], i == 0, r.x[i], r.inverse[i], r.y[i], r.dm[i], r.dy,
                r.slope, r.g, r.d[before], r.y[before], r.m[before], r.dm[before],
            )  # fmt: skip
        self._embedding_backward(edges, r)

    # --- parts that models with other messages share -----------------------------------------------------------------

    def _begin(self, atoms: Atoms, rows: Edges) -> tuple[Rows, Any]:
        """Compute the embedding; return the arrays of its results. Rows of ghosts follow the padded ones."""
        n, z, sender = len(rows.row_ptr) - 1, atoms.z, rows.sender
        padded = -(-n // ROWS) * ROWS
        r = self._pool(padded, int(rows.row_ptr[-1]), len(z) - n)
        r.z[:n], r.z[n:padded], r.z[padded:], r.q[:] = z[:n], 0, z[n:], 1
        if atoms.exchange is not None:
            sender = np.where(sender < n, sender, sender + (padded - n))
        self.kernels.embedding(
            chunks(r), n, rows.row_ptr, sender, rows.vectors, r.z, self.knots, self.decay, self.scale,
            self.embedding_table, self.embedding_self, self.z_receiver, self.z_sender, *self.gate_norm,
            *self.gate, self.embedding_mix[0], self.mix_in[0][0], r.knot, r.offset, r.unit, r.length, r.x0, r.hidden,
            r.gate, r.mixed, r.x[0], r.inverse[0], r.y[0],
        )  # fmt: skip
        return Rows(n, rows.row_ptr, sender), r

    def _read_out(self, r: Fields) -> Array:
        """Return what the heads give, [N, K]."""
        self.kernels.readout(chunks(r), *self.out_norm, *self.readout, *self.heads, r.x[-1], r.readout, r.out)
        return r.out

    def _linear_energies(self, r: Fields, num_atoms: int) -> Array | np.float32:
        """Return energies [N] of the isotropic parts of X; x has X/(‖X‖²+1), and X itself after the last layer."""
        if not self.has_linear:
            return np.float32(0)
        parts = [x[:num_atoms, : self.channels] for x in r.x]
        parts[:-1] = [part / inverse[:num_atoms] for part, inverse in zip(parts[:-1], r.inverse, strict=False)]
        return sum((part * weight).sum(1) for part, weight in zip(parts, self.linear, strict=True))

    def _features(self, r: Fields, num_atoms: int) -> Array | None:
        return (
            torch.nn.functional.silu(torch.from_numpy(r.readout[:num_atoms])).numpy() if self.keeps_features else None
        )

    def _read_out_backward(self, r: Fields, atoms: Atoms, charge_slope: Array | None, descends: bool) -> None:
        n = len(atoms.batch)
        # padded rows too: they have no edges, so that nothing of them reaches a force
        r.out_slope[:, 0], r.out_slope[:, 1:] = 1, 0
        if charge_slope is not None and self.has_charges:
            # q = c + (Q − Σc)/n: dE/dc = dE/dq minus its mean over the structure
            r.out_slope[:n, 1] = charge_slope - _mean(charge_slope, atoms)[atoms.batch]
        w2, b2, w3, _b3 = self.heads
        self.kernels.readout_backward(
            chunks(r), self.out_norm[0], self.out_norm[2], w2, b2, w3, self.readout_t, self.heads_t, self.linear[-1],
            self.mix_out[-1][1], descends, r.q, r.x[-1], r.d[-1], r.y[-1], r.m[-1], r.readout, r.out_slope, r.g,
            r.dm[-1], r.dy,
        )  # fmt: skip

    def _charges_of_head(self, r: Fields, atoms: Atoms) -> Array | None:
        """Return charges that sum to the total charge of each structure."""
        if not self.has_charges:
            return None
        charges = r.out[: len(atoms.batch), 1].astype(np.float64)
        size = np.bincount(atoms.batch, minlength=len(atoms.total_charge))
        return charges + (atoms.total_charge / np.maximum(size, 1) - _mean(charges, atoms))[atoms.batch]

    def _embedding_backward(self, edges: Rows, r: Fields) -> None:
        """Compute dE/dvec of the edges, from the gradient of the embedding and the slopes of the messages."""
        self.kernels.embedding_backward(
            chunks(r), *edges, r.z, r.knot, r.offset, r.unit, r.length, self.embedding_table, self.z_receiver,
            self.z_sender, self.gate_norm[0], self.gate_norm[2], *self.gate_t, self.embedding_mix[1], r.x0,
            r.hidden, r.gate, r.mixed, r.g, r.slope, r.gradient,
        )  # fmt: skip

    def _send(self, atoms: Atoms, field: Array) -> None:
        """Fill the rows of ghosts, which are the last ones."""
        if atoms.exchange is not None:
            atoms.send(field, len(field) - atoms.exchange.num_ghosts)

    def _add_up(self, buffers: CpuBuffers, rows: Rows, r: Fields, atoms: Atoms, edges: Edges) -> None:
        """Sum up forces and virials."""
        n, row_ptr, sender = rows
        if atoms.exchange is None:
            buffers.forces, buffers.virial = np.empty((n, 3), np.float32), np.empty((n, 9), np.float32)
            forces(n, row_ptr, sender, edges.vectors, r.gradient, buffers.forces, buffers.virial)
            return
        buffers.forces, buffers.virial = np.zeros((len(atoms.z), 3)), np.zeros((n, 9))
        forces_with_ghosts(row_ptr, edges.sender, edges.vectors, r.gradient, buffers.forces, buffers.virial)


def chunks(r: Fields) -> int:
    """Return how many times ROWS atoms there are."""
    return len(r.q) // ROWS


def _mean(values: Array, atoms: Atoms) -> Array:
    """Return the mean over each structure, [B]."""
    size = np.bincount(atoms.batch, minlength=len(atoms.total_charge))
    return np.bincount(atoms.batch, values, len(size)) / np.maximum(size, 1)


ZERO = np.float32(0)


class Kernels(NamedTuple):
    """The kernels in the order of a step; `message_backward` follows the layers backwards."""

    embedding: Callable
    interaction: Callable
    readout: Callable
    readout_backward: Callable
    message_backward: Callable
    embedding_backward: Callable


@kernel_family
def kernels(F: int, o3: bool, log: bool) -> Kernels:
    """Kernels for F channels, for O(3) or SO(3), with norms that are logarithms or layer norms.

    Compiled on first use, and kept in numba's cache on disk.
    """
    H = F // 2

    @kernel
    def embedding(
        begin, stop,
        n, row_ptr, sender, vec, z, knots, decay, scale, table, self_filter, z_receiver, z_sender,
        gamma, beta, eps, w1, b1, w2, b2, w_mix, w_in, knot, offset, unit, length, x0, hidden, gate, mixed, x, inverse,
        y,
    ):  # fmt: skip
        """X⁰ from the edges, its gate, X = gate ⊙ mix(X⁰), X/(‖X‖²+1), and Y of the first layer."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            norm, normed = np.empty((ROWS, F), np.float32), np.empty((ROWS, F), np.float32)
            active, opened = np.empty((ROWS, 2 * F), np.float32), np.empty((ROWS, 3 * F), np.float32)
            for r in range(ROWS):
                i = first + r
                row, out = x0[i], norm[r]
                z_here, z_there = z_receiver[z[i]], z_sender[z[i]]
                row[:] = ZERO
                if i < n:
                    start, end = row_ptr[i], row_ptr[i + 1]
                    place_edges(start, end, vec, knots, decay, scale, knot, offset, unit, length)
                    embed(start, end, sender, z, knot, offset, unit, table, z_here, z_sender, row, F)
                for c in range(F):
                    row[c] += self_filter[c] * (z_here[c] + z_there[c])
                    out[c] = squared_norm(load9(row, c, F))
                if log:
                    log_norm(out, gamma, beta, normed[r], F)
                else:
                    layer_norm(out, gamma, beta, eps, normed[r], F)
            dense(normed, 0, w1, b1, hidden, first, F, 2 * F)
            silu(hidden, first, active, 0, ROWS, 2 * F)
            dense(active, 0, w2, b2, gate, first, 2 * F, 3 * F)
            mix(x0, first, w_mix, mixed, first, F)
            silu(gate, first, opened, 0, ROWS, 3 * F)
            for r in range(ROWS):
                i = first + r
                out, row, x_row, f_row = opened[r], mixed[i], x[i], inverse[i]
                for c in range(F):
                    x9 = scale_parts(out[c], out[c + F], out[c + 2 * F], load9(row, c, F))
                    f = ONE / (squared_norm(x9) + ONE)
                    f_row[c] = f
                    store9_scaled(x_row, c, F, x9, f)
            mix(x, first, w_in, y, first, F)

    @kernel
    def interaction(
        begin, stop,
        n, row_ptr, sender, knot, offset, table, self_filter, charge_factor, w_out, w_next, last,
        x, y, m, d, x_next, inverse_next, y_next,
    ):  # fmt: skip
        """M, P, D, X' = X + D + q D²; then X'/(‖X'‖²+1) and Y of the next layer, or X' itself after the last."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            for r in range(ROWS):
                i = first + r
                m_row, y_row = m[i], y[i]
                for c in range(F):
                    y9 = load9(y_row, c, F)
                    store9(m_row, c, F, scale_parts(self_filter[c], self_filter[c + F], self_filter[c + 2 * F], y9))
                if i < n:
                    gather(row_ptr[i], row_ptr[i + 1], sender, knot, offset, table, y, m_row, F)
            ascend(first, y, m, x, charge_factor, w_out, w_next, last, d, x_next, inverse_next, y_next, F, o3)

    @kernel
    def readout(begin, stop, gamma, beta, eps, w1, b1, w2, b2, w3, b3, x, hidden, out):
        """What the K heads give: out [N, K]; w2 [K, F, H], w3 [K, H]. The features are silu(hidden)."""
        for chunk in range(begin, stop):
            first = chunk * ROWS
            normed, active = np.empty((ROWS, 3 * F), np.float32), np.empty((ROWS, F), np.float32)
            half, opened = np.empty((ROWS, H), np.float32), np.empty((ROWS, H), np.float32)
            norms = np.empty(3 * F, np.float32)
            for r in range(ROWS):
                row = x[first + r]
                for c in range(F):
                    norms[c], norms[c + F], norms[c + 2 * F] = part_norms(load9(row, c, F))
                if log:
                    log_norm(norms, gamma, beta, normed[r], 3 * F)
                else:
                    layer_norm(norms, gamma, beta, eps, normed[r], 3 * F)
            dense(normed, 0, w1, b1, hidden, first, 3 * F, F)
            silu(hidden, first, active, 0, ROWS, F)
            for k in range(out.shape[1]):
                dense(active, 0, w2[k], b2[k], half, 0, F, H)
                silu(half, 0, opened, 0, ROWS, H)
                for r in range(ROWS):
                    total = b3[k]
                    for c in range(H):
                        total += opened[r, c] * w3[k, c]
                    out[first + r, k] = total

    @kernel
    def readout_backward(
        begin, stop,
        gamma, eps, w2, b2, w3, w1t, w2t, linear, w_out_t, descends, charge_factor, x, d, y, m, hidden, slope, g, dm, dy
    ):  # fmt: skip
        """From slope [N, K], dE/d(out) of `readout`, write g, the gradient of X.

        If it `descends`, then also dM and the product's part of dY of the last layer, which need g of this atom alone.
        linear [F]: the slope of the linear read-out by the isotropic part of X.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            active, total = np.empty((ROWS, F), np.float32), np.zeros((ROWS, F), np.float32)
            half, dhalf = np.empty((ROWS, H), np.float32), np.empty((ROWS, H), np.float32)
            share, dnorm = np.empty((ROWS, F), np.float32), np.empty((ROWS, 3 * F), np.float32)
            norms, none = np.empty(3 * F, np.float32), np.zeros(3 * F, np.float32)
            silu(hidden, first, active, 0, ROWS, F)
            for k in range(slope.shape[1]):
                # the hidden layers of the heads are computed again; the gradients of the heads add up in the features
                dense(active, 0, w2[k], b2[k], half, 0, F, H)
                for r in range(ROWS):
                    out, w, f = dhalf[r], w3[k], slope[first + r, k]
                    for c in range(H):
                        out[c] = f * w[c]
                silu_slope(half, 0, dhalf, 0, ROWS, H)
                dense(dhalf, 0, w2t[k], none, share, 0, H, F)
                for r in range(ROWS):
                    row, out = share[r], total[r]
                    for c in range(F):
                        out[c] += row[c]
            silu_slope(hidden, first, total, 0, ROWS, F)
            dense(total, 0, w1t, none, dnorm, 0, F, 3 * F)
            for r in range(ROWS):
                f, row, out = dnorm[r], x[first + r], g[first + r]
                for c in range(F):
                    norms[c], norms[c + F], norms[c + 2 * F] = part_norms(load9(row, c, F))
                if log:
                    log_norm_adjoint(norms, gamma, f, 3 * F)
                else:
                    layer_norm_adjoint(norms, gamma, eps, f, 3 * F)
                for c in range(F):
                    store9(out, c, F, norm_gradient(load9(row, c, F), f[c], f[c + F], f[c + 2 * F]))
                # g is of X itself, which the linear read-out takes too
                for c in range(F):
                    out[c] += linear[c]
            if descends:
                descend(first, g, d, w_out_t, y, m, charge_factor, dm, dy, F, o3)

    @kernel
    def message_backward(
        begin, stop,
        n, row_ptr, sender, knot, offset, table, self_filter, charge_factor, w_in_t, linear, w_out_t, is_first,
        x, inverse, y, dm, dy, slope, g, d_before, y_before, m_before, dm_before,
    ):  # fmt: skip
        """Write dY from dM of the neighbors, then g, the gradient of X before this layer.

        Then dM and the product's part of dY of the layer before follow, which need g of this atom alone. They go to
        dm_before, since other threads still read dm; dy needs no second array, because rows of it are read here only.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            dx = np.empty((ROWS, 9 * F), np.float32)
            for r in range(ROWS):
                i = first + r
                dm_row, dy_row = dm[i], dy[i]
                for c in range(F):
                    # dy holds the part through the product; the message of the atom to itself comes first
                    own = scale_parts(self_filter[c], self_filter[c + F], self_filter[c + 2 * F], load9(dm_row, c, F))
                    store9(dy_row, c, F, add(own, load9(dy_row, c, F)))
                if i < n:
                    gather_adjoint(row_ptr[i], row_ptr[i + 1], sender, knot, offset, table, y[i], dm, dy_row, slope, F)
            mix(dy, first, w_in_t, dx, 0, F)
            for r in range(ROWS):
                i = first + r
                g_row, x_row, f_row, dx_row = g[i], x[i], inverse[i], dx[r]
                for c in range(F):
                    # x = X/(‖X‖²+1) went into Y = mix(x) and into the residual stream
                    g9 = add(load9(dx_row, c, F), load9(g_row, c, F))
                    store9(g_row, c, F, normalise_adjoint(f_row[c], load9(x_row, c, F), g9))
                for c in range(F):
                    # the linear read-out takes X, and so comes after the normalisation
                    g_row[c] += linear[c]
            if not is_first:
                descend(first, g, d_before, w_out_t, y_before, m_before, charge_factor, dm_before, dy, F, o3)

    @kernel
    def embedding_backward(
        begin, stop,
        n, row_ptr, sender, z, knot, offset, unit, length, table, z_receiver, z_sender, gamma, eps, w1t, w2t, w_mix_t,
        x0, hidden, gate, mixed, g, slope, gradient,
    ):  # fmt: skip
        """From g, the gradient of X = silu(h) ⊙ mix(X⁰), write dE/dvec of each edge, with the slopes of the messages.

        h is the gate before its activation. dX⁰ = mixᵀ(silu(h) ⊙ g) + d‖X⁰‖² · ∂‖X⁰‖²/∂X⁰, the second through the
        network of the gate, from silu'(h) ⊙ ⟨g, mix(X⁰)⟩ by parts.
        """
        for chunk in range(begin, stop):
            first = chunk * ROWS
            dgate, dhidden = np.empty((ROWS, 3 * F), np.float32), np.empty((ROWS, 2 * F), np.float32)
            dnorm, dx = np.empty((ROWS, F), np.float32), np.empty((ROWS, 9 * F), np.float32)
            norm, none, sigmoids = (
                np.empty(F, np.float32),
                np.zeros(3 * F, np.float32),
                np.empty((ROWS, 3 * F), np.float32),
            )
            sigmoid(gate, first, sigmoids, 0, ROWS, 3 * F)
            for r in range(ROWS):
                h, g_row, row, out, s = gate[first + r], g[first + r], mixed[first + r], dgate[r], sigmoids[r]
                for c in range(F):
                    g9, x9 = load9(g_row, c, F), load9(row, c, F)
                    out[c] = g9[0] * x9[0]
                    out[c + F] = g9[1] * x9[1] + g9[2] * x9[2] + g9[3] * x9[3]
                    out[c + 2 * F] = g9[4] * x9[4] + g9[5] * x9[5] + g9[6] * x9[6] + g9[7] * x9[7] + g9[8] * x9[8]
                for c in range(F):
                    # g is replaced only now that dgate has been made of it
                    gates = h[c] * s[c], h[c + F] * s[c + F], h[c + 2 * F] * s[c + 2 * F]
                    store9(g_row, c, F, scale_parts(gates[0], gates[1], gates[2], load9(g_row, c, F)))
                for c in range(3 * F):
                    out[c] *= s[c] * (ONE + h[c] * (ONE - s[c]))
            dense(dgate, 0, w2t, none, dhidden, 0, 3 * F, 2 * F)
            silu_slope(hidden, first, dhidden, 0, ROWS, 2 * F)
            dense(dhidden, 0, w1t, none, dnorm, 0, 2 * F, F)
            mix(g, first, w_mix_t, dx, 0, F)
            for r in range(ROWS):
                i = first + r
                row, f, dx_row = x0[i], dnorm[r], dx[r]
                for c in range(F):
                    norm[c] = squared_norm(load9(row, c, F))
                if log:
                    log_norm_adjoint(norm, gamma, f, F)
                else:
                    layer_norm_adjoint(norm, gamma, eps, f, F)
                for c in range(F):
                    x9 = norm_gradient(load9(row, c, F), f[c], f[c], f[c])
                    store9(dx_row, c, F, add(load9(dx_row, c, F), x9))
                if i < n:
                    # an edge's vector is in X⁰ of its receiver alone, so that dX⁰ of other atoms is not needed
                    edge_gradients(
                        row_ptr[i], row_ptr[i + 1], sender, z, knot, offset, unit, length, table, z_receiver[z[i]],
                        z_sender, dx_row, slope, gradient, F,
                    )  # fmt: skip

    return Kernels(embedding, interaction, readout, readout_backward, message_backward, embedding_backward)


@kernel
def forces(begin, stop, row_ptr, sender, vec, gradient, force, virial):
    """Forces [N, 3] and row virials [N, 9] from dE/dvec of the directed edges [E, 3]."""
    # a separate kernel: it reads gradients of reverse edges, which are in the rows of other threads
    for i in range(begin, stop):
        row_force(i, row_ptr, sender, vec, gradient, force[i], virial[i])


@compiled(error_model="numpy")
def forces_with_ghosts(row_ptr, sender, vectors, gradient, force, virial):
    """Add forces [M, 3] and row virials [n, 9] of dE/dvec [E, 3]. Ghosts come after the local atoms, without rows."""
    # on one thread: a row also adds to its senders
    for i in range(len(row_ptr) - 1):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j = sender[e]
            for a in range(3):
                g = gradient[e, a]
                force[i, a] += g
                force[j, a] -= g
                for b in range(3):
                    virial[i, 3 * b + a] += vectors[e, b] * g
