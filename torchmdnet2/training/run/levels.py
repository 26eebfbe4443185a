"""Several levels of theory in one training: their frames, and the fits to them before the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...data import Dataset, Statistics, statistics
from ...data.dataset import Subset
from ...data.label_checks import spread_out
from ...errors import BadData
from ...potential.levels import Level
from ...potential.potential import Potential
from ..config.config import Config
from ..config.sections import LevelConfig
from ..steps.batches import Frames
from .fine_tuning import refit_references
from .references import potential_config, trusted, with_isolated
from .subsets import files_of, survey

if TYPE_CHECKING:
    from .setup import Setup

__all__ = [
    "LevelData", "added_levels", "by_level", "fitted_levels", "level_config", "levels_of", "refit_level",
    "replayed_level", "require_one_level",
]  # fmt: skip

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
    if names and (level := replayed_level(config)) not in (None, names[0]):
        names = [*(name for name in names if name != level), level]
    return names


def replayed_level(config: Config) -> str | None:
    """Return the level of theory of the structures of `init.replay`; None without them."""
    if config.init is None or config.init.replay is None:
        return None
    base = config.base()
    assert base is not None
    return base.level_of_theory or _REPLAYED


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
    if settings.references == "own":
        found |= {key: fitted.get(key) for key in ("elements", "total_charges", "compositions")}
        energies = next((dict(p["energies"]) for p in fitted["priors"] if p["name"] == "atomref"), None)
        found |= {} if energies is None else {"energies": energies}
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


def added_levels(
    config: Config, base: Potential, start: Mapping[str, Any], names: Sequence[str], further: Mapping[str, LevelData]
) -> dict[str, dict[str, Any]]:
    """Return the configurations of the further levels of a fine-tuned potential, with the energies that it starts from.

    Args:
        config: of the run.
        base: the potential of the file of `init`.
        start: configuration of the potential before the fit to the first level.
        names: of the further levels.
        further: level -> its frames; without the level of structures that the model labels.
    """
    found = {}
    for name in names:
        facts = further[name].facts if name in further else {"elements": [], "charges": []}
        own = {"elements": sorted({*base.elements, *facts["elements"]})}
        if base.total_charges is not None:
            own["total_charges"] = sorted({*base.total_charges, *facts["charges"]})
        found[name] = level_config(config, name, {**start, **own})
    return found


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


_SHARED, _APART = 3, 0.05  # structures in two files; eV between their energies, more than between settings of a method
_PER_ATOM, _TIMES = 1.0, 20  # eV, more than between isomers and phases; rms of a fit


def require_one_level(setup: Setup) -> None:
    """Raise BadData if the training frames without declared levels come from files of several levels of theory.

    This is certain where the energies of a file are far from those that another file predicts for its compositions, or
    where most structures that two files share have different energies.
    """
    frames, known = setup.frames["train"].once[0], setup.statistics["train"]
    if setup.config.data.sources is not None or len(files_of(setup.config.data, "train", frames.data)) < 2:
        return
    if len(frames) < len(setup.frames["train"]):
        known = statistics(frames.data, frames.indices)
    names = np.array([_file_of(frames.name(k)) for k in range(len(frames))])
    for one, other, apart in _apart(frames, known, names):
        raise _undeclared(f"energies of {other} are {apart:+.3g} eV per atom from those of {one}", one, other)
    _, first, number = np.unique(known.keys, return_index=True, return_inverse=True)
    first = first[number.reshape(-1)]
    difference = np.abs(known.energies - known.energies[first])
    both = np.flatnonzero((names != names[first]) & ~np.isnan(difference))
    for pair in sorted({(names[first[k]], names[k]) for k in both}):
        of_pair = both[(names[first[both]] == pair[0]) & (names[both] == pair[1])]
        apart = difference[of_pair] > _APART
        if apart.sum() >= _SHARED and apart.mean() > 0.5:
            raise _undeclared(
                f"{len(of_pair)} structures are in {pair[0]} and in {pair[1]}, and {apart.sum()} of them have other "
                f"energies there, by up to {difference[of_pair].max():.3g} eV",
                *pair,
            )


def _apart(frames: Frames, known: Statistics, names: np.ndarray) -> Iterator[tuple[str, str, float]]:
    """Yield the file of most frames, another one whose energies are far from a fit of compositions and states to the
    first, and how far, eV per atom.

    Args:
        frames: training frames, each once.
        known: their statistics.
        names: [len(frames)] the file of each.
    """
    chosen = spread_out(known)
    chosen = chosen[~np.isnan(known.energies[chosen]) & (known.sizes[chosen] > 1)]
    if not len(chosen):
        return
    system = frames.data.batch(frames.indices[chosen]).system
    states = np.stack([system.charge.numpy(), system.spin.numpy()], 1)
    kinds, kind = np.unique(states, axis=0, return_inverse=True)
    columns = np.concatenate([known.counts[chosen], np.eye(len(kinds))[kind.reshape(-1)]], 1)
    energies, sizes, names = known.energies[chosen], known.sizes[chosen], names[chosen]
    files, counts = np.unique(names, return_counts=True)
    one = files[counts.argmax()]
    first = names == one
    inverse = np.linalg.pinv(columns[first], rcond=1e-9)
    rest = energies - columns @ (inverse @ energies[first])
    spread = float(np.sqrt(np.mean(rest[first] ** 2)))
    covered = np.abs(columns - columns @ (inverse @ columns[first])).max(1) < 1e-6  # by compositions of the first
    for other in files[files != one].tolist():
        within = covered & (names == other)
        if within.sum() >= _SHARED:
            size, difference = float(sizes[within].mean()), float(np.median(rest[within]))
            if abs(difference) > max(_PER_ATOM * size, _TIMES * spread):
                yield str(one), other, difference / size


def _file_of(name: str) -> str:
    """Return the file of a frame from its name, as "train.xyz, frame 12"."""
    return name.partition(", frame ")[0].partition(", group ")[0]


def _undeclared(fault: str, one: str, other: str) -> BadData:
    return BadData(
        f"data.train: {fault}: another level of theory, unit, or total charge that is not read? They are not mixed. "
        f"Declare the level of each file: data.sources: [{{train: {one}, level: PBE0/def2-TZVP}}, {{train: {other}, "
        "level: …}]. Files that are of one level after all get the same name"
    )
