"""Round the weights of a model to 16 bits, which halves its file. It computes with 32 bits as before.

    python scripts/organic/halve.py work/organic/best.tmn work/organic/half.tmn

Evaluate and calibrate the result, not the original model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchmdnet2 import checkpoint, load


def halve(model: Path, target: Path) -> None:
    """Write a model with rounded weights.

    Args:
        model: a .tmn file, with weights of 32 bits.
        target: the .tmn file to write; without a calibration, which belongs to other weights.

    Raises:
        ValueError: a weight is too large for 16 bits, 65,504 at most.
    """
    potential = load(model)
    potential.calibration = None
    with torch.no_grad():
        for weight in potential.parameters():
            weight.copy_(weight.half())
    checkpoint.save(potential, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .tmn file")
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    halve(options.model, options.target)
    print(f"{options.target}: {options.target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
