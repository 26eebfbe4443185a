"""Simulate water at constant temperature and pressure with ASE (Martyna-Tobias-Klein); writes water.traj.

python examples/ase_npt_water.py model.tmn --side 4 --steps 20000 --device cuda
"""

from __future__ import annotations

import argparse

import numpy as np
from ase import units
from ase.md.nose_hoover_chain import IsotropicMTKNPT
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution

from torchmdnet2.adapters.ase import TorchMDNet2Calculator
from torchmdnet2.benchmark import water_box

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--side", type=int, default=4, help="molecules along each side of the box")
parser.add_argument("--temperature", type=float, default=300.0, help="K")
parser.add_argument("--pressure", type=float, default=1.0, help="bar")
parser.add_argument("--steps", type=int, default=20_000)
parser.add_argument("--device", default="cpu")
options = parser.parse_args()

(water,) = water_box(options.side).to_ase()  # at 1 g/cm³

water.calc = TorchMDNet2Calculator(options.model, device=options.device)
MaxwellBoltzmannDistribution(water, temperature_K=options.temperature, rng=np.random.default_rng(0))
dynamics = IsotropicMTKNPT(
    water,
    timestep=0.5 * units.fs,
    temperature_K=options.temperature,
    pressure_au=options.pressure * units.bar,
    tdamp=50 * units.fs,
    pdamp=500 * units.fs,
    trajectory="water.traj",
    loginterval=10,
)


def report() -> None:
    density = water.get_masses().sum() / water.get_volume() * units._amu * 1e27  # amu/Å³ → g/cm³
    pressure = -water.get_stress(include_ideal_gas=True)[:3].mean() / units.bar
    time, temperature = dynamics.get_time() / units.fs, water.get_temperature()
    print(f"{time:9.1f} fs {temperature:6.0f} K {density:7.4f} g/cm³ {pressure:9.0f} bar")


dynamics.attach(report, interval=max(1, options.steps // 10))
dynamics.run(options.steps)
