"""Several levels of theory in one training: their frames, and the fits to them before the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...data import ConcatDataset, Dataset, Statistics, statistics
from ...data.dataset import Subset
from ...data.label_checks import fit_columns
from ...errors import BadConfig, BadData
from ...potential.levels import Level
from ...potential.potential import Potential
from ..config.config import Config
from ..config.sections import LevelConfig
from ..steps.batches import Frames
from .fine_tuning import reference_energies, refit_references
from .references import potential_config, trusted, with_isolated
from .subsets import files_of, survey

__all__ = [
    "LevelData", "added_levels", "by_level", "fitted_levels", "level_config", "levels_of", "refit_level",
    "replayed_level", "require_one_level", "shared_notes",
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
    level = replayed_level(config)
    if not names or level is None:
        return names
    for name in names:
        if name != level and " ".join(name.casefold().split()) == " ".join(level.casefold().split()):
            raise BadConfig(
                f"data.sources: the level '{name}' and '{level}', that of {config.init and config.init.file}, differ "
                "only in spelling; give one name"
            )
    return names if level == names[0] else [*(name for name in names if name != level), level]


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
        start: configuration of the potential.
        names: of the further levels.
        further: level -> its frames; without the level of structures that the model labels.
    """
    found = {}
    references = reference_energies(base)
    for name in names:
        facts = further[name].facts if name in further else {"elements": [], "charges": []}
        elements = sorted({*base.elements, *facts["elements"]})
        energies = {str(z): references.get(z, 0.0) for z in elements}
        priors = [{**p, "energies": energies} if p["name"] == "atomref" else p for p in start["priors"]]
        own = {"elements": elements, "compositions": base.config.get("compositions"), "priors": priors}
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
_PER_ATOM, _TIMES, _LIKE = (
    1.0,
    20,
    1.5,
)  # eV; rms of fits; factor between sizes of structures, as of molecules and solids
_BONDS = 10.0  # eV per atom, more than bonds have
_OF_FIRST, _EACH, _AT_MOST = 500, 20, 5000  # frames of the largest file, of another one, of all


def require_one_level(config: Config, subsets: Mapping[str, Frames], statistics_of: Mapping[str, Statistics]) -> None:
    """Raise BadData if the frames of `data.train` come from files of several levels of theory.

    This is certain where the energies of a file are far from those that the largest file predicts for its compositions,
    or where most structures that two files share have different energies.

    Args:
        config: of the run.
        subsets: subset -> its frames.
        statistics_of: subset -> statistics of these.
    """
    train = subsets["train"]
    replays = config.init is not None and config.init.replay is not None
    data = train.data.datasets[0] if replays and isinstance(train.data, ConcatDataset) else train.data
    if config.data.sources is not None or len(files_of(config.data, "train", data)) < 2:
        return
    names = [name for name, frames in subsets.items() if frames.data is train.data or frames.data is data]
    known = [statistics_of[name] for name in names]
    indices = np.concatenate([subsets[name].indices for name in names])
    chosen = np.flatnonzero(indices < len(data))  # no replay
    energies = np.concatenate([found.energies for found in known])[chosen]
    chosen, energies = chosen[~np.isnan(energies)], energies[~np.isnan(energies)]
    files, file = np.unique([_file_of(data.name(k)) for k in indices[chosen].tolist()], return_inverse=True)
    if len(files) < 2:
        return
    for a, b, apart in _apart(data, indices[chosen], energies, file):
        fault = f"energies of {files[b]} are {apart:+.3g} eV per atom from those of {files[a]}"
        raise _undeclared(fault, files[a], files[b])
    _, first, number = np.unique(
        np.concatenate([f.keys for f in known])[chosen], return_index=True, return_inverse=True
    )
    difference = np.abs(energies - energies[first][number.reshape(-1)])
    ones = file[first][number.reshape(-1)]
    pairs, pair, counts = np.unique((ones * len(files) + file)[ones != file], return_inverse=True, return_counts=True)
    far = np.bincount(pair.reshape(-1), difference[ones != file] > _APART, minlength=len(pairs))
    for k in np.flatnonzero((far >= _SHARED) & (far > 0.5 * counts)):
        one, other = (files[n] for n in divmod(int(pairs[k]), len(files)))
        fault = f"{counts[k]} structures are in {one} and in {other}, {far[k]:.0f} of them with other energies"
        raise _undeclared(fault, one, other)


