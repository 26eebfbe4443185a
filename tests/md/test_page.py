"""`md --report`: a page that stands alone and says what the trajectory and the table say."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.io import read

from torchmdnet2.checkpoint import read_header
from torchmdnet2.cli import main
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.page import MOST_FRAMES, distances, read_frames


@pytest.fixture
def model(tmp_path, potential):
    from torchmdnet2.checkpoint import save

    save(potential, tmp_path / "m.tmn")
    return tmp_path / "m.tmn"


def carried(page: str) -> dict:
    (text,) = re.findall(r'<script id="frames" type="application/json">(.*?)</script>', page)
    return json.loads(text)


def test_the_page_of_a_molecule(model, tmp_path, drawn):
    molecule("H2O2").write(tmp_path / "start.xyz")
    command = ["md", model, tmp_path / "start.xyz", "--steps", 40, "--every", 10, "--temperature", 20, "--report"]
    assert main([*map(str, command), "--output", str(tmp_path / "run")]) in (0, None)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    frames, found = read(tmp_path / "run.xyz", ":"), carried(page)
    assert found["times"] == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02])
    lines = found["xyz"].splitlines()
    assert len(lines) == 5 * (4 + 2) and lines[0] == "4"
    last = np.array([line.split()[1:] for line in lines[-4:]], dtype=float)
    np.testing.assert_allclose(last, frames[-1].positions, atol=6e-4)
    assert found["cell"] is None
    # 3Dmol.js makes its canvas as large as the box with its border, and would cover one
    assert "border" not in re.findall("#movie {(.*?)}", page)[0]
    assert "H2O2" in page and "H–O" in page and "O–O" in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page.replace("$3Dmol", ""))  # nothing from elsewhere


def test_the_page_names_the_model_and_the_start(model, tmp_path):
    """With level, inner model and seed, so that a page says what it shows."""
    molecule("H2O2", cell=[9, 9, 9], pbc=True).write(tmp_path / "start.extxyz")
    start = f"{tmp_path / 'start.extxyz'}@0"
    command = ["md", model, start, "--steps", "4", "--report", "--isolated", "--minimize", "--seed", "7"]
    assert main([*map(str, command), "--inner", "springs", "--output", str(tmp_path / "run")]) in (0, None)
    page = (tmp_path / "run.html").read_text(encoding="utf-8").replace("<wbr>", "")
    rows = dict(re.findall("<td class=text>(.*?)</td><td class=text>(.*?)</td>", page))
    checksum = read_header(model)["sha256"][:12]
    assert rows == {
        "model": f"{model}, checksum {checksum}…",
        "inner model": "springs",
        "start": f"{start}, without its cell, relaxed",
        "seed": "7",
    }


def test_the_page_of_a_model_in_memory(potential, tmp_path):
    run_md(potential, molecule("H2O2"), MDOptions(steps=2, report=True, output=str(tmp_path / "run")))
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "a model in memory" in page and "a structure in memory" in page


def test_a_crystal_has_its_cell_and_a_flat_distribution_far_away(model, tmp_path, drawn):
    atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True)
    atoms.symbols[:] = ["O", "H"] * 4
    atoms.write(tmp_path / "start.extxyz")
    command = ["md", model, tmp_path / "start.extxyz", "--steps", 10, "--temperature", 1, "--report"]
    assert main([*map(str, command), "--output", str(tmp_path / "run")]) in (0, None)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert carried(page)["cell"] == pytest.approx([5.6, 5.6, 5.6, 90, 90, 90])
    assert "Radial distribution" in page and "density (g/cm³)" in page and "Mean pressure" not in page


def test_constant_pressure_shows_the_cell_and_density(model, tmp_path, drawn):
    atoms = molecule("H2O", cell=[5, 5, 6], pbc=True)
    atoms.write(tmp_path / "start.extxyz")
    command = ["md", model, tmp_path / "start.extxyz", "--steps", 10, "--report", "--ensemble", "npt"]
    assert main([*map(str, command), "--output", str(tmp_path / "run")]) in (0, None)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "c (Å)" in page and "Mean pressure" in page and "density over time" in page


def test_radial_distribution_of_an_ideal_gas_and_of_molecules():
    """1 at any distance whatever the cells; per pair of elements; integrals are coordination numbers."""
    rng = np.random.default_rng(0)
    gas = [Atoms("He150Ne50", rng.random((200, 3)) * edge, cell=[edge] * 3, pbc=True) for edge in (17.0, 20.0, 25.0)]
    edges, found = distances(gas)
    assert set(found) == {"He–He", "He–Ne", "Ne–Ne"}
    for density in found.values():
        assert density[edges[1:] > 4].mean() == pytest.approx(1, abs=0.03)
    dimer = Atoms("HF", [[0, 0, 0], [0, 0, 0.9]], cell=[20] * 3, pbc=True)
    edges, found = distances([dimer])
    shells = 4 / 3 * np.pi * np.diff(edges**3)
    assert (found["H–F"] * shells / 20**3).sum() == pytest.approx(1)
    assert not found["H–H"].any()


def test_distances_of_a_molecule_end_with_it(monkeypatch):
    import torchmdnet2.md.page as pages

    ends = []
    monkeypatch.setattr(pages, "_drawn", lambda draw, text: draw(axes) or "")
    axes = type(
        "Axes", (), {"stairs": lambda *_, **__: None, "hist": lambda *_, **__: None, "legend": lambda *_: None}
    )()
    axes.set = lambda **words: ends.append(words.get("xlim"))
    pages._distances([molecule("H2O")] * 2)
    assert ends[-1][0] == 0 and 1.5 < ends[-1][1] < 1.7  # H…H


def test_no_more_frames_than_a_page_bears(tmp_path):
    from ase.io import write

    path = tmp_path / "long.xyz"
    frames = []
    for k in range(600):
        frames.append(molecule("H2O"))
        frames[-1].info["time_ps"] = float(k)
    write(path, frames)
    found = read_frames([tmp_path / "x.dcd", path], 600)
    assert 100 < len(found) <= MOST_FRAMES
    times = np.array([atoms.info["time_ps"] for atoms in found])
    assert times[0] == 0 and len(set(np.diff(times))) == 1
    assert read_frames([tmp_path / "x.dcd"], 600) == []


def test_without_a_readable_trajectory_the_page_says_so(model, tmp_path):
    molecule("H2O").write(tmp_path / "start.xyz")
    command = ["md", model, tmp_path / "start.xyz", "--steps", 10, "--temperature", 20, "--report"]
    command += ["--output", tmp_path / "run", "--trajectory", tmp_path / "run.dcd"]
    assert main([*map(str, command)]) in (0, None)
    assert "no trajectory in one of the formats" in (tmp_path / "run.html").read_text(encoding="utf-8")
