"""Fused steps in Triton's interpreter, on the CPU. Run by test_step.py in a process of its own: TRITON_INTERPRET must
be set before triton is first imported. The interpreter is slow, so the structures are tiny; the same checks at full
size run on a GPU (tests/gpu/test_evaluator_gpu.py).
"""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine import check
from torchmdnet2.engine import step as steps
from torchmdnet2.engine.finish import RESULT_NOT_FINITE
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.engine.step import NOT_FINITE, OVERFLOW, GraphedStep, StaticInputs, next_capacity
from torchmdnet2.errors import StructureWarning, UnknownElement, UntrainedCharge
from torchmdnet2.models.tensornet import gpu as launch_shapes
from torchmdnet2.neighbors import neighbor_list

assert os.environ["TRITON_INTERPRET"] == "1"
# large blocks for few atoms too: fewer programs to interpret. Every shape is in tests/kernels/tensornet_gpu_checks.py
launch_shapes._BY_SIZE = ()
CUTOFF = 4.0


def make(seed=0, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        potential = Potential.from_config(
            {
                "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": CUTOFF,
                          "max_z": 10},
                "priors": [{"name": "atomref", "energies": {"1": -13.6, "6": -1030.0, "8": -2041.3}}],
                "energy_scale": 0.7,
                "energy_shift": 0.25,
                "elements": [1, 6, 8],
                **changes,
            }
        ).eval()  # fmt: skip
        with torch.no_grad():
            for p in potential.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return potential


POTENTIAL = make()


def atoms(n, seed=0, edge=3.0, dtype=torch.float64, **given):
    random = torch.Generator().manual_seed(seed)
    z = torch.tensor([1, 6, 8])[torch.randint(0, 3, (n,), generator=random)]
    return System(z=z, pos=edge * torch.rand(n, 3, generator=random, dtype=torch.float64).to(dtype), **given)


def triclinic(edge, dtype=torch.float64):
    return edge * torch.tensor([[1.0, 0, 0], [0.2, 1.1, 0], [-0.1, 0.3, 0.9]], dtype=dtype)


def reference(potential, system, **options):
    return copy.deepcopy(potential).double()(system.to(dtype=torch.float64), **options)


