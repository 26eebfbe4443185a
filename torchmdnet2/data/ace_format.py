"""Reader of HDF5 files in TorchMD-Net's "Ace" layout, which the attributes of the file name.

Version 1.0: molecule/{atomic_numbers, formal_charges, conformations/name/{positions, formation_energy, forces,
partial_charges, dipole_moment}}. Version 2.0: master/molecule/{atomic_numbers, formal_charges, positions [S, N, 3],
formation_energies [S], forces, partial_charges [S, N], dipole_moments [S, 3]}. All but the integers have an attribute
`units`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.files import DAMAGE, damage_is_bad_data, load_h5py, opened_hdf5
from ..errors import BadData
from ..system import System
from .dataset import Sample
from .labels import LABELS, Names, checked_keys, label_factors, label_names
from .reader import Chunk, Reader, register_format

if TYPE_CHECKING:
    import h5py

__all__ = ["AceReader", "is_ace"]

_NAMES = {
    "energy": ("formation_energies", "formation_energy"),
    "forces": ("forces",),
    "charges": ("partial_charges",),
    "dipole": ("dipole_moments", "dipole_moment"),
}
"""label -> its names in both versions"""

_UNIT_KIND = {"pos": "length", "charges": "charge"}
_FAULT = "it is damaged or not of the Ace layout"


def is_ace(path: str | PathLike) -> bool:
    """Return True if the attributes of an HDF5 file name this layout; False for a file that cannot be read."""
    h5py = load_h5py()
    try:
        with h5py.File(path, "r") as file:
            return _text(file.attrs.get("layout", "")) == "Ace"
    except DAMAGE:
        return False


@register_format("ace")
class AceReader(Reader):
    """Reads the frames of a file in the Ace layout.

    Args:
        path: the file.
        keys: label -> name of its dataset; the label's name stands for the dataset of the layout. The total charge is
            the sum of the formal charges unless `charge` is None. Without keys, energy and forces are read if present.
        units: quantity -> unit, for datasets that do not state one.
    """

    @classmethod
    def require(cls, variant: str | None) -> None:
        super().require(variant)
        load_h5py()

    def __init__(self, path: str | PathLike, keys: Names = None, units: Names = None):
        self.path, self.files = str(path), [str(path)]
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no data file {self.path}")
        given = {"energy": "energy", "forces": "forces"} if keys is None else keys
        self.asked = checked_keys(given, self.path) if keys is not None else {}
        for name in ("charge", "spin"):  # the layout always has a charge and never a spin
            self.asked.pop(name, None)
        self.keys = {name: key for name, key in checked_keys(given, self.path).items() if name in LABELS}
        self._charged = given.get("charge", "charge") is not None
        self.stated = {"charge": "'formal_charges'"} if self._charged else {}
        self._declared = label_factors(units or {}, self.path)
        self.available, self.counts = set(), Counter()

    def chunks(self) -> Iterator[Chunk]:
        self.num_frames = 0
        with damage_is_bad_data(self.path, _FAULT), opened_hdf5(self.path) as file:
            version = _text(file.attrs.get("layout_version", ""))
            if version not in ("1.0", "2.0"):
                raise BadData(f"{self.path}: version '{version}' of the Ace layout is unknown; known are 1.0 and 2.0")
            yield from self._version_1(file) if version == "1.0" else self._version_2(file)
        if self.num_frames == 0:
            raise BadData(f"{self.path}: the file has no frames")

    def _version_1(self, file: h5py.File) -> Iterator[Chunk]:
        for name, molecule in file.items():
            for k, frame in enumerate(molecule["conformations"].values()):
                yield from self._chunk(molecule, frame, f"{self.path}, molecule '{name}'", k, single=True)

    def _version_2(self, file: h5py.File) -> Iterator[Chunk]:
        for master in file.values():
            for name, molecule in master.items():
                if len(molecule["positions"]):
                    yield from self._chunk(molecule, molecule, f"{self.path}, molecule '{name}'", 0, single=False)

    def _chunk(self, molecule: h5py.Group, frames: h5py.Group, where: str, first: int, single: bool) -> Iterator[Chunk]:
        with damage_is_bad_data(where, _FAULT):
            sample = self._read(molecule, frames, where, single)
        self.num_frames += sample.system.num_systems
        yield from self.usable(sample, where, first)

    def _read(self, molecule: h5py.Group, frames: h5py.Group, where: str, single: bool) -> Sample:
        z = _whole(molecule["atomic_numbers"], where)
        pos = self._values(frames["positions"], "pos", where, single)
        if z.ndim != 1 or pos.shape[1:] != (len(z), 3):
            raise BadData(
                f"{where}: atomic numbers of the shape {z.shape} do not fit positions of the shape {pos.shape}"
            )
        count = len(pos)
        charge = 0
        if self._charged:
            charges = _whole(molecule["formal_charges"], where)
            if charges.shape not in ((), z.shape):
                raise BadData(f"{where}: {len(z)} formal charges are expected, not {charges.shape}")
            charge = int(charges.sum())
        system = System(
            z=torch.from_numpy(z).repeat(count),
            pos=pos.reshape(-1, 3),
            batch=torch.arange(count).repeat_interleave(len(z)),
            charge=torch.full((count,), float(charge)),
            spin=torch.zeros(count, dtype=torch.long),
        )
        inside = set(frames) - {"positions", "atomic_numbers", "formal_charges"}
        self.available |= inside
        labels = {}
        for name in label_names(self.keys):
            key = self.keys[name]
            names = _NAMES.get(name, (key,)) if key == name else (key,)
            found = next((n for n in names if n in inside), None)
            if found is not None:
                value, shape = self._values(frames[found], name, where, single), LABELS[name].of(system)
                if value.numel() != int(np.prod(shape)) or len(value) != count:
                    raise BadData(f"{where}: {found} has the shape {tuple(value.shape)}, which does not fit {count} "
                                  f"frames of {len(z)} atoms")  # fmt: skip
                labels[name] = value.reshape(shape)
                self.counts[name] += count
        return Sample(system, labels)

    def _values(self, dataset: h5py.Dataset, name: str, where: str, single: bool) -> torch.Tensor:
        """Return a label in the package's units, [S, …]."""
        stated, kind = dataset.attrs.get("units"), _UNIT_KIND.get(name, name)
        unit = "length" if name == "pos" else name
        label = dataset.name.rsplit("/", 1)[-1]
        if stated is not None:
            by = label_factors({kind: _text(stated)}, f"{where}, dataset '{label}'")[unit]
        elif unit in self._declared:
            by = self._declared[unit]
        else:
            raise BadData(f"{where}: dataset '{label}' has no attribute 'units'; give units")
        values = torch.from_numpy(np.array(dataset[()], dtype=np.float64)) * by
        return values[None] if single else values


def _whole(dataset: h5py.Dataset, where: str) -> np.ndarray:
    values = np.asarray(dataset[()])
    if values.dtype.kind not in "iuf" or (values != np.round(values)).any():
        raise BadData(f"{where}: dataset '{dataset.name.rsplit('/', 1)[-1]}' must hold whole numbers")
    return values.astype(np.int64)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
