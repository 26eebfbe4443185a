"""Base class and registry of published data sets; download and checksums."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import BadData
from ...registry import did_you_mean
from ...system import System
from ..check import check_batch
from ..dataset import Sample, select
from ..labels import LABELS
from ..reader import Chunk

__all__ = [
    "DATASETS", "DownloadFile", "Published", "fetch", "find", "frames", "make_published", "register", "unpacked",
    "verify", "without_strong_forces",
]  # fmt: skip


@dataclass(frozen=True)
class DownloadFile:
    """A file to download.

    Attributes:
        url: address of the file.
        file: its local name, with its folder.
        sha256: its SHA-256, or the first digits of it; "" if unknown.
        md5: its MD5, likewise.
        instead: names of local files that are used instead if they exist.
    """

    url: str
    file: str
    sha256: str = ""
    md5: str = ""
    instead: tuple[str, ...] = ()


class Published(ABC):
    """Base class of a published data set: its files, their conversion, its citation and licence.

    The arguments of a subclass are the options that the user may give.

    Attributes:
        citation, licence, level_of_theory: texts for the log and the model card.
        reference_energies: atomic number -> published energy in eV. If empty, fit them (`priors: atomref`, `fit`).
        labels: names of the labels of its frames.
        sources: the files to download.
        subset_names: subsets that a configuration may name for validation and test, besides the option `subsets`.
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
        """Yield all frames in the package's units.

        Args:
            files: local files of `sources`, in order.

        Raises:
            BadData: a file is damaged, or not a file of this data set.
        """


DATASETS: dict[str, type[Published]] = {}
"""Name -> class of a published data set."""


def register(name: str):  # type: ignore[no-untyped-def]
    """Class decorator: register a data set under a name."""

    def decorate(cls: type[Published]) -> type[Published]:
        DATASETS[name] = cls
        return cls

    return decorate


def make_published(name: str, options: Mapping[str, Any]) -> Published:
    """Return a data set by its name.

    Raises:
        TypeError: a name, such as that of a molecule, is not a string.
        BadData: the name is unknown, or the data set does not have an option or value.
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
    """Return the value if it is one of the known values.

    Raises:
        TypeError: the value is not a string.
        BadData: the value is unknown.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a text, got {value}")
    if value not in known:
        raise BadData(f"{what}: there is no '{value}'{did_you_mean(value, known) or '.'} Known: {', '.join(known)}")
    return value


def frames(
    where: str, first: int, z: np.ndarray, pos: np.ndarray, labels: Mapping[str, np.ndarray], charge: float = 0.0
) -> Chunk:
    """Return frames of one molecule, or of molecules of one size, as a checked chunk.

    Args:
        where, first: name of the source and number of the first frame, as in a `Chunk`.
        z: [N] or [S, N] atomic numbers.
        pos: [S, N, 3] positions in Å.
        labels: name -> values with one row per frame, in the package's units.
        charge: total charge of each molecule in e.

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
            raise BadData(f"{where}: {name} of the shape {np.shape(values)} does not fit {count} frames of {size}")
        shaped[name] = torch.from_numpy(np.array(values, dtype=np.float64).reshape(shape))
    return Chunk(check_batch(Sample(system, shaped), where, first), where, first)


def without_strong_forces(chunks: Iterator[Chunk], most: float | None) -> Iterator[Chunk]:
    """Yield chunks without the frames in which the force on an atom is above `most`, in eV/Å."""
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


# --- One file out of an archive ---


@contextmanager
def unpacked(path: Path, suffix: str) -> Iterator[Path]:
    """Unpack the first file with this suffix beside its tar archive; it is deleted when the block ends.

    Raises:
        BadData: the archive is damaged, or has no such file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / f"content{suffix}"
        try:
            with tarfile.open(path, "r|*") as archive:
                for member in archive:
                    if member.isfile() and member.name.endswith(suffix):
                        content = archive.extractfile(member)
                        assert content is not None
                        with open(target, "wb") as file:
                            shutil.copyfileobj(content, file)
                        break
        except (tarfile.TarError, EOFError, OSError) as error:
            raise BadData(f"{path}: it is damaged: {error}") from error
        if not target.exists():
            raise BadData(f"{path}: the archive has no {suffix} file")
        yield target


# --- Downloads, which continue where they stopped and are checked before they are used ---

_BLOCK = 2**20


def find(source: DownloadFile, folders: Sequence[Path]) -> Path | None:
    """Return the file of a source, or an equivalent one, in the first folder that has it; else None."""
    paths = (folder / name for folder in folders for name in (source.file, *source.instead))
    return next((path for path in paths if path.is_file()), None)


def fetch(source: DownloadFile, folder: Path, download: bool = True, say: Callable[[str], None] = print) -> Path:
    """Return the file of a source: an existing one, or a new download.

    After an interruption the received part stays in FILE.part, and the next attempt requests the rest. The file gets
    its name when it is complete and its checksum is right.

    Args:
        source: the file.
        folder: folder of the file.
        download: False does not use the network.
        say: function that is called with messages.

    Raises:
        FileNotFoundError: the file is missing, and `download` is False.
        BadData: the download differs from the published file; it is removed.
        OSError: the server cannot be reached, or the disk is full.
    """
    path = folder / source.file
    if (present := find(source, [folder])) is not None:
        return present
    if not download:
        raise FileNotFoundError(f"{path} does not exist; it can be downloaded from {source.url}")
    if not source.url.startswith(("https://", "http://")):
        raise BadData(f"{source.url}: only http and https addresses are downloaded")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = folder / f"{source.file}.part"
    say(f"downloading {source.url}")
    try:
        _receive(source.url, part)
    except OSError as error:
        remedy = f"try again, which continues the download, or put the file at {path}"
        raise OSError(f"{source.url} cannot be downloaded: {error}; {remedy}") from error
    try:
        verify(part, source, say, shown=path)
    except BadData:
        part.unlink()
        raise
    os.replace(part, path)
    return path


def verify(path: Path, source: DownloadFile, say: Callable[[str], None] = print, shown: Path | None = None) -> None:
    """Compare a file with the published checksum; without one, report its SHA-256.

    Raises:
        BadData: the checksums differ.
    """
    name = shown or path
    digests = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            for digest in digests.values():
                digest.update(block)
    found = {kind: digest.hexdigest() for kind, digest in digests.items()}
    for kind, expected in (("sha256", source.sha256), ("md5", source.md5)):
        if expected and not found[kind].startswith(expected):
            raise BadData(
                f"{name}: its {kind} is {found[kind]} and should be {expected}: the file differs from the published one"
            )
    if not source.sha256 and not source.md5:
        say(f"{name}: the file cannot be verified, because no checksum is published; its sha256 is {found['sha256']}")


def _receive(url: str, part: Path) -> None:
    """Download the missing part of a file and append it."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "torchmdnet2", **({"Range": f"bytes={have}-"} if have else {})}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (http and https only, see fetch)
    try:
        answer = urllib.request.urlopen(request, timeout=60)  # noqa: S310
    except urllib.error.HTTPError as error:
        if have and error.code == 416:  # nothing is missing
            return
        raise
    with answer, open(part, "ab") as file:
        if answer.status != 206:  # the server sends everything again
            file.truncate(0)
            have = 0
        expected = answer.headers.get("Content-Length")
        received = 0
        while block := answer.read(_BLOCK):
            file.write(block)
            received += len(block)
        file.flush()
        os.fsync(file.fileno())
    if expected is not None and received != int(expected):
        raise OSError(f"the connection broke off after {have + received} of {have + int(expected)} bytes")
