"""The configuration of active learning as YAML: every key with its default and its description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ..training.config.defaults import section_lines, yaml_line
from ..training.config.schema import section_of
from .config import LearnConfig
from .labellers import LABELLERS
from .selection import SELECTIONS

__all__ = ["default_learn_yaml"]


def default_learn_yaml() -> str:
    """A configuration with all keys, their defaults and their meaning; only `start.file` is left to be filled in.

    Other labellers, and the arguments of each, are listed at the end as comments.
    """
    lines = ["# torchmdnet2 learn: every key, its default and its meaning.", ""]
    for name, field in LearnConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            own = section_lines(kind, 1, {"file": "frames.xyz"} if name == "start" else {})
            lines += [f"{name}:", *own, ""]
        elif name == "selection":
            lines += [yaml_line("selection:", field.description), *_choice(SELECTIONS["disagreement"], "disagreement")]
            lines += [yaml_line("  # name: random", "to compare with; has no other keys"), ""]
        else:
            default: Any = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
            value = default if isinstance(default, int | float | str) else "{}"
            lines.append(yaml_line(f"{name}: {value}", field.description))
    lines += ["", "# Arguments of labels.labeller by its name:"]
    for name in LABELLERS:
        lines += ["#", *(f"#{line}" for line in _choice(LABELLERS[name], name))]
    return "\n".join(lines)


def _choice(cls: type, name: str) -> list[str]:
    return section_lines(section_of(cls), 1, {"name": name})
