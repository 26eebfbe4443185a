"""The configuration of a training run: these classes are the whole YAML.

`load_config` reads and checks a file before any data is touched; every finding is a BadConfig that names the
key's dotted path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from ..errors import BadConfig
from ..potential import SYMBOLS, Potential
from ..registry import HEADS, PRIORS, REPRESENTATIONS
from .data_config import DataConfig, KeysConfig, SplitConfig, UnitsConfig
from .loss_config import LossConfig
from .schema import Section, first_error, validate_choice
from .yaml_reader import parse_yaml

__all__ = [
    "Config",
    "DataConfig",
    "KeysConfig",
    "LossConfig",
    "OutputConfig",
    "SplitConfig",
    "TrainingConfig",
    "UnitsConfig",
    "load_config",
    "parse_config",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class TrainingConfig(Section):
    """How the weights are found."""

    seed: Count = Field(default=0, description="of the initial weights and the order of batches")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    num_threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="CPU threads; null: as torch has it. 1 is best for small molecules"
    )
    precision: Literal["float32", "float64"] = Field(
        default="float32", description="of the network; energies are summed in float64"
    )
    batch_size: Annotated[int, Field(ge=1)] = Field(default=16, description="frames per step")
    max_epochs: Annotated[int, Field(ge=1)] = Field(default=300, description="passes over the training frames")
    lr: Positive = Field(default=1e-3, description="peak learning rate of AdamW")
    lr_schedule: Literal["cosine", "plateau", "constant"] = Field(
        default="cosine", description="cosine, plateau or constant"
    )
    lr_min: NotNegative = Field(default=1e-6, description="where cosine ends and plateau stops")
    lr_patience: Count = Field(default=10, description="plateau: epochs without improvement before a reduction")
    lr_factor: Fraction = Field(default=0.8, description="plateau: factor of a reduction")
    warmup_steps: Count = Field(default=100, description="steps of linear warm-up")
    weight_decay: NotNegative = Field(default=0.0, description="on weight matrices only")
    gradient_clipping: Positive | None = Field(
        default=10.0, description="largest norm of the gradient; null: no clipping"
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.99, description="weight average that is evaluated and saved; 0: none"
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="epochs without improvement; null: never"
    )
    energy_scale: Literal["auto"] | Positive = Field(
        default="auto", description="eV per unit of the network; auto: rms of the forces"
    )
    loss: LossConfig = Field(default_factory=LossConfig)

    @model_validator(mode="after")
    def check_rates(self) -> TrainingConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min ({self.lr_min}) must not be above lr ({self.lr})")
        return self


class OutputConfig(Section):
    """What is written, and where."""

    folder: str = Field(default="runs/model", description="made when it does not exist")
    overwrite: bool = Field(default=False, description="replace a finished run in this folder")
    save_every_steps: Annotated[int, Field(ge=1)] = Field(
        default=500, description="steps between saved states, besides every epoch"
    )
    report: bool = Field(default=True, description="plots and model card at the end")
    licence: str = Field(default="not stated", description="of the model, for the model card")


def _check_prior(value: Any) -> dict[str, Any]:
    """One entry of `priors`; atomref may say `energies: fit` and may name elements by symbol."""
    fit, given = False, value
    if isinstance(value, Mapping) and value.get("name") == "atomref":
        energies = value.get("energies", "fit")
        fit = energies == "fit"
        if not fit and not isinstance(energies, Mapping):
            raise ValueError(f"energies: should be 'fit' or a table of element: eV, got {energies!r}")
        given = {**value, "energies": None if fit else _by_atomic_number(energies)}
    checked = validate_choice(given, PRIORS, None)
    return {**checked, "energies": "fit"} if fit else checked


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


PriorConfig = Annotated[dict[str, Any], BeforeValidator(_check_prior)]


class Config(Section):
    """A whole training run."""

    data: DataConfig
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "tensornet"}, validate_default=True)
    head: dict[str, Any] = Field(default_factory=lambda: {"name": "scalar"}, validate_default=True)
    priors: list[PriorConfig] = Field(
        default_factory=lambda: [{"name": "atomref", "energies": "fit"}], validate_default=True
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)

    @field_validator("model", mode="before")
    @classmethod
    def check_model(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, REPRESENTATIONS, "tensornet")

    @field_validator("head", mode="before")
    @classmethod
    def check_head(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, HEADS, "scalar", leave_out=("hidden_channels",))

    @model_validator(mode="after")
    def check_building(self) -> Config:
        """Build the potential once: the classes themselves check what types and ranges cannot."""
        priors = [{**p, "energies": {}} if p.get("energies") == "fit" else p for p in self.priors]
        try:
            with torch.random.fork_rng(devices=[]):
                Potential.from_config({"model": self.model, "head": self.head, "priors": priors})
        except (TypeError, ValueError) as error:
            raise ValueError(f"model, head or priors: {error}") from error
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data, defaults filled in; `Config.model_validate` reads it back."""
        return self.model_dump()


def parse_config(raw: Any, source: str = "configuration") -> Config:
    """Check plain data against the schema.

    Args:
        raw: what the YAML says.
        source: named in errors.

    Raises:
        BadConfig: every finding, each with its dotted path.
    """
    if not isinstance(raw, Mapping):
        raise BadConfig(f"{source}: should be sections (data, model, training, …), got {type(raw).__name__}")
    try:
        return Config.model_validate(dict(raw))
    except ValidationError as error:
        raise first_error(error, source) from None


def load_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Config:
    """Read and check a configuration file.

    Args:
        path: YAML.
        overrides: "dotted.key=value" each, the value being YAML; a number addresses an entry of a list.

    Raises:
        FileNotFoundError: there is no such file.
        BadConfig: not YAML, an unknown key, a wrong type, a value out of range.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    try:
        raw = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path}: not a text file: {error}") from error
    raw = {} if raw is None else raw
    for override in overrides:
        _apply_override(raw, override)
    return parse_config(raw, str(path))


def _apply_override(raw: Any, override: str) -> None:
    """Set one value in nested dictionaries and lists; missing sections are made, wrong ones found by validation."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise BadConfig(f"'{override}': write an override as section.key=value, for example training.lr=1e-3")
    *parents, last = path.split(".")
    node = raw
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        else:
            raise BadConfig(f"'{override}': there is no section '{part}' to set a value in")
    value = parse_yaml(text, f"'{override}'")
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise BadConfig(f"'{override}': '{last}' is not a key that can be set")
