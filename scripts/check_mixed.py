"""Mixed precision in dynamics: drift, temperature, torsions and water beside float32, with statistical errors.

    python scripts/check_mixed.py nve:organic-small:100 torsions:organic-small:60 water:organic-small:25
    python scripts/check_mixed.py nve:organic-small:10 --precisions float64,float32 --device cpu

A job is WHAT:MODEL:PS, the length of each run in ps. Every job runs all precisions one after the other, each with other
random numbers, as replicas in one batch by the code of `torchmdnet2 md`:

- "nve": a molecule at constant energy, relaxed, with velocities of 600 K, 0.5 fs. Drift and fluctuation of the energy.
- "torsions": the molecule at 300 K (Langevin). Temperature, energy, and the distribution of each torsion.
- "water": SIDE³ molecules at 300 K and the density of experiment. Temperature, energy, radial distributions.

At 300 K hydrogens have 3 amu and steps 1 fs: distributions do not depend on masses. The first fifth is left out. Each
replica gives one value, so that errors are those of the mean of independent values. The difference from the first
precision is given in units of its standard error: within 2 is what equal precisions show in 19 of 20 cases. Whole
distributions are compared by exchanging replicas between the precisions at random: p is the share of exchanges that
make the difference as large. Errors of forces and energies against float64 are those of the last frames.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from ase.data import covalent_radii
from ase.io import read

from torchmdnet2 import Evaluator, System
from torchmdnet2.adapters.model import open_model
from torchmdnet2.benchmark import water_box
from torchmdnet2.md import MDOptions
from torchmdnet2.md.integrators import State
from torchmdnet2.md.output import Reporter, TableRow
from torchmdnet2.md.run import Simulation
from torchmdnet2.units import KB

PRECISIONS = {"float64": ("float64", "native"), "float32": ("float32", "native"), "mixed": ("float32", "mixed")}
"""Type of the network, and precision of the kernels."""

KELVIN, BAR = 300.0, 1e-5  # K; eV/atom/ps, the goal for the drift
EVERY = 100  # steps between rows and frames
EXACT_UP_TO = 3000  # atoms whose forces are computed in float64
EXCHANGES = 4000
TORSION_BINS = np.linspace(-180, 180, 37)
WATER_BINS = np.linspace(0.0, 6.0, 61)
WINDOWS = {
    "O–O, 2.7 to 2.9 Å (peak)": ("O–O", 2.7, 2.9), "O–O, 3.2 to 3.6 Å (dip)": ("O–O", 3.2, 3.6),
    "O–O, 4.2 to 4.8 Å (second peak)": ("O–O", 4.2, 4.8), "O–H, 1.7 to 2.0 Å (hydrogen bond)": ("O–H", 1.7, 2.0),
}  # fmt: skip
"""Means of g(r) over distances."""
FROM = {"O–O": 2.3, "O–H": 1.4}  # Å, where the curves that are compared begin


@dataclass
class Found:
    """What one precision gave in a job.

    Attributes:
        values: for each observable, one value of each replica.
        curves: for each distribution, [replicas, bins].
        facts: what is no average over replicas.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    curves: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


# --- statistics ------------------------------------------------------------------------------------------------------


def mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, of independent values."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Other minus one in the mean, and its standard error."""
    (a, error_a), (b, error_b) = mean(one), mean(other)
    return b - a, float(np.hypot(error_a, error_b))


def exchanged(one: np.ndarray, other: np.ndarray, exchanges: int = EXCHANGES, seed: int = 0) -> float:
    """p: how often a random exchange of replicas makes two mean curves [replicas, bins] differ as much or more."""
    curves = np.concatenate([one, other])
    curves = curves - curves.mean(0)
    curves = curves[:, curves.var(0) > 0]
    weights = 1 / curves.var(0)

    def apart(chosen: np.ndarray) -> np.ndarray:
        of_one = chosen.astype(float) @ curves  # all curves add up to zero
        return (of_one**2 * weights).sum(-1)

    actual = np.arange(len(curves)) < len(one)
    rng = np.random.default_rng(seed)
    others = rng.permuted(np.tile(actual, (exchanges, 1)), axis=1)
    return float((1 + (apart(others) >= apart(actual) * (1 - 1e-9)).sum()) / (1 + exchanges))


