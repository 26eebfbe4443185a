"""Several levels of theory in one training."""

from __future__ import annotations

import base64
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

import torchmdnet2
from torchmdnet2 import checkpoint
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.core import html_page
from torchmdnet2.data.labels import GROUP, LEVEL
from torchmdnet2.errors import BadConfig, BadData, UndeterminedEnergyWarning, UnknownElement
from torchmdnet2.potential.potential import SYMBOLS, Potential
from torchmdnet2.system import System
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.log import TrainingLog
from torchmdnet2.training.reporting.report import model_card
from torchmdnet2.training.run.levels import require_one_level
from torchmdnet2.training.run.notes import data_notes
from torchmdnet2.training.run.run import run_members, run_training
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.run.start import make_trainer, run_check
from torchmdnet2.training.run.subsets import _with_shares
from torchmdnet2.training.steps.batches import training_batches
from torchmdnet2.training.steps.distributed import Devices
from torchmdnet2.training.steps.loop import pack_trainer
from torchmdnet2.training.steps.trainer import predict

from .conftest import REFERENCES, make_frames

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


def other_level(frames, factor=1.1, shift=5.0):
    """The frames at another level of theory: stronger bonds, and other energies of atoms."""
    for atoms in frames:
        own = sum(REFERENCES[z] for z in atoms.numbers)
        energy = own + factor * (atoms.get_potential_energy() - own) + shift * len(atoms)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=factor * atoms.get_forces())
    return frames


@pytest.fixture
def two(raw_config, tmp_path):
    """A configuration with two sources, the second of fewer frames."""
    write(tmp_path / "a.xyz", make_frames(24), format="extxyz")
    write(tmp_path / "b.xyz", other_level(make_frames(12, seed=1)), format="extxyz")
    raw = {**raw_config, "data": {"split": {"validation": 4, "test": 4}}}
    raw["data"]["sources"] = [
        {"train": str(tmp_path / "a.xyz"), "level": "A/TZ(1.0)"},
        {"train": str(tmp_path / "b.xyz"), "level": "B", "share": 0.4, "weight": 2.0},
    ]
    return raw


def trainer_of(raw, packed=False):
    raw = {**raw, "training": {**raw["training"], "precision": "float64"}}
    trainer = make_trainer(make_setup(parse_config(raw)), None)
    if packed:
        assert pack_trainer(trainer) is None
    return trainer


def after_an_epoch(trainer):
    """Weights after the steps of an epoch, and errors of training and validation."""
    for _ in trainer.steps(training_batches(trainer.train, trainer.config, 0)):
        trainer.step_count += 1
    if trainer.packed is not None:
        trainer.packed.check()
    return trainer.potential.state_dict(), trainer.sums.row("train") | trainer.validate().row("validation")


def test_a_training_and_what_it_leaves(two, tmp_path):
    """The file lists its levels, a level is an ordinary model, and errors are stated by level."""
    two["data"]["sources"][1] |= {"licence": "CC0", "citation": "somebody"}
    path = run_training(parse_config(two))
    errors = json.loads((path.parent / "metrics.json").read_text())
    assert set(errors) == {f"{subset}, {level}" for subset in ("validation", "test") for level in ("A/TZ(1.0)", "B")}
    whole = torchmdnet2.load(path, dtype="float64")
    assert whole.level_names == ["A/TZ(1.0)", "B"] and whole.level_of_theory == "A/TZ(1.0)"
    card = model_card(whole.config, whole.metadata)
    assert "A/TZ(1.0), B" in card
    assert f"| B | `{tmp_path / 'b.xyz'}` | 4 | CC0 | somebody |" in card.partition("## Sources")[2]
    references = [part.partition("\n##")[0] for part in card.partition("## Reference energies")[2].split("\n### ")[1:]]
    assert [part.split("\n")[0] for part in references] == ["A/TZ(1.0)", "B"]
    for part, level in zip(references, whole.level_names, strict=True):
        (energies,) = (p["energies"] for p in whole.at_level(level).config["priors"] if p["name"] == "atomref")
        assert energies and all(f"| {SYMBOLS[int(z)]} | {energy:.6f} |" in part for z, energy in energies.items())

    splits = json.loads((path.parent / "splits.json").read_text())
    for k, (name, file) in enumerate((("A/TZ(1.0)", "a.xyz"), ("B", "b.xyz"))):
        frames = [read(tmp_path / file, ":")[i] for i in splits["test"][k]["indices"]]
        potential = torchmdnet2.load(path, dtype="float64", level=name)
        checkpoint.save(potential, tmp_path / "one.tmn")
        alone = torchmdnet2.load(tmp_path / "one.tmn")
        assert alone.level_of_theory == name and alone.level_names == []
        assert set(alone.metadata["errors"]) == {"validation", "test"} and "levels" not in alone.metadata["data"]
        for found in (potential, alone.double()):
            result = [found(System.from_ase(atoms)) for atoms in frames]
            misses = [float(r.energy) - atoms.get_potential_energy() for r, atoms in zip(result, frames, strict=True)]
            assert np.abs(misses).mean() == pytest.approx(errors[f"test, {name}"]["energy"]["mae"], rel=1e-6)
        atoms = frames[0].copy()
        atoms.calc = pickle.loads(pickle.dumps(TorchMDNet2Calculator(path, dtype="float64", level=name)))
        assert atoms.get_potential_energy() == pytest.approx(float(result[0].energy), abs=1e-9)
    with pytest.raises(ValueError, match=r"no level 'C'.*It has A/TZ\(1\.0\), B"):
        torchmdnet2.load(path, level="C")
    with pytest.raises(ValueError, match="a single level of theory, B, but 'A' is requested"):
        torchmdnet2.load(tmp_path / "one.tmn", level="A")


