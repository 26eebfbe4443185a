"""AIMNet2 energies, forces and charges by fused kernels: forward, hand-written backward, no autograd, no allocation.

Shapes: M members, N atoms, B structures, C edge capacity, A features, R radial functions, H combinations (padded to P).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.triton_launch import FUSED_ARITHMETIC
from ...kernels.interfaces import Atoms, ChargeNetwork, Edges
from . import triton_kernels as kernels
from .weights import PAD, FrozenAIMNet2, Layer, in_halves, side_by_side

__all__ = ["Buffers", "FusedAIMNet2", "LaunchShapes"]


class LaunchShapes(NamedTuple):
    """Launch parameters of the kernels.

    Attributes:
        features: features A in a program of the sums; edges: number of edges loaded ahead; warps: warps of a program.
        rows, cols, depth, layer_warps, stages: tile, warps and pipeline stages of matrix products.
        parts: number of warps among which the sum of a product is divided; 1 if warps share rows and columns instead.
        overlap: 1 or 2, how early each kernel is launched (triton_launch.py), where it can be early.
        joined: charges are equilibrated by each program that sums them, instead of a kernel between.
        halves: factors of matrix products are sums of two numbers in half precision, 22 bits in all.
    """

    features: int
    edges: int
    warps: int
    rows: int
    cols: int
    depth: int
    layer_warps: int
    stages: int
    parts: int = 1
    overlap: int = 1
    joined: bool = False
    halves: bool = False


@dataclass(eq=False)
class Buffers:
    """Static memory of the network. N stands for the M·N rows of atoms.

    Attributes:
        radial, radial_slope: [C, R], direction: [C, 4] of each edge.
        x: [N, X] what a pass reads; vectors [N, 3, A·P], charge_vectors [N, 3, P]; slopes of the layers of passes.
        predicted [N, 2], charges and charges64 [N], moments [N, 2]: changes of features and charges.
        by_change: [N, G], the gradient in all that is changed.
        hidden, gradients: of layers, in turns.
    """

    energy: Tensor
    forces: Tensor
    virial: Tensor
    radial: Tensor
    radial_slope: Tensor
    direction: Tensor
    x: list[Tensor]
    vectors: list[Tensor]
    charge_vectors: list[Tensor]
    slopes: list[list[Tensor]]
    head_slopes: list[Tensor]
    hidden: list[Tensor]
    gradients: list[Tensor]
    by_change: Tensor
    predicted: list[Tensor]
    charges: list[Tensor]
    charges64: list[Tensor]
    moments: list[Tensor]
    dx: Tensor
    dm: Tensor
    dm_charges: Tensor
    da: Tensor
    dq: Tensor
    pull: Tensor

    @property
    def nbytes(self) -> int:
        def size(value: Any) -> int:
            return sum(map(size, value)) if isinstance(value, list) else value.numel() * value.element_size()

        return sum(size(value) for value in vars(self).values())


class FusedAIMNet2(ChargeNetwork):
    """Runs a frozen AIMNet2 over CSR rows.

    Args:
        members: the prepared models, of one form and with the same radial functions.
        precision: "tf32x3" (as accurate as float32; from 512 atoms on in halves, where the weights fit), "tf32" or
            "ieee".
    """

    def __init__(self, members: Sequence[FrozenAIMNet2], precision: str = "tf32x3"):
        self.members, self.weights = len(members), side_by_side(members)
        weights = self.weights
        self._halves = in_halves(weights) if precision == "tf32x3" else None
        self.precision, self.device = precision, weights.device
        self.combinations = 1 << (weights.num_vectors - 1).bit_length()  # P
        device = weights.device
        self.can_overlap = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9

    def launch_shapes(self, num_atoms: int) -> LaunchShapes:
        num_atoms *= self.members
        a = min(self.weights.channels, 2 if num_atoms <= 400 else 4)
        if num_atoms <= 64:
            return LaunchShapes(a, 4, 1, 16, 16, 64, 4, 1, parts=4, overlap=2, joined=True)
        if num_atoms <= 400:
            return LaunchShapes(a, 4, 1, 16, 32, 64, 2, 4)
        if self._halves is not None and num_atoms >= 512:
            return LaunchShapes(a, 2, 1, 64, 64, 64 if num_atoms <= 4096 else 32, 4, 3, halves=True)
        if num_atoms <= 4096:
            return LaunchShapes(a, 2, 1, 32, 32, 32, 2, 3)
        return LaunchShapes(a, 2, 1, 32, 64, 32, 2, 3)

    def _weights(self, shapes: LaunchShapes) -> FrozenAIMNet2:
        if not shapes.halves:
            return self.weights
        assert self._halves is not None, "the weights do not fit in halves"
        return self._halves

    def _parts(self, shapes: LaunchShapes) -> int:
        return self.weights.channels // shapes.features

    def allocate(self, num_atoms: int, capacity: int, shapes: LaunchShapes) -> Buffers:
        w, n, c, p = self.weights, self.members * max(num_atoms, 1), max(capacity, 1), self.combinations
        a, r, passes = w.channels, w.num_rbf, len(w.passes)
        widest = max(layer.bias.shape[-1] for layers in [*w.passes, w.head] for layer in layers)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=w.device)  # what is beyond the width of a row stays 0

        def each(*shape: int, number: int = passes, dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return [new(*shape, dtype=dtype) for _ in range(number)]

        def slopes_of(layers: list[Layer]) -> list[Tensor]:
            return [new(n, layer.bias.shape[-1]) for layer in layers]

        stages, double = passes - 1, torch.float64
        slots = passes * self._parts(shapes) + stages
        return Buffers(
            energy=new(n), forces=new(n, 3), virial=new(n, 9), radial=new(c, r), radial_slope=new(c, r),
            direction=new(c, 4), x=each(n, w.width), vectors=each(n, 3, a * p), charge_vectors=each(n, 3, p),
            slopes=[slopes_of(layers) for layers in w.passes], head_slopes=slopes_of(w.head),
            hidden=each(n * widest, number=2), gradients=each(n * widest, number=2),
            by_change=new(n, w.passes[0][-1].bias.shape[-1]), predicted=each(n, 2, number=stages),
            charges=each(n, number=stages),
            charges64=each(n, number=stages, dtype=double), moments=each(n, 2, number=stages, dtype=double),
            dx=new(n, w.width), dm=new(n, 4, a * r), dm_charges=new(n, 4, r), da=new(n, a * r), dq=new(n),
            pull=new(slots, n, 9),
        )  # fmt: skip

    def charges(self, buffers: Buffers) -> tuple[Tensor, Tensor]:
        return buffers.charges[-1], buffers.charges64[-1]

    # --- forward -------------------------------------------------------------------------------------------------

    def predict(self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges) -> None:
        w, b, n = self._weights(shapes), buffers, atoms.num_rows
        kernels.edge_kernel[(-(-edges.sender.shape[0] // 64),)](
            edges.row_ptr, edges.vectors, w.shifts, b.radial, b.radial_slope, b.direction, n, w.eta, 1 / w.cutoff,
            R=w.num_rbf, BE=64, num_warps=4, **self._options(shapes),
        )  # fmt: skip
        for k, layers in enumerate(w.passes):
            self._convolve(b, shapes, atoms, edges, k)
            y = self._layers(b, shapes, n, layers, b.x[k], b.slopes[k], k)
            if k < len(w.passes) - 1 and not shapes.joined:
                kernels.equilibrate_kernel[atoms.ptr.shape[0] - 1, 1, self.members](
                    atoms.ptr, atoms.charge_input, b.predicted[k], b.charges64[max(k - 1, 0)], b.x[k + 1],
                    b.charges[k], b.charges64[k], b.moments[k], X=w.width, PLACE=self._place, FIRST=k == 0,
                    **self._equilibration(shapes, n),
                )  # fmt: skip
        y = self._layers(b, shapes, n, w.head, y, b.head_slopes, None)
        self._energies(b, shapes, n, y)

    def _convolve(self, b: Buffers, shapes: LaunchShapes, atoms: Atoms, edges: Edges, k: int) -> None:
        w = self.weights
        kernels.convolve_kernel[atoms.num_rows, self._parts(shapes) + (k > 0), self.members](
            edges.row_ptr, edges.sender, b.radial, b.direction, *self._values(b, atoms, k), w.combine,
            w.combine_charges, b.x[k], b.vectors[k], b.charge_vectors[k], P=self.combinations,
            **self._sums(shapes, k), U=shapes.edges, **self._values_of(k),
            **(self._charges_of(b, atoms, k - 1) if shapes.joined and k > 0 else {}),
        )  # fmt: skip

    def _charges_of(self, b: Buffers, atoms: Atoms, k: int) -> dict[str, Any]:
        """Return what the kernel that reads the charges of stage k needs to equilibrate them."""
        return {
            "predicted": b.predicted[k], "before": b.charges64[max(k - 1, 0)], "charges64": b.charges64[k],
            "moments": b.moments[k], "ptr": atoms.ptr, "batch": atoms.batch, "total_charge": atoms.charge_input,
            "FIRST": k == 0, "EXACT": self.weights.exact_charge,
        }  # fmt: skip

    def _values(self, b: Buffers, atoms: Atoms, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of the values that pass k sends, the values, and the charges."""
        return atoms.z, self.weights.embedding if k == 0 else b.x[k], b.charges[max(k - 1, 0)]

    def _values_of(self, k: int) -> dict[str, int]:
        elements, features = self.weights.embedding.shape[1:]
        return {"KEYED": elements, "VALUES": features} if k == 0 else {"KEYED": 0, "VALUES": self.weights.width}

    def _layers(
        self, b: Buffers, shapes: LaunchShapes, n: int, layers: list[Layer], x: Tensor, slopes: list[Tensor],
        k: int | None,
    ) -> Tensor:  # fmt: skip
        """Run a network on x; the last layer of pass k, except of the last pass, changes features and charges."""
        w = self.weights
        for m, layer in enumerate(layers):
            inputs, outputs = layer.weight.shape[-2:]
            y, width, before, predicted = _other(b.hidden, x), outputs, x, x
            update = k is not None and k < len(w.passes) - 1 and m == len(layers) - 1
            if k is not None and update:
                y, width, before, predicted = b.x[k + 1], w.width, b.x[k], b.predicted[k]
            kernels.layer_kernel[self._grid(shapes, n, outputs)](
                x, layer.weight, layer.bias, y, slopes[m], before, predicted, n, K=inputs, N=outputs, Y=width,
                W=w.features, ACTIVATE=layer.activated, UPDATE=update, **self._tile(shapes, inputs),
            )  # fmt: skip
            x = y
        return x

    def _energies(self, b: Buffers, shapes: LaunchShapes, n: int, y: Tensor) -> None:
        size = self.weights.head[-1].bias.shape[-1]
        kernels.energy_kernel[-(-n // 8), 1, self.members](
            y, b.head_slopes[-1], *self.weights.energy, b.energy, b.gradients[0], n, N=size,
            LANES=1 << (size - 1).bit_length(), BM=8, num_warps=4, **self._options(shapes),
        )  # fmt: skip

    # --- backward ------------------------------------------------------------------------------------------------

    def differentiate(
        self, buffers: Any, shapes: Any, atoms: Atoms, edges: Edges, with_virial: bool, charge_slope: Tensor | None
    ) -> None:  # fmt: skip
        w, b, n = self._weights(shapes), buffers, atoms.num_rows
        last = len(w.passes) - 1
        g = self._gradient(b, shapes, n, w.head, b.gradients[0], b.head_slopes, b.slopes[last][-1], None)
        for k in reversed(range(last + 1)):
            self._gradient(b, shapes, n, w.passes[k], g, b.slopes[k], None, b.dx)
            g = b.by_change
            self._convolve_gradient(b, shapes, atoms, edges, k, with_virial, charge_slope)
            if k > 0:
                below = w.passes[k - 1][-1]
                kernels.equilibrate_gradient_kernel[atoms.ptr.shape[0] - 1, 1, self.members](
                    atoms.ptr, b.predicted[k - 1], b.moments[k - 1], b.dq, b.slopes[k - 1][-1], b.by_change,
                    W=w.features, G=below.bias.shape[-1], ACTIVATED=below.activated, **self._equilibration(shapes, n),
                )  # fmt: skip
        rows = self.members * n
        kernels.sum_slots_kernel[(-(-rows // 32),)](
            b.pull, b.forces, b.virial, rows, SLOTS=b.pull.shape[0], BM=32, VIRIAL=with_virial, num_warps=4,
            **self._options(shapes),
        )  # fmt: skip

    def _gradient(
        self, b: Buffers, shapes: LaunchShapes, n: int, layers: list[Layer], g: Tensor, slopes: list[Tensor],
        below: Tensor | None, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the gradient of the network's input, times the slope `below`, from that before the last activation."""
        for m in reversed(range(len(layers))):
            inputs, outputs = layers[m].weight.shape[-2:]
            slope = slopes[m - 1] if m > 0 else below
            to = _other(b.gradients, g) if m > 0 or out is None else out
            kernels.layer_gradient_kernel[self._grid(shapes, n, inputs)](
                g, layers[m].transposed, g if slope is None else slope, to, n, K=outputs, N=inputs,
                ACTIVATED=slope is not None, **self._tile(shapes, outputs),
            )  # fmt: skip
            g = to
        return g

    def _convolve_gradient(
        self, b: Buffers, shapes: LaunchShapes, atoms: Atoms, edges: Edges, k: int, with_virial: bool,
        charge_slope: Tensor | None,
    ) -> None:  # fmt: skip
        """Run the backward pass of the sums of pass k: add forces, and write the gradients of features and charges."""
        w, n = self.weights, self.members * atoms.num_rows
        grid = atoms.num_rows, self._parts(shapes) + (k > 0), self.members
        common = self._sums(shapes, k)
        kernels.spread_gradient_kernel[grid](
            b.dx, b.vectors[k], b.charge_vectors[k], w.combine, w.combine_charges, b.dm, b.dm_charges,
            P=self.combinations, **common,
        )  # fmt: skip
        last, below = k == len(w.passes) - 1, w.passes[max(k - 1, 0)][-1]
        first_slot = k * self._parts(shapes) + max(k - 1, 0)
        kernels.convolve_gradient_kernel[grid](
            edges.row_ptr, edges.sender, b.radial, b.radial_slope, b.direction, *self._values(b, atoms, k), b.dm,
            b.dm_charges, b.dx, b.da, b.dq, b.dq if charge_slope is None else charge_slope, b.slopes[max(k - 1, 0)][-1],
            b.by_change, b.pull[first_slot:], n, **common, **self._values_of(k),
            G=below.bias.shape[-1], U=shapes.edges, LAST=last, GIVEN=last and charge_slope is not None,
            ACTIVATED=below.activated, VIRIAL=with_virial,
        )  # fmt: skip

    # --- constants -----------------------------------------------------------------------------------------------

    @property
    def _place(self) -> int:
        """The number of the charge among those that a pass reads."""
        return 2 * self.weights.features + self.weights.channels * self.weights.num_vectors

    def _sums(self, shapes: LaunchShapes, k: int) -> dict[str, Any]:
        w = self.weights
        return {
            "A": w.channels, "R": w.num_rbf, "H": w.num_vectors, "X": w.width, "BA": shapes.features,
            "CHARGES": k > 0, "num_warps": shapes.warps, **self._options(shapes),
        }  # fmt: skip

    def _equilibration(self, shapes: LaunchShapes, n: int) -> dict[str, Any]:
        block = 64 if n <= 64 else 1024
        return {
            "EXACT": self.weights.exact_charge,
            "BM": block,
            "num_warps": min(block // 32, 8),
            **self._options(shapes),
        }

    def _grid(self, shapes: LaunchShapes, n: int, cols: int) -> tuple[int, int, int]:
        return -(-n // shapes.rows), cols // shapes.cols, self.members

    def _tile(self, shapes: LaunchShapes, inputs: int) -> dict[str, Any]:
        depth = min(shapes.depth, PAD // shapes.parts)
        while inputs // shapes.parts % (2 * depth) == 0 and depth < shapes.depth:
            depth *= 2
        return {
            "BM": shapes.rows, "BN": shapes.cols, "BK": depth, "KS": shapes.parts,
            "PREC": "fp16x3" if shapes.halves else self.precision, "num_warps": shapes.layer_warps,
            "num_stages": shapes.stages, **self._options(shapes),
        }  # fmt: skip

    def launch_options(self, shapes: LaunchShapes) -> dict[str, Any]:
        return {"PDL": shapes.overlap, "launch_pdl": True} if self.can_overlap else {"PDL": 0}

    def _options(self, shapes: LaunchShapes) -> dict[str, Any]:
        return {**FUSED_ARITHMETIC, **self.launch_options(shapes)}


def _other(two: list[Tensor], one: Tensor) -> Tensor:
    """Return which of two buffers another one is not."""
    return two[1] if one is two[0] else two[0]
