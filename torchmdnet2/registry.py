"""Names in configuration files and the classes or functions behind them.

One dictionary per kind and a decorator. Other packages add classes through the entry-point group
`torchmdnet2.plugins`: each entry point names a module, which registers its classes when it is imported. This module
imports nothing of the package: `torchmdnet2/__init__.py` gives it the function that imports the built-in classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

__all__ = [
    "FORMATS",
    "HEADS",
    "PRIORS",
    "REPRESENTATIONS",
    "Registry",
    "UnknownName",
    "did_you_mean",
    "load_plugins",
    "provide",
]

T = TypeVar("T")


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
            others = "those of a plug-in if its package is installed"
            raise UnknownName(f"unknown {self.kind} '{name}'{hint or '.'} Known: {known}; {others}") from None

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


def provide(load: Callable[[], None]) -> None:
    """Set the function that imports the built-in classes when a name is not known yet; it may be called repeatedly."""
    _providers.append(load)


def _load_builtin() -> None:
    for load in _providers:
        load()


def load_plugins() -> None:
    """Import the modules of the entry-point group `torchmdnet2.plugins`, once; failures give a warning."""
    global _plugins_loaded
    if not _plugins_loaded:
        from importlib.metadata import entry_points

        _plugins_loaded = True
        for entry in entry_points(group="torchmdnet2.plugins"):
            try:
                entry.load()
            except Exception as error:  # of code that is not ours: it must not stop what does not need it
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"the plug-in '{entry.name}' ({entry.value}) is left out: {reason}", stacklevel=2)