@pytest.mark.parametrize("second", ["test", "validation"])
def test_a_report_shows_each_level(two, tmp_path, monkeypatch, second, drawn):
    """Each has plots of its own, with its labels and its predictions; a level without test frames, of validation."""
    figures, figure_png = {}, html_page.figure_png

    def keep(draw, size):
        def drawn(figure):
            draw(figure)
            axes = figure.axes[0]
            figures[axes.get_title().replace("\n", " ")] = axes

        return figure_png(drawn, size)

    monkeypatch.setattr(html_page, "figure_png", keep)
    if second == "validation":
        two["data"]["sources"][1]["split"] = {"validation": 4, "test": 0}
    two["output"] |= {"report": True, "outliers": 2}
    path = run_training(parse_config(two))
    splits = json.loads((path.parent / "splits.json").read_text())
    page = (path.parent / "report.html").read_text(encoding="utf-8")
    for k, (name, file, subset) in enumerate((("A/TZ(1.0)", "a.xyz", "test"), ("B", "b.xyz", second))):
        frames = [read(tmp_path / file, ":")[i] for i in splits[subset][k]["indices"]]
        potential = torchmdnet2.load(path, dtype="float64", level=name)
        given = np.concatenate([atoms.get_forces().ravel() for atoms in frames])
        found = np.concatenate([potential(System.from_ase(atoms)).forces.ravel() for atoms in frames])
        axes = figures[f"Force components, {subset} frames, {name}"]
        scale = 1e3 if "meV" in axes.get_xlabel() else 1.0
        shown = scale * np.array([given, found]).T
        drawn = np.array(axes.lines[0].get_data()).T
        assert len(drawn) == len(shown) and np.allclose(
            *(x[np.lexsort(x.T.round(6))] for x in (drawn, shown)), atol=1e-6
        )
        assert f"Energy per atom − references, {subset} frames, {name}" in figures
        assert f"Force errors by element, {subset} frames, {name}" in figures
        assert f"<h2>Forces by element, {subset} frames, {name}</h2>" in page
        for plot in ("energy_parity", "force_parity", "errors_by_element"):
            content = (path.parent / f"{plot}_{k + 1}.png").read_bytes()
            assert base64.b64encode(content).decode() in page
        worst = [atoms for atoms in read(path.parent / "outliers.xyz", ":") if f"{file}, frame" in atoms.info["frame"]]
        assert len(worst) == 2
        for atoms in worst:  # predictions of this level
            assert atoms.get_potential_energy() == pytest.approx(
                float(potential(System.from_ase(atoms)).energy), abs=1e-6
            )
        references = next(prior["energies"] for prior in potential.config["priors"] if prior["name"] == "atomref")
        assert all(f">{energy:.6f}</td>" in page for energy in references.values())
    assert len(list(path.parent.glob("*.png"))) == 1 + 2 * 3 and "A/TZ(1.0); B; elements H, C, O" in page


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"readout": "shared", "scale": "own"},
        {"references": "shared"},
    ],
)
def test_packed_steps_are_the_same(two, settings):
    """Read-outs and scales by level, in float64; the optimizer divides by small gradients, which enlarges rounding."""
    two["levels"] = {"B": settings}
    (plain, rows), (weights, same) = (after_an_epoch(trainer_of(two, packed)) for packed in (False, True))
    assert max(float((value - weights[name]).abs().max()) for name, value in plain.items()) < 1e-8
    assert same == pytest.approx(rows, rel=1e-8)


def test_packed_relative_energies_are_the_same(two, tmp_path):
    """Groups of three frames, of each level; the same name stands for two groups, one at each level."""
    for name in ("a", "b"):
        frames = sorted(read(tmp_path / f"{name}.xyz", ":"), key=lambda atoms: str(atoms.symbols))
        for k, atoms in enumerate(frames[:-2]):  # two are in no group
            atoms.info["scan"] = f"{atoms.symbols} {k // 3}"
        write(tmp_path / f"{name}.xyz", frames, format="extxyz")
    two["data"]["keys"] = {"energy": "energy", "forces": "forces", "group": "scan"}
    two["training"]["loss"] = {"energy": 0.1, "forces": 1, "relative_energy": 2}
    trainers = [trainer_of(two, packed) for packed in (False, True)]
    frames = trainers[0].train  # those of B are repeated: each repetition of a group is a group
    whole = [frames.indices[frames.groups == group].tolist() for group in np.unique(frames.groups)]
    assert all(len(set(group)) == len(group) <= 3 for group in whole)
    assert len(whole) > len(set(map(tuple, whole)))
    (plain, rows), (weights, same) = map(after_an_epoch, trainers)
    assert max(float((value - weights[name]).abs().max()) for name, value in plain.items()) < 1e-8
    assert rows["train_relative_energy_mae"] > 0 and same == pytest.approx(rows, rel=1e-8, nan_ok=True)


