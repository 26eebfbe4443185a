"""Compile the kernels for GPUs that are not there, and print the resources that they take.

No GPU is needed: a step is launched on tensors of the CPU, and each launch is compiled instead of run. Printed are the
registers of a thread, bytes of its stack (registers that did not fit), and the shared memory of a block and of the
GPU. A kernel that does not compile or does not fit is an error.

    python scripts/compile_kernels.py --capability 89
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import torchmdnet2.neighbors.triton_search as triton_search
from torchmdnet2 import Potential, load
from torchmdnet2.engine.blocks import BlockModel
from torchmdnet2.engine.fused_step import FusedModel

# bytes of shared memory that a block may have (CUDA programming guide, table of compute capabilities)
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
REGISTERS = 65536  # of a multiprocessor
PROCESSORS = 132
MODELS = ("tensornet", "blocks", "priors", "heads", "tensornet2", "messages", "aimnet2")


class Driver:
    """Replaces the driver of a GPU, as far as compiling needs one."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class Compiled:
    """Compiles launched kernels instead of running them, and keeps the results."""

    def __init__(self, capability: int):
        self.capability = capability
        self.failed = 0
        self._kernels: dict[int, Any] = {}

    @property
    def count(self) -> int:
        return len(self._kernels)

    def launch(self, function: JITFunction, *args: Any, **options: Any) -> None:
        """Replaces a launch."""
        try:
            kernel = function.run(*args, grid=(1,), warmup=True, **options)
        except Exception as error:
            self.failed += 1
            print(f"  {function.__name__:28} does not compile: {str(error)[:200]}")
            return
        if id(kernel) in self._kernels:
            return
        self._kernels[id(kernel)] = kernel
        registers, stack = usage(kernel.asm["cubin"])
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        fits = shared <= SHARED[self.capability] and registers * 32 * warps <= REGISTERS
        self.failed += not fits
        taken = f"{warps:2} warps, {registers:3} registers, {stack:4} B of stack, {shared:6} B shared"
        print(f"  {function.__name__:28} {taken}{'' if fits else ': DOES NOT FIT'}")


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said: {text}")
    return int(found[1]), int(found[2])


def pretend(capability: int) -> Compiled:
    """Compile launches for this capability from now on, and let searches choose as on such a GPU."""
    compiled = Compiled(capability)
    driver.set_active(Driver(capability))  # type: ignore[arg-type]
    JITFunction.__getitem__ = lambda self, grid: partial(compiled.launch, self)  # type: ignore[method-assign]
    # a search may be made on the CPU only for the interpreter, whose block shapes are not wanted here
    triton_search.interpreted = lambda: sys._getframe(1).f_code.co_name == "__init__"
    triton_search.overlap_launches = lambda device: capability >= 90
    triton_search._single_tile = lambda atoms, capacity, device, periodic: triton_search.division(
        atoms, capacity, PROCESSORS, periodic
    )
    return compiled


