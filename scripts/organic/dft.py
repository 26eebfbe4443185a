"""Energies of small structures by density functional theory, where the teacher errs: ωB97M-D3(BJ)/def2-TZVPPD.

    python scripts/organic/dft.py energies work/dft/*.npz work/dft/energies.jsonl --part 0/2 --minutes 60
    python scripts/organic/dft.py labels work/dft work/dft-labels --start r12.tmn
    python scripts/organic/dft.py labels work/dft work/dimer-labels --start r12.tmn --kinds dimers
    python scripts/organic/dft.py rest work/geometries work/rest --number 5000
    python scripts/organic/label.py work/rest work/rest-labels --model r12.tmn --frames 0
    torchmdnet2 train scripts/organic/dft.yaml --set init.file=r12.tmn

The teacher learned energies without diffuse functions: its molecules of water attract each other too much, and
reactions of ions have errors of several kcal/mol. `energies` computes the geometries of shards with PySCF (`pip
install pyscf`; Q. Sun et al., J. Chem. Phys. 153, 024109 (2020)), a line of JSON for each as it is done: `energy` of
the whole and, of kinds that do not react, `alone` of each molecule by itself with its atoms unmoved, in eV without
dispersion. What is in the file already is not computed again. Basis set superposition is not corrected; it is 0.03 of
3.8 kcal/mol for a pair of waters.

`labels` reads the shards and lines of a folder and writes train.h5 and validation.h5. Absolute energies of the two
levels differ, so a structure has the energy of its molecules by the model that a training starts from, and the
interaction by density functional theory. The molecules themselves, with the start's energies, are in alone.h5: without
them the training would change their energies instead of the interaction. Where molecules react or rearrange, or bonds
do not tell them apart, it is the energy relative to the molecules of its name, which shards of the kind `conformers`
have; these get no label. For there the start may be wrong for each molecule by itself, with long bonds or half turned
over. The start is wrong for H2, too: its energy is relative to the atoms of hydrogen in other molecules.

`rest` copies geometries of single molecules, for labels of the start itself: without them the training would forget.
Pairs are not among them: the start is wrong there. It is wrong for hydrogen shifts, too; they are among them, because
there are few labels of them.

ωB97M-V without its nonlocal correlation (N. Mardirossian, M. Head-Gordon, J. Chem. Phys. 144, 214110 (2016)), and
D3(BJ) instead (A. Najibi, L. Goerigk, J. Chem. Theory Comput. 14, 5725 (2018)).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from ase.data import chemical_symbols
from ase.units import Hartree
from distil import write_samples
from scipy.sparse.csgraph import connected_components
from shards import ELEMENTS, Geometry, bonded, read_shard, seed_of, write_shard
from teachers import Model

from torchmdnet2 import System
from torchmdnet2.data import Sample
from torchmdnet2.neighbors.pairs import all_pairs
from torchmdnet2.priors import D3

if TYPE_CHECKING:
    from pyscf import gto

BASIS, GRID = "def2-tzvppd", 3
EFFECTIVE_CORE = {"I": BASIS}
DISPERSION = D3(ELEMENTS, s8=0.3908, a1=0.566, a2=3.128, cutoff=None)
MEMORY = 6000  # MB, of one process
REACTING = ("substitutions", "protons", "shifts")  # kinds
HYDROGEN = "[H][H]"
VALIDATION = 5  # one of so many names, or clusters of water
HEAVY = re.compile(r"\[\d*([A-Z][a-z]?|[a-z]+)[^\]]*\]|(Br|Cl|[BCNOPSFI]|[bcnops])")


def molecule(geometry: Geometry) -> gto.Mole:
    """A geometry with its basis functions."""
    from pyscf import gto

    atoms = [(chemical_symbols[z], place) for z, place in zip(geometry.numbers, geometry.positions, strict=True)]
    return gto.M(atom=atoms, charge=geometry.charge, basis=BASIS, ecp=EFFECTIVE_CORE, verbose=0, max_memory=MEMORY)


def scf_energy(geometry: Geometry) -> float:
    """Energy without dispersion, in eV; RuntimeError where it does not converge."""
    from pyscf import dft

    field = dft.RKS(molecule(geometry), xc="wb97m_v").density_fit()
    field.nlc, field.grids.level, field.conv_tol = False, 1, 1e-6
    field.kernel()  # on a coarse grid
    density = field.make_rdm1()
    field.grids.level, field.conv_tol = GRID, 1e-8
    field.grids.build()
    energy = field.kernel(dm0=density)
    if not field.converged:
        field = field.newton()
        energy = field.kernel(dm0=density)
        if not field.converged:
            raise RuntimeError("the density does not converge")
    return float(energy) * Hartree


def heavy_atoms(name: str) -> list[str]:
    """Symbols of the atoms of a SMILES string, but for hydrogen beside others, sorted."""
    symbols = ["".join(found).capitalize() for found in HEAVY.findall(name)]
    return sorted(symbol for symbol in symbols if symbol != "H" or len(symbols) == 1)


def molecules(geometry: Geometry) -> list[Geometry] | None:
    """The molecules of the name, where the structure has them; None where bonds or charges do not tell them.

    They tell others on the way of a reaction and after it. A charge belongs to the only molecule that has an odd number
    of electrons without it.
    """
    count, label = connected_components(bonded(geometry))
    parts = [np.flatnonzero(label == k) for k in range(count)]
    odd = [bool(geometry.numbers[part].sum() % 2) for part in parts]
    there = [sorted(chemical_symbols[z] for z in geometry.numbers[part] if z > 1) for part in parts]
    if sorted(there) != sorted(map(heavy_atoms, geometry.name.split("."))):
        return None
    if sum(odd) != abs(geometry.charge) or sum(odd) > 1:
        return None
    return [
        Geometry(f"{geometry.name} {k}", geometry.numbers[part], geometry.positions[part], geometry.charge * odd[k])
        for k, part in enumerate(parts)
    ]


def energies(options: argparse.Namespace) -> None:
    """Compute energies of shards."""
    from pyscf import lib

    lib.num_threads(1)
    k, n = map(int, options.part.split("/"))
    start = time.monotonic()
    done = {(row["shard"], row["index"]) for row in _rows([options.output])}
    todo = [(path.stem, i, g) for path in options.shards for i, g in enumerate(read_shard(path))]
    with options.output.open("a") as file:
        for shard, index, geometry in sorted(todo, key=lambda row: seed_of(*row[:2]))[k::n]:
            if time.monotonic() - start > 60 * options.minutes:
                break
            if (shard, index) in done:
                continue
            row: dict = {"shard": shard, "index": index, "name": geometry.name}
            began = time.monotonic()
            try:
                if molecule(geometry).nao > options.most:
                    continue
                row["energy"] = scf_energy(geometry)
                if shard.split("-")[1] not in REACTING and len(parts := molecules(geometry) or []) > 1:
                    row["alone"] = [scf_energy(part) for part in parts]
            except RuntimeError as error:  # no convergence, or an odd number of electrons
                row["failed"] = str(error)
            print(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}), file=file, flush=True)


def _rows(paths: Sequence[Path]) -> list[dict]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def system_of(geometry: Geometry) -> System:
    """The structure."""
    return System(
        z=torch.as_tensor(geometry.numbers.astype(np.int64)),
        pos=torch.as_tensor(geometry.positions),
        charge=torch.tensor([float(geometry.charge)]),
    )


def dispersion(geometry: Geometry) -> float:
    """D3(BJ) in eV, without three-body terms."""
    system = system_of(geometry)
    return float(DISPERSION(system, all_pairs(system)).sum())


def energy_by(start: Model, geometry: Geometry) -> float:
    """Energy of a structure by a model, in eV."""
    system = system_of(geometry)
    return float(start.label(system.z[None], system.pos[None], system.charge).energy)


def hydrogen_shift(known: Mapping[str, tuple[Geometry, float]], start: Model) -> float:
    """How much higher the start has an atom of hydrogen than density functional theory, in eV: by least squares, with a
    shift for each element, over neutral molecules. They keep differences of 0.3 kcal/mol on average."""
    neutral = [(g, energy) for name, (g, energy) in known.items() if not g.charge and name != HYDROGEN]
    elements = np.unique([z for g, _ in neutral for z in g.numbers])
    counts = np.array([[(g.numbers == z).sum() for z in elements] for g, _ in neutral])
    if np.linalg.matrix_rank(counts) < len(elements):
        raise SystemExit("the energy of H2 needs those of more neutral molecules, of the kind conformers")
    higher = np.array([energy_by(start, g) - energy - dispersion(g) for g, energy in neutral])
    return float(np.linalg.lstsq(counts, higher, rcond=None)[0][elements == 1][0])


def against(
    geometry: Geometry, row: Mapping, known: Mapping[str, tuple[Geometry, float]], reacts: bool
) -> tuple[list[Geometry], float] | None:
    """What a structure's energy is relative to, and the difference in eV; None if that was not computed, or has other
    atoms or another charge.

    Args:
        geometry: the structure.
        row: its line of `energies`.
        known: molecules by name, with their energies.
        reacts: take the molecules by name.
    """
    parts, other = None if reacts else molecules(geometry), sum(row.get("alone", []))
    if parts is None or len(parts) != len(row.get("alone", [])):
        names = geometry.name.split(".")
        if not all(name in known for name in names):
            return None
        parts, other = [known[name][0] for name in names], sum(known[name][1] for name in names)
        if sorted(np.concatenate([part.numbers for part in parts])) != sorted(geometry.numbers):
            return None
    if sum(part.charge for part in parts) != geometry.charge:
        return None
    return parts, row["energy"] - other + dispersion(geometry) - sum(map(dispersion, parts))


def _sample(geometry: Geometry, energy: float) -> Sample:
    return Sample(system_of(geometry), {"energy": torch.tensor([energy], dtype=torch.float64)})


def labels(options: argparse.Namespace) -> None:
    """Write labels for a training, of some kinds."""
    shards = {path.stem: list(read_shard(path)) for path in sorted(options.folder.glob("*.npz"))}
    rows = {
        (row["shard"], row["index"]): row for row in _rows(sorted(options.folder.glob("*.jsonl"))) if "energy" in row
    }
    known: dict[str, tuple[Geometry, float]] = {}
    for (shard, index), row in rows.items():
        geometry = shards[shard][index]
        if row["name"] != geometry.name:
            raise SystemExit(f"{shard} {index}: the energy is of {row['name']}, the shard has {geometry.name}")
        if "-conformers-" in shard and row["energy"] < known.get(geometry.name, (geometry, np.inf))[1]:
            known[geometry.name] = geometry, row["energy"]
    start = Model(options.start, "cpu")
    wanted = "hydrogen" in options.kinds and any("-hydrogen-" in shard for shard, _ in rows)
    hydrogen = hydrogen_shift(known, start) if wanted else 0.0
    found: dict[str, list[Sample]] = {"train": [], "validation": []}
    alone: dict[tuple[bytes, bytes], Sample] = {}  # by atoms and their places: bare ions are all at the same one
    left_out = 0
    for (shard, index), row in sorted(rows.items()):
        geometry, (subset, kind) = shards[shard][index], shard.split("-")[:2]
        if kind not in options.kinds or subset not in found:
            continue
        if kind == "hydrogen":
            energy = row["energy"] + dispersion(geometry) + 2 * hydrogen
        elif relative := against(geometry, row, known, kind in REACTING):
            parts, energy = relative
            for part in parts:
                own = energy_by(start, part)
                alone[part.numbers.tobytes(), part.positions.tobytes()] = _sample(part, own)
                energy += own
        else:
            left_out += 1
            continue
        word = f"{shard} {index}" if kind == "water" else geometry.name  # clusters of water have few names
        if seed_of("dft", word) % VALIDATION == 0:
            subset = "validation"
        found[subset].append(_sample(geometry, energy))
    write_samples(options.output, found | {"alone": list(alone.values())})
    print(f"{left_out} left out, whose molecules were not computed")


def rest(options: argparse.Namespace) -> None:
    """Copy geometries of single molecules, equally many of each kind at most."""
    paths: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in sorted(options.folder.glob("*.npz"), key=lambda path: seed_of("rest", path.name)):
        subset, kind = path.stem.split("-")[:2]
        if subset in ("train", "validation"):
            paths[subset, kind].append(path)
    options.output.mkdir(parents=True, exist_ok=True)
    for (subset, kind), shards in sorted(paths.items()):
        most = options.number // (VALIDATION if subset == "validation" else 1) // len({kind for _, kind in paths})
        rng, found = np.random.default_rng(seed_of("rest", subset, kind)), []
        for path in shards:
            kept = [g for g in read_shard(path) if "." not in g.name and len(g.numbers) <= options.atoms]
            found += [kept[k] for k in rng.permutation(len(kept))[: 1 + most // 10]]  # of ten shards or more
            if len(found) >= most:
                break
        if found:
            write_shard(options.output / f"{subset}-{kind}-0000.npz", found[:most])
        print(f"{subset} {kind}: {len(found[:most])} geometries")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("energies", help=energies.__doc__)
    one.add_argument("shards", nargs="+", type=Path)
    one.add_argument("output", type=Path, help="file of lines of JSON")
    one.add_argument("--part", default="0/1", help="K/N: every Nth geometry, beginning with K")
    one.add_argument("--minutes", type=float, default=1e9)
    one.add_argument("--most", type=int, default=400, help="basis functions; larger geometries are left out")
    other = verbs.add_parser("labels", help=labels.__doc__)
    other.add_argument("folder", type=Path, help="shards and lines of `energies`")
    other.add_argument("output", type=Path, help="folder")
    other.add_argument("--start", required=True, help="the model that a training starts from")
    other.add_argument("--kinds", nargs="+", default=["water", "hydrogen", *REACTING], help="that get labels")
    third = verbs.add_parser("rest", help=rest.__doc__)
    third.add_argument("folder", type=Path, help="of geometries.py")
    third.add_argument("output", type=Path, help="folder")
    third.add_argument("--number", type=int, default=5000, help="of geometries, at most")
    third.add_argument("--atoms", type=int, default=30, help="of a geometry, at most")
    options = parser.parse_args()
    {"energies": energies, "labels": labels, "rest": rest}[options.verb](options)


if __name__ == "__main__":
    main()
