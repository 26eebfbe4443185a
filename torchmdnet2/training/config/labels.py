"""Labels of a training: their names in the configuration, in the data, and in the predictions.

A label of the data is named as in the table of labels (data/labels.py), or by its shape and property, as in
"scalar:gap". "scalar:dipole_norm" is the length of the dipole moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from torch import Tensor

from ...data.kinds import CONFIG_TYPE
from ...data.labels import LABELS, SHAPES
from ...potential import Potential, Result
from ...registry import PRIORS, did_you_mean
from ...units import OWN_UNITS, factor

__all__ = [
    "FRAME_LABELS",
    "LOSS_WEIGHT",
    "check_labels",
    "label_keys",
    "label_units",
    "predicted_shapes",
    "prediction",
    "property_of",
    "unit_of",
]

DIPOLE_NORM = "dipole_norm"

LOSS_WEIGHT = "scalar:loss_weight"

FRAME_LABELS = (LOSS_WEIGHT, CONFIG_TYPE)
"""Read like labels, but not trained: they give the weight of a frame in the loss."""


def property_of(label: str) -> str:
    """The name of a label without its shape: "gap" of "scalar:gap"."""
    return label.partition(":")[2] or label


def predicted_shapes(potential: Potential) -> dict[str, str]:
    """Property -> its shape, a key of `data.labels.SHAPES`, as the parts of the potential declare it.

    Properties of other shapes, which no label can have, are left out.
    """
    names = {(shape.per_atom, shape.row): name for name, shape in SHAPES.items()}
    found = {name: names.get((output.per_atom, output.shape)) for name, output in potential.outputs.items()}
    return {name: shape for name, shape in found.items() if shape is not None}


def label_keys(keys: Mapping[str, Any], shapes: Mapping[str, str]) -> dict[str, str]:
    """What `open_dataset` is to read, besides weights of frames (see `weight_keys`).

    Args:
        keys: the section `data.keys` as plain data.
        shapes: property -> shape, see `predicted_shapes`.
    """
    others = ("properties", "weight", "config_type")
    plain = {name: key for name, key in keys.items() if name not in others and key is not None}
    return {**plain, **{_label(name, shapes): key for name, key in (keys.get("properties") or {}).items()}}


def label_units(units: Mapping[str, Any], shapes: Mapping[str, str]) -> dict[str, str]:
    """The units for `open_dataset`; arguments as `label_keys`, for the section `data.units`."""
    plain = {name: unit for name, unit in units.items() if name != "properties" and unit is not None}
    return {**plain, **{_label(name, shapes): unit for name, unit in (units.get("properties") or {}).items()}}


def _label(name: str, shapes: Mapping[str, str]) -> str:
    return f"{shapes.get(name, 'scalar')}:{name}"


def prediction(result: Result, label: str) -> Tensor | None:
    """The predicted value of a label, None where the potential does not give it."""
    if label in {field.name for field in fields(result)}:
        return getattr(result, label)
    name = property_of(label)
    if name == DIPOLE_NORM and "dipole" in result.properties:
        return result.properties["dipole"].norm(dim=1)
    return result.properties.get(name)


def unit_of(label: str, units: Mapping[str, Any] | None = None) -> str:
    """The unit that a label's errors are in; "" for a plain number.

    Args:
        label: its name in the data.
        units: the section `data.units` as plain data.
    """
    name = property_of(label)
    if name == label:
        return LABELS[label].unit
    unit = ((units or {}).get("properties") or {}).get(name)
    if unit is None:
        return LABELS["dipole"].unit if name == DIPOLE_NORM else ""
    for kind, own in OWN_UNITS.items():
        with suppress(ValueError):
            factor(kind, unit)
            return own
    raise ValueError(f"unknown unit '{unit}'")


def check_labels(config: Any, shapes: Mapping[str, str]) -> None:
    """Check that labels, predictions and weights of the loss are consistent.

    Args:
        config: the whole configuration.
        shapes: property -> shape of what its potential predicts.

    Raises:
        ValueError: they are not; the message has the key's path and the closest valid name.
    """
    keys, loss = config.data.keys, config.training.loss
    predicted = [*shapes, *([DIPOLE_NORM] if "dipole" in shapes else [])]
    for name in keys.properties:
        if name in LABELS.keys():
            raise ValueError(f"data.keys.properties.{name}: has a key of its own, data.keys.{name}")
        if name not in predicted:
            hint = did_you_mean(name, predicted) or "."
            raise ValueError(
                f"data.keys.properties.{name}: no head predicts it{hint} Predicted: {', '.join(predicted) or 'none'}; "
                "add a head to `properties`"
            )
    for name in LABELS.of_heads():
        if getattr(keys, name) is not None and name not in shapes:
            raise ValueError(f"data.keys.{name}: the model predicts none; add {{name: {name}}} to `properties`")
    energies = [name for name in (*LABELS.of_energies(), "virial") if getattr(keys, name) is not None]
    if config.head is None and energies:
        raise ValueError(f"head: without one there are no energies to train; set data.keys.{energies[0]} to null")
    known = [*LABELS, *keys.properties]
    named = {
        "data.units.properties": (config.data.units.properties, list(keys.properties)),
        "training.loss.properties": (loss.properties, list(keys.properties)),
        "training.loss.kinds": (loss.kinds, known),
        "training.loss.schedule.properties": (loss.schedule.properties if loss.schedule else {}, list(keys.properties)),
    }
    for path, (given, right) in named.items():
        for name in given:
            if name not in right:
                raise ValueError(f"{path}.{name}: no such label{did_you_mean(name, right) or '.'} ({_listed(right)})")
    labelled = {*keys.properties, *(name for name in LABELS.of_heads() if getattr(keys, name))}
    labelled |= {"dipole"} if DIPOLE_NORM in keys.properties else set()
    # charges may also be learned from the energies and forces that a prior makes of them
    read = any(p.get("charges") == "predicted" or PRIORS[p["name"]].uses_charges for p in config.priors)
    labelled |= {"charges"} if read else set()
    for head in config.properties:
        name = head.get("property", head["name"])
        if name not in labelled and config.init is None:
            where = f"data.keys.{name}" if name in LABELS.keys() else f"data.keys.properties.{name}"
            raise ValueError(f"properties: '{name}' has no label to learn from; add {where}")
    weighted = [label for label in label_keys(keys.model_dump(), shapes) if label not in ("charge", "spin")]
    weighted = ["stress" if label == "virial" else label for label in weighted]
    if not any(loss.weight(label) > 0 or loss.final.weight(label) > 0 for label in weighted):
        raise ValueError(f"training.loss: none of the labels in data.keys ({_listed(weighted)}) has a weight above 0")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
