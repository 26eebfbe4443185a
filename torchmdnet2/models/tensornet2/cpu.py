"""TensorNet2 energy, forces and charges on the CPU: numba kernels over CSR rows, forward and hand-written backward.

TensorNet's kernels where the mathematics is the same. Its own are the prediction of charges and the messages, whose
filters depend on them.

Shapes: N atoms in B structures, E directed edges, F channels, L layers, C charge channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...kernels.interfaces import Array, CpuAtoms, CpuOutputs, CpuRows, ReadCharges
from ..tensornet.cpu import BufferPool, CpuBuffers, CpuTensorNet, Shape, chunks
from ..tensornet.numba_kernels import panels
from .numba_kernels import charge_rows, equilibrate, equilibrate_adjoint, gather_slopes, kernels, prepare_edges
from .weights import FrozenTensorNet2

__all__ = ["CpuTensorNet2", "Float32TensorNet2"]


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
        self.filters = [_arrays(f)._replace(charges=f.charges.numpy()) for f in w.filters]
        self.charge_networks = [_arrays(c) for c in w.charge_networks]

    def _new_pool(self) -> BufferPool:
        return _BufferPool(self.channels, self.num_layers, len(self.heads_t), self.charge_channels)

    def charge_input(self, charge: Tensor) -> Tensor:
        """The total charge itself, which acts through the predicted charges alone."""
        return charge

    def _work(self, atoms: CpuAtoms, rows: CpuRows) -> int:
        # twice the filters' 16 F² operations, of which a unit is about 2 F
        return super()._work(atoms, rows) + 16 * self.channels**2 * int(rows.row_ptr[-1]) * self.num_layers // 100

    def _run(self, atoms: CpuAtoms, rows: CpuRows, with_forces: bool, read: ReadCharges | None) -> CpuOutputs:
        layers, k = self.num_layers, self.own
        edges, r = self._begin(atoms, rows)
        n, found = edges.num_atoms, int(rows.row_ptr[-1])
        r.charges[n:], r.gradient_of_charges[n:] = 0, 0
        prepare_edges(n, *edges[1:], rows.vectors, self.cutoff, r.receiver, r.reverse, r.envelope, r.envelope_slope)
        structures = [np.empty((2, len(atoms.total_charge), self.charge_channels)) for _ in range(layers + 1)]
        charges = self._predict(r, atoms, structures, 0)
        for i in range(layers):
            after = min(i + 1, layers - 1)
            charge_rows(len(r.charges), r.charges, self.filters[i].charges, r.by_charge[i])
            k.interaction(
                chunks(r), *edges, r.receiver, r.envelope, r.knot, r.offset, *self._filters(r, i), r.q,
                self.mix_out[i][0], self.mix_in[after][0], i + 1 == layers, with_forces and r.kept[i] > 0,
                r.x[i], r.y[i], r.m[i], r.d[i], r.x[i + 1], r.inverse[i + 1], r.y[after], r.kept2[i], r.kept3[i],
            )  # fmt: skip
            charges = self._predict(r, atoms, structures, i + 1)
        energy = self._read_out(r)[:n, 0].copy()
        of_head, features = self._charges_of_head(r, atoms), self._features(r, n)
        if of_head is not None:
            charges = of_head
        slope = None if read is None else read(charges)
        if not with_forces:
            return CpuOutputs(energy, None, None, charges, features)
        self._read_out_backward(r, atoms, slope, False)
        if of_head is not None:
            slope = None  # which has gone into the features
        r.slope[:found] = 0
        if slope is not None:
            r.charge_slope[:n], r.charge_slope[:n, : self.q_dim] = 0, slope[:, None] / self.q_dim
            self._charge_gradient(r, atoms, structures, layers)
        for i in reversed(range(layers)):
            self._update_backward(r, i + 1, slope is not None or i + 1 < layers)
            f = self.filters[i]
            k.message_backward(
                chunks(r), *edges, r.receiver, r.reverse, r.envelope, r.envelope_slope, r.knot, r.offset,
                *self._filters(r, i), f.second_t, f.third_t, f.charges_t, self.mix_in[i][1], r.kept[i] > 0,
                r.kept2[i], r.kept3[i], r.x[i], r.inverse[i], r.y[i], r.dm[i], r.dy, r.slope, r.g, r.own_slope,
                r.pair_slope,
            )  # fmt: skip
            gather_slopes(n, rows.row_ptr, r.reverse, r.own_slope, r.pair_slope, r.charge_slope)
            self._charge_gradient(r, atoms, structures, i)
        self._update_backward(r, 0, True)
        self._embedding_backward(edges, r)
        return CpuOutputs(energy, *self._forces(edges, rows, r), charges, features)

    def _filters(self, r: Any, layer: int) -> tuple[Array, ...]:
        f = self.filters[layer]
        table, own = self.layer_tables[layer], self.layer_self[layer]
        return table, own, r.by_charge[layer], f.second, f.second_bias, f.third, f.third_bias

    def _predict(self, r: Any, atoms: CpuAtoms, structures: list[Array], stage: int) -> Array:
        """Charges of a stage into r.charges; their means over the channels."""
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

    def _charge_gradient(self, r: Any, atoms: CpuAtoms, structures: list[Array], stage: int) -> None:
        """Of what the charges of a stage are made of, from r.charge_slope."""
        weight, missing = structures[stage]
        equilibrate_adjoint(
            r.predicted[stage], atoms.batch, self.exact_charge, weight, missing, r.charge_slope, r.gradient_of_charges
        )

    def _update_backward(self, r: Any, stage: int, charged: bool) -> None:
        """The gradient through the charges of a stage, then that of the products of the layer before."""
        net, before = self.charge_networks[stage], max(stage - 1, 0)
        self.own.update_backward(
            chunks(r), net.gamma, self.norm_eps, net.first_t, net.second_t, net.third_t, charged, stage > 0,
            r.gradient_of_charges, r.in_hidden[stage], r.out_hidden[stage], r.x[stage], r.inverse[stage], r.g,
            self.mix_out[before][1], r.q, r.d[before], r.y[before], r.m[before], r.dm[before], r.dy,
        )  # fmt: skip


def _arrays(weights: Any) -> Any:
    """The same tuple, of arrays; matrices as panels."""
    return type(weights)(*(panels(t.numpy()) if t.dim() > 1 else t.numpy() for t in weights))


class _CpuBuffers(CpuBuffers):
    """Also of the stages of charges, 0 … L, and of the filters of each layer.

    Attributes:
        kept: [L] integers, whether kept2 [E, 2F] and kept3 [E, 3F] of a layer have room for all edges.
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
    buffers = _CpuBuffers
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

    def _allocate(self, rows: int, edges: int, ghosts: int) -> CpuBuffers:
        buffers: Any = super()._allocate(rows, edges, ghosts)
        f = self.channels
        fit = min(self.layers, _MOST_KEPT // max(5 * f * edges, 1))
        buffers.kept = np.arange(self.layers) < fit
        sizes = [edges if kept else 0 for kept in buffers.kept]
        buffers.kept2 = [np.empty((size, 2 * f), np.float32) for size in sizes]
        buffers.kept3 = [np.empty((size, 3 * f), np.float32) for size in sizes]
        return buffers
