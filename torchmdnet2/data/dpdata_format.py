"""Readers of the formats of dpdata: DeePMD folders, outputs of VASP, CP2K, ABACUS, Quantum Espresso, Gaussian, ….

dpdata gives eV and Å. Its virials are −volume × stress, except for SIESTA, whose virials have the sign of the stress.
Virials of formats that are in no list below are left out, since their sign is unknown.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..core.stated import Statement, agreed
from ..errors import BadData, MissingBackend, StructureWarning
from .ase_formats import FrameReader
from .extxyz import Frame
from .labels import Names, label_factors
from .program_texts import counts_electrons, jobs_of, program_statements, states_charges
from .reader import register_format

__all__ = ["DpdataReader"]

_LEFT_OUT = re.compile(
    r"ase/|pymatgen/|3dmol$|list$|n2p2$|(.*/)?(ext)?xyz(_file)?$|.*/string$|dftbplus$|.*/(inp|gjf|in)$"
)
"""Formats that are left out: objects instead of files, inputs of programs, and formats that are read without dpdata."""

_VIRIAL = {"deepmd": 1.0, "vasp": 1.0, "outcar": 1.0, "xml": 1.0, "qe": 1.0, "abacus": 1.0, "cp2k": 1.0, "siesta": -1.0}
"""Beginning of a format's name -> factor that makes −volume × stress of dpdata's virial."""


@register_format("dpdata")
class DpdataReader(FrameReader):
    """Reads a file or folder by dpdata; the labels are energy, forces, virial and stress.

    Args:
        path, keys, units: see `AseDataset`.
        variant: name of the format in dpdata, such as "deepmd/npy" or "vasp/outcar".

    Raises:
        MissingBackend: dpdata is not installed.
        BadData: dpdata cannot read the file, or the elements are not stated.
    """

    folders = True

    def __init__(self, path: str | PathLike, keys: Names = None, units: Names = None, variant: str = ""):
        super().__init__(path, keys, units, variant)
        stated = label_factors(self.default_units, self.path)
        if not variant.startswith("deepmd") and any(stated.get(k, f) != f for k, f in self._factors.items()):
            raise BadData(f"{self.path}: dpdata converts to eV and Å: leave units out, or give eV and angstrom")

    @classmethod
    def guess(cls, path: str) -> str:
        if not (Path(path) / "type.raw").is_file():
            return ""
        sets = list(Path(path).glob("set.*"))
        mixed = any((part / "real_atom_types.npy").is_file() for part in sets)
        return f"dpdata/deepmd/{'npy/mixed' if mixed else 'npy' if sets else 'raw'}"

    @classmethod
    def require(cls, variant: str | None) -> None:
        if find_spec("dpdata") is None:
            raise MissingBackend("formats of dpdata need dpdata: pip install 'torchmdnet2[dpdata]'")
        if variant is None:
            names = ", ".join(sorted(cls.variants()))
            raise BadData(f"data format 'dpdata': name the format to read, as in dpdata/deepmd/npy. Known: {names}")
        super().require(variant)
        from dpdata.system import load_format

        try:
            load_format(variant)
        except ModuleNotFoundError as error:
            raise MissingBackend(f"dpdata/{variant}: {error}") from error

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
        """Yield sets of frames with the same atoms, as dictionaries of dpdata."""
        from dpdata.system import LabeledSystem, System, load_format

        reader, head = load_format(self._variant), self._variant.partition("/")[0]
        if hasattr(reader, "from_labeled_system_mix"):
            for place in _found(self, reader.from_multi_systems(self.path)):
                unread = sorted({file.stem for file in Path(str(place)).glob("set.*/*.npy")} - _OWN)
                if unread:
                    warnings.warn(
                        f"{place}: {', '.join(unread)} of mixed sets cannot be read or used as charges: write sets of "
                        "one composition each, of the format deepmd/npy",
                        StructureWarning,
                        stacklevel=2,
                    )
                yield from reader.from_labeled_system_mix(place)
            return
        if self._variant in ("deepmd/lmdb", "lmdb"):
            places: Any = reader.from_multi_systems(self.path)
        elif head == "deepmd" and Path(self.path).is_dir():
            places = sorted(str(file.parent) for file in Path(self.path).rglob("type.raw"))
        elif self._variant == "deepmd/hdf5":
            import h5py

            with h5py.File(self.path, "r") as file:
                places = [self.path] if "type.raw" in file else [f"{self.path}#{name}" for name in file]
        elif self._variant == "qe/cp/traj":
            places = [str(Path(self.path).with_suffix(""))]  # the beginning of the names of its files
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
                remedy = "write type_map.raw beside type.raw, with the symbols of types 0, 1, … on one line each"
            raise BadData(f"{self.path}: the file does not state which element '{unknown}' is; {remedy}")
        return np.array([atomic_numbers[str(name)] for name in names], dtype=np.int64)

    def _labels(self, data: Mapping[str, Any], k: int) -> dict[str, Any]:
        """Return the entries of frame k besides its structure."""
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
                sign = None  # many readers of dpdata multiply by the determinant of the cell, whose sign may be wrong
            if sign is not None and volume != 0:
                entries["virial"] = sign * virial
                entries["stress"] = -sign * virial / abs(volume)
        return entries

    def _stated(self) -> dict[str, int]:
        """Return the total charge and multiplicity that a program's output states.

        Raises:
            BadData: the output states several that differ.
        """
        found: dict[str, list[Statement]] = {"charge": [], "spin": []}
        for file in self.files if states_charges(self._variant) or counts_electrons(self._variant) else ():
            if Path(file).suffix not in (".xyz", ".cube", ".wfn"):
                text = Path(file).read_text(errors="replace")
                self._refuse_several(file, text)
                for name, stated in program_statements(self._variant, text).items():
                    found[name] += stated
        numbers = {name: agreed(stated, name, f"{self.path}: ") for name, stated in found.items()}
        return {name: number for name, number in numbers.items() if number is not None}

    def _refuse_several(self, file: str, text: str) -> None:
        """Refuse a text with several jobs or structures, which dpdata would mix."""
        if self._variant.startswith("gaussian/") and len(jobs := jobs_of("gaussian-out", text)) > 1:
            raise BadData(
                f"{file}: it has {len(jobs)} jobs (--Link1-- or a later step), which dpdata takes for one: read it "
                "with the format gaussian-out, or split it into a file for each job"
            )
        if self._variant == "psi4/out":
            _refuse_mixed(file, text)
        pattern, remedy = _ONE_STRUCTURE.get(self._variant, ("", ""))
        if pattern and (count := len(re.findall(pattern, text, re.M))) > 1:
            raise BadData(
                f"{file}: it has {count} structures, of which dpdata takes the last positions, energy and forces, "
                f"which may be of different ones: {remedy}"
            )


def _refuse_mixed(file: str, text: str) -> None:
    """Refuse a text of Psi4 with several methods: dpdata takes the last energy of an SCF, and the gradient."""
    energies = set(re.findall(r"^ {4}Total Energy = +(\S+)", text, re.M))
    gradients = len(re.findall(_ONE_STRUCTURE["psi4/out"][0], text, re.M))
    correlated = re.search(r"\b(?:MP\d|CC(?:SD)?\S*|CI\w*) (?:Energies|total energy)\b", text, re.I)
    if correlated or (len(energies) > 1 and gradients == 1):
        found = f"'{correlated[0]}'" if correlated else f"{len(energies)} energies and one gradient"
        raise BadData(
            f"{file}: it has {found}; dpdata takes the last energy of an SCF, which may be of another method than the "
            "gradient: split it into a file for each method, or write energies and forces to extended XYZ"
        )


_ONE_STRUCTURE = {
    "orca/spout": (r"^CARTESIAN COORDINATES \(ANGSTROEM\)", "read it with the format orca-output, or split it"),
    "psi4/out": (r"^ *## Total Gradient", "split it into a file for each"),
}
"""Formats whose readers take the last positions, energy and gradient of a text -> pattern of a structure, remedy."""

_FURTHER = "further:"


def _found(reader: DpdataReader, places: Any) -> Iterator[Any]:
    """Yield the files and folders that hold frames, at least one."""
    some = False
    for place in places:
        some = True
        yield place
    if not some:
        wanted = "type_map.raw and type.raw" if "mixed" in reader._variant else "type.raw"
        raise BadData(f"{reader.path}: the folder has no data of the format {reader._variant}: {wanted} is missing")


_OWN = {
    "coord", "coords", "box", "cells", "energy", "energies", "force", "forces", "virial", "virials", "spin", "spins",
    "force_mag", "real_atom_types", "real_atom_names", "atom_pref", "type", "type_map", "atom_types", "atom_names",
    "atom_numbs", "orig", "nopbc",
}  # fmt: skip
"""Arrays of DeePMD that dpdata reads, also under dpdata's names."""


