"""From a configuration to what the training loop needs: frames divided into subsets, and an untrained potential."""

from __future__ import annotations

import glob
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import Dataset, make_splits, open_dataset
from ..errors import BadConfig, BadData
from ..potential import Potential
from .base_model import open_base
from .batches import Frames
from .config import Config, DataConfig
from .initial import fine_tuned, freeze, refit_references
from .labels import label_keys, label_units
from .loss_config import LossConfig
from .parts import predicted_shapes, untrained
from .references import potential_config
from .trainer import Properties

__all__ = ["SUBSETS", "Setup", "file_digests", "make_setup"]

SUBSETS = ("train", "validation", "test")


@dataclass
class Setup:
    """All that a run starts from.

    Attributes:
        config: as given.
        potential: untrained, on its device.
        frames: "train", "validation", "test" -> frames; a subset without frames is absent.
        splits: subset -> {"files": …, "indices": …}, as in splits.json.
        properties: what is predicted besides the energy.
        facts: statistics of the training frames, for the log and the model card.
        digests: data file, and file of `init` -> sha256.
        notes: what was loaded and what is new, in words; empty without `init`.
    """

    config: Config
    potential: Potential
    frames: dict[str, Frames]
    splits: dict[str, Any]
    properties: Properties
    facts: dict[str, Any]
    digests: dict[str, str]
    notes: list[str] = field(default_factory=list)


def make_setup(config: Config) -> Setup:
    """Open the data, divide it, fit what is fitted before training, and build the potential.

    Raises:
        FileNotFoundError, BadData: a data file, or a label in it, is missing or not usable.
        BadConfig: the split asks for more frames than there are; the device is not there.
    """
    shapes = predicted_shapes(untrained(config.parts()))
    keys = label_keys(config.data.keys.model_dump(), shapes)
    data = open_subsets(config.data, keys, label_units(config.data.units.model_dump(), shapes))
    cutoff = float(config.model["cutoff"])
    frames = {name: Frames(dataset, indices, cutoff) for name, (dataset, indices) in data.items()}
    properties = Properties(forces="forces" in keys, stress="stress" in keys or "virial" in keys)
    facts = survey(frames["train"])
    notes: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        if config.init is None:
            potential = Potential.from_config(potential_config(config, frames["train"], facts))
        else:
            potential, notes = started(config, frames["train"], facts)
    potential = potential.to(device_of(config.training.device), getattr(torch, config.training.precision))
    splits = {
        name: {"files": files_of(config.data, name), "indices": list(indices)} for name, (_, indices) in data.items()
    }
    digests = file_digests(config.data)
    if config.init is not None:
        digests[config.init.file] = hashlib.sha256(Path(config.init.file).read_bytes()).hexdigest()
    return Setup(config, potential, frames, splits, properties, facts, digests, notes)


def device_of(name: str) -> torch.device:
    """The device that `training.device` means."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"training.device: '{name}' is not there: torch sees no CUDA device; use cpu or auto")
    return torch.device(name)


# --- data ------------------------------------------------------------------------------------------------------------


def open_subsets(
    config: DataConfig, keys: dict[str, str], units: dict[str, str]
) -> dict[str, tuple[Dataset, list[int]]]:
    """subset -> (data set, indices of its frames); validation and test have own files or are split from train's."""

    def opened(path: str | list[str]) -> Dataset:
        return open_dataset(path, keys=keys, units=units, format=config.format)

    main = opened(config.train)
    subsets: dict[str, tuple[Dataset, list[int]]] = {}
    own = {name: getattr(config, name) for name in SUBSETS[1:] if getattr(config, name) is not None}
    divided = read_split(config, len(main)) if config.split.file else divide(config, len(main), set(own))
    for name in SUBSETS:
        if name in own:
            dataset = opened(own[name])
            subsets[name] = (dataset, list(range(len(dataset))))
        elif divided.get(name):
            subsets[name] = (main, divided[name])
    if "train" not in subsets:
        raise BadConfig("data.split: no frame is left for training")
    if config.split.bootstrap is not None:
        dataset, indices = subsets["train"]
        drawn = np.random.default_rng(config.split.bootstrap).integers(0, len(indices), len(indices))
        subsets["train"] = (dataset, sorted(indices[k] for k in drawn.tolist()))
    return subsets


