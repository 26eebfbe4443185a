"""The whole loop: rounds, reasons to stop, what is written, and the same bits after a kill in every phase."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import os
import shutil
import signal
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ase.io import read, write
from learn_world import fingerprints, labelled, raw_config, water_like
from rich.console import Console
from tiny import tiny_potential

from torchmdnet2 import System, load
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.ensemble import read_ensemble
from torchmdnet2.errors import BadConfig, BadData, UnknownElement, UntrainedCharge
from torchmdnet2.learn import labelling, load_learn_config, loop, parse_learn_config, run_learning
from torchmdnet2.learn.config import StopConfig
from torchmdnet2.learn.labellers import make_labeller
from torchmdnet2.learn.workers import Outcome
from torchmdnet2.md.guard import Unphysical
from torchmdnet2.training.reporting.log import TrainingLog
from torchmdnet2.training.run.folder import exclusive_folder


def changed(raw, **keys):
    """With other values of dotted keys; dots are written as __."""
    raw = copy.deepcopy(raw)
    for path, value in keys.items():
        *sections, last = path.split("__")
        node = raw
        for name in sections:
            node = node[name]
        node[last] = value
    return raw


LOOK = loop.explore


def explore_brittle(*arguments):
    """The first replica counts as broken after its last frame."""
    for runs in LOOK(*arguments):
        runs[0].broken_at, runs[0].reason = float(runs[0].time[-1]) + 0.01, "for the test"
        yield runs


def label_here(tasks, section, *_):
    labeller = make_labeller(section)
    for task in tasks:
        yield Outcome(task.number, labeller(task.atoms, task.folder))


@pytest.fixture
def labels_here(monkeypatch):
    """Labels in this process: the start of others takes longer. `finished` and test_labellers.py have those."""
    monkeypatch.setattr(labelling, "label_all", label_here)


@pytest.fixture
def brittle(monkeypatch, labels_here):
    monkeypatch.setattr(loop, "explore", explore_brittle)


@pytest.fixture(scope="module")
def finished(start_file, tmp_path_factory):
    """A run of three rounds: its configuration, its result, and what it printed. Later rounds hardly change weights."""
    raw = raw_config(start_file, tmp_path_factory.mktemp("finished") / "learn")
    raw["refine"] = {"max_epochs": 1, "lr": 1e-12, "lr_min": 0.0}
    raw["labels"]["processes"] = 2
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "explore", explore_brittle)
        result = run_learning(parse_learn_config(raw), log=TrainingLog(None, Console(file=printed, width=500)))
    return raw, result, printed.getvalue()


def test_rounds_until_the_budget_is_spent(finished):
    _, result, said = finished
    folder = result.ensemble.parent
    assert result.reason == "the budget of 4 labels is spent" and not result.stable
    assert [r.asked for r in result.rounds] == [0, 3, 4]
    assert [(r.train, r.validation) for r in result.rounds] == [(7, 1), (9, 2), (10, 2)]
    assert result.rounds[0].new_errors is None and result.rounds[1].new_errors["frames"] == 3
    assert all(t.replicas == 2 and t.whole == 1 for r in result.rounds for t in r.temperatures)

    selected = read(folder / "round_000" / "selected.xyz", ":")
    assert [atoms.info["reason"] for atoms in selected] == ["broken: for the test"] * 2 + ["disagreement"]
    assert {atoms.info["temperature_K"] for atoms in selected[:2]} == {5.0, 10.0}
    for atoms in selected:
        assert atoms.info["round"] == 1 and atoms.info["replica"] in (0, 1) and atoms.info["start"] in (0, 4)
        assert 0 < atoms.info["time_ps"] <= 0.02 and atoms.info["spread"] >= 0
    trained = [atoms for name in ("train", "validation") for atoms in read(folder / f"round_001/{name}.xyz", ":")]
    assert sum(atoms.info["reason"] == "start" for atoms in trained) == 8
    new = next(atoms for atoms in trained if atoms.info["reason"] == "disagreement")
    again = labelled(new.copy())
    assert new.get_potential_energy() == pytest.approx(again.get_potential_energy(), abs=1e-7)
    held_out = [read(folder / f"round_00{k}" / "validation.xyz", ":") for k in (0, 1)]
    assert np.array_equal(held_out[0][0].positions, held_out[1][0].positions)

    assert read_ensemble(result.ensemble) == [folder / "round_002" / f"member_{k}" / "best.tmn" for k in (0, 1)]
    finished = json.loads((folder / "finished.json").read_text())
    assert finished == {"reason": result.reason, "stable": False, "rounds": 3, "asked": 4, "failed": 0}
    page = (folder / "report.html").read_text()
    assert "the budget of 4 labels is spent" in page and "data:image/png;base64" in page and "<script" not in page
    assert "start frame(s) labelled again" in said and "round 1: 3 labels requested, 0 failed" in said
    assert "round 2: dynamics took" in said


def test_weights_go_on_from_the_last_round(finished):
    folder = finished[1].ensemble.parent
    system = System.from_ase(water_like(50))
    forces = [
        [load(folder / f"round_00{r}/member_{k}/best.tmn", dtype="float64")(system).forces for k in (0, 1)]
        for r in (0, 1)
    ]
    for before, after in zip(*forces, strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy(), atol=1e-5)
    assert float((forces[0][0] - forces[0][1]).abs().max()) > 1e-4  # members differ


def test_stable_models_need_no_labels(raw_learn, labels_here):
    raw = changed(raw_learn, stop__spread=100.0)
    result = run_learning(parse_learn_config(raw))
    words = "stable: 100% of the replicas whole for 0.02 ps, and a spread below 100 eV/Å in 99 of 100 frames"
    assert result.stable and result.reason == words
    assert len(result.rounds) == 1 and result.rounds[0].asked == 0
    assert not result.rounds[0].stable(StopConfig(spread=1e-6))


def test_the_last_round_ends_a_run(raw_learn):
    config = parse_learn_config(changed(raw_learn, stop__rounds=3))
    reasons = [
        loop._Loop._stop(
            SimpleNamespace(config=config), SimpleNamespace(stable=lambda stop: False, asked=0, round=number)
        )
        for number in range(3)
    ]
    assert reasons == ["", "", "3 rounds are done"]


def test_random_selection_and_unlabelled_starts(raw_learn, brittle, tmp_path):
    """Structures without labels are labelled first, from given starts, and count to the budget."""
    write(tmp_path / "bare.xyz", [water_like(seed) for seed in range(5)])
    write(tmp_path / "starts.xyz", [water_like(9)])
    raw = changed(
        raw_learn, start={"file": str(tmp_path / "bare.xyz"), "labelled": False, "frames": 4},
        selection={"name": "random"}, labels__budget=6, labels__per_round=2,
    )  # fmt: skip
    raw["dynamics"]["starts"] = str(tmp_path / "starts.xyz")
    with pytest.raises(BadConfig, match=r"labels\.budget: 3 is less than the 4 start frames, which are labelled first"):
        run_learning(parse_learn_config(changed(raw, labels__budget=3)))
    result = run_learning(parse_learn_config(raw))
    folder = result.ensemble.parent
    assert [r.asked for r in result.rounds] == [4, 6]
    assert [r.reasons for r in result.rounds] == [{"start": 4}, {"random": 2}]
    assert len(read(folder / "starts.xyz", ":")) == 1


@pytest.mark.parametrize("name", ["config.yaml", "report.html", "starts.xyz"])
def test_files_of_others_are_not_replaced(raw_learn, name):
    """The configuration of the run itself may be in the output folder."""
    folder = Path(raw_learn["output"]["folder"])
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(BadConfig, match=f"holds the file {name}, which is not of a run"):
        run_learning(parse_learn_config(raw_learn))
    assert (folder / name).read_text() == "mine"


def test_one_run_at_a_time(raw_learn, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.setattr("torchmdnet2.training.run.folder._PATIENCE", 0.0)
    config = parse_learn_config(raw_learn)
    folder = Path(config.output.folder)
    with exclusive_folder(folder), pytest.raises(BadConfig, match="another process trains in"):
        run_learning(config)
    assert not list(folder.glob("*"))


def test_labels_of_another_method_are_refused(raw_learn, tmp_path):
    frames = [labelled(water_like(seed)) for seed in range(4)]
    for atoms in frames:
        atoms.calc.results["energy"] /= 27.2
        atoms.calc.results["forces"] /= 27.2
    write(tmp_path / "hartree.xyz", frames, format="extxyz")
    raw = changed(raw_learn, start__file=str(tmp_path / "hartree.xyz"))
    with pytest.raises(BadData, match=r"differ from those of the labeller: energies by .* meV/atom"):
        run_learning(parse_learn_config(raw))
    # the mistake can be corrected in the same folder
    folder = Path(raw["output"]["folder"])
    assert (folder / "verify.old").is_dir() and not (folder / "run.json").exists()
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="there is no data file"):
            run_learning(parse_learn_config(changed(raw_learn, start__file=str(tmp_path / "none.xyz"))))
    with pytest.raises(BadConfig, match=r"start\.frames: should be greater than or equal to 2, got 1"):
        run_learning(parse_learn_config(changed(raw_learn, start__frames=1)))
    named = changed(raw_learn, start__level_of_theory="PBE0")
    with pytest.raises(BadConfig, match=r"start\.level_of_theory: is PBE0, but the labeller computes Morse"):
        parse_learn_config(named)


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("one.xyz", {}, BadConfig, r"start\.file: has one frame; at least two are needed"),
        ("bare.xyz", {}, BadData, r"bare\.xyz, frame 2: the frame has no energy; set start\.labelled to false"),
        ("good.xyz", {"labels__max_force": 1e-6}, BadData, "start frame 0 cannot be labelled: a force of"),
        ("gone.xyz", {"start__labelled": False}, FileNotFoundError, r"gone\.xyz: no such file"),
        ("junk.xyz", {"start__labelled": False}, BadData, r"junk\.xyz: the file cannot be read as structures: "),
        ("hot.xyz", {"start__labelled": False}, BadData, "round 0: only one frame was labelled; two are needed"),
    ],
)
def test_start_frames_that_cannot_be_used(raw_learn, tmp_path, name, keys, error, message):
    good = [labelled(water_like(seed)) for seed in range(2)]
    hot = water_like(1)
    hot.positions[1] *= 0.6
    frames = {
        "one.xyz": good[:1],
        "bare.xyz": [*good, water_like(2)],
        "good.xyz": good,
        "hot.xyz": [water_like(0), hot],
    }
    if name in frames:
        write(tmp_path / name, frames[name], format="extxyz")
    elif name == "junk.xyz":
        (tmp_path / name).write_text("hello")
    with pytest.raises(error, match=message):
        run_learning(parse_learn_config(changed(raw_learn, start__file=str(tmp_path / name), **keys)))


@pytest.mark.parametrize("labelled_start", [True, False])
def test_starts_that_the_models_will_not_know(raw_learn, tmp_path, monkeypatch, labelled_start):
    """Named before a label or a training, and the file can be corrected in the same folder."""
    monkeypatch.setattr(loop, "label_frames", lambda *_: pytest.fail("labels were computed"))
    charged, other, close = water_like(0), water_like(0), water_like(0)
    charged.info["charge"] = -2
    other.numbers[1] = 9
    close.positions[1] = close.positions[0] + 0.01
    raw = changed(raw_learn, start__labelled=labelled_start, labels__budget=8)
    for atoms, error, words in [
        (charged, UntrainedCharge, "dynamics.starts: frame 0 has the total charge -2, .* charge 0 only. Leave this"),
        (other, UnknownElement, "dynamics.starts: .*frame 0.* is F .* knows only H, O.*Leave this"),
        (close, Unphysical, "dynamics.starts: frame 0"),
    ]:
        write(tmp_path / "starts.xyz", [atoms, water_like(1)], format="extxyz")
        raw["dynamics"]["starts"] = str(tmp_path / "starts.xyz")
        with pytest.raises(error, match=words):
            run_learning(parse_learn_config(raw))
    assert not list(Path(raw["output"]["folder"]).iterdir())


def test_what_the_first_training_refuses_can_be_corrected_in_the_same_folder(raw_learn, monkeypatch):
    monkeypatch.setattr(loop, "run_training", lambda *_, **__: pytest.fail("a training began"))
    for change, words in (
        ({"train__model__max_z": 5}, r"model\.max_z: O is in the training frames"),
        ({"train__priors": [{"name": "atomref", "energies": {"1": -13.6}}]}, "atomref.energies has no entry for O"),
    ):
        with pytest.raises(BadConfig, match=words):
            run_learning(parse_learn_config(changed(raw_learn, **change)))
    bare = {"start": {**raw_learn["start"], "labelled": False}, "labels__budget": 8, "train__model__max_z": 5}
    with pytest.raises(BadConfig, match=r"train\.model: elements must be atomic numbers 1 … 4"):
        run_learning(parse_learn_config(changed(raw_learn, **bare)))
    assert {path.name for path in Path(raw_learn["output"]["folder"]).iterdir()} <= {"verify.old", "log.txt"}


def test_starts_that_the_model_of_init_knows(raw_learn, tmp_path):
    """A first round that fine-tunes: its models know what the base knows, too."""
    base = tiny_potential(elements=[1, 8, 9], total_charges=[0, -2])
    save(base, tmp_path / "base.tmn")
    atoms = water_like(0)
    atoms.numbers[1], atoms.info["charge"] = 9, -2
    write(tmp_path / "starts.xyz", atoms, format="extxyz")
    raw_learn["train"] = {"init": {"file": str(tmp_path / "base.tmn")}}
    raw_learn["dynamics"]["starts"] = str(tmp_path / "starts.xyz")
    config = parse_learn_config(raw_learn)
    loop.prepare_start(config, tmp_path)
    loop.check_starts(config, tmp_path)
    atoms.info["charge"] = 2
    write(tmp_path / loop.STARTS, atoms, format="extxyz")
    with pytest.raises(UntrainedCharge, match="charge -2, 0 only"):
        loop.check_starts(config, tmp_path)


def test_a_round_without_any_label_ends_the_run(raw_learn, brittle):
    raw = changed(raw_learn, labels__max_force=1e-6, start__verify=0)
    with pytest.raises(BadData, match="round 1: none of 3 frames could be labelled; the first: a force of"):
        run_learning(parse_learn_config(raw))


def test_nothing_left_to_select(raw_learn, labels_here, monkeypatch):
    """A replica that broke at once, at a start that is labelled, gives no frame."""

    def explore(*arguments):
        for runs in LOOK(*arguments):
            for run in runs:
                run.broken_at, run.reason = 0.0, "for the test"
                run.time, run.pos, run.regular, run.spread = run.time[:1], run.pos[:1], run.regular[:1], run.spread[:1]
            yield runs

    monkeypatch.setattr(loop, "explore", explore)
    result = run_learning(parse_learn_config(raw_learn))
    assert result.reason.startswith("no frame is left to select") and not result.stable


# --- bad configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"labels__buget": 3}, r"labels\.buget: unknown key, did you mean 'budget'"),
        ({"labels__labeller": {"name": "gfn3-xtb"}}, r"unknown labeller 'gfn3-xtb', did you mean 'gfn"),
        ({"labels__labeller": {"name": "gfn2-xtb", "acuracy": 1}}, r"labels\.labeller\.acuracy: unknown key"),
        (
            {"labels__labeller": {"name": "command", "command": ["x"], "level_of_theory": "x"}},
            r"labels\.labeller\.comm",
        ),
        (
            {"labels__labeller": {"name": "command", "command": ["x"], "level_of_theory": "x", "output": "a/b.xyz"}},
            "must be the name of a file, without a folder, got a/b.xyz",
        ),
        ({"selection": {"name": "disagrement"}}, "unknown selection 'disagrement', did you mean 'disagreement'"),
        ({"selection__lowest": 2000.0}, r"selection: lowest \(2000.0\) must be below"),
        ({"dynamics__temperatures": []}, r"dynamics\.temperatures"),
        ({"dynamics__temperatures": [300.0, 300.0]}, "a temperature is given twice"),
        ({"dynamics__every": 5.0}, r"every \(5.0 ps\) must be between"),
        ({"devices": "cpu,cuda:0"}, "devices: should be all, or names of one kind, such as cuda:0,cuda:1"),
        ({"devices": "gpu"}, "devices: should be all, or names of one kind"),
        ({"members": 1}, "members: should be greater than or equal to 2, got 1"),
        ({"train__model__hiden_channels": 3}, r"train: model\.hiden_channels: unknown key, did you mean"),
        ({"train__data": {"train": "x"}}, r"train\.data: is set by the loop"),
        ({"train__modle": {}}, r"train\.modle: unknown key, did you mean 'model'"),
        ({"train__training__seed": 3}, r"train\.training\.seed: set `seed` instead"),
        ({"refine": {"max_epoch": 3}}, r"training\.max_epoch: unknown key, did you mean 'max_epochs'"),
        ({"start__units": {"energy": "eVolt"}}, r"start\.units"),
        ({"start": {}}, r"start\.file: is required"),
        ({"start__labelled": False, "start__verify": 3}, r"start\.verify: has no effect"),
        ({"start__labelled": False, "start__level_of_theory": "PBE0"}, r"start\.level_of_theory: has no effect"),
        ({"stop__rounds": 1, "refine": {"max_epochs": 3}}, "refine: has no effect"),
    ],
)
def test_mistakes_are_named(raw_learn, keys, message):
    with pytest.raises(BadConfig, match=message):
        parse_learn_config(changed(raw_learn, **keys))


def test_the_command(tmp_path, capsys):
    assert main(["config", "--learn"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "learn.yaml").write_text(text)
    for key in ("per_round:", "temperatures:", "lowest:", "refine:", "# s for one frame"):
        assert key in text
    assert load_learn_config(tmp_path / "learn.yaml").labels.budget == 200  # what it prints can be read
    assert main(["learn", str(tmp_path / "learn.yaml"), "--set", "labels.buget=3"]) == 2
    assert "labels.buget: unknown key" in capsys.readouterr().err
    assert main(["learn", str(tmp_path / "none.yaml")]) == 1


# --- resuming ----------------------------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_respected(finished, brittle, tmp_path):
    raw, first, _ = finished
    raw = changed(raw, output__folder=str(tmp_path / "copy"))
    config = parse_learn_config(raw)
    with pytest.raises(BadConfig, match="no run to resume"):
        run_learning(config, "must")
    shutil.copytree(first.ensemble.parent, tmp_path / "copy")
    before = fingerprints(tmp_path / "copy")
    with pytest.raises(BadConfig, match="holds a run; continue it with --resume auto"):
        run_learning(config)
    other = changed(raw, dynamics__time=0.08)
    with pytest.raises(BadConfig, match=r"another configuration: dynamics\.time changed"):
        run_learning(parse_learn_config(other), "auto")
    assert run_learning(config, "auto").rounds == first.rounds
    assert fingerprints(tmp_path / "copy") == before
    record = tmp_path / "copy" / "run.json"
    then = record.read_text()
    (file, digest), *_ = json.loads(then)["inputs"].items()
    record.write_text(then.replace(digest, "0" * 64))
    with pytest.raises(BadConfig, match=f"{Path(file).name} has changed since; choose another"):
        run_learning(config, "auto")
    record.write_text(then)
    more = run_learning(parse_learn_config(changed(raw, labels__budget=6)), "must")
    assert [r.asked for r in more.rounds] == [0, 3, 4, 6]  # goes on where it was


KILLS = [
    ("torchmdnet2.learn.loop", "write_frames", 4),  # between validation.xyz and train.xyz
    ("torchmdnet2.learn.labelling", "append", 1),  # while start frames are labelled again
    ("torchmdnet2.training.run.run", "write_metrics", 2),  # within a training
    ("torchmdnet2.learn.loop", "run_training", 2),  # between two members
    ("torchmdnet2.learn.loop", "write_ensemble", 1),
    ("torchmdnet2.learn.loop", "write_trajectories", 2),  # between two temperatures
    ("torchmdnet2.learn.report", "atomic_write", 1),
    ("torchmdnet2.learn.loop", "frames_of", 1),  # during the selection
    ("torchmdnet2.learn.loop", "write_report", 1),
    ("torchmdnet2.learn.labelling", "append", 2),  # between two labels
    ("torchmdnet2.learn.loop", "write_report", 2),
]
"""Module, function, and the call right before which a process dies; each goes on from where the one before died."""


def learn_and_die(raw, module, name, count):
    """Entry point of the processes that are killed, right before a function is called for the nth time."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    loop.explore = explore_brittle
    if module:
        place, calls = import_module(module), []
        original = getattr(place, name)

        def deadly(*arguments, **options):
            calls.append(name)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(place, name, deadly)
    run_learning(parse_learn_config(raw), "auto")


