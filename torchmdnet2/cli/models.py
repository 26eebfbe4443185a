"""`torchmdnet2 models`, `card`, `info` and `config`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common import Command, print_json, print_table, refuse_idle

if TYPE_CHECKING:
    from ..potentials import NamedModel

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    listed = command("models", _models, "list the potentials that can be used by name")
    listed.add_argument("name", nargs="?", help="print the model card of this one")
    listed.add_argument("--json", action="store_true", help="print JSON")

    card = command("card", _card, "print the model card of a model file, as Markdown")
    card.add_argument("model", help=".tmn file, or a name that `torchmdnet2 models` lists")

    info = command("info", _info, "print versions, devices and backends, or the contents of a model file")
    info.add_argument("model", nargs="?", help=".tmn file, or a name that `torchmdnet2 models` lists")
    info.add_argument("--json", action="store_true", help="print JSON")

    config = command("config", _config, "print a training configuration with every key explained")
    config.add_argument("file", nargs="?", help="a configuration: print it with all defaults filled in")
    config.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with a file: change one key")
    config.add_argument("--model", default="tensornet", help="model whose keys are listed (default: tensornet)")
    config.add_argument("--learn", action="store_true", help="print a configuration of `torchmdnet2 learn` instead")
    config.add_argument("--from-torchmd-net", metavar="YAML", help="convert a training YAML of TorchMD-Net")


def _models(options: argparse.Namespace) -> None:
    from ..potentials import named_models

    if options.name:
        refuse_idle(
            options, ["json"], f"a model card is Markdown; `torchmdnet2 info {options.name} --json` prints JSON"
        )
        from ..potentials import find_model

        _print_card(options.name, find_model(options.name))
        return
    found = [_facts(model) for _, model in sorted(named_models().items())]
    if options.json:
        print_json(found)
    elif found:
        _print(found)
    else:
        print("This version ships no potential, and no installed package provides one.")
        print("A trained or imported model is used by the path of its file; docs/models.md names sources.")


def _facts(model: NamedModel) -> dict[str, Any]:
    """Return the entries of a model file, or the error if it cannot be read."""
    from ..checkpoint import read_header
    from ..potential.potential import SYMBOLS

    facts: dict[str, Any] = {"name": model.name, "package": model.package, "file": str(model.path)}
    try:
        header = read_header(model.path)
        facts["bytes"] = model.path.stat().st_size
    except (OSError, ValueError) as error:
        return {**facts, "error": str(error)}
    return {
        **facts,
        "model": header["config"].get("model", {}).get("name"),
        "elements": [SYMBOLS[int(z)] for z in header["config"].get("elements") or []],
        "level_of_theory": (*header["levels"], None)[0],
        "levels": header["levels"],
        "licence": header["metadata"].get("licence"),
        "sha256": header["sha256"],
    }


def _print(found: list[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        if "error" in facts:
            rows.append([facts["name"], "", facts["error"], "", "", facts["package"]])
            continue
        said = [" ".join(facts["elements"]), ", ".join(facts["levels"]), facts["licence"]]
        size = f"{facts['bytes'] / 1e6:.1f}"
        rows.append([facts["name"], size, *(text or "not stated" for text in said), facts["package"]])
    heads = ("name", "MB", "elements", "level of theory", "licence", "from")
    print_table("Potentials by name", heads, rows, left=(0, 2, 3, 4, 5), whole=(0,))
    print("torchmdnet2 models NAME prints the model card.")


def _card(options: argparse.Namespace) -> None:
    _print_card(options.model, options.model)


def _print_card(name: str, model: str | os.PathLike) -> None:
    """Print the card of a model.

    Args:
        name: name for messages and, without suffix, the title.
        model: path, or name of a potential.

    Raises:
        BadCheckpoint: the file cannot be read, or its metadata make no card.
    """
    from ..checkpoint import read_header
    from ..errors import BadCheckpoint
    from ..training.reporting.report import model_card

    header = read_header(model)
    try:
        card = model_card(header["config"], header["metadata"], title=Path(name).stem)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # metadata may hold anything
        raise BadCheckpoint(
            f"{name}: a card cannot be made of its metadata ({type(error).__name__}: {error}); "
            f"`torchmdnet2 info {name}` prints them unchanged"
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
    from ..registry import REPRESENTATIONS, UnknownName
    from ..training.config.config import config_yaml, default_config_yaml, load_config

    ways = ["FILE"] * bool(options.file) + ["--learn"] * options.learn
    ways += ["--from-torchmd-net"] * bool(options.from_torchmd_net) + ["--model"] * (options.model != "tensornet")
    if len(ways) > 1:
        raise BadConfig(f"{' and '.join(ways)} print different configurations: give only one")
    if options.set and not options.file:
        raise BadConfig("--set changes a configuration file: name one")
    if options.from_torchmd_net:
        from ..core.yaml_reader import read_text
        from ..importers.training_yaml import convert_yaml

        print(convert_yaml(read_text(options.from_torchmd_net), options.from_torchmd_net).rstrip())
        return
    if options.file:
        print(config_yaml(load_config(options.file, options.set)).rstrip())
        return
    if options.learn:
        from ..learn.config import default_learn_yaml

        print(default_learn_yaml().rstrip())
        return
    try:
        REPRESENTATIONS[options.model]
    except UnknownName as error:
        raise BadConfig(str(error)) from None
    print(default_config_yaml(options.model).rstrip())
