"""The kernels of particle-mesh Ewald in Triton's interpreter. Run by test_particle_mesh_gpu.py."""

from __future__ import annotations

import os

import pytest
import torch
from kernels.pair_prior_cases import charges_of, mesh_batch, mesh_priors, reference, system
from kernels.pair_prior_checks import edges_of, place

from torchmdnet2.kernels.interfaces import TermLaunch, TermSums
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.potential.graph import sum_over_systems
from torchmdnet2.priors import Coulomb
from torchmdnet2.priors.coulomb.ewald import _spline
from torchmdnet2.priors.coulomb.gpu import ParticleMeshTerm, spline_table

assert os.environ["TRITON_INTERPRET"] == "1"
BATCH, PRIORS = mesh_batch(), mesh_priors()


def run(prior, atoms, virial=True, order=None):
    term = ParticleMeshTerm(prior, torch.device("cpu"))
    n, nan = atoms.num_atoms, float("nan")
    buffers = term.allocate(n)
    original = atoms if order is None else atoms.replace(z=atoms.z[order.argsort()])
    term.set_composition(buffers, original)
    assert term.make_room(buffers, original) and not term.make_room(buffers, original)
    slope = torch.full((n,), nan)  # of fixed charges it is not touched
    sums = TermSums(torch.full((n,), nan).double(), torch.full((n, 3), nan), torch.full((n, 9), nan), slope)
    held = place(atoms, order, charges_of(prior, atoms))._replace(cell=atoms.cell)
    launch = TermLaunch(True, True, virial, term.launch_shapes(n), {"PDL": 0})
    term.run(buffers, held, edges_of(pair_list(atoms, prior.cutoff), atoms), sums, launch)
    assert not term.lacking(buffers)
    return sums


@pytest.mark.parametrize("name", PRIORS)
def test_energies_forces_virials(name):
    """Bounds as those of pair priors: short-range pairs are float32. Twice: the same bits."""
    prior = PRIORS[name]
    expected, sums = reference(prior, BATCH), run(prior, BATCH)
    virial = sum_over_systems(sums.virial.double(), BATCH.batch, BATCH.num_systems).view(-1, 3, 3)
    assert sums.charge_slope.isnan().all() != prior.uses_charges
    slope = sums.charge_slope.nan_to_num()
    for what, value, bound in [
        ("energy", sums.energy, 1e-6), ("forces", sums.forces, 2e-6), ("virial", virial, 2e-6), ("slope", slope, 2e-6)
    ]:  # fmt: skip
        exact = expected[what]
        error, largest = float((value.double() - exact).abs().max()), float(exact.abs().max())
        assert error <= max(bound * largest, 5e-8), (what, error, largest)
    if name == "predicted, damped":
        again = run(prior, BATCH, virial=False)
        assert torch.equal(again.energy, sums.energy) and torch.equal(again.forces, sums.forces)
        assert torch.equal(again.charge_slope, sums.charge_slope) and again.virial.isnan().all()


@pytest.mark.parametrize("order", [4, 8, 16])
def test_splines(order):
    t = torch.linspace(0, 1, 7, dtype=torch.float64)[:-1]
    powers = (t[:, None] - 0.5) ** torch.arange(order)
    table = torch.tensor(spline_table(order), dtype=torch.float64)
    torch.testing.assert_close(powers @ table, _spline(t, order), rtol=0, atol=1e-15)


def test_atoms_in_another_order_and_far_outside():
    prior, atoms = PRIORS["by atom, order 8"], system(3, 1, 3.0)
    order = torch.tensor([2, 0, 1])
    image = torch.tensor([[-7.0], [0], [3]]).double() * atoms.cell[0, 0]
    moved = atoms.replace(z=atoms.z[order], pos=(atoms.pos + image)[order])
    sums, expected = run(prior, moved, order=order), reference(prior, atoms)
    torch.testing.assert_close(sums.energy, expected["energy"][order], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.forces.double(), expected["forces"][order], rtol=1e-5, atol=1e-5)


def test_a_broken_charge_has_no_energy():
    prior = PRIORS["by atom, order 8"]
    wrong = Coulomb([0.3, 2000.0, 0.9], "pme", 3.0, accuracy=1e-4)
    energy = run(wrong, system(3, 1, 3.0)).energy
    assert energy.isnan().tolist() == [False, True, False] and prior.energy.method == "pme"
