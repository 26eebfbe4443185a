"""The compiled integrator of the CPU against the one of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.constraints import FixAtoms
from springs import Springs, atoms_of

from torchmdnet2 import System
from torchmdnet2.engine.bound import ReferenceBoundStep
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.integrators import HostEngine, Langevin, VelocityVerlet, normal
from torchmdnet2.md.setup import make_engine

pytest.importorskip("numba")

from torchmdnet2.engine.cpu_step import CpuBoundStep
from torchmdnet2.md.compiled import CompiledEngine, normal3


def dynamics_of(atoms):
    return VelocityVerlet(atoms, 0.5), Langevin(atoms, 0.5, 300.0, 50.0, [7, 2**55, -3][: atoms.replicas])


def states(engine, vel, blocks):
    state = engine.begin(vel)
    state.step = 2**32 - 2  # the step does not fit into 32 bits any more in the middle
    engine.load(state)
    for steps in blocks:
        engine.launch(steps)
    return [engine.collect() for _ in blocks]


def test_where_it_runs():
    """Beside the compiled kernels of a model: elsewhere the integrator is nothing beside a step."""
    assert CpuBoundStep.compiled and not ReferenceBoundStep.compiled


def test_random_numbers():
    """As of PyTorch, but for the last digits of logarithms, sines and cosines."""
    seeds, steps = [3, 2**55 + 1, -1], [0, 7, 2**33 + 7]
    expected = normal(torch.tensor(seeds), torch.tensor(steps), 50).numpy()
    found = [[[normal3(seed, atom, step) for atom in range(50)] for seed in seeds] for step in steps]
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("num", "replicas"), [(1, 1), (9, 1), (33, 3)])
def test_same_as_the_integrators(num, replicas):
    """To the last bit; random numbers and sums to rounding."""
    atoms, pos, vel = atoms_of(num, replicas)
    for dynamics in dynamics_of(atoms):
        engines = HostEngine(Springs(pos, replicas), dynamics), CompiledEngine(Springs(pos, replicas), dynamics)
        for expected, state in zip(*(states(e, vel, (3, 1, 20)) for e in engines), strict=True):
            assert state.step == expected.step
            bath = type(dynamics) is Langevin
            exact = dict(rtol=0, atol=1e-13 if bath else 0)
            for name in ("pos", "vel", "forces", "energy"):
                torch.testing.assert_close(getattr(state, name), getattr(expected, name), **exact)
            torch.testing.assert_close(state.heat, expected.heat, rtol=0, atol=1e-12)
            assert bool(state.heat.any()) == (bath and num > 1)
            assert torch.equal(state.pos[num // 2], pos[num // 2])


def test_blocks_do_not_change_a_bit():
    atoms, pos, vel = atoms_of(5, 2)
    for dynamics in dynamics_of(atoms):
        last = [states(CompiledEngine(Springs(pos, 2), dynamics), vel, b)[-1] for b in ((1,) * 12, (7, 5), (12,))]
        for state in last[1:]:
            assert state.step == last[0].step
            assert all(torch.equal(a, b) for a, b in zip(vars(state).values(), vars(last[0]).values(), strict=True)
                       if isinstance(a, torch.Tensor))  # fmt: skip


def test_whole_runs(potential, water, tmp_path, monkeypatch):
    """Tables and last frames, with both integrators."""
    water.set_constraint(FixAtoms([0]))
    results, system = {}, System.from_ase(water)
    dynamics = VelocityVerlet(atoms_of(3, 1)[0], 0.5)
    for compiled in (False, True):
        monkeypatch.setattr(ReferenceBoundStep, "compiled", compiled)
        assert type(make_engine(potential, system, dynamics, 10)) is (CompiledEngine if compiled else HostEngine)
        for ensemble in ("nve", "nvt"):
            options = MDOptions(12, ensemble=ensemble, every=4, output=f"{tmp_path}/{compiled}-{ensemble}", replicas=2)
            results[compiled, ensemble] = run_md(potential, water, options)
    for ensemble, tolerance in (("nve", 0), ("nvt", 1e-10)):
        for ours, expected in zip(results[True, ensemble].replicas, results[False, ensemble].replicas, strict=True):
            np.testing.assert_allclose(ours.rows, expected.rows, rtol=0, atol=tolerance)
            np.testing.assert_allclose(ours.atoms.positions, expected.atoms.positions, rtol=0, atol=tolerance)
            assert not np.array_equal(ours.atoms.positions, water.positions)
