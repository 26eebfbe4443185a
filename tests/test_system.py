"""System: shapes, defaults, conversions, checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2 import System


def test_defaults_are_one_neutral_molecule():
    system = System(z=[8, 1, 1], pos=[[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    assert (system.num_atoms, system.num_systems) == (3, 1)
    assert system.batch.tolist() == [0, 0, 0] and system.charge.tolist() == [0.0] and system.spin.tolist() == [0]
    assert not system.pbc.any() and not system.cell.any() and system.volume.tolist() == [0.0]
    assert system.z.dtype == system.batch.dtype == torch.int64


def test_dtype_of_positions_is_kept():
    for dtype in (torch.float32, torch.float64):
        system = System(z=torch.tensor([1]), pos=torch.zeros(1, 3, dtype=dtype), cell=np.eye(3), charge=1)
        assert system.dtype == system.cell.dtype == system.charge.dtype == dtype
        assert system.pbc.all()


def test_default_device_of_torch_moves_nothing():
    """As where a script says torch.set_default_device("cuda") and runs a model on the CPU; only lists go there."""
    pos = torch.zeros(2, 3)
    with torch.device("meta"):
        cpu = System(z=torch.tensor([1, 1], device="cpu"), pos=pos, batch=torch.tensor([0, 1], device="cpu"))
        read = System.from_ase([molecule("H2O"), bulk("Si")])
        assert System(z=[1], pos=[[0.0, 0, 0]]).device.type == "meta"
        systems = (cpu, cpu.replace(charge=1), read, System.concatenate([read, read]), read.to(dtype=torch.float32))
    for system in systems:
        assert {value.device.type for value in vars(system).values()} == {"cpu"}


def test_periodic_where_a_lattice_vector_is():
    system = System(z=[1], pos=[[0.0, 0, 0]], cell=[[3.0, 0, 0], [0, 0, 0], [0, 0, 5]])
    assert system.pbc.tolist() == [[True, False, True]]


def test_ase_and_back():
    frames = [molecule("CH3CH2OH"), bulk("Si"), Atoms("H"), bulk("Cu") * (2, 1, 1)]
    frames[0].info.update(charge=-1, spin=2)
    frames[1].pbc = (True, False, True)
    before = [(a.positions.copy(), dict(a.info)) for a in frames]
    system = System.from_ase(frames)
    assert (
        system.dtype == torch.float64
        and system.charge.tolist() == [-1, 0, 0, 0]
        and system.spin.tolist() == [2, 0, 0, 0]
    )
    for old, new in zip(frames, system.to_ase(), strict=True):
        assert np.array_equal(old.positions, new.positions) and np.array_equal(old.cell.array, new.cell.array)
        assert np.array_equal(old.pbc, new.pbc) and np.array_equal(old.numbers, new.numbers) and old.info == new.info
    for atoms, (positions, info) in zip(frames, before, strict=True):
        assert np.array_equal(atoms.positions, positions) and atoms.info == info
    system.pos += 1.0
    assert np.array_equal(frames[0].positions, before[0][0]), "tensors must not share memory with the user's Atoms"


def test_a_charge_that_is_not_whole_survives_in_ase():
    (atoms,) = System(z=[1], pos=[[0.0, 0, 0]], charge=-0.5, spin=2).to_ase()
    assert atoms.info == {"charge": -0.5, "spin": 2}


def test_single_atoms_object_and_empty_list():
    assert System.from_ase(molecule("H2O")).num_systems == 1
    assert System.from_ase([]).num_systems == 0


@pytest.mark.parametrize("value", [0.5, "one", float("nan"), float("inf"), None, [1, 2]])
def test_charge_must_be_a_whole_number(value):
    atoms = molecule("H2O")
    atoms.info["charge"] = value
    with pytest.raises(ValueError, match="charge must be a whole number"):
        System.from_ase(atoms)


def test_concatenate():
    a, b = System.from_ase([molecule("H2O"), bulk("Si")]), System.from_ase(molecule("CH4"))
    both = System.concatenate([a, b])
    assert both.num_systems == 3 and both.batch.tolist() == [0] * 3 + [1] * 2 + [2] * 5
    assert torch.equal(both.cell[:2], a.cell) and torch.equal(both.pos[5:], b.pos)
    with pytest.raises(ValueError, match="at least one"):
        System.concatenate([])


def test_replace_and_to_share_or_copy():
    a = System.from_ase(molecule("H2O"))
    moved = a.replace(pos=a.pos + 1)
    assert moved.z is a.z and torch.equal(moved.pos, a.pos + 1)
    before = a.pos.clone()
    again = a.at(moved.pos)
    assert again.pos is moved.pos and again.z is a.z and torch.equal(a.pos, before) and again.num_systems == 1
    single = a.to(dtype=torch.float32)
    assert single.dtype == torch.float32 and a.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"z": [1.0], "pos": [[0.0, 0, 0]]}, "must be integers"),
        (
            {"z": ["H"], "pos": [[0.0, 0, 0]]},
            r"atomic numbers\), got \['H'\]; symbols are read by System",
        ),
        ({"z": np.array(["H"]), "pos": [[0.0, 0, 0]]}, "symbols are read by System.from_ase"),
        ({"z": [1, 1], "pos": [[0.0, 0, 0]]}, r"z must be \[N\] and pos \[N, 3\]"),
        ({"z": [1], "pos": [[0.0, 0]]}, r"pos \[N, 3\]"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "batch": [0, 0]}, "batch must be"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "cell": np.eye(2)}, "cell must have shape"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "pbc": np.ones((2, 3), bool)}, "pbc must have shape"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "pbc": [True, False]}, "pbc must have shape"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "charge": [1.0, 2.0]}, "charge must have one value per system"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "spin": 1.5}, "spin must be whole"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "batch": [0.5]}, "batch must be whole"),
        ({"z": [1], "pos": [[0.0, 0, 1j]]}, "pos must be real numbers, got torch.complex64"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "cell": 1j * np.eye(3)}, "cell must be real numbers"),
        ({"z": [1], "pos": [[0.0, 0, 0]], "charge": True}, "charge must be real numbers, got torch.bool"),
    ],
)
def test_shapes_that_do_not_fit(arguments, words):
    with pytest.raises(ValueError, match=words):
        System(**arguments)


def test_values_that_are_no_use():
    pos = torch.zeros(2, 3)
    z = torch.tensor([1, 1])
    nan = pos.clone()
    nan[1, 0] = float("nan")
    flat = [[1.0, 0, 0], [0, 1, 0], [1, 1, 0]]
    cases = [
        (System(z=z, pos=nan), "atom 1: its position is not finite"),
        (
            System(z=z, pos=pos, cell=[[1.0, 0, 0], [0, float("inf"), 0], [0, 0, 1]]),
            "structure 0: its cell is not finite",
        ),
        (System(z=z, pos=pos, charge=float("nan")), "structure 0: its charge is not finite"),
        (System(z=z, pos=pos, spin=-1), "structure 0: its spin multiplicity is negative"),
        (System(z=z, pos=pos, pbc=True), "structure 0: periodic along a lattice vector that is zero"),
        (System(z=z, pos=pos, cell=flat), "linearly dependent"),
        (System(z=z, pos=pos, cell=[[12.0, 0, 0], [12, 1e-3, 0], [0, 0, 12]]), "linearly dependent"),
        (System(z=z, pos=pos, batch=[0, 5], charge=[0.0, 0.0]), "atom 1: its batch index is out of range"),
    ]
    for system, words in cases:
        with pytest.raises(ValueError, match=words):
            system.validate()
    assert System(z=z, pos=pos, cell=flat, pbc=[True, True, False]).validate().num_systems == 1


@pytest.mark.parametrize("name", ["pos", "batch", "cell", "pbc", "charge", "spin"])
def test_fields_of_another_size_that_are_assigned(name):
    system = System.from_ase([molecule("H2O"), molecule("CH4")])
    setattr(system, name, getattr(system, name)[0])
    with pytest.raises(ValueError, match=r"must have shape .* was assigned"):
        system.validate()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cells_of_every_precision(dtype):
    si = System.from_ase(bulk("Si"), dtype=dtype)
    assert si.validate() is si
    third = si.cell[:, 0] + si.cell[:, 1]
    with pytest.raises(ValueError, match="linearly dependent"):
        si.replace(cell=torch.stack([si.cell[:, 0], si.cell[:, 1], third], 1)).validate()
