"""From a configuration to what the training loop needs: frames divided into subsets, and an untrained potential."""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data import Dataset, make_splits, open_dataset
from ..errors import BadConfig, BadData
from ..potential import SYMBOLS, Potential
from .batches import Frames
from .config import Config, DataConfig
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
        digests: data file -> sha256.
    """

    config: Config
    potential: Potential
    frames: dict[str, Frames]
    splits: dict[str, Any]
    properties: Properties
    facts: dict[str, Any]
    digests: dict[str, str]


def make_setup(config: Config) -> Setup:
    """Open the data, divide it, fit what is fitted before training, and build the potential.

    Raises:
        FileNotFoundError, BadData: a data file, or a label in it, is missing or not usable.
        BadConfig: the split asks for more frames than there are; the device is not there.
    """
    data = open_subsets(config.data)
    cutoff = float(config.model["cutoff"])
    frames = {name: Frames(dataset, indices, cutoff) for name, (dataset, indices) in data.items()}
    keys = config.data.keys
    properties = Properties(forces=keys.forces is not None, stress=(keys.stress or keys.virial) is not None)
    facts = survey(frames["train"])
    complete = potential_config(config, frames["train"], facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        potential = Potential.from_config(complete)
    potential = potential.to(device_of(config.training.device), getattr(torch, config.training.precision))
    splits = {
        name: {"files": files_of(config.data, name), "indices": list(indices)} for name, (_, indices) in data.items()
    }
    return Setup(config, potential, frames, splits, properties, facts, file_digests(config.data))


def device_of(name: str) -> torch.device:
    """The device that `training.device` means."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"training.device: '{name}' is not there: torch sees no CUDA device; use cpu or auto")
    return torch.device(name)


# --- data ------------------------------------------------------------------------------------------------------------


def open_subsets(config: DataConfig) -> dict[str, tuple[Dataset, list[int]]]:
    """subset -> (data set, indices of its frames); validation and test have own files or are split from train's."""
    keys = {name: key for name, key in config.keys.model_dump().items() if key is not None}
    units = {name: unit for name, unit in config.units.model_dump().items() if unit is not None}

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


# --- statistics and the potential -----------------------------------------------------------------------------------


def survey(frames: Frames) -> dict[str, Any]:
    """One pass over the training frames: elements, charges, labels, compositions, sizes."""
    elements: set[int] = set()
    charges: set[int] = set()
    spins: set[int] = set()
    labelled = {"energy": 0, "forces": 0, "stress": 0}
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
        for name in labelled:
            if name in labels and bool(torch.isfinite(labels[name]).any()):
                labelled[name] += 1
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


def potential_config(config: Config, frames: Frames, facts: dict[str, Any]) -> dict[str, Any]:
    """The potential's configuration with what is fitted: reference energies and the energy scale."""
    subtract_priors(config, frames, facts)
    priors = []
    references: dict[int, float] = {}
    for prior in config.priors:
        if prior["name"] == "atomref":
            if prior["energies"] == "fit":
                references = fit_references(facts)
                prior = {**prior, "energies": {str(z): energy for z, energy in references.items()}}
            else:
                references = {int(z): energy for z, energy in (prior["energies"] or {}).items()}
                missing = [SYMBOLS[z] for z in facts["elements"] if z not in references]
                if missing:
                    raise BadConfig(f"priors: atomref.energies has no entry for {', '.join(missing)}")
        priors.append(prior)
    return {
        "model": config.model,
        "head": config.head,
        "priors": priors,
        "energy_scale": energy_scale(config, facts, references),
        "elements": facts["elements"],
    }


def subtract_priors(config: Config, frames: Frames, facts: dict[str, Any]) -> None:
    """Take the energies of the physical priors off `facts["energies"]`: references are fitted to what remains.

    Reference energies and priors that need the network's charges are left out.
    """
    others = [prior for prior in config.priors if prior["name"] != "atomref"]
    with torch.random.fork_rng(devices=[]):
        potential = Potential.from_config({"model": config.model, "head": config.head, "priors": others})
    known = [prior for prior in potential.priors if not prior.uses_charges]
    if not known:
        return
    potential.priors = torch.nn.ModuleList(known)  # type: ignore[assignment]
    with torch.no_grad():
        for k, position in enumerate(facts["energy_positions"]):
            batch = frames[position]
            facts["energies"][k] -= float(potential.prior_energies(batch.sample.system, batch.neighbors).sum())


def fit_references(facts: dict[str, Any]) -> dict[int, float]:
    """Energy of each element in eV by least squares over the training frames, of least norm where not unique."""
    elements = facts["elements"]
    if not facts["energies"]:
        return dict.fromkeys(elements, 0.0)
    counts = torch.tensor([[c.get(z, 0) for z in elements] for c in facts["compositions"]], dtype=torch.float64)
    target = torch.tensor(facts["energies"], dtype=torch.float64)
    solution = torch.linalg.lstsq(counts, target[:, None], driver="gelsd").solution[:, 0]
    return dict(zip(elements, solution.tolist(), strict=True))


def energy_scale(config: Config, facts: dict[str, Any], references: dict[int, float]) -> float:
    """eV per unit of the network: the rms of the forces (× 1 Å), or the spread of energies without references."""
    if config.training.energy_scale != "auto":
        return float(config.training.energy_scale)
    if facts["forces_rms"]:
        return facts["forces_rms"]
    rest = [
        (energy - sum(references.get(z, 0.0) * n for z, n in c.items())) / math.sqrt(max(1, sum(c.values())))
        for energy, c in zip(facts["energies"], facts["compositions"], strict=True)
    ]
    spread = float(torch.tensor(rest, dtype=torch.float64).std()) if len(rest) > 1 else 0.0
    return spread if spread > 0 else 1.0


def require_labels(facts: dict[str, Any], weights: Sequence[str]) -> None:
    """Raise BadData unless at least one weighted property is labelled in at least one training frame."""
    if not any(facts["labelled"][name] for name in weights):
        raise BadData("none of the training frames has a label to train on; see data.keys and training.loss")
