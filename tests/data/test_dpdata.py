"""Formats of dpdata: numbers, units and signs of files that are written here."""

import re
import sys
import warnings

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT

from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadData, MissingBackend, StructureWarning

pytest.importorskip("dpdata")

KEYS = {"energy": "energy", "forces": "forces", "stress": "stress"}
KBAR = 1602.1766208  # kbar in an eV/Å³


def alloy(seed=0, shape=(1, 1, 2)):
    """Copper and aluminium, compressed and sheared, with the energy, forces and stress of EMT."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True).repeat(shape)
    atoms.symbols[:3] = "Al"
    atoms.set_cell(atoms.cell.array @ (0.97 * np.eye(3) + rng.normal(scale=0.02, size=(3, 3))), scale_atoms=True)
    atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
    atoms.calc = EMT()
    return atoms


def write_deepmd(folder, frames, raw=False, type_map=("Al", "Cu"), forces=True, periodic=True, **more):
    folder.mkdir(parents=True)
    symbols = frames[0].get_chemical_symbols()
    (folder / "type.raw").write_text("\n".join(str(["Al", "Cu"].index(s)) for s in symbols))
    if type_map:
        (folder / "type_map.raw").write_text("\n".join(type_map))
    arrays = {
        "coord": [a.positions for a in frames],
        "energy": [a.get_potential_energy() for a in frames],
        **({"force": [a.get_forces() for a in frames]} if forces else {}),
        **more,
    }
    if periodic:
        arrays["box"] = [a.cell.array for a in frames]
        arrays["virial"] = [-a.get_volume() * a.get_stress(voigt=False) for a in frames]
    else:
        (folder / "nopbc").write_text("")
    if not raw:
        (folder / "set.000").mkdir()
    for name, values in arrays.items():
        flat = np.array(values).reshape(len(frames), -1)
        if raw:
            np.savetxt(folder / f"{name}.raw", flat)
        else:
            np.save(folder / "set.000" / name, flat)
    return folder


def assert_frames(data, frames, stress=True, atol=1e-10):
    assert len(data) == len(frames)
    for sample, atoms in zip(data, frames, strict=True):
        assert sample.system.z.tolist() == atoms.numbers.tolist()
        distances = np.linalg.norm(sample.system.pos.numpy() - sample.system.pos.numpy()[0], axis=1)
        assert distances == pytest.approx(np.linalg.norm(atoms.positions - atoms.positions[0], axis=1), abs=1e-7)
        assert sample.labels["energy"].item() == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
        forces = np.linalg.norm(sample.labels["forces"].numpy(), axis=1)  # dpdata rotates some cells
        assert forces == pytest.approx(np.linalg.norm(atoms.get_forces(), axis=1), abs=1e-6)
        if stress:
            mine, theirs = sample.labels["stress"][0].numpy(), atoms.get_stress(voigt=False)
            assert np.linalg.eigvalsh(mine) == pytest.approx(np.linalg.eigvalsh(theirs), abs=atol)
            assert np.linalg.eigvalsh(theirs).min() < 0, "the test would not see the sign"


@pytest.mark.parametrize("raw", [True, False])
def test_deepmd_folders(tmp_path, raw):
    frames = [alloy(seed) for seed in range(3)]
    folder = write_deepmd(tmp_path / "a", frames, raw)
    name = "dpdata/deepmd/raw" if raw else "dpdata/deepmd/npy"
    data = open_dataset(folder, KEYS, format=name)
    assert_frames(data, frames)
    assert data[1].system.cell[0].numpy() == pytest.approx(frames[1].cell.array) and data[1].system.pbc.all()
    virial = open_dataset(folder, {"virial": "virial"}, format=name)
    assert np.allclose(virial[2].labels["stress"], data[2].labels["stress"], rtol=1e-12)
    cached = open_dataset(folder, KEYS, format=name, cache=tmp_path / "caches")
    assert np.array_equal(cached[2].labels["stress"], data[2].labels["stress"])
    np.save(folder / "set.000" / "energy.npy", np.ones(3)) if not raw else (folder / "energy.raw").write_text("1\n1\n1")
    assert open_dataset(folder, KEYS, format=name, cache=tmp_path / "caches")[0].labels["energy"].item() == 1


def test_several_deepmd_folders_and_a_folder_of_them(tmp_path):
    one, two = [alloy(1)], [alloy(2, (1, 1, 1)), alloy(3, (1, 1, 1))]
    write_deepmd(tmp_path / "all" / "a", one)
    write_deepmd(tmp_path / "all" / "b", two)
    for path in (tmp_path / "all", str(tmp_path / "all" / "*"), [tmp_path / "all" / "a", tmp_path / "all" / "b"]):
        assert_frames(open_dataset(path, KEYS, format="dpdata/deepmd/npy"), [*one, *two])


def test_deepmd_without_forces_or_box(tmp_path):
    frames = [alloy(seed) for seed in range(2)]
    bare = write_deepmd(tmp_path / "a", frames, forces=False, periodic=False, charge=[-1, 2])
    data = open_dataset(bare, {"energy": "energy"}, format="dpdata/deepmd/npy")
    assert [sample.system.charge.item() for sample in data] == [-1, 2]
    assert not data[0].system.pbc.any() and not data[0].system.cell.any()
    with pytest.raises(BadData, match=r"no frame has 'forces'.*The file has: charge, energy"):
        open_dataset(bare, {"energy": "energy", "forces": "forces"}, format="dpdata/deepmd/npy")
    (bare / "nopbc").unlink()
    with pytest.raises(BadData, match=r"cannot be read: .*box\.npy"):
        open_dataset(bare, {"energy": "energy"}, format="dpdata/deepmd/npy")
    (bare / "set.000" / "energy.npy").unlink()
    (bare / "nopbc").write_text("")
    assert not open_dataset(bare, {}, format="dpdata/deepmd/npy")[0].labels


@pytest.mark.parametrize("raw", [True, False])
def test_frame_parameters_of_deepmd_are_the_charge_where_a_key_says_so(tmp_path, raw):
    frames = [alloy(seed) for seed in range(2)]
    folder = write_deepmd(tmp_path / "a", frames, raw, fparam=[-1, 2])
    name = "dpdata/deepmd/raw" if raw else "dpdata/deepmd/npy"
    data = open_dataset(folder, {**KEYS, "charge": "fparam"}, format=name)
    assert [sample.system.charge.item() for sample in data] == [-1, 2]
    with pytest.warns(StructureWarning, match=r"'fparam' is not read: .*charge: fparam"):
        assert open_dataset(folder, KEYS, format=name)[0].system.charge.item() == 0


def test_further_arrays_of_hdf5_and_mixed_sets(tmp_path):
    import dpdata
    import h5py

    system = dpdata.LabeledSystem(alloy(), fmt="ase/structure")
    system.to("deepmd/hdf5", str(tmp_path / "a.h5"))
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["set.000/charge.npy"] = np.array([[-2.0]])
    assert open_dataset(tmp_path / "a.h5", KEYS, format="dpdata/deepmd/hdf5")[0].system.charge.item() == -2
    dpdata.MultiSystems(system).to("deepmd/npy/mixed", str(tmp_path / "mixed"))
    (place,) = (tmp_path / "mixed").rglob("set.*")
    np.save(place / "charge.npy", np.array([[-2.0]]))
    with pytest.warns(StructureWarning, match="charge of mixed sets cannot be read"):
        open_dataset(tmp_path / "mixed", KEYS, format="dpdata/deepmd/npy/mixed")


def test_elements_that_are_not_stated_are_an_error(tmp_path):
    folder = write_deepmd(tmp_path / "a", [alloy()], type_map=())
    with pytest.raises(BadData, match=r"which element 'Type_0' is; write type_map\.raw beside type\.raw"):
        open_dataset(folder, KEYS, format="dpdata/deepmd/npy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="a folder without files"):
        open_dataset(tmp_path / "empty", KEYS, format="dpdata/deepmd/npy")
    (tmp_path / "empty" / "coord.npy").write_text("")
    with pytest.raises(BadData, match=r"no data of the format deepmd/npy: type\.raw is missing"):
        open_dataset(tmp_path / "empty", KEYS, format="dpdata/deepmd/npy")


@pytest.mark.parametrize("name", ["deepmd/npy/mixed", "deepmd/hdf5", "deepmd/hdf5/mixed", "deepmd/lmdb"])
def test_mixed_and_hdf5_systems(tmp_path, name):
    import dpdata

    if name == "deepmd/lmdb":
        pytest.importorskip("lmdb")
        pytest.importorskip("msgpack")

    frames = [alloy(1), alloy(2), alloy(3)]
    frames[1].symbols = frames[1].symbols[::-1]
    frames[2].symbols[0] = "Cu"
    systems = [dpdata.LabeledSystem(frame, fmt="ase/structure") for frame in frames]
    path = tmp_path / {"deepmd/lmdb": "a.lmdb", "deepmd/npy/mixed": "a"}.get(name, "a.h5")
    dpdata.MultiSystems(*systems).to(name, str(path))
    data = open_dataset(path, KEYS, format=f"dpdata/{name}")
    found = sorted(data, key=lambda sample: sample.labels["energy"].item())
    expected = sorted(frames, key=lambda atoms: atoms.get_potential_energy())
    for sample, atoms in zip(found, expected, strict=True):
        assert sample.labels["energy"].item() == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
        assert sorted(sample.system.z.tolist()) == sorted(atoms.numbers.tolist())
        assert np.trace(sample.labels["stress"][0]) == pytest.approx(np.trace(atoms.get_stress(voigt=False)), abs=1e-9)
    if name == "deepmd/npy/mixed":
        with pytest.raises(BadData, match=r"frames differ in composition: read it as dpdata/deepmd/npy/mixed"):
            open_dataset(path, KEYS, format="dpdata/deepmd/npy")


# --- outputs of programs, as short as they can be ---------------------------------------------------------------------


def rows(array, digits=9):
    return "\n".join(" ".join(f"{x:18.{digits}f}" for x in row) for row in array)


def write_outcar(path, frames):
    symbols = list(dict.fromkeys(frames[0].get_chemical_symbols()))
    counts = [frames[0].get_chemical_symbols().count(s) for s in symbols]
    text = "".join(f"   TITEL  = PAW_PBE {s} 01Jan2000\n" for s in symbols)
    text += f"   NELM   =     60;   NELMIN=  2\n   ions per type = {' '.join(map(str, counts))}\n"
    for atoms in frames:
        xx, yy, zz, yz, xz, xy = -KBAR * atoms.get_stress()  # VASP: pressure positive, xx yy zz xy yz zx
        text += "----- Iteration      1(   9)  -----\n"
        text += "  FORCE on cell =-STRESS in cart. coord.  units (eV):\n" + "\n" * 13
        text += f"  in kB {xx:.6f} {yy:.6f} {zz:.6f} {xy:.6f} {yz:.6f} {xz:.6f}\n"
        text += " VOLUME and BASIS-vectors are now :\n\n\n\n  direct lattice vectors\n"
        text += rows(np.hstack([atoms.cell.array, atoms.cell.reciprocal()])) + "\n"
        text += " POSITION                                       TOTAL-FORCE (eV/Angst)\n ----\n"
        text += rows(np.hstack([atoms.positions, atoms.get_forces()])) + "\n"
        text += f"  free  energy   TOTEN  = {atoms.get_potential_energy():.8f} eV\n"
    path.write_text(text)


def write_vasprun(path, frames):
    atoms = frames[0]
    symbols = list(dict.fromkeys(atoms.get_chemical_symbols()))
    ions = "".join(f"<rc><c>{s}</c><c>{symbols.index(s) + 1}</c></rc>" for s in atoms.get_chemical_symbols())

    def varray(name, a):
        return f'<varray name="{name}">' + "".join(f"<v>{row}</v>" for row in rows(a).split("\n")) + "</varray>"

    steps = ""
    for atoms in frames:
        steps += "<calculation><scstep/>"
        steps += f"<structure><crystal>{varray('basis', atoms.cell.array)}</crystal>"
        steps += varray("positions", atoms.get_scaled_positions(wrap=False)) + "</structure>"
        steps += varray("forces", atoms.get_forces()) + varray("stress", -KBAR * atoms.get_stress(voigt=False))
        steps += f'<energy><i name="e_fr_energy">{atoms.get_potential_energy():.8f}</i></energy></calculation>'
    path.write_text(
        f'<modeling><parameters><i name="NELM">60</i></parameters><atominfo><array name="atoms"><set>{ions}</set>'
        f"</array></atominfo>{steps}</modeling>"
    )


def write_espresso(path, frames):
    (atoms,) = frames
    rydberg, bohr = 13.605693122994, 0.529177210903
    lines = "\n".join(f"{s} {' '.join(map(str, p))}" for s, p in zip(atoms.get_chemical_symbols(), atoms.positions))
    (path.parent / "pw.in").write_text(
        f"&system\n ibrav = 0\n/\nATOMIC_POSITIONS angstrom\n{lines}\n\n"
        f"CELL_PARAMETERS angstrom\n{rows(atoms.cell.array)}\n\n"
    )
    forces = atoms.get_forces() / rydberg * bohr
    kbar = -KBAR * atoms.get_stress(voigt=False)
    text = f"!    total energy              =    {atoms.get_potential_energy() / rydberg:.10f} Ry\n\n"
    text += "     Forces acting on atoms (cartesian axes, Ry/au):\n\n"
    for k, force in enumerate(forces):
        text += f"     atom {k + 1:4d} type  1   force = {rows([force])}\n"
    text += "\n     total   stress  (Ry/bohr**3)                   (kbar)     P=        0.00\n"
    text += rows(np.hstack([kbar / KBAR / rydberg * bohr**3, kbar])) + "\n\n"
    path.write_text(text)


def write_siesta(path, frames):
    symbols = list(dict.fromkeys(frames[0].get_chemical_symbols()))
    types = [symbols.index(s) + 1 for s in frames[0].get_chemical_symbols()]
    text = f"redata: Number of Atomic Species = {len(symbols)}\n"
    text += "".join(f"Species number: {k + 1} Atomic number: 0 Label: {s}\n" for k, s in enumerate(symbols))
    text += f"initatomlists: Number of atoms, orbitals, and projectors: {len(types)} 1 1\n"
    for atoms in frames:
        text += "\noutcoor: Atomic coordinates (Ang):\n"
        for p, t, s in zip(atoms.positions, types, atoms.get_chemical_symbols()):
            text += f"{rows([p])} {t} 1 {s}\n"
        text += f"\noutcell: Unit cell vectors (Ang):\n{rows(atoms.cell.array)}\n\n"
        text += f"siesta: E_KS(eV) = {atoms.get_potential_energy():.8f}\n\nsiesta: Atomic forces (eV/Ang):\n"
        text += "".join(f"{k + 1} {rows([f])}\n" for k, f in enumerate(atoms.get_forces())) + "-----\n"
        text += f"siesta: Stress tensor (static) (eV/Ang**3):\n{rows(atoms.get_stress(voigt=False))}\n\n"
        text += "siesta: Pressure (static): 0.0 kBar\n"
    path.write_text(text)


def write_abacus(path, frames):
    (atoms,) = frames
    symbols = list(dict.fromkeys(atoms.get_chemical_symbols()))
    path.mkdir()
    (path / "INPUT").write_text("INPUT_PARAMETERS\nsuffix ABACUS\n")
    text = "ATOMIC_SPECIES\n" + "".join(f"{s} 1.0 {s}.upf\n" for s in symbols)
    text += f"\nLATTICE_CONSTANT\n1.8897261246257702\n\nLATTICE_VECTORS\n{rows(atoms.cell.array, 12)}\n"
    text += "\nATOMIC_POSITIONS\nCartesian\n\n"
    for s in symbols:
        own = atoms[[k for k, symbol in enumerate(atoms.get_chemical_symbols()) if symbol == s]]
        text += f"{s}\n0.0\n{len(own)}\n" + "".join(f"{rows([p], 12)} 1 1 1\n" for p in own.positions)
    (path / "STRU").write_text(text)
    (path / "OUT.ABACUS").mkdir()
    log = " TOTAL-FORCE (eV/Angstrom)\n\n"
    for k, (s, f) in enumerate(zip(atoms.get_chemical_symbols(), atoms.get_forces(), strict=True)):
        log += f" {s}{k + 1} {rows([f])}\n"
    log += f"\n TOTAL-STRESS (KBAR)\n\n{rows(-KBAR * atoms.get_stress(voigt=False))}\n\n"
    log += f" charge density convergence is achieved\n final etot is {atoms.get_potential_energy():.8f} eV\n"
    (path / "OUT.ABACUS" / "running_scf.log").write_text(log)


@pytest.mark.parametrize(
    ("name", "write", "file", "count"),
    [
        ("vasp/outcar", write_outcar, "OUTCAR", 2),
        ("vasp/xml", write_vasprun, "vasprun.xml", 2),
        ("qe/pw/scf", write_espresso, "pw.out", 1),
        ("siesta/aimd_output", write_siesta, "run.out", 2),
        ("abacus/scf", write_abacus, "run", 1),
    ],
)
def test_energies_forces_and_the_sign_of_the_stress(tmp_path, name, write, file, count):
    frames = [alloy(seed) for seed in range(count)]
    write(tmp_path / file, frames)
    assert_frames(open_dataset(tmp_path / file, KEYS, format=f"dpdata/{name}"), frames, atol=3e-7)
    with pytest.raises(BadData, match="dpdata converts to eV and Å"):
        open_dataset(tmp_path / file, KEYS, {"energy": "hartree"}, format=f"dpdata/{name}")


def test_the_number_of_electrons_of_vasp_shows_the_charge(tmp_path):
    frame = alloy()
    write_outcar(tmp_path / "OUTCAR", [frame])
    own = (tmp_path / "OUTCAR").read_text()
    (numbers,) = re.findall("ions per type = (.*)", own)
    valences = " ".join(["11.00"] * len(numbers.split()))
    for more, charge in ((0, 0), (2, -2)):
        electrons = 11 * len(frame) + more
        (tmp_path / "OUTCAR").write_text(f"{own}\n   NELECT = {electrons:.4f}\n   ZVAL   =   {valences}\n")
        data = open_dataset(tmp_path / "OUTCAR", KEYS, format="dpdata/vasp/outcar")
        assert data[0].system.charge.tolist() == [charge]


@pytest.mark.parametrize(
    ("name", "write", "file", "mark", "unconverged"),
    [
        ("vasp/outcar", write_outcar, "OUTCAR", "1(   9)", "1(  60)"),
        ("vasp/xml", write_vasprun, "vasprun.xml", "<scstep/>", "<scstep/>" * 60),
    ],
)
def test_frames_that_did_not_converge_are_left_out(tmp_path, name, write, file, mark, unconverged):
    frames = [alloy(seed) for seed in range(3)]
    write(tmp_path / file, frames)
    first, *others = (tmp_path / file).read_text().split(mark)
    (tmp_path / file).write_text(first + mark + others[0] + unconverged + mark.join(others[1:]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_frames(open_dataset(tmp_path / file, KEYS, format=f"dpdata/{name}"), [frames[0], frames[2]], atol=3e-7)
    assert any("unconverged" in str(one.message) for one in told) is (name == "vasp/outcar")


def test_a_run_of_abacus_that_did_not_converge_has_no_frame(tmp_path):
    write_abacus(tmp_path / "run", [alloy()])
    log = tmp_path / "run" / "OUT.ABACUS" / "running_scf.log"
    text = log.read_text().replace("convergence is achieved", "convergence has NOT been achieved!")
    log.write_text(text.partition(" final etot")[0])
    with pytest.raises(BadData, match="run: the file has no frames"):
        open_dataset(tmp_path / "run", KEYS, format="dpdata/abacus/scf")


@pytest.mark.parametrize("name", ["pwmat/movement", "openmx/md"])
def test_virials_whose_sign_is_not_known_are_not_read(tmp_path, monkeypatch, name):
    from dpdata.format import Format

    frame = alloy()
    symbols = list(dict.fromkeys(frame.get_chemical_symbols()))
    types = [symbols.index(symbol) for symbol in frame.get_chemical_symbols()]
    made = {
        "atom_names": symbols, "atom_numbs": [types.count(k) for k in range(len(symbols))],
        "atom_types": np.array(types), "orig": np.zeros(3), "cells": frame.cell.array[None],
        "coords": frame.positions[None], "energies": np.array([frame.get_potential_energy()]),
        "forces": frame.get_forces()[None], "virials": np.eye(3)[None],
    }  # fmt: skip
    monkeypatch.setattr(Format.get_formats()[name], "from_labeled_system", lambda *_, **__: made)
    (tmp_path / "a.out").write_text("")
    assert sorted(open_dataset(tmp_path / "a.out", format=f"dpdata/{name}")[0].labels) == ["energy", "forces"]
    for label in ("virial", "stress"):
        with pytest.raises(BadData, match=f"no frame has '{label}'"):
            open_dataset(tmp_path / "a.out", {label: label}, format=f"dpdata/{name}")


@pytest.mark.parametrize(
    ("written", "read"),
    [("mace/xyz", "extxyz"), ("gpumd/xyz", "extxyz"), ("quip/gap/xyz", "extxyz"), ("n2p2", "n2p2"),
     ("deepmd/hdf5", "dpdata/deepmd/hdf5")],
)  # fmt: skip
def test_what_dpdata_writes_is_read_as_it_means(tmp_path, written, read):
    """Its virial is −volume × stress in every format; input.data of n2p2 has none."""
    import dpdata

    system = dpdata.LabeledSystem(alloy(1), fmt="ase/structure")
    system.append(dpdata.LabeledSystem(alloy(2), fmt="ase/structure"))
    path = tmp_path / "written"
    (dpdata.MultiSystems(system) if "xyz" in written else system).to(written, str(path))
    label = {"quip/gap/xyz": "virial"}.get(written, "stress")
    keys = {"energy": "energy", "forces": "forces", **({} if written == "n2p2" else {label: label})}
    file = next(path.iterdir()) if path.is_dir() else path
    data = open_dataset(file, keys, format=read)
    if written == "n2p2":  # six decimals, in bohr and hartree
        for sample, atoms in zip(data, [alloy(1), alloy(2)], strict=True):
            assert sample.labels["energy"].item() == pytest.approx(atoms.get_potential_energy(), abs=1e-4)
            assert sample.labels["forces"].numpy() == pytest.approx(atoms.get_forces(), abs=1e-4)
            assert sample.system.pos.numpy() == pytest.approx(atoms.positions, abs=1e-5)
    else:
        assert_frames(data, [alloy(1), alloy(2)], atol=1e-9)


GAUSSIAN = """ Charge = -1 Multiplicity = 1
                          Input orientation:
 ---------------------------------------------------------------------
 Center     Atomic      Atomic             Coordinates (Angstroms)
 Number     Number       Type             X           Y           Z
 ---------------------------------------------------------------------
      1          8           0        0.000000    0.000000    0.000000
      2          1           0        0.000000    0.000000    0.970000
 ---------------------------------------------------------------------
 SCF Done:  E(RB3LYP) =  -75.5000000000     A.U. after    9 cycles
 -------------------------------------------------------------------
 Center     Atomic                   Forces (Hartrees/Bohr)
 Number     Number              X              Y              Z
 -------------------------------------------------------------------
      1        8           0.000000000    0.000000000    0.010000000
      2        1           0.000000000    0.000000000   -0.010000000
 -------------------------------------------------------------------
