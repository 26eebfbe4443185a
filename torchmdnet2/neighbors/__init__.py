"""Neighbor search: which atoms, and which of their periodic images, lie within a cutoff of each other.

`reference.py` is the specification (all images, O(N²)). The other backends give the same list: `vesin` on the CPU
(reference.py for small structures), `triton` on the GPU (the package's own kernels) and `torch_cluster`; plug-ins
register further ones. Programs that capture a CUDA graph use `triton_search.TritonNeighborSearch` instead of
`neighbor_list`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

from ..errors import MissingBackend, NeighborOverflow
from ..registry import Registry, did_you_mean
from ..system import System, outside_transforms
from .neighbor_list import NeighborList
from .reference import (
    neighbor_list_brute_force,
    neighbor_list_reference,
    neighbor_list_torch_cluster,
    neighbor_list_vesin,
    simple_structure,
)

__all__ = ["BACKENDS", "NeighborList", "neighbor_list"]

BACKENDS: Registry[Callable[..., NeighborList]] = Registry("neighbor backend")
"""name -> function(system, cutoff, half=False) -> NeighborList; a ModuleNotFoundError becomes a MissingBackend."""

BACKENDS.register("reference")(neighbor_list_reference)
BACKENDS.register("vesin")(neighbor_list_vesin)
BACKENDS.register("torch_cluster")(neighbor_list_torch_cluster)

_EXTRAS = {"torch_cluster": "cluster", "triton": "gpu", "vesin": "cpu"}


@BACKENDS.register("triton")
def _neighbor_list_triton(system: System, cutoff: float, half: bool = False) -> NeighborList:
    from .triton_search import neighbor_list_triton  # imports triton, which not every machine has

    return neighbor_list_triton(system, cutoff, half)


def neighbor_list(
    system: System, cutoff: float, backend: str = "auto", capacity: int | None = None, half: bool = False
) -> NeighborList:
    """Return all pairs closer than the cutoff, for any cell and any periodicity, in each structure of the batch.

    Args:
        system: N atoms in B structures; atoms may lie outside their cell.
        cutoff: Å, positive; a pair is listed when its distance is below the cutoff.
        backend: "auto" takes the fastest one that is installed for the system's device ("triton" on the GPU, else
            "vesin", or all images in NumPy for small structures); or one of BACKENDS by name.
        capacity: largest number of directed edges; None: no limit.
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
    if backend != "auto" and backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise ValueError(f"unknown neighbor backend '{backend}'{hint} Known: auto, {', '.join(BACKENDS)}")
    system, result = system.detach(), None
    with outside_transforms():
        structure = simple_structure(system)
        if structure is None:
            system.validate()
        elif backend == "auto":
            result = neighbor_list_brute_force(structure, float(cutoff), half)
        if result is None:
            result = _search(system, float(cutoff), backend, half)
    if capacity is not None and result.num_edges > capacity:
        raise NeighborOverflow(result.num_edges, capacity)
    return result


def _search(system: System, cutoff: float, backend: str, half: bool) -> NeighborList:
    """Search by the backend of this name, which may be "auto"."""
    if backend == "auto":
        backend = _default_backend(system.device.type)
    try:
        return BACKENDS[backend](system, cutoff, half=half)
    except ModuleNotFoundError as error:
        module = str(error.name).partition(".")[0]
        remedy = f"'torchmdnet2[{_EXTRAS[module]}]'" if module in _EXTRAS else module
        raise MissingBackend(
            f"the neighbor backend '{backend}' needs the package {module}: pip install {remedy}"
        ) from error


def _default_backend(device_type: str) -> str:
    from importlib.util import find_spec

    if device_type == "cuda" and find_spec("triton"):
        return "triton"
    if find_spec("vesin"):
        return "vesin"
    words = "vesin is not installed: neighbor searches on the CPU take long, as the square of the number of atoms"
    warnings.warn(f"{words}; pip install 'torchmdnet2[cpu]'", stacklevel=2)
    return "reference"
