"""The compiled TensorNet2 of the CPU against the Potential in float64, in absolute numbers."""

from __future__ import annotations

import copy

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System

pytest.importorskip("numba", reason="the fast path on the CPU needs numba")

from torchmdnet2.engine import check
from torchmdnet2.engine.cpu_step import CpuModel
from torchmdnet2.models.tensornet2 import cpu
from torchmdnet2.neighbors import neighbor_list
from torchmdnet2.potential.prior import Prior

BOX = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
TINY = [[2.1, 0, 0], [0.4, 2.3, 0], [0, 0.5, 2.2]]  # several images of each atom, and of itself
FAR = torch.tensor([[0.0, 0, 0], [50, 0, 0], [0, 50, 0]], dtype=torch.float64)
DAMPED = {"name": "coulomb", "charges": "predicted", "damping": "exp"}
FIELD = {**DAMPED, "method": "reaction_field", "cutoff": 5.5}
COVALENT = {"name": "zbl", "envelope": "covalent"}


def make(layers: int = 1, q_dim: int = 4, priors: tuple = (), **changes: object) -> Potential:
    torch.manual_seed(3)
    sizes = {"hidden_channels": 32, "num_layers": layers, "num_rbf": 8, "q_dim": q_dim, "max_z": 10}
    model = {"name": "tensornet2", "cutoff": 4.0, **sizes, **changes}
    config = {"model": model, "priors": list(priors), "elements": [1, 6, 7, 8], "energy_scale": 1.5}
    potential = Potential.from_config(config).eval()
    with torch.no_grad():
        for p in potential.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return potential


def system(num_atoms: int, cell: list | None = None, charge: float = 0.0, seed: int = 0) -> System:
    generator = torch.Generator().manual_seed(num_atoms + seed)
    lattice = torch.eye(3).double() * 3.5 if cell is None else torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator) @ lattice
    z = torch.tensor([1, 6, 7, 8])[torch.randint(0, 4, (num_atoms,), generator=generator)]
    return System(z=z, pos=pos, cell=None if cell is None else lattice[None], charge=torch.tensor([charge]))


def assert_same(found, model: Potential, atoms: System) -> None:
    """Energies to 2e-6 eV, charges to 1e-6 of the largest total charge (or e), forces to 5e-6 of the largest, stress to
    1e-5 of the largest."""
    stress = found.stress is not None
    exact = copy.deepcopy(model).double()(atoms.to(dtype=torch.float64), stress=stress)
    torch.testing.assert_close(found.atom_energies, exact.atom_energies, rtol=1e-7, atol=2e-6)
    torch.testing.assert_close(found.energy, exact.energy, rtol=1e-6, atol=2e-6)
    total = max(1.0, float(atoms.charge.abs().max()))
    torch.testing.assert_close(found.charges, exact.charges, rtol=0, atol=1e-6 * total)
    largest = max(1.0, float(exact.forces.abs().max()))
    torch.testing.assert_close(found.forces.double(), exact.forces, rtol=0, atol=5e-6 * largest)
    if stress:
        torch.testing.assert_close(
            found.stress.double(), exact.stress, rtol=0, atol=1e-5 * float(exact.stress.abs().max())
        )


def evaluate(model: Potential, atoms: System):
    evaluator = Evaluator(model)
    found = evaluator(atoms, stress=bool((atoms.volume > 0).all()))
    assert "compiled TensorNet2 kernels" in evaluator.report()
    return found


