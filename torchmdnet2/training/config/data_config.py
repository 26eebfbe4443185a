"""The section `data` of the configuration: files, labels, units, the division into subsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ... import units
from ...data.conversion import any_factor
from ...data.datasets import make_published
from ...data.formats import find_format
from ...data.labels import LABELS
from ...errors import BadData, MissingBackend
from .schema import Section

__all__ = ["DataConfig", "KeysConfig", "SplitConfig", "UnitsConfig"]

Count = Annotated[int, Field(ge=0)]


def _check_share(value: int | float) -> int | float:
    if value < 0 or (isinstance(value, float) and value >= 1):
        raise ValueError("should be a whole number of frames, or a fraction between 0 and 1")
    return value


Share = Annotated[int | float, AfterValidator(_check_share)]


def _text(default: str | None, description: str) -> Any:
    return (str | None, Field(default=default, description=description))


def _label_keys() -> Any:
    """A section with the name of each label in the data; the virial may be given instead of the stress."""
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
    numbers: str | None = Field(default=None, description="atomic numbers; only of npy, npz and hdf5")
    positions: str | None = Field(default=None, description="positions; only of npz and hdf5, with names of their own")
    weight: str | None = Field(default=None, description="factor of the frame's part of the loss; 1 where it is absent")
    config_type: str = Field(default="config_type", description="kind of a frame, for training.loss.config_weights")
    charge: str | None = Field(default=None, description="total charge in e; null: 'charge' where it is there, else 0")
    spin: str | None = Field(default=None, description="spin multiplicity; null: 'spin' where it is there")


_UNITS = {
    "energy": "eV, meV, hartree, kJ/mol, kcal/mol, rydberg",
    "length": "angstrom, bohr, nm, pm",
    "force": "null: energy/length, as in eV/angstrom",
    "stress": "null: energy/length^3; also GPa, kbar",
    "dipole": "null: e*length; also debye",
}
"""Kind of unit -> which there are; charges are in e."""

_KINDS = {name: spec.kind for name, spec in LABELS.items() if spec.kind in _UNITS}


def _label_units() -> Any:
    """A section with the unit of each label, and the unit of length."""
    kinds = {"energy": "energy", "length": "length", **_KINDS}
    fields: dict[str, Any] = {name: _text(None, _UNITS[str(kind)]) for name, kind in kinds.items()}
    return create_model("LabelUnits", __base__=Section, **fields)


class UnitsConfig(_label_units()):  # type: ignore[misc]
    """Units that the data file is written in; values are converted to eV and Å on reading.

    null: what an HDF5 file says of itself (an error where it says nothing), eV and Å for the formats of ASE.
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
    seed: Count = Field(default=0, description="of the random division")
    file: str | None = Field(default=None, description="a splits.json of an earlier run, instead of a random division")
    bootstrap: Count | None = Field(
        default=None, description="a seed: draw as many training frames, with repetition; for ensembles"
    )


class DataConfig(Section):
    """Where the frames come from."""

    dataset: str | None = Field(
        default=None, description="a published data set, as rmd17 (see docs/data.md); null: data files"
    )
    train: str | list[str] | None = Field(
        default=None, validate_default=True, description="data file, or a list of files"
    )
    root: str | None = Field(default=None, description="folder of published data sets; null: the user's cache")
    download: bool = Field(default=True, description="fetch files of a published data set that are not there")
    molecule: str | None = Field(default=None, description="of md17, rmd17, md22, botnet")
    version: str | None = Field(default=None, description="of spice, comp6")
    subsets: list[str] | None = Field(default=None, description="of spice, comp6, botnet")
    energy: str | None = Field(default=None, description="which energy: of qm9 (U0, U, H, G), ani1x, spice")
    max_force: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="of spice, maceoff: leave out frames with larger forces, eV/Å"
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
    level_of_theory: str = Field(default="not stated", description="for the model card, as in 'GFN2-xTB'")
    licence: str = Field(default="not stated", description="of the data, for the model card")

    @model_validator(mode="before")
    @classmethod
    def describe_published(cls, value: Any) -> Any:
        """A published data set knows its level of theory and licence."""
        if not isinstance(value, Mapping) or value.get("dataset") is None or not set(value) <= set(cls.model_fields):
            return value  # mistyped keys are found first
        try:
            published = make_published(str(value["dataset"]), _options(value))
        except TypeError:  # an option of a wrong type, which is found below
            return value
        return {"level_of_theory": published.level_of_theory, "licence": published.licence, **value}

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

    @property
    def options(self) -> dict[str, Any]:
        """Those of the published data set."""
        return _options(self.model_dump())


OPTIONS = ("molecule", "version", "subsets", "energy", "max_force")


def _options(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: section[name] for name in OPTIONS if section.get(name) is not None}
