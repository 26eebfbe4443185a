"""scripts/bench: every file is a benchmark with options, or used by one; what they share does what it says."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest
from warm import warm_python

ROOT = Path(__file__).resolve().parents[1]
SHARED = {"harness", "systems", "peer", "inference_report"}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import scripts.bench.__main__ as bench

    return bench


def test_every_file_is_known(bench):
    files = {path.stem for path in (ROOT / "scripts" / "bench").glob("[a-z]*.py")}
    assert files == {*bench.NAMES, *SHARED} and len(bench.NAMES) == len(set(bench.NAMES))
    assert all(len(bench.title(name)) > 20 for name in bench.NAMES)


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "scripts/bench").glob("[a-z]*.py") if p.stem not in SHARED])
def test_options(name, bench):
    for needed in {"data": ["h5py"], "novelty": ["tblite", "scipy"]}.get(name, []):
        pytest.importorskip(needed)
    parser = bench.parser_of(name)
    assert f"python -m scripts.bench {name}" in parser.format_help()
    assert not {"parts", "channels"} & set(vars(parser)) and parser.get_default("main")


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """All that begins with dashes, of the parser and of those below it."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known.update(*map(options_of, action.choices.values()))
    return known


def test_commands_in_the_documentation_are_accepted(bench):
    """Each `python -m scripts.bench NAME …` of pages, plans and the benchmarks themselves has options that exist."""
    pages = [
        path
        for ending in ("md", "yaml", "py")
        for path in (*ROOT.glob(f"*.{ending}"), *ROOT.glob(f"docs/**/*.{ending}"), *ROOT.glob(f"scripts/**/*.{ending}"))
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = re.findall(r"python -m scripts\.bench ([a-z]\w*)\b([^\n`#]*)", text)
    assert len(commands) > 30
    for name, rest in commands:
        known = options_of(bench.parser_of(name))
        assert not set(re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", rest)) - known, name


def test_an_unknown_name_and_a_missing_gpu_are_errors(bench, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["nothing"])
    out = capsys.readouterr().out
    assert stopped.value.code == 2 and "there is no benchmark 'nothing'" in out and "neighbors " in out
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(["adapters"])
    assert "choose --device cpu" in capsys.readouterr().err


def test_rows_and_tables(bench, tmp_path):
    from scripts.bench.harness import save_rows, table

    save_rows(tmp_path / "new" / "rows.json", [{"ms": 1.0}], {"folder": tmp_path})
    found = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert found["rows"] == [{"ms": 1.0}] and found["folder"] == str(tmp_path) and found["torch"]
    assert table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_benchmark_in_parts(tmp_path):
    """From the command to the file; the part runs in a process of its own."""
    words = "--device cpu --parts systems --channels 4 --layers 1 --seconds 0.01 --every 1 --output".split()
    command = [warm_python(), "-m", "scripts.bench", "md", "--water", "", *words, str(tmp_path / "md.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "md.json").read_text())["rows"]
    assert [(row["part"], row["run"], row["atoms"]) for row in rows] == [("systems", run, 9) for run in ("nve", "nvt")]
    assert all(row["ms"] > 0 for row in rows), rows
