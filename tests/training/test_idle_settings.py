"""Every setting of a training acts, or is refused where it cannot act."""

from __future__ import annotations

import json
import types
import typing

import pytest
from ase.build import molecule
from ase.io import write
from pydantic import BaseModel
from safetensors.torch import load_file

from torchmdnet2 import System
from torchmdnet2.errors import BadConfig
from torchmdnet2.registry import HEADS, PRIORS, REPRESENTATIONS
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
from torchmdnet2.training.run import start
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup

from .conftest import make_frames

D3 = {"elements": [1, 6, 8], "s8": 1.2, "a1": 0.4, "a2": 4.8}
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
        ("d3", {**D3, "cutoff": None}, "switch_width", 1.0, {"cutoff": 9.0}),
    ],
)
def test_arguments_of_priors_act_or_are_refused(name, section, key, value, acting):
    with pytest.raises(BadConfig, match=rf"priors\.0\.{key}: has no effect"):
        with_settings({"priors": [{"name": name, **section, key: value}]})
    with_settings({"priors": [{"name": name, **section, **acting, key: value}]})


def test_arguments_of_the_table_are_those_of_classes():
    for name, rules in ARGUMENTS.items():
        (registry,) = [one for one in (PRIORS, HEADS, REPRESENTATIONS) if name in one]
        assert set(rules) <= set(section_of(registry[name]).model_fields)


SMALL = {
    "hidden_channels": 8, "num_layers": 2, "num_rbf": 6, "cutoff": 3.0, "max_z": 10, "num_heads": 2, "channels": 4,
    "num_vectors": 3, "widths": [8, 6], "q_dim": 2,
}  # fmt: skip
CHARGED = {"name": "coulomb", "charges": {"H": 0.1, "C": -0.1, "O": -0.4}}
BASES = {  # what a walk changes, argument by argument -> the sections around it
    **{name: {"model": {"name": name}} for name in REPRESENTATIONS},
    "tensornet": {"model": {"name": "tensornet", "group": "SO(3)"}},
    **{
        name: {"model": {"name": "equivariant_transformer"}, "head": {"name": name}}
        for name in ("scalar", "equivariant_scalar", "gated_scalar")
    },
    "scalar_coulomb": {"model": {"name": "tensornet2"}, "head": {"name": "scalar_coulomb", "q_weights": [0.5] * 6}},
    **{
        name: {"model": {"name": "equivariant_transformer"}, "properties": [{"name": name}]}
        for name in ("charges", "dipole", "spatial_extent", "vector")
    },
    "scalar_property": {"properties": [{"name": "scalar_property", "property": "vector"}]},
    "per atom": {"properties": [{"name": "scalar_property", "property": "vector", "per": "atom"}]},
    "atomref": {"priors": [{"name": "atomref", "energies": {"H": -1.0, "C": -2.0, "O": -3.0}, "max_z": 10}]},
    "zbl": {"priors": [{"name": "zbl"}]},
    "covalent": {"priors": [{"name": "zbl", "envelope": "covalent"}]},
    "d2": {"priors": [{"name": "d2", "cutoff": 4.0}]},
    "d3": {"priors": [{"name": "d3", **D3, "cutoff": 4.0}]},
    "all pairs d3": {"priors": [{"name": "d3", **D3, "cutoff": None}]},
    "pair_potential": {"priors": [{"name": "pair_potential", "parameters": {"C-H": [1.0] * 8}}]},
    **{
        method: {"priors": [{**CHARGED, "method": method, "cutoff": 4.0}]}
        for method in ("reaction_field", "dsf", "ewald", "pme")
    },
    **{damping: {"priors": [{**CHARGED, "damping": damping}]} for damping in ("none", "cosine", "exp")},
}
CHANGED = {  # of arguments whose types do not say what else they can be
    "activation": "tanh", "attn_activation": "tanh", "rbf_type": "gauss", "property": "dipole_length",
    "widths": [6, 8], "max_z": 5,
    "q_weights": [1.5, *[0.5] * 5], "energies": {"H": -1.0, "C": -2.5, "O": -3.0}, "elements": [1, 6], "accuracy": 1e-3,
    "charges": {"H": 0.2, "C": -0.4, "O": -0.4}, "dielectric": 4.0, "parameters": {"C-H": [2.0] * 8},
    "radii": {"H": 1.0, "O": 1.0},
}  # fmt: skip


