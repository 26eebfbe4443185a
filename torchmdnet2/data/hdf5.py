"""Reader and writer of HDF5 files.

Each group holds S frames of N atoms, of one molecule or of molecules of the same size. The layouts of `LAYOUTS` are
recognised by their datasets; the keys `numbers` and `positions` define others. Datasets are z [N] or [S, N] as numbers
or symbols, pos [S, N, 3], energy [S], forces [S, N, 3], charges [S, N], dipole [S, 3], stress or virial [S, 3, 3],
[S, 9] or [S, 6].

Optional in all layouts are charge and spin (one number or [S], or attributes of the group or file), cell, box or
lattice ([3, 3] or [S, 3, 3]) and pbc ([3] or [S, 3]). Without `charge`, the charge is the sum of the formal charges in
`smiles`. The group `_metadata` is skipped.
"""

from __future__ import annotations

import os
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.files import DAMAGE, damage_is_bad_data, load_h5py, opened_hdf5
from ..core.stated import Statement, agreed, of_charges, of_first_frame, statements, warn_of_sums, whole_number
from ..core.stated_words import StatedUnit, formal_charge, kind_of, may_be_charges, stated_units, unit_in_name
from ..errors import BadData
from ..system import System
from ..units import OWN_UNITS
from .ace_format import AceReader, is_ace
from .check import check_sample
from .dataset import Dataset, Sample, checked_index, collate
from .labels import (
    CELLS,
    LABELS,
    Names,
    any_factor,
    cell_key,
    checked_keys,
    extra_spin,
    full_tensor,
    gradient_sign,
    label_factors,
    label_names,
    stated_key,
    stress_of,
    structure_keys,
)
from .reader import Chunk, Reader, describe, register_format

__all__ = ["LAYOUTS", "HDF5Dataset", "write_hdf5"]


if TYPE_CHECKING:
    import h5py


LAYOUTS = {
    "torchmd-net": {
        "z": "types",
        "pos": "pos",
        "energy": "energy",
        "forces": "forces",
        "charges": "partial_charges",
        "dipole": "dipole",
        "stress": "stress",
    },
    "spice": {
        "z": "atomic_numbers",
        "pos": "conformations",
        "energy": "dft_total_energy",
        "forces": "dft_total_gradient",
        "charges": "mbis_charges",
        "dipole": "scf_dipole",
    },
    "ani": {"z": "species", "pos": "coordinates", "energy": "energies", "forces": "forces"},
    "ani1x": {
        "z": "atomic_numbers",
        "pos": "coordinates",
        "energy": "wb97x_dz.energy",
        "forces": "wb97x_dz.forces",
        "charges": "wb97x_dz.cm5_charges",
        "dipole": "wb97x_dz.dipole",
    },
    "aimnet2": {
        "z": "numbers",
        "pos": "coord",
        "energy": "energy",
        "forces": "forces",
        "charges": "charges",
        "dipole": "dipole",
        "stress": "stress",
    },
}
"""Layout -> quantity -> name of its dataset."""

_STRUCTURE = frozenset({*CELLS, "pbc", "charge", "spin"}).union(
    *({layout["z"], layout["pos"]} for layout in LAYOUTS.values())
)


@dataclass(frozen=True)
class Group:
    """A group and its datasets, whose numbers are read later; dataset names are absolute."""

    name: str
    num_frames: int
    num_atoms: int
    datasets: dict[str, str]  # quantity -> dataset
    factors: dict[str, float]  # quantity -> factor to eV, Å, e
    stated: dict[str, int]  # charge and spin from attributes


