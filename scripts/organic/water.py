"""Water and molecules in dynamics with `organic`: density, structure, drift, cost of constant pressure, inner steps.

    python scripts/organic/water.py FOLDER start --side 6 --time 6
    python scripts/organic/water.py FOLDER npt --time 100          # density and O–O distribution beside experiment
    python scripts/organic/water.py FOLDER curve                   # draws the distribution in FOLDER/npt.json
    python scripts/organic/water.py FOLDER nve --time 100          # drift at constant energy
    python scripts/organic/water.py FOLDER cost                    # a step at constant pressure beside constant energy
    python scripts/organic/water.py FOLDER inner --time 4 [--molecule examples/data/ibuprofen.xyz --replicas 8]

"start" makes a liquid of SIDE³ molecules, FOLDER/start.traj, that the others begin from. Each prints its results and
writes them to FOLDER/WHAT.json. Time steps are 0.5 fs but for "inner".

Experiment at 298 K and 1 bar: 0.9970 g/cm³ (W. Wagner, A. Pruß, J. Phys. Chem. Ref. Data 31, 387 (2002)); first peak of
g(O–O) at 2.80 Å of height 2.57 (L. Skinner et al., J. Chem. Phys. 138, 074506 (2013)).
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.data import covalent_radii
from ase.geometry import get_angles, get_dihedrals
from ase.io import read, write

from torchmdnet2.benchmark import water_box
from torchmdnet2.md import MDOptions, MDResult, run_md
from torchmdnet2.md.page import distances

BLOCKS = 5  # of a run, for errors of means
SETTINGS: dict[str, tuple[str | None, int | None, float, float | None]] = {
    "0.5 fs": (None, None, 0.5, None),
    "1 fs": (None, None, 1.0, None),
    "1 fs, 2 x springs": ("springs", 2, 1.0, None),
    "1.5 fs, 3 x springs": ("springs", 3, 1.5, None),
    "2 fs, 4 x springs": ("springs", 4, 2.0, None),
    "2 fs, 2 x springs, H of 3 amu": ("springs", 2, 2.0, 3.0),
    "3 fs, 3 x springs, H of 3 amu": ("springs", 3, 3.0, 3.0),
    "2 fs, 4 x organic-small": ("organic-small", 4, 2.0, None),
}
"""Of "inner": the inner potential, its steps, fs of a step, and amu of hydrogens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=[*WHAT, "curve"])
    parser.add_argument("--model", default="organic")
    parser.add_argument("--side", type=int, default=6, help="molecules along each side (default: %(default)s)")
    parser.add_argument("--time", type=float, default=4.0, help="ps of each run (default: %(default)s)")
    parser.add_argument("--molecule", help="for inner: this structure instead of the water")
    parser.add_argument("--replicas", type=int, default=1, help="for inner: of the molecule")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "curve":
        return draw_curve(options.folder)
    found = {"model": options.model, **WHAT[options.what](options)}
    (options.folder / f"{options.what}.json").write_text(json.dumps(found, indent=1, default=float) + "\n")
    print(json.dumps(found, indent=1, default=float))


def run(
    options: argparse.Namespace, atoms: Atoms, name: str, time: float, inner: str | None = None, **more: Any
) -> MDResult:
    """A run of some ps with 0.5 fs, its frames in FOLDER/name.traj."""
    timestep = more.pop("timestep", 0.5)
    setup = MDOptions(
        round(1000 * time / timestep), timestep=timestep, output=str(options.folder / name),
        trajectories=(str(options.folder / f"{name}.traj"),), **more,
    )  # fmt: skip
    return run_md(options.model, atoms, setup, device=options.device, inner=inner)


def begin(options: argparse.Namespace) -> Atoms:
    return read(options.folder / "start.traj")