def run_in_process(raw, *kill):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmdnet2.learn.loop", "ase.io"])
    process = context.Process(target=learn_and_die, args=(raw, *kill))
    process.start()
    process.join()
    return process.exitcode


def check_kills(raw_learn, tmp_path, kills):
    raw = changed(raw_learn, labels__budget=3, labels__processes=2, train__training__max_epochs=3)
    whole, parts = (changed(raw, output__folder=str(tmp_path / name)) for name in ("whole", "parts"))
    assert run_in_process(whole, "", "", 0) == 0
    for kill in kills:
        assert run_in_process(parts, *kill) == -signal.SIGKILL, kill
    assert run_in_process(parts, "", "", 0) == 0
    expected = fingerprints(tmp_path / "whole")
    assert any(name.endswith("npz") for name in expected) and len(expected) > 20
    assert fingerprints(tmp_path / "parts") == expected


class Died(BaseException):
    """In place of a kill, within the process."""


def test_interrupted_in_several_phases_and_resumed_to_the_same_bits(finished, brittle, monkeypatch, tmp_path):
    raw, whole, _ = finished
    config = parse_learn_config(changed(raw, output__folder=str(tmp_path / "parts")))
    for module, name, count in KILLS[:1] + KILLS[5::4]:
        place, calls = import_module(module), []
        original = getattr(place, name)

        def deadly(*arguments, calls=calls, count=count, original=original, **options):
            calls.append(arguments)
            if len(calls) == count:
                raise Died
            return original(*arguments, **options)

        with monkeypatch.context() as patch, pytest.raises(Died):
            patch.setattr(place, name, deadly)
            run_learning(config, "auto")
    assert run_learning(config, "auto").rounds == whole.rounds
    expected = fingerprints(whole.ensemble.parent)
    assert len(expected) > 20 and fingerprints(tmp_path / "parts") == expected


