"""Epochs on packed frames: which trainings can be packed, and their steps, replayed on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ...core.pipeline import in_threads
from ...data.dataset import select
from ...data.labels import GROUP, LABELS, LEVEL, label_names
from ...engine.graph import GraphMemory
from ...engine.select import fast_path
from ...models.heads import EquivariantScalarHead, ScalarCoulombHead, ScalarHead
from ...neighbors import NeighborList
from ...neighbors.frames import EdgeMemory, are_small_molecules, search
from ...neighbors.pairs import PairLists, require_molecules
from ...potential.derivatives import gradients_of, stress_of, with_leaves
from ...potential.potential import Potential
from ...system import System
from ..config.sections import DIPOLE_NORM, LossConfig, property_of
from .batches import Batch, Frames, in_order, measured_batches, most_frames, trains_groups
from .distributed import Devices
from .loss import ErrorSums, frame_weights
from .network import PackedNetwork, uncapturable_reason
from .optimizers import AdamW, Muon, rates_of
from .packed_frames import EdgeRows, FurtherPart, PackedFrames, Part
from .replay import EvaluationPass, GraphedPass, TrainingPass
from .trainer import Trainer

__all__ = [
    "PackedLoop", "frame_bytes", "further_labels", "pack", "pack_part", "pack_trainer", "pays_on_cpu",
    "unsupported_reason", "unsupported_training", "wants_numba",
]  # fmt: skip


_AT_ONCE = 512


def unsupported_reason(potential: Potential) -> str | None:
    """Return why a training cannot run on packed frames, in words; None if it can.

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
    """Return the labels, in their order, that are compared with heads of properties or charges of the network."""
    outputs = potential.outputs
    known = {*outputs, *([DIPOLE_NORM] if "dipole" in outputs else [])}
    return [n for n in label_names(labels) if n not in LABELS.of_energies() and property_of(n) in known]


def frame_bytes(frame: Batch, potential: Potential, labels: Sequence[str]) -> int:
    """Return the memory that a frame takes, packed as float32.

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
    """Pack all frames on the potential's device, each once; energies, forces and stress of the priors are subtracted
    from the labels.

    Priors that read the charges of the network are not subtracted: they change with the weights.

    Args:
        frames: at least one.
        potential: whose network is trained.
        stress: keep stress labels.
        loss: with the weights of kinds of frames.
        labels: of `further_labels`.

    Returns:
        the frames in the order of `frames.once`.
    """
    frames, _ = frames.once
    one = Lock()

    def packed(batch: Batch) -> Part:
        made = pack_part(batch, potential, stress, loss, labels, one)
        made.flatten(potential.elements_of_levels)
        return made

    order, device = in_order(len(frames), _AT_ONCE), potential.device
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    if isinstance(frames.lists, EdgeMemory):
        parts = in_threads(lambda found: packed(frames.with_edges(*found)), frames.read(order), begin)
    else:
        parts = in_threads(lambda positions: packed(frames.batch(positions)), order, begin)
    return PackedFrames(
        parts, potential.elements_of_levels, potential.cutoff, potential.device, potential.dtype, stress
    )


def pack_part(
    batch: Batch,
    potential: Potential,
    stress: bool,
    loss: LossConfig,
    further: Sequence[str],
    one: AbstractContextManager | None = None,
) -> Part:
    """Pack some frames; arguments as `pack`; one: a lock, held while the priors are evaluated."""
    energy, forces, tension = _baselines(batch, potential, one or nullcontext())
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
    if potential.level_names:  # by which the network chooses read-outs
        names = [*names, LEVEL]
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


def _baselines(batch: Batch, potential: Potential, one: AbstractContextManager) -> tuple[Tensor, Tensor, Tensor]:
    """Return baselines as `_baseline`, for each frame at its level of theory."""
    sample = batch.sample
    if not potential.level_names:
        return _baseline(sample.system, potential, one, {potential.cutoff: batch.neighbors})
    system, levels = sample.system, sample.labels[LEVEL].long()
    energy = torch.zeros(system.num_systems, dtype=torch.float64)
    forces, stress = torch.zeros(system.num_atoms, 3, dtype=torch.float64), energy.new_zeros(len(energy), 3, 3)
    for level in levels.unique().tolist():
        chosen = levels == level
        part = select(sample, chosen.nonzero()[:, 0].numpy()).system
        with one:
            alone = potential.at_level(potential.level_names[level])
        energy[chosen], forces[chosen[system.batch]], stress[chosen] = _baseline(part, alone, one)
    return energy, forces, stress


def _baseline(
    system: System, potential: Potential, one: AbstractContextManager, known: Mapping[float, NeighborList] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return energies [B], forces [N, 3] and stress [B, 3, 3] of the constant shift and of the priors that do not read
    the network's charges, on the CPU; one: held while they are evaluated; known: lists by cutoff, which are not
    searched again."""
    system.validate()
    priors = [prior for prior in potential.priors if not prior.uses_charges]
    found = dict(known or {})
    if potential.device.type == "cpu" or are_small_molecules(system):  # else the GPU searches faster
        for cutoff in {p.cutoff for p in priors if p.cutoff is not None and math.isfinite(p.cutoff)} - found.keys():
            found[cutoff] = search(system, cutoff).joined(system.atom_counts.numpy(), cutoff)
    system = system.to(potential.device)
    potential.check_elements(system.z)
    with one, torch.enable_grad():
        moved, leaves = with_leaves(system, forces=True, stress=True)
        lists = PairLists(moved, {cutoff: edges.to(potential.device) for cutoff, edges in found.items()})
        energies = torch.zeros(system.num_atoms, dtype=torch.float64, device=potential.device)
        for prior in priors:
            prior.check(moved)
            energies = energies + prior(moved, None if prior.cutoff is None else lists(prior.cutoff))
        total = energies.new_zeros(system.num_systems).index_add(0, system.batch, energies)
        gradients = gradients_of(total, leaves, create_graph=False)
    stress = stress_of(gradients["strain"], system.volume.masked_fill(system.volume == 0, 1))
    total = total.detach() + potential.energy_shift
    return total.cpu(), -gradients["pos"].cpu(), stress.cpu()


