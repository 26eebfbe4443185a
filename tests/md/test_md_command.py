"""What `torchmdnet2 md` prints at the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ase.build import molecule

from torchmdnet2.cli import main


@pytest.mark.parametrize(("ensemble", "later", "told"), [("nve", 150, True), ("nve", 290, False), ("nvt", 150, False)])
def test_says_why_it_is_colder(capsys, tmp_path, monkeypatch, ensemble, later, told):
    rows = [SimpleNamespace(temperature_K=kelvin) for kelvin in (300, later, later)]
    found = SimpleNamespace(
        replicas=[SimpleNamespace(rows=rows)], drift=0.0, ns_per_day=1.0, files=[], watch=SimpleNamespace(summary=str)
    )
    monkeypatch.setattr("torchmdnet2.md.run_md", lambda *given, **options: found)
    molecule("H2O").write(tmp_path / "water.xyz")
    assert main(["md", "organic-small", str(tmp_path / "water.xyz"), "--ensemble", ensemble]) == 0
    assert ("--ensemble nvt" in capsys.readouterr().out) == told
