"""Errors of the predictions for a batch: the sums that reports are made of, the loss, and its gradients.

Two kernels add up and one differentiates, instead of about 120 small ones. loss.py is the specification. Sums are
formed in float64 and in a fixed order: each program adds up the rows of its block, and the blocks are added one after
the other.

Shapes: B frames and one more structure for the padding, N atoms, K elements, P blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.triton_launch import FUSED_ARITHMETIC, tl, triton

__all__ = ["ROWS", "BatchErrors", "Labels", "Penalties"]

ROWS: dict[str, int | slice] = {
    "energy": 0, "energy_per_atom": 1, "forces": 2, "stress": 3, "loss_energy": 4, "loss_forces": 5, "loss_stress": 6,
    "forces_by_element": slice(8, None),
}  # fmt: skip
"""Rows of the table of sums: [count, Σ|e|, Σe²], and [count, Σℓ, 0] for the losses; 8 + Z: element Z."""

_KINDS = {None: 0, "mse": 1, "l1": 2, "huber": 3}
_BLOCK = 128
_COLUMNS = 64  # that a program of `_totals` adds up, the first 24 being those of rows 0 to 7
_MOST_AT_ONCE = 32  # blocks


@dataclass(frozen=True)
class Penalties:
    """ℓ of each property: "mse", "l1", "huber", None for one without a weight.

    Attributes:
        delta: error at which huber changes from squared to linear, in the label's unit.
        per_atom: the error of the energy is divided by the number of atoms.
    """

    energy: str | None
    forces: str | None
    stress: str | None
    delta: float
    per_atom: bool


@dataclass(eq=False)
class Labels:
    """The labels of a batch, NaN where absent.

    Attributes:
        energy: [B + 1] eV float64, forces: [N, 3] eV/Å, stress: [B + 1, 3, 3] eV/Å³ or None.
        atom_ptr: [B + 2] first atom of each structure.
        element: [N or more] place of each atom's element in the list `elements`, [K] atomic numbers.
    """

    energy: Tensor
    forces: Tensor
    stress: Tensor | None
    atom_ptr: Tensor
    element: Tensor
    elements: Tensor


class BatchErrors:
    """The loss of a batch, by three kernels instead of a hundred; errors are added to a table for reports.

    Args:
        labels: of the batch, contiguous.
        penalties: the definition of the loss.
        sums: [8 + Z, 3] float64, see ROWS; added to in place.
        weights: [3 or more] float64 of the means of energy, forces, stress, and of those that other code computes.
        over_processes: adds up a tensor in place over processes that each have a part of the batch; None: one process.
    """

    def __init__(
        self,
        labels: Labels,
        penalties: Penalties,
        sums: Tensor,
        weights: Tensor,
        over_processes: Callable[[Tensor], Tensor] | None = None,
    ):
        self.labels, self.sums, self.weights, self.over_processes = labels, sums, weights, over_processes
        self.kinds = [_KINDS[kind] for kind in (penalties.energy, penalties.forces, penalties.stress)]
        self.num_frames, self.num_atoms = labels.energy.shape[0], labels.forces.shape[0]
        self.blocks = triton.cdiv(max(self.num_frames, self.num_atoms), _BLOCK)
        self.options = {
            "ENERGY": self.kinds[0], "FORCES": self.kinds[1], "STRESS": self.kinds[2], "DELTA": penalties.delta,
            "PER_ATOM": penalties.per_atom, "BLOCK": _BLOCK, **FUSED_ARITHMETIC,
        }  # fmt: skip
        self.counts = torch.empty(3, dtype=torch.float64, device=labels.energy.device)

    def __call__(self, energy: Tensor, forces: Tensor | None, stress: Tensor | None) -> Tensor:
        """Add the errors of these predictions to the table, once.

        Args:
            energy: [B + 1] eV, forces: [N, 3] eV/Å, stress: [B + 1, 3, 3] eV/Å³; None where not predicted.

        Returns:
            This process's part of the loss, a float64 scalar, to be differentiated once: Σ weight · Σℓ / count, the
            counts being those of all processes.
        """
        stress = None if self.labels.stress is None else stress
        return _Loss.apply(self, *(None if t is None else t.contiguous() for t in (energy, forces, stress)))

    def add(self, energy: Tensor, forces: Tensor | None, stress: Tensor | None) -> Tensor:
        """Add as `__call__`, without a gradient."""
        labels, num_elements = self.labels, self.labels.elements.shape[0]
        width = 24 + 3 * num_elements
        parts = self.sums.new_empty(self.blocks, width)
        _parts[(self.blocks,)](
            parts, *self._rows(energy, forces, stress), labels.element, self.num_frames, self.num_atoms, num_elements,
            HAS_FORCES=forces is not None, HAS_STRESS=stress is not None, ELEMENTS=16, **self.options,
        )  # fmt: skip
        loss, totals = self.sums.new_empty(()), self.sums.new_empty(3)
        _totals[(triton.cdiv(width, _COLUMNS),)](
            self.sums, self.counts, totals, loss, parts, labels.elements, self.weights, width, self.blocks,
            COLUMNS=_COLUMNS, BLOCK=min(_MOST_AT_ONCE, triton.next_power_of_2(self.blocks)), **FUSED_ARITHMETIC,
        )  # fmt: skip
        if self.over_processes is None:
            return loss
        self.over_processes(self.counts)
        return (self.weights[:3] * totals / self.counts.clamp(min=1)).sum()

    def gradients(self, gradient: Tensor, predicted: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of the loss of `add` with respect to its arguments; None for those without a weight."""
        found = [
            None if t is None or kind == 0 else torch.empty_like(t)
            for t, kind in zip(predicted, self.kinds, strict=True)
        ]
        present = {"HAS_FORCES": found[1] is not None, "HAS_STRESS": found[2] is not None}
        places = [self.counts if t is None else t for t in found]
        # the counts are those that `add` has left: one forward pass, then one backward pass
        _gradients[(self.blocks,)](
            *places, *self._rows(*predicted), gradient, self.counts, self.weights, self.num_frames, self.num_atoms,
            **present, **self.options,
        )  # fmt: skip
        return found

    def _rows(self, *predicted: Tensor | None) -> list[Tensor]:
        """Return arguments of the kernels; absent ones are not read."""
        given = [*predicted, self.labels.energy, self.labels.forces, self.labels.stress, self.labels.atom_ptr]
        return [self.counts if t is None else t for t in given]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, errors: BatchErrors, *predicted: Tensor | None) -> Tensor:
        ctx.errors = errors
        ctx.save_for_backward(*predicted)
        return errors.add(*predicted)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.errors.gradients(gradient, ctx.saved_tensors)


