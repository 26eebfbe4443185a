"""TensorNet2: TensorNet with latent partial charges that are equilibrated over the structure.

Source: the architecture of TorchMD-Net 3.1 (class TensorNet2); tensors after G. Simeon, G. De Fabritiis, TensorNet,
NeurIPS 2023, arXiv 2306.06482; charge equilibration after D. Anstine, R. Zubatyuk, O. Isayev, AIMNet2, Chem. Sci.
16, 10228 (2025), Eq. 6.

Shapes: N atoms, E directed edges, B structures, F features, R radial functions, C charge channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ...potential.graph import Features, Graph, Representation, sum_over_systems
from ...potential.output import CHARGES
from ...registry import REPRESENTATIONS
from ..layers import MLP, CosineCutoff, LayerNorm, radial_basis, reset
from ..tensornet.model import Interaction, TensorEmbedding, part_norms

__all__ = ["SOFTENING", "ChargePredict", "TensorNet2", "equilibrate"]


SOFTENING = 1e-6


def equilibrate(charges: Tensor, weights: Tensor, graph: Graph, exact: bool = True) -> Tensor:
    """Shift charges so that they sum to the total charge Q of their structure, in each channel.

    q_i = c_i + w_i (Q − Σ_j c_j),  w_i = u_i / Σ_j u_j,  u = f² + ε, ε = 1e-6; in float64, so that the sum is Q to
    rounding also where the network is float32.

    Args:
        charges: c, [N, C] in e.
        weights: f, [N, C].
        graph: atoms, structures and total charges.
        exact: False takes w_i = f_i² / (Σ_j f_j² + ε) as TorchMD-Net does; the sum is then wrong by about
            ε / Σ_j f_j² of the correction, and depends a little on the size of the cell.

    Returns:
        [N, C] in e, float64.
    """
    batch, num = graph.batch, graph.num_systems
    charges, u = charges.double(), weights.double() ** 2 + (SOFTENING if exact else 0.0)
    total_u = sum_over_systems(u, batch, num) + (0.0 if exact else SOFTENING)
    missing = graph.charge.double()[:, None] - sum_over_systems(charges, batch, num)
    return charges + u * (missing / total_u.clamp(min=1e-300)).index_select(0, batch)


class ChargePredict(nn.Module):
    """Latent charges from the tensors: MLP of the normalised (I, ‖A‖², ‖S‖²), then `equilibrate`.

    Args:
        hidden_channels: F.
        q_dim: C.
        act: name of the activation function.
        exact: see `equilibrate`.
    """

    def __init__(self, hidden_channels: int, q_dim: int, act: str, exact: bool):
        super().__init__()
        f = hidden_channels
        self.exact = exact
        self.q_norm = LayerNorm(3 * f)
        self.q_mlp = MLP(3 * f, f, 2 * q_dim, act, 1)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """X [N, 9, F] → charges [N, C] in e, float64."""
        _, norm_a, norm_s = part_norms(x)
        charges, weights = self.q_mlp(self.q_norm(torch.cat([x[:, 0], norm_a, norm_s], 1))).chunk(2, 1)
        return equilibrate(charges, weights, graph, self.exact)


@REPRESENTATIONS.register("tensornet2")
class TensorNet2(Representation):
    """TensorNet2, a TensorNet with latent charges. It loads weights of TorchMD-Net 3.x, with the same parameter names.

    The embedding is TensorNet's. After it, and after each interaction layer, C latent charges per atom are predicted
    and equilibrated to the total charge. The edge filters of the next layer read the charges of both atoms besides the
    radial basis. The total charge enters in no other way. The prior "zbl" adds a short-range repulsion; the head
    "scalar_coulomb" or the prior "coulomb" adds a Coulomb energy of the charges.

    Args:
        hidden_channels: number of features F.
        num_layers: number of interaction layers.
        num_rbf: number of radial functions R.
        rbf_type: "expnorm", "gauss", "bessel" or "smooth_bessel".
        trainable_rbf: learn centres and widths of the radial functions.
        activation: name of the activation function.
        cutoff: Å.
        cutoff_lower: Å; edges contribute only beyond it.
        max_z: atomic numbers 0 … max_z − 1.
        group: "O(3)": energies of mirror images are equal; "SO(3)": they may differ.
        skew_sign: sign of the antisymmetric part, see TensorNet.
        q_dim: C, charge channels; 0 for a model without charges.
        exact_charge: conserve the total charge to rounding; False reproduces TorchMD-Net, which misses up to 1e-6.
    """

    local = False

    takes_ghosts = True
    gives_vectors = False

    def __init__(
        self,
        hidden_channels: int = 128,
        num_layers: int = 2,
        num_rbf: int = 32,
        rbf_type: str = "expnorm",
        trainable_rbf: bool = False,
        activation: str = "silu",
        cutoff: float = 5.0,
        cutoff_lower: float = 0.0,
        max_z: int = 128,
        group: Literal["O(3)", "SO(3)"] = "O(3)",
        skew_sign: Literal[1, -1] = 1,
        q_dim: int = 16,
        exact_charge: bool = True,
    ):
        super().__init__()
        if group not in ("O(3)", "SO(3)"):
            raise ValueError(f"group must be 'O(3)' or 'SO(3)', got '{group}'")
        if skew_sign not in (1, -1):
            raise ValueError(f"skew_sign must be 1 or -1, got {skew_sign}")
        if hidden_channels < 1 or num_layers < 0 or q_dim < 0:
            raise ValueError("hidden_channels must be at least 1, num_layers and q_dim at least 0")
        self.cutoff, self.hidden_channels, self.max_z = float(cutoff), hidden_channels, max_z
        self.group, self.q_dim = group, q_dim
        self.local = q_dim == 0
        self.reads_charge = q_dim > 0 and num_layers > 0
        f = hidden_channels
        self.envelope = CosineCutoff(cutoff_lower, cutoff)
        self.distance_expansion = radial_basis(rbf_type, cutoff_lower, cutoff, num_rbf, trainable_rbf)
        self.tensor_embedding = TensorEmbedding(f, num_rbf, activation, self.envelope, max_z, skew_sign)
        self.layers = nn.ModuleList(
            Interaction(f, num_rbf + 2 * q_dim, activation, self.envelope, group) for _ in range(num_layers)
        )
        if q_dim > 0:
            self.outputs = (CHARGES,)
            self.charge_predict_0 = ChargePredict(f, q_dim, activation, exact_charge)
            self.charge_predicts = nn.ModuleList(
                ChargePredict(f, q_dim, activation, exact_charge) for _ in range(num_layers)
            )
        self.linear = nn.Linear(3 * f, f)
        self.out_norm = LayerNorm(3 * f)
        self.act = self.tensor_embedding.act

    def reset_parameters(self) -> None:
        """Initialise all parameters again."""
        reset(self)

    def forward(self, graph: Graph) -> Features:
        rbf, envelope = self.distance_expansion(graph.distances), self.envelope(graph.distances)
        rbf_self = self.distance_expansion(graph.vectors.new_zeros(1))
        x = self.tensor_embedding(graph, rbf, envelope, rbf_self)
        # the total charge acts through the latent charges alone, not in the tensor products
        no_charge = torch.ones_like(graph.z, dtype=x.dtype)
        stages = [self.charge_predict_0(x, graph)] if self.q_dim else []
        for i, layer in enumerate(self.layers):
            edge, self_edge = rbf, rbf_self
            if self.q_dim:
                q = stages[-1].to(rbf.dtype)
                edge = torch.cat([rbf, q.index_select(0, graph.receiver), q.index_select(0, graph.sender)], 1)
                self_edge = torch.cat([rbf_self.expand(graph.num_atoms, -1), q, q], 1)
            x = layer(x, graph, edge, envelope, self_edge, no_charge)
            if self.q_dim:
                stages.append(self.charge_predicts[i](x, graph))
        norms = torch.cat(part_norms(x), 1)
        charges = torch.stack(stages, 1) if self.q_dim else None
        return Features(self.act(self.linear(self.out_norm(norms))), charges=charges)
