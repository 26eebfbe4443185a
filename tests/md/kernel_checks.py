"""The integrator's kernels in Triton's interpreter, on the CPU. Run by test_kernels.py in a process of its own:
TRITON_INTERPRET must be set before triton is first imported. On a GPU: tests/gpu/test_md_gpu.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from ase.build import molecule
from springs import Springs, atoms_of, crystal_of

from torchmdnet2 import System
from torchmdnet2.md.integrators import DIRECTIONS, Barostat, HostEngine, Langevin, MultipleTimeSteps, VelocityVerlet
from torchmdnet2.md.kernels_gpu import GraphEngine, launch_springs
from torchmdnet2.md.springs import Springs as Fitted
from torchmdnet2.md.springs import SpringStep

assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(("num", "replicas"), [(3, 1), (64, 1), (70, 3)])
def test_kernels_are_the_integrators(num, replicas):
    """To the last bit; random numbers and sums to rounding."""
    atoms, pos, vel = atoms_of(num, replicas)
    for dynamics in (VelocityVerlet(atoms, 0.5), Langevin(atoms, 0.5, 300.0, 50.0, [7, 2**55, 3][:replicas])):
        found = []
        for engine in (HostEngine(Springs(pos, replicas), dynamics), GraphEngine(Springs(pos, replicas), dynamics)):
            state = engine.begin(vel)
            state.step = 2**32 - 2  # the step does not fit into 32 bits any more in the middle
            engine.load(state)
            engine.launch(2)
            engine.launch(3)
            assert engine.collect().step == 2**32
            found.append(engine.collect())
        expected, state = found
        assert state.step == expected.step == 2**32 + 3
        exact = dict(rtol=0, atol=0) if type(dynamics) is VelocityVerlet else dict(rtol=1e-13, atol=1e-14)
        for name in ("pos", "vel", "forces", "energy"):
            torch.testing.assert_close(getattr(state, name), getattr(expected, name), **exact)
        torch.testing.assert_close(state.heat.sum(1), expected.heat.sum(1), rtol=1e-11, atol=1e-11)
        assert bool(state.heat.any()) == (type(dynamics) is Langevin)
        assert torch.equal(state.pos[num // 2], pos[num // 2])


def test_a_state_that_is_loaded_again_stays():
    """A block that fails is repeated from the last good state, several times: no later copy may overwrite it."""
    atoms, pos, vel = atoms_of(3, 1)
    engine = GraphEngine(Springs(pos, 1), VelocityVerlet(atoms, 0.5))
    good = engine.begin(vel)
    for _ in range(3):
        engine.launch(2)
        good = engine.collect()
    before = good.pos.clone()
    for _ in range(4):
        engine.load(good)
        engine.launch(5)
        engine.launch(5)
        engine.drop()
        assert good.step == 6 and torch.equal(good.pos, before)


def outcome(engine, vel, blocks):
    state = engine.begin(vel)
    state.step = 2**31 - 2
    engine.load(state)
    for steps in blocks:
        engine.launch(steps)
        state = engine.collect()
    return state


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_a_cell_that_changes_and_multiple_time_steps(kind):
    """The same strains, work and positions as the integrators, whatever the blocks; with inner steps and without."""
    replicas = 2
    atoms, _, vel = atoms_of(8, replicas)
    atoms.mobile[:] = 1
    for inner in (False, True):
        found = []
        for kernels, blocks in ((False, (5,)), (True, (5,)), (True, (2, 3))):
            step = crystal_of(replicas)
            step.pos += 0.1
            step.replay()
            seeds = [7, 2**55]
            barostat = Barostat(atoms, 1.0, 300.0, 2000.0, seeds, kind, 0.1, 1e-4)
            dynamics = Langevin(atoms, 0.25 if inner else 1.0, 300.0, 50.0, seeds, barostat)
            if inner:
                fast = crystal_of(replicas, spring=9.0)
                fast.pos.copy_(step.pos)
                fast.replay()
                dynamics = MultipleTimeSteps(dynamics, 4, fast)
            engine = (GraphEngine if kernels else HostEngine)(step, dynamics)
            found.append(outcome(engine, vel, blocks))
        expected, state, in_blocks = found
        assert state.step == expected.step == 2**31 + 3
        for name, value in expected.tensors().items():
            mine = getattr(state, name).sum(1) if name == "heat" else getattr(state, name)
            torch.testing.assert_close(mine, value.sum(1) if name == "heat" else value, rtol=1e-11, atol=1e-11)
            assert torch.equal(getattr(in_blocks, name), getattr(state, name))
        assert not torch.allclose(state.cell, crystal_of(replicas).cell, rtol=1e-3)
        assert (state.fast is not None) == inner


def test_springs():
    """Forces of the kernel are those in PyTorch; bonds over the faces of cells that differ, more than one block."""
    frame = molecule("CH3CH2OH", cell=[6, 6, 6], pbc=True)
    frame.wrap()
    frame = frame.repeat((2, 2, 2))
    springs = Fitted(System.from_ase(frame))
    random = torch.Generator().manual_seed(0)
    springs.coefficients.copy_(torch.randn(*springs.coefficients.shape, generator=random, dtype=torch.float64))
    system = System.from_ase([frame] * 2)
    plain, kernel = SpringStep(springs, system), SpringStep(springs, system, launch_springs)
    for step in (plain, kernel):
        step.pos.mul_(1.03)
        step.cell[1].mul_(1.04)
        step.forces.fill_(9.0)
        step.replay()
    assert plain.forces.abs().max() > 0.1 and springs.shift.any() and springs.shifts.any()
    torch.testing.assert_close(kernel.forces, plain.forces, rtol=1e-12, atol=1e-12)
