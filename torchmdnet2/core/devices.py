"""Devices, floating-point types, and processes that are forked off one that has used a potential."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import float64, nn

from ..errors import BadConfig

__all__ = [
    "Float64Buffers", "ProcessLock", "SideStream", "capture_stream", "device_of", "devices_of", "dtype_name",
    "dtype_of", "expect_forks", "refuse_forked_gpu", "total_memory", "usable_cores", "usable_threads", "wait_for",
]  # fmt: skip


_DTYPES = {"float32": torch.float32, "float64": torch.float64, "single": torch.float32, "double": torch.float64}


def device_of(device: torch.device | str) -> torch.device:
    """Return a torch device that exists here.

    Raises:
        ValueError: it does not.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device '{device}' cannot be used here: give cpu, cuda, cuda:1, …") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no NVIDIA GPU"
        raise ValueError(f"device '{device}' cannot be used here: {why}; use cpu")
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"device '{device}' cannot be used here: {reason}") from None
    return found


def devices_of(names: str | Sequence[str]) -> list[str]:
    """Return a device for each process.

    Args:
        names: "auto", "all", or names, as a list or separated by commas.

    Raises:
        BadConfig: no name is given, or something else, such as a number of devices.
        ValueError: a device cannot be used here.
    """
    if isinstance(names, str):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if names == "auto":
            return ["cuda:0" if count else "cpu"]
        if names == "all":
            return [f"cuda:{k}" for k in range(count)] or ["cpu"] * usable_cores()
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, Sequence):
        raise BadConfig(f"devices must be names, such as 'cuda:0,cuda:1' or 'cpu,cpu', got {names!r}")
    if not names:
        raise BadConfig("devices: name at least one device")
    return [str(device_of(name)) for name in names]


def wait_for(device: torch.device | str) -> None:
    """Wait until a GPU has done all that was launched on it; a CPU has done so already."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return float32 or float64, by torch's name or "single" and "double"; None stays None.

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
    """Return "float32" or "float64"."""
    return str(dtype).removeprefix("torch.")


# --- Modules whose constants stay in double precision ---


class Float64Buffers(nn.Module):
    """A module whose own floating-point buffers stay float64 when the model is cast.

    Constants (reference energies, centres of radial functions) are cast where they are used, so that
    `model.float().double()` is still exact.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def, override]
        exact = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == float64}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != float64:
                self._buffers[name] = buffer.to(moved.device)
        return self


# --- Processes that are forked off one that has used a potential: one thread, locks that nobody holds, no GPU ---
#
# The threads of OpenMP, on which PyTorch runs, are not copied by a fork, and work that was shared out among them would
# never end. `multiprocessing` forks on Linux up to Python 3.13; so do data loaders and many servers.

_expected, _forked = False, False


def expect_forks() -> None:
    """Limit PyTorch to one thread in processes that are forked off this one from now on."""
    global _expected
    if not _expected and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
    _expected = True


def _in_child() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


def total_memory(device: torch.device) -> float:
    """Return the memory of a device in bytes, whether it is in use or not; inf where it is not known."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):  # not on Windows
        return math.inf


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_threads(wanted: int) -> int:
    """Return the number of threads to use: as requested, or 1 in a forked process."""
    return 1 if _forked else wanted


def refuse_forked_gpu(device: torch.device) -> None:
    """Raise RuntimeError for a GPU in a process that was forked off one that had used it."""
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "this process was forked off one that had used the GPU, and a GPU cannot be used after a fork: start "
            "processes by 'spawn' (multiprocessing.get_context('spawn')), or use the potential on the CPU"
        )


class ProcessLock:
    """A lock that a thread may take several times. A forked process gets a new one, since threads that held the lock of
    its parent do not exist in it."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


# --- Streams of a GPU ---
#
# From the fourth stream that a process uses, each replay of any of its graphs takes 3 µs longer (22 atoms, one NVIDIA
# H200: 67 instead of 64 µs). So a thread takes the same streams again instead of new ones. Threads share none: what
# another one launches on a stream that is captured would become part of the graph.

_STREAMS = threading.local()


def _stream(device: torch.device, use: str, priority: int = 0) -> torch.cuda.Stream:
    """Return the stream of this thread for a use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    streams: dict[Any, torch.cuda.Stream] = _STREAMS.__dict__
    key = f"{use} {index} {priority}"
    if key not in streams:
        streams[key] = torch.cuda.Stream(index, priority=priority)
    return streams[key]


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which this thread captures graphs of a GPU."""
    return _stream(device, "capture")


class SideStream:
    """A second stream of a GPU, for launches that others need not wait for; on a CPU they come in turn. Those of one
    thread with the same priority are one stream.

    Args:
        device: of the launches.
        priority: as of `torch.cuda.Stream`; −1: before those of other streams.
    """

    def __init__(self, device: torch.device, priority: int = 0):
        self._device, self._priority = device, priority

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch the block on the second stream, after all earlier launches of the current one."""
        if self._device.type != "cuda":
            yield
            return
        stream = _stream(self._device, "side", self._priority)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def wait(self) -> None:
        """Let all later launches of the current stream wait for those of the second one."""
        if self._device.type == "cuda":
            stream = _stream(self._device, "side", self._priority)
            torch.cuda.current_stream(self._device).wait_stream(stream)
