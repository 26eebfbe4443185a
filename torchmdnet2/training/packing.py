"""From frames to packed frames: which trainings can be packed, and labels less what the network does not decide."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.heads import EquivariantScalarHead, ScalarHead
from ..potential import Potential
from ..system import System
from .batches import Batch, Frames, join
from .packed import Frame, PackedFrames

__all__ = ["frame_bytes", "pack", "reason_against"]

_AT_ONCE = 64
LABELS = ("energy", "forces", "stress")


def reason_against(potential: Potential, labels: Sequence[str]) -> str | None:
    """Why a training cannot run on packed frames, in words; None when it can.

    Args:
        potential: what is trained.
        labels: names of the labels that count.
    """
    head = potential.head
    others = [name for name in labels if name not in LABELS]
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


def pack(frames: Frames, potential: Potential, stress: bool) -> PackedFrames:
    """All frames on the potential's device, energies, forces and stress less those of the priors.

    Args:
        frames: at least one.
        potential: whose network is trained.
        stress: keep stress labels.
    """
    packed: list[Frame] = []
    for start in range(0, len(frames), _AT_ONCE):
        parts = [frames[k] for k in range(start, min(start + _AT_ONCE, len(frames)))]
        packed += _frames(parts, potential, stress)
    return PackedFrames(packed, potential.elements, potential.cutoff, potential.device, potential.dtype, stress)


def _frames(parts: list[Batch], potential: Potential, stress: bool) -> list[Frame]:
    energy, forces, tension = _baseline(parts, potential, stress)
    made, atom = [], 0
    for k, part in enumerate(parts):
        system, labels = part.sample.system, part.sample.labels
        num = system.num_atoms
        nothing = torch.full((num, 3), torch.nan, dtype=torch.float64)
        made.append(
            Frame(
                z=system.z.numpy(),
                charge=float(system.charge[0]),
                volume=float(system.volume[0]),
                neighbors=part.neighbors,
                vectors=part.neighbors.vectors(system).numpy(),
                energy=float(labels.get("energy", nothing[0, :1])[0]) - float(energy[k]),
                forces=(labels.get("forces", nothing) - forces[atom : atom + num]).numpy(),
                stress=(labels.get("stress", nothing[:1, :, None].expand(1, 3, 3))[0] - tension[k]).numpy(),
            )
        )
        atom += num
    return made


def _baseline(parts: list[Batch], potential: Potential, stress: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Energies [B], forces [N, 3] and stress [B, 3, 3] of the priors and of the constant shift, on the CPU."""
    system = join(parts).sample.system.to(potential.device)
    _check(potential, system)
    pos = system.pos.detach().requires_grad_()
    strain = system.pos.new_zeros(system.num_systems, 3, 3).requires_grad_()
    symmetric = (strain + strain.transpose(1, 2)) / 2
    moved = system.replace(
        pos=pos + torch.einsum("ni,nij->nj", pos, symmetric[system.batch]), cell=system.cell + system.cell @ symmetric
    )
    with torch.enable_grad():
        energies = potential.prior_energies(moved)
        total = energies.new_zeros(system.num_systems).index_add(0, system.batch, energies)
        forces, tension = torch.zeros_like(pos), torch.zeros_like(strain)
        if total.requires_grad:
            found = torch.autograd.grad(total.sum(), [pos, strain], allow_unused=True)
            forces = forces if found[0] is None else -found[0]
            tension = tension if found[1] is None else found[1]
    volume = system.volume.masked_fill(system.volume == 0, 1)
    total = total.detach() + potential.energy_shift
    return total.cpu(), forces.detach().cpu(), (tension / volume[:, None, None]).detach().cpu()


def _check(potential: Potential, system: System) -> None:
    system.validate()
    potential.check_elements(system.z)
