"""Starting from another model: weights, new elements, references, frozen parts; and learning a difference."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import Potential, System, checkpoint
from torchmdnet2.errors import BadConfig, MissingBackend, UntrainedCharge
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.report import model_card
from torchmdnet2.training.run.fine_tuning import _same_model
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup
from torchmdnet2.training.steps.optimizers import depths


@pytest.fixture(scope="module")
def base(data_file, tmp_path_factory):
    """A model of H, C, O, trained for a few epochs."""
    folder = tmp_path_factory.mktemp("base") / "run"
    raw = {
        "data": {"train": str(data_file), "split": {"validation": 6, "test": 6}},
        "model": {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10},
        "training": {"batch_size": 5, "max_epochs": 10, "lr": 1e-2, "warmup_steps": 4, "device": "cpu"},
        "output": {"folder": str(folder), "report": False},
    }
    return run_training(parse_config(raw))


@pytest.fixture
def raw(raw_config, base):
    """Fine-tuning on the same data: everything about the model comes from the file."""
    del raw_config["model"]
    raw_config["init"] = {"file": str(base)}
    return raw_config


def shifted(data_file, path, by=lambda atoms: 2.0 * len(atoms), replace=None):
    """The same frames with other energies, as of another method, and H by another element if asked for."""
    frames = []
    for atoms in read(data_file, ":"):
        energy, forces = atoms.get_potential_energy() + by(atoms), atoms.get_forces()
        numbers = [replace.get(z, z) for z in atoms.numbers] if replace else atoms.numbers
        new = Atoms(numbers, atoms.positions)
        new.calc = SinglePointCalculator(new, energy=energy, forces=forces)
        frames.append(new)
    write(path, frames, format="extxyz")
    return str(path)


def test_everything_comes_from_the_file(raw, base):
    config = parse_config(raw)
    assert config.model == checkpoint.read_header(base)["config"]["model"]
    assert config.priors == [{"name": "atomref", "max_z": 128, "trainable": False, "energies": "auto"}]
    setup = make_setup(config)
    theirs = checkpoint.load(base)
    for name, value in theirs.named_parameters():
        assert torch.equal(value, setup.potential.get_parameter(name)), name
    assert setup.potential.energy_scale == theirs.energy_scale
    assert any("tensors loaded" in note for note in setup.notes)
    # nearly the same data: the references hardly change, and the first epoch starts where the last run ended
    assert "reference energies changed by least squares: H" in " ".join(setup.notes)
    system = System.from_ase(read(config.data.train, 0))
    energies = [float(p.double()(system, forces=False).energy.detach()) for p in (setup.potential, theirs)]
    assert abs(energies[0] - energies[1]) < 0.5


def test_files_older_than_an_argument_have_its_default():
    """Weights of layer norms would fit into logarithms, and mean something else there."""
    old = {"name": "tensornet", "hidden_channels": 8}
    _same_model(old, {"name": "tensornet", "hidden_channels": 8, "norm": "layer"})
    with pytest.raises(BadConfig, match=r"model\.norm: is 'log' here and 'layer' in the file"):
        _same_model(old, {"name": "tensornet", "norm": "log"})


def test_references_follow_another_method(raw, data_file, tmp_path):
    raw["data"]["train"] = shifted(data_file, tmp_path / "s.xyz")
    raw["training"]["max_epochs"] = 1
    path = run_training(parse_config(raw))
    before, after = (checkpoint.read_header(p)["config"]["priors"][0]["energies"] for p in (raw["init"]["file"], path))
    change = [after[z] - before[z] for z in ("1", "6", "8")]
    assert change == pytest.approx([2.0, 2.0, 2.0], abs=0.5)
    errors = checkpoint.read_header(path)["metadata"]["errors"]["test"]
    assert errors["energy_per_atom"]["mae"] < 0.2  # 2 eV without
    log = (path.parent / "log.txt").read_text()
    assert "start: " in log and "reference energies changed" in log
    assert raw["init"]["file"] in checkpoint.read_header(path)["metadata"]["data"]["files"]


def test_new_elements(raw, data_file, tmp_path):
    raw["data"]["train"] = shifted(data_file, tmp_path / "f.xyz", replace={8: 16})
    raw["training"]["max_epochs"] = 1
    with pytest.raises(BadConfig, match=r"model\.max_z: S is in the training frames, which needs 17 at least, got 10"):
        make_setup(parse_config(raw))  # sulphur is beyond the table of the file's model
    raw["model"] = {"max_z": 20}
    raw["init"]["freeze"] = ["representation.tensor_embedding"]
    notes = make_setup(parse_config(raw)).notes
    assert any("is frozen, so that new elements keep the mean of the known ones" in note for note in notes)
    del raw["init"]["freeze"]
    setup = make_setup(parse_config(raw))
    assert setup.potential.elements == [1, 6, 8, 16]
    assert any(note.startswith("new elements: S") for note in setup.notes)
    theirs = checkpoint.load(raw["init"]["file"])
    names = [n for n, p in theirs.named_parameters() if p.ndim == 2 and p.shape[0] == 10]
    assert names
    for table in names:
        old, new = theirs.get_parameter(table), setup.potential.get_parameter(table)
        assert torch.equal(new[:10], old) and new.shape[0] == 20
        torch.testing.assert_close(new[16], old[[1, 6, 8]].mean(0))
    path = run_training(parse_config(raw))
    errors = checkpoint.read_header(path)["metadata"]["errors"]["test"]
    assert errors["energy_per_atom"]["mae"] < 1.0
    assert float(checkpoint.read_header(path)["config"]["priors"][0]["energies"]["16"]) < -1000


def test_models_of_closed_shells_stay_so_unless_the_data_have_radicals(raw, base, data_file, tmp_path):
    """An odd number of electrons is refused as by the file's model; where training frames have it, the log says so."""
    closed = checkpoint.load(base)
    closed.closed_shell = closed.config["closed_shell"] = True
    raw["init"]["file"] = str(tmp_path / "closed.tmn")
    checkpoint.save(closed, raw["init"]["file"])
    frames = read(data_file, ":")
    odd = [bool(atoms.numbers.sum() % 2) for atoms in frames]
    assert any(odd) and not all(odd)
    raw["data"] = {"split": {"validation": 4}}
    raw["training"]["max_epochs"] = 1

    def trained(name, **files):
        for subset, chosen in files.items():
            raw["data"][subset] = str(tmp_path / f"{name}_{subset}.xyz")
            write(raw["data"][subset], chosen, format="extxyz")
        raw["output"]["folder"] = str(tmp_path / name)
        path = run_training(parse_config(raw))
        return checkpoint.load(path), (path.parent / "log.txt").read_text()

    even = [atoms for atoms, is_odd in zip(frames, odd, strict=True) if not is_odd]
    radicals = [atoms for atoms, is_odd in zip(frames, odd, strict=True) if is_odd]
    potential, log = trained("even", train=even, test=radicals[:2])
    assert potential.closed_shell and "note: 2 test frames have an odd number of electrons, which no training" in log
    with pytest.raises(UntrainedCharge, match="an odd number of electrons"):
        potential(System.from_ase(radicals[0]))
    words = "training frames have an odd number of electrons: radicals, or ions whose total charge is not read"
    assert words not in log
    potential, log = trained("mixed", train=even[4:] + 8 * radicals[:1])
    assert not potential.closed_shell and words in log
    for atoms in frames:
        atoms.info["charge"] = int(atoms.numbers.sum() % 2)
    potential, log = trained("ions", train=frames, test=radicals[:2])
    assert potential.closed_shell and words not in log and "odd number" not in log
    assert potential.total_charges == [0.0, 1.0]
    raw["init"]["file"] = str(base)  # any number of electrons, as before
    for atoms in frames:
        del atoms.info["charge"]
    potential, log = trained("open", train=frames, test=radicals[:2])
    assert not potential.closed_shell and "odd number" not in log


