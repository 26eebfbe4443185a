"""Run by test_lammps_fused.py in a process of its own, in Triton's interpreter: the fused kernels over the rows of a
domain, periodic images being ghosts, against the Potential in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from lammps_cases import BOX, PRISM, THIN, scattered
from test_lammps_compiled import D3, PRIORS, make, with_images

from torchmdnet2 import System
from torchmdnet2.core.exchange import CopyExchange
from torchmdnet2.engine.domain import ReferenceDomain
from torchmdnet2.engine.fused_domain import FusedDomain


def set_atoms(domain, atoms):
    """The local atoms, and their images as ghosts; gives all positions, and whose image each ghost is."""
    pos, owner = with_images(atoms, domain.cutoff + 1)
    ids = np.concatenate([np.arange(len(atoms)), owner])
    domain.set_atoms(atoms.numbers[ids], ids, len(atoms), CopyExchange(len(atoms), torch.from_numpy(owner)))
    return pos, owner


def unchecked(potential, precision="native"):
    """What is compared here needs no check of its own, which takes the interpreter as long again."""
    domain = FusedDomain(potential, 0.0, precision)
    domain._check = lambda pos: None
    return domain


@pytest.mark.parametrize(
    ("cell", "number", "priors", "subtract_isolated"),
    [(BOX, 7, PRIORS, False), (PRISM, 8, (), True), (THIN, 3, [D3], True)],
    ids=["orthorhombic and pairs", "triclinic", "thin and d3"],
)
def test_fused_domain_is_the_potential(cell, number, priors, subtract_isolated):
    """The first potential is one as others train them, of which energies of atoms alone are not subtracted."""
    potential, atoms = make(priors), scattered(number, cell, True, 1)
    potential.subtract_isolated = subtract_isolated
    domain = unchecked(potential)
    pos, _ = set_atoms(domain, atoms)
    found = domain(pos)
    expected = copy.deepcopy(potential).double()(System.from_ase(atoms), stress=True)
    assert np.abs(found.forces - expected.forces.numpy()).max() <= 2e-5
    assert np.abs(found.energies - expected.atom_energies.numpy()).max() <= 2e-5
    stress = found.virial.sum(0)[[0, 3, 4, 3, 1, 5, 4, 5, 2]].reshape(3, 3) / atoms.cell.volume
    assert np.abs(stress - expected.stress[0].numpy()).max() <= 1e-6
    assert float(expected.forces.abs().max()) > 0.01


def test_mixed_precision():
    """Ghosts get what is kept in half precision."""
    potential, atoms = make(), scattered(7, BOX, True, 1)
    domain = unchecked(potential, "mixed")
    pos, _ = set_atoms(domain, atoms)
    found = domain(pos)
    expected = copy.deepcopy(potential).double()(System.from_ase(atoms))
    error = np.abs(found.forces - expected.forces.numpy()).max() / float(expected.forces.abs().max())
    assert 5e-6 < error <= 1e-3  # rounded, and right
    assert np.abs(found.energies - expected.atom_energies.numpy()).max() <= 5e-4
    assert "mixed precision" in domain.describe()


def test_positions_that_move_and_other_atoms():
    """Edges are kept while atoms move by less than half of the skin; buffers are kept for fewer atoms."""
    potential = make(num_layers=1)
    fused, reference = unchecked(potential), ReferenceDomain(potential, 0.0)
    random = np.random.default_rng(0)
    for number in (5, 3, 0):
        atoms = scattered(number, BOX, True, 1)
        (pos, owner), _ = set_atoms(fused, atoms), set_atoms(reference, atoms)
        for _ in range(2):
            step = random.normal(scale=0.15, size=(number, 3))
            pos = pos + np.concatenate([step, step[owner]])
            ours, theirs = fused(pos), reference(pos)
            assert ours.forces.shape == (number, 3)
            assert np.abs(ours.forces - theirs.forces).max(initial=0) <= 2e-5
            assert np.abs(ours.virial - theirs.virial).max(initial=0) <= 2e-4
            assert fused.num_edges == reference.num_edges


def test_two_atoms_at_the_same_place_are_named():
    domain, atoms = unchecked(make(num_layers=1)), scattered(4, BOX, True, 1)
    pos, _ = set_atoms(domain, atoms)
    pos[3] = pos[1]
    with pytest.raises(ValueError, match=r"atom (1 and atom 3|3 and atom 1) are at the same place"):
        domain(pos)


def test_a_wrong_kernel_is_found_on_the_first_use(monkeypatch):
    domain, atoms = FusedDomain(make(num_layers=1), 0.0), scattered(4, BOX, True, 1)
    pos, _ = set_atoms(domain, atoms)
    net = domain._net
    run = net.run

    def wrong(buffers, *given):
        run(buffers, *given)
        buffers.forces.copy_(buffers.forces * 1.01)

    monkeypatch.setattr(net, "run", wrong)
    with pytest.raises(RuntimeError, match="does not agree with the reference"):
        domain(pos)


@pytest.mark.parametrize("wrong", [3e6, float("nan")])
def test_forces_that_no_integer_holds_are_an_error(wrong, monkeypatch):
    """Forces are summed as integers."""
    domain, atoms = unchecked(make(num_layers=1)), scattered(4, BOX, True, 1)
    pos, _ = set_atoms(domain, atoms)
    net = domain._net
    domain_forces = net._domain_forces

    def with_a_wrong_slope(buffers, *given):
        buffers.slope[0, 0] = wrong
        domain_forces(buffers, *given)

    monkeypatch.setattr(net, "_domain_forces", with_a_wrong_slope)
    with pytest.raises(ValueError, match=r"force of atom \d is not finite"):
        domain(pos)
