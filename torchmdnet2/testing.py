"""Checks for authors of models, priors and neighbor searches.

Shapes: N atoms.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .errors import UnknownElement, UntrainedCharge, UntrainedChargeWarning
from .neighbors import BACKENDS, NeighborList, neighbor_list
from .neighbors.pairs import PairLists
from .neighbors.reference import neighbor_list_reference
from .potential.graph import Features, Graph, Head, PropertyHead, Representation, atom_counts, sum_over_systems
from .potential.potential import Potential
from .potential.prior import Prior
from .system import System

__all__ = [
    "POTENTIAL_CHECKS", "SYSTEM_CHECKS", "check_neighbor_backend", "check_potential", "check_prior",
    "example_systems", "without_network",
]  # fmt: skip


def without_network(priors: Iterable[Prior], elements: Sequence[int], cutoff: float = 5.0) -> Potential:
    """Return a potential that is the sum of some priors; it predicts charges by element if one uses charges."""
    priors = list(priors)
    properties = [_ChargesByElement()] if any(prior.uses_charges for prior in priors) else []
    network = _NoNetwork(cutoff, max(elements, default=0) + 1)
    potential = Potential(network, _Zero(), priors, elements=elements, properties=properties)
    potential.allow_untrained_charge = True  # a prior need not see the charge
    return potential


class _NoNetwork(Representation):
    """A representation whose features are zero."""

    def __init__(self, cutoff: float, max_z: int):
        super().__init__()
        self.cutoff, self.hidden_channels, self.max_z = cutoff, 1, max_z
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, graph: Graph) -> Features:
        return Features(self.nothing.expand(graph.num_atoms, 1))


class _Zero(Head):
    def forward(self, features: Features, graph: Graph) -> Tensor:
        return 0 * features.x.squeeze(1)


class _ChargesByElement(PropertyHead):
    """Charges of a tenth of the atomic number, shifted so that they sum to the total charge."""

    property, per, unit = "charges", "atom", "e"

    def forward(self, features: Features, graph: Graph) -> Tensor:
        charges = 0.1 * graph.z.double()
        missing = graph.charge.double() - sum_over_systems(charges, graph.batch, graph.num_systems)
        return charges + (missing / atom_counts(graph).clamp(min=1)).index_select(0, graph.batch)


# --- The single checks behind `torchmdnet2.testing`: each function raises AssertionError with the measured number ---


def _atoms(z: Sequence[int], pos: Sequence[Sequence[float]], device: torch.device | str = "cpu") -> System:
    return System(z=torch.tensor(z, device=device), pos=torch.tensor(pos, dtype=torch.float64, device=device))


def _three(potential: Potential) -> list[int]:
    return [potential.elements[i % len(potential.elements)] for i in range(3)]


def _require(value: Tensor | float, bar: float, unit: str, fault: str) -> None:
    """Raise AssertionError unless value ≤ bar; NaN fails."""
    value = float(value.detach() if isinstance(value, Tensor) else value)
    if not value <= bar:
        raise AssertionError(f"{fault}: {value:.3g} {unit}, at most {bar:.3g} {unit} is allowed")


def _largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max()) if difference.numel() else 0.0


def _energies(potential: Potential, variants: Sequence[System], atoms_at_once: int = 600) -> Tensor:
    """Return the total energy of each variant, [len(variants)]; all have the same number of structures."""
    size = max(1, atoms_at_once // max(1, variants[0].num_atoms))
    parts = [
        potential(System.concatenate(variants[k : k + size]), forces=False).energy
        for k in range(0, len(variants), size)
    ]
    return torch.cat(parts).view(len(variants), -1).sum(1)


def _derivatives(potential: Potential, moves: Sequence[Callable[[float], System]], step: float) -> Tensor:
    """Return dE/dt at t = 0 along each move, [len(moves)], by five-point central differences (error of order step⁴)."""
    stencil = ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12))
    energies = _energies(potential, [move(k * step) for move in moves for k, _ in stencil]).view(len(moves), 4)
    return (energies * energies.new_tensor([w for _, w in stencil])).sum(1) / step


def forces_are_gradients(potential: Potential, system: System) -> None:
    """Forces are −dE/dx by central differences, to 1e-6 eV/Å."""

    def move(axis: int) -> Callable[[float], System]:
        unit = torch.zeros_like(system.pos)
        unit.view(-1)[axis] = 1.0
        return lambda t: system.replace(pos=system.pos + t * unit)

    numeric = _derivatives(potential, [move(k) for k in range(system.pos.numel())], 3e-4).view_as(system.pos)
    error = _largest(numeric + potential(system).forces)
    _require(error, 1e-6, "eV/Å", "forces differ from −dE/dx")


def stress_is_strain_derivative(potential: Potential, system: System) -> None:
    """The stress is (1/V) dE/dε in all six components, to 1e-6 of the largest; it is symmetric to 1e-10 eV/Å³."""
    if bool((system.volume == 0).any()):
        try:
            potential(system, stress=True)
        except ValueError:
            return
        raise AssertionError("a structure without a volume was given a stress instead of a ValueError")
    result = potential(system, stress=True)
    _require(_largest(result.stress - result.stress.transpose(1, 2)), 1e-10, "eV/Å³", "the stress is not symmetric")

    def move(a: int, b: int) -> Callable[[float], System]:
        strain = torch.zeros(3, 3, dtype=system.dtype, device=system.device)
        strain[a, b] += 0.5
        strain[b, a] += 0.5
        return lambda t: system.replace(pos=system.pos @ (eye + t * strain), cell=system.cell @ (eye + t * strain))

    eye, step = torch.eye(3, dtype=system.dtype, device=system.device), 1e-4
    pairs = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]
    numeric = _derivatives(potential, [move(a, b) for a, b in pairs], step)
    virial = (result.stress * system.volume[:, None, None]).sum(0)
    ours = torch.stack([virial[a, b] for a, b in pairs])
    rounding = 8 * torch.finfo(torch.float64).eps * _largest(result.energy) / step
    bar = 1e-6 * _largest(ours) + rounding
    _require(_largest(numeric - ours), bar, "eV", "stress × volume differs from the strain derivative of the energy")


def rotation_changes_nothing(potential: Potential, system: System) -> None:
    """A rotated structure (mirrored too, unless SO(3)) has the same energy to 1e-9 eV/atom; forces and stress turn."""
    random = torch.Generator().manual_seed(1)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=random, dtype=torch.float64))
    turn = (turn * torch.linalg.det(turn)).to(system.device)
    turns = {"rotated": turn}
    if getattr(potential.representation, "group", "O(3)") != "SO(3)":
        turns["mirrored"] = -turn
    stress = not bool((system.volume == 0).any())
    before = potential(system, stress=stress)
    for name, q in turns.items():
        after = potential(system.replace(pos=system.pos @ q, cell=system.cell @ q), stress=stress)
        per_atom = _largest(after.energy - before.energy) / max(1, system.num_atoms)
        _require(per_atom, 1e-9, "eV/atom", f"the energy of the {name} structure differs")
        _require(_largest(after.forces - before.forces @ q), 1e-8, "eV/Å", f"the forces are not {name}")
        if stress:
            turned = q.T @ before.stress @ q
            _require(_largest(after.stress - turned), 1e-8, "eV/Å³", f"the stress is not {name}")


def translation_changes_nothing(potential: Potential, system: System) -> None:
    """Translation, and moves by lattice vectors, keep the energy to 1e-9 eV/atom; the total force is 0 to 1e-9 eV/Å."""
    before = potential(system)
    images = torch.tensor([[(i * k) % 5 - 2 for k in (1, 2, 3)] for i in range(system.num_atoms)], device=system.device)
    whole = (images * system.pbc[system.batch]).to(system.dtype)
    moved = {
        "a moved structure": system.pos + system.pos.new_tensor([12.3, -7.7, 31.0]),
        "atoms moved by lattice vectors": system.pos + torch.einsum("ni,nij->nj", whole, system.cell[system.batch]),
    }
    for name, pos in moved.items():
        after = potential(system.replace(pos=pos))
        per_atom = _largest(after.energy - before.energy) / max(1, system.num_atoms)
        _require(per_atom, 1e-9, "eV/atom", f"the energy of {name} differs")
        _require(_largest(after.forces - before.forces), 1e-8, "eV/Å", f"the forces of {name} differ")
    _require(_largest(before.forces.sum(0)), 1e-9, "eV/Å", "the forces do not add up to zero")


def supercell_changes_nothing(potential: Potential, system: System) -> None:
    """A neutral cell twice, or with other lattice vectors, has the same energy to 1e-8 eV/atom, forces to 1e-7 eV/Å.

    Not checked for energies that are means over the atoms.
    """
    axes = system.pbc[0].nonzero()[:, 0].tolist() if system.num_systems == 1 else []
    mean = getattr(potential.head, "reduce", "sum") == "mean"
    if not axes or bool(system.charge.any()) or mean:
        return
    vector = system.cell[0, axes[0]]
    twice, other = system.cell.clone(), system.cell.clone()
    twice[0, axes[0]] *= 2
    pos = torch.cat([system.pos, system.pos + vector])
    variants = {"a supercell": (System(z=system.z.repeat(2), pos=pos, cell=twice, pbc=system.pbc), 2)}
    if len(axes) > 1:
        other[0, axes[1]] += vector
        variants["other lattice vectors"] = system.replace(cell=other), 1
    stress = not bool((system.volume == 0).any())
    before = potential(system, stress=stress)
    for name, (same, copies) in variants.items():
        after = potential(same, stress=stress)
        energy = (after.energy - potential.energy_shift) / copies
        per_atom = _largest(energy - (before.energy - potential.energy_shift)) / max(1, system.num_atoms)
        _require(per_atom, 1e-8, "eV/atom", f"the energy of {name} differs")
        _require(_largest(after.forces - before.forces.repeat(copies, 1)), 1e-7, "eV/Å", f"the forces of {name} differ")
        if stress:
            _require(_largest(after.stress - before.stress), 1e-8, "eV/Å³", f"the stress of {name} differs")


def order_does_not_matter(potential: Potential, system: System) -> None:
    """With atoms, or the edges of an atom, in another order, energy and forces are the same to 1e-10 eV, eV/Å."""
    random = torch.Generator().manual_seed(2)
    before = potential(system)
    atoms = torch.randperm(system.num_atoms, generator=random).to(system.device)
    after = potential(system.replace(z=system.z[atoms], pos=system.pos[atoms], batch=system.batch[atoms]))
    _require(_largest(after.energy - before.energy), 1e-10, "eV", "the energy depends on the order of the atoms")
    _require(_largest(after.forces - before.forces[atoms]), 1e-10, "eV/Å", "forces depend on the order of the atoms")

    edges = neighbor_list(system, potential.cutoff)
    shuffle = torch.randperm(edges.num_edges, generator=random).to(system.device)
    shuffle = shuffle[torch.argsort(edges.edge_index[0][shuffle], stable=True)]
    other = NeighborList(edges.edge_index[:, shuffle], edges.shift[shuffle], edges.row_ptr, edges.cutoff)
    after = potential(system, neighbors=other)
    _require(_largest(after.energy - before.energy), 1e-10, "eV", "the energy depends on the order of the edges")
    _require(_largest(after.forces - before.forces), 1e-10, "eV/Å", "the forces depend on the order of the edges")


def batch_equals_singles(potential: Potential, system: System) -> None:
    """In a batch with others, energy and forces are the same to 1e-10, and depend on no other structure (exactly)."""
    z = _three(potential)
    other = _atoms(z, [[0, 0, 0], [1.1, 0.2, 0], [-0.3, 1.0, 0.4]], system.device)
    lone = _atoms(z[:1], [[0, 0, 0]], system.device)
    parts = [other, system, lone]
    batch = System.concatenate(parts)
    together, alone = potential(batch), [potential(part) for part in parts]
    energies, forces = torch.cat([r.energy for r in alone]), torch.cat([r.forces for r in alone])
    _require(_largest(together.energy - energies), 1e-10, "eV", "the energy differs in a batch")
    _require(_largest(together.forces - forces), 1e-10, "eV/Å", "the forces differ in a batch")
    pos = batch.pos.clone().requires_grad_()
    energy = potential(batch.replace(pos=pos), forces=False, create_graph=True).energy
    if energy.requires_grad:
        (gradient,) = torch.autograd.grad(energy[0], pos, allow_unused=True)
        leak = 0.0 if gradient is None else _largest(gradient[batch.batch != 0])
        _require(leak, 0.0, "eV/Å", "the energy of one structure depends on the atoms of another")


def inputs_are_untouched(potential: Potential, system: System) -> None:
    """The system, torch's default type, generator and gradient mode are the same afterwards; the result is finite."""
    copies = {name: value.clone() for name, value in vars(system).items()}
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    state = torch.get_rng_state()
    result = potential(system)
    for name, value in copies.items():
        assert torch.equal(getattr(system, name), value), f"the system's {name} was changed"
        assert not getattr(system, name).requires_grad, f"the system's {name} was made to require a gradient"
    assert before == (torch.get_default_dtype(), torch.is_grad_enabled()), "torch's global state was changed"
    assert torch.equal(state, torch.get_rng_state()), "torch's random numbers were used"
    assert result.energy.dtype == torch.float64, f"the energy must be float64, not {result.energy.dtype}"
    assert bool(torch.isfinite(result.energy).all()), "the energy is not finite"
    split = torch.zeros_like(result.energy).index_add(0, system.batch, result.atom_energies)
    rest = _largest(split + potential.energy_shift - result.energy)
    _require(rest, 1e-9, "eV", "atom_energies do not add up to the energy")


