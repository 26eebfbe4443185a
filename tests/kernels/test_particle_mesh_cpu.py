"""The compiled kernels of particle-mesh Ewald against the prior in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pair_prior_cases import CHARGES, cpu_sums, mesh_batch, mesh_priors, prepared, reference, system

from torchmdnet2 import System
from torchmdnet2.neighbors.pairs import pair_list
from torchmdnet2.potential.graph import sum_over_systems
from torchmdnet2.priors import Coulomb

pytest.importorskip("numba")
import numba

from torchmdnet2.priors.coulomb.cpu import CpuParticleMeshTerm

PRIORS = mesh_priors()


def run(prior, atoms, held=None):
    """Sums of a term, for the structures that it was prepared for or for others with the same atoms."""
    held = held or prepared(CpuParticleMeshTerm(prior), atoms)
    return cpu_sums(held, prior, atoms, pair_list(atoms, prior.cutoff))


def require_reference(prior, atoms, sums):
    """1e-12 of the largest value: float64 but for the vectors of short-range pairs, which are exact here."""
    assert sums.energy.any()
    expected = reference(prior, atoms)
    virial = sum_over_systems(torch.from_numpy(sums.virial), atoms.batch, atoms.num_systems).view(-1, 3, 3)
    computed = {"energy": sums.energy, "forces": sums.forces, "virial": virial, "slope": sums.charge_slope}
    for what, exact in expected.items():
        error = float((torch.as_tensor(computed[what]) - exact).abs().max())
        assert error <= 1e-12 * max(float(exact.abs().max()), 1e-3), (what, error)


@pytest.mark.parametrize("name", PRIORS)
def test_energies_forces_virials(name):
    """Of cells and a molecule between them."""
    require_reference(PRIORS[name], mesh_batch(), run(PRIORS[name], mesh_batch()))


@pytest.mark.parametrize("name", ["by element", "predicted, damped"])
def test_float32_left_handed_cells_and_structures_without_atoms(name):
    """Positions and cells are exact in float32."""
    prior, batch = PRIORS[name], mesh_batch()
    other_hand = batch.replace(cell=batch.cell[:, [1, 0, 2]])
    batch_of_four = torch.tensor([0, 0, 0, 1, 1, 1, 3, 3, 3])
    cells, pbc = batch.cell[[0, 1, 1, 2]], batch.pbc[[0, 1, 1, 2]]
    with_a_gap = System(z=batch.z, pos=batch.pos, batch=batch_of_four, cell=cells, pbc=pbc, charge=torch.zeros(4))
    for atoms in (batch.to(dtype=torch.float32), other_hand, with_a_gap):
        require_reference(prior, atoms, run(prior, atoms))


@pytest.mark.parametrize("name", PRIORS)
def test_a_prepared_term_follows_positions_and_cells(name):
    """A wider, skewed cell has another mesh; atoms may be some cells outside."""
    prior, first = PRIORS[name], mesh_batch()
    term = prepared(CpuParticleMeshTerm(prior), first)
    turn = torch.tensor([[1.25, 0, 0], [0.125, 1.5, 0], [0, -0.25, 1.25]], dtype=torch.float64)
    cell = first.cell @ turn
    image = torch.tensor([-2.0, 0, 3], dtype=torch.float64)
    other = first.replace(pos=first.pos @ turn + (image @ cell)[first.batch], cell=cell)
    run(prior, first, term)
    require_reference(prior, other, run(prior, other, term))
    require_reference(prior, first, run(prior, first, term))


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads")
def test_sums_do_not_depend_on_threads():
    prior, atoms = Coulomb(CHARGES, "pme", 4.0, accuracy=1e-6), system(40, 4, 9.0)
    threads, of_torch = numba.get_num_threads(), torch.get_num_threads()
    try:
        numba.set_num_threads(2)
        torch.set_num_threads(2)  # of the transforms
        sums = run(prior, atoms)
        numba.set_num_threads(1)
        torch.set_num_threads(1)
        alone = run(prior, atoms)
    finally:
        numba.set_num_threads(threads)
        torch.set_num_threads(of_torch)
    for what, value in sums._asdict().items():
        assert np.array_equal(value, getattr(alone, what)), what


def test_structures_that_do_not_lie_together():
    """Atoms of a cell and of a molecule take turns."""
    prior, atoms = PRIORS["by element"], mesh_batch()
    turns = torch.tensor([0, 3, 6, 1, 4, 7, 2, 5, 8])
    mixed = atoms.replace(z=atoms.z[turns], pos=atoms.pos[turns], batch=atoms.batch[turns])
    together, found = run(prior, atoms), run(prior, mixed)
    np.testing.assert_allclose(found.energy, together.energy[turns], rtol=1e-13)
    np.testing.assert_allclose(found.forces, together.forces[turns], atol=1e-12)
    for structure in range(3):
        here = (mixed.batch == structure).numpy(), (atoms.batch == structure).numpy()
        np.testing.assert_allclose(found.virial[here[0]].sum(0), together.virial[here[1]].sum(0), atol=1e-12)


def test_slabs_are_refused():
    atoms = system(3, 1, 3.0)
    atoms = atoms.replace(pbc=torch.tensor([[True, True, False]]))
    with pytest.raises(ValueError, match="periodic in one or two directions only"):
        prepared(CpuParticleMeshTerm(PRIORS["by element"]), atoms)
