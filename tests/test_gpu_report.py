"""scripts/gpu_report.py: a stage that fails or hangs costs the others nothing, and results are kept after each."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def report():
    spec = importlib.util.spec_from_file_location("gpu_report", ROOT / "scripts/gpu_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_report"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_report"]


def python(code):
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


@pytest.fixture
def interruptible():
    """In the background SIGINT is ignored, also by the processes that are started there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_failing_and_hanging_stages(report, tmp_path, monkeypatch, capsys):
    hanging = python("import time; time.sleep(600)")
    stages = [
        report.Stage("hangs", 1, {"slow": hanging}),
        report.Stage(
            "pair", 60, {"fails": python("import sys; print('why'); sys.exit(4)"), "beside": python("print(1)")}
        ),
        report.Stage("absent", 60, {"absent": "/nowhere/compute-sanitizer x"}),
        report.Stage("works", 60, {"works": python("import os; print(os.environ['SET'])")}, {"SET": "it is set"}),
    ]
    monkeypatch.setattr(report, "stages", lambda *given: stages)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(tmp_path / "out")])
    assert report.main() == 1
    rows = {row["stage"]: row for row in json.loads((tmp_path / "out/report.json").read_text())}
    assert list(rows) == ["slow", "fails", "beside", "works"]
    assert rows["slow"]["stopped"] and rows["slow"]["exit"] != 0
    assert rows["beside"]["last"] == ["1"] and rows["beside"]["exit"] == 0
    assert rows["fails"]["exit"] == 4 and rows["fails"]["last"] == ["why"]
    assert rows["works"]["exit"] == 0 and rows["works"]["last"] == ["it is set"]
    assert "absent: /nowhere/compute-sanitizer is not on the path" in capsys.readouterr().out


def test_its_commands_name_files_that_exist(report):
    for stage in report.stages(Path("out"), Path("systems"), Path("data")):
        assert 0 < stage.seconds <= 600
        for command in stage.commands.values():
            command = re.sub(r"-m scripts\.bench (\w+)", r"scripts/bench/\1.py", command)
            names = [word for word in shlex.split(command) if word.startswith(("scripts/", "tests/"))]
            assert names and all((ROOT / name).exists() for name in names), command
