"""`torchmdnet2 learn`."""

from __future__ import annotations

import argparse

from .common import Command

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    learn = command("learn", _learn, "active learning: dynamics, labels and training in turn, until models are stable")
    learn.add_argument("config", help="YAML file; `torchmdnet2 config --learn` prints one to start from")
    learn.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, repeatable")
    learn.add_argument(
        "--resume", choices=["auto", "must"], help="auto: continue an unfinished run if there is one; must: or fail"
    )


def _learn(options: argparse.Namespace) -> None:
    from ..learn import load_learn_config, run_learning

    run_learning(load_learn_config(options.config, options.set), options.resume)
