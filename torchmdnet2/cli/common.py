"""Parts that the commands share: options, output files, tables, structures of files."""

from __future__ import annotations

import argparse
import codecs
import errno
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

__all__ = [
    "Command", "Run", "add_allow_untrained_charge", "add_charges", "add_coulomb", "add_device", "add_devices",
    "add_model", "add_plugin", "add_precision", "data_of_training", "device_name", "frame_numbers", "import_plugins",
    "keeping", "make_console", "names_options", "note", "opening", "output_file", "output_prefix", "print_json",
    "print_table", "read_frames", "read_structure", "refuse_idle", "refuse_other_charge", "split_index",
    "steady_streams",
]  # fmt: skip


_PLAIN = {"−": "-", "–": "-", "→": "->", "≤": "<=", "≥": ">=", "·": "*", "×": "x", "μ": "u", "σ": "sigma", "Δ": "D"}


def steady_streams() -> None:
    """Keep commands running despite closed streams (>&-), characters that a terminal cannot show, and the end of what
    reads the standard error."""
    codecs.register_error("torchmdnet2.nearest", _nearest)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):  # not within notebooks
            stream.reconfigure(errors="torchmdnet2.nearest")
    if not isinstance(sys.stderr, _Notes):
        sys.stderr = _Notes(sys.stderr)  # type: ignore[assignment]


class _Notes:
    """The standard error. Notes and progress that cannot be written are dropped, as when its reader has left or the
    terminal was closed: they are no reason to end a run."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except OSError:
            from ..core.console import silence

            silence(self._stream)
            return 0


def _nearest(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the stream's encoding lacks: A for Å, 3 for ³, else ?."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not text
        return bytes([ord(character) - 0xDC00]), error.start + 1
    plain = unicodedata.normalize("NFKD", character)
    return "".join(_PLAIN.get(c, c) for c in plain if _PLAIN.get(c, c).isascii()) or "?", error.start + 1


# --- Options that several commands share ---

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console


Command = Callable[..., argparse.ArgumentParser]
"""Creates the parser of a command: name, function that runs it, one line of help."""

Run = Callable[[argparse.Namespace], int | None]
"""Runs a command; returns its exit code, None for 0."""


def names_options(run: Run) -> Run:
    """Decorator: where an error begins with the name of an argument ("fmax must be", "seed=1 has no effect"), name the
    option (--fmax, --seed 1)."""

    @wraps(run)
    def named(options: argparse.Namespace) -> int | None:
        try:
            return run(options)
        except ValueError as error:
            name = re.match(r"(\w+)(?=:|=| must | need | has no effect)", str(error))
            if name and f"--{name[0]}" in options.parser._option_string_actions:
                words = re.sub(rf"\b{name[0]}=('?)([^\s':;,]+)\1", rf"--{name[0]} \2", str(error))
                error.args = (words if words.startswith("--") else f"--{words}",)
            raise

    return named


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """Declare --plugin; `import_plugins` reads it."""
    words = "Python file that registers a model, prior, data format, …; it is run; repeatable"
    parser.add_argument("--plugin", action="append", default=[], metavar="FILE", help=words)


def import_plugins(options: argparse.Namespace) -> None:
    """Import the files of --plugin.

    Raises:
        BadConfig: one is missing, fails to be imported, or registers nothing.
    """
    from ..errors import BadConfig
    from ..registry import import_plugin

    for path in options.plugin:
        try:
            import_plugin(path)
        except (OSError, ValueError) as error:
            raise BadConfig(f"--plugin: {error}") from error


def add_charges(parser: argparse.ArgumentParser) -> None:
    """Declare --charge and --spin of the structures, and --allow-untrained-charge."""
    parser.add_argument("--charge", type=_charge, help="total charge in e, where a structure states none (default: 0)")
    parser.add_argument("--spin", type=int, help="multiplicity 2S+1, where a structure states none")
    add_allow_untrained_charge(parser)


def _charge(text: str) -> int:
    from ..core.stated import whole_number

    try:
        return whole_number(text, "charge")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(";")[0]) from None


def refuse_other_charge(options: argparse.Namespace, atoms: Atoms, source: str) -> None:
    """Refuse a --charge or --spin that differs from the file's; the message names both values.

    Args:
        options: options of a command with `add_charges`.
        atoms: the only structure of the command.
        source: its file, for the message.

    Raises:
        BadConfig: the values differ.
    """
    from ..core.stated import Statement, confirmed
    from ..errors import BadConfig, BadData

    for name in ("charge", "spin"):
        own = atoms.info.get(name) or (0 if name == "charge" and name in atoms.info else None)
        stated = [] if own is None else [Statement(int(own), source)]
        try:
            confirmed(stated, name, getattr(options, name), f"--{name}")
        except BadData as error:
            raise BadConfig(f"--{name}: {error}") from None


def refuse_idle(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse given options that have no effect.

    Args:
        options: options of a command; those that are not given are None or False.
        names: names of options without effect, as attributes.
        why: the reason, for the message.

    Raises:
        BadConfig: one of them is given; the message names it.
    """
    from ..errors import BadConfig

    for name in names:
        if getattr(options, name) not in (None, False):
            raise BadConfig(f"--{name.replace('_', '-')} has no effect: {why}")


