"""The errors that torchmdnet2 raises on bad input. Each message names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
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
    """An optional package is needed and not installed."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """A context for imports of packages that an extra of this package installs.

    Args:
        extra: its name.

    Raises:
        MissingBackend: one of them is not installed; names it and the remedy.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingBackend(
            f"the package {str(error.name).partition('.')[0]} is not installed: pip install 'torchmdnet2[{extra}]'"
        ) from error
