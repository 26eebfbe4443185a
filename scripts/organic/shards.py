"""Shards of geometries, seeds from text, and settings that must not change between runs, for all stages.

A shard is an .npz file of geometries without energies: molecule after molecule `name`, `charge`, `atoms` (how many),
`conformers` (how many geometries of it), `numbers` (atomic numbers, concatenated) and `positions_milliangstrom` (int16,
centred, conformer after conformer). Files of this form from elsewhere, named SUBSET-KIND-0000.npz, are labelled too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ase.data import covalent_radii
from ase.symbols import Symbols

from torchmdnet2.core.files import atomic_write, written_aside

ELEMENTS = (1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 53)  # H B C N O F Si P S Cl As Se Br I
SUBSETS = ("train", "validation", "test")


class Geometry(NamedTuple):
    """One structure: name, atomic numbers [n], positions [n, 3] in Å, total charge in e."""

    name: str
    numbers: np.ndarray
    positions: np.ndarray
    charge: int


def seed_of(*words: object) -> int:
    """A seed from words: the same on every machine and in every order of work."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:4], "little") % 2**31


def rotation(rng: np.random.Generator) -> np.ndarray:
    """A random rotation, [3, 3] (uniform: G. Stewart, SIAM J. Numer. Anal. 17, 403 (1980))."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q if np.linalg.det(q) > 0 else -q


def bonded(geometry: Geometry) -> np.ndarray:
    """Which atoms are bonded, by their distances: [n, n] bool."""
    radii = covalent_radii[geometry.numbers]
    apart = np.linalg.norm(geometry.positions[:, None] - geometry.positions[None], axis=2)
    return (apart < 1.25 * (radii[:, None] + radii[None])) & ~np.eye(len(radii), dtype=bool)


def formula(numbers: np.ndarray) -> str:
    """Hill formula of atomic numbers."""
    return Symbols(numbers).get_chemical_formula()


def write_shard(path: Path, geometries: Iterable[Geometry]) -> int:
    """Write a compressed shard, as a whole or not at all. Returns the number of geometries."""
    found = list(geometries)
    centred = [g.positions - g.positions.mean(0) for g in found]
    if any(np.abs(p).max() > 32 for p in centred):
        raise ValueError(f"{path}: a structure is larger than 64 Å")
    with written_aside(path) as file:
        np.savez_compressed(
            file,
            name=np.array([g.name for g in found], dtype=np.bytes_),
            charge=np.array([g.charge for g in found], np.int8),
            atoms=np.array([len(g.numbers) for g in found], np.int16),
            conformers=np.ones(len(found), np.int16),
            numbers=np.concatenate([g.numbers for g in found] or [np.empty(0)]).astype(np.int8),
            positions_milliangstrom=(1000 * np.concatenate([*centred, np.empty((0, 3))])).round().astype(np.int16),
        )
    return len(found)


def read_shard(path: Path) -> Iterator[Geometry]:
    """The geometries of a shard."""
    with np.load(path, allow_pickle=False) as data:
        content = {name: data[name] for name in data.files}
    a = x = 0
    for k, (n, conformers) in enumerate(
        zip(content["atoms"].astype(int), content["conformers"].astype(int), strict=True)
    ):
        numbers = content["numbers"][a : a + n].astype(np.int64)
        positions = content["positions_milliangstrom"][x : x + n * conformers].reshape(conformers, n, 3) / 1000
        a, x = a + n, x + n * conformers
        name = content["name"][k]
        name = name.decode() if isinstance(name, bytes) else str(name)
        yield from (Geometry(name, numbers, p, int(content["charge"][k])) for p in positions)


def keep_settings(folder: Path, stage: str, settings: Mapping[str, Any], packages: Iterable[str]) -> None:
    """Record settings and versions in the folder; refuse to continue with other settings.

    Other versions are recorded next to the first ones; times of files show which version made them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stage}.json"
    known = json.loads(path.read_text()) if path.exists() else {"settings": dict(settings), "versions": []}
    if known["settings"] != json.loads(json.dumps(dict(settings))):
        raise SystemExit(f"{folder} was started with other settings ({path}): use them, or another folder")
    found = {name: _version(name) for name in packages}
    if found not in known["versions"]:
        known["versions"].append(found)
    atomic_write(path, json.dumps(known, indent=1) + "\n")


def file_sha256(path: str | os.PathLike) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
