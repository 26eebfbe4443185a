"""Write files so that none is torn or lost: written aside, flushed to disk, then renamed; inputs are never written.

HDF5 files are opened here, too, and files of records are cut into texts.
"""

from __future__ import annotations

import errno
import lzma
import os
import re
import tempfile
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import BadConfig, BadData, MissingBackend

__all__ = [
    "DAMAGE", "Run", "append", "atomic_write", "claimed", "damage_is_bad_data", "keep_old", "load_h5py", "locked",
    "old_name", "opened", "opened_hdf5", "require_plain", "runs_of_records", "same_file", "spare_inputs", "try_lock",
    "umask", "user_cache", "written_aside",
]  # fmt: skip

if TYPE_CHECKING:
    import h5py


def atomic_write(path: str | os.PathLike, content: bytes | str, keep: bool = False) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new, never a part.

    Args:
        path: where the file goes; its folder must exist.
        content: bytes, or text (written as UTF-8).
        keep: keep a file that is there already under its `old_name`.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    with written_aside(path, keep) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_aside(path: str | os.PathLike, keep: bool = False) -> Iterator[BinaryIO]:
    """Yield a temporary file, which gets its name when the block ends and is removed if the block raises.

    Args, Raises: as `atomic_write`.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~umask())
        if keep:
            keep_old(path)
        os.replace(aside, path)
    except BaseException as error:
        Path(aside).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk does not say which file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append(file: BinaryIO, content: bytes) -> None:
    """Append to an unbuffered file all of the content or, where it cannot be written, nothing of it.

    Raises:
        OSError: it cannot be written; names the file.
    """
    before = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException as error:  # a full disk takes a part first; an interruption may come in between
        file.truncate(before)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, file.name) from error
        raise


def opened(file: BinaryIO, name: str) -> Any:
    """Return the file, decompressed if its name ends in .gz, .bz2 or .xz."""
    import bz2
    import gzip
    import lzma

    reader: Any = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}.get(Path(name).suffix.lower())
    if reader is None:
        return nullcontext(file)
    return reader(fileobj=file) if reader is gzip.GzipFile else reader(file)


class Run(NamedTuple):
    """Consecutive records of a file as one text.

    Attributes:
        number: number of the first record in the file.
        begin: number of bytes before it, of the decompressed file.
        text: the records; None of the last run if the rest of the file must be read line by line, from `begin` on.
        part: how much of the bytes that have been read it and the runs before it hold, 0 to 1.
        last: whether it ends the file. The last run may have any number of records, also none.
    """

    number: int
    begin: int
    text: bytes | None
    part: float = 1.0
    last: bool = False


_READ = 2**24  # bytes that are read together


def runs_of_records(
    file: BinaryIO,
    cut: Callable[[bytes], tuple[list[int], bool]] | None,
    size: int,
    first: int = 0,
    most: int = 2**26,
) -> Iterator[Run]:
    """Cut a file of records into texts, so that other processes can parse them.

    Args:
        file: the file, decompressed, at its beginning.
        cut: function that finds whole records at the beginning of a text: where they end, and whether something else
            follows, for which the file must be read line by line. None: all of the file.
        size: number of records in a run; large records and those before damage may be fewer.
        first: number of the first record that is wanted.
        most: bytes from which on a run has fewer records.
    """
    number, begin, text, damaged = 0, 0, b"", cut is None
    while cut is not None and not damaged:
        try:
            more = file.read(_READ)
        except (EOFError, OSError, zlib.error, lzma.LZMAError):  # found again, after the records before it
            damaged = True
            break
        if not more:
            break
        text += more
        ends, damaged = cut(text)
        start = done = 0
        while len(ends) > done and (len(ends) - done >= size or damaged or len(text) - start > most):
            count = max(1, min(size, bisect_right(ends, start + most) - done))
            if number < first:
                count = min(count, first - number)
            end = ends[done + count - 1]
            if number >= first:
                yield Run(number, begin + start, text[start:end], (begin + end) / (begin + len(text)))
            number, done, start = number + count, done + count, end
        text, begin = text[start:], begin + start
    yield Run(number, begin, None if damaged else text, last=True)


_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # marks of UTF-16, also the beginning of that of UTF-32


def require_plain(path: str | os.PathLike) -> None:
    """Refuse a file that is compressed and does not say so by its name, or the other way round, and text in UTF-16.

    Raises:
        BadData: it is; names the remedy. What is not a file, or cannot be opened, passes.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(6)
    except OSError:
        return
    suffix = Path(path).suffix.lower()
    packed = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    if packed and packed != suffix:
        raise BadData(f"{path}: its content is compressed, as that of a {packed} file: rename it to {path}{packed}")
    if suffix in _MAGIC.values() and not packed and head:
        raise BadData(f"{path}: its content is not compressed, though its name ends in {suffix}: remove this ending")
    wide = head.startswith(_WIDE) or re.match(rb"[\x09-\x7f]\0[\x09-\x7f]\0", head)
    if wide and not packed:
        raise BadData(f"{path}: its text is in UTF-16: save it as UTF-8, for example by iconv -f UTF-16 -t UTF-8")


