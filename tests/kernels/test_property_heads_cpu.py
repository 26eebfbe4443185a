"""Heads of other properties beside TensorNet and TensorNet2 on the compiled kernels of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

ELEMENTS = [1, 6, 7, 8]
BOX = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 5.5, "damping": "exp"}
EWALD = {**FIELD, "method": "ewald"}
GAP = {"name": "scalar_property", "property": "gap", "reduce": "mean"}


def make(name: str, properties: list, priors: tuple = (), layers: int = 1) -> Potential:
    torch.manual_seed(3)
    model = {"name": name, "hidden_channels": 32, "num_layers": layers, "num_rbf": 8, "cutoff": 4.0, "max_z": 10}
    config = {"model": model, "properties": properties, "priors": list(priors), "elements": ELEMENTS}
    potential = Potential.from_config(config).eval()
    with torch.no_grad():
        for p in potential.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return potential


def system(num_atoms: int, cell: list | None = None, charge: float = 0.0) -> System:
    generator = torch.Generator().manual_seed(num_atoms)
    lattice = torch.eye(3).double() * 3.5 if cell is None else torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator) @ lattice
    z = torch.tensor(ELEMENTS)[torch.randint(0, 4, (num_atoms,), generator=generator)]
    return System(z=z, pos=pos, cell=None if cell is None else lattice[None], charge=torch.tensor([charge]))


def assert_same(model: Potential, atoms: System) -> None:
    """Energies to 2e-6 eV, charges and properties to 2e-6, forces to 5e-6 of the largest, stress to 1e-5."""
    stress, evaluator = bool((atoms.volume > 0).all()), Evaluator(model)
    exact, found = copy.deepcopy(model).double()(atoms, stress=stress), evaluator(atoms, stress=stress)
    assert "compiled TensorNet" in evaluator.report()
    torch.testing.assert_close(found.energy, exact.energy, rtol=1e-7, atol=2e-6)
    torch.testing.assert_close(found.atom_energies, exact.atom_energies, rtol=1e-7, atol=2e-6)
    largest = max(1.0, float(exact.forces.abs().max()))
    torch.testing.assert_close(found.forces, exact.forces, rtol=0, atol=5e-6 * largest)
    if stress:
        torch.testing.assert_close(found.stress, exact.stress, rtol=0, atol=1e-5 * float(exact.stress.abs().max()))
    assert found.properties.keys() == exact.properties.keys()
    for name, value in exact.properties.items():
        torch.testing.assert_close(found.properties[name].double(), value.double(), rtol=1e-6, atol=2e-6)
    if exact.charges is None:
        assert found.charges is None
    else:
        torch.testing.assert_close(found.charges, exact.charges, rtol=0, atol=2e-6)


@pytest.mark.parametrize("prior", [FIELD, EWALD], ids=["reaction field", "Ewald"])
@pytest.mark.parametrize("layers", [1, 2])
def test_coulomb_of_charges_that_a_head_of_tensornet_predicts(layers: int, prior: dict) -> None:
    """The gradient of the network starts from (1, dE/dq): the head adds to that of the features."""
    charged, plain = (make("tensornet", [{"name": "charges"}], p, layers) for p in ((prior,), ()))
    atoms = system(9, BOX, 1.0)
    assert_same(charged, atoms)
    fixed = copy.deepcopy(charged).double()
    prior_forces = charged(atoms).forces - plain(atoms).forces
    # forces through the charges are a part of these: a gradient that leaves them out would be seen
    with torch.no_grad():
        charges = fixed(atoms).charges
    pos = atoms.pos.clone().requires_grad_()
    energy = fixed.prior_energies(atoms.replace(pos=pos), charges=charges).sum()
    (direct,) = torch.autograd.grad(energy, pos)
    assert float((prior_forces + direct).abs().max()) > 1e-3


def test_batch_of_charged_structures_whose_atoms_take_turns() -> None:
    model = make("tensornet", [{"name": "charges"}, GAP], (FIELD,), 2)
    together = System.concatenate([system(5, BOX, 1.0), system(1, BOX), system(4, BOX, -2.0)])
    assert_same(model, together)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    assert_same(model, together.replace(z=together.z[order], pos=together.pos[order], batch=together.batch[order]))


def test_other_properties_leave_energies_and_forces_on_the_kernels() -> None:
    model = make("tensornet", [{"name": "charges"}, {"name": "dipole"}, {"name": "spatial_extent"}, GAP])
    atoms = system(7, charge=-1.0)
    assert_same(model, atoms)
    evaluator = Evaluator(model)
    assert torch.equal(evaluator(atoms, forces=False).properties["dipole"], evaluator(atoms).properties["dipole"])
    for evaluate in (model, evaluator):
        with pytest.raises(ValueError, match="structure 0 is periodic"):
            evaluate(system(7, BOX))
    assert torch.equal(evaluator.bind(atoms).forces, evaluator(atoms).forces)


def test_charges_of_a_head_take_the_place_of_those_of_tensornet2() -> None:
    model, atoms = make("tensornet2", [{"name": "charges"}, GAP], (FIELD,), 2), system(9, BOX, 1.0)
    assert_same(model, atoms)
    latent = make("tensornet2", [GAP], (FIELD,), 2)
    assert_same(latent, atoms)
    assert float((Evaluator(latent)(atoms).charges - Evaluator(model)(atoms).charges).abs().max()) > 1e-3


def test_heads_without_kernels_say_so() -> None:
    report = Evaluator(make("tensornet", [{"name": "charges", "num_hidden_layers": 1}])).report()
    assert "one hidden layer" in report and "reference path" in report
