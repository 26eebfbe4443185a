"""The Evaluator without a GPU: the Potential's numbers and errors, options, copies, bound steps.

Its fused path is tested by tests/engine (in Triton's interpreter) and tests/gpu.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.errors import StructureWarning, UnknownElement, UntrainedCharge

SMALL = {"num_rbf": 6, "max_z": 10}
SIZES = {"tensornet2": {"q_dim": 4}}  # as in test_tensornet2_cpu.py: its kernels are not compiled again
MODELS = ["tensornet", "graph_network", "transformer", "equivariant_transformer"]


def make(model="tensornet", seed=0, channels=8, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Potential.from_config(
            {
                "model": {"name": model, **SMALL, "hidden_channels": channels, **SIZES.get(model, {})},
                "priors": [{"name": "atomref", "energies": {"8": -2041.3}}],
                **changes,
            }
        )


def water(dtype=torch.float32, **given):
    pos = torch.tensor([[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]], dtype=dtype)
    return System(z=torch.tensor([8, 1, 1]), pos=pos, **given)


def assert_equal(result, expected):
    for name in ("energy", "forces", "stress", "atom_energies", "charges"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None and theirs is None) or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stress", [False, True])
def test_equals_the_potential(model, stress):
    """Models without compiled kernels (TensorNet of 8 channels has none): the same numbers, to the bit."""
    potential = make(model).eval()
    potential.allow_untrained_charge = True  # three of these do not use it
    system = System.concatenate([water(cell=6 * torch.eye(3), charge=1.0), water(cell=2.5 * torch.eye(3))])
    evaluator = Evaluator(potential, stress=stress)
    result = evaluator(system)
    assert "compiled" not in evaluator.report()
    assert_equal(result, potential(system, stress=stress))
    assert not result.energy.requires_grad and not result.forces.requires_grad
    assert_equal(Evaluator(potential)(system, forces=False, stress=stress), potential(system, False, stress))


@pytest.mark.parametrize("stress", [False, True])
def test_compiled_kernels_equal_the_potential(stress):
    """32 channels, on the kernels for CPUs: within a few digits of float32 of the Potential in float64."""
    pytest.importorskip("numba")
    potential = make(channels=32).eval()
    system = System.concatenate([water(cell=6 * torch.eye(3), charge=1.0), water(cell=2.5 * torch.eye(3))])
    evaluator = Evaluator(potential, stress=stress)
    result, expected = evaluator(system), copy.deepcopy(potential).double()(system, stress=stress)
    assert evaluator.report().startswith("compiled TensorNet kernels") and "fell back" not in evaluator.report()
    for name, limit in (("energy", 2e-6), ("atom_energies", 2e-6), ("forces", 2e-6), ("stress", 2e-7)):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:  # eV, eV/Å, eV/Å³
            assert 1e3 * limit < float(theirs.abs().max())
            assert float((ours - theirs).abs().max()) <= limit


def test_no_atoms_and_one_atom():
    evaluator = Evaluator(make())
    none = evaluator(System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3)))
    assert none.forces.shape == (0, 3) and none.energy.tolist() == [0.0]
    one = evaluator(System(z=torch.tensor([8]), pos=torch.zeros(1, 3)))
    assert one.energy.tolist() == [-2041.3]


def test_precision_float64():
    potential, system = make(), water(dtype=torch.float64)
    result = Evaluator(potential, precision="float64")(system)
    assert_equal(result, copy.deepcopy(potential).eval().double()(system))
    assert potential.dtype == torch.float32


def test_changed_weights_are_noticed():
    potential, system = make(), water()
    for precision in ("float32", "float64"):
        evaluator = Evaluator(potential, precision=precision)
        before = evaluator(system)
        with torch.no_grad():
            potential.representation.linear.weight.mul_(2)
        after = evaluator(system)
        assert not torch.equal(before.energy, after.energy)
        exact = copy.deepcopy(potential).double() if precision == "float64" else potential
        assert_equal(after, exact(system))


@pytest.mark.parametrize("channels", [8, 32])  # 32: by the compiled kernels of the CPU
def test_changed_options_are_noticed(channels):
    potential, system = make(channels=channels), water()
    evaluator = Evaluator(potential)
    evaluator(system)
    changes = (("energy_shift", 1.0), ("energy_scale", 2.0), ("subtract_isolated", False), ("atom_filter", 1))
    for name, value in changes:
        setattr(potential, name, value)
        torch.testing.assert_close(evaluator(system).energy, potential(system).energy, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("channels", [8, 32])
def test_what_a_potential_newly_refuses_is_refused(channels):
    """Changes of total_charges and closed_shell are noticed, by structures that were evaluated before."""
    ion, radical = (water(charge=torch.tensor([q])) for q in (-1.0, 1.0))
    known = make("tensornet2", channels=channels, elements=[1, 8])
    evaluator = Evaluator(known)
    for system in (ion, radical):
        evaluator(system)
    known.total_charges = [0.0, 1.0]
    with pytest.raises(UntrainedCharge, match="total charge -1"):
        evaluator(ion)
    evaluator(radical)
    known.closed_shell = True
    with pytest.raises(UntrainedCharge, match="an odd number of electrons"):
        evaluator(radical)


@pytest.mark.parametrize("channels", [8, 32])
def test_positions_of_another_size_that_are_assigned(channels):
    evaluator, system = Evaluator(make(channels=channels)), water()
    evaluator(system)
    system.pos = system.pos[:2]
    with pytest.raises(ValueError, match=r"pos must have shape \(3, 3\), and \(2, 3\) was assigned"):
        evaluator(system)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precision": "float16"}, "precision must be .*'float64', got 'float16'"),
        ({"precision": True}, "precision must be .*, got True"),
        ({"graphs": "yes"}, "graphs must be 'auto', True or False, got 'yes'"),
        ({"graphs": 2}, "graphs must be 'auto', True or False, got 2"),
        ({"graphs": np.ones(2)}, "graphs must be 'auto', True or False, got array"),
        ({"stress": "yes"}, "stress must be True or False, got 'yes'"),
        ({"stress": None}, "stress must be True or False, got None"),
    ],
)
def test_unknown_options(given, words):
    with pytest.raises(ValueError, match=words):
        Evaluator(make(), **given)


def test_flags_of_a_call():
    """What Python would take for True is refused; 0, 1 and booleans of NumPy and PyTorch are booleans."""
    evaluator, system = Evaluator(make()), water()
    with pytest.raises(ValueError, match="forces must be True or False, got 'no'"):
        evaluator(system, forces="no")
    for call in (evaluator, evaluator.bind, evaluator.report):
        with pytest.raises(ValueError, match="stress must be True or False, got 'yes'"):
            call(system, stress="yes")
    for false, true in ((np.bool_(False), np.bool_(True)), (0, 1), (torch.tensor(False), torch.tensor(True))):
        assert evaluator(system, forces=false).forces is None and Evaluator(make(), stress=true).stress is True


def test_errors_are_those_of_the_potential():
    evaluator = Evaluator(make(elements=[1, 8]))
    with pytest.raises(UnknownElement, match="atom 0 is C"):
        evaluator(water().replace(z=torch.tensor([6, 1, 1])))
    with pytest.raises(ValueError, match="atom 1: its position is not finite"):
        evaluator(water().replace(pos=torch.tensor([[0.0, 0, 0], [float("nan"), 0, 0], [0, 1, 0]])))
    with pytest.raises(ValueError, match="no cell with a volume"):
        evaluator(water(), stress=True)


def test_a_system_elsewhere_is_refused():
    with pytest.raises(ValueError, match="the system is on 'meta' and the potential on 'cpu'"):
        Evaluator(make())(
            System(z=torch.ones(2, dtype=torch.long, device="meta"), pos=torch.zeros(2, 3, device="meta"))
        )


def test_report_says_why():
    assert "need hidden_channels to be" in Evaluator(make()).report()
    assert "float64" in Evaluator(make(), precision="float64").report()


@pytest.mark.parametrize("precision", ["mixed", "tf32"])
def test_lower_precision_is_refused_where_there_are_no_kernels(precision):
    words = rf"precision='{precision}': .* the potential is on a CPU; take precision='native'"
    with pytest.raises(ValueError, match=words):
        Evaluator(make(), precision=precision)


def test_kernels_are_not_for_gpus_before_ampere(monkeypatch):
    from torchmdnet2.engine.select import unsupported_reason

    potential = Potential.from_config({"model": {"name": "tensornet", **SMALL, "hidden_channels": 32}})

    class OnGpu:
        device = torch.device("cuda")

        def __getattr__(self, name):
            return getattr(potential, name)

    for capability, reason in (((7, 5), "compute capability 8.0"), ((8, 0), ""), ((12, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert reason in unsupported_reason(OnGpu()) and bool(reason) == bool(unsupported_reason(OnGpu()))


def test_copies_and_pickles_evaluate_alike():
    evaluator = Evaluator(make(), stress=True)
    system = water(cell=6 * torch.eye(3))
    for other in (copy.deepcopy(evaluator), pickle.loads(pickle.dumps(evaluator))):
        assert other.stress and other.potential is not evaluator.potential
        assert_equal(other(system), evaluator(system))


def test_bound_step():
    potential = make().eval()
    system = water(dtype=torch.float64, cell=6 * torch.eye(3))
    bound = Evaluator(potential).bind(system, stress=True)
    assert_equal(bound_result(bound), bound_result(potential(system, stress=True)))
    forces = bound.forces
    bound.pos.mul_(1.1)
    bound.cell.mul_(1.01)
    bound.replay()
    assert bound.check() and bound.forces is forces
    moved = system.replace(pos=system.pos * 1.1, cell=system.cell * 1.01)
    assert_equal(bound_result(bound), bound_result(potential(moved, stress=True)))
    assert_equal(bound_result(bound.fetch()), bound_result(bound))
    assert torch.equal(system.pos, water(dtype=torch.float64).pos)  # the structure given is not written to
    bound.pos[2] = float("nan")
    bound.replay()
    assert bound.forces.isnan().all()
    with pytest.raises(ValueError, match="atom 2"):
        bound.check()
    bound.pos.copy_(system.pos)
    bound.replay()
    assert bound.check() and not bound.forces.isnan().any()


def bound_result(given):
    from torchmdnet2.potential.potential import Result

    return Result(given.energy, given.forces, given.stress, given.atom_energies)


@pytest.mark.parametrize("channels", [8, 32])
def test_a_bound_step_keeps_its_weights(channels):
    potential, system = make(channels=channels), water()
    step = Evaluator(potential).bind(system)
    before = step.energy.clone(), step.forces.clone()
    with torch.no_grad():
        for weight in potential.parameters():
            weight.mul_(1.5)
    step.replay()
    assert step.check() and torch.equal(step.energy, before[0]) and torch.equal(step.forces, before[1])


def test_inference_mode_and_no_grad():
    evaluator, system = Evaluator(make()), water()
    expected = evaluator(system)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            assert_equal(evaluator(system.replace(pos=system.pos.clone())), expected)


def test_threads():
    evaluator = Evaluator(make())
    systems = [water().replace(pos=water().pos * (1 + 0.05 * k)) for k in range(4)]
    expected = [evaluator(s) for s in systems]
    wrong = []

    def work(k):
        wrong.extend(k for _ in range(5) if not torch.equal(evaluator(systems[k]).forces, expected[k].forces))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_import_needs_torch_alone():
    code = """