def test_repetitions_of_a_group_in_a_batch_are_on_one_device(two, tmp_path):
    """The loss takes their mean together, so that it would depend on the number of devices."""
    frames = other_level(make_frames(12, seed=1))
    for k, atoms in enumerate(frames):
        atoms.info["scan"] = k // 3
    write(tmp_path / "b.xyz", frames, format="extxyz")
    two["data"]["sources"][1] |= {"share": 0.7, "keys": {"energy": "energy", "forces": "forces", "group": "scan"}}
    two["training"] |= {"batch_size": 9, "loss": {"energy": 0.1, "forces": 1, "relative_energy": 2}}
    trainer = trainer_of(two, packed=True)
    several, place = False, trainer.train.once[1].tolist()
    for batch in (batch for epoch in range(4) for batch in training_batches(trainer.train, trainer.config, epoch)):
        labels = trainer.train.batch(batch).sample.labels
        scans = dict(zip(batch, torch.stack([labels[GROUP], labels[LEVEL]], 1).nan_to_num(-1).tolist(), strict=True))
        parts = []
        for rank in range(2):  # positions of the packed frames that each process takes
            trainer.packed.devices = Devices(rank, 2)
            (rows,) = trainer.packed._shares(trainer.train, trainer.packed.step, [batch])
            left = list(batch)
            parts.append([left.pop([place[k] for k in left].index(row)) for row in rows])
        found = [{tuple(scans[k]) for k in part if scans[k][0] >= 0} for part in parts]
        assert sorted(k for part in parts for k in part) == sorted(batch) and not found[0] & found[1]
        several |= any(
            len({int(trainer.train.groups[k]) for k in batch if scans[k] == scan}) > 1 for scan in scans.values()
        )
    assert several


def test_levels_share_what_they_are_asked_to(two):
    potential = trainer_of(two).potential
    a, b = (potential.at_level(name) for name in potential.level_names)
    assert a.head is not b.head and a.representation is b.representation
    table = [next(p for p in x.priors if hasattr(p, "table")).table for x in (a, b)]
    assert float((table[1] - table[0])[[1, 6, 8]].mean()) == pytest.approx(5.0, abs=1.0)
    two["levels"] = {"B": {"readout": "shared", "references": "shared"}}
    potential = trainer_of(two).potential
    a, b = (potential.at_level(name) for name in potential.level_names)
    assert a.head is b.head and all(x is y for x, y in zip(a.priors, b.priors, strict=True))


def test_levels_are_never_mixed(two):
    trainer = trainer_of(two)
    batch = trainer.train.batch([0, len(trainer.train) - 1])
    with pytest.raises(ValueError, match="several levels of theory"):
        predict(trainer.potential, batch, trainer.properties)
    with pytest.raises(BadConfig, match="levels of theory"):
        run_members(parse_config(two), 2)


def test_shares():
    assert _with_shares([800, 80], [None, 0.5]) == [800, 800]
    assert _with_shares([10, 30, 5], [None, None, 0.2]) == [10, 30, 10]
    assert _with_shares([10, 90], [0.5, 0.5]) == [90, 90]
    assert _with_shares([40, 10], [0.2, None]) == [40, 160]  # no frame is left out
    assert _with_shares([7, 9], [None, None]) == [7, 9]


def test_weights_and_levels_of_frames(two):
    trainer = trainer_of(two)
    frames = trainer.train
    assert np.bincount(frames.levels).tolist() == [16, 11]
    for parts in trainer.batches([list(range(len(frames)))]):
        assert [float(p.sample.labels[LEVEL].unique()) for p in parts] == [0.0, 1.0]
        assert "scalar:loss_weight" not in parts[0].sample.labels
        assert (parts[1].sample.labels["scalar:loss_weight"] == 2).all()


def test_sources_without_forces_and_elements_of_one_level(two, tmp_path):
    """Energies alone at one level; an element that only the other one knows is refused there."""
    frames = [atoms for atoms in make_frames(60, seed=2) if 6 not in atoms.numbers[:4]]
    for atoms in frames:
        own = atoms.get_potential_energy()
        atoms.calc = SinglePointCalculator(atoms, energy=own)
    write(tmp_path / "b.xyz", frames, format="extxyz")
    two["data"]["sources"][1] |= {"keys": {"forces": None}, "split": {"validation": 1, "test": 1}}
    potential = trainer_of(two).potential
    assert 6 in potential.at_level("A/TZ(1.0)").elements and potential.at_level("B").elements == [1, 8]
    with pytest.raises(UnknownElement):
        potential.eval().at_level("B")(System.from_ase(make_frames(1)[0]))