# --- checks on the potential -----------------------------------------------------------------------------------------


def smooth_at_the_cutoff(potential: Potential) -> None:
    """When a pair crosses a cutoff, no force jumps by more than 1e-6 eV/Å.

    Forces 1e-5 and 3e-5 Å inside and outside are extrapolated linearly to the cutoff and compared, so that a slope is
    not taken for a jump.
    """
    z = _three(potential)
    # of the model, of priors, and of terms inside heads
    given = (getattr(module, "cutoff", None) for module in potential.modules())
    for cutoff in sorted({float(c) for c in given if isinstance(c, int | float) and math.isfinite(c)}):
        cluster = [[0.0, 0.0, 0.0], [-0.8, 0.6, 0.2], [-0.7, -0.7, 0.4]]
        systems = [
            _atoms([*z, z[-1]], [*cluster, [cutoff + x, 0, 0]], potential.device) for x in (-3e-5, -1e-5, 1e-5, 3e-5)
        ]
        far_in, just_in, just_out, far_out = (potential(system).forces for system in systems)
        jump = _largest((1.5 * just_in - 0.5 * far_in) - (1.5 * just_out - 0.5 * far_out))
        _require(jump, 1e-6, "eV/Å", f"a force jumps when a pair crosses {cutoff} Å")


