"""TensorNet as a function of pair vectors, for packed training: one filter for both directions of a pair.

`model.py` is the specification. Shapes: M atoms, the last K alone, P pairs, K elements, R radial functions,
F features; fields of tensors are [9, M, F]. Where pairs are many, the network of the distance is evaluated at knots
instead, see training_radial.py: then rows of radial functions are those of the knots.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.interfaces import PairBatch, PairNetwork
from ...kernels.pair_ops import MultilinearOp, one_hot
from ...neighbors.neighbor_list import safe_norm
from ...potential.graph import Features
from ..layers import ExpNormalBasis, GaussianBasis, safe_divide
from .model import Interaction, TensorNet
from .training_atoms import Inner, Mix, Product, Scale, add_square, enveloped, normalise, silu
from .training_pairs import Basis, Embedding, Message, PairGeometry
from .training_radial import Interpolation, Stencil, lagrange

__all__ = ["PairTensorNet"]


_TRITON: Any = SimpleNamespace(
    Embedding=Embedding, Inner=Inner, Message=Message, Product=Product, Scale=Scale, add_square=add_square,
    normalise=normalise, silu=silu,
)  # fmt: skip
"""On GPUs by kernels; without kernels, the plain expressions beside them."""


class Radial(NamedTuple):
    """What filters of pairs, and of an atom with itself, are made of.

    Attributes:
        functions: radial functions of each pair [P + 1, R], or at the knots, in float64.
        factors: cutoff function [P + 1]; or weights of the knots [P + 1, POINTS], which contain it.
        between: takes filters of pairs from those at the knots; None where there are none.
    """

    functions: Tensor
    factors: Tensor
    between: Interpolation | None = None


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
        stencil = self._stencil(r)
        radial, geometry = self._at_pairs(r) if stencil is None else self._at_knots(r, stencil)
        x = self._embed(radial, geometry)
        isotropic = [x[0]]
        for layer in model.layers:
            assert isinstance(layer, Interaction)
            f = radial.functions
            *hidden, last = layer.linears_scalar
            for linear in hidden:
                f = self.act(_linear(f, *linear.parameters()))
            f = self._filter(_linear(f, *last.parameters()), radial, activate=True)
            x = self._interact(x, f, layer.linears_tensor)
            isotropic.append(x[0])
        summed = isinstance(model, TensorNet)  # TensorNet2 comes here too
        return Features(self._read_out(x), energies=model.linear_energies(isotropic) if summed else None)

    def _read_out(self, x: Tensor) -> Tensor:
        norms = self.inner.norms(x).transpose(0, 1).flatten(1)
        return self.act(self.model.linear(self.model.out_norm(norms)))

    def _stencil(self, r: Tensor) -> Stencil | None:
        """Return the knots of the filters; None where each pair has a row of its own.

        That is so on CPUs, where reading and writing the filters takes as long as the network of the distance; in
        float64, which is the specification; and where radial functions may be narrower than the knots can follow.
        """
        envelope, basis = self.model.envelope, self.model.distance_expansion
        trained = any(True for _ in basis.parameters())
        if not self.triton or r.dtype == torch.float64 or envelope.lower > 0 or trained:
            return None
        return Stencil.for_pairs(r.shape[0], self.model.tensor_embedding.distance_proj1.in_features, envelope.upper)

    def _at_pairs(self, r: Tensor) -> tuple[Radial, Tensor]:
        """Return radial functions of the pairs, and geometry [P + 1, 9]; the last row is an atom and itself."""
        basis = _kernel_basis(self.model.distance_expansion) if self.triton else None
        if basis is not None:
            rbf, envelope, geometry = self._pair_geometry(r, basis)(r)
            return Radial(rbf, envelope), geometry
        distances, geometry = self._distances_and_geometry(r)
        return Radial(self.model.distance_expansion(distances), self.model.envelope(distances)), geometry

    def _at_knots(self, r: Tensor, stencil: Stencil) -> tuple[Radial, Tensor]:
        """The same with radial functions at the knots."""
        if self.triton:
            pairs = self._pair_geometry(r, stencil)
            first = pairs.first
            weights, _, geometry = pairs(r)
        else:
            distances, geometry = self._distances_and_geometry(r)
            first = stencil.first(distances.detach())
            weights = lagrange(distances / stencil.spacing - first) * self.model.envelope(distances)[:, None]
        between = Interpolation(first, stencil.num_knots, self.batch.pairs.count, self.triton)
        # the table depends on weights alone, so that forces need no derivative by it
        self.with_weights[between] = frozenset({0})
        return Radial(self.model.distance_expansion(stencil.knots(r.device)), weights, between), geometry

    def _pair_geometry(self, r: Tensor, basis: Basis | Stencil) -> PairGeometry:
        envelope = self.model.envelope
        return PairGeometry(r, basis, envelope.lower, envelope.upper, self.model.tensor_embedding.skew_sign)

    def _distances_and_geometry(self, r: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.cat([r, r.new_zeros(1, 3)])
        distances = safe_norm(r)
        # skew(u) is written for u from sender to receiver; a pair's vector points from its receiver to its sender
        return distances, self.model.tensor_embedding.geometry(-safe_divide(r, distances[:, None]))

    def _embed(self, radial: Radial, geometry: Tensor) -> Tensor:
        layer, batch = self.model.tensor_embedding, self.batch
        elements = batch.z[-batch.num_elements :]
        of_receiver, of_sender = layer.emb2.weight.chunk(2, 1)
        z = layer.emb.weight[elements]
        table = torch.cat([z @ of_receiver.T + layer.emb2.bias, z @ of_sender.T], 1)
        weights = one_hot(batch.element, batch.num_elements, table.dtype) @ table
        projections = [layer.distance_proj1, layer.distance_proj2, layer.distance_proj3]
        weight, bias = torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections])
        f = self._filter(_linear(radial.functions, weight, bias), radial, activate=False)
        x = self.embedding(f, geometry, weights)
        gate = layer.init_norm(self.inner.norms(x).sum(0))
        for linear in layer.linears_scalar:
            gate = self.act(linear(gate))
        gate = gate.unflatten(1, (3, -1)).transpose(0, 1)
        return self.scale(self.mix(x, _matrices(layer.linears_tensor, 0)), gate)

    def _filter(self, x: Tensor, radial: Radial, activate: bool) -> Tensor:
        """Return filters [P + 1, 3, F] that end at the cutoff."""
        if radial.between is not None:
            f = radial.between((self.act(x) if activate else x).to(radial.factors.dtype), radial.factors)
        elif self.triton and (self.silu or not activate):
            f = enveloped(x, radial.factors, activate)
        else:
            f = (self.act(x) if activate else x) * radial.factors[:, None]
        return f.unflatten(1, (3, -1))

    def _interact(self, x: Tensor, f: Tensor, linears: nn.ModuleList) -> Tensor:
        x = self._normalise(x)
        y = self.mix(x, _matrices(linears, 0))
        p = self.product(y, self.message(f, y))
        d = self.mix(self._normalise(p), _matrices(linears, 3))
        # x is the normalised one, of which Y was made: its gradient has two parts
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


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x Wᵀ + b in the precision of x: at the knots it is float64, whatever the network has."""
    return functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))


def _matrices(linears: nn.ModuleList, first: int) -> Tensor:
    """Return the matrices [3, F out, F in] that mix the channels of the three parts."""
    return torch.stack([linear.get_parameter("weight") for linear in list(linears)[first : first + 3]])
