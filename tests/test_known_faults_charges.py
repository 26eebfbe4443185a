"""Wrong answers that version 0.1.0 gave about charges, and rough edges of the Python interface, one test each."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from tiny import ethanol, tiny_potential
from variants import VARIANTS, variant

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import save, to_bytes
from torchmdnet2.cli import main
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.errors import UntrainedCharge, UntrainedChargeWarning
from torchmdnet2.md import MDOptions, check_stability, run_md

FAST = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
NEUTRAL = tiny_potential(total_charges=[0])
COMPILED = tiny_potential(dtype=torch.float32, model=FAST, total_charges=[0], noise=0.05)
WORDS = r"the total charge 1, and this model was trained on structures of charge 0 only; allow_untrained_charge=True"


def ion(charge: float = 1.0, dtype: torch.dtype = torch.float64) -> System:
    return System.from_ase(ethanol(), dtype=dtype).replace(charge=torch.tensor([charge], dtype=dtype))


def charged(atoms: Atoms, charge: int = 1) -> Atoms:
    atoms.info["charge"] = charge
    return atoms


def allowing(potential):
    potential = copy.deepcopy(potential)
    potential.allow_untrained_charge = True
    return potential


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("charges") / "neutral.tmn"
    save(NEUTRAL, path)
    return path


# --- charges that the model was not trained on ---------------------------------------------------------------------


def test_untrained_charge_is_refused():
    """By the potential, its evaluator and a bound step, also in a batch; what was trained is not."""
    for call in (NEUTRAL, Evaluator(NEUTRAL), Evaluator(NEUTRAL).bind):
        with pytest.raises(UntrainedCharge, match=f"structure 0 has {WORDS}"):
            call(ion())
        with pytest.raises(UntrainedCharge, match="structure 1 has the total charge -2"):
            call(System.concatenate([ion(0.0), ion(-2.0)]))
        call(ion(0.0))
    assert torch.isfinite(tiny_potential(total_charges=[-1, 0, 1])(ion()).energy).all()


def test_untrained_charge_on_the_compiled_path():
    """A structure that only its charge makes another one, after one that was good."""
    pytest.importorskip("numba")
    evaluator, good = Evaluator(COMPILED), ion(0.0, torch.float32)
    assert "compiled" in evaluator.report()
    evaluator(good)
    for call in (evaluator, evaluator.bind):
        with pytest.raises(UntrainedCharge, match=WORDS):
            call(good.replace(charge=torch.ones(1)))
    evaluator(good)


def test_untrained_charge_on_purpose():
    """The same numbers as of a model that says nothing, and a warning; taking the permission back is noticed."""
    for source in (NEUTRAL, COMPILED):
        potential, system = allowing(source), ion(dtype=source.dtype)
        silent = tiny_potential(
            dtype=source.dtype, noise=0.05 if source is COMPILED else 0.2, model=source.config["model"]
        )
        with pytest.warns(UntrainedChargeWarning, match="a structure has the total charge 1, and this model was"):
            energy = potential(system).energy
        evaluator = Evaluator(potential)
        assert torch.equal(energy, silent(system).energy)
        torch.testing.assert_close(evaluator(system).energy, energy, rtol=0, atol=1e-3)
        potential.allow_untrained_charge = False
        with pytest.raises(UntrainedCharge):
            evaluator(system)


def test_odd_numbers_of_electrons_are_refused_by_models_of_closed_shells(tmp_path):
    """A forgotten charge or H atom: by the potential, its steps, ASE and OpenMM, and in a batch; also from a file."""
    potential = tiny_potential(total_charges=[0, 1], closed_shell=True)
    words = r"an odd number of electrons, 25 with the total charge 1, .* closed shells only: check the charge and"
    for call in (potential, Evaluator(potential), Evaluator(potential).bind):
        with pytest.raises(UntrainedCharge, match="structure 0 has " + words):
            call(ion())
        with pytest.raises(UntrainedCharge, match="structure 1 has " + words):
            call(System.concatenate([ion(0.0), ion()]))
        call(ion(0.0))
    save(potential, tmp_path / "m.tmn")
    assert load(tmp_path / "m.tmn").closed_shell
    with pytest.raises(UntrainedCharge, match=words):
        TorchMDNet2Calculator(tmp_path / "m.tmn", charge=1).get_potential_energy(ethanol())
    with pytest.warns(UntrainedChargeWarning, match="an odd number of electrons"):
        allowing(potential)(ion())
    with pytest.raises(ValueError, match="closed_shell: the potential has False, and its config"):
        potential.closed_shell = False
        save(potential, tmp_path / "m.tmn")
    tiny_potential(total_charges=[0, 1])(ion())


def test_the_word_charge_in_a_comment_is_no_charge(tmp_path, capsys):
    """ASE reads "ethanol, charge 0" as charge=True, which is 1: ethanol was simulated as a cation."""
    save(tiny_potential(total_charges=[0, 1]), tmp_path / "m.tmn")
    write(tmp_path / "start.xyz", ethanol(), format="xyz", comment="ethanol, charge 0")
    atoms = read(tmp_path / "start.xyz")
    words = "charge must be a whole number, got True: in the comment line of a file, write charge=0"
    with pytest.raises(ValueError, match=words):
        System.from_ase(atoms)
    with pytest.raises(ValueError, match=words):
        TorchMDNet2Calculator(tmp_path / "m.tmn").get_potential_energy(atoms)
    with pytest.raises(ValueError, match=words):
        TorchMDNet2Calculator(tmp_path / "m.tmn").get_potential_energy(charged(ethanol(), np.bool_(True)))
    assert main(["md", str(tmp_path / "m.tmn"), str(tmp_path / "start.xyz"), "--time", "0.001"]) == 1
    assert words in capsys.readouterr().err


def test_untrained_charge_in_an_ensemble(model_file, tmp_path):
    other = tmp_path / "other.tmn"
    save(tiny_potential(seed=1, total_charges=[0, 1]), other)
    with pytest.raises(UntrainedCharge):
        Ensemble.load([model_file, other])(ion())
    with pytest.warns(UntrainedChargeWarning):
        Ensemble.load([model_file, other], allow_untrained_charge=True)(ion())
    with pytest.raises(UntrainedCharge):
        CommitteeCalculator([model_file, other]).get_potential_energy(charged(ethanol()))


def test_untrained_charge_in_ase(model_file):
    """From info or the constructor; the permission survives copies and pickles."""
    atoms = ethanol()
    atoms.calc = TorchMDNet2Calculator(model_file)
    neutral = atoms.get_potential_energy()
    with pytest.raises(UntrainedCharge, match=WORDS):
        charged(atoms).get_potential_energy()
    with pytest.raises(UntrainedCharge):
        atoms.calc.get_hessian(atoms)
    with pytest.raises(UntrainedCharge, match="frame 1 has the total charge 1"):
        list(atoms.calc.evaluate([ethanol(), atoms]))
    assert charged(atoms, 0).get_potential_energy() == neutral
    with pytest.raises(UntrainedCharge):
        TorchMDNet2Calculator(model_file, charge=1).get_potential_energy(ethanol())
    calc = TorchMDNet2Calculator(model_file, charge=1, allow_untrained_charge=True)
    for same in (calc, copy.deepcopy(calc), pickle.loads(pickle.dumps(calc))):  # our own pickle
        with pytest.warns(UntrainedChargeWarning):
            assert same.get_potential_energy(ethanol()) != neutral


def test_untrained_charge_in_openmm(model_file, tmp_path):
    """When the force or the system is made; the permission is in the XML."""
    openmm = pytest.importorskip("openmm")
    from adapters.openmm_cases import context_of, evaluate, ml_system

    with pytest.raises(UntrainedCharge, match=WORDS):
        ml_system(model_file, ethanol(), charge=1)
    with pytest.raises(ValueError, match="spin multiplicity 3"):
        ml_system(model_file, ethanol(), spin=3)
    closed = tmp_path / "closed.tmn"
    save(tiny_potential(total_charges=[0, 1], closed_shell=True), closed)
    with pytest.raises(UntrainedCharge, match="an odd number of electrons, 25"):
        ml_system(closed, ethanol(), charge=1)
    with pytest.warns(UntrainedChargeWarning):
        system = ml_system(model_file, ethanol(), charge=1, allow_untrained_charge=True)
    again = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
    assert evaluate(context_of(again, ethanol()))[0] == evaluate(context_of(system, ethanol()))[0]


def test_untrained_charge_and_unknown_spin_in_openmmml(model_file):
    """Also a spin that the model does not know: when the system is made, not at its first energy."""
    openmmml = pytest.importorskip("openmmml")
    from adapters.openmm_cases import topology_of

    from torchmdnet2.adapters.openmmml import TorchMDNet2Factory

    if "torchmdnet2" not in openmmml.MLPotential._implFactories:
        openmmml.MLPotential.registerImplFactory("torchmdnet2", TorchMDNet2Factory())
    potential = openmmml.MLPotential("torchmdnet2", modelPath=str(model_file))
    topology = topology_of(ethanol())
    with pytest.raises(UntrainedCharge):
        potential.createSystem(topology, charge=1, device="cpu")
    with pytest.raises(ValueError, match="spin multiplicity 3"):
        potential.createSystem(topology, multiplicity=3, device="cpu")
    with pytest.warns(UntrainedChargeWarning):
        potential.createSystem(topology, charge=1, device="cpu", allow_untrained_charge=True)


def test_untrained_charge_in_torch_sim(model_file):
    ts = pytest.importorskip("torch_sim")
    from torchmdnet2.adapters.torch_sim import TorchMDNet2Model

    state = ts.io.atoms_to_state([charged(ethanol())], "cpu", torch.float64, system_extras_map={"charge": "charge"})
    with pytest.raises(UntrainedCharge):
        TorchMDNet2Model(model_file)(state)
    with pytest.warns(UntrainedChargeWarning):
        TorchMDNet2Model(model_file, allow_untrained_charge=True)(state)


def test_untrained_charge_in_dynamics(model_file, tmp_path):
    """Before any file is written; of `stability` with the number of the frame."""
    options = MDOptions(steps=1, output=str(tmp_path / "md"))
    with pytest.raises(UntrainedCharge, match=WORDS):
        run_md(model_file, ethanol(), options, charge=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UntrainedCharge, match="frame 1 has the total charge 1"):
        check_stability(model_file, [ethanol(), charged(ethanol())], replicas=2, time=0.001)
    with pytest.warns(UntrainedChargeWarning):
        run_md(model_file, ethanol(), options, charge=1, allow_untrained_charge=True)


def test_untrained_charge_on_the_command_line(model_file, tmp_path, capsys, monkeypatch):
    """`md`, `stability` and `evaluate`: one line with the remedy; with the option, one that says what is done."""
    monkeypatch.chdir(tmp_path)
    atoms = charged(ethanol())
    atoms.calc = SinglePointCalculator(atoms, energy=1.0, forces=np.zeros((9, 3)))
    write("ion.xyz", [ethanol(), atoms])
    commands = {
        ("md", model_file, "ion.xyz", "--steps", 1): "the start structure",
        ("stability", model_file, "ion.xyz@1", "--time", 0.001, "--replicas", 1, "--temperatures", 1): "frame 1",
        ("evaluate", model_file, "ion.xyz"): "ion.xyz",
    }
    for command, named in commands.items():
        arguments = [*map(str, command), "--device", "cpu"]
        assert main(arguments) == 1
        error = capsys.readouterr().err
        *notes, last = error.splitlines()
        assert (
            named in last and "--allow-untrained-charge" in last and all(n.startswith("note: ion.xyz") for n in notes)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main([*arguments, "--allow-untrained-charge"]) == 0
        assert "warning: a structure has the total charge 1, and" in capsys.readouterr().err


# --- what the file says -----------------------------------------------------------------------------------------------


def test_a_file_says_which_charges_it_was_trained_on(model_file):
    """Kept by saving and loading; files of before say it in their metadata; who says nothing is not refused."""
    assert load(model_file).total_charges == [0.0]
    again = load(model_file)
    assert to_bytes(again) == model_file.read_bytes()
    before = tiny_potential()
    before.metadata = {"data": {"charges": [-1, 0]}}
    path = model_file.parent / "before.tmn"
    save(before, path)
    assert load(path).total_charges == [-1.0, 0.0]
    save(load(path), path)
    with pytest.raises(UntrainedCharge, match="charge -1, 0 only"):
        load(path)(ion())
    for metadata in ({}, {"data": "some"}, {"data": {"charges": "0"}}, {"data": {"charges": [None]}}):
        before.metadata = metadata
        save(before, path)
        assert load(path).total_charges is None
        load(path)(ion())
    changed = load(model_file)
    changed.total_charges = None
    with pytest.raises(ValueError, match="total_charges: the potential has None"):
        to_bytes(changed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training on frames of charge 0 and 1, with a test frame of charge 2; and its data."""
    folder = tmp_path_factory.mktemp("trained")
    frames = []
    for k in range(12):
        atoms = charged(molecule("H2O"), 2 if k == 11 else k % 2)
        atoms.rattle(0.05, seed=k)
        atoms.calc = SinglePointCalculator(atoms, energy=-5.0 + 0.01 * k, forces=0.1 * np.ones((3, 3)))
        frames.append(atoms)
    write(folder / "a.xyz", frames[:8])
    write(folder / "b.xyz", frames[8:10])
    write(folder / "c.xyz", frames[10:])
    return folder


