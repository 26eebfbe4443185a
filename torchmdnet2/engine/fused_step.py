"""The fused step of network and terms on a GPU, and the spatial order of its atoms.

Atoms are sorted along a space-filling curve (Morton order), so that neighbors are near in memory. The order depends on
the positions only, so that results do not depend on earlier steps.

Shapes: N atoms, B structures.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.interfaces import (
    Atoms,
    Buffers,
    ChargeNetwork,
    Edges,
    FeatureNetwork,
    MemberPath,
    Network,
    PathWithHeads,
    Term,
    TermLaunch,
    TermSums,
    TermWithRoom,
)
from ..neighbors.triton_search import TritonNeighborSearch
from ..potential.potential import Potential, Result
from ..system import System
from .bound import PropertyHeads
from .check import BOUNDS, extract_checked, reference, require_close, require_properties, require_result
from .finish import MAX_PARTS, TERMS, energy_spread_kernel, finish_kernel, mean_kernel
from .graph import compile_side_by_side
from .select import HeldTerm, constant_energies, exact_isolated_energies, fast_path, list_cutoffs, terms_of
from .step import FEWEST_EDGES, OVERFLOW, GraphedStep, StaticInputs, Step
from .timings import Part

__all__ = ["SORT_FROM", "FusedModel", "FusedStep", "SpatialOrder"]


SORT_FROM = 16384
"""Number of atoms from which the sort saves time, on one NVIDIA H200."""


class SpatialOrder:
    """Sorts the atoms along the curve, in static buffers.

    Args:
        num_atoms, num_systems: N and B.
        pos: the static positions that are sorted; z: their elements.
        width: bins in Å.

    Attributes:
        order: [N] int64, the atom at each place; structures stay in their sequence.
        pos, z: [N, 3] and [N] in that order.
    """

    def __init__(self, num_atoms: int, num_systems: int, pos: Tensor, z: Tensor, width: float = 2.5):
        device = pos.device
        dtype = torch.int32 if num_systems == 1 else torch.int64
        self.width = width
        self.keys = torch.zeros(num_atoms, dtype=dtype, device=device)
        self.sorted_keys = torch.zeros_like(self.keys)
        self.order = torch.arange(num_atoms, device=device)
        self._source = pos, z
        self.pos, self.z = torch.zeros_like(pos), torch.zeros_like(z)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.sorted_keys, self.order, self.pos, self.z))

    def __call__(self, batch: Tensor, cell: Tensor, pbc: Tensor) -> None:
        """Sort; ties stay in the sequence of the atoms."""
        pos, z = self._source
        n = pos.shape[0]
        morton_kernel[(-(-n // 256),)](
            pos, batch, cell, pbc.view(torch.uint8), self.keys, n, self.width, BLOCK=256, enable_fp_fusion=False
        )
        torch.sort(self.keys, stable=True, out=(self.sorted_keys, self.order))
        torch.index_select(pos, 0, self.order, out=self.pos)
        torch.index_select(z, 0, self.order, out=self.z)


@triton.jit
def spread(i):
    """The lowest ten bits of i, two zeros between each and the next."""
    i = (i | (i << 16)) & 0x030000FF
    i = (i | (i << 8)) & 0x0300F00F
    i = (i | (i << 4)) & 0x030C30C3
    return (i | (i << 2)) & 0x09249249


@triton.jit
def bin_of(x):
    """Ten bits of a coordinate in bins; it wraps around after 1,024 bins, which only costs locality."""
    x = tl.where(tl.abs(x) < 1e9, x, 0.0)  # NaN and infinity have no bin: the neighbor search reports them
    return tl.floor(x).to(tl.int32) & 1023


@triton.jit(do_not_specialize=["num_atoms"])
def morton_kernel(pos, batch, cell, pbc, keys, num_atoms, width, BLOCK: tl.constexpr):
    """keys [N] = structure · 2³⁰ + Morton code of the position in bins of `width` Å.

    Fully periodic structures are wrapped into their cell first: code and memory follow the fractional coordinates.

    Args:
        pos: [N, 3] Å. batch: [N] int32. cell: [B, 3, 3]. pbc: [B, 3] uint8.
        keys: [N] int32 (one structure) or int64.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < num_atoms
    at = pos + i.to(tl.int64) * 3
    x = tl.load(at, ok, other=0.0).to(tl.float32)
    y = tl.load(at + 1, ok, other=0.0).to(tl.float32)
    z = tl.load(at + 2, ok, other=0.0).to(tl.float32)
    b = tl.load(batch + i, ok, other=0)
    row = cell + b * 9
    ax, ay, az = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32), tl.load(row + 2).to(tl.float32)
    bx, by, bz = tl.load(row + 3).to(tl.float32), tl.load(row + 4).to(tl.float32), tl.load(row + 5).to(tl.float32)
    cx, cy, cz = tl.load(row + 6).to(tl.float32), tl.load(row + 7).to(tl.float32), tl.load(row + 8).to(tl.float32)
    ux, uy, uz = by * cz - bz * cy, bz * cx - bx * cz, bx * cy - by * cx
    vx, vy, vz = cy * az - cz * ay, cz * ax - cx * az, cx * ay - cy * ax
    wx, wy, wz = ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx
    det = ax * ux + ay * uy + az * uz
    sides = pbc + b * 3
    periodic = (tl.load(sides) != 0) & (tl.load(sides + 1) != 0) & (tl.load(sides + 2) != 0) & (det != 0.0)
    safe = tl.where(periodic, det, 1.0)
    f0 = (x * ux + y * uy + z * uz) / safe
    f1 = (x * vx + y * vy + z * vz) / safe
    f2 = (x * wx + y * wy + z * wz) / safe
    # the heights of the cell tell how many bins fit
    h0 = tl.abs(det) / tl.sqrt(ux * ux + uy * uy + uz * uz + 1e-30)
    h1 = tl.abs(det) / tl.sqrt(vx * vx + vy * vy + vz * vz + 1e-30)
    h2 = tl.abs(det) / tl.sqrt(wx * wx + wy * wy + wz * wz + 1e-30)
    x = tl.where(periodic, (f0 - tl.floor(f0)) * h0, x)
    y = tl.where(periodic, (f1 - tl.floor(f1)) * h1, y)
    z = tl.where(periodic, (f2 - tl.floor(f2)) * h2, z)
    code = spread(bin_of(x / width)) | (spread(bin_of(y / width)) << 1) | (spread(bin_of(z / width)) << 2)
    key = code.to(keys.dtype.element_ty)
    if keys.dtype.element_ty == tl.int64:
        key = key | (b.to(tl.int64) << 30)
    tl.store(keys + i, key, ok)


