"""Sections of the configuration: `data`, `training.loss`, the names of labels, and settings that depend on others.

A label of the data is named as in the table of labels (data/labels.py), or by its shape and property, as in
"scalar:gap". "scalar:dipole_norm" is the length of the dipole moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from ... import units
from ...data.datasets import make_published
from ...data.labels import CONFIG_TYPE, GROUP, LABELS, LEVEL, LOSS_WEIGHT, SHAPES, any_factor
from ...data.reader import find_format
from ...errors import BadData, MissingBackend
from ...potential.potential import Potential, Result
from ...registry import HEADS, PRIORS, REPRESENTATIONS, Registry, did_you_mean
from ...units import OWN_UNITS, factor
from .schema import Section, section_of

__all__ = [
    "ARGUMENTS", "FRAME_LABELS", "LOSS_WEIGHT", "RELATIVE", "RULES", "DataConfig", "KeysConfig", "LevelConfig",
    "LossConfig", "LossScheduleConfig", "Rule", "SourceConfig", "SplitConfig", "UnitsConfig", "check_labels",
    "epoch_of", "label_keys", "label_units", "predicted_shapes", "prediction", "property_of", "refuse_idle", "unit_of",
]  # fmt: skip


DIPOLE_NORM = "dipole_norm"

RELATIVE = "relative_energy"

FRAME_LABELS = (LOSS_WEIGHT, CONFIG_TYPE, GROUP, LEVEL)
"""Entries that are read like labels and not trained: they give weight, group and level of theory of a frame."""


def property_of(label: str) -> str:
    """Return the name of a label without its shape: "gap" of "scalar:gap"."""
    return label.partition(":")[2] or label


def predicted_shapes(potential: Potential) -> dict[str, str]:
    """Return property -> its shape, a key of `data.labels.SHAPES`, as the parts of the potential declare it.

    Properties of other shapes, which no label can have, are left out.
    """
    names = {(shape.per_atom, shape.row): name for name, shape in SHAPES.items()}
    found = {name: names.get((output.per_atom, output.shape)) for name, output in potential.outputs.items()}
    return {name: shape for name, shape in found.items() if shape is not None}


def label_keys(keys: Mapping[str, Any], shapes: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that `open_dataset` must read, besides weights of frames (see `weight_keys`).

    Args:
        keys: the section `data.keys` as plain data.
        shapes: property -> shape, see `predicted_shapes`.
    """
    others = ("properties", "weight", "config_type", "group")
    plain = {name: key for name, key in keys.items() if name not in others and key is not None}
    return {**plain, **{_label(name, shapes): key for name, key in (keys.get("properties") or {}).items()}}


def label_units(units: Mapping[str, Any], shapes: Mapping[str, str]) -> dict[str, str]:
    """Return the units that `open_dataset` needs; arguments as `label_keys`, for the section `data.units`."""
    plain = {name: unit for name, unit in units.items() if name != "properties" and unit is not None}
    return {**plain, **{_label(name, shapes): unit for name, unit in (units.get("properties") or {}).items()}}


def _label(name: str, shapes: Mapping[str, str]) -> str:
    return f"{shapes.get(name, 'scalar')}:{name}"


def prediction(result: Result, label: str) -> Tensor | None:
    """Return the predicted value of a label; None if the potential does not predict it."""
    if label in {field.name for field in fields(result)}:
        return getattr(result, label)
    name = property_of(label)
    if name == DIPOLE_NORM and "dipole" in result.properties:
        return result.properties["dipole"].norm(dim=1)
    return result.properties.get(name)


