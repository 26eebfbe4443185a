"""Small cases of every kernel, to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python scripts/gpu_sanitize.py search step step_tf32 training md

Without PyTorch's cache of memory each tensor has its own allocation, and an access beyond its end is seen. Nothing is
captured: launches are watched one by one. A name in the arguments chooses a group. Results that are not finite are an
error.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.systems import make_potential, water_box

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.evaluator import Precision
from torchmdnet2.priors import D2, Coulomb


def small_systems() -> list[System]:
    """One atom, a pair, molecules of both parities, a cell smaller than the cutoff, a skewed one, a batch."""
    rng = np.random.default_rng(0)

    def at_random(n: int, cell: torch.Tensor | None = None) -> System:
        pos = torch.tensor(rng.uniform(0, 2.2 * n ** (1 / 3), (n, 3)), dtype=torch.float32)
        return System(z=torch.tensor(rng.choice([1, 6, 8], n)), pos=pos, cell=cell)

    skewed = torch.tensor([[9.0, 0, 0], [3.0, 8.5, 0], [-2.0, 1.0, 8.0]])
    singles = [at_random(1), at_random(2), at_random(22), at_random(33)]
    periodic = [water_box(1), water_box(2), at_random(40, skewed)]
    return [*singles, *periodic, System.concatenate([*singles, *periodic])]


def search() -> None:
    """Both methods, with enough capacity and with too little, and a structure of several blocks."""
    from torchmdnet2.neighbors.triton_search import TritonNeighborSearch

    # a cell is searched by bins only if it is wide enough for them
    for system in (*small_systems(), water_box(4), water_box(7)):
        system = system.to("cuda")
        widths = torch.linalg.norm(system.cell, dim=2)[system.pbc]
        wide = not len(widths) or float(widths.min()) > 8.0
        for method in ("pairs", "cells") if wide else ("pairs",):
            for room in (200 * system.num_atoms + 64, 7):
                given = system.pos.contiguous(), system.cell.contiguous(), system.pbc.contiguous()
                shape = system.num_atoms, system.num_systems
                options = {"batch": system.batch, "method": method, "receiver": True, "shift": True, "distances": True}
                found = TritonNeighborSearch(*shape, 5.0, room, "cuda", **options)  # type: ignore[arg-type]
                found(*given)
                if (int(found.flag) != 0) != (int(found.needed) > room):
                    raise RuntimeError(f"{method}, {system.num_atoms} atoms: {int(found.needed)}")
        print(f"search: {system.num_atoms} atoms", flush=True)


def step(precision: Precision = "float32") -> None:
    """The whole fused step: neighbor search, energy, forces, stress; the last structure has blocks of many atoms."""
    evaluator = Evaluator(make_potential().cuda(), graphs=False, precision=precision)
    for system in (*small_systems(), water_box(6)):
        result = evaluator(system.to("cuda"), stress=bool(system.pbc.any(1).all()))
        assert result.forces is not None
        if not (bool(result.forces.isfinite().all()) and bool(result.energy.isfinite().all())):
            raise RuntimeError(f"{precision}, {system.num_atoms} atoms: not finite")
        print(f"step, {precision}: {system.num_atoms} atoms", flush=True)


def priors() -> None:
    """Steps with the kernels of priors: lists of several cutoffs, and all pairs of molecules."""
    potential = make_potential("zbl+d3+reaction_field")
    everywhere, molecules = copy.deepcopy(potential), potential
    everywhere.priors.append(D2(cutoff=6.0))  # type: ignore[attr-defined]
    molecules.priors.append(Coulomb({"H": 0.4, "O": -0.8}))  # type: ignore[attr-defined]
    for system in small_systems():
        periodic = bool(system.pbc.any())
        for one in (everywhere,) if periodic else (everywhere, molecules):
            result = Evaluator(one.cuda(), graphs=False)(system.to("cuda"), stress=bool(system.pbc.any(1).all()))
            assert result.forces is not None
            if not (bool(result.forces.isfinite().all()) and bool(result.energy.isfinite().all())):
                raise RuntimeError(f"{system.num_atoms} atoms: not finite")
        print(f"priors: {system.num_atoms} atoms", flush=True)


def pme() -> None:
    """Steps with Ewald and particle-mesh sums of fixed charges, in periodic boxes of several sizes and one skewed."""
    skewed = water_box(3)
    skewed.cell = skewed.cell + torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [-1.0, 0.8, 0]])
    for system in (water_box(3), skewed, water_box(6)):
        for method in ("ewald", "pme"):
            charges = Coulomb({"H": 0.4, "O": -0.8}, method=method, cutoff=4.5, accuracy=1e-6)
            potential = make_potential()
            potential.priors.append(charges)  # type: ignore[attr-defined]
            evaluator = Evaluator(potential.cuda(), graphs=False)
            result = evaluator(system.to("cuda"), stress=True)
            assert result.forces is not None
            if not (bool(result.forces.isfinite().all()) and bool(result.energy.isfinite().all())):
                raise RuntimeError(f"{method}, {system.num_atoms} atoms: not finite")
            print(f"{method}: {system.num_atoms} atoms", flush=True)


TENSORNET2 = {"model": {"name": "tensornet2", "hidden_channels": 32, "num_layers": 2, "num_rbf": 8}}
AIMNET2 = {"model": {"name": "aimnet2"}, "head": {"name": "scalar", "activation": "gelu"}}


def predicted_charges(config: dict[str, Any]) -> None:
    """Steps of a model that predicts charges, with a prior that reads them."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 6.0}
    potential = Potential.from_config({**config, "priors": [field]}).eval().cuda()
    for system in small_systems():
        evaluator = Evaluator(potential, graphs=False)
        result = evaluator(system.to("cuda"), stress=bool(system.pbc.any(1).all()))
        if not evaluator.fused:
            raise RuntimeError(evaluator.report())
        assert result.forces is not None
        if not (bool(result.forces.isfinite().all()) and bool(result.energy.isfinite().all())):
            raise RuntimeError(f"{system.num_atoms} atoms: not finite")
        print(f"{config['model']['name']}: {system.num_atoms} atoms", flush=True)