def isolated_atoms_are_exact(potential: Potential) -> None:
    """A neutral atom alone has exactly the energy of the priors (+ energy_shift), and no force.

    Not checked for a potential with `subtract_isolated=False`.
    """
    z = torch.tensor(potential.elements, device=potential.device)
    pos = torch.zeros(z.shape[0], 3, dtype=torch.float64, device=z.device)
    system = System(z=z, pos=pos, batch=torch.arange(z.shape[0], device=z.device))
    result = potential(system)
    _require(_largest(result.forces), 0.0, "eV/Å", "a force acts on an isolated atom")
    if potential.subtract_isolated:
        neutral = torch.zeros(z.shape[0], dtype=torch.float64, device=z.device)
        expected = potential.prior_energies(system, charges=neutral).detach()
        error = _largest(result.energy - (expected + potential.energy_shift))
        _require(error, 0.0, "eV", "an isolated atom does not have its reference energy")


def small_structures_are_defined(potential: Potential) -> None:
    """No atoms, one atom, and no edges give right shapes and finite numbers."""
    z = _three(potential)
    cases = {
        "no atoms": System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3, dtype=torch.float64)),
        "one atom": _atoms(z[:1], [[1.0, 2.0, 3.0]]),
        "no edges": _atoms(z, [[0, 0, 0], [900.0, 0, 0], [0, 900.0, 0]]),
    }
    for name, system in cases.items():
        result = potential(system.to(potential.device))
        shapes = tuple(result.energy.shape), tuple(result.forces.shape)
        assert shapes == ((1,), (system.num_atoms, 3)), f"{name}: energy and forces have shapes {shapes}"
        finite = bool(torch.isfinite(result.energy).all() and torch.isfinite(result.forces).all())
        assert finite, f"{name}: energy or forces are not finite"


