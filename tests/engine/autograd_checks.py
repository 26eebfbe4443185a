"""Run by test_autograd_step.py: TRITON_INTERPRET=1 must be set before Triton is imported. Nothing is captured there."""

from __future__ import annotations

import pytest
import torch
from variants import ELEMENTS, variant

from torchmdnet2 import Evaluator, System
from torchmdnet2.engine import step as steps
from torchmdnet2.potential.prior import Prior
from torchmdnet2.testing import example_systems

SYSTEMS = example_systems(ELEMENTS, 4.5)
PRIORS = [{"name": "zbl", "cutoff": 4.0}, {"name": "d2", "cutoff": 6.0}]
CELLS = System.concatenate([SYSTEMS["triclinic cell"], SYSTEMS["left-handed cell"]])


def assert_same(result, expected):
    for name in ("energy", "forces", "stress", "atom_energies", "charges"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    for name, theirs in expected.properties.items():
        torch.testing.assert_close(result.properties[name], theirs, rtol=1e-12, atol=1e-12, msg=name)


def evaluator(kind="graph_network", graphs=True, **config):
    return Evaluator(variant(kind, **config), graphs=graphs)


@pytest.mark.parametrize("kind", ["tensornet2", "tensornet2_ewald", "equivariant_transformer"])
def test_equals_the_potential(kind):
    properties = [{"name": "charges"}, {"name": "scalar_property", "property": "gap"}]
    one = evaluator(kind, properties=properties, priors=PRIORS)
    result = one(CELLS, stress=True)
    assert "autograd in CUDA graphs" in one.report() and "with stress" in one.report()
    assert_same(result, one.potential(CELLS, stress=True))
    moved = CELLS.replace(pos=CELLS.pos * 1.01, cell=CELLS.cell * 1.02, charge=torch.ones_like(CELLS.charge))
    kept = result.forces.clone()
    assert_same(one(moved, stress=True), one.potential(moved, stress=True))
    assert torch.equal(result.forces, kept)
    assert one(moved, forces=False).forces is None


def test_sizes_come_twice_before_they_are_built():
    one = evaluator(graphs="auto")
    expected = one.potential(CELLS)
    assert torch.equal(one(CELLS).forces, expected.forces) and not one._active.steps
    assert "second time" in one.report()
    assert_same(one(CELLS), expected)
    assert len(one._active.steps) == 1 and "last fell back" not in one.report()


def test_all_pairs_follow_the_composition():
    one = evaluator("tensornet2_all_pairs")
    ion = SYSTEMS["ion"]
    # away from the molecule, which gets atoms of it
    ion = ion.replace(pos=ion.pos + 20.0, spin=torch.zeros_like(ion.spin))
    batches = [System.concatenate([SYSTEMS["molecule"], ion])]
    other = batches[0].batch.clone()
    other[4:6] = 1
    batches.append(batches[0].replace(batch=other))
    for system in (*batches, batches[0]):
        assert_same(one(system), one.potential(system))
    assert len(one._active.steps) == 1


def test_room_grows_for_every_list(monkeypatch):
    monkeypatch.setattr(steps, "next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    one = evaluator(priors=PRIORS)
    molecule = SYSTEMS["molecule"]
    for scale in (20.0, 2.0, 1.0, 20.0):
        system = molecule.replace(pos=molecule.pos * scale)
        assert_same(one(system), one.potential(system))
    one.refresh()  # a bound step takes over what is kept for its size, and its room
    bound = one.bind(molecule.replace(pos=molecule.pos * 20))
    bound.pos.copy_(molecule.pos)
    bound.replay()
    assert not bound.check() and bound.forces.isnan().all() and bound.energy.isnan().all()
    bound.replay()
    assert bound.check()
    torch.testing.assert_close(bound.forces, one.potential(molecule).forces, rtol=1e-12, atol=1e-12)
    bound.pos[3] = float("nan")
    bound.replay()
    with pytest.raises(ValueError, match="atom 3"):
        bound.check()


@pytest.mark.parametrize("kind", ["tensornet2", "graph_network"])
def test_bound_steps_give_charges_and_properties(kind):
    shifts = {"name": "scalar_property", "property": "shift", "per": "atom"}
    one = evaluator(kind, properties=[shifts, {"name": "charges"}, {"name": "scalar_property", "property": "gap"}])
    bound = one.bind(CELLS, stress=True)
    bound.pos.mul_(1.01)
    bound.replay()
    expected = one.potential(CELLS.replace(pos=CELLS.pos * 1.01), stress=True)
    assert_same(bound.fetch(), expected)
    assert list(bound.properties()) == list(expected.properties)


def test_one_atom_in_each_structure():
    """Sizes of arrays do not say what is one of atoms and what one of structures."""
    shifts = {"name": "scalar_property", "property": "shift", "per": "atom"}
    one = evaluator(properties=[shifts, {"name": "scalar_property", "property": "gap"}])
    atoms = System.concatenate([SYSTEMS["ion"].replace(charge=torch.zeros(1).double())] * 3)
    alone = System(z=atoms.z[:1], pos=atoms.pos[:1])
    for system in (alone, System.concatenate([alone, alone.replace(pos=alone.pos + 3)])):
        assert_same(one(system), one.potential(system))
    assert "autograd in CUDA graphs" in one.report()


class Host(Prior):
    """Looks at a value on the host."""

    def forward(self, system, neighbors):
        return 1e-3 * system.pos.double().square().sum(1) * float(system.z.max())


def test_what_cannot_be_captured_falls_back():
    one = evaluator("tensornet2")
    one.potential.priors.append(Host())
    one.refresh()
    for _ in range(2):
        assert_same(one(CELLS), one.potential(CELLS))
    report = one.report()
    assert "reference path" in report and "no CUDA graph: '" in report and "copies tensor values" in report


def test_unsorted_batches_fall_back():
    one = evaluator()
    unsorted = CELLS.replace(batch=1 - CELLS.batch)
    assert_same(one(unsorted), one.potential(unsorted))
    assert "not sorted" in one.report()
    one(CELLS)
    assert "last fell back" not in one.report()
