"""input.data of n2p2, cfg of MLIP, trajectories of CP2K: numbers of files that are written here."""

from contextlib import nullcontext

import numpy as np
import pytest

from torchmdnet2.data import open_dataset
from torchmdnet2.errors import BadData
from torchmdnet2.units import BOHR, HARTREE

N2P2 = """begin
comment a box
lattice 10.0 0.0 0.0
lattice 0.0 11.0 0.0
lattice 0.0 1.0 12.0
atom 0.0 0.0 0.5 O -0.8 0.0 0.01 0.02 0.03
atom 0.0 0.0 2.0 H 0.4 0.0 -0.01 -0.02 -0.03
energy -75.5
charge -1.0
end
begin
atom 0.0 0.0 0.0 H 0.0 0.0 0.0 0.0 0.0
energy -0.5
charge 0.0
end
"""


def test_n2p2(tmp_path):
    path = tmp_path / "input.data"
    path.write_text(N2P2)
    keys = {"energy": "energy", "forces": "forces", "charges": "charges"}
    box, atom = open_dataset(path, keys, format="n2p2")
    assert box.system.pos[0, 2].item() == pytest.approx(0.5 * BOHR) and box.system.pbc.all()
    assert box.system.cell[0, 2, 1].item() == pytest.approx(BOHR) and box.system.charge.item() == -1
    assert box.labels["energy"].item() == pytest.approx(-75.5 * HARTREE)
    assert box.labels["forces"][1, 2].item() == pytest.approx(-0.03 * HARTREE / BOHR)
    assert box.labels["charges"].tolist() == [-0.8, 0.4]
    assert atom.system.z.tolist() == [1] and not atom.system.pbc.any() and not atom.system.cell.any()
    path.write_text(N2P2.replace("O -0.8", "O 0.0").replace("H 0.4", "H 0.0"))
    assert open_dataset(path, format="n2p2")[0].system.charge.item() == -1
    path.write_text(N2P2)
    plain = open_dataset(path, units={"energy": "eV", "length": "angstrom"}, format="n2p2")
    assert plain[0].labels["energy"].item() == -75.5 and plain[0].labels["forces"][0, 0].item() == 0.01
    assert open_dataset(path, {"energy": "energy", "charge": None}, format="n2p2")[0].system.charge.item() == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("charge 0.0\nend\n", "", "it ends without 'end'"),
        ("lattice 0.0 1.0 12.0\n", "", "three lattice vectors are expected"),
        ("0.02 0.03\n", "0.02\n", "atom 0 has 8 columns instead of 9"),
        ("energy -75.5", "enrgy -75.5", "'enrgy' is not one of"),
        ("O -0.8", "Ox -0.8", "frame 0: .*atom 0: there is no element 'Ox'"),
        ("begin\ncomment", "comment", "'begin' is expected where a structure begins, not 'comment'"),
        ("begin\ncomment", "begin position(3) element\ncomment", "read it with the format runnerdata"),
    ],
)
def test_n2p2_damaged(tmp_path, old, new, words):
    (tmp_path / "input.data").write_text(N2P2.replace(old, new))
    with pytest.raises(BadData, match=words):
        open_dataset(tmp_path / "input.data", format="n2p2")


MLIP = """BEGIN_CFG
 Size
    2
 Supercell
    4.0 0.0 0.0
    0.0 4.0 0.0
    0.0 0.0 5.0
 AtomData:  id type       cartes_x      cartes_y      cartes_z     fx  fy  fz
    1  0   0.0 0.0 0.1   0.1 0.0 0.0
    2  1   2.0 2.0 2.5  -0.1 0.0 0.0
 Energy
    -7.5
 PlusStress:  xx          yy          zz          yz          xz          xy
    0.8 1.6 2.4 0.4 0.16 0.08
 Feature   EFS_by       VASP
END_CFG
"""