def old_name(path: Path) -> Path:
    """Return the name that a file gets when a new file takes its name."""
    return path.with_name(path.name + ".old")


def keep_old(path: Path) -> None:
    """Rename a file, if it is there, to its `old_name`; one of an earlier time is replaced."""
    if os.path.lexists(path):
        os.replace(path, old_name(path))


@contextmanager
def claimed(*paths: Path) -> Iterator[None]:
    """Keep other runs, of this process or another one, from writing files of these names within the block.

    Enter it before the files are read, as to continue them. A file `.NAME.lock` beside each is locked meanwhile; the
    end of the process frees it, whatever the cause. What a killed run has written aside is removed.

    Raises:
        BadConfig: another run has claimed a name, or the file of a lock belongs to another user.
        OSError: the folder does not exist or cannot be written.
    """
    with ExitStack() as held:
        for path in dict.fromkeys(paths):
            held.enter_context(_claimed(path))
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Claim one name, as `claimed`.

    Raises:
        BlockingIOError: another run has claimed it.
        BadConfig: the file of the lock is one that cannot be opened.
        OSError: as `claimed`, or the lock fails.
    """
    lock = path.with_name(f".{path.name}.lock")
    file = _locked(lock, path)
    try:
        yield
    finally:
        if os.name == "nt":
            file.close()  # nobody can remove an open file there, also not one that another run has opened meanwhile
        with suppress(OSError):
            lock.unlink()  # while it is locked: else it could be the lock of a run that begins now
        if os.name != "nt":
            _unlock(file.fileno())  # also for processes that inherit it
        file.close()


@contextmanager
def _claimed(path: Path) -> Iterator[None]:
    with ExitStack() as held:
        try:
            held.enter_context(locked(path))
        except BlockingIOError:
            raise BadConfig(
                f"{path}: another run writes to this file; wait for its end, or choose another output"
            ) from None
        _sweep(path)
        yield


def _sweep(path: Path) -> None:
    """Remove incomplete files of a killed run, which has written the file, or its state, aside."""
    for aside in path.parent.glob(f".{escape(path.name)}.*") if path.suffix else ():  # not those of a prefix
        if re.fullmatch(r"(\.progress)?\.[a-z0-9_]{8}", aside.name[len(path.name) + 1 :]):
            with suppress(OSError):
                aside.unlink()


def _locked(lock: Path, path: Path) -> BinaryIO:
    while True:
        try:
            file = open(lock, "ab")
        except OSError as error:
            if not lock.exists():
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise BadConfig(
                f"{lock}: this file, which guards {path}, cannot be opened ({error.strerror}): a run of another user "
                "writes there, or has left it. Choose another output, or remove this file once no such run is left"
            ) from None
        try:
            try_lock(file.fileno(), path)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        except FileNotFoundError:  # a run that ended has removed it since it was opened
            pass
        except BaseException:
            file.close()
            raise
        file.close()


_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""Errors of file systems without locks."""


def try_lock(handle: int, path: Path) -> None:
    """Lock an open file until it is closed; on a file system without locks, warn of that.

    Args:
        handle: of the file, which is open for writing: NFS needs that.
        path: what it guards, for messages.

    Raises:
        BlockingIOError: it is locked.
        OSError: it cannot be locked for another reason; names `path`.
    """
    try:
        try:
            import fcntl
        except ImportError:  # Windows
            import msvcrt

            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            except PermissionError as error:
                raise BlockingIOError(error.errno, error.strerror) from None
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, f"it cannot be locked against other runs: {error.strerror}", str(path)) from None
        warnings.warn(
            f"{path.parent}: this file system has no locks ({error.strerror}); take care that no second run writes the "
            "same files",
            stacklevel=2,
        )


def _unlock(handle: int) -> None:
    with suppress(ImportError, OSError):  # Windows has no processes that inherit it
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)


def same_file(one: Path, other: Path) -> bool:
    """Return whether two paths are the same file, also through links, or with a name in another case if the system
    allows it."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


def spare_inputs(written: Iterable[Path], read: Iterable[Path], remedy: str) -> None:
    """Refuse output files that are also inputs. Every command that writes files calls this before it computes.

    Args:
        written: files that will be written; those that are there are kept by `keep_old`, which replaces a file too.
        read: files that are read.
        remedy: what to do about it.

    Raises:
        BadConfig: a file would be both, or a folder has the name of a file.
    """
    inputs = list(read)
    for path in written:
        if path.is_dir():
            raise BadConfig(f"{path} is a folder, and a file of this name would be written: {remedy}")
        for target in (path, old_name(path)) if os.path.lexists(path) else (path,):
            if any(same_file(target, source) for source in inputs):
                raise BadConfig(f"{target} is read by this command and would be written too: {remedy}")


def umask() -> int:
    """Return the process's mask of permissions."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def user_cache() -> Path:
    """Return the folder of this package in the user's cache; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchmdnet2"


# --- HDF5 files, by the optional package h5py ---

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


def opened_hdf5(path: str | os.PathLike) -> h5py.File:
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