def unit_of(label: str, units: Mapping[str, Any] | None = None) -> str:
    """Return the unit of a label's errors; "" for a plain number.

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
        ValueError: they are not; names the path of the key and the closest valid name.
    """
    keys, loss = config.data.keys, config.training.loss
    predicted = [*shapes, *([DIPOLE_NORM] if "dipole" in shapes else [])]
    for name in keys.properties:
        if name in LABELS.keys():
            raise ValueError(f"data.keys.properties.{name}: has a separate key, data.keys.{name}")
        if name not in predicted:
            hint = did_you_mean(name, predicted) or "."
            raise ValueError(
                f"data.keys.properties.{name}: no head predicts it{hint} Predicted: {', '.join(predicted) or 'none'}; "
                "add a head to `properties`"
            )
    for name in LABELS.of_heads():
        if getattr(keys, name) is not None and name not in shapes:
            raise ValueError(f"data.keys.{name}: the model does not predict it; add {{name: {name}}} to `properties`")
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
    if not any(loss.uses(label) or loss.final.uses(label) for label in weighted):
        raise ValueError(f"training.loss: none of the labels in data.keys ({_listed(weighted)}) has a weight above 0")


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


# --- The section `training.loss` of the configuration: the errors that are minimised, and their weights ---

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Kind = Literal["mse", "l1", "huber"]
Moment = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)]
"""An epoch (int), or a fraction of max_epochs (float)."""


def _with_weights(base: type[Section], final: bool = False) -> Any:
    """Return a section with a weight for each label after the keys of `base`."""
    fields: dict[str, Any] = {}
    for name, spec in LABELS.items():
        if final:
            fields[name] = (NotNegative | None, Field(default=None, description="final weight; null: unchanged"))
            continue
        per = (" per atom" if name == "energy" else "") + (", by component" if spec.row else "")
        text = f"weight; errors in {spec.unit}{per}" if spec.unit else "weight"
        fields[name] = (NotNegative, Field(default=spec.default_weight, description=text))
    return create_model("LabelWeights", __base__=base, **fields)


class _Schedule(Section):
    kind: Literal["step", "linear"] = Field(default="step", description="step: at `start`; linear: from start to end")
    start: Moment = Field(default=0.75, description="epoch, or fraction of max_epochs")
    end: Moment = Field(default=1.0, description="linear: where the final weights are reached")


class LossScheduleConfig(_with_weights(_Schedule, final=True)):  # type: ignore[misc]
    """Final weights, reached at once (kind: step), or linearly between two epochs (kind: linear).

    The best epoch is chosen with the final weights, so that losses of all epochs can be compared.
    """

    properties: dict[str, NotNegative] = Field(default={}, description="final weights of further properties")

    @model_validator(mode="after")
    def check_order(self) -> LossScheduleConfig:
        if self.kind == "linear" and type(self.start) is type(self.end) and self.end <= self.start:
            raise ValueError(f"end ({self.end}) must be after start ({self.start})")
        return self


class _Errors(Section):
    kind: Kind = Field(default="mse", description="ℓ: mse, l1 or huber")
    kinds: dict[str, Kind] = Field(default={}, description="ℓ of single properties, as in {forces: l1}")
    huber_delta: Positive = Field(default=0.01, description="error above which huber is linear, in the label's unit")


