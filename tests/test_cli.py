"""The command line: every verb, exit codes, messages."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

from torchmdnet2 import Potential, System, __version__, load
from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.cli import main
from torchmdnet2.data.labels import KEY_OPTIONS, missing_key
from torchmdnet2.errors import MissingBackend, needs_extra

CONFIG = {
    "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 3.0},
    "elements": [1, 8],
    "energy_scale": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model.tmn, water.xyz, and data.xyz: 6 frames labelled with known errors."""
    path = tmp_path_factory.mktemp("cli")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        potential = Potential.from_config(CONFIG).eval()
    save(potential, path / "model.tmn", metadata={"licence": "CC0"})
    write(path / "water.xyz", molecule("H2O"))
    frames = []
    for k in range(6):
        atoms = molecule("H2O")
        atoms.rattle(0.05, seed=k)
        result = potential.double()(System.from_ase(atoms))
        energy = float(result.energy.detach()) + 0.03  # 10 meV/atom
        forces = result.forces.detach().numpy() + np.array([[0.4], [0.1], [0.1]])  # O, H, H
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    write(path / "data.xyz", frames)
    return path


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fails(capsys, code, *arguments):
    """The message of a command that must fail: one line, no traceback."""
    found, _, err = run(capsys, *arguments)
    assert found == code and "Traceback" not in err
    assert err.count("\n") == 1 or err.startswith("usage:")
    return err


def test_several_findings_have_a_line_each(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("data: {train: a.xyz, splt: {}}\ntraining: {lr: -1}\n")
    code, _, err = run(capsys, "train", tmp_path / "c.yaml")
    lines = err.splitlines()
    assert code == 2 and len(lines) == 3 and all(line.startswith("  ") for line in lines[1:])
    assert "data.splt: unknown key, did you mean 'split'?" in err and "training.lr: should be greater than 0" in err


# --- the program -------------------------------------------------------------------------------------------------


def test_help_is_instant_and_imports_nothing_heavy():
    code = (
        "import sys, time; from torchmdnet2.cli import main; main(['--help']); "
        "print(sorted({'torch','ase','numpy','pydantic'} & set(sys.modules))); "
        "print(time.process_time(), file=sys.stderr)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    done = min(runs, key=lambda run: float(run.stderr))
    assert float(done.stderr) < 1  # seconds of the process, however busy the machine is
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(
        verb in done.stdout
        for verb in (
            "train",
            "evaluate",
            "md",
            "stability",
            "scan",
            "import",
            "export",
            "models",
            "card",
            "info",
            "config",
        )
    )


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "torchmdnet2", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"torchmdnet2 {__version__}")


@pytest.mark.parametrize("arguments", [[], ["trian"], ["md"], ["md", "a", "b", "--steps", "x"]])
def test_usage_errors(capsys, arguments):
    assert "usage:" in fails(capsys, 2, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "--frob"], "torchmdnet2 info: unrecognized arguments: --frob. `torchmdnet2 info --help` lists"),
        (
            ["md", "a", "b", "--stepz", "3"],
            "unrecognized arguments: --stepz 3, did you mean '--steps'? `torchmdnet2 md",
        ),
        (["scan", "a", "b", "--pair", "0"], "torchmdnet2 scan: unrecognized arguments: --pair 0. `torchmdnet2 scan"),
        (["md", "--stepz=3", "a", "b", "c"], "unrecognized arguments: --stepz=3 c, did you mean '--steps'?"),
        (["evalute", "a"], "invalid choice: 'evalute', did you mean 'evaluate'? Choose from train, learn, evaluate, "),
        (["frob"], "invalid choice: 'frob'. Choose from train, learn, "),
        (["md", "a", "b", "--precision", "mixd"], "--precision: invalid choice: 'mixd', did you mean 'mixed'? Choose"),
    ],
)
def test_unknown_options_are_named_with_the_nearest_one(capsys, arguments, words):
    assert words in fails(capsys, 2, *arguments)


