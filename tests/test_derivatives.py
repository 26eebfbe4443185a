"""Derivatives by torch.autograd and torch.func are those of finite differences; what cannot be right is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from ase.build import molecule
from models.test_models_with_priors import CELL, CLOUD, PRIORS, SYSTEMS, Z, potential
from tiny import ethanol, tiny_potential
from torch.autograd.functional import hessian as autograd_hessian
from torch.autograd.functional import jacobian, vhp
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp
from variants import VARIANTS, variant

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import UndeterminedEnergyWarning, UntrainedChargeWarning
from torchmdnet2.models.tensornet import model as tensor_algebra
from torchmdnet2.potential import graph

STEP = 1e-4
FURTHER = {
    "tensornet2_so3_gauss", "tensornet2_all_pairs", "equivariant_transformer_plain", "transformer_values",
    "graph_network_mean", "coulomb, switched", "reaction field", "organic",
}  # fmt: skip
"""Variants of others."""


def with_further(names):
    """All of these, the further ones before a release."""
    return [pytest.param(name, marks=pytest.mark.long) if name in FURTHER else name for name in names]


COMPILED = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}


def differences(function, x):
    """The derivative of a function of x, [outputs, inputs], by central differences."""
    columns = []
    for k in range(x.numel()):
        step = torch.zeros_like(x).flatten()
        step[k] = STEP
        plus, minus = function(x + step.view_as(x)), function(x - step.view_as(x))
        columns.append((plus - minus).detach().flatten() / (2 * STEP))
    return torch.stack(columns, 1)


def close(found, expected, bound=1e-5):
    found = found.detach().double().reshape(expected.shape)
    assert float((found - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))
    assert float(expected.abs().max()) > 1e-3, "nothing is compared"


def check_jacobians(function, x):
    """The derivative of a function of x, by all ways of PyTorch."""
    expected = differences(function, x)
    for found in (jacobian(function, x), jacrev(function)(x), jacfwd(function)(x)):
        close(found, expected)


def check_second_derivatives(evaluate, system, bound=1e-5, nested=False):
    """H v for a direction v, by the ways in which PyTorch gets there; `nested`: also forward mode within others."""
    pos = system.pos
    along = torch.linspace(-1, 1.3, pos.numel(), dtype=pos.dtype).sin().reshape(pos.shape)

    def energy(pos):
        return evaluate(system.replace(pos=pos)).energy.sum()

    def gradient(pos):
        return -evaluate(system.replace(pos=pos)).forces

    def slope(pos):
        return jvp(energy, (pos,), (along,))[1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedChargeWarning)
        close(grad(energy)(pos), gradient(pos), bound)
        close(jacobian(energy, pos), gradient(pos), bound)
        expected = (gradient(pos + STEP * along) - gradient(pos - STEP * along)) / (2 * STEP)
        close(vhp(energy, pos, along)[1], expected, bound)
        close(jvp(grad(energy), (pos,), (along,))[1], expected, bound)
        close(jvp(gradient, (pos,), (along,))[1], expected, bound)
        close(grad(lambda pos: (gradient(pos) * along).sum())(pos), expected, bound)
        if nested:
            close(grad(slope)(pos), expected, bound)
            close(jvp(slope, (pos,), (along,))[1], (expected * along).sum(), bound)


@pytest.mark.parametrize("kind", with_further(VARIANTS))
def test_second_derivatives_of_every_model(kind):
    check_second_derivatives(
        variant(kind), SYSTEMS["molecule" if kind == "tensornet2_all_pairs" else "cell"], 1e-4, True
    )


@pytest.mark.parametrize("prior", with_further(PRIORS))
def test_second_derivatives_of_every_prior(prior):
    check_second_derivatives(
        potential("tensornet", prior), SYSTEMS["molecule" if prior == "coulomb, fixed" else "cell"]
    )


def test_second_derivatives_of_a_pair_potential():
    pairs = {"name": "pair_potential", "parameters": {"C-H": [1.0] * 8, "C-O": [0.5] * 8, "H-O": [2.0] * 8}}
    made = tiny_potential(priors=[pairs], elements=[1, 6, 8])
    check_second_derivatives(made, SYSTEMS["cell"])


@pytest.mark.parametrize("name", ["organic-small", pytest.param("organic", marks=pytest.mark.slow)])
def test_second_derivatives_of_a_shipped_potential(name):
    check_second_derivatives(load(name, dtype="float64"), System.from_ase(molecule("H2O")))


@pytest.mark.parametrize(
    "config",
    [{}, {"compositions": [{"1": 2, "8": 1}]}, {"closed_shell": True, "total_charges": [0.0]}],
    ids=["free", "one composition", "closed shell"],
)
def test_whole_hessians(config):
    """Whatever a model checks in a structure first."""
    made, system = tiny_potential(**config), System.from_ase(molecule("H2O"))

    def energy(pos):
        return made(system.replace(pos=pos)).energy.sum()

    expected = differences(lambda pos: -made(system.replace(pos=pos)).forces, system.pos)
    for found in (autograd_hessian(energy, system.pos), hessian(energy)(system.pos), jacrev(grad(energy))(system.pos)):
        close(found, expected)


@pytest.mark.parametrize("build", [Evaluator, lambda p: Ensemble([p, p])], ids=["evaluator", "ensemble"])
def test_compiled_paths_leave_derivatives_to_the_potential(build):
    """The kernels keep no graph: what they give would have derivatives of zero."""
    single = tiny_potential(dtype=torch.float32, model=COMPILED)
    system = System(z=Z[:3], pos=CLOUD[:3])
    fast = build(single)

    def energy(pos):
        return fast(system.replace(pos=pos)).energy.sum()

    exact = single.double()
    expected = autograd_hessian(lambda pos: exact(system.replace(pos=pos)).energy.sum(), system.pos)
    single.float()
    close(autograd_hessian(energy, system.pos), expected, 1e-3)
    close(jacrev(grad(energy))(system.pos), expected, 1e-3)
    assert fast(system).forces.requires_grad is False


def test_checks_warn_within_transforms_as_they_do_outside():
    made, system = tiny_potential(compositions=[{"1": 2, "8": 1}]), System.from_ase(molecule("CH4"))
    with pytest.warns(UndeterminedEnergyWarning, match="structure 0 is CH4"):
        grad(lambda pos: made(system.replace(pos=pos)).energy.sum())(system.pos)


def test_report_says_that_results_were_differentiated():
    evaluator = Evaluator(tiny_potential(dtype=torch.float32, model=COMPILED))
    if "compiled" not in evaluator.report():
        pytest.skip("there are no compiled kernels")
    evaluator(System(z=Z, pos=CLOUD.clone().requires_grad_()))
    assert "the results are differentiated" in evaluator.report()


@pytest.mark.parametrize("model", ["tensornet", "tensornet2"])
def test_derivatives_of_stress_and_energy_in_the_cell(model):
    made = potential(model, "ewald")
    system = SYSTEMS["cell"]

    def stress(cell):
        return made(system.replace(cell=cell[None]), stress=True).stress.flatten()

    def energy(cell):
        return made(system.replace(cell=cell[None])).energy

    for function in (energy, stress):
        check_jacobians(function, CELL)


def test_elastic_constants():
    """∂stress/∂strain, which differentiates the strain of the stress a second time."""
    made, system = potential("tensornet", "pme"), SYSTEMS["cell"]

    def stress(strain):
        deformed = torch.eye(3, dtype=torch.float64) + strain
        moved = system.replace(pos=system.pos @ deformed, cell=system.cell @ deformed)
        return made(moved, stress=True).stress.flatten()

    zero = torch.zeros(3, 3, dtype=torch.float64)
    check_jacobians(stress, zero)


def test_derivatives_of_charges_and_in_the_charge():
    made, system = potential("tensornet2", "atomref"), SYSTEMS["molecule"]

    def charges(pos):
        return made(system.replace(pos=pos)).charges

    def in_charge(charge):
        result = made(system.replace(charge=charge))
        return torch.cat([result.energy, result.forces.flatten()])

    made.total_charges = None
    made.allow_untrained_charge = True
    check_jacobians(charges, CLOUD)
    check_jacobians(in_charge, system.charge)


def test_derivatives_of_a_dipole():
    made = tiny_potential(properties=[{"name": "dipole"}])
    system = System.from_ase(molecule("H2O"))

    def dipole(pos):
        return made(system.replace(pos=pos)).properties["dipole"]

    check_jacobians(dipole, system.pos)


def test_derivatives_in_the_weights():
    made, system = tiny_potential(), System.from_ase(molecule("H2O"))
    name = next(name for name, _ in made.named_parameters() if "linears_scalar.0.bias" in name)
    weight = made.get_parameter(name).detach()

    def energy(value):
        return functional_call(made, {name: value}, (system,)).energy.sum()

    close(grad(energy)(weight), differences(energy, weight)[0])
    with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
        made(system).energy.sum().backward()  # a plain call gives numbers
    made(system, create_graph=True).energy.sum().backward()
    assert bool(made.get_parameter(name).grad.any())


def test_third_derivatives_and_forward_mode():
    made, system = tiny_potential(), System.from_ase(molecule("H2O"))
    along = torch.linspace(-1, 1, system.num_atoms * 3, dtype=torch.float64).reshape(-1, 3)

    def energy(pos):
        return made(system.replace(pos=pos)).energy.sum()

    def curvature(pos):
        return (along * jvp(grad(energy), (pos,), (along,))[1]).sum()

    expected = (curvature(system.pos + STEP * along) - curvature(system.pos - STEP * along)) / (2 * STEP)
    close((grad(curvature)(system.pos) * along).sum(), expected.detach(), 1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(system.pos, along)
        slope = torch.autograd.forward_ad.unpack_dual(energy(dual)).tangent
    close(slope, -(along * made(system).forces).sum())


def test_backward_through_energy_and_forces():
    made, system = tiny_potential(), System.from_ase(ethanol())
    pos = system.pos.clone().requires_grad_()
    result = made(system.replace(pos=pos))
    result.energy.sum().backward()
    assert float((pos.grad + result.forces.detach()).abs().max()) < 1e-12
    with torch.no_grad():
        for each in (made, Evaluator(made), load("organic-small"), Evaluator(load("organic-small"))):
            found = each(system.replace(pos=pos))
            parts = (found.energy, found.forces, found.charges, *(found.properties or {}).values())
            assert not any(part.requires_grad for part in parts if part is not None)
    assert not made(system).energy.requires_grad and not made(system).forces.requires_grad
    assert not made(system.replace(pos=pos), create_graph=False).energy.requires_grad


def test_nothing_of_a_transform_is_kept():
    """Constants that are made once must not belong to the transform within which they were made."""
    tensor_algebra._part_of_component.cache_clear()
    graph._atomic_masses.cache_clear()
    made = tiny_potential(properties=[{"name": "dipole"}])
    system = System.from_ase(molecule("H2O"))
    hessian(lambda pos: made(system.replace(pos=pos)).energy.sum())(system.pos)
    assert torch.isfinite(made(system).energy).all()


def test_structures_are_not_mapped():
    made, system = tiny_potential(), System.from_ase(ethanol())

    def energy(pos):
        return made(system.replace(pos=pos)).energy.sum()

    with pytest.raises(ValueError, match=r"torch.vmap over pos.*System.concatenate"):
        torch.vmap(energy)(system.pos[None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_refused(dtype):
    made, system = tiny_potential(dtype=torch.float32), System.from_ase(ethanol())
    before = made(system).energy
    for convert in (
        made.half if dtype == torch.float16 else made.bfloat16, lambda: made.to(dtype), lambda: made.to("cpu", dtype),
        lambda: made.type(dtype), lambda: made.to(torch.empty(0, dtype=dtype)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="only float32 and float64"):
            convert()
    assert torch.equal(made(system).energy, before), "a conversion that is refused changes nothing"
    with pytest.raises(ValueError, match="must be float32 or float64"):
        load("organic-small", dtype=dtype)
    with pytest.raises(ValueError, match=r"positions in b?float16"):
        made(system.to(dtype=dtype))
    made.representation.to(dtype)
    with pytest.raises(ValueError, match="only float32 and float64"):
        made(system)


@pytest.mark.parametrize("kind", ["tensornet2_reaction_field", "equivariant_transformer", "graph_network"])
def test_autocast_changes_nothing(kind):
    made, system = variant(kind).float(), System(z=Z, pos=CLOUD)
    plain, paths = made(system, stress=False), (made, Evaluator(made))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for path in paths:
            found = path(system)
            assert abs(float(found.energy - plain.energy)) < 1e-4
            assert float((found.forces - plain.forces).abs().max()) < 1e-4


def test_torch_compile_runs_the_potential_as_it_is():
    made, system = tiny_potential(dtype=torch.float32), System.from_ase(ethanol())
    expected = made(system)
    with pytest.warns(UserWarning, match=r"no effect on a potential.*Evaluator"):
        found = torch.compile(made, backend="eager")(system)
    assert torch.equal(found.energy, expected.energy) and torch.equal(found.forces, expected.forces)
    evaluator = Evaluator(made)
    twice = torch.compile(lambda system: 2 * evaluator(system).energy, backend="eager")(system)
    assert abs(float(twice - 2 * expected.energy)) < 1e-3