CASES = {
    "ion": (make(), system(5, charge=1.0)),
    "L = 2": (make(2), system(9)),
    "L = 2, ion in a cell": (make(2), system(9, BOX, -1.0)),
    "SO(3), charges that are conserved as in TorchMD-Net": (
        make(2, group="SO(3)", exact_charge=False), system(7, BOX, -1.0),
    ),
    "one charge channel, one atom": (make(q_dim=1), system(1, charge=1.0)),
    "images of itself": (make(), system(2, TINY)),
    "no edges": (make(), system(3).replace(pos=FAR)),
    "one atom": (make(), system(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_structures(name: str) -> None:
    model, atoms = CASES[name]
    assert_same(evaluate(model, atoms), model, atoms)


PRIORS = {
    "reaction field, ZBL": ((FIELD, COVALENT), system(8, BOX, 1.0)),
    "all pairs": ((DAMPED,), system(8, charge=-1.0)),
    "Ewald": (({**DAMPED, "method": "ewald", "cutoff": 5.0},), system(6, BOX)),
    "PME and fixed charges": (
        ({**DAMPED, "method": "pme", "cutoff": 5.0, "accuracy": 1e-6},
         {"name": "coulomb", "charges": {"O": -0.3}, "method": "reaction_field", "cutoff": 5.0}),
        system(6, BOX),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", PRIORS)
def test_priors_that_read_the_charges(name: str, layers: int) -> None:
    """By kernels and by autograd of the prior alone; the network's gradient starts from (1, dE/dq)."""
    priors, atoms = PRIORS[name]
    model = make(layers, priors=priors)
    assert_same(evaluate(model, atoms), model, atoms)
    evaluator = Evaluator(model)
    by_autograd = "priors by autograd: Coulomb" in evaluator.report()
    assert by_autograd == (name == "Ewald")
    moved = atoms.replace(pos=atoms.pos * 1.02)
    bound = evaluator.bind(atoms)
    with torch.no_grad():
        bound.pos.copy_(moved.pos)
    bound.replay()
    assert bound.check()
    assert torch.equal(bound.forces, evaluator(moved).forces)
    assert evaluator(moved, forces=False).forces is None
    assert torch.equal(evaluator(moved, forces=False).energy, bound.energy)


class Hardness(Prior):
    """A user's prior: ½ Σ q², without kernels."""

    uses_charges = True

    def forward(self, system, neighbors, charges):
        return 0.5 * charges**2


def test_a_users_prior_of_the_charges() -> None:
    model, atoms = make(), system(7, charge=1.0)
    model.priors.append(Hardness())
    assert_same(evaluate(model, atoms), model, atoms)
    without = make()(atoms).forces
    assert float((evaluate(model, atoms).forces - without).abs().max()) > 1e-3


def test_batch_of_structures_whose_atoms_take_turns() -> None:
    """Charged structures, atoms alone; charges are equilibrated over each structure."""
    model = make(2, priors=(FIELD,))
    far = [[30.0, 0, 0], [0, 30, 0], [0, 0, 30]]
    parts = [system(5, BOX, 1.0), system(1, far), system(4, BOX, -2.0, 1), system(1, far, 1.0)]
    together = System.concatenate(parts)
    assert_same(evaluate(model, together), model, together)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    mixed = together.replace(z=together.z[order], pos=together.pos[order], batch=together.batch[order])
    assert_same(evaluate(model, mixed), model, mixed)


def test_same_result_every_time_on_any_number_of_threads() -> None:
    model, atoms = CpuModel(make(2, priors=(FIELD,))), system(21, BOX)
    first = model(atoms, stress=True)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            model(system(33))  # other contents in the buffers
            again = model(atoms, stress=True)
            for name in ("energy", "forces", "stress", "atom_energies", "charges"):
                assert torch.equal(getattr(first, name), getattr(again, name)), name
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not cpu.TILES, reason="this processor has no matrix unit: the other tests use the vector units")
def test_the_vector_units_where_there_is_a_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, atoms = make(2, priors=(FIELD,)), system(9, BOX)
    by_tiles = evaluate(model, atoms)
    monkeypatch.setattr(cpu, "TILES", False)
    by_vectors = evaluate(model, atoms)
    assert_same(by_vectors, model, atoms)
    assert not torch.equal(by_tiles.forces, by_vectors.forces)  # the last digits differ


def test_filters_that_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for those of one layer, or of none, results are the same."""
    model, atoms = make(2, priors=(FIELD,)), system(9, BOX)
    found = {}
    edges = neighbor_list(atoms, 4.0).num_edges
    rows = edges + edges // 8 + 12  # 9 atoms, as a multiple of 4
    for layers in (2, 1, 0):
        monkeypatch.setattr(cpu, "_MOST_KEPT", layers * 5 * 32 * rows)
        compiled = CpuModel(model)
        found[layers] = compiled(atoms).forces
        assert int(compiled.nets[0]._pool._current.kept.sum()) == layers
    for forces in found.values():
        torch.testing.assert_close(forces, found[2], rtol=0, atol=1e-6)


def test_the_first_use_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the charges, which energies need not depend on."""
    equilibrate = cpu.equilibrate
    monkeypatch.setattr(cpu, "equilibrate", lambda *given: equilibrate(*given) + 1e-3)
    with pytest.raises(RuntimeError, match="does not agree with the reference in float64: charge"):
        CpuModel(make())(system(5))


def test_large_structures_are_checked_on_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    model, atoms = make(priors=(FIELD,)), system(12, BOX, 1.0)
    assert_same(evaluate(model, atoms), model, atoms)


def test_atoms_without_edges_feel_the_charges_of_their_structure() -> None:
    """Unlike TensorNet's: their energies are those of atoms alone only where they are alone."""
    apart = System(z=torch.tensor([1, 8]), pos=torch.tensor([[0.0, 0, 0], [9.0, 0, 0]], dtype=torch.float64))
    model = make()
    with torch.no_grad():
        model.representation.charge_predict_0.q_mlp.layers[-1].weight *= 100  # charges whose effect is seen
    found = evaluate(model, apart)
    assert_same(found, model, apart)
    assert float(found.atom_energies.abs().min()) > 1e-5
    assert float(evaluate(model, system(1)).energy.abs()) == 0
