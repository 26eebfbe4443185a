"""The compiled kernels of pair priors against the priors in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pair_prior_cases import ELEMENTS, cpu_sums, lists, prepared, priors, reference, system, systems

from torchmdnet2 import System
from torchmdnet2.potential.graph import sum_over_systems

pytest.importorskip("numba")
import numba

from torchmdnet2.priors.pair_kernels.cpu import make_cpu_term

PRIORS = priors()
CASES = [(name, kind) for name, prior in PRIORS.items() for kind in systems(prior)]


def run(prior, atoms, found, times=1):
    """Sums of a term that was added so many times."""
    return cpu_sums(prepared(make_cpu_term(prior, ELEMENTS), atoms), prior, atoms, found, times)


@pytest.mark.parametrize("name, kind", CASES)
def test_energies_forces_virials(name, kind):
    """1e-10 of the largest: float64 but for the vectors, which are exact here."""
    prior, atoms = PRIORS[name], systems(PRIORS[name])[kind]
    expected = reference(prior, atoms)
    for which, found in lists(prior, atoms).items():
        sums = run(prior, atoms, found)
        virial = sum_over_systems(torch.from_numpy(sums.virial), atoms.batch, atoms.num_systems).view(-1, 3, 3)
        computed = {
            "energy": torch.from_numpy(sums.energy), "forces": torch.from_numpy(sums.forces), "virial": virial,
            "slope": torch.from_numpy(sums.charge_slope),
        }  # fmt: skip
        for what, exact in expected.items():
            error = float((computed[what] - exact).abs().max())
            assert error <= 1e-10 * max(float(exact.abs().max()), 1e-3), (what, which, error)


@pytest.mark.parametrize("name", PRIORS)
def test_terms_add_up_and_do_not_depend_on_threads(name):
    prior = PRIORS[name]
    atoms = systems(prior)["molecules, one without edges"]
    found = next(iter(lists(prior, atoms).values()))
    threads = numba.get_num_threads()
    once, twice = run(prior, atoms, found), run(prior, atoms, found, times=2)
    numba.set_num_threads(1)
    try:
        alone = run(prior, atoms, found)
    finally:
        numba.set_num_threads(threads)
    for what, value in once._asdict().items():
        assert np.array_equal(value, getattr(alone, what)), what
        np.testing.assert_allclose(getattr(twice, what), 2 * value, rtol=1e-13, atol=1e-18)


def test_structures_that_do_not_lie_together():
    """All pairs of two molecules whose atoms take turns."""
    prior, a, b = PRIORS["all pairs"], system(3, 1, 3.0, False), system(3, 3, 4.0, False)
    together = System.concatenate([a, b])
    turns = torch.tensor([0, 3, 1, 4, 2, 5])
    mixed = System(z=together.z[turns], pos=together.pos[turns], batch=together.batch[turns], charge=together.charge)
    np.testing.assert_array_equal(run(prior, mixed, None).forces, run(prior, together, None).forces[turns])


def test_all_pairs_refuse_periodic_structures():
    with pytest.raises(ValueError, match="structure 0 is periodic"):
        run(PRIORS["all pairs"], system(3, 5, 4.0), None)
