"""Settings that act only where another setting allows it: elsewhere they are refused, and not ignored.

A value that changes nothing anyway is accepted: the default, and what `Rule.harmless` names, such as a weight of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...data.labels import LABELS
from ...registry import HEADS, PRIORS, Registry
from .schema import Section, section_of

__all__ = ["ARGUMENTS", "RULES", "Rule", "refuse_idle"]


@dataclass(frozen=True)
class Rule:
    """When a setting acts.

    Attributes:
        acts: of the configuration; of a prior or a head, of its own section.
        needs: what it needs, in words.
        harmless: values that are accepted though they do not act.
    """

    acts: Callable[[Any], bool]
    needs: str
    harmless: tuple[Any, ...] = ()


def _has_label(name: str) -> Callable[[Any], bool]:
    keys = ("stress", "virial") if name == "stress" else (name,)
    return lambda c: any(getattr(c.data.keys, key) is not None for key in keys)


def _huber(c: Any) -> bool:
    return "huber" in (c.training.loss.kind, *c.training.loss.kinds.values())


def _has_schedule(*names: str) -> Callable[[Any], bool]:
    return lambda c: c.training.lr_schedule in names


def _budget(c: Any) -> bool:
    return c.training.max_atoms is not None or c.training.max_edges is not None


_WEIGHTS = {
    name: Rule(_has_label(name), f"needs data.keys.{name}, the name of this label in the data", (0.0,))
    for name in LABELS
}

RULES: dict[str, Rule] = {
    "data.root": Rule(lambda c: c.data.dataset is not None, "needs data.dataset, a published data set"),
    "data.download": Rule(lambda c: c.data.dataset is not None, "needs data.dataset, a published data set"),
    "data.format": Rule(lambda c: c.data.dataset is None, "is of data files, and data.dataset has its own"),
    "data.keys.config_type": Rule(lambda c: bool(c.training.loss.config_weights), "needs training.loss.config_weights"),
    "data.split.train": Rule(lambda c: c.data.split.file is None, "is not read beside data.split.file"),
    "data.split.seed": Rule(
        lambda c: (
            c.data.split.file is None
            and (c.data.validation is None or c.data.test is None or c.data.split.train is not None)
        ),
        "needs frames that are drawn: data.split.file, or files of validation and test, leave none to draw",
    ),
    **{
        f"data.split.{name}": Rule(
            lambda c, name=name: c.data.split.file is None and getattr(c.data, name) is None,  # type: ignore[misc]
            f"is not read beside data.{name} or data.split.file",
            (0,),
        )
        for name in ("validation", "test")
    },
    **{
        f"data.units.{name}": Rule(_has_label(name), f"needs data.keys.{name}, the name of this label in the data")
        for name in ("forces", "stress", "dipole")
    },
    **{f"training.loss.{name}": rule for name, rule in _WEIGHTS.items()},
    **{f"training.loss.schedule.{name}": rule for name, rule in _WEIGHTS.items()},
    "training.loss.huber_delta": Rule(_huber, "needs huber, as kind or among kinds"),
    "training.loss.per_atom": Rule(_has_label("energy"), "needs data.keys.energy"),
    "training.loss.schedule.end": Rule(lambda c: c.training.loss.schedule.kind == "linear", "needs kind: linear"),
    "training.lr_min": Rule(_has_schedule("cosine", "plateau"), "needs lr_schedule: cosine or plateau"),
    "training.lr_patience": Rule(_has_schedule("plateau"), "needs lr_schedule: plateau"),
    "training.lr_factor": Rule(_has_schedule("plateau"), "needs lr_schedule: plateau"),
    "training.batch_size": Rule(lambda c: not _budget(c), "is not read beside max_atoms or max_edges"),
    "training.energy_scale": Rule(
        lambda c: c.head is not None and c.init is None,
        "needs a head of energies and random weights to start from: fine-tuning keeps the scale of its file",
    ),
    "output.outliers": Rule(lambda c: c.output.report, "needs output.report", (0,)),
}
"""Path of a setting -> when it acts."""

_ALL_PAIRS = Rule(lambda p: p["method"] != "all_pairs", "needs another method: all_pairs has no cutoff")
_EWALD = Rule(lambda p: p["method"] in ("ewald", "pme"), "needs the method ewald or pme")
_FIELD = Rule(lambda p: p["method"] == "reaction_field", "needs the method reaction_field")
_SUMMED = Rule(lambda p: p["per"] == "system", "needs per: system")

ARGUMENTS: dict[str, dict[str, Rule]] = {
    "coulomb": {
        "cutoff": _ALL_PAIRS,
        "accuracy": _EWALD,
        "dielectric": _FIELD,
        "switch_width": _FIELD,
        "damping_lower": Rule(lambda p: p["damping"] == "cosine", "needs the damping cosine"),
        "damping_upper": Rule(lambda p: p["damping"] != "none", "needs a damping"),
    },
    "scalar_coulomb": {
        "coulomb_cutoff": _ALL_PAIRS,
        "accuracy": _EWALD,
        "dielectric": _FIELD,
        "switch_width": _FIELD,
    },
    "zbl": {"cutoff": Rule(lambda p: p["envelope"] == "cosine", "needs the envelope cosine")},
    "scalar_property": {"reduce": _SUMMED},
    "vector": {"reduce": _SUMMED},
}
"""Name of a prior or head -> argument -> when it acts."""


def refuse_idle(config: Any) -> None:
    """Raise ValueError for a setting that has no effect with the others.

    Args:
        config: the whole configuration.
    """
    for path, rule in RULES.items():
        found = _setting(config, path)
        if found is not None:
            _refuse(path, *found, rule, config)
    for name, spec in config.training.loss.kinds.items():
        if name in LABELS.keys() and not _WEIGHTS[name].acts(config):
            raise ValueError(f"training.loss.kinds.{name}: has no effect ({spec}): it {_WEIGHTS[name].needs}")
    schedule = config.training.loss.schedule
    if schedule is not None and not schedule.properties and all(getattr(schedule, name) is None for name in LABELS):
        raise ValueError("training.loss.schedule: has no effect: give the weights that change, as in {energy: 50}")
    for path, part, registry in _parts(config):
        for key, rule in ARGUMENTS.get(part["name"], {}).items():
            default = section_of(registry[part["name"]], ("hidden_channels",)).model_fields[key].default
            _refuse(f"{path}.{key}", part[key], default, rule, part)


def _refuse(path: str, value: Any, default: Any, rule: Rule, section: Any) -> None:
    if value != default and value not in rule.harmless and not rule.acts(section):
        raise ValueError(f"{path}: has no effect: it {rule.needs}")


def _setting(config: Any, path: str) -> tuple[Any, Any] | None:
    """A setting and its default; None where its section is not there."""
    *sections, key = path.split(".")
    section: Section = config
    for name in sections:
        section = getattr(section, name)
        if section is None:
            return None
    field = type(section).model_fields[key]
    return getattr(section, key), field.get_default(call_default_factory=True)


def _parts(config: Any) -> Iterator[tuple[str, Mapping[str, Any], Registry]]:
    """Priors and heads, with where they stand."""
    for k, prior in enumerate(config.priors):
        yield f"priors.{k}", prior, PRIORS
    for k, head in enumerate(config.properties):
        yield f"properties.{k}", head, HEADS
    if config.head is not None:
        yield "head", config.head, HEADS
