"""TensorNets of matgl: the energies, forces and stress that matgl computes, from its files; what is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from ase.io import read

from torchmdnet2 import System, load
from torchmdnet2.cli import main
from torchmdnet2.errors import BadCheckpoint, UnknownElement
from torchmdnet2.models.matgl_tensornet.importer import convert_matgl, import_matgl
from torchmdnet2.models.tensornet.model import TensorNet

GOLDEN = Path(__file__).parents[1] / "golden" / "matgl"
ANI = GOLDEN / "TensorNet-ANI-1x-Subset-PES"
FOLDERS = [ANI, *sorted(path.parent for path in Path(os.environ.get("TORCHMDNET2_MATGL", GOLDEN)).glob("*/golden.xyz"))]


def content() -> dict:
    return json.loads((ANI / "model.json").read_text())


def state() -> dict:
    return torch.load(ANI / "state.pt", map_location="cpu", weights_only=True)


def deviations(potential, folder) -> list[tuple[float, float, float]]:
    """Relative errors of energy per atom, forces and stress of each structure; stress 0 where there is no cell."""
    found = []
    for atoms in read(folder / "golden.xyz", ":"):
        gold, periodic = atoms.calc.results, bool(atoms.pbc.all())
        result = potential(System.from_ase([atoms]), stress=periodic)
        forces = torch.as_tensor(gold["forces"])
        stress = torch.as_tensor(atoms.get_stress(voigt=False)) if periodic else torch.ones(3, 3)
        given = result.stress[0] if periodic else stress
        found.append(
            (
                abs(float(result.energy) / gold["energy"] - 1),
                float((result.forces - forces).abs().max() / forces.abs().max().clamp(min=1e-3)),
                float((given - stress).abs().max() / stress.abs().max()),
            )
        )
    return found


@pytest.mark.parametrize("folder", dict.fromkeys(FOLDERS), ids=lambda path: path.name)
def test_gives_what_matgl_computes(folder, tmp_path, capsys):
    """Energies, forces, stress and, through the file, the same bits: 1e-6 in float64; float32 as far as it goes."""
    assert main(["import", str(folder), str(tmp_path / "model.tmn")]) == 0
    assert "the tensors in a message are" in capsys.readouterr().out
    exact, single = load(tmp_path / "model.tmn", dtype="float64"), load(tmp_path / "model.tmn")
    assert single.dtype == torch.float32
    found = deviations(exact, folder)
    assert len(found) >= 12 and max(map(max, found)) < 1e-10, found
    found = deviations(single, folder)
    assert max(max(energy, forces / 10, stress / 10) for energy, forces, stress in found) < 1e-5, found


def test_the_file_says_where_it_came_from(tmp_path):
    shutil.copytree(ANI, tmp_path / "theirs")
    facts = import_matgl(tmp_path / "theirs" / "model.json").metadata["import"]
    assert facts["from"] == "matgl" and facts["source"] == "theirs" and len(facts["checksum"]) == 64
    potential = import_matgl(ANI)
    assert potential.elements == [1, 6, 7, 8] and not potential.reads_charge
    with pytest.raises(UnknownElement):
        potential(System(z=torch.tensor([9, 1]), pos=torch.eye(3)[:2]))


def test_the_conventions_matter():
    """Messages of the neighbors, sums that count the atom itself, pairs the other way round: other forces, by far."""
    right = import_matgl(ANI).double()
    changed = content()
    changed["kwargs"]["model"]["@module"] = "matgl.models._tensornet_pyg"
    neighbors = convert_matgl(changed, state()).double()
    itself = copy.deepcopy(right)
    itself.representation.tensor_embedding.counts_itself = True
    swapped = copy.deepcopy(right)
    weight = swapped.representation.tensor_embedding.emb2.weight.data
    weight.copy_(torch.cat(weight.chunk(2, 1)[::-1], 1))
    atoms = System.from_ase([read(ANI / "golden.xyz", 1)])
    for wrong in (neighbors, itself, swapped):
        assert float((wrong(atoms).forces - right(atoms).forces).abs().max()) > 0.1


def test_it_is_tensornet_where_the_conventions_meet():
    """With the sums over neighbors alone put into TensorNet, the two classes are one function."""
    model = {"hidden_channels": 16, "num_layers": 2, "num_rbf": 3, "cutoff": 4.0, "max_z": 10}
    from torchmdnet2 import Potential

    torch.manual_seed(0)
    ours = Potential.from_config({"model": {"name": "matgl_tensornet", **model}}).double()
    plain = Potential.from_config({"model": {"name": "tensornet", "rbf_type": "smooth_bessel", **model}}).double()
    plain.load_state_dict(ours.state_dict())
    assert type(plain.representation) is TensorNet
    ours.representation.read = plain.representation.read  # with the activation
    plain.representation.tensor_embedding.counts_itself = False
    for layer, other in zip(plain.representation.layers, ours.representation.layers, strict=True):
        layer.messages = other.messages
    atoms = System.from_ase([read(ANI / "golden.xyz", 1)])
    torch.testing.assert_close(ours(atoms).forces, plain(atoms).forces, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update({"@class": "Relaxer"}), "describes a Relaxer"),
        (lambda c: c["kwargs"]["model"].update({"@class": "M3GNet"}), "with a M3GNet"),
        (lambda c: c["kwargs"]["model"].update({"@module": "matgl.models._tensornet_new"}), "not a known TensorNet"),
        (lambda c: c["kwargs"]["model"].update({"@model_version": 2}), "version 2"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"use_smooth": False}), "use_smooth: only True"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"is_intensive": True}), "is_intensive"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"new_option": 1}), "new_option"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"nblocks": 1}), "sizes"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"cutoff": 6.0}), "6.0 Å in model.json and 5.0 Å"),
        (lambda c: c["kwargs"]["model"]["init_args"].update({"element_types": ["H", "C", "N"]}), "element references"),
        (lambda c: c["kwargs"].update({"calc_repuls": True}), "calc_repuls has no equivalent here"),
    ],
)
def test_what_is_not_known_is_refused(change, words):
    changed = content()
    change(changed)
    with pytest.raises(BadCheckpoint, match=words):
        convert_matgl(changed, state())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: list(tensors), r"state\.pt does not hold named tensors"),
        (lambda tensors: {**tensors, "model.x": 1.0}, r"'model\.x' in state\.pt is not a tensor"),
        (lambda tensors: {**tensors, "data_mean": torch.tensor(float("nan"))}, "'data_mean' .* not finite"),
        (lambda tensors: {k: v for k, v in tensors.items() if k != "data_std"}, r"state\.pt has no data_std"),
    ],
)
def test_other_contents_of_state_are_refused(change, words):
    with pytest.raises(BadCheckpoint, match=words):
        convert_matgl(content(), change(state()))


@pytest.mark.parametrize("symbols", [["H", "C", "N", "N"], ["X", "C", "N", "O"]])
def test_elements_are_named_once(symbols):
    changed = content()
    changed["kwargs"]["model"]["init_args"]["element_types"] = symbols
    with pytest.raises(BadCheckpoint, match="lists an element twice, or an unknown element"):
        convert_matgl(changed, state())


class Code:
    def __reduce__(self):
        return print, ("code from the file has run",)


def test_no_code_runs(tmp_path, capsys):
    """A pickle instead of tensors is refused, and model.pt, which is one, is not even opened."""
    shutil.copytree(ANI, tmp_path / "theirs")
    torch.save(Code(), tmp_path / "theirs" / "model.pt")
    assert import_matgl(tmp_path / "theirs").elements == [1, 6, 7, 8]
    torch.save({"model.x": Code()}, tmp_path / "theirs" / "state.pt")
    with pytest.raises(BadCheckpoint, match="without running code"):
        import_matgl(tmp_path / "theirs")
    assert "has run" not in capsys.readouterr().out


def test_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the file model\.json is missing"):
        import_matgl(tmp_path)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(FileNotFoundError, match=r"the file state\.pt is missing"):
        import_matgl(tmp_path)
    shutil.copy(ANI / "state.pt", tmp_path)
    with pytest.raises(BadCheckpoint, match="not JSON"):
        import_matgl(tmp_path)
    for text in ("[]", "{}", '{"@class": "Potential", "kwargs": {"model": []}}'):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(BadCheckpoint):
            import_matgl(tmp_path)
    tensors = state()
    del tensors["model.linear.weight"]
    with pytest.raises(RuntimeError, match="linear"):
        convert_matgl(content(), tensors)


def test_options_of_other_checkpoints_are_refused(tmp_path, capsys):
    for option in (["--elements", "H"], ["--layout", "2.x"], ["--energy-unit", "hartree"], ["--member", "0"]):
        assert main(["import", str(ANI), str(tmp_path / "m.tmn"), *option]) == 2
        assert option[0] in capsys.readouterr().err