def test_mlip(tmp_path):
    (tmp_path / "train.cfg").write_text(MLIP + "\n" + MLIP.replace("cartes", "direct").replace("2.0 2.0", "0.5 0.5"))
    one, two = open_dataset(tmp_path / "train.cfg", {"energy": "energy", "virial": "virial"}, format="mlip/Cu-Al")
    assert one.system.z.tolist() == [29, 13] and one.labels["energy"].item() == -7.5
    stress = -np.array([[0.8, 0.08, 0.16], [0.08, 1.6, 0.4], [0.16, 0.4, 2.4]]) / 80
    assert one.labels["stress"][0].numpy() == pytest.approx(stress)
    assert one.system.pos[1].tolist() == [2, 2, 2.5] and two.system.pos[1].tolist() == [2, 2, 12.5]
    assert open_dataset(tmp_path / "train.cfg", format="mlip/Cu-Al")[1].labels["forces"][1, 0].item() == -0.1
    for name, words in (("mlip", "name the elements"), ("mlip/Cu-Xx", "not Cu-Xx"), ("mlip/Cu", "types up to 1")):
        with pytest.raises(BadData, match=words):
            open_dataset(tmp_path / "train.cfg", format=name)
    (tmp_path / "train.cfg").write_text(MLIP[:-9])
    with pytest.raises(BadData, match="cut off: it ends without END_CFG"):
        open_dataset(tmp_path / "train.cfg", format="mlip/Cu-Al")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Size", "Sizes", "a configuration has no Size"),
        ("type", "kind", "type are expected among id, kind"),
        ("cartes_z", "z", "cartes_z are expected among"),
        ("fy", "gy", "fy are expected among"),
        ("BEGIN_CFG", "CFG", "BEGIN_CFG is expected where a configuration begins, not 'CFG'"),
        ("0.1   0.1 0.0 0.0", "0.1   0.1 0.0", "does not have 2 atoms with the columns id, type, .*, fz"),
        ("xz          xy", "xz          yx", "xy are expected among xx"),
    ],
)
def test_mlip_damaged(tmp_path, old, new, words):
    assert old in MLIP
    (tmp_path / "train.cfg").write_text(MLIP.replace(old, new))
    with pytest.raises(BadData, match=f"train.cfg, frame 0: .*{words}"):
        open_dataset(tmp_path / "train.cfg", format="mlip/Cu-Al")


def write_cp2k(folder, steps=(0, 5)):
    pos = "".join(f"2\n i = {i:8d}, time = 0.500, E = {-17.0 - i}\nO 0.0 0.0 0.0\nH 0.0 0.0 {1 + i}\n" for i in steps)
    frc = "".join(f"2\n i = {i:8d}, time = 0.500, E = {-17.0 - i}\nO 0.01 0.0 0.0\nH -0.01 0.0 {i}\n" for i in steps)
    (folder / "w-pos-1.xyz").write_text(pos)
    (folder / "w-frc-1.xyz").write_text(frc)
    (folder / "w-1.cell").write_text(
        "# Step Time Ax Ay Az Bx By Bz Cx Cy Cz Volume\n"
        + "".join(f"{i} {i / 2} {10 + i} 0 0 0 11 0 0 0 12 0\n" for i in steps)
    )
    (folder / "w-1.stress").write_text(
        "# Step Time xx xy xz yx yy yz zx zy zz [bar]\n" + "".join(f"{i} 0 {1 + i} 2 0 2 3 0 0 0 5\n" for i in steps)
    )
    return folder / "w-pos-1.xyz"


