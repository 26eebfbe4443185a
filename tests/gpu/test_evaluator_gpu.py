"""The Evaluator on a real GPU: bars R5 (batches), R8 (overflow), R11, R15 (= eager), R16 (replay), R17 (streams), R18
(precision), R19 (determinism), R29 (threads), against the Potential in float64."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.core.devices import capture_stream
from torchmdnet2.units import AMU_A2_FS2

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ELEMENTS = torch.tensor([1, 6, 7, 8])


def make(seed=0, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        potential = Potential.from_config(
            {
                "model": {"name": "tensornet", "hidden_channels": 128, "num_layers": 2, "num_rbf": 32, "cutoff": 5.0,
                          "max_z": 10},
                "priors": [{"name": "atomref", "energies": {"1": -13.6, "6": -1030.0, "7": -1486.0, "8": -2041.3}}],
                "energy_shift": 0.25,
                **changes,
            }
        ).eval()  # fmt: skip
    return potential.to("cuda")


@contextmanager
def no_waiting():
    """Within the block, to wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_atoms(n, seed=0, cell=False, dtype=torch.float32, **given):
    """At least 0.9 Å apart, at the density of organic matter."""
    rng = np.random.default_rng(seed)
    edge = max(3.0, (n / 0.1) ** (1 / 3))
    pos = np.zeros((0, 3))
    while len(pos) < n:
        new = rng.uniform(0, edge, 3)
        d = pos - new
        d -= edge * np.round(d / edge) * cell
        if not len(pos) or (np.linalg.norm(d, axis=1) > 0.9).all():
            pos = np.vstack([pos, new])
    return System(
        z=ELEMENTS[torch.from_numpy(rng.integers(0, 4, n))], pos=torch.tensor(pos, dtype=dtype),
        cell=edge * torch.eye(3) if cell else None, **given,
    ).to("cuda")  # fmt: skip


@pytest.fixture(scope="module")
def potential():
    return make()


@pytest.fixture(scope="module")
def exact(potential):
    return copy.deepcopy(potential).double()


@pytest.fixture(scope="module")
def evaluator(potential):
    return Evaluator(potential, graphs=True)


def assert_same(result, expected, force=1e-4):
    """R15: 1e-6 of the absolute energy, 1e-4 eV/Å."""
    torch.testing.assert_close(result.energy, expected.energy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.atom_energies, expected.atom_energies, rtol=1e-6, atol=2e-5)
    scale = max(1.0, float(expected.forces.abs().max()))
    assert float((result.forces.double() - expected.forces).abs().max()) <= force * scale
    if expected.stress is not None:
        bound = 1e-5 * max(float(expected.stress.abs().max()), 1e-2)
        assert float((result.stress.double() - expected.stress).abs().max()) <= bound


@pytest.mark.parametrize("n", [*range(1, 66), 127, 128, 129])
def test_r15_every_small_size(evaluator, exact, n):
    system = random_atoms(n, seed=n, cell=n % 3 == 0)
    assert_same(evaluator(system), exact(system.to(dtype=torch.float64)))


@pytest.mark.parametrize(("n", "cell"), [(600, False), (1100, True)])
def test_r15_larger_sizes_with_stress(evaluator, exact, n, cell):
    system = random_atoms(n, cell=cell, charge=1.0)
    assert_same(evaluator(system, stress=cell), exact(system.to(dtype=torch.float64), stress=cell))