def start(options: argparse.Namespace) -> dict[str, Any]:
    (atoms,) = water_box(options.side).to_ase()
    for name, friction in (("melting", 20.0), ("settling", 2.0)):
        bath = {"ensemble": "nvt", "temperature": 300.0, "friction": friction, "remove_drift": 100}
        result = run(options, atoms, name, options.time / 2, every=200, **bath)
        atoms = result.atoms
    write(options.folder / "start.traj", atoms)
    kelvin = [row.temperature_K for row in result.rows[len(result.rows) // 2 :]]
    return {"molecules": options.side**3, "K": np.mean(kelvin), "ns_per_day": result.ns_per_day}


def npt(options: argparse.Namespace) -> dict[str, Any]:
    """Of the last four fifths of the run."""
    bath = {"ensemble": "npt", "temperature": 300.0, "pressure": 1.0, "remove_drift": 100}
    result = run(options, begin(options), "npt", options.time, every=200, **bath)
    late = result.rows[len(result.rows) // 5 :]
    frames = read(options.folder / "npt.traj", ":")
    frames = frames[len(frames) // 5 :]
    each = []
    for k in range(BLOCKS):
        edges, of_pairs = distances(frames[k * len(frames) // BLOCKS : (k + 1) * len(frames) // BLOCKS])
        each.append(of_pairs["O–O"])
    oxygen, centers = np.mean(each, 0), (edges[1:] + edges[:-1]) / 2
    peak, second = oxygen.argmax(), np.where((centers > 3.8) & (centers < 5.5), oxygen, 0).argmax()
    dip = np.where((centers > 2.9) & (centers < 4.0), oxygen, 9).argmin()
    draw(options.folder / "npt.png", late, centers, oxygen)
    return {
        "molecules": len(frames[0]) // 3, "ps": options.time, "ns_per_day": result.ns_per_day, "drift": result.drift,
        "K": mean([row.temperature_K for row in late]), "bar": mean([row.pressure_bar for row in late]),
        "density": mean([row.density_g_cm3 for row in late]), "density, experiment": 0.997,
        "first peak, Å and height": [centers[peak], oxygen[peak], np.std([g[peak] for g in each]) / BLOCKS**0.5],
        "first peak, experiment": [2.80, 2.57],
        "first dip": [centers[dip], oxygen[dip]], "second peak": [centers[second], oxygen[second]],
        "g(O-O)": [centers.tolist(), oxygen.tolist()],
    }  # fmt: skip


def mean(values: Any) -> list[float]:
    """The mean, and its error from blocks."""
    blocks = [block.mean() for block in np.array_split(np.asarray(values, float), BLOCKS)]
    return [float(np.mean(values)), float(np.std(blocks, ddof=1) / BLOCKS**0.5)]


def draw(path: Path, rows: Any, centers: np.ndarray, oxygen: np.ndarray) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3))
    left.plot([row.time_ps for row in rows], [row.density_g_cm3 for row in rows])
    left.axhline(0.997, color="k", linestyle="--")
    left.set(xlabel="time, ps", ylabel="g/cm³", title="density")
    right.plot(centers, oxygen)
    right.plot(2.80, 2.57, "k+", markersize=12, label="experiment, first peak")
    right.set(xlabel="O–O distance, Å", ylabel="g(r)", xlim=(2, 8))
    right.legend()
    figure.tight_layout()
    figure.savefig(path)


def draw_curve(folder: Path) -> None:
    """The distribution that "npt" has stored, beside the first peak of experiment."""
    import matplotlib.pyplot as plt

    found = json.loads((folder / "npt.json").read_text())
    figure, axis = plt.subplots(figsize=(5.5, 2.8))
    axis.plot(*found["g(O-O)"], label=f"{found['model']}, {found['molecules']} molecules")
    axis.plot(*found["first peak, experiment"], "k+", markersize=12, label="experiment, first peak")
    axis.axhline(1, color="gray", linewidth=0.5)
    axis.set(xlabel="O–O distance, Å", ylabel="g(r)", xlim=(2, 8))
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=90)


def nve(options: argparse.Namespace) -> dict[str, Any]:
    result = run(options, begin(options), "nve", options.time, every=100)
    return {
        "ps": options.time, "drift, eV/atom/ps": result.drift, "goal": 1e-5, "ns_per_day": result.ns_per_day,
        "energy fluctuates by, eV/atom": fluctuation(result), "K": mean([row.temperature_K for row in result.rows]),
    }  # fmt: skip


def fluctuation(result: MDResult) -> float:
    """Standard deviation of the conserved energy around its drift, eV/atom."""
    total, k = np.array([row.conserved_eV for row in result.rows]) / len(result.atoms), np.arange(len(result.rows))
    return (total - np.polyval(np.polyfit(k, total, 1), k)).std()


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """ms of a step with its share of the output, in turns."""
    atoms, found = begin(options), {"nve": [], "nvt": [], "npt": []}
    for _, (ensemble, times) in itertools.product(range(3), found.items()):
        bath = {} if ensemble == "nve" else {"temperature": 300.0}
        result = run(options, atoms, f"cost-{ensemble}", options.time, every=100, ensemble=ensemble, **bath)
        times.append(86400 * 0.5e-3 / result.ns_per_day)
    least = {ensemble: min(times) for ensemble, times in found.items()}
    return {"atoms": len(atoms), "ms": found, "npt / nve": least["npt"] / least["nve"], "goal": 1.15}


def inner(options: argparse.Namespace) -> dict[str, Any]:
    """Speed and drift at constant energy, distributions at 300 K, of all SETTINGS."""
    atoms = read(options.molecule) if options.molecule else begin(options)
    kinds = bonded(atoms)
    found: dict[str, Any] = {"atoms": len(atoms)}
    for number, (name, (potential, steps, timestep, hydrogen)) in enumerate(SETTINGS.items()):
        given = {"inner": potential, "inner_steps": steps, "timestep": timestep, "hydrogen_mass": hydrogen}
        try:
            warm = run(
                options, atoms, f"inner-{number}", options.time, ensemble="nvt", temperature=300.0,
                every=round(20 / timestep), replicas=options.replicas, **given,
            )  # fmt: skip
            free = run(options, warm.atoms, f"inner-{number}-nve", options.time, every=round(50 / timestep), **given)
        except ValueError as error:
            found[name] = {"error": str(error)[:200]}
            continue
        names = [f"inner-{number}" + (f".{k}" if options.replicas > 1 else "") for k in range(options.replicas)]
        frames = [read(options.folder / f"{name}.traj", ":") for name in names]
        late = [frame for some in frames for frame in some[len(some) // 4 :]]
        kelvin = [row.temperature_K for replica in warm.replicas for row in replica.rows[len(replica.rows) // 4 :]]
        found[name] = {
            "ns_per_day": free.ns_per_day, "drift, eV/atom/ps": free.drift,
            "energy fluctuates by, eV/atom": fluctuation(free), "K": mean(kelvin),
            "times as fast": free.ns_per_day / found.get("0.5 fs", {}).get("ns_per_day", free.ns_per_day),
            **measured(late, *kinds),
        }  # fmt: skip
        print(name, found[name], flush=True)
    return found


def bonded(atoms: Atoms) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bonds [n, 2], angles [k, 3] around the atom in the middle, and chains of four atoms [m, 4] without hydrogen."""
    radii = covalent_radii[atoms.numbers]
    d = atoms.get_all_distances(mic=bool(atoms.pbc.any())) / (radii[:, None] + radii)
    near = (d < 1.25) & ~np.eye(len(atoms), dtype=bool)
    heavy = near & (atoms.numbers > 1)[:, None] & (atoms.numbers > 1)
    angles = [(i, m, j) for m, own in enumerate(near) for i, j in itertools.combinations(np.flatnonzero(own), 2)]
    chains = [
        (a, b, c, d)
        for b, c in np.argwhere(np.triu(heavy))
        for a in np.flatnonzero(heavy[b])
        for d in np.flatnonzero(heavy[c])
        if len({a, b, c, d}) == 4
    ]
    return np.argwhere(np.triu(near)), np.array(angles, int).reshape(-1, 3), np.array(chains, int).reshape(-1, 4)


def measured(frames: list[Atoms], bonds: np.ndarray, angles: np.ndarray, torsions: np.ndarray) -> dict[str, Any]:
    """Mean and standard deviation of bonds (Å) and angles (degrees) by kind, and means of cos φ and cos 2φ of
    torsions."""
    lengths, bends, turns = [], [], []
    for atoms in frames:

        def between(i: np.ndarray, j: np.ndarray, atoms: Atoms = atoms) -> np.ndarray:
            vectors = atoms.positions[j] - atoms.positions[i]
            if atoms.pbc.any():
                vectors -= np.round(vectors @ np.linalg.inv(atoms.cell.array)) @ atoms.cell.array
            return vectors

        lengths.append(np.linalg.norm(between(*bonds.T), axis=1))
        bends.append(get_angles(between(*angles[:, [1, 0]].T), between(*angles[:, [1, 2]].T)))
        if len(torsions):
            turns.append(np.radians(get_dihedrals(*(between(*torsions[:, [k, k + 1]].T) for k in range(3)))))
    symbols = np.array(frames[0].get_chemical_symbols())
    found = {}
    for atoms_of, values in ((bonds, np.stack(lengths)), (angles, np.stack(bends))):
        ends = np.sort(symbols[atoms_of[:, [0, -1]]], 1)
        middle = symbols[atoms_of[:, 1:-1]]
        kinds = np.array(["-".join((a, *m, b)) for (a, b), m in zip(ends, middle, strict=True)])
        found |= {kind: [values[:, kinds == kind].mean(), values[:, kinds == kind].std()] for kind in sorted({*kinds})}
    if turns:
        found["cos φ, cos 2φ"] = [np.cos(turns).mean(), np.cos(2 * np.array(turns)).mean()]
    return found


WHAT = {"start": start, "npt": npt, "nve": nve, "cost": cost, "inner": inner}

if __name__ == "__main__":
    main()