def changed(key, value, hint):
    """Another value of an argument."""
    if key in CHANGED:
        return CHANGED[key]
    if typing.get_origin(hint) is typing.Literal:
        return next(word for word in typing.get_args(hint) if word != value)
    if isinstance(value, bool | None):
        return not value if isinstance(value, bool) else 3.0
    return value + 2 if isinstance(value, int) else value * 1.1 or 0.5


def predictions(parts, structure):
    """All numbers that an untrained potential gives, and the names of what is trained."""
    raw = {"data": {"train": "t.xyz"}, "priors": [], "model": {"name": "tensornet"}, **parts}
    fields = section_of(REPRESENTATIONS[raw["model"]["name"]]).model_fields
    raw["model"] = {**{key: value for key, value in SMALL.items() if key in fields}, **raw["model"]}
    for head in raw.get("properties", ()):
        name = head.get("property", head["name"])
        raw["data"]["keys"] = {name: "x"} if name in ("charges", "dipole") else {"properties": {name: "x"}}
    potential = parse_config(raw).untrained().double().eval()
    result = potential(structure)
    found = {"energy": result.energy, "forces": result.forces, "charges": result.charges, **result.properties}
    numbers = {name: value.tolist() for name, value in found.items() if value is not None}
    return numbers, [name for name, weights in potential.named_parameters() if weights.requires_grad]


@pytest.mark.parametrize("base", BASES)
def test_every_argument_changes_what_is_predicted_or_is_refused(base):
    """Of every model, head and prior."""
    parts = BASES[base]
    section = "priors" if "priors" in parts else [key for key in ("model", "head", "properties") if key in parts][-1]
    listed = isinstance(parts[section], list)
    given = parts[section][0] if listed else parts[section]
    registry = {"model": REPRESENTATIONS, "priors": PRIORS}.get(section, HEADS)
    fields = section_of(registry[given["name"]], ("hidden_channels",) * (registry is HEADS)).model_fields
    atoms = molecule("CH3CH2OH", vacuum=2.5)
    atoms.rattle(0.05, seed=1)
    atoms.pbc = base in ("ewald", "pme")
    structure, seen = System.from_ase(atoms), 0
    before = predictions(parts, structure)
    for key, field in fields.items():
        if key == "name":
            continue
        own = SMALL if section == "model" else {}
        value = changed(key, given.get(key, own.get(key, field.default)), field.annotation)
        new = {**given, key: value}
        try:
            after = predictions({**parts, section: [new] if listed else new}, structure)
        except ValueError as error:  # BadConfig, and refusals of the structure
            assert key in str(error) or key in ("max_z", "elements", "equivariant"), (key, str(error))
        else:
            assert after != before, f"{key}: {value} acts on nothing"
        seen += 1
    assert seen


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