@pytest.mark.parametrize(
    "verb", ["train", "evaluate", "md", "stability", "scan", "import", "export", "models", "card", "info", "config"]
)
def test_every_verb_explains_itself(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and len(out) > 200


def test_bugs_keep_their_traceback(monkeypatch, folder):
    monkeypatch.setattr("torchmdnet2.checkpoint.read_header", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["card", str(folder / "model.tmn")])


def test_memory_that_is_not_enough(monkeypatch, capsys, folder):
    """What PyTorch says of the device, without its list of processes, and what to do."""

    def full(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB. GPU 0 has 0.3 GiB free. Process 6 has 7 GiB.")

    monkeypatch.setattr("torchmdnet2.md.run_md", full)
    line = fails(capsys, 1, "md", folder / "model.tmn", folder / "water.xyz")
    assert "GPU 0 has 0.3 GiB free. Remedy: take fewer --replicas" in line and "Process" not in line


def test_traceback_on_demand(folder):
    with pytest.raises(FileNotFoundError):
        main(["card", str(folder / "none.tmn"), "--traceback"])


# --- card, info, config ------------------------------------------------------------------------------------------


def test_card(capsys, folder):
    code, out, _ = run(capsys, "card", folder / "model.tmn")
    assert code == 0 and "H, O" in out and "CC0" in out
    assert "no such model file" in fails(capsys, 1, "card", folder / "none.tmn")
    assert "not a torchmdnet2 model" in fails(capsys, 1, "card", folder / "water.xyz")


def test_card_of_metadata_in_words_of_their_own(capsys, folder, tmp_path):
    potential, path = load(folder / "model.tmn"), tmp_path / "model.tmn"
    save(potential, path, metadata={"data": "water, by hand", "errors": None, "training": ["Adam"], "config": "none"})
    code, out, _ = run(capsys, "card", path)
    assert code == 0 and "| Data | water, by hand |" in out and "| Training | ['Adam'] |" in out
    assert run(capsys, "evaluate", path, folder / "data.xyz")[0] == 0
    save(potential, path, metadata={"errors": {"energy": "1 meV"}})
    assert f"`torchmdnet2 info {path}` prints them" in fails(capsys, 1, "card", path)


def test_info(capsys, folder):
    code, out, _ = run(capsys, "info")
    facts = yaml.safe_load(out)
    assert code == 0 and facts["versions"]["torch"] == torch.__version__
    assert "cpu" in facts["devices"] and "tensornet" in facts["models"] and "vesin" in facts["neighbors"]
    assert facts["gpu"].startswith("used" if torch.cuda.is_available() else "not used: PyTorch")
    assert "organic" in facts["potentials"] and set(facts["kernel caches"]) == {"numba", "triton"}
    code, out, _ = run(capsys, "info", folder / "model.tmn", "--json")
    facts = json.loads(out)
    assert facts["config"] == CONFIG and facts["metadata"] == {"licence": "CC0"} and len(facts["sha256"]) == 64


def test_info_says_what_is_missing(monkeypatch, tmp_path):
    """Extras by what is installed; why a GPU is not used; the caches of the kernels where the environment puts them."""
    from torchmdnet2 import diagnostics

    lines = ["torch>=2", 'h5py>=3; extra == "hdf5"', "a-b>=1; extra == 'x-y'", 'c; extra == "x-y"', 'd; extra == "dev"']
    lines += ['e>=0.10; extra == "old"', "f>=2; python_version >= '9.5' and extra == \"new\""]
    present = {"h5py": "3.16.0", "c": "1.0", "e": "0.9.dev1"}

    def version(name):
        if name not in present:
            raise PackageNotFoundError(name)
        return present[name]

    monkeypatch.setattr("importlib.metadata.requires", lambda _name: lines)
    monkeypatch.setattr("importlib.metadata.version", version)
    here = ".".join(map(str, sys.version_info[:2]))
    assert diagnostics.extras() == {
        "hdf5": "installed",
        "x-y": "not installed: a-b",
        "old": "e 0.9.dev1 is installed, and 0.10 or later is needed",
        "new": f"f 2 or later needs Python 9.5 or later, and this is Python {here}",
    }
    with pytest.raises(MissingBackend, match=r"e 0\.9.* 0\.10 or later is needed: pip install 'torchmdnet2\[old\]'"):
        with needs_extra("old", "e"):
            pass
    for present["f"] in ("1.9", ""):  # with and without the package
        with pytest.raises(MissingBackend, match=r"Python 9\.5 .*: with such a Python, pip install '.*\[new\]'"):
            with needs_extra("new", "f"):
                raise ModuleNotFoundError("no", name="f")
    with needs_extra("old"), needs_extra("x-y", "a-b"):  # other packages; one without metadata
        pass
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in diagnostics.surroundings()["gpu"]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "t"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "n"))
    facts = diagnostics.surroundings()
    assert "finds no GPU" in facts["gpu"] and "CUDA_VISIBLE_DEVICES is '7'" in facts["gpu"]
    assert facts["kernel caches"] == {"numba": str(tmp_path / "n"), "triton": str(tmp_path / "t")}