def test_spatial_order_is_used_and_right(potential):
    """R5 and R7 above the size from which atoms are sorted: shuffled atoms, nine cells against one, launches."""
    system = random_atoms(2000, cell=True)
    edge = system.cell[0, 0, 0]
    images = edge * torch.cartesian_prod(*[torch.arange(3.0, device="cuda")] * 3)[:9]
    n = len(images)
    large = System(
        z=system.z.repeat(n),
        pos=(system.pos[None] + images[:, None]).reshape(-1, 3),
        cell=system.cell[0] * torch.tensor([[1.0], [3.0], [3.0]], device="cuda"),
    )
    evaluator = Evaluator(potential, graphs=True)
    result = evaluator(large)
    assert "spatial order" in evaluator.report()
    shuffle = torch.randperm(large.num_atoms, device="cuda")
    other = evaluator(large.replace(z=large.z[shuffle], pos=large.pos[shuffle]))
    torch.testing.assert_close(other.forces, result.forces[shuffle], rtol=1e-4, atol=1e-4)
    small = evaluator(system)
    torch.testing.assert_close(result.energy, small.energy * n, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(result.forces, small.forces.repeat(n, 1), rtol=1e-4, atol=2e-4)
    again = Evaluator(potential, graphs=False)(large)
    assert torch.equal(again.forces, result.forces) and torch.equal(again.energy, result.energy)


def test_batch_equals_singles(evaluator, exact):
    """R5."""
    singles = [random_atoms(n, seed=n, cell=True, charge=float(n % 2)) for n in (3, 40, 1, 17)]
    batch = System.concatenate(singles)
    result = evaluator(batch, stress=True)
    assert_same(result, exact(batch.to(dtype=torch.float64), stress=True))
    for b, single in enumerate(singles):
        alone = evaluator(single, stress=True)
        torch.testing.assert_close(result.energy[b], alone.energy[0], rtol=1e-7, atol=1e-6)
        torch.testing.assert_close(result.forces[batch.batch == b], alone.forces, rtol=1e-5, atol=1e-5)


def test_r16_replays_are_never_stale(evaluator, exact):
    first = random_atoms(30, seed=1, cell=True)
    evaluator(first)
    assert "one CUDA graph" in evaluator.report()
    variants = [
        first,
        random_atoms(30, seed=2, cell=True),
        first.replace(z=first.z.flip(0)),
        first.replace(charge=torch.ones_like(first.charge)),
        first.replace(cell=first.cell * 1.1),
        first.replace(pbc=~first.pbc),
        first.to(dtype=torch.float64),
        random_atoms(31, seed=3, cell=True),
        first,
    ]
    kept = [evaluator(v, stress=True) for v in variants]
    for variant, result in zip(variants, kept, strict=True):
        assert result.forces.dtype == variant.dtype
        assert_same(result, exact(variant.to(dtype=torch.float64), stress=True))
    with pytest.raises(ValueError, match="the system is on 'cpu'"):
        evaluator(first.to("cpu"))


def test_r8_overflow_under_replay(potential, exact):
    """Atoms come together ever more: each answer is right, whatever room there was."""
    evaluator = Evaluator(potential, graphs=True)
    system = random_atoms(60, seed=4)
    for scale in (40.0, 3.0, 1.5, 1.0, 20.0, 0.95, 1.0):
        scaled = system.replace(pos=system.pos * scale)
        assert_same(evaluator(scaled), exact(scaled.to(dtype=torch.float64)))


def test_r8_a_thousand_random_trials(potential, monkeypatch):
    """No silent result, whatever the room: replays with none to spare equal launches with plenty, bit for bit."""
    from torchmdnet2.engine import step as steps

    system, rng = random_atoms(40, seed=13), np.random.default_rng(0)
    roomy = Evaluator(potential, graphs=False)
    roomy(system.replace(pos=system.pos * 0.3))
    monkeypatch.setattr(steps, "next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    captures = 0
    for _ in range(20):
        tight = Evaluator(potential, graphs=True)
        for scale in rng.uniform(0.5, 6, 50):
            pos = system.pos * float(scale) + torch.randn_like(system.pos) * 0.2
            ours, theirs = tight(system.replace(pos=pos)), roomy(system.replace(pos=pos))
            assert torch.equal(ours.forces, theirs.forces) and torch.equal(ours.energy, theirs.energy)
        captures += next(iter(tight._active.steps.values()))[0].captures
    assert captures > 40, "no overflow was met"


def test_few_sizes_are_kept(potential, exact, monkeypatch):
    monkeypatch.setattr("torchmdnet2.engine.backends.KEPT", 3)
    evaluator = Evaluator(potential, graphs=True)
    for n in (5, 6, 7, 8, 9, 5, 6):
        system = random_atoms(n, seed=n)
        assert_same(evaluator(system), exact(system.to(dtype=torch.float64)))
        assert len(evaluator._active.steps) <= 3


def test_new_objects_with_the_same_content(evaluator):
    """R16: systems that are built anew for every call are recognised, and changed content is too."""
    first = random_atoms(30, seed=14, cell=True)
    expected = evaluator(first)
    same = System(**{name: value.clone() for name, value in vars(first).items()})
    assert torch.equal(evaluator(same).forces, expected.forces)
    other = System(**{name: value.clone() for name, value in vars(first).items()})
    other.z[3] = 7 if int(first.z[3]) != 7 else 8
    assert not torch.equal(evaluator(other).energy, expected.energy)
    assert torch.equal(evaluator(first).energy, expected.energy)


def test_bound_step_overflow_and_not_finite(potential, exact):
    """R8 and R11 without leaving the device."""
    system = random_atoms(60, seed=4)
    bound = Evaluator(potential).bind(system.replace(pos=system.pos * 40))
    address = bound.forces.data_ptr()
    bound.pos.copy_(system.pos)
    for _ in range(3):
        bound.replay()
    assert not bound.check()
    assert bound.forces.isnan().all()
    bound.replay()
    assert bound.check() and bound.forces.data_ptr() == address
    assert_same(bound, exact(system.to(dtype=torch.float64)))
    bound.pos[7] = float("nan")
    bound.replay()
    with pytest.raises(ValueError, match="atom 7"):
        bound.check()
    bound.pos.copy_(system.pos)
    bound.replay()
    assert bound.check()
    assert_same(bound, exact(system.to(dtype=torch.float64)))


def test_thousand_replays_equal_eager(potential, exact):
    """R16: atoms that move for 1,000 steps; replays equal launches bit for bit, and float64 within float32's noise."""
    system = random_atoms(100, seed=5, cell=True, dtype=torch.float64)
    bound = Evaluator(potential).bind(system)
    launches = Evaluator(potential, graphs=False)
    velocity = 0.002 * torch.randn(100, 3, dtype=torch.float64, device="cuda")
    pos = system.pos.clone()
    for step in range(1000):
        pos += velocity * np.cos(step / 40)
        bound.pos.copy_(pos)
        bound.replay()
        if step % 50 == 49:
            assert bound.check()
            eager = launches(system.replace(pos=pos))
            assert torch.equal(bound.forces, eager.forces) and torch.equal(bound.energy, eager.energy)
            assert_same(eager, exact(system.replace(pos=pos)))


def test_r19_bitwise_deterministic(potential):
    system = random_atoms(1500, seed=6, cell=True)
    results = [Evaluator(potential, graphs=graphs)(system, stress=True) for graphs in (True, False)]
    one = Evaluator(potential, graphs=True)
    results += [one(system, stress=True) for _ in range(20)]
    for result in results[1:]:
        for name in ("energy", "forces", "stress", "atom_energies"):
            assert torch.equal(getattr(result, name), getattr(results[0], name)), name


def test_r17_streams(evaluator):
    system = random_atoms(200, seed=7)
    expected = evaluator(system)
    for _ in range(10):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy = torch.randn(2000, 2000, device="cuda")
            moved = system.replace(pos=system.pos + 0 * (busy @ busy)[0, 0].clamp(0, 0))
            result = evaluator(moved)
            assert torch.equal(result.forces, expected.forces)
        again = evaluator(system)  # the default stream, right after
        assert torch.equal(again.forces, expected.forces)


def test_two_evaluators_and_two_threads(potential):
    """R17 and R29: two molecules, two models, four threads in one process."""
    other = make(seed=1, model={"name": "tensornet", "hidden_channels": 64, "num_layers": 1, "max_z": 10})
    pair = [(Evaluator(potential), random_atoms(50, 8)), (Evaluator(other), random_atoms(70, 9, cell=True))]
    expected = [e(s) for e, s in pair]
    for _ in range(5):
        for (e, s), before in zip(pair, expected, strict=True):
            assert torch.equal(e(s).forces, before.forces)
    shared, failures = pair[0][0], []

    def work(seed):
        system = random_atoms(40 + seed, seed)
        first = shared(system).forces
        failures.extend(seed for _ in range(20) if not torch.equal(shared(system).forces, first))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_steady_state_allocates_nothing_and_results_are_fresh(potential):
    evaluator, system = Evaluator(potential), random_atoms(100, 10)
    kept = [evaluator(system.replace(pos=system.pos * (1 + 0.01 * k))) for k in range(4)]
    assert not torch.equal(kept[2].forces, kept[3].forces)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        evaluator(system)
    assert torch.cuda.memory_allocated() == before


def test_no_waiting_in_a_bound_step(potential):
    """Nothing in a replay waits for the device."""
    bound = Evaluator(potential).bind(random_atoms(100, 10))
    bound.replay()
    torch.cuda.synchronize()
    with no_waiting():
        bound.pos.add_(0.001)
        bound.replay()
    assert bound.check()


def test_r18_large_reference_energies(evaluator, exact):
    """1,000 atoms whose references add up to more than 1e6 eV: 1e-3 eV, 1e-4 eV/Å, and TF32 stays off."""
    system = random_atoms(1000, seed=12, cell=True)
    result, expected = evaluator(system), exact(system.to(dtype=torch.float64))
    assert float(expected.energy.abs()) > 1e6
    assert float((result.energy.double() - expected.energy).abs()) <= 1e-3
    assert float((result.forces.double() - expected.forces).abs().max()) <= 1e-4
    assert not torch.backends.cuda.matmul.allow_tf32


def test_tf32_is_stated_and_bounded(potential, exact):
    """R18: TF32 only where asked for; its error is stated in docs/performance.md."""
    evaluator = Evaluator(potential, precision="tf32")
    system = random_atoms(800, seed=11, cell=True)
    result, expected = evaluator(system), exact(system.to(dtype=torch.float64))
    assert "TF32" in evaluator.report()
    error = float((result.forces.double() - expected.forces).abs().max())
    assert 0 < error <= 2e-2 * max(1.0, float(expected.forces.abs().max()))


@pytest.mark.parametrize("atoms", [20, 300, 800, 2000, 5000])
def test_mixed_precision(potential, exact, atoms):
    evaluator = Evaluator(potential, precision="mixed")
    system = random_atoms(atoms, seed=11, cell=True)
    result, expected = evaluator(system, stress=True), exact(system.to(dtype=torch.float64), stress=True)
    assert "float16" in evaluator.report()
    error = float((result.forces.double() - expected.forces).abs().max())
    assert 0 < error <= 2e-3 * max(1.0, float(expected.forces.abs().max()))
    assert float((result.atom_energies - expected.atom_energies).abs().max()) <= 2e-4 * max(
        1.0, float(expected.atom_energies.abs().max())
    )
    assert float((result.stress - expected.stress).abs().max()) <= 2e-3 * float(expected.stress.abs().max())
    captured = [evaluator(system).forces for _ in range(3)]  # kernels without the virial may round otherwise
    assert float((captured[0] - result.forces).abs().max()) <= 1e-3 * max(1.0, float(expected.forces.abs().max()))
    assert torch.equal(captured[1], captured[0]) and torch.equal(captured[2], captured[0])
    with pytest.raises(ValueError, match="precision='mixed': the results would be those of autograd"):
        evaluator(system.replace(pos=system.pos.clone().requires_grad_()))


@pytest.mark.parametrize("precision", ["mixed", "tf32"])
def test_lower_precision_is_refused_without_its_kernels(precision):
    other = make(model={"name": "graph_network", "hidden_channels": 32, "max_z": 10})
    with pytest.raises(ValueError, match="no kernels of this precision for GraphNetwork"):
        Evaluator(other, precision=precision)


def test_float64_is_captured_too(potential, exact):
    """R15 in float64."""
    system = random_atoms(20, dtype=torch.float64)
    evaluator = Evaluator(potential, precision="float64")
    for _ in range(3):
        torch.testing.assert_close(evaluator(system).forces, exact(system).forces, rtol=0, atol=1e-10)
    assert "autograd in CUDA graphs" in evaluator.report() and "replayed as one CUDA graph" in evaluator.report()


def test_graphs_of_a_thread_are_captured_on_one_stream(potential, monkeypatch):
    """Each further stream that a process uses makes replays slower (core/devices.py)."""
    made = []

    class Counted(torch.cuda.Stream):
        def __new__(cls, *arguments, **options):
            if "stream_id" not in options:  # otherwise a stream that exists
                made.append(cls)
            return super().__new__(cls, *arguments, **options)

    monkeypatch.setattr(torch.cuda, "Stream", Counted)
    evaluator = Evaluator(potential, graphs=True)
    for n in (5, 30, 90, 200):
        evaluator(random_atoms(n, seed=n))
    assert "replayed as one CUDA graph" in evaluator.report() and len(made) <= 1
    mine, other = capture_stream(torch.device("cuda")), []
    assert capture_stream(torch.device("cuda", 0)) is mine
    thread = threading.Thread(target=lambda: other.append(capture_stream(torch.device("cuda"))))
    thread.start()
    thread.join()
    assert other[0] != mine


def test_graphs_false_without_kernels():
    other = make(model={"name": "graph_network", "hidden_channels": 16, "max_z": 10, "aggregation": "mean"})
    evaluator, system = Evaluator(other, graphs=False), random_atoms(20)
    assert evaluator(system).forces.shape == (20, 3)
    report = evaluator.report()
    assert "reference path" in report and "aggregation 'add' only" in report and "graphs=False was requested" in report
    bound = evaluator.bind(system)
    bound.replay()
    assert bound.check()


def test_two_bound_steps_on_two_streams(potential):
    """R17: replays of two molecules that overlap on the device, two evaluators, one process."""
    other = make(seed=1, model={"name": "tensornet", "hidden_channels": 64, "num_layers": 1, "max_z": 10})
    bounds = [Evaluator(potential).bind(random_atoms(300, 8)), Evaluator(other).bind(random_atoms(700, 9, cell=True))]
    expected = [b.forces.clone() for b in bounds]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for bound, stream in zip(bounds, streams, strict=True):
            with torch.cuda.stream(stream):
                bound.forces.zero_()
                bound.replay()
    for bound, stream, forces in zip(bounds, streams, expected, strict=True):
        with torch.cuda.stream(stream):
            assert bound.check()
            assert torch.equal(bound.forces, forces)


def verlet(step, masses, velocity, timestep, steps):
    """Velocity Verlet on a bound step, in place; positions after the last step."""
    half = 0.5 * timestep * AMU_A2_FS2**-1 / masses
    for _ in range(steps):
        velocity += half * step.forces
        step.pos.add_(timestep * velocity)
        step.replay()
        velocity += half * step.forces
    return step.pos.clone()


def test_a_thousand_md_steps_by_replay_equal_launches(potential):
    """R16. Trajectories are chaotic: only equal forces to the last bit in each of the steps end at equal positions."""
    system = random_atoms(60, seed=21, cell=True, dtype=torch.float64)
    masses = torch.tensor([0, 1.008, *[0] * 4, 12.011, 14.007, 15.999], dtype=torch.float64, device="cuda")[system.z]
    ends = []
    for graphs in (True, False):
        step = Evaluator(potential, graphs=graphs).bind(system)
        ends.append(verlet(step, masses[:, None], torch.zeros_like(system.pos), 0.2, 1000))
        assert step.check()
    assert torch.equal(ends[0], ends[1]) and float((ends[0] - system.pos).abs().max()) > 0.01