def verdict(off: float) -> str:
    """Of a difference in units of its standard error."""
    return "yes" if abs(off) <= 2 else "2 to 3" if abs(off) <= 3 else "NO" if abs(off) > 3 else "unknown"


def compared(found: dict[str, Found]) -> list[dict[str, Any]]:
    """One row for each observable and precision after the first."""
    first, *others = found
    rows: list[dict[str, Any]] = []
    for other in others:
        a, b = found[first], found[other]
        for name in a.values:
            shift, error = difference(a.values[name], b.values[name])
            off = shift / error if error > 0 else np.nan
            rows.append({"observable": name, "precisions": [first, other], "means": [mean(a.values[name]),
                         mean(b.values[name])], "standard errors": off, "within": verdict(off)})  # fmt: skip
        for name in a.curves:
            p = exchanged(a.curves[name], b.curves[name])
            within = "yes" if p >= 0.05 else "2 to 3" if p >= 0.003 else "NO"
            rows.append({"observable": name, "precisions": [first, other], "p": p, "within": within})
    return rows


# --- runs ------------------------------------------------------------------------------------------------------------


class Kept(Simulation):
    """A simulation that keeps its rows and positions in memory and writes no files.

    Attributes:
        rows: of each replica.
        positions: [replicas, atoms, 3] Å at each row.
    """

    worst_drift = 0.0

    def keep(self) -> Kept:
        self.rows: list[list[TableRow]] = [[] for _ in range(self.options.replicas)]
        self.positions: list[np.ndarray] = []
        self.record, self.marks = self, {}  # type: ignore[assignment]
        self.saved_at = self.watched_at = 0
        rows = self.guard(self.state)
        self.conservation(rows)
        self.add(self.state, rows)
        self.engine.prepare()
        self.reporter = Reporter(None, 0, self.options.steps, self.options.timestep)
        with self.reporter:
            self._advance()
        return self

    def add(self, state: State, rows: list[TableRow]) -> None:
        for own, row in zip(self.rows, rows, strict=True):
            own.append(row)
        self.positions.append(state.pos.float().reshape(self.options.replicas, -1, 3).numpy())

    def _save(self) -> None:
        pass

    def _watch(self) -> None:
        self.watched_at = self.state.step

    def of_rows(self, name: str, late: bool = True) -> np.ndarray:
        """Values of a column, [replicas, rows]; late: without the first fifth."""
        values = np.array([[getattr(row, name) for row in rows] for rows in self.rows])
        return values[:, values.shape[1] // 5 :] if late else values


def run(options: argparse.Namespace, model: str, precision: str, atoms: Atoms, ps: float, **more: Any) -> Kept:
    dtype, kernels = PRECISIONS[precision]
    timestep = more.setdefault("timestep", 1.0)
    if more.get("ensemble") == "nvt":
        more = {"temperature": KELVIN, "friction": 2.0, "hydrogen_mass": 3.0, **more}
    setup = MDOptions(round(1000 * ps / timestep), every=EVERY, precision=kernels, **more)  # type: ignore[arg-type]
    opened = open_model(model, options.device, dtype)
    return Kept(opened, atoms, setup, None, None, None).keep()


def seed(options: argparse.Namespace, precision: str) -> int:
    """Of the first replica: other random numbers for each precision."""
    return options.seed + 100_000 * list(PRECISIONS).index(precision)


def nve(options: argparse.Namespace, model: str, ps: float, precision: str, shared: dict[str, Any]) -> Found:
    atoms, replicas = the_molecule(options), options.replicas or 8
    done = run(options, model, precision, atoms, ps, timestep=0.5, temperature=2 * KELVIN, minimize=True,
               replicas=replicas, seed=seed(options, precision))  # fmt: skip
    times = done.of_rows("time_ps", late=False)[0]
    energies = done.of_rows("conserved_eV", late=False) / len(atoms)
    slopes, offsets = np.polyfit(times, energies.T, 1)
    scatter = (energies - slopes[:, None] * times - offsets[:, None]).std(1)
    facts = {"largest drift of a replica": float(np.abs(slopes).max()), "within 1e-5": bool(abs(slopes.mean()) <= BAR)}
    values = {"drift, 1e-6 eV/atom/ps": 1e6 * slopes, "fluctuation, 1e-6 eV/atom": 1e6 * scatter,
              "temperature, K": done.of_rows("temperature_K").mean(1)}  # fmt: skip
    return Found(values, {}, {**facts, **accuracy(options, model, precision, atoms, done, shared)})


def torsions(options: argparse.Namespace, model: str, ps: float, precision: str, shared: dict[str, Any]) -> Found:
    atoms = the_molecule(options)
    done = run(options, model, precision, atoms, ps, ensemble="nvt", minimize=True, replicas=options.replicas or 256,
               seed=seed(options, precision))  # fmt: skip
    found = Found(*bath(done, shared))
    frames = np.stack(done.positions, 1)  # replicas, frames, atoms, 3
    late = frames[:, frames.shape[1] // 5 :]
    for name, chain in chains(atoms).items():
        angles = dihedrals(late[:, :, chain])
        found.values[f"{name} beyond 120° (trans)"] = (np.abs(angles) > 120).mean(1)
        found.values[f"{name}, mean cosine"] = np.cos(np.radians(angles)).mean(1)
        found.curves[f"{name}, distribution"] = histograms(angles, TORSION_BINS)
    found.facts |= accuracy(options, model, precision, atoms, done, shared)
    return found


def water(options: argparse.Namespace, model: str, ps: float, precision: str, shared: dict[str, Any]) -> Found:
    if "start" not in shared:  # a liquid, by the first precision
        (atoms,) = water_box(options.side).to_ase()
        for friction in (20.0, 2.0):
            bath_of = {"ensemble": "nvt", "friction": friction, "hydrogen_mass": 3.0}
            done = run(options, model, precision, atoms, options.settle / 2, **bath_of, seed=options.seed)
            atoms = atoms.copy()
            atoms.positions = done.positions[-1][0]
        shared["start"] = atoms
    atoms = shared["start"]
    done = run(options, model, precision, atoms, ps, ensemble="nvt", replicas=options.replicas or 8,
               seed=seed(options, precision))  # fmt: skip
    found = Found(*bath(done, shared))
    late = done.positions[len(done.positions) // 5 :]
    curves = radial(late, atoms, options.device)
    centers = (WATER_BINS[1:] + WATER_BINS[:-1]) / 2
    for name, (pair, low, high) in WINDOWS.items():
        found.values[name] = curves[pair][:, (centers > low) & (centers < high)].mean(1)
    shells = 4 / 3 * np.pi * np.diff(WATER_BINS**3) * len(atoms) / 3 / atoms.get_volume()
    found.values["neighbors O–O within 3.3 Å"] = (curves["O–O"] * shells)[:, centers < 3.3].sum(1)
    found.curves = {f"g({pair})": curve[:, centers > FROM[pair]] for pair, curve in curves.items()}
    found.facts |= accuracy(options, model, precision, atoms, done, shared)
    return found


JOBS = {"nve": nve, "torsions": torsions, "water": water}


def bath(done: Kept, shared: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Values of a run in a heat bath; the energy from that of the first precision."""
    kelvin, energy = done.of_rows("temperature_K"), 1e3 * done.of_rows("potential_eV").mean(1) / len(done.start)
    zero = shared.setdefault("energy", energy.mean())
    values = {"temperature, K": kelvin.mean(1), "its fluctuation, K": kelvin.std(1),
              "potential energy, meV/atom": energy - zero}  # fmt: skip
    expected = KELVIN * (2 / (3 * len(done.start))) ** 0.5
    return values, {}, {"fluctuation of the temperature expected, K": expected}


# --- observables -----------------------------------------------------------------------------------------------------


def the_molecule(options: argparse.Namespace) -> Atoms:
    """From a file, or by its name in ASE."""
    atoms = read(options.molecule, -1) if Path(options.molecule).exists() else molecule(options.molecule)
    assert isinstance(atoms, Atoms)
    return atoms


def chains(atoms: Atoms) -> dict[str, list[int]]:
    """Four atoms around each bond between two that are not hydrogen, by name; their ends are the heaviest neighbors."""
    radii, numbers = covalent_radii[atoms.numbers], atoms.numbers
    near = atoms.get_all_distances() < 1.25 * (radii[:, None] + radii)
    np.fill_diagonal(near, False)
    found: dict[str, list[int]] = {}
    for b, c in np.argwhere(np.triu(near) & (numbers[:, None] > 1) & (numbers > 1)):
        ends = [[k for k in np.flatnonzero(near[one]) if k != other] for one, other in ((b, c), (c, b))]
        if all(ends):
            chain = [max(ends[0], key=lambda k: (numbers[k], -k)), b, c, max(ends[1], key=lambda k: (numbers[k], -k))]
            name = "-".join(atoms.symbols[k] for k in chain)
            found[name if name not in found else f"{name} ({', '.join(map(str, chain))})"] = [int(k) for k in chain]
    return found


def dihedrals(positions: np.ndarray) -> np.ndarray:
    """Degrees from −180 to 180 of four atoms, [..., 4, 3]."""
    a, b, c = np.moveaxis(np.diff(positions.astype(float), axis=-2), -2, 0)
    one, other = np.cross(a, b), np.cross(b, c)
    length = np.linalg.norm(b, axis=-1)
    return np.degrees(np.arctan2((a * other).sum(-1) * length, (one * other).sum(-1)))


def histograms(values: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Shares of the values [replicas, frames] in bins, [replicas, bins]."""
    return np.stack([np.histogram(own, bins)[0] / len(own) for own in values])


def radial(frames: list[np.ndarray], atoms: Atoms, device: str) -> dict[str, np.ndarray]:
    """g(r) between molecules of each replica, [replicas, bins], from frames [replicas, atoms, 3] in a cubic cell."""
    length, bins = float(atoms.cell[0, 0]), len(WATER_BINS) - 1
    oxygen, hydrogen = np.flatnonzero(atoms.numbers == 8), np.flatnonzero(atoms.numbers == 1)
    replicas, width = frames[0].shape[0], WATER_BINS[1]
    offset = torch.arange(replicas, device=device)[:, None, None] * (bins + 1)
    counts = {"O–O": torch.zeros(replicas, bins + 1, device=device, dtype=torch.float64)}
    counts["O–H"] = torch.zeros_like(counts["O–O"])
    for frame in frames:
        positions = torch.as_tensor(frame, device=device)
        for pair, others in (("O–O", oxygen), ("O–H", hydrogen)):
            between = positions[:, oxygen, None] - positions[:, None, others]
            r = (between - length * torch.round(between / length)).norm(dim=-1)
            index = (r / width).long().clamp(max=bins) + offset
            counts[pair] += torch.bincount(index.flatten(), minlength=counts[pair].numel()).view_as(counts[pair])
    shells = 4 / 3 * np.pi * np.diff(WATER_BINS**3) / length**3 * len(frames)
    found = {pair: n[:, :-1].cpu().numpy() / shells / len(oxygen) for pair, n in counts.items()}
    return {"O–O": found["O–O"] / len(oxygen), "O–H": found["O–H"] / len(hydrogen)}


def accuracy(
    options: argparse.Namespace, model: str, precision: str, atoms: Atoms, done: Kept, shared: dict[str, Any]
) -> dict[str, Any]:
    """Errors against float64 at the last frames of the first precision's replicas."""
    if "frames" not in shared:
        most = max(1, EXACT_UP_TO // len(atoms))
        positions = torch.tensor(done.positions[-1][:most], dtype=torch.float64).reshape(-1, 3)
        count = len(positions) // len(atoms)
        shared["frames"] = System.from_ase([atoms] * count).replace(pos=positions).to(options.device)
        shared["exact"] = evaluated(options, model, "float64", shared["frames"])
    energies, forces = evaluated(options, model, precision, shared["frames"])
    exact_energies, exact = shared["exact"]
    wrong, off = (forces - exact).abs(), energies - exact_energies
    found = {"force errors, eV/Å: rms, largest": [float((wrong**2).mean() ** 0.5), float(wrong.max())],
             "largest force, eV/Å": float(exact.abs().max()),
             "energy errors, eV/atom, mean": float(off.mean() / len(atoms))}  # fmt: skip
    if len(off) > 1:  # kT: what the errors could change of a distribution
        found["energy errors' fluctuation, kT"] = float(off.std() / (KB * KELVIN))
    return found


def evaluated(
    options: argparse.Namespace, model: str, precision: str, system: System
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, kernels = PRECISIONS[precision]
    potential, _ = open_model(model, options.device, dtype)
    potential = potential.in_cells() if bool(system.pbc.any()) else potential
    result = Evaluator(potential, kernels)(system)  # type: ignore[arg-type]
    assert result.forces is not None
    return result.energy.detach().double().cpu(), result.forces.detach().double().cpu()


# --- output ----------------------------------------------------------------------------------------------------------


def table(job: str, found: dict[str, Found], rows: list[dict[str, Any]]) -> str:
    """The rows of a job as Markdown, and its facts."""
    first, *others = found
    replicas = len(next(iter(found[first].values.values())))
    lines = [f"{job}, {replicas} replicas", ""]
    for other in others:
        lines += [f"| | {first} | {other} | difference, standard errors | within 2 |", "|---|---|---|---|---|"]
        for row in rows:
            if row["precisions"] == [first, other] and "means" in row:
                shown = [f"{value:.5g} ± {error:.2g}" for value, error in row["means"]]
                lines.append(f"| {row['observable']} | {' | '.join(shown)} | {row['standard errors']:+.1f} | "
                             f"{row['within']} |")  # fmt: skip
            elif row["precisions"] == [first, other]:
                lines.append(f"| {row['observable']} | | | p = {row['p']:.3f} | {row['within']} |")
        lines.append("")
    for precision, one in found.items():
        lines.append(f"{precision}: " + ", ".join(f"{name} {_short(value)}" for name, value in one.facts.items()))
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def summary(rows: list[dict[str, Any]]) -> str:
    count = {word: sum(row["within"] == word for row in rows) for word in ("yes", "2 to 3", "NO", "unknown")}
    known = len(rows) - count["unknown"]
    return (
        f"{known} comparisons: {count['yes']} within 2 standard errors (or p ≥ 0.05), {count['2 to 3']} within 3 "
        f"(p ≥ 0.003), {count['NO']} beyond; equal precisions would give {0.05 * known:.1f} beyond 2"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="WHAT:MODEL:PS", help=f"WHAT is one of {', '.join(JOBS)}")
    parser.add_argument("--precisions", default="float32,mixed", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--molecule", default="CH3CH2OH", help="a file, or a name in ASE (default: ethanol)")
    parser.add_argument("--side", type=int, default=6, help="molecules of water along each side")
    parser.add_argument("--settle", type=float, default=10.0, help="ps that the water becomes a liquid in")
    parser.add_argument("--replicas", type=int, help="(default: 8; torsions: 256)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further run begins")
    parser.add_argument("--output", type=Path, help="JSON, written after each job")
    options = parser.parse_args()
    jobs, precisions = [], options.precisions.split(",")
    for job in options.jobs:
        what, _, rest = job.partition(":")
        model, _, ps = rest.rpartition(":")
        if what not in JOBS or not model or not set(precisions) <= set(PRECISIONS):
            parser.error(f"{job}: give WHAT:MODEL:PS, with WHAT of {', '.join(JOBS)}, and known precisions")
        jobs.append((what, model, float(ps)))
    began, all_rows, kept = time.monotonic(), [], []
    for what, model, ps in jobs:
        found: dict[str, Found] = {}
        shared: dict[str, Any] = {}
        title = f"{what}, {Path(model).stem}, {ps:g} ps"
        for precision in precisions:
            if time.monotonic() - began > 60 * options.minutes:
                print(f"{title}, {precision}: no time was left", flush=True)
                continue
            since = time.monotonic()
            try:
                found[precision] = JOBS[what](options, model, ps, precision, shared)
            except Exception as error:  # the others are run
                print(f"{title}, {precision}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                continue
            found[precision].facts["s"] = round(time.monotonic() - since, 1)
        if not found:
            continue
        rows = compared(found)
        all_rows += rows
        print(table(title, found, rows), flush=True)
        kept.append({"job": title, "rows": rows, "found": {name: stored(one) for name, one in found.items()}})
        if options.output:
            options.output.write_text(json.dumps({"jobs": kept, "summary": summary(all_rows)}, indent=1) + "\n")
    print(summary(all_rows))


def stored(found: Found) -> dict[str, Any]:
    """Each replica's values; mean and standard error of the curves."""
    curves = {name: [[float(f"{x:.5g}") for x in mean_of] for mean_of in (curve.mean(0),
              curve.std(0, ddof=1) / len(curve) ** 0.5 if len(curve) > 1 else curve.mean(0) * np.nan)]
              for name, curve in found.curves.items()}  # fmt: skip
    values = {name: [float(f"{x:.7g}") for x in value] for name, value in found.values.items()}
    return {"values": values, "curves": curves, "facts": found.facts}


if __name__ == "__main__":
    main()
