"""Processing of blocks of records, with one process for each device, into files that grow by blocks.

Reading, computing and writing overlap, and the order is kept. An interrupted run continues with the next block. Blocks
go from process to process in memory that all of them share.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import BadConfig, needs_extra
from .devices import usable_cores
from .files import append, atomic_write, keep_old

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from distributed import Client

__all__ = [
    "Journal", "Pool", "ProcessEnded", "Setup", "Stages", "Work", "blocks_of", "devices_pool", "helpers_for",
    "helpers_pool", "in_order", "in_threads", "left_text", "may_have_children", "rate_text", "through",
]  # fmt: skip

_IMPORTED = ("ase.io.extxyz",)  # where structures are read or written; takes a second in each process
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # read when a library is loaded
_HELPERS = 24  # processes beside GPUs
_MOST_THREADS = 8
_AHEAD = 2  # number of blocks that wait for each device
_SLOT = 2**24  # bytes of a slot of shared memory
_LARGE = 2**29  # bytes of input from which on a separate process for a single GPU, which starts 4 s later, saves time
_RESUME = "the results so far are written, and the same command continues from there"
_LOST = "no results are written without an output: take fewer devices, or smaller batches or blocks"
_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
_Executor = TypeVar("_Executor", bound=Executor)
Work = Callable[[Any], Any]
"""Computes a block, or a stage of it."""

Setup = Callable[[str], Work]
"""Returns the function that computes blocks on a device. It is sent to each process and called there once."""

_work: Work  # of this process
_shared: _SharedMemory  # of this process, if another one has started it
_busy = _stopped = False
_jobs: dict[str, Work] = {}  # of the last runs on this worker of a cluster
_JOBS = 2  # most of them
_LOCK = threading.Lock()


class ProcessEnded(RuntimeError):
    """A process was ended from outside, or could not start."""


class Pool(NamedTuple):
    """Workers that compute blocks in parallel.

    Attributes:
        submit: function that takes a block and returns its future.
        workers: number of blocks that are computed at once.
    """

    submit: Callable[[Any], Any]
    workers: Callable[[], int]


class _Parcel(NamedTuple):
    """A block, or what a stage has made of it, on its way.

    Attributes:
        slot: its part of the shared memory.
        size: number of bytes of it there.
        content: all of it, if it is too large for its slot.
    """

    slot: int
    size: int
    content: bytes = b""


class _SharedMemory:
    """Memory of all processes of a run, so that blocks need not go through pipes.

    A block that gets a slot keeps it through all stages: a process reads its parcel there and overwrites it with the
    result. The process that started the others gives slots and takes them back. The memory has no name that a killed
    run could leave behind.

    Args:
        slots: number of slots; without one, all goes through pipes. Pages that no block has reached take no memory.
        size: bytes of a slot; a block that is larger goes through pipes.
        file: the memory of the process that started this one; None makes it.
    """

    def __init__(self, slots: int, size: int = 0, file: Any = None):
        self._slots, self._size, self._free = slots, size, [*range(slots)]
        if slots:
            self._file = os.memfd_create("blocks") if file is None else file.detach()
            try:
                if file is None:
                    os.truncate(self._file, slots * size)
                self._map = mmap.mmap(self._file, slots * size)
            except OSError:
                os.close(self._file)
                raise

    @classmethod
    @contextmanager
    def of(cls, slots: int) -> Iterator[_SharedMemory]:
        """Yield the memory, without slots where the system has no memory without a name, or refuses it."""
        shared = cls(0)
        if hasattr(os, "memfd_create"):
            with suppress(OSError):
                shared = cls(slots, _SLOT)
        try:
            yield shared
        finally:
            if shared._slots:
                shared._map.close()
                os.close(shared._file)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._slots:
            return _SharedMemory, (0,)
        from multiprocessing.reduction import DupFd  # Windows has none

        return _SharedMemory, (self._slots, self._size, DupFd(self._file))

    def pack(self, block: Any) -> Any:
        """Return a block as a parcel; unchanged if no slot is free, or if it is one."""
        return block if isinstance(block, _Parcel) or not self._free else self.put(block, self._free.pop())

    def unpack(self, block: Any) -> Any:
        """Return a block, also from a parcel, whose slot is free then."""
        if not isinstance(block, _Parcel):
            return block
        found = self.take(block)
        self._free.append(block.slot)
        return found

    def put(self, block: Any, slot: int) -> _Parcel:
        """Write a block into a slot."""
        self._map.seek(slot * self._size)
        place = _Slot(self._map, self._size)
        try:
            ForkingPickler(place, 5).dump(block)
        except _TooLarge:
            return _Parcel(slot, 0, bytes(ForkingPickler.dumps(block, 5)))
        return _Parcel(slot, self._size - place.left)

    def take(self, parcel: _Parcel) -> Any:
        """Return the block of a parcel."""
        if parcel.content:
            return ForkingPickler.loads(parcel.content)
        with memoryview(self._map) as view, view[parcel.slot * self._size :][: parcel.size] as content:
            return ForkingPickler.loads(content)


class _TooLarge(Exception):
    """A block does not fit into its slot."""


class _Slot:
    """A slot as a file that is written from its beginning."""

    def __init__(self, file: mmap.mmap, size: int):
        self._file, self.left = file, size

    def write(self, content: Any) -> None:
        self.left -= memoryview(content).nbytes
        if self.left < 0:
            raise _TooLarge
        self._file.write(content)


def blocks_of(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield lists of `size` items; the last may be shorter."""
    rest = iter(items)
    while block := list(islice(rest, size)):
        yield block


