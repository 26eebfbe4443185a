"""Readers of plain arrays: .npz files, and sets of .npy files as in TorchMD-Net's `Custom` data set.

S frames have coordinates [S, N, 3], atomic numbers [N], energies [S] or [S, 1] and forces [S, N, 3]. The files of each
quantity are sorted by name; their order matches them with the files of other quantities.
"""

from __future__ import annotations

import glob
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..core.stated import of_charges, of_first_frame, statements, warn_of_sums
from ..core.stated_words import may_be_charges, stated_units, unit_in_name
from ..errors import BadData
from ..system import System
from .dataset import Sample
from .labels import (
    LABELS,
    Names,
    cell_key,
    checked_keys,
    extra_spin,
    full_tensor,
    gradient_sign,
    label_factors,
    stated_key,
    stress_of,
    structure_keys,
)
from .reader import Chunk, Reader, register_format

__all__ = ["ArrayReader", "NpyReader", "NpzReader"]


_CHUNK_ATOMS = 65_536  # largest number of atoms in one read


class ArrayReader(Reader):
    """Base of the readers of plain arrays."""

    _factors: dict[str, float]

    def _read_units(self, units: Mapping[str, str | None], kind: str, texts: Mapping[str, str] | None = None) -> None:
        """Find the units of all arrays.

        Args:
            units: the given units.
            kind: kind of the file, for messages.
            texts: entries of the file that may state units.

        Raises:
            BadData: a unit is unknown, a stated unit differs from a given one, or a unit is neither stated nor given.
        """
        of_all = stated_units(texts or {}, self.keys)
        # forces and stress follow from energy and length, unless they are stated or given
        base = {name: unit.unit for name, unit in of_all.items() if name in ("energy", "length")}
        self._factors = label_factors({**base, **{n: u for n, u in units.items() if u is not None}}, self.path)
        in_names = {
            name: unit for name, key in self.keys.items() if kind == ".npz" and (unit := unit_in_name(name, key))
        }
        of_all |= in_names
        self.stated |= {f"unit of {n}": unit.source for n, unit in of_all.items() if n in ("length", *self.keys)}
        for name, unit in of_all.items():
            given = {"virial": "energy", "cell": "length"}.get(name, name)
            if (units.get(given) is not None or name == "cell") and not np.isclose(
                self._factors[given], unit.size, rtol=1e-6
            ):
                raise BadData(
                    f"{self.path}: its '{unit.source}' states a unit, but the unit of {given} is "
                    f"{units.get(given) or base.get(given)}: remove the one that is wrong"
                )
            if name != "cell":
                self._factors[name] = unit.size
        for name in ("length", *self.keys):
            if name in LABELS and ":" in name:
                self._factors.setdefault(name, 1.0)
            if name in (*LABELS, "length", "virial") and name not in self._factors:
                inside = ", or state them in the file, as in r_unit='Ang', e_unit='kcal/mol'" * (kind == ".npz")
                raise BadData(f"{self.path}: {kind} files state no units; give them, as in units: {{energy: kcal/mol, "
                              f"length: angstrom}} of a training configuration{inside}")  # fmt: skip

    def _frames_of(self, where: str, arrays: Mapping[str, tuple[str, np.ndarray]]) -> Iterator[Chunk]:
        """Yield the frames of one molecule.

        Args:
            where: name of the molecule's frames, for messages.
            arrays: "pos" [S, N, 3], "z" [N] or [S, N] and labels -> name of its source, and its numbers.
        """
        pos, z = arrays["pos"][1], arrays["z"][1]
        if pos.ndim != 3 or pos.shape[2] != 3 or 0 in pos.shape:
            raise BadData(f"{where}: coordinates of the shape [frames, atoms, 3] are expected, not {pos.shape}")
        frames, atoms = pos.shape[:2]
        if z.shape not in ((atoms,), (frames, atoms)) or (z != np.round(z)).any():
            raise BadData(f"{arrays['z'][0]}: {atoms} whole atomic numbers are expected, as many as atoms in {where}")
        for name in self.keys:
            if name in ("stress", "virial"):
                arrays = {**arrays, name: (arrays[name][0], full_tensor(arrays[name][1]))}
            label = "stress" if name == "virial" else name
            wanted = (frames, *((atoms,) if label in LABELS and LABELS[label].per_atom else ()),
                      *(LABELS[label].row if label in LABELS else ()))  # fmt: skip
            path, array = arrays[name]
            if name in ("charge", "spin") and array.size == 1:  # one for all frames
                array = np.broadcast_to(array.reshape(()), (frames,))
                arrays = {**arrays, name: (path, array)}
            if array.shape not in (wanted, (*wanted, 1)):
                raise BadData(f"{path}: {name} has the shape {array.shape}; {where} needs {wanted}")
            self.counts[name] += frames
        arrays = self._with_lattice(where, arrays)
        step = max(1, _CHUNK_ATOMS // atoms)
        for first in range(0, frames, step):
            part = slice(first, min(first + step, frames))
            sample = self._sample({name: array for name, (_, array) in arrays.items()}, part)
            self.num_frames += sample.system.num_systems
            yield from self.usable(sample, where, first)

    def _with_lattice(
        self, where: str, arrays: Mapping[str, tuple[str, np.ndarray]]
    ) -> Mapping[str, tuple[str, np.ndarray]]:
        """Return the arrays with cell [S, 3, 3] and pbc [S, 3] of each frame, and the virial as stress."""
        arrays, frames = dict(arrays), len(arrays["pos"][1])
        for name, shape in (("cell", (3, 3)), ("pbc", (3,))):
            if name in arrays:
                path, array = arrays[name]
                whole = full_tensor(array) if name == "cell" else array
                if whole.shape not in (shape, (frames, *shape)):
                    raise BadData(f"{path}: {name} has the shape {array.shape}; {where} needs {(frames, *shape)}")
                arrays[name] = (path, np.broadcast_to(whole, (frames, *shape)))
        if "virial" in arrays:
            path, virial = arrays.pop("virial")
            cell = arrays["cell"][1] if "cell" in arrays else np.zeros((frames, 3, 3))
            stress = stress_of(virial * self._factors["virial"], cell * self._factors["length"], where)
            arrays["stress"] = (path, stress / self._factors["stress"])
        return arrays

    def _sample(self, arrays: Mapping[str, np.ndarray], part: slice) -> Sample:
        def rows(name: str) -> torch.Tensor:
            return torch.from_numpy(np.array(arrays[name][part], dtype=np.float64)) * self._factors.get(name, 1.0)

        pos = torch.from_numpy(np.array(arrays["pos"][part], dtype=np.float64)) * self._factors["length"]
        frames, atoms = pos.shape[:2]
        z = arrays["z"].astype(np.int64)
        system = System(
            z=torch.from_numpy(np.broadcast_to(z[part] if z.ndim == 2 else z, (frames, atoms)).reshape(-1).copy()),
            pos=pos.reshape(-1, 3),
            batch=torch.arange(frames).repeat_interleave(atoms),
            cell=rows("cell") * self._factors["length"] if "cell" in arrays else None,  # type: ignore[arg-type]
            pbc=rows("pbc").bool() if "pbc" in arrays else None,  # type: ignore[arg-type]
            charge=rows("charge").reshape(frames) if "charge" in arrays else torch.zeros(frames),
            spin=rows("spin").reshape(frames) + extra_spin(self.keys["spin"])
            if "spin" in arrays
            else torch.zeros(frames),
        )
        names = {name: self.keys.get(name, "").rpartition("/")[2] for name in arrays if name in LABELS}
        labels = {
            name: rows(name).reshape(LABELS[name].of(system)) * gradient_sign(name, key) for name, key in names.items()
        }
        return Sample(system, labels)


@register_format("npy")
class NpyReader(ArrayReader):
    """Reads sets of .npy files, one set per molecule, through memory maps.

    Args:
        coordinates: files of coordinates, in order.
        keys: "numbers" and labels -> pattern of their files, as {"numbers": "z_*.npy", "energy": "e_*.npy"}.
        units: "energy" and "length", and "forces", "stress", "dipole" where they do not follow from these; required,
            since the files do not state units.

    Raises:
        BadData: numbers or units are missing, or a quantity has more or fewer files than the coordinates.
    """

    extensions = ("npy",)

    def __init__(self, coordinates: Sequence[str], keys: Names, units: Names):
        self.path = coordinates[0] if len(coordinates) == 1 else f"{coordinates[0]} … {coordinates[-1]}"
        patterns = {name: pattern for name, pattern in (keys or {}).items() if pattern is not None}
        if "numbers" not in patterns:
            raise BadData(f"{self.path}: atomic numbers are missing: give keys.numbers, as in {{numbers: 'z_*.npy'}}")
        numbers = patterns.pop("numbers")
        self.keys = self.asked = checked_keys(patterns, self.path)
        self.stated = {}
        self.available, self.counts = set(patterns.values()), Counter()
        self._read_units(units or {}, ".npy")
        self._sets = {"pos": list(coordinates), "z": self._matches("numbers", numbers, len(coordinates))}
        for name, pattern in self.keys.items():
            self._sets[name] = self._matches(name, pattern, len(coordinates))
        self.files = [file for files in self._sets.values() for file in files]

    @classmethod
    def readers(cls, paths: Sequence[str], keys: Names, units: Names, variant: str | None) -> list[Reader]:
        return [cls(paths, keys, units)]  # the files of each quantity belong together

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Names) -> list[str]:
        patterns = [pattern for pattern in (keys or {}).values() if pattern]
        return [*paths, *(file for pattern in patterns for file in sorted(glob.glob(pattern, recursive=True)))]

    def _matches(self, name: str, pattern: str, number: int) -> list[str]:
        files = sorted(glob.glob(pattern, recursive=True))
        if len(files) != number:
            raise BadData(
                f"{self.path}: there are {number} files of coordinates, but {len(files)} of {name} ('{pattern}')"
            )
        return files

    def chunks(self) -> Iterator[Chunk]:
        self.num_frames = 0
        for k, where in enumerate(self._sets["pos"]):
            arrays = {name: (files[k], _load(files[k])) for name, files in self._sets.items()}
            yield from self._frames_of(where, arrays)