FAULTS = {
    "no level": (lambda raw: raw["data"]["sources"][0].pop("level"), r"s\.0\.level: is required, as in level: PBE0"),
    "an empty level": (lambda raw: raw["data"]["sources"][0].update(level=" "), r"sources\.0\.level: is required"),
    "level of data": (lambda raw: raw["data"].update(level="A"),
                      r"data\.level: unknown key here; it belongs to .*data\.sources.*did you mean 'level_of_theory'"),
    "train too": (lambda raw: raw["data"].update(train="a.xyz"), "exclude each other"),
    "another level": (lambda raw: raw.update(levels={"A/TZ": {}}), "no source has this level, did you mean"),
    "the first": (lambda raw: raw.update(levels={"A/TZ(1.0)": {}}), "is the first level"),
    "no sources": (lambda raw: raw["data"].update(sources=None, train="a.xyz") or raw.update(levels={"B": {}}),
                   "levels.B: no source has this level"),
    "shares": (lambda raw: raw["data"]["sources"][0].update(share=0.7), r"add up to 1\.1"),
    "too few shares": (lambda raw: [source.update(share=0.3) for source in raw["data"]["sources"]],
                       r"shares add up to 0\.6; they should be 1"),
    "frames of all": (lambda raw: raw["data"].update(validation="a.xyz"), "validation: belongs to each of"),
    "a level of all": (lambda raw: raw["data"].update(level_of_theory="A"), "each of data.sources has its level"),
    "a key of one": (lambda raw: raw["data"]["sources"][0].update(keys={"stress": "s"}), "give data.keys.stress too"),
    "no group": (lambda raw: raw["training"]["loss"].update(relative_energy=1.0), "needs data.keys.group"),
    "no energies": (lambda raw: raw.update(head=None, properties=[{"name": "dipole"}])
                    or raw["data"].update(keys={"energy": None, "forces": None, "dipole": "mu"})
                    or raw["training"].update(loss={"dipole": 1.0}),
                    "several levels of theory need a head of energies"),
    "splits of a source": (lambda raw: raw["data"]["sources"][0].update(split={"file": "s.json"}),
                           r"sources\.0: split\.file belongs to a training on one source"),
    "no weight": (lambda raw: raw["data"]["sources"][0].update(weight=0), r"s\.0\.weight: should be greater than 0"),
    "nothing": (lambda raw: raw["data"].update(sources=[]), "at least one source"),
    "capitals": (lambda raw: raw["data"]["sources"].append({"train": "c.xyz", "level": "b"}),
                 "the levels 'B' and 'b' differ only in spelling"),
    "spaces": (lambda raw: raw["data"]["sources"].append({"train": "c.xyz", "level": "B "}),
               "the levels 'B' and 'B ' differ only in spelling"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refusals(two, fault):
    change, message = FAULTS[fault]
    two["training"]["loss"] = {"energy": 1.0, "forces": 1.0}
    change(two)
    with pytest.raises(BadConfig, match=message) as caught:
        parse_config(two)
    assert "data.train: is required" not in str(caught.value)  # there are sources


def test_files_of_two_levels_are_refused_where_none_is_declared(raw_config, tmp_path):
    """By energies far apart, or by other energies of the same structures; several files of one level are trained."""
    raw_config["data"] = {"train": [str(tmp_path / "a.xyz"), str(tmp_path / "b.xyz")], "split": {"validation": 4}}
    write(tmp_path / "a.xyz", make_frames(40), format="extxyz")
    for seed, shift in ((1, 5.0), (0, 0.05)):
        write(tmp_path / "b.xyz", other_level(make_frames(24, seed=seed), shift=shift), format="extxyz")
        with pytest.raises(BadData, match=r"not mixed\. Declare .* data\.sources: \[\{train: .*a\.xyz"):
            run_check(parse_config(raw_config), TrainingLog(None))
    write(tmp_path / "b.xyz", make_frames(24, seed=1), format="extxyz")
    run_check(parse_config(raw_config), TrainingLog(None))


def test_structures_that_another_level_trains_on_are_named(two, tmp_path):
    write(tmp_path / "b.xyz", other_level(make_frames(12)), format="extxyz")  # the first frames of a.xyz
    two["data"]["sources"][0]["split"] = {"train": 22, "validation": 1, "test": 1}
    notes = data_notes(make_setup(parse_config(two)), 1)
    leaks = [note for note in notes if "little about new structures" in note]
    assert any(note.startswith("B: ") and "test frames have the same structure as training frames of A/TZ(1.0)" in note
               for note in leaks)  # fmt: skip
    assert all("b.xyz, frame" in note for note in leaks if note.startswith("B: "))
    assert sum("warmup_steps" in note for note in notes) == 1  # not for each level


def one_level(raw):
    setup = make_setup(parse_config(raw))
    require_one_level(setup.config, setup.frames, setup.statistics)


def test_files_that_are_far_from_others_for_a_good_reason_are_trained(raw_config, tmp_path):
    """Large and small structures, whose energies per atom differ by their bonds; files with few frames are checked."""
    rng = np.random.default_rng(0)

    def copper(size, bound, count):
        frames = []
        for _ in range(count):
            atoms = Atoms(
                ["Cu"] * size, 2.5 * np.indices((4, 4, 4)).reshape(3, -1).T[:size] + rng.normal(0, 0.05, (size, 3))
            )
            energy = -1000.0 * size - bound * size + rng.normal(0, 0.02)
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=rng.normal(0, 0.1, (size, 3)))
            frames.append(atoms)
        return frames

    raw_config["model"]["max_z"] = 30
    files = [str(tmp_path / name) for name in ("bulk.xyz", "small.xyz")]
    raw_config["data"] = {"train": files, "split": {"validation": 2, "test": 0}}
    write(files[0], [*copper(27, 3.5, 20), *copper(32, 3.5, 20)], format="extxyz")
    write(files[1], copper(2, 1.0, 20), format="extxyz")
    one_level(raw_config)
    write(files[1], copper(27, 1.0, 4), format="extxyz")
    with pytest.raises(BadData, match=r"small\.xyz are .* eV per atom from those of"):
        one_level(raw_config)


def test_replayed_structures_are_no_other_level(raw_config, tmp_path):
    first = run_training(parse_config(raw_config))
    frames = make_frames(30)
    write(tmp_path / "a.xyz", frames[:16], format="extxyz")
    write(tmp_path / "b.xyz", frames[16:], format="extxyz")
    raw = {**raw_config, "init": {"file": str(first), "replay": str(tmp_path / "a.xyz")}}
    raw["data"] = {"train": [str(tmp_path / "a.xyz"), str(tmp_path / "b.xyz")], "split": {"validation": 4, "test": 0}}
    raw.pop("model")
    one_level(raw)


def test_levels_that_share_references_and_are_far_apart_are_named(two):
    two["levels"] = {"B": {"references": "shared"}}
    notes = data_notes(make_setup(parse_config(two)), 1000)
    assert any(note.startswith("B: energies are +5") and "{B: {references: own}}" in note for note in notes)
    two["data"]["sources"].reverse()  # the larger level is the second one
    two["levels"] = {"A/TZ(1.0)": {"references": "shared"}}
    notes = data_notes(make_setup(parse_config(two)), 1000)
    assert any("A/TZ(1.0): {references: own}" in note for note in notes)
    two["levels"] = {}
    assert not any("references: own" in note for note in data_notes(make_setup(parse_config(two)), 1000))


def test_words_about_shares_splits_and_keys_of_a_source(two, capsys):
    run_check(parse_config(two), TrainingLog(None))
    said = " ".join(capsys.readouterr().out.split())
    assert "frames: 20 train, 8 validation, 8 test; an epoch has 27, with repetitions" in said
    assert re.search(r"the 16 of \S*a\.xyz once \(59%\), the 4 of \S*b\.xyz 2\.75 times \(41%\)", said)
    assert "A/TZ(1.0) (16 training frames), B (4 training frames)" in said
    two["data"]["split"] = {"train": 20, "validation": 4}
    with pytest.raises(BadConfig, match=r"data\.sources\.1\.split \(.*b\.xyz\): .*give this one its own, as"):
        make_setup(parse_config(two))
    two["data"]["split"] = {"validation": 4}
    two["data"]["sources"][1]["keys"] = {"group": "scan"}
    with pytest.raises(BadData, match=r"data\.sources\.1\.keys\.group=null"):
        make_setup(parse_config(two))


def test_a_frame_of_a_level_that_the_model_refuses_is_named(two, tmp_path):
    """Not one of another level, whose elements the first level does not know."""
    frames = [atoms for atoms in make_frames(60, seed=2) if 6 not in atoms.numbers[:4]][:12]
    for atoms in frames:
        atoms.calc = SinglePointCalculator(atoms, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
    write(tmp_path / "a.xyz", frames, format="extxyz")
    others = other_level(make_frames(12, seed=1))
    others[4].set_cell([9, 9, 9])
    others[4].pbc = True
    write(tmp_path / "b.xyz", others, format="extxyz")
    two["data"]["split"] = {"validation": 1, "test": 0}
    two |= {"properties": [{"name": "charges"}], "priors": [{"name": "coulomb", "charges": "predicted"}]}
    two["priors"].append({"name": "atomref", "energies": "fit"})
    with pytest.raises(ValueError, match=r"b\.xyz, frame 4 is periodic, and a sum over all pairs"):
        run_training(parse_config(two))


def test_a_file_of_a_source_is_not_replaced(two, tmp_path):
    """Worst frames of the run before are the data of this one."""
    worst = tmp_path / "run" / "outliers.xyz"
    worst.parent.mkdir()
    write(worst, other_level(make_frames(12, seed=1)), format="extxyz")
    content = worst.read_bytes()
    two["data"]["sources"][1]["train"] = str(worst)
    two["output"] |= {"folder": str(worst.parent), "overwrite": True, "report": True}
    with pytest.raises(BadConfig, match=r"data\.sources\.1\.train: .*outliers\.xyz is in output\.folder"):
        run_training(parse_config(two))
    assert worst.read_bytes() == content


def test_check_prints_the_reference_energies_of_each_level(two, capsys):
    run_check(parse_config(two), TrainingLog(None))
    text = capsys.readouterr().out
    found = dict(part.split(" (eV): ") for part in text.split("reference energies of ")[1:])
    carbon = {level: float(table.split("C ")[1].split(",")[0]) for level, table in found.items()}
    assert set(found) == {"A/TZ(1.0)", "B"} and carbon["B"] - carbon["A/TZ(1.0)"] == pytest.approx(5.0, abs=1.0)


def test_ensembles_of_several_levels_are_refused(two):
    with pytest.raises(BadConfig, match="--members: not possible with several levels of theory; train each model sep"):
        run_members(parse_config(two), 2, check=True)


def test_relative_energies(two, tmp_path):
    """Frames of a group are in one batch, and a shift of a group's energies changes neither loss nor gradient."""
    found = []
    for shift in (0.0, 3.0):
        frames = sorted(make_frames(90), key=lambda atoms: str(atoms.symbols))
        chosen = [frames[k : k + 4] for k in range(0, 86, 4) if str(frames[k].symbols) == str(frames[k + 3].symbols)][
            :6
        ]
        frames = [atoms for group in chosen for atoms in group]
        for k, atoms in enumerate(frames):
            energy = atoms.get_potential_energy() + shift * (k // 4)
            atoms.calc = SinglePointCalculator(atoms, energy=energy)
            atoms.info["scan"] = f"molecule {k // 4}"
        write(tmp_path / "a.xyz", frames, format="extxyz")
        raw = {**two, "data": {"train": str(tmp_path / "a.xyz"), "split": {"validation": 0, "test": 0}}}
        raw["data"]["keys"] = {"energy": "energy", "forces": None, "group": "scan"}
        raw["training"] = {**raw["training"], "batch_size": 9, "energy_scale": 1.0}
        raw["training"]["loss"] = {"energy": 0, "relative_energy": 1.0}
        trainer = trainer_of(raw)
        order = training_batches(trainer.train, trainer.config, 3)
        assert sorted(k for batch in order for k in batch) == list(range(24))
        for batch in order:
            assert all(len(set(range(4 * (k // 4), 4 * (k // 4) + 4)) - set(batch)) == 0 for k in batch)
        batch = next(trainer.batches(order))
        loss = float(trainer.backward(*batch))
        gradient = torch.cat([p.grad.reshape(-1) for p in trainer.parameters])
        result = trainer.potential.compute(batch[0].sample.system, _lists(batch[0]), False, False)
        miss = result.energy - batch[0].sample.labels["energy"]
        groups = batch[0].sample.labels["scalar:group"]
        miss = torch.stack([miss[k] - miss[groups == groups[k]].mean() for k in range(len(miss))])
        assert loss == pytest.approx(float(miss.square().mean()), rel=1e-9)
        found.append((loss, gradient))
    assert gradient.abs().max() > 0
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert torch.allclose(found[1][1], found[0][1], rtol=1e-5, atol=1e-8)


def _scans(path, sizes):
    """Write frames of one molecule in groups of these sizes, and return the configuration of their source."""
    frames = sorted(make_frames(120), key=lambda atoms: str(atoms.symbols))[: sum(sizes)]
    for atoms, scan in zip(frames, np.repeat(np.arange(len(sizes)), sizes).tolist(), strict=True):
        atoms.info["scan"] = scan
    write(path, frames, format="extxyz")
    return frames


def _of_scans(two, train, validation):
    raw = {**two, "data": {"train": str(train), "validation": str(validation), "split": {"test": 0}}}
    raw["data"]["keys"] = {"energy": "energy", "forces": None, "group": "scan"}
    raw["training"] = {**two["training"], "batch_size": 4, "loss": {"energy": 0, "relative_energy": 1.0}}
    return raw


def test_final_errors_of_relative_energies_are_of_whole_groups(two, tmp_path):
    """Groups that are larger than a batch are divided in steps; the errors in metrics.json are of the whole."""
    frames = _scans(tmp_path / "a.xyz", [11, 3, 1, 7])
    path = run_training(parse_config(_of_scans(two, tmp_path / "a.xyz", tmp_path / "a.xyz")))
    model = torchmdnet2.load(path, dtype="float64")
    miss = np.array([float(model(System.from_ase([a])).energy) - a.get_potential_energy() for a in frames])
    scan = np.array([a.info["scan"] for a in frames])
    expected = np.concatenate([miss[scan == k] - miss[scan == k].mean() for k in (0, 1, 3)])
    found = json.loads((path.parent / "metrics.json").read_text())["validation"]["relative_energy"]
    assert found["count"] == 21
    assert found["mae"] == pytest.approx(np.abs(expected).mean(), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(expected).mean()), rel=1e-6)
    assert "nothing was learned" not in (path.parent / "log.txt").read_text()  # total energies are not trained


def test_relative_energies_need_groups_of_two(two, tmp_path):
    """Without them the loss was 0, and the first epoch the best one."""
    _scans(tmp_path / "scans.xyz", [4] * 4)
    _scans(tmp_path / "alone.xyz", [1] * 12)
    raw = _of_scans(two, tmp_path / "alone.xyz", tmp_path / "scans.xyz")
    with pytest.raises(BadData, match=r"one level of theory have the same entry data\.keys\.gr"):
        run_training(parse_config(raw))
    raw = _of_scans(two, tmp_path / "scans.xyz", tmp_path / "alone.xyz")
    with pytest.raises(BadData, match=r"none of the validation frames has a label to train on.* No two are of one gro"):
        run_training(parse_config(raw))
    raw["training"]["loss"]["energy"] = 1.0
    raw["training"]["batch_size"] = 2
    assert any("they are divided, and the loss" in note for note in data_notes(make_setup(parse_config(raw)), 1000))
    raw["training"]["batch_size"] = 12
    (note,) = (note for note in data_notes(make_setup(parse_config(raw)), 1000) if "group" in note)
    assert note.startswith("no two validation frames are of one group: the validation loss has no relative energies")


@pytest.mark.parametrize("sizes", [[4] * 9, [18, 18]])
def test_a_random_split_keeps_groups(two, tmp_path, sizes):
    """If there are enough of them; else a note says that it does not."""
    _scans(tmp_path / "scans.xyz", sizes)
    raw = _of_scans(two, tmp_path / "scans.xyz", tmp_path / "scans.xyz")
    raw["data"] |= {"validation": None, "split": {"validation": 8, "test": 4}}
    setup = make_setup(parse_config(raw))
    entries = [set(frames.group_entries.tolist()) for frames in setup.frames.values()]
    notes = [note for note in data_notes(setup, 1000) if "too few groups" in note]
    if len(sizes) > 2:
        assert [len(frames) for frames in setup.frames.values()] == [24, 8, 4] and not notes
        assert not entries[0] & entries[1] and not entries[0] & entries[2] and not entries[1] & entries[2]
    else:
        assert len(notes) == 2 and notes[0].startswith("2 groups of validation frames have training frames")


def _lists(batch):
    from torchmdnet2.neighbors.pairs import PairLists

    return PairLists(batch.sample.system, {batch.neighbors.cutoff: batch.neighbors})


def test_fine_tuning_with_replay(two, raw_config, tmp_path):
    """Structures that the starting model labels keep its level; that of the user's frames is the default."""
    first = run_training(parse_config({**raw_config, "data": {**raw_config["data"], "level_of_theory": "A/TZ(1.0)"}}))
    write(tmp_path / "general.xyz", make_frames(6, seed=5), format="extxyz")
    base = checkpoint.load(first, dtype="float64")
    two["data"]["sources"] = two["data"]["sources"][1:]
    two["data"]["sources"][0].pop("share")
    two["init"] = {"file": str(first), "replay": str(tmp_path / "general.xyz")}
    two.pop("model")
    two["output"] = {**two.get("output", {}), "folder": str(tmp_path / "fine")}
    trainer = trainer_of(two)
    assert trainer.potential.level_names == ["B", "A/TZ(1.0)"]
    frames = trainer.train
    replayed = np.flatnonzero(frames.levels == 1)
    assert len(replayed) == 6 and np.bincount(frames.levels).tolist() == [4, 6]
    system = frames.batch(replayed).sample.system
    kept = trainer.potential.eval().double().at_level("A/TZ(1.0)")
    assert torch.allclose(kept(system).energy, base(system).energy, rtol=0, atol=1e-4)
    assert torch.allclose(frames.batch(replayed).sample.labels["energy"], base(system).energy, rtol=0, atol=1e-4)
    path = run_training(parse_config(two))
    names = torchmdnet2.load(path).level_names
    assert names == ["B", "A/TZ(1.0)"]
    assert "train, A/TZ(1.0): energy MAE" in (path.parent / "log.txt").read_text(encoding="utf-8")
    from_level = {**two, "init": {"file": str(path), "level": "A/TZ(1.0)"}}
    assert parse_config(from_level).base().level_of_theory == "A/TZ(1.0)"
    with pytest.raises(BadConfig, match=r"levels\.A/TZ.*\.scale: fine-tuning keeps the scale of its file"):
        parse_config({**two, "levels": {"A/TZ(1.0)": {"scale": "own"}}})
    two["data"]["sources"][0]["level"] = "a/tz(1.0)"
    with pytest.raises(BadConfig, match=r"the level 'a/tz\(1\.0\)' and 'A/TZ\(1\.0\)', that of .* differ only"):
        make_setup(parse_config(two))
    two["data"]["sources"][0]["level"] = "A/TZ(1.0)"  # of labels by another method
    notes = make_setup(parse_config(two)).notes
    assert any("though the level of the labels is said to be that of the start, A/TZ(1.0)" in note for note in notes)
    two["data"]["sources"][0]["level"] = "C"
    notes = make_setup(parse_config({**two, "init": {"file": str(path)}})).notes
    assert any("its levels A/TZ(1.0) are not kept (init.level chooses)" in note for note in notes)
    with pytest.raises(BadConfig, match=r"init\.level: the model has no level 'C'"):
        parse_config({**two, "init": {"file": str(path), "level": "C"}})


@pytest.mark.parametrize("atoms_too", [False, True], ids=["molecules", "and single atoms"])
def test_a_refit_leaves_the_level_of_the_start(two, raw_config, tmp_path, recwarn, atoms_too):
    """Its elements, compositions and energies stay, also where new frames have one molecule, a new element, atoms."""
    frames = [atoms for atoms in make_frames(60, seed=3) if 6 not in atoms.numbers]  # of the start
    write(tmp_path / "start.xyz", frames, format="extxyz")
    data = {"train": str(tmp_path / "start.xyz"), "split": {"validation": 2, "test": 0}, "level_of_theory": "A"}
    first = run_training(parse_config({**raw_config, "data": data}))
    base = checkpoint.load(first, dtype="float64")
    assert base.elements == [1, 8]
    new = [atoms for atoms in make_frames(80, seed=4) if len(atoms) == 5][:12]
    alone = [Atoms([z], info={"energy": REFERENCES[z] + 5.0}) for z in (1, 6, 8)] if atoms_too else []
    for atom in alone:
        atom.calc = SinglePointCalculator(atom, energy=atom.info.pop("energy"), forces=np.zeros((1, 3)))
    write(tmp_path / "b.xyz", [*alone, *other_level(new)], format="extxyz")
    write(tmp_path / "general.xyz", frames[:6], format="extxyz")
    two["data"]["sources"] = [{"train": str(tmp_path / "b.xyz"), "level": "B"}]
    two["data"]["split"] = {"validation": 2, "test": 2}
    two["init"] = {"file": str(first), "replay": str(tmp_path / "general.xyz")}
    two.pop("model")
    potential = make_setup(parse_config(two)).potential.double()
    kept = potential.at_level("A")
    assert kept.elements == [1, 8] and potential.at_level("B").elements == [1, 6, 8]
    assert kept.determined == base.determined
    system = System.from_ase(frames[:6])
    assert torch.allclose(kept.eval()(system).energy, base(system).energy, rtol=0, atol=1e-4)
    assert not [w for w in recwarn if issubclass(w.category, UndeterminedEnergyWarning)]
    with pytest.raises(UnknownElement):
        kept(System.from_ase(new[0]))


def test_replay_at_the_first_level(two, raw_config, tmp_path):
    """New frames of the level of the start come first; the structures are labelled at that one."""
    first = run_training(parse_config({**raw_config, "data": {**raw_config["data"], "level_of_theory": "A/TZ(1.0)"}}))
    write(tmp_path / "general.xyz", make_frames(6, seed=5), format="extxyz")
    two["init"] = {"file": str(first), "replay": str(tmp_path / "general.xyz")}
    two.pop("model")
    frames = make_setup(parse_config(two)).frames["train"]
    replayed = np.flatnonzero(["(replay)" in frames.name(k) for k in range(len(frames))])
    assert len(replayed) == 6 and not frames.levels[replayed].any()
    energies = frames.batch(replayed).sample.labels["energy"]
    expected = checkpoint.load(first, dtype="float64")(frames.batch(replayed).sample.system).energy
    assert torch.allclose(energies, expected, rtol=0, atol=0.5)  # refitted; the other level is 15 to 25 eV above


def test_a_level_with_elements_of_its_own():
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
        "priors": [{"name": "atomref", "energies": {"1": -13.0, "8": -2000.0}}],
        "elements": [1, 8],
        "level": "A",
        "levels": {"B": {"energies": {"1": -12.0}, "elements": [1], "readout": True, "energy_scale": 2.0}},
    }
    potential = Potential.from_config(config)
    assert potential.elements_of_levels == [1, 8] and potential.at_level("B").elements == [1]
    assert potential.at_level("B").energy_scale == 2.0 and potential.at_level("A").energy_scale == 1.0
    with pytest.raises(ValueError, match="no prior atomref"):
        Potential.from_config({**config, "priors": []})


@pytest.mark.parametrize("early", [False, True], ids=["in the configuration", "in the metadata only"])
def test_names_of_levels_stay_with_their_weights(tmp_path, monkeypatch, early):
    """Names in another order than that of the alphabet; early files have that order in their metadata only."""
    names = ["B", "D", "A", "C"]
    further = {name: {"energies": {"1": -13.0 - k}, "readout": True} for k, name in enumerate(names[1:], 1)}
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "max_z": 8},
        "priors": [{"name": "atomref", "energies": {"1": -13.0}}],
        "level": "B",
        "levels": further,
    }
    potential = Potential.from_config(config).double().eval()
    for level in potential.levels:
        torch.nn.init.normal_(next(level.head.parameters()))
    metadata = {"data": {"levels": names}} if early else {}
    if early:
        monkeypatch.setattr(checkpoint, "_config_json", checkpoint._sorted_json)
    checkpoint.save(potential, tmp_path / "levels.tmn", metadata)
    assert torchmdnet2.load(tmp_path / "levels.tmn").level_names == names
    assert checkpoint.read_header(tmp_path / "levels.tmn")["levels"] == names
    system = System(z=[1, 1], pos=[[0.0, 0, 0], [0.75, 0, 0]])
    energies = [float(potential.at_level(name)(system).energy) for name in names]
    found = [float(torchmdnet2.load(tmp_path / "levels.tmn", level=name)(system).energy) for name in names]
    assert found == pytest.approx(energies, abs=1e-9) and len({round(e, 3) for e in energies}) == 4


@pytest.mark.slow
def test_two_levels_are_no_worse_than_each_alone(tmp_path):
    """GFN2-xTB and GFN1-xTB of ethanol, with a tenth of the labels at the second level; as many steps alone."""
    sources = {
        name: {"train": str(EXAMPLES / file), "split": {"train": n, "validation": v, "test": t, "seed": 1}}
        for name, file, n, v, t in (
            ("GFN2-xTB", "ethanol_gfn2.xyz", 300, 50, 200),
            ("GFN1-xTB", "ethanol_gfn1.xyz", 30, 20, 100),
        )
    }
    # 190 steps: errors of both together are 0.65 to 0.95 of those alone, with three seeds
    epochs = {"GFN2-xTB": 5, "GFN1-xTB": 47}

    def errors(levels, epochs):
        given = [{"level": name, **sources[name]} for name in levels]
        if len(levels) > 1:
            given[1]["share"] = 0.3
        raw = {
            "data": {"sources": given},
            "model": {"name": "tensornet", "hidden_channels": 16, "num_layers": 1, "num_rbf": 16, "cutoff": 4.5},
            "training": {"seed": 1, "num_threads": 1, "device": "cpu", "batch_size": 8, "max_epochs": epochs,
                         "lr": 1e-2, "warmup_steps": 50, "loss": {"energy": 1.0, "forces": 1.0}},
            "output": {"folder": str(tmp_path / "-".join(levels)), "report": False},
        }  # fmt: skip
        found = json.loads((run_training(parse_config(raw)).parent / "metrics.json").read_text())
        return {(name, what): found[f"test, {name}" if len(levels) > 1 else "test"][what]["rmse"]
                for name in levels for what in ("energy", "forces")}  # fmt: skip

    both = errors(["GFN2-xTB", "GFN1-xTB"], 5)
    for name, number in epochs.items():
        for key, alone in errors([name], number).items():
            assert both[key] <= alone, (key, both[key], alone)
