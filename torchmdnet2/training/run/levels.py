"""Several levels of theory in one training: their frames, and the fits to them before the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data import Dataset, statistics
from ...data.dataset import Subset
from ...potential.levels import Level
from ...potential.potential import Potential
from ..config.config import Config
from ..config.sections import LevelConfig
from ..steps.batches import Frames
from .fine_tuning import refit_references
from .references import potential_config, trusted, with_isolated
from .subsets import survey

__all__ = ["LevelData", "by_level", "fitted_levels", "level_config", "levels_of", "refit_level"]

_REPLAYED = "model of init"


@dataclass
class LevelData:
    """Training frames to which reference energies are fitted.

    Attributes:
        frames: of one level, or of those that share its references.
        facts: of `survey`, of these frames.
        dataset: these frames; single atoms are searched there.
    """

    frames: Frames
    facts: dict[str, Any]
    dataset: Dataset

    @classmethod
    def of(cls, frames: Frames) -> LevelData:
        found = statistics(frames.data, frames.indices)
        return cls(frames, survey(frames, found), Subset(frames.data, np.unique(frames.indices).tolist()))


def levels_of(config: Config) -> list[str]:
    """Return names of the levels of theory of a training, the default of the model first; at most one: without levels.

    Structures of `init.replay` have the level of the file, which comes last.
    """
    names = config.data.levels
    if names and config.init is not None and config.init.replay is not None:
        base = config.base()
        assert base is not None
        level = base.level_of_theory or _REPLAYED
        names = [*(name for name in names if name != level), level] if level != names[0] else names
    return names


def by_level(
    config: Config, frames: Frames, facts: dict[str, Any], levels: Sequence[str]
) -> tuple[LevelData, dict[str, LevelData]]:
    """Return the frames of the first level, with those of levels that share its references; and those of each other
    level.

    Args:
        config: of the run.
        frames: all training frames.
        facts: of `survey`, of these.
        levels: of `levels_of`.
    """
    if len(levels) < 2:
        return LevelData(frames, facts, frames.data), {}
    shared = [k for k, name in enumerate(levels) if k == 0 or _settings(config, name).references == "shared"]
    further = {
        name: LevelData.of(frames.of(frames.levels == k))
        for k, name in enumerate(levels)
        if k and (frames.levels == k).any()
    }
    return LevelData.of(frames.of(np.isin(frames.levels, shared))), further


def _settings(config: Config, name: str) -> LevelConfig:
    return config.levels.get(name, LevelConfig())


def level_config(config: Config, name: str, fitted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a `Level`.

    Args:
        config: of the run.
        name: of the level.
        fitted: the configuration of a potential that was fitted to frames of this level alone.
    """
    settings = _settings(config, name)
    found: dict[str, Any] = {"readout": settings.readout == "own"}
    if settings.scale == "own":
        found["energy_scale"] = fitted["energy_scale"]
    energies = next((dict(p["energies"]) for p in fitted["priors"] if p["name"] == "atomref"), None)
    if settings.references == "own" and energies is not None:
        own = ("elements", "total_charges", "compositions")
        found |= {"energies": energies, **{key: fitted.get(key) for key in own}}
    return found


def fitted_levels(
    config: Config, fitted: Mapping[str, Any], levels: Sequence[str], further: Mapping[str, LevelData]
) -> dict[str, Any]:
    """Return "level" and "levels" of `Potential.from_config`; empty for data of one level.

    Args:
        config: of the run, with the pair potential of the first level.
        fitted: the configuration that was fitted to the first level.
        levels: of `levels_of`.
        further: level -> its frames.
    """
    if len(levels) < 2:
        return {}
    found = {}
    for name, part in further.items():
        own = config.model_copy(update={"priors": [_refitted(prior) for prior in config.priors]})
        own, atoms = with_isolated(own, part.dataset, part.facts["elements"])
        part.facts["isolated"] = {} if atoms is None else trusted(atoms, part.facts["elements"])
        found[name] = level_config(config, name, potential_config(own, part.frames, part.facts))
    return {"level": levels[0], "levels": found}


def _refitted(prior: dict[str, Any]) -> dict[str, Any]:
    """Return the priors to fit for a level: given reference energies are those of the first level."""
    if prior["name"] != "atomref" or prior["energies"] in ("auto", "fit", "isolated"):
        return prior
    return {**prior, "energies": "auto"}


def refit_level(potential: Potential, name: str, part: LevelData, trained: Sequence[int]) -> str:
    """Refit the reference energies of a level of a fine-tuned potential; returns the changes, in words.

    Args:
        potential: with levels; changed.
        name: of the level.
        part: its frames.
        trained: elements that the model of `init` knows.
    """
    alone = potential.at_level(name)
    level = potential.levels[potential.level_names.index(name) - 1]
    assert isinstance(level, Level)
    changes = refit_references(alone, part.frames, part.facts, 32, None, trained)
    energies = next(prior["energies"] for prior in alone.config["priors"] if prior["name"] == "atomref")
    level.config |= {"energies": energies, "compositions": alone.config["compositions"]}
    return changes
