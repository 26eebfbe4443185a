"""The kernels of errors and loss against plain PyTorch, in Triton's interpreter; and when they are used."""

from __future__ import annotations

from pathlib import Path

from interpreter import needs_triton, run_checks

from torchmdnet2.training.steps.loss import UNITS
from torchmdnet2.training.steps.loss_kernels import ROWS


@needs_triton
def test_in_the_interpreter():
    run_checks(Path(__file__).with_name("loss_kernel_checks.py"))


def test_every_error_of_packed_frames_has_a_place():
    packed = [name for name in UNITS if name not in ("dipole", "charges", "relative_energy")]
    losses = [f"loss_{name}" for name in packed if name != "energy_per_atom"]
    assert sorted(ROWS) == sorted([*packed, *losses, "forces_by_element"])
    rows = [row for row in ROWS.values() if isinstance(row, int)]
    assert len(set(rows)) == len(rows) and max(rows) < ROWS["forces_by_element"].start
