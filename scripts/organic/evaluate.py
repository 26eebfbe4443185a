"""Stage 5: errors of a student on the labels of one subset, by kind of geometry, as a table and as JSON.

    python scripts/organic/evaluate.py work/organic/best.tmn work/labels --subset test --json work/organic/errors.json

"relative" are energies relative to the mean of a group (label.py), which may have frames of several kinds.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from ase.units import kcal, mol

from torchmdnet2 import load
from torchmdnet2.checkpoint import read_header
from torchmdnet2.core.files import atomic_write
from torchmdnet2.data import open_dataset
from torchmdnet2.data.labels import GROUP
from torchmdnet2.training.reporting.evaluation import evaluate
from torchmdnet2.training.steps.batches import Frames
from torchmdnet2.training.steps.loss import Residual, relative_errors
from torchmdnet2.training.steps.trainer import Properties

KEYS = {"energy": "energy", "forces": "forces", "charges": "charges", GROUP: "group"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .tmn file")
    parser.add_argument("labels", type=Path, help="folder of stage 3")
    parser.add_argument("--subset", default="validation", help="choose models on validation; look at test once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    potential = load(options.model, options.device)
    files = sorted(options.labels.glob(f"{options.subset}-*.h5"))
    if not files:
        raise SystemExit(f"there are no labels {options.subset}-*.h5 in {options.labels}")
    dataset = open_dataset(files, keys=KEYS, cache="auto")
    kinds: dict[str, list[int]] = defaultdict(list)
    for k in range(len(dataset)):
        kinds[re.search(r"group '(\w+)'", dataset.name(k))[1]].append(k)  # type: ignore[index]
    head = f"{'kind':12s} {'frames':>7s} {'energy, meV/atom':>17s} {'forces MAE, RMSE, meV/Å':>24s}"
    print(f"{head} {'relative, kcal/mol':>19s}")
    found, energies = {}, []
    for kind, indices in kinds.items():
        frames = Frames(dataset, indices, potential.cutoff, cache_bytes=0)
        evaluation = evaluate(potential, frames, Properties(forces=True, stress=False), options.batch_size)
        found[kind] = {"frames": len(frames), **evaluation.errors}
        label, predicted = evaluation.pairs["energy_per_atom"]
        error, groups = map(torch.from_numpy, ((predicted - label) * frames.atoms, frames.group_entries))
        energies.append((Residual(error, torch.ones_like(error, dtype=torch.bool)), groups))
    relative = relative_errors(energies)  # a group may have frames of several kinds
    sizes = torch.where(relative.present, relative.error.abs(), torch.nan).split(
        [len(groups) for _, groups in energies]
    )
    for (kind, errors), size in zip(found.items(), sizes, strict=True):
        known = size[~size.isnan()]
        mean = float(known.mean()) if len(known) else None
        if len(known):
            rmse = float(known.square().mean().sqrt())
            errors["relative_energy"] = {"mae": mean, "rmse": rmse, "count": len(known), "unit": "eV"}
        energy, forces = errors["energy_per_atom"], errors["forces"]
        values = 1000 * energy["mae"], 1000 * forces["mae"], 1000 * forces["rmse"]
        last = "–" if mean is None else f"{mean / (kcal / mol):.2f}"
        print(f"{kind:12s} {errors['frames']:7d} {values[0]:17.2f} {values[1]:13.1f} {values[2]:10.1f} {last:>19s}")
    if options.json:
        facts = {"model": options.model, "sha256": read_header(options.model)["sha256"], "subset": options.subset}
        atomic_write(options.json, json.dumps({**facts, "errors": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
