"""Run several replicas of a molecule in one batch: equilibrate at a temperature, then average over all replicas.

python examples/md_replicas.py model.tmn molecule.xyz --replicas 8 --steps 2000 --device cuda
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from ase.io import read

from torchmdnet2.md import MDOptions, run_md

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--replicas", type=int, default=4)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--device", default="cpu")
parser.add_argument("--output", default="md_replicas")
options = parser.parse_args()

result = run_md(
    options.model,
    read(options.structure, -1),
    MDOptions(
        steps=options.steps,
        ensemble="nvt",
        temperature=options.temperature,
        friction=10.0,
        replicas=options.replicas,
        every=max(1, options.steps // 50),
        output=options.output,
    ),
    device=options.device,
)
for k, replica in enumerate(result.replicas):
    half = replica.rows[len(replica.rows) // 2 :]
    print(f"replica {k}: {np.mean([row.temperature_K for row in half]):6.1f} K, drift {replica.drift:+.1e} eV/atom/ps")

# distance between the first two atoms in the second half of all trajectories
lengths = []
for k in range(options.replicas):
    name = f"{options.output}.{k}.xyz" if options.replicas > 1 else f"{options.output}.xyz"
    frames = read(Path(name), ":")
    lengths += [frame.get_distance(0, 1) for frame in frames[len(frames) // 2 :]]
print(f"distance between atoms 0 and 1: {np.mean(lengths):.3f} ± {np.std(lengths):.3f} Å, {len(lengths)} frames")
print(f"{result.ns_per_day:.3g} ns/day each")
