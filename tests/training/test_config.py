"""The configuration is strict: whatever is wrong is named, with its path and the closest right key."""

from __future__ import annotations

import itertools
import random
import re
import string

import pytest
import yaml

from torchmdnet2.core.yaml_reader import parse_yaml
from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import config_yaml, default_config_yaml, load_config, parse_config


def all_keys(node, path=()):
    """Paths of all keys of nested dictionaries and lists."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from all_keys(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from all_keys(value, (*path, index))


def mutations(key, rng):
    """One letter replaced, left out, doubled, added, and two exchanged."""
    at = rng.randrange(len(key))
    letter = rng.choice([c for c in string.ascii_lowercase if c != key[at]])
    yield key[:at] + letter + key[at + 1 :]
    yield key[:at] + letter + key[at:]
    yield key[:at] + key[at] + key[at:]
    if len(key) > 1:
        yield key[:at] + key[at + 1 :]
    if at + 1 < len(key) > 2 and key[at] != key[at + 1]:
        yield key[:at] + key[at + 1] + key[at] + key[at + 2 :]


def one_edit(a, b):
    """Whether one letter left out, added or replaced turns one word into the other."""
    shorter, longer = sorted((a, b), key=len)
    if len(longer) - len(shorter) == 1:
        return any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))
    return len(longer) == len(shorter) and sum(x != y for x, y in zip(a, b, strict=True)) <= 1


def with_key_renamed(node, path, new):
    """A copy in which the last key of `path` has another name."""
    if len(path) == 1:
        return {(new if k == path[0] else k): v for k, v in node.items()}
    if isinstance(node, list):
        return [with_key_renamed(v, path[1:], new) if i == path[0] else v for i, v in enumerate(node)]
    return {k: (with_key_renamed(v, path[1:], new) if k == path[0] else v) for k, v in node.items()}


def test_every_mutated_key_is_rejected_with_path_and_suggestion():
    raw = parse_yaml(default_config_yaml())
    paths = list(all_keys(raw))
    assert len(paths) > 60
    rng = random.Random(0)
    tried = 0
    for path in paths:
        known = {p[-1] for p in paths if p[:-1] == path[:-1]}
        for wrong in mutations(path[-1], rng):
            if wrong in known:
                continue
            with pytest.raises(BadConfig) as caught:
                parse_config(with_key_renamed(raw, path, wrong))
            dotted = ".".join(str(part) for part in (*path[:-1], wrong))
            found = re.search(re.escape(dotted) + r": unknown key, did you mean '(\w+)'\?", str(caught.value))
            # 'chargse' is as near to 'charge' as to 'charges'
            assert found and (found[1] == path[-1] or (found[1] in known and one_edit(found[1], wrong))), dotted
            tried += 1
    assert tried > 250


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr=-1", "training.lr: should be greater than 0, got -1"),
        ("training.lr=fast", "training.lr: "),
        ("data.split.test=true", "data.split.test: should be a valid integer or a valid number, got True"),
        ("training.max_epochs=3.0", "training.max_epochs: should be a valid integer"),
        ("training.max_epochs=true", "training.max_epochs: should be a valid integer"),
        ("training.lr=.nan", "training.lr: "),
        ("training.lr_min=1", "lr_min (1.0) must not be above lr"),
        ("training.loss.kind=mae", "training.loss.kind: should be 'mse', 'l1' or 'huber', got 'mae'"),
        ("training.device=gpu", "training.device: should be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("training=", "training: is empty; give it keys, or leave it out"),
        ("training=fast", "training: should be a section"),
        ("lr=1e-3", "lr: unknown key here; it belongs to training or training.swa"),
        ("hidden_channels=8", "hidden_channels: unknown key here; it belongs to model"),
        ("data.batch_size=4", "data.batch_size: unknown key here; it belongs to training"),
        ("training.swa.start=2.0", "training.swa.start: should be a valid integer or less than or equal to 1, got 2.0"),
        ("training.seed=99999999999999999999", "training.seed: should be less than"),
        ("training.seed=010", "training.seed: should be a valid integer, got '010'"),
        ("model.cutoff=.inf", "model.cutoff: should be a finite number"),
        ("output.folder=''", "output.folder: should have at least 1 character"),
        ("model.name=tensrnet", "unknown model 'tensrnet', did you mean 'tensornet'?"),
        ("model.hidden_channels=0", "model.hidden_channels: should be greater than or equal to 1, got 0"),
        ("model.hidden_channels=eight", "model.hidden_channels: should be a valid integer, got 'eight'"),
        ("model.activation=sliu", "unknown activation 'sliu', did you mean 'silu'?"),
        ("model.cutoff_lower=6.0", "cutoff range"),
        ("priors=[{name: atomreff}]", "priors.0: unknown prior 'atomreff', did you mean 'atomref'?"),
        ("priors=[{name: atomref, energies: {H: much}}]", "priors.0: energies.H: should be a number in eV, got 'much'"),
        (
            "training.loss={energy: 0, forces: 0, stress: 0, dipole: 0, charges: 0}",
            "training.loss: at least one of energy, forces, stress needs a weight",
        ),
        ("priors=[{name: atomref, energies: {Hx: 1.0}}]", "priors.0: energies: 'Hx' is not an element"),
        ("data.split.test=1.5", "data.split.test: should be a whole number of frames"),
        ("data.units.energy=hartre", "data.units: unknown energy unit 'hartre'"),
        ("output.overwrite=no", "output.overwrite: should be a valid boolean, got 'no'"),
        ("nowhere", "write an override as section.key=value"),
        ("training.lr.x=3", "no section 'lr'"),
    ],
)
def test_wrong_values_are_named(tmp_path, override, message):
    path = tmp_path / "c.yaml"
    path.write_text("data: {train: a.xyz}\ntraining: {lr: 1e-3}\n")
    if override.startswith("training.lr.x"):
        message = "'training.lr.x=3': '"
    with pytest.raises(BadConfig) as caught:
        load_config(path, [override])
    assert message in str(caught.value)


def test_required_key_and_several_findings():
    with pytest.raises(BadConfig, match=r"data\.train: is required"):
        parse_config({"data": {}})
    with pytest.raises(BadConfig, match=r"(?s)max_epochs: should be.*lr: should be greater"):
        parse_config({"data": {"train": "a"}, "training": {"lr": -1, "max_epochs": "many"}})


def test_duplicate_keys_and_tags_are_refused(tmp_path):
    with pytest.raises(BadConfig, match="nested too deeply"):
        parse_yaml("{a: " * 3000 + "1" + "}" * 3000)
    with pytest.raises(BadConfig, match="line 3: 'lr' is given twice"):
        parse_yaml("training:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(BadConfig, match=r"line 2: a key must be a word, got \[1, 2\]"):
        parse_yaml("a: 1\n? [1, 2]\n: 3\n")
    marker = tmp_path / "made"
    with pytest.raises(BadConfig, match="not valid YAML"):
        parse_yaml(f"x: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker}']]")
    assert not marker.exists()


def test_numbers_and_booleans_read_as_people_mean_them():
    read = parse_yaml("a: 1e-3\nb: 1.5E4\nc: 5\nd: no\ne: true\nf: null\ng: -.5\nh: 2024-01-01")
    assert parse_yaml("[010, 1:30, 1_000, 0, -12]") == ["010", "1:30", "1_000", 0, -12]
    assert read == {"a": 1e-3, "b": 1.5e4, "c": 5, "d": "no", "e": True, "f": None, "g": -0.5, "h": "2024-01-01"}
    assert isinstance(read["c"], int)


def test_overrides_reach_lists_and_missing_sections(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: {train: a.xyz}\npriors: [{name: atomref}]\n")
    config = load_config(path, ["training.loss.energy=3", "priors.0.trainable=true", "data.train=[a.xyz, b.xyz]"])
    assert config.training.loss.energy == 3
    assert config.priors[0]["trainable"] is True
    assert config.data.train == ["a.xyz", "b.xyz"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr", "write an override as section.key=value"),
        ("training..lr=1", "write an override as section.key=value"),
        ("data.train.file=a", "'file' is not a key that can be set"),
        ("data.train.file.name=a", "there is no section 'file' to set a value in"),
        ("priors.5=a", "'5' is not a key that can be set"),
    ],
)
def test_overrides_without_a_place_are_refused(tmp_path, override, words):
    (tmp_path / "c.yaml").write_text("data: {train: a.xyz}\npriors: [{name: atomref}]\n")
    with pytest.raises(BadConfig, match=words):
        load_config(tmp_path / "c.yaml", [override])


def test_default_config_is_the_defaults_and_round_trips():
    text = default_config_yaml()
    config = parse_config(parse_yaml(text))
    assert config == parse_config({"data": {"train": "data.xyz"}})
    assert parse_config(parse_yaml(config_yaml(config))) == config
    keys = [p[-1] for p in all_keys(config.to_dict()) if isinstance(p[-1], str)]
    assert all(f"{key}:" in text for key in keys)
    undescribed = [line for line in text.splitlines() if line.startswith("  ") and "#" not in line]
    names = (":", "tensornet", "scalar", "atomref", "muon")
    assert all(line.rstrip().endswith(names) for line in undescribed), undescribed


def test_reference_energies_by_symbol_or_number():
    for table in ({"H": -13.5, "O": -2040.0}, {1: -13.5, 8: -2040.0}, {"1": -13.5, "8": -2040.0}):
        config = parse_config({"data": {"train": "a"}, "priors": [{"name": "atomref", "energies": table}]})
        assert config.priors[0]["energies"] == {"1": -13.5, "8": -2040.0}
    assert parse_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_validation_leaves_the_random_state_alone():
    import torch

    states = []
    for _, _ in itertools.product([0], [0, 1]):
        torch.manual_seed(3)
        parse_config({"data": {"train": "a"}})
        states.append(torch.rand(1).item())
    torch.manual_seed(3)
    assert states == [torch.rand(1).item()] * 2