def _further(variant: str, place: Any, num_frames: int) -> dict[str, np.ndarray]:
    """Read arrays of DeePMD's formats that dpdata does not know, such as charge.npy: name -> [frames, …]."""
    arrays = {}
    for name, whole in _arrays(variant, place).items():
        if name not in _OWN and np.ndim(whole) and len(whole) == num_frames:
            arrays[_FURTHER + name] = whole[:, 0] if whole.shape[1:] == (1,) else whole
    return arrays


def _arrays(variant: str, place: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a set of frames."""
    if isinstance(place, Mapping):  # deepmd/lmdb
        return {name: value for name, value in place.items() if isinstance(value, np.ndarray)}
    if variant == "deepmd/raw":
        files = [file for file in Path(place).glob("*.raw") if file.stem not in _OWN]
        return {file.stem: np.loadtxt(file, ndmin=2) for file in files}
    if variant == "deepmd/hdf5":
        import h5py

        path, _, group = place.partition("#")
        with h5py.File(path, "r") as file:
            inside = file[group] if group else file
            parts = {f"{n}/{m}": inside[n][m][()] for n in inside if n.startswith("set.") for m in inside[n]}
    elif variant in ("deepmd/npy", "deepmd/comp"):
        files = [file for file in Path(place).glob("set.*/*.npy") if file.stem not in _OWN]
        parts = {f"{file.parent.name}/{file.name}": np.load(file, allow_pickle=False) for file in files}
    else:
        return {}
    found: dict[str, list[np.ndarray]] = {}
    for name in sorted(parts):
        found.setdefault(name.partition("/")[2].removesuffix(".npy"), []).append(parts[name])
    return {name: np.concatenate(values) for name, values in found.items()}


@lru_cache(maxsize=1)
def _formats() -> frozenset[str]:
    """Return the formats of dpdata that read files."""
    import dpdata  # noqa: F401  (it registers them)
    from dpdata.format import Format

    names = (name for name, cls in Format.get_formats().items() if any(_defines(cls, m) for m in _READING))
    return frozenset(name for name in names if not _LEFT_OUT.match(name))


_READING = ("from_labeled_system", "from_system", "from_labeled_system_mix")


def _defines(reader: Any, method: str) -> bool:
    """Return True if a format of dpdata implements a method; its base class defines it and raises."""
    from dpdata.format import Format

    cls = reader if isinstance(reader, type) else type(reader)
    return getattr(cls, method, None) is not getattr(Format, method, None)
