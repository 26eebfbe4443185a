"""Make a TensorNet with more interaction layers from a trained one, to continue the training from it.

    python scripts/organic/grow.py organic work/organic-3.tmn --layers 3

The new layers come before the last one and begin as copies of it that add nothing: the last three of their linear maps
are 0. Each layer divides its tensors by their norms, which changes the energies a little until the training corrects
it. Train with `init: work/organic-3.tmn` and `model.num_layers: 3`.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch

from torchmdnet2 import Potential, checkpoint, load


def grow(potential: Potential, layers: int) -> Potential:
    """A potential of more layers, with the weights of another one.

    Args:
        potential: a TensorNet of one layer or more.
        layers: of the result.

    Raises:
        ValueError: the model is another one, or has as many layers already.
    """
    config = copy.deepcopy(potential.config)
    model = config["model"]
    now = model.get("num_layers", 2)
    if model["name"] != "tensornet" or not 0 < now:
        raise ValueError(f"only a TensorNet of one layer or more can be enlarged, this is {model['name']} of {now}")
    if layers <= now:
        raise ValueError(f"the model has {now} layers: --layers must be larger, got {layers}")
    model["num_layers"] = layers
    grown = Potential.from_config(config)
    weights = grown.state_dict()
    for name, weight in potential.state_dict().items():
        for target in _places(name, now, layers):
            weights[target] = weight
    grown.load_state_dict(weights)
    for k in range(now - 1, layers - 1):
        for linear in grown.representation.layers[k].linears_tensor[3:]:  # type: ignore[union-attr, index]
            torch.nn.init.zeros_(linear.weight)
    return grown


def _places(name: str, now: int, layers: int) -> list[str]:
    """Names of a weight in the larger model: those of the last layer are taken by the new layers too."""
    for part, last in (("representation.layers.", now - 1), ("representation.linear_readout.", now)):
        begin = f"{part}{last}"
        if f"{name}.".startswith(f"{begin}."):
            new = layers - now
            taken = range(new, new + 1) if part.endswith("linear_readout.") else range(new + 1)
            return [f"{part}{last + k}{name[len(begin) :]}" for k in taken]
    return [name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tmn file, or the name of a potential")
    parser.add_argument("target", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    checkpoint.save(grow(load(options.model), options.layers), options.target)


if __name__ == "__main__":
    main()
