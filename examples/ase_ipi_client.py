"""Forces for i-PI, or any other program that speaks its socket protocol, through ASE's client.

    i-pi input.xml &
    python examples/ase_ipi_client.py model.tmn start.xyz --unixsocket NAME      (or --port 31415)

The server runs the dynamics (path integrals, replica exchange, …). This program returns energies, forces and stress
until the server ends. The structure file defines the elements; positions and cell come from the server.
"""

from __future__ import annotations

import argparse

from ase.calculators.socketio import SocketClient
from ase.io import read

from torchmdnet2.adapters.ase import TorchMDNet2Calculator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("structure")
parser.add_argument("--host", default="localhost")
parser.add_argument("--port", type=int)
parser.add_argument("--unixsocket", help="name of a socket on this machine, instead of host and port")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()

atoms = read(options.structure)
atoms.calc = TorchMDNet2Calculator(options.model, device=options.device)
where = {"unixsocket": options.unixsocket} if options.unixsocket else {"host": options.host, "port": options.port}
client = SocketClient(**where)
steps = sum(1 for _ in client.irun(atoms, use_stress=bool(atoms.cell.rank == 3)))
print(f"served {steps} rounds, the last energy was {atoms.get_potential_energy():.6f} eV")
