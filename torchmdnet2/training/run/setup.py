"""Prepare a training from a configuration: subsets of frames, fits, and an untrained potential."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...checkpoint import read_header
from ...data import Statistics, splits_entry, statistics
from ...errors import BadConfig, BadData
from ...potential.potential import SYMBOLS, Potential
from ...potentials import find_model
from ..config.build_potential import load_priors
from ..config.config import Config
from ..config.sections import (
    FRAME_LABELS,
    DataConfig,
    LevelConfig,
    label_keys,
    label_units,
    predicted_shapes,
    property_of,
)
from ..steps.batches import Frames, require_known
from ..steps.distributed import local_rank, world_size
from ..steps.trainer import Properties
from .fine_tuning import (
    NOT_STATED,
    SAME_LEVEL,
    fine_tuned,
    freeze,
    reference_energies,
    refit_references,
    start_facts,
    with_replay,
)
from .levels import (
    LevelData,
    added_levels,
    by_level,
    fitted_levels,
    levels_of,
    refit_level,
    replayed_level,
)
from .references import atom_files, potential_config, reference_notes, trusted, with_isolated, with_pair_fit
from .subsets import (
    SUBSETS,
    Subsets,
    file_digests,
    files_of,
    first_file,
    joined,
    labels_of,
    open_subsets,
    require_searchable,
    share_notes,
    source_facts,
    survey,
    weight_keys,
    weight_notes,
)

__all__ = ["SUBSETS", "Setup", "file_digests", "make_setup"]

_ALONE = ". No two are of one group: data.validation names a file of whole groups"

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass
class Setup:
    """Data and potential of a run before the training.

    Attributes:
        config: as given.
        potential: untrained, on its device.
        frames: "train", "validation", "test" -> frames; a subset without frames is absent.
        splits: subset -> {"files": …, "fingerprint": …, "indices": …}, as in splits.json.
        properties: properties to predict besides the energy.
        facts: statistics of the training frames, for the log and the model card.
        digests: data file, and file of `init` -> sha256.
        statistics: subset -> statistics of its frames.
        asked: labels that were read from the data.
        notes: texts about loaded and new weights, and about the source of the reference energies.
    """

    config: Config
    potential: Potential
    frames: dict[str, Frames]
    splits: dict[str, Any]
    properties: Properties
    facts: dict[str, Any]
    digests: dict[str, str]
    statistics: dict[str, Statistics]
    asked: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def labelled(self) -> dict[str, int]:
        """Label -> number of training frames that have it, replay included."""
        found = self.statistics["train"].labelled
        return {name: count for name, count in found.items() if name not in FRAME_LABELS}


def make_setup(config: Config) -> Setup:
    """Open and divide the data, do the fits before the training, and build the potential.

    Raises:
        FileNotFoundError, BadData: a data file, or a label in it, is missing or not usable.
        BadConfig: the split asks for more frames than there are; the device does not exist.
    """
    require_precision(config)
    untrained = config.untrained()
    shapes = predicted_shapes(untrained)
    keys, levels = labels_of(config.data, _keys_of(config, config.data, shapes)), levels_of(config)
    parts = [_opened(config, k, shapes) for k in range(len(config.data.parts))]
    data = parts[0] if config.data.sources is None else joined(parts, config.data.sources, levels)
    frames = {name: Frames(dataset, indices, untrained.cutoff) for name, (dataset, indices) in data.items()}
    for part in frames.values():
        require_searchable(part)
    properties = Properties(forces="forces" in keys, stress="stress" in keys or "virial" in keys)
    found = {name: statistics(part.data, part.indices) for name, part in frames.items()}
    facts = survey(frames["train"], found["train"])
    notes: list[str] = [*weight_notes(config, frames), *_stated(frames)]
    if config.data.sources is not None:
        facts["sources"] = source_facts(data, config.data.sources)
        notes += share_notes(data, config.data.sources)
    largest = untrained.representation.max_z
    if max(facts["elements"]) >= largest:
        symbol, needed = SYMBOLS[max(facts["elements"])], max(facts["elements"]) + 1
        raise BadConfig(
            f"model.max_z: {symbol} is in the training frames, which needs {needed} at least, got {largest}"
        )
    _require_known_to_baselines(config, facts["elements"])
    own, further = by_level(config, frames["train"], facts, levels)
    known, atoms = with_isolated(config, own.dataset, facts["elements"])
    known = with_pair_fit(known, own.frames, facts["elements"])
    own.facts["isolated"] = {} if atoms is None else trusted(atoms, own.facts["elements"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        if config.init is None:
            fitted = potential_config(known, own.frames, own.facts, device_of(config.training.device))
            fitted |= fitted_levels(known, fitted, levels, further)
            potential = Potential.from_config(fitted, config.take_network())
            load_priors(potential, config.priors)
        else:
            potential, begun = from_base_model(known, own, levels, further, facts)
            notes += begun
            if config.init.replay is not None:
                count = len(frames["train"])
                frames["train"] = with_replay(
                    frames["train"], config.init.replay, potential, replayed_level(config) if levels[1:] else None
                )
                found["train"] = statistics(frames["train"].data, frames["train"].indices)
                replayed = len(frames["train"]) - count
                notes.append(f"replay: {replayed} structures, labelled by the model as it starts")
                if levels:
                    labels = {"level": replayed_level(config), "files": [config.init.replay], "frames": replayed}
                    facts["sources"].append({**labels, "licence": f"labels by {config.init.file}"})
    if len(levels) > 1:
        counts = np.bincount(frames["train"].once[0].levels, minlength=len(levels)).tolist()
        listed = ", ".join(f"{name} ({n} training frames)" for name, n in zip(levels, counts, strict=True))
        notes.append(f"levels of theory: {listed}; the first is the default of the model")
    notes += [] if atoms is None else reference_notes(atoms, facts["elements"])
    notes += _undetermined(potential, frames, found)
    potential = potential.to(device_of(config.training.device), DTYPES[config.training.precision])
    splits: dict[str, Any] = {
        name: [
            splits_entry(*subsets[name], files_of(section, name, subsets[name][0]))
            for subsets, section in zip(parts, config.data.parts, strict=True)
            if name in subsets
        ]
        for name in data
    }
    if config.data.sources is None:
        splits = {name: entries[0] for name, entries in splits.items()}
    digests = file_digests(config.data, {name: dataset for name, (dataset, _) in data.items()})
    models = [prior["file"] for prior in config.priors if "file" in prior]
    given = [config.init.file if config.init else None, config.data.split.file]
    for file in [*models, *atom_files(config), *filter(None, given)]:
        digests[file] = hashlib.sha256(find_model(file).read_bytes()).hexdigest()
    if config.init and config.init.replay:
        digests[config.init.replay] = hashlib.sha256(Path(config.init.replay).read_bytes()).hexdigest()
    asked = [
        "stress" if name == "virial" else name
        for name in keys
        if name not in ("charge", "spin", "numbers", "positions", *FRAME_LABELS)
    ]
    return Setup(config, potential, frames, splits, properties, facts, digests, found, asked, notes)


def _opened(config: Config, number: int, shapes: Mapping[str, str]) -> Subsets:
    """Return the subsets of the source of this number.

    Raises:
        As `open_subsets`.
    """
    part = config.data.parts[number]
    units = label_units(part.units.model_dump(), shapes)
    try:
        return open_subsets(part, labels_of(part, _keys_of(config, part, shapes)), units)
    except BadData as error:
        if config.data.sources is None or config.data.sources[number].keys is None:
            raise
        raise BadData(str(error).replace("data.keys.", f"data.sources.{number}.keys.")) from error
    except BadConfig as error:
        place, _, text = str(error).partition(": ")
        if config.data.sources is None or place != "data.split":
            raise
        own = ""
        if config.data.sources[number].split is None:
            own = (
                ". Numbers in data.split are for each source; give this one its own, as {train: …, split: {train: 0.8}}"
            )
        raise BadConfig(f"data.sources.{number}.split ({first_file(part.train or '')}): {text}{own}") from error


def _keys_of(config: Config, data: DataConfig, shapes: Mapping[str, str]) -> dict[str, str]:
    return {**label_keys(data.keys.model_dump(), shapes), **weight_keys(config, data.keys)}


def _stated(frames: Mapping[str, Frames]) -> Iterator[str]:
    """Yield notes about charges, spins and units that the data state and that are used."""
    wholes = dict.fromkeys(part.data for part in frames.values())
    parts = dict.fromkeys(part for whole in wholes for part in getattr(whole, "datasets", [whole]))
    for part in parts:
        if stated := getattr(part, "stated", {}):
            texts = ", ".join(f"{name} by {source}" for name, source in stated.items())
            yield f"note: as {getattr(part, 'path', 'the data')} states: {texts}"


def device_of(name: str) -> torch.device:
    """Return the device that `training.device` names."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{local_rank()}"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"training.device: '{name}' cannot be used: torch finds no CUDA device; use cpu or auto")
    return torch.device(name)


