"""What a person sees: a bar on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from torchmdnet2.training.reporting.log import TrainingLog, epoch_line, write_metrics

ROW = {
    "epoch": 3, "step": 30, "lr": 1e-3, "train_loss": 0.5, "validation_loss": 0.25, "seconds": 1.25, "best": True,
    "validation_energy_per_atom_mae": 1.234e-3, "validation_forces_mae": 0.0456,
}  # fmt: skip


def test_line_of_an_epoch():
    line = epoch_line(ROW, 100)
    for part in ("epoch   3/100", "E 1.23 meV/atom", "F 45.6 meV/Å", "1.2 s  *"):
        assert part in line, line


@pytest.mark.parametrize("terminal", [True, False])
def test_console_and_file(tmp_path, terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160, highlight=False, soft_wrap=True)
    with pytest.raises(KeyboardInterrupt), TrainingLog(tmp_path / "log.txt", console) as log:
        log.start(100, 10)
        log.step(1, 11, 0.5)
        log.epoch(ROW, 100)
        log.step(4, 40, 0.4)
        raise KeyboardInterrupt  # the bar must not outlive the run
    assert "epoch   3/100" in text.getvalue()
    assert ("left" in text.getvalue()) == terminal
    assert (tmp_path / "log.txt").read_text() == epoch_line(ROW, 100) + "\n"


def test_tables_keep_columns_that_come_later(tmp_path):
    write_metrics(tmp_path, [{"epoch": 1, "a": 0.1}, {"epoch": 2, "a": float("nan"), "b": 1.0}])
    assert (tmp_path / "metrics.csv").read_text() == "epoch,a,b\n1,0.1,\n2,nan,1.0\n"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1, "a": 0.1}\n{"epoch": 2, "a": null, "b": 1.0}\n'
