"""Published data sets: small files in the layouts of the originals are converted to the right numbers and units."""

import gzip
import io
import zipfile

import h5py
import numpy as np
import pytest
import torch

from torchmdnet2.data import fit_atomref
from torchmdnet2.data.datasets import DATASETS, make_published
from torchmdnet2.data.datasets.base import frames
from torchmdnet2.errors import BadData
from torchmdnet2.units import BOHR, HARTREE, KCAL_MOL, factor

from .published import near, opened, put_in_tar

RNG = np.random.default_rng(0)
ETHANE = [6, 6, 1, 1, 1, 1, 1, 1]


# --- MD17 and the like -----------------------------------------------------------------------------------------------


def trajectory(frames=5):
    pos, energy, forces = (
        RNG.normal(size=(frames, 8, 3)),
        RNG.normal(size=frames) - 5e4,
        RNG.normal(size=(frames, 8, 3)),
    )
    return np.array(ETHANE), pos, energy, forces


def check_trajectory(data, z, pos, energy, forces, unit=KCAL_MOL):
    assert len(data) == len(pos)
    for k, sample in enumerate(data):
        assert sample.system.z.tolist() == z.tolist() and near(sample.system.pos, pos[k])
        assert near(sample.labels["energy"], [energy[k] * unit]) and near(sample.labels["forces"], forces[k] * unit)


@pytest.mark.parametrize(
    ("name", "molecule", "file"),
    [
        ("md17", "ethanol", "md17_ethanol.npz"),
        ("md17", "benzene_fhi-aims", "benzene2018_dft.npz"),
        ("md22", "dw-nanotube", "md22_dw_nanotube.npz"),
    ],
)
def test_md17_and_md22(raw, tmp_path, name, molecule, file):
    z, pos, energy, forces = trajectory()
    np.savez(raw(name) / file, z=z.astype(np.uint8), R=pos, E=energy[:, None], F=forces, name=molecule)
    check_trajectory(opened(tmp_path, name, molecule=molecule)[0], z, pos, energy, forces)


def test_md17_coupled_cluster(raw, tmp_path):
    z, pos, energy, forces = trajectory()
    with zipfile.ZipFile(raw("md17") / "toluene_ccsd_t.zip", "w") as archive:
        for kind, part in (("test", slice(3, 5)), ("train", slice(0, 3))):
            with archive.open(f"toluene_ccsd_t-{kind}.npz", "w") as file:
                np.savez(file, z=z, R=pos[part], E=energy[part, None], F=forces[part])
    data = opened(tmp_path, "md17", molecule="toluene_ccsd_t")[0]
    check_trajectory(data, z, pos, energy, forces)
    assert data.name(4).endswith("toluene_ccsd_t-test.npz, frame 1")
    assert make_published("md17", {"molecule": "aspirin_ccsd"}).level_of_theory == "CCSD"


