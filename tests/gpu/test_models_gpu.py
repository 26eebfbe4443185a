"""Every model, head and prior gives on the GPU what it gives on the CPU, and captured what it gives eager: R8, R15 and
R16 for models without fused kernels ("any registered model still gets a captured autograd graph")."""

from __future__ import annotations

import copy

import pytest
import torch
from test_evaluator_gpu import no_waiting
from variants import ELEMENTS, VARIANTS, variant

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.models import Features, Representation
from torchmdnet2.models.heads import ScalarHead
from torchmdnet2.testing import example_systems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SYSTEMS = example_systems(ELEMENTS, 4.5)
PRIORS = [
    {"name": "atomref", "energies": {"1": -13.6, "6": -1029.0}},
    {"name": "zbl", "cutoff": 4.0},
    {"name": "zbl", "envelope": "covalent", "screening": "refitted"},
    {"name": "d2", "cutoff": 6.0},
    {"name": "coulomb", "method": "pme", "cutoff": 6.0, "accuracy": 1e-6},
    {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": "ewald", "cutoff": 6.0},
    {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": "reaction_field", "cutoff": 6.0},
]


@pytest.mark.parametrize("kind", VARIANTS)
def test_gpu_is_cpu(kind):
    """R15 in float64: energy, forces, stress, charges and properties."""
    properties = [{"name": "charges"}, {"name": "scalar_property", "property": "gap", "reduce": "mean"}]
    potential = variant(kind, properties=properties, priors=PRIORS, atom_filter=1)
    names = ["molecule", "ion"] if kind.endswith("all_pairs") else ["triclinic cell", "tiny cell", "left-handed cell"]
    system = System.concatenate([SYSTEMS[name] for name in names])
    stress = not kind.endswith("all_pairs")
    expected = potential(system, stress=stress)
    result = potential.cuda()(system.to("cuda"), stress=stress)
    for name in ("energy", "forces", "stress", "charges", "atom_energies"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        if theirs is not None:
            assert ours.device.type == "cuda"
            assert torch.allclose(ours.cpu(), theirs, rtol=1e-9, atol=1e-9), name
    assert torch.allclose(result.properties["gap"].cpu(), expected.properties["gap"], rtol=1e-9)


def test_dipole_on_the_gpu():
    properties = [{"name": "dipole", "equivariant": True}, {"name": "vector"}]
    potential = variant("equivariant_transformer", properties=properties)
    expected = potential(SYSTEMS["molecule"]).properties
    result = potential.cuda()(SYSTEMS["molecule"].to("cuda")).properties
    for name, value in expected.items():
        assert torch.allclose(result[name].cpu(), value, rtol=1e-9, atol=1e-10), name


# --- captured autograd graphs ----------------------------------------------------------------------------------------

CAPTURED = [kind for kind in VARIANTS if "ewald" not in kind]
HEADS = [{"name": "charges"}, {"name": "scalar_property", "property": "gap", "reduce": "mean"}]
CAPTURED_PRIORS = [p for p in PRIORS if p.get("method") not in ("pme", "ewald")]


def cluster(dtype=torch.float32, periodic=True, seed=0):
    """27 molecules of six atoms on a lattice, moved a little."""
    random = torch.Generator().manual_seed(seed)
    places = 3.6 * torch.cartesian_prod(*[torch.arange(3.0)] * 3)
    pos = (SYSTEMS["molecule"].pos.float() + places[:, None]).reshape(-1, 3)
    pos = pos + 0.05 * torch.randn(pos.shape, generator=random)
    cell = 10.8 * torch.eye(3) if periodic else None
    return System(z=SYSTEMS["molecule"].z.repeat(27), pos=pos.to(dtype), cell=cell).to("cuda")


def largest(tensor):
    return float(tensor.abs().max())


def root_mean_square(tensor):
    return float(tensor.double().square().mean().sqrt())


def assert_same(result, expected, exact=None):
    """Up to rounding, which differs from run to run where edges are summed by atomic additions: 1e-12 of the largest
    value in float64. In float32 both are held against float64: 1e-6, and twice the mean error of the eager result, four
    times its largest, which another order of the atoms alone changes by a factor of two."""
    for name in ("energy", "atom_energies", "forces", "stress", "charges"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            assert_close(name, ours, theirs, None if exact is None else getattr(exact, name))
    for name, theirs in expected.properties.items():
        assert_close(name, result.properties[name], theirs, None if exact is None else exact.properties[name])


def assert_close(name, ours, theirs, exact):
    bound = (1e-12 if exact is None else 1e-6) * max(1.0, largest(theirs))
    if exact is None:
        assert largest(ours - theirs) <= bound, f"{name}: {largest(ours - theirs):.2e} > {bound:.2e}"
        return
    for measure, times in ((root_mean_square, 2), (largest, 4)):
        error, eager = measure(ours - exact), measure(theirs - exact)
        assert error <= bound + times * eager, f"{name}: {error:.2e}, eager {eager:.2e}"


@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_is_eager(kind, dtype):
    """R15 and R16: replayed for other positions, cells, charges, elements, graphs give what the potential gives."""
    molecules = kind.endswith("all_pairs")
    potential = variant(kind, properties=HEADS, priors=CAPTURED_PRIORS).to("cuda", dtype)
    evaluator = Evaluator(potential, graphs=True, stress=not molecules)
    system = cluster(dtype, periodic=not molecules)
    cell = system.cell * 1.01
    variants = [
        system,
        system.replace(pos=system.pos * 1.01),
        system.replace(z=system.z.flip(0)),
        system.replace(charge=torch.ones_like(system.charge)),
        system if molecules else system.replace(cell=cell),
    ]
    kept = [evaluator(v) for v in variants]
    assert "autograd in CUDA graphs" in evaluator.report() and "replayed as one CUDA graph" in evaluator.report()
    exact = copy.deepcopy(potential).double() if dtype == torch.float32 else None
    for v, result in zip(variants, kept, strict=True):
        expected = potential(v, stress=not molecules)
        reference = None if exact is None else exact(v.to(dtype=torch.float64), stress=not molecules)
        assert_same(result, expected, reference)


def test_captured_batches_and_float64_positions():
    """R15 for batches, with float64 positions of a float32 model."""
    potential = variant("equivariant_transformer").cuda().float()
    evaluator = Evaluator(potential)
    batch = System.concatenate([cluster(torch.float64, seed=1), cluster(torch.float64, False), cluster(torch.float64)])
    exact = copy.deepcopy(potential).double()(batch)
    for _ in range(3):
        assert_same(evaluator(batch, stress=False), potential(batch), exact)
    assert "one CUDA graph" in evaluator.report() and "3 structures" in evaluator.report()


def test_captured_overflow_is_redone(monkeypatch):
    """R8."""
    monkeypatch.setattr("torchmdnet2.engine.step.next_capacity", lambda edges: max(16, -(-edges // 16) * 16))
    potential = variant("transformer", priors=CAPTURED_PRIORS).cuda()
    evaluator = Evaluator(potential, graphs=True)
    system = cluster(torch.float64, False)
    for scale in (3.0, 1.5, 1.0, 2.0, 0.98):
        moved = system.replace(pos=system.pos * scale)
        assert_same(evaluator(moved), potential(moved))
    evaluator.refresh()  # a bound step takes over what is kept for its size, and its room
    bound = evaluator.bind(system.replace(pos=system.pos * 3))
    bound.pos.copy_(system.pos)
    bound.replay()
    assert not bound.check() and bound.forces.isnan().all()
    bound.replay()
    assert bound.check()
    assert largest(bound.forces - potential(system).forces) <= 1e-11


def test_a_captured_bound_step_does_not_wait():
    """No host synchronisation in a replay, and R11 when it is checked."""
    potential = variant("graph_network").cuda()
    system = cluster(torch.float64)
    bound = Evaluator(potential).bind(system, stress=True)
    velocity = 0.001 * torch.randn_like(system.pos)
    with no_waiting():
        for _ in range(200):
            bound.pos.add_(velocity)
            bound.replay()
    assert bound.check()
    expected = potential(system.replace(pos=bound.pos.clone()), stress=True)
    assert largest(bound.forces - expected.forces) <= 1e-11
    assert largest(bound.stress - expected.stress) <= 1e-12
    bound.pos[5] = float("inf")
    bound.replay()
    with pytest.raises(ValueError, match="atom 5"):
        bound.check()


class Looking(Representation):
    """A model that waits for the GPU."""

    hidden_channels, cutoff, max_z = 8, 4.0, 20

    def __init__(self, how):
        super().__init__()
        self.how, self.embedding = how, torch.nn.Embedding(20, 8)

    def forward(self, graph):
        x = self.embedding(graph.z)
        if self.how == "item":
            x = x * float(graph.distances.detach().sum() > 0)
        if self.how == "synchronize":
            torch.cuda.synchronize()
        return Features(x.index_add(0, graph.receiver, x[graph.sender] * torch.exp(-graph.distances)[:, None]))


@pytest.mark.parametrize("how", ["item", "synchronize"])
def test_what_cannot_be_captured_runs_eager_and_says_so(how):
    potential = Potential(Looking(how), ScalarHead(8)).cuda().double().eval()
    evaluator, system = Evaluator(potential, graphs=True), cluster(torch.float64)
    for _ in range(3):
        assert_same(evaluator(system), potential(system))
    reason = {
        "item": "'Looking.forward' (test_models_gpu.py) copies tensor values",
        "synchronize": "the capture failed",
    }[how]
    assert "reference path" in evaluator.report() and reason in evaluator.report()
    # nothing is left behind: others can still be captured, and memory is freed
    other = variant("transformer").cuda()
    again = Evaluator(other, graphs=True)
    assert_same(again(system), other(system))
    assert "one CUDA graph" in again.report()


@pytest.mark.parametrize("method", ["ewald", "pme"])
def test_captured_ewald(method):
    """R8 and R16: replayed for other cells; those without room are NaN until there are other plans."""
    fixed = {"name": "coulomb", "charges": {"1": 0.3, "8": -0.6}, "method": method, "cutoff": 6.0, "accuracy": 1e-6}
    potential = variant("tensornet2_ewald", priors=[fixed]).cuda()
    evaluator, system = Evaluator(potential, graphs=True, stress=True), cluster(torch.float64)
    accuracy = 1e-10 if method == "ewald" else 1e-4  # other meshes are as accurate as the prior's own
    for scale in (1.0, 1.02, 1.2, 1.22, 0.97):
        other = system.replace(pos=scale * system.pos, cell=scale * system.cell)
        found, expected = evaluator(other), potential(other, stress=True)
        for name in ("energy", "forces", "stress"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert largest(ours - theirs) <= accuracy * max(1.0, largest(theirs)), name
    report = evaluator.report()
    assert "autograd in CUDA graphs" in report and "replayed as one CUDA graph" in report and "fell back" not in report


def test_changed_weights_of_captured_models_are_noticed():
    """R16: never stale."""
    potential = variant("transformer").cuda()
    evaluator, system = Evaluator(potential, graphs=True), cluster(torch.float64)
    before = evaluator(system)
    with torch.no_grad():
        potential.representation.embedding.weight.mul_(1.5)
    after = evaluator(system)
    assert_same(after, potential(system))
    assert largest(after.energy - before.energy) > 1e-3
