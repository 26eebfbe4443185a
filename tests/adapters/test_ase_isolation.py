"""The ASE calculator: nothing else is touched; copies, pickles, threads (bars R28, R29)."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ase_cases import count_evaluations, crystal, ethanol

from torchmdnet2 import Potential
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadCheckpoint

# --- nothing else is touched --------------------------------------------------------------------------------------


def test_the_users_atoms_and_torch_stay_as_they_were(potential, model_file):
    atoms = crystal()
    atoms.info = {"charge": 1, "note": {"a": [1]}}
    atoms.positions[0] += 3 * atoms.cell[1]  # outside of the cell, and must stay there
    before, info = atoms.copy(), copy.deepcopy(atoms.info)

    def state():
        return (
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    torch.get_rng_state()
    was = state()
    training = copy.deepcopy(potential).train()
    for model in (model_file, training):
        atoms.calc = TorchMDNet2Calculator(model, dtype=torch.float32)
        atoms.get_forces()
        atoms.get_stress()
    assert state() == was
    assert training.training and training.dtype == torch.float64
    assert all(p.requires_grad for p in training.parameters())
    assert atoms == before and atoms.info == info and set(atoms.arrays) == set(before.arrays)


def test_works_under_no_grad_and_inference_mode(potential):
    atoms = crystal()
    expected = TorchMDNet2Calculator(potential).get_property("stress", atoms)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            calc = TorchMDNet2Calculator(potential)
            assert np.array_equal(calc.get_property("stress", atoms), expected)
        assert np.array_equal(calc.get_property("stress", atoms * (1, 1, 1)), expected)  # and outside of it
        calc.reset()
        assert np.array_equal(calc.get_property("stress", atoms), expected)


def test_default_dtype_of_torch_is_neither_used_nor_changed(potential, tmp_path):
    save(copy.deepcopy(potential).float(), tmp_path / "f32.tmn")
    expected = TorchMDNet2Calculator(tmp_path / "f32.tmn").get_property("forces", ethanol())
    torch.set_default_dtype(torch.float64)
    try:
        calc = TorchMDNet2Calculator(tmp_path / "f32.tmn")
        assert calc.potential.dtype == torch.float32
        assert np.array_equal(calc.get_property("forces", ethanol()), expected)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("channels", [8, 32])  # 32: by the compiled kernels of the CPU
def test_default_device_of_torch_is_not_used(channels, tmp_path):
    config = {"model": {"name": "tensornet", "hidden_channels": channels, "num_layers": 1}, "elements": [1, 6, 8]}
    save(Potential.from_config(config), tmp_path / "model.tmn")
    expected = TorchMDNet2Calculator(tmp_path / "model.tmn")
    with torch.device("meta"):  # as torch.set_default_device("cuda") beside a model on the CPU
        calc = TorchMDNet2Calculator(tmp_path / "model.tmn")
        for atoms in (crystal(), crystal(), ethanol()):
            atoms.rattle(0.02)
            assert np.array_equal(calc.get_property("forces", atoms), expected.get_property("forces", atoms))
        assert np.array_equal(calc.get_property("stress", crystal()), expected.get_property("stress", crystal()))


def test_two_calculators_of_different_type_in_one_process(potential):
    single, double = (TorchMDNet2Calculator(potential, dtype=t) for t in (torch.float32, torch.float64))
    first = [c.get_property("energy", ethanol()) for c in (single, double)]
    assert first[0] != first[1] and first[0] == pytest.approx(first[1], rel=1e-5)
    assert [c.get_property("energy", ethanol()) for c in (TorchMDNet2Calculator(potential), single)] == first[::-1]


def test_later_training_of_the_users_potential_has_no_effect(potential):
    mine = copy.deepcopy(potential)
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(mine)
    expected = atoms.get_potential_energy()
    with torch.no_grad():
        for p in mine.parameters():
            p.mul_(1.5)
    atoms.calc.reset()
    assert atoms.get_potential_energy() == expected


# --- copies, pickles, threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("from_file", [True, False])
def test_copies_and_pickles(potential, model_file, duplicate, from_file):
    atoms = crystal()
    calc = TorchMDNet2Calculator(model_file if from_file else potential, dtype="float64", charge=1, spin=2)
    atoms.calc = calc
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    other = duplicate(calc)
    calls = count_evaluations(other)
    assert other.get_property("energy", atoms) == energy and not calls  # the result came along
    other.reset()
    assert np.array_equal(other.get_property("forces", atoms), forces) and len(calls) == 1
    moved = atoms.copy()
    moved.rattle(0.1)
    other.get_property("forces", moved)
    assert np.array_equal(atoms.get_forces(), forces)
    assert (other.charge, other.spin, other.potential.dtype) == (1, 2, torch.float64)


def test_pickle_of_a_file_holds_no_weights_and_no_classes_of_torch(model_file, potential):
    data = pickle.dumps(TorchMDNet2Calculator(model_file))
    assert len(data) < 2000 and b"torch._" not in data and b"Potential" not in data
    assert str(model_file).encode() in data
    assert b"torch._" not in pickle.dumps(TorchMDNet2Calculator(potential))


def test_pickle_refuses_a_replaced_file(potential, tmp_path):
    path = tmp_path / "model.tmn"
    save(potential, path)
    data = pickle.dumps(TorchMDNet2Calculator(path))
    pickle.loads(data)
    save(potential, path, metadata={"trained": "again"})
    with pytest.raises(BadCheckpoint, match="was replaced"):
        pickle.loads(data)


def test_pickle_of_a_hand_built_potential_says_what_to_do(potential):
    built = Potential(copy.deepcopy(potential.representation), copy.deepcopy(potential.head), elements=[1, 6, 8])
    with pytest.raises(ValueError, match="from_config"):
        pickle.dumps(TorchMDNet2Calculator(built))


@pytest.mark.parametrize("shared", ["calculator", "potential"])
def test_eight_threads_equal_serial(potential, shared):
    """Bar R29."""
    frames = []
    for k in range(12):
        atoms = ethanol() if k % 2 else crystal()
        atoms.rattle(0.05, seed=k)
        atoms.info["charge"] = k % 3
        frames.append(atoms)
    serial = TorchMDNet2Calculator(potential)
    expected = [(serial.get_property("energy", a), serial.get_property("forces", a)) for a in frames]
    one = TorchMDNet2Calculator(potential)

    def work(atoms):
        calc = one if shared == "calculator" else TorchMDNet2Calculator(potential)
        return calc.get_property("energy", atoms), calc.get_property("forces", atoms)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, frames * 2))
    for (energy, forces), (e, f) in zip(found, expected * 2, strict=True):
        assert energy == e and np.array_equal(forces, f)
