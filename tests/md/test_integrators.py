"""The integrators on springs, where everything is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchmdnet2.md.integrators import AtomConstants, Langevin, State, VelocityVerlet, maxwell_boltzmann
from torchmdnet2.units import AMU_A2_FS2, KB

SPRING = 30.0  # eV/Å²


def springs(pos):
    return 0.5 * SPRING * pos.square().sum(), -SPRING * pos


def atoms_of(masses, fixed=()):
    mobile = torch.ones(len(masses), 1, dtype=torch.float64)
    mobile[list(fixed)] = 0
    return AtomConstants(torch.tensor(masses, dtype=torch.float64)[:, None], mobile, dof=3 * (len(masses) - len(fixed)))


def start(atoms, displacement=0.1):
    pos = torch.full((len(atoms.masses), 3), displacement, dtype=torch.float64)
    energy, forces = springs(pos)
    return State(pos, torch.zeros_like(pos), forces, energy[None], torch.zeros(1, 1, dtype=torch.float64))


def step(dynamics, state):
    dynamics.open(state)
    energy, forces = springs(state.pos)
    state.energy.copy_(energy)
    state.forces.copy_(forces)
    dynamics.close(state)


def total(atoms, state):
    return float(state.energy + atoms.kinetic_energy(state.vel) - state.heat.sum())


def test_period_of_an_oscillator():
    """Units of mass, time and energy together: the period is 2π sqrt(m/k)."""
    mass = 12.0
    period = 2 * math.pi * math.sqrt(mass * AMU_A2_FS2 / SPRING)
    atoms = atoms_of([mass])
    state = start(atoms)
    steps = 2000
    dynamics = VelocityVerlet(atoms, period / steps)
    for _ in range(steps):
        step(dynamics, state)
    assert state.step == steps
    torch.testing.assert_close(state.pos, torch.full_like(state.pos, 0.1), rtol=1e-5, atol=0)
    assert state.vel.abs().max() < 1e-6


def test_energy_error_is_second_order_and_does_not_grow():
    """Bar R10: the fluctuation of the energy goes as the square of the time step."""
    atoms = atoms_of([1.0, 16.0])
    spread = []
    for timestep in (0.4, 0.2):
        state = start(atoms)
        dynamics = VelocityVerlet(atoms, timestep)
        energies = []
        for _ in range(int(400 / timestep)):
            step(dynamics, state)
            energies.append(total(atoms, state))
        spread.append(np.std(energies))
        halves = np.array(energies[: len(energies) // 2 * 2]).reshape(2, -1).mean(1)
        assert abs(halves[1] - halves[0]) < 0.1 * spread[-1]
    assert math.log2(spread[0] / spread[1]) == pytest.approx(2, abs=0.2)


def test_reversible():
    atoms = atoms_of([1.0, 16.0])
    state = start(atoms)
    begin = state.clone()
    dynamics = VelocityVerlet(atoms, 0.5)
    for _ in range(100):
        step(dynamics, state)
    state.vel.neg_()
    for _ in range(100):
        step(dynamics, state)
    torch.testing.assert_close(state.pos, begin.pos, rtol=0, atol=1e-12)


@pytest.mark.parametrize("friction", [20.0, 200.0])
def test_langevin_samples_the_canonical_ensemble(friction):
    """⟨½kx²⟩ = ½k_B T for each coordinate, exactly so for BAOAB at any time step; kinetic energy nearly."""
    temperature = 400.0
    atoms = atoms_of([1.0] * 100 + [16.0] * 100)
    state = start(atoms, 0.0)
    dynamics = Langevin(atoms, 1.0, temperature, friction, seeds=[1])
    potential, kinetic = [], []
    for k in range(6000):
        step(dynamics, state)
        if k >= 1000:
            potential.append(float(state.energy))
            kinetic.append(float(atoms.kinetic_energy(state.vel)))
    expected = 0.5 * 600 * KB * temperature
    assert np.mean(potential) == pytest.approx(expected, rel=0.02)
    assert atoms.temperature(np.mean(kinetic)) == pytest.approx(temperature, rel=0.04)
    # the spread of an average over 600 degrees of freedom, from samples that are 10 steps apart
    assert np.std(kinetic[::10]) == pytest.approx(math.sqrt(2 / 600) * np.mean(kinetic), rel=0.15)
    assert np.std(potential[::10]) == pytest.approx(math.sqrt(2 / 600) * expected, rel=0.25)


def test_velocities_of_langevin_dynamics_are_maxwells():
    """Moments of 300 frames of 300 atoms that are free, 40 steps of a time constant of 10 apart."""
    temperature = 250.0
    atoms = atoms_of([1.0] * 150 + [16.0] * 150)
    state = start(atoms, 0.0)
    dynamics = Langevin(atoms, 1.0, temperature, 100.0, seeds=[2])
    frames = []
    for k in range(12400):
        dynamics.open(state)
        dynamics.close(state)
        if k >= 400 and k % 40 == 0:
            frames.append(state.vel / (KB * temperature / (AMU_A2_FS2 * atoms.masses)).sqrt())
    x = torch.stack(frames).numpy()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 4 * math.sqrt(variance / x.size)
    per_frame = (x**2).sum((1, 2))  # chi-squared with 900 degrees of freedom
    assert per_frame.std() == pytest.approx(math.sqrt(2 * 900), rel=4 / math.sqrt(2 * len(x)))


def test_heat_makes_the_energy_balance_close():
    """Total energy less heat is conserved, as well as without a bath."""
    atoms = atoms_of([1.0, 16.0, 12.0])
    state = start(atoms)
    first = total(atoms, state)
    dynamics = Langevin(atoms, 0.05, 300.0, 50.0, seeds=[3])
    for _ in range(2000):
        step(dynamics, state)
    assert abs(float(state.heat.sum())) > 0.05
    assert total(atoms, state) == pytest.approx(first, abs=2e-3)


def test_fixed_atoms_stay():
    atoms = atoms_of([1.0, 16.0], fixed=[1])
    for dynamics in (VelocityVerlet(atoms, 0.5), Langevin(atoms, 0.5, 300.0, 10.0, seeds=[0])):
        state = start(atoms)
        for _ in range(20):
            step(dynamics, state)
        assert torch.equal(state.pos[1], torch.full((3,), 0.1, dtype=torch.float64))
        assert (state.pos[0] != 0.1).all()


def test_maxwell_boltzmann():
    atoms = atoms_of([1.0] * 2000 + [16.0] * 2000)
    vel = maxwell_boltzmann(atoms, 300.0, seeds=[5])
    assert torch.equal(vel, maxwell_boltzmann(atoms, 300.0, seeds=[5]))
    assert not torch.equal(vel, maxwell_boltzmann(atoms, 300.0, seeds=[6]))
    assert (atoms.masses * vel).sum(0).abs().max() < 1e-10
    for part in (slice(0, 2000), slice(2000, 4000)):  # equipartition over light and heavy
        energy = 0.5 * AMU_A2_FS2 * (atoms.masses[part] * vel[part].square()).sum()
        assert float(energy) / (1.5 * 2000 * KB) == pytest.approx(300.0, rel=0.05)
    assert not maxwell_boltzmann(atoms, 0.0, seeds=[5]).any()
    assert maxwell_boltzmann(atoms_of([1.0]), 300.0, seeds=[0]).any()  # one atom keeps its momentum
