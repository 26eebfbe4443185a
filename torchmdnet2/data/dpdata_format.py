"""What dpdata reads: DeePMD folders, outputs of VASP, CP2K, ABACUS, Quantum Espresso, Gaussian, ….

dpdata gives eV and Å. Its virials are −volume × stress, but for those of SIESTA, which it takes over with the sign of
the stress; of formats that are in no list below, the sign is not known to us and virials are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadData, MissingBackend
from .ase_formats import FrameReader
from .extxyz import Frame
from .formats import register_format
from .labels import label_factors

__all__ = ["DpdataReader"]

_LEFT_OUT = re.compile(
    r"ase/|pymatgen/|3dmol$|list$|n2p2$|(.*/)?(ext)?xyz(_file)?$|.*/string$|dftbplus$|.*/(inp|gjf|in)$"
)
"""Objects instead of files, inputs of programs, and what is read without dpdata."""

_VIRIAL = {"deepmd": 1.0, "vasp": 1.0, "outcar": 1.0, "xml": 1.0, "qe": 1.0, "abacus": 1.0, "cp2k": 1.0, "siesta": -1.0}
"""beginning of a format's name -> −volume × stress, in what dpdata calls virial"""

_CHARGE = {
    "gaussian/fchk": r"^Charge +I +(?P<charge>-?\d+)|^Multiplicity +I +(?P<spin>\d+)",
    "gaussian": r"Charge = +(?P<charge>-?\d+) +Multiplicity = +(?P<spin>\d+)",
    "orca": r"Total Charge +Charge +\.+ +(?P<charge>-?\d+)|Multiplicity +Mult +\.+ +(?P<spin>\d+)",
    "psi4": r"^ *Charge += +(?P<charge>-?\d+)|^ *Multiplicity += +(?P<spin>\d+)",
    "cp2k": r"DFT\| Charge +(?P<charge>-?\d+)|DFT\| Multiplicity +(?P<spin>\d+)",
}
"""beginning of a format's name -> where its files state the total charge and the multiplicity, which dpdata drops"""


@register_format("dpdata")
class DpdataReader(FrameReader):
    """Frames of a file or folder that dpdata reads; labels are called energy, forces, virial and stress.

    Args:
        path, keys, units: see `AseDataset`.
        variant: name of the format in dpdata, as "deepmd/npy" or "vasp/outcar".

    Raises:
        MissingBackend: dpdata is not installed.
        BadData: it cannot read the file, or the elements are not stated.
    """

    folders = True

    def __init__(
        self,
        path: str | PathLike,
        keys: Mapping[str, str | None] | None = None,
        units: Mapping[str, str | None] | None = None,
        variant: str = "",
    ):
        super().__init__(path, keys, units)
        self._variant = variant
        stated = label_factors(self.default_units, self.path)
        if not variant.startswith("deepmd") and any(stated.get(k, f) != f for k, f in self._factors.items()):
            raise BadData(f"{self.path}: dpdata gives eV and Å, whatever the file has: leave out units, or name these")

    @classmethod
    def require(cls, variant: str | None) -> None:
        if find_spec("dpdata") is None:
            raise MissingBackend("formats of dpdata need dpdata: pip install 'torchmdnet2[dpdata]'")
        if variant is None:
            names = ", ".join(sorted(cls.variants()))
            raise BadData(f"data format 'dpdata': say which, as in dpdata/deepmd/npy. There are: {names}")
        super().require(variant)

    @classmethod
    def variants(cls) -> Collection[str]:
        return _formats()

    def frames(self) -> Iterator[Frame]:
        stated = self._stated()
        for data in self._systems():
            numbers = self._numbers(data)
            periodic = not data.get("nopbc", False)
            for k, (cell, positions) in enumerate(zip(data["cells"], data["coords"], strict=True)):
                entries = {**stated, **self._labels(data, k)}
                pbc = np.full(3, periodic and bool(np.any(cell)))
                yield Frame(numbers, positions, cell if pbc[0] else np.zeros((3, 3)), pbc, entries)

    def _systems(self) -> Iterator[dict[str, Any]]:
        """Sets of frames with the same atoms, in the words of dpdata."""
        from dpdata.system import LabeledSystem, System, load_format

        reader, head = load_format(self._variant), self._variant.partition("/")[0]
        if hasattr(reader, "from_labeled_system_mix"):
            for place in _found(self, reader.from_multi_systems(self.path)):
                yield from reader.from_labeled_system_mix(place)
            return
        if head == "deepmd" and Path(self.path).is_dir():
            places: Any = sorted(str(file.parent) for file in Path(self.path).rglob("type.raw"))
        elif self._variant == "deepmd/hdf5":
            import h5py

            with h5py.File(self.path, "r") as file:
                places = [self.path] if "type.raw" in file else [f"{self.path}#{name}" for name in file]
        elif self._variant == "qe/cp/traj":
            places = [str(Path(self.path).with_suffix(""))]  # what its files begin with
        else:
            places = [self.path]
        for place in _found(self, places):
            labelled = _defines(reader, "from_labeled_system")
            made = (LabeledSystem if labelled else System)()
            try:
                made.from_fmt_obj(reader, place)
            except Exception as error:
                if not labelled or "energies not found" not in str(error):
                    raise
                made = System().from_fmt_obj(reader, place)  # structures only
            if "real_atom_types" in made.data:
                raise BadData(f"{place}: its frames differ in composition: read it as dpdata/{self._variant}/mixed")
            yield {**made.data, **_further(self._variant, place, made.get_nframes())}

    def _numbers(self, data: Mapping[str, Any]) -> np.ndarray:
        from ase.data import atomic_numbers

        names = np.array(data["atom_names"], dtype=object)[np.asarray(data["atom_types"], dtype=int)]
        unknown = next((name for name in names if str(name) not in atomic_numbers), None)
        if unknown is not None:
            remedy = "name a format that states them"
            if self._variant.startswith("deepmd"):
                remedy = "write type_map.raw beside type.raw: the symbols of types 0, 1, … on a line each"
            raise BadData(f"{self.path}: it does not say which element '{unknown}' is; {remedy}")
        return np.array([atomic_numbers[str(name)] for name in names], dtype=np.int64)

    def _labels(self, data: Mapping[str, Any], k: int) -> dict[str, Any]:
        """What dpdata knows of frame k besides its structure."""
        known = {"energies": "energy", "forces": "forces", "virials": "virial"}
        entries = {}
        for name, value in data.items():
            if name in known or name.startswith(_FURTHER):
                if np.size(value):
                    entries[known.get(name, name.removeprefix(_FURTHER))] = value[k]
        if "virial" in entries:
            virial, cell = entries.pop("virial"), data["cells"][k]
            sign = next((s for name, s in _VIRIAL.items() if self._variant.split("/")[0] == name), None)
            volume = float(np.linalg.det(cell))
            if volume < 0 and sign is not None and not self._variant.startswith("deepmd"):
                sign = None  # many of its readers multiply by the determinant
            if sign is not None and volume != 0:
                entries["virial"] = sign * virial
                entries["stress"] = -sign * virial / abs(volume)
        return entries

    def _stated(self) -> dict[str, int]:
        """Total charge and multiplicity that a program's output states.

        Raises:
            BadData: it states several.
        """
        pattern = next((p for name, p in _CHARGE.items() if self._variant.startswith(name)), None)
        found: dict[str, int] = {}
        files = self.files if pattern else []
        for file in [name for name in files if Path(name).suffix not in (".xyz", ".cube", ".wfn")]:
            text = Path(file).read_text(errors="replace")
            for match in re.finditer(str(pattern), text, re.MULTILINE):
                for name, value in match.groupdict().items():
                    if value is not None and found.setdefault(name, int(value)) != int(value):
                        raise BadData(f"{self.path}: it states the {name} {found[name]}, and {value} further on")
        return found


