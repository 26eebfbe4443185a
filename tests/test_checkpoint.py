"""Model files: round trip, damage (R21), hostile content (R22), old and newer formats (R23)."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import random
import struct
from pathlib import Path

import pytest
import torch
from tiny import ethanol, tiny_potential

from torchmdnet2 import System, load
from torchmdnet2.checkpoint import FORMAT_VERSION, from_bytes, read_header, save, to_bytes
from torchmdnet2.errors import BadCheckpoint

GOLDEN = Path(__file__).parent / "golden"
FORMATS = sorted(GOLDEN.glob("format_*.tmn"))
BLOB = to_bytes(tiny_potential(dtype=torch.float32), {"about": "a test"})
SYSTEM = System.from_ase(ethanol())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["o3", "so3", "gauss"])
def test_round_trip(tmp_path, kind, dtype):
    potential = tiny_potential(kind, dtype)
    save(potential, tmp_path / "a.tmn", {"licence": "MIT", "note": "Å ✓"})
    again = load(tmp_path / "a.tmn")
    assert again.dtype == dtype and not again.training
    assert torch.equal(again(SYSTEM).energy, potential(SYSTEM).energy)
    assert torch.equal(again(SYSTEM).forces, potential(SYSTEM).forces)
    assert again.elements == potential.elements and again.metadata == {"licence": "MIT", "note": "Å ✓"}
    header = read_header(tmp_path / "a.tmn")
    assert header["format_version"] == FORMAT_VERSION and header["config"]["model"]["name"] == "tensornet"
    save(again, tmp_path / "b.tmn")
    assert (tmp_path / "a.tmn").read_bytes() == (tmp_path / "b.tmn").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tmn", "b.tmn"], "no temporary file is left"


def test_weights_of_16_bits_take_half_of_the_space():
    potential = tiny_potential(dtype=torch.float32)
    whole = len(to_bytes(potential))
    with torch.no_grad():
        for weight in potential.parameters():
            weight.copy_(weight.half())
    blob = to_bytes(potential)
    weights = sum(weight.numel() for weight in potential.parameters())
    assert whole - len(blob) == pytest.approx(2 * weights, abs=500)  # the header too is another
    again = from_bytes(blob)
    assert {name: value.dtype for name, value in again.state_dict().items()} == {
        name: value.dtype for name, value in potential.state_dict().items()
    }
    assert torch.equal(again(SYSTEM).energy, potential(SYSTEM).energy)
    assert torch.equal(again(SYSTEM).forces, potential(SYSTEM).forces)
    assert to_bytes(again) == blob
    with torch.no_grad():
        next(again.parameters()).view(-1)[0] = 1 + 1e-6  # has no place in 16 bits
    changed = from_bytes(to_bytes(again))
    assert next(changed.parameters()).view(-1)[0] == next(again.parameters()).view(-1)[0] != 1


def test_what_the_config_does_not_say_is_refused():
    """Else the file would be another model."""
    potential = tiny_potential()
    changes = {"energy_scale": 2.0, "energy_shift": 1.0, "subtract_isolated": False, "atom_filter": 1}
    for name, value in changes.items():
        changed = copy.deepcopy(potential)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=name):
            to_bytes(changed)
        changed.config[name] = value
        assert to_bytes(changed)


def test_parts_that_the_config_does_not_say_are_refused():
    """Else the file could not be loaded, or would be another model."""
    zbl = tiny_potential(priors=[{"name": "zbl"}], properties=[{"name": "dipole"}])
    more, fewer, other = (copy.deepcopy(zbl) for _ in range(3))
    more.priors.append(copy.deepcopy(zbl.priors[0]))
    del fewer.priors[0]
    other.properties.pop("dipole")
    for changed, name in ((more, "priors.1"), (fewer, "priors.0"), (other, "properties.dipole")):
        with pytest.raises(ValueError, match=name):
            to_bytes(changed)
    other.config["properties"] = []
    assert torch.equal(from_bytes(to_bytes(other))(SYSTEM).energy, zbl(SYSTEM).energy)


def test_type_on_loading(tmp_path):
    save(tiny_potential(dtype=torch.float32), tmp_path / "a.tmn")
    double = load(tmp_path / "a.tmn", dtype=torch.float64)
    assert double.dtype == torch.float64
    assert abs(float(double(SYSTEM).energy - load(tmp_path / "a.tmn")(SYSTEM).energy)) < 1e-3


def test_only_what_can_be_loaded_is_saved(tmp_path):
    potential = tiny_potential()
    with torch.no_grad():
        next(potential.head.parameters())[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head.* not finite"):
        save(potential, tmp_path / "a.tmn")
    assert not list(tmp_path.iterdir())
    made_by_hand = tiny_potential()
    made_by_hand.config = {}
    with pytest.raises(ValueError, match=r"only a potential built by Potential\.from_config can be saved"):
        save(made_by_hand, tmp_path / "a.tmn")
    assert not list(tmp_path.iterdir())
    metadata = {"sha256": "0" * 64}  # not taken for the checksum of the file
    save(potential := tiny_potential(), tmp_path / "a.tmn", metadata)
    assert load(tmp_path / "a.tmn").metadata == metadata and potential.metadata != metadata


def test_damage_is_named():
    header = 8 + int.from_bytes(BLOB[:8], "little")
    for damaged, words in (
        (BLOB[:-1], "the checksum does not match: the file is damaged; get a fresh copy"),
        (BLOB[:header].replace(b'"sha256"', b'"sha265"') + BLOB[header:], "no checksum in the header"),
        (BLOB[:5], "not a torchmdnet2 model file, or cut short"),
    ):
        with pytest.raises(BadCheckpoint, match=words):
            from_bytes(damaged)


def test_r21_one_byte_flips():
    """1,000 files with one changed byte: all are refused, and by BadCheckpoint."""
    rng = random.Random(0)
    header = 8 + int.from_bytes(BLOB[:8], "little")
    places = [*range(16), *rng.sample(range(header), 384), *(rng.randrange(len(BLOB)) for _ in range(600))]
    assert len(places) == 1000
    for place in places:
        damaged = bytearray(BLOB)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(BadCheckpoint):
            from_bytes(bytes(damaged))


def test_r21_truncations():
    rng = random.Random(1)
    for size in [*range(20), len(BLOB) - 1, *(rng.randrange(len(BLOB)) for _ in range(179))]:
        with pytest.raises(BadCheckpoint):
            from_bytes(BLOB[:size])
    with pytest.raises(BadCheckpoint):
        from_bytes(BLOB + b"\0")


def test_undamaged_one_loads():
    assert torch.equal(from_bytes(BLOB)(SYSTEM).energy, tiny_potential(dtype=torch.float32)(SYSTEM).energy)


def signed(header: dict, data: bytes = b"") -> bytes:
    """A file with a right checksum and any content, as an attacker can make."""
    header["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    blob = struct.pack("<Q", len(text)) + text + data
    return blob.replace(b"0" * 64, hashlib.sha256(blob).hexdigest().encode(), 1)


def parts() -> tuple[dict, bytes]:
    size = int.from_bytes(BLOB[:8], "little")
    return json.loads(BLOB[8 : 8 + size]), BLOB[8 + size :]


def test_signed_copy_loads():
    header, data = parts()
    assert torch.isfinite(from_bytes(signed(header, data))(SYSTEM).energy).all()


def test_newer_version_is_refused_by_number():
    header, data = parts()
    header["__metadata__"]["format_version"] = "7"
    with pytest.raises(BadCheckpoint, match=r"format version 7; .* reads version 1: upgrade torchmdnet2"):
        from_bytes(signed(header, data))


CONFIGS = {
    "not a dictionary": [],
    "nothing": {},
    "model is a number": {"model": 5},
    "unknown model": {"model": {"name": "os.system", "command": "true"}},
    "class path": {"model": {"name": "torch.nn.Linear", "in_features": 1, "out_features": 1}},
    "name is a list": {"model": {"name": ["tensornet"]}},
    "unknown argument": {"model": {"name": "tensornet", "hiden_channels": 3}},
    "cutoff is not a number": {"model": {"name": "tensornet", "cutoff": float("nan")}},
    "activation is a number": {"model": {"name": "tensornet", "activation": 3}},
    "negative size": {"model": {"name": "tensornet", "hidden_channels": -4}},
    "fractional size": {"model": {"name": "tensornet", "hidden_channels": 4.5}},
    "other size": {"model": {"name": "tensornet", "hidden_channels": 4}},
    "priors is a string": {"model": {"name": "tensornet"}, "priors": "atomref"},
    "elements is a number": {"model": {"name": "tensornet"}, "elements": 1},
    "head is a list": {"model": {"name": "tensornet"}, "head": []},
    "references are a list": {"model": {"name": "tensornet"}, "priors": [{"name": "atomref", "energies": [1]}]},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_r22_hostile_configuration(case):
    header, data = parts()
    header["__metadata__"]["config"] = json.dumps(CONFIGS[case])
    words = "the model cannot be built from its configuration|configuration and metadata must be mappings"
    with pytest.raises(BadCheckpoint, match=words):
        from_bytes(signed(header, data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format 'other' is not a torchmdnet2 model"),
        ({"format_version": "one"}, "the header cannot be read"),
        ({"format_version": "0"}, "format version 0; .* the file is not valid"),
        ({"config": "{"}, "the header cannot be read"),
        ({"config": "[" * 100_000}, "the header cannot be read"),
        ({"metadata": "nothing"}, "the header cannot be read"),
        ({"metadata": "[1]"}, "configuration and metadata must be mappings"),
        ({"config": "null"}, "configuration and metadata must be mappings"),
    ],
)
def test_r22_hostile_metadata(change, words):
    header, data = parts()
    header["__metadata__"].update(change)
    with pytest.raises(BadCheckpoint, match=words):
        from_bytes(signed(header, data))


def test_r22_hostile_tensors():
    header, data = parts()
    names = [name for name in header if name != "__metadata__"]
    faults = (
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [5, 1]},
        {"shape": [1 << 40, 1 << 40]},
        {"dtype": "PICKLE"},
        {"dtype": "F16"},
    )
    for fault in faults:
        changed = json.loads(json.dumps(header))
        changed[names[0]].update(fault)
        with pytest.raises(BadCheckpoint):
            from_bytes(signed(changed, data))
    missing = {name: value for name, value in header.items() if name != names[0]}
    with pytest.raises(BadCheckpoint):
        from_bytes(signed(missing, data))


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_r22_no_pickle_is_read(tmp_path, monkeypatch):
    """Pickles, torch.save files and huge headers under our ending: refused, nothing runs."""
    monkeypatch.chdir(tmp_path)
    Path("pickle.tmn").write_bytes(pickle.dumps(Bomb()))
    torch.save({"model": Bomb()}, "zip.tmn")
    Path("huge.tmn").write_bytes(struct.pack("<Q", 1 << 62) + b"{" + b" " * 1000)
    Path("empty.tmn").write_bytes(b"")
    for name in ("pickle", "zip", "huge", "empty"):
        with pytest.raises(BadCheckpoint, match=name):
            load(f"{name}.tmn")
    assert not Path("exploded").exists()
    with pytest.raises(FileNotFoundError, match=r"none\.tmn"):
        load("none.tmn")


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.stem)
def test_r23_every_released_format_loads(path):
    """Stored energies and forces within 1e-6, in float64 of the network."""
    potential = load(path, dtype=torch.float64)
    for name, structure in json.loads(path.with_suffix(".json").read_text()).items():
        system = System(
            z=torch.tensor(structure["z"]),
            pos=torch.tensor(structure["pos"], dtype=torch.float64),
            cell=torch.tensor(structure["cell"], dtype=torch.float64),
            pbc=torch.tensor(structure["pbc"]),
        )
        result = potential(system)
        assert abs(float(result.energy) - structure["energy"]) <= 1e-6, name
        expected = torch.tensor(structure["forces"], dtype=torch.float64)
        assert (result.forces - expected).abs().max() <= 1e-6, name
        assert expected.abs().max() > 1e-3


def test_r23_there_is_a_file_for_each_version():
    assert [path.stem for path in FORMATS] == [f"format_{v}" for v in range(1, FORMAT_VERSION + 1)]


def test_loading_leaves_the_random_numbers_alone(tmp_path):
    save(tiny_potential(), tmp_path / "a.tmn")
    before = torch.get_rng_state()
    load(tmp_path / "a.tmn")
    assert torch.equal(before, torch.get_rng_state())


def test_loaded_in_inference_mode(tmp_path):
    """The weights are ordinary ones, that forces can be taken through and that can be trained."""
    save(tiny_potential(), tmp_path / "a.tmn")
    expected = load(tmp_path / "a.tmn")(SYSTEM)
    with torch.inference_mode():
        potential = load(tmp_path / "a.tmn", dtype=torch.float64)
        inside = potential(SYSTEM)
    for result in (inside, potential(SYSTEM)):
        assert torch.equal(result.energy, expected.energy) and torch.equal(result.forces, expected.forces)
    assert not any(p.is_inference() for p in potential.parameters())