def divide(config: DataConfig, total: int, own: set[str]) -> dict[str, list[int]]:
    """Random indices of each subset that has no file of its own; a function of the seed and the number of frames."""
    split = config.split
    validation, test = (0 if name in own else getattr(split, name) for name in SUBSETS[1:])
    try:
        parts = make_splits(total, split.train, validation, test, split.seed)
    except ValueError as error:
        raise BadConfig(f"data.split: {error}") from error
    return {"train": parts.train, "validation": parts.val, "test": parts.test}


def read_split(config: DataConfig, total: int) -> dict[str, list[int]]:
    """Indices from a splits.json that an earlier run wrote.

    Raises:
        BadConfig: not such a file; an index is out of range, or in two subsets.
    """
    path = Path(str(config.split.file))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = files_of(config, "train")
        divided = {name: part["indices"] for name, part in content.items() if part["files"] == files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadConfig(f"data.split.file: {path} cannot be read as a split: {error}") from error
    indices = [index for part in divided.values() for index in part]
    if not all(isinstance(index, int) and 0 <= index < total for index in indices):
        raise BadConfig(f"data.split.file: {path} holds indices outside 0 … {total - 1}")
    if len(set(indices)) != len(indices):
        raise BadConfig(f"data.split.file: {path} has the same frame twice")
    return divided


def files_of(config: DataConfig, subset: str) -> list[str]:
    """The data files that a subset comes from, patterns resolved as `open_dataset` does."""
    paths = getattr(config, subset) if getattr(config, subset) is not None else config.train
    files: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        files += [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
    return files


def file_digests(config: DataConfig) -> dict[str, str]:
    """sha256 of every data file."""
    digests = {}
    for path in dict.fromkeys(file for subset in SUBSETS for file in files_of(config, subset)):
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(2**22):
                digest.update(block)
        digests[path] = digest.hexdigest()
    return digests


def started(config: Config, frames: Frames, facts: dict[str, Any]) -> tuple[Potential, list[str]]:
    """Fine-tuning: the potential of the file of `init`, fitted to the new data, and what was done, in words."""
    assert config.init is not None
    base = open_base(config.init.file, config.init.energy_unit)
    potential, notes = fine_tuned(base, config.parts(), facts["elements"])
    if any(prior.get("energies") == "fit" for prior in config.priors):
        notes.append(refit_references(potential.to(device_of(config.training.device)), frames, facts, 32))
    frozen = freeze(potential, config.init.freeze)
    notes.append(f"{frozen} of {sum(p.numel() for p in potential.parameters())} parameters are frozen")
    return potential, [f"start: {config.init.file}", *notes]


# --- statistics ------------------------------------------------------------------------------------------------------


def survey(frames: Frames) -> dict[str, Any]:
    """One pass over the training frames: elements, charges, labels, compositions, sizes."""
    elements: set[int] = set()
    charges: set[int] = set()
    spins: set[int] = set()
    labelled: dict[str, int] = {}
    force_square, force_count = 0.0, 0
    compositions: list[dict[int, int]] = []
    energies: list[float] = []
    positions: list[int] = []
    atoms: list[int] = []
    edges: list[int] = []
    for i in range(len(frames)):
        batch = frames[i]
        system, labels = batch.sample.system, batch.sample.labels
        numbers, counts = system.z.unique(return_counts=True)
        composition = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        elements |= composition.keys()
        charges |= {int(q) for q in system.charge.tolist()}
        spins |= set(system.spin.tolist())
        atoms.append(system.num_atoms)
        edges.append(batch.neighbors.num_edges)
        for name, value in labels.items():
            labelled[name] = labelled.get(name, 0) + int(bool(torch.isfinite(value).any()))
        if "forces" in labels:
            known = labels["forces"][torch.isfinite(labels["forces"]).all(1)].double()
            force_square += float(known.square().sum())
            force_count += known.numel()
        if "energy" in labels and bool(torch.isfinite(labels["energy"]).all()):
            compositions.append(composition)
            energies.append(float(labels["energy"]))
            positions.append(i)
    return {
        "elements": sorted(elements),
        "charges": sorted(charges),
        "spins": sorted(spins),
        "labelled": labelled,
        "forces_rms": math.sqrt(force_square / force_count) if force_count else None,
        "atoms": atoms,
        "edges": edges,
        "compositions": compositions,
        "energies": energies,
        "energy_positions": positions,  # of the frames that `compositions` and `energies` belong to
    }


def require_labels(facts: dict[str, Any], loss: LossConfig) -> None:
    """Raise BadData unless at least one weighted property is labelled in at least one training frame."""
    if not any(count and max(loss.weight(name), loss.final.weight(name)) for name, count in facts["labelled"].items()):
        raise BadData("none of the training frames has a label to train on; see data.keys and training.loss")
