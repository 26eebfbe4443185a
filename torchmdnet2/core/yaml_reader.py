"""Reading configuration files: plain YAML data, nothing that can execute, no key given twice.

Rules of YAML 1.1 that surprise people do not apply: `1e-3` is a number here (YAML 1.1 wants `1.0e-3`), only `true` and
`false` are booleans (`no`, `on` and the like stay strings), and whole numbers are decimal (`010` is not 8, nor `1:30`
90).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..errors import BadConfig

__all__ = ["apply_override", "parse_yaml", "read_config", "read_text"]


class _PlainLoader(yaml.SafeLoader):
    """yaml.SafeLoader that rejects duplicate keys and reads numbers and booleans as YAML 1.2 does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (a table that SafeLoader defines the same way)
        first: [
            (tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":int", ":float", ":timestamp"))
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise BadConfig(f"line {key_node.start_mark.line + 1}: a key must be a word, got {key!r}")
            if key in first_lines:
                raise BadConfig(
                    f"line {key_node.start_mark.line + 1}: '{key}' is given twice (first in line {first_lines[key]})"
                )
            first_lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"
)
_PlainLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9]\d*)$"), list("-+0123456789"))
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN))$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str, source: str = "configuration") -> Any:
    """Return plain data (dictionaries, lists, strings, numbers, booleans, None) from YAML text.

    Args:
        text: YAML; tags that name Python objects are refused.
        source: named in errors.

    Raises:
        BadConfig: not YAML, or a key is given twice.
    """
    loader = _PlainLoader(text)
    try:
        return loader.get_single_data()
    except BadConfig as error:
        raise BadConfig(f"{source}: {error}") from None
    except RecursionError:
        raise BadConfig(f"{source}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise BadConfig(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def apply_override(raw: Any, override: str) -> None:
    """Set one value in nested dictionaries and lists; missing sections are made, wrong ones found by validation.

    Args:
        raw: as read from YAML; changed.
        override: "dotted.key=value"; a number addresses an entry of a list.

    Raises:
        BadConfig: not of this form, or there is no such section.
    """
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise BadConfig(f"'{override}': write an override as section.key=value, for example training.lr=1e-3")
    *parents, last = path.split(".")
    node = raw
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise BadConfig(f"'{override}': there is no section '{part}' to set a value in")
    value = parse_yaml(text, f"'{override}'")
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise BadConfig(f"'{override}': '{last}' is not a key that can be set")


def read_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Any:
    """Return plain data of a configuration file, not checked further.

    Args:
        path: YAML.
        overrides: "dotted.key=value" each, the value being YAML; a number addresses an entry of a list.

    Raises:
        FileNotFoundError: there is no such file.
        BadConfig: not YAML, or an override that does not fit.
    """
    raw = parse_yaml(read_text(path), str(path))
    raw = {} if raw is None else raw
    for override in overrides:
        apply_override(raw, override)
    return raw


def read_text(path: str | os.PathLike) -> str:
    """Return the text of a configuration file.

    Args:
        path: YAML.

    Raises:
        FileNotFoundError: there is no such file.
        BadConfig: it is a folder, or a file of another kind.
    """
    file = Path(path)
    if file.is_dir():
        raise BadConfig(f"{path} is a folder; name a configuration file in it")
    if file.suffix == ".tmn":
        raise BadConfig(
            f"{path} is a model file, and a configuration (YAML) is needed here; the line `init: {path}` in one of "
            "`torchmdnet2 train` starts from this model"
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"{path}: no such configuration file; `torchmdnet2 config --help` says how to print one"
        )
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path}: not a text file, and a configuration (YAML) is needed here") from error
