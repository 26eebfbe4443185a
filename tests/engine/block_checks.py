"""Steps in blocks in Triton's interpreter, on the CPU, against whole steps and the Potential in float64. Run by
test_blocks.py in a process of its own, as step_checks.py; tests/gpu/test_blocks_gpu.py has larger structures.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine import blocks
from torchmdnet2.engine.fused_step import FusedModel
from torchmdnet2.md.integrators import AtomConstants, HostEngine, VelocityVerlet
from torchmdnet2.md.kernels_gpu import GraphEngine
from torchmdnet2.models.tensornet import gpu as launch_shapes

assert os.environ["TRITON_INTERPRET"] == "1"
CUTOFF = 2.0
SKEWED = [[7.0, 0, 0], [1.0, 4.0, 0], [0.5, -1.0, 4.0]]
LONG = [[24.0, 0, 0], [1.0, 4.0, 0], [0.5, -1.0, 4.0]]
THIN = [[2.5, 0, 0], [0.4, 2.2, 0], [0, 0.3, 9.0]]  # the surroundings of a block hold images of its atoms
# many rows a program: fewer programs to interpret. Every shape is in tests/kernels/tensornet_gpu_checks.py
WALK = launch_shapes.MessageTile(64, 1, 32, 4)
MANY = {k: replace(v, rows=64) for k, v in vars(launch_shapes.Tiles()).items() if isinstance(v, launch_shapes.Block)}
WALKS = ("embedding", "interaction", "message_backward", "embedding_backward")
launch_shapes._BY_SIZE = ((10**9, replace(launch_shapes.Tiles(), **MANY, **dict.fromkeys(WALKS, WALK))),)


def make(layers=2, **changes):
    model = {"name": "tensornet", "hidden_channels": 32, "num_layers": layers, "num_rbf": 8, "cutoff": CUTOFF}
    model |= {"max_z": 10, **changes.pop("model", {})}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = {"model": model, "elements": [1, 6, 8], "energy_shift": 0.25, **changes}
        potential = Potential.from_config(config).eval()
        with torch.no_grad():
            for p in potential.parameters():
                p.add_(0.05 * torch.randn_like(p))
    return potential


POTENTIAL = make()


def atoms(n, cell=None, seed=1, edges=(6.0, 3.0, 3.0), **given):
    """Atoms at random places, also outside of their cell."""
    random = torch.Generator().manual_seed(seed)
    lattice = torch.diag(torch.tensor(edges)).double() if cell is None else torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(n, 3, generator=random, dtype=torch.float64)
    pos = pos if cell is None else 3 * pos - 1
    z = torch.tensor([1, 6, 8])[torch.randint(0, 3, (n,), generator=random)]
    return System(z=z, pos=pos @ lattice, cell=None if cell is None else lattice, **given)


def assert_right(found, potential, system):
    """As the Potential in float64: eV, eV/Å, eV/Å³."""
    expected = copy.deepcopy(potential).double()(system.to(dtype=torch.float64), stress=found.stress is not None)
    assert_close(found, expected)
    assert float(expected.forces.abs().max()) > 0.01


def assert_close(found, expected):
    assert float((found.energy - expected.energy).abs()) < 1e-5
    assert float((found.atom_energies - expected.atom_energies).abs().max()) < 2e-6
    assert float((found.forces.double() - expected.forces.double()).abs().max()) < 5e-6
    if found.stress is not None:
        assert float((found.stress - expected.stress).abs().max()) < 1e-7


def same_bits(first, second):
    fields = ("energy", "forces", "atom_energies", "stress")
    pairs = [(getattr(first, name), getattr(second, name)) for name in fields]
    return all(torch.equal(a, b) for a, b in pairs if a is not None)


def blocks_of(evaluator):
    """The number of blocks in the report of an evaluator of one size."""
    return int(evaluator.report().split(" blocks of up to ")[0].rsplit(" ", 1)[1])


@pytest.fixture(autouse=True)
def unchecked(request, monkeypatch):
    """What is compared here needs no check, which takes as long."""
    if request.function is not test_the_first_use_is_checked:
        monkeypatch.setattr(FusedModel, "_check", lambda *given: None)


def test_a_skewed_cell():
    potential, system = make(layers=1), atoms(8, SKEWED)
    evaluator = Evaluator(potential, block_atoms=150)
    found = evaluator(system, stress=True)
    assert blocks_of(evaluator) > 1
    assert_right(found, potential, system)
    assert_close(found, Evaluator(potential)(system, stress=True))
    evaluator(system.replace(pos=1.1 * system.pos, cell=1.1 * system.cell), stress=True)
    assert same_bits(evaluator(system, stress=True), found)  # whatever came before
    turned = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    other = evaluator(System(z=system.z[turned], pos=system.pos[turned], cell=system.cell), stress=True)
    found.forces, found.atom_energies = found.forces[turned], found.atom_energies[turned]
    assert_close(other, found)


def test_images_of_the_atoms_of_a_block_around_it_and_priors():
    """ZBL ends before the network, the reaction field after it: the surroundings follow the longer cutoff."""
    charges = {"name": "coulomb", "charges": {"H": 0.4, "C": 0.1, "O": -0.8}, "method": "reaction_field"}
    energies = {"1": -13.6, "6": -1030.0, "8": -2041.3}
    priors = [{"name": "atomref", "energies": energies}, {"name": "zbl", "cutoff": 1.6}, {**charges, "cutoff": 4.5}]
    potential = make(layers=1, priors=priors)
    system = atoms(6, THIN, seed=4)
    evaluator = Evaluator(potential, block_atoms=260)
    found = evaluator(system, stress=True)
    assert blocks_of(evaluator) > 1
    expected = copy.deepcopy(potential).double()(system, stress=True)
    largest = float(expected.forces.abs().max())
    assert float((found.atom_energies - expected.atom_energies).abs().max()) < 2e-6 * max(1.0, largest)
    assert float((found.forces - expected.forces).abs().max()) < 2e-6 * max(1.0, largest)
    assert float((found.stress - expected.stress).abs().max()) < 1e-6 * max(1.0, float(expected.stress.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_molecule(dtype):
    """A charged one, with atoms without neighbors, and a model with a linear read-out."""
    potential = make(layers=3, model={"linear_readout": True, "norm": "log"})
    system = atoms(24, edges=(24.0, 3.0, 3.0)).to(dtype=dtype).replace(charge=torch.ones(1))
    evaluator = Evaluator(potential, block_atoms=20)
    found = evaluator(system)
    assert blocks_of(evaluator) > 1 and found.forces.dtype == dtype
    assert_right(found, potential, system)


def test_a_slab_in_mixed_precision():
    """Periodic along two vectors; fields are in float16."""
    system = atoms(8, LONG, pbc=torch.tensor([True, True, False]))
    evaluator = Evaluator(POTENTIAL, "mixed", block_atoms=43)
    found = evaluator(system)
    whole = Evaluator(POTENTIAL, "mixed")(system)
    assert blocks_of(evaluator) > 1
    assert float((found.forces - whole.forces).abs().max()) < 1e-6  # float16 is rounded alike
    assert float((found.atom_energies - whole.atom_energies).abs().max()) < 1e-6


def test_the_embedding_by_elements(monkeypatch):
    monkeypatch.setattr(launch_shapes, "_BY_ELEMENTS_FROM", 0)
    system = atoms(16, edges=(24.0, 3.0, 3.0))
    system = system.replace(z=torch.full_like(system.z, 8))
    evaluator = Evaluator(POTENTIAL, block_atoms=14)
    found = evaluator(system)
    assert blocks_of(evaluator) > 1
    (step,) = (graphed.step for graphed, _ in evaluator._active.steps.values())
    assert step.path["shapes"].elements == (8,)
    assert_right(found, POTENTIAL, system)


def test_an_atom_alone_has_exactly_its_reference_energy():
    potential = make(layers=1, priors=[{"name": "atomref", "energies": {"1": -13.6, "6": -1030.0, "8": -2041.3}}])
    system = System(z=torch.tensor([1, 8, 6]), pos=torch.tensor([[0.0, 0, 0], [5, 0, 0], [6, 0, 0]]).double())
    assert Evaluator(potential, block_atoms=3)(system).atom_energies[0] == -13.6


def test_a_bound_step():
    """Atoms gather in a block that has no room for them, and have more neighbors; the cell changes."""
    potential = make(layers=1)
    system = atoms(40, edges=(60.0, 3.0, 3.0))
    step = Evaluator(potential, block_atoms=40).bind(system)
    assert step.waits
    assert_right(step.fetch(), potential, system)
    before = step.capacity
    near = system.replace(pos=system.pos * torch.tensor([0.25, 1.0, 1.0], dtype=torch.float64))
    step.pos.copy_(near.pos)
    step.replay()
    assert step.check() and step.capacity > before
    assert_right(step.fetch(), potential, near)

    system = atoms(4, THIN)
    step = Evaluator(potential, block_atoms=300).bind(system, stress=True)
    larger = system.replace(pos=system.pos * 1.1, cell=system.cell * 1.1)
    step.pos.copy_(larger.pos)
    step.cell.copy_(larger.cell)
    step.replay()
    assert_right(step.fetch(), potential, larger)


def test_dynamics():
    """md's engine on a GPU, beside the one of the host with whole steps: positions in Å after 1 fs."""
    potential = make(layers=1)
    system = atoms(10, edges=(12.0, 3.0, 3.0))
    masses = torch.full((10, 1), 4.0, dtype=torch.float64)
    constants = AtomConstants(masses, torch.ones_like(masses), 27, 1)
    vel = 0.02 * torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for block_atoms in (None, 9):
        step = Evaluator(potential, graphs=False, block_atoms=block_atoms).bind(system)
        dynamics = VelocityVerlet(constants, 0.5)
        engine = HostEngine(step, dynamics) if block_atoms is None else GraphEngine(step, dynamics, capture=False)
        engine.load(engine.begin(vel))
        engine.launch(2)
        found.append(engine.collect().pos.clone())
        assert engine.check()
    assert float((found[1] - found[0]).abs().max()) < 1e-8
    assert float((found[0] - system.pos).abs().max()) > 0.02