def test_two_devices_end_with_the_same_bits(finished, brittle, tmp_path):
    raw, whole, _ = finished
    raw = changed(raw, output__folder=str(tmp_path / "two"), devices="cpu,cpu")
    with pytest.raises(BadConfig, match=r"train.training.device: has no effect: `devices` is given"):
        parse_learn_config(raw)
    del raw["train"]["training"]["device"]
    raw["stop"]["rounds"] = 2
    assert run_learning(parse_learn_config(raw)).rounds == whole.rounds[:2]
    expected, found = fingerprints(whole.ensemble.parent), fingerprints(tmp_path / "two")
    del found["finished.json"]  # of three rounds there
    assert len(found) > 12 and "round_001/member_1/best.tmn" in found
    assert found == {name: expected[name] for name in found}


def test_no_other_device_is_used_than_the_given_ones(raw_learn, monkeypatch, tmp_path):
    """The committee was evaluated on the first GPU, also where that was not among them."""
    del raw_learn["train"]["training"]["device"]
    monkeypatch.setattr(loop, "device_of", lambda name: name)
    monkeypatch.setattr(loop, "devices_of", lambda names: names.split(","))
    monkeypatch.setattr(loop.Ensemble, "load", lambda path, device: device)
    run = loop._Loop(parse_learn_config(changed(raw_learn, devices="cuda:2,cuda:3")), tmp_path, TrainingLog(None))
    assert run._committee(0) == "cuda:2"


