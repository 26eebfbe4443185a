"""Molecular dynamics in CUDA graphs (issue: `md` resident on the GPU): R16 (replay = steps one by one), R8 (room for
edges), R10 (drift), R11 (only finite frames), R19 and R20 (restarts to the bit), Langevin's statistics."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.bound import ReferenceBoundStep
from torchmdnet2.md import MDOptions, Unphysical, run_md
from torchmdnet2.md.integrators import (
    AtomConstants,
    Barostat,
    HostEngine,
    Langevin,
    MultipleTimeSteps,
    VelocityVerlet,
    maxwell_boltzmann,
)
from torchmdnet2.md.run import Simulation
from torchmdnet2.md.setup import make_engine
from torchmdnet2.units import KB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def make(energy_scale, layers=2):
    """Random weights, so that atoms stay apart only as long as they are slow."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = {
            "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": layers, "num_rbf": 16, "cutoff": 5.0},
            "elements": [1, 6, 7, 8],
            "energy_scale": energy_scale,
        }
        return Potential.from_config(config).eval()


@pytest.fixture(scope="module")
def potential():
    return make(0.05).cuda()


def lattice(side, spacing, symbol="C", jitter=0.0):
    rng = np.random.default_rng(0)
    pos = spacing * np.array(list(itertools.product(range(side), repeat=3)), dtype=float)
    return Atoms(f"{symbol}{side**3}", pos - pos.mean(0) + jitter * rng.normal(size=pos.shape))


def atom_constants(frame, replicas=1):
    masses = torch.tensor(frame.get_masses(), dtype=torch.float64)[:, None].repeat(replicas, 1).cuda()
    return AtomConstants(masses, torch.ones_like(masses), 3 * len(frame), replicas)