def require_precision(config: Config) -> None:
    """Raise BadConfig for `tf32` on a CPU, which has no TF32 products."""
    if config.training.precision == "tf32" and device_of(config.training.device).type == "cpu":
        raise BadConfig("training.precision: tf32 needs an NVIDIA GPU, and this training runs on the CPU; take float32")


def from_base_model(
    config: Config, own: LevelData, levels: list[str], further: Mapping[str, LevelData], facts: dict[str, Any]
) -> tuple[Potential, list[str]]:
    """Return the potential of the file of `init`, fitted to the new data, and the changes in words.

    Args:
        config: of the run.
        own: frames of the first level of theory, to which the reference energies are fitted.
        levels: names; empty for data of one level.
        further: level -> its frames; without the level of structures that the model labels.
        facts: of all frames.
    """
    base = config.base()
    assert config.init is not None and base is not None
    elements, charges = own.facts["elements"], own.facts["charges"]
    known = (elements, own.facts["isolated"], charges, facts["odd_electrons"], facts["elements"])
    potential, notes = fine_tuned(base, config.parts(), *known)
    potential.metadata = start_facts(base.metadata, config.init.file)
    start = copy.deepcopy(potential.config)
    fits = any(prior.get("energies") in ("auto", "fit") for prior in config.priors)
    if fits:
        potential = potential.to(device_of(config.training.device))
        notes.append(refit_references(potential, own.frames, own.facts, 32, own.facts["isolated"], base.elements))
        before, after = reference_energies(base), reference_energies(potential)
        most = max((abs(after[z] - before[z]) for z in before), default=0.0)
        if most > SAME_LEVEL and base.level_of_theory == (config.data.levels or [config.data.level_of_theory])[0]:
            notes.append(
                f"note: reference energies change by up to {most:.3g} eV, though the level of the labels is said to be "
                f"that of the start, {base.level_of_theory}: are they of another method?"
            )
    if len(levels) > 1:
        potential.set_levels(levels[0], added_levels(config, base, start, levels[1:], further))
        for name, part in further.items():
            if fits and config.levels.get(name, LevelConfig()).references == "own":
                notes.append(f"{name}: {refit_level(potential, name, part, base.elements)}")
    theirs, ours = base.level_of_theory, (config.data.levels or [config.data.level_of_theory])[0]
    kept = any(prior.get("energies") == "keep" for prior in config.priors)
    if kept and ours != NOT_STATED and theirs not in (None, ours):
        notes.append(f"note: reference energies of {theirs} are kept for labels of {ours}; is that meant?")
    frozen = freeze(potential, config.init.freeze)
    notes.append(f"{frozen} of {sum(p.numel() for p in potential.parameters())} parameters are frozen")
    tables = [n for n, m in potential.named_modules() if isinstance(m, torch.nn.Embedding) and _is_frozen(m)]
    if tables and not set(facts["elements"]) <= set(base.elements):
        notes.append(f"note: {tables[0]} is frozen, so that new elements keep the mean of the known ones")
    known_levels = (
        [] if Path(config.init.file).suffix == ".ckpt" else read_header(find_model(config.init.file))["levels"]
    )
    left = [name for name in known_levels if name not in (theirs, *levels)]
    if left:
        notes.append(
            f"note: the start is the level {theirs} of {config.init.file}; its levels {', '.join(left)} are not kept "
            "(init.level chooses)"
        )
    return potential, [f"start: {config.init.file}", *notes]