# --- Epochs on packed frames: the trainer's steps and validation, replayed on the device ---

_CHECK_EVERY = 25
_SAMPLE = 200
_CPU_LIMIT = 2**31
"""Bytes of frames that are packed on a CPU, whose free memory is not known."""


def pack_trainer(trainer: Trainer, devices: Devices | None = None) -> str | None:
    """Let a trainer take its steps on packed frames; returns why that is not possible, in words, or None.

    Args:
        trainer: at the start, or restored.
        devices: processes that each take a share of every batch; None: this one alone.
    """
    if trainer.device.type == "cuda" and find_spec("triton") is None:  # comes with PyTorch for GPUs
        return "a missing package (pip install 'torchmdnet2[gpu]')"
    reason = unsupported_training(trainer)
    if reason is None:
        trainer.packed = PackedLoop(trainer, devices)
    return reason


def unsupported_training(trainer: Trainer) -> str | None:
    """Return why a training cannot be packed on its device, in words; None if it can."""
    reason = unsupported_reason(trainer.potential)
    if reason is None and not isinstance(trainer.optimizer, AdamW | Muon):
        reason = f"the optimizer {type(trainer.optimizer).__name__}"
    if reason is None:
        cuda = trainer.device.type == "cuda"
        limit = torch.cuda.mem_get_info(trainer.device)[0] // 3 if cuda else _CPU_LIMIT
        potential, labels = trainer.potential, _further_labels(trainer)
        need = sum(_estimate(part, potential, labels) for part in (trainer.train, trainer.validation) if part)
        if need > limit:
            reason = f"{need / 1e9:.0f} GB of frames, and the limit is {limit / 1e9:.0f} GB"
        elif cuda:
            largest = trainer.train.batch([int(trainer.train.atoms.argmax())])
            part = pack_part(largest, potential, trainer.properties.stress, trainer.loss, labels)
            reason = uncapturable_reason(potential, part, trainer.properties.forces, trainer.properties.stress, labels)
    return reason


def _further_labels(trainer: Trainer) -> list[str]:
    """Return labels of properties that training frames have and the potential predicts, and that of the group if
    relative energies are trained."""
    labelled = trainer.train.data.facts_of(trainer.train.indices).labelled
    found = further_labels(trainer.potential, [name for name, has in labelled.items() if has.any()])
    return [*found, GROUP] if trains_groups(trainer.config) else found