def config(folder, name: str, model: dict, **more) -> list[str]:
    """Arguments of a training that takes a second."""
    size = {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10}
    text = {
        "data": {"train": str(folder / "a.xyz"), "validation": str(folder / "b.xyz"), "test": str(folder / "c.xyz")},
        "model": {**size, **model},
        "training": {"max_epochs": 1, "batch_size": 4, "device": "cpu"},
        "output": {"folder": str(folder / name), "report": False},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(text))
    return ["train", str(path)]


@pytest.mark.parametrize("model", [{"name": "tensornet"}, {"name": "transformer", "num_heads": 2}])
def test_training_takes_any_charge_and_says_which(trained, capsys, model):
    """The training and its own errors are not refused; what is new in the test frames is noted."""
    name = model["name"]
    assert main(config(trained, name, model)) == 0
    said = capsys.readouterr()
    assert "test frames have the total charges 2, which no training frame has" in said.out + said.err
    potential = load(trained / name / "best.tmn")
    assert potential.total_charges == [0.0, 1.0]
    good, *bad = ([1.0], 2.0) if name == "tensornet" else ([0.0], 1.0, 2.0)
    water = System.from_ase(molecule("H2O"))
    potential(water.replace(charge=torch.tensor(good)))
    for charge in bad:
        with pytest.raises(UntrainedCharge):
            potential(water.replace(charge=torch.tensor([charge])))
    assert main(["evaluate", str(trained / name / "best.tmn"), str(trained / "c.xyz"), "--device", "cpu"]) == 1


