"""The configuration and data of a run: compared when it is resumed, and between its processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import BadConfig
from ..steps.distributed import Devices

__all__ = ["check_identity", "differences", "require_alike"]

_OWN: tuple[str, ...] = ("config.output.", "config.data.num_workers")
"""Keys that may differ."""


def check_identity(now: dict[str, Any], then: dict[str, Any], folder: Path) -> None:
    """Raise BadConfig if a run would be resumed with another configuration or other data."""
    different = sorted(differences(now, then))
    harmless = (*_OWN, "config.training.max_minutes")  # of this start
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


def require_alike(devices: Devices, mine: dict[str, Any]) -> None:
    """Check that all processes have the same configuration, data and versions.

    Args:
        devices: all processes.
        mine: what this one was started with: "config", "data", "versions" -> key -> value.

    Raises:
        BadConfig: the main process has something else; says what.
        ProcessFailed: another process differs.
    """
    main = json.loads(devices.from_main(json.dumps(mine).encode()))
    with devices.together():
        different = [path for path in differences(mine, main) if not path.startswith(_OWN)]
        if different:
            changes = "; ".join(_change(path, mine, main, "not") for path in different)
            raise BadConfig(f"all processes need the same configuration, data and versions; here, {changes}")


def _change(path: str, now: dict[str, Any], then: dict[str, Any], other: str = "was") -> str:
    """What is different, in words: "training.lr is 0.001, was 0.002"."""
    kind, _, rest = path.partition(".")
    if kind == "data":
        if rest not in then["data"]:
            return f"{rest} is new"
        return f"{rest} was changed" if rest in now["data"] else f"{rest} is not among the data any more"
    values = []
    for value in (now, then):
        found: Any = value[kind]
        for key in rest.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        values.append(found)
    return f"{rest} is {values[0]!r}, {other} {values[1]!r}"


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Dotted paths of what differs between nested dictionaries."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [p for key in keys for p in differences(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))]
    a, b = (list(x) if isinstance(x, tuple) else x for x in (a, b))  # as JSON does
    return [] if a == b else [path]
