"""What is allowed and looks like a mistake is said before the training starts."""

import copy
from pathlib import Path

import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from crystals import crystals
from scipy.spatial.transform import Rotation

from torchmdnet2.errors import BadConfig, BadData
from torchmdnet2.training.config.config import parse_config
from torchmdnet2.training.reporting.log import TrainingLog
from torchmdnet2.training.run.notes import closest_pair, data_notes
from torchmdnet2.training.run.run import run_training
from torchmdnet2.training.run.setup import make_setup, require_usable

from .conftest import make_frames


def notes(raw, total_steps=1000):
    return data_notes(make_setup(parse_config(raw)), total_steps)


def written(raw, tmp_path, frames):
    write(tmp_path / "own.xyz", frames, format="extxyz")
    raw = copy.deepcopy(raw)
    raw["data"]["train"] = str(tmp_path / "own.xyz")
    return raw


def test_nothing_is_said_of_what_is_right(raw_config):
    assert notes(raw_config) == []


def test_frames_in_two_subsets(raw_config, data_file):
    del raw_config["data"]["split"]["test"]
    raw_config["data"]["test"] = str(data_file)
    (train, validation) = notes(raw_config)
    assert "26 of 32 test frames have the same structure as training frames" in train and "frame 0" in train
    assert "6 of 32 test frames have the same structure as validation frames" in validation


def test_repeated_training_frames(raw_config, tmp_path):
    frames = make_frames(20)
    raw = written(raw_config, tmp_path, [*frames, frames[3], frames[3], frames[4]])
    raw["data"]["split"] = {"validation": 0, "test": 0}
    assert notes(raw) == ["3 of 23 training frames repeat the structure of another one"]
    raw["data"]["split"]["bootstrap"] = 1  # which repeats frames on purpose
    drawn = np.unique(make_setup(parse_config(raw)).splits["train"]["indices"]).tolist()
    structures = {{20: 3, 21: 3, 22: 4}.get(k, k) for k in drawn}
    again = len(drawn) - len(structures)
    expected = [f"{again} of {len(drawn)} training frames repeat the structure of another one"]
    assert notes(raw) == (expected if again else [])


@pytest.mark.parametrize(("name", "value", "count"), [("charge", 2, 0), ("spin", 3, 0), (None, None, 1)])
def test_equal_structures_of_other_energy(raw_config, tmp_path, name, value, count):
    """Only with the same charge and spin they cannot both be learned."""
    frames = make_frames(20)
    again = frames[3].copy()
    again.calc = SinglePointCalculator(again, **frames[3].calc.results)
    again.calc.results["energy"] += 1.0
    if name is not None:
        again.info[name] = value
    raw = written(raw_config, tmp_path, [*frames, again])
    raw["data"]["split"] = {"validation": 0, "test": 0}
    found = [note for note in notes(raw) if "structure of another one and another energy" in note]
    assert len(found) == count and all("by up to 1 eV" in note and "cannot both be learned" in note for note in found)


def test_gradients_instead_of_forces(raw_config, tmp_path):
    frames = [f for f in make_frames(400) if list(f.numbers) == [6, 1, 8]]
    for atoms in frames:
        atoms.calc.results["forces"] *= -1
    (note,) = notes(written(raw_config, tmp_path, frames))
    assert "gradients" in note