class LossConfig(_with_weights(_Errors)):  # type: ignore[misc]
    """loss = energy·ℓ(ΔE/N) + forces·ℓ(ΔF) + stress·ℓ(Δσ) + …, each a mean over the labels that are present.

    With weights of frames, ℓ is multiplied by that of its frame.
    """

    properties: dict[str, NotNegative] = Field(
        default={}, description="weights of further properties, 1 where not given"
    )
    config_weights: dict[str, NotNegative] = Field(
        default={}, description="factors of all losses by kind of frame (data.keys.config_type), as in {bulk: 2.0}"
    )
    relative_energy: NotNegative = Field(
        default=0.0,
        description="weight of energies relative to the mean of their group (data.keys.group), in eV; reference "
        "energies cancel",
    )
    per_atom: bool = Field(default=True, description="divide energy errors by the number of atoms")
    schedule: LossScheduleConfig | None = Field(
        default=None, description="other weights later: {kind: step or linear, start, end, energy, forces, …}"
    )

    @model_validator(mode="after")
    def check_weights(self) -> LossConfig:
        if not any(getattr(self, name) for name in (*LABELS, RELATIVE)) and not any(self.properties.values()):
            raise ValueError("at least one of energy, forces, stress needs a weight above 0")
        return self

    def weight(self, label: str) -> float:
        """Return the weight of a label by its name in the data, as "forces" or "scalar:gap"."""
        if label in FRAME_LABELS:
            return 0.0
        name = label.partition(":")[2]
        return self.properties.get(name, 1.0) if name else getattr(self, label)

    def uses(self, label: str) -> bool:
        """Return whether a label of the data is trained on."""
        return self.weight(label) > 0 or (label == "energy" and self.relative_energy > 0)

    def kind_of(self, label: str) -> str:
        """Return ℓ of a label."""
        return self.kinds.get(label.partition(":")[2] or label, self.kind)

    def at(self, epoch: int, max_epochs: int) -> LossConfig:
        """Return the loss of epoch 0, 1, …; `final` is that of the end.

        Args:
            epoch: counted from 0.
            max_epochs: the number of epochs, for times that are given as fractions of it.
        """
        if self.schedule is None:
            return self
        start, end = (epoch_of(moment, max_epochs) for moment in (self.schedule.start, self.schedule.end))
        if self.schedule.kind == "step":
            share = float(epoch >= start)
        else:
            share = min(1.0, max(0.0, (epoch - start) / max(1, end - start)))
        return self._mixed(share)

    @property
    def final(self) -> LossConfig:
        """The loss after the schedule."""
        return self if self.schedule is None else self._mixed(1.0)

    def _mixed(self, share: float) -> LossConfig:
        assert self.schedule is not None
        given = self.schedule
        changed = {
            name: (1 - share) * getattr(self, name) + share * getattr(given, name)
            for name in LABELS
            if getattr(given, name) is not None
        }
        properties = dict(self.properties)
        for name, weight in given.properties.items():
            properties[name] = (1 - share) * properties.get(name, 1.0) + share * weight
        return self.model_copy(update={**changed, "properties": properties, "schedule": None})


def epoch_of(moment: int | float, max_epochs: int) -> int:
    """Return the epoch, counted from 0, that a `Moment` means."""
    return moment if isinstance(moment, int) else round(moment * max_epochs)


# --- The section `data` of the configuration: files, labels, units, the division into subsets ---

Count = Annotated[int, Field(ge=0)]


def _check_share(value: int | float) -> int | float:
    if value < 0 or (isinstance(value, float) and value >= 1):
        raise ValueError("should be a whole number of frames, or a fraction between 0 and 1")
    return value


Share = Annotated[int | float, AfterValidator(_check_share)]


def _text(default: str | None, description: str) -> Any:
    return (str | None, Field(default=default, description=description))


def _label_keys() -> Any:
    """Return a section with the name of each label in the data; the virial may be given instead of the stress."""
    virial = _text(None, "−volume × stress, where the file has that instead")
    fields: dict[str, Any] = {}
    for name, spec in LABELS.items():
        fields[name] = _text(spec.default_key, spec.description)
        fields.update({"virial": virial} if name == "stress" else {})
    return create_model("LabelKeys", __base__=Section, **fields)


class KeysConfig(_label_keys()):  # type: ignore[misc]
    """Names of the labels in the data file; null where the file has none."""

    properties: dict[str, str] = Field(
        default={}, description="property -> its name in the file, as in {gap: HOMO_LUMO_gap}"
    )
    numbers: str | None = Field(default=None, description="atomic numbers; npy, npz and hdf5 only")
    positions: str | None = Field(default=None, description="positions with another name; npz and hdf5 only")
    OF_SOURCES: ClassVar = ("numbers", "positions", "weight", "config_type", "group", "charge", "spin")
    """Keys that a source may have without the others."""

    weight: str | None = Field(default=None, description="factor of the frame's part of the loss; 1 where it is absent")
    config_type: str = Field(default="config_type", description="kind of a frame, for training.loss.config_weights")
    group: str | None = Field(
        default=None, description="name of a group, as of a scan, whose relative energies are trained"
    )
    charge: str | None = Field(default=None, description="total charge in e; null: wherever the file states it, else 0")
    spin: str | None = Field(default=None, description="spin multiplicity; null: wherever the file states it")


