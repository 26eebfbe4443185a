"""The folder of a run: what may be written there, and whether a run can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ...core.files import locked, same_file
from ...data import data_files
from ...errors import BadConfig, BadData
from ...potentials import find_model
from ..config.config import Config
from ..config.sections import DataConfig, SourceConfig
from ..steps.distributed import Devices
from ..steps.trainer import load_state
from .references import atom_files

__all__ = [
    "BEST", "DONE", "HEADER", "SPLITS", "STATE", "check_identity", "clear", "differences", "exclusive_folder",
    "prepare", "protect_config", "protect_inputs", "require_alike", "require_same_splits", "splits_digest",
]  # fmt: skip


_OWN: tuple[str, ...] = ("config.output.", "config.data.num_workers")
"""Keys that may differ when a run is resumed."""


def check_identity(now: dict[str, Any], then: dict[str, Any], folder: Path) -> None:
    """Raise BadConfig if a run would be resumed with another configuration or other data."""
    different = sorted(differences(now, then))
    harmless = (*_OWN, "config.training.max_minutes", "splits")  # of this start; follow from the others
    training = now["config"]["training"]
    # what depends on the number of epochs
    if training["lr_schedule"] != "cosine" and not training.get("swa") and not training["loss"].get("schedule"):
        harmless += ("config.training.max_epochs", "config.training.early_stopping_patience")
    different = [path for path in different if not path.startswith(harmless)]
    if different:
        changes = "; ".join(_change(path, now, then) for path in different)
        raise BadConfig(
            f"{folder} holds a run of another configuration or other data: {changes}. Resume it unchanged, or choose "
            "another output.folder"
        )


def splits_digest(splits: Any) -> str:
    """Return the SHA-256 of the content of a splits.json, whatever its layout."""
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()


def require_same_splits(folder: Path) -> None:
    """Raise BadConfig when splits.json of the run in the folder is gone or was edited: the run does not read it."""
    path, written = folder / SPLITS, load_state(folder / STATE)[1]["identity"].get("splits")
    try:
        same = written in (None, splits_digest(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, RecursionError):
        same = False
    if not same:
        raise BadConfig(
            f"{path} is gone or was edited since this run wrote it, and the run trains on the frames of the original: "
            "restore it; to train on other frames, give a file as data.split.file and choose another output.folder"
        )


def require_alike(devices: Devices, mine: dict[str, Any]) -> None:
    """Check that all processes have the same configuration, data and versions.

    Args:
        devices: all processes.
        mine: settings of this process: "config", "data", "versions" -> key -> value.

    Raises:
        BadConfig: the main process differs; names the difference.
        ProcessFailed: another process differs.
    """
    main = json.loads(devices.from_main(json.dumps(mine).encode()))
    with devices.together():
        different = [path for path in differences(mine, main) if not path.startswith(_OWN)]
        if different:
            changes = "; ".join(_change(path, mine, main, "not") for path in different)
            raise BadConfig(f"all processes need the same configuration, data and versions; here, {changes}")


def _change(path: str, now: dict[str, Any], then: dict[str, Any], other: str = "was") -> str:
    """Return a difference in words: "training.lr is 0.001, was 0.002"."""
    kind, _, rest = path.partition(".")
    if kind == "data":
        if rest not in then["data"]:
            return f"{rest} is new"
        return f"{rest} was changed" if rest in now["data"] else f"{rest} is no longer among the data"
    values = []
    for value in (now, then):
        found: Any = value[kind]
        for key in rest.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        values.append(found)
    return f"{rest} is {values[0]!r}, {other} {values[1]!r}"


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return dotted paths of the differences between nested dictionaries."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [p for key in keys for p in differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))]
    a, b = (list(x) if isinstance(x, tuple) else x for x in (a, b))  # as JSON does
    return [] if a == b else [path]


# --- The folder of a run: checks before it is written to, and a lock against other processes ---

STATE, BEST, DONE, SPLITS = "state.safetensors", "best.tmn", "metrics.json", "splits.json"
HEADER = "# The configuration of this run, with all defaults.\n"
"""The first line of a run's config.yaml; a file without it was not written by a training."""

_REPLACED = (STATE, BEST, DONE, "config.yaml", SPLITS, "log.txt", "metrics.csv", "metrics.jsonl")
_REPORT = ("card.md", "report.html", "outliers.xyz")
_PICTURE = r"(learning_curve|errors_by_element|[\w:]+_parity)(_\d+)?\.png"
_PATIENCE = 10.0
"""Seconds: data-loading processes of a killed training hold its lock for a moment."""


