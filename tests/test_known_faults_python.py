"""Wrong answers and rough edges of the Python interface of version 0.1.0, but for charges, one test each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.io import read, write
from tiny import ethanol, silicon, tiny_potential

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.adapters.ase import CommitteeCalculator, TorchMDNet2Calculator
from torchmdnet2.checkpoint import save
from torchmdnet2.errors import UnknownElement

POTENTIAL = tiny_potential()
FAST = {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": 4.5, "max_z": 20}
COMPILED = tiny_potential(dtype=torch.float32, model=FAST, noise=0.05)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("python") / "tiny.tmn"
    potential = tiny_potential()
    potential.metadata = {"data": {"level_of_theory": "GFN2-xTB"}}
    save(potential, path)
    return path


# --- many structures through ASE ------------------------------------------------------------------------------------


def test_frames_are_numbered_as_the_user_does():
    """Frame 16 of 20 in batches of 7 is the third of its batch; atoms are counted within it."""
    calc = TorchMDNet2Calculator(POTENTIAL)
    frames = [ethanol() for _ in range(20)]
    faults = {
        "spin": ("info", 3, ValueError, "frame 16 has spin multiplicity 3"),
        "numbers": ("numbers", 16, UnknownElement, "frame 16: atom 8 is S"),
        "positions": ("positions", np.nan, ValueError, "frame 16: atom 8: its position is not finite"),
        "charge": ("info", 0.5, ValueError, "frame 16: charge must be a whole number"),
    }
    for key, (place, value, kind, words) in faults.items():
        wrong = ethanol()
        if place == "info":
            wrong.info[key] = value
        else:
            getattr(wrong, place)[8] = value
        with pytest.raises(kind, match=words):
            list(calc.evaluate([*frames[:16], wrong, *frames[17:]], batch_size=7))


@pytest.mark.parametrize("committee", [False, True])
def test_stress_of_a_molecule_among_crystals(committee):
    """NaN for the molecule, and for the others what they have alone."""
    calc = CommitteeCalculator([POTENTIAL, tiny_potential(seed=1)]) if committee else TorchMDNet2Calculator(POTENTIAL)
    frames = [silicon(), molecule("H2O"), silicon(), Atoms("O")]
    results = list(calc.evaluate(frames, stress=True))
    for atoms, found in zip(frames, results, strict=True):
        assert found["energy"] == pytest.approx(calc.get_property("energy", atoms), rel=1e-12)
        for name in ("stress", "stress_std") if committee else ("stress",):
            if atoms.cell.rank == 3:
                np.testing.assert_allclose(found[name], calc.get_property(name, atoms), atol=1e-12)
            else:
                assert found[name].shape == (6,) and np.isnan(found[name]).all()
    assert all(np.isfinite(found["stress"]).all() for found in calc.evaluate(frames[:1], stress=True))


def test_a_database_says_which_model_it_was(model_file, tmp_path):
    """todict was empty: file, checksum, level of theory of each member, also after ASE has stored it."""
    pytest.importorskip("ase.db")
    from ase.db import connect

    from torchmdnet2.checkpoint import read_header

    calc = TorchMDNet2Calculator(model_file)
    (model,) = calc.todict()["models"]
    assert model["file"] == str(model_file) and model["sha256"] == read_header(model_file)["sha256"]
    assert (model["level_of_theory"], model["dtype"]) == ("GFN2-xTB", "float64")
    both = CommitteeCalculator([model_file, POTENTIAL]).todict()["models"]
    assert [m["file"] for m in both] == [str(model_file), None]
    atoms = ethanol()
    atoms.calc = calc
    atoms.get_potential_energy()
    with connect(tmp_path / "a.db") as database:
        database.write(atoms)
    assert connect(tmp_path / "a.db").get(1).calculator_parameters["models"] == [model]
    write(tmp_path / "a.traj", atoms)
    assert read(tmp_path / "a.traj").get_potential_energy() == atoms.get_potential_energy()


# --- two atoms at the same place ------------------------------------------------------------------------------------


def doubled(dtype: torch.dtype = torch.float64, distance: float = 0.0) -> System:
    system = System.from_ase(ethanol(), dtype=dtype)
    system.pos[7] = system.pos[2] + torch.tensor([distance, 0, 0])
    return system


@pytest.mark.parametrize("source", [POTENTIAL, COMPILED], ids=["autograd", "compiled"])
@pytest.mark.parametrize("periodic", [False, True])
def test_two_atoms_at_the_same_place(source, periodic):
    """Named by the potential, its evaluator and a bound step, also after good positions; near atoms are not refused."""
    cell = 9 * torch.eye(3) if periodic else None

    def system(distance: float) -> System:
        made = doubled(source.dtype, distance)
        return made if cell is None else System(z=made.z, pos=made.pos, cell=cell)

    words = "atom 2 and atom 7 are at the same place"
    evaluator = Evaluator(source)
    good, bad = system(0.01), [system(0.0), system(5e-4)]
    evaluator(good), source(good)
    step = evaluator.bind(good)
    for wrong in bad:
        for call in (source, evaluator, evaluator.bind):
            with pytest.raises(ValueError, match=words):
                call(wrong)
        step.pos.copy_(wrong.pos)
        step.replay()
        assert torch.isnan(step.energy).all()
        with pytest.raises(ValueError, match=words):
            step.fetch()
        step.pos.copy_(good.pos)
        step.replay()
        assert torch.isfinite(step.fetch().energy).all()


def test_an_atom_on_its_own_image():
    """A cell of no width in one direction that is allowed otherwise."""
    system = System(z=torch.tensor([8]), pos=torch.zeros(1, 3), cell=torch.diag(torch.tensor([5e-4, 9.0, 9.0])))
    with pytest.raises(ValueError, match="atom 0 and its own periodic image are at the same place"):
        tiny_potential(priors=[], model={**FAST, "cutoff": 0.01})(system)


# --- what is given --------------------------------------------------------------------------------------------------


def test_what_is_no_system_is_told_what_to_give():
    for call in (POTENTIAL, Evaluator(POTENTIAL), Evaluator(POTENTIAL).bind):
        with pytest.raises(TypeError, match=r"got Atoms: give System\.from_ase\(atoms\)"):
            call(ethanol())
        with pytest.raises(TypeError, match=r"got dict: give System\(z=…, pos=…\)"):
            call({"z": [1]})


def test_what_is_no_potential_is_told_what_to_give(model_file):
    with pytest.raises(TypeError, match=r"got the path of a file: give torchmdnet2\.load\('x\.tmn'\)"):
        Evaluator("x.tmn")
    with pytest.raises(TypeError, match="got the path of a file"):
        Evaluator(model_file)
    with pytest.raises(TypeError, match="a Potential is needed, got Linear"):
        Evaluator(torch.nn.Linear(1, 1))


def test_load_takes_names_of_types_and_devices(model_file):
    for name in ("float32", "single", torch.float32):
        assert load(model_file, dtype=name).dtype == torch.float32
    assert load(model_file, dtype="float64", device="cpu").dtype == torch.float64
    with pytest.raises(ValueError, match="dtype must be float32 or float64, got half"):
        load(model_file, dtype="half")
    for device in ("cuda:97", "abacus"):
        with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
            load(model_file, device=device)
