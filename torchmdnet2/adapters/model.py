"""The potential of an adapter: a frozen copy, from a model file or from memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..checkpoint import from_bytes, read_header, to_bytes
from ..core.devices import device_of, dtype_name, dtype_of
from ..errors import BadCheckpoint, BadConfig
from ..potential.cells import coulomb_in_cells
from ..potential.potential import SYMBOLS, Potential
from ..potential.refusals import require_flag
from ..potentials import find_model, is_name

__all__ = ["ModelSource", "Opening", "atomic_numbers", "device_of", "dtype_name", "dtype_of", "in_memory", "open_model"]


def atomic_numbers(symbols: Iterable[str]) -> list[int]:
    """Return the atomic numbers of symbols; raise BadConfig for anything that is not a symbol."""
    found = [symbol.strip() if isinstance(symbol, str) else symbol for symbol in symbols]
    for symbol in found:
        if symbol not in SYMBOLS[1:]:
            raise BadConfig(f"elements: {symbol!r} is not an element; write symbols, as in H,C,O")
    return [SYMBOLS.index(symbol) for symbol in found]


@dataclass(frozen=True)
class ModelSource:
    """The source of a model as plain data, which pickles and XML files store to load the model again.

    Attributes:
        path: absolute path of the model file, or name of a potential; None for a model in memory.
        sha256: the checksum in the file's header; a file with another checksum is refused.
        blob: the content of a model file, for a model in memory.
        level: the chosen level of theory; None for the default.
    """

    path: str | None = None
    sha256: str | None = None
    blob: bytes | None = None
    level: str | None = None

    def open(
        self, device: str, dtype: str | None, allow_untrained_charge: bool = False, coulomb: str | None = None
    ) -> Potential:
        """Load the potential, frozen and in evaluation mode.

        Raises:
            FileNotFoundError: the file does not exist any more.
            BadCheckpoint: the file is damaged or has changed.
        """
        torch_device, torch_dtype = device_of(device), dtype_of(dtype)
        blob = self.blob
        if blob is None:
            assert self.path is not None
            found = read_header(self.path)["sha256"]
            if found != self.sha256:
                raise BadCheckpoint(
                    f"{self.path}: its checksum is {found[:12]}…, but that of the model used before is "
                    f"{str(self.sha256)[:12]}…: the file was replaced; restore the original or create the adapter again"
                )
            blob = find_model(self.path).read_bytes()
        potential = _freeze(from_bytes(blob, torch_device, torch_dtype, name=self.path or "model in memory"))
        potential = potential if self.level is None else potential.at_level(self.level)
        potential.allow_untrained_charge = allow_untrained_charge
        if coulomb is not None:
            potential.coulomb = coulomb_in_cells(coulomb, potential)
        return potential


def open_model(
    model: str | os.PathLike | Potential,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    coulomb: str | None = None,
    level: str | None = None,
) -> tuple[Potential, ModelSource | None]:
    """Return an adapter's copy of a potential, and its source (None for a potential in memory).

    Args:
        model: path of a .tmn file, name of a potential, or a Potential, which is copied: later changes to it have no
            effect here.
        device, dtype: device and floating-point type of the copy; dtype None keeps the model's.
        allow_untrained_charge: setting of the copy; a Potential that allows it keeps allowing it.
        coulomb: method for Coulomb sums over all pairs in periodic cells, "pme" or "dsf", as for `torchmdnet2.load`;
            None takes "pme", or the method of a given Potential.
        level: level of theory, for a model that was trained on several; None takes its default.

    Raises:
        FileNotFoundError, BadCheckpoint: as `torchmdnet2.load`.
        TypeError: the model is neither a path nor a Potential.
        ValueError: the device, dtype or `coulomb` cannot be used, `allow_untrained_charge` is not True or False, or the
            model does not have this level.
    """
    torch_device, torch_dtype = device_of(device), dtype_of(dtype)
    allow_untrained_charge = require_flag(allow_untrained_charge, "allow_untrained_charge")
    if isinstance(model, Potential):
        with torch.inference_mode(False):
            own = _freeze(copy.deepcopy(model).to(device=torch_device, dtype=torch_dtype))
            own = own if level is None else own.at_level(level)
        own.allow_untrained_charge |= allow_untrained_charge
        if coulomb is not None:
            own.coulomb = coulomb_in_cells(coulomb, own)
        return own, None
    if not isinstance(model, str | os.PathLike):
        kind = type(model).__name__
        raise TypeError(f"model must be the path of a .tmn file, the name of a potential or a Potential, got {kind}")
    path = str(model) if is_name(model) else os.path.abspath(find_model(model))
    source = ModelSource(path=path, sha256=read_header(path)["sha256"], level=level)
    name = None if torch_dtype is None else dtype_name(torch_dtype)
    return source.open(str(torch_device), name, allow_untrained_charge, coulomb), source


class Opening(NamedTuple):
    """Options with which a model is opened on several devices, as of `open_model`."""

    dtype: torch.dtype | str | None
    allow_untrained_charge: bool
    coulomb: str | None
    level: str | None

    def open(self, model: str | os.PathLike | Potential, device: str = "cpu") -> Potential:
        return open_model(model, device, *self)[0]


def in_memory(potential: Potential) -> ModelSource:
    """Return a source that holds the weights of a potential in memory.

    Raises:
        ValueError: the potential was not built by `Potential.from_config`.
    """
    return ModelSource(blob=to_bytes(potential))


def _freeze(potential: Potential) -> Potential:
    return potential.eval().requires_grad_(False)
