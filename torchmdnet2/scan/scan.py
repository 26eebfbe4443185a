"""Scan of a potential along bonds, torsions and close contacts.

Errors on test frames say nothing about geometries outside the data. R. Liu et al. (arXiv:2602.04861) stretch and
compress bonds, and relate faults of the curves (discontinuities, artificial minima, spurious forces) to the stability
of dynamics. This scan checks bonds, torsions and contacts for such faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..core.stated import require_atoms
from ..errors import BadConfig, BadData, UntrainedCharge
from ..md.guard import check_overlaps
from ..md.setup import plain_copy
from ..system import System
from .findings import SHARED, compare, find_faults, find_jumps
from .paths import BondGraph, ScanPath, bond_paths, contact_paths, torsion_paths
from .report import ScanReport
from .surfaces import Curve, Models, ModelSurface, ScanProgress, Surface, open_reference

if TYPE_CHECKING:
    from ase import Atoms
    from rich.console import Console

__all__ = ["KINDS", "scan_molecule"]

KINDS = ("bond", "torsion", "contact")
_COARSE = 5  # the reference is computed at every fifth point


def scan_molecule(
    models: Models,
    atoms: Atoms,
    kinds: Sequence[str] = KINDS,
    reference: str | Surface | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = torch.float32,
    charge: int | None = None,
    spin: int | None = None,
    allow_untrained_charge: bool = False,
    console: Console | None = None,
    level: str | None = None,
) -> ScanReport:
    """Scan every bond, rotatable torsion and close contact of a molecule for faults of a model.

    Paths are made by `paths.bond_paths`, `paths.torsion_paths` and, for each pair of elements, `paths.contact_paths`.
    Faults are defined by `findings.CHECKS` and `findings.KINDS`. KeyboardInterrupt (Ctrl-C) ends a scan early; if a
    curve is complete, the report has all results so far, and a note.

    Args:
        models: a .tmn file or a Potential; an Ensemble, an ensemble.json, or a list of .tmn files.
        atoms: one molecule near its equilibrium, or several beside each other; not periodic.
        kinds: any of "bond", "torsion", "contact".
        reference: name (`surfaces.open_reference`) or Surface of a reference, which is computed at every fifth point.
            Faults that the reference has too do not count.
        device: device of the model.
        dtype: floating-point type of the network. With float32, jumps are checked again in float64. Jumps of the
            curvature are found in float64 only, which takes some ten times as long on CPUs.
        charge: total charge in e, if the structure states none.
        spin: multiplicity 2S+1, if the structure states none.
        allow_untrained_charge: accept total charges that the model was not trained on, or does not use, with a warning.
        console: console for progress; None shows nothing.
        level: level of theory, for models that were trained on several; None takes their default. A model as reference
            has its default.

    Raises:
        BadConfig: a kind or the reference is unknown.
        BadData: there are no atoms, or the structure is periodic.
        Unphysical: atoms overlap.
        UnknownElement, UntrainedCharge: the model does not know an element, or the total charge.
        ValueError: the structure is not valid for another reason.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise BadConfig(f"'{kind}' cannot be scanned: choose from {', '.join(KINDS)}")
    system = _molecule(atoms, charge, spin)
    with torch.inference_mode(False):
        surface = ModelSurface(models, device, dtype, allow_untrained_charge, level)
        surface.check(system)
        check_overlaps(system, surface.members)
        if isinstance(reference, str):
            reference = open_reference(reference, str(device), allow_untrained_charge)
        if reference is not None:
            reference.check(system)
        complete = True
        paths, notes = _paths(system, surface, kinds)
        if not paths:
            raise BadData(f"there is nothing to scan: no {' or '.join(kinds)}" + "".join(f"; {note}" for note in notes))
        curves: list[Curve] = []
        done = "no curve"
        try:
            with ScanProgress(console) as progress:
                progress.begin(f"{len(paths)} curves", sum(len(path.values) for path in paths))
                for path in paths:
                    curves += [Curve(path, samples) for samples in surface([(path, path.values)], progress.advance)]
                    done = f"{len(curves)} of {len(paths)} curves, no jumps"
                find_jumps(surface, curves, progress)
                if reference is not None:
                    coarse = [(path, path.values[::_COARSE]) for path in paths]
                    progress.begin(reference.name, sum(len(values) for _, values in coarse))
                    for number, (curve, request) in enumerate(zip(curves, coarse, strict=True)):
                        done = f"all curves, and the reference of {number} of them"
                        (curve.reference,) = reference([request], progress.advance)
        except KeyboardInterrupt:
            if not curves:
                raise
            notes.append(f"interrupted: the report has {done}")
            complete = False
    for curve in curves:
        _judge(curve)
    return ScanReport(
        model=surface.name,
        formula=atoms.get_chemical_formula(),
        curves=curves,
        cutoff=surface.cutoff,
        reference=None if reference is None else reference.name,
        notes=notes,
        members=len(surface.members),
        complete=complete,
    )


def _molecule(atoms: Atoms, charge: int | None, spin: int | None) -> System:
    require_atoms(atoms)
    if atoms.pbc.any():
        raise BadData(
            "the structure is periodic, but a scan needs a molecule: write one to a file without a cell "
            "(atoms.pbc = False, whole, not wrapped)"
        )
    bare = plain_copy(atoms, charge, spin)
    bare.cell = None
    return System.from_ase(bare)


def _paths(system: System, surface: ModelSurface, kinds: Sequence[str]) -> tuple[list[ScanPath], list[str]]:
    """Return all paths in the order of KINDS, and notes on what is left out."""
    graph = BondGraph(system.z.numpy(), system.pos.numpy())
    paths: list[ScanPath] = []
    notes: list[str] = []
    if "bond" in kinds:
        paths += bond_paths(system, graph)
    if "torsion" in kinds:
        paths += torsion_paths(system, graph)
    if "contact" in kinds:
        contacts, hidden = contact_paths(system, surface.cutoff)
        if hidden:
            notes.append(f"no contact of {', '.join(hidden)}: other atoms would be closer")
        try:
            for path in contacts[:1]:
                surface.check(path.system)
            paths += contacts
        except UntrainedCharge:
            total = float(contacts[0].system.charge[0])
            notes.append(f"no contacts: the model does not know the charge of two copies of the molecule, {total:g}")
    return paths, notes


def _judge(curve: Curve) -> None:
    """Complete the findings of a curve; findings that its reference has too are excused."""
    found = find_faults(curve.path, curve.model)
    theirs: set[str] = set()
    if curve.reference is not None:
        theirs = {finding.kind for finding in find_faults(curve.path, curve.reference)} & set(SHARED)
    curve.excused = [finding for finding in found if finding.kind in theirs]
    kept = [finding for finding in found if finding.kind not in theirs]
    curve.findings = [*kept, *curve.findings, *compare(curve)]