def charges_are_seen_or_refused(potential: Potential) -> None:
    """A representation that declares `reads_charge` gives another energy to another total charge; where no part
    declares it, the energy is the same and every charge but 0 is refused.
    """
    potential = copy.copy(potential)
    potential.total_charges, potential.allow_untrained_charge = None, True
    neutral = _atoms(_three(potential), [[0, 0, 0], [1.1, 0.1, 0], [0, 1.2, 0.2]], potential.device)
    charged = neutral.replace(charge=neutral.charge + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedChargeWarning)
        difference = _largest(potential(charged).energy - potential(neutral).energy)
    name = type(potential.representation).__name__
    if not potential.reads_charge:
        assert difference == 0, f"{name} changes with the total charge: it must declare reads_charge = True"
        potential.allow_untrained_charge = False
        _expect(UntrainedCharge, "total charge", potential, charged)
    elif potential.representation.reads_charge and potential.head is not None:
        assert difference > 0, f"{name} declares reads_charge = True, and the total charge does not change the energy"


def coincident_atoms_are_finite(potential: Potential) -> None:
    """Atoms at the same place, or nearly, give finite energy and forces, or a ValueError; never NaN.

    A call refuses them; the check calls what steps of a simulation and GPUs run, which do not.
    """
    for distance in (0.0, 1e-300, 1e-160, 1e-30, 1e-12, 1e-6):
        system = _atoms(_three(potential), [[0, 0, 0], [distance, 0, 0], [0.3, 1.2, 0]], potential.device)
        try:
            result = potential.compute(system, PairLists(system), forces=True, stress=False)
        except ValueError:
            continue
        assert result.forces is not None
        finite = bool(torch.isfinite(result.energy).all() and torch.isfinite(result.forces).all())
        assert finite, f"two atoms {distance:g} Å apart: energy or forces are not finite"