def test_config_prints_what_train_reads(capsys, tmp_path):
    code, out, _ = run(capsys, "config")
    assert code == 0 and "#" in out
    (tmp_path / "c.yaml").write_text(out)
    code, filled, _ = run(capsys, "config", tmp_path / "c.yaml", "--set", "training.lr=0.5e-3")
    assert code == 0 and yaml.safe_load(filled)["training"]["lr"] == 0.5e-3
    assert "tensornet" in fails(capsys, 2, "config", "--model", "tensornett")
    assert "lr" in fails(capsys, 2, "config", tmp_path / "c.yaml", "--set", "training.lrr=1")


# --- md ----------------------------------------------------------------------------------------------------------


def test_md(capsys, folder, tmp_path):
    code, out, err = run(
        capsys, "md", folder / "model.tmn", folder / "water.xyz", "--time", 0.01, "--output", tmp_path / "w.traj",
        "--dtype", "float64", "--device", "cpu", "--seed", 4, "--charge", 0, "--every", 5,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "drift" in out and "ns/day" in out and "step        20/20" in out
    assert {p.name for p in tmp_path.iterdir()} == {"w.traj", "w.csv", "w.png", "w.restart"}
    frames = read(tmp_path / "w.traj", ":")
    assert len(frames) == 5 and frames[-1].info["time_ps"] == 0.01
    # R26, R30: the numbers in the trajectory are those of the ASE calculator
    calc = TorchMDNet2Calculator(folder / "model.tmn", dtype="float64")
    for frame in frames:
        assert calc.get_property("energy", frame) == pytest.approx(frame.get_potential_energy(), rel=1e-9)
        np.testing.assert_allclose(calc.get_property("forces", frame), frame.get_forces(), atol=1e-9)


def test_md_starts_from_the_last_structure_of_a_file(capsys, folder, tmp_path):
    """And says so, unless another is chosen."""
    frames = [molecule("H2O"), molecule("H2O")]
    frames[0].positions += 3
    write(tmp_path / "two.xyz", frames)
    for chosen, k in (("two.xyz", 1), ("two.xyz@0", 0)):
        arguments = ["md", folder / "model.tmn", tmp_path / chosen, "--steps", 1, "--output", tmp_path / "r"]
        code, _, err = run(capsys, *arguments)
        assert code == 0
        assert ("two.xyz holds 2 structures; the last is used; choose another as " in err) is (k == 1)
        np.testing.assert_allclose(read(tmp_path / "r.xyz", 0).positions, frames[k].positions, atol=1e-6)
    err = fails(capsys, 1, "md", folder / "model.tmn", tmp_path / "two.xyz@:", "--steps", 1)
    assert "selects several structures; choose one, as in file.xyz@0" in err


def test_md_restart(capsys, folder, tmp_path):
    common = ["md", folder / "model.tmn", folder / "water.xyz", "--output", f"{tmp_path}/", "--ensemble", "nvt"]
    assert run(capsys, *common, "--steps", 10)[0] == 0
    code, out, _ = run(capsys, *common, "--steps", 20, "--restart")
    assert code == 0 and "continuing from step 10 of 20" in out
    assert len(read(tmp_path / "md.xyz", ":")) == 3
    assert "friction" in fails(capsys, 2, *common, "--steps", 30, "--restart", "--friction", 3)


def test_md_refusals(capsys, folder, tmp_path):
    model, water = folder / "model.tmn", folder / "water.xyz"
    out = ["--output", tmp_path / "x", "--steps", 5]
    write(tmp_path / "methane.xyz", molecule("CH4"))
    assert "C (Z = 6)" in fails(capsys, 1, "md", model, tmp_path / "methane.xyz", *out)
    clash = molecule("H2O")
    clash.positions[1] = clash.positions[0] + 0.1
    write(tmp_path / "clash.xyz", clash)
    assert "overlap" in fails(capsys, 1, "md", model, tmp_path / "clash.xyz", *out)
    assert "no such file" in fails(capsys, 1, "md", model, tmp_path / "none.xyz", *out)
    assert "no such model file" in fails(capsys, 1, "md", tmp_path / "none.tmn", water, *out)
    (tmp_path / "junk.xyz").write_text("hello")
    assert "cannot be read" in fails(capsys, 1, "md", model, tmp_path / "junk.xyz", *out)
    assert "ensemble" in fails(capsys, 2, "md", model, water, *out, "--ensemble", "npq")
    assert "no periodic cell" in fails(capsys, 1, "md", model, water, *out, "--ensemble", "npt")
    assert "pressure" in fails(capsys, 2, "md", model, water, *out, "--ensemble", "nvt", "--pressure", 1)
    assert "inner_steps" in fails(capsys, 2, "md", model, water, *out, "--inner-steps", 2)
    assert "timestep" in fails(capsys, 2, "md", model, water, *out, "--timestep", 0)
    assert "time" in fails(capsys, 2, "md", model, water, "--time", "nan")
    assert "trajectory" in fails(capsys, 2, "md", model, water, *out, "--trajectory", "a.pdb")
    assert "cuda:97" in fails(capsys, 1, "md", model, water, *out, "--device", "cuda:97")
    assert not (tmp_path / "x.xyz").exists()


# --- evaluate ----------------------------------------------------------------------------------------------------


def test_evaluate(capsys, folder):
    code, out, _ = run(capsys, "evaluate", folder / "model.tmn", folder / "data.xyz", "--json")
    found = json.loads(out)
    assert code == 0 and found["frames"] == 6
    assert found["energy"]["mae"] == pytest.approx(0.03, rel=1e-6)
    assert found["energy_per_atom"]["rmse"] == pytest.approx(0.01, rel=1e-6)
    assert found["forces"]["mae"] == pytest.approx(0.2, rel=1e-5)
    assert found["forces"]["rmse"] == pytest.approx(math.sqrt((0.16 + 0.01 + 0.01) / 3), rel=1e-5)
    assert found["forces_by_element"]["O"]["mae"] == pytest.approx(0.4, rel=1e-5)
    assert found["forces_by_element"]["H"]["mae"] == pytest.approx(0.1, rel=1e-5)
    code, out, _ = run(capsys, "evaluate", folder / "model.tmn", folder / "data.xyz")
    assert code == 0 and "forces on O" in out and "400.000" in out and "meV/Å" in out


@pytest.mark.parametrize(
    ("shifts", "said"), [([0.9] * 6, "0.31 eV per atom"), ([0.9, -0.6] * 3, ""), ([9.0, 3.0] * 3, "2.01 eV per atom")]
)
def test_evaluate_says_that_labels_have_another_zero(capsys, folder, tmp_path, shifts, said):
    """Where errors are large, or of middle size and nearly the same in all frames."""
    frames = read(folder / "data.xyz", ":")
    for atoms, shift in zip(frames, shifts, strict=True):
        atoms.calc.results["energy"] += shift
    write(tmp_path / "data.xyz", frames)
    code, _, err = run(capsys, "evaluate", folder / "model.tmn", tmp_path / "data.xyz")
    assert code == 0 and (f"energies differ by about {said}: probably the labels have another zero" in err) == bool(
        said
    )


@pytest.mark.parametrize(("factor", "said"), [(1.0, False), (-23.06, True)])
def test_evaluate_says_that_forces_have_another_unit_or_sign(capsys, folder, tmp_path, factor, said):
    frames = read(folder / "data.xyz", ":")
    for atoms in frames:
        atoms.calc.results["forces"] *= factor
    write(tmp_path / "data.xyz", frames)
    code, _, err = run(capsys, "evaluate", folder / "model.tmn", tmp_path / "data.xyz")
    assert code == 0 and ("check their unit (--forces-unit) and sign (−dE/dx)" in err) == said


def test_evaluate_reads_every_format(capsys, folder, tmp_path):
    frames = read(folder / "data.xyz", ":")
    write(tmp_path / "run.json", frames)
    arguments = ["evaluate", folder / "model.tmn", tmp_path / "run.json"]
    assert "--format json" in fails(capsys, 1, *arguments)
    assert "did you mean 'json'" in fails(capsys, 1, *arguments, "--format", "jsn")
    for name in ("json", "ase/json"):
        code, out, _ = run(capsys, *arguments, "--format", name, "--json")
        assert code == 0 and json.loads(out)["energy"]["mae"] == pytest.approx(0.03, rel=1e-6)


def test_evaluate_units_keys_and_split(capsys, folder, tmp_path):
    frames = read(folder / "data.xyz", ":")
    for atoms in frames:
        atoms.info["E"] = atoms.get_potential_energy() / 27.211386245988
        atoms.arrays["F"] = atoms.get_forces() / 27.211386245988
        atoms.calc = None
    write(tmp_path / "hartree.xyz", frames)
    named = ["--energy-key", "E", "--forces-key", "F", "--energy-unit", "hartree", "--json"]
    _, out, _ = run(capsys, "evaluate", folder / "model.tmn", tmp_path / "hartree.xyz", *named)
    assert json.loads(out)["forces"]["mae"] == pytest.approx(0.2, rel=1e-4)
    (tmp_path / "splits.json").write_text(
        json.dumps({"test": {"files": [str(folder / "data.xyz")], "indices": [1, 4]}})
    )
    split = ["--split", tmp_path / "splits.json"]
    _, out, _ = run(capsys, "evaluate", folder / "model.tmn", folder / "data.xyz", "--json", *split)
    assert json.loads(out)["frames"] == 2
    for k in range(5):
        (tmp_path / f"{k}.xyz").write_text((folder / "data.xyz").read_text())
    _, out, _ = run(capsys, "evaluate", folder / "model.tmn", *[tmp_path / f"{k}.xyz" for k in range(5)])
    assert " and 2 more files" in " ".join(out.split()) and "3.xyz" not in out
    arguments = ["evaluate", folder / "model.tmn", folder / "data.xyz"]
    assert "train" in fails(capsys, 2, *arguments, *split, "--subset", "train")
    assert "--split" in fails(capsys, 2, *arguments, "--subset", "train")
    splits = json.loads((tmp_path / "splits.json").read_text())
    splits["test"]["indices"] = []
    (tmp_path / "empty.json").write_text(json.dumps(splits))
    assert "'test' subset has no frames" in fails(capsys, 2, *arguments, "--split", tmp_path / "empty.json")
    other = ["evaluate", folder / "model.tmn", tmp_path / "hartree.xyz", *named, *split]
    assert "belong to other frames" in fails(capsys, 1, *other)
    assert fails(capsys, 1, *arguments, "--energy-key", "wrong")
    write(tmp_path / "energies.xyz", [Atoms(a.numbers, a.positions, info={"e": 1.0}) for a in frames])
    only = ["evaluate", folder / "model.tmn", tmp_path / "energies.xyz", "--energy-key", "e"]
    assert "no frame has 'forces'" in fails(capsys, 1, *only)
    _, out, _ = run(capsys, *only, "--forces-key", "null", "--json")
    assert json.loads(out).keys() == {"frames", "energy", "energy_per_atom"}
    plain = [*only, "--forces-key", "null", "--charge-key"]
    assert "no frame has 'Q', which is the key of charge" in (said := fails(capsys, 1, *plain, "Q"))
    assert "`evaluate` --charge-key null" in said and run(capsys, *plain, "null")[0] == 0


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *((name, f"(in `evaluate` --{name}-key null, in `train` --set data.keys.{name}=null)") for name in KEY_OPTIONS),
        ("scalar:loss_weight", "Set weight to null if it has none (in `train` --set data.keys.weight=null)"),
        ("scalar:group", "Set group to null if it has none (in `train` --set data.keys.group=null)"),
        ("scalar:config_type", "take config_weights out of training.loss"),
        ("scalar:gap", "take gap out of data.keys.properties"),
    ],
)
def test_the_remedy_for_a_missing_label_is_one_that_there_is(capsys, tmp_path, name, remedy):
    said = str(missing_key(name, "X", ["Y"], "a.xyz"))
    assert remedy in said
    for option in re.findall(r"--\w+-key", said):
        _, out, _ = run(capsys, "evaluate", "--help")
        assert f"{option} NAME" in out
    text = {"model": {"name": "tensornet"}, "data": {"train": "a.xyz", "keys": {}}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(text))
    for key in re.findall(r"--set data.keys.(\w+)=null", said):
        code, out, _ = run(capsys, "config", tmp_path / "a.yaml", "--set", f"data.keys.{key}=null")
        assert code == 0 and yaml.safe_load(out)["data"]["keys"][key] is None


