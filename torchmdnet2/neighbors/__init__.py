"""Neighbor search: which atoms, and which of their periodic images, lie within a cutoff of each other.

`reference.py` is the specification (all images, O(N²)); the other backends must give the same list: `vesin` on the
CPU, `triton` on the GPU (the package's own kernels), and optionally `torch_cluster` (molecules without periodicity) and
`nvalchemi`. MD loops that capture a CUDA graph use `triton_search.TritonNeighborSearch` instead of `neighbor_list`, or
`skin.SkinNeighborSearch`, whose list is kept until atoms have moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import MissingBackend, NeighborOverflow
from ..registry import did_you_mean
from ..system import System
from .cpu import neighbor_list_vesin
from .external import neighbor_list_nvalchemi, neighbor_list_torch_cluster
from .reference import neighbor_list_reference
from .result import NeighborList

__all__ = ["BACKENDS", "NeighborList", "neighbor_list"]


def _neighbor_list_triton(system: System, cutoff: float, half: bool = False) -> NeighborList:
    from .triton_list import neighbor_list_triton  # imports triton, which not every machine has

    return neighbor_list_triton(system, cutoff, half)


BACKENDS: dict[str, Callable[..., NeighborList]] = {
    "reference": neighbor_list_reference,
    "vesin": neighbor_list_vesin,
    "triton": _neighbor_list_triton,
    "torch_cluster": neighbor_list_torch_cluster,
    "nvalchemi": neighbor_list_nvalchemi,
}
"""name -> function(system, cutoff, half=False) -> NeighborList."""


def neighbor_list(
    system: System, cutoff: float, backend: str = "auto", capacity: int | None = None, half: bool = False
) -> NeighborList:
    """All pairs closer than the cutoff, for any cell and any periodicity, each structure of the batch on its own.

    Args:
        system: N atoms in B structures; atoms may lie outside their cell.
        cutoff: Å, positive; a pair is listed when its distance is below the cutoff.
        backend: "auto" takes the fastest one that is installed for the system's device ("triton" on the GPU, else
            "vesin"); or one of BACKENDS by name.
        capacity: room for this many directed edges; None grows as needed.
        half: list each unordered pair once (receiver < sender) instead of twice.

    Returns:
        NeighborList, sorted by receiver, sender, shift; its vectors and distances are differentiable.

    Raises:
        ValueError: the cutoff is not a positive number, the backend is unknown, or the system is not valid
            (a position that is not finite, a periodic direction without lattice vector).
        NeighborOverflow: more edges than `capacity`.
        MissingBackend: the backend's package is not installed.
    """
    if not (isinstance(cutoff, int | float) and math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"the cutoff must be a positive number of Å, got {cutoff!r}")
    if backend == "auto":
        backend = _default_backend(system.device.type)
    if backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise ValueError(f"unknown neighbor backend '{backend}'{hint} Known: auto, {', '.join(BACKENDS)}")
    if not _plainly_valid(system):
        system.validate()
    try:
        result = BACKENDS[backend](system, float(cutoff), half=half)
    except ModuleNotFoundError as error:
        raise MissingBackend(
            f"the neighbor backend '{backend}' needs the package '{error.name}': pip install {error.name}"
        ) from error
    if capacity is not None and result.num_edges > capacity:
        raise NeighborOverflow(result.num_edges, capacity)
    return result


def _plainly_valid(system: System) -> bool:
    """Whether a glance shows that one structure on the CPU is valid; False says nothing, and `validate` decides.

    validate() takes a third of a millisecond, several times the search of a small molecule.
    """
    if system.num_systems != 1 or system.device.type != "cpu" or system.num_atoms == 0:
        return False
    numbers = system.pos.detach().sum() + system.cell.detach().sum() + system.charge.sum()
    if bool(system.batch.any()) or not math.isfinite(float(numbers)):
        return False
    if not bool(system.pbc.any()):
        return True
    if not bool(system.pbc.all()):
        return False
    a, b, c = system.cell[0].tolist()
    volume = sum(a[k] * (b[k - 2] * c[k - 1] - b[k - 1] * c[k - 2]) for k in range(3))
    return abs(volume) > 1e-3 * math.prod(math.hypot(*row) for row in (a, b, c))


def _default_backend(device_type: str) -> str:
    from importlib.util import find_spec

    if device_type == "cuda" and find_spec("triton"):
        return "triton"
    return "vesin" if find_spec("vesin") else "reference"
