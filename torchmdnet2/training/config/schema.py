"""Sections of a configuration: strict pydantic models, also derived from the signatures of registered classes.

A section checks keys, types and ranges. The error for an unknown key names the closest known one.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from ...errors import BadConfig
from ...registry import OF_PLUGINS, Registry

__all__ = ["Section", "closest", "first_error", "homes", "section_of", "validate_choice"]


class Section(BaseModel):
    """One section of the YAML: no unknown keys, no silent conversion of types, unchangeable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, value: Any) -> Any:
        """Reject keys that the section does not have, naming the closest one that it has."""
        if isinstance(value, Mapping):
            unknown = [str(key) for key in value if key not in cls.model_fields]
            if unknown:
                raise PydanticCustomError(
                    "unknown_keys", "unknown keys", {"unknown": unknown, "known": list(cls.model_fields)}
                )
        return value


# Ranges by the name of the argument, wherever a model, head or prior has one of this name.
_RANGES: dict[str, Any] = {
    "hidden_channels": Field(ge=1),
    "num_layers": Field(ge=0),
    "num_hidden_layers": Field(ge=0),
    "num_rbf": Field(ge=2),
    "num_heads": Field(ge=1),
    "cutoff": Field(gt=0, allow_inf_nan=False),
    "cutoff_lower": Field(ge=0, allow_inf_nan=False),
    "max_z": Field(ge=2),
}


def section_of(cls: type, leave_out: Iterable[str] = ()) -> type[Section]:
    """Return the section whose keys are the arguments of a class, with a `name` key in front.

    Args:
        cls: a registered class; its type hints become the types, its defaults the defaults, its docstring's `Args:`
            the descriptions, and those of its bases.
        leave_out: arguments that are not keys.
    """
    return _section_of(cls, tuple(leave_out))


@lru_cache(maxsize=256)  # a configuration asks a dozen times
def _section_of(cls: type, leave_out: tuple[str, ...]) -> type[Section]:
    hints = typing.get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        texts |= argument_descriptions(each.__doc__ or "")
    fields: dict[str, Any] = {"name": (str, ...)}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.name in leave_out or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = hints.get(parameter.name, Any)
        if parameter.name in _RANGES:
            kind = Annotated[kind, _RANGES[parameter.name]]
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (kind, Field(default, description=texts.get(parameter.name)))
    return create_model(cls.__name__, __base__=Section, **fields)


def argument_descriptions(docstring: str) -> dict[str, str]:
    """Return the texts of the `Args:` block of a docstring, by argument."""
    block = re.search(r"\n\s*Args:\n(.*?)(?:\n\s*\n|\Z)", docstring + "\n", re.DOTALL)
    if block is None:
        return {}
    found: dict[str, str] = {}
    entries = re.split(r"\n(?=\s*[\w, ]+: )", "\n" + inspect.cleandoc(block[1]))
    for entry in entries:
        names, _, text = " ".join(entry.split()).partition(": ")
        found.update({name.strip(): text for name in names.split(",") if name.strip()})
    return found


def validate_choice(
    value: Any, registry: Registry, default: str | None, leave_out: Iterable[str] = ()
) -> dict[str, Any]:
    """Check {"name": …, arguments} against the class that is registered under this name, and fill in the defaults.

    Raises:
        PydanticCustomError, ValidationError: for pydantic to report at the section's path.
    """
    if not isinstance(value, Mapping):
        raise PydanticCustomError("section", "should be a section with a 'name' key")
    name = value.get("name", default)
    if name is None:
        raise PydanticCustomError("unknown_keys", "", {"unknown": [str(k) for k in value][:1], "known": ["name"]})
    try:
        cls = registry[name]
    except (KeyError, TypeError):
        hint = closest(str(name), registry)
        known = ", ".join(registry)
        text = f"unknown {registry.kind} '{name}'{hint} (known: {known}; {OF_PLUGINS})"
        raise PydanticCustomError("unknown_name", "{text}", {"text": text}) from None
    return section_of(cls, leave_out).model_validate({"name": name, **value}).model_dump()


