"""Heads of other properties on TensorNet's kernels: R15 (the Potential in float64), R8, R16, R19. Twin without a GPU:
tests/kernels/test_tensornet_heads.py."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from test_evaluator_gpu import make, no_waiting, random_atoms

from torchmdnet2 import Evaluator, System

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ION = torch.tensor([1.0])
CHARGES, DIPOLE = {"name": "charges"}, {"name": "dipole"}
SHIFTS = {"name": "scalar_property", "property": "shielding", "per": "atom"}
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 9.0, "damping": "exp"}
ALL_PAIRS = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
SECOND = {"name": "tensornet2", "hidden_channels": 64, "num_layers": 1, "num_rbf": 16, "cutoff": 5.0, "max_z": 10}
MODELS = {
    "reaction field": {"priors": [FIELD]},
    "reaction field, zbl": {"priors": [FIELD, {"name": "zbl", "envelope": "covalent"}]},
    "charges that nothing reads": {},
    "TensorNet2": {"priors": [FIELD], "model": {**SECOND, "q_dim": 8}},
}


def charged(**changes):
    potential = make(properties=[CHARGES, SHIFTS], **changes)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for p in potential.properties.parameters():  # charges that differ
            p.add_(0.2 * torch.randn(p.shape).to(p.device))
    return potential


def assert_same(potential, found, system, stress=False):
    """At most twice the error of eager float32, and 1e-6 of the largest; `found` may be of copies of the system.

    The energy is a sum whose rounding errors depend on the order: that of eager float32 is the largest of three orders
    of the atoms of a structure, since it may be small by chance in one.
    """
    expected = copy.deepcopy(potential).double()(system.to(dtype=torch.float64), stress=stress)
    eager = potential(system.to(dtype=torch.float32), stress=stress)
    assert list(found.properties) == list(expected.properties)
    results = [{**vars(r), **r.properties} for r in (found, expected, eager)]
    for name in {"energy", "atom_energies", "forces", *expected.properties, *(["stress"] if stress else [])}:
        ours, truth, theirs = (r[name].double() for r in results)
        ours = ours.view(-1, *truth.shape)
        error = (theirs - truth).abs().max()
        if name == "energy" and system.num_systems == 1:
            error = max(error, *((energy_in_order(potential, system, k) - truth).abs().max() for k in (1, 2)))
        bound = 2 * float(error) + 1e-6 * max(1.0, float(truth.abs().max()))
        assert float((ours - truth).abs().max()) <= bound, name


def energy_in_order(potential, system, parts):
    """Energy by eager float32 with the atoms in reverse order (1), or the second half first (2)."""
    order = torch.arange(system.num_atoms, device="cuda")
    order = order.flip(0) if parts == 1 else order.roll(system.num_atoms // 2)
    other = system.replace(z=system.z[order], pos=system.pos[order]).to(dtype=torch.float32)
    return potential(other).energy.double()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("n", "cell"), [(1, False), (22, False), (166, True), (700, True), (1029, True)])
def test_energies_forces_charges_stress(name, n, cell):
    """R15; replayed twice: the same bits (R19)."""
    potential = charged(**MODELS[name])
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(n, seed=n, cell=cell, charge=ION)
    found = evaluator(system, stress=cell)
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
    assert_same(potential, found, system, cell)
    again = evaluator(system, stress=cell)
    for what in ("forces", "atom_energies", "charges"):
        assert torch.equal(getattr(found, what), getattr(again, what)), what


def test_batches_of_molecules():
    """All pairs of charges; dipoles; other compositions in the same buffers."""
    potential = charged(priors=[ALL_PAIRS])
    potential.properties["dipole"] = make(properties=[DIPOLE]).properties["dipole"]
    batch = System.concatenate([random_atoms(n, seed=n, charge=(n % 3 - 1) * ION) for n in (40, 7, 1, 90)])
    evaluator = Evaluator(potential, graphs=True)
    for system in (batch, batch.replace(pos=1.02 * batch.pos), batch.replace(z=batch.z.flip(0)), batch):
        assert_same(potential, evaluator(system), system)
    assert evaluator.fused


@pytest.mark.parametrize("n", [6000, 20000])
def test_many_atoms(n, monkeypatch):
    """Sums over structures in parts of both sizes, atoms in spatial order; each copy of a cell as that cell alone.

    Positions are multiples of 2⁻¹² Å, of which float32 holds all sums and differences here exactly.
    """
    monkeypatch.setattr("torchmdnet2.engine.fused_step.SORT_FROM", 100)
    potential = charged(priors=[{**FIELD, "cutoff": 6.0}])
    system = random_atoms(600, seed=3, cell=True)
    system = system.replace(pos=(4096 * system.pos).round() / 4096, cell=(4096 * system.cell).round() / 4096)
    copies = n // 600
    shift = torch.arange(copies, device="cuda").repeat_interleave(600)[:, None] * system.cell[0, :1]
    cell = system.cell.clone()
    cell[0, 0] *= copies
    large = System(z=system.z.repeat(copies), pos=system.pos.repeat(copies, 1) + shift, cell=cell)
    evaluator = Evaluator(potential, graphs=True)
    found = evaluator(large)
    assert evaluator.fused and "spatial order" in evaluator.report()
    shift = 0.25  # of `make`, once for each structure
    assert_same(potential, replace(found, energy=(found.energy - shift) / copies + shift), system)


def test_no_waiting_in_a_bound_step():
    bound = Evaluator(charged(priors=[FIELD])).bind(random_atoms(100, seed=5, cell=True))
    with no_waiting():
        for _ in range(5):
            bound.replay()
    assert bound.check()


@pytest.mark.parametrize("graphs", ["auto", False])
def test_times_of_the_parts(graphs):
    """R16: Evaluator.report(system); the parts together take about what the step takes."""
    potential = charged(priors=[FIELD, {"name": "d2", "cutoff": 9.0}])
    evaluator, system = Evaluator(potential, graphs=graphs), random_atoms(700, seed=1, cell=True)
    before = evaluator(system)
    lines = evaluator.report(system).split("times of a step with forces")[1].splitlines()[1:]
    names = [line[2:].split("  ")[0] for line in lines]
    assert names[:3] == ["neighbor search to 5 Å", "neighbor search to 9 Å", "network"]
    assert names[3:] == ["Coulomb", "D2", "sums", "whole step"]
    times = [float(line.split(" ms")[0].split()[-1]) for line in lines]
    assert 0.5 * times[-1] < sum(times[:-1]) < 2 * times[-1] and 0.05 < times[-1] < 50
    assert torch.equal(evaluator(system).forces, before.forces)
