"""One file out of an archive."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import BadData

__all__ = ["unpacked"]


@contextmanager
def unpacked(path: Path, suffix: str) -> Iterator[Path]:
    """The first file of a tar archive whose name ends so, beside the archive for as long as the block lasts.

    Raises:
        BadData: the archive is damaged, or holds no such file.
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
            raise BadData(f"{path}: there is no {suffix} file in it")
        yield target
