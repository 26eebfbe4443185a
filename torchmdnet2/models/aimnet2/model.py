"""AIMNet2: messages of features and partial charges of atoms; each pass equilibrates charges over the structure.

Source: D. Anstine, R. Zubatyuk, O. Isayev, Chem. Sci. 16, 10228 (2025).

Shapes: N atoms, E directed edges, A features, R radial functions, H combinations of them, F output features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...core.devices import Float64Buffers
from ...potential.graph import Features, Graph, Representation
from ...potential.output import CHARGES
from ...registry import REPRESENTATIONS
from ..layers import CosineCutoff, safe_divide
from ..layers import activation as activation_of
from ..tensornet2.model import equilibrate

__all__ = ["AIMNet2", "Convolution", "RadialShells"]


class RadialShells(Float64Buffers):
    """g_k(d) = exp(−η (d − s_k)²) · ½ (cos(π d / r_c) + 1), with R centres s_k from `lower` on, (r_c − lower)/R apart.

    Args:
        lower, cutoff: range in Å.
        num_rbf: number of functions R; η = (R / (r_c − lower))².
    """

    eta: Tensor
    shifts: Tensor

    def __init__(self, lower: float, cutoff: float, num_rbf: int):
        super().__init__()
        if num_rbf < 1:
            raise ValueError(f"num_rbf must be at least 1, got {num_rbf}")
        self.envelope = CosineCutoff(0.0, cutoff)
        spacing = (cutoff - lower) / num_rbf
        self.register_buffer("eta", torch.tensor(spacing**-2, dtype=torch.float64))
        self.register_buffer("shifts", lower + spacing * torch.arange(num_rbf, dtype=torch.float64))

    def forward(self, distances: Tensor) -> Tensor:
        """[E] Å → [E, R]."""
        eta, shifts = self.eta.to(distances.dtype), self.shifts.to(distances.dtype)
        away = distances[:, None] - shifts
        return torch.exp(-eta * away * away) * self.envelope(distances)[:, None]


class Convolution(nn.Module):
    """Sums over neighbors of values times radial functions, and squared lengths of such sums with directions.

    S_ak = Σ_j g_k a_jak and V_ah = Σ_k C_akh Σ_j g_k u_ij a_jak give the A·R values S and the A·H values |V|².

    Args:
        channels: A.
        num_rbf: R.
        num_vectors: H.
    """

    def __init__(self, channels: int, num_rbf: int, num_vectors: int):
        super().__init__()
        self.combine = nn.Parameter(torch.empty(channels, num_rbf, num_vectors))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.combine, std=self.combine.shape[1] ** -0.5)

    def forward(self, values: Tensor, graph: Graph, radial: Tensor, directions: Tensor) -> Tensor:
        """Return the sums of all atoms.

        Args:
            values: a, [N, A, R].
            graph: N atoms and E edges.
            radial: g, [E, R].
            directions: u, [E, 3].

        Returns:
            [N, A·(R + H)].
        """
        sent = values.index_select(0, graph.sender) * radial[:, None]
        zeros = values.new_zeros(values.shape)
        scalars = zeros.index_add(0, graph.receiver, sent)
        squares = values.new_zeros(*values.shape[:2], self.combine.shape[2])
        for direction in directions.unbind(1):
            vectors = zeros.index_add(0, graph.receiver, sent * direction[:, None, None])
            squares = squares + torch.einsum("nak,akh->nah", vectors, self.combine) ** 2
        return torch.cat([scalars.flatten(1), squares.flatten(1)], 1)


@REPRESENTATIONS.register("aimnet2")
class AIMNet2(Representation):
    """AIMNet2, a message-passing network with charges. The defaults are the published network.

    An atom has A·R features, at first those of its element, which are sent to the neighbors within the cutoff. Each
    pass reads the features of the atom, the sums over its neighbors and, from the second pass on, the charge and its
    sums. All passes but the last one change charges and features. Then the charges are equilibrated, so that they sum
    to the total charge, which enters in no other way. The last pass gives the F features that heads read. Outputs of
    passes have an activation, except for the first of several passes.

    The energy of published models has four parts: the head "scalar" with one further hidden layer, and the priors
    "atomref", "coulomb" with predicted charges and the damping "exp", and "d3" with the variant "aimnet2".

    Args:
        channels: number of channels A.
        num_rbf: number of radial functions R.
        num_vectors: number of combinations H.
        hidden_channels: number of features F.
        num_layers: number of passes; the first one reads no charges, the last one changes none.
        widths: widths of the hidden layers of a pass; the last pass repeats the last width once more.
        activation: name of the activation function.
        cutoff: cutoff in Å.
        cutoff_lower: centre of the first radial function in Å.
        max_z: atomic numbers 0 … max_z − 1 can be represented.
        exact_charge: conserve the total charge to rounding. False reproduces the published network, which misses up to
            1e-6 of the correction.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(
        self,
        channels: int = 16,
        num_rbf: int = 16,
        num_vectors: int = 12,
        hidden_channels: int = 256,
        num_layers: int = 3,
        widths: Sequence[int] = (512, 380),
        activation: str = "gelu",
        cutoff: float = 5.0,
        cutoff_lower: float = 0.8,
        max_z: int = 64,
        exact_charge: bool = True,
    ):
        super().__init__()
        if min(channels, num_rbf, num_vectors, hidden_channels, num_layers, len(widths), *widths) < 1:
            raise ValueError("all sizes must be at least 1, and widths must not be empty")
        self.channels, self.num_rbf, self.num_vectors = channels, num_rbf, num_vectors
        self.hidden_channels, self.num_layers, self.max_z = hidden_channels, num_layers, max_z
        self.cutoff, self.exact_charge = float(cutoff), exact_charge
        features = channels * num_rbf
        self.radial = RadialShells(cutoff_lower, cutoff, num_rbf)
        self.embedding = nn.Embedding(max_z, features)
        self.convolve = Convolution(channels, num_rbf, num_vectors)
        read, hidden = 2 * features + channels * num_vectors, list(widths)
        self.passes = nn.ModuleList()
        if num_layers > 1:
            self.convolve_charges = Convolution(1, num_rbf, num_vectors)
            self.passes.append(_network([read, *hidden, features + 2], activation, activate=False))
            read += 1 + num_rbf + num_vectors
            self.outputs, self.reads_charge = (CHARGES,), True
        self.local = num_layers == 1
        for _ in range(num_layers - 2):
            self.passes.append(_network([read, *hidden, features + 2], activation, activate=True))
        self.passes.append(_network([read, *hidden, hidden[-1], hidden_channels], activation, activate=True))

    def forward(self, graph: Graph) -> Features:
        radial = self.radial(graph.distances)
        directions = safe_divide(graph.vectors, graph.distances[:, None])
        features: Tensor = self.embedding(graph.z)
        stages: list[Tensor] = []
        for network in self.passes[:-1]:
            out = network(self._read(features, stages, graph, radial, directions))
            charges, weights, change = out[:, :1], out[:, 1:2], out[:, 2:]
            if stages:
                charges = charges + stages[-1]
            stages.append(equilibrate(charges, weights, graph, self.exact_charge))
            features = features + change
        x = self.passes[-1](self._read(features, stages, graph, radial, directions))
        return Features(x, charges=torch.stack(stages, 1) if stages else None)

    def _read(
        self, features: Tensor, stages: list[Tensor], graph: Graph, radial: Tensor, directions: Tensor
    ) -> Tensor:  # fmt: skip
        """Return the input of a pass for each atom."""
        values = features.unflatten(1, (self.channels, self.num_rbf))
        parts = [features, self.convolve(values, graph, radial, directions)]
        if stages:
            charges = stages[-1].to(features.dtype)
            values = charges[:, :, None].expand(-1, -1, self.num_rbf)
            parts += [charges, self.convolve_charges(values, graph, radial, directions)]
        return torch.cat(parts, 1)


def _network(widths: Sequence[int], activation: str, activate: bool) -> nn.Sequential:
    """Return linear layers of these widths with activations between them; `activate`: also after the last one."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), activation_of(activation)]
    return nn.Sequential(*(layers if activate else layers[:-1]))
