"""`torchmdnet2 models`: the potentials that can be used by name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .common import Command, print_json, print_table

if TYPE_CHECKING:
    from ..potentials import NamedModel

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    listed = command("models", _models, "list the potentials that can be used by name instead of a model file")
    listed.add_argument("name", nargs="?", help="print the model card of this one")
    listed.add_argument("--json", action="store_true", help="print JSON")


def _models(options: argparse.Namespace) -> None:
    from ..potentials import named_models

    if options.name:
        from ..potentials import find_model
        from .show import print_card

        print_card(options.name, find_model(options.name))
        return
    found = [_facts(model) for _, model in sorted(named_models().items())]
    if options.json:
        print_json(found)
    elif found:
        _print(found)
    else:
        print("No potential is shipped with this version, and no installed package brings one.")
        print("A trained or imported model is used by the path of its file: docs/models.md tells where to get one.")


def _facts(model: NamedModel) -> dict[str, Any]:
    """What the file says; an error in its place where it cannot be read."""
    from ..checkpoint import read_header
    from ..potential.potential import SYMBOLS

    facts: dict[str, Any] = {"name": model.name, "package": model.package, "file": str(model.path)}
    try:
        header = read_header(model.path)
        facts["bytes"] = model.path.stat().st_size
    except (OSError, ValueError) as error:
        return {**facts, "error": str(error)}
    data = header["metadata"].get("data")
    return {
        **facts,
        "model": header["config"].get("model", {}).get("name"),
        "elements": [SYMBOLS[int(z)] for z in header["config"].get("elements") or []],
        "level_of_theory": data.get("level_of_theory") if isinstance(data, dict) else None,
        "licence": header["metadata"].get("licence"),
        "sha256": header["sha256"],
    }


def _print(found: list[dict[str, Any]]) -> None:
    rows = []
    for facts in found:
        if "error" in facts:
            rows.append([facts["name"], "", facts["error"], "", "", facts["package"]])
            continue
        said = [" ".join(facts["elements"]), facts["level_of_theory"], facts["licence"]]
        size = f"{facts['bytes'] / 1e6:.1f}"
        rows.append([facts["name"], size, *(text or "not stated" for text in said), facts["package"]])
    heads = ("name", "MB", "elements", "level of theory", "licence", "from")
    print_table("Potentials by name", heads, rows, left=(0, 2, 3, 4, 5))
    print("torchmdnet2 models NAME prints the model card.")
