"""TensorNet or TensorNet2 on kernels with the head `charges` of models/properties.py, on the features.

Shapes: N atoms, C edge capacity, F channels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...triton_launch import FUSED_ARITHMETIC
from ..fast_path import Atoms, ChargeNetwork, Edges
from ..heads import FeatureNetwork
from .gpu import Buffers, FusedTensorNet, power_of_two
from .launch_shapes import part_size
from .packed_weights import ScalarNetwork, pack
from .triton import charges

__all__ = ["ChargedTensorNet", "HeadBuffers"]

_SLOPE = 8.0  # eV/e, a usual dE/dq: half an elementary charge 1 Å away
_ROWS = 4  # atoms of a program that writes gradients of the features


@dataclass(eq=False)
class HeadBuffers:
    """Those of the network, of which energy, forces and virial are, and of the charges.

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
    """A network with a head of charges, which take the place of those that the network itself may have.

    Args:
        network: it.
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
        charges.equilibrate_kernel[(-(-n // 128),)](
            atoms.batch, atoms.ptr, atoms.total_charge, b.raw, b.sums, b.charges, b.charges64, n, PART=part_size(n),
            BM=128, num_warps=4, **self._options(shapes),
        )  # fmt: skip

    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        b, n = buffers, len(atoms.z)
        if charge_slope is not None:
            self._sum(b, shapes, atoms, charge_slope)
            charges.add_gradient_kernel[(-(-n // _ROWS),)](
                atoms.batch, atoms.ptr, charge_slope, b.sums, b.gradient, 1 / self.unit, b.network.dreadout, n,
                F=self.network.weights.channels, PART=part_size(n), BM=_ROWS, num_warps=4, **self._options(shapes),
            )  # fmt: skip
        self.network.differentiate(b.network, shapes, atoms, edges, with_virial, None)

    def _sum(self, b: Any, shapes: Any, atoms: Atoms, values: Tensor) -> None:
        """Sums of the values [N] over parts of the structures."""
        n = len(atoms.z)
        grid = atoms.ptr.shape[0] - 1, -(-n // part_size(n))
        charges.part_sums_kernel[grid](
            atoms.ptr, values, b.sums, PART=part_size(n), BM=256, num_warps=4, **self._options(shapes)
        )

    def _options(self, shapes: Any) -> dict[str, Any]:
        return {**FUSED_ARITHMETIC, **self.launch_options(shapes)}
