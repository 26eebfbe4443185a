"""Jumps of the conserved energy are told, once for each replica."""

from __future__ import annotations

import warnings

import pytest

from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md import output as conservation
from torchmdnet2.md.output import Conservation, EnergyJumpWarning, TableRow


def rows(step, *conserved):
    return [TableRow(step, 0.001 * step, 300.0, energy, 0.0, energy) for energy in conserved]


def test_a_jump_is_told_once():
    look = Conservation(25, 2)
    assert look.limit == pytest.approx(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(100):  # a slow drift
            look(rows(step, -10 + 0.05 * step, -10.0))
    with pytest.warns(EnergyJumpWarning, match=r"at 0\.100 ps the conserved energy of replica 1 jumped by -0\.20 eV"):
        look(rows(100, -5.0, -10.2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look(rows(101, -5.0, -11.0))
    with pytest.warns(EnergyJumpWarning, match="replica 0 jumped by"):
        look(rows(102, -4.0, -11.0))


@pytest.mark.parametrize("ensemble", ["nve", "nvt"])
def test_a_run_is_looked_at(potential, water, tmp_path, monkeypatch, ensemble):
    """Good dynamics says nothing; with a limit below its fluctuations there is a warning that says when."""
    options = MDOptions(steps=40, ensemble=ensemble, temperature=300.0, every=5, output=str(tmp_path / "run"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnergyJumpWarning)
        run_md(potential, water, options)
    monkeypatch.setattr(conservation, "JUMP", 1e-9)
    with pytest.warns(EnergyJumpWarning, match=r"at 0\.00\d ps the conserved energy jumped by [+-]0\.00 eV"):
        run_md(potential, water, options)