_UNITS = {
    "energy": "eV, meV, hartree, kJ/mol, kcal/mol, rydberg",
    "length": "angstrom, bohr, nm, pm",
    "force": "null: energy/length, as in eV/angstrom",
    "stress": "null: energy/length^3; also GPa, kbar",
    "dipole": "null: e*length; also debye",
}
"""Kind of unit -> known units; charges are in e."""

_KINDS = {name: spec.kind for name, spec in LABELS.items() if spec.kind in _UNITS}


def _label_units() -> Any:
    """Return a section with the unit of each label, and the unit of length."""
    kinds = {"energy": "energy", "length": "length", **_KINDS}
    fields: dict[str, Any] = {name: _text(None, _UNITS[str(kind)]) for name, kind in kinds.items()}
    return create_model("LabelUnits", __base__=Section, **fields)


class UnitsConfig(_label_units()):  # type: ignore[misc]
    """Units that the data file is written in; values are converted to eV and Å on reading.

    null: the units that an HDF5 file states (an error if it states none); eV and Å for the formats of ASE.
    """

    properties: dict[str, str] = Field(
        default={}, description="property -> unit, as in {gap: hartree}; absent: a plain number"
    )

    @model_validator(mode="after")
    def check_units(self) -> UnitsConfig:
        for name, kind in {**_KINDS, "length": "length"}.items():
            if getattr(self, name) is not None:
                units.factor(str(kind), getattr(self, name))
        for name, unit in self.properties.items():
            try:
                any_factor(unit, name)
            except BadData as error:
                raise ValueError(f"properties.{error}") from None
        return self


class SplitConfig(Section):
    """How frames of `data.train` are divided: whole numbers are frames, fractions are parts of the file."""

    train: Share | None = Field(default=None, description="null: all that remain")
    validation: Share = Field(default=0.1, description="frames held out to choose the best epoch")
    test: Share | None = Field(
        default=None, description="frames held out for the final errors; null: 0.1, or less if no more remain"
    )
    seed: Count = Field(default=0, description="seed of the random division")
    file: str | None = Field(default=None, description="a splits.json of an earlier run, instead of a random division")
    bootstrap: Count | None = Field(
        default=None, description="a seed: draw as many training frames, with repetition; for ensembles"
    )


class SourceConfig(Section):
    """One of several sources of frames, with the level of theory of its labels."""

    train: str | list[str] = Field(description="data file, or a list of files")
    level: str = Field(
        default="", validate_default=True,
        description="required: method and basis set of the labels; equal names are one level",
    )  # fmt: skip
    validation: str | list[str] | None = Field(default=None, description="own file(s); null: split from train")
    test: str | list[str] | None = Field(default=None, description="own file(s); null: split from train")
    format: str = Field(default="auto", description="as data.format")
    keys: KeysConfig | None = Field(default=None, description="null: as data.keys")
    units: UnitsConfig | None = Field(default=None, description="null: as data.units")
    split: SplitConfig | None = Field(default=None, description="null: as data.split")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="factor of the loss of these frames"
    )
    share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="part of the frames of all sources in an epoch, by repetition; null: each frame once"
    )
    licence: str = Field(default="not stated", description="licence of this file, for the model card")
    citation: str = Field(default="not stated", description="what users of this file cite, for the model card")

    @field_validator("level", mode="after")
    @classmethod
    def check_level(cls, value: str) -> str:
        if not value.strip():
            raise PydanticCustomError("missing", "is required", {"example": ", as in level: PBE0-D3/def2-TZVP"})
        return value


