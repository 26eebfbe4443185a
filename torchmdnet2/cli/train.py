"""`torchmdnet2 train` and `learn`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Command

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    train = command("train", _train, "train a potential from a YAML configuration")
    train.add_argument("config", help="YAML file; `torchmdnet2 config` prints a template")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, repeatable")
    train.add_argument("--check", action="store_true", help="run all checks and write nothing")
    train.add_argument(
        "--resume", choices=["auto", "must"], help="auto: continue an unfinished run if there is one; must: or fail"
    )
    train.add_argument("--members", type=int, metavar="N", help="train an ensemble: N models, different random seeds")
    train.add_argument("--bootstrap", action="store_true", help="with --members: train each on resampled frames")

    learn = command("learn", _learn, "active learning: dynamics, labelling and training, until models are stable")
    learn.add_argument("config", help="YAML file; `torchmdnet2 config --learn` prints a template")
    learn.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, repeatable")
    learn.add_argument(
        "--resume", choices=["auto", "must"], help="auto: continue an unfinished run if there is one; must: or fail"
    )


def _train(options: argparse.Namespace) -> None:
    from ..errors import BadConfig
    from ..training.config.config import load_config
    from ..training.run.folder import protect_config

    config = load_config(options.config, options.set)
    if options.bootstrap and options.members is None:
        raise BadConfig("--bootstrap is for ensembles: also give --members")
    protect_config(Path(config.output.folder), options.config)
    if options.members is None:
        from ..training.run.run import run_training

        run_training(config, resume=options.resume, check=options.check)
    else:
        from ..training.run.run import run_members

        run_members(config, options.members, options.bootstrap, options.resume, options.check)


def _learn(options: argparse.Namespace) -> None:
    from ..learn import load_learn_config, run_learning

    run_learning(load_learn_config(options.config, options.set), options.resume)
