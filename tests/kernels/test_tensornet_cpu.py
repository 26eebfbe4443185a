"""The compiled TensorNet of the CPU against the Potential in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from torchmdnet2.engine.cpu_step import CpuModel
from torchmdnet2.neighbors import neighbor_list

CUTOFF = 4.5
BOX = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
TINY = [[2.1, 0, 0], [0.4, 2.3, 0], [0, 0.5, 2.2]]  # several images of each atom, and of itself
FAR = torch.tensor([[0.0, 0, 0], [50, 0, 0], [0, 50, 0]], dtype=torch.float64)


def potential(group: str = "O(3)", **model: object) -> Potential:
    torch.manual_seed(3)
    config = {"name": "tensornet", "hidden_channels": 32, "num_rbf": 16, "cutoff": CUTOFF, "max_z": 10, "group": group}
    result = Potential.from_config({"model": {**config, **model}, "energy_scale": 1.5, "energy_shift": 0.5}).eval()
    with torch.no_grad():
        for p in result.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return result


def system(num_atoms: int, cell: list | None = None, charge: float = 0.0) -> System:
    generator = torch.Generator().manual_seed(num_atoms)
    lattice = torch.eye(3).double() * (1.5 * num_atoms ** (1 / 3) + 2)
    if cell is not None:
        lattice = torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator) @ lattice
    z = torch.randint(1, 9, (num_atoms,), generator=generator)
    return System(z=z, pos=pos, cell=None if cell is None else lattice[None], charge=torch.tensor([charge]))


def stress_terms(exact: Potential, atoms: System) -> torch.Tensor:
    """Sum of the magnitudes of all edges' parts of the stress, [3, 3] eV/Å³: in a small cell they cancel."""
    edges = neighbor_list(atoms, exact.cutoff)
    shift = edges.shift.double().requires_grad_()
    energies, _ = exact.atom_energies(atoms, replace(edges, shift=shift))
    (slope,) = torch.autograd.grad(energies.sum(), shift)
    receiver, sender = edges.edge_index
    vectors = atoms.pos[sender] - atoms.pos[receiver] + edges.shift.double() @ atoms.cell[0]
    return vectors.abs().T @ torch.linalg.solve(atoms.cell[0], slope.T).abs().T / atoms.volume


def check(model: Potential, atoms: System) -> None:
    """Energies to 1e-6 and stress to 3e-6 of what they are differences of, forces to 5e-6 of the largest."""
    stress = bool((atoms.volume > 0).all())
    double = copy.deepcopy(model).double()
    exact = double(atoms, stress=stress)
    ours = Evaluator(model)(atoms, stress=stress)
    assert ours.energy.dtype == torch.float64 and ours.forces.dtype == atoms.dtype
    isolated = double.isolated_energies()[atoms.z] * model.energy_scale
    size = exact.atom_energies.abs() + isolated.abs()
    torch.testing.assert_close(ours.atom_energies, exact.atom_energies, rtol=0, atol=1e-6 * max(1.0, float(size.max())))
    torch.testing.assert_close(ours.energy, exact.energy, rtol=0, atol=1e-6 * max(1.0, float(size.sum())))
    size = max(1.0, float(exact.forces.abs().max()))
    torch.testing.assert_close(ours.forces, exact.forces, rtol=0, atol=5e-6 * size)
    if stress:
        terms = stress_terms(double, atoms)
        torch.testing.assert_close(ours.stress, exact.stress, rtol=0, atol=3e-6 * float(terms.max()))


@pytest.mark.parametrize(
    "atoms",
    [
        system(1), system(2), system(5), system(9, charge=-1.0), system(33), system(9, BOX), system(9, BOX, 1.0),
        system(2, TINY), system(1, TINY), system(5).replace(pos=FAR.repeat(2, 1)[:5] + 100 * torch.eye(5, 3)),
    ],
    ids=["1 atom", "2", "5", "ion", "33", "cell", "ion in a cell", "images", "1 atom's images", "no edges"],
)  # fmt: skip
def test_agrees_with_the_potential(atoms: System) -> None:
    check(potential(), atoms)


