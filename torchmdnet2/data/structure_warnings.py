"""Warnings of what structures from files may lack: hydrogens, a charge in a title, elements, whole sites."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.stated import Statement, warn_of_sums, whole_number
from ..core.stated_words import kind_of, warn_of_text
from ..errors import BadData, StructureWarning
from .program_texts import Molecule

__all__ = [
    "TITLES", "warn_of_disorder", "warn_of_guesses", "warn_of_hydrogens", "warn_of_oxidation", "warn_of_placeholder",
    "warn_of_titles", "warn_of_unstated",
]  # fmt: skip

if TYPE_CHECKING:
    from ase import Atoms


TITLES = {
    "vasp": r"\A(.*)",
    "cube": r"\A(.*\n.*)",
    "xsf": r"^ *#(.*)",
    "turbomole": r"^\$title *\n?(.*)",
    "v-sim": r"\A#?(.*)",
    "cif": r"^_chemical_formula_sum +(.*)",
    "proteindatabank": r"^(?:TITLE|COMPND|FORMUL) +(.*)",
}
"""Formats -> pattern of titles and formulas in their texts, which ASE leaves out."""

_LARGE = 300  # atoms, from which on titles are those of proteins, such as channels of cations


def warn_of_titles(
    format: str, text: str, stated: Mapping[str, Sequence[Statement]], numbers: np.ndarray, where: str
) -> None:
    """Warn of a charge or a spin state in the title of a file, and of a number of electrons beside a POSCAR."""
    known = [name for name, statements in stated.items() if statements]
    if format == "vasp" and (electrons := re.search(r"(?i)^[ \t]*(NELECT[ \t]*=[ \t]*[\d.]+)", text, re.M)):
        warnings.warn(
            f"{where}'{electrons[1]}' in the INCAR beside it is not read: if the cell is charged, give the charge",
            StructureWarning,
            stacklevel=5,
        )
    for title in re.findall(TITLES[format], text, re.M) if format in TITLES and len(numbers) < _LARGE else ():
        warn_of_text(title.strip(" '\"\r\t"), known, numbers, where=where)


def warn_of_unstated(molecule: Molecule, stated: Sequence[Statement], where: str, numbers: np.ndarray) -> None:
    """Warn of a charge that bonds, partial charges or the title show, and that the file does not state."""
    total = next((one.value for one in stated), None)
    for name, text in molecule.items.items():
        if total is None and kind_of(name) == "charge":
            with suppress(BadData):
                total = whole_number(text, name)
    if not warn_of_sums(molecule.partial_charges(), where, total) and total is None and not molecule.unpaired:
        if shown := molecule.charge_of_bonds():
            warnings.warn(
                f"{where}no charge is stated, and it is taken as 0, but by its bonds the molecule has the charge "
                f"{shown}: add lines M  CHG, or M  RAD of a radical, or hydrogens that are missing",
                StructureWarning,
                stacklevel=5,
            )
            return
    known = [name for name, given in (("charge", total is not None), ("spin", molecule.unpaired)) if given]
    for title in molecule.titles:
        warn_of_text(title, known, numbers, where=where)


_ION = re.compile(r"[A-Z][a-z]?(?:(\d+)([+-])|([+-])(\d*))")  # O2-, Fe3+, O-2, Cl-
_CIF_TAGS = ("_atom_site_type_symbol", "_atom_site_label", "_atom_type_symbol", "_atom_type_oxidation_number")


def warn_of_oxidation(path: str, atoms: Atoms) -> None:
    """Warn of oxidation numbers in a CIF file that do not cancel, and remove its tags from `info`.

    They are not read: a crystal is neutral, and atoms that were not found in it, such as hydrogens, have none. Sums of
    rounded numbers (Fe 2.67) need to cancel within their rounding only, those of partly occupied sites not at all.
    """
    tags = {key: value for key, value in atoms.info.items() if key.startswith("_")}
    atoms.info = {key: value for key, value in atoms.info.items() if key not in tags}
    types, labels, names, numbers = (tags.get(key) for key in _CIF_TAGS)
    known = dict(zip(names, numbers, strict=False)) if isinstance(names, list) and isinstance(numbers, list) else {}
    charges = [_oxidation(known.get(site, site)) for site in types or labels or ()]
    kinds = atoms.arrays.get("spacegroup_kinds", range(len(atoms)))
    if max(kinds) >= len(charges) or _partly(atoms.info.get("occupancy")):
        return
    total = sum(charges[kind] for kind in kinds)
    if abs(total) > 1e-6 + sum(_rounding(charges[kind]) for kind in kinds):
        warnings.warn(
            f"{path}: the charges of its atoms ({', '.join(sorted({str(s) for s in types or labels or ()}))}) sum to "
            f"{total:g} in the cell, which is not read as its total charge: if it is, state charge={total:g}, and if "
            "not, atoms may be missing",
            StructureWarning,
            stacklevel=5,
        )


def _oxidation(site: Any) -> float:
    """Return the charge of a symbol such as O2-, or an oxidation number; 0: it has none."""
    if not isinstance(site, str):
        return float(site)
    match = _ION.fullmatch(site.strip())
    return float(f"{match[2] or match[3]}{match[1] or match[4] or 1}") if match else 0.0


def _rounding(number: float) -> float:
    """Return half a unit of the last decimal place; 0 for whole numbers."""
    return 0.0 if number.is_integer() else 0.5 * 10.0 ** -len(repr(number).partition(".")[2])


def warn_of_guesses(where: str, elements: Mapping[str, str]) -> None:
    """Warn of elements that were guessed from names of atoms, since CA may be carbon or calcium."""
    listed = ", ".join(f"{name} → {symbol}" for name, symbol in islice(elements.items(), 20))
    warnings.warn(
        f"{where}the file states no elements; they are guessed from the names of atoms"
        f"{f' ({listed})' if listed else ''}: check them, or give a file with elements",
        StructureWarning,
        stacklevel=5,
    )


def warn_of_placeholder(file: str) -> None:
    """Warn of a cell that `core.stated.no_cell` finds, in the same words for all structures of a file."""
    words = f"{file}the cell of 1 × 1 × 1 Å is a placeholder; the structure is read as a molecule"
    warnings.warn(words, StructureWarning, stacklevel=4)


def warn_of_disorder(occupancy: Any, where: str) -> None:
    """Warn of partly occupied sites of a CIF file: ASE keeps one atom of each site."""
    partly = _partly(occupancy)
    if partly:
        warnings.warn(
            f"{where}: sites are partly occupied ({', '.join(partly)}), and each is read as one whole atom: "
            "give an ordered structure instead",
            StructureWarning,
            stacklevel=4,
        )


def _partly(occupancy: Any) -> list[str]:
    """Return the elements and shares of partly occupied sites, from ASE's `info["occupancy"]`."""
    sites = [site for site in occupancy.values() if isinstance(site, Mapping)] if isinstance(occupancy, Mapping) else []
    return sorted({f"{symbol} {share:g}" for site in sites for symbol, share in site.items() if abs(share - 1) > 1e-3})