def test_frozen_parts_stay_and_others_move(raw, base, tmp_path):
    raw["init"]["freeze"] = ["representation.tensor_embedding", "representation.layers.0"]
    raw["training"].update(weight_decay=0.1)
    path = run_training(parse_config(raw))
    before, after = checkpoint.load(base), checkpoint.load(path)
    moved = {n: not torch.equal(p, before.get_parameter(n)) for n, p in after.named_parameters()}
    frozen = [n for n in moved if n.startswith(("representation.tensor_embedding.", "representation.layers.0."))]
    assert len(frozen) > 5 and not any(moved[n] for n in frozen)
    assert all(moved[n] for n in moved if n.startswith("head."))
    assert "parameters are frozen" in (path.parent / "log.txt").read_text()
    # a killed run of this kind resumes too
    raw["output"]["folder"] = str(tmp_path / "again")
    run_training(parse_config(raw))
    raw["init"]["freeze"] = ["representation.tensor_embeding"]
    with pytest.raises(BadConfig, match=r"starts with .representation.tensor_embeding., did you"):
        make_setup(parse_config(raw))
    raw["init"]["freeze"] = ["representation", "head"]
    with pytest.raises(BadConfig, match="nothing to train"):
        make_setup(parse_config(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": {"file": "none.tmn"}}, "there is no model file none.tmn"),
        ({"model": {"cutoff": 4.0}}, "model.cutoff: is 4.0 here and 3.0 in the file"),
        ({"init": {"fiel": "x"}}, "init.fiel: unknown key, did you mean 'file'"),
        ({"priors": [{"name": "atomref", "energies": "keep"}], "init": None}, "energies: keep is for fine-tuning"),
    ],
)
def test_refusals(raw, change, message):
    for key, value in change.items():
        raw[key] = value
    with pytest.raises(BadConfig) as caught:
        make_setup(parse_config(raw))
    assert message in str(caught.value)