def assert_same(result, expected, forces=2e-5):
    torch.testing.assert_close(result.energy, expected.energy, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(result.atom_energies, expected.atom_energies, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.forces.double(), expected.forces, rtol=1e-4, atol=forces)
    if expected.stress is not None:
        torch.testing.assert_close(result.stress, expected.stress, rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def unchecked(request, monkeypatch):
    """What is compared here needs no check of its own, which takes the interpreter as long; three tests need it."""
    checked = (
        test_a_path_that_disagrees_is_refused, test_large_systems_are_checked_on_a_cluster,
        test_errors_on_the_first_use_are_those_of_the_potential,
    )  # fmt: skip
    if request.function not in checked:
        monkeypatch.setattr(FusedModel, "_check", lambda *given: None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_molecule(dtype):
    system = atoms(5, dtype=dtype, charge=1.0)
    result = Evaluator(POTENTIAL)(system)
    assert result.forces.dtype == dtype and result.energy.dtype == torch.float64
    assert result.stress is None and result.charges is None
    assert_same(result, reference(POTENTIAL, system))


def test_batch_of_cells_with_charges_and_stress():
    """A triclinic cell, one so thin that atoms see their own images, one without edges, a charged one."""
    system = System.concatenate(
        [
            atoms(4, 1, cell=triclinic(5.0)),
            atoms(1, 2, cell=triclinic(2.6)),
            atoms(1, 3, cell=triclinic(30.0)),
            atoms(3, 4, cell=triclinic(9.0), pbc=torch.tensor([True, False, True]), charge=-2.0),
        ]
    )
    result = Evaluator(POTENTIAL)(system, stress=True)
    expected = reference(POTENTIAL, system, stress=True)
    assert_same(result, expected)
    assert result.atom_energies[5] == expected.atom_energies[5]  # an atom alone has exactly its reference energy
    assert torch.equal(result.stress, result.stress.transpose(1, 2))


def test_a_molecule_and_a_cell_in_one_step():
    """A step searches for molecules until the first periodic structure, for all from then on."""
    molecule = atoms(4, 1)
    cell = atoms(4, 1, cell=triclinic(3.5))  # the same atoms: only their images tell it from the molecule
    model = FusedModel(POTENTIAL, "native")
    step = model.step(4, 1, torch.float64, False)
    graphed, source = GraphedStep(step), StaticInputs(model, step)
    for system, periodic in ((molecule, False), (cell, True), (molecule, True)):
        version = step.version
        source.load(system)
        assert step.periodic == step.search.periodic == periodic
        assert (step.version > version) == (system is cell)  # a captured graph holds the search of before
        graphed.make_room()
        graphed.run()
        assert graphed.status()[0] == 0
        assert_same(graphed.results(), reference(POTENTIAL, system))


@pytest.mark.parametrize("charge", [0.0, 1.0])
def test_one_atom(charge):
    system = atoms(1, charge=charge)
    result, expected = Evaluator(POTENTIAL)(system), reference(POTENTIAL, system)
    assert_same(result, expected)
    if charge == 0:
        assert torch.equal(result.energy, expected.energy)
    assert float(result.forces.abs().max()) == 0


def test_without_subtraction():
    potential = make(subtract_isolated=False)
    system = atoms(3, edge=20.0)
    assert_same(Evaluator(potential)(system), reference(potential, system))


def test_spatial_order_and_parts_change_nothing_but_rounding():
    system = System.concatenate([atoms(6, 1, 6.0, cell=triclinic(7.0)), atoms(4, 2, cell=triclinic(8.0))])
    # far outside of the cell, and with negative coordinates
    shifts = torch.tensor([[-3.0, 2, 0]], dtype=torch.float64) @ system.cell[0]
    system.pos[2] += shifts[0]
    model = FusedModel(POTENTIAL, "native")
    step = model.step(10, 2, torch.float64, True, sort=True, parts=3)
    graphed, source = GraphedStep(step), StaticInputs(model, step)
    source.load(system)
    graphed.make_room()
    graphed.run()
    assert graphed.status()[0] == 0
    assert_same(step.out, reference(POTENTIAL, system, stress=True))
    order = step.order.order
    assert sorted(order.tolist()) == list(range(10)) and not torch.equal(order, torch.arange(10))
    assert torch.equal(system.batch[order], system.batch)  # structures stay together
    again = step.out.packed.clone()
    graphed.run()
    assert torch.equal(again, step.out.packed)


def test_overflow_is_flagged_poisons_and_is_redone():
    far, near = atoms(6, 5, 40.0), atoms(6, 5, 3.0)
    model = FusedModel(POTENTIAL, "native")
    step = model.step(6, 1, torch.float64, False)
    graphed, source = GraphedStep(step), StaticInputs(model, step)
    source.load(far)
    step.set_capacity(16)
    source.load(near)
    graphed.run()
    flag, needed = graphed.status()
    assert flag == OVERFLOW and needed == neighbor_list(near, CUTOFF).num_edges == 30
    assert step.out.forces.isnan().all() and step.out.energy.isnan().all() and step.out.atom_energies.isnan().all()
    graphed.run()
    assert graphed.status() == (OVERFLOW, 30)  # sticky
    assert graphed.recover(flag) and step.capacity >= 30
    graphed.run()
    assert graphed.status()[0] == 0
    assert_same(step.out, reference(POTENTIAL, near))


@pytest.mark.filterwarnings("error::torchmdnet2.errors.StructureWarning")
def test_another_structure_in_nm_of_the_same_composition_gets_a_warning():
    system = System(z=torch.tensor([8, 1, 1]), pos=torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]))
    small = system.replace(z=system.z.clone(), pos=system.pos / 10)
    model = FusedModel(POTENTIAL, "native")
    source = StaticInputs(model, model.step(3, 1, torch.float32, False))
    source.load(system)
    source.load(system.replace(z=system.z.clone()))
    with pytest.warns(StructureWarning, match="multiply positions and cell by 10"):
        source.load(small)
    source.load(small.replace(pos=small.pos + 0.001))  # the same structure at other positions
    source.load(system.replace(z=system.z.clone(), pos=system.pos / 10), check=False)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_force_that_is_not_finite_is_flagged(bad):
    """Though the energy is: gradients in half precision end at 65,504."""
    model = FusedModel(POTENTIAL, "native")
    step = model.step(6, 1, torch.float64, False)
    graphed = GraphedStep(step)
    StaticInputs(model, step).load(atoms(6, 5, 3.0))
    graphed.make_room()
    graphed.run()
    assert graphed.status()[0] == 0 and step.out.energy.isfinite().all()
    step._buffers.forces[4, 1] = bad
    step._finish()
    assert graphed.status()[0] == RESULT_NOT_FINITE and step.out.energy.isnan().all()


@pytest.mark.parametrize(("precision", "method"), [("native", "fused tensornet"), ("float64", "CUDA graphs")])
def test_two_atoms_at_the_same_place(precision, method):
    """R12: after good positions, in a batch, through a face of the cell: NaN, then an error that names both."""
    evaluator = Evaluator(POTENTIAL, graphs=True, precision=precision)
    good = System.concatenate([atoms(2, 1, cell=triclinic(5.0)), atoms(3, 2, cell=triclinic(5.0))])
    wrong = good.replace(pos=good.pos.clone())
    wrong.pos[4] = wrong.pos[2] + wrong.cell[1, 0] + 5e-4
    expected = evaluator(good).energy
    assert method.lower() in evaluator.report().lower()
    step = evaluator.bind(good)
    words = "atom 2 and atom 4 are at the same place"
    with pytest.raises(ValueError, match=words):
        evaluator(wrong)
    step.pos.copy_(wrong.pos)
    step.replay()
    assert step.energy.isnan().all() and step.forces.isnan().all()
    with pytest.raises(ValueError, match=words):
        step.check()
    step.replay()
    step.pos.copy_(good.pos)
    with pytest.raises(ValueError, match="two atoms are at the same place"):
        step.check()  # of a step whose positions are gone
    step.replay()
    assert torch.equal(step.fetch().energy, expected) and torch.equal(evaluator(good).energy, expected)


@pytest.fixture
def tight(monkeypatch):
    """Capacities without any room above what is needed."""
    monkeypatch.setattr(steps, "next_capacity", lambda edges: max(16, -(-edges // 16) * 16))


def test_bound_step_repeats_after_an_overflow(tight):
    system = atoms(5, 6, 60.0)
    bound = Evaluator(POTENTIAL).bind(system)
    forces = bound.forces
    bound.replay()
    assert bound.check()
    small = bound.capacity
    bound.pos.copy_(system.pos / 25)
    bound.replay()
    assert bound.fetch() is None and bound.capacity > small
    bound.replay()
    assert bound.check() and bound.forces is forces
    assert_same(bound, reference(POTENTIAL, system.replace(pos=system.pos / 25)))
    fetched = bound.fetch()
    for name in ("energy", "forces", "atom_energies"):
        assert torch.equal(getattr(fetched, name), getattr(bound, name))
    bound.pos[3, 1] = float("nan")
    bound.replay()
    with pytest.raises(ValueError, match="atom 3"):
        bound.fetch()
    assert bound.forces.isnan().any()


def test_bound_step_holds_another_system():
    bound = Evaluator(POTENTIAL).bind(atoms(5, 6))
    forces = bound.forces
    other = atoms(5, 7, edge=4.0, charge=0)
    bound.load(other)
    bound.replay()
    assert bound.check() and bound.forces is forces
    assert_same(bound, reference(POTENTIAL, other))
    unknown = other.replace(z=other.z.clone().fill_(7))
    with pytest.raises(UnknownElement):
        bound.load(unknown)
    bound.load(other)
    bound.replay()
    assert_same(bound, reference(POTENTIAL, other))
    bad = other.replace(pos=other.pos.clone().index_fill_(0, torch.tensor([3]), float("nan")))
    bound.load(bad)
    bound.replay()
    with pytest.raises(ValueError, match="atom 3"):
        bound.check()


def test_shapes_follow_the_elements(monkeypatch):
    """Of 64 channels, up to three elements are summed separately; a step that holds others has other buffers, and is
    captured again."""
    monkeypatch.setattr(launch_shapes, "_BY_ELEMENTS_FROM", 1)
    model = {"name": "tensornet", "hidden_channels": 64, "num_layers": 1, "num_rbf": 8, "cutoff": CUTOFF, "max_z": 10}
    potential = make(model=model, elements=[1, 6, 7, 8], priors=[])
    pos = torch.tensor([[0.0, 0, 0], [1.1, 0, 0.2], [0, 1.4, 0], [0.3, 0, 1.5]], dtype=torch.float64)
    system = System(z=torch.tensor([8, 1, 1, 1]), pos=pos)
    bound = Evaluator(potential).bind(system)
    step = bound._graphed.step
    cases = [8, 1, 1, 1], [6, 8, 6, 6], [1, 6, 8, 1], [1, 6, 7, 8], [1, 1, 1, 1]
    for z, elements in zip(cases, ((1, 8), (6, 8), (1, 6, 8), (), (1,)), strict=True):
        version = step.version
        other = system.replace(z=torch.tensor(z))
        bound.load(other)
        bound.replay()
        assert step._shapes.elements == elements and (step.version > version) == (elements != (1, 8))
        assert_same(bound, reference(potential, other))


def test_evaluator_grows_when_atoms_come_together(tight):
    evaluator = Evaluator(POTENTIAL)
    system = atoms(5, 6, 60.0)
    evaluator(system)
    close = system.replace(pos=system.pos / 25)
    assert_same(evaluator(close), reference(POTENTIAL, close))
    assert_same(evaluator(system), reference(POTENTIAL, system))


def test_not_finite_names_the_atom_and_the_next_call_is_right():
    evaluator, system = Evaluator(POTENTIAL), atoms(4)
    first = evaluator(system)
    bad = system.pos.clone()
    bad[2, 0] = float("inf")
    with pytest.raises(ValueError, match="atom 2"):
        evaluator(system.replace(pos=bad))
    assert torch.equal(evaluator(system).forces, first.forces)


def test_nothing_is_stale():
    """Changed species, charge, cell, numbers of atoms, types, in-place changes: always the potential's numbers."""
    evaluator = Evaluator(POTENTIAL)
    system = atoms(3, cell=triclinic(6.0))
    kept = evaluator(system, stress=True)
    copies = [kept.energy.clone(), kept.forces.clone(), kept.stress.clone()]
    z = system.z.clone()
    variants = [
        system.replace(z=z.flip(0)),
        system.replace(charge=torch.tensor([2.0], dtype=torch.float64)),
        system.replace(cell=system.cell * 0.8),
        system.replace(pbc=torch.tensor([[False, True, False]])),
        atoms(2, 8),
        system.to(dtype=torch.float32),
        system,
    ]
    for variant in variants:
        assert_same(evaluator(variant, stress=False), reference(POTENTIAL, variant))
    system.z[:] = 8
    system.cell *= 1.2
    assert_same(evaluator(system, stress=True), reference(POTENTIAL, system, stress=True))
    assert [torch.equal(a, b) for a, b in zip(copies, (kept.energy, kept.forces, kept.stress), strict=True)] == [
        True
    ] * 3


def test_errors_are_those_of_the_potential():
    evaluator, system = Evaluator(POTENTIAL), atoms(3)
    evaluator(system)
    with pytest.raises(UnknownElement, match="atom 1 is N"):
        evaluator(system.replace(z=torch.tensor([1, 7, 8])))
    with pytest.raises(ValueError, match="spin multiplicity 3"):
        evaluator(system.replace(spin=torch.tensor([3])))
    with pytest.raises(ValueError, match="structure 0 has no cell with a volume"):
        evaluator(system, stress=True)
    with pytest.raises(ValueError, match="zero"):
        evaluator(system.replace(pbc=torch.tensor([[True, False, False]])))


def test_errors_on_the_first_use_are_those_of_the_potential():
    """The first structure of a path is compared with the potential: it is refused in the words of later ones."""
    molecule, crystal = atoms(3), atoms(2, cell=triclinic(4.0))
    for good, words, stress, change in (
        (molecule, "atom 0 and atom 2 are at the same place", False, {"pos": molecule.pos[[0, 1, 0]]}),
        (crystal, "atom 0 and atom 1 are at the same place", True, {"pos": crystal.pos[0] + 1e-4 * torch.eye(2, 3)}),
        (molecule, "atom 2: its position is not finite", False, {"pos": molecule.pos / torch.tensor([[1], [1], [0]])}),
        (molecule, "structure 0 has no cell with a volume", True, {}),
    ):
        with pytest.raises(ValueError, match=words):
            Evaluator(POTENTIAL)(good.replace(**change), stress=stress)


def test_paths_that_are_not_covered_say_so():
    evaluator = Evaluator(POTENTIAL)
    batch = System.concatenate([atoms(2, 1), atoms(2, 2)])
    mixed = System(z=batch.z, pos=batch.pos, batch=torch.tensor([0, 1, 0, 1]), charge=torch.zeros(2))
    assert_same(evaluator(mixed), reference(POTENTIAL, mixed))
    assert "not sorted" in evaluator.report()
    empty = System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3))
    assert evaluator(empty).forces.shape == (0, 3)
    assert "no atoms" in evaluator.report()
    for change, reason in [
        ({"head": {"name": "scalar", "num_hidden_layers": 1}}, "hidden layer"),
        ({"head": {"name": "scalar", "activation": "tanh"}}, "hidden layer"),
        ({"head": {"name": "scalar", "reduce": "mean"}}, "mean"),
        ({"priors": [{"name": "coulomb", "charges": {"H": 0.1}, "method": "ewald"}]}, "by autograd: Coulomb"),
        ({"atom_filter": 1}, "atom filter"),
        ({"model": {"name": "tensornet", "hidden_channels": 12}, "elements": [1]}, "power of two"),
    ]:
        assert reason in Evaluator(make(**change)).report()
    assert "torch.float64" in Evaluator(make().double()).report()


def test_changed_weights_are_noticed():
    potential, system = make(3), atoms(3)
    evaluator = Evaluator(potential)
    before = evaluator(system)
    with torch.no_grad():
        potential.head.output_network.layers[0].weight.mul_(1.5)
    after = evaluator(system)
    assert not torch.equal(before.energy, after.energy)
    assert_same(after, reference(potential, system))


def test_untrained_charge_is_refused():
    """Of a composition that comes after a good one; the good one goes on."""
    potential = make(total_charges=[0])
    evaluator, system = Evaluator(potential), atoms(3)
    before = evaluator(system)
    for call in (evaluator, evaluator.bind):
        with pytest.raises(UntrainedCharge, match="structure 0 has the total charge 1"):
            call(system.replace(charge=torch.ones_like(system.charge)))
    assert torch.equal(evaluator(system).energy, before.energy)


def test_a_path_that_disagrees_is_refused(monkeypatch):
    potential = make(4)
    isolated = FusedModel.__init__

    def wrong(self, *given):
        isolated(self, *given)
        self.isolated += 1e-3

    monkeypatch.setattr(FusedModel, "__init__", wrong)
    with pytest.raises(RuntimeError, match="does not agree with the reference"):
        Evaluator(potential)(atoms(3))


def test_large_systems_are_checked_on_a_cluster(monkeypatch):
    seen = []
    compare = FusedModel._compare
    monkeypatch.setattr(check, "CHECKED_ATOMS", 6)
    monkeypatch.setattr(
        FusedModel, "_compare", lambda self, step, *rest: (seen.append(step.num_atoms), compare(self, step, *rest))
    )
    checked = FusedModel._check

    def freed(self, step, system):
        assert step._buffers is None  # both would need memory at the same time
        checked(self, step, system)

    monkeypatch.setattr(FusedModel, "_check", freed)
    system = atoms(9, cell=triclinic(6.0), charge=1.0)
    assert_same(Evaluator(POTENTIAL)(system, stress=True), reference(POTENTIAL, system, stress=True))
    assert seen == [3]


def test_infinite_cell_is_refused():
    system = atoms(3, cell=triclinic(6.0))
    evaluator = Evaluator(POTENTIAL)
    evaluator(system)
    with pytest.raises(ValueError, match="cell is not finite"):
        evaluator(system.replace(cell=system.cell / 0))
    model = FusedModel(POTENTIAL, "native")
    step = model.step(3, 1, torch.float64, False)
    StaticInputs(model, step).load(system)
    step.cell.fill_(float("nan"))
    assert step.make_room() & NOT_FINITE


def test_capacities():
    rungs = sorted({next_capacity(n) for n in range(0, 200_000, 7)})
    assert all(r % 16 == 0 for r in rungs) and all(b <= 1.25 * a for a, b in itertools.pairwise(rungs))
    assert all(next_capacity(n) >= 1.03 * n + 60 for n in range(0, 200_000, 50))
    assert next_capacity(0) >= 16
