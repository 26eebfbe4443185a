"""Forces of the wrong sign or unit are told from right ones, and nothing is said where it cannot be known."""

import dataclasses

import numpy as np
import pytest
import torch

from torchmdnet2.data import InMemoryDataset, Sample, statistics
from torchmdnet2.data.label_checks import Agreement, agreement, stress_agreement
from torchmdnet2.system import System

PLACE = np.array([[0.0, 0, 0], [1.1, 0, 0], [-0.4, 1.0, 0], [0, 0.3, 1.4], [-0.5, -0.9, 0.8]])
DISTANCES = np.linalg.norm(PLACE[:, None] - PLACE, axis=2)


def springs(pos):
    """Energy, eV, and forces, eV/Å, of springs between all atoms."""
    delta = pos[:, None] - pos
    distance = np.linalg.norm(delta, axis=2) + np.eye(5)
    stretch = 8.0 * (distance - np.eye(5) - DISTANCES)
    return (stretch**2).sum() / 32.0, -(stretch[:, :, None] * delta / distance[:, :, None]).sum(1)


def harmonic(count=40, turned=True, force=1.0, energy=1.0, cell=None):
    """Frames of a molecule, anywhere and turned at random, or of a crystal."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        pos = PLACE + rng.normal(0, 0.05, (5, 3))
        value, forces = springs(pos)
        lattice = {}
        if turned:
            rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            rotation *= np.sign(np.linalg.det(rotation))
            pos, forces = pos @ rotation + 5 * rng.normal(size=3), forces @ rotation
        if cell is not None:  # atoms anywhere in it
            pos = pos + rng.integers(-2, 3, (5, 3)) * cell
            lattice = {"cell": cell * torch.eye(3).double()[None], "pbc": torch.ones(1, 3, dtype=torch.bool)}
        labels = {"energy": torch.tensor([energy * (value - 1000.0)]), "forces": torch.tensor(force * forces)}
        samples.append(Sample(System(z=torch.tensor([6, 1, 1, 8, 1]), pos=torch.tensor(pos), **lattice), labels))
    return samples


def found(samples):
    data = InMemoryDataset(samples)
    return agreement(data, np.arange(len(data)), statistics(data))


@pytest.mark.parametrize("options", [{}, {"turned": False}, {"turned": False, "cell": 9.0}])
def test_right_labels_agree(options):
    result = found(harmonic(**options))
    assert abs(result.slope - 1) < 0.1 and result.correlation > 0.9 and result.fault is None


def test_gradients_are_noticed():
    result = found(harmonic(force=-1.0))
    assert abs(result.slope + 1) < 0.1 and "gradients" in result.fault


@pytest.mark.parametrize(
    ("options", "ratio"), [({"energy": 23.06}, 23.06), ({"force": 51.42}, 1 / 51.42), ({"force": 1.89}, 1 / 1.89)]
)
def test_other_units_are_noticed(options, ratio):
    result = found(harmonic(**options))
    assert abs(result.slope / ratio - 1) < 0.1 and "units" in result.fault


def test_the_most_frequent_molecule_is_looked_at():
    others = [
        dataclasses.replace(s, system=s.system.replace(z=torch.tensor([7, 1, 1, 1, k + 9])))
        for k, s in enumerate(harmonic(20, force=-1.0))
    ]
    mixed = others + harmonic(12)
    assert found(mixed).slope > 0.8


@pytest.mark.parametrize("count", [1, 7])
def test_few_frames_say_nothing(count):
    assert found(harmonic(count)) is None


def test_frames_that_are_not_near_say_nothing():
    rng, samples = np.random.default_rng(4), []
    for sample in harmonic(20):
        pos = sample.system.pos.numpy()
        far = torch.tensor(pos + rng.normal(0, 1.0, pos.shape))
        samples.append(Sample(sample.system.replace(pos=far), sample.labels))
    assert found(samples) is None


def test_missing_or_constant_labels_say_nothing():
    samples = harmonic(20)
    for sample in samples:
        sample.labels["forces"][0] = torch.nan
    assert found(samples) is None
    assert found([Sample(s.system, {"energy": s.labels["energy"]}) for s in samples]) is None
    assert found([Sample(s.system, {k: 0 * v for k, v in s.labels.items()}) for s in harmonic(20)]) is None
    atom = System(z=torch.tensor([2]), pos=torch.zeros(1, 3).double())
    labels = {"energy": torch.zeros(1).double(), "forces": torch.zeros(1, 3).double()}
    assert found([Sample(atom, labels)] * 20) is None


def test_labels_that_do_not_correlate():
    """Of a few frames they say nothing; of many, that energies or forces are noise."""
    assert Agreement(-40.0, -0.2).fault is None and Agreement(0.01, 0.3).fault is None
    assert "not correlated" in Agreement(0.01, 0.3, pairs=20).fault
    noisy = harmonic(60)
    for sample, error in zip(noisy, np.random.default_rng(3).normal(0, 0.5, 60), strict=True):
        sample.labels["energy"] += error
    assert "and not correlated: are all of one method" in found(noisy).fault


def test_small_factors_are_told_from_near_frames_alone():
    assert Agreement(0.53, 0.9).fault is not None and Agreement(0.53, 0.8).fault is None
    assert Agreement(0.53, 0.99, "stresses").fault is not None and Agreement(0.53, 0.9, "stresses").fault is None


def strained(count=30, sign=1.0, size=1.0):
    """Frames of a Lennard-Jones crystal in cells of different shape."""
    from ase.build import bulk
    from ase.calculators.lj import LennardJones

    rng = np.random.default_rng(1)
    samples = []
    for _ in range(count):
        atoms = bulk("Ar", cubic=True, a=5.3)
        atoms.set_cell(atoms.cell @ (np.eye(3) + rng.normal(0, 0.01, (3, 3))), scale_atoms=True)
        atoms.positions += rng.normal(0, 0.02, (4, 3))
        atoms.calc = LennardJones(sigma=3.4, epsilon=0.01, rc=7.0, smooth=True)
        stress = torch.tensor(sign * size * atoms.get_stress(voigt=False))[None]
        labels = {
            "energy": torch.tensor([atoms.get_potential_energy()]),
            "forces": torch.tensor(atoms.get_forces()),
            "stress": stress,
        }
        samples.append(Sample(System.from_ase(atoms), labels))
    return samples


def found_stress(samples):
    data = InMemoryDataset(samples)
    return stress_agreement(data, np.arange(len(data)), statistics(data))


def test_stress_of_the_right_and_the_wrong_sign_and_unit():
    right = found_stress(strained())
    assert abs(right.slope - 1) < 0.15 and right.correlation > 0.9 and right.fault is None
    assert "stresses have the wrong sign" in found_stress(strained(sign=-1.0)).fault
    assert "follow from the stresses: are the units right" in found_stress(strained(size=160.2)).fault


def test_stress_of_molecules_or_one_cell_says_nothing():
    assert found_stress(harmonic()) is None
    crystal = harmonic(turned=False, cell=9.0)
    for sample in crystal:
        sample.labels["stress"] = torch.eye(3).double()[None]
    assert found_stress(crystal) is None
