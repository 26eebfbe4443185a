"""OpenMM: a potential as an openmm.PythonForce, for a whole system or a part of it."""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import logging
import math
import mmap
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.devices import ProcessLock
from ..core.files import atomic_write, user_cache
from ..core.stated import Statement, confirmed, no_cell, whole_number
from ..engine.bound import BoundStep, ReferenceBoundStep
from ..errors import BadData, MissingBackend, StructureWarning, UnknownElement, needs_extra
from ..evaluator import Evaluator, Precision
from ..potential.cells import require_cells
from ..potential.novelty import Watch
from ..potential.potential import SYMBOLS, Potential
from ..units import KJ_MOL, factor
from .arrays import BOUND_UP_TO, ArrayEvaluator, NonFiniteResult, Structure
from .isolated import made_whole
from .model import ModelSource, dtype_name, open_model

with needs_extra("openmm", "openmm"):
    import openmm

if TYPE_CHECKING:
    from openmm.app import Topology

__all__ = [
    "DirectCalls", "TorchMDNet2Energy", "add_force", "atomic_numbers", "bonds_force", "build_plugin", "create_force",
    "has_box", "indices_of", "require_same_atoms", "share_context", "total_charge", "use_plugin",
]  # fmt: skip

_LOGGER = logging.getLogger("torchmdnet2.openmm")
_NM = factor("length", "nm")  # Å
_KJ_MOL_NM = KJ_MOL / _NM  # eV/Å
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
            precision cannot be used, or `coulomb` has no effect.
    """
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


def share_context() -> None:
    """Let OpenMM's CUDA platform use the same CUDA context as PyTorch, in Contexts that are created from now on.

    Otherwise each has a separate one, and the GPU switches from one to the other twice in a step. OpenMM has no option
    for this: the two calls by which its plugin creates and destroys a context are redirected in the memory of this
    process, to those for the primary context of the device. On Linux with glibc only. Contexts that exist already keep
    what they have, with a warning. A second call has no effect.

    Raises:
        RuntimeError: the system is another one, OpenMM's CUDA platform is not loaded, or it does not create contexts in
            a known way. Nothing has been changed then.
    """
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in _RELOCATIONS:
        raise RuntimeError("share_context() works on Linux with glibc only, on processors of x86-64 and ARM")
    maps = Path("/proc/self/maps").read_text().split("\n")
    path = next((line.split(maxsplit=5)[5] for line in maps if line.endswith("/libOpenMMCUDA.so")), None)
    if path is None:
        raise RuntimeError("OpenMM's CUDA platform is not loaded: share_context() has no effect on other platforms")
    imports = _imports(path)
    create = next((name for name in _CREATE if name in imports), None)
    if create is None or "cuCtxDestroy_v2" not in imports:
        raise RuntimeError(
            f"OpenMM {openmm.__version__} ({path}) does not create CUDA contexts in a way that share_context() knows"
        )
    if imports[create][0] in _REDIRECTED:
        return
    if any(_on_cuda(one) for one in gc.get_objects()):
        warnings.warn(
            "Contexts on the platform CUDA exist already and keep their own CUDA context: call share_context() before "
            "a Context or Simulation is created",
            RuntimeWarning,
            stacklevel=2,
        )
    driver, shared = ctypes.CDLL("libcuda.so.1"), set()

    def use_primary(place: int, *others: Any) -> int:
        context = ctypes.c_void_p.from_address(place)
        if failed := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), others[-1]):
            return failed
        shared.add(context.value)
        return driver.cuCtxPushCurrent_v2(context)

    def destroy(context: int) -> int:
        return 0 if context in shared else driver.cuCtxDestroy_v2(context)  # PyTorch goes on with the shared one

    pointer, number = ctypes.c_void_p, ctypes.c_int
    driver.cuCtxDestroy_v2.argtypes = [pointer]
    redirected = ctypes.CFUNCTYPE(number, *[pointer] * (_CREATE[create] - 1), number)(use_primary)
    _redirect(imports["cuCtxDestroy_v2"], ctypes.CFUNCTYPE(number, pointer)(destroy))
    _redirect(imports[create], redirected)


_CREATE = {"cuCtxCreate_v2": 3, "cuCtxCreate_v4": 4}  # with OpenMM's plugins for CUDA 12, 13: number of arguments
_RELOCATIONS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # those with the address of a function
_REDIRECTED: dict[int, Any] = {}  # functions in use


def _on_cuda(candidate: Any) -> bool:
    """Return True if something is a Context of OpenMM on the platform CUDA."""
    if not issubclass(type(candidate), openmm.Context) or not hasattr(candidate, "this"):  # without: creation failed
        return False
    return candidate.getPlatform().getName() == "CUDA"


def _imports(path: str) -> dict[str, list[int]]:
    """Return where a loaded library keeps the addresses of the functions that it imports (ELF, 64 bits, glibc)."""
    u64, word = ctypes.c_uint64, 8
    base, _, at = (u64 * 3).from_address(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)._handle)
    table: dict[int, int] = {}
    while tag := u64.from_address(at).value:
        table[tag] = u64.from_address(at + word).value
        at += 2 * word
    strings, symbols = table[5], table[6]  # DT_STRTAB, DT_SYMTAB
    found: dict[str, list[int]] = {}
    for start, size in ((7, 8), (23, 2)):  # DT_RELA and DT_RELASZ, DT_JMPREL and DT_PLTRELSZ
        for entry in range(table.get(start, 0), table.get(start, 0) + table.get(size, 0), 3 * word):
            offset, info = (u64 * 2).from_address(entry)
            if info % 2**32 in _RELOCATIONS[platform.machine()]:
                name = strings + ctypes.c_uint32.from_address(symbols + 3 * word * (info >> 32)).value
                found.setdefault(ctypes.string_at(name).decode(), []).append(base + offset)
    return found


def _redirect(places: list[int], function: Any) -> None:
    """Store the address of a C function, in memory that may be read-only."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))  # Contexts may outlive this module
    for place in places:
        page = place - place % mmap.PAGESIZE
        if ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE
        ):
            raise RuntimeError("share_context(): the memory of OpenMM's CUDA platform cannot be changed")
        ctypes.c_void_p.from_address(place).value = ctypes.cast(function, ctypes.c_void_p).value
        _REDIRECTED[place] = function


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
        self._lock = ProcessLock()
        self._numbers = np.array(options["numbers"], dtype=np.int64)
        self._isolated = bool(options.get("isolated", False))  # older XML files do not have it
        self._pbc = np.full(3, bool(options["periodic"]) and not self._isolated)
        self._watch = Watch()
        self._open(potential)
        _CALLABLES[id(self)] = self
        if torch.device(options["device"]).type == "cuda":
            _use_built_plugin()

    def _open(self, potential: Potential | None) -> None:
        self._potential, self._arrays = potential, None
        if potential is not None:
            evaluator = Evaluator(potential, self.options.get("precision", "native"))  # older XML files do not have it
            self._arrays = ArrayEvaluator(evaluator, potential.device)

    def __call__(self, state: openmm.State) -> tuple[float, np.ndarray]:
        """Return the energy in kJ/mol and forces [N, 3] in kJ/mol/nm.

        Raises:
            RuntimeError: any error; its message has all details, since OpenMM passes on the message alone.
        """
        try:
            with self._lock:
                return self._evaluate(state)
        except Exception as error:
            raise RuntimeError(self._describe(error)) from error

    def _describe(self, error: BaseException) -> str:
        model = self.source.path if self.source else "a model in memory"
        return f"torchmdnet2 ({model}): {type(error).__name__}: {error}"

    def _evaluate(self, state: openmm.State) -> tuple[float, np.ndarray]:
        # in nm; what `getPositions` calls, which takes five times as long
        pos = np.empty((state._getNumParticles(), 3))
        state._getVectorAsNumpy(_POSITIONS, pos)
        pos *= _NM
        cell = np.zeros((3, 3))
        if self.options["periodic"]:
            cell = state.getPeriodicBoxVectors(asNumpy=True)._value * _NM
        return self._compute(pos, cell)[:2]

    def _compute(self, pos: np.ndarray, cell: np.ndarray) -> tuple[float, np.ndarray, Structure]:
        """Return energy and forces, in OpenMM's units, and the structure for positions and a box in Å."""
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
        if self._isolated:
            pos, cell = made_whole(pos, cell, _ALL), np.zeros((3, 3))
        structure = self._structure(pos, cell)
        try:
            results = self._arrays(structure)
        except NonFiniteResult as error:
            if error.atom is None:
                raise
            raise NonFiniteResult(error.name, error.atom, self._name(error.atom)) from None
        self._look(lambda: structure)
        return results["energy"] / KJ_MOL, results["forces"] / _KJ_MOL_NM, structure

    def _structure(self, pos: np.ndarray, cell: np.ndarray) -> Structure:
        return Structure(self._numbers, pos, cell, self._pbc, self.options["charge"], self.options["spin"])

    def _look(self, structure: Callable[[], Structure]) -> None:
        """Compute the novelty of a calibrated model if it is due."""
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


