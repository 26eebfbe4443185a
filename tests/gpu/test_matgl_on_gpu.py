"""The TensorNet of matgl on the fused kernels of a GPU: Evaluator, CUDA graph, stress; golden files where there are."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from ase.io import read
from tiny import ELEMENTS

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.importers import import_matgl
from torchmdnet2.testing import example_systems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def check(potential: Potential, systems: list[System]) -> None:
    """The Evaluator in float32 against the Potential in float64, twice: built, and replayed on moved atoms."""
    exact = copy.deepcopy(potential).double()
    evaluator = Evaluator(potential.cuda())
    assert not evaluator.report().count("no fused kernels")
    for system in systems:
        stress = bool(system.pbc.all())
        for moved in (system, system.replace(pos=system.pos + 0.02 * torch.randn_like(system.pos))):
            expected = exact(moved, stress=stress)
            found = evaluator(moved.to(device="cuda"), stress=stress)
            size = max(1.0, float(expected.forces.abs().max()))
            assert float((found.forces.cpu() - expected.forces).abs().max()) < 5e-6 * size
            assert float((found.energy.cpu() - expected.energy).abs().max()) < 2e-6 * moved.num_atoms * size
            if stress:
                error = (found.stress.cpu() - expected.stress).abs().max()
                assert float(error) < 2e-5 * max(1e-3, float(expected.stress.abs().max()))


@pytest.mark.parametrize("group", ["O(3)", "SO(3)"])
@pytest.mark.parametrize("channels", [32, 128])
def test_fused(channels, group):
    torch.manual_seed(0)
    model = {"name": "matgl_tensornet", "hidden_channels": channels, "cutoff": 4.5, "max_z": 20, "group": group}
    potential = Potential.from_config({"model": model, "head": {"name": "gated_scalar"}, "elements": ELEMENTS}).eval()
    potential.allow_untrained_charge = True  # the molecule is an ion, which this model does not use
    systems = example_systems(ELEMENTS, 4.5)
    check(potential, [systems[name] for name in ("molecule", "triclinic cell", "tiny cell")])


FOLDERS = sorted(Path(os.environ.get("TORCHMDNET2_MATGL", "absent")).glob("TensorNet-MatPES-*/golden.xyz"))


@pytest.mark.skipif(not FOLDERS, reason="needs matgl's MatPES models")
@pytest.mark.parametrize("golden", FOLDERS, ids=lambda path: path.parent.name)
def test_matpes(golden):
    check(import_matgl(golden.parent), [System.from_ase([atoms]) for atoms in read(golden, ":")])
