"""Names in configuration files and the classes or functions behind them.

One dictionary per kind and a decorator. Other packages add classes through the entry-point group
`torchmdnet2.plugins`: each entry point names a module, which registers its classes when it is imported. A single file
does the same as `--plugin FILE`. This module imports nothing of the package: `torchmdnet2/__init__.py` gives it the
function that imports the built-in classes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

__all__ = [
    "FORMATS",
    "HEADS",
    "OF_PLUGINS",
    "PRIORS",
    "REPRESENTATIONS",
    "Registry",
    "UnknownName",
    "count_others",
    "did_you_mean",
    "import_plugin",
    "load_plugins",
    "provide",
]

T = TypeVar("T")

OF_PLUGINS = "for one of a plug-in, install its package or give its file (--plugin FILE; in Python, import it)"
"""Remedy in errors about unknown names."""

_GROUP = "torchmdnet2.plugins"
_VARIABLE = "TORCHMDNET2_PLUGINS"
_OWN = __name__.partition(".")[0] + "."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest of the known names, or "" when none is close."""
    import difflib  # not needed where all names are right

    names = {each.lower(): each for each in known}
    match = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.6)
    return f", did you mean '{names[match[0]]}'?" if match else ""


class UnknownName(KeyError):
    """Nothing is registered under this name."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return str(self.args[0])


class Registry(Generic[T]):
    """Finds classes (or functions) of one kind by name, with an error that lists the known names.

    Args:
        kind: name of an entry in error messages.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the class known under `name`.

        Args:
            name: the name in configurations.

        Raises:
            ValueError: another class has this name.
        """

        def decorate(cls: T) -> T:
            known: Any = self._classes.get(name)
            new: Any = cls
            if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
                raise ValueError(f"{self.kind} '{name}' is already registered by {known.__module__}")
            self._classes[name] = cls
            new.registered_name = name
            count_others(new)
            return cls

        return decorate

    def __getitem__(self, name: str) -> T:
        if name not in self._classes:
            _load_builtin()
        if name not in self._classes:
            load_plugins()
        try:
            return self._classes[name]
        except KeyError:
            hint = did_you_mean(name, self._classes)
            known = ", ".join(sorted(self._classes))
            raise UnknownName(f"unknown {self.kind} '{name}'{hint or '.'} Known: {known}; {OF_PLUGINS}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in list(self)

    def __iter__(self) -> Iterator[str]:
        _load_builtin()
        load_plugins()
        return iter(sorted(self._classes))


REPRESENTATIONS: Registry[Any] = Registry("model")
HEADS: Registry[Any] = Registry("head")
PRIORS: Registry[Any] = Registry("prior")
FORMATS: Registry[Any] = Registry("data format")

_providers: list[Callable[[], None]] = []
_plugins_loaded = False
_others = 0


def provide(load: Callable[[], None]) -> None:
    """Set the function that imports the built-in classes when a name is not known yet; it may be called repeatedly."""
    _providers.append(load)


def _load_builtin() -> None:
    for load in _providers:
        load()


def count_others(*things: Any) -> None:
    """Count classes and functions of other packages that are registered, here or as kernels."""
    global _others
    _others += sum(not thing.__module__.startswith(_OWN) for thing in things)


def import_plugin(path: str) -> None:
    """Import a Python file that registers classes, here and in all processes that this one starts.

    Its folder is appended to `sys.path`, so that other processes find what they unpickle.

    Args:
        path: a .py file, whose name is that of a module.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its name cannot be that of a module, or is that of another one; it fails to be imported; it
            registers nothing.
    """
    from importlib import invalidate_caches
    from importlib.metadata import EntryPoint
    from importlib.util import find_spec

    folder, file = os.path.split(os.path.abspath(path))
    name, suffix = os.path.splitext(file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    if suffix != ".py" or not name.isidentifier():
        raise ValueError(f"{path}: the name must have letters, digits and _ only, and end in .py: rename the file")
    if folder not in sys.path:
        sys.path.append(folder)
    invalidate_caches()
    loaded = sys.modules.get(name)
    found = getattr(loaded, "__file__", None) if loaded else getattr(find_spec(name), "origin", None)
    if found is None or not os.path.exists(found) or not os.path.samefile(found, path):
        raise ValueError(f"{path}: Python has another module '{name}' ({found or 'built-in'}): rename the file")
    if loaded is None:
        before = _others
        try:
            EntryPoint(name, name, _GROUP).load()
        except (Exception, SystemExit) as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} cannot be imported: {reason} (--traceback shows where)") from error
        if _others == before:
            raise ValueError(f"{path} registers nothing: decorate its class, as with @PRIORS.register('name')")
    given = os.environ.get(_VARIABLE, "").split(os.pathsep)
    os.environ[_VARIABLE] = os.pathsep.join(dict.fromkeys(filter(None, [*given, os.path.join(folder, file)])))


def load_plugins() -> None:
    """Import plug-ins, once.

    These are the files that the variable `TORCHMDNET2_PLUGINS` names, as in processes of a command with `--plugin`, and
    the modules of the entry-point group `torchmdnet2.plugins`, whose failures give a warning.

    Raises:
        FileNotFoundError, ValueError: as `import_plugin`, for a file of the variable.
    """
    global _plugins_loaded
    if not _plugins_loaded:
        from importlib.metadata import entry_points

        _plugins_loaded = True
        for path in filter(None, os.environ.get(_VARIABLE, "").split(os.pathsep)):
            import_plugin(path)
        for entry in entry_points(group=_GROUP):
            try:
                entry.load()
            except Exception as error:  # of code that is not ours: it must not stop what does not need it
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"the plug-in '{entry.name}' ({entry.value}) is left out: {reason}", stacklevel=2)
