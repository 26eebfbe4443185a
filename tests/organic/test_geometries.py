"""scripts/organic/molecules.py and geometries.py: from SMILES to shards, where there is RDKit."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from organic_world import molecules


def test_dimers_touch(scripts):
    pytest.importorskip("rdkit", reason="geometries need RDKit")
    geometries, given = scripts("geometries"), molecules(scripts)
    rng = np.random.default_rng(0)
    for closeness in (0.75, 0.95, 1.5):
        pair = geometries.beside(given[0], given[-1], closeness, rng)
        a, b = pair.positions[:3], pair.positions[3:]
        touching = np.add.outer([geometries.RADII[8], 1.1, 1.1], [geometries.RADII[8], 1.1])
        ratio = np.linalg.norm(a[:, None] - b[None], axis=2) / touching
        assert abs(ratio.min() - closeness) < 1e-6 and pair.charge == -1
        assert abs(np.linalg.norm(b[0] - b[1]) - np.linalg.norm(given[-1].positions[0] - given[-1].positions[1])) < 1e-9


def test_from_smiles_to_shards(scripts, tmp_path, monkeypatch):
    """Protonation states stay with their parent, no scaffold is in two subsets, and a second run makes nothing anew."""
    pytest.importorskip("rdkit", reason="molecules and geometries need RDKit")
    names = [
        "NCC(=O)O",
        "c1ccncc1C",
        "CCO",
        "CC1CCCCC1O",
        "OCC1CCCCC1",
        "[Na+].CC(=O)[O-]",
        "C[CH2]",
        "C(",
        "c1ccccc1Br",
    ]
    (tmp_path / "smiles.txt").write_text("\n".join(names))
    run(
        monkeypatch,
        scripts("molecules"),
        tmp_path / "smiles.txt",
        "--output",
        tmp_path / "m.jsonl.gz",
        "--held-out",
        0.3,
    )
    import gzip

    rows = [json.loads(line) for line in gzip.open(tmp_path / "m.jsonl.gz", "rt")]
    assert {row["smiles"] for row in rows} >= {
        "NCC(=O)O",
        "[NH3+]CC(=O)O",
        "NCC(=O)[O-]",
        "[NH3+]CC(=O)[O-]",
        "CC(=O)[O-]",
    }
    subsets: dict[str, set[str]] = {}
    for row in rows:
        subsets.setdefault(row["scaffold"], set()).add(row["subset"])
    assert all(len(found) == 1 for found in subsets.values()) and not any("Na" in row["smiles"] for row in rows)
    arguments = [
        tmp_path / "m.jsonl.gz",
        tmp_path / "g",
        "--waters",
        2,
    ]
    monkeypatch.setattr(scripts("geometries"), "SMALL_SUBSTITUTIONS", 20)
    run(monkeypatch, scripts("geometries"), *arguments)
    made = {path.name: path.read_bytes() for path in (tmp_path / "g").glob("*.npz")}
    for kind in ("conformers", "protons", "stretched", "substitutions", "separated", "shifts"):
        assert f"train-{kind}-0000.npz" in made
    assert list_of(scripts, tmp_path, made["train-substitutions-small.npz"])
    for name in made:
        for geometry in scripts("shards").read_shard(tmp_path / "g" / name):
            electrons = int(geometry.numbers.sum()) - geometry.charge
            distances = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
            assert electrons % 2 == 0 and distances[np.triu_indices(len(distances), 1)].min(initial=9) > 0.5
    one = "train-conformers-0000.npz"  # the last one of its shard
    (tmp_path / "g" / one).unlink()
    run(monkeypatch, scripts("geometries"), *arguments)
    again = {path.name: path.read_bytes() for path in (tmp_path / "g").glob("*.npz")}
    assert again.keys() == made.keys() and all(again[name] == made[name] for name in made if name != one)
    for found, wanted in zip(*(list_of(scripts, tmp_path, blob) for blob in (again[one], made[one])), strict=True):
        assert np.array_equal(found.positions, wanted.positions)


def test_separated_pairs_have_ions(scripts):
    """Every ion alone, and pairs from contact to beyond the cutoff of a network, all of closed shells."""
    pytest.importorskip("rdkit", reason="geometries need RDKit")
    geometries, given = scripts("geometries"), molecules(scripts)
    made = geometries._separated(given, {"dimer_atoms": 30}, np.random.default_rng(0))
    alone, pairs = made[: len(geometries.IONS)], made[len(geometries.IONS) :]
    assert {g.name for g in alone} == {"[OH3+]", "[OH-]", "[F-]", "[Cl-]", "[Br-]", "[I-]"} and len(pairs) > 50
    assert all(abs(g.charge) <= 2 and (int(g.numbers.sum()) - g.charge) % 2 == 0 for g in pairs)
    ions = {g.name for g in geometries.IONS}
    gaps = []
    for pair in pairs:
        names = pair.name.split(".")
        first = next(len(g.numbers) for g in (*given, *geometries.IONS) if g.name == names[0])
        a, b = pair.positions[:first], pair.positions[first:]
        gaps.append(np.linalg.norm(a[:, None] - b[None], axis=2).min())
    assert min(gaps) < 3.5 and sum(gap > 5 for gap in gaps) > 20 and max(gaps) < 12
    assert sum(bool(ions & set(pair.name.split("."))) for pair in pairs) > 25


def test_analogues_have_rare_elements(scripts):
    """Each pattern makes a closed-shell molecule in which one atom has become another one of its group."""
    pytest.importorskip("rdkit", reason="molecules need RDKit")
    from rdkit import Chem

    molecules = scripts("molecules")
    whole = Chem.MolFromSmiles("O=C(O)c1c(Cl)sc(P(C)(C)=O)c1C(C)(CSC)CF")
    found = set()
    for number in range(len(molecules.ANALOGUES)):
        other = molecules.analogue(whole, number)
        if other is not None:
            electrons = sum(a.GetAtomicNum() + a.GetTotalNumHs() for a in other.GetAtoms())
            assert electrons % 2 == 0 and not molecules.Descriptors.NumRadicalElectrons(other), Chem.MolToSmiles(other)
            found |= {a.GetAtomicNum() for a in other.GetAtoms()} & {5, 14, 33, 34, 53}
    assert found == {5, 14, 33, 34, 53}


def list_of(scripts, folder, blob):
    (folder / "x.npz").write_bytes(blob)
    return list(scripts("shards").read_shard(folder / "x.npz"))


def run(monkeypatch, script, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])
    script.main()
