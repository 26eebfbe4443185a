"""Change a model so that fine-tuning can change the energies of single atoms, as a lone halide ion needs.

    python scripts/organic/free_atoms.py organic-1 work/free.tmn

A model gives single neutral atoms exactly their reference energies, because the network's output for an atom alone is
subtracted. The same holds nearly for ions: their charge is a small factor in the network. The reference energies are
fitted to molecules, so that a halide ion alone is wrong by 2 to 3 eV, and training hardly changes that. Here nothing
is subtracted, and the reference energies are changed by as much.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from torchmdnet2 import Potential, checkpoint, load
from torchmdnet2.priors import Atomref


def free_atoms(potential: Potential) -> Potential:
    """Let a potential keep the network's output for single atoms; its energies stay the same.

    Args:
        potential: with reference energies; it is changed.

    Raises:
        ValueError: nothing is subtracted there, or there are no reference energies.
    """
    references = next((prior for prior in potential.priors if isinstance(prior, Atomref)), None)
    if references is None or not potential.subtract_isolated:
        raise ValueError("the model has no reference energies, or its single atoms are free already")
    with torch.no_grad():
        alone = potential.isolated_energies().double() * potential.energy_scale
        count = min(len(alone), len(references.initial))
        references.initial[:count] -= alone[:count]
    potential.subtract_isolated = potential.config["subtract_isolated"] = False
    return potential


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tmn file, or the name of a potential")
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    checkpoint.save(free_atoms(load(options.model)), options.target)


if __name__ == "__main__":
    main()
