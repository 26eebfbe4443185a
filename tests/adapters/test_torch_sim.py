"""The torch-sim model, by torch-sim's own conformance test and against the Potential. Needs Python 3.12."""

from __future__ import annotations

import copy

import pytest
import torch
from ase.build import bulk, molecule

ts = pytest.importorskip("torch_sim", reason="torch-sim-atomistic is not installed (it needs Python 3.12)")
from torch_sim.models.interface import SumModel, validate_model_outputs  # noqa: E402

from torchmdnet2 import Potential, System  # noqa: E402
from torchmdnet2.adapters.torch_sim import TorchMDNet2Model  # noqa: E402
from torchmdnet2.errors import BadData  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def metals(potential):
    """With the elements of torch-sim's conformance test."""
    with torch.random.fork_rng(devices=[]):
        return Potential.from_config({**potential.config, "elements": [1, 6, 8, 12, 14, 26]}).double()


def frames():
    crystal = bulk("Si", a=5.4)
    crystal.rattle(0.1, seed=1)
    crystal.set_cell(crystal.cell.array @ [[1, 0.1, 0], [0, 1, -0.05], [0.03, 0, 1]], scale_atoms=True)
    return [crystal, bulk("Mg", "hcp", a=3.2, c=5.2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conformance(metals, dtype):
    validate_model_outputs(TorchMDNet2Model(metals, dtype=dtype), CPU, dtype)


def test_equals_the_potential(metals, tmp_path):
    from torchmdnet2.checkpoint import save

    save(metals, tmp_path / "model.tmn")
    model = TorchMDNet2Model(tmp_path / "model.tmn", compute_stress=True)
    output = model(ts.io.atoms_to_state(frames(), CPU, torch.float64))
    expected = metals(System.from_ase(frames()), stress=True)
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(output[name], getattr(expected, name), rtol=0, atol=1e-10)
    assert float(output["forces"].abs().max()) > 1e-3 and float(output["stress"].abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["isolated", "compute_forces", "compute_stress"])
def test_flags(metals, name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
        TorchMDNet2Model(metals, **{name: "no"})
    if name != "isolated":
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
            setattr(TorchMDNet2Model(metals), name, "no")


def test_charge_of_the_state(metals):
    water = [molecule("H2O"), molecule("H2O")]
    for atoms, charge in zip(water, (0, 1), strict=True):
        atoms.info["charge"] = charge
    state = ts.io.atoms_to_state(water, CPU, torch.float64, system_extras_map={"charge": "charge"})
    model = TorchMDNet2Model(metals)
    expected = metals(System.from_ase(water)).energy.detach()
    torch.testing.assert_close(model(state)["energy"], expected, rtol=0, atol=1e-10)
    state.charge.copy_(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(model(state)["energy"], expected.flip(0), rtol=0, atol=1e-10)
    assert float(expected[0]) != float(expected[1])


def test_states_made_in_inference_mode(metals):
    model, expected = TorchMDNet2Model(metals), metals(System.from_ase(frames())).energy.detach()
    with torch.inference_mode():
        state = ts.io.atoms_to_state(frames(), CPU, torch.float64)
        torch.testing.assert_close(model(state)["energy"], expected, rtol=0, atol=1e-10)
        state.atomic_numbers[0] = 6
        assert float(model(state)["energy"][0]) != float(expected[0])


def test_refusals(metals):
    model = TorchMDNet2Model(metals)
    state = ts.io.atoms_to_state([molecule("H2O")], CPU, torch.float64)
    state.positions[1, 0] = float("nan")
    with pytest.raises(ValueError, match="atom 1"):
        model(state)
    with pytest.raises(ValueError, match="U"):
        model(ts.io.atoms_to_state([bulk("U", "bcc", a=3.4)], CPU, torch.float64))


def test_results_that_are_not_finite(metals):
    broken = copy.deepcopy(metals)
    broken.energy_scale = float("nan")
    with pytest.raises(ValueError, match="result is not finite: a structure is unphysical"):
        TorchMDNet2Model(broken)(ts.io.atoms_to_state([molecule("H2O")], CPU, torch.float64))


def test_statements_of_the_charge_that_differ():
    """Every name of a charge is read; two of them must agree."""
    water = molecule("H2O")
    names = {"charge": "charge", "total_charge": "total_charge"}
    for second in (1, 2):
        water.info.update(charge=1, total_charge=second)
        state = ts.io.atoms_to_state([water], CPU, torch.float64, system_extras_map=names)
        if second == 1:
            assert TorchMDNet2Model._stated(state, "charge").tolist() == [1]
        else:
            with pytest.raises(BadData, match="extras charge and total_charge differ: remove the one that is wrong"):
                TorchMDNet2Model._stated(state, "charge")


def test_dynamics_and_sums(metals):
    """torch-sim's own integrator conserves the energy, also of a sum of two models."""
    water = molecule("H2O")
    model = SumModel(TorchMDNet2Model(metals), TorchMDNet2Model(metals))
    state = ts.io.atoms_to_state([water, water], CPU, torch.float64)
    state = ts.nve_init(state=state, model=model, kT=torch.tensor(0.01, dtype=torch.float64))
    totals = []
    for _ in range(50):
        state = ts.nve_step(state=state, model=model, dt=torch.tensor(0.002, dtype=torch.float64))
        kinetic = ts.calc_kinetic_energy(momenta=state.momenta, masses=state.masses, system_idx=state.system_idx)
        totals.append(state.energy + kinetic)
    totals = torch.stack(totals)
    assert float((totals - totals[0]).abs().max()) < 5e-5 < float(kinetic.max())
