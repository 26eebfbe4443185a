"""Names and classes: helpful errors, no silent replacement, plug-ins on demand."""

from __future__ import annotations

import importlib.metadata

import pytest

from torchmdnet2 import registry
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
    with pytest.raises(
        KeyError, match=r"unknown model 'zzzz'\. Known: .*; those of a plug-in if its package is installed"
    ):
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