def add_allow_untrained_charge(parser: argparse.ArgumentParser) -> None:
    words = "evaluate total charges that the model was not trained on or does not use, which are refused otherwise"
    parser.add_argument("--allow-untrained-charge", action="store_true", help=words)


def add_coulomb(parser: argparse.ArgumentParser) -> None:
    """Declare --coulomb, for models that sum over all pairs of a molecule."""
    parser.add_argument(
        "--coulomb", choices=("pme", "dsf"), default="pme",
        help="sum of Coulomb energies in periodic cells: particle-mesh Ewald, or damped shifted force (default: pme)",
    )  # fmt: skip


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Declare --precision of the Evaluator."""
    parser.add_argument(
        "--precision", choices=("native", "mixed"), default="native",
        help="of the kernels on a GPU; mixed is faster, for TensorNet (default: native)",
    )  # fmt: skip


def add_model(parser: argparse.ArgumentParser, more: str = "", nargs: str | None = None) -> None:
    """Declare the argument of the model, and --level; `opening` reads them.

    Args:
        parser: parser of a command.
        more: end of the help text.
        nargs: number of arguments, as in argparse.
    """
    parser.add_argument("model", nargs=nargs, help=f".tmn file, or a name that `torchmdnet2 models` lists{more}")
    words = "level of theory, for a model that was trained on several (default: the first in `torchmdnet2 info`)"
    parser.add_argument("--level", metavar="NAME", help=words)


def data_of_training(potential: Any) -> dict[str, Any]:
    """Return the section `data` of the training of a potential, as plain data; keys and units are those of the first
    source of its level of theory. Empty if its file states none."""
    config = potential.metadata.get("config")
    data = (config.get("data") or {}) if isinstance(config, dict) else {}  # metadata may hold anything
    own = [source for source in data.get("sources") or [] if source["level"] == potential.level_of_theory]
    return {**data, **{name: own[0][name] for name in ("keys", "units") if own and own[0].get(name)}}


def opening(options: argparse.Namespace, models: Sequence[str], quiet: bool = False) -> dict[str, Any]:
    """Return the arguments of `torchmdnet2.load` that the options of a command give, by name.

    The level of theory is checked, and printed if a model has several.

    Args:
        options: options from `add_model`, `add_device`, `add_coulomb`, `add_allow_untrained_charge`.
        models: models of the command line.
        quiet: True if another process prints the level.

    Raises:
        FileNotFoundError, BadCheckpoint: a model does not exist, or its file is damaged.
        BadConfig: a model does not have the level; the message lists its levels.
    """
    from ..checkpoint import read_header
    from ..ensemble import model_files
    from ..errors import BadConfig
    from ..potential.levels import chosen_level

    for file in [file for model in models for file in model_files(model)]:
        levels = read_header(file)["levels"]
        try:
            taken = chosen_level(options.level, levels) if options.level else None
        except ValueError as error:
            raise BadConfig(f"--{error} ({file})") from None
        if len(levels) > 1 and not quiet:
            others = ", ".join(name for name in levels if name != (taken or levels[0]))
            note(f"{file}: level of theory {taken or f'{levels[0]}, the default'}; --level chooses {others}")
    names = ("device", "dtype", "allow_untrained_charge", "coulomb", "level")
    found = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return {**found, **({"device": device_name(found["device"])} if "device" in found else {})}


def add_device(parser: argparse.ArgumentParser, dtype: str | None) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default: auto)")
    _add_dtype(parser, dtype, dtype or "as stored")


def add_devices(parser: argparse.ArgumentParser, words: str = "as stored") -> None:
    """Declare --devices, of a command that can use several, and --dtype; `words` say what its default means."""
    meaning = "auto, all, or names such as cuda:0,cuda:1 or cpu,cpu, with a process for each (default: auto)"
    parser.add_argument("--devices", default="auto", help=meaning)
    _add_dtype(parser, None, words)


def _add_dtype(parser: argparse.ArgumentParser, dtype: str | None, words: str) -> None:
    parser.add_argument("--dtype", default=dtype, help=f"float32 or float64, of the network (default: {words})")


def make_console(stderr: bool = False) -> Console:
    from ..core.console import SteadyConsole

    return SteadyConsole(stderr=stderr)


def device_name(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def output_file(path: str, suffixes: tuple[str, ...], inputs: Iterable[str], name: str) -> Path:
    """Check, before anything is computed, that a command can write a file.

    Args:
        path: the given path.
        suffixes: allowed suffixes.
        inputs: files that the command reads.
        name: name of the argument.

    Raises:
        BadConfig: the path has another suffix, is a folder, or is one of the inputs.
        FileNotFoundError: the folder does not exist.
    """
    from ..core.files import spare_inputs
    from ..errors import BadConfig

    file = Path(path)
    if file.suffix.lower() not in suffixes:
        raise BadConfig(f"{name}: '{path}' must end in {' or '.join(suffixes)}")
    spare_inputs([file], map(Path, inputs), f"choose another {name}")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {file.parent}")
    return file


def output_prefix(output: str, name: str, files: Callable[[Path], Iterable[Path]], inputs: Iterable[str]) -> Path:
    """Check, before anything is computed, the prefix of the files that a command will write; return it.

    Args:
        output: the given prefix, or a folder.
        name: name of the files in a folder.
        files: function that returns all files that may be written for a prefix.
        inputs: files that the command reads.

    Raises:
        BadConfig: the command would overwrite an input.
        OSError: the files cannot be written.
    """
    from ..core.files import spare_inputs

    prefix = Path(output)
    if output.endswith(("/", "\\")) or prefix.is_dir():
        prefix /= name
    spare_inputs(files(prefix), map(Path, inputs), "choose another --output")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(prefix.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(prefix.parent))
    return prefix


def print_table(
    title: str, heads: Iterable[str], rows: Iterable[Sequence[str]], left: Iterable[int] = (), whole: Iterable[int] = ()
) -> None:
    """Print a table of numbers; columns in `left` are text, and those in `whole` are not broken into lines."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for k, head in enumerate(heads):
        text = k in left
        overflow: Literal["fold", "ellipsis"] = "fold" if text else "ellipsis"
        table.add_column(head, justify="left" if text else "right", overflow=overflow, no_wrap=k in whole)
    for row in rows:
        table.add_row(*row)
    console = make_console()
    if not left and console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        table.padding = 0  # rather than cut heads; text is broken into lines
    console.print(table, markup=False)