"""


def test_the_charge_that_dpdata_drops_is_read(tmp_path):
    (tmp_path / "a.log").write_text(GAUSSIAN)
    (sample,) = open_dataset(tmp_path / "a.log", format="dpdata/gaussian/log")
    assert sample.system.charge.item() == -1 and sample.system.spin.item() == 1 and not sample.system.pbc.any()
    assert sample.labels["energy"].item() == pytest.approx(-75.5 * 27.211386245988, abs=1e-6)
    assert sample.labels["forces"][0, 2].item() == pytest.approx(0.01 * 51.422067476, rel=1e-7)
    (tmp_path / "a.log").write_text(GAUSSIAN + " Normal termination of Gaussian 16\n" + GAUSSIAN)
    with pytest.raises(BadData, match=r"it has 2 jobs .*read it with the format gaussian-out"):
        open_dataset(tmp_path / "a.log", format="dpdata/gaussian/log")
    (tmp_path / "a.log").write_text(GAUSSIAN + " Charge =  0 Multiplicity = 1\n")
    with pytest.raises(BadData, match=r"charge is -1 by its line .* and 0 by its line"):
        open_dataset(tmp_path / "a.log", format="dpdata/gaussian/log")


ORCA = """Total Charge           Charge          ....   -1
 Multiplicity           Mult            ....    1