_FURTHER = "further:"


def _found(reader: DpdataReader, places: Any) -> Iterator[Any]:
    """The places where frames are, at least one."""
    some = False
    for place in places:
        some = True
        yield place
    if not some:
        wanted = "type_map.raw and type.raw" if "mixed" in reader._variant else "type.raw"
        raise BadData(f"{reader.path}: there is no data of the format {reader._variant}: no {wanted} in it")


def _further(variant: str, place: str, num_frames: int) -> dict[str, np.ndarray]:
    """Arrays of DeePMD folders that dpdata does not know, as charge.npy: name -> [frames, …]."""
    if variant not in ("deepmd/npy", "deepmd/comp"):
        return {}
    sets = sorted(Path(place).glob("set.*"))
    known = {"coord", "box", "energy", "force", "virial", "spin", "force_mag", "real_atom_types", "atom_pref"}
    arrays = {}
    for name in {file.stem for folder in sets for file in folder.glob("*.npy")} - known:
        files = [folder / f"{name}.npy" for folder in sets]
        if all(file.is_file() for file in files):
            whole = np.concatenate([np.load(file, allow_pickle=False) for file in files])
            if len(whole) == num_frames:
                arrays[_FURTHER + name] = whole[:, 0] if whole.shape[1:] == (1,) else whole
    return arrays


@lru_cache(maxsize=1)
def _formats() -> frozenset[str]:
    """Formats of dpdata that read files."""
    import dpdata  # noqa: F401  (it registers them)
    from dpdata.format import Format

    names = (name for name, cls in Format.get_formats().items() if any(_defines(cls, m) for m in _READING))
    return frozenset(name for name in names if not _LEFT_OUT.match(name))


_READING = ("from_labeled_system", "from_system", "from_labeled_system_mix")


def _defines(reader: Any, method: str) -> bool:
    """Whether a format of dpdata has a method other than the one that says that it has not."""
    from dpdata.format import Format

    cls = reader if isinstance(reader, type) else type(reader)
    return getattr(cls, method, None) is not getattr(Format, method, None)
