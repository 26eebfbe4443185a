"""The command `torchmdnet2`: train, evaluate, calibrate, md, stability, scan, learn, import, export, bench, card, …

Exit codes: 0 success, 1 an error (one line on stderr), 2 a mistake in the configuration or the command line,
130 interrupted, 143 terminated. Each command imports the libraries that it needs, so that --help is instant. Each
module here holds some commands: `add` declares their arguments, other functions run them.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from .common import add_plugin, import_plugins, steady_streams

__all__ = ["main"]

_SMALLER = {
    "train": "lower training.batch_size, or set training.max_atoms instead",
    "md": "take fewer --replicas or fewer atoms, or --device cpu",
    "evaluate": "lower --batch-size, or --devices cpu",
    "stability": "take fewer --replicas, or --devices cpu",
    "": "take fewer atoms at a time, or run on the CPU",
}
"""Command -> remedy if the memory of a GPU is too small."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    steady_streams()
    parser = _parser()
    try:
        options, unknown = parser.parse_known_args(argv)
        if unknown:
            _refuse_unknown(options.parser, unknown)
    except SystemExit as stop:  # argparse has printed the reason, or the help
        return int(stop.code or 0)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _Warnings()  # type: ignore[assignment]
            warnings.simplefilter("ignore", DeprecationWarning)  # users cannot fix those of other packages
            _refuse_empty(options)
            import_plugins(options)
            code = options.run(options)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return int(getattr(stop, "exit_code", 130))
    except BrokenPipeError:  # as in `torchmdnet2 config | head`
        from ..core.console import silence

        silence(sys.stdout)
        return 0
    except Exception as error:
        no_memory = type(error).__name__ == "OutOfMemoryError"  # PyTorch's; not all commands import PyTorch
        if options.traceback or not (no_memory or _is_ours(error)):
            raise
        from ..errors import BadConfig

        words = str(error) or type(error).__name__
        if no_memory:
            found = ". ".join(words.split(". ")[:3]).rstrip(".")
            words = f"{found}. Remedy: {_SMALLER.get(options.command, _SMALLER[''])}"
        if isinstance(error, OSError) and error.strerror and error.filename:
            words = f"{error.filename}: {error.strerror}"
        lines = [" ".join(line.split()) for line in words.splitlines()]
        if not isinstance(error, BadConfig):  # BadConfig has a line for each finding
            lines = [" ".join(lines)]
        print(f"torchmdnet2 {options.command}: " + "\n  ".join(lines), file=sys.stderr)
        return 2 if isinstance(error, BadConfig) else 1


def _refuse_empty(options: argparse.Namespace) -> None:
    """Refuse empty texts, which come from unset shell variables and, as paths, mean the working folder."""
    from ..errors import BadConfig

    for name, value in vars(options).items():
        if "" in (value if isinstance(value, list) else [value]):
            raise BadConfig(f"{name}: the value is empty; is a shell variable not set?")


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """End a command that was given unknown arguments, with exit code 2; suggest an option that is spelled alike."""
    from ..registry import did_you_mean

    option = next((word.partition("=")[0][2:] for word in unknown if word.startswith("--")), "")
    known = [name[2:] for name in parser._option_string_actions if name.startswith("--")]
    hint = did_you_mean(option, known).replace("'", "'--", 1)  # "--" would make all names look alike
    parts = [f"--{name}" for name in known if option.removesuffix("s") in name.split("-")]
    if parts and not hint:
        hint = f", did you mean {' or '.join(filter(None, [', '.join(parts[:-1]), parts[-1]]))}?"
    help = f"`{parser.prog} --help` lists the options"
    parser.exit(2, f"{parser.prog}: unrecognized arguments: {' '.join(unknown)}{hint or '.'} {help}\n")


class _Parser(argparse.ArgumentParser):
    """Says what an option means where its value is not a number, such as 10ps; suggests commands and choices that are
    spelled alike."""

    def error(self, message: str) -> NoReturn:
        from ..registry import did_you_mean

        wrong = re.fullmatch(r"argument (--[\w-]+): invalid (float|int) value: '(.*)'", message)
        if wrong:
            option, kind, given = wrong.groups()
            number = "a number without a unit" if kind == "float" else "a whole number"
            action = self._option_string_actions[option]
            message = (
                f"{option} {action.metavar or ''}".strip() + f" must be {number}, got {given}; it is: {action.help}"
            )
        wrong = re.match(r"argument ([\w-]+): invalid choice: '(.*?)'", message)
        if wrong:
            named = [
                action for action in self._actions if wrong[1] in (*action.option_strings, action.metavar, action.dest)
            ]
            choices = [str(choice) for action in named for choice in action.choices or ()]
            message = f"{wrong[0]}{did_you_mean(wrong[2], choices) or '.'} Choose from {', '.join(choices)}"
        super().error(message)


class _Warnings:
    """Prints a warning once, as one line without its source code."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any) -> None:
        if str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"warning: {message}", file=sys.stderr)


def _is_ours(error: Exception) -> bool:
    """Return True if the message is meant for users; other errors keep their traceback."""
    here = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
    return here or isinstance(error, ValueError | OSError)


def _parser() -> argparse.ArgumentParser:
    from ..version import __version__
    from . import bench, calibrate, convert, evaluate, lammps, md, models, relax, scan, train

    parser = _Parser(
        prog="torchmdnet2", description="Neural-network potentials: train them, test them, run molecular dynamics."
    )
    parser.add_argument("--version", action="version", version=f"torchmdnet2 {__version__}")
    parser.set_defaults(traceback=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        add_plugin(added)
        added.set_defaults(run=run, parser=added)
        return added

    for module in (train, evaluate, relax, calibrate, md, lammps, scan, convert, models, bench):
        module.add(command)
    return parser
