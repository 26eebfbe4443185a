"""Names and classes: helpful errors, no silent replacement, plug-ins on demand."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ase.build import molecule
from commands import tiny

from torchmdnet2 import Potential, registry
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.learn import LABELLERS
from torchmdnet2.learn.workers import Task, label_all
from torchmdnet2.registry import HEADS, PRIORS, REPRESENTATIONS, Registry, did_you_mean


def test_built_in_names():
    assert "tensornet" in REPRESENTATIONS and "scalar" in HEADS and "atomref" in PRIORS
    assert list(REPRESENTATIONS) == sorted(REPRESENTATIONS)
    assert REPRESENTATIONS["tensornet"].__name__ == "TensorNet"


def test_unknown_name_suggests():
    with pytest.raises(KeyError) as caught:
        REPRESENTATIONS["tensorent"]
    assert "unknown model 'tensorent', did you mean 'tensornet'?" in str(caught.value)
    assert did_you_mean("zzzz", ["tensornet"]) == ""
    with pytest.raises(KeyError, match=r"unknown model 'zzzz'\. Known: .*; for one of a plug-in, .* \(--plugin FILE"):
        REPRESENTATIONS["zzzz"]


def test_a_name_is_given_once():
    classes = Registry("thing")

    @classes.register("a")
    class First:
        pass

    with pytest.raises(ValueError, match="thing 'a' is already registered by"):

        @classes.register("a")
        class Second:
            pass

    assert classes.register("a")(First) is First, "running a module twice is allowed"


def test_plugins_are_imported_when_a_name_is_not_known(monkeypatch):
    class Entry:
        def load(self):
            @PRIORS.register("from-a-plugin")
            class FromPlugin:
                pass

    asked = []

    def entry_points(group):
        asked.append(group)
        return [Entry()]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    assert PRIORS["atomref"]
    monkeypatch.setattr(PRIORS, "_classes", dict(PRIORS._classes))
    assert PRIORS["atomref"].__name__ == "Atomref" and not asked
    assert PRIORS["from-a-plugin"].__name__ == "FromPlugin"
    assert asked == ["torchmdnet2.plugins"]


def test_a_plugin_that_fails_does_not_stop_the_others(monkeypatch):
    class Entry:
        def __init__(self, name):
            self.name, self.value = name, f"package.{name}"

        def load(self):
            if self.name == "broken":
                raise ModuleNotFoundError("No module named 'not_there'")
            PRIORS.register("from-a-plugin")(type("FromPlugin", (), {}))

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry("broken"), Entry("good")])
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    monkeypatch.setattr(PRIORS, "_classes", dict(PRIORS._classes))
    with pytest.warns(UserWarning, match=r"'broken' \(package\.broken\).*not_there"):
        assert "from-a-plugin" in list(PRIORS)  # names are listed with those of plug-ins
    assert "from-a-plugin" in PRIORS and PRIORS["from-a-plugin"].__name__ == "FromPlugin"


PRIOR = """
from torchmdnet2.priors import Prior
from torchmdnet2.registry import PRIORS


@PRIORS.register("shift")
class Shift(Prior):
    def __init__(self, by: float = 1.0):
        super().__init__()
        self.by, self.cutoff = by, None

    def forward(self, system, neighbors):
        return system.pos.double().new_full((system.num_atoms,), self.by)
"""
FORMAT = """
import numpy as np

from torchmdnet2.data import Frame, FrameReader, register_format


