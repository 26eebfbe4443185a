"""TensorNet2 on its kernels in whole steps, in the interpreter of Triton. Run by test_tensornet2_kernels.py."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.fused_step import FusedModel, FusedStep
from torchmdnet2.engine.step import GraphedStep, StaticInputs
from torchmdnet2.models.tensornet import charged
from torchmdnet2.models.tensornet import gpu as launch_shapes
from torchmdnet2.models.tensornet.gpu import Block, MessageTile
from torchmdnet2.models.tensornet2.gpu import FilterTiles

assert os.environ["TRITON_INTERPRET"] == "1"
launch_shapes._BY_SIZE = ()  # large blocks: fewer programs to interpret
CELL = [[5.0, 0, 0], [1, 6, 0], [0.5, 0.3, 5.5]]
TINY = [[2.1, 0, 0], [0.4, 2.3, 0], [0, 0.5, 2.2]]  # several images of each atom, and of itself
FIELD = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 5.0, "damping": "exp"}
COVALENT = {"name": "zbl", "envelope": "covalent"}


def make(group="O(3)", layers=1, q_dim=4, priors=(), **changes) -> Potential:
    torch.manual_seed(3)
    sizes = {"hidden_channels": 32, "num_layers": layers, "num_rbf": 8, "q_dim": q_dim, "max_z": 10}
    model = {"name": "tensornet2", "cutoff": 4.0, "group": group, **sizes, **changes}
    potential = Potential.from_config({"model": model, "priors": list(priors), "elements": [1, 6, 7, 8]}).eval()
    with torch.no_grad():
        for p in potential.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return potential


def system(num_atoms: int, cell: list | None, charge: float, seed: int = 0) -> System:
    generator = torch.Generator().manual_seed(num_atoms + seed)
    lattice = torch.eye(3).double() * 3 if cell is None else torch.tensor(cell, dtype=torch.float64)
    pos = torch.rand(num_atoms, 3, dtype=torch.float64, generator=generator) @ lattice
    z = torch.tensor([1, 6, 7, 8])[torch.randint(0, 4, (num_atoms,), generator=generator)]
    return System(z=z, pos=pos, cell=None if cell is None else lattice[None], charge=torch.tensor([charge]))


def assert_same(found, model: Potential, atoms: System, stress: bool = False) -> None:
    """Energies, forces, charges and stress as those of the Potential in float64."""
    expected = copy.deepcopy(model).double()(atoms.to(dtype=torch.float64), stress=stress)
    eager = model(atoms.to(dtype=torch.float32)).forces.double() - expected.forces
    largest = float(expected.forces.abs().max())
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found.atom_energies, expected.atom_energies, rtol=0, atol=2e-6)
    bound = 2 * float(eager.abs().max()) + 1e-6 * max(1.0, largest)
    torch.testing.assert_close(found.forces.double(), expected.forces, rtol=0, atol=bound)
    torch.testing.assert_close(found.charges, expected.charges, rtol=0, atol=1e-6)
    if stress:
        torch.testing.assert_close(found.stress.double(), expected.stress, rtol=2e-5, atol=1e-6)


CASES = {
    "L = 1": (make(), system(5, None, 1.0)),
    "L = 2": (make(layers=2), system(4, None, 0.0)),
    "SO(3), charges that are conserved as in TorchMD-Net": (
        make("SO(3)", layers=2, exact_charge=False), system(4, CELL, -1.0),
    ),
    "one charge channel, one atom": (make(q_dim=1), system(1, None, 1.0)),
    "images of itself": (make(), system(2, TINY, 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_structures(name):
    model, atoms = CASES[name]
    evaluator = Evaluator(model)
    periodic = bool(atoms.pbc.any())
    assert_same(evaluator(atoms, stress=periodic), model, atoms, periodic)
    assert evaluator.fused


def run_step(fused: FusedModel, step: FusedStep, atoms: System) -> GraphedStep:
    """Compute a step of these atoms, with room for all edges."""
    inputs, graphed = StaticInputs(fused, step), GraphedStep(step)
    inputs.load(atoms)
    graphed.make_room()
    graphed.run()
    assert graphed.status()[0] == 0
    return graphed


def test_batch_in_chunks_with_predicted_charges():
    """Two charged structures, an atom alone and one without edges; charges act in a prior, which acts on all; several
    chunks, spatial order and parts of structures; filters kept for the backward pass or not; one or several atoms a
    program, also of the networks of charges; with several chunks the same bits twice."""
    model = make(layers=2, priors=[FIELD, COVALENT], cutoff=5.5)
    atoms = System.concatenate(
        [system(5, CELL, 1.0), system(1, [[30.0, 0, 0], [0, 30, 0], [0, 0, 30]], 0.0), system(4, CELL, -2.0, 1)]
    )
    fused = FusedModel(model, "native")
    one, several = MessageTile(1, 4, 32, 4), MessageTile(4, 2, 16, 4)
    tensor_cores = dict.fromkeys(("charge_layer", "predict", "predict_gradient"), Block(16, 16, 16, 4))
    for kept, tile, others in ((0, one, {}), (0, several, tensor_cores), (1 << 17, several, {})):
        shapes = replace(fused.net.launch_shapes(10), chunk=128, kept=kept, filter_message=tile, filter_gradient=tile)
        shapes = replace(shapes, **others)
        step = fused.step(10, 3, torch.float64, True, sort=kept == 0, parts=2, shapes=shapes)
        graphed = run_step(fused, step, atoms)
        assert 10 + graphed.status()[1] > 128  # two chunks, where filters are not kept
        assert_same(step.results(), model, atoms, stress=True)
        if tile is one:
            again = step.out.packed.clone()
            graphed.run()
            assert torch.equal(again, step.out.packed)


def test_results_by_quarters_of_the_columns():
    """128 channels with the shapes of many atoms: filters kept for the backward pass or not."""
    model, atoms = make(hidden_channels=128, cutoff=5.5), system(6, CELL, 1.0)
    fused = FusedModel(model, "native")
    for kept in (0, 1 << 17):
        many = FilterTiles.for_gpu(5000, 128)
        shapes = replace(
            fused.net.launch_shapes(6), chunk=128, kept=kept, layer=many.layer, first_gradient=many.first_gradient
        )
        step = fused.step(6, 1, torch.float64, True, shapes=shapes)
        graphed = run_step(fused, step, atoms)
        assert 6 + graphed.status()[1] > 128  # two chunks, or two blocks of rows
        assert_same(step.results(), model, atoms, stress=True)


def test_charges_that_no_term_reads():
    """They are predicted beside the rest of the step, and not if a term reads them."""
    for priors, read in (([COVALENT], False), ([COVALENT, FIELD], True)):
        model, atoms = make(layers=2, priors=priors), system(5, CELL, 1.0)
        fused = FusedModel(model, "native")
        assert fused.net.charges_read == read
        step = fused.step(5, 1, torch.float64, True)
        run_step(fused, step, atoms)
        assert_same(step.results(), model, atoms, stress=True)


def test_structures_summed_in_parts(monkeypatch):
    """Sums over structures of more atoms than a program takes."""
    monkeypatch.setattr(charged, "_PARTS", (2, 2))
    model = make(priors=[{**FIELD, "method": "all_pairs"}])
    atoms = System.concatenate([system(5, None, 1.0), system(2, None, 0.0)])
    assert_same(Evaluator(model)(atoms), model, atoms)
