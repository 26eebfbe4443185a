"""From frames to packed frames: which trainings can be packed, and labels minus the contributions of priors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...data.labels import LABELS
from ...derivatives import gradients_of, with_leaves
from ...models.heads import EquivariantScalarHead, ScalarHead
from ...potential import Potential
from ...system import System
from ..config.loss_config import LossConfig
from .batches import Batch, Frames, in_order
from .loss import frame_weights
from .packed_frames import PackedFrames, Part

__all__ = ["frame_bytes", "pack", "unsupported_reason"]

_AT_ONCE = 512


def unsupported_reason(potential: Potential, labels: Sequence[str]) -> str | None:
    """Why a training cannot run on packed frames, in words; None when it can.

    Args:
        potential: what is trained.
        labels: names of the labels that count.
    """
    head = potential.head
    others = [name for name in labels if name not in LABELS.of_energies()]
    if others or potential.properties:
        return f"labels other than energy, forces and stress ({', '.join(others) or 'properties'})"
    if not isinstance(head, ScalarHead | EquivariantScalarHead) or getattr(head, "reduce", "sum") != "sum":
        return f"the head {type(head).__name__}"
    if potential.atom_filter >= 0:
        return "an atom filter"
    if potential.representation.reads_spin:
        return "a model that reads the spin"
    for prior in potential.priors:
        if prior.uses_charges:
            return f"the prior {type(prior).__name__}, which uses the network's charges"
        if any(p.requires_grad for p in prior.parameters()):
            return f"the prior {type(prior).__name__}, which is trained"
    return None


def frame_bytes(frame: Batch) -> int:
    """Memory that a frame takes, packed as float32."""
    return 28 * frame.sample.system.num_atoms + 18 * frame.neighbors.num_edges + 60


def pack(frames: Frames, potential: Potential, stress: bool, loss: LossConfig) -> PackedFrames:
    """All frames on the potential's device, energies, forces and stress less those of the priors.

    Args:
        frames: at least one.
        potential: whose network is trained.
        stress: keep stress labels.
        loss: with the weights of kinds of frames.
    """
    order = in_order(len(frames), _AT_ONCE)
    parts = (_part(frames.batch(positions), potential, stress, loss) for positions in order)
    return PackedFrames(parts, potential.elements, potential.cutoff, potential.device, potential.dtype, stress)


def _part(batch: Batch, potential: Potential, stress: bool, loss: LossConfig) -> Part:
    energy, forces, tension = _baseline(batch.sample.system, potential)
    system, labels = batch.sample.system, batch.sample.labels

    weight = frame_weights(labels, loss)

    def label(name: str, baseline: Tensor) -> np.ndarray:
        absent = torch.full_like(baseline, torch.nan)
        return (labels.get(name, absent) - baseline).numpy()

    return Part(
        z=system.z.numpy(),
        batch=system.batch.numpy(),
        charge=system.charge.numpy(),
        volume=system.volume.numpy(),
        neighbors=batch.neighbors,
        vectors=batch.neighbors.vectors(system).numpy(),
        energy=label("energy", energy),
        forces=label("forces", forces),
        stress=label("stress", tension) if stress else np.empty((system.num_systems, 0)),
        weight=None if weight is None else weight.numpy(),
    )


def _baseline(system: System, potential: Potential) -> tuple[Tensor, Tensor, Tensor]:
    """Energies [B], forces [N, 3] and stress [B, 3, 3] of the priors and of the constant shift, on the CPU."""
    system = system.to(potential.device)
    _check(potential, system)
    with torch.enable_grad():
        moved, leaves = with_leaves(system, forces=True, stress=True)
        energies = potential.prior_energies(moved)
        total = energies.new_zeros(system.num_systems).index_add(0, system.batch, energies)
        gradients = gradients_of(total, leaves, create_graph=False)
    volume = system.volume.masked_fill(system.volume == 0, 1)
    total = total.detach() + potential.energy_shift
    return total.cpu(), -gradients["pos"].cpu(), (gradients["strain"] / volume[:, None, None]).cpu()


def _check(potential: Potential, system: System) -> None:
    system.validate()
    potential.check_elements(system.z)
