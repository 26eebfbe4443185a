"""Draw docs/bench/training.png and docs/bench/cpu.png from the tables of docs/performance.md.

    python scripts/plot_performance.py
    python scripts/plot_performance.py --trajectory runs/ibuprofen.xyz     README.md's figures

Run it after a change of the tables of training on a GPU or inference on a CPU. The trajectory is that of README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from ase.build.rotate import rotation_matrix_from_points
from ase.data import covalent_radii
from ase.data.colors import jmol_colors
from ase.io import read
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its title row."""
    text = (DOCS / "performance.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    lines = text[text.index("\n|") :].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell: str) -> float:
    """The first number of a cell."""
    return float(cell.split()[0].replace(",", ""))


def draw(name: str, labels: list[str], series: dict[str, list[str]]) -> None:
    """One group of bars per label, ms on a logarithmic axis."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    width = 0.8 / len(series)
    for k, (title, cells) in enumerate(series.items()):
        places = [i + (k - (len(series) - 1) / 2) * width for i in range(len(labels))]
        bars = axes.bar(places, [number(cell) for cell in cells], width, label=title)
        axes.bar_label(bars, [cell.split()[0] for cell in cells], fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel("ms per step")
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    figure.savefig(DOCS / "bench" / f"{name}.png", dpi=150, bbox_inches="tight")


def front(trajectory: Path) -> None:
    """A molecule in motion, motion.png, and the time of a step, speed.png; they fit side by side on a page."""
    sys.path.insert(0, str(DOCS.parent))
    from scripts.bench.inference_report import draw as draw_times

    figure, axes = plt.subplots(figsize=(4.1, 3), layout="constrained")
    draw_motion(axes, trajectory)
    figure.savefig(DOCS / "bench" / "motion.png", dpi=100)
    figure, axes = plt.subplots(figsize=(4.1, 3), layout="constrained")
    rows = json.loads((DOCS / "bench" / "inference.json").read_text(encoding="utf-8"))["rows"]
    draw_times([row for row in rows if row["mode"] != "replay tf32" and "edges" not in row], axes)
    axes.legend(fontsize=7, loc="lower right")
    axes.set_title("one step of TensorNet on an NVIDIA H200", fontsize=10)
    axes.set_ylabel("ms")
    figure.savefig(DOCS / "bench" / "speed.png", dpi=100)


def draw_motion(axes: Axes, trajectory: Path) -> None:
    """Frames of a molecule on top of each other, the last one in full color, seen along its shortest axis."""
    frames = read(trajectory, ":")
    last = frames[-1]
    center = last.positions.mean(0)
    view = np.linalg.svd(last.positions - center)[2].T  # longest axis first
    numbers, radii = last.numbers, covalent_radii[last.numbers]
    bonded = np.argwhere(np.triu(last.get_all_distances() < 1.2 * (radii[:, None] + radii), 1))
    colors = np.where(numbers[:, None] == 1, 0.7, jmol_colors[numbers])
    for atoms in [*frames[:: max(1, len(frames) // 40)], last]:
        moved = atoms.positions - atoms.positions.mean(0)
        moved = moved @ rotation_matrix_from_points(moved.T, (last.positions - center).T).T @ view
        points, alpha = moved[:, :2], 1.0 if atoms is last else 0.08
        for first, second in ((0, 1), (1, 0)):  # half of each bond has the color of its atom
            ends = bonded[:, first], bonded[:, second]
            halves = np.stack([points[ends[0]], (points[ends[0]] + points[ends[1]]) / 2], 1)
            axes.add_collection(LineCollection(halves, colors=colors[ends[0]], linewidths=3, alpha=alpha))
    axes.autoscale()
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title("1 ps of ibuprofen with the potential organic", fontsize=10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectory", type=Path, help="draw README.md's figures, with this motion, and nothing else")
    options = parser.parse_args()
    if options.trajectory:
        front(options.trajectory)
        sys.exit()
    rows = table("Training on a GPU")
    molecule = [next(r[0] for r in reversed(rows[: i + 1]) if r[0]).split(",")[0] for i in range(len(rows))]
    draw(
        "training",
        [f"{name}\nbatch {row[1]}" for name, row in zip(molecule, rows, strict=True)],
        {"torchmdnet2": [r[2] for r in rows], "TorchMD-Net 3.1.0, eager": [r[3] for r in rows]},
    )
    rows = table("On a CPU")
    draw(
        "cpu",
        [f"{r[0].split(',')[0]}\n{r[1]} atoms" for r in rows],
        {"compiled kernels": [r[2] for r in rows], "plain PyTorch": [r[3] for r in rows]}
        | {"TorchMD-Net 3.1.0, eager": [r[4] for r in rows]},
    )
