"""`torchmdnet2 card`, `info` and `config`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .common import Command, print_json

__all__ = ["add", "print_card"]


def add(command: Command) -> None:
    """Declare the arguments."""
    card = command("card", _card, "print the model card of a model file, as Markdown")
    card.add_argument("model", help=".tmn file, or a name that `torchmdnet2 models` lists")

    info = command("info", _info, "print versions, devices and backends, or what a model file holds")
    info.add_argument("model", nargs="?", help=".tmn file, or a name that `torchmdnet2 models` lists")
    info.add_argument("--json", action="store_true", help="print JSON")

    config = command("config", _config, "print a training configuration with every key explained")
    config.add_argument("file", nargs="?", help="a configuration: print it with all defaults filled in instead")
    config.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with a file: change one key")
    config.add_argument("--model", default="tensornet", help="whose keys are listed (default: tensornet)")
    config.add_argument("--learn", action="store_true", help="print a configuration of `torchmdnet2 learn` instead")
    config.add_argument("--from-torchmd-net", metavar="YAML", help="convert a training YAML of TorchMD-Net")


def _card(options: argparse.Namespace) -> None:
    print_card(options.model, options.model)


def print_card(name: str, model: str | os.PathLike) -> None:
    """The card of a model.

    Args:
        name: for the messages and, without suffix, the title.
        model: path, or name of a potential.

    Raises:
        BadCheckpoint: the file cannot be read, or there is no card of its metadata.
    """
    from ..checkpoint import read_header
    from ..errors import BadCheckpoint
    from ..training.reporting.report import model_card

    header = read_header(model)
    try:
        card = model_card(header["config"], header["metadata"], title=Path(name).stem)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # anything may stand there
        raise BadCheckpoint(
            f"{name}: there is no card of such metadata ({type(error).__name__}: {error}); "
            f"`torchmdnet2 info {name}` prints them as they are"
        ) from error
    print(card)


def _info(options: argparse.Namespace) -> None:
    if options.model:
        from ..checkpoint import read_header

        facts = read_header(options.model)
    else:
        from ..diagnostics import surroundings

        facts = surroundings()
    if options.json:
        print_json(facts)
    else:
        import yaml

        print(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).rstrip())


def _config(options: argparse.Namespace) -> None:
    from ..errors import BadConfig
    from ..registry import REPRESENTATIONS, did_you_mean
    from ..training.config.config import config_yaml, default_config_yaml, load_config

    ways = ["FILE"] * bool(options.file) + ["--learn"] * options.learn
    ways += ["--from-torchmd-net"] * bool(options.from_torchmd_net) + ["--model"] * (options.model != "tensornet")
    if len(ways) > 1:
        raise BadConfig(f"{' and '.join(ways)} print different configurations: give one of them")
    if options.from_torchmd_net:
        from ..core.yaml_reader import read_text
        from ..importers.training_yaml import convert_yaml

        print(convert_yaml(read_text(options.from_torchmd_net), options.from_torchmd_net).rstrip())
        return
    if options.file:
        print(config_yaml(load_config(options.file, options.set)).rstrip())
        return
    if options.set:
        raise BadConfig("--set changes a configuration file: name one")
    if options.learn:
        from ..learn.config import default_learn_yaml

        print(default_learn_yaml().rstrip())
        return
    known = list(REPRESENTATIONS)
    if options.model not in known:
        raise BadConfig(
            f"unknown model '{options.model}'{did_you_mean(options.model, known) or '.'} Known: {', '.join(known)}"
        )
    print(default_config_yaml(options.model).rstrip())
