"""The kernels of pair priors in Triton's interpreter. Run by test_pair_priors_gpu.py in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from pair_prior_cases import ELEMENTS, charges_of, lists, priors, reference, system, systems

from torchmdnet2.kernels.interfaces import Atoms, Edges, TermLaunch, TermSums
from torchmdnet2.potential.graph import sum_over_systems
from torchmdnet2.priors import Coulomb
from torchmdnet2.priors.pair_kernels.gpu import make_term
from torchmdnet2.system import System

assert os.environ["TRITON_INTERPRET"] == "1"
CPU = torch.device("cpu")
PRIORS = priors()
CASES = [(name, kind) for name, prior in PRIORS.items() for kind in systems(prior)]


def place(atoms, order=None, charges=None):
    """As a step holds them; in another order of the atoms within a structure."""
    batch = atoms.batch.int()
    ptr = torch.searchsorted(batch, torch.arange(atoms.num_systems + 1, dtype=torch.int32)).int()
    charges = None if charges is None else charges.detach().float()
    return Atoms(atoms.z.int(), torch.zeros(len(batch)), batch, ptr, atoms.pos.contiguous(), order, charges)


def edges_of(found, atoms):
    """A list with room to spare, filled with what must not be read."""
    if found is None:
        return None
    room = found.num_edges + 37
    sender, vectors = torch.full((room,), 2**30, dtype=torch.int32), torch.full((room, 3), float("nan"))
    sender[: found.num_edges] = found.edge_index[1].int()
    vectors[: found.num_edges] = found.vectors(atoms).float()
    return Edges(found.row_ptr.int(), sender, vectors, found.cutoff)


def run(prior, atoms, found, virial=True, times=1, order=None, shapes=None):
    """Sums of a term, launched so many times."""
    term = make_term(prior, ELEMENTS, CPU)
    buffers = term.allocate(atoms.num_atoms)
    original = atoms if order is None else atoms.replace(z=atoms.z[order.argsort()])
    term.set_composition(buffers, original)
    held = place(atoms, order, charges_of(prior, atoms))
    n, nan = atoms.num_atoms, float("nan")
    slope = torch.full((n,), nan) if prior.uses_charges else None
    sums = TermSums(torch.full((n,), nan).double(), torch.full((n, 3), nan), torch.full((n, 9), nan), slope)
    for k in range(times):
        launch = TermLaunch(k == 0, k == 0, virial, shapes or term.launch_shapes(n), {"PDL": 0})
        term.run(buffers, held, edges_of(found, atoms), sums, launch)
    return sums


@pytest.mark.parametrize("name, kind", CASES)
def test_energies_forces_virials(name, kind):
    """Against the prior in float64: 1e-6 of the largest energy, 2e-6 of the largest force, or below 5e-8 eV (eV/Å)."""
    prior, atoms = PRIORS[name], systems(PRIORS[name])[kind]
    expected = reference(prior, atoms)
    for which, found in lists(prior, atoms).items():
        sums = run(prior, atoms, found)
        virial = sum_over_systems(sums.virial.double(), atoms.batch, atoms.num_systems).view(-1, 3, 3)
        slope = torch.zeros(1) if sums.charge_slope is None else sums.charge_slope
        for what, value, bound in [
            ("energy", sums.energy, 1e-6), ("forces", sums.forces, 2e-6), ("virial", virial, 2e-6),
            ("slope", slope, 2e-6),
        ]:  # fmt: skip
            exact = expected[what]
            largest = float(exact.abs().max())
            error = float((value.double() - exact).abs().max())
            assert error <= max(bound * largest, 5e-8), (what, which, error, largest)


@pytest.mark.parametrize("name", PRIORS)
def test_terms_add_up_and_repeat(name):
    prior = PRIORS[name]
    atoms = systems(prior)["atoms on top of each other"]
    found = next(iter(lists(prior, atoms).values()))
    once, again, twice = run(prior, atoms, found), run(prior, atoms, found), run(prior, atoms, found, times=2)
    for what in ("energy", "forces", "virial", "charge_slope"):
        first = getattr(once, what)
        if first is None:
            continue
        assert torch.equal(first, getattr(again, what)), what
        torch.testing.assert_close(getattr(twice, what), 2 * first, rtol=1e-6, atol=1e-9)
    without = run(prior, atoms, found, virial=False)
    assert torch.equal(once.forces, without.forces) and without.virial.isnan().all()


@pytest.mark.parametrize("name", ["zbl", "d3"])
def test_another_launch_shape(name):
    prior, atoms = PRIORS[name], system(3, 5, 2.6)
    found = lists(prior, atoms)["own"]
    one, other = run(prior, atoms, found, shapes=(128, 4)), run(prior, atoms, found, shapes=(64, 1))
    torch.testing.assert_close(one.energy, other.energy, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(one.forces, other.forces, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "prior",
    [
        PRIORS["all pairs, damped"],
        Coulomb("predicted", damping="exp", damping_lower=1.0, damping_upper=3.0),
        Coulomb("predicted", damping="cosine", damping_lower=1.0, damping_upper=3.0),
    ],
    ids=["exp", "exp with a lower end", "cosine"],
)
def test_damping_is_left_out_where_all_atoms_of_a_block_are_far(prior):
    """Blocks of four atoms: three groups of atoms 10 Å apart, and a molecule whose blocks are near."""
    near = system(12, 7, 3.0, False)
    apart = near.replace(pos=near.pos + 10 * (torch.arange(12) // 4)[:, None] * torch.eye(3)[0])
    atoms = System.concatenate([apart, near])
    expected, sums = reference(prior, atoms), run(prior, atoms, None, shapes=(4, 1))
    for what, value in [("energy", sums.energy), ("forces", sums.forces), ("slope", sums.charge_slope)]:
        error = float((value.double() - expected[what]).abs().max())
        assert error <= 2e-6 * float(expected[what].abs().max()), what


def test_atoms_without_pairs():
    """They have no energy, but for charges in a field that ends at the cutoff."""
    atoms = system(3, 2, 300.0, False)
    for name, prior in PRIORS.items():
        if "all pairs" not in name:
            sums = run(prior, atoms, lists(prior, atoms)["own"])
            torch.testing.assert_close(sums.energy, reference(prior, atoms)["energy"], rtol=1e-7, atol=0, msg=name)
            assert bool(sums.energy.any()) == ("shifted force" in name), name
            assert not sums.forces.any() and not sums.virial.any(), name


def test_fixed_charges_of_atoms_in_another_order():
    prior, atoms = PRIORS["reaction field, by atom"], system(3, 5, 4.0)
    order = torch.tensor([2, 0, 1])
    moved = atoms.replace(z=atoms.z[order], pos=atoms.pos[order])
    found = lists(prior, moved)["own"]
    sums = run(prior, moved, found, order=order)
    expected = reference(prior, atoms)
    torch.testing.assert_close(sums.energy, expected["energy"][order], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums.forces.double(), expected["forces"][order], rtol=1e-5, atol=1e-5)


def test_all_pairs_refuse_periodic_structures():
    prior, atoms = PRIORS["all pairs"], system(3, 5, 4.0)
    with pytest.raises(ValueError, match="structure 0 is periodic"):
        run(prior, atoms, None)


def test_covalent_radii_of_the_elements_that_occur_set_the_cutoff():
    assert make_term(PRIORS["zbl covalent"], ELEMENTS, CPU).cutoff == pytest.approx(2 * 0.76)