def _require_known_to_baselines(config: Config, elements: list[int]) -> None:
    for prior in config.priors:
        if "file" in prior:
            known = read_header(prior["file"])["config"].get("elements", elements)
            unknown = ", ".join(SYMBOLS[z] for z in elements if z not in known)
            if unknown:
                names = ", ".join(SYMBOLS[z] for z in known)
                raise BadConfig(
                    f"priors: the baseline {prior['file']} knows only {names}; training frames hold {unknown}"
                )


def _undetermined(
    potential: Potential, subsets: Mapping[str, Frames], known: Mapping[str, Statistics]
) -> Iterator[str]:
    """Yield notes about compositions without determined reference energies, at each level of theory."""
    for k, level in enumerate(potential.level_names or [""]):
        alone, at = (potential.at_level(level), f"{level}: ") if level else (potential, "")
        if alone.determined is None:
            continue
        yield f"note: {at}{alone.determined.sentence(alone.elements)}"
        for name in SUBSETS[1:]:
            if name not in subsets or (level and not (subsets[name].levels == k).any()):
                continue
            found = known[name]
            if level:
                frames = subsets[name].of(subsets[name].levels == k)
                found = statistics(frames.data, frames.indices)
            counts = found.counts * (np.array(found.elements) > potential.atom_filter)
            strange = ~alone.determined.covers(counts, found.elements) & ~np.isnan(found.energies)
            if strange.any():
                yield (
                    f"note: {at}{strange.sum()} {name} frames have compositions whose reference energies are not "
                    "determined: their errors mean nothing"
                )


