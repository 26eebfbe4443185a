"""DCD and XTC files: read back, against OpenMM's writer, cut and continued."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ase import Atoms
from ase.build import molecule

from torchmdnet2.errors import BadData
from torchmdnet2.md import MDOptions, run_md
from torchmdnet2.md.trajectory import open_trajectory

TRICLINIC = [[9.0, 0, 0], [1.0, 8.0, 0], [-2.0, 1.5, 7.0]]


def frames(count=4, cell=None, first=0, interval=10):
    rng = np.random.default_rng(first)
    for k in range(count):
        atoms = Atoms("OH2", 3 * rng.normal(size=(3, 3)), cell=cell, pbc=cell is not None)
        atoms.info["step"] = first + k * interval
        yield atoms


def parse(path):
    """Numbers of the header, cells and positions of a DCD file."""
    blob, records = path.read_bytes(), []
    while blob:
        size = struct.unpack("<i", blob[:4])[0]
        assert blob[4 + size : 8 + size] == blob[:4]
        records.append(blob[4 : 4 + size])
        blob = blob[8 + size :]
    head, _, num, *rest = records
    count, first, interval, last = struct.unpack("<4i", head[4:20])
    delta, periodic = struct.unpack("<fi", head[40:48])
    each = 3 + periodic
    found = [rest[k : k + each] for k in range(0, len(rest), each)]
    cells = [np.frombuffer(f[0], "<f8") for f in found] if periodic else []
    positions = [np.stack([np.frombuffer(axis, "<f4") for axis in f[-3:]], 1) for f in found]
    assert count == len(found) and struct.unpack("<i", num)[0] == len(positions[0])
    return (first, interval, last, delta), cells, positions


CELLS = pytest.mark.parametrize("cell", [None, [9.0, 8.0, 7.0], TRICLINIC], ids=["free", "orthorhombic", "triclinic"])


def read_by_mdanalysis(path):
    """Positions [S, N, 3], cell parameters [S, 6] or None, and the time between frames in ps."""
    reader = pytest.importorskip("MDAnalysis.coordinates.DCD").DCDReader(str(path))
    found = [(frame.positions.copy(), frame.dimensions) for frame in reader]
    cells = None if found[0][1] is None else np.array([cell for _, cell in found])
    return np.array([positions for positions, _ in found]), cells, reader.dt


def read_by_mdtraj(path):
    """The same; mdtraj does not read times."""
    with pytest.importorskip("mdtraj.formats").DCDTrajectoryFile(str(path)) as file:
        positions, lengths, angles = file.read()
    return positions, np.concatenate([lengths, angles], 1) if np.any(lengths) else None, None


@CELLS
@pytest.mark.parametrize("read", [read_by_mdanalysis, read_by_mdtraj])
def test_other_programs_read_it(tmp_path, cell, read):
    path = tmp_path / "ours.dcd"
    file = open_trajectory(path, 0.5, 10)
    written = list(frames(cell=cell, first=20))
    for atoms in written:
        file.write(atoms)
    file.close()
    positions, cells, interval = read(path)
    np.testing.assert_allclose(positions, [atoms.positions for atoms in written], rtol=0, atol=1e-5)
    assert (cells is None) == (cell is None)
    if cells is not None:
        np.testing.assert_allclose(cells, [atoms.cell.cellpar() for atoms in written], rtol=0, atol=1e-4)
    assert interval is None or interval == pytest.approx(0.005, rel=1e-6)


@CELLS
def test_same_bytes_as_openmm(tmp_path, cell):
    """All but the title."""
    app = pytest.importorskip("openmm.app")
    from openmm import Vec3, unit

    ours = open_trajectory(tmp_path / "ours.dcd", 0.5, 10)
    topology = app.Topology()
    residue = topology.addResidue("HOH", topology.addChain())
    for symbol in ("O", "H", "H"):
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    if cell is not None:
        rows = Atoms(cell=cell).cell.array / 10
        topology.setPeriodicBoxVectors([Vec3(*row) for row in rows] * unit.nanometer)
    with open(tmp_path / "theirs.dcd", "wb+") as file:
        theirs = app.DCDFile(file, topology, 0.0005, 20, 10)
        for atoms in frames(cell=cell, first=20):
            ours.write(atoms)
            theirs.writeModel(np.float32(atoms.positions).astype(float) * 0.1 * unit.nanometer)
    ours.close()
    for (a, b), tolerance in zip(zip(parse(tmp_path / "ours.dcd"), parse(tmp_path / "theirs.dcd"), strict=True),
                                 (0, 1e-12, 1e-6), strict=True):  # fmt: skip
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-7, atol=tolerance)


def test_cut_and_continued(tmp_path):
    whole = open_trajectory(tmp_path / "whole.dcd", 0.5, 10)
    for atoms in frames(5):
        whole.write(atoms)
    part = open_trajectory(tmp_path / "part.dcd", 0.5, 10)
    marks = []
    for atoms in frames(4):
        part.write(atoms)
        marks.append(part.mark)
    part.sync()
    again = open_trajectory(tmp_path / "part.dcd", 0.5, 10, marks[1])
    assert parse(tmp_path / "part.dcd")[0][:3] == (0, 10, 10)
    for atoms in list(frames(5))[2:]:
        again.write(atoms)
    again.close()
    whole.close()
    assert (tmp_path / "part.dcd").read_bytes() == (tmp_path / "whole.dcd").read_bytes()
    (tmp_path / "other.dcd").write_bytes(bytes(reversed((tmp_path / "part.dcd").read_bytes())))
    with pytest.raises(BadData, match="is not the file that it was when the restart file was written"):
        open_trajectory(tmp_path / "other.dcd", 0.5, 10, marks[1])
    with pytest.raises(BadData, match="shorter"):
        open_trajectory(tmp_path / "part.dcd", 0.5, 10, {"frames": 9, "bytes": 10**6})


def test_cells_that_a_dcd_file_cannot_hold(tmp_path):
    for atoms, words in (
        (Atoms("H", cell=[[0, 5, 0], [5, 0, 0], [0, 0, 5]], pbc=True), "first vector along x and its second in the xy"),
        (Atoms("H", cell=[5, 5, 5], pbc=[True, True, False]), "a DCD file knows only structures that are periodic in"),
    ):
        atoms.info["step"] = 0
        with pytest.raises(BadData, match=words):
            open_trajectory(tmp_path / "x.dcd", 0.5, 10).write(atoms)


def test_a_cell_that_turns_is_turned_back(tmp_path):
    """Frames after the first: distances between images stay, and the lengths and angles of the file fit positions."""
    file = open_trajectory(tmp_path / "x.dcd", 0.5, 10)
    first, second = frames(2, TRICLINIC)
    shear = np.array([[1.01, 0.03, -0.02], [0.03, 0.98, 0.01], [-0.02, 0.01, 1.0]])
    second.set_cell(second.cell @ shear, scale_atoms=True)
    for atoms in (first, second):
        file.write(atoms)
    file.close()
    _, cells, positions = parse(tmp_path / "x.dcd")
    a, gamma, b, beta, alpha, c = cells[1]
    angles = np.degrees(np.arccos([alpha, beta, gamma]))
    read = Atoms("OH2", positions[1], cell=[a, b, c, *angles], pbc=True)
    for mic in (False, True):
        np.testing.assert_allclose(read.get_all_distances(mic), second.get_all_distances(mic), atol=1e-5)
    assert not np.allclose(read.positions, second.positions, atol=1e-3)


@CELLS
def test_xtc(tmp_path, cell):
    """Read back by chemfiles, and cut and continued."""
    chemfiles = pytest.importorskip("chemfiles")
    written, path = list(frames(4, cell)), tmp_path / "x.xtc"
    file, marks = open_trajectory(path, 0.5, 10), []
    for atoms in written:
        file.write(atoms)
        marks.append(file.mark)
    whole = path.read_bytes()
    again = open_trajectory(path, 0.5, 10, marks[1])
    for atoms in written[2:]:
        again.write(atoms)
    again.sync()
    assert path.read_bytes() == whole
    with chemfiles.Trajectory(str(path)) as found:
        assert found.nsteps == 4
        for k, atoms in enumerate(written):
            frame = found.read_step(k)
            np.testing.assert_allclose(frame.positions, atoms.positions, atol=0.0051)
            assert (frame.step, frame["time"]) == (10 * k, pytest.approx(0.005 * k))
            if cell is not None:
                np.testing.assert_allclose(frame.cell.matrix.T, atoms.cell.array, atol=1e-5)


def test_of_a_run(potential, tmp_path):
    o = MDOptions(30, timestep=0.25, every=10, output=str(tmp_path / "w.dcd"))
    result = run_md(potential, molecule("H2O"), o)
    (first, interval, last, delta), cells, positions = parse(tmp_path / "w.dcd")
    assert (first, interval, last) == (0, 10, 30) and not cells and len(positions) == 4
    assert delta * 0.04888821 * 1000 == pytest.approx(0.25)
    np.testing.assert_allclose(positions[-1], result.atoms.positions, atol=1e-6)


def test_dcd_refuses_a_slab_before_any_file_is_touched(potential, water, tmp_path):
    water.cell, water.pbc = [9, 9, 9], [True, True, False]
    (tmp_path / "run.csv").write_text("of an earlier run")
    with pytest.raises(BadData, match="periodic in all directions or in none"):
        run_md(
            potential, water, MDOptions(steps=10, output=str(tmp_path / "run"), trajectories=(str(tmp_path / "a.dcd"),))
        )
    assert (tmp_path / "run.csv").read_text() == "of an earlier run"
