"""LAMMPS on 1, 2 and 4 processes against the Potential on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lammps")
pytest.importorskip("mpi4py")
from lammps_cases import CASES, CONSTANT_PRESSURE, GAS, mpiexec

from torchmdnet2 import Potential, System
from torchmdnet2.checkpoint import save
from torchmdnet2.units import KCAL_MOL

WORKER = str(Path(__file__).parent / "lammps_worker.py")
BAR = 1e-30 / 1.602176634e-19 * 1e5  # eV/Å³
PRIORS = [
    {"name": "zbl", "cutoff": 2.0},
    {"name": "d2", "cutoff": 5.0},
    {"name": "atomref", "energies": {"1": -13.6, "6": -1029.0, "8": -2041.3}},
    {"name": "coulomb", "charges": {"1": 0.2, "8": -0.3}, "method": "reaction_field", "cutoff": 4.5},
    {"name": "d3", "elements": [1, 6, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 5.5, "switch_width": 1.0},
]


@pytest.fixture(scope="session")
def network():
    """Two message layers, with priors that reach further than the network."""
    config = {
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 2, "num_rbf": 8, "cutoff": 4.0},
        "elements": [1, 6, 8], "total_charges": [0, 1], "energy_scale": 2.0, "priors": PRIORS,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Potential.from_config(config).double().eval()


@pytest.fixture(scope="session")
def network_file(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("lammps") / "network.tmn"
    save(network, path)
    return path


def run(file, processes, folder, *names):
    done = mpiexec(processes, WORKER, str(file), str(folder / f"{processes}.npz"), *names)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(np.load(folder / f"{processes}.npz"))


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request, network_file, tmp_path_factory):
    return request.param, run(network_file, request.param, tmp_path_factory.mktemp("results"), *CASES)


@pytest.fixture(scope="module")
def expected(network):
    """Results of the Potential, at the positions of the cases."""
    found = {}
    for name, case in CASES.items():
        atoms = case["atoms"].copy()
        atoms.info["charge"] = case.get("charge", 0)
        found[name] = network(System.from_ase(atoms), stress=bool(atoms.pbc.all()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_forces_energies_and_pressure_are_those_of_the_potential(results, expected, name):
    """1, 2 and 4 processes; forces to 1e-9 eV/Å, pressures to 1e-6 (LAMMPS's own constants) of the largest."""
    processes, found = results
    ours = {key.partition("/")[2]: value for key, value in found.items() if key.startswith(name + "/")}
    theirs, atoms = expected[name], CASES[name]["atoms"]
    unit = KCAL_MOL if CASES[name].get("units") == "real" else 1.0
    order = np.arange(len(atoms))
    if CASES[name].get("shuffle"):
        order = np.argsort(np.random.default_rng(3).permutation(len(atoms)))
    forces = theirs.forces.numpy()[order]
    assert np.abs(ours["forces"] * unit - forces).max() <= 1e-9
    assert np.abs(forces).max() > 1
    energy = float(theirs.energy)
    assert float(ours["pe"]) * unit == pytest.approx(energy, abs=1e-9 * len(atoms))
    assert ours["sums"][0] * unit == pytest.approx(energy, abs=1e-9 * len(atoms))
    if theirs.stress is not None:
        bar = -theirs.stress[0].numpy() / BAR
        scale, atmosphere = np.abs(bar).max(), 1.01325 if unit != 1 else 1.0
        for key, (a, b) in {
            "pxx": (0, 0),
            "pyy": (1, 1),
            "pzz": (2, 2),
            "pxy": (0, 1),
            "pxz": (0, 2),
            "pyz": (1, 2),
        }.items():
            assert float(ours[key]) * atmosphere == pytest.approx(bar[a, b], abs=1e-6 * scale), key
        # LAMMPS's stress/atom is pressure × volume, with the other sign
        assert ours["sums"][1] == pytest.approx(-float(ours["pxx"]) * float(ours["vol"]), rel=1e-9)
        assert ours["sums"][2] == pytest.approx(-float(ours["pxy"]) * float(ours["vol"]), rel=1e-9)
    if name == "empty" and processes > 1:
        assert 0 in ours["sizes"], "all processes have atoms"
    assert ours["sizes"].sum() == len(atoms) and len(ours["sizes"]) == processes


def test_compiled_kernels_on_two_and_four_processes(tmp_path):
    """Float32: forces to 2e-5 eV/Å, with 32 channels, for which there are kernels."""
    pytest.importorskip("numba")
    config = {
        "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 2, "num_rbf": 8, "cutoff": 4.0},
        "elements": [1, 6, 8], "priors": PRIORS[3:],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        potential = Potential.from_config(config).eval()
    save(potential, tmp_path / "model.tmn")
    run(tmp_path / "model.tmn", 1, tmp_path, "slab")  # compiles the kernels; several processes would do it as often
    found = run(tmp_path / "model.tmn", 2, tmp_path, "triclinic", "slab")
    found |= run(tmp_path / "model.tmn", 4, tmp_path, "orthorhombic", "empty")
    for name in ("triclinic", "slab", "orthorhombic", "empty"):
        assert "compiled" in str(found[f"{name}/report"])
        theirs = potential.double()(System.from_ase(CASES[name]["atoms"]))
        assert np.abs(found[f"{name}/forces"] - theirs.forces.numpy()).max() <= 2e-5
        assert float(found[f"{name}/pe"]) == pytest.approx(float(theirs.energy), abs=2e-5 * len(theirs.forces))
        assert float(theirs.forces.abs().max()) > 0.05


@pytest.fixture(scope="module")
def gas_file(tmp_path_factory):
    """Weak forces and a repulsion at short distance: atoms fly through the domains."""
    config = {
        "model": {"name": "tensornet", "hidden_channels": 4, "num_layers": 1, "num_rbf": 6, "cutoff": 3.5},
        "elements": [1, 6, 8], "energy_scale": 0.2, "priors": [{"name": "zbl", "cutoff": 2.5}],
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        potential = Potential.from_config(config).double().eval()
    path = tmp_path_factory.mktemp("gas") / "gas.tmn"
    save(potential, path)
    return path


@pytest.fixture(scope="module")
def trajectories(gas_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trajectories")
    return {processes: run(gas_file, processes, folder, "gas", *CONSTANT_PRESSURE) for processes in (1, 2)}


def compare_trajectories(one, two, name, difference):
    cell = GAS[name]["atoms"].cell.array
    places = [t[f"{name}/pos"] + t[f"{name}/image"] @ cell for t in (one, two)]
    assert np.abs(places[0] - places[1]).max() <= difference
    energies = one[f"{name}/energies"]
    np.testing.assert_allclose(two[f"{name}/energies"], energies, rtol=0, atol=difference)
    assert np.abs(energies - energies[0]).max() <= 1e-3 * 0.32  # of the kinetic energy of an atom at 2,500 K


def test_steps_with_migration_are_those_of_one_process(trajectories):
    assert trajectories[2]["gas/exchanged"] >= 3, "atoms must change their process"
    compare_trajectories(trajectories[1], trajectories[2], "gas", 1e-9)


@pytest.mark.long
def test_a_thousand_steps_are_those_of_one_process(gas_file, tmp_path):
    """Within what collisions make of rounding."""
    one, two = (run(gas_file, processes, tmp_path, "long") for processes in (1, 2))
    assert int(two["long/step"]) == 1000 and two["long/exchanged"] >= 10
    compare_trajectories(one, two, "long", 1e-6)


def test_constant_pressure_is_that_of_one_process(trajectories):
    one, two = trajectories[1], trajectories[2]
    assert float(one["npt/vol"]) == pytest.approx(float(two["npt/vol"]), rel=1e-9)
    assert abs(float(one["npt/vol"]) - 9 * 8 * 8.5) > 1
    for key in ("press", "pxy", "temp"):
        assert float(one[f"npt/{key}"]) == pytest.approx(float(two[f"npt/{key}"]), rel=1e-6)