@register_format("heights")
class Heights(FrameReader):
    extensions = ("heights",)

    def frames(self):
        water = np.array([[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])
        for line in open(self.path):
            nowhere = np.zeros((3, 3)), np.zeros(3, dtype=bool)
            yield Frame(np.array([8, 1, 1]), water + [0, 0, float(line)], *nowhere, {"energy": 0.0})
"""
LABELLER = """
import numpy as np

from torchmdnet2.learn import LABELLERS, Labeller
from torchmdnet2.learn.labellers import Labels


@LABELLERS.register("mine")
class Mine(Labeller):
    level_of_theory = "none"

    def __call__(self, atoms, folder):
        return Labels(-7.5, np.zeros((len(atoms), 3)))
"""


def test_a_plug_in_file_in_all_processes(tmp_path, monkeypatch):
    """A format that this process reads, and a prior that two others evaluate; both files are in another folder."""
    folder = tmp_path / "plug ins"
    folder.mkdir()
    for name, text in (("my_prior", PRIOR), ("my_format", FORMAT)):
        (folder / f"{name}.py").write_text(text)
    (tmp_path / "in.heights").write_text("0\n1\n")
    monkeypatch.setattr(PRIORS, "_classes", dict(PRIORS._classes))
    exec(PRIOR, {"__name__": "my_prior"})  # to save a model
    save(Potential.from_config({**tiny().config, "priors": [{"name": "shift"}]}), tmp_path / "m.tmn")

    def score(*options):
        words = "-m", "torchmdnet2", "score", "m.tmn", "in.heights", "out.csv", "--devices", "cpu,cpu", *options
        environment = {**os.environ, "PYTHONPATH": str(Path(registry.__file__).parents[1])}
        return subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, env=environment)

    done = score("--plugin", "plug ins/my_prior.py", "--plugin", "plug ins/my_format.py")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    done = score("--plugin", "plug ins/my_format.py")
    assert done.returncode == 1 and "m.tmn" in done.stderr
    assert "unknown prior 'shift'" in done.stderr and "--plugin FILE" in done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder. What plug-ins change in this process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TORCHMDNET2_PLUGINS", "")
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    for each in (PRIORS, LABELLERS):
        assert list(each)
        monkeypatch.setattr(each, "_classes", dict(each._classes))
    yield tmp_path
    for name in {path.stem for path in tmp_path.glob("*.py")} - {"numpy"}:
        sys.modules.pop(name, None)


def test_workers_of_learn_get_plug_in_files(here):
    (here / "my_labeller.py").write_text(LABELLER)
    assert main(["config", "--learn", "--plugin", "my_labeller.py"]) == 0
    (outcome,) = label_all([Task(0, molecule("H2O"), here)], {"name": "mine"}, 1, 1, None)
    assert outcome.labels is not None and outcome.labels.energy == -7.5, outcome.reason


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.py", None, "missing.py: no such file"),
        ("fails.py", "import not_there", "fails.py cannot be imported: ModuleNotFoundError: No module named 'not_th"),
        ("ends.py", "import sys; sys.exit()", "ends.py cannot be imported: SystemExit"),
        ("cut.py", "x = (", "cut.py cannot be imported: SyntaxError"),
        ("taken.py", PRIOR.replace("shift", "zbl"), "prior 'zbl' is already registered by torchmdnet2.priors.zbl"),
        ("quiet.py", "import torchmdnet2.learn", "quiet.py registers nothing: decorate its class"),
        ("numpy.py", PRIOR, "Python has another module 'numpy'"),
        ("my-prior.py", PRIOR, "rename the file"),
        ("my_prior.txt", PRIOR, "rename the file"),
        ("", None, "the value is empty"),
    ],
)
def test_plug_in_files_that_are_refused(here, capsys, name, text, words):
    if text is not None:
        (here / name).write_text(text)
    assert main(["models", "--plugin", name]) == 2
    assert words in capsys.readouterr().err


def test_a_plug_in_file_can_be_given_again(here, capsys):
    (here / "my_prior.py").write_text(PRIOR)
    for _ in range(2):
        assert main(["models", "--plugin", "my_prior.py", "--plugin", str(here / "my_prior.py")]) == 0
    assert os.environ["TORCHMDNET2_PLUGINS"] == str(here / "my_prior.py") and "shift" in PRIORS
    monkey = sys.modules.pop("my_prior")
    del PRIORS._classes["shift"]
    registry._plugins_loaded = False  # as in another process, which gets the variable
    assert PRIORS["shift"].__name__ == "Shift" and sys.modules["my_prior"] is not monkey
