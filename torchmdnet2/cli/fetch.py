"""`torchmdnet2 fetch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Command, print_table

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    fetch = command("fetch", _fetch, "download the files of a model from the Hugging Face hub (needs the extra 'hub')")
    fetch.add_argument("model", help="ACCOUNT/MODEL")
    fetch.add_argument("files", nargs="*", help="files to download; without any, those that there are are listed")
    fetch.add_argument("--revision", help="branch, tag or commit (default: the newest)")
    fetch.add_argument("--output", default=".", metavar="FOLDER", help="where the files go (default: here)")


def _fetch(options: argparse.Namespace) -> None:
    from ..errors import BadConfig
    from ..importers.hub import download, look_up

    folder = Path(options.output)
    if options.files and not folder.is_dir():
        raise BadConfig(f"--output: there is no folder '{folder}'")
    if len({Path(name).name for name in options.files}) < len(options.files):
        raise BadConfig("files: two of them have the same name; download them one at a time")
    model = look_up(options.model, options.revision)
    print(f"{model.name} at {model.commit}\nlicence: {model.licence}")
    if not options.files:
        rows = [(file.name, f"{file.size / 1e6:.2f}", file.checksum) for file in model.files]
        print_table("", ("file", "MB", "checksum"), rows, left=(0, 2))
        return
    for name in options.files:
        model.file(name)  # all names are known before the first download
    written = [download(model, name, folder) for name in options.files]
    for name, path in zip(options.files, written, strict=True):
        print(f"{path}: checksum {model.file(name).checksum} as on the hub")
    checkpoints = [path for path in written if path.suffix == ".ckpt"]
    if any(path.name == "model.json" for path in written):
        print(f"convert it: torchmdnet2 import {folder} NAME.tmn")
    elif checkpoints:
        print(f"convert it: torchmdnet2 import {checkpoints[0]} NAME.tmn")
