"""The configuration of a training run: these classes are the whole YAML.

`load_config` checks a file before any data are read; a BadConfig names the dotted path of every wrong key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import PydanticUndefined

from ...core.yaml_reader import read_config
from ...errors import BadConfig
from ...potential.graph import PropertyHead, Representation
from ...potential.potential import Potential
from ...registry import HEADS, PRIORS, REPRESENTATIONS, did_you_mean
from ..steps.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from .build_potential import Built, PriorConfig, PropertyConfig, complete, load_priors, open_base
from .schema import Section, first_error, homes, section_of, validate_choice
from .sections import (
    DataConfig,
    KeysConfig,
    LevelConfig,
    LossConfig,
    Moment,
    SplitConfig,
    UnitsConfig,
    check_labels,
    epoch_of,
    predicted_shapes,
    refuse_idle,
)

__all__ = [
    "Config", "DataConfig", "KeysConfig", "LossConfig", "OutputConfig", "SplitConfig", "TrainingConfig",
    "UnitsConfig", "config_yaml", "default_config_yaml", "load_config", "parse_config", "section_lines",
    "yaml_line",
]  # fmt: skip


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _check_device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
        raise ValueError("should be auto, cpu, cuda or cuda:N")
    return value


class SwaConfig(Section):
    """Stochastic weight averaging: from `start` on, a constant rate and the plain mean of the weights of all steps."""

    start: Moment = Field(default=0.75, description="epoch, or fraction of max_epochs")
    lr: Positive | None = Field(default=None, description="learning rate of this stage; null: unchanged")

    def first_epoch(self, max_epochs: int) -> int:
        """Return the epoch, counted from 0, that the stage begins with."""
        return epoch_of(self.start, max_epochs)


class TrainingConfig(Section):
    """Steps, learning rate, optimizer, loss."""

    seed: Seed = Field(default=0, description="seed of the initial weights and of the order of batches")
    device: Annotated[str, AfterValidator(_check_device)] = Field(
        default="auto", description="auto, cpu, cuda or cuda:N"
    )
    num_threads: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="CPU threads; null: 1 for small steps, else torch's default; --check times both"
    )
    precision: Literal["float32", "tf32", "float64"] = Field(
        default="float32",
        description="type of the network; energies are summed in float64. tf32: float32 whose matrix products are "
        "rounded to 10 bits, on GPUs",
    )
    cuda_graphs: Literal["auto"] | bool = Field(
        default="auto",
        description="replay steps from CUDA graphs: auto (where it can be done), true or false. false also means no "
        "compiled kernels on a CPU",
    )
    batch_size: Annotated[int, Field(ge=1)] = Field(default=16, description="frames per step")
    max_atoms: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="largest number of atoms of a batch, instead of batch_size frames"
    )
    max_edges: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="largest number of edges (directed neighbors) of a batch, instead of batch_size frames",
    )
    max_epochs: Annotated[int, Field(ge=1)] = Field(default=300, description="passes over the training frames")
    max_minutes: Positive | None = Field(
        default=None,
        description="wall time of this start, reading of data included; cosine then reaches lr_min at its end. null: "
        "no limit",
    )
    lr: Positive = Field(default=1e-3, description="peak learning rate")
    lr_schedule: Literal["cosine", "plateau", "constant"] = Field(
        default="cosine", description="cosine, plateau or constant"
    )
    lr_min: NotNegative = Field(default=1e-6, description="final rate of cosine, lower limit of plateau")
    lr_patience: Count = Field(default=10, description="plateau: epochs without improvement before a reduction")
    lr_factor: Fraction = Field(default=0.8, description="plateau: factor of a reduction")
    warmup_steps: Count = Field(default=100, description="steps of linear warm-up")
    weight_decay: NotNegative = Field(default=0.0, description="weight decay, of weight matrices only")
    gradient_clipping: Positive | None = Field(
        default=10.0, description="largest norm of the gradient; null: no clipping"
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.99, description="decay of the weight average that is evaluated and saved; 0: no average"
    )
    early_stopping_patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="epochs without improvement; null: never"
    )
    energy_scale: Literal["auto"] | Positive = Field(
        default="auto", description="eV per unit of the network; auto: rms of the forces"
    )
    optimizer: dict[str, Any] = Field(
        default_factory=lambda: {"name": DEFAULT_OPTIMIZER},
        validate_default=True,
        description="muon or adamw, and its arguments",
    )
    layer_lr_decay: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="factor of the learning rate per level below the read-out; for fine-tuning"
    )
    swa: SwaConfig | None = Field(default=None, description="a last stage of equal-weighted average: {start, lr}")
    loss: LossConfig = Field(default_factory=LossConfig)

    @field_validator("optimizer", mode="before")
    @classmethod
    def check_optimizer(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, OPTIMIZERS, DEFAULT_OPTIMIZER, leave_out=("params",))

    @model_validator(mode="after")
    def check_rates(self) -> TrainingConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min ({self.lr_min}) must not be above lr ({self.lr})")
        return self


class InitConfig(Section):
    """Fine-tuning: the weights to start from, and which of them are not trained."""

    file: str = Field(description="a .tmn model file, the name of a potential, or a .ckpt of TorchMD-Net")
    freeze: list[str] = Field(
        default=[], description="freeze parameters whose names start with these, as [representation.tensor_embedding]"
    )
    replay: str | None = Field(
        default=None,
        description="a data file of structures, labelled by the model before the training and trained along, so that "
        "it forgets less",
    )
    energy_unit: str = Field(default="eV", description="unit of a .ckpt, which does not state it")
    level: str | None = Field(default=None, description="level of theory of a file that has several; null: its default")

    @model_validator(mode="before")
    @classmethod
    def file_alone(cls, value: Any) -> Any:
        """Accept `init: organic` as short for {file: organic}."""
        return {"file": value} if isinstance(value, str) else value


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(default="torchmdnet2", description="where the run is listed")
    name: str | None = Field(default=None, description="name of the run; null: that of the folder")
    mode: Literal["online", "offline"] = Field(default="online", description="offline: upload later with `wandb sync`")


class OutputConfig(Section):
    """The folder of the run, and what is written there."""

    folder: str = Field(default="runs/model", min_length=1, description="folder of the run; made if it does not exist")
    overwrite: bool = Field(default=False, description="replace a finished run in this folder")
    save_every_seconds: Annotated[float, Field(ge=0)] = Field(
        default=20.0, description="seconds between saves, which a crash may lose; Ctrl-C and SIGTERM lose nothing"
    )
    keep_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="epochs between models kept in addition to the best one, as epoch_0010.tmn"
    )
    report: bool = Field(default=True, description="report.html, plots and model card at the end")
    outliers: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=10, description="frames with the largest errors that the report shows and outliers.xyz holds"
    )
    tensorboard: bool = Field(default=False, description="metrics for TensorBoard too (needs the extra 'tensorboard')")
    wandb: WandbConfig | None = Field(
        default=None, description="metrics for Weights & Biases too: {project, name, mode} (needs the extra 'wandb')"
    )
    licence: str = Field(default="not stated", description="licence of the model, for the model card")


class Config(Section):
    """A whole training run."""

    data: DataConfig
    model: dict[str, Any] = Field(default_factory=lambda: {"name": "tensornet"}, validate_default=True)
    head: dict[str, Any] | None = Field(default_factory=lambda: {"name": "scalar"}, validate_default=True)
    properties: list[PropertyConfig] = Field(
        default=[], description="heads of other quantities than the energy, as [{name: dipole}]"
    )
    priors: list[PriorConfig] = Field(
        default_factory=lambda: [{"name": "atomref", "energies": "auto"}], validate_default=True
    )
    atom_filter: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="atoms up to this atomic number have no energy; -1: all have"
    )
    levels: dict[str, LevelConfig] = Field(
        default={},
        description="levels of theory of data.sources but the first: name -> {readout, references, scale}",
    )
    init: InitConfig | None = Field(
        default=None, description="fine-tuning: {file, level, freeze, replay}; model, head and priors from the file"
    )
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    _built: Built = PrivateAttr(default_factory=Built)

    @field_validator("model", mode="before")
    @classmethod
    def check_model(cls, value: Any) -> dict[str, Any]:
        return validate_choice(value, REPRESENTATIONS, "tensornet")

    @field_validator("head", mode="before")
    @classmethod
    def check_head(cls, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        checked = validate_choice(value, HEADS, "scalar", leave_out=("hidden_channels",))
        if issubclass(HEADS[checked["name"]], PropertyHead):
            raise ValueError(f"'{checked['name']}' does not predict energies: it belongs to `properties`")
        return checked

    @model_validator(mode="after")
    def check_building(self) -> Config:
        """Build the potential once: the classes themselves check what types and ranges cannot."""
        kept = [p for p in self.priors if p.get("energies") == "keep"]
        if kept and self.init is None:
            raise ValueError("priors: atomref.energies: keep is for fine-tuning; take 'auto' or a table of element: eV")
        try:
            shapes = predicted_shapes(self._built.get(self.parts(), self.training.seed))
        except (TypeError, ValueError) as error:
            raise ValueError(f"model, head, properties or priors: {error}") from error
        check_labels(self, shapes)
        refuse_idle(self)
        self._check_levels()
        return self

    def _check_levels(self) -> None:
        """Raise ValueError for settings of levels that no source has, and for levels without a head that can separate
        them."""
        names = self.data.levels
        replayed = self.base() if self.levels and self.init is not None and self.init.replay is not None else None
        for name in self.levels:
            if name in names[:1]:
                raise ValueError(
                    f"levels.{name}: is the first level, which has the read-out and the reference energies of the "
                    "model; give settings of the other levels"
                )
            if name not in names and not (replayed and name == replayed.level_of_theory):
                hint = did_you_mean(name, names) or "."
                raise ValueError(f"levels.{name}: no source has this level{hint} data.sources have "
                                 f"{', '.join(names) or 'none: without them there is one level'}")  # fmt: skip
            if self.levels[name].scale == "own" and self.init is not None:
                raise ValueError(f"levels.{name}.scale: fine-tuning keeps the scale of its file")
        if len(names) > 1 and self.head is None:
            raise ValueError("data.sources: several levels of theory need a head of energies")
        loss = self.training.loss
        if loss.relative_energy and not any(part.keys.group for part in self.data.parts):
            raise ValueError(
                "training.loss.relative_energy: needs data.keys.group, the entry that names the scan of a frame"
            )

    def parts(self) -> dict[str, Any]:
        """Return the sections that define a potential, as plain data."""
        names = ("model", "head", "properties", "priors", "atom_filter")
        return {name: getattr(self, name) for name in names}

    def untrained(self) -> Potential:
        """Return the potential with neutral values for what is fitted later; the same one until `take_network`.

        Raises:
            MissingBackend: a prior needs a package that is not installed.
        """
        potential = self._built.get(self.parts(), self.training.seed)
        load_priors(potential, self.priors, self.base())
        return potential

    def representation(self) -> Representation:
        """Return the representation of `untrained`."""
        return self._built.representation(self.parts(), self.training.seed)

    def take_network(self) -> Potential:
        """Give away `untrained`: the caller trains its representation and heads."""
        potential = self._built.get(self.parts(), self.training.seed)
        self._built.forget()
        return potential

    def base(self) -> Potential | None:
        """Return the potential that training starts from, read from the file of `init`; None without `init`.

        Raises:
            BadConfig, BadCheckpoint: as `open_base`.
        """
        return None if self.init is None else open_base(self.init.file, self.init.energy_unit, self.init.level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, defaults filled in; `Config.model_validate` reads it back."""
        return self.model_dump()