def test_positions_that_are_not_finite():
    evaluator = Evaluator(make(layers=1), block_atoms=200)
    step = evaluator.bind(atoms(4, THIN))
    step.pos[2, 1] = float("nan")
    step.replay()
    assert bool(step.energy.isnan().all()) and bool(step.forces.isnan().all())
    with pytest.raises(ValueError, match="atom 2"):
        step.check()


def test_the_first_use_is_checked(monkeypatch):
    potential = make(layers=1)
    system = atoms(10, edges=(12.0, 3.0, 3.0))
    compared = []
    compare = FusedModel._compare
    monkeypatch.setattr(FusedModel, "_compare", lambda *given: (compared.append(given[1].num_blocks), compare(*given)))
    Evaluator(potential, block_atoms=8)(system)
    assert compared == [2]
    monkeypatch.setattr(blocks.BlockStep, "_add_block", lambda *given: None)
    with pytest.raises(RuntimeError, match="the fused path does not agree with the reference in float64"):
        Evaluator(potential, block_atoms=8)(system)


def test_what_does_not_fit_into_the_memory_is_evaluated_in_blocks(monkeypatch):
    potential = make(layers=1)
    system = atoms(10, edges=(12.0, 3.0, 3.0))
    build, make_buffers = FusedModel.build, blocks.BlockStep._make_buffers

    def too_large(self, *given):
        if not isinstance(self, blocks.BlockModel):
            raise torch.cuda.OutOfMemoryError("out of memory")
        return build(self, *given)

    def few(self, num_atoms):
        if num_atoms > 9:
            raise torch.cuda.OutOfMemoryError("out of memory")
        make_buffers(self, num_atoms)

    monkeypatch.setattr(FusedModel, "build", too_large)
    monkeypatch.setattr(blocks.BlockStep, "_make_buffers", few)
    monkeypatch.setattr(blocks, "LARGEST_BLOCK", 16)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 5)
    evaluator = Evaluator(potential)
    assert_right(evaluator(system), potential, system)
    assert blocks_of(evaluator) > 1
    many = System.concatenate([system, system])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        evaluator(many)
    dispersion = make(layers=1, priors=[{"name": "d2", "cutoff": 4.0}, *D3])
    with pytest.raises(torch.cuda.OutOfMemoryError, match="not evaluated in blocks: the prior D3 needs more of the"):
        Evaluator(dispersion)(system)


