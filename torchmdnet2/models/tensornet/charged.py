"""TensorNet or TensorNet2 on kernels with the head `charges` of models/heads.py, on the features.

q = c + (Q − Σc)/n, where c is the output of the head's network, and the sum is over the n atoms of a structure.
Backwards dE/dc = s − (Σs)/n with s = dE/dq. Sums are float64 sums over parts of PART atoms, in a fixed order; the sum
of a part is in the row of its first atom.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ...core.triton_launch import FUSED_ARITHMETIC, after_previous, before_next
from ...kernels.interfaces import Atoms, ChargeNetwork, Edges, FeatureNetwork
from .gpu import Buffers, FusedTensorNet, power_of_two
from .weights import ScalarNetwork, pack

__all__ = ["ChargedTensorNet", "HeadBuffers", "part_size"]


_PARTS = 512, 4096  # of up to 16,384 atoms and of more
_SLOPE = 8.0  # eV/e, a usual dE/dq: half an elementary charge 1 Å away
_ROWS = 4  # atoms of a program that writes gradients of the features


def part_size(num_atoms: int) -> int:
    """Return the number of atoms of a structure that one program sums over, of charges and the like."""
    return _PARTS[num_atoms > 16384]


# --- The charges and their gradient. Triton kernels ---


@triton.jit
def part_sums_kernel(ptr, values, sums, PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr):
    """sums [N] float64: that of the values [N] over part p of structure b."""
    after_previous(PDL)
    start = tl.load(ptr + tl.program_id(0)) + tl.program_id(1) * PART
    end = tl.minimum(start + PART, tl.load(ptr + tl.program_id(0) + 1))
    total = tl.zeros([BM], tl.float64)
    for first in range(start, end, BM):
        rows = first + tl.arange(0, BM)
        total += tl.load(values + rows, rows < end, other=0.0).to(tl.float64)
    # where a structure has no such part, start is the row of another one
    tl.store(sums + start, tl.sum(total, 0), start < end)
    before_next(PDL)


@triton.jit
def mean_of_structure(sums, ptr, b, ok, PART: tl.constexpr):
    """Σ/n of structures b [BM], from the sums of their parts, and n: float64."""
    first, end = tl.load(ptr + b), tl.load(ptr + b + 1)
    total = tl.load(sums + first, ok, other=0.0)
    # every atom of a structure adds up its parts in the same order, and gets the same bits
    for p in range(PART, tl.max(tl.where(ok, end - first, 0), 0), PART):
        total += tl.load(sums + first + p, ok & (first + p < end), other=0.0)
    size = tl.where(ok, end - first, 1).to(tl.float64)
    return total / size, size


@triton.jit(do_not_specialize=["num_atoms"])
def equilibrate_kernel(
    batch, ptr, total_charge, raw, sums, charges, charges64, num_atoms,
    PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Charges [N] of raw ones c [N]; total_charge [B] float64."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    b = tl.load(batch + rows, ok, other=0)
    mean, size = mean_of_structure(sums, ptr, b, ok, PART)
    missing = tl.load(total_charge + b) / size - mean
    q = tl.load(raw + rows, ok, other=0.0).to(tl.float64) + missing
    tl.store(charges64 + rows, q, ok)
    tl.store(charges + rows, q.to(tl.float32), ok)
    before_next(PDL)


@triton.jit(do_not_specialize=["num_atoms"])
def add_gradient_kernel(
    batch, ptr, slope, sums, draw, scale, dhidden, num_atoms,
    F: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dhidden [N, F] += scale dE/dc · dc/dhidden [N, F] (draw), for the slopes s [N] and the sums of their parts."""
    after_previous(PDL)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = rows < num_atoms
    b = tl.load(batch + rows, ok, other=0)
    # c ↦ c − Σc/n is symmetric, so that its transpose takes the same sums, here of the slopes
    mean, _size = mean_of_structure(sums, ptr, b, ok, PART)
    s = ((tl.load(slope + rows, ok, other=0.0).to(tl.float64) - mean) * scale).to(tl.float32)
    at = rows[:, None].to(tl.int64) * F + tl.arange(0, F)[None, :]
    before = tl.load(dhidden + at, ok[:, None], other=0.0)
    tl.store(dhidden + at, before + s[:, None] * tl.load(draw + at, ok[:, None], other=0.0), ok[:, None])
    before_next(PDL)


# --- The network with the head ---


