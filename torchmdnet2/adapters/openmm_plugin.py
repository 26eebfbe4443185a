"""OpenMM and PyTorch on one GPU: one CUDA context; a compiled plugin passes positions and forces by their addresses.

The plugin is `openmm_plugin.cpp`. It serves the Contexts that `_begin` accepts; OpenMM's own kernel serves all others.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import logging
import mmap
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core.devices import ProcessLock
from ..core.files import atomic_write, user_cache
from ..engine.bound import BoundStep, ReferenceBoundStep
from ..errors import MissingBackend, needs_extra
from ..evaluator import Evaluator
from ..units import KJ_MOL, factor
from .arrays import BOUND_UP_TO, Structure

with needs_extra("openmm", "openmm"):
    import openmm

__all__ = ["KJ_MOL_NM", "NM", "DirectCalls", "PluginForce", "build_plugin", "offer", "share_context", "use_plugin"]

_LOGGER = logging.getLogger("torchmdnet2.openmm")
NM = factor("length", "nm")  # Å
KJ_MOL_NM = KJ_MOL / NM  # eV/Å
_VARIABLE = "TORCHMDNET2_OPENMM_PLUGIN"
_PLATFORMS = ("CUDA", "CPU", "Reference")  # with kernels in the plugin
_CPP = Path(__file__).with_name("openmm_plugin.cpp")
_THROUGH_HOST = "OpenMM: positions and forces pass through the host: %s"


class PluginForce(Protocol):
    """What the plugin needs of the callable of a PythonForce."""

    options: dict[str, Any]
    lock: ProcessLock
    isolated: bool
    pbc: np.ndarray

    @property
    def evaluator(self) -> Evaluator: ...

    def compute(self, pos: np.ndarray, cell: np.ndarray) -> tuple[float, np.ndarray, Structure]: ...

    def structure(self, pos: np.ndarray, cell: np.ndarray) -> Structure: ...

    def look(self, structure: Callable[[], Structure]) -> None: ...

    def describe(self, error: BaseException) -> str: ...


_OFFERED: weakref.WeakValueDictionary[int, PluginForce] = weakref.WeakValueDictionary()  # by address
_DIRECT: dict[int, DirectCalls] = {}  # of Contexts that were evaluated, by the address of their _Call
_LOADED: list[Any] = []  # what the plugin calls, and the plugin


def offer(force: PluginForce) -> None:
    """Let Contexts with a PythonForce of this callable use the plugin; load it if the model is on a GPU."""
    _OFFERED[id(force)] = force
    if torch.device(force.options["device"]).type == "cuda":
        _use_built_plugin()


# --- One CUDA context ---


def share_context() -> None:
    """Let OpenMM's CUDA platform use the same CUDA context as PyTorch, in Contexts that are created from now on.

    Otherwise each has a separate one, and the GPU switches from one to the other twice in a step. OpenMM has no option
    for this: the two calls by which its plugin creates and destroys a context are redirected in the memory of this
    process, to those for the primary context of the device. On Linux with glibc only. Contexts that exist already keep
    what they have, with a warning. A second call has no effect.

    Raises:
        RuntimeError: the system is another one, OpenMM's CUDA platform is not loaded, or it does not create contexts in
            a known way. Nothing has been changed then.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in _RELOCATIONS:
        raise RuntimeError("share_context() works on Linux with glibc only, on processors of x86-64 and ARM")
    maps = Path("/proc/self/maps").read_text().split("\n")
    path = next((line.split(maxsplit=5)[5] for line in maps if line.endswith("/libOpenMMCUDA.so")), None)
    if path is None:
        raise RuntimeError("OpenMM's CUDA platform is not loaded: share_context() has no effect on other platforms")
    imports = _imports(path)
    create = next((name for name in _CREATE if name in imports), None)
    if create is None or "cuCtxDestroy_v2" not in imports:
        raise RuntimeError(
            f"OpenMM {openmm.__version__} ({path}) does not create CUDA contexts in a way that share_context() knows"
        )
    if imports[create][0] in _REDIRECTED:
        return
    if any(_on_cuda(one) for one in gc.get_objects()):
        warnings.warn(
            "Contexts on the platform CUDA exist already and keep their own CUDA context: call share_context() before "
            "a Context or Simulation is created",
            RuntimeWarning,
            stacklevel=2,
        )
    driver, shared = ctypes.CDLL("libcuda.so.1"), set()

    def use_primary(place: int, *others: Any) -> int:
        context = ctypes.c_void_p.from_address(place)
        if failed := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), others[-1]):
            return failed
        shared.add(context.value)
        return driver.cuCtxPushCurrent_v2(context)

    def destroy(context: int) -> int:
        return 0 if context in shared else driver.cuCtxDestroy_v2(context)  # PyTorch goes on with the shared one

    pointer, number = ctypes.c_void_p, ctypes.c_int
    driver.cuCtxDestroy_v2.argtypes = [pointer]
    redirected = ctypes.CFUNCTYPE(number, *[pointer] * (_CREATE[create] - 1), number)(use_primary)
    _redirect(imports["cuCtxDestroy_v2"], ctypes.CFUNCTYPE(number, pointer)(destroy))
    _redirect(imports[create], redirected)