# --- Positions and forces by their addresses on the GPU, with a compiled plugin ---

_VARIABLE = "TORCHMDNET2_OPENMM_PLUGIN"
_PLATFORMS = ("CUDA", "CPU", "Reference")  # with kernels in the plugin
_CPP = Path(__file__).with_name("openmm_plugin.cpp")
_THROUGH_HOST = "OpenMM: positions and forces pass through the host: %s"
_CALLABLES: weakref.WeakValueDictionary[int, TorchMDNet2Energy] = weakref.WeakValueDictionary()  # by address
_DIRECT: dict[int, DirectCalls] = {}  # of Contexts, by the address of their _Call
_LOADED: list[Any] = []  # what the plugin calls, and the plugin


def build_plugin(path: str | os.PathLike | None = None) -> Path:
    """Compile the plugin by which OpenMM's CUDA platform and a model on the same GPU exchange positions and forces.

    Forces that are created later use it. It needs g++ (or the command of the variable CXX) and the headers that OpenMM
    comes with, but neither CUDA nor a GPU. It fits one version of OpenMM.

    Args:
        path: of the library; None: in the user's cache, where it is found. Others can write neither it nor its folder
            there, and earlier builds for this OpenMM are removed. For another path set the variable
            TORCHMDNET2_OPENMM_PLUGIN.

    Returns:
        The path.

    Raises:
        MissingBackend: there is no compiler, or there are no headers of OpenMM.
        RuntimeError: the compiler failed; with its message.
        OSError: the library cannot be written there.
    """
    libraries = Path(openmm.version.openmm_library_path)
    headers = libraries.parent / "include"
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]  # also "ccache g++"
    if shutil.which(compiler[0]) is None:
        raise MissingBackend(f"there is no compiler {compiler[0]}: install g++, or name one by the variable CXX")
    if not (headers / "openmm" / "cuda" / "CudaPlatform.h").is_file():
        raise MissingBackend(f"OpenMM's headers are not in {headers}: install OpenMM by pip or conda")
    cached = path is None
    # absolute: a link is replaced, not followed
    path = (_cached_plugin() if path is None else Path(path)).expanduser().absolute()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-w", f'-DTORCHMDNET2_KEY="{_plugin_key()}"',
            f"-I{headers}", str(_CPP), "-o", f"{folder}/plugin.so", f"-L{libraries}", "-lOpenMM",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the plugin for OpenMM cannot be compiled: {' '.join(command)}\n{done.stderr[-2000:]}")
        try:
            path.parent.mkdir(mode=0o700 if cached else 0o777, parents=True, exist_ok=True)
            if cached:
                path.parent.chmod(stat.S_IMODE(path.parent.stat().st_mode) & ~_OTHERS_WRITE)
            atomic_write(path, Path(folder, "plugin.so").read_bytes())
            path.chmod(0o755)  # whatever the umask
        except OSError as error:
            raise OSError(
                f"{path} cannot be written ({error.strerror or error}): call build_plugin(path) with a path in another "
                "folder, and name that path by the variable TORCHMDNET2_OPENMM_PLUGIN"
            ) from error
    if cached:
        checksum = _plugin_key().rpartition(" ")[2]
        for earlier in path.parent.glob(path.name.replace(checksum, "?" * len(checksum))):
            if earlier != path:
                earlier.unlink(missing_ok=True)
    return path