def in_order(blocks: Iterable[Any], pool: Pool) -> Iterator[Any]:
    """Yield a pool's result for each block, in order and as soon as it is there.

    At most three blocks for each worker are in memory.

    Args:
        blocks: the blocks, which this thread reads while others are computed.
        pool: the pool.
    """
    pending: deque[Any] = deque()
    try:
        for block in blocks:
            pending.append(pool.submit(block))
            while pending and (pending[0].done() or len(pending) > _AHEAD * pool.workers()):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def in_threads(
    function: Callable[[_Item], _Found], items: Iterable[_Item], begin: Callable[[], object] | None = None
) -> Iterator[_Found]:
    """Yield a function's results in the order of the items, as `in_order` does with up to eight threads.

    Args:
        function: the function, which several threads call at a time.
        items: its arguments.
        begin: function that each thread calls once before its first item.

    Raises:
        Exception: the error of the first item whose call failed.
    """
    count = min(_MOST_THREADS, usable_cores())
    with ThreadPoolExecutor(count, initializer=begin) as threads:
        yield from in_order(items, Pool(lambda item: threads.submit(function, item), lambda: count))


@contextmanager
def devices_pool(
    setup: Setup,
    devices: list[str],
    dask: str | Client | None = None,
    remedy: str = _RESUME,
    here: bool = False,
    module: str | None = None,
    shared: _SharedMemory | None = None,
    apart: bool = False,
) -> Iterator[Pool]:
    """Yield a pool that computes blocks on devices.

    A thread of this process uses a single device. Each of several devices has a process; the processes share a queue,
    so that a faster one computes more blocks. Warnings of a process are given in this one too.

    Args:
        setup: function that returns the function that computes blocks on a device.
        devices: a device for each process; the workers of a cluster all use the first one.
        dask: a cluster, by the address of its scheduler or a client. Blocks of a lost worker go to other workers.
        remedy: what to do where the system ends a process, for the error.
        here: let this thread use a single device, so that Ctrl-C ends a block that takes long.
        module: name of a module that is imported before processes are copied; default: that of `setup`.
        shared: memory through which blocks and results go.
        apart: give a single device a process too, and start all at once. A process loads PyTorch and the model again,
            but neither waits for the other's Python.

    Raises:
        BadConfig: there is no scheduler at the address.
        MissingBackend: the package distributed is not installed.
        ProcessEnded: the system ended a process, for example when memory was short, or a process could not start.
    """
    memory = shared or _SharedMemory(0)
    if dask is not None:
        with _cluster(setup, devices[0], dask) as pool:
            yield pool
    elif apart or len(devices) > 1:
        with _processes(setup, devices, remedy, module, memory, apart) as pool:
            yield pool
    elif here:
        yield Pool(partial(_done, setup(devices[0])), lambda: 1)
    else:
        with _ended(ThreadPoolExecutor(1)) as thread:
            work = thread.submit(setup, devices[0])  # kept here: other runs of this process have threads too
            yield Pool(lambda block: thread.submit(lambda: work.result()(memory.unpack(block))), lambda: 1)


