"""The configuration of active learning: these classes define the YAML of `torchmdnet2 learn`.

The section `train` is a configuration of `torchmdnet2 train`, without the settings that the loop makes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from .. import units
from ..core.yaml_reader import read_config
from ..errors import BadConfig
from ..md.options import FRICTION
from ..training.config.config import Config, parse_config, section_lines, yaml_line
from ..training.config.schema import Section, closest, first_error, homes, section_of, validate_choice
from .labellers import LABELLERS, make_labeller
from .selection import SELECTIONS, make_selection

__all__ = [
    "DynamicsConfig", "LabelsConfig", "LearnConfig", "StartConfig", "default_learn_yaml", "load_learn_config",
    "parse_learn_config",
]  # fmt: skip


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1)]


class KeysConfig(Section):
    """Names of the labels in the files."""

    energy: str = Field(default="energy", description="total energy")
    forces: str = Field(default="forces", description="forces")
    charge: str | None = Field(default=None, description="total charge in e; null: 'charge' if present, else 0")
    spin: str | None = Field(default=None, description="multiplicity; null: 'spin' if present")


class UnitsConfig(Section):
    """Units of the files."""

    energy: str = Field(default="eV", description="eV, meV, hartree, kJ/mol, kcal/mol, rydberg")
    length: str = Field(default="angstrom", description="angstrom, bohr, nm, pm")
    forces: str | None = Field(default=None, description="null: energy/length, as in eV/angstrom")

    @model_validator(mode="after")
    def check_units(self) -> UnitsConfig:
        for kind, unit in (("energy", self.energy), ("length", self.length), ("force", self.forces)):
            if unit is not None:
                units.factor(kind, unit)
        return self


class StartConfig(Section):
    """The first frames."""

    file: str | list[str] = Field(description="data file(s): labelled frames, or structures")
    frames: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="number of frames to take, evenly spread over the file(s); null: all"
    )
    labelled: bool = Field(
        default=True, description="false: the frames are labelled first, which counts towards the budget"
    )
    keys: KeysConfig = Field(default_factory=KeysConfig)
    units: UnitsConfig = Field(default_factory=UnitsConfig)
    level_of_theory: str | None = Field(
        default=None, description="level of theory of the labels; must be the labeller's. null: not stated"
    )
    verify: Annotated[int, Field(ge=0)] = Field(
        default=1, description="number of frames that are labelled again at the start; the run stops if labels differ"
    )


class LabelsConfig(Section):
    """The labeller, the number of labels, and the number of processes."""

    labeller: dict[str, Any] = Field(
        default_factory=lambda: {"name": "gfn2-xtb"}, validate_default=True, description="name, and its arguments"
    )
    budget: Whole = Field(default=200, description="stop after this number of labels, failed ones included")
    per_round: Whole = Field(default=16, description="labels between two trainings")
    processes: Whole = Field(default=1, description="number of frames that are labelled at once")
    threads: Whole = Field(default=1, description="OMP_NUM_THREADS of each of these processes")
    timeout: Positive | None = Field(
        default=600.0, description="s for one frame, which is then put aside; null: no limit"
    )
    max_force: Positive | None = Field(
        default=50.0, description="eV/Å; frames with larger forces are put aside; null: no limit"
    )

    @field_validator("labeller", mode="before")
    @classmethod
    def check_labeller(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, LABELLERS, None)


class DynamicsConfig(Section):
    """Langevin dynamics that look for frames and show whether the models are stable."""

    starts: str | list[str] | None = Field(
        default=None, description="structures to start from; null: the frames of start"
    )
    temperatures: Annotated[list[Positive], Field(min_length=1)] = Field(default=[300.0, 600.0], description="K")
    time: Positive = Field(default=5.0, description="ps")
    replicas: Whole = Field(
        default=16, description="number at each temperature; replica k runs with member k modulo members"
    )
    timestep: Positive = Field(default=0.5, description="fs")
    friction: Positive = Field(default=FRICTION, description="1/ps")
    every: Positive = Field(default=0.05, description="ps between two frames that may be selected")

    @model_validator(mode="after")
    def check_times(self) -> DynamicsConfig:
        if self.time < self.every or self.every < 1e-3 * self.timestep:
            raise ValueError(f"every ({self.every} ps) must be between one timestep and time ({self.time} ps)")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures: a temperature is given twice")
        return self


class StopConfig(Section):
    """When the loop ends."""

    whole: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="fraction of the replicas that must stay whole, at every temperature"
    )
    spread: Positive | None = Field(
        default=None, description="eV/Å; the spread of 99 % of the frames must also be below, at every temperature"
    )
    rounds: Whole = Field(default=20, description="largest number of trainings")


class FolderConfig(Section):
    """The folder of the run."""

    folder: str = Field(default="runs/learn", min_length=1, description="made if it does not exist")


class LearnConfig(Section):
    """A whole run of active learning."""

    start: StartConfig
    labels: LabelsConfig = Field(default_factory=LabelsConfig)
    dynamics: DynamicsConfig = Field(default_factory=DynamicsConfig)
    selection: dict[str, Any] = Field(
        default_factory=lambda: {"name": "disagreement"}, validate_default=True, description="name, and its arguments"
    )
    stop: StopConfig = Field(default_factory=StopConfig)
    members: Annotated[int, Field(ge=2)] = Field(default=3, description="models of the committee")
    devices: str | None = Field(
        default=None,
        description="devices that share trainings and dynamics, with a process for each: all, or names such as "
        "cuda:0,cuda:1 or cpu,cpu; null: the device of train.training",
    )
    validation: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.1, description="fraction of the frames that is not trained on and chooses the best epoch"
    )
    train: dict[str, Any] = Field(
        default_factory=dict,
        description="the first training: model, head, priors, init, training; see docs/training.md",
    )
    refine: dict[str, Any] = Field(
        default_factory=dict, description="keys of train.training that differ in later rounds, such as {max_epochs: 20}"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="seed of weights, batches, velocities, noise and random selection"
    )
    licence: str = Field(default="not stated", description="licence of the models, for their cards")
    output: FolderConfig = Field(default_factory=FolderConfig)

    @field_validator("devices")
    @classmethod
    def check_devices(cls, value: str | None) -> str | None:
        value = value and value.replace(" ", "")
        if value is not None and not re.fullmatch(r"auto|all|cpu(,cpu)*|cuda(:\d+)?(,cuda(:\d+)?)*", value):
            raise ValueError("should be all, or names of one kind, such as cuda:0,cuda:1 or cpu,cpu")
        return value

    @field_validator("selection", mode="before")
    @classmethod
    def check_selection(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, SELECTIONS, "disagreement")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with all defaults."""
        return self.model_dump()

    def training(
        self, first: bool, data: Mapping[str, Any], folder: Path, seed: int, init: str | None = None
    ) -> Config:
        """Return the configuration of one training.

        Args:
            first: True in the first round.
            data: the section `data`.
            folder: folder of the output.
            seed: seed of the training.
            init: model file to start from, in later rounds.

        Raises:
            BadConfig: `train` or `refine` is not valid.
        """
        raw: dict[str, Any] = dict(self.train) if first else {"init": {"file": init}}
        given = self.train.get("training") or {}
        raw["training"] = {
            # later rounds keep the scale of the first
            **{key: value for key, value in given.items() if first or key != "energy_scale"},
            **({} if first else self.refine),
            "seed": seed,
        }
        if self.devices is not None:
            one, *others = self.devices.split(",")
            device = one.partition(":")[0] if others else one
            raw["training"]["device"] = "auto" if device == "all" else device
        raw["data"] = dict(data)
        raw["output"] = {"folder": str(folder), "report": False, "licence": self.licence}
        return parse_config(raw, "train" if first else "refine")