@pytest.mark.parametrize("frame", [molecule("CH3CH2OH"), lattice(9, 2.4, jitter=0.1)], ids=["9", "729"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_graph_of_steps_is_the_loop_of_steps(potential, frame, replicas):
    """R16: positions and velocities after 47 steps, constant energy to the last bit, Langevin to rounding."""
    atoms = atom_constants(frame, replicas)
    system = System.from_ase([frame] * replicas, device="cuda")
    vel = maxwell_boltzmann(atoms, 300.0, range(replicas))
    for dynamics in (VelocityVerlet(atoms, 0.5), Langevin(atoms, 0.5, 300.0, 10.0, range(5, 5 + replicas))):
        graphed = make_engine(potential, system, dynamics, 10)
        assert graphed.ahead == 1
        loop = HostEngine(Evaluator(potential, graphs=False).bind(system), dynamics)
        for engine in (graphed, loop):
            engine.begin(vel)
            engine.launch(23)
            engine.launch(24)
            assert engine.collect().step == 23
        state, expected = graphed.collect(), loop.collect()
        assert state.step == expected.step == 47 and graphed.captures == 2
        for name, value in state.tensors().items():
            other = getattr(expected, name)
            if name == "heat":
                torch.testing.assert_close(value.sum(1), other.sum(1), rtol=1e-9, atol=1e-9)
            elif isinstance(dynamics, Langevin):
                torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-6)
            else:
                assert torch.equal(value, other), name
        assert graphed.check()


def crystal(side, spacing, symbol="C", jitter=0.0):
    frame = lattice(side, spacing, symbol, jitter)
    frame.set_cell(side * spacing * np.array([[1, 0, 0], [0.1, 1, 0], [0, 0.1, 1]]), scale_atoms=False)
    frame.pbc = True
    return frame


@pytest.mark.parametrize("side", [3, 9])
@pytest.mark.parametrize("kind", ["isotropic", "flexible"])
@pytest.mark.parametrize("inner", [False, True])
def test_graph_of_steps_at_constant_pressure(potential, side, kind, inner):
    """Strains, work, inner steps: those of the integrators on the same kernels. The cell grows: if it shrank, the list
    of neighbors would overflow, and results would be NaN until `check`."""
    replicas = 2
    frame = crystal(side, 2.4, jitter=0.1)
    atoms = atom_constants(frame, replicas)
    system = System.from_ase([frame] * replicas, device="cuda")
    vel = maxwell_boltzmann(atoms, 300.0, range(replicas))

    def dynamics():
        barostat = Barostat(atoms, 1.0, 300.0, -2e4, [1, 2], kind, 0.1, 1e-5)
        return Langevin(atoms, 0.5 if inner else 1.0, 300.0, 10.0, [5, 6], barostat, remove_drift=23)

    weak = make(0.03).cuda() if inner else None
    graphed = make_engine(potential, system, dynamics(), 10, weak, 2)
    assert graphed.ahead == 1
    other = dynamics()
    if inner:
        other = MultipleTimeSteps(other, 2, Evaluator(weak, graphs=False).bind(system, stress=False))
    loop = HostEngine(Evaluator(potential, graphs=False).bind(system, stress=True), other)
    for engine in (graphed, loop):
        engine.begin(vel)
        engine.launch(23)
        engine.launch(24)
        engine.collect()
    state, expected = graphed.collect(), loop.collect()
    for name, value in state.tensors().items():
        theirs = getattr(expected, name)
        value, theirs = (value.sum(1), theirs.sum(1)) if name == "heat" else (value, theirs)
        torch.testing.assert_close(value, theirs, rtol=1e-6, atol=1e-5)
    assert not torch.allclose(state.cell.cpu(), system.cell.cpu(), rtol=1e-3)
    assert graphed.check()


@pytest.mark.parametrize("side", [3, 9])
def test_a_cell_that_shrinks(tmp_path, side):
    """To twice the neighbors, few atoms to below the cutoff: the last frame has energy and stress of the model."""
    weak = make(1e-4, 1)
    frame = crystal(side, 4.0, "H")
    o = MDOptions(
        200, ensemble="npt", temperature=5, pressure=25, barostat_time=0.02, barostat_compressibility=4e-2, every=50,
        output=f"{tmp_path}/s.traj",
    )  # fmt: skip
    result = run_md(copy.deepcopy(weak), frame, o, device="cuda")
    assert result.rows[-1].volume_A3 < 0.7 * result.rows[0].volume_A3
    last = System.from_ase(read(tmp_path / "s.traj", -1))
    exact = copy.deepcopy(weak).double()(last.to(dtype=torch.float64), forces=True, stress=True)
    assert result.rows[-1].potential_eV == pytest.approx(float(exact.energy), abs=1e-6 * len(frame))
    found = result.atoms.calc.results["stress"]
    assert found[:3] == pytest.approx(exact.stress[0].diagonal().tolist(), abs=1e-7)


def test_a_cell_that_grows(tmp_path):
    """Beyond what the mesh of the Ewald sum holds: the last frame has the energy and stress of the potential."""
    config = {
        **make(1e-4, 1).config,
        "priors": [{"name": "coulomb", "charges": {"H": 0.01, "C": -0.01}, "method": "pme", "cutoff": 6.0}],
    }
    weak = Potential.from_config(config).eval()
    frame = crystal(4, 2.6)
    frame.symbols[::2] = "H"
    o = MDOptions(
        40, ensemble="npt", temperature=5, pressure=-200, barostat_time=0.02, barostat_compressibility=4e-3, every=10,
        barostat="anisotropic", output=f"{tmp_path}/g.traj",
    )  # fmt: skip
    result = run_md(copy.deepcopy(weak), frame, o, device="cuda")
    assert result.rows[-1].volume_A3 > 1.5 * result.rows[0].volume_A3
    last = System.from_ase(read(tmp_path / "g.traj", -1))
    exact = copy.deepcopy(weak).double()(last.to(dtype=torch.float64), forces=True, stress=True)
    assert result.rows[-1].potential_eV == pytest.approx(float(exact.energy), abs=2e-5)
    found = result.atoms.calc.results["stress"]
    assert found[:3] == pytest.approx(exact.stress[0].diagonal().tolist(), abs=1e-7)


@pytest.mark.parametrize("periodic", [False, True])
def test_inner_springs_in_the_graph(potential, tmp_path, periodic):
    """The same run as on the CPU, where the springs are PyTorch."""
    frame = molecule("CH3CH2OH", cell=[7, 7, 7], pbc=True) if periodic else molecule("CH3CH2OH")
    ensemble = "npt" if periodic else "nve"
    o = {
        name: MDOptions(
            40, timestep=1.0, ensemble=ensemble, temperature=50, every=20, inner_steps=4, output=f"{tmp_path}/{name}"
        )
        for name in ("here", "there")
    }
    here = run_md(copy.deepcopy(potential), frame, o["here"], device="cuda", inner="springs")
    there = run_md(copy.deepcopy(potential).cpu(), frame, o["there"], inner="springs")
    np.testing.assert_allclose(here.atoms.positions, there.atoms.positions, atol=1e-4)
    np.testing.assert_allclose(here.atoms.cell, there.atoms.cell, atol=1e-5)
    for a, b in zip(here.rows, there.rows, strict=True):
        assert a.conserved_eV == pytest.approx(b.conserved_eV, abs=1e-4)


def test_models_without_fused_kernels(tmp_path):
    """R16 for autograd in a graph of its own, between launches of the integrator."""
    frame = molecule("CH3CH2OH")
    atoms, system = atom_constants(frame), System.from_ase(frame, device="cuda")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = {
            "name": "graph_network",
            "hidden_channels": 16,
            "num_layers": 1,
            "num_rbf": 8,
            "cutoff": 4.0,
            "aggregation": "mean",
        }
        potential = Potential.from_config({"model": model, "energy_scale": 0.05}).eval().requires_grad_(False).cuda()
    dynamics, vel = VelocityVerlet(atoms, 0.5), maxwell_boltzmann(atoms, 50.0, [0])
    found = []
    for engine in (
        make_engine(potential, system, dynamics, 10),
        HostEngine(ReferenceBoundStep(potential, system, False), dynamics),
    ):
        engine.begin(vel)
        engine.prepare()
        engine.launch(23)
        found.append(engine.collect())
        assert engine.check()
        assert engine.ahead == (1 if len(found) == 1 else 0)
    torch.testing.assert_close(found[0].pos, found[1].pos, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0].vel, found[1].vel, rtol=0, atol=1e-7)