def print_json(facts: Any) -> None:
    """Print plain data as JSON; characters that the output cannot encode are escaped."""
    unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    print(json.dumps(facts, indent=1, ensure_ascii=not unicode))


def note(text: str) -> None:
    """Print a line to the standard error; scripts may read the output."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Report, after a block, also one that fails, the new name of an earlier file if the block has renamed it."""
    from ..core.files import old_name

    before = os.lstat(path) if os.path.lexists(path) else None
    try:
        yield
    finally:
        old = old_name(path)
        if before is not None and os.path.lexists(old) and os.path.samestat(before, os.lstat(old)):
            note(f"the earlier {path} was renamed to {old}")


def split_index(path: str) -> tuple[str, str | None]:
    """Return file and index of file@index; a name with an @ stays unchanged if such a file exists."""
    folder, name = os.path.split(path)
    if "@" not in name or Path(path).is_file():
        return path, None
    file, _, index = name.rpartition("@")
    return os.path.join(folder, file), index


def read_structure(path: str) -> Atoms:
    """Read the last structure of a file, or that of file@index.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: ASE cannot read the file, or it has no such structure.
    """
    from ..errors import BadData

    file, index = split_index(path)
    found = _read(file, index)
    if len(found.numbers) != 1:
        raise BadData(f"{path} selects several structures; choose one, as in file.xyz@0")
    if index is None and found.in_file > 1:
        note(f"{file} holds {found.in_file} structures; the last is used; choose another as {file}@0")
    (atoms,) = found.atoms
    if atoms.info.get("charge") or atoms.info.get("spin", 0) > 1:
        spin = f", multiplicity {atoms.info['spin']}" if atoms.info.get("spin") else ""
        note(f"{path} states the total charge {atoms.info.get('charge', 0)}{spin}")
    return atoms