def test_data_without_labels_are_for_score(capsys, folder, tmp_path):
    """What else the file has is no label that could be left out; with one label, another is."""
    atoms = molecule("H2O")
    atoms.info.update(smiles="O", E_dft=-1.0)
    for given in (["smiles", "E_dft"], []):
        atoms.info = {name: atoms.info[name] for name in given}
        write(tmp_path / "bare.xyz", atoms)
        said = fails(capsys, 1, "evaluate", folder / "model.tmn", tmp_path / "bare.xyz")
        assert "to predict without labels, take `torchmdnet2 score`" in said and "null" not in said
        assert "The file has: E_dft, smiles. Name its labels" in said or not given
    atoms.info["E_dft"] = -1.0
    write(tmp_path / "bare.xyz", atoms)
    said = fails(capsys, 1, "evaluate", folder / "model.tmn", tmp_path / "bare.xyz", "--energy-key", "E_dft")
    assert "--forces-key null" in said and "score" not in said


def test_options_of_evaluate_that_cannot_be(capsys, folder, tmp_path, monkeypatch):
    model, data = folder / "model.tmn", folder / "data.xyz"
    for more, words in (
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--dipole-key", "mu"], "--dipole-key: "),
        (["--charges-key", "q"], "does not predict charges"),
        (["--stress-unit", "GPa"], "--stress-unit has no effect: no stress is read from the data"),
        (["--dipole-unit", "debye"], "--dipole-unit has no effect"),
        (["--forces-unit", "eV/angstrom", "--forces-key", "null"], "--forces-unit has no effect"),
    ):
        assert words in fails(capsys, 2, "evaluate", model, data, *more)
    assert "the model comes first" in fails(capsys, 2, "evaluate", data, model)
    assert "only models are given: name the data too" in fails(capsys, 2, "evaluate", model, model)
    monkeypatch.chdir(tmp_path)
    for name in ("a0.xyz", "a1.xyz", "b.xyz"):
        (tmp_path / name).write_bytes(data.read_bytes())
    assert "file@index chooses frames of one file" in fails(capsys, 2, "evaluate", model, "a*.xyz", "b.xyz@0")