_CREATE = {"cuCtxCreate_v2": 3, "cuCtxCreate_v4": 4}  # with OpenMM's plugins for CUDA 12, 13: number of arguments
_RELOCATIONS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # those with the address of a function
_REDIRECTED: dict[int, Any] = {}  # functions in use


def _on_cuda(candidate: Any) -> bool:
    """Return True if something is a Context of OpenMM on the platform CUDA."""
    if not issubclass(type(candidate), openmm.Context) or not hasattr(candidate, "this"):  # without: creation failed
        return False
    return candidate.getPlatform().getName() == "CUDA"


def _imports(path: str) -> dict[str, list[int]]:
    """Return where a loaded library keeps the addresses of the functions that it imports (ELF, 64 bits, glibc)."""
    u64, word = ctypes.c_uint64, 8
    base, _, at = (u64 * 3).from_address(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)._handle)
    table: dict[int, int] = {}
    while tag := u64.from_address(at).value:
        table[tag] = u64.from_address(at + word).value
        at += 2 * word
    strings, symbols = table[5], table[6]  # DT_STRTAB, DT_SYMTAB
    found: dict[str, list[int]] = {}
    for start, size in ((7, 8), (23, 2)):  # DT_RELA and DT_RELASZ, DT_JMPREL and DT_PLTRELSZ
        for entry in range(table.get(start, 0), table.get(start, 0) + table.get(size, 0), 3 * word):
            offset, info = (u64 * 2).from_address(entry)
            if info % 2**32 in _RELOCATIONS[platform.machine()]:
                name = strings + ctypes.c_uint32.from_address(symbols + 3 * word * (info >> 32)).value
                found.setdefault(ctypes.string_at(name).decode(), []).append(base + offset)
    return found


