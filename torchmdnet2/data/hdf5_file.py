"""Opening of HDF5 files by the optional package h5py, with errors that name a damaged file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..errors import BadData, MissingBackend

if TYPE_CHECKING:
    import h5py

__all__ = ["DAMAGE", "damage_is_bad_data", "load_h5py", "opened_hdf5"]

DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""Errors that h5py raises on damaged files."""

_CACHE_BYTES = 2**20  # of chunks that HDF5 keeps for each open dataset
_HEADER_BYTES = 2**21  # of headers that it keeps for the file; in memory they take ten times as much


def load_h5py() -> Any:
    """Import h5py.

    Raises:
        MissingBackend: h5py is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise MissingBackend("HDF5 files need h5py: pip install 'torchmdnet2[hdf5]'") from error
    return h5py


def opened_hdf5(path: str | PathLike) -> h5py.File:
    """Open a file for reading, with a small cache of HDF5 for any number of groups.

    Raises:
        MissingBackend: h5py is not installed.
    """
    file = load_h5py().File(path, "r", rdcc_nbytes=_CACHE_BYTES)
    config = file.id.get_mdc_config()
    config.set_initial_size = True
    config.min_size = config.initial_size = config.max_size = _HEADER_BYTES
    file.id.set_mdc_config(config)
    return file


@contextmanager
def damage_is_bad_data(where: str, words: str = "it is damaged") -> Iterator[None]:
    """Turn DAMAGE within the block into BadData that names the place and the cause."""
    try:
        yield
    except BadData:
        raise
    except DAMAGE as error:
        raise BadData(f"{where}: {words}: {error}") from error
