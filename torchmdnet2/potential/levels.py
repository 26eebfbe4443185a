"""Levels of theory of one potential, which share its network and have separate heads and reference energies."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..registry import PRIORS, did_you_mean
from .graph import Head
from .prior import Prior

__all__ = ["Level", "build_levels", "chosen_level", "levels_of"]


class Level(nn.Module):
    """A level of theory other than the default one.

    Args:
        head: head of this level; None takes the head of the default level.
        atomref: reference energies of this level; None takes those of the default level.
        config: "energy_scale", "elements", "total_charges", "compositions" of `Potential.from_config` at this level;
            missing ones are as at the default level. "readout": True if there is a head; "energies": reference
            energies, element -> eV.
    """

    def __init__(self, head: Head | None, atomref: Prior | None, config: dict[str, Any]):
        super().__init__()
        self.head, self.atomref = head, atomref
        self.config = config

    def scale(self, default: float) -> float:
        """Return the head's unit in eV.

        Args:
            default: value of the default level.
        """
        return float(self.config.get("energy_scale", default))

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a potential of this level alone.

        Args:
            config: configuration of the potential with all levels.
        """
        own = {name: value for name, value in self.config.items() if name not in ("readout", "energies")}
        energies = self.config.get("energies")
        priors = [
            {**prior, "energies": dict(energies)} if energies is not None and prior["name"] == "atomref" else prior
            for prior in config.get("priors") or []
        ]
        return {**config, **own, "priors": priors}

    def priors(self, shared: Iterable[Prior], names: Sequence[str]) -> list[Prior]:
        """Return the priors of this level.

        Args:
            shared: priors of the default level.
            names: their names in the configuration.
        """
        return [
            self.atomref if self.atomref is not None and name == "atomref" else prior
            for prior, name in zip(shared, names, strict=True)
        ]


def build_levels(config: Mapping[str, Any], head: Head | None) -> dict[str, Level]:
    """Return the levels of a configuration, by name; see `Potential.from_config`.

    Args:
        config: configuration with "levels": name -> configuration of a `Level`.
        head: head of the default level; heads of other levels start as copies of it.

    Raises:
        ValueError: a level has reference energies, but there is no prior atomref.
    """
    levels = {}
    for name, given in (config.get("levels") or {}).items():
        atomref = None
        if given.get("energies") is not None:
            arguments = next((dict(p) for p in config.get("priors") or [] if p["name"] == "atomref"), None)
            if arguments is None:
                raise ValueError(f"levels.{name}: has reference energies, but there is no prior atomref to hold them")
            atomref = PRIORS[arguments.pop("name")](**{**arguments, "energies": given["energies"]})
        levels[name] = Level(copy.deepcopy(head) if given.get("readout") else None, atomref, given)
    return levels


def levels_of(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[str]:
    """Return the levels of theory of a model, the default one first; empty if none is stated.

    Args:
        config: configuration of `Potential.from_config`.
        metadata: metadata of a model file.
    """
    if config.get("level") is not None:
        return [str(config["level"]), *map(str, config.get("levels") or {})]
    data = metadata.get("data")
    stated = data.get("level_of_theory") if isinstance(data, Mapping) else None
    return [stated] if isinstance(stated, str) and stated != "not stated" else []


def chosen_level(name: str, names: Sequence[str]) -> str:
    """Return the name of a level after a check.

    Args:
        name: the requested name.
        names: levels of the model from `levels_of`.

    Raises:
        ValueError: the model does not have the level.
    """
    if name in names:
        return name
    if len(names) > 1:
        raise ValueError(f"level: the model has no level '{name}'{did_you_mean(name, names) or '.'} "
                         f"It has {', '.join(names)}")  # fmt: skip
    raise ValueError(f"level: the model has a single level of theory, {(*names, 'not stated')[0]}, but '{name}' is "
                     "requested: leave the level out")  # fmt: skip