@pytest.mark.parametrize("repeated", [False, True])
def test_labels_that_stand_out(raw_config, tmp_path, repeated):
    frames = make_frames(60)
    frames[7].calc.results["forces"] *= 1000
    frames[9].calc.results["energy"] += 500
    raw = written(raw_config, tmp_path, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    if repeated:  # as those of a source with a share are
        write(tmp_path / "other.xyz", make_frames(90)[60:], format="extxyz")
        sources = [{"train": raw["data"].pop("train"), "share": 0.8}, {"train": str(tmp_path / "other.xyz")}]
        raw["data"]["sources"] = [{**source, "level": "one"} for source in sources]
    said = notes(raw)
    for words, frame in (
        ("training frames have far larger forces than the others: ", 7),
        ("training frames have energies far from those of their atoms elsewhere: ", 9),
    ):
        (note,) = [note for note in said if note.startswith(words)]
        assert f"own.xyz, frame {frame}" in note and note.count("own.xyz, frame") == 1


def test_charges_of_validation_frames_alone(raw_config, tmp_path):
    frames = make_frames(12)
    for atoms in frames:
        atoms.info["charge"] = int(atoms.numbers.sum() % 2)
    raw = written(raw_config, tmp_path, frames[4:])
    other = [atoms.copy() for atoms in frames[:4]]
    for atoms, labelled in zip(other, frames, strict=False):
        atoms.info["charge"] = 3
        atoms.calc = labelled.calc
    write(tmp_path / "validation.xyz", other, format="extxyz")
    raw["data"] |= {"validation": str(tmp_path / "validation.xyz"), "split": {"test": 0}}
    assert any("validation frames have the total charges 3, which no training frame has" in n for n in notes(raw))


@pytest.mark.parametrize(
    ("model", "name", "said"),
    [
        ("tensornet", "charge", None),
        ("tensornet", "spin", "spin multiplicities 1, 2, which tensornet does not use"),
        ("equivariant_transformer", "charge", "total charges 1, 2, which equivariant_transformer does not use"),
    ],
)
def test_charges_and_spins_that_are_not_looked_at(raw_config, tmp_path, model, name, said):
    frames = make_frames(32)
    for k, atoms in enumerate(frames):
        atoms.info[name] = 1 + k % 2
    raw = written(raw_config, tmp_path, frames)
    raw["model"] = {"name": model, "hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10}
    found = notes(raw)
    assert found[:1] == ([] if said is None else [f"training frames have the {said}"])
    assert [note.split(" that ")[0] for note in found[1:]] == ["10 training frames have a spin multiplicity"] * (
        name == "spin"
    )


def test_settings(raw_config):
    (note,) = notes(raw_config, total_steps=4)
    assert "warmup_steps is 4" in note
    raw_config["training"]["batch_size"] = 21
    (note,) = notes(raw_config)
    assert "batch_size is 21, and there are 20 training frames" in note
    raw_config["training"]["batch_size"] = 20
    raw_config["data"]["num_workers"] = 2
    (note,) = notes(raw_config)
    assert "num_workers" in note
    raw_config["data"]["num_workers"] = 0
    epochs = raw_config["training"]["max_epochs"]
    for start, begins in ((epochs, False), (1.0, False), (epochs - 1, True), (0.5, True)):
        raw_config["training"].update(swa={"start": start}, loss={"schedule": {"start": start, "energy": 1.0}})
        found = notes(raw_config)
        assert [note.split()[0] for note in found] == (
            [] if begins else ["training.swa.start", "training.loss.schedule.start"]
        )


def test_an_element_beyond_the_table(raw_config):
    raw_config["model"]["max_z"] = 8
    with pytest.raises(BadConfig, match=r"model\.max_z: O is in the training frames, which needs 9 at least, got 8"):
        make_setup(parse_config(raw_config))


def test_a_label_that_no_training_frame_has(raw_config, tmp_path):
    frames = make_frames(32)
    for atoms in frames:
        atoms.calc.results["energy"] = float("nan")
    raw = written(raw_config, tmp_path, frames)
    with pytest.raises(BadData, match=r"none of the 20 training frames has a value for energy .*data\.keys\.energy"):
        require_usable(make_setup(parse_config(raw)))
    raw["training"]["loss"] = {"energy": 0.0, "forces": 1.0}
    require_usable(make_setup(parse_config(raw)))
    raw["training"]["loss"] = {}
    raw["data"]["keys"] = {"energy": None}
    require_usable(make_setup(parse_config(raw)))


def test_the_closest_atoms(raw_config, tmp_path, capsys):
    frames = make_frames(32)
    frames[9].positions[1] = frames[9].positions[0] + [0.25, 0, 0]
    raw = written(raw_config, tmp_path, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    distance, where = closest_pair(make_setup(parse_config(raw)).frames["train"])
    assert distance == pytest.approx(0.25, abs=1e-7) and where.endswith("own.xyz, frame 9")
    run_training(parse_config(raw), check=True, log=TrainingLog(None))
    said = capsys.readouterr().out
    assert "closest atoms: 0.250 Å" in said and "closer than any bond" in said


def test_notes_are_in_the_log_once(raw_config, data_file, tmp_path):
    del raw_config["data"]["split"]["test"]
    raw_config["data"]["test"] = str(data_file)
    raw_config["training"]["max_epochs"] = 1
    run_training(parse_config(raw_config))
    assert (tmp_path / "run" / "log.txt").read_text().count("have the same structure as training frames") == 1


def planted(raw, tmp_path, fault, count=40):
    """The notes on frames of many compositions with a fault in the results of each."""
    frames = make_frames(count)
    for k, atoms in enumerate(frames):
        fault(k, atoms, atoms.calc.results)
    return notes(written(raw, tmp_path, frames))


def test_forces_of_another_sign_or_unit_in_different_molecules(raw_config, tmp_path):
    raw_config["data"]["split"] = {"validation": 0, "test": 0}

    def scaled(label, factor):
        def fault(k, atoms, results):
            results[label] = results[label] * factor

        return fault

    for label, factor, said in (
        ("forces", -1.0, "wrong sign"),
        ("energy", -1.0, "wrong sign"),
        ("forces", 23.06, "units right"),
        ("energy", 23.06, "units right"),
        ("forces", 1 / 51.42, "units right"),
    ):
        found = planted(raw_config, tmp_path, scaled(label, factor))
        assert any(said in note and "pair potential" in note for note in found), (label, factor, found)


def test_faults_of_axes_frames_and_some_labels(raw_config, tmp_path):
    raw_config["data"]["split"] = {"validation": 0, "test": 0}
    energies = [atoms.calc.results["energy"] for atoms in make_frames(40)]

    def axes(k, atoms, results):
        results["forces"] = results["forces"][:, [1, 0, 2]]

    def signs(k, atoms, results):
        results["forces"] = results["forces"] * (-1 if k % 3 == 2 else 1)

    def hartree(k, atoms, results):
        results["energy"] /= 27.211 if k % 4 == 2 else 1

    def rydberg(k, atoms, results):
        results["forces"] = results["forces"] / (25.711 if k % 4 == 2 else 1)

    def moved(k, atoms, results):
        results["energy"] = energies[(k + 1) % len(energies)]

    def unrelated(k, atoms, results):
        results["forces"] = np.random.default_rng(k).normal(size=results["forces"].shape)

    def per_atom(k, atoms, results):
        results["energy"] /= len(atoms)

    for fault, said in (
        (per_atom, "energies look like energies per atom: times the number of atoms, they fit the forces"),
        (axes, "forces of 40 of 40 checked training frames have x and y exchanged (the first: "),
        (
            signs,
            "forces of 13 of 40 checked training frames have the sign opposite to that of the others (the first: ",
        ),
        (hartree, "energies of 10 of 40 checked training frames are 1/27.2 of the others"),
        (rydberg, "forces of 10 of 40 checked training frames are 1/25.7 of the others, as if eV/Å and Ry/bohr"),
        (moved, "energies of 40 of 40 checked training frames belong to the frame after"),
        (unrelated, "do forces, positions and elements belong together?"),
    ):
        found = planted(raw_config, tmp_path, fault)
        assert sum(said in note for note in found) == 1, (said, found)


def test_faults_of_similar_frames_of_one_molecule(raw_config, tmp_path):
    """The quickstart's ethanol, 50 frames: no note without a fault, and one of each fault."""
    raw_config["data"]["split"] = {"validation": 0, "test": 0}
    frames = read(Path(__file__).parents[2] / "examples/data/ethanol_gfn2.xyz", "::20")
    random = np.random.default_rng(0)

    def noise(results):
        results["energy"] += 0.5 * random.normal()

    def shift(results):
        results["energy"] += 27.2114 * (random.uniform() < 0.5)

    def net(results):
        results["forces"] = results["forces"] + [0.2, 0, 0]

    def turned(results):
        results["forces"] = Rotation.random(random_state=3).apply(results["forces"])

    def scaled(factor):
        return lambda results: results.update(forces=factor * results["forces"])

    for fault, said in (
        (scaled(1.0), None),
        (turned, "turn the molecule: their torque Σ r × F is"),
        (scaled(0.529), "times those that follow from the forces: are the units right"),
        (scaled(1.89), "times those that follow from the forces: are the units right"),
        (noise, "not correlated: are "),
        (shift, "eV above those of the others: are all of one method"),
        (net, "forces do not cancel: their sum is 0.3"),
    ):
        changed = copy.deepcopy(frames)
        for atoms in changed:
            fault(atoms.calc.results)
        found = notes(written(raw_config, tmp_path, changed))
        assert len(found) == (said is not None) and all(said in note for note in found), (said, found)


@pytest.mark.parametrize(
    ("label", "factor", "units"),
    [
        ("forces", 23.06, ["forces in kcal/mol/Å (1/23.1)", "energies in hartree (1/27.2)"]),
        ("energy", 1 / 27.211, ["energies in hartree (1/27.2)", "forces in kcal/mol/Å (1/23.1)"]),
        ("energy", 23.06, ["energies in kcal/mol (23.1)", "forces in Ry/bohr (25.7)", "forces in hartree/Å (27.2)"]),
        (
            "forces",
            1 / 27.211,
            ["forces in hartree/Å (27.2)", "forces in Ry/bohr (25.7)", "energies in kcal/mol (23.1)"],
        ),
        ("forces", 1 / 51.422, "The ratio is that of forces in hartree/bohr."),
        ("forces", 96.49, "The ratio is that of forces in kJ/mol/Å."),
        ("forces", 300.0, None),
    ],
)
def test_units_that_a_factor_cannot_tell_apart_are_listed_nearest_first(raw_config, tmp_path, label, factor, units):
    raw_config["data"]["split"] = {"validation": 0, "test": 0}
    frames = read(Path(__file__).parents[2] / "examples/data/ethanol_gfn2.xyz", "::4")
    for atoms in frames:
        atoms.calc.results[label] = factor * atoms.calc.results[label]
    (note,) = [note for note in notes(written(raw_config, tmp_path, frames)) if "follow from the forces" in note]
    said = f"nearest first: {', '.join(units)}." if isinstance(units, list) else units
    assert said in note if units else "nearest first" not in note and "ratio is" not in note


@pytest.mark.parametrize("every", [1, 4])
def test_forces_in_another_orientation_are_named_alone(raw_config, tmp_path, every):
    frames = read(Path(__file__).parents[2] / "examples/data/ethanol_gfn2.xyz", "::20")
    for k, atoms in enumerate(frames[::every]):
        atoms.calc.results["forces"] = Rotation.random(random_state=k).apply(atoms.calc.results["forces"])
    raw = written(raw_config, tmp_path, frames)
    found = [note for note in notes(raw) if note.startswith("forces") or "pair potential" in note]
    assert len(found) == 1 and "turn the molecule" in found[0], found
    for atoms in frames:
        atoms.info["electric_field"] = np.array([0, 0, 0.1])
    assert not any("turn the molecule" in note for note in notes(written(raw_config, tmp_path, frames)))


def test_zeros_digits_lengths_and_contradictions(raw_config, tmp_path):
    raw_config["data"]["split"] = {"validation": 0, "test": 0}

    def no_forces(k, atoms, results):
        results["forces"] = results["forces"] * (k != 7)

    def frozen(k, atoms, results):
        results["forces"] = np.concatenate([np.zeros((1, 3)), results["forces"][1:]])

    def no_column(k, atoms, results):
        results["forces"] = results["forces"] * [1, 0, 1]

    def no_energy(k, atoms, results):
        results["energy"] *= k != 7

    def float32(k, atoms, results):
        results["energy"] = float(np.float32(results["energy"] - 20_000 * len(atoms)))

    def rounded(k, atoms, results):
        results["energy"] = round(results["energy"] / 0.25) * 0.25

    def equal(k, atoms, results):
        results["energy"] = -40.0

    def bohr(k, atoms, results):
        atoms.positions /= 0.529
        atoms.calc.atoms = atoms.copy()

    for fault, said in (
        (no_forces, "forces are exactly 0 on all atoms in 1 of 40 checked training frames: "),
        (frozen, "were they frozen?"),
        (no_column, "the y components of forces are exactly 0 on all atoms in 40 of 40"),
        (no_energy, "energies are exactly 0 in 1 training frames"),
        (float32, "digits were lost"),
        (rounded, "energies are multiples of 250 meV"),
        (equal, "the energy is the same in all training frames"),
        (bohr, "data.units.length right? A bohr is 0.529"),
    ):
        found = planted(raw_config, tmp_path, fault)
        assert sum(said in note for note in found) == 1, (said, found)


def test_one_structure_with_two_energies(raw_config, tmp_path):
    frames = make_frames(30)
    frames.append(frames[4].copy())
    results = dict(frames[4].calc.results)
    frames[-1].calc = type(frames[4].calc)(frames[-1], energy=results["energy"] + 0.2, forces=results["forces"])
    raw = written(raw_config, tmp_path, frames)
    raw["data"]["split"] = {"validation": 0, "test": 0}
    (note,) = (note for note in notes(raw) if "another energy, by up to 0.2 eV" in note)
    assert "frame 4" in note and "frame 30" in note


def test_reference_energies_of_another_method(raw_config):
    raw_config["priors"] = [{"name": "atomref", "energies": {"H": -0.5, "C": -37.0, "O": -75.0}}]
    assert any("eV per atom from the reference energies" in note for note in notes(raw_config))


@pytest.mark.parametrize("cache", ["off", "folder"])
def test_entries_that_put_labels_in_doubt(raw_config, tmp_path, cache):
    frames = make_frames(32)
    raw = written(raw_config, tmp_path, frames)
    raw["data"]["cache"] = "off" if cache == "off" else str(tmp_path / "cache")
    assert notes(raw) == []
    for k, atoms in enumerate(frames):
        atoms.calc.results["free_energy"] = atoms.calc.results["energy"]
        atoms.info["scf_converged"], atoms.info["converged"] = True, 1
        atoms.info["ionic_converged"] = False
    assert notes(written(raw, tmp_path, frames)) == []
    for k, atoms in enumerate(frames):
        atoms.calc.results["free_energy"] -= 1e-3 * k
        atoms.info["scf_converged"] = k not in (3, 9)
    free, scf = notes(written(raw, tmp_path, frames))
    assert "'free_energy' differs from it in 31 frames, by up to 0.031 eV" in free and "energy: free_energy" in free
    assert "'scf_converged' states that 2 frames of" in scf and "the first: frame 3" in scf
    raw["data"]["keys"] = {"energy": "free_energy", "forces": "forces"}
    assert len(notes(written(raw, tmp_path, frames))) == 1


def test_labels_that_were_not_learned():
    from torchmdnet2.training.reporting.evaluation import Evaluation
    from torchmdnet2.training.run.run import unlearned

    label = np.random.default_rng(0).normal(5.0, 1.0, 60)
    found = Evaluation(
        {},
        {
            "forces": (label, np.full(60, 5.0)),
            "energy_per_atom": (label, label + 0.3),
            "few": (label[:4], 0 * label[:4]),
        },
    )
    (note,) = unlearned(found)
    assert note.startswith("the error of forces (RMSE ") and "sign and unit" in note


def test_what_was_not_learned_is_in_the_log(raw_config, tmp_path):
    """Labels without any relation to the structures, in too few frames to be noticed before the training."""
    frames = make_frames(30)
    for k, atoms in enumerate(frames):
        springs = np.random.default_rng(k).normal(size=(len(atoms), len(atoms)))
        apart = atoms.positions[None] - atoms.positions[:, None]  # between pairs: no sum, no torque
        atoms.calc.results["forces"] = ((springs + springs.T)[:, :, None] * apart).sum(1)
    raw = written(raw_config, tmp_path, frames)
    raw["data"]["split"] = {"validation": 12, "test": 0}
    raw["training"]["max_epochs"] = 2
    assert not notes(raw, 10**6)
    run_training(parse_config(raw))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the error of forces (RMSE " in log and "nothing was learned of it. Are its sign and unit right" in log


@pytest.mark.parametrize(
    ("scale", "pbc", "words"),
    [
        (1.2, True, "about 0.83 times as long"),
        (1.0, False, "with periodicity along all lattice vectors"),
        (1.0, True, ""),
    ],
)
def test_a_wrong_cell_is_named_alone(raw_config, tmp_path, scale, pbc, words):
    """Forces of a crystal without its cell seem to turn a molecule, and other faults of forces seem to fit."""
    from ase.calculators.singlepoint import SinglePointCalculator

    raw_config["data"]["split"] = {"validation": 0, "test": 0}
    raw_config["model"]["max_z"] = 80
    frames = []
    for sample in crystals(30):
        (atoms,) = sample.system.to_ase()
        labels = {"energy": float(sample.labels["energy"][0]), "forces": sample.labels["forces"].numpy()}
        atoms.calc = SinglePointCalculator(atoms, **labels)
        atoms.set_cell(scale * atoms.cell.array)
        atoms.pbc = pbc
        frames.append(atoms)
    found = [note for note in notes(written(raw_config, tmp_path, frames)) if "forces" in note or "pair pot" in note]
    if not words:
        assert not found
    else:
        (note,) = found
        assert note.startswith("the cell of 30 checked training frames looks wrong: a pair potential") and words in note


def test_stress_of_another_sign_unit_or_order(raw_config, tmp_path):
    from ase.calculators.singlepoint import SinglePointCalculator

    raw_config["data"]["split"] = {"validation": 0, "test": 0}
    raw_config["data"]["keys"] = {"energy": "energy", "forces": "forces", "stress": "REF_stress"}
    raw_config["model"]["max_z"] = 80
    samples = crystals(30)

    def said(change, forces=1.0, count=30):
        frames = []
        for k, sample in enumerate(samples[:count]):
            (atoms,) = sample.system.to_ase()
            labels = {"energy": float(sample.labels["energy"][0]), "forces": forces * sample.labels["forces"].numpy()}
            atoms.calc = SinglePointCalculator(atoms, **labels)
            atoms.info["REF_stress"] = change(k, sample.labels["stress"][0].numpy(), atoms.get_volume()).ravel()
            frames.append(atoms)
        return [note for note in notes(written(raw_config, tmp_path, frames)) if "units" in note or "stress" in note]

    def vasp(k, s, volume):
        (xx, xy, zx), (_, yy, yz), (*_, zz) = s
        return _symmetric(xx, yy, zz, xy, yz, zx)

    assert said(lambda k, s, volume: s) == []
    (note,) = said(lambda k, s, volume: -s)
    assert "stresses have the wrong sign;" in note
    (note,) = said(lambda k, s, volume: -s * volume)
    assert "wrong sign" in note and "data.keys.virial" in note
    (note,) = said(lambda k, s, volume: 160.22 * s)
    assert "The ratio is that of GPa" in note
    (note,) = said(lambda k, s, volume: 1602.2 * s, count=15)  # too few to be compared
    assert "GPa: are the units right? Set data.units.stress" in note
    (note,) = said(vasp)
    assert "another order" in note and "VASP" in note
    (note,) = said(lambda k, s, volume: s * (k % 10 != 3))
    assert "stresses are exactly 0 in 3 of 30" in note
    (note,) = said(lambda k, s, volume: s * np.eye(3))
    assert "off-diagonal stress components are exactly 0 in 30 of 30" in note
    (note,) = said(lambda k, s, volume: samples[0].labels["stress"][0].numpy())
    assert "the same stress is in 30 of 30" in note
    (note,) = said(lambda k, s, volume: samples[(k + 1) % 30].labels["stress"][0].numpy())
    assert "stresses belong to the frame after" in note
    (note,) = said(lambda k, s, volume: s, forces=23.06)  # the stress fits the energies
    assert "follow from the forces: are the units right? Units with nearly this factor, nearest first: " in note
    assert "forces in kcal/mol/Å (1/23.1)" in note and "energies in hartree (1/27.2)" in note


def _symmetric(xx, yy, zz, yz, zx, xy):
    """A stress of six numbers in the order that is read."""
    return np.array([[xx, xy, zx], [xy, yy, yz], [zx, yz, zz]])
