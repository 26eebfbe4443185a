"""A potential that is a sum of priors, to check these by.

Shapes: N atoms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .models.base import Features, Graph, Head, PropertyHead, Representation, atom_counts, sum_over_systems
from .potential import Potential
from .priors.base import Prior

__all__ = ["without_network"]


def without_network(priors: Iterable[Prior], elements: Sequence[int], cutoff: float = 5.0) -> Potential:
    """A potential that is the sum of some priors; it predicts charges by element where one of them uses charges."""
    priors = list(priors)
    properties = [_ChargesByElement()] if any(prior.uses_charges for prior in priors) else []
    network = _NoNetwork(cutoff, max(elements, default=0) + 1)
    potential = Potential(network, _Zero(), priors, elements=elements, properties=properties)
    potential.allow_untrained_charge = True  # a prior need not see the charge
    return potential


class _NoNetwork(Representation):
    """Features that are zero."""

    def __init__(self, cutoff: float, max_z: int):
        super().__init__()
        self.cutoff, self.hidden_channels, self.max_z = cutoff, 1, max_z
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, graph: Graph) -> Features:
        return Features(self.nothing.expand(graph.num_atoms, 1))


class _Zero(Head):
    def forward(self, features: Features, graph: Graph) -> Tensor:
        return 0 * features.x.squeeze(1)


class _ChargesByElement(PropertyHead):
    """Charges of a tenth of the atomic number, shifted so that they sum to the total charge."""

    property, per, unit = "charges", "atom", "e"

    def forward(self, features: Features, graph: Graph) -> Tensor:
        charges = 0.1 * graph.z.double()
        missing = graph.charge.double() - sum_over_systems(charges, graph.batch, graph.num_systems)
        return charges + (missing / atom_counts(graph).clamp(min=1)).index_select(0, graph.batch)