def test_evaluate_writes_predictions(capsys, folder, tmp_path):
    model, data, out = folder / "model.tmn", folder / "data.xyz", tmp_path / "predicted.xyz"
    code, text, _ = run(capsys, "evaluate", model, data, "--json", "--output", out, "--batch-size", "4")
    frames, given = read(out, ":"), read(data, ":")
    errors = [a.get_potential_energy() - a.info["reference_energy"] for a in frames]
    assert code == 0 and np.abs(errors).mean() == pytest.approx(json.loads(text)["energy"]["mae"], rel=1e-6)
    differences = [a.get_forces() - a.arrays["reference_forces"] for a in frames]
    assert np.abs(differences).mean() == pytest.approx(json.loads(text)["forces"]["mae"], rel=1e-5)
    assert [a.info["frame"] for a in frames] == [f"{data}, frame {k}" for k in range(6)]
    for atoms in given:
        atoms.calc = None
    write(tmp_path / "bare.xyz", given)
    bare = ["evaluate", model, tmp_path / "bare.xyz"]
    assert "no frame has 'energy'" in fails(capsys, 1, *bare, "--output", tmp_path / "x.xyz")
    assert "--output" in fails(capsys, 2, *bare, "--unlabelled")
    assert "6 frames are in" in run(capsys, *bare, "--unlabelled", "--output", tmp_path / "x.xyz")[1]
    again = read(tmp_path / "x.xyz", ":")
    for one, two in zip(again, frames, strict=True):
        assert one.get_potential_energy() == two.get_potential_energy()
        assert np.array_equal(one.get_forces(), two.get_forces()) and "reference_forces" not in one.arrays
    missing = tmp_path / "none" / "x.xyz"
    assert "none" in fails(capsys, 1, *bare, "--unlabelled", "--output", missing)
    for mine, words in ((model, "must end in .xyz"), (data, "would be written too")):
        before = mine.read_bytes()
        assert words in fails(capsys, 2, "evaluate", model, data, "--output", mine)
        assert mine.read_bytes() == before


