"""Priors on kernels of their own beside TensorNet's: R15 (the Potential in float64), R8, R16, R19. Twins without a GPU:
tests/kernels/test_pair_priors_gpu.py and test_prior_steps.py."""

from __future__ import annotations

import copy

import pytest
import torch
from test_evaluator_gpu import make, no_waiting, random_atoms

from torchmdnet2 import Evaluator, System
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.potential.prior import Prior

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

REFERENCES = {"name": "atomref", "energies": {"1": -13.6, "6": -1030.0, "7": -1486.0, "8": -2041.3}}
ZBL = {"name": "zbl", "cutoff": 4.0}
COVALENT = {"name": "zbl", "envelope": "covalent", "screening": "refitted"}
D2 = {"name": "d2", "cutoff": 9.0}
D3 = {"name": "d3", "elements": [1, 6, 7, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 9.0}
CHARGES = {"name": "coulomb", "charges": {"H": 0.4, "C": -0.15, "N": -0.5, "O": -0.8}}
FIELD = {**CHARGES, "method": "reaction_field", "cutoff": 9.0}
DAMPED = {**FIELD, "damping": "exp", "damping_upper": 4.6, "cutoff": 7.0, "dielectric": 78.0}
PAIRS = {
    "name": "pair_potential",
    "parameters": {
        "C-H": [0.5, 0, 2, 0.3, 0, 1, 0, 2.5],
        "H-O": [0, 0, 1, 9, 0, 0, 3, 0],
        "C-C": [3, 0.7, 0, 6, 1.2, 0, 0, 0],
        "N-N": [0, 0, 0, 8, 0, 0, 0, 0],
    },
}
COMBINATIONS = {
    "zbl": [REFERENCES, ZBL],
    "pair potential": [REFERENCES, PAIRS],
    "d2": [D2],
    "d3": [D3],
    "reaction field": [FIELD],
    "shifted force": [{**CHARGES, "method": "dsf", "cutoff": 9.0}],
    "zbl, d3, reaction field": [REFERENCES, COVALENT, D3, DAMPED],
    "d2, three lists": [D2, {**D3, "cutoff": 16.0}],
}


def model(priors):
    potential = make(priors=priors)
    return potential, copy.deepcopy(potential).double()


def assert_same(result, expected):
    """1e-6 of the absolute energy, 1e-4 eV/Å; the priors have forces of up to thousands of eV/Å at 0.9 Å."""
    torch.testing.assert_close(result.energy, expected.energy, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(result.atom_energies, expected.atom_energies, rtol=1e-6, atol=3e-5)
    largest = float(expected.forces.abs().max())
    assert float((result.forces.double() - expected.forces).abs().max()) <= max(1e-4, 3e-6 * largest)
    if expected.stress is not None:
        bound = 1e-5 * max(float(expected.stress.abs().max()), 1e-2)
        assert float((result.stress.double() - expected.stress).abs().max()) <= bound


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize(("n", "cell"), [(1, False), (22, False), (166, True), (700, True), (1500, False)])
def test_energies_forces_stress(name, n, cell):
    potential, exact = model(COMBINATIONS[name])
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(n, seed=n, cell=cell)
    found = evaluator(system, stress=cell)
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
    assert_same(found, exact(system.to(dtype=torch.float64), stress=cell))
    again = evaluator(system, stress=cell)
    assert torch.equal(found.forces, again.forces) and torch.equal(found.atom_energies, again.atom_energies)


@pytest.mark.parametrize("sort", [False, True])
def test_many_atoms(sort, monkeypatch):
    """One warp per row, and atoms in spatial order; charges by atom go with their atoms."""
    n = 6000
    monkeypatch.setattr("torchmdnet2.engine.fused_step.SORT_FROM", 100 if sort else 10**9)
    charges = torch.linspace(-0.5, 0.5, n).tolist()
    priors = [ZBL, D3, {"name": "coulomb", "charges": charges, "method": "reaction_field", "cutoff": 6.0}]
    potential, _ = model(priors)
    system = random_atoms(n, seed=3, cell=True)
    shuffled = system.replace(pos=system.pos + 3 * system.cell[0, 0, 0] * torch.tensor([1.0, -1, 0], device="cuda"))
    evaluator = Evaluator(potential, graphs=True)
    for one in (system, shuffled):
        found, expected = evaluator(one, stress=True), potential(one, stress=True)
        torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=1e-3)
        largest = float(expected.forces.abs().max())
        assert float((found.forces - expected.forces).abs().max()) <= max(2e-4, 1e-5 * largest)
        torch.testing.assert_close(found.stress, expected.stress, rtol=1e-3, atol=1e-5)
    assert ("spatial order" in evaluator.report()) == sort


def test_batches_and_thin_cells():
    potential, exact = model(COMBINATIONS["zbl, d3, reaction field"])
    thin = random_atoms(4, seed=1, cell=True)  # narrower than every cutoff
    batch = System.concatenate([random_atoms(40, seed=2, cell=True), thin, random_atoms(9, seed=3, cell=True)])
    evaluator = Evaluator(potential, graphs=True)
    for system in (batch, batch.replace(cell=batch.cell * 1.02), batch.replace(z=batch.z.flip(0)), batch):
        assert_same(evaluator(system, stress=True), exact(system.to(dtype=torch.float64), stress=True))


def test_all_pairs_of_molecules():
    potential, exact = model([CHARGES, D2])
    batch = System.concatenate([random_atoms(n, seed=n) for n in (22, 1, 300)])
    assert_same(Evaluator(potential, graphs=True)(batch), exact(batch.to(dtype=torch.float64)))
    cell = random_atoms(9, cell=True)  # by lattice sums there
    assert_same(Evaluator(potential)(cell), exact(cell.to(dtype=torch.float64)))


def test_whether_structures_are_periodic_is_asked_once():
    evaluator, system = Evaluator(model([CHARGES])[0]), random_atoms(22)
    evaluator(system)
    with no_waiting():
        assert evaluator._cells_of(system.at(system.pos + 0.01)) is None


def test_overflow_of_each_list_under_replay(monkeypatch):
    monkeypatch.setattr("torchmdnet2.engine.step.next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    potential, exact = model([D2, FIELD])
    system = random_atoms(60, seed=4)
    bound = Evaluator(potential, graphs=True).bind(system.replace(pos=system.pos * 6))
    for scale in (4.0, 2.0, 1.0):
        moved = system.replace(pos=system.pos * scale)
        bound.pos.copy_(moved.pos)
        bound.replay()
        while not bound.check():
            assert bound.forces.isnan().all()
            bound.replay()
        assert_same(bound, exact(moved.to(dtype=torch.float64)))


class Morse(Prior):
    """A user's prior, without kernels, whose energy does not vanish beyond its cutoff."""

    cutoff = 4.0

    def forward(self, system, neighbors):
        d = neighbors.distances(system).double()
        pair = 0.2 * (1 - torch.exp(-1.5 * (d - 1.2))) ** 2 * (1 - (d / self.cutoff) ** 2)
        return pair.new_zeros(system.num_atoms).index_add(0, neighbors.edge_index[0], pair / 2)


class Host(Morse):
    """Looks at a value on the host, which no graph can hold."""

    def forward(self, system, neighbors):
        return super().forward(system, neighbors) * float(system.z.max())


@pytest.mark.parametrize("n", [22, 700])
def test_a_prior_by_autograd_of_itself_alone(n):
    potential, _ = model([ZBL, D2])
    potential.priors.append(Morse())
    exact = copy.deepcopy(potential).double()
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(n, seed=n, cell=True)
    for one in (system, system.replace(pos=system.pos * 1.01, cell=system.cell * 1.01), system):
        assert_same(evaluator(one, stress=True), exact(one.to(dtype=torch.float64), stress=True))
    assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()


@pytest.mark.parametrize("n", [22, 166, 700])
@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_ewald_beside_kernels(method, n):
    """R8, R15, R16: the network stays on its kernels, all in one graph; other cells; cells without room."""
    sums = {**CHARGES, "method": method, "cutoff": 6.0, "accuracy": 1e-6}
    potential, exact = model([ZBL, sums])
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(n, seed=n, cell=True)
    for scale in (1.0, 1.02, 1.1, 1.12, 0.98):
        one = system.replace(pos=scale * system.pos, cell=scale * system.cell)
        found, expected = evaluator(one, stress=True), exact(one.to(dtype=torch.float64), stress=True)
        assert evaluator.fused and "replayed as one CUDA graph" in evaluator.report()
        if method == "ewald" or scale == 1.0:
            assert_same(found, expected)
        else:  # another mesh, as accurate as the prior's own
            torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=1e-5 * n)
            largest = float(expected.forces.abs().max())
            assert float((found.forces.double() - expected.forces).abs().max()) <= max(2e-4, 3e-6 * largest)
    bound = evaluator.bind(system)
    bound.cell.mul_(1.3)
    bound.pos.mul_(1.3)
    bound.replay()
    assert bound.forces.isnan().all() and not bound.check()
    bound.replay()
    assert bound.check() and bound.forces.isfinite().all()


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_ewald_of_predicted_charges(method):
    """R15: dE/dq by autograd of the sum alone, into the backward pass of the kernels; no waiting in a bound step."""
    sums = {"name": "coulomb", "charges": "predicted", "method": method, "cutoff": 6.0, "accuracy": 1e-6}
    potential = make(priors=[sums], properties=[{"name": "charges"}])
    system = random_atoms(166, seed=3, cell=True, charge=torch.tensor([1.0]))
    evaluator = Evaluator(potential, graphs=True)
    expected = copy.deepcopy(potential).double()(system.to(dtype=torch.float64), stress=True)
    found = evaluator(system, stress=True)
    assert evaluator.fused
    assert_same(found, expected)
    torch.testing.assert_close(found.charges, expected.charges, rtol=0, atol=2e-6)
    bound = evaluator.bind(system)
    with no_waiting():
        for _ in range(5):
            bound.replay()
    assert bound.check()


@pytest.mark.parametrize("n", [1029, 5000])
def test_particle_mesh_on_kernels(n):
    """R15: the prior alone in float64 is the reference; the same bits twice; the network's error is not part of it."""
    sums = {**CHARGES, "method": "pme", "cutoff": 9.0, "accuracy": 1e-6}
    with_sum, exact = model([sums])
    without, _ = model([])
    system = random_atoms(n, seed=n, cell=True)
    found, plain = (Evaluator(p, graphs=True)(system, stress=True) for p in (with_sum, without))
    double = system.to(dtype=torch.float64)
    leaves = double.pos.clone().requires_grad_()
    prior = exact.priors[-1]
    moved = double.replace(pos=leaves)
    energies = prior(moved, pair_list(moved, 9.0))
    forces = -torch.autograd.grad(energies.sum(), leaves)[0]
    eager = with_sum(system).forces.double() - without(system).forces.double() - forces
    error = found.forces.double() - plain.forces.double() - forces
    print(f"{n} atoms: force error {float(error.abs().max()):.2e}, eager {float(eager.abs().max()):.2e} eV/Å")
    assert float(error.abs().max()) <= max(2 * float(eager.abs().max()), 2e-5)
    difference = found.atom_energies - plain.atom_energies - energies.detach()
    assert float(difference.abs().max()) <= 2e-5
    evaluator = Evaluator(with_sum, graphs=True)
    first, second = evaluator(system, stress=True), evaluator(system, stress=True)
    assert "on kernels: Coulomb" in evaluator.report()
    for name in ("forces", "atom_energies", "stress"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def test_a_prior_that_no_graph_can_hold():
    potential, _ = model([ZBL])
    potential.priors.append(Host())
    evaluator, system = Evaluator(potential, graphs=True), random_atoms(22, seed=1)
    torch.testing.assert_close(evaluator(system).forces, potential(system).forces, rtol=1e-4, atol=1e-4)
    assert not evaluator.fused


def test_no_waiting_in_a_bound_step():
    potential, _ = model(COMBINATIONS["zbl, d3, reaction field"])
    bound = Evaluator(potential).bind(random_atoms(100, seed=5))
    with no_waiting():
        for _ in range(5):
            bound.replay()
    assert bound.check()
