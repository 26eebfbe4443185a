r"""How often a calibrated model of ethanol warns about known and about unknown structures.

Also whether the novelty follows the error of the forces against GFN2-xTB (needs tblite):

    torchmdnet2 train configs/quickstart.yaml
    cd runs/quickstart
    torchmdnet2 calibrate best.tmn calibrated.tmn --train ../../examples/data/ethanol_gfn2.xyz --split splits.json
    cd ../..
    python -m scripts.bench novelty runs/quickstart/calibrated.tmn examples/data/ethanol_gfn2.xyz \
        runs/quickstart/splits.json

Further models of the same frames after --committee: the spread of their forces is compared, too.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii, vdw_radii
from ase.io import read
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from scipy.stats import spearmanr
from tblite.ase import TBLite

from torchmdnet2 import System, load
from torchmdnet2.data import open_dataset, read_splits
from torchmdnet2.ensemble import Ensemble
from torchmdnet2.potential.novelty import largest

MOLECULES = ["CH3OH", "C2H6", "C3H8", "isobutane", "CH4", "H2O", "CH3OCH3", "CH3COOH", "HCOOH", "CH3CHO", "H2CO",
             "H2CCO", "C2H4", "C2H2", "C6H6", "C4H4O", "CO2"]  # fmt: skip
RNG = np.random.default_rng(7)
GFN2 = TBLite(method="GFN2-xTB", verbosity=0)


def labelled(atoms: Atoms) -> Atoms:
    """A copy with energy and forces of GFN2-xTB."""
    atoms = atoms.copy()
    atoms.calc = GFN2
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


def dynamics(start: Atoms, kelvin: float, count: int) -> list[Atoms]:
    """Frames of Langevin dynamics with GFN2-xTB, 10 fs apart, after 50 fs."""
    atoms = start.copy()
    atoms.calc = GFN2
    MaxwellBoltzmannDistribution(atoms, temperature_K=kelvin, rng=RNG)
    run = Langevin(atoms, 0.5 * units.fs, temperature_K=kelvin, friction=0.02 / units.fs, fixcm=False, rng=RNG)
    run.run(80)
    found = []
    for _ in range(count):
        run.run(20)
        found.append(labelled(atoms))
    return found


def stretched(atoms: Atoms, factor: float) -> Atoms:
    """Ethanol with one bond stretched by a factor; the atoms beyond it move along."""
    distance, radii = atoms.get_all_distances(), covalent_radii[atoms.numbers]
    bonded = (distance < 1.25 * (radii[:, None] + radii)) & (distance > 0)
    i, j = RNG.permutation(np.argwhere(bonded))[0]
    bonded[i, j] = bonded[j, i] = False
    moved = np.eye(len(atoms), dtype=bool)[j]
    for _ in atoms:
        moved |= bonded[moved].any(0)
    atoms = atoms.copy()
    atoms.positions[moved] += (factor - 1) * (atoms.positions[j] - atoms.positions[i])
    return labelled(atoms)


def contact(one: Atoms, other: Atoms, closeness: float) -> Atoms:
    """Two molecules, the closest pair at a part of the sum of its van der Waals radii."""
    other = other.copy()
    other.euler_rotate(*RNG.uniform(0, 360, 3), center="COM")
    direction = RNG.normal(size=3)
    direction /= np.linalg.norm(direction)
    radii = vdw_radii[one.numbers][:, None] + vdw_radii[other.numbers]
    other.positions += one.positions.mean(0) - other.positions.mean(0) + 12 * direction
    while (np.linalg.norm(one.positions[:, None] - other.positions, axis=-1) / radii).min() > closeness:
        other.positions -= 0.02 * direction
    return labelled(one + other)


def kinds(test: list[Atoms]) -> dict[str, list[Atoms]]:
    """All structures, by kind."""
    found = {"test frames, 500 K": test}
    found |= {f"dynamics, {kelvin} K": dynamics(test[0], kelvin, 40) for kelvin in (300, 700, 1000, 1500)}
    for percent in (-20, -10, 10, 20, 30, 40, 60):
        found[f"a bond by {percent:+} %"] = [stretched(atoms, 1 + percent / 100) for atoms in test[:20]]
    for percent in (90, 80, 70, 50):
        pairs = zip(test[:20], test[20:40], strict=True)
        found[f"two molecules at {percent} %"] = [contact(a, b, percent / 100) for a, b in pairs]
    return found | {f"molecule {name}": dynamics(molecule(name), 300, 5) for name in MOLECULES}


def per_structure(values: np.ndarray, system: System) -> torch.Tensor:
    """The largest length of the rows [N, 3] of each structure."""
    return largest(torch.as_tensor(np.linalg.norm(values, axis=1)), system)


def arguments(parser: argparse.ArgumentParser) -> None:
    for name, text in (("model", "calibrated"), ("data", "frames of ethanol"), ("split", "splits.json")):
        parser.add_argument(name, help=text)
    parser.add_argument("--committee", nargs="+", default=[], help="further models of the same data")


def main(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    potential = load(options.model)
    committee = Ensemble([potential, *map(load, options.committee)]) if options.committee else None
    chosen = read_splits(options.split, open_dataset(options.data), [options.data])["test"]
    frames = read(options.data, ":")
    columns: dict[str, list[torch.Tensor]] = {}
    print(f"{'kind':24s} {'frames':>6s} {'error':>7s} {'above 1':>8s} {'median':>7s}")
    for kind, atoms in kinds([frames[k] for k in chosen]).items():
        system = System.from_ase(atoms)
        forces = potential(system).forces.numpy()
        found = {
            "error": per_structure(forces - np.concatenate([a.get_forces() for a in atoms]), system),
            "novelty": largest(potential.novelty(system), system),
            "largest force": per_structure(forces, system),
            "number of atoms": system.atom_counts.double(),
        }
        if committee is not None:
            found["spread of the committee"] = per_structure(committee(system).forces_std.numpy(), system)
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
        score, above = found["novelty"], float((found["novelty"] > 1).double().mean())
        error = float(found["error"].median())
        print(f"{kind:24s} {len(atoms):6d} {error:7.2f} {100 * above:6.0f} % {float(score.median()):7.2f}", flush=True)
    groups = {"all": slice(None), "test frames": slice(0, 1), "dynamics": slice(0, 5), "bonds": slice(5, 12),
              "other molecules": slice(16, None)}  # fmt: skip
    print("rank correlation with the largest error of a force, eV/Å")
    for group, part in groups.items():
        error = torch.cat(columns["error"][part])
        ranks = {n: spearmanr(torch.cat(v[part]), error).statistic for n, v in columns.items() if n != "error"}
        print(f"{group:24s} " + "  ".join(f"{name} {value:+.2f}" for name, value in ranks.items()))