def parse_config(raw: Any, source: str = "configuration") -> Config:
    """Check plain data against the schema, and make a configuration of it.

    Args:
        raw: what the YAML says.
        source: named in errors.

    Raises:
        BadConfig: every finding, each with its dotted path.
    """
    if not isinstance(raw, Mapping):
        raise BadConfig(
            f"{source}: not a configuration: that is a YAML file with sections (data, model, training, …); "
            "`torchmdnet2 config` prints one to start from"
        )
    try:
        return Config.model_validate(complete(raw))
    except ValidationError as error:
        raise first_error(error, source, _homes()) from None


def _homes() -> dict[str, list[str]]:
    """Return key -> sections that have it; `model` has the arguments of every model."""
    found = homes(Config)
    for key in dict.fromkeys(key for name in REPRESENTATIONS for key in section_of(REPRESENTATIONS[name]).model_fields):
        found.setdefault(key, []).append("model")
    return found


def load_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Config:
    """Read and check a configuration file.

    Args:
        path: YAML.
        overrides: "dotted.key=value" each, the value being YAML; a number addresses an entry of a list.

    Raises:
        FileNotFoundError: there is no such file.
        BadConfig: not YAML, an unknown key, a wrong type, a value out of range.
    """
    return parse_config(read_config(path, overrides), str(path))


