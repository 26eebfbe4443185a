"""The frames of a run: opening data files, division into subsets, statistics before training."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...data import ConcatDataset, Dataset, Statistics, make_splits, open_dataset, read_splits
from ...data.cache import CachedDataset, file_facts
from ...data.datasets import make_published, open_published
from ...data.label_checks import Usual
from ...data.labels import CONFIG_TYPE, GROUP, LEVEL, kind_code
from ...data.reader import find_format
from ...data.splits import SUBSETS
from ...errors import BadConfig, BadData
from ...registry import did_you_mean
from ...system import System
from ..config.sections import LOSS_WEIGHT, DataConfig, KeysConfig, SourceConfig
from ..steps.batches import Frames, frame_labels, in_order

__all__ = [
    "SUBSETS", "Subsets", "file_digests", "files_of", "first_file", "joined", "labels_of", "open_subsets",
    "periodic_heights", "require_searchable", "share_notes", "source_facts", "survey", "weight_keys", "weight_notes",
]  # fmt: skip


_MOST_NEIGHBORS = 10_000
TEST_SHARE = 0.1  # of the frames, where `split.test` is not given


Subsets = dict[str, tuple[Dataset, list[int]]]
"""subset -> (data set, indices of its frames)"""


def joined(parts: Sequence[Subsets], sources: Sequence[SourceConfig], levels: Sequence[str]) -> Subsets:
    """Return the subsets of several sources, whose frames have their level of theory, and their weight, as labels.

    Training frames of sources with a share are repeated; none is left out.

    Args:
        parts: subsets of each source.
        sources: as in the configuration.
        levels: names; their indices are the labels.
    """
    found: Subsets = {}
    for name in SUBSETS:
        chosen = [(part[name], source) for part, source in zip(parts, sources, strict=True) if name in part]
        if not chosen:
            continue
        labels = [
            {LEVEL: float(levels.index(source.level)), **({} if source.weight == 1 else {LOSS_WEIGHT: source.weight})}
            for _, source in chosen
        ]
        data = ConcatDataset([dataset for (dataset, _), _ in chosen], labels)
        starts = np.cumsum([0, *(len(dataset) for (dataset, _), _ in chosen)]).tolist()
        counts = [len(indices) for (_, indices), _ in chosen]
        shares = [source.share for _, source in chosen]
        wanted = _with_shares(counts, shares) if name == "train" else counts
        indices: list[int] = []
        for ((_, own), _), start, number in zip(chosen, starts, wanted, strict=False):
            indices += [start + own[k % len(own)] for k in range(number)]
        found[name] = data, indices
    if "train" not in found:
        raise BadConfig("data.split: no frame is left for training")
    return found


def source_facts(subsets: Subsets, sources: Sequence[SourceConfig]) -> list[dict[str, Any]]:
    """Return level, files, number of training frames, licence and citation of each source, for the model card.

    Args:
        subsets: of `joined`.
        sources: as in the configuration.
    """
    return [
        {
            "level": source.level,
            "files": [source.train] if isinstance(source.train, str) else list(source.train),
            "frames": len(np.unique(own)),
            "licence": source.licence,
            "citation": source.citation,
        }
        for source, own in zip(sources, _by_source(subsets), strict=True)
    ]


def share_notes(subsets: Subsets, sources: Sequence[SourceConfig]) -> Iterator[str]:
    """Yield how many frames of each source an epoch has, if sources have shares.

    Args:
        subsets: of `joined`.
        sources: as in the configuration.
    """
    if all(source.share is None for source in sources):
        return
    texts, total = [], len(subsets["train"][1])
    for source, own in zip(sources, _by_source(subsets), strict=True):
        distinct = len(np.unique(own))
        times = len(own) / distinct
        each = "once" if times == 1 else f"{times:.3g} times"
        texts.append(f"the {distinct} of {first_file(source.train)} {each} ({len(own) / total:.0%})")
    yield f"training frames in an epoch, by the shares of sources: {', '.join(texts)}"


def _by_source(subsets: Subsets) -> list[np.ndarray]:
    """Return the indices of the training frames of each source, with repetitions."""
    data, indices = subsets["train"]
    assert isinstance(data, ConcatDataset)
    owner = np.searchsorted(np.cumsum([len(part) for part in data.datasets]), indices, side="right")
    return [np.array(indices)[owner == k] for k in range(len(data.datasets))]


def first_file(files: str | list[str]) -> str:
    """Return the first of some files, for messages."""
    return files if isinstance(files, str) else f"{files[0]}{' …' if len(files) > 1 else ''}"


def _with_shares(counts: Sequence[int], shares: Sequence[float | None]) -> list[int]:
    """Return the number of frames of each source in an epoch: as the shares demand, and at least all frames of a
    source.

    Sources without a share divide the rest, in proportion to their frames.
    """
    rest = 1 - sum(share for share in shares if share is not None)
    others = sum(n for n, share in zip(counts, shares, strict=True) if share is None)
    parts = [rest * n / others if share is None else share for n, share in zip(counts, shares, strict=True)]
    total = max(n / part for n, part in zip(counts, parts, strict=True))
    return [max(n, round(total * part)) for n, part in zip(counts, parts, strict=True)]


def open_subsets(config: DataConfig, keys: dict[str, str], units: dict[str, str]) -> Subsets:
    """Return subset -> (data set, indices of its frames); validation and test have separate files or are split from
    train.

    Raises:
        FileNotFoundError, BadData: a data file, or a label in it, is missing or not usable.
        BadConfig: the split asks for more frames than there are, or belongs to other data.
    """

    def opened(path: str | list[str]) -> Dataset:
        return open_dataset(path, keys=keys, units=units, format=config.format, cache=config.cache)

    def published(**further: Any) -> Dataset:
        assert config.dataset is not None  # or else config.train is given
        dataset = open_published(config.dataset, config.root, config.download, **{**config.options, **further})
        return dataset.with_labels({source: name for name, source in keys.items()})

    named = {name: _named(config, name) for name in SUBSETS[1:]}
    main = opened(config.train) if config.train is not None else published()
    subsets: dict[str, tuple[Dataset, list[int]]] = {}
    own = {name: getattr(config, name) for name in SUBSETS[1:] if getattr(config, name) is not None}
    groups = _groups_of(main) if GROUP in keys and not config.split.file else None
    divided = _read_split(config, main) if config.split.file else _divide(config, len(main), set(own), groups)
    for name in SUBSETS:
        if name in own:
            dataset = published(subsets=named[name]) if named[name] else opened(own[name])
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


def _named(config: DataConfig, subset: str) -> list[str]:
    """Return the subsets of a published data set that are given instead of files for validation or test.

    Raises:
        BadConfig: there is neither such a subset nor such a file, or training has these frames.
    """
    given = getattr(config, subset)
    if config.dataset is None or subset == "train" or given is None:
        return []
    published = make_published(config.dataset, config.options)
    names = [given] if isinstance(given, str) else given
    known = [name for name in names if name in published.subset_names]
    if set(known) & set(getattr(published, "subsets", ())):
        raise BadConfig(f"data.{subset}: {', '.join(known)}: the model is trained on these frames")
    if known and known != names:
        raise BadConfig(f"data.{subset}: give subsets of {config.dataset} or files, not both")
    if published.subset_names and not known and not any(glob.glob(name, recursive=True) for name in names):
        hint = did_you_mean(names[0], published.subset_names) or "."
        raise BadConfig(
            f"data.{subset}: there is no file '{names[0]}', nor has {config.dataset} such a subset{hint} "
            f"It has {', '.join(published.subset_names)}"
        )
    return known


def _groups_of(dataset: Dataset) -> np.ndarray:
    """Return the number of the group of each frame; frames without a group are alone in theirs."""
    labels = frame_labels(dataset, np.arange(len(dataset)), GROUP)
    _, groups = np.unique(labels, return_inverse=True)
    return np.where(np.isnan(labels), len(labels) + np.arange(len(labels)), groups.reshape(-1))


def _divide(config: DataConfig, total: int, own: set[str], groups: np.ndarray | None) -> dict[str, list[int]]:
    """Return random indices of each subset without separate files; they depend on the seed, the number of frames and
    their groups only."""
    split = config.split
    validation, test = (0 if name in own else getattr(split, name) for name in SUBSETS[1:])
    try:
        if test is None:
            test = TEST_SHARE
            if split.train is not None:
                left = len(make_splits(total, split.train, validation, None)["test"])
                test = left if left < int(TEST_SHARE * total) else TEST_SHARE
        return make_splits(total, split.train, validation, test, split.seed, groups)
    except ValueError as error:
        raise BadConfig(f"data.split: {error}") from error


def _read_split(config: DataConfig, main: Dataset) -> dict[str, list[int]]:
    """Return indices from a splits.json of an earlier run."""
    try:
        return read_splits(str(config.split.file), main, files_of(config, "train", main))
    except (OSError, BadData) as error:
        raise BadConfig(f"data.split.file: {error}") from error


def files_of(config: DataConfig, subset: str, dataset: Dataset) -> list[str]:
    """Return the data files of a subset, with patterns resolved as by `open_dataset`."""
    if config.sources is not None:
        return [file for part in config.parts for file in files_of(part, subset, dataset)]
    paths = getattr(config, subset) if getattr(config, subset) is not None else config.train
    if paths is None or _named(config, subset):
        return _sources(dataset)
    found: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        found += [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))
    chosen = find_format(config.format)
    return chosen.reader.files_of(found, None) if chosen else found


def _sources(dataset: Dataset) -> list[str]:
    """Return the files that a cache was made of."""
    return [source["path"] for source in dataset.facts["sources"]] if isinstance(dataset, CachedDataset) else []


def labels_of(config: DataConfig, keys: dict[str, str]) -> dict[str, str]:
    """Return the keys that can be read: of a published data set, name -> its label; "energy" and "forces" may be
    absent.

    Raises:
        BadConfig: it does not have a label.
    """
    if config.dataset is None:
        return keys
    labels = make_published(config.dataset, config.options).labels
    known = {}
    for name, key in keys.items():
        shape, _, further = name.partition(":")
        source = f"{shape}:{key}" if further else key
        if source in labels:
            known[name] = source
        elif name not in ("energy", "forces", "charge", "spin") or name != key:
            names = [label.partition(":")[2] or label for label in labels]
            hint = did_you_mean(key, names) or "."
            raise BadConfig(f"data.keys: {config.dataset} has no '{key}'{hint} It has {', '.join(names)}")
    if not known:
        raise BadConfig(f"data.keys: {config.dataset} has none of {', '.join(keys)}; it has {', '.join(labels)}")
    return known


def file_digests(config: DataConfig, subsets: Mapping[str, Dataset]) -> dict[str, str]:
    """Return the SHA-256 of every data file; a cache knows those of its files.

    Args:
        config: it names the files.
        subsets: subset -> its data set.
    """
    known = {
        source["path"]: source["sha256"]
        for dataset in subsets.values()
        if isinstance(dataset, CachedDataset)
        for source in dataset.facts["sources"]
    }
    named = [file for subset, dataset in subsets.items() for file in files_of(config, subset, dataset)]
    return {path: known.get(path) or file_facts(path)["sha256"] for path in dict.fromkeys([*known, *named])}


def require_searchable(frames: Frames) -> None:
    """Raise BadConfig for a cutoff within which periodic frames have too many neighbors for a search.

    Args:
        frames: a hundred of them, evenly spread, are checked.
    """
    for k in np.unique(np.linspace(0, len(frames) - 1, min(len(frames), 100)).astype(int)).tolist():
        system = frames.data.batch(frames.indices[[k]]).system
        heights = periodic_heights(system)
        ball = {0: 0.0, 1: 2.0, 2: np.pi, 3: 4 / 3 * np.pi}[len(heights)]  # of radius 1
        neighbors = system.num_atoms * ball * frames.cutoff ** len(heights) / float(heights.prod())
        if neighbors > _MOST_NEIGHBORS:
            raise BadConfig(
                f"model.cutoff: within {frames.cutoff:g} Å, an atom of {frames.name(k)} has about {neighbors:.2g} "
                f"neighbors, and at most {_MOST_NEIGHBORS} are allowed; 4 to 8 Å are usual. Is data.units.length "
                "right?"
            )


def periodic_heights(system: System) -> Tensor:
    """Return distances between the lattice planes of a structure along each of its periodic vectors, Å."""
    vectors = system.cell[0][system.pbc[0]].double()  # [k, 3]
    return torch.linalg.inv(vectors @ vectors.T).diagonal().rsqrt()


def survey(frames: Frames, found: Statistics) -> dict[str, Any]:
    """Return elements, charges, compositions, energies and sizes of the training frames, from their statistics."""
    known = np.flatnonzero(~np.isnan(found.energies))
    return {
        "elements": found.elements,
        "charges": found.charges,
        "spins": found.spins,
        "odd_electrons": found.odd_electrons,
        "forces_rms": Usual(found).force_rms,  # single wrong labels must not decide the scale of the network
        "atoms": found.sizes.tolist(),
        "edges": frames.edges.tolist(),
        "compositions": Compositions(found.elements, found.counts[known]),
        "energies": found.energies[known].tolist(),
        "energy_positions": known.tolist(),  # of the frames that `compositions` and `energies` belong to
    }


class Compositions(Sequence[dict[int, int]]):
    """The composition of each frame: element -> number of atoms; stored as a table.

    Args:
        elements: [K] atomic numbers.
        counts: [S, K] atoms of each in each frame.
    """

    def __init__(self, elements: list[int], counts: np.ndarray):
        self.elements, self.counts = elements, counts

    def __len__(self) -> int:
        return len(self.counts)

    def table(self, elements: Sequence[int]) -> np.ndarray:
        """Return the numbers of atoms of these elements in each frame, [S, len(elements)] float64."""
        columns = [self.elements.index(z) if z in self.elements else -1 for z in elements]
        counts = np.concatenate([self.counts, np.zeros((len(self.counts), 1))], 1)
        return counts[:, columns].astype(np.float64)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Compositions(self.elements, self.counts[index])
        return {z: n for z, n in zip(self.elements, self.counts[index].tolist(), strict=True) if n}

    def __iter__(self) -> Iterator[dict[int, int]]:
        return (self[k] for k in range(len(self)))


# --- Weights of frames and of kinds of frames in the loss: checks before training, and a line of the log ---

if TYPE_CHECKING:
    from ..config.config import Config


_AT_ONCE = 1024  # frames
_LISTED = 20  # words in a message


def weight_keys(config: Config, keys: KeysConfig | None = None) -> dict[str, str]:
    """Return entries of the data that give weights and groups of frames: label -> its name in the data.

    Args:
        config: of the run.
        keys: of one source; None: `data.keys`.
    """
    keys, loss = keys or config.data.keys, config.training.loss
    found = {} if keys.weight is None else {LOSS_WEIGHT: keys.weight}
    found |= {} if keys.group is None else {GROUP: keys.group}
    return {**found, CONFIG_TYPE: keys.config_type} if loss.config_weights else found


def weight_notes(config: Config, subsets: Mapping[str, Frames]) -> Iterator[str]:
    """Yield the weights of training frames and their numbers, in words.

    Raises:
        BadConfig: no frame of any subset is of a kind that has a weight.
        BadData: the weight of a frame is negative.
    """
    kinds = {kind_code(word): word for word in config.training.loss.config_weights}
    counts = {name: dict.fromkeys(kinds, 0) for name in subsets}
    own = 0
    if not any(weight_keys(config, part.keys) for part in config.data.parts):
        return
    for name, frames in subsets.items():
        for part in in_order(len(frames), _AT_ONCE):
            labels = frames.data.batch(frames.indices[part]).labels
            if CONFIG_TYPE in labels:
                codes, number = np.unique(labels[CONFIG_TYPE].numpy(), return_counts=True)
                for code, n in zip(codes.tolist(), number.tolist(), strict=True):
                    if code in kinds:
                        counts[name][code] += n
            if LOSS_WEIGHT in labels:
                weights = labels[LOSS_WEIGHT].numpy()
                if (weights < 0).any():
                    where = frames.name(part[int(np.flatnonzero(weights < 0)[0])])
                    raise BadData(f"{where}: its weight ({config.data.keys.weight}) must not be negative")
                own += int((~np.isnan(weights)).sum()) if name == "train" else 0
    for code, word in kinds.items():
        if not any(count[code] for count in counts.values()):
            known = sorted(set().union(*(frames.data.kinds for frames in subsets.values())))
            hint = did_you_mean(word, known) or "."
            there = f"Known: {', '.join(known[:_LISTED])}" if known else "See data.keys.config_type"
            raise BadConfig(
                f"training.loss.config_weights: no frame has {config.data.keys.config_type}={word}{hint} {there}"
                f"{' …' if len(known) > _LISTED else ''}"
            )
    parts = [f"{config.training.loss.config_weights[word]:g} for {word} ({counts['train'][code]} frames)"
            for code, word in kinds.items()]  # fmt: skip
    parts += [f"their own for {own} frames"] if own else []
    if not parts:
        return
    yield f"weights in the loss: {', '.join(parts)}; 1 for all others"