def warn_of_hydrogens(atoms: Atoms, where: str) -> None:
    """Warn of a structure that was written without the hydrogens of its carbons, or with polar hydrogens alone.

    Args:
        atoms: the structure.
        where: its file, for the message, as "a.pdb: ".
    """
    if _lacks_hydrogens(atoms):
        suffix = Path(where.removesuffix(": ")).suffix or ".xyz"
        warnings.warn(
            f"{where}the structure has carbons that need hydrogens, and has {'few' if 1 in atoms.numbers else 'none'}: "
            f"add them, for example by obabel IN{suffix} -O OUT{suffix} -h{' or PDBFixer' * (suffix == '.pdb')}",
            StructureWarning,
            stacklevel=5,
        )


def _lacks_hydrogens(atoms: Atoms) -> bool:
    """Return whether most carbons that are not bonded to hydrogen need some by their bond lengths and angles.

    Such a carbon has one bond that is longer than a triple bond, or two at an angle of which one is longer than a
    double bond, or three single bonds to one side, unless all atoms are carbon, as in cages. Carbons bonded to other
    elements than C, N, O, S and one halogen are left out, and so are crystals of carbon, and CO and CN, which may be
    stretched. One carbon without two single bonds may be a radical (HOCO) if there are hydrogens, and a few among many
    are defects.
    """
    carbons = np.flatnonzero(atoms.numbers == 6)
    if not (len(carbons) and np.isfinite(atoms.positions).all()):
        return False
    if (len(carbons) == len(atoms) and atoms.pbc.any()) or (len(carbons) == 1 and len(atoms) < 3):
        return False
    bonded, other, vectors = _bonds_of(atoms, carbons)
    element = atoms.numbers[other]
    bare = np.setdiff1d(carbons, bonded[element == 1])
    if 2 * len(bare) <= len(carbons):
        return False
    length = np.linalg.norm(vectors, axis=1)
    lacking, sure = 0, False
    for carbon in bare:
        own = np.flatnonzero(bonded == carbon)
        bonds = list(zip(element[own].tolist(), length[own].tolist(), strict=True))
        halogens = {z for z, _ in bonds} - {*_TRIPLE}
        if halogens and (len(own) != 2 or not halogens <= {*_HALOGENS}):
            continue
        single = all(d > _SINGLE.get(z, 0.0) for z, d in bonds)
        sum_of_units = np.linalg.norm((vectors[own] / length[own, None]).sum(0))
        if len(own) == 1 and bonds[0][1] > _TRIPLE[bonds[0][0]]:
            lacking, sure = lacking + 1, True
        elif len(own) == 2 and sum_of_units > _BENT and any(d > _DOUBLE.get(z, np.inf) for z, d in bonds):
            lacking, sure = lacking + 1, sure or single
        elif len(own) == 3 and sum_of_units > _PYRAMID and single and len(carbons) < len(atoms):
            lacking += 1
    if lacking == 1 and not sure and 1 in atoms.numbers:
        return False
    return lacking > len(carbons) - len(bare) and 5 * lacking >= len(carbons)