def shared_notes(
    frames: Frames, found: Statistics, levels: Sequence[str], settings: Mapping[str, LevelConfig]
) -> Iterator[str]:
    """Yield notes about levels whose energies are far from those of the first, whose reference energies they share.

    Args:
        frames: of training.
        found: their statistics.
        levels: names.
        settings: of `levels` in the configuration.
    """
    shared = [k for k, name in enumerate(levels) if not k or settings.get(name, LevelConfig()).references == "shared"]
    chosen = np.flatnonzero(np.isin(frames.levels, shared) & ~np.isnan(found.energies))
    if len(shared) < 2 or not len(chosen):
        return
    for one, other, apart in _apart(frames.data, frames.indices[chosen], found.energies[chosen], frames.levels[chosen]):
        further = levels[other or one]  # the first level has no settings
        yield (
            f"{levels[other]}: energies are {apart:+.3g} eV per atom from those of {levels[one]}, and both share "
            f"reference energies: set levels: {{{further}: {{references: own}}}}"
        )


def _apart(
    data: Dataset, indices: np.ndarray, energies: np.ndarray, file: np.ndarray
) -> Iterator[tuple[int, int, float]]:
    """Yield the file of most frames, another one whose energies are far from a fit of compositions and states to the
    first, and how far, eV per atom.

    A distance that bonds can explain counts where structures are of like size and the energies of both files scatter
    little around it.

    Args:
        data: frames.
        indices: [S] of frames with an energy.
        energies: [S] eV.
        file: [S] number of the file of each.
    """
    order = np.argsort(file, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(file))])
    each = max(_SHARED, min(_EACH, _AT_MOST // (len(starts) - 1)))
    largest = int(np.bincount(file).argmax())
    spread = [
        np.unique(np.linspace(a, b - 1, min(_OF_FIRST if k == largest else each, b - a)).astype(int))
        for k, (a, b) in enumerate(pairwise(starts.tolist()))
    ]
    chosen = order[np.concatenate(spread)]
    system = data.batch(indices[chosen]).system
    sizes = np.bincount(system.batch.numpy(), minlength=len(chosen))
    z, atom = np.unique(system.z.numpy(), return_inverse=True)
    counts = np.zeros((len(chosen), len(z)))
    np.add.at(counts, (system.batch.numpy(), atom.reshape(-1)), 1)
    columns = fit_columns(counts, system.charge.numpy(), system.spin.numpy())
    energies, file = energies[chosen], np.where(sizes > 1, file[chosen], -1)
    first = file == largest
    inverse = np.linalg.pinv(columns[first], rcond=1e-9)
    rest = energies - columns @ (inverse @ energies[first])
    covered = np.abs(columns - columns @ (inverse @ columns[first])).max(1) < 1e-6  # by compositions of the first
    size = float(sizes[first].mean()) if first.any() else 0.0
    for other in np.unique(file[covered & (file >= 0) & ~first]).tolist():
        within = covered & (file == other)
        if within.sum() < _SHARED:
            continue
        apart = float(np.median(rest[within])) / float(sizes[within].mean())
        scatter = max(np.sqrt(np.mean(rest[first] ** 2)), _scatter(columns[within], rest[within]))
        like = 1 / _LIKE < float(sizes[within].mean()) / size < _LIKE
        clear = abs(apart) > _PER_ATOM and abs(float(np.median(rest[within]))) > _TIMES * scatter and like
        if clear or abs(apart) > _BONDS:
            yield largest, other, apart


def _scatter(columns: np.ndarray, values: np.ndarray) -> float:
    """Return the rms of values that is left by a fit of the columns."""
    left = values - columns @ (np.linalg.pinv(columns, rcond=1e-9) @ values)
    return float(np.sqrt(np.mean(left**2)))


def _file_of(name: str) -> str:
    """Return the file of a frame from its name, as "train.xyz, frame 12"."""
    return name.partition(", frame ")[0].partition(", group ")[0]


def _undeclared(fault: str, one: str, other: str) -> BadData:
    return BadData(
        f"data.train: {fault}: another level of theory, unit, or total charge that is not read? They are not mixed. "
        f"Declare the level of each file: data.sources: [{{train: {one}, level: PBE0/def2-TZVP}}, {{train: {other}, "
        "level: …}]. Files that are of one level after all get the same name"
    )
