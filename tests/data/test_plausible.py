"""Zeros, lost digits and impossible sizes of labels."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule

from torchmdnet2.data import InMemoryDataset, Sample, statistics
from torchmdnet2.data.label_checks import bond_scale, resolution, spread_out, stress_size, zeros
from torchmdnet2.system import System


def rattled(atoms, count=12, seed=0, scale=1.0, noise=0.05):
    rng, samples = np.random.default_rng(seed), []
    for _ in range(count):
        one = atoms.copy()
        one.positions = scale * (one.positions + rng.normal(0, noise, one.positions.shape))
        one.set_cell(scale * one.cell.array)
        labels = {
            "energy": torch.tensor([rng.normal(-1e5, 0.1)], dtype=torch.float64),
            "forces": torch.from_numpy(rng.normal(0, 1, one.positions.shape)),
        }
        if one.pbc.all():
            stress = rng.normal(0, 0.01, (1, 3, 3))
            labels["stress"] = torch.from_numpy(stress + stress.transpose(0, 2, 1))
        samples.append(Sample(System.from_ase(one), labels))
    return samples


def seen(samples):
    data = InMemoryDataset(samples)
    facts = statistics(data)
    chosen = spread_out(facts)
    return zeros(data.batch(chosen), facts, chosen)


def test_nothing_is_zero():
    found = seen(rattled(bulk("Cu", cubic=True)))
    assert found.atoms == 0 and not len(found.frames) + len(found.energies) + len(found.stresses)


def test_zeros_of_frames_and_atoms():
    samples = rattled(bulk("Cu", cubic=True))
    samples[2].labels["forces"][:] = 0
    samples[5].labels["forces"][1] = 0
    samples[7].labels["energy"][:] = 0
    samples[8].labels["stress"][:] = 0
    found = seen(samples)
    assert found.atoms == 5 and found.frames.tolist() == [2]
    assert found.energies.tolist() == [7] and found.stresses.tolist() == [8]


def test_stress_without_shear_and_of_another_structure():
    samples = rattled(bulk("Cu", cubic=True))
    for k in (1, 4):
        samples[k].labels["stress"] *= torch.eye(3)
    for k in (5, 6, 9):
        samples[k].labels["stress"] = samples[5].labels["stress"]
    found = seen(samples)
    assert found.shears.tolist() == [1, 4] and sorted(found.same.tolist()) == [5, 6, 9]
    symmetric = rattled(bulk("Cu", cubic=True), noise=0.0)  # has no shear
    for sample in symmetric:
        sample.labels["stress"] *= torch.eye(3)
    assert not len(seen(symmetric).shears)


def test_few_different_energies():
    samples = rattled(molecule("CH4"), 40)
    for sample in samples:
        sample.labels["energy"][0] = round(float(sample.labels["energy"][0]) / 0.25) * 0.25
    assert resolution(statistics(InMemoryDataset(samples))) == 0.25
    for sample in samples:
        sample.labels["energy"][0] = -100_000.0
    assert resolution(statistics(InMemoryDataset(samples))) == np.inf
    assert resolution(statistics(InMemoryDataset([samples[0]] * 40))) is None  # one structure has one energy


def test_symmetry_makes_forces_zero():
    samples = rattled(bulk("Cu", cubic=True), noise=0.0)
    for sample in samples:
        sample.labels["forces"][:] = 0
    assert seen(samples).atoms == 0


@pytest.mark.parametrize(
    "make", [np.float32, lambda e: round(float(e), 2), lambda e: round(e / 27.211386, 3) * 27.211386]
)
def test_lost_digits(make):
    samples = rattled(molecule("CH4"), 40)
    for sample in samples:
        sample.labels["energy"][0] = float(make(float(sample.labels["energy"][0])))
    assert resolution(statistics(InMemoryDataset(samples))) > 2e-3


def test_all_digits():
    samples = rattled(molecule("CH4"), 40)
    assert resolution(statistics(InMemoryDataset(samples))) is None
    for sample in samples:
        sample.labels["energy"][0] = round(float(sample.labels["energy"][0]), 6)
    assert resolution(statistics(InMemoryDataset(samples))) is None


@pytest.mark.parametrize("atoms", [molecule("C6H6"), molecule("H2O"), bulk("Cu"), bulk("NaCl", "rocksalt", a=5.64)])
def test_lengths(atoms):
    for scale, low, high in ((1.0, 0.85, 1.25), (1 / 0.529, 1.6, 2.4), (0.529, 0.4, 0.65)):
        assert low < bond_scale(InMemoryDataset(rattled(atoms, 3, scale=scale, noise=0.01)).batch([0, 1, 2])) < high


def test_size_of_stress():
    batch = InMemoryDataset(rattled(bulk("Cu", cubic=True))).batch(range(12))
    assert 0.005 < stress_size(batch) < 0.05
    assert stress_size(InMemoryDataset(rattled(molecule("H2O"))).batch([0])) is None
