"""Dipole moments of models that predict charges and no dipole: of charges, about the centre of mass."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.data import atomic_masses
from ase.io import read, write
from ase.vibrations import Infrared

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.potential.graph import charge_dipole

NETWORK = {"name": "tensornet", "hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0}
MODELS = {
    "head of charges": {"model": NETWORK, "properties": [{"name": "charges"}]},
    "latent charges": {"model": {**NETWORK, "name": "tensornet2", "q_dim": 4}},
}
ION = Atoms("OH", [[1.0, 2.0, 3.0], [1.5, 2.0, 3.8]], info={"charge": -1})


def potential(name: str, seed: int = 0, **more) -> Potential:
    torch.manual_seed(seed)
    return Potential.from_config({**MODELS[name], "elements": [1, 6, 8], **more}).double().eval()


def by_hand(atoms: Atoms, charges: np.ndarray) -> np.ndarray:
    return charges @ (atoms.positions - atoms.get_center_of_mass())


@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_that_of_the_charges(name):
    """Potential, evaluator and calculator; of an ion about the centre of mass, wherever it is."""
    model, frames = potential(name), [molecule("CH3OH"), ION, molecule("H2O")]
    systems = System.from_ase(frames)
    for result in (model(systems), Evaluator(model)(systems)):
        charges = result.charges.detach().numpy()
        assert np.abs(charges).max() > 1e-3
        for k, atoms in enumerate(frames):
            expected = by_hand(atoms, charges[systems.batch.numpy() == k])
            np.testing.assert_allclose(result.properties["dipole"][k].detach().numpy(), expected, atol=1e-12)
    for atoms in frames:
        atoms = atoms.copy()
        atoms.calc = TorchMDNet2Calculator(model)
        for _ in range(3):  # the later calls run on bound steps
            atoms.positions += 0.01
            np.testing.assert_allclose(atoms.get_dipole_moment(), by_hand(atoms, atoms.get_charges()), atol=1e-12)
    assert atomic_masses[8] == pytest.approx(15.999)


def test_periodic_structures_have_none():
    model = potential("head of charges")
    cell, water = molecule("H2O", cell=[9, 9, 9], pbc=[True, False, False]), molecule("H2O")
    dipoles = Evaluator(model)(System.from_ase([cell, water])).properties["dipole"]
    assert bool(dipoles[0].isnan().all()) and bool(dipoles[1].isfinite().all())
    alone = Evaluator(model)(System.from_ase(cell)).properties
    assert list(alone) == ["charges"] and "dipole" not in alone
    calculator = TorchMDNet2Calculator(model)
    both = list(calculator.evaluate([cell, water]))
    assert "dipole" not in both[0] and both[1]["dipole"].shape == (3,)
    cell.calc = calculator
    assert np.isfinite(cell.get_potential_energy())
    with pytest.raises(NotImplementedError, match="a periodic structure has no 'dipole'"):
        cell.get_dipole_moment()


def test_bound_steps_and_later_changes():
    """As a call; a result keeps its dipole when positions are overwritten before it is asked for."""
    model, system = potential("head of charges"), System.from_ase([molecule("CH3OH"), molecule("H2O")])
    evaluator = Evaluator(model)
    bound, late = evaluator.bind(system), evaluator(system)
    system.pos += 0.1 * torch.sin(torch.arange(system.pos.numel()).double()).view(-1, 3)
    bound.pos.copy_(system.pos)
    bound.replay()
    now = evaluator(system).properties
    for properties in (bound.fetch().properties, bound.properties()):
        assert list(properties) == list(now) == ["charges", "dipole"] and len(properties) == 2
        torch.testing.assert_close(properties["dipole"], now["dipole"], rtol=0, atol=1e-12)
    assert float((late.properties["dipole"] - now["dipole"]).abs().max()) > 1e-3
    assert "dipole" in repr(late.properties)


def test_a_head_of_dipoles_comes_first():
    model = potential("head of charges", properties=[{"name": "charges"}, {"name": "dipole"}])
    water = System.from_ase(molecule("H2O"))
    found = Evaluator(model)(water)
    assert float((found.properties["dipole"] - charge_dipole(found.charges, water)).abs().max()) > 1e-4
    atoms = molecule("H2O")
    atoms.calc = TorchMDNet2Calculator(model)
    np.testing.assert_allclose(atoms.get_dipole_moment(), found.properties["dipole"][0].detach(), atol=1e-9)


def test_derivatives():
    """Charges move with the atoms: against finite differences."""
    model, water = potential("head of charges"), System.from_ase(molecule("CH3OH"))

    def dipole(pos):
        return model(water.replace(pos=pos), create_graph=True).properties["dipole"][0]

    pos = water.pos.clone().requires_grad_()
    (slope,) = torch.autograd.grad(dipole(pos)[1], pos)
    step = torch.zeros_like(water.pos)
    step[2, 0] = 1e-4
    found = (dipole(water.pos + step) - dipole(water.pos - step))[1] / 2e-4
    assert float(slope[2, 0]) == pytest.approx(found.item(), abs=1e-7) and abs(found.item()) > 1e-4


def test_ensembles():
    """The dipole of the mean charges, the same in every call."""
    members = [potential("head of charges", seed) for seed in range(3)]
    water = molecule("H2O")
    single = [Evaluator(m)(System.from_ase(water)).properties["dipole"] for m in members]
    together = Ensemble(members)(System.from_ase(water))
    torch.testing.assert_close(together.properties["dipole"], torch.stack(single).mean(0))
    torch.testing.assert_close(together.properties_std["dipole"], torch.stack(single).std(0))
    water.calc = CommitteeCalculator(members)
    for _ in range(3):
        water.positions += 0.1
        np.testing.assert_allclose(water.get_dipole_moment(), together.properties["dipole"][0].detach(), atol=1e-9)


def test_evaluate_compares_with_labels(tmp_path, capsys):
    model = potential("head of charges")
    save(model, tmp_path / "m.tmn")
    save(Potential.from_config({"model": NETWORK, "elements": [1, 6, 8]}), tmp_path / "none.tmn")
    frames, off = [], np.array([0, 0, 0.3])
    for k in range(4):
        atoms = molecule("CH3OH")
        atoms.rattle(0.05, seed=k)
        found = model(System.from_ase(atoms))
        atoms.info["energy"] = float(found.energy)
        atoms.info["mu"] = (found.properties["dipole"][0].detach().numpy() + off) / 0.20819433  # D
        frames.append(atoms)
    write(tmp_path / "data.xyz", frames)
    keys = ["--energy-key", "energy", "--forces-key", "null", "--dipole-key", "mu", "--dipole-unit", "debye"]
    words = ["evaluate", str(tmp_path / "m.tmn"), str(tmp_path / "data.xyz"), *keys, "--device", "cpu", "--json"]
    assert main([*words, "--output", str(tmp_path / "out.xyz")]) == 0
    assert json.loads(capsys.readouterr().out)["dipole"]["mae"] == pytest.approx(0.1, rel=1e-5)  # mean of three numbers
    written = read(tmp_path / "out.xyz", 0)
    np.testing.assert_allclose(written.get_dipole_moment() + off, frames[0].info["mu"] * 0.20819433, atol=1e-5)
    words[1] = str(tmp_path / "none.tmn")
    assert main(words) == 2 and "--dipole-key" in capsys.readouterr().err


def test_organic_in_the_infrared(tmp_path, monkeypatch):
    """Water: 1.85 D is measured, and all three modes are seen."""
    monkeypatch.chdir(tmp_path)
    water = molecule("H2O")
    water.calc = TorchMDNet2Calculator(load("organic-small"))
    assert np.linalg.norm(water.get_dipole_moment()) / 0.20819433 == pytest.approx(1.9, abs=0.2)
    infrared = Infrared(water)
    infrared.run()
    assert (infrared.get_frequencies()[-3:].real > 1000).all() and (infrared.intensities[-3:] > 0.1).all()