@contextmanager
def helpers_pool(
    count: int, module: str, shared: _SharedMemory | None = None
) -> Iterator[Callable[[Work, bool], Pool]]:
    """Yield a function that returns the pool of a stage; processes of one core each serve all stages.

    The arguments of the function are the work of the stage, and whether it is so fast that this thread can do it until
    the processes have started, which takes seconds.

    Args:
        count: number of processes. A worker of a multiprocessing.Pool may not start any: see `may_have_children`.
        module: name of the module that does the work, which is imported before processes are copied.
        shared: as of `devices_pool`.

    Raises:
        ProcessEnded: as `devices_pool`.
    """
    context, memory = _context(module), shared or _SharedMemory(0)
    begun = context.Event()
    executor = ProcessPoolExecutor(count, context, initializer=_begin_helper, initargs=(begun, memory))
    with _ended(executor), _in_words(begun.is_set), _started(executor, count):

        def submit(work: Work, quick: bool, block: Any) -> Future[Any] | _WithWarnings:
            if begun.is_set() or not quick:
                return _WithWarnings(executor.submit(_with_warnings, work, memory.pack(block)))
            return _done(work, memory.unpack(block))

        yield lambda work, quick: Pool(partial(submit, work, quick), lambda: count)


@dataclass(frozen=True)
class Stages:
    """The stages of a block; each can run in another process.

    Attributes:
        prepare: function that turns a block into what is computed.
        setup: function that returns, for a device, the function that computes it.
        finish: function that converts the result.
    """

    prepare: Work
    setup: Setup
    finish: Work

    def whole(self, device: str) -> Work:
        """Return all stages as one function on a device."""
        work = self.setup(device)
        return lambda block: self.finish(work(self.prepare(block)))


def helpers_for(devices: Sequence[str], dask: object = None) -> int:
    """Return how many processes prepare and finish blocks beside GPUs; 0 on CPUs and clusters, where the process that
    computes a block does all."""
    on_gpu = dask is None and devices[0] != "cpu"
    return max(2, min(_HELPERS, usable_cores() - len(devices))) if on_gpu else 0


