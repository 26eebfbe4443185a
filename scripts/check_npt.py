"""One model at constant pressure in every program: `torchmdnet2 md`, ASE and LAMMPS, the same liquid and state points.

    python scripts/check_npt.py FOLDER model                            # trains the model, two minutes
    python scripts/check_npt.py FOLDER run --hosts md --pressures 1000  # one or more programs and pressures
    python scripts/check_npt.py FOLDER table

The model is a small TensorNet, trained on 108 atoms of argon as a Lennard-Jones liquid with a short cutoff (ASE's
calculator). What is compared are barostats and thermostats, so the model need not be argon. "run" stores rows in
FOLDER/HOST-BAR.npy, "table" prints means and their errors from blocks, and the differences in units of their errors.

`md` rescales cells stochastically and has Langevin dynamics. ASE (IsotropicMTKNPT) and LAMMPS (fix npt iso) have the
equations of Martyna, Tobias and Klein. They start without motion of the centre of mass and never get one. LAMMPS then
counts 3N − 3 degrees of freedom, ASE 3N: it is given the temperature times (N − 1)/N, to the same effect.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import yaml
from ase import Atoms, units
from ase.build import bulk
from ase.io import read, write

from torchmdnet2.units import KB

EPSILON, SIGMA, CUTOFF = 0.0104, 3.40, 6.0  # eV, Å, Å
KELVIN, TIMESTEP = 160.0, 10.0  # K, fs
EVERY = 10  # steps between rows
BATH, PISTON = 0.5, 1.0  # ps, time constants of temperature and of the barostats of Martyna, Tobias and Klein
RELAXATION, COMPRESSIBILITY = 0.3, 2e-4  # ps, of the stochastic barostat; 1/bar, about that of the liquid
BLOCKS = 10
COLUMNS = "volume, Å³", "temperature, K", "potential energy, eV/atom"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["model", "run", "table"])
    parser.add_argument("--time", type=float, default=400.0, help="ps of a run (default: %(default)s)")
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--pressures", default="1000,3000", help="bar (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "model":
        return train(options.folder)
    pressures = [float(p) for p in options.pressures.split(",")]
    if options.what == "table":
        return table(options.folder, options.hosts.split(","), pressures)
    steps = round(1000 * options.time / TIMESTEP)
    for host in options.hosts.split(","):
        for bar in pressures:
            began = time.perf_counter()
            rows = HOSTS[host](options, liquid(options), bar, steps)
            np.save(options.folder / f"{host}-{bar:g}.npy", rows)
            print(f"{host} at {bar:g} bar: {steps} steps in {time.perf_counter() - began:.0f} s", flush=True)


def train(folder: Path) -> None:
    """Frames of the liquid, of several densities and temperatures, and the model."""
    from torchmdnet2.cli import main as torchmdnet2

    write(folder / "frames.xyz", list(frames()))
    config = {
        "data": {"train": str(folder / "frames.xyz"), "keys": {"energy": "energy", "forces": "forces"},
                 "units": {"energy": "eV", "length": "angstrom"}, "split": {"validation": 20, "test": 20}},
        "model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8, "cutoff": CUTOFF},
        "priors": [{"name": "pair_potential"}, {"name": "atomref", "energies": {"Ar": 0.0}}],
        "training": {"seed": 1, "batch_size": 2, "max_epochs": 10, "optimizer": {"name": "muon"}, "lr": 5e-3,
                     "lr_schedule": "cosine", "loss": {"energy": 1, "forces": 1}},
        "output": {"folder": str(folder / "training")},
    }  # fmt: skip
    (folder / "training.yaml").write_text(yaml.safe_dump(config))
    torchmdnet2(["train", str(folder / "training.yaml")])


def frames() -> Iterator[Atoms]:
    """240 frames of Langevin dynamics, 40 in each state, labelled by ASE's LennardJones."""
    from ase.calculators.lj import LennardJones
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.md.langevin import Langevin

    for k, (edge, kelvin) in enumerate(((5.3, 200), (5.45, 160), (5.6, 200), (5.6, 300), (5.8, 160), (6.1, 160))):
        atoms, random = bulk("Ar", "fcc", edge, cubic=True) * (3, 3, 3), np.random.default_rng(k)
        atoms.calc = LennardJones(epsilon=EPSILON, sigma=SIGMA, rc=CUTOFF, smooth=True)
        for melting, count, between in ((900.0, 1, 500), (kelvin, 40, 50)):
            bath = {"temperature_K": melting, "friction": 0.005 / units.fs, "rng": random, "fixcm": False}
            dynamics = Langevin(atoms, 5 * units.fs, **bath)
            for _ in range(count):
                dynamics.run(between)
                if melting == kelvin:
                    frame = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
                    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
                    frame.calc = SinglePointCalculator(frame, energy=energy, forces=forces)
                    yield frame


def liquid(options: argparse.Namespace) -> Atoms:
    """A frame of the liquid, with velocities and without motion of the centre of mass."""
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary

    frame = read(options.folder / "frames.xyz", "-50")
    atoms = Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=True)
    MaxwellBoltzmannDistribution(atoms, temperature_K=KELVIN, rng=np.random.default_rng(0))
    Stationary(atoms)
    return atoms


def model(options: argparse.Namespace) -> str:
    return str(options.folder / "training" / "best.tmn")