def _is_frozen(module: torch.nn.Module) -> bool:
    return not any(p.requires_grad for p in module.parameters())


@contextmanager
def naming_frames(setup: Setup) -> Iterator[None]:
    """Name the frame in an error about a structure that the model refuses, which counts structures of a batch."""
    try:
        yield
    except ValueError as error:
        names, potential = setup.potential.level_names, setup.potential.train()
        for frames in setup.frames.values() if type(error) is ValueError else ():
            for number, name in enumerate(names or [None]):
                part = frames.of(frames.levels == number) if name else frames
                require_known(potential.at_level(name) if name else potential, part, range(len(part)))
        raise


def require_usable(setup: Setup) -> None:
    """Raise BadData for subsets without labels, or with elements that the model does not know.

    A spin that the model does not know is a ValueError, as in evaluation.
    """
    loss = setup.config.training.loss
    names, potential = setup.potential.level_names, setup.potential
    if loss.relative_energy > 0 and not setup.frames["train"].has_groups:
        raise BadData(
            "training.loss.relative_energy: no two training frames of one level of theory have the same entry "
            "data.keys.group"
        )
    for subset, frames in setup.frames.items() if names else ():
        for number in np.unique(frames.levels).tolist():
            part = frames.of(frames.levels == number)
            of_level = set(statistics(part.data, part.indices).elements)
            unknown = [SYMBOLS[z] for z in of_level - set(potential.at_level(names[number]).elements)]
            if unknown:
                raise BadData(
                    f"{subset} frames of {names[number]} hold {', '.join(unknown)}, which no training frame of this "
                    "level does: their energies cannot be predicted"
                )
    for subset, found in setup.statistics.items():
        unknown = [SYMBOLS[z] for z in found.elements if z not in potential.elements_of_levels]
        if unknown:
            raise BadData(
                f"{subset} frames hold {', '.join(unknown)}, which no training frame does: their energies cannot be "
                "predicted; change data.split, or leave these frames out"
            )
        if max(found.spins) > 2 and not setup.potential.representation.reads_spin:
            require_known(setup.potential, setup.frames[subset], range(len(setup.frames[subset])))
        final = [name for name in found.labelled if loss.final.weight(name) > 0]
        relative = loss.relative_energy > 0 and "energy" in found.labelled
        if subset != "test" and not final and not (relative and setup.frames[subset].has_groups):
            raise BadData(
                f"none of the {'training' if subset == 'train' else subset} frames has a label to train on; see "
                f"data.keys and training.loss{_ALONE if relative else ''}"
            )
    absent = [name for name in setup.asked if name not in setup.statistics["train"].labelled and loss.final.uses(name)]
    if absent:
        name = property_of(absent[0])
        raise BadData(
            f"none of the {len(setup.frames['train'])} training frames has a value for {name} (NaN counts as none); "
            f"set data.keys.{name if absent[0] == name else f'properties.{name}'} to null, or change the split"
        )
