"""numba's kernels on the CPU: options, cache on disk, compiled several at a time, called on threads that they share."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, njit, prange, types
from numba.core import cgutils, config, event
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.core.typed_passes import _reload_parfors

from . import announce, announce_wait
from .devices import ProcessLock, usable_cores

__all__ = [
    "INNER",
    "OPTIONS",
    "ThreadChoice",
    "ThreadTuner",
    "before_compiling",
    "compile_side_by_side",
    "compiled",
    "finding",
    "kernel",
    "kernel_family",
    "lost_by_fork",
    "run_on_threads",
    "serve",
]


OPTIONS: dict[str, Any] = {"fastmath": True, "error_model": "numpy", "no_cfunc_wrapper": True}

INNER: dict[str, Any] = {**OPTIONS, "no_cpython_wrapper": True}
"""Options of functions that only kernels call; Python cannot call them."""


# --- What numba keeps on disk ---


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: numba compiles the function, with these options, and keeps it on disk where it may write."""
    return lambda function: _compiled(function, function, options)


def _compiled(function: Callable[..., Any], source: Any, options: dict[str, Any]) -> Any:
    """Compile as `compiled`. Kernels on disk belong to the present files of `source` and of the functions that it may
    call."""
    try:
        found: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to write to
        return njit(**options)(function)
    if (cache := getattr(found, "_cache", None)) is not None:
        files = sorted(_files({source.__code__.co_filename, __file__}, source.__globals__))
        name = cache._cache_file._index_name.removesuffix(".nbi")
        cache._cache_file = _CacheFile(cache.cache_path, name, [(file, *_version(file)) for file in files])
    return found


def _files(found: set[str], names: dict[str, Any]) -> set[str]:
    """Add the files of the compiled functions that a module knows, and of those that these may call."""
    for value in list(names.values()):
        if isinstance(value, Dispatcher) and (file := value.py_func.__code__.co_filename) not in found:
            found.add(file)
            _files(found, value.py_func.__globals__)
    return found


@lru_cache
def _version(file: str) -> tuple[int, int]:
    try:
        facts = os.stat(file)
    except OSError:  # not a file: typed in, or within an archive
        return 0, 0
    return facts.st_mtime_ns, facts.st_size


class _CacheFile(IndexDataCacheFile):
    """A cache file of numba that several processes can save to at the same time.

    numba numbers its files by the index. Two processes that read the index before either writes it take the same
    name, and what is loaded later is code for other types. Here a name follows from the types and the version of the
    source, and the index names a file after it was written. If two write the index at once, one entry is lost: it is
    compiled again.
    """

    def save(self, key: Any, data: Any) -> None:
        base = self._index_name.removesuffix(".nbi")
        if not self._load_index():  # what is there is of another version of the source
            for file in Path(self._cache_path).glob(f"{escape(base)}.*.nbc"):
                file.unlink(missing_ok=True)
        content = repr((self._version, self._source_stamp, key)).encode()
        name = f"{base}.{hashlib.sha256(content).hexdigest()[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


# --- Kernels: loops that threads share ---
#
# numba compiles the body of a loop over prange four times: as a function, within two wrappers of it, and within the
# function that has the loop. Here a kernel is a function of a range of the loop, compiled once by itself and once with
# what calls it. The loop over prange, `_on_threads`, is one for all kernels: it calls them by their addresses.

_PARTS = 256
"""Largest number of parts of a loop: more than there are threads."""

