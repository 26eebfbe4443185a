"""Readers go through a source once, from front to back, a bounded number of frames at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import BadData
from .collate import collate
from .conversion import missing_key
from .dataset import Sample

__all__ = ["Chunk", "Reader", "chunked"]


@dataclass(eq=False)
class Chunk:
    """Consecutive frames of a source.

    Attributes:
        sample: B structures, in the package's units, float64 and checked; all of them have the same labels.
        where: name of the place they come from, as "train.xyz" or "train.h5, group 'a'".
        first: number of the first of them there; frame k of the chunk is called f"{where}, frame {first + k}".
    """

    sample: Sample
    where: str
    first: int


class Reader(ABC):
    """Frames of one file, or of files that belong together.

    Attributes:
        path: what is read, for messages.
        files: all files that are read.
        asked: label -> its name in the file, of those that must be in at least one frame.
        keys: the same, of all that are read where they are there.
        counts: label -> number of frames seen that have it.
        available: names of all labels seen.
        num_frames: frames seen.
    """

    path: str
    files: list[str]
    asked: dict[str, str]
    keys: dict[str, str]
    counts: Counter[str]
    available: set[str]
    num_frames: int = 0

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """All frames in order.

        Raises:
            BadData: a frame is damaged or not usable; names it.
        """

    def require_keys(self) -> None:
        """Raise BadData when a key that was asked for is in no frame seen."""
        for name, key in self.asked.items():
            if not self.counts[name]:
                raise missing_key(name, key, self.available, self.path)

    def unread(self) -> set[str]:
        """Names of labels that are there and are not read."""
        return self.available - set(self.keys.values())

    def summary(self) -> str:
        """What is in the file and what is not, in words."""
        return describe(self.path, f"{self.num_frames} frames", self.keys, self.counts, self.asked, self.unread())


def describe(
    path: str, size: str, keys: Iterable[str], counts: Mapping[str, int], asked: Iterable[str], unread: Iterable[str]
) -> str:
    """A data set in words: its size, how many frames have each label, what is not read."""
    found = [f"{name} in {counts[name]}" for name in keys if counts[name] or name in asked]
    text, rest = f"{path}: {size}; {', '.join(found) or 'no labels'}", sorted(unread)
    return f"{text}; not read: {', '.join(rest)}" if rest else text


def chunked(samples: Iterable[Sample], where: str, first: int = 0, size: int = 256) -> Iterator[Chunk]:
    """Single samples as chunks of those that follow each other and have the same labels."""
    kept: list[Sample] = []
    for sample in samples:
        if kept and (len(kept) == size or kept[0].labels.keys() != sample.labels.keys()):
            yield Chunk(collate(kept), where, first)
            first += len(kept)
            kept = []
        kept.append(sample)
    if kept:
        yield Chunk(collate(kept), where, first)
    elif first == 0:
        raise BadData(f"{where}: there are no frames in it")
