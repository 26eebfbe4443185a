"""Time whole steps of the models without fused kernels on one GPU: captured autograd, and compiled.

    python -m scripts.bench models [--systems FOLDER] [--output FILE] [--minutes 3]

Each row is a step by replay of one CUDA graph (neighbor search, network, autograd, sums) in float32. Ways:

* replay: the step of `Evaluator.bind`.
* autograd: the whole potential by captured autograd.
* indexed: as autograd, with rows taken by an index, x[index], whose derivative sorts the edges; up to 2,000 atoms.
* joint: energies and gradients traced together (make_fx) and compiled by Inductor as one function.
* split: the energies compiled by torch.compile, which divides forward and backward and recomputes what is cheap.
* shapes H/E/B/W: kernels for messages with H heads, E edges (B backward) and W warps in a program.
* torchmd-net eager, graph: the peer with the same weights, where it is installed; it captures TensorNet2 only.

Errors are the largest against the Potential in float64, up to 2,000 atoms: of a force, eV/Å, beside the largest force,
and of the energy, relative. "first_s" is the time to the first result, compilation included. Each model runs in a
separate process; a lock keeps the timed replays apart.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import gc
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchmdnet2 import Evaluator, Potential, System
from torchmdnet2.engine.autograd_term import PaddedList
from torchmdnet2.neighbors.pairs import PairLists

from .harness import Row, again, save_rows, shared
from .peer import peer_step
from .systems import forget, once, peak, read_pdb, synchronize, timed, water_box

SIZE = {"hidden_channels": 128, "num_layers": 6, "num_rbf": 64, "cutoff": 5.0, "max_z": 128}
TENSORNET2 = {"name": "tensornet2", **SIZE, "num_rbf": 32, "q_dim": 16, "exact_charge": False}
# in the form that TorchMD-Net has too: for the same weights
MODELS: dict[str, dict[str, Any]] = {
    "equivariant_transformer": {
        "model": {"name": "equivariant_transformer", **SIZE}, "head": {"name": "equivariant_scalar"},
    },
    "transformer": {"model": {"name": "transformer", **SIZE}},
    "graph_network": {"model": {"name": "graph_network", **SIZE}},
    "tensornet2 L=1": {"model": {**TENSORNET2, "num_layers": 1}},
    "tensornet2 L=2": {"model": {**TENSORNET2, "num_layers": 2}},
}  # fmt: skip
EXACT_UP_TO = 2000  # atoms; in float64
SHAPES = [
    f"shapes {s}" for s in ("8/4/2/4", "8/8/4/4", "8/2/1/4", "8/4/2/8", "4/4/2/2", "4/8/4/4", "2/8/4/2", "1/8/4/1")
]
WAYS = ("replay", "autograd", "indexed", "joint", "split", "torchmd-net graph", "torchmd-net eager")


# --- a step as one compiled function ---------------------------------------------------------------------------------


class Network:
    """Energies and forces as a function of tensors alone, on the static buffers of a step."""

    def __init__(self, step: Any):
        self.step, self.potential = step, step.potential
        self.num_systems = step._system.num_systems

    def inputs(self) -> list[Tensor]:
        """The inputs of a step after its search."""
        step, system = self.step, self.step._system
        search = step.search
        search(step.pos, step.cell, step.pbc)
        capacity, last = search.capacity, search.row_ptr.shape[0] - 1
        taken = torch.arange(capacity, device=search.receiver.device) < search.row_ptr[-1]
        receiver = torch.where(taken, search.receiver, last).int()
        sender = torch.where(taken, search.sender, last + 1).int()
        shift = torch.where(taken[:, None], search.shift, 0).int()
        rows = torch.cat([search.row_ptr, search.row_ptr.new_full((system.num_atoms - last,), capacity)])
        return [
            system.pos, system.cell, system.z, system.batch, system.pbc, system.charge, system.spin,
            receiver, sender, shift, rows,
        ]  # fmt: skip

    def energies(self, *inputs: Tensor) -> Tensor:
        """[N] eV, differentiable in the positions."""
        pos, cell, z, batch, pbc, charge, spin, receiver, sender, shift, rows = inputs
        system = System(z=z, pos=pos, batch=batch, cell=cell, pbc=pbc, charge=charge, spin=spin)
        neighbors = PaddedList(torch.stack([receiver, sender]), shift, rows, self.potential.cutoff)
        lists = PairLists(system, {self.potential.cutoff: neighbors})
        return self.potential._evaluate(system, lists, self.step.isolated)[0]

    def energies_and_forces(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[N] eV and [N, 3] eV/Å."""
        with torch.enable_grad():
            pos = inputs[0].detach().requires_grad_()
            energies = self.energies(pos, *inputs[1:])
            (gradient,) = torch.autograd.grad(energies.sum(), pos)
        return energies.detach(), -gradient


