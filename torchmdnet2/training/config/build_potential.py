"""Build the potential of a configuration from its sections `model`, `head`, `properties` and `priors`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from ...checkpoint import load, read_header
from ...errors import BadConfig, UnknownModel
from ...potential.graph import PropertyHead, Representation
from ...potential.potential import SYMBOLS, Potential
from ...potentials import find_model
from ...priors.pair_potential import FITTED
from ...registry import HEADS, PRIORS
from .schema import Section, validate_choice

__all__ = [
    "Built", "PriorConfig", "PropertyConfig", "complete", "load_priors", "open_base", "untrained", "with_baseline",
]  # fmt: skip


class _Baseline(Section):
    """The prior `baseline`: another potential, given by its file; see `torchmdnet2.potential.baseline`."""

    name: str
    file: str = Field(description="a .tmn model file")


def _check_prior(value: Any) -> dict[str, Any]:
    """Check one entry of `priors`.

    Energies of atomref may be a word or a file (`isolated`), or name elements by symbol; parameters of pair_potential
    may be one of `FITTED`.
    """
    if isinstance(value, Mapping) and value.get("name") == "baseline" and "potential" not in value:
        return _Baseline.model_validate(value).model_dump()
    if isinstance(value, Mapping) and value.get("name") == "pair_potential":
        word = value.get("parameters", "fit")
        if isinstance(word, str) and word in FITTED:
            return {**validate_choice({**value, "parameters": None}, PRIORS, None), "parameters": word}
    word, given = None, value
    if isinstance(value, Mapping) and value.get("name") == "atomref":
        energies = value.get("energies", "auto")
        if energies in ("auto", "fit", "keep", "isolated") or (isinstance(energies, str) and Path(energies).is_file()):
            word = energies
        elif not isinstance(energies, Mapping):
            raise ValueError(
                "energies: should be 'auto', 'fit', 'isolated', a file of single atoms, or a table of element: eV, got "
                f"{energies!r}"
            )
        given = {**value, "energies": _by_atomic_number(energies) if word is None else None}
    checked = validate_choice(given, PRIORS, None)
    return {**checked, "energies": word} if word else checked


def _by_atomic_number(energies: Mapping[Any, Any]) -> dict[str, float]:
    """Return {"H": −13.6} or {1: −13.6} as {"1": −13.6}."""
    table = {}
    for element, energy in energies.items():
        number = SYMBOLS.index(element) if element in SYMBOLS else element
        if not str(number).isdigit() or not 0 < int(number) < len(SYMBOLS):
            raise ValueError(f"energies: '{element}' is not an element")
        if isinstance(energy, bool) or not isinstance(energy, int | float):
            raise ValueError(f"energies.{element}: should be a number in eV, got {energy!r}")
        table[str(int(number))] = float(energy)
    return table


def _check_property(value: Any) -> dict[str, Any]:
    """Check one entry of `properties`, a head of another quantity than the energy; scale and shift may be `fit`."""
    fitted = [k for k in ("scale", "shift") if isinstance(value, Mapping) and value.get(k) == "fit"]
    given = {k: v for k, v in value.items() if k not in fitted} if fitted else value
    checked = validate_choice(given, HEADS, None, leave_out=("hidden_channels",))
    name = checked["name"]
    if not issubclass(HEADS[name], PropertyHead):
        raise ValueError(f"'{name}' predicts energies: it belongs to `head`")
    for key in fitted:
        if key not in checked:
            raise ValueError(f"{key}: '{name}' has none")
    return {**checked, **dict.fromkeys(fitted, "fit")}


PriorConfig = Annotated[dict[str, Any], BeforeValidator(_check_prior)]
PropertyConfig = Annotated[dict[str, Any], BeforeValidator(_check_property)]


class Built:
    """Keeps the untrained potential of a configuration from its check until the training, so that it is built once.

    It is not a setting: all are equal in a comparison of configurations.
    """

    def __init__(self) -> None:
        self._potential: Potential | None = None
        self._network, self._priors = "", ""

    def get(self, parts: Mapping[str, Any], seed: int) -> Potential:
        """Return the potential, with neutral values for what is fitted later. It is built unless it was kept.

        Args:
            parts: "model", "head", "properties", "priors", "atom_filter".
            seed: of the random weights.

        Raises:
            TypeError, ValueError: an argument is out of range, or the parts do not fit together.
        """
        network = self._kept_network(parts, seed)
        priors = json.dumps(parts["priors"], sort_keys=True, default=str)
        if network is None or priors != self._priors:
            self._potential = untrained(parts, seed, network)
            self._network, self._priors = _network_key(parts, seed), priors
        assert self._potential is not None
        return self._potential

    def representation(self, parts: Mapping[str, Any], seed: int) -> Representation:
        """Return the representation of the potential, whatever its priors; arguments and errors as `get`."""
        return (self._kept_network(parts, seed) or self.get(parts, seed)).representation

    def _kept_network(self, parts: Mapping[str, Any], seed: int) -> Potential | None:
        return self._potential if _network_key(parts, seed) == self._network else None

    def forget(self) -> None:
        """Drop the potential: its weights are going to be trained."""
        self._potential = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Built)

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Built:
        return Built()

    def __reduce__(self) -> tuple[Any, ...]:
        return Built, ()


def _network_key(parts: Mapping[str, Any], seed: int) -> str:
    return json.dumps([{k: v for k, v in parts.items() if k != "priors"}, seed], sort_keys=True, default=str)


def untrained(parts: Mapping[str, Any], seed: int = 0, network: Potential | None = None) -> Potential:
    """Return the potential of a configuration, with neutral values for what is fitted later.

    Args:
        parts: "model", "head", "properties", "priors".
        seed: of the random weights, which are those that a training starts from.
        network: see `Potential.from_config`.

    Raises:
        TypeError, ValueError: an argument is out of range, or the parts do not fit together.
    """
    neutral = {"scale": 1.0, "shift": 0.0}
    words = ("energies", "parameters")
    priors = [{k: {} if k in words and isinstance(v, str) else v for k, v in p.items()} for p in parts["priors"]]
    priors = [with_baseline(p) for p in priors]
    properties = [{k: neutral[k] if v == "fit" else v for k, v in p.items()} for p in parts["properties"]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Potential.from_config({**parts, "priors": priors, "properties": properties}, network)


def with_baseline(prior: dict[str, Any]) -> dict[str, Any]:
    """Return a prior's configuration; the file of a baseline is replaced by the configuration that it holds.

    Raises:
        ValueError: there is no such file, or it is not a model file.
    """
    if prior["name"] != "baseline" or "file" not in prior:
        return prior
    try:
        return {"name": "baseline", "potential": read_header(prior["file"])["config"]}
    except FileNotFoundError as error:
        raise ValueError(f"baseline.file: {error}") from None


def load_priors(potential: Potential, priors: Sequence[Mapping[str, Any]], base: Potential | None = None) -> None:
    """Give the priors of a new potential the values that their configuration does not hold.

    Args:
        potential: made from these priors, in their order.
        priors: as in the configuration; baselines get the weights of their files.
        base: the model of `init`, whose priors may hold values that would otherwise be read from a package.

    Raises:
        MissingBackend: a prior needs such a package, which is not installed.
    """
    for prior, given in zip(potential.priors, priors, strict=True):
        if given["name"] == "baseline" and "file" in given:
            prior.potential.load_state_dict(load(given["file"]).state_dict())  # type: ignore[union-attr, operator]
        for other in base.priors if base is not None else ():
            prior.adopt_values(other)
        prior.require_values()


# --- The model file of a fine-tuning, and the keys of the configuration that are taken from it ---


def open_base(file: str, energy_unit: str = "eV", level: str | None = None) -> Potential:
    """Return the potential of a .tmn file, of a name, or of a TorchMD-Net checkpoint, at one level of theory.

    Raises:
        BadConfig: there is no such file, or it has no such level, or a unit is given for a model file, which has units.
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
    base = load(file)
    if base.others:
        raise BadConfig(
            f"init.file: {file} has {len(base.members)} members, and only one can be trained: import one with --member"
        )
    try:
        return base.at_level(level or base.level_names[0]) if level or base.level_names else base
    except ValueError as error:
        raise BadConfig(f"init.{error}") from None


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain data; sections and arguments of the model that are not given come from
    `init.file`."""
    init = raw.get("init")
    if isinstance(init, str):  # short for {file: …}
        init = {"file": init}
    if not isinstance(init, Mapping) or not isinstance(init.get("file"), str):
        return dict(raw)
    level = init.get("level")
    config = open_base(init["file"], str(init.get("energy_unit", "eV")), None if level is None else str(level)).config
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
