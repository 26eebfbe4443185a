"""Molecules out of their minima, for tests of streams."""

from __future__ import annotations

from ase.build import molecule

NAMES = ["CH3CH2OH", "H2O", "C2H4", "CH4", "H2CO", "CO2"]


def rattled(names=NAMES, size=0.08):
    found = [molecule(name) for name in names]
    for k, atoms in enumerate(found):
        atoms.rattle(size, seed=k)
        atoms.info = {"name": names[k]}
    return found
