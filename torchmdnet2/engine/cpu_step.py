"""Steps on the compiled kernels of the CPU, for structures and domains whose positions and cells alone change.

All else is prepared once, and PyTorch is used little: one of its calls costs as much as the forces of an atom.

Shapes: N atoms in B structures, E directed edges. Of a domain, N local atoms, with their ghosts M rows; positions are
those of its atoms and all copies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.compiling_cpu import ThreadChoice, compile_side_by_side, lost_by_fork, run_on_threads
from ..core.devices import ProcessLock
from ..core.exchange import Exchange
from ..kernels.interfaces import Array, Atoms, ChargeNetwork, CpuNetwork, Edges, PathWithHeads, TermLaunch, TermSums
from ..neighbors.compiled import AllPairs, CellSearch, CpuSearch, DomainSearch, ListSearch, StructureSearch
from ..potential.derivatives import stress_of
from ..potential.graph import sum_over_systems
from ..potential.potential import Potential, Result, require_stress
from ..potential.refusals import warn_of_units
from ..system import System
from .bound import PropertyHeads, ReferenceBoundStep
from .check import BOUNDS, extract_checked, reference, require_close, require_properties, require_result
from .domain import SKIN, Domain, DomainValues, check_on_cluster, list_edges, voigt
from .select import HeldTerm, Offsets, constant_energies, exact_isolated_energies, fast_path, list_cutoffs, terms_of
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


class _Threads:
    """Numbers of threads: of the network, of terms, of terms that read charges."""

    def __init__(self) -> None:
        self.network, self.terms, self.charged = ThreadChoice(), ThreadChoice(), ThreadChoice()


class CpuStep:
    """Evaluates networks and terms on the edges that searches have found, of structures or of a domain. Not locked.

    Args:
        model: the prepared potential.
        system: N atoms in B structures, or the M rows of a domain; copied. Positions and cell do not matter.
        local: the N atoms without ghosts; charge: [B] e, of the whole structures.
        searches: a search for each cutoff of `CpuModel.cutoffs`, that of the network first.
        exchange: of the ghosts.

    Raises:
        ValueError: a prior cannot evaluate such structures.
    """

    def __init__(
        self, model: CpuModel, system: System, local: System, charge: Tensor, searches: Sequence[CpuSearch],
        exchange: Exchange | None = None,
    ):  # fmt: skip
        potential, nets = model.potential, model.nets
        self.searches, self._nets, self._exchange = list(searches), list(nets), exchange
        self._structures, self._shift = local.num_systems, potential.energy_shift
        held = System(**{name: value.detach().clone() for name, value in vars(system).items()})
        batch = local.batch.numpy().copy()
        charge_input = nets[0].charge_input(charge)[local.batch].float().numpy()
        z, pos = held.z.numpy(), held.pos.numpy()
        self._atoms = Atoms(z, charge_input, batch, None, pos, total_charge=charge.numpy().copy(), exchange=exchange)
        neutral = (charge == 0) & (potential.representation.local | (local.atom_counts == 1))
        self._offsets = Offsets(potential, model.isolated, local, neutral[local.batch].numpy(), numpy=True)
        self._threads = model.threads
        self._terms = [HeldTerm(term, model.cutoffs, system.num_atoms) for term in model.terms]
        for term in self._terms:
            term.term.set_composition(term.buffers, held)
        size = np.bincount(batch, minlength=1)
        self._pairs = int(size @ size)

    def watch(self, watch: Stopwatch) -> None:
        """Time the parts of this step from now on."""
        self._nets = [copy.copy(net) for net in self._nets]
        for net in self._nets:
            for method in ("predict", "differentiate") if isinstance(net, ChargeNetwork) else ("run",):
                watch.watch(net, method, "network", "kernels")
        for held in self._terms:
            held.term = copy.copy(held.term)
            watch.watch(held.term, "run", held.term.name, "autograd" if held.term.by_autograd else "kernels")

    def evaluate(self, pos: Array, cell: Array | None, forces: bool) -> Values:
        """Evaluate the edges of the last searches.

        Args:
            pos: [N, 3] Å, of a domain those of all copies; cell: [B, 3, 3] Å.
            forces: compute them.
        """
        atoms = self._atoms._replace(pos=pos, cell=cell)
        fixed = TermSums.zeros(atoms.num_rows)
        self._add_terms(atoms, fixed)
        found = [self._evaluate(member, atoms, forces, fixed) for member in range(len(self._nets))]
        spread = {}
        if len(found) > 1:
            totals = [np.bincount(atoms.batch, energies, self._structures) for energies, *_ in found]
            spread["energy_std"] = np.std(totals, 0, ddof=1)
            if forces:
                spread["forces_std"] = np.std([force for _, force, *_ in found if force is not None], 0, ddof=1)
        energies, force, virial, charges, features = (
            None if values[0] is None else values[0] if len(values) == 1 else np.mean(values, 0)
            for values in zip(*found, strict=True)
        )
        assert energies is not None
        energy = np.bincount(atoms.batch, energies, self._structures) + self._shift
        return Values(energy, energies, force, virial, charges, features, spread)

    def _evaluate(
        self, member: int, atoms: Atoms, forces: bool, fixed: TermSums
    ) -> tuple[Array, Array | None, Array | None, Array | None, Array | None]:
        """Evaluate one member with all terms; fixed: sums of those that do not read its charges."""
        net, edges = self._nets[member], _edges(self.searches[0])
        sums = fixed if len(self._nets) == 1 else TermSums(*map(np.copy, fixed))
        out: Any = net.allocate(atoms.num_rows, len(edges.sender), None)

        def run() -> None:
            if not isinstance(net, ChargeNetwork):
                net.run(out, None, atoms, edges, True)
                return
            out.with_forces, slope = forces, None
            net.predict(out, None, atoms, edges)
            if any(held.term.uses_charges for held in self._terms):
                self._add_terms(atoms._replace(charges=net.charges(out)[0]), sums)
                slope = sums.charge_slope
            if forces:
                net.differentiate(out, None, atoms, edges, True, slope)

        work, most = net.work(atoms, edges)
        run_on_threads(run, self._threads.network, work, max(1, most), forces)
        energies = out.energy.astype(np.float64) * net.unit
        self._offsets.add(energies, edges.row_ptr, member)
        energies += sums.energy
        force, virial = None, None
        if forces:
            force, virial = out.forces * net.unit, out.virial * net.unit
            if self._exchange is not None:
                n = atoms.num_rows
                force = force[:n] + self._exchange.reverse(torch.from_numpy(force[n:])).numpy()
            force, virial = force + sums.forces, virial + sums.virial
        return energies, force, virial, getattr(out, "charges", None), getattr(out, "features", None)

    def _add_terms(self, atoms: Atoms, sums: TermSums) -> None:
        """Add the terms that read charges, if the atoms have them, else all others."""
        reads = atoms.charges is not None
        lists: dict[float | None, Edges] = {rows.cutoff: _edges(rows) for rows in self.searches}
        terms = [held for held in self._terms if held.term.uses_charges == reads]
        compiled = [held for held in terms if not held.term.by_autograd]

        def run() -> None:
            for held in compiled:
                held.term.run(held.buffers, atoms, lists.get(held.list_cutoff), sums, TermLaunch())

        if compiled:
            found = {cutoff: int(edges.row_ptr[-1]) for cutoff, edges in lists.items()}
            work = sum(held.term.cost * found.get(held.list_cutoff, self._pairs) for held in compiled)
            run_on_threads(run, self._threads.charged if reads else self._threads.terms, work, len(atoms.z), True)
        for held in terms:
            if held.term.by_autograd:
                held.term.run(held.buffers, atoms, None, sums, TermLaunch())


class StructuresStep(CpuStep):
    """Holds elements, charges and periodicity of a batch of structures, and evaluates it at any positions.

    Raises:
        ValueError, UnknownElement, UntrainedCharge: as the Potential.
    """

    def __init__(self, model: CpuModel, system: System):
        model.potential.check(system)
        self._known, self._dtype = tuple(t.clone() for t in _composition(system)), system.dtype
        sizes, batch = system.atom_counts, system.batch
        same = bool((sizes == sizes[:1]).all()) and bool((batch.diff() >= 0).all())
        dense = same and int(sizes[0]) <= _DENSE and not bool(system.pbc.any())
        first, *others = model.cutoffs
        n = system.num_atoms
        # positions and cell are checked by the search of the network, the first
        self._found: list[StructureSearch] = [(AllPairs if dense else ListSearch)(first, n)]
        self._found += [AllPairs(cutoff, n) if dense else CellSearch(cutoff, system) for cutoff in others]
        super().__init__(model, system, system, system.charge.detach().double(), self._found)

    def holds(self, system: System) -> bool:
        """Return whether a system differs at most in positions and cell."""
        if system.dtype != self._dtype or system.num_systems != self._structures:
            return False
        return len(system.pos) == len(self._known[0]) and all(map(torch.equal, self._known, _composition(system)))

    def watch(self, watch: Stopwatch) -> None:
        for rows in self._found:
            watch.watch(rows, "find", f"neighbor search to {rows.cutoff:g} Å", "kernels")
        super().watch(watch)

    def __call__(self, system: System, forces: bool) -> Values:
        """Evaluate new positions and a new cell.

        Args:
            system: one for which `holds` is true.

        Raises:
            ValueError: a position or the cell is not usable.
        """
        for rows in self._found:
            rows.find(system)
        return self.evaluate(system.pos.detach().numpy(), system.cell.detach().numpy(), forces)


def _edges(search: CpuSearch) -> Edges:
    return Edges(search.row_ptr, search.sender, search.vectors, search.cutoff)


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
            if isinstance(net, CpuNetwork):
                net.keeps_features = self.heads.read_features
        self._take_terms(potential)
        self.threads = _Threads()
        self.isolated = exact_isolated_energies(potential)
        self._lock = ProcessLock()
        self._last: StructuresStep | None = None
        self._z: Tensor | None = None  # of the last structure
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

    def _take_terms(self, potential: Potential) -> None:
        self.potential, self.terms = potential, terms_of(potential, compiled=True)
        self.cutoffs = list_cutoffs(potential.cutoff, [term.cutoff for term in self.terms])

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

    def take(self, system: System) -> StructuresStep:
        """Return a step that holds the composition of a system, for one caller only; the last one if it holds it."""
        with self._lock:
            step, self._last = self._step(system), None
        return step

    def step(self, system: System) -> StructuresStep:
        """Return a step that holds the composition of a system."""
        return StructuresStep(self, system)

    def timings(self, system: System) -> list[Timing]:
        """Return times of the parts of a step with forces, the whole step last."""
        step, watch = self.step(system), Stopwatch()
        step.watch(watch)
        return watch.measure(lambda: step(system, True))

    def _step(self, system: System) -> StructuresStep:
        """Return the step of a system, kept for the next call."""
        if self._last is None or not self._last.holds(system):
            self._last = None
            self._last = self.step(system)
        elif system.z is not self._z:  # another structure of the same composition, not the same at other positions
            warn_of_units(system)
        self._z = system.z
        return self._last

    def _check(self, system: System) -> None:
        """Compare with the potential in float64, on this structure or on a cluster from it."""
        whole = system
        potential, system = extract_checked(self.potential, system, False)
        periodic = bool((system.volume > 0).all())
        model = copy.copy(self)
        model._take_terms(potential)
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
        self._lists = [DomainSearch(cutoff, 0) for cutoff in self._model.cutoffs]
        self._checked = False

    def _prepare(self) -> None:
        n, everyone = self.num_local, torch.from_numpy(self.numbers)
        self.potential.check_elements(everyone)
        rows = System(z=everyone, pos=torch.zeros(len(everyone), 3, dtype=torch.float64))
        for prior in self.potential.priors:
            prior.check(rows)
        charge = torch.full((1,), self.charge, dtype=torch.float64)
        local = System(z=rows.z[:n], pos=rows.pos[:n])
        self._step = CpuStep(self._model, rows, local, charge, self._lists, self._exchange)

    def _list(self, pos: NDArray[np.float64]) -> None:
        for rows in self._lists:
            listed = list_edges(pos, self.num_local, rows.cutoff + SKIN)
            rows.take(listed.numpy(), self.num_local, self._row_of)

    def _evaluate(self, pos: NDArray[np.float64]) -> DomainValues:
        if not self._checked and self.num_local:
            self._check(pos)
            self._checked = True
        for rows in self._lists:
            pair = rows.select(pos)
            if pair is not None:
                raise self._coincident(*pair)
        self.num_edges = int(self._lists[0].row_ptr[-1])
        values = self._step.evaluate(pos, None, True)
        assert values.forces is not None and values.virial is not None
        return DomainValues(values.energies, values.forces, voigt(torch.from_numpy(values.virial)).numpy())

    def _check(self, pos: NDArray[np.float64]) -> None:
        """Compare the kernels with the potential in float64, on a cluster of local atoms."""
        other = copy.copy(self)
        other._checked, other._lists = True, [DomainSearch(rows.cutoff, 0) for rows in self._lists]
        check_on_cluster(other, self.numbers[: self.num_local], pos, self._model.isolated)

    def describe(self) -> str:
        kind = type(self.potential.representation).__name__
        return f"compiled {kind} kernels (numba), float32, on up to {torch.get_num_threads()} threads of cpu"
