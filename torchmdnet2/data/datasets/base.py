"""What a published data set says of itself, and the registry of them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import BadData
from ...registry import did_you_mean
from ...system import System
from ..check import check_batch
from ..collate import select
from ..labels import LABELS
from ..reader import Chunk
from ..sample import Sample

__all__ = ["DATASETS", "DownloadFile", "Published", "frames", "make_published", "register", "without_strong_forces"]


@dataclass(frozen=True)
class DownloadFile:
    """A file to download.

    Attributes:
        url: its address.
        file: its local name, with its folder.
        sha256: its checksum, or the first digits of it; "" if unknown.
        md5: the same.
        instead: names of local files that are used if they exist.
    """

    url: str
    file: str
    sha256: str = ""
    md5: str = ""
    instead: tuple[str, ...] = ()


class Published(ABC):
    """A published data set: its files, their conversion, and where it comes from.

    The arguments of a subclass are the options that the user may give.

    Attributes:
        citation, licence, level_of_theory: for the model card.
        reference_energies: atomic number -> eV as published, or empty: then fit them (`priors: atomref`, `fit`).
        labels: what its frames have.
        sources: the files.
        subset_names: parts that a configuration may name for validation and test, beside the option `subsets`.
    """

    citation: ClassVar[str]
    licence: ClassVar[str] = "see the publication"
    level_of_theory: str
    labels: tuple[str, ...] = ("energy", "forces")
    reference_energies: Mapping[int, float] = {}
    sources: Sequence[DownloadFile]
    subset_names: Sequence[str] = ()

    @abstractmethod
    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """All frames in the package's units.

        Args:
            files: those of `sources`, in order.

        Raises:
            BadData: a file is damaged, or not what it should be.
        """


DATASETS: dict[str, type[Published]] = {}
"""name -> class of a published data set."""


def register(name: str):  # type: ignore[no-untyped-def]
    """Class decorator: make a data set known under a name."""

    def decorate(cls: type[Published]) -> type[Published]:
        DATASETS[name] = cls
        return cls

    return decorate


def make_published(name: str, options: Mapping[str, Any]) -> Published:
    """A data set by its name.

    Raises:
        BadData: an unknown name, or an option or value that it does not have.
    """
    if name not in DATASETS:
        raise BadData(f"unknown data set '{name}'{did_you_mean(name, DATASETS) or '.'} Known: {', '.join(DATASETS)}")
    known = inspect.signature(DATASETS[name]).parameters
    for option in options:
        if option not in known:
            rest = f"it has: {', '.join(known)}" if known else "it has none"
            raise BadData(f"{name}: there is no option '{option}'{did_you_mean(option, known) or ';'} {rest}")
    needed = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if needed:
        raise BadData(f"{name}: the option '{needed[0]}' must be given")
    return DATASETS[name](**options)


def one_of(value: str, known: Sequence[str], what: str) -> str:
    """The value.

    Raises:
        BadData: it is not one of the known ones.
    """
    if value not in known:
        raise BadData(f"{what}: there is no '{value}'{did_you_mean(value, known) or '.'} Known: {', '.join(known)}")
    return value


def frames(
    where: str, first: int, z: np.ndarray, pos: np.ndarray, labels: Mapping[str, np.ndarray], charge: float = 0.0
) -> Chunk:
    """Frames of one molecule, or of molecules of one size, as a checked chunk.

    Args:
        where, first: as of a `Chunk`.
        z: [N] or [S, N] atomic numbers.
        pos: [S, N, 3] Å.
        labels: name -> values with one row per frame, in the package's units.
        charge: of each molecule.

    Raises:
        BadData: shapes do not fit, or a value cannot be used.
    """
    pos = np.asarray(pos, dtype=np.float64)
    if pos.ndim != 3 or pos.shape[2] != 3 or z.shape not in (pos.shape[1:2], pos.shape[:2]):
        raise BadData(f"{where}: atomic numbers of the shape {z.shape} and positions of {pos.shape} do not fit")
    count, size = pos.shape[:2]
    system = System(
        z=torch.from_numpy(np.broadcast_to(z, (count, size)).astype(np.int64).reshape(-1)),
        pos=torch.from_numpy(pos.reshape(-1, 3)),
        batch=torch.arange(count).repeat_interleave(size),
        charge=torch.full((count,), float(charge), dtype=torch.float64),
        spin=torch.zeros(count, dtype=torch.long),
    )
    shaped = {}
    for name, values in labels.items():
        shape = LABELS[name].of(system)
        if len(values) != count or np.size(values) != np.prod(shape):
            raise BadData(f"{where}: {name} of the shape {np.shape(values)} does not fit to {count} frames of {size}")
        shaped[name] = torch.from_numpy(np.array(values, dtype=np.float64).reshape(shape))
    return Chunk(check_batch(Sample(system, shaped), where, first), where, first)


def without_strong_forces(chunks: Iterator[Chunk], most: float | None) -> Iterator[Chunk]:
    """Chunks without the frames in which some force is longer than `most`, eV/Å; runs of frames that stay."""
    for chunk in chunks:
        if most is None or "forces" not in chunk.sample.labels:
            yield chunk
            continue
        sample = chunk.sample
        strong = sample.labels["forces"].norm(dim=1) > most
        stay = np.ones(sample.system.num_systems, dtype=bool)
        stay[sample.system.batch[strong].numpy()] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[0], stay.astype(int), [0]])))
        for begin, end in edges.reshape(-1, 2).tolist():
            yield Chunk(select(sample, np.arange(begin, end)), chunk.where, chunk.first + begin)
