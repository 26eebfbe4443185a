"""Downloads that go on where they stopped, and are checked before they are used."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import BadData
from .base import DownloadFile

__all__ = ["fetch", "find", "verify"]

_BLOCK = 2**20


def find(source: DownloadFile, folders: Sequence[Path]) -> Path | None:
    """The file of a source, or one that serves as well, in the first folder that has one; None where none has."""
    paths = (folder / name for folder in folders for name in (source.file, *source.instead))
    return next((path for path in paths if path.is_file()), None)


def fetch(source: DownloadFile, folder: Path, download: bool = True, say: Callable[[str], None] = print) -> Path:
    """The file of a source: the one that is there, or a fresh download.

    What has been received stays in FILE.part, and the next attempt asks for the rest. The file gets its name when it
    is complete and its checksum is right.

    Args:
        source: the file.
        folder: where it is, or goes.
        download: False: do not go to the network.
        say: takes messages.

    Raises:
        FileNotFoundError: it is not there and is not to be downloaded.
        BadData: the download is not what was published; it is removed.
        OSError: the server cannot be reached, or the disk is full.
    """
    path = folder / source.file
    if (present := find(source, [folder])) is not None:
        return present
    if not download:
        raise FileNotFoundError(f"{path} is not there; it comes from {source.url}")
    if not source.url.startswith(("https://", "http://")):
        raise BadData(f"{source.url}: only http and https addresses are downloaded")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = folder / f"{source.file}.part"
    say(f"downloading {source.url}")
    try:
        _receive(source.url, part)
    except OSError as error:
        remedy = f"try again, which goes on where it stopped, or put the file at {path} yourself"
        raise OSError(f"{source.url} cannot be downloaded: {error}; {remedy}") from error
    try:
        verify(part, source, say, shown=path)
    except BadData:
        part.unlink()
        raise
    os.replace(part, path)
    return path


def verify(path: Path, source: DownloadFile, say: Callable[[str], None] = print, shown: Path | None = None) -> None:
    """Compare a file with the published checksum; without one, say what its sha256 is.

    Raises:
        BadData: they differ.
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
            raise BadData(f"{name}: its {kind} is {found[kind]} and should be {expected}: it is not what was published")
    if not source.sha256 and not source.md5:
        say(f"{name}: it cannot be verified, as no checksum of it is known; its sha256 is {found['sha256']}")


def _receive(url: str, part: Path) -> None:
    """Append what is missing to a partial file."""
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
