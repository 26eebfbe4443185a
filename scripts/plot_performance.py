"""Draw docs/bench/training.png and docs/bench/cpu.png from the tables of docs/dev/performance.md.

    python scripts/plot_performance.py

Run it after a change of the tables of training on a GPU or inference on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its title row."""
    text = (DOCS / "dev" / "performance.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1]
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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
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