@triton.jit
def _errors(predicted, label, row, ok, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Prediction − label of rows [BLOCK, PADDED] in float64, 0 where absent, and which rows are present [BLOCK].

    Differences are formed in the label's precision. A row with an absent component is absent.
    """
    column = tl.arange(0, PADDED)[None, :]
    at = row[:, None] * WIDTH + column
    used = ok[:, None] & (column < WIDTH)
    wanted = tl.load(label + at, used, other=0.0)
    absent = tl.sum(tl.where(tl.abs(wanted) < float("inf"), 0, 1), 1)
    present = ok & (absent == 0)
    error = tl.load(predicted + at, used, other=0.0) - wanted
    return tl.where(present[:, None], error, 0.0).to(tl.float64), present


@triton.jit
def _penalty(e, KIND: tl.constexpr, DELTA: tl.constexpr):
    """ℓ(e)."""
    if KIND == 1:
        loss = e * e
    elif KIND == 2:
        loss = tl.abs(e)
    else:
        size = tl.abs(e)
        loss = tl.where(size >= DELTA, DELTA * (size - 0.5 * DELTA), 0.5 * e * e)
    return loss


@triton.jit
def _slope(e, KIND: tl.constexpr, DELTA: tl.constexpr):
    """dℓ/de."""
    # 0 at 0, as PyTorch's
    sign = tl.where(e > 0, 1.0, tl.where(e < 0, -1.0, 0.0)).to(tl.float64)
    if KIND == 1:
        slope = 2 * e
    elif KIND == 2:
        slope = sign
    else:
        slope = tl.where(tl.abs(e) >= DELTA, DELTA * sign, e)
    return slope


@triton.jit
def _store_row(row, a, b, c):
    tl.store(row, a)
    tl.store(row + 1, b)
    tl.store(row + 2, c)


@triton.jit
def _store_sums(row, e, count):
    """[count, Σ|e|, Σe²]."""
    _store_row(row, count, tl.sum(tl.sum(tl.abs(e), 1), 0), tl.sum(tl.sum(e * e, 1), 0))


@triton.jit
def _store_loss(row, e, count, KIND: tl.constexpr, DELTA: tl.constexpr):
    """[count, Σℓ, 0]; zeros without a weight."""
    if KIND > 0:
        _store_row(row, count, tl.sum(tl.sum(_penalty(e, KIND, DELTA), 1), 0), 0.0)
    else:
        _store_row(row, 0.0, 0.0, 0.0)


@triton.jit
def _atoms(atom_ptr, row, ok):
    """Number of atoms of structures, at least 1, [BLOCK, 1] float64."""
    count = tl.load(atom_ptr + row + 1, ok, other=0) - tl.load(atom_ptr + row, ok, other=0)
    return tl.maximum(count, 1).to(tl.float64)[:, None]


@triton.jit(do_not_specialize=["num_frames", "num_atoms", "num_elements"])
def _parts(
    parts, energy, forces, stress, energy_label, forces_label, stress_label, atom_ptr, element, num_frames, num_atoms,
    num_elements, ENERGY: tl.constexpr, FORCES: tl.constexpr, STRESS: tl.constexpr, DELTA: tl.constexpr,
    PER_ATOM: tl.constexpr, HAS_FORCES: tl.constexpr, HAS_STRESS: tl.constexpr, ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: sums over block p of the structures and of the atoms.

    Args:
        parts: [P, 24 + 3 K] float64: rows 0 to 7 of the table, then the rows of the K elements.
        energy, forces, stress: predictions; ENERGY, FORCES, STRESS: their ℓ, a number of _KINDS.
    """
    part = parts + tl.program_id(0) * (24 + 3 * num_elements)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e, present = _errors(energy, energy_label, row, row < num_frames, 1, 1)
    per_atom = e / _atoms(atom_ptr, row, row < num_frames)
    count = tl.sum(present.to(tl.float64), 0)
    _store_sums(part, e, count)
    _store_sums(part + 3, per_atom, count)
    _store_loss(part + 12, per_atom if PER_ATOM else e, count, ENERGY, DELTA)
    if HAS_FORCES:
        e, present = _errors(forces, forces_label, row, row < num_atoms, 3, 4)
        components = 3 * present.to(tl.float64)
        count = tl.sum(components, 0)
        _store_sums(part + 6, e, count)
        _store_loss(part + 15, e, count, FORCES, DELTA)
        absolute, square = tl.sum(tl.abs(e), 1), tl.sum(e * e, 1)
        own = tl.load(element + row, row < num_atoms, other=-1)
        for first in range(0, num_elements, ELEMENTS):
            k = first + tl.arange(0, ELEMENTS)
            match = k[:, None] == own[None, :]
            to = part + 24 + 3 * k
            tl.store(to, tl.sum(tl.where(match, components[None, :], 0.0), 1), k < num_elements)
            tl.store(to + 1, tl.sum(tl.where(match, absolute[None, :], 0.0), 1), k < num_elements)
            tl.store(to + 2, tl.sum(tl.where(match, square[None, :], 0.0), 1), k < num_elements)
    else:
        # all columns are written: the parts are not zeroed before, and `_totals` reads them all
        _store_row(part + 6, 0.0, 0.0, 0.0)
        _store_row(part + 15, 0.0, 0.0, 0.0)
        for k in range(num_elements):
            _store_row(part + 24 + 3 * k, 0.0, 0.0, 0.0)
    if HAS_STRESS:
        e, present = _errors(stress, stress_label, row, row < num_frames, 9, 16)
        count = 9 * tl.sum(present.to(tl.float64), 0)
        _store_sums(part + 9, e, count)
        _store_loss(part + 18, e, count, STRESS, DELTA)
    else:
        _store_row(part + 9, 0.0, 0.0, 0.0)
        _store_row(part + 18, 0.0, 0.0, 0.0)
    _store_row(part + 21, 0.0, 0.0, 0.0)


@triton.jit
def _column_sums(parts, column, ok, width, num_parts, BLOCK: tl.constexpr):
    """Sums of columns over all parts."""
    k = tl.arange(0, BLOCK)[:, None]
    found = tl.zeros([BLOCK, column.shape[0]], tl.float64)
    for first in range(0, num_parts, BLOCK):
        found += tl.load(
            parts + (first + k) * width + column[None, :], (first + k < num_parts) & ok[None, :], other=0.0
        )
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["width", "num_parts"])
def _totals(
    sums, counts, totals, loss, parts, elements, weights, width, num_parts, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program c: add columns c · COLUMNS … of the parts to the table; the first also makes the loss.

    Args:
        counts, totals: [3] float64, numbers of labels and Σℓ of energy, forces and stress.
        loss: [] float64, with these counts.
        elements: [K] atomic numbers of the elements.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < width
    found = _column_sums(parts, column, ok, width, num_parts, BLOCK)
    of_element = ok & (column >= 24)
    z = tl.load(elements + tl.where(of_element, (column - 24) // 3, 0), of_element, other=0)
    to = sums + tl.where(of_element, 24 + 3 * z + column % 3, column)
    # each column goes to another entry of the table, and each program has other columns
    tl.store(to, tl.load(to, ok, other=0.0) + found, ok)
    if tl.program_id(0) == 0:
        # formed again, since single lanes of `found` cannot be read
        k = tl.arange(0, 4)
        one = k < 3
        count = _column_sums(parts, 12 + 3 * k, one, width, num_parts, BLOCK)
        total = _column_sums(parts, 13 + 3 * k, one, width, num_parts, BLOCK)
        weight = tl.load(weights + k, one, other=0.0)
        tl.store(counts + k, count, one)
        tl.store(totals + k, total, one)
        tl.store(loss, tl.sum(weight * (total / tl.maximum(count, 1.0)), 0))


@triton.jit
def _share(gradient, counts, weights, k):
    """The weight of one label of property k in the loss."""
    return tl.load(gradient) * tl.load(weights + k) / tl.maximum(tl.load(counts + k), 1.0)


@triton.jit
def _store_gradients(to, e, row, ok, share, KIND: tl.constexpr, DELTA: tl.constexpr, WIDTH: tl.constexpr,
                     PADDED: tl.constexpr):  # fmt: skip
    column = tl.arange(0, PADDED)[None, :]
    value = share * _slope(e, KIND, DELTA)  # 0 where absent
    tl.store(to + row[:, None] * WIDTH + column, value.to(to.dtype.element_ty), ok[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["num_frames", "num_atoms"])
def _gradients(
    energy_to, forces_to, stress_to, energy, forces, stress, energy_label, forces_label, stress_label, atom_ptr,
    gradient, counts, weights, num_frames, num_atoms, ENERGY: tl.constexpr, FORCES: tl.constexpr, STRESS: tl.constexpr,
    DELTA: tl.constexpr, PER_ATOM: tl.constexpr, HAS_FORCES: tl.constexpr, HAS_STRESS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: d(gradient · loss)/d(predictions) of block p; arguments as in `_parts` and `_totals`.

    A label has the gradient gradient · weight/count · dℓ/de; the count, of all processes, depends on labels alone. Rows
    without a label get 0, since nothing else writes them.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if ENERGY > 0:
        ok = row < num_frames
        e, _ = _errors(energy, energy_label, row, ok, 1, 1)
        share = _share(gradient, counts, weights, 0)
        if PER_ATOM:
            # ℓ(e/n): its slope is at e/n, and d(e/n)/de = 1/n
            atoms = _atoms(atom_ptr, row, ok)
            _store_gradients(energy_to, e / atoms, row, ok, share / atoms, ENERGY, DELTA, 1, 1)
        else:
            _store_gradients(energy_to, e, row, ok, share, ENERGY, DELTA, 1, 1)
    if HAS_FORCES:
        ok = row < num_atoms
        e, _ = _errors(forces, forces_label, row, ok, 3, 4)
        _store_gradients(forces_to, e, row, ok, _share(gradient, counts, weights, 1), FORCES, DELTA, 3, 4)
    if HAS_STRESS:
        ok = row < num_frames
        e, _ = _errors(stress, stress_label, row, ok, 9, 16)
        _store_gradients(stress_to, e, row, ok, _share(gradient, counts, weights, 2), STRESS, DELTA, 9, 16)