def read_frames(path: str) -> tuple[list[Atoms], list[int]]:
    """Read all structures of a file, or those of file@index, and their numbers in the file, from 0.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: ASE cannot read the file, or it has no structures.
        BadConfig: the file has no structures with this index.
    """
    file, index = split_index(path)
    found = _read(file, index or ":")
    return found.atoms, found.numbers


class _Read(NamedTuple):
    """Structures of a file, their numbers in it, and the size of the file."""

    atoms: list[Atoms]
    numbers: list[int]
    in_file: int


def _read(file: str, index: str | None) -> _Read:
    """Return the structures with an index; None returns the last one."""
    from ..data.structures import open_structures, reason
    from ..errors import BadConfig, BadData
    from ..potentials import is_name

    name = file if index is None else f"{file}@{index}".rstrip("@:")
    if Path(file).is_dir():
        raise BadData(f"{file} is a folder; name a file in it")
    if file.endswith(".tmn"):
        raise BadData(f"{file} is a model file, but a structure is expected here: the model comes first")
    if not Path(file).is_file():
        if is_name(file):
            raise BadData(f"{file} is a potential, but a structure is expected here: the model comes first")
        raise FileNotFoundError(f"{name}: no such file")
    try:
        frames = open_structures(file)
        if not len(frames):
            raise BadData("it has no structures")
        numbers = frame_numbers(file, index or "-1", len(frames))
        return _Read([frames[k] for k in numbers], numbers, len(frames))
    except BadConfig:
        raise
    except BadData as error:
        raise BadData(str(error) if file in str(error) else f"{name}: {error}") from error
    except Exception as error:  # ASE's readers raise errors of any kind
        raise BadData(f"{name}: cannot be read as a structure: {reason(error)}") from error


def frame_numbers(file: str, index: str | None, count: int) -> list[int]:
    """Return the frames that file@index selects, counted from 0; -1 is the last.

    Args:
        file: name of the file, for messages.
        index: a number or a slice, such as 3 or 0:10:2; None selects all.
        count: number of frames in the file.

    Raises:
        BadConfig: the index is neither, or there is no such frame.
    """
    from ase.io.formats import string2index

    from ..errors import BadConfig

    where = f"{file}@{index}".rstrip(":")  # which a message adds
    try:
        meant = slice(None) if index is None else string2index(index)
        if isinstance(meant, str):
            raise ValueError
        numbers = range(count)
        found = list(numbers[meant]) if isinstance(meant, slice) else [numbers[meant]]
    except ValueError:
        raise BadConfig(f"{where}: '{index}' is not the number of a frame, nor a range such as 0:5") from None
    except IndexError:
        found = []
    if not found:
        raise BadConfig(f"{where}: no such frame; there are {count}, counted from 0 on")
    return found
