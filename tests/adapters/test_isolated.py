"""A molecule in a periodic box is evaluated as in vacuum, whatever images its atoms are in: arrays, ASE, torch-sim."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read
from isolated_cases import CELLS, acetate, charged_potential, wrapped

from torchmdnet2 import System
from torchmdnet2.adapters.ase import CommitteeCalculator, NoStress, TorchMDNet2Calculator
from torchmdnet2.adapters.isolated import isolate, made_whole
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import BadData

PBC = [True, (True, True, False), (False, False, True), False]


@pytest.mark.parametrize("pbc", PBC)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_distances_are_those_of_the_molecule(cell, pbc):
    for seed in range(5):
        atoms = wrapped(acetate(), cell, seed, pbc)
        whole = made_whole(atoms.positions, cell, atoms.pbc)
        expected = acetate().get_all_distances()
        np.testing.assert_allclose(Atoms(positions=whole).get_all_distances(), expected, atol=1e-12)
        np.testing.assert_array_equal(whole[0], atoms.positions[0])


def test_batches_are_isolated_as_single_molecules():
    """Atoms of several structures in any order, with cells of their own, and a molecule without one."""
    frames = [wrapped(acetate(), cell, k, pbc) for k, cell in enumerate(CELLS.values()) for pbc in PBC]
    frames.append(molecule("H2O"))
    system = System.from_ase(frames)
    order = torch.randperm(system.num_atoms, generator=torch.Generator().manual_seed(1))
    mixed = system.replace(z=system.z[order], pos=system.pos[order], batch=system.batch[order])
    for given, back in ((system, torch.arange(system.num_atoms)), (mixed, torch.argsort(order))):
        alone = isolate(given)
        assert not alone.pbc.any() and not alone.cell.any()
        found = alone.pos[back].numpy()
        for b, atoms in enumerate(frames):
            whole = made_whole(atoms.positions, atoms.cell.array, atoms.pbc)
            ours = found[(system.batch == b).numpy()]
            np.testing.assert_allclose(ours - ours.mean(0), whole - whole.mean(0), atol=1e-12)


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_half_of_the_shortest_width_is_the_limit(cell):
    width = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0).max()
    for share, good in ((0.49, True), (0.51, False), (0.8, False)):
        rod = Atoms("C8", np.linspace(0, 1, 8)[:, None] * [0.6, 0.0, 0.8] * share * width)
        atoms = wrapped(rod, cell, 1)
        if good:
            whole = made_whole(atoms.positions, cell, atoms.pbc)
            np.testing.assert_allclose(np.linalg.norm(whole[7] - whole[0]), share * width, rtol=1e-12)
            isolate(System.from_ase([rod, atoms]))
            continue
        with pytest.raises(BadData, match=f"longer than half of the shortest width.*{width / 2:.2f} Å.*larger box"):
            made_whole(atoms.positions, cell, atoms.pbc)
        with pytest.raises(BadData, match="structure 1: the isolated molecule is longer than half"):
            isolate(System.from_ase([rod, atoms]))


def test_a_round_molecule_may_fill_half_of_the_box():
    """Twice the largest distance from the centre is above half of the width, and no distance is."""
    triangle = Atoms("C3", 7.9 * np.array([[0, 0, 0], [1, 0, 0], [0.5, 0.75**0.5, 0]]))
    atoms = wrapped(triangle, np.eye(3) * 16, 2)
    assert made_whole(atoms.positions, np.eye(3) * 16, atoms.pbc).shape == (3, 3)
    isolate(System.from_ase(atoms))


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_ase_gives_the_energy_in_vacuum(cell):
    alone = acetate()
    expected = TorchMDNet2Calculator(charged_potential(), charge=-1)
    calc = TorchMDNet2Calculator(charged_potential(), charge=-1, isolated=True)
    forces = expected.get_property("forces", alone)
    frames = [wrapped(alone, cell, seed) for seed in range(4)]
    for atoms in frames:
        before = atoms.positions.copy()
        assert calc.get_property("energy", atoms) == pytest.approx(expected.get_property("energy", alone), rel=1e-9)
        np.testing.assert_allclose(calc.get_property("forces", atoms), forces, atol=1e-8)
        np.testing.assert_array_equal(atoms.positions, before)
        assert atoms.pbc.all()
    for found in calc.evaluate(frames):
        np.testing.assert_allclose(found["forces"], forces, atol=1e-8)
    np.testing.assert_allclose(calc.get_hessian(frames[0]), expected.get_hessian(alone), atol=1e-6)
    images = expected.get_property("energy", frames[0]) - expected.get_property("energy", alone)
    assert abs(images) > 0.01
    with pytest.raises(NoStress, match="isolated molecule has no stress"):
        calc.get_property("stress", frames[0])


def test_copies_pickles_and_committees_stay_isolated():
    atoms, expected = wrapped(acetate(), CELLS["triclinic"], 1), acetate()
    calc = TorchMDNet2Calculator(charged_potential(), charge=-1, isolated=True)
    energy = TorchMDNet2Calculator(charged_potential(), charge=-1).get_property("energy", expected)
    committee = CommitteeCalculator([charged_potential()] * 2, charge=-1, isolated=True)
    for each in (copy.copy(calc), pickle.loads(pickle.dumps(calc)), committee):
        assert each.get_property("energy", atoms) == pytest.approx(energy, rel=1e-9)
        assert each.todict()["isolated"] is True


def test_md_takes_the_cell_away(tmp_path, monkeypatch, capsys):
    from commands import run

    monkeypatch.chdir(tmp_path)
    save(charged_potential(), "charged.tmn")
    atoms = wrapped(acetate(), CELLS["triclinic"], 1)
    atoms.info["charge"] = -1
    atoms.write("box.xyz")
    for coulomb in ("pme", "dsf"):
        code, _, err = run(
            capsys, "md", "charged.tmn", "box.xyz", "--steps", "0", "--coulomb", coulomb, "--output", "x"
        )
        assert code == 0 and read("x.xyz", 0).pbc.all(), err
        expected = TorchMDNet2Calculator(charged_potential(), charge=-1, coulomb=coulomb)
        found = pickle.loads(pickle.dumps(expected))
        assert read("x.xyz", 0).get_potential_energy() == pytest.approx(found.get_property("energy", atoms), abs=1e-5)
    code, _, err = run(capsys, "md", "charged.tmn", "box.xyz", "--steps", "1", "--output", "x", "--restart")
    assert code == 2 and "--coulomb" in err, err  # the one before was by dsf
    code, _, err = run(capsys, "md", "charged.tmn", "box.xyz", "--steps", "2", "--every", "1", "--isolated")
    assert code == 0, err
    first = read("md.xyz", 0)
    assert not first.pbc.any()
    np.testing.assert_allclose(first.get_all_distances(), acetate().get_all_distances(), atol=1e-5)


def test_torch_sim_gives_the_energy_in_vacuum():
    ts = pytest.importorskip("torch_sim", reason="torch-sim-atomistic is not installed (it needs Python 3.12)")
    from torchmdnet2.adapters.torch_sim import TorchMDNet2Model

    ion = acetate()
    ion.info["charge"] = -1
    frames = [wrapped(ion, cell, 3) for cell in CELLS.values()]
    state = ts.io.atoms_to_state(frames, torch.device("cpu"), torch.float64, system_extras_map={"charge": "charge"})
    model = TorchMDNet2Model(charged_potential(), isolated=True, compute_stress=True, allow_untrained_charge=True)
    found = model(state)
    expected = charged_potential()(System.from_ase([ion] * 3))
    torch.testing.assert_close(found["energy"], expected.energy.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found["forces"], expected.forces, rtol=0, atol=1e-8)
    assert not found["stress"].any()
    assert (TorchMDNet2Model(charged_potential())(state)["energy"] - found["energy"]).abs().max() > 0.01