def test_same_as_on_the_cpu(potential, tmp_path):
    """R15 over 100 steps: constant energy and Langevin, noise included, float32 against float32."""
    frame = molecule("CH3CH2OH")
    for ensemble, friction in (("nve", None), ("nvt", 10.0)):
        options = MDOptions(
            100, ensemble=ensemble, temperature=50, every=25, output=f"{tmp_path}/{ensemble}", friction=friction
        )
        here = run_md(potential, frame, options, device="cuda")
        there = run_md(potential.cpu(), frame, options)
        potential.cuda()
        np.testing.assert_allclose(here.atoms.positions, there.atoms.positions, atol=2e-5)
        np.testing.assert_allclose(here.atoms.get_momenta(), there.atoms.get_momenta(), atol=2e-4)
        for a, b in zip(here.rows, there.rows, strict=True):
            assert a.conserved_eV == pytest.approx(b.conserved_eV, abs=1e-5)


@pytest.mark.parametrize("ensemble", ["nve", "nvt", "npt", "npt, inner"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_restart_is_bitwise(potential, tmp_path, ensemble, replicas):
    """R19 and R20: 37 + 53 steps are 90 steps."""
    ensemble, *inner = ensemble.split(", ")
    frame = (crystal if ensemble == "npt" else lattice)(2, 2.6, jitter=0.05)
    for name, parts in (("once", [90]), ("twice", [37, 90])):
        for k, steps in enumerate(parts):
            o = MDOptions(
                steps,
                ensemble=ensemble,
                temperature=30,
                every=15,
                restart=k > 0,
                replicas=replicas,
                output=f"{tmp_path}/{name}.traj",
                inner_steps=2 if inner else None,
            )
            result = run_md(potential, frame, o, device="cuda", inner=make(0.04) if inner else None)
        assert result.rows[-1].step == 90
    number = [""] if replicas == 1 else [f".{k}" for k in range(replicas)]
    for k in number:
        once, twice = (read(tmp_path / f"{name}{k}.traj", -1) for name in ("once", "twice"))
        assert np.array_equal(once.positions, twice.positions)
        assert np.array_equal(once.get_momenta(), twice.get_momenta())
        assert np.array_equal(once.cell.array, twice.cell.array)
        last = [(tmp_path / f"{name}{k}.csv").read_text().splitlines()[-1] for name in ("once", "twice")]
        assert last[0] == last[1]


def test_replicas_are_separate_runs(potential, tmp_path):
    """R5: a batch of four is four singles."""
    frame = lattice(2, 2.6, jitter=0.05)
    together = run_md(
        potential, frame, MDOptions(60, temperature=30, replicas=4, every=20, output=f"{tmp_path}/r"), device="cuda"
    )
    for k, replica in enumerate(together.replicas):
        alone = run_md(
            potential, frame, MDOptions(60, temperature=30, seed=k, every=20, output=f"{tmp_path}/a"), device="cuda"
        )
        np.testing.assert_allclose(replica.atoms.positions, alone.atoms.positions, atol=1e-5)
        assert replica.rows[-1].temperature_K == pytest.approx(alone.rows[-1].temperature_K, rel=1e-4)


def test_more_room_in_the_middle(potential, tmp_path):
    """R8: atoms that fly together; several times more edges than there was room for; the run goes on as on the CPU."""
    weak = make(1e-3)
    frame = lattice(4, 4.4)
    frame.set_velocities(-0.0025 * frame.positions / 0.0982269478)  # halfway to the centre in 200 fs
    captures = []

    class Watched(Simulation):
        def run(self):
            result = super().run()
            captures.append((self.engine.captures, self.engine.step.capacity))
            return result

    o = MDOptions(160, timestep=1.0, every=40, output=f"{tmp_path}/g")
    simulation = Watched((copy.deepcopy(weak).to("cuda"), None), frame, o, None, None, None)
    first = simulation.engine.step.capacity
    here = simulation.run()
    assert captures[0][0] >= 2 and captures[0][1] > 1.5 * first
    there = run_md(weak, frame, MDOptions(160, timestep=1.0, every=40, output=f"{tmp_path}/c"))
    np.testing.assert_allclose(here.atoms.positions, there.atoms.positions, atol=2e-5)
    assert [r.step for r in here.rows] == [r.step for r in there.rows] == [0, 40, 80, 120, 160]
    assert here.rows[-1].conserved_eV == pytest.approx(there.rows[-1].conserved_eV, abs=1e-5)


def test_langevin_distribution(tmp_path):
    """Hardly any forces: velocities are Maxwell's, kinetic energies have the mean and the spread of a canonical
    ensemble; 120 rows of 8 replicas, independent after 20 steps of a time constant of 5."""
    temperature = 400.0
    frame = lattice(5, 30.0, "H")
    o = MDOptions(
        2500, timestep=2.0, ensemble="nvt", temperature=temperature, friction=100.0, every=20, replicas=8,
        output=f"{tmp_path}/t", trajectories=(f"{tmp_path}/t.traj",),
    )  # fmt: skip
    result = run_md(make(1e-9), frame, o, device="cuda")
    kinetic = np.array([row.kinetic_eV for replica in result.replicas for row in replica.rows[6:]])
    degrees, samples = 3 * len(frame), len(kinetic)
    mean = 0.5 * degrees * KB * temperature
    spread = mean * math.sqrt(2 / degrees)
    assert samples == 8 * 120
    assert abs(kinetic.mean() - mean) < 4 * spread / math.sqrt(samples)
    assert kinetic.std() == pytest.approx(spread, rel=4 / math.sqrt(2 * samples))
    frames = read(tmp_path / "t.3.traj", "6:")
    unit = np.concatenate([f.get_velocities().ravel() for f in frames])
    unit /= math.sqrt(KB * temperature / frames[0].get_masses()[0])
    assert len(unit) == 120 * degrees
    assert abs(unit.mean()) < 4 / math.sqrt(len(unit))
    assert (unit**4).mean() == pytest.approx(3, abs=4 * math.sqrt(96 / len(unit)))
    shift = np.corrcoef(unit[:-degrees], unit[degrees:])[0, 1]  # one frame against the next
    assert abs(shift - math.exp(-4)) < 4 / math.sqrt(len(unit))


def test_energy_is_conserved(potential, tmp_path):
    """R10 in float32, 1 ps: ten times below the bar of 1e-5 eV/atom/ps."""
    o = MDOptions(4000, timestep=0.25, every=20, temperature=30, output=f"{tmp_path}/e")
    result = run_md(potential, lattice(4, 2.6, jitter=0.05), o, device="cuda")
    assert abs(result.drift) < 1e-6  # eV/atom/ps
    assert np.ptp([r.potential_eV for r in result.rows]) / 64 > 1e-3  # there is something to conserve


def test_explosion_names_step_and_atoms(tmp_path):
    """R11: strong forces that pull atoms into each other; all frames written before are finite."""
    o = MDOptions(2000, timestep=1.0, every=10, output=f"{tmp_path}/x")
    with pytest.raises(Unphysical, match=r"step (\d\d): atom 0 \(C\) and atom 1 \(C\).*last good frame \(step \d\d\)"):
        run_md(make(1.0), molecule("CH3CH2OH"), o, device="cuda")
    frames = read(tmp_path / "x.xyz", ":")
    assert all(np.isfinite(f.get_forces()).all() and np.isfinite(f.positions).all() for f in frames)
    assert frames[-1].info["step"] > frames[-2].info["step"]