# --- Configurations as YAML: every key with its default and its description ---

_COLUMN = 44  # where the comments start


def default_config_yaml(model: str = "tensornet") -> str:
    """Return a configuration with all keys, their defaults and their meaning; only `data.train` must be filled in.

    Args:
        model: whose hyper-parameters are listed.

    Raises:
        KeyError: no such model.
    """
    lines = ["# torchmdnet2 training configuration: every key, its default and its meaning.", ""]
    for name, field in Config.model_fields.items():
        if name == "model":
            lines += ["model:", *section_lines(section_of(REPRESENTATIONS[model]), 1, {"name": model})]
        elif name == "head":
            lines += ["head:", *section_lines(section_of(HEADS["scalar"], ["hidden_channels"]), 1, {"name": "scalar"})]
        elif name == "priors":
            entry = section_lines(section_of(PRIORS["atomref"]), 2, {"name": "atomref", "energies": "auto"})
            entry[0] = entry[0].replace("    name", "  - name", 1)
            entry[1] = yaml_line(
                "    energies: auto",
                "auto (single atoms in data.train, else fit), fit, isolated, a file, {H: -13.6, …} in eV",
            )
            lines += ["priors:  # terms added to the network; [] for none", *entry]
        elif not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            lines.append(yaml_line(f"{name}: {_scalar(field.default)}", field.description))
        else:
            section = field.annotation
            lines += [f"{name}:", *section_lines(section, 1, {"train": "data.xyz"} if name == "data" else {})]
        lines.append("")
    return "\n".join(lines)


def config_yaml(config: Config) -> str:
    """Return a configuration as YAML with all defaults, which reads back as the same configuration."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def section_lines(section: type[BaseModel], depth: int, given: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        indent = "  " * depth
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += [f"{indent}{name}:", *section_lines(kind, depth + 1, {})]
            continue
        if name == "optimizer":
            settings, own = section_of(OPTIMIZERS[DEFAULT_OPTIMIZER], ["params"]), {"name": DEFAULT_OPTIMIZER}
            lines += [yaml_line(f"{indent}{name}:", field.description), *section_lines(settings, depth + 1, own)]
            continue
        default = field.get_default(call_default_factory=True)  # type: ignore[call-arg]
        value = given.get(name, None if default is PydanticUndefined else default)
        lines.append(yaml_line(f"{indent}{name}: {_scalar(value)}", field.description))
    return lines


def yaml_line(text: str, description: str | None) -> str:
    return f"{text:<{_COLUMN}}# {description}" if description else text


def _scalar(value: Any) -> str:
    """Return one value as YAML on one line."""
    if isinstance(value, float):
        return repr(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
