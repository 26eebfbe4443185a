"""One file of labels for each subset and size of structures, with a group for each kind.

    python scripts/organic/merge.py work/labels work/merged

A training opens a few large groups much faster than the thousands of small ones that label.py writes. --part 0/4: a
quarter of the files, so that four processes share them.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import h5py
import numpy as np

from torchmdnet2.core.files import written_aside


def merge(paths: list[Path], target: Path) -> int:
    """Write the frames of all files into one, each kind into its group. Returns how many there are.

    Raises:
        SystemExit: the files have different teachers or levels of theory.
    """
    rows: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    attributes: dict[str, dict] = {}
    metadata = set()
    for path in paths:
        with h5py.File(path) as file:
            for kind, group in file.items():
                if kind == "_metadata":
                    continue
                for key, values in group.items():
                    rows[kind][key].append(values[:])
                    attributes[key] = dict(values.attrs)
            facts = json.loads(file["_metadata"].attrs["json"])
            metadata.add(json.dumps({key: facts[key] for key in sorted(facts) if key not in ("frames", "left_out")}))
    if len(metadata) > 1:
        raise SystemExit(f"{target.stem}: the files do not have the same teacher and dynamics: {sorted(metadata)}")
    with written_aside(target) as aside, h5py.File(aside, "w") as file:
        for kind, data in rows.items():
            for key, parts in data.items():
                file.create_dataset(f"{kind}/{key}", data=np.concatenate(parts)).attrs.update(attributes[key])
        file.create_group("_metadata").attrs["json"] = metadata.pop()
    return sum(map(len, (part for data in rows.values() for part in data["energy"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="folder of label.py")
    parser.add_argument("output", type=Path, help="folder for the merged files")
    parser.add_argument("--part", default="0/1", help="i/n: of n processes this is the i-th, from 0 on")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(options.labels.glob("*-*-*.h5")):
        sizes[path.stem.rpartition("-")[0]].append(path)
    part, parts = map(int, options.part.split("/"))
    largest_first = sorted(sizes, key=lambda name: -sum(path.stat().st_size for path in sizes[name]))
    frames = sum(merge(sizes[name], options.output / f"{name}.h5") for name in largest_first[part::parts])
    print(f"part {options.part}: {frames} frames")


if __name__ == "__main__":
    main()
