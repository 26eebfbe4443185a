"""AIMNet2: what its own file computes; charges; sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase.build import molecule
from variants import ELEMENTS, variant

from torchmdnet2 import Evaluator, Potential, System, load
from torchmdnet2.checkpoint import read_header
from torchmdnet2.errors import UnknownElement, UntrainedCharge
from torchmdnet2.potentials import find_model

GOLDEN = Path(__file__).parents[1] / "golden" / "aimnet2" / "molecules.npz"


@pytest.fixture(scope="module")
def golden():
    """The molecules as one batch, and the arrays."""
    data = dict(np.load(GOLDEN, allow_pickle=False))
    batch = torch.from_numpy(np.repeat(np.arange(len(data["atoms"])), data["atoms"]))
    z, pos = torch.from_numpy(data["numbers"]).long(), torch.from_numpy(data["positions"]).double()
    return System(z=z, pos=pos, batch=batch, charge=torch.from_numpy(data["charge"]).double()), data


@pytest.mark.parametrize("kind", ["float64", "float32", "evaluator"])
def test_gives_what_its_own_file_computes(golden, kind):
    """Energies to 2e-5 eV + 1e-8, forces to 5e-5 eV/Å, charges to 5e-6 e: all but sums is float32 in that file."""
    system, data = golden
    potential = load("aimnet2", dtype=torch.float64 if kind == "float64" else None)
    found = (Evaluator(potential) if kind == "evaluator" else potential.reference)(system)
    error = np.abs(found.energy.numpy() - data["energy"])
    assert (error - 2e-5 - 1e-8 * np.abs(data["energy"])).max() <= 0, error
    assert np.abs(found.forces.numpy() - data["forces"]).max() <= 5e-5
    assert np.abs(found.charges.numpy() - data["charges"]).max() <= 5e-6


def test_card():
    header = read_header(find_model("aimnet2"))
    metadata = header["metadata"]
    assert header["config"]["elements"] == [1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 53]
    assert metadata["licence"].startswith("MIT") and "10228" in metadata["about"]["Cite"]
    assert metadata["import"]["checksum"] in metadata["about"]["Source"]


def test_what_it_cannot_do_is_refused():
    potential, water = load("aimnet2"), molecule("H2O")
    with pytest.raises(UntrainedCharge, match="closed shells"):
        potential(System.from_ase(molecule("CH3")))
    with pytest.raises(UnknownElement):
        potential(System.from_ase(molecule("LiH")))
    water.set_cell([8, 8, 8])
    water.pbc = [True, True, False]
    with pytest.raises(ValueError, match="periodic"):
        potential(System.from_ase(water))


def test_charges_sum_to_the_total_charge():
    """Exactly by default; as published, all but a small part of what the first charges lack."""
    for exact in (True, False):
        model = {"name": "aimnet2", "channels": 4, "hidden_channels": 16, "widths": [12], "exact_charge": exact}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            potential = Potential.from_config({"model": model}).double().eval()
        system = System.from_ase(molecule("CH3CH2OH")).replace(charge=torch.tensor([-2.0], dtype=torch.float64))
        missing = abs(float(potential(system).charges.sum()) + 2)
        assert missing < 1e-13 if exact else 1e-13 < missing < 1e-2


def test_molecules_of_a_batch_do_not_feel_each_other():
    potential = variant("aimnet2")
    a, b = (System.from_ase(molecule(name)) for name in ("H2O", "CH3OH"))
    both = potential(System.concatenate([a, b]))
    for k, alone in enumerate((a, b)):
        assert float(both.energy[k]) == pytest.approx(float(potential(alone).energy), abs=1e-10)


def test_one_pass_has_no_charges():
    model = {"name": "aimnet2", "num_layers": 1, "channels": 4, "hidden_channels": 16, "widths": [12]}
    potential = Potential.from_config({"model": model, "elements": ELEMENTS}).eval()
    assert potential(System.from_ase(molecule("H2O"))).charges is None and not potential.reads_charge


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"widths": []}, {"channels": 0}, {"widths": [4, 0]}])
def test_sizes_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        Potential.from_config({"model": {"name": "aimnet2", **wrong}})
