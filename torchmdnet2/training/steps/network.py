"""Network energies and forces of a packed batch, made to be differentiated once more for the weights.

Everything is a function of the vectors r of the pairs: forces and stress are sums of dE/dr. TensorNet runs on the
multilinear forms, with one filter for both directions of a pair; other representations run as they are, on directed
edges. `models/tensornet.py` is the specification of the former.

Shapes as in packed.py: M atoms, N of them in frames, P pairs, B frames, K elements, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...fused.differentiable_ops import Form
from ...fused.tensornet.training.embedding_op import Embedding
from ...fused.tensornet.training.node_ops import Inner, Mix, Product, Scale
from ...fused.tensornet.training.pair_ops import Message, PairSum
from ...fused.tensornet.training.radial_ops import Basis, PairGeometry
from ...fused.tensornet.training.scalar_ops import SegmentSum, enveloped, silu
from ...fused.tensornet.training.tensor_ops import add_square, normalise
from ...models.base import Features, Graph, Head
from ...models.layers import safe_divide
from ...models.radial import ExpNormalBasis, GaussianBasis
from ...models.tensornet import Interaction, TensorNet
from ...neighbors.result import safe_norm
from ...potential import Potential, Result
from .packed_frames import PackedBatch

__all__ = ["PackedNetwork"]


class PackedNetwork:
    """Energies, forces and stress of the network alone, without priors.

    Args:
        potential: whose weights are used and trained.
        num_elements: K.
        forces, stress: what to compute.
        use_kernels: the forms run as kernels: Triton's on a CUDA device, numba's on the CPU.
    """

    def __init__(self, potential: Potential, num_elements: int, forces: bool, stress: bool, use_kernels: bool):
        assert potential.head is not None
        self.potential, self.num_elements = potential, num_elements
        self.head: Head = potential.head
        self.forces, self.stress, self.use_kernels = forces, stress, use_kernels

    def __call__(self, batch: PackedBatch) -> Result:
        """Energy [B + 1], and forces [N, 3] and stress [B + 1, 3, 3] where asked for, to be differentiated further."""
        r = batch.r.detach().requires_grad_(self.forces or self.stress)
        num = batch.forces.shape[0]
        energies, with_weights = self._atom_energies(batch, r)
        triton = self.use_kernels and r.is_cuda
        per_frame = SegmentSum(batch.atom_ptr, batch.structure[:num], triton)
        energy = per_frame(energies[:num, None])[:, 0]
        result = Result(energy, atom_energies=energies[:num])
        if not r.requires_grad:
            return result
        with _fixed(with_weights):
            (gradient,) = torch.autograd.grad(energies[:num].sum(), r, create_graph=True)
        if self.forces:
            result.forces = PairSum(batch.pairs, triton)(gradient)[:num]
        if self.stress:
            virial = (r[:, :, None] * gradient[:, None, :]).flatten(1)
            per_frame = SegmentSum(batch.pair_ptr, batch.pair_structure, triton)
            virial = per_frame(virial).unflatten(1, (3, 3)) / batch.volume[:, None, None]
            result.stress = (virial + virial.transpose(1, 2)) / 2
        return result

    def _atom_energies(self, batch: PackedBatch, r: Tensor) -> tuple[Tensor, dict[Form, frozenset[int]]]:
        """energy_scale · (ε_i − ε_i⁰) of all atoms, [M] float64; the forms that take weights, and in which slots."""
        graph = Graph(
            z=batch.z,
            batch=batch.structure,
            num_systems=batch.charge.shape[0],
            charge=batch.charge,
            receiver=batch.z[:0],
            sender=batch.z[:0],
            vectors=r[:0],
            distances=r[:0, 0],
        )
        representation, forms = self.potential.representation, {}
        if isinstance(representation, TensorNet):
            network = _PairTensorNet(representation, batch, self.num_elements, self.use_kernels)
            features, forms = Features(network(r)), network.with_weights
        else:
            features = representation(_directed(graph, batch, r))
        energies = self.head(features, graph).double()
        if self.potential.subtract_isolated:
            one_hot = _one_hot(batch.element, self.num_elements, energies.dtype)
            energies = energies - one_hot @ energies[-self.num_elements :]
        return energies * self.potential.energy_scale, forms


@contextmanager
def _fixed(forms: Mapping[Form, frozenset[int]]) -> Iterator[None]:
    """What is differentiated meanwhile asks for no derivative in these slots."""
    for form, slots in forms.items():
        form.fixed = slots
    yield
    for form in forms:
        form.fixed = frozenset()


def _directed(graph: Graph, batch: PackedBatch, r: Tensor) -> Graph:
    """The graph with its pairs as two directed edges each; those that fill the room are beyond the cutoff."""
    first, second = batch.pairs.first.long(), batch.pairs.second.long()
    graph.receiver, graph.sender = torch.cat([first, second]), torch.cat([second, first])
    graph.vectors = torch.cat([r, -r])
    graph.distances = safe_norm(graph.vectors)
    return graph


_TRITON: Any = SimpleNamespace(
    Embedding=Embedding, Inner=Inner, Message=Message, Product=Product, Scale=Scale, add_square=add_square,
    normalise=normalise, silu=silu,
)  # fmt: skip
"""The forms of kernels/forms_*.py; without kernels, the plain expressions in them."""


def _numba_forms() -> Any:
    from ...fused.tensornet.training import numba_ops

    return numba_ops


class _PairTensorNet:
    """TensorNet with the filters of pairs; fields of tensors are [9, M, F]."""

    def __init__(self, model: TensorNet, batch: PackedBatch, num_elements: int, use_kernels: bool):
        self.model, self.batch, self.num_elements = model, batch, num_elements
        self.q = 1 + 0.1 * batch.charge[batch.structure]
        self.use_kernels = use_kernels
        self.triton = use_kernels and batch.r.is_cuda
        ops = self.ops = _numba_forms() if use_kernels and not self.triton else _TRITON
        self.message, self.embedding = ops.Message(batch.pairs, use_kernels), ops.Embedding(batch.pairs, use_kernels)
        self.inner, self.scale, self.mix = ops.Inner(use_kernels), ops.Scale(use_kernels), Mix(use_kernels)
        by_kernel = self.triton or (use_kernels and model.group == "O(3)")
        self.with_weights: dict[Form, frozenset[int]] = {self.mix: frozenset({1}), self.embedding: frozenset({2})}
        self.product = ops.Product(self.q, model.group, by_kernel)
        self.square = Product(self.q / 2, "O(3)", False)  # q D² = q/2 (D D + D D)
        self.silu = isinstance(model.act, nn.SiLU)
        self.act: Callable[[Tensor], Tensor] = ops.silu if use_kernels and self.silu else model.act

    def __call__(self, r: Tensor) -> Tensor:
        """Scalar features [M, F]."""
        model = self.model
        rbf, envelope, geometry = self._values(r)
        x = self._embed(rbf, envelope, geometry)
        for layer in model.layers:
            assert isinstance(layer, Interaction)
            f = rbf
            *hidden, last = layer.linears_scalar
            for linear in hidden:
                f = self.act(linear(f))
            f = self._filter(last(f), envelope, activate=True)
            x = self._interact(x, f, layer.linears_tensor)
        norms = self.inner.norms(x).transpose(0, 1).flatten(1)
        return self.act(model.linear(model.out_norm(norms)))

    def _values(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Radial basis [P + 1, R], cutoff function [P + 1], geometry [P + 1, 9]; last row: an atom and itself."""
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
        elements = batch.z[-self.num_elements :]
        of_receiver, of_sender = layer.emb2.weight.chunk(2, 1)
        z = layer.emb.weight[elements]
        table = torch.cat([z @ of_receiver.T + layer.emb2.bias, z @ of_sender.T], 1)
        weights = _one_hot(batch.element, self.num_elements, table.dtype) @ table
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
        """Filters [P + 1, 3, F] that end at the cutoff."""
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
        """X/(‖X‖² + 1)."""
        if self.use_kernels:
            return self.ops.normalise(x)
        inverse = 1 / (self.inner.norms(x).sum(0) + 1)
        return self.scale(x, inverse.expand(3, *inverse.shape))


def _kernel_basis(basis: nn.Module) -> Basis | None:
    """Radial functions as the kernel knows them; None for others, and for those that are trained."""
    if any(True for _ in basis.parameters()):
        return None
    if isinstance(basis, ExpNormalBasis):
        return Basis(basis.means, basis.betas, basis.alpha, basis.lower, basis.cutoff.upper)
    if isinstance(basis, GaussianBasis):
        return Basis(basis.offset, -basis.coeff.expand_as(basis.offset))
    return None


def _matrices(linears: nn.ModuleList, first: int) -> Tensor:
    """The matrices [3, F out, F in] that mix the channels of the three parts."""
    return torch.stack([linear.get_parameter("weight") for linear in list(linears)[first : first + 3]])


def _one_hot(element: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """[M, K]; a matrix product with it, unlike a gather, has a gradient without atomics."""
    return (element[:, None] == torch.arange(num, device=element.device)).to(dtype)