def test_fine_tuning_adds_its_charges(trained):
    """To those of the file; a file that says nothing goes on to say nothing."""
    size = {"hidden_channels": 8, "num_layers": 1, "num_rbf": 6, "cutoff": 3.0, "max_z": 10, "name": "tensornet"}
    for k, (known, after) in enumerate((([-1], [-1.0, 0.0, 1.0]), (None, None))):
        base = tiny_potential(model=size, priors=[], elements=[1, 8], total_charges=known, dtype=torch.float32)
        save(base, trained / "base.tmn")
        name = f"tuned{k}"
        assert main(config(trained, name, {"name": "tensornet"}, init={"file": str(trained / "base.tmn")})) == 0
        assert load(trained / name / "best.tmn").total_charges == after


# --- models that do not use the charge -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_model_that_ignores_the_charge_refuses_it(kind):
    """Either the energy changes with the charge, or charges are refused."""
    potential = variant(kind)
    energies = [float(potential(ion(q), forces=False).energy) for q in (0.0, 3.0)]
    potential.allow_untrained_charge = False
    assert potential.reads_charge == (energies[0] != energies[1]) == kind.startswith(("tensornet", "aimnet2"))
    if not potential.reads_charge:
        for q in (3.0, 0.5, 1000.0):
            with pytest.raises(UntrainedCharge, match="does not use"):
                potential(ion(q))


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (False, {"model": {**FAST, "num_layers": 0}}),
        (False, {"model": {**FAST, "name": "tensornet2", "q_dim": 0}}),
        (False, {"model": {**FAST, "name": "transformer", "num_heads": 4}, "properties": [{"name": "charges"}]}),
        (False, {"model": {**FAST, "name": "graph_network"}, "priors": [{"name": "coulomb", "charges": {"O": -0.5}}]}),
        (True, {"model": {**FAST, "name": "graph_network"}, "properties": [{"name": "charges"}], "head": None}),
        (
            True,
            {
                "model": {**FAST, "name": "graph_network"}, "properties": [{"name": "charges"}],
                "priors": [{"name": "coulomb", "damping": "exp"}],
            },
        ),
        (True, {"model": {**FAST, "group": "SO(3)"}}),
    ],
)  # fmt: skip
def test_which_models_look_at_the_charge(seen, changes):
    """By layers, charges of the network, and priors of predicted charges; fixed charges by element know nothing."""
    potential = allowing(tiny_potential(**{"priors": [], **changes}))
    assert potential.reads_charge == seen
    results = [potential(ion(q)) for q in (0.0, 1.0)]
    differs = not torch.equal(results[0].energy, results[1].energy)
    assert differs == seen or (potential.head is None and not torch.equal(results[0].charges, results[1].charges))


def test_one_charge_of_training_is_known_to_any_model():
    """A model of ions of charge 1 alone knows these, and not neutral structures, whether it looks at charges or not."""
    for potential in (tiny_potential(total_charges=[1]), variant("transformer", total_charges=[1])):
        potential.allow_untrained_charge = False
        potential(ion(1.0))
        with pytest.raises(UntrainedCharge, match="charge 1 only"):
            potential(ion(0.0))
        assert TorchMDNet2Calculator(potential, charge=1).get_potential_energy(ethanol())
