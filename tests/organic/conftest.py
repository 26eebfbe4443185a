"""The scripts of scripts/organic, imported by name."""

from __future__ import annotations

import sys

import pytest
from organic_world import FOLDER

NAMES = [path.stem for path in FOLDER.glob("*.py")]


@pytest.fixture
def scripts(monkeypatch):
    """Imports a script by its name; all are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: __import__(name)
    for name in NAMES:
        sys.modules.pop(name, None)
