"""Every setting of a training acts, or is refused where it cannot act."""

from __future__ import annotations

import types
import typing

import pytest
from pydantic import BaseModel

from torchmdnet2.errors import BadConfig
from torchmdnet2.registry import HEADS, PRIORS
from torchmdnet2.training.config.config import (
    Config,
    TrainingConfig,
    config_yaml,
    default_config_yaml,
    load_config,
    parse_config,
)
from torchmdnet2.training.config.schema import Section, section_of
from torchmdnet2.training.config.sections import ARGUMENTS, OPTIONS, RULES
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup

DIPOLE = {"properties": [{"name": "dipole"}], "data.keys.dipole": "mu"}
CHARGES = {"properties": [{"name": "charges"}], "data.keys.charges": "q"}
SCHEDULE = {"training.loss.schedule.energy": 5.0}
NO_ENERGY = {"data.keys.energy": None}
SETTINGS = {  # path -> a value that is not the default; what it cannot act with; what it acts with
    "data.root": ("folder", {}, None),  # published data sets are not opened here
    "data.download": (False, {}, None),
    "data.format": ("extxyz", {"data.train": None, "data.dataset": "qm9"}, {}),
    "data.keys.config_type": ("kind", {}, {"training.loss.config_weights": {"bulk": 2.0}}),
    "data.split.train": (10, {"data.split.file": "splits.json"}, {}),
    "data.split.seed": (3, {"data.validation": "v.xyz", "data.test": "t.xyz"}, {}),
    "data.split.validation": (7, {"data.validation": "v.xyz"}, {}),
    "data.split.test": (7, {"data.split.file": "splits.json"}, {}),
    "data.units.forces": ("hartree/bohr", {"data.keys.forces": None}, {}),
    "data.units.stress": ("GPa", {}, {"data.keys.stress": "stress"}),
    "data.units.dipole": ("debye", {}, DIPOLE),
    "training.loss.energy": (3.0, NO_ENERGY, {}),
    "training.loss.forces": (3.0, {"data.keys.forces": None}, {}),
    "training.loss.stress": (100.0, {}, {"data.keys.virial": "virial"}),
    "training.loss.dipole": (3.0, {}, DIPOLE),
    "training.loss.charges": (3.0, {}, CHARGES),
    "training.loss.schedule.energy": (3.0, {**NO_ENERGY, "training.loss.schedule.forces": 2.0}, {}),
    "training.loss.schedule.forces": (3.0, {**SCHEDULE, "data.keys.forces": None}, {}),
    "training.loss.schedule.stress": (3.0, SCHEDULE, {"data.keys.stress": "stress"}),
    "training.loss.schedule.dipole": (3.0, SCHEDULE, DIPOLE),
    "training.loss.schedule.charges": (3.0, SCHEDULE, CHARGES),
    "training.loss.schedule.end": (0.9, SCHEDULE, {**SCHEDULE, "training.loss.schedule.kind": "linear"}),
    "training.loss.huber_delta": (0.1, {}, {"training.loss.kinds": {"forces": "huber"}}),
    "training.loss.per_atom": (False, NO_ENERGY, {}),
    "training.lr_min": (1e-5, {"training.lr_schedule": "constant"}, {"training.lr_schedule": "plateau"}),
    "training.lr_patience": (3, {}, {"training.lr_schedule": "plateau"}),
    "training.lr_factor": (0.5, {"training.lr_schedule": "constant"}, {"training.lr_schedule": "plateau"}),
    "training.batch_size": (3, {"training.max_atoms": 100}, {}),
    "training.energy_scale": (2.0, {"init": "organic-small"}, {}),
    "output.outliers": (3, {"output.report": False}, {"output.report": True}),
}
WITHOUT_EFFECT_ON_NUMBERS = {"data.licence", "data.citation", "output.licence", "output.overwrite", "output.wandb"}
"""Read where the folder and the metadata are made, not in `Config` sections that the test below watches."""


def with_settings(settings):
    """A small configuration with these, by path."""
    raw = {"data": {"train": "train.xyz"}, "model": {"hidden_channels": 8, "num_layers": 0, "num_rbf": 4, "max_z": 10}}
    if "init" in settings:
        del raw["model"]
    for path, value in settings.items():
        *sections, key = path.split(".")
        section = raw
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return parse_config(raw)


def test_the_table_is_complete():
    assert SETTINGS.keys() == RULES.keys()


@pytest.mark.parametrize("path", SETTINGS)
def test_settings_act_or_are_refused(path):
    value, without, acting = SETTINGS[path]
    with pytest.raises(BadConfig, match=f"{path}: has no effect"):
        with_settings({**without, path: value})
    with_settings(without)  # nothing else is wrong with it
    if acting is not None:
        with_settings({**acting, path: value})


@pytest.mark.parametrize(
    ("path", "without"),
    [
        ("training.loss.dipole", {}),
        ("training.loss.stress", {}),
        ("training.loss.forces", {"data.keys.forces": None}),
        ("training.lr_min", {"training.lr_schedule": "constant"}),
        ("training.lr_factor", {"training.lr_schedule": "constant"}),
        ("training.loss.huber_delta", {}),
    ],
)
def test_a_default_that_somebody_wrote_is_refused_too(path, without):
    *sections, key = path.split(".")
    section = with_settings(without)
    for name in sections:
        section = getattr(section, name)
    with pytest.raises(BadConfig, match=f"{path}: has no effect"):
        with_settings({**without, path: getattr(section, key)})