def bad_input_is_named(potential: Potential) -> None:
    """A position that is NaN, or an unknown element, gives an error that names the atom (and the known elements)."""
    good = _atoms(_three(potential), [[0, 0, 0], [1, 0, 0], [0, 1, 0]], potential.device)
    for value in (float("nan"), float("inf")):
        pos = good.pos.clone()
        pos[1, 2] = value
        _expect(ValueError, "atom 1", potential, good.replace(pos=pos))
        _expect(ValueError, "structure 0", potential, good.replace(charge=good.charge + value))
    top = potential.representation.max_z
    for number in {-1, 0, top, top + 3, *range(1, top)} - set(potential.elements):
        z = good.z.clone()
        z[2] = number
        _expect(UnknownElement, "atom 2", potential, good.replace(z=z))


def _expect(kind: type[Exception], words: str, potential: Potential, system: System) -> None:
    try:
        potential(system)
    except kind as error:
        assert words in str(error), f"the message '{error}' does not say '{words}'"
        return
    raise AssertionError(f"no {kind.__name__} about {words} was raised")


def training_gradients_are_finite(potential: Potential) -> None:
    """Gradients of energies and forces by the parameters are finite, also with an atom alone in the batch."""
    z = _three(potential)
    molecule = _atoms(z, [[0, 0, 0], [1, 0.2, 0], [0, 1, 0.1]])
    batch = System.concatenate([molecule, _atoms(z[:1], [[0, 0, 0]])]).to(potential.device)
    result = potential(batch, create_graph=True)
    loss = result.energy.square().sum() + result.forces.square().sum()
    parameters = {name: p for name, p in potential.named_parameters() if p.requires_grad}
    if loss.requires_grad and parameters:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            finite = gradient is None or bool(torch.isfinite(gradient).all())
            assert finite, f"the gradient of the loss by {name} is not finite"


