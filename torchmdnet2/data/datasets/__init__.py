"""Published data sets. They are downloaded, checked and converted once into a cache in the package's units.

from torchmdnet2.data.datasets import open_published
data = open_published("rmd17", root="data", molecule="aspirin")
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ..cache import CachedDataset, cache_folder, cache_root, cached
from ..reader import Chunk, Reader
from .ani import COMP6, ANI1x, ANI2x
from .base import DATASETS, DownloadFile, Published, fetch, find, make_published, verify
from .collections import MACEOFF, SPICE, BOTNet, WaterBox
from .md17 import MD17, MD22, RMD17
from .qm9 import QM9

__all__ = [
    "COMP6",
    "DATASETS",
    "MACEOFF",
    "MD17",
    "MD22",
    "QM9",
    "RMD17",
    "SPICE",
    "ANI1x",
    "ANI2x",
    "BOTNet",
    "DownloadFile",
    "Published",
    "WaterBox",
    "make_published",
    "open_published",
]


def open_published(
    name: str,
    root: str | PathLike | None = None,
    download: bool = True,
    say: Callable[[str], None] = print,
    **options: Any,
) -> CachedDataset:
    """Open a published data set; download and convert it on first use.

    Files in ROOT/NAME/raw or ROOT are used; missing ones are downloaded to ROOT/NAME/raw. The converted frames go to
    ROOT/NAME, or to `cache_root()` if that cannot be written, in one folder for each choice of options. After the
    conversion the files may be deleted.

    Args:
        name: one of DATASETS.
        root: folder of data sets; None means `cache_root()`.
        download: False uses existing files only.
        say: function that is called with messages.
        options: arguments of the data set's class, such as molecule="aspirin".

    Raises:
        TypeError: a name, such as that of a molecule, is not a string.
        BadData: a name or option is unknown, or a file is damaged or differs from the published one.
        FileNotFoundError: a file is missing, and `download` is False.
        OSError: a download fails, or the folder cannot be written.
    """
    given = {option: value for option, value in options.items() if value is not None}
    published = make_published(name, given)
    folder = (cache_root() if root is None else Path(root)) / name
    key = [s.file for s in published.sources], {"dataset": name, **_plain(given)}
    converted = cache_folder(*key, folder)
    if not (converted / "index.json").is_file() and not _writable(folder):
        converted = cache_folder(*key, cache_root() / name)
    folders = [folder / "raw", *([] if root is None else [Path(root)])]
    present = [find(source, folders) for source in published.sources]
    if None in present and (converted / "index.json").is_file():
        return CachedDataset(converted)  # the user has deleted the files to save disk space
    sources = zip(present, published.sources, strict=True)
    files = [path or fetch(source, folders[0], download, say) for path, source in sources]

    def readers() -> list[Reader]:
        for path, source in zip(files, published.sources, strict=True):
            if path.name == Path(source.file).name:
                verify(path, source, say)
        say(f"converting {name}: {', '.join(map(str, files))}")
        return [_PublishedReader(name, published, files)]

    return cached(readers, [str(path) for path in files], converted)


def _writable(folder: Path) -> bool:
    """Return True if the folder can be written; its mode must allow it too, which os.access ignores for the
    superuser."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


class _PublishedReader(Reader):
    """Reads a published data set as the source of a cache."""

    def __init__(self, name: str, published: Published, files: Sequence[Path]):
        self.path, self.files = name, [str(file) for file in files]
        self.keys, self.asked = {label: label for label in published.labels}, {}
        self.counts, self.available = Counter(), set(published.labels)
        self._published, self._paths = published, list(files)

    def chunks(self) -> Iterator[Chunk]:
        for chunk in self._published.chunks(self._paths):
            count = chunk.sample.system.num_systems
            self.num_frames += count
            self.counts.update(dict.fromkeys(chunk.sample.labels, count))
            yield chunk
