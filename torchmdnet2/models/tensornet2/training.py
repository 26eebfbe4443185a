"""TensorNet2 as a function of pair vectors, for packed training.

`model.py` is the specification. The embedding is TensorNet's. Filters read the charges of both atoms: their
first layer is linear in the radial basis and in the charges, so it is a sum of a part of the pair and of parts of the
two atoms; the other layers run on both directions of each pair.

Shapes: M atoms, P pairs, S structures, F features, C charge channels, D rows of edges as in training_edges.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.interfaces import PairBatch
from ...kernels.pair_ops import SegmentSum
from ...potential.graph import Features
from ..tensornet.model import Interaction
from ..tensornet.training import PairTensorNet
from . import training_edges as edge_ops
from .model import SOFTENING, ChargePredict, TensorNet2

__all__ = ["PairTensorNet2"]


class PairTensorNet2(PairTensorNet):
    """Scalar features and charges of all atoms of a batch.

    Args:
        model: whose weights are used and trained.
        batch: the pairs.
        use_kernels: Triton's kernels on a CUDA device, numba's on a CPU.
    """

    def __init__(self, model: TensorNet2, batch: PairBatch, use_kernels: bool):
        super().__init__(model, batch, use_kernels)  # type: ignore[arg-type]
        self.charged = model
        if model.q_dim:
            ops: Any = edge_ops
            if use_kernels and not self.triton:
                from . import training_numba as numba_ops  # needs numba

                ops = numba_ops
            self.message, self.edge_sum = ops.Message(batch.pairs, use_kernels), ops.EdgeSum(batch.pairs, use_kernels)
            self.per_structure = SegmentSum(batch.ptr, batch.structure, self.triton)

    def _factors(self) -> Tensor:
        # the total charge acts through the latent charges alone
        return torch.ones_like(self.batch.charge)

    def __call__(self, r: Tensor) -> Features:
        """Return the scalar features [M, F], and charges of all stages [M, stages, C]."""
        model = self.charged
        if not model.q_dim:
            return super().__call__(r)
        radial, geometry = self._at_pairs(r)
        x = self._embed(radial, geometry)
        rbf = radial.functions
        radial = radial._replace(factors=edge_ops.per_edge(radial.factors, self.batch.pairs))
        stages = [self._charges(x, model.charge_predict_0)]
        for layer, predict in zip(model.layers, model.charge_predicts, strict=True):
            assert isinstance(layer, Interaction) and isinstance(predict, ChargePredict)
            first, *hidden, last = layer.linears_scalar
            f = self.act(self._first_layer(first, rbf, stages[-1].to(rbf.dtype)))  # type: ignore[arg-type]
            for linear in hidden:
                f = self.act(linear(f))
            x = self._interact(x, self._filter(last(f), radial, activate=True), layer.linears_tensor)
            stages.append(self._charges(x, predict))
        return Features(self._read_out(x), charges=torch.stack(stages, 1))

    def _first_layer(self, linear: nn.Linear, rbf: Tensor, q: Tensor) -> Tensor:
        """Return the first layer of the filters before its activation, [D, F]."""
        of_pair, of_receiver, of_sender = linear.weight.split((rbf.shape[1], q.shape[1], q.shape[1]), 1)
        return self.edge_sum(
            functional.linear(rbf, of_pair, linear.bias), functional.linear(q, torch.cat([of_receiver, of_sender]))
        )

    def _charges(self, x: Tensor, predict: ChargePredict) -> Tensor:
        """Return latent charges that sum to the total charge, [M, C] e float64; see `equilibrate`."""
        _, norm_a, norm_s = self.inner.norms(x).unbind()
        values = predict.q_norm(torch.cat([x[0], norm_a, norm_s], 1))
        for layer in predict.q_mlp.layers:
            values = layer(values) if isinstance(layer, nn.Linear) else self.act(values)
        charges, weights = values.double().chunk(2, 1)
        u = weights**2 + (SOFTENING if predict.exact else 0.0)
        sums = self._of_atoms(self.per_structure(torch.cat([charges, u], 1)))
        total, total_u = sums.chunk(2, 1)
        total_u = total_u + (0.0 if predict.exact else SOFTENING)
        return charges + u * (self.batch.charge.double()[:, None] - total) / total_u.clamp(min=1e-300)

    def _of_atoms(self, x: Tensor) -> Tensor:
        """Return values of structures [S, …] for each of their atoms."""
        if self.triton:
            return self.per_structure.derivative(0, None, x)  # whose gradient has no atomics
        return x.index_select(0, self.batch.structure)