SYSTEM_CHECKS: dict[str, Callable[[Potential, System], None]] = {
    check.__name__: check
    for check in (
        inputs_are_untouched,
        order_does_not_matter,
        batch_equals_singles,
        forces_are_gradients,
        stress_is_strain_derivative,
        rotation_changes_nothing,
        translation_changes_nothing,
        supercell_changes_nothing,
    )
}
"""name -> function(potential, system), both in float64."""

POTENTIAL_CHECKS: dict[str, Callable[[Potential], None]] = {
    check.__name__: check
    for check in (
        smooth_at_the_cutoff,
        isolated_atoms_are_exact,
        small_structures_are_defined,
        charges_are_seen_or_refused,
        coincident_atoms_are_finite,
        bad_input_is_named,
        training_gradients_are_finite,
    )
}
"""name -> function(potential), in float64."""


# --- Conformance checks for new potentials, priors and neighbor searches. No test framework is needed ---
#
# from torchmdnet2.testing import check_potential check_potential(Potential.from_config({"model": {"name":
# "my_model"}}))
#
# Every check raises AssertionError with the measured number and the bar. `POTENTIAL_CHECKS` and `SYSTEM_CHECKS` list
# them by name, so that a test can run them one by one. All run in float64.


def check_potential(potential: Potential, systems: Iterable[System] | None = None) -> None:
    """Check all properties that the package promises of a potential; a copy is run in float64.

    Args:
        potential: any potential; mirror images are compared unless its representation has `group = "SO(3)"`.
        systems: structures to check on; default: `example_systems` of its elements.

    Raises:
        AssertionError: names the check, the structure, the measured number and the bar.
    """
    potential = copy.deepcopy(potential).double().eval()
    # what holds of one charge holds of all
    potential.total_charges, potential.allow_untrained_charge = None, True
    named = example_systems(potential.elements, potential.cutoff) if systems is None else _number(systems)
    for check in POTENTIAL_CHECKS.values():
        check(potential)
    for name, system in named.items():
        for check_system in SYSTEM_CHECKS.values():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UntrainedChargeWarning)
                    check_system(potential, system.to(potential.device, torch.float64))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def check_prior(prior: Prior, systems: Iterable[System] | None = None, elements: Sequence[int] = (1, 6, 8)) -> None:
    """Check a prior as the only term of a potential; see `check_potential`.

    Args:
        prior: the prior; it is copied.
        systems: structures to check on; default: `example_systems`.
        elements: atomic numbers for the default structures.

    Raises:
        AssertionError: as check_potential.
    """
    check_potential(without_network([copy.deepcopy(prior)], elements), systems)