def test_cp2k(tmp_path):
    path = write_cp2k(tmp_path)
    keys = {"energy": "energy", "forces": "forces", "stress": "stress"}
    one, two = open_dataset(path, keys, format="cp2k")
    assert two.labels["energy"].item() == pytest.approx(-22 * HARTREE) and two.system.pos[1, 2].item() == 6
    assert two.labels["forces"][1].tolist() == pytest.approx([-0.01 * HARTREE / BOHR, 0, 5 * HARTREE / BOHR])
    assert one.system.cell[0].diagonal().tolist() == [10, 11, 12] and two.system.cell[0, 0, 0].item() == 15
    bar = 1e5 * 1e-30 / 1.602176634e-19  # eV/Å³
    assert two.labels["stress"][0].numpy() == pytest.approx(-bar * np.array([[6, 2, 0], [2, 3, 0], [0, 0, 5]]))
    cached = open_dataset(path, keys, format="cp2k", cache=tmp_path / "caches")
    assert [name.split("/")[-1] for name in (source["path"] for source in cached.facts["sources"])] == [
        "w-pos-1.xyz", "w-frc-1.xyz", "w-1.cell", "w-1.stress"]  # fmt: skip
    (tmp_path / "w-1.restart").write_text(
        "&FORCE_EVAL\n  &DFT\n    UKS T\n    MULTIPLICITY 2\n    CHARGE -2\n  &END DFT\n"
    )
    assert [(s.system.charge.item(), s.system.spin.item()) for s in open_dataset(path, format="cp2k")] == [(-2, 2)] * 2
    (tmp_path / "w-1.restart").unlink()
    path.write_text(path.read_text().replace("H 0.0", "H1 0.0"))
    with pytest.raises(BadData, match=r"frame 0: .*step 0 has no forces"):
        open_dataset(path, format="cp2k")
    path.write_text(path.read_text().replace("H1 0.0", "H 0.0"))
    (tmp_path / "w-1.cell").unlink()
    with pytest.raises(BadData, match=r"neither w-1\.cell nor w-1\.restart beside the file"):
        open_dataset(path, format="cp2k")
    coordinates = "  &SUBSYS\n    {}&COORD\nO 0 0 0\nH 0 0 1\n    &END COORD\n  &END SUBSYS\n"
    for restart, words in (
        ("", r"nor w-1\.restart with a section &CELL beside .* cp2k/none"),
        (coordinates.format(""), "with a section &CELL"),
        ("  &SUBSYS\n    &CELL\n      A 10 0 0\n", r"w-1\.restart: .*a line &END is missing"),  # cut off
        ("  &CELL\n  &END CELL\n", r"w-1\.restart: it has no section &SUBSYS"),
        (coordinates.format("&CELL\nA 10 0 0\nB 0 11 0\nC 0 0 12\n    &END CELL\n    "), ""),
    ):
        (tmp_path / "w-1.restart").write_text(
            f"&FORCE_EVAL\n  &DFT\n    CHARGE -2\n  &END DFT\n{restart}&END FORCE_EVAL\n"
        )
        with pytest.raises(BadData, match=words) if words else nullcontext():
            assert open_dataset(path, format="cp2k")[0].system.cell[0].diagonal().tolist() == [10, 11, 12]
    (tmp_path / "w-1.restart").unlink()
    lone = open_dataset(path, {"energy": "energy"}, format="cp2k/none")
    assert not lone[0].system.pbc.any()
    text = (tmp_path / "w-frc-1.xyz").read_text()
    (tmp_path / "w-frc-1.xyz").write_text(text.replace("i =        5", "i =        6"))
    with pytest.raises(BadData, match="step 5 has no forces in"):
        open_dataset(path, format="cp2k/none")


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("w-pos-1.xyz", lambda text: text.replace(", E =", ", e ="), "'i = STEP, … E = ENERGY' is expected in the"),
        ("w-pos-1.xyz", lambda text: text.rsplit("\n", 2)[0], "the file was cut off: it ends within step 5"),
        ("w-frc-1.xyz", lambda text: text.rsplit("\n", 2)[0], "the file was cut off: it ends within step 5"),
        ("w-1.cell", lambda text: text.rsplit("\n", 2)[0] + "\n", r"step 5 is not in .*w-1\.cell"),
    ],
)
def test_cp2k_damaged(tmp_path, file, change, words):
    path = write_cp2k(tmp_path)
    (tmp_path / file).write_text(change((tmp_path / file).read_text()))
    with pytest.raises(BadData, match=words):
        open_dataset(path, format="cp2k")


def test_a_training_watches_every_file_that_is_read(tmp_path):
    from torchmdnet2.training.config.sections import DataConfig
    from torchmdnet2.training.run.subsets import file_digests, open_subsets

    config = DataConfig(train=str(write_cp2k(tmp_path, range(10))), format="cp2k", cache="off")
    subsets = open_subsets(config, {"energy": "energy", "forces": "forces"}, {})
    digests = file_digests(config, {name: dataset for name, (dataset, _) in subsets.items()})
    assert [path.rsplit("/", 1)[1] for path in digests] == ["w-pos-1.xyz", "w-frc-1.xyz", "w-1.cell", "w-1.stress"]