# --- train, import -----------------------------------------------------------------------------------------------


def test_train_then_evaluate_gives_the_stored_errors(capsys, folder, tmp_path):
    """Bar R30."""
    config = {
        "data": {"train": str(folder / "data.xyz"), "split": {"validation": 2, "test": 2}},
        "model": CONFIG["model"],
        "training": {"max_epochs": 2, "batch_size": 1, "device": "cpu"},
        "output": {"folder": str(tmp_path / "run")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert "max_epochs" in fails(capsys, 2, "train", tmp_path / "c.yaml", "--set", "training.max_epoch=3")
    assert not (tmp_path / "run").exists()
    assert run(capsys, "train", tmp_path / "c.yaml", "--check")[0] == 0
    assert run(capsys, "train", tmp_path / "c.yaml")[0] == 0
    assert run(capsys, "train", tmp_path / "c.yaml", "--resume", "auto")[0] == 0
    model = tmp_path / "run" / "best.tmn"
    stored = json.loads(run(capsys, "info", model, "--json")[1])["metadata"]["errors"]["test"]
    split = ["--split", tmp_path / "run" / "splits.json", "--json", "--devices", "cpu"]
    code, out, _ = run(capsys, "evaluate", model, folder / "data.xyz", *split)
    found = json.loads(out)
    assert code == 0 and stored.keys() == found.keys() - {"frames"}
    for name in ("energy", "energy_per_atom", "forces"):
        assert found[name]["mae"] == pytest.approx(stored[name]["mae"], rel=1e-6)
        assert found[name]["rmse"] == pytest.approx(stored[name]["rmse"], rel=1e-6)
    # and through ASE and OpenMM
    frames = read(folder / "data.xyz", ":")
    indices = json.loads((tmp_path / "run" / "splits.json").read_text())["test"]["indices"]
    calc = TorchMDNet2Calculator(model, dtype="float64")
    for host in (lambda atoms: calc.get_property("forces", atoms), lambda atoms: openmm_forces(model, atoms)):
        errors = np.concatenate([host(frames[i].copy()) - frames[i].get_forces() for i in indices])
        assert np.abs(errors).mean() == pytest.approx(stored["forces"]["mae"], rel=1e-6)


def openmm_forces(model, atoms):
    """eV/Å, by way of kJ/mol/nm."""
    app = pytest.importorskip("openmm.app")
    import openmm

    from torchmdnet2.adapters.openmm import create_force

    topology, system = app.Topology(), openmm.System()
    residue = topology.addResidue("MOL", topology.addChain())
    for number, mass in zip(atoms.numbers, atoms.get_masses(), strict=True):
        topology.addAtom("A", app.Element.getByAtomicNumber(int(number)), residue)
        system.addParticle(mass)
    system.addForce(create_force(model, topology, dtype="float64"))
    reference = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), reference)
    context.setPositions(atoms.positions / 10)
    forces = context.getState(getForces=True).getForces(asNumpy=True)
    return forces.value_in_unit(openmm.unit.kilojoule_per_mole / openmm.unit.nanometer) / 964.8533212331