def use_plugin(platform: str = "CUDA") -> None:
    """Let Contexts that are created from now on use the plugin of `build_plugin`, and on CUDA also `share_context()`.

    Forces with a model on a GPU call this if the plugin is built. A second call has no effect.

    A library in the user's cache is loaded only if it and its folder belong to the user or root, and nobody else can
    write them. One that the variable TORCHMDNET2_OPENMM_PLUGIN names is loaded without this check.

    Args:
        platform: "CUDA", or "Reference" or "CPU", which have no use but tests.

    Raises:
        RuntimeError: the plugin is not built, others could have written it, it does not fit this OpenMM, or the
            platform or the CUDA context cannot be used; Contexts do without it then.
        OSError: the library cannot be looked at.
    """
    if platform not in _PLATFORMS:
        raise RuntimeError(f"the plugin has nothing for the platform {platform}: give one of {', '.join(_PLATFORMS)}")
    given = os.environ.get(_VARIABLE)
    path = Path(given or _cached_plugin()).expanduser().resolve()  # the loader would search a relative name elsewhere
    if not path.is_file():
        raise RuntimeError(f"there is no {path}: build the plugin, by torchmdnet2.adapters.openmm.build_plugin()")
    if not given:
        _require_ours(path)
    try:
        library = ctypes.CDLL(str(path))
        library.torchmdnet2_key.restype = ctypes.c_char_p
        key = library.torchmdnet2_key().decode()
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path} cannot be loaded: {error}") from error
    if key != _plugin_key():
        raise RuntimeError(f"{path} was built for {key}, but this is {_plugin_key()}: call build_plugin() again")
    if platform not in [openmm.Platform.getPlatform(k).getName() for k in range(openmm.Platform.getNumPlatforms())]:
        raise RuntimeError(f"OpenMM has no platform {platform} here")
    if platform == "CUDA":
        share_context()
    if not library.torchmdnet2_register(platform.encode()):
        raise RuntimeError(f"OpenMM's platform {platform} has no PythonForce here: install OpenMM by pip or conda")
    if not _LOADED:
        _LOADED.extend([_BEGIN(_begin), _END(_end), library])
        library.torchmdnet2_connect(*_LOADED[:2])
        atexit.register(library.torchmdnet2_connect, None, None)


