"""Statistics of single frames, stored in flat files with the cached frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .columns import Column, ColumnWriter
from .dataset import Dataset
from .folders import build_folder, read_index, write_index
from .frame_facts import FrameFacts, read_facts

__all__ = ["stored_facts", "write_facts"]

_COLUMNS = {
    "energies": "f8",
    "charges": "i4",
    "spins": "i4",
    "force_square": "f8",
    "force_count": "i8",
    "keys": "u8",
    "labelled": "u4",  # bit k says whether the frame has label k
}


def write_facts(folder: Path, data: Dataset) -> None:
    """Find the facts of all frames and write them, all or nothing.

    Args:
        folder: where; one that is there is replaced.
        data: the frames.
    """
    facts = read_facts(data.batch, np.arange(len(data)))
    labels = list(facts.labelled)
    bits = np.zeros(len(data), dtype=np.uint32)
    for k, name in enumerate(labels):
        bits |= facts.labelled[name].astype(np.uint32) << np.uint32(k)
    with build_folder(folder) as aside:
        columns = {name: ColumnWriter(aside, name, kind) for name, kind in _COLUMNS.items()}
        columns["counts"] = ColumnWriter(aside, "counts", "i4", (len(facts.elements),))
        try:
            for name, column in columns.items():
                column.append(bits if name == "labelled" else getattr(facts, name))
            written = {name: column.finish() for name, column in columns.items()}
        finally:
            for column in columns.values():
                column.close()
        write_index(aside, {"elements": facts.elements.tolist(), "labels": labels, "columns": written})


def stored_facts(folder: Path) -> FrameFacts:
    """What `write_facts` wrote.

    Raises:
        BadData: a file of it is missing or damaged.
    """
    index = read_index(folder)
    columns = {name: Column(folder, name, facts).all() for name, facts in index["columns"].items()}
    bits = columns.pop("labelled")
    labelled = {name: (bits >> np.uint32(k) & np.uint32(1)).astype(bool) for k, name in enumerate(index["labels"])}
    return FrameFacts(elements=np.array(index["elements"]), labelled=labelled, **columns)
