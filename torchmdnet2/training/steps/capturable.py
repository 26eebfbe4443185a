"""Whether a training step can be captured in a CUDA graph: found out by doing one under a guard."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ...potential import Potential
from ...runtime.sync_guard import ForbidHostSync, HostSync
from .network import PackedNetwork
from .packed_frames import Capacity, PackedFrames, Part

__all__ = ["uncapturable_reason"]


def uncapturable_reason(
    potential: Potential, part: Part, forces: bool, stress: bool, labels: Sequence[str]
) -> str | None:
    """The function that looks at values on the host while a step is computed, in words; None where none does.

    The network runs in plain PyTorch: the package's own kernels copy nothing.

    Args:
        potential: what is trained.
        part: a frame, packed.
        forces, stress, labels: as for `PackedNetwork`.
    """
    store = PackedFrames([part], potential.elements, potential.cutoff, potential.device, potential.dtype, stress)
    need = store.size([0])
    room = Capacity(2, need.atoms + 4, need.pairs + 8, tuple(n + 8 for n in need.edges))
    batch = store.batch(torch.tensor([0, -1], device=potential.device), room)
    network = PackedNetwork(potential, len(potential.elements), forces, stress, False, labels)
    if network.has_variant(batch) and not (network.heads or network.priors or network.pair_cutoff):
        return None
    parameters = [p for p in potential.parameters() if p.requires_grad]
    for guard in (nullcontext(), ForbidHostSync()):  # the first time, constants are made, which later steps have
        try:
            with guard:
                result = network(batch)
                found = [result.energy, result.forces, result.stress, result.charges, *result.properties.values()]
                values = [x.double().square().sum() for x in found if x is not None and x.requires_grad]
                torch.autograd.grad(values, parameters, allow_unused=True)
        except HostSync as error:
            return f"a step that no CUDA graph can hold: {error}"
    return None
