"""The report: one page with everything in it, the worst frames as structures, trackers where they are installed."""

from __future__ import annotations

import base64
import html
import json
import re
import sys
import types
from html.parser import HTMLParser

import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2.core.html_page import breakable
from torchmdnet2.errors import MissingBackend
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.evaluation import Evaluation
from torchmdnet2.training.reporting.report import digits, pictures
from torchmdnet2.training.run.run import run_training

from .conftest import make_frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A short run on two test files; one frame of the second has a wrong label."""
    path = tmp_path_factory.mktemp("report")
    frames = make_frames(40)
    bad = frames[37]
    bad.calc = SinglePointCalculator(bad, energy=bad.get_potential_energy(), forces=bad.get_forces() + 20.0)
    write(path / "a.xyz", frames[:30], format="extxyz")
    write(path / "b.xyz", frames[30:35], format="extxyz")
    write(path / "c<d>.xyz", frames[35:], format="extxyz")
    raw = {
        "data": {
            "train": str(path / "a.xyz"),
            "test": [str(path / "b.xyz"), str(path / "c<d>.xyz")],
            "split": {"validation": 6},
        },
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "training": {"batch_size": 5, "max_epochs": 3, "lr": 5e-3, "device": "cpu"},
        "output": {"folder": str(path / "run"), "outliers": 3},
    }
    run_training(parse_config(raw))
    return path / "run"


class Balance(HTMLParser):
    """Counts what is open, and collects what would be fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.images = [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "img":
            self.images.append(given["src"])
        self.fetched += [v for k, v in attributes if k in ("src", "href") and not v.startswith("data:")]
        if tag not in ("img", "meta", "p", "wbr", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "p":
            assert self.open.pop() == tag


def test_page_needs_no_other_file(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Balance()
    page.feed(text)
    assert page.open == [] and page.fetched == []
    assert "://" not in text and "<script" not in text
    pictures = [base64.b64decode(src.partition(",")[2]) for src in page.images]
    assert all(p.startswith(b"\x89PNG") for p in pictures)
    for name in ("learning_curve", "energy_parity", "force_parity", "errors_by_element"):
        assert (folder / f"{name}.png").read_bytes() in pictures
    assert len(pictures) == 4 + 3
    shown = html.unescape(re.sub(r"<[^>]*>", " ", re.sub("<style>.*?</style>", "", text, flags=re.DOTALL)))
    errors = json.loads((folder / "metrics.json").read_text())
    for subset in ("test", "validation"):
        assert f" {1e3 * errors[subset]['forces']['mae']:.4g} " in shown
    assert f" {1e3 * errors['test']['forces_by_element']['O']['rmse']:.4g} " in shown
    assert re.search(r"energy per atom\s+\(meV/atom\)\s+forces\s+\(meV/Å\)", shown)  # heads of the worst frames
    for part in (
        "elements H, C, O; cutoff 3.0 Å",
        "reference energy",
        "b.xyz",
        "c<d>.xyz",
        "frames/s",
        "MiB",
        "hidden_channels: 8",
        "24 train, 6 validation, 10 test",
    ):
        assert part in shown, part
    assert "c<d>" not in text  # names of files are escaped
    from torchmdnet2.checkpoint import read_header

    digests = read_header(folder / "best.tmn")["metadata"]["data"]["files"]
    assert len(digests) == 3 and all(digest in shown for digest in digests.values())


def test_without_matplotlib_a_training_ends_well(tmp_path, monkeypatch):
    """Bar K6: the report has no plots, and a line says so."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write(tmp_path / "a.xyz", make_frames(12), format="extxyz")
    raw = {
        "data": {"train": str(tmp_path / "a.xyz"), "split": {"validation": 4}},
        "model": {"hidden_channels": 8, "num_layers": 0, "num_rbf": 4, "cutoff": 3.0, "max_z": 10},
        "training": {"batch_size": 8, "max_epochs": 1, "device": "cpu"},
        "output": {"folder": str(tmp_path / "run"), "outliers": 2},
    }
    run_training(parse_config(raw))
    assert "report.html (no plots: matplotlib" in (tmp_path / "run/log.txt").read_text()
    assert not list((tmp_path / "run").glob("*.png")) and "Largest errors" in (tmp_path / "run/report.html").read_text()


def test_errors_beside_the_spread_of_the_labels(folder):
    shown = html.unescape(re.sub(r"<[^>]*>", " ", (folder / "report.html").read_text(encoding="utf-8")))
    found = re.search(r"test\s+forces\s+[\d.]+\s+([\d.]+)\s+meV/Å\s+\d+\s+([\d.e+]+) %", shown)
    splits = json.loads((folder / "splits.json").read_text())["test"]
    frames = [atoms for file in splits["files"] for atoms in read(file, ":")]
    spread = np.concatenate([frames[k].get_forces() for k in splits["indices"]]).std()
    assert float(found[2]) == pytest.approx(0.1 * float(found[1]) / spread, rel=0.06)  # two digits


@pytest.mark.parametrize(
    "value, text", [(1235.06, "1235"), (86.0441, "86.04"), (0.75, "0.7500"), (0.0, "0"), (-3e-5, "-0.00003000")]
)
def test_four_digits_count(value, text):
    assert digits(value) == text


def test_only_long_words_may_be_divided():
    assert breakable("12345 frames/s, 123456 atoms/s") == "12345 frames/s, 123456 atoms/s"
    assert breakable("a<b>/of_many/long/folders.xyz, frame 3") == (
        "a&lt;b&gt;/<wbr>of_<wbr>many/<wbr>long/<wbr>folders.xyz, frame 3"
    )


def test_a_learning_curve_of_zeros_can_be_drawn(recwarn, drawn):
    history = [{"epoch": 1, "best": True, "train_forces_mae": 0.0, "validation_forces_mae": 0.0}]
    assert pictures(history, {"test": Evaluation({})})["learning_curve"].startswith(b"\x89PNG")
    assert not recwarn.list


def test_worst_frames_are_found(folder):
    frames = read(folder / "outliers.xyz", ":")
    assert len(frames) == 3
    worst = frames[0]
    assert worst.info["frame"].endswith("c<d>.xyz, frame 2")  # frame 37 of all, 7 of the test frames
    errors = [f.info["rms_error_forces"] for f in frames]
    assert errors == sorted(errors, reverse=True) and errors[0] > 15 > errors[1]
    for atoms in frames:
        difference = atoms.get_forces() - atoms.arrays["reference_forces"]
        assert np.sqrt((difference**2).mean()) == pytest.approx(atoms.info["rms_error_forces"], rel=1e-4)
        energy = (atoms.get_potential_energy() - atoms.info["reference_energy"]) / len(atoms)
        assert abs(energy) == pytest.approx(atoms.info["rms_error_energy_per_atom"], abs=1e-6)


def test_trackers_that_are_not_installed(raw_config, monkeypatch):
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for output, package in (({"tensorboard": True}, "tensorboard"), ({"wandb": {"project": "p"}}, "wandb")):
        raw_config["output"] = {**raw_config["output"], "tensorboard": False, "wandb": None, **output}
        with pytest.raises(MissingBackend, match=rf"output.{package}.*pip install 'torchmdnet2\[{package}\]'"):
            run_training(parse_config(raw_config), check=True)


def test_trackers(raw_config, monkeypatch, tmp_path):
    """Both with stand-ins that write down what they are given; resumed runs continue their curves."""
    seen = {"board": [], "wandb": [], "summary": {}, "closed": 0, "known": 0}

    class Writer:
        def __init__(self, folder, purge_step):
            seen.update(folder=folder, purge_step=purge_step)

        def add_scalar(self, name, value, step):
            seen["board"].append((name, value, step))

        def flush(self):
            pass

        def close(self):
            seen["closed"] += 1

    class Run:
        summary = seen["summary"]

        @property
        def step(self):
            return seen["known"]

        def log(self, values, step, commit):
            assert commit
            seen["wandb"].append((step, values))

        def finish(self):
            seen["closed"] += 1

    def init(**arguments):
        seen["init"] = arguments
        return Run()

    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer
    wandb = types.ModuleType("wandb")
    wandb.init = init
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    raw_config["output"].update(tensorboard=True, wandb={"project": "p", "mode": "offline"})
    raw_config["training"].update(max_epochs=2, lr_schedule="constant")
    run_training(parse_config(raw_config))
    assert seen["purge_step"] == 1
    assert seen["folder"] == str(tmp_path / "run" / "tensorboard") and seen["closed"] == 2
    steps = {name: step for name, _, step in seen["board"]}
    assert steps["validation/forces_mae"] == 2 and "train/loss" in steps and "lr" in steps
    assert [step for step, _ in seen["wandb"]] == [1, 2]
    arguments = seen["init"]
    identity = (tmp_path / "run" / "wandb.id").read_text()
    assert len(identity) == 8
    for name, value in {"project": "p", "name": "run", "id": identity, "mode": "offline", "resume": "allow"}.items():
        assert arguments[name] == value
    assert arguments["config"]["training"]["max_epochs"] == 2
    assert seen["summary"]["test/forces_mae"] > 0

    for epochs, known, sent in ((3, 0, [1, 2, 3]), (4, 3, [3, 4])):  # of a new file; of a server that has two epochs
        seen["wandb"].clear()
        seen["known"] = known
        raw_config["training"]["max_epochs"] = epochs
        run_training(parse_config(raw_config), resume="auto")
        assert seen["purge_step"] == epochs and seen["init"]["id"] == identity
        assert [step for step, _ in seen["wandb"]] == sent
    raw_config["output"]["overwrite"] = True
    run_training(parse_config(raw_config))
    assert seen["init"]["id"] != identity  # another run