class LevelConfig(Section):
    """Settings of each further level of theory, besides the shared network."""

    readout: Literal["own", "shared"] = Field(default="own", description="the head of energies")
    references: Literal["own", "shared"] = Field(default="own", description="reference energies, fitted to its frames")
    scale: Literal["own", "shared"] = Field(default="shared", description="eV per unit of the network")


class DataConfig(Section):
    """Where the frames come from."""

    sources: list[SourceConfig] | None = Field(
        default=None,
        description="instead of train: files of several levels of theory, as [{train, level}, …]; see docs/training.md",
    )

    dataset: str | None = Field(
        default=None, description="a published data set, as rmd17 (see docs/data.md); null: data files"
    )
    train: str | list[str] | None = Field(
        default=None, validate_default=True, description="data file, or a list of files"
    )
    root: str | None = Field(default=None, description="folder of published data sets; null: the user's cache")
    download: bool = Field(default=True, description="fetch files of a published data set that are not there")
    molecule: str | None = Field(default=None, description="molecule of md17, rmd17, md22, botnet")
    version: str | None = Field(default=None, description="of spice, comp6")
    subsets: list[str] | None = Field(default=None, description="subset of spice, comp6, botnet")
    energy: str | None = Field(default=None, description="which energy of qm9 (U0, U, H, G), ani1x, spice")
    max_force: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="spice, maceoff: leave out frames with larger forces, eV/Å"
    )
    validation: str | list[str] | None = Field(
        default=None, description="own file(s), or subset(s) of botnet by name; null: split from data.train"
    )
    test: str | list[str] | None = Field(
        default=None, description="own file(s), or subset(s) of botnet by name; null: split from data.train"
    )
    format: str = Field(
        default="auto", description="auto: by the file's name; else one of docs/data.md, as vasp-out, dpdata/deepmd/npy"
    )
    keys: KeysConfig = Field(default_factory=KeysConfig)
    units: UnitsConfig = Field(default_factory=UnitsConfig)
    split: SplitConfig = Field(default_factory=SplitConfig)
    cache: str = Field(
        default="auto",
        description="auto: files above 200 MiB are converted once, into the user's cache; off; or a folder",
    )
    num_workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=0, description="number of data-loading processes; 0: load in the training process"
    )
    level_of_theory: str = Field(
        default="not stated", description="of the labels, for the model card, as in 'GFN2-xTB'"
    )
    licence: str = Field(default="not stated", description="licence of the data, for the model card")
    citation: str = Field(
        default="not stated", description="what users of the data cite, for the log and the model card"
    )

    @model_validator(mode="before")
    @classmethod
    def describe_published(cls, value: Any) -> Any:
        """Fill in the level of theory, licence and citation of a published data set."""
        if not isinstance(value, Mapping) or value.get("dataset") is None or not set(value) <= set(cls.model_fields):
            return value  # mistyped keys are found first
        try:
            published = make_published(str(value["dataset"]), _options(value))
        except TypeError:  # an option of a wrong type, which is found below
            return value
        names = ("level_of_theory", "licence", "citation")
        return {**{name: getattr(published, name) for name in names}, **value}

    @field_validator("format", mode="after")
    @classmethod
    def check_format(cls, value: str) -> str:
        try:
            find_format(value)
        except (BadData, MissingBackend) as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("train", mode="after")
    @classmethod
    def check_train(cls, value: Any, info: ValidationInfo) -> Any:
        if "sources" not in info.data:  # they have errors, which are enough
            return value
        if info.data["sources"] is not None:
            if value is not None or info.data.get("dataset") is not None:
                raise ValueError("data.train, data.dataset and data.sources exclude each other: give one of them")
            return value
        if value is None and info.data.get("dataset") is None:
            raise PydanticCustomError("missing", "is required")
        if value is not None and info.data.get("dataset") is not None:
            raise ValueError(f"is not to be given together with data.dataset ({info.data['dataset']})")
        return value

    @model_validator(mode="after")
    def check_options(self) -> DataConfig:
        given = [name for name in OPTIONS if getattr(self, name) is not None]
        if self.dataset is None and given:
            raise ValueError(f"{given[0]} requires data.dataset, the name of a published data set")
        return self

    @model_validator(mode="after")
    def check_sources(self) -> DataConfig:
        if self.sources is None:
            return self
        if not self.sources:
            raise ValueError("sources: should list at least one source, as {train: file.xyz, level: PBE0}")
        for name in ("validation", "test"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: belongs to each of data.sources")
        if self.level_of_theory != "not stated":
            raise ValueError("level_of_theory: each of data.sources has its level")
        spelled: dict[str, str] = {}
        for name in (source.level for source in self.sources):
            other = spelled.setdefault(" ".join(name.casefold().split()), name)
            if other != name:
                raise ValueError(f"sources: the levels '{other}' and '{name}' differ only in spelling; give one name")
        shares = [source.share for source in self.sources if source.share is not None]
        all_given = len(shares) == len(self.sources)
        if sum(shares) > 1 + 1e-6 or (all_given and sum(shares) < 1 - 1e-6) or (not all_given and sum(shares) >= 1):
            raise ValueError(
                f"sources: the shares add up to {sum(shares):g}; they should be 1 together, or less where a source has "
                "none"
            )
        asked = {name for name, key in self.keys.model_dump().items() if key and name not in KeysConfig.OF_SOURCES}
        for k, part in enumerate(self.parts):
            if part.split.file is not None:
                raise ValueError(f"sources.{k}: split.file belongs to a training on one source")
            for name, key in part.keys.model_dump().items():
                if key and name not in (*asked, *KeysConfig.OF_SOURCES):
                    raise ValueError(f"sources.{k}.keys.{name}: give data.keys.{name} too")
        return self

    @property
    def parts(self) -> list[DataConfig]:
        """A section for each source; without `sources`, this one."""
        if self.sources is None:
            return [self]
        given = ("train", "validation", "test", "format", "licence", "citation")
        own = ("keys", "units", "split")
        return [
            self.model_copy(update={
                "sources": None, "level_of_theory": source.level, **{name: getattr(source, name) for name in given},
                **{name: getattr(source, name) or getattr(self, name) for name in own},
            })
            for source in self.sources
        ]  # fmt: skip

    @property
    def levels(self) -> list[str]:
        """The levels of theory of the sources, in their order, each once."""
        return list(dict.fromkeys(source.level for source in self.sources or []))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the published data set."""
        return _options(self.model_dump())


OPTIONS = ("molecule", "version", "subsets", "energy", "max_force")


def _options(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section[name] for name in OPTIONS if section.get(name) is not None}


# --- Settings that act only where another setting allows it: elsewhere they are refused, and not ignored ---
#
# A value that changes nothing anyway is accepted: null, and what `Rule.harmless` names, such as a weight of 0. A
# default is refused too where somebody wrote it, as in {dipole: 1} without dipoles, but not in a section that lists
# most of its settings: `torchmdnet2 config` prints such sections, and a training writes them.


@dataclass(frozen=True)
class Rule:
    """Says when a setting has an effect, so that settings without effect are refused.

    Attributes:
        acts: whether it has one, from the configuration, or from the section of a prior, head or model.
        needs: what it needs, in words.
        harmless: values that are accepted although they have no effect.
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
    "data.format": Rule(
        lambda c: c.data.dataset is None, "belongs to data files, and data.dataset is a published data set"
    ),
    "data.keys.config_type": Rule(lambda c: bool(c.training.loss.config_weights), "needs training.loss.config_weights"),
    "data.split.train": Rule(lambda c: c.data.split.file is None, "is not read together with data.split.file"),
    "data.split.seed": Rule(
        lambda c: (
            c.data.split.file is None
            and (c.data.validation is None or c.data.test is None or c.data.split.train is not None)
        ),
        "needs a random division: data.split.file, or files of validation and test, leave none to draw",
    ),
    **{
        f"data.split.{name}": Rule(
            lambda c, name=name: c.data.split.file is None and getattr(c.data, name) is None,  # type: ignore[misc]
            f"is not read together with data.{name} or data.split.file",
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
    "training.batch_size": Rule(lambda c: not _budget(c), "is not read together with max_atoms or max_edges"),
    "training.energy_scale": Rule(
        lambda c: c.head is not None and c.init is None,
        "needs a head of energies and random weights to start from: fine-tuning keeps the scale of its file",
    ),
    "output.outliers": Rule(lambda c: c.output.report, "needs output.report", (0,)),
}
"""Path of a setting -> when it has an effect."""

_ALL_PAIRS = Rule(lambda p: p["method"] != "all_pairs", "needs another method: all_pairs has no cutoff")
_EWALD = Rule(lambda p: p["method"] in ("ewald", "pme"), "needs the method ewald or pme")
_FIELD = Rule(lambda p: p["method"] == "reaction_field", "needs the method reaction_field")
_SUMMED = Rule(lambda p: p["per"] == "system", "needs per: system")
_CHIRAL = Rule(lambda p: p["group"] == "SO(3)", "needs group: SO(3)")

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
    "d3": {"switch_width": Rule(lambda p: p["cutoff"] is not None, "needs a cutoff")},
    "zbl": {"cutoff": Rule(lambda p: p["envelope"] == "cosine", "needs the envelope cosine")},
    "scalar_property": {"reduce": _SUMMED},
    "vector": {"reduce": _SUMMED},
    "tensornet": {"skew_sign": _CHIRAL},
    "tensornet2": {"skew_sign": _CHIRAL},
}
"""Name of a prior, head or model -> argument -> when it has an effect."""


def refuse_idle(config: Any) -> None:
    """Raise ValueError for a setting that has no effect with the others.

    Args:
        config: the whole configuration.
    """
    for path, rule in RULES.items():
        found = _wanted(config, path)
        if found is not None:
            _refuse(path, found, None, rule, config)
    for name, spec in config.training.loss.kinds.items():
        if name in LABELS.keys() and not _WEIGHTS[name].acts(config):
            raise ValueError(f"training.loss.kinds.{name}: has no effect ({spec}): it {_WEIGHTS[name].needs}")
    schedule = config.training.loss.schedule
    if schedule is not None and not schedule.properties and all(getattr(schedule, name) is None for name in LABELS):
        raise ValueError("training.loss.schedule: has no effect: give the weights that change, as in {energy: 50}")
    for path, part, registry in _parts(config):
        for key, rule in ARGUMENTS.get(part["name"], {}).items():
            default = section_of(registry[part["name"]]).model_fields[key].default
            _refuse(f"{path}.{key}", part[key], default, rule, part)


def _refuse(path: str, value: Any, default: Any, rule: Rule, section: Any) -> None:
    if value != default and value not in rule.harmless and not rule.acts(section):
        raise ValueError(f"{path}: has no effect: it {rule.needs}")


def _wanted(config: Any, path: str) -> Any:
    """Return a setting; None if its section is not there, or if it was not given."""
    *sections, key = path.split(".")
    section: Section = config
    for name in sections:
        section = getattr(section, name)
        if section is None:
            return None
    fields, value = type(section).model_fields, getattr(section, key)
    written = key in section.model_fields_set and 2 * len(section.model_fields_set) < len(fields)
    return value if written or value != fields[key].get_default(call_default_factory=True) else None


def _parts(config: Any) -> Iterator[tuple[str, Mapping[str, Any], Registry]]:
    """Yield priors, heads and the model, with their paths."""
    if config.init is None:  # else its arguments are those of the file
        yield "model", config.model, REPRESENTATIONS
    for k, prior in enumerate(config.priors):
        yield f"priors.{k}", prior, PRIORS
    for k, head in enumerate(config.properties):
        yield f"properties.{k}", head, HEADS
    if config.head is not None:
        yield "head", config.head, HEADS
