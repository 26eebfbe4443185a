"""The model file of a fine-tuning, and the keys of the configuration that are taken from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import load
from ...errors import BadConfig, UnknownModel
from ...potential import Potential
from ...potentials import find_model

__all__ = ["complete", "open_base"]


def open_base(file: str, energy_unit: str = "eV") -> Potential:
    """The potential of a .tmn file, of a name, or of a TorchMD-Net checkpoint.

    Raises:
        BadConfig: there is no such file, or a unit is given for one that has its own.
        BadCheckpoint: it cannot be read.
    """
    try:
        found = find_model(file)
    except UnknownModel as error:
        raise BadConfig(f"init.file: {error}") from None
    if not found.exists():
        raise BadConfig(f"init.file: there is no model file {file}")
    if Path(file).suffix == ".ckpt":
        from ...importers.torchmd_net import import_checkpoint

        return import_checkpoint(file, energy_unit)
    if energy_unit != "eV":
        raise BadConfig(f"init.energy_unit: {file} is a model file, which is in eV; leave the unit out")
    return load(file)


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as plain data; sections and arguments of the model that are not given come from `init.file`."""
    init = raw.get("init")
    if isinstance(init, str):  # short for {file: …}
        init = {"file": init}
    if not isinstance(init, Mapping) or not isinstance(init.get("file"), str):
        return dict(raw)
    config = open_base(init["file"], str(init.get("energy_unit", "eV"))).config
    filled = dict(raw)
    own = filled.get("model", {})
    if isinstance(own, Mapping) and own.get("name", config["model"]["name"]) == config["model"]["name"]:
        filled["model"] = {**config["model"], **own}
    filled.setdefault("head", config.get("head", {"name": "scalar"}))
    filled.setdefault("properties", config.get("properties") or [])
    filled.setdefault("atom_filter", config.get("atom_filter", -1))
    priors = [{**p, "energies": "auto"} if p["name"] == "atomref" else p for p in config.get("priors") or []]
    filled.setdefault("priors", priors)
    return filled
