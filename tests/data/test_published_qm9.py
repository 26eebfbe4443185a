"""QM9 from small files in its two layouts."""

import pytest

from torchmdnet2.data.datasets import make_published
from torchmdnet2.errors import BadData
from torchmdnet2.units import BOHR, HARTREE, factor

from .published import near, opened, put_in_tar

METHANE_XYZ = """5
gdb 1\t157.7118\t157.70997\t157.70699\t0.\t13.21\t-0.3877\t0.1171\t0.5048\t35.3641\t0.044749\t-40.47893\t-40.476062\t\
-40.475117\t-40.498597\t6.469\t
C\t-0.0126981359\t 1.0858041578\t 0.0080009958\t-0.535689
H\t 0.002150416\t-0.0060313176\t 0.0019761204\t 0.133921
H\t 1.0117308433\t 1.4637511618\t 0.0002765748\t 0.133922
H\t-0.540815069\t 1.4475266138\t-0.8766437152\t 0.133923
H\t-0.5238136345\t 1.4379326443\t 0.9063972942\t 1.33923*^-6
1341.307\t1341.3284
C\tC
InChI=1S/CH4/h1H4\tInChI=1S/CH4/h1H4
"""
UNCHARACTERIZED = """=====
Index, and SMILES of molecules 1 2 that failed

  Index   B3LYP       GDB
===== ====== =====
     2   CC=O        CC=O
   58   N#C         N#C
2 compounds
"""


def write_qm9(folder):
    second = METHANE_XYZ.replace("gdb 1\t", "gdb 2\t")
    third = METHANE_XYZ.replace("gdb 1\t", "gdb 3\t").replace("-40.47893", "-41.5").replace("0.5048", "0.25")
    files = {f"dsgdb9nsd_{k:06d}.xyz": text.encode() for k, text in enumerate((METHANE_XYZ, second, third), 1)}
    put_in_tar(folder / "dsgdb9nsd.xyz.tar.bz2", files, "w:bz2")
    (folder / "uncharacterized.txt").write_text(UNCHARACTERIZED)


def test_qm9(raw, tmp_path):
    write_qm9(raw("qm9"))
    data, said = opened(tmp_path, "qm9")
    assert len(data) == 2 and "checked dsgdb9nsd.xyz.tar.bz2" in said  # the second molecule is uncharacterized
    first, labels = data[0].system, data[0].labels
    assert first.z.tolist() == [6, 1, 1, 1, 1] and near(first.pos[4, 2], 0.9063972942)
    assert near(labels["energy"], [-40.47893 * HARTREE]) and near(data[1].labels["energy"], [-41.5 * HARTREE])
    assert near(labels["charges"], [-0.535689, 0.133921, 0.133922, 0.133923, 1.33923e-6])
    expected = {"gap": 0.5048 * HARTREE, "alpha": 13.21, "r2": 35.3641 * BOHR**2, "Cv": 6.469, "mu": 0.0, "A": 157.7118}
    for name, value in expected.items():
        assert near(labels[f"scalar:{name}"], [value]), name
    assert near(data[1].labels["scalar:gap"], [0.25 * HARTREE])
    assert "forces" not in labels
    everything = opened(tmp_path, "qm9", exclude_uncharacterized=False, energy="G")[0]
    assert len(everything) == 3 and near(everything[1].labels["energy"], [-40.498597 * HARTREE])
    # the published energies of atoms: methane is bound by 17.2 eV (405 kcal/mol) at U0
    atoms = make_published("qm9", {}).reference_energies
    assert -17.4 < -40.47893 * HARTREE - atoms[6] - 4 * atoms[1] < -17.0


SDF = """gdb_{0}
 -OEChem-03231823243D

  5  4  0     0  0  0  0  0  0999 V2000
   -0.0127    1.0858    0.0080 C   0  0  0  0  0  0  0  0  0  0  0  0
    0.0022   -0.0060    0.0020 H   0  0  0  0  0  0  0  0  0  0  0  0
    1.0117    1.4638    0.0003 H   0  0  0  0  0  0  0  0  0  0  0  0
   -0.5408    1.4475   -0.8766 H   0  0  0  0  0  0  0  0  0  0  0  0
   -0.5238    1.4379    0.9064 H   0  0  0  0  0  0  0  0  0  0  0  0
  1  2  1  0  0  0  0
M  END
$$$$
"""
CSV = """mol_id,A,B,C,mu,alpha,homo,lumo,gap,r2,zpve,u0,u298,h298,g298,cv,u0_atom,u298_atom,h298_atom,g298_atom
gdb_1,157.7,157.7,157.7,1.5,13.21,-0.3877,0.1171,0.5048,35.3641,0.04,-40.47893,-40.4,-40.3,-40.2,6.469,-395,-3,-4,-372
gdb_2,157.7,157.7,157.7,0.0,13.21,-0.3877,0.1171,0.5048,35.3641,0.04,-1,-2,-3,-4,6.469,-395,-3,-4,-372
gdb_3,157.7,157.7,157.7,0.0,13.21,-0.3877,0.1171,0.25,35.3641,0.04,-41.5,-40.4,-40.3,-40.2,6.469,-395,-3,-4,-372
"""


def test_qm9_of_moleculenet(raw, tmp_path):
    (raw("qm9") / "gdb9.sdf").write_text("".join(SDF.format(k) for k in (1, 2, 3)))
    (raw("qm9") / "gdb9.sdf.csv").write_text(CSV)
    (raw("qm9") / "uncharacterized.txt").write_text(UNCHARACTERIZED)
    data = opened(tmp_path, "qm9", energy="U")[0]
    assert len(data) == 2 and data[1].system.z.tolist() == [6, 1, 1, 1, 1] and near(data[1].system.pos[4, 2], 0.9064)
    assert near(data[1].labels["energy"], [-40.4 * HARTREE]) and near(data[1].labels["scalar:gap"], [0.25 * HARTREE])
    assert near(data[0].labels["scalar:mu"], [1.5 * factor("dipole", "debye")]) and "charges" not in data[0].labels
    (raw("qm9") / "gdb9.sdf").write_text("".join(SDF.format(k) for k in (1, 2, 3)).replace(" C ", " Q "))
    with pytest.raises(BadData, match=r"gdb9\.sdf: this file or gdb9\.sdf\.csv is damaged: KeyError: 'Q'"):
        opened(tmp_path, "qm9", energy="U")
    (raw("qm9") / "gdb9.sdf").write_text(SDF.format(1) + SDF.format(3))
    with pytest.raises(BadData, match=r"gdb9\.sdf, gdb_2: the molecule is missing"):
        opened(tmp_path, "qm9", energy="U")


def test_qm9_damaged(raw, tmp_path):
    folder = raw("qm9")
    write_qm9(folder)
    content = (folder / "dsgdb9nsd.xyz.tar.bz2").read_bytes()
    (folder / "dsgdb9nsd.xyz.tar.bz2").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadData, match=r"dsgdb9nsd\.xyz\.tar\.bz2"):
        opened(tmp_path, "qm9")
    (folder / "uncharacterized.txt").write_text("<html>not found</html>")
    with pytest.raises(BadData, match=r"uncharacterized\.txt: the file has no table of molecules"):
        opened(tmp_path, "qm9")
    (folder / "uncharacterized.txt").write_text(UNCHARACTERIZED)
    put_in_tar(folder / "dsgdb9nsd.xyz.tar.bz2", {"a.xyz": METHANE_XYZ[:200].encode()}, "w:bz2")
    with pytest.raises(BadData, match=r"a\.xyz: this is not a molecule of QM9"):
        opened(tmp_path, "qm9")
