"""The integrators on springs, where everything is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from springs import Springs, crystal_of

from torchmdnet2.md.integrators import (
    BAR,
    DIRECTIONS,
    AtomConstants,
    Barostat,
    HostEngine,
    Langevin,
    MultipleTimeSteps,
    State,
    VelocityVerlet,
    maxwell_boltzmann,
    volume_of,
)
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


# --- constant pressure -----------------------------------------------------------------------------------------------

KELVIN, SHORT = 300.0, 20.0  # K; steps of 1 fs in which a cell relaxes


def replicas_of(num, replicas, mass=12.0):
    masses = torch.full((num * replicas, 1), mass, dtype=torch.float64)
    return AtomConstants(masses, torch.ones_like(masses), 3 * num, replicas)


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_volume_of_an_ideal_gas(kind):
    """P(V) ~ V^N exp(-PV/kT): mean and variance are N + 1, in units of kT/P."""
    num, replicas, pressure = 5, 400, 100.0
    unit = KB * KELVIN / (pressure * BAR)
    barostat = Barostat(replicas_of(num, replicas), 1.0, KELVIN, pressure, range(replicas), kind, 0.02, 1 / pressure)
    cell = (num * unit) ** (1 / 3) * torch.eye(3, dtype=torch.float64).repeat(replicas, 1, 1)
    zero, found = torch.zeros(num * replicas, 3, dtype=torch.float64), []
    state = State(zero, zero, zero, cell[:, 0, 0], torch.zeros(replicas, 1, dtype=torch.float64))
    state.cell, state.stress = cell, torch.zeros_like(cell)
    for k in range(800):
        barostat.scale(state)
        barostat.settle(state)
        state.step += 1
        if k >= 200 and k % 20 == 0:
            found.append(volume_of(cell) / unit)
    volumes = torch.stack(found)
    error = float(volumes.mean(0).std()) / math.sqrt(replicas)
    assert float(volumes.mean()) == pytest.approx(num + 1, abs=4 * error + 0.02 * num)  # Euler's step of τ/20
    assert float(volumes.var()) == pytest.approx(num + 1, rel=0.1)
    assert not state.heat.any()  # without forces a strain takes no work


def crystal_run(kind, pressure=0.0, replicas=60, timestep=1.0, steps=1200, time=0.02, **more):
    """States of a crystal of 8 atoms, 20 fs apart."""
    step, atoms = crystal_of(replicas), replicas_of(8, replicas)
    barostat = Barostat(atoms, timestep, KELVIN, pressure, range(replicas), kind, time, BAR / 0.1)
    dynamics = Langevin(atoms, timestep, KELVIN, 50.0, range(replicas), barostat, **more)
    engine = HostEngine(step, dynamics)
    state = engine.begin(maxwell_boltzmann(atoms, KELVIN, range(replicas)))
    states = [state]
    for _ in range(int(steps * timestep / 20)):
        engine.launch(int(20 / timestep))
        states.append(engine.collect())
    return atoms, step, states


# one strain or six; those between before a release: test_volume_of_an_ideal_gas has all
@pytest.mark.parametrize(
    "kind", [kind if kind in ("isotropic", "flexible") else pytest.param(kind, marks=pytest.mark.long)
             for kind in DIRECTIONS]
)  # fmt: skip
def test_cell_of_a_crystal(kind):
    """A degree of freedom of the cell has kT/2, an atom on its spring 3 kT/2; the cell does not know the springs."""
    atoms, step, states = crystal_run(kind)
    energy = torch.stack([state.energy for state in states[20:]])
    expected = (len(DIRECTIONS[kind]) + 24) / 2 * KB * KELVIN
    assert float(energy.mean()) == pytest.approx(expected, rel=0.03)
    on_springs = torch.stack([state.pos.view(60, 8, 3) - step._sites @ state.cell for state in states[20:]])
    assert 5 * float(on_springs.square().sum((2, 3)).mean()) == pytest.approx(12 * KB * KELVIN, rel=0.04)
    kelvin = [atoms.temperature(float(atoms.kinetic_energy(state.vel).mean())) for state in states[20:]]
    assert np.mean(kelvin) == pytest.approx(KELVIN, rel=0.03)


def test_volume_of_a_crystal_under_pressure():
    """Mean and variance of the distribution exp(-(U + PV)/kT), by quadrature."""
    pressure = 3e4
    _, step, states = crystal_run("isotropic", pressure)
    volumes = torch.stack([volume_of(state.cell) for state in states[20:]]).numpy()
    first = float(volume_of(step._first)[0])
    v = np.linspace(0.5, 1.5, 4001) * first
    energy = 0.5 * 0.5 * first * 3 * (((v / first) ** (2 / 3) - 1) / 2) ** 2 + pressure * BAR * v
    weight = np.exp(-(energy - energy.min()) / (KB * KELVIN))
    mean = (weight * v).sum() / weight.sum()
    width = np.sqrt((weight * (v - mean) ** 2).sum() / weight.sum())
    assert mean < 0.97 * first
    assert volumes.mean() == pytest.approx(mean, abs=0.15 * width)
    assert volumes.std() == pytest.approx(width, rel=0.06)


def test_strains_are_counted_in_the_energy_balance():
    """Total energy less heat is conserved while much energy goes in and out."""
    atoms, _, states = crystal_run("flexible", 1e4, 8, time=0.1)
    total = torch.stack([s.energy + atoms.kinetic_energy(s.vel) - s.heat.sum(1) for s in states])
    work = torch.stack([s.heat.sum(1) for s in states])
    assert float(work.std(0).min()) > 0.05
    assert float((total - total[0]).abs().max()) < 0.05 * float(work.std(0).min())


def test_without_strain_it_is_constant_volume():
    """To the last bit, where the cell is slow."""
    found = []
    for barostat in (True, False):
        step, atoms = crystal_of(3), replicas_of(8, 3)
        slow = Barostat(atoms, 1.0, KELVIN, 1.0, range(3), "flexible", 1e40) if barostat else None
        engine = HostEngine(step, Langevin(atoms, 1.0, KELVIN, 50.0, range(3), slow))
        engine.begin(maxwell_boltzmann(atoms, KELVIN, range(3)))
        engine.launch(30)
        found.append(engine.collect())
    for name in ("pos", "vel", "energy", "heat"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))
    assert found[1].cell is None and found[0].cell is not None
    torch.testing.assert_close(found[0].cell, crystal_of(3).cell, rtol=0, atol=1e-18)


def test_a_barostat_needs_the_stress():
    step, atoms = crystal_of(1), replicas_of(8, 1)
    step.stress = None
    with pytest.raises(ValueError, match="constant pressure needs a step that computes the stress"):
        HostEngine(step, Langevin(atoms, 1.0, KELVIN, 50.0, [0], Barostat(atoms, 1.0, KELVIN, 1.0, [0])))


# --- multiple time steps ---------------------------------------------------------------------------------------------


class Bound(Springs):
    """Springs of another strength, and a weak repulsion from a far point."""

    def __init__(self, pos, replicas, strength=1.0, far=0.0):
        self.strength, self.far = strength, far
        super().__init__(pos, replicas)

    def replay(self):
        d = self.pos - 4.0
        self.forces.copy_(-SPRING * self.strength * self.pos + self.far * d / (1 + d.square()).square())
        energy = 0.5 * SPRING * self.strength * self.pos.square() + 0.5 * self.far / (1 + d.square())
        self.energy.copy_(energy.view(len(self.energy), -1).sum(1))


def multiple(atoms, pos, timestep, count, strength=1.0, langevin=False):
    """Springs with a repulsion, in inner steps by springs alone; an engine."""
    step, fast = Bound(pos, 1, far=5.0), Bound(pos, 1, strength)
    inner = VelocityVerlet(atoms, timestep / count)
    if langevin:
        inner = Langevin(atoms, timestep / count, 300.0, 20.0, [1])
    return HostEngine(step, MultipleTimeSteps(inner, count, fast))


def balance(atoms, state):
    return float(state.energy + atoms.kinetic_energy(state.vel) - state.heat.sum())


def test_inner_steps_by_the_same_forces_are_short_steps():
    atoms = atoms_of([1.0, 16.0])
    pos = torch.full((2, 3), 0.1, dtype=torch.float64)
    step, fast = Bound(pos, 1, far=5.0), Bound(pos, 1, far=5.0)
    vel = maxwell_boltzmann(atoms, 300.0, [0])
    found = []
    for engine, steps in (
        (HostEngine(step, MultipleTimeSteps(Langevin(atoms, 0.25, 300.0, 20.0, [1]), 4, fast)), 25),
        (HostEngine(Bound(pos, 1, far=5.0), Langevin(atoms, 0.25, 300.0, 20.0, [1])), 100),
    ):
        engine.begin(vel)
        engine.launch(steps)
        found.append(engine.collect())
    for name in ("pos", "vel", "energy", "heat"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=1e-10, atol=1e-12)


def test_multiple_time_steps_are_reversible_and_of_second_order():
    atoms = atoms_of([1.0, 16.0])
    pos = torch.full((2, 3), 0.1, dtype=torch.float64)
    spread = []
    for timestep in (2.0, 1.0):
        engine = multiple(atoms, pos, timestep, 8, 0.9)
        states = [engine.begin(torch.zeros_like(pos))]
        for _ in range(int(400 / timestep)):
            engine.launch(1)
            states.append(engine.collect())
        energies = np.array([balance(atoms, state) for state in states])
        spread.append(energies.std())
        halves = energies[1:].reshape(2, -1).mean(1)
        assert abs(halves[1] - halves[0]) < 0.1 * spread[-1]
        back = states[-1].clone()
        back.vel.neg_()
        engine.load(back)
        engine.launch(int(400 / timestep))
        torch.testing.assert_close(engine.collect().pos, pos, rtol=0, atol=1e-11)
    assert math.log2(spread[0] / spread[1]) == pytest.approx(2, abs=0.3)


def test_multiple_time_steps_sample_the_potential_not_the_inner_one():
    """⟨½kx²⟩ of the springs, with an inner potential whose springs are 20 % weaker."""
    masses = [1.0] * 100 + [16.0] * 100
    atoms = atoms_of(masses)
    step, fast = (Bound(torch.zeros(200, 3, dtype=torch.float64), 1, strength) for strength in (1.0, 0.8))
    inner = Langevin(atoms, 0.5, 300.0, 50.0, [1])
    engine = HostEngine(step, MultipleTimeSteps(inner, 3, fast))
    engine.begin(torch.zeros_like(step.pos))
    energies = []
    for k in range(200):
        engine.launch(10)
        if (state := engine.collect()) and k >= 40:
            energies.append(float(state.energy))
    assert np.mean(energies) == pytest.approx(300 * KB * 300.0, rel=0.02)


def test_drift_is_removed_at_its_steps_whatever_the_blocks():
    atoms = replicas_of(4, 2)
    found = []
    for blocks in ([4, 4, 4], [2, 2, 4, 1, 3]):
        step = Springs(torch.ones(8, 3, dtype=torch.float64), 2)
        engine = HostEngine(step, Langevin(atoms, 0.25, 300.0, 50.0, range(2), remove_drift=4))
        engine.begin(torch.ones(8, 3, dtype=torch.float64) * 0.01)
        for steps in blocks:
            engine.launch(steps)
            state = engine.collect()
        found.append(state)
        first = float((15 * 3 * 4) + 0.5 * AMU_A2_FS2 * 12 * 12 * 0.01**2)
        now = state.energy + atoms.kinetic_energy(state.vel) - state.heat.sum(1)
        assert now.tolist() == pytest.approx([first, first], rel=1e-3)
    assert all(torch.equal(getattr(found[0], name), getattr(found[1], name)) for name in ("pos", "vel", "heat"))
    dynamics = engine.dynamics
    dynamics.begin_block(state)
    assert state.vel.view(2, 4, 3).mean(1).abs().max() < 1e-15
