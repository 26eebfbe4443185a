"""OpenMM: a potential as an openmm.PythonForce, for a whole system or a part of it."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.devices import ProcessLock
from ..core.stated import Statement, confirmed, no_cell, whole_number
from ..errors import BadData, StructureWarning, UnknownElement, needs_extra
from ..evaluator import Evaluator, Precision
from ..potential.cells import require_cells
from ..potential.novelty import Watch
from ..potential.potential import SYMBOLS, Potential
from ..potential.refusals import require_flag
from ..units import KJ_MOL
from .arrays import ArrayEvaluator, NonFiniteResult, Structure
from .isolated import made_whole
from .model import ModelSource, dtype_name, open_model
from .openmm_plugin import (  # two private names: tests on a GPU find them here
    _DIRECT,  # noqa: F401
    KJ_MOL_NM,
    NM,
    DirectCalls,
    _cached_plugin,  # noqa: F401
    build_plugin,
    offer,
    share_context,
    use_plugin,
)

with needs_extra("openmm", "openmm"):
    import openmm

if TYPE_CHECKING:
    from openmm.app import Topology

__all__ = [
    "DirectCalls", "TorchMDNet2Energy", "add_force", "atomic_numbers", "bonds_force", "build_plugin", "create_force",
    "has_box", "indices_of", "require_same_atoms", "share_context", "total_charge", "use_plugin",
]  # fmt: skip

_LOGGER = logging.getLogger("torchmdnet2.openmm")
_POSITIONS = openmm.State.Positions
_ALL = np.ones(3, dtype=bool)
CORRECT = "correct the formal charges (`formalCharge` of the topology's atoms, None: not stated)"


def add_force(
    system: openmm.System,
    model: str | os.PathLike | Potential,
    topology: Topology,
    atoms: Iterable[int] | None = None,
    periodic: bool | None = None,
    force_group: int = 0,
    **options: Any,
) -> None:
    """Add a model to a System: `create_force`, and `bonds_force` so that OpenMM knows its molecules.

    Args:
        system: the System; its particles are the atoms of the topology.
        model: as for `create_force`.
        topology: as for `create_force`.
        atoms: as for `create_force`.
        periodic: use the system's box; None uses it if the topology or a force of the system does.
        force_group: force group of both forces.
        options: further arguments of `create_force`.

    Raises:
        BadData: the number of particles differs from the number of atoms in the topology; and as `create_force`.
    """
    if periodic is None:
        periodic = has_box(topology) or system.usesPeriodicBoundaryConditions()
    chosen = None if atoms is None else list(atoms)
    require_same_atoms(system, topology, chosen)
    forces = [create_force(model, topology, chosen, periodic, **options), bonds_force(topology, chosen, periodic)]
    for force in forces if forces[1].getNumBonds() else forces[:1]:
        force.setForceGroup(force_group)
        system.addForce(force)


def require_same_atoms(system: openmm.System, topology: Topology, chosen: Sequence[int] | None) -> None:
    particles, size = system.getNumParticles(), topology.getNumAtoms()
    if particles and (particles < size or (chosen is None and particles != size)):  # 0: particles are added later
        raise BadData(
            f"the System has {particles} particles, but the topology {size} atoms: give the topology of this System, "
            "or the indices of the model's atoms (atoms)"
        )


def bonds_force(
    topology: Topology, atoms: Iterable[int] | None = None, periodic: bool | None = None
) -> openmm.HarmonicBondForce:
    """Return bonds of zero strength, from which OpenMM knows which atoms form a molecule.

    OpenMM finds molecules by the bonds of forces, but a PythonForce has none. Without these bonds each atom of the
    model would be a molecule, and reporters and barostats, which move whole molecules, would tear it apart.

    Args:
        topology: the topology with the bonds.
        atoms: take only bonds between these atoms. Atoms that the topology leaves without a bond in their residue (a
            PDB file without CONECT records) get a bond to its first atom. None takes all bonds of the topology.
        periodic: True if the system has a box; None decides as in `create_force`.
    """
    chosen = None if atoms is None else set(atoms)
    pairs = [(a.index, b.index) for a, b in topology.bonds() if chosen is None or {a.index, b.index} <= chosen]
    bonded = {atom for pair in pairs for atom in pair}
    if chosen is not None:
        for residue in topology.residues():
            first, *others = [atom.index for atom in residue.atoms() if atom.index in chosen] or [-1]
            pairs += [(first, other) for other in others if other not in bonded or first not in bonded]
    force = openmm.HarmonicBondForce()
    force.setName("TorchMDNet2 molecules")
    force.setUsesPeriodicBoundaryConditions(has_box(topology) if periodic is None else bool(periodic))
    for a, b in pairs:
        force.addBond(a, b, 0.0, 0.0)
    return force


def create_force(
    model: str | os.PathLike | Potential,
    topology: Topology,
    atoms: Iterable[int] | None = None,
    periodic: bool | None = None,
    charge: int | None = None,
    spin: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    isolated: bool | None = None,
    coulomb: str | None = None,
    level: str | None = None,
    precision: Precision = "native",
) -> openmm.PythonForce:
    """Return a force for an openmm.System: the energy of the model for some or all of its atoms.

    `add_force` adds it together with the bonds that define the molecules of these atoms for OpenMM.

    A System with this force can be written as XML. The XML holds the path and checksum of the model file and the
    options, not the weights; reading it needs the file at the same path. *Any* XML file with a PythonForce can run code
    when it is read: treat such a file like a program.

    Args:
        model: path of a .tmn file, name of a potential, or a Potential (copied; its force cannot be written as XML).
        topology: gives the elements, and the default of `periodic`.
        atoms: indices of the atoms that the model sees; it sees no others. None takes all atoms.
        periodic: use the system's box, in all three directions. None uses it if the topology has box vectors that are
            not the cube of 1 Å of a PDB file without a cell.
        charge: total charge of these atoms in e. None takes the sum of the formal charges that the topology states for
            them (in a PDB file in columns 79 and 80), else 0.
        spin: their multiplicity 2S+1; 0 means not given.
        device: device of the model, independent of OpenMM's platform.
        dtype: floating-point type of the network; None keeps the stored one.
        allow_untrained_charge: accept a charge that the model was not trained on, or does not use, with a warning.
        isolated: evaluate these atoms without periodic images, as in vacuum. They are made whole at each step, however
            OpenMM wraps them into the box. Together, also if they are several molecules, they must be shorter than half
            of the shortest width of the box. None does so if `atoms` is given and the model has a sum over all pairs.
        coulomb: method for Coulomb sums over all pairs of periodic atoms, "pme" or "dsf", as for `torchmdnet2.load`;
            None takes "pme", or the method of a given Potential.
        level: level of theory, for a model that was trained on several; None takes its default.
        precision: of the kernels on a GPU, "native" or "mixed" (faster), as for `Evaluator`.

    A calibrated model warns about particles that are unlike its training atoms, as the ASE calculator does. It checks
    the first evaluation and every 1000th after that.

    Returns:
        openmm.PythonForce; energies in kJ/mol, forces in kJ/mol/nm.

    Raises:
        FileNotFoundError, BadCheckpoint: the model file is missing or damaged.
        UnknownElement: the model does not know an atom's element.
        BadData: an atom has no element, an index is outside the topology, or the sum of the stated formal charges
            differs from the given charge.
        UntrainedCharge: the model does not know the charge.
        ValueError: charge or spin is not a whole number, the model does not know the spin, the device, dtype or
            precision cannot be used, `coulomb` has no effect, or periodic or isolated is not True, False or None.
    """
    for name, value in (("periodic", periodic), ("isolated", isolated)):
        if value is not None:
            require_flag(value, name, "None, ")
    everyone = list(topology.atoms())
    chosen = list(range(len(everyone))) if atoms is None else indices_of(atoms, len(everyone))
    if not chosen:
        raise BadData("the model has no atoms to act on")
    numbers = atomic_numbers(everyone, chosen)
    if periodic is None:
        periodic = has_box(topology)
    total = total_charge([everyone[i] for i in chosen], charge)
    potential, source = open_model(model, device, dtype, allow_untrained_charge, coulomb, level)
    unknown = [i for i, z in zip(chosen, numbers, strict=True) if z not in potential.elements]
    if unknown:
        known = ", ".join(SYMBOLS[z] for z in potential.elements)
        names = ", ".join(f"atom {i} is {everyone[i].element.symbol}" for i in unknown[:3])
        raise UnknownElement(
            f"{names}{', …' if len(unknown) > 3 else ''}, and this model knows only {known}: take one that knows them, "
            "or train one"
        )
    if isolated is None:
        isolated = bool(periodic) and atoms is not None and _has_all_pairs(potential)
    isolated = bool(isolated and periodic)
    require_cells(coulomb, [bool(periodic) and not isolated])
    if isolated:
        _LOGGER.warning(
            "the model evaluates %d of %d atoms as an isolated molecule: made whole by nearest images at each step, "
            "with the energy in vacuum",
            len(chosen), len(everyone),
        )  # fmt: skip
    options = {
        "numbers": tuple(numbers),
        "particles": None if atoms is None else tuple(chosen),
        "periodic": bool(periodic),
        "charge": total,
        "spin": whole_number(spin, "spin"),
        "device": str(potential.device),
        "dtype": dtype_name(potential.dtype),
        "allow_untrained_charge": potential.allow_untrained_charge,
        "coulomb": potential.coulomb,
        "level": level,
        "isolated": isolated,
        "precision": precision,
    }
    # check now instead of in the first step
    alone = Structure(
        np.array(numbers), np.zeros((len(numbers), 3)), np.eye(3), np.full(3, bool(periodic) and not isolated),
        total, whole_number(spin, "spin"),
    ).to_system(potential.device)  # fmt: skip
    potential.check(alone)
    force = openmm.PythonForce(TorchMDNet2Energy(source, options, potential))
    force.setName("TorchMDNet2")
    force.setUsesPeriodicBoundaryConditions(bool(periodic))
    if atoms is not None:
        force.setParticles(chosen)
    return force


def _has_all_pairs(potential: Potential) -> bool:
    """Return True if a potential, or one that it contains, has pairs at any distance."""
    return any(getattr(part, "cutoff", None) == math.inf for part in potential.modules())


def has_box(topology: Topology) -> bool:
    """Return True if a topology has a periodic box that is not the dummy box of a PDB file."""
    vectors = topology.getPeriodicBoxVectors()
    return vectors is not None and not no_cell([list(v.value_in_unit(openmm.unit.angstrom)) for v in vectors])


def formal_charge(atoms: Sequence[Any]) -> Statement | None:
    """Return the sum of formal charges in a topology; None if they say nothing, such as zeros on some atoms."""
    known = [int(q) for atom in atoms if (q := getattr(atom, "formalCharge", None)) is not None]
    if not any(known) and len(known) < len(atoms):
        return None
    return Statement(sum(known), f"the formal charges of the topology, of {len(known)} atoms")


def total_charge(atoms: Sequence[Any], given: int | None) -> int:
    """Return the given charge, or the sum of the atoms' formal charges."""
    stated = formal_charge(atoms)
    known = sum(getattr(atom, "formalCharge", None) is not None for atom in atoms)
    if stated and given is None and known < len(atoms):
        warnings.warn(
            f"the topology states formal charges of {known} of {len(atoms)} atoms: the total charge is taken as their "
            f"sum, {stated.value}; if it is another, {CORRECT}",
            StructureWarning,
            stacklevel=3,
        )
    return confirmed([stated] if stated else [], "charge", given, remedy=CORRECT) or 0


