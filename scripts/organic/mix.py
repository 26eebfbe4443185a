"""Weights between those of a model and of another one that was trained further from it, or beyond.

    python scripts/organic/mix.py scripts/organic/r12.tmn work/distilled/best.tmn 0.6 mixed.tmn

The mean of the weights before and after a training often has smaller errors than both: M. Wortsman et al.,
arXiv:2109.01903 (2021). Models that were trained apart from random weights have no such mean. Evaluate and calibrate
the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchmdnet2 import checkpoint, load


def mix(start: str | Path, end: str | Path, share: float, target: Path) -> None:
    """Write the end's model with the weights start + share · (end − start).

    Args:
        start, end: .tmn files or names of potentials, of one architecture.
        share: 0 for the start's weights, 1 for the end's; above 1 goes beyond.
        target: the .tmn file to write; without a calibration, which belongs to other weights.

    Raises:
        ValueError: the two have other parameters.
    """
    first, last = load(start), load(end)
    weights = dict(first.named_parameters())
    shapes = [{n: w.shape for n, w in potential.named_parameters()} for potential in (first, last)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{start} and {end} have different parameters: one must be trained from the other")
    last.calibration = None
    with torch.no_grad():
        for name, weight in last.named_parameters():
            weight.lerp_(weights[name], 1 - share)
    checkpoint.save(last, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", help="a .tmn file or the name of a potential")
    parser.add_argument("end", help="the same, trained from it")
    parser.add_argument("share", type=float, help="of the end's weights")
    parser.add_argument("target", type=Path, help="the .tmn file to write")
    options = parser.parse_args()
    try:
        mix(options.start, options.end, options.share, options.target)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