def through(
    blocks: Iterable[Any],
    stages: Stages,
    devices: list[str],
    module: str,
    helpers: int = 0,
    slow: bool = False,
    dask: str | Client | None = None,
    written: bool = True,
    size: int = 0,
) -> Iterator[Any]:
    """Yield the result of all stages for each block, in order.

    Args:
        blocks: the blocks.
        stages: stages of each block.
        devices, dask: as for `devices_pool`.
        module: name of the module of the stages, which is imported before processes are copied.
        helpers: number of processes that prepare and finish; with 0, and where this process may start none, the
            process that computes a block does all.
        slow: True if preparing a block takes so long that it is left to the helpers from the first one on.
        written: whether results are written as they come, for the error about a process that the system ended.
        size: bytes of the input; beside helpers, a single device has a separate process for a large one.
    """
    remedy, here = _RESUME if written else _LOST, len(devices) == 1 and devices[0] == "cpu" and dask is None
    with nullcontext() if here else _one_thread():
        if not helpers or not may_have_children():
            with devices_pool(stages.whole, devices, dask, remedy, module=module) as pool:
                yield from in_order(blocks, pool)
            return
        # the device first: its model is loaded while the processes start
        with (
            _SharedMemory.of(4 * helpers + 8) as shared,
            devices_pool(stages.setup, devices, None, remedy, False, module, shared, size > _LARGE) as pool,
            helpers_pool(helpers, module, shared) as helping,
        ):
            prepared = in_order(blocks, helping(stages.prepare, not slow))
            yield from map(shared.unpack, in_order(in_order(prepared, pool), helping(stages.finish, True)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give this process one thread for numbers while it passes on what others compute: waiting threads take all
    cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _started(executor: ProcessPoolExecutor, count: int) -> Iterator[None]:
    """Let a thread start all processes, which takes seconds, instead of one for each block that is submitted."""

    def start() -> None:
        with suppress(BrokenProcessPool):  # told where a result is requested
            for _ in range(count):
                executor.submit(int)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def rate_text(count: int, seconds: float) -> str:
    """Return how many of something there are in a second, with three digits."""
    return f"{float(f'{count / max(seconds, 1e-9):.3g}'):,g}"


def left_text(seconds: float) -> str:
    """Return the time left as the end of a line of progress."""
    return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"


def may_have_children() -> bool:
    """Return whether this process may start others; a worker of a multiprocessing.Pool may not."""
    return not multiprocessing.current_process().daemon


def _context(module: str) -> Any:
    """Return how processes start: where the system can do it, as copies of one that has imported a module."""
    if sys.platform == "linux":  # Windows cannot copy processes, and macOS not safely those with PyTorch
        from multiprocessing import forkserver

        context = multiprocessing.get_context("forkserver")
        before = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
        context.set_forkserver_preload([module, *_IMPORTED])  # for the whole program, until the server runs
        threads = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(dict.fromkeys(_THREADS, "1"))  # each process has one core, also for the libraries of NumPy
        try:
            with suppress(OSError):  # the path of the folder for temporary files is too long for a socket
                forkserver.ensure_running()
                return context
        finally:
            context.set_forkserver_preload(before)
            for name, number in threads.items():
                os.environ.pop(name)
                if number is not None:
                    os.environ[name] = number
    return multiprocessing.get_context("spawn")


def _done(work: Work, block: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work(block))
    except Exception as error:  # raised where the result is requested, as those of other processes
        future.set_exception(error)
    return future


@contextmanager
def _cluster(setup: Setup, device: str, dask: str | Client) -> Iterator[Pool]:
    """Yield the pool of a cluster's workers."""
    with needs_extra("dask"):
        from distributed import Client, KilledWorker
    if isinstance(dask, str):
        try:
            client = Client(dask, timeout=30)
        except (OSError, ValueError) as error:
            raise BadConfig(f"dask: there is no scheduler at '{dask}' ({error})") from error
    else:
        client = dask
    job = uuid.uuid4().hex
    try:
        client.wait_for_workers(1)
        yield Pool(
            lambda block: client.submit(_run_job, job, setup, device, block, pure=False),
            lambda: max(1, len(client.scheduler_info(n_workers=-1)["workers"])),
        )
    except KilledWorker as error:
        raise ProcessEnded(f"several workers of the cluster were ended from outside by the same block: {error}; "
                           "the results so far are written") from None  # fmt: skip
    finally:
        if client is not dask:
            client.close()


def _run_job(job: str, setup: Setup, device: str, block: Any) -> Any:
    """Compute a block on a worker of a cluster, which may have several threads and serve several runs."""
    with _LOCK:
        work = _jobs.pop(job, None) or setup(device)
        _jobs[job] = work  # the last one
        while len(_jobs) > _JOBS:
            del _jobs[next(iter(_jobs))]
        return work(block)


@contextmanager
def _processes(
    setup: Setup, devices: list[str], remedy: str, module: str | None, shared: _SharedMemory, at_once: bool
) -> Iterator[Pool]:
    """Yield the pool of devices of this host that have a process each."""
    if not may_have_children():
        raise BadConfig("devices: a worker of a multiprocessing.Pool cannot start processes: name one device there")
    context = _context(module or getattr(setup, "func", setup).__module__)
    queue, begun = context.SimpleQueue(), context.Event()
    for device in devices:
        queue.put(device)
    given = setup, queue, begun, shared
    executor = ProcessPoolExecutor(len(devices), context, initializer=_begin_process, initargs=given)
    starting = _started(executor, len(devices)) if at_once else nullcontext()
    with _ended(executor), _in_words(begun.is_set, remedy), starting:
        yield Pool(lambda block: _WithWarnings(executor.submit(_run, shared.pack(block))), lambda: len(devices))


@contextmanager
def _ended(executor: _Executor) -> Iterator[_Executor]:
    """End an executor with the block; after an error in it, what waits is not computed, nor finished in processes."""
    try:
        yield executor
    except BaseException:
        for process in list(getattr(executor, "_processes", None) or ()):
            with suppress(OSError):  # it has ended
                os.kill(process, signal.SIGINT)
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _in_words(begun: Callable[[], bool], remedy: str = _RESUME) -> Iterator[None]:
    """Turn the end of a process into an error with the reason and the remedy.

    Args:
        begun: function that returns whether a process has started to work.
        remedy: what to do where one was ended later.
    """
    try:
        yield
    except BrokenProcessPool:
        if not begun():
            raise ProcessEnded(
                "the processes could not start. Each of them imports the running script: put its "
                "work under `if __name__ == '__main__':`"
            ) from None
        raise ProcessEnded(
            f"a process was ended from outside, as the system does when memory is short; {remedy}"
        ) from None


def _begin_process(setup: Setup, queue: Any, begun: Event, shared: _SharedMemory) -> None:
    global _work
    _begin_helper(begun, shared)
    try:
        _work = setup(queue.get())
    except Exception as error:
        _work = partial(_refuse, error)


def _refuse(error: Exception, block: Any) -> None:
    """Raise the error of a setup, where a result is requested."""
    raise error


def _begin_helper(begun: Event, shared: _SharedMemory) -> None:
    global _shared
    import torch

    _shared = shared
    signal.signal(signal.SIGINT, _interrupt)
    begun.set()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # each process has one core


def _end_with_parent() -> None:
    """End this process with its parent, which cannot do so if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(block: Any) -> tuple[Any, list[tuple[str, type[Warning]]]]:
    return _with_warnings(_work, block)


def _interrupt(*_: Any) -> None:
    """Compute no more blocks."""
    global _stopped
    _stopped = True
    if _busy:
        raise KeyboardInterrupt


def _with_warnings(work: Work, block: Any) -> tuple[Any, list[tuple[str, type[Warning]]]]:
    """Return the result of a block, in the slot of the block if it has one, and warnings."""
    global _busy, _stopped
    _busy = True
    try:
        if _stopped:
            raise KeyboardInterrupt
        with warnings.catch_warnings(record=True) as caught:
            found = _shared.put(work(_shared.take(block)), block.slot) if isinstance(block, _Parcel) else work(block)
    except KeyboardInterrupt:  # also of work that takes signals itself
        _stopped = True
        raise
    finally:
        _busy = False
    return found, [(str(one.message), one.category) for one in caught]


class _WithWarnings:
    """The future of what `_with_warnings` returns in another process; warnings are given with the result."""

    def __init__(self, future: Future[Any]):
        self._future, self.done, self.cancel, self.cancelled = future, future.done, future.cancel, future.cancelled

    def result(self) -> Any:
        found, given = self._future.result()
        for words, category in given:
            warnings.warn(words, category, stacklevel=2)
        return found


class Journal:
    """Appends blocks to the files of a run, so that each block is complete or absent.

    The number of finished records and the sizes of the files are written to `OUT.progress` by a thread that waits for
    the disk: after each block, but for at most a fifth of the time. A run that finds this file cuts the files to these
    sizes, which removes what came later, and continues. The file is removed at the end. A run that fails before its
    first block is written leaves nothing. No other run may write the files meanwhile, see `core.files.claimed`.

    Args:
        output: the file of results, which determines the name of the state.
        files: all files that grow.
        job: description of the job as plain data for JSON.

    Attributes:
        done: number of records of the input whose results are in the files.
        kept: what the run carries along, as plain data for JSON; None before anything was kept.

    Raises:
        BadConfig: the files belong to an unfinished run of another job.
        OSError: they cannot be written.
    """

    def __init__(self, output: Path, files: Sequence[Path], job: dict[str, Any]):
        self._output, self._paths = output, files
        self._state = output.with_name(output.name + ".progress")
        self._job = json.loads(json.dumps(job))
        self.kept: Any = None
        self._resume()
        self._files = [open(path, "ab", buffering=0) for path in self._paths]
        for file, size in zip(self._files, self._sizes, strict=True):
            file.truncate(size)
        self._is_saved, self._next = True, -math.inf
        self._disk, self._saving = ThreadPoolExecutor(1), Future[None]()
        self._saving.set_result(None)

    def _resume(self) -> None:
        """Take over the state of an interrupted run, or begin."""
        found = json.loads(self._state.read_text()) if self._state.exists() else None
        if found and found["records"]:
            if found["job"] != self._job:
                changed = sorted(k for k in {*found["job"], *self._job} if found["job"].get(k) != self._job.get(k))
                raise BadConfig(
                    f"{self._output} belongs to an interrupted run that differs in {', '.join(changed)}: give the same "
                    f"command to finish it, or remove {self._state} to start again"
                )
            self.kept, self.done, self._sizes = found.get("kept"), found["records"], found["sizes"]
            return
        if found is None:  # else the files are those of a run that was killed in its first block
            self._spare_others()
            for path in self._paths:
                keep_old(path)
        self.done, self._sizes = 0, [0] * len(self._paths)
        atomic_write(self._state, self._text())

    def _spare_others(self) -> None:
        """Refuse files of an interrupted run with another output, such as the failures beside NAME.xyz and NAME.csv."""
        for state in self._output.parent.glob(f"{escape(self._output.stem)}*.progress"):
            try:
                theirs = json.loads(state.read_text()).get("files", [])
            except ValueError:
                continue
            for name in theirs:
                if name in [path.name for path in self._paths]:
                    raise BadConfig(
                        f"{self._output.with_name(name)} belongs to the interrupted run that writes "
                        f"{state.with_suffix('').name}: finish that run first, or choose an output with another name"
                    )

    def _text(self) -> str:
        """Return the state as the file has it."""
        files = [path.name for path in self._paths]
        state = {"records": self.done, "sizes": self._sizes, "files": files, "kept": self.kept, "job": self._job}
        return json.dumps(state, indent=1)

    def commit(self, records: int, *texts: str | bytes, kept: Any = None) -> None:
        """Append the results of a block.

        Args:
            records: number of records of the input in the block.
            texts: text for each file.
            kept: the attribute from now on.

        Raises:
            OSError: they, or those of an earlier block, cannot be written, as on a full disk; names the file.
        """
        for file, text in zip(self._files, texts, strict=True):
            append(file, text.encode() if isinstance(text, str) else text)
        sizes = [file.tell() for file in self._files]
        # together, after all texts: `close` saves the state of complete blocks also after an error
        self.done, self._sizes, self.kept, self._is_saved = self.done + records, sizes, kept, False
        if self._saving.done():
            self._saving.result()
            if time.monotonic() >= self._next:
                self._saving, self._is_saved = self._disk.submit(self._sync, self._text()), True

    def _sync(self, state: str) -> None:
        began = time.monotonic()
        for file in self._files:
            os.fsync(file.fileno())
        atomic_write(self._state, state)
        now = time.monotonic()
        self._next = now + 4 * (now - began)  # appending may block while the disk is written

    @contextmanager
    def writing(self, what: str, continues: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Close the files at the end. After Ctrl-C, the error says that the same command continues.

        Args:
            what: what the records are called.
            continues: function that returns whether a run that failed can be continued; see `close`.
        """
        finished = False
        try:
            yield
            finished = True
        except KeyboardInterrupt as stop:
            if self.done:
                raise KeyboardInterrupt(f"interrupted: the same command continues after {self.done} {what}") from stop
            raise
        finally:
            self.close(finished, continues())

    def close(self, finished: bool, continues: bool = True) -> None:
        """Close the files; remove the state of a finished run, and all of a run that failed before its first block.

        Args:
            finished: whether all blocks are written.
            continues: False for a run that failed so that it cannot be continued; all of it is removed.
        """
        left = self.done and continues and not finished
        try:
            self._saving.result()
            if left and not self._is_saved:
                self._sync(self._text())
        finally:
            self._disk.shutdown()
            for file in self._files:
                file.close()
        if not left:
            self._state.unlink()
        if not (finished or left):
            for path in self._paths:
                path.unlink()
