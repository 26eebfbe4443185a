"""From frames to packed frames: which trainings can be packed, and labels minus the contributions of priors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ...data.edges import EdgeMemory, in_threads
from ...data.labels import LABELS, label_names
from ...models.heads import EquivariantScalarHead, ScalarCoulombHead, ScalarHead
from ...neighbors.pairs import PairLists, require_molecules
from ...potential.derivatives import gradients_of, with_leaves
from ...potential.potential import Potential
from ...system import System
from ..config.sections import DIPOLE_NORM, LossConfig, property_of
from .batches import Batch, Frames, in_order
from .loss import frame_weights
from .packed_frames import EdgeRows, FurtherPart, PackedFrames, Part

__all__ = ["frame_bytes", "further_labels", "pack", "pack_part", "unsupported_reason"]

_AT_ONCE = 512


def unsupported_reason(potential: Potential) -> str | None:
    """Why a training cannot run on packed frames, in words; None when it can.

    Args:
        potential: what is trained.
    """
    head = potential.head
    if head is not None:
        known = isinstance(head, ScalarHead | EquivariantScalarHead | ScalarCoulombHead)
        if not known or getattr(head, "reduce", "sum") != "sum":
            return f"the head {type(head).__name__}"
    for other in potential.properties.values():
        if getattr(other, "reads_edges", True):
            return f"the head {type(other).__name__}, which reads edges"
    if potential.atom_filter >= 0:
        return "an atom filter"
    if potential.representation.reads_spin:
        return "a model that reads the spin"
    for prior in potential.priors:
        if any(p.requires_grad for p in prior.parameters()):
            return f"the prior {type(prior).__name__}, which is trained"
    return None


def further_labels(potential: Potential, labels: Iterable[str]) -> list[str]:
    """Those of the labels, in their order, that heads of properties or the network's charges are compared with."""
    outputs = potential.outputs
    known = {*outputs, *([DIPOLE_NORM] if "dipole" in outputs else [])}
    return [n for n in label_names(labels) if n not in LABELS.of_energies() and property_of(n) in known]


def frame_bytes(frame: Batch, potential: Potential, labels: Sequence[str]) -> int:
    """Memory that a frame takes, packed as float32.

    Args:
        frame: one.
        potential: what is trained.
        labels: of `further_labels`.
    """
    own = 28 * frame.sample.system.num_atoms + 18 * frame.neighbors.num_edges + 60
    further = _further(frame, potential, labels)
    return own if further is None else own + further.num_bytes


def pack(
    frames: Frames, potential: Potential, stress: bool, loss: LossConfig, labels: Sequence[str] = ()
) -> PackedFrames:
    """All frames on the potential's device, energies, forces and stress less those of the priors.

    Priors that read the charges of the network are left in: they change with the weights.

    Args:
        frames: at least one.
        potential: whose network is trained.
        stress: keep stress labels.
        loss: with the weights of kinds of frames.
        labels: of `further_labels`.
    """
    one = Lock()

    def part(positions: Sequence[int]) -> Part:
        made = pack_part(frames.batch(positions), potential, stress, loss, labels, one)
        made.flatten(potential.elements)
        return made

    order, device = in_order(len(frames), _AT_ONCE), potential.device
    if isinstance(frames.lists, EdgeMemory):  # which is not shared by threads
        parts: Iterable[Part] = map(part, order)
    else:
        parts = in_threads(part, order, partial(torch.cuda.set_device, device) if device.type == "cuda" else None)
    return PackedFrames(parts, potential.elements, potential.cutoff, potential.device, potential.dtype, stress)


def pack_part(
    batch: Batch,
    potential: Potential,
    stress: bool,
    loss: LossConfig,
    further: Sequence[str],
    one: AbstractContextManager | None = None,
) -> Part:
    """Some frames; arguments as of `pack`; one: a lock, held while the priors are evaluated."""
    with one or nullcontext():
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
        further=_further(batch, potential, further),
    )


def _further(batch: Batch, potential: Potential, names: Sequence[str]) -> FurtherPart | None:
    readers = [prior for prior in potential.priors if prior.uses_charges]
    read = [potential.head.pair_cutoff if potential.head else None, *(prior.cutoff for prior in readers)]
    cutoffs = {cutoff for cutoff in read if cutoff is not None}
    if not names and not readers and not cutoffs:
        return None
    system, labels = batch.sample.system, batch.sample.labels
    for prior in readers:
        prior.check(system)
    lists, molecules = PairLists(system, {potential.cutoff: batch.neighbors}), system.batch.numpy()

    def edges(cutoff: float) -> EdgeRows:
        if math.isinf(cutoff):  # many, and the same for all molecules of a size
            require_molecules(system)
            return EdgeRows.of_all_pairs(system.atom_counts.numpy())
        return EdgeRows.of_list(lists(cutoff), molecules, system.num_systems)

    absent = {name: torch.full(LABELS[name].of(system), torch.nan) for name in names}
    return FurtherPart(
        batch=molecules,
        labels={name: labels.get(name, absent[name]).numpy() for name in names},
        pos=system.pos.numpy(),
        cell=system.cell.numpy(),
        pbc=system.pbc.numpy(),
        lists={cutoff: edges(cutoff) for cutoff in sorted(cutoffs)},
    )


def _baseline(system: System, potential: Potential) -> tuple[Tensor, Tensor, Tensor]:
    """Energies [B], forces [N, 3] and stress [B, 3, 3] of the constant shift and of the priors that do not read the
    network's charges, on the CPU."""
    system = system.to(potential.device)
    system.validate()
    potential.check_elements(system.z)
    with torch.enable_grad():
        moved, leaves = with_leaves(system, forces=True, stress=True)
        lists = PairLists(moved)
        energies = torch.zeros(system.num_atoms, dtype=torch.float64, device=potential.device)
        for prior in potential.priors:
            if not prior.uses_charges:
                prior.check(moved)
                energies = energies + prior(moved, None if prior.cutoff is None else lists(prior.cutoff))
        total = energies.new_zeros(system.num_systems).index_add(0, system.batch, energies)
        gradients = gradients_of(total, leaves, create_graph=False)
    volume = system.volume.masked_fill(system.volume == 0, 1)
    total = total.detach() + potential.energy_shift
    return total.cpu(), -gradients["pos"].cpu(), (gradients["strain"] / volume[:, None, None]).cpu()
