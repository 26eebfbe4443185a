"""The errors that torchmdnet2 raises on bad input. Each message names the thing and the remedy."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = [
    "MISSING",
    "BadCheckpoint",
    "BadConfig",
    "BadData",
    "MissingBackend",
    "NeighborOverflow",
    "StructureWarning",
    "UndeterminedEnergyWarning",
    "UnknownElement",
    "UnknownModel",
    "UntrainedCharge",
    "UntrainedChargeWarning",
    "needs_extra",
    "unmet",
]


class NeighborOverflow(RuntimeError):
    """A neighbor list needs a larger capacity; the list is not usable.

    Attributes:
        needed: number of directed edges that the search found.
        capacity: number of directed edges that fit.
    """

    def __init__(self, needed: int, capacity: int):
        self.needed, self.capacity = int(needed), int(capacity)
        super().__init__(
            f"the neighbor list needs {needed} directed edges and its capacity is {capacity}; "
            f"pass capacity={needed} or more, or leave capacity=None to let it grow"
        )


class UnknownElement(ValueError):
    """An atom's element is outside the set that the model was trained on."""


class UntrainedCharge(ValueError):
    """The model was not trained on the total charge or odd number of electrons of a structure, or does not use it."""


class UntrainedChargeWarning(UserWarning):
    """A structure's total charge or number of electrons is unknown to the model, and is evaluated at the user's
    request."""


class UndeterminedEnergyWarning(UserWarning):
    """The training data do not determine the reference energies of a structure's composition."""


class BadCheckpoint(ValueError):
    """A model file is damaged, of an unknown format, or not a model file."""


class UnknownModel(FileNotFoundError):
    """A name is neither a model file nor a potential."""


class BadConfig(ValueError):
    """A configuration is invalid: an unknown key, a wrong type, a value out of range."""


class BadData(ValueError):
    """A data file, label or structure cannot be used."""


class StructureWarning(UserWarning):
    """A statement of a structure is not used, or its dummy cell is ignored."""


class MissingBackend(ImportError):
    """An optional package is needed, and not installed or too old."""


MISSING = "not installed"


def unmet(extra: str) -> dict[str, str]:
    """Return the requirements of an extra that are not met here.

    Args:
        extra: its name.

    Returns:
        Package -> reason; empty if this package is not installed by pip. The reason is "not installed", or names the
        least version or the Python that the package needs.
    """
    from importlib import metadata

    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.match(r"[\d.]*", text)[0].split(".") if n]  # type: ignore[index]

    try:
        required = metadata.requires("torchmdnet2") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in required:
        wanted = re.match(r"([\w.-]+)(?:>=([\d.]+))?", line)
        if not wanted or not re.search(rf"extra == ['\"]{extra}['\"]", line):
            continue
        package, least = wanted[1], wanted[2] or ""
        try:
            present = metadata.version(package)
        except metadata.PackageNotFoundError:
            present = ""
        if present and numbers(present) >= numbers(least):
            continue
        python = re.search(r"python_version >= ['\"]([\d.]+)", line)
        if python and list(sys.version_info[:2]) < numbers(python[1]):
            here = ".".join(map(str, sys.version_info[:2]))
            found[package] = f"{least} or later needs Python {python[1]} or later, and this is Python {here}"
        else:
            found[package] = f"{present} is installed, and {least} or later is needed" if present else MISSING
    return found


@contextmanager
def needs_extra(extra: str, *packages: str) -> Iterator[None]:
    """Name the extra to install in the error if an import within the block fails.

    Args:
        extra: its name.
        packages: those whose older versions would fail later, with errors that do not name the reason.

    Raises:
        MissingBackend: one of them is not installed, or too old; names it and the remedy.
    """
    try:
        yield
    except ImportError as error:
        _refuse_old(extra, packages)
        if not isinstance(error, ModuleNotFoundError):
            raise
        name = str(error.name).partition(".")[0]
        raise MissingBackend(f"the package {name} is not installed: pip install 'torchmdnet2[{extra}]'") from error
    _refuse_old(extra, packages)


def _refuse_old(extra: str, packages: Sequence[str]) -> None:
    """Raise MissingBackend for the first of the packages that is too old, or that this Python is too old for."""
    for name, why in unmet(extra).items() if packages else ():
        if name in packages and why != MISSING:
            there = "with such a Python, " if " Python " in why else ""
            raise MissingBackend(f"{name} {why}: {there}pip install 'torchmdnet2[{extra}]'")