_ALLOWED = ("model", "head", "priors", "atom_filter", "init", "training")


def parse_learn_config(raw: Any, source: str = "configuration") -> LearnConfig:
    """Check plain data against the schema, the sections for trainings included.

    Raises:
        BadConfig: the configuration is not valid; the message lists all faults with their dotted paths.
    """
    if not isinstance(raw, Mapping):
        raise BadConfig(
            f"{source}: not a configuration: it must be a YAML file with sections (start, labels, dynamics, …); "
            "`torchmdnet2 config --learn` prints one to start from"
        )
    try:
        config = LearnConfig.model_validate(raw)
    except ValidationError as error:
        raise first_error(error, source, homes(LearnConfig)) from None
    try:
        _refuse_idle(config)
        _check_training(config)
        make_selection(config.selection)
        ours, theirs = make_labeller(config.labels.labeller).level_of_theory, config.start.level_of_theory
        if config.start.labelled and theirs not in (None, ours):
            raise BadConfig(
                f"start.level_of_theory: is {theirs}, but the labeller computes {ours}; labels of two levels cannot be "
                "trained on together. Set start.labelled to false, to label the structures again"
            )
    except BadConfig as error:
        raise BadConfig(f"{source}: {error}") from None
    return config


def _refuse_idle(config: LearnConfig) -> None:
    """Raise BadConfig for a setting that has no effect with the others."""
    start = config.start
    if not start.labelled:
        for key in ("verify", "level_of_theory"):
            if getattr(start, key) != StartConfig.model_fields[key].default and getattr(start, key):
                raise BadConfig(f"start.{key}: has no effect: it needs frames with labels (start.labelled)")
    if config.stop.rounds == 1 and config.refine:
        raise BadConfig("refine: has no effect: stop.rounds is 1, and there are no later rounds")


