"""Which bonds a structure has, and which changes of them are told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from torchmdnet2 import System
from torchmdnet2.md import Unphysical
from torchmdnet2.md.guard import Bonds


def bonds_of(atoms, frames=()):
    return Bonds(System.from_ase(atoms), frames)


def positions(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_bonds_of_a_molecule():
    atoms = molecule("CH3CH2OH")
    bonds = bonds_of(atoms)
    symbols = sorted("".join(sorted(atoms[list(p)].get_chemical_symbols())) for p in bonds.pairs)
    assert symbols == ["CC"] + ["CH"] * 5 + ["CO", "HO"]
    frames = [atoms.copy(), atoms.copy(), atoms.copy()]
    frames[1].positions *= 1.1
    frames[2].positions *= 2.0  # no bonds at all: does not count
    np.testing.assert_allclose(bonds_of(atoms, frames).usual, 1.05 * bonds.usual, rtol=1e-12)
    bonds(torch.as_tensor(atoms.positions * 1.2))
    assert bonds.deviation == pytest.approx(0.2 * bonds.usual.max())
    for scale in (1.5, 0.6):
        with pytest.raises(Unphysical, match=r"bond of atom \d \(\w\) and atom \d \(\w\) is"):
            bonds(torch.as_tensor(atoms.positions * scale))


def test_bonds_across_a_cell_boundary():
    """Minimum images at the start, then the same image: positions are not wrapped."""
    atoms = Atoms("CO", [[0.3, 5, 5], [9.2, 5, 5]], cell=[10, 10, 10], pbc=True)
    bonds = bonds_of(atoms)
    assert bonds.usual.tolist() == pytest.approx([1.1])
    wrapped, other = atoms.copy(), atoms.copy()
    wrapped.positions[1, 0] -= 10
    other.positions[:, 0] = [5.0, 6.3]
    assert bonds_of(atoms, [atoms, wrapped, other]).usual.tolist() == pytest.approx([3.5 / 3])
    moved = torch.as_tensor(atoms.positions) + 23.0
    bonds(moved)
    assert bonds.deviation == pytest.approx(0, abs=1e-12)
    moved[1, 0] -= 0.4
    bonds(moved)
    assert bonds.deviation == pytest.approx(0.4)
    moved[1, 0] -= 0.2
    with pytest.raises(Unphysical, match=r"is 1.70 Å long \(usually 1.10"):
        bonds(moved)


def test_bonds_of_solids():
    """Small cells have several bonds between the same two atoms; metals and salts have none."""
    silicon = bonds_of(bulk("Si"))
    assert len(silicon.usual) == 4 and len({tuple(s) for s in silicon.shift.tolist()}) == 4
    np.testing.assert_allclose(silicon.usual, 2.351, atol=1e-3)
    for atoms in (bulk("Cu"), bulk("NaCl", "rocksalt", a=5.64)):
        none = bonds_of(atoms, [atoms])
        assert len(none.usual) == 0
        none(torch.as_tensor(atoms.positions))
        assert none.deviation == 0


def test_a_proton_may_go_over():
    """From oxygen to oxygen it is chemistry, and may go back; from carbon it is a broken bond."""
    start, there = positions([0, 0, 0], [0, 0, 1.0], [0, 0, 2.5]), positions([0, 0, 0], [0, 0, 1.55], [0, 0, 2.5])
    away = positions([0, 0, 0], [0, 0, 1.55], [0, 0, 3.2])
    bonds = bonds_of(Atoms("OHO", start.numpy()))
    for k, pos in enumerate((start, there, there, start)):
        bonds(pos)
        assert bonds.transfers == (0, 1, 1, 2)[k] and bonds.deviation < 0.1
        assert bonds.pairs.tolist() == ([[1, 2]] if k in (1, 2) else [[0, 1]])
    bonds(positions([0, 0, 0], [0, 0, 1.3], [0, 0, 2.5]))  # on its way
    assert bonds.transfers == 2 and bonds.deviation < 0.1
    bonds(positions([0, 0, 0], [0, 0, 1.3], [0, 0, 3.2]))  # on none
    assert bonds.transfers == 2 and bonds.deviation == pytest.approx(1.3 - bonds.usual[0])
    with pytest.raises(Unphysical, match=r"1\.55 Å long"):
        bonds(away)
    with pytest.raises(Unphysical, match=r"atom 0 \(C\) and atom 1 \(H\)"):
        bonds_of(Atoms("CHO", positions([0, 0, 0], [0, 0, 1.0], [0, 0, 2.5]).numpy()))(there)
    cell = Atoms("OHO", [[0, 0, 0.2], [0, 0, 1.2], [0, 0, -7.3]], cell=[20, 20, 10], pbc=True)
    periodic = bonds_of(cell)
    pos = torch.as_tensor(cell.positions)
    pos[1, 2] = 1.75
    periodic(pos)
    assert periodic.transfers == 1 and periodic.lengths(pos.numpy()).tolist() == pytest.approx([0.95])


def test_a_new_bond():
    start = Atoms("CC", [[0, 0, 0], [0, 0, 3.0]])
    bonds = bonds_of(start)
    bonds(positions([0, 0, 0], [0, 0, 1.6]))
    with pytest.raises(Unphysical, match=r"atom 0 \(C\) and atom 1 \(C\), which were not bonded, are 1.40 Å apart"):
        bonds(positions([0, 0, 0], [0, 0, 1.4]))
    start = Atoms("CC", [[0, 0, 1.0], [0, 0, 4.0]], cell=[9, 9, 9], pbc=True)
    with pytest.raises(Unphysical, match="new bond"):
        bonds_of(start)(positions([0, 0, 1.0], [0, 0, 8.6]))


def test_new_bonds_are_found_with_and_without_a_neighbor_search(monkeypatch):
    """All distances of few atoms, a search for many: the same verdict on 200 distances of molecules."""
    rng = np.random.default_rng(0)
    other = molecule("CH3OH")
    other.translate([9.0, 0, 0])
    atoms = molecule("CH4") + other
    quick = bonds_of(atoms)
    monkeypatch.setattr("torchmdnet2.md.guard._DENSE_BONDS", 0)
    searching = bonds_of(atoms)
    assert searching._apart is None and quick._apart is not None

    def verdict(bonds, x):
        try:
            bonds(x)
        except Unphysical as error:
            return str(error)
        return ""

    found = []
    for _ in range(200):
        x = atoms.positions + rng.normal(0, 0.01, atoms.positions.shape)
        x[5:] += x[0] - x[5] + [rng.uniform(1.3, 1.8), 0, 0]  # two carbons are bonded below 1.52 Å
        found.append(verdict(quick, torch.as_tensor(x)))
        assert found[-1] == verdict(searching, torch.as_tensor(x))
    new = sum("a new bond" in words for words in found)
    assert 50 < new < 150, found
    assert quick.deviation == searching.deviation