# Each returns rows [steps/EVERY, 3] of COLUMNS.


def with_md(options: argparse.Namespace, start: Atoms, bar: float, steps: int) -> np.ndarray:
    from torchmdnet2.md import MDOptions, run_md

    setup = MDOptions(
        steps, TIMESTEP, "npt", temperature=KELVIN, friction=1 / BATH, pressure=bar, barostat_time=RELAXATION,
        barostat_compressibility=COMPRESSIBILITY, every=EVERY, output=str(options.folder / f"md-{bar:g}"),
        trajectories=(str(options.folder / f"md-{bar:g}.dcd"),),
    )  # fmt: skip
    result = run_md(model(options), start, setup, device=options.device)
    return np.array([[row.volume_A3, row.temperature_K, row.potential_eV / len(start)] for row in result.rows[1:]])


def with_ase(options: argparse.Namespace, start: Atoms, bar: float, steps: int) -> np.ndarray:
    from ase.md.nose_hoover_chain import IsotropicMTKNPT

    from torchmdnet2.adapters.ase import TorchMDNet2Calculator

    atoms, rows = start.copy(), []
    atoms.calc = TorchMDNet2Calculator(model(options), device=options.device)
    free = (len(atoms) - 1) / len(atoms)
    dynamics = IsotropicMTKNPT(
        atoms, TIMESTEP * units.fs, temperature_K=KELVIN * free, pressure_au=bar * units.bar,
        tdamp=1000 * BATH * units.fs, pdamp=1000 * PISTON * units.fs,
    )  # fmt: skip

    def note() -> None:
        energy = atoms.get_potential_energy() / len(atoms)
        rows.append([atoms.get_volume(), atoms.get_temperature() / free, energy])

    dynamics.attach(note, interval=EVERY)
    dynamics.run(steps)
    return np.array(rows[1:])


def with_lammps(options: argparse.Namespace, start: Atoms, bar: float, steps: int) -> np.ndarray:
    from torchmdnet2.adapters.lammps import attach, open_lammps  # loads the library of MPI that LAMMPS needs

    data, log = options.folder / f"lammps-{bar:g}.data", options.folder / f"lammps-{bar:g}.rows"
    write(data, start, format="lammps-data", masses=True, velocities=True, units="metal")
    lmp = open_lammps(["-screen", "none", "-log", "none"])
    lmp.commands_list(["units metal", "atom_style atomic", f"read_data {data}", "neighbor 1.0 bin"])
    attach(lmp, model(options), ["Ar"], device=options.device)
    lmp.commands_list([
        f"timestep {TIMESTEP / 1000}",
        f"fix move all npt temp {KELVIN} {KELVIN} {BATH} iso {bar} {bar} {PISTON}",
        "variable v equal vol", "variable t equal temp", "variable e equal pe/atoms",
        f"fix rows all ave/time {EVERY} 1 {EVERY} v_v v_t v_e file {log}", f"run {steps}",
    ])  # fmt: skip
    lmp.close()
    return np.loadtxt(log)[1:, 1:]


HOSTS = {"md": with_md, "ase": with_ase, "lammps": with_lammps}


def estimates(rows: np.ndarray, mass: float, kelvin: float = KELVIN) -> np.ndarray:
    """Volume, density, compressibility in 1e-4/bar, temperature and energy: [1 + BLOCKS, 5], the first of all rows."""
    found = []
    for part in (rows, *np.array_split(rows, BLOCKS)):
        volume, temperature, energy = part.mean(0)
        # around the mean of all rows, so that short blocks have no smaller fluctuations
        spread = np.mean((part[:, 0] - rows[:, 0].mean()) ** 2)
        compressibility = 1e4 * spread / (KB * kelvin * volume) * units.bar
        found.append([volume, mass / volume / units.mol * 1e24, compressibility, temperature, energy])
    return np.array(found)


def table(folder: Path, hosts: list[str], pressures: list[float]) -> None:
    """Markdown, of the last nine tenths of each run; the last column is the difference to `md` in errors."""
    mass = float(bulk("Ar", "fcc", 5.6, cubic=True).get_masses().sum()) * 27
    names = "volume, Å³", "density, g/cm³", "compressibility, 1e-4/bar", "temperature, K", "energy, eV/atom"
    print(f"| bar | | {' | '.join(hosts)} | largest difference, errors |\n|{'---|' * (len(hosts) + 3)}")
    for bar in pressures:
        of_host = []
        for host in hosts:
            rows = np.load(folder / f"{host}-{bar:g}.npy")
            all_, *blocks = estimates(rows[len(rows) // 10 :], mass)
            of_host.append((all_, np.std(blocks, axis=0, ddof=1) / BLOCKS**0.5))
        for k, name in enumerate(names):
            values, errors = (np.array([pair[j][k] for pair in of_host]) for j in (0, 1))
            apart = abs(values - values[0]) / np.hypot(errors, errors[0])
            digits = max(0, 1 - int(np.floor(np.log10(errors.min()))))
            cells = [f"{value:.{digits}f} ± {error:.{digits}f}" for value, error in zip(values, errors, strict=True)]
            print(f"| {bar:g} | {name} | {' | '.join(cells)} | {apart.max():.1f} |")


if __name__ == "__main__":
    main()