_OFF = "comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"
_PARALLEL: dict[str, Any] = {"parallel": {**dict.fromkeys(_OFF, False), "prange": True}}
_INDEX, _NONE = ir.IntType(64), ir.VoidType()
_loops: dict[str, Any] = {}
_intrinsic: Any = extending.intrinsic  # by its type, callers would have to give the context too


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator of function(begin, stop, *arguments), which runs the passes begin … stop − 1 of a loop.

    Returns:
        kernel(count, *arguments): all passes, shared out among numba's threads; kept in numba's cache on disk. The
        function returns nothing, raises nothing and closes over numbers only.
    """
    # what is in numba's cache is loaded by names of symbols, which must differ where the numbers do
    function.__qualname__ += "".join(f"_{int(cell.cell_contents)}" for cell in function.__closure__ or ())
    key = f"{function.__module__}.{function.__qualname__}"
    _loops[key] = njit(**INNER)(function)

    def launch(count: int, *arguments: Any) -> None:
        _share(key, count, arguments)

    # numba keeps it beside the file, and for the version of the file, that the function is in
    code = function.__code__
    launch.__code__ = launch.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    launch.__module__, launch.__qualname__ = function.__module__, function.__qualname__
    launch.__name__, launch.__doc__ = function.__name__, function.__doc__
    found = _compiled(launch, function, OPTIONS)
    found.loop = _loops[key]
    return found


@_intrinsic
def _enter(_typing, entry, begin, stop, data):
    """Call the function at an address."""

    def generate(context, builder, _signature, arguments):
        address, *given = arguments
        kind = ir.FunctionType(_NONE, [_INDEX] * 3)
        builder.call(builder.inttoptr(address, kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(entry, begin, stop, data), generate


@compiled(**_PARALLEL, **INNER)
def _on_threads(entry, count, data):
    parts = min(count, _PARTS)
    for part in prange(parts):
        _enter(entry, count * part // parts, count * (part + 1) // parts, data)


@_intrinsic(prefer_literal=True)
def _share(typing, key, count, arguments):
    """Run the loop of this name: its arguments lie on the stack, and `entry` takes them from there in each thread."""
    loop, place = _loops[key.literal_value], types.intp
    of_loop = typing.resolve_function_type(types.Dispatcher(loop), (place, place, *arguments), {})
    of_threads = typing.resolve_function_type(types.Dispatcher(_on_threads), (place,) * 3, {})

    def generate(context, builder, _signature, values):
        body = loop.overloads[tuple(of_loop.args)]
        library = context.active_code_library
        library.add_linking_library(body.library)
        # loaded from disk, this calls numba's threads, which must be there; numba itself remembers that only where it
        # compiled `_on_threads` in the same process
        library._reload_init.add(_reload_parfors)
        memory = cgutils.alloca_once_value(builder, values[2])
        name = builder.module.get_unique_name("entry")
        entry = ir.Function(builder.module, ir.FunctionType(_NONE, [_INDEX] * 3), name)
        entry.linkage = "internal"
        inside = ir.IRBuilder(entry.append_basic_block())
        begin, stop, data = entry.args
        packed = inside.load(inside.inttoptr(data, memory.type))
        given = [inside.extract_value(packed, k) for k in range(len(arguments))]
        context.call_internal_no_propagate(inside, body.fndesc, of_loop, [begin, stop, *given])
        inside.ret_void()
        run = context.get_function(types.Dispatcher(_on_threads), of_threads)
        context.add_linking_libs(run.libs)
        run(builder, [builder.ptrtoint(entry, _INDEX), values[1], builder.ptrtoint(memory, _INDEX)])
        return context.get_dummy_value()

    return types.void(key, place, arguments), generate


# --- Compile the kernels of the CPU side by side: numba compiles one at a time in a process, so there are several ---
#
# A first run of a step launches nothing: it only finds which kernels it needs, and for which types of arguments. Those
# that numba's cache on disk lacks are compiled by helpers, one a core, each taking the next that nobody has begun. They
# leave them in the cache, from which the step then loads them. This process compiles none itself: code that stays in
# memory may round differently from what is loaded from disk, and later processes give the same bits as this one.
# Processes that need the same kernels take turns, so that only the first one compiles them.
#
# Importing this needs numba.

_SECONDS = 1.8
"""Mean time to compile a kernel on one core, s."""

_START = 1.5
"""Time until a helper process has loaded numba, s."""

_MOST_HELPERS = 7

_PATIENCE, _PAUSE = 300.0, 0.1
"""Longest time for which a process waits for the kernels of another one, and time between two looks, s."""

_Dispatcher: Any = Dispatcher  # `_compile_for_args` is not in its type

_Family = TypeVar("_Family", bound=Callable[..., Any])
_finding: int | None = None  # the thread that does so
_ONE = ProcessLock()


class _Wanted(NamedTuple):
    """A kernel to compile, with the types of its arguments."""

    kernel: Any
    types: tuple[Any, ...]


def kernel_family(make: _Family) -> _Family:
    """Decorator of a function that makes kernels, a NamedTuple of them, for numbers that are constants in them.

    They are made once, and hold what another process needs to make them.
    """

    @lru_cache
    @wraps(make)
    def made(*options: Any) -> Any:
        found = make(*options)
        for name, kernel in found._asdict().items():
            kernel.family = make.__name__, options, name
        return found

    return made  # type: ignore[return-value]


def finding() -> bool:
    """Return whether this thread runs a step only to find the kernels that it needs; its times then mean nothing."""
    return _finding == threading.get_ident()


def compile_side_by_side(step: Callable[[], Any]) -> None:
    """Compile the kernels that a step would compile one after the other.

    Args:
        step: is called once while its kernels do nothing. Its results mean nothing, and it must be repeatable.
    """
    with _threads_of_torch():
        _compile_side_by_side(step)


def _compile_side_by_side(step: Callable[[], Any]) -> None:
    with _kernels_wanted() as wanted, np.errstate(all="ignore"), suppress(Exception):
        step()  # whatever is wrong with the structure shows when the step is run
    missing = [one for one in wanted if not _is_kept(one)]
    if not missing:
        return
    # large ones first, so that none begins when the others end
    missing.sort(key=lambda one: len(one.kernel.loop.py_func.__code__.co_code), reverse=True)
    folder = _folder(missing[0])
    with _turn(folder) if folder else nullcontext():
        _compile([one for one in missing if not _is_kept(one)], folder)


def _compile(missing: list[_Wanted], folder: str) -> None:
    """Compile kernels in helpers or, where there is no folder to keep them, in this process."""
    if not missing:  # another process has compiled them meanwhile
        return
    helpers = min(usable_cores(), len(missing), _MOST_HELPERS) if folder and _has_python() else 0
    seconds = _SECONDS * len(missing) / max(helpers, 1) + (_START if helpers else 0)
    if len(missing) > 1:
        announce(len(missing), "CPU", seconds, folder)
    _Queue(missing).empty(helpers)


@contextmanager
def _turn(folder: str) -> Iterator[None]:
    """Enter the block when no other process is in such a block for this folder: what it compiled is on disk then.

    The end of a process frees the lock, whatever the cause. Where files cannot be locked, and after `_PATIENCE`, as for
    a process that is stopped, the block is entered all the same.
    """
    with ExitStack() as held:
        with suppress(ImportError, OSError):
            import fcntl

            file = held.enter_context(open(Path(folder, ".compiling.lock"), "ab"))
            until, said = time.monotonic() + _PATIENCE, False
            while time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not said:
                        announce_wait("CPU", folder)
                    said = True
                    time.sleep(_PAUSE)
        yield


@contextmanager
def before_compiling(action: Callable[[], Any]) -> Iterator[None]:
    """Call a function once, before the first kernel in a block that is not on disk is compiled."""
    with event.install_listener("numba:compile", _First(action)):
        yield


class _First(event.Listener):
    """Calls a function at the first event."""

    def __init__(self, action: Callable[[], Any]):
        self._action: Callable[[], Any] | None = action

    def on_start(self, event: Any) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def _threads_of_torch() -> Iterator[None]:
    """Keep PyTorch's number of threads. It shares OpenMP with numba, which sets the number when its pool starts."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def _kernels_wanted() -> Iterator[list[_Wanted]]:
    """Collect the kernels that are called in this thread and not compiled yet. Meanwhile they do nothing."""
    global _finding
    found: list[_Wanted] = []
    seen: set[tuple[int, Any]] = set()
    compile_for: Callable[..., Any]

    def note(self: Any, *arguments: Any, **named: Any) -> Any:
        if not finding() or named or not _is_kernel(self):
            return compile_for(self, *arguments, **named)
        wanted = _Wanted(self, tuple(map(self.typeof_pyval, arguments)))
        if (id(self), wanted.types) not in seen:
            seen.add((id(self), wanted.types))
            found.append(wanted)
        return _nothing

    with _ONE:
        compile_for = _Dispatcher._compile_for_args
        _finding, _Dispatcher._compile_for_args = threading.get_ident(), note
        try:
            yield found
        finally:
            _finding, _Dispatcher._compile_for_args = None, compile_for


