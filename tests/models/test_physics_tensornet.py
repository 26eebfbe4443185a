"""Physics of TensorNet beyond the conformance checks: bars R2, R4, R5, R7, R9, R18, R19."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.fd import FiniteDifferenceCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from tiny import ELEMENTS, REFERENCES, chiral, ethanol, silicon, tiny_potential

from torchmdnet2 import System
from torchmdnet2.testing import example_systems

POTENTIALS = {kind: tiny_potential(kind) for kind in ("o3", "so3")}


@pytest.fixture(params=POTENTIALS)
def potential(request):
    return POTENTIALS[request.param]


def energy(potential, atoms) -> float:
    return float(potential(System.from_ase(atoms), forces=False).energy)


class EnergyOnly(Calculator):
    """Gives ASE the energy alone, so that ASE differentiates it by itself."""

    implemented_properties = ["energy", "free_energy"]  # noqa: RUF012

    def __init__(self, potential):
        super().__init__()
        self.potential = potential

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        self.results = dict.fromkeys(self.implemented_properties, energy(self.potential, self.atoms))


def test_stress_is_that_of_ase(potential):
    """Bar R2: sign, units and Voigt order are ASE's; R1: so are the forces."""
    atoms = silicon()
    skew = np.array([[0, 0.1, 0.2], [0.15, 0, -0.1], [0, 0.05, 0.1]])
    atoms.set_cell(atoms.cell.array + skew, scale_atoms=True)
    ours = potential(System.from_ase(atoms), stress=True)
    voigt = full_3x3_to_voigt_6_stress(ours.stress[0].numpy())
    atoms.calc = FiniteDifferenceCalculator(EnergyOnly(potential), eps_disp=1e-4, eps_strain=1e-5)
    assert np.abs(voigt - atoms.get_stress()).max() <= 1e-6 * np.abs(voigt).max()
    assert len(set(np.round(voigt, 5))) == 6, "the test needs six different components"
    assert np.abs(ours.forces.numpy() - atoms.get_forces()).max() <= 1e-6


def test_stretched_crystal_has_tensile_stress():
    """Positive stress pulls the cell together: dE/dV > 0."""
    potential = POTENTIALS["o3"]
    atoms = silicon()
    larger = atoms.copy()
    larger.set_cell(atoms.cell.array * 1.0001, scale_atoms=True)
    slope = (energy(potential, larger) - energy(potential, atoms)) / (larger.get_volume() - atoms.get_volume())
    stress = potential(System.from_ase(atoms), stress=True).stress[0]
    assert np.sign(float(stress.trace())) == np.sign(slope)
    assert float(stress.trace()) / 3 == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("repeat", [(2, 1, 1), (2, 2, 2), (1, 3, 2)])
def test_supercell_has_the_same_energy_per_atom(potential, repeat):
    """Bar R7: 1e-8 eV per atom; the primitive cell is narrower than the cutoff."""
    atoms = silicon()
    one, many = (potential(System.from_ase(a), stress=True) for a in (atoms, atoms * repeat))
    copies = int(np.prod(repeat))
    assert abs(float(many.energy) / copies - float(one.energy)) / len(atoms) <= 1e-8
    assert (many.forces - one.forces.repeat(copies, 1)).abs().max() <= 1e-8
    assert (many.stress - one.stress).abs().max() <= 1e-8


@pytest.mark.parametrize("basis", [[[1, 0, 0], [3, 1, 0], [-2, 1, 1]], [[0, 1, 0], [1, 0, 0], [1, 1, 1]]])
def test_other_basis_of_the_same_lattice(potential, basis):
    """Bar R7: an integer change of the lattice vectors describes the same crystal."""
    atoms = silicon()
    other = atoms.copy()
    other.set_cell(np.array(basis) @ atoms.cell.array)
    assert abs(energy(potential, other) - energy(potential, atoms)) / len(atoms) <= 1e-8


def test_far_molecules_add(potential):
    """Bar R5."""
    a, b = ethanol(), chiral()
    both = a.copy()
    moved = b.copy()
    moved.positions += [200.0, 50.0, 0.0]
    both += moved
    assert abs(energy(potential, both) - energy(potential, a) - energy(potential, b)) <= 1e-10


def test_atom_far_from_a_molecule_adds_its_reference(potential):
    """Bar R9."""
    atoms = ethanol()
    with_atom = atoms.copy()
    with_atom.append("Si")
    with_atom.positions[-1] = [0, 0, 80.0]
    assert abs(energy(potential, with_atom) - energy(potential, atoms) - REFERENCES[14]) <= 1e-10


@pytest.mark.parametrize("kind", ["o3", "so3"])
def test_rotation_in_float32(kind):
    """Bar R4: 1e-5 relative, references left out so that they do not hide the network."""
    potential = tiny_potential(kind, torch.float32, priors=[])
    rng = np.random.default_rng(0)
    atoms = ethanol()
    system = System.from_ase(atoms, dtype=torch.float32)
    before = potential(system)
    for _ in range(10):
        q, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        q = torch.tensor(q * np.linalg.det(q), dtype=torch.float32)
        after = potential(system.replace(pos=system.pos @ q))
        assert abs(float(after.energy / before.energy) - 1) <= 1e-5
        assert (after.forces - before.forces @ q).abs().max() <= 1e-4


def test_charge_changes_the_energy(potential):
    system = System.from_ase(ethanol())
    energies = [float(potential(system.replace(charge=torch.tensor([q]))).energy) for q in (-1.0, 0.0, 1.0)]
    assert min(abs(a - b) for a, b in itertools.pairwise(energies)) > 1e-3


def test_float32_with_large_references():
    """Bar R18: 1,000 atoms with −1e6 eV of references; the total is wrong by at most 1e-3 eV, forces by 1e-4 eV/Å."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(10)] * 3), -1).reshape(-1, 3) * 1.9
    z = torch.tensor(rng.choice(ELEMENTS[:3], 1000))
    pos = torch.tensor(grid + rng.uniform(-0.2, 0.2, grid.shape))
    priors = [{"name": "atomref", "energies": dict.fromkeys(ELEMENTS, -1000.0123), "max_z": 20}]
    system = System(z=z, pos=pos, cell=19.0 * torch.eye(3, dtype=torch.float64))
    exact = tiny_potential(priors=priors)(system)
    single = tiny_potential(priors=priors, dtype=torch.float32)
    assert float(exact.energy) < -9e5
    for given in (system, system.to(dtype=torch.float32)):
        result = single(given)
        assert result.energy.dtype == torch.float64
        assert abs(float(result.energy - exact.energy)) <= 1e-3
        assert (result.forces - exact.forces).abs().max() <= 1e-4


def test_same_input_same_bits(potential):
    """Bar R19."""
    batch = System.concatenate(list(example_systems(ELEMENTS).values())[:4])
    first, second = potential(batch, stress=False), potential(batch, stress=False)
    assert torch.equal(first.energy, second.energy) and torch.equal(first.forces, second.forces)
