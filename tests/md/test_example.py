"""examples/md_replicas.py on a tiny model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ase.io import write

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "md_replicas.py"


def test_replicas(model_file, water, tmp_path, monkeypatch, capsys):
    write(tmp_path / "water.xyz", water)
    arguments = [model_file, tmp_path / "water.xyz", "--replicas", 2, "--steps", 20, "--temperature", 100]
    monkeypatch.setattr(sys, "argv", list(map(str, ["md_replicas.py", *arguments, "--output", tmp_path / "r"])))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "replica 1:" in printed and "22 frames" in printed and "ns/day" in printed
