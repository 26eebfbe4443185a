"""Gather a batch of packed frames by one kernel: the number of launches decides the time of a small training step.

`PackedFrames.reference_batch` (training/steps/packed_frames.py) is its specification, to the bit.

Shapes: B slots for frames, capacities of N atoms and P pairs, K elements, M = N + K atoms. `chosen` has the number of
the frame in each slot; −1, or one beyond the last, is a frame without rows. Slot B has the padding: it takes its values
from the last row of each table.

A program works for one slot. It adds up the sizes of the slots before it, which says where its rows begin, so that no
program waits for another. Rows of a slot are taken in turns of CHUNK, shared by the programs of the second axis; those
of slot B, which may be many, also by further programs of the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...core.triton_launch import tl, triton

__all__ = ["gather_frames"]

CHUNK = 128
"""Atoms or pairs that a program holds at a time."""
PROGRAMS = 2048
"""Largest number of programs for fewer frames; each adds up sizes again."""


def gather_frames(chosen: Tensor, frames: Mapping[str, Tensor | None], batch: Mapping[str, Tensor | None]) -> None:
    """Write a batch; nothing is read back from the device, and results do not vary from run to run.

    Args:
        chosen: [B] frame numbers, contiguous.
        frames: tables of a data set, by the names of the kernel's arguments before `out_z`; all contiguous.
        batch: tensors to write, by the names of those from `out_z` on.

    stress and out_stress may be None.
    """
    slots = len(chosen)
    num_atoms, num_pairs = (_length(batch[name]) for name in ("out_forces", "out_r"))
    shares = max(1, min(triton.cdiv(num_pairs, CHUNK * max(slots, 1)), PROGRAMS // (slots + 1)))
    fillers = 1 + slots // 8  # the room that is not needed is about a tenth of all
    _gather[(slots + fillers, shares)](
        chosen,
        **frames,
        **batch,
        B=slots,
        N=num_atoms,
        P=num_pairs,
        K=_length(frames["elements"]),
        num_frames=_length(frames["energy"]) - 1,
        atoms_in_table=_length(frames["atom"]) - 1,
        pairs_in_table=_length(frames["pair"]) - 1,
        CHUNK=CHUNK,
        num_warps=4,
        enable_fp_fusion=False,  # numbers are copied
    )


def _length(x: Tensor | None) -> int:
    assert x is not None
    return x.shape[0]


@triton.jit
def _frame_of(chosen, slot, B, num_frames):
    """Frames of slots; for slots from B on, and for slots without a frame, the one after the last."""
    frame = tl.load(chosen + slot, mask=slot < B, other=-1).to(tl.int64)
    return tl.where((frame < 0) | (frame > num_frames), num_frames, frame)


@triton.jit
def _copy(out, to, x, source, here, WIDTH: tl.constexpr):
    """Rows x[source] to out[to]."""
    for c in tl.static_range(WIDTH):
        value = tl.load(x + source * WIDTH + c, mask=here)
        tl.store(out + to * WIDTH + c, value, mask=here)


@triton.jit
def _lone_atoms(z, element, structure, row_ptr, charge, elements, num_pairs, B, N, K, CHUNK: tl.constexpr):
    """The last atoms and structures: one of each element, without edges."""
    for start in range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)
        here = k < K
        tl.store(element + N + k, k.to(tl.int64), mask=here)
        _copy(z, N + k, elements, k, here, 1)
        tl.store(structure + N + k, (B + 1 + k).to(tl.int64), mask=here)
        tl.store(row_ptr + N + 1 + k, tl.full((CHUNK,), 0, tl.int32) + 2 * num_pairs.to(tl.int32), mask=here)
        tl.store(charge + B + 1 + k, tl.zeros((CHUNK,), charge.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize=["B", "N", "P", "K", "num_frames", "atoms_in_table", "pairs_in_table"],
)
def _gather(
    chosen,
    # tables
    atom_sizes, atom_offsets, pair_sizes, pair_offsets, elements, atom, pair, edge,
    r, charge, volume, energy, forces, stress,
    # batch
    out_z, out_element, out_structure, out_first, out_second, out_count, out_row_ptr, out_sender, out_pair,
    out_r, out_pair_structure, out_atom_ptr, out_pair_ptr, out_charge, out_volume, out_energy, out_forces, out_stress,
    B, N, P, K, num_frames, atoms_in_table, pairs_in_table, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gather the rows of one slot, or a part of them."""
    slot = tl.minimum(tl.program_id(0), B)
    begin = (tl.program_id(0) - slot) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(1)
    if slot == B:
        step *= tl.num_programs(0) - B

    before = tl.arange(0, 2 * CHUNK)
    atoms_before = tl.zeros((2 * CHUNK,), tl.int64)
    pairs_before = tl.zeros((2 * CHUNK,), tl.int64)
    for k in range(0, slot, 2 * CHUNK):
        other = _frame_of(chosen, k + before, slot, num_frames)  # those from this slot on have no rows here
        atoms_before += tl.load(atom_sizes + other)
        pairs_before += tl.load(pair_sizes + other)
    first_atom, first_pair = tl.sum(atoms_before), tl.sum(pairs_before)

    frame = _frame_of(chosen, slot, B, num_frames)
    num_atoms, num_pairs = tl.load(atom_sizes + frame), tl.load(pair_sizes + frame)
    # no more than there is room for; slot B: all of it
    atoms_left, pairs_left = N - first_atom, P - first_pair
    num_atoms = tl.where(slot < B, tl.minimum(num_atoms, atoms_left), atoms_left)
    num_pairs = tl.where(slot < B, tl.minimum(num_pairs, pairs_left), pairs_left)

    if begin == 0:
        tl.store(out_atom_ptr + slot, first_atom.to(tl.int32))
        tl.store(out_pair_ptr + slot, first_pair.to(tl.int32))
        tl.store(out_charge + slot, tl.load(charge + frame))
        tl.store(out_volume + slot, tl.load(volume + frame))
        tl.store(out_energy + slot, tl.load(energy + frame))
        if stress is not None:
            c = tl.arange(0, 16)
            tl.store(out_stress + slot * 9 + c, tl.load(stress + frame * 9 + c, mask=c < 9), mask=c < 9)
        if slot == 0:
            tl.store(out_row_ptr, 0)
        if slot == B:
            tl.store(out_atom_ptr + B + 1, N)
            tl.store(out_pair_ptr + B + 1, P)
            tl.store(out_count, first_pair.to(tl.int32))
            _lone_atoms(
                out_z, out_element, out_structure, out_row_ptr, out_charge, elements, first_pair, B, N, K, CHUNK
            )

    last = atoms_in_table.to(tl.int64)
    offset = tl.load(atom_offsets + frame)
    for chunk in range(begin, tl.cdiv(num_atoms, CHUNK), step):
        i = chunk * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
        here = i < num_atoms
        to, source = first_atom + i, tl.minimum(offset + i, last)
        element = tl.load(atom + 2 * source, mask=here, other=0).to(tl.int64)
        edges_until = tl.load(atom + 2 * source + 1, mask=here, other=0)
        tl.store(out_element + to, element, mask=here)
        _copy(out_z, to, elements, element, here, 1)
        tl.store(out_structure + to, tl.full((CHUNK,), 0, tl.int64) + slot, mask=here)
        tl.store(out_row_ptr + to + 1, (2 * first_pair + edges_until).to(tl.int32), mask=here)
        _copy(out_forces, to, forces, source, here, 3)

    last = pairs_in_table.to(tl.int64)
    offset = tl.load(pair_offsets + frame)
    for chunk in range(begin, tl.cdiv(num_pairs, CHUNK), step):
        i = chunk * CHUNK + tl.arange(0, CHUNK).to(tl.int64)
        here = i < num_pairs
        to, source = first_pair + i, tl.minimum(offset + i, last)
        used = i < tl.where(slot < B, num_pairs, 0)
        first = tl.load(pair + 2 * source, mask=used, other=0) + first_atom
        second = tl.load(pair + 2 * source + 1, mask=used, other=0) + first_atom
        tl.store(out_first + to, tl.where(used, first, 0).to(tl.int32), mask=here)
        tl.store(out_second + to, tl.where(used, second, 0).to(tl.int32), mask=here)
        tl.store(out_pair_structure + to, tl.full((CHUNK,), 0, tl.int64) + slot, mask=here)
        _copy(out_r, to, r, source, here, 3)
        # two edges for each pair
        i = 2 * chunk * CHUNK + tl.arange(0, 2 * CHUNK).to(tl.int64)
        here = i < 2 * num_pairs
        to, source = 2 * first_pair + i, tl.minimum(2 * offset + i, 2 * last)
        sender = tl.load(edge + 2 * source, mask=here, other=0)
        signed = tl.load(edge + 2 * source + 1, mask=here, other=0)
        tl.store(out_sender + to, (sender + first_atom).to(tl.int32), mask=here)
        signed = tl.where(signed < 0, signed - first_pair, signed + first_pair)
        tl.store(out_pair + to, signed.to(tl.int32), mask=here)
