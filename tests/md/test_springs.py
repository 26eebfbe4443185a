"""Springs fitted to a potential, as the inner potential of multiple time steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.io import read

from torchmdnet2 import System
from torchmdnet2.errors import BadData
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.springs import ORDER, REACH, Springs, SpringStep


def waters(count=2, edge=5.0):
    """A chain of water molecules, wrapped into the cell."""
    box = Atoms(cell=[edge, edge, count * 3.1], pbc=True)
    for k in range(count):
        water = molecule("H2O")
        water.rotate(50.0 * k, "y")
        water.translate([0.1, 0.2, 3.1 * k])
        box += water
    box.wrap()
    return box


def test_kinds_and_bonds_over_the_faces_of_a_cell():
    springs = Springs(System.from_ase(waters()))
    assert sorted(map(sorted, springs.pairs.tolist())) == [[0, 1], [0, 2], [3, 4], [3, 5]]
    assert [sorted(triple) for triple in springs.triples.tolist()] == [[0, 1, 2], [3, 4, 5]]
    assert springs.triples[:, 1].tolist() == [0, 3]
    bond = 0.969
    assert springs.usual.tolist() == pytest.approx([bond, bond**2 * np.cos(np.radians(103.98))], abs=2e-3)
    assert springs.shift.any() and springs.shifts.any()
    alcohol = Springs(System.from_ase(molecule("CH3CH2OH")))
    assert len(alcohol.pairs) == 8 and len(alcohol.triples) == 6 + 6 + 1
    with pytest.raises(BadData, match="no bonds between nonmetals"):
        Springs(System.from_ase(bulk("Cu")))


def test_forces_are_the_gradient_and_do_not_depend_on_images():
    """Of replicas in different cells; in PyTorch, against the integral of the polynomials."""
    springs = Springs(System.from_ase(waters()))
    random = torch.Generator().manual_seed(0)
    springs.coefficients.copy_(torch.randn(2, 4, generator=random, dtype=torch.float64))
    springs.coefficients[1, 2:] = 0  # of angles
    system = System.from_ase([waters()] * 2)
    pos = (system.pos + 0.05 * torch.randn(12, 3, generator=random, dtype=torch.float64)).requires_grad_()
    cell = system.cell * torch.tensor([1.0, 1.02], dtype=torch.float64)[:, None, None]
    step = SpringStep(springs, system)
    step.pos.copy_(pos.detach())
    step.cell.copy_(cell)
    step.replay()
    energy = torch.zeros((), dtype=torch.float64)
    (i, j), (first, vertex, second) = springs.pairs.T, springs.triples.T
    for b in range(2):
        own = pos[6 * b : 6 * b + 6]
        d = (own[j] - own[i] + springs.shift.double() @ cell[b]).norm(dim=1)
        to_first, to_second = (
            own[end] - own[vertex] + springs.shifts[:, k].double() @ cell[b] for k, end in enumerate((first, second))
        )
        values = torch.cat([d, (to_first * to_second).sum(1)])
        kinds = torch.cat([springs.kind, springs.bend])
        x = values - springs.usual[kinds]
        assert x.abs().max() < 0.25
        powers = torch.stack([x ** (k + 1) / (k + 1) for k in range(4)], 1)
        energy = energy + (springs.coefficients[kinds] * powers).sum()
    (gradient,) = torch.autograd.grad(energy, pos)  # a positive coefficient of a bond pulls its atoms together
    torch.testing.assert_close(step.forces, -gradient, rtol=0, atol=1e-12)


def test_a_fit_finds_springs_of_which_the_forces_are():
    """And a run in inner steps is then one with short steps."""
    true = Springs(System.from_ase(molecule("CH3OH")))
    random = torch.Generator().manual_seed(1)
    true.coefficients.copy_(torch.rand(len(true.usual), 4, generator=random, dtype=torch.float64))
    true.coefficients[true.bend, 2:] = 0

    class Model:
        device = torch.device("cpu")

    class Evaluated:
        def __init__(self, _):
            self.step = SpringStep(true, System.from_ase(molecule("CH3OH")))

        def __call__(self, system):
            self.step.pos.copy_(system.pos)
            self.step.replay()
            return SimpleNamespace(forces=self.step.forces.clone())

    found = Springs(System.from_ase(molecule("CH3OH")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchmdnet2.md.springs.Evaluator", Evaluated)
        assert found.fit(Model()) < 1e-3
    pos = torch.as_tensor(molecule("CH3OH").positions) + 0.02
    steps = [SpringStep(springs, System.from_ase(molecule("CH3OH"))) for springs in (true, found)]
    for step in steps:
        step.pos.copy_(pos * 1.02)
        step.replay()
    torch.testing.assert_close(steps[0].forces, steps[1].forces, rtol=1e-2, atol=1e-3)


def test_atoms_bonded_to_their_own_images():
    """Forces of a step are those of the fit; they were not where an end of an angle is an image of its vertex."""
    chain = Atoms("C2", [[0, 0, 0], [0.75, 0.9, 0]], cell=[1.5, 9, 9], pbc=[True, False, False])
    start, random = System.from_ase(chain), torch.Generator().manual_seed(0)
    springs = Springs(start)
    assert (springs.pairs[:, 0] == springs.pairs[:, 1]).any()
    springs.coefficients.copy_(torch.rand(springs.coefficients.shape, generator=random))
    step = SpringStep(springs, start)
    step.pos += 0.05 * torch.randn(step.pos.shape, generator=random)
    step.replay()
    given = (springs.coefficients * REACH ** torch.arange(ORDER)).flatten()
    expected = (springs._design(step.pos, start.cell[0].double()) @ given).view(-1, 3)
    assert expected.abs().max() > 0.01 and (step.forces - expected).abs().max() < 1e-12


def test_a_fit_takes_over_bonds_and_bending(monkeypatch):
    """Of water with harmonic energies of its lengths and its angle, in radians. A spring between the hydrogens instead
    would leave a tenth of the forces."""

    class Model:
        device = torch.device("cpu")

    class Evaluated:
        def __init__(self, _):
            pass

        def __call__(self, system):
            pos = system.pos.clone().requires_grad_()
            sides = pos[1:] - pos[0]
            d = sides.norm(dim=1)
            angle = torch.arccos(sides.prod(0).sum() / d.prod())
            energy = 25 * (d - 0.96).square().sum() + 1.6 * (angle - 1.82).square()
            return SimpleNamespace(forces=-torch.autograd.grad(energy, pos)[0])

    monkeypatch.setattr("torchmdnet2.md.springs.Evaluator", Evaluated)
    springs = Springs(System.from_ase(molecule("H2O")))
    assert springs.fit(Model()) < 0.05
    # at the usual angle, d²E/dθ² is the second derivative by the product times (d² sin θ)²
    product, d = float(springs.usual[springs.bend[0]]), float(springs.usual[springs.kind[0]])
    bending = float(springs.coefficients[springs.bend[0], 1]) * (d**4 - product**2)
    assert bending == pytest.approx(3.2, rel=0.1)


@pytest.mark.parametrize("ensemble", ["nve", "npt"])
def test_a_run_with_springs(model_file, tmp_path, ensemble):
    """Restart to the bit, without a fit; energies are those of the model; replicas and a cell that changes."""
    for name, parts in (("once", [20]), ("twice", [10, 20])):
        for k, steps in enumerate(parts):
            o = MDOptions(
                steps, timestep=1.0, ensemble=ensemble, every=5, restart=k > 0, inner_steps=4, replicas=2,
                output=str(tmp_path / f"{name}.traj"),
            )  # fmt: skip
            result = run_md(model_file, waters(), o, inner="springs")
    assert (tmp_path / "once.0.csv").read_bytes() == (tmp_path / "twice.0.csv").read_bytes()
    once, twice = (read(tmp_path / f"{name}.1.traj") for name in ("once", "twice"))
    assert np.array_equal(once.positions, twice.positions) and np.array_equal(once.cell.array, twice.cell.array)
    changes = np.ptp([row.potential_eV for row in result.rows])
    assert changes > 1e-3
    assert np.ptp([row.conserved_eV for row in result.rows]) < (0.05 if ensemble == "nve" else 0.2) * changes
