"""What is in the folder of a run is not lost, and one process at a time writes there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run import folder as folder_module
from torchmdnet2.training.run.folder import STATE, exclusive_folder
from torchmdnet2.training.run.run import run_training


@pytest.fixture
def quick(raw_config, tmp_path):
    raw_config["training"].update(max_epochs=1, cuda_graphs=False)
    raw_config["output"] = {"folder": str(tmp_path / "run"), "report": False}
    return raw_config


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_is_replaced_only_when_the_next_one_can_begin(quick, tmp_path):
    run_training(parse_config(quick))
    before = contents(tmp_path / "run")
    quick["output"]["overwrite"] = True
    for section, change, problem in (
        ("data", {"train": str(tmp_path / "no.xyz")}, "there is no data file"),
        ("data", {"split": {"validation": 100}}, "are not enough"),
        ("training", {"cuda_graphs": True, "device": "cpu"}, "CUDA graphs need an NVIDIA GPU"),
    ):
        wrong = {**quick, section: {**quick[section], **change}}
        with pytest.raises((BadConfig, FileNotFoundError), match=problem):
            run_training(parse_config(wrong))
        assert contents(tmp_path / "run") == before
    quick["training"]["seed"] = 5
    run_training(parse_config(quick))
    assert contents(tmp_path / "run")["best.tmn"] != before["best.tmn"]


def test_no_report_of_a_replaced_run_is_left(quick, tmp_path):
    """Other files stay, also those of such names in a folder without a run."""
    folder, report = tmp_path / "run", {"card.md", "report.html", "outliers.xyz", "learning_curve.png"}
    quick["output"]["report"] = True
    run_training(parse_config(quick))
    pictures = {path.name for path in folder.glob("*.png")}
    assert {"learning_curve.png", "energy_parity.png", "force_parity.png", "errors_by_element.png"} <= pictures
    quick["output"].update(report=False, overwrite=True)
    (folder / "mine.png").write_text("mine")
    run_training(parse_config(quick))
    assert not {path.name for path in folder.iterdir()} & (report | pictures)
    assert (folder / "mine.png").read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    for name in report:
        (other / name).write_text("mine")
    quick["output"]["folder"] = str(other)
    run_training(parse_config(quick))
    assert report <= {path.name for path in other.iterdir()}


def test_a_model_is_not_replaced_by_what_starts_from_it(quick, tmp_path):
    model = run_training(parse_config(quick))
    before = contents(tmp_path / "run")
    quick["output"]["overwrite"] = True
    quick["init"] = {"file": str(model)}
    with pytest.raises(BadConfig, match=r"init\.file: .*best\.tmn is in output\.folder"):
        run_training(parse_config(quick))
    del quick["init"]
    quick["priors"] = [{"name": "atomref"}, {"name": "baseline", "file": str(model)}]
    with pytest.raises(BadConfig, match=r"priors\.1\.file: .*best\.tmn is in output\.folder"):
        run_training(parse_config(quick))
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("name", ["config.yaml", "best.tmn", "log.txt"])
def test_files_of_others_are_left_alone(quick, tmp_path, name, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    with pytest.raises(BadConfig, match=f"holds {name}, which was not written by a training"):
        run_training(parse_config(quick), resume="auto")
    assert contents(tmp_path / "run") == {name: b"mine"}
    run_training(parse_config(quick), check=True)
    assert f"note: output.folder: {tmp_path / 'run'} holds {name}" in capsys.readouterr().out


def test_what_a_run_left_before_its_first_state_is_no_obstacle(quick, tmp_path):
    run_training(parse_config(quick))
    for name in ("state.safetensors", "metrics.json"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / ".state.safetensors.a1b2c3d4").write_text("killed at writing this")
    run_training(parse_config(quick), resume="auto")
    assert not list((tmp_path / "run").glob(".*"))


def test_a_folder_that_cannot_be_written_is_named(quick, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        quick["output"]["folder"] = str(folder)
        with pytest.raises(BadConfig, match=r"output\.folder: \S*file is a file"):
            run_training(parse_config(quick))


def test_one_process_at_a_time(quick, tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    monkeypatch.setattr(folder_module, "_PATIENCE", 0.0)
    (tmp_path / "run").mkdir()
    code = (
        "import sys\nfrom pathlib import Path\nfrom torchmdnet2.training.run.folder import exclusive_folder\n"
        "with exclusive_folder(Path(sys.argv[1])):\n    print('ready', flush=True)\n    sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(BadConfig, match="another process trains in"):
            run_training(parse_config(quick), resume="auto")
        assert contents(tmp_path / "run").keys() == {f".{STATE}.lock"}
        other.kill()
    with exclusive_folder(tmp_path / "run"):  # whatever ended the other one
        pass
