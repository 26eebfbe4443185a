"""Energies and forces of small structures by density functional theory: ωB97M-D3(BJ)/def2-TZVPPD.

    python scripts/organic/dft.py energies work/dft/*.npz work/dft/energies.jsonl --forces --part 0/2 --minutes 60
    python scripts/organic/dft.py labels work/dft work/dft-labels --start r12.tmn
    python scripts/organic/dft.py rest work/geometries work/rest --number 5000
    python scripts/organic/dft.py rest work/geometries work/ions --number 2000 --charged
    python scripts/organic/dft.py ways work/geometries work/ways --number 30000 --atoms 46 --conformers 4 --charged
    python scripts/organic/label.py work/rest work/rest-labels --model r12.tmn --frames 0
    python scripts/organic/label.py work/ions work/ion-labels --model r12.tmn --frames 0
    python scripts/organic/label.py work/ways work/way-labels --model m0.tmn,m1.tmn,m2.tmn,m3.tmn --frames 0
    python scripts/organic/distil.py scans torsions.npz work/scans --model r12.tmn --start r12.tmn
    torchmdnet2 train scripts/organic/dft.yaml --set init.file=r12.tmn

The teacher learned energies without diffuse functions: its molecules of water attract each other too much, and
reactions of ions have errors of several kcal/mol. `energies` computes the geometries of shards with PySCF (`pip
install pyscf`; Q. Sun et al., J. Chem. Phys. 153, 024109 (2020)), on a GPU with GPU4PySCF (`pip install
gpu4pyscf-cuda13x`; X. Wu et al., WIREs Comput. Mol. Sci. 15, e70008 (2025)). It writes a line of JSON for each:
`energy` and `forces` of the whole and, of kinds that do not react, `alone` and `forces_alone` of each of up to three
molecules by itself with its atoms unmoved, in eV and eV/Å without dispersion. What is in the file already is not
computed again, except for lines without forces, where forces are wanted. Basis set superposition is not corrected; it
is 0.03 of 3.8 kcal/mol for a pair of waters.

`labels` reads the shards and lines of a folder and writes train.h5 and validation.h5, and files *-energies.h5 of what
has no forces. Energies have dispersion and a constant for each element, so that those of neutral molecules are at the
level of the model that a training starts from. Ions are then lower than the start has them, and reactions, interactions
and molecules by themselves agree with each other.

`rest` copies geometries of single molecules, for labels of the start itself: without them the training would forget.
Pairs are not among them: the start is wrong there. Labels of ions are used for forces and charges only. The start is
wrong for hydrogen shifts, too; they are among them, because there are few labels of them.

`ways` moves a proton of single molecules to places between its atom and an acceptor in the same molecule, with
--charged of ions. The teacher labels them: its energy is smooth there, and that of the start is not.

ωB97M-V without its nonlocal correlation (N. Mardirossian, M. Head-Gordon, J. Chem. Phys. 144, 214110 (2016)), and
D3(BJ) instead (A. Najibi, L. Goerigk, J. Chem. Theory Comput. 14, 5725 (2018)).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from ase.data import chemical_symbols
from ase.units import Bohr, Hartree, kcal, mol
from distil import write_samples
from protons import ways as ways_of
from scipy.sparse.csgraph import connected_components
from shards import ELEMENTS, Geometry, bonded, formula, read_shard, seed_of, write_shard
from teachers import Model

from torchmdnet2 import System
from torchmdnet2.data import Sample
from torchmdnet2.data.labels import GROUP, kind_code
from torchmdnet2.neighbors.pairs import all_pairs
from torchmdnet2.priors import D3

if TYPE_CHECKING:
    from pyscf import gto

BASIS, GRID = "def2-tzvppd", 3
EFFECTIVE_CORE = {"I": BASIS}
DISPERSION = D3(ELEMENTS, s8=0.3908, a1=0.566, a2=3.128, cutoff=None)
MEMORY = 6000  # MB, of one process
REACTING = ("substitutions", "protons", "shifts")  # kinds
ALONE = 3  # most molecules of a structure that are also computed by themselves
VALIDATION = 5  # one of so many names, compositions of molecules, or clusters of water
GROUPED = 5  # most structures of one name whose relative energies are trained together
HEAVY = re.compile(r"\[\d*([A-Z][a-z]?|[a-z]+)[^\]]*\]|(Br|Cl|[BCNOPSFI]|[bcnops])")


class Unsolved(Exception):
    """An odd number of electrons, or a density that does not converge. Other errors, as of a GPU, end the run."""


def molecule(geometry: Geometry) -> gto.Mole:
    """A geometry with its basis functions; Unsolved for an odd number of electrons."""
    from pyscf import gto

    atoms = [(chemical_symbols[z], place) for z, place in zip(geometry.numbers, geometry.positions, strict=True)]
    try:
        return gto.M(atom=atoms, charge=geometry.charge, basis=BASIS, ecp=EFFECTIVE_CORE, verbose=0, max_memory=MEMORY)
    except RuntimeError as error:
        raise Unsolved(str(error)) from None


class Field(NamedTuple):
    """Energy in eV and, if wanted, forces [n, 3] in eV/Å."""

    energy: float
    forces: np.ndarray | None


def self_consistent(geometry: Geometry, forces: bool, device: str) -> Field:
    """Energy and, if wanted, forces by density functional theory without dispersion; Unsolved where it has none."""
    if device == "cuda":
        from gpu4pyscf import dft
    else:
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
            raise Unsolved("the density does not converge")
    gradient = np.asarray(field.nuc_grad_method().kernel()) if forces else None
    return Field(float(energy) * Hartree, None if gradient is None else -gradient * Hartree / Bohr)


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

    if options.device == "cpu":
        lib.num_threads(1)
    k, n = map(int, options.part.split("/"))
    start, too_large = time.monotonic(), 0
    done = {
        (row["shard"], row["index"])
        for row in _rows([options.output])
        if "failed" in row or "forces" in row or not options.forces
    }
    todo = [(path.stem, i, g) for path in options.shards for i, g in enumerate(read_shard(path))]
    with options.output.open("a") as file:
        # conformers of a molecule one after another, so that a run that ends early has several of each
        for shard, index, geometry in sorted(todo, key=lambda row: (seed_of(row[2].name), *row[:2]))[k::n]:
            if time.monotonic() - start > 60 * options.minutes:
                break
            if (shard, index) in done:
                continue
            row: dict = {"shard": shard, "index": index, "name": geometry.name}
            began = time.monotonic()
            try:
                if molecule(geometry).nao > options.most:
                    too_large += 1
                    continue
                row |= _line(self_consistent(geometry, options.forces, options.device), "energy", "forces")
                parts = (molecules(geometry) or []) if shard.split("-")[1] not in REACTING else []
                if 1 < len(parts) <= ALONE:
                    fields = [self_consistent(part, options.forces, options.device) for part in parts]
                    lines = [_line(field, "alone", "forces_alone") for field in fields]
                    row |= {name: [line[name] for line in lines] for name in lines[0]}
            except Unsolved as error:
                row["failed"] = str(error)
            print(json.dumps(row | {"seconds": round(time.monotonic() - began, 1)}), file=file, flush=True)
    if too_large:
        print(f"{too_large} structures have more than {options.most} basis functions, and are left out: see --most")


def _line(field: Field, energy: str, forces: str) -> dict[str, Any]:
    """Energy and forces under these names."""
    return {energy: field.energy} | ({} if field.forces is None else {forces: field.forces.round(5).tolist()})


def _rows(paths: Sequence[Path]) -> list[dict]:
    found = []
    for path in paths:
        for k, line in enumerate(path.read_text().splitlines() if path.exists() else ()):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                raise SystemExit(f"{path}: line {k + 1} is not complete; delete it") from None
    return found


def system_of(geometry: Geometry) -> System:
    """The structure."""
    return System(
        z=torch.as_tensor(geometry.numbers.astype(np.int64)),
        pos=torch.as_tensor(geometry.positions),
        charge=torch.tensor([float(geometry.charge)]),
    )


def dispersion(geometry: Geometry) -> Field:
    """D3(BJ), without three-body terms."""
    system = system_of(geometry)
    positions = system.pos.requires_grad_()
    energy = DISPERSION(system, all_pairs(system)).sum()
    (gradient,) = torch.autograd.grad(energy, positions, allow_unused=True)
    return Field(energy.item(), np.zeros(positions.shape) if gradient is None else -gradient.numpy())


class Computed(NamedTuple):
    """A structure with its energy and, unless None, its forces, with dispersion; whether it is held out, and whether it
    is a single molecule without charge."""

    geometry: Geometry
    field: Field
    held_out: bool
    neutral: bool


def computed(folder: Path) -> Iterator[Computed]:
    """What `energies` has computed in a folder: structures, and their molecules by themselves.

    Single molecules are held out by their composition, so that a molecule of a dimer and its conformers are in one
    subset; clusters of water, which have few names, one by one; other structures by their name. Ions of one atom are
    never held out: no other structure tells their energy.
    """
    shards = {path.stem: list(read_shard(path)) for path in sorted(folder.glob("*.npz"))}
    lines = sorted(_rows(sorted(folder.glob("*.jsonl"))), key=lambda row: "forces" in row)  # the last one counts
    rows = {(row["shard"], row["index"]): row for row in lines if "energy" in row}
    for (shard, index), row in sorted(rows.items()):
        if index >= len(shards.get(shard, ())):
            raise SystemExit(f"{folder} has the energy of {shard} {index}, and not this structure: add {shard}.npz")
        geometry, (subset, kind) = shards[shard][index], shard.split("-")[:2]
        if row["name"] != geometry.name:
            raise SystemExit(f"{shard} {index}: the energy is of {row['name']}, the shard has {geometry.name}")
        single = kind == "conformers"
        word = f"{shard} {index}" if kind == "water" else composition(geometry) if single else geometry.name
        yield _computed(geometry, row["energy"], row.get("forces"), subset, word, single)
        if "alone" in row and kind not in REACTING:
            parts = molecules(geometry)
            if parts is None or len(parts) != len(row["alone"]):
                raise SystemExit(f"{shard} {index}: its molecules are not those whose energies are in the line")
            forces = row.get("forces_alone", [None] * len(parts))
            for part, energy, force in zip(parts, row["alone"], forces, strict=True):
                yield _computed(part, energy, force, subset, composition(part), True)


def composition(geometry: Geometry) -> str:
    """Formula and charge."""
    return f"{formula(geometry.numbers)} {geometry.charge}"


def _computed(
    geometry: Geometry, energy: float, forces: Sequence | None, subset: str, word: str, single: bool
) -> Computed:
    """A structure with dispersion added."""
    more = dispersion(geometry)
    field = Field(energy + more.energy, None if forces is None else np.reshape(forces, (-1, 3)) + more.forces)
    chosen = subset == "validation" or seed_of("dft", word) % VALIDATION == 0
    held_out = chosen and len(geometry.numbers) > 1
    return Computed(geometry, field, held_out, single and not geometry.charge)


def shifts_of(found: Sequence[Computed], start: Model) -> dict[int, float]:
    """How much higher the start has an atom of each element, in eV: by least squares over neutral molecules.

    The two levels of theory differ by these constants. With them, energies of a thousand structures of neutral
    molecules agree within 0.5 kcal/mol on average. Ions are not among them: the start has their energies without
    diffuse functions.
    """
    neutral = [one for one in found if one.neutral]
    elements = np.unique([z for one in neutral for z in one.geometry.numbers])
    counts = np.array([[(one.geometry.numbers == z).sum() for z in elements] for one in neutral])
    if not neutral or np.linalg.matrix_rank(counts) < len(elements):
        raise SystemExit("labels need energies of more neutral molecules, of the kinds conformers and dimers")
    higher = np.array([energy_by(start, one.geometry) - one.field.energy for one in neutral])
    shifts = np.linalg.lstsq(counts, higher, rcond=None)[0]
    left = abs(higher - counts @ shifts).mean() / (kcal / mol)
    print(f"{len(neutral)} structures of neutral molecules: energies agree within {left:.2f} kcal/mol on average")
    return dict(zip(elements.tolist(), shifts.tolist(), strict=True))


def energy_by(start: Model, geometry: Geometry) -> float:
    """Energy of a structure by a model, in eV."""
    system = system_of(geometry)
    return float(start.label(system.z[None], system.pos[None], system.charge).energy)


def labels(options: argparse.Namespace) -> None:
    """Write labels for a training."""
    everything = list(computed(options.folder))
    shifts = shifts_of(everything, Model(options.start, "cpu"))
    names = "train", "validation", "train-energies", "validation-energies"
    found: dict[str, list[Sample]] = {name: [] for name in names}
    seen: Counter[str] = Counter()
    left_out = 0
    for geometry, field, held_out, _ in everything:
        if not set(geometry.numbers.tolist()) <= set(shifts):
            left_out += 1
            continue
        energy = field.energy + sum(shifts[z] for z in geometry.numbers.tolist())
        group = kind_code(f"{geometry.name} {seen[geometry.name] // GROUPED}")
        seen[geometry.name] += 1
        values = {"energy": torch.tensor([energy], dtype=torch.float64), GROUP: torch.tensor([group])}
        if field.forces is not None:
            values["forces"] = torch.as_tensor(field.forces)
        name = ("validation" if held_out else "train") + ("-energies" if field.forces is None else "")
        found[name].append(Sample(system_of(geometry), values))
    write_samples(options.output, found)
    print(f"{left_out} left out, with elements that no neutral molecule has")


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
            kept = _alone(path, options)
            found += [kept[k] for k in rng.permutation(len(kept))[: 1 + most // 10]]  # of ten shards or more
            if len(found) >= most:
                break
        if found:
            write_shard(options.output / f"{subset}-{kind}-0000.npz", found[:most])
        print(f"{subset} {kind}: {len(found[:most])} geometries")


def _alone(path: Path, options: argparse.Namespace) -> list[Geometry]:
    """The single molecules of a shard, with or without a charge."""
    return [
        geometry
        for geometry in read_shard(path)
        if "." not in geometry.name
        and len(geometry.numbers) <= options.atoms
        and bool(geometry.charge) == options.charged
    ]


def ways(options: argparse.Namespace) -> None:
    """Write molecules of the training with a proton between two atoms, with one acceptor for each conformer."""
    geometries: list[Geometry] = []
    conformers: Counter[str] = Counter()
    for path in sorted(options.folder.glob("train-conformers-*.npz"), key=lambda path: seed_of("ways", path.name)):
        rng = np.random.default_rng(seed_of("ways", path.stem, options.seed))
        for geometry in _alone(path, options):
            if conformers[geometry.name] < options.conformers and (places := ways_of(geometry, rng)):
                conformers[geometry.name] += 1
                geometries += places
        if len(geometries) >= options.number:
            break
    geometries = geometries[: options.number]
    molecules = {(geometry.name, geometry.charge) for geometry in geometries}
    options.output.mkdir(parents=True, exist_ok=True)
    if geometries:
        write_shard(options.output / "train-ways-0000.npz", geometries)
    print(f"{len(geometries)} geometries of {len(molecules)} molecules")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("energies", help=energies.__doc__)
    one.add_argument("shards", nargs="+", type=Path)
    one.add_argument("output", type=Path, help="file of lines of JSON")
    one.add_argument("--part", default="0/1", help="K/N: every Nth geometry, beginning with K")
    one.add_argument("--minutes", type=float, default=1e9)
    one.add_argument("--forces", action="store_true", help="also forces, which take as long as the energy")
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs GPU4PySCF")
    one.add_argument("--most", type=int, default=400, help="basis functions; larger geometries are left out")
    other = verbs.add_parser("labels", help=labels.__doc__)
    other.add_argument("folder", type=Path, help="shards and lines of `energies`")
    other.add_argument("output", type=Path, help="folder")
    other.add_argument("--start", required=True, help="the model that a training starts from")
    of_geometries = {"rest": rest, "ways": ways}
    for verb, function in of_geometries.items():
        third = verbs.add_parser(verb, help=function.__doc__)
        third.add_argument("folder", type=Path, help="of geometries.py")
        third.add_argument("output", type=Path, help="folder")
        third.add_argument("--number", type=int, default=5000, help="of geometries, at most")
        third.add_argument("--charged", action="store_true", help="ions, instead of molecules without charge")
        third.add_argument("--atoms", type=int, default=30, help="of a geometry, at most")
    last = verbs.choices["ways"]
    last.add_argument("--conformers", type=int, default=1, help="of a molecule, at most")
    last.add_argument("--seed", type=int, default=0, help="of the places; molecules stay the same")
    options = parser.parse_args()
    {"energies": energies, "labels": labels, **of_geometries}[options.verb](options)


if __name__ == "__main__":
    main()