def _is_kernel(dispatcher: Any) -> bool:
    """Return whether it is a kernel. Kernels return nothing, so that a step can go on without them."""
    return hasattr(dispatcher, "loop") and _has_kernels(dispatcher.py_func.__module__)


def _has_kernels(module: str) -> bool:
    """Return whether a module holds kernels: `cpu` of a model or prior, and modules whose names begin with numba,
    do."""
    package = __name__.partition(".")[0]
    name = module.rpartition(".")[2]
    return module.startswith(f"{package}.") and (name == "cpu" or name.startswith("numba_"))


def _nothing(*_arguments: Any) -> None:
    """Do nothing, instead of a kernel."""


def _is_kept(wanted: _Wanted) -> bool:
    """Return whether numba has the kernel on disk, by numba's index; True if there is no index."""
    try:
        cache = wanted.kernel._cache
        key = cache._index_key(wanted.types, wanted.kernel.targetctx.codegen())
        return key in cache._cache_file._load_index()
    except (AttributeError, TypeError, OSError):
        return True


def _folder(wanted: _Wanted) -> str:
    """Return the folder of numba's cache for the kernel; "" without a cache."""
    return str(getattr(wanted.kernel._cache, "cache_path", None) or "")


def _has_python() -> bool:
    """Return whether processes can be started: within other programs the executable is not Python."""
    return bool(sys.executable) and Path(sys.executable).name.lower().startswith("python")