D3 = [{"name": "d3", "elements": [1, 6, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 4.0}]
CHARGES = {"H": 0.4, "C": 0.1, "O": -0.8}
PME = [{"name": "coulomb", "charges": CHARGES, "method": "pme", "cutoff": 3.0}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"priors": D3}, "the prior D3 needs more of the structure than the neighbors of each atom"),
        ({"priors": PME}, "the prior Coulomb needs more of the structure than the neighbors of each atom"),
        ({"properties": [{"name": "charges"}]}, "the model predicts charges, properties of whole structures"),
        ({"model": {"name": "tensornet2"}}, "the kernels for TensorNet2 evaluate whole structures only"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(changes, reason):
    with pytest.raises(ValueError, match=f"block_atoms=100: {reason}.*; take block_atoms=None"):
        Evaluator(make(**changes), block_atoms=100)


def test_blocks_that_are_too_small_are_refused():
    with pytest.raises(
        ValueError, match=r"blocks of 40 atoms are too small: the smallest block and all within 6 Å are \d+ atoms; give"
    ):
        Evaluator(POTENTIAL, block_atoms=40)(atoms(8, SKEWED))


def test_batches_are_not_divided():
    system = atoms(3)
    evaluator = Evaluator(make(layers=1), block_atoms=2)
    evaluator(System.concatenate([system, system]))
    assert "blocks" not in evaluator.report()
