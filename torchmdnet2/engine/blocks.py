"""Steps of structures that are too large for one step: block by block, in the buffers of one block.

The cell, or the space that the atoms fill, is cut into blocks along the lattice vectors. For each block all atoms that
its energies depend on are gathered, those of the block and those up to (layers + 1) cutoffs away, periodic images as
separate atoms. The network computes the energies of the block's atoms and their gradient in the positions of all that
were gathered; the sums over the blocks are the energies and forces of the structure.

Rows are sorted by distance from the block in cutoffs, and along a space-filling curve. A layer is computed for as many
rows as the energies depend on (`Atoms.shells`); the outermost atoms have no rows. Forces are summed as integers, so
that equal inputs give results that are equal to the bit.

Shapes: N atoms, C atoms of the largest block with what surrounds it, L layers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.interfaces import FIXED_POINT, Atoms, Buffers, Edges, TermLaunch, TermSums
from ..neighbors.neighbor_list import with_room
from ..neighbors.reference import complete_cell
from ..neighbors.triton_search import TritonNeighborSearch
from ..potential.potential import Potential
from ..system import System
from .finish import BROKEN, NO_VOLUME, RESULT_NOT_FINITE
from .fused_step import FusedModel, SpatialOrder
from .graph import compile_side_by_side
from .select import HeldTerm, fast_path, list_cutoffs, terms_of
from .step import FEWEST_EDGES, NOT_FINITE, OVERFLOW, Step
from .timings import Part

__all__ = ["LARGEST_BLOCK", "SMALLEST_BLOCK", "BlockModel", "blocks_unsupported_reason"]


LARGEST_BLOCK, SMALLEST_BLOCK = 2**20, 2**15
"""Atoms of a block with its surroundings that are tried: larger ones save little and take more memory, smaller ones
consist of surroundings mostly."""

_SAMPLE = 2**17  # atoms that tell where to cut
_MARGIN = 1e-4  # Å, for rounding of positions
_ATOMS = 256  # of a program


def blocks_unsupported_reason(potential: Potential) -> str:
    """Return why a potential that fused kernels evaluate cannot be evaluated in blocks, "" if it can."""
    representation = potential.representation
    path = fast_path(representation)
    if path is None or not path.takes_shells or not representation.local:
        return f"the kernels for {type(representation).__name__} evaluate whole structures only"
    if potential.properties:
        return f"the model predicts {', '.join(potential.properties)}, properties of whole structures"
    for term in terms_of(potential, compiled=False):
        if term.by_autograd:
            return f"the prior {term.name} has no kernels"
        if not term.of_edges:
            return f"the prior {term.name} needs more of the structure than the neighbors of each atom"
    return ""


class BlockModel(FusedModel):
    """A potential prepared for steps in blocks.

    Args:
        potential: one that `blocks_unsupported_reason` is "".
        precision: "native", "mixed" or "tf32".
        block_atoms: largest number of atoms of a block with its surroundings.
    """

    def __init__(self, potential: Potential, precision: str, block_atoms: int):
        super().__init__(potential, precision)
        self.block_atoms = block_atoms

    def step(self, num_atoms: int, num_systems: int, dtype: torch.dtype, stress: bool, **options: Any) -> Any:
        """Return a step for one structure of N atoms; options as for `BlockStep`."""
        assert num_systems == 1
        return BlockStep(self, num_atoms, dtype, stress, self.block_atoms, **options)


class BlockStep(Step):
    """Energy, forces and stress of one structure of N atoms, block by block.

    Unlike that of other steps, `launch()` waits for the device and allocates: the blocks depend on the positions, and
    on nothing else, so that results do not depend on earlier steps. It makes room for more edges by itself.

    Args:
        model: network, terms and constants.
        num_atoms: N.
        dtype: of the positions, float32 or float64.
        stress: compute the stress.
        block_atoms: C at most.
        fewest: blocks at least.
        method: of the neighbor search.
        shapes, term_shapes: launch shapes of the network and the terms; None chooses.

    Attributes:
        z [N] int32; isolated and reference [N] float64 eV, which are subtracted from the network's energies and added
            to them.
    """

    waits = True
    measures_graph = True  # `launch` depends on what kernels write

    def __init__(
        self,
        model: FusedModel,
        num_atoms: int,
        dtype: torch.dtype,
        stress: bool,
        block_atoms: int,
        *,
        fewest: int = 1,
        method: str = "auto",
        shapes: Hashable = None,
        term_shapes: Any = None,
    ):
        net: Any = model.net
        super().__init__(num_atoms, 1, dtype, stress, False, net.device)
        potential = model.potential
        self._net, self.block_atoms, self._method = net, block_atoms, method
        self._shapes, self._given_shapes, self._term_shapes = shapes, shapes is not None, term_shapes
        self._terms = model.terms
        self._subtract, self._shift = potential.subtract_isolated, potential.energy_shift
        self._cutoff, self._layers = float(potential.cutoff), int(net.weights.num_layers)
        self._lists = list_cutoffs(self._cutoff, [float(term.cutoff) for term in self._terms])
        self._width = self._cutoff + _MARGIN
        self._reach = max((self._layers + 1) * self._width, *(cutoff + _MARGIN for cutoff in self._lists))

        def new(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.pos, self.cell, self.pbc = new(num_atoms, 3, dtype=dtype), new(1, 3, 3, dtype=dtype), new(1, 3).bool()
        self.z = new(num_atoms, dtype=torch.int32)
        self.isolated, self.reference = new(num_atoms), new(num_atoms)
        self._neutral, self._factor = True, 1.0
        self._frame, self._bounds = new(24), new(1, 6)
        self._counts, self._ends = new(num_atoms, dtype=torch.int32), new(num_atoms, dtype=torch.int32)
        self._fixed = new(num_atoms, 3, dtype=torch.int64)
        self._virial = new(9)
        self._of_terms = new(num_atoms, 3, dtype=torch.float32) if self._terms else None
        self._sums: TermSums | None = None
        self._fewest, self.num_blocks, self._room = fewest, 0, 0
        self._buffers: Buffers | None = None
        self.searches = {}

    # --- sizes ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        """The blocks, in words."""
        blocks = "1 block" if self.num_blocks == 1 else f"{self.num_blocks} blocks"
        return f"in {blocks} of up to {self._room} atoms with their surroundings"

    @property
    def nbytes(self) -> int:
        owners: list[Any] = [self, *self.searches.values(), *([self._order] if self._room else [])]
        held = [value for owner in owners for value in vars(owner).values()]
        held += [*(self._sums or ()), self.out.packed]
        sizes = {t.data_ptr(): t.numel() * t.element_size() for t in held if isinstance(t, Tensor)}
        return sum(sizes.values()) + (0 if self._buffers is None else self._buffers.nbytes)

    @property
    def path(self) -> dict[str, Any]:
        """The choices that decide which kernels run, as arguments of another step with the same kernels."""
        return {
            "shapes": self._shapes,
            "term_shapes": self._term_shapes,
            "method": self.search.method,
            "fewest": min(2, self.num_blocks),
        }

    @contextmanager
    def without_buffers(self) -> Iterator[None]:
        """Within the block, the buffers of the network are freed for other uses."""
        self._buffers = None
        yield
        self._resize(self.search, self.capacity)

    def make_room(self) -> int:
        """Cut the structure into blocks, and set the capacities that the present positions need."""
        self.clear()
        with self._on_device():
            if self._take_frame():
                self._plan()
                found = 0
                for bounds in self._bounds:
                    self._gather(bounds)
                    found += self._shells[0]
                    while self._needs_room(count=True):
                        pass
                self._require_all(found)
        flags = int(self.out.status[0]) & 0xFFFFFFFF
        self.clear()
        return flags

    def clear(self) -> None:
        self.out.status.zero_()

    def search_thin_cells(self) -> bool:
        return False

    def _new_search(self, cutoff: float, capacity: int, method: str, thin: bool) -> TritonNeighborSearch:
        return TritonNeighborSearch(
            self._room, 1, cutoff, capacity, self.device, dtype=torch.float32, method=method, periodic=False,
            ordered=cutoff == self._cutoff,
        )  # fmt: skip

    def _resize(self, search: TritonNeighborSearch, capacity: int) -> None:
        if search is self.search:
            self._buffers = None  # free the old before the new
        if capacity != search.capacity:
            search.set_capacity(capacity)
        if search is self.search:
            self._buffers = self._net.allocate(self._room, capacity, self._shapes, 0)

    def _make_buffers(self, num_atoms: int) -> None:
        """Make buffers for blocks of so many atoms with what surrounds them."""
        capacities = {cutoff: search.capacity for cutoff, search in self.searches.items()}
        self._buffers, self.searches = None, {}
        self._room, classes = num_atoms, self._layers + 3

        def new(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        n = self._room
        self._shell, self._atom = new(n, dtype=torch.int32), new(n, dtype=torch.int64)
        self._pos, self._z = new(n, 3), new(n, dtype=torch.int32)
        self._order = SpatialOrder(n, classes, self._pos, self._z)
        self._free = new(classes, 3, 3), new(classes, 3).bool()
        self._places, self._zeros = torch.arange(n, dtype=torch.int32, device=self.device), new(n, dtype=torch.int32)
        self._factors = torch.full((n,), self._factor, device=self.device)
        if self._terms:
            self._sums = TermSums(new(n), new(n, 3, dtype=torch.float32), new(n, 9, dtype=torch.float32))
        self._term_shapes = self._term_shapes or tuple(term.launch_shapes(n) for term in self._terms)
        self._held = [HeldTerm(term, self._lists, n) for term in self._terms]
        if not self._given_shapes:
            # PyTorch lies between the kernels
            self._shapes = replace(self._net.shapes_for(self.block_atoms, self.z), overlap=0)
        self._make_searches({c: capacities.get(c, FEWEST_EDGES) for c in self._lists}, self._method, False)
        self._resize(self.search, self.capacity)

    # --- inputs --------------------------------------------------------------------------------------------------

    def set_composition(
        self, system: System, charge: Tensor, isolated: Tensor, reference: Tensor, of_members: Tensor | None = None
    ) -> None:  # fmt: skip
        """Set elements, charge and reference energies, as `FusedStep.set_composition`."""
        self.z.copy_(system.z)
        self.pbc.copy_(system.pbc)
        self.isolated.copy_(isolated)
        self.reference.copy_(reference)
        self._neutral = bool(charge.float() == 0)
        self._factor = float(self._net.charge_input(charge.double()))
        self.num_blocks, self._room = 0, 0
        self._buffers, self.searches = None, {}

    # --- blocks --------------------------------------------------------------------------------------------------

    def _take_frame(self) -> bool:
        """Read the cell. Returns whether it can be used."""
        cell, pbc = self.cell[0].double().cpu(), self.pbc[0].cpu()
        full = complete_cell(cell, pbc)
        volume = float(torch.linalg.det(full).abs())
        if not 0 < volume < float("inf"):
            self.out.status[0] |= NOT_FINITE
            return False
        inverse = torch.linalg.inv(full)
        self._inverse, self._heights, self._periodic = inverse, 1 / inverse.norm(dim=0), pbc
        self._frame.copy_(torch.cat([full.flatten(), inverse.T.flatten(), self._heights, pbc.double()]))
        return True

    def _plan(self) -> None:
        """Cut the structure into the fewest blocks that fit, and make buffers for them."""
        step = -(-self.num_atoms // _SAMPLE)
        fractions = self.pos[::step].double() @ self._inverse.to(self.device)
        periodic = self._periodic.to(self.device)
        fractions = torch.where(periodic, fractions - fractions.floor(), fractions)
        fractions = fractions[fractions.isfinite().all(1)]
        infinity = float("inf")
        low = [0.0 if p else -infinity for p in self._periodic.tolist()]
        high = [1.0 if p else infinity for p in self._periodic.tolist()]
        limit = self.block_atoms - self.block_atoms // 24  # `with_room` fits then
        parts = max(self._fewest, -(-self.num_atoms // limit))
        while True:
            boxes = _cut(fractions, low, high, self._heights.to(self.device), parts)
            self._bounds = torch.tensor(boxes, dtype=torch.float64, device=self.device)
            counts = [0]
            for bounds in self._bounds:
                counts.append(self._count(bounds))
                if counts[-1] > limit and parts <= self.num_atoms:
                    break
            most = max(counts)
            if most <= limit:
                break
            if parts > self.num_atoms:
                raise ValueError(
                    f"blocks of {self.block_atoms} atoms are too small: the smallest block and all within "
                    f"{self._reach:.4g} Å are {most} atoms; give block_atoms of at least {with_room(most + most // 16)}"
                )
            parts += max(1, parts // 8)
        self.num_blocks = len(boxes)
        if most > self._room or not self._room:
            self._make_buffers(min(with_room(most), self.block_atoms))
            if self.device.type == "cuda":
                compile_side_by_side(self.launch_any)

    def _count(self, bounds: Tensor) -> int:
        """Count the atoms of a block and what surrounds it; waits for the device."""
        grid = (triton.cdiv(self.num_atoms, _ATOMS),)
        count_kernel[grid](
            self.pos, self._frame, bounds, self._counts, self.num_atoms, self._reach, BLOCK=_ATOMS,
            enable_fp_fusion=False,
        )  # fmt: skip
        torch.cumsum(self._counts, 0, dtype=torch.int32, out=self._ends)
        return int(self._ends[-1])

    def _gather(self, bounds: Tensor) -> int:
        """Gather and sort the atoms of a block and what surrounds it, and return how many they are; waits for the
        device."""
        total = self._count(bounds)
        self._shell.fill_(self._layers + 2)
        self._pos.zero_()
        gather_kernel[(triton.cdiv(self.num_atoms, _ATOMS),)](
            self.pos, self.z, self._frame, bounds, self._counts, self._ends, self._pos, self._z, self._atom,
            self._shell, self.num_atoms, self._room, self._reach, self._width, LAST=self._layers + 1, BLOCK=_ATOMS,
            enable_fp_fusion=False,
        )  # fmt: skip
        self._order(self._shell, *self._free)
        within = [(self._shell <= k).sum() for k in range(self._layers + 1)]
        self._shells: tuple[int, ...] = tuple(torch.stack(within).tolist())
        padding = (self._places >= total).int()
        for search in self.searches.values():
            search.set_batch(padding)
        return total

    def _needs_room(self, count: bool = False) -> bool:
        """Search the neighbors of what was gathered, or count them; waits for the device.

        Returns:
            Whether there were too many, for which there is room now.
        """
        free = self._free[0][:1], self._free[1][:1]
        for search in self.searches.values():
            (search.count if count else search)(self._order.pos, *free)
        needed = torch.cat([search.needed for search in self.searches.values()]).tolist()
        short = False
        for search, edges in zip(self.searches.values(), needed, strict=True):
            if edges > search.capacity:
                self._grow(search, torch.tensor(edges))
                short = True
        self.out.status[1:] = torch.maximum(self.out.status[1:], self.search.needed)
        if short:
            self.out.status[0] &= ~OVERFLOW
        return short

    def _require_all(self, found: int) -> None:
        """Flag positions that are in no block."""
        if found != self.num_atoms:
            self.out.status[0] |= NOT_FINITE

    # --- launches ------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        with self._on_device():
            if self._take_frame():
                self._plan()
                self._add_blocks()
            self._finish()

    def launch_any(self) -> None:
        """Launch all kernels of a block, whatever the numbers in the buffers: to compile them."""
        self._gather(self._bounds[0])
        self._needs_room()
        self._shells = tuple(range(1, self._layers + 2))
        self._add_block(self._layers + 2)

    def _add_blocks(self) -> None:
        """Compute all blocks."""
        self._fixed.zero_()
        self._virial.zero_()
        found = 0
        for bounds in self._bounds:
            total = self._gather(bounds)
            if self._shells[0]:
                while self._needs_room():
                    pass
                self._add_block(total)
            found += self._shells[0]
        self._require_all(found)

    def _add_block(self, total: int) -> None:
        """Compute the block that was gathered, and add it to the sums."""
        own, rows = self._shells[0], self._shells[-1]
        b: Any = self._buffers
        order, net = self._order, self._net
        ptr = torch.tensor([0, rows], dtype=torch.int32, device=self.device)
        atoms = Atoms(order.z, self._factors[:rows], self._zeros[:rows], ptr, order.pos, shells=self._shells)
        lists = {
            cutoff: Edges(search.row_ptr, search.sender, search.vectors, cutoff)
            for cutoff, search in self.searches.items()
        }
        row_ptr = self.search.row_ptr
        net.run(b, self._shapes, atoms, lists[self._cutoff], True)
        place = self._atom.index_select(0, order.order)[:total]
        energies = b.energy[:own].double() * net.unit
        mine = place[:own]
        if self._subtract:
            energies -= self.isolated[mine]
            if self._neutral:  # an atom without neighbors has exactly no energy
                energies.masked_fill_(row_ptr[1 : own + 1] == row_ptr[:own], 0.0)
        energies += self.reference[mine]
        self._virial += b.virial[:rows].sum(0, dtype=torch.float64) * net.unit
        if self._sums is not None:
            assert self._of_terms is not None
            self._add_terms(atoms._replace(charge_input=self._factors[:own], shells=None), lists)
            energies += self._sums.energy[:own]
            self._virial += self._sums.virial[:own].sum(0, dtype=torch.float64)
            self._of_terms.index_copy_(0, mine, self._sums.forces[:own])
        self.out.atom_energies.index_copy_(0, mine, energies)
        self._fixed.index_add_(0, place, b.forces[:total])

    def _add_terms(self, atoms: Atoms, lists: dict[float, Edges]) -> None:
        assert self._sums is not None
        for k, held in enumerate(self._held):
            assert held.list_cutoff is not None
            launch = TermLaunch(k == 0, True, True, self._term_shapes[k], {"PDL": 0})
            held.term.run(held.buffers, atoms, lists[held.list_cutoff], self._sums, launch)

    def _finish(self) -> None:
        """Write the results of the structure, NaN if they cannot be right."""
        out, virial = self.out, self._virial.view(3, 3)
        out.energy.copy_(out.atom_energies.sum() + self._shift)
        forces = self._fixed.double() * (self._net.unit / FIXED_POINT)
        if self._of_terms is not None:
            forces += self._of_terms
        out.forces.copy_(forces)
        # gradients that do not fit into integers are missing in the forces, and the virial is NaN
        finite = out.energy.isfinite().all() & out.forces.isfinite().all() & virial.isfinite().all()
        out.status[0] |= (~finite & (out.status[0] & BROKEN == 0)) * RESULT_NOT_FINITE
        fields = [out.energy, out.forces, out.atom_energies]
        if out.stress is not None:
            volume = torch.linalg.det(self.cell[0].double()).abs()
            out.status[0] |= (volume == 0) * NO_VOLUME
            out.stress.copy_((virial + virial.T) / (2 * torch.where(volume == 0, torch.nan, volume)))
            fields.append(out.stress)
        nan = torch.where(out.status[0] & (BROKEN | RESULT_NOT_FINITE) == 0, 0.0, torch.nan)
        for field in fields:
            field += nan

    def parts(self) -> list[Part]:
        return []

    def properties(self, charges: Tensor | None) -> dict[str, Tensor]:
        return {}


def _cut(fractions: Tensor, low: list[float], high: list[float], heights: Tensor, parts: int) -> list[list[float]]:
    """Cut a box into parts of about as many atoms, each time across its longest side.

    Args:
        fractions: [n, 3] coordinates of the atoms in it, in lattice vectors.
        low, high: of the box.
        heights: [3] Å, of the cell.

    Returns:
        Lower and upper limits of each part, six numbers.
    """
    if parts <= 1 or len(fractions) < 2:
        return [[*low, *high]]
    first, n = parts // 2, len(fractions)
    ordered = fractions.sort(0).values
    # a few atoms far away do not decide which side is the longest
    sides = (ordered[n - 1 - n // 20] - ordered[n // 20]) * heights
    for axis in sides.argsort(descending=True).tolist():
        places = ordered[:, axis].unique()
        if len(places) == 1:
            continue
        rank = max(1, n * first // parts)
        below = min(int(torch.searchsorted(places, ordered[rank - 1, axis])), len(places) - 2)
        at = float((places[below] + places[below + 1]) / 2)
        if at <= float(places[below]):  # no number lies between
            at = float(places[below + 1])
        left = fractions[:, axis] < at
        middle_high, middle_low = list(high), list(low)
        middle_high[axis] = middle_low[axis] = at
        return [
            *_cut(fractions[left], low, middle_high, heights, first),
            *_cut(fractions[~left], middle_low, high, heights, parts - first),
        ]
    return [[*low, *high]]


# --- Which atoms and images are in a block and around it ---
#
# frame [24] float64: the complete cell (rows), its inverse (columns), heights, and whether each direction is periodic.
# bounds [6] float64: lower and upper limits of the block, in lattice vectors. An atom is in one block only.


@triton.jit
def fraction(x, y, z, frame, k: tl.constexpr):
    """Coordinate along lattice vector k, in [0, 1) where periodic, and the whole cells that were subtracted."""
    f = x * tl.load(frame + 9 + 3 * k) + y * tl.load(frame + 10 + 3 * k) + z * tl.load(frame + 11 + 3 * k)
    away = tl.where(tl.load(frame + 21 + k) != 0.0, tl.floor(f), 0.0)
    rounded = (f - away >= 1.0) & (away != 0.0)  # a coordinate just below 0
    return tl.where(rounded, 0.0, f - away), tl.where(rounded, away + 1.0, away)


@triton.jit
def images_along(f, frame, bounds, reach, k: tl.constexpr):
    """First image that is in a block or within `reach` of it along lattice vector k, and how many are."""
    margin = reach / tl.load(frame + 18 + k)
    low = tl.ceil(tl.load(bounds + k) - margin - f)
    high = tl.ceil(tl.load(bounds + 3 + k) + margin - f)
    periodic = tl.load(frame + 21 + k) != 0.0
    images = high - low < 1e6  # not if NaN
    number = tl.where(images, high - low, 0.0).to(tl.int32)
    inside = ((low <= 0.0) & (high > 0.0)).to(tl.int32)
    return tl.where(periodic, tl.where(images, low, 0.0), 0.0), tl.where(periodic, number, inside)


@triton.jit
def position(pos, i, mask):
    x = tl.load(pos + i * 3, mask, other=0.0).to(tl.float64)
    y = tl.load(pos + i * 3 + 1, mask, other=0.0).to(tl.float64)
    z = tl.load(pos + i * 3 + 2, mask, other=0.0).to(tl.float64)
    return x, y, z


@triton.jit(do_not_specialize=["num_atoms"])
def count_kernel(pos, frame, bounds, counts, num_atoms, reach, BLOCK: tl.constexpr):
    """counts [N]: images of each atom in a block and within `reach` Å of it."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_atoms
    x, y, z = position(pos, i, mask)
    _first, n0 = images_along(fraction(x, y, z, frame, 0)[0], frame, bounds, reach, 0)
    _first, n1 = images_along(fraction(x, y, z, frame, 1)[0], frame, bounds, reach, 1)
    _first, n2 = images_along(fraction(x, y, z, frame, 2)[0], frame, bounds, reach, 2)
    tl.store(counts + i, n0 * n1 * n2, mask)


