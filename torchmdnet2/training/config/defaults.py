"""Configurations as YAML: every key with its default and its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ...registry import HEADS, PRIORS, REPRESENTATIONS
from ..steps.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from .config import Config
from .schema import Section, section_of

__all__ = ["config_yaml", "default_config_yaml", "section_lines", "yaml_line"]

_COLUMN = 44  # where the comments start


def default_config_yaml(model: str = "tensornet") -> str:
    """A configuration with all keys, their defaults and their meaning; only `data.train` is left to be filled in.

    Args:
        model: whose hyper-parameters are listed.

    Raises:
        KeyError: no such model.
    """
    lines = ["# torchmdnet2 training configuration: every key, its default and its meaning.", ""]
    for name, field in Config.model_fields.items():
        if name == "model":
            lines += ["model:", *section_lines(section_of(REPRESENTATIONS[model]), 1, {"name": model})]
        elif name == "head":
            lines += ["head:", *section_lines(section_of(HEADS["scalar"], ["hidden_channels"]), 1, {"name": "scalar"})]
        elif name == "priors":
            entry = section_lines(section_of(PRIORS["atomref"]), 2, {"name": "atomref", "energies": "auto"})
            entry[0] = entry[0].replace("    name", "  - name", 1)
            entry[1] = yaml_line(
                "    energies: auto",
                "auto (single atoms in data.train, else fit), fit, isolated, a file, {H: -13.6, …} in eV",
            )
            lines += ["priors:  # terms added to the network; [] for none", *entry]
        elif not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            lines.append(yaml_line(f"{name}: {_scalar(field.default)}", field.description))
        else:
            section = field.annotation
            lines += [f"{name}:", *section_lines(section, 1, {"train": "data.xyz"} if name == "data" else {})]
        lines.append("")
    return "\n".join(lines)


def config_yaml(config: Config) -> str:
    """A configuration as YAML, all defaults filled in; reads back as the same configuration."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def section_lines(section: type[BaseModel], depth: int, given: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        indent = "  " * depth
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += [f"{indent}{name}:", *section_lines(kind, depth + 1, {})]
            continue
        if name == "optimizer":
            settings, own = section_of(OPTIMIZERS[DEFAULT_OPTIMIZER], ["params"]), {"name": DEFAULT_OPTIMIZER}
            lines += [yaml_line(f"{indent}{name}:", field.description), *section_lines(settings, depth + 1, own)]
            continue
        default = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
        value = given.get(name, None if default is PydanticUndefined else default)
        lines.append(yaml_line(f"{indent}{name}: {_scalar(value)}", field.description))
    return lines


def yaml_line(text: str, description: str | None) -> str:
    return f"{text:<{_COLUMN}}# {description}" if description else text


def _scalar(value: Any) -> str:
    """One value as YAML on one line."""
    if isinstance(value, float):
        return repr(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
