"""Potential and Result: the energy, forces and stress of structures. Shapes: N atoms, B structures."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.devices import expect_forks, refuse_forked_gpu
from ..neighbors import NeighborList, neighbor_list
from ..neighbors.neighbor_list import refuse_coincident
from ..neighbors.pairs import PairLists
from ..registry import HEADS, PRIORS, REPRESENTATIONS
from ..system import System, outside_transforms
from .cells import CoulombInCells, Portion, divided, evaluate_portions, is_mixed
from .derivatives import energy_and_gradients, is_differentiated, not_compiled, outside_modes, stress_of
from .determined import Determined
from .graph import (
    Features,
    Graph,
    Head,
    PropertyHead,
    Representation,
    atom_counts,
    charge_dipole,
    sum_over_systems,
)
from .levels import Level, build_levels, chosen_level, levels_of
from .novelty import Calibration
from .output import CHARGES, RESULTS, SPREADS, Output
from .prior import Prior
from .refusals import (
    SYMBOLS,
    refuse_charge,
    refuse_elements,
    refuse_neighbors,
    refuse_odd_electrons,
    refuse_precision,
    refuse_spin,
    require_stress,
    require_system,
    warn_of_units,
)

__all__ = ["SYMBOLS", "Potential", "Result", "has_dipole", "mean_of", "require_stress", "statistics", "with_dipole"]


@dataclass(eq=False)
class Result:
    """The results of a potential for a batch of structures.

    Attributes:
        energy: [B] eV, float64.
        forces: [N, 3] eV/Å, −dE/dpos; None if not requested.
        stress: [B, 3, 3] eV/Å³, (1/V) dE/dε, symmetric, tensile positive; None if not requested.
        atom_energies: [N] eV, float64, with priors; their sum is the energy.
        charges: [N] partial charges in e; None if the model has none.
        properties: name -> values of property heads, [B, …] for structures or [N, …] for atoms. If the model predicts
            charges but no dipole, "dipole" [B, 3] e·Å is the dipole of the charges about the centre of mass; it is NaN
            for periodic structures in a batch with molecules.
    """

    energy: Tensor
    forces: Tensor | None = None
    stress: Tensor | None = None
    atom_energies: Tensor | None = None
    charges: Tensor | None = None
    properties: Mapping[str, Tensor] = field(default_factory=dict)

    def first(self, num_atoms: int, num_systems: int, outputs: Mapping[str, Output]) -> Result:
        """Return the results of the first atoms and structures.

        Args:
            num_atoms, num_systems: N and B.
            outputs: those of the potential; other properties are left out.
        """

        def piece(value: Tensor, output: Output) -> Tensor:
            return value[: num_atoms if output.per_atom else num_systems]

        found = {name: piece(value, RESULTS[name]) for name, value in vars(self).items() if isinstance(value, Tensor)}
        known = {name: output for name, output in outputs.items() if name in self.properties}
        return Result(**found, properties={name: piece(self.properties[name], o) for name, o in known.items()})


def with_dipole(properties: Mapping[str, Tensor], charges: Tensor | None, system: System) -> Mapping[str, Tensor]:
    """Add the dipole of the charges (`charge_dipole`) to properties without a dipole.

    It is computed on first access, since most callers do not need it.

    Args:
        properties: name -> values.
        charges: [N] e; None if the model predicts none.
        system: the structures.
    """
    return properties if charges is None or "dipole" in properties else _WithDipole(properties, charges, system)


def has_dipole(outputs: Mapping[str, Output]) -> bool:
    """Return whether results have a dipole, from a head or from charges.

    Args:
        outputs: outputs of the potential.
    """
    return not outputs.keys().isdisjoint(("dipole", "charges"))


class _WithDipole(Mapping[str, Tensor]):
    def __init__(self, properties: Mapping[str, Tensor], charges: Tensor, system: System):
        # copies, since both may be overwritten before the first access
        self._known, self._charges = dict(properties), charges.clone()
        self._system = system.at(system.pos.clone())

    @cached_property
    def _names(self) -> list[str]:
        """Return the names of properties; a batch of crystals has no dipole."""
        is_molecule = ~self._system.pbc.any(1)
        return [*self._known, *(["dipole"] if bool(is_molecule.any()) else [])]

    def __getitem__(self, name: str) -> Tensor:
        if name == "dipole" and name not in self._known and name in self._names:
            dipole = charge_dipole(self._charges.to(self._system.device), self._system)
            self._known[name] = dipole.to(self._charges.device)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


# --- Potential: representation + head + priors → energy, forces, stress. It specifies the results of all kernels ---


class Potential(nn.Module):
    """A neural-network potential with physical priors: it evaluates energies, forces and stress of structures.

    The energy of a structure is Σ_i [ energy_scale · (ε_i − ε_i⁰) + priors_i ] + energy_shift. Here ε_i is the output
    of the head, and ε_i⁰ its output for the same atom alone and neutral, so that separated atoms have exactly the
    energies of the priors (reference energies). Sums are in float64.

    Args:
        representation: network that turns a structure into features of atoms.
        head: head that turns features into energies of atoms; None for a model of other properties, whose energy is
            the energy of the priors.
        priors: physical energies that are added.
        energy_scale: the head's unit in eV.
        energy_shift: eV, added once to each structure (0 except for models trained on standardised energies).
        subtract_isolated: subtract ε_i⁰; False for models that were trained without.
        elements: atomic numbers that the model was trained on; None means all that it can represent.
        properties: heads of further properties; the one named "charges" gives `Result.charges`.
        atom_filter: atoms with atomic numbers up to this one take part in the messages, but have no energy and do not
            count in properties; −1 keeps all.
        total_charges: total charges in e of the training structures; None: not stated.
        closed_shell: True if all training structures had closed shells; odd numbers of electrons are then refused.
        compositions: atomic number -> number of atoms. Only combinations of these have determined reference energies;
            others cause a warning. None: the reference energy of every element is determined.
        config: the configuration from which `from_config` can build this potential, stored in model files.
        others: further networks of the same form (representation, head), each with its priors that depend on the
            elements alone. All results are then means over all members, and their spread is known.

    Attributes:
        allow_untrained_charge: evaluate structures that are otherwise refused with UntrainedCharge, with a warning.
        coulomb: method for Coulomb sums over all pairs in periodic cells, "pme" or "dsf"; see `in_cells`.
        fast_calls: evaluator of calls in evaluation mode (`torchmdnet2.load` sets it); None: autograd.
        calibration: calibration that `novelty` uses, stored in model files; None: not calibrated.
        level_names: the levels of theory, the default one first; empty for a model of one level.
    """

    _known: Tensor
    priors: Iterable[Prior]
    fast_calls: Callable[[Potential, System, bool, bool], Result | None] | None = None

    def __init__(
        self,
        representation: Representation,
        head: Head | None,
        priors: Iterable[Prior] = (),
        energy_scale: float = 1.0,
        energy_shift: float = 0.0,
        subtract_isolated: bool = True,
        elements: Iterable[int] | None = None,
        properties: Iterable[PropertyHead] = (),
        atom_filter: int = -1,
        total_charges: Iterable[float] | None = None,
        closed_shell: bool = False,
        compositions: Iterable[Mapping[int | str, int]] | None = None,
        config: Mapping[str, Any] | None = None,
        others: Iterable[tuple[Representation, Head, Sequence[Prior]]] = (),
    ):
        super().__init__()
        expect_forks()
        self.representation = representation
        self.head = head
        self.others = nn.ModuleList(
            nn.ModuleDict({"representation": r, "head": h, "priors": nn.ModuleList(p)}) for r, h, p in others
        )
        self.priors = nn.ModuleList(priors)  # type: ignore[assignment]
        self.energy_scale, self.energy_shift = float(energy_scale), float(energy_shift)
        self.subtract_isolated = subtract_isolated
        properties = list(properties)
        self.properties = nn.ModuleDict({p.property: p for p in properties})
        if len(self.properties) < len(properties):
            raise ValueError(f"two heads predict the same property: {', '.join(p.property for p in properties)}")
        for part in (*([] if head is None else [head]), *properties):
            if part.reads_vectors and representation.gives_vectors is False:
                raise ValueError(
                    f"{type(part).__name__}: this head needs vector features, which {type(representation).__name__} "
                    "does not give: use the model 'equivariant_transformer', or another head"
                )
        self.atom_filter = int(atom_filter)
        top = representation.max_z
        self.elements = sorted({int(z) for z in (range(1, top) if elements is None else elements)})
        if self.elements and not 0 < self.elements[0] <= self.elements[-1] < top:
            raise ValueError(f"elements must be atomic numbers 1 … {top - 1} (max_z − 1), got {self.elements}")
        self.total_charges = None if total_charges is None else sorted({float(q) for q in total_charges})
        self.closed_shell = bool(closed_shell)
        self.determined = None if compositions is None else Determined(compositions)
        self.levels = nn.ModuleList()
        self.level_names: list[str] = []
        self.allow_untrained_charge = False
        self.coulomb: CoulombInCells = "pme"
        self.calibration: Calibration | None = None
        known = torch.zeros(top, dtype=torch.bool)
        known[self.elements] = True
        self.register_buffer("_known", known, persistent=False)
        self.config: dict[str, Any] = dict(config or {})
        self.metadata: dict[str, Any] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], network: Potential | None = None) -> Potential:
        """Build an untrained potential from plain data.

        Args:
            config: {"model": {"name": …, arguments}, "head": {"name": …, arguments} or None, "properties": [{"name":
                …, arguments}, …], "priors": [{"name": …, arguments}, …], "energy_scale", "energy_shift",
                "subtract_isolated", "elements", "atom_filter", "total_charges", "closed_shell", "compositions",
                "others": [{"priors": [priors of a further member that depend on the elements alone]}, …], "level": name
                of the default level of theory, "levels": {name: configuration of a `Level`}}. Only "model" is required.
                "head" may also be a head that does not predict the energy.
            network: a potential with the same "model", "head" and "properties", whose representation and heads are used
                instead of new ones; scale and shift of the heads may differ.

        Raises:
            KeyError: a name is not registered.
            TypeError, ValueError: an argument is unknown or out of range.
        """
        heads = [dict(p) for p in config.get("properties") or []]
        if config.get("head", {}) is not None:
            heads.insert(0, {"name": "scalar", **config.get("head", {})})
        others: list[tuple[Representation, Head, list[Prior]]] = []
        if network is None:
            representation, built = _network(config["model"], heads)
            for own in config.get("others") or []:
                other, further = _network(config["model"], heads)
                if len(further) != 1 or isinstance(further[0], PropertyHead):
                    raise ValueError("potentials of several members have the head of the energy only")
                built_priors = _priors(own.get("priors") or config.get("priors"))
                others.append((other, further[0], [prior for prior in built_priors if prior.constant]))
        else:
            representation = network.representation
            built = _with_scales([*filter(None, [network.head]), *network.properties.values()], heads)
        energy_heads = [head for head in built if not isinstance(head, PropertyHead)]
        if len(energy_heads) > 1:
            raise ValueError('a model has one energy head: "properties" takes heads of other properties only')
        potential = cls(
            representation,
            energy_heads[0] if energy_heads else None,
            _priors(config.get("priors")),
            energy_scale=config.get("energy_scale", 1.0),
            energy_shift=config.get("energy_shift", 0.0),
            subtract_isolated=config.get("subtract_isolated", True),
            elements=config.get("elements"),
            properties=[head for head in built if isinstance(head, PropertyHead)],
            atom_filter=config.get("atom_filter", -1),
            total_charges=config.get("total_charges"),
            closed_shell=config.get("closed_shell", False),
            compositions=config.get("compositions"),
            config=config,
            others=others,
        )
        if config.get("level") is not None:
            potential.set_levels(config["level"], config.get("levels") or {})
        return potential

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Potential:
        """Apply a conversion such as `to` or `float`; refuse 16 bits."""
        refuse_precision(fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # --- properties ----------------------------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """Cutoff of the network's neighbor list, Å."""
        return self.representation.cutoff

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the network."""
        return next(self.representation.parameters()).dtype

    @property
    def elements_of_levels(self) -> list[int]:
        """Atomic numbers of the training at any level of theory; `elements` has those of the default level."""
        levels: Iterable[Level] = self.levels  # type: ignore[assignment]
        return sorted({*self.elements, *(int(z) for level in levels for z in level.config.get("elements") or ())})

    @property
    def level_of_theory(self) -> str | None:
        """Level of theory of the training labels; None if the metadata do not state it."""
        found = levels_of(self.config, self.metadata)
        return found[0] if found else None

    @property
    def device(self) -> torch.device:
        return self._known.device

    @property
    def reads_charge(self) -> bool:
        """True if the energy depends on the total charge; for a model without energy, True if a property does."""
        parts = [self.representation, *self.priors, *(self.properties.values() if self.head is None else [self.head])]
        return any(part.reads_charge for part in parts) or any(prior.uses_charges for prior in self.priors)

    @property
    def outputs(self) -> dict[str, Output]:
        """Name -> output, for all outputs besides energy, forces and stress, as the parts declare them."""
        found = {output.name: output for output in self.representation.outputs}
        found |= SPREADS if self.others else {}
        heads: Iterable[tuple[str, PropertyHead]] = self.properties.items()  # type: ignore[assignment]
        return found | {name: head.output for name, head in heads}

    @property
    def members(self) -> list[Potential]:
        """Each network with its priors as a potential with shared weights; a single potential is its only member."""
        if not self.others:
            return [self]
        shared = [prior for prior in self.priors if not prior.constant]
        others: Any = self.others
        return [self._with()] + [
            self._with(**{**other, "priors": nn.ModuleList([*other["priors"], *shared])}) for other in others
        ]

    def _with(self, **modules: Any) -> Potential:
        """Return a potential of one member with some other parts and shared weights."""
        part = copy.copy(self)
        part.fast_calls = None
        part._modules = {**self._modules, "others": nn.ModuleList(), **modules}
        return part

    def in_cells(self, coulomb: CoulombInCells | None = None) -> Potential:
        """Return the potential for periodic cells: itself, or one with other sums if a part sums over all pairs.

        In cells, Coulomb energies are summed over all images, and D3 dispersion has a cutoff. Weights are shared.

        Args:
            coulomb: "pme" or "dsf"; None takes the potential's setting.

        Returns:
            The potential; itself in training mode, since its configuration defines what is trained.
        """
        if self.training:
            return self
        chosen = self.coulomb if coulomb is None else coulomb
        priors: list[Prior] = [prior.in_cells(chosen) for prior in self.priors]
        head = None if self.head is None else self.head.in_cells(chosen)
        if head is self.head and all(map(operator.is_, priors, self.priors)):
            return self
        return self._with(priors=nn.ModuleList(priors).eval(), head=head, others=self.others)

    def set_levels(self, default: str, further: Mapping[str, dict[str, Any]]) -> None:
        """Add further levels of theory, which `at_level` chooses.

        Args:
            default: name of the present level.
            further: name -> configuration of a `Level`.

        Raises:
            ValueError: a level has reference energies, but there is no prior atomref; or there are several members.
        """
        if self.others:
            raise ValueError("a potential of several members cannot have several levels of theory")
        self.config = {**self.config, "level": default, "levels": dict(further)}
        self.levels = nn.ModuleList(build_levels(self.config, self.head).values()).to(self.device)
        self.level_names = [default, *further]

    def at_level(self, name: str) -> Potential:
        """Return the potential of a single level of theory, with shared weights.

        Args:
            name: one of `level_names`, or the stated level of a model with a single level.

        Raises:
            ValueError: the model does not have this level.
        """
        chosen_level(name, levels_of(self.config, self.metadata))
        if not self.level_names:
            return self
        part = self._with(levels=nn.ModuleList())
        part.level_names = []
        part.config = {key: value for key, value in self.config.items() if key not in ("level", "levels")}
        data, errors = self.metadata.get("data"), self.metadata.get("errors")
        kept = {k: v for k, v in data.items() if k != "levels"} if isinstance(data, Mapping) else {}
        part.metadata = {**self.metadata, "data": {**kept, "level_of_theory": name}}
        if isinstance(errors, Mapping):  # of "test, LEVEL"
            of_level = {subset.partition(", ")[::2]: found for subset, found in errors.items()}
            part.metadata["errors"] = {k: found for (k, of), found in of_level.items() if of in ("", name)}
        if name != self.level_names[0]:
            level: Level = self.levels[self.level_names.index(name) - 1]  # type: ignore[assignment]
            part.config = level.complete(part.config)
            names = [prior["name"] for prior in part.config.get("priors") or []]
            part._modules["priors"] = nn.ModuleList(level.priors(self.priors, names)).train(self.training)
            if level.head is not None:
                part._modules["head"] = level.head
            part.energy_scale = float(part.config.get("energy_scale", 1.0))
            charges, compositions = part.config.get("total_charges"), part.config.get("compositions")
            part.total_charges = None if charges is None else sorted({float(q) for q in charges})
            part.determined = None if compositions is None else Determined(compositions)
            part.elements = sorted(part.config.get("elements") or self.elements)
            known = torch.zeros_like(self._known)
            known[part.elements] = True
            part._buffers = {**self._buffers, "_known": known}
        return part

    # --- evaluation ----------------------------------------------------------------------------------------------

    @not_compiled
    def forward(
        self,
        system: System,
        forces: bool = True,
        stress: bool = False,
        neighbors: NeighborList | None = None,
        create_graph: bool | None = None,
    ) -> Result:
        """Compute energy, forces and stress of a batch of structures.

        Args:
            system: N atoms in B structures, on the potential's device; it is not changed.
            forces: compute the forces.
            stress: compute the stress.
            neighbors: a list of all edges within `cutoff` or further, to reuse it; None searches the edges.
            create_graph: keep the graph, so that results can be differentiated (again). None keeps it in training mode,
                if positions, cells or charges require a gradient, and within a transform of `torch.func`.

        Returns:
            Result; forces and stress have the floating-point type of `system.pos`.

        Raises:
            ValueError: a position, cell or charge is not finite (the message names the atom), two atoms are at the same
                place, the stress is requested without a cell, the model does not know the spin state, or `neighbors`
                lacks edges.
            UnknownElement: the model was not trained on the element of an atom.
            UntrainedCharge: the model was not trained on a total charge or odd number of electrons, or ignores it.
        """
        if create_graph is None:
            create_graph = is_differentiated(require_system(system)) or self.training
        if self.fast_calls is not None and neighbors is None and not (create_graph or self.training):
            result = self.fast_calls(self, require_system(system), forces, stress)
            if result is not None:
                return result
        return self.reference(system, forces, stress, neighbors, create_graph)

    @not_compiled
    def reference(
        self,
        system: System,
        forces: bool = True,
        stress: bool = False,
        neighbors: NeighborList | PairLists | None = None,
        create_graph: bool | None = None,
    ) -> Result:
        """Compute the same by autograd in plain PyTorch, which specifies the results of all kernels. See `forward`.

        Args:
            system: as for `forward`.
            forces: as for `forward`.
            stress: as for `forward`.
            neighbors: as for `forward`, or lists for several cutoffs.
            create_graph: as for `forward`; True for gradients by weights in evaluation mode.
        """
        if create_graph is None:
            create_graph = is_differentiated(require_system(system)) or self.training
        self.check(system)
        if stress:
            require_stress(system)
        if bool(system.detach().pbc.any()) and (cells := self.in_cells()) is not self:
            if not is_mixed(system):
                return cells.reference(system, forces, stress, neighbors, create_graph)
            return self._of_molecules_and_cells(cells, system, forces, stress, create_graph)
        with outside_modes(self.device), torch.enable_grad():
            if neighbors is None:
                neighbors = neighbor_list(system, self.cutoff)
            lists = neighbors if isinstance(neighbors, PairLists) else PairLists(system, {self.cutoff: neighbors})
            refuse_neighbors(lists(self.cutoff), system, self.cutoff)
            refuse_coincident(lists(self.cutoff), system)
            result = self.compute(system, lists, forces, stress, create_graph)
            result.properties = with_dipole(result.properties, result.charges, system)
            return result

    def _of_molecules_and_cells(
        self, cells: Potential, system: System, forces: bool, stress: bool, create_graph: bool
    ) -> Result:
        def evaluate(portion: Portion) -> Result:
            potential = cells if portion.periodic else self
            return potential.reference(portion.system, forces, stress, None, create_graph)

        result: Result = evaluate_portions(system, self.outputs, evaluate)
        result.properties = with_dipole(result.properties, result.charges, system)
        return result

    def check(self, system: System, charge: bool = True, names: Sequence[object] = ()) -> None:
        """Raise what `forward` raises for structures that cannot be evaluated. Waits for the device.

        Args:
            system: N atoms. Of their distances only a wrong unit is noticed, with a warning.
            charge: look at the total charges too.
            names: of the structures, for warnings; none: their numbers.
        """
        system = require_system(system).detach()
        refuse_forked_gpu(self.device)
        refuse_precision(self.dtype)
        refuse_precision(system.dtype, "positions")
        with outside_transforms():  # checks may read numbers
            system.validate()
            warn_of_units(system, names)
            self.check_elements(system.z)
            self.check_charge_and_spin(system, charge)
            if charge and self.closed_shell:
                refuse_odd_electrons(system, self.allow_untrained_charge)
            if charge and self.determined is not None:
                self.determined.warn(system, self.atom_filter, names)
            summing = self.in_cells() if bool(system.pbc.any()) else self
            for part in (*([] if self.head is None else [summing.head]), *self.properties.values(), *summing.priors):
                part.check(system)  # type: ignore[operator, union-attr]

    def check_charge_and_spin(self, system: System, charge: bool = True) -> None:
        """Raise what `check` raises for charge and spin.

        Args:
            system: B structures.
            charge: False: check the spin only.

        Raises:
            UntrainedCharge: the model does not know a total charge.
            ValueError: a spin multiplicity above 2, which the model does not read.
        """
        refuse_spin(system, self.representation.reads_spin, self.closed_shell)
        if charge:
            name = type(self.representation).__name__
            refuse_charge(system, self.total_charges, self.reads_charge, name, self.allow_untrained_charge)

    def compute(
        self,
        system: System,
        lists: PairLists,
        forces: bool,
        stress: bool,
        create_graph: bool = False,
        isolated: Tensor | None = None,
    ) -> Result:
        """Compute `forward` without its checks, on given pair lists; it waits for the device only if a part does.

        Args:
            system: as for `forward`.
            forces: as for `forward`.
            stress: as for `forward`.
            create_graph: as for `forward`.
            lists: pair lists by cutoff.
            isolated: `isolated_energies()`, if they are known.
        """
        if self.others:
            return mean_of([m.compute(system, lists, forces, stress, create_graph) for m in self.members])
        with outside_modes(self.device), torch.enable_grad():

            def energies(moved: System) -> tuple[Tensor, dict[str, Any]]:
                atom_energies, charges, properties = self._evaluate(moved, lists, isolated)
                energy = sum_over_systems(atom_energies, moved.batch, moved.num_systems) + self.energy_shift
                rest = {"atom_energies": atom_energies, "properties": properties}
                return energy, rest if charges is None else {**rest, "charges": charges}

            energy, rest, gradients = energy_and_gradients(energies, system, forces, stress, create_graph)
            result = Result(energy, **rest)
            if forces:
                result.forces = -gradients["pos"]
            if stress:
                result.stress = stress_of(gradients["strain"], system.volume)
        if not create_graph:
            result.properties = {name: value.detach() for name, value in result.properties.items()}
            for name, value in vars(result).items():
                if isinstance(value, Tensor):
                    setattr(result, name, value.detach())
        return result

    def atom_energies(
        self, system: System, neighbors: NeighborList | PairLists, isolated: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return energies [N] (eV, float64, with priors) and charges [N] or None of the atoms; differentiable.

        Args:
            system: N atoms.
            neighbors: edges within `cutoff`, or lists for several cutoffs.
            isolated: as for `compute`.
        """
        known = neighbors if isinstance(neighbors, PairLists) else PairLists(system, {self.cutoff: neighbors})
        if self.others:
            energies, charges = zip(*(m.atom_energies(system, known) for m in self.members), strict=True)
            return torch.stack(energies).mean(0), None if charges[0] is None else torch.stack(charges).mean(0)
        return self._evaluate(system, known, isolated)[:2]

    def _evaluate(
        self, system: System, lists: PairLists, isolated: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        neighbors = lists(self.cutoff)
        graph = Graph.build(system, neighbors, self.dtype, lists)
        if self.atom_filter >= 0:
            graph.readout = graph.z > self.atom_filter
        features = self.representation(graph)
        properties = {name: head(features, graph) for name, head in self.properties.items()}
        self._require_declared(features, properties, graph)
        charges = properties["charges"] if "charges" in properties else features.partial_charges
        energies = self._network_energies(features, graph, neighbors, isolated) * self.energy_scale
        energies = energies + self._prior_energies(system, lists, charges)[: graph.num_atoms]
        if graph.readout is not None:
            energies = torch.where(graph.readout, energies, 0.0)
        if neighbors.exchange is not None:  # ghosts have no energy
            energies = torch.cat([energies, energies.new_zeros(neighbors.exchange.num_ghosts)])
        return energies, charges, properties

    def _require_declared(self, features: Features, properties: dict[str, Tensor], graph: Graph) -> None:
        """Raise ValueError if the outputs of a part differ from its declaration."""
        for name, value in properties.items():
            head: PropertyHead = self.properties[name]  # type: ignore[assignment]
            size = head.output.size(graph.num_atoms, graph.num_systems)
            if tuple(value.shape) != size:
                raise ValueError(
                    f"the head {type(head).__name__} declares '{name}' as {head.output}, which is {list(size)} here, "
                    f"but gives {list(value.shape)}: set its attributes per ('atom' or 'system') and shape"
                )
        declared = CHARGES in self.representation.outputs
        if declared != (features.charges is not None):
            kind = type(self.representation).__name__
            raise ValueError(
                f"{kind} declares charges but predicts none: leave them out of its outputs"
                if declared
                else f"{kind} predicts charges that it does not declare: set outputs = (CHARGES,)"
            )

    def _network_energies(
        self, features: Features, graph: Graph, neighbors: NeighborList, isolated: Tensor | None
    ) -> Tensor:
        """Return ε_i − ε_i⁰ in the head's unit, [N] float64."""
        if self.head is None:
            return torch.zeros(graph.num_atoms, dtype=torch.float64, device=self.device)
        energies = self.head(features, graph).double()
        if self.subtract_isolated:
            if self.representation.local:
                alone = torch.diff(neighbors.row_ptr)[: graph.num_atoms] == 0
            else:
                size = sum_over_systems(torch.ones_like(energies), graph.batch, graph.num_systems)
                alone = (torch.diff(neighbors.row_ptr) == 0) & (size == 1)[graph.batch]
            alone = alone & (graph.charge == 0)[graph.batch]
            zero = (self.isolated_energies() if isolated is None else isolated)[graph.z]
            if getattr(self.head, "reduce", "sum") == "mean":
                zero = zero / atom_counts(graph).clamp(min=1)[graph.batch]
            # for an atom alone both are equal up to rounding: make the difference exactly zero
            energies = torch.where(alone, 0.0, energies - zero)
        return energies

    def prior_energies(
        self, system: System, neighbors: NeighborList | None = None, charges: Tensor | None = None
    ) -> Tensor:
        """Return the energies of the priors alone, [N] eV float64, differentiable: the baseline of delta learning.

        The network learns the difference between labels and baseline. A label may also be reduced by it beforehand.

        Args:
            system: N atoms.
            neighbors: edges within `cutoff`, to reuse a list.
            charges: [N] charges in e, for priors that use the network's charges.

        Raises:
            ValueError: a prior cannot evaluate a structure.
        """
        if bool(system.detach().pbc.any()) and (cells := self.in_cells()) is not self:
            if not is_mixed(system):
                return cells.prior_energies(system, neighbors, charges)
            total = torch.zeros(system.num_atoms, dtype=torch.float64, device=self.device)
            for portion in divided(system):
                potential, atoms = cells if portion.periodic else self, portion.places[True]
                given = None if charges is None else charges[atoms]
                total = total.index_copy(0, atoms, potential.prior_energies(portion.system, None, given))
            return total
        for prior in self.priors:
            prior.check(system)
        lists = PairLists(system, {} if neighbors is None else {self.cutoff: neighbors})
        with outside_modes(self.device):
            return self._prior_energies(system, lists, charges)

    def _prior_energies(self, system: System, lists: PairLists, charges: Tensor | None) -> Tensor:
        total = torch.zeros(system.num_atoms, dtype=torch.float64, device=self.device)
        for prior in self.priors:
            pairs = None if prior.cutoff is None else lists(prior.cutoff)
            # priors of plug-ins may take only two arguments
            total = total + (prior(system, pairs, charges) if prior.uses_charges else prior(system, pairs))
        return total

    def isolated_energies(self) -> Tensor:
        """Return ε⁰ by atomic number, [max_z] float64 in the head's unit; 0 for unknown elements."""
        assert self.head is not None
        if self.others:
            return torch.stack([member.isolated_energies() for member in self.members]).mean(0)
        z = torch.tensor(self.elements, dtype=torch.long, device=self.device)
        graph = Graph.isolated(z, self.dtype)
        with outside_modes(self.device):
            energies = self.head(self.representation(graph), graph).double()
        return energies.new_zeros(self._known.shape[0]).index_put((z,), energies)

    @torch.no_grad()
    def subtracted_energies(self) -> Tensor | None:
        """Return `isolated_energies()` for repeated calls with the same weights; None if none are subtracted."""
        return self.isolated_energies() if self.head is not None and self.subtract_isolated else None

    def check_elements(self, z: Tensor, name: Callable[[int], str] = "atom {}".format) -> None:
        """Refuse atomic numbers that the model was not trained on.

        Args:
            z: [N] atomic numbers.
            name: function that returns the name of an entry of `z`, for the message.

        Raises:
            UnknownElement: an element is unknown; the message names the first such entry.
        """
        refuse_elements(z, self._known, self.elements, name)

    def novelty(self, system: System) -> Tensor:
        """Return the novelty of each atom, [N] float64; an atom above 1 is unlike the atoms of the training.

        With several members, the features of the first one count.

        Args:
            system: N atoms.

        Raises:
            ValueError: the potential is not calibrated, or was calibrated with other weights; and as `forward`.
        """
        if self.calibration is None:
            raise ValueError("the model is not calibrated: run `torchmdnet2 calibrate` with its training frames")
        self.check(system)
        return self.calibration(self.representation, system)


def statistics(results: Sequence[Mapping[str, Tensor | None]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the mean and sample standard deviation of the results of all members."""
    mean, std = {}, {}
    for name in results[0]:
        values = [value for value in (r.get(name) for r in results) if value is not None]
        if len(values) == len(results):
            stacked = torch.stack(values)
            mean[name], std[name] = stacked.mean(0), stacked.std(0)
    return mean, std


def mean_of(results: Sequence[Result]) -> Result:
    """Return the mean over members; its properties include the spread."""
    mean, std = statistics([{name: getattr(r, name) for name in RESULTS} for r in results])
    spread = {f"{name}_std": std[name] for name in ("energy", "forces") if name in std}
    return Result(**mean, properties={**statistics([r.properties for r in results])[0], **spread})


def _network(model: Mapping[str, Any], heads: Iterable[Mapping[str, Any]]) -> tuple[Representation, list[Any]]:
    """Return a representation and its heads."""
    arguments, given = dict(model), [dict(head) for head in heads]
    representation = REPRESENTATIONS[arguments.pop("name")](**arguments)
    return representation, [HEADS[head.pop("name")](representation.hidden_channels, **head) for head in given]


def _priors(given: Iterable[Mapping[str, Any]] | None) -> list[Prior]:
    arguments = [dict(prior) for prior in given or []]
    return [PRIORS[prior.pop("name")](**prior) for prior in arguments]


def _with_scales(heads: list[Any], given: list[dict[str, Any]]) -> list[Any]:
    """Set scale and shift of heads to those of their configurations, and return the heads."""
    for head, values in zip(heads, given, strict=True):
        for key in ("scale", "shift"):
            if key in values:
                setattr(head, key, float(values[key]))
    return heads