def test_kept_references(raw, base, data_file, tmp_path):
    raw["priors"] = [{"name": "atomref", "energies": "keep"}]
    setup = make_setup(parse_config(raw))
    theirs = checkpoint.load(base)
    assert torch.equal(setup.potential.priors[0].initial[:10], theirs.priors[0].initial[:10])
    raw["data"]["train"] = shifted(data_file, tmp_path / "f.xyz", replace={8: 9})
    with pytest.raises(BadConfig, match="no entry for F"):
        make_setup(parse_config(raw))


def test_rates_by_depth(raw):
    raw["training"]["layer_lr_decay"] = 0.5
    from torchmdnet2.training.run.start import make_trainer

    trainer = make_trainer(make_setup(parse_config(raw)), None)
    deep = depths(trainer.potential)
    assert set(deep.values()) == {0, 1, 2}
    trainer.step(next(trainer.train_loader([[0, 1, 2]])))
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            name = next(n for n, p in trainer.potential.named_parameters() if p is parameter)
            expected = trainer.learning_rate.rate(0) * 0.5 ** (2 - deep[name])
            assert group["lr"] == pytest.approx(expected), name


def test_learning_the_difference_from_a_prior_equals_learning_reduced_labels(raw_config, data_file, tmp_path):
    """Delta learning: training on totals with a prior is training on labels without the prior's share."""
    whole = copy.deepcopy(raw_config)
    whole["priors"] = [{"name": "zbl", "cutoff": 4.0}, {"name": "atomref", "energies": "fit"}]
    whole["training"].update(precision="float64", energy_scale=1.0)
    path = run_training(parse_config(whole))
    potential = checkpoint.load(path)

    from torchmdnet2 import Potential

    only = Potential.from_config({"model": potential.config["model"], "head": None, "priors": whole["priors"][:1]})
    frames = []
    for atoms in read(data_file, ":"):
        share = only.double().eval()(System.from_ase(atoms))
        reduced = atoms.copy()
        reduced.calc = SinglePointCalculator(
            reduced,
            energy=atoms.get_potential_energy() - float(share.energy),
            forces=atoms.get_forces() - share.forces.numpy(),
        )
        assert float(share.energy) > 1.0
        frames.append(reduced)
    write(tmp_path / "reduced.xyz", frames, format="extxyz")
    delta = copy.deepcopy(raw_config)
    delta["data"]["train"] = str(tmp_path / "reduced.xyz")
    delta["training"].update(precision="float64", energy_scale=1.0)
    delta["output"]["folder"] = str(tmp_path / "delta")
    other = checkpoint.load(run_training(parse_config(delta)))
    for atoms in read(data_file, ":3"):
        system = System.from_ase(atoms)
        total, difference, share = (p(system) for p in (potential, other, only))
        # energies returned are totals; extxyz keeps 8 digits of the reduced labels
        assert float(total.energy) == pytest.approx(float(difference.energy + share.energy), abs=1e-3)
        np.testing.assert_allclose(total.forces, difference.forces + share.forces, atol=1e-3)