def _check_training(config: LearnConfig) -> None:
    for key in config.train:
        if key not in _ALLOWED:
            known = key in Config.model_fields
            why = "is set by the loop; leave it out" if known else f"unknown key{closest(key, _ALLOWED)}"
            raise BadConfig(f"train.{key}: {why}")
    training = config.train.get("training") or {}
    for name, section in (("train.training", training), ("refine", config.refine)):
        if isinstance(section, Mapping) and "seed" in section:
            raise BadConfig(f"{name}.seed: set `seed` instead; each training gets a seed that is derived from it")
    if config.devices is not None and "device" in {**training, **config.refine}:
        raise BadConfig("train.training.device: has no effect: `devices` is given, too; leave one of them out")
    data = {"train": "train.xyz"}
    config.training(True, data, Path("."), 0)
    plain = {**config.train, "training": {**training, **config.refine}}
    config.model_copy(update={"train": plain}).training(True, data, Path("."), 0)


def load_learn_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> LearnConfig:
    """Read and check a configuration file.

    Args:
        path: path of the YAML file.
        overrides: texts "dotted.key=value" with a value in YAML.

    Raises:
        FileNotFoundError: the file does not exist.
        BadConfig: the file is not YAML, a key is unknown, or a value has a wrong type or is out of range.
    """
    return parse_learn_config(read_config(path, overrides), str(path))


# --- The configuration of active learning as YAML: every key with its default and its description ---


def default_learn_yaml() -> str:
    """Return a configuration with all keys, defaults and descriptions; only `start.file` has to be filled in.

    Comments at the end list other labellers and their arguments.
    """
    lines = ["# torchmdnet2 learn: every key, its default and its meaning.", ""]
    for name, field in LearnConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            own = section_lines(kind, 1, {"file": "frames.xyz"} if name == "start" else {})
            lines += [f"{name}:", *own, ""]
        elif name == "selection":
            lines += [yaml_line("selection:", field.description), *_choice(SELECTIONS["disagreement"], "disagreement")]
            lines += [yaml_line("  # name: random", "to compare with; has no other keys"), ""]
        else:
            default: Any = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
            value = "null" if default is None else default if isinstance(default, int | float | str) else "{}"
            lines.append(yaml_line(f"{name}: {value}", field.description))
    lines += ["", "# Arguments of labels.labeller by its name:"]
    for name in LABELLERS:
        lines += ["#", *(f"#{line}" for line in _choice(LABELLERS[name], name))]
    return "\n".join(lines)


def _choice(cls: type, name: str) -> list[str]:
    return section_lines(section_of(cls), 1, {"name": name})