def _redirect(places: list[int], function: Any) -> None:
    """Store the address of a C function, in memory that may be read-only."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # Contexts may outlive this module
    for place in places:
        page = place - place % mmap.PAGESIZE
        if ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE
        ):
            raise RuntimeError("share_context(): the memory of OpenMM's CUDA platform cannot be changed")
        ctypes.c_void_p.from_address(place).value = ctypes.cast(function, ctypes.c_void_p).value
        _REDIRECTED[place] = function


# --- The compiled plugin ---


def build_plugin(path: str | os.PathLike | None = None) -> Path:
    """Compile the plugin by which OpenMM's CUDA platform and a model on the same GPU exchange positions and forces.

    Forces that are created later use it. It needs g++ (or the command of the variable CXX) and the headers that OpenMM
    comes with, but neither CUDA nor a GPU. It fits one version of OpenMM.

    Args:
        path: of the library; None: in the user's cache, where it is found. Others can write neither it nor its folder
            there, and earlier builds for this OpenMM are removed. For another path set the variable
            TORCHMDNET2_OPENMM_PLUGIN.

    Returns:
        The path.

    Raises:
        MissingBackend: there is no compiler, or there are no headers of OpenMM.
        RuntimeError: the compiler failed; with its message.
        OSError: the library cannot be written there.
    """
    libraries = Path(openmm.version.openmm_library_path)
    headers = libraries.parent / "include"
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]  # also "ccache g++"
    if shutil.which(compiler[0]) is None:
        raise MissingBackend(f"there is no compiler {compiler[0]}: install g++, or name one by the variable CXX")
    if not (headers / "openmm" / "cuda" / "CudaPlatform.h").is_file():
        raise MissingBackend(f"OpenMM's headers are not in {headers}: install OpenMM by pip or conda")
    cached = path is None
    # absolute: a link is replaced, not followed
    path = (_cached_plugin() if path is None else Path(path)).expanduser().absolute()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-w", f'-DTORCHMDNET2_KEY="{_plugin_key()}"',
            f"-I{headers}", str(_CPP), "-o", f"{folder}/plugin.so", f"-L{libraries}", "-lOpenMM",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the plugin for OpenMM cannot be compiled: {' '.join(command)}\n{done.stderr[-2000:]}")
        try:
            path.parent.mkdir(mode=0o700 if cached else 0o777, parents=True, exist_ok=True)
            if cached:
                path.parent.chmod(stat.S_IMODE(path.parent.stat().st_mode) & ~_OTHERS_WRITE)
            atomic_write(path, Path(folder, "plugin.so").read_bytes())
            path.chmod(0o755)  # whatever the umask
        except OSError as error:
            raise OSError(
                f"{path} cannot be written ({error.strerror or error}): call build_plugin(path) with a path in another "
                "folder, and name that path by the variable TORCHMDNET2_OPENMM_PLUGIN"
            ) from error
    if cached:
        checksum = _plugin_key().rpartition(" ")[2]
        for earlier in path.parent.glob(path.name.replace(checksum, "?" * len(checksum))):
            if earlier != path:
                earlier.unlink(missing_ok=True)
    return path


def use_plugin(platform: str = "CUDA") -> None:
    """Let Contexts that are created from now on use the plugin of `build_plugin`, and on CUDA also `share_context()`.

    Forces with a model on a GPU call this if the plugin is built. A second call has no effect.

    A library in the user's cache is loaded only if it and its folder belong to the user or root, and nobody else can
    write them. One that the variable TORCHMDNET2_OPENMM_PLUGIN names is loaded without this check.

    Args:
        platform: "CUDA", or "Reference" or "CPU", which have no use but tests.

    Raises:
        RuntimeError: the plugin is not built, others could have written it, it does not fit this OpenMM, or the
            platform or the CUDA context cannot be used; Contexts do without it then.
        OSError: the library cannot be looked at.
    """
    if platform not in _PLATFORMS:
        raise RuntimeError(f"the plugin has nothing for the platform {platform}: give one of {', '.join(_PLATFORMS)}")
    given = os.environ.get(_VARIABLE)
    path = Path(given or _cached_plugin()).expanduser().resolve()  # the loader would search a relative name elsewhere
    if not path.is_file():
        raise RuntimeError(f"there is no {path}: build the plugin, by torchmdnet2.adapters.openmm.build_plugin()")
    if not given:
        _require_ours(path)
    try:
        library = ctypes.CDLL(str(path))
        library.torchmdnet2_key.restype = ctypes.c_char_p
        key = library.torchmdnet2_key().decode()
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error
    if key != _plugin_key():
        raise RuntimeError(f"{path} was built for {key}, but this is {_plugin_key()}: call build_plugin() again")
    if platform not in [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]:
        raise RuntimeError(f"OpenMM has no platform {platform} here")
    if platform == "CUDA":
        share_context()
    if not library.torchmdnet2_register(platform.encode()):
        raise RuntimeError(f"OpenMM's platform {platform} has no PythonForce here: install OpenMM by pip or conda")
    if not _LOADED:
        _LOADED.extend([_BEGIN(_begin), _BEGIN(_start), _END(_end), library])
        library.torchmdnet2_connect(*_LOADED[:3])
        atexit.register(library.torchmdnet2_connect, None, None, None)


def _use_built_plugin() -> None:
    """Use the plugin if it is built and the variable is not empty; a warning says why it cannot be used."""
    given = os.environ.get(_VARIABLE)
    try:
        built = _cached_plugin().is_file() if given is None else bool(given)
        old = user_cache().glob(f"OpenMM-{openmm.Platform.getOpenMMVersion()}-*.so")
        if given is None and not built and any(old):
            _LOGGER.warning(_THROUGH_HOST, "the plugin is of another version of torchmdnet2: call build_plugin() again")
    except (RuntimeError, OSError):  # the home folder is unknown, or cannot be read: nothing was built there
        return
    try:
        if built:
            use_plugin()
    except (RuntimeError, OSError) as error:
        _LOGGER.warning(_THROUGH_HOST, error)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _require_ours(library: Path) -> None:
    """Refuse a library that others could have written: loading it runs code before its key is known."""
    for path in (library, library.parent):
        status = path.stat()
        owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
        if owner not in (0, os.getuid()) or mode & _OTHERS_WRITE:
            raise RuntimeError(
                f"others could have written {path} (owner: uid {owner}, mode {mode:o}): "
                f"call build_plugin() again, or name a library that you trust by the variable {_VARIABLE}"
            )


def _plugin_key() -> str:
    return f"OpenMM {openmm.Platform.getOpenMMVersion()}, {hashlib.sha256(_CPP.read_bytes()).hexdigest()[:16]}"


def _cached_plugin() -> Path:
    return user_cache() / f"{_plugin_key()}, {platform.machine()}.so".replace(" ", "-").replace(",", "")


class _Call(ctypes.Structure):
    """The structure `Call` of the plugin, where its fields are explained."""

    _fields_ = [
        ("callable", ctypes.c_void_p), ("cuda_context", ctypes.c_void_p), ("particles", ctypes.c_int),
        ("periodic_force", ctypes.c_int), ("periodic_system", ctypes.c_int), ("include_energy", ctypes.c_int),
        ("box", ctypes.c_double * 9),
        ("evaluate", ctypes.c_void_p), ("error", ctypes.c_char_p), ("positions", ctypes.c_void_p),
        ("forces", ctypes.c_void_p), ("wrapped", ctypes.c_void_p), ("positions_are_double", ctypes.c_int),
        ("forces_are_double", ctypes.c_int), ("length", ctypes.c_double), ("force", ctypes.c_double),
        ("energy", ctypes.c_double),
    ]  # fmt: skip


_REMOVED = b"torchmdnet2: the force was removed from its System after the Context was made: make the Context again"
_FAILED: list[bytes] = []  # the last message of `_start`, which OpenMM copies at once
_BEGIN, _END = (ctypes.CFUNCTYPE(result, ctypes.POINTER(_Call)) for result in (ctypes.c_int, None))
_EVALUATE = ctypes.CFUNCTYPE(ctypes.c_int)


def _begin(call: Any) -> int:
    """Return whether the force of a new Context evaluates through the plugin.

    Nothing is kept: if the creation of the Context fails later, OpenMM never calls `_end`.
    """
    force = _OFFERED.get(call.contents.callable)
    if force is None:
        return 0
    try:
        reason = _refusal(force, call.contents)
        if not reason:
            return 1
    except Exception as error:  # it cannot pass through OpenMM
        reason = str(error)
    _LOGGER.warning(_THROUGH_HOST, reason)
    return 0


def _start(call: Any) -> int:
    """Prepare the first evaluation of a Context; return 0 if that fails."""
    force = _OFFERED.get(call.contents.callable)
    if force is None:
        call.contents.error = _REMOVED
        return 0
    try:
        _DIRECT[ctypes.addressof(call.contents)] = DirectCalls(force, call.contents)
    except Exception as error:  # it cannot pass through OpenMM, which gets the message alone
        _FAILED[:] = [force.describe(error).encode()]
        call.contents.error = _FAILED[0]
        return 0
    return 1


def _end(call: Any) -> None:
    calls = _DIRECT.pop(ctypes.addressof(call.contents), None)
    if calls is not None:  # it was evaluated
        del calls._function  # a circle of references, which would keep the memory on the GPU


def _refusal(force: PluginForce, call: _Call) -> str:
    """Return why a force cannot use the addresses that OpenMM gives; empty if it can."""
    device = torch.device(force.options["device"])
    if call.particles != len(force.options["numbers"]):
        return "the force does not have the particles of the model"  # OpenMM's own kernel raises the error
    if call.periodic_system and not call.periodic_force:
        return "the System has a box that the force does not use"  # molecules may be in any image then
    if not call.cuda_context:
        if force.isolated:
            return "this platform does not make molecules whole"
        return "" if device.type == "cpu" else f"the model is on {device}"
    if device.type != "cuda":
        return f"the model is on {device}"
    _stream_function()  # an error if there is none
    driver, current, primary, index = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p(), device.index
    index = torch.cuda.current_device() if index is None else index
    driver.cuCtxGetCurrent(ctypes.byref(current))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), index)
    driver.cuDevicePrimaryCtxRelease_v2(index)
    return "" if current.value == primary.value else f"OpenMM does not use PyTorch's CUDA context of {device}"


class DirectCalls:
    """Evaluations of one Context at positions that the plugin writes into tensors, and forces that it reads there.

    The first evaluation, and each that fails on the device, passes through the host as without the plugin, which checks
    everything. Others replay a bound step.

    Args:
        force: the callable of the PythonForce.
        call: the memory shared with the plugin.
    """

    def __init__(self, force: PluginForce, call: _Call):
        self._force, self._call, self._device = force, call, torch.device(force.options["device"])
        self._bound: BoundStep | None = None
        self._may_bind = call.particles <= BOUND_UP_TO
        self._in_box = bool(force.pbc.any())
        self._box = b""
        self._stream: Any = None
        if call.cuda_context:
            stream = _stream_function()(call.cuda_context)
            given = torch.cuda.ExternalStream
            self._stream = given(stream, self._device) if stream else torch.cuda.default_stream(self._device)
        call.length, call.force = NM, 1 / KJ_MOL_NM
        # OpenMM's stream writes there next, so memory that another stream still uses must not be taken
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(False), on_stream:
            self._given = torch.empty(call.particles, 3, dtype=torch.float64, device=self._device)
            self._pass(self._given, torch.empty_like(self._given))
        self._function = _EVALUATE(self._evaluate)
        call.evaluate = ctypes.c_void_p.from_address(ctypes.addressof(self._function)).value  # holds no reference

    def _pass(self, pos: Tensor, forces: Tensor) -> None:
        """Let the plugin write positions to a tensor and read forces from another, from the next evaluation on."""
        call, self._forces = self._call, forces
        call.positions, call.forces = pos.data_ptr(), forces.data_ptr()
        call.positions_are_double, call.forces_are_double = (t.dtype == torch.float64 for t in (pos, forces))

    def _evaluate(self) -> int:
        force, stream = self._force, self._stream
        try:
            elsewhere = stream is not None and torch.cuda.current_stream(stream.device) != stream
            on_stream = torch.cuda.stream(stream) if elsewhere else nullcontext()
            with force.lock, torch.inference_mode(False), on_stream:
                if self._bound is None or not self._replay(self._bound):
                    self._evaluate_on_host()
        except BaseException as error:  # it cannot pass through OpenMM, which gets the message alone
            self._error = force.describe(error).encode()
            self._call.error = self._error
            return 0
        return 1

    def _replay(self, bound: BoundStep) -> bool:
        """Evaluate on the device; return whether that gave energy and forces."""
        call = self._call
        if self._in_box and (box := bytes(call.box)) != self._box:
            bound.cell.copy_(torch.from_numpy(self._cell()))
            self._box = box
        good = False
        try:
            while not good:
                bound.replay()
                good = bound.check()
        except ValueError:  # a number is not finite: the host finds out which
            return False
        if isinstance(bound, ReferenceBoundStep) and not bool((bound.energy.sum() + bound.forces.sum()).isfinite()):
            return False
        if call.include_energy:
            call.energy = float(bound.energy) / KJ_MOL
        self._force.look(lambda: self._force.structure(_to_host(bound.pos), self._cell() * self._in_box))
        return True

    def _evaluate_on_host(self) -> None:
        call, force = self._call, self._force
        call.energy, forces, structure = force.compute(_to_host(self._given), self._cell())
        if self._bound is None and self._may_bind:
            self._bind(structure)
        self._forces.copy_(torch.from_numpy(forces * KJ_MOL_NM))

    def _bind(self, structure: Structure) -> None:
        try:
            self._bound = bound = self._force.evaluator.bind(structure.to_system(self._device))
        except torch.cuda.OutOfMemoryError:
            self._may_bind = False
            return
        if self._force.isolated:
            self._call.wrapped = self._given.data_ptr()
        else:
            self._given = bound.pos
        self._pass(bound.pos, bound.forces)

    def _cell(self) -> np.ndarray:
        """Return the box [3, 3] in Å; zeros if the force does not use it."""
        return np.array(self._call.box).reshape(3, 3) * (NM * bool(self._force.options["periodic"]))


def _stream_function() -> Any:
    """Return CudaContext::getCurrentStream() of the loaded library."""
    library = ctypes.CDLL("libOpenMMCUDA.so", os.RTLD_NOLOAD | os.RTLD_NOW)
    function = library["_ZN6OpenMM11CudaContext16getCurrentStreamEv"]
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    return function


def _to_host(pos: Tensor) -> np.ndarray:
    return np.array(pos.numpy(force=True), dtype=np.float64)
