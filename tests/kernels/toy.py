"""A representation, a prior and their fast paths as a plug-in makes them: the kernels are a few lines of plain PyTorch.

Nothing of the package was changed for them but for two calls that register them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from torchmdnet2 import Potential
from torchmdnet2.engine.select import register_fast_path, register_prior_path
from torchmdnet2.kernels.interfaces import (
    Atoms,
    CpuBuffers,
    Edges,
    FastPath,
    Network,
    PriorPath,
    Term,
    TermSums,
)
from torchmdnet2.models.heads import ScalarHead
from torchmdnet2.potential.graph import Features, Head, Representation
from torchmdnet2.potential.prior import Prior

CUTOFF, REACH = 4.0, 5.5
WIDTH = 2


class Toy(Representation):
    """Two numbers per atom: Σ_j w_z (c − d)² and the charge of the structure."""

    cutoff, hidden_channels, max_z, reads_charge = CUTOFF, WIDTH, 10, True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, self.max_z))

    def forward(self, graph) -> Features:
        rows = self.weight[graph.z[graph.receiver]] * (CUTOFF - graph.distances) ** 2
        sums = torch.zeros_like(graph.charge[graph.batch]).index_add(0, graph.receiver, rows)
        return Features(torch.stack([sums, graph.charge[graph.batch]], 1))


class Sum(Head):
    """The sum of both numbers."""

    def forward(self, features, graph) -> Tensor:
        return features.x.sum(1)


class Springs(Prior):
    """½ (r − d)² of every pair, half for each of its atoms."""

    cutoff = REACH

    def forward(self, system, neighbors, charges=None) -> Tensor:
        d = neighbors.vectors(system).norm(dim=1).double()
        zeros = torch.zeros(system.num_atoms, dtype=torch.float64)
        return zeros.index_add(0, neighbors.edge_index[0], 0.25 * (REACH - d) ** 2)


def rows(row_ptr: Tensor, sender: Tensor, vectors: Tensor, energy_of_edges) -> tuple[Tensor, Tensor, Tensor]:
    """Energies, forces and virials of rows, by autograd of an energy per edge. [N], [N, 3], [N, 9]."""
    n, num = row_ptr.shape[0] - 1, int(row_ptr[-1])
    receiver = torch.repeat_interleave(torch.arange(n), torch.diff(row_ptr).long())
    r = vectors[:num].detach().clone().requires_grad_()
    with torch.enable_grad():
        per_edge = energy_of_edges(receiver, r.norm(dim=1))
        (g,) = torch.autograd.grad(per_edge.sum(), r)
    zeros = torch.zeros(n, dtype=r.dtype)
    forces = torch.zeros(n, 3, dtype=r.dtype).index_add(0, receiver, g).index_add(0, sender[:num].long(), -g)
    virial = torch.zeros(n, 9, dtype=r.dtype).index_add(0, receiver, (r[:, :, None] * g[:, None]).flatten(1))
    return zeros.index_add(0, receiver, per_edge), forces.detach(), virial.detach()


def network(weight: Tensor, z: Tensor, charge: Tensor, *edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    energy, forces, virial = rows(*edges, lambda i, d: weight[z[i].long()] * (CUTOFF - d) ** 2)
    return energy.detach() + charge, forces, virial


def springs(*edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # the list may reach further than the cutoff
    energy, forces, virial = rows(*edges, lambda i, d: 0.25 * torch.where(d < REACH, REACH - d, 0) ** 2)
    return energy.detach(), forces, virial


@dataclass
class Buffers:
    energy: Tensor
    forces: Tensor
    virial: Tensor

    @property
    def nbytes(self) -> int:
        return 52 * self.energy.shape[0]


class ToyGpu(Network):
    unit = 0.5
    runs = 0

    def __init__(self, weight: Tensor, device: torch.device):
        self.weight, self.device = weight, device

    def allocate(self, num_atoms, capacity, shapes) -> Buffers:
        return Buffers(torch.zeros(num_atoms), torch.zeros(num_atoms, 3), torch.zeros(num_atoms, 9))

    def run(self, buffers, shapes, atoms: Atoms, edges: Edges, with_virial=False) -> None:
        ToyGpu.runs += 1
        found = network(self.weight, atoms.z, atoms.charge_input, *edges[:3])
        for place, value in zip((buffers.energy, buffers.forces, buffers.virial), found, strict=True):
            place.copy_(value / self.unit)


class ToyCpu(Network):
    runs = 0

    def __init__(self, weight: Tensor):
        self.weight = weight

    def allocate(self, num_atoms, capacity, shapes) -> CpuBuffers:
        return CpuBuffers()

    def run(self, buffers, shapes, atoms: Atoms, edges: Edges, with_virial=False) -> None:
        ToyCpu.runs += 1
        arrays = (torch.from_numpy(np.ascontiguousarray(a)) for a in (*atoms[:2], *edges[:3]))
        buffers.energy, buffers.forces, buffers.virial = (t.numpy() for t in network(self.weight, *arrays))


class ToyPath(FastPath):
    def unsupported_reason(self, representation, head, device) -> str:
        return "" if type(head) is Sum else f"there are no toy kernels for the head {type(head).__name__}"

    def gpu(self, representation, head, energy_scale, device, precision) -> Network:
        return ToyGpu(representation.weight.detach().clone(), device)

    def cpu(self, representation, head, energy_scale) -> Network:
        return ToyCpu(representation.weight.detach().clone())


class SpringsGpu(Term):
    cutoff = REACH

    def run(self, buffers, atoms: Atoms, edges: Edges | None, sums: TermSums, launch) -> None:
        for place, value in zip(sums[:3], springs(*edges[:3]), strict=True):
            place.copy_(value if launch.first else place + value)


class SpringsCpu(Term):
    cutoff = REACH

    def run(self, buffers, atoms: Atoms, edges: Edges | None, sums: TermSums, launch) -> None:
        for place, value in zip(sums[:3], springs(*map(torch.from_numpy, edges[:3])), strict=True):
            place += value.numpy()


class SpringsPath(PriorPath):
    def unsupported_reason(self, prior, device) -> str:
        return ""

    def gpu(self, prior, device, elements) -> Term:
        return SpringsGpu()

    def cpu(self, prior, elements) -> Term:
        return SpringsCpu()


register_fast_path(Toy, ToyPath())
register_prior_path(Springs, SpringsPath())


def potential(priors=(), head: Head | None = None) -> Potential:
    return Potential(Toy(), head or Sum(), priors=list(priors)).eval()


def scalar_head() -> Head:
    return ScalarHead(WIDTH)
