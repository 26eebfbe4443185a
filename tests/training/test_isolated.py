"""Reference energies from single atoms."""

import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from torchmdnet2.errors import BadConfig
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.units import HARTREE

from .conftest import REFERENCES, make_frames


def atom(z, energy, **info):
    atoms = Atoms([z], info=info)
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=[[0.0, 0, 0]])
    return atoms


ATOMS = [atom(z, energy) for z, energy in REFERENCES.items()]
ION = atom(1, 0.0, charge=1)


def energies(raw, word, frames=()):
    raw["priors"] = [{"name": "atomref", "energies": word}]
    if frames:
        write(raw["data"]["train"], frames, format="extxyz")
    return make_setup(parse_config(raw)).potential.config["priors"][0]["energies"]


@pytest.fixture
def raw(raw_config, tmp_path):
    raw_config["data"]["train"] = str(tmp_path / "own.xyz")
    write(tmp_path / "own.xyz", make_frames(32), format="extxyz")
    return raw_config


def test_among_the_frames_of_whatever_subset(raw):
    found = energies(raw, "isolated", [*make_frames(32), *ATOMS, ION, atom(1, float("nan"))])
    assert found == {str(z): energy for z, energy in REFERENCES.items()}


def test_in_a_file_of_their_own_and_its_units(raw, tmp_path):
    write(tmp_path / "atoms.xyz", [ION, *ATOMS], format="extxyz")
    path = str(tmp_path / "atoms.xyz")
    assert energies(raw, path) == {str(z): energy for z, energy in REFERENCES.items()}
    assert path in make_setup(parse_config(raw)).digests  # so that a resumed run has the same
    raw["data"]["units"] = {"energy": "hartree", "length": "angstrom"}
    assert energies(raw, path)["8"] == pytest.approx(REFERENCES[8] * HARTREE, rel=1e-14)


def test_what_is_wrong_is_named(raw, tmp_path):
    with pytest.raises(BadConfig, match=r"no frame of data\.train is a single neutral atom"):
        energies(raw, "isolated")
    with pytest.raises(BadConfig, match=r"atomref\.energies has no entry for O"):
        energies(raw, "isolated", [*make_frames(32), *ATOMS[:2]])
    with pytest.raises(
        BadConfig, match=r"H has -13\.5 eV in .*own\.xyz, frame 32 and -13\.4 eV in .*frame 35; give a table"
    ):
        energies(raw, "isolated", [*make_frames(32), *ATOMS, atom(1, -13.4)])
    with pytest.raises(BadConfig, match="a file of single atoms, or a table"):
        energies(raw, "isolatd")
