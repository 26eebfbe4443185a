"""Zeros, lost digits and impossible sizes of labels."""

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from scipy.spatial.transform import Rotation

from torchmdnet2.data import InMemoryDataset, Sample, statistics
from torchmdnet2.data.label_checks import (
    bond_scale,
    net_force,
    resolution,
    shifted,
    spread_out,
    stress_size,
    turned,
    zeros,
)
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


def test_energies_of_some_are_shifted():
    """Of several compositions and charges too; isomers, ions and phases are not shifted."""
    random = np.random.default_rng(0)

    def given(shift, molecules=(molecule("H2O"), molecule("CH4")), charge=0):
        samples = []
        for k in range(40):
            atoms, high = molecules[k % 2], random.uniform() < 0.4
            system = System.from_ase(atoms).replace(charge=torch.full((1,), float(charge * high)).double())
            energy = 13.0 * len(atoms) + random.normal(0, 0.3) + shift * high
            samples.append(Sample(system, {"energy": torch.tensor([energy]).double()}))
        data = InMemoryDataset(samples)
        facts = statistics(data)
        return shifted(data.batch(np.arange(40)), facts, np.arange(40)), facts.energies

    (places, shift), energies = given(27.2)
    assert shift == pytest.approx(27.2, abs=0.5) and 8 < len(places) < 24
    water = {k for k in places.tolist() if k % 2 == 0}
    assert {k for k in range(0, 40, 2) if energies[k] > 13.0 * 3 + 13} == water
    assert given(0.0)[0] is None and given(3.0)[0] is None
    assert given(12.6, charge=1)[0] is None, "ionized"


def test_forces_that_do_not_cancel():
    samples = rattled(bulk("Cu", cubic=True))
    for sample in samples:
        sample.labels["forces"] -= sample.labels["forces"].mean(0)
    batch = InMemoryDataset(samples).batch(np.arange(12))
    assert net_force(batch)[0] < 1e-12
    for sample in samples[:7]:
        sample.labels["forces"] += torch.tensor([0.3, 0, 0])
    share, each = net_force(InMemoryDataset(samples).batch(np.arange(12)))
    assert each == pytest.approx(0.3) and 0.2 < share < 1
    for sample in samples:
        sample.labels["forces"][0] = 0  # fixed
    assert net_force(InMemoryDataset(samples).batch(np.arange(12))) is None


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


def of_molecules(count=20, pbc=False):
    """Frames of water and ethanol with forces of springs between all atoms, which have no torque."""
    random, samples = np.random.default_rng(0), []
    for k in range(count):
        atoms = molecule("CH3CH2OH" if k % 2 else "H2O", vacuum=4.0, pbc=pbc)
        atoms.positions += random.normal(0, 0.05, atoms.positions.shape)
        apart = atoms.positions[None] - atoms.positions[:, None]
        forces = (np.cos(3 * np.square(apart).sum(-1, keepdims=True)) * apart).sum(1)
        samples.append(Sample(System.from_ase(atoms), {"forces": torch.from_numpy(forces)}))
    return samples


def turn_of(degrees, axis=(1.0, 2.0, 3.0)):
    return torch.from_numpy(
        Rotation.from_rotvec(np.radians(degrees) * np.array(axis) / np.linalg.norm(axis)).as_matrix()
    )


@pytest.mark.parametrize("degrees", [20, 90, 180])
@pytest.mark.parametrize("which", [range(20), range(3, 20, 4)], ids=["all", "some"])
def test_forces_in_another_orientation(degrees, which):
    samples, chosen = of_molecules(), 100 + np.arange(20)
    assert turned(InMemoryDataset(samples).batch(np.arange(20)), chosen) is None
    for k in which:
        samples[k].labels["forces"] = samples[k].labels["forces"] @ turn_of(degrees)
    places, size = turned(InMemoryDataset(samples).batch(np.arange(20)), chosen)
    assert set(places) <= {100 + k for k in which} and len(places) > 0.6 * len(which) and 0.03 < size < 1.5


def test_no_torque_is_asked_of_cells_fixed_atoms_and_single_frames():
    def found(samples):
        for sample in samples:
            sample.labels["forces"] = sample.labels["forces"] @ turn_of(40)
        return turned(InMemoryDataset(samples).batch(np.arange(len(samples))), np.arange(len(samples)))

    assert found(of_molecules()) is not None and found(of_molecules(2)) is not None
    assert found(of_molecules(pbc=True)) is None
    fixed = of_molecules()
    for sample in fixed:
        sample.labels["forces"][0] = 0
    assert found(fixed) is None
    offset = of_molecules()
    for sample in offset:
        sample.labels["forces"] += 0.3
    assert turned(InMemoryDataset(offset).batch(np.arange(20)), np.arange(20)) is None, "a sum, not a torque"
