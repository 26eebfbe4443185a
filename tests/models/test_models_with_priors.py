"""Every model with every prior: bars R1, R2, R4, R5, R7, R9 and R13, periodic and not.

Priors are additive, but each pair is evaluated as one potential: the prior may read what the model predicts, and the
two share neighbor lists, batches and strain.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch

from torchmdnet2 import Potential, System
from torchmdnet2.testing import POTENTIAL_CHECKS, SYSTEM_CHECKS

ELEMENTS = [1, 6, 8]
SIZE = {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.5, "max_z": 9}
MODELS: dict[str, dict[str, Any]] = {
    "tensornet": {},
    "tensornet2": {"q_dim": 2},
    "equivariant_transformer": {"num_heads": 2, "num_layers": 2},
    "transformer": {"num_heads": 2},
    "graph_network": {},
}
FIXED = {1: 0.4, 6: -0.1, 8: -0.7}
PRIORS: dict[str, dict[str, Any]] = {
    "atomref": {"name": "atomref", "energies": {1: -13.6, 6: -1030.0, 8: -2040.0}, "max_z": 9},
    "zbl": {"name": "zbl", "cutoff": 3.0},
    "d2": {"name": "d2", "cutoff": 5.0},
    "d3": {"name": "d3", "elements": ELEMENTS, "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 5.0},
    "coulomb, fixed": {"name": "coulomb", "charges": FIXED},
    "coulomb, predicted": {"name": "coulomb", "method": "reaction_field", "cutoff": 5.0, "damping": "exp"},
    "coulomb, switched": {
        "name": "coulomb", "charges": FIXED, "method": "reaction_field", "cutoff": 5.0, "damping": "cosine",
        "damping_lower": 1.0, "damping_upper": 3.0,
    },
    "reaction field": {
        "name": "coulomb", "charges": FIXED, "method": "reaction_field", "cutoff": 5.0, "dielectric": 78.3
    },
    "ewald": {"name": "coulomb", "method": "ewald", "cutoff": 5.0},
    "pme": {"name": "coulomb", "method": "pme", "cutoff": 5.0, "accuracy": 1e-11},
}  # fmt: skip

CLOUD = torch.tensor([[0.0, 0, 0], [1.1, 0.2, -0.1], [-0.3, 1.2, 0.3], [0.4, -0.5, 1.2]], dtype=torch.float64)
CELL = torch.tensor([[4.4, 0.3, -0.5], [1.6, 3.9, 0.2], [-0.9, 1.1, 4.6]], dtype=torch.float64)
Z = torch.tensor([6, 1, 8, 1])
SYSTEMS = {
    "molecule": System(z=Z, pos=CLOUD, charge=torch.tensor(1.0)),
    "cell": System(z=Z, pos=CLOUD, cell=CELL),
}


@cache
def potential(model: str, *priors: str) -> Potential:
    """All parameters of the network random; a charge head where a prior reads charges and the model has none."""
    given = [PRIORS[prior] for prior in priors]
    reads = any(prior["name"] == "coulomb" and "charges" not in prior for prior in given)
    config = {
        "model": {"name": model, **SIZE, **MODELS[model]},
        "head": {"name": "equivariant_scalar" if model == "equivariant_transformer" else "scalar"},
        "properties": [{"name": "charges"}] if reads and model != "tensornet2" else [],
        "priors": given,
        "elements": ELEMENTS,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Potential.from_config(config).double()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return made.eval()


def check(made: Potential, structures: list[str], of_potential: Iterable[str] = POTENTIAL_CHECKS) -> None:
    for name in of_potential:
        POTENTIAL_CHECKS[name](made)
    for name in structures:  # R1, R2, R4, R5, R7
        for run_on in SYSTEM_CHECKS.values():
            run_on(made, SYSTEMS[name])


@pytest.mark.parametrize("model", MODELS)
def test_several_priors(model):
    """Priors of every kind at once."""
    check(potential(model, "atomref", "zbl", "d2", "reaction field", "ewald"), ["molecule", "cell"])


def pairs() -> list[Any]:
    """All pairs. Before a release only: further models without charges of their own, with priors that see none."""
    found = []
    for prior, options in PRIORS.items():
        reads = options["name"] == "coulomb" and "charges" not in options
        for model in MODELS:
            further = model in ("equivariant_transformer", "transformer", "graph_network") and not reads
            found.append(pytest.param(prior, model, marks=pytest.mark.long if further else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("prior", "model"), pairs())
def test_each_prior(prior, model):
    made = potential(model, prior)
    made.allow_untrained_charge = True  # most models do not use that of the molecule
    endless = prior == "coulomb, fixed"  # the sum over all pairs; in cells a lattice sum by `in_cells`
    bars = ["smooth_at_the_cutoff", "isolated_atoms_are_exact", "small_structures_are_defined"]  # R9, R13
    check(made, ["molecule", "cell"], bars)
    # the prior is there: it changes the energy by what it says
    bare = Potential(made.representation, made.head, elements=ELEMENTS, properties=made.properties.values()).eval()
    bare.allow_untrained_charge = True
    for name in ["molecule"] if endless else SYSTEMS:
        whole, network = made(SYSTEMS[name]), bare(SYSTEMS[name])
        terms = made.prior_energies(SYSTEMS[name], charges=whole.charges)
        assert torch.allclose(whole.atom_energies - network.atom_energies, terms, rtol=0, atol=1e-10)
        assert float(terms.abs().max()) > 1e-3
