"""Conformance checks for new potentials, priors and neighbor searches. No test framework is needed.

    from torchmdnet2.testing import check_potential
    check_potential(Potential.from_config({"model": {"name": "my_model"}}))

Every check raises AssertionError with the measured number and the bar. `POTENTIAL_CHECKS` and `SYSTEM_CHECKS` list them
by name, so that a test can run them one by one. All run in float64.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from .checks import POTENTIAL_CHECKS, SYSTEM_CHECKS
from .errors import UntrainedChargeWarning
from .neighbors import BACKENDS, NeighborList
from .neighbors.reference import neighbor_list_reference
from .potential import Potential
from .prior_alone import without_network
from .priors.base import Prior
from .system import System

__all__ = [
    "POTENTIAL_CHECKS",
    "SYSTEM_CHECKS",
    "check_neighbor_backend",
    "check_potential",
    "check_prior",
    "example_systems",
]


def check_potential(potential: Potential, systems: Iterable[System] | None = None) -> None:
    """Check everything that the package promises of a potential; it is copied, and run in float64.

    Args:
        potential: any potential; mirror images are compared unless its representation has `group = "SO(3)"`.
        systems: structures to check on; default: `example_systems` of its elements.

    Raises:
        AssertionError: names the check, the structure, the measured number and the bar.
    """
    potential = copy.deepcopy(potential).double().eval()
    # what holds of one charge holds of all
    potential.total_charges, potential.allow_untrained_charge = None, True
    named = example_systems(potential.elements, potential.cutoff) if systems is None else _number(systems)
    for check in POTENTIAL_CHECKS.values():
        check(potential)
    for name, system in named.items():
        for check_system in SYSTEM_CHECKS.values():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UntrainedChargeWarning)
                    check_system(potential, system.to(potential.device, torch.float64))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def check_prior(prior: Prior, systems: Iterable[System] | None = None, elements: Sequence[int] = (1, 6, 8)) -> None:
    """Check a prior as the only term of a potential; see `check_potential`.

    Args:
        prior: the prior; it is copied.
        systems: structures to check on; default: `example_systems`.
        elements: atomic numbers for the default structures.

    Raises:
        AssertionError: as check_potential.
    """
    check_potential(without_network([copy.deepcopy(prior)], elements), systems)


def check_neighbor_backend(
    backend: str | Callable[..., NeighborList], systems: Iterable[System] | None = None, cutoff: float = 4.0
) -> None:
    """Compare a neighbor search with the reference, pair by pair and shift by shift.

    Args:
        backend: a name in `torchmdnet2.neighbors.BACKENDS`, or a function(system, cutoff, half=False).
        systems: structures to check on; default: `example_systems`, singly and in one batch, and empty ones.
        cutoff: Å. Pairs within 1e-6 Å of it may be listed or not.

    Raises:
        AssertionError: names the structure and counts the wrong pairs.
    """
    search = BACKENDS[backend] if isinstance(backend, str) else backend
    if systems is None:
        named = example_systems((1, 6, 8), cutoff)
        named["batch"] = System.concatenate(list(named.values()))
        named["no atoms"] = System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3, dtype=torch.float64))
        named["one atom"] = System(z=torch.ones(1, dtype=torch.long), pos=torch.zeros(1, 3, dtype=torch.float64))
    else:
        named = _number(systems)
    for (name, system), half in itertools.product(named.items(), (False, True)):
        kind = f"{name}, {'half' if half else 'full'} list"
        found, wider = search(system, cutoff, half=half), neighbor_list_reference(system, cutoff + 1e-6, half=half)
        rows, sure = _rows(found), _rows(neighbor_list_reference(system, cutoff - 1e-6, half=half))
        assert len(set(rows)) == len(rows), f"{kind}: {len(rows) - len(set(rows))} edges are listed twice"
        missing, extra = set(sure) - set(rows), set(rows) - set(_rows(wider))
        assert not missing and not extra, f"{kind}: {len(missing)} edges are missing, {len(extra)} should not be there"
        assert rows == sorted(rows), f"{kind}: edges are not sorted by receiver, sender, shift"
        counts = torch.bincount(found.edge_index[0], minlength=system.num_atoms)
        assert torch.equal(torch.diff(found.row_ptr), counts), f"{kind}: row_ptr does not count the edges of each atom"
        assert found.row_ptr.shape == (system.num_atoms + 1,), f"{kind}: row_ptr has shape {tuple(found.row_ptr.shape)}"


# --- structures ------------------------------------------------------------------------------------------------------


def example_systems(elements: Sequence[int], cutoff: float = 5.0, seed: int = 0) -> dict[str, System]:
    """Small random structures of the given elements: free, charged, and in cells of every kind.

    Args:
        elements: atomic numbers, used in turn.
        cutoff: Å; sets the size of the cells ("tiny" ones are narrower than it).
        seed: seed of the random numbers; torch's global generator is not touched.
    """
    random = torch.Generator().manual_seed(seed)
    z = torch.tensor([elements[i % len(elements)] for i in range(6)])
    cloud = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.float64) * 1.3
    cloud = cloud + 0.3 * (torch.rand(6, 3, generator=random, dtype=torch.float64) - 0.5)
    box = max(cutoff, 3.0) * torch.eye(3, dtype=torch.float64)
    skew = torch.tensor([[1.0, 0.1, -0.2], [0.45, 0.9, 0.1], [-0.3, 0.35, 1.1]], dtype=torch.float64)
    tiny = 2.2 * (skew + 0.15 * torch.rand(3, 3, generator=random, dtype=torch.float64))
    return {
        "molecule": System(z=z, pos=cloud),
        "ion": System(z=z, pos=cloud, charge=torch.tensor(-2.0), spin=torch.tensor(2)),
        "cubic cell": System(z=z, pos=cloud - 7.0, cell=2.1 * box),
        "triclinic cell": System(z=z, pos=cloud, cell=1.2 * box @ skew, charge=torch.tensor(1.0)),
        "left-handed cell": System(z=z, pos=cloud, cell=(1.1 * box @ skew)[[1, 0, 2]]),
        "tiny cell": System(z=z[:2], pos=cloud[:2], cell=tiny),
        "slab": System(z=z, pos=cloud, cell=box @ skew, pbc=torch.tensor([True, True, False])),
        "chain": System(z=z, pos=cloud, cell=torch.tensor([[0, 0, 0], [0, 3.4, 0.4], [0, 0, 0]])),
    }


def _number(systems: Iterable[System]) -> dict[str, System]:
    return {f"system {k}": system for k, system in enumerate(systems)}


def _rows(edges: NeighborList) -> list[tuple[int, ...]]:
    return list(map(tuple, torch.cat([edges.edge_index.T, edges.shift], 1).tolist()))