class _Queue:
    """Kernels to compile, which helpers take one by one."""

    def __init__(self, wanted: list[_Wanted]):
        self._waiting = list(wanted)
        self._lock = threading.Lock()

    def empty(self, helpers: int) -> None:
        """Compile all of them in as many helpers; without any, in this process."""
        threads = [threading.Thread(target=self._feed, daemon=True) for _ in range(helpers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while not helpers and (wanted := self._next()) is not None:
            wanted.kernel.compile(wanted.types)

    def _next(self) -> _Wanted | None:
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def _feed(self) -> None:
        """Start a helper and give it one kernel after the other. One that fails is compiled when it is called."""
        helper = _start_helper()
        try:
            while (wanted := self._next()) is not None:
                line = _written(wanted)
                if line is not None:
                    helper.stdin.write(line + "\n")
                    helper.stdin.flush()
                    if not helper.stdout.readline():
                        return
        except OSError:
            return
        finally:
            with suppress(OSError):
                helper.stdin.close()
            helper.wait()


def _start_helper() -> Any:
    modules = [__name__, *sorted(name for name in sys.modules if _has_kernels(name))]
    places = json.dumps([place or os.getcwd() for place in sys.path])
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1])"
    code = f"{code}; import {', '.join(modules)}; {__name__}.serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code, places], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def serve() -> None:
    """Compile what each line of the standard input names, and answer each with a line."""
    for line in sys.stdin:
        module, name, options, member, arguments = json.loads(line)
        kernel = getattr(sys.modules[module], name)
        if options is not None:
            kernel = getattr(kernel(*options), member)
        kernel.compile(tuple(map(_read, arguments)))
        print("done", flush=True)


def _written(wanted: _Wanted) -> str | None:
    """Return the kernel in the form that `serve` reads; None if another process cannot find it."""
    function = wanted.kernel.py_func
    name, options, member = getattr(wanted.kernel, "family", (function.__qualname__, None, ""))
    if "<locals>" in name:
        return None
    try:
        return json.dumps([function.__module__, name, options, member, [_describe(t) for t in wanted.types]])
    except TypeError:
        return None


def _describe(kind: Any) -> Any:
    """Return a type of numba in JSON."""
    if isinstance(kind, types.Array):
        return ["array", kind.dtype.name, kind.ndim, kind.layout, not kind.mutable, kind.aligned]
    if isinstance(kind, types.BaseTuple):
        return ["tuple", *map(_describe, getattr(kind, "types", ()))]
    if isinstance(kind, types.Number | types.Boolean):
        return kind.name
    raise TypeError(f"{kind} is not described")


def _read(described: Any) -> Any:
    """Return the type that `_describe` described."""
    if isinstance(described, str):
        return getattr(types, "boolean" if described == "bool" else described)
    kind, *rest = described
    if kind == "tuple":
        return types.BaseTuple.from_types([_read(part) for part in rest])
    name, ndim, layout, readonly, aligned = rest
    return types.Array(_read(name), ndim, layout, readonly=readonly, aligned=aligned)