def _load(path: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadData(f"{path}: it is damaged or not a .npy file of numbers: {error}") from error
    if array.dtype.kind not in "iuf":
        raise BadData(f"{path}: numbers are expected, not {array.dtype}")
    return array


# --- Single .npz files of one molecule, as in sGDML, MD17 and rMD17 ---

_STRUCTURE = {
    "pos": ("R", "coords", "coord", "positions", "pos"),
    "z": ("z", "nuclear_charges", "numbers", "atomic_numbers", "Z"),
    "pbc": ("pbc",),
}
_NAMES = {"energy": ("E", "energies"), "forces": ("F",)}


@register_format("npz")
class NpzReader(ArrayReader):
    """Reads one .npz file.

    Positions [S, N, 3] are called R, coords or positions; atomic numbers [N] or [S, N] are called z, nuclear_charges
    or numbers. The keys "positions" and "numbers" give other names. A cell [3, 3] or [S, 3, 3] is called lattice, cell
    or box; it may come with pbc [3] or [S, 3]. Stress and virial are [S, 3, 3], [S, 9] or [S, 6]. The keys `energy`
    and `forces` also find E, energies and F. Units are stated in the file (e_unit, r_unit, energy_unit, …) or given;
    different ones are an error.

    Args:
        path: the file.
        keys: label -> name of its array; without keys, energy and forces are read if present.
        units: "energy" and "length", and "forces", "stress", "dipole" where they do not follow from these.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: the file is damaged, has no positions or numbers, or units are missing or contradictory.
    """

    extensions = ("npz",)

    def __init__(self, path: str, keys: Names = None, units: Names = None):
        self.path, self.files = str(path), [str(path)]
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no data file {self.path}")
        with self._opened() as content:
            inside = set(content.files)
            texts = {name: text for name in content.files if (text := _text(content, name))}
            stated_keys = {n: stated_key(n, inside, self.path, content.__getitem__) for n in ("charge", "spin")}
            cell = cell_key(inside, self.path, content.__getitem__)
        self._anywhere = keys is None or "charge" not in keys
        keys, named_structure = structure_keys(keys)
        self._structure = {name: next((n for n in known if n in inside), None) for name, known in _STRUCTURE.items()}
        self._structure |= {"cell": cell, **{name: key for name, key in named_structure.items() if key in inside}}
        for found, name, key in (("positions", "pos", "positions"), ("atomic numbers", "z", "numbers")):
            if self._structure[name] is None or (name in named_structure and named_structure[name] not in inside):
                known = [named_structure[name]] if name in named_structure else _STRUCTURE[name]
                raise BadData(
                    f"{self.path}: {found} must be called {', '.join(known)}; the file has: "
                    f"{', '.join(sorted(inside))}. Give another name as keys.{key}"
                )
        optional: dict[str, str | None] = {name: key or name for name, key in stated_keys.items()}
        self.asked = checked_keys(keys, self.path) if keys is not None else {}
        wanted = checked_keys({**optional, **({"energy": "energy", "forces": "forces"} if keys is None else keys)},
                              self.path)  # fmt: skip
        named = {name: _found(name, key, inside) for name, key in wanted.items()}
        self.keys = {name: key for name, key in named.items() if key is not None}
        self.counts, self.available = Counter(), inside - {*self._structure.values()}
        other = {n: key for n, key in stated_keys.items() if n not in self.asked and key == self.keys.get(n, n) != n}
        self.stated = {name: f"'{key}'" for name, key in other.items()}
        self._read_units(units or {}, ".npz", texts)
        self._texts = texts

    def _opened(self) -> np.lib.npyio.NpzFile:
        try:
            content = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise BadData(f"{self.path}: it is damaged or not a .npz file: {error}") from error
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise BadData(f"{self.path}: it is not a .npz file")
        return content

    def chunks(self) -> Iterator[Chunk]:
        self.num_frames = 0
        arrays = {}
        with self._opened() as content:
            names = {name: key for name, key in self._structure.items() if key is not None}
            for name, key in {**names, **self.keys}.items():
                try:
                    array = content[key]
                except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    raise BadData(
                        f"{self.path}: the array '{key}' is damaged or does not consist of numbers: {error}"
                    ) from error
                if array.dtype.kind not in ("iufb" if name == "pbc" else "iuf"):
                    raise BadData(f"{self.path}: the array '{key}' has the type {array.dtype} instead of numbers")
                arrays[name] = (f"{self.path}, array '{key}'", array)
            if self._anywhere:
                shapes = of_charges(*arrays["pos"][1].shape[:2])
                parts = {key: content[key] for key in sorted(content.files) if may_be_charges(key)}
                first = {key: a if a.ndim == 1 else np.ravel(a[:1]) for key, a in parts.items() if a.shape in shapes}
                total = np.ravel(arrays["charge"][1])[:1].tolist() if "charge" in arrays else []
                warn_of_sums({k: values for k, values in first.items() if values.size}, f"{self.path}: ", *total)
            if self._anywhere and "charge" not in arrays:
                unread = [name for name in content.files if name not in self.keys.values()]
                info, of_atoms = of_first_frame(unread, content.__getitem__, *arrays["pos"][1].shape[:2])
                numbers = arrays["z"][1]
                statements(
                    {**self._texts, **info}, of_atoms, "cell" in arrays, "'{}'", ("spin",) * ("spin" in arrays),
                    numbers[0] if numbers.ndim == 2 else numbers, f"{self.path}: ",
                )  # fmt: skip
        yield from self._frames_of(self.path, arrays)


def _found(name: str, key: str, inside: set[str]) -> str | None:
    """Return the name of a label in the file; None if it is missing."""
    if key in inside:
        return key
    return next((other for other in _NAMES.get(name, ()) if key == name and other in inside), None)


_LONGEST = 4096  # bytes of the largest array that may be a text; larger ones are not read for texts


def _text(content: np.lib.npyio.NpzFile, name: str) -> str:
    """Return the text in an array of a file; "" if it has none, or "N/A"."""
    if content.zip is None or content.zip.getinfo(f"{name}.npy").file_size > _LONGEST:
        return ""
    try:
        value = content[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        return ""  # if the array is a label, reading it raises the error
    if value.ndim or value.dtype.kind not in "SU":
        return ""
    text = value.item()
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return "" if text == "N/A" else text