def test_export_and_import(capsys, folder, tmp_path):
    """To TorchMD-Net's format and back: the same energies."""
    assert run(capsys, "export", folder / "model.tmn", tmp_path / "theirs.ckpt")[0] == 0
    arguments = ["import", tmp_path / "theirs.ckpt", tmp_path / "back.tmn", "--elements", "H,O"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "wrote" in out
    first, second = (
        TorchMDNet2Calculator(path, dtype="float64").get_property("energy", molecule("H2O"))
        for path in (folder / "model.tmn", tmp_path / "back.tmn")
    )
    assert first == pytest.approx(second, rel=1e-6)
    assert fails(capsys, 1, "export", folder / "model.tmn", tmp_path / "no" / "such" / "folder.ckpt")


def test_import_of_a_training_yaml(capsys, tmp_path):
    (tmp_path / "theirs.yaml").write_text("model: tensornet\nembedding_dimension: 16\ncutoff_upper: 4.5\n")
    code, _, err = run(capsys, "import", tmp_path / "theirs.yaml", tmp_path / "ours.yaml")
    assert code == 0, err
    converted = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert converted["model"]["hidden_channels"] == 16 and converted["model"]["cutoff"] == 4.5


def test_import_refuses_what_is_not_a_checkpoint(capsys, folder, tmp_path):
    err = fails(capsys, 1, "import", folder / "water.xyz", tmp_path / "m.tmn")
    assert "checkpoint" in err and not (tmp_path / "m.tmn").exists()
    assert "Xx" in fails(capsys, 2, "import", folder / "water.xyz", tmp_path / "m.tmn", "--elements", "H,Xx")


def test_config_from_torchmd_net(capsys, tmp_path):
    (tmp_path / "theirs.yaml").write_text("model: tensornet\nembedding_dimension: 64\ncutoff_upper: 4.5\nlr: 1e-4\n")
    code, out, _ = run(capsys, "config", "--from-torchmd-net", tmp_path / "theirs.yaml")
    ours = yaml.safe_load(out)
    assert code == 0 and ours["model"]["hidden_channels"] == 64 and ours["model"]["cutoff"] == 4.5
    (tmp_path / "theirs.yaml").write_text("model: tensornet\nembeding_dimension: 64\n")
    assert "embeding_dimension" in fails(capsys, 2, "config", "--from-torchmd-net", tmp_path / "theirs.yaml")


@pytest.mark.parametrize("more", [["--learn"], ["--model", "transformer"], ["--from-torchmd-net", "theirs.yaml"]])
def test_one_configuration_at_a_time(capsys, more):
    assert "print different configurations" in fails(capsys, 2, "config", "own.yaml", *more)
