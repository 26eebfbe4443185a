"""Units: the only conversion factors in the package.

Inside torchmdnet2: energy eV, length Å, charge e, mass amu, time fs. Constants are CODATA 2018
(E. Tiesinga et al., Rev. Mod. Phys. 93, 025010 (2021)); eV, J, k_B and N_A are exact by the SI of 2019.
"""

from __future__ import annotations

import math
import re

__all__ = [
    "AMU_A2_FS2", "AMU_A3", "BOHR", "COULOMB", "HARTREE", "KB", "KCAL_MOL", "KJ_MOL", "OWN_UNITS", "UNITS", "factor",
]  # fmt: skip

_ELEMENTARY_CHARGE = 1.602176634e-19  # C, exact
_AVOGADRO = 6.02214076e23  # 1/mol, exact
_BOLTZMANN = 1.380649e-23  # J/K, exact
_SPEED_OF_LIGHT = 299792458.0  # m/s, exact
_AMU = 1.66053906660e-27  # kg
_EPSILON_0 = 8.8541878128e-12  # F/m

HARTREE = 27.211386245988  # eV
BOHR = 0.529177210903  # Å
KB = _BOLTZMANN / _ELEMENTARY_CHARGE  # eV/K
KJ_MOL = 1e3 / (_AVOGADRO * _ELEMENTARY_CHARGE)  # eV per kJ/mol
KCAL_MOL = 4.184 * KJ_MOL  # eV per kcal/mol (thermochemical)
COULOMB = _ELEMENTARY_CHARGE / (4 * math.pi * _EPSILON_0) * 1e10  # eV·Å/e²
AMU_A2_FS2 = _AMU * 1e-20 / 1e-30 / _ELEMENTARY_CHARGE  # eV per amu·Å²/fs²

AMU_A3 = _AMU * 1e3 * 1e24  # g/cm³ per amu/Å³

_DEBYE = 1e-21 / _SPEED_OF_LIGHT / _ELEMENTARY_CHARGE * 1e10  # e·Å

UNITS: dict[str, dict[str, float]] = {
    "energy": {
        "eV": 1.0,
        "meV": 1e-3,
        "hartree": HARTREE,
        "kJ/mol": KJ_MOL,
        "kcal/mol": KCAL_MOL,
        "rydberg": HARTREE / 2,
        "J": 1 / _ELEMENTARY_CHARGE,
    },
    "length": {"angstrom": 1.0, "bohr": BOHR, "nm": 10.0, "pm": 1e-2, "m": 1e10},
    "charge": {"e": 1.0},
    "dipole": {"e*angstrom": 1.0, "e*bohr": BOHR, "debye": _DEBYE},
}
"""kind -> unit name -> size of that unit in the package's unit."""

OWN_UNITS = {"energy": "eV", "length": "Å", "charge": "e", "dipole": "e·Å", "force": "eV/Å", "stress": "eV/Å³"}
"""kind -> the package's unit, as printed."""

_PASCAL = {"pa": 1.0, "mpa": 1e6, "gpa": 1e9, "bar": 1e5, "kbar": 1e8, "kb": 1e8, "atm": 101325.0}

_ALIASES = {
    "å": "angstrom",
    "ang": "angstrom",
    "a": "angstrom",
    "angstroms": "angstrom",
    "ångström": "angstrom",
    "ev": "eV",
    "electronvolt": "eV",
    "ha": "hartree",
    "eh": "hartree",
    "e_h": "hartree",
    "a.u.": "hartree",
    "a0": "bohr",
    "ry": "rydberg",
    "j": "J",
    "nanometer": "nm",
    "e*å": "e*angstrom",
    "e*ang": "e*angstrom",
    "e*a0": "e*bohr",
    "d": "debye",
    "elementary_charge": "e",
}
_MOLAR = re.compile(r"(k(?:cal|j))(?:[\s_/*·.-]*(?:per)?[\s_]*mole?)?(?:\^?-1)?", re.I)  # kcal_mol, kcalmol, kJ mol-1


def factor(kind: str, unit: str) -> float:
    """Return the size of `unit` in the package's unit of the same kind.

    Args:
        kind: "energy", "length", "charge", "dipole", "force" (energy/length) or "stress" (energy/length³).
        unit: a name such as "hartree", "kcal/mol", "bohr"; for force and stress "ENERGY/LENGTH" and
            "ENERGY/LENGTH^3"; stress also "GPa", "MPa", "Pa", "kbar", "kB", "bar" and "atm".

    Returns:
        The number by which a value in `unit` is multiplied to be in eV, Å, e, eV/Å, eV/Å³.

    Raises:
        ValueError: the unit is not known for this kind; the message lists those that are.
    """
    if kind in ("force", "stress"):
        if kind == "stress" and unit.strip().lower() in _PASCAL:
            return _PASCAL[unit.strip().lower()] * 1e-30 / _ELEMENTARY_CHARGE
        power = 1 if kind == "force" else 3
        suffix = r"" if power == 1 else r"(?:\^3|\*\*3|³)"
        match = re.fullmatch(rf"(.+)/([^/]+?){suffix}", unit.strip())
        if match is None:
            example = "eV/angstrom" if power == 1 else "eV/angstrom^3, GPa, kbar"
            raise ValueError(f"unknown {kind} unit '{unit}': write it as ENERGY/LENGTH, for example {example}")
        return factor("energy", match[1]) / factor("length", match[2]) ** power
    if kind not in UNITS:
        raise ValueError(f"unknown kind of unit '{kind}', known: {', '.join([*UNITS, 'force', 'stress'])}")
    table = UNITS[kind]
    name = unit.strip()
    molar = f"{match[1].lower().replace('j', 'J')}/mol" if (match := _MOLAR.fullmatch(name)) else ""
    for candidate in (name, name.lower(), _ALIASES.get(name.lower(), ""), molar):
        if candidate in table:
            return table[candidate]
    raise ValueError(f"unknown {kind} unit '{unit}', known: {', '.join(table)}")