@pytest.mark.parametrize("atoms", [system(5), system(9, BOX, -1.0)], ids=["molecule", "ion in a cell"])
def test_so3(atoms: System) -> None:
    check(potential("SO(3)"), atoms)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers(layers: int) -> None:
    check(potential(num_layers=layers), system(7))


@pytest.mark.parametrize(
    "atoms", [system(1), system(5), system(9, BOX, -1.0)], ids=["1 atom", "molecule", "ion in a cell"]
)
def test_logarithms(atoms: System) -> None:
    check(potential(norm="log"), atoms)


@pytest.mark.parametrize(
    "atoms", [system(1), system(5), system(9, BOX, -1.0)], ids=["1 atom", "molecule", "ion in a cell"]
)
@pytest.mark.parametrize("group", ["O(3)", "SO(3)"])
def test_linear_readout(atoms: System, group: str) -> None:
    check(potential(group, linear_readout=True, norm="log"), atoms)


def test_options_without_kernels_are_evaluated_by_the_potential() -> None:
    model, atoms = potential(tensor_norm="root"), system(5)
    evaluator = Evaluator(model)
    assert "tensor_norm 'square' only" in evaluator.report()
    torch.testing.assert_close(evaluator(atoms).forces, model(atoms).forces, rtol=0, atol=0)


def test_batch_and_single_precision_positions() -> None:
    parts = [system(5, BOX), system(3, BOX, 1.0), system(9, BOX)]
    model = potential()
    check(model, System.concatenate(parts))
    evaluator = Evaluator(model)
    together = evaluator(System.concatenate(parts).to(dtype=torch.float32), stress=True)
    for i, part in enumerate(parts):
        alone = evaluator(part.to(dtype=torch.float32), stress=True)
        torch.testing.assert_close(together.energy[i], alone.energy[0], rtol=0, atol=0)
        torch.testing.assert_close(together.stress[i], alone.stress[0], rtol=0, atol=1e-9)


def test_same_result_every_time_on_any_number_of_threads() -> None:
    model, atoms = CpuModel(potential()), system(21, BOX)
    first = model(atoms, stress=True)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            model(system(33))  # other contents in the buffers
            again = model(atoms, stress=True)
            for name in ("energy", "forces", "stress", "atom_energies"):
                assert torch.equal(getattr(first, name), getattr(again, name)), name
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)


def test_what_is_computed() -> None:
    model, atoms = CpuModel(potential()), system(9, BOX)
    full = model(atoms, stress=True)
    energies = model(atoms, forces=False)
    assert energies.forces is None and energies.stress is None and torch.equal(energies.energy, full.energy)
    assert model(atoms, forces=False, stress=True).forces is None
    with pytest.raises(ValueError, match="no cell"):
        model(system(5), stress=True)


def test_the_first_use_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CpuModel(potential())
    monkeypatch.setattr(model, "isolated", model.isolated + 0.01)
    with pytest.raises(RuntimeError, match="does not agree with the reference"):
        model(system(5))


def test_evaluator_takes_it_and_says_so() -> None:
    model = potential()
    evaluator = Evaluator(model)
    assert "numba" in evaluator.report()
    step = evaluator.bind(system(5))
    with torch.no_grad():
        step.pos[0] += 0.1
        step.replay()
    assert step.check()
    torch.testing.assert_close(step.forces, evaluator(system(5).replace(pos=step.pos)).forces, rtol=0, atol=0)
    before = evaluator(system(5)).energy
    with torch.no_grad():
        next(iter(model.head.parameters())).mul_(1.5)
    assert not torch.equal(evaluator(system(5)).energy, before)
    assert "reference path" in Evaluator(potential().double()).report()
