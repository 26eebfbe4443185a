"""The shipped potentials on frames of unseen molecules that the teacher labelled: they must not change unnoticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import molecule
from ase.io import read

from torchmdnet2 import Evaluator, System, load
from torchmdnet2.checkpoint import read_header
from torchmdnet2.core.stated import is_flag
from torchmdnet2.errors import UnknownElement, UntrainedCharge
from torchmdnet2.potentials import find_model, named_models

FROZEN = Path(__file__).parent / "golden" / "organic" / "frozen.npz"
ELEMENTS = [1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 53]
NAMES = ("organic", "organic-1", "organic-small")
AT_ONCE = 10  # frames


@pytest.fixture(scope="module")
def frozen():
    """The arrays, and the frames in batches."""
    data = dict(np.load(FROZEN, allow_pickle=False))
    ends = data["atoms"].astype(np.int64).cumsum()
    frames = []
    for k, (end, atoms) in enumerate(zip(ends, data["atoms"], strict=True)):
        rows = slice(end - atoms, end)
        z, pos = data["numbers"][rows].astype(np.int64), data["positions"][rows].astype(np.float64)
        frames.append(System(torch.from_numpy(z), torch.from_numpy(pos), charge=float(data["charge"][k])))
    return data, [System.concatenate(frames[first : first + AT_ONCE]) for first in range(0, len(frames), AT_ONCE)]


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_those_that_were_stored(frozen, name):
    data, systems = frozen
    potential, energy, forces = load(name, dtype=torch.float64), [], []
    for system in systems:
        found = potential(system)
        energy.append(found.energy.detach().numpy())
        forces.append(found.forces.detach().numpy())
        charges = torch.zeros(system.num_systems, dtype=torch.float64)
        charges.index_add_(0, system.batch, found.charges.detach())
        assert float((charges - system.charge).abs().max()) < 1e-6
    assert np.abs(np.concatenate(energy) - data[f"energy_{name}"]).max() < 1e-6
    assert np.abs(np.concatenate(forces) - data[f"forces_{name}"]).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_errors_against_the_teacher_are_those_of_the_card(frozen, name):
    """Half as much again as the errors of the card: the frozen frames are few, and a part has rare elements."""
    data, _ = frozen
    error = np.abs(data[f"forces_{name}"] - data["forces"])
    card = read_header(find_model(name))["metadata"]["errors"]
    assert error.mean() < 1.5 * max(card[f"test {kind.decode()}"]["forces"]["mae"] for kind in set(data["kind"]))


@pytest.mark.parametrize("name", NAMES)
def test_card(name):
    header = read_header(find_model(name))
    assert header["config"]["elements"] == ELEMENTS and header["config"]["total_charges"] == [-2, -1, 0, 1, 2]
    assert header["config"]["closed_shell"]
    assert header["metadata"]["licence"] == "MIT" and "AIMNet2" in header["metadata"]["about"]["Teacher"]
    limits = header["metadata"]["about"]["Not for"]
    assert name == "organic-1" or "0.91 g/cm³, 9 % too low" in limits  # measured with the others
    assert find_model(name).stat().st_size < 4.1e6


@pytest.mark.parametrize("name", NAMES)
def test_what_the_teacher_did_not_know_is_refused(name):
    """Radicals, charges, metals; and slabs, whose Coulomb energy has no end."""
    potential, water = load(name), molecule("H2O")
    radical = System.from_ase(molecule("CH3"))
    with pytest.raises(UntrainedCharge, match="9 with the total charge 0, and this model was trained on closed shells"):
        Evaluator(potential)(radical)
    cation = radical.replace(charge=torch.ones(1, dtype=torch.float64), spin=torch.ones_like(radical.spin))
    assert torch.isfinite(potential(cation).energy).all()
    with pytest.raises(UntrainedCharge, match="the total charge 4"):
        potential(System.from_ase(water).replace(charge=torch.full((1,), 4.0, dtype=torch.float64)))
    with pytest.raises(UnknownElement, match="atom 1 is Fe"):
        potential(System(z=[8, 26], pos=[[0.0, 0, 0], [0, 0, 1.6]]))
    water.center(5.0)
    water.pbc = [True, True, False]
    with pytest.raises(ValueError, match=r"periodic in one or two directions only.*vacuum"):
        potential(System.from_ase(water))
    alone = float(potential(System.from_ase(molecule("H2O"))).energy)
    water.center(12.0)
    water.pbc = True
    assert float(potential(System.from_ase(water)).energy) == pytest.approx(alone, abs=2e-3)


HALIDES_OF_AIMNET2 = {9: -2718.15057, 17: -12526.04761, 35: -70048.63086, 53: -8105.72778}
HALIDES_OF_DFT = {9: -2718.73084, 17: -12526.36382, 35: -70048.79872, 53: -8105.79216}
"""Energies in eV of the ions alone by the teacher, and by the labels of scripts/organic/dft.py."""


@pytest.mark.parametrize(
    ("name", "halides", "apart", "error"),
    [
        ("organic", HALIDES_OF_DFT, -14607.29655, 0.15),
        ("organic-small", HALIDES_OF_AIMNET2, -14606.93637, 0.3),
    ],
)
def test_ions_alone_and_far_from_a_molecule(name, halides, apart, error):
    """Energies of the level of the labels; without such frames in a training they were wrong by 2 to 3 eV."""
    potential, water = load(name, dtype=torch.float64), molecule("H2O")
    for number, energy in halides.items():
        alone = potential(System(z=[number], pos=[[0.0, 0, 0]], charge=-1.0))
        assert float(alone.energy) == pytest.approx(energy, abs=0.02)
    chloride = [water.positions[0] + [0, 0, 6.0]]
    found = potential(System(z=[8, 1, 1, 17], pos=np.vstack([water.positions, chloride]), charge=-1.0))
    assert float(found.energy) == pytest.approx(apart, abs=error)
    assert float(found.charges[3]) == pytest.approx(-0.9992, abs=2 * error)


@pytest.mark.parametrize("name", sorted(named_models()))
def test_each_has_a_card_with_its_licence(name, capsys):
    from torchmdnet2.cli import main

    assert main(["models", name]) == 0, capsys.readouterr().err
    card = capsys.readouterr().out
    assert "| Licence of the model | MIT" in card and "Chem. Sci. 16, 10228" in card and "| Br | -70" in card


def test_a_molecule_in_a_trajectory_out(tmp_path, capsys):
    """As on the first screen of README.md."""
    from torchmdnet2.cli import main

    start = Path(__file__).parents[1] / "examples" / "data" / "ibuprofen.xyz"
    options = ["--time", "0.005", "--temperature", "300", "--output", str(tmp_path / "md"), "--device", "cpu"]
    assert main(["md", "organic-small", str(start), *options]) == 0, capsys.readouterr().err
    first = read(tmp_path / "md.xyz", 0)
    assert len(first) == 33 and first.info.get("charge", 0) == 0 and is_flag(first.info.get("charge")) is False
