"""Add a repulsion of colliding atoms to a model, so that two molecules cannot be pressed into each other.

    python scripts/organic/repulsion.py work/organic/best.tmn work/organic/repelling.tmn

A network has not learnt contacts shorter than those of its frames, nor has its teacher: AIMNet2 attracts below 0.9
times the sum of the covalent radii, too. The repulsion is the prior `zbl` within `RADII`, whose sums are at most 0.95
times the shortest bond of two elements (B≡O, C≡C, C≡O, …) and much less than most. Beyond them it is exactly 0: nothing
changes at the geometries that molecules have. Radii and scale were chosen by hand and by a search, on contacts and
compressed bonds of 34 small molecules, see docs/dev/organic.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmdnet2 import Potential, checkpoint, load
from torchmdnet2.priors import ZBL

RADII = {
    "H": 0.28, "B": 0.64, "C": 0.565, "N": 0.505, "O": 0.50, "F": 0.49, "Si": 0.95, "P": 0.865, "S": 0.80, "Cl": 0.79,
    "As": 0.95, "Se": 0.93, "Br": 0.98, "I": 1.18,
}  # fmt: skip
"""Å."""

SCALE = 1.5
"""With it, bonds at 0.7 and 0.8 times their lengths have the energies of GFN2-xTB, which are two to four times those of
the networks for double and triple bonds."""


def add_repulsion(potential: Potential) -> Potential:
    """Add the repulsion.

    Args:
        potential: it is changed.

    Raises:
        ValueError: it has the prior `zbl` already.
    """
    if any(isinstance(prior, ZBL) for prior in potential.priors):
        raise ValueError("the model has a repulsion already")
    options = {"envelope": "covalent", "scale": SCALE, "radii": dict(RADII)}
    potential.priors.append(ZBL(**options).to(potential.device))  # type: ignore[attr-defined]
    potential.config["priors"] = [*potential.config["priors"], {"name": "zbl", **options}]
    return potential


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tmn file, or the name of a potential")
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    potential = load(options.model)
    checkpoint.save(add_repulsion(potential), options.target, potential.metadata)


if __name__ == "__main__":
    main()
