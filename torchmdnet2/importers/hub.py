"""Downloads from the Hugging Face hub, by the optional package huggingface_hub.

Files are copied and compared with their checksums. They are never run.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.files import written_aside
from ..errors import BadConfig, BadData, MissingBackend

__all__ = ["HubFile", "HubModel", "download", "look_up"]

_BY_HAND = "download the file in a browser, and give it to `torchmdnet2 import`"


@dataclass(frozen=True)
class HubFile:
    """A file of a model on the hub.

    Attributes:
        name: path of the file on the hub.
        size: number of bytes.
        checksum: hexadecimal. SHA-256 of a large file; of others the one that git uses, the SHA-1 of "blob", size and
            content.
    """

    name: str
    size: int
    checksum: str

    def matches(self, path: Path) -> bool:
        """Return whether a local file has this content."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        large = len(self.checksum) == 64
        known = hashlib.sha256() if large else hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                known.update(part)
        return known.hexdigest() == self.checksum


@dataclass(frozen=True)
class HubModel:
    """A model on the hub, at one commit.

    Attributes:
        name: ACCOUNT/MODEL.
        commit: the commit that `revision` named at the time of the look-up.
        licence: the licence on the model's card, or "not stated".
        files: the files, by name.
    """

    name: str
    commit: str
    licence: str
    files: Sequence[HubFile]

    def file(self, name: str) -> HubFile:
        """Return the file of this name.

        Raises:
            BadConfig: the model has no such file.
        """
        for file in self.files:
            if file.name == name:
                return file
        raise BadConfig(f"{self.name} has no file '{name}'; it has {', '.join(file.name for file in self.files)}")


def look_up(name: str, revision: str | None = None) -> HubModel:
    """Return the hub's description of a model; no file is downloaded.

    Args:
        name: ACCOUNT/MODEL.
        revision: branch, tag or commit; None takes the newest.

    Raises:
        MissingBackend: huggingface_hub is not installed.
        BadConfig: the name does not have this form.
        BadData: the model or revision does not exist or is not public, or the hub cannot be reached.
    """
    hub = _package()
    try:
        found = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # huggingface_hub passes on errors of the packages that it uses
        raise _explained(name, error) from error
    licence = getattr(found.card_data, "license", None)
    files = [
        HubFile(s.rfilename, s.size, s.lfs.sha256 if s.lfs else s.blob_id)
        for s in found.siblings or []
        if not s.rfilename.startswith(".")
    ]
    return HubModel(name, found.sha, str(licence or "not stated"), sorted(files, key=lambda file: file.name))


def download(model: HubModel, name: str, folder: Path) -> Path:
    """Copy a file of a model into a folder, under the last part of its name, and compare its checksum.

    An existing file with the same content stays; one with other content is renamed to FILE.old.

    Args:
        model: the model, from `look_up`.
        name: path of the file on the hub.
        folder: an existing folder.

    Returns:
        The path of the copy.

    Raises:
        BadData: the checksum of the copy is not the one that the hub states; and the errors of `look_up`.
    """
    file, target = model.file(name), folder / Path(name).name
    if file.matches(target):
        return target
    try:
        cached = Path(_package().hf_hub_download(model.name, name, revision=model.commit))
    except Exception as error:
        raise _explained(model.name, error) from error
    if not file.matches(cached):
        raise BadData(f"{name} of {model.name}: its checksum is not {file.checksum}; delete {cached} and try again")
    with cached.open("rb") as content, written_aside(target, keep=True) as copy:
        shutil.copyfileobj(content, copy)
    return target


def _package() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingBackend(
            f"the hub needs the package huggingface_hub: pip install 'torchmdnet2[hub]'; or {_BY_HAND}"
        ) from error
    return huggingface_hub


def _explained(name: str, error: Exception) -> Exception:
    """Return an error of huggingface_hub with its reason and the remedy."""
    reasons = {
        "HFValidationError": BadConfig(f"'{name}' is not the name of a model on the hub: write ACCOUNT/MODEL"),
        "GatedRepoError": BadData(f"{name} asks you to accept its terms: do so on its page, then run `hf auth login`"),
        "RepositoryNotFoundError": BadData(f"the hub has no model '{name}'; if it is private, run `hf auth login`"),
        "RevisionNotFoundError": BadData(f"{name} has no such revision"),
    }
    if type(error).__name__ in reasons:
        return reasons[type(error).__name__]
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return BadData(f"{name}: the hub cannot be reached ({reason[0]}); {_BY_HAND}")