def _estimate(frames: Frames, potential: Potential, labels: Sequence[str]) -> int:
    """Return the memory that frames take when packed, from some of them."""
    frames, _ = frames.once
    step = max(1, len(frames) // _SAMPLE)
    sizes = [frame_bytes(frames[k], potential, labels) for k in range(0, len(frames), step)]
    return int(sum(sizes) / len(sizes) * len(frames))


def pays_on_cpu(trainer: Trainer) -> bool:
    """Return whether packed steps are faster on a CPU: for models whose kernels numba compiles."""
    return _trains_on_cpu(trainer) and find_spec("numba") is not None


def wants_numba(trainer: Trainer) -> bool:
    """Return whether packed steps would pay on this CPU if numba were installed."""
    return trainer.device.type == "cpu" and _trains_on_cpu(trainer) and find_spec("numba") is None


def _trains_on_cpu(trainer: Trainer) -> bool:
    path = fast_path(trainer.potential.representation)
    return path is not None and path.trains_on_cpu


class PackedLoop:
    """Steps and validation of a trainer on packed frames.

    Args:
        trainer: whose weights are changed, with the state of its optimizer in place.
        devices: processes that each take a share of every batch.
    """

    def __init__(self, trainer: Trainer, devices: Devices | None = None):
        self.trainer, self.devices = trainer, devices or Devices()
        config, cuda = trainer.config, trainer.device.type == "cuda"
        kernels = cuda or find_spec("numba") is not None
        self.check_every = _CHECK_EVERY if cuda else 1  # a CPU need not be waited for
        self._memory = GraphMemory(trainer.device) if cuda else None
        stress = trainer.properties.stress
        elements, labels = len(trainer.potential.elements_of_levels), _further_labels(trainer)

        def network(potential: Potential) -> PackedNetwork:
            return PackedNetwork(potential, elements, trainer.properties.forces, stress, kernels, labels)

        self.training = TrainingPass(network(trainer.potential), trainer.loss, trainer.update, self.devices)
        store = pack(trainer.train, trainer.potential, stress, config.loss, labels)
        self.step = self._replayed(store, most_frames(trainer.train, config), self.training)
        self.errors = EvaluationPass(network(trainer.average), config.loss.final, self.devices)
        self.measure: GraphedPass | None = None
        if trainer.validation is not None:
            store = pack(trainer.validation, trainer.potential, stress, config.loss, labels)
            most = max(map(len, measured_batches(trainer.validation, config)))
            self.measure = self._replayed(store, most, self.errors)
        self.devices.at_end(self.forget_graphs)
        self._since: list[Sequence[int]] = []  # batches since the last check
        self._loss = math.nan

    def forget_graphs(self) -> None:
        """Drop the captured steps, which are captured again when needed."""
        for replayed in (self.step, self.measure):
            if replayed is not None:
                replayed.clear()

    @property
    def num_bytes(self) -> int:
        """Memory of the frames on the device."""
        return sum(r.store.num_bytes for r in (self.step, self.measure) if r is not None)

    def _replayed(self, store: PackedFrames, frames: int, work: EvaluationPass) -> GraphedPass:
        tf32 = self.trainer.config.precision == "tf32"
        return GraphedPass(store, frames, work.body, work.warm_up, tf32, self._memory)

    def _shares(self, frames: Frames, replayed: GraphedPass, order: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the packed frames of this process in each batch of positions."""
        _, place = frames.once
        groups = frames.loss_groups if trains_groups(self.trainer.config) else None
        work = replayed.store.num_pairs[place]
        return [place[self.devices.share(chosen, work, groups)].tolist() for chosen in order]

    def steps(self, order: Sequence[Sequence[int]]) -> Iterator[float]:
        """Do the steps of these batches; yields the latest known loss after each."""
        trainer = self.trainer
        if self.training.set_loss(trainer.loss):
            self.step.clear()
        shares = self._shares(trainer.train, self.step, order)
        self.step.expect(shares)
        for chosen, share in zip(order, shares, strict=True):
            rates = rates_of(trainer.optimizer, trainer.learning_rate.rate(trainer.step_count))
            self.training.set_rates(rates, trainer.learning_rate.average_share(trainer.step_count))
            self._since.append(chosen)
            self.step(share)
            if len(self._since) >= self.check_every:
                self.check()
            yield self._loss

    def check(self) -> None:
        """Wait for the device, and move the errors of its steps to the trainer.

        Raises:
            TrainingDiverged: a step was not finite; names the frames.
        """
        self._loss, done, first, bad = self.training.status.tolist()
        since, self._since = self._since, []
        if math.isfinite(first):
            self.trainer.blame(since[len(since) - int(done - first)], bad)
        self.trainer.sums.add_sums(self.training.pop_sums())

    def validate(self, positions: Sequence[Sequence[int]]) -> ErrorSums:
        """Compute errors of the averaged weights on the validation frames."""
        assert self.measure is not None and self.trainer.validation is not None
        shares = self._shares(self.trainer.validation, self.measure, positions)
        self.measure.expect(shares)
        for share in shares:
            self.measure(share)
        sums = ErrorSums(self.errors.loss, self.trainer.device)
        sums.add_sums(self.errors.pop_sums())
        return sums
