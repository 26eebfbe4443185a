"""Network energies and forces of a packed batch, differentiable with respect to the weights.

Everything is a function of the vectors r of the pairs: forces and stress are sums of dE/dr. A representation whose fast
path has a variant for training (fused/registry.py) runs on pairs; others run as they are, on directed edges.

Shapes as in packed_frames.py: M atoms, N of them in frames, P pairs, B frames, K elements, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...fused.differentiable_ops import MultilinearOp
from ...fused.fast_path import PairBatch
from ...fused.pair_sums import PairSum, SegmentSum, one_hot
from ...fused.registry import fast_path
from ...models.base import Features, Graph, Head
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
        use_kernels: operations run as kernels: Triton's on a CUDA device, numba's on the CPU.
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

    def _atom_energies(self, batch: PackedBatch, r: Tensor) -> tuple[Tensor, Mapping[MultilinearOp, frozenset[int]]]:
        """energy_scale · (ε_i − ε_i⁰) of all atoms, [M] float64; operations with weights, and in which slots."""
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
        representation = self.potential.representation
        with_weights: Mapping[MultilinearOp, frozenset[int]] = {}
        path = fast_path(representation)
        charge = batch.charge[batch.structure]
        pairs = PairBatch(batch.pairs, batch.z, batch.element, charge, self.num_elements)
        network = None if path is None else path.training(representation, pairs, self.use_kernels)
        if network is None:
            features = representation(_directed(graph, batch, r))
        else:
            features, with_weights = Features(network(r)), network.with_weights
        energies = self.head(features, graph).double()
        if self.potential.subtract_isolated:
            kinds = one_hot(batch.element, self.num_elements, energies.dtype)
            energies = energies - kinds @ energies[-self.num_elements :]
        return energies * self.potential.energy_scale, with_weights


@contextmanager
def _fixed(operations: Mapping[MultilinearOp, frozenset[int]]) -> Iterator[None]:
    """What is differentiated meanwhile asks for no derivative in these slots."""
    for op, slots in operations.items():
        op.fixed = slots
    yield
    for op in operations:
        op.fixed = frozenset()


def _directed(graph: Graph, batch: PackedBatch, r: Tensor) -> Graph:
    """The graph with its pairs as two directed edges each; those that fill the room are beyond the cutoff."""
    first, second = batch.pairs.first.long(), batch.pairs.second.long()
    graph.receiver, graph.sender = torch.cat([first, second]), torch.cat([second, first])
    graph.vectors = torch.cat([r, -r])
    graph.distances = safe_norm(graph.vectors)
    return graph