def _use_built_plugin() -> None:
    """Use the plugin if it is built and the variable is not empty; a warning says why it cannot be used."""
    given = os.environ.get(_VARIABLE)
    try:
        built = _cached_plugin().is_file() if given is None else bool(given)
    except (RuntimeError, OSError):  # the home folder is unknown, or cannot be read: nothing was built there
        return
    try:
        if built:
            use_plugin()
    except (RuntimeError, OSError) as error:
        _LOGGER.warning(_THROUGH_HOST, error)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _require_ours(library: Path) -> None:
    """Refuse a library that others could have written: loading it runs code before its key is known."""
    for path in (library, library.parent):
        status = path.stat()
        owner, mode = status.st_uid, stat.S_IMODE(status.st_mode)
        if owner not in (0, os.getuid()) or mode & _OTHERS_WRITE:
            raise RuntimeError(
                f"others could have written {path} (owner: uid {owner}, mode {mode:o}): "
                f"call build_plugin() again, or name a library that you trust by the variable {_VARIABLE}"
            )


def _plugin_key() -> str:
    return f"OpenMM {openmm.Platform.getOpenMMVersion()}, {hashlib.sha256(_CPP.read_bytes()).hexdigest()[:16]}"


def _cached_plugin() -> Path:
    return user_cache() / f"{_plugin_key()}, {platform.machine()}.so".replace(" ", "-").replace(",", "")


