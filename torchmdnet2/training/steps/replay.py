"""Whole training steps in CUDA graphs: batch, forces, second derivatives, update of the weights.

Shapes as in packed_frames.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce

import torch
from torch import Tensor

from ...data.labels import GROUP, LEVEL
from ...engine.graph import CudaGraph, GraphMemory, graph_capacity
from ...potential.potential import Result
from ...system import System
from ..config.sections import RELATIVE, LossConfig
from .distributed import Devices
from .loss import NUM_ELEMENTS, ErrorSums, penalty_sums, residuals
from .loss_kernels import ROWS, BatchErrors, Labels, Penalties
from .network import PackedNetwork
from .optimizers import Update
from .packed_frames import Capacity, PackedBatch, PackedFrames

__all__ = ["EvaluationPass", "GraphedPass", "TrainingPass"]

_MOST_GRAPHS = 12
_PROPERTIES = ("energy", "forces", "stress")


class GraphedPass:
    """Captures work on batches of packed frames in a CUDA graph, once per size of batch.

    Args:
        store: the frames.
        frames: B, largest number of frames in a batch.
        body: the work; it must not copy values to the host, and must write its results to existing tensors.
        warm_up: called before a capture: compiles kernels, allocates those tensors.
        tf32: matrix products of float32 numbers rounded to 10 bits of mantissa, on Tensor Cores.
        memory: pool of the graphs, which passes may share; None: a new pool.

    On devices that are not CUDA nothing is captured.
    """

    def __init__(
        self,
        store: PackedFrames,
        frames: int,
        body: Callable[[PackedBatch], None],
        warm_up: Callable[[PackedBatch], None],
        tf32: bool = False,
        memory: GraphMemory | None = None,
    ):
        self.store, self.frames, self.body, self.warm_up, self.tf32 = store, frames, body, warm_up, tf32
        self.captures = 0
        self._chosen = torch.full((frames,), -1, dtype=torch.int64, device=store.device)
        self._cuda = store.device.type == "cuda"
        self._graphs: OrderedDict[Capacity, CudaGraph] = OrderedDict()
        self._ready = False
        self._memory = GraphMemory(store.device) if self._cuda and memory is None else memory
        self._largest: Capacity | None = None

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Announce the next batches, so that the largest graph is captured first and the others fit in its memory.

        The graph of a batch does not depend on this.
        """
        if not self._cuda or not batches:
            return
        largest = reduce(Capacity.joined, map(self.capacity, batches))
        if self._largest is None or self._largest.joined(largest) != self._largest:
            self.clear()
            self._largest = largest
            self._choose(max(batches, key=lambda chosen: self.store.size(chosen).pairs))
            self._graphs[largest] = self._prepare(largest)

    def __call__(self, chosen: Sequence[int]) -> None:
        """Do the work for these frames, on the current stream, without waiting."""
        capacity = self.capacity(chosen)
        if not self._cuda:
            self._plain(chosen, capacity)
            return
        self._choose(chosen)
        if capacity not in self._graphs:
            self._graphs[capacity] = self._prepare(capacity)
        self._graphs.move_to_end(capacity)
        self._graphs[capacity].replay()

    def _choose(self, chosen: Sequence[int]) -> None:
        index = torch.full((self.frames,), -1, dtype=torch.int64)
        index[: len(chosen)] = torch.as_tensor(list(chosen))
        # each its own pinned copy: the previous one may still be on its way
        self._chosen.copy_(index.pin_memory(), non_blocking=True)

    def _plain(self, chosen: Sequence[int], capacity: Capacity) -> None:
        """Do the work without a graph, at the size of the batch."""
        self._chosen = torch.tensor(list(chosen), dtype=torch.int64)
        if not self._ready:
            self._run(self.warm_up, capacity)
            self._ready = True
        self._run(self.body, capacity)

    def clear(self) -> None:
        """Drop the graphs, because the body changes or will not be called again."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._ready, self._largest = False, None

    def capacity(self, chosen: Sequence[int]) -> Capacity:
        """Return the capacity of the graph for a batch; without graphs, the size of the batch."""
        need = self.store.size(chosen)
        if not self._cuda:
            return need
        # lists of all pairs differ most from batch to batch, and cost least
        edges = tuple(graph_capacity(number, 1.5) for number in need.edges)
        return Capacity(self.frames, graph_capacity(need.atoms, 1.1), graph_capacity(need.pairs, 1.1), edges)

    def _run(self, body: Callable[[PackedBatch], None], capacity: Capacity) -> None:
        with _matmul_precision(self.tf32):
            body(self.store.batch(self._chosen, capacity))

    def _prepare(self, capacity: Capacity) -> CudaGraph:
        while len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.popitem(last=False)
        graph = CudaGraph.record(
            partial(self._run, self.body, capacity), self.store.device,
            warm_up=partial(self._run, self.warm_up, capacity), memory=self._memory,
        )  # fmt: skip
        self.captures += 1
        return graph


@contextmanager
def _matmul_precision(tf32: bool) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def as_labelled(batch: PackedBatch) -> tuple[System, dict[str, Tensor]]:
    """Return the frames of a packed batch in the form that the losses read; the last structure has no labels."""
    atoms, structures = batch.forces.shape[0], batch.energy.shape[0]
    zeros = batch.forces.new_zeros(structures, 3, 3)
    system = System(
        z=batch.z[:atoms],
        pos=torch.zeros_like(batch.forces),
        batch=batch.structure[:atoms],
        cell=zeros,
        pbc=torch.zeros_like(zeros[:, 0], dtype=torch.bool),
        charge=zeros[:, 0, 0],
        spin=torch.zeros_like(zeros[:, 0, 0], dtype=torch.long),
    )
    labels = {"energy": batch.energy, "forces": batch.forces}
    if batch.stress is not None:
        labels["stress"] = batch.stress
    return system, labels if batch.further is None else {**labels, **batch.further.labels}


class EvaluationPass:
    """Errors of a network over packed frames, added up on the device.

    Args:
        network: energies and forces, and other properties.
        loss: which errors, and their weights.
        devices: the processes, each of which has a part of every batch.
    """

    def __init__(self, network: PackedNetwork, loss: LossConfig, devices: Devices | None = None):
        self.network, self.loss, self.devices = network, loss, devices or Devices()
        device = next(network.potential.parameters()).device
        self._further = [RELATIVE if label == GROUP else label for label in network.labels]
        self._names = [*(_PROPERTIES if network.energies else ()), *self._further]
        # as the kernels have them, and rows for further errors; names stand for parts of them
        first = 8 + NUM_ELEMENTS
        self._rows: dict[str, int | slice] = {**ROWS, "forces_by_element": slice(8, first)}
        for k, name in enumerate(self._further):
            self._rows |= {name: first + 2 * k, f"loss_{name}": first + 2 * k + 1}
        self._table = torch.zeros(first + 2 * len(self._further), 3, dtype=torch.float64, device=device)
        self._weight = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._weights = dict(zip(self._names, self._weight.unbind(), strict=True))
        self._sums: dict[str, Tensor] = {}

    def body(self, batch: PackedBatch) -> None:
        self._add(self.network(batch), batch)

    def warm_up(self, batch: PackedBatch) -> None:
        result = self.network(batch)
        self._reserve(result, batch)
        with self._rehearsal():
            self._add(result, batch)

    def _reserve(self, result: Result, batch: PackedBatch) -> None:
        """Choose the sums that are computed."""
        for name in self._errors(result, batch, self._names)[0].sums:
            self._sums.setdefault(name, self._table[self._rows[name]])
        self.set_loss(self.loss)

    @contextmanager
    def _rehearsal(self) -> Iterator[None]:
        """Sum over this process only within the block; the sums are dropped at its end."""
        before = self._table.clone()
        with self.devices.alone():
            yield
        self._table.copy_(before)

    def _errors(
        self, result: Result, batch: PackedBatch, names: Sequence[str]
    ) -> tuple[ErrorSums, dict[str, tuple[Tensor, Tensor]]]:
        system, labels = as_labelled(batch)
        read = {*names, *(("energy", GROUP, LEVEL) if RELATIVE in names else ())}
        found = residuals(result, {name: label for name, label in labels.items() if name in read})
        found = {name: residual for name, residual in found.items() if name in names}
        errors = ErrorSums(self.loss, batch.r.device)
        errors.add(found, system, batch.weight)
        return errors, penalty_sums(found, system, self.loss, batch.weight)

    def _add(self, result: Result, batch: PackedBatch) -> Tensor:
        """Add the errors of a batch; returns its part of the loss, a mean over the labels of all parts."""
        known = self.network.energies and batch.weight is None  # which the kernels do not know
        if self.network.use_kernels and batch.energy.is_cuda and known:
            loss = self._by_kernels(result, batch)
            return loss + self._reference(result, batch, self._further) if self._further else loss
        return self._reference(result, batch, self._names)

    def _reference(self, result: Result, batch: PackedBatch, names: Sequence[str] = _PROPERTIES) -> Tensor:
        errors, sums = self._errors(result, batch, names)
        for name, value in errors.sums.items():
            self._sums[name].add_(value)
        loss = batch.energy.new_zeros(())
        if sums:
            counts = self.devices.sum(torch.stack([count.double() for _, count in sums.values()])).clamp(min=1)
            for (name, (total, _)), count in zip(sums.items(), counts.unbind(), strict=True):
                loss = loss + self._weights[name] * (total / count)
        return loss

    def _by_kernels(self, result: Result, batch: PackedBatch) -> Tensor:
        """Add as `_reference`, for energies, forces and stress, in three kernels with the backward pass."""
        num = batch.forces.shape[0]
        labels = Labels(batch.energy, batch.forces, batch.stress, batch.atom_ptr, batch.element, batch.z[num:])
        kinds = {n: self.loss.kind_of(n) if self.loss.weight(n) > 0 else None for n in _PROPERTIES}
        penalties = Penalties(**kinds, delta=self.loss.huber_delta, per_atom=self.loss.per_atom)
        over_processes = self.devices.sum if self.devices.size > 1 else None
        errors = BatchErrors(labels, penalties, self._table, self._weight, over_processes)
        return errors(result.energy, result.forces, result.stress)

    def set_loss(self, loss: LossConfig) -> bool:
        """Set the loss; returns True if graphs must be captured again, because other labels count."""
        active = [[n for n in self._names if config.weight(n) > 0] for config in (loss, self.loss)]
        self.loss = loss
        for name, weight in self._weights.items():
            weight.fill_(loss.weight(name))
        return active[0] != active[1]

    def pop_sums(self) -> dict[str, Tensor]:
        """Return the sums of all processes since the last call, by name as in `ErrorSums.sums`."""
        taken = self.devices.sums({name: value.clone() for name, value in self._sums.items()})
        for value in self._sums.values():
            value.zero_()
        return taken


class TrainingPass(EvaluationPass):
    """A training step: loss, gradient, clipping, update of the weights and of their average.

    A step whose loss or gradient is not finite changes no weight, and is remembered until `check`.

    Args:
        network, loss: as for EvaluationPass.
        update: of an optimizer that takes rates as tensors and does not wait for the device: AdamW, Muon.
        devices: as for EvaluationPass.
    """

    def __init__(self, network: PackedNetwork, loss: LossConfig, update: Update, devices: Devices | None = None):
        super().__init__(network, loss, devices)
        self.update, self.optimizer = update, update.optimizer
        some = update.parameters[0]
        # torch's fused kernels on GPUs read rates in float32
        precision = torch.float32 if some.is_cuda else some.dtype
        self._rates = torch.zeros(len(self.optimizer.param_groups), dtype=precision, device=some.device)
        self._share = torch.zeros((), dtype=precision, device=some.device)
        # loss of the last step; number of steps; first step that was not finite, and its loss
        self.status = torch.tensor([0.0, 0.0, math.inf, 0.0], dtype=torch.float64, device=some.device)
        self.update.flat.zero_()
        self.devices.sum(self.update.flat)  # the first sum makes connections, which a capture could not
        self.devices.sum(self.status.new_zeros(3))
        self._make_capturable()

    def _make_capturable(self) -> None:
        """Make rates tensors and create the state of the optimizer, which must exist before a capture."""
        for k, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self._rates[k]
            group["capturable"] = self._rates.is_cuda
        for p, state in self.optimizer.state.items():
            # a count that was read from a file may be on the CPU, where a graph would keep its value of today
            state.update({name: value.to(p.device) for name, value in state.items() if isinstance(value, Tensor)})
        known = {p: {name: value.clone() for name, value in state.items()} for p, state in self.optimizer.state.items()}
        if all(p in known for p in self.update.parameters):
            return
        self.optimizer.step()  # with gradients and rates of zero
        for p, state in self.optimizer.state.items():
            for name, value in state.items():
                if p in known:
                    value.copy_(known[p][name])
                elif name == "step":
                    value.zero_()

    def body(self, batch: PackedBatch) -> None:
        self._gradients(batch)
        self.devices.sum(self.update.flat)
        finite, loss = self.update.clip(), self.update.flat[-1]
        # a step that is not finite becomes one with gradients and rates of zero, which changes no weight
        self._rates.mul_(finite)
        self._share.mul_(finite)
        self.update.move(self._share)
        first = ~finite & torch.isinf(self.status[2])
        self.status[2:] = torch.where(first, torch.stack([self.status[1], loss.double()]), self.status[2:])
        self.status[0] = loss
        self.status[1] += 1

    def warm_up(self, batch: PackedBatch) -> None:
        self._reserve(self.network(batch), batch)  # and forget that result: two at a time are twice the memory
        with self._rehearsal():
            self._gradients(batch)

    def _gradients(self, batch: PackedBatch) -> None:
        """Compute the loss of a batch, and store its gradients."""
        self.update.store(self._add(self.network(batch), batch))

    def set_rates(self, rates: Sequence[float], share: float) -> None:
        """Set the learning rate of each group of parameters, and the share of the new weights in their average."""
        if self._rates.is_cuda:
            values = torch.tensor([*rates, share]).pin_memory()
            self._rates.copy_(values[:-1], non_blocking=True)
            self._share.copy_(values[-1], non_blocking=True)
        else:
            self._rates.copy_(torch.tensor(rates, dtype=self._rates.dtype))
            self._share.fill_(share)