def test_errors_of_a_training_in_a_process_are_told(raw_learn, monkeypatch, tmp_path):
    del raw_learn["train"]["training"]["device"]
    config = parse_learn_config(changed(raw_learn, devices="cpu,cpu"))
    check = loop._Loop._divide

    def damaged(self, number, new):
        check(self, number, new)
        (self._of(number) / loop.TRAIN).write_text("3\nno frame\n")

    monkeypatch.setattr(loop._Loop, "_divide", damaged)
    with pytest.raises(BadData, match=r"train\.xyz"):
        run_learning(config)


@pytest.mark.long
def test_the_shipped_configuration_at_a_smaller_size(tmp_path, monkeypatch):
    """GFN2-xTB labels of ethanol, chosen in dynamics; they are those of the data's own labeller."""
    pytest.importorskip("tblite")
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    small = {
        "output.folder": tmp_path / "learn", "start.frames": 12, "start.verify": 2, "labels.per_round": 5,
        "labels.budget": 10, "dynamics.time": 0.1, "dynamics.replicas": 4, "train.training.max_epochs": 12,
        "refine.max_epochs": 6, "stop.spread": 1e-3,
    }  # fmt: skip
    options = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    assert main(["learn", "configs/learn_ethanol.yaml", *options]) == 0
    finished = json.loads((tmp_path / "learn" / "finished.json").read_text())
    assert finished["asked"] == 10 and finished["rounds"] == 3 and finished["failed"] == 0
    rounds = [json.loads((tmp_path / f"learn/round_00{k}/round.json").read_text()) for k in range(3)]
    # what was chosen are frames at which the models erred, by more than at frames like those they knew
    assert rounds[1]["new_errors"]["forces"] > 2 * rounds[0]["validation_errors"]["forces"] > 0.01
    chosen = read(tmp_path / "learn" / "round_001" / "labelled.xyz", ":")
    assert len(chosen) == 5
    for frame in chosen[:2]:
        labels = make_labeller({"name": "gfn2-xtb"})(frame, tmp_path)
        assert labels.energy == pytest.approx(frame.get_potential_energy(), abs=1e-5)
        np.testing.assert_allclose(frame.get_forces(), labels.forces, atol=1e-4)
    assert load(tmp_path / "learn/round_002/member_0/best.tmn").level_of_theory == "GFN2-xTB"


@pytest.mark.long
def test_killed_in_every_phase_and_resumed_to_the_same_bits(raw_learn, tmp_path):
    check_kills(raw_learn, tmp_path, KILLS)


def test_a_signal_says_how_to_go_on(raw_learn, labels_here, monkeypatch):
    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(loop, "explore", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"by SIGTERM; finished work is kept in .*--resume auto") as stop:
        run_learning(parse_learn_config(raw_learn))
    assert stop.value.exit_code == 143
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