@register_format("hdf5")
class HDF5Dataset(Dataset, Reader):
    """Reads an HDF5 file in one of the layouts above.

    The file is opened by each process when it first reads a frame, so the data set can be pickled and used in workers
    of any start method. Energies are kept in float64.

    Args:
        path: the file.
        keys: label -> name of its dataset, for "energy", "forces", "stress", "dipole", "charges", "charge", "spin".
            The label's name ("energy") stands for the dataset of the layout. None: do not read this label. Each key
            must be in at least one group. "numbers" and "positions" name the datasets of the structures if the layout
            is not in `LAYOUTS`. Forces that their name calls a gradient are negated. Without `keys`, energy and forces
            are read if present; charge and spin are always read unless None.
        units: quantity -> unit, for datasets without the attribute "units": "energy", "length", and "forces",
            "stress", "dipole" where they do not follow from these. An attribute takes precedence.
        require_keys: False if another file may have the keys.

    Attributes:
        asked: label -> key, for keys that must be in a group.
        counts: label -> number of frames whose group has it.
        available: names of all datasets in groups, without those of the structure.

    Raises:
        FileNotFoundError: the file does not exist.
        BadData: the file is damaged or has no known layout, or units are stated neither in it nor in `units`.
        MissingBackend: h5py is not installed.
    """

    extensions = ("h5", "hdf5")

    def __init__(self, path: str | PathLike, keys: Names = None, units: Names = None, require_keys: bool = True):
        self.path, self.files = str(path), [str(path)]
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no data file {self.path}")
        optional: dict[str, str | None] = {"charge": "charge", "spin": "spin"}
        # charge and spin are read under any of their names, unless a key names them
        self._anywhere = [name for name in ("charge", "spin") if keys is None or name not in keys]
        keys, self._structure = structure_keys(keys)
        self.asked = checked_keys(keys, self.path) if keys is not None else {}
        self.keys = checked_keys({**optional, **({"energy": "energy", "forces": "forces"} if keys is None else keys)},
                                  self.path)  # fmt: skip
        self._declared = label_factors(units or {}, self.path)
        self._given = {name for name, unit in (units or {}).items() if unit is not None}
        self._file: h5py.File | None = None
        self._handles: dict[str, h5py.Dataset] = {}
        self._pid = -1
        self._warned = False
        self.available, self.counts, self.stated = set(), Counter(), {}
        with damage_is_bad_data(self.path, "it is damaged or not an HDF5 file"), opened_hdf5(self.path) as file:
            inside = [name for name in file if name != "_metadata"]
            names = [""] if self._layout(set(inside)) else inside
            stated = _attributes(file)
            found = (group for name in names for group in self._scan(name, file[name] if name else file, stated))
            self._groups = [group for group in found if group.num_frames]
        if not self._groups:
            raise BadData(f"{self.path}: the file has no frames")
        self._ends = list(accumulate(group.num_frames for group in self._groups))
        self.num_frames = self._ends[-1]
        if require_keys:
            self.require_keys()

    @classmethod
    def require(cls, variant: str | None) -> None:
        super().require(variant)
        load_h5py()

    @classmethod
    def readers(cls, paths: Sequence[str], keys: Names, units: Names, variant: str | None) -> list[Reader]:
        return [AceReader(p, keys, units) if is_ace(p) else cls(p, keys, units, require_keys=False) for p in paths]

    # --- content of the file -------------------------------------------------------------------------------------

    def _layout(self, inside: set[str]) -> dict[str, str] | None:
        """Return the layout of a group with these datasets."""
        known = [{**layout, **self._structure} for layout in LAYOUTS.values()] if self._structure else LAYOUTS.values()
        return next((dict(layout) for layout in known if {layout["z"], layout["pos"]} <= inside), None)

    def _scan(self, name: str, group: Any, attributes: Mapping[str, Any]) -> Iterator[Group]:
        """Yield a group and the groups within it. Attributes of outer groups apply to inner groups too."""
        where = f"{self.path}, group '{name}'"
        if not isinstance(group, load_h5py().Group):
            raise BadData(f"{where}: a group of frames is expected at the top level, not a dataset")
        with damage_is_bad_data(where):
            inside = set(group)
            attributes = {**attributes, **_attributes(group)}
            layout = self._layout(inside)
            if layout is None:
                within = {n: part for n in group if isinstance(part := group[n], load_h5py().Group)}
                if within and len(within) == len(inside):
                    for n, part in within.items():
                        yield from self._scan(f"{name}/{n}", part, attributes)
                    return
                wanted = " or ".join(f"{v['z']} and {v['pos']}" for v in LAYOUTS.values())
                raise BadData(f"{where}: the group needs {wanted}, but has {', '.join(sorted(inside)) or 'none'}. "
                              "Give other names as keys.numbers and keys.positions")  # fmt: skip
            datasets = self._datasets(group, inside, layout, where)
            opened = {
                q: group[dataset] for q, dataset in datasets.items() if q != "smiles"
            }  # open each once, since opening takes long
            shape: tuple[int, ...] = opened["pos"].shape
            if len(shape) < 2:
                raise BadData(f"{where}: positions of the shape [frames, atoms, 3] are expected, not {shape}")
            num_frames, num_atoms = shape[:2]
            for quantity, dataset in opened.items():
                _check_dataset(quantity, dataset, num_frames, f"{where}, dataset '{datasets[quantity]}'")
            units = stated_units(attributes, self.keys)
            factors = {q: self._factor(q, d, units, f"{where}, dataset '{datasets[q]}'")
                       for q, d in opened.items() if q in _UNIT_OF or q in LABELS}  # fmt: skip
            stated = self._stated(
                attributes, {name: opened[name] for name in self._anywhere if name in opened}, datasets, where
            )
            if (
                "charge" in self._anywhere
                and num_frames
                and not (self._warned or {"charge", "smiles"} & datasets.keys())
            ):
                unread = of_first_frame(sorted(inside), group.__getitem__, num_frames, num_atoms)
                known = [*stated, *(["spin"] if "spin" in datasets else [])]
                self._warned = self._named(attributes, unread, opened, known, where)
            if "charge" in stated:
                datasets.pop("smiles", None)
            for quantity in self._anywhere:
                used = datasets.get(quantity) or (quantity == "charge" and datasets.get("smiles"))
                if used and used != quantity:
                    self.stated[quantity] = f"'{used}'"
            if not ("smiles" in datasets or self._warned) and "charge" in self._anywhere and num_frames:
                parts = [
                    n for n in sorted(inside)
                    if may_be_charges(n) and group[n].shape in of_charges(num_frames, num_atoms)
                ]  # fmt: skip
                total: float | None = stated.get("charge")
                if parts and "charge" in opened:
                    total = float(np.ravel(opened["charge"][:1] if opened["charge"].ndim else opened["charge"])[0])
                self._warned = warn_of_sums(
                    {n: np.ravel(group[n] if group[n].ndim == 1 else group[n][0]) for n in parts}, f"{where}: ", total
                )
        self.available |= inside - _STRUCTURE - set(self._structure.values())
        self.counts.update({q: num_frames for q in self.keys if q in datasets or q in stated})
        yield Group(name, num_frames, num_atoms, datasets, factors, stated)

    def _named(
        self, attributes: Mapping[str, Any], unread: tuple[dict[str, Any], dict[str, Any]], opened: Mapping[str, Any],
        known: Collection[str], where: str,
    ) -> bool:  # fmt: skip
        """Warn of texts and of numbers of the first frame that look like a charge or a spin; True: there are some."""
        texts = {name: value for name, value in attributes.items() if _is_text(name)}
        if not (texts or any(unread)):
            return False
        warned: set[str] = set()
        numbers = np.ravel(opened["z"][0] if opened["z"].ndim == 2 else opened["z"])
        statements({**texts, **unread[0]}, unread[1], "cell" in opened, "'{}'", known, numbers, f"{where}: ", warned)
        return bool(warned)

    def _stated(
        self, attributes: Mapping[str, Any], whole: Mapping[str, Any], datasets: Mapping[str, str], where: str
    ) -> dict[str, int]:
        """Return charge and spin that attributes state, where no dataset does.

        Args:
            attributes: of the group and those around it.
            whole: the datasets of charge and spin that no key names.
            datasets: quantity -> name of its dataset.
            where: name of the group, for messages.

        Raises:
            BadData: attributes contradict each other, or a dataset.
        """
        found = {}
        attributes = {name: value for name, value in attributes.items() if not _is_text(name)}
        try:
            known = {"charge" if name == "smiles" else name for name in datasets}
            for quantity, all_of_it in statements(attributes, {}, name="attribute '{}'", known=known).items():
                if all_of_it and quantity in whole:
                    values = np.unique(whole[quantity][()]) + extra_spin(datasets[quantity])
                    all_of_it += [
                        Statement(whole_number(value, quantity), f"dataset '{datasets[quantity]}'") for value in values
                    ]
                value = agreed(all_of_it, quantity)
                if value is not None and quantity in self._anywhere and quantity not in datasets:
                    found[quantity], self.stated[quantity] = value, all_of_it[0].source
        except BadData as error:
            raise BadData(f"{where}: {error}") from None
        return found

    def _datasets(self, group: Any, inside: set[str], layout: Mapping[str, str], where: str) -> dict[str, str]:
        wanted = {"z": layout["z"], "pos": layout["pos"], "pbc": "pbc"}
        if "charge" in self.keys:
            wanted["smiles"] = "smiles"
        wanted["cell"] = cell_key(inside, where, lambda name: group[name][()]) or "cell"
        for quantity, key in self.keys.items():
            own = key == quantity and key not in inside
            wanted[quantity] = layout.get(quantity, key) if own else key
        for quantity in self._anywhere:
            wanted[quantity] = stated_key(quantity, inside, where, lambda name: group[name][()]) or quantity
        return {quantity: dataset for quantity, dataset in wanted.items() if dataset in inside}

    def _factor(self, quantity: str, dataset: Any, units: Mapping[str, StatedUnit], where: str) -> float:
        named = next((name for name in dataset.attrs if name.lower() in ("units", "unit")), None)
        stated, declared = dataset.attrs[named] if named else None, _UNIT_OF.get(quantity, quantity)
        of_all = units.get(declared) or unit_in_name(declared, where.rpartition("dataset '")[2].rstrip("'"))
        if stated is None and of_all:  # unit from an attribute of the group or file, or from the dataset's name
            try:
                size = of_all.size
            except BadData as error:
                raise BadData(f"{where}: {error}") from None
            given = {"virial": "energy", "cell": "length"}.get(
                declared, declared
            ) in self._given  # a unit that the user gave, not one that follows from others
            if given and not np.isclose(self._declared[declared], size, rtol=1e-6):
                raise BadData(
                    f"{where}: the file states {of_all.source}, but the given unit differs: remove one of them"
                )
            return size
        if stated is None:
            if ":" in quantity:  # a further label: a plain number if no unit is given
                return self._declared.get(quantity, 1.0)
            if declared not in self._declared:
                raise BadData(
                    f"{where}: it has no attribute 'units'; give units, as in {{energy: hartree, length: bohr}}"
                )
            return self._declared[declared]
        unit = stated.decode() if isinstance(stated, bytes) else str(stated)
        own = {"length": "length", "virial": "energy"}.get(declared) or LABELS[declared].unit_key
        return any_factor(unit, where) if own is None else label_factors({own: unit}, where)[declared]

    def summary(self) -> str:
        used = {dataset for group in self._groups for dataset in group.datasets.values()}
        size = f"{len(self)} frames in {len(self._groups)} groups"
        unread = self.available - used - {source.strip("'") for source in self.stated.values()}
        return describe(self.path, size, self.keys, self.counts, self.asked, unread) + self._as_stated()

    # --- frames --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._ends[-1]

    def sizes(self) -> np.ndarray:
        return np.repeat([group.num_atoms for group in self._groups], [group.num_frames for group in self._groups])

    def _locate(self, index: int) -> tuple[Group, int]:
        index = checked_index(index, len(self))
        k = bisect_right(self._ends, index)
        return self._groups[k], index - (self._ends[k - 1] if k else 0)

    def name(self, index: int) -> str:
        group, frame = self._locate(index)
        return f"{self.path}, group '{group.name}', frame {frame}"

    def __getitem__(self, index: int) -> Sample:
        group, k = self._locate(index)
        where = self.name(index)
        found = {quantity: self._read(group, quantity, k, where) for quantity in group.datasets}
        pos = found["pos"]
        num_atoms = len(pos)
        z = found["z"] = _numbers(found["z"], where)
        if z.shape != (num_atoms,) or z.dtype.kind not in "iu":
            raise BadData(
                f"{where}: there are {num_atoms} positions, but the atomic numbers are {z.dtype} of the shape {z.shape}"
            )
        for quantity, wanted in (("pos", (num_atoms, 3)), ("cell", (3, 3)), ("pbc", (3,))):
            if quantity in found and found[quantity].shape != wanted:
                raise BadData(f"{where}: {quantity} has the shape {found[quantity].shape}, not {wanted}")
        lattice = {}
        if "cell" in found:
            lattice["cell"] = _scaled(found["cell"], group.factors["cell"])[None]
        if "pbc" in found:
            if not np.isin(found["pbc"], (0, 1)).all():
                raise BadData(f"{where}: pbc must consist of 0 and 1, not {found['pbc'].tolist()}")
            lattice["pbc"] = torch.from_numpy(found["pbc"].astype(bool))[None]
        more = extra_spin(group.datasets.get("spin"))
        charge = found.get(
            "charge", formal_charge(found["smiles"]) if "smiles" in found else group.stated.get("charge", 0)
        )
        system = System(
            z=torch.from_numpy(z.astype(np.int64)),
            pos=_scaled(pos, group.factors["pos"]),
            charge=torch.tensor([whole_number(charge, "charge", where)], dtype=torch.float64),
            spin=torch.tensor([whole_number(found.get("spin", group.stated.get("spin", 0)), "spin", where) + more]),
            **lattice,
        )
        labels = {}
        if "virial" in found:
            cell = lattice["cell"][0].numpy() if "cell" in lattice else np.zeros((3, 3))
            found["stress"] = stress_of(found.pop("virial") * group.factors["virial"], cell, where)
        for name in label_names(name for name in found if name in LABELS):
            by = group.factors.get(name, 1.0) * gradient_sign(name, group.datasets.get(name, ""))
            value, shape = _scaled(found[name], by), LABELS[name]
            if name == "stress":
                value = torch.from_numpy(full_tensor(value.numpy()))
            expected = shape.of(system)
            squeezable = value.shape == (*expected, 1) or (not shape.per_atom and value.shape == expected[1:])
            labels[name] = value.reshape(expected) if squeezable else value
        return check_sample(Sample(system, labels), where)

    # --- many frames at a time -----------------------------------------------------------------------------------

    def chunks(self) -> Iterator[Chunk]:
        start = 0
        for group in self._groups:
            where = f"{self.path}, group '{group.name}'"
            size = max(1, min(_CHUNK_FRAMES, _CHUNK_ATOMS // max(1, group.num_atoms)))
            for first in range(0, group.num_frames, size):
                count = min(size, group.num_frames - first)
                yield from self.usable_parts(partial(self._part, group, start), where, first, count)
            start += group.num_frames
            self._handles.clear()  # this group is done: free the chunks that HDF5 keeps for its datasets

    def _part(self, group: Group, start: int, first: int, count: int) -> Sample:
        """Return frames of a group that begins with frame number `start` of the file."""
        sample = self._read_many(group, first, count)
        if sample is None:  # read frames one by one, which handles unusual groups and names the frame of an error
            sample = collate([self[start + first + k] for k in range(count)])
        return sample

    def _read_many(self, group: Group, first: int, count: int) -> Sample | None:
        """Return frames first … first + count − 1 of a group at once; None for unusual groups, read one by one."""
        if "virial" in group.datasets:
            return None
        num_atoms = group.num_atoms
        shapes = {"z": (num_atoms,), "pos": (num_atoms, 3), "cell": (3, 3), "pbc": (3,), "charge": (), "spin": ()}
        shapes.update({q: ((num_atoms,) if LABELS[q].per_atom else ()) + LABELS[q].row
                       for q in group.datasets if q in LABELS})  # fmt: skip
        found: dict[str, np.ndarray] = {}
        try:
            for quantity, name in group.datasets.items():
                if quantity == "smiles":
                    if self._dataset(f"{group.name}/{name}").size > 1:
                        return None
                    found.setdefault("charge", np.full(count, formal_charge(self._read(group, "smiles", first, ""))))
                    continue
                dataset = self._dataset(f"{group.name}/{name}")
                constant = dataset.ndim <= _CONSTANT_NDIM.get(quantity, 0) or len(dataset) != group.num_frames
                value = np.asarray(dataset[()] if constant else dataset[first : first + count])
                shape = shapes[quantity] if constant else (count, *shapes[quantity])
                if value.shape not in (shape, (*shape, 1)):
                    return None
                found[quantity] = np.broadcast_to(value.reshape(shape), (count, *shapes[quantity]))
        except (BadData, *DAMAGE):
            return None
        for name, number in group.stated.items():
            found.setdefault(name, np.full(count, number))
        whole = [found[name] for name in ("charge", "spin") if name in found]
        if "pbc" in found and not np.isin(found["pbc"], (0, 1)).all():
            return None
        if num_atoms == 0 or found["z"].dtype.kind not in "iu" or any((np.round(v) != v).any() for v in whole):
            return None
        system = System(
            z=torch.from_numpy(found["z"].astype(np.int64).reshape(-1)),
            pos=_scaled(found["pos"], group.factors["pos"]).reshape(-1, 3),
            batch=torch.arange(count).repeat_interleave(num_atoms),
            cell=_scaled(found["cell"], group.factors["cell"]) if "cell" in found else torch.zeros(count, 3, 3),
            pbc=torch.from_numpy(found["pbc"].astype(bool)) if "pbc" in found else None,  # type: ignore[arg-type]
            charge=_scaled(found.get("charge", np.zeros(count)), 1.0),
            spin=torch.from_numpy(np.array(found.get("spin", np.zeros(count))).astype(np.int64))
            + extra_spin(group.datasets.get("spin")),
        )
        labels = {}
        for name in label_names(name for name in found if name in LABELS):
            by = group.factors[name] * gradient_sign(name, group.datasets[name])
            labels[name] = _scaled(found[name], by).reshape(LABELS[name].of(system))
        return Sample(system, labels)

    def _read(self, group: Group, quantity: str, k: int, where: str) -> Any:
        try:
            dataset = self._dataset(f"{group.name}/{group.datasets[quantity]}")
            if quantity == "smiles":
                value = dataset[()] if dataset.ndim == 0 else dataset[k if len(dataset) == group.num_frames else 0]
                return value.decode() if isinstance(value, bytes) else str(value)
            if dataset.ndim <= _CONSTANT_NDIM.get(quantity, 0):  # one for all frames
                return np.asarray(dataset[()])
            value = np.asarray(dataset[k if len(dataset) == group.num_frames else 0])
            return value[0] if quantity in _NUMBERS and value.shape == (1,) else value
        except DAMAGE as error:
            raise BadData(f"{where}: dataset '{group.datasets[quantity]}' is damaged: {error}") from error

    # --- handle of the file, opened once per process -------------------------------------------------------------

    def _dataset(self, name: str) -> h5py.Dataset:
        if self._file is not None and self._pid != os.getpid():
            self._handles.clear()
            self._file.close()  # opened before a fork: close it, else HDF5 would return the same handle again
            self._file = None
        if self._file is None:
            self._file, self._pid = opened_hdf5(self.path), os.getpid()
        handle = self._handles.get(name)
        if handle is None:
            if len(self._handles) >= _MAX_HANDLES:
                self._handles.clear()
            handle = self._handles[name] = self._file[name]
        return handle

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_pid": -1, "_handles": {}}


_TEXTS = re.compile(r"name|title|comment|formula|descri|electrons|^n_?(alpha|beta)$", re.I)


def _is_text(name: str) -> bool:
    """Return whether an attribute of this name may say in words, or by a number of electrons, that a molecule is
    charged."""
    return bool(_TEXTS.search(name)) and not kind_of(name) and "smiles" not in name.lower()


def _attributes(group: Any) -> dict[str, Any]:
    """Return the attributes that are numbers or texts, which may state a charge, spin or unit."""
    found = {}
    for name in group.attrs:
        if kind_of(name) or "unit" in name.lower() or "smiles" in name.lower() or _is_text(name):
            value = group.attrs[name]
            value = value.item() if np.size(value) == 1 and hasattr(value, "item") else value
            found[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return found


_CHUNK_FRAMES, _CHUNK_ATOMS = 1024, 32_768  # limits of one read
_MAX_HANDLES = 512  # finding a dataset takes longer than reading a frame of it
_UNIT_OF = {"pos": "length", "cell": "length", "virial": "virial"}
_CONSTANT_NDIM = {"z": 1, "cell": 2, "pbc": 1}  # a dataset with this number of dimensions holds for all frames
_NUMBERS = ("charge", "spin")  # a value for all frames may also have the shape [1]


def _check_dataset(quantity: str, dataset: Any, num_frames: int, where: str) -> None:
    """Raise BadData unless it holds numbers for all frames."""
    if dataset.dtype.kind not in ("iufbSO" if quantity == "z" else "iufb"):
        raise BadData(f"{where}: numbers are expected, not {dataset.dtype}")
    lengths = {num_frames, 1} if quantity in _NUMBERS else {num_frames}
    if dataset.ndim > _CONSTANT_NDIM.get(quantity, 0 if quantity in _NUMBERS else -1) and (
        dataset.ndim == 0 or len(dataset) not in lengths
    ):
        raise BadData(f"{where}: its shape {dataset.shape} does not fit {num_frames} frames")


def _numbers(z: np.ndarray, where: str) -> np.ndarray:
    """Return atomic numbers; symbols are converted."""
    if z.dtype.kind not in "SO":
        return z
    from ase.data import atomic_numbers

    symbols = [s.decode(errors="replace") if isinstance(s, bytes) else str(s) for s in z.tolist()]
    unknown = next((symbol for symbol in symbols if symbol not in atomic_numbers), None)
    if unknown is not None:
        raise BadData(f"{where}: there is no element '{unknown}'")
    return np.array([atomic_numbers[symbol] for symbol in symbols], dtype=np.int64)


def _scaled(value: np.ndarray, by: float) -> Tensor:
    return torch.from_numpy(np.array(value, dtype=np.float64)) * by


# --- Writer of HDF5 files that `HDF5Dataset` reads without loss ---

_FORMAT = ("v110", "v110")  # older formats have no checksums on names, units and sizes
_CHUNK_BYTES = 2**16  # small, since reading one frame reads its whole chunk


def write_hdf5(path: str | PathLike, samples: Iterable[Sample], max_group: int = 10_000) -> None:
    """Write samples in the "torchmd-net" layout, with units and checksums.

    Consecutive samples with the same atoms share a group, so the order is kept. Files are smallest and fastest when
    equal molecules follow each other. HDF5 1.10 or later reads them.

    Args:
        path: the file. It appears when it is complete, and replaces an existing one.
        samples: samples of one structure each, in the package's units; one group at a time is in memory.
        max_group: largest number of frames in a group.

    Raises:
        BadData: a sample does not pass `check_sample`; nothing is written.
        OSError: the folder cannot be written.
        MissingBackend: h5py is not installed.
    """
    path = Path(path)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        with load_h5py().File(aside, "w", libver=_FORMAT) as file:
            for number, group in enumerate(_runs(samples, max_group)):
                _write_group(file.create_group(f"group_{number:07d}"), group)
        with open(aside, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _runs(samples: Iterable[Sample], max_group: int) -> Iterator[list[Sample]]:
    checked = (check_sample(sample, f"sample {k}").to("cpu", torch.float64) for k, sample in enumerate(samples))
    for _, run in groupby(checked, key=lambda sample: (tuple(sample.system.z.tolist()), sorted(sample.labels))):
        frames: list[Sample] = []
        for sample in run:
            frames.append(sample)
            if len(frames) == max_group:
                yield frames
                frames = []
        if frames:
            yield frames


def _write_group(group: Any, samples: list[Sample]) -> None:
    batch = collate(samples)
    system, num_frames = batch.system, len(samples)
    names = LAYOUTS["torchmd-net"]

    def put(name: str, values: torch.Tensor, unit: str = "") -> None:
        array = values.numpy()
        frames = max(1, min(len(array), _CHUNK_BYTES // max(1, array[0].nbytes)))
        dataset = group.create_dataset(name, data=array, chunks=(frames, *array.shape[1:]), fletcher32=True)
        if unit:
            unit = unit.replace("·", "*").replace("Å³", "angstrom^3").replace("Å", "angstrom")
            # a string of fixed length is under the checksum of the names, one of variable length is not
            dataset.attrs["units"] = np.bytes_(unit)

    put(names["z"], samples[0].system.z.to(torch.int16))
    put(names["pos"], system.pos.reshape(num_frames, -1, 3), OWN_UNITS["length"])
    if bool((system.cell != 0).any()) or bool(system.pbc.any()):
        put("cell", system.cell, OWN_UNITS["length"])
        group.create_dataset("pbc", data=system.pbc.numpy().astype(np.int8), fletcher32=True, chunks=(num_frames, 3))
    put("charge", system.charge.to(torch.int16))
    put("spin", system.spin.to(torch.int16))
    for name, values in batch.labels.items():
        shape, own = LABELS[name], name.partition(":")[2]  # "gap" of the further label "scalar:gap"
        values = values.reshape(num_frames, -1, *shape.row) if shape.per_atom else values
        put(own or names.get(name, name), values, shape.unit)
