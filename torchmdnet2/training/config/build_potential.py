"""The sections `head`, `properties` and `priors` of the configuration, and what a potential made of them predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from ...checkpoint import load, read_header
from ...models.base import PropertyHead
from ...potential import SYMBOLS, Potential
from ...priors.pair_potential import FITTED
from ...priors.pairs import PairLists
from ...registry import HEADS, PRIORS
from ...system import System
from .schema import Section, validate_choice

__all__ = [
    "PriorConfig",
    "PropertyConfig",
    "load_priors",
    "predicted_shapes",
    "untrained",
    "with_baseline",
]


class _Baseline(Section):
    """Another potential, by its file; see `torchmdnet2.baseline`."""

    name: str
    file: str = Field(description="a .tmn model file")


def _check_prior(value: Any) -> dict[str, Any]:
    """One entry of `priors`.

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
    """{"H": −13.6} or {1: −13.6} → {"1": −13.6}."""
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
    """One entry of `properties`: a head of something that is not the energy; scale and shift may be `fit`."""
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


def untrained(parts: Mapping[str, Any]) -> Potential:
    """The potential of a configuration, with neutral values for what is fitted later.

    Args:
        parts: "model", "head", "properties", "priors".

    Raises:
        TypeError, ValueError: an argument is out of range, or the parts do not fit together.
    """
    neutral = {"scale": 1.0, "shift": 0.0}
    words = ("energies", "parameters")
    priors = [{k: {} if k in words and isinstance(v, str) else v for k, v in p.items()} for p in parts["priors"]]
    priors = [with_baseline(p) for p in priors]
    properties = [{k: neutral[k] if v == "fit" else v for k, v in p.items()} for p in parts["properties"]]
    with torch.random.fork_rng(devices=[]):
        return Potential.from_config({**parts, "priors": priors, "properties": properties})


def with_baseline(prior: dict[str, Any]) -> dict[str, Any]:
    """A prior's configuration, the file of a baseline replaced by the configuration in it.

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
    """Give the priors of a new potential what their configuration does not hold.

    Args:
        potential: made from these priors, in their order.
        priors: as in the configuration; baselines get the weights of their files.
        base: the model that it starts from, whose priors may have values that are read from a package otherwise.

    Raises:
        MissingBackend: a prior needs such a package, which is not installed.
    """
    for prior, given in zip(potential.priors, priors, strict=True):
        if given["name"] == "baseline" and "file" in given:
            prior.potential.load_state_dict(load(given["file"]).state_dict())  # type: ignore[union-attr, operator]
        for other in base.priors if base is not None else ():
            prior.adopt_values(other)
        prior.require_values()


def predicted_shapes(potential: Potential) -> dict[str, str]:
    """Property -> its shape, a key of `data.labels.SHAPES`, found by asking for two atoms; "charges" where it has any.

    Raises:
        ValueError: a head does not fit to the representation.
    """
    z = torch.full((2,), potential.elements[0], device=potential.device)
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64, device=potential.device)
    system = System(z=z, pos=pos)  # of charge 0, which the model need not know
    result = potential.compute(system, PairLists(system), forces=False, stress=False)
    shapes = {name: _shape(tuple(value.shape)) for name, value in result.properties.items()}
    return shapes if result.charges is None else {**shapes, "charges": "atom_scalar"}


def _shape(shape: tuple[int, ...]) -> str:
    kind = {(): "scalar", (3,): "vector", (3, 3): "tensor"}.get(shape[1:])
    if kind is None:
        raise ValueError(f"a property of the shape {list(shape[1:])} per structure or atom cannot be trained")
    return f"atom_{kind}" if shape[0] == 2 else kind
