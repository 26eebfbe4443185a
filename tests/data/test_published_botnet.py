"""The data sets of arXiv:2205.06643 on small files in their layout."""

from __future__ import annotations

import numpy as np
import pytest

from torchmdnet2.data.datasets import make_published
from torchmdnet2.errors import BadData

from .published import near, opened

RNG = np.random.default_rng(0)


def write_molecule(path, symbols, count=3):
    """Extended XYZ as published: a cell of 50 Å that is not periodic. Returns energies and forces."""
    energies, forces = RNG.normal(size=count) - 9e3, RNG.normal(size=(count, len(symbols), 3))
    text = ""
    for energy, force in zip(energies.tolist(), forces.tolist(), strict=True):
        text += f"{len(symbols)}\n" + 'Lattice="50.0 0.0 0.0 0.0 50.0 0.0 0.0 0.0 50.0" '
        text += f'Properties=species:S:1:pos:R:3:forces:R:3 config_type=300K_MD energy={energy!r} pbc="F F F"\n'
        pos = RNG.uniform(-4, 4, (len(symbols), 3))
        rows = zip(symbols, pos, force, strict=True)
        text += "".join(f"{s} {p[0]:.8f} {p[1]:.8f} {p[2]:.8f} {f[0]!r} {f[1]!r} {f[2]!r}\n" for s, p, f in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return energies, forces


ACAC, BPA = "CCCOCOCHHHHHHHH", "C" * 12 + "H" * 12 + "NNO"


@pytest.mark.parametrize("place", ["botnet/raw/dataset_acac", "dataset_acac", "acac", "."])
def test_botnet_takes_files_that_are_there(tmp_path, place):
    """In the folder of downloads, in a copy of the published folders, in one named as the molecule, or in ROOT."""
    energies, forces = write_molecule(tmp_path / place / "train_300K.xyz", ACAC)
    write_molecule(tmp_path / place / "test_MD_300K.xyz", ACAC, 2)
    data, said = opened(tmp_path, "botnet", molecule="acac")
    assert len(data) == 3 and any("its sha256 is" in text for text in said)
    for k, sample in enumerate(data):
        assert sample.system.num_atoms == 15 and not sample.system.pbc.any()
        assert near(sample.labels["energy"], energies[k]) and near(sample.labels["forces"], forces[k])
    both = opened(tmp_path, "botnet", molecule="acac", subsets=["train_300K", "test_MD_300K"])[0]
    assert len(both) == 5 and both.name(4).endswith("test_MD_300K.xyz, frame 1")


def test_botnet_tells_molecules_apart(tmp_path):
    """Their files have the same names."""
    write_molecule(tmp_path / "train_300K.xyz", ACAC)
    with pytest.raises(BadData, match=r"train_300K\.xyz, frame 0: its atoms are not those of 3bpa"):
        opened(tmp_path, "botnet", molecule="3bpa")
    write_molecule(tmp_path / "train_300K.xyz", BPA)
    assert len(opened(tmp_path, "botnet", molecule="3bpa")[0]) == 3
    write_molecule(tmp_path / "methanol.xyz", "COHHHH", 1)
    write_molecule(tmp_path / "train_eth_meth.xyz", "CCOHHHHHH", 2)
    with open(tmp_path / "train_eth_meth.xyz", "a") as file:
        file.write((tmp_path / "methanol.xyz").read_text())
    data = opened(tmp_path, "botnet", molecule="ethanol", subsets=["train_eth_meth"])[0]
    assert [sample.system.num_atoms for sample in data] == [9, 9, 6]


def test_botnet_names():
    published = make_published("botnet", {"molecule": "ethanol"})
    assert published.subsets == ("train",) and published.reference_energies[6] == -1025.2770951782686
    assert published.sources[0].url.endswith("/dataset_ethanol/train.xyz")
    with pytest.raises(BadData, match="subsets of acac: there is no 'train_300k', did you mean 'train_300K'"):
        make_published("botnet", {"molecule": "acac", "subsets": ["train_300k"]})
    with pytest.raises(BadData, match="botnet: subsets: name at least one"):
        make_published("botnet", {"molecule": "acac", "subsets": []})
    with pytest.raises(BadData, match="molecule: there is no 'acetylacetone'"):
        make_published("botnet", {"molecule": "acetylacetone"})


# --- all of them -----------------------------------------------------------------------------------------------------


def test_files_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """They are converted into the user's cache."""
    cache, root = tmp_path / "cache", tmp_path / "root"
    energies, _ = write_molecule(root / "train_300K.xyz", ACAC)
    monkeypatch.setenv("TORCHMDNET2_CACHE", str(cache))
    root.chmod(0o555)
    data, _ = opened(root, "botnet", molecule="acac")
    assert near([float(sample.labels["energy"]) for sample in data], energies)
    assert [path.name for path in root.iterdir()] == ["train_300K.xyz"] and (cache / "botnet").is_dir()
    energies, _ = write_molecule(root / "train_300K.xyz", ACAC)  # another file: not what was converted before
    data, _ = opened(root, "botnet", molecule="acac")
    assert near([float(sample.labels["energy"]) for sample in data], energies)