@triton.jit
def distance(g, frame, bounds, k: tl.constexpr):
    """How far an image is outside of the limits along lattice vector k, Å; and whether it is within them."""
    low, high = tl.load(bounds + k), tl.load(bounds + 3 + k)
    return tl.maximum(low - g, g - high) * tl.load(frame + 18 + k), (g >= low) & (g < high)


@triton.jit(do_not_specialize=["num_atoms", "capacity"])
def gather_kernel(
    pos, z, frame, bounds, counts, ends, pos_out, z_out, atom_out, shell_out, num_atoms, capacity, reach, width,
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the images that `count_kernel` counted, those of an atom together.

    Args:
        ends: [N] cumulative counts.
        pos_out [C, 3] float64, z_out [C] int32, atom_out [C] int64: position, element, and atom of each image.
        shell_out: [C] int32, 0 in the block, k within k widths of it, LAST further away.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_atoms
    x, y, w = position(pos, i, mask)
    f0, away0 = fraction(x, y, w, frame, 0)
    f1, away1 = fraction(x, y, w, frame, 1)
    f2, away2 = fraction(x, y, w, frame, 2)
    first0, _n = images_along(f0, frame, bounds, reach, 0)
    first1, n1 = images_along(f1, frame, bounds, reach, 1)
    first2, n2 = images_along(f2, frame, bounds, reach, 2)
    n1, n2 = tl.maximum(n1, 1), tl.maximum(n2, 1)
    number = tl.load(counts + i, mask, other=0)
    start = tl.load(ends + i, mask, other=0) - number
    element = tl.load(z + i, mask, other=0)
    for r in range(0, tl.max(number, 0)):
        s0, s1, s2 = first0 + r // (n1 * n2), first1 + r // n2 % n1, first2 + r % n2
        d0, in0 = distance(f0 + s0, frame, bounds, 0)
        d1, in1 = distance(f1 + s1, frame, bounds, 1)
        d2, in2 = distance(f2 + s2, frame, bounds, 2)
        away = tl.maximum(tl.maximum(d0, d1), tl.maximum(d2, 0.0))
        shell = tl.minimum(tl.floor(away / width) + 1.0, LAST).to(tl.int32)
        shell = tl.where(in0 & in1 & in2, 0, shell)
        s0, s1, s2 = s0 - away0, s1 - away1, s2 - away2
        to = start + r
        use = (r < number) & (to < capacity)
        for k in tl.static_range(3):
            at = x if k == 0 else (y if k == 1 else w)
            at += s0 * tl.load(frame + k) + s1 * tl.load(frame + 3 + k) + s2 * tl.load(frame + 6 + k)
            tl.store(pos_out + to.to(tl.int64) * 3 + k, at, use)
        tl.store(z_out + to, element, use)
        tl.store(atom_out + to, i, use)
        tl.store(shell_out + to, shell, use)
