"""One file of labels for each subset and size of structures, with an HDF5 group for each kind.

    python scripts/organic/merge.py work/labels work/merged

A training opens a few large files much faster than the thousands of small ones that label.py writes. --part 0/4: a
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
    """Write the frames of all files into one, each kind into its HDF5 group. Returns how many there are.

    Raises:
        SystemExit: the files have different teachers or levels of theory, or not the same labels of a kind.
    """
    rows: dict[str, list[dict[str, np.ndarray]]] = defaultdict(list)
    attributes: dict[str, dict] = {}
    teachers, dynamics = set(), set()
    for path in paths:
        with h5py.File(path) as file:
            for kind, group in file.items():
                if kind == "_metadata":
                    facts = json.loads(group.attrs["json"])
                    teachers.add((facts["teacher"], facts["level_of_theory"]))
                    dynamics.add(facts.get("dynamics", "teacher"))
                    continue
                rows[kind].append({key: values[:] for key, values in group.items()})
                attributes |= {key: dict(values.attrs) for key, values in group.items()}
                if rows[kind][-1].keys() != rows[kind][0].keys():
                    raise SystemExit(f"{path}: {kind} does not have the same labels as in the other files")
    if len(teachers) > 1:
        raise SystemExit(f"{target.stem}: the files have different teachers: {sorted(teachers)}")
    ((teacher, level),) = teachers
    count = 0
    with written_aside(target) as aside, h5py.File(aside, "w") as file:
        for kind, parts in rows.items():
            for key in parts[0]:
                values = np.concatenate([part[key] for part in parts])
                file.create_dataset(f"{kind}/{key}", data=values).attrs.update(attributes[key])
            count += len(file[kind]["energy"])
        facts = {"teacher": teacher, "level_of_theory": level, "dynamics": sorted(dynamics), "frames": count}
        file.create_group("_metadata").attrs["json"] = json.dumps(facts)
    return count


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
    if not sizes:
        raise SystemExit(f"there are no files of label.py in {options.labels}")
    part, parts = map(int, options.part.split("/"))
    largest_first = sorted(sizes, key=lambda name: -sum(path.stat().st_size for path in sizes[name]))
    frames = sum(merge(sizes[name], options.output / f"{name}.h5") for name in largest_first[part::parts])
    print(f"part {options.part}: {frames} frames")


if __name__ == "__main__":
    main()