def inference(capability: int, sizes: list[int], channels: int) -> None:
    """Launch the Evaluator's fused step for structures of these sizes."""
    potential = Potential.from_config({"model": {"name": "tensornet", "hidden_channels": channels}}).eval()
    for precision in ("native", "tf32", "mixed"):
        model = FusedModel(potential, precision)
        model.net.can_overlap = capability >= 90
        for num_atoms in sizes:
            print(f"{precision}, {num_atoms} atoms")
            for dtype, periodic in product((torch.float32, torch.float64), (False, True)):
                model.step(num_atoms, 1, dtype, True, capacity=60 * num_atoms, periodic=periodic).launch()
        for elements in ((8,), (1, 8), (1, 6, 8), (1, 6, 7, 8), (1, 6, 7, 8, 16))[: channels // 20]:
            print(f"{precision}, {max(sizes)} atoms of the elements {elements}")
            shapes = replace(model.net.launch_shapes(max(sizes)), elements=elements)
            model.step(max(sizes), 1, torch.float32, True, capacity=60 * max(sizes), shapes=shapes).launch()
        print(f"{precision}, 4 structures, thin cells")
        model.step(500, 4, torch.float32, True, capacity=30000, thin=True).launch()


def blocks(channels: int) -> None:
    """Launch one block of a step in blocks, with a prior."""
    model = {"name": "tensornet", "hidden_channels": channels}
    potential = Potential.from_config({"model": model, "priors": [{"name": "zbl"}]}).eval()
    for precision, dtype in product(("native", "mixed"), (torch.float32, torch.float64)):
        print(f"{precision}, a block of 5,000 atoms, positions in {dtype}")
        step = BlockModel(potential, precision, 5000).step(20000, 1, dtype, True)
        step._make_buffers(5008)
        step.launch_any()


def priors(capability: int) -> None:
    """Launch steps with the priors that have kernels, of few and of many atoms."""
    charges = {"name": "coulomb", "charges": {"H": 0.4, "O": -0.8}}
    field = {**charges, "method": "reaction_field", "cutoff": 6.0}
    damped = [{**field, "damping": damping} for damping in ("exp", "cosine")]
    d3 = {"name": "d3", "elements": [1, 8], "s8": 1.2177, "a1": 0.4145, "a2": 4.8593, "cutoff": 6.0}
    zbl = [{"name": "zbl"}, {"name": "zbl", "envelope": "covalent"}]
    model = {"name": "tensornet", "hidden_channels": 32}
    listed = [*zbl, {"name": "d2", "cutoff": 6.0}, d3, field, *damped, charges]
    potential = Potential.from_config({"model": model, "priors": listed}).eval()
    fused = FusedModel(potential, "native")
    fused.net.can_overlap = capability >= 90  # type: ignore[attr-defined]
    for num_atoms in (100, 5000):
        print(f"priors, {num_atoms} atoms")
        fused.step(num_atoms, 1, torch.float64, True, capacity=1000).launch()


def heads(capability: int, sizes: list[int], channels: int) -> None:
    """Launch steps of TensorNet with a head of charges, which a prior reads."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 6.0}
    model = {"name": "tensornet", "hidden_channels": channels}
    config = {"model": model, "properties": [{"name": "charges"}], "priors": [field]}
    fused = FusedModel(Potential.from_config(config).eval(), "native")
    fused.net.network.can_overlap = capability >= 90  # type: ignore[attr-defined]
    for num_atoms in sizes:
        print(f"TensorNet with charges, {num_atoms} atoms")
        fused.step(num_atoms, 1, torch.float64, True, capacity=60 * num_atoms).launch()


def messages(sizes: list[int], channels: int) -> None:
    """Launch steps of the models that share the kernels for messages."""
    for name in ("graph_network", "transformer", "equivariant_transformer"):
        torch.manual_seed(1)
        model = {"name": name, "hidden_channels": channels, "num_layers": 1, "num_rbf": 16}
        fused = FusedModel(Potential.from_config({"model": model}).eval(), "native")
        for num_atoms in sizes:
            print(f"{name}, {num_atoms} atoms")
            fused.step(num_atoms, 1, torch.float32, True, capacity=60 * num_atoms).launch()


def tensornet2(capability: int, sizes: list[int], channels: int) -> None:
    """Launch steps of TensorNet2 with a prior that reads its charges; of few and of many edges."""
    field = {"name": "coulomb", "charges": "predicted", "method": "reaction_field", "cutoff": 6.0}
    for group in ("O(3)", "SO(3)"):
        model = {"name": "tensornet2", "hidden_channels": channels, "group": group}
        potential = Potential.from_config({"model": model, "priors": [field]}).eval()
        fused = FusedModel(potential, "native")
        fused.net.can_overlap = capability >= 90  # type: ignore[attr-defined]
        for num_atoms in sizes:
            print(f"TensorNet2, {group}, {num_atoms} atoms")
            fused.step(num_atoms, 1, torch.float64, True, capacity=60 * num_atoms).launch()


def aimnet2(capability: int, sizes: list[int]) -> None:
    """Launch steps of the shipped potential, whose priors count all pairs."""
    for precision in ("native", "mixed"):
        fused = FusedModel(load("aimnet2"), precision)
        fused.net.can_overlap = capability >= 90  # type: ignore[attr-defined]
        for num_atoms in sizes:
            print(f"AIMNet2, {precision}, {num_atoms} atoms")
            fused.step(num_atoms, 1, torch.float64, True, capacity=60 * num_atoms).launch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=89, choices=sorted(SHARED))
    parser.add_argument("--atoms", type=int, nargs="+", default=[22, 166, 1029, 2489, 10125])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options = parser.parse_args()
    print(f"triton {triton.__version__}, compute capability {options.capability / 10}")
    compiled = pretend(options.capability)
    if "tensornet" in options.models:
        inference(options.capability, options.atoms, options.channels)
    if "blocks" in options.models:
        blocks(options.channels)
    if "priors" in options.models:
        priors(options.capability)
    if "heads" in options.models:
        heads(options.capability, options.atoms, options.channels)
    if "tensornet2" in options.models:
        tensornet2(options.capability, options.atoms, options.channels)
    if "messages" in options.models:
        messages([22, 1029], options.channels)
    if "aimnet2" in options.models:
        aimnet2(options.capability, options.atoms)
    print(f"{compiled.count} kernels, {compiled.failed} do not compile or do not fit")
    return int(compiled.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
