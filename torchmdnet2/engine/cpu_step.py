"""Steps on the compiled kernels of the CPU, for structures and domains whose positions and cells alone change.

All else is prepared once, and PyTorch is used little: one of its calls costs as much as the forces of an atom.

Shapes: N atoms in B structures, E directed edges; of a domain, n local atoms, N with the copies after them, M rows of
local atoms and ghosts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.devices import ProcessLock
from ..kernels.compiling_cpu import compile_side_by_side, compiled, lost_by_fork, run_on_threads
from ..kernels.interfaces import Array, CpuAtoms, CpuChargeNetwork, CpuNetwork, CpuRows, CpuSums, CpuTerm, PathWithHeads
from ..kernels.thread_tuner import ThreadChoice
from ..potential.derivatives import stress_of
from ..potential.graph import sum_over_systems
from ..potential.potential import Potential, Result, require_stress
from ..potential.refusals import SAME_PLACE
from ..system import System
from .autograd_term import add_by_autograd
from .bound import PropertyHeads, ReferenceBoundStep
from .check import BOUNDS, extract_checked, reference, require_close, require_properties, require_result
from .cpu_searches import AllPairs, CellSearch, CpuSearch, ListSearch
from .domain import SKIN, Domain, DomainValues, check_on_cluster, list_edges, voigt
from .select import Offsets, constant_energies, exact_isolated_energies, fast_path, kernels_of, list_cutoffs
from .timings import Stopwatch, Timing

__all__ = ["CompiledDomain", "CpuBoundStep", "CpuModel", "CpuStep", "Values"]


_DENSE = 512
"""Atoms of a structure without cell up to which all pairs are tested, which is faster than a search with bins."""


class Values(NamedTuple):
    """Results of one evaluation, in fresh memory; forces and virial are None if they are not wanted.

    Attributes:
        energy: [B] eV, energies: [N] eV, both float64.
        forces: [N, 3] eV/Å, virial: [N, 9] eV of the rows.
        charges: [N] e; None if the model predicts none.
        features: [N, F] that heads of other properties read; None without such heads.
        spread: further `Result.properties` of several members.
    """

    energy: Array
    energies: Array
    forces: Array | None
    virial: Array | None
    charges: Array | None
    features: Array | None
    spread: dict[str, Array]


class CpuStep:
    """Holds elements, charges and periodicity of a batch of structures, and evaluates it at any positions. Not locked.

    Args:
        potential: the potential of the networks and terms.
        nets, terms: on the CPU, a network of each member; threads: for terms without charges and with them.
        isolated: [max_z] eV float64, energies of isolated atoms by the network.
        system: N atoms in B structures; copied, positions and cell do not matter.

    Raises:
        ValueError, UnknownElement, UntrainedCharge: as the Potential.
    """

    def __init__(
        self, potential: Potential, nets: Sequence[CpuNetwork], terms: Sequence[CpuTerm],
        threads: tuple[ThreadChoice, ThreadChoice], isolated: Tensor, system: System,
    ):  # fmt: skip
        potential.check(system)
        self._known = tuple(t.clone() for t in _composition(system))
        self._dtype = system.dtype
        self._nets, self._shift = list(nets), potential.energy_shift
        z, self._batch, self._structures = self._known[0].numpy(), self._known[1].numpy(), system.num_systems
        charge = system.charge.detach().double()
        charge_input = nets[0].charge_input(charge)[system.batch].float().numpy()
        self._atoms = CpuAtoms(z, charge_input, self._batch, charge.numpy().copy())
        neutral = (charge == 0) & (potential.representation.local | (system.atom_counts == 1))
        self._offsets = Offsets(potential, isolated, system, neutral[system.batch].numpy(), numpy=True)
        sizes = np.bincount(self._batch, minlength=system.num_systems)
        same = bool((sizes == sizes[0]).all()) and bool((np.diff(self._batch) >= 0).all())
        dense = same and int(sizes[0]) <= _DENSE and not bool(system.pbc.any())
        # positions and cell are checked by the search of the network, the first
        self._list: CpuSearch = (AllPairs if dense else ListSearch)(potential.cutoff, system.num_atoms)
        device = potential.device
        self._reads_charges = any(prior.uses_charges for prior in potential.priors)
        self._by_autograd = [p for p in potential.priors if not p.constant and kernels_of(p, device) is None]
        cutoffs = list_cutoffs(potential.cutoff, [term.cutoff for term in terms])
        self._others = [
            AllPairs(cutoff, system.num_atoms) if dense else CellSearch(cutoff, system) for cutoff in cutoffs[1:]
        ]
        self._threads, self._watch = threads, Stopwatch()
        self._terms = [_Term(term, system, [self._list, *self._others]) for term in terms]

    def holds(self, system: System) -> bool:
        """Return whether a system differs at most in positions and cell."""
        if system.dtype != self._dtype or system.num_systems != self._structures or len(system.pos) != len(self._batch):
            return False
        return all(map(torch.equal, self._known, _composition(system)))

    def watch(self, watch: Stopwatch) -> None:
        """Time the parts of this step from now on."""
        self._watch = watch
        for rows in (self._list, *self._others):
            watch.watch(rows, "find", f"neighbor search to {rows.cutoff:g} Å", "kernels")
        self._nets = [copy.copy(net) for net in self._nets]
        for net in self._nets:
            watch.watch(net, "run", "network", "kernels")
        for term in self._terms:
            watch.watch(term.term, "add", term.name, "kernels")

    def __call__(self, system: System, forces: bool) -> Values:
        """Evaluate new positions and a new cell.

        Args:
            system: one for which `holds` is true.

        Raises:
            ValueError: a position or the cell is not usable.
        """
        for rows in (self._list, *self._others):
            rows.find(system)
        n = len(self._batch)
        fixed = CpuSums(np.zeros(n), np.zeros((n, 3)), np.zeros((n, 9)), np.zeros(n))
        self._add_terms(system, None, fixed)
        found = [self._evaluate(member, system, forces, fixed) for member in range(len(self._nets))]
        spread = {}
        if len(found) > 1:
            totals = [np.bincount(self._batch, energies, self._structures) for energies, *_ in found]
            spread["energy_std"] = np.std(totals, 0, ddof=1)
            if forces:
                spread["forces_std"] = np.std([force for _, force, *_ in found if force is not None], 0, ddof=1)
        energies, force, virial, charges, features = (
            None if values[0] is None else values[0] if len(values) == 1 else np.mean(values, 0)
            for values in zip(*found, strict=True)
        )
        assert energies is not None
        energy = np.bincount(self._batch, energies, self._structures) + self._shift
        return Values(energy, energies, force, virial, charges, features, spread)

    def _evaluate(
        self, member: int, system: System, forces: bool, fixed: CpuSums
    ) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
        """Evaluate one member with all terms; fixed: sums of those that do not read its charges."""
        net = self._nets[member]
        sums = fixed if len(self._nets) == 1 else CpuSums(*map(np.copy, fixed))

        def read(charges: Array) -> Array | None:
            self._add_terms(system, charges, sums)
            return sums.charge_slope if forces else None

        if isinstance(net, CpuChargeNetwork):
            out = net.run(self._atoms, self._list.rows, forces, read if self._reads_charges else None)
        else:
            out = net.run(self._atoms, self._list.rows, forces)
        energies, force, virial = out.energy.astype(np.float64), out.forces, out.virial
        self._offsets.add(energies, self._list.row_ptr, member)
        energies += sums.energy
        if force is not None and virial is not None:
            force, virial = force + sums.forces, virial + sums.virial
        return energies, force, virial, out.charges, out.features

    def _add_terms(self, system: System, charges: Array | None, sums: CpuSums) -> None:
        """Add the terms that read charges, if these are given, else all others."""
        pos, cell, reads = system.pos.detach().numpy(), system.cell.detach().numpy(), charges is not None
        terms = [term for term in self._terms if term.uses_charges == reads]

        def run() -> None:
            for term in terms:
                rows = None if term.list is None else term.list.rows
                term.term.add(pos, rows, sums, charges, **({"cell": cell} if term.uses_cell else {}))

        if terms:
            run_on_threads(run, self._threads[reads], sum(term.work() for term in terms), len(pos), True)
        for prior in self._by_autograd:
            if prior.uses_charges == reads:
                with self._watch.time(type(prior).__name__, "autograd"):
                    add_by_autograd(prior, system, sums, charges)


class _Term:
    """A term, and the shortest list that reaches its cutoff; None if it needs none."""

    def __init__(self, term: CpuTerm, system: System, lists: Sequence[CpuSearch]):
        self.term, self.name, self._cost = term.prepare(system), term.name, term.cost
        self.uses_charges, self.uses_cell = term.uses_charges, term.uses_cell
        found = [rows for rows in lists if rows.cutoff >= term.cutoff]
        self.list = min(found, key=lambda rows: rows.cutoff) if found else None
        size = np.bincount(system.batch.numpy(), minlength=1)
        self._pairs = int(size @ size)

    def work(self) -> int:
        """Return work in the units of `thread_tuner.amount_of_work`."""
        return self._cost * (self._pairs if self.list is None else int(self.list.row_ptr[-1]))


def _composition(system: System) -> tuple[Tensor, ...]:
    return system.z, system.batch, system.pbc, system.charge.detach(), system.spin


# --- A potential prepared for the CPU: neighbor search, compiled network, priors, sums; called like the Potential ---


class CpuModel:
    """A potential prepared for the compiled kernels of the CPU: evaluates structures and makes steps. Thread-safe.

    The first call is checked against the potential in float64.

    Args:
        potential: on the CPU, float32; one for which `select.unsupported_reason` is "".
    """

    def __init__(self, potential: Potential):
        path = fast_path(potential.representation)
        assert potential.head is not None and path is not None
        self.potential = potential
        self.nets = [path.cpu(m.representation, m.head, potential.energy_scale) for m in potential.members if m.head]
        self.heads = PropertyHeads(potential)
        if "charges" in potential.properties:
            assert isinstance(path, PathWithHeads)
            self.nets = [path.cpu_with_charges(net, potential.properties["charges"]) for net in self.nets]
        for net in self.nets:
            net.keeps_features = self.heads.read_features
        self.terms = _terms(potential)
        self._threads = ThreadChoice(), ThreadChoice()
        self.isolated = exact_isolated_energies(potential)
        self._lock = ProcessLock()
        self._last: CpuStep | None = None
        self._checked = False

    def __call__(
        self, system: System, forces: bool = True, stress: bool = False, create_graph: bool | None = False
    ) -> Result:
        """Return energy, forces and stress of a batch of structures, as the Potential, without a graph.

        Raises:
            ValueError, UnknownElement: as the Potential.
            RuntimeError: the first use did not agree with the reference.
        """
        with self._lock, torch.no_grad():
            step = self._step(system)
            if stress:
                require_stress(system)
            if not self._checked:
                self._check(system)
                self._checked = True
            return self.result(step(system, forces or stress), system, forces, stress)

    @property
    def net(self) -> CpuNetwork:
        """The network of the first member."""
        return self.nets[0]

    def result(self, values: Values, system: System, forces: bool, stress: bool) -> Result:
        """Return the results of a step, as tensors on its memory.

        Args:
            values: of the step.
            system: the system of the step.
            forces, stress: whether they are wanted.
        """
        result = Result(torch.from_numpy(values.energy), atom_energies=torch.from_numpy(values.energies))
        if values.charges is not None:
            result.charges = torch.from_numpy(values.charges)
        if forces and values.forces is not None:
            result.forces = torch.from_numpy(values.forces).to(system.dtype)
        result.properties = self.properties(values, system)
        if stress:
            result.stress = stress_of(_virial(values, system), system.volume.double()).to(system.dtype)
        return result

    def properties(self, values: Values, system: System) -> dict[str, Tensor]:
        """Return results of the heads of properties for the features and charges of a step."""
        charges, features = (None if v is None else torch.from_numpy(v) for v in (values.charges, values.features))
        return self.heads(charges, features, system) | {k: torch.from_numpy(v) for k, v in values.spread.items()}

    def take(self, system: System) -> CpuStep:
        """Return a step that holds the composition of a system, for one caller only; the last one if it holds it."""
        with self._lock:
            step, self._last = self._step(system), None
        return step

    def step(self, system: System) -> CpuStep:
        """Return a step that holds the composition of a system."""
        return CpuStep(self.potential, self.nets, self.terms, self._threads, self.isolated, system)

    def timings(self, system: System) -> list[Timing]:
        """Return times of the parts of a step with forces, the whole step last."""
        step, watch = self.step(system), Stopwatch()
        step.watch(watch)
        return watch.measure(lambda: step(system, True))

    def _step(self, system: System) -> CpuStep:
        """Return the step of a system, kept for the next call."""
        if self._last is None or not self._last.holds(system):
            self._last = None
            self._last = self.step(system)
        return self._last

    def _check(self, system: System) -> None:
        """Compare with the potential in float64, on this structure or on a cluster from it."""
        whole = system
        potential, system = extract_checked(self.potential, system, False)
        periodic = bool((system.volume > 0).all())
        model = copy.copy(self)
        model.potential, model.terms = potential, _terms(potential)
        # a cluster from a cell needs no lattice sums, and the cell does
        compile_side_by_side(lambda: (model.step(system)(system, True), self.step(whole)(whole, True)))
        expected = reference(potential, system, periodic)
        values = model.step(system)(system, True)
        assert expected.atom_energies is not None and values.forces is not None
        energy, energies, forces = (torch.from_numpy(v) for v in (values.energy, values.energies, values.forces))
        network = expected.atom_energies - constant_energies(self.potential, system)
        scale = float((network.abs() + self.isolated[system.z].abs()).max())
        found = Result(energy, forces, None, energies)
        if values.charges is not None and expected.charges is not None:
            require_close("charge, e", torch.from_numpy(values.charges), expected.charges, BOUNDS["native"][0])
        require_result(found, _virial(values, system), expected, potential, system, "native", scale)
        require_properties(self.properties(values, system), expected, potential, system, "native")


def _terms(potential: Potential) -> list[CpuTerm]:
    """Return the priors with kernels."""
    found: list[CpuTerm] = []
    for prior in potential.priors:
        path = kernels_of(prior, potential.device)
        if not prior.constant and path is not None:
            found.append(path.cpu(prior, potential.elements))
            found[-1].name = type(prior).__name__
    return found


def _virial(values: Values, system: System) -> Tensor:
    """Return symmetric virials [B, 3, 3] in eV, float64."""
    assert values.virial is not None
    virial = sum_over_systems(torch.from_numpy(values.virial), system.batch, system.num_systems).reshape(-1, 3, 3)
    return (virial + virial.transpose(1, 2)) / 2


# --- One structure held for loops on the compiled kernels of the CPU ---


class CpuBoundStep(ReferenceBoundStep):
    """A bound step on the compiled kernels of the CPU; its results are those of `CpuModel` to the last bit.

    Args:
        model: the prepared potential.
        system, stress: as for Evaluator.bind.
    """

    compiled = True

    def __init__(self, model: CpuModel, system: System, stress: bool):
        super().__init__(model, system, stress)
        self._cpu_step = model.take(self._system)
        self._model = model
        self._arrays = self.energy.numpy(), self.atom_energies.numpy(), self.forces.numpy()
        self._charges = None if self.charges is None else self.charges.numpy()
        self._values: Values | None = None

    def _step(self) -> None:
        if lost_by_fork():
            self._potential, self._values = self._model.potential, None
            super()._step()
            return
        if self.stress is not None:
            require_stress(self._system)
        self._values = values = self._cpu_step(self._system, True)
        for mine, value in zip(self._arrays, values, strict=False):
            mine[:] = value
        if self._charges is not None:
            self._charges[:] = values.charges
        if self.stress is not None:
            self.stress.copy_(stress_of(_virial(values, self._system), self._system.volume.double()))

    def _given(self) -> Mapping[str, Tensor]:
        if self._values is None or self._error is not None:
            return super()._given()
        return self._model.properties(self._values, self._system)


# --- A domain on the compiled kernels: rows of the local atoms, ghosts as senders ---


class CompiledDomain(Domain):
    """Evaluates a domain on kernels that numba compiles, in float32.

    The first evaluation is checked against the potential in float64.

    Args:
        potential: on the CPU, in float32; one for which `backends.compiled_reason` is "".
        charge: total charge in e of the whole structure.
    """

    def __init__(self, potential: Potential, charge: float):
        super().__init__(potential, charge)
        self._model = CpuModel(potential)
        self._factor = float(self._model.net.charge_input(torch.full((1,), charge, dtype=torch.float64)))
        cutoffs = list_cutoffs(potential.cutoff, [term.cutoff for term in self._model.terms])
        self._lists = [_DomainRows(cutoff) for cutoff in cutoffs]
        self._checked = False

    def _prepare(self) -> None:
        num_local = self.num_local
        everyone = torch.from_numpy(self.numbers)
        self.potential.check_elements(everyone)
        somewhere = System(z=everyone, pos=torch.zeros(len(everyone), 3, dtype=torch.float64))
        model = self._model
        local = System(z=everyone[:num_local], pos=somewhere.pos[:num_local])
        self._offsets = Offsets(self.potential, model.isolated, local, self.charge == 0, numpy=True)
        for prior in self.potential.priors:
            prior.check(somewhere)
        self._terms = [(term, term.prepare(somewhere)) for term in model.terms]
        self._charges = np.full(num_local, self._factor, dtype=np.float32)

    def _list(self, pos: NDArray[np.float64]) -> None:
        for rows in self._lists:
            rows.list_anew(pos, self.num_local, self._row_of)

    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        if not self._checked and self.num_local:
            self._check(pos)
            self._checked = True
        n = self.num_local
        for rows in self._lists:
            pair = rows.find(pos)
            if pair is not None:
                raise self._coincident(*pair)
        net = self._lists[0].rows
        self.num_edges = int(net.row_ptr[-1])
        energy, gradient = self._model.net.run_domain(
            self.numbers, net.row_ptr, net.sender, net.vectors, self._charges, self._exchange
        )
        forces, virial = np.zeros((len(self.numbers), 3)), np.zeros((n, 9))
        sum_edges(net.row_ptr, net.sender, net.vectors, gradient, forces, virial)
        energies = energy.astype(np.float64)
        self._offsets.add(energies, net.row_ptr)
        own = self._add_ghost_forces(torch.from_numpy(forces))
        # priors give each atom the whole of its force
        self._add_terms(pos, CpuSums(energies, own, virial, np.zeros(n)))
        return DomainValues(energies, own, voigt(torch.from_numpy(virial)).numpy())

    def _add_terms(self, pos: NDArray[np.float64], sums: CpuSums) -> None:
        for term, prepared in self._terms:
            found = min((r for r in self._lists if r.cutoff >= term.cutoff), key=lambda r: r.cutoff)
            add: Callable = prepared.add
            extra = {"exchange": self._exchange} if term.exchanges else {}

            def run(add: Callable = add, rows: CpuRows = found.rows, extra: dict = extra) -> None:
                add(pos, rows, sums, **extra)

            work = term.cost * int(found.rows.row_ptr[-1])
            run_on_threads(run, self._model._threads[0], work, max(1, self.num_local), True)

    def _check(self, pos: NDArray[np.float64]) -> None:
        """Compare the kernels with the potential in float64, on a cluster of local atoms."""
        other = copy.copy(self)
        other._checked, other._lists = True, [_DomainRows(rows.cutoff) for rows in self._lists]
        check_on_cluster(other, self.numbers[: self.num_local], pos, self._model.isolated)

    def describe(self) -> str:
        kind = type(self.potential.representation).__name__
        return f"compiled {kind} kernels (numba), float32, on up to {torch.get_num_threads()} threads of cpu"


class _DomainRows:
    """Edges of the local atoms within a cutoff.

    Attributes:
        cutoff: Å.
        rows: the edges at the last positions.
    """

    def __init__(self, cutoff: float):
        self.cutoff = cutoff

    def list_anew(self, pos: NDArray[np.float64], num_local: int, row_of: NDArray[np.integer]) -> None:
        """List edges up to cutoff + SKIN; `row_of` as for `Domain.set_atoms`."""
        edges = list_edges(pos, num_local, self.cutoff + SKIN).numpy()
        self._sender = edges[1].copy()
        self._row = row_of[self._sender]
        self._ptr = np.zeros(num_local + 1, np.int64)
        self._ptr[1:] = np.bincount(edges[0], minlength=num_local).cumsum()
        room = len(self._sender)
        self.rows = CpuRows(
            np.zeros(num_local + 1, np.int64), np.empty(room, np.int64), np.empty((room, 3), np.float32), self.cutoff
        )

    def find(self, pos: NDArray[np.float64]) -> tuple[int, int] | None:
        """Take the listed edges that are within the cutoff; returns two atoms at the same place, if there are any."""
        rows = self.rows
        nearest = select_edges(
            self._ptr,
            self._sender,
            self._row,
            pos,
            self.cutoff**2,
            rows.row_ptr,
            rows.sender,
            rows.vectors,
            SAME_PLACE**2,
        )
        if nearest < 0:
            return None
        return int(np.searchsorted(self._ptr, nearest, side="right")) - 1, int(self._sender[nearest])


@compiled(error_model="numpy")
def select_edges(ptr, listed, row, pos, limit, row_ptr, sender, vectors, least):
    """Copy the edges shorter than √limit into compressed rows.

    Args:
        ptr: [n + 1], listed: [≥ E] int64: listed senders of each atom, and their rows [≥ E].
        pos: [N, 3] Å.
        limit, least: Å².
        row_ptr [n + 1], sender [≥ E] int64, vectors [≥ E, 3] float32: filled.

    Returns:
        A listed edge shorter than √least, −1 if there is none.
    """
    found, wrong = 0, -1
    for i in range(len(ptr) - 1):
        row_ptr[i] = found
        px, py, pz = pos[i, 0], pos[i, 1], pos[i, 2]
        for e in range(ptr[i], ptr[i + 1]):
            j = listed[e]
            x, y, z = pos[j, 0] - px, pos[j, 1] - py, pos[j, 2] - pz
            square = x * x + y * y + z * z
            if square < limit:
                if square < least:
                    wrong = e
                sender[found] = row[e]
                vectors[found, 0], vectors[found, 1], vectors[found, 2] = x, y, z
                found += 1
    row_ptr[len(ptr) - 1] = found
    return wrong


@compiled(error_model="numpy")
def sum_edges(row_ptr, sender, vectors, gradient, forces, virial):
    """Add the forces [M, 3] and row virials [n, 9] of dE/dvector [≥ E, 3]: ghosts have no edges."""
    for i in range(len(row_ptr) - 1):
        for e in range(row_ptr[i], row_ptr[i + 1]):
            j = sender[e]
            for a in range(3):
                g = gradient[e, a]
                forces[i, a] += g
                forces[j, a] -= g
                for b in range(3):
                    virial[i, 3 * b + a] += vectors[e, b] * g
