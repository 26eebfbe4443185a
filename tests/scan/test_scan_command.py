"""`torchmdnet2 scan`: tables, files, exit codes, refusals."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import write
from commands import tiny
from planted import icosahedron

from torchmdnet2 import Potential
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main

WATER = molecule("H2O")
CONFIG = {"model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """m.tmn and n.tmn, untrained; neutral.tmn, which knows no charge; z.tmn of ZBL alone, repulsive; water.xyz."""
    path = tmp_path_factory.mktemp("scan")
    save(tiny(), path / "m.tmn")
    torch.manual_seed(1)
    other = tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save(other, path / "n.tmn")
    repulsive = Potential.from_config(
        {**CONFIG, "priors": [{"name": "zbl", "cutoff": 3.0}], "elements": [1, 8], "energy_scale": 0.0}
    ).eval()
    save(repulsive, path / "z.tmn")
    save(Potential.from_config({**CONFIG, "elements": [1, 8], "total_charges": [0]}).eval(), path / "neutral.tmn")
    write(path / "water.xyz", WATER)
    return path


def scan(capsys, *arguments):
    code = main(["scan", *map(str, arguments), "--device", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_sound_model_passes(capsys, folder, tmp_path, drawn):
    prefix = tmp_path / "new" / "z"
    arguments = [folder / "z.tmn", folder / "water.xyz", "--only", "contact", "--fail", "--output", prefix]
    code, out, err = scan(capsys, *arguments)
    assert (code, err) == (0, "") and "no findings" in out and "H…O" in out
    found = json.loads((tmp_path / "new" / "z.json").read_text())
    assert found["passed"] and found["molecule"] == "H2O" and found["reference"] is None
    assert [c["name"] for c in found["curves"]] == ["H…H", "H…O", "O…O"]
    assert all(c["energy"][0] > c["marks"]["0.8"] > c["marks"]["1"] > 0 == c["energy"][-1] for c in found["curves"])
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["z.csv", "z.html", "z.json", "z_contacts.png"]


def test_findings_files_and_exit_codes(capsys, folder, tmp_path, drawn):
    """An untrained model has no bonds."""
    arguments = [folder / "m.tmn", folder / "water.xyz", "--output", f"{tmp_path}/", "--only", "bond,contact"]
    code, out, _ = scan(capsys, *arguments, "--reference", folder / "z.tmn")
    assert code == 0 and "Bonds of H2O" in out and "Contacts of H2O" in out and "wrote " in out
    found = json.loads((tmp_path / "scan.json").read_text())
    bonds = [curve for curve in found["curves"] if curve["kind"] == "bond"]
    assert [c["atoms"] for c in bonds] == [[0, 1], [0, 2]] and not found["passed"]
    texts = [f"{c['kind']} {c['name']}: {f['text']}" for c in found["curves"] for f in c["findings"]]
    assert texts and all(text in out for text in texts) and f"{len(texts)} finding" in out
    assert str(folder / "z.tmn") in found["reference"] and len(bonds[0]["reference"]["energy"]) == 29
    with (tmp_path / "scan.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = next(row for row in rows if row["kind"] == "bond")
    assert float(first["energy_eV"]) == pytest.approx(bonds[0]["energy"][0], rel=1e-6)
    assert float(first["reference_eV"]) == pytest.approx(bonds[0]["reference"]["energy"][0], rel=1e-6)
    assert rows[1]["reference_eV"] == "" and len(rows) == sum(len(c["values"]) for c in found["curves"])
    page = (tmp_path / "scan.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "://" not in page and texts[0].split(": ")[1] in page
    before = (tmp_path / "scan.json").read_bytes()
    code, _, _ = scan(capsys, *arguments[:-1], "bond", "--fail")
    assert code == 1 and (tmp_path / "scan.json.old").read_bytes() == before
    assert (tmp_path / "scan_bonds.png").is_file()
    assert not (tmp_path / "scan_contacts.png").exists() and (tmp_path / "scan_contacts.png.old").is_file()


def test_an_interrupted_scan_writes_its_files(capsys, folder, tmp_path, monkeypatch):
    from torchmdnet2.scan import scan as module

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "find_jumps", stop)
    arguments = [folder / "z.tmn", folder / "water.xyz", "--only", "contact", "--output", tmp_path / "z"]
    code, out, err = scan(capsys, *arguments)
    assert code == 130 and "Contacts of H2O" in out and "note: interrupted: the report has 3 of 3 curves" in err
    found = json.loads((tmp_path / "z.json").read_text())
    assert not found["complete"] and not found["passed"] and len(found["curves"]) == 3


def test_ensembles(capsys, folder, tmp_path):
    """The mean of the members, and their spread."""
    from torchmdnet2.ensemble import write_ensemble

    common = [folder / "water.xyz", "--only", "bond", "--output"]
    one, two, both = (tmp_path / name for name in ("one", "two", "both"))
    for models, prefix in (("m",), one), (("n",), two), (("m", "n"), both):
        code, out, _ = scan(capsys, *(folder / f"{m}.tmn" for m in models), *common, prefix)
        assert code == 0 and ("spread" in out) == (prefix == both)
    found = [json.loads(p.with_suffix(".json").read_text())["curves"][0] for p in (one, two, both)]
    forces = [curve["force"][10] for curve in found]
    assert forces[2] == pytest.approx((forces[0] + forces[1]) / 2) and abs(forces[0] - forces[1]) > 1e-4
    assert found[0]["spread"] is None and max(found[2]["spread"]) > 0
    listed = write_ensemble([folder / "m.tmn", folder / "n.tmn"], folder / "ensemble.json")
    assert scan(capsys, listed, *common, tmp_path / "listed")[0] == 0
    again = json.loads((tmp_path / "listed.json").read_text())
    assert again["curves"][0]["energy"] == found[2]["energy"] and again["members"] == 2


def test_refusals(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, water = folder / "neutral.tmn", folder / "water.xyz"
    write("methane.xyz", molecule("CH4"))
    write("cell.xyz", Atoms("OH2", WATER.positions, cell=[9, 9, 9], pbc=True))
    write("ion.xyz", Atoms("OH2", WATER.positions, info={"charge": 1}))
    (tmp_path / "scan.csv").write_bytes(water.read_bytes())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for arguments, code, words in (
        ([model, "methane.xyz"], 1, "this model knows only H, O"),
        ([model, "cell.xyz"], 1, "periodic, but a scan needs a molecule"),
        ([model, "ion.xyz"], 1, "--allow-untrained-charge"),
        ([model, water, "--charge", "1"], 1, "total charge 1"),
        ([model, "none.xyz"], 1, "no such file"),
        (["none.tmn", water], 1, "no such model file"),
        ([model, water, "--only", "bonds"], 2, "'bonds' cannot be scanned: choose from bond, torsion, contact"),
        ([model, water, "--reference", "gfn3"], 2, "--reference: 'gfn3' is not a reference"),
        ([model, "scan.csv"], 2, "is read by this command and would be written too"),
        ([model, water, "--dtype", "float8"], 1, "float8"),
    ):
        got, _, err = scan(capsys, *arguments)
        assert got == code and words in err and "Traceback" not in err, err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_what_is_left_out_or_doubtful_is_said(capsys, folder, tmp_path):
    """Elements whose atoms are hidden by others; atoms nearer than any bond, if the model does not repel."""
    shell = [[0, 0, 0], *(1.6 * corner for corner in icosahedron())]
    write(tmp_path / "shell.xyz", Atoms("OH12", shell))
    arguments = ["--only", "contact", "--output", tmp_path / "x"]
    code, out, err = scan(capsys, folder / "z.tmn", tmp_path / "shell.xyz", *arguments)
    assert code == 0 and "no contact of O…O: other atoms would be closer" in out + err and "repulsive" not in err
    write(tmp_path / "near.xyz", Atoms("H2", [[0, 0, 0], [0, 0, 0.49]]))
    for model, said in (("m", True), ("z", False)):
        code, out, err = scan(capsys, folder / f"{model}.tmn", tmp_path / "near.xyz", *arguments)
        assert code == 0 and ("atom 0 (H) and atom 1 (H)" in err and "no repulsive prior" in err) is said


def test_two_copies_of_an_ion_have_a_charge_of_their_own(capsys, folder, tmp_path):
    """A model of singly charged molecules does not know it: no contacts, and a note."""
    save(Potential.from_config({**CONFIG, "elements": [1, 8], "total_charges": [1]}).eval(), tmp_path / "ion.tmn")
    arguments = [tmp_path / "ion.tmn", folder / "water.xyz", "--charge", "1", "--output", tmp_path / "x"]
    code, out, err = scan(capsys, *arguments)
    assert code == 0 and "Contacts" not in out and "does not know the charge of two copies of the molecule, 2" in err
    code, out, err = scan(capsys, *arguments, "--allow-untrained-charge")
    assert code == 0 and "Contacts" in out and "warning: a structure has the total charge 2" in err