def test_learning_the_difference_from_another_potential(raw_config, base, data_file, tmp_path):
    """The baseline's energies are part of the total, its weights stay, and the model needs no other file."""
    import shutil

    copied = tmp_path / "cheap.tmn"
    shutil.copy(base, copied)
    raw_config["data"]["train"] = shifted(data_file, tmp_path / "s.xyz", by=lambda atoms: 0.3 * len(atoms))
    raw_config["priors"] = [{"name": "baseline", "file": str(copied)}, {"name": "atomref", "energies": "fit"}]
    raw_config["training"].update(max_epochs=1, weight_decay=0.1)
    path = run_training(parse_config(raw_config))
    copied.unlink()
    potential, cheap = checkpoint.load(path, dtype=torch.float64), checkpoint.load(base, dtype=torch.float64)
    kept = potential.priors[0].potential.state_dict()
    assert kept.keys() == cheap.state_dict().keys()
    assert all(torch.equal(value, kept[name]) for name, value in cheap.state_dict().items())
    only = torch.nn.ModuleList([potential.priors[1]])
    system = System.from_ase(read(data_file, "4:7"))
    total, share = potential(system), cheap(system)
    potential.priors = only
    rest = potential(system)
    torch.testing.assert_close(total.energy, share.energy + rest.energy, rtol=0, atol=1e-9)
    torch.testing.assert_close(total.forces, share.forces + rest.forces, rtol=0, atol=1e-9)
    assert float(share.energy.abs().min()) > 1000  # the reference energies are in the baseline,
    references = potential.config["priors"][1]["energies"]
    assert all(abs(energy) < 1.0 for energy in references.values())  # and what is fitted is the difference
    errors = checkpoint.read_header(path)["metadata"]["errors"]["test"]
    before = checkpoint.read_header(base)["metadata"]["errors"]["test"]
    assert errors["forces"]["mae"] < 1.2 * before["forces"]["mae"]
    raw_config["data"]["train"] = shifted(data_file, tmp_path / "sulphur.xyz", replace={8: 16})
    raw_config["priors"][0]["file"], raw_config["model"]["max_z"] = str(base), 20
    with pytest.raises(BadConfig, match=r"the baseline \S*best\.tmn knows only H, C, O; training frames hold S"):
        make_setup(parse_config(raw_config))
    raw_config["priors"][0]["file"] = "none.tmn"
    with pytest.raises(BadConfig, match=r"baseline\.file: none\.tmn: no such model file"):
        parse_config(raw_config)
    raw_config["priors"][0] = {"name": "baseline", "fiel": "x.tmn"}
    with pytest.raises(BadConfig, match=r"priors\.0\.fiel: unknown key, did you mean 'file'"):
        parse_config(raw_config)


def test_starting_from_a_checkpoint_of_torchmd_net(raw, base, tmp_path):
    from torchmdnet2.importers import export_checkpoint

    theirs = checkpoint.load(base)
    export_checkpoint(theirs, tmp_path / "theirs.ckpt")
    raw["init"] = {"file": str(tmp_path / "theirs.ckpt")}
    raw["priors"] = [{"name": "atomref", "energies": "keep"}]
    setup = make_setup(parse_config(raw))
    system = System.from_ase(read(raw["data"]["train"], ":3"))
    energies = [p.double().eval()(system, forces=False).energy for p in (setup.potential, theirs)]
    torch.testing.assert_close(*energies, rtol=1e-6, atol=1e-3)


