import math

import pytest
import torch

from torchmdnet2 import System
from torchmdnet2.data import InMemoryDataset, Sample, fit_atomref, statistics
from torchmdnet2.errors import BadData

from .frames import make_mixture, make_sample

REFERENCE = {1: -13.123456789, 6: -1034.56789, 8: -2041.98765}
MOLECULES = [(8, 1, 1), (6, 1, 1, 1, 1), (6, 6, 8, 1, 1, 1, 1, 1, 1), (6, 8, 8), (1, 1)]


def with_energy(z, extra=0.0):
    sample = make_sample(z, seed=len(z), labels=("forces",))
    sample.labels["energy"] = torch.tensor([sum(REFERENCE[n] for n in z) + extra], dtype=torch.float64)
    return sample


def test_references_are_found_again_in_float64():
    fitted = fit_atomref(InMemoryDataset([with_energy(z) for z in MOLECULES]))
    assert fitted.keys() == REFERENCE.keys()
    for z, energy in REFERENCE.items():
        assert fitted[z] == pytest.approx(energy, abs=1e-9)


def test_only_the_chosen_frames_count():
    data = InMemoryDataset([with_energy(z) for z in MOLECULES] + [with_energy((8, 1, 1), extra=500.0)])
    assert fit_atomref(data, range(5))[8] == pytest.approx(REFERENCE[8], abs=1e-9)
    assert abs(fit_atomref(data)[8] - REFERENCE[8]) > 1
    assert fit_atomref(data, [4]).keys() == {1}


def test_one_molecule_gets_the_solution_of_least_norm():
    data = InMemoryDataset([with_energy((8, 1, 1), extra) for extra in (-0.3, 0.3)])
    mean = REFERENCE[8] + 2 * REFERENCE[1]
    fitted = fit_atomref(data)
    assert fitted[8] + 2 * fitted[1] == pytest.approx(mean, abs=1e-9)
    assert fitted[1] == pytest.approx(2 * fitted[8], rel=1e-12)  # along the composition (1, 2)
    assert statistics(data).energy_spread == pytest.approx(0.1, rel=1e-9)


def test_frames_without_energy_are_left_out():
    nan = with_energy((6, 1), extra=math.nan)
    data = InMemoryDataset([with_energy((8, 1, 1)), make_sample((7,), labels=()), nan])
    assert fit_atomref(data).keys() == {1, 8}
    assert statistics(data).elements == [1, 6, 7, 8]
    with pytest.raises(BadData, match="no frame has an energy"):
        fit_atomref(data, [1, 2])


def test_counts_and_sizes():
    samples = make_mixture()
    samples[0].labels["forces"][:] = math.nan
    samples[2].labels["forces"][1] = math.nan
    found = statistics(InMemoryDataset(samples))
    assert found.num_frames == 6
    assert found.labelled == {"energy": 5, "forces": 3, "stress": 2, "dipole": 1, "charges": 1}
    assert found.elements == [1, 6, 8]
    assert found.atoms == (3, 4.0, 5)
    known = torch.cat([samples[2].labels["forces"][[0, 2, 3, 4]], *(samples[k].labels["forces"] for k in (3, 4))])
    assert found.force_rms == pytest.approx(known.square().mean().sqrt().item(), rel=1e-12)
    assert found.neighbors is None


def test_without_labels():
    found = statistics(InMemoryDataset([make_sample(labels=())]))
    assert (found.labelled, found.atomref, found.energy_spread, found.force_rms) == ({}, {}, None, None)


def test_neighbors():
    chain = System(z=torch.ones(4, dtype=torch.long), pos=torch.arange(4.0).double()[:, None] * torch.eye(3)[0])
    crystal = System(z=torch.tensor([29]), pos=torch.zeros(1, 3).double(), cell=torch.eye(3).double()[None] * 2)
    data = InMemoryDataset([Sample(chain), Sample(crystal)])
    assert statistics(data, [0], cutoff=1.5).neighbors == (1, 1.5, 2)
    assert statistics(data, [1], cutoff=2.5).neighbors == (6, 6.0, 6)
    assert statistics(data, cutoff=2.5, neighbor_frames=2).neighbors == (2, (4 * 2.5 + 6) / 5, 6)
    assert statistics(data, cutoff=2.5, neighbor_frames=1).neighbors == (2, 2.5, 3)


def test_no_frames():
    with pytest.raises(BadData, match="at least one frame"):
        statistics(InMemoryDataset([]))
