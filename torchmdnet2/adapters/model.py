"""How an adapter gets hold of a potential: from a model file or from memory, as its own frozen copy."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint import from_bytes, read_header, to_bytes
from ..errors import BadCheckpoint
from ..potential import Potential

__all__ = ["ModelSource", "device_of", "dtype_of", "open_model"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "single": torch.float32, "double": torch.float64}


@dataclass(frozen=True)
class ModelSource:
    """Where a model can be had again, in plain data: this is what pickles and XML files hold.

    Attributes:
        path: absolute path of the model file, None for a model in memory.
        sha256: the checksum in the file's header; another content is refused.
        blob: the content of a model file, for a model in memory.
    """

    path: str | None = None
    sha256: str | None = None
    blob: bytes | None = None

    def open(self, device: str, dtype: str | None) -> Potential:
        """The potential, frozen and in evaluation mode.

        Raises:
            FileNotFoundError: the file is gone.
            BadCheckpoint: it is damaged, or not the one that was meant.
        """
        torch_device, torch_dtype = device_of(device), dtype_of(dtype)
        blob = self.blob
        if blob is None:
            assert self.path is not None
            found = read_header(self.path)["sha256"]
            if found != self.sha256:
                raise BadCheckpoint(
                    f"{self.path}: its checksum is {found[:12]}…, and the model that was used here is "
                    f"{str(self.sha256)[:12]}…: the file was replaced; put the original back or set the model up again"
                )
            blob = Path(self.path).read_bytes()
        return _freeze(from_bytes(blob, torch_device, torch_dtype, name=self.path or "model in memory"))


def open_model(
    model: str | os.PathLike | Potential, device: torch.device | str = "cpu", dtype: torch.dtype | str | None = None
) -> tuple[Potential, ModelSource | None]:
    """A potential of the adapter's own, and where to find it again (None for a potential in memory).

    Args:
        model: path of a .tmn file, or a Potential, which is copied: later changes to it have no effect here.
        device, dtype: of the copy; dtype None keeps the model's.

    Raises:
        FileNotFoundError, BadCheckpoint: as `torchmdnet2.load`.
        TypeError: the model is neither a path nor a Potential.
        ValueError: the device or dtype cannot be used.
    """
    torch_device, torch_dtype = device_of(device), dtype_of(dtype)
    if isinstance(model, Potential):
        with torch.inference_mode(False):
            return _freeze(copy.deepcopy(model).to(device=torch_device, dtype=torch_dtype)), None
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be the path of a .tmn file or a Potential, got {type(model).__name__}")
    path = os.path.abspath(model)
    source = ModelSource(path=path, sha256=read_header(path)["sha256"])
    return source.open(str(torch_device), None if torch_dtype is None else dtype_name(torch_dtype)), source


def in_memory(potential: Potential) -> ModelSource:
    """A source that carries the weights with it.

    Raises:
        ValueError: the potential was not built by `Potential.from_config`.
    """
    return ModelSource(blob=to_bytes(potential))


def device_of(device: torch.device | str) -> torch.device:
    """A torch device that exists here.

    Raises:
        ValueError: it does not.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"device '{device}' cannot be used here: {reason}") from None
    return found


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """float32 or float64, by torch's name or "single" and "double"; None stays None.

    Raises:
        ValueError: any other type.
    """
    if dtype is None or dtype in (torch.float32, torch.float64):
        return dtype  # type: ignore[return-value]
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be float32 or float64, got {dtype}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" or "float64"."""
    return str(dtype).removeprefix("torch.")


def _freeze(potential: Potential) -> Potential:
    return potential.eval().requires_grad_(False)
