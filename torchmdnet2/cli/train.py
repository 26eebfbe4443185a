"""`torchmdnet2 train`."""

from __future__ import annotations

import argparse

from .common import Command

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    train = command("train", _train, "train a potential from a YAML configuration")
    train.add_argument("config", help="YAML file; `torchmdnet2 config` prints one to start from")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, repeatable")
    train.add_argument("--check", action="store_true", help="try everything once and write nothing")
    train.add_argument(
        "--resume", choices=["auto", "must"], help="auto: continue an unfinished run if there is one; must: or fail"
    )


def _train(options: argparse.Namespace) -> None:
    from ..training.config import load_config
    from ..training.run import run_training

    run_training(load_config(options.config, options.set), resume=options.resume, check=options.check)
