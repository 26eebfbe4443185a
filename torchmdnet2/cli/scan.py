"""`torchmdnet2 scan`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import (
    Command,
    add_charges,
    add_device,
    add_model,
    make_console,
    note,
    opening,
    output_prefix,
    print_table,
    read_structure,
    refuse_other_charge,
    split_index,
)

if TYPE_CHECKING:
    from ..scan import ScanReport

__all__ = ["add"]


def add(command: Command) -> None:
    """Declare the arguments."""
    scan = command("scan", _scan, "find walls, minima and jumps along the bonds, torsions and contacts of a molecule")
    add_model(scan, "; several, or an ensemble.json", nargs="+")
    scan.add_argument("molecule", help="a structure near its equilibrium, any format of ASE or of data; one as file@3")
    scan.add_argument("--only", metavar="KINDS", help="bond, torsion, contact, separated by commas (default: all)")
    scan.add_argument("--reference", metavar="NAME", help="reference: gfn2-xtb, gfn1-xtb, a model, a calculator of ASE")
    scan.add_argument("--output", default="scan", help="prefix of the files, or a folder (default: scan)")
    add_charges(scan)
    scan.add_argument("--fail", action="store_true", help="exit with 1 when something is found, for scripts")
    add_device(scan, dtype="float32")


def _scan(options: argparse.Namespace) -> int:
    from ..scan import ScanReport, scan_molecule
    from ..scan.scan import KINDS

    inputs = [*options.model, split_index(options.molecule)[0], *([options.reference] if options.reference else [])]
    prefix = output_prefix(options.output, "scan", ScanReport.files, inputs)
    atoms = read_structure(options.molecule)
    refuse_other_charge(options, atoms, options.molecule)
    console = make_console()
    report = scan_molecule(
        options.model if len(options.model) > 1 else options.model[0],
        atoms,
        KINDS if options.only is None else options.only.split(","),
        options.reference,
        charge=options.charge,
        spin=options.spin,
        console=console,
        **opening(options, options.model),
    )
    written = report.write(prefix)
    _print(report)
    for text in report.notes:
        note(text)
    console.print("wrote " + ", ".join(map(str, written)), highlight=False, soft_wrap=True, markup=False)
    if not report.complete:
        return 130  # the exit code of Ctrl-C
    return int(options.fail and not report.passed)


def _print(report: ScanReport) -> None:
    from ..scan.report import TITLES, WORDS, rows

    console = make_console()
    for kind, name in TITLES.items():
        curves = report.of(kind)
        if not curves:
            continue
        heads, lines = rows(curves, report.members > 1)
        reference = f"; in brackets {report.reference}" if report.reference else ""
        print_table(f"{name} of {report.formula}: {WORDS[kind]}{reference}", heads, lines, left=(0,))
    for curve, finding in report.findings:
        text = f"{curve.path.kind} {curve.path.name}: {finding.text}"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    count = len(report.findings)
    console.print(f"{count or 'no'} finding{'' if count == 1 else 's'}", highlight=False)