class _Call(ctypes.Structure):
    """The structure `Call` of the plugin, where its fields are explained."""

    _fields_ = [
        ("callable", ctypes.c_void_p), ("cuda_context", ctypes.c_void_p), ("particles", ctypes.c_int),
        ("periodic_force", ctypes.c_int), ("periodic_system", ctypes.c_int), ("include_energy", ctypes.c_int),
        ("box", ctypes.c_double * 9),
        ("evaluate", ctypes.c_void_p), ("error", ctypes.c_char_p), ("positions", ctypes.c_void_p),
        ("forces", ctypes.c_void_p), ("wrapped", ctypes.c_void_p), ("positions_are_double", ctypes.c_int),
        ("forces_are_double", ctypes.c_int), ("length", ctypes.c_double), ("force", ctypes.c_double),
        ("energy", ctypes.c_double),
    ]  # fmt: skip


_BEGIN, _END = (ctypes.CFUNCTYPE(result, ctypes.POINTER(_Call)) for result in (ctypes.c_int, None))
_EVALUATE = ctypes.CFUNCTYPE(ctypes.c_int)


def _begin(call: Any) -> int:
    """Return whether the force of a new Context evaluates through the plugin."""
    force = _CALLABLES.get(call.contents.callable)
    if force is None:
        return 0
    try:
        reason = _refusal(force, call.contents)
        if not reason:
            _DIRECT[ctypes.addressof(call.contents)] = DirectCalls(force, call.contents)
            return 1
    except Exception as error:  # it cannot pass through OpenMM
        reason = str(error)
    _LOGGER.warning(_THROUGH_HOST, reason)
    return 0


def _end(call: Any) -> None:
    calls = _DIRECT.pop(ctypes.addressof(call.contents))
    del calls._function  # a circle of references, which would keep the memory on the GPU


def _refusal(force: TorchMDNet2Energy, call: _Call) -> str:
    """Return why a force cannot use the addresses that OpenMM gives; empty if it can."""
    device = torch.device(force.options["device"])
    if call.particles != len(force.options["numbers"]):
        return "the force does not have the particles of the model"  # OpenMM's own kernel raises the error
    if call.periodic_system and not call.periodic_force:
        return "the System has a box that the force does not use"  # molecules may be in any image then
    if not call.cuda_context:
        if force._isolated:
            return "this platform does not make molecules whole"
        return "" if device.type == "cpu" else f"the model is on {device}"
    if device.type != "cuda":
        return f"the model is on {device}"
    driver, current, primary, index = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p(), device.index
    index = torch.cuda.current_device() if index is None else index
    driver.cuCtxGetCurrent(ctypes.byref(current))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), index)
    driver.cuDevicePrimaryCtxRelease_v2(index)
    return "" if current.value == primary.value else f"OpenMM does not use PyTorch's CUDA context of {device}"