@dataclass(eq=False)
class HeadBuffers:
    """Buffers of the network, which hold energy, forces and virial, and buffers of the charges.

    Attributes:
        raw: [N] c; gradient: [N, F] dc/dhidden, hidden being what the features are silu of.
        sums: [N] float64, of parts of structures: c, then dE/dq.
        charges [N], charges64 [N] float64: q in e.
    """

    network: Buffers
    energy: Tensor
    forces: Tensor
    virial: Tensor
    raw: Tensor
    gradient: Tensor
    sums: Tensor
    charges: Tensor
    charges64: Tensor

    @property
    def nbytes(self) -> int:
        own = (self.raw, self.gradient, self.sums, self.charges, self.charges64)
        return self.network.nbytes + sum(t.numel() * t.element_size() for t in own)


class ChargedTensorNet(ChargeNetwork, FeatureNetwork):
    """A network with a head of charges, which replace those that the network itself may have.

    Args:
        network: the network.
        head: a ChargesHead of one hidden layer with silu.
    """

    def __init__(self, network: FusedTensorNet, head: nn.Module):
        layers: Any = copy.deepcopy(head).output_network.layers  # type: ignore[union-attr]
        hidden, last = layers[0], layers[2]

        def give(t: Tensor) -> Tensor:
            return t.detach().float().contiguous().to(network.device)

        first = give(hidden.weight.T)
        self._weights = ScalarNetwork(
            first, pack(first), give(hidden.bias), give(last.weight[0]), give(last.bias), give(hidden.weight)
        )
        # gradients of both heads are to be near 1 (FusedTensorNet.unit)
        network.set_unit(max(network.unit, power_of_two(_SLOPE * float(self._weights.last.abs().max()))))
        self.network, self.device, self.unit = network, network.device, network.unit

    def charge_input(self, charge: Tensor) -> Tensor:
        return self.network.charge_input(charge)

    def launch_shapes(self, num_atoms: int) -> Any:
        return self.network.launch_shapes(num_atoms)

    def shapes_for(self, num_atoms: int, z: Tensor) -> Any:
        return self.network.shapes_for(num_atoms, z)

    def launch_options(self, shapes: Any) -> dict[str, Any]:
        return self.network.launch_options(shapes)

    def allocate(self, num_atoms: int, capacity: int, shapes: Any) -> HeadBuffers:
        n, f, device = max(num_atoms, 1), self.network.weights.channels, self.device
        raw, q = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(2))
        sums, q64 = (torch.empty(n, dtype=torch.float64, device=device) for _ in range(2))
        gradient = torch.empty(n, f, dtype=torch.float32, device=device)
        b = self.network.allocate(num_atoms, capacity, shapes)
        return HeadBuffers(b, b.energy, b.forces, b.virial, raw, gradient, sums, q, q64)

    def features(self, buffers: Any) -> Tensor:
        return self.network.features(buffers.network)

    def charges(self, buffers: Any) -> tuple[Tensor, Tensor]:
        return buffers.charges, buffers.charges64

    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        b, n = buffers, len(atoms.z)
        self.network.predict(b.network, shapes, atoms, edges)
        self.network.read_out(b.network, shapes, n, self._weights, b.raw, b.gradient)
        self._sum(b, shapes, atoms, b.raw)
        assert atoms.total_charge is not None
        equilibrate_kernel[(-(-n // 128),)](
            atoms.batch, atoms.ptr, atoms.total_charge, b.raw, b.sums, b.charges, b.charges64, n, PART=part_size(n),
            BM=128, num_warps=4, **self._options(shapes),
        )  # fmt: skip

    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        b, n = buffers, len(atoms.z)
        # terms give dE/dq in eV/e, gradients here are in `unit`; dreadout already holds the gradient of the energy
        if charge_slope is not None:
            self._sum(b, shapes, atoms, charge_slope)
            add_gradient_kernel[(-(-n // _ROWS),)](
                atoms.batch, atoms.ptr, charge_slope, b.sums, b.gradient, 1 / self.unit, b.network.dreadout, n,
                F=self.network.weights.channels, PART=part_size(n), BM=_ROWS, num_warps=4, **self._options(shapes),
            )  # fmt: skip
        self.network.differentiate(b.network, shapes, atoms, edges, with_virial, None)

    def _sum(self, b: Any, shapes: Any, atoms: Atoms, values: Tensor) -> None:
        """Sum the values [N] over parts of the structures."""
        n = len(atoms.z)
        grid = atoms.ptr.shape[0] - 1, -(-n // part_size(n))
        part_sums_kernel[grid](
            atoms.ptr, values, b.sums, PART=part_size(n), BM=256, num_warps=4, **self._options(shapes)
        )

    def _options(self, shapes: Any) -> dict[str, Any]:
        return {**FUSED_ARITHMETIC, **self.launch_options(shapes)}
