"""Every configuration in configs/ is right, refuses every mistyped key, and runs on small data of its kind."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2.core.yaml_reader import parse_yaml
from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import load_config, parse_config
from torchmdnet2.training.run.run import run_training

from .conftest import make_frames
from .test_config import all_keys, mutations, one_edit, with_key_renamed

FOLDER = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith("learn_"))  # of `train`
SMALL = {
    "data.dataset": "null", "data.molecule": "null", "data.version": "null", "data.max_force": "null",
    "data.subsets": "null", "data.validation": "null", "data.test": "null", "data.num_workers": 0,
    "data.split": "{validation: 3, test: 3}", "data.units": "{energy: eV, length: angstrom}",
    "model.hidden_channels": 8, "model.num_layers": 1, "model.num_rbf": 8, "model.cutoff": 3.0,
    "training.batch_size": 4, "training.device": "cpu", "training.num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twelve molecules with every label that a recipe asks for."""
    frames = make_frames(12)
    for atoms in frames:
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        charges = np.linspace(-0.2, 0.2, len(atoms))
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, charges=charges)
        atoms.info.update(mu=0.5, gap=7.0, r2=30.0)
    path = tmp_path_factory.mktemp("recipes") / "small.xyz"
    write(path, frames, format="extxyz")
    return path


def test_there_is_one_for_each_published_training():
    published = {
        "tensornet-qm9", "tensornet-rmd17", "tensornet-spice", "tensornet-maceoff", "tensornet-ani1x",
        "tensornet-ani2x", "et-qm9", "et-md17", "et-ani1", "et-spice", "graph-network-qm9", "transformer-ani1",
        "tensornet2-spice",
    }  # fmt: skip
    assert published <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    assert f"#     torchmdnet2 train configs/{name}.yaml\n" in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "../" not in text  # nothing outside of the repository
    config = load_config(FOLDER / f"{name}.yaml")
    assert config.output.folder == f"runs/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_check(name, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = parse_yaml((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    changes = {**SMALL, "data.train": data}
    if "q_dim" in given.get("model", {}):
        changes["model.q_dim"] = 4
    if "init" in given:  # the model is that of the file
        changes = {key: value for key, value in changes.items() if not key.startswith("model.")}
    counts = "6 train, 3 validation, 3 test"
    if "sources" in given["data"]:  # 12 frames of replay
        changes = {key: value for key, value in changes.items() if not key.startswith("data.")}
        changes |= {"data.sources.0.split": SMALL["data.split"], "init.replay": data, "data.sources.0.train": data}
        counts = "18 train, 3 validation, 3 test"
    config = load_config(FOLDER / f"{name}.yaml", [f"{key}={value}" for key, value in changes.items()])
    run_training(config, check=True)
    said = capsys.readouterr().out
    assert "the configuration is fine" in said and f"frames: {counts}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_mutated_key_is_rejected_with_a_suggestion(name):
    """Bar R25."""
    raw = parse_yaml((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    paths = [path for path in all_keys(raw) if isinstance(path[-1], str)]
    assert len(paths) > 20
    rng = random.Random(name)
    for path in paths:
        known = {p[-1] for p in paths if p[:-1] == path[:-1]}
        wrong = rng.choice([m for m in mutations(path[-1], rng) if m not in known])
        with pytest.raises(BadConfig) as caught:
            parse_config(with_key_renamed(raw, path, wrong))
        dotted = ".".join(str(part) for part in (*path[:-1], wrong))
        found = re.search(re.escape(dotted) + r": .*did you mean '([\w.]+)'", str(caught.value))
        assert found and (found[1] == path[-1] or one_edit(found[1], wrong)), (dotted, str(caught.value))


def test_published_data_from_files_in_their_own_layout(tmp_path, monkeypatch, capsys):
    """rMD17's arrays, in kcal/mol; with files that are not the published ones, checksums are not compared."""
    rng = np.random.default_rng(0)
    raw = tmp_path / "rmd17" / "raw"
    raw.mkdir(parents=True)
    energies, forces = rng.normal(size=20), rng.normal(0, 20, (20, 4, 3))
    np.savez(
        raw / "rmd17_aspirin.npz",
        nuclear_charges=np.array([6, 1, 1, 8]),
        coords=rng.normal(size=(20, 4, 3)),
        energies=energies,
        forces=forces,
    )
    small = {key: value for key, value in SMALL.items() if key not in ("data.dataset", "data.molecule")}
    small |= {"data.root": tmp_path, "data.download": "false"}
    config = load_config(FOLDER / "tensornet-rmd17.yaml", [f"{key}={value}" for key, value in small.items()])
    run_training(config, check=True)
    said = capsys.readouterr().out
    rms = float(re.search(r"rms of the force components: ([\d.]+) eV/Å", said)[1])
    assert rms == pytest.approx(20 * 0.0433641, rel=0.2)
    with pytest.raises(BadConfig, match=r"data\.keys: rmd17 has no 'stres'"):
        run_training(load_config(FOLDER / "tensornet-rmd17.yaml", [*(f"{k}={v}" for k, v in small.items()),
                                 "data.keys.stress=stres"]), check=True)  # fmt: skip


def test_labels_of_published_data_go_by_other_names(tmp_path, capsys, monkeypatch):
    """QM9's mu is trained as the length of the dipole; its Mulliken charges, which nobody asked for, are not."""
    import bz2
    import io
    import tarfile

    monkeypatch.setattr("torchmdnet2.data.datasets.verify", lambda path, source, say: None)
    raw = tmp_path / "qm9" / "raw"
    raw.mkdir(parents=True)
    rest = ["13.21", "-0.3877", "0.1171", "0.5048", "35.3641", "0.044749", *["-40.4"] * 4, "6.4"]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        rng = np.random.default_rng(1)
        for k in range(1, 21):
            places = zip("CHHO", rng.normal(size=(4, 3)).tolist(), strict=True)
            atoms = "".join(f"{symbol}\t{x:.6f}\t{y:.6f}\t{z:.6f}\t0.1\n" for symbol, (x, y, z) in places)
            numbers = "\t".join(["157.7"] * 3 + [str(k), *rest])  # mu = k debye
            text = f"4\ngdb {k}\t{numbers}\n{atoms}1\t2\nC\tC\nInChI\tInChI\n".encode()
            member = tarfile.TarInfo(f"dsgdb9nsd_{k:06d}.xyz")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    (raw / "dsgdb9nsd.xyz.tar.bz2").write_bytes(bz2.compress(stream.getvalue()))
    (raw / "uncharacterized.txt").write_text("   1  x  y\n")
    small = {key: value for key, value in SMALL.items() if key not in ("data.dataset", "data.molecule", "data.units")}
    small |= {"data.root": tmp_path, "data.download": "false", "output.folder": tmp_path / "run"}
    small |= {"training.max_epochs": 1, "output.report": "false"}
    config = load_config(FOLDER / "et-qm9-dipole.yaml", [f"{key}={value}" for key, value in small.items()])
    path = run_training(config)
    errors = json.loads((path.parent / "metrics.json").read_text())["test"]
    assert errors.keys() == {"dipole_norm"} and errors["dipole_norm"]["unit"] == "e·Å"
    assert 0.5 < errors["dipole_norm"]["mae"] < 10  # labels are 0.2 to 4 e·Å
