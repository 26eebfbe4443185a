"""The lines that are scanned: which atoms move, and what stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule
from ase.data import covalent_radii
from planted import icosahedron

from torchmdnet2 import System
from torchmdnet2.scan.paths import BondGraph, bond_paths, contact_paths, torsion_paths
from torchmdnet2.scan.surfaces import minima


def scanned(name: str, paths=bond_paths):
    atoms = molecule(name) if isinstance(name, str) else name
    atoms.rattle(0.02, seed=3)
    system = System.from_ase(atoms)
    graph = BondGraph(atoms.numbers, atoms.positions)
    return atoms, graph, paths(system, graph)


def distances(pos):
    return np.linalg.norm(pos[..., :, None, :] - pos[..., None, :, :], axis=-1)


def check_tangents(path):
    """Against central differences."""
    step = 1e-5
    values = path.values[[3, len(path.values) // 2, -1]]
    numbers = (path.positions(values + step) - path.positions(values - step)) / (2 * step)
    np.testing.assert_allclose(path.tangents(values), numbers, atol=1e-9)


def test_bonds_of_a_chain_change_alone():
    atoms, graph, paths = scanned("CH3CH2OH")
    assert len(paths) == 8
    bonds = np.array(graph.bonds)
    for path in paths:
        i, j = path.atoms
        assert path.values[0] == pytest.approx(0.6 * path.start) and path.values[-1] == pytest.approx(2 * path.start)
        np.testing.assert_allclose(path.positions(np.array([path.start]))[0], atoms.positions, atol=1e-12)
        d = distances(path.positions(path.values))
        np.testing.assert_allclose(d[:, i, j], path.values, rtol=1e-12)
        others = bonds[(bonds != path.atoms).any(1)]
        np.testing.assert_allclose(np.ptp(d[:, others[:, 0], others[:, 1]], axis=0), 0, atol=1e-12)
        check_tangents(path)
    assert paths[0].name == "C0–C1" and len({path.name for path in paths}) == 8


def test_a_bond_in_a_ring_moves_its_ends_and_their_branches():
    _, graph, paths = scanned("C3H6_D3h")  # cyclopropane
    ring = [(i, j) for i, j in graph.bonds if max(i, j) < 3]
    assert len(graph.bonds) == 9 and len(ring) == 3
    for i, j in ring:
        assert graph.side(i, j) == {i, *(k for k in graph.neighbors[i] if k > 2)} and not graph.is_rotatable(i, j)
        path = next(p for p in paths if p.atoms == (i, j))
        d = distances(path.positions(path.values))
        np.testing.assert_allclose(d[:, i, j], path.values, rtol=1e-12)
        (third,) = {0, 1, 2} - {i, j}
        assert np.ptp(d[:, i, third]) > 0.1 and d[:, i, third].min() > 1.2
    assert not torsion_paths(System.from_ase(molecule("C3H6_D3h")), graph)


@pytest.mark.parametrize(("name", "count"), [("CH3CH2OH", 2), ("C2H6", 1), ("CH4", 0), ("H2O", 0), ("C2H2", 0),
                                             ("CH3CONH2", 2), ("H2COH", 1), ("CH3CN", 0), ("C6H6", 0)])  # fmt: skip
def test_torsions(name, count):
    """A full turn of rigid parts; the coordinate is the dihedral angle as ASE has it."""
    atoms, graph, paths = scanned(name, torsion_paths)
    assert len(paths) == count
    bonds = np.array(graph.bonds)
    for path in paths:
        positions = path.positions(path.values)
        np.testing.assert_allclose(positions[0], atoms.positions, atol=1e-12)
        np.testing.assert_allclose(positions[-1], atoms.positions, atol=1e-9)
        d = distances(positions)
        np.testing.assert_allclose(np.ptp(d[:, bonds[:, 0], bonds[:, 1]], axis=0), 0, atol=1e-12)
        for value, pos in list(zip(path.values, positions, strict=True))[::17]:
            angle = Atoms(atoms.numbers, pos).get_dihedral(*path.atoms)
            assert (np.degrees(value) - angle + 180) % 360 == pytest.approx(180, abs=1e-6)
        check_tangents(path)


def test_contacts():
    """The two atoms in front are at the distance that is asked for, and all others farther apart than they."""
    atoms = molecule("CH3CH2OH")
    paths, hidden = contact_paths(System.from_ase(atoms), cutoff=5.0)
    assert [p.name for p in paths] == ["H…H", "H…C", "H…O", "C…C", "C…O", "O…O"] and not hidden
    n, z = len(atoms), atoms.numbers
    inside = distances(atoms.positions)
    for path in paths:
        (a, b), total = path.atoms, sum(covalent_radii[path.system.z.numpy()[list(path.atoms)]])
        assert path.usual == pytest.approx(total)
        assert path.values[0] == pytest.approx(0.6 * total) and path.values[-1] == pytest.approx(6.0)
        d = distances(path.positions(path.values))
        np.testing.assert_allclose(d[:, a, b], path.values, rtol=1e-9)
        for part in (slice(None, n), slice(n, None)):
            np.testing.assert_allclose(d[:, part, part], np.broadcast_to(inside, (len(d), n, n)), atol=1e-9)
        at = int(np.argmin(np.abs(path.values - total)))
        ratio = d[at][:n, n:] / np.add.outer(covalent_radii[z], covalent_radii[z])
        ratio[a, b - n] = np.inf
        assert ratio.min() > 0.98
        check_tangents(path)


def test_an_atom_that_cannot_be_reached_has_no_contacts():
    shell = Atoms("SiH12", [[0, 0, 0], *(1.6 * v for v in icosahedron())])
    paths, hidden = contact_paths(System.from_ase(shell), cutoff=4.0)
    assert hidden == ["Si…Si"] and [path.name for path in paths] == ["H…H", "H…Si"]


def test_minima():
    x = np.linspace(0, 4 * np.pi, 401)
    assert [m.index for m in minima(-np.cos(x), 0.1)] == [0, 200, 400]
    assert [m.index for m in minima(np.cos(x), 0.1)] == [100, 300]
    ripple = np.cos(x) + 0.01 * np.cos(40 * x)
    assert len(minima(ripple, 0.1)) == 2 and len(minima(ripple, 0.001)) > 10
    ((index, depth),) = [(m.index, m.depth) for m in minima(np.where(x > 9, 0.5, 0) - np.exp(-(x**2)), 0.1)]
    assert (index, depth) == (0, np.inf)
    hump = np.array([0.0, 1.0, 0.4, 2.0, np.nan, 1.0, 3.0])
    assert [(m.index, m.depth) for m in minima(hump, 0.1)] == [(0, np.inf), (2, pytest.approx(0.6)), (5, np.inf)]