_TRIPLE = {6: 1.32, 7: 1.22, 8: 1.19, 16: 1.65}
"""Element -> Å, the longest bond to a carbon that has no other."""

_DOUBLE = {6: 1.34, 7: 1.28, 8: 1.30, 16: 1.70}
"""Element -> Å, the longest bond to a carbon with two at an angle that has no hydrogen, as in CO2 with a charge."""

_SINGLE = {6: 1.46, 7: 1.41, 8: 1.36, 16: 1.75}
"""Element -> Å, above which a bond to a carbon is single."""

_HALOGENS = (9, 17, 35, 53)

_BENT, _PYRAMID = 0.51, 0.85
"""Size of the sum of the directions of two bonds at 150°, and of three: 0 in a plane, 1 in a tetrahedron."""

_PAIRS = 2**18  # of a carbon and an atom, up to which all distances are computed


def _bonds_of(atoms: Atoms, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bonds of the chosen atoms, by covalent radii: these atoms [E], the others [E], the vectors [E, 3] in Å."""
    from ase.data import covalent_radii

    radii = 1.25 * covalent_radii[atoms.numbers]
    if atoms.pbc.any() or len(chosen) * len(atoms) > _PAIRS:
        from ase import Atoms
        from ase.neighborlist import neighbor_list

        boxed = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        boxed.center(vacuum=1.0, axis=np.flatnonzero(~atoms.pbc))  # ASE takes N² time for atoms outside of the cell
        first, second, vectors = neighbor_list("ijD", boxed, radii)
        kept = np.isin(first, chosen)
        return first[kept], second[kept], vectors[kept]
    vectors = atoms.positions - atoms.positions[chosen][:, None]
    near = np.square(vectors).sum(2) < np.square(radii + radii[chosen][:, None])
    near[np.arange(len(chosen)), chosen] = False
    rows, second = np.nonzero(near)
    return chosen[rows], second, vectors[rows, second]
