"""`torchmdnet2 relax` and `score`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import (
    Command,
    add_allow_untrained_charge,
    add_coulomb,
    add_devices,
    add_model,
    keeping,
    make_console,
    names_options,
    opening,
    output_file,
    refuse_idle,
)

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    relax = command("relax", _relax, "relax many molecules or crystals in batches; conformers of SMILES")
    _add_files(relax)
    relax.add_argument("--fmax", type=float, default=0.02, help="largest force at the end, eV/Å (default: 0.02)")
    relax.add_argument("--steps", type=int, default=1000, help="largest number of steps of a structure (default: 1000)")
    relax.add_argument("--conformers", type=int, metavar="N", help="make N conformers by RDKit, keep the lowest")
    relax.add_argument("--window", type=float, help="energy above the lowest conformer, eV (default: 0.26)")
    relax.add_argument("--rmsd", type=float, help="closer conformers are the same, Å (default: 0.25)")
    relax.add_argument("--keep", type=int, metavar="N", help="largest number of conformers to keep (default: all)")
    relax.add_argument("--seed", type=int, help="seed of the conformers (default: 0)")
    relax.add_argument("--cell", action="store_true", help="also relax the cells, one structure at a time")
    _add_run(relax)
    score = command("score", _score, "compute energies, forces, charges and novelty of many structures")
    _add_files(score)
    score.add_argument("--no-novelty", action="store_true", help="do not compute the novelty, which takes time")
    score.add_argument("--seed", type=int, help="seed of the conformers of SMILES (default: 0)")
    _add_run(score)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "; several, separated by commas, give their mean")
    parser.add_argument("input", help="SMILES (.smi), SDF, extended XYZ, another format of ASE or of data")
    parser.add_argument("output", help=".sdf, .xyz, .csv or .h5; failures are listed beside it, in NAME.failed.txt")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_devices(parser)
    parser.add_argument("--dask", metavar="ADDRESS", help="scheduler of a dask cluster that computes")
    parser.add_argument("--report", action="store_true", help="also write a page with plots and pictures")
    add_coulomb(parser)
    add_allow_untrained_charge(parser)


@names_options
def _relax(options: argparse.Namespace) -> None:
    from ..streams import Ranking, relax

    given = {"window": options.window, "rmsd": options.rmsd, "most": options.keep}
    chosen = {name: value for name, value in given.items() if value is not None}
    if options.conformers is None:
        why = "window, rmsd and keep choose among conformers, but none are made: give conformers too (--conformers)"
        refuse_idle(options, ("window", "rmsd", "keep"), why)
    _run(
        relax,
        options,
        fmax=options.fmax,
        steps=options.steps,
        conformers=options.conformers,
        ranking=Ranking(**chosen) if chosen else None,
        cell=options.cell,
    )


@names_options
def _score(options: argparse.Namespace) -> None:
    from ..streams import score

    _run(score, options, novelty=not options.no_novelty)


def _run(verb: Callable[..., Any], options: argparse.Namespace, **more: Any) -> None:
    output = _output(options)
    with keeping(output):
        verb(
            options.model,
            options.input,
            output,
            seed=options.seed,
            devices=options.devices,
            **opening(options, [options.model]),
            report=options.report,
            dask=options.dask,
            console=make_console(stderr=True),
            **more,
        )


def _output(options: argparse.Namespace) -> Path:
    formats = (".sdf", ".xyz", ".extxyz", ".csv", ".h5", ".hdf5")
    return output_file(options.output, formats, [*options.model.split(","), options.input], "OUTPUT")