def check_neighbor_backend(
    backend: str | Callable[..., NeighborList], systems: Iterable[System] | None = None, cutoff: float = 4.0
) -> None:
    """Compare a neighbor search with the reference, pair by pair and shift by shift.

    Args:
        backend: a name in `torchmdnet2.neighbors.BACKENDS`, or a function(system, cutoff, half=False).
        systems: structures to check on; default: `example_systems`, singly and in one batch, and empty ones.
        cutoff: Å. Pairs within 1e-6 Å of it may be listed or not.

    Raises:
        AssertionError: names the structure and counts the wrong pairs.
    """
    search = BACKENDS[backend] if isinstance(backend, str) else backend
    if systems is None:
        named = example_systems((1, 6, 8), cutoff)
        named["batch"] = System.concatenate(list(named.values()))
        named["no atoms"] = System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3, dtype=torch.float64))
        named["one atom"] = System(z=torch.ones(1, dtype=torch.long), pos=torch.zeros(1, 3, dtype=torch.float64))
    else:
        named = _number(systems)
    for (name, system), half in itertools.product(named.items(), (False, True)):
        kind = f"{name}, {'half' if half else 'full'} list"
        found, wider = search(system, cutoff, half=half), neighbor_list_reference(system, cutoff + 1e-6, half=half)
        rows, sure = _rows(found), _rows(neighbor_list_reference(system, cutoff - 1e-6, half=half))
        assert len(set(rows)) == len(rows), f"{kind}: {len(rows) - len(set(rows))} edges are listed twice"
        missing, extra = set(sure) - set(rows), set(rows) - set(_rows(wider))
        assert not missing and not extra, f"{kind}: {len(missing)} edges are missing, {len(extra)} should not be there"
        assert rows == sorted(rows), f"{kind}: edges are not sorted by receiver, sender, shift"
        counts = torch.bincount(found.edge_index[0], minlength=system.num_atoms)
        assert torch.equal(torch.diff(found.row_ptr), counts), f"{kind}: row_ptr does not count the edges of each atom"
        assert found.row_ptr.shape == (system.num_atoms + 1,), f"{kind}: row_ptr has shape {tuple(found.row_ptr.shape)}"


# --- structures ------------------------------------------------------------------------------------------------------


def example_systems(elements: Sequence[int], cutoff: float = 5.0, seed: int = 0) -> dict[str, System]:
    """Return small random structures of the given elements: free, charged, and in cells of every kind.

    Args:
        elements: atomic numbers, used in turn.
        cutoff: Å; sets the size of the cells ("tiny" ones are narrower than it).
        seed: seed of the random numbers; torch's global generator is not touched.
    """
    random = torch.Generator().manual_seed(seed)
    z = torch.tensor([elements[i % len(elements)] for i in range(6)])
    cloud = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.float64) * 1.3
    cloud = cloud + 0.3 * (torch.rand(6, 3, generator=random, dtype=torch.float64) - 0.5)
    box = max(cutoff, 3.0) * torch.eye(3, dtype=torch.float64)
    skew = torch.tensor([[1.0, 0.1, -0.2], [0.45, 0.9, 0.1], [-0.3, 0.35, 1.1]], dtype=torch.float64)
    tiny = 2.2 * (skew + 0.15 * torch.rand(3, 3, generator=random, dtype=torch.float64))
    return {
        "molecule": System(z=z, pos=cloud),
        "ion": System(z=z, pos=cloud, charge=torch.tensor(-2.0), spin=1 + z.sum() % 2),
        "cubic cell": System(z=z, pos=cloud - 7.0, cell=2.1 * box),
        "triclinic cell": System(z=z, pos=cloud, cell=1.2 * box @ skew, charge=torch.tensor(1.0)),
        "left-handed cell": System(z=z, pos=cloud, cell=(1.1 * box @ skew)[[1, 0, 2]]),
        "tiny cell": System(z=z[:2], pos=cloud[:2], cell=tiny),
        "slab": System(z=z, pos=cloud, cell=box @ skew, pbc=torch.tensor([True, True, False])),
        "chain": System(z=z, pos=cloud, cell=torch.tensor([[0, 0, 0], [0, 3.4, 0.4], [0, 0, 0]])),
    }


def _number(systems: Iterable[System]) -> dict[str, System]:
    return {f"system {k}": system for k, system in enumerate(systems)}


def _rows(edges: NeighborList) -> list[tuple[int, ...]]:
    return list(map(tuple, torch.cat([edges.edge_index.T, edges.shift], 1).tolist()))