# --- How many threads: one or all, whichever is faster at the moment ---
#
# What decides is not the work alone. Threads that share out a step wait for each other at the end of every kernel, and
# when other programs hold the cores, each of these waits can take as long as the operating system leaves them there:
# nine atoms then take a hundred times longer on two threads than on one. So both are timed. Results do not depend on
# it.

SMALL = 100_000
"""Work that one thread does in a third of a millisecond, with the pauses between kernels as long: always one thread."""

LARGE = 300_000_000
"""Work that takes one thread a second: always all of them, as trying one would take too long."""

_TRIALS = 0.02  # of the time may go into trying the slower one again
_WEIGHT = 0.1  # of a new time in the running mean


class ThreadTuner:
    """Compares one thread with all of them, for work of one size.

    Args:
        most: all of them, at least 2.

    Attributes:
        threads: for the next run.
    """

    def __init__(self, most: int):
        self.threads = most
        self._numbers = (1, most)
        self._known: dict[int, float] = {}  # seconds per unit of work
        self._trial = 2  # runs left of a trial; the first may compile, or find cold caches, and does not count
        self._since = 0.0  # seconds per unit of work, since the last trial

    def took(self, cost: float) -> None:
        """Report the time of the last run, in seconds per unit of work."""
        known, threads = self._known, self.threads
        if self._trial:
            self._trial -= 1
            if self._trial:
                return
            known[threads] = cost
            self._since = 0.0
            self.threads = min(known, key=known.__getitem__)
        else:
            known[threads] += _WEIGHT * (cost - known[threads])
            self._since += cost
        other = self._numbers[self.threads == self._numbers[0]]
        if other not in known or known[other] < known[self.threads] or self._since * _TRIALS > 2 * known[other]:
            self.threads, self._trial = other, 2


class ThreadChoice:
    """A tuner for each size of work."""

    def __init__(self) -> None:
        self._tuners: dict[tuple[int, int, bool], ThreadTuner] = {}

    def __call__(self, work: int, most: int, forces: bool) -> ThreadTuner | int:
        """Return the tuner, which gives the number of threads and must be given the time; or the number, if it is
        fixed.

        Args:
            work: as in `run_on_threads`.
            most: threads that there are.
            forces: whether they are computed.
        """
        if most < 2 or work < SMALL:
            return 1
        if work > LARGE:
            return most
        key = work.bit_length(), most, forces
        if key not in self._tuners:
            self._tuners[key] = ThreadTuner(most)
        return self._tuners[key]


# --- The threads of kernels: one user at a time, and none after a fork ---


_Result = TypeVar("_Result")

# one thread at a time: numba's own pool, which is used where there is no other, ends the process otherwise; a network
# calls the terms that read its charges
_POOL = ProcessLock()
_used, _lost = False, False
_MOST_THREADS: int = config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def lost_by_fork() -> str:
    """Return why this process cannot use the kernels: GNU's OpenMP would end it; "" if it can."""
    if not _lost:
        return ""
    return (
        "this process was forked off one that had used the kernels, whose threads do not survive that; start processes "
        "by 'spawn' (multiprocessing.get_context('spawn'))"
    )


def _after_fork() -> None:
    global _lost
    _lost = _used and numba.threading_layer() == "omp"  # the other layers survive


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run_on_threads(
    function: Callable[[], _Result], choice: ThreadChoice, work: int, most: int, with_forces: bool
) -> _Result:
    """Call a function on as many of numba's threads as `choice` says, and report the time to it.

    Args:
        function: calls compiled kernels.
        choice: of this network.
        work: in the units of `kernels.interfaces.amount_of_work`.
        most: threads that the function can keep busy.
        with_forces: whether it computes forces.
    """
    global _used
    if finding():  # no kernel runs
        return function()
    with _POOL:
        _used = True
        threads = torch.get_num_threads()
        before = numba.get_num_threads()
        if torch.get_num_threads() != threads:
            # starting numba's pool sets the number of threads of OpenMP, which PyTorch shares
            torch.set_num_threads(threads)
        tuner = choice(work, min(threads, _MOST_THREADS, most), with_forces)
        number = tuner.threads if isinstance(tuner, ThreadTuner) else tuner
        if number != before:
            numba.set_num_threads(number)
        started = time.perf_counter()
        try:
            out = function()
        finally:
            if number != before:
                numba.set_num_threads(before)
        if isinstance(tuner, ThreadTuner):
            tuner.took((time.perf_counter() - started) / work)
        return out