PLATEAU = {"training.lr_schedule": "plateau", "training.warmup_steps": 0, "training.max_epochs": 5}
LATER = {"training.loss.schedule.energy": 30.0, "training.loss.schedule.start": 1}
SWA = {"training.swa.start": 1}
HUBER = {"training.loss.kind": "huber"}
STEPS = [  # settings that differ from those of a small training
    *({f"training.{key}": value} for key, value in {
        "seed": 1, "precision": "float64", "batch_size": 3, "max_epochs": 2, "lr": 1e-2, "lr_schedule": "constant",
        "lr_min": 1e-3, "warmup_steps": 3, "weight_decay": 0.1, "gradient_clipping": 1e-3, "ema_decay": 0.1,
        "energy_scale": 3.0, "layer_lr_decay": 0.5, "swa": {"start": 1}, "optimizer": {"name": "adamw"},
        "max_minutes": 1e-9,
    }.items()),
    *({f"training.optimizer.{key}": value} for key, value in {
        "momentum": 0.5, "beta1": 0.5, "beta2": 0.9, "eps": 1e-2}.items()),
    *({f"training.optimizer.{key}": value, "training.optimizer.name": "adamw"} for key, value in {
        "beta1": 0.5, "beta2": 0.9, "eps": 1e-2}.items()),
    *({f"training.loss.{key}": value} for key, value in {
        "kind": "l1", "kinds": {"forces": "l1"}, "energy": 3.0, "forces": 3.0, "config_weights": {"odd": 3.0},
        "per_atom": False, "schedule": {"energy": 30.0, "start": 1}}.items()),
    {**SWA, "training.swa.lr": 1e-3}, {"training.swa.start": 2},
    {**HUBER, "training.loss.huber_delta": 1.0},
    {**LATER, "training.loss.schedule.start": 2},
    {**LATER, "training.loss.schedule.forces": 5.0},
    {**LATER, "training.loss.schedule.kind": "linear"},
    {**LATER, "training.loss.schedule.kind": "linear", "training.loss.schedule.end": 4},
    {"training.batch_size": 16, "training.max_atoms": 9}, {"training.batch_size": 16, "training.max_edges": 25},
    {**PLATEAU, "training.lr_patience": 0, "training.lr": 0.5}, {**PLATEAU, "training.lr": 0.5},
    {**PLATEAU, "training.lr_patience": 0, "training.lr": 0.5, "training.lr_factor": 0.1},
    {**PLATEAU, "training.lr_patience": 0, "training.lr": 0.5, "training.lr_factor": 0.1, "training.lr_min": 0.3},
    {**PLATEAU, "training.early_stopping_patience": 1, "training.lr": 0.5, "training.ema_decay": 0.0},
    {**PLATEAU, "training.lr": 0.5, "training.ema_decay": 0.0},
    *({f"data.{key}": value} for key, value in {
        "split.train": 4, "split.validation": 3, "split.test": 3, "split.seed": 2, "split.bootstrap": 1,
        "keys.forces": None, "keys.energy": None, "keys.weight": "w", "units.energy": "kcal/mol",
        "units.forces": "eV/bohr"}.items()),
    {"training.loss.config_weights": {"odd": 3.0}, "data.keys.config_type": "other"},
    {"data.units.length": "bohr", "data.units.energy": "eV"},
    {"atom_filter": 1}, {"head.activation": "tanh"}, {"head.num_hidden_layers": 1},
    {"priors": [{"name": "atomref", "energies": "fit", "trainable": True}]},
    {"priors": [{"name": "atomref", "energies": {"H": -13.0, "C": -1030.0, "O": -2040.0}}]},
    {"priors": []},
]  # fmt: skip


def test_every_setting_of_a_training_changes_it(tmp_path, monkeypatch):
    """Its subsets, its steps or its last weights: none is ignored, and no two are taken for one."""
    frames = make_frames(12)
    for k, atoms in enumerate(frames):
        atoms.info |= {"config_type": ["even", "odd"][k % 2], "other": ["odd", "even", "even"][k % 3], "w": 1 + k % 2}
    write(tmp_path / "t.xyz", frames, format="extxyz")
    monkeypatch.setattr(start, "data_notes", lambda *_: [])  # half of the time
    base = {
        "data.train": str(tmp_path / "t.xyz"), "data.split.validation": 2, "data.split.test": 2,
        "model": {"name": "graph_network", "hidden_channels": 4, "num_layers": 1, "num_rbf": 4, "cutoff": 2.5,
                  "max_z": 9, "neighbor_embedding": False},
        "training.batch_size": 4, "training.max_epochs": 3, "training.lr": 5e-2, "training.warmup_steps": 1,
        "training.device": "cpu", "training.num_threads": 1, "training.cuda_graphs": False, "output.report": False,
    }  # fmt: skip
    seen, idle = {}, []
    for k, change in enumerate([{}, *STEPS]):
        settings = {**base, **change, "output.folder": str(tmp_path / str(k))}
        if {"training.max_atoms", "training.max_edges"} & change.keys():
            del settings["training.batch_size"]
        path = run_training(with_settings(settings))
        weights = sorted((name, str(value.dtype), value.numpy().tobytes()) for name, value in load_file(path).items())
        epochs = [json.loads(line)["train_loss"] for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        key = (*weights, *epochs, (path.parent / "splits.json").read_text())
        idle += [f"{change} gives the weights of {seen[key]}"] if key in seen else []
        seen.setdefault(key, change)
    assert not idle, "\n".join(idle)
