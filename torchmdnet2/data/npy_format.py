"""Sets of .npy files, one set per molecule, as TorchMD-Net's `Custom` data set has them.

Coordinates [S, N, 3], atomic numbers [N], energies [S] or [S, 1], forces [S, N, 3] of S frames; the files of each
quantity are sorted by name and belong together by their order.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ..errors import BadData
from ..system import System
from .check import check_batch
from .conversion import checked_keys, full_tensor, label_factors, stress_of
from .formats import register_format
from .labels import LABELS
from .reader import Chunk, Reader
from .sample import Sample

__all__ = ["ArrayReader", "NpyReader"]

_CHUNK_ATOMS = 65_536  # read at once, at most


class ArrayReader(Reader):
    """What readers of plain arrays share."""

    _factors: dict[str, float]

    def _read_units(self, units: Mapping[str, str | None], kind: str) -> None:
        """Take the units of all that is read; `kind` of files is named where they are not known."""
        self._factors = label_factors(units, self.path)
        for name in ("length", *self.keys):
            if name in LABELS and ":" in name:
                self._factors.setdefault(name, 1.0)
            if name in (*LABELS, "length", "virial") and name not in self._factors:
                raise BadData(f"{self.path}: {kind} files state no units; declare them, as in "
                              "{energy: kcal/mol, length: angstrom}")  # fmt: skip

    def _frames_of(self, where: str, arrays: Mapping[str, tuple[str, np.ndarray]]) -> Iterator[Chunk]:
        """The frames of one molecule.

        Args:
            where: what they are named after.
            arrays: "pos" [S, N, 3], "z" [N] or [S, N] and labels -> where each is from, and its numbers.
        """
        pos, z = arrays["pos"][1], arrays["z"][1]
        if pos.ndim != 3 or pos.shape[2] != 3 or 0 in pos.shape:
            raise BadData(f"{where}: coordinates of the shape [frames, atoms, 3] are expected, not {pos.shape}")
        frames, atoms = pos.shape[:2]
        if z.shape not in ((atoms,), (frames, atoms)) or (z != np.round(z)).any():
            raise BadData(f"{arrays['z'][0]}: {atoms} whole atomic numbers are expected, as in {where}")
        for name in self.keys:
            if name in ("stress", "virial"):
                arrays = {**arrays, name: (arrays[name][0], full_tensor(arrays[name][1]))}
            label = "stress" if name == "virial" else name
            wanted = (frames, *((atoms,) if label in LABELS and LABELS[label].per_atom else ()),
                      *(LABELS[label].row if label in LABELS else ()))  # fmt: skip
            path, array = arrays[name]
            if array.shape not in (wanted, (*wanted, 1)):
                raise BadData(f"{path}: {name} has the shape {array.shape}; {where} needs {wanted}")
            self.counts[name] += frames
        arrays = self._with_lattice(where, arrays)
        step = max(1, _CHUNK_ATOMS // atoms)
        for first in range(0, frames, step):
            part = slice(first, min(first + step, frames))
            sample = self._sample({name: array for name, (_, array) in arrays.items()}, part)
            self.num_frames += sample.system.num_systems
            yield Chunk(check_batch(sample, where, first), where, first)

    def _with_lattice(
        self, where: str, arrays: Mapping[str, tuple[str, np.ndarray]]
    ) -> Mapping[str, tuple[str, np.ndarray]]:
        """The arrays with a cell [S, 3, 3] and pbc [S, 3] of every frame, and a virial as stress."""
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
            spin=rows("spin").reshape(frames) if "spin" in arrays else torch.zeros(frames),
        )
        labels = {name: rows(name).reshape(LABELS[name].of(system)) for name in arrays if name in LABELS}
        return Sample(system, labels)


@register_format("npy")
class NpyReader(ArrayReader):
    """Frames of .npy files, mapped into memory.

    Args:
        coordinates: files of coordinates, in order.
        keys: "numbers" and labels -> pattern of their files, as {"numbers": "z_*.npy", "energy": "e_*.npy"}.
        units: "energy" and "length", and where they do not follow "forces", "stress", "dipole"; the files say nothing.

    Raises:
        BadData: numbers or units are missing, or a quantity has another number of files than the coordinates.
    """

    extensions = ("npy",)

    def __init__(
        self, coordinates: Sequence[str], keys: Mapping[str, str | None] | None, units: Mapping[str, str | None] | None
    ):
        self.path = coordinates[0] if len(coordinates) == 1 else f"{coordinates[0]} … {coordinates[-1]}"
        patterns = {name: pattern for name, pattern in (keys or {}).items() if pattern is not None}
        if "numbers" not in patterns:
            raise BadData(f"{self.path}: atomic numbers are needed: give keys.numbers, as in {{numbers: 'z_*.npy'}}")
        numbers = patterns.pop("numbers")
        self.keys = self.asked = checked_keys(patterns, self.path)
        self.available, self.counts = set(patterns.values()), Counter()
        self._read_units(units or {}, ".npy")
        self._sets = {"pos": list(coordinates), "z": self._matches("numbers", numbers, len(coordinates))}
        for name, pattern in self.keys.items():
            self._sets[name] = self._matches(name, pattern, len(coordinates))
        self.files = [file for files in self._sets.values() for file in files]

    @classmethod
    def readers(
        cls,
        paths: Sequence[str],
        keys: Mapping[str, str | None] | None,
        units: Mapping[str, str | None] | None,
        variant: str | None,
    ) -> list[Reader]:
        return [cls(paths, keys, units)]  # the files of each quantity belong together

    @classmethod
    def files_of(cls, paths: Sequence[str], keys: Mapping[str, str | None] | None) -> list[str]:
        more = [file for name, pattern in (keys or {}).items() if pattern for file in sorted(glob.glob(pattern))]
        return [*paths, *more]

    def _matches(self, name: str, pattern: str, number: int) -> list[str]:
        files = sorted(glob.glob(pattern, recursive=True))
        if len(files) != number:
            raise BadData(
                f"{self.path}: there are {number} files of coordinates and {len(files)} of {name} ('{pattern}')"
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