def prepare(folder: Path, config: Config, resume: str | None) -> bool:
    """Return whether a run in the folder will be continued; changes nothing.

    Raises:
        BadConfig: a training must not, or cannot, write there.
    """
    state, done = folder / STATE, folder / DONE
    if resume is not None and state.is_file() and not (config.output.overwrite and done.is_file()):
        if done.is_file():
            check_identity({"config": config.to_dict()}, {"config": load_state(state)[1]["identity"]["config"]}, folder)
        return True
    if resume == "must":
        raise BadConfig(f"output.folder: {folder} holds no run to resume")
    if (folder / "ensemble.json").is_file():
        raise BadConfig(
            f"output.folder: {folder} holds an ensemble; continue it with --members, or choose another folder"
        )
    if done.is_file() and not config.output.overwrite:
        raise BadConfig(
            f"output.folder: {folder} holds a finished run; choose another folder, or set output.overwrite=true"
        )
    if state.is_file() and not config.output.overwrite:
        raise BadConfig(
            f"output.folder: {folder} holds an unfinished run; continue it with --resume auto, choose another folder, "
            "or set output.overwrite=true"
        )
    foreign = [name for name in (*_REPLACED, *_REPORT) if (folder / name).exists()]
    if foreign and not _of_a_run(folder) and not config.output.overwrite:
        raise BadConfig(
            f"output.folder: {folder} holds {foreign[0]}, which was not written by a training and would be "
            "overwritten; choose another folder, or set output.overwrite=true"
        )
    protect_inputs(folder, (*_REPLACED, *_REPORT, *(path.name for path in folder.glob("epoch_*.tmn"))), config)
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = "cannot be written to" if above.is_dir() else "is a file"
        raise BadConfig(f"output.folder: {above} {problem}; choose another folder")
    return False


def protect_inputs(folder: Path, names: Iterable[str], config: Config) -> None:
    """Refuse to overwrite input files of the training.

    Args:
        folder: the folder of the run.
        names: of the files that it replaces there.
        config: of the run.

    Raises:
        BadConfig: one of them is data, a split or a model that the configuration names.
    """
    written = [folder / name for name in names]
    for key, file in _inputs(config):
        if any(same_file(path, Path(file)) for path in written):
            raise BadConfig(
                f"{key}: {file} is in output.folder, where this training replaces it; choose another folder"
            )


def protect_config(folder: Path, path: str | os.PathLike) -> None:
    """Refuse to replace the configuration file itself, unless it is config.yaml of an earlier run in the folder.

    Raises:
        BadConfig: a new run in the folder would.
    """
    for name in (*_REPLACED, *_REPORT):
        if same_file(folder / name, Path(path)) and not _of_a_run(folder):
            raise BadConfig(f"output.folder: {path} is in it, where this training replaces it; choose another folder")


def clear(folder: Path) -> None:
    """Remove the files of an earlier run; its state first, so that a half-removed run cannot be resumed.

    Its report and pictures come next, while other files say that they are of a run: foreign ones stay.
    """
    pictures = [path.name for path in folder.glob("*.png") if re.fullmatch(_PICTURE, path.name)]
    report = (*_REPORT, *pictures) if _of_a_run(folder) else ()
    for name in (STATE, *report, *_REPLACED, *(path.name for path in folder.glob("epoch_*.tmn"))):
        (folder / name).unlink(missing_ok=True)


def _of_a_run(folder: Path) -> bool:
    """Return whether the content of the folder was written by a training."""
    if (folder / STATE).is_file() or (folder / DONE).is_file():
        return True
    with suppress(OSError, UnicodeDecodeError):
        return (folder / "config.yaml").read_text(encoding="utf-8").startswith(HEADER)
    return False


def _inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield key and path of the files that the training reads."""
    data = config.data
    sources: dict[str, DataConfig | SourceConfig] = {"data": data}
    sources.update({f"data.sources.{k}": source for k, source in enumerate(data.sources or ())})
    for where, source in sources.items():
        for key, given in (("train", source.train), ("validation", source.validation), ("test", source.test)):
            with suppress(FileNotFoundError, BadData):  # which is said when they are opened
                for file in data_files([given] if isinstance(given, str) else given or [], source.format):
                    yield f"{where}.{key}", file
    if data.split.file is not None:
        yield "data.split.file", data.split.file
    for file in atom_files(config):
        yield "priors: atomref.energies", file
    if config.init is not None:
        yield "init.file", str(find_model(config.init.file))
        if config.init.replay is not None:
            yield "init.replay", config.init.replay
    for k, prior in enumerate(config.priors):
        if "file" in prior:
            yield f"priors.{k}.file", prior["file"]


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Make the folder, and let no other process train in it within the block. The end of the process frees it.

    Raises:
        BadConfig: another process does, or the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"output.folder: {folder} cannot be made: {error.strerror}") from error
    with ExitStack() as held:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                held.enter_context(locked(folder / STATE))
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise BadConfig(
                        f"output.folder: another process trains in {folder}; wait for it, or choose another folder"
                    ) from None
            except OSError as error:
                raise BadConfig(f"output.folder: {folder}: {error.strerror}; choose another folder") from error
            time.sleep(0.1)
        _sweep(folder)
        yield


def _sweep(folder: Path) -> None:
    """Remove incomplete files of a killed process; `atomic_write` gives them such names."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\.(\w+\.(safetensors|tmn|json|jsonl|csv|yaml|md|html|png|xyz))\.[a-z0-9_]{8}", path.name):
            with suppress(OSError):
                path.unlink()