# --- One step of a fused model on static buffers: neighbor searches, network, other terms, sums, stress ---

_ATOMS_PER_PART = 256


class FusedStep(Step):
    """Energy, forces and stress of N atoms in B structures, by a network and terms with kernels.

    `launch()` allocates nothing (except for a sort, in the pool of the graph) and never waits.

    Args:
        net: the network.
        terms: those that are added to it. Each gets the shortest list of `list_cutoffs` that reaches its cutoff. Terms
            by autograd get a list of their cutoff, and come last.
        num_atoms, num_systems: N and B.
        cutoff: Å, of the network.
        dtype: of the positions, float32 or float64.
        stress: compute the stress.
        subtract: atoms without edges in neutral structures have no network energy (`isolated` is subtracted).
        local: such atoms do not feel the others of their structure; otherwise only single atoms have no such energy.
        energy_shift: eV per structure.
        heads: of other properties; they need a FeatureNetwork.
        capacity: C at first; `make_room()` finds the needed one.
        method, thin: of the neighbor search; periodic: as the attribute, at first.
        shapes, term_shapes, sort, parts: launch shapes of the network and the terms, spatial order, programs per
            structure in the sums; None chooses by N and B.

    Attributes:
        z [N] int32, charge_input [N] float32, neutral [B] int32; isolated and reference [N] float64 eV,
            which are subtracted from the network's energies and added to them. `set_composition` sets all.
    """

    def __init__(
        self,
        net: Network,
        num_atoms: int,
        num_systems: int,
        cutoff: float,
        dtype: torch.dtype,
        stress: bool,
        *,
        terms: Sequence[Term] = (),
        subtract: bool = True,
        local: bool = True,
        energy_shift: float = 0.0,
        heads: PropertyHeads,
        capacity: int = FEWEST_EDGES,
        method: str = "auto",
        thin: bool = False,
        periodic: bool = False,
        shapes: Hashable = None,
        term_shapes: Sequence[Hashable] | None = None,
        sort: bool | None = None,
        parts: int | None = None,
    ):
        super().__init__(num_atoms, num_systems, dtype, stress, isinstance(net, ChargeNetwork), net.device)
        self.periodic |= periodic
        N, B = num_atoms, num_systems
        # those last that PyTorch has a part in, so that kernels follow on kernels
        terms = sorted(terms, key=lambda term: (term.by_autograd, term.allocates))
        self.net, self.cutoff, self.subtract, self.local = net, float(cutoff), subtract, local

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.pos, self.cell, self.pbc = new(N, 3), new(B, 3, 3), new(B, 3, dtype=torch.bool)
        self.z, self.neutral = new(N, dtype=torch.int32), new(B, dtype=torch.int32)
        self.charge_input = new(N, dtype=torch.float32)
        self.total_charge = new(B, dtype=torch.float64)
        self._heads = heads
        self._composition: System | None = None
        self.isolated, self.reference = new(N, dtype=torch.float64), new(N, dtype=torch.float64)
        self.shift = torch.full((1,), energy_shift, dtype=torch.float64, device=self.device)
        self._given_shapes = shapes is not None
        self._shapes = shapes if shapes is not None else net.launch_shapes(N)
        self._term_shapes = tuple(term_shapes or [term.launch_shapes(N) for term in terms])
        self._num_parts = parts or max(1, min(MAX_PARTS, -(-N // (B * _ATOMS_PER_PART))))
        self._parts = new(B * self._num_parts, TERMS, dtype=torch.float64)
        self._arrived = new(B, dtype=torch.int32)
        if sort is None:
            # a prior may know its atoms by their places
            sort = N >= SORT_FROM and N >= SORT_FROM // 4 * B and not any(term.by_autograd for term in terms)
        self.order = SpatialOrder(N, B, self.pos, self.z) if sort else None
        self._batch = new(N, dtype=torch.int32)
        self._with_pytorch = any(term.allocates for term in terms)
        self.measures_graph = self._with_pytorch or net.allocates
        self.rehearses = not net.allocates and all(term.rehearses or not term.allocates for term in terms)
        self._exact = {float(term.cutoff) for term in terms if term.by_autograd and term.cutoff > 0}
        shared = [float(term.cutoff) for term in terms if not term.by_autograd]
        cutoffs = list_cutoffs(self.cutoff, shared, sorted(self._exact))
        self._terms = [HeldTerm(term, cutoffs, N) for term in terms]
        self._sums = self._sums_of_terms() if terms else None
        self._members: _Members | None = None
        if isinstance(net, ChargeNetwork) and net.members > 1:
            self._members = _Members(net.members, N, B, dtype, self._terms, self.device)
        self._buffers: Buffers | None = None
        self._make_searches(dict.fromkeys(cutoffs, capacity), method, thin)
        self.set_capacity(capacity)

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        fields = [v for search in self.searches.values() for v in vars(search).values() if isinstance(v, Tensor)]
        fields += [self.pos, self.isolated, self.reference, self.out.packed]
        for held in (self._sums or (), *(term.buffers for term in self._terms)):
            fields += [v for v in (held if isinstance(held, tuple) else (held,)) if isinstance(v, Tensor)]
        order = 0 if self.order is None else self.order.nbytes
        network = 0 if self._buffers is None else self._buffers.nbytes
        return network + order + self.graph_bytes + sum(t.numel() * t.element_size() for t in fields)

    @property
    def path(self) -> dict[str, Any]:
        """The choices that decide which kernels run, as arguments of another step with the same kernels."""
        return {
            "shapes": self._shapes,
            "term_shapes": self._term_shapes,
            "method": self.search.method,
            "periodic": self.periodic,
            "sort": self.order is not None,
            "parts": self._num_parts,
        }

    @contextmanager
    def without_buffers(self) -> Iterator[None]:
        """Within the block, the buffers of the network are freed for other uses."""
        self._buffers = None
        yield
        self._resize(self.search, self.capacity)
        self.version += 1

    def set_capacity(self, capacity: int) -> None:
        """Replace the edge buffers of every search."""
        for search in self.searches.values():
            self._resize(search, capacity)
        self.version += 1

    def grow(self) -> None:
        super().grow()
        for term in self._terms:
            if isinstance(term.term, TermWithRoom):
                self.version += term.term.grow(term.buffers)

    def clear(self) -> None:
        super().clear()
        for term in self._terms:
            if isinstance(term.term, TermWithRoom):
                term.term.clear(term.buffers)

    def _resize(self, search: TritonNeighborSearch, capacity: int) -> None:
        capacity = _aligned(capacity)
        if search is self.search:
            self._buffers = None  # free the old before the new: they may fill half of the memory
        if capacity != search.capacity:
            search.set_capacity(capacity)
        if search is self.search:
            self._buffers = self.net.allocate(self.num_atoms, capacity, self._shapes)

    def _take_shapes(self, shapes: Hashable) -> None:
        """Use other launch shapes from now on, if they are others."""
        if shapes != self._shapes:
            self._shapes, self._buffers = shapes, None
            self._resize(self.search, self.capacity)
            self.version += 1

    def _new_search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        return TritonNeighborSearch(
            self.num_atoms, self.num_systems, cutoff, _aligned(capacity), self.device,
            batch=self._batch, dtype=torch.float32, method=method, thin=thin, periodic=self.periodic,
            receiver=cutoff in self._exact, shift=cutoff in self._exact,
            ordered=cutoff == self.cutoff or cutoff in self._exact,
        )  # fmt: skip

    def _sums_of_terms(self) -> TermSums:
        n, device = self.num_atoms, self.device
        energy = torch.zeros(n, dtype=torch.float64, device=device)
        read = any(term.term.uses_charges for term in self._terms)
        slope = torch.zeros(n, device=device) if read else None
        return TermSums(energy, torch.zeros(n, 3, device=device), torch.zeros(n, 9, device=device), slope)

    # --- inputs ----------------------------------------------------------------------------------------------------

    def set_composition(
        self, system: System, charge: Tensor, isolated: Tensor, reference: Tensor, of_members: Tensor | None = None
    ) -> None:  # fmt: skip
        """Set elements, charges and reference energies of the structures.

        Args:
            system: N atoms in B structures, its batch ascending; positions and cell do not matter.
            charge: [B] e.
            isolated, reference: [N] float64 eV, see the class; of_members: [M, N] references of each member, if
                several.

        Raises:
            ValueError: a term cannot evaluate such a structure.
        """
        for term in self._terms:
            term.term.set_composition(term.buffers, system)
            if isinstance(term.term, TermWithRoom):
                self.version += term.term.make_room(term.buffers, system)
        if not self._given_shapes:
            self._take_shapes(self.net.shapes_for(self.num_atoms, system.z))
        batch = system.batch
        self.z.copy_(system.z)
        self.pbc.copy_(system.pbc)
        self.search_periodic(system.pbc)
        self._batch.copy_(batch)
        for search in self.searches.values():
            search.set_batch(self._batch)
        self.neutral.copy_((charge.float() == 0) & (self.local | (system.atom_counts == 1)))
        self.charge_input.copy_(self.net.charge_input(charge.double())[batch])
        self.total_charge.copy_(charge)
        self.isolated.copy_(isolated)
        self.reference.copy_(reference)
        if self._members is not None and of_members is not None:
            self._members.reference.copy_((of_members - reference).flatten())
        if self._heads.read_features:
            self._composition = System(**{name: value.detach().clone() for name, value in vars(system).items()})

    # --- launches --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        with self._on_device():
            atoms, lists = self._rows()
            for search in self.searches.values():
                search(atoms.pos, self.cell, self.pbc)
            given = self._buffers, self._shapes, atoms, lists[self.cutoff]
            if isinstance(self.net, ChargeNetwork):
                self.net.predict(*given)
                atoms = atoms._replace(charges=self.net.charges(self._buffers)[0])
                self._add_terms(atoms, lists, self._begin_terms(atoms))
                self.net.differentiate(*given, self.stress, self._charge_slope)
            else:
                begun = self._begin_terms(atoms)
                self.net.run(*given, self.stress)
                self._add_terms(atoms, lists, begun)
            self._finish()

    def _rows(self) -> tuple[Atoms, dict[float, Edges]]:
        """Return the atoms in the order of the rows, and the lists that searches fill."""
        pos, z = self._place()
        # structures stay in their sequence, so that what belongs to a structure is in order too
        order = None if self.order is None else self.order.order
        atoms = Atoms(
            z, self.charge_input, self._batch, self.search.ptr, pos, order, None, self.cell, self.total_charge
        )
        lists = {}
        for cutoff, search in self.searches.items():
            assert search.vectors is not None
            lists[cutoff] = Edges(search.row_ptr, search.sender, search.vectors, cutoff, search.receiver, search.shift)
        return atoms, lists

    def _begin_terms(self, atoms: Atoms) -> list[list[Any]]:
        """Return what `Term.begin` returns, for each term and target."""
        return [
            [term.term.begin(term.buffers, given, self.stress) for _, given in self._targets(term, atoms)]
            for term in self._terms
        ]

    def _targets(self, term: HeldTerm, atoms: Atoms) -> Sequence[tuple[TermSums | None, Atoms]]:
        """Return what a term is added to, and the atoms with the charges that it reads; several where members have
        theirs."""
        if self._members is not None and term.term.uses_charges:
            return self._members.each(atoms)
        return [(self._sums, atoms)]

    def _add_terms(self, atoms: Atoms, lists: dict[float, Edges], begun: list[list[Any]]) -> None:
        for k, term in enumerate(self._terms):
            self._add_term(k, atoms, lists, begun[k])
            lacking = term.term.lacking(term.buffers) if isinstance(term.term, TermWithRoom) else None
            if lacking is not None:
                self.out.status[:1] |= lacking * OVERFLOW

    def _add_term(self, k: int, atoms: Atoms, lists: dict[float, Edges], begun: Sequence[Any] = ()) -> None:
        term = self._terms[k]
        edges = None if term.list_cutoff is None else lists[term.list_cutoff]
        reading = [other for other in self._terms[:k] if other.term.uses_charges]
        if self._members is None:
            before = self._terms[:k]
        else:
            before = reading if term.term.uses_charges else [o for o in self._terms[:k] if o not in reading]
        options = self.net.launch_options(self._shapes)
        launch = TermLaunch(not before, not reading, self.stress, self._term_shapes[k], options)
        for place, (sums, given) in enumerate(self._targets(term, atoms)):
            assert sums is not None
            ahead = begun[place] if begun else None
            term.term.run(term.buffers, given, edges, sums, launch._replace(begun=ahead))

    @property
    def _charge_slope(self) -> Tensor | None:
        """dE/dq of the terms, [M·N]."""
        sums = self._sums if self._members is None else self._members.sums
        return None if sums is None else sums.charge_slope

    def parts(self) -> list[Part]:
        with self._on_device():
            atoms, lists = self._rows()
        found = [Part("spatial order", "kernels", self._place)] if self.order is not None else []
        for cutoff, search in self.searches.items():
            run = partial(search, atoms.pos, self.cell, self.pbc)
            found.append(Part(f"neighbor search to {cutoff:g} Å", "kernels", run))
        found.append(Part("network", "kernels", partial(self._run_network, atoms, lists[self.cutoff])))
        if isinstance(self.net, ChargeNetwork):
            atoms = atoms._replace(charges=self.net.charges(self._buffers)[0])
        for k, term in enumerate(self._terms):
            path = "autograd" if term.term.by_autograd else "kernels"
            found.append(Part(term.term.name, path, partial(self._add_term, k, atoms, lists)))
        return [*found, Part("sums", "kernels", self._finish)]

    def _run_network(self, atoms: Atoms, edges: Edges) -> None:
        """Run the whole network."""
        given = self._buffers, self._shapes, atoms, edges
        if not isinstance(self.net, ChargeNetwork):
            self.net.run(*given, self.stress)
            return
        self.net.predict(*given)
        self.net.differentiate(*given, self.stress, self._charge_slope)

    def replay_agrees(self, launched: Tensor) -> bool:
        if not self.measures_graph or torch.equal(launched, self.out.packed):
            return super().replay_agrees(launched)
        # atomic additions of PyTorch are rounded otherwise from run to run
        before = self.out.on(launched)
        if not torch.equal(before.status, self.out.status):
            return False
        largest = max(1.0, float(before.forces.abs().max()))
        energies = torch.allclose(before.atom_energies, self.out.atom_energies, rtol=1e-9, atol=1e-7, equal_nan=True)
        return energies and torch.allclose(before.forces, self.out.forces, rtol=0, atol=1e-5 * largest, equal_nan=True)

    def _place(self) -> tuple[Tensor, Tensor]:
        """Write positions and elements in the order of the kernels."""
        if self.order is None:
            return self.pos, self.z
        self.order(self._batch, self.cell, self.pbc)
        return self.order.pos, self.order.z

    def _searched_positions(self) -> Tensor:
        return self._place()[0]

    def _finish(self) -> None:
        out, b, search, parts = self.out, self._buffers, self.search, self._num_parts
        assert b is not None
        stress = out.energy if out.stress is None else out.stress
        order = self.z if self.order is None else self.order.order
        most = self._most[0]
        launch = self.net.launch_options(self._shapes)
        if self._with_pytorch:
            launch = {"PDL": 0}  # launches of PyTorch lie between
        sums = self._sums or TermSums(b.energy, b.energy, b.energy)
        found: tuple[Tensor, ...] = b.energy, b.forces, b.virial, b.energy
        with_terms, unit = self._sums is not None, self.net.unit
        if isinstance(self.net, ChargeNetwork):
            found = *found[:3], self.net.charges(b)[1]
        if self._members is not None:
            found = self._members.mean(found, unit, self.order, search.ptr, self.stress, launch)
            with_terms, unit = not all(term.term.uses_charges for term in self._terms), 1.0
        wide = self.num_atoms > 256 * self.num_systems * parts
        finish_kernel[(self.num_systems, parts)](
            *found[:3], unit, search.row_ptr, order, self.isolated, self.reference,
            self.neutral, search.ptr, self.shift, self.cell, search.flag, search.needed, most,
            self._needed_by_others, self._most_of_others, out.atom_energies, out.forces, out.energy, stress,
            self._parts, self._arrived, *sums[:3], found[3], out.energy if out.charges is None else out.charges,
            SUBTRACT=self.subtract, SORTED=self.order is not None, STRESS=self.stress, SINGLE=parts == 1,
            WITH_TERMS=with_terms, CHARGES=out.charges is not None, OTHERS=len(self.searches) - 1,
            BLOCK=1024 if wide else 256, MOST=MAX_PARTS, num_warps=8 if wide else 4, enable_fp_fusion=False, **launch,
        )  # fmt: skip

    def properties(self, charges: Tensor | None) -> dict[str, Tensor]:
        if self._members is not None:
            return self._members.spread()
        if not self._heads.read_features:
            return self._heads(charges, None, None)
        assert isinstance(self.net, FeatureNetwork) and self._composition is not None
        features = self.net.features(self._buffers)[: self.num_atoms]
        if self.order is not None:  # rows are places
            features = torch.empty_like(features).index_copy_(0, self.order.order, features)
        system = self._composition.replace(pos=self.pos.clone(), cell=self.cell.clone())
        return self._heads(charges, features, system)


class _Members:
    """Sums of the terms that read the charges of M members, and their mean and spread.

    Attributes:
        sums: as `TermSums`, [M·N]; None where no term reads charges.
        reference: [M·N] float64 eV, added to the energies, minus the mean.
    """

    def __init__(
        self, number: int, num_atoms: int, num_systems: int, dtype: torch.dtype, terms: Sequence[HeldTerm],
        device: torch.device,
    ):  # fmt: skip
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n, double = number * num_atoms, torch.float64
        self._number, self._num_atoms = number, num_atoms
        self.sums: TermSums | None = None
        if any(term.term.uses_charges for term in terms):
            self.sums = TermSums(new(n, dtype=double), new(n, 3), new(n, 9), new(n))
        self.reference, n = new(n, dtype=double), num_atoms
        self._mean = new(n, dtype=double), new(n, 3), new(n, 9), new(n, dtype=double)
        self._energy_std, self._forces_std = new(num_systems, dtype=double), new(n, 3, dtype=dtype)

    def each(self, atoms: Atoms) -> list[tuple[TermSums, Atoms]]:
        """Return the sums of each member, and the atoms with its charges."""
        assert self.sums is not None and atoms.charges is not None
        pieces = zip(*(t.split(self._num_atoms) for t in (*self.sums, atoms.charges) if t is not None), strict=True)
        return [(TermSums(*sums), atoms._replace(charges=charges)) for *sums, charges in pieces]

    def mean(
        self, found: tuple[Tensor, ...], unit: float, order: SpatialOrder | None, ptr: Tensor, stress: bool,
        launch: dict[str, Any],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Launch the kernels of mean and spread; returns energy, forces, virial in eV and charges of the N atoms."""
        n, terms = self._num_atoms, (self.sums or found)[:3]
        options = {
            "M": self._number,
            "LANES": triton.next_power_of_2(self._number),
            "WITH_TERMS": self.sums is not None,
        }
        energy_spread_kernel[(ptr.shape[0] - 1,)](
            found[0],
            unit,
            terms[0],
            ptr,
            self.reference,
            self._energy_std,
            n,
            BLOCK=256,
            enable_fp_fusion=False,
            **options,
            **launch,
        )
        mean_kernel[(-(-n // 64),)](
            *found, unit, *terms, ptr if order is None else order.order, *self._mean, self._forces_std, n, BLOCK=64,
            SORTED=order is not None, STRESS=stress, enable_fp_fusion=False, **options, **launch,
        )  # fmt: skip
        return self._mean

    def spread(self) -> dict[str, Tensor]:
        """Return the spread, as in `Result.properties`."""
        return {"energy_std": self._energy_std.clone(), "forces_std": self._forces_std.clone()}


def _aligned(size: int) -> int:
    """Return the next multiple of 16, since Triton specialises kernels on that."""
    return -(-size // 16) * 16


# --- A potential prepared for fused steps: network, terms, constants, and the check at the first use ---


class FusedModel:
    """A potential prepared for fused kernels: makes steps, loads structures into them, and checks them.

    Args:
        potential: one for which `select.unsupported_reason` is ""; on a CUDA device (or under Triton's
            interpreter).
        precision: "native", "mixed" or "tf32".
    """

    def __init__(self, potential: Potential, precision: str):
        path = fast_path(potential.representation)
        assert potential.head is not None and path is not None
        self.potential, self.precision = potential, precision
        device = potential.device
        if isinstance(path, MemberPath):
            networks = [(m.representation, m.head) for m in potential.members if m.head is not None]
            self.net: Network = path.gpu_members(networks, potential.energy_scale, device, precision)
        else:
            self.net = path.gpu(potential.representation, potential.head, potential.energy_scale, device, precision)
        if "charges" in potential.properties:
            assert isinstance(path, PathWithHeads)
            self.net = path.with_charges(self.net, potential.properties["charges"])
        self.heads = PropertyHeads(potential)
        self.terms = terms_of(potential, compiled=False)
        if isinstance(self.net, ChargeNetwork):
            self.net.charges_read = any(term.uses_charges for term in self.terms)
        self.isolated = exact_isolated_energies(potential)
        self._checked: set[tuple[Any, ...]] = set()

    def build(self, system: System, stress: bool) -> tuple[GraphedStep, StaticInputs]:
        """Return a step that holds a system and its edges; see `StepModel`."""
        step = self.step(system.num_atoms, system.num_systems, system.dtype, stress)
        graphed, inputs = self._loaded(step, system)
        path = (system.dtype, stress, *step.path.values())
        if path not in self._checked:
            with step.without_buffers():  # the reference takes up to another GB
                self._check(step, system)
            self._checked.add(path)
        return graphed, inputs

    def _loaded(
        self, step: FusedStep, system: System, compiled: bool = False
    ) -> tuple[GraphedStep, StaticInputs]:  # fmt: skip
        inputs = StaticInputs(self, step)
        inputs.load(system)
        if not compiled:
            _compile(step)
        graphed = GraphedStep(step)
        divisions = [search.division for search in step.searches.values()]
        graphed.make_room()
        if not compiled and divisions != [search.division for search in step.searches.values()]:
            _compile(step)  # more edges are searched by other kernels
        return graphed, inputs

    def load(self, step: FusedStep, system: System) -> None:
        """Take over all but positions and cell."""
        charge = system.charge.to(self.potential.dtype)
        constant = constant_energies(self.potential, system)
        each = torch.stack([constant_energies(member, system) for member in self.potential.members])
        step.set_composition(system, charge, self.isolated[system.z], constant, each)

    def step(self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, **options: Any) -> FusedStep:
        """Return a step for N atoms in B structures; options as for `FusedStep`."""
        return FusedStep(
            self.net, num_atoms, num_systems, self.potential.cutoff, dtype, stress, terms=self.terms,
            subtract=self.potential.subtract_isolated, energy_shift=self.potential.energy_shift,
            local=self.potential.representation.local, heads=self.heads, **options,
        )  # fmt: skip

    def _check(self, step: FusedStep, system: System) -> None:
        """Run the kernels of a step on its structure or on a cluster of it, and compare.

        Raises:
            RuntimeError: energies, forces or stress differ from the reference.
        """
        whole = system
        potential, system = extract_checked(self.potential, whole, step.stress)
        model = copy.copy(self)
        model.potential, model.terms = potential, terms_of(potential, compiled=False)
        # a separate step: it may be one that other results are read from
        own = model.step(system.num_atoms, system.num_systems, step.dtype, step.stress, **step.path)
        model._loaded(own, system, compiled=system is whole)
        own.launch()
        model._compare(own, reference(potential, system, step.stress), system)

    def _compare(self, step: FusedStep, expected: Result, system: System) -> None:
        out = step.out
        network = out.atom_energies - step.reference
        scale = float((network.abs() + step.isolated.abs()).max())
        virial: Tensor | None = None
        if out.stress is not None:
            virial = out.stress * system.volume.double()[:, None, None]
        found = Result(out.energy, out.forces, None, out.atom_energies)
        require_result(found, virial, expected, self.potential, system, self.precision, scale)
        if out.charges is not None and expected.charges is not None:
            bound = BOUNDS[self.precision][0] * max(1.0, float(expected.charges.abs().max()))
            require_close("charge of an atom, e", out.charges, expected.charges, bound)
        require_properties(step.properties(out.charges), expected, self.potential, system, self.precision)


def _compile(step: Step) -> None:
    """Compile all kernels of a step in parallel; others are compiled when they are launched."""

    def launch() -> None:
        with step._on_device():
            for search in step.searches.values():
                search.count(step.pos, step.cell, step.pbc)
            step.launch()

    if step.rehearses and step.device.type == "cuda":
        compile_side_by_side(launch)