def compiled(network: Network, way: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Energies and forces as compiled code; see the ways above."""
    torch._dynamo.reset()
    if way == "split":
        energies = torch.compile(network.energies, dynamic=False, fullgraph=True)

        def step(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                pos = inputs[0].detach().requires_grad_()
                found = energies(pos, *inputs[1:])
                return found.detach(), -torch.autograd.grad(found.sum(), pos)[0]

        return step
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [t.clone() for t in network.inputs()]
    # without computing: the reference takes much memory
    traced = make_fx(network.energies_and_forces, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return torch.compile(traced, dynamic=False, fullgraph=True)


def replay(step: Callable[[], Any]) -> Callable[[], None]:
    """The step as one CUDA graph (on a CPU: the step itself)."""
    if not torch.cuda.is_available():
        return step
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


class Indexed(TorchFunctionMode):
    """Replaces index_select of features by an index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_select and args[0].requires_grad and args[0].shape[-1] != 3:
            return args[0][args[2]]
        return func(*args, **(kwargs or {}))


# --- rows ------------------------------------------------------------------------------------------------------------


def errors(exact: dict[str, Tensor], forces: Tensor, energy: Tensor | None) -> Row:
    if not exact:
        return {}
    row = {
        "force_error": float((forces.detach().double() - exact["forces"]).abs().max()),
        "largest_force": float(exact["forces"].abs().max()),
    }
    if energy is not None:
        row["energy_error"] = abs(float(energy.double().sum() / exact["energy"].sum()) - 1)
    return row


def run(potential: Potential, system: System, way: str, lock: Callable[[], Any], exact: dict[str, Tensor]) -> Row:
    """One row."""
    forget()
    if way.startswith("torchmd-net"):
        (step, forces), first = once(lambda: (lambda s: (s, s()))(peer_step(potential, system, way.split()[1])))
        energy = None
    elif way in ("autograd", "indexed"):
        with lock(), Indexed() if way == "indexed" else contextlib.nullcontext():
            held_step = make_step(potential, system)
            _, first = once(held_step.launch)
            step = replay(held_step.launch)
            step()
        forces, energy = held_step.out.forces, held_step.out.energy
    elif way.startswith("shapes"):
        step, forces, energy, first = shaped(potential, system, way.split()[1])
    elif way == "replay":
        with lock():
            bound, first = once(lambda: Evaluator(potential, graphs=True).bind(system))
        step, forces, energy = bound.replay, bound.forces, bound.energy
        if not bound.check():
            raise RuntimeError("the edges did not fit")
    else:
        started = time.perf_counter()
        network = Network(make_step(potential, system))
        function = compiled(network, way)
        held: dict[str, Tensor] = {}

        def whole() -> None:
            with torch.no_grad():
                energies, gradient = function(*network.inputs())
                n = system.num_atoms
                held.setdefault("energies", torch.zeros_like(energies)).copy_(energies)
                held.setdefault("forces", torch.zeros_like(gradient)).copy_(gradient)
                held["energy"] = held["energies"][:n]
                held["atom forces"] = held["forces"][:n]

        whole()
        synchronize()
        first = time.perf_counter() - started
        with lock():
            step = replay(whole)
        step()
        forces, energy = held["atom forces"], held["energy"]
    with lock():
        row = {"way": way, "first_s": first, **timed(step, seconds=0.3)}
    return {**row, **errors(exact, forces, energy), "peak_GB": peak()}


def shaped(potential: Potential, system: System, shapes: str) -> tuple[Callable[[], Any], Tensor, Tensor, float]:
    """A step with other launch shapes: function that replays it, forces, energy, seconds of the first launch."""
    from torchmdnet2.engine.fused_step import FusedModel
    from torchmdnet2.models.message_passing.gpu import LaunchShapes

    if id(potential) not in _MODELS:
        _MODELS[id(potential)] = FusedModel(potential, "native")
    model = _MODELS[id(potential)]
    sizes = LaunchShapes(*map(int, shapes.split("/")))
    step = model.step(system.num_atoms, system.num_systems, system.dtype, False, shapes=sizes)
    graphed, _ = model._loaded(step, system)
    graphed.capture()
    _, first = once(graphed.run)
    return graphed.run, step.out.forces, step.out.energy, first


_MODELS: dict[int, Any] = {}


def make_step(potential: Potential, system: System) -> Any:
    """A step of captured autograd with enough capacity for the edges."""
    from torchmdnet2.engine.autograd_step import AutogradStep

    isolated = potential.isolated_energies().detach()
    step = AutogradStep(potential, isolated, [potential.cutoff], system, False, 1.0)
    step.pos.copy_(system.pos)
    step.cell.copy_(system.cell)
    step.make_room()
    return step


def systems(options: argparse.Namespace) -> Iterator[tuple[str, System]]:
    path = Path(options.systems or ".") / "alanine_dipeptide.pdb"
    if path.exists():
        yield "alanine dipeptide", read_pdb(path)
    for side in map(int, filter(None, options.water.split(","))):
        yield f"water {3 * side**3}", water_box(side)


def run_model(name: str, options: argparse.Namespace) -> None:
    """All rows of one model, as JSON lines."""
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    potential = Potential.from_config(MODELS[name]).eval().requires_grad_(False).to(options.device)
    ours = [way for way in options.ways.split(",") if not way.startswith("torchmd-net")]
    peers = [way for way in options.ways.split(",") if way.startswith("torchmd-net")]

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        with open(options.lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            synchronize()

    for label, system in systems(options):
        system = system.to(options.device)
        exact: dict[str, Tensor] = {}
        if system.num_atoms <= EXACT_UP_TO:
            result = copy.deepcopy(potential).double()(system.to(dtype=torch.float64))
            exact = {"forces": result.forces, "energy": result.energy}
            del result
        for way in [*ours, *peers]:
            row: Row = {"model": name, "system": label, "atoms": system.num_atoms}
            if time.time() > options.deadline:
                row |= {"way": way, "error": "the time was over"}
            elif way == "indexed" and system.num_atoms > 2000:
                continue
            elif way.startswith("shapes") and "tensornet2" in name:
                continue
            else:
                try:
                    row |= run(potential, system, way, lock, exact)
                except Exception as error:  # another program is timed too
                    row |= {"way": way, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            with open(options.rows, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def table(rows: list[Row]) -> str:
    lines = [
        f"{'model':24s} {'system':18s} {'way':18s} {'ms':>9s} {'GB':>6s} {'force err':>10s} {'rel. E':>9s} first s"
    ]
    for row in sorted(rows, key=lambda r: (r["model"], r["atoms"])):
        start = f"{row['model']:24s} {row['system']:18s} {row['way']:18s}"
        if "error" in row:
            lines.append(f"{start} {row['error'][:90]}")
        else:
            force = f"{row['force_error']:10.1e}" if "force_error" in row else 10 * " "
            energy = f"{row['energy_error']:9.1e}" if "energy_error" in row else 9 * " "
            lines.append(f"{start} {row['ms']:9.3f} {row['peak_GB']:6.2f} {force} {energy} {row['first_s']:.1f}")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    shared(parser, device="cuda", systems=None, water="7,15", minutes=3.0, output=None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join([*WAYS, *SHAPES]))
    for name in ("--model", "--rows", "--lock"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.model:
        run_model(options.model, options)
        return
    end = time.time() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as work:
        running = []
        for k, name in enumerate(options.models.split(",")):
            # as many compiling threads as there are cores for each model
            environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
            command = again("models", "--model", name, "--rows", f"{work}/{k}", "--lock", f"{work}/lock")
            command += ["--deadline", str(end - 20), "--device", options.device, "--water", options.water]
            command += ["--ways", options.ways, *(["--systems", str(options.systems)] if options.systems else [])]
            running.append(subprocess.Popen(command, env=environment))
        for process in running:
            try:
                process.wait(max(1.0, end - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
        files = [Path(work) / str(k) for k in range(len(running))]
        rows = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    save_rows(options.output, rows, {"models": MODELS})
    print(table(rows))