class DirectCalls:
    """Evaluations of one Context at positions that the plugin writes into tensors, and forces that it reads there.

    The first evaluation, and each that fails on the device, passes through the host as without the plugin, which checks
    everything. Others replay a bound step.

    Args:
        force: the callable of the PythonForce.
        call: the memory shared with the plugin.
    """

    def __init__(self, force: TorchMDNet2Energy, call: _Call):
        self._force, self._call, self._device = force, call, torch.device(force.options["device"])
        self._bound: BoundStep | None = None
        self._may_bind = call.particles <= BOUND_UP_TO
        self._in_box = bool(force._pbc.any())
        self._box = b""
        self._stream: Any = None
        if call.cuda_context:
            stream_of = ctypes.CDLL("libOpenMMCUDA.so", os.RTLD_NOLOAD | os.RTLD_NOW)[_STREAM_OF]
            stream_of.argtypes, stream_of.restype = [ctypes.c_void_p], ctypes.c_void_p
            stream = stream_of(call.cuda_context)
            given = torch.cuda.ExternalStream
            self._stream = given(stream, self._device) if stream else torch.cuda.default_stream(self._device)
        self._function = _EVALUATE(self._evaluate)
        call.evaluate = ctypes.c_void_p.from_address(ctypes.addressof(self._function)).value  # holds no reference
        call.length, call.force = _NM, 1 / _KJ_MOL_NM
        with torch.inference_mode(False):
            self._given = torch.empty(call.particles, 3, dtype=torch.float64, device=self._device)
            self._pass(self._given, torch.empty_like(self._given))

    def _pass(self, pos: Tensor, forces: Tensor) -> None:
        """Let the plugin write positions to a tensor and read forces from another, from the next evaluation on."""
        call, self._forces = self._call, forces
        call.positions, call.forces = pos.data_ptr(), forces.data_ptr()
        call.positions_are_double, call.forces_are_double = (t.dtype == torch.float64 for t in (pos, forces))

    def _evaluate(self) -> int:
        force, stream = self._force, self._stream
        try:
            elsewhere = stream is not None and torch.cuda.current_stream(stream.device) != stream
            on_stream = torch.cuda.stream(stream) if elsewhere else nullcontext()
            with force._lock, torch.inference_mode(False), on_stream:
                if self._bound is None or not self._replay(self._bound):
                    self._evaluate_on_host()
        except BaseException as error:  # it cannot pass through OpenMM, which gets the message alone
            self._error = force._describe(error).encode()
            self._call.error = self._error
            return 0
        return 1

    def _replay(self, bound: BoundStep) -> bool:
        """Evaluate on the device; return whether that gave energy and forces."""
        call = self._call
        if self._in_box and (box := bytes(call.box)) != self._box:
            bound.cell.copy_(torch.from_numpy(self._cell()))
            self._box = box
        good = False
        try:
            while not good:
                bound.replay()
                good = bound.check()
        except ValueError:  # a number is not finite: the host finds out which
            return False
        if isinstance(bound, ReferenceBoundStep) and not bool((bound.energy.sum() + bound.forces.sum()).isfinite()):
            return False
        if call.include_energy:
            call.energy = float(bound.energy) / KJ_MOL
        self._force._look(lambda: self._force._structure(_to_host(bound.pos), self._cell() * self._in_box))
        return True

    def _evaluate_on_host(self) -> None:
        call, force = self._call, self._force
        call.energy, forces, structure = force._compute(_to_host(self._given), self._cell())
        if self._bound is None and self._may_bind:
            self._bind(structure)
        self._forces.copy_(torch.from_numpy(forces * _KJ_MOL_NM))

    def _bind(self, structure: Structure) -> None:
        assert self._force._arrays is not None
        evaluator = self._force._arrays.evaluator
        assert isinstance(evaluator, Evaluator)
        try:
            self._bound = bound = evaluator.bind(structure.to_system(self._device))
        except torch.cuda.OutOfMemoryError:
            self._may_bind = False
            return
        if self._force._isolated:
            self._call.wrapped = self._given.data_ptr()
        else:
            self._given = bound.pos
        self._pass(bound.pos, bound.forces)

    def _cell(self) -> np.ndarray:
        """Return the box [3, 3] in Å; zeros if the force does not use it."""
        return np.array(self._call.box).reshape(3, 3) * (_NM * bool(self._force.options["periodic"]))


_STREAM_OF = "_ZN6OpenMM11CudaContext16getCurrentStreamEv"  # CudaContext::getCurrentStream()


def _to_host(pos: Tensor) -> np.ndarray:
    return np.array(pos.numpy(force=True), dtype=np.float64)


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
