"""scripts/bench/extrapolation.py: a plan on the CPU gives a table, and a second start trains only what is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ase.io import write
from training.conftest import make_frames

from torchmdnet2 import load
from torchmdnet2.core.yaml_reader import parse_yaml
from torchmdnet2.training.config.config import parse_config

ROOT = Path(__file__).resolve().parents[1]
PLAN = """
config: configs/acac-scratch.yaml
sets: [small]
frames: 8
seeds: [1, 2]
settings:
  model: {hidden_channels: 8, num_layers: 1, num_rbf: 4, cutoff: 3.0}
  training: {max_epochs: 1, cuda_graphs: false}
variants:
  plain: {}
  pairs: {priors: [{name: pair_potential}, {name: atomref, energies: fit}]}
  wrong: {model: {hidden_channels: 8, max_z: 2}}
"""


@pytest.mark.parametrize(
    "name",
    [
        "extrapolation",
        "extrapolation_variants",
        "extrapolation_recipe",
        "extrapolation_difference",
        "extrapolation_student",
        "finetuning",
        "finetuning_50",
        "finetuning_acac",
        "finetuning_replay",
    ],
)
def test_the_plans_of_the_repository_are_right(name):
    plan = parse_yaml((ROOT / f"scripts/plans/{name}.yaml").read_text(encoding="utf-8"), name)
    base = parse_yaml((ROOT / plan["config"]).read_text(encoding="utf-8"), plan["config"])
    for changes in plan["variants"].values():
        tree = {**base, "data": {"train": "x.xyz"}}
        for part in (plan["settings"], changes):
            tree = {**tree, **{k: {**tree.get(k, {}), **v} if isinstance(v, dict) else v for k, v in part.items()}}
        parse_config(tree)


def _weights(path: Path) -> list[torch.Tensor]:
    return list(load(path).state_dict().values())


@pytest.mark.long
def test_a_plan_on_the_cpu(tmp_path):
    folder, output = tmp_path / "data/small", tmp_path / "output"
    folder.mkdir(parents=True)
    frames = make_frames(64)
    write(folder / "train.xyz", frames[:60], format="extxyz")
    write(folder / "test_600K.xyz", frames[60:], format="extxyz")
    (tmp_path / "plan.yaml").write_text(PLAN)
    command = [
        sys.executable,
        "-m",
        "scripts.bench",
        "extrapolation",
        "run",
        tmp_path / "plan.yaml",
        output,
        "--data",
        tmp_path / "data",
    ]

    def run(threads: str) -> str:
        given = [*map(str, command), "--gpus", "0", "--threads", threads, "--minutes", "3"]
        return subprocess.run(given, check=True, capture_output=True, text=True, timeout=170, cwd=ROOT).stdout

    table = run("2")
    rows = {line.split()[0]: line for line in table.splitlines() if line.startswith("small-")}
    assert set(rows) == {"small-plain", "small-pairs", "small-wrong"}
    for name in ("small-plain", "small-pairs"):
        assert rows[name].split()[1] == "2" and "±" in rows[name], rows[name]  # both seeds, and their spread
    assert "BadConfig" in rows["small-wrong"]
    found = json.loads((output / "small-plain-1.json").read_text())
    assert found["hot"]["test_600K"][1] == pytest.approx(found["errors"]["test_600K"]["forces_rmse"], rel=1e-4)
    written = (output / "small-plain-1.json").stat().st_mtime_ns
    weights = _weights(output / "small-plain-2.tmn")
    for name in ("small-plain-2.json", "small-plain-2.tmn"):  # as if it had been cut off
        (output / name).unlink()
    again = run("1")
    # what a thread trains does not depend on its neighbor
    assert all(map(torch.equal, weights, _weights(output / "small-plain-2.tmn")))
    of_rows = (text.splitlines()[1:] for text in (table, again))
    for one, other in zip(*of_rows, strict=True):  # but for the time of a step
        assert one.split()[:2] + one.split()[3:] == other.split()[:2] + other.split()[3:]
    assert (output / "small-plain-1.json").stat().st_mtime_ns == written