import sys
for name in ("triton", "numba", "ase", "vesin", "pydantic", "h5py", "yaml", "rich"):
    sys.modules[name] = None
import torch
from torchmdnet2 import Evaluator, Potential, System
potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": 32, "num_rbf": 4, "max_z": 10}})
evaluator = Evaluator(potential)
assert "reference path" in evaluator.report() and "need numba" in evaluator.report()
water = System(z=torch.tensor([8, 1]), pos=torch.tensor([[0.0, 0, 0], [1, 0, 0]]))
assert torch.allclose(evaluator(water).forces, potential(water).forces, rtol=0, atol=1e-6)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("door", ["evaluator", "bound", "potential", "ase"])
def test_positions_in_nm_are_warned_of(door):
    atoms = molecule("CH3CH2OH")
    atoms.positions /= 10
    potential, system = make().eval(), System.from_ase(atoms)
    with pytest.warns(StructureWarning, match=r"within 0\.1\d Å of another one.*nm, multiply positions and cell by 10"):
        if door == "evaluator":
            Evaluator(potential)(system)
        elif door == "bound":
            Evaluator(potential).bind(system)
        elif door == "potential":
            potential(system)
        else:
            atoms.calc = TorchMDNet2Calculator(potential)
            atoms.get_potential_energy()


@pytest.mark.parametrize("atoms", [molecule("CH3CH2OH"), Atoms("H2", [[0, 0, 0], [0, 0, 0.2]]), molecule("H2O")])
def test_other_positions_are_not_taken_for_nm(atoms, recwarn):
    if len(atoms) == 3:  # two atoms that are too close are not a wrong unit
        atoms.positions[1] = atoms.positions[0] + [0, 0, 0.2]
    Evaluator(make().eval())(System.from_ase(atoms))
    assert not [w for w in recwarn if "nm" in str(w.message)]