@pytest.mark.parametrize("alone", [False, True])
def test_rmd17(raw, tmp_path, alone):
    z, pos, energy, forces = trajectory()
    buffer = io.BytesIO()
    np.savez(buffer, nuclear_charges=z, coords=pos, energies=energy, forces=forces, old_indices=np.arange(5))
    if alone:
        (raw("rmd17") / "rmd17_salicylic.npz").write_bytes(buffer.getvalue())
    else:
        files = {"rmd17/readme.txt": b"", "rmd17/npz_data/rmd17_salicylic.npz": buffer.getvalue()}
        put_in_tar(raw("rmd17") / "rmd17.tar.bz2", files, "w:bz2")
    check_trajectory(opened(tmp_path, "rmd17", molecule="salicylic_acid")[0], z, pos, energy, forces)
    if not alone:
        with pytest.raises(BadData, match=r"rmd17\.tar\.bz2: the archive has no rmd17_uracil\.npz"):
            opened(tmp_path, "rmd17", molecule="uracil")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"F": np.zeros((5, 7, 3))}, "forces of the shape"),
        ({"E": np.zeros(4)}, "5 positions, 4 energies"),
        ({"R": np.full((5, 8, 3), np.nan)}, "frame 0: atom 0: its position is not finite"),
        ({"z": None}, "not a file of MD17"),
        ({"R": np.array([{}] * 5)}, "damaged, or not a file of MD17"),
    ],
)
def test_bad_npz(raw, tmp_path, change, message):
    z, pos, energy, forces = trajectory()
    arrays = {"z": z, "R": pos, "E": energy, "F": forces} | change
    np.savez(raw("md22") / "md22_DHA.npz", **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(BadData, match=rf"md22_DHA\.npz.*{message}"):
        opened(tmp_path, "md22", molecule="DHA")


@pytest.mark.parametrize(("z", "pos"), [((7,), (2, 8, 3)), ((8,), (8, 3)), ((8,), (2, 8, 2)), ((3, 8), (2, 8, 3))])
def test_shapes_that_do_not_fit(z, pos):
    with pytest.raises(BadData, match=r"here: atomic numbers of the shape .* and positions of .* do not fit"):
        frames("here", 0, np.ones(z, dtype=int), np.zeros(pos), {})


def test_damaged_archives(raw, tmp_path):
    """Cut short, or without the files that should be in it."""
    (raw("rmd17") / "rmd17.tar.bz2").write_bytes(b"no archive")
    with pytest.raises(BadData, match=r"rmd17\.tar\.bz2: it is damaged"):
        opened(tmp_path, "rmd17", molecule="uracil")
    (raw("md17") / "toluene_ccsd_t.zip").write_bytes(b"no archive")
    with pytest.raises(BadData, match=r"toluene_ccsd_t\.zip: it is damaged"):
        opened(tmp_path, "md17", molecule="toluene_ccsd_t")
    with zipfile.ZipFile(raw("md17") / "toluene_ccsd_t.zip", "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(BadData, match=r"the archive must have one file \*-train\.npz, but it has 0"):
        opened(tmp_path, "md17", molecule="toluene_ccsd_t")
    put_in_tar(raw("ani2x") / "ANI-2x-wB97X-631Gd.tar.gz", {"readme.txt": b""}, "w:gz")
    with pytest.raises(BadData, match=r"ANI-2x-wB97X-631Gd\.tar\.gz: the archive has no .*h5 file"):
        opened(tmp_path, "ani2x")


# --- ANI -------------------------------------------------------------------------------------------------------------


def test_ani1x(raw, tmp_path):
    z, pos, energy, forces = trajectory(6)
    ccsd = np.array([np.nan, -1, -2, np.nan, -3, np.nan])
    energy[2] = np.nan
    with h5py.File(raw("ani1x") / "ani1x-release.h5", "w") as file:
        group = file.create_group("C2H6")
        group["atomic_numbers"], group["coordinates"] = z.astype(np.uint8), pos.astype(np.float32)
        group["wb97x_dz.energy"], group["wb97x_dz.forces"] = energy, forces.astype(np.float32)
        group["ccsd(t)_cbs.energy"] = ccsd
        file["H2/atomic_numbers"], file["H2/coordinates"] = np.array([1, 1]), np.ones((1, 2, 3))
        file["H2/wb97x_dz.energy"], file["H2/wb97x_dz.forces"] = np.array([-1.17]), np.zeros((1, 2, 3))
        file["H2/ccsd(t)_cbs.energy"] = np.array([np.nan])
    data = opened(tmp_path, "ani1x")[0]
    kept = [0, 1, 3, 4, 5]
    assert len(data) == 6 and [data.name(k).rsplit(" ", 1)[1] for k in range(6)] == ["0", "1", "2", "3", "4", "0"]
    assert data.name(2).endswith("group 'C2H6' (the 5 with this energy), frame 2")
    for k, row in enumerate(kept):
        assert near(data[k].labels["energy"], [energy[row] * HARTREE])
        assert near(data[k].labels["forces"], forces[row].astype(np.float32).astype(float) * HARTREE)
        assert near(data[k].system.pos, pos[row].astype(np.float32))
    best = opened(tmp_path, "ani1x", energy="ccsd(t)")[0]
    assert near([float(s.labels["energy"]) for s in best], np.array([-1, -2, -3]) * HARTREE)
    assert all(s.labels.keys() == {"energy"} for s in best)
    assert len(best.facts["places"]) == 1  # not one for each run of frames: there are half a million
    assert make_published("ani1x", {}).reference_energies[8] == -75.19446356 * HARTREE


def write_by_size(path):
    species = np.array([[8, 1, 1], [16, 1, 1], [1, 17, 1]])
    pos, energy, forces = RNG.normal(size=(3, 3, 3)), RNG.normal(size=3), RNG.normal(size=(3, 3, 3))
    with h5py.File(path, "w") as file:
        file["003/species"], file["003/coordinates"] = species, pos.astype(np.float32)
        file["003/energies"], file["003/forces"] = energy, forces
        file["002/species"], file["002/coordinates"] = np.array([[9, 1]]), np.ones((1, 2, 3))
        file["002/energies"], file["002/forces"] = np.array([-100.4]), np.zeros((1, 2, 3))
    return species, pos.astype(np.float32), energy, forces


@pytest.mark.parametrize(
    ("name", "file", "inside", "options"),
    [
        ("ani2x", "ANI-2x-wB97X-631Gd.tar.gz", "final_h5/ANI-2x-wB97X-631Gd.h5", {}),
        ("comp6", "COMP6v2_wB97X-631Gd.tar.gz", "comp6v2_final_h5/COMP6v2_wB97X-631Gd.h5", {"version": "2"}),
        ("ani2x", "ANI-2x-wB97X-631Gd.h5", None, {}),
    ],
)
def test_ani2x_and_comp6_version_2(raw, tmp_path, name, file, inside, options):
    species, pos, energy, forces = write_by_size(tmp_path / "x.h5")
    if inside is None:
        (raw(name) / file).write_bytes((tmp_path / "x.h5").read_bytes())
    else:
        put_in_tar(raw(name) / file, {inside: (tmp_path / "x.h5").read_bytes()}, "w:gz")
    data = opened(tmp_path, name, **options)[0]
    assert len(data) == 4 and data[0].system.z.tolist() == [9, 1]
    for k in range(3):
        sample = data[1 + k]
        assert sample.system.z.tolist() == species[k].tolist() and near(sample.system.pos, pos[k])
        assert near(sample.labels["energy"], [energy[k] * HARTREE])
        assert near(sample.labels["forces"], forces[k] * HARTREE)
    assert [path.name for path in raw(name).iterdir()] == [file]  # what was unpacked is gone


def test_comp6_version_1_holds_gradients(raw, tmp_path):
    _, pos, energy, forces = trajectory(2)
    for file in ("ani_md_bench.h5", "s66x8_wb97x6-31gd.h5"):
        with h5py.File(raw("comp6") / file, "w") as out:
            group = out.create_group("top/molecule_0")
            group["species"] = np.array([b"C", b"C", *[b"H"] * 6])
            group["coordinates"], group["energies"], group["forces"] = pos, energy, forces
    data = opened(tmp_path, "comp6", subsets=["ANI-MD", "s66x8"])[0]
    assert len(data) == 4 and data.name(2).endswith("s66x8_wb97x6-31gd.h5, molecule 'molecule_0', frame 0")
    assert near(data[1].labels["forces"], -forces[1] * HARTREE)
    assert near(data[1].labels["energy"], [energy[1] * HARTREE])
    assert data[0].system.z.tolist() == ETHANE
    assert len(make_published("comp6", {}).sources) == 11
    with pytest.raises(BadData, match="version 2 has no subsets"):
        make_published("comp6", {"version": "2", "subsets": ["DrugBank"]})


def test_h5_that_is_something_else(raw, tmp_path):
    with h5py.File(raw("ani1x") / "ani1x-release.h5", "w") as file:
        file["a/energies"] = np.zeros(3)
    with pytest.raises(BadData, match=r"ani1x-release\.h5: it is damaged, or not a file of this data set"):
        opened(tmp_path, "ani1x")
    (raw("ani2x") / "ANI-2x-wB97X-631Gd.tar.gz").write_bytes(b"no archive")
    with pytest.raises(BadData, match=r"ANI-2x-wB97X-631Gd\.tar\.gz: it is damaged"):
        opened(tmp_path, "ani2x")


# --- SPICE, MACE-OFF, WaterBox ---------------------------------------------------------------------------------------


SPICE_UNITS = {
    "conformations": "bohr",
    "dft_total_energy": "hartree",
    "formation_energy": "hartree",
    "dft_total_gradient": "hartree/bohr",
    "mbis_charges": "elementary_charge",
}


def write_spice_file(path):
    grads = RNG.normal(size=(3, 3, 3)).astype(np.float32)
    grads[1] = 5
    with h5py.File(path, "w") as file:
        for name, subset, smiles in (("a", "Set 1", "[O:1]([H:2])[H:3]"), ("b", "Set 2", "[O+:1]([H:2])[H:3]")):
            group = file.create_group(name)
            group["atomic_numbers"] = np.array([8, 1, 1], dtype=np.int16)
            group["conformations"] = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
            group["dft_total_energy"], group["formation_energy"] = np.array([-76.1, -76.2, -76.3]), np.arange(3.0) - 9
            group["dft_total_gradient"], group["mbis_charges"] = grads, np.ones((3, 3, 1), dtype=np.float32)
            for key, unit in SPICE_UNITS.items():
                group[key].attrs["units"] = unit
            group["smiles"], group["subset"] = np.array([smiles.encode()]), np.array([subset.encode()])
        bogus = file.create_group("c")
        bogus["atomic_numbers"], bogus["conformations"] = np.array([1]), np.zeros((2, 3))
        bogus["subset"] = np.array([b"Set 1"])
    return grads.astype(float)


def test_spice(raw, tmp_path):
    grads = write_spice_file(raw("spice") / "SPICE-1.1.4.hdf5")
    data = opened(tmp_path, "spice", version="1.1.4")[0]
    assert len(data) == 6 and [int(s.system.charge) for s in data] == [0] * 3 + [1] * 3
    for k in range(3):
        sample = data[k]
        assert near(sample.system.pos, np.arange(27).reshape(3, 3, 3)[k] * BOHR)
        assert near(sample.labels["energy"], [(-76.1 - 0.1 * k) * HARTREE])
        assert near(sample.labels["forces"], -grads[k] * factor("force", "hartree/bohr"))
        assert near(sample.labels["charges"], np.ones(3))
    formed = opened(tmp_path, "spice", version="1.1.4", energy="formation", subsets=["Set 2"])[0]
    assert near([float(s.labels["energy"]) for s in formed], np.array([-9, -8, -7]) * HARTREE)
    weak = opened(tmp_path, "spice", version="1.1.4", max_force=400.0)[0]
    assert [weak.name(k).rsplit(" ", 1)[1] for k in range(4)] == ["0", "2", "0", "2"]
    with pytest.raises(BadData, match="subsets: there is no 'Set 3', did you mean 'Set 2'"):
        opened(tmp_path, "spice", version="1.1.4", subsets=["Set 3"])


XYZ = """3
Properties=species:S:1:pos:R:3:forces:R:3 energy=-2000.5 config_type=Default smiles="O" pbc="F F F"
O 0 0 0 0.1 0.2 0.3
H 0 0 1 0 0 0
H 0 1 0 -0.1 -0.2 -0.3
2
Properties=species:S:1:pos:R:3:forces:R:3 energy=-60.25 pbc="F F F"
H 0 0 0 0 0 70
F 0 0 1 0 0 -70
"""


@pytest.mark.parametrize("file", ["train_large_neut_no_bad_clean.tar.gz", "train_large_neut_no_bad_clean.xyz.gz"])
def test_maceoff(raw, tmp_path, file):
    if file.endswith(".tar.gz"):
        put_in_tar(raw("maceoff") / file, {"train_large_neut_no_bad_clean.xyz": XYZ.encode()}, "w:gz")
    else:
        (raw("maceoff") / file).write_bytes(gzip.compress(XYZ.encode()))
    data = opened(tmp_path, "maceoff")[0]
    assert len(data) == 2 and data[1].system.z.tolist() == [1, 9]
    assert data.name(1) == f"{raw('maceoff') / file}, frame 1"
    assert near(data[0].labels["energy"], [-2000.5]) and near(data[0].labels["forces"][2], [-0.1, -0.2, -0.3])
    assert len(opened(tmp_path, "maceoff", max_force=60.0)[0]) == 1


WATER = """3
TotEnergy=-17.25 cutoff=-1.00000000 nneightol=1.20000000 pbc="T T T" Lattice="23.5 0 0 0 23.5 0 -0.000001 0 23.5" \
Properties=species:S:1:pos:R:3:force:R:3:Z:I:1
O 11.7259 14.5902 25.3344 -0.04 0.03 0.003 8
H 12.6940 16.1388 24.7201 -0.03 -0.03 0.01 1
H 12.0000 14.0000 27.0000 0.07 0.0 -0.013 1
"""


def test_waterbox_is_in_atomic_units(raw, tmp_path):
    (raw("waterbox") / "dataset_1593.xyz").write_text(2 * WATER)
    data = opened(tmp_path, "waterbox")[0]
    sample = data[1]
    assert len(data) == 2 and sample.system.pbc.all()
    assert near(sample.system.cell[0, 0], [23.5 * BOHR, 0, 0]) and near(sample.system.pos[1, 0], 12.694 * BOHR)
    assert near(sample.labels["energy"], [-17.25 * HARTREE])
    assert near(sample.labels["forces"][0], np.array([-0.04, 0.03, 0.003]) * factor("force", "hartree/bohr"))
    assert 0.9 < float((sample.system.pos[1] - sample.system.pos[0]).norm()) < 1.1  # an O–H bond, in Å


# --- acetylacetone, 3BPA, ethanol ------------------------------------------------------------------------------------


def test_names_and_options():
    with pytest.raises(BadData, match="unknown data set 'rmd71', did you mean 'rmd17'"):
        make_published("rmd71", {})
    with pytest.raises(BadData, match="rmd17: the option 'molecule' must be given"):
        make_published("rmd17", {})
    with pytest.raises(BadData, match="rmd17: molecule: there is no 'asprin', did you mean 'aspirin'"):
        make_published("rmd17", {"molecule": "asprin"})
    with pytest.raises(BadData, match="spice: there is no option 'subset', did you mean 'subsets'"):
        make_published("spice", {"subset": []})
    with pytest.raises(BadData, match="waterbox: there is no option 'molecule'; it has none"):
        make_published("waterbox", {"molecule": "water"})
    with pytest.raises(TypeError, match="molecule must be a text, got 3"):
        make_published("rmd17", {"molecule": 3})


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_says_where_it_comes_from(name):
    molecule = {"md17": "aspirin", "rmd17": "aspirin", "md22": "DHA", "botnet": "3bpa"}.get(name)
    published = make_published(name, {"molecule": molecule} if molecule else {})
    assert published.citation.startswith("https://doi.org/") and published.level_of_theory and published.licence
    assert all(source.url.startswith("http") and source.file for source in published.sources)
    assert "eference energies" in type(published).__doc__ or published.reference_energies
    assert all(-20_000 < energy < -13 for energy in published.reference_energies.values())


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"md17_uracil\.npz does not exist; it can be downloaded from http"):
        opened(tmp_path, "md17", molecule="uracil")


def test_files_may_be_deleted_and_folders_moved(raw, tmp_path):
    z, pos, energy, forces = trajectory()
    np.savez(raw("md22") / "md22_DHA.npz", z=z, R=pos, E=energy, F=forces)
    assert any("converting" in text for text in opened(tmp_path, "md22", molecule="DHA")[1])
    (tmp_path / "md22").rename(tmp_path / "elsewhere")
    (tmp_path / "new").mkdir()
    (tmp_path / "elsewhere").rename(tmp_path / "new" / "md22")
    data, said = opened(tmp_path / "new", "md22", molecule="DHA")
    assert said == [] and data.facts["sources"][0]["path"].startswith(str(tmp_path / "new"))
    (tmp_path / "new" / "md22" / "raw" / "md22_DHA.npz").unlink()
    data, said = opened(tmp_path / "new", "md22", molecule="DHA")
    assert said == []
    check_trajectory(data, z, pos, energy, forces)
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "new", "md22", molecule="AT-AT")


def test_references_can_be_fitted(raw, tmp_path):
    write_by_size(tmp_path / "x.h5")
    (raw("ani2x") / "ANI-2x-wB97X-631Gd.h5").write_bytes((tmp_path / "x.h5").read_bytes())
    data = opened(tmp_path, "ani2x")[0]
    assert fit_atomref(data).keys() == {1, 8, 9, 16, 17}
    assert torch.isfinite(torch.tensor(list(fit_atomref(data).values()))).all()
