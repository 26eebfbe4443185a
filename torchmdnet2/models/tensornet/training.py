"""TensorNet as a function of pair vectors, for packed training: one filter for both directions of a pair.

`model.py` is the specification. Shapes: M atoms, the last K alone, P pairs, K elements, R radial functions,
F features; fields of tensors are [9, M, F].
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.interfaces import PairBatch, PairNetwork
from ...kernels.pair_ops import MultilinearOp, one_hot
from ...neighbors.neighbor_list import safe_norm
from ...potential.graph import Features
from ..layers import ExpNormalBasis, GaussianBasis, safe_divide
from .model import Interaction, TensorNet
from .training_atoms import Inner, Mix, Product, Scale, enveloped, silu
from .training_pairs import Basis, Embedding, Message, PairGeometry
from .training_tensors import add_square, normalise

__all__ = ["PairTensorNet"]


_TRITON: Any = SimpleNamespace(
    Embedding=Embedding, Inner=Inner, Message=Message, Product=Product, Scale=Scale, add_square=add_square,
    normalise=normalise, silu=silu,
)  # fmt: skip
"""On GPUs by kernels; without kernels, the plain expressions beside them."""


class PairTensorNet(PairNetwork):
    """Scalar features of all atoms of a batch.

    Args:
        model: whose weights are used and trained.
        batch: the pairs.
        use_kernels: Triton's kernels on a CUDA device, numba's on a CPU.
    """

    def __init__(self, model: TensorNet, batch: PairBatch, use_kernels: bool):
        self.model, self.batch = model, batch
        self.plain_norm = all(layer.tensor_norm == "square" for layer in model.layers)
        self.q = self._factors()
        self.use_kernels = use_kernels
        self.triton = use_kernels and batch.z.is_cuda
        ops = _TRITON
        if use_kernels and not self.triton:
            from . import training_numba as numba_ops  # needs numba

            ops = numba_ops
        self.ops = ops
        self.message, self.embedding = ops.Message(batch.pairs, use_kernels), ops.Embedding(batch.pairs, use_kernels)
        self.inner, self.scale, self.mix = ops.Inner(use_kernels), ops.Scale(use_kernels), Mix(use_kernels)
        by_kernel = self.triton or (use_kernels and model.group == "O(3)")
        self.with_weights: dict[MultilinearOp, frozenset[int]] = {
            self.mix: frozenset({1}),
            self.embedding: frozenset({2}),
        }
        self.product = ops.Product(self.q, model.group, by_kernel)
        self.square = Product(self.q / 2, "O(3)", False)  # q D² = q/2 (D D + D D)
        self.silu = isinstance(model.act, nn.SiLU)
        self.act: Callable[[Tensor], Tensor] = ops.silu if use_kernels and self.silu else model.act

    def _factors(self) -> Tensor:
        """Return factors of the products of tensors, [M]."""
        return 1 + 0.1 * self.batch.charge

    def __call__(self, r: Tensor) -> Features:
        """Return the scalar features [M, F]."""
        model = self.model
        rbf, envelope, geometry = self._values(r)
        x = self._embed(rbf, envelope, geometry)
        isotropic = [x[0]]
        for layer in model.layers:
            assert isinstance(layer, Interaction)
            f = rbf
            *hidden, last = layer.linears_scalar
            for linear in hidden:
                f = self.act(linear(f))
            f = self._filter(last(f), envelope, activate=True)
            x = self._interact(x, f, layer.linears_tensor)
            isotropic.append(x[0])
        summed = isinstance(model, TensorNet)  # TensorNet2 comes here too
        return Features(self._read_out(x), energies=model.linear_energies(isotropic) if summed else None)

    def _read_out(self, x: Tensor) -> Tensor:
        norms = self.inner.norms(x).transpose(0, 1).flatten(1)
        return self.act(self.model.linear(self.model.out_norm(norms)))

    def _values(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return radial basis [P + 1, R], cutoff function [P + 1], geometry [P + 1, 9]; last row: an atom and
        itself."""
        model, layer = self.model, self.model.tensor_embedding
        basis = _kernel_basis(model.distance_expansion) if self.triton else None
        if basis is not None:
            return PairGeometry(r, basis, model.envelope.lower, model.envelope.upper, layer.skew_sign)(r)
        r = torch.cat([r, r.new_zeros(1, 3)])
        distances = safe_norm(r)
        # skew(u) is written for u from sender to receiver; a pair's vector points from its receiver to its sender
        geometry = layer.geometry(-safe_divide(r, distances[:, None]))
        return model.distance_expansion(distances), model.envelope(distances), geometry

    def _embed(self, rbf: Tensor, envelope: Tensor, geometry: Tensor) -> Tensor:
        layer, batch = self.model.tensor_embedding, self.batch
        elements = batch.z[-batch.num_elements :]
        of_receiver, of_sender = layer.emb2.weight.chunk(2, 1)
        z = layer.emb.weight[elements]
        table = torch.cat([z @ of_receiver.T + layer.emb2.bias, z @ of_sender.T], 1)
        weights = one_hot(batch.element, batch.num_elements, table.dtype) @ table
        projections = [layer.distance_proj1, layer.distance_proj2, layer.distance_proj3]
        weight, bias = torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])
        f = self._filter(functional.linear(rbf, weight, bias), envelope, activate=False)
        x = self.embedding(f, geometry, weights)
        gate = layer.init_norm(self.inner.norms(x).sum(0))
        for linear in layer.linears_scalar:
            gate = self.act(linear(gate))
        gate = gate.unflatten(1, (3, -1)).transpose(0, 1)
        return self.scale(self.mix(x, _matrices(layer.linears_tensor, 0)), gate)

    def _filter(self, x: Tensor, envelope: Tensor, activate: bool) -> Tensor:
        """Return filters [P + 1, 3, F] that end at the cutoff."""
        if self.triton and (self.silu or not activate):
            f = enveloped(x, envelope, activate)
        else:
            f = (self.act(x) if activate else x) * envelope[:, None]
        return f.unflatten(1, (3, -1))

    def _interact(self, x: Tensor, f: Tensor, linears: nn.ModuleList) -> Tensor:
        x = self._normalise(x)
        y = self.mix(x, _matrices(linears, 0))
        p = self.product(y, self.message(f, y))
        d = self.mix(self._normalise(p), _matrices(linears, 3))
        return self.ops.add_square(x, d, self.q) if self.use_kernels else x + d + self.square(d, d)

    def _normalise(self, x: Tensor) -> Tensor:
        """Return X/(‖X‖² + 1), or with the root of that."""
        if self.use_kernels and self.plain_norm:
            return self.ops.normalise(x)
        inverse = (self.inner.norms(x).sum(0) + 1) ** (-1 if self.plain_norm else -0.5)
        return self.scale(x, inverse.expand(3, *inverse.shape))


def _kernel_basis(basis: nn.Module) -> Basis | None:
    """Return the radial functions as the kernel knows them; None for others, and for those that are trained."""
    if any(True for _ in basis.parameters()):
        return None
    if isinstance(basis, ExpNormalBasis):
        return Basis(basis.means, basis.betas, basis.alpha, basis.lower, basis.cutoff.upper)
    if isinstance(basis, GaussianBasis):
        return Basis(basis.offset, -basis.coeff.expand_as(basis.offset))
    return None


def _matrices(linears: nn.ModuleList, first: int) -> Tensor:
    """Return the matrices [3, F out, F in] that mix the channels of the three parts."""
    return torch.stack([linear.get_parameter("weight") for linear in list(linears)[first : first + 3]])