def heads() -> None:
    """Steps of TensorNet with a head of charges, which a prior reads."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 6.0}
    config = {"model": {"name": "tensornet", "hidden_channels": 32}, "properties": [{"name": "charges"}]}
    potential = Potential.from_config({**config, "priors": [field]}).eval().cuda()
    for system in (*small_systems(), water_box(6)):
        evaluator = Evaluator(potential, graphs=False)
        result = evaluator(system.to("cuda"), stress=bool(system.pbc.any(1).all()))
        if not evaluator.fused:
            raise RuntimeError(evaluator.report())
        assert result.forces is not None and result.charges is not None
        if not (bool(result.forces.isfinite().all()) and bool(result.charges.isfinite().all())):
            raise RuntimeError(f"{system.num_atoms} atoms: not finite")
        print(f"heads: {system.num_atoms} atoms", flush=True)


def training() -> None:
    """Steps of training, of TensorNet and of TensorNet2 with labelled charges that a prior reads."""
    _training({"name": "tensornet"}, {}, [])
    _training({"name": "tensornet2"}, {"charges": "q"}, [{"name": "coulomb", "charges": "predicted", "damping": "exp"}])


def _training(model: dict[str, Any], keys: dict[str, Any], priors: list[dict[str, Any]]) -> None:
    """A step: kernels of every order, on packed frames, and of validation."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    from torchmdnet2.training.config.config import parse_config
    from torchmdnet2.training.run.setup import make_setup
    from torchmdnet2.training.run.start import make_trainer
    from torchmdnet2.training.steps.loop import pack_trainer

    rng = np.random.default_rng(0)
    frames = []
    for _ in range(14):
        atoms = Atoms("COH2CH", rng.normal(0, 1.5, (6, 3)))
        atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=rng.normal(size=(6, 3)))
        charges = rng.normal(size=6)
        atoms.arrays["q"] = charges - charges.mean()
        frames.append(atoms)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "frames.xyz"
        write(path, frames, format="extxyz")
        config = parse_config(
            {
                "data": {"train": str(path), "keys": keys, "split": {"validation": 4, "test": 0}},
                "model": {**model, "hidden_channels": 32, "num_layers": 2, "num_rbf": 8, "cutoff": 4.0},
                "priors": [{"name": "atomref"}, *priors],
                "training": {"batch_size": 5, "max_epochs": 1, "device": "cuda"},
            }
        )
        trainer = make_trainer(make_setup(config), None)
        if reason := pack_trainer(trainer):
            raise RuntimeError(reason)
        packed = trainer.packed
        assert packed is not None
        packed.training.set_rates([1e-3] * len(trainer.optimizer.param_groups), 0.01)
        for replayed, chosen in ((packed.step, [0, 1, 2, 3, 4]), (packed.step, [5, 6, 7]), (packed.measure, [0, 1, 2])):
            assert replayed is not None
            # what a replay does, launched kernel by kernel
            numbers = chosen + [-1] * (replayed.frames - len(chosen))
            replayed._chosen.copy_(torch.tensor(numbers))
            replayed._run(replayed.warm_up, replayed.capacity(chosen))
            replayed._run(replayed.body, replayed.capacity(chosen))
        packed.check()
        if not bool(packed.training.status[0].isfinite()):
            raise RuntimeError("not finite")
        print(f"training, {model['name']}: loss {float(packed.training.status[0]):.3g}", flush=True)


def md() -> None:
    """The integrators' kernels, launched one by one."""
    from torchmdnet2.md.integrators import AtomConstants, Langevin, VelocityVerlet, maxwell_boltzmann
    from torchmdnet2.md.kernels_gpu import GraphEngine

    potential = Potential.from_config(
        {"model": {"name": "tensornet", "hidden_channels": 32, "num_layers": 1, "num_rbf": 8}, "energy_scale": 1e-3}
    )
    potential = potential.eval().requires_grad_(False).cuda()
    system = System.concatenate([water_box(2)] * 2).to("cuda", dtype=torch.float64)
    masses = torch.tensor([15.999, 1.008, 1.008], dtype=torch.float64).repeat(16)[:, None].cuda()
    atoms = AtomConstants(masses, torch.ones_like(masses), 3 * 24, 2)
    for dynamics in (VelocityVerlet(atoms, 0.5), Langevin(atoms, 0.5, 300.0, 10.0, range(2))):
        engine = GraphEngine(Evaluator(potential, graphs=False).bind(system), dynamics, 2, capture=False)
        engine.begin(maxwell_boltzmann(atoms, 300.0, range(2)))
        engine.launch(4)
        state = engine.collect()
        if not bool(state.pos.isfinite().all()):
            raise RuntimeError("not finite")
        print(f"md: {type(dynamics).__name__}", flush=True)


if __name__ == "__main__":
    groups = {
        "search": search, "step": step, "step_tf32": partial(step, "tf32"), "priors": priors, "pme": pme,
        "heads": heads, "tensornet2": partial(predicted_charges, TENSORNET2),
        "aimnet2": partial(predicted_charges, AIMNET2), "training": training, "md": md,
    }  # fmt: skip
    for name in sys.argv[1:] or groups:
        groups[name]()
    torch.cuda.synchronize()