---------------------------------
CARTESIAN COORDINATES (ANGSTROEM)
---------------------------------
  O      0.000000    0.000000    {z}
  H      0.000000    0.000000    0.960000

FINAL SINGLE POINT ENERGY       -75.500000000000
"""
ORCA_GRADIENT = """------------------
CARTESIAN GRADIENT
------------------

   1   O   :    0.000000000    0.000000000    0.010000000
   2   H   :    0.000000000    0.000000000   -0.010000000

"""
PSI4 = """    Geometry (in Angstrom), charge = -1, multiplicity = 1:

       Center              X                  Y                   Z               Mass
    ------------   -----------------  -----------------  -----------------  -----------------
         O            0.000000000000     0.000000000000     0.000000000000    15.994914619570
         H            0.000000000000     0.000000000000     0.960000000000     1.007825032230

    Total Energy =                        -75.5000000000000000
  ## Total Gradient (Symmetry 0) ##
  Irrep: 1 Size: 2 x 3

                 1                   2                   3

    1     0.00000000000000     0.00000000000000     0.01000000000000
    2     0.00000000000000     0.00000000000000    -0.01000000000000

"""


@pytest.mark.parametrize(
    ("format", "one", "more", "words"),
    [
        # the end of an optimization has no gradient
        ("orca/spout", ORCA.format(z=0.0) + ORCA_GRADIENT, ORCA.format(z=0.1), "read it with the format orca-output"),
        ("psi4/out", PSI4, PSI4, "split it into a file for each"),
    ],
)
def test_texts_of_several_structures_are_not_mixed(tmp_path, format, one, more, words):
    (tmp_path / "a.out").write_text(one)
    (sample,) = open_dataset(tmp_path / "a.out", format=f"dpdata/{format}")
    assert sample.labels["forces"][0, 2].item() == pytest.approx(-0.01 * 51.422067476, rel=1e-6)
    (tmp_path / "a.out").write_text(one + more)
    with pytest.raises(BadData, match=f"it has 2 structures, of which dpdata takes the last .*{words}"):
        open_dataset(tmp_path / "a.out", format=f"dpdata/{format}")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("    Total Energy =                        -76.1000000000000000\n", "it has 2 energies and one gradient"),
        ("\t ================> DF-MP2 Energies <================\n", "it has 'MP2 Energies'; dpdata takes the last"),
        ("    * CCSD total energy                    =  -75.6\n", "it has 'CCSD total energy'; dpdata takes the last"),
        ("    Total Energy =                        -75.5000000000000000\n", None),
        ("    Nuclear Repulsion Energy =  4.4\n", None),
    ],
)
def test_methods_of_psi4_are_not_mixed(tmp_path, more, words):
    (tmp_path / "a.out").write_text(PSI4 + more)
    if words is None:
        assert len(open_dataset(tmp_path / "a.out", format="dpdata/psi4/out")) == 1
        return
    with pytest.raises(BadData, match=words):
        open_dataset(tmp_path / "a.out", format="dpdata/psi4/out")


def test_names_of_formats(tmp_path, monkeypatch):
    with pytest.raises(BadData, match=r"unknown data format 'dpdata/deepmd/npi', did you mean 'deepmd/npy'"):
        open_dataset("missing", format="dpdata/deepmd/npi")
    with pytest.raises(BadData, match=r"name the format to read, as in dpdata/deepmd/npy\. Known: .*vasp/outcar"):
        open_dataset("missing", format="dpdata")
    (tmp_path / "OUTCAR").write_text("")
    with pytest.raises(BadData, match="OUTCAR"):
        open_dataset(tmp_path / "OUTCAR", format="dpdata/vasp/outcar")

    def without_its_own_package(_):
        raise ModuleNotFoundError("No module named 'abacustest'")

    with monkeypatch.context() as patch:
        patch.setattr("dpdata.system.load_format", without_its_own_package)
        with pytest.raises(MissingBackend, match="dpdata/vasp/outcar: No module named 'abacustest'"):
            open_dataset(tmp_path / "OUTCAR", format="dpdata/vasp/outcar")
    monkeypatch.setattr("torchmdnet2.data.dpdata_format.find_spec", lambda name: None)
    with pytest.raises(MissingBackend, match=r"pip install 'torchmdnet2\[dpdata\]'"):
        open_dataset("missing", format="dpdata/deepmd/npy")
    assert "dpdata" in sys.modules  # by the tests above, not by importing torchmdnet2
