"""Names of potentials: model files that are shipped in this folder, and those that other packages provide.

A potential's name can be given instead of a model file: `load("NAME")`. A package provides a potential by an entry
point of the group `torchmdnet2.potentials`, whose name is that of the potential and whose value is a Python
package with the file NAME.tmn in its folder. That package is looked up and not imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnknownModel
from ..registry import did_you_mean

__all__ = ["NamedModel", "find_model", "is_name", "named_models"]

GROUP = "torchmdnet2.potentials"
FOLDER = Path(__file__).parent
SUFFIX = ".tmn"


@dataclass(frozen=True)
class NamedModel:
    """A potential that has a name.

    Attributes:
        name: what users write.
        path: the model file.
        package: the package that provides it.
    """

    name: str
    path: Path
    package: str


def named_models() -> dict[str, NamedModel]:
    """Return all potentials that have a name, by name; those of this package hide others of the same name.

    Raises:
        UnknownModel: two other packages bring the same name.
    """
    return {**_installed(), **_shipped()}


def find_model(model: str | os.PathLike) -> Path:
    """Return the model file of a name or path. A name comes before a file of the same name: write ./NAME for that.

    Args:
        model: name of a potential, as text, or path of a .tmn file, which need not exist.

    Raises:
        UnknownModel: it is neither the name of a potential nor an existing file, and looks like a name; or empty.
        TypeError: it is neither text nor a path.
    """
    if not isinstance(model, str | os.PathLike):
        kind = type(model).__name__
        raise TypeError(f"a model is given by the path of a .tmn file or the name of a potential, got {kind}")
    if not os.fspath(model):
        raise UnknownModel("the name of the model is empty: give the path of a .tmn file or the name of a potential")
    if not isinstance(model, str) or not _may_be_name(model):
        return Path(model)
    known = _shipped()
    if model not in known:
        known = named_models()
    if model in known:
        return known[model].path
    if Path(model).exists():
        return Path(model)
    names = f"Potentials with a name: {', '.join(sorted(known))}" if known else "No potential is shipped or installed"
    hint = did_you_mean(model, known) or "."
    raise UnknownModel(
        f"{model}: no such model file, and no potential has this name{hint} {names} (`torchmdnet2 models`)"
    )


def is_name(model: str | os.PathLike) -> bool:
    """Return whether `find_model` takes it for the name of a potential, and not for a path."""
    return isinstance(model, str) and _may_be_name(model) and model in named_models()


def _may_be_name(text: str) -> bool:
    return bool(text) and not text.endswith(SUFFIX) and os.path.basename(text) == text and text not in (".", "..")


def _shipped() -> dict[str, NamedModel]:
    return {path.stem: NamedModel(path.stem, path, "torchmdnet2") for path in sorted(FOLDER.glob(f"*{SUFFIX}"))}


def _installed() -> dict[str, NamedModel]:
    from importlib.metadata import entry_points

    found: dict[str, NamedModel] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        if entry.name in found and found[entry.name].package != entry.value:
            raise UnknownModel(
                f"the packages {found[entry.name].package} and {entry.value} both provide a potential '{entry.name}': "
                "give the path of its file instead, or uninstall one of them"
            )
        found[entry.name] = NamedModel(entry.name, _file(entry.value, entry.name), entry.value)
    return found


def _file(package: str, name: str) -> Path:
    """Return the file NAME.tmn of a package, or where it should be if the package or the file is missing."""
    from importlib.util import find_spec

    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    candidates = [Path(folder) / f"{name}{SUFFIX}" for folder in folders]
    return next((path for path in candidates if path.is_file()), (candidates or [Path(package) / f"{name}{SUFFIX}"])[0])