class TorchMDNet2Energy:
    """The callback of OpenMM: energy and forces from the positions and box of a state.

    Its pickle holds plain data only; the model file is opened in the first call after unpickling.

    Args:
        source: source of the model; None for a model in memory, which cannot be pickled.
        options: "numbers" (atomic numbers), "particles" (their indices, None for all), "periodic", "charge", "spin",
            "device", "dtype", "allow_untrained_charge", "isolated", "coulomb", "level", "precision".
        potential: the opened model; None opens it from `source` when needed.
    """

    def __init__(self, source: ModelSource | None, options: dict[str, Any], potential: Potential | None = None):
        self.source, self.options = source, options
        self.lock = ProcessLock()
        self._numbers = np.array(options["numbers"], dtype=np.int64)
        self.isolated = bool(options.get("isolated", False))  # older XML files do not have it
        self.pbc = np.full(3, bool(options["periodic"]) and not self.isolated)
        self._watch = Watch()
        self._open(potential)
        offer(self)

    def _open(self, potential: Potential | None) -> None:
        self._potential, self._arrays = potential, None
        if potential is not None:
            evaluator = Evaluator(potential, self.options.get("precision", "native"))  # older XML files do not have it
            self._arrays = ArrayEvaluator(evaluator, potential.device)

    @property
    def evaluator(self) -> Evaluator:
        assert self._arrays is not None and isinstance(self._arrays.evaluator, Evaluator)
        return self._arrays.evaluator

    def __call__(self, state: openmm.State) -> tuple[float, np.ndarray]:
        """Return the energy in kJ/mol and forces [N, 3] in kJ/mol/nm.

        Raises:
            RuntimeError: any error; its message has all details, since OpenMM passes on the message alone.
        """
        try:
            with self.lock:
                return self._evaluate(state)
        except Exception as error:
            raise RuntimeError(self.describe(error)) from error

    def describe(self, error: BaseException) -> str:
        model = self.source.path if self.source else "a model in memory"
        return f"torchmdnet2 ({model}): {type(error).__name__}: {error}"

    def _evaluate(self, state: openmm.State) -> tuple[float, np.ndarray]:
        # in nm; what `getPositions` calls, which takes five times as long
        pos = np.empty((state._getNumParticles(), 3))
        state._getVectorAsNumpy(_POSITIONS, pos)
        pos *= NM
        cell = np.zeros((3, 3))
        if self.options["periodic"]:
            cell = state.getPeriodicBoxVectors(asNumpy=True)._value * NM
        return self.compute(pos, cell)[:2]

    def compute(self, pos: np.ndarray, cell: np.ndarray) -> tuple[float, np.ndarray, Structure]:
        """Return the energy in kJ/mol, forces [N, 3] in kJ/mol/nm, and the structure that was evaluated.

        Args:
            pos: [N, 3] Å.
            cell: box [3, 3] in Å; zeros without one.
        """
        if self._arrays is None:
            assert self.source is not None
            allow = self.options.get("allow_untrained_charge", False)  # older XML files do not have it
            coulomb = self.options.get("coulomb")
            self._open(self.source.open(self.options["device"], self.options["dtype"], allow, coulomb))
        assert self._arrays is not None
        if not (math.isfinite(np.vdot(pos, pos)) or np.isfinite(pos).all()):
            raise ValueError(
                f"the position of {self._name(int(np.argmin(np.isfinite(pos).all(1))))} is not finite: the simulation "
                "has blown up, or the start is unphysical (atoms too close or too far apart?)"
            )
        if self.isolated:
            pos, cell = made_whole(pos, cell, _ALL), np.zeros((3, 3))
        structure = self.structure(pos, cell)
        try:
            results = self._arrays(structure)
        except NonFiniteResult as error:
            if error.atom is None:
                raise
            raise NonFiniteResult(error.name, error.atom, self._name(error.atom)) from None
        self.look(lambda: structure)
        return results["energy"] / KJ_MOL, results["forces"] / KJ_MOL_NM, structure

    def structure(self, pos: np.ndarray, cell: np.ndarray) -> Structure:
        return Structure(self._numbers, pos, cell, self.pbc, self.options["charge"], self.options["spin"])

    def look(self, structure: Callable[[], Structure]) -> None:
        """Compute the novelty of a calibrated model if it is due.

        Args:
            structure: returns the present structure; called if it is due.
        """
        potential = self._potential
        assert potential is not None
        if potential.calibration is not None and self._watch.due(len(self._numbers)):
            system = structure().to_system(potential.device)
            self._watch(potential.novelty(system), system, atom_name=self._name)

    def _name(self, atom: int) -> str:
        """Name an atom of the model by its index in the OpenMM system."""
        particle = atom if self.options["particles"] is None else self.options["particles"][atom]
        return f"particle {particle} ({SYMBOLS[self.options['numbers'][atom]]})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.source is None:
            raise ValueError("a force with a model in memory cannot be serialized: save the model to a .tmn file first")
        return _from_plain_data, (self.source.path, self.source.sha256, self.options)


def _from_plain_data(path: str, sha256: str, options: dict[str, Any]) -> TorchMDNet2Energy:
    return TorchMDNet2Energy(ModelSource(path=path, sha256=sha256, level=options.get("level")), dict(options))


def atomic_numbers(everyone: Sequence[Any], chosen: Sequence[int]) -> list[int]:
    for i in chosen:
        if everyone[i].element is None:
            raise BadData(f"atom {i} ({everyone[i].name}) has no element; leave it out by giving `atoms`")
    return [everyone[i].element.atomic_number for i in chosen]


def indices_of(atoms: Iterable[int], total: int) -> Sequence[int]:
    chosen = [whole_number(i, "an index in atoms") for i in atoms]
    for i in chosen:
        if not 0 <= i < total:
            raise BadData(f"atoms: index {i} is outside this topology, which has {total} atoms")
    if len(set(chosen)) != len(chosen):
        raise BadData("atoms: an index is given twice")
    return chosen
