"""Writing HDF5 files that `HDF5Dataset` reads back without loss."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..units import OWN_UNITS
from .check import check_sample
from .collate import collate
from .hdf5 import LAYOUTS
from .hdf5_file import load_h5py
from .labels import LABELS
from .sample import Sample

__all__ = ["write_hdf5"]

_FORMAT = ("v110", "v110")  # checksums on names, units and sizes too, which older formats lack
_CHUNK_BYTES = 2**16  # one frame is read at a time, and its whole chunk with it


def write_hdf5(path: str | PathLike, samples: Iterable[Sample], max_group: int = 10_000) -> None:
    """Write samples in the "torchmd-net" layout: with units, with checksums, and all or nothing.

    Consecutive samples with the same atoms share a group, so the order is kept; files are smallest and fastest when
    equal molecules follow each other. HDF5 1.10 or later reads them.

    Args:
        path: the file; it appears when it is complete, and replaces one that was there.
        samples: each one structure, in the package's units; they are taken one group at a time.
        max_group: at most so many frames in a group.

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
            # of fixed length: kept under the checksum of the names, unlike a string of variable length
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
