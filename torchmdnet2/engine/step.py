"""Steps over static buffers, which a CUDA graph can hold: results, capacities, replay, bound steps.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import NeighborOverflow
from ..neighbors import neighbor_list
from ..neighbors.neighbor_list import refuse_coincident
from ..neighbors.triton_search import COINCIDENT, NOT_FINITE, OVERFLOW, TOO_THIN, TritonNeighborSearch
from ..potential.potential import Potential, Result, require_stress, with_dipole
from ..potential.refusals import is_cramped, warn_of_units
from ..system import System
from .bound import BoundStep
from .finish import NO_VOLUME, RESULT_NOT_FINITE
from .graph import CudaGraph, ReplayDiffers, graph_capacity
from .timings import Part

__all__ = [
    "COINCIDENT", "NOT_FINITE", "OVERFLOW", "TOO_THIN", "FusedBoundStep", "GraphedStep", "Outputs", "StaticInputs",
    "Step", "StepModel", "UnsortedBatch", "next_capacity", "raise_input_error", "raise_input_flags",
    "require_sorted",
]  # fmt: skip


@dataclass(eq=False)
class Outputs:
    """Results as views of one block of memory, so that one copy is enough.

    Attributes:
        packed: [bytes] uint8.
        status: [2] int64: flags of the steps since `clear`, and the largest number of edges that one of them needed.
        energy [B] float64 and stress [B, 3, 3] float64, atom_energies [N] float64, forces [N, 3] as the positions,
            charges [N] float64; stress and charges None if there are none.
    """

    packed: Tensor
    status: Tensor
    energy: Tensor
    stress: Tensor | None
    atom_energies: Tensor
    forces: Tensor
    charges: Tensor | None

    @classmethod
    def allocate(
        cls, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, charges: bool, device: torch.device
    ) -> Outputs:
        """Return zeros."""
        layout = _Layout(num_atoms, num_systems, dtype, stress, charges)
        return layout.view(torch.zeros(sum(layout.sizes), dtype=torch.uint8, device=device))

    def on(self, packed: Tensor) -> Outputs:
        """Return the same fields in other memory, which holds a copy of `packed`."""
        layout = _Layout(
            len(self.forces), len(self.energy), self.forces.dtype, self.stress is not None, self.charges is not None
        )
        return layout.view(packed)

    def result(self) -> Result:
        """Return these tensors; the stress in the type of the positions."""
        stress = None if self.stress is None else self.stress.to(self.forces.dtype)
        return Result(self.energy, self.forces, stress, self.atom_energies, self.charges)


class _Layout(NamedTuple):
    num_atoms: int
    num_systems: int
    dtype: torch.dtype
    stress: bool
    charges: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each field, multiples of 16, since Triton specialises kernels on that."""
        n, b = self.num_atoms, self.num_systems
        raw = [16, 8 * b, 72 * b * self.stress, 8 * n, 3 * n * self.dtype.itemsize, 8 * n * self.charges]
        return [-(-size // 16) * 16 for size in raw]

    def view(self, packed: Tensor) -> Outputs:
        n, b = self.num_atoms, self.num_systems
        pieces = packed.split(self.sizes)

        def field(piece: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
            return piece.view(dtype)[: torch.Size(shape).numel()].view(shape)

        return Outputs(
            packed=packed,
            status=field(pieces[0], torch.int64, 2),
            energy=field(pieces[1], torch.float64, b),
            stress=field(pieces[2], torch.float64, b, 3, 3) if self.stress else None,
            atom_energies=field(pieces[3], torch.float64, n),
            forces=field(pieces[4], self.dtype, n, 3),
            charges=field(pieces[5], torch.float64, n) if self.charges else None,
        )


# --- A step over static buffers: what a graph holds, whatever model it computes ---

_MOST_EDGES = 2**31 - 1
FEWEST_EDGES = 16
"""Capacity of a search before its needs are known."""


def next_capacity(edges: int) -> int:
    """Return a capacity for this many edges and a reserve.

    Small structures get a larger reserve, since the number of their edges changes more.
    """
    return graph_capacity(max(128, edges + edges // 32 + 64))


class Step(ABC):
    """Energy, forces and stress of N atoms in B structures, as launches on the current stream.

    Write to `pos` and `cell`, `launch()`, read `out`. Unless a step `waits`, a CUDA graph can hold `launch()`. Flags
    are collected in `out.status` until `clear()`; while one of the neighbor search's bits is set, all results are NaN.

    Args:
        num_atoms, num_systems: N and B.
        dtype: of the positions, float32 or float64.
        stress: compute the stress.
        charges: the potential predicts charges.
        device: CUDA, or the CPU under Triton's interpreter.

    Attributes:
        pos [N, 3], cell [B, 3, 3], pbc [B, 3]: inputs.
        out: results.
        searches: a neighbor search for each distinct cutoff, that of the network first.
        version: a graph that was captured before its last change must not be replayed.
        order: spatial order of the atoms, None where their order is unchanged.
        periodic: use searches that support periodic directions: for several structures, and from the first one on
            that has such directions.
        measures_graph: count the memory of a graph in `nbytes`.
        waits: `launch` waits for the device, so that no graph can hold it.
        rehearses: `launch` may run while kernels are only compiled and not launched; see `Term`.
    """

    pos: Tensor
    cell: Tensor
    pbc: Tensor
    searches: dict[float, TritonNeighborSearch]
    order: Any = None
    measures_graph = False
    waits = False
    rehearses = False

    def __init__(
        self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, charges: bool, device: torch.device
    ):
        self.num_atoms, self.num_systems = num_atoms, num_systems
        self.dtype, self.stress, self.device = dtype, stress, device
        self.periodic = num_systems > 1
        self.out = Outputs.allocate(num_atoms, num_systems, dtype, stress, charges, device)
        self.version = 0
        self.graph_bytes = 0

    # --- launches ------------------------------------------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """Launch the whole step on the current stream."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return the parts of `launch`, each of which can be repeated separately; results then mean nothing."""

    def results(self) -> Result:
        """Return a copy of the results, without properties."""
        return self.out.on(self.out.packed.clone()).result()

    @abstractmethod
    def properties(self, charges: Tensor | None) -> dict[str, Tensor]:
        """Return properties by name, in new memory: results of the heads for the features of the last step.

        Args:
            charges: [N] e, a copy of those of `out`, for a head of charges.
        """

    def replay_agrees(self, launched: Tensor) -> bool:
        """Return whether the present results, of a graph, are those of its launches, to the last bit.

        Args:
            launched: a copy of `out.packed`.
        """
        return torch.equal(launched, self.out.packed)

    def clear(self) -> None:
        """Clear the flags and the numbers of edges."""
        self.out.status.zero_()
        for most in self._most[1:]:
            most.zero_()

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def search(self) -> TritonNeighborSearch:
        """The neighbor search of the network."""
        return next(iter(self.searches.values()))

    @property
    def capacity(self) -> int:
        """C, number of directed edges of the network that fit."""
        return self.search.capacity

    @property
    def layout(self) -> str:
        """How the step is divided, in words; "" where it is not."""
        return ""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the large buffers."""

    def make_room(self) -> int:
        """Set the capacities that the present positions need. Waits for the device.

        Returns:
            The flags of the searches: not 0 if no capacity is enough.
        """
        flags = 0
        with self._on_device():
            pos = self._searched_positions()
            for search, most in zip(self.searches.values(), self._most, strict=True):
                self.clear()
                search.count(pos, self.cell, self.pbc)
                flag = int(search.flag) & ~OVERFLOW
                if not flag and (int(search.needed) > search.capacity or search.capacity == FEWEST_EDGES):
                    most.copy_(search.needed)
                    self._grow(search, most)
                flags |= flag
            self.clear()
        return flags

    def grow(self) -> None:
        """Raise the capacities to the largest numbers of edges since `clear`.

        Raises:
            NeighborOverflow: more than 2^31 − 1 edges.
        """
        for search, most in zip(self.searches.values(), self._most, strict=True):
            if int(most) > search.capacity:
                self._grow(search, most)

    def _grow(self, search: TritonNeighborSearch, most: Tensor) -> None:
        capacity = next_capacity(int(most))
        if capacity > _MOST_EDGES:
            raise NeighborOverflow(int(most), _MOST_EDGES)
        self._resize(search, max(capacity, search.capacity))
        self.version += 1

    def search_thin_cells(self) -> bool:
        """Use searches that support cells thinner than the cutoff. Returns whether this is a change."""
        if all(search.method != "cells" for search in self.searches.values()):
            return False
        self._make_searches({cutoff: search.capacity for cutoff, search in self.searches.items()}, "pairs", True)
        self.version += 1
        return True

    def search_periodic(self, pbc: Tensor) -> None:
        """Use searches that support these periodic directions [B, 3], from now on. May wait for the device."""
        if self.periodic or not bool(pbc.any()):
            return
        self.periodic = True
        for search in self.searches.values():
            search.periodic = True
        self.version += 1

    def _make_searches(self, capacities: dict[float, int], method: str, thin: bool) -> None:
        """Make a search for each cutoff, whose flags lie in the results, so that one copy is enough."""
        self.searches = {c: self._new_search(c, capacity, method, thin) for c, capacity in capacities.items()}
        for search in self.searches.values():
            search.flag = self.out.status.view(torch.int32)[:1]
        others = len(self.searches) - 1
        # edges that the searches other than the network's found, and the most that each search found since `clear`
        shape = 2, others, 2  # every second number, so that each is aligned
        self._needed_by_others, self._most_of_others = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._most = [self.out.status[1:], *self._most_of_others[:, :1]]
        for search, needed in zip(list(self.searches.values())[1:], self._needed_by_others[:, :1], strict=True):
            search.needed = needed

    @abstractmethod
    def _new_search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        """Return a search for the batch."""

    def _resize(self, search: TritonNeighborSearch, capacity: int) -> None:
        """Replace the edge buffers."""
        search.set_capacity(capacity)

    def _searched_positions(self) -> Tensor:
        """Return positions in the order of the searches."""
        return self.pos

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


# --- Steps that are replayed: capture in a CUDA graph, room for more edges when they are needed ---


class GraphedStep:
    """A step that runs as one CUDA graph once it is captured, else as launches.

    Args:
        step: its capacities and capture are managed here.

    Attributes:
        captures: number of captures.
    """

    def __init__(self, step: Step):
        self.step = step
        self.captures = 0
        self._graph: CudaGraph | None = None
        self._version = -1  # of the step, when the graph was captured
        self._wanted = False
        self._pinned: Tensor | None = None
        if step.device.type == "cuda":
            self._pinned = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)

    @property
    def captured(self) -> bool:
        """Whether `run` replays a graph."""
        return self._graph is not None and self._version == self.step.version

    def make_room(self) -> None:
        """Set the capacities that the present positions need. Waits for the device.

        Raises:
            ValueError: a position or cell is not finite, or a cell is too thin to be searched.
        """
        flags = self.step.make_room()
        if flags & TOO_THIN and self.step.search_thin_cells():
            flags = self.step.make_room()
        raise_input_flags(flags)

    def capture(self) -> None:
        """Replay a graph from now on, on a CUDA device, if one can hold the step."""
        self._wanted = self.step.device.type == "cuda" and not self.step.waits

    def run(self) -> None:
        """Run one step on the current stream.

        Raises:
            NotCapturable: it cannot be captured, or the graph gives other numbers than the launches.
        """
        if self._wanted and not self.captured:
            self._capture()
        if self._graph is None:
            self.step.launch()
        else:
            self._graph.replay()

    def _capture(self) -> None:
        step = self.step
        self._graph, step.graph_bytes = None, 0
        try:
            graph = CudaGraph.record(
                step.launch, step.device, [step.out.packed], agree=lambda launched: step.replay_agrees(launched[0]),
                measure=step.measures_graph,
            )  # fmt: skip
        except ReplayDiffers as error:
            raise ReplayDiffers(f"{error}: please report this, and use Evaluator(…, graphs=False) meanwhile") from None
        self._graph, step.graph_bytes, self._version = graph, graph.nbytes, step.version
        self.captures += 1

    def results(self) -> Result:
        """Return a copy of the results."""
        return self.step.results()

    def status(self) -> tuple[int, int]:
        """Return flags and the largest number of edges since the last `clear`; waits until all launched work is
        done."""
        status = self.step.out.status
        if self._pinned is not None:
            self._pinned.copy_(status, non_blocking=True)
            torch.cuda.current_stream(self.step.device).synchronize()
            status = self._pinned
        flag, needed = status.tolist()
        return flag & 0xFFFFFFFF, needed

    def recover(self, flag: int) -> bool:
        """Return whether the positions can be computed again after flags; False if the positions are at fault."""
        step = self.step
        # after an overflow positions may have become NaN by integration: the overflow came first
        good = False
        if flag & OVERFLOW:
            step.grow()
            good = True
        elif flag & TOO_THIN and not flag & NOT_FINITE:
            good = step.search_thin_cells()
        step.clear()
        return good


def raise_input_flags(flag: int) -> None:
    """Raise ValueError for flags that a larger capacity cannot clear."""
    if flag & COINCIDENT:
        raise ValueError("two atoms are at the same place, where energy and forces mean nothing")
    if flag & NOT_FINITE:
        raise ValueError("a position or a cell is not finite or too large, or a periodic cell has no volume")
    if flag & TOO_THIN:
        raise ValueError("a periodic cell is too thin to be searched: more than 30 images to a side")


# --- Systems copied into the static tensors of a step, and only what is new of them ---

_COMPOSITION = ("z", "batch", "charge", "spin", "pbc")


class UnsortedBatch(Exception):
    """The atoms of a structure do not lie together."""


def require_sorted(system: System) -> None:
    """Raise UnsortedBatch unless the batch ascends."""
    if system.num_systems > 1 and not bool((system.batch[1:] >= system.batch[:-1]).all()):
        raise UnsortedBatch


class StepModel(Protocol):
    """A potential prepared for steps, with its weights and constants at that time."""

    potential: Potential

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a step that holds a system and its edges; checked on the first use of its kernels.

        Raises:
            UnsortedBatch: the batch does not ascend.
            ValueError, UnknownElement: as the Potential.
            RuntimeError: the results differ from those of the potential.
        """
        ...

    def load(self, step: Any, system: System) -> None:
        """Take over all but positions and cell."""
        ...


class StaticInputs:
    """Copies systems into a step, and remembers what need not be copied or checked again.

    The tensors of the last system are kept: the same objects in the same version are
    not copied again. In-place changes that PyTorch does not count (`.data`, NumPy views) are not noticed.
    """

    def __init__(self, model: StepModel, step: Step):
        self.model, self.step = model, step
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self._held: list[Tensor] | None = None

    def load(self, system: System, check: bool = True) -> None:
        """Copy changed inputs. It does not wait for the device unless the composition changes.

        Args:
            system: the system.
            check: refuse what the Potential refuses; False if that was done.

        Raises:
            UnsortedBatch: the batch is not ascending.
            ValueError, UnknownElement: as the Potential.
        """
        if not all(self._is_seen(system, name) for name in _COMPOSITION):
            if not self._holds(system, check):
                self._load_composition(system, check)
            for name in _COMPOSITION:
                self._see(system, name)
        if not self._is_seen(system, "cell"):
            self.step.cell.copy_(system.cell)
            self._see(system, "cell")
        self.step.pos.copy_(system.pos)

    def _load_composition(self, system: System, check: bool) -> None:
        self._seen.clear()
        self._held = None
        if check:
            self.model.potential.check(system)
        require_sorted(system)
        self.model.load(self.step, system)
        self._held = [getattr(system, name).clone() for name in _COMPOSITION]

    def _holds(self, system: System, check: bool) -> bool:
        """Return whether other tensors hold what was loaded before. Waits for the device, once."""
        if self._held is None:
            return False
        same = [(held == getattr(system, name)).all() for held, name in zip(self._held, _COMPOSITION, strict=True)]
        if not check or self._is_seen(system, "z"):
            return bool(torch.stack(same).all())
        # another structure of the same composition, whose positions may be in nm
        *found, cramped = torch.stack([*same, is_cramped(system)]).tolist()
        if cramped and all(found):
            warn_of_units(system)
        return all(found)

    def _is_seen(self, system: System, name: str) -> bool:
        tensor: Tensor = getattr(system, name)
        if name not in self._seen or tensor.is_inference():
            return False
        seen, version = self._seen[name]
        return tensor is seen and tensor._version == version

    def _see(self, system: System, name: str) -> None:
        tensor = getattr(system, name)
        if not tensor.is_inference():  # such tensors do not count their changes
            self._seen[name] = tensor, tensor._version


# --- One structure held on the device for loops that never leave it, on static buffers ---

_NEAR = 0.1
"""Å, cutoff of the list that finds atoms at the same place."""


class FusedBoundStep(BoundStep):
    """A bound step over static buffers.

    Args:
        graphed: a step that nothing else uses; inputs: of it, with the system.
        potential, system: for error messages.
    """

    def __init__(self, graphed: GraphedStep, inputs: StaticInputs, potential: Potential, system: System):
        self._graphed, self._inputs, self._potential, self._system = graphed, inputs, potential, system
        step = graphed.step
        self.pos, self.cell = step.pos, step.cell
        out = step.out
        self.forces, self.energy, self.atom_energies = out.forces, out.energy, out.atom_energies
        self.stress, self.charges = out.stress, out.charges
        self.waits = step.waits
        self._host: Outputs | None = None

    @property
    def capacity(self) -> int:
        """Number of directed edges that fit."""
        return self._graphed.step.capacity

    def load(self, system: System, check: bool = True) -> None:
        """Hold another batch of as many atoms and structures, whose results the next replay gives.

        Args:
            system: on the same device, of the same type; copied.
            check: refuse what the Potential refuses; False if that was done.

        Raises:
            ValueError, UnknownElement: as the Potential.
            UnsortedBatch: the batch does not ascend.
        """
        with torch.no_grad():
            self._inputs.load(system, check)
        self._system = system

    def replay(self) -> None:
        self._graphed.run()

    def check(self) -> bool:
        flag, _ = self._graphed.status()
        if not flag:
            return True
        if self._graphed.recover(flag):
            return False
        raise_input_error(self._system.replace(pos=self.pos, cell=self.cell), flag)
        raise AssertionError("unreachable")

    def fetch(self) -> Result | None:
        step = self._graphed.step
        if self._host is None:
            with torch.inference_mode(False):
                packed = torch.zeros_like(step.out.packed, device="cpu", pin_memory=step.device.type == "cuda")
            self._host = step.out.on(packed)
        host = self._host
        host.packed.copy_(step.out.packed, non_blocking=True)
        if step.device.type == "cuda":
            torch.cuda.current_stream(step.device).synchronize()
        if int(host.status[0]) & 0xFFFFFFFF and not self.check():
            return None
        result = Result(host.energy, host.forces, host.stress, host.atom_energies, host.charges)
        properties = {name: value.cpu() for name, value in step.properties(host.charges).items()}
        result.properties = with_dipole(properties, host.charges, self._system.at(self.pos))
        return result

    def properties(self) -> Mapping[str, Tensor]:
        charges = None if self.charges is None else self.charges.clone()
        return with_dipole(self._graphed.step.properties(charges), charges, self._system.at(self.pos))


def raise_input_error(system: System, flag: int) -> None:
    """Raise the error that the reference path would raise for these inputs.

    Raises:
        ValueError: always.
    """
    system.validate()
    if flag & COINCIDENT:
        refuse_coincident(neighbor_list(system, _NEAR), system)
    if flag & NO_VOLUME:
        require_stress(system)
        raise ValueError("the stress needs a cell with a volume")
    raise_input_flags(flag)
    if flag & RESULT_NOT_FINITE:
        raise ValueError(
            "an energy or a force is not finite, though all positions are: atoms may lie on top of each other, or "
            "numbers in the network are too large for half precision (then use Evaluator(…, precision='float64'))"
        )
    raise ValueError(f"the step could not be computed (flags {flag})")