def closest(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest of the known names; lenient, since keys can be as short as `lr`."""
    known = list(known)
    near = [word for word in known if edits(name.lower(), word) == 1]
    match = near or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return f", did you mean '{match[0]}'?" if match else ""


def edits(a: str, b: str) -> int:
    """Return the edit distance: letters to add, remove, replace, or exchange with the next one to turn `a` into `b`."""
    above: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, above, row = above, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
    return row[-1]


def homes(section: type[BaseModel], path: str = "") -> dict[str, list[str]]:
    """Return key -> dotted paths of the sections within this one that have it."""
    found: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        found.setdefault(name, []).append(path)
        kinds = (field.annotation, *typing.get_args(field.annotation))  # `S`, `S | None`, `list[S] | None`
        for kind in (*kinds, *(inner for outer in kinds for inner in typing.get_args(outer))):
            if isinstance(kind, type) and issubclass(kind, Section):
                for key, paths in homes(kind, f"{path}.{name}".lstrip(".")).items():
                    found.setdefault(key, []).extend(paths)
    return found


def first_error(error: ValidationError, source: str, elsewhere: Mapping[str, list[str]] | None = None) -> BadConfig:
    """Return all findings of a validation as one BadConfig, one line each: dotted path, what is wrong, what was given.

    Args:
        error: of pydantic.
        source: named first.
        elsewhere: key -> sections that have it, for keys in a wrong one; see `homes`.
    """
    lines = []
    refused: dict[tuple[str, str], list[str]] = {}  # by every branch of a union
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        context = item.get("ctx", {})
        if item["type"] == "unknown_keys":
            prefix = f"{path}." if path else ""
            for key in context["unknown"]:
                sections = [section for section in (elsewhere or {}).get(key, []) if section]
                name, colon, value = key.partition(":")
                if colon and name in context["known"]:
                    hint = f": write a space after the colon, as in {{{name}: {value}}}"
                elif sections and not any(edits(key, word) == 1 for word in context["known"]):
                    longer = [word for word in context["known"] if word.startswith(f"{key}_")]
                    hint = f" here; it belongs to {' or '.join(dict.fromkeys(sections))}"
                    hint += f", or did you mean '{longer[0]}'?" if longer else ""
                else:
                    hint = closest(key, context["known"]) or f" (known: {', '.join(context['known'])})"
                lines.append(f"{prefix}{key}: unknown key{hint}")
        elif item["type"] == "missing":
            lines.append(f"{path}: is required{context.get('example', '')}")
        elif item["type"] == "model_type":
            empty = item["input"] is None
            lines.append(f"{path}: {'is empty; give it keys, or leave it out' if empty else 'should be a section'}")
        else:
            given = item["input"]
            shown = "" if isinstance(given, Mapping | list) else f", got {given!r}"
            message = item["msg"].removeprefix("Value error, ")
            message = message.replace("Input should", "should", 1).replace("String should", "should", 1)
            if message.startswith("should be "):
                refused.setdefault((path, shown), []).append(message.removeprefix("should be "))
            else:
                lines.append(f"{path}: {message}{shown}" if path else f"{message}{shown}")
    lines += [f"{path}: should be {' or '.join(dict.fromkeys(m))}{shown}" for (path, shown), m in refused.items()]
    return BadConfig(f"{source}: " + ("\n  " if len(lines) > 1 else "") + "\n  ".join(dict.fromkeys(lines)))


def _is_union_branch(part: Any) -> bool:
    """Return whether a part of a path is the type that pydantic adds for a union, as in `data.train.list[str]`."""
    names = ("str", "int", "float", "bool", "constrained-int", "constrained-float")
    return isinstance(part, str) and (part in names or "[" in part)
