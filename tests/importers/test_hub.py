"""Files from the hub, with a package of the tests in the place of huggingface_hub."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmdnet2.cli import main
from torchmdnet2.errors import BadConfig, BadData, MissingBackend
from torchmdnet2.importers.hub import download, look_up

CONTENTS = {"model.ckpt": b"weights" * 1000, "config.json": b"{}\n", "old/model.ckpt": b"older"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class RepositoryNotFoundError(Exception):
    pass


@dataclass
class Hub:
    """As much of huggingface_hub as is used; `served` is what a download brings."""

    cache: Path
    served: dict[str, bytes] = field(default_factory=lambda: dict(CONTENTS))
    licence: str | None = "apache-2.0"
    downloads: list[tuple[str, str, str]] = field(default_factory=list)

    def HfApi(self) -> Hub:
        return self

    def model_info(self, name: str, revision: str | None = None, files_metadata: bool = False) -> SimpleNamespace:
        assert files_metadata
        if name == "someone/none":
            raise RepositoryNotFoundError("404 Client Error\nmore")
        if name == "someone/far":
            raise ConnectionError("[Errno -2] Name or service not known")
        siblings = [SimpleNamespace(rfilename=".gitattributes", size=5, blob_id="0" * 40, lfs=None)]
        for file, content in CONTENTS.items():
            git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if file == "model.ckpt" else None
            siblings.append(SimpleNamespace(rfilename=file, size=len(content), blob_id=git, lfs=lfs))
        card = None if self.licence is None else SimpleNamespace(license=self.licence)
        return SimpleNamespace(sha=revision or COMMIT, card_data=card, siblings=siblings)

    def hf_hub_download(self, name: str, file: str, revision: str) -> str:
        self.downloads.append((name, file, revision))
        path = self.cache / file.replace("/", "-")
        path.write_bytes(self.served[file])
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    cache = tmp_path / "cache"
    cache.mkdir()
    found = Hub(cache)
    monkeypatch.setitem(sys.modules, "huggingface_hub", found)
    return found


def test_files_are_listed_with_the_licence(hub: Hub, capsys: pytest.CaptureFixture) -> None:
    assert main(["fetch", "someone/model"]) == 0
    out = capsys.readouterr().out
    assert f"someone/model at {COMMIT}" in out and "licence: apache-2.0" in out
    assert "model.ckpt" in out and ".gitattributes" not in out and not hub.downloads
    hub.licence = None
    assert look_up("someone/model").licence == "not stated"


def test_files_are_copied_and_compared(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A large file by its sha256, a small one by git's checksum; at the commit that was looked up."""
    (tmp_path / "model.ckpt").write_bytes(b"mine")
    command = ["fetch", "someone/model", "model.ckpt", "config.json", "--output", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    for name in ("model.ckpt", "config.json"):
        assert (tmp_path / name).read_bytes() == CONTENTS[name]
    assert (tmp_path / "model.ckpt.old").read_bytes() == b"mine"
    assert hashlib.sha256(CONTENTS["model.ckpt"]).hexdigest() in out
    assert f"torchmdnet2 import {tmp_path / 'model.ckpt'} NAME.tmn" in out
    assert [revision for *_, revision in hub.downloads] == [COMMIT] * 2
    assert main(command) == 0 and len(hub.downloads) == 2, "what is there is not downloaded again"


def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    model = look_up("someone/model", "v2")
    assert download(model, "old/model.ckpt", tmp_path) == tmp_path / "model.ckpt"
    assert hub.downloads == [("someone/model", "old/model.ckpt", "v2")]


@pytest.mark.parametrize("name", ["model.ckpt", "config.json"])
def test_another_content_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.served[name] = CONTENTS[name][:-1] + b"?"  # as long as announced
    with pytest.raises(BadData, match="its checksum is not"):
        download(look_up("someone/model"), name, tmp_path)
    assert not (tmp_path / name).exists()


def test_what_cannot_be_had(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadData, match="no model 'someone/none'"):
        look_up("someone/none")
    with pytest.raises(BadData, match=r"cannot be reached .*not known\); download the file in a browser"):
        look_up("someone/far")
    with pytest.raises(BadConfig, match=r"has no file 'other.ckpt'; it has config.json, model.ckpt"):
        download(look_up("someone/model"), "other.ckpt", tmp_path)
    assert main(["fetch", "someone/model", "config.json", "--output", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["fetch", "someone/model", "model.ckpt", "old/model.ckpt", "--output", str(tmp_path)]) == 2
    assert "have the same name" in capsys.readouterr().err and not hub.downloads


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            "HFValidationError",
            BadConfig,
            "'someone/model' is not the name of a model on the hub",
        ),
        ("GatedRepoError", BadData, "asks you to accept its terms"),
        ("RevisionNotFoundError", BadData, "has no such revision"),
        ("TimeoutError", BadData, r"the hub cannot be reached \(TimeoutError\)"),
    ],
)
def test_errors_of_the_hub_in_words(hub: Hub, tmp_path: Path, monkeypatch, error, kind, words) -> None:
    """At the look-up and at the download, which ends a moment later."""
    model = look_up("someone/model")

    def fail(*_, **__):
        raise type(error, (Exception,), {})

    for method in ("model_info", "hf_hub_download"):
        monkeypatch.setattr(Hub, method, fail)
    for attempt in (lambda: look_up("someone/model"), lambda: download(model, "config.json", tmp_path)):
        with pytest.raises(kind, match=words):
            attempt()


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingBackend, match=r"pip install 'torchmdnet2\[hub\]'"):
        look_up("someone/model")