def test_defaults_that_the_package_wrote_are_accepted(tmp_path):
    for text in (default_config_yaml(), config_yaml(with_settings({"training.lr_schedule": "constant"}))):
        (tmp_path / "c.yaml").write_text(text)
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("path", "value"), [("training.loss.stress", 0.0), ("output.outliers", 0), ("data.split.test", 0)]
)
def test_what_changes_nothing_is_accepted(path, value):
    with_settings({**SETTINGS[path][1], path: value})


@pytest.mark.parametrize(
    ("name", "section", "key", "value", "acting"),
    [
        ("coulomb", {"charges": {"H": 0.1}}, "cutoff", 7.0, {"method": "reaction_field"}),
        ("coulomb", {"charges": {"H": 0.1}}, "accuracy", 1e-6, {"method": "ewald"}),
        ("coulomb", {"charges": {"H": 0.1}}, "dielectric", 80.0, {"method": "reaction_field"}),
        ("coulomb", {"charges": {"H": 0.1}, "method": "ewald"}, "switch_width", 2.0, {"method": "reaction_field"}),
        ("coulomb", {"charges": {"H": 0.1}, "damping": "exp"}, "damping_lower", 1.0, {"damping": "cosine"}),
        ("coulomb", {"charges": {"H": 0.1}}, "damping_upper", 3.0, {"damping": "exp"}),
        ("zbl", {"envelope": "covalent"}, "cutoff", 3.0, {"envelope": "cosine"}),
    ],
)
def test_arguments_of_priors_act_or_are_refused(name, section, key, value, acting):
    with pytest.raises(BadConfig, match=rf"priors\.0\.{key}: has no effect"):
        with_settings({"priors": [{"name": name, **section, key: value}]})
    with_settings({"priors": [{"name": name, **section, **acting, key: value}]})


def test_arguments_of_the_table_are_those_of_classes():
    for name, rules in ARGUMENTS.items():
        registry = PRIORS if name in PRIORS else HEADS
        assert set(rules) <= set(section_of(registry[name]).model_fields)


def test_other_settings_that_did_nothing():
    for path, value, words in [
        ("training.loss.kinds", {"stress": "l1"}, "training.loss.kinds.stress: has no effect"),
        ("training.loss.schedule", {"kind": "linear", "start": 0.1}, "training.loss.schedule: has no effect"),
        ("training.loss", {"properties": {"gap": 1.0}}, "no such label"),
        ("data.units.properties", {"gap": "eV"}, "no such label"),
        ("training.lr_patiense", 3, "lr_patience"),
    ]:
        with pytest.raises(BadConfig, match=words):
            with_settings({path: value})


def test_tf32_on_a_cpu_is_refused(raw_config):
    raw_config["training"]["precision"] = "tf32"
    with pytest.raises(BadConfig, match="tf32 needs an NVIDIA GPU"):
        make_setup(parse_config(raw_config))


def sections_in(hint):
    """Sections in a type hint."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    elif typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        for each in typing.get_args(hint):
            yield from sections_in(each)


def leaves(section, path=""):
    """Path -> (section, key) of every setting."""
    found = {}
    for key, field in section.model_fields.items():
        inner = list(sections_in(field.annotation))
        for each in inner:
            found |= leaves(each, f"{path}{key}.")
        if not inner:
            found[path + key] = (section, key)
    return found


def test_every_setting_is_read(raw_config, tmp_path, monkeypatch):
    """A run reads all settings: one that no code reads cannot act."""
    read = set()
    original = Section.__getattribute__

    def watched(self, name):
        for cls in type(self).__mro__:
            read.add((cls, name))
        return original(self, name)

    raw_config["training"] |= {
        "max_epochs": 2, "swa": {"start": 1, "lr": 1e-3}, "lr_schedule": "plateau", "max_minutes": 10.0,
        "loss": {"schedule": {"kind": "linear", "start": 0, "end": 1, "forces": 2.0}, "kind": "huber"},
    }  # fmt: skip
    raw_config["output"] |= {"keep_every": 1, "report": True, "outliers": 2}
    config = parse_config(raw_config)
    monkeypatch.setattr(Section, "__getattribute__", watched)
    run_training(config)
    every = leaves(Config)
    assert len(every) > 80
    names = {name for _, name in read}
    unread = {path for path, (section, key) in every.items() if (section, key) not in read and key not in names}
    unread -= {path for path in unread if path.startswith(("data.keys.", "data.units."))}  # read as a whole
    unread -= {path for path in unread if path.startswith(("init.", "output.wandb."))}  # of sections that are not there
    unread -= {*RULES, *(f"data.{name}" for name in OPTIONS)}  # refused where they are not read
    assert unread <= WITHOUT_EFFECT_ON_NUMBERS
    assert (TrainingConfig, "ema_decay") in read
