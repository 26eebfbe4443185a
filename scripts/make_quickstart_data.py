"""Make the quickstart's data set: frames of one ethanol molecule, labelled with GFN2-xTB.

A Langevin trajectory (500 K) starts from the relaxed molecule. Frames are kept 100 fs apart, their positions are
rounded as they will be written, and then energy and forces are computed: the labels belong exactly to the written
positions. The same seed, versions and machine give the same file.

    python scripts/make_quickstart_data.py examples/data/ethanol_gfn2.xyz
    python scripts/make_quickstart_data.py examples/data/ethanol_gfn1.xyz --relabel examples/data/ethanol_gfn2.xyz@::5

The second command labels every fifth frame again, with GFN1-xTB: data for a training on two levels of theory.
Needs tblite (pip install tblite). Takes about eight minutes on one core. Writes extxyz: Å, eV, eV/Å.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

TEMPERATURE = 500.0  # K
TIMESTEP = 0.5  # fs
FRICTION = 0.01  # 1/fs
EVERY = 200  # steps between kept frames: 100 fs
EQUILIBRATE = 4000  # steps before the first kept frame: 2 ps
POSITION_DIGITS, FORCE_DIGITS, ENERGY_DIGITS = 6, 5, 7


def sample(num_frames: int, seed: int):
    """Yield `num_frames` labelled ase.Atoms, centred, with rounded positions."""
    import numpy as np
    from ase import units
    from ase.build import molecule
    from ase.md.langevin import Langevin
    from ase.md.velocitydistribution import Stationary, ZeroRotation
    from ase.optimize import BFGS
    from tblite.ase import TBLite

    rng = np.random.default_rng(seed)
    atoms = molecule("CH3CH2OH")
    atoms.calc = TBLite(method="GFN2-xTB", verbosity=0)
    BFGS(atoms, logfile=None).run(fmax=0.005, steps=500)
    spread = np.sqrt(atoms.get_masses() * (units.kB * TEMPERATURE))
    atoms.set_momenta(rng.standard_normal((len(atoms), 3)) * spread[:, None])
    Stationary(atoms)
    ZeroRotation(atoms)
    dynamics = Langevin(
        atoms, TIMESTEP * units.fs, temperature_K=TEMPERATURE, friction=FRICTION / units.fs, fixcm=False, rng=rng
    )
    dynamics.run(EQUILIBRATE)
    labeller = TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)  # tighter than what the dynamics needs
    for _ in range(num_frames):
        dynamics.run(EVERY)
        frame = atoms.copy()
        frame.positions = np.round(frame.positions - frame.get_center_of_mass(), POSITION_DIGITS)
        frame.calc = labeller
        yield frame


def relabelled(given: str):
    """Yield the frames of a file, as in FILE@::5, labelled with GFN1-xTB."""
    from ase.io import read
    from tblite.ase import TBLite

    labeller = TBLite(method="GFN1-xTB", accuracy=0.1, verbosity=0)
    for frame in read(given):
        frame.calc = labeller
        yield frame


def frame_text(atoms) -> str:
    """One frame as extxyz, with as many digits as matter."""
    forces = atoms.get_forces()
    lines = [
        str(len(atoms)),
        f"Properties=species:S:1:pos:R:3:forces:R:3 "
        f'energy={atoms.get_potential_energy():.{ENERGY_DIGITS}f} pbc="F F F"',
    ]
    for symbol, position, force in zip(atoms.get_chemical_symbols(), atoms.positions, forces, strict=True):
        numbers = [f"{x:.{POSITION_DIGITS}f}" for x in position] + [f"{x:.{FORCE_DIGITS}f}" for x in force]
        lines.append(" ".join([symbol, *numbers]))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="extxyz file to write")
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--relabel", metavar="FILE", help="frames to label with GFN1-xTB, instead of new ones")
    args = parser.parse_args(argv)

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before tblite is loaded: sums in one order, and faster at 9 atoms
    start = time.monotonic()
    texts = []
    for atoms in relabelled(args.relabel) if args.relabel else sample(args.frames, args.seed):
        texts.append(frame_text(atoms))
        if len(texts) % 100 == 0:
            print(f"{len(texts)} of {args.frames} frames, {time.monotonic() - start:.0f} s", flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    partial = args.output.with_suffix(".part")
    partial.write_text("".join(texts))
    os.replace(partial, args.output)
    print(f"wrote {args.output}: {len(texts)} frames, {args.output.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
