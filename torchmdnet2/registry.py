"""Names in configuration files and the classes behind them.

One dictionary per kind and a decorator. Other packages add theirs through the entry-point group
`torchmdnet2.plugins`: each entry point names a module, which registers its classes when it is imported.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

__all__ = ["HEADS", "PRIORS", "REPRESENTATIONS", "Registry", "UnknownName", "did_you_mean", "load_plugins"]

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" for the closest of the known names, or "" when none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean '{match[0]}'?" if match else ""


class UnknownName(KeyError):
    """No class is registered under this name."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return str(self.args[0])


class Registry(Generic[T]):
    """A dictionary name -> class of one kind, with an error that helps."""

    def __init__(self, kind: str):
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make the class known under `name`.

        Raises:
            ValueError: another class has this name.
        """

        def decorate(cls: type[T]) -> type[T]:
            known = self._classes.get(name)
            if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{self.kind} '{name}' is already registered by {known.__module__}")
            self._classes[name] = cls
            cls.registered_name = name  # type: ignore[attr-defined]
            return cls

        return decorate

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            load_builtin()
        if name not in self._classes:
            load_plugins()
        try:
            return self._classes[name]
        except KeyError:
            hint = did_you_mean(name, self._classes)
            raise UnknownName(f"unknown {self.kind} '{name}'{hint} Known: {', '.join(sorted(self._classes))}") from None

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        load_builtin()
        load_plugins()
        return iter(sorted(self._classes))


REPRESENTATIONS: Registry = Registry("model")
HEADS: Registry = Registry("head")
PRIORS: Registry = Registry("prior")

_plugins_loaded = False


def load_builtin() -> None:
    """Register the models, heads and priors of this package."""
    import_module("torchmdnet2.models")
    import_module("torchmdnet2.priors")
    import_module("torchmdnet2.baseline")


def load_plugins() -> None:
    """Import the modules of the entry-point group `torchmdnet2.plugins`, once; one that fails is warned of."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry in entry_points(group="torchmdnet2.plugins"):
            try:
                entry.load()
            except Exception as error:  # of code that is not ours: it must not stop what does not need it
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"the plug-in '{entry.name}' ({entry.value}) is left out: {reason}", stacklevel=2)