def test_dispersion_needs_no_package_that_the_file_makes_unnecessary(raw, base, tmp_path, monkeypatch):
    """Reference values of D3 come from the file; what nobody has is named before data are read."""
    for name in ("tad_dftd3", "tad_dftd3.data", "tad_dftd3.reference"):
        monkeypatch.setitem(sys.modules, name, None)
    d3 = {"name": "d3", "elements": [1, 6, 8, 29], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 6.0}
    potential = checkpoint.load(base)
    with_d3 = Potential.from_config({**potential.config, "priors": [*potential.config["priors"], d3]})
    with_d3.load_state_dict(potential.state_dict(), strict=False)
    with torch.no_grad():
        for table in with_d3.priors[1].tables().values():
            table.copy_(torch.rand(table.shape).abs())
    checkpoint.save(with_d3, tmp_path / "d3.tmn")
    raw["init"] = {"file": str(tmp_path / "d3.tmn")}
    new = make_setup(parse_config(raw)).potential
    assert torch.equal(new.priors[1].c6, with_d3.priors[1].c6)
    assert torch.isfinite(new.priors[0].table).all()
    raw["priors"] = [{**d3, "elements": [1, 79]}]
    raw["data"]["train"] = str(tmp_path / "is not looked for.xyz")
    with pytest.raises(MissingBackend, match=r"reference values of Au: pip install 'torchmdnet2\[d3\]'"):
        make_setup(parse_config(raw))


def test_shipped_potentials_start_without_further_packages(raw, monkeypatch):
    monkeypatch.setitem(sys.modules, "tad_dftd3", None)
    raw["init"] = "organic-small"
    potential = make_setup(parse_config(raw)).potential
    result = potential(System.from_ase(read(raw["data"]["train"], 0)))
    assert torch.isfinite(result.energy).all() and torch.isfinite(result.forces).all()


def test_licence_and_sources_of_the_start_are_in_the_card(raw, base, tmp_path):
    """Also of the start of a start; a licence in the configuration comes first."""
    start = checkpoint.load(base)
    about = {"Teacher": "A. Author, J. Chem. 1, 2 (2020)", "Meant for": "water"}
    checkpoint.save(start, tmp_path / "start.tmn", {"licence": "MIT", "about": about})

    def trained(name, **output):
        config = {**raw, "init": str(tmp_path / f"{name}.tmn"), "output": {**raw["output"], **output}}
        config["training"] = {**raw["training"], "max_epochs": 1}
        return checkpoint.read_header(run_training(parse_config(config)))

    header = trained("start", folder=str(tmp_path / "first"))
    card = model_card(header["config"], header["metadata"])
    assert "| Licence of the model | MIT, that of the start |" in card
    assert "| Citation of the data | not stated |" in card
    assert "start.tmn were the start" in card and "Teacher: A. Author" in card and "Meant for" not in card
    (tmp_path / "first" / "best.tmn").rename(tmp_path / "second.tmn")
    metadata = trained("second", folder=str(tmp_path / "again"))["metadata"]
    assert metadata["licence"] == "MIT, that of the start" and "A. Author" in metadata["about"]["Start"]
    metadata = trained("start", folder=str(tmp_path / "own"), licence="CC0")["metadata"]
    assert metadata["licence"] == "CC0" and "A. Author" in metadata["about"]["Start"]


@pytest.mark.parametrize(("shift", "same_level"), [(0.01, True), (-300.0, False)])
def test_one_composition_of_another_level(raw, base, data_file, tmp_path, shift, same_level):
    """Reference energies change little where the data say nothing, and the model says which are of the new level."""
    path = shifted(data_file, tmp_path / "one.xyz", lambda atoms: shift * len(atoms))
    write(path, [atoms for atoms in read(path, ":") if sorted(atoms.numbers) == [1, 1, 1, 6, 8]], format="extxyz")
    raw["data"] = {"train": path, "split": {"validation": 2, "test": 2}}
    raw["training"]["max_epochs"] = 1
    setup = make_setup(parse_config(raw))
    before, after = (p.priors[0].table for p in (checkpoint.load(base), setup.potential))
    change = {z: float(after[z] - before[z]) for z in (1, 6, 8)}
    assert abs(3 * change[1] + change[6] + change[8] - 5 * shift) < 1.0
    assert abs(change[1]) < 1.0
    said = "note: the training frames do not determine the reference energies of H, C, O, only those of CH3O"
    assert any(note.startswith(said) for note in setup.notes) != same_level
    model = checkpoint.load(run_training(parse_config(raw)))
    assert (model.determined is None) == same_level
    card = model_card(model.config, model.metadata)
    assert (said.removeprefix("note: t") in card) != same_level
    assert "| Elements | H, C, O |" in card
