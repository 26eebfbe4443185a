"""Plant faults in labels and count which of them the notes of `train --check` find; makes all its data itself.

    python -m scripts.label_faults [--frames 300] [--file OWN.xyz …] [--verbose]

Data sets: the quickstart's ethanol (examples/data), water clusters of two to six molecules labelled with GFN2-xTB
(needs tblite), Cu–Al crystals of mixed composition labelled with EMT, 40 or 50 frames of each, Cu₃Al, and molecules
labelled with `organic-small`. Prints a table in Markdown: each fault, and the notes about it in a word each (see
`SIGNS`). Notes in the row "none" are false alarms.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ase import Atoms, io, units
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

ROOT = Path(__file__).parent.parent


def labelled(atoms: Atoms, calculator, stress: bool = False) -> Atoms:
    atoms.calc = calculator
    labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    if stress:
        labels["stress"] = atoms.get_stress(voigt=False)
    atoms.calc = SinglePointCalculator(atoms, **{k: v for k, v in labels.items() if k != "stress"})
    atoms.info["own_stress"] = labels.get("stress")
    return atoms


def water_clusters(count: int, calculator=None, seed: int = 0) -> list[Atoms]:
    """Two to six molecules of water near each other, turned and distorted."""
    if calculator is None:
        from tblite.ase import TBLite

        calculator = TBLite(method="GFN2-xTB", verbosity=0)
    rng, frames = np.random.default_rng(seed), []
    while len(frames) < count:
        number, places, atoms = int(rng.integers(2, 7)), [], Atoms()
        while len(places) < number:
            place = rng.uniform(-1, 1, 3) * (1.6 * number ** (1 / 3) + 0.6)
            if all(np.linalg.norm(place - other) > 2.8 for other in places):
                places.append(place)
                one = molecule("H2O")
                one.rotate(rng.uniform(0, 360), rng.normal(size=3))
                one.positions += place - one.get_center_of_mass() + rng.normal(0, 0.06, (3, 3))
                atoms += one
        if (atoms.get_all_distances() + 9 * np.eye(len(atoms))).min() < 0.75:
            continue
        frames.append(labelled(atoms, calculator))
    return frames


def alloys(count: int, mixed: bool = True, seed: int = 0) -> list[Atoms]:
    """Strained, rattled crystals of Cu and Al in one to eight cells; `mixed`: of any composition, else of Cu3Al."""
    rng, frames = np.random.default_rng(seed), []
    for _ in range(count):
        copper = rng.uniform(0, 1) if mixed else 0.75
        atoms = bulk("Cu", cubic=True, a=3.6 + 0.45 * (1 - copper))
        if mixed:
            atoms = atoms * tuple(rng.integers(1, 3, 3))
            atoms.symbols[:] = ["Cu" if rng.uniform() < copper else "Al" for _ in atoms]
        else:
            atoms.symbols[0] = "Al"
        strain = rng.normal(0, 0.02, (3, 3))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
        atoms.positions += rng.normal(0, rng.uniform(0.03, 0.12), atoms.positions.shape)
        frames.append(labelled(atoms, EMT(), stress=True))
    return frames


def molecules(count: int, seed: int = 0) -> list[Atoms]:
    """Distorted molecules of eight kinds, labelled with `organic-small`."""
    from torchmdnet2.adapters.ase import TorchMDNet2Calculator

    calculator, rng, frames = TorchMDNet2Calculator("organic-small"), np.random.default_rng(seed), []
    names = ["CH3CH2OH", "CH3COOH", "C2H6", "CH3OH", "HCOOH", "C6H6", "CH3CHO", "H2O"]
    for k in range(count):
        atoms = molecule(names[k % len(names)])
        atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
        frames.append(labelled(atoms, calculator))
    return frames


KCAL, HARTREE, BOHR = units.kcal / units.mol, units.Hartree, units.Bohr
Labels = tuple[Atoms, float, np.ndarray, "np.ndarray | None"]


def scaled(energy: float = 1.0, forces: float = 1.0, stress: float = 1.0, length: float = 1.0) -> Callable:
    def plant(k, atoms, e, f, s):
        atoms.set_positions(atoms.positions * length)
        atoms.set_cell(atoms.cell.array * length)
        return atoms, e * energy, f * forces, None if s is None else s * stress

    return plant


def zeros(k, atoms, e, f, s):
    f = np.zeros_like(f) if k % 10 == 3 else f
    return atoms, e, f, s


def frozen(k, atoms, e, f, s):
    return atoms, e, np.concatenate([np.zeros((1, 3)), f[1:]]), s


def virial(k, atoms, e, f, s):
    return atoms, e, f, None if s is None else -s * atoms.get_volume()


def cells(change: Callable) -> Callable:
    """Other cells or periodicity, with the same positions, in an orientation in which cells are not symmetric."""
    random = np.random.default_rng(0)
    turn = np.linalg.qr(random.normal(size=(3, 3)))[0]
    turn *= np.linalg.det(turn)

    def plant(k, atoms, e, f, s):
        atoms.positions = atoms.positions @ turn
        cell, atoms.pbc = change(atoms.cell.array @ turn, atoms.pbc)
        atoms.set_cell(cell)
        return atoms, e, f @ turn, None if s is None else turn.T @ s @ turn

    return plant


def some(every: int, plant: Callable) -> Callable:
    """Put the fault into every third or fourth frame."""
    return lambda k, *labels: plant(k, *labels) if k % every == 2 else labels


def axes(*order: int, sign: tuple[int, int, int] = (1, 1, 1)) -> Callable:
    return lambda k, a, e, f, s: (a, e, f[:, order] * np.array(sign), s)


def shear(*order: int, factor: float = 1.0) -> Callable:
    """Off-diagonal components yz, zx, xy in another order."""

    def plant(k, atoms, e, f, s):
        new = s.copy()
        for place, source in zip(PLACES, order, strict=True):
            new[place] = new[place[::-1]] = factor * s[PLACES[source]]
        return atoms, e, f, new

    return plant


def spun(k, atoms, e, f, s):
    """Forces in an orientation of their own, another one in each frame."""
    random = np.random.default_rng(k)
    turn = np.linalg.qr(random.normal(size=(3, 3)))[0]
    return atoms, e, f @ (turn * np.linalg.det(turn)), s


def rounded(step: float) -> Callable:
    return lambda k, a, e, f, s: (a, round(e / step) * step, f, s)


def moved(frames: list[Atoms], what: str, step: int = 1) -> list[dict]:
    """Labels of which one kind is that of the next frame; of forces, the next one of the same size."""
    labels = [{"energy": a.get_potential_energy(), "forces": a.get_forces(), "stress": a.info.get("own_stress")}
              for a in frames]  # fmt: skip
    kinds: dict[int, list[int]] = {}
    for k, a in enumerate(frames):
        kinds.setdefault(len(a) if what == "forces" else 0, []).append(k)
    source = {k: each[(i + step) % len(each)] for each in kinds.values() for i, k in enumerate(each)}
    return [{**own, what: labels[source[k]][what]} for k, own in enumerate(labels)]


PLACES = [(1, 2), (0, 2), (0, 1)]

FAULTS: dict[str, tuple[Callable, bool]] = {
    "none": (scaled(), False),
    "forces: sign": (scaled(forces=-1), False),
    "energies: sign": (scaled(energy=-1), False),
    "forces in kcal/mol/Å (× 23.06)": (scaled(forces=1 / KCAL), False),
    "energies in kcal/mol (× 23.06)": (scaled(energy=1 / KCAL), False),
    "energies in hartree (/ 27.2)": (scaled(energy=1 / HARTREE), False),
    "energies × 27.2": (scaled(energy=HARTREE), False),
    "forces in hartree/Å (/ 27.2)": (scaled(forces=1 / HARTREE), False),
    "forces in hartree/bohr (/ 51.4)": (scaled(forces=BOHR / HARTREE), False),
    "forces × 51.4": (scaled(forces=HARTREE / BOHR), False),
    "forces × 14.4": (scaled(forces=14.4), False),
    "forces / 14.4": (scaled(forces=1 / 14.4), False),
    "forces per bohr (/ 1.89)": (scaled(forces=BOHR), False),
    "forces × 1.89": (scaled(forces=1 / BOHR), False),
    "forces: x and y exchanged": (axes(1, 0, 2), False),
    "forces: y, z, x": (axes(1, 2, 0), False),
    "forces: sign of z": (axes(0, 1, 2, sign=(1, 1, -1)), False),
    "forces in another orientation": (spun, False),
    "forces in another orientation, every fourth frame": (some(4, spun), False),
    "forces of the next frame": (scaled(), False),
    "energies of the next frame": (scaled(), False),
    "forces: sign, every third frame": (some(3, scaled(forces=-1)), False),
    "forces: sign, every third atom": (
        lambda k, a, e, f, s: (a, e, f * np.where(np.arange(len(f)) % 3 == 2, -1, 1)[:, None], s),
        False,
    ),
    "forces × 1.89, every fourth frame": (some(4, scaled(forces=1 / BOHR)), False),
    "forces in kcal/mol/Å, every fourth frame": (some(4, scaled(forces=1 / KCAL)), False),
    "forces: x and y exchanged, every fourth frame": (some(4, axes(1, 0, 2)), False),
    "energies in hartree, every fourth frame": (some(4, scaled(energy=1 / HARTREE)), False),
    "energies in kcal/mol, every fourth frame": (some(4, scaled(energy=1 / KCAL)), False),
    "forces: 0.2 eV/Å along x on every atom": (lambda k, a, e, f, s: (a, e, f + np.array([0.2, 0, 0]), s), False),
    "energies: noise of 0.5 eV": (lambda k, a, e, f, s: (a, e + 0.5 * np.random.default_rng(k).normal(), f, s), False),
    "energies: 27.2 eV higher in half of the frames": (
        lambda k, a, e, f, s: (a, e + HARTREE * (np.random.default_rng(k).uniform() < 0.5), f, s),
        False,
    ),
    "energies rounded to 0.25 eV": (rounded(0.25), False),
    "energies rounded to 1 eV": (rounded(1.0), False),
    "positions in bohr": (scaled(length=1 / BOHR), False),
    "positions in nm": (scaled(length=0.1), False),
    "energies per atom": (lambda k, a, e, f, s: (a, e / len(a), f, s), False),
    "energies in float32, 2·10⁴ eV per atom": (
        lambda k, a, e, f, s: (a, float(np.float32(e - 2e4 * len(a))), f, s),
        False,
    ),
    "forces of every tenth frame 0": (zeros, False),
    "energies of every tenth frame 0": (lambda k, a, e, f, s: (a, 0.0 if k % 10 == 3 else e, f, s), False),
    "one frozen atom": (frozen, False),
    "every tenth frame twice": (scaled(), False),
    "the same with other labels": (scaled(), False),
    "stress in kbar (× 1602)": (scaled(stress=1602.2), True),
    "stress in GPa (× 160)": (scaled(stress=160.2), True),
    "stress in bar": (scaled(stress=1.602e6), True),
    "stress: sign": (scaled(stress=-1), True),
    "stress in kbar, sign of VASP": (scaled(stress=-1602.2), True),
    "stress: VASP's order": (shear(2, 0, 1), True),
    "stress: last two exchanged": (shear(0, 2, 1), True),
    "stress: first two exchanged": (shear(1, 0, 2), True),
    "stress: off-diagonals 0": (shear(0, 1, 2, factor=0.0), True),
    "stress of the first frame in all": (scaled(), True),
    "stress of the next frame": (scaled(), True),
    "stress as virial": (virial, True),
    "cell × 1.2": (cells(lambda cell, pbc: (1.2 * cell, pbc)), True),
    "cell × 0.9": (cells(lambda cell, pbc: (0.9 * cell, pbc)), True),
    "cell in bohr (× 1.89)": (cells(lambda cell, pbc: (cell / BOHR, pbc)), True),
    "cell transposed": (cells(lambda cell, pbc: (cell.T, pbc)), True),
    "one direction open": (cells(lambda cell, pbc: (cell, pbc & np.array([True, True, False]))), True),
    "no direction periodic": (cells(lambda cell, pbc: (cell, False)), True),
    "stress of every tenth frame 0": (lambda k, a, e, f, s: (a, e, f, 0 * s if k % 10 == 3 else s), True),
}

SIGNS = {
    "refused": "refused",
    "cell": "the cell of",
    "axes": "have x and",
    "axes ": "have y and",
    "axes  ": "axes in the order",
    "axis sign": "wrong sign of",
    "moved": "belong to the frame",
    "mixed signs": "have the sign opposite",
    "mixed units": "were mixed",
    "undescribed": "belong together?",
    "values": "the energy is the same",
    "shifted": "eV above those of the others",
    "turned": "turn the molecule",
    "net force": "forces do not cancel",
    "noise": "not correlated",
    "no shear": "off-diagonal stress components are exactly 0",
    "constant": "the same stress is in",
    "sign": "wrong sign",
    "order": "another order",
    "per atom": "look like energies per atom",
    "units": "are the units right",
    "zeros": "exactly 0",
    "digits": "digits were lost",
    "duplicates": "repeat the structure",
    "labels": "another energy",
    "length": "units.length right",
    "outliers": "far larger forces",
    "energies": "energies far from",
    "references": "from the reference energies",
}
"""Word in the table -> text in a note."""


def notes_of(frames: list[Atoms], fault: str, folder: str) -> list[str]:
    """The notes about frames with a fault."""
    from torchmdnet2.errors import BadConfig, BadData
    from torchmdnet2.training.config.config import parse_config
    from torchmdnet2.training.run.notes import data_notes
    from torchmdnet2.training.run.setup import make_setup

    plant, _ = FAULTS[fault]
    labels = moved(frames, fault.split()[0].replace("energies", "energy") if "next frame" in fault else "energy",
                   int("next frame" in fault))  # fmt: skip
    if "first frame" in fault:
        labels = [{**own, "stress": labels[0]["stress"]} for own in labels]
    extra = [k for k in range(0, len(frames), 10)] if "twice" in fault or "same" in fault else []
    written = []
    for k in [*range(len(frames)), *extra]:
        own = frames[k]
        atoms = Atoms(own.numbers, own.positions, cell=own.cell, pbc=own.pbc)
        atoms, e, f, s = plant(k, atoms, labels[k]["energy"], labels[k]["forces"], labels[k]["stress"])
        if len(written) >= len(frames) and "same" in fault:
            e += 0.3
        atoms.info = {"REF_energy": e} | ({} if s is None else {"REF_stress": s.ravel()})
        atoms.arrays["REF_forces"] = f
        written.append(atoms)
    io.write(f"{folder}/faulty.xyz", written, format="extxyz")
    keys = {"energy": "REF_energy", "forces": "REF_forces"} | (
        {"stress": "REF_stress"} if any("REF_stress" in a.info for a in written) else {}
    )
    raw = {
        "data": {"train": f"{folder}/faulty.xyz", "keys": keys, "split": {"validation": 0, "test": 0}, "cache": "off"},
        "model": {"name": "tensornet", "hidden_channels": 8, "num_layers": 1, "num_rbf": 8, "cutoff": 4.0},
        "priors": [{"name": "atomref", "energies": "auto"}],
        "training": {"device": "cpu"},
    }
    try:
        return data_notes(make_setup(parse_config(raw)), 10**6)
    except (BadConfig, BadData) as error:
        return [f"refused: {error}"]


def short(notes: list[str]) -> str:
    """The notes in a word each."""
    words = [next((word.strip() for word, sign in SIGNS.items() if sign in note), note[:60]) for note in notes]
    return ", ".join(dict.fromkeys(words))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--file", nargs="*", default=[], help="further extended XYZ with energy and forces")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--sets", nargs="*", help="only these data sets")
    parser.add_argument("--verbose", action="store_true", help="print the notes themselves")
    args = parser.parse_args(argv)

    n = args.frames
    makers: dict[str, Callable[[], list[Atoms]]] = {
        "ethanol": lambda: [labelled(a, a.calc) for a in io.read(ROOT / "examples/data/ethanol_gfn2.xyz", f":{n}")],
        "water": lambda: water_clusters(n),
        "Cu–Al": lambda: alloys(n),
        "ethanol, 50": lambda: [labelled(a, a.calc) for a in io.read(ROOT / "examples/data/ethanol_gfn2.xyz", "::20")],
        "water, 40": lambda: water_clusters(40, seed=1),
        "Cu–Al, 40": lambda: alloys(40, seed=1),
        "Cu₃Al": lambda: alloys(60, mixed=False),
        "organic": lambda: molecules(n),
    }
    for file in args.file:
        makers["/".join(Path(file).parts[-2:])] = lambda file=file: [
            labelled(a, a.calc) for a in io.read(file, ":") if a.calc is not None and "forces" in a.calc.results
        ]
    makers = {name: make for name, make in makers.items() if args.sets is None or name in args.sets}
    table: dict[str, list[str]] = {fault: [] for fault in args.faults}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in makers.items():
            frames, start = make(), time.monotonic()
            for fault in args.faults:
                if FAULTS[fault][1] and frames[0].info.get("own_stress") is None:
                    table[fault].append("–")
                    continue
                notes = notes_of(frames, fault, folder)
                table[fault].append(short(notes))
                if args.verbose:
                    print(f"{name}, {fault} [{time.monotonic() - start:.1f}]:", *notes, sep="\n    ", flush=True)
            print(f"{name}: {len(frames)} frames, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"| fault | {' | '.join(makers)} |\n|---|{'---|' * len(makers)}")
    for fault, cells in table.items():
        print(f"| {fault} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
