import pytest

from torchmdnet2.data import ConcatDataset, HDF5Dataset, open_dataset, write_hdf5
from torchmdnet2.data.reader import LoadedDataset
from torchmdnet2.errors import BadData

from .frames import make_sample


@pytest.fixture
def folder(tmp_path):
    for name, comment in (
        ("b.xyz", "energy=2"),
        ("a.xyz", "energy=1 charge=1"),
        ("c.extxyz", "forces_missing=1 energy=3"),
    ):
        (tmp_path / name).write_text(f"1\nProperties=species:S:1:pos:R:3 {comment}\nH 0 0 0\n")
    write_hdf5(tmp_path / "d.h5", [make_sample()])
    return tmp_path


def energies(data):
    return [sample.labels["energy"].item() for sample in data]


def test_format_follows_the_extension(folder):
    assert isinstance(open_dataset(folder / "a.xyz"), LoadedDataset)
    assert isinstance(open_dataset(str(folder / "d.h5"), format="auto"), HDF5Dataset)
    (folder / "d.dat").write_bytes((folder / "d.h5").read_bytes())
    assert isinstance(open_dataset(folder / "d.dat", format="hdf5"), HDF5Dataset)
    with pytest.raises(BadData, match=r"extension '\.dat' does not determine its format.*extxyz"):
        open_dataset(folder / "d.dat")
    (folder / "a.xzy").write_text("")
    with pytest.raises(BadData, match="did you mean 'xyz'"):
        open_dataset(folder / "a.xzy")
    with pytest.raises(BadData, match="unknown data format 'hdf', did you mean 'hdf5'"):
        open_dataset(folder / "d.h5", format="hdf")


def test_several_files(folder):
    assert energies(open_dataset(str(folder / "*.xyz"))) == [1, 2]
    assert energies(open_dataset([folder / "b.xyz", folder / "a.xyz"])) == [2, 1]
    data = open_dataset([str(folder / "?.*xyz"), folder / "d.h5"])
    assert isinstance(data, ConcatDataset) and energies(data)[:3] == [1, 2, 3] and len(data) == 4
    assert data.name(3) == f"{folder / 'd.h5'}, group 'group_0000000', frame 0"
    assert len(data.summary().splitlines()) == 4
    with pytest.raises(BadData, match="named twice"):
        open_dataset([str(folder / "*.xyz"), str(folder / "a.xyz")])
    (folder / "link.xyz").symlink_to("a.xyz")
    for other in (f"{folder}/./a.xyz", folder / "link.xyz"):
        with pytest.raises(BadData, match="named twice"):
            open_dataset([folder / "a.xyz", other])


def test_a_key_must_be_in_one_of_the_files(folder):
    keys = {"energy": "energy", "charge": "charge"}
    assert energies(open_dataset(str(folder / "*.xyz"), keys)) == [1, 2]
    with pytest.raises(BadData, match=r"b\.xyz: no frame has 'charge'"):
        open_dataset(folder / "b.xyz", keys)
    with pytest.raises(BadData, match=r"a\.xyz, .*b\.xyz: no frame has 'forces'"):
        open_dataset(str(folder / "*.xyz"), {"forces": "forces"})


def test_missing_files(folder):
    with pytest.raises(FileNotFoundError, match=r"aa\.xyz, did you mean 'a.xyz'"):
        open_dataset(folder / "aa.xyz")
    with pytest.raises(FileNotFoundError, match=r"no data file .*\*\.traj"):
        open_dataset(str(folder / "*.traj"))
    with pytest.raises(FileNotFoundError, match="is a folder; name the files in it"):
        open_dataset(folder)
    with pytest.raises(FileNotFoundError):
        open_dataset([])


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"a.data": "begin\ncomment\n"}, "n2p2"),
        ({"a.cfg": "BEGIN_CFG\n Size\n"}, "mlip/Cu-Al"),
        ({"a.log": " Entering Gaussian System, Link 0\n"}, "gaussian-out"),
        ({"a/type.raw": "0", "a/set.000/coord.npy": ""}, "dpdata/deepmd/npy"),
        ({"a/type.raw": "0", "a/set.000/real_atom_types.npy": ""}, "dpdata/deepmd/npy/mixed"),
        ({"a/type.raw": "0", "a/coord.raw": ""}, "dpdata/deepmd/raw"),
    ],
)
def test_the_format_that_a_file_or_folder_looks_like_is_proposed(tmp_path, files, name):
    """Ours, where there is one, before those of ase.io."""
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with pytest.raises((BadData, FileNotFoundError), match=rf"as in data\.format: {name} \(--format {name}\)"):
        open_dataset(tmp_path / next(iter(files)).split("/")[0])


def test_a_name_with_brackets_is_a_file_first(folder):
    (folder / "x[1].xyz").write_bytes((folder / "a.xyz").read_bytes())
    assert energies(open_dataset(folder / "x[1].xyz")) == [1]
